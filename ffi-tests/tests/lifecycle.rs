//! Berth's life in a process: loaded ten times, unloaded and loaded again, outlived by its buffers, used by many threads, beside a second ggml.
//! `BERTH_TEST_CYCLES` says how often it is unloaded and loaded again in one process (200), which must not grow by it from 100 on.
//!
//! `c/lifecycle_peer.c` does it in C, plainly and under valgrind; `lifecycle.py` in Python, where every library is `RTLD_LOCAL`.

#[path = "support/ggml.rs"]
mod ggml;
#[path = "support/peer.rs"]
mod peer;
#[path = "support/scratch.rs"]
mod scratch;

use std::path::{Path, PathBuf};
use std::process::Command;

use ffi_tests::hosts::{self, Host};
use ffi_tests::{berth_lib, figures, tools};
use peer::Compile;
use scratch::Scratch;

/// A host from before the 2-D copies, which lists a registry again at every load, and one from after.
const HOSTS: [&str; 2] = ["node-3.14.5", "sdist-dl"];

#[test]
fn ten_loads_and_ten_unloads_give_the_same_registry() {
    in_c("reload");
}

#[test]
fn many_loads_and_unloads_leave_no_memory_file_thread_or_mapping() {
    let cycles = std::env::var("BERTH_TEST_CYCLES").map_or(200, |n| n.parse::<u32>().expect("BERTH_TEST_CYCLES is a number"));
    for id in HOSTS {
        let Some(host) = hosts::require(id) else { continue };
        let scratch = Scratch::new();
        let mut command = peer::plain(build(&host, &scratch));
        command.arg(berth_lib().unwrap()).args([&std::process::id().to_string(), "reload", &cycles.to_string()]);
        let output = run(command, &scratch);
        let figure = output.lines().find_map(|l| l.strip_prefix(&format!("{cycles} cycles: "))).unwrap_or_else(|| panic!("{id}: {output}"));
        figures::tell(&format!("{cycles} cycles in {id}, ggml {}", host.ggml_version), figure);
    }
}

#[test]
fn buffers_outlive_an_unload() {
    in_c("outlive");
}

#[test]
fn a_process_ends_with_buffers_alive() {
    in_c("exit");
}

#[test]
fn a_process_ends_at_once_with_buffers_alive() {
    in_c("quick");
}

#[test]
fn a_forked_child_frees_what_it_inherited_and_the_parent_keeps_it() {
    in_c("fork");
}

#[test]
fn eight_threads_load_allocate_and_free_at_once() {
    in_c("threads");
}

#[test]
fn python_loads_unloads_and_outlives_it_with_nothing_in_the_global_scope() {
    for id in ["node-3.14.5", "node-3.18.1", "node-3.20.0", "node-3.22.1", "sdist-dl", "sdist-nodl"] {
        let Some(host) = hosts::require(id) else { continue };
        in_python("one", &[&host]);
    }
}

#[test]
fn two_ggml_in_one_process_get_a_registry_each() {
    // Their libraries have different names inside, so that the dynamic linker keeps them apart, and different layouts of the tables.
    let (Some(old), Some(new)) = (hosts::require("node-3.14.5"), hosts::require("node-3.22.1")) else { return };
    in_python("two", &[&old, &new]);
    in_python("two", &[&new, &old]);
}

/// One part of the C peer on every host, plainly and under valgrind. No file may be left in the arena's directory.
fn in_c(part: &str) {
    for id in HOSTS {
        let Some(host) = hosts::require(id) else { continue };
        let scratch = Scratch::new();
        let program = build(&host, &scratch);
        for mut command in [Some(peer::plain(&program)), peer::valgrind(&program)].into_iter().flatten() {
            command.arg(berth_lib().unwrap()).arg(std::process::id().to_string()).arg(part);
            let output = run(command, &scratch);
            assert!(output.lines().any(|l| l.starts_with("ok: ")), "{id}: {output}");
        }
    }
}

fn build(host: &Host, scratch: &Scratch) -> PathBuf {
    let compile = Compile::c("cc").arg("-pthread").arg(peer::source("lifecycle_peer.c"));
    ggml::against(host, &["ggml", "ggml-base"], compile).to(scratch.path().join("lifecycle_peer"))
}

fn in_python(part: &str, ggml: &[&Host]) {
    let Some(python) = tools::on_path("python3") else { return ffi_tests::skip::skipped("Berth in Python", "python3 is missing") };
    let mut command = peer::plain(python);
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/lifecycle.py")).arg(berth_lib().unwrap()).arg(part);
    let library = |host: &Host, name| -> PathBuf { host.lib(name).unwrap_or_else(|e| panic!("{e:#}")) };
    for host in ggml {
        command.arg(library(host, "ggml-base")).arg(library(host, "ggml"));
    }
    assert_eq!(run(command, &Scratch::new()), "ok\n");
}

fn run(mut command: Command, scratch: &Scratch) -> String {
    let arena = scratch.dir("arena");
    command.env("BERTH_ARENA_DIR", &arena);
    let output = peer::succeeds(command);
    assert_eq!(std::fs::read_dir(&arena).unwrap().count(), 0, "files are left in the arena's directory");
    output.stdout
}
