//! The MoE arithmetic against real ggml: decoding bit for bit, and the error of the products next to that of libggml-cpu.
//!
//! `c/moe_peer.c` runs ggml. Errors are normalised mean squares against f64 products of the decoded weights with the unrounded activations,
//! so each side pays for its own rounding of activations. Berth's must be no larger than ggml's, in every tier. Both round to 8 bits with
//! almost the same steps, so that one draw may differ by chance by a few percent either way: means over many draws are compared.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use berth::moe::isa::{self, Isa, Tier};
use berth::moe::{
    Activation, Experts, Inputs, Matrix, Pool, Projection, Rows, RowsMut, Serial, Table, WeightType, dequant, forward, mul_mat_id,
    mul_mat_id_workspace_size, table, workspace_size,
};
use ffi_tests::hosts;

/// The mean over the draws of Berth's error as a share of ggml's may be this. One draw's share varies by 1 to 3 % (few tokens, intermediates
/// that are rounded anew), so that a mean of [`DRAWS`] varies by under 0.5 %.
const CHANCE: f64 = 1.02;
/// How often each block is drawn, per number of tokens.
const DRAWS: usize = 12;

/// Berth's errors against ggml's: the mean of the shares.
#[derive(Default)]
struct Shares(BTreeMap<String, Vec<f64>>);

impl Shares {
    /// Below 1e-11 both are f32 rounding, 3.5e-15 a step and more where sums and mins cancel: the order of additions. ggml itself
    /// overflows for Q4_1 and Q5_1 at 1e4: the sum of a block is a half there (Q8_1).
    fn add(&mut self, what: String, ours: f64, stock: f64) {
        assert!(ours < 1e-3 || ours <= 2.0 * stock, "{what}: {ours:e}, ggml {stock:e}");
        let share = if ours < 1e-11 || stock.is_nan() { 0.0 } else { ours / stock };
        self.0.entry(what).or_default().push(share);
    }

    fn check(&self) {
        for (what, shares) in &self.0 {
            let mean = shares.iter().sum::<f64>() / shares.len() as f64;
            let worst = shares.iter().copied().fold(0.0, f64::max);
            println!("{what:40} mean {mean:.4} worst {worst:.4} of {}", shares.len());
        }
        for (what, shares) in &self.0 {
            let mean = shares.iter().sum::<f64>() / shares.len() as f64;
            assert!(mean <= CHANCE, "{what}: the error is {mean} times that of ggml: {shares:?}");
        }
    }
}

struct Peer {
    program: PathBuf,
    cpu: PathBuf,
    _dir: tempfile::TempDir,
}

impl Peer {
    fn new() -> Option<Peer> {
        let host = hosts::require("sdist-dl")?;
        let include = host.include.clone().expect("this host has headers");
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("moe_peer");
        let mut compile = Command::new("cc");
        compile.args(["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-isystem"]).arg(include);
        compile.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("c/moe_peer.c")).arg("-o").arg(&program);
        compile.args([host.lib("ggml-base").unwrap(), host.lib("ggml").unwrap()]);
        compile.arg(format!("-Wl,-rpath,{}", host.lib_dir.display()));
        assert!(compile.status().expect("cc is missing: apt-get install gcc").success());
        let cpu = host.lib("ggml-cpu").unwrap();
        Some(Peer { program, cpu, _dir: dir })
    }

    fn run(&self, what: &str, numbers: &[usize], input: &[&[u8]]) -> Vec<u8> {
        let mut command = Command::new(&self.program);
        command.arg(what);
        if ["mul_mat_id", "chain"].contains(&what) {
            command.arg(&self.cpu);
        }
        command.args(numbers.iter().map(usize::to_string)).env("OMP_NUM_THREADS", "2");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        let mut child = command.spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let input = input.concat();
        let writer = std::thread::spawn(move || stdin.write_all(&input));
        let output = child.wait_with_output().unwrap();
        writer.join().unwrap().unwrap();
        assert!(output.status.success(), "moe_peer {what} {numbers:?}");
        output.stdout
    }

    fn floats(&self, what: &str, numbers: &[usize], input: &[&[u8]]) -> Vec<f32> {
        self.run(what, numbers, input).as_chunks::<4>().0.iter().map(|b| f32::from_ne_bytes(*b)).collect()
    }
}

struct Rng(u64);

impl Rng {
    fn new(test: &str) -> Rng {
        let given = std::env::var("BERTH_TEST_SEED").ok().and_then(|s| s.parse().ok());
        let clock = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(1, |d| d.as_nanos() as u64);
        let seed = given.unwrap_or_else(clock) | 1;
        println!("{test}: BERTH_TEST_SEED={seed}");
        Rng(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    fn unit(&mut self) -> f64 {
        (self.next() & 0xffff_ffff) as f64 / 4_294_967_296.0
    }

    /// Normal, as weights and activations are.
    fn normal(&mut self) -> f32 {
        ((-2.0 * (1.0 - self.unit()).ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()) as f32
    }

    fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }

    fn ids(&mut self, experts: usize, n: usize) -> Vec<i32> {
        (0..n).map(|_| (self.next() % experts as u64) as i32).collect()
    }
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_ne_bytes()).collect()
}

fn id_bytes(ids: &[i32]) -> Vec<u8> {
    ids.iter().flat_map(|v| v.to_ne_bytes()).collect()
}

/// The tiers of this CPU, best last.
fn tiers() -> Vec<Isa> {
    let best = isa::detect().expect("BERTH_ISA");
    let lower = |t: Tier| {
        let isa = best.lowered(t);
        if isa.is_none() {
            ffi_tests::skip::skipped(t.name(), "not in this CPU, or BERTH_ISA is set");
        }
        isa
    };
    Tier::ALL.into_iter().filter_map(lower).collect()
}

/// A workspace at a 64-byte boundary.
fn workspace(memory: &mut Vec<u8>, size: usize) -> &mut [u8] {
    memory.resize(size + 64, 0);
    let start = memory.as_ptr().align_offset(64);
    &mut memory[start..start + size]
}

fn nmse(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let error: f64 = got.iter().zip(want).map(|(g, w)| (f64::from(*g) - w).powi(2)).sum();
    error / want.iter().map(|w| w * w).sum::<f64>().max(f64::MIN_POSITIVE)
}

#[test]
fn every_type_is_decoded_bit_for_bit_as_ggml_does_it() {
    let Some(peer) = Peer::new() else { return };
    let mut rng = Rng::new("decode");
    for ty in WeightType::ALL {
        // All bits random, infinities and NaNs among the scales too.
        let blocks = 4096 * 256 / ty.block_weights().max(32);
        let bytes: Vec<u8> = (0..blocks * ty.block_bytes()).map(|_| rng.next() as u8).collect();
        let count = blocks * ty.block_weights();
        let want = peer.floats("to_float", &[ty as usize, count], &[&bytes]);
        let mut got = vec![0.0f32; count];
        dequant::row(ty, &bytes, &mut got).unwrap();
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
            assert!(same, "{} weight {i}: {got} ({:08x}), ggml has {want} ({:08x})", ty.name(), got.to_bits(), want.to_bits());
        }
    }
}

/// Weights of one matrix as ggml quantises normal values of a realistic size.
fn quantised(peer: &Peer, rng: &mut Rng, ty: WeightType, k: usize, rows: usize) -> Vec<u8> {
    let values: Vec<f32> = rng.normals(k * rows).iter().map(|v| v * 0.05).collect();
    if ty == WeightType::F32 {
        return bytes_of(&values);
    }
    peer.run("quantize", &[ty as usize, k, rows], &[&bytes_of(&values)])
}

fn decoded(ty: WeightType, bytes: &[u8], count: usize) -> Vec<f32> {
    let mut out = vec![0.0; count];
    dequant::row(ty, bytes, &mut out).unwrap();
    out
}

struct Product {
    ty: WeightType,
    k: usize,
    m: usize,
    experts: usize,
    used: usize,
    tokens: usize,
    bytes: Vec<u8>,
    weights: Vec<f32>,
}

impl Product {
    fn exact(&self, x: &[f32], ids: &[i32]) -> Vec<f64> {
        let row = |pair: usize, r: usize| {
            let w = &self.weights[(ids[pair] as usize * self.m + r) * self.k..][..self.k];
            w.iter().zip(&x[pair / self.used * self.k..]).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum()
        };
        (0..self.used * self.tokens).flat_map(|pair| (0..self.m).map(move |r| row(pair, r))).collect()
    }

    fn stock(&self, peer: &Peer, x: &[f32], ids: &[i32]) -> Vec<f32> {
        let numbers = [self.ty as usize, self.k, self.m, self.experts, 1, self.used, self.tokens];
        peer.floats("mul_mat_id", &numbers, &[&self.bytes, &bytes_of(x), &id_bytes(ids)])
    }

    fn berth(&self, isa: Isa, x: &[f32], ids: &[i32]) -> Vec<f32> {
        let matrix = Matrix::packed(&self.bytes, self.ty, [self.k, self.m, self.experts]).unwrap();
        let mut out = vec![f32::NAN; self.m * self.used * self.tokens];
        let mut memory = Vec::new();
        let workspace = workspace(&mut memory, mul_mat_id_workspace_size(&matrix, self.tokens, self.used, 1).unwrap());
        let rows = Rows::packed(x, self.k, self.tokens).unwrap();
        let strides = [4 * self.m, 4 * self.m * self.used];
        // SAFETY: `out` has exactly these rows, and is not used otherwise until the call has returned.
        let y = unsafe { RowsMut::new(out.as_mut_ptr(), [self.m, self.used, self.tokens], strides) }.unwrap();
        mul_mat_id(&matrix, &rows, &Table::packed(ids, self.used, self.tokens).unwrap(), &y, workspace, table(isa), &Serial).unwrap();
        out
    }
}

/// Activations that are hard to round: name, and what is done to normal ones.
type Twist = (&'static str, fn(usize, f32) -> f32);
const TWISTS: [Twist; 8] = [
    ("normal", |_, x| x),
    ("outliers", |i, x| if i.is_multiple_of(97) { 100.0 * x } else { x }),
    ("zeros", |i, x| if i % 512 < 300 { 0.0 } else { x }),
    ("all zero", |_, _| 0.0),
    ("subnormal", |_, x| x * 1e-40),
    ("small", |_, x| x * 1e-12),
    ("equal", |_, _| 0.37),
    ("times 1e4", |_, x| x * 1e4),
];

#[test]
fn the_error_of_a_product_is_no_larger_than_that_of_ggml() {
    let Some(peer) = Peer::new() else { return };
    let mut rng = Rng::new("product");
    let mut shares = Shares::default();
    for ty in WeightType::ALL {
        for (tokens, experts, used, draws) in [(1, 4, 2, 4), (3, 4, 2, 4), (40, 3, 2, 1)] {
            let (k, m) = (1024, 96);
            let bytes = quantised(&peer, &mut rng, ty, k, m * experts);
            let weights = decoded(ty, &bytes, k * m * experts);
            let product = Product { ty, k, m, experts, used, tokens, bytes, weights };
            for (name, twist) in TWISTS.into_iter().flat_map(|twist| std::iter::repeat_n(twist, draws)) {
                let x: Vec<f32> = rng.normals(k * tokens).into_iter().enumerate().map(|(i, x)| twist(i, x)).collect();
                let ids = rng.ids(experts, used * tokens);
                let want = product.exact(&x, &ids);
                let stock = nmse(&product.stock(&peer, &x, &ids), &want);
                for isa in tiers() {
                    let ours = nmse(&product.berth(isa, &x, &ids), &want);
                    shares.add(format!("{} {} T={tokens} {name}", ty.name(), isa.tier().name()), ours, stock);
                }
            }
        }
    }
    shares.check();
}

#[test]
fn infinity_and_nan_reach_every_product_that_they_reach_in_ggml() {
    let Some(peer) = Peer::new() else { return };
    let mut rng = Rng::new("infinity");
    for ty in WeightType::ALL {
        let (k, m, experts, used, tokens) = (512, 32, 2, 1, 6);
        let bytes = quantised(&peer, &mut rng, ty, k, m * experts);
        let weights = decoded(ty, &bytes, k * m * experts);
        let product = Product { ty, k, m, experts, used, tokens, bytes, weights };
        for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            let (mut x, ids) = (rng.normals(k * tokens), rng.ids(experts, tokens));
            x[2 * k + 77] = bad;
            let stock = product.stock(&peer, &x, &ids);
            for isa in tiers() {
                let ours = product.berth(isa, &x, &ids);
                for (i, (ours, stock)) in ours.iter().zip(&stock).enumerate() {
                    assert!(stock.is_finite() || !ours.is_finite(), "{} {bad}: product {i} is {ours}, ggml has {stock}", ty.name());
                    assert_eq!(!ours.is_finite(), i / m == 2, "{} {bad}: product {i} is {ours}", ty.name());
                }
            }
        }
    }
}

#[test]
fn the_error_of_the_whole_block_is_no_larger_than_that_of_ggml() {
    let Some(peer) = Peer::new() else { return };
    let mut rng = Rng::new("block");
    use WeightType::*;
    let pairs =
        [(Q4_K, Q6_K), (Q4_0, Q4_0), (Q8_0, Q8_0), (MXFP4, MXFP4), (IQ4_XS, IQ4_XS), (Q5_K, Q6_K), (Q2_K, Q3_K), (BF16, BF16), (F16, F16)];
    let mut shares = Shares::default();
    for (ty, down_ty) in pairs {
        for (tokens, draws) in [(1, DRAWS), (4, DRAWS), (33, 2)] {
            let (d, f, experts, used) = (512, 768, 4, 2);
            let [gate, up] = [0, 1].map(|_| quantised(&peer, &mut rng, ty, d, f * experts));
            let down = quantised(&peer, &mut rng, down_ty, f, d * experts);
            for _ in 0..draws {
                let (x, ids) = (rng.normals(d * tokens), rng.ids(experts, used * tokens));
                let routing: Vec<f32> = (0..used * tokens).map(|_| rng.unit() as f32).collect();

                let exact: Vec<f64> = {
                    let [g, u] = [&gate, &up].map(|b| decoded(ty, b, d * f * experts));
                    let dn = decoded(down_ty, &down, d * f * experts);
                    let dot = |w: &[f32], x: &[f64]| -> f64 { w.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum() };
                    let mut y = vec![0.0; d * tokens];
                    for pair in 0..used * tokens {
                        let (e, t) = (ids[pair] as usize, pair / used);
                        let x: Vec<f64> = x[t * d..][..d].iter().map(|v| f64::from(*v)).collect();
                        let row = |w: &[f32], r: usize| dot(&w[(e * f + r) * d..][..d], &x);
                        let h: Vec<f64> = (0..f).map(|r| (row(&g, r), row(&u, r))).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
                        for r in 0..d {
                            y[t * d + r] += f64::from(routing[pair]) * dot(&dn[(e * d + r) * f..][..f], &h);
                        }
                    }
                    y
                };

                let numbers = [ty as usize, down_ty as usize, d, f, experts, used, tokens];
                let parts = peer.floats("chain", &numbers, &[&gate, &up, &down, &bytes_of(&x), &id_bytes(&ids)]);
                let mut stock = vec![0.0f32; d * tokens];
                for (pair, part) in parts.chunks(d).enumerate() {
                    for (y, v) in stock[pair / used * d..].iter_mut().zip(part) {
                        *y += routing[pair] * v;
                    }
                }
                let stock = nmse(&stock, &exact);

                let projection = |bytes, ty, dims| Projection::new(Matrix::packed(bytes, ty, dims).unwrap());
                let block = Experts {
                    gate: Some(projection(&gate, ty, [d, f, experts])),
                    up: projection(&up, ty, [d, f, experts]),
                    down: projection(&down, down_ty, [f, d, experts]),
                    activation: Activation::SwiGlu,
                    weight_first: false,
                };
                for isa in tiers() {
                    let (mut y, mut memory) = (vec![f32::NAN; d * tokens], Vec::new());
                    let pool = Pool::new(2).unwrap();
                    let workspace = workspace(&mut memory, workspace_size(&block, tokens, used, 2).unwrap());
                    let inputs = Inputs {
                        x: Rows::packed(&x, d, tokens).unwrap(),
                        ids: Table::packed(&ids, used, tokens).unwrap(),
                        weights: Some(Table::packed(&routing, used, tokens).unwrap()),
                        y: RowsMut::packed(&mut y, d, tokens).unwrap(),
                    };
                    forward(&block, &inputs, workspace, table(isa), &pool).unwrap();
                    let ours = nmse(&y, &exact);
                    shares.add(format!("{}/{} {} T={tokens}", ty.name(), down_ty.name(), isa.tier().name()), ours, stock);
                }
            }
        }
    }
    shares.check();
}
