//! Weights that are somewhere else than they belong: every result must be the same, and no byte may be read that has not been waited for.

use std::ptr::NonNull;
use std::sync::Mutex;

use super::args::Matrix;
use super::testing::{Aligned, Rng, tiers, weights};
use super::*;
use crate::error::Result;

/// Bytes that are no finite weights in any format.
const POISON: u8 = 0xff;

/// Brings weights from `truth` to other places, where they are poison until somebody has waited for them, as they are in `lost` for good.
struct Elsewhere<'a> {
    /// What belongs at each byte of `lost`.
    truth: &'a [u8],
    lost: &'a [u8],
    copies: Mutex<Vec<Copied>>,
    ended: Mutex<bool>,
}

struct Copied {
    /// Where in `lost`.
    from: usize,
    bytes: Box<[u8]>,
    /// What has come.
    there: Vec<bool>,
}

impl<'a> Elsewhere<'a> {
    fn new(truth: &'a [u8], lost: &'a [u8]) -> Self {
        Elsewhere { truth, lost, copies: Mutex::default(), ended: Mutex::new(false) }
    }
}

// SAFETY: the boxes live as long as this does, and each of their bytes is written once, before the wait for it returns.
unsafe impl Ahead for Elsewhere<'_> {
    fn begin(&self) -> bool {
        true
    }
    fn ask(&self, _: Span) -> bool {
        false
    }
    fn ask_again(&self, _: Span) -> bool {
        panic!("nobody made room: nothing can have gone");
    }
    fn bring(&self, weights: Span) -> Asked {
        let from = weights.start() - self.lost.as_ptr().addr();
        // Every third expert is where it belongs.
        if self.lost[from..][..weights.len()].iter().any(|b| *b != POISON) {
            return Asked::There;
        }
        let bytes = vec![POISON; weights.len() + 1].into_boxed_slice();
        let mut copies = self.copies.lock().unwrap();
        copies.push(Copied { from, bytes, there: vec![false; weights.len()] });
        // At an odd place, as in a file.
        Asked::Copy(NonNull::from(&mut copies.last_mut().unwrap().bytes[1]))
    }
    fn seen(&self, _: usize, _: usize) {}
    fn wait(&self, _: Span) -> Result<()> {
        panic!("nothing comes to where it belongs");
    }
    fn wait_for_copy(&self, copy: Span) -> Result<()> {
        let mut copies = self.copies.lock().unwrap();
        let inside = |c: &Copied| (c.bytes.as_ptr().addr() + 1..c.bytes.as_ptr().addr() + c.bytes.len()).contains(&copy.start());
        let of = copies.iter_mut().find(|c| inside(c)).expect("an address that was given");
        let first = copy.start() - of.bytes.as_ptr().addr() - 1;
        for i in first..first + copy.len() {
            if !std::mem::replace(&mut of.there[i], true) {
                // SAFETY: inside the box; nobody has waited for this byte before, so nobody reads it.
                unsafe { of.bytes.as_ptr().cast_mut().add(1 + i).write(self.truth[of.from + i]) };
            }
        }
        Ok(())
    }
    fn end(&self, _: usize) {
        *self.ended.lock().unwrap() = true;
    }
}

/// The same bytes with poison in the place of the experts that come from elsewhere.
fn poisoned(truth: &[u8], expert_bytes: usize) -> Vec<u8> {
    let mut lost = truth.to_vec();
    lost.chunks_mut(expert_bytes).enumerate().filter(|(e, _)| e % 3 != 2).for_each(|(_, expert)| expert.fill(POISON));
    lost
}

/// Checks that all that was brought was waited for to its last byte, and that the call said it was over.
fn all_came(ahead: &Elsewhere<'_>) {
    let copies = ahead.copies.lock().unwrap();
    assert!(!copies.is_empty() && copies.iter().all(|c| c.there.iter().all(|t| *t)) && *ahead.ended.lock().unwrap());
}

/// Gate, up and down, the first two of one matrix or each one of its own.
fn matrices(bytes: &[u8], [d, f, out, n]: [usize; 4], [ty, down_ty]: [WeightType; 2], merged: bool) -> [Matrix<'_>; 3] {
    let (first, down) = bytes.split_at(2 * n * f * ty.row_bytes(d).unwrap());
    let (gate, up) = first.split_at(first.len() / 2);
    let down = Matrix::packed(down, down_ty, [f, out, n]).unwrap();
    if merged {
        let matrix = Matrix::packed(first, ty, [d, 2 * f, n]).unwrap();
        [matrix.part(0, f).unwrap(), matrix.part(f, f).unwrap(), down]
    } else {
        let [gate, up] = [gate, up].map(|m| Matrix::packed(m, ty, [d, f, n]).unwrap());
        [gate, up, down]
    }
}

#[test]
fn a_block_of_copies_has_the_same_result_as_one_of_weights_in_their_place() {
    let mut rng = Rng::new("copies of a block");
    let (d, f, out, n, used) = (256, 512, 200, 7, 3);
    let (ty, down_ty) = (WeightType::Q4_K, WeightType::Q6_K);
    for merged in [false, true] {
        for (tokens, gated) in [(1, true), (4, false), (40, true)] {
            // Gate and up of an expert one after the other, or all gates before all ups, then all downs: one memory, so that one reader serves.
            let (row, down_row) = (ty.row_bytes(d).unwrap(), down_ty.row_bytes(f).unwrap());
            let first_len = 2 * n * f * row;
            let truth = [weights(&mut rng, ty, d, 2 * f * n), weights(&mut rng, down_ty, f, out * n)].concat();
            let expert = if merged { 2 * f * row } else { f * row };
            let mut lost = truth.clone();
            let half = if merged { first_len } else { first_len / 2 };
            for start in (0..first_len).step_by(half) {
                lost[start..start + half].copy_from_slice(&poisoned(&truth[start..start + half], expert));
            }
            lost[first_len..].copy_from_slice(&poisoned(&truth[first_len..], out * down_row));
            let (x, routing) = (rng.values(d * tokens), rng.values(used * tokens));
            let ids: Vec<i32> = (0..used * tokens).map(|i| if i < n.min(used) { i as i32 } else { rng.below(n) as i32 }).collect();
            let run = |bytes: &[u8], kernels: Kernels, threads: &dyn ParallelFor, ahead: &dyn Ahead| {
                let [gate, up, down] = matrices(bytes, [d, f, out, n], [ty, down_ty], merged).map(Projection::new);
                let activation = if gated { Activation::SwiGlu } else { Activation::Relu };
                let e = Experts { gate: gated.then_some(gate), up, down, activation, weight_first: false };
                let mut y = vec![f32::NAN; out * tokens];
                let mut workspace = Aligned::new(workspace_size(&e, tokens, used, threads.threads()).unwrap());
                let inputs = Inputs {
                    x: Rows::packed(&x, d, tokens).unwrap(),
                    ids: Table::packed(&ids, used, tokens).unwrap(),
                    weights: Some(Table::packed(&routing, used, tokens).unwrap()),
                    y: RowsMut::packed(&mut y, out, tokens).unwrap(),
                };
                forward_ahead(&e, &inputs, workspace.get(), kernels, threads, ahead).unwrap();
                y.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
            };
            for isa in tiers() {
                let want = run(&truth, table(isa), &Serial, &Never);
                for threads in [1, 3] {
                    let ahead = Elsewhere::new(&truth, &lost);
                    let got = run(&lost, table(isa), &Pool::new(threads).unwrap(), &ahead);
                    assert!(got == want, "merged {merged}, {tokens} tokens, {threads} threads, {}", isa.tier().name());
                    all_came(&ahead);
                }
            }
        }
    }
}

#[test]
fn one_projection_of_copies_has_the_same_result() {
    let mut rng = Rng::new("copies of a projection");
    let (k, rows, n, used, tokens) = (256, 150, 8, 4, 5);
    let ty = WeightType::Q5_K;
    let truth = weights(&mut rng, ty, k, rows * n);
    let lost = poisoned(&truth, rows * ty.row_bytes(k).unwrap());
    let x = rng.values(k * tokens);
    let ids: Vec<i32> = (0..used * tokens).map(|_| rng.below(n) as i32).collect();
    let run = |bytes: &[u8], kernels: Kernels, ahead: &dyn Ahead| {
        let matrix = Matrix::packed(bytes, ty, [k, rows, n]).unwrap();
        let mut out = vec![f32::NAN; rows * used * tokens];
        let mut workspace = Aligned::new(mul_mat_id_workspace_size(&matrix, tokens, used, 3).unwrap());
        // SAFETY: both views have exactly the sizes of their vectors, which outlive them.
        let (x, y) = unsafe {
            let x = Rows::new(x.as_ptr(), [k, 1, tokens], [4 * k, 4 * k]).unwrap();
            (x, RowsMut::new(out.as_mut_ptr(), [rows, used, tokens], [4 * rows, 4 * rows * used]).unwrap())
        };
        let (ids, pool) = (Table::packed(&ids, used, tokens).unwrap(), Pool::new(3).unwrap());
        mul_mat_id_ahead(&matrix, &x, &ids, &y, workspace.get(), (kernels, &pool), ahead).unwrap();
        out.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
    };
    for isa in tiers() {
        let ahead = Elsewhere::new(&truth, &lost);
        assert!(run(&lost, table(isa), &ahead) == run(&truth, table(isa), &Never), "{}", isa.tier().name());
        all_came(&ahead);
    }
}
