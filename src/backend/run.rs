//! Computes a graph: blocks as one operation each, what is left node by node.
//!
//! Owns: [`Engine`], with the workspace of one backend. Products and activations go to `moe`; the few other operations around
//! them that may have to run alone are in `elementwise`.

use std::ffi::{c_int, c_void};

use super::claim::activation;
use super::elementwise;
use super::fuse::{Block, Graph, Product};
use super::node::Node;
use crate::abi::*;
use crate::ahead::READER;
use crate::error::{Error, Result};
use crate::moe::{
    Activation, Experts, Inputs, Kernels, Matrix, ParallelFor, PerExpert, Projection, Rows, RowsMut, Table, forward_ahead, glu,
    mul_mat_id_ahead, mul_mat_id_workspace_size, workspace_size,
};
use crate::report::blocks;

/// Asks the host whether to stop: `true` is yes.
pub(super) type Abort = unsafe extern "C" fn(*mut c_void) -> bool;

/// What one backend computes with.
pub(super) struct Engine {
    pub(super) kernels: Kernels,
    pub(super) abort: Option<(Abort, *mut c_void)>,
    workspace: Vec<Line>,
}

/// How far a graph was computed.
pub(super) enum Step {
    /// To its end, or to where the host said stop: a `GGML_STATUS_*`.
    Done(c_int),
    /// Up to an operation that cannot be computed. Nothing of it has been written.
    Stopped {
        /// Its number.
        at: usize,
        /// Why, with its name.
        error: Error,
    },
}

// SAFETY: the pointer is only handed back to the function it came with, which the host calls from any thread too.
unsafe impl Send for Engine {}

/// 64 bytes, at a multiple of 64.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([u8; 64]);

impl Engine {
    pub(super) fn new(kernels: Kernels) -> Engine {
        Engine { kernels, abort: None, workspace: Vec::new() }
    }

    /// Computes the nodes from `first` on, as far as that goes.
    ///
    /// # Safety
    /// All tensors of the graph have memory, as their shapes and strides say, and nobody else uses what is written.
    pub(super) unsafe fn compute(&mut self, graph: &Graph<'_>, first: usize, team: &dyn ParallelFor) -> Step {
        let mut i = first;
        // Ids of the block that is being computed node by node: its other products are no blocks of their own.
        let mut apart: Option<Node<'_>> = None;
        while let Some(node) = graph.nodes.get(i).copied() {
            if graph.is_view(node) || node.shape().contains(&0) {
                i += 1;
                continue;
            }
            // SAFETY: the host's function and the value it came with.
            if self.abort.is_some_and(|(abort, data)| unsafe { abort(data) }) {
                return Step::Done(GGML_STATUS_ABORTED);
            }
            if node.op() == graph.host.ops.mul_mat_id {
                match graph.block_at(i) {
                    Ok(block) => {
                        // SAFETY: the caller vouches for the tensors.
                        if let Err(error) = unsafe { self.block(&block, team) } {
                            return Step::Stopped { at: i, error: named(block.out, &error) };
                        }
                        blocks::fused(self.kernels.isa().tier().name());
                        apart = None;
                        i = block.nodes[1] + 1;
                        continue;
                    }
                    Err(reason) => {
                        let ids = node.src(2);
                        if apart.zip(ids).is_none_or(|(a, b)| !a.is(b)) {
                            blocks::node_by_node(reason, || node.name());
                        }
                        apart = ids;
                    }
                }
            }
            // SAFETY: the caller vouches for the tensors.
            if let Err(error) = unsafe { self.single(graph.host, node, team) } {
                return Step::Stopped { at: i, error: named(node, &error) };
            }
            i += 1;
        }
        Step::Done(GGML_STATUS_SUCCESS)
    }

    /// At least this many bytes.
    fn workspace(workspace: &mut Vec<Line>, size: usize) -> Result<&mut [u8]> {
        let lines = size.div_ceil(64);
        if let Some(more) = lines.checked_sub(workspace.len()) {
            workspace.try_reserve(more).map_err(|_| Error::invalid(format!("no memory for a workspace of {size} bytes")))?;
            workspace.resize(lines, Line([0; 64]));
        }
        // SAFETY: lines are bytes without gaps, and the borrow is exclusive.
        Ok(unsafe { std::slice::from_raw_parts_mut(workspace.as_mut_ptr().cast(), 64 * workspace.len()) })
    }

    /// # Safety
    /// As for `compute`.
    unsafe fn block(&mut self, b: &Block<'_>, team: &dyn ParallelFor) -> Result<()> {
        // SAFETY: the caller vouches for the tensors.
        unsafe {
            let experts = Experts {
                gate: b.gate.map(|p| projection(p)).transpose()?,
                up: projection(b.up)?,
                down: projection(b.down)?,
                activation: b.activation,
                weight_first: false,
            };
            let (used, tokens) = (b.ids.ne(0), b.ids.ne(1));
            let weights =
                b.weights.map(|w| Table::new(w.data().cast_const().cast::<f32>(), [used, tokens], [w.nb(1), w.nb(2)])).transpose()?;
            let y = RowsMut::new(b.out.data().cast(), [b.out.ne(0), 1, tokens], [b.out.nb(1), b.out.nb(1)])?;
            let inputs = Inputs { x: rows(b.x)?, ids: ids(b.ids)?, weights, y };
            let workspace = Self::workspace(&mut self.workspace, workspace_size(&experts, tokens, used, team.threads())?)?;
            forward_ahead(&experts, &inputs, workspace, self.kernels, team, &READER)
        }
    }

    /// # Safety
    /// As for `compute`.
    unsafe fn single(&mut self, host: &Host, node: Node<'_>, team: &dyn ParallelFor) -> Result<()> {
        let (op, ops) = (node.op(), &host.ops);
        // SAFETY: the caller vouches for the tensors.
        unsafe {
            if op == ops.mul_mat_id {
                let [weights, x, of] = operands(node)?;
                let matrix = matrix(weights)?;
                let (used, tokens) = (of.ne(0), of.ne(1));
                let size = mul_mat_id_workspace_size(&matrix, tokens, used, team.threads())?;
                let workspace = Self::workspace(&mut self.workspace, size)?;
                return mul_mat_id_ahead(&matrix, &rows(x)?, &ids(of)?, &result(node)?, workspace, (self.kernels, team), &READER);
            }
            if op == ops.add_id {
                let [x, bias, of] = operands(node)?;
                return elementwise::add_id(team, node, x, bias, of);
            }
            if let Some(activation) = activation(ops, node) {
                return activate(node, activation, self.kernels, team);
            }
            if op == ops.mul || op == ops.add {
                let [a, b] = operands(node)?;
                let f = if op == ops.mul { |a: f32, b: f32| a * b } else { |a: f32, b: f32| a + b };
                return elementwise::binary(team, node, a, b, f);
            }
            if op == ops.clamp {
                let [x] = operands(node)?;
                let [low, high] = [node.float_param(0), node.float_param(1)];
                return elementwise::binary(team, node, x, x, move |a, _| elementwise::clamp(a, low, high));
            }
            if op == ops.repeat {
                let [x] = operands(node)?;
                return elementwise::repeat(team, node, x);
            }
            if op == ops.get_rows {
                let [x, of] = operands(node)?;
                return elementwise::choose(team, node, x, of);
            }
            if op == ops.cont {
                let [x] = operands(node)?;
                return elementwise::copy(team, node, x);
            }
        }
        Err(Error::invalid("an operation that was never claimed"))
    }
}

fn named(node: Node<'_>, error: &Error) -> Error {
    Error::new(error.status, format!("{}: {}", node.name(), error.message))
}

fn never_claimed(what: &str) -> Error {
    Error::invalid(format!("{what} in a layout that was never claimed"))
}

fn operands<'a, const N: usize>(node: Node<'a>) -> Result<[Node<'a>; N]> {
    let mut out = [node; N];
    for (i, out) in out.iter_mut().enumerate() {
        *out = node.src(i).ok_or_else(|| Error::invalid("an operand is missing"))?;
    }
    Ok(out)
}

/// # Safety
/// The tensor has memory as its shape and strides say, for `'a`.
unsafe fn matrix<'a>(weights: Node<'a>) -> Result<Matrix<'a>> {
    let ty = weights.expert_weights().ok_or_else(|| never_claimed("weights"))?;
    let [k, rows, experts, _] = weights.shape();
    let data = weights.data().cast_const().cast::<u8>();
    let last = |count: usize, stride: usize| (count - 1).checked_mul(stride);
    let size = last(experts, weights.nb(2)).zip(last(rows, weights.nb(1))).zip(ty.row_bytes(k));
    let size = size.and_then(|((experts, rows), row)| experts.checked_add(rows)?.checked_add(row));
    let size = size.filter(|n| isize::try_from(*n).is_ok() && data.addr().checked_add(*n).is_some());
    let (false, Some(size)) = (data.is_null(), size) else { return Err(Error::invalid("weights without memory, or with too much")) };
    // SAFETY: exactly the bytes from the first to the last block; the caller vouches for them.
    let bytes = unsafe { std::slice::from_raw_parts(data, size) };
    Matrix::new(bytes, ty, [k, rows, experts], [weights.nb(1), weights.nb(2)])
}

/// # Safety
/// As for [`matrix`].
unsafe fn projection<'a>(product: Product<'a>) -> Result<Projection<'a>> {
    let [first, rows] = product.rows;
    // SAFETY: the caller vouches for the tensors.
    let matrix = unsafe { matrix(product.weights) }?;
    let whole = matrix.rows();
    let matrix = if rows == whole { matrix } else { matrix.part(first, rows)? };
    let bias = product.bias.map(|b| {
        let (width, experts, stride) = (b.ne(0), b.ne(1), b.nb(1) / 4);
        if width != whole || b.data().is_null() {
            return Err(Error::invalid("a bias that does not fit its product"));
        }
        // SAFETY: rows of f32 (`Node::is_rows` was asked before it was claimed), from the first to the end of the last.
        let values = unsafe { std::slice::from_raw_parts(b.data().cast_const().cast::<f32>(), (experts - 1) * stride + width) };
        PerExpert::new(&values[first..], rows, experts, stride)
    });
    let scale = product.scale.map(|s| {
        let (experts, stride) = (s.ne(1), s.nb(1) / 4);
        if s.data().is_null() {
            return Err(Error::invalid("a scale without memory"));
        }
        // SAFETY: one f32 per expert (`is_scale` was asked before it was claimed), from the first to the last.
        let values = unsafe { std::slice::from_raw_parts(s.data().cast_const().cast::<f32>(), (experts - 1) * stride + 1) };
        PerExpert::new(values, 1, experts, stride)
    });
    Ok(Projection { matrix, scale: scale.transpose()?, bias: bias.transpose()? })
}

/// # Safety
/// As for [`matrix`].
unsafe fn rows<'a>(x: Node<'a>) -> Result<Rows<'a>> {
    if !x.is_rows() {
        return Err(never_claimed("an operand"));
    }
    // SAFETY: the caller vouches for the tensor.
    unsafe { Rows::new(x.data().cast_const().cast(), [x.ne(0), x.ne(1), x.ne(2)], [x.nb(1), x.nb(2)]) }
}

/// An activation alone. Without a second operand, a gated one takes gate and up from the halves of each row, in this order unless the node says
/// "swapped".
///
/// # Safety
/// As for [`matrix`].
unsafe fn activate(node: Node<'_>, activation: Activation, kernels: Kernels, team: &dyn ParallelFor) -> Result<()> {
    let [x] = operands(node)?;
    // SAFETY: the caller vouches for the tensors.
    let (first, second, out) = unsafe {
        let (first, second) = match node.src(1) {
            Some(second) => (rows(x)?, Some(rows(second)?)),
            None if activation.gated() => {
                let half = x.ne(0) / 2;
                let part = |i: usize| {
                    let base = x.data().cast_const().cast::<f32>().wrapping_add(i * half);
                    Rows::new(base, [half, x.ne(1), x.ne(2)], [x.nb(1), x.nb(2)])
                };
                let swapped = usize::from(node.param(1) != 0);
                (part(swapped)?, Some(part(1 - swapped)?))
            }
            None => (rows(x)?, None),
        };
        (first, second, result(node)?)
    };
    // What has no gate is up, and what has a second operand has its gate first.
    let (gate, up) = second.as_ref().map_or((None, &first), |up| (Some(&first), up));
    glu(activation, gate, up, out, kernels, team)
}

/// # Safety
/// As for [`matrix`]; and nobody else uses what is written.
unsafe fn result<'a>(node: Node<'a>) -> Result<RowsMut<'a>> {
    if !node.is_rows() {
        return Err(never_claimed("a result"));
    }
    // SAFETY: the caller vouches for the tensor.
    unsafe { RowsMut::new(node.data().cast(), [node.ne(0), node.ne(1), node.ne(2)], [node.nb(1), node.nb(2)]) }
}

/// # Safety
/// As for [`matrix`].
unsafe fn ids<'a>(ids: Node<'a>) -> Result<Table<'a, i32>> {
    if !ids.is_ids() {
        return Err(never_claimed("ids"));
    }
    // SAFETY: the caller vouches for the tensor.
    unsafe { Table::new(ids.data().cast_const().cast(), [ids.ne(0), ids.ne(1)], [ids.nb(0), ids.nb(1)]) }
}
