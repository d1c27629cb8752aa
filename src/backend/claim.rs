//! Which operations Berth computes: the answer of `supports_op`.
//!
//! Owns: [`Claims`]. Claimed is the product of tokens with experts that lie in a Berth buffer type, and then what is fed by such a product
//! and nothing else: a bias, the activation, the routing weights, the sum over experts. The scheduler offers every norm and residual of the
//! model too; to take one of them would cut the graph. Must not know: how anything is computed.

use super::Instance;
use super::node::Node;
use crate::abi::{Host, Ops};
use crate::config::Config;
use crate::moe::Activation;
use crate::placement;

/// What the answers depend on.
pub(super) struct Claims<'a> {
    instance: &'a Instance,
    config: &'a Config,
}

impl<'a> Claims<'a> {
    pub(super) fn new(instance: &'a Instance, config: &'a Config) -> Self {
        Claims { instance, config }
    }

    fn host(&self) -> &'a Host {
        &self.instance.host
    }

    fn ops(&self) -> &'a Ops {
        &self.host().ops
    }

    /// Whether this operation is Berth's.
    pub(super) fn supports(&self, node: Node<'_>) -> bool {
        self.config.fuse && self.takes(node)
    }

    fn takes(&self, node: Node<'_>) -> bool {
        let (op, ops) = (node.op(), self.ops());
        if op == ops.mul_mat_id {
            self.product(node).unwrap_or(false)
        } else if op == ops.add_id {
            self.bias(node).unwrap_or(false)
        } else if op == ops.glu || op == ops.unary || op == ops.sqr {
            self.activation(node).unwrap_or(false)
        } else if op == ops.mul {
            self.multiplied(node)
        } else if op == ops.repeat {
            is_scale(ops, node)
        } else if op == ops.get_rows {
            is_scale_of_choices(ops, node)
        } else if op == ops.clamp {
            self.limited(node).unwrap_or(false)
        } else if op == ops.add {
            self.sum(node).unwrap_or(false)
        } else if op == ops.cont {
            self.only_choice(node).unwrap_or(false)
        } else {
            // Nothing is computed for these, and where they are counted decides nothing.
            is_view(ops, node)
        }
    }

    /// `MUL_MAT_ID` of one of our weights with f32 tokens.
    fn product(&self, node: Node<'_>) -> Option<bool> {
        let (weights, x, ids) = (node.src(0)?, node.src(1)?, node.src(2)?);
        weights.expert_weights()?;
        let used = ids.ne(0);
        let fits = x.is_rows() && ids.is_ids() && node.is_rows() && [1, used].contains(&x.ne(1)) && used > 0 && x.ne(0) == weights.ne(0);
        Some(fits && self.weights_are_ours(weights, ids, node.ne(2)))
    }

    fn weights_are_ours(&self, weights: Node<'_>, ids: Node<'_>, tokens: usize) -> bool {
        let buffer = weights.buffer();
        if buffer.is_null() {
            // Memory comes later, by what we answer now: nothing is anywhere else yet.
            return true;
        }
        // SAFETY: a live buffer of the host.
        let (ty, size) =
            unsafe { ((self.host().api.ggml_backend_buffer_get_type)(buffer), (self.host().api.ggml_backend_buffer_get_size)(buffer)) };
        if !self.instance.types.contains(&ty) {
            return false;
        }
        // The loader asks whether weights may lie with us with a product of its own making: no memory, ids that come from nowhere. A "yes"
        // would take every expert that no rule names. The same question about a graph, which the loader's fitting asks, has ids of a router.
        // Nor is it asked about matrices of experts alone: their scales come with the same op, and so do adapters that tokens choose.
        if size == 0 && weights.data().is_null() && ids.viewed().is_none() && ids.src(0).is_none() {
            return self.config.auto && placement::takes_by_itself(&weights.name(), weights.shape().map(|n| n as u64));
        }
        // The host sends large products to a GPU only if they are its CPU's.
        !(tokens >= self.config.offload_min_batch as usize && self.instance.has_gpu())
    }

    /// A product, with a scale or a bias or without.
    fn is_projection(&self, node: Node<'_>) -> bool {
        let (op, ops) = (node.op(), self.ops());
        ((op == ops.mul_mat_id || op == ops.add_id) && self.takes(node)) || self.scaled(node).unwrap_or(false)
    }

    /// A projection, weighted or not.
    fn is_product(&self, node: Node<'_>) -> bool {
        self.is_projection(node) || self.weighted(node).unwrap_or(false)
    }

    fn multiplied(&self, node: Node<'_>) -> bool {
        [Self::scaled, Self::weighted, Self::limited_gate].iter().any(|is| is(self, node).unwrap_or(false))
    }

    /// `MUL` of a product with the scale of its expert.
    fn scaled(&self, node: Node<'_>) -> Option<bool> {
        let ops = self.ops();
        let (x, scale) = (node.src(0)?, node.src(1)?);
        let same_ids = || x.src(2).zip(scale.src(1)).is_some_and(|(a, b)| a.is(b));
        let fits = node.op() == ops.mul && node.is_packed() && x.is_rows() && scale.shape() == [1, x.ne(1), x.ne(2), 1];
        Some(fits && x.op() == ops.mul_mat_id && is_scale_of_choices(ops, scale) && same_ids() && self.takes(x))
    }

    /// `CLAMP` of a projection, or of its SiLU.
    fn limited(&self, node: Node<'_>) -> Option<bool> {
        let (x, ops) = (node.src(0)?, self.ops());
        let silu = || x.op() == ops.unary && x.param(0) == ops.silu && self.takes(x);
        Some(node.is_packed() && x.is_rows() && (silu() || self.is_projection(x)))
    }

    /// `MUL` of the two limited sides.
    fn limited_gate(&self, node: Node<'_>) -> Option<bool> {
        let (gate, up) = (node.src(0)?, node.src(1)?);
        let fits = node.op() == self.ops().mul && node.is_packed() && gate.shape() == up.shape();
        let both = [gate, up].iter().all(|n| n.op() == self.ops().clamp && self.limited(*n).unwrap_or(false));
        Some(fits && both)
    }

    /// `ADD_ID` on a product.
    fn bias(&self, node: Node<'_>) -> Option<bool> {
        let (x, bias, ids) = (node.src(0)?, node.src(1)?, node.src(2)?);
        let fits = node.is_rows() && x.is_rows() && bias.is_rows() && bias.ne(2) == 1 && ids.is_ids() && bias.ne(0) == x.ne(0);
        Some(fits && x.op() != self.ops().add_id && self.is_projection(x))
    }

    fn activation(&self, node: Node<'_>) -> Option<bool> {
        let gate = node.src(0)?;
        activation(self.ops(), node)?;
        let base = gate.viewed().unwrap_or(gate);
        let fits = node.is_packed() && gate.is_rows() && node.src(1).is_none_or(Node::is_rows);
        if node.op() == self.ops().sqr {
            return Some(fits && gate.op() == self.ops().unary && self.takes(gate));
        }
        let fed = |n: Node<'_>| self.is_projection(n);
        let up = node.src(1).map(|up| up.viewed().unwrap_or(up));
        Some(fits && fed(base) && up.is_none_or(fed))
    }

    /// `MUL` of a product, or of what the activation made of one, with a factor per token and choice.
    fn weighted(&self, node: Node<'_>) -> Option<bool> {
        let (x, factor) = (node.src(0)?, node.src(1)?);
        let fits = node.op() == self.ops().mul && node.is_packed() && x.is_rows() && factor.is_rows();
        let per_choice = factor.shape() == [1, x.ne(1), x.ne(2), 1];
        Some(fits && per_choice && (self.is_projection(x) || self.activation(x).unwrap_or(false)))
    }

    /// `ADD` of two choices of the same product, or of one to such a sum.
    fn sum(&self, node: Node<'_>) -> Option<bool> {
        let (a, b) = (node.src(0)?, node.src(1)?);
        let fits = node.is_packed() && a.is_rows() && b.is_rows() && a.shape() == node.shape() && b.shape() == node.shape();
        let choice = |n: Node<'_>| n.op() == self.ops().view && n.viewed().is_some_and(|p| self.is_product(p));
        Some(fits && choice(b) && (choice(a) || (a.op() == self.ops().add && self.takes(a))))
    }

    /// `CONT` of the one choice.
    fn only_choice(&self, node: Node<'_>) -> Option<bool> {
        let x = node.src(0)?;
        let product = x.viewed().filter(|_| x.op() == self.ops().view)?;
        Some(node.is_packed() && x.is_rows() && x.shape() == node.shape() && product.ne(1) == 1 && self.is_product(product))
    }
}

/// Whether the node computes nothing: a view, or a tensor that is just there (`GGML_OP_NONE` is 0 in every version).
pub(super) fn is_view(ops: &Ops, node: Node<'_>) -> bool {
    let op = node.op();
    op == ops.view || op == ops.reshape || op == ops.permute || op == ops.transpose || op == 0
}

/// One value per expert, repeated for every token: `[1, experts, 1]` to `[1, experts, tokens]`. The values are those of a tensor that is just
/// there, reshaped. A copy of it that the host made for us is none: its memory may be used again before the block has ended.
pub(super) fn is_scale(ops: &Ops, node: Node<'_>) -> bool {
    let Some(x) = node.src(0) else { return false };
    let there = x.op() == ops.reshape && x.viewed().is_some_and(|v| v.op() == 0);
    node.op() == ops.repeat && there && x.is_rows() && node.is_packed() && x.shape() == [1, node.ne(1), 1, 1] && node.ne(0) == 1
}

/// Of such values, those of the experts that each token chose: `[1, used, tokens]`.
pub(super) fn is_scale_of_choices(ops: &Ops, node: Node<'_>) -> bool {
    let (Some(scale), Some(ids)) = (node.src(0), node.src(1)) else { return false };
    let fits = ids.is_ids() && node.is_packed() && node.shape() == [1, ids.ne(0), ids.ne(1), 1] && scale.ne(2) == ids.ne(1);
    node.op() == ops.get_rows && fits && is_scale(ops, scale)
}

/// The activation of a `GLU` or `UNARY` node, or of `SQR`, which is one only after a ReLU.
pub(super) fn activation(ops: &Ops, node: Node<'_>) -> Option<Activation> {
    let op = node.op();
    if op == ops.glu {
        let kind = node.param(0);
        let (alpha, limit) = (node.float_param(2), node.float_param(3));
        return match kind {
            k if k == ops.swiglu => Some(Activation::SwiGlu),
            k if k == ops.swiglu_oai => Some(Activation::SwiGluOai { alpha, limit }),
            k if Some(k) == ops.swiglu_clamp => Some(Activation::SwiGluClamp { limit }),
            k if k == ops.geglu => Some(Activation::GeGlu),
            k if k == ops.geglu_erf => Some(Activation::GeGluErf),
            k if k == ops.geglu_quick => Some(Activation::GeGluQuick),
            k if k == ops.reglu => Some(Activation::ReGlu),
            _ => None,
        };
    }
    if op == ops.unary {
        return match node.param(0) {
            k if k == ops.silu => Some(Activation::Silu),
            k if k == ops.gelu => Some(Activation::Gelu),
            k if k == ops.relu => Some(Activation::Relu),
            _ => None,
        };
    }
    (op == ops.sqr && node.src(0).is_some_and(|x| x.op() == ops.unary && x.param(0) == ops.relu)).then_some(Activation::ReluSqr)
}
