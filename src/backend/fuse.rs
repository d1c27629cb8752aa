//! Finds the experts of a layer in a graph: the nodes that together are one operation of `moe`.
//!
//! Owns: [`Block`] and the matcher. Must not know: how anything is computed.
//!
//! A block is, in this order and with nothing but views between: the products with gate and up (or with both merged, or with up alone), each
//! with an optional scale per expert and an optional bias; the activation; the product with down, with an optional bias; optionally the multiplication with the routing
//! weights; then the choices of each token added up one by one, or copied if there is only one. Whether a value inside is needed outside is
//! for the host to say (`ggml_can_fuse_subgraph_ext`): it counts the uses in the whole graph, of which this may be a part.

use super::claim::{activation, is_scale, is_scale_of_choices, is_view};
use super::node::Node;
use crate::abi::{CanFuseSubgraph, Host, Ops, ggml_cgraph};
use crate::moe::Activation;
use crate::report::blocks::NodeByNode;

/// A product, its scale and its bias.
#[derive(Clone, Copy)]
pub(super) struct Product<'a> {
    pub(super) weights: Node<'a>,
    /// `[1, experts, 1]`.
    pub(super) scale: Option<Node<'a>>,
    pub(super) bias: Option<Node<'a>>,
    /// First row of weights and bias that is meant, and how many: merged weights are two products.
    pub(super) rows: [usize; 2],
}

/// The experts of a layer.
pub(super) struct Block<'a> {
    pub(super) gate: Option<Product<'a>>,
    pub(super) up: Product<'a>,
    pub(super) down: Product<'a>,
    pub(super) activation: Activation,
    /// Tokens: `[d, 1 or used, tokens]`.
    pub(super) x: Node<'a>,
    /// `[used, tokens]`.
    pub(super) ids: Node<'a>,
    /// `[1, used, tokens]`.
    pub(super) weights: Option<Node<'a>>,
    /// The sum: `[d_out, tokens]`.
    pub(super) out: Node<'a>,
    /// Number of its first and of its last node.
    pub(super) nodes: [usize; 2],
}

/// The nodes of a graph, or of a part of one.
pub(super) struct Graph<'a> {
    pub(super) nodes: Vec<Node<'a>>,
    pub(super) raw: *const ggml_cgraph,
    pub(super) host: &'a Host,
}

/// Walks over the nodes that compute something.
struct Walk<'g, 'a> {
    graph: &'g Graph<'a>,
    next: usize,
    /// Those that belong to the block so far, in order.
    taken: Vec<usize>,
    /// Whether choices were left when the sum ended.
    some_choices: bool,
}

impl<'a> Walk<'_, 'a> {
    /// The next node that is not a view, if it is this operation.
    fn take(&mut self, op: i32) -> Option<Node<'a>> {
        let (i, node) = self.peek()?;
        (node.op() == op).then(|| {
            self.next = i + 1;
            self.taken.push(i);
            node
        })
    }

    fn peek(&self) -> Option<(usize, Node<'a>)> {
        self.ahead().next()
    }

    /// The nodes to come that are not views.
    fn ahead(&self) -> impl Iterator<Item = (usize, Node<'a>)> {
        let rest = self.graph.nodes.iter().enumerate().skip(self.next);
        rest.map(|(i, n)| (i, *n)).filter(|(_, n)| !self.graph.is_view(*n))
    }

    /// Marks the node as part of the block.
    fn include(&mut self, node: Node<'a>) -> Option<()> {
        let first = *self.taken.first()?;
        let i = self.graph.nodes.iter().enumerate().skip(first).find(|(_, n)| n.is(node))?.0;
        self.taken.push(i);
        Some(())
    }
}

impl<'a> Graph<'a> {
    fn ops(&self) -> &'a Ops {
        &self.host.ops
    }

    /// Whether the node computes nothing.
    pub(super) fn is_view(&self, node: Node<'_>) -> bool {
        is_view(self.ops(), node)
    }

    /// The block whose first product is node `first`.
    ///
    /// # Errors
    /// Why there is none.
    pub(super) fn block_at(&self, first: usize) -> Result<Block<'a>, NodeByNode> {
        let mut walk = Walk { graph: self, next: first, taken: Vec::new(), some_choices: false };
        let Some((block, last)) = self.parse(&mut walk) else {
            return Err(match walk.peek() {
                _ if walk.some_choices => NodeByNode::SomeChoices,
                None => NodeByNode::GraphCut,
                Some(_) => NodeByNode::UnknownChain,
            });
        };
        let mut taken = walk.taken;
        taken.sort_unstable();
        // What lies between and is not part of it must compute nothing: it would be computed too early.
        let mut inside = (first..=last).filter(|i| taken.binary_search(i).is_err());
        if !inside.all(|i| self.is_view(self.nodes[i])) || taken.last() != Some(&last) {
            return Err(NodeByNode::UnknownChain);
        }
        let can_fuse = self.host.can_fuse_subgraph.ok_or(NodeByNode::OldHost)?;
        if !self.nothing_is_used_outside(can_fuse, &taken) {
            return Err(NodeByNode::UsedOutside);
        }
        Ok(Block { nodes: [first, last], ..block })
    }

    fn nothing_is_used_outside(&self, can_fuse: CanFuseSubgraph, taken: &[usize]) -> bool {
        let ops: Vec<i32> = taken.iter().map(|i| self.nodes[*i].op()).collect();
        let Ok(indices) = taken.iter().map(|i| i32::try_from(*i)).collect::<Result<Vec<i32>, _>>() else { return false };
        let (Some(last), Ok(count)) = (indices.last(), i32::try_from(indices.len())) else { return false };
        // SAFETY: the graph is live, the arrays have `count` numbers of nodes and of operations, and there is one output.
        unsafe { can_fuse(self.raw, indices.as_ptr(), count, ops.as_ptr(), last, 1) }
    }

    fn parse(&self, walk: &mut Walk<'_, 'a>) -> Option<(Block<'a>, usize)> {
        let ops = self.ops();
        let first = self.product(walk)?;
        let [x, ids] = [first.1.src(1)?, first.1.src(2)?];
        let of_same = |p: &(Product<'a>, Node<'a>, Node<'a>)| p.1.src(1).is_some_and(|s| s.is(x)) && p.1.src(2).is_some_and(|s| s.is(ids));
        let (gate, up, activation, activated) = if self.is_limited(walk) {
            let (up, limit, result) = self.limited(walk, first.2, of_same)?;
            (Some(first.0), up, Activation::SwiGluLimit { limit }, result)
        } else {
            let mut products = vec![first];
            if walk.peek()?.1.op() == ops.mul_mat_id {
                products.push(self.product(walk).filter(of_same)?);
            }
            let (activation, act) = self.activation(walk)?;
            let (gate, up) = self.sides(walk, &products, act.source, activation)?;
            (gate, up, activation, act.result)
        };

        let (down, product, tail) = self.product(walk)?;
        if !product.src(1)?.is(activated) || !product.src(2)?.is(ids) {
            return None;
        }
        let mut tail = tail;
        let mut weights = None;
        if walk.peek()?.1.op() == ops.mul {
            let node = walk.take(ops.mul)?;
            let factor = node.src(1)?;
            if !node.src(0)?.is(tail) || !factor.is_rows() || factor.shape() != [1, tail.ne(1), tail.ne(2), 1] {
                return None;
            }
            (weights, tail) = (Some(factor), node);
        }
        let out = self.sum(walk, tail)?;
        let last = walk.next - 1;
        let fits = out.is_rows() && out.shape() == [tail.ne(0), tail.ne(2), 1, 1];
        fits.then_some((Block { gate, up, down, activation, x, ids, weights, out, nodes: [0; 2] }, last))
    }

    /// Whether a SiLU that is limited comes next.
    fn is_limited(&self, walk: &Walk<'_, 'a>) -> bool {
        let mut ops = walk.ahead().map(|(_, n)| n.op());
        ops.next() == Some(self.ops().unary) && ops.next() == Some(self.ops().clamp)
    }

    /// SiLU of the gate and its upper limit, the product with up and its limits, the product of both: up, the limit, the result.
    fn limited(
        &self,
        walk: &mut Walk<'_, 'a>,
        gate: Node<'a>,
        of_same: impl Fn(&(Product<'a>, Node<'a>, Node<'a>)) -> bool,
    ) -> Option<(Product<'a>, f32, Node<'a>)> {
        let ops = self.ops();
        let silu = walk.take(ops.unary).filter(|n| activation(ops, *n) == Some(Activation::Silu))?;
        let first = walk.take(ops.clamp)?;
        let up = self.product(walk).filter(of_same)?;
        let second = walk.take(ops.clamp)?;
        let result = walk.take(ops.mul)?;
        let limit = first.float_param(1);
        let limits = [first.float_param(0), second.float_param(0), second.float_param(1)] == [f32::NEG_INFINITY, -limit, limit];
        let chained = silu.src(0)?.is(gate) && first.src(0)?.is(silu) && second.src(0)?.is(up.2);
        let both = result.src(0)?.is(first) && result.src(1)?.is(second);
        (limits && limit > 0.0 && chained && both).then_some((up.0, limit, result))
    }

    /// A product with its scale and its bias: what it is, the product's node, the node of the result.
    fn product(&self, walk: &mut Walk<'_, 'a>) -> Option<(Product<'a>, Node<'a>, Node<'a>)> {
        let node = walk.take(self.ops().mul_mat_id)?;
        let weights = node.src(0)?;
        let mut product = Product { weights, scale: None, bias: None, rows: [0, weights.ne(1)] };
        let ids = node.src(2)?;
        let mut result = node;
        if walk.peek().is_some_and(|(_, n)| is_scale(self.ops(), n) && n.ne(1) == weights.ne(2)) {
            let repeated = walk.take(self.ops().repeat)?;
            let chosen = walk.take(self.ops().get_rows)?;
            let scaled = walk.take(self.ops().mul)?;
            let of_it = chosen.src(0)?.is(repeated) && chosen.src(1)?.is(ids) && is_scale_of_choices(self.ops(), chosen);
            if !of_it || !scaled.src(0)?.is(node) || !scaled.src(1)?.is(chosen) || scaled.shape() != node.shape() {
                return None;
            }
            (product.scale, result) = (repeated.src(0), scaled);
        }
        let is_its_bias = |n: Node<'_>| {
            let same_ids = n.src(2).is_some_and(|i| i.is(ids));
            n.op() == self.ops().add_id && same_ids && n.src(0).is_some_and(|s| s.is(result))
        };
        if walk.peek().is_none_or(|(_, n)| !is_its_bias(n)) {
            return Some((product, node, result));
        }
        let bias = walk.take(self.ops().add_id)?;
        product.bias = bias.src(1);
        Some((product, node, bias))
    }

    fn activation(&self, walk: &mut Walk<'_, 'a>) -> Option<(Activation, Act<'a>)> {
        let ops = self.ops();
        let (_, node) = walk.peek()?;
        let kind = activation(ops, node)?;
        if node.op() == ops.glu {
            walk.take(ops.glu)?;
            return Some((kind, Act { source: node, result: node }));
        }
        walk.take(ops.unary)?;
        let square = walk.peek().filter(|(_, n)| n.op() == ops.sqr && n.src(0).is_some_and(|s| s.is(node)));
        if square.is_some() && kind == Activation::Relu {
            let result = walk.take(ops.sqr)?;
            return Some((Activation::ReluSqr, Act { source: node, result }));
        }
        Some((kind, Act { source: node, result: node }))
    }

    /// Which product is the gate and which is up.
    fn sides(
        &self,
        walk: &mut Walk<'_, 'a>,
        products: &[(Product<'a>, Node<'a>, Node<'a>)],
        source: Node<'a>,
        activation: Activation,
    ) -> Option<(Option<Product<'a>>, Product<'a>)> {
        if !activation.gated() {
            let [(up, _, result)] = products else { return None };
            return source.src(0)?.is(*result).then_some((None, *up));
        }
        let swapped = source.param(1) != 0;
        let pair = match (source.src(1), products) {
            // Two products.
            (Some(b), [first, second]) => {
                let a = source.src(0)?;
                let find = |n: Node<'_>| [first, second].into_iter().find(|p| p.2.is(n)).map(|p| p.0);
                let (gate, up) = (find(a)?, find(b)?);
                (!a.is(b)).then_some([gate, up])?
            }
            // Two views of one product with merged weights.
            (Some(b), [(merged, _, result)]) => {
                let a = source.src(0)?;
                let half = |n: Node<'a>| {
                    let of_it = n.op() == self.ops().view && n.viewed().is_some_and(|v| v.is(*result));
                    let first = n.view_offset() / 4;
                    let strides = (n.nb(0), n.nb(1), n.nb(2)) == (4, result.nb(1), result.nb(2));
                    let shape = n.shape() == [merged.rows[1] / 2, result.ne(1), result.ne(2), 1];
                    let whole = n.view_offset().is_multiple_of(4) && first + n.ne(0) <= merged.rows[1];
                    (of_it && strides && shape && whole).then_some(Product { rows: [first, n.ne(0)], ..*merged })
                };
                let sides = [half(a)?, half(b)?];
                walk.include(a)?;
                walk.include(b)?;
                sides
            }
            // One product, halved by the activation itself.
            (None, [(merged, _, result)]) => {
                let rows = merged.rows[1] / 2;
                let fits = source.src(0)?.is(*result) && source.ne(0) == rows && merged.rows[1].is_multiple_of(2);
                let sides = [Product { rows: [0, rows], ..*merged }, Product { rows: [rows, rows], ..*merged }];
                fits.then_some(sides)?
            }
            _ => return None,
        };
        let [gate, up] = if swapped { [pair[1], pair[0]] } else { pair };
        Some((Some(gate), up))
    }

    /// The choices of each token added up one by one, or the copy of the only one: the last node.
    fn sum(&self, walk: &mut Walk<'_, 'a>, tail: Node<'a>) -> Option<Node<'a>> {
        let ops = self.ops();
        let used = tail.ne(1);
        let is_choice = |n: Node<'a>, j: usize| {
            n.op() == ops.view
                && n.viewed().is_some_and(|v| v.is(tail))
                && n.view_offset() == j * tail.nb(1)
                && n.shape() == [tail.ne(0), tail.ne(2), 1, 1]
                && (n.nb(0), n.nb(1)) == (4, tail.nb(2))
        };
        if used == 1 {
            let copy = walk.take(ops.cont)?;
            let view = copy.src(0).filter(|v| is_choice(*v, 0))?;
            walk.include(view)?;
            return Some(copy);
        }
        let mut sum: Option<Node<'a>> = None;
        for j in 1..used {
            walk.some_choices = j > 1 || walk.peek().is_some_and(|(_, n)| n.op() == ops.cont);
            let add = walk.take(ops.add)?;
            let (a, b) = (add.src(0)?, add.src(1)?);
            match sum {
                None if is_choice(a, 0) => walk.include(a)?,
                Some(before) if a.is(before) => {}
                _ => return None,
            }
            if !is_choice(b, j) {
                return None;
            }
            walk.include(b)?;
            sum = Some(add);
        }
        walk.some_choices = false;
        sum
    }
}

/// The node that takes the products, and the one that the next product takes.
struct Act<'a> {
    source: Node<'a>,
    result: Node<'a>,
}
