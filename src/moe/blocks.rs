//! The weight formats as data: how many weights a block holds, and where its bytes are.
//!
//! Owns: [`WeightType`] with ggml's type numbers, one `#[repr(C)]` structure per format, and what a format asks of the activations that are
//! multiplied with it ([`Fold`]). Every structure has alignment 1, so that it can lie anywhere in a mapped file. Must not know: how a block
//! is decoded (`dequant.rs`, `kernels/`).
//!
//! Layouts: llama.cpp, `ggml/src/ggml-common.h`, `block_q4_0` and its neighbours.

/// An IEEE half, little endian, at any address.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Half(pub [u8; 2]);

impl Half {
    /// The 16 bits.
    #[inline(always)]
    pub const fn bits(self) -> u16 {
        u16::from_le_bytes(self.0)
    }

    /// The value, exactly. Signalling NaNs come out quiet.
    #[inline(always)]
    pub fn to_f32(self) -> f32 {
        let bits = u32::from(self.bits());
        let sign = (bits & 0x8000) << 16;
        let magnitude = bits & 0x7fff;
        let value = match magnitude {
            0..0x400 => magnitude as f32 * f32::from_bits(0x3380_0000), // 2^-24, the step of the subnormals
            0x400..0x7c00 => f32::from_bits((magnitude << 13) + (112 << 23)),
            0x7c00 => f32::INFINITY,
            _ => f32::from_bits(0x7fc0_0000 | (magnitude << 13)),
        };
        f32::from_bits(value.to_bits() | sign)
    }
}

/// What the integer kernels need from the quantised activations of one weight format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fold {
    /// Activations stay in f32.
    Float,
    /// One activation scale per 256; weights are `d * scale * (q - offset)`, a scale per `group` weights.
    SuperOffset {
        /// Weights per scale.
        group: usize,
        /// What is subtracted from the unsigned stored value.
        offset: i32,
    },
    /// One activation scale per 256; weights are `d * scale * q - dmin * min`, a scale and a min per `group` weights.
    SuperMin {
        /// Weights per scale.
        group: usize,
    },
    /// One activation scale per 32; weights are `d * (q - offset)`.
    BlockOffset {
        /// What is subtracted from the unsigned stored value.
        offset: i32,
    },
    /// One activation scale per 32; weights are `d * q + m`.
    BlockMin,
}

macro_rules! weight_types {
    ($($name:ident = $number:literal, $text:literal, $block:ident, $weights:literal, $bytes:literal, $fold:expr;)*) => {
        /// A weight format with kernels here. The numbers are ggml's `enum ggml_type`.
        #[expect(non_camel_case_types, reason = "the field writes Q4_K, not Q4K")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub enum WeightType {
            $(#[doc = concat!("ggml's ", $text, ": ", $weights, " weights in ", $bytes, " bytes.")] $name = $number,)*
        }

        impl WeightType {
            /// Every type, in ggml's order.
            pub const ALL: [WeightType; [$($number),*].len()] = [$(WeightType::$name),*];

            /// ggml's name, in small letters.
            pub const fn name(self) -> &'static str {
                match self { $(WeightType::$name => $text,)* }
            }

            /// Weights in one block.
            pub const fn block_weights(self) -> usize {
                match self { $(WeightType::$name => $weights,)* }
            }

            /// Bytes of one block.
            pub const fn block_bytes(self) -> usize {
                match self { $(WeightType::$name => $bytes,)* }
            }

            /// What the activations must carry.
            pub const fn fold(self) -> Fold {
                match self { $(WeightType::$name => $fold,)* }
            }
        }

        $(
            const _: () = assert!(size_of::<$block>() == $bytes && align_of::<$block>() == 1);
            // SAFETY: checked above: the size is that of the format and the alignment is 1; the fields are bytes, so all bit patterns are valid.
            unsafe impl Block for $block {
                const TYPE: WeightType = WeightType::$name;
            }
        )*
    };
}

/// A block structure.
///
/// # Safety
/// The structure has alignment 1, the size `TYPE.block_bytes()`, no padding, and is valid for every bit pattern.
pub unsafe trait Block: Copy + 'static {
    /// Whose block it is.
    const TYPE: WeightType;
}

weight_types! {
    F32 = 0, "f32", BlockF32, 1, 4, Fold::Float;
    F16 = 1, "f16", BlockF16, 1, 2, Fold::Float;
    Q4_0 = 2, "q4_0", BlockQ4_0, 32, 18, Fold::BlockOffset { offset: 8 };
    Q4_1 = 3, "q4_1", BlockQ4_1, 32, 20, Fold::BlockMin;
    Q5_0 = 6, "q5_0", BlockQ5_0, 32, 22, Fold::BlockOffset { offset: 16 };
    Q5_1 = 7, "q5_1", BlockQ5_1, 32, 24, Fold::BlockMin;
    Q8_0 = 8, "q8_0", BlockQ8_0, 32, 34, Fold::BlockOffset { offset: 128 };
    Q2_K = 10, "q2_K", BlockQ2K, 256, 84, Fold::SuperMin { group: 16 };
    Q3_K = 11, "q3_K", BlockQ3K, 256, 110, Fold::SuperOffset { group: 16, offset: 4 };
    Q4_K = 12, "q4_K", BlockQ4K, 256, 144, Fold::SuperMin { group: 32 };
    Q5_K = 13, "q5_K", BlockQ5K, 256, 176, Fold::SuperMin { group: 32 };
    Q6_K = 14, "q6_K", BlockQ6K, 256, 210, Fold::SuperOffset { group: 16, offset: 32 };
    IQ4_NL = 20, "iq4_nl", BlockIq4Nl, 32, 18, Fold::BlockOffset { offset: 128 };
    IQ4_XS = 23, "iq4_xs", BlockIq4Xs, 256, 136, Fold::BlockOffset { offset: 128 };
    BF16 = 30, "bf16", BlockBf16, 1, 2, Fold::Float;
    MXFP4 = 39, "mxfp4", BlockMxfp4, 32, 17, Fold::BlockOffset { offset: 12 };
}

impl WeightType {
    /// The type with ggml's number, if there are kernels for it. `None` is the answer "unsupported" that a caller asks for beforehand.
    pub fn from_ggml(number: i32) -> Option<WeightType> {
        Self::ALL.into_iter().find(|t| *t as i32 == number)
    }

    /// Place in tables that have an entry per type.
    pub fn index(self) -> usize {
        Self::ALL.iter().position(|t| *t == self).unwrap_or(0)
    }

    /// Bytes of a row of `k` weights. `None` if `k` is not a whole number of blocks, or the result does not fit.
    pub fn row_bytes(self, k: usize) -> Option<usize> {
        if k.is_multiple_of(self.block_weights()) { (k / self.block_weights()).checked_mul(self.block_bytes()) } else { None }
    }
}

/// Values of the 16 codes of IQ4_NL and IQ4_XS (`kvalues_iq4nl`).
pub const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Twice the values of the 16 codes of MXFP4 (E2M1; `kvalues_fp4`).
pub const FP4_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Half of the power of two that an E8M0 exponent stands for: half, because [`FP4_VALUES`] are doubled.
#[inline(always)]
pub fn e8m0_half(e: u8) -> f32 {
    let e = u32::from(e);
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (e - 1) << 23 })
}

macro_rules! blocks {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty),* $(,)? })*) => {
        $($(#[$doc])* #[expect(missing_docs, reason = "the fields have ggml's names and meanings")]
        #[repr(C)] #[derive(Clone, Copy, Debug)]
        pub struct $name { $(pub $field: $type),* })*
    };
}

blocks! {
    /// One f32.
    BlockF32 { bytes: [u8; 4] }
    /// One IEEE half.
    BlockF16 { value: Half }
    /// One bfloat16: the upper half of an f32.
    BlockBf16 { bytes: [u8; 2] }
    /// `d * (q - 8)`; low nibbles are weights 0..16, high nibbles 16..32.
    BlockQ4_0 { d: Half, qs: [u8; 16] }
    /// `d * q + m`.
    BlockQ4_1 { d: Half, m: Half, qs: [u8; 16] }
    /// `d * (q - 16)`; bit i of `qh` is bit 4 of weight i.
    BlockQ5_0 { d: Half, qh: [u8; 4], qs: [u8; 16] }
    /// `d * q + m`.
    BlockQ5_1 { d: Half, m: Half, qh: [u8; 4], qs: [u8; 16] }
    /// `d * q`.
    BlockQ8_0 { d: Half, qs: [i8; 32] }
    /// 16 sub-blocks of 16; a scale in each low nibble, a min in each high nibble.
    BlockQ2K { scales: [u8; 16], qs: [u8; 64], d: Half, dmin: Half }
    /// 16 sub-blocks of 16 with signed 6-bit scales.
    BlockQ3K { hmask: [u8; 32], qs: [u8; 64], scales: [u8; 12], d: Half }
    /// 8 sub-blocks of 32 with 6-bit scales and mins.
    BlockQ4K { d: Half, dmin: Half, scales: [u8; 12], qs: [u8; 128] }
    /// Q4_K and a fifth bit.
    BlockQ5K { d: Half, dmin: Half, scales: [u8; 12], qh: [u8; 32], qs: [u8; 128] }
    /// 16 sub-blocks of 16 with signed 8-bit scales.
    BlockQ6K { ql: [u8; 128], qh: [u8; 64], scales: [i8; 16], d: Half }
    /// 16 values of a table, times `d`.
    BlockIq4Nl { d: Half, qs: [u8; 16] }
    /// 8 sub-blocks of IQ4_NL with signed 6-bit scales.
    BlockIq4Xs { d: Half, scales_h: [u8; 2], scales_l: [u8; 4], qs: [u8; 128] }
    /// 32 E2M1 values and an E8M0 exponent.
    BlockMxfp4 { e: u8, qs: [u8; 16] }
}

/// The eight 6-bit scales, then the eight 6-bit mins, of Q4_K and Q5_K.
#[inline]
pub fn scales_mins_6(packed: &[u8; 12]) -> ([u8; 8], [u8; 8]) {
    let (mut scales, mut mins) = ([0; 8], [0; 8]);
    for i in 0..4 {
        scales[i] = packed[i] & 63;
        mins[i] = packed[i + 4] & 63;
        scales[i + 4] = (packed[i + 8] & 15) | ((packed[i] >> 6) << 4);
        mins[i + 4] = (packed[i + 8] >> 4) | ((packed[i + 4] >> 6) << 4);
    }
    (scales, mins)
}

/// The sixteen signed 6-bit scales of Q3_K.
#[inline]
pub fn scales_q3(packed: &[u8; 12]) -> [i8; 16] {
    std::array::from_fn(|i| {
        let low = if i < 8 { packed[i] & 15 } else { packed[i - 8] >> 4 };
        let high = (packed[8 + i % 4] >> (2 * (i / 4))) & 3;
        (low | (high << 4)) as i8 - 32
    })
}

/// The eight signed 6-bit scales of IQ4_XS.
#[inline]
pub fn scales_iq4(high: [u8; 2], low: [u8; 4]) -> [i8; 8] {
    let high = u16::from_le_bytes(high);
    std::array::from_fn(|i| {
        let low = (low[i / 2] >> (4 * (i % 2))) & 15;
        (low | (((high >> (2 * i)) & 3) as u8) << 4) as i8 - 32
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_convert_like_the_definition_of_binary16() {
        for bits in 0..=u16::MAX {
            let exponent = i32::from((bits >> 10) & 31);
            let fraction = f64::from(bits & 1023);
            let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
            let got = Half(bits.to_le_bytes()).to_f32();
            match exponent {
                31 if fraction != 0.0 => assert!(got.is_nan()),
                31 => assert_eq!(got, sign as f32 * f32::INFINITY),
                0 => assert_eq!(got.to_bits(), ((sign * fraction * 2f64.powi(-24)) as f32).to_bits()),
                _ => assert_eq!(got, (sign * (1.0 + fraction / 1024.0) * 2f64.powi(exponent - 15)) as f32),
            }
        }
    }

    #[test]
    fn a_type_is_found_by_ggmls_number_or_said_to_be_unsupported() {
        assert_eq!(WeightType::from_ggml(12), Some(WeightType::Q4_K));
        assert_eq!(WeightType::from_ggml(39), Some(WeightType::MXFP4));
        for unsupported in [-1, 4, 9, 15, 16, 24, 40, 43] {
            assert_eq!(WeightType::from_ggml(unsupported), None);
        }
        assert_eq!(WeightType::Q4_K.row_bytes(2048), Some(1152));
        assert_eq!(WeightType::Q4_K.row_bytes(2880), None);
        assert_eq!(WeightType::MXFP4.row_bytes(2880), Some(1530));
    }
}
