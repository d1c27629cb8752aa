//! Data for the tests: fresh random weights and activations, and a reference product in f64.
//!
//! Owns: [`Rng`], [`weights`], [`Aligned`], [`reference`]. A seed comes from the clock and is printed, so that a failure can be repeated
//! with `BERTH_TEST_SEED`. Must not know: kernels.

use super::args::{Matrix, WeightRows};
use super::blocks::*;
use super::dequant;
use super::isa::{self, Isa, Tier};

/// xorshift64*.
pub(super) struct Rng(u64);

impl Rng {
    pub(super) fn new(test: &str) -> Rng {
        let given = std::env::var("BERTH_TEST_SEED").ok().and_then(|s| s.parse().ok());
        let clock = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(1, |d| d.as_nanos() as u64);
        let seed = given.unwrap_or_else(clock) | 1;
        println!("{test}: BERTH_TEST_SEED={seed}");
        Rng(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    pub(super) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// In -1..1.
    pub(super) fn signed(&mut self) -> f32 {
        (self.next() & 0xff_ffff) as f32 / f32::from_bits(0x4b00_0000) - 1.0
    }

    pub(super) fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.signed()).collect()
    }

    /// A half of either sign, of magnitude 2^-8 to 2^-4.
    fn half(&mut self) -> Half {
        let bits = (7 + self.below(4)) << 10 | self.below(0x400) | self.below(2) << 15;
        Half((bits as u16).to_le_bytes())
    }
}

/// Random blocks: all bits random, but scales finite and of moderate size.
pub(super) fn weights(rng: &mut Rng, weights: WeightType, k: usize, rows: usize) -> Vec<u8> {
    let blocks = k / weights.block_weights() * rows;
    let mut out = Vec::with_capacity(blocks * weights.block_bytes());
    for _ in 0..blocks {
        let start = out.len();
        out.extend((0..weights.block_bytes()).map(|_| rng.next() as u8));
        let block = &mut out[start..];
        let mut set = |at: usize, half: Half| block[at..at + 2].copy_from_slice(&half.0);
        match weights {
            WeightType::F32 => block.copy_from_slice(&rng.signed().to_le_bytes()),
            WeightType::BF16 => block.copy_from_slice(&rng.signed().to_le_bytes()[2..]),
            WeightType::F16 | WeightType::Q4_0 | WeightType::Q5_0 | WeightType::Q8_0 | WeightType::IQ4_NL | WeightType::IQ4_XS => {
                set(0, rng.half());
            }
            WeightType::Q4_1 | WeightType::Q5_1 | WeightType::Q4_K | WeightType::Q5_K => {
                set(0, rng.half());
                set(2, rng.half());
            }
            WeightType::Q2_K => {
                set(80, rng.half());
                set(82, rng.half());
            }
            WeightType::Q3_K => set(108, rng.half()),
            WeightType::Q6_K => set(208, rng.half()),
            WeightType::MXFP4 => block[0] = 118 + rng.below(6) as u8,
        }
    }
    out
}

/// Decodes one row, whatever its format.
pub(super) fn decoded(rows: &WeightRows<'_>, r: usize) -> Vec<f32> {
    let mut out = vec![0.0; rows.k()];
    dequant::row(rows.weights(), rows.bytes(r), &mut out).unwrap();
    out
}

/// All products of one expert with one vector, in f64.
pub(super) fn reference(matrix: &Matrix<'_>, expert: usize, x: &[f64]) -> Vec<f64> {
    let rows = matrix.slice(expert, 0, matrix.rows());
    (0..matrix.rows()).map(|r| decoded(&rows, r).iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum()).collect()
}

/// Bytes at a 64-byte boundary.
pub(super) struct Aligned {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    pub(super) fn new(len: usize) -> Aligned {
        let bytes = vec![0xa5; len + 64];
        let start = bytes.as_ptr().align_offset(64);
        Aligned { bytes, start, len }
    }

    pub(super) fn get(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..][..self.len]
    }
}

/// The tiers to test, and a line for each that this CPU lacks. `best` needs no environment: tests lower it themselves.
pub(super) fn tiers() -> Vec<Isa> {
    let best = isa::detect().expect("BERTH_ISA");
    let mut tiers = Vec::new();
    for tier in Tier::ALL {
        match best.lowered(tier) {
            Some(isa) => tiers.push(isa),
            None => {
                assert!(std::env::var_os("CI").is_none() || !tier.in_this_cpu(), "{} must not be left out in CI", tier.name());
                println!("SKIPPED {}: not in this CPU, or BERTH_ISA is set", tier.name());
            }
        }
    }
    tiers
}
