//! What `explain` says goes to a device, against what stock llama.cpp puts there, in bytes.
//!
//! The device is stock's own `ggml-rpc-server` on this machine: it computes everything, like a GPU. Every model that llama.cpp's
//! `test-llama-archs` writes; and models in which an architecture is odd about its layers or its embeddings and which that program does not write,
//! made here from the metadata of one that it does.

#[path = "support/scratch.rs"]
mod scratch;

use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use berth::gguf::Model;
use berth::placement::{Device, Explanation, Facts, Load, Machine, Memory, Rules, Targets};
use ffi_tests::cache::say;
use ffi_tests::gguf::{Array, Gguf, Type, Value, Writer};
use ffi_tests::hosts::{self, Host};
use ffi_tests::{models, run, skip};
use scratch::Scratch;

/// The build of llama.cpp that has the programs.
const HOST: &str = "sdist-dl";

/// All layers; the last one and the output.
const LAYERS: [u32; 2] = [99, 2];

/// A running `ggml-rpc-server`.
struct Rpc {
    server: Child,
    address: String,
}

impl Rpc {
    fn start(host: &Host) -> Result<Rpc> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let mut command = host.command("ggml-rpc-server");
        command.args(["-H", "127.0.0.1", "-p", &port.to_string()]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut rpc = Rpc { server: command.spawn().context("ggml-rpc-server")?, address: format!("127.0.0.1:{port}") };
        let start = Instant::now();
        while TcpStream::connect(&rpc.address).is_err() {
            anyhow::ensure!(rpc.server.try_wait()?.is_none() && start.elapsed() < Duration::from_secs(60), "ggml-rpc-server is not ready");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(rpc)
    }

    fn device(&self) -> String {
        format!("RPC0[{}]", self.address)
    }

    /// MiB on the device as stock says, for as many layers there.
    fn stock(&self, host: &Host, model: &Path, layers: u32) -> f64 {
        let run = || {
            let mut command = host.command("llama-completion");
            command.args(["--rpc", &self.address, "-ngl", &layers.to_string(), "-m"]).arg(model);
            command.args(["-p", "x", "-n", "1", "-t", "1", "-c", "128", "-no-cnv", "--no-warmup", "-fit", "off", "-lv", "5"]);
            let output = run::run(command, Duration::from_secs(120)).unwrap_or_else(|e| panic!("{e:#}"));
            let log = format!("{}\n{}", output.stdout, output.stderr);
            // Why there is no size in it, should there be none.
            log.lines().filter(|l| l.contains("error") || l.contains("ASSERT")).for_each(|l| println!("{}: {l}", model.display()));
            log
        };
        let sizes = |log: &str, buffer: &str| -> Vec<f64> {
            let line =
                |l: &str| Some(l.split_once(buffer)?.1.split_once("model buffer size =")?.1.trim().trim_end_matches(" MiB").trim().parse());
            log.lines().filter_map(line).map(|n| n.expect("a size in MiB")).collect()
        };
        // The first line is that of the host's buffer, or of the device's: some models have no other.
        let log = run::until_whole(run, |log| !sizes(log, "").is_empty());
        sizes(&log, "RPC0").iter().sum()
    }

    /// Compares one model; how many MiB went to the device with all layers.
    fn compare(&self, host: &Host, path: &Path) -> f64 {
        let model = Model::open(path).unwrap_or_else(|e| panic!("{e}"));
        let device = self.device();
        let mib = LAYERS.map(|layers| {
            let load =
                Load { devices: vec![Device::new(&device, None, 1.0)], gpu_layers: Some(layers), ..Facts::of(model.header()).load() };
            let rules = Rules::new(Targets::new([&device]));
            let e = Explanation::of_model(&model, &rules, &load, Machine::default()).unwrap_or_else(|e| panic!("{e}"));
            assert!(e.warnings.is_empty(), "{}: {:?}", path.display(), e.warnings);
            let there = e.tensors.iter().filter(|t| t.memory == Some(Memory::Device));
            // Two decimals, and up to 128 bytes of padding per tensor.
            let slack = 0.006 + there.count() as f64 * 128.0 / f64::from(1 << 20);
            let (said, done) = (e.totals.device as f64 / f64::from(1 << 20), self.stock(host, path, layers));
            let lines = e.tensors.iter().map(|t| format!("{} {:?}", t.name, t.memory)).collect::<Vec<_>>().join("\n");
            assert!(
                said <= done + 0.006 && done <= said + slack,
                "{} -ngl {layers}: stock has {done} MiB on the device, explain says {said:.3}\n{lines}",
                path.display()
            );
            done
        });
        mib[0]
    }
}

impl Drop for Rpc {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

fn compare_all(models: impl FnOnce(&Host, &Scratch) -> Result<Vec<PathBuf>>) {
    let Some(host) = hosts::require(HOST) else { return };
    let scratch = Scratch::new();
    let Some(paths) = skip::available("models of test-llama-archs", models(&host, &scratch)) else { return };
    let rpc = Rpc::start(&host).unwrap_or_else(|e| panic!("{e:#}"));
    let compared: Vec<f64> = paths.iter().map(|path| rpc.compare(&host, path)).collect();
    say(&format!("{} models, {:.0} MiB on a device as explain says", compared.len(), compared.iter().sum::<f64>()));
}

#[test]
fn models_of_every_architecture_go_to_a_device_as_explain_says() {
    compare_all(|host, scratch| {
        let dir = scratch.dir("all");
        models::of_all_architectures(host, &dir)?;
        let mut all = std::fs::read_dir(dir)?.map(|e| Ok(e?.path())).collect::<Result<Vec<_>>>()?;
        all.sort();
        anyhow::ensure!(all.len() > 100, "{} models", all.len());
        Ok(all)
    });
}

/// Sizes of the model whose metadata those below have.
const EMBD: u64 = 256;
const FF: u64 = 384;
const VOCAB: u64 = 128;
const HEAD: u64 = 128;
/// Rank and adapters of a switch, plus one that changes nothing.
const RANK: u64 = 8;
const SLOTS: u64 = 2;

/// A tensor to be: its name and its dimensions. All are f32 zeros.
type Shape = (String, Vec<u64>);

/// The metadata of `source` under another architecture, some of it changed, over other tensors.
fn remake(source: &Path, to: &Path, architecture: &str, keys: &[(&str, Value)], tensors: &[Shape]) -> Result<()> {
    let source = Gguf::open(source)?;
    let old = format!("{}.", source.string("general.architecture").context("no architecture")?);
    let mut writer = Writer::new(architecture);
    let changed = |key: &str| keys.iter().any(|(k, _)| *k == key);
    for (key, value) in source.metadata().iter().filter(|(k, _)| k != "general.architecture") {
        match key.strip_prefix(&old) {
            Some(rest) if changed(rest) => {}
            Some(rest) => writer.set(&format!("{architecture}.{rest}"), value.clone()),
            None => writer.set(key, value.clone()),
        }
    }
    keys.iter().for_each(|(key, value)| writer.set(&format!("{architecture}.{key}"), value.clone()));
    tensors.iter().try_for_each(|(name, dims)| writer.tensor(name, Type::F32, dims))?;
    writer.write_sparse(to, 0)
}

/// The two layers of the source, and what stands around them.
fn model(outer: &[(&str, &[u64])], prefix: &str, layer: &[(&str, &[u64])]) -> Vec<Shape> {
    let outer = outer.iter().map(|(name, dims)| (format!("{name}.weight"), dims.to_vec()));
    let layers = (0..2).flat_map(|i| {
        layer.iter().map(move |(name, dims)| {
            let suffix = if name.contains('.') { "" } else { ".weight" };
            (format!("{prefix}.{i}.{name}{suffix}"), dims.to_vec())
        })
    });
    outer.chain(layers).collect()
}

const EMBEDDINGS: (&str, &[u64]) = ("token_embd", &[EMBD, VOCAB]);
const NORM: (&str, &[u64]) = ("output_norm", &[EMBD]);
const OUTPUT: (&str, &[u64]) = ("output", &[EMBD, VOCAB]);
const ATTENTION: [(&str, &[u64]); 5] = [
    ("attn_norm", &[EMBD]),
    ("attn_q", &[EMBD, EMBD]),
    ("attn_k", &[EMBD, EMBD]),
    ("attn_v", &[EMBD, EMBD]),
    ("attn_output", &[EMBD, EMBD]),
];
const FEED_FORWARD: [(&str, &[u64]); 4] =
    [("ffn_norm", &[EMBD]), ("ffn_gate", &[EMBD, FF]), ("ffn_up", &[EMBD, FF]), ("ffn_down", &[FF, EMBD])];

fn numbers(values: &[i32]) -> Value {
    Value::Array(Array::I32(values.to_vec()))
}

/// Architecture, what it says of itself, and its tensors.
type Odd = (&'static str, Vec<(&'static str, Value)>, Vec<Shape>);

fn odd_models() -> Vec<Odd> {
    let plain = [&ATTENTION[..], &FEED_FORWARD].concat();
    let encoder = [&ATTENTION[..4], &[("attn_o", &[EMBD, EMBD])], &FEED_FORWARD].concat();
    let with = |more: &[(&'static str, &'static [u64])]| [&plain, more].concat();
    let adapters: Vec<(&str, &[u64])> = vec![
        ("attn_q.lora_a", &[EMBD, RANK, SLOTS]),
        ("attn_q.lora_b", &[RANK, EMBD, SLOTS]),
        ("attn_k.lora_a", &[EMBD, RANK, SLOTS]),
        ("attn_k.lora_b", &[RANK, EMBD, SLOTS]),
        ("attn_v.lora_a", &[EMBD, RANK, SLOTS]),
        ("attn_v.lora_b", &[RANK, EMBD, SLOTS]),
        ("attn_output.lora_a", &[EMBD, RANK, SLOTS]),
        ("attn_output.lora_b", &[RANK, EMBD, SLOTS]),
        ("ffn_gate.lora_a", &[EMBD, RANK, SLOTS]),
        ("ffn_gate.lora_b", &[RANK, FF, SLOTS]),
        ("ffn_up.lora_a", &[EMBD, RANK, SLOTS]),
        ("ffn_up.lora_b", &[RANK, FF, SLOTS]),
        ("ffn_down.lora_a", &[FF, RANK, SLOTS]),
        ("ffn_down.lora_b", &[RANK, EMBD, SLOTS]),
    ];
    let switch =
        [&[("attn_norm", &[EMBD][..]), ("attn_qkv", &[EMBD, 3 * EMBD]), ("attn_output", &[EMBD, EMBD])][..], &FEED_FORWARD, &adapters]
            .concat();
    let assistant = [
        &[("attn_norm", &[EMBD][..]), ("attn_q", &[EMBD, EMBD]), ("attn_output", &[EMBD, EMBD]), ("attn_q_norm", &[HEAD])][..],
        &[("post_attention_norm", &[EMBD]), ("layer_output_scale", &[1]), ("post_ffw_norm", &[EMBD])],
        &FEED_FORWARD,
    ]
    .concat();
    let eagle = [
        &[("attn_norm", &[EMBD][..]), ("attn_norm_2", &[EMBD]), ("attn_q", &[2 * EMBD, EMBD]), ("attn_k", &[2 * EMBD, EMBD])][..],
        &[("attn_v", &[2 * EMBD, EMBD]), ("attn_output", &[EMBD, EMBD])],
        &FEED_FORWARD,
    ]
    .concat();
    vec![
        // The embeddings are the output matrix too.
        ("llama-embed", vec![], model(&[EMBEDDINGS, NORM], "blk", &plain)),
        ("t5encoder", vec![], model(&[EMBEDDINGS, ("enc.output_norm", &[EMBD])], "enc.blk", &encoder)),
        // They are not.
        ("bitnet", vec![], model(&[EMBEDDINGS, NORM], "blk", &with(&[("attn_sub_norm", &[EMBD]), ("ffn_sub_norm", &[FF])]))),
        (
            "eagle3",
            vec![("target_layers", numbers(&[0, 1, 2])), ("target_hidden_size", Value::U32(EMBD as u32))],
            model(&[EMBEDDINGS, NORM, ("fc", &[3 * EMBD, EMBD])], "blk", &eagle),
        ),
        // All layers predict, and are loaded.
        (
            "gemma4-assistant",
            vec![
                ("nextn_predict_layers", Value::U32(2)),
                ("embedding_length_out", Value::U32(2 * EMBD as u32)),
                ("attention.sliding_window", Value::U32(64)),
                ("attention.sliding_window_pattern", Value::Array(Array::Raw(7, vec![1, 1]))),
            ],
            model(
                &[EMBEDDINGS, NORM, ("nextn.pre_projection", &[4 * EMBD, EMBD]), ("nextn.post_projection", &[EMBD, 2 * EMBD])],
                "blk",
                &assistant,
            ),
        ),
        // Layers that are run three times count three times.
        ("nanbeige", vec![("num_loops", Value::U32(3))], model(&[EMBEDDINGS, NORM, OUTPUT], "blk", &plain)),
        // A layer without tensors counts.
        (
            "graniteswitch",
            vec![
                ("adapters.count", Value::U32(SLOTS as u32 - 1)),
                ("adapters.lora_rank", Value::U32(RANK as u32)),
                ("adapters.token_ids_activate", numbers(&[1])),
                ("adapters.token_ids_substitute", numbers(&[0])),
            ],
            model(&[EMBEDDINGS, NORM, OUTPUT], "blk", &switch),
        ),
    ]
}

#[test]
fn models_that_are_odd_about_layers_and_embeddings_go_to_a_device_as_explain_says() {
    compare_all(|host, scratch| {
        let source = models::dense_of_architecture(host, "llama")?;
        let make = |(architecture, keys, tensors): Odd| {
            let path = scratch.path().join(format!("{architecture}.gguf"));
            remake(&source, &path, architecture, &keys, &tensors).map(|()| path)
        };
        let mut all = odd_models().into_iter().map(make).collect::<Result<Vec<_>>>()?;
        // It says that its last layer predicts, and the layer is like all others.
        let source = models::of_architecture(host, "deepseek4")?;
        let shapes: Vec<Shape> = Gguf::open(&source)?.tensors().iter().map(|t| (t.name.clone(), t.dims.clone())).collect();
        let path = scratch.path().join("deepseek4.gguf");
        remake(&source, &path, "deepseek4", &[("nextn_predict_layers", Value::U32(1))], &shapes)?;
        all.push(path);
        Ok(all)
    });
}
