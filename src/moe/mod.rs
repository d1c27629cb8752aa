//! The experts of a mixture-of-experts block, as one operation on the CPU.
//!
//! `y[t] = sum_j w[t][j] * (down[e] . act(gate[e] . x[t], up[e] . x[t]))` with `e = ids[t][j]`, over weights in ggml's own layout.
//!
//! Owns: the description of the operation ([`Experts`], [`Inputs`]) and its checks. Must not know: ggml's structures, files, buffers.
//!
//! The way of the data: `args` (checked views) -> `route` (pairs by expert) -> `acts` (tokens quantised once) -> `forward` (two phases of
//! `schedule`d tasks on a `pool` or another `crew`) -> `kernels` (products, per instruction set of `isa`, per format of `blocks`; `dequant` and
//! `kernels/scalar` are the oracle) with `activation` between the phases. `ahead` asks for weights that are not in memory. `shared` keeps threads out of each other's memory.

pub mod activation;
pub mod acts;
pub mod ahead;
pub mod args;
pub mod blocks;
#[cfg(test)]
mod copies;
mod crew;
pub mod dequant;
mod forward;
mod glu;
pub mod isa;
pub mod kernels;
pub mod pool;
mod route;
mod schedule;
mod shared;
mod single;
mod span;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use activation::Activation;
pub use ahead::{Ahead, Asked, Never, prefetch};
pub use args::{Matrix, PerExpert, Rows, RowsMut, Table};
pub use blocks::WeightType;
pub(crate) use crew::Crew;
pub use forward::{forward, forward_ahead, workspace_size};
pub use glu::glu;
pub use kernels::{Kernels, table};
pub use pool::{ParallelFor, Pool, Serial};
pub use single::{mul_mat_id, mul_mat_id_ahead, mul_mat_id_workspace_size};
pub use span::Span;

use crate::error::{Error, Result};

/// Alignment of the workspace, in bytes.
pub const WORKSPACE_ALIGNMENT: usize = 64;

/// One of the three projections.
#[derive(Clone, Copy, Debug)]
pub struct Projection<'a> {
    /// The weights.
    pub matrix: Matrix<'a>,
    /// A factor per expert, applied to the product. `None` is 1.
    pub scale: Option<PerExpert<'a>>,
    /// Added to the scaled product. `None` is 0.
    pub bias: Option<PerExpert<'a>>,
}

impl<'a> Projection<'a> {
    /// Weights alone.
    pub fn new(matrix: Matrix<'a>) -> Self {
        Projection { matrix, scale: None, bias: None }
    }

    fn check(&self, name: &str, k: usize, rows: usize, experts: usize) -> Result<()> {
        let m = &self.matrix;
        if (m.k(), m.rows(), m.experts()) != (k, rows, experts) {
            let (have, want) = ([m.k(), m.rows(), m.experts()], [k, rows, experts]);
            return Err(Error::invalid(format!("the {name} weights are {have:?}, the other projections ask for {want:?}")));
        }
        if self.scale.is_some_and(|s| s.width() != 1 || s.experts() != experts) {
            return Err(Error::invalid(format!("the {name} scale is not one value for each of {experts} experts")));
        }
        if self.bias.is_some_and(|b| b.width() != rows || b.experts() != experts) {
            return Err(Error::invalid(format!("the {name} bias is not {rows} values for each of {experts} experts")));
        }
        Ok(())
    }

    /// Scale, then bias, then a factor on what came before: `product` is rows `first..` of the expert.
    fn finish(&self, expert: usize, first: usize, before: f32, product: &mut [f32]) {
        let scale = self.scale.map_or(1.0, |s| s.of(expert)[0]) * before;
        if scale != 1.0 {
            product.iter_mut().for_each(|v| *v *= scale);
        }
        if let Some(bias) = self.bias {
            product.iter_mut().zip(&bias.of(expert)[first..]).for_each(|(v, b)| *v += b);
        }
    }
}

/// The weights of the operation and what is done between them.
#[derive(Clone, Copy, Debug)]
pub struct Experts<'a> {
    /// The gate projection, for gated activations: `[d, f, experts]`. For merged weights, [`Matrix::part`] of them.
    pub gate: Option<Projection<'a>>,
    /// The up projection: `[d, f, experts]`.
    pub up: Projection<'a>,
    /// The down projection: `[f, d_out, experts]`.
    pub down: Projection<'a>,
    /// What is between them.
    pub activation: Activation,
    /// The routing weight multiplies the input of gate and up (their biases come after), not the output of down.
    pub weight_first: bool,
}

impl Experts<'_> {
    /// Whether the parts fit each other.
    ///
    /// # Errors
    /// [`crate::error::Status::InvalidArgument`], naming the first part that does not.
    pub fn check(&self) -> Result<()> {
        let up = &self.up.matrix;
        let (d, f, experts) = (up.k(), up.rows(), up.experts());
        self.up.check("up", d, f, experts)?;
        self.down.check("down", f, self.down.matrix.rows(), experts)?;
        match (&self.gate, self.activation.gated()) {
            (Some(gate), true) => gate.check("gate", d, f, experts)?,
            (None, false) => {}
            (Some(_), false) => return Err(Error::invalid(format!("{:?} takes no gate weights", self.activation))),
            (None, true) => return Err(Error::invalid(format!("{:?} needs gate weights", self.activation))),
        }
        // Pair and task numbers are u32.
        if experts > u32::MAX as usize || f.max(self.down.matrix.rows()) > u32::MAX as usize {
            return Err(Error::invalid("more experts or rows than 32 bits count"));
        }
        Ok(())
    }
}

/// The tokens.
#[derive(Debug)]
pub struct Inputs<'a> {
    /// `[d, 1 or used, tokens]`. The output may lie in the same memory, as may ids and weights.
    pub x: Rows<'a>,
    /// Expert of each choice of each token: `[used, tokens]`.
    pub ids: Table<'a, i32>,
    /// Routing weights of the choices. `None` is 1.
    pub weights: Option<Table<'a, f32>>,
    /// `[d_out, 1, tokens]`, written.
    pub y: RowsMut<'a>,
}

impl Inputs<'_> {
    fn check(&self, experts: &Experts<'_>) -> Result<()> {
        let (used, tokens) = (self.ids.used(), self.ids.tokens());
        let (d, out) = (experts.up.matrix.k(), experts.down.matrix.rows());
        if self.x.width() != d || self.x.tokens() != tokens || ![1, used].contains(&self.x.used()) {
            let have = [self.x.width(), self.x.used(), self.x.tokens()];
            return Err(Error::invalid(format!("the activations are {have:?} for {tokens} tokens of {d} with {used} experts each")));
        }
        if self.y.width() != out || self.y.tokens() != tokens || self.y.used() != 1 {
            let have = [self.y.width(), self.y.used(), self.y.tokens()];
            return Err(Error::invalid(format!("the output is {have:?}, it should be {:?}", [out, 1, tokens])));
        }
        if self.weights.is_some_and(|w| (w.used(), w.tokens()) != (used, tokens)) {
            return Err(Error::invalid(format!("there is not one routing weight for each of {used} x {tokens} ids")));
        }
        if used == 0 && tokens > 0 {
            return Err(Error::invalid("tokens without a choice of experts"));
        }
        Ok(())
    }
}
