//! The block formats that a GGUF tensor can have.
//!
//! Owns: number, name, elements per block and bytes per block of every ggml type, as of ggml 0.26. Must not know: how a block is decoded.
//!
//! Mirrors `enum ggml_type` in `ggml.h` and the block structs in `ggml-common.h`. The numbers are part of the file format and never reused.

use std::borrow::Cow;

/// A tensor's block format, as the number that stands in the file. It may be one that this version does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GgmlType(pub u32);

/// What is known about a block format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TypeInfo {
    /// The number in the file.
    pub number: u32,
    /// ggml's name, for example `q4_K`.
    pub name: &'static str,
    /// Elements in one block.
    pub block_elements: u64,
    /// Bytes of one block.
    pub block_bytes: u64,
}

const fn ty(number: u32, name: &'static str, block_elements: u64, block_bytes: u64) -> TypeInfo {
    TypeInfo { number, name, block_elements, block_bytes }
}

/// Sorted by number, so that a look-up is a binary search. 4, 5, 31 to 33 and 36 to 38 were removed from the format.
const TYPES: [TypeInfo; 35] = [
    ty(0, "f32", 1, 4),
    ty(1, "f16", 1, 2),
    ty(2, "q4_0", 32, 18),
    ty(3, "q4_1", 32, 20),
    ty(6, "q5_0", 32, 22),
    ty(7, "q5_1", 32, 24),
    ty(8, "q8_0", 32, 34),
    ty(9, "q8_1", 32, 36),
    ty(10, "q2_K", 256, 84),
    ty(11, "q3_K", 256, 110),
    ty(12, "q4_K", 256, 144),
    ty(13, "q5_K", 256, 176),
    ty(14, "q6_K", 256, 210),
    ty(15, "q8_K", 256, 292),
    ty(16, "iq2_xxs", 256, 66),
    ty(17, "iq2_xs", 256, 74),
    ty(18, "iq3_xxs", 256, 98),
    ty(19, "iq1_s", 256, 50),
    ty(20, "iq4_nl", 32, 18),
    ty(21, "iq3_s", 256, 110),
    ty(22, "iq2_s", 256, 82),
    ty(23, "iq4_xs", 256, 136),
    ty(24, "i8", 1, 1),
    ty(25, "i16", 1, 2),
    ty(26, "i32", 1, 4),
    ty(27, "i64", 1, 8),
    ty(28, "f64", 1, 8),
    ty(29, "iq1_m", 256, 56),
    ty(30, "bf16", 1, 2),
    ty(34, "tq1_0", 256, 54),
    ty(35, "tq2_0", 256, 66),
    ty(39, "mxfp4", 32, 17),
    ty(40, "nvfp4", 64, 36),
    ty(41, "q1_0", 128, 18),
    ty(42, "q2_0", 64, 18),
];

impl GgmlType {
    /// 32-bit floats.
    pub const F32: GgmlType = GgmlType(0);
    /// 16-bit floats.
    pub const F16: GgmlType = GgmlType(1);
    /// 4 bits, blocks of 32 with one scale.
    pub const Q4_0: GgmlType = GgmlType(2);
    /// 2 bits, super-blocks of 256.
    pub const Q2_K: GgmlType = GgmlType(10);
    /// 4 bits, super-blocks of 256.
    pub const Q4_K: GgmlType = GgmlType(12);
    /// 6 bits, super-blocks of 256.
    pub const Q6_K: GgmlType = GgmlType(14);
    /// 4 bits through a table, blocks of 32.
    pub const IQ4_NL: GgmlType = GgmlType(20);
    /// bfloat16.
    pub const BF16: GgmlType = GgmlType(30);
    /// OCP microscaling 4-bit floats, blocks of 32.
    pub const MXFP4: GgmlType = GgmlType(39);

    /// The table entry; `None` for a number that is not (or no longer) a format this version knows.
    pub fn info(self) -> Option<&'static TypeInfo> {
        TYPES.binary_search_by_key(&self.0, |t| t.number).ok().map(|i| &TYPES[i])
    }

    /// Every known format, in the order of the numbers.
    pub fn known() -> &'static [TypeInfo] {
        &TYPES
    }

    /// Whether the number once was a format and was taken out of ggml. Stock refuses such a file.
    pub fn is_removed(self) -> bool {
        matches!(self.0, 4 | 5 | 31..=33 | 36..=38)
    }

    /// ggml's name, or `type N`.
    pub fn name(self) -> Cow<'static, str> {
        match self.info() {
            Some(info) => Cow::Borrowed(info.name),
            None => Cow::Owned(format!("type {}", self.0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn type_table_is_sorted_and_has_no_empty_block() {
        assert!(TYPES.windows(2).all(|w| w[0].number < w[1].number));
        assert!(TYPES.iter().all(|t| t.block_elements > 0 && t.block_bytes > 0));
        assert!(TYPES.iter().all(|t| !GgmlType(t.number).is_removed()));
    }

    #[test]
    fn unknown_type_has_a_printable_name() {
        assert_eq!(GgmlType(12).name(), "q4_K");
        assert_eq!(GgmlType(139).name(), "type 139");
        assert!(GgmlType(139).info().is_none());
    }
}
