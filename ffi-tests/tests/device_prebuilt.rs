//! Berth computes the experts in llama.cpp as others ship it: the libraries of node-llama-cpp, driven by `c/greedy.c`, and the `llama-server` of
//! the skulk package over HTTP with four clients at once.
//!
//! With a model of random floats, where nothing is rounded to 8 bits, the tokens are those without Berth; with the language model, which says
//! what it says but for rounding, the known answer is.

#[path = "support/device.rs"]
mod device;
#[path = "support/greedy.rs"]
mod greedy;
#[path = "support/scratch.rs"]
mod scratch;
#[path = "support/servers.rs"]
mod servers;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use device::{RULE, berth, blocks, floats, with_berth};
use ffi_tests::hosts;
use ffi_tests::run::{self, Options, Server};
use ffi_tests::{models, skip};
use greedy::harness;
use scratch::Scratch;
use servers::{assert_fused, compare, four_clients, sampled};

const SKULK: &str = "skulk";
/// Tokens of an answer.
const TOKENS: u64 = 8;
/// Layers of the two models, each with a block of experts.
const FLOAT_LAYERS: u64 = 2;
const LANGUAGE_LAYERS: u64 = 30;

fn language_model() -> Option<PathBuf> {
    skip::available("the language model", models::smollm_moe())
}

/// The tokens that a host's libraries make, without Berth and with Berth computing: every block of every step, each as one operation.
fn tokens(id: &str, model: &Path, layers: u64, prompt: &str) -> Option<[Vec<String>; 2]> {
    let (host, harness) = (hosts::require(id)?, harness()?);
    let generate = |with: Option<&Scratch>| {
        let mut command = Command::new(harness);
        run::clean_env(&mut command);
        // One thread: several hosts wait for others by spinning, which takes minutes when other tests run on the same cores.
        command.arg(host.lib("llama").unwrap_or_else(|e| panic!("{e:#}"))).arg(&host.lib_dir).arg(model);
        command.args([prompt, &TOKENS.to_string()]).env("OMP_WAIT_POLICY", "passive");
        if let Some(scratch) = with {
            command.env("GGML_BACKEND_PATH", berth()).envs(with_berth(Options::default(), scratch).env).arg(RULE);
        }
        let output = run::run(command, Duration::from_secs(300)).and_then(|o| o.checked(id)).unwrap_or_else(|e| panic!("{e:#}"));
        let line = output.stdout.lines().find_map(|l| l.strip_prefix("tokens ")).unwrap_or_else(|| panic!("{id}: {}", output.stdout));
        line.split(' ').map(str::to_owned).collect::<Vec<_>>()
    };
    let scratch = Scratch::new();
    let both = [generate(None), generate(Some(&scratch))];
    let blocks = blocks(&scratch);
    assert_eq!((blocks.fused, blocks.node_by_node), (layers * TOKENS, 0), "{id}: {blocks:?}");
    Some(both)
}

fn computes_the_same_tokens(id: &str) {
    let Some([stock, with]) = tokens(id, &floats(), FLOAT_LAYERS, "@65,32,115,104,105,112") else { return };
    assert_eq!(stock, with, "{id}");
    let Some(model) = language_model() else { return };
    let Some([stock, with]) = tokens(id, &model, LANGUAGE_LAYERS, "The capital of France is") else { return };
    // "Paris" is one token.
    assert_eq!(stock[0], with[0], "{id}: {stock:?} {with:?}");
}

macro_rules! each_host {
    ($($test:ident: $id:literal;)*) => {
        $(#[test] fn $test() { computes_the_same_tokens($id) })*
    };
}

each_host! {
    node_3_14_5_computes_every_block_as_one_operation: "node-3.14.5";
    node_3_18_1_computes_every_block_as_one_operation: "node-3.18.1";
    node_3_20_0_computes_every_block_as_one_operation: "node-3.20.0";
    node_3_22_1_computes_every_block_as_one_operation: "node-3.22.1";
    skulk_computes_every_block_as_one_operation: "skulk";
    ggml_0_26_computes_every_block_as_one_operation: "sys2-0.26";
}

#[test]
fn the_skulk_server_gives_four_clients_at_once_the_same_texts() {
    let ask = |server: &Server| four_clients(|i| sampled(server, &format!("{i} A ship in harbor is safe"), 40 + i));
    let Some((stock, blocks)) = compare(SKULK, &floats(), &["-np", "4"], &[], ask, |a, b| a == b) else { return };
    assert_eq!(stock.iter().map(Vec::len).collect::<Vec<_>>(), [40, 41, 42, 43]);
    assert_fused(&blocks);
}

#[test]
fn the_skulk_server_tells_four_clients_at_once_four_capitals() {
    const CAPITALS: [(&str, &str); 4] = [("France", "Paris"), ("Italy", "Rome"), ("Germany", "Berlin"), ("Japan", "Tokyo")];
    let Some(model) = language_model() else { return };
    let ask = |server: &Server| {
        four_clients(|i| {
            let prompt = format!("The capital of {} is", CAPITALS[i as usize].0);
            server.complete(&prompt, TOKENS as u32).unwrap_or_else(|e| panic!("{e:#}")).text
        })
    };
    let right = |texts: &Vec<String>| texts.iter().zip(CAPITALS).all(|(text, (_, capital))| text.trim_start().starts_with(capital));
    let Some((_, blocks)) = compare(SKULK, &model, &["-np", "4"], &[], ask, |a, b| right(a) && right(b)) else { return };
    assert_fused(&blocks);
}
