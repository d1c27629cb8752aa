//! Loads and stores of the AVX2 kernels.
//!
//! Owns: every access to memory through a pointer in this tier, behind references to arrays of the right size. Must not know: formats.

use std::arch::x86_64::*;

pub(super) use super::super::words::*;
use crate::moe::acts::Act256;
use crate::moe::blocks::Block;

/// `[f(0), f(1), ..]`, compiled with this tier's instructions; see the AVX-512 function of the same name.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn each<T: Copy, const N: usize>(f: impl Fn(usize) -> T) -> [T; N] {
    let mut out = [f(0); N];
    for (i, out) in out.iter_mut().enumerate().skip(1) {
        *out = f(i);
    }
    out
}

/// 32 bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn load32<T>(from: &[T; 32]) -> __m256i {
    const { assert!(size_of::<T>() == 1) };
    // SAFETY: an array of 32 bytes; the load has no alignment.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

/// 16 bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn load16<T>(from: &[T; 16]) -> __m128i {
    const { assert!(size_of::<T>() == 1) };
    // SAFETY: an array of 16 bytes; the load has no alignment.
    unsafe { _mm_loadu_si128(from.as_ptr().cast()) }
}

/// 16 words.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn words16(from: &[i16; 16]) -> __m256i {
    // SAFETY: an array of 32 bytes; the load has no alignment.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

/// 8 words.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn words8(from: &[i16; 8]) -> __m128i {
    // SAFETY: an array of 16 bytes; the load has no alignment.
    unsafe { _mm_loadu_si128(from.as_ptr().cast()) }
}

/// 8 halves as floats.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn halves8(from: &[u16; 8]) -> __m256 {
    _mm256_cvtph_ps(eight_words(from))
}

/// 8 floats.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn floats8(from: &[f32; 8]) -> __m256 {
    // SAFETY: an array of 32 bytes; the load has no alignment.
    unsafe { _mm256_loadu_ps(from.as_ptr()) }
}

/// 8 dwords.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn dwords8(from: &[u32; 8]) -> __m256i {
    // SAFETY: an array of 32 bytes; the load has no alignment.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

/// Stores 32 bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn store32(to: &mut [u8; 32], value: __m256i) {
    // SAFETY: an array of 32 bytes, exclusively borrowed; the store has no alignment.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), value) }
}

/// Stores 8 dwords.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn store_dwords(to: &mut [u32; 8], value: __m256i) {
    // SAFETY: an array of 32 bytes, exclusively borrowed; the store has no alignment.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), value) }
}

/// Stores 8 floats.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn store_floats(to: &mut [f32; 8], value: __m256) {
    // SAFETY: an array of 32 bytes, exclusively borrowed; the store has no alignment.
    unsafe { _mm256_storeu_ps(to.as_mut_ptr(), value) }
}

/// Four codes, in every lane.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn four_codes(q: &[i8; 256], step: usize) -> __m256i {
    assert!(step < 64);
    // SAFETY: bytes 4 * step .. 4 * step + 4 of 256, read without alignment.
    _mm256_set1_epi32(unsafe { q.as_ptr().cast::<i32>().add(step).read_unaligned() })
}

/// The sums of activations in groups 2i and 2i + 1, in every lane.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn two_sums<const GROUP: usize>(acts: &Act256, i: usize) -> __m256i {
    let sums: &[i16] = if GROUP == 16 { &acts.sum16 } else { &acts.sum32 };
    let pair = &sums.as_chunks::<2>().0[i];
    // SAFETY: two words, read as one dword without alignment.
    _mm256_set1_epi32(unsafe { pair.as_ptr().cast::<i32>().read_unaligned() })
}

/// The first 16 bytes of a block.
#[inline(always)]
pub(super) fn first_chunk<B: Block>(block: &B) -> &[u8; 16] {
    const { assert!(size_of::<B>() >= 16) };
    // SAFETY: a block is bytes (the contract of `Block`), and has at least 16.
    unsafe { &*std::ptr::from_ref(block).cast() }
}

/// The last 16 bytes of a block.
#[inline(always)]
pub(super) fn last_chunk<B: Block>(block: &B) -> &[u8; 16] {
    const { assert!(size_of::<B>() >= 16) };
    // SAFETY: as above; the result ends where the block ends.
    unsafe { &*std::ptr::from_ref(block).byte_add(size_of::<B>() - 16).cast() }
}

/// The same value; the compiler does not see where it comes from. It would add up a chain of additions as a tree, which keeps more values alive
/// than there are registers.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn in_order(mut value: __m256i) -> __m256i {
    // SAFETY: no instruction at all.
    unsafe { std::arch::asm!("/* {0} */", inout(ymm_reg) value, options(pure, nomem, nostack, preserves_flags)) };
    value
}

/// Sum of eight floats.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn total(v: __m256) -> f32 {
    let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
}
