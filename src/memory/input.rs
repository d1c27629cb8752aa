//! An open file that large parts of are read from, past the page cache where that is faster.
//!
//! Owns: the choice between a direct read (`O_DIRECT`) and one through the page cache, and the buffers that direct reads need. Tensors start
//! anywhere in a file, direct reads only at blocks: so a direct read takes all blocks that the bytes lie in, into a buffer of its own, and the
//! bytes are copied from there. What is in the page cache already is not read from the disk again. Must not know: whose file it is.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use super::pageable::Pageable;
use super::target::Target;
use crate::error::{Error, Result, Status};

/// Most bytes of one read: large enough for a disk to work at its full rate, small enough for progress and cancelling.
pub(super) const REQUEST: usize = 4 << 20;

/// What offsets, lengths and addresses of direct reads are multiples of. No disk has larger blocks; the kernel takes smaller ones as well.
pub const BLOCK: usize = 4096;

/// Below this a read through the page cache costs less than a direct one.
const WORTH_DIRECT: usize = 64 << 10;

/// A file to read from.
pub struct Input {
    file: File,
    path: PathBuf,
    /// The same file, opened for direct reads, where its file system has them.
    direct: Option<File>,
    /// Whether a direct read has failed. It is not tried again.
    refused: AtomicBool,
    /// Buffers that no thread uses now.
    buffers: Mutex<Vec<Pageable>>,
}

impl Input {
    /// Of an open file; `path` is what messages call it. Without `direct` everything is read through the page cache.
    pub fn new(file: File, path: &Path, direct: bool) -> Input {
        // By its descriptor: under its name there may be another file by now.
        let reopen = || {
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            std::fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path).ok()
        };
        let direct = direct.then(reopen).flatten();
        Input { file, path: path.to_owned(), direct, refused: AtomicBool::new(false), buffers: Mutex::default() }
    }

    /// What messages call it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its size now.
    ///
    /// # Errors
    /// [`Status::Io`], naming the file.
    pub fn size(&self) -> Result<u64> {
        self.file.metadata().map(|m| m.len()).map_err(|e| Error::os(format_args!("stat {}", self.path.display()), &e))
    }

    /// The same file, opened for direct reads; `None` if its file system has none, or one has failed.
    pub fn direct(&self) -> Option<BorrowedFd<'_>> {
        self.direct.as_ref().filter(|_| !self.refused.load(Ordering::Relaxed)).map(AsFd::as_fd)
    }

    /// A direct read of it has failed, and none is tried again.
    pub fn refuse_direct(&self) {
        self.refused.store(true, Ordering::Relaxed);
    }

    /// The open file.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Reads the `len` bytes at `offset` to `at` of the target; at most [`REQUEST`]. Whether past the page cache.
    ///
    /// # Errors
    /// [`Status::Io`], naming the file, if it cannot be read or ends too early. The target may then hold a part of the bytes.
    ///
    /// # Safety
    /// `at + len` must be at most the target's length, and those bytes writable and used by nobody else meanwhile.
    pub(super) unsafe fn read(&self, offset: u64, target: &Target<'_>, at: usize, len: usize) -> Result<bool> {
        if let Some(direct) = self.direct_for(offset, len)
            && let Some(mut buffer) = self.buffer()
        {
            let read = buffer.read_direct(direct, offset, len);
            if let Some(bytes) = read {
                // SAFETY: by the caller's promise; the bytes are the buffer's.
                unsafe { target.put(at, bytes.as_ptr(), len) };
            }
            let done = read.is_some();
            self.give_back(buffer);
            if done {
                return Ok(true);
            }
            self.refuse_direct();
        }
        self.will_need(offset, len);
        if target.is_file()
            && let Some(mut buffer) = self.buffer()
        {
            let bytes = &mut buffer.bytes()[..len];
            let read = self.read_cached(offset, bytes);
            if read.is_ok() {
                // SAFETY: by the caller's promise; the bytes are the buffer's.
                unsafe { target.put(at, bytes.as_ptr(), len) };
            }
            self.give_back(buffer);
            return read.map(|()| false);
        }
        // SAFETY: by the caller's promise. Reading into memory that is not initialised is what `read` is for; the slice is only written.
        let bytes = unsafe { std::slice::from_raw_parts_mut(target.base().add(at), len) };
        self.read_cached(offset, bytes)?;
        target.written(at, len);
        Ok(false)
    }

    /// Reads through the page cache.
    ///
    /// # Errors
    /// [`Status::Io`], naming the file, if it cannot be read or ends too early.
    pub fn read_cached(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(bytes, offset).map_err(|cause| {
            let (path, len) = (self.path.display(), bytes.len());
            if cause.kind() == std::io::ErrorKind::UnexpectedEof {
                let (end, wanted) = (self.size().unwrap_or(0), offset.saturating_add(len as u64));
                let message = format!("{path} ends at byte {end}, but {wanted} are needed: it was truncated or is incomplete");
                return Error::new(Status::Io, message);
            }
            Error::os(format_args!("read {len} bytes at {offset} of {path}"), &cause)
        })
    }

    /// The file to read these bytes from directly, if that is the better way.
    fn direct_for(&self, offset: u64, len: usize) -> Option<&File> {
        let direct = self.direct.as_ref().filter(|_| len >= WORTH_DIRECT && !self.refused.load(Ordering::Relaxed))?;
        (!self.is_cached(offset, len)).then_some(direct)
    }

    /// Whether at least half of these bytes are in the page cache. The kernel says yes to a user who may not write the file.
    pub(super) fn is_cached(&self, offset: u64, len: usize) -> bool {
        let page = page_size();
        let first = offset / page as u64 * page as u64;
        let bytes = (offset - first) as usize + len;
        let Ok(at) = libc::off_t::try_from(first) else { return true };
        let mut pages = vec![0u8; bytes.div_ceil(page)];
        // SAFETY: a new mapping at an address of the kernel's choice, which is never accessed.
        let map = unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ, libc::MAP_SHARED, self.file.as_raw_fd(), at) };
        if map == libc::MAP_FAILED {
            return true;
        }
        // SAFETY: exactly the mapping just made, and one byte for each of its pages; it is unmapped once.
        let known = unsafe {
            let known = libc::mincore(map, bytes, pages.as_mut_ptr()) == 0;
            libc::munmap(map, bytes);
            known
        };
        let cached = pages.iter().filter(|p| **p & 1 == 1).count();
        !known || cached * 2 >= pages.len()
    }

    /// Has the kernel read these bytes at once. By itself it reads as far ahead as the device's setting says, which may be 128 KiB.
    fn will_need(&self, offset: u64, len: usize) {
        // One advice reads no more than the largest transfer of the device.
        const ADVICE: usize = 512 << 10;
        for at in (0..len).step_by(ADVICE) {
            self.advise(offset + at as u64, ADVICE.min(len - at), libc::POSIX_FADV_WILLNEED);
        }
    }

    /// Drops what the page cache holds of these bytes, as far as nobody has mapped it. Advice only.
    pub fn drop_cached(&self, offset: u64, len: usize) {
        self.advise(offset, len, libc::POSIX_FADV_DONTNEED);
    }

    fn advise(&self, offset: u64, len: usize, advice: i32) {
        // Length 0 would mean "to the end of the file".
        if let (Ok(offset), Ok(len @ 1..)) = (i64::try_from(offset), i64::try_from(len)) {
            // SAFETY: the descriptor is open.
            unsafe { libc::posix_fadvise(self.file.as_raw_fd(), offset, len, advice) };
        }
    }

    fn buffer(&self) -> Option<Buffer> {
        let used = self.buffers.lock().unwrap_or_else(PoisonError::into_inner).pop();
        used.or_else(|| Pageable::new(Buffer::LEN).ok()).map(Buffer)
    }

    fn give_back(&self, buffer: Buffer) {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner).push(buffer.0);
    }
}

#[cfg(test)]
impl Input {
    /// As an open file for direct reads one that cannot be read at all.
    pub(super) fn break_direct(&mut self) {
        self.direct = Some(std::fs::OpenOptions::new().write(true).open(&self.path).unwrap());
    }
}

/// Memory of one thread that a request is read into.
struct Buffer(Pageable);

impl Buffer {
    /// A request, and what is around it in its first and last block.
    const LEN: usize = REQUEST + 2 * BLOCK;

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the memory is this buffer's, that long, initialised to zeros when it was made, and borrowed as the buffer is.
        unsafe { std::slice::from_raw_parts_mut(self.0.base(), Self::LEN) }
    }

    /// The `len` bytes at `offset`, read directly; `None` if that cannot be done.
    fn read_direct(&mut self, file: &File, offset: u64, len: usize) -> Option<&[u8]> {
        let first = offset / BLOCK as u64 * BLOCK as u64;
        let skip = (offset - first) as usize;
        let (wanted, whole) = (skip + len, (skip + len).next_multiple_of(BLOCK));
        let bytes = self.bytes().get_mut(..whole)?;
        let mut done = 0;
        while done < wanted {
            match file.read_at(&mut bytes[done..], first + done as u64) {
                Ok(n) if n > 0 && (done + n >= wanted || n % BLOCK == 0) => done += n,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                // The end of the file, or a read that stopped inside a block: whoever reads through the page cache finds out why.
                _ => return None,
            }
        }
        Some(&bytes[skip..wanted])
    }
}

/// Bytes of a page.
pub(super) fn page_size() -> usize {
    // SAFETY: no pointers.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(BLOCK)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::testing::Sample;

    /// Reads a part as one request, and checks every byte of it and those around it.
    fn read_and_compare(input: &Input, sample: &Sample, offset: usize, len: usize) -> bool {
        let mut bytes = vec![0xEE; len + 128];
        let target = Target::memory(bytes[64..].as_mut_ptr(), len);
        // SAFETY: the vector holds the target, which nobody else uses.
        let direct = unsafe { input.read(offset as u64, &target, 0, len) }.unwrap();
        assert!(bytes[64..64 + len] == sample.bytes[offset..offset + len], "{len} at {offset}");
        assert!(bytes[..64].iter().chain(&bytes[64 + len..]).all(|b| *b == 0xEE), "{len} at {offset}: a byte beside it");
        direct
    }

    /// Odd offsets and lengths, up to the last byte.
    fn odd_parts(size: usize) -> Vec<(usize, usize)> {
        let mut parts = vec![(0, 1), (0, BLOCK), (1, REQUEST), (BLOCK - 1, 2), (size - 1, 1), (size - 70_001, 70_001), (32, WORTH_DIRECT)];
        parts.extend([(BLOCK, REQUEST), (5 * BLOCK + 32, REQUEST), (BLOCK - 32, WORTH_DIRECT + BLOCK + 64)]);
        parts
    }

    #[test]
    fn every_way_reads_the_same_bytes() {
        let sample = Sample::new("ways", 2 * REQUEST + 12_345);
        for direct in [true, false] {
            for cached in [true, false] {
                for (offset, len) in odd_parts(sample.bytes.len()) {
                    let input = Input::new(sample.open(), &sample.path, direct);
                    if !cached {
                        crate::memory::system::drop_cached(input.file()).unwrap();
                    }
                    let was_direct = read_and_compare(&input, &sample, offset, len);
                    assert!(direct || !was_direct);
                }
            }
        }
    }

    #[test]
    fn a_file_system_without_direct_reads_serves_through_the_page_cache() {
        let sample = Sample::new("refused", REQUEST);
        let mut input = Input::new(sample.open(), &sample.path, false);
        input.break_direct();
        crate::memory::system::drop_cached(input.file()).unwrap();
        if !input.is_cached(0, REQUEST) {
            assert!(!read_and_compare(&input, &sample, 100, REQUEST - 100));
            assert!(input.refused.load(Ordering::Relaxed), "it is not tried again");
        }
        assert!(!read_and_compare(&input, &sample, 0, REQUEST));
    }

    #[test]
    fn files_in_memory_are_read_too() {
        let Ok(sample) = Sample::new_in(Path::new("/dev/shm"), "shm", REQUEST + 1) else {
            eprintln!("SKIPPED: no /dev/shm");
            return;
        };
        for (offset, len) in [(0, REQUEST), (1, REQUEST), (4097, 100_000)] {
            read_and_compare(&Input::new(sample.open(), &sample.path, true), &sample, offset, len);
        }
    }

    #[test]
    fn what_the_page_cache_holds_is_seen_and_dropped() {
        let sample = Sample::new("cached", REQUEST);
        let input = Input::new(sample.open(), &sample.path, true);
        input.file().sync_all().unwrap();
        read_and_compare(&input, &sample, 0, REQUEST);
        assert!(input.is_cached(0, REQUEST));
        input.drop_cached(0, REQUEST);
        if crate::memory::system::file_system(&sample.path).is_some_and(|f| f != "tmpfs") {
            assert!(!input.is_cached(0, REQUEST), "the pages are still there");
            assert_eq!(read_and_compare(&input, &sample, 7, REQUEST - 7), input.direct.is_some() && !input.refused.load(Ordering::Relaxed));
        }
    }

    #[test]
    fn what_lies_behind_the_end_is_an_error_that_names_file_and_length() {
        let sample = Sample::new("end", 100_000);
        for direct in [true, false] {
            let input = Input::new(sample.open(), &sample.path, direct);
            crate::memory::system::drop_cached(input.file()).unwrap();
            for (offset, len) in [(99_999, 2), (1000, 99_001), (1 << 40, 100_000)] {
                let mut bytes = vec![0; len];
                let target = Target::memory(bytes.as_mut_ptr(), len);
                // SAFETY: the vector is that long.
                let error = unsafe { input.read(offset, &target, 0, len) }.unwrap_err();
                assert!(error.status == Status::Io && error.message.contains("ends at byte 100000"), "{error}");
                assert!(error.message.contains(sample.path.to_str().unwrap()), "{error}");
            }
        }
    }
}
