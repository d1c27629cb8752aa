//! AVX2: F32, F16 and BF16.
//!
//! Owns: products of rows with one to four columns of [`ActFloat`]: weights widened to f32 exactly, FMA with f32 activations.

use std::arch::x86_64::*;
use std::ops::Range;

use super::super::Mul;
use super::super::ahead::{AHEAD, Ahead, prefetch};
use super::mem::*;
use crate::moe::acts::ActFloat;
use crate::moe::blocks::*;

/// A format of this family.
pub(super) trait Float: Block {
    /// Eight weights.
    ///
    /// # Safety
    /// The CPU has AVX2, FMA and F16C.
    unsafe fn eight(w: &[Self; 8]) -> __m256;

    /// Fewer than eight weights, then zeros.
    ///
    /// # Safety
    /// As for `eight`.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn some(w: &[Self]) -> __m256 {
        let mut padded = [0u8; 32];
        // SAFETY: blocks are bytes (the contract of `Block`).
        let bytes = unsafe { std::slice::from_raw_parts(w.as_ptr().cast::<u8>(), size_of_val(w)) };
        padded[..bytes.len()].copy_from_slice(bytes);
        // SAFETY: eight blocks of at most 4 bytes, of alignment 1 and any bits; the instructions are the caller's promise.
        unsafe { Self::eight(&*padded.as_ptr().cast()) }
    }
}

impl Float for BlockF32 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn eight(w: &[Self; 8]) -> __m256 {
        // SAFETY: 32 bytes; the load has no alignment.
        unsafe { _mm256_loadu_ps(w.as_ptr().cast()) }
    }
}

impl Float for BlockF16 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn eight(w: &[Self; 8]) -> __m256 {
        // SAFETY: 16 bytes; the load has no alignment.
        _mm256_cvtph_ps(unsafe { _mm_loadu_si128(w.as_ptr().cast()) })
    }
}

impl Float for BlockBf16 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn eight(w: &[Self; 8]) -> __m256 {
        // SAFETY: 16 bytes; the load has no alignment.
        let words = unsafe { _mm_loadu_si128(w.as_ptr().cast()) };
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(words)))
    }
}

/// Some rows times `N` columns.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn few<B: Float, const N: usize>(m: &mut Mul<'_>, rows: Range<usize>, first: usize) {
    let columns: [&[ActFloat]; N] = each(|n| m.columns[first + n].blocks::<ActFloat>());
    let stride = m.rows.stride();
    let ahead = Ahead::new(m.rows.start(), m.rows.len() * stride, m.next);
    for r in rows {
        let row = m.rows.row::<B>(r);
        let columns: [&[ActFloat]; N] = each(|n| &columns[n][..row.len().div_ceil(256)]);
        let fetch = ahead.at(r * stride + AHEAD);
        let mut sums = [[_mm256_setzero_ps(); 2]; N];
        let (chunks, rest) = row.as_chunks::<32>();
        for (i, chunk) in chunks.iter().enumerate() {
            prefetch(fetch.wrapping_add(i * 32 * size_of::<B>()), 32 * size_of::<B>());
            let (w, _) = chunk.as_chunks::<8>();
            for j in 0..4 {
                // SAFETY: this function has the instructions.
                let w = unsafe { B::eight(&w[j]) };
                for n in 0..N {
                    let a = columns[n][i / 8].x.as_chunks::<8>().0;
                    sums[n][j % 2] = _mm256_fmadd_ps(w, floats8(&a[i % 8 * 4 + j]), sums[n][j % 2]);
                }
            }
        }
        for (j, part) in rest.chunks(8).enumerate() {
            // SAFETY: this function has the instructions.
            let w = unsafe { B::some(part) };
            let at = chunks.len() * 4 + j;
            for n in 0..N {
                let a = columns[n][at / 32].x.as_chunks::<8>().0;
                sums[n][j % 2] = _mm256_fmadd_ps(w, floats8(&a[at % 32]), sums[n][j % 2]);
            }
        }
        for n in 0..N {
            m.out[(first + n) * m.stride + r] = total(_mm256_add_ps(sums[n][0], sums[n][1]));
        }
    }
}
