//! Where bytes of a fill go: memory, or memory that is a part of an arena's file.
//!
//! Owns: how they get there. What goes to an arena is written to its file: a store to its mapping would cost a page fault for each 4 KiB, a major
//! one, because the kernel has to ask the file system for the page. Must not know: where the bytes come from.

use super::arena::Slice;
use super::numa::Plan;

/// Below this a store costs less than a system call.
const WORTH_A_CALL: usize = 64 << 10;

/// `len` bytes to be written.
#[derive(Clone, Copy)]
pub struct Target<'a> {
    base: *mut u8,
    len: usize,
    /// The part of an arena that they lie in, and their offset in it.
    file: Option<(&'a Slice, usize)>,
}

// SAFETY: the bytes belong to no thread; who makes a target vouches for its use.
unsafe impl Sync for Target<'_> {}

impl<'a> Target<'a> {
    /// Bytes in memory. Whoever writes to them vouches for the address.
    pub fn memory(base: *mut u8, len: usize) -> Target<'static> {
        Target { base, len, file: None }
    }

    /// Bytes at `offset` of a slice, which must have them.
    pub(super) fn slice(slice: &'a Slice, offset: usize, len: usize) -> Target<'a> {
        debug_assert!(offset.checked_add(len).is_some_and(|end| end <= slice.len()));
        Target { base: slice.base().wrapping_add(offset), len, file: Some((slice, offset)) }
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the first byte.
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// Whether they are better written to a file than stored.
    pub(super) fn is_file(&self) -> bool {
        self.file.is_some()
    }

    /// Where pages of a file that it writes should come from.
    pub(super) fn plan(&self) -> Option<&Plan> {
        self.file.and_then(|(slice, _)| slice.arena().plan())
    }

    /// Whether `len` bytes at `source` share any with it.
    pub fn overlaps(&self, source: *const u8, len: usize) -> bool {
        let (a, b) = (self.base.addr(), source.addr());
        a < b.saturating_add(len) && b < a.saturating_add(self.len)
    }

    /// Writes `len` bytes of `source` at `at`.
    ///
    /// # Safety
    /// `at + len` must be at most [`Target::len`], the bytes there writable and used by nobody else meanwhile, and those of `source` readable.
    pub(super) unsafe fn put(&self, at: usize, source: *const u8, len: usize) {
        let stored = match self.file {
            // SAFETY: by the caller's promise.
            Some((slice, offset)) if len >= WORTH_A_CALL => unsafe { slice.write(offset + at, source, len) }.is_err(),
            _ => true,
        };
        if stored {
            // SAFETY: by the caller's promise. `copy` because a source may lie in the same region.
            unsafe { std::ptr::copy(source, self.base.add(at), len) };
        }
        if let Some((slice, offset)) = self.file {
            // SAFETY: by the caller's promise.
            unsafe { slice.sum(offset + at, source, len) };
            slice.written(offset + at, len);
        }
    }

    /// Tells that bytes were stored, and not put, so that the dirty ones stay bounded.
    pub(super) fn written(&self, at: usize, len: usize) {
        if let Some((slice, offset)) = self.file {
            slice.unsummed();
            slice.written(offset + at, len);
        }
    }

    /// Tells that no more will be written.
    pub(super) fn complete(&self) {
        if let Some((slice, _)) = self.file {
            slice.flush();
        }
    }
}
