//! x86: scattered small numbers on their way into vectors.
//!
//! Owns: the loads of block scales, which lie two bytes each among the codes. Used by both x86 tiers. Must not know: formats.

use std::arch::x86_64::*;

use crate::moe::blocks::Half;

/// The same value, in a general register: the compiler does not see where it comes from. It would load single words straight into vectors
/// with `vpinsrw`, which merges them into whatever register it finds, often the sums of the last round, and so makes each round wait for
/// the one before. Q4_0 runs at 20 GB/s that way and at 37 without (one thread, from the cache).
#[inline(always)]
pub(in crate::moe::kernels) fn opaque(mut value: u64) -> u64 {
    // SAFETY: no instruction at all.
    unsafe { std::arch::asm!("/* {0} */", inout(reg) value, options(pure, nomem, nostack, preserves_flags)) };
    value
}

/// Four words in 64 bits.
#[inline(always)]
pub(in crate::moe::kernels) fn four_words(w: [u16; 4]) -> u64 {
    opaque(u64::from(w[0]) | u64::from(w[1]) << 16 | u64::from(w[2]) << 32 | u64::from(w[3]) << 48)
}

/// One half as f32.
#[inline]
#[target_feature(enable = "f16c")]
pub(in crate::moe::kernels) fn half(h: Half) -> f32 {
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi64_si128(opaque(u64::from(h.bits())) as i64)))
}

/// Eight words.
#[inline]
#[target_feature(enable = "sse2")]
pub(in crate::moe::kernels) fn eight_words(w: &[u16; 8]) -> __m128i {
    _mm_set_epi64x(four_words([w[4], w[5], w[6], w[7]]) as i64, four_words([w[0], w[1], w[2], w[3]]) as i64)
}
