//! The loader from C on files of every form: odd alignments, three parts, more than 1 GiB, and files that change while they are open. Every
//! byte of every tensor is compared with the file's, in every place, mapped and not.

mod support {
    pub(crate) mod ggml;
    pub(crate) mod loading;
    pub(crate) mod peer;
    pub(crate) mod scratch;
}
// `support::ggml` knows it by this path.
use support::peer;

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ffi_tests::gguf::{self, Type, Value, Writer};
use ffi_tests::hosts;
use ffi_tests::models::{self, Spec};
use support::loading::{Loaded, experts_are_in, load};
use support::peer::{Compile, plain, source, succeeds, valgrind};
use support::scratch::Scratch;

/// Places, and where their bytes lie with and without mmap if a driver pins.
const PLACES: [(&str, &str, &str); 3] =
    [("CPU_MMAP", "mapped", "pageable"), ("ARENA", "arena", "arena"), ("CUDA_Host", "pinned", "pinned")];

fn small() -> PathBuf {
    models::random(&Spec::default()).unwrap_or_else(|e| panic!("{e:#}"))
}

/// A driver without a GPU, in a directory to look for libraries in: every branch of page-locked memory is taken on any machine.
fn driver(scratch: &Scratch) -> String {
    let dir = scratch.dir("driver");
    let options = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"];
    Compile::with("cc", &options).arg(source("fake_cuda.c")).to(dir.join("libcuda.so.1"));
    dir.to_str().expect("a plain path").to_owned()
}

/// How many files have experts.
fn experts_per_file(parts: &[PathBuf], model: &Path) -> usize {
    let files = if parts.is_empty() { vec![model.to_owned()] } else { parts.to_vec() };
    let has = |file: &PathBuf| gguf::Gguf::open(file).unwrap().tensors().iter().any(|t| t.name.contains("_exps."));
    files.iter().filter(|file| has(file)).count()
}

/// The model in all three places, mapped and not; then with a driver that has no memory left.
fn in_all_places(scratch: &Scratch, model: &Path, parts: &[PathBuf], extra: &[&str]) -> Vec<Loaded> {
    let program = support::loading::peer(scratch, "loader_peer");
    let driver = driver(scratch);
    let env = [("LD_LIBRARY_PATH", driver.as_str())];
    let mut all = Vec::new();
    let mut run = |place: &str, mapped: bool, memory: &str, reason: &str, env: &[(&str, &str)]| {
        let rule = format!("exps={place}");
        let mut args = vec!["--rules", &rule];
        parts.iter().for_each(|p| args.extend(["--part", p.to_str().expect("a plain path")]));
        args.extend((!mapped).then_some("--no-mmap"));
        args.extend(extra);
        let loaded = load(&program, scratch, model, &args, env);
        experts_are_in(&loaded, place, memory, reason);
        // What is not as asked says so once per buffer; of bytes in the mapping there is one for each file.
        let said = loaded.stderr.matches(&format!("asked for {place}, got {memory} memory")).count();
        let files = if memory == "mapped" { experts_per_file(parts, model) } else { 1 };
        assert_eq!(said, if reason.starts_with("fallback") { files } else { 0 }, "{}", loaded.stderr);
        all.push(loaded);
    };
    for (place, with, without) in PLACES {
        run(place, true, with, "rule_host", &env);
        run(place, false, without, "rule_host", &env);
    }
    let full = [env[0], ("FAKE_CUDA_FAIL", "cuMemHostAlloc:2,cuMemHostRegister:2")];
    run("CUDA_Host", true, "mapped", "fallback_mapped", &full);
    run("CUDA_Host", false, "pageable", "fallback_pageable", &full);
    all
}

#[test]
fn plain_models_are_loaded_byte_for_byte() {
    in_all_places(&Scratch::new(), &small(), &[], &[]);
}

#[test]
fn split_models_are_loaded_byte_for_byte() {
    let scratch = Scratch::new();
    let parts = gguf::split::split(&small(), scratch.path(), 3).unwrap_or_else(|e| panic!("{e:#}"));
    in_all_places(&scratch, &parts[0], &parts, &[]);
}

/// With an alignment of 1 or 24 tensors start at odd addresses; stock refuses 24.
#[test]
fn models_of_any_alignment_are_loaded_byte_for_byte() {
    for alignment in [1, 8, 24, 64, 4096] {
        let scratch = Scratch::new();
        let model = scratch.path().join("aligned.gguf");
        gguf::split::realign(&small(), &model, alignment).unwrap_or_else(|e| panic!("{e:#}"));
        let offsets: Vec<u64> = gguf::Gguf::open(&model).unwrap().tensors().iter().map(|t| t.offset).collect();
        assert!(offsets.iter().all(|o| o % u64::from(alignment) == 0), "{alignment}");
        in_all_places(&scratch, &model, &[], &[]);
    }
}

/// More than 1 GiB of experts. The file is sparse: 8 bytes that say where they are at every 256 KiB, and zeros, which cost a disk nothing.
#[test]
fn a_model_of_a_gigabyte_is_loaded_byte_for_byte_and_cancelled_in_the_middle() {
    let scratch = Scratch::new();
    let model = scratch.path().join("large.gguf");
    let mut writer = Writer::new("qwen3moe");
    for (key, value) in [("block_count", 4), ("expert_count", 64), ("expert_used_count", 4)] {
        writer.set(&format!("qwen3moe.{key}"), Value::U32(value));
    }
    for layer in 0..4 {
        writer.tensor(&format!("blk.{layer}.attn_norm.weight"), Type::F32, &[1001]).unwrap();
        for name in ["gate", "up", "down"] {
            writer.tensor(&format!("blk.{layer}.ffn_{name}_exps.weight"), Type::Q8_0, &[1024, 1344, 64]).unwrap();
        }
    }
    writer.write_sparse(&model, 256 << 10).unwrap_or_else(|e| panic!("{e:#}"));
    assert!(fs::metadata(&model).unwrap().len() > 1 << 30);
    let all = in_all_places(&scratch, &model, &[], &[]);
    assert!(all.iter().all(|loaded| loaded.lines.len() == 16));

    let program = support::loading::peer(&scratch, "loader_peer");
    let cancelled = load(&program, &scratch, &model, &["--rules", "exps=CPU_MMAP", "--no-mmap", "--cancel"], &[]);
    experts_are_in(&cancelled, "CPU_MMAP", "pageable", "rule_host");
    let (done, total) = cancelled.cancelled.expect("a fill that was cancelled");
    assert!(total > 1 << 30 && done > 0 && done < total, "cancelled at {done} of {total} bytes");
}

/// Tensors that start beyond 1 GiB and beyond 4 GiB, every byte of them another one than 1 GiB or 4 GiB before. The rest of the file is a hole.
#[test]
fn tensors_that_start_beyond_4_gib_are_loaded_byte_for_byte() {
    let scratch = Scratch::new();
    let model = scratch.path().join("far.gguf");
    let mut writer = Writer::new("qwen3moe");
    writer.set("qwen3moe.block_count", Value::U32(2));
    for (layer, gib) in [(0, 1), (1, 3)] {
        writer.tensor(&format!("hole.{layer}"), Type::F32, &[1 << 20, 256 * gib]).unwrap();
        writer.tensor(&format!("blk.{layer}.ffn_up_exps.weight"), Type::Q8_0, &[64, 5, 3]).unwrap();
        writer.tensor(&format!("blk.{layer}.attn_q.weight"), Type::F32, &[7, 11]).unwrap();
    }
    writer.write_sparse(&model, 0).unwrap_or_else(|e| panic!("{e:#}"));
    let file = fs::File::options().write(true).open(&model).unwrap();
    let read = gguf::Gguf::open(&model).unwrap();
    let far: Vec<_> = read.tensors().iter().filter(|t| t.name.starts_with("blk.")).collect();
    for (number, tensor) in far.iter().enumerate() {
        let bytes: Vec<u8> = (0..tensor.bytes).map(|i| (i % 61) as u8 + 61 * number as u8 + 1).collect();
        file.write_all_at(&bytes, tensor.offset).unwrap();
    }
    assert!(far[..2].iter().all(|t| t.offset >> 30 == 1) && far[2..].iter().all(|t| t.offset >> 32 == 1));
    assert!(file.metadata().unwrap().blocks() * 512 < 1 << 20, "the file has holes");
    for loaded in in_all_places(&scratch, &model, &[], &["--only", "blk."]) {
        assert_eq!(loaded.lines.len(), 4);
    }
}

#[test]
fn files_that_cannot_be_mapped_are_read_at_the_end_of_every_chain() {
    let scratch = Scratch::new();
    let program = support::loading::peer(&scratch, "loader_peer");
    let options = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"];
    let preload = Compile::with("cc", &options).arg(source("no_mapping.c")).to(scratch.path().join("no_mapping.so"));
    let driver = driver(&scratch);
    let env = [
        ("LD_PRELOAD", preload.to_str().expect("a plain path")),
        ("LD_LIBRARY_PATH", driver.as_str()),
        ("FAKE_CUDA_FAIL", "cuMemHostAlloc:2,cuMemHostRegister:2"),
    ];
    let parts = gguf::split::split(&small(), scratch.path(), 3).unwrap_or_else(|e| panic!("{e:#}"));
    let parts: Vec<&str> = parts.iter().flat_map(|p| ["--part", p.to_str().expect("a plain path")]).collect();
    for (place, memory, reason) in
        [("CPU_MMAP", "pageable", "fallback_pageable"), ("CUDA_Host", "pageable", "fallback_pageable"), ("ARENA", "arena", "rule_host")]
    {
        let rule = format!("exps={place}");
        let loaded = load(&program, &scratch, Path::new(parts[1]), &[&parts[..], &["--rules", &rule]].concat(), &env);
        experts_are_in(&loaded, place, memory, reason);
        let others = loaded.lines.iter().filter(|l| !l.name.contains("_exps."));
        assert!(others.clone().count() > 0 && others.clone().all(|l| (&*l.memory, &*l.reason) == ("pageable", "fallback_pageable")));
        let said = |asked: &str| loaded.stderr.matches(&format!("asked for {asked}, got pageable memory")).count();
        assert_eq!((said("CPU"), said(place)), (1, usize::from(place != "ARENA")), "{}", loaded.stderr);
        assert!(loaded.stderr.contains("No such device"), "the reason: {}", loaded.stderr);
    }
    let mut strict = plain(&program);
    strict.args([parts[1], "--rules", "exps=CPU_MMAP"]).envs(env).env("BERTH_STRICT", "1");
    let refused = ffi_tests::run::run(strict, Duration::from_secs(60)).unwrap();
    assert_eq!(refused.status.and_then(|s| s.code()), Some(1), "{}", refused.stderr);
    assert!(refused.stdout.contains("ERROR berth_loader_alloc: 5 ") && refused.stdout.contains("BERTH_STRICT"), "{}", refused.stdout);
}

#[test]
fn a_file_that_changes_while_it_is_open_is_an_error_that_names_it() {
    let scratch = Scratch::new();
    let program = support::loading::peer(&scratch, "loader_peer");
    let parts = gguf::split::split(&small(), scratch.path(), 3).unwrap_or_else(|e| panic!("{e:#}"));
    let last = &parts[2];
    let original = fs::read(last).unwrap();
    for (how, said) in [("cut", "became shorter while it was open"), ("write", "was written to while it was open")] {
        let moments = [(&[][..], "alloc"), (&["--spoil-late"], "fill"), (&["--spoil-during"], "fill")];
        for (late, call) in moments {
            for mmap in [&[][..], &["--no-mmap"]] {
                fs::write(last, &original).unwrap();
                // Long ago, so that a write just now is another time even for a coarse clock.
                fs::File::options().write(true).open(last).unwrap().set_modified(std::time::UNIX_EPOCH + Duration::from_secs(1)).unwrap();
                let mut command = plain(&program);
                command.arg(&parts[0]).args(["--rules", "exps=ARENA", "--spoil", how]).args(late).args(mmap);
                command.args(parts.iter().flat_map(|p| [Path::new("--part"), p]));
                command.env("BERTH_ARENA_DIR", scratch.path().join("arena"));
                let output = ffi_tests::run::run(command, Duration::from_secs(60)).unwrap();
                assert_eq!(output.status.and_then(|s| s.code()), Some(1), "{how} {late:?} {mmap:?}: {}", output.stdout);
                let error = output.stdout.lines().find(|l| l.starts_with("ERROR ")).unwrap_or_default();
                assert!(error.starts_with(&format!("ERROR berth_loader_{call}: 12 ")), "{how} {late:?} {mmap:?}: {error}");
                assert!(error.contains(last.to_str().unwrap()) && error.contains(said), "{how} {late:?} {mmap:?}: {error}");
            }
        }
    }
}

#[test]
fn a_file_that_is_cut_in_the_middle_of_a_fill_is_the_same_error_as_before_and_after() {
    let scratch = Scratch::new();
    let program = support::loading::peer(&scratch, "loader_peer");
    let model = scratch.path().join("cut.gguf");
    let mut writer = Writer::new("qwen3moe");
    writer.tensor("blk.0.ffn_up_exps.weight", Type::F32, &[1 << 20, 64]).unwrap();
    for how in ["cut", "write"] {
        writer.write_sparse(&model, 0).unwrap_or_else(|e| panic!("{e:#}"));
        fs::File::options().write(true).open(&model).unwrap().set_modified(std::time::UNIX_EPOCH + Duration::from_secs(1)).unwrap();
        let mut command = plain(&program);
        command.arg(&model).args(["--no-mmap", "--spoil", how, "--spoil-during"]);
        let output = ffi_tests::run::run(command, Duration::from_secs(60)).unwrap();
        assert_eq!(output.status.and_then(|s| s.code()), Some(1), "{}", output.stdout);
        let said = if how == "cut" { "became shorter while it was open" } else { "was written to while it was open" };
        assert!(output.stdout.contains("ERROR berth_loader_fill: 12 ") && output.stdout.contains(said), "{}", output.stdout);
    }
}

#[test]
fn ggml_buffers_hold_their_tensors_those_without_bytes_too() {
    let Some(host) = hosts::require("sdist-dl") else { return };
    let scratch = Scratch::new();
    let library = ffi_tests::berth_lib().unwrap_or_else(|e| panic!("{e:#}"));
    std::os::unix::fs::symlink(&library, scratch.path().join("libberth.so.0")).unwrap();
    let compile = Compile::c("cc").arg("-I").arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../include"));
    let compile = compile.arg(source("loader_ggml_peer.c")).arg(scratch.path().join("libberth.so.0"));
    let compile = compile.arg(format!("-Wl,-rpath,{}", scratch.path().display()));
    let program = support::ggml::against(&host, &["ggml-base"], compile).to(scratch.path().join("loader_ggml_peer"));
    let model = scratch.path().join("empty.gguf");
    let mut writer = Writer::new("qwen3moe");
    // Alone in its place, between others, and behind the last byte of the file.
    writer.tensor("blk.0.ffn_up_exps.weight", Type::F32, &[32, 0, 2]).unwrap();
    writer.tensor("blk.0.attn_q.weight", Type::F32, &[32, 2]).unwrap();
    writer.tensor("blk.0.attn_k.weight", Type::F32, &[0]).unwrap();
    writer.tensor("blk.0.attn_v.weight", Type::F32, &[32, 3]).unwrap();
    writer.tensor("output.weight", Type::F32, &[32, 0]).unwrap();
    writer.write_sparse(&model, 8).unwrap_or_else(|e| panic!("{e:#}"));
    let driver = driver(&scratch);
    for rules in ["exps=ARENA,attn=CPU_MMAP,output=CUDA_Host", "exps=CPU_MMAP,attn=ARENA,output=ARENA", "exps=CUDA_Host,output=CPU_MMAP"] {
        for mmap in ["1", "0"] {
            let mut command = plain(&program);
            command.arg(&model).args([rules, mmap]).env("BERTH_ARENA_DIR", scratch.path().join("arena")).env("LD_LIBRARY_PATH", &driver);
            let output = succeeds(command);
            assert!(output.stdout.starts_with("ok: "), "{rules}: {}", output.stdout);
            if let Some(mut command) = valgrind(&program) {
                command.arg(&model).args([rules, mmap]).env("BERTH_ARENA_DIR", scratch.path().join("arena"));
                succeeds(command);
            }
        }
    }
}
