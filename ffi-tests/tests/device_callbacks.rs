//! A program that looks at every value of a graph sees with Berth what it sees without: `llama-eval-callback` prints all nodes, `llama-imatrix`
//! adds up the inputs of all products. Both make llama.cpp compute the graph in pieces, so the experts are computed node by node.

#[path = "support/device.rs"]
mod device;
#[path = "support/scratch.rs"]
mod scratch;

use std::path::Path;
use std::time::Duration;

use device::{RULE, berth, blocks, floats, with_berth};
use ffi_tests::gguf::{Gguf, Type};
use ffi_tests::hosts::{self, Host};
use ffi_tests::run::{self, Options, until_whole};
use ffi_tests::{models, skip};
use scratch::Scratch;

const HOST: &str = "sdist-dl";
const LIMIT: Duration = Duration::from_secs(300);
const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../LICENSE-APACHE");

/// Runs a tool on a model, with Berth if there is a place for its report.
fn tool(host: &Host, name: &str, model: &Path, args: &[&str], with: Option<&Scratch>) -> run::Output {
    let mut command = host.command(name);
    command.arg("-m").arg(model).args(["-t", "2", "--no-repack"]).args(args).env("OMP_WAIT_POLICY", "passive");
    if let Some(scratch) = with {
        let options = with_berth(Options::default(), scratch);
        command.args(["-ot", RULE]).env("GGML_BACKEND_PATH", berth()).envs(options.env);
    }
    run::run(command, LIMIT).and_then(|o| o.checked(name)).unwrap_or_else(|e| panic!("{e:#}"))
}

/// What the callback printed of each node: its name and operation, and the sum of its values.
fn nodes(stdout: &str) -> Vec<(String, f64)> {
    let mut nodes = Vec::new();
    let mut name = None;
    for line in stdout.lines() {
        if let Some((_, node)) = line.split_once("common_debug_cb_eval:") {
            name = Some(node.split_whitespace().collect::<Vec<_>>().join(" "));
        } else if let Some((_, sum)) = line.split_once("sum = ") {
            let sum = sum.trim().parse().unwrap_or_else(|e| panic!("{line}: {e}"));
            nodes.push((name.take().expect("a sum follows its node"), sum));
        }
    }
    nodes
}

/// Every node is there in the same order, with nearly the same sum.
fn every_node_is_seen(arch: &str, of_experts: &[&str]) {
    let Some(host) = hosts::require(HOST) else { return };
    let Some(model) = skip::available(arch, models::of_architecture(&host, arch)) else { return };
    let scratch = Scratch::new();
    let args = ["-p", "0102030405060708", "-n", "2"];
    let run = |with| {
        let output = tool(&host, "llama-eval-callback", &model, &args, with);
        nodes(&(output.stdout + &output.stderr))
    };
    let (stock, with) = (run(None), run(Some(&scratch)));
    for op in of_experts {
        assert!(stock.iter().any(|n| n.0.contains(op) && n.0.contains("ffn_moe")), "{arch}: no {op} among the nodes of the experts");
    }
    // The program writes through a log thread and may lose the end of what it wrote: the first layer must be there, and the experts of one.
    let seen = stock.len().min(with.len());
    let products = stock[..seen].iter().filter(|n| n.0.contains("= (f32) MUL_MAT_ID")).count();
    assert!(products >= 3 && stock[..seen].iter().any(|n| n.0.starts_with("l_out-0")), "{arch}: only {seen} nodes");
    for (i, (a, b)) in stock.iter().zip(&with).enumerate() {
        assert_eq!(a.0, b.0, "{arch}: node {i}");
    }
    for ((name, a), (_, b)) in stock.iter().zip(&with) {
        // Up to some ten thousand values of about 1 are added up, in six printed digits.
        assert!((a - b).abs() <= 2e-3 + 1e-4 * a.abs(), "{arch}: {name}: {b}, without Berth {a}");
    }
    let blocks = blocks(&scratch);
    assert!(blocks.node_by_node > 0 && blocks.reasons.iter().any(|r| r.reason == "graph_cut"), "{arch}: {blocks:?}");
}

#[test]
fn the_callback_sees_every_node_of_experts_with_scales() {
    every_node_is_seen("qwen3moe", &["MUL_MAT_ID", "GET_ROWS", "SWIGLU", "MUL(", "ADD("]);
}

#[test]
fn the_callback_sees_every_node_of_experts_with_biases() {
    every_node_is_seen("gpt-oss", &["MUL_MAT_ID", "ADD_ID", "SWIGLU_OAI"]);
}

#[test]
fn the_callback_sees_every_node_of_experts_with_limits() {
    every_node_is_seen("bailingmoe3", &["MUL_MAT_ID", "SILU", "CLAMP", "ADD("]);
}

#[test]
fn the_importance_matrix_is_the_one_without_berth() {
    let Some(host) = hosts::require(HOST) else { return };
    let model = floats();
    let scratch = Scratch::new();
    let run = |name: &str, with: Option<&Scratch>| {
        let out = scratch.path().join(name);
        let to = out.display().to_string();
        let args = ["-f", TEXT, "-c", "128", "--chunks", "4", "-o", &to];
        let estimate = || {
            let output = tool(&host, "llama-imatrix", &model, &args, with);
            let all = output.stdout + &output.stderr;
            all.split_once("Final estimate: PPL = ")?.1.split_whitespace().next()?.parse::<f64>().ok()
        };
        let estimate = until_whole(estimate, Option::is_some).expect("an estimate of the perplexity");
        (Gguf::open(&out).unwrap_or_else(|e| panic!("{e:#}")), estimate)
    };
    let ((stock, stock_ppl), (with, with_ppl)) = (run("stock.gguf", None), run("berth.gguf", Some(&scratch)));
    assert!((with_ppl / stock_ppl - 1.0).abs() < 1e-3, "perplexity {with_ppl}, without Berth {stock_ppl}");
    assert!(stock.tensors().iter().any(|t| t.name.contains("ffn_down_exps")), "experts are among the products");
    let layout = |g: &Gguf| g.tensors().iter().map(|t| (t.name.clone(), t.dims.clone())).collect::<Vec<_>>();
    assert_eq!(layout(&stock), layout(&with), "the same products");
    for (a, b) in stock.tensors().iter().zip(with.tensors()) {
        assert_eq!((a.ty, b.ty), (Type::F32, Type::F32));
        let values = |g: &Gguf, t| {
            let data = g.data(t).unwrap_or_else(|e| panic!("{e:#}"));
            data.chunks_exact(4).map(|v| f64::from(f32::from_le_bytes(v.try_into().expect("four bytes")))).collect::<Vec<_>>()
        };
        let (x, y) = (values(&stock, a), values(&with, b));
        let size = x.iter().map(|v| v * v).sum::<f64>();
        let error = x.iter().zip(&y).map(|(x, y)| (x - y).powi(2)).sum::<f64>();
        assert!(error <= 1e-8 * size, "{}: relative square error {:e}", a.name, error / size);
        if a.name.ends_with(".counts") {
            assert_eq!(x, y, "{}: how often each expert was chosen", a.name);
        }
    }
    let blocks = blocks(&scratch);
    assert!(blocks.fused == 0 && blocks.reasons.iter().any(|r| r.reason == "graph_cut"), "{blocks:?}");
}
