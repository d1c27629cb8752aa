//! The AVX2 tier: AVX2, FMA and F16C (Haswell and later, Zen and later).
//!
//! Owns: its table, and the choice between kernels for few columns and for many. Must not know: experts, threads.
//!
//! - `supers`, `blocks32`, `float`: rows times one to four columns, weights decoded in registers; more columns go in groups of up to four, for 16
//!   rows at a time, so that rows and columns stay in the first two caches;
//! - `panels`, `gemm`: many columns, 16 rows decoded once for all of them;
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

/// Rows that all columns pass before the next rows are read.
const TILE: usize = 16;

/// Most columns in registers.
const WIDEST: usize = 4;

/// From how many columns on panels are faster.
const MANY: usize = 5;

/// Likewise where codes go into panels in halves.
const MANY_HALVES: usize = 12;

macro_rules! kernel {
    ($family:ident, $block:ident $(, $many:expr)?) => {{
        #[target_feature(enable = "avx2,fma,f16c")]
        fn kernel(m: &mut Mul<'_>) {
            let (rows, columns) = (m.rows.len(), m.columns.len());
            $(if columns >= $many {
                return gemm::many::<$block>(m);
            })?
            let groups = columns.div_ceil(WIDEST);
            // With one group there is nothing to come back for.
            let tile = if groups == 1 { rows } else { TILE };
            for first in (0..rows).step_by(tile) {
                let range = first..rows.min(first + tile);
                for g in 0..groups {
                    let (first, end) = (columns * g / groups, columns * (g + 1) / groups);
                    match end - first {
                        1 => $family::few::<$block, 1>(m, range.clone(), first),
                        2 => $family::few::<$block, 2>(m, range.clone(), first),
                        3 => $family::few::<$block, 3>(m, range.clone(), first),
                        _ => $family::few::<$block, 4>(m, range.clone(), first),
                    }
                }
            }
        }
        kernel
    }};
}

pub(super) static KERNELS: Table = Table {
    mul: [
        kernel!(float, BlockF32),
        kernel!(float, BlockF16),
        kernel!(blocks32, BlockQ4_0, MANY),
        kernel!(blocks32, BlockQ4_1, MANY),
        kernel!(blocks32, BlockQ5_0, MANY),
        kernel!(blocks32, BlockQ5_1, MANY),
        kernel!(blocks32, BlockQ8_0, MANY_HALVES),
        kernel!(supers, BlockQ2K, MANY),
        kernel!(supers, BlockQ3K, MANY),
        kernel!(supers, BlockQ4K, MANY),
        kernel!(supers, BlockQ5K, MANY),
        kernel!(supers, BlockQ6K, MANY),
        kernel!(blocks32, BlockIq4Nl, MANY_HALVES),
        kernel!(blocks32, BlockIq4Xs, MANY_HALVES),
        kernel!(float, BlockBf16),
        kernel!(blocks32, BlockMxfp4, MANY),
    ],
    quantise,
    activate,
    accumulate,
};

#[target_feature(enable = "avx2")]
fn quantise(x: &[f32], out: &mut ActRowMut<'_>) {
    acts::quantise(x, out);
}

#[target_feature(enable = "avx2")]
fn activate(activation: Activation, gate: &mut [f32], up: &[f32]) {
    activation::apply(activation, gate, up);
}

#[target_feature(enable = "avx2")]
fn accumulate(sum: &mut [f32], weight: f32, x: &[f32]) {
    activation::accumulate(sum, weight, x);
}
