//! AVX-512: sixteen rows of weights turned into a panel, one row per lane.
//!
//! Owns: [`ToPanel`] for every format: transposition of the packed bytes (four times fewer of them than codes), then the decoding, of 16 rows
//! at once. Must not know: columns.
//!
//! In a panel, step s holds codes 4s..4s+4 of each row as one 32-bit lane, because `vpdpbusd` sums four products per lane; scales and mins
//! are f32 vectors with a value per row. 16 rows x 256 weights of Q4_K take about 350 instructions, the products with one column 90.

use std::arch::x86_64::*;

use super::blocks32::{fifth_of_step, look_up};
use super::mem::*;
use super::supers::and_or;
use crate::moe::blocks::*;

/// A format that can be put in panels.
pub(super) trait ToPanel: Block {
    /// Decodes `blocks[r]` of rows r = 0..16, each as many blocks as a panel holds or, at the end of a row, fewer. Codes and scales of what is missing
    /// are left as they are.
    ///
    /// # Safety
    /// The CPU has AVX-512 F, BW, VL and DQ, and F16C.
    unsafe fn to_panel(blocks: &[&[Self]; 16], panel: &mut Panel);
}

/// `(v >> n) & mask`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn bits<const N: u32>(v: __m512i, mask: __m512i) -> __m512i {
    _mm512_and_si512(_mm512_srli_epi32::<N>(v), mask)
}

/// The lower or upper halves of 16 dwords as f32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn half_words<const SHIFT: u32>(v: __m512i) -> __m512 {
    _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32::<SHIFT>(v)))
}

/// The four unsigned bytes of each lane, as f32 times `d`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn four_scales(v: __m512i, d: __m512, to: &mut [[f32; 16]]) {
    let byte = _mm512_set1_epi32(255);
    let values = [_mm512_and_si512(v, byte), bits::<8>(v, byte), bits::<16>(v, byte), _mm512_srli_epi32::<24>(v)];
    for (to, v) in to.iter_mut().zip(values) {
        store_floats(to, _mm512_mul_ps(_mm512_cvtepi32_ps(v), d));
    }
}

/// The four unsigned bytes of each lane, as 16-bit numbers in two lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn four_mins(v: __m512i, to: &mut [[u32; 16]]) {
    let byte = _mm512_set1_epi32(255);
    let pair = |low: __m512i, high: __m512i| and_or(low, byte, _mm512_slli_epi32::<16>(_mm512_and_si512(high, byte)));
    store_dwords(&mut to[0], pair(v, _mm512_srli_epi32::<8>(v)));
    store_dwords(&mut to[1], pair(_mm512_srli_epi32::<16>(v), _mm512_srli_epi32::<24>(v)));
}

/// The four signed bytes of each lane, as f32 times `d`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn four_signed_scales(v: __m512i, d: __m512, to: &mut [[f32; 16]]) {
    let values = [_mm512_slli_epi32::<24>(v), _mm512_slli_epi32::<16>(v), _mm512_slli_epi32::<8>(v), v];
    for (to, v) in to.iter_mut().zip(values) {
        store_floats(to, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(v)), d));
    }
}

/// Scales and mins of Q4_K and Q5_K: the transposed first 16 bytes are d and dmin, then the words u, v, w of `scales_mins_6`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn k_scales([d, u, v, w]: [__m512i; 4], panel: &mut Panel) {
    let (low, nibble, high) = (_mm512_set1_epi8(63), _mm512_set1_epi8(15), _mm512_set1_epi8(48));
    let scale = half_words::<0>(d);
    store_floats(&mut panel.min_scale, half_words::<16>(d));
    four_scales(_mm512_and_si512(u, low), scale, &mut panel.scale[..4]);
    four_scales(and_or(_mm512_srli_epi32::<2>(u), high, _mm512_and_si512(w, nibble)), scale, &mut panel.scale[4..8]);
    four_mins(_mm512_and_si512(v, low), &mut panel.mins[..2]);
    four_mins(and_or(_mm512_srli_epi32::<2>(v), high, bits::<4>(w, nibble)), &mut panel.mins[2..4]);
}

/// 16 bytes of a block, at a place that is known to be inside.
#[inline(always)]
fn part<const N: usize>(bytes: &[u8; N], i: usize) -> &[u8; 16] {
    &bytes.as_chunks::<16>().0[i]
}

/// 32 bytes of a block, likewise.
#[inline(always)]
fn part32<const N: usize>(bytes: &[u8; N], i: usize) -> &[u8; 32] {
    &bytes.as_chunks::<32>().0[i]
}

/// The header of Q4_K and Q5_K: d, dmin and the packed scales.
#[inline(always)]
fn header<B: Block>(block: &B) -> &[u8; 16] {
    const { assert!(size_of::<B>() >= 16) };
    // SAFETY: a block is bytes (the contract of `Block`), and has at least 16.
    unsafe { &*std::ptr::from_ref(block).cast() }
}

impl ToPanel for BlockQ4K {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn to_panel(blocks: &[&[Self]; 16], panel: &mut Panel) {
        k_scales(transpose(|r| header(&blocks[r][0])), panel);
        let nibble = _mm512_set1_epi8(15);
        // Bytes 32c..32c+32 hold codes 64c..64c+32 in the low nibbles and 64c+32..64c+64 in the high ones.
        for c in 0..4 {
            for (j, &v) in transpose32(|r| part32(&blocks[r][0].qs, c)).iter().enumerate() {
                store64(&mut panel.w[16 * c + j], _mm512_and_si512(v, nibble));
                store64(&mut panel.w[16 * c + 8 + j], bits::<4>(v, nibble));
            }
        }
    }
}

impl ToPanel for BlockQ5K {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn to_panel(blocks: &[&[Self]; 16], panel: &mut Panel) {
        k_scales(transpose(|r| header(&blocks[r][0])), panel);
        let (nibble, fifth) = (_mm512_set1_epi8(15), _mm512_set1_epi8(16));
        let high = transpose32(|r| &blocks[r][0].qh);
        for c in 0..4 {
            let up = _mm_cvtsi32_si128(2 * c as i32);
            for (j, &v) in transpose32(|r| part32(&blocks[r][0].qs, c)).iter().enumerate() {
                // Bits 2c and 2c + 1 of the high byte.
                let h = _mm512_srl_epi32(high[j], up);
                store64(&mut panel.w[16 * c + j], and_or(_mm512_slli_epi32::<4>(h), fifth, _mm512_and_si512(v, nibble)));
                store64(&mut panel.w[16 * c + 8 + j], and_or(_mm512_slli_epi32::<3>(h), fifth, bits::<4>(v, nibble)));
            }
        }
    }
}

impl ToPanel for BlockQ6K {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn to_panel(blocks: &[&[Self]; 16], panel: &mut Panel) {
        let d = halves16(&each(|r| blocks[r][0].d.bits()));
        let scales: [[u8; 16]; 16] = each(|r| unsigned(blocks[r][0].scales));
        for (i, &v) in transpose(|r| &scales[r]).iter().enumerate() {
            four_signed_scales(v, d, &mut panel.scale[4 * i..4 * i + 4]);
        }
        let (nibble, pair) = (_mm512_set1_epi8(15), _mm512_set1_epi8(48));
        for half in 0..2 {
            let step = 32 * half;
            let a = transpose32(|r| part32(&blocks[r][0].ql, 2 * half));
            let b = transpose32(|r| part32(&blocks[r][0].ql, 2 * half + 1));
            let h = transpose32(|r| part32(&blocks[r][0].qh, half));
            for j in 0..8 {
                let low = _mm512_and_si512(a[j], nibble);
                store64(&mut panel.w[step + j], and_or(_mm512_slli_epi32::<4>(h[j]), pair, low));
                let low = _mm512_and_si512(b[j], nibble);
                store64(&mut panel.w[step + 8 + j], and_or(_mm512_slli_epi32::<2>(h[j]), pair, low));
                store64(&mut panel.w[step + 16 + j], and_or(h[j], pair, bits::<4>(a[j], nibble)));
                store64(&mut panel.w[step + 24 + j], and_or(_mm512_srli_epi32::<2>(h[j]), pair, bits::<4>(b[j], nibble)));
            }
        }
    }
}

impl ToPanel for BlockQ2K {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn to_panel(blocks: &[&[Self]; 16], panel: &mut Panel) {
        let d = halves16(&each(|r| blocks[r][0].d.bits()));
        store_floats(&mut panel.min_scale, halves16(&each(|r| blocks[r][0].dmin.bits())));
        let nibble = _mm512_set1_epi8(15);
        for (i, &v) in transpose(|r| &blocks[r][0].scales).iter().enumerate() {
            four_scales(_mm512_and_si512(v, nibble), d, &mut panel.scale[4 * i..4 * i + 4]);
            four_mins(bits::<4>(v, nibble), &mut panel.mins[2 * i..2 * i + 2]);
        }
        let two = _mm512_set1_epi8(3);
        for half in 0..2 {
            let step = 32 * half;
            for (j, &v) in transpose32(|r| part32(&blocks[r][0].qs, half)).iter().enumerate() {
                store64(&mut panel.w[step + j], _mm512_and_si512(v, two));
                store64(&mut panel.w[step + 8 + j], bits::<2>(v, two));
                store64(&mut panel.w[step + 16 + j], bits::<4>(v, two));
                store64(&mut panel.w[step + 24 + j], bits::<6>(v, two));
            }
        }
    }
}

impl ToPanel for BlockQ3K {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn to_panel(blocks: &[&[Self]; 16], panel: &mut Panel) {
        let d = halves16(&each(|r| blocks[r][0].d.bits()));
        let scales: [[u8; 16]; 16] = each(|r| unsigned(scales_q3(&blocks[r][0].scales)));
        for (i, &v) in transpose(|r| &scales[r]).iter().enumerate() {
            four_signed_scales(v, d, &mut panel.scale[4 * i..4 * i + 4]);
        }
        let (two, third) = (_mm512_set1_epi8(3), _mm512_set1_epi8(4));
        let high = transpose32(|r| &blocks[r][0].hmask);
        for half in 0..2 {
            let step = 32 * half;
            let up = _mm_cvtsi32_si128(4 * half as i32);
            for (j, &v) in transpose32(|r| part32(&blocks[r][0].qs, half)).iter().enumerate() {
                let h = _mm512_srl_epi32(high[j], up);
                store64(&mut panel.w[step + j], and_or(_mm512_slli_epi32::<2>(h), third, _mm512_and_si512(v, two)));
                store64(&mut panel.w[step + 8 + j], and_or(_mm512_slli_epi32::<1>(h), third, bits::<2>(v, two)));
                store64(&mut panel.w[step + 16 + j], and_or(h, third, bits::<4>(v, two)));
                store64(&mut panel.w[step + 24 + j], and_or(_mm512_srli_epi32::<1>(h), third, bits::<6>(v, two)));
            }
        }
    }
}

/// Table look-ups in all steps.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn look_up_all(steps: [__m512i; 8], values: &[i8; 16], bias: i8) -> [__m512i; 8] {
    each(|s| look_up(values, bias, steps[s]))
}

/// The same bits, unsigned.
#[inline(always)]
fn unsigned(v: [i8; 16]) -> [u8; 16] {
    i128::from_ne_bytes(v.map(|v| v as u8)).to_ne_bytes()
}

/// The nibbles of block `i` of 16 rows: steps 0..4 are the low ones, 4..8 the high ones.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn nibble_steps<'a>(qs: impl Fn(usize) -> &'a [u8; 16]) -> [__m512i; 8] {
    let nibble = _mm512_set1_epi8(15);
    let raw = transpose(qs);
    each(|s| if s < 4 { _mm512_and_si512(raw[s], nibble) } else { bits::<4>(raw[s - 4], nibble) })
}

/// One word of each block of 16 rows, as floats. The words are collected before any is widened: a vector load right after the
/// small stores that it covers would wait for them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn words<B, const N: usize>(blocks: &[&[B; 8]; 16], to: &mut [[f32; 16]; N], word: impl Fn(&B) -> u16, widen: impl Fn(__m256i) -> __m512) {
    let mut words = [[0u64; 4]; 8];
    for i in 0..8 {
        for q in 0..4 {
            let word = |r: usize| u64::from(word(&blocks[4 * q + r][i]));
            words[i][q] = word(0) | word(1) << 16 | word(2) << 32 | word(3) << 48;
        }
    }
    for (to, words) in to.iter_mut().zip(&words) {
        store_floats(to, widen(four_words(words)));
    }
}

/// `2^(e - 128)`, the half of an E8M0 scale: subnormal for e = 0 and 1.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn e8m0_halves(e: __m256i) -> __m512 {
    let e = _mm512_cvtepu16_epi32(e);
    let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(e, _mm512_set1_epi32(1)));
    let small = _mm512_sllv_epi32(_mm512_set1_epi32(0x0020_0000), e);
    _mm512_castsi512_ps(_mm512_mask_blend_epi32(_mm512_cmplt_epu32_mask(e, _mm512_set1_epi32(2)), normal, small))
}

/// A format of 32-weight blocks with the same few parts: codes, scale and how to widen it, min.
macro_rules! block_panel {
    ($block:ident, $steps:expr, $scale:expr, $widen:expr $(, $min:expr)?) => {
        impl ToPanel for $block {
            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
            unsafe fn to_panel(blocks: &[&[Self]; 16], panel: &mut Panel) {
                #[inline]
                #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
                fn whole(blocks: &[&[$block; 8]; 16], panel: &mut Panel) {
                    words(blocks, &mut panel.scale, $scale, $widen);
                    $(words(blocks, &mut panel.min, $min, |h| _mm512_cvtph_ps(h));)?
                    for i in 0..8 {
                        let block: [&$block; 16] = each(|r| &blocks[r][i]);
                        for (s, &codes) in $steps(&block).iter().enumerate() {
                            store64(&mut panel.w[8 * i + s], codes);
                        }
                    }
                }
                if blocks.iter().all(|row| row.len() >= 8) {
                    return whole(&each(|r| blocks[r].first_chunk().expect("just counted")), panel);
                }
                // At the end of a row the last block stands for those that are missing; nobody uses its products.
                let ends: [[Self; 8]; 16] = each(|r| each(|i| blocks[r][i.min(blocks[r].len() - 1)]));
                whole(&each(|r| &ends[r]), panel);
            }
        }
    };
}

block_panel!(BlockQ4_0, |b: &[&BlockQ4_0; 16]| nibble_steps(|r| &b[r].qs), |b| b.d.bits(), |h| _mm512_cvtph_ps(h));
block_panel!(BlockQ4_1, |b: &[&BlockQ4_1; 16]| nibble_steps(|r| &b[r].qs), |b| b.d.bits(), |h| _mm512_cvtph_ps(h), |b| b.m.bits());
block_panel!(
    BlockQ5_0,
    |b: &[&BlockQ5_0; 16]| fifths(nibble_steps(|r| &b[r].qs), &each(|r| b[r].qh)),
    |b| b.d.bits(),
    |h| _mm512_cvtph_ps(h)
);
block_panel!(
    BlockQ5_1,
    |b: &[&BlockQ5_1; 16]| fifths(nibble_steps(|r| &b[r].qs), &each(|r| b[r].qh)),
    |b| b.d.bits(),
    |h| _mm512_cvtph_ps(h),
    |b| b.m.bits()
);
block_panel!(BlockIq4Nl, |b: &[&BlockIq4Nl; 16]| look_up_all(nibble_steps(|r| &b[r].qs), &IQ4_VALUES, -128), |b| b.d.bits(), |h| {
    _mm512_cvtph_ps(h)
});
block_panel!(BlockMxfp4, |b: &[&BlockMxfp4; 16]| look_up_all(nibble_steps(|r| &b[r].qs), &FP4_VALUES, 12), |b| u16::from(b.e), |e| {
    e8m0_halves(e)
});
block_panel!(BlockQ8_0, q8_steps, |b| b.d.bits(), |h| _mm512_cvtph_ps(h));

/// The codes of a Q8_0 block of 16 rows, plus 128.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn q8_steps(b: &[&BlockQ8_0; 16]) -> [__m512i; 8] {
    let bias = _mm512_set1_epi8(-128);
    let steps = transpose32(|r| {
        // SAFETY: u8 and i8 have the same size and alignment, and any bits are either.
        unsafe { &*std::ptr::from_ref(&b[r].qs).cast() }
    });
    each(|s| _mm512_xor_si512(steps[s], bias))
}

/// Adds the fifth bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn fifths(steps: [__m512i; 8], qh: &[[u8; 4]; 16]) -> [__m512i; 8] {
    let qh = dwords16(&each(|r| u32::from_le_bytes(qh[r])));
    each(|s| fifth_of_step(qh, s as u32, steps[s]))
}

impl ToPanel for BlockIq4Xs {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn to_panel(blocks: &[&[Self]; 16], panel: &mut Panel) {
        let d = halves16(&each(|r| blocks[r][0].d.bits()));
        let low = dwords16(&each(|r| u32::from_le_bytes(blocks[r][0].scales_l)));
        let high = dwords16(&each(|r| u32::from(u16::from_le_bytes(blocks[r][0].scales_h)) << 4));
        for i in 0..8 {
            let l = _mm512_and_si512(_mm512_srl_epi32(low, _mm_cvtsi32_si128(4 * i)), _mm512_set1_epi32(15));
            let h = _mm512_and_si512(_mm512_srl_epi32(high, _mm_cvtsi32_si128(2 * i)), _mm512_set1_epi32(48));
            let scale = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_or_si512(l, h), _mm512_set1_epi32(32)));
            store_floats(&mut panel.scale[i as usize], _mm512_mul_ps(scale, d));
            let codes = nibble_steps(|r| part(&blocks[r][0].qs, i as usize));
            for (s, &codes) in codes.iter().enumerate() {
                store64(&mut panel.w[8 * i as usize + s], look_up(&IQ4_VALUES, -128, codes));
            }
        }
    }
}
