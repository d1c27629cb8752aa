//! AVX-512: Q2_K to Q6_K with few columns.
//!
//! Owns: the in-register decoding of the five formats that have a scale per 16 or 32 weights and go with [`Act256`], and the product of rows
//! with one to three columns. Must not know: panels.
//!
//! Codes come out unsigned and in their natural order. `vpdpbusd` sums four products per 32-bit lane; the largest sum is
//! 4 * 63 * 127 = 32004 (Q6_K), which fits 16 bits, so two of them are packed (`vpackssdw`) and multiplied by their 16-bit scales in one
//! `vpdpwssd`, where f32 scales would take a conversion and an FMA each. Offsets (Q3_K, Q6_K) and mins (Q2_K, Q4_K, Q5_K) are products with
//! the sums that the activations carry.

use std::arch::x86_64::*;

use super::super::Mul;
use super::super::ahead::{AHEAD, Ahead, prefetch};
use super::mem::*;
use crate::moe::acts::Act256;
use crate::moe::blocks::*;

/// A decoded block.
pub(super) struct Codes {
    /// Codes, 64 to a register.
    pub(super) w: [__m512i; 4],
    /// A scale per 16 codes.
    pub(super) scales: __m256i,
    /// A min per 16 codes, or, in the lower half, per 32.
    pub(super) mins: __m256i,
    /// The block's scale.
    pub(super) d: f32,
    /// The scale of the mins.
    pub(super) dmin: f32,
}

/// A format of this family.
pub(super) trait Super: Block {
    /// Codes per min; 0 if there are none.
    const MIN_GROUP: usize;
    /// The offset is 2 to this power, if there are no mins.
    const OFFSET_LOG2: u32;

    /// # Safety
    /// The CPU has AVX-512 F, BW, VL and DQ, and F16C.
    unsafe fn codes(&self) -> Codes;
}

/// Counts for shifting the lower and upper 256 bits differently.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn halves(low: i64, high: i64) -> __m512i {
    _mm512_set_epi64(high, high, high, high, low, low, low, low)
}

/// `(a & mask) | b`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn and_or(a: __m512i, mask: __m512i, b: __m512i) -> __m512i {
    _mm512_ternarylogic_epi64::<0xea>(a, mask, b)
}

/// The scales (bytes 0..8) and mins (8..16) of Q4_K and Q5_K from the first 16 bytes of the block: d, dmin, three words u, v, w.
/// Low four scales: `u & 63`; high four: `w & 15 | (u >> 2) & 48`; mins likewise with v, and `w >> 4`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn scales_mins(header: __m128i) -> __m128i {
    let low = _mm_shuffle_epi32::<0b11_10_11_01>(header);
    let low = _mm_srlv_epi32(low, _mm_set_epi32(4, 0, 0, 0));
    let low_mask = _mm_set_epi32(0x0f0f_0f0f, 0x3f3f_3f3f, 0x0f0f_0f0f, 0x3f3f_3f3f);
    let high = _mm_srli_epi32::<2>(_mm_shuffle_epi32::<0b10_00_01_00>(header));
    let high = _mm_and_si128(high, _mm_set_epi32(0x3030_3030, 0, 0x3030_3030, 0));
    _mm_ternarylogic_epi64::<0xea>(low, low_mask, high)
}

/// The 16-bit scales per 16 codes, and the 8 mins, from what [`scales_mins`] gives; d and dmin.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn k_header(header: __m128i) -> (__m256i, __m256i, f32, f32) {
    let bytes = scales_mins(header);
    let twice = _mm_unpacklo_epi8(bytes, bytes);
    let mins = _mm_cvtepu8_epi16(_mm_unpackhi_epi64(bytes, bytes));
    let floats = _mm_cvtph_ps(header);
    let dmin = _mm_cvtss_f32(_mm_movehdup_ps(floats));
    (_mm256_cvtepu8_epi16(twice), _mm256_zextsi128_si256(mins), _mm_cvtss_f32(floats), dmin)
}

impl Super for BlockQ4K {
    const MIN_GROUP: usize = 32;
    const OFFSET_LOG2: u32 = 0;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn codes(&self) -> Codes {
        let (scales, mins, d, dmin) = k_header(load16(first_chunk(self)));
        let (shift, nibble) = (halves(0, 4), _mm512_set1_epi8(15));
        let q = self.qs.as_chunks::<32>().0;
        let w = each(|i| _mm512_and_si512(_mm512_srlv_epi64(twice32(&q[i]), shift), nibble));
        Codes { w, scales, mins, d, dmin }
    }
}

impl Super for BlockQ5K {
    const MIN_GROUP: usize = 32;
    const OFFSET_LOG2: u32 = 0;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn codes(&self) -> Codes {
        let (scales, mins, d, dmin) = k_header(load16(first_chunk(self)));
        let (shift, nibble, fifth) = (halves(0, 4), _mm512_set1_epi8(15), _mm512_set1_epi8(16));
        let q = self.qs.as_chunks::<32>().0;
        let h = twice32(&self.qh);
        // Bit 2i of the high byte belongs to the lower half of register i, bit 2i + 1 to the upper half; both go to bit 4.
        let high = [
            _mm512_sllv_epi64(h, halves(4, 3)),
            _mm512_sllv_epi64(h, halves(2, 1)),
            _mm512_srlv_epi64(h, halves(0, 1)),
            _mm512_srlv_epi64(h, halves(2, 3)),
        ];
        let w = each(|i| {
            let low = _mm512_and_si512(_mm512_srlv_epi64(twice32(&q[i]), shift), nibble);
            and_or(high[i], fifth, low)
        });
        Codes { w, scales, mins, d, dmin }
    }
}

impl Super for BlockQ6K {
    const MIN_GROUP: usize = 0;
    const OFFSET_LOG2: u32 = 5;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn codes(&self) -> Codes {
        let (nibble, high) = (_mm512_set1_epi8(15), _mm512_set1_epi8(48));
        let (l, h) = (self.ql.as_chunks::<64>().0, self.qh.as_chunks::<32>().0);
        let (l0, l1, h0, h1) = (load64(&l[0]), load64(&l[1]), twice32(&h[0]), twice32(&h[1]));
        let (left, right) = (halves(4, 2), halves(0, 2));
        let first = |l, h| and_or(_mm512_sllv_epi64(h, left), high, _mm512_and_si512(l, nibble));
        let second = |l, h| and_or(_mm512_srlv_epi64(h, right), high, _mm512_and_si512(_mm512_srli_epi64::<4>(l), nibble));
        let w = [first(l0, h0), second(l0, h0), first(l1, h1), second(l1, h1)];
        let scales = _mm256_cvtepi8_epi16(load16(&self.scales));
        Codes { w, scales, mins: _mm256_setzero_si256(), d: half(self.d), dmin: 0.0 }
    }
}

impl Super for BlockQ2K {
    const MIN_GROUP: usize = 16;
    const OFFSET_LOG2: u32 = 0;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn codes(&self) -> Codes {
        let packed = load16(&self.scales);
        let nibble = _mm_set1_epi8(15);
        let scales = _mm256_cvtepu8_epi16(_mm_and_si128(packed, nibble));
        let mins = _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16::<4>(packed), nibble));
        Codes { w: two_bits(&self.qs), scales, mins, d: half(self.d), dmin: half(self.dmin) }
    }
}

/// The two-bit codes of Q2_K and Q3_K.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn two_bits(qs: &[u8; 64]) -> [__m512i; 4] {
    let q = qs.as_chunks::<32>().0;
    let (a, b, mask) = (twice32(&q[0]), twice32(&q[1]), _mm512_set1_epi8(3));
    let (first, second) = (halves(0, 2), halves(4, 6));
    let pick = |q, shift| _mm512_and_si512(_mm512_srlv_epi64(q, shift), mask);
    [pick(a, first), pick(a, second), pick(b, first), pick(b, second)]
}

impl Super for BlockQ3K {
    const MIN_GROUP: usize = 0;
    const OFFSET_LOG2: u32 = 2;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn codes(&self) -> Codes {
        let low = two_bits(&self.qs);
        let (h, third) = (twice32(&self.hmask), _mm512_set1_epi8(4));
        let high = [
            _mm512_sllv_epi64(h, halves(2, 1)),
            _mm512_srlv_epi64(h, halves(0, 1)),
            _mm512_srlv_epi64(h, halves(2, 3)),
            _mm512_srlv_epi64(h, halves(4, 5)),
        ];
        let w = each(|i| and_or(high[i], third, low[i]));
        // The last 16 bytes of the block: two codes, three words u, v, w of scales, d. Scales 0..4: `u & 15 | (w & 3) << 4`; 4..8 with v and
        // `w >> 2`; 8..16 with the upper nibbles and `w >> 4`, `w >> 6`.
        let tail = load16(last_chunk(self));
        let (first, second, third) = (0x0504_0302, 0x0908_0706, 0x0d0c_0b0a);
        let uv = _mm_shuffle_epi8(tail, _mm_set_epi32(second, first, second, first));
        let ww = _mm_shuffle_epi8(tail, _mm_set1_epi32(third));
        let low = _mm_and_si128(_mm_srlv_epi32(uv, _mm_set_epi32(4, 4, 0, 0)), _mm_set1_epi8(15));
        let high = _mm_and_si128(_mm_srlv_epi32(ww, _mm_set_epi32(6, 4, 2, 0)), _mm_set1_epi8(3));
        let bytes = _mm_sub_epi8(_mm_or_si128(low, _mm_slli_epi32::<4>(high)), _mm_set1_epi8(32));
        Codes { w, scales: _mm256_cvtepi8_epi16(bytes), mins: _mm256_setzero_si256(), d: half(self.d), dmin: 0.0 }
    }
}

/// Rows times `N` columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn few<B: Super, const N: usize>(m: &mut Mul<'_>) {
    let columns: [&[Act256]; N] = each(|n| m.columns[n].blocks::<Act256>());
    let stride = m.rows.stride();
    let ahead = Ahead::new(m.rows.start(), m.rows.len() * stride, m.next);
    // Where the scales of packed sums are: lane L of the first pair holds groups L and 4 + L, of the second 8 + L and 12 + L.
    let pick = |first: i64| {
        let quad = |group: i64| group * 0x0001_0001_0001_0001;
        let pair = |lane: i64| (quad(first + lane), quad(first + lane + 4));
        let (a, b, c, d) = (pair(0), pair(1), pair(2), pair(3));
        _mm512_set_epi64(d.1, d.0, c.1, c.0, b.1, b.0, a.1, a.0)
    };
    let (pick01, pick23) = (pick(0), pick(8));
    for r in 0..m.rows.len() {
        let row = m.rows.row::<B>(r);
        let columns: [&[Act256]; N] = each(|n| &columns[n][..row.len()]);
        let fetch = ahead.at(r * stride + AHEAD);
        let mut sums = [_mm512_setzero_ps(); N];
        let mut mins = [_mm256_setzero_ps(); N];
        for (i, block) in row.iter().enumerate() {
            prefetch(fetch.wrapping_add(i * size_of::<B>()), size_of::<B>());
            // SAFETY: this function has the instructions.
            let codes = unsafe { block.codes() };
            let scales = _mm512_castsi256_si512(codes.scales);
            let (scales01, scales23) = (_mm512_permutexvar_epi16(pick01, scales), _mm512_permutexvar_epi16(pick23, scales));
            for n in 0..N {
                let a = &columns[n][i];
                let q = a.q.as_chunks::<64>().0;
                let dot = |i: usize| _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes.w[i], load64(&q[i]));
                let (pair01, pair23) = (_mm512_packs_epi32(dot(0), dot(1)), _mm512_packs_epi32(dot(2), dot(3)));
                let mut sum = _mm512_dpwssd_epi32(_mm512_setzero_si512(), pair01, scales01);
                sum = _mm512_dpwssd_epi32(sum, pair23, scales23);
                if B::MIN_GROUP == 0 {
                    let offset = _mm256_madd_epi16(codes.scales, words16(&a.sum16));
                    sum = _mm512_sub_epi32(sum, _mm512_zextsi256_si512(_mm256_sll_epi32(offset, _mm_cvtsi32_si128(B::OFFSET_LOG2 as i32))));
                } else {
                    let products = if B::MIN_GROUP == 16 {
                        _mm256_madd_epi16(codes.mins, words16(&a.sum16))
                    } else {
                        _mm256_zextsi128_si256(_mm_madd_epi16(_mm256_castsi256_si128(codes.mins), words8(&a.sum32)))
                    };
                    mins[n] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(products), _mm256_set1_ps(codes.dmin * a.d), mins[n]);
                }
                sums[n] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(codes.d * a.d), sums[n]);
            }
        }
        for n in 0..N {
            m.out[n * m.stride + r] = _mm512_reduce_add_ps(_mm512_sub_ps(sums[n], _mm512_zextps256_ps512(mins[n])));
        }
    }
}

/// The first 16 bytes of a block.
#[inline(always)]
fn first_chunk<B: Block>(block: &B) -> &[u8; 16] {
    const { assert!(size_of::<B>() >= 16) };
    // SAFETY: a block is bytes (the contract of `Block`), and has at least 16.
    unsafe { &*std::ptr::from_ref(block).cast() }
}

/// The last 16 bytes of a block.
#[inline(always)]
fn last_chunk<B: Block>(block: &B) -> &[u8; 16] {
    const { assert!(size_of::<B>() >= 16) };
    // SAFETY: as above; the result ends where the block ends.
    unsafe { &*std::ptr::from_ref(block).byte_add(size_of::<B>() - 16).cast() }
}
