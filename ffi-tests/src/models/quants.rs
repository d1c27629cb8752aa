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
        other => bail!("{other} cannot be turned into floats here"),
    };
    let mut floats = Vec::with_capacity(bytes.len() / size * ty.block() as usize);
    bytes.chunks_exact(size).for_each(|block| one(block, &mut floats));
    Ok(floats)
}

/// Whole blocks from floats: F32, F16 and Q8_0.
pub(super) fn quantize(ty: Type, floats: &[f32]) -> Result<Vec<u8>> {
    ensure!((floats.len() as u64).is_multiple_of(ty.block()), "{} floats are not whole blocks of {ty}", floats.len());
    match ty {
        Type::F32 => Ok(floats.iter().flat_map(|x| x.to_le_bytes()).collect()),
        Type::F16 => Ok(floats.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect()),
        Type::Q8_0 => Ok(floats.chunks_exact(32).flat_map(q8_0).collect()),
        other => bail!("cannot quantise to {other} here: f32, f16 or q8_0"),
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
