//! What people do with llama.cpp besides plain text, with Berth computing the experts: adapters, parallel clients, a draft model, a context that
//! shifts, embeddings. Each runs and gives what it gives without Berth.
//!
//! The model has random floats, so that both sides compute with floats: their logits differ in the last digits, and texts sampled with a fixed
//! seed are the same.

#[path = "support/device.rs"]
mod device;
#[path = "support/preload.rs"]
mod preload;
#[path = "support/remote.rs"]
mod remote;
#[path = "support/scratch.rs"]
mod scratch;
#[path = "support/servers.rs"]
mod servers;

use std::net::{TcpListener, TcpStream};
use std::path::Path;

use device::{RULE, blocks, floats, with_berth};
use ffi_tests::gguf::{Gguf, Type, Value, Writer};
use ffi_tests::hosts::{self, Host};
use ffi_tests::report::Blocks;
use ffi_tests::run::{Options, Server, agree, greedy_text, until_whole};
use ffi_tests::{models, skip};
use remote::Remote;
use scratch::Scratch;
use serde_json::{Value as Json, json};
use servers::{assert_fused, compare, four_clients, sampled};

const HOST: &str = "sdist-dl";
const PROMPT: &str = "A ship in harbor is safe";

/// [`servers::compare`] on the build, with the model of floats.
fn on_servers<T: std::fmt::Debug>(args: &[&str], ask: impl Fn(&Server) -> T, same: impl Fn(&T, &T) -> bool) -> Option<(T, Blocks)> {
    compare(HOST, &floats(), args, &[], ask, same)
}

fn the_text_is_the_same(args: &[&str]) {
    let Some((stock, blocks)) = on_servers(args, |server| sampled(server, PROMPT, 48), |a, b| a == b) else { return };
    assert_eq!(stock.len(), 48);
    assert_fused(&blocks);
}

#[test]
fn fitting_to_memory_runs_and_the_text_is_the_same() {
    the_text_is_the_same(&["--fit", "on", "--no-warmup"]);
}

#[test]
fn no_op_offload_runs_and_the_text_is_the_same() {
    the_text_is_the_same(&["--no-op-offload", "--no-warmup"]);
}

#[test]
fn small_batches_run_and_the_text_is_the_same() {
    the_text_is_the_same(&["-b", "16", "-ub", "4", "--no-warmup"]);
}

#[test]
fn four_clients_at_once_get_the_same_texts() {
    let ask = |server: &Server| four_clients(|i| sampled(server, &format!("{i} {PROMPT}"), 40 + i));
    let Some((stock, blocks)) = on_servers(&["-np", "4"], ask, |a, b| a == b) else { return };
    assert_eq!(stock.iter().map(Vec::len).collect::<Vec<_>>(), [40, 41, 42, 43]);
    assert_fused(&blocks);
}

#[test]
fn a_draft_model_in_the_same_process_runs_and_the_text_is_the_same() {
    let draft = floats().display().to_string();
    // Greedy: every draft of the same model is right, so that batches of several tokens are computed.
    let body = json!({
        "prompt": PROMPT, "n_predict": 32, "temperature": 0.0, "top_k": 1, "cache_prompt": false, "ignore_eos": true, "return_tokens": true,
    });
    let ask = |server: &Server| {
        let answer = server.post("/completion", &body).unwrap_or_else(|e| panic!("{e:#}"));
        assert!(answer["timings"]["draft_n"].as_u64().is_some_and(|n| n > 0), "nothing was drafted: {answer}");
        answer["tokens"].clone()
    };
    let args = ["--spec-type", "draft-simple", "-md", &draft];
    let Some((_, blocks)) = compare(HOST, &floats(), &args, &["-otd", RULE], ask, |a, b| a == b) else { return };
    assert_fused(&blocks);
}

#[test]
fn a_context_that_shifts_runs_and_the_text_is_the_same() {
    let args = ["--context-shift", "-c", "64"];
    let Some((stock, blocks)) = on_servers(&args, |server| sampled(server, PROMPT, 120), |a, b| a == b) else { return };
    assert_eq!(stock.len(), 120, "more than the context holds");
    assert_fused(&blocks);
}

#[test]
fn embeddings_are_the_same_but_for_the_last_digits() {
    let ask = |server: &Server| {
        let answer = server.post("/embedding", &json!({ "content": PROMPT })).unwrap_or_else(|e| panic!("{e:#}"));
        let values = &answer[0]["embedding"][0];
        values.as_array().unwrap_or_else(|| panic!("{answer}")).iter().filter_map(Json::as_f64).collect::<Vec<_>>()
    };
    // Normalised to length 1.
    let close = |a: &Vec<f64>, b: &Vec<f64>| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-4);
    let Some((stock, blocks)) = on_servers(&["--embeddings", "--pooling", "mean"], ask, close) else { return };
    assert!(stock.len() >= 256 && stock.iter().any(|v| v.abs() > 1e-3), "{stock:?}");
    assert_fused(&blocks);
}

/// Writes an adapter of rank 4 for the experts of a model.
fn adapter(model: &Path, to: &Path) {
    const RANK: u64 = 4;
    let model = Gguf::open(model).unwrap_or_else(|e| panic!("{e:#}"));
    let mut w = Writer::new(model.string("general.architecture").expect("an architecture"));
    w.set("general.type", Value::String("adapter".into()));
    w.set("adapter.type", Value::String("lora".into()));
    w.set("adapter.lora.alpha", Value::F32(8.0));
    for t in model.tensors().iter().filter(|t| t.name.contains("_exps")) {
        let [k, rows, experts] = t.dims[..] else { panic!("{:?}", t.dims) };
        w.tensor(&format!("{}.lora_a", t.name), Type::F32, &[k, RANK, experts]).expect("whole blocks");
        w.tensor(&format!("{}.lora_b", t.name), Type::F32, &[RANK, rows, experts]).expect("whole blocks");
    }
    let mut rng = fastrand::Rng::with_seed(5);
    let mut file = std::fs::File::create(to).expect("a scratch directory is writable");
    w.write(&mut file, |_, info, out| {
        let values = (0..info.bytes / 4).flat_map(|_| (0.2 * (rng.f32() - 0.5)).to_le_bytes()).collect::<Vec<u8>>();
        Ok(std::io::Write::write_all(out, &values)?)
    })
    .unwrap_or_else(|e| panic!("{e:#}"));
}

#[test]
fn an_adapter_of_experts_runs_node_by_node_and_the_text_is_the_same() {
    let scratch = Scratch::new();
    let path = scratch.path().join("lora.gguf");
    adapter(&floats(), &path);
    let lora = path.display().to_string();
    let ask = |server: &Server| sampled(server, PROMPT, 48);
    let Some((with_adapter, blocks)) = on_servers(&["--lora", &lora], ask, |a, b| a == b) else { return };
    let Some((without, _)) = on_servers(&[], ask, |a, b| a == b) else { return };
    assert_ne!(with_adapter, without, "the adapter changes the text");
    // What stands between the products is llama.cpp's own, so the graph comes in pieces.
    assert!(blocks.fused == 0 && blocks.reasons.iter().any(|r| ["unknown_chain", "graph_cut"].contains(&r.reason.as_str())), "{blocks:?}");
}

/// A server on this machine that plays a GPU.
fn gpu(host: &Host) -> Remote {
    let port = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port").port();
    Remote::start(host, "CPU", ("127.0.0.1", port), |command| command, || TcpStream::connect(("127.0.0.1", port)).is_ok())
}

/// Biases follow the layer to the GPU if the rule does not name them: what they are added to is copied there and back, and the block is cut.
#[test]
fn next_to_a_gpu_experts_are_one_operation_if_the_rule_names_all_that_belongs_to_them() {
    let Some(host) = hosts::require(HOST) else { return };
    let Some(model) = skip::available("gpt-oss", models::of_architecture(&host, "gpt-oss")) else { return };
    let remote = gpu(&host);
    let generate = |options: Options| {
        let options = options.arg(&["--rpc", remote.address(), "-ngl", "99", "--temp", "1", "--seed", "3"]);
        let run = || greedy_text(&host, &model, &options).unwrap_or_else(|e| panic!("{e:#}")).text;
        until_whole(run, |text| agree(text, text, 24))
    };
    let options = || Options { prompt: "0102030405060708".into(), tokens: 24, ..Options::default() };
    let stock = generate(options());
    for (rule, fused) in [("exps=CPU_MMAP", true), ("exps.weight=CPU_MMAP", false)] {
        let scratch = Scratch::new();
        let mut options = with_berth(options(), &scratch);
        options.rules = Some(rule.into());
        let text = generate(options);
        assert!(agree(&stock, &text, 24), "{rule}: {text:?}, without Berth {stock:?}");
        let blocks = blocks(&scratch);
        let cut = blocks.reasons.iter().any(|r| r.reason == "graph_cut");
        assert_eq!((blocks.fused > 0, cut), (fused, !fused), "{rule}: {blocks:?}");
    }
}

/// The host sends large products to a GPU only if they are its CPU's: from the threshold on Berth declines them, where there is a GPU.
#[test]
fn products_of_many_tokens_are_left_to_the_host_if_there_is_a_gpu() {
    let Some(host) = hosts::require(HOST) else { return };
    let Some(model) = skip::available("the language model", models::smollm_moe()) else { return };
    let remote = gpu(&host);
    let run = |gpu: bool, threshold: Option<(&str, &str)>| {
        let scratch = Scratch::new();
        // A prompt of more than four tokens and less than 32.
        let mut options = with_berth(Options { tokens: 8, ..Options::default() }, &scratch).arg(&["-ngl", if gpu { "99" } else { "0" }]);
        if gpu {
            options = options.arg(&["--rpc", remote.address()]);
        }
        if let Some((name, value)) = threshold {
            options = options.env(name, value);
        }
        let made = until_whole(
            || greedy_text(&host, &model, &options).unwrap_or_else(|e| panic!("{e:#}")),
            |made| agree(&made.text, &made.text, 5),
        );
        assert!(made.text.trim_start().starts_with("Paris"), "{:?}", made.text);
        blocks(&scratch).fused
    };
    let whole = run(true, None);
    let (own, of_host) = ("BERTH_OFFLOAD_MIN_BATCH", "GGML_OP_OFFLOAD_MIN_BATCH");
    let without_prompt = run(true, Some((own, "4")));
    assert!(0 < without_prompt && without_prompt < whole, "{without_prompt} blocks of {whole}");
    assert_eq!(run(true, Some((of_host, "4"))), without_prompt, "the host's own setting");
    assert_eq!(run(true, Some((own, "1"))), 0, "single tokens too");
    assert_eq!(run(false, Some((own, "4"))), whole, "without a GPU there is no limit");
}

/// A ggml without the function that tells what is used elsewhere: the test hides it.
#[test]
fn a_host_that_cannot_tell_what_is_used_elsewhere_is_computed_node_by_node() {
    let Some(host): Option<Host> = hosts::require(HOST) else { return };
    let Some(model) = skip::available("the language model", models::smollm_moe()) else { return };
    let scratch = Scratch::new();
    let Some(hide) = preload::library("hide_can_fuse", scratch.path(), &[]) else { return };
    let options = with_berth(Options { tokens: 8, ..Options::default() }, &scratch).env("LD_PRELOAD", hide.display().to_string());
    let run = || greedy_text(&host, &model, &options).unwrap_or_else(|e| panic!("{e:#}"));
    let made = until_whole(run, |made| agree(&made.text, &made.text, 5));
    assert!(made.text.trim_start().starts_with("Paris"), "{:?}", made.text);
    let blocks = blocks(&scratch);
    let of = |code: &str| blocks.reasons.iter().find(|r| r.reason == code).map_or(0, |r| r.blocks);
    assert!(blocks.fused == 0 && of("old_host") > 0, "{blocks:?}");
    assert_eq!(
        made.stderr.matches("cannot tell whether values inside are used elsewhere").count(),
        1,
        "one line says so:\n{}",
        made.stderr
    );
}
