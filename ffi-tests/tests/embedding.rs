//! docs/embedding.md: llama.cpp's types and its parser and create_tensor calling Berth, compiled against a real libllama, which then loads the model
//! with the same rules and puts every tensor where they said.

#[expect(dead_code, reason = "shared with tests that use more of it")]
mod common;
#[expect(dead_code, reason = "shared with tests that use more of it")]
#[path = "support/peer.rs"]
mod peer;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use common::{Scratch, berth};
use ffi_tests::hosts::{self, Host};
use ffi_tests::models::{self, Spec};
use peer::Compile;

fn joined(option: &str, path: &Path) -> OsString {
    let mut all = OsString::from(option);
    all.push(path);
    all
}

fn repository(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name)
}

/// The program on this host's libraries, and the directory that holds Berth under the names it is linked and loaded by.
fn compile(host: &Host, dir: &Path) -> PathBuf {
    for name in ["libberth.so", "libberth.so.0"] {
        symlink(berth(), dir.join(name)).unwrap();
    }
    let headers = hosts::headers_of(host.headers.expect("a host with headers")).unwrap_or_else(|e| panic!("{e:#}"));
    let libraries = ["llama", "ggml", "ggml-base"].map(|name| host.lib(name).unwrap());
    Compile::with("g++", &["-std=c++17", "-g", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror"])
        .args([joined("-isystem", &headers.ggml_include), joined("-isystem", &headers.llama_include), joined("-I", &repository("include"))])
        .arg(peer::source("create_tensor.cpp"))
        .args([joined("-L", dir), "-lberth".into(), joined("-Wl,-rpath,", dir)])
        .args(libraries)
        .arg(joined("-Wl,-rpath,", &host.lib_dir))
        .to(dir.join("create_tensor"))
}

#[test]
fn a_loader_that_calls_decide_puts_every_tensor_where_llama_cpp_does() {
    let Some(host) = hosts::require("sdist-dl") else { return };
    if ffi_tests::tools::on_path("g++").is_none() {
        ffi_tests::skip::skipped("create_tensor.cpp", "g++ is missing: apt-get install g++");
        return;
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let program = compile(&host, dir.path());
    let model = models::random(&Spec::default()).unwrap_or_else(|e| panic!("{e:#}"));
    let scratch = Scratch::new();
    let run = |rules: &str| {
        let mut command = peer::plain(&program);
        command.envs(scratch.environment()).env("BERTH_FUSE", "0").arg(&host.lib_dir).arg(&model).arg(rules);
        command
    };
    let output = peer::succeeds(run("ffn_down_exps=ARENA,exps=CPU_MMAP,attn_q=CUDA_Host,attn_k=CPU"));
    let mut decided: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut tensors = 0;
    for line in output.stdout.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [name, place, memory, rule] = words[..] else { panic!("{line}") };
        let (expected, number) = match name {
            n if n.contains("ffn_down_exps") => ("ARENA arena", 0),
            n if n.contains("exps") => ("CPU_MMAP mapped", 1),
            n if n.contains("attn_q") => ("CUDA_Host pinned", 2),
            n if n.contains("attn_k") => ("CPU mapped", 3),
            _ => ("CPU mapped", -1),
        };
        assert_eq!((format!("{place} {memory}").as_str(), rule), (expected, number.to_string().as_str()), "{line}");
        decided.entry(place.to_owned()).or_default().push(name.to_owned());
        tensors += 1;
    }
    assert!(tensors > 20, "{tensors}");
    // What llama.cpp then did with the same list.
    let report = scratch.report();
    for place in ["ARENA", "CPU_MMAP", "CUDA_Host"] {
        let there = report.buffers.iter().filter(|b| b.asked == place).flat_map(|b| &b.tensors);
        let mut names: Vec<String> = there.map(|t| t.name.clone()).collect();
        names.sort();
        let mut expected = decided[place].clone();
        expected.sort();
        assert_eq!(names, expected, "{place}");
    }

    let refused = run("exps=ARENAA").output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("ARENA"), "{refused:?}");
}

/// The page shows what is compiled here.
#[test]
fn the_page_shows_the_functions_that_are_compiled() {
    let (page, source) =
        (fs::read_to_string(repository("docs/embedding.md")).unwrap(), fs::read_to_string(peer::source("create_tensor.cpp")).unwrap());
    for mark in ["// [parse_overrides]\n", "// [select_buft]\n"] {
        let code = source.split(mark).nth(1).expect("two marks");
        assert!(code.lines().count() > 10 && page.contains(code.trim()), "docs/embedding.md lacks what is between {mark}");
    }
}
