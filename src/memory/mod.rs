//! Owned byte regions: pageable, mapped, page-locked, file-backed.
//!
//! Owns: getting, describing and giving back memory. Must not know: ggml, tensors, who chose a place or what happens when one cannot be had.

pub mod aio;
pub mod arena;
pub mod budget;
pub mod direct;
mod directory;
mod driver;
pub mod fill;
mod held;
pub mod input;
pub mod lasting;
pub mod lock;
pub mod mapping;
pub mod numa;
pub mod origin;
pub mod pageable;
pub mod pinned;
mod populate;
mod registered;
pub mod residency;
mod sums;
pub mod system;
pub mod target;
#[cfg(test)]
pub(crate) mod testing;
pub mod watch;
mod writeback;

use crate::error::{Error, Result, Status};
use budget::{Limit, Pages};
use pinned::{Settings, Shortfall, Step, Why};

/// Alignment of the first byte of every region that is allocated here, in bytes: one cache line, one AVX-512 register.
pub const ALIGNMENT: usize = 64;

/// Size of a page, in bytes, as far as alignment is concerned: those of every supported machine are this or a multiple, and then start on it.
pub const PAGE: usize = 4096;

/// Size of a huge page, in bytes. Large regions start on one and are rounded up to one.
pub const HUGE_PAGE: usize = 2 << 20;

/// `n` rounded up to a multiple of `step`, a power of two.
///
/// # Errors
/// [`Status::OutOfMemory`] if the result does not fit.
pub fn round_up(n: usize, step: usize) -> Result<usize> {
    n.checked_next_multiple_of(step)
        .filter(|r| isize::try_from(*r).is_ok())
        .ok_or_else(|| Error::new(Status::OutOfMemory, format!("{n} bytes are more than an address space holds")))
}

/// What keeps the bytes of a [`Region`] alive.
#[expect(dead_code, reason = "most owners are held to be dropped")]
enum Owner {
    /// Nothing to keep: no bytes.
    Empty,
    /// Somebody else's memory.
    Borrowed,
    Pageable(pageable::Pageable),
    Pinned(pinned::Pinned),
    Arena(arena::Slice),
}

/// Bytes in host memory, readable and, if [`Region::is_writable`], writable until it is dropped.
pub struct Region {
    base: *mut u8,
    len: usize,
    writable: bool,
    held: held::Held,
    owner: Owner,
}

// SAFETY: the bytes belong to no thread, and every owner in it may be dropped on any thread. Access to the bytes goes through raw pointers,
// whose users order their accesses.
unsafe impl Send for Region {}
// SAFETY: likewise; `&Region` gives out addresses only.
unsafe impl Sync for Region {}

impl Region {
    /// A region of no bytes, at a non-NULL address that is aligned.
    pub fn empty() -> Region {
        Region {
            base: std::ptr::without_provenance_mut(ALIGNMENT),
            len: 0,
            writable: true,
            held: held::Held::default(),
            owner: Owner::Empty,
        }
    }

    /// Somebody else's bytes.
    ///
    /// # Safety
    /// `base` must point at `len` bytes that stay readable, and writable if `writable` says so, while the region lives.
    pub unsafe fn borrowed(base: *mut u8, len: usize, writable: bool) -> Region {
        Region { base, len, writable, held: held::Held::default(), owner: Owner::Borrowed }
    }

    /// Address of the first byte, never NULL.
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the bytes may be written. A borrowed read-only mapping says no.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Address of `len` bytes at `address`, if all of them lie in this region.
    pub fn within(&self, address: *mut u8, len: usize) -> Option<*mut u8> {
        let offset = address.addr().checked_sub(self.base.addr())?;
        let end = offset.checked_add(len)?;
        // The pointer is rebuilt from our own base, so that it has the region's provenance.
        if end <= self.len { Some(self.base.wrapping_add(offset)) } else { None }
    }

    /// `len` bytes at `offset` as the target of a fill; `None` if they are not all in this region, or may not be written.
    pub fn target(&self, offset: usize, len: usize) -> Option<target::Target<'_>> {
        if !self.writable || offset.checked_add(len).is_none_or(|end| end > self.len) {
            return None;
        }
        Some(match &self.owner {
            Owner::Arena(slice) if !slice.arena().is_private() => target::Target::slice(slice, offset, len),
            Owner::Pinned(pinned) => pinned.target(offset, len),
            _ => target::Target::memory(self.base.wrapping_add(offset), len),
        })
    }

    /// Where its pages are to come from: before anybody has touched one. What is not ours, and what is page-locked and so touched already, stays as it is.
    ///
    /// # Errors
    /// [`Status::Unsupported`] if the kernel refuses: memory is where it would be without the wish.
    pub fn place_on(&self, plan: &numa::Plan) -> Result<()> {
        match &self.owner {
            Owner::Empty | Owner::Borrowed | Owner::Pinned(_) => Ok(()),
            Owner::Pageable(_) => plan.wish(self.base, self.len),
            Owner::Arena(slice) => slice.arena().place_on(plan),
        }
    }

    /// Whether its bytes are a file's, whose pages need not be in this process's page tables.
    pub fn is_file(&self) -> bool {
        matches!(&self.owner, Owner::Arena(_))
    }

    /// Bounds the dirty bytes of a file while somebody else stores to it, until the result is dropped. `None` for other memory, and for a file that
    /// stores do not reach.
    pub fn watch(&self) -> Option<watch::Watch> {
        match &self.owner {
            Owner::Arena(slice) if !slice.arena().is_private() => watch::Watch::new(slice.arena()),
            _ => None,
        }
    }

    #[cfg(test)]
    fn arena(&self) -> Option<&std::sync::Arc<arena::Arena>> {
        match &self.owner {
            Owner::Arena(slice) => Some(slice.arena()),
            _ => None,
        }
    }

    /// Tells that `len` bytes at `offset` were stored, so that a file-backed region can write them back.
    pub fn written(&self, offset: usize, len: usize) {
        match &self.owner {
            Owner::Arena(slice) => {
                slice.unsummed();
                slice.written(offset, len);
            }
            Owner::Pinned(pinned) => pinned.written(offset, len),
            _ => {}
        }
    }

    /// Tells that no more will be stored for now.
    pub fn complete(&self) {
        match &self.owner {
            Owner::Arena(slice) => slice.flush(),
            Owner::Pinned(pinned) => pinned.complete(),
            _ => {}
        }
    }

    /// Locks the pages of the whole mapping of a file that the region lies in, for the CUDA driver.
    ///
    /// # Errors
    /// Why they are not: they are locked all, or none.
    pub fn lock_mapping(&self, settings: &Settings, progress: &mut dyn FnMut(Step)) -> std::result::Result<(), Shortfall> {
        if !matches!(self.owner, Owner::Borrowed) {
            return Err(Shortfall::new(Why::Refused, "only memory of somebody else can be a mapping"));
        }
        // SAFETY: whoever made a borrowed region vouches that its bytes stay while it lives; they are released when it is dropped.
        unsafe { self.held.mapping(self.base, self.len, settings, progress) }
    }

    /// Locks the pages of ordinary memory for the CUDA driver, whatever they hold.
    ///
    /// # Errors
    /// Why they are not: they are locked all, or none.
    pub fn lock_memory(&self, settings: &Settings, progress: &mut dyn FnMut(Step)) -> std::result::Result<(), Shortfall> {
        if !matches!(self.owner, Owner::Pageable(_)) {
            return Err(Shortfall::new(Why::Refused, "it is not ordinary memory"));
        }
        // SAFETY: the pages are the region's alone; they are released when it is dropped, or never unmapped.
        unsafe { self.held.own(self.base, self.len, settings, progress) }
    }

    /// Keeps the bytes from `from` on in memory (`mlock`), as far as the limits allow: how many, and why not all.
    pub fn lock_in_memory(&self, from: usize, limit: Limit) -> (usize, Option<String>) {
        let from = from.min(self.len);
        let pages = match self.owner {
            Owner::Pageable(_) | Owner::Pinned(_) => Pages::Anonymous,
            _ => Pages::File,
        };
        self.held.lock(self.base.wrapping_add(from), self.len - from, pages, limit)
    }

    /// Tells that a tensor of `len` bytes lies at `offset`. How many bytes of the region are page-locked by then, if that has changed: a tensor is locked
    /// as a whole or not at all.
    pub fn keep_whole(&self, offset: usize, len: usize) -> Option<usize> {
        match &self.owner {
            Owner::Pinned(pinned) => pinned.keep_whole(offset, len),
            _ => None,
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if !self.held.release() {
            // Addresses of locked pages must not get another meaning.
            std::mem::forget(std::mem::replace(&mut self.owner, Owner::Empty));
        }
    }
}

macro_rules! from_owner {
    ($($ty:ty => $variant:ident),*) => { $(
        impl From<$ty> for Region {
            fn from(owned: $ty) -> Region {
                Region { base: owned.base(), len: owned.len(), writable: true, held: held::Held::default(), owner: Owner::$variant(owned) }
            }
        }
    )* };
}
from_owner!(pageable::Pageable => Pageable, pinned::Pinned => Pinned, arena::Slice => Arena);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_refuses_what_no_address_space_holds() {
        assert_eq!(round_up(0, 64), Ok(0));
        assert_eq!(round_up(1, 64), Ok(64));
        assert_eq!(round_up(HUGE_PAGE + 1, HUGE_PAGE), Ok(2 * HUGE_PAGE));
        for huge in [usize::MAX, usize::MAX - 62, isize::MAX as usize] {
            assert_eq!(round_up(huge, 64).unwrap_err().status, Status::OutOfMemory);
        }
    }

    #[test]
    fn within_refuses_every_byte_outside() {
        let region = Region::from(pageable::Pageable::new(4096).unwrap());
        let base = region.base();
        assert_eq!(region.within(base, 4096), Some(base));
        assert_eq!(region.within(base.wrapping_add(4096), 0), Some(base.wrapping_add(4096)));
        for (start, len) in [(0, 4097), (1, 4096), (4096, 1), (4097, 0), (8, usize::MAX)] {
            assert_eq!(region.within(base.wrapping_add(start), len), None);
        }
        assert_eq!(region.within(base.wrapping_sub(1), 1), None);
        assert_eq!(region.within(std::ptr::null_mut(), 0), None);
    }
}
