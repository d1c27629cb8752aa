//! Any graph around products of experts, made with the real ggml: the device computes what the CPU backend computes, whether it finds a block of experts
//! in it or not. The graph's memory comes from ggml's own allocator, so values that nobody needs any more are written over, as in llama.cpp.

#![no_main]
#![allow(clippy::undocumented_unsafe_blocks)]

mod choices;
mod ggml;

use std::ffi::c_int;

use berth::backend::{Kind, instance};
use choices::Choices;
use ggml::{InitParams, Ptr, ggml};
use libfuzzer_sys::fuzz_target;

/// Formats by number, and the smallest row of each.
const FORMATS: [(c_int, i64); 16] = [
    (0, 1), (1, 1), (30, 1), (2, 32), (3, 32), (6, 32), (7, 32), (8, 32), (20, 32), (39, 32),
    (10, 256), (11, 256), (12, 256), (13, 256), (14, 256), (23, 256),
];
const I32: c_int = 26;
const F32: c_int = 0;

struct Values(u64);

impl Values {
    /// From -1 to 1.
    fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / 8_388_608.0 - 1.0
    }
}

/// A part of a model: weights and inputs in a context with memory, and operations in one without.
struct Graph {
    leaves: Ptr,
    nodes: Ptr,
    /// Leaves to be filled: the tensor, its format, its shape, the spread of its values.
    fill: Vec<(Ptr, c_int, [i64; 3], f32)>,
    outputs: Vec<(Ptr, usize)>,
    quantised: bool,
}

impl Graph {
    fn leaf(&mut self, ty: c_int, shape: [i64; 3], spread: f32) -> Ptr {
        let tensor = unsafe { (ggml().ggml_new_tensor_3d)(self.leaves, ty, shape[0], shape[1], shape[2]) };
        unsafe { (ggml().ggml_set_input)(tensor) };
        self.fill.push((tensor, ty, shape, spread));
        self.quantised |= ty != F32;
        tensor
    }

    fn output(&mut self, tensor: Ptr, elements: i64) {
        unsafe { (ggml().ggml_set_output)(tensor) };
        self.outputs.push((tensor, elements as usize));
    }
}

fn context() -> Ptr {
    let context = unsafe { (ggml().ggml_init)(InitParams { size: 1 << 20, buffer: std::ptr::null_mut(), no_alloc: true }) };
    assert!(!context.is_null());
    context
}

/// Builds it; the result of the last operation, with its number of elements.
fn build(c: &mut Choices, g: &mut Graph) -> (Ptr, i64) {
    let f = ggml();
    let (gate_ty, least) = FORMATS[c.below(16) as usize];
    let (up_ty, up_least) = if c.rarely() { FORMATS[c.below(16) as usize] } else { (gate_ty, least) };
    let (down_ty, down_least) = FORMATS[c.below(16) as usize];
    let width = |least: i64, n: u8| if least == 1 { 8 * (1 + i64::from(n % 24)) } else { least * if least == 32 { 1 + i64::from(n % 5) } else { 1 } };
    let d = width(least.max(up_least), c.byte());
    let ff = width(down_least, c.byte());
    let experts = 1 + i64::from(c.below(6));
    let used = (1 + i64::from(c.below(4))).min(experts);
    let tokens = [1, 2, 3, 7, 16, 33][c.below(6) as usize];
    let n = g.nodes;
    let shape = c.below(6);

    unsafe {
        // What comes before: computed in the graph, so that its memory is used again.
        let source = g.leaf(F32, [d, 1, tokens], 1.0);
        let x = if c.rarely() { source } else { (f.ggml_scale)(n, source, 0.5) };
        let ids = g.leaf(I32, [used, tokens, 1], experts as f32);
        let routing = g.leaf(F32, [1, used, tokens], 1.0);
        let routing = if c.rarely() { routing } else { (f.ggml_scale)(n, routing, 0.25) };
        let product = |c: &mut Choices, g: &mut Graph, ty, k: i64, rows: i64, input| {
            let spread = (k as f32).powf(-0.5);
            let weights = g.leaf(ty, [k, rows, experts], spread);
            let mut out = (f.ggml_mul_mat_id)(n, weights, input, ids);
            if c.rarely() {
                let scales = g.leaf(F32, [experts, 1, 1], 1.0);
                let scales = (f.ggml_reshape_3d)(n, scales, 1, experts, 1);
                let scales = (f.ggml_repeat_4d)(n, scales, 1, experts, tokens, 1);
                out = (f.ggml_mul)(n, out, (f.ggml_get_rows)(n, scales, ids));
            }
            if c.rarely() {
                let bias = g.leaf(F32, [rows, experts, 1], 0.2);
                out = (f.ggml_add_id)(n, out, bias, ids);
            }
            if c.rarely() {
                g.output(out, rows * used * tokens);
            }
            out
        };
        let kind = c_int::from(c.below(5));
        let mut act = match shape {
            0 | 1 => {
                let (gate, up) = (product(c, g, gate_ty, d, ff, x), product(c, g, up_ty, d, ff, x));
                let (a, b) = if c.rarely() { (up, gate) } else { (gate, up) };
                if c.rarely() { (f.ggml_swiglu_oai)(n, a, b, 1.702, 7.0) } else { (f.ggml_glu_split)(n, a, b, [0, 1, 2, 4, 5][kind as usize]) }
            }
            2 => {
                let merged = product(c, g, gate_ty, d, 2 * ff, x);
                (f.ggml_glu)(n, merged, [0, 1, 2, 4, 5][kind as usize], c.rarely())
            }
            3 => {
                let merged = product(c, g, gate_ty, d, 2 * ff, x);
                let row = 4 * 2 * ff as usize;
                let half = |at: i64| (f.ggml_view_3d)(n, merged, ff, used, tokens, row, row * used as usize, 4 * at as usize);
                let (a, b) = if c.rarely() { (half(ff), half(0)) } else { (half(0), half(ff)) };
                (f.ggml_glu_split)(n, a, b, [0, 1, 2, 4, 5][kind as usize])
            }
            4 => {
                let up = product(c, g, up_ty, d, ff, x);
                match kind {
                    0 => (f.ggml_silu)(n, up),
                    1 => (f.ggml_gelu)(n, up),
                    2 => (f.ggml_relu)(n, up),
                    _ => (f.ggml_sqr)(n, (f.ggml_relu)(n, up)),
                }
            }
            _ => {
                let gate = product(c, g, gate_ty, d, ff, x);
                let limited = (f.ggml_clamp)(n, (f.ggml_silu)(n, gate), f32::NEG_INFINITY, 1.0);
                let up = product(c, g, up_ty, d, ff, x);
                let limit = if c.rarely() { 2.0 } else { 1.0 };
                (f.ggml_mul)(n, limited, (f.ggml_clamp)(n, up, -limit, limit))
            }
        };
        if c.rarely() {
            act = (f.ggml_scale)(n, act, 1.5);
        }
        if c.rarely() {
            g.output(act, ff * used * tokens);
        }
        let mut tail = product(c, g, down_ty, ff, d, act);
        if !c.rarely() {
            tail = (f.ggml_mul)(n, tail, routing);
        }
        if c.rarely() {
            return (tail, d * used * tokens);
        }
        let row = 4 * d as usize;
        let choice = |j: i64| (f.ggml_view_2d)(n, tail, d, tokens, row * used as usize, row * j as usize);
        let count = if c.rarely() { 1 + i64::from(c.below(4)) % used } else { used };
        let mut sum = choice(0);
        if count == 1 {
            sum = (f.ggml_cont)(n, sum);
        }
        for j in 1..count {
            let next = choice(if c.rarely() { i64::from(c.below(4)) % used } else { j });
            sum = if c.rarely() { (f.ggml_add)(n, next, sum) } else { (f.ggml_add)(n, sum, next) };
        }
        if c.rarely() {
            // A value from inside, needed again.
            sum = (f.ggml_add)(n, sum, choice(0));
        }
        if c.rarely() {
            sum = (f.ggml_add)(n, sum, (f.ggml_view_2d)(n, x, d, tokens, row, 0));
        }
        (sum, d * tokens)
    }
}

fn fill(g: &Graph, seed: u64) {
    let mut values = Values(seed | 1);
    for &(tensor, ty, [a, b, c], spread) in &g.fill {
        let count = (a * b * c) as usize;
        let data = unsafe { (ggml().ggml_get_data)(tensor) };
        if ty == I32 {
            // Different experts for each token.
            let experts = spread as usize;
            let ids = unsafe { std::slice::from_raw_parts_mut(data.cast::<i32>(), count) };
            for (i, id) in ids.iter_mut().enumerate() {
                let token = i / a as usize;
                *id = ((token * 5 + i % a as usize + seed as usize % experts) % experts) as i32;
            }
            continue;
        }
        let floats: Vec<f32> = (0..count).map(|_| spread * values.next()).collect();
        if ty == F32 {
            unsafe { std::ptr::copy_nonoverlapping(floats.as_ptr(), data.cast::<f32>(), count) };
        } else {
            unsafe { (ggml().ggml_quantize_chunk)(ty, floats.as_ptr(), data, 0, b * c, a, std::ptr::null()) };
        }
    }
}

/// Computes it on a backend, in memory of a type: the values of all outputs.
fn compute(g: &Graph, graph: Ptr, backend: Ptr, buft: Ptr, seed: u64) -> Vec<Vec<f32>> {
    let f = ggml();
    unsafe {
        let memory = (f.ggml_gallocr_new)(buft);
        assert!((f.ggml_gallocr_alloc_graph)(memory, graph));
        fill(g, seed);
        assert_eq!((f.ggml_backend_graph_compute)(backend, graph), 0, "computed");
        let values = g.outputs.iter().map(|(t, n)| std::slice::from_raw_parts((f.ggml_get_data)(*t).cast::<f32>(), *n).to_vec()).collect();
        (f.ggml_gallocr_free)(memory);
        values
    }
}

fuzz_target!(|input: &[u8]| {
    let f = ggml();
    let device: Ptr = instance().expect("Berth finds this ggml").device(Kind::CpuMmap).cast();
    let mut c = Choices(input);
    let seed = u64::from(c.byte()).wrapping_mul(0x9e37_79b9_7f4a_7c15) + 1;
    let answers: Vec<(Vec<Vec<f32>>, bool)> = [false, true]
        .into_iter()
        .map(|ours| unsafe {
            let mut c = Choices(c.0);
            let mut g = Graph { leaves: context(), nodes: context(), fill: Vec::new(), outputs: Vec::new(), quantised: false };
            let (last, elements) = build(&mut c, &mut g);
            g.output(last, elements);
            let graph = (f.ggml_new_graph)(g.nodes);
            for (output, _) in &g.outputs {
                (f.ggml_build_forward_expand)(graph, *output);
            }
            let buft = (f.ggml_backend_dev_buffer_type)(device);
            let leaves = (f.ggml_backend_alloc_ctx_tensors_from_buft)(g.leaves, buft);
            assert!(!leaves.is_null());
            // Weights.
            (f.ggml_backend_buffer_set_usage)(leaves, 1);
            let backend = if ours { (f.ggml_backend_dev_init)(device, std::ptr::null()) } else { f.cpu };
            let values = compute(&g, graph, backend, buft, seed);
            if ours {
                (f.ggml_backend_free)(backend);
            }
            (f.ggml_backend_buffer_free)(leaves);
            (f.ggml_free)(g.nodes);
            (f.ggml_free)(g.leaves);
            (values, g.quantised)
        })
        .collect();
    let [(want, quantised), (got, _)] = &answers[..] else { unreachable!() };
    for (want, got) in want.iter().zip(got) {
        if want.iter().any(|w| !w.is_finite()) {
            continue;
        }
        let square = |v: f64| v * v;
        let error: f64 = want.iter().zip(got).map(|(w, g)| square(f64::from(*w) - f64::from(*g))).sum();
        let whole: f64 = want.iter().map(|w| square(f64::from(*w))).sum();
        // Activations are rounded to 8 bits on both sides, in other blocks; without that only the order of sums differs, and ggml's table for GELU.
        let bound = if *quantised { 5e-3 } else { 1e-5 };
        assert!(error <= bound * whole + 1e-9 * want.len() as f64, "{error} of {whole}: {want:?} {got:?}");
    }
});
