//! Small libraries that a test puts in front of a host's own.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ffi_tests::{run, skip, tools};

/// `c/NAME.c` as a shared library in `dir`, linked with these libraries; `None` after a skip.
pub(crate) fn library(name: &str, dir: &Path, libraries: &[PathBuf]) -> Option<PathBuf> {
    let mut cc = match tools::command("cc") {
        Ok(cc) => cc,
        Err(missing) => {
            skip::skipped(name, &missing.0);
            return None;
        }
    };
    let path = dir.join(name).with_extension("so");
    cc.args(["-std=c11", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-shared", "-fPIC", "-o"]).arg(&path);
    cc.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("c").join(name).with_extension("c")).args(libraries).arg("-ldl");
    run::run(cc, Duration::from_secs(60)).and_then(|o| o.checked(name)).unwrap_or_else(|e| panic!("{e:#}"));
    Some(path)
}
