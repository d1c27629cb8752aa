//! One projection alone: ggml's `MUL_MAT_ID`.
//!
//! Owns: [`mul_mat_id`], for graphs in which the whole chain cannot be recognised and the single nodes have to run. Must not know: gates,
//! activations, sums over experts. `out[r, j, t] = matrix[ids[j, t]][r] . x[j or 0, t]`. Allocates nothing.

use std::sync::atomic::{AtomicPtr, AtomicU8};

use super::acts::{ActFormat, ActRow, Line};
use super::ahead::{Ahead, FIRST, Never, Way};
use super::args::{Matrix, Rows, RowsMut, Table};
use super::forward::{SCRATCH_LINES, quantise_rows, split_scratch};
use super::kernels::{Kernels, Mul};
use super::pool::ParallelFor;
use super::route::route;
use super::schedule::{COLUMNS, Dealer, OUT_ROWS, runs};
use super::shared::{Arena, Pieces, lines_for};
use crate::error::{Error, Result};

/// Bytes of workspace for up to this many tokens with `used` experts each, on up to `threads` threads.
///
/// # Errors
/// [`crate::error::Status::InvalidArgument`] if the size does not fit.
pub fn mul_mat_id_workspace_size(matrix: &Matrix<'_>, tokens: usize, used: usize, threads: usize) -> Result<usize> {
    size(matrix, tokens, used, used.max(1), threads).ok_or_else(too_big)
}

fn too_big() -> Error {
    Error::invalid("more tokens than a workspace can be made for")
}

fn size(matrix: &Matrix<'_>, tokens: usize, used: usize, x_used: usize, threads: usize) -> Option<usize> {
    let pairs = tokens.checked_mul(used).filter(|n| u32::try_from(*n).is_ok())?;
    let x_rows = tokens.checked_mul(x_used)?;
    let row_lines = ActFormat::of(matrix.weights()).row_lines(matrix.k());
    let flags = x_rows.checked_add(matrix.rows().div_ceil(OUT_ROWS))?.checked_add(threads)?.checked_add(matrix.experts())?;
    let parts = [
        lines_for::<u32>(matrix.experts().checked_add(1)?),
        lines_for::<u32>(pairs),
        lines_for::<u32>(matrix.experts()),
        lines_for::<AtomicU8>(flags),
        lines_for::<AtomicPtr<u8>>(matrix.experts()),
        lines_for::<Line>(x_rows.checked_mul(row_lines)?),
        lines_for::<Line>(threads.checked_mul(SCRATCH_LINES)?),
    ];
    parts.into_iter().try_fold(0usize, |sum, part| sum.checked_add(part)).filter(|n| *n <= isize::MAX as usize)
}

/// Runs it. `out` is `[rows, used, tokens]`; `x` is `[k, 1 or used, tokens]`, and may share memory with `out`.
///
/// # Errors
/// [`crate::error::Status::InvalidArgument`] if the parts do not fit each other, an id is not an expert, or the workspace is too small or not
/// aligned to [`super::WORKSPACE_ALIGNMENT`]. Nothing has been written to the output then.
pub fn mul_mat_id(
    matrix: &Matrix<'_>,
    x: &Rows<'_>,
    ids: &Table<'_, i32>,
    out: &RowsMut<'_>,
    workspace: &mut [u8],
    kernels: Kernels,
    threads: &dyn ParallelFor,
) -> Result<()> {
    mul_mat_id_ahead(matrix, x, ids, out, workspace, (kernels, threads), &Never)
}

/// The same, with somebody who brings weights into memory before they are read.
///
/// # Errors
/// As [`mul_mat_id`], and those of [`Ahead::wait`].
pub fn mul_mat_id_ahead(
    matrix: &Matrix<'_>,
    x: &Rows<'_>,
    ids: &Table<'_, i32>,
    out: &RowsMut<'_>,
    workspace: &mut [u8],
    (kernels, threads): (Kernels, &dyn ParallelFor),
    ahead: &dyn Ahead,
) -> Result<()> {
    let (used, tokens) = (ids.used(), ids.tokens());
    if x.width() != matrix.k() || x.tokens() != tokens || ![1, used].contains(&x.used()) {
        return Err(Error::invalid(format!("the activations do not fit weights of {} for {used} x {tokens} ids", matrix.k())));
    }
    if (out.width(), out.used(), out.tokens()) != (matrix.rows(), used, tokens) {
        return Err(Error::invalid(format!("the output is not {} x {used} x {tokens}", matrix.rows())));
    }
    if tokens == 0 || used == 0 {
        return Ok(());
    }
    let count = threads.threads();
    let have = workspace.len();
    let needed = size(matrix, tokens, used, x.used(), count).ok_or_else(too_big)?;
    let small = || Error::invalid(format!("a workspace of {have} bytes; {tokens} tokens on {count} threads need {needed}"));
    let mut arena = Arena::new(workspace).ok_or_else(|| Error::invalid("the workspace is not aligned to 64 bytes"))?;
    let format = ActFormat::of(matrix.weights());
    let row_lines = format.row_lines(matrix.k());
    let (x_rows, blocks) = (tokens * x.used(), matrix.rows().div_ceil(OUT_ROWS));
    let starts = arena.take(matrix.experts() + 1).ok_or_else(small)?;
    let pairs = arena.take(tokens * used).ok_or_else(small)?;
    let active = arena.take(matrix.experts()).ok_or_else(small)?;
    let flags: &[AtomicU8] = arena.take_zeroed(x_rows + blocks + matrix.experts() + count).ok_or_else(small)?;
    let (x_flags, flags) = flags.split_at(x_rows);
    let (out_flags, flags) = flags.split_at(blocks);
    let (missed, scratch_flags) = flags.split_at(matrix.experts());
    let copies: &[AtomicPtr<u8>] = arena.take_zeroed(matrix.experts()).ok_or_else(small)?;
    let rows = Pieces::new(arena.take(x_rows * row_lines).ok_or_else(small)?, row_lines, x_flags);
    let scratch = Pieces::new(arena.take(count * SCRATCH_LINES).ok_or_else(small)?, SCRATCH_LINES, scratch_flags);

    let routing = route(ids, starts, pairs, active)?;
    let matrices = [*matrix];
    let way = Way::new(ahead, [&matrices, &[]], &routing, (missed, copies), threads);
    quantise_rows(kernels, threads, x, &rows, format);
    if let Some(way) = &way {
        way.wait_for_all(FIRST, threads)?;
    }
    let lines = &*rows.done();
    let dealer = Dealer::new(blocks);
    threads.run(&|thread| {
        let mut scratch = scratch.take(thread);
        let (panel, products, _) = split_scratch(&mut scratch);
        let row = |i: usize| ActRow::new(&lines[i * row_lines..][..row_lines], format);
        let mut columns = [row(0); COLUMNS];
        while let Some(i) = dealer.deal() {
            let mut block = out.block(i, OUT_ROWS, out_flags);
            for &expert in routing.active {
                let (expert_number, first) = (expert as usize, i * OUT_ROWS);
                let weights = match &way {
                    None => matrix.slice(expert_number, first, block.len()),
                    Some(way) => way.rows(FIRST, 0, expert_number, first, block.len()),
                };
                for run in runs(routing.starts[expert as usize] as usize, routing.count(expert as usize)) {
                    let pairs = &routing.pairs[run];
                    for (column, pair) in columns.iter_mut().zip(pairs) {
                        *column = row(if x.used() == 1 { *pair as usize / used } else { *pair as usize });
                    }
                    let next = std::ptr::null();
                    let columns = &columns[..pairs.len()];
                    kernels.mul(Mul { rows: weights, columns, out: products, stride: OUT_ROWS, panel, next, next_columns: &[] });
                    for (product, pair) in products.chunks_exact(OUT_ROWS).zip(pairs) {
                        let out = block.row(*pair as usize / used, *pair as usize % used);
                        out.copy_from_slice(&product[..out.len()]);
                    }
                }
            }
        }
    });
    Ok(())
}
