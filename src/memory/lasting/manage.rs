//! What people do with the files that last: look, verify, remove.
//!
//! Owns: the states that are shown. Must not know: how they are shown.

use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::{Duration, SystemTime};

use super::header::{self, HEADER};
use super::store::{LOCK, SUFFIX, Store, hold, lock};
use super::{Refusal, Why};
use crate::memory::sums;

/// What there is of one file.
pub struct Listed {
    /// Name in the directory.
    pub name: String,
    /// Size in bytes.
    pub bytes: u64,
    /// When a start used it last.
    pub used: SystemTime,
    /// Whether a process uses it now.
    pub in_use: bool,
    /// The files that it was made of, as far as its header can be read.
    pub models: Vec<String>,
    /// What it is.
    pub state: State,
}

/// What a file is.
#[derive(Debug, PartialEq, Eq)]
pub enum State {
    /// The next start can use it.
    Complete,
    /// A process builds it now. There may be an older one of that name.
    Building,
    /// No start will use it, for this reason.
    Stale(Refusal),
    /// It is the lock of a process that has ended.
    Abandoned,
}

/// Whether data are as they were written.
#[derive(Debug, PartialEq, Eq)]
pub struct Checked {
    /// Tensors that are not.
    pub damaged: Vec<String>,
    /// How many were looked at, and their bytes.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
}

impl Store {
    /// All files that begin as Berth's do or cannot be read, and locks of processes that build or have ended.
    pub fn list(&self) -> Vec<Listed> {
        let mut all: Vec<Listed> = self.names().into_iter().filter_map(|name| self.look(name)).collect();
        let entries = std::fs::read_dir(format!("/proc/self/fd/{}", self.directory.fd().as_raw_fd())).into_iter().flatten().flatten();
        for entry in entries.filter_map(|e| e.file_name().into_string().ok()) {
            let Some(name) = entry.strip_suffix(LOCK).filter(|n| n.ends_with(SUFFIX)) else { continue };
            // A lock of any kind, one that is nobody's business too: whoever builds has to get past it. What cannot be opened is held by nobody that we
            // know of.
            let file = self.open_at(&entry, libc::O_RDONLY | libc::O_NONBLOCK);
            let held = file.as_ref().is_ok_and(|file| !lock(file, libc::LOCK_SH).unwrap_or(false));
            match all.iter_mut().find(|l| l.name == name) {
                Some(there) if held => there.state = State::Building,
                Some(_) => {}
                None => {
                    let used = file.and_then(|f| f.metadata()?.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
                    let state = if held { State::Building } else { State::Abandoned };
                    all.push(Listed { name: name.to_owned(), bytes: 0, used, in_use: held, models: Vec::new(), state });
                }
            }
        }
        all
    }

    fn look(&self, name: String) -> Option<Listed> {
        if self.open_file(&name).is_ok_and(|file| !header::begins(&file)) {
            return None;
        }
        // Whether others use it, before it is held here.
        let free = self.open_file(&name).and_then(|f| lock(&f, libc::LOCK_EX)).unwrap_or(true);
        let c_name = CString::new(name.clone()).ok()?;
        // SAFETY: an all-zero stat is valid, the descriptor open, the name NUL-terminated.
        let stat = unsafe {
            let mut stat: libc::stat = std::mem::zeroed();
            let found = libc::fstatat(self.directory.fd().as_raw_fd(), c_name.as_ptr(), &raw mut stat, libc::AT_SYMLINK_NOFOLLOW);
            (found == 0).then_some(stat)
        }?;
        let used = SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(stat.st_atime).unwrap_or(0));
        let bytes = u64::try_from(stat.st_size).unwrap_or(0);
        let (models, state) = match self.open(&name) {
            Ok(kept) => {
                let models = kept.table.models.iter().map(|m| m.path.clone()).collect();
                let stale = kept.table.models.iter().find_map(|m| m.check_by_name().err());
                (models, stale.map_or(State::Complete, State::Stale))
            }
            Err(refusal) => (Vec::new(), State::Stale(refusal)),
        };
        Some(Listed { name, bytes, used, in_use: !free, models, state })
    }

    /// Removes a file, or what a lock has left, unless a process uses it.
    ///
    /// # Errors
    /// [`Why::Busy`] if one does, [`Why::Missing`] if there is none.
    pub fn remove(&self, name: &str) -> Result<(), Refusal> {
        let _alone = self.alone()?;
        let build = self.build(name, Duration::ZERO).map_err(|r| match r.why {
            Why::Busy => Refusal::new(Why::Busy, format!("a process builds {name} now")),
            _ => r,
        })?;
        let removed = match self.open_file(name) {
            Ok(file) if !lock(&file, libc::LOCK_EX)? => Err(Refusal::new(Why::Busy, format!("a process uses {name} now"))),
            // What is not trusted is not used by anybody. A link is removed, not what it leads to.
            Ok(_) | Err(Refusal { why: Why::Untrusted | Why::Io, .. }) => {
                self.unlink(name).map_err(|e| Refusal::new(Why::Io, format!("remove {name}: {e}")))
            }
            Err(refusal) => Err(refusal),
        };
        drop(build);
        removed
    }

    /// Removes what locks of processes that have ended have left beside files: whose they were.
    pub fn clear_locks(&self) -> Vec<String> {
        let entries = std::fs::read_dir(format!("/proc/self/fd/{}", self.directory.fd().as_raw_fd())).into_iter().flatten().flatten();
        let names = entries.filter_map(|e| Some(e.file_name().into_string().ok()?.strip_suffix(LOCK)?.to_owned()));
        // Whoever gets the right to build removes the lock when that ends.
        names.filter(|n| n.ends_with(SUFFIX) && self.build(n, Duration::ZERO).is_ok()).collect()
    }

    /// Reads all data of a file and compares them with the checksums of its table. Whether the model is still the same does not matter.
    ///
    /// # Errors
    /// Why the file cannot be read, or its table is not trusted.
    pub fn verify(&self, name: &str) -> Result<Checked, Refusal> {
        let file = self.open_file(name)?;
        hold(&file, name)?;
        let mut checked = Checked { damaged: Vec::new(), tensors: 0, bytes: 0 };
        let changed = match self.table(&file, name) {
            Err(r) if r.why == Why::Modified => Some(r),
            Err(r) => return Err(r),
            Ok(_) => None,
        };
        let mut bytes = vec![0; HEADER];
        file.read_exact_at(&mut bytes, 0).map_err(|e| Refusal::new(Why::Io, format!("read {name}: {e}")))?;
        let table = header::decode(&bytes, file.metadata().map_or(0, |m| m.size()), self.version)?;
        for t in &table.tensors {
            if sums::of_file(file.as_fd(), HEADER as u64 + t.offset, t.bytes)? != t.crc {
                checked.damaged.push(t.name.clone());
            }
            checked.tensors += 1;
            checked.bytes += t.bytes;
        }
        match changed {
            // All bytes that matter are right, but it is not used any more.
            Some(refusal) if checked.damaged.is_empty() => Err(refusal),
            _ => Ok(checked),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::super::store::tests::{LEN, keep, store, why};
    use super::*;
    use crate::memory::testing::Sample;

    #[test]
    fn a_damaged_byte_of_data_is_found_and_its_tensor_named() {
        let (dir, sample) = (tempfile::tempdir().unwrap(), Sample::new("damaged", LEN));
        let store = store(dir.path());
        drop(keep(&store, "x.arena", &sample, None).unwrap());
        let path = dir.path().join("x.arena");
        let modified = std::fs::metadata(&path).unwrap().modified().unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        for (at, name) in [(0, "a"), (999_999, "a"), (1_000_064, "b"), (2_000_063, "b")] {
            let (mut byte, at) = ([0], HEADER as u64 + at);
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 4], at).unwrap();
            assert_eq!(why(store.open("x.arena")), Why::Modified, "a change that is not hidden is found at once");
            file.set_modified(modified).unwrap();
            assert_eq!(store.verify("x.arena").unwrap().damaged, [name]);
            file.write_all_at(&byte, at).unwrap();
            assert_eq!(why(store.verify("x.arena")), Why::Modified);
            file.set_modified(modified).unwrap();
            assert!(store.verify("x.arena").unwrap().damaged.is_empty() && store.open("x.arena").is_ok());
        }
        file.write_all_at(b"?", 9).unwrap();
        file.set_modified(modified).unwrap();
        assert_eq!((why(store.open("x.arena")), why(store.verify("x.arena"))), (Why::OtherVersion, Why::OtherVersion));
    }

    #[test]
    fn a_lock_ends_with_its_holder_and_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let (store, other) = (store(dir.path()), store(dir.path()));
        let held = store.build("x.arena", Duration::ZERO).unwrap();
        assert_eq!(why(other.build("x.arena", Duration::from_millis(120))), Why::Busy);
        assert_eq!(store.list().iter().map(|l| &l.state).collect::<Vec<_>>(), [&State::Building]);
        assert_eq!(why(store.remove("x.arena")), Why::Busy);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| other.build("x.arena", Duration::from_secs(20)).map(drop));
            std::thread::sleep(Duration::from_millis(100));
            drop(held);
            assert_eq!(waiting.join().unwrap(), Ok(()));
        });
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        // What a killed process leaves.
        std::fs::write(dir.path().join("x.arena.lock"), "1\n").unwrap();
        assert_eq!(store.list().iter().map(|l| &l.state).collect::<Vec<_>>(), [&State::Abandoned]);
        assert_eq!(why(store.remove("x.arena")), Why::Missing);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "its lock is gone too");
    }

    #[test]
    fn locks_that_nobody_holds_are_cleared_whatever_they_are() {
        let (dir, sample) = (tempfile::tempdir().unwrap(), Sample::new("locks", LEN));
        let store = store(dir.path());
        drop(keep(&store, "x.arena", &sample, None).unwrap());
        for name in ["x.arena.lock", "y.arena.lock"] {
            std::fs::write(dir.path().join(name), "1").unwrap();
            std::fs::set_permissions(dir.path().join(name), std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
        }
        std::fs::write(dir.path().join("foreign.lock"), "1").unwrap();
        let held = store.build("z.arena", Duration::ZERO).unwrap();
        let states: Vec<_> = store.list().into_iter().map(|l| (l.name, l.state)).collect();
        assert!(
            states.contains(&("y.arena".into(), State::Abandoned)) && states.contains(&("z.arena".into(), State::Building)),
            "{states:?}"
        );
        let mut cleared = store.clear_locks();
        cleared.sort();
        assert_eq!(cleared, ["x.arena", "y.arena"]);
        drop(held);
        let mut left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["foreign.lock", "x.arena"]);
    }

    #[test]
    fn only_what_nobody_uses_is_removed() {
        let (dir, sample) = (tempfile::tempdir().unwrap(), Sample::new("remove", LEN));
        let store = store(dir.path());
        let arena = keep(&store, "x.arena", &sample, None).unwrap();
        assert_eq!(why(store.remove("x.arena")), Why::Busy);
        assert!(store.list()[0].in_use);
        drop(arena);
        assert!(!store.list()[0].in_use && store.list()[0].state == State::Complete);
        let kept = store.open("x.arena").unwrap();
        let arena = kept.map().unwrap();
        drop(kept);
        assert_eq!(why(store.remove("x.arena")), Why::Busy, "the mapping holds it");
        drop(arena);
        sample.open_to_write().set_modified(SystemTime::now()).unwrap();
        assert!(matches!(&store.list()[0].state, State::Stale(r) if r.why == Why::ModelChanged));
        store.remove("x.arena").unwrap();
        assert_eq!(why(store.remove("x.arena")), Why::Missing);
    }
}
