//! The whole operation: how its memory is laid out, and what each phase does.
//!
//! Owns: the workspace layout, the three regions (quantise the tokens; gate, up, activation and the quantisation of their result; down and
//! the weighted sum) and the tasks in them. Must not know: instruction sets, formats. Allocates nothing.
//!
//! All input is read before the first output is written, so output and input may share memory: tokens are quantised, ids and weights copied
//! in the first region. Every value is computed by one task, and sums run in the order of `Routing::active`: the number of threads changes
//! nothing. At up to [`ALONE`] tokens the caller quantises alone, and two regions are left, with one barrier between them.

use std::sync::atomic::{AtomicPtr, AtomicU8};

use super::acts::{ActFormat, ActRow, ActRowMut, Line};
use super::ahead::{Ahead, FIRST, Never, SECOND, Way};
use super::args::{Matrix, Rows, WeightRows};
use super::kernels::{Kernels, Mul, PANEL_LINES};
use super::pool::ParallelFor;
use super::route::{Routing, route};
use super::schedule::{COLUMNS, Dealer, OUT_ROWS, ROWS, TASK_WORDS, list_tasks, max_tasks, out_rows, runs, task};
use super::shared::{Arena, Pieces, lines_for};
use super::{Experts, Inputs};
use crate::error::{Error, Result};

/// Tokens that one thread quantises faster than several can be told to.
const ALONE: usize = 4;

/// Lines of one thread's scratch: panels, gate products, up products.
pub(super) const SCRATCH_LINES: usize = PANEL_LINES + 2 * COLUMNS * ROWS / 16;

/// Most matrices of an expert.
const MATRICES: usize = 3;

/// Sizes of everything in the workspace, in the order in which it is taken.
struct Sizes {
    experts: usize,
    pairs: usize,
    tasks: usize,
    x_rows: usize,
    up_lines: usize,
    /// 0 if gate and up read the same activations.
    gate_lines: usize,
    h_blocks: usize,
    h_block_lines: usize,
    out_blocks: usize,
    threads: usize,
}

impl Sizes {
    fn new(e: &Experts<'_>, tokens: usize, used: usize, x_used: usize, threads: usize) -> Option<Sizes> {
        let up = &e.up.matrix;
        let format = ActFormat::of(up.weights());
        let gate = e.gate.map(|g| ActFormat::of(g.matrix.weights())).filter(|g| *g != format);
        let pairs = tokens.checked_mul(used).filter(|n| u32::try_from(*n).is_ok())?;
        let h_format = ActFormat::of(e.down.matrix.weights());
        Some(Sizes {
            experts: up.experts(),
            pairs,
            tasks: max_tasks(up.experts(), pairs, up.rows()),
            x_rows: tokens.checked_mul(x_used)?,
            up_lines: format.row_lines(up.k()),
            gate_lines: gate.map_or(0, |g| g.row_lines(up.k())),
            h_blocks: up.rows().div_ceil(ROWS),
            h_block_lines: h_format.block_lines(),
            out_blocks: e.down.matrix.rows().div_ceil(OUT_ROWS),
            threads,
        })
    }

    /// Claims: token rows, intermediate blocks, output blocks, scratch; and what is missing of each expert.
    fn flags(&self) -> Option<usize> {
        self.pairs
            .checked_mul(self.h_blocks)?
            .checked_add(self.x_rows.checked_mul(2)?)?
            .checked_add(self.out_blocks)?
            .checked_add(self.threads)?
            .checked_add(self.experts)
    }

    fn bytes(&self) -> Option<usize> {
        let lines = |a: usize, b: usize| a.checked_mul(b).map(lines_for::<Line>);
        let parts = [
            lines_for::<u32>(self.experts.checked_add(1)?),
            lines_for::<u32>(self.pairs),
            lines_for::<u32>(self.experts),
            lines_for::<u32>(self.tasks.checked_mul(TASK_WORDS)?),
            lines_for::<f32>(self.pairs),
            lines_for::<AtomicU8>(self.flags()?),
            lines_for::<AtomicPtr<u8>>(self.experts.checked_mul(MATRICES)?),
            lines(self.x_rows, self.up_lines)?,
            lines(self.x_rows, self.gate_lines)?,
            lines(self.pairs, self.h_blocks.checked_mul(self.h_block_lines)?)?,
            lines(self.threads, SCRATCH_LINES)?,
        ];
        parts.into_iter().try_fold(0usize, |sum, part| sum.checked_add(part)).filter(|n| *n <= isize::MAX as usize)
    }
}

fn too_big() -> Error {
    Error::invalid("more tokens and experts than a workspace can be made for")
}

/// Bytes of workspace that [`forward`] needs for up to this many tokens with `used` experts each, on up to `threads` threads.
///
/// # Errors
/// [`crate::error::Status::InvalidArgument`] if the description contradicts itself, or the size does not fit.
pub fn workspace_size(experts: &Experts<'_>, tokens: usize, used: usize, threads: usize) -> Result<usize> {
    experts.check()?;
    // A row per choice is the most that the input can have.
    Sizes::new(experts, tokens, used, used.max(1), threads).and_then(|s| s.bytes()).ok_or_else(too_big)
}

/// The token rows of one phase, quantised.
#[derive(Clone, Copy)]
struct Quantised<'a> {
    lines: &'a [Line],
    row_lines: usize,
    format: ActFormat,
}

impl<'a> Quantised<'a> {
    fn row(&self, i: usize) -> ActRow<'a> {
        ActRow::new(&self.lines[i * self.row_lines..][..self.row_lines], self.format)
    }
}

/// Quantises every row of `x`, in a region of its own unless there are few.
pub(super) fn quantise_rows(kernels: Kernels, threads: &dyn ParallelFor, x: &Rows<'_>, rows: &Pieces<'_, Line>, format: ActFormat) {
    let used = x.used();
    let one = |i: usize| x.with(i / used, i % used, |row| kernels.quantise(row, ActRowMut::new(&mut rows.take(i), format)));
    let count = x.tokens() * used;
    if x.tokens() <= ALONE {
        (0..count).for_each(one);
        return;
    }
    const BATCH: usize = 8;
    let dealer = Dealer::new(count.div_ceil(BATCH));
    threads.run(&|_| {
        while let Some(batch) = dealer.deal() {
            (batch * BATCH..count.min((batch + 1) * BATCH)).for_each(one);
        }
    });
}

/// Runs the operation.
///
/// # Errors
/// [`crate::error::Status::InvalidArgument`] if the parts do not fit each other, an id is not an expert, or the workspace is too small or not
/// aligned to [`super::WORKSPACE_ALIGNMENT`]. Nothing has been written to the output then.
pub fn forward(
    experts: &Experts<'_>,
    inputs: &Inputs<'_>,
    workspace: &mut [u8],
    kernels: Kernels,
    threads: &dyn ParallelFor,
) -> Result<()> {
    forward_ahead(experts, inputs, workspace, kernels, threads, &Never)
}

/// The same, with somebody who brings weights into memory before they are read.
///
/// # Errors
/// As [`forward`], and those of [`Ahead::wait`].
pub fn forward_ahead(
    experts: &Experts<'_>,
    inputs: &Inputs<'_>,
    workspace: &mut [u8],
    kernels: Kernels,
    threads: &dyn ParallelFor,
    ahead: &dyn Ahead,
) -> Result<()> {
    experts.check()?;
    inputs.check(experts)?;
    let (used, tokens) = (inputs.ids.used(), inputs.ids.tokens());
    if tokens == 0 {
        return Ok(());
    }
    let count = threads.threads();
    let sizes = Sizes::new(experts, tokens, used, inputs.x.used(), count).ok_or_else(too_big)?;
    let needed = sizes.bytes().ok_or_else(too_big)?;
    let have = workspace.len();
    let small = || Error::invalid(format!("a workspace of {have} bytes; {tokens} tokens on {count} threads need {needed}"));
    let mut arena = Arena::new(workspace).ok_or_else(|| Error::invalid("the workspace is not aligned to 64 bytes"))?;
    if have < needed {
        return Err(small());
    }
    let starts = arena.take(sizes.experts + 1).ok_or_else(small)?;
    let pairs = arena.take(sizes.pairs).ok_or_else(small)?;
    let active = arena.take(sizes.experts).ok_or_else(small)?;
    let list = arena.take(sizes.tasks * TASK_WORDS).ok_or_else(small)?;
    let weights: &mut [f32] = arena.take(sizes.pairs).ok_or_else(small)?;
    let flags: &[AtomicU8] = arena.take_zeroed(sizes.flags().ok_or_else(too_big)?).ok_or_else(small)?;
    let (x_flags, flags) = flags.split_at(sizes.x_rows);
    let (gate_flags, flags) = flags.split_at(sizes.x_rows);
    let (h_flags, flags) = flags.split_at(sizes.pairs * sizes.h_blocks);
    let (out_flags, flags) = flags.split_at(sizes.out_blocks);
    let (missed, scratch_flags) = flags.split_at(sizes.experts);
    let copies: &[AtomicPtr<u8>] = arena.take_zeroed(MATRICES * sizes.experts).ok_or_else(small)?;
    let up_rows = Pieces::new(arena.take(sizes.x_rows * sizes.up_lines).ok_or_else(small)?, sizes.up_lines, x_flags);
    let gate_lines = arena.take(sizes.x_rows * sizes.gate_lines).ok_or_else(small)?;
    let h_lines = arena.take(sizes.pairs * sizes.h_blocks * sizes.h_block_lines).ok_or_else(small)?;
    let scratch = Pieces::new(arena.take(count * SCRATCH_LINES).ok_or_else(small)?, SCRATCH_LINES, scratch_flags);

    let routing = route(&inputs.ids, starts, pairs, active)?;
    let first = [experts.gate.unwrap_or(experts.up).matrix, experts.up.matrix];
    let first = if experts.gate.is_some() { &first[..] } else { &first[1..] };
    let second = [experts.down.matrix];
    let way = Way::new(ahead, [first, &second], &routing, (missed, copies), threads);
    for (i, weight) in weights.iter_mut().enumerate() {
        *weight = inputs.weights.map_or(1.0, |w| w.get(i / used, i % used));
    }
    let up_format = ActFormat::of(experts.up.matrix.weights());
    quantise_rows(kernels, threads, &inputs.x, &up_rows, up_format);
    let up = Quantised { lines: up_rows.done(), row_lines: sizes.up_lines, format: up_format };
    let gate = match experts.gate {
        Some(gate) if sizes.gate_lines > 0 => {
            let format = ActFormat::of(gate.matrix.weights());
            let rows = Pieces::new(gate_lines, sizes.gate_lines, gate_flags);
            quantise_rows(kernels, threads, &inputs.x, &rows, format);
            Quantised { lines: rows.done(), row_lines: sizes.gate_lines, format }
        }
        _ => up,
    };

    let weights = &*weights;
    let step = Step { experts, kernels, routing: &routing, weights, scratch: &scratch, way: way.as_ref() };
    let late = |expert| way.as_ref().is_some_and(|w| w.is_late(expert, FIRST));
    let tasks = list_tasks(&routing, experts.up.matrix.rows(), late, list);
    let h = Pieces::new(h_lines, sizes.h_block_lines, h_flags);
    let dealer = Dealer::new(tasks);
    let x_per_token = inputs.x.used() == 1;
    threads.run(&|thread| step.gate_up(thread, &dealer, list, [gate, up], x_per_token, &h));

    if let Some(way) = &way {
        way.wait_for_all(SECOND, threads)?;
    }

    let row_lines = sizes.h_blocks * sizes.h_block_lines;
    let h = Quantised { lines: h.done(), row_lines, format: ActFormat::of(experts.down.matrix.weights()) };
    let out_rows = out_rows(experts.down.matrix.rows(), count);
    let dealer = Dealer::new(experts.down.matrix.rows().div_ceil(out_rows));
    threads.run(&|thread| step.down(thread, &dealer, h, inputs, out_rows, out_flags));
    Ok(())
}

/// A phase, and which of its matrices.
type Place = (usize, usize);

const GATE: Place = (FIRST, 0);
const DOWN: Place = (SECOND, 0);

/// What both phases read.
struct Step<'a> {
    experts: &'a Experts<'a>,
    kernels: Kernels,
    routing: &'a Routing<'a>,
    /// By pair.
    weights: &'a [f32],
    scratch: &'a Pieces<'a, Line>,
    /// If weights may be missing.
    way: Option<&'a Way<'a>>,
}

/// The scratch of a thread as two areas of products and the panels.
pub(super) fn split_scratch(lines: &mut [Line]) -> (&mut [Line], &mut [f32], &mut [f32]) {
    let (panel, products) = lines.split_at_mut(PANEL_LINES);
    let (a, b) = products.split_at_mut(COLUMNS * ROWS / 16);
    (panel, super::acts::floats(a), super::acts::floats(b))
}

impl Step<'_> {
    /// Where the up matrix stands among those of the first phase.
    fn up(&self) -> Place {
        (FIRST, usize::from(self.experts.gate.is_some()))
    }

    /// A matrix, for who knows that weights are in their place.
    fn matrix(&self, place: Place) -> &Matrix<'_> {
        let e = self.experts;
        match place {
            DOWN => &e.down.matrix,
            GATE => e.gate.as_ref().map_or(&e.up.matrix, |gate| &gate.matrix),
            _ => &e.up.matrix,
        }
    }

    /// Some rows of an expert in a matrix, wherever they are.
    fn rows(&self, place: Place, expert: usize, first: usize, rows: usize) -> WeightRows<'_> {
        match self.way {
            None => self.matrix(place).slice(expert, first, rows),
            Some(way) => way.rows(place.0, place.1, expert, first, rows),
        }
    }

    /// Where a row begins, to be prefetched.
    fn first_byte(&self, place: Place, expert: usize, first: usize) -> *const u8 {
        match self.way {
            None => self.matrix(place).slice(expert, first, 1).start(),
            Some(way) => way.first_byte(place.0, place.1, expert, first),
        }
    }

    /// Gate, up and activation of blocks of intermediate rows, quantised for the down product.
    fn gate_up<'q>(
        &self,
        thread: usize,
        dealer: &Dealer,
        list: &[u32],
        [gate_x, up_x]: [Quantised<'q>; 2],
        x_per_token: bool,
        h: &Pieces<'_, Line>,
    ) {
        let e = self.experts;
        let mut scratch = self.scratch.take(thread);
        let (panel, gate_out, up_out) = split_scratch(&mut scratch);
        let h_format = ActFormat::of(e.down.matrix.weights());
        let h_blocks = e.up.matrix.rows().div_ceil(ROWS);
        let first_x = if e.gate.is_some() { gate_x } else { up_x };
        let (mut columns, mut next_columns) = ([up_x.row(0); COLUMNS], [up_x.row(0); COLUMNS]);
        // The task after the current one is dealt early, so that its first weights can be prefetched.
        let mut current = dealer.deal();
        while let Some(i) = current {
            let t = task(list, i);
            current = dealer.deal();
            let first = t.block * ROWS;
            let rows = ROWS.min(e.up.matrix.rows() - first);
            if let Some(way) = self.way {
                // What did not fit into the first window follows at the pace of the products.
                if t.block == 0 {
                    way.ask_more();
                }
                if !way.wait(FIRST, t.expert, first, rows) {
                    continue;
                }
            }
            let next = current.map(|i| task(list, i)).map_or(std::ptr::null(), |n| self.first_byte(GATE, n.expert, n.block * ROWS));
            let pairs = &self.routing.pairs[t.first..][..t.columns];
            let source = |pair: u32| if x_per_token { pair as usize / self.routing.used } else { pair as usize };
            let gather = |x: Quantised<'q>, pairs: &[u32], columns: &mut [ActRow<'q>; COLUMNS]| {
                for (column, pair) in columns.iter_mut().zip(pairs) {
                    *column = x.row(source(*pair));
                }
            };
            // Blocks of one expert follow each other, with the same activations; others come while the last product is made.
            let coming = current.map(|i| task(list, i)).filter(|n| n.first != t.first).map_or(0..0, |n| n.first..n.first + n.columns);
            let coming = &self.routing.pairs[coming];
            gather(first_x, coming, &mut next_columns);
            let mut multiply = |place: Place, x: Quantised<'q>, out: &mut [f32], next: *const u8, coming: usize| {
                gather(x, pairs, &mut columns);
                let rows = self.rows(place, t.expert, first, rows);
                let (columns, next_columns) = (&columns[..t.columns], &next_columns[..coming]);
                self.kernels.mul(Mul { rows, columns, out, stride: ROWS, panel, next, next_columns });
            };
            if e.gate.is_some() {
                multiply(GATE, gate_x, gate_out, self.first_byte(self.up(), t.expert, first), 0);
            }
            multiply(self.up(), up_x, up_out, next, coming.len());
            for (c, pair) in pairs.iter().enumerate() {
                let before = if e.weight_first { self.weights[*pair as usize] } else { 1.0 };
                let up = &mut up_out[c * ROWS..][..rows];
                e.up.finish(t.expert, first, before, up);
                let result = if let Some(gate_projection) = &e.gate {
                    let gate = &mut gate_out[c * ROWS..][..rows];
                    gate_projection.finish(t.expert, first, before, gate);
                    self.kernels.activate(e.activation, gate, up);
                    gate
                } else {
                    self.kernels.activate(e.activation, up, &[]);
                    up
                };
                let mut block = h.take((t.first + c) * h_blocks + t.block);
                self.kernels.quantise(result, ActRowMut::new(&mut block, h_format));
            }
        }
    }

    /// Down products of blocks of output rows, summed over the experts.
    fn down(&self, thread: usize, dealer: &Dealer, h: Quantised<'_>, inputs: &Inputs<'_>, out_rows: usize, out_flags: &[AtomicU8]) {
        let down = &self.experts.down;
        let mut scratch = self.scratch.take(thread);
        let (panel, out, _) = split_scratch(&mut scratch);
        let (mut columns, mut next_columns) = ([h.row(0); COLUMNS], [h.row(0); COLUMNS]);
        let active = self.routing.active;
        let mut current = dealer.deal();
        while let Some(i) = current {
            current = dealer.deal();
            let first = i * out_rows;
            let mut y = inputs.y.block(i, out_rows, out_flags);
            let rows = y.len();
            for token in 0..inputs.y.tokens() {
                y.row(token, 0).fill(0.0);
            }
            for (place, &expert) in active.iter().enumerate() {
                let expert = expert as usize;
                let next = match (active.get(place + 1), current) {
                    (Some(next), _) => self.first_byte(DOWN, *next as usize, first),
                    (None, Some(next)) => self.first_byte(DOWN, active[0] as usize, next * out_rows),
                    (None, None) => std::ptr::null(),
                };
                let weights = self.rows(DOWN, expert, first, rows);
                let runs_of = |expert: usize| runs(self.routing.starts[expert] as usize, self.routing.count(expert));
                let mut runs = runs_of(expert).peekable();
                while let Some(run) = runs.next() {
                    // What comes next: more of this expert, or the first of the next one.
                    let coming = runs.peek().cloned().or_else(|| runs_of(*active.get(place + 1)? as usize).next());
                    let coming = coming.unwrap_or(0..0);
                    let (count, start) = (run.len(), run.start);
                    for (column, i) in columns.iter_mut().zip(run) {
                        *column = h.row(i);
                    }
                    for (column, i) in next_columns.iter_mut().zip(coming.clone()) {
                        *column = h.row(i);
                    }
                    let (columns, next_columns) = (&columns[..count], &next_columns[..coming.len()]);
                    self.kernels.mul(Mul { rows: weights, columns, out, stride: out_rows, panel, next, next_columns });
                    for (product, pair) in out.chunks_exact_mut(out_rows).zip(&self.routing.pairs[start..start + count]) {
                        let product = &mut product[..rows];
                        down.finish(expert, first, 1.0, product);
                        let weight = if self.experts.weight_first { 1.0 } else { self.weights[*pair as usize] };
                        self.kernels.accumulate(y.row(*pair as usize / self.routing.used, 0), weight, product);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moe::{Activation, Projection, WeightType};

    /// The formula of docs/moe.md.
    fn documented([d, f, d_out]: [usize; 3], experts: usize, a: [usize; 3], tokens: usize, used: usize, threads: usize) -> usize {
        let choices = tokens * used;
        let tasks = (experts.min(choices) + choices / 80) * f.div_ceil(256);
        let parts = [
            4 * (experts + 1),
            4 * choices,
            4 * experts,
            16 * tasks,
            4 * choices,
            choices * f.div_ceil(256) + 2 * choices + d_out.div_ceil(64) + threads + experts,
            24 * experts,
            choices * d.div_ceil(256) * a[0],
            choices * d.div_ceil(256) * if a[1] == a[0] { 0 } else { a[1] },
            choices * f.div_ceil(256) * a[2],
            threads * 188_672,
        ];
        parts.into_iter().map(|bytes| bytes.next_multiple_of(64)).sum()
    }

    #[test]
    fn a_workspace_has_the_size_that_the_documentation_says() {
        use WeightType::*;
        let size_of_acts = |ty| if matches!(ty, F32 | F16 | BF16) { 1024 } else { 384 };
        let kinds = [[Q4_K, Q4_K, Q6_K], [Q8_0, Q4_0, MXFP4], [F16, F16, Q8_0], [Q8_0, BF16, F32]];
        for (dims, experts) in [([512, 256, 512], 4), ([256, 768, 300], 9), ([2560, 512, 65], 3)] {
            for [up, gate, down] in kinds {
                let [d, f, d_out] = dims;
                let zeros = |ty: WeightType, k, rows| vec![0u8; ty.row_bytes(k).unwrap() * rows * experts];
                let bytes = [zeros(up, d, f), zeros(gate, d, f), zeros(down, f, d_out)];
                let projection = |bytes, ty, k, rows| Projection::new(Matrix::packed(bytes, ty, [k, rows, experts]).unwrap());
                let block = Experts {
                    gate: Some(projection(&bytes[1], gate, d, f)),
                    up: projection(&bytes[0], up, d, f),
                    down: projection(&bytes[2], down, f, d_out),
                    activation: Activation::SwiGlu,
                    weight_first: false,
                };
                for (tokens, used, threads) in [(1, 1, 1), (1, 3, 2), (79, 1, 1), (80, 1, 3), (500, 3, 2), (2048, 2, 16)] {
                    let want = documented(dims, experts, [up, gate, down].map(size_of_acts), tokens, used, threads);
                    let got = workspace_size(&block, tokens, used, threads).unwrap();
                    // A kind of activation is a kind of rounding: those of 32 and of 256 differ, too.
                    let twice = ActFormat::of(gate) != ActFormat::of(up) && size_of_acts(gate) == size_of_acts(up);
                    let more = if twice { tokens * used * d.div_ceil(256) * size_of_acts(gate) } else { 0 };
                    assert_eq!(got, want + more, "{dims:?} {up:?} {gate:?} {down:?} {tokens} {used} {threads}");
                }
            }
        }
        assert_eq!(SCRATCH_LINES * 64, 188_672);
        let docs = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/moe.md")).unwrap();
        for part in [
            "n 188672 ",
            "24 E ",
            "floor(T k / 80)) ceil(f / 256)",
            "T k ceil(d / 256) a ",
            "T k ceil(f / 256) + 2 T k + ceil(d_out / 64) + n + E",
        ] {
            assert!(docs.contains(part), "docs/moe.md does not say {part}");
        }
    }
}
