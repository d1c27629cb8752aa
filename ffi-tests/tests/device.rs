//! The BERTH device in stock llama.cpp: it computes the experts of every layer as one operation, and the model says what it says with llama.cpp's
//! own kernels, but for rounding.
//!
//! Both sides quantise the activations to 8 bits, in other blocks and sums, so logits differ in the last digits and texts may part after some
//! tokens. What is compared is the first words of a known answer, and the distributions over the tokens of a text.

mod common;

use std::path::Path;
use std::time::Duration;

use common::{Scratch, TYPES, berth, experts, splits};
use ffi_tests::cache::say;
use ffi_tests::hosts::{self, Host};
use ffi_tests::report::Report;
use ffi_tests::run::{self, Generation, Options, agree, greedy_text, until_whole};
use ffi_tests::{models, skip};

const HOST: &str = "sdist-dl";
/// Layers of the language model, each with a block of experts.
const LAYERS: u64 = 30;
const TOKENS: u64 = 8;
/// Mean divergence of the distributions from those of stock, and the share of tokens in which the likeliest is the same, in percent. Measured:
/// 0.0046 and 95.5 %.
const MOST_KLD: f64 = 0.02;
const LEAST_SAME: f64 = 90.0;

/// Bytes of a text that must be there: "Paris".
const LEAST_TEXT: usize = 5;

fn generate(host: &Host, model: &Path, rules: &str, env: &[(&str, &str)]) -> (Generation, Report) {
    let scratch = Scratch::new();
    let mut options = Options { tokens: TOKENS as u32, ..Options::default() }.with_berth(&berth(), rules).arg(&["-lv", "4"]);
    options.env.extend(scratch.environment());
    options.env.extend(env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
    let run = || greedy_text(host, model, &options).unwrap_or_else(|e| panic!("{rules}: {e:#}"));
    let made = until_whole(run, |made| agree(&made.text, &made.text, LEAST_TEXT));
    (made, scratch.report())
}

/// The known answer, as far as rounding lets it be the same.
fn says_paris(what: &str, made: &Generation) {
    assert!(made.text.trim_start().starts_with("Paris"), "{what}: {:?}", made.text);
}

#[test]
fn the_experts_in_every_type_are_computed_on_the_device_as_one_operation() {
    let Some(host) = hosts::require(HOST) else { return };
    let Some(model) = skip::available("the language model", models::smollm_moe()) else { return };
    let experts = experts(&model);
    for ty in TYPES {
        let (made, report) = generate(&host, &model, &format!("exps={ty}"), &[]);
        says_paris(ty, &made);
        let blocks = &report.blocks;
        // The prompt is one more run than tokens were made, less the last, which is not computed any further.
        assert!(blocks.fused >= LAYERS * TOKENS && blocks.fused % LAYERS == 0, "{ty}: {blocks:?}");
        assert!(blocks.reasons.iter().all(|r| r.reason == "some_choices"), "{ty}: {blocks:?}");
        let placed: usize = report.buffers.iter().map(|b| b.tensors.len()).sum();
        assert_eq!(placed, experts.len(), "{ty}: weights in our buffers, and none of the values of a graph");
        assert!(report.buffers.iter().all(|b| b.usage == "tensors"), "{ty}: a compute buffer outlived its context: {:?}", report.buffers);
        // The layer's router and what follows stay with the host: one piece for it, one for the experts.
        assert_eq!(splits(&made.stderr).iter().max(), Some(&(2 * LAYERS as u32 + 1)), "{ty}:\n{}", made.stderr);
        assert_eq!(made.stderr.matches("are computed as one operation").count(), 1, "{ty}: one line says so\n{}", made.stderr);
    }
}

#[test]
fn auto_takes_the_experts_without_a_rule() {
    let Some(host) = hosts::require(HOST) else { return };
    let Some(model) = skip::available("the language model", models::smollm_moe()) else { return };
    let (made, report) = generate(&host, &model, "", &[("BERTH_AUTO", "1")]);
    says_paris("BERTH_AUTO=1", &made);
    let mut placed: Vec<&str> = report.buffers.iter().flat_map(|b| &b.tensors).map(|t| t.name.as_str()).collect();
    placed.sort_unstable();
    assert_eq!(placed, experts(&model).keys().map(String::as_str).collect::<Vec<_>>(), "exactly the experts");
    assert!(report.blocks.fused >= LAYERS * TOKENS, "{:?}", report.blocks);
}

#[test]
fn switched_off_it_computes_nothing() {
    let Some(host) = hosts::require(HOST) else { return };
    let Some(model) = skip::available("the language model", models::smollm_moe()) else { return };
    let (made, report) = generate(&host, &model, "exps=CPU_MMAP", &[("BERTH_FUSE", "0")]);
    says_paris("BERTH_FUSE=0", &made);
    assert_eq!((report.blocks.fused, report.blocks.node_by_node), (0, 0));
    assert_eq!(splits(&made.stderr).iter().max(), Some(&1));
}

/// The distributions over the vocabulary at every second half of a chunk, against those of stock.
#[test]
fn distributions_are_those_of_stock_but_for_rounding() {
    let Some(host) = hosts::require(HOST) else { return };
    let Some(model) = skip::available("the language model", models::smollm_moe()) else { return };
    if host.tool("llama-perplexity").is_none() {
        return skip::skipped("distributions", "the host has no llama-perplexity");
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("the target directory is writable");
    let base = dir.path().join("stock.kld");
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("../LICENSE-APACHE");
    let perplexity = |extra: &[&std::ffi::OsStr], with: Option<&Scratch>| {
        let mut command = host.command("llama-perplexity");
        command.arg("-m").arg(&model).args(["-t", "2", "-c", "256", "--chunks", "6", "--no-repack"]).args(extra);
        command.env("OMP_WAIT_POLICY", "passive");
        if let Some(scratch) = with {
            command.args(["-ot", "exps=CPU_MMAP"]).env("GGML_BACKEND_PATH", berth()).envs(scratch.environment());
        }
        run::run(command, Duration::from_secs(300)).and_then(|o| o.checked("llama-perplexity")).unwrap_or_else(|e| panic!("{e:#}"))
    };
    perplexity(&["-f".as_ref(), text.as_ref(), "--save-all-logits".as_ref(), base.as_ref()], None);
    let scratch = Scratch::new();
    let output = perplexity(&["--kl-divergence".as_ref(), "--kl-divergence-base".as_ref(), base.as_ref()], Some(&scratch));
    let number = |label: &str| {
        let line = output.stdout.lines().find_map(|l| Some(l.trim_start().strip_prefix(label)?.trim_start_matches([':', ' '])));
        let value = line.and_then(|l| l.split_whitespace().next()?.parse::<f64>().ok());
        value.unwrap_or_else(|| panic!("no {label} in {}", run::last_lines(&output.stdout, 40)))
    };
    let (kld, same) = (number("Mean    KLD"), number("Same top p"));
    say(&format!("fused against stock: mean KLD {kld}, same top token {same} %"));
    assert!(scratch.report().blocks.fused > 0, "the experts were not computed by Berth");
    assert!(kld < MOST_KLD && same > LEAST_SAME, "mean KLD {kld}, same top token {same} %");
}
