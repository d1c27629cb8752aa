//! Page-locked memory: of the CUDA driver's own, or ours with its pages locked; whole, or as much of it as may be.
//!
//! Owns: which of the two, the limit before either is tried, and what lies behind the part that is not locked. Must not know: who wants it, and
//! what happens where there is none.

use std::mem::ManuallyDrop;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::arena::{Arena, Directory, Slice};
use super::budget::{self, Limit, Locked, Pages};
use super::driver::{Ability, Context, Driver, PORTABLE, READ_ONLY};
use super::input::page_size;
use super::pageable::Pageable;
use super::populate::Touch;
use super::registered::{FIRST, LARGEST, Pace, Registered, note};
use super::target::Target;
use super::{HUGE_PAGE, round_up};
use crate::error::Result;

pub use super::registered::{Shortfall, Why, take_note};

/// How memory is locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// The driver allocates it: `cuMemHostAlloc`.
    Alloc,
    /// Memory of ours, in huge pages, brought in by several threads and locked with `cuMemHostRegister`.
    Register,
}

impl Method {
    /// Name in messages and settings.
    pub fn name(self) -> &'static str {
        match self {
            Method::Alloc => "alloc",
            Method::Register => "register",
        }
    }
}

/// What the user has set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Number of the device whose context is used.
    pub device: u32,
    /// `None`: [`Method::Register`], or the other one if the device cannot do that.
    pub method: Option<Method>,
    /// How much may be locked.
    pub limit: Limit,
}

/// What is told while memory is locked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// It begins, for so many bytes; the rest is over the limit.
    Begin {
        /// How many.
        bytes: u64,
        /// How.
        method: Method,
    },
    /// So many bytes are done.
    At(u64),
}

/// Above this a piece is tried first: the call for the whole cannot be stopped.
const WORTH_A_TRY: usize = 4 << 30;

/// How memory is got, if it can be: `in_one` says whether one call of the driver's may give all of it.
fn choose(asked: Option<Method>, can_register: bool, in_one: bool) -> Option<Method> {
    match (asked, can_register) {
        // The driver's memory is one piece, of one call.
        (Some(Method::Alloc), _) | (None, false) if in_one => Some(Method::Alloc),
        (_, true) => Some(Method::Register),
        (_, false) => None,
    }
}

/// Host memory of which the first bytes, perhaps all, are page-locked.
pub struct Pinned {
    base: *mut u8,
    len: usize,
    kind: Kind,
}

enum Kind {
    Allocated {
        /// What the driver gave; the first page starts there or behind.
        at: *mut u8,
        context: Context,
        _locked: Locked,
    },
    Registered {
        pages: Mutex<Registered>,
        /// Unmapped only if no page of it is locked any more.
        memory: ManuallyDrop<Pageable>,
        /// What does not fit in memory at all, and where it begins.
        tail: Option<(usize, Slice)>,
    },
}

// SAFETY: the memory belongs to no thread, and the driver may be called from any.
unsafe impl Send for Pinned {}
// SAFETY: `&Pinned` gives out addresses, and changes what is locked behind a lock.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// `len` bytes (`len` > 0), usable by every CUDA device, and why not all of them are locked, if they are not. What is not locked is ordinary
    /// memory; if there is not enough for that, it lies in a file in the directory that `files` gives.
    ///
    /// # Errors
    /// If nothing can be locked.
    pub fn new(
        len: usize,
        settings: &Settings,
        files: &dyn Fn() -> Result<Directory>,
        progress: &mut dyn FnMut(Step),
    ) -> std::result::Result<(Pinned, Option<Shortfall>), Shortfall> {
        let context = Context::retain(settings.device)?;
        let (budget, locked) = budget::grant(settings.limit, Pages::Anonymous, round_up(len, page_size())? as u64);
        let granted = usize::try_from(budget.left).unwrap_or(usize::MAX).min(len);
        let short = (granted < len).then(|| {
            let message = format!("{len} bytes asked, {granted} may be page-locked: {} ({} are locked)", budget.because, budget::locked());
            Shortfall::new(Why::Budget, message)
        });
        let in_one = short.is_none() && len <= LARGEST;
        let method = choose(settings.method, context.can(Ability::Register), in_one).ok_or_else(|| {
            let cannot = format!("CUDA device {} cannot lock memory that it has not allocated", settings.device);
            match short.clone() {
                Some(short) if settings.method != Some(Method::Register) => short,
                None if len > LARGEST => Shortfall::new(Why::NoDriver, format!("{cannot}, and allocates at most {LARGEST} bytes at once")),
                _ => Shortfall::new(Why::NoDriver, cannot),
            }
        })?;
        if method == Method::Alloc {
            progress(Step::Begin { bytes: len as u64, method });
            return Ok((Self::allocate(len, context, locked)?, None));
        }
        // A part ends on a huge page, so that something else can lie behind it.
        let part = if short.is_some() { granted / HUGE_PAGE * HUGE_PAGE } else { round_up(len, page_size())? };
        match short {
            Some(short) if part == 0 => return Err(short),
            _ => {}
        }
        let mut memory = Pageable::new(len)?;
        let tail =
            if short.is_some() && locked.is_too_much(len) { Some((part, put_into_file(&mut memory, len, part, files)?)) } else { None };
        progress(Step::Begin { bytes: part as u64, method });
        let base = memory.base();
        let mut pages = Registered::new(context, PORTABLE, locked);
        // SAFETY: fresh memory, which is unmapped only after the pages are released.
        let locked = unsafe { pages.lock(base, part, Some(Touch::Write), budget.nodes, &mut |done| progress(Step::At(done))) };
        let nothing = pages.bytes() == 0;
        let pinned = Pinned { base, len, kind: Kind::Registered { pages: Mutex::new(pages), memory: ManuallyDrop::new(memory), tail } };
        match locked {
            Ok(()) => Ok((pinned, short)),
            Err(why) if nothing => Err(why),
            Err(why) => Ok((pinned, Some(why))),
        }
    }

    fn allocate(len: usize, context: Context, mut locked: Locked) -> std::result::Result<Pinned, Shortfall> {
        if len >= WORTH_A_TRY {
            let started = Instant::now();
            let piece = context.alloc(FIRST).map_err(|r| Shortfall::from(r.error))?;
            let took = started.elapsed();
            // SAFETY: allocated a moment ago.
            if !unsafe { context.free(piece) } {
                return Err(Shortfall::new(Why::Refused, "the CUDA driver does not take memory back"));
            }
            Pace::expect(FIRST, len, took)?;
        }
        let page = page_size();
        let mut at = context.alloc(len).map_err(|r| Shortfall::from(r.error))?;
        if at.addr() % page != 0 {
            // Small pieces may share pages, and begin anywhere in them; ggml's allocator ends the process if a buffer does.
            // SAFETY: allocated a moment ago.
            if !unsafe { context.free(at) } {
                return Err(Shortfall::new(Why::Refused, "the CUDA driver does not take memory back"));
            }
            at = context.alloc(round_up(len, page)? + page).map_err(|r| Shortfall::from(r.error))?;
        }
        locked.set(len as u64);
        locked.settle();
        let base = at.wrapping_add(at.addr().next_multiple_of(page) - at.addr());
        Ok(Pinned { base, len, kind: Kind::Allocated { at, context, _locked: locked } })
    }

    /// First byte, page-aligned.
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

    /// Bytes that are page-locked.
    pub fn locked(&self) -> usize {
        match &self.kind {
            Kind::Allocated { .. } => self.len,
            Kind::Registered { pages, .. } => lock(pages).bytes().min(self.len),
        }
    }

    /// Where the part begins that lies in a file, if there is one.
    pub fn in_file_from(&self) -> Option<usize> {
        match &self.kind {
            Kind::Registered { tail: Some((from, _)), .. } => Some(*from),
            _ => None,
        }
    }

    /// Sees to it that a tensor is locked as a whole or not at all, and says how many bytes are locked if that has changed. A copy to a device whose
    /// source is locked in part is an error of CUDA.
    pub(super) fn keep_whole(&self, offset: usize, len: usize) -> Option<usize> {
        let Kind::Registered { pages, .. } = &self.kind else { return None };
        let changed = lock(pages).keep_whole(self.base.wrapping_add(offset), len);
        changed.then(|| self.locked())
    }

    /// `len` bytes at `offset`, which it must have, as the target of a fill.
    pub(super) fn target(&self, offset: usize, len: usize) -> Target<'_> {
        match &self.kind {
            Kind::Registered { tail: Some((from, slice)), .. } if offset >= *from => Target::slice(slice, offset - from, len),
            _ => Target::memory(self.base.wrapping_add(offset), len),
        }
    }

    /// Tells that `len` bytes at `offset` were stored.
    pub(super) fn written(&self, offset: usize, len: usize) {
        if let Kind::Registered { tail: Some((from, slice)), .. } = &self.kind {
            let end = offset + len;
            if end > *from {
                let start = offset.max(*from);
                slice.written(start - from, end - start);
            }
        }
    }

    /// Tells that no more will be stored for now.
    pub(super) fn complete(&self) {
        if let Kind::Registered { tail: Some((_, slice)), .. } = &self.kind {
            slice.flush();
        }
    }
}

fn lock(pages: &Mutex<Registered>) -> MutexGuard<'_, Registered> {
    pages.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Puts a file behind the bytes from `from` on.
fn put_into_file(memory: &mut Pageable, len: usize, from: usize, files: &dyn Fn() -> Result<Directory>) -> Result<Slice> {
    let capacity = round_up(len, HUGE_PAGE)? - from;
    // SAFETY: the memory is fresh, of at least 2 MiB and so rounded up to huge pages, and gives these bytes up.
    let arena = unsafe { Arena::in_place(&files()?, capacity, memory.base().wrapping_add(from)) }?;
    memory.give_up(from);
    arena.slice(len - from)
}

impl Drop for Pinned {
    fn drop(&mut self) {
        match &mut self.kind {
            Kind::Allocated { at, context, .. } => {
                // SAFETY: allocated by this context, freed once.
                if !unsafe { context.free(*at) } {
                    note(format!("{} bytes of page-locked memory are left alone: the CUDA driver does not take them back", self.len));
                }
            }
            Kind::Registered { pages, memory, .. } => {
                if pages.get_mut().unwrap_or_else(PoisonError::into_inner).release() {
                    // SAFETY: dropped once, here, and used by nobody.
                    unsafe { ManuallyDrop::drop(memory) };
                }
            }
        }
    }
}

/// Pages of somebody else, locked.
pub struct LockedPages(Registered);

impl LockedPages {
    /// Locks all pages of `len` bytes at `base`, or none; pages of a file, which nobody writes, or ordinary ones.
    ///
    /// # Errors
    /// Why they are not locked.
    ///
    /// # Safety
    /// The pages must stay mapped until it is dropped, or, if [`LockedPages::release`] or the error says so, for ever.
    pub unsafe fn new(
        base: *mut u8,
        len: usize,
        pages: Pages,
        settings: &Settings,
        progress: &mut dyn FnMut(Step),
    ) -> std::result::Result<LockedPages, Shortfall> {
        let page = page_size();
        let start = base.wrapping_sub(base.addr() % page);
        let len = round_up(base.addr() - start.addr() + len, page)?;
        let context = Context::retain(settings.device)?;
        let ability = if pages == Pages::File { Ability::RegisterReadOnly } else { Ability::Register };
        if !context.can(ability) {
            let what = if pages == Pages::File { "memory that cannot be written" } else { "memory that it has not allocated" };
            return Err(Shortfall::new(Why::NoDriver, format!("CUDA device {} cannot lock {what}", settings.device)));
        }
        let (budget, granted) = budget::grant(settings.limit, pages, len as u64);
        if (len as u64) > budget.left {
            let message =
                format!("{len} bytes asked, {} may be page-locked: {} ({} are locked)", budget.left, budget.because, budget::locked());
            return Err(Shortfall::new(Why::Budget, message));
        }
        progress(Step::Begin { bytes: len as u64, method: Method::Register });
        let (flags, touch) = match pages {
            Pages::File => (PORTABLE | READ_ONLY, Some(Touch::Read)),
            // They are in use: what they hold must stay.
            Pages::Anonymous => (PORTABLE, None),
        };
        let mut locked = Registered::new(context, flags, granted);
        // SAFETY: by the caller's promise; what cannot be unlocked after an error is told.
        match unsafe { locked.lock(start, len, touch, Vec::new(), &mut |done| progress(Step::At(done))) } {
            Ok(()) => Ok(LockedPages(locked)),
            Err(short) => Err(Shortfall { stays: !locked.release(), ..short }),
        }
    }

    /// Bytes that are locked, whole pages.
    pub fn bytes(&self) -> usize {
        self.0.bytes()
    }

    /// Unlocks them. False if some are locked still: then they must stay mapped.
    pub fn release(mut self) -> bool {
        self.0.release()
    }
}

/// The CUDA driver: its version as CUDA counts (12040 is 12.4) and the number of devices.
///
/// # Errors
/// [`crate::error::Status::Unsupported`] if there is none, or it says that there is no device.
pub fn driver() -> Result<(i32, i32)> {
    Driver::get()?.describe()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_call_of_the_driver_gives_all_or_is_not_made() {
        use Method::{Alloc, Register};
        for (asked, can_register, in_one, want) in [
            (None, true, true, Some(Register)),
            (None, true, false, Some(Register)),
            (None, false, true, Some(Alloc)),
            (None, false, false, None),
            (Some(Alloc), true, true, Some(Alloc)),
            (Some(Alloc), true, false, Some(Register)),
            (Some(Alloc), false, true, Some(Alloc)),
            (Some(Alloc), false, false, None),
            (Some(Register), true, true, Some(Register)),
            (Some(Register), false, true, None),
            (Some(Register), false, false, None),
        ] {
            assert_eq!(choose(asked, can_register, in_one), want, "{asked:?} {can_register} {in_one}");
        }
    }
}
