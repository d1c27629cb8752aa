//! `CUDA_Host` in a stock llama.cpp, against a driver that fails on command: page-locked when it can be, and the same text whatever fails.

#[expect(dead_code, reason = "shared with tests that use more of it")]
#[path = "support/cuda.rs"]
mod cuda;
#[expect(dead_code, reason = "shared with tests that use more of it")]
#[path = "support/peer.rs"]
mod peer;

use std::path::{Path, PathBuf};

use cuda::Calls;
use ffi_tests::report::{Buffer, Report};
use ffi_tests::run::{Generation, Options, agree, greedy_text, until_whole};
use ffi_tests::{berth_lib, hosts, models};

const RULE: &str = "ffn_(gate|up|down)_exps=CUDA_Host";

struct Run {
    text: String,
    stderr: String,
    buffer: Buffer,
    /// Bytes that are page-locked when the program ends.
    pinned: u64,
    calls: Calls,
}

fn run(host: &hosts::Host, model: &Path, dir: &Path, env: &[(&str, &str)]) -> Run {
    let (report, log) = (dir.join("report.json"), dir.join("calls"));
    let libraries: Vec<PathBuf> = vec![dir.to_owned(), host.lib_dir.clone()];
    let options = Options { tokens: 8, ..Options::default() }
        .with_berth(&berth_lib().unwrap(), RULE)
        .env("LD_LIBRARY_PATH", std::env::join_paths(libraries).unwrap().into_string().unwrap())
        .env("BERTH_REPORT", report.to_str().unwrap())
        // The host's own kernels run, so that the text is the one without Berth.
        .env("BERTH_FUSE", "0")
        .env("FAKE_CUDA_LOG", log.to_str().unwrap());
    let options = env.iter().fold(options, |o, (name, value)| o.env(name, *value));
    let made = generate(host, model, &options, || {
        let _ = std::fs::remove_file(&log);
    });
    let report = Report::read(&report).unwrap();
    let pinned = report.pinned;
    let buffer = report.buffers.into_iter().find(|b| b.asked == "CUDA_Host").unwrap();
    Run { text: made.text, stderr: made.stderr, buffer, pinned, calls: Calls::read(&log) }
}

/// Bytes of a text that must be there to compare.
const LEAST: usize = 5;

/// A text; `again` is called before each try.
fn generate(host: &hosts::Host, model: &Path, options: &Options, again: impl Fn()) -> Generation {
    let run = || {
        again();
        greedy_text(host, model, options).unwrap()
    };
    until_whole(run, |made| agree(&made.text, &made.text, LEAST))
}

#[test]
fn cuda_host_is_page_locked_or_falls_back_with_the_drivers_own_reason() {
    let Some(host) = hosts::require("sdist-dl") else { return };
    let model = models::random(&models::Spec::default()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    cuda::fake_driver(dir.path());
    let stock = generate(&host, &model, &Options { tokens: 8, ..Options::default() }, || ()).text;

    for (method, got, call) in [
        ("", "pinned", "cuMemHostRegister"),
        ("register", "pinned", "cuMemHostRegister"),
        ("alloc", "pinned", "cuMemHostAlloc"),
        ("mapping", "mapped", "cuMemHostRegister-ro"),
    ] {
        let good = run(&host, &model, dir.path(), &[("BERTH_PIN", method)]);
        assert!(agree(&good.text, &stock, LEAST), "{method}: {:?}, not {stock:?}", good.text);
        let buffer = &good.buffer;
        assert_eq!((buffer.got.as_str(), buffer.reason.as_deref(), buffer.pinned_bytes), (got, None, buffer.bytes), "{method}");
        assert!(good.calls.good(call) >= 1, "{method}: {:?}", good.calls);
        assert!(!good.stderr.contains("asked for CUDA_Host"), "{}", good.stderr);
        assert!(buffer.filled.copied == 0 || method != "mapping", "{method}: nothing is copied");
        good.calls.balanced(method, false);
        assert_eq!(good.pinned, 0, "{method}: nothing stays");
    }

    // Error numbers of the driver: 2 out of memory, 100 no device, 1 invalid value, 801 not supported.
    for (method, fail, got, reason) in [
        ("", "cuInit:100", "pageable", "no_cuda_driver"),
        ("", "cuDeviceGet:100", "pageable", "no_cuda_driver"),
        ("", "cuDevicePrimaryCtxRetain:2", "pageable", "pin_failed"),
        ("", "cuCtxPushCurrent:1", "pageable", "pin_failed"),
        ("", "cuMemHostRegister:2", "pageable", "pin_failed"),
        ("alloc", "cuMemHostAlloc:2", "pageable", "pin_failed"),
        ("alloc", "cuMemHostAlloc:1", "pageable", "pin_failed"),
        ("mapping", "cuInit:100", "mapped", "no_cuda_driver"),
        ("mapping", "cuMemHostRegister:801", "mapped", "no_cuda_driver"),
        ("mapping", "cuMemHostRegister:1", "mapped", "pin_failed"),
    ] {
        let failed = run(&host, &model, dir.path(), &[("BERTH_PIN", method), ("FAKE_CUDA_FAIL", fail)]);
        let function = fail.split(':').next().unwrap();
        assert!(agree(&failed.text, &stock, LEAST), "{fail}: {:?}, not {stock:?}", failed.text);
        assert_eq!((failed.buffer.got.as_str(), failed.buffer.pinned_bytes), (got, 0), "{method} {fail}");
        assert_eq!(failed.buffer.reason.as_deref(), Some(reason), "{method} {fail}");
        assert!(failed.buffer.message.as_deref().is_some_and(|m| m.contains(function)), "{fail}: {:?}", failed.buffer.message);
        let lines = failed.stderr.lines().filter(|l| l.contains(&format!("asked for CUDA_Host, got {got}"))).count();
        assert_eq!(lines, 1, "{fail}: one line per buffer:\n{}", failed.stderr);
        failed.calls.balanced(fail, false);
        failed.calls.ends_with_a_fatal_error(fail);
    }
}

#[test]
fn the_switch_for_weights_and_the_one_for_compute_buffers_are_two() {
    let Some(host) = hosts::require("sdist-dl") else { return };
    let model = models::random(&models::Spec::default()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    cuda::fake_driver(dir.path());
    for (no_pinned, staging) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut env = vec![("BERTH_PIN_STAGING", if staging { "1" } else { "0" }), ("BERTH_FUSE", "1")];
        env.extend(no_pinned.then_some(("GGML_CUDA_NO_PINNED", "1")));
        let seen = run(&host, &model, dir.path(), &env);
        assert_eq!(seen.buffer.pinned_bytes > 0, !no_pinned, "{env:?}");
        let weights = usize::from(!no_pinned);
        let pieces = seen.calls.good("cuMemHostRegister");
        assert!(if staging { pieces > weights } else { pieces == weights }, "{env:?}: {pieces} pieces: {:?}", seen.calls);
        seen.calls.balanced("staging", false);
    }
}

#[test]
fn without_a_driver_nothing_is_pinned_and_one_line_says_so() {
    let Some(host) = hosts::require("sdist-dl") else { return };
    if Path::new("/usr/lib/x86_64-linux-gnu/libcuda.so.1").exists() {
        // A machine with a driver shows the other half.
        ffi_tests::skip::skipped("without a CUDA driver", "this machine has one");
        return;
    }
    let model = models::random(&models::Spec::default()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let stock = generate(&host, &model, &Options { tokens: 8, ..Options::default() }, || ()).text;
    let bare = run(&host, &model, dir.path(), &[]);
    assert!(agree(&bare.text, &stock, LEAST), "{:?}, not {stock:?}", bare.text);
    assert_eq!(
        (bare.buffer.got.as_str(), bare.buffer.reason.as_deref(), bare.buffer.pinned_bytes, bare.pinned),
        ("pageable", Some("no_cuda_driver"), 0, 0)
    );
    let lines: Vec<&str> = bare.stderr.lines().filter(|l| l.contains("asked for CUDA_Host")).collect();
    assert!(
        matches!(lines.as_slice(), [line] if line.contains(&bare.buffer.bytes.to_string()) && line.contains("no CUDA driver")),
        "{lines:?}"
    );
}
