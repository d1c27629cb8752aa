//! The activation alone: ggml's `GLU`, and the ungated `UNARY` functions.
//!
//! Owns: [`glu`], for graphs in which the whole chain cannot be recognised and the single nodes have to run. Must not know: weights, experts.
//! `out[i, r] = act(gate[i, r], up[i, r])`. Allocates nothing, needs no workspace.

use super::activation::Activation;
use super::args::{Rows, RowsMut};
use super::kernels::Kernels;
use super::pool::ParallelFor;
use crate::error::{Error, Result};

/// Values that one thread computes faster than several can be told to.
const ALONE: usize = 16 * 1024;

/// Values on their way through the activation; on the stack.
const PIECE: usize = 512;

/// Runs it on all rows of `up`; `gate` is there exactly for gated activations. `out` may lie on `gate` or `up`, row on row, or between their
/// rows (a merged product).
///
/// # Errors
/// [`crate::error::Status::InvalidArgument`] if the parts do not fit each other, or overlap in another way. Nothing has been written then.
pub fn glu(
    activation: Activation,
    gate: Option<&Rows<'_>>,
    up: &Rows<'_>,
    out: RowsMut<'_>,
    kernels: Kernels,
    threads: &dyn ParallelFor,
) -> Result<()> {
    if gate.is_some() != activation.gated() {
        let what = if activation.gated() { "needs a gate" } else { "takes no gate" };
        return Err(Error::invalid(format!("{activation:?} {what}")));
    }
    let dims = |r: &Rows<'_>| [r.width(), r.used(), r.tokens()];
    let want = [out.width(), out.used(), out.tokens()];
    for (name, input) in [("gate", gate), ("up", Some(up))] {
        let Some(input) = input else { continue };
        if dims(input) != want {
            return Err(Error::invalid(format!("the {name} is {:?}, the output {want:?}", dims(input))));
        }
        if !input.may_become(&out) {
            return Err(Error::invalid(format!("the output overlaps the {name}, and not row on row")));
        }
    }
    let [width, used, tokens] = want;
    if width == 0 {
        return Ok(());
    }
    let rows = used * tokens;
    let batch = (rows / (8 * threads.threads())).clamp(1, 16);
    let out = out.deal();
    let work = |_| {
        let mut piece = [0.0f32; PIECE];
        while out.deal(batch, |token, j, mut row| {
            for first in (0..width).step_by(PIECE) {
                let count = PIECE.min(width - first);
                let piece = &mut piece[..count];
                gate.unwrap_or(up).with(token, j, |x| piece.copy_from_slice(&x[first..][..count]));
                match gate {
                    Some(_) => up.with(token, j, |up| kernels.activate(activation, piece, &up[first..][..count])),
                    None => kernels.activate(activation, piece, &[]),
                }
                row.write(first, piece);
            }
        }) {}
    };
    if rows.saturating_mul(width) <= ALONE {
        work(0);
    } else {
        threads.run(&work);
    }
    Ok(())
}
