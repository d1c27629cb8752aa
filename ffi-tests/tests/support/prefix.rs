//! Berth as `cargo xtask dist` installs it, moved afterwards to a directory with a blank in its name: nothing in it may know where it was.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use ffi_tests::berth_lib;

use super::peer;

/// The project's own command, as a user calls it, in this directory.
pub(crate) fn dist(dir: &Path, args: &[&str]) -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["xtask", "dist"]).args(args).current_dir(dir).env("BERTH_LIB", berth_lib().unwrap()).env_remove("DESTDIR");
    cargo
}

/// Installs into `dir` and moves the result.
pub(crate) fn install(dir: &Path) -> PathBuf {
    let at = |name: &str| dir.join(name);
    peer::succeeds(dist(Path::new(env!("CARGO_MANIFEST_DIR")), &["--prefix", at("first").to_str().unwrap()]));
    fs::create_dir_all(at("opt of ours")).unwrap();
    let prefix = at("opt of ours").join("berth");
    fs::rename(at("first"), &prefix).unwrap();
    prefix
}
