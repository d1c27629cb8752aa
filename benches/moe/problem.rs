//! A layer to run: weights larger than any cache, tokens, routing.
//!
//! Owns: geometry, random data, the check of the answer. Must not know: how time is measured.

use berth::moe::blocks::WeightType;
use berth::moe::isa::{self, Isa, Tier};
use berth::moe::{
    Activation, Experts, Inputs, Kernels, Matrix, ParallelFor, Projection, Rows, RowsMut, Serial, Table, forward, table, workspace_size,
};

/// Sizes of a layer.
#[derive(Clone, Copy)]
pub(crate) struct Geometry {
    pub(crate) name: &'static str,
    pub(crate) d: usize,
    pub(crate) f: usize,
    pub(crate) experts: usize,
    pub(crate) used: usize,
}

pub(crate) const QWEN3: Geometry = Geometry { name: "qwen3-30b-a3b", d: 2048, f: 768, experts: 128, used: 8 };
pub(crate) const GPT_OSS: Geometry = Geometry { name: "gpt-oss", d: 2880, f: 2880, experts: 32, used: 4 };
/// As many experts as fit; the width is what counts.
pub(crate) const DEEPSEEK: Geometry = Geometry { name: "deepseek-v3", d: 7168, f: 2048, experts: 48, used: 8 };

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Random codes with scales of about 2^-6, the same in all blocks.
fn weights(rng: &mut Rng, ty: WeightType, k: usize, rows: usize) -> Vec<u8> {
    let bytes = ty.row_bytes(k).expect("whole blocks") * rows;
    // One megabyte of blocks, again and again: what a cache sees is its address.
    let unit = ty.block_bytes() * ((1 << 20) / ty.block_bytes());
    let mut pattern: Vec<u8> = (0..unit).map(|_| (rng.next() >> 24) as u8).collect();
    for block in pattern.chunks_exact_mut(ty.block_bytes()) {
        let n = block.len();
        let scale = 0x2400u16.to_le_bytes();
        match ty {
            WeightType::F32 => block[3] = 0x3c,
            WeightType::F16 | WeightType::BF16 => block[1] = 0x3c & block[1] | 0x20,
            WeightType::Q4_1 | WeightType::Q5_1 | WeightType::Q4_K | WeightType::Q5_K => {
                block[..2].copy_from_slice(&scale);
                block[2..4].copy_from_slice(&scale);
            }
            WeightType::Q2_K => {
                block[80..82].copy_from_slice(&scale);
                block[82..].copy_from_slice(&scale);
            }
            WeightType::Q3_K | WeightType::Q6_K => block[n - 2..].copy_from_slice(&scale),
            WeightType::MXFP4 => block[0] = 121,
            _ => block[..2].copy_from_slice(&scale),
        }
    }
    let mut all = Vec::with_capacity(bytes);
    while all.len() < bytes {
        all.extend_from_slice(&pattern[..unit.min(bytes - all.len())]);
    }
    all
}

/// As [`weights`], with a seed of its own.
pub(crate) fn weights_of(ty: WeightType, k: usize, rows: usize) -> Vec<u8> {
    weights(&mut Rng(0x2545_f491_4f6c_dd1d), ty, k, rows)
}

/// A layer and its weights.
pub(crate) struct Layer {
    pub(crate) geometry: Geometry,
    pub(crate) types: [WeightType; 2],
    bytes: [Vec<u8>; 3],
}

impl Layer {
    /// Gate and up of the first type, down of the second.
    pub(crate) fn new(geometry: Geometry, types: [WeightType; 2]) -> Layer {
        let mut rng = Rng(0x1234_5678_9abc_def1);
        let Geometry { d, f, experts, .. } = geometry;
        let bytes = [
            weights(&mut rng, types[0], d, f * experts),
            weights(&mut rng, types[0], d, f * experts),
            weights(&mut rng, types[1], f, d * experts),
        ];
        Layer { geometry, types, bytes }
    }

    pub(crate) fn experts(&self) -> Experts<'_> {
        let Geometry { d, f, experts, .. } = self.geometry;
        let matrix = |i: usize, ty, dims| Projection::new(Matrix::packed(&self.bytes[i], ty, dims).expect("sizes"));
        Experts {
            gate: Some(matrix(0, self.types[0], [d, f, experts])),
            up: matrix(1, self.types[0], [d, f, experts]),
            down: matrix(2, self.types[1], [f, d, experts]),
            activation: Activation::SwiGlu,
            weight_first: false,
        }
    }

    /// Bytes of one expert.
    pub(crate) fn expert_bytes(&self) -> usize {
        self.bytes.iter().map(Vec::len).sum::<usize>() / self.geometry.experts
    }

    /// Multiply-adds of one token with one expert.
    pub(crate) fn expert_macs(&self) -> usize {
        3 * self.geometry.d * self.geometry.f
    }

    /// Some memory larger than any cache.
    pub(crate) fn memory(&self) -> &[u8] {
        &self.bytes[0]
    }
}

/// Tokens, their experts, and the memory of a run.
pub(crate) struct Run {
    tokens: usize,
    x: Vec<f32>,
    /// One set of ids after the other, so that repeated runs of few tokens do not find their weights in a cache.
    ids: Vec<Vec<i32>>,
    at: usize,
    weights: Vec<f32>,
    pub(crate) y: Vec<f32>,
    workspace: Vec<u8>,
}

impl Run {
    /// `skew` 0 is uniform routing; else low experts are more likely, the more the larger.
    pub(crate) fn new(layer: &Layer, tokens: usize, threads: usize, skew: f64) -> Run {
        let Geometry { d, experts, used, .. } = layer.geometry;
        let mut rng = Rng(0x9e37_79b9_7f4a_7c15 ^ tokens as u64);
        let mut unit = |n: usize| -> Vec<f32> { (0..n).map(|_| (rng.next() >> 40) as f32 / 8_388_608.0 - 1.0).collect() };
        let (x, weights) = (unit(d * tokens), vec![1.0 / used as f32; used * tokens]);
        let sets = (experts / used / tokens).max(1);
        let mut ids = Vec::new();
        for set in 0..sets {
            let mut all = Vec::new();
            for token in 0..tokens {
                if sets > 1 {
                    // Sets do not overlap.
                    all.extend((0..used).map(|j| (((set * tokens + token) * used + j) % experts) as i32));
                    continue;
                }
                let mut mine: Vec<i32> = Vec::new();
                while mine.len() < used {
                    let u = (rng.next() >> 11) as f64 / (1u64 << 53) as f64;
                    let id = (u.powf(1.0 + skew) * experts as f64) as i32;
                    if !mine.contains(&id) {
                        mine.push(id);
                    }
                }
                all.extend(mine);
            }
            ids.push(all);
        }
        let size = workspace_size(&layer.experts(), tokens, used, threads).expect("sizes");
        Run { tokens, x, ids, at: 0, weights, y: vec![0.0; d * tokens], workspace: vec![0; size + 64] }
    }

    /// Distinct experts of one run, on average.
    pub(crate) fn distinct(&self) -> f64 {
        let count = |ids: &Vec<i32>| {
            let mut ids = ids.clone();
            ids.sort_unstable();
            ids.dedup();
            ids.len()
        };
        self.ids.iter().map(count).sum::<usize>() as f64 / self.ids.len() as f64
    }

    /// Once.
    pub(crate) fn step(&mut self, layer: &Layer, kernels: Kernels, threads: &dyn ParallelFor) {
        let Geometry { d, used, .. } = layer.geometry;
        self.at = (self.at + 1) % self.ids.len();
        let start = self.workspace.as_ptr().align_offset(64);
        let inputs = Inputs {
            x: Rows::packed(&self.x, d, self.tokens).expect("sizes"),
            ids: Table::packed(&self.ids[self.at], used, self.tokens).expect("sizes"),
            weights: Some(Table::packed(&self.weights, used, self.tokens).expect("sizes")),
            y: RowsMut::packed(&mut self.y, d, self.tokens).expect("sizes"),
        };
        forward(&layer.experts(), &inputs, &mut self.workspace[start..], kernels, threads).expect("forward");
    }
}

/// Runs two tokens on the tier and on the oracle.
///
/// # Panics
/// If they differ by more than the rounding of intermediate values to 8 bits explains.
pub(crate) fn check(layer: &Layer, isa: Isa) {
    for tokens in [1, 5] {
        let few = Layer {
            geometry: Geometry { experts: 2 * layer.geometry.used, ..layer.geometry },
            types: layer.types,
            bytes: layer.bytes.clone(),
        };
        let (mut a, mut b) = (Run::new(&few, tokens, 1, 0.0), Run::new(&few, tokens, 1, 0.0));
        a.step(&few, table(isa), &Serial);
        let oracle = isa.lowered(Tier::Scalar).unwrap_or(isa);
        b.step(&few, table(oracle), &Serial);
        let error: f64 = a.y.iter().zip(&b.y).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        let size: f64 = b.y.iter().map(|b| f64::from(*b).powi(2)).sum();
        assert!(size > 0.0 && error / size < 1e-4, "{} {:?}: {error:e} of {size:e}", layer.geometry.name, layer.types);
    }
}

/// The tiers that `BERTH_ISA` and this CPU leave, best first, without the oracle; or the one that the command line names.
pub(crate) fn tiers() -> Vec<Isa> {
    let best = isa::detect().expect("BERTH_ISA");
    let named = Tier::ALL.into_iter().find(|t| std::env::args().any(|a| a == t.name()));
    let wanted = |t: &Tier| named.map_or(*t > Tier::Scalar, |n| n == *t);
    Tier::ALL.into_iter().rev().filter(wanted).filter_map(|t| best.lowered(t)).collect()
}
