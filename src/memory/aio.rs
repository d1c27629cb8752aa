//! Reads that go on while nobody waits: the kernel's own asynchronous reads (`io_submit`), for files that are open for direct reads.
//!
//! Owns: the four system calls and their structures, as linux/aio_abi.h has them. Must not know: what is read, or why.
//!
//! Not io_uring: containers forbid it by default (Docker since 23.0), these calls they do not. For direct reads of hundreds of KiB both cost the
//! same, nearly all of it for pinning the pages that are read into.

use std::ffi::{c_int, c_long, c_ulong};
use std::os::fd::RawFd;
use std::time::Duration;

/// Most reads that are handed over, and most results that are taken, by one system call.
pub const BATCH: usize = 32;

/// `IOCB_CMD_PREAD`.
const PREAD: u16 = 0;

/// `struct iocb`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Request {
    data: u64,
    /// The key and the flags, both 0; which comes first depends on the byte order.
    key_and_flags: [u32; 2],
    opcode: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    event_fd: u32,
}

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Event {
    data: u64,
    request: u64,
    result: i64,
    result2: i64,
}

const _: () = assert!(size_of::<Request>() == 64 && size_of::<Event>() == 32);

/// One read.
#[derive(Clone, Copy, Debug)]
pub struct Read {
    /// A file that was opened with `O_DIRECT`, and stays open until the result is there. Of others, handing over waits for the data.
    pub fd: RawFd,
    /// Where in the file, a multiple of its block size.
    pub offset: u64,
    /// Where to, likewise aligned.
    pub to: *mut u8,
    /// How many bytes, likewise.
    pub len: usize,
    /// Comes back with the result.
    pub tag: u64,
}

/// What became of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// That of the read.
    pub tag: u64,
    /// Bytes read, or the number of the error.
    pub result: Result<usize, c_int>,
}

/// Reads that have been handed over to the kernel. A child that was forked has none, and every call says so.
#[derive(Debug)]
pub struct Queue {
    context: c_ulong,
}

impl Queue {
    /// Room for this many reads at a time.
    ///
    /// # Errors
    /// The number of the error: `ENOSYS` or `EPERM` where there are no such reads, `EAGAIN` if all of `fs.aio-max-nr` is taken.
    pub fn new(depth: u32) -> Result<Queue, c_int> {
        let mut context: c_ulong = 0;
        // SAFETY: the call writes one number.
        match unsafe { libc::syscall(libc::SYS_io_setup, c_long::from(depth), &raw mut context) } {
            0 => Ok(Queue { context }),
            _ => Err(last_error()),
        }
    }

    /// Hands over reads, in their order; returns how many the kernel took, and why not the next one.
    ///
    /// # Safety
    /// Until a read that was taken is done, its memory must stay, and nobody else may use it.
    pub unsafe fn submit(&self, reads: &[Read]) -> (usize, Option<c_int>) {
        let mut taken = 0;
        while taken < reads.len() {
            let part = &reads[taken..reads.len().min(taken + BATCH)];
            let mut requests = [Request::default(); BATCH];
            for (request, read) in requests.iter_mut().zip(part) {
                let (Ok(fd), Ok(offset)) = (u32::try_from(read.fd), i64::try_from(read.offset)) else { return (taken, Some(libc::EINVAL)) };
                let (buffer, bytes) = (read.to.expose_provenance() as u64, read.len as u64);
                *request = Request { data: read.tag, opcode: PREAD, fd, buffer, bytes, offset, ..Request::default() };
            }
            let pointers: [*mut Request; BATCH] = std::array::from_fn(|i| &raw mut requests[i]);
            // SAFETY: as many pointers to whole requests, which the kernel copies; what it writes to is the caller's word.
            let result = unsafe { libc::syscall(libc::SYS_io_submit, self.context, part.len() as c_long, pointers.as_ptr()) };
            match usize::try_from(result) {
                Ok(0) => return (taken, Some(libc::EAGAIN)),
                Ok(n) => taken += n,
                Err(_) => match last_error() {
                    libc::EINTR => {}
                    error => return (taken, Some(error)),
                },
            }
        }
        (taken, None)
    }

    /// Waits until a read is done, at most for this long, and passes on those that are.
    ///
    /// # Errors
    /// The number of the error; then nothing will ever be done.
    pub fn wait(&self, at_most: Duration, mut each: impl FnMut(Done)) -> Result<(), c_int> {
        let mut events = [Event::default(); BATCH];
        let mut time =
            libc::timespec { tv_sec: libc::time_t::try_from(at_most.as_secs()).unwrap_or(1), tv_nsec: at_most.subsec_nanos().into() };
        let (least, most): (c_long, c_long) = (1, BATCH as c_long);
        // SAFETY: room for as many events as are asked for.
        let result = unsafe { libc::syscall(libc::SYS_io_getevents, self.context, least, most, events.as_mut_ptr(), &raw mut time) };
        match usize::try_from(result) {
            Ok(count) => {
                for event in &events[..count.min(BATCH)] {
                    let result = usize::try_from(event.result).map_err(|_| c_int::try_from(-event.result).unwrap_or(libc::EIO));
                    each(Done { tag: event.data, result });
                }
                Ok(())
            }
            Err(_) => match last_error() {
                libc::EINTR => Ok(()),
                error => Err(error),
            },
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // Waits for what is on its way: after it no memory is written to any more.
        // SAFETY: the context is ours, and given up once. Of one that is no more the kernel says so.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

#[cfg(test)]
impl Queue {
    /// One that the kernel does not know, as those of its parent are in a child that was forked.
    pub(super) const UNKNOWN: Queue = Queue { context: 0 };
}

fn last_error() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::memory::pageable::Pageable;
    use crate::memory::testing::Sample;

    const PIECE: usize = 64 << 10;

    fn queue() -> Option<Queue> {
        Queue::new(64).inspect_err(|e| eprintln!("SKIPPED: no asynchronous reads here (error {e})")).ok()
    }

    fn collect(queue: &Queue, count: usize) -> Vec<Done> {
        let mut all = Vec::new();
        while all.len() < count {
            queue.wait(Duration::from_secs(60), |done| all.push(done)).unwrap();
        }
        all.sort_by_key(|d| d.tag);
        all
    }

    #[test]
    fn many_reads_bring_every_byte_to_its_place_and_the_last_ends_with_the_file() {
        let Some(queue) = queue() else { return };
        let count = BATCH + 9;
        let sample = Sample::new("aio", count * PIECE - 1000);
        let file = sample.open();
        let memory = Pageable::new(count * PIECE).unwrap();
        // Backwards, so that place and order differ.
        let read = |i: usize| Read {
            fd: file.as_raw_fd(),
            offset: (i * PIECE) as u64,
            to: memory.base().wrapping_add((count - 1 - i) * PIECE),
            len: PIECE,
            tag: i as u64,
        };
        let reads: Vec<Read> = (0..count).map(read).collect();
        // SAFETY: the memory is there until all are done, and nobody uses it.
        assert_eq!(unsafe { queue.submit(&reads) }, (count, None));
        let done = collect(&queue, count);
        for (i, done) in done.iter().enumerate() {
            let len = if i == count - 1 { PIECE - 1000 } else { PIECE };
            assert_eq!(*done, Done { tag: i as u64, result: Ok(len) });
            // SAFETY: all reads are done.
            let bytes = unsafe { std::slice::from_raw_parts(reads[i].to, len) };
            assert!(bytes == &sample.bytes[i * PIECE..][..len], "{i}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_an_error_with_its_number() {
        let Some(queue) = queue() else { return };
        let sample = Sample::new("aio-errors", PIECE);
        let (file, for_writing) = (sample.open(), sample.open_to_write());
        let memory = Pageable::new(PIECE).unwrap();
        let read = |fd, offset| Read { fd, offset, to: memory.base(), len: PIECE, tag: 7 };
        // SAFETY: the memory is there, and nobody uses it.
        unsafe {
            assert_eq!(queue.submit(&[read(-1, 0)]), (0, Some(libc::EINVAL)));
            assert_eq!(queue.submit(&[read(file.as_raw_fd(), u64::MAX)]), (0, Some(libc::EINVAL)));
            assert_eq!(queue.submit(&[read(for_writing.as_raw_fd(), 0)]), (0, Some(libc::EBADF)));
            assert_eq!(queue.submit(&[read(file.as_raw_fd(), 1 << 40)]), (1, None));
        }
        assert_eq!(collect(&queue, 1), [Done { tag: 7, result: Ok(0) }], "behind the end");
        let nowhere = Read { to: std::ptr::without_provenance_mut(4096), ..read(file.as_raw_fd(), 0) };
        // SAFETY: nothing can be written there.
        let (taken, error) = unsafe { queue.submit(&[nowhere]) };
        let error = error.or_else(|| collect(&queue, taken)[0].result.err());
        assert_eq!(error, Some(libc::EFAULT));
        let start = std::time::Instant::now();
        queue.wait(Duration::from_millis(5), |done| panic!("{done:?}")).unwrap();
        assert!(start.elapsed() >= Duration::from_millis(4), "nothing is on its way: it waits as long as it may");
        assert!(Queue::new(u32::MAX).is_err());
    }
}
