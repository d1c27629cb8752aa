//! Files with known bytes for the tests of this module.
//!
//! Owns: making and removing them. Must not know: who reads them.

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
