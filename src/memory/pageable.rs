//! Ordinary anonymous memory, zeroed, with huge pages asked for.
//!
//! Owns: one private mapping. Small regions are page-aligned; from 2 MiB on they start on a huge page, so that the kernel can use them.

use super::{HUGE_PAGE, round_up};
use crate::error::{Error, Result};

/// An anonymous private mapping.
pub struct Pageable {
    base: *mut u8,
    len: usize,
    mapped_at: *mut libc::c_void,
    mapped_len: usize,
}

// SAFETY: the mapping belongs to no thread.
unsafe impl Send for Pageable {}
// SAFETY: `&Pageable` gives out addresses only.
unsafe impl Sync for Pageable {}

impl Pageable {
    /// At least `len` zeroed bytes (`len` > 0).
    ///
    /// # Errors
    /// [`crate::error::Status::OutOfMemory`] if the kernel refuses.
    pub fn new(len: usize) -> Result<Pageable> {
        let huge = len >= HUGE_PAGE;
        let rounded = round_up(len, if huge { HUGE_PAGE } else { 4096 })?;
        let mapped_len = round_up(rounded + if huge { HUGE_PAGE } else { 0 }, 4096)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let mapped_at = unsafe { libc::mmap(std::ptr::null_mut(), mapped_len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        if mapped_at == libc::MAP_FAILED {
            return Err(Error::last_os(format_args!("allocate {len} bytes of pageable memory")));
        }
        let start = mapped_at.cast::<u8>();
        let base = if huge { start.wrapping_add(start.align_offset(HUGE_PAGE)) } else { start };
        if huge {
            // Advice only: without huge pages the region works all the same.
            // SAFETY: `rounded` bytes at `base` lie in the mapping just made.
            unsafe { libc::madvise(base.cast(), rounded, libc::MADV_HUGEPAGE) };
        }
        Ok(Pageable { base, len, mapped_at, mapped_len })
    }

    /// Gives up the bytes from `at` on, a multiple of 2 MiB, of a region that starts on a huge page: whoever mapped something else there unmaps it.
    pub(super) fn give_up(&mut self, at: usize) {
        let start = self.base.wrapping_add(at);
        let end = self.mapped_at.wrapping_byte_add(self.mapped_len);
        let rounded = self.base.wrapping_add(self.len.next_multiple_of(HUGE_PAGE));
        // SAFETY: what follows the rounded region is this mapping's, and used by nobody.
        unsafe { unmap(rounded.cast(), end.addr() - rounded.addr()) };
        self.mapped_len = start.addr() - self.mapped_at.addr();
    }

    /// First byte.
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// Bytes asked for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Pageable {
    fn drop(&mut self) {
        // SAFETY: exactly what is left of the mapping made in `new`, unmapped once.
        unsafe { unmap(self.mapped_at, self.mapped_len) };
    }
}

/// In steps: to give back hundreds of GiB at once keeps every other thread from mapping anything for seconds.
///
/// # Safety
/// The range must be the caller's, and used by nobody any more.
unsafe fn unmap(base: *mut libc::c_void, len: usize) {
    const STEP: usize = 1 << 30;
    for at in (0..len).step_by(STEP) {
        // SAFETY: by the caller's promise.
        unsafe { libc::munmap(base.wrapping_byte_add(at), STEP.min(len - at)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_zeroed_aligned_and_writable_to_the_last_byte() {
        for len in [1, 63, 4096, 100_000, HUGE_PAGE - 1, HUGE_PAGE, HUGE_PAGE + 1, 3 * HUGE_PAGE + 5] {
            let p = Pageable::new(len).unwrap();
            assert_eq!(p.len(), len);
            let alignment = if len >= HUGE_PAGE { HUGE_PAGE } else { super::super::ALIGNMENT };
            assert_eq!(p.base().addr() % alignment, 0, "{len}");
            // SAFETY: `len` bytes belong to `p`, which nothing else uses.
            let bytes = unsafe { std::slice::from_raw_parts_mut(p.base(), len) };
            assert!(bytes.iter().all(|b| *b == 0));
            bytes.fill(0xA5);
        }
    }

    #[test]
    fn impossible_sizes_are_errors() {
        for len in [usize::MAX, isize::MAX as usize, 1 << 47] {
            assert_eq!(Pageable::new(len).err().map(|e| e.status), Some(crate::error::Status::OutOfMemory), "{len}");
        }
    }
}
