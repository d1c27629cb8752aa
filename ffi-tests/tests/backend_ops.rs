//! llama.cpp's own `test-backend-ops` passes with Berth in the process: the CPU backend's results are right, and each of our devices is taken
//! as a device.
//!
//! By default a part of the operations that make up an expert block, in about a minute; with `BERTH_FULL=1` everything, in hours.

use std::time::Duration;

use ffi_tests::hosts::{self, Host};
use ffi_tests::{berth_lib, cache, run};

/// Operations around the experts' matrices: biases, activations, routing.
const AROUND: &str = "ADD_ID,SWIGLU,SWIGLU_OAI,SWIGLU_CLAMP,GEGLU,REGLU,GEGLU_ERF,GEGLU_QUICK,TOPK_MOE";
/// Of the products with experts' matrices: every block format, one token, few and more than few, broadcast and not. The rest are large ones,
/// minutes each in the reference implementation.
const PRODUCTS: &str = "n_mats=(4|8),n_used=[12],b=[01],m=(8|64|512),n=(1|5|16),k=(64|96|256|768),amax=1.0";

/// How the cases of one run ended.
#[derive(Debug, Default)]
struct Counts {
    passed: usize,
    failed: usize,
    not_supported: usize,
}

#[test]
fn the_cpu_backend_passes_with_berth_loaded() {
    let Some(host) = hosts::require("sdist-dl") else { return };
    if full() {
        let all = test_backend_ops(&host, &["-b", "CPU"]);
        assert!(all.failed == 0 && all.passed > 10_000, "{all:?}");
        return;
    }
    let products = test_backend_ops(&host, &["-b", "CPU", "-o", "MUL_MAT_ID", "-p", PRODUCTS]);
    assert!(products.failed == 0 && products.passed > 100, "{products:?}");
    let around = test_backend_ops(&host, &["-b", "CPU", "-o", AROUND]);
    assert!(around.failed == 0 && around.passed > 200, "{around:?}");
}

#[test]
fn our_devices_pass_and_say_what_they_do_not_compute() {
    let Some(host) = hosts::require("sdist-dl") else { return };
    for device in ["BERTH", "CUDA_Host", "ARENA"] {
        let every_case = test_backend_ops(&host, &["-b", device]);
        assert!(every_case.failed == 0 && every_case.passed + every_case.not_supported > 10_000, "{device}: {every_case:?}");
    }
}

#[test]
fn without_a_device_named_all_of_ours_pass() {
    let Some(host) = hosts::require("sdist-nodl") else { return };
    let counts = test_backend_ops(&host, &["-o", "MUL_MAT_ID"]);
    assert!(counts.failed == 0 && counts.passed + counts.not_supported > 3 * 500, "{counts:?}");
}

fn full() -> bool {
    std::env::var("BERTH_FULL").is_ok_and(|v| v == "1")
}

/// Runs it; every device must pass.
fn test_backend_ops(host: &Host, args: &[&str]) -> Counts {
    let mut command = host.command("test-backend-ops");
    command.arg("test").args(args).env("GGML_BACKEND_PATH", berth_lib().unwrap());
    let limit = Duration::from_secs(if full() { 6 * 3600 } else { 600 });
    let what = format!("test-backend-ops {}", args.join(" "));
    let output = run::run(command, limit).and_then(|o| o.checked(&what)).unwrap_or_else(|e| panic!("{e:#}"));
    assert!(output.stdout.contains("4/4 backends passed"), "{what}: {}", run::last_lines(&output.stdout, 5));
    let mut counts = Counts::default();
    for line in output.stdout.lines() {
        // "  OP(parameters): OK", with colours.
        let Some((_, result)) = line.rsplit_once("): ") else { continue };
        match result {
            r if r.contains("OK") => counts.passed += 1,
            r if r.contains("not supported") => counts.not_supported += 1,
            _ => counts.failed += 1,
        }
    }
    cache::say(&format!("{what}: {} passed, {} failed, {} not supported", counts.passed, counts.failed, counts.not_supported));
    counts
}
