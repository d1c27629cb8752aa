//! What holds the pages of a buffer in memory after it was made: locks on the host's mapping, on memory that a graph's values pass through, `mlock`.
//!
//! Owns: when each is done, for which buffers, and what is said. Must not know: how pages are locked.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use super::cuda_host::{limit, over_mappings, settings};
use super::{BufferType, CpuMmap, CudaHost, progress};
use crate::config;
use crate::log;
use crate::memory::Region;
use crate::memory::pinned::take_note;
use crate::report::{self, Fallback, human};

/// What was decided for one buffer, when its first tensor came: before that its use is not known.
#[derive(Default)]
pub(super) struct Hold(AtomicBool);

impl Hold {
    pub(super) fn decide(&self, name: &'static str, id: report::Id, region: &Region, compute: bool, lasting: bool) {
        if self.0.load(Ordering::Relaxed) || self.0.swap(true, Ordering::Relaxed) || region.is_empty() {
            return;
        }
        let Ok(config) = config::get() else { return };
        if compute && config.pin_staging && name == CpuMmap::name() {
            stage(id, region);
        } else if !compute {
            lock_in_memory(name, id, region, lasting);
        }
    }
}

/// Locks the memory through which values pass between the device `BERTH` and a GPU.
fn stage(id: report::Id, region: &Region) {
    let Ok(config) = config::get() else { return };
    match region.lock_memory(&settings(config), &mut |_| {}) {
        Ok(()) => {
            log::info!("BERTH: compute buffer of {} bytes ({}) page-locked", region.len(), human(region.len()));
            report::pinned(id, region.len());
        }
        Err(short) => {
            // A host makes these buffers anew again and again.
            static SAID: AtomicBool = AtomicBool::new(false);
            if !SAID.swap(true, Ordering::Relaxed) {
                log::warning!("BERTH: compute buffers are not page-locked (BERTH_PIN_STAGING): {}", short.message);
            }
        }
    }
}

/// Locks with `mlock` what is not page-locked, if the settings ask for it.
pub fn lock_in_memory(name: &'static str, id: report::Id, region: &Region, lasting: bool) {
    let Ok(config) = config::get() else { return };
    if !config.lock || region.is_empty() {
        return;
    }
    if lasting {
        log::warning!("{name}: {} bytes are not locked (BERTH_LOCK): what lies behind them may be exchanged for a kept file", region.len());
        return;
    }
    let from = report::pinned_bytes(id);
    let wanted = region.len() - from;
    if wanted == 0 {
        return;
    }
    let (bytes, why) = region.lock_in_memory(from, limit(config));
    report::locked(id, bytes.min(wanted));
    match why {
        None => log::info!("{name}: {wanted} bytes ({}) locked in memory", human(wanted)),
        Some(why) => {
            log::warning!("{name}: {} of {wanted} bytes locked in memory ({}): {why}", bytes.min(wanted), human(bytes.min(wanted)))
        }
    }
}

/// A buffer over a mapping that is to be locked when the load is over.
struct Waiting {
    id: report::Id,
    region: Weak<Region>,
}

static WAITING: Mutex<Vec<Waiting>> = Mutex::new(Vec::new());

fn waiting() -> MutexGuard<'static, Vec<Waiting>> {
    WAITING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A new buffer over the host's mapping. Its pages are locked at the end of the load: until then the host copies other tensors from the same
/// mapping to devices, and unmaps what it does not need.
pub(super) fn wait(name: &'static str, id: report::Id, region: &Arc<Region>) {
    if name == CudaHost::name() && over_mappings() {
        waiting().push(Waiting { id, region: Arc::downgrade(region) });
    }
}

/// The threads that lock pages of regions which others may free meanwhile.
static LOCKERS: Mutex<Vec<ThreadId>> = Mutex::new(Vec::new());
static LOCKED: Condvar = Condvar::new();

fn lockers() -> MutexGuard<'static, Vec<ThreadId>> {
    LOCKERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks the pages of the mapping that a region lies in, if it is there still.
fn lock_if_there(id: report::Id, region: &Weak<Region>) -> Result<(), Fallback> {
    let here = std::thread::current().id();
    let region = {
        let mut lockers = lockers();
        let Some(region) = region.upgrade() else { return Ok(()) };
        lockers.push(here);
        region
    };
    let locked = lock_mapping(id, &region);
    drop(region);
    let mut lockers = lockers();
    if let Some(at) = lockers.iter().position(|t| *t == here) {
        lockers.swap_remove(at);
    }
    LOCKED.notify_all();
    locked
}

/// Gives a region back. What lies behind it may be unmapped as soon as this returns, so it waits for a thread that locks its pages.
pub(super) fn end(mut region: Arc<Region>) {
    /// A thread that panics does not wake anybody.
    const LOOK: Duration = Duration::from_millis(100);
    let mut lockers = lockers();
    loop {
        match Arc::try_unwrap(region) {
            Ok(last) => {
                drop(lockers);
                return drop(last);
            }
            // It is freed by a log that is told of the locking: that ends when this has returned.
            Err(_) if lockers.contains(&std::thread::current().id()) => return,
            Err(shared) => region = shared,
        }
        lockers = LOCKED.wait_timeout(lockers, LOOK).unwrap_or_else(PoisonError::into_inner).0;
    }
}

/// A load is complete, and a context will be made: what waited for that is done.
pub fn loaded() {
    // No lock is held while it is done: a log may call back into us.
    let all = std::mem::take(&mut *waiting());
    for Waiting { id, region } in all {
        if let Err(fallback) = lock_if_there(id, &region) {
            if config::get().is_ok_and(|c| c.strict) {
                log::error!("{}: the mapping could not be page-locked, and it is too late to refuse it (BERTH_STRICT)", CudaHost::name());
            }
            report::fell_back(id, fallback);
        }
    }
}

/// Locks the pages of the mapping that a buffer lies in, and says so.
///
/// # Errors
/// Why they are not locked.
pub fn lock_mapping(id: report::Id, region: &Region) -> Result<(), Fallback> {
    let config = config::get().map_err(|e| Fallback { reason: report::Reason::PinOff, message: e.message })?;
    let started = Instant::now();
    let mut said = progress::Pin::begin(CudaHost::name());
    region.lock_mapping(&settings(config), &mut |step| said.step(step))?;
    said.end(started.elapsed(), region.len());
    log::info!("{}: {} bytes ({}) page-locked where they are mapped", CudaHost::name(), region.len(), human(region.len()));
    report::pinned(id, region.len());
    Ok(())
}

/// What could not be given back, if there is something: one line.
pub fn say_what_stays() {
    if let Some(note) = take_note() {
        log::warning!("{}: {note}", CudaHost::name());
    }
}
