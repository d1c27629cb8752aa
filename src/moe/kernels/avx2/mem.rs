//! Loads and prefetches of the AVX2 kernels.
//!
//! Owns: every access to memory through a pointer in this tier, behind references to arrays of the right size. Must not know: formats.

use std::arch::x86_64::*;

pub(super) use super::super::words::*;
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

/// Asks for the lines of `bytes` bytes to be brought to the first-level cache. Harmless at any address.
#[inline(always)]
pub(super) fn prefetch(at: *const u8, bytes: usize) {
    for offset in (0..bytes).step_by(64) {
        // SAFETY: a prefetch does not fault and changes nothing but caches.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(offset).cast()) };
    }
}

/// How far ahead of the blocks in work weights are prefetched, in bytes. A thread needs some 3 KiB in flight (30 GB/s for 100 ns), but asks
/// for them in bursts; Q4_K, T = 1, one thread of a Zen 5: 23 GB/s at 2 KiB, 28 at 4, 32 at 8, 35 at 12 and 16, of 38 that a plain loop reads.
pub(super) const AHEAD: usize = 12 << 10;

/// Where row `r` of rows that end after `len` bytes continues `distance` bytes on: in them, or behind their end in `next`.
#[inline(always)]
pub(super) fn ahead(start: *const u8, at: usize, len: usize, next: *const u8) -> *const u8 {
    if at < len || next.is_null() { start.wrapping_add(at) } else { next.wrapping_add(at - len) }
}

/// Sum of eight floats.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn total(v: __m256) -> f32 {
    let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
}
