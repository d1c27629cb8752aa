//! The files that last in one directory.
//!
//! Owns: their names, who may use and build them, and how many bytes they take together. Every file is opened by its name in the directory, never
//! through a link, and believed only if it and the directory are this user's and nobody else may write to them. Must not know: buffers, settings.

use std::ffi::CString;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use super::header::{self, HEADER, Table};
use super::{Refusal, Why};
use crate::memory::arena::{Arena, Directory};

/// End of a file's name.
pub(super) const SUFFIX: &str = ".arena";

/// What the name of a lock has in addition.
pub(super) const LOCK: &str = ".lock";

/// Between two looks at a lock that another process holds.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// How long whoever looks at a file, or removes it, is waited for.
const MOMENT: Duration = Duration::from_secs(1);

/// A directory that may hold such files.
pub struct Store {
    pub(super) directory: Arc<Directory>,
    /// Version of Berth whose files are trusted.
    pub(super) version: &'static str,
}

/// A file whose header is trusted. Nobody removes it while it is held.
pub struct Kept {
    file: File,
    /// What it holds.
    pub table: Table,
    /// Its name in the directory.
    pub name: String,
}

/// The right to build the file of a name, held by one process.
pub struct Build {
    directory: OwnedFd,
    lock: CString,
    _file: File,
}

impl Store {
    /// In that directory, for that version of Berth.
    ///
    /// # Errors
    /// If the directory is not this user's, or others may write to it.
    pub fn new(directory: Arc<Directory>, version: &'static str) -> Result<Store, Refusal> {
        let file = File::from(directory.fd().try_clone_to_owned().map_err(|e| io("open", directory.path(), &e))?);
        let meta = file.metadata().map_err(|e| io("stat", directory.path(), &e))?;
        trusted(&meta).map_err(|what| Refusal::new(Why::Untrusted, format!("the directory {} {what}", directory.path().display())))?;
        Ok(Store { directory, version })
    }

    /// The directory.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// The names of all files of this kind, whatever they are, in order.
    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(format!("/proc/self/fd/{}", self.directory.fd().as_raw_fd())).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.filter_map(|e| e.file_name().into_string().ok()).filter(|n| n.ends_with(SUFFIX)).collect();
        names.sort();
        names
    }

    /// The file of that name, if its header is trusted. What it was made of is not looked at.
    ///
    /// # Errors
    /// Why it is not trusted; [`Why::Missing`] if there is none.
    pub fn open(&self, name: &str) -> Result<Kept, Refusal> {
        let file = self.open_file(name)?;
        hold(&file, name)?;
        let table = self.table(&file, name)?;
        Ok(Kept { file, table, name: name.to_owned() })
    }

    /// Whether something has that name that no file can replace.
    ///
    /// # Errors
    /// If it is a directory.
    pub fn check_name(&self, name: &str) -> Result<(), Refusal> {
        match self.open_at(name, libc::O_RDONLY | libc::O_DIRECTORY) {
            Ok(_) => Err(Refusal::new(Why::Untrusted, format!("{name} is a directory: remove it"))),
            Err(_) => Ok(()),
        }
    }

    pub(super) fn open_file(&self, name: &str) -> Result<File, Refusal> {
        // A look is no use: the time of use says what goes first. The kernel allows that to the owner only.
        let flags = libc::O_RDONLY | libc::O_NONBLOCK;
        let file = self
            .open_at(name, flags | libc::O_NOATIME)
            .or_else(|e| if e.kind() == std::io::ErrorKind::PermissionDenied { self.open_at(name, flags) } else { Err(e) });
        let file = match file {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Err(Refusal::new(Why::Missing, format!("there is no {name}"))),
            Err(e) if e.raw_os_error() == Some(libc::ELOOP) => {
                return Err(Refusal::new(Why::Untrusted, format!("{name} is a symbolic link")));
            }
            Err(e) => return Err(Refusal::new(Why::Io, format!("open {name}: {e}"))),
        };
        let meta = file.metadata().map_err(|e| Refusal::new(Why::Io, format!("stat {name}: {e}")))?;
        if !meta.is_file() {
            return Err(Refusal::new(Why::Untrusted, format!("{name} is not a regular file")));
        }
        trusted(&meta).map_err(|what| Refusal::new(Why::Untrusted, format!("{name} {what}")))?;
        Ok(file)
    }

    pub(super) fn open_at(&self, name: &str, flags: i32) -> std::io::Result<File> {
        let c_name = CString::new(name).map_err(std::io::Error::other)?;
        let flags = flags | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        // SAFETY: the descriptor is open and the name NUL-terminated.
        let fd = unsafe { libc::openat(self.directory.fd().as_raw_fd(), c_name.as_ptr(), flags, 0o600) };
        if fd < 0 {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: a new descriptor that nothing else owns. A clone's number is above those of the standard streams.
        let file = unsafe { File::from_raw_fd(fd) };
        if file.as_raw_fd() > 2 { Ok(file) } else { file.try_clone() }
    }

    pub(super) fn table(&self, file: &File, name: &str) -> Result<Table, Refusal> {
        let failed = |e: std::io::Error| Refusal::new(Why::Io, format!("read {name}: {e}"));
        let meta = file.metadata().map_err(failed)?;
        let mut bytes = vec![0; HEADER.min(usize::try_from(meta.size()).unwrap_or(HEADER))];
        file.read_exact_at(&mut bytes, 0).map_err(failed)?;
        let named = |refusal: Refusal| Refusal::new(refusal.why, format!("{name}: {}", refusal.message));
        let table = header::decode(&bytes, meta.size(), self.version).map_err(named)?;
        if (meta.mtime(), meta.mtime_nsec()) != (table.written, 0) {
            return Err(Refusal::new(Why::Modified, format!("{name} was changed after it was complete")));
        }
        Ok(table)
    }

    /// The right to build the file of that name. Whoever has it is waited for, but no longer than `wait`.
    ///
    /// # Errors
    /// [`Why::Busy`] if another process still has it; [`Why::Io`] if there can be no lock.
    pub fn build(&self, name: &str, wait: Duration) -> Result<Build, Refusal> {
        let (start, lock_name) = (Instant::now(), format!("{name}{LOCK}"));
        let failed = |e: &dyn std::fmt::Display| Refusal::new(Why::Io, format!("lock {lock_name}: {e}"));
        loop {
            let mut file = match self.open_at(&lock_name, libc::O_RDWR | libc::O_CREAT | libc::O_NONBLOCK) {
                Ok(file) => file,
                // A link, which nobody locks.
                Err(e) if e.raw_os_error() == Some(libc::ELOOP) => {
                    self.unlink(&lock_name).map_err(|e| failed(&e))?;
                    continue;
                }
                Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => {
                    let message = format!("lock {lock_name}: {e}; it is another user's: remove it");
                    return Err(Refusal::new(Why::Untrusted, message));
                }
                Err(e) => return Err(failed(&e)),
            };
            let meta = file.metadata().map_err(|e| failed(&e))?;
            if lock(&file, libc::LOCK_EX)? {
                // The one before may have removed the name since it was opened: then the lock is of no use to others.
                if self.open_at(&lock_name, libc::O_RDONLY | libc::O_NONBLOCK).is_ok_and(|f| same_file(&f, &file)) {
                    // One that others could hold as long as they like is replaced. The directory is ours alone, so it was left by an accident.
                    if !meta.is_file() || trusted(&meta).is_err() {
                        self.unlink(&lock_name).map_err(|e| failed(&e))?;
                        continue;
                    }
                    // For whoever looks. Nothing depends on it.
                    let _ = writeln!(file, "{}", std::process::id());
                    let directory = self.directory.fd().try_clone_to_owned().map_err(|e| failed(&e))?;
                    return Ok(Build { directory, lock: CString::new(lock_name.clone()).map_err(|e| failed(&e))?, _file: file });
                }
                continue;
            }
            if start.elapsed() >= wait {
                return Err(Refusal::new(
                    Why::Busy,
                    format!("another process builds {name}, and has not finished in {} s", wait.as_secs()),
                ));
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Gives the arena's file, which [`Arena::with_header`] has made, a name, under which a later start will find it. Until this succeeds nobody can. Stores to
    /// the arena stay in this process afterwards. The size of the file, in bytes.
    ///
    /// # Errors
    /// Why it is not kept: then the arena is as before.
    ///
    /// # Safety
    /// Nobody may write to the arena's bytes meanwhile.
    pub unsafe fn keep(&self, build: &Build, name: &str, arena: &Arc<Arena>, mut table: Table, limit: Option<u64>) -> Result<u64, Refusal> {
        // First of all: what is stored by mapping after the file was synced would change it.
        // SAFETY: by the caller's promise.
        unsafe { arena.set_private(true) }?;
        let kept = self.finish(build, name, arena, &mut table, limit);
        if kept.is_err() {
            // SAFETY: nobody has stored anything since.
            let _ = unsafe { arena.set_private(false) };
        }
        kept
    }

    fn finish(&self, _build: &Build, name: &str, arena: &Arc<Arena>, table: &mut Table, limit: Option<u64>) -> Result<u64, Refusal> {
        let failed = |what: &str, e: &std::io::Error| Refusal::new(Why::Io, format!("{what} {name}: {e}"));
        let file = File::from(arena.file()?);
        for t in &mut table.tensors {
            let range = (usize::try_from(t.offset), usize::try_from(t.bytes));
            let (Ok(offset), Ok(bytes)) = range else { return Err(Refusal::new(Why::OtherTensors, "a tensor is too large")) };
            t.crc = arena.sum(offset, bytes)?;
        }
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        table.written = i64::try_from(now.as_secs()).unwrap_or(0);
        let bytes = HEADER as u64 + arena.capacity() as u64;
        if table.data()? != arena.capacity() {
            return Err(Refusal::new(Why::OtherTensors, "the arena has another size than its buffer"));
        }
        let (block, json) = header::encode(table)?;
        file.sync_all().map_err(|e| failed("sync the data of", &e))?;
        file.write_all_at(&json, header::BLOCK as u64).map_err(|e| failed("write the table of", &e))?;
        file.sync_all().map_err(|e| failed("sync the table of", &e))?;
        file.write_all_at(&block, 0).map_err(|e| failed("write the mark of", &e))?;
        let written = SystemTime::UNIX_EPOCH + Duration::from_secs(now.as_secs());
        let times = std::fs::FileTimes::new().set_accessed(SystemTime::now()).set_modified(written);
        file.set_times(times).map_err(|e| failed("set the times of", &e))?;
        file.sync_all().map_err(|e| failed("sync the mark of", &e))?;
        if !lock(&file, libc::LOCK_SH)? {
            return Err(Refusal::new(Why::Busy, "the new file is locked"));
        }
        let whole = self.alone()?;
        self.make_room(name, bytes, limit)?;
        self.link(&file, name).map_err(|e| failed("give a name to", &e))?;
        // Unless this succeeds the name may be lost with the power; it never leads to anything else.
        let _ = whole.sync_all();
        Ok(bytes)
    }

    /// The directory's lock, for the moment in which files come and go.
    pub(super) fn alone(&self) -> Result<File, Refusal> {
        let failed = |e: std::io::Error| Refusal::new(Why::Io, format!("lock {}: {e}", self.directory.path().display()));
        // Opened anew, since locks belong to descriptions.
        let file = self.open_at(".", libc::O_RDONLY | libc::O_DIRECTORY).map_err(failed)?;
        // Held by others for moments only.
        let start = Instant::now();
        while !lock(&file, libc::LOCK_EX)? {
            if start.elapsed() > Duration::from_secs(10) {
                return Err(Refusal::new(Why::Busy, format!("{} is locked by another process", self.directory.path().display())));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(file)
    }

    /// A file whose data are not those of its model loses its name, so that no later start finds it. Whoever uses it keeps it.
    pub fn discard(&self, kept: &Kept) {
        let Ok(_alone) = self.alone() else { return };
        if self.open_file(&kept.name).is_ok_and(|file| same_file(&file, &kept.file)) {
            // If it stays, later starts copy the model again, as this one does.
            let _ = self.unlink(&kept.name);
        }
    }

    /// Gives a file without a name this one; a file that has it loses it.
    fn link(&self, file: &File, name: &str) -> std::io::Result<()> {
        match self.unlink(name) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let from = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd())).map_err(std::io::Error::other)?;
        let to = CString::new(name).map_err(std::io::Error::other)?;
        let directory = self.directory.fd().as_raw_fd();
        // SAFETY: both descriptors are open and both names NUL-terminated.
        if unsafe { libc::linkat(libc::AT_FDCWD, from.as_ptr(), directory, to.as_ptr(), libc::AT_SYMLINK_FOLLOW) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        Ok(())
    }

    pub(super) fn unlink(&self, name: &str) -> std::io::Result<()> {
        unlink(self.directory.fd().as_raw_fd(), &CString::new(name).map_err(std::io::Error::other)?)
    }
}

impl Kept {
    /// An arena of its data. Until the last of it is gone the file is in use.
    ///
    /// # Errors
    /// If it cannot be mapped.
    pub fn map(&self) -> Result<Arc<Arena>, Refusal> {
        let fd = OwnedFd::from(self.file.try_clone().map_err(|e| Refusal::new(Why::Io, e.to_string()))?);
        Ok(Arena::of_file(fd, HEADER as u64, self.table.data()?)?)
    }

    /// Puts its data behind the addresses of an arena that has as many.
    ///
    /// # Errors
    /// If it cannot be mapped: then all is as before.
    ///
    /// # Safety
    /// Nobody may use the arena's bytes meanwhile, or rely on what they were.
    pub unsafe fn map_over(&self, arena: &Arena) -> Result<(), Refusal> {
        if self.table.data()? != arena.capacity() {
            return Err(Refusal::new(Why::OtherTensors, format!("{} has another size", self.name)));
        }
        let fd = OwnedFd::from(self.file.try_clone().map_err(|e| Refusal::new(Why::Io, e.to_string()))?);
        // SAFETY: by the caller's promise.
        Ok(unsafe { arena.exchange(fd, HEADER as u64, true) }?)
    }

    /// Takes note of the time of use.
    pub fn touch(&self) {
        // Only the owner may, which we are; a file system that is read-only by now keeps the old one.
        let _ = self.file.set_times(std::fs::FileTimes::new().set_accessed(SystemTime::now()));
    }
}

impl Drop for Build {
    fn drop(&mut self) {
        // While it is still locked: whoever opened it before finds out that it has no name any more.
        let _ = unlink(self.directory.as_raw_fd(), &self.lock);
    }
}

fn unlink(directory: i32, name: &CString) -> std::io::Result<()> {
    // SAFETY: the descriptor is open and the name NUL-terminated.
    if unsafe { libc::unlinkat(directory, name.as_ptr(), 0) } == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// Whether an advisory lock could be had at once. The kernel ends it with the last descriptor.
pub(super) fn lock(file: &File, kind: i32) -> Result<bool, Refusal> {
    loop {
        // SAFETY: the descriptor is open.
        if unsafe { libc::flock(file.as_raw_fd(), kind | libc::LOCK_NB) } == 0 {
            return Ok(true);
        }
        match std::io::Error::last_os_error() {
            e if e.kind() == std::io::ErrorKind::WouldBlock => return Ok(false),
            e if e.kind() == std::io::ErrorKind::Interrupted => {}
            e => return Err(Refusal::new(Why::Io, format!("lock a file: {e}"))),
        }
    }
}

/// Keeps others from removing a file.
pub(super) fn hold(file: &File, name: &str) -> Result<(), Refusal> {
    let start = Instant::now();
    while !lock(file, libc::LOCK_SH)? {
        if start.elapsed() > MOMENT {
            return Err(Refusal::new(Why::Busy, format!("{name} is being removed")));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn same_file(a: &File, b: &File) -> bool {
    let identity = |f: &File| f.metadata().map(|m| (m.dev(), m.ino()));
    matches!((identity(a), identity(b)), (Ok(a), Ok(b)) if a == b)
}

/// Whether a file or directory is this user's, and nobody else may write to it.
fn trusted(meta: &std::fs::Metadata) -> Result<(), String> {
    // SAFETY: it has no preconditions.
    let user = unsafe { libc::geteuid() };
    if meta.uid() != user {
        return Err(format!("belongs to user {}, this is {user}", meta.uid()));
    }
    if meta.mode() & 0o022 != 0 {
        return Err(format!("may be written by others (mode {:o})", meta.mode() & 0o7777));
    }
    Ok(())
}

fn io(what: &str, path: &std::path::Path, e: &std::io::Error) -> Refusal {
    Refusal::new(Why::Io, format!("{what} {}: {e}", path.display()))
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::header::Entry;
    use super::super::manage::Checked;
    use super::super::model::Watched;
    use super::*;
    use crate::memory::HUGE_PAGE;
    use crate::memory::mapping::FileMapping;
    use crate::memory::origin;
    use crate::memory::testing::Sample;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    const VERSION: &str = "1.2.3";
    pub(in super::super) const LEN: usize = 3_000_000;
    const FILE: u64 = (HEADER + 2 * HUGE_PAGE) as u64;

    pub(in super::super) fn store(dir: &Path) -> Store {
        Store::new(Arc::new(Directory::open(dir, false).unwrap()), VERSION).unwrap()
    }

    /// Keeps two thirds of the sample, in two tensors with a gap between.
    pub(in super::super) fn keep(store: &Store, name: &str, sample: &Sample, limit: Option<u64>) -> Result<Arc<Arena>, Refusal> {
        let map = FileMapping::open(&sample.path).unwrap();
        let file = origin::behind(map.bytes().as_ptr(), LEN, None, false).ok().unwrap().file;
        let watched = Watched::new(&file)?;
        let build = store.build(name, Duration::ZERO)?;
        let arena = Arena::with_header(store.directory(), LEN, HEADER).unwrap();
        let region = crate::memory::Region::from(arena.slice(LEN).unwrap());
        let entry = |name: &str, offset, bytes| Entry { name: name.into(), offset, bytes, model: 0, source: 1000 + offset, crc: 0 };
        let tensors = vec![entry("a", 0, 1_000_000), entry("b", 1_000_064, 1_000_000)];
        for t in &tensors {
            let target = region.target(t.offset as usize, t.bytes as usize).unwrap();
            // SAFETY: the region is this test's.
            unsafe { crate::memory::fill::copy(sample.bytes[t.source as usize..].as_ptr(), &target, &mut |_| {}) };
            assert!(arena.knows(t.offset as usize, t.bytes as usize), "it would be read once more");
        }
        let models = vec![watched.describe(&file, 1000)?];
        let table = Table { berth: VERSION.into(), buffer: LEN as u64, written: 0, models, tensors };
        // SAFETY: nobody else uses the arena.
        unsafe { store.keep(&build, name, &arena, table, limit) }.map(|_| arena)
    }

    pub(in super::super) fn why<T>(got: Result<T, Refusal>) -> Why {
        got.err().unwrap().why
    }

    #[test]
    fn what_is_kept_is_found_with_the_same_bytes_and_stores_do_not_reach_it() {
        let (dir, sample) = (tempfile::tempdir().unwrap(), Sample::new("kept", LEN));
        let store = store(dir.path());
        let arena = keep(&store, "x.arena", &sample, None).unwrap();
        let meta = std::fs::metadata(dir.path().join("x.arena")).unwrap();
        assert_eq!((meta.len(), meta.mode() & 0o7777, store.names()), (FILE, 0o600, vec!["x.arena".to_owned()]));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no lock is left");
        let kept = store.open("x.arena").unwrap();
        let again = kept.map().unwrap();
        let slice = again.slice(LEN).unwrap();
        // SAFETY: the slice has these bytes, and nobody else uses them. A page in the middle, and one that is not whole.
        unsafe {
            slice.base().add(500_000).write(!sample.bytes[501_000]);
            assert!(again.holds(0, sample.bytes[1000..].as_ptr(), 1_000_000), "a store to whole pages is undone");
            assert_eq!(slice.base().add(500_000).read(), sample.bytes[501_000]);
            slice.base().add(1_000_100).write(!sample.bytes[1_001_100]);
            assert!(!again.holds(1_000_064, sample.bytes[1_001_064..].as_ptr(), 1_000_000), "others are seen");
        }
        // SAFETY: both arenas have these bytes, and nobody else uses them.
        unsafe {
            assert!(again.holds(0, sample.bytes[1000..].as_ptr(), 1_000_000));
            assert!(arena.holds(1_000_064, sample.bytes[1_001_064..].as_ptr(), 1_000_000));
            assert!(!again.holds(0, sample.bytes[1001..].as_ptr(), 1_000_000));
        }
        assert_eq!(store.verify("x.arena"), Ok(Checked { damaged: vec![], tensors: 2, bytes: 2_000_000 }));
    }

    #[test]
    fn a_lock_that_is_not_ours_alone_is_replaced_unless_somebody_holds_it() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let path = dir.path().join("x.arena.lock");
        let left: [fn(&Path); 4] = [
            |p| {
                std::fs::write(p, "1").unwrap();
                std::fs::set_permissions(p, PermissionsExt::from_mode(0o666)).unwrap();
            },
            |p| {
                std::fs::write(p, "1").unwrap();
                // Only root may; for others it is theirs.
                let _ = std::os::unix::fs::chown(p, Some(65_534), None);
            },
            |p| std::os::unix::fs::symlink("/nonexistent/elsewhere", p).unwrap(),
            |p| {
                let name = CString::new(p.to_str().unwrap()).unwrap();
                // SAFETY: the name is NUL-terminated.
                assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
            },
        ];
        for make in left {
            make(&path);
            let build = store.build("x.arena", Duration::ZERO).unwrap();
            let meta = std::fs::symlink_metadata(&path).unwrap();
            assert!(meta.is_file() && trusted(&meta).is_ok());
            drop(build);
            assert!(!path.exists());
        }
        left[0](&path);
        let held = File::open(&path).unwrap();
        assert!(lock(&held, libc::LOCK_EX).unwrap());
        assert_eq!(why(store.build("x.arena", Duration::ZERO)), Why::Busy);
        drop(held);
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        let refusal = store.build("x.arena", Duration::ZERO).err().unwrap();
        assert!(refusal.why == Why::Io && refusal.message.contains("directory"), "{}", refusal.message);
        std::fs::create_dir(dir.path().join("y.arena")).unwrap();
        assert_eq!((why(store.check_name("y.arena")), store.check_name("z.arena")), (Why::Untrusted, Ok(())));
    }

    #[test]
    fn links_and_what_others_may_write_or_own_are_not_trusted() {
        let (dir, sample) = (tempfile::tempdir().unwrap(), Sample::new("trust", LEN));
        let store = store(dir.path());
        drop(keep(&store, "x.arena", &sample, None).unwrap());
        let path = |name: &str| dir.path().join(name);
        std::os::unix::fs::symlink(path("x.arena"), path("link.arena")).unwrap();
        std::fs::create_dir(path("dir.arena")).unwrap();
        for name in ["link.arena", "dir.arena"] {
            assert_eq!(why(store.open(name)), Why::Untrusted, "{name}");
        }
        for mode in [0o620, 0o602, 0o666] {
            std::fs::set_permissions(path("x.arena"), PermissionsExt::from_mode(mode)).unwrap();
            assert_eq!(why(store.open("x.arena")), Why::Untrusted, "{mode:o}");
        }
        std::fs::set_permissions(path("x.arena"), PermissionsExt::from_mode(0o600)).unwrap();
        assert!(store.open("x.arena").is_ok());
        if std::os::unix::fs::chown(path("x.arena"), Some(65_534), None).is_ok() {
            assert_eq!(why(store.open("x.arena")), Why::Untrusted);
        }
        // The link goes, not what it leads to.
        store.remove("link.arena").unwrap();
        assert!(!path("link.arena").exists() && path("x.arena").exists());
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
        assert_eq!(why(Store::new(Arc::new(Directory::open(dir.path(), false).unwrap()), VERSION)), Why::Untrusted);
    }
}
