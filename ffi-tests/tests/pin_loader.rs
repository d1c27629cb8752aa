//! Page-locked memory for a C loader without ggml, and `mlock` in a stock llama.cpp.

#[expect(dead_code, reason = "shared with tests that use more of it")]
#[path = "support/cuda.rs"]
mod cuda;
#[expect(dead_code, reason = "shared with tests that use more of it")]
#[path = "support/loading.rs"]
mod loading;
#[expect(dead_code, reason = "shared with tests that use more of it")]
#[path = "support/peer.rs"]
mod peer;
#[path = "support/scratch.rs"]
mod scratch;

use cuda::Calls;
use ffi_tests::report::{Buffer, Report};
use ffi_tests::run::{Options, greedy_text};
use ffi_tests::{berth_lib, hosts, models};
use loading::{experts_are_in, load, peer};
use scratch::Scratch;

#[test]
fn a_loaders_experts_are_page_locked_copied_or_in_the_mapping() {
    let scratch = Scratch::new();
    let (program, driver) = (peer(&scratch, "loader_peer"), cuda::fake_driver(&scratch.path().join("driver")));
    // A few MiB: what is locked in part ends on a huge page.
    let model = models::random(&models::Spec { embd: 512, ff: 512, experts: 16, ..models::Spec::LARGE }).unwrap();
    let (log, report) = (scratch.path().join("calls"), scratch.path().join("report.json"));
    let run = |args: &[&str], more: &[(&str, &str)]| {
        let _ = std::fs::remove_file(&log);
        let mut env = vec![("LD_LIBRARY_PATH", driver.to_str().unwrap()), ("FAKE_CUDA_LOG", log.to_str().unwrap())];
        env.push(("BERTH_REPORT", report.to_str().unwrap()));
        env.extend(more);
        let args: Vec<&str> = ["--rules", "exps=CUDA_Host"].iter().chain(args).copied().collect();
        let loaded = load(&program, &scratch, &model, &args, &env);
        let calls = Calls::read(&log);
        calls.balanced(&format!("{more:?}"), false);
        let buffer = Report::read(&report).unwrap().buffers.into_iter().find(|b| b.asked == "CUDA_Host").unwrap();
        (loaded, calls, buffer)
    };
    for (method, call) in [("alloc", "cuMemHostAlloc"), ("register", "cuMemHostRegister")] {
        let (loaded, calls, buffer) = run(&[], &[("BERTH_PIN", method)]);
        experts_are_in(&loaded, "CUDA_Host", "pinned", "rule_host");
        assert_eq!((buffer.got.as_str(), buffer.pinned_bytes, calls.good(call)), ("pinned", buffer.bytes, 1), "{method}");
    }
    let (loaded, calls, buffer) = run(&[], &[("BERTH_PIN", "mapping")]);
    experts_are_in(&loaded, "CUDA_Host", "mapped", "rule_host");
    assert_eq!((buffer.got.as_str(), buffer.pinned_bytes, buffer.reason.as_deref()), ("mapped", buffer.bytes, None));
    assert_eq!(calls.good("cuMemHostRegister-ro"), 1);

    let (loaded, _, buffer) = run(&[], &[("BERTH_PIN", "mapping"), ("FAKE_CUDA_FAIL", "cuMemHostRegister:1")]);
    experts_are_in(&loaded, "CUDA_Host", "mapped", "fallback_mapped");
    assert_eq!((buffer.got.as_str(), buffer.pinned_bytes, buffer.reason.as_deref()), ("mapped", 0, Some("pin_failed")));
    assert_eq!(loaded.stderr.matches("asked for CUDA_Host, got mapped memory").count(), 1, "{}", loaded.stderr);

    // A part is page-locked memory too; the line and the report say how much.
    let half = (buffer.bytes / 2).to_string();
    let (loaded, _, buffer) = run(&[], &[("BERTH_PIN_LIMIT", &half)]);
    experts_are_in(&loaded, "CUDA_Host", "pinned", "rule_host");
    assert_eq!((buffer.got.as_str(), buffer.reason.as_deref()), ("partly_pinned", Some("pin_budget")));
    assert!(buffer.pinned_bytes > 0 && buffer.pinned_bytes <= buffer.bytes / 2, "{} of {}", buffer.pinned_bytes, buffer.bytes);
    let (loaded, _, _) = run(&["--no-mmap"], &[("BERTH_PIN", "off")]);
    experts_are_in(&loaded, "CUDA_Host", "pageable", "fallback_pageable");
}

#[test]
fn what_is_not_page_locked_is_kept_in_memory_where_that_is_asked_for() {
    let Some(host) = hosts::require("sdist-dl") else { return };
    let model = models::random(&models::Spec::default()).unwrap();
    for (ty, got) in [("CPU_MMAP", "mapped"), ("ARENA", "arena"), ("CUDA_Host", "pageable")] {
        for lock in [false, true] {
            let scratch = Scratch::new();
            let report = scratch.path().join("report.json");
            let options = Options { tokens: 4, ..Options::default() }
                .with_berth(&berth_lib().unwrap(), &format!("exps={ty}"))
                .env("BERTH_REPORT", report.to_str().unwrap())
                .env("BERTH_ARENA_DIR", scratch.dir("arena").to_str().unwrap())
                .env("BERTH_PIN", "off")
                .env("BERTH_LOCK", if lock { "1" } else { "0" })
                .arg(&["-lv", "4"]);
            let made = greedy_text(&host, &model, &options).unwrap();
            let buffers: Vec<Buffer> =
                Report::read(&report).unwrap().buffers.into_iter().filter(|b| b.asked == ty && b.usage == "tensors").collect();
            assert!(!buffers.is_empty() && buffers.iter().all(|b| b.got == got), "{ty}: {buffers:?}");
            let (bytes, locked) = buffers.iter().fold((0, 0), |(all, locked), b| (all + b.bytes, locked + b.locked_bytes));
            // Root may lock everything; others what the limit leaves.
            let line = made.stderr.lines().any(|l| l.contains("berth: ") && l.contains("locked in memory"));
            assert_eq!((locked > 0, line), (lock, lock), "{ty}: {locked} of {bytes}: {}", made.stderr);
            assert!(locked <= bytes, "{ty}: {locked} of {bytes}");
        }
    }
}
