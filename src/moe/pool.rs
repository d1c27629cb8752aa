//! Threads: how a region of the operation runs on several of them.
//!
//! Owns: [`ParallelFor`], which a caller implements to lend its own threads (the plug-in: the host's OpenMP team), and [`Pool`], for those
//! who have none. Must not know: tasks, weights.
//!
//! A region ends when all its calls have returned; that is the operation's only kind of barrier, so an implementation may run the calls one
//! after the other, on fewer threads, or in any order. The pool's workers are a [`Crew`]: they spin for at most some 20 microseconds after a
//! region, then block, so that an idle pool costs nothing.

use std::cell::Cell;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::crew::Crew;
use crate::error::{Error, Result};

/// Runs a function on several threads.
pub trait ParallelFor {
    /// How many calls a region consists of; at least 1.
    fn threads(&self) -> usize;

    /// Calls `body(i)` once for every `i` in `0..threads()`, and returns when all calls have returned.
    fn run(&self, body: &(dyn Fn(usize) + Sync));
}

/// No other threads.
#[derive(Clone, Copy, Debug)]
pub struct Serial;

impl ParallelFor for Serial {
    fn threads(&self) -> usize {
        1
    }

    fn run(&self, body: &(dyn Fn(usize) + Sync)) {
        body(0);
    }
}

/// A region that the current thread is inside of, and the ones around it: a pool waits for its region, so that using it again from inside, on
/// whatever thread, would wait for ever.
struct Around {
    pool: *const Crew,
    outer: *const Around,
}

// SAFETY: `pool` is only compared; `outer` is a region that encloses this one, and is over later.
unsafe impl Sync for Around {}

thread_local! {
    static AROUND: Cell<*const Around> = const { Cell::new(std::ptr::null()) };
}

impl Around {
    /// Runs `body` inside of it.
    fn enter(&self, body: impl FnOnce()) {
        struct Leave(*const Around);
        impl Drop for Leave {
            fn drop(&mut self) {
                AROUND.set(self.0);
            }
        }
        let _leave = Leave(AROUND.replace(self));
        body();
    }
}

/// Worker threads that belong to one owner.
pub struct Pool {
    crew: Arc<Crew>,
    workers: Vec<JoinHandle<()>>,
    /// One region at a time.
    busy: Mutex<()>,
}

impl Pool {
    /// A pool of `threads` threads, one of them being whoever calls [`ParallelFor::run`].
    ///
    /// # Errors
    /// [`crate::error::Status::InvalidArgument`] for no or more than 1024 threads; the operating system's error if it gives no more threads.
    pub fn new(threads: usize) -> Result<Pool> {
        if !(1..=1024).contains(&threads) {
            return Err(Error::invalid(format!("a pool of {threads} threads")));
        }
        let mut pool = Pool { crew: Arc::new(Crew::new()), workers: Vec::new(), busy: Mutex::new(()) };
        for i in 1..threads {
            let crew = Arc::clone(&pool.crew);
            let worker = std::thread::Builder::new().name(format!("berth-{i}")).spawn(move || crew.serve());
            pool.workers.push(worker.map_err(|cause| Error::os("start a worker thread", &cause))?);
        }
        Ok(pool)
    }

    /// Whether the current thread is inside a region of this pool, or of one that such a region has started on another: it cannot run a
    /// further one then.
    pub fn is_around(&self) -> bool {
        let mut at = AROUND.get();
        // SAFETY: the regions around this thread's call are not over, so that all of the list is alive.
        while let Some(around) = unsafe { at.as_ref() } {
            if std::ptr::eq(around.pool, &raw const *self.crew) {
                return true;
            }
            at = around.outer;
        }
        false
    }
}

impl ParallelFor for Pool {
    fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// # Panics
    /// If a call panics, after all have ended; and inside of a region of the same pool ([`Pool::is_around`]).
    fn run(&self, body: &(dyn Fn(usize) + Sync)) {
        assert!(!self.is_around(), "a pool is used from inside its own region");
        let around = Around { pool: &raw const *self.crew, outer: AROUND.get() };
        let body = &|index: usize| around.enter(|| body(index));
        if self.workers.is_empty() {
            return body(0);
        }
        let _one_at_a_time = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        self.crew.run(self.threads(), body);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.crew.dismiss();
        for worker in self.workers.drain(..) {
            // A worker ends by itself; the crew lets no panic through.
            drop(worker.join());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn every_region_calls_every_index_once() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads).unwrap();
            for region in 0..200 {
                let calls: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
                pool.run(&|i| {
                    calls[i].fetch_add(region + 1, Ordering::Relaxed);
                });
                assert!(calls.iter().all(|c| c.load(Ordering::Relaxed) == region + 1));
                if region % 50 == 0 {
                    std::thread::sleep(std::time::Duration::from_millis(2));
                }
            }
        }
    }

    #[test]
    fn a_panic_in_a_call_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(3).unwrap();
        for bad in 0..3 {
            assert!(catch_unwind(AssertUnwindSafe(|| pool.run(&|i| assert_ne!(i, bad)))).is_err());
            let count = AtomicUsize::new(0);
            pool.run(&|_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.into_inner(), 3);
        }
    }

    #[test]
    fn a_pool_knows_the_regions_around_a_call_also_through_another_pool() {
        for threads in [1, 3] {
            let (a, b) = (Pool::new(threads).unwrap(), Pool::new(threads).unwrap());
            let seen = AtomicUsize::new(0);
            a.run(&|_| {
                assert!(a.is_around() && !b.is_around());
                b.run(&|_| {
                    assert!(a.is_around() && b.is_around());
                    seen.fetch_add(1, Ordering::Relaxed);
                });
                assert!(a.is_around() && !b.is_around());
            });
            assert_eq!(seen.into_inner(), threads * threads);
            assert!(catch_unwind(AssertUnwindSafe(|| a.run(&|_| a.run(&|_| {})))).is_err());
            assert!(!a.is_around() && !b.is_around());
            a.run(&|_| {});
        }
    }

    #[test]
    fn an_idle_pool_uses_no_processor_time() {
        let pool = Pool::new(4).unwrap();
        pool.run(&|_| {});
        std::thread::sleep(std::time::Duration::from_millis(20));
        let ticks = || -> u64 {
            let tasks = std::fs::read_dir("/proc/self/task").unwrap();
            let stats = tasks.filter_map(|t| std::fs::read_to_string(t.unwrap().path().join("stat")).ok());
            // utime is the 12th field after the name, which may hold spaces; stime is the next.
            let workers = stats.filter(|s| s.contains("(berth-"));
            workers
                .map(|s| s.rsplit(')').next().unwrap().split_whitespace().skip(11).take(2).map(|n| n.parse::<u64>().unwrap()).sum::<u64>())
                .sum()
        };
        let before = ticks();
        std::thread::sleep(std::time::Duration::from_millis(200));
        assert!(ticks() - before <= 1, "workers of other tests may add a tick, spinning would add 60");
    }
}
