//! AVX-512: F32, F16 and BF16.
//!
//! Owns: products of rows with one to three columns of [`ActFloat`]. Weights are widened to f32 exactly and multiplied with f32 activations
//! (ggml rounds the activations to the weights' type; this does not). Two bytes a weight are memory-bound long before the FMAs are.

use std::arch::x86_64::*;

use super::super::Mul;
use super::super::ahead::{AHEAD, Ahead, prefetch};
use super::mem::*;
use crate::moe::acts::ActFloat;
use crate::moe::blocks::*;

/// A format of this family.
pub(super) trait Float: Block {
    /// 16 weights.
    ///
    /// # Safety
    /// The CPU has AVX-512 F, BW and VL.
    unsafe fn sixteen(w: &[Self; 16]) -> __m512;

    /// Fewer than 16 weights, then zeros.
    ///
    /// # Safety
    /// As for `sixteen`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn some(w: &[Self]) -> __m512 {
        let mut padded = [0u8; 64];
        // SAFETY: blocks are bytes (the contract of `Block`).
        let bytes = unsafe { std::slice::from_raw_parts(w.as_ptr().cast::<u8>(), size_of_val(w)) };
        padded[..bytes.len()].copy_from_slice(bytes);
        // SAFETY: 16 blocks of at most 4 bytes, of alignment 1 and any bits; the instructions are the caller's promise.
        unsafe { Self::sixteen(&*padded.as_ptr().cast()) }
    }
}

impl Float for BlockF32 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn sixteen(w: &[Self; 16]) -> __m512 {
        // SAFETY: 64 bytes; the load has no alignment.
        unsafe { _mm512_loadu_ps(w.as_ptr().cast()) }
    }
}

impl Float for BlockF16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn sixteen(w: &[Self; 16]) -> __m512 {
        // SAFETY: 32 bytes; the load has no alignment.
        _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(w.as_ptr().cast()) })
    }
}

impl Float for BlockBf16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn sixteen(w: &[Self; 16]) -> __m512 {
        // SAFETY: 32 bytes; the load has no alignment.
        let words = unsafe { _mm256_loadu_si256(w.as_ptr().cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(words)))
    }
}

/// Rows times `N` columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn few<B: Float, const N: usize>(m: &mut Mul<'_>) {
    let columns: [&[ActFloat]; N] = each(|n| m.columns[n].blocks::<ActFloat>());
    let stride = m.rows.stride();
    let ahead = Ahead::new(m.rows.start(), m.rows.len() * stride, m.next);
    for r in 0..m.rows.len() {
        let row = m.rows.row::<B>(r);
        let columns: [&[ActFloat]; N] = each(|n| &columns[n][..row.len().div_ceil(256)]);
        let fetch = ahead.at(r * stride + AHEAD);
        let mut sums = [[_mm512_setzero_ps(); 4]; N];
        let (chunks, rest) = row.as_chunks::<64>();
        for (i, chunk) in chunks.iter().enumerate() {
            prefetch(fetch.wrapping_add(i * 64 * size_of::<B>()), 64 * size_of::<B>());
            let (w, _) = chunk.as_chunks::<16>();
            for j in 0..4 {
                // SAFETY: this function has the instructions.
                let w = unsafe { B::sixteen(&w[j]) };
                for n in 0..N {
                    let a = columns[n][i / 4].x.as_chunks::<16>().0;
                    sums[n][j] = _mm512_fmadd_ps(w, floats16(&a[i % 4 * 4 + j]), sums[n][j]);
                }
            }
        }
        for (j, part) in rest.chunks(16).enumerate() {
            // SAFETY: this function has the instructions.
            let w = unsafe { B::some(part) };
            let at = chunks.len() * 4 + j;
            for n in 0..N {
                let a = columns[n][at / 16].x.as_chunks::<16>().0;
                sums[n][j] = _mm512_fmadd_ps(w, floats16(&a[at % 16]), sums[n][j]);
            }
        }
        for n in 0..N {
            let [a, b, c, d] = sums[n];
            m.out[n * m.stride + r] = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d)));
        }
    }
}

/// 16 rows of up to 64 weights each, as a panel of f32.
macro_rules! float_panel {
    ($block:ident, $per_16_bytes:literal, |$raw:ident| $widen:expr) => {
        impl super::panels::ToPanel for $block {
            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
            unsafe fn to_panel(blocks: &[&[Self]; 16], panel: &mut Panel) {
                let count = blocks[0].len().min(64);
                for first in (0..count).step_by($per_16_bytes) {
                    let mut rest = [[0u8; 16]; 16];
                    if first + $per_16_bytes > count {
                        for (rest, row) in rest.iter_mut().zip(blocks) {
                            let row = &row[first..count];
                            // SAFETY: blocks are bytes (the contract of `Block`).
                            let bytes = unsafe { std::slice::from_raw_parts(row.as_ptr().cast::<u8>(), size_of_val(row)) };
                            rest[..bytes.len()].copy_from_slice(bytes);
                        }
                    }
                    let $raw = transpose(|r| match blocks[r][first..count].first_chunk::<$per_16_bytes>() {
                        // SAFETY: that many blocks are 16 bytes, of alignment 1.
                        Some(whole) => unsafe { &*std::ptr::from_ref(whole).cast() },
                        None => &rest[r],
                    });
                    let wide = $widen;
                    for (to, w) in panel.w[first..].iter_mut().zip(&wide) {
                        store64(to, *w);
                    }
                }
            }
        }
    };
}

float_panel!(BlockF32, 4, |raw| raw);
float_panel!(BlockF16, 8, |raw| {
    let widen = |v: __m512i| _mm512_castps_si512(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(v)));
    each::<_, 8>(|i| widen(if i % 2 == 0 { raw[i / 2] } else { _mm512_srli_epi32::<16>(raw[i / 2]) }))
});
float_panel!(BlockBf16, 8, |raw| {
    let high = _mm512_set1_epi32(-65536);
    each::<_, 8>(|i| if i % 2 == 0 { _mm512_slli_epi32::<16>(raw[i / 2]) } else { _mm512_and_si512(raw[i / 2], high) })
});
