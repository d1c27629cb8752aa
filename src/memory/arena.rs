//! Memory backed by a file: reclaimable by the kernel, never anonymous.
//!
//! Owns: the file, the space in it, and its slices. The file has no name ([`Directory`]), so nothing is left behind however the process ends; its space is
//! reserved before it is mapped, so no access can raise SIGBUS for want of disk. What lies behind the addresses may be exchanged: a file that lasts is mapped privately, so that no store of the
//! process ever reaches it. Must not know: ggml, what the bytes mean, which files last ([`super::lasting`]).

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak};

pub use super::directory::Directory;
use super::numa;
use super::sums::Sums;
use super::writeback::Writeback;
use super::{HUGE_PAGE, round_up, system};
use crate::error::{Error, Result, Status};

/// What lies behind the addresses of an arena.
struct Backing {
    fd: OwnedFd,
    /// Offset of the arena's first byte in the file.
    start: u64,
    /// Whether stores stay in this process.
    private: bool,
    writeback: Writeback,
}

/// One mapped file and the space in it.
pub struct Arena {
    backing: RwLock<Arc<Backing>>,
    base: *mut u8,
    capacity: usize,
    used: AtomicUsize,
    /// Checksums of what is written, for a file that is to last.
    sums: Option<Sums>,
    /// Where its pages are to come from.
    plan: OnceLock<numa::Plan>,
}

// SAFETY: the mapping belongs to no thread, and slices never overlap.
unsafe impl Send for Arena {}
// SAFETY: `used` is atomic, `backing`, `sums` and the write-back lock; all else is constant.
unsafe impl Sync for Arena {}

impl Arena {
    /// A new arena of at least `capacity` bytes, rounded up to 2 MiB (`capacity` > 0). All its space is reserved on disk.
    ///
    /// # Errors
    /// [`Status::NoSpace`] if the file system has too little free, [`Status::Io`] or [`Status::OutOfMemory`] if the kernel refuses.
    pub fn new(directory: &Directory, capacity: usize) -> Result<Arc<Arena>> {
        Arena::with_header(directory, capacity, 0)
    }

    /// The same, with `header` bytes before the arena's first one in the file, a multiple of the page size. Unless that is 0, checksums of what is
    /// written are kept.
    ///
    /// # Errors
    /// As [`Arena::new`].
    pub fn with_header(directory: &Directory, capacity: usize, header: usize) -> Result<Arc<Arena>> {
        let capacity = round_up(capacity, HUGE_PAGE)?;
        let fd = unnamed_with_space(directory, header, capacity)?;
        Arena::over(fd, header as u64, capacity, false, (header > 0).then(Sums::default), None)
    }

    /// An arena in the place of other memory.
    ///
    /// # Errors
    /// As [`Arena::new`]: then all is as before.
    ///
    /// # Safety
    /// `capacity` bytes at `at`, multiples of 2 MiB both, must be mapped by the caller, hold nothing that anybody needs, and never be unmapped by the
    /// caller: they are the arena's now.
    pub(super) unsafe fn in_place(directory: &Directory, capacity: usize, at: *mut u8) -> Result<Arc<Arena>> {
        let fd = unnamed_with_space(directory, 0, capacity)?;
        Arena::over(fd, 0, capacity, false, None, Some(at))
    }

    /// An arena of what is in a file already, `capacity` bytes from `start` on, both multiples of 2 MiB. Stores stay in this process.
    ///
    /// # Errors
    /// [`Status::Io`] or [`Status::OutOfMemory`] if the kernel refuses.
    pub(super) fn of_file(fd: OwnedFd, start: u64, capacity: usize) -> Result<Arc<Arena>> {
        Arena::over(fd, start, capacity, true, Some(Sums::default()), None)
    }

    fn over(fd: OwnedFd, start: u64, capacity: usize, private: bool, sums: Option<Sums>, at: Option<*mut u8>) -> Result<Arc<Arena>> {
        // SAFETY: at an address of the kernel's choice, or in the place of what a caller has given up.
        let base = unsafe { map(&fd, start, capacity, private, at) }?;
        let backing = RwLock::new(Arc::new(Backing { fd, start, private, writeback: Writeback::new() }));
        let arena = Arc::new(Arena { backing, base, capacity, used: AtomicUsize::new(0), sums, plan: OnceLock::new() });
        all().push((base.addr(), Arc::downgrade(&arena)));
        Ok(arena)
    }

    /// Where its pages are to come from. The kernel keeps that by itself for a file in memory only: for others, whoever writes to it asks
    /// [`Arena::plan`].
    ///
    /// # Errors
    /// If the kernel refuses.
    pub(super) fn place_on(&self, plan: &numa::Plan) -> Result<()> {
        plan.wish(self.base, self.capacity)?;
        let _ = self.plan.set(plan.clone());
        Ok(())
    }

    /// What whoever writes to its file should wish for.
    pub(super) fn plan(&self) -> Option<&numa::Plan> {
        self.plan.get()
    }

    fn backing(&self) -> Arc<Backing> {
        self.backing.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Number of bytes.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Whether stores stay in this process.
    pub(super) fn is_private(&self) -> bool {
        self.backing().private
    }

    /// A descriptor of its file.
    ///
    /// # Errors
    /// [`Status::Io`] if there are too many.
    pub(super) fn file(&self) -> Result<OwnedFd> {
        self.backing().fd.try_clone().map_err(|e| Error::os("duplicate a file descriptor", &e))
    }

    /// Puts `capacity` bytes of another file behind the addresses, from `start` on.
    ///
    /// # Errors
    /// If the kernel refuses: then all is as before.
    ///
    /// # Safety
    /// Nobody may use the arena's bytes meanwhile, or rely on what they were.
    pub(super) unsafe fn exchange(&self, fd: OwnedFd, start: u64, private: bool) -> Result<()> {
        let mut backing = self.backing.write().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the range is this arena's own mapping; by the caller's promise nobody uses it.
        unsafe { map(&fd, start, self.capacity, private, Some(self.base)) }?;
        *backing = Arc::new(Backing { fd, start, private, writeback: Writeback::new() });
        if let Some(plan) = self.plan() {
            // A refusal would have come before.
            let _ = plan.wish(self.base, self.capacity);
        }
        if let Some(sums) = &self.sums {
            sums.forget();
        }
        Ok(())
    }

    /// Whether stores stay in this process from now on; those of before have reached the file.
    ///
    /// # Errors
    /// If the kernel refuses: then all is as before.
    ///
    /// # Safety
    /// Nobody may write to the arena's bytes meanwhile; with `private` false, stores since they were private are lost.
    pub(super) unsafe fn set_private(&self, private: bool) -> Result<()> {
        let mut backing = self.backing.write().unwrap_or_else(PoisonError::into_inner);
        let fd = backing.fd.try_clone().map_err(|e| Error::os("duplicate a file descriptor", &e))?;
        // SAFETY: the range is this arena's own mapping and gets the same bytes of the same file.
        unsafe { map(&fd, backing.start, self.capacity, private, Some(self.base)) }?;
        *backing = Arc::new(Backing { fd, start: backing.start, private, writeback: Writeback::new() });
        Ok(())
    }

    /// A new file without a name in the place of the one behind the addresses, with `header` bytes before the arena's; with `copy` it has the
    /// same bytes, else zeros.
    ///
    /// # Errors
    /// As [`Arena::new`]: then all is as before.
    ///
    /// # Safety
    /// Nobody may use the arena's bytes meanwhile.
    pub unsafe fn renew(&self, directory: &Directory, header: usize, copy: bool) -> Result<()> {
        let fd = unnamed_with_space(directory, header, self.capacity)?;
        if copy {
            const STEP: usize = 8 << 20;
            let writeback = Writeback::new();
            let _scope = self.plan().and_then(|p| p.for_this_thread().ok());
            for at in (0..self.capacity).step_by(STEP) {
                let (len, to) = (STEP.min(self.capacity - at), header as u64 + at as u64);
                // SAFETY: the bytes are the arena's, and nobody writes them now.
                unsafe { write_all(&fd, to, self.base.add(at), len) }.map_err(|e| Error::os("copy an arena", &e))?;
                writeback.written(&fd, to, len);
            }
        }
        // SAFETY: by the caller's promise.
        unsafe { self.exchange(fd, header as u64, false) }
    }

    /// Checksum of `len` bytes at `offset`: of what was written, where that is known, else of what is in the file.
    ///
    /// # Errors
    /// [`Status::Io`] if it cannot be read.
    pub(super) fn sum(&self, offset: usize, len: usize) -> Result<u32> {
        if let Some(known) = self.sums.as_ref().and_then(|s| s.of(offset, len)) {
            return Ok(known);
        }
        let backing = self.backing();
        super::sums::of_file(backing.fd.as_fd(), backing.start + offset as u64, len as u64)
    }

    /// Whether the checksum of a range is known without reading it.
    #[cfg(test)]
    pub(super) fn knows(&self, offset: usize, len: usize) -> bool {
        self.sums.as_ref().is_some_and(|s| s.of(offset, len).is_some())
    }

    /// Whether the first and the last bytes of `len` at `offset` are those of `source`. Stores of this process to whole pages of them are undone
    /// before, if stores are private; if the host has locked the pages, which keeps them, all bytes are compared.
    ///
    /// # Safety
    /// `source` must be readable for `len` bytes, and nobody may use those of the arena meanwhile.
    pub unsafe fn holds(&self, offset: usize, source: *const u8, len: usize) -> bool {
        let page = super::input::page_size();
        if !self.is_private() || offset.checked_add(len).is_none_or(|end| end > self.capacity) {
            return false;
        }
        let (first, end) = (offset.next_multiple_of(page), (offset + len) / page * page);
        let base = self.base.wrapping_add(offset);
        // SAFETY: whole pages of this arena's mapping, which is a file's: they are read from it again. Both ranges have `len` bytes.
        unsafe {
            if first < end && libc::madvise(self.base.add(first).cast(), end - first, libc::MADV_DONTNEED) != 0 {
                return std::slice::from_raw_parts(base, len) == std::slice::from_raw_parts(source, len);
            }
            let edge = len.min(page);
            let same = |at: usize| std::slice::from_raw_parts(base.add(at), edge) == std::slice::from_raw_parts(source.add(at), edge);
            same(0) && same(len - edge)
        }
    }

    /// The next `len` bytes, on a 2 MiB boundary of the file.
    ///
    /// # Errors
    /// [`Status::OutOfMemory`] if the arena has too little left.
    pub fn slice(self: &Arc<Self>, len: usize) -> Result<Slice> {
        let step = round_up(len, HUGE_PAGE)?;
        let taken =
            self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| used.checked_add(step).filter(|end| *end <= self.capacity));
        match taken {
            Ok(offset) => Ok(Slice { arena: self.clone(), offset, len }),
            Err(used) => {
                let left = self.capacity - used;
                Err(Error::new(Status::OutOfMemory, format!("the arena has {left} bytes left, {step} are needed")))
            }
        }
    }
}

/// The arenas there are: where each begins.
static ALL: Mutex<Vec<(usize, Weak<Arena>)>> = Mutex::new(Vec::new());

fn all() -> MutexGuard<'static, Vec<(usize, Weak<Arena>)>> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A descriptor of the file behind an address, if it lies in an arena whose stores reach its file.
pub(super) fn file_at(address: usize) -> Option<OwnedFd> {
    let arenas: Vec<Arc<Arena>> = all().iter().filter(|(base, _)| *base <= address).filter_map(|(_, arena)| arena.upgrade()).collect();
    let arena = arenas.into_iter().find(|arena| address - arena.base.addr() < arena.capacity)?;
    let backing = arena.backing();
    if backing.private { None } else { backing.fd.try_clone().ok() }
}

impl Drop for Arena {
    fn drop(&mut self) {
        all().retain(|(base, _)| *base != self.base.addr());
        // SAFETY: exactly the mapping made in `over`, unmapped once; no slice is left, each holds a reference.
        unsafe { libc::munmap(self.base.cast(), self.capacity) };
    }
}

/// A new file without a name that has `header` and `capacity` bytes, all of them reserved.
fn unnamed_with_space(directory: &Directory, header: usize, capacity: usize) -> Result<OwnedFd> {
    let total = round_up(header.saturating_add(capacity), super::input::page_size())?;
    system::within_file_limit(total)?;
    let free = directory.free_bytes()?;
    if total as u64 > free {
        let place = directory.path().display();
        return Err(Error::new(Status::NoSpace, format!("{place} has {free} bytes free, {total} are needed")));
    }
    let fd = directory.unnamed_file()?;
    reserve(&fd, total).map_err(|e| Error::os(format_args!("reserve {total} bytes in {}", directory.path().display()), &e))?;
    Ok(fd)
}

/// Maps `len` bytes of a file from `start` on, at `at` or at an address of the kernel's choice.
///
/// # Safety
/// What is mapped at `at` must be the caller's, and nobody may rely on it any more.
unsafe fn map(fd: &OwnedFd, start: u64, len: usize, private: bool, at: Option<*mut u8>) -> Result<*mut u8> {
    let start = libc::off_t::try_from(start).map_err(|_| Error::invalid("an offset that no file has"))?;
    // No swap is set aside for a private mapping: hardly anybody stores to weights.
    let kind = if private { libc::MAP_PRIVATE | libc::MAP_NORESERVE } else { libc::MAP_SHARED };
    let kind = kind | if at.is_some() { libc::MAP_FIXED } else { 0 };
    let wanted = at.unwrap_or(std::ptr::null_mut()).cast();
    // SAFETY: a mapping of the file at an address of the kernel's choice, or one that the caller vouches for.
    let base = unsafe { libc::mmap(wanted, len, libc::PROT_READ | libc::PROT_WRITE, kind, fd.as_raw_fd(), start) };
    if base == libc::MAP_FAILED {
        return Err(Error::last_os(format_args!("map {len} bytes of an arena's file")));
    }
    // Experts are read in an order that no read-ahead guesses. Advice only.
    // SAFETY: exactly the mapping just made.
    unsafe { libc::madvise(base, len, libc::MADV_RANDOM) };
    Ok(base.cast())
}

/// Writes `len` bytes of `source` at `at` of the file.
///
/// # Safety
/// `source` must be readable for `len` bytes.
unsafe fn write_all(fd: &OwnedFd, at: u64, source: *const u8, len: usize) -> std::io::Result<()> {
    let mut done = 0;
    while done < len {
        let to = libc::off_t::try_from(at + done as u64).map_err(std::io::Error::other)?;
        // SAFETY: the descriptor is open; by the caller's promise the source is readable.
        let written = unsafe { libc::pwrite(fd.as_raw_fd(), source.add(done).cast(), len - done, to) };
        match usize::try_from(written) {
            Ok(0) => return Err(std::io::ErrorKind::WriteZero.into()),
            Ok(n) => done += n,
            Err(_) => match std::io::Error::last_os_error() {
                e if e.kind() == std::io::ErrorKind::Interrupted => {}
                e => return Err(e),
            },
        }
    }
    Ok(())
}

/// Gives the file its size with every block allocated.
fn reserve(fd: &OwnedFd, len: usize) -> std::io::Result<()> {
    let signed = libc::off_t::try_from(len).map_err(std::io::Error::other)?;
    loop {
        // SAFETY: the descriptor is open.
        if unsafe { libc::fallocate(fd.as_raw_fd(), 0, 0, signed) } == 0 {
            return Ok(());
        }
        let cause = std::io::Error::last_os_error();
        match cause.raw_os_error() {
            Some(libc::EINTR) => {}
            Some(libc::EOPNOTSUPP | libc::ENOSYS) => return write_zeros(fd, len),
            _ => return Err(cause),
        }
    }
}

/// Reserves space on file systems without `fallocate`, by writing.
fn write_zeros(fd: &OwnedFd, len: usize) -> std::io::Result<()> {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::from(fd.try_clone()?);
    let zeros = vec![0u8; 1 << 20];
    let mut at = 0;
    while at < len {
        let n = zeros.len().min(len - at);
        file.write_all_at(&zeros[..n], at as u64)?;
        at += n;
    }
    Ok(())
}

/// A part of an arena. The arena lives as long as any of its slices.
pub struct Slice {
    arena: Arc<Arena>,
    offset: usize,
    len: usize,
}

impl Slice {
    /// First byte, on a page boundary.
    pub fn base(&self) -> *mut u8 {
        self.arena.base.wrapping_add(self.offset)
    }

    /// Bytes asked for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Writes `len` bytes of `source` at `offset` to the file, and so to the memory, without a page fault for either.
    ///
    /// # Errors
    /// What the kernel says; a part of the bytes may then be written.
    ///
    /// # Safety
    /// `offset + len` must be at most [`Slice::len`], those bytes used by nobody else meanwhile, and those of `source` readable.
    pub(super) unsafe fn write(&self, offset: usize, source: *const u8, len: usize) -> std::io::Result<()> {
        let backing = self.arena.backing();
        if backing.private {
            return Err(std::io::ErrorKind::ReadOnlyFilesystem.into());
        }
        // SAFETY: by the caller's promise; the place in the file is this slice's.
        unsafe { write_all(&backing.fd, backing.start + (self.offset + offset) as u64, source, len) }
    }

    /// The arena that it is a part of.
    pub(super) fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Takes note of the checksum of `len` bytes of `source` that were written at `offset`, if the arena wants it.
    ///
    /// # Safety
    /// `source` must be readable for `len` bytes.
    pub(super) unsafe fn sum(&self, offset: usize, source: *const u8, len: usize) {
        if let Some(sums) = &self.arena.sums {
            // SAFETY: by the caller's promise.
            sums.add(self.offset + offset, unsafe { std::slice::from_raw_parts(source, len) });
        }
    }

    /// Tells that bytes were stored of which no checksum was taken.
    pub(super) fn unsummed(&self) {
        if let Some(sums) = &self.arena.sums {
            sums.forget();
        }
    }

    /// Tells that `len` bytes at `offset` were written, and waits while too many are dirty.
    pub fn written(&self, offset: usize, len: usize) {
        let backing = self.arena.backing();
        if !backing.private {
            backing.writeback.written(&backing.fd, backing.start + (self.offset + offset) as u64, len);
        }
    }

    /// Starts to write to the disk what was written, unless it is little.
    pub fn flush(&self) {
        let backing = self.arena.backing();
        if !backing.private {
            backing.writeback.flush(&backing.fd);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::testing::Scratch;

    #[test]
    fn slices_do_not_overlap_and_hold_what_is_written() {
        let scratch = Scratch::new("slices");
        let directory = Directory::open(&scratch.0, false).unwrap();
        let arena = Arena::new(&directory, 3 * HUGE_PAGE - 7).unwrap();
        let slices: Vec<Slice> = [1, HUGE_PAGE, 5].map(|len| arena.slice(len).unwrap()).into();
        assert_eq!(arena.slice(1).err().map(|e| e.status), Some(Status::OutOfMemory));
        drop(arena);
        for (i, s) in slices.iter().enumerate() {
            // SAFETY: the slice owns these bytes.
            unsafe { std::ptr::write_bytes(s.base(), i as u8 + 1, s.len()) };
            s.written(0, s.len());
            s.flush();
        }
        for (i, s) in slices.iter().enumerate() {
            // SAFETY: the slice owns these bytes and nobody writes them now.
            assert!(unsafe { std::slice::from_raw_parts(s.base(), s.len()) }.iter().all(|b| *b == i as u8 + 1));
        }
        assert_eq!(std::fs::read_dir(&scratch.0).unwrap().count(), 0, "the file has no name");
    }

    #[test]
    fn more_than_the_disk_has_is_an_error_before_anything_is_written() {
        let scratch = Scratch::new("full");
        let directory = Directory::open(&scratch.0, false).unwrap();
        let error = Arena::new(&directory, 1 << 60).err().unwrap();
        assert_eq!(error.status, Status::NoSpace);
        assert!(Arena::new(&directory, usize::MAX).is_err());
    }

    #[test]
    fn space_is_reserved_by_writing_where_the_file_system_cannot() {
        use std::os::unix::fs::MetadataExt;
        let file = tempfile::tempfile().unwrap();
        write_zeros(&OwnedFd::from(file.try_clone().unwrap()), 3_000_001).unwrap();
        let meta = file.metadata().unwrap();
        assert_eq!(meta.len(), 3_000_001);
        file.sync_all().unwrap();
        assert!(file.metadata().unwrap().blocks() * 512 >= 3_000_001, "there are holes");
        let scratch = Scratch::new("reserved");
        let arena = Arena::new(&Directory::open(&scratch.0, false).unwrap(), 5 << 20).unwrap();
        let meta = std::fs::File::from(arena.file().unwrap()).metadata().unwrap();
        assert!(meta.blocks() * 512 >= 6 << 20, "{} of 6 MiB are reserved", meta.blocks() * 512);
    }
}
