//! Memory backed by a file: reclaimable by the kernel, never anonymous.
//!
//! Owns: the directory check, the file, the space in it, and its slices. A file is made without a name where the file system can (else it is
//! unlinked at once), so nothing is left behind however the process ends; its space is reserved before it is mapped, so no access can raise
//! SIGBUS for want of disk. What lies behind the addresses may be exchanged: a file that lasts is mapped privately, so that no store of the
//! process ever reaches it. Must not know: ggml, what the bytes mean, which files last ([`super::lasting`]).

use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use super::sums::Sums;
use super::writeback::Writeback;
use super::{HUGE_PAGE, round_up, system};
use crate::error::{Error, Result, Status};

/// A directory that arena files may go to, checked when it was opened.
pub struct Directory {
    fd: OwnedFd,
    path: PathBuf,
    /// Whether files there lie in memory (tmpfs, ramfs), which defeats the purpose.
    pub in_memory: bool,
}

impl Directory {
    /// Opens the directory, and makes it (mode 0700) if it is missing. With `own_parent` the directory above it is ours too: up to two missing
    /// levels are made, and the one above must not be a symbolic link either. (Those further up are the user's affair: a cache or a home
    /// directory that is a link to another disk is common.)
    ///
    /// # Errors
    /// [`Status::Io`], naming the path, if it is not a directory, is a symbolic link, is not writable, or cannot be opened or made.
    pub fn open(path: &Path, own_parent: bool) -> Result<Directory> {
        // A trailing `/` or `/.` would lead through a link.
        let path: &Path = &path.components().collect::<PathBuf>();
        if let Some(parent) = path.parent().filter(|p| own_parent && p.is_symlink()) {
            return Err(Error::new(Status::Io, format!("arena directory {}: {} is a symbolic link", path.display(), parent.display())));
        }
        make(path, if own_parent { 2 } else { 0 })?;
        let c_path = c_path(path)?;
        let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_RDONLY;
        // SAFETY: the path is NUL-terminated.
        let fd = unsafe { libc::open(c_path.as_ptr(), flags) };
        if fd < 0 {
            let cause = std::io::Error::last_os_error();
            let why = match std::fs::symlink_metadata(path) {
                Ok(m) if m.is_symlink() => "it is a symbolic link".to_owned(),
                Ok(m) if !m.is_dir() => "it is not a directory".to_owned(),
                _ => cause.to_string(),
            };
            return Err(Error::new(Status::Io, format!("arena directory {}: {why}", path.display())));
        }
        // SAFETY: a new descriptor that nothing else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: the descriptor is open and the path NUL-terminated.
        if unsafe { libc::faccessat(fd.as_raw_fd(), c".".as_ptr(), libc::W_OK | libc::X_OK, libc::AT_EACCESS) } != 0 {
            return Err(Error::last_os(format_args!("arena directory {}", path.display())));
        }
        // SAFETY: an all-zero statfs is valid.
        let mut fs: libc::statfs = unsafe { std::mem::zeroed() };
        // SAFETY: the descriptor is open and `fs` writable.
        if unsafe { libc::fstatfs(fd.as_raw_fd(), &raw mut fs) } != 0 {
            return Err(Error::last_os(format_args!("arena directory {}", path.display())));
        }
        const RAMFS_MAGIC: i64 = 0x8584_58f6;
        let in_memory = [libc::TMPFS_MAGIC, RAMFS_MAGIC].contains(&fs.f_type);
        Ok(Directory { fd, path: path.to_owned(), in_memory })
    }

    /// The directory above a missing `path` in which [`Directory::open`] would make it, without making anything. It has the same file system.
    ///
    /// # Errors
    /// As `open`: what is above it is missing too, no directory, or not to be written to.
    pub fn above(path: &Path, own_parent: bool) -> Result<Directory> {
        let path: &Path = &path.components().collect::<PathBuf>();
        let failed = |e: &std::io::Error| Error::os(format_args!("make the arena directory {}", path.display()), e);
        if let Some(parent) = path.parent().filter(|p| own_parent && p.is_symlink()) {
            return Err(Error::new(Status::Io, format!("arena directory {}: {} is a symbolic link", path.display(), parent.display())));
        }
        // As many levels as `make` makes.
        let levels = if own_parent { 3 } else { 1 };
        let nearest = path.ancestors().skip(1).take(levels).find(|p| p.symlink_metadata().is_ok());
        let nearest = nearest.ok_or_else(|| failed(&std::io::ErrorKind::NotFound.into()))?;
        // Links that lead to the user's cache or home are followed.
        Directory::open(&nearest.canonicalize().map_err(|e| failed(&e))?, false)
    }

    /// The open directory.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Its path as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes that this user may still write to its file system.
    pub fn free_bytes(&self) -> Result<u64> {
        // SAFETY: an all-zero statvfs is valid.
        let mut fs: libc::statvfs = unsafe { std::mem::zeroed() };
        // SAFETY: the descriptor is open and `fs` writable.
        if unsafe { libc::fstatvfs(self.fd.as_raw_fd(), &raw mut fs) } != 0 {
            return Err(Error::last_os(format_args!("free space of {}", self.path.display())));
        }
        Ok(fs.f_bavail.saturating_mul(fs.f_frsize))
    }

    /// Makes a file as an arena does, and lets it go. Some file systems (`/proc`, `/sys`) let root write to a directory and make no file in it.
    ///
    /// # Errors
    /// [`Status::Io`], naming the path.
    pub fn try_file(&self) -> Result<()> {
        self.unnamed_file().map(drop)
    }

    /// A new file without a name, readable and writable by this user alone.
    fn unnamed_file(&self) -> Result<OwnedFd> {
        const FLAGS: i32 = libc::O_RDWR | libc::O_CLOEXEC;
        // SAFETY: the descriptor is open and the path NUL-terminated.
        let fd = unsafe { libc::openat(self.fd.as_raw_fd(), c".".as_ptr(), FLAGS | libc::O_TMPFILE, 0o600) };
        if fd >= 0 {
            // SAFETY: a new descriptor that nothing else owns.
            return above_standard(unsafe { OwnedFd::from_raw_fd(fd) });
        }
        match std::io::Error::last_os_error().raw_os_error() {
            // File systems without O_TMPFILE say one of these.
            Some(libc::EOPNOTSUPP | libc::EISDIR | libc::ENOENT | libc::EINVAL) => self.unlinked_file(),
            _ => Err(Error::last_os(format_args!("make a file in {}", self.path.display()))),
        }
    }

    /// The same for file systems that cannot make a file without a name: it has one for a moment.
    fn unlinked_file(&self) -> Result<OwnedFd> {
        static COUNTER: AtomicUsize = AtomicUsize::new(0);
        let name = format!("berth-{}-{}.arena\0", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
        let name = name.as_bytes().as_ptr().cast();
        let flags = libc::O_RDWR | libc::O_CLOEXEC | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW;
        // SAFETY: the descriptor is open and the name NUL-terminated.
        let fd = unsafe { libc::openat(self.fd.as_raw_fd(), name, flags, 0o600) };
        if fd < 0 {
            let error = std::io::Error::last_os_error();
            if error.raw_os_error() == Some(libc::ENOENT) {
                // The system's words would be "No such file or directory", of a directory that is open.
                let path = self.path.display();
                let message =
                    format!("no file can be made in {path}: its file system takes none (name a directory on a disk), or it was removed");
                return Err(Error::new(Status::Io, message));
            }
            return Err(Error::os(format_args!("make a file in {}", self.path.display()), &error));
        }
        // SAFETY: a new descriptor that nothing else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: as above; the name is the one just made.
        if unsafe { libc::unlinkat(self.fd.as_raw_fd(), name, 0) } != 0 {
            return Err(Error::last_os(format_args!("unlink a file in {}", self.path.display())));
        }
        above_standard(fd)
    }
}

/// The same file under a number above 2: in a process that closed its standard streams, everything that it prints goes to whatever file has
/// their numbers, and must not go into weights.
fn above_standard(fd: OwnedFd) -> Result<OwnedFd> {
    if fd.as_raw_fd() > 2 { Ok(fd) } else { fd.try_clone().map_err(|e| Error::os("duplicate a file descriptor", &e)) }
}

/// Makes a directory and up to `parents` missing levels above it.
fn make(path: &Path, parents: u32) -> Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    match std::fs::DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound && parents > 0 => {
            make(path.parent().ok_or_else(|| Error::os(format_args!("make {}", path.display()), &e))?, parents - 1)?;
            make(path, 0)
        }
        Err(e) => Err(Error::os(format_args!("make the arena directory {}", path.display()), &e)),
    }
}

fn c_path(path: &Path) -> Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| Error::invalid(format!("{} contains a NUL byte", path.display())))
}

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
        Ok(Arc::new(Arena { backing, base, capacity, used: AtomicUsize::new(0), sums }))
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

impl Drop for Arena {
    fn drop(&mut self) {
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
        let place = directory.path.display();
        return Err(Error::new(Status::NoSpace, format!("{place} has {free} bytes free, {total} are needed")));
    }
    let fd = directory.unnamed_file()?;
    reserve(&fd, total).map_err(|e| Error::os(format_args!("reserve {total} bytes in {}", directory.path.display()), &e))?;
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
    use std::os::unix::fs::PermissionsExt;

    /// A fresh directory that is removed at the end.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Scratch {
            let path = std::env::temp_dir().join(format!("berth-arena-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Scratch(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

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
    fn a_directory_that_takes_no_file_is_found_out() {
        let scratch = Scratch::new("try");
        assert!(Directory::open(&scratch.0, false).unwrap().try_file().is_ok());
        // Root may open it; others are refused at once.
        if let Ok(proc) = Directory::open(Path::new("/proc"), false) {
            let error = proc.try_file().unwrap_err();
            assert!(error.status == Status::Io && error.message.contains("/proc"), "{error}");
            assert!(error.message.starts_with("no file can be made in /proc: its file system takes none"), "{error}");
        }
    }

    #[test]
    fn a_file_with_a_name_for_a_moment_leaves_none_and_is_private() {
        let scratch = Scratch::new("named");
        let directory = Directory::open(&scratch.0, false).unwrap();
        let file = std::fs::File::from(directory.unlinked_file().unwrap());
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(&scratch.0).unwrap().count(), 0);
        write_zeros(&OwnedFd::from(file.try_clone().unwrap()), 3_000_001).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 3_000_001);
    }

    #[test]
    fn directories_are_made_private_and_only_as_deep_as_asked() {
        let scratch = Scratch::new("make");
        let deep = scratch.0.join("cache/berth/arena");
        assert!(Directory::open(&deep, false).is_err());
        assert!(!scratch.0.join("cache").exists());
        Directory::open(&deep, true).unwrap();
        assert_eq!(std::fs::metadata(&deep).unwrap().permissions().mode() & 0o777, 0o700);
        assert!(Directory::open(&scratch.0.join("a/b/c/d"), true).is_err());
    }

    #[test]
    fn what_is_no_directory_of_its_own_is_refused_by_name() {
        let scratch = Scratch::new("refuse");
        let (file, link) = (scratch.0.join("file"), scratch.0.join("link"));
        std::fs::write(&file, b"text").unwrap();
        std::os::unix::fs::symlink(&scratch.0, &link).unwrap();
        for (path, why) in [(&file, "not a directory"), (&link, "symbolic link")] {
            let error = Directory::open(path, true).err().unwrap();
            assert!(error.message.contains(why) && error.message.contains(path.to_str().unwrap()), "{error}");
        }
        assert!(Directory::open(&file.join("below"), true).is_err());
        for through in ["link/", "link/.", "link//"] {
            assert!(Directory::open(&scratch.0.join(through), false).err().unwrap().message.contains("symbolic link"), "{through}");
        }
        let below = link.join("arena");
        assert!(Directory::open(&below, true).err().unwrap().message.contains("symbolic link"));
        assert!(!scratch.0.join("arena").exists(), "nothing was made through the link");
    }

    #[test]
    fn more_than_the_disk_has_is_an_error_before_anything_is_written() {
        let scratch = Scratch::new("full");
        let directory = Directory::open(&scratch.0, false).unwrap();
        let error = Arena::new(&directory, 1 << 60).err().unwrap();
        assert_eq!(error.status, Status::NoSpace);
        assert!(Arena::new(&directory, usize::MAX).is_err());
    }
}
