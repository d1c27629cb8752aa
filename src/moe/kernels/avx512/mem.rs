//! Loads and stores of the AVX-512 kernels.
//!
//! Owns: every access to memory through a pointer in this tier, behind references to arrays of the right size, and the panels. The kernels
//! themselves have no pointer arithmetic. Must not know: formats.

use std::arch::x86_64::*;

pub(super) use super::super::words::*;
use crate::moe::acts::{Act256, Line};

/// `[f(0), f(1), ..]`. As the library's `from_fn`, but compiled with this tier's instructions: functions of the library are not, so the
/// compiler cannot inline a closure that uses them, and every vector would go through memory.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn each<T: Copy, const N: usize>(f: impl Fn(usize) -> T) -> [T; N] {
    let mut out = [f(0); N];
    for (i, out) in out.iter_mut().enumerate().skip(1) {
        *out = f(i);
    }
    out
}

/// 64 bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn load64<T>(from: &[T; 64]) -> __m512i {
    const { assert!(size_of::<T>() == 1) };
    // SAFETY: an array of 64 bytes; the load has no alignment.
    unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
}

/// 32 bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn load32<T>(from: &[T; 32]) -> __m256i {
    const { assert!(size_of::<T>() == 1) };
    // SAFETY: an array of 32 bytes; the load has no alignment.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

/// 16 bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn load16<T>(from: &[T; 16]) -> __m128i {
    const { assert!(size_of::<T>() == 1) };
    // SAFETY: an array of 16 bytes; the load has no alignment.
    unsafe { _mm_loadu_si128(from.as_ptr().cast()) }
}

/// 32 bytes, in both halves: a load with no shuffle.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn twice32(from: &[u8; 32]) -> __m512i {
    _mm512_broadcast_i64x4(load32(from))
}

/// 16 words.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn words16(from: &[i16; 16]) -> __m256i {
    // SAFETY: an array of 32 bytes; the load has no alignment.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

/// 16 words, four in each number.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn four_words(from: &[u64; 4]) -> __m256i {
    // SAFETY: an array of 32 bytes; the load has no alignment.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

/// 8 words.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn words8(from: &[i16; 8]) -> __m128i {
    // SAFETY: an array of 16 bytes; the load has no alignment.
    unsafe { _mm_loadu_si128(from.as_ptr().cast()) }
}

/// 16 halves as floats.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn halves16(from: &[u16; 16]) -> __m512 {
    let (low, high) = from.split_at(8);
    let part = |w: &[u16]| eight_words(&[w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]]);
    _mm512_cvtph_ps(_mm256_set_m128i(part(high), part(low)))
}

/// 8 halves as floats.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn halves8(from: &[u16; 8]) -> __m256 {
    _mm256_cvtph_ps(eight_words(from))
}

/// 16 words of 32 bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn dwords16(from: &[u32; 16]) -> __m512i {
    // SAFETY: an array of 64 bytes; the load has no alignment.
    unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
}

/// 16 floats.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn floats16(from: &[f32; 16]) -> __m512 {
    // SAFETY: an array of 64 bytes; the load has no alignment.
    unsafe { _mm512_loadu_ps(from.as_ptr()) }
}

/// 8 floats.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn floats8(from: &[f32; 8]) -> __m256 {
    // SAFETY: an array of 32 bytes; the load has no alignment.
    unsafe { _mm256_loadu_ps(from.as_ptr()) }
}

/// Stores 16 floats.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn store_floats(to: &mut [f32; 16], value: __m512) {
    // SAFETY: an array of 64 bytes, exclusively borrowed; the store has no alignment.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), value) }
}

/// Stores 64 bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn store64(to: &mut [u8; 64], value: __m512i) {
    // SAFETY: an array of 64 bytes, exclusively borrowed; the store has no alignment.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), value) }
}

/// Four codes, in every lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn four_codes(q: &[i8; 256], step: usize) -> __m512i {
    assert!(step < 64);
    // SAFETY: bytes 4 * step .. 4 * step + 4 of 256, read without alignment.
    _mm512_set1_epi32(unsafe { q.as_ptr().cast::<i32>().add(step).read_unaligned() })
}

/// The sums of activations in groups 2i and 2i + 1, in every lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn two_sums<const GROUP: usize>(acts: &Act256, i: usize) -> __m512i {
    let sums: &[i16] = if GROUP == 16 { &acts.sum16 } else { &acts.sum32 };
    let pair = &sums.as_chunks::<2>().0[i];
    // SAFETY: two words, read as one dword without alignment.
    _mm512_set1_epi32(unsafe { pair.as_ptr().cast::<i32>().read_unaligned() })
}

/// Stores 16 dwords.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn store_dwords(to: &mut [u32; 16], value: __m512i) {
    // SAFETY: an array of 64 bytes, exclusively borrowed; the store has no alignment.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), value) }
}

/// 16 rows of 256 weights (64 for the float formats), a row per lane.
#[repr(C, align(64))]
pub(super) struct Panel {
    /// Step s: codes 4s..4s+4 of each row. For the float formats, weight s of each row as f32.
    pub(super) w: [[u8; 64]; 64],
    /// Scale of each group, per row.
    pub(super) scale: [[f32; 16]; 16],
    /// Min of each block of 32, per row.
    pub(super) min: [[f32; 16]; 8],
    /// Integer mins of groups 2i and 2i + 1 in the halves of a lane, per row.
    pub(super) mins: [[u32; 16]; 8],
    /// Scale of the integer mins, per row.
    pub(super) min_scale: [f32; 16],
}

/// The panels of 32 rows.
pub(super) type Pair = [Panel; 2];

/// Pairs of panels in the scratch memory.
const PAIRS: usize = 2;

/// Scratch lines as panels.
///
/// # Panics
/// If there are too few.
#[inline]
pub(super) fn panels(lines: &mut [Line]) -> &mut [Pair; PAIRS] {
    const { assert!(size_of::<[Pair; PAIRS]>() == super::super::PANEL_LINES * 64 && align_of::<Panel>() == 64) };
    assert!(lines.len() >= super::super::PANEL_LINES);
    // SAFETY: enough bytes at the alignment of a line, which is that of a panel; any bits are numbers; the borrow is exclusive.
    unsafe { &mut *lines.as_mut_ptr().cast() }
}

/// Dwords of 16 rows, a row per lane: result i holds bytes 4i..4i+4 of each row's 16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn transpose<'a>(row: impl Fn(usize) -> &'a [u8; 16]) -> [__m512i; 4] {
    // Register i holds rows i, i + 4, i + 8, i + 12, so that two rounds of unpacking inside the 128-bit lanes leave the rows in order.
    let rows: [__m512i; 4] = each(|i| {
        let v = _mm512_castsi128_si512(load16(row(i)));
        let v = _mm512_inserti32x4::<1>(v, load16(row(i + 4)));
        let v = _mm512_inserti32x4::<2>(v, load16(row(i + 8)));
        _mm512_inserti32x4::<3>(v, load16(row(i + 12)))
    });
    four_by_four(&rows)
}

/// As [`transpose`], of 32 bytes of each row: a third less work per byte.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn transpose32<'a>(row: impl Fn(usize) -> &'a [u8; 32]) -> [__m512i; 8] {
    let rows: [__m512i; 8] = each(|i| {
        let r = i + i / 4 * 4;
        _mm512_inserti64x4::<1>(_mm512_castsi256_si512(load32(row(r))), load32(row(r + 4)))
    });
    let (low, high) = (four_by_four(&rows[..4]), four_by_four(&rows[4..]));
    each(|i| {
        let (low, high) = (low[i % 4], high[i % 4]);
        if i < 4 { _mm512_shuffle_i32x4::<0b10_00_10_00>(low, high) } else { _mm512_shuffle_i32x4::<0b11_01_11_01>(low, high) }
    })
}

/// Transposes the dwords of four registers in each 128-bit lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn four_by_four(rows: &[__m512i]) -> [__m512i; 4] {
    let (a, b) = (_mm512_unpacklo_epi32(rows[0], rows[1]), _mm512_unpackhi_epi32(rows[0], rows[1]));
    let (c, d) = (_mm512_unpacklo_epi32(rows[2], rows[3]), _mm512_unpackhi_epi32(rows[2], rows[3]));
    [_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c), _mm512_unpacklo_epi64(b, d), _mm512_unpackhi_epi64(b, d)]
}
