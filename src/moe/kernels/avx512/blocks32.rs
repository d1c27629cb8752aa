//! AVX-512: the formats with blocks of 32, and IQ4_XS, with few columns.
//!
//! Owns: the in-register decoding of eight blocks at a time, and the product of rows with one to three columns of [`Act32`]. Must not know:
//! panels.
//!
//! Codes come out unsigned. A register holds two blocks; its eight-lane halves are scaled by the product of the two f32 scales, which are
//! computed for eight blocks at once and spread with `vpermps`. Mins are one FMA per eight blocks with the scaled sums that the activations carry, and so are
//! offsets: an offset is a min of minus the offset times the scale.

use std::arch::x86_64::*;

use super::super::Mul;
use super::super::ahead::{AHEAD, Ahead, prefetch};
use super::mem::*;
use super::supers::and_or;
use crate::moe::acts::Act32;
use crate::moe::blocks::*;

/// Eight decoded blocks of 32.
pub(super) struct Codes {
    /// Codes, two blocks to a register.
    pub(super) w: [__m512i; 4],
    /// A scale per block.
    pub(super) d: __m256,
    /// A min per block.
    pub(super) m: __m256,
}

/// A format of this family.
pub(super) trait Blocks32: Block {
    /// Blocks that hold 256 weights.
    const PER_256: usize;
    /// What is subtracted from codes; 0 if the format has mins, which are added.
    const OFFSET: i32;

    /// Decodes up to [`Self::PER_256`] blocks; what is missing is 0.
    ///
    /// # Safety
    /// The CPU has AVX-512 F, BW, VL and DQ, and F16C.
    unsafe fn codes(blocks: &[Self]) -> Codes;
}

/// 16 bytes of each of two blocks, each twice, the second time shifted right by 4: nibbles in order, with rubbish above.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn spread(a: &[u8; 16], b: Option<&[u8; 16]>) -> __m512i {
    let low = _mm256_broadcastsi128_si256(load16(a));
    let high = match b {
        Some(b) => _mm256_broadcastsi128_si256(load16(b)),
        None => _mm256_setzero_si256(),
    };
    let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
    _mm512_srlv_epi64(both, _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0))
}

/// The nibbles of up to eight blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn nibbles<B>(blocks: &[B], qs: impl Fn(&B) -> &[u8; 16]) -> [__m512i; 4] {
    let nibble = _mm512_set1_epi8(15);
    each(|i| match blocks.get(2 * i) {
        Some(a) => {
            let b = blocks.get(2 * i + 1).map(&qs);
            _mm512_and_si512(spread(qs(a), b), nibble)
        }
        None => _mm512_setzero_si512(),
    })
}

/// Halves of up to eight blocks as f32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn scales<B>(blocks: &[B], d: impl Fn(&B) -> Half) -> __m256 {
    halves8(&each(|i| if i < blocks.len() { d(&blocks[i]).bits() } else { 0 }))
}

/// 16-entry table look-up.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn look_up(values: &[i8; 16], bias: i8, codes: __m512i) -> __m512i {
    let table = _mm_add_epi8(load16(values), _mm_set1_epi8(bias));
    _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), codes)
}

impl Blocks32 for BlockQ4_0 {
    const PER_256: usize = 8;
    const OFFSET: i32 = 8;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn codes(blocks: &[Self]) -> Codes {
        Codes { w: nibbles(blocks, |b| &b.qs), d: scales(blocks, |b| b.d), m: _mm256_setzero_ps() }
    }
}

impl Blocks32 for BlockQ4_1 {
    const PER_256: usize = 8;
    const OFFSET: i32 = 0;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn codes(blocks: &[Self]) -> Codes {
        Codes { w: nibbles(blocks, |b| &b.qs), d: scales(blocks, |b| b.d), m: scales(blocks, |b| b.m) }
    }
}

/// Adds 16 to the codes whose bit in two blocks' `qh` is set: a mask of 64 bits is exactly that.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn fifth_bits<B>(w: [__m512i; 4], blocks: &[B], qh: impl Fn(&B) -> [u8; 4]) -> [__m512i; 4] {
    let word = |i: usize| if i < blocks.len() { u64::from(u32::from_le_bytes(qh(&blocks[i]))) } else { 0 };
    each(|i| {
        let bits = word(2 * i) | word(2 * i + 1) << 32;
        _mm512_mask_add_epi8(w[i], bits, w[i], _mm512_set1_epi8(16))
    })
}

impl Blocks32 for BlockQ5_0 {
    const PER_256: usize = 8;
    const OFFSET: i32 = 16;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn codes(blocks: &[Self]) -> Codes {
        let w = fifth_bits(nibbles(blocks, |b| &b.qs), blocks, |b| b.qh);
        Codes { w, d: scales(blocks, |b| b.d), m: _mm256_setzero_ps() }
    }
}

impl Blocks32 for BlockQ5_1 {
    const PER_256: usize = 8;
    const OFFSET: i32 = 0;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn codes(blocks: &[Self]) -> Codes {
        let w = fifth_bits(nibbles(blocks, |b| &b.qs), blocks, |b| b.qh);
        Codes { w, d: scales(blocks, |b| b.d), m: scales(blocks, |b| b.m) }
    }
}

impl Blocks32 for BlockQ8_0 {
    const PER_256: usize = 8;
    const OFFSET: i32 = 128;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn codes(blocks: &[Self]) -> Codes {
        let bias = _mm512_set1_epi8(-128);
        let w = each(|i| match blocks.get(2 * i) {
            Some(a) => {
                let high = match blocks.get(2 * i + 1) {
                    Some(b) => load32(&b.qs),
                    None => _mm256_setzero_si256(),
                };
                _mm512_xor_si512(_mm512_inserti64x4::<1>(_mm512_castsi256_si512(load32(&a.qs)), high), bias)
            }
            None => _mm512_setzero_si512(),
        });
        Codes { w, d: scales(blocks, |b| b.d), m: _mm256_setzero_ps() }
    }
}

impl Blocks32 for BlockIq4Nl {
    const PER_256: usize = 8;
    const OFFSET: i32 = 128;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn codes(blocks: &[Self]) -> Codes {
        let codes = nibbles(blocks, |b| &b.qs);
        let w = each(|i| look_up(&IQ4_VALUES, -128, codes[i]));
        Codes { w, d: scales(blocks, |b| b.d), m: _mm256_setzero_ps() }
    }
}

impl Blocks32 for BlockMxfp4 {
    const PER_256: usize = 8;
    const OFFSET: i32 = 12;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn codes(blocks: &[Self]) -> Codes {
        let codes = nibbles(blocks, |b| &b.qs);
        let w = each(|i| look_up(&FP4_VALUES, 12, codes[i]));
        let mut bytes = 0u64;
        for (i, b) in blocks.iter().take(8).enumerate() {
            bytes |= u64::from(b.e) << (8 * i);
        }
        // `e8m0_half`, eight at once.
        let e = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(opaque(bytes) as i64));
        let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(e, _mm256_set1_epi32(1)));
        let small = _mm256_cmplt_epi32_mask(e, _mm256_set1_epi32(2));
        let bits = _mm256_mask_sllv_epi32(normal, small, _mm256_set1_epi32(0x0020_0000), e);
        Codes { w, d: _mm256_castsi256_ps(bits), m: _mm256_setzero_ps() }
    }
}

impl Blocks32 for BlockIq4Xs {
    const PER_256: usize = 1;
    const OFFSET: i32 = 128;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn codes(blocks: &[Self]) -> Codes {
        let b = &blocks[0];
        let sub = b.qs.as_chunks::<16>().0;
        let codes = nibbles(sub, |qs| qs);
        let w = each(|i| look_up(&IQ4_VALUES, -128, codes[i]));
        // Low four bits of scale i: nibble i of a 32-bit word; high two: bits 2i of a 16-bit word.
        let index = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
        let low = _mm256_set1_epi32(u32::from_le_bytes(b.scales_l) as i32);
        let low = _mm256_and_si256(_mm256_srlv_epi32(low, _mm256_slli_epi32::<2>(index)), _mm256_set1_epi32(15));
        let high = _mm256_slli_epi32::<4>(_mm256_set1_epi32(i32::from(u16::from_le_bytes(b.scales_h))));
        let high = _mm256_and_si256(_mm256_srlv_epi32(high, _mm256_slli_epi32::<1>(index)), _mm256_set1_epi32(48));
        let scales = _mm256_sub_epi32(_mm256_or_si256(low, high), _mm256_set1_epi32(32));
        let d = _mm256_set1_ps(half(b.d));
        Codes { w, d: _mm256_mul_ps(_mm256_cvtepi32_ps(scales), d), m: _mm256_setzero_ps() }
    }
}

/// Sums of `N` columns: two chains of FMAs each, and the mins (or scales, for the offset). They go in and out of functions by value, so that they stay in registers.
#[derive(Clone, Copy)]
struct Sums<const N: usize> {
    even: [__m512; N],
    odd: [__m512; N],
    mins: [__m256; N],
}

/// Indices that give the lower half of register `i` entry 2i of eight, the upper half entry 2i + 1.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn pair(i: usize) -> __m512i {
    let (low, high) = (0x1_0000_0001 * 2 * i as i64, 0x1_0000_0001 * (2 * i as i64 + 1));
    _mm512_set_epi64(high, high, high, high, low, low, low, low)
}

/// Adds the products of up to 256 weights.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn add<B: Blocks32, const N: usize>(mut sums: Sums<N>, blocks: &[B], acts: [&Act32; N]) -> Sums<N> {
    // SAFETY: this function has the instructions.
    let codes = unsafe { B::codes(blocks) };
    for n in 0..N {
        let a = acts[n];
        let q = a.q.as_chunks::<64>().0;
        let d = _mm512_castps256_ps512(_mm256_mul_ps(codes.d, floats8(&a.d)));
        let scale = |i: usize| _mm512_permutexvar_ps(pair(i), d);
        let dot = |i: usize| _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_setzero_si512(), codes.w[i], load64(&q[i])));
        sums.even[n] = _mm512_fmadd_ps(dot(0), scale(0), sums.even[n]);
        sums.odd[n] = _mm512_fmadd_ps(dot(1), scale(1), sums.odd[n]);
        sums.even[n] = _mm512_fmadd_ps(dot(2), scale(2), sums.even[n]);
        sums.odd[n] = _mm512_fmadd_ps(dot(3), scale(3), sums.odd[n]);
        sums.mins[n] = _mm256_fmadd_ps(if B::OFFSET == 0 { codes.m } else { codes.d }, floats8(&a.s), sums.mins[n]);
    }
    sums
}

/// The last blocks of a row, if they are fewer than eight: apart, so that the code for eight is compiled for exactly eight.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn add_rest<B: Blocks32, const N: usize>(sums: Sums<N>, blocks: &[B], acts: [&Act32; N]) -> Sums<N> {
    add(sums, blocks, acts)
}

/// Rows times `N` columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn few<B: Blocks32, const N: usize>(m: &mut Mul<'_>) {
    let columns: [&[Act32]; N] = each(|n| m.columns[n].blocks::<Act32>());
    let stride = m.rows.stride();
    let ahead = Ahead::new(m.rows.start(), m.rows.len() * stride, m.next);
    for r in 0..m.rows.len() {
        let row = m.rows.row::<B>(r);
        let count = row.len().div_ceil(B::PER_256);
        let columns: [&[Act32]; N] = each(|n| &columns[n][..count]);
        let fetch = ahead.at(r * stride + AHEAD);
        let zero = _mm512_setzero_ps();
        let mut sums = Sums { even: [zero; N], odd: [zero; N], mins: [_mm256_setzero_ps(); N] };
        let whole = row.chunks_exact(B::PER_256);
        let rest = whole.remainder();
        for (i, blocks) in whole.enumerate() {
            let bytes = B::PER_256 * size_of::<B>();
            prefetch(fetch.wrapping_add(i * bytes), bytes);
            sums = add(sums, blocks, each(|n| &columns[n][i]));
        }
        if !rest.is_empty() {
            sums = add_rest(sums, rest, each(|n| &columns[n][count - 1]));
        }
        for n in 0..N {
            let factor = if B::OFFSET == 0 { 1.0 } else { -B::OFFSET as f32 };
            let mins = _mm512_zextps256_ps512(_mm256_mul_ps(sums.mins[n], _mm256_set1_ps(factor)));
            m.out[n * m.stride + r] = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sums.even[n], sums.odd[n]), mins));
        }
    }
}

/// The fifth bits of Q5_0 and Q5_1 in 16 rows: bits 4 of step `s`, where `bits` holds `qh` of each row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn fifth_of_step(bits: __m512i, s: u32, low: __m512i) -> __m512i {
    // Four bits of the word go to bit 4 of the four bytes: a multiplication by 2^0 + 2^7 + 2^14 + 2^21 copies them there (they do not meet).
    let four = _mm512_and_si512(_mm512_srl_epi32(bits, _mm_cvtsi32_si128(4 * s as i32)), _mm512_set1_epi32(15));
    let copies = _mm512_mullo_epi32(four, _mm512_set1_epi32(0x0020_4081));
    and_or(_mm512_slli_epi32::<4>(copies), _mm512_set1_epi8(16), low)
}
