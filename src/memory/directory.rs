//! The directory that arena files go to.
//!
//! Owns: what is checked of it, and files without a name in it. A file is made without one where the file system can, else it is unlinked at once. Must not
//! know: what the files are for.

use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

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
        Directory::existing(path, libc::W_OK | libc::X_OK)
    }

    /// One that is there, to use the files in it; whether new ones can be made does not matter.
    ///
    /// # Errors
    /// As [`Directory::open`], and if it is missing.
    pub fn open_to_read(path: &Path) -> Result<Directory> {
        Directory::existing(&path.components().collect::<PathBuf>(), libc::R_OK | libc::X_OK)
    }

    fn existing(path: &Path, access: libc::c_int) -> Result<Directory> {
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
        if unsafe { libc::faccessat(fd.as_raw_fd(), c".".as_ptr(), access, libc::AT_EACCESS) } != 0 {
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
    pub(super) fn unnamed_file(&self) -> Result<OwnedFd> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::testing::Scratch;
    use std::os::unix::fs::PermissionsExt;

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
}
