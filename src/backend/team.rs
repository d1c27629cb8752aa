//! Threads for the experts: those of the host where it lends them.
//!
//! Owns: [`Team`]. A host built with OpenMP has a team whose waiting members spin for a while after each of its regions; other threads on the
//! same processors would fight them. `GOMP_parallel`, called on the host's own thread, runs our regions on that same team. Elsewhere a pool
//! of ours does, whose idle members sleep.

use std::ffi::{c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::abi::{GompParallel, guard};
use crate::error::Result;
use crate::moe::{ParallelFor, Pool};

/// The threads of one backend.
pub(super) struct Team {
    threads: usize,
    gomp: Option<GompParallel>,
    /// Made when it is first needed.
    pool: Option<Pool>,
}

impl Team {
    /// One thread, until told otherwise.
    pub(super) fn new() -> Team {
        Team { threads: 1, gomp: None, pool: None }
    }

    /// Gets ready for a graph on this many threads.
    ///
    /// # Errors
    /// If the pool cannot have that many.
    pub(super) fn prepare(&mut self, threads: usize, gomp: Option<GompParallel>) -> Result<()> {
        let pooled = gomp.is_none() && threads > 1;
        if !pooled {
            self.pool = None;
        } else if self.pool.as_ref().is_none_or(|p| p.threads() != threads) {
            self.pool = None;
            self.pool = Some(Pool::new(threads)?);
        }
        (self.threads, self.gomp) = (threads, gomp);
        Ok(())
    }
}

/// A region, as the members of the host's team see it.
struct Region<'a> {
    body: &'a (dyn Fn(usize) + Sync),
    next: AtomicUsize,
    count: usize,
    panicked: AtomicBool,
}

impl Region<'_> {
    /// Makes calls until none is left: the team may have fewer members than calls.
    fn work(&self) {
        loop {
            let i = self.next.fetch_add(1, Ordering::Relaxed);
            if i >= self.count {
                return;
            }
            if catch_unwind(AssertUnwindSafe(|| (self.body)(i))).is_err() {
                self.panicked.store(true, Ordering::Relaxed);
            }
        }
    }
}

unsafe extern "C" fn member(region: *mut c_void) {
    guard("a region of the host's OpenMP team", (), || {
        // SAFETY: `run` passes its region, which lives until the team has left.
        unsafe { &*region.cast::<Region<'_>>() }.work();
    });
}

impl ParallelFor for Team {
    fn threads(&self) -> usize {
        self.threads
    }

    fn run(&self, body: &(dyn Fn(usize) + Sync)) {
        if let Some(pool) = &self.pool {
            return pool.run(body);
        }
        let region = Region { body, next: AtomicUsize::new(0), count: self.threads, panicked: AtomicBool::new(false) };
        match (self.gomp, c_uint::try_from(self.threads)) {
            (Some(gomp), Ok(threads)) if threads > 1 => {
                // SAFETY: the address of OpenMP's own function; `member` takes the region, and the call returns after all members have.
                unsafe { gomp(member, (&raw const region).cast_mut().cast(), threads, 0) };
            }
            _ => region.work(),
        }
        assert!(!region.panicked.load(Ordering::Relaxed), "a member of the team panicked");
    }
}
