//! The nightly toolchain, which fuzzing, sanitizers and Miri need: its cargo, and the hint for each part of it that is missing. Knows nothing of what
//! is run with it.

use std::path::PathBuf;
use std::process::Command;

use crate::shell;

/// `cargo +nightly` in the root.
pub(super) fn cargo() -> Command {
    clean("cargo")
}

/// A program of the toolchain, free of what the cargo that started this has set for its own.
fn clean(program: &str) -> Command {
    let mut command = Command::new(program);
    command.arg("+nightly").current_dir(shell::root());
    for name in ["CARGO", "RUSTC", "RUSTDOC", "RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS", "RUSTUP_TOOLCHAIN", "LD_LIBRARY_PATH"] {
        command.env_remove(name);
    }
    command
}

/// A piece of it, the arguments that show that it is there, and how it is had.
pub(super) const COMPILER: (&str, &[&str], &str) = ("the nightly toolchain", &["--version"], "rustup toolchain install nightly");
pub(super) const FUZZ: (&str, &[&str], &str) = ("cargo-fuzz", &["fuzz", "--version"], "cargo install cargo-fuzz");
pub(super) const MIRI: (&str, &[&str], &str) = ("Miri", &["miri", "--version"], "rustup +nightly component add miri rust-src");

/// The hint for the first of these that is missing.
pub(super) fn lacking(pieces: &[(&str, &[&str], &str)]) -> Option<String> {
    pieces.iter().find(|(_, args, _)| says(args).is_none()).map(|(name, _, how)| format!("{name} is missing: {how}"))
}

/// The hint for the standard library's sources, if they are missing.
pub(super) fn lacking_sources() -> Option<String> {
    let mut rustc = clean("rustc");
    rustc.args(["--print", "sysroot"]);
    let sysroot = rustc.output().ok().filter(|o| o.status.success()).map(|o| String::from_utf8_lossy(&o.stdout).trim().to_owned());
    let there = sysroot.is_some_and(|s| PathBuf::from(s).join("lib/rustlib/src/rust/library/Cargo.lock").exists());
    (!there).then(|| "the sources of the standard library are missing: rustup +nightly component add rust-src".into())
}

/// The version of its compiler, for the page.
pub(super) fn version() -> String {
    says(&["--version"]).map_or_else(|| "nightly".into(), |v| format!("nightly {}", v.split_whitespace().nth(1).unwrap_or("")))
}

fn says(args: &[&str]) -> Option<String> {
    let output = cargo().args(args).output().ok().filter(|o| o.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
