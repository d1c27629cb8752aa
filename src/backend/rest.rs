//! What was not claimed, and is to be computed all the same: on the host's CPU backend.
//!
//! A scheduler sends a device only what `supports_op` has said yes to. An RPC server does not ask: its client takes every operation for supported and
//! sends whole graphs, and the server gives up the process if one is not computed. Such operations go where they would go without Berth.
//!
//! Owns: the host's CPU backend of one stream, and the check that an operation can be handed to it: what is broken is an error here, where the CPU
//! backend would stop the process at an assertion. Must not know: what is claimed.

use super::fuse::Graph;
use super::node::Node;
use crate::abi::*;
use crate::error::{Error, Result, Status};
use crate::report::blocks;

/// The CPU backend of one stream, made when it is first needed.
#[derive(Default)]
pub(super) struct Rest(Option<Cpu>);

impl Rest {
    /// Computes the nodes from `first` up to the first for which `ours` says yes, but at least one; the next node, or a status that is no success.
    ///
    /// # Errors
    /// Where there is no CPU backend, and where it does not compute one of them. Nothing has been written then.
    ///
    /// # Safety
    /// All tensors of the graph are live, and nobody else uses what is written.
    pub(super) unsafe fn compute(
        &mut self,
        graph: &Graph<'_>,
        first: usize,
        ours: impl Fn(Node<'_>) -> bool,
        threads: usize,
    ) -> Result<std::result::Result<usize, i32>> {
        let cpu = match &mut self.0 {
            Some(cpu) => cpu,
            none => none.insert(Cpu::new(graph.host).map_err(|why| {
                let name = graph.nodes.get(first).map_or(String::new(), |node| node.name());
                Error::new(Status::Unsupported, format!("'{name}' was never claimed, and {why}"))
            })?),
        };
        let rest = graph.nodes.get(first..).unwrap_or_default();
        let count = rest.iter().skip(1).position(|node| !graph.is_view(*node) && ours(*node)).map_or(rest.len(), |n| n + 1);
        // Views compute nothing, and may be of tensors that are not here: a client sends those along that lead to its own.
        let nodes: Vec<_> = rest.iter().copied().take(count).filter(|node| !graph.is_view(*node)).collect();
        for node in &nodes {
            // SAFETY: the caller vouches for the tensors.
            unsafe { check(cpu, graph, *node) }.map_err(|why| Error::invalid(format!("'{}' was never claimed, and {why}", node.name())))?;
        }
        let raw: Vec<_> = nodes.iter().map(|node| node.raw()).collect();
        blocks::unclaimed(nodes.len() as u64);
        // SAFETY: they have just been checked; the caller vouches for the rest.
        let status = unsafe { cpu.compute(graph.host, &raw, threads) };
        Ok(if status == GGML_STATUS_SUCCESS { Ok(first + count) } else { Err(status) })
    }
}

/// Whether the CPU backend can be asked for an operation. The message goes on after "and".
///
/// # Safety
/// The tensor and its operands are live.
unsafe fn check(cpu: &Cpu, graph: &Graph<'_>, node: Node<'_>) -> std::result::Result<(), String> {
    for tensor in std::iter::once(node).chain(node.operands()) {
        // SAFETY: the caller vouches for the tensors.
        unsafe { has_memory(cpu, graph.host, tensor) }.map_err(|what| format!("'{}' {what}", tensor.name()))?;
    }
    if node.op() == graph.host.ops.mul_mat_id {
        is_product(cpu, graph.host, node).ok_or("its operands do not fit each other")?;
    }
    // SAFETY: the types are known, and the tensors have memory.
    if unsafe { cpu.supports(node.raw()) } { Ok(()) } else { Err("the host's CPU backend does not compute it".into()) }
}

/// Whether a tensor is of a known type, and inside its buffer.
///
/// # Safety
/// The tensor is live.
unsafe fn has_memory(cpu: &Cpu, host: &Host, tensor: Node<'_>) -> std::result::Result<(), &'static str> {
    let (elements, bytes) = cpu.block(host, tensor.ty()).ok_or("is of no type that this ggml has")?;
    let shape = tensor.sizes().ok_or("has a negative size")?;
    if shape.contains(&0) {
        return Ok(());
    }
    if !shape[0].is_multiple_of(elements) {
        return Err("has rows that are no whole blocks");
    }
    let steps = [shape[0] / elements, shape[1], shape[2], shape[3]];
    let last = steps.iter().enumerate().try_fold(bytes, |end, (i, n)| end.checked_add((n - 1).checked_mul(tensor.nb(i))?));
    let (data, buffer) = (tensor.data() as usize, tensor.buffer());
    if data == 0 || buffer.is_null() {
        return Err("has no memory");
    }
    // Numbers are read as what they are; blocks of them have no alignment beyond that of their scales.
    if elements == 1 && !data.is_multiple_of(bytes) {
        return Err("is not aligned");
    }
    // SAFETY: a live buffer of the host.
    let (base, size) = unsafe { (cpu.base(buffer) as usize, (host.api.ggml_backend_buffer_get_size)(buffer)) };
    let end = last.and_then(|n| data.checked_add(n)).zip(base.checked_add(size));
    if data >= base && end.is_some_and(|(end, of_buffer)| end <= of_buffer) { Ok(()) } else { Err("reaches beyond its buffer") }
}

/// Whether a product of experts has operands that the CPU backend takes without a further look.
fn is_product(cpu: &Cpu, host: &Host, node: Node<'_>) -> Option<()> {
    let (weights, x, ids) = (node.src(0)?, node.src(1)?, node.src(2)?);
    let (_, block) = cpu.block(host, weights.ty())?;
    let fits = weights.nb(0) == block
        && x.is_rows()
        && ids.is_ids()
        && node.is_rows()
        && weights.ne(3) == 1
        && x.ne(0) == weights.ne(0)
        && node.ne(0) == weights.ne(1)
        && x.ne(2) == ids.ne(1)
        && node.ne(2) == ids.ne(1)
        && node.ne(1) == ids.ne(0)
        && x.ne(1) > 0
        && ids.ne(0).is_multiple_of(x.ne(1));
    fits.then_some(())
}
