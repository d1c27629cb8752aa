//! Brings pages into memory before somebody locks them, on several threads: one thread zeroes a few GB a second, and a driver that locks pages
//! that are not there brings them in one after the other.
//!
//! Owns: the threads, and how a page is touched on kernels that cannot be asked. Must not know: what the pages are for.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use super::input::page_size;
use crate::error::{Error, Result};

/// Bytes of one request: a multiple of the huge page, and few enough that a stop is heeded soon.
const BLOCK: usize = 32 << 20;

/// More threads only wait for the same memory.
const MOST_THREADS: usize = 16;

/// Longest time between two reports of progress.
const TICK: Duration = Duration::from_millis(100);

/// What pages are brought in for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Touch {
    /// To be written: fresh memory, of which nothing is lost if it is stored to.
    Write,
    /// To be read: pages of a file.
    Read,
}

/// Brings in `len` bytes at `base`, a page boundary. `go_on` is called on this thread every 100 ms with the bytes that are there; false stops it.
/// The result says whether all are there.
///
/// # Errors
/// If the kernel cannot: no memory, or the file has become shorter.
///
/// # Safety
/// The range must be mapped, and for [`Touch::Write`] hold nothing that anybody needs.
pub(super) unsafe fn populate(base: *mut u8, len: usize, touch: Touch, go_on: &mut dyn FnMut(u64) -> bool) -> Result<bool> {
    let blocks = len.div_ceil(BLOCK);
    let (next, done, stop) = (AtomicUsize::new(0), AtomicU64::new(0), AtomicBool::new(false));
    let range = Range(base);
    let work = || -> Result<()> {
        while !stop.load(Ordering::Relaxed) {
            let block = next.fetch_add(1, Ordering::Relaxed);
            if block >= blocks {
                break;
            }
            let at = block * BLOCK;
            let n = BLOCK.min(len - at);
            // SAFETY: a part of the caller's range, which no other thread has.
            unsafe { bring_in(range.at(at), n, touch) }.inspect_err(|_| stop.store(true, Ordering::Relaxed))?;
            done.fetch_add(n as u64, Ordering::Relaxed);
        }
        Ok(())
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS).min(blocks);
    let (ended, endings) = mpsc::channel::<Result<()>>();
    std::thread::scope(|scope| -> Result<()> {
        let mut started = 0;
        for _ in 0..if threads > 1 { threads } else { 0 } {
            let (sender, work) = (ended.clone(), &work);
            let body = move || {
                // The receiver waits for every thread.
                let _ = sender.send(work());
            };
            started += usize::from(std::thread::Builder::new().name("berth-pages".into()).spawn_scoped(scope, body).is_ok());
        }
        if started == 0 {
            return work();
        }
        drop(ended);
        let mut failed = Ok(());
        loop {
            match endings.recv_timeout(TICK) {
                Ok(result) => failed = failed.and(result),
                Err(mpsc::RecvTimeoutError::Disconnected) => return failed,
                Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
            if !go_on(done.load(Ordering::Relaxed)) {
                stop.store(true, Ordering::Relaxed);
            }
        }
    })?;
    Ok(done.into_inner() == len as u64)
}

/// Where it starts, for several threads.
struct Range(*mut u8);

// SAFETY: each thread has blocks of its own of what lies there.
unsafe impl Sync for Range {}

impl Range {
    fn at(&self, offset: usize) -> *mut u8 {
        self.0.wrapping_add(offset)
    }
}

/// # Safety
/// As [`populate`].
unsafe fn bring_in(base: *mut u8, len: usize, touch: Touch) -> Result<()> {
    let advice = if touch == Touch::Write { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
    loop {
        // SAFETY: the range is mapped; pages that are there stay as they are.
        if unsafe { libc::madvise(base.cast(), len, advice) } == 0 {
            return Ok(());
        }
        let cause = std::io::Error::last_os_error();
        match cause.raw_os_error() {
            Some(libc::EINTR | libc::EAGAIN) => {}
            // Before Linux 5.14. Pages of a file are left to whoever locks them: a load from one that has become shorter would raise SIGBUS.
            Some(libc::EINVAL) => {
                // SAFETY: by the caller's promise.
                unsafe { store(base, if touch == Touch::Write { len } else { 0 }) };
                return Ok(());
            }
            _ => return Err(Error::os(format_args!("bring {len} bytes into memory"), &cause)),
        }
    }
}

/// # Safety
/// `len` bytes at `base` must be writable and hold nothing.
unsafe fn store(base: *mut u8, len: usize) {
    for at in (0..len).step_by(page_size()) {
        // SAFETY: by the caller's promise.
        unsafe { base.add(at).write_volatile(0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::pageable::Pageable;

    fn resident(base: *mut u8, len: usize) -> usize {
        let mut pages = vec![0u8; len.div_ceil(page_size())];
        // SAFETY: the vector has a byte for each page.
        assert_eq!(unsafe { libc::mincore(base.cast(), len, pages.as_mut_ptr()) }, 0);
        pages.iter().filter(|p| **p & 1 == 1).count() * page_size()
    }

    #[test]
    fn every_page_of_the_range_is_there_and_it_can_be_stopped() {
        const LEN: usize = 5 * BLOCK + 4096;
        for store_only in [false, true] {
            let memory = Pageable::new(LEN + BLOCK).unwrap();
            assert_eq!(resident(memory.base(), LEN), 0);
            if store_only {
                // SAFETY: fresh memory of this test.
                unsafe { store(memory.base(), LEN) };
            } else {
                // SAFETY: likewise.
                assert!(unsafe { populate(memory.base(), LEN, Touch::Write, &mut |_| true) }.unwrap());
            }
            assert_eq!(resident(memory.base(), LEN), LEN);
        }
        let memory = Pageable::new(1 << 30).unwrap();
        // SAFETY: likewise. One thread does not ask, so there must be two.
        let whole = unsafe { populate(memory.base(), 1 << 30, Touch::Write, &mut |_| false) }.unwrap();
        assert!(std::thread::available_parallelism().map_or(1, usize::from) == 1 || !whole);
    }

    #[test]
    fn pages_that_a_file_has_lost_are_an_error_and_no_signal() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        // SAFETY: a test's own file, read by nobody.
        let map = unsafe { memmap2::MmapOptions::new().map(&file) }.unwrap();
        file.set_len(4096).unwrap();
        // SAFETY: the range is mapped.
        let result = unsafe { populate(map.as_ptr().cast_mut(), 1 << 20, Touch::Read, &mut |_| true) };
        // Kernels before 5.14 leave it to whoever locks the pages.
        assert!(result.is_err() || result == Ok(true), "{result:?}");
    }
}
