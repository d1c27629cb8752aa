//! The arguments of the operation, checked once.
//!
//! Owns: views of memory that belongs to the caller: weights ([`Matrix`], [`WeightRows`]), per-expert vectors ([`PerExpert`]), strided
//! activations, ids and outputs ([`Rows`], [`Table`], [`RowsMut`]). A view that exists has been checked: sizes, strides, alignment and
//! overflow. Here, in `acts.rs`, `shared.rs`, `pool.rs` and the kernels is all the unsafe code of `moe`. Must not know: what is computed.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use super::blocks::{Block, WeightType};
use super::span::{Span, overflow, span, step};
use crate::error::{Error, Result, Status};

/// The weights of one projection: `experts` matrices of `rows` rows of `k` weights, in ggml's layout.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    bytes: &'a [u8],
    weights: WeightType,
    k: usize,
    rows: usize,
    experts: usize,
    row_stride: usize,
    expert_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Strides are in bytes: from one row to the next, from one expert to the next.
    ///
    /// # Errors
    /// [`Status::InvalidArgument`] if a size is 0, `k` is not a whole number of blocks, rows or experts overlap, or `bytes` is too short.
    pub fn new(
        bytes: &'a [u8],
        weights: WeightType,
        [k, rows, experts]: [usize; 3],
        [row_stride, expert_stride]: [usize; 2],
    ) -> Result<Matrix<'a>> {
        let name = weights.name();
        if k == 0 || rows == 0 || experts == 0 {
            return Err(Error::invalid(format!("{name} weights of {k} x {rows} x {experts}: a size is 0")));
        }
        let Some(row_bytes) = weights.row_bytes(k) else {
            return Err(Error::invalid(format!("{name} rows of {k} weights are not whole blocks of {}", weights.block_weights())));
        };
        let expert_bytes = (rows - 1).checked_mul(row_stride).and_then(|n| n.checked_add(row_bytes)).ok_or_else(|| overflow(name))?;
        let needed = (experts - 1).checked_mul(expert_stride).and_then(|n| n.checked_add(expert_bytes)).ok_or_else(|| overflow(name))?;
        if (rows > 1 && row_stride < row_bytes) || (experts > 1 && expert_stride < expert_bytes) {
            return Err(Error::invalid(format!(
                "{name} strides {row_stride}, {expert_stride} are shorter than a row of {row_bytes} or an expert of {expert_bytes} bytes"
            )));
        }
        if bytes.len() < needed {
            return Err(Error::invalid(format!(
                "{name} weights of {k} x {rows} x {experts} need {needed} bytes, there are {}",
                bytes.len()
            )));
        }
        // With only one there is no step, whatever the caller says of it.
        let row_stride = if rows == 1 { row_bytes } else { row_stride };
        let expert_stride = if experts == 1 { expert_bytes } else { expert_stride };
        Ok(Matrix { bytes, weights, k, rows, experts, row_stride, expert_stride })
    }

    /// Rows and experts one after the other, as in a GGUF file.
    ///
    /// # Errors
    /// As [`Matrix::new`].
    pub fn packed(bytes: &'a [u8], weights: WeightType, [k, rows, experts]: [usize; 3]) -> Result<Matrix<'a>> {
        let row = weights.row_bytes(k).unwrap_or(0);
        let expert = row.checked_mul(rows).ok_or_else(|| overflow(weights.name()))?;
        Self::new(bytes, weights, [k, rows, experts], [row, expert])
    }

    /// Some of the rows of every expert: a merged gate and up matrix is two of these.
    ///
    /// # Errors
    /// [`Status::InvalidArgument`] if they are not all there.
    pub fn part(self, first: usize, rows: usize) -> Result<Matrix<'a>> {
        if rows == 0 || first.checked_add(rows).is_none_or(|end| end > self.rows) {
            return Err(Error::invalid(format!("rows {first}.. and {rows} more of {}", self.rows)));
        }
        Ok(Matrix { bytes: &self.bytes[first * self.row_stride..], rows, ..self })
    }

    /// The block format.
    pub fn weights(&self) -> WeightType {
        self.weights
    }

    /// Weights in a row: the length of the vectors that it is multiplied with.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Rows of one expert: the length of the products.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// How many experts there are.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Where the bytes lie.
    pub fn span(&self) -> Span {
        Span::of_slice(self.bytes)
    }

    /// Where some rows of one expert lie.
    ///
    /// # Panics
    /// If they are not all there.
    pub fn span_of(&self, expert: usize, first: usize, rows: usize) -> Span {
        let slice = self.slice(expert, first, rows);
        let len = (rows - 1) * self.row_stride + self.weights.row_bytes(self.k).unwrap_or(0);
        Span::of_slice(&slice.bytes[..len])
    }

    /// Some rows of one expert.
    ///
    /// # Panics
    /// If they are not all there.
    #[inline]
    pub fn slice(&self, expert: usize, first: usize, rows: usize) -> WeightRows<'a> {
        assert!(expert < self.experts && first < self.rows && rows >= 1 && rows <= self.rows - first);
        let start = expert * self.expert_stride + first * self.row_stride;
        WeightRows { bytes: &self.bytes[start..], weights: self.weights, k: self.k, rows, stride: self.row_stride }
    }

    /// Some rows of one expert that is somewhere else.
    ///
    /// # Panics
    /// If they are not all there.
    ///
    /// # Safety
    /// At `copy` must be the bytes of the expert as [`Matrix::span_of`] has them. As long as the result is used, those of these rows must be
    /// initialised, and nobody may write to them.
    #[inline]
    pub(super) unsafe fn slice_of_copy<'c>(&self, copy: NonNull<u8>, first: usize, rows: usize) -> WeightRows<'c> {
        assert!(first < self.rows && rows >= 1 && rows <= self.rows - first);
        let len = (rows - 1) * self.row_stride + self.weights.row_bytes(self.k).unwrap_or(0);
        // SAFETY: by the caller's promise; the rows are among the expert's.
        let bytes = unsafe { std::slice::from_raw_parts(copy.as_ptr().add(first * self.row_stride), len) };
        WeightRows { bytes, weights: self.weights, k: self.k, rows, stride: self.row_stride }
    }
}

/// Consecutive rows of one expert.
#[derive(Clone, Copy, Debug)]
pub struct WeightRows<'a> {
    bytes: &'a [u8],
    weights: WeightType,
    k: usize,
    rows: usize,
    stride: usize,
}

impl<'a> WeightRows<'a> {
    /// The block format.
    #[inline]
    pub fn weights(&self) -> WeightType {
        self.weights
    }

    /// Weights in a row.
    #[inline]
    pub fn k(&self) -> usize {
        self.k
    }

    /// How many rows.
    #[inline]
    pub fn len(&self) -> usize {
        self.rows
    }

    /// Whether there is none; there always is one.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.rows == 0
    }

    /// Bytes from one row to the next.
    #[inline]
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// The first byte, for prefetching.
    #[inline]
    pub fn start(&self) -> *const u8 {
        self.bytes.as_ptr()
    }

    /// The bytes of row `r`.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn bytes(&self, r: usize) -> &'a [u8] {
        assert!(r < self.rows);
        &self.bytes[r * self.stride..][..self.weights.row_bytes(self.k).unwrap_or(0)]
    }

    /// The blocks of row `r`.
    ///
    /// # Panics
    /// If there is no such row, or the rows have another format.
    #[inline]
    pub fn row<B: Block>(&self, r: usize) -> &'a [B] {
        assert!(B::TYPE as u32 == self.weights as u32 && r < self.rows);
        let blocks = self.k / B::TYPE.block_weights();
        let bytes = &self.bytes[r * self.stride..][..blocks * size_of::<B>()];
        // SAFETY: `B` has alignment 1 and takes any bits (the contract of `Block`), and this is exactly `blocks` of them.
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), blocks) }
    }
}

/// A vector of f32 for every expert: a bias (`width` values) or a scale (one).
#[derive(Clone, Copy, Debug)]
pub struct PerExpert<'a> {
    values: &'a [f32],
    width: usize,
    experts: usize,
    stride: usize,
}

impl<'a> PerExpert<'a> {
    /// `stride`: values from one expert to the next.
    ///
    /// # Errors
    /// [`Status::InvalidArgument`] if there are too few values or experts overlap.
    pub fn new(values: &'a [f32], width: usize, experts: usize, stride: usize) -> Result<Self> {
        let needed = experts.saturating_sub(1).checked_mul(stride).and_then(|n| n.checked_add(width)).ok_or_else(|| overflow("bias"))?;
        if width == 0 || experts == 0 || values.len() < needed || (experts > 1 && stride < width) {
            return Err(Error::invalid(format!(
                "{width} values for each of {experts} experts at stride {stride}, of {} in all",
                values.len()
            )));
        }
        Ok(PerExpert { values, width, experts, stride })
    }

    /// Where the values lie.
    pub fn span(&self) -> Span {
        Span::of_slice(self.values)
    }

    /// Values of one expert.
    pub fn width(&self) -> usize {
        self.width
    }

    /// How many experts.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// The values of one expert.
    #[inline]
    pub fn of(&self, expert: usize) -> &'a [f32] {
        &self.values[expert * self.stride..][..self.width]
    }
}

fn check_pointer(what: &str, base: *const u8, needed: bool) -> Result<()> {
    if needed && base.is_null() {
        return Err(Error::invalid(format!("{what}: NULL")));
    }
    if !base.addr().is_multiple_of(4) {
        return Err(Error::invalid(format!("{what}: not aligned to 4 bytes")));
    }
    Ok(())
}

/// A grid of 4-byte values that is read element by element: ids or routing weights, `[used, tokens]`, any strides.
#[derive(Clone, Copy, Debug)]
pub struct Table<'a, T> {
    base: *const T,
    used: usize,
    tokens: usize,
    strides: [usize; 2],
    span: Span,
    life: PhantomData<&'a [T]>,
}

// SAFETY: a view of memory that is only read, of plain numbers (i32 or f32); whoever made it promised that nobody writes to it meanwhile.
unsafe impl<T: Send> Send for Table<'_, T> {}
// SAFETY: likewise.
unsafe impl<T: Sync> Sync for Table<'_, T> {}

impl<'a, T: Copy> Table<'a, T> {
    /// Strides are in bytes: between the values of a token, between tokens.
    ///
    /// # Errors
    /// [`Status::InvalidArgument`] if `base` is NULL or misaligned, or a stride is not a multiple of 4.
    ///
    /// # Safety
    /// Every element is readable for `'a`. The output of the operation may lie in the same memory: elements are copied before it is written.
    pub unsafe fn new(base: *const T, [used, tokens]: [usize; 2], strides: [usize; 2]) -> Result<Self> {
        const { assert!(size_of::<T>() == 4) };
        check_pointer("ids or weights", base.cast(), used > 0 && tokens > 0)?;
        if strides.iter().any(|s| !s.is_multiple_of(4)) {
            return Err(Error::invalid(format!("ids or weights: strides {strides:?} are not multiples of 4 bytes")));
        }
        let span = span("ids or weights", base.cast(), 4, [used, tokens], strides)?;
        Ok(Table { base, used, tokens, strides, span, life: PhantomData })
    }

    /// `values[token * stride + j]`: rows of a longer table.
    ///
    /// # Errors
    /// [`Status::InvalidArgument`] if there are too few values.
    pub fn strided(values: &'a [T], used: usize, tokens: usize, stride: usize) -> Result<Self> {
        let needed = tokens.saturating_sub(1).checked_mul(stride).and_then(|n| n.checked_add(used)).ok_or_else(|| overflow("ids"))?;
        if values.len() < needed {
            return Err(Error::invalid(format!("{} ids or weights, {needed} are needed", values.len())));
        }
        // SAFETY: the last element is inside the slice, checked above.
        unsafe { Self::new(values.as_ptr(), [used, tokens], [4, 4 * stride]) }
    }

    /// `values[token * used + j]`.
    ///
    /// # Errors
    /// [`Status::InvalidArgument`] if the number of values is not `used * tokens`.
    pub fn packed(values: &'a [T], used: usize, tokens: usize) -> Result<Self> {
        if used.checked_mul(tokens) != Some(values.len()) {
            return Err(Error::invalid(format!("{} ids or weights for {tokens} tokens of {used}", values.len())));
        }
        // SAFETY: the slice has all elements, checked above.
        unsafe { Self::new(values.as_ptr(), [used, tokens], [4, 4 * used]) }
    }

    /// Values per token.
    pub fn used(&self) -> usize {
        self.used
    }

    /// Tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Where the first and the last value lie.
    pub fn span(&self) -> Span {
        self.span
    }

    /// One value.
    ///
    /// # Panics
    /// If it is outside.
    #[inline]
    pub(super) fn get(&self, token: usize, j: usize) -> T {
        assert!(token < self.tokens && j < self.used);
        // SAFETY: inside the grid, which is readable and aligned (`new`).
        unsafe { self.base.byte_add(j * self.strides[0] + token * self.strides[1]).read() }
    }
}

/// Rows of f32 that are read: `[width, used, tokens]`, `used` being 1 where all experts of a token read the same row.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    base: *const f32,
    width: usize,
    used: usize,
    tokens: usize,
    strides: [usize; 2],
    span: Span,
    life: PhantomData<&'a [f32]>,
}

// SAFETY: a view of memory that is only read; whoever made it promised that nobody else writes to it meanwhile.
unsafe impl Send for Rows<'_> {}
// SAFETY: likewise.
unsafe impl Sync for Rows<'_> {}

impl<'a> Rows<'a> {
    /// Strides are in bytes: between the rows of a token, between tokens. The values of a row follow each other.
    ///
    /// # Errors
    /// [`Status::InvalidArgument`] if `base` is NULL or misaligned, or a stride is not a multiple of 4.
    ///
    /// # Safety
    /// Every element is readable for `'a`. The output of the operation may lie in the same memory: rows are quantised before it is written.
    pub unsafe fn new(base: *const f32, [width, used, tokens]: [usize; 3], strides: [usize; 2]) -> Result<Self> {
        check_pointer("activations", base.cast(), width > 0 && used > 0 && tokens > 0)?;
        if strides.iter().any(|s| !s.is_multiple_of(4)) {
            return Err(Error::invalid(format!("activations: strides {strides:?} are not multiples of 4 bytes")));
        }
        let row = width.checked_mul(4).ok_or_else(|| overflow("activations"))?;
        let span = span("activations", base.cast(), row, [used, tokens], strides)?;
        Ok(Rows { base, width, used, tokens, strides, span, life: PhantomData })
    }

    /// `values[token * width + i]`.
    ///
    /// # Errors
    /// [`Status::InvalidArgument`] if the number of values is not `width * tokens`.
    pub fn packed(values: &'a [f32], width: usize, tokens: usize) -> Result<Self> {
        if width.checked_mul(tokens) != Some(values.len()) {
            return Err(Error::invalid(format!("{} activations for {tokens} tokens of {width}", values.len())));
        }
        // SAFETY: the slice has all elements, checked above.
        unsafe { Self::new(values.as_ptr(), [width, 1, tokens], [4 * width, 4 * width]) }
    }

    /// Values in a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Rows per token.
    pub fn used(&self) -> usize {
        self.used
    }

    /// Tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Where the first and the last value lie.
    pub fn span(&self) -> Span {
        self.span
    }

    /// Runs `f` on row `j` of a token. Only before the output is first written, or where no other writer's rows lie ([`Rows::may_become`]).
    ///
    /// # Panics
    /// If there is no such row.
    #[inline]
    pub(super) fn with<R>(&self, token: usize, j: usize, f: impl FnOnce(&[f32]) -> R) -> R {
        assert!(token < self.tokens && j < self.used);
        // SAFETY: inside the view, readable and aligned (`new`). The slice lives only for `f`, during which nobody writes to this row.
        f(unsafe { std::slice::from_raw_parts(self.base.byte_add(j * self.strides[0] + token * self.strides[1]), self.width) })
    }
}

/// Rows of f32 that are written: `[width, used, tokens]`; `used` is 1 for the sum over experts. Blocks of columns are claimed, so that no two
/// threads ever write the same values.
#[derive(Debug)]
pub struct RowsMut<'a> {
    base: *mut f32,
    width: usize,
    used: usize,
    tokens: usize,
    strides: [usize; 2],
    span: Span,
    life: PhantomData<&'a mut [f32]>,
}

// SAFETY: the memory is the caller's for the time of the operation; values are reached through claimed blocks only.
unsafe impl Send for RowsMut<'_> {}
// SAFETY: likewise.
unsafe impl Sync for RowsMut<'_> {}

impl<'a> RowsMut<'a> {
    /// As [`Rows::new`]; rows must not overlap.
    ///
    /// # Errors
    /// [`Status::InvalidArgument`] as there, and if the strides make rows overlap.
    ///
    /// # Safety
    /// Every element is writable for `'a`, and nobody else uses it, but that inputs of the same operation may lie there.
    pub unsafe fn new(base: *mut f32, [width, used, tokens]: [usize; 3], strides: [usize; 2]) -> Result<Self> {
        check_pointer("output", base.cast(), width > 0 && used > 0 && tokens > 0)?;
        if strides.iter().any(|s| !s.is_multiple_of(4)) {
            return Err(Error::invalid(format!("output: strides {strides:?} are not multiples of 4 bytes")));
        }
        let row = width.checked_mul(4).ok_or_else(|| overflow("output"))?;
        let token = used.saturating_sub(1).checked_mul(strides[0]).and_then(|n| n.checked_add(row)).ok_or_else(|| overflow("output"))?;
        if (used > 1 && strides[0] < row) || (tokens > 1 && strides[1] < token) {
            return Err(Error::invalid(format!("output: strides {strides:?} are shorter than its rows")));
        }
        let span = span("output", base.cast(), row, [used, tokens], strides)?;
        Ok(RowsMut { base, width, used, tokens, strides, span, life: PhantomData })
    }

    /// `values[token * width + i]`.
    ///
    /// # Errors
    /// [`Status::InvalidArgument`] if the number of values is not `width * tokens`.
    pub fn packed(values: &'a mut [f32], width: usize, tokens: usize) -> Result<Self> {
        if width.checked_mul(tokens) != Some(values.len()) {
            return Err(Error::invalid(format!("{} outputs for {tokens} tokens of {width}", values.len())));
        }
        // SAFETY: the slice has all elements, checked above, and is borrowed exclusively.
        unsafe { Self::new(values.as_mut_ptr(), [width, 1, tokens], [4 * width, 4 * width]) }
    }

    /// Values in a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Rows per token.
    pub fn used(&self) -> usize {
        self.used
    }

    /// Tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Where the first and the last value lie.
    pub fn span(&self) -> Span {
        self.span
    }

    /// Columns `block * size ..` of every row, for one writer. `claimed[block]` remembers it.
    ///
    /// # Panics
    /// If the block was claimed before, or is outside.
    pub(super) fn block<'b>(&'b self, block: usize, size: usize, claimed: &[AtomicU8]) -> ColumnBlock<'b> {
        assert!(claimed[block].swap(1, Ordering::Relaxed) == 0, "an output block is written once");
        let first = block * size;
        assert!(first < self.width);
        ColumnBlock { rows: self, first, len: size.min(self.width - first) }
    }
}

impl Rows<'_> {
    /// Whether writing row i of `out` changes no row of this view but row i, and that one only where the same element is written.
    pub(super) fn may_become(&self, out: &RowsMut<'_>) -> bool {
        if !self.span.meets(out.span) {
            return true;
        }
        let dims = [self.used, self.tokens];
        if dims != [out.used, out.tokens] || self.width != out.width {
            return false;
        }
        let same_rows = match (step(dims, self.strides), step(dims, out.strides)) {
            (Some(a), Some(b)) => a == b,
            _ => self.strides == out.strides,
        };
        if same_rows && self.span.start() == out.span.start() {
            return true;
        }
        // Gate and up in one matrix: the rows of one lie between those of the other.
        let (distance, row) = (self.span.start().abs_diff(out.span.start()), 4 * self.width);
        step(dims, self.strides).is_some_and(|s| same_rows && s > 0 && distance % s >= row && s - distance % s >= row)
    }
}

impl<'a> RowsMut<'a> {
    /// Deals the rows out.
    pub(super) fn deal(self) -> DealtRows<'a> {
        DealtRows { rows: self, next: AtomicUsize::new(0) }
    }
}

/// Output rows, each dealt to one writer.
pub(super) struct DealtRows<'a> {
    rows: RowsMut<'a>,
    next: AtomicUsize,
}

impl DealtRows<'_> {
    /// Runs `f` on some rows that nobody else gets, in the order of memory. `false` when there are none left.
    pub(super) fn deal(&self, count: usize, mut f: impl FnMut(usize, usize, RowWriter<'_>)) -> bool {
        let RowsMut { base, width, used, tokens, strides, .. } = self.rows;
        let (first, all) = (self.next.fetch_add(count, Ordering::Relaxed), used * tokens);
        for (token, j) in (first..all.min(first.saturating_add(count))).map(|i| (i / used, i % used)) {
            // SAFETY: inside the view (`RowsMut::new`).
            let start = unsafe { base.byte_add(j * strides[0] + token * strides[1]) };
            f(token, j, RowWriter { start, width, life: PhantomData });
        }
        first.saturating_add(count) < all
    }
}

/// One output row, for one writer.
pub(super) struct RowWriter<'r> {
    start: *mut f32,
    width: usize,
    life: PhantomData<&'r mut [f32]>,
}

impl RowWriter<'_> {
    /// Writes some values, from `first` on. Inputs may lie there: no reference to the row is made.
    ///
    /// # Panics
    /// If they do not fit.
    pub(super) fn write(&mut self, first: usize, values: &[f32]) {
        assert!(first <= self.width && values.len() <= self.width - first);
        // SAFETY: inside a writable row that was dealt to this writer alone; `values` is a reference, so it does not lie in an output.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), self.start.add(first), values.len()) };
    }
}

/// Some columns of all output rows, for one writer.
#[derive(Debug)]
pub(super) struct ColumnBlock<'b> {
    rows: &'b RowsMut<'b>,
    first: usize,
    len: usize,
}

impl ColumnBlock<'_> {
    /// Columns in the block.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The block's part of row `j` of a token.
    ///
    /// # Panics
    /// If there is no such row.
    #[inline]
    pub(super) fn row(&mut self, token: usize, j: usize) -> &mut [f32] {
        assert!(token < self.rows.tokens && j < self.rows.used);
        let offset = j * self.rows.strides[0] + token * self.rows.strides[1];
        // SAFETY: inside the view and writable (`RowsMut::new`); rows do not overlap, the columns are claimed by this block alone, and
        // `self` is borrowed exclusively for the result.
        unsafe { std::slice::from_raw_parts_mut(self.rows.base.byte_add(offset).add(self.first), self.len) }
    }
}

/// The error of something that has no kernels.
pub fn unsupported(what: impl Into<String>) -> Error {
    Error::new(Status::Unsupported, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_that_do_not_fit_their_bytes_are_refused() {
        let bytes = vec![0u8; 144 * 6];
        let ok = |dims, strides| Matrix::new(&bytes, WeightType::Q4_K, dims, strides).is_ok();
        assert!(ok([256, 3, 2], [144, 432]));
        assert!(!ok([256, 3, 3], [144, 432]), "too short");
        assert!(!ok([255, 3, 2], [144, 432]), "half a block");
        assert!(!ok([256, 3, 2], [143, 432]), "rows overlap");
        assert!(!ok([256, 3, 2], [144, 431]), "experts overlap");
        assert!(!ok([256, 0, 2], [144, 432]));
        assert!(!ok([usize::MAX - 255, 3, 2], [144, 432]));
        assert!(!ok([256, usize::MAX, usize::MAX], [144, 432]));
        assert!(!ok([256, 3, 2], [usize::MAX, usize::MAX]));
        let matrix = Matrix::packed(&bytes, WeightType::Q4_K, [256, 3, 2]).unwrap();
        assert!(matrix.part(1, 2).is_ok() && matrix.part(1, 3).is_err() && matrix.part(usize::MAX, 2).is_err());
        assert_eq!(matrix.part(1, 2).unwrap().slice(1, 1, 1).start().addr() - bytes.as_ptr().addr(), 5 * 144);
    }

    #[test]
    fn views_that_reach_beyond_an_address_space_are_refused() {
        let mut values = [0f32; 16];
        let (base, far) = (values.as_mut_ptr(), (isize::MAX as usize) & !3);
        // SAFETY: the views are refused or never read.
        unsafe {
            for (used, tokens) in [(1, 3), (3, 1), (2, 2)] {
                assert!(Table::new(base, [used, tokens], [far, far]).is_err());
                assert!(Rows::new(base, [4, used, tokens], [far, far]).is_err());
                assert!(RowsMut::new(base, [4, used, tokens], [far, far]).is_err());
            }
            assert!(Rows::new(base, [usize::MAX / 2, 1, 1], [0, 0]).is_err());
            assert!(Rows::new(base, [4, 1, usize::MAX / 8], [16, 16]).is_err());
            assert!(Rows::new(base, [4, 1, 1], [far, far]).is_ok(), "a stride that is not used");
        }
    }

    #[test]
    fn a_result_may_lie_on_its_input_or_between_its_rows() {
        let mut values = [0f32; 64];
        let base = values.as_mut_ptr();
        // SAFETY: the views are never read.
        let fits = |a: usize, a_step: usize, b: usize, b_step: usize, rows: usize| unsafe {
            let x = Rows::new(base.add(a), [4, 1, rows], [0, 4 * a_step]).unwrap();
            x.may_become(&RowsMut::new(base.add(b), [4, 1, rows], [0, 4 * b_step]).unwrap())
        };
        assert!(fits(0, 4, 0, 4, 3) && fits(0, 8, 0, 8, 3), "in place");
        assert!(fits(0, 8, 4, 8, 3) && fits(4, 8, 0, 8, 3), "between each other");
        assert!(fits(0, 4, 12, 4, 3), "apart");
        assert!(!fits(0, 4, 4, 4, 3) && !fits(4, 4, 0, 4, 3), "a row further");
        assert!(!fits(0, 8, 2, 8, 3) && !fits(0, 8, 6, 8, 3), "half a row further");
        assert!(!fits(0, 8, 0, 4, 3), "packed in place");
        assert!(fits(0, 8, 0, 4, 1) && !fits(0, 8, 2, 8, 1), "one row");
    }

    #[test]
    fn null_misaligned_and_overlapping_views_are_refused() {
        let mut values = [0f32; 16];
        // SAFETY: the views are refused or never read.
        unsafe {
            assert!(Table::<i32>::new(std::ptr::null(), [2, 2], [4, 8]).is_err());
            assert!(Table::<i32>::new(std::ptr::null(), [2, 0], [4, 8]).is_ok());
            assert!(Table::new(values.as_ptr(), [2, 2], [3, 8]).is_err());
            assert!(Rows::new(values.as_ptr().byte_add(1), [2, 1, 2], [8, 8]).is_err());
            assert!(Rows::new(values.as_ptr(), [2, 1, 2], [8, 6]).is_err());
            assert!(RowsMut::new(values.as_mut_ptr(), [4, 1, 2], [16, 12]).is_err());
            assert!(RowsMut::new(values.as_mut_ptr(), [4, 2, 2], [16, 16]).is_err());
            assert!(RowsMut::new(std::ptr::null_mut(), [4, 2, 2], [16, 32]).is_err());
        }
        assert!(Rows::packed(&values, 5, 3).is_err() && RowsMut::packed(&mut values, 5, 3).is_err());
    }
}
