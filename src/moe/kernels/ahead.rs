//! x86: what will be read next, on its way to the caches.
//!
//! Owns: the prefetches of both x86 tiers, and how far ahead of the work they are. Must not know: formats.

use std::arch::x86_64::*;

use crate::moe::acts::ActRow;
use crate::moe::args::WeightRows;

/// How far ahead of the blocks in work weights are prefetched, in bytes. A thread needs some 3 KiB in flight (30 GB/s for 100 ns), but asks
/// for them in bursts; Q4_K, T = 1, one thread of a Zen 5: 23 GB/s at 2 KiB, 28 at 4, 32 at 8, 35 at 12 and 16, of 38 that a plain loop reads.
pub(in crate::moe::kernels) const AHEAD: usize = 12 << 10;

/// The address `distance` bytes ahead in a stream: in these bytes, or, behind their end, in those that come next.
#[derive(Clone, Copy)]
pub(in crate::moe::kernels) struct Ahead {
    start: *const u8,
    len: usize,
    next: *const u8,
}

impl Ahead {
    pub(in crate::moe::kernels) fn new(start: *const u8, len: usize, next: *const u8) -> Self {
        Ahead { start, len, next }
    }

    /// The address that stands for byte `at` of the stream.
    #[inline(always)]
    pub(in crate::moe::kernels) fn at(&self, at: usize) -> *const u8 {
        if at < self.len || self.next.is_null() { self.start.wrapping_add(at) } else { self.next.wrapping_add(at - self.len) }
    }
}

/// Asks for the lines of `bytes` bytes to be brought to the first-level cache. Harmless at any address.
#[inline(always)]
pub(in crate::moe::kernels) fn prefetch(at: *const u8, bytes: usize) {
    for offset in (0..bytes).step_by(64) {
        // SAFETY: a prefetch does not fault and changes nothing but caches.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(offset).cast()) };
    }
}

/// As [`prefetch`], to the second-level cache.
#[inline(always)]
pub(in crate::moe::kernels) fn prefetch2(at: *const u8, bytes: usize) {
    for offset in (0..bytes).step_by(64) {
        // SAFETY: a prefetch does not fault and changes nothing but caches.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(offset).cast()) };
    }
}

/// Activations on their way to the second-level cache: they come from the third, or from memory, a few lines with each step of the work.
pub(in crate::moe::kernels) struct Coming<'a> {
    columns: &'a [ActRow<'a>],
    lines: usize,
    per_step: usize,
    next: usize,
}

impl<'a> Coming<'a> {
    /// More bytes than this would drive out what is in work.
    const MOST: usize = 256 << 10;

    pub(in crate::moe::kernels) fn new(columns: &'a [ActRow<'a>], steps: usize) -> Self {
        let lines = columns.first().map_or(0, |c| c.lines());
        let all = if columns.len() * lines * 64 <= Self::MOST { columns.len() * lines } else { 0 };
        Coming { columns, lines, per_step: all.div_ceil(steps), next: 0 }
    }

    #[inline(always)]
    pub(in crate::moe::kernels) fn step(&mut self) {
        let mut left = self.per_step;
        while left > 0 && self.next < self.columns.len() * self.lines {
            let (column, line) = (self.next / self.lines, self.next % self.lines);
            let count = left.min(self.lines - line);
            prefetch2(self.columns[column].start().wrapping_add(64 * line), 64 * count);
            (self.next, left) = (self.next + count, left - count);
        }
    }
}

/// The next rows on their way to the second-level cache, a part of them with each of `steps` steps. Rows with wide gaps are left to the processor.
pub(in crate::moe::kernels) struct NextRows {
    ahead: Ahead,
    from: usize,
    bytes: usize,
    steps: usize,
    step: usize,
    done: usize,
}

impl NextRows {
    /// As many rows as one tile has, behind this one, which begins with row `first`.
    pub(in crate::moe::kernels) fn new(rows: &WeightRows<'_>, next: *const u8, [first, tile]: [usize; 2], steps: usize) -> Self {
        let stride = rows.stride();
        let close = rows.weights().row_bytes(rows.k()).is_some_and(|bytes| stride <= 2 * bytes);
        let ahead = Ahead::new(rows.start(), rows.len() * stride, next);
        NextRows { ahead, from: (first + tile) * stride, bytes: if close { tile * stride } else { 0 }, steps, step: 0, done: 0 }
    }

    /// The part of this step: where it begins, and its length in bytes.
    #[inline(always)]
    pub(in crate::moe::kernels) fn step(&mut self) -> (*const u8, usize) {
        self.step += 1;
        let until = (self.bytes * self.step / self.steps).next_multiple_of(64);
        let part = (self.ahead.at(self.from + self.done), until - self.done);
        self.done = until;
        part
    }
}
