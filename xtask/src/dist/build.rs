//! The build that is shipped: the release build, in a directory of its own, with no path of this machine in it. Dependencies name their sources in
//! the texts of panics, and cargo's registry is in somebody's home.
//!
//! In a directory of its own, because other flags would make cargo build everything again each time that the two take turns.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::shell;

/// The library to ship, with the command and the static library beside it; `$BERTH_LIB` stands for one that is built already, as it is.
pub(super) fn shipped(target: &Path) -> Result<PathBuf> {
    if std::env::var_os("BERTH_LIB").is_some() {
        return ffi_tests::berth_lib();
    }
    let dir = target.join("shipped");
    let mut cargo = shell::cargo();
    cargo.args(["build", "--quiet", "--release", "--package", "ggml-berth", "--target-dir"]).arg(&dir);
    // A cargo that was told another target would put it elsewhere.
    cargo.env_remove("CARGO_BUILD_TARGET").env_remove("RUSTFLAGS").env("CARGO_ENCODED_RUSTFLAGS", flags()?);
    shell::step(&mut cargo)?;
    let library = dir.join("release/libberth.so");
    ensure!(library.is_file(), "cargo built no {}", library.display());
    Ok(library)
}

/// The flags that are set already, and what each directory of this machine is called in what is built.
fn flags() -> Result<OsString> {
    const END: &str = "\x1f";
    let given = match (std::env::var("CARGO_ENCODED_RUSTFLAGS"), std::env::var("RUSTFLAGS")) {
        (Ok(encoded), _) => encoded,
        (_, Ok(plain)) => plain.split_whitespace().collect::<Vec<_>>().join(END),
        _ => String::new(),
    };
    let mut flags = OsString::from(given);
    for (from, to) in names()? {
        if !flags.is_empty() {
            flags.push(END);
        }
        flags.push("--remap-path-prefix=");
        flags.push(from);
        flags.push("=");
        flags.push(to);
    }
    Ok(flags)
}

/// Directories, and what they are called; of two that fit, rustc takes the later one.
fn names() -> Result<Vec<(PathBuf, &'static str)>> {
    let home = std::env::var_os("HOME").filter(|h| h != "/").map(PathBuf::from);
    let cargo = std::env::var_os("CARGO_HOME").map(PathBuf::from).or_else(|| home.as_ref().map(|h| h.join(".cargo")));
    let mut names: Vec<(PathBuf, &str)> = home.map(|h| (h, "/home")).into_iter().collect();
    if let Some(cargo) = cargo {
        let registries = fs::read_dir(cargo.join("registry/src")).into_iter().flatten().flatten().map(|e| (e.path(), "/crates"));
        let registries: Vec<_> = registries.collect();
        names.push((cargo, "/cargo"));
        names.extend(registries);
    }
    names.push((sysroot()?, "/rust"));
    names.push((shell::root().to_owned(), "/berth"));
    Ok(names)
}

fn sysroot() -> Result<PathBuf> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| OsStr::new("rustc").to_owned());
    let output = Command::new(rustc).args(["--print", "sysroot"]).current_dir(shell::root()).output().context("rustc")?;
    ensure!(output.status.success(), "rustc --print sysroot: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).trim().into())
}
