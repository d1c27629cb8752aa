//! The block formats that are written or read here: number in the file, name, elements and bytes of a block.

use std::fmt;
use std::str::FromStr;

use anyhow::{Result, bail, ensure};

/// A block format. The discriminant is its number in GGUF files, which never changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[expect(non_camel_case_types, reason = "the names that ggml and its users know")]
pub enum Type {
    /// 32-bit float.
    F32 = 0,
    /// 16-bit float.
    F16 = 1,
    /// 4 bits, one scale per 32.
    Q4_0 = 2,
    /// 4 bits, scale and minimum per 32.
    Q4_1 = 3,
    /// 5 bits, one scale per 32.
    Q5_0 = 6,
    /// 5 bits, scale and minimum per 32.
    Q5_1 = 7,
    /// 8 bits, one scale per 32.
    Q8_0 = 8,
    /// 2 bits in blocks of 256.
    Q2_K = 10,
    /// 3 bits in blocks of 256.
    Q3_K = 11,
    /// 4 bits in blocks of 256.
    Q4_K = 12,
    /// 5 bits in blocks of 256.
    Q5_K = 13,
    /// 6 bits in blocks of 256.
    Q6_K = 14,
    /// 4 bits through a codebook, one scale per 32.
    IQ4_NL = 20,
    /// 4 bits through a codebook, blocks of 256.
    IQ4_XS = 23,
    /// The upper half of a 32-bit float.
    BF16 = 30,
    /// 4-bit floats, one power of two per 32.
    MXFP4 = 39,
}

/// Type, name, elements of a block, bytes of a block.
const TABLE: &[(Type, &str, u64, u64)] = &[
    (Type::F32, "f32", 1, 4),
    (Type::F16, "f16", 1, 2),
    (Type::Q4_0, "q4_0", 32, 18),
    (Type::Q4_1, "q4_1", 32, 20),
    (Type::Q5_0, "q5_0", 32, 22),
    (Type::Q5_1, "q5_1", 32, 24),
    (Type::Q8_0, "q8_0", 32, 34),
    (Type::Q2_K, "q2_k", 256, 84),
    (Type::Q3_K, "q3_k", 256, 110),
    (Type::Q4_K, "q4_k", 256, 144),
    (Type::Q5_K, "q5_k", 256, 176),
    (Type::Q6_K, "q6_k", 256, 210),
    (Type::IQ4_NL, "iq4_nl", 32, 18),
    (Type::IQ4_XS, "iq4_xs", 256, 136),
    (Type::BF16, "bf16", 1, 2),
    (Type::MXFP4, "mxfp4", 32, 17),
];

impl Type {
    /// Every type, in the order of their numbers.
    pub fn all() -> impl Iterator<Item = Type> {
        TABLE.iter().map(|row| row.0)
    }

    fn row(self) -> &'static (Type, &'static str, u64, u64) {
        TABLE.iter().find(|row| row.0 == self).expect("every type is in the table: a test proves it")
    }

    /// Elements of a block.
    pub fn block(self) -> u64 {
        self.row().2
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> u64 {
        self.row().3
    }

    /// The type with that number in a GGUF file.
    pub fn from_number(number: u32) -> Result<Self> {
        match TABLE.iter().find(|row| row.0 as u32 == number) {
            Some(row) => Ok(row.0),
            None => bail!("tensor type {number} is not known here"),
        }
    }

    /// Bytes of a tensor of these dimensions, the contiguous one first; its rows must be whole blocks.
    pub fn bytes(self, dims: &[u64]) -> Result<u64> {
        let row = dims.first().copied().unwrap_or(1);
        ensure!(row % self.block() == 0, "{self} needs rows that are a multiple of {}, not {row}", self.block());
        let elements = dims.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
        match elements.and_then(|n| (n / self.block()).checked_mul(self.block_bytes())) {
            Some(bytes) => Ok(bytes),
            None => bail!("a tensor of dimensions {dims:?} overflows"),
        }
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.row().1)
    }
}

impl FromStr for Type {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> Result<Self> {
        match TABLE.iter().find(|row| row.1.eq_ignore_ascii_case(name)) {
            Some(row) => Ok(row.0),
            None => bail!("no type {name}; there are {}", TABLE.iter().map(|row| row.1).collect::<Vec<_>>().join(" ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_lead_back_to_the_type() {
        for ty in Type::all() {
            assert_eq!(ty.to_string().parse::<Type>().unwrap(), ty);
            assert_eq!(Type::from_number(ty as u32).unwrap(), ty);
        }
        assert_eq!("Q4_K".parse::<Type>().unwrap(), Type::Q4_K);
        assert!(Type::from_number(9).is_err() && "q9".parse::<Type>().is_err());
    }

    #[test]
    fn an_absurd_size_is_an_error() {
        assert!(Type::F32.bytes(&[u64::MAX, 2]).is_err());
    }
}
