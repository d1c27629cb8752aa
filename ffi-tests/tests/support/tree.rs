//! A source tree built with `berth-llama.cmake`. The build is kept in the cache, so that a later run only links anew: Berth changes often, the tree
//! never does.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ffi_tests::{cache, run, tools};
use sha2::{Digest, Sha256};

use super::{peer, prefix};

/// A build.
pub(crate) struct Build {
    /// Where its programs and libraries are.
    pub(crate) bin: PathBuf,
    /// The Berth that it was built with.
    pub(crate) prefix: PathBuf,
    /// What CMake said of Berth.
    pub(crate) status: String,
    /// Nobody else builds there while this lives.
    _lock: File,
}

/// Builds these targets of the tree. `None` and a skip if a tool is missing.
pub(crate) fn build(name: &str, source: &Path, options: &[&str], targets: &[&str]) -> Option<Build> {
    for tool in ["cmake", "ninja", "nm"] {
        ffi_tests::skip::available(&format!("llama.cpp built with Berth ({name})"), tools::command(tool).map_err(Into::into))?;
    }
    let recipe = format!("1 {} {}", source.display(), options.join(" "));
    let dir = cache::root().unwrap().join("ship").join(format!("{name}-{}", cache::key(&recipe)));
    fs::create_dir_all(&dir).unwrap();
    let lock = File::create(dir.join("lock")).unwrap();
    lock.lock().unwrap();
    // A blank in the path: it has to go through CMake, ninja, compiler and linker.
    let prefix = dir.join("with a blank");
    peer::succeeds(prefix::dist(Path::new(env!("CARGO_MANIFEST_DIR")), &["--prefix", prefix.to_str().unwrap()]));
    let out = dir.join("build");
    let mut cmake = peer::plain("cmake");
    cmake.args(["-G", "Ninja", "-S"]).arg(source).arg("-B").arg(&out).args(options);
    cmake.arg(format!("-DCMAKE_PROJECT_INCLUDE={}", prefix.join("lib/cmake/berth/berth-llama.cmake").display()));
    let said = peer::succeeds(cmake).stdout;
    let status: Vec<&str> = said.lines().filter_map(|l| l.strip_prefix("-- Berth: ")).collect();
    assert_eq!(status.len(), 1, "once: {said}");
    let mut ninja = peer::plain("ninja");
    ninja.arg("-C").arg(&out).args(targets).env("CCACHE_BASEDIR", cache::root().unwrap()).env("CCACHE_NOHASHDIR", "1");
    cache::say(&format!("building {name} with Berth: minutes at first, seconds later"));
    run::run(ninja, Duration::from_secs(3600)).and_then(|o| o.checked(name)).unwrap_or_else(|e| panic!("{e:#}"));
    Some(Build { bin: out.join("bin"), prefix, status: status.concat(), _lock: lock })
}

/// Every file of a tree, name and bytes, as one number.
pub(crate) fn fingerprint(dir: &Path) -> String {
    let (mut dirs, mut files) = (vec![dir.to_owned()], Vec::new());
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_dir() { dirs.push(entry.path()) } else { files.push(entry.path()) }
        }
    }
    files.sort();
    assert!(!files.is_empty(), "{} is empty", dir.display());
    let mut all = Sha256::new();
    for file in files {
        all.update(file.as_os_str().as_encoded_bytes());
        // A link counts by what it leads to, or, if to nowhere, by its name.
        all.update(Sha256::digest(fs::read(&file).unwrap_or_default()));
    }
    format!("{:x?}", all.finalize())
}
