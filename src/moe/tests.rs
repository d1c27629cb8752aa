//! The operation as a whole, against f64 and against itself.
//!
//! The reference multiplies the decoded weights in f64 and applies the formula; the operation also rounds tokens and intermediate values to
//! 8 bits, so the two differ by the noise of that. Intermediate values are products of two sums: of 256, the largest is some 10 times their
//! root mean square, which makes a step of 10/127 of it, and a normalised mean square error of (10/127)^2 / 12 = 5e-4; the bound is four
//! times that. Exactness beyond the noise is the business of `kernels/tests.rs`.

use super::testing::{Aligned, Rng, reference, tiers, weights};
use super::*;
use crate::error::Status;

/// A whole problem with its own memory.
struct Problem {
    d: usize,
    f: usize,
    out: usize,
    experts: usize,
    used: usize,
    tokens: usize,
    types: [WeightType; 3],
    bytes: [Vec<u8>; 3],
    x: Vec<f32>,
    ids: Vec<i32>,
    weights: Vec<f32>,
    biases: Option<[Vec<f32>; 3]>,
    scales: Option<[Vec<f32>; 3]>,
    activation: Activation,
    weight_first: bool,
}

impl Problem {
    fn new(rng: &mut Rng, [d, f, out, experts, used, tokens]: [usize; 6], types: [WeightType; 3]) -> Problem {
        let bytes =
            [weights(rng, types[0], d, f * experts), weights(rng, types[1], d, f * experts), weights(rng, types[2], f, out * experts)];
        let ids = (0..used * tokens).map(|_| rng.below(experts) as i32).collect();
        let activation = Activation::SwiGlu;
        let (x, weights) = (rng.values(d * tokens), rng.values(used * tokens));
        let (biases, scales, weight_first) = (None, None, false);
        Problem { d, f, out, experts, used, tokens, types, bytes, x, ids, weights, biases, scales, activation, weight_first }
    }

    fn with_biases_and_scales(mut self, rng: &mut Rng) -> Self {
        let n = self.experts;
        self.biases = Some([rng.values(self.f * n), rng.values(self.f * n), rng.values(self.out * n)]);
        self.scales = Some([rng.values(n), rng.values(n), rng.values(n)]);
        self
    }

    fn experts(&self) -> Experts<'_> {
        let dims = [[self.d, self.f], [self.d, self.f], [self.f, self.out]];
        let n = self.experts;
        let projection = |i: usize| Projection {
            matrix: Matrix::packed(&self.bytes[i], self.types[i], [dims[i][0], dims[i][1], n]).unwrap(),
            scale: self.scales.as_ref().map(|s| PerExpert::new(&s[i], 1, n, 1).unwrap()),
            bias: self.biases.as_ref().map(|b| PerExpert::new(&b[i], dims[i][1], n, dims[i][1]).unwrap()),
        };
        let gate = self.activation.gated().then(|| projection(0));
        Experts { gate, up: projection(1), down: projection(2), activation: self.activation, weight_first: self.weight_first }
    }

    fn run(&self, kernels: Kernels, threads: &dyn ParallelFor) -> Vec<f32> {
        let mut y = vec![f32::NAN; self.out * self.tokens];
        let experts = self.experts();
        let mut workspace = Aligned::new(workspace_size(&experts, self.tokens, self.used, threads.threads()).unwrap());
        let inputs = Inputs {
            x: Rows::packed(&self.x, self.d, self.tokens).unwrap(),
            ids: Table::packed(&self.ids, self.used, self.tokens).unwrap(),
            weights: Some(Table::packed(&self.weights, self.used, self.tokens).unwrap()),
            y: RowsMut::packed(&mut y, self.out, self.tokens).unwrap(),
        };
        forward(&experts, &inputs, workspace.get(), kernels, threads).unwrap();
        y
    }

    fn exact(&self) -> Vec<f64> {
        let e = self.experts();
        let finish = |p: &Projection<'_>, expert: usize, v: &mut Vec<f64>, before: f64| {
            let scale = before * p.scale.map_or(1.0, |s| f64::from(s.of(expert)[0]));
            for (i, v) in v.iter_mut().enumerate() {
                *v = *v * scale + p.bias.map_or(0.0, |b| f64::from(b.of(expert)[i]));
            }
        };
        let mut y = vec![0.0; self.out * self.tokens];
        for t in 0..self.tokens {
            let x: Vec<f64> = self.x[t * self.d..][..self.d].iter().map(|v| f64::from(*v)).collect();
            for j in 0..self.used {
                let (expert, weight) = (self.ids[t * self.used + j] as usize, f64::from(self.weights[t * self.used + j]));
                let (before, after) = if self.weight_first { (weight, 1.0) } else { (1.0, weight) };
                let product = |p: &Projection<'_>, x: &[f64], before: f64| {
                    let mut v = reference(&p.matrix, expert, x);
                    finish(p, expert, &mut v, before);
                    v
                };
                let up = product(&e.up, &x, before);
                let mut h = e.gate.map_or_else(|| up.clone(), |g| product(&g, &x, before)).iter().map(|v| *v as f32).collect::<Vec<_>>();
                activation::apply(e.activation, &mut h, &up.iter().map(|v| *v as f32).collect::<Vec<_>>());
                let h: Vec<f64> = h.into_iter().map(f64::from).collect();
                for (y, v) in y[t * self.out..].iter_mut().zip(product(&e.down, &h, 1.0)) {
                    *y += after * v;
                }
            }
        }
        y
    }
}

fn nmse(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let error: f64 = got.iter().zip(want).map(|(g, w)| (f64::from(*g) - w).powi(2)).sum();
    error / want.iter().map(|w| w * w).sum::<f64>().max(1e-30)
}

const BOUND: f64 = 2e-3;

#[test]
fn every_type_in_every_tier_is_close_to_f64() {
    let mut rng = Rng::new("types");
    for ty in WeightType::ALL {
        let p = Problem::new(&mut rng, [256, 256, 80, 5, 2, 7], [ty; 3]);
        let want = p.exact();
        for isa in tiers() {
            let error = nmse(&p.run(table(isa), &Serial), &want);
            assert!(error < BOUND, "{} {}: {error:e}", isa.tier().name(), ty.name());
        }
    }
}

#[test]
fn every_activation_with_biases_and_scales_is_close_to_f64() {
    let mut rng = Rng::new("activations");
    let all = [
        Activation::SwiGlu,
        Activation::SwiGluOai { alpha: 1.702, limit: 7.0 },
        Activation::SwiGluClamp { limit: 0.5 },
        Activation::SwiGluLimit { limit: 0.25 },
        Activation::GeGlu,
        Activation::GeGluErf,
        Activation::GeGluQuick,
        Activation::ReGlu,
        Activation::Silu,
        Activation::Gelu,
        Activation::Relu,
        Activation::ReluSqr,
    ];
    for activation in all {
        for weight_first in [false, true] {
            let dims = [128, 288, 70, 4, 3, 6];
            let mut p =
                Problem::new(&mut rng, dims, [WeightType::Q8_0, WeightType::MXFP4, WeightType::Q5_0]).with_biases_and_scales(&mut rng);
            (p.activation, p.weight_first) = (activation, weight_first);
            let want = p.exact();
            for isa in tiers() {
                let error = nmse(&p.run(table(isa), &Serial), &want);
                assert!(error < BOUND, "{} {activation:?}: {error:e}", isa.tier().name());
            }
        }
    }
}

#[test]
fn shapes_and_routings_of_all_kinds_are_close_to_f64() {
    let mut rng = Rng::new("shapes");
    use WeightType::*;
    let cases: [([usize; 6], [WeightType; 3]); 9] = [
        ([256, 512, 64, 1, 1, 1], [Q4_K, Q4_K, Q6_K]),
        ([512, 256, 130, 8, 8, 3], [Q4_K, Q5_K, Q6_K]),
        ([96, 96, 96, 6, 2, 5], [MXFP4, MXFP4, MXFP4]),
        ([64, 2880, 32, 2, 2, 2], [MXFP4, Q8_0, MXFP4]),
        ([256, 768, 65, 3, 2, 300], [Q4_K, Q4_K, Q6_K]),
        // One row: of many tokens, since an error relative to nine values varies too much.
        ([32, 32, 1, 40, 3, 90], [Q4_0, Q4_0, Q4_0]),
        ([33, 7, 5, 4, 2, 9], [F32, BF16, F16]),
        ([256, 256, 256, 2, 1, 150], [IQ4_XS, IQ4_XS, IQ4_XS]),
        ([256, 32, 64, 16, 4, 20], [Q2_K, Q3_K, Q8_0]),
    ];
    for (dims, types) in cases {
        let p = Problem::new(&mut rng, dims, types);
        let want = p.exact();
        for isa in tiers() {
            let error = nmse(&p.run(table(isa), &Serial), &want);
            assert!(error < BOUND, "{} {dims:?} {types:?}: {error:e}", isa.tier().name());
        }
    }
}

#[test]
fn one_expert_for_all_and_the_same_expert_twice_are_close_to_f64() {
    let mut rng = Rng::new("skew");
    let mut p = Problem::new(&mut rng, [256, 256, 64, 7, 3, 60], [WeightType::Q4_K, WeightType::Q4_K, WeightType::Q4_K]);
    for ids in [vec![4; 180], (0..180).map(|i| [2, 2, 6][i % 3]).collect()] {
        p.ids = ids;
        let want = p.exact();
        for isa in tiers() {
            assert!(nmse(&p.run(table(isa), &Serial), &want) < BOUND);
        }
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let mut rng = Rng::new("threads");
    for tokens in [1, 3, 5, 200] {
        let p = Problem::new(&mut rng, [256, 768, 200, 9, 4, tokens], [WeightType::Q4_K, WeightType::Q4_K, WeightType::Q6_K]);
        for isa in tiers() {
            let want: Vec<u32> = p.run(table(isa), &Serial).iter().map(|v| v.to_bits()).collect();
            for threads in [2, 3, 7] {
                let pool = Pool::new(threads).unwrap();
                let got: Vec<u32> = p.run(table(isa), &pool).iter().map(|v| v.to_bits()).collect();
                assert!(got == want, "{threads} threads, {tokens} tokens, {}", isa.tier().name());
            }
        }
    }
}

#[test]
fn merged_gate_and_up_weights_equal_separate_ones() {
    let mut rng = Rng::new("merged");
    let (d, f, experts) = (256, 288, 3);
    let ty = WeightType::Q4_K;
    let p = Problem::new(&mut rng, [d, f, 32, experts, 2, 6], [ty, ty, WeightType::Q8_0]);
    let expert_bytes = ty.row_bytes(d).unwrap() * f;
    let pairs = p.bytes[0].chunks(expert_bytes).zip(p.bytes[1].chunks(expert_bytes));
    let merged: Vec<u8> = pairs.flat_map(|(gate, up)| [gate, up].concat()).collect();
    let matrix = Matrix::packed(&merged, ty, [d, 2 * f, experts]).unwrap();
    let separate = p.experts();
    let gate = Some(Projection::new(matrix.part(0, f).unwrap()));
    let experts = Experts { gate, up: Projection::new(matrix.part(f, f).unwrap()), ..separate };
    for isa in tiers() {
        let mut y = vec![f32::NAN; 32 * 6];
        let mut workspace = Aligned::new(workspace_size(&experts, 6, 2, 1).unwrap());
        let inputs = Inputs {
            x: Rows::packed(&p.x, d, 6).unwrap(),
            ids: Table::packed(&p.ids, 2, 6).unwrap(),
            weights: Some(Table::packed(&p.weights, 2, 6).unwrap()),
            y: RowsMut::packed(&mut y, 32, 6).unwrap(),
        };
        forward(&experts, &inputs, workspace.get(), table(isa), &Serial).unwrap();
        assert_eq!(y, p.run(table(isa), &Serial));
    }
}

#[test]
fn output_in_the_memory_of_the_input_gives_the_same_result() {
    let mut rng = Rng::new("alias");
    for tokens in [1, 9] {
        let p = Problem::new(&mut rng, [256, 256, 256, 4, 2, tokens], [WeightType::Q4_K, WeightType::Q4_K, WeightType::Q4_K]);
        for isa in tiers() {
            let want = p.run(table(isa), &Serial);
            let mut memory = p.x.clone();
            let experts = p.experts();
            let pool = Pool::new(2).unwrap();
            let mut workspace = Aligned::new(workspace_size(&experts, tokens, 2, 2).unwrap());
            let base = memory.as_mut_ptr();
            // SAFETY: `memory` holds tokens rows of 256 for both, and is not used otherwise until `forward` has returned.
            let (x, y) = unsafe {
                (Rows::new(base, [256, 1, tokens], [1024; 2]).unwrap(), RowsMut::new(base, [256, 1, tokens], [1024; 2]).unwrap())
            };
            let ids = Table::packed(&p.ids, 2, tokens).unwrap();
            let weights = Some(Table::packed(&p.weights, 2, tokens).unwrap());
            forward(&experts, &Inputs { x, ids, weights, y }, workspace.get(), table(isa), &pool).unwrap();
            assert_eq!(memory, want);
        }
    }
}

#[test]
fn no_tokens_is_no_work() {
    let mut rng = Rng::new("none");
    let p = Problem::new(&mut rng, [256, 256, 64, 4, 2, 0], [WeightType::Q4_K; 3]);
    assert!(p.run(table(tiers()[0]), &Serial).is_empty());
}

#[test]
fn bad_arguments_are_errors_and_nothing_is_written() {
    let mut rng = Rng::new("bad");
    let p = Problem::new(&mut rng, [256, 256, 64, 4, 2, 3], [WeightType::Q4_K; 3]);
    let kernels = table(tiers()[0]);
    let experts = p.experts();
    let size = workspace_size(&experts, 3, 2, 1).unwrap();
    let attempt = |experts: &Experts<'_>, ids: &[i32], x_width: usize, y_width: usize, workspace: &mut [u8]| {
        let x = vec![1.0; x_width * 3];
        let mut y = vec![7.0; y_width * 3];
        let inputs = Inputs {
            x: Rows::packed(&x, x_width, 3).unwrap(),
            ids: Table::packed(ids, 2, ids.len() / 2).unwrap(),
            weights: None,
            y: RowsMut::packed(&mut y, y_width, 3).unwrap(),
        };
        let status = forward(experts, &inputs, workspace, kernels, &Serial).err().map(|e| e.status);
        assert!(status.is_none() || y.iter().all(|v| *v == 7.0));
        status
    };
    let mut workspace = Aligned::new(size);
    let bad = Some(Status::InvalidArgument);
    assert_eq!(attempt(&experts, &[0, 1, 2, 3, 0, 1], 256, 64, workspace.get()), None);
    assert_eq!(attempt(&experts, &[0, 1, 2, 4, 0, 1], 256, 64, workspace.get()), bad);
    assert_eq!(attempt(&experts, &[0, 1, 2, -1, 0, 1], 256, 64, workspace.get()), bad);
    assert_eq!(attempt(&experts, &[0, 1, 2, 3], 256, 64, workspace.get()), bad);
    assert_eq!(attempt(&experts, &[0, 1, 2, 3, 0, 1], 255, 64, workspace.get()), bad);
    assert_eq!(attempt(&experts, &[0, 1, 2, 3, 0, 1], 256, 63, workspace.get()), bad);
    assert_eq!(attempt(&experts, &[0, 1, 2, 3, 0, 1], 256, 64, &mut workspace.get()[..size / 2]), bad);
    assert_eq!(attempt(&experts, &[0, 1, 2, 3, 0, 1], 256, 64, &mut workspace.get()[4..]), bad);
    assert_eq!(attempt(&experts, &[0, 1, 2, 3, 0, 1], 256, 64, &mut []), bad);
    let ungated = Experts { activation: Activation::Silu, ..experts };
    assert_eq!(attempt(&ungated, &[0, 1, 2, 3, 0, 1], 256, 64, workspace.get()), bad);
    let gateless = Experts { gate: None, ..experts };
    assert_eq!(attempt(&gateless, &[0, 1, 2, 3, 0, 1], 256, 64, workspace.get()), bad);
    let swapped = Experts { down: experts.up, ..experts };
    assert_eq!(attempt(&swapped, &[0, 1, 2, 3, 0, 1], 256, 256, workspace.get()), bad.filter(|_| p.f != p.d));
}

#[test]
fn one_projection_alone_is_close_to_f64_for_shared_and_own_rows() {
    let mut rng = Rng::new("single");
    let (k, rows, experts, used, tokens) = (512, 100, 5, 3, 8);
    for ty in WeightType::ALL {
        let bytes = weights(&mut rng, ty, k, rows * experts);
        let matrix = Matrix::packed(&bytes, ty, [k, rows, experts]).unwrap();
        let ids: Vec<i32> = (0..used * tokens).map(|_| rng.below(experts) as i32).collect();
        for x_used in [1, used] {
            let x = rng.values(k * x_used * tokens);
            let want: Vec<f64> = (0..used * tokens)
                .flat_map(|pair| {
                    let row = if x_used == 1 { pair / used } else { pair };
                    reference(&matrix, ids[pair] as usize, &x[row * k..][..k].iter().map(|v| f64::from(*v)).collect::<Vec<_>>())
                })
                .collect();
            for isa in tiers() {
                let mut out = vec![f32::NAN; rows * used * tokens];
                let mut workspace = Aligned::new(mul_mat_id_workspace_size(&matrix, tokens, used, 2).unwrap());
                // SAFETY: both views have exactly the sizes of their vectors, which outlive them.
                let (x, y) = unsafe {
                    (
                        Rows::new(x.as_ptr(), [k, x_used, tokens], [4 * k, 4 * k * x_used]).unwrap(),
                        RowsMut::new(out.as_mut_ptr(), [rows, used, tokens], [4 * rows, 4 * rows * used]).unwrap(),
                    )
                };
                let ids = Table::packed(&ids, used, tokens).unwrap();
                mul_mat_id(&matrix, &x, &ids, &y, workspace.get(), table(isa), &Pool::new(2).unwrap()).unwrap();
                let error = nmse(&out, &want);
                assert!(error < BOUND, "{} {}: {error:e}", isa.tier().name(), ty.name());
            }
        }
    }
}
