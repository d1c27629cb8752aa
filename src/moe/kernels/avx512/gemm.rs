//! AVX-512: four and more columns.
//!
//! Owns: the products of two panels (32 rows) with one to six columns, for the three kinds of activations, and the loop over rows, panels and
//! groups of columns. Must not know: how a format is decoded.
//!
//! Weights are in lanes, one row each, and activations are broadcast from memory, which costs a load and no shuffle. Two panels times six
//! columns are 12 chains of `vpdpbusd`, enough for two ports and a latency of five, and with their 12 f32 sums they stay in registers. A sum
//! of products with offset codes starts at `-offset * sum of activations`, which the activations carry: the offset costs nothing. Per 32
//! weights and register there are 8 `vpdpbusd`, a conversion and one FMA (one product more with activation scales per 32); mins take four
//! `vpdpwssd` per 256 weights. 80 to 88 % of the time can be `vpdpbusd`; 77 to 79 are reached with all in the first cache.
//!
//! For every 256 weights the panels of 64 rows are decoded once, to the first-level cache, and all columns pass by, from the second-level
//! cache. What is needed next is fetched to it meanwhile, weights and activations, a few lines with each group of columns.

use std::arch::x86_64::*;

use super::super::ahead::{Coming, NextRows, prefetch2};
use super::super::{MOST_COLUMNS, Mul};
use super::mem::*;
use super::panels::ToPanel;
use crate::moe::acts::{Act32, Act256, ActBlock, ActFloat};
use crate::moe::blocks::Block;

/// Rows of two panels.
const ROWS: usize = 32;

/// Rows that are decoded before the columns pass by. Activations come from the second-level cache once for all of them.
const TILE: usize = 64;

/// Most columns in registers.
const WIDEST: usize = 6;

/// The products of 256 (or 64 float) weights of 32 rows with `N` columns, added to what `out` holds, or stored if `first`.
trait Product: Block {
    type Act: ActBlock;
    /// Weights of a row in one panel.
    const WEIGHTS: usize;

    /// Decodes rows.
    ///
    /// # Safety
    /// The CPU has AVX-512 F, BW, VL, DQ and VNNI, FMA and F16C.
    unsafe fn decode(blocks: &[&[Self]; 16], panel: &mut Panel);

    /// Multiplies. `count` weights of a row are in the panels, which are number `part` of the row.
    ///
    /// # Safety
    /// As for `decode`.
    unsafe fn multiply<const N: usize>(panels: &Pair, columns: [&[Self::Act]; N], part: usize, count: usize, out: Out<'_>);
}

/// Where products go: column n at `values[n * stride..][..32]`.
struct Out<'a> {
    values: &'a mut [f32],
    stride: usize,
    first: bool,
    /// Weights to bring to the second-level cache meanwhile.
    fetch: *const u8,
    fetch_bytes: usize,
}

impl Out<'_> {
    /// Prefetches part `g` of `parts`: many lines a few at a time, because a burst would wait for free line buffers (T = 128: 37 -> 28 ms);
    /// few lines at once, because that is cheaper than asking eight times (T = 512: 83 -> 78 ms).
    #[inline(always)]
    fn fetch_part(&self, g: usize, parts: usize) {
        if self.fetch_bytes > 1024 {
            let bytes = self.fetch_bytes.div_ceil(64 * parts) * 64;
            prefetch2(self.fetch.wrapping_add(g * bytes), bytes);
        } else if g == 0 {
            prefetch2(self.fetch, self.fetch_bytes);
        }
    }

    #[inline(always)]
    fn at(&mut self, n: usize) -> &mut [[f32; 16]] {
        self.values[n * self.stride..][..ROWS].as_chunks_mut::<16>().0
    }

    /// What is there already.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    fn load<const N: usize>(&mut self) -> [[__m512; 2]; N] {
        if self.first {
            return [[_mm512_setzero_ps(); 2]; N];
        }
        let mut values = [[_mm512_setzero_ps(); 2]; N];
        for (n, value) in values.iter_mut().enumerate() {
            let at = self.at(n);
            *value = [floats16(&at[0]), floats16(&at[1])];
        }
        values
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    fn store<const N: usize>(&mut self, values: [[__m512; 2]; N]) {
        for (n, value) in values.iter().enumerate() {
            let at = self.at(n);
            store_floats(&mut at[0], value[0]);
            store_floats(&mut at[1], value[1]);
        }
    }
}

/// Adds the products of steps `first..first + steps` to `sums`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn dot<const N: usize>(panels: &Pair, q: [&[i8; 256]; N], first: usize, steps: usize, sums: &mut [[__m512i; 2]; N]) {
    let (w0, w1) = (&panels[0].w[first..first + steps], &panels[1].w[first..first + steps]);
    for s in 0..steps {
        let (w0, w1) = (load64(&w0[s]), load64(&w1[s]));
        for n in 0..N {
            let a = four_codes(q[n], first + s);
            sums[n][0] = _mm512_dpbusd_epi32(sums[n][0], w0, a);
            sums[n][1] = _mm512_dpbusd_epi32(sums[n][1], w1, a);
        }
    }
}

/// One activation scale per 256. Like the two below, a function of its own, so that it has all registers to itself. With mins, their products are integers too: `min_scale * sum(min * sum of activations)`, a pair of 16-bit
/// numbers per instruction.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn multiply_256<const N: usize, const GROUP: usize, const MIN: bool>(panels: &Pair, acts: [&Act256; N], mut out: Out<'_>) {
    let mut total = if MIN { minus_mins::<N, GROUP>(panels, &acts) } else { [[_mm512_setzero_ps(); 2]; N] };
    for g in 0..256 / GROUP {
        out.fetch_part(g, 256 / GROUP);
        let mut sums = [[_mm512_setzero_si512(); 2]; N];
        if !MIN {
            sums = each(|n| [_mm512_set1_epi32(acts[n].fold[g]); 2]);
        }
        dot(panels, each(|n| &acts[n].q), g * (GROUP / 4), GROUP / 4, &mut sums);
        for p in 0..2 {
            let scale = floats16(&panels[p].scale[g]);
            for n in 0..N {
                total[n][p] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[n][p]), scale, total[n][p]);
            }
        }
    }
    let first = out.first;
    for n in 0..N {
        let d = _mm512_set1_ps(acts[n].d);
        let at = out.at(n);
        for p in 0..2 {
            let before = if first { _mm512_setzero_ps() } else { floats16(&at[p]) };
            store_floats(&mut at[p], _mm512_fmadd_ps(total[n][p], d, before));
        }
    }
}

/// `-min_scale * sum(min * sum of activations)`. Not inlined: in one function with the rest, registers do not suffice.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn minus_mins<const N: usize, const GROUP: usize>(panels: &Pair, acts: &[&Act256; N]) -> [[__m512; 2]; N] {
    let mut sums = [[_mm512_setzero_si512(); 2]; N];
    for i in 0..128 / GROUP {
        let mins: [__m512i; 2] = each(|p| dwords16(&panels[p].mins[i]));
        for n in 0..N {
            let a = two_sums::<GROUP>(acts[n], i);
            sums[n][0] = _mm512_dpwssd_epi32(sums[n][0], mins[0], a);
            sums[n][1] = _mm512_dpwssd_epi32(sums[n][1], mins[1], a);
        }
    }
    let scale: [__m512; 2] = each(|p| _mm512_xor_ps(floats16(&panels[p].min_scale), _mm512_set1_ps(-0.0)));
    each(|n| each(|p| _mm512_mul_ps(_mm512_cvtepi32_ps(sums[n][p]), scale[p])))
}

/// An activation scale per 32.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn multiply_32<const N: usize, const MIN: bool>(panels: &Pair, acts: [&Act32; N], blocks: usize, mut out: Out<'_>) {
    let mut total = out.load::<N>();
    for g in 0..blocks.min(8) {
        out.fetch_part(g, blocks.min(8));
        let mut sums = [[_mm512_setzero_si512(); 2]; N];
        if !MIN {
            sums = each(|n| [_mm512_set1_epi32(acts[n].fold[g]); 2]);
        }
        dot(panels, each(|n| &acts[n].q), g * 8, 8, &mut sums);
        for p in 0..2 {
            let scale = floats16(&panels[p].scale[g]);
            for n in 0..N {
                let scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[n][p]), _mm512_set1_ps(acts[n].d[g]));
                total[n][p] = _mm512_fmadd_ps(scaled, scale, total[n][p]);
            }
            if MIN {
                let min = floats16(&panels[p].min[g]);
                for n in 0..N {
                    total[n][p] = _mm512_fmadd_ps(min, _mm512_set1_ps(acts[n].s[g]), total[n][p]);
                }
            }
        }
    }
    out.store(total);
}

/// No quantisation: 64 weights.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn multiply_float<const N: usize>(panels: &Pair, x: [&[f32; 64]; N], count: usize, mut out: Out<'_>) {
    let mut total = out.load::<N>();
    // Sixteen products are added up before they meet the total: the rounding error of one long chain would grow with K.
    out.fetch_part(0, 1);
    for first in (0..count.min(64)).step_by(16) {
        let mut sum = [[_mm512_setzero_ps(); 2]; N];
        for i in first..count.min(first + 16) {
            let w: [__m512; 2] = each(|p| _mm512_castsi512_ps(load64(&panels[p].w[i])));
            for n in 0..N {
                let a = _mm512_set1_ps(x[n][i]);
                sum[n][0] = _mm512_fmadd_ps(w[0], a, sum[n][0]);
                sum[n][1] = _mm512_fmadd_ps(w[1], a, sum[n][1]);
            }
        }
        for n in 0..N {
            total[n][0] = _mm512_add_ps(total[n][0], sum[n][0]);
            total[n][1] = _mm512_add_ps(total[n][1], sum[n][1]);
        }
    }
    out.store(total);
}

macro_rules! product {
    ($($block:ident: $act:ident, $weights:literal, |$panels:ident, $columns:ident, $part:ident, $count:ident, $out:ident, $n:ident| $multiply:expr;)*) => {
        $(impl Product for crate::moe::blocks::$block {
            type Act = $act;
            const WEIGHTS: usize = $weights;

            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
            unsafe fn decode(blocks: &[&[Self]; 16], panel: &mut Panel) {
                // SAFETY: the instructions are the caller's promise.
                unsafe { Self::to_panel(blocks, panel) }
            }

            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
            unsafe fn multiply<const $n: usize>($panels: &Pair, $columns: [&[$act]; $n], $part: usize, $count: usize, $out: Out<'_>) {
                $multiply
            }
        })*
    };
}

product! {
    BlockQ2K: Act256, 256, |p, c, i, _count, out, N| multiply_256::<N, 16, true>(p, each(|n| &c[n][i]), out);
    BlockQ3K: Act256, 256, |p, c, i, _count, out, N| multiply_256::<N, 16, false>(p, each(|n| &c[n][i]), out);
    BlockQ4K: Act256, 256, |p, c, i, _count, out, N| multiply_256::<N, 32, true>(p, each(|n| &c[n][i]), out);
    BlockQ5K: Act256, 256, |p, c, i, _count, out, N| multiply_256::<N, 32, true>(p, each(|n| &c[n][i]), out);
    BlockQ6K: Act256, 256, |p, c, i, _count, out, N| multiply_256::<N, 16, false>(p, each(|n| &c[n][i]), out);
    BlockQ4_0: Act32, 256, |p, c, i, count, out, N| multiply_32::<N, false>(p, each(|n| &c[n][i]), count / 32, out);
    BlockQ4_1: Act32, 256, |p, c, i, count, out, N| multiply_32::<N, true>(p, each(|n| &c[n][i]), count / 32, out);
    BlockQ5_0: Act32, 256, |p, c, i, count, out, N| multiply_32::<N, false>(p, each(|n| &c[n][i]), count / 32, out);
    BlockQ5_1: Act32, 256, |p, c, i, count, out, N| multiply_32::<N, true>(p, each(|n| &c[n][i]), count / 32, out);
    BlockQ8_0: Act32, 256, |p, c, i, count, out, N| multiply_32::<N, false>(p, each(|n| &c[n][i]), count / 32, out);
    BlockIq4Nl: Act32, 256, |p, c, i, count, out, N| multiply_32::<N, false>(p, each(|n| &c[n][i]), count / 32, out);
    BlockIq4Xs: Act32, 256, |p, c, i, count, out, N| multiply_32::<N, false>(p, each(|n| &c[n][i]), count / 32, out);
    BlockMxfp4: Act32, 256, |p, c, i, count, out, N| multiply_32::<N, false>(p, each(|n| &c[n][i]), count / 32, out);
    BlockF32: ActFloat, 64, |p, c, i, count, out, N| multiply_float::<N>(p, each(|n| float_part(c[n], i)), count, out);
    BlockF16: ActFloat, 64, |p, c, i, count, out, N| multiply_float::<N>(p, each(|n| float_part(c[n], i)), count, out);
    BlockBf16: ActFloat, 64, |p, c, i, count, out, N| multiply_float::<N>(p, each(|n| float_part(c[n], i)), count, out);
}

/// Activations 64i..64i+64.
#[inline(always)]
fn float_part(column: &[ActFloat], i: usize) -> &[f32; 64] {
    &column[i / 4].x.as_chunks::<64>().0[i % 4]
}

/// Multiplies one group of columns, from number `first` on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn group<B: Product, const N: usize>(panels: &Pair, columns: &[&[B::Act]], first: usize, [part, count]: [usize; 2], out: Out<'_>) {
    let columns: [&[B::Act]; N] = *columns[first..].first_chunk().expect("the group has N columns");
    // SAFETY: this function has the instructions.
    unsafe { B::multiply(panels, columns, part, count, out) }
}

/// All rows times all columns.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
#[expect(private_bounds, reason = "the trait is the inside of this file")]
pub(super) fn many<B: Product>(m: &mut Mul<'_>) {
    let (rows, k) = (m.rows.len(), m.rows.k());
    let (columns, groups) = (m.columns.len(), m.columns.len().div_ceil(WIDEST));
    let mut acts: [&[B::Act]; MOST_COLUMNS] = [&[]; MOST_COLUMNS];
    for (acts, column) in acts.iter_mut().zip(m.columns) {
        *acts = column.blocks();
    }
    let panels = panels(m.panel);
    let per_panel = B::WEIGHTS / B::TYPE.block_weights();
    let parts = k.div_ceil(B::WEIGHTS);
    let mut coming = Coming::new(m.next_columns, rows.div_ceil(TILE) * parts * groups);
    for first_row in (0..rows).step_by(TILE) {
        // Lanes without a row repeat the last one; nobody reads their products.
        let row: [&[B]; TILE] = each(|r| m.rows.row::<B>((first_row + r).min(rows - 1)));
        let pairs = (rows - first_row).min(TILE).div_ceil(ROWS);
        // While these rows are multiplied, the next come to the second-level cache, a part of them with each group of columns.
        let mut next_rows = NextRows::new(&m.rows, m.next, [first_row, TILE], parts * groups * pairs);
        for part in 0..parts {
            let count = B::WEIGHTS.min(k - part * B::WEIGHTS);
            let blocks = part * per_panel..part * per_panel + count / B::TYPE.block_weights();
            let parts_of = |first: usize| each(|r| &row[first + r][blocks.clone()]);
            for (p, pair) in panels[..pairs].iter_mut().enumerate() {
                // SAFETY: this function has the instructions.
                unsafe {
                    B::decode(&parts_of(ROWS * p), &mut pair[0]);
                    B::decode(&parts_of(ROWS * p + 16), &mut pair[1]);
                }
            }
            for g in 0..groups {
                coming.step();
                let (first, end) = (columns * g / groups, columns * (g + 1) / groups);
                for p in 0..pairs {
                    let fetch = next_rows.step();
                    let values = &mut m.out[first * m.stride + first_row + ROWS * p..];
                    let out = Out { values, stride: m.stride, first: part == 0, fetch: fetch.0, fetch_bytes: fetch.1 };
                    let (pair, step) = (&panels[p], [part, count]);
                    match end - first {
                        1 => group::<B, 1>(pair, &acts, first, step, out),
                        2 => group::<B, 2>(pair, &acts, first, step, out),
                        3 => group::<B, 3>(pair, &acts, first, step, out),
                        4 => group::<B, 4>(pair, &acts, first, step, out),
                        5 => group::<B, 5>(pair, &acts, first, step, out),
                        _ => group::<B, 6>(pair, &acts, first, step, out),
                    }
                }
            }
        }
    }
}
