//! Activations as the kernels read them: quantised rows in 64-byte lines.
//!
//! Owns: [`Act256`] and [`Act32`] (256 activations with the sums that offsets and mins need), [`ActFormat`] (which of them a weight type
//! takes), the quantisation itself, and the typed views of a row. Must not know: weights' bytes, routing.
//!
//! The codes are those of ggml's `quantize_row_q8_K` and `quantize_row_q8_0`: `round(x * 127 / amax)`, one scale per 256 or per 32. Two
//! things are better than there: scales are f32 also per 32 (ggml rounds them to halves), and a NaN or infinity makes the whole block NaN,
//! where ggml's answer depends on the instruction set. Rows are padded with zeros to a whole number of 256.

use std::marker::PhantomData;

use super::blocks::{Fold, WeightType};

/// Activations in one block of a row.
pub const ACT_BLOCK: usize = 256;

/// 64 bytes of a row: a cache line, a register.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub struct Line(pub [u8; 64]);

/// 256 activations with one scale.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub struct Act256 {
    /// Codes in -127..=127.
    pub q: [i8; 256],
    /// For [`Fold::SuperOffset`]: `-offset * sum` per group.
    pub fold: [i32; 16],
    /// Sums of 16 codes.
    pub sum16: [i16; 16],
    /// Sums of 32 codes.
    pub sum32: [i16; 8],
    /// The scale.
    pub d: f32,
    /// Nothing.
    pub pad: [u32; 3],
}

/// 256 activations with a scale per 32.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub struct Act32 {
    /// Codes in -127..=127.
    pub q: [i8; 256],
    /// `-offset * sum` per 32, as i32, in the first eight.
    pub fold: [i32; 16],
    /// The scales.
    pub d: [f32; 8],
    /// Scale times sum of codes.
    pub s: [f32; 8],
}

/// 256 activations as they are.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub struct ActFloat {
    /// The values.
    pub x: [f32; 256],
}

const _: () = assert!(size_of::<Act256>() == 6 * 64 && size_of::<Act32>() == 6 * 64 && size_of::<ActFloat>() == 16 * 64);

/// What a row of activations carries. Matrices of equal format share their activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActFormat(Fold);

impl ActFormat {
    /// What the kernels of this weight type read.
    pub const fn of(weights: WeightType) -> ActFormat {
        ActFormat(weights.fold())
    }

    /// The relation between codes and weights.
    pub const fn fold(self) -> Fold {
        self.0
    }

    /// Lines of one block of 256.
    pub const fn block_lines(self) -> usize {
        match self.0 {
            Fold::Float => size_of::<ActFloat>() / 64,
            _ => size_of::<Act256>() / 64,
        }
    }

    /// Lines of a row of `k` activations.
    pub const fn row_lines(self, k: usize) -> usize {
        k.div_ceil(ACT_BLOCK) * self.block_lines()
    }
}

/// Lines as floats.
pub fn floats(lines: &mut [Line]) -> &mut [f32] {
    // SAFETY: a line is 16 floats' worth of bytes at a stricter alignment, any bits are floats, and the borrow is exclusive.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), lines.len() * 16) }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Act256 {}
    impl Sealed for super::Act32 {}
    impl Sealed for super::ActFloat {}
}

/// One of the three block structures.
pub trait ActBlock: sealed::Sealed + Copy + 'static {
    /// Whether rows of this format consist of these blocks.
    fn fits(format: ActFormat) -> bool;
}

impl ActBlock for Act256 {
    fn fits(format: ActFormat) -> bool {
        matches!(format.0, Fold::SuperOffset { .. } | Fold::SuperMin { .. })
    }
}

impl ActBlock for Act32 {
    fn fits(format: ActFormat) -> bool {
        matches!(format.0, Fold::BlockOffset { .. } | Fold::BlockMin)
    }
}

impl ActBlock for ActFloat {
    fn fits(format: ActFormat) -> bool {
        format.0 == Fold::Float
    }
}

/// A quantised row.
#[derive(Clone, Copy, Debug)]
pub struct ActRow<'a> {
    lines: &'a [Line],
    format: ActFormat,
}

impl<'a> ActRow<'a> {
    /// The row that these lines hold.
    ///
    /// # Panics
    /// If they are not a whole number of blocks.
    pub fn new(lines: &'a [Line], format: ActFormat) -> Self {
        assert!(lines.len().is_multiple_of(format.block_lines()));
        ActRow { lines, format }
    }

    /// The format it was quantised to.
    pub fn format(self) -> ActFormat {
        self.format
    }

    /// Where it starts.
    pub fn start(self) -> *const u8 {
        self.lines.as_ptr().cast()
    }

    /// How many lines it has.
    pub fn lines(self) -> usize {
        self.lines.len()
    }

    /// The blocks.
    ///
    /// # Panics
    /// If the row has another format.
    #[inline]
    pub fn blocks<A: ActBlock>(self) -> &'a [A] {
        assert!(A::fits(self.format));
        // SAFETY: `A` is one of three structures of plain numbers with the alignment of `Line` and a whole number of them in size, checked
        // at compile time; the length is rounded down; the lifetime is that of the lines.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.lines.len() * 64 / size_of::<A>()) }
    }
}

/// A row, or whole blocks of one, to be filled.
pub struct ActRowMut<'a> {
    lines: *mut Line,
    len: usize,
    format: ActFormat,
    life: PhantomData<&'a mut [Line]>,
}

impl<'a> ActRowMut<'a> {
    /// As [`ActRow::new`].
    ///
    /// # Panics
    /// If the lines are not a whole number of blocks.
    pub fn new(lines: &'a mut [Line], format: ActFormat) -> Self {
        assert!(lines.len().is_multiple_of(format.block_lines()));
        ActRowMut { lines: lines.as_mut_ptr(), len: lines.len(), format, life: PhantomData }
    }

    /// The format to quantise to.
    pub fn format(&self) -> ActFormat {
        self.format
    }

    /// The blocks.
    ///
    /// # Panics
    /// If the row has another format.
    #[inline]
    pub fn blocks<A: ActBlock>(&mut self) -> &mut [A] {
        assert!(A::fits(self.format));
        // SAFETY: as in `ActRow::blocks`; the lines are borrowed exclusively for the lifetime, and `self` is too for the result.
        unsafe { std::slice::from_raw_parts_mut(self.lines.cast(), self.len * 64 / size_of::<A>()) }
    }
}

/// Largest magnitude as bits, so that infinity and NaN come out largest. An integer maximum vectorises without leave to reorder floats.
#[inline(always)]
fn amax_bits(x: &[f32]) -> u32 {
    x.iter().fold(0, |m, v| m.max(v.to_bits() & 0x7fff_ffff))
}

/// Below this the reciprocal of the scale would overflow; such a block counts as zeros.
const TINY: f32 = 1e-36;

/// Scale and its inverse for a block with this largest magnitude. A block with an infinity or NaN gets codes 0 and scale NaN.
#[inline(always)]
fn scale(amax_bits: u32) -> (f32, f32) {
    let amax = f32::from_bits(amax_bits);
    if amax_bits >= 0x7f80_0000 {
        (f32::NAN, 0.0)
    } else if amax < TINY {
        (0.0, 0.0)
    } else {
        (amax / 127.0, 127.0 / amax)
    }
}

/// `round(x * inverse)`, ties to even. Exact for magnitudes below 2^22, and these are at most 127 and a rounding error; a NaN, which only
/// comes with `inverse == 0`, gives some value that the caller overwrites.
#[inline(always)]
fn code(x: f32, inverse: f32) -> i8 {
    const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23: the sum has a step of 1
    ((x * inverse + MAGIC).to_bits() as i32).wrapping_sub(MAGIC.to_bits() as i32) as i8
}

/// Quantises one run of values, and returns its scale.
#[inline(always)]
fn codes(x: &[f32], q: &mut [i8]) -> f32 {
    let (d, inverse) = scale(amax_bits(x));
    if inverse == 0.0 {
        q.fill(0);
    } else {
        for (q, x) in q.iter_mut().zip(x) {
            *q = code(*x, inverse);
        }
    }
    d
}

#[inline(always)]
fn sum(q: &[i8]) -> i32 {
    q.iter().map(|q| i32::from(*q)).sum()
}

#[inline(always)]
fn fill_256(x: &[f32; 256], fold: Fold, out: &mut Act256) {
    out.d = codes(x, &mut out.q);
    for (sum16, q) in out.sum16.iter_mut().zip(out.q.as_chunks::<16>().0) {
        *sum16 = sum(q) as i16;
    }
    for (sum32, pair) in out.sum32.iter_mut().zip(out.sum16.as_chunks::<2>().0) {
        *sum32 = pair[0] + pair[1];
    }
    out.fold = [0; 16];
    if let Fold::SuperOffset { offset, .. } = fold {
        for (fold, sum) in out.fold.iter_mut().zip(out.sum16) {
            *fold = -offset * i32::from(sum);
        }
    }
    out.pad = [0; 3];
}

/// In steps over all eight runs, because the compiler vectorises those, and not one run after the other.
#[inline(always)]
fn fill_32(x: &[f32; 256], fold: Fold, out: &mut Act32) {
    let offset = if let Fold::BlockOffset { offset } = fold { offset } else { 0 };
    let runs = x.as_chunks::<32>().0;
    let mut scales = [(0.0, 0.0); 8];
    for (scale_of_run, run) in scales.iter_mut().zip(runs) {
        let mut most = [0u32; 16];
        for (i, most) in most.iter_mut().enumerate() {
            *most = (run[i].to_bits() & 0x7fff_ffff).max(run[i + 16].to_bits() & 0x7fff_ffff);
        }
        *scale_of_run = scale(most.into_iter().fold(0, u32::max));
    }
    out.fold = [0; 16];
    for (i, (q, run)) in out.q.as_chunks_mut::<32>().0.iter_mut().zip(runs).enumerate() {
        let (d, inverse) = scales[i];
        let keep = if inverse == 0.0 { 0 } else { -1 };
        let mut sums = [0i32; 16];
        for (i, sum) in sums.iter_mut().enumerate() {
            let (low, high) = (code(run[i], inverse) & keep, code(run[i + 16], inverse) & keep);
            (q[i], q[i + 16]) = (low, high);
            *sum = i32::from(low) + i32::from(high);
        }
        let sum: i32 = sums.into_iter().sum();
        out.d[i] = d;
        out.s[i] = d * sum as f32;
        out.fold[i] = -offset * sum;
    }
}

/// Quantises `x` into the first blocks of `out`, the last one padded with zeros. Every tier compiles this same function, so that all of them
/// have the same codes, scales and sums, bit for bit.
///
/// # Panics
/// If `out` has too few blocks.
#[inline(always)]
pub fn quantise(x: &[f32], out: &mut ActRowMut<'_>) {
    let format = out.format();
    let blocks = x.len().div_ceil(ACT_BLOCK);
    let mut padded = [0.0; ACT_BLOCK];
    for i in 0..blocks {
        let part = &x[i * ACT_BLOCK..x.len().min((i + 1) * ACT_BLOCK)];
        let values: &[f32; ACT_BLOCK] = match part.first_chunk() {
            Some(whole) => whole,
            None => {
                padded[..part.len()].copy_from_slice(part);
                padded[part.len()..].fill(0.0);
                &padded
            }
        };
        match format.fold() {
            Fold::Float => out.blocks::<ActFloat>()[i].x = *values,
            fold @ (Fold::SuperOffset { .. } | Fold::SuperMin { .. }) => fill_256(values, fold, &mut out.blocks::<Act256>()[i]),
            fold @ (Fold::BlockOffset { .. } | Fold::BlockMin) => fill_32(values, fold, &mut out.blocks::<Act32>()[i]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantised(x: &[f32], weights: WeightType) -> Vec<Line> {
        let format = ActFormat::of(weights);
        let mut lines = vec![Line([0xee; 64]); format.row_lines(x.len())];
        quantise(x, &mut ActRowMut::new(&mut lines, format));
        lines
    }

    #[test]
    fn codes_are_within_half_a_step_and_sums_agree_with_them() {
        let x: Vec<f32> = (0..512).map(|i| ((i * 7919) % 1001) as f32 / 500.0 - 1.0).collect();
        let lines = quantised(&x, WeightType::Q6_K);
        for (block, x) in ActRow::new(&lines, ActFormat::of(WeightType::Q6_K)).blocks::<Act256>().iter().zip(x.chunks(256)) {
            assert!(block.q.iter().zip(x).all(|(q, x)| (f32::from(*q) * block.d - x).abs() <= 0.5001 * block.d));
            for g in 0..16 {
                let sum: i32 = block.q[16 * g..][..16].iter().map(|q| i32::from(*q)).sum();
                assert_eq!((i32::from(block.sum16[g]), block.fold[g]), (sum, -32 * sum));
            }
        }
        let lines = quantised(&x, WeightType::Q8_0);
        for (block, x) in ActRow::new(&lines, ActFormat::of(WeightType::Q8_0)).blocks::<Act32>().iter().zip(x.chunks(256)) {
            assert!((0..256).all(|i| (f32::from(block.q[i]) * block.d[i / 32] - x[i]).abs() <= 0.5001 * block.d[i / 32]));
        }
    }

    #[test]
    fn a_row_is_padded_with_zeros() {
        let format = ActFormat::of(WeightType::MXFP4);
        let lines = quantised(&[1.0; 2880], WeightType::MXFP4);
        let blocks = ActRow::new(&lines, format).blocks::<Act32>();
        assert_eq!(blocks.len(), 12);
        assert!(blocks[11].q[64..].iter().all(|q| *q == 0) && blocks[11].d[2..].iter().chain(&blocks[11].s[2..]).all(|v| *v == 0.0));
        assert_eq!(blocks[11].q[63], 127);
    }

    #[test]
    fn extreme_values_are_zeros_or_nan_but_never_wrong_codes() {
        for (value, d) in
            [(f32::NAN, None), (f32::INFINITY, None), (1e-40, Some(0.0)), (f32::MAX, Some(f32::MAX / 127.0)), (0.0, Some(0.0))]
        {
            let mut x = [0.0f32; 256];
            x[77] = value;
            for weights in [WeightType::Q4_K, WeightType::Q4_0] {
                let lines = quantised(&x, weights);
                let row = ActRow::new(&lines, ActFormat::of(weights));
                let (q, got) = if Act32::fits(row.format()) {
                    (row.blocks::<Act32>()[0].q, row.blocks::<Act32>()[0].d[2])
                } else {
                    (row.blocks::<Act256>()[0].q, row.blocks::<Act256>()[0].d)
                };
                match d {
                    None => assert!(got.is_nan() && q.iter().all(|q| *q == 0)),
                    Some(d) => assert!(got == d && q.iter().enumerate().all(|(i, q)| i == 77 || *q == 0)),
                }
            }
        }
    }
}
