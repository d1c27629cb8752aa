//! A rule that is wider than it was meant to be, in a stock host: norms and routers that went to a type of Berth are warned of, once per type,
//! in the log and in the report; experts are not.
//!
//! What a plug-in sees of a load are the tensors that the host puts into buffers of Berth, mapped ones included: the names and kinds are those of
//! the tensors themselves, not guesses from the rules, which it never sees.

#[expect(dead_code, reason = "shared with tests that use more of it")]
mod common;
#[expect(dead_code, reason = "shared with tests that use more of it")]
#[path = "support/peer.rs"]
mod peer;

use std::path::{Path, PathBuf};
use std::time::Duration;

use ffi_tests::gguf::Gguf;
use ffi_tests::hosts::{self, Host};
use ffi_tests::models::{self, Spec};
use ffi_tests::report::Report;
use ffi_tests::run::{self, Output};
use peer::Compile;

/// What the model has of them.
fn norms_and_routers(model: &Path) -> (usize, u64) {
    let file = Gguf::open(model).unwrap_or_else(|e| panic!("{e:#}"));
    let small = file.tensors().iter().filter(|t| t.name.contains("norm") || t.name.contains("ffn_gate_inp."));
    small.fold((0, 0), |(count, bytes), t| (count + 1, bytes + t.bytes))
}

/// `c/greedy.c` over the host's libraries: it logs at once, where the stock programs log through a thread and may lose lines.
fn run_host(host: &Host, program: &Path, model: &Path, rules: &str) -> (Output, Report) {
    let scratch = common::Scratch::new();
    let mut command = peer::plain(program);
    command.env("LD_LIBRARY_PATH", &host.lib_dir).env("GGML_BACKEND_PATH", common::berth()).envs(scratch.environment());
    command.arg(host.lib("llama").unwrap()).arg(&host.lib_dir).arg(model).args(["Once upon a time", "2"]).args(rules.split(','));
    let output = run::run(command, Duration::from_secs(120)).and_then(|o| o.checked(rules)).unwrap_or_else(|e| panic!("{e:#}"));
    let report = scratch.report();
    (output, report)
}

fn on_host(id: &str) {
    let Some(host) = hosts::require(id) else { return };
    let model: PathBuf = models::random(&Spec::default()).unwrap_or_else(|e| panic!("{e:#}"));
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let options = ["-std=c11", "-D_GNU_SOURCE", "-O1"];
    let program = Compile::with("cc", &options).arg(peer::source("greedy.c")).args(["-ldl", "-lm"]).to(dir.path().join("greedy"));
    let (count, bytes) = norms_and_routers(&model);
    for place in common::TYPES {
        let (output, report) = run_host(&host, &program, &model, &format!(".*={place}"));
        let lines: Vec<&str> = output.stderr.lines().filter(|l| l.contains("norm and router tensors were placed here")).collect();
        assert_eq!(lines.len(), 1, "{id} {place}: once per type:\n{}", output.stderr);
        assert!(
            lines[0].contains(&format!("berth: {place}: {count} norm and router tensors")) && lines[0].contains("norm.weight"),
            "{}",
            lines[0]
        );
        let [warning] = &report.warnings[..] else { panic!("{id} {place}: {:?}", report.warnings) };
        assert_eq!((warning.code.as_str(), warning.asked.as_str()), ("small_tensors_placed", place), "{id}");
        assert_eq!((warning.tensors, warning.bytes, warning.first.len()), (count, bytes, 3), "{id} {place}");
        assert!(lines[0].contains(&warning.message), "{id} {place}: {} and {}", lines[0], warning.message);

        let (output, report) = run_host(&host, &program, &model, &format!("exps={place}"));
        assert!(!output.stderr.contains("norm and router"), "{id} {place}: {}", output.stderr);
        assert!(report.warnings.is_empty() && !report.buffers.is_empty(), "{id} {place}: {:?}", report.warnings);
        for buffer in report.buffers.iter().filter(|b| b.bytes > 0) {
            assert!(buffer.asked == place && !buffer.got.is_empty() && !buffer.tensors.is_empty(), "{id} {place}: {buffer:?}");
        }
    }
    let (output, report) = run_host(&host, &program, &model, r"attn_norm=ARENA,ffn_gate_inp=CPU_MMAP,exps=CUDA_Host");
    let asked: Vec<&str> = report.warnings.iter().map(|w| w.asked.as_str()).collect();
    assert!(asked.len() == 2 && asked.contains(&"ARENA") && asked.contains(&"CPU_MMAP"), "{id}: {asked:?}");
    assert_eq!(output.stderr.matches("norm and router tensors were placed here").count(), 2, "{id}: {}", output.stderr);
}

#[test]
fn a_host_with_plug_ins_of_its_own_is_warned_of_wide_rules() {
    on_host("sdist-dl");
}

#[test]
fn an_older_host_is_warned_of_wide_rules() {
    on_host("node-3.18.1");
}
