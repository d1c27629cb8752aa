//! Tiny models of any architecture that llama.cpp knows, with random weights, as its own test program writes them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::hosts::Host;
use crate::{cache, run, tools};

/// The mixture of experts that `test-llama-archs -o` of `host` writes for an architecture.
///
/// In a build with `GGML_BACKEND_DL` that program loads no backend, so it finds no CPU to make the model on; `c/load_backends.c`, preloaded,
/// does that for it.
pub fn of_architecture(host: &Host, arch: &str) -> Result<PathBuf> {
    let recipe = cache::key(&format!("1 {} {arch}", host.package));
    cache::file("models", &format!("arch-{arch}-{recipe}.gguf"), |path| {
        let dir = tempfile::tempdir()?;
        let preloaded = dir.path().join("load_backends.so");
        let mut cc = tools::command("cc")?;
        cc.args(["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-shared", "-fPIC", "-o"]).arg(&preloaded);
        cc.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("c/load_backends.c")).arg(host.lib("ggml")?);
        run::run(cc, Duration::from_secs(60))?.checked("cc load_backends.c")?;
        let mut write: Command = host.command("test-llama-archs");
        write.env("LD_PRELOAD", &preloaded).args(["-s", "7", "-a", arch, "-o"]).arg(dir.path());
        run::run(write, Duration::from_secs(120))?.checked("test-llama-archs")?;
        std::fs::copy(dir.path().join(format!("{arch}-moe.gguf")), path)?;
        Ok(())
    })
}
