//! Keeps the dirty bytes of a file-backed region bounded: what was written is sent to the disk as the region fills.
//!
//! Owns: which ranges are on their way, and when a writer has to wait for one. The kernel bounds dirty pages by the whole machine's memory; a
//! version 1 cgroup has no such bound of its own and kills a process whose pages are all dirty. Must not know: who writes, what the bytes mean.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::system;

/// Bytes after which write-back of them is started.
const STEP: usize = 64 << 20;

/// Less than this is left to the kernel at the end of a tensor.
const WORTH_A_CALL: usize = 1 << 20;

/// The state of one file.
pub(super) struct Writeback {
    step: usize,
    /// Bytes that may be on their way before a writer waits.
    window: usize,
    gathered: Mutex<Gathered>,
    on_their_way: Mutex<OnTheirWay>,
}

/// Written, not yet sent: so many bytes, all of them in the range.
#[derive(Default)]
struct Gathered {
    bytes: usize,
    range: Range<u64>,
}

impl Gathered {
    fn add(&mut self, start: u64, len: usize) {
        let end = start.saturating_add(len as u64);
        self.range = if self.bytes == 0 { start..end } else { self.range.start.min(start)..self.range.end.max(end) };
        self.bytes = self.bytes.saturating_add(len);
    }
}

/// Sent, perhaps not yet on the disk. Oldest first.
#[derive(Default)]
struct OnTheirWay {
    bytes: usize,
    ranges: VecDeque<Gathered>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Writeback {
    /// For a file in a process with this machine's and this cgroup's memory.
    pub(super) fn new() -> Writeback {
        Writeback::with_window(window(room()))
    }

    fn with_window(window: usize) -> Writeback {
        let (gathered, on_their_way) = (Mutex::default(), Mutex::default());
        Writeback { step: step_of(window), window, gathered, on_their_way }
    }

    /// Takes note of `len` bytes written at `start` of the file, and waits if too many are dirty.
    pub(super) fn written(&self, file: impl AsFd, start: u64, len: usize) {
        let due = {
            let mut gathered = lock(&self.gathered);
            gathered.add(start, len);
            (gathered.bytes >= self.step).then(|| std::mem::take(&mut *gathered))
        };
        if let Some(due) = due {
            self.send(file.as_fd(), due);
        }
    }

    /// Sends what was gathered, if it is worth a call. For the end of a tensor.
    pub(super) fn flush(&self, file: impl AsFd) {
        let due = {
            let mut gathered = lock(&self.gathered);
            (gathered.bytes >= WORTH_A_CALL).then(|| std::mem::take(&mut *gathered))
        };
        if let Some(due) = due {
            self.send(file.as_fd(), due);
        }
    }

    fn send(&self, file: BorrowedFd<'_>, due: Gathered) {
        // Held while waiting, so that other threads of this file wait too as soon as they have a step of their own.
        let mut way = lock(&self.on_their_way);
        sync(file, &due.range, libc::SYNC_FILE_RANGE_WRITE);
        way.bytes += due.bytes;
        way.ranges.push_back(due);
        const COMPLETE: u32 = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
        while way.bytes > self.window {
            let Some(oldest) = way.ranges.pop_front() else { break };
            sync(file, &oldest.range, COMPLETE);
            way.bytes -= oldest.bytes;
        }
    }
}

/// What this machine has free, and this cgroup may use.
fn room() -> u64 {
    system::ram().map_or(u64::MAX, |r| r.available).min(system::cgroup_limit().unwrap_or(u64::MAX))
}

fn step_of(window: usize) -> usize {
    STEP.min(window / 4).max(1)
}

/// Dirty bytes at which write-back of what others store should start: half of what may be on its way.
pub(super) fn half_window() -> usize {
    window(room()) / 2
}

/// Bytes of the file that are dirty; `None` before Linux 6.5.
pub(super) fn dirty(file: BorrowedFd<'_>) -> Option<u64> {
    cache_of(file).map(|[_, dirty, ..]| dirty)
}

/// What the page cache holds of a file, in bytes: all, dirty, being written, and what was evicted.
fn cache_of(file: BorrowedFd<'_>) -> Option<[u64; 5]> {
    const CACHESTAT: i64 = 451;
    let (range, mut found) = ([0u64; 2], [0u64; 5]);
    // SAFETY: `cachestat_range` is two, `cachestat` five u64; length 0 means the whole file.
    let result = unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), range.as_ptr(), found.as_mut_ptr(), 0) };
    let page = super::input::page_size() as u64;
    (result == 0).then(|| found.map(|pages| pages.saturating_mul(page)))
}

/// How many bytes may be dirty when there is room for so many: an eighth of it, so that most of it stays free for what is read.
fn window(room: u64) -> usize {
    const LEAST: u64 = 8 << 20;
    const MOST: u64 = 1 << 30;
    (room / 8).clamp(LEAST, MOST) as usize
}

/// Advice: where it fails the kernel writes the pages back sooner or later anyway.
fn sync(file: BorrowedFd<'_>, range: &Range<u64>, flags: u32) {
    let (Ok(start), Ok(len)) = (i64::try_from(range.start), i64::try_from(range.end.saturating_sub(range.start))) else { return };
    // Length 0 would mean "to the end of the file".
    if len > 0 {
        // SAFETY: the descriptor is open.
        unsafe { libc::sync_file_range(file.as_raw_fd(), start, len, flags) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// Bytes of the file that are dirty or being written.
    fn not_on_disk(file: &std::fs::File) -> Option<u64> {
        cache_of(file.as_fd()).map(|[_, dirty, written, ..]| dirty + written)
    }

    #[test]
    fn no_more_than_the_window_is_ever_dirty() {
        const MIB: usize = 1 << 20;
        let mut file = tempfile::tempfile_in(std::env::temp_dir()).unwrap();
        if system::file_system(&std::env::temp_dir()).is_none_or(|f| f == "tmpfs") || not_on_disk(&file).is_none() {
            eprintln!("SKIPPED: needs a disk under the temporary directory and Linux 6.5");
            return;
        }
        let writeback = Writeback::with_window(8 * MIB);
        let mut most = 0;
        for i in 0..64u8 {
            file.write_all(&vec![i; MIB]).unwrap();
            writeback.written(&file, u64::from(i) * MIB as u64, MIB);
            most = most.max(not_on_disk(&file).unwrap());
        }
        // Eight on their way, and up to two gathered.
        assert!(most <= 10 * MIB as u64, "{most} bytes were dirty");
        writeback.flush(&file);
        assert!(lock(&writeback.on_their_way).bytes <= 8 * MIB);
    }

    #[test]
    fn little_is_left_to_the_kernel() {
        let file = tempfile::tempfile().unwrap();
        let writeback = Writeback::with_window(64 << 20);
        writeback.written(&file, 0, 4096);
        writeback.flush(&file);
        assert_eq!((lock(&writeback.gathered).bytes, lock(&writeback.on_their_way).bytes), (4096, 0));
    }

    #[test]
    fn the_window_follows_the_memory_there_is() {
        assert_eq!(window(0), 8 << 20);
        assert_eq!(window(3 << 30), 384 << 20);
        assert_eq!(window(u64::MAX), 1 << 30);
        assert_eq!(Writeback::with_window(window(u64::MAX)).step, STEP);
    }
}
