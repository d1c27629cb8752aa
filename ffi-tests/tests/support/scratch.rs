//! A directory of a test's own, on the disk of the target directory.

use std::fs;
use std::path::{Path, PathBuf};

/// A fresh directory, removed with all its contents at the end.
pub(crate) struct Scratch(tempfile::TempDir);

impl Scratch {
    /// Under `target/tmp`, which is on a disk where `/tmp` may not be.
    pub(crate) fn new() -> Scratch {
        Scratch(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("the target directory is writable"))
    }

    /// Its path.
    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    /// A new directory in it.
    pub(crate) fn dir(&self, name: &str) -> PathBuf {
        let path = self.path().join(name);
        fs::create_dir_all(&path).expect("a directory in a fresh directory");
        path
    }
}
