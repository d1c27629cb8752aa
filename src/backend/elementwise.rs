//! The operations around a product, each alone: for graphs in which a block is not recognised.
//!
//! Owns: loops over rows of f32, cut among the threads by rows. Each value is read before the value at the same place is written, so that the
//! result may lie exactly where an operand lies, as the host's allocator likes it.

use super::node::Node;
use crate::error::{Error, Result};
use crate::moe::ParallelFor;

/// Rows of a tensor, by number.
#[derive(Clone, Copy)]
struct View {
    base: *mut f32,
    width: usize,
    rows: [usize; 2],
    strides: [usize; 2],
}

// SAFETY: an address and sizes; whoever uses it keeps threads to rows of their own.
unsafe impl Send for View {}
// SAFETY: likewise.
unsafe impl Sync for View {}

impl View {
    fn new(node: Node<'_>) -> Result<View> {
        if !node.is_rows() || node.data().is_null() {
            return Err(Error::invalid("an operand is not rows of f32 in memory"));
        }
        Ok(View { base: node.data().cast(), width: node.ne(0), rows: [node.ne(1), node.ne(2)], strides: [node.nb(1), node.nb(2)] })
    }

    fn count(self) -> usize {
        self.rows[0] * self.rows[1]
    }

    /// Address of a row. `i` must be below `count`.
    fn row(self, i: usize) -> *mut f32 {
        self.base.wrapping_byte_add(i % self.rows[0] * self.strides[0] + i / self.rows[0] * self.strides[1])
    }
}

/// Calls `f` for every row number, each on one thread.
fn each_row(team: &dyn ParallelFor, count: usize, f: impl Fn(usize) + Sync) {
    let threads = team.threads();
    team.run(&|i| (count * i / threads..count * (i + 1) / threads).for_each(&f));
}

fn differ() -> Error {
    Error::invalid("operands and result differ in shape")
}

/// `out = f(a, b)`; `b` has the shape of `a`, or one value for each of its rows.
///
/// # Safety
/// The tensors have memory as their shapes and strides say; `out` overlaps an operand only if it lies exactly there.
pub(super) unsafe fn binary(
    team: &dyn ParallelFor,
    out: Node<'_>,
    a: Node<'_>,
    b: Node<'_>,
    f: impl Fn(f32, f32) -> f32 + Sync,
) -> Result<()> {
    let (out, a, b) = (View::new(out)?, View::new(a)?, View::new(b)?);
    if [a.rows, b.rows] != [out.rows; 2] || a.width != out.width || ![1, a.width].contains(&b.width) {
        return Err(differ());
    }
    each_row(team, out.count(), |r| {
        let (o, a, b, step) = (out.row(r), a.row(r), b.row(r), usize::from(b.width != 1));
        for i in 0..out.width {
            // SAFETY: inside the rows of the three views, which have the same shape (`b` may have one value, read at step 0).
            unsafe { o.add(i).write(f(a.add(i).read(), b.add(i * step).read())) };
        }
    });
    Ok(())
}

/// `out = x`.
///
/// # Safety
/// As for [`binary`].
pub(super) unsafe fn copy(team: &dyn ParallelFor, out: Node<'_>, x: Node<'_>) -> Result<()> {
    // SAFETY: the caller vouches for the tensors.
    unsafe { binary(team, out, x, x, |a, _| a) }
}

/// The value, or the bound that it is beyond; NaN stays.
pub(super) fn clamp(x: f32, low: f32, high: f32) -> f32 {
    match x {
        x if x < low => low,
        x if x > high => high,
        x => x,
    }
}

/// `out[:, e, t] = x[:, e]`.
///
/// # Safety
/// As for [`binary`]; `out` does not overlap `x`.
pub(super) unsafe fn repeat(team: &dyn ParallelFor, out: Node<'_>, x: Node<'_>) -> Result<()> {
    let (out, x) = (View::new(out)?, View::new(x)?);
    if x.rows != [out.rows[0], 1] || x.width != out.width {
        return Err(differ());
    }
    // SAFETY: inside the rows of both views, which have the same width.
    each_row(team, out.count(), |r| unsafe { out.row(r).copy_from_nonoverlapping(x.row(r % out.rows[0]), out.width) });
    Ok(())
}

/// `out[:, j, t] = x[:, ids[j, t], t]`.
///
/// # Safety
/// As for [`binary`]; `out` does not overlap `x`.
pub(super) unsafe fn choose(team: &dyn ParallelFor, out: Node<'_>, x: Node<'_>, ids: Node<'_>) -> Result<()> {
    let (out, x) = (View::new(out)?, View::new(x)?);
    if x.rows[1] != out.rows[1] || x.width != out.width {
        return Err(differ());
    }
    // SAFETY: the caller vouches for the tensors.
    let ids = unsafe { chosen(out, x.rows[0], ids) }?;
    let from = |r: usize| x.row(r / out.rows[0] * x.rows[0] + ids[r]);
    // SAFETY: inside the rows of both views, which have the same width; the id is that of a row of this token.
    each_row(team, out.count(), |r| unsafe { out.row(r).copy_from_nonoverlapping(from(r), out.width) });
    Ok(())
}

/// The ids of all rows, each looked at before anything is written.
///
/// # Safety
/// As for [`binary`].
unsafe fn chosen(out: View, experts: usize, ids: Node<'_>) -> Result<Vec<usize>> {
    let (base, strides) = (ids.data().cast::<i32>(), [ids.nb(0), ids.nb(1)]);
    if [ids.ne(0), ids.ne(1)] != out.rows || base.is_null() {
        return Err(differ());
    }
    let id = |r: usize| {
        let at = base.wrapping_byte_add(r % out.rows[0] * strides[0] + r / out.rows[0] * strides[1]);
        // SAFETY: inside the table, whose shape is that of the rows.
        usize::try_from(unsafe { at.read() }).ok().filter(|id| *id < experts)
    };
    let ids: Option<Vec<usize>> = (0..out.count()).map(id).collect();
    ids.ok_or_else(|| Error::invalid(format!("an id is not one of {experts} experts")))
}

/// `out[:, j, t] = x[:, j, t] + bias[:, ids[j, t]]`.
///
/// # Safety
/// As for [`binary`].
pub(super) unsafe fn add_id(team: &dyn ParallelFor, out: Node<'_>, x: Node<'_>, bias: Node<'_>, ids: Node<'_>) -> Result<()> {
    let (out, x, bias) = (View::new(out)?, View::new(x)?, View::new(bias)?);
    if x.rows != out.rows || [x.width, bias.width] != [out.width; 2] {
        return Err(differ());
    }
    // SAFETY: the caller vouches for the tensors.
    let ids = unsafe { chosen(out, bias.rows[0], ids) }?;
    each_row(team, out.count(), |r| {
        let (o, x, b) = (out.row(r), x.row(r), bias.row(ids[r]));
        for i in 0..out.width {
            // SAFETY: inside the rows of the three views; the id is that of a row of the bias.
            unsafe { o.add(i).write(x.add(i).read() + b.add(i).read()) };
        }
    });
    Ok(())
}
