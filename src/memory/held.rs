//! Pages of a region that are locked after the region was made: those of a mapping of somebody else, or ordinary ones in use.
//!
//! Owns: that mappings which several regions share are locked once, and that nothing is unmapped that is locked. Must not know: when, and why.
//!
//! Of a mapping all pages are locked that are mapped still, or none. Tensors in a file do not end at pages, and a copy to a device whose source is
//! locked in part is an error of CUDA that ends llama.cpp: were only the pages of some tensors locked, the copy of a neighbour would be one. What
//! the host has unmapped after its load is not locked: other memory may come to lie at those addresses.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::budget::{Limit, Pages};
use super::lock::Lock;
use super::mapping;
use super::pinned::{LockedPages, Settings, Shortfall, Step, Why};

/// A mapping whose pages are locked.
struct Mapping {
    range: Range<usize>,
    /// None while they are being locked.
    pages: Mutex<Option<LockedPages>>,
}

static MAPPINGS: Mutex<Vec<Weak<Mapping>>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What holds pages.
enum Hold {
    Own(LockedPages),
    Mapping(Arc<Mapping>),
}

/// What holds the pages of one region.
#[derive(Default)]
pub(super) struct Held {
    pages: Mutex<Option<Hold>>,
    lock: Mutex<Option<Lock>>,
    /// Pages of the region's own are locked that could not be unlocked.
    stays: AtomicBool,
}

impl Held {
    /// Locks the mapping that `len` bytes at `base` lie in.
    ///
    /// # Safety
    /// The bytes must stay mapped until [`Held::release`].
    pub(super) unsafe fn mapping(
        &self,
        base: *mut u8,
        len: usize,
        settings: &Settings,
        progress: &mut dyn FnMut(Step),
    ) -> Result<(), Shortfall> {
        let mapping = {
            let mut mappings = lock(&MAPPINGS);
            mappings.retain(|m| m.strong_count() > 0);
            let wanted = base.addr()..base.addr().saturating_add(len);
            let known: Vec<Arc<Mapping>> = mappings.iter().filter_map(Weak::upgrade).collect();
            if let Some(known) = known.iter().find(|m| m.range.start <= wanted.start && wanted.end <= m.range.end) {
                if lock(&known.pages).is_none() {
                    return Err(Shortfall::new(Why::Refused, "another thread is locking this mapping now"));
                }
                *lock(&self.pages) = Some(Hold::Mapping(known.clone()));
                return Ok(());
            }
            let range = mapping::extent(base).filter(|r| wanted.end <= r.end);
            let range =
                range.ok_or_else(|| Shortfall::new(Why::Refused, "these bytes are no mapping of a file, whose pages could be locked"))?;
            if known.iter().any(|m| m.range.start < range.end && range.start < m.range.end) {
                return Err(Shortfall::new(Why::Refused, "a part of the mapping is locked already, and the other was mapped later"));
            }
            let mapping = Arc::new(Mapping { range, pages: Mutex::new(None) });
            mappings.push(Arc::downgrade(&mapping));
            mapping
        };
        // No lock is held while it is done: it tells how far it is, and who listens may make or free buffers.
        let start = base.with_addr(mapping.range.start);
        // SAFETY: the range is one mapping, which the caller keeps as far as it is used by anybody.
        let pages = unsafe { LockedPages::new(start, mapping.range.len(), Pages::File, settings, progress) }?;
        *lock(&mapping.pages) = Some(pages);
        *lock(&self.pages) = Some(Hold::Mapping(mapping));
        Ok(())
    }

    /// Locks the pages of `len` bytes at `base`, which are the region's alone.
    ///
    /// # Safety
    /// They must stay mapped until [`Held::release`], and for ever if that says so.
    pub(super) unsafe fn own(
        &self,
        base: *mut u8,
        len: usize,
        settings: &Settings,
        progress: &mut dyn FnMut(Step),
    ) -> Result<(), Shortfall> {
        // SAFETY: by the caller's promise.
        let pages = unsafe { LockedPages::new(base, len, Pages::Anonymous, settings, progress) }
            .inspect_err(|short| self.stays.store(short.stays || self.stays.load(Ordering::Relaxed), Ordering::Relaxed))?;
        *lock(&self.pages) = Some(Hold::Own(pages));
        Ok(())
    }

    /// Keeps the pages of `len` bytes at `base` in memory, as far as the limits allow: how many, and why not all.
    pub(super) fn lock(&self, base: *mut u8, len: usize, pages: Pages, limit: Limit) -> (usize, Option<String>) {
        let (locked, why) = Lock::new(base, len, pages, limit);
        let bytes = locked.bytes();
        *lock(&self.lock) = Some(locked);
        (bytes, why)
    }

    /// Unlocks everything. False if pages of the region's own are locked still: then they must stay mapped.
    pub(super) fn release(&mut self) -> bool {
        lock(&self.lock).take();
        match lock(&self.pages).take() {
            None => !self.stays.load(Ordering::Relaxed),
            Some(Hold::Own(pages)) => pages.release(),
            Some(Hold::Mapping(mapping)) => {
                // While nobody looks for a mapping: who comes next finds it locked, or not at all.
                let _mappings = lock(&MAPPINGS);
                if Arc::strong_count(&mapping) == 1
                    && let Some(pages) = lock(&mapping.pages).take()
                {
                    // If it fails a note says so; the mapping is somebody else's, and will be unmapped.
                    pages.release();
                }
                // Before anybody looks again: an entry without locked pages must not be found.
                drop(mapping);
                true
            }
        }
    }
}
