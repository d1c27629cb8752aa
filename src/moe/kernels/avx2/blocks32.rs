//! AVX2: the formats with blocks of 32, and IQ4_XS.
//!
//! Owns: the in-register decoding of one block at a time, and the product of rows with one to four columns of [`Act32`]. Must not know: how
//! columns are grouped.
//!
//! `vpmaddubsw` takes unsigned codes: for the formats with an offset, `|w|` is multiplied with `sign(w) * a`; the largest sum of two products
//! is 2 * 128 * 127 = 32512 (Q8_0), which 16 bits hold. Products of the scales of eight blocks are computed at once and spread with `vpermps`.

use std::arch::x86_64::*;
use std::ops::Range;

use super::super::Mul;
use super::super::ahead::{AHEAD, Ahead, prefetch};
use super::mem::*;
use crate::moe::acts::Act32;
use crate::moe::blocks::*;

/// A format of this family.
pub(super) trait Blocks32: Block {
    /// Blocks that hold 256 weights.
    const PER_256: usize;
    /// Whether codes come out signed; if not, the format has mins.
    const SIGNED: bool;

    /// The codes of 32 weights: part `i` of 256.
    ///
    /// # Safety
    /// The CPU has AVX2, FMA and F16C.
    unsafe fn codes(blocks: &[Self], i: usize) -> __m256i;

    /// Scales and mins of up to eight times 32 weights; what is missing is 0.
    ///
    /// # Safety
    /// As for `codes`.
    unsafe fn scales(blocks: &[Self]) -> (__m256, __m256);
}

/// Nibbles in order.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn nibbles(qs: &[u8; 16]) -> __m256i {
    let q = load16(qs);
    let both = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(q), _mm_srli_epi16::<4>(q));
    _mm256_and_si256(both, _mm256_set1_epi8(15))
}

/// Halves of up to eight blocks as f32.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn halves<B>(blocks: &[B], d: impl Fn(&B) -> Half) -> __m256 {
    halves8(&each(|i| if i < blocks.len() { d(&blocks[i]).bits() } else { 0 }))
}

/// 16-entry table look-up.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn look_up(values: &[i8; 16], codes: __m256i) -> __m256i {
    _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load16(values)), codes)
}

/// Bit i of `qh`, as 16 in byte i.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn fifth(qh: [u8; 4]) -> __m256i {
    let ones = 0x0101_0101_0101_0101i64;
    let spread = _mm256_shuffle_epi8(_mm256_set1_epi32(i32::from_le_bytes(qh)), _mm256_set_epi64x(3 * ones, 2 * ones, ones, 0));
    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201u64 as i64);
    _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit), _mm256_set1_epi8(16))
}

macro_rules! blocks32 {
    ($($block:ident: $signed:literal, |$b:ident| $codes:expr, |$all:ident| $scales:expr;)*) => {
        $(impl Blocks32 for $block {
            const PER_256: usize = 8;
            const SIGNED: bool = $signed;

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn codes(blocks: &[Self], i: usize) -> __m256i {
                let $b = &blocks[i];
                $codes
            }

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn scales($all: &[Self]) -> (__m256, __m256) {
                $scales
            }
        })*
    };
}

blocks32! {
    BlockQ4_0: true, |b| _mm256_sub_epi8(nibbles(&b.qs), _mm256_set1_epi8(8)), |all| (halves(all, |b| b.d), _mm256_setzero_ps());
    BlockQ4_1: false, |b| nibbles(&b.qs), |all| (halves(all, |b| b.d), halves(all, |b| b.m));
    BlockQ5_0: true, |b| _mm256_sub_epi8(_mm256_or_si256(nibbles(&b.qs), fifth(b.qh)), _mm256_set1_epi8(16)), |all| (halves(all, |b| b.d), _mm256_setzero_ps());
    BlockQ5_1: false, |b| _mm256_or_si256(nibbles(&b.qs), fifth(b.qh)), |all| (halves(all, |b| b.d), halves(all, |b| b.m));
    BlockQ8_0: true, |b| load32(&b.qs), |all| (halves(all, |b| b.d), _mm256_setzero_ps());
    BlockIq4Nl: true, |b| look_up(&IQ4_VALUES, nibbles(&b.qs)), |all| (halves(all, |b| b.d), _mm256_setzero_ps());
    BlockMxfp4: true, |b| look_up(&FP4_VALUES, nibbles(&b.qs)), |all| (exponents(all), _mm256_setzero_ps());
}

/// `e8m0_half` of up to eight blocks.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn exponents(blocks: &[BlockMxfp4]) -> __m256 {
    let mut bytes = 0u64;
    for (i, b) in blocks.iter().take(8).enumerate() {
        bytes |= u64::from(b.e) << (8 * i);
    }
    let e = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(opaque(bytes) as i64));
    let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(e, _mm256_set1_epi32(1)));
    let small = _mm256_sllv_epi32(_mm256_set1_epi32(0x0020_0000), e);
    let is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e);
    _mm256_castsi256_ps(_mm256_blendv_epi8(normal, small, is_small))
}

impl Blocks32 for BlockIq4Xs {
    const PER_256: usize = 1;
    const SIGNED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes(blocks: &[Self], i: usize) -> __m256i {
        look_up(&IQ4_VALUES, nibbles(&blocks[0].qs.as_chunks::<16>().0[i]))
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn scales(blocks: &[Self]) -> (__m256, __m256) {
        let b = &blocks[0];
        let index = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
        let low = _mm256_set1_epi32(u32::from_le_bytes(b.scales_l) as i32);
        let low = _mm256_and_si256(_mm256_srlv_epi32(low, _mm256_slli_epi32::<2>(index)), _mm256_set1_epi32(15));
        let high = _mm256_slli_epi32::<4>(_mm256_set1_epi32(i32::from(u16::from_le_bytes(b.scales_h))));
        let high = _mm256_and_si256(_mm256_srlv_epi32(high, _mm256_slli_epi32::<1>(index)), _mm256_set1_epi32(48));
        let scales = _mm256_sub_epi32(_mm256_or_si256(low, high), _mm256_set1_epi32(32));
        let d = _mm256_set1_ps(half(b.d));
        (_mm256_mul_ps(_mm256_cvtepi32_ps(scales), d), _mm256_setzero_ps())
    }
}

/// Sums of `N` columns: two chains of FMAs each, and the mins. They go in and out of functions by value, so that they stay in registers.
#[derive(Clone, Copy)]
struct Sums<const N: usize> {
    even: [__m256; N],
    odd: [__m256; N],
    mins: [__m256; N],
}

/// Adds the products of 256 weights, or, if not `WHOLE`, of as many times 32 as there are blocks.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add<B: Blocks32, const N: usize, const WHOLE: bool>(mut sums: Sums<N>, blocks: &[B], acts: [&Act32; N]) -> Sums<N> {
    // SAFETY: this function has the instructions.
    let (d, mins) = unsafe { B::scales(blocks) };
    let scales: [__m256; N] = each(|n| _mm256_mul_ps(d, floats8(&acts[n].d)));
    for i in 0..if WHOLE { 8 } else { blocks.len() } {
        // SAFETY: this function has the instructions.
        let w = unsafe { B::codes(blocks, i) };
        let size = _mm256_abs_epi8(w);
        let pick = _mm256_set1_epi32(i as i32);
        for n in 0..N {
            let a = load32(&acts[n].q.as_chunks::<32>().0[i]);
            let pairs = if B::SIGNED { _mm256_maddubs_epi16(size, _mm256_sign_epi8(a, w)) } else { _mm256_maddubs_epi16(w, a) };
            let dot = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
            let scale = _mm256_permutevar8x32_ps(scales[n], pick);
            if i % 2 == 0 {
                sums.even[n] = _mm256_fmadd_ps(dot, scale, sums.even[n]);
            } else {
                sums.odd[n] = _mm256_fmadd_ps(dot, scale, sums.odd[n]);
            }
        }
    }
    if !B::SIGNED {
        for n in 0..N {
            sums.mins[n] = _mm256_fmadd_ps(mins, floats8(&acts[n].s), sums.mins[n]);
        }
    }
    sums
}

/// The last blocks of a row, if they are fewer than eight: apart, so that the code for eight is compiled for exactly eight.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
fn add_rest<B: Blocks32, const N: usize>(sums: Sums<N>, blocks: &[B], acts: [&Act32; N]) -> Sums<N> {
    add::<B, N, false>(sums, blocks, acts)
}

/// Some rows times `N` columns.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn few<B: Blocks32, const N: usize>(m: &mut Mul<'_>, rows: Range<usize>, first: usize) {
    let columns: [&[Act32]; N] = each(|n| m.columns[first + n].blocks::<Act32>());
    let stride = m.rows.stride();
    let ahead = Ahead::new(m.rows.start(), m.rows.len() * stride, m.next);
    for r in rows {
        let row = m.rows.row::<B>(r);
        let count = row.len().div_ceil(B::PER_256);
        let columns: [&[Act32]; N] = each(|n| &columns[n][..count]);
        let fetch = ahead.at(r * stride + AHEAD);
        let zero = _mm256_setzero_ps();
        let mut sums = Sums { even: [zero; N], odd: [zero; N], mins: [zero; N] };
        let whole = row.chunks_exact(B::PER_256);
        let rest = whole.remainder();
        for (i, blocks) in whole.enumerate() {
            let bytes = B::PER_256 * size_of::<B>();
            prefetch(fetch.wrapping_add(i * bytes), bytes);
            sums = add::<B, N, true>(sums, blocks, each(|n| &columns[n][i]));
        }
        if !rest.is_empty() {
            sums = add_rest(sums, rest, each(|n| &columns[n][count - 1]));
        }
        for n in 0..N {
            m.out[(first + n) * m.stride + r] = total(_mm256_add_ps(_mm256_add_ps(sums.even[n], sums.odd[n]), sums.mins[n]));
        }
    }
}
