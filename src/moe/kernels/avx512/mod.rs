//! The AVX-512 tier: F, BW, VL, DQ and VNNI (Cascade Lake and later, Zen 4 and later).
//!
//! Owns: its table, and the choice between kernels for few columns and for many. Must not know: experts, threads.
//!
//! - `supers`, `blocks32`, `float`: one to three columns, weights decoded in registers, at the speed of memory;
//! - `panels`, `gemm`: more columns, 32 rows decoded once for all columns;
//! - `mem`: loads and stores.

mod blocks32;
mod float;
mod gemm;
mod mem;
mod panels;
mod supers;

use super::{Mul, Table};
use crate::moe::activation::{self, Activation};
use crate::moe::acts::{self, ActRowMut};
use crate::moe::blocks::*;

macro_rules! kernel {
    ($family:ident, $block:ident) => {{
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
        fn kernel(m: &mut Mul<'_>) {
            match m.columns.len() {
                0 => {}
                1 => $family::few::<$block, 1>(m),
                2 => $family::few::<$block, 2>(m),
                3 => $family::few::<$block, 3>(m),
                _ => gemm::many::<$block>(m),
            }
        }
        kernel
    }};
}

pub(super) static KERNELS: Table = Table {
    mul: [
        kernel!(float, BlockF32),
        kernel!(float, BlockF16),
        kernel!(blocks32, BlockQ4_0),
        kernel!(blocks32, BlockQ4_1),
        kernel!(blocks32, BlockQ5_0),
        kernel!(blocks32, BlockQ5_1),
        kernel!(blocks32, BlockQ8_0),
        kernel!(supers, BlockQ2K),
        kernel!(supers, BlockQ3K),
        kernel!(supers, BlockQ4K),
        kernel!(supers, BlockQ5K),
        kernel!(supers, BlockQ6K),
        kernel!(blocks32, BlockIq4Nl),
        kernel!(blocks32, BlockIq4Xs),
        kernel!(float, BlockBf16),
        kernel!(blocks32, BlockMxfp4),
    ],
    quantise,
    activate,
    accumulate,
};

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn quantise(x: &[f32], out: &mut ActRowMut<'_>) {
    acts::quantise(x, out);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn activate(activation: Activation, gate: &mut [f32], up: &[f32]) {
    activation::apply(activation, gate, up);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn accumulate(sum: &mut [f32], weight: f32, x: &[f32]) {
    activation::accumulate(sum, weight, x);
}
