//! Random but valid blocks of every format, with a wanted standard deviation of the weights. No float copy of a tensor is ever made.
//!
//! Quantised bits are uniform, so the spread of a weight at scale 1 follows from the format alone; the scale is the wanted spread over it.
//! Written with `E[q²]` the mean square of a uniform integer: `n` bits unsigned have mean `(2ⁿ-1)/2` and `E[q²] = (2ⁿ-1)(2ⁿ⁺¹-1)/6`; two's
//! complement ones, or ones with `2ⁿ⁻¹` subtracted, have `E[q²] = (4ⁿ+2)/12`.

use std::io::Write;

use anyhow::{Result, ensure};
use half::{bf16, f16};

use super::rng::Rng;
use crate::gguf::Type;

/// The layout of a block: which bytes hold which scale, and the spread of a weight at scale 1.
struct Shape {
    /// Where the f16 scale is.
    scale_at: usize,
    /// Where the f16 minimum is, and how many times the scale it is so that the mean is zero.
    min: Option<(usize, f32)>,
    /// Root mean square of the weights at scale 1.
    spread: f32,
}

fn shape(ty: Type) -> Option<Shape> {
    let (scale_at, min, spread) = match ty {
        // q - 8: sqrt((4⁴+2)/12).
        Type::Q4_0 => (0, None, 4.64),
        // q + m, m = -7.5: sqrt((16²-1)/12).
        Type::Q4_1 => (0, Some((2, -7.5)), 4.61),
        // q - 16.
        Type::Q5_0 => (0, None, 9.25),
        Type::Q5_1 => (0, Some((2, -15.5)), 9.23),
        Type::Q8_0 => (0, None, 73.9),
        // sc q - min m with 4-bit sc and m, 2-bit q: min = E[q] = 1.5.
        Type::Q2_K => (80, Some((82, 1.5)), 13.9),
        // (sc - 32)(q - 4) with 6-bit sc, 3-bit q.
        Type::Q3_K => (108, None, 43.3),
        // sc q - min m with 6-bit sc and m, 4-bit q: min = 7.5.
        Type::Q4_K => (0, Some((2, 7.5)), 258.0),
        // The same with 5-bit q: min = 15.5.
        Type::Q5_K => (0, Some((2, 15.5)), 527.0),
        // sc (q - 32) with 8-bit sc, 6-bit q.
        Type::Q6_K => (208, None, 1366.0),
        // A codebook of 16 values whose mean square is 4548.
        Type::IQ4_NL => (0, None, 67.4),
        // The same times (sc - 32) with 6-bit sc.
        Type::IQ4_XS => (0, None, 1246.0),
        Type::F32 | Type::F16 | Type::BF16 | Type::MXFP4 => return None,
    };
    Some(Shape { scale_at, min, spread })
}

/// Mean square root of the sixteen values of a 4-bit float (0, ½, 1, 1½, 2, 3, 4, 6 and their negatives).
const FP4_SPREAD: f32 = 2.93;

/// `n` random blocks whose weights have about the standard deviation `std`.
fn random(rng: &mut Rng, ty: Type, n: usize, std: f32) -> Vec<u8> {
    let size = ty.block_bytes() as usize;
    let mut bytes = vec![0; n * size];
    match shape(ty) {
        Some(shape) => {
            rng.fill(&mut bytes);
            let scale = std / shape.spread;
            for block in bytes.chunks_exact_mut(size) {
                put_f16(block, shape.scale_at, scale);
                if let Some((at, times)) = shape.min {
                    put_f16(block, at, scale * times);
                }
            }
        }
        None if ty == Type::MXFP4 => {
            rng.fill(&mut bytes);
            // The shared exponent, as in the upper bits of a 32-bit float.
            let exponent = ((std / FP4_SPREAD).log2().round() + 127.0).clamp(1.0, 253.0) as u8;
            bytes.chunks_exact_mut(size).for_each(|block| block[0] = exponent);
        }
        None => {
            for element in bytes.chunks_exact_mut(size) {
                let x = rng.normal() * std;
                match ty {
                    Type::F32 => element.copy_from_slice(&x.to_le_bytes()),
                    Type::F16 => element.copy_from_slice(&f16::from_f32(x).to_le_bytes()),
                    _ => element.copy_from_slice(&bf16::from_f32(x).to_le_bytes()),
                }
            }
        }
    }
    bytes
}

fn put_f16(block: &mut [u8], at: usize, value: f32) {
    block[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
}

/// Writes a random tensor of `bytes` bytes. Large ones repeat a pool of blocks from ever other places, which keeps to the speed of a disk.
pub(super) fn write(rng: &mut Rng, ty: Type, bytes: u64, std: f32, out: &mut impl Write) -> Result<()> {
    let size = ty.block_bytes();
    ensure!(bytes.is_multiple_of(size), "{bytes} bytes are not whole blocks of {ty}");
    let mut left = bytes / size;
    let pool_blocks = left.min(1 << 15);
    let pool = random(rng, ty, pool_blocks as usize, std);
    while left > 0 {
        let from = rng.below(pool_blocks);
        let n = left.min(pool_blocks - from);
        out.write_all(&pool[(from * size) as usize..((from + n) * size) as usize])?;
        left -= n;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::quants::dequantize;

    fn spread(ty: Type) -> (f32, f32) {
        let bytes = random(&mut Rng::new(3), ty, 4096, 0.02);
        let x = dequantize(ty, &bytes).unwrap();
        let mean = x.iter().sum::<f32>() / x.len() as f32;
        (mean, (x.iter().map(|v| v * v).sum::<f32>() / x.len() as f32).sqrt())
    }

    #[test]
    fn weights_have_the_wanted_spread_and_no_bias() {
        for ty in [Type::F32, Type::F16, Type::BF16, Type::Q4_0, Type::Q4_1, Type::Q5_0, Type::Q5_1, Type::Q8_0, Type::Q4_K, Type::Q6_K] {
            let (mean, rms) = spread(ty);
            assert!((rms - 0.02).abs() < 0.001, "{ty}: rms {rms}");
            // A format without a minimum is off by half a step.
            assert!(mean.abs() < 0.003, "{ty}: mean {mean}");
        }
    }

    #[test]
    fn a_tensor_has_exactly_its_bytes_and_depends_on_the_seed() {
        for ty in Type::all() {
            let bytes = ty.bytes(&[256, 9, 40]).unwrap();
            let make = |seed| {
                let mut out = Vec::new();
                write(&mut Rng::new(seed), ty, bytes, 0.1, &mut out).unwrap();
                out
            };
            assert_eq!(make(1).len() as u64, bytes, "{ty}");
            assert_eq!(make(1), make(1), "{ty}");
            assert_ne!(make(1), make(2), "{ty}");
        }
    }
}
