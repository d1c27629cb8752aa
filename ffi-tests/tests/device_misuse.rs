//! Graphs that no llama.cpp would send: `c/device_peer.c` builds them with the real ggml and hands them to the device itself. What cannot be
//! computed is an error and writes nothing, and the next graph is computed as ever.

#[path = "support/ggml.rs"]
mod ggml;
#[path = "support/peer.rs"]
mod peer;
#[path = "support/scratch.rs"]
mod scratch;

use std::path::{Path, PathBuf};
use std::process::Command;

use berth::moe::isa::Tier;
use ffi_tests::hosts::Host;
use ffi_tests::{berth_lib, figures, hosts, skip};
use peer::Compile;
use scratch::Scratch;

fn build(host: &Host, scratch: &Scratch) -> PathBuf {
    let compile = Compile::c("cc").arg("-pthread").arg(peer::source("device_peer.c"));
    ggml::against(host, &["ggml-base", "ggml"], compile).arg("-lm").to(scratch.dir("bin").join("device_peer"))
}

fn host() -> Host {
    hosts::get("sdist-dl").unwrap_or_else(|e| panic!("{e:#}"))
}

fn check(mut command: Command, cpu: &Path, most_threads: &str, tier: Tier) -> usize {
    command.arg(cpu).arg(berth_lib().unwrap()).arg(most_threads).env("BERTH_ISA", tier.name());
    let said = peer::succeeds(command).stdout;
    let last = said.lines().last().unwrap_or_default();
    let checks = last.strip_prefix("ok, ").and_then(|l| l.strip_suffix(" checks")).and_then(|n| n.parse::<usize>().ok());
    checks.filter(|n| *n > 200).unwrap_or_else(|| panic!("{said}"))
}

#[test]
fn what_cannot_be_computed_is_an_error_and_nothing_else() {
    let scratch = Scratch::new();
    let host = host();
    let (program, cpu) = (build(&host, &scratch), host.lib("ggml-cpu").unwrap());
    for tier in Tier::ALL {
        if tier.in_this_cpu() {
            check(peer::plain(&program), &cpu, "100000", tier);
        } else {
            skip::skipped(tier.name(), "not in this CPU");
        }
    }
}

#[test]
fn nothing_is_read_or_written_beyond_its_memory() {
    let scratch = Scratch::new();
    // Under valgrind this CPU backend, made for the very processor, refuses to load; so the threads are those of Berth's pool.
    if let Some(command) = peer::valgrind(&build(&host(), &scratch)) {
        let checks = check(command, Path::new("-"), "3", Tier::Avx2);
        figures::tell("graphs in c/device_peer.c, avx2 kernels, under valgrind", &format!("{checks} checks"));
    }
}
