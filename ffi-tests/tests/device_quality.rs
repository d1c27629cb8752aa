//! Quality: how far the distributions over the vocabulary are from those of the model with its experts in F16, with the experts of a quantised
//! model computed by llama.cpp and by Berth. What Berth adds by its own rounding must not be above what llama.cpp adds.
//!
//! Experts of a real language model in the formats whose blocks fit its rows of 576; for K-quants, which need rows of 256, models of random weights.
//! By default about 2,000 tokens; `BERTH_FULL=1` 20,000, and 164,000 with random weights, in about half an hour on two cores.

#[path = "support/full.rs"]
mod full;
#[path = "support/scratch.rs"]
mod scratch;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ffi_tests::cache::say;
use ffi_tests::gguf::Type;
use ffi_tests::hosts::{self, Host};
use ffi_tests::models::{self, Experts, Spec, Split};
use ffi_tests::report::Report;
use ffi_tests::run::{self, Output, until_whole};
use ffi_tests::{berth_lib, skip};
use full::full;
use scratch::Scratch;

const HOST: &str = "sdist-dl";
/// Tokens of a chunk, of which the second half is predicted.
const CHUNK: usize = 512;
/// How much further from F16 than llama.cpp, besides the standard error.
const MOST: f64 = 1.01;

/// Chunks of a run: 2,048 tokens, or 20,480 of a language model and 163,840 with random weights, where the standard error is larger and a token cheaper.
fn chunks(quick_tokens: bool) -> usize {
    match (full(), quick_tokens) {
        (false, _) => 4,
        (true, false) => 40,
        (true, true) => 320,
    }
}

/// English with some code and tables, the same on every machine: documentation in the source that the host is built from.
fn text(host: &Host, scratch: &Scratch) -> PathBuf {
    const PARTS: [&str; 10] = [
        "README.md",
        "CONTRIBUTING.md",
        "docs/speculative.md",
        "docs/function-calling.md",
        "docs/build.md",
        "docs/autoparser.md",
        "docs/ops.md",
        "docs/docker.md",
        "docs/build-s390x.md",
        "docs/multi-gpu.md",
    ];
    let include = host.include.as_deref().expect("a host with its source");
    let source = include.ancestors().nth(2).expect("ggml/include in the source");
    let whole: String =
        PARTS.iter().map(|part| std::fs::read_to_string(source.join(part)).unwrap_or_else(|e| panic!("{part}: {e}"))).collect();
    let path = scratch.path().join("text");
    std::fs::write(&path, whole).expect("a scratch directory is writable");
    path
}

/// Mean divergence from F16 and its standard error, in nats, and the share of tokens in which the likeliest is the same, in percent.
#[derive(Clone, Copy, Debug)]
struct Distance {
    kld: f64,
    error: f64,
    same: f64,
}

/// The distributions of a model in F16.
struct Base<'a> {
    host: &'a Host,
    logits: PathBuf,
    chunks: usize,
}

impl Base<'_> {
    fn new<'a>(host: &'a Host, f16: &Path, chunks: usize, scratch: &Scratch) -> Base<'a> {
        let (text, logits) = (text(host, scratch), scratch.path().join("f16.kld"));
        let counted = chunks.to_string();
        let args: [&OsStr; 6] =
            ["-f".as_ref(), text.as_ref(), "--chunks".as_ref(), counted.as_ref(), "--save-all-logits".as_ref(), logits.as_ref()];
        let output = perplexity(host, f16, &args, None);
        let said = format!("over {chunks} chunks, n_ctx={CHUNK}");
        assert!(
            output.stderr.contains(&said) || output.stdout.contains(&said),
            "the text is too short: {}",
            run::last_lines(&output.stderr, 20)
        );
        Base { host, logits, chunks }
    }

    fn distance(&self, model: &Path, with: Option<&Scratch>) -> Distance {
        let args: [&OsStr; 3] = ["--kl-divergence".as_ref(), "--kl-divergence-base".as_ref(), self.logits.as_ref()];
        let output = until_whole(|| perplexity(self.host, model, &args, with), |output| output.stdout.contains("Same top p:"));
        // "Mean    KLD:   0.004602 ±   0.000120", "Same top p: 95.500 ± 0.300 %".
        let numbers = |label: &str| {
            let line = output.stdout.lines().find_map(|l| l.trim_start().strip_prefix(label)?.trim_start().strip_prefix(':'));
            let words = line.into_iter().flat_map(str::split_whitespace);
            let found: Vec<f64> = words.filter_map(|word| word.parse().ok()).collect();
            let [value, error] = found[..] else { panic!("no {label} in {}", run::last_lines(&output.stdout, 40)) };
            (value, error)
        };
        let ((kld, error), (same, _)) = (numbers("Mean    KLD"), numbers("Same top p"));
        Distance { kld, error, same }
    }

    /// llama.cpp's distance and Berth's, recorded; whether Berth's is as it must be.
    fn compare(&self, what: &str, model: &Path) -> bool {
        let stock = self.distance(model, None);
        let scratch = Scratch::new();
        let with = self.distance(model, Some(&scratch));
        let blocks = Report::read(&report_in(&scratch)).unwrap_or_else(|e| panic!("{e:#}")).blocks;
        assert!(blocks.fused > 0 && blocks.reasons.iter().all(|r| r.reason == "some_choices"), "{what}: {blocks:?}");
        say(&format!(
            "{what}, {} tokens, from F16: llama.cpp {:.6} ± {:.6} nats, {:.2} % the same; Berth {:.6} ± {:.6}, {:.2} %",
            self.chunks * CHUNK,
            stock.kld,
            stock.error,
            stock.same,
            with.kld,
            with.error,
            with.same
        ));
        assert!(stock.kld > 0.0 && stock.kld.is_finite(), "{what}: {stock:?}");
        with.kld <= stock.kld * MOST + stock.error.min(with.error)
    }
}

fn report_in(scratch: &Scratch) -> PathBuf {
    scratch.path().join("report.json")
}

fn perplexity(host: &Host, model: &Path, args: &[&OsStr], with: Option<&Scratch>) -> Output {
    let mut command = host.command("llama-perplexity");
    command.arg("-m").arg(model).args(["-t", "2", "-c", &CHUNK.to_string(), "--no-repack"]).args(args);
    command.env("OMP_WAIT_POLICY", "passive");
    if let Some(scratch) = with {
        let library = berth_lib().unwrap_or_else(|e| panic!("{e:#}"));
        command
            .args(["-ot", "exps=CPU_MMAP"])
            .env("GGML_BACKEND_PATH", library)
            .env("BERTH_REPORT", report_in(scratch))
            .env("BERTH_ARENA_DIR", scratch.dir("arena"));
    }
    let limit = Duration::from_secs(if full() { 3600 } else { 600 });
    run::run(command, limit).and_then(|o| o.checked("llama-perplexity")).unwrap_or_else(|e| panic!("{e:#}"))
}

#[test]
fn a_language_model_is_as_near_to_f16_as_with_llama_cpp() {
    let Some(host) = hosts::require(HOST) else { return };
    let experts_as = |experts_as| models::smollm_split(&Split { experts_as, ..Split::default() });
    let Some(f16) = skip::available("the language model", experts_as(Experts::As(Type::F16))) else { return };
    let scratch = Scratch::new();
    let base = Base::new(&host, &f16, chunks(false), &scratch);
    // Kept as they are: Q4_1.
    let formats = [Experts::As(Type::Q8_0), Experts::As(Type::MXFP4), Experts::As(Type::Q4_0), Experts::Keep];
    let further: Vec<Experts> = formats
        .into_iter()
        .filter(|&format| {
            let model = experts_as(format).unwrap_or_else(|e| panic!("{e:#}"));
            !base.compare(&format!("SmolLM2, experts {format}"), &model)
        })
        .collect();
    assert!(further.is_empty(), "further from F16 than with llama.cpp: {further:?}");
}

#[test]
fn random_k_quants_are_as_near_to_f16_as_with_llama_cpp() {
    let Some(host) = hosts::require(HOST) else { return };
    let mut further = Vec::new();
    for ty in [Type::Q4_K, Type::Q6_K] {
        let spec = Spec { ty, layers: 4, embd: 512, ff: 512, experts: 16, used: 4, ..Spec::default() };
        let (model, f16) = (models::random(&spec), models::random_with_f16_experts(&spec));
        let (model, f16) = (model.unwrap_or_else(|e| panic!("{e:#}")), f16.unwrap_or_else(|e| panic!("{e:#}")));
        let scratch = Scratch::new();
        if !Base::new(&host, &f16, chunks(true), &scratch).compare(&format!("random weights, experts {ty}"), &model) {
            further.push(ty);
        }
    }
    assert!(further.is_empty(), "further from F16 than with llama.cpp: {further:?}");
}
