//! Block formats to floats and back, as far as cutting a real model needs it: the formats that it comes in, and those that it may go out in.

use anyhow::{Result, bail, ensure};
use half::{bf16, f16};

use crate::gguf::Type;

/// The floats of whole blocks.
pub(super) fn dequantize(ty: Type, bytes: &[u8]) -> Result<Vec<f32>> {
    let size = ty.block_bytes() as usize;
    ensure!(bytes.len().is_multiple_of(size), "{} bytes are not whole blocks of {ty}", bytes.len());
    let one: fn(&[u8], &mut Vec<f32>) = match ty {
        Type::F32 => |b, x| x.push(f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        Type::F16 => |b, x| x.push(half_at(b, 0)),
        Type::BF16 => |b, x| x.push(bf16::from_le_bytes([b[0], b[1]]).to_f32()),
        Type::Q8_0 => |b, x| {
            let d = half_at(b, 0);
            x.extend(b[2..].iter().map(|&q| d * f32::from(q as i8)));
        },
        Type::Q4_0 => |b, x| {
            let d = half_at(b, 0);
            x.extend(nibbles(&b[2..]).map(|q| d * (f32::from(q) - 8.0)));
        },
        Type::Q4_1 => |b, x| {
            let (d, m) = (half_at(b, 0), half_at(b, 2));
            x.extend(nibbles(&b[4..]).map(|q| d * f32::from(q) + m));
        },
        Type::Q5_0 => |b, x| {
            let d = half_at(b, 0);
            x.extend(five_bits(&b[2..6], &b[6..]).map(|q| d * (f32::from(q) - 16.0)));
        },
        Type::Q5_1 => |b, x| {
            let (d, m) = (half_at(b, 0), half_at(b, 2));
            x.extend(five_bits(&b[4..8], &b[8..]).map(|q| d * f32::from(q) + m));
        },
        Type::Q4_K => |b, x| {
            let (d, m) = (half_at(b, 0), half_at(b, 2));
            for part in 0..8 {
                let (scale, min) = six_bit_pair(&b[4..16], part);
                let bytes = &b[16 + part / 2 * 32..][..32];
                x.extend(bytes.iter().map(|q| d * f32::from(scale) * f32::from(q >> (part % 2 * 4) & 15) - m * f32::from(min)));
            }
        },
        Type::Q6_K => |b, x| {
            let d = half_at(b, 208);
            // Halves of 128 values; in each, four runs of 32 share the bytes of the upper two bits, and two runs those of the lower four.
            for i in 0..256 {
                let (half, run, at) = (i / 128, i % 128 / 32, i % 32);
                let low = b[half * 64 + run % 2 * 32 + at] >> (run / 2 * 4) & 15;
                let high = b[128 + half * 32 + at] >> (run * 2) & 3;
                let scale = b[192 + i / 16] as i8;
                x.push(d * f32::from(scale) * (f32::from(low | high << 4) - 32.0));
            }
        },
        Type::MXFP4 => |b, x| {
            let d = power_of_two(b[0]);
            x.extend(nibbles(&b[1..]).map(|q| d * fp4(q)));
        },
        other => bail!("{other} cannot be turned into floats here"),
    };
    let mut floats = Vec::with_capacity(bytes.len() / size * ty.block() as usize);
    bytes.chunks_exact(size).for_each(|block| one(block, &mut floats));
    Ok(floats)
}

/// Whole blocks from floats: F32, F16, Q8_0, Q4_0 and MXFP4.
pub(super) fn quantize(ty: Type, floats: &[f32]) -> Result<Vec<u8>> {
    ensure!((floats.len() as u64).is_multiple_of(ty.block()), "{} floats are not whole blocks of {ty}", floats.len());
    match ty {
        Type::F32 => Ok(floats.iter().flat_map(|x| x.to_le_bytes()).collect()),
        Type::F16 => Ok(floats.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect()),
        Type::Q8_0 => Ok(floats.chunks_exact(32).flat_map(q8_0).collect()),
        Type::Q4_0 => Ok(floats.chunks_exact(32).flat_map(q4_0).collect()),
        Type::MXFP4 => Ok(floats.chunks_exact(32).flat_map(mxfp4).collect()),
        other => bail!("cannot quantise to {other} here: f32, f16, q8_0, q4_0 or mxfp4"),
    }
}

/// The largest magnitude becomes 127; ties round away from zero, as ggml's `roundf` does.
fn q8_0(block: &[f32]) -> [u8; 34] {
    let largest = block.iter().fold(0f32, |m, x| m.max(x.abs()));
    let d = largest / 127.0;
    let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
    let mut out = [0; 34];
    out[..2].copy_from_slice(&f16::from_f32(d).to_le_bytes());
    for (q, x) in out[2..].iter_mut().zip(block) {
        *q = (x * inverse).round() as i8 as u8;
    }
    out
}

/// The value of the largest magnitude becomes -8.
fn q4_0(block: &[f32]) -> [u8; 18] {
    let largest = block.iter().fold(0f32, |m, &x| if x.abs() > m.abs() { x } else { m });
    let d = largest / -8.0;
    let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
    let mut out = [0; 18];
    out[..2].copy_from_slice(&f16::from_f32(d).to_le_bytes());
    put_nibbles(&mut out[2..], block, |x| ((x * inverse).round() + 8.0).clamp(0.0, 15.0) as u8);
    out
}

/// The power of two is such that the largest magnitude lies between 4 and 8, where the largest 4-bit floats are.
fn mxfp4(block: &[f32]) -> [u8; 17] {
    let largest = block.iter().fold(0f32, |m, x| m.max(x.abs()));
    let exponent = if largest == 0.0 { 0 } else { (largest.log2().floor() + 125.0).clamp(1.0, 254.0) as u8 };
    let d = power_of_two(exponent);
    let nearest = |x: f32| {
        let off = |q: &u8| (fp4(*q) - x / d).abs();
        (0..16).min_by(|a, b| off(a).total_cmp(&off(b))).unwrap_or(0)
    };
    let mut out = [0; 17];
    out[0] = exponent;
    put_nibbles(&mut out[1..], block, nearest);
    out
}

/// The scale of a block of 4-bit floats: an exponent as in a 32-bit float.
fn power_of_two(exponent: u8) -> f32 {
    (f32::from(exponent) - 127.0).exp2()
}

/// A 4-bit float: a sign, two bits of exponent, one of mantissa.
fn fp4(q: u8) -> f32 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(q & 7)];
    if q & 8 == 0 { magnitude } else { -magnitude }
}

/// The inverse of [`nibbles`].
fn put_nibbles(out: &mut [u8], block: &[f32], one: impl Fn(f32) -> u8) {
    let (low, high) = block.split_at(block.len() / 2);
    for (q, (&a, &b)) in out.iter_mut().zip(low.iter().zip(high)) {
        *q = one(a) | one(b) << 4;
    }
}

/// Scale and minimum of one of eight parts, 6 bits each in 12 bytes: the first four parts have theirs in the low bits of bytes 0 to 3 and 4 to
/// 7, the others have four bits of each in bytes 8 to 11 and the upper two on top of the first ones.
fn six_bit_pair(b: &[u8], part: usize) -> (u8, u8) {
    if part < 4 {
        return (b[part] & 63, b[part + 4] & 63);
    }
    (b[part + 4] & 15 | b[part - 4] >> 6 << 4, b[part + 4] >> 4 | b[part] >> 6 << 4)
}

/// The blocks times `factor`, without leaving the format: only their f16 scales and minima change. Exact for a power of two.
pub(super) fn scale(ty: Type, bytes: &mut [u8], factor: f32) -> Result<()> {
    let fields: &[usize] = match ty {
        Type::Q4_0 | Type::Q5_0 | Type::Q8_0 | Type::F16 => &[0],
        Type::Q4_1 | Type::Q5_1 => &[0, 2],
        other => bail!("{other} cannot be scaled in place here"),
    };
    for block in bytes.chunks_exact_mut(ty.block_bytes() as usize) {
        for &at in fields {
            let scaled = f16::from_f32(half_at(block, at) * factor);
            block[at..at + 2].copy_from_slice(&scaled.to_le_bytes());
        }
    }
    Ok(())
}

fn half_at(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

/// 16 bytes hold 32 values: the low halves are the first 16.
fn nibbles(b: &[u8]) -> impl Iterator<Item = u8> {
    b.iter().map(|q| q & 15).chain(b.iter().map(|q| q >> 4))
}

/// Nibbles with a fifth bit from a 32-bit mask.
fn five_bits(mask: &[u8], b: &[u8]) -> impl Iterator<Item = u8> {
    let mask = u32::from_le_bytes([mask[0], mask[1], mask[2], mask[3]]);
    nibbles(b).enumerate().map(move |(i, q)| q | ((((mask >> i) & 1) as u8) << 4))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn q8_0_is_off_by_at_most_half_a_step() {
        let x: Vec<f32> = (0..64).map(|i| ((i * 37 % 101) as f32 - 50.0) / 13.0).collect();
        let y = dequantize(Type::Q8_0, &quantize(Type::Q8_0, &x).unwrap()).unwrap();
        for (i, (a, b)) in x.iter().zip(&y).enumerate() {
            let largest = x[i / 32 * 32..][..32].iter().fold(0f32, |m, v| m.max(v.abs()));
            // Half a step of the scale, and the scale's own rounding to 11 bits.
            assert!((a - b).abs() <= largest / 127.0 * 0.5 + largest / 1024.0, "{i}: {a} {b}");
        }
    }

    #[test]
    fn four_bits_are_off_by_at_most_half_of_their_largest_step() {
        let x: Vec<f32> = (0..64).map(|i| ((i * 37 % 101) as f32 - 50.0) / 13.0).collect();
        // In Q4_0 a value as large as the largest and of the other sign is a whole step of an eighth off; in MXFP4 the step is 2 of 8 below 8,
        // with nothing above 6.
        for (ty, off) in [(Type::Q4_0, 1.0 / 8.0 + 1e-3), (Type::MXFP4, 2.0 / 8.0)] {
            let y = dequantize(ty, &quantize(ty, &x).unwrap()).unwrap();
            for (i, (a, b)) in x.iter().zip(&y).enumerate() {
                let largest = x[i / 32 * 32..][..32].iter().fold(0f32, |m, v| m.max(v.abs()));
                assert!((a - b).abs() <= largest * off, "{ty} {i}: {a} {b}");
            }
            assert_eq!(quantize(ty, &y).unwrap(), quantize(ty, &x).unwrap(), "{ty}: what is in the format stays");
        }
    }

    #[test]
    fn scaling_by_a_power_of_two_is_exact() {
        let x: Vec<f32> = (0..32).map(|i| i as f32 / 7.0).collect();
        for ty in [Type::Q8_0, Type::F16] {
            let mut bytes = quantize(ty, &x).unwrap();
            let before = dequantize(ty, &bytes).unwrap();
            scale(ty, &mut bytes, 8.0).unwrap();
            assert_eq!(dequantize(ty, &bytes).unwrap(), before.iter().map(|v| v * 8.0).collect::<Vec<_>>(), "{ty}");
        }
    }

    #[test]
    fn a_known_q5_1_block_is_read_as_the_format_says() {
        // Scale 1, minimum -2; the fifth bit is set in elements 0 and 31; every nibble pair is 0x21.
        let mut block = vec![0x00, 0x3c, 0x00, 0xc0, 0x01, 0x00, 0x00, 0x80];
        block.extend([0x21; 16]);
        let x = dequantize(Type::Q5_1, &block).unwrap();
        assert_eq!((x[0], x[1], x[16], x[31]), (15.0, -1.0, 0.0, 16.0));
    }
}
