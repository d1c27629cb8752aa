//! The threads of a process in which Berth computes the experts: as many as llama.cpp alone has where Berth runs on its OpenMP team, and those of
//! Berth's own pool where there is no such team. Two contexts on two threads of a program each get their own answer; and a run in which the host
//! has all experts computed, as it may to warm up.

#[path = "support/device.rs"]
mod device;
#[path = "support/greedy.rs"]
mod greedy;
#[path = "support/scratch.rs"]
mod scratch;

use std::process::Command;
use std::time::Duration;

use device::{RULE, berth, blocks, floats, with_berth};
use ffi_tests::hosts::{self, Host};
use ffi_tests::run::{self, Options};
use greedy::harness;
use scratch::Scratch;

/// Built with OpenMP, as llama.cpp is by default.
const OPENMP: &str = "sdist-dl";
/// Built without.
const NO_OPENMP: &str = "node-3.22.1";
const STEPS: &str = "12";

/// What the harness printed: for each context its tokens, and the most threads that the process had after one of its steps.
#[derive(Debug, PartialEq)]
struct Run {
    tokens: Vec<String>,
    threads: Vec<usize>,
}

/// `contexts` on as many threads of the program, each computing on `threads`; with Berth loaded, and computing the experts, if told so.
fn generate(host: &Host, contexts: usize, threads: usize, with: Option<(&Scratch, bool)>) -> Option<Run> {
    generate_with(host, &["-c", &contexts.to_string(), "-t", &threads.to_string()], with)
}

fn generate_with(host: &Host, options: &[&str], with: Option<(&Scratch, bool)>) -> Option<Run> {
    let mut command = Command::new(harness()?);
    run::clean_env(&mut command);
    command.args(options);
    command
        .arg(host.lib("llama").unwrap_or_else(|e| panic!("{e:#}")))
        .arg(&host.lib_dir)
        .arg(floats())
        .args(["@65,32,115,104,105,112", STEPS]);
    command.env("OMP_WAIT_POLICY", "passive");
    if let Some((scratch, placed)) = with {
        command.env("GGML_BACKEND_PATH", berth()).envs(with_berth(Options::default(), scratch).env).args(placed.then_some(RULE));
    }
    let output = run::run(command, Duration::from_secs(300)).and_then(|o| o.checked(&host.id)).unwrap_or_else(|e| panic!("{e:#}"));
    let lines = |prefix: &str| output.stdout.lines().filter_map(|l| l.strip_prefix(prefix)).map(str::to_owned).collect::<Vec<_>>();
    let threads = lines("threads ").iter().map(|n| n.parse().expect("a number")).collect();
    Some(Run { tokens: lines("tokens "), threads })
}

/// Threads of the process without Berth, with Berth loaded and not asked, and with Berth computing; the tokens are the same.
fn counts(host: &Host, threads: usize) -> Option<[usize; 3]> {
    let scratch = Scratch::new();
    let stock = generate(host, 1, threads, None)?;
    let idle = generate(host, 1, threads, Some((&scratch, false)))?;
    assert_eq!(blocks(&scratch).fused, 0, "no rule names us");
    let busy = generate(host, 1, threads, Some((&scratch, true)))?;
    let blocks = blocks(&scratch);
    assert!(blocks.fused > 0 && blocks.node_by_node == 0, "{blocks:?}");
    assert!(stock.tokens == idle.tokens && stock.tokens == busy.tokens, "{}: {stock:?} {idle:?} {busy:?}", host.id);
    Some([stock.threads[0], idle.threads[0], busy.threads[0]])
}

#[test]
fn on_the_hosts_team_there_is_no_thread_more() {
    let Some(host) = hosts::require(OPENMP) else { return };
    for threads in 1..=4 {
        let Some([stock, idle, busy]) = counts(&host, threads) else { return };
        assert_eq!(stock, threads, "the host's own");
        assert_eq!([idle, busy], [stock; 2], "-t {threads}: Berth loaded, and Berth computing");
    }
}

/// Such a host makes threads for each graph and ends them with it. Berth's sleep between graphs: one less than `-t`, since the caller is one.
#[test]
fn without_a_team_there_are_the_threads_of_berths_pool() {
    let Some(host) = hosts::require(NO_OPENMP) else { return };
    for threads in 1..=2 {
        let Some([stock, idle, busy]) = counts(&host, threads) else { return };
        assert_eq!([stock, idle], [1; 2], "-t {threads}: none of the host's is left, and none of Berth's was made");
        assert_eq!(busy, threads, "-t {threads}");
    }
}

#[test]
fn two_contexts_on_two_threads_get_the_same_tokens_as_one() {
    for id in [OPENMP, NO_OPENMP] {
        let Some(host) = hosts::require(id) else { return };
        let scratch = Scratch::new();
        let (Some(one), Some(two)) = (generate(&host, 1, 2, None), generate(&host, 2, 2, Some((&scratch, true)))) else { return };
        assert_eq!(two.tokens, [one.tokens[0].as_str(); 2], "{id}");
        assert!(blocks(&scratch).fused > 0, "{id}");
    }
}

#[test]
fn a_run_that_computes_all_experts_runs_node_by_node_and_changes_nothing_after() {
    let Some(host) = hosts::require(OPENMP) else { return };
    let scratch = Scratch::new();
    let options = ["-t", "2", "-w", "1"];
    let (stock, with) = (generate_with(&host, &options, None), generate_with(&host, &options, Some((&scratch, true))));
    let (Some(stock), Some(with)) = (stock, with) else { return };
    assert_eq!(stock.tokens, with.tokens);
    let blocks = blocks(&scratch);
    let [reason] = &blocks.reasons[..] else { panic!("{blocks:?}") };
    assert!(blocks.fused > 0 && reason.reason == "some_choices", "{blocks:?}");
}
