//! `CUDA_Host` against a driver that fails on command: page-locked when it can be, pageable with the reason when it cannot, and every context
//! that was retained released, whatever went wrong.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use ffi_tests::report::{Buffer, Report};
use ffi_tests::run::{Generation, Options, agree, greedy_text, until_whole};
use ffi_tests::{berth_lib, hosts, models};

const RULE: &str = "ffn_(gate|up|down)_exps=CUDA_Host";

/// `libcuda.so.1` of our own in a directory of its own.
fn fake_driver(dir: &Path) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("c/fake_cuda.c");
    let built = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"])
        .arg(dir.join("libcuda.so.1"))
        .arg(source)
        .status()
        .expect("cc is missing: apt-get install gcc");
    assert!(built.success());
}

struct Run {
    text: String,
    stderr: String,
    buffer: Buffer,
    /// Successful calls of each driver function.
    calls: BTreeMap<String, usize>,
}

fn run(host: &hosts::Host, model: &Path, dir: &Path, fail: &str) -> Run {
    let (report, log) = (dir.join("report.json"), dir.join("calls"));
    let _ = std::fs::remove_file(&log);
    let libraries: Vec<PathBuf> = vec![dir.to_owned(), host.lib_dir.clone()];
    let options = Options { tokens: 8, ..Options::default() }
        .with_berth(&berth_lib().unwrap(), RULE)
        .env("LD_LIBRARY_PATH", std::env::join_paths(libraries).unwrap().into_string().unwrap())
        .env("BERTH_REPORT", report.to_str().unwrap())
        // The host's own kernels run, so that the text is the one without Berth.
        .env("BERTH_FUSE", "0")
        .env("FAKE_CUDA_LOG", log.to_str().unwrap())
        .env("FAKE_CUDA_FAIL", fail);
    let made = generate(host, model, &options, || {
        let _ = std::fs::remove_file(&log);
    });
    let report = Report::read(&report).unwrap();
    let buffer = report.buffers.into_iter().find(|b| b.asked == "CUDA_Host").unwrap();
    let mut calls = BTreeMap::new();
    for line in std::fs::read_to_string(&log).unwrap_or_default().lines() {
        let (name, result) = line.split_once(' ').unwrap();
        *calls.entry(name.to_owned()).or_default() += usize::from(result == "0");
    }
    Run { text: made.text, stderr: made.stderr, buffer, calls }
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
    fake_driver(dir.path());

    let stock = generate(&host, &model, &Options { tokens: 8, ..Options::default() }, || ()).text;
    let called = |run: &Run, name: &str| run.calls.get(name).copied().unwrap_or(0);
    let balanced = |run: &Run, what: &str| {
        for (take, give) in [
            ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease"),
            ("cuCtxPushCurrent", "cuCtxPopCurrent"),
            ("cuMemHostAlloc", "cuMemFreeHost"),
        ] {
            assert_eq!(called(run, take), called(run, give), "{what}: {take} against {give}: {:?}", run.calls);
        }
    };

    let good = run(&host, &model, dir.path(), "");
    assert!(agree(&good.text, &stock, LEAST), "{:?}, not {stock:?}", good.text);
    assert_eq!((good.buffer.got.as_str(), good.buffer.reason.as_deref(), good.buffer.pinned_bytes), ("pinned", None, good.buffer.bytes));
    assert!(called(&good, "cuMemHostAlloc") >= 1);
    assert!(!good.stderr.contains("asked for CUDA_Host"), "{}", good.stderr);
    balanced(&good, "no failure");

    // Error numbers of the driver: 2 out of memory, 100 no device, 1 invalid value.
    for (fail, reason) in [
        ("cuInit:100", "no_cuda_driver"),
        ("cuDeviceGet:100", "no_cuda_driver"),
        ("cuDevicePrimaryCtxRetain:2", "pin_failed"),
        ("cuCtxPushCurrent:1", "pin_failed"),
        ("cuMemHostAlloc:2", "pin_failed"),
        ("cuMemHostAlloc:1", "pin_failed"),
    ] {
        let failed = run(&host, &model, dir.path(), fail);
        let function = fail.split(':').next().unwrap();
        assert!(agree(&failed.text, &stock, LEAST), "{fail}: {:?}, not {stock:?}", failed.text);
        assert_eq!((failed.buffer.got.as_str(), failed.buffer.pinned_bytes), ("pageable", 0), "{fail}");
        assert_eq!(failed.buffer.reason.as_deref(), Some(reason), "{fail}");
        assert!(failed.buffer.message.as_deref().is_some_and(|m| m.contains(function)), "{fail}: {:?}", failed.buffer.message);
        let lines = failed.stderr.lines().filter(|l| l.contains("asked for CUDA_Host, got pageable")).count();
        assert_eq!(lines, 1, "{fail}: one line per buffer:\n{}", failed.stderr);
        balanced(&failed, fail);
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
    let bare = run(&host, &model, dir.path(), "");
    assert_eq!(
        (bare.buffer.got.as_str(), bare.buffer.reason.as_deref(), bare.buffer.pinned_bytes),
        ("pageable", Some("no_cuda_driver"), 0)
    );
    let lines: Vec<&str> = bare.stderr.lines().filter(|l| l.contains("asked for CUDA_Host")).collect();
    assert!(
        matches!(lines.as_slice(), [line] if line.contains(&bare.buffer.bytes.to_string()) && line.contains("no CUDA driver")),
        "{lines:?}"
    );
}
