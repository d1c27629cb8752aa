//! Every architecture with experts in llama.cpp's own `test-llama-archs`: the logits with Berth computing the experts are those of the CPU backend,
//! within the tolerance of that program, and the experts of all but one are computed as one operation.
//!
//! The program makes a model with random weights, two experts and every optional tensor (so the scales per expert too), computes it, writes it
//! to a file, reads it back and wants the same logits bit for bit. It knows no `-ot`, so Berth takes the experts by itself (`BERTH_AUTO=1`), and
//! as the program's own reference would be computed by Berth then, its logits are compared with those of another run without Berth.

#[path = "support/preload.rs"]
mod preload;
#[path = "support/scratch.rs"]
mod scratch;

use std::path::{Path, PathBuf};
use std::time::Duration;

use ffi_tests::cache::say;
use ffi_tests::hosts::{self, Host};
use ffi_tests::report::Report;
use ffi_tests::{berth_lib, run};
use scratch::Scratch;

/// The build of llama.cpp that has the program.
const HOST: &str = "sdist-dl";
/// What the program allows: mean square of the difference over mean square of the logits.
const MOST_NMSE: f64 = 1e-4;

/// Standard deviation of the weights: the program's own.
const SPREAD: &str = "0.1";
/// One that takes the products, of at least 128 terms, to a deviation of 7 and more: beyond every limit below.
const WIDE: &str = "0.6";
/// Architectures with limits in their activation, of 4 to 10, in each of the three forms.
const LIMITED: &[&str] = &["bailingmoe3", "maple", "deepseek4", "gpt-oss"];

/// As one operation.
const FUSED: &[&str] = &[
    "llama4",
    "cohere2moe",
    "grok",
    "qwen2moe",
    "qwen3moe",
    "qwen3next",
    "qwen3vlmoe",
    "qwen35moe",
    "qwen4exp",
    "phimoe",
    "dbrx",
    "olmoe",
    "arctic",
    "deepseek",
    "deepseek2",
    "deepseek32",
    "dots3note",
    "deepseek4",
    "glm4moe",
    "glm-dsa",
    "exaone-moe",
    "bailingmoe",
    "bailingmoe2",
    "bailingmoe3",
    "dots1",
    "afmoe",
    "ernie4_5-moe",
    "hunyuan-moe",
    "hy_v3",
    "hy_v4",
    "gpt-oss",
    "lfm2moe",
    "smallthinker",
    "llada-moe",
    "grovemoe",
    "minimax-01",
    "minimax-m2",
    "minimax-m3",
    "rnd1",
    "mimo2",
    "kimi-linear",
    "glm5-next",
    "step35",
    "mistral4",
    "mellum",
    "laguna",
    "maple",
    "llama",
    "minicpm",
    "granite",
    "granitemoe",
    "mistral3",
];
/// Node by node: its activation is made of nine nodes of its own (scaled tangents).
const APART: &[&str] = &["kimi-k3"];
/// The program counts these among those with experts, but their graphs have none.
const DENSE: &[&str] = &["ernie4_5", "paddleocr", "refact"];

struct Archs {
    host: Host,
    scratch: Scratch,
    preloaded: [PathBuf; 2],
}

/// Rows of logits, in the order in which the program asked for them.
type Logits = Vec<(i32, Vec<f32>)>;

impl Archs {
    fn new() -> Option<Archs> {
        let host = hosts::require(HOST)?;
        let scratch = Scratch::new();
        let dir = scratch.dir("preloaded");
        let lib = |name| host.lib(name).unwrap_or_else(|e| panic!("{e:#}"));
        let backends = preload::library("load_backends", &dir, &[lib("ggml")])?;
        let watch = preload::library("watch_logits", &dir, &[lib("llama")])?;
        Some(Archs { host, scratch, preloaded: [backends, watch] })
    }

    /// With Berth if there is a place for its report.
    fn logits(&self, arch: &str, spread: &str, report: Option<&Path>) -> Logits {
        let to = self.scratch.path().join("logits");
        let mut command = self.host.command("test-llama-archs");
        command.args(["-s", "7", "-d", spread, "-b", "CPU", "-a", arch]).env("OMP_WAIT_POLICY", "passive").env("LOGITS_TO", &to);
        command.env("LD_PRELOAD", self.preloaded.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(" "));
        if let Some(report) = report {
            let berth = berth_lib().unwrap_or_else(|e| panic!("{e:#}"));
            command.env("GGML_BACKEND_PATH", berth).env("BERTH_AUTO", "1").env("BERTH_REPORT", report);
        }
        run::run(command, Duration::from_secs(300)).and_then(|o| o.checked(arch)).unwrap_or_else(|e| panic!("{arch}: {e:#}"));
        let logits = records(&std::fs::read(&to).unwrap_or_else(|e| panic!("{arch}: {e}")));
        std::fs::remove_file(to).expect("it was just read");
        logits
    }

    /// Compares one architecture, with weights of that spread; `fused` and `apart` say what must have happened.
    fn compare(&self, arch: &str, spread: &str, fused: bool, apart: bool) -> f64 {
        let report = self.scratch.path().join(format!("{arch}.json"));
        let (stock, with) = (self.logits(arch, spread, None), self.logits(arch, spread, Some(&report)));
        // 128 tokens: the reference, the device, and what was read back; then some of other batches.
        assert!(stock.len() >= 2 * 128, "{arch}: {} rows", stock.len());
        assert_eq!(stock.iter().map(|r| r.0).collect::<Vec<_>>(), with.iter().map(|r| r.0).collect::<Vec<_>>(), "{arch}: rows");
        let flat = |logits: &Logits| logits.iter().flat_map(|r| r.1.iter().map(|v| f64::from(*v))).collect::<Vec<_>>();
        let (a, b) = (flat(&stock), flat(&with));
        let error = a.iter().zip(&b).map(|(a, b)| (a - b).powi(2)).sum::<f64>() / a.iter().map(|a| a * a).sum::<f64>();
        let blocks = Report::read(&report).unwrap_or_else(|e| panic!("{e:#}")).blocks;
        assert!(error <= MOST_NMSE, "{arch}: NMSE {error:e}");
        assert_eq!((blocks.fused > 0, blocks.node_by_node > 0), (fused, apart), "{arch}: {blocks:?}");
        error
    }
}

fn records(mut bytes: &[u8]) -> Logits {
    let mut rows = Vec::new();
    let word = |bytes: &[u8], i: usize| <[u8; 4]>::try_from(&bytes[4 * i..4 * i + 4]).expect("four bytes");
    while !bytes.is_empty() {
        let (row, count) = (i32::from_le_bytes(word(bytes, 0)), i32::from_le_bytes(word(bytes, 1)) as usize);
        rows.push((row, (0..count).map(|i| f32::from_le_bytes(word(bytes, 2 + i))).collect()));
        bytes = &bytes[8 + 4 * count..];
    }
    rows
}

#[test]
fn architectures_are_computed_as_one_operation_and_give_the_logits_of_the_cpu() {
    let Some(archs) = Archs::new() else { return };
    let worst = FUSED.iter().map(|arch| (archs.compare(arch, SPREAD, true, false), arch)).max_by(|a, b| a.0.total_cmp(&b.0));
    say(&format!("{} architectures as one operation; worst NMSE {worst:?}", FUSED.len()));
}

#[test]
fn an_activation_of_many_nodes_is_computed_node_by_node_and_gives_the_logits_of_the_cpu() {
    let Some(archs) = Archs::new() else { return };
    for arch in APART {
        archs.compare(arch, SPREAD, false, true);
    }
}

#[test]
fn architectures_without_experts_are_left_alone() {
    let Some(archs) = Archs::new() else { return };
    for arch in DENSE {
        assert_eq!(archs.compare(arch, SPREAD, false, false), 0.0, "{arch}: bit for bit");
    }
}

#[test]
fn limits_that_are_reached_give_the_logits_of_the_cpu() {
    let Some(archs) = Archs::new() else { return };
    for arch in LIMITED {
        archs.compare(arch, WIDE, true, false);
    }
}
