//! Threads for the experts: those of the host where it lends them.
//!
//! Owns: [`Team`]. A host built with OpenMP has a team whose waiting members spin for a while after each of its regions; other threads on the
//! same processors would fight them. `GOMP_parallel`, called on the host's own thread, runs our work on that same team. Elsewhere a pool
//! of ours does, whose idle members sleep.
//!
//! The team is called once for a whole graph, and its members serve as a crew from then on: where a process has more OpenMP threads than
//! processors, every start and end of an OpenMP region is a system call on every member (libgomp hardly spins then).

use std::cell::Cell;
use std::ffi::{c_uint, c_void};

use crate::abi::{GompParallel, guard};
use crate::error::{Error, Result, Status};
use crate::moe::{Crew, ParallelFor, Pool, Serial};

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

    /// Calls `work` on this thread, with the threads at hand.
    ///
    /// # Errors
    /// Those of `work`.
    pub(super) fn gather<T>(&self, work: impl FnOnce(&dyn ParallelFor) -> Result<T>) -> Result<T> {
        if let Some(pool) = &self.pool {
            return work(pool);
        }
        let (Some(gomp), Ok(count)) = (self.gomp, c_uint::try_from(self.threads)) else { return work(&Serial) };
        if count < 2 {
            return work(&Serial);
        }
        let crew = Crew::new();
        let (work, result) = (Cell::new(Some(work)), Cell::new(None));
        let lead = || {
            if let Some(work) = work.take() {
                result.set(Some(work(&Led { crew: &crew, threads: self.threads })));
            }
        };
        let gathering = Gathering { crew: &crew, leader: here(), lead: &lead };
        // SAFETY: the address of OpenMP's own function; `member` takes the gathering, and the call returns after all members have.
        unsafe { gomp(member, (&raw const gathering).cast_mut().cast(), count, 0) };
        // Without a result, `work` has panicked, which `member` has logged.
        result.into_inner().unwrap_or_else(|| Err(Error::new(Status::Internal, "a defect, as logged")))
    }
}

/// Who comes together in one region of OpenMP.
struct Gathering<'a> {
    crew: &'a Crew,
    leader: *const u8,
    lead: &'a dyn Fn(),
}

/// The members of the host's team, led by the thread that called it.
struct Led<'a> {
    crew: &'a Crew,
    threads: usize,
}

impl ParallelFor for Led<'_> {
    fn threads(&self) -> usize {
        self.threads
    }

    fn run(&self, body: &(dyn Fn(usize) + Sync)) {
        self.crew.run(self.threads, body);
    }
}

/// An address that no other thread has meanwhile.
fn here() -> *const u8 {
    thread_local!(static HERE: u8 = const { 0 });
    HERE.with(std::ptr::from_ref)
}

unsafe extern "C" fn member(gathering: *mut c_void) {
    guard("a region of the host's OpenMP team", (), || {
        // SAFETY: `gather` passes its gathering, which lives until the team has left; only the thread that made it uses `lead`, which need
        // not be fit for others.
        let gathering = unsafe { &*gathering.cast::<Gathering<'_>>() };
        if gathering.leader == here() {
            gathering.crew.lead(|| (gathering.lead)());
        } else {
            gathering.crew.serve();
        }
    });
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// `GOMP_parallel` by threads of its own, of which it makes this many at most.
    unsafe fn parallel<const MOST: c_uint>(call: unsafe extern "C" fn(*mut c_void), data: *mut c_void, count: c_uint) {
        let data = data.expose_provenance();
        std::thread::scope(|s| {
            for _ in 1..count.min(MOST) {
                // SAFETY: as OpenMP calls it.
                s.spawn(move || unsafe { call(std::ptr::with_exposed_provenance_mut(data)) });
            }
            // SAFETY: likewise.
            unsafe { call(std::ptr::with_exposed_provenance_mut(data)) };
        });
    }

    unsafe extern "C" fn full(call: unsafe extern "C" fn(*mut c_void), data: *mut c_void, count: c_uint, _: c_uint) {
        // SAFETY: as the caller says.
        guard("full", (), || unsafe { parallel::<{ c_uint::MAX }>(call, data, count) });
    }

    unsafe extern "C" fn alone(call: unsafe extern "C" fn(*mut c_void), data: *mut c_void, count: c_uint, _: c_uint) {
        // SAFETY: as the caller says.
        guard("alone", (), || unsafe { parallel::<1>(call, data, count) });
    }

    fn team(threads: usize, gomp: Option<GompParallel>) -> Team {
        let mut team = Team::new();
        team.prepare(threads, gomp).unwrap();
        team
    }

    #[test]
    fn the_calling_thread_leads_and_every_call_is_made() {
        let openmp: [Option<GompParallel>; 3] = [None, Some(full), Some(alone)];
        for (gomp, threads) in openmp.into_iter().flat_map(|g| [1, 2, 5].map(|n| (g, n))) {
            let caller = std::thread::current().id();
            let made = AtomicUsize::new(0);
            let result = team(threads, gomp).gather(|all| {
                assert!(std::thread::current().id() == caller && all.threads() == threads);
                for _ in 0..50 {
                    all.run(&|i| {
                        made.fetch_add(1 << (8 * i), Ordering::Relaxed);
                    });
                }
                Ok(7)
            });
            assert_eq!(result.unwrap(), 7);
            assert_eq!(made.into_inner(), (0..threads).map(|i| 50 << (8 * i)).sum::<usize>());
        }
    }

    #[test]
    fn an_error_comes_back_and_so_does_a_panic_as_one() {
        for threads in [2, 3] {
            let team = team(threads, Some(full));
            assert_eq!(team.gather(|_| Err::<(), _>(Error::invalid("no"))).unwrap_err().message, "no");
            assert_eq!(team.gather(|_| -> Result<()> { panic!("the leader") }).unwrap_err().status, Status::Internal);
            let bad = team.gather(|all| {
                all.run(&|i| assert_ne!(i, 1));
                Ok(())
            });
            assert_eq!(bad.unwrap_err().status, Status::Internal);
        }
    }
}
