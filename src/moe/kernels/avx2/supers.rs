//! AVX2: Q2_K to Q6_K.
//!
//! Owns: the in-register decoding of the five formats with a scale per 16 or 32 weights, and the product of rows with one to four columns of
//! [`Act256`]. Must not know: how columns are grouped.
//!
//! Codes come out unsigned, 32 to a register. `vpmaddubsw` sums two products in 16 bits, at most 2 * 63 * 127 = 16002 (Q6_K), and `vpmaddwd`
//! multiplies the sums by their 16-bit scales and adds pairs: scaling costs nothing. Offsets and mins are products with the sums that the
//! activations carry.

use std::arch::x86_64::*;
use std::ops::Range;

use super::super::Mul;
use super::super::ahead::{AHEAD, Ahead, prefetch};
use super::mem::*;
use crate::moe::acts::Act256;
use crate::moe::blocks::*;

/// A decoded block.
#[derive(Clone, Copy)]
pub(super) struct Codes {
    pub(super) w: [__m256i; 8],
    /// A scale per 16 codes.
    pub(super) scales: __m256i,
    /// A min per 16 codes, or, in the lower half, per 32.
    pub(super) mins: __m256i,
    pub(super) d: f32,
    pub(super) dmin: f32,
}

/// A format of this family.
pub(super) trait Super: Block {
    /// Codes per min; 0 if there are none.
    const MIN_GROUP: usize;
    /// The offset is 2 to this power, if there are no mins.
    const OFFSET_LOG2: i32;

    /// # Safety
    /// The CPU has AVX2, FMA and F16C.
    unsafe fn codes(&self) -> Codes;
}

/// `(v >> N) & mask`, of bytes: the mask removes what comes from the neighbour.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn bits<const N: i32>(v: __m256i, mask: __m256i) -> __m256i {
    _mm256_and_si256(_mm256_srli_epi16::<N>(v), mask)
}

/// `(v << N) & mask`, of bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn up<const N: i32>(v: __m256i, mask: __m256i) -> __m256i {
    _mm256_and_si256(_mm256_slli_epi16::<N>(v), mask)
}

/// Scales per 16 codes, mins, d and dmin of Q4_K and Q5_K from the first 16 bytes: d, dmin, three words u, v, w.
/// Low four scales: `u & 63`; high four: `w & 15 | (u >> 2) & 48`; mins likewise with v, and `w >> 4`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn k_header(header: __m128i) -> (__m256i, __m256i, f32, f32) {
    let low = _mm_srlv_epi32(_mm_shuffle_epi32::<0b11_10_11_01>(header), _mm_set_epi32(4, 0, 0, 0));
    let low = _mm_and_si128(low, _mm_set_epi32(0x0f0f_0f0f, 0x3f3f_3f3f, 0x0f0f_0f0f, 0x3f3f_3f3f));
    let high = _mm_srli_epi32::<2>(_mm_shuffle_epi32::<0b10_00_01_00>(header));
    let bytes = _mm_or_si128(low, _mm_and_si128(high, _mm_set_epi32(0x3030_3030, 0, 0x3030_3030, 0)));
    let twice = _mm_unpacklo_epi8(bytes, bytes);
    let mins = _mm_cvtepu8_epi16(_mm_unpackhi_epi64(bytes, bytes));
    let floats = _mm_cvtph_ps(header);
    let dmin = _mm_cvtss_f32(_mm_movehdup_ps(floats));
    (_mm256_cvtepu8_epi16(twice), _mm256_zextsi128_si256(mins), _mm_cvtss_f32(floats), dmin)
}

impl Super for BlockQ4K {
    const MIN_GROUP: usize = 32;
    const OFFSET_LOG2: i32 = 0;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes(&self) -> Codes {
        let (scales, mins, d, dmin) = k_header(load16(first_chunk(self)));
        let nibble = _mm256_set1_epi8(15);
        let q = self.qs.as_chunks::<32>().0;
        let w = each(|i| {
            let q = load32(&q[i / 2]);
            if i % 2 == 0 { _mm256_and_si256(q, nibble) } else { bits::<4>(q, nibble) }
        });
        Codes { w, scales, mins, d, dmin }
    }
}

impl Super for BlockQ5K {
    const MIN_GROUP: usize = 32;
    const OFFSET_LOG2: i32 = 0;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes(&self) -> Codes {
        let (scales, mins, d, dmin) = k_header(load16(first_chunk(self)));
        let (nibble, fifth) = (_mm256_set1_epi8(15), _mm256_set1_epi8(16));
        let q = self.qs.as_chunks::<32>().0;
        let h = load32(&self.qh);
        let high = [
            up::<4>(h, fifth),
            up::<3>(h, fifth),
            up::<2>(h, fifth),
            up::<1>(h, fifth),
            _mm256_and_si256(h, fifth),
            bits::<1>(h, fifth),
            bits::<2>(h, fifth),
            bits::<3>(h, fifth),
        ];
        let w = each(|i| {
            let q = load32(&q[i / 2]);
            _mm256_or_si256(if i % 2 == 0 { _mm256_and_si256(q, nibble) } else { bits::<4>(q, nibble) }, high[i])
        });
        Codes { w, scales, mins, d, dmin }
    }
}

impl Super for BlockQ6K {
    const MIN_GROUP: usize = 0;
    const OFFSET_LOG2: i32 = 5;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes(&self) -> Codes {
        let (nibble, pair) = (_mm256_set1_epi8(15), _mm256_set1_epi8(48));
        let (l, h) = (self.ql.as_chunks::<32>().0, self.qh.as_chunks::<32>().0);
        let half_block = |i: usize| {
            let (a, b, h) = (load32(&l[2 * i]), load32(&l[2 * i + 1]), load32(&h[i]));
            [
                _mm256_or_si256(_mm256_and_si256(a, nibble), up::<4>(h, pair)),
                _mm256_or_si256(_mm256_and_si256(b, nibble), up::<2>(h, pair)),
                _mm256_or_si256(bits::<4>(a, nibble), _mm256_and_si256(h, pair)),
                _mm256_or_si256(bits::<4>(b, nibble), bits::<2>(h, pair)),
            ]
        };
        let (a, b) = (half_block(0), half_block(1));
        let w = [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]];
        let scales = _mm256_cvtepi8_epi16(load16(&self.scales));
        Codes { w, scales, mins: _mm256_setzero_si256(), d: half(self.d), dmin: 0.0 }
    }
}

/// The two-bit codes of Q2_K and Q3_K.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn two_bits(qs: &[u8; 64]) -> [__m256i; 8] {
    let q = qs.as_chunks::<32>().0;
    let (a, b, two) = (load32(&q[0]), load32(&q[1]), _mm256_set1_epi8(3));
    [
        _mm256_and_si256(a, two),
        bits::<2>(a, two),
        bits::<4>(a, two),
        bits::<6>(a, two),
        _mm256_and_si256(b, two),
        bits::<2>(b, two),
        bits::<4>(b, two),
        bits::<6>(b, two),
    ]
}

impl Super for BlockQ2K {
    const MIN_GROUP: usize = 16;
    const OFFSET_LOG2: i32 = 0;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes(&self) -> Codes {
        let packed = load16(&self.scales);
        let nibble = _mm_set1_epi8(15);
        let scales = _mm256_cvtepu8_epi16(_mm_and_si128(packed, nibble));
        let mins = _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16::<4>(packed), nibble));
        Codes { w: two_bits(&self.qs), scales, mins, d: half(self.d), dmin: half(self.dmin) }
    }
}

impl Super for BlockQ3K {
    const MIN_GROUP: usize = 0;
    const OFFSET_LOG2: i32 = 2;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes(&self) -> Codes {
        let (h, third) = (load32(&self.hmask), _mm256_set1_epi8(4));
        let high = [
            up::<2>(h, third),
            up::<1>(h, third),
            _mm256_and_si256(h, third),
            bits::<1>(h, third),
            bits::<2>(h, third),
            bits::<3>(h, third),
            bits::<4>(h, third),
            bits::<5>(h, third),
        ];
        let low = two_bits(&self.qs);
        let w = each(|i| _mm256_or_si256(low[i], high[i]));
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

/// Some rows times `N` columns.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn few<B: Super, const N: usize>(m: &mut Mul<'_>, rows: Range<usize>, first: usize) {
    let columns: [&[Act256]; N] = each(|n| m.columns[first + n].blocks::<Act256>());
    let stride = m.rows.stride();
    let ahead = Ahead::new(m.rows.start(), m.rows.len() * stride, m.next);
    // Shuffles that spread scales 2i and 2i + 1 of eight over the lower and the upper half.
    let spread: [__m256i; 4] = each(|i| {
        let index = _mm256_set_epi64x(2, 2, 0, 0);
        let index = _mm256_add_epi8(index, _mm256_set1_epi64x(4 * i as i64));
        let pattern = _mm256_set1_epi16(0x0100);
        _mm256_add_epi8(pattern, _mm256_shuffle_epi8(index, _mm256_setzero_si256()))
    });
    for r in rows {
        let row = m.rows.row::<B>(r);
        let columns: [&[Act256]; N] = each(|n| &columns[n][..row.len()]);
        let fetch = ahead.at(r * stride + AHEAD);
        let mut sums = [_mm256_setzero_ps(); N];
        let mut mins = [_mm256_setzero_ps(); N];
        for (i, block) in row.iter().enumerate() {
            prefetch(fetch.wrapping_add(i * size_of::<B>()), size_of::<B>());
            // SAFETY: this function has the instructions.
            let codes = unsafe { block.codes() };
            let low = _mm256_permute2x128_si256::<0x00>(codes.scales, codes.scales);
            let high = _mm256_permute2x128_si256::<0x11>(codes.scales, codes.scales);
            let mut isums = [_mm256_setzero_si256(); N];
            for j in 0..8 {
                let scale = _mm256_shuffle_epi8(if j < 4 { low } else { high }, spread[j % 4]);
                for n in 0..N {
                    let q = columns[n][i].q.as_chunks::<32>().0;
                    let pairs = _mm256_maddubs_epi16(codes.w[j], load32(&q[j]));
                    isums[n] = _mm256_add_epi32(isums[n], _mm256_madd_epi16(pairs, scale));
                }
            }
            for n in 0..N {
                let a = &columns[n][i];
                let mut isum = isums[n];
                if B::MIN_GROUP == 0 {
                    let offset = _mm256_madd_epi16(codes.scales, words16(&a.sum16));
                    isum = _mm256_sub_epi32(isum, _mm256_sll_epi32(offset, _mm_cvtsi32_si128(B::OFFSET_LOG2)));
                } else {
                    let products = if B::MIN_GROUP == 16 {
                        _mm256_madd_epi16(codes.mins, words16(&a.sum16))
                    } else {
                        _mm256_zextsi128_si256(_mm_madd_epi16(_mm256_castsi256_si128(codes.mins), words8(&a.sum32)))
                    };
                    mins[n] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(products), _mm256_set1_ps(codes.dmin * a.d), mins[n]);
                }
                sums[n] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(isum), _mm256_set1_ps(codes.d * a.d), sums[n]);
            }
        }
        for n in 0..N {
            m.out[(first + n) * m.stride + r] = total(_mm256_sub_ps(sums[n], mins[n]));
        }
    }
}
