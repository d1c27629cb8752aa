//! What the tests of this module share: files with known bytes, and processes of their own.
//!
//! Owns: making and removing the files, running a test alone. Must not know: what is tested.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A file of pseudo-random bytes, removed at the end.
pub(crate) struct Sample {
    pub(crate) path: PathBuf,
    pub(crate) bytes: Vec<u8>,
}

impl Sample {
    pub(crate) fn new(name: &str, len: usize) -> Sample {
        Sample::new_in(&std::env::temp_dir(), name, len).unwrap()
    }

    pub(crate) fn new_in(dir: &Path, name: &str, len: usize) -> std::io::Result<Sample> {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = dir.join(format!("berth-sample-{name}-{}-{number}", std::process::id()));
        let bytes = random(len, number as u64);
        std::fs::write(&path, &bytes)?;
        Ok(Sample { path, bytes })
    }

    pub(crate) fn open(&self) -> File {
        File::open(&self.path).unwrap()
    }

    pub(crate) fn open_to_write(&self) -> File {
        File::options().write(true).open(&self.path).unwrap()
    }
}

/// Stores to every byte of a region that nobody else uses.
pub(crate) fn touch(region: &super::Region) {
    // SAFETY: the region has these bytes, and nobody else uses them.
    unsafe { std::ptr::write_bytes(region.base(), 1, region.len()) };
}

/// Pseudo-random bytes.
pub(crate) fn random(len: usize, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bytes = vec![0; len];
    random.fill(&mut bytes);
    bytes
}

impl Drop for Sample {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Whether this process runs nothing but this test: what it counts is its own then. If others run too, the test is run in a process of its own, and
/// its caller has nothing left to do.
pub(crate) fn alone(test: &str) -> bool {
    const ALONE: &str = "TEST_ALONE";
    if std::env::var_os(ALONE).is_some_and(|name| name == test) {
        return true;
    }
    let program = std::env::current_exe().unwrap();
    let out = std::process::Command::new(program).args([test, "--exact", "--nocapture"]).env(ALONE, test).output().unwrap();
    let (said, faults) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success() && said.contains("1 passed"), "{test}: {said}{faults}");
    eprint!("{faults}");
    false
}

/// A fresh directory that is removed at the end.
pub(crate) struct Scratch(pub(crate) std::path::PathBuf);

impl Scratch {
    pub(crate) fn new(name: &str) -> Scratch {
        let path = std::env::temp_dir().join(format!("berth-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
