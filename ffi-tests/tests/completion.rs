//! `llama-completion`, stock, with every buffer type and every way to load a model: the text is the one without Berth, and the report says
//! that the experts really were in memory of the kind asked for.
//!
//! The texts are compared as far as both go, at least [`LEAST`] bytes: the program writes through a log thread and may lose its last bytes.
//! Models with random weights are sampled (`--temp 1`, fixed seed) instead of decoded greedily, where they would repeat one token for ever;
//! one different logit soon gives another text.

mod common;
#[path = "common/placed.rs"]
mod placed;

use std::collections::BTreeSet;
use std::path::Path;

use common::{Scratch, TYPES, berth, experts, splits};
use ffi_tests::gguf::Type;
use ffi_tests::hosts::{self, Host};
use ffi_tests::models::{self, Spec};
use ffi_tests::run::{Generation, Options, agree, greedy_text, until_whole};
use ffi_tests::skip;
use placed::{assert_placed, placement_only};

/// The one build of llama.cpp whose tools and test programs there are.
const HOST: &str = "sdist-dl";
/// Bytes that two texts must share.
const LEAST: usize = 64;
/// Ways to load a model, and whether the file is mapped.
const MODES: [(&str, bool); 5] = [("mmap", true), ("none", false), ("dio", false), ("mlock", false), ("mmap+mlock", true)];

macro_rules! architectures {
    ($($test:ident: $arch:literal;)*) => {
        $(#[test] fn $test() { architecture($arch) })*
        const ARCHITECTURES: &[&str] = &[$($arch),*];
    };
}

// Five architectures that differ in what they do with experts. Each model is 4 to 14 MB.
architectures! {
    // Biases on every expert matrix (ADD_ID), clamped SWIGLU_OAI, the softmax after the choice, attention sinks.
    gpt_oss_says_the_same: "gpt-oss";
    // Gate and up merged in one tensor, a sigmoid router, a shared expert.
    hy_v3_with_merged_gate_and_up_says_the_same: "hy_v3";
    // The weight of an expert is applied before it, and every second block is dense.
    llama4_with_weights_before_the_experts_says_the_same: "llama4";
    // Latent attention, a dense first block, merged gate and up, groups of experts.
    deepseek2_with_a_dense_first_block_says_the_same: "deepseek2";
    // Two kinds of experts: `exps`, and the small `chexps` beside them.
    grovemoe_with_two_kinds_of_experts_says_the_same: "grovemoe";
}

fn architecture(arch: &str) {
    let Some(host) = hosts::require(HOST) else { return };
    let Some(model) = skip::available("models of test-llama-archs", models::of_architecture(&host, arch)) else { return };
    same_in_every_type_and_mode(&host, &model, &sampled("0102030405060708"));
}

#[test]
fn a_language_model_says_the_same() {
    let Some(host) = hosts::require(HOST) else { return };
    let Some(model) = skip::available("the language model", models::smollm_moe()) else { return };
    let stock = same_in_every_type_and_mode(&host, &model, &Options::default());
    assert!(stock.text.contains("Paris"), "{:?}", stock.text);
}

/// Formats that stock has no repacked form for on this CPU, so that both sides compute with the same kernels.
#[test]
fn random_weights_in_formats_that_are_never_repacked_say_the_same() {
    let Some(host) = hosts::require(HOST) else { return };
    let spec = Spec { ty: Type::Q6_K, down: Some(Type::Q5_1), ..Spec::default() };
    let model = models::random(&spec).unwrap_or_else(|e| panic!("{e:#}"));
    same_in_every_type_and_mode(&host, &model, &sampled("A ship in harbor is safe"));
}

/// Stock repacks Q4_K, and the repacked kernels round in another way: so the stock side keeps the format of the file too.
#[test]
fn random_weights_in_q4_k_say_what_stock_says_without_repacking() {
    let Some(host) = hosts::require(HOST) else { return };
    let model = models::random(&Spec { ty: Type::Q4_K, ..Spec::default() }).unwrap_or_else(|e| panic!("{e:#}"));
    same_in_every_type_and_mode(&host, &model, &sampled("A ship in harbor is safe").arg(&["--no-repack"]));
}

#[test]
fn splits_are_read_from_every_form_of_the_line() {
    assert_eq!(splits("sched_reserve: graph splits = 1\nother"), [1]);
    assert_eq!(splits("llama_context: graph splits = 3 (with bs=512), 2 (with bs=1)\n"), [3, 2]);
    assert_eq!(splits("graph: nodes = 1776, splits = 1, input objects = 4"), [1]);
    assert_eq!(splits("graph (pp bs=512, tg bs=1): nodes = 10 / 9, splits = 4 / 2, input objects = 4 / 5"), [4, 2]);
}

#[test]
fn the_architectures_are_five() {
    assert_eq!(ARCHITECTURES.iter().collect::<BTreeSet<_>>().len(), 5);
    assert!(["gpt-oss", "hy_v3"].iter().all(|required| ARCHITECTURES.contains(required)));
}

/// Runs stock once and Berth once per type, in each mode; gives a text of stock.
fn same_in_every_type_and_mode(host: &Host, model: &Path, options: &Options) -> Generation {
    let experts = experts(model);
    let name = model.file_name().unwrap_or_default().display();
    let generate = |what: &str, options: &Options| {
        let run = || greedy_text(host, model, options).unwrap_or_else(|e| panic!("{what}: {e:#}"));
        until_whole(run, |g| agree(&g.text, &g.text, LEAST))
    };
    let mut texts = Vec::new();
    for (mode, mapped) in MODES {
        // 4 shows INFO: the lines about buffers that are what was asked, and about splits.
        let options = options.clone().arg(&["--load-mode", mode, "-lv", "4"]);
        let stock = generate(&format!("stock, {mode}"), &options);
        assert!(!stock.stderr.contains("berth: "), "Berth speaks without being loaded");
        assert_eq!(splits(&stock.stderr).iter().max(), Some(&1), "{name} {mode}: stock needs one split:\n{}", stock.stderr);
        for ty in TYPES {
            let what = format!("{name} {ty} {mode}");
            let scratch = Scratch::new();
            let mut options = options.clone().with_berth(&berth(), &format!("exps={ty}"));
            options.env.extend(placement_only(&scratch));
            let with = generate(&what, &options);
            assert!(agree(&with.text, &stock.text, LEAST), "{what}:\n   {:?}\nnot {:?}", with.text, stock.text);
            assert_eq!(splits(&with.stderr).iter().max(), Some(&1), "{what}: the scheduler made a split for the experts");
            assert_placed(&what, ty, mapped, &experts, &scratch.report(), &with.stderr);
        }
        texts.push(stock);
    }
    texts.swap_remove(0)
}

fn sampled(prompt: &str) -> Options {
    Options { prompt: prompt.into(), tokens: 96, ..Options::default() }.arg(&["--temp", "1", "--seed", "3"])
}
