//! Every real host with Berth loaded through `GGML_BACKEND_PATH`: our devices are listed, the experts go where the rule says, and the tokens,
//! and the logits bit for bit, are those without Berth. A host that cannot take Berth says so in one line and goes on without.
//!
//! The libraries are driven by `c/greedy.c`, the same program for all of them; where a host brings a `llama-server`, that is asked over HTTP.

mod common;
#[path = "support/greedy.rs"]
mod greedy;
#[path = "common/placed.rs"]
mod placed;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use common::{Scratch, TYPES, berth, experts, splits};
use ffi_tests::hosts::{self, Expect, Host};
use ffi_tests::run::{self, Options, Output, Server};
use ffi_tests::{models, skip};
use greedy::harness;
use placed::{assert_placed, placement_only};

const EXPERTS: &str = "ffn_(gate|up|down)_exps";
const PROMPT: &str = "The capital of France is";
const TOKENS: usize = 16;
const LIMIT: Duration = Duration::from_secs(300);

macro_rules! each_host {
    ($($test:ident: $check:ident($id:literal $(, $arg:literal)?);)*) => {
        $(#[test] fn $test() { $check($id $(, $arg)?) })*

        #[test]
        fn every_host_of_the_table_has_a_test() {
            let mut tested: Vec<&str> = vec![$($id),*];
            tested.sort_unstable();
            tested.dedup();
            let mut ids = hosts::ids();
            ids.sort_unstable();
            assert_eq!(tested, ids);
        }
    };
}

each_host! {
    node_3_14_5_puts_experts_where_asked_and_computes_the_same: takes_berth("node-3.14.5", "v1");
    node_3_18_1_puts_experts_where_asked_and_computes_the_same: takes_berth("node-3.18.1", "v1");
    node_3_20_0_puts_experts_where_asked_and_computes_the_same: takes_berth("node-3.20.0", "v2");
    node_3_22_1_puts_experts_where_asked_and_computes_the_same: takes_berth("node-3.22.1", "v2");
    skulk_puts_experts_where_asked_and_computes_the_same: takes_berth("skulk", "v2");
    sdist_with_dl_puts_experts_where_asked_and_computes_the_same: takes_berth("sdist-dl", "v2");
    sdist_without_dl_puts_experts_where_asked_and_computes_the_same: takes_berth("sdist-nodl", "v2");
    ggml_0_26_puts_experts_where_asked_and_computes_the_same: takes_berth("sys2-0.26", "v3");
    skulk_server_answers_the_same_over_http: server_answers_the_same("skulk");
    sdist_server_answers_the_same_over_http: server_answers_the_same("sdist-dl");
    node_3_13_0_is_too_old_says_so_and_goes_on: refuses_berth("node-3.13.0", "found ggml 0.0.1; supported is 0.9.0 and newer");
    a_static_host_says_that_it_has_no_ggml_and_goes_on: static_refuses_berth("sdist-static", "no ggml in this process");
}

fn takes_berth(id: &str, layout: &str) {
    let Some((host, harness, model)) = prepare(id) else { return };
    assert_eq!(host.api, Expect::Accepted);
    let stock = Greedy::run(harness, &host, &model, None, None);
    assert!(!stock.output.stderr.contains("berth: "), "{id}: Berth speaks without being loaded");
    assert_eq!(stock.splits.iter().max(), Some(&1), "{id}: stock needs one split:\n{}", stock.output.stderr);

    let scratch = Scratch::new();
    let idle = Greedy::run(harness, &host, &model, Some(&scratch), None);
    let ours = ["BERTH CPU_MMAP", "CUDA_Host CUDA_Host", "ARENA ARENA"].map(String::from);
    assert_eq!(idle.devices, [stock.devices.as_slice(), &ours].concat(), "{id}: our devices come after the host's own");
    assert_eq!((&idle.tokens, &idle.logits, &idle.splits), (&stock.tokens, &stock.logits, &stock.splits), "{id}: no rule, no effect");
    let report = scratch.report();
    assert!(report.buffers.is_empty(), "{id}: no rule names us, but there are {:?}", report.buffers);
    assert!(!idle.output.stderr.contains("berth: "), "{id}: no rule names us, but:\n{}", idle.output.stderr);
    let found: Vec<_> = report.hosts.iter().map(|h| (h.ggml_version.as_str(), h.layout.as_str())).collect();
    assert_eq!(found, [(host.ggml_version, layout)], "{id}: version and layout");

    let experts = experts(&model);
    for ty in TYPES {
        let what = format!("{id} {ty}");
        let scratch = Scratch::new();
        let run = Greedy::run(harness, &host, &model, Some(&scratch), Some(&format!("{EXPERTS}={ty}")));
        assert_eq!((&run.tokens, &run.logits), (&stock.tokens, &stock.logits), "{what}: tokens and logits, and those without Berth");
        assert_eq!(run.splits, stock.splits, "{what}: splits, and those without Berth");
        assert_placed(&what, ty, true, &experts, &scratch.report(), &run.output.stderr);
    }
}

fn refuses_berth(id: &str, why: &str) {
    let Some((host, harness, model)) = prepare(id) else { return };
    assert_eq!(host.api, Expect::Refused);
    let stock = Greedy::run(harness, &host, &model, None, None);
    let scratch = Scratch::new();
    let refused = Greedy::run(harness, &host, &model, Some(&scratch), None);
    assert_eq!(refused.output.stdout, stock.output.stdout, "{id}: devices, tokens and logits with a Berth that was refused, and without");
    assert_one_refusal(id, why, &refused.output.stderr);
}

/// A host whose executables hold ggml inside and export nothing. It has no libllama to drive, so its RPC server is asked for its usage text,
/// which it prints after it has loaded the backends.
fn static_refuses_berth(id: &str, why: &str) {
    let Some(host) = hosts::require(id) else { return };
    assert_eq!(host.api, Expect::Refused);
    let run = |plugin: Option<PathBuf>| {
        let mut command = host.command("ggml-rpc-server");
        command.arg("--help").envs(plugin.map(|path| ("GGML_BACKEND_PATH", path)));
        run::run(command, LIMIT).and_then(|o| o.checked(id)).unwrap_or_else(|e| panic!("{e:#}"))
    };
    let (stock, refused) = (run(None), run(Some(berth())));
    assert!(stock.stderr.contains("--device"), "{id}: this is the usage text:\n{}", stock.stderr);
    assert_eq!(refused.stdout, stock.stdout);
    assert_one_refusal(id, why, &refused.stderr);
    assert!(refused.stderr.ends_with(&stock.stderr), "{id}: the rest is as without Berth");
}

fn assert_one_refusal(id: &str, why: &str, stderr: &str) {
    let said: Vec<&str> = stderr.lines().filter(|line| line.contains("berth: ")).collect();
    assert!(matches!(said.as_slice(), [line] if line.contains("not loaded: ") && line.contains(why)), "{id}: {said:#?}");
}

fn server_answers_the_same(id: &str) {
    let Some((host, _, model)) = prepare(id) else { return };
    let ask = |options: Options| {
        let server = Server::start(&host, &model, &options).unwrap_or_else(|e| panic!("{e:#}"));
        let answer = server.complete(PROMPT, TOKENS as u32).unwrap_or_else(|e| panic!("{e:#}"));
        (answer, server.stop().unwrap_or_else(|e| panic!("{e:#}")))
    };
    // The lines about buffers that are what was asked are INFO, which the tools show from 4 on.
    let options = || Options { args: vec!["-lv".into(), "4".into()], ..Options::default() };
    let (stock, log) = ask(options());
    assert_eq!(stock.tokens.len(), TOKENS);
    assert!(stock.text.contains("Paris"), "{id}: {:?}", stock.text);
    let experts = experts(&model);
    for ty in TYPES {
        let what = format!("llama-server of {id}, {ty}");
        let scratch = Scratch::new();
        let mut options = options().with_berth(&berth(), &format!("{EXPERTS}={ty}"));
        options.env = placement_only(&scratch);
        let (answer, with) = ask(options);
        assert_eq!((&answer.text, &answer.tokens), (&stock.text, &stock.tokens), "{what}");
        assert_eq!(splits(&with).iter().max(), splits(&log).iter().max(), "{what}: splits");
        assert_placed(&what, ty, true, &experts, &scratch.report(), &with);
    }
}

/// Host, harness and model; `None` after a skip.
fn prepare(id: &str) -> Option<(Host, &'static Path, PathBuf)> {
    let host = hosts::require(id)?;
    let harness = harness()?;
    Some((host, harness, skip::available("the language model", models::smollm_moe())?))
}

/// A run of the harness.
struct Greedy {
    devices: Vec<String>,
    tokens: String,
    logits: String,
    splits: Vec<u32>,
    output: Output,
}

impl Greedy {
    /// Runs the harness on a host's libraries; with Berth if there is a place for its files, and then, if there is a rule, for placement only.
    fn run(harness: &Path, host: &Host, model: &Path, berth_in: Option<&Scratch>, rule: Option<&str>) -> Greedy {
        let mut command = Command::new(harness);
        run::clean_env(&mut command);
        command.arg(host.lib("llama").unwrap_or_else(|e| panic!("{e:#}"))).arg(&host.lib_dir).arg(model);
        command.args([PROMPT, &TOKENS.to_string()]).args(rule).env("OMP_WAIT_POLICY", "passive");
        if let Some(scratch) = berth_in {
            // Without a rule nothing may change, whatever Berth could compute.
            let environment = if rule.is_some() { placement_only(scratch) } else { scratch.environment() };
            command.env("GGML_BACKEND_PATH", berth()).envs(environment);
        }
        let output =
            run::run(command, LIMIT).and_then(|o| o.checked(&format!("greedy on {}", host.id))).unwrap_or_else(|e| panic!("{e:#}"));
        let lines = |prefix: &str| output.stdout.lines().filter_map(|l| l.strip_prefix(prefix)).map(str::to_owned).collect::<Vec<_>>();
        let (tokens, logits) = (lines("tokens ").concat(), lines("logits ").concat());
        assert!(tokens.split(' ').count() == TOKENS && logits.len() == 16, "{}: {}", host.id, output.stdout);
        assert!(
            tokens.split(' ').collect::<BTreeSet<_>>().len() > TOKENS / 2,
            "{}: a text that repeats itself says little: {tokens}",
            host.id
        );
        Greedy { devices: lines("device "), tokens, logits, splits: splits(&output.stderr), output }
    }
}
