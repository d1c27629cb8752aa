//! Which bytes of a mapping are in memory, and asking for those that are not.
//!
//! Owns: the page arithmetic, and the four system calls about it. None of them touches a byte: what cannot be read (a file that was truncated
//! under its mapping, a disk that fails) comes back as an error and never as a signal. Must not know: who asks, what the bytes mean.
//!
//! What each call does was tried on Linux 6.18, ext4, in a memory cgroup:
//! - `MADV_WILLNEED` reads of the pages of the range those that are missing and nothing around them, and returns when the requests are made. Of a
//!   long range it reads only the begin (`ASK`), and when memory is short it gives up in the middle, neither of which it tells. It costs 0.7 to
//!   0.9 s of processor time per GB there, most of it for making room: who asks should be who would wait.
//! - `MADV_POPULATE_READ` (Linux 5.14) waits for pages, and enters them into the page table. Alone it reads around each missing page like a
//!   page fault, so it comes second.
//! - `mincore` tells the truth only to who owns the file or may write it (Linux 5.2); to others every page is there.
//! - `MADV_RANDOM` keeps a page fault from reading around. On experts it changed nothing that could be measured once everything was asked for
//!   before (0.98 of the missing bytes were read either way), and without that every fault reads one page: it is not used there. On a table
//!   of token vectors it is right: a token reads one row, and a fault would read 16 MiB around it where the device reads 8 MiB ahead.

use std::ffi::c_int;
use std::ops::Range;

use super::input::page_size;

/// Most pages that are looked at by one call.
const LOOK: usize = 512;

/// Most bytes that are asked for by one call: of a longer range the kernel silently reads only the begin, as much as the device reads ahead or
/// takes in one request, whichever is more. This is what every device reads ahead by default.
const ASK: usize = 128 << 10;

/// The advice that waits, for who takes the place of the kernel.
#[cfg(test)]
pub(crate) const WAIT: c_int = libc::MADV_POPULATE_READ;

/// The system calls, so that a test can have others. Each gets a range of whole pages, and returns 0 or the number of the error.
#[derive(Clone, Copy, Debug)]
pub struct Calls {
    /// `mincore`: the lowest bit of each byte says whether a page is there.
    pub look: fn(Range<usize>, &mut [u8]) -> c_int,
    /// `madvise`.
    pub advise: fn(Range<usize>, c_int) -> c_int,
    /// `getrusage` of the process.
    pub usage: fn() -> Usage,
}

/// What this process has read so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Page faults that had to wait for a file.
    pub major: u64,
    /// Bytes that were asked of disks.
    pub read: u64,
}

/// What became of waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// All bytes are in memory.
    There,
    /// This kernel cannot wait.
    Unsupported,
    /// Some bytes cannot be had: their file has become shorter, or its disk fails.
    Lost,
    /// The kernel would not, with the number of the error; whoever reads the bytes will wait.
    Refused(c_int),
}

impl Calls {
    /// Those of the kernel.
    pub const KERNEL: Calls = Calls { look, advise, usage };

    /// The part of the range from its first to its last missing page, and the bytes in it that are missing. `None` if nothing is missing.
    ///
    /// # Errors
    /// The number of the error if the kernel does not tell.
    pub fn missing(&self, range: Range<usize>) -> Result<Option<(Range<usize>, usize)>, c_int> {
        let (page, whole) = (page_size(), pages(range));
        let (mut found, mut bytes) = (None::<Range<usize>>, 0);
        let mut there = [0; LOOK];
        for start in whole.clone().step_by(LOOK * page) {
            let part = start..whole.end.min(start.saturating_add(LOOK * page));
            let count = part.len() / page;
            let error = (self.look)(part, &mut there[..count]);
            if error != 0 {
                return Err(error);
            }
            for (i, _) in there[..count].iter().enumerate().filter(|(_, page)| **page & 1 == 0) {
                let at = start + i * page;
                found = Some(found.map_or(at, |f| f.start)..at + page);
                bytes += page;
            }
        }
        Ok(found.map(|f| (f, bytes)))
    }

    /// Asks for the bytes of a range, and does not wait.
    ///
    /// # Errors
    /// The number of the error; then nothing is on its way.
    pub fn ask(&self, range: Range<usize>) -> Result<(), c_int> {
        let whole = pages(range);
        let mut start = whole.start;
        while start < whole.end {
            // To a multiple of the size, so that requests are as long as they may be.
            let end = (start | (ASK - 1)).saturating_add(1).min(whole.end);
            match (self.advise)(start..end, libc::MADV_WILLNEED) {
                0 => start = end,
                error => return Err(error),
            }
        }
        Ok(())
    }

    /// Tells the kernel that bytes of a range are read here and there: a page fault then reads one page and nothing around it.
    ///
    /// # Errors
    /// The number of the error.
    pub fn at_random(&self, range: Range<usize>) -> Result<(), c_int> {
        match (self.advise)(pages(range), libc::MADV_RANDOM) {
            0 => Ok(()),
            error => Err(error),
        }
    }

    /// Waits until the bytes of a range are in memory.
    pub fn wait(&self, range: Range<usize>) -> Wait {
        match (self.advise)(pages(range), libc::MADV_POPULATE_READ) {
            0 => Wait::There,
            libc::EINVAL => Wait::Unsupported,
            // What would be a SIGBUS on access.
            libc::EFAULT | libc::EHWPOISON => Wait::Lost,
            error => Wait::Refused(error),
        }
    }
}

/// The whole pages that a range of addresses touches. A range that would leave the address space ends at its last page.
pub fn pages(range: Range<usize>) -> Range<usize> {
    let mask = !(page_size() - 1);
    let (start, end) = (range.start & mask, range.end.checked_add(page_size() - 1).map_or(mask, |end| end & mask));
    if range.is_empty() { start..start } else { start..end }
}

fn look(range: Range<usize>, there: &mut [u8]) -> c_int {
    let start = std::ptr::without_provenance_mut(range.start);
    // SAFETY: the call touches no byte of the range, and writes one byte for each page of it; `missing` has room for as many.
    let result = unsafe { libc::mincore(start, range.len(), there.as_mut_ptr()) };
    if result == 0 { 0 } else { last_error() }
}

fn advise(range: Range<usize>, advice: c_int) -> c_int {
    if ![libc::MADV_WILLNEED, libc::MADV_POPULATE_READ, libc::MADV_RANDOM].contains(&advice) {
        return libc::EINVAL;
    }
    let start = std::ptr::without_provenance_mut(range.start);
    loop {
        // SAFETY: these advices leave every byte of memory as it is, wherever the range lies.
        if unsafe { libc::madvise(start, range.len(), advice) } == 0 {
            return 0;
        }
        let error = last_error();
        if error != libc::EINTR {
            return error;
        }
    }
}

fn usage() -> Usage {
    // SAFETY: numbers, all of which may be zero.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is writable.
    if unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) } != 0 {
        return Usage::default();
    }
    let number = |n: i64| u64::try_from(n).unwrap_or(0);
    // Blocks of 512 bytes, whatever the disk's are.
    Usage { major: number(usage.ru_majflt), read: number(usage.ru_inblock) << 9 }
}

fn last_error() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::mapping::FileMapping;
    use crate::memory::system;
    use crate::memory::testing::Sample;

    /// A file of 5 MiB and a bit, mapped, on a disk; nothing of it is in memory. `None` where files are in memory.
    fn cold(name: &str) -> Option<(Sample, FileMapping, Range<usize>)> {
        let sample = Sample::new(name, (5 << 20) + 100);
        let file = sample.open();
        system::drop_cached(&file).unwrap();
        let map = FileMapping::of(&file, &sample.path).unwrap();
        let start = map.bytes().as_ptr().addr();
        let range = start..start + map.bytes().len();
        let on_disk = system::file_system(&sample.path).is_some_and(|f| f != "tmpfs");
        (on_disk && Calls::KERNEL.missing(range.clone()) != Ok(None)).then_some((sample, map, range))
    }

    #[test]
    fn ranges_grow_to_whole_pages_and_empty_ones_stay_empty() {
        let page = page_size();
        assert_eq!(pages(page + 1..page + 2), page..2 * page);
        assert_eq!(pages(page..3 * page), page..3 * page);
        assert_eq!(pages(page - 1..page + 1), 0..2 * page);
        assert_eq!(pages(5 * page + 7..5 * page + 7), 5 * page..5 * page);
        assert_eq!(pages(usize::MAX - 5..usize::MAX), usize::MAX - (page - 1)..usize::MAX - (page - 1));
    }

    #[test]
    fn what_is_missing_is_found_in_a_pattern_longer_than_one_look() {
        fn every_third(range: Range<usize>, there: &mut [u8]) -> c_int {
            for (i, page) in there.iter_mut().enumerate() {
                let number = range.start / page_size() + i;
                *page = u8::from(!number.is_multiple_of(3) || number < 6) | 0xfe;
            }
            0
        }
        let calls = Calls { look: every_third, ..Calls::KERNEL };
        let page = page_size();
        // Pages 6, 9, .., 1200 of 2 to 1201.
        assert_eq!(calls.missing(2 * page + 5..1202 * page - 5), Ok(Some((6 * page..1201 * page, 399 * page))));
        assert_eq!(calls.missing(7 * page..9 * page), Ok(None));
        assert_eq!(calls.missing(9 * page..9 * page), Ok(None));
        let refused = Calls { look: |_, _| libc::ENOMEM, ..Calls::KERNEL };
        assert_eq!(refused.missing(0..1), Err(libc::ENOMEM));
    }

    #[test]
    fn long_ranges_are_asked_for_in_pieces_that_every_device_takes() {
        use std::sync::Mutex;
        static ASKED: Mutex<Vec<Range<usize>>> = Mutex::new(Vec::new());
        let calls = Calls {
            advise: |range, _| {
                let mut asked = ASKED.lock().unwrap();
                asked.push(range);
                if asked.len() > 5 { libc::ENOMEM } else { 0 }
            },
            ..Calls::KERNEL
        };
        let page = page_size();
        assert_eq!(calls.ask(ASK - page - 1..3 * ASK + 1), Ok(()));
        let asked = std::mem::take(&mut *ASKED.lock().unwrap());
        assert_eq!(asked, [ASK - 2 * page..ASK, ASK..2 * ASK, 2 * ASK..3 * ASK, 3 * ASK..3 * ASK + page]);
        assert_eq!((calls.ask(7..7), ASKED.lock().unwrap().len()), (Ok(()), 0));
        assert_eq!(calls.ask(0..9 * ASK), Err(libc::ENOMEM));
        assert_eq!(ASKED.lock().unwrap().len(), 6, "after an error nothing more is asked for");
        ASKED.lock().unwrap().clear();
        assert_eq!(calls.ask(usize::MAX - 5..usize::MAX), Ok(()), "at the end of the address space");
    }

    #[test]
    fn what_was_asked_for_comes_and_nothing_around_it() {
        let Some((_sample, _map, range)) = cold("ask") else { return };
        let calls = Calls::KERNEL;
        let part = range.start + (1 << 20) + 100..range.start + (2 << 20) + 5000;
        let before = (calls.usage)();
        assert_eq!(calls.ask(part.clone()), Ok(()));
        assert_eq!(calls.wait(part.clone()), Wait::There);
        assert_eq!(calls.missing(part.clone()), Ok(None));
        let read = (calls.usage)().read - before.read;
        let want = pages(part.clone()).len() as u64;
        // Other tests of this process read, too.
        assert!(read == 0 || read >= want, "{read} of {want} bytes were read");
        let (rest, _) = calls.missing(range.clone()).unwrap().unwrap();
        assert_eq!(rest, pages(range));
        assert_eq!(calls.missing(rest.start..pages(part).start).unwrap().map(|m| m.1), Some(1 << 20));
    }

    #[test]
    fn a_truncated_file_is_an_error_and_no_signal() {
        let Some((sample, _map, range)) = cold("truncated") else { return };
        std::fs::OpenOptions::new().write(true).open(&sample.path).unwrap().set_len(1 << 20).unwrap();
        let calls = Calls::KERNEL;
        assert_eq!(calls.ask(range.clone()), Ok(()));
        assert_eq!(calls.wait(range.start..range.start + (1 << 20)), Wait::There);
        assert_eq!(calls.wait(range), Wait::Lost);
    }

    #[test]
    fn addresses_where_nothing_is_are_refused() {
        let calls = Calls::KERNEL;
        assert_eq!(calls.missing(0..1), Err(libc::ENOMEM));
        assert!(calls.ask(0..1).is_err());
        assert!(matches!(calls.wait(0..1), Wait::Refused(_)));
    }

    #[test]
    fn an_old_kernel_cannot_wait() {
        let calls = Calls { advise: |_, advice| if advice == libc::MADV_WILLNEED { 0 } else { libc::EINVAL }, ..Calls::KERNEL };
        assert_eq!((calls.ask(0..1), calls.wait(0..1)), (Ok(()), Wait::Unsupported));
        let poisoned = Calls { advise: |_, _| libc::EHWPOISON, ..Calls::KERNEL };
        assert_eq!(poisoned.wait(0..1), Wait::Lost);
    }
}
