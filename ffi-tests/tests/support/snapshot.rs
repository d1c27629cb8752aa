//! What lies below a directory, to see that a run left it as it was.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// What lies below a directory: kind, mode, size, inode and time of change of every entry.
pub(crate) type Snapshot = BTreeMap<PathBuf, (u32, u64, u64, i64, i64)>;

/// Looks at everything below `dir`, without following links.
pub(crate) fn snapshot(dir: &Path) -> Snapshot {
    let mut found = Snapshot::new();
    let mut left = vec![dir.to_owned()];
    while let Some(path) = left.pop() {
        let meta = fs::symlink_metadata(&path).expect("an entry that was just listed");
        // Making and removing a nameless file touches the times of its directory.
        let time = if meta.is_dir() { (0, 0) } else { (meta.mtime(), meta.mtime_nsec()) };
        let size = if meta.is_dir() { 0 } else { meta.len() };
        if meta.is_dir() {
            left.extend(fs::read_dir(&path).expect("a directory of ours").map(|e| e.expect("an entry").path()));
        }
        found.insert(path, (meta.mode(), size, meta.ino(), time.0, time.1));
    }
    found
}
