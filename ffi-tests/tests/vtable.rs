//! Every slot of ggml's tables that Berth fills, with random bytes through the real ggml, in both layouts of the tables.
//!
//! `c/vtable_peer.c` does the work: each test here runs one part of it on a host from before and from after the 2-D copies. The seed is new
//! at every run and printed with a failure.

#[path = "support/ggml.rs"]
mod ggml;
#[path = "support/peer.rs"]
mod peer;
#[path = "support/scratch.rs"]
mod scratch;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use ffi_tests::hosts::{self, Host};
use ffi_tests::report::Report;
use peer::Compile;
use scratch::Scratch;

/// Hosts whose tables lack the 2-D copies, and hosts whose tables have them.
const HOSTS: [(&str, bool); 4] = [("node-3.14.5", false), ("node-3.18.1", false), ("node-3.20.0", true), ("sdist-dl", true)];

#[test]
fn types_devices_and_backends_say_what_they_are() {
    on_every_host("types", &[]);
}

#[test]
fn set_get_memset_and_clear_reach_exactly_their_bytes() {
    on_every_host("bytes", &[]);
}

#[test]
fn tensors_are_copied_between_every_pair_of_types() {
    on_every_host("copies", &[]);
}

#[test]
fn what_lies_outside_is_refused_and_changes_nothing() {
    on_every_host("limits", &[]);
}

#[test]
fn a_mapping_of_the_host_is_read_in_place_and_never_written_if_read_only() {
    let scratch = Scratch::new();
    let file = scratch.path().join("model");
    let mut bytes = vec![0; 3_000_123];
    let mut state = seed() | 1;
    for b in &mut bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *b = (state >> 24) as u8;
    }
    std::fs::write(&file, &bytes).unwrap();
    on_every_host("borrowed", &[&file]);
}

#[test]
fn ten_thousand_random_steps_equal_a_shadow() {
    on_every_host("random", &[]);
}

#[test]
fn page_locked_memory_is_like_any_other() {
    let Some(host) = hosts::require("sdist-dl") else { return };
    let scratch = Scratch::new();
    let program = compile(&host, true, scratch.path());
    // A driver without a GPU: its memory is ordinary, Berth's way through it is not.
    let options = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"];
    let driver = scratch.dir("driver");
    Compile::with("cc", &options).arg(peer::source("fake_cuda.c")).to(driver.join("libcuda.so.1"));
    for part in ["bytes", "copies", "random"] {
        let mut command = peer::plain(&program);
        command.env("LD_LIBRARY_PATH", &driver);
        let report = run_part(command, &scratch, part, &[]);
        let asked = || report.buffers.iter().filter(|b| b.asked == "CUDA_Host");
        assert!(asked().count() > 0 && asked().all(|b| b.got == "pinned" && b.pinned_bytes == b.bytes), "{part}: {:?}", report.buffers);
    }
}

#[test]
fn every_slot_is_clean_under_valgrind() {
    let Some(host) = hosts::require("node-3.20.0") else { return };
    let scratch = Scratch::new();
    let program = compile(&host, true, scratch.path());
    for part in ["types", "bytes", "copies", "limits"] {
        let Some(command) = peer::valgrind(&program) else { return };
        run_part(command, &scratch, part, &[]);
    }
}

fn on_every_host(part: &str, args: &[&Path]) {
    for (id, two_d) in HOSTS {
        let Some(host) = hosts::require(id) else { continue };
        let scratch = Scratch::new();
        let program = compile(&host, two_d, scratch.path());
        let report = run_part(peer::plain(&program), &scratch, part, args);
        eprintln!("{id}: {part}: {} buffers", report.buffers.len());
    }
}

/// Runs one part of the peer. Every buffer it made must be in the report as freed, and the arena's directory empty.
fn run_part(mut command: Command, scratch: &Scratch, part: &str, args: &[&Path]) -> Report {
    let (arena, report) = (scratch.dir("arena"), scratch.path().join("report.json"));
    command.arg(ffi_tests::berth_lib().unwrap()).arg(seed().to_string()).arg(part).args(args);
    command.env("BERTH_ARENA_DIR", &arena).env("BERTH_REPORT", &report);
    let output = peer::succeeds(command);
    assert!(output.stdout.starts_with("ok: "), "{}", output.stdout);
    assert_eq!(std::fs::read_dir(&arena).unwrap().count(), 0, "files are left in the arena's directory");
    let report = Report::read(&report).unwrap();
    assert!(report.buffers.iter().all(|b| !b.live), "{part}: a buffer was freed and is reported as live");
    report
}

fn compile(host: &Host, two_d: bool, dir: &Path) -> PathBuf {
    let compile = Compile::c("cc").arg(peer::source("vtable_peer.c"));
    let compile = if two_d { compile.arg("-DPEER_2D") } else { compile };
    ggml::against(host, &["ggml-base"], compile).to(dir.join("vtable_peer"))
}

fn seed() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |t| t.as_nanos() as u64)
}
