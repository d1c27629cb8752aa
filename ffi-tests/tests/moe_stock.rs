//! Stock ggml's graph for the experts of a layer and `berth_moe_forward`, in one process, on the same weights: the answers agree.
//!
//! `cargo xtask figures` times the same program; here no time is looked at.

use ffi_tests::moe_stock::{Layer, Program};
use ffi_tests::{berth_lib, hosts};

const Q4_0: usize = 2;
const Q8_0: usize = 8;
const Q4_K: usize = 12;
const Q6_K: usize = 14;
const MXFP4: usize = 39;

#[test]
fn stock_and_berth_agree_in_one_process() {
    let Some(host) = hosts::require("sdist-dl") else { return };
    let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let program = Program::build(host, &berth_lib().unwrap(), scratch.path()).unwrap_or_else(|e| panic!("{e:#}"));
    let pairs = [[Q4_K, Q6_K], [Q6_K, Q6_K], [Q8_0, Q8_0], [Q4_0, Q8_0], [MXFP4, MXFP4]];
    let cases: Vec<[usize; 3]> = pairs.iter().flat_map(|[gate, down]| [1, 40].map(|tokens| [*gate, *down, tokens])).collect();
    for geometry in [[512, 256, 8, 2], [256, 512, 3, 1]] {
        let layer = Layer { geometry, threads: 2, seconds: 0.01, cases: cases.clone() };
        let found = program.compare(&layer).unwrap_or_else(|e| panic!("{e:#}"));
        assert_eq!(found.len(), cases.len());
        for (found, case) in found.iter().zip(&cases) {
            assert!(found.tokens == case[2] && found.runs >= 3 && found.nmse < 2e-3, "{found:?}");
        }
    }
}
