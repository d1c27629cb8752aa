//! A block as f32, bit for bit as ggml does it.
//!
//! Owns: [`Dequant`] for every block structure, and [`row`] over raw bytes. Must not know: activations, kernels. The order of the few
//! floating-point operations is that of `dequantize_row_*` in llama.cpp's `ggml-quants.c`: another order differs in the last bit.

use super::args::Matrix;
use super::blocks::*;
use crate::error::{Error, Result};

/// Decoding of one block.
pub trait Dequant: Block {
    /// Writes the weights of the block: `out.len() == Self::TYPE.block_weights()`.
    fn dequant(&self, out: &mut [f32]);
}

/// Decodes consecutive blocks.
pub fn blocks<B: Dequant>(row: &[B], out: &mut [f32]) {
    for (block, out) in row.iter().zip(out.chunks_exact_mut(B::TYPE.block_weights())) {
        block.dequant(out);
    }
}

/// Decodes a whole number of blocks of any format.
///
/// # Errors
/// [`crate::error::Status::InvalidArgument`] if `bytes` and `out` are not of the same whole number of blocks.
pub fn row(weights: WeightType, bytes: &[u8], out: &mut [f32]) -> Result<()> {
    fn run<B: Dequant>(bytes: &[u8], out: &mut [f32]) -> Result<()> {
        let k = out.len();
        if weights_fit::<B>(bytes.len(), k) {
            if k > 0 {
                blocks(Matrix::packed(bytes, B::TYPE, [k, 1, 1])?.slice(0, 0, 1).row::<B>(0), out);
            }
            return Ok(());
        }
        Err(Error::invalid(format!("{} bytes of {} are not {k} weights", bytes.len(), B::TYPE.name())))
    }
    match weights {
        WeightType::F32 => run::<BlockF32>(bytes, out),
        WeightType::F16 => run::<BlockF16>(bytes, out),
        WeightType::Q4_0 => run::<BlockQ4_0>(bytes, out),
        WeightType::Q4_1 => run::<BlockQ4_1>(bytes, out),
        WeightType::Q5_0 => run::<BlockQ5_0>(bytes, out),
        WeightType::Q5_1 => run::<BlockQ5_1>(bytes, out),
        WeightType::Q8_0 => run::<BlockQ8_0>(bytes, out),
        WeightType::Q2_K => run::<BlockQ2K>(bytes, out),
        WeightType::Q3_K => run::<BlockQ3K>(bytes, out),
        WeightType::Q4_K => run::<BlockQ4K>(bytes, out),
        WeightType::Q5_K => run::<BlockQ5K>(bytes, out),
        WeightType::Q6_K => run::<BlockQ6K>(bytes, out),
        WeightType::IQ4_NL => run::<BlockIq4Nl>(bytes, out),
        WeightType::IQ4_XS => run::<BlockIq4Xs>(bytes, out),
        WeightType::BF16 => run::<BlockBf16>(bytes, out),
        WeightType::MXFP4 => run::<BlockMxfp4>(bytes, out),
    }
}

fn weights_fit<B: Block>(bytes: usize, k: usize) -> bool {
    B::TYPE.row_bytes(k) == Some(bytes)
}

impl Dequant for BlockF32 {
    fn dequant(&self, out: &mut [f32]) {
        out[0] = f32::from_le_bytes(self.bytes);
    }
}

impl Dequant for BlockF16 {
    fn dequant(&self, out: &mut [f32]) {
        out[0] = self.value.to_f32();
    }
}

impl Dequant for BlockBf16 {
    fn dequant(&self, out: &mut [f32]) {
        out[0] = f32::from_bits(u32::from(u16::from_le_bytes(self.bytes)) << 16);
    }
}

/// Runs `weight(i, code)` for the 32 codes of a block whose low nibbles come first.
fn nibbles(qs: &[u8; 16], out: &mut [f32], weight: impl Fn(usize, u8) -> f32) {
    let (low, high) = out.split_at_mut(16);
    for (i, q) in qs.iter().enumerate() {
        low[i] = weight(i, q & 15);
        high[i] = weight(i + 16, q >> 4);
    }
}

/// Bit 4 of weight `i`, in place.
fn fifth(qh: [u8; 4], i: usize) -> u8 {
    ((qh[i / 8] >> (i % 8)) & 1) << 4
}

impl Dequant for BlockQ4_0 {
    fn dequant(&self, out: &mut [f32]) {
        let d = self.d.to_f32();
        nibbles(&self.qs, out, |_, q| f32::from(q as i8 - 8) * d);
    }
}

impl Dequant for BlockQ4_1 {
    fn dequant(&self, out: &mut [f32]) {
        let (d, m) = (self.d.to_f32(), self.m.to_f32());
        nibbles(&self.qs, out, |_, q| f32::from(q) * d + m);
    }
}

impl Dequant for BlockQ5_0 {
    fn dequant(&self, out: &mut [f32]) {
        let d = self.d.to_f32();
        nibbles(&self.qs, out, |i, q| f32::from((q | fifth(self.qh, i)) as i8 - 16) * d);
    }
}

impl Dequant for BlockQ5_1 {
    fn dequant(&self, out: &mut [f32]) {
        let (d, m) = (self.d.to_f32(), self.m.to_f32());
        nibbles(&self.qs, out, |i, q| f32::from(q | fifth(self.qh, i)) * d + m);
    }
}

impl Dequant for BlockQ8_0 {
    fn dequant(&self, out: &mut [f32]) {
        let d = self.d.to_f32();
        for (out, q) in out.iter_mut().zip(self.qs) {
            *out = f32::from(q) * d;
        }
    }
}

impl Dequant for BlockIq4Nl {
    fn dequant(&self, out: &mut [f32]) {
        let d = self.d.to_f32();
        nibbles(&self.qs, out, |_, q| d * f32::from(IQ4_VALUES[usize::from(q)]));
    }
}

impl Dequant for BlockMxfp4 {
    fn dequant(&self, out: &mut [f32]) {
        let d = e8m0_half(self.e);
        nibbles(&self.qs, out, |_, q| f32::from(FP4_VALUES[usize::from(q)]) * d);
    }
}

impl Dequant for BlockIq4Xs {
    fn dequant(&self, out: &mut [f32]) {
        let d = self.d.to_f32();
        let scales = scales_iq4(self.scales_h, self.scales_l);
        for (sub, qs) in self.qs.as_chunks::<16>().0.iter().enumerate() {
            let dl = d * f32::from(scales[sub]);
            nibbles(qs, &mut out[32 * sub..][..32], |_, q| dl * f32::from(IQ4_VALUES[usize::from(q)]));
        }
    }
}

/// Weight `i` of 256, in the order of Q2_K and Q3_K: two bits of byte `32 * half + i % 32`, the lowest pair first.
fn two_bits(qs: &[u8; 64], i: usize) -> u8 {
    (qs[32 * (i / 128) + i % 32] >> (2 * (i % 128 / 32))) & 3
}

impl Dequant for BlockQ2K {
    fn dequant(&self, out: &mut [f32]) {
        let (d, dmin) = (self.d.to_f32(), self.dmin.to_f32());
        for (i, out) in out.iter_mut().enumerate() {
            let scale = self.scales[i / 16];
            let (dl, ml) = (d * f32::from(scale & 15), dmin * f32::from(scale >> 4));
            *out = dl * f32::from(two_bits(&self.qs, i)) - ml;
        }
    }
}

impl Dequant for BlockQ3K {
    fn dequant(&self, out: &mut [f32]) {
        let d = self.d.to_f32();
        let scales = scales_q3(&self.scales);
        for (i, out) in out.iter_mut().enumerate() {
            let dl = d * f32::from(scales[i / 16]);
            let high = (self.hmask[i % 32] >> (i / 32)) & 1;
            *out = dl * f32::from((two_bits(&self.qs, i) | (high << 2)) as i8 - 4);
        }
    }
}

/// The code of weight `i` of 256 in Q4_K and Q5_K, without the fifth bit.
fn k_nibble(qs: &[u8; 128], i: usize) -> u8 {
    (qs[32 * (i / 64) + i % 32] >> (4 * (i % 64 / 32))) & 15
}

impl Dequant for BlockQ4K {
    fn dequant(&self, out: &mut [f32]) {
        let (d, dmin) = (self.d.to_f32(), self.dmin.to_f32());
        let (scales, mins) = scales_mins_6(&self.scales);
        for (i, out) in out.iter_mut().enumerate() {
            let (dl, ml) = (d * f32::from(scales[i / 32]), dmin * f32::from(mins[i / 32]));
            *out = dl * f32::from(k_nibble(&self.qs, i)) - ml;
        }
    }
}

impl Dequant for BlockQ5K {
    fn dequant(&self, out: &mut [f32]) {
        let (d, dmin) = (self.d.to_f32(), self.dmin.to_f32());
        let (scales, mins) = scales_mins_6(&self.scales);
        for (i, out) in out.iter_mut().enumerate() {
            let (dl, ml) = (d * f32::from(scales[i / 32]), dmin * f32::from(mins[i / 32]));
            let high = ((self.qh[i % 32] >> (i / 32)) & 1) << 4;
            *out = dl * f32::from(k_nibble(&self.qs, i) | high) - ml;
        }
    }
}

impl Dequant for BlockQ6K {
    fn dequant(&self, out: &mut [f32]) {
        let d = self.d.to_f32();
        for (i, out) in out.iter_mut().enumerate() {
            let (half, part, l) = (i / 128, i % 128 / 32, i % 32);
            let low = (self.ql[64 * half + 32 * (part % 2) + l] >> (4 * (part / 2))) & 15;
            let high = (self.qh[32 * half + l] >> (2 * part)) & 3;
            *out = d * f32::from(self.scales[i / 16]) * f32::from((low | (high << 4)) as i8 - 32);
        }
    }
}
