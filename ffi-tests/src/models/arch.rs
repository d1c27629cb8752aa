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
    written(host, arch, "moe")
}

/// The model without experts that it writes for an architecture.
pub fn dense_of_architecture(host: &Host, arch: &str) -> Result<PathBuf> {
    written(host, arch, "dense")
}

/// All models that it writes, into `dir`: `ARCHITECTURE-moe.gguf` and `ARCHITECTURE-dense.gguf`.
pub fn of_all_architectures(host: &Host, dir: &Path) -> Result<()> {
    write(host, &[], dir, Duration::from_secs(1800))
}

fn written(host: &Host, arch: &str, kind: &str) -> Result<PathBuf> {
    let recipe = cache::key(&format!("1 {} {arch}", host.package));
    let name = if kind == "moe" { format!("arch-{arch}-{recipe}.gguf") } else { format!("arch-{arch}-{kind}-{recipe}.gguf") };
    cache::file("models", &name, |path| {
        let dir = tempfile::tempdir()?;
        write(host, &["-a", arch], dir.path(), Duration::from_secs(120))?;
        std::fs::copy(dir.path().join(format!("{arch}-{kind}.gguf")), path)?;
        Ok(())
    })
}

fn write(host: &Host, which: &[&str], to: &Path, timeout: Duration) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let preloaded = dir.path().join("load_backends.so");
    let mut cc = tools::command("cc")?;
    cc.args(["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-shared", "-fPIC", "-o"]).arg(&preloaded);
    cc.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("c/load_backends.c")).arg(host.lib("ggml")?);
    run::run(cc, Duration::from_secs(60))?.checked("cc load_backends.c")?;
    let mut write: Command = host.command("test-llama-archs");
    write.env("LD_PRELOAD", &preloaded).args(["-s", "7"]).args(which).arg("-o").arg(to);
    run::run(write, timeout)?.checked("test-llama-archs")?;
    Ok(())
}
