//! `c/moe_stock.c`: the experts of a layer by stock ggml and by Berth in one process, which checks that they agree.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::hosts::{self, Host};
use crate::{run, tools};

/// One layer and number of tokens.
#[derive(Clone, Debug, Deserialize)]
pub struct Comparison {
    /// Block format of gate and up, as ggml calls it.
    pub gate: String,
    /// Block format of down.
    pub down: String,
    /// Tokens of a call.
    pub tokens: usize,
    /// Instruction set of Berth's kernels.
    pub isa: String,
    /// Timed calls of each.
    pub runs: usize,
    /// Median time of the stock graph.
    pub stock_ms: f64,
    /// Median time of `berth_moe_forward`.
    pub berth_ms: f64,
    /// Stock's over Berth's.
    pub ratio: f64,
    /// Mean square of the difference of the two answers over that of stock's.
    pub nmse: f64,
}

/// What is compared.
#[derive(Clone, Debug)]
pub struct Layer {
    /// Length of a token, of the vector inside an expert, experts, experts used.
    pub geometry: [usize; 4],
    /// Threads of each.
    pub threads: usize,
    /// Time for each case.
    pub seconds: f64,
    /// Gate and down as numbers of `enum ggml_type`, and tokens.
    pub cases: Vec<[usize; 3]>,
}

/// The compiled program and the host it loads.
pub struct Program {
    path: PathBuf,
    host: Host,
}

impl Program {
    /// Compiles it into `dir`, against the host and this Berth.
    ///
    /// # Errors
    /// If there is no compiler, no such host, or it does not compile.
    pub fn build(host: Host, berth: &Path, dir: &Path) -> Result<Program> {
        let soname = dir.join("libberth.so.0");
        if !soname.exists() {
            std::os::unix::fs::symlink(berth, &soname)?;
        }
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let headers = hosts::headers_of(host.headers.context("a host with headers")?)?;
        let path = dir.join("moe_stock");
        let mut cc = tools::command("cc")?;
        cc.args(["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-isystem"]).arg(headers.ggml_include);
        cc.arg("-I").arg(root.join("../include")).arg(root.join("c/moe_stock.c")).arg("-o").arg(&path).arg(soname);
        cc.args([host.lib("ggml-base")?, host.lib("ggml")?]).arg("-lm");
        cc.arg(format!("-Wl,-rpath,{}", host.lib_dir.display())).arg(format!("-Wl,-rpath,{}", dir.display()));
        run::run(cc, Duration::from_secs(120))?.checked("cc moe_stock.c")?;
        Ok(Program { path, host })
    }

    /// Runs the cases: weights in plain buffers, ggml's tiled products on.
    ///
    /// # Errors
    /// If it fails, which it does where the two answers differ.
    pub fn compare(&self, layer: &Layer) -> Result<Vec<Comparison>> {
        let mut command = Command::new(&self.path);
        run::clean_env(&mut command);
        command.env("GGML_CPU_TILED_MM", "1").env("OMP_NUM_THREADS", layer.threads.to_string());
        command.arg(self.host.lib("ggml-cpu")?).args(layer.geometry.iter().chain([&layer.threads]).map(usize::to_string));
        command.arg(layer.seconds.to_string()).args(layer.cases.as_flattened().iter().map(usize::to_string));
        let output = run::run(command, Duration::from_secs(600))?.checked("moe_stock")?;
        output.stdout.lines().map(|line| serde_json::from_str(line).with_context(|| line.to_owned())).collect()
    }

    /// The host's package.
    pub fn package(&self) -> &str {
        &self.host.package
    }
}
