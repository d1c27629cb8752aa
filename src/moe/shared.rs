//! One buffer, many threads, no locks: memory cut into pieces that are taken one at a time.
//!
//! Owns: [`Arena`], which cuts the workspace into typed slices, and [`Pieces`], which lends equal parts of a slice to whoever claims them.
//! A part that is claimed twice at once is a panic, not a data race. Must not know: what the memory is for.

use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};

use super::acts::Line;

mod sealed {
    /// # Safety
    /// Every bit pattern is a value, and there is no padding; alignment is at most 64.
    pub(in crate::moe) unsafe trait Plain {}
    // SAFETY: bytes.
    unsafe impl Plain for super::Line {}
    // SAFETY: every pattern is a float.
    unsafe impl Plain for f32 {}
    // SAFETY: every pattern is a number.
    unsafe impl Plain for u32 {}
    // SAFETY: every pattern is a number, and the layout is that of u8.
    unsafe impl Plain for super::AtomicU8 {}
    // SAFETY: every pattern is an address.
    unsafe impl Plain for super::AtomicPtr<u8> {}
}

/// A type that workspace memory can be used as.
pub(super) trait Plain: sealed::Plain {}
impl<T: sealed::Plain> Plain for T {}

/// Bytes of `count` values, rounded up to lines. `usize::MAX` if that does not fit.
pub(super) const fn lines_for<T>(count: usize) -> usize {
    let bytes = count.saturating_mul(size_of::<T>());
    bytes.saturating_add(63) / 64 * 64
}

/// Workspace that is handed out front to back.
pub(super) struct Arena<'a> {
    at: *mut u8,
    left: usize,
    life: PhantomData<&'a mut [u8]>,
}

impl<'a> Arena<'a> {
    /// Takes over the workspace. `None` if it is not aligned to 64 bytes.
    pub(super) fn new(bytes: &'a mut [u8]) -> Option<Arena<'a>> {
        bytes.as_ptr().addr().is_multiple_of(64).then_some(Arena { at: bytes.as_mut_ptr(), left: bytes.len(), life: PhantomData })
    }

    /// The next `count` values, zeroed or as they are. `None` if too few bytes are left.
    pub(super) fn take<T: Plain>(&mut self, count: usize) -> Option<&'a mut [T]> {
        let bytes = lines_for::<T>(count);
        if bytes > self.left {
            return None;
        }
        let start = self.at;
        // SAFETY: `bytes <= left`, so this stays within the workspace or at its end.
        self.at = unsafe { start.add(bytes) };
        self.left -= bytes;
        // SAFETY: the bytes are part of the borrowed workspace, were handed out to nobody before, hold `count` values of `T`, start on a line
        // (`new`, and `bytes` is a multiple of 64), and are a valid `T` whatever they are (`Plain`).
        Some(unsafe { std::slice::from_raw_parts_mut(start.cast(), count) })
    }

    /// As [`Arena::take`], with all bytes 0.
    pub(super) fn take_zeroed<T: Plain>(&mut self, count: usize) -> Option<&'a mut [T]> {
        let slice = self.take(count)?;
        // SAFETY: exclusively borrowed, and zeros are a valid `T` (`Plain`).
        unsafe { std::ptr::write_bytes(slice.as_mut_ptr(), 0, slice.len()) };
        Some(slice)
    }
}

/// Equal parts of a slice, each for one owner at a time.
pub(super) struct Pieces<'a, T> {
    base: *mut T,
    len: usize,
    size: usize,
    taken: &'a [AtomicU8],
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: a part is reached only by who claimed it, and claims exclude each other.
unsafe impl<T: Send> Send for Pieces<'_, T> {}
// SAFETY: likewise.
unsafe impl<T: Send> Sync for Pieces<'_, T> {}

impl<'a, T: Plain> Pieces<'a, T> {
    /// Parts of `size` values; the last may be shorter. `taken` has a zero for each.
    ///
    /// # Panics
    /// If `taken` is too short.
    pub(super) fn new(data: &'a mut [T], size: usize, taken: &'a [AtomicU8]) -> Self {
        assert!(size > 0 && taken.len() >= data.len().div_ceil(size));
        Pieces { base: data.as_mut_ptr(), len: data.len(), size, taken, life: PhantomData }
    }

    /// Part `i`, until the result is dropped.
    ///
    /// # Panics
    /// If somebody has it, or it does not exist.
    pub(super) fn take(&self, i: usize) -> Piece<'_, T> {
        assert!(i < self.len.div_ceil(self.size));
        let taken = &self.taken[i];
        assert!(taken.swap(1, Ordering::Acquire) == 0, "a piece has one owner at a time");
        let start = i * self.size;
        // SAFETY: within the slice; `taken` was 0, so nobody else has the part, and nobody gets it before the result is dropped.
        let data = unsafe { std::slice::from_raw_parts_mut(self.base.add(start), self.size.min(self.len - start)) };
        Piece { data, taken, not_send: PhantomData }
    }

    /// The whole slice again, when all owners are gone.
    pub(super) fn done(self) -> &'a mut [T] {
        // SAFETY: `self` is consumed, so no claim can be alive (each borrows it) and none can follow.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.len) }
    }
}

/// A claimed part.
pub(super) struct Piece<'p, T> {
    data: &'p mut [T],
    taken: &'p AtomicU8,
    not_send: PhantomData<Cell<()>>,
}

impl<T> Deref for Piece<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        self.data
    }
}

impl<T> DerefMut for Piece<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        self.data
    }
}

impl<T> Drop for Piece<'_, T> {
    fn drop(&mut self) {
        self.taken.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arena_hands_out_aligned_parts_and_stops_at_its_end() {
        let mut lines = vec![Line([1; 64]); 4];
        // SAFETY: lines are bytes.
        let bytes = unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast::<u8>(), 256) };
        assert!(Arena::new(&mut bytes[1..]).is_none());
        let mut arena = Arena::new(bytes).unwrap();
        let a = arena.take::<f32>(17).unwrap();
        let b = arena.take_zeroed::<u32>(1).unwrap();
        assert_eq!((a.len(), b), (17, &mut [0u32][..]));
        assert!(arena.take::<Line>(2).is_none() && arena.take::<u32>(usize::MAX).is_none());
        assert!(arena.take::<Line>(1).is_some());
    }

    #[test]
    fn a_piece_claimed_twice_is_a_panic() {
        let taken: [AtomicU8; 3] = Default::default();
        let mut data = [0f32; 5];
        let pieces = Pieces::new(&mut data, 2, &taken);
        let mut last = pieces.take(2);
        last[0] = 3.0;
        assert_eq!(last.len(), 1);
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| pieces.take(2).len())).is_err());
        drop(last);
        assert_eq!(pieces.take(2)[0], 3.0);
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| pieces.take(3).len())).is_err());
        assert_eq!(pieces.done(), [0.0, 0.0, 0.0, 0.0, 3.0]);
    }
}
