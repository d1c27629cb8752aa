//! AVX2: eight rows of weights turned into a panel, one row per 32-bit lane.
//!
//! Owns: the panels, and how the families of `supers` and `blocks32` fill them: decoded by row, as for few columns, then transposed. Must not
//! know: columns.

use std::arch::x86_64::*;

use super::blocks32::Blocks32;
use super::mem::*;
use super::supers::Super;
use crate::moe::acts::Line;
use crate::moe::blocks::{Block, Fold};

/// 256 weights of eight rows. All codes are unsigned.
#[repr(C, align(64))]
pub(super) struct Panel {
    /// Step s: codes 4s..4s+4 of each row.
    pub(super) w: [[u8; 32]; 64],
    /// Blocks of 32: the scale of each, per row.
    pub(super) scale: [[f32; 8]; 8],
    /// Blocks of 32: the min of each, per row.
    pub(super) min: [[f32; 8]; 8],
    /// Super-blocks: the integer scale of each 16 weights, in both halves of a lane, per row.
    pub(super) scales: [[u32; 8]; 16],
    /// Super-blocks: the integer mins of groups 2i and 2i + 1 in the halves of a lane, per row. For formats with an offset: it times the scale.
    pub(super) mins: [[u32; 8]; 8],
    /// Super-blocks: scale of the integer scales, per row.
    pub(super) d: [f32; 8],
    /// Super-blocks: scale of the integer mins, per row.
    pub(super) dmin: [f32; 8],
}

/// The panels of 16 rows; or, of 8 rows, one with the upper and one with the lower four bits of the codes ([`is_split`]).
pub(super) type Pair = [Panel; 2];

/// Pairs of panels in the scratch memory.
pub(super) const PAIRS: usize = 2;

/// Scratch lines as panels.
///
/// # Panics
/// If there are too few.
#[inline]
pub(super) fn panels(lines: &mut [Line]) -> &mut [Pair; PAIRS] {
    const { assert!(size_of::<[Pair; PAIRS]>() <= super::super::PANEL_LINES * 64 && align_of::<Panel>() == 64) };
    assert!(lines.len() >= super::super::PANEL_LINES);
    // SAFETY: enough bytes at the alignment of a line, which is that of a panel; any bits are numbers; the borrow is exclusive.
    unsafe { &mut *lines.as_mut_ptr().cast() }
}

/// What is added to signed codes of 32 weights to make them unsigned.
const fn offset<B: Block>() -> i32 {
    match B::TYPE.fold() {
        Fold::BlockOffset { offset } => offset,
        _ => 0,
    }
}

/// Whether codes have eight bits, of which no two products fit in 16. Their halves are multiplied apart.
pub(super) const fn is_split<B: Block>() -> bool {
    offset::<B>() == 128
}

/// Fills a panel from one block each of eight rows.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn supers<B: Super>(rows: &[&[B]; 8], panel: &mut Panel) {
    // SAFETY: this function has the instructions.
    let codes: [_; 8] = each(|r| unsafe { rows[r][0].codes() });
    for i in 0..8 {
        let steps = transpose(each(|r| codes[r].w[i]));
        for (to, step) in panel.w[8 * i..][..8].iter_mut().zip(steps) {
            store32(to, step);
        }
    }
    // Scales are pairs of 16 bits, as a dword: those of groups 2i and 2i + 1.
    let pairs = transpose(each(|r| codes[r].scales));
    for (to, pair) in panel.scales.as_chunks_mut::<2>().0.iter_mut().zip(pairs) {
        let (low, high) = (_mm256_slli_epi32::<16>(pair), _mm256_srli_epi32::<16>(pair));
        store_dwords(&mut to[0], _mm256_blend_epi16::<0xaa>(pair, low));
        store_dwords(&mut to[1], _mm256_blend_epi16::<0xaa>(high, pair));
    }
    let mins = if B::MIN_GROUP == 0 {
        each(|i| _mm256_sll_epi16(pairs[i], _mm_cvtsi32_si128(B::OFFSET_LOG2)))
    } else {
        transpose(each(|r| codes[r].mins))
    };
    for (to, mins) in panel.mins.iter_mut().zip(mins) {
        store_dwords(to, mins);
    }
    panel.d = each(|r| codes[r].d);
    panel.dmin = each(|r| codes[r].dmin);
}

/// Fills a pair of panels from up to 256 weights of its rows. Codes and scales of what is missing are left as they are.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn blocks32<B: Blocks32>(rows: &[&[B]], blocks: usize, pair: &mut Pair) {
    for (rows, p) in rows.as_chunks::<8>().0.iter().zip(0..) {
        // SAFETY: this function has the instructions.
        let scales: [_; 8] = each(|r| unsafe { B::scales(rows[r]) });
        for (to, scale) in pair[p].scale.iter_mut().zip(transpose(each(|r| _mm256_castps_si256(scales[r].0)))) {
            store_floats(to, _mm256_castsi256_ps(scale));
        }
        if !B::SIGNED {
            for (to, min) in pair[p].min.iter_mut().zip(transpose(each(|r| _mm256_castps_si256(scales[r].1)))) {
                store_floats(to, _mm256_castsi256_ps(min));
            }
        }
        for i in 0..blocks {
            // SAFETY: this function has the instructions.
            let steps = transpose(each(|r| unsafe { B::codes(rows[r], i) }));
            for (s, step) in (8 * i..).zip(steps) {
                let codes = _mm256_add_epi8(step, _mm256_set1_epi8(offset::<B>() as i8));
                if is_split::<B>() {
                    let nibble = _mm256_set1_epi8(15);
                    store32(&mut pair[0].w[s], _mm256_and_si256(_mm256_srli_epi16::<4>(codes), nibble));
                    store32(&mut pair[1].w[s], _mm256_and_si256(codes, nibble));
                } else {
                    store32(&mut pair[p].w[s], codes);
                }
            }
        }
    }
}

/// Transposes eight by eight dwords.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn transpose(rows: [__m256i; 8]) -> [__m256i; 8] {
    // Pairs of rows, then fours, then the 128-bit halves.
    let twos: [__m256i; 8] = each(|i| {
        let (a, b) = (rows[i / 2 * 2], rows[i / 2 * 2 + 1]);
        if i % 2 == 0 { _mm256_unpacklo_epi32(a, b) } else { _mm256_unpackhi_epi32(a, b) }
    });
    let fours: [__m256i; 8] = each(|i| {
        let (a, b) = (twos[i / 4 * 4 + i % 4 / 2], twos[i / 4 * 4 + 2 + i % 4 / 2]);
        if i % 2 == 0 { _mm256_unpacklo_epi64(a, b) } else { _mm256_unpackhi_epi64(a, b) }
    });
    each(|i| {
        let (a, b) = (fours[i % 4], fours[4 + i % 4]);
        if i < 4 { _mm256_permute2x128_si256::<0x20>(a, b) } else { _mm256_permute2x128_si256::<0x31>(a, b) }
    })
}
