//! Berth as `cargo xtask dist` installs it, moved afterwards to a directory with a blank in its name: nothing in it may know where it was.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use ffi_tests::run;

/// The project's own command, as a user calls it, in this directory. What it installs is built by it: not the library that other tests load.
pub(crate) fn dist(dir: &Path, args: &[&str]) -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["xtask", "dist"]).args(args).current_dir(dir).env_remove("BERTH_LIB").env_remove("DESTDIR");
    cargo
}

/// Installs into `dir` and moves the result.
pub(crate) fn install(dir: &Path) -> PathBuf {
    let at = |name: &str| dir.join(name);
    // The first time, everything is built.
    let installed =
        run::run(dist(Path::new(env!("CARGO_MANIFEST_DIR")), &["--prefix", at("first").to_str().unwrap()]), Duration::from_secs(1800));
    installed.and_then(|o| o.checked("cargo xtask dist")).unwrap_or_else(|e| panic!("{e:#}"));
    fs::create_dir_all(at("opt of ours")).unwrap();
    let prefix = at("opt of ours").join("berth");
    fs::rename(at("first"), &prefix).unwrap();
    prefix
}
