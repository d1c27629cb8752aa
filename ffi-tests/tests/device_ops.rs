//! llama.cpp's own `test-backend-ops` passes on the BERTH device, which computes experts, with the kernels of every instruction set.
//!
//! By default the products with experts' matrices up to a middle size and the fused forms around them, in about two minutes; with
//! `BERTH_FULL=1` every case that the device takes, in about ten minutes for each instruction set. What it does not take is counted too: weight formats that
//! it has no kernels for, and operations that no product of experts feeds.

#[path = "support/backend_ops.rs"]
mod backend_ops;
#[path = "support/full.rs"]
mod full;

use backend_ops::{Counts, test_backend_ops};
use ffi_tests::{hosts, skip};
use full::full;

/// The build of llama.cpp that has the program.
const HOST: &str = "sdist-dl";
/// Products up to a middle size: every format, one token, few and more than a kernel takes at once, broadcast and not.
const PRODUCTS: &str = "m=(8|16|32|50|64|512),n=(1|4|5|16|17|32),k=[1-9][0-9]+";
/// Products of the size of a real layer, with routing weights: the reference takes long to make each.
const LARGE: &str = "type_a=(f16|q4_K).*n=4,";

/// At least so many cases pass; another host may have more.
fn passes(what: &str, least: usize, counts: &Counts) {
    assert!(counts.failed == 0 && counts.passed >= least, "{what}: {counts:?}, expected at least {least} to pass");
}

fn every_product(isa: &str) {
    let Some(host) = hosts::require(HOST) else { return };
    let env = [("BERTH_ISA", isa)];
    let run = |args: &[&str]| test_backend_ops(&host, &env, &[&["-b", "BERTH"], args].concat());
    // Gate, up, biases, every activation, routing weights.
    passes("around products", 490, &run(&["-o", "MUL_MAT_VEC_FUSION"]));
    if full() {
        passes("products", 596, &run(&["-o", "MUL_MAT_ID"]));
        passes("large products", 12, &run(&["-o", "MUL_MAT_ID_FUSION"]));
    } else {
        passes("products", 471, &run(&["-o", "MUL_MAT_ID", "-p", PRODUCTS]));
        passes("large products", 2, &run(&["-o", "MUL_MAT_ID_FUSION", "-p", LARGE]));
    }
}

#[test]
fn the_best_kernels_of_this_processor_pass() {
    // Not set: as users run it.
    every_product("");
}

#[test]
fn avx2_kernels_pass() {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
        return every_product("avx2");
    }
    skip::skipped("AVX2 on the device", "this processor has none");
}

#[test]
fn scalar_kernels_pass() {
    every_product("scalar");
}

/// A norm, a residual or a router that the device took would cut the graph of every layer.
#[test]
fn what_no_product_of_experts_feeds_is_declined() {
    let Some(host) = hosts::require(HOST) else { return };
    let others = "ADD_ID,SWIGLU,SWIGLU_OAI,SWIGLU_CLAMP,GEGLU,REGLU,GEGLU_ERF,GEGLU_QUICK,TOPK_MOE,MOE_REDUCE,RELU_SQR,ADD,MUL,SILU,GELU,RELU,REPEAT,GET_ROWS,CLAMP";
    let counts = test_backend_ops(&host, &[], &["-b", "BERTH", "-o", others]);
    assert!(counts.passed == 0 && counts.failed == 0 && counts.not_supported > 600, "{counts:?}");
}

#[test]
fn placement_only_declines_everything() {
    let Some(host) = hosts::require(HOST) else { return };
    let counts = test_backend_ops(&host, &[("BERTH_FUSE", "0")], &["-b", "BERTH", "-o", "MUL_MAT_ID,MUL_MAT_VEC_FUSION"]);
    assert!(counts.passed == 0 && counts.failed == 0 && counts.not_supported > 2000, "{counts:?}");
}
