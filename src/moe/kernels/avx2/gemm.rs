//! AVX2: many columns.
//!
//! Owns: the products of a pair of panels with one to four columns, and the loop over rows, panels and groups of columns. Must not know: how
//! a format is decoded.
//!
//! As with AVX-512, weights are in lanes, one row each, and four activations are broadcast from memory. There is no `vpdpbusd`: `vpmaddubsw`
//! sums two products in 16 bits, and as many of its results are added in 16 bits as fit (eight of four-bit codes, two of six-bit codes: [`steps`])
//! before `vpmaddwd` widens them, which multiplies with the integer scale at no cost where the format has one. Codes of eight bits fit not
//! even once, so their upper and lower halves are multiplied apart, as two panels of the same rows. Per 32 products that is an
//! instruction on each multiplier and one adder for four-bit codes, and twice that for eight-bit codes. Two registers of weights times
//! three columns leave room for their sums in 16 and in 32 bits.

use std::arch::x86_64::*;

use super::super::ahead::{Coming, NextRows, prefetch2};
use super::super::{MOST_COLUMNS, Mul};
use super::mem::*;
use super::panels::{self, PAIRS, Pair, is_split};
use crate::moe::acts::{Act32, Act256, ActBlock};
use crate::moe::blocks::Block;

/// Most rows that are decoded before the columns pass by.
const TILE: usize = 16 * PAIRS;

/// Results of `vpmaddubsw` that 16 bits hold, each a sum of two products of codes up to `largest` and activations up to 127.
const fn steps(largest: i32, most: usize) -> usize {
    let mut steps = most;
    while steps as i32 * 2 * 127 * largest > i16::MAX as i32 {
        steps /= 2;
    }
    steps
}

/// A format that is multiplied from panels.
pub(super) trait Product: Block {
    /// The activations.
    type Act: ActBlock;
    /// Rows of a pair of panels.
    const ROWS: usize;
    /// Most columns in registers.
    const WIDEST: usize;

    /// Decodes up to 256 weights of each of these rows, in `blocks` times 32.
    ///
    /// # Safety
    /// The CPU has AVX2, FMA and F16C.
    unsafe fn decode(rows: &[&[Self]], blocks: usize, pair: &mut Pair);

    /// Multiplies `blocks` times 32 weights.
    ///
    /// # Safety
    /// As for `decode`.
    unsafe fn multiply<const N: usize>(pair: &Pair, acts: [&Self::Act; N], blocks: usize, out: Out<'_>);
}

/// Where products go: row r of column n at `values[n * stride + r]`.
pub(super) struct Out<'a> {
    values: &'a mut [f32],
    stride: usize,
    /// Whether what is there does not count.
    first: bool,
}

impl Out<'_> {
    /// Eight rows of column `n`.
    #[inline(always)]
    fn at(&mut self, n: usize, p: usize) -> &mut [f32; 8] {
        &mut self.values[n * self.stride..].as_chunks_mut::<8>().0[p]
    }

    /// Adds.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn add(&mut self, n: usize, p: usize, value: __m256) {
        let first = self.first;
        let at = self.at(n, p);
        let value = if first { value } else { _mm256_add_ps(floats8(at), value) };
        store_floats(at, value);
    }
}

/// Sums in 16 bits of the products of `STEPS` steps from `first` on, two to a row. `ROLLED`, the compiler does not know how many: beside f32 sums there
/// are too few registers for all that it would load early.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn dot<const N: usize, const STEPS: usize, const ROLLED: bool>(pair: &Pair, q: [&[i8; 256]; N], first: usize) -> [[__m256i; 2]; N] {
    let (w0, w1) = (&pair[0].w[first..first + STEPS], &pair[1].w[first..first + STEPS]);
    let mut sums = [[_mm256_setzero_si256(); 2]; N];
    for s in 0..if ROLLED { opaque(STEPS as u64) as usize } else { STEPS } {
        let (w0, w1) = (load32(&w0[s]), load32(&w1[s]));
        for n in 0..N {
            let a = four_codes(q[n], first + s);
            sums[n][0] = in_order(_mm256_add_epi16(sums[n][0], _mm256_maddubs_epi16(w0, a)));
            sums[n][1] = in_order(_mm256_add_epi16(sums[n][1], _mm256_maddubs_epi16(w1, a)));
        }
    }
    sums
}

/// `sum(min * sum of activations)`, of all groups.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn mins<const N: usize, const GROUP: usize>(pair: &Pair, acts: &[&Act256; N]) -> [[__m256i; 2]; N] {
    let mut sums = [[_mm256_setzero_si256(); 2]; N];
    for i in 0..128 / GROUP {
        for n in 0..N {
            let a = two_sums::<GROUP>(acts[n], i);
            for p in 0..2 {
                sums[n][p] = _mm256_add_epi32(sums[n][p], _mm256_madd_epi16(dwords8(&pair[p].mins[i]), a));
            }
        }
    }
    sums
}

/// One activation scale per 256. Like the two below, a function of its own, so that it has all registers to itself.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
fn multiply_256<const N: usize, const GROUP: usize, const STEPS: usize, const MIN: bool>(
    pair: &Pair,
    acts: [&Act256; N],
    mut out: Out<'_>,
) {
    let mins = mins::<N, GROUP>(pair, &acts);
    let mut sums = [[_mm256_setzero_si256(); 2]; N];
    for n in 0..N {
        for p in 0..2 {
            if MIN {
                let d = _mm256_mul_ps(floats8(&pair[p].dmin), _mm256_set1_ps(-acts[n].d));
                out.add(n, p, _mm256_mul_ps(_mm256_cvtepi32_ps(mins[n][p]), d));
            } else {
                sums[n][p] = _mm256_sub_epi32(sums[n][p], mins[n][p]);
            }
        }
    }
    out.first &= !MIN;
    for g in 0..256 / GROUP {
        for first in (g * GROUP / 4..(g + 1) * GROUP / 4).step_by(STEPS) {
            let pairs = dot::<N, STEPS, false>(pair, each(|n| &acts[n].q), first);
            for p in 0..2 {
                let scale = dwords8(&pair[p].scales[g * GROUP / 16]);
                for n in 0..N {
                    sums[n][p] = _mm256_add_epi32(sums[n][p], _mm256_madd_epi16(pairs[n][p], scale));
                }
            }
        }
    }
    for n in 0..N {
        for p in 0..2 {
            let d = _mm256_mul_ps(floats8(&pair[p].d), _mm256_set1_ps(acts[n].d));
            out.add(n, p, _mm256_mul_ps(_mm256_cvtepi32_ps(sums[n][p]), d));
        }
    }
}

/// An activation scale per 32.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
fn multiply_32<const N: usize, const STEPS: usize, const MIN: bool>(pair: &Pair, acts: [&Act32; N], blocks: usize, mut out: Out<'_>) {
    let ones = _mm256_set1_epi16(1);
    let mut total = [[_mm256_setzero_ps(); 2]; N];
    for g in 0..blocks.min(8) {
        let mut sums: [[__m256i; 2]; N] = each(|n| [_mm256_set1_epi32(acts[n].fold[g]); 2]);
        for first in (8 * g..8 * g + 8).step_by(STEPS) {
            let pairs = dot::<N, STEPS, true>(pair, each(|n| &acts[n].q), first);
            for n in 0..N {
                for p in 0..2 {
                    sums[n][p] = _mm256_add_epi32(sums[n][p], _mm256_madd_epi16(pairs[n][p], ones));
                }
            }
        }
        for n in 0..N {
            for p in 0..2 {
                let scale = _mm256_mul_ps(floats8(&pair[p].scale[g]), _mm256_set1_ps(acts[n].d[g]));
                total[n][p] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[n][p]), scale, total[n][p]);
                if MIN {
                    total[n][p] = _mm256_fmadd_ps(floats8(&pair[p].min[g]), _mm256_set1_ps(acts[n].s[g]), total[n][p]);
                }
            }
        }
    }
    for n in 0..N {
        for p in 0..2 {
            out.add(n, p, total[n][p]);
        }
    }
}

/// An activation scale per 32, and codes in halves.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
fn multiply_halves<const N: usize>(pair: &Pair, acts: [&Act32; N], blocks: usize, mut out: Out<'_>) {
    let (ones, sixteens) = (_mm256_set1_epi16(1), _mm256_set1_epi16(16));
    let mut total = [_mm256_setzero_ps(); N];
    for g in 0..blocks.min(8) {
        let pairs = dot::<N, { steps(15, 8) }, true>(pair, each(|n| &acts[n].q), 8 * g);
        for n in 0..N {
            let sum = _mm256_add_epi32(_mm256_madd_epi16(pairs[n][0], sixteens), _mm256_madd_epi16(pairs[n][1], ones));
            let sum = _mm256_add_epi32(sum, _mm256_set1_epi32(acts[n].fold[g]));
            let scale = _mm256_mul_ps(floats8(&pair[0].scale[g]), _mm256_set1_ps(acts[n].d[g]));
            total[n] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, total[n]);
        }
    }
    for n in 0..N {
        out.add(n, 0, total[n]);
    }
}

macro_rules! supers {
    ($($block:ident: $largest:literal, $group:literal, $min:literal;)*) => {
        $(impl Product for crate::moe::blocks::$block {
            type Act = Act256;
            const ROWS: usize = 16;
            const WIDEST: usize = 3;

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn decode(rows: &[&[Self]], _blocks: usize, pair: &mut Pair) {
                for (rows, panel) in rows.as_chunks::<8>().0.iter().zip(pair) {
                    panels::supers(rows, panel);
                }
            }

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn multiply<const N: usize>(pair: &Pair, acts: [&Act256; N], _blocks: usize, out: Out<'_>) {
                multiply_256::<N, $group, { steps($largest, $group / 4) }, $min>(pair, acts, out);
            }
        })*
    };
}

macro_rules! blocks32 {
    ($($block:ident, |$pair:ident, $acts:ident, $blocks:ident, $out:ident, $n:ident| $multiply:expr;)*) => {
        $(impl Product for crate::moe::blocks::$block {
            type Act = Act32;
            const ROWS: usize = if is_split::<Self>() { 8 } else { 16 };
            const WIDEST: usize = if is_split::<Self>() { 4 } else { 3 };

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn decode(rows: &[&[Self]], blocks: usize, pair: &mut Pair) {
                panels::blocks32(rows, blocks, pair);
            }

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn multiply<const $n: usize>($pair: &Pair, $acts: [&Act32; $n], $blocks: usize, $out: Out<'_>) {
                $multiply
            }
        })*
    };
}

// The largest code, weights per scale, whether there are mins.
supers! {
    BlockQ2K: 3, 16, true;
    BlockQ3K: 7, 16, false;
    BlockQ4K: 15, 32, true;
    BlockQ5K: 31, 32, true;
    BlockQ6K: 63, 16, false;
}

blocks32! {
    BlockQ4_0, |p, a, blocks, out, N| multiply_32::<N, { steps(15, 8) }, false>(p, a, blocks, out);
    BlockQ4_1, |p, a, blocks, out, N| multiply_32::<N, { steps(15, 8) }, true>(p, a, blocks, out);
    BlockQ5_0, |p, a, blocks, out, N| multiply_32::<N, { steps(31, 8) }, false>(p, a, blocks, out);
    BlockQ5_1, |p, a, blocks, out, N| multiply_32::<N, { steps(31, 8) }, true>(p, a, blocks, out);
    BlockMxfp4, |p, a, blocks, out, N| multiply_32::<N, { steps(24, 8) }, false>(p, a, blocks, out);
    BlockQ8_0, |p, a, blocks, out, N| multiply_halves::<N>(p, a, blocks, out);
    BlockIq4Nl, |p, a, blocks, out, N| multiply_halves::<N>(p, a, blocks, out);
    BlockIq4Xs, |p, a, blocks, out, N| multiply_halves::<N>(p, a, blocks, out);
}

/// All rows times all columns.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn many<B: Product>(m: &mut Mul<'_>) {
    let (rows, k) = (m.rows.len(), m.rows.k());
    let (columns, groups) = (m.columns.len(), m.columns.len().div_ceil(B::WIDEST));
    let mut acts: [&[B::Act]; MOST_COLUMNS] = [&[]; MOST_COLUMNS];
    for (acts, column) in acts.iter_mut().zip(m.columns) {
        *acts = column.blocks();
    }
    let panels = panels::panels(m.panel);
    let tile = B::ROWS * PAIRS;
    let parts = k.div_ceil(256);
    let mut coming = Coming::new(m.next_columns, rows.div_ceil(tile) * parts * groups);
    for first_row in (0..rows).step_by(tile) {
        // Lanes without a row repeat the last one; nobody reads their products.
        let row: [&[B]; TILE] = each(|r| m.rows.row::<B>((first_row + r).min(rows - 1)));
        let pairs = (rows - first_row).min(tile).div_ceil(B::ROWS);
        let mut next_rows = NextRows::new(&m.rows, m.next, [first_row, tile], parts * groups);
        for part in 0..parts {
            let count = (k - 256 * part).min(256);
            let per_weight = B::TYPE.block_weights();
            let blocks = 256 * part / per_weight..(256 * part + count) / per_weight;
            let part_of: [&[B]; TILE] = each(|r| &row[r][blocks.clone()]);
            for (p, pair) in panels[..pairs].iter_mut().enumerate() {
                // SAFETY: this function has the instructions.
                unsafe { B::decode(&part_of[B::ROWS * p..][..B::ROWS], count / 32, pair) };
            }
            for g in 0..groups {
                coming.step();
                let (at, bytes) = next_rows.step();
                prefetch2(at, bytes);
                let (first, end) = (columns * g / groups, columns * (g + 1) / groups);
                let acts = &acts[first..end];
                for (p, pair) in panels[..pairs].iter().enumerate() {
                    let values = &mut m.out[first * m.stride + first_row + B::ROWS * p..];
                    let out = Out { values, stride: m.stride, first: part == 0 };
                    // SAFETY: this function has the instructions.
                    unsafe {
                        match acts {
                            [a] => B::multiply(pair, [&a[part]], count / 32, out),
                            [a, b] => B::multiply(pair, [&a[part], &b[part]], count / 32, out),
                            [a, b, c] => B::multiply(pair, [&a[part], &b[part], &c[part]], count / 32, out),
                            [a, b, c, d] => B::multiply(pair, [&a[part], &b[part], &c[part], &d[part]], count / 32, out),
                            _ => unreachable!("a group has one to four columns"),
                        }
                    }
                }
            }
        }
    }
}
