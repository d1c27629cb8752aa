//! `cargo xtask speed`: tokens per second in stock llama-bench, with the experts computed by Berth and by llama.cpp at its best; the result is
//! docs/speed.md.
//!
//! Stock is run in all four of its settings (repacked weights or not, tiled products or not), and every comparison is with the fastest of
//! them. All settings run once in each round, so that a machine that changes its speed changes it for all.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ffi_tests::gguf::{Gguf, TensorInfo, Type};
use ffi_tests::hosts::{self, Host};
use ffi_tests::models::{self, Spec};
use ffi_tests::run::{self, clean_env};
use serde::Deserialize;

use crate::ik::Ik;
use crate::{figures, shell};

/// Measure stock llama-bench with and without Berth, and write docs/speed.md (docs/speed-tN.md with N threads). The machine should have nothing else to do.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Blocks of the models, which have the experts of Qwen3-30B-A3B: 12 take 5 to 9 GB of disk and of memory.
    #[arg(long, default_value_t = 12)]
    layers: u32,
    /// Formats of the experts, as gate and up/down.
    #[arg(long, value_delimiter = ',', default_value = "q4_k/q6_k,q4_k/q4_k,q8_0/q8_0,mxfp4/mxfp4")]
    formats: Vec<String>,
    /// How often everything is run.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Threads.
    #[arg(long, default_value_t = 2)]
    threads: u32,
    /// Tokens of the prompts; 0 is 32 generated tokens.
    #[arg(long, value_delimiter = ',', default_values_t = [0, 4, 8, 32, 512])]
    tokens: Vec<u32>,
    /// Also ik_llama.cpp, against Berth with the instructions that it was built for: the prebuilt one of PyPI (AVX2), or that of a build directory.
    #[arg(long, num_args = 0..=1, require_equals = true, value_name = "BUILD")]
    ik: Option<Option<PathBuf>>,
    /// Print only, write nothing.
    #[arg(long)]
    dry: bool,
}

/// The host whose llama-bench is measured.
pub(crate) const HOST: &str = "sdist-dl";

/// Where the result goes: two threads are what the README shows.
fn docs(threads: u32) -> String {
    if threads == 2 { "docs/speed.md".to_owned() } else { format!("docs/speed-t{threads}.md") }
}

/// How a run is set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Side {
    Stock {
        repack: bool,
        tiled: bool,
    },
    Berth,
    /// Berth with no better kernels than those of the prebuilt ik_llama.cpp.
    BerthAvx2,
    Ik {
        repack: bool,
    },
}

impl Side {
    /// Stock's four settings, and Berth.
    const ALL: [Side; 5] = [
        Side::Stock { repack: true, tiled: true },
        Side::Stock { repack: true, tiled: false },
        Side::Stock { repack: false, tiled: true },
        Side::Stock { repack: false, tiled: false },
        Side::Berth,
    ];

    pub(crate) fn name(self) -> String {
        let on = |on| if on { "on" } else { "off" };
        match self {
            Side::Stock { repack, tiled } => format!("repack {}, tiled {}", on(repack), on(tiled)),
            Side::Berth => "Berth".to_owned(),
            Side::BerthAvx2 => "Berth, BERTH_ISA=avx2".to_owned(),
            Side::Ik { repack } => format!("ik_llama.cpp, repack {}", on(repack)),
        }
    }

    fn is_stock(self) -> bool {
        matches!(self, Side::Stock { .. })
    }

    fn is_ik(self) -> bool {
        matches!(self, Side::Ik { .. })
    }
}

/// What llama-bench prints for one test.
#[derive(Deserialize)]
pub(crate) struct Sample {
    n_prompt: u32,
    n_gen: u32,
    /// Tokens per second, the mean of the runs.
    pub(crate) avg_ts: f64,
}

/// Tokens per second: by tokens of the prompt (0: generated), then by side, one per round.
type Speeds = BTreeMap<u32, BTreeMap<Side, Vec<f64>>>;

pub(crate) fn run(args: &Args) -> Result<()> {
    ensure!(args.rounds > 0 && !args.tokens.is_empty(), "nothing to measure");
    let library = shell::berth()?;
    let host = hosts::get(HOST).with_context(|| "llama-bench comes from a stock build")?;
    let scratch = tempfile::tempdir()?;
    let meter = figures::Meter::new(&library, scratch.path())?;
    let ik = args.ik.as_ref().map(|build| Ik::new(build.as_deref(), scratch.path())).transpose()?;
    let mut sides = Side::ALL.to_vec();
    if let Some(build) = &args.ik {
        sides.extend([Side::Ik { repack: true }, Side::Ik { repack: false }]);
        sides.extend(build.is_none().then_some(Side::BerthAvx2));
    }
    let mut page = String::new();
    for format in &args.formats {
        let model = model(format, args.layers)?;
        let mut speeds = Speeds::new();
        let mut read = Vec::new();
        for round in 0..args.rounds {
            // Another order each time: no side is always the one after the same other.
            for i in 0..sides.len() {
                let side = sides[(i + round) % sides.len()];
                read.push(meter.read(args.threads as usize)?);
                let command = match (side, &ik) {
                    (Side::Ik { repack }, Some(ik)) => ik.command(&model, args.threads, &args.tokens, repack),
                    _ => {
                        let mut command = command(&host, &model, &library, args.threads, &args.tokens, side);
                        command.args(["-r", "2"]);
                        command
                    }
                };
                for sample in samples(command)? {
                    println!("{format:12} {:24} {:>6} {:8.1} t/s", side.name(), test_name(sample.n_prompt), sample.avg_ts);
                    speeds.entry(sample.n_prompt).or_default().entry(side).or_default().push(sample.avg_ts);
                    ensure!(sample.n_prompt > 0 || sample.n_gen > 0, "llama-bench ran a test of nothing");
                }
            }
        }
        page += &table(format, &speeds)?;
        if speeds.contains_key(&0) {
            page += &limit(read_per_token(&model)?, &read, &speeds);
        }
        if let Some(ik) = &ik {
            page += &ik_table(&ik.name, &speeds)?;
        }
    }
    page += &dense(args, &host, &library)?;
    println!("\n{page}");
    if !args.dry {
        let path = docs(args.threads);
        fs::write(&path, document(args, &host, &page)).with_context(|| format!("cannot write {path}"))?;
        println!("wrote {path}");
    }
    Ok(())
}

/// A model without experts, with Berth loaded and without.
fn dense(args: &Args, host: &Host, library: &Path) -> Result<String> {
    let model = models::smollm_dense()?;
    let tokens = [0, 512];
    let mut speeds: BTreeMap<(u32, bool), Vec<f64>> = BTreeMap::new();
    // Runs are short, and what is looked for is small.
    for round in 0..4 * args.rounds {
        for loaded in [round % 2 == 0, round % 2 != 0] {
            let mut command = command(host, &model, library, args.threads, &tokens, Side::Stock { repack: true, tiled: true });
            if loaded {
                command.env("GGML_BACKEND_PATH", library);
            }
            for sample in samples(command)? {
                speeds.entry((sample.n_prompt, loaded)).or_default().push(sample.avg_ts);
            }
        }
    }
    let mut text = String::from(
        "## A model without experts\n\nSmolLM2-135M as it is, stock's defaults, with Berth loaded and without.\n\n\
         | test | without Berth, t/s | loaded, t/s | loaded / without |\n|---|---|---|---|\n",
    );
    for prompt in tokens {
        let (without, loaded) = (&speeds[&(prompt, false)], &speeds[&(prompt, true)]);
        let ratio = median(loaded) / median(without);
        writeln!(text, "| {} | {} | {} | {ratio:.3} |", test_name(prompt), range(without), range(loaded))?;
    }
    Ok(text)
}

/// The model: the experts of Qwen3-30B-A3B in formats as `gate and up/down`.
pub(crate) fn model(format: &str, layers: u32) -> Result<PathBuf> {
    let (gate, down) = format.split_once('/').unwrap_or((format, format));
    let ty = |name: &str| name.parse::<Type>().map_err(|e| anyhow::anyhow!("format {name}: {e}"));
    models::random(&Spec {
        layers,
        embd: 2048,
        ff: 768,
        experts: 128,
        used: 8,
        vocab: 32000,
        ty: ty(gate)?,
        down: Some(ty(down)?),
        ..Spec::default()
    })
}

/// The name of a test with a prompt of this many tokens; 0 is 32 generated ones.
pub(crate) fn test_name(prompt: u32) -> String {
    if prompt == 0 { "tg32".to_owned() } else { format!("pp{prompt}") }
}

/// llama-bench with tests of these prompts (0: 32 generated tokens).
pub(crate) fn command(host: &Host, model: &Path, library: &Path, threads: u32, tokens: &[u32], side: Side) -> Command {
    let mut command = host.command("llama-bench");
    clean_env(&mut command);
    let prompts: Vec<String> = tokens.iter().filter(|t| **t > 0).map(u32::to_string).collect();
    let generated = if tokens.contains(&0) { "32" } else { "0" };
    let prompts = if prompts.is_empty() { "0".to_owned() } else { prompts.join(",") };
    command.arg("-m").arg(model).args(["-t", &threads.to_string(), "-o", "json", "-p", &prompts, "-n", generated]);
    match side {
        Side::Stock { repack, tiled } => {
            command.args(["--repack", if repack { "1" } else { "0" }]);
            command.env("GGML_CPU_TILED_MM", if tiled { "1" } else { "0" });
        }
        // ik_llama.cpp has a program of its own.
        Side::Ik { .. } => {}
        Side::Berth | Side::BerthAvx2 => {
            command.env("GGML_BACKEND_PATH", library).args(["-ot", "exps=CPU_MMAP"]);
            if side == Side::BerthAvx2 {
                command.env("BERTH_ISA", "avx2");
            }
        }
    }
    command
}

/// Runs llama-bench, and reads what it prints.
pub(crate) fn samples(command: Command) -> Result<Vec<Sample>> {
    let output = run::run(command, Duration::from_secs(1800))?.checked("llama-bench")?;
    serde_json::from_str(&output.stdout).with_context(|| format!("llama-bench printed no JSON: {}", run::last_lines(&output.stdout, 5)))
}

pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 }
}

pub(crate) fn range(values: &[f64]) -> String {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(0.0, f64::max);
    format!("{:.1} ({least:.1} to {most:.1})", median(values))
}

fn table(format: &str, speeds: &Speeds) -> Result<String> {
    let mut text =
        format!("## {format}\n\n| test | stock at its best, t/s | its setting | Berth, t/s | Berth / stock |\n|---|---|---|---|---|\n");
    for (prompt, sides) in speeds {
        let (Some((side, stock)), Some(berth)) = (fastest(sides, Side::is_stock), sides.get(&Side::Berth)) else {
            bail!("a side is missing for {prompt} tokens")
        };
        let ratio = median(berth) / median(stock);
        writeln!(text, "| {} | {} | {} | {} | {ratio:.2} |", test_name(*prompt), range(stock), side.name(), range(berth))?;
    }
    text.push('\n');
    Ok(text)
}

/// Of the sides that are of this kind, the fastest.
fn fastest(sides: &BTreeMap<Side, Vec<f64>>, kind: fn(Side) -> bool) -> Option<(&Side, &Vec<f64>)> {
    sides.iter().filter(|(side, _)| kind(**side)).max_by(|a, b| median(a.1).total_cmp(&median(b.1)))
}

/// ik_llama.cpp at its best against Berth with the same instructions.
fn ik_table(name: &str, speeds: &Speeds) -> Result<String> {
    let mut text =
        format!("| test | {name}, t/s | its setting | Berth, t/s | its setting | Berth / ik_llama.cpp |\n|---|---|---|---|---|---|\n");
    for (prompt, sides) in speeds {
        let berth = [Side::BerthAvx2, Side::Berth].into_iter().find_map(|side| Some((side, sides.get(&side)?)));
        let (Some((side, ik)), Some((with, berth))) = (fastest(sides, Side::is_ik), berth) else {
            bail!("a side is missing for {prompt} tokens")
        };
        let (ratio, test) = (median(berth) / median(ik), test_name(*prompt));
        writeln!(text, "| {test} | {} | {} | {} | {} | {ratio:.2} |", range(ik), side.name(), range(berth), with.name())?;
    }
    text.push('\n');
    Ok(text)
}

/// Bytes of weights that are read to make a token: all but the table of tokens, and of the experts those that are used.
fn read_per_token(model: &Path) -> Result<f64> {
    let gguf = Gguf::open(model)?;
    let (used, experts) = (8.0, 128.0);
    let of = |t: &TensorInfo| if t.name.contains("_exps.") { t.bytes as f64 * used / experts } else { t.bytes as f64 };
    Ok(gguf.tensors().iter().filter(|t| t.name != "token_embd.weight").map(of).sum())
}

/// What memory allows, one token at a time.
fn limit(bytes: f64, read: &[f64], speeds: &Speeds) -> String {
    let most = median(read) * 1e9 / bytes;
    let best = |kind: fn(Side) -> bool| fastest(&speeds[&0], kind).map_or(0.0, |(_, v)| median(v));
    format!(
        "One token reads {:.0} MB of weights. Memory was read at {} GB/s before each of the runs, which allows {most:.0} t/s: Berth made {:.0} % of that, stock \
         {:.0} %.\n\n",
        bytes / 1e6,
        range(read),
        100.0 * best(|side| side == Side::Berth) / most,
        100.0 * best(Side::is_stock) / most
    )
}

fn document(args: &Args, host: &Host, tables: &str) -> String {
    format!(
        "# Speed in stock llama-bench\n\nWritten by `cargo xtask speed --layers {} --formats {} --rounds {} --threads {}{}`. {}, llama-bench of {} (ggml {}), models with the experts of \
         Qwen3-30B-A3B (2048 x 768, 128 experts, 8 used) in {} blocks, random weights, everything in the page cache. Berth is the stock program with \
         `GGML_BACKEND_PATH` and `-ot exps=CPU_MMAP`. Stock is the fastest of its four settings (repacked weights or not, `GGML_CPU_TILED_MM` 0 or 1). Medians of {} \
         alternating runs, least and most in brackets.{}\n\n{}",
        args.layers,
        args.formats.join(","),
        args.rounds,
        args.threads,
        if args.ik.is_some() { " --ik" } else { "" },
        figures::cpu(),
        host.package,
        host.ggml_version,
        args.layers,
        args.rounds,
        if args.ik.is_some() {
            " ik_llama.cpp has flash attention and its fused operations on, and is the faster of its two settings (weights repacked or mapped); Berth beside it has no better \
             instructions than it was built for, in a llama.cpp that has all."
        } else {
            ""
        },
        tables.trim_end().to_owned() + "\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn berth_is_compared_with_the_fastest_setting() {
        let mut speeds = Speeds::new();
        let sides = speeds.entry(512).or_default();
        for (i, side) in Side::ALL.into_iter().enumerate() {
            sides.insert(side, vec![100.0 - i as f64, 102.0 - i as f64, 90.0]);
        }
        sides.insert(Side::Berth, vec![300.0, 100.0, 250.0]);
        let text = table("q4_k", &speeds).unwrap();
        assert!(text.contains("| pp512 | 100.0 (90.0 to 102.0) | repack on, tiled on | 250.0 (100.0 to 300.0) | 2.50 |"), "{text}");
        let generated = speeds.entry(0).or_default();
        generated.extend([(Side::ALL[1], vec![40.0]), (Side::Berth, vec![90.0, 80.0, 85.0])]);
        let text = limit(400e6, &[39.0, 40.0, 41.0], &speeds);
        assert!(text.contains("reads 400 MB") && text.contains("allows 100 t/s: Berth made 85 % of that, stock 40 %"), "{text}");
        let sides = speeds.get_mut(&512).unwrap();
        sides.extend([(Side::Ik { repack: true }, vec![50.0]), (Side::Ik { repack: false }, vec![60.0]), (Side::BerthAvx2, vec![90.0])]);
        let only = Speeds::from([(512, sides.clone())]);
        let row = "| pp512 | 60.0 (60.0 to 60.0) | ik_llama.cpp, repack off | 90.0 (90.0 to 90.0) | Berth, BERTH_ISA=avx2 | 1.50 |";
        assert!(ik_table("ik", &only).unwrap().contains(row));
        assert!(table("q4_k", &only).unwrap().contains("| 2.50 |"), "ik_llama.cpp is not stock");
        sides.remove(&Side::Berth);
        assert!(table("q4_k", &speeds).is_err());
    }
}
