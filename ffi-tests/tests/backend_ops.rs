//! llama.cpp's own `test-backend-ops` passes with Berth in the process: the CPU backend's results are right, and each of our devices is taken
//! as a device.
//!
//! By default a part of the operations that make up an expert block, in about a minute; with `BERTH_FULL=1` everything, in hours.

#[path = "support/backend_ops.rs"]
mod backend_ops;
#[path = "support/full.rs"]
mod full;

use backend_ops::test_backend_ops;
use ffi_tests::hosts;
use full::full;

/// Operations around the experts' matrices: biases, activations, routing.
const AROUND: &str = "ADD_ID,SWIGLU,SWIGLU_OAI,SWIGLU_CLAMP,GEGLU,REGLU,GEGLU_ERF,GEGLU_QUICK,TOPK_MOE";
/// Of the products with experts' matrices: every block format, one token, few and more than few, broadcast and not. The rest are large ones,
/// minutes each in the reference implementation.
const PRODUCTS: &str = "n_mats=(4|8),n_used=[12],b=[01],m=(8|64|512),n=(1|5|16),k=(64|96|256|768),amax=1.0";

/// Berth gives memory and computes nothing: what its device computes is the subject of `device_ops`.
const PLACEMENT_ONLY: &[(&str, &str)] = &[("BERTH_FUSE", "0")];

#[test]
fn the_cpu_backend_passes_with_berth_loaded() {
    let Some(host) = hosts::require("sdist-dl") else { return };
    if full() {
        let all = test_backend_ops(&host, &[], &["-b", "CPU"]);
        assert!(all.failed == 0 && all.passed > 10_000, "{all:?}");
        return;
    }
    let products = test_backend_ops(&host, &[], &["-b", "CPU", "-o", "MUL_MAT_ID", "-p", PRODUCTS]);
    assert!(products.failed == 0 && products.passed > 100, "{products:?}");
    let around = test_backend_ops(&host, &[], &["-b", "CPU", "-o", AROUND]);
    assert!(around.failed == 0 && around.passed > 200, "{around:?}");
}

#[test]
fn our_devices_pass_and_say_what_they_do_not_compute() {
    let Some(host) = hosts::require("sdist-dl") else { return };
    for device in ["BERTH", "CUDA_Host", "ARENA"] {
        let every_case = test_backend_ops(&host, PLACEMENT_ONLY, &["-b", device]);
        assert!(every_case.failed == 0 && every_case.passed + every_case.not_supported > 10_000, "{device}: {every_case:?}");
    }
}

#[test]
fn without_a_device_named_all_of_ours_pass() {
    let Some(host) = hosts::require("sdist-nodl") else { return };
    let counts = test_backend_ops(&host, PLACEMENT_ONLY, &["-o", "MUL_MAT_ID"]);
    assert!(counts.failed == 0 && counts.passed + counts.not_supported > 3 * 500, "{counts:?}");
}
