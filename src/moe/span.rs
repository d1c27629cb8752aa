//! Where views lie in memory: what overlaps, and what reaches beyond an address space.
//!
//! Owns: [`Span`] and the arithmetic of strides. Must not know: what is read or written there.

use crate::error::{Error, Result};

/// The error of sizes that are too large.
pub(super) fn overflow(what: &str) -> Error {
    Error::invalid(format!("{what}: the sizes do not fit in an address space"))
}

/// Where `used` rows of each of `tokens` tokens lie: the first and the last address. Strides are in bytes.
pub(super) fn span(what: &str, base: *const u8, row: usize, [used, tokens]: [usize; 2], strides: [usize; 2]) -> Result<Span> {
    if row == 0 || used == 0 || tokens == 0 {
        return Ok(Span { start: 0, end: 0 });
    }
    let last = (used - 1).checked_mul(strides[0]).zip((tokens - 1).checked_mul(strides[1]));
    let bytes = last.and_then(|(j, token)| j.checked_add(token)?.checked_add(row)).filter(|n| isize::try_from(*n).is_ok());
    let end = bytes.and_then(|n| base.addr().checked_add(n)).ok_or_else(|| overflow(what))?;
    Ok(Span { start: base.addr(), end })
}

/// A range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    start: usize,
    end: usize,
}

impl Span {
    /// No address.
    pub const NONE: Span = Span { start: 0, end: 0 };

    /// The addresses of some bytes. `None` if they wrap around the end of memory.
    pub fn of(base: *const u8, bytes: usize) -> Option<Span> {
        Some(Span { start: base.addr(), end: base.addr().checked_add(bytes)? })
    }

    /// The addresses of a slice, which does not wrap around.
    pub(super) fn of_slice<T>(slice: &[T]) -> Span {
        let start = slice.as_ptr().addr();
        Span { start, end: start + size_of_val(slice) }
    }

    /// The first address.
    pub fn start(&self) -> usize {
        self.start
    }

    /// How many addresses.
    pub fn len(&self) -> usize {
        self.end - self.start
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Both as one, if the other begins where this one ends.
    pub(super) fn joined(&self, next: Span) -> Option<Span> {
        (self.end == next.start).then_some(Span { start: self.start, end: next.end })
    }

    /// Whether the two have a byte in common.
    pub fn meets(&self, other: Span) -> bool {
        self.start.max(other.start) < self.end.min(other.end)
    }
}

/// From one row to the next in memory, where that is the same for all rows: `Some(0)` for a single row.
pub(super) fn step([used, tokens]: [usize; 2], strides: [usize; 2]) -> Option<usize> {
    match (used, tokens) {
        (..=1, ..=1) => Some(0),
        (_, ..=1) => Some(strides[0]),
        (..=1, _) => Some(strides[1]),
        _ => (strides[1] == used * strides[0]).then_some(strides[0]),
    }
}
