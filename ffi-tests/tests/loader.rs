//! The create_tensor path and the placement decision, called from C through `berth.h`.

mod support {
    pub(crate) mod loading;
    pub(crate) mod misuse;
    pub(crate) mod peer;
    pub(crate) mod scratch;
}

use std::fs;
use std::path::{Path, PathBuf};

use ffi_tests::gguf;
use ffi_tests::models::{self, Spec};
use ffi_tests::report::Report;
use support::loading::{experts_are_in, load, peer};
use support::misuse;
use support::peer::{plain, succeeds, valgrind};
use support::scratch::Scratch;

fn small() -> PathBuf {
    models::random(&Spec::default()).unwrap_or_else(|e| panic!("{e:#}"))
}

/// How many checks a peer says it made; 0 if one of them failed, or it does not say.
fn checks_without_a_failure(printed: &str) -> usize {
    printed.lines().find_map(|line| line.strip_suffix(" checks, 0 failed")?.parse().ok()).unwrap_or(0)
}

#[test]
fn every_flag_of_create_tensor_holds_from_c() {
    let scratch = Scratch::new();
    let program = peer(&scratch, "loader_peer");
    let arena = scratch.dir("arena");
    let mut command = plain(&program);
    command.arg(small()).arg("--flags").env("BERTH_ARENA_DIR", &arena);
    let output = succeeds(command);
    assert!(checks_without_a_failure(&output.stdout) > 30, "{}", output.stdout);
    if let Some(mut command) = valgrind(&program) {
        ffi_tests::run::clean_env(&mut command);
        command.arg(small()).arg("--flags").env("BERTH_ARENA_DIR", &arena);
        misuse::tell("c/loader_peer.c", "under valgrind", &succeeds(command).stdout);
    }
}

#[test]
fn every_row_of_the_decision_table_holds_from_c() {
    let scratch = Scratch::new();
    let program = peer(&scratch, "decide_peer");
    let output = succeeds(plain(&program));
    assert!(checks_without_a_failure(&output.stdout) > 0, "{}", output.stdout);
    if let Some(mut command) = valgrind(&program) {
        ffi_tests::run::clean_env(&mut command);
        misuse::tell("c/decide_peer.c", "under valgrind", &succeeds(command).stdout);
    }
}

#[test]
fn the_report_says_how_the_copies_were_read() {
    let scratch = Scratch::new();
    let program = peer(&scratch, "loader_peer");
    let report = scratch.path().join("report.json");
    for fill in ["auto", "copy"] {
        let env = [("BERTH_REPORT", report.to_str().unwrap()), ("BERTH_FILL", fill)];
        experts_are_in(&load(&program, &scratch, &small(), &["--rules", "exps=ARENA"], &env), "ARENA", "arena", "rule_host");
        let report = Report::read(&report).unwrap();
        let arena: Vec<_> = report.buffers.iter().filter(|b| b.asked == "ARENA").collect();
        assert!(!arena.is_empty());
        for buffer in arena {
            let bytes: u64 = buffer.tensors.iter().map(|t| t.bytes).sum();
            assert_eq!((buffer.filled.read, buffer.filled.copied), (bytes, 0), "{fill}");
            assert!(fill == "auto" || buffer.filled.direct == 0, "{fill}: {:?}", buffer.filled);
        }
    }
}

#[test]
fn every_byte_of_every_tensor_is_the_files_in_every_place_mapped_and_not() {
    let scratch = Scratch::new();
    let program = peer(&scratch, "loader_peer");
    let model = small();
    for (place, mapped, unmapped) in [("CPU_MMAP", "mapped", "pageable"), ("ARENA", "arena", "arena")] {
        let rule = format!("exps={place}");
        experts_are_in(&load(&program, &scratch, &model, &["--rules", &rule], &[]), place, mapped, "rule_host");
        experts_are_in(&load(&program, &scratch, &model, &["--rules", &rule, "--no-mmap"], &[]), place, unmapped, "rule_host");
        let cancelled = load(&program, &scratch, &model, &["--rules", &rule, "--no-mmap", "--cancel"], &[]);
        experts_are_in(&cancelled, place, unmapped, "rule_host");
        assert!(cancelled.cancelled.is_some_and(|(done, total)| done > 0 && done <= total), "{:?}", cancelled.cancelled);
    }
    let output = valgrind(&program).map(|mut command| {
        command.arg(&model).args(["--rules", "exps=ARENA,attn=CPU_MMAP"]).env("BERTH_ARENA_DIR", scratch.path().join("arena"));
        succeeds(command)
    });
    assert!(output.is_none_or(|o| !o.stdout.contains("DIFFERENT")));
}

#[test]
fn pinned_memory_that_cannot_be_had_stays_in_the_mapping_or_becomes_pageable() {
    if ["/usr/lib/x86_64-linux-gnu/libcuda.so.1", "/usr/lib64/libcuda.so.1"].iter().any(|p| Path::new(p).exists()) {
        ffi_tests::skip::skipped("pinned memory that cannot be had", "this machine has a CUDA driver");
        return;
    }
    let scratch = Scratch::new();
    let program = peer(&scratch, "loader_peer");
    let model = small();
    let mapped = load(&program, &scratch, &model, &["--rules", "exps=CUDA_Host"], &[]);
    experts_are_in(&mapped, "CUDA_Host", "mapped", "fallback_mapped");
    assert_eq!(mapped.stderr.matches("asked for CUDA_Host, got mapped memory").count(), 1, "{}", mapped.stderr);
    let pageable = load(&program, &scratch, &model, &["--rules", "exps=CUDA_Host", "--no-mmap"], &[]);
    experts_are_in(&pageable, "CUDA_Host", "pageable", "fallback_pageable");
    assert_eq!(pageable.stderr.matches("asked for CUDA_Host, got pageable memory").count(), 1, "{}", pageable.stderr);

    let mut strict = plain(&program);
    strict.arg(&model).args(["--rules", "exps=CUDA_Host"]).env("BERTH_STRICT", "1");
    let refused = ffi_tests::run::run(strict, std::time::Duration::from_secs(60)).unwrap();
    assert_eq!(refused.status.and_then(|s| s.code()), Some(1), "{}", refused.stderr);
    assert!(refused.stdout.contains("ERROR berth_loader_alloc: 5 ") && refused.stdout.contains("BERTH_STRICT"), "{}", refused.stdout);
}

#[test]
fn a_model_in_three_files_is_loaded_from_all_of_them() {
    let scratch = Scratch::new();
    let program = peer(&scratch, "loader_peer");
    let parts = gguf::split::split(&small(), scratch.path(), 3).unwrap_or_else(|e| panic!("{e:#}"));
    let mut args = vec![];
    for part in &parts {
        args.extend(["--part", part.to_str().unwrap()]);
    }
    for extra in [&["--rules", "exps=ARENA"][..], &["--rules", "exps=CPU_MMAP"], &["--rules", "exps=ARENA", "--no-mmap"]] {
        let all: Vec<&str> = args.iter().copied().chain(extra.iter().copied()).collect();
        let loaded = load(&program, &scratch, &parts[0], &all, &[]);
        assert_eq!(loaded.lines.len(), gguf::Gguf::open(&small()).unwrap().tensors().len());
    }
}

#[test]
fn a_process_without_standard_streams_keeps_its_messages_out_of_the_weights() {
    let scratch = Scratch::new();
    let program = peer(&scratch, "loader_peer");
    for closed in ["<&- >&- 2>&-", "<&- 2>&-", ">&- 2>&-", "2>&-"] {
        let mut shell = plain("sh");
        shell.args(["-c", &format!(r#"exec "$0" "$@" {closed}"#)]).arg(&program).arg(small()).args([
            "--rules",
            "exps=ARENA,attn=CUDA_Host",
            "--noisy",
        ]);
        shell.env("BERTH_ARENA_DIR", scratch.path().join("streams"));
        let output = ffi_tests::run::run(shell, std::time::Duration::from_secs(60)).unwrap();
        assert_eq!(output.status.and_then(|s| s.code()), Some(0), "{closed}: {}", output.stdout);
    }
}

#[test]
fn a_file_that_is_replaced_while_it_is_open_is_not_mixed_with_its_successor() {
    let scratch = Scratch::new();
    let program = peer(&scratch, "loader_peer");
    let (model, other) = (scratch.path().join("model.gguf"), scratch.path().join("other.gguf"));
    fs::copy(small(), &model).unwrap();
    fs::write(&other, vec![0xA5; fs::metadata(&model).unwrap().len() as usize]).unwrap();
    // What is compared with is the file that was opened, under its second name.
    let first = scratch.path().join("first.gguf");
    fs::hard_link(&model, &first).unwrap();
    let args = ["--rules", "exps=ARENA", "--part", first.to_str().unwrap(), "--replace", other.to_str().unwrap()];
    load(&program, &scratch, &model, &args, &[]);
}

#[test]
fn a_bad_setting_is_refused_and_the_log_level_is_obeyed() {
    let scratch = Scratch::new();
    let program = peer(&scratch, "loader_peer");
    let mut bad = plain(&program);
    bad.arg(small()).env("BERTH_LOG", "bogus");
    let output = ffi_tests::run::run(bad, std::time::Duration::from_secs(60)).unwrap();
    assert!(output.stdout.contains("ERROR berth_loader_open: 7 ") && output.stdout.contains("BERTH_LOG"), "{}", output.stdout);
    let quiet = load(&program, &scratch, &small(), &["--rules", "exps=CUDA_Host"], &[("BERTH_LOG", "off")]);
    assert_eq!(quiet.stderr, "");
}

#[test]
fn a_file_that_is_cut_or_gone_is_an_error_that_names_it() {
    let scratch = Scratch::new();
    let program = peer(&scratch, "loader_peer");
    let cut = scratch.path().join("cut.gguf");
    let whole = fs::read(small()).unwrap();
    fs::write(&cut, &whole[..whole.len() - 1]).unwrap();
    let pipe = scratch.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for (path, status) in
        [(pipe.as_path(), 3), (cut.as_path(), 12), (Path::new("/nonexistent/m.gguf"), 11), (scratch.path(), 3), (Path::new("/dev/null"), 3)]
    {
        let mut command = plain(&program);
        command.arg(path);
        let output = ffi_tests::run::run(command, std::time::Duration::from_secs(60)).unwrap();
        assert_eq!(output.status.and_then(|s| s.code()), Some(1), "{}", output.stderr);
        let want = format!("ERROR berth_loader_open: {status} ");
        assert!(output.stdout.contains(&want) && output.stdout.contains(path.to_str().unwrap()), "{want}: {}", output.stdout);
    }
}
