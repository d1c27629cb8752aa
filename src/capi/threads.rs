//! `berth_pool_*` and `struct berth_threads`: on whose threads a computation runs.
//!
//! A caller's own parallel-for is not trusted: a call that is missing, doubled or has a wrong number is an error of the computation, and can
//! reach no memory. Regions live on the stack, so that nothing is allocated.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};

use super::{input, status};
use crate::abi::guard;
use crate::error::{Error, Result, Status};
use crate::log;
use crate::moe::{self, ParallelFor, Serial};

/// Most threads of a computation.
pub const BERTH_MAX_THREADS: usize = 1024;

/// Threads that wait, without using the processor, for work.
pub struct Pool {
    pool: moe::Pool,
}

/// What a parallel-for has to call: with `task`, as it was given, and the number of the call.
pub type TaskFn = Option<unsafe extern "C" fn(task: *mut c_void, index: usize)>;

/// A parallel-for: calls `call(task, index)` once for each index from 0 to `count - 1`, on any threads, in any order, at once or not, and
/// returns when all these calls have returned. It must not throw, nor leave by longjmp.
pub type RunFn = Option<unsafe extern "C" fn(context: *mut c_void, count: usize, call: TaskFn, task: *mut c_void)>;

/// On whose threads a computation runs: a pool of this library, or the caller's. Results do not depend on it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Threads {
    /// `sizeof(struct berth_threads)`, set by the caller.
    pub struct_size: usize,
    /// Threads made by `berth_pool_new`; NULL if `run` is set.
    pub pool: *mut Pool,
    /// The caller's parallel-for; NULL if `pool` is set.
    pub run: RunFn,
    /// Handed to `run`.
    pub context: *mut c_void,
    /// How many calls `run` is asked for: as many as it has threads, from 1 to `BERTH_MAX_THREADS`. Not read with a pool.
    pub count: usize,
}

// SAFETY: `repr(C)`, begins with `struct_size`; numbers, pointers and a nullable function may be zero.
unsafe impl input::Versioned for Threads {
    const NAME: &'static str = "berth_threads";
    const FIELDS: &'static [usize] = input::offsets!(Threads, pool, run, context, count);
}

/// Makes a pool of `count` threads, one of which is whoever computes with it. Between computations its threads are blocked. Free with
/// `berth_pool_free`. It belongs to the process that made it: after a `fork` the child must neither use nor free it.
///
/// # Safety
/// `pool` must be NULL, which is an error, or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_pool_new(count: usize, pool: *mut *mut Pool) -> Status {
    status("berth_pool_new", || {
        let make = || Ok(Box::into_raw(Box::new(Pool { pool: moe::Pool::new(count)? })));
        // SAFETY: the caller vouches for `pool`.
        unsafe { input::output(pool, "pool", make) }
    })
}

/// How many threads the pool has; 0 for NULL.
///
/// # Safety
/// `pool` must be NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_pool_count(pool: *const Pool) -> usize {
    // SAFETY: the caller vouches for `pool`.
    guard("berth_pool_count", 0, || unsafe { pool.as_ref() }.map_or(0, |p| p.pool.threads()))
}

/// Calls `call(task, index)` once for each index below `berth_pool_count(pool)`, on the pool's threads, and returns when all have returned.
/// `call` must not throw. Using the same pool inside of it is an error.
///
/// # Safety
/// `pool` must be NULL, which is an error, or valid; `call` NULL, which is an error, or callable with `task` from any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_pool_run(pool: *mut Pool, call: TaskFn, task: *mut c_void) -> Status {
    status("berth_pool_run", || {
        // SAFETY: the caller vouches for `pool`. Shared: several threads may compute with one pool.
        let pool = unsafe { pool.as_ref() }.ok_or_else(|| Error::invalid("pool is NULL"))?;
        let call = call.ok_or_else(|| Error::invalid("call is NULL"))?;
        not_inside(pool)?;
        let task = Task(task);
        pool.pool.run(&|index| {
            let task = &task;
            // SAFETY: the caller vouches for function and pointer, on any thread.
            unsafe { call(task.0, index) };
        });
        Ok(())
    })
}

/// An error where the pool would wait for itself.
fn not_inside(pool: &Pool) -> Result<()> {
    if pool.pool.is_around() { Err(Error::invalid("the pool is used from inside a call that it is making")) } else { Ok(()) }
}

struct Task(*mut c_void);
// SAFETY: the pointer is only handed back to the caller's function, which must be callable from any thread.
unsafe impl Sync for Task {}

/// Ends the pool's threads and frees it. NULL is allowed.
///
/// # Safety
/// `pool` must be NULL, or valid, not in use, and not be used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_pool_free(pool: *mut Pool) {
    guard("berth_pool_free", (), || {
        if !pool.is_null() {
            // SAFETY: valid by the caller's promise.
            if unsafe { &*pool }.pool.is_around() {
                log::error!("berth_pool_free: the pool is used from inside a call that it is making; it is not freed");
                return;
            }
            // SAFETY: by the caller's promise, made by `berth_pool_new` and freed once.
            drop(unsafe { Box::from_raw(pool) });
        }
    });
}

/// Runs `body` on the threads that `threads` describes; NULL is the calling thread alone.
///
/// # Safety
/// `threads` must be NULL or point at a valid struct, whose pool is NULL or valid, and whose function keeps its promise.
pub(super) unsafe fn with(threads: *const Threads, body: impl FnOnce(&dyn ParallelFor) -> Result<()>) -> Result<()> {
    if threads.is_null() {
        return body(&Serial);
    }
    // SAFETY: the caller vouches for the struct.
    let threads = unsafe { input::get(threads) }?;
    // SAFETY: the caller vouches for the pool.
    match (unsafe { threads.pool.as_ref() }, threads.run) {
        (Some(_), Some(_)) => Err(Error::invalid("struct berth_threads: both a pool and a function")),
        (None, None) => Err(Error::invalid("struct berth_threads: neither a pool nor a function")),
        (Some(pool), None) => not_inside(pool).and_then(|()| body(&pool.pool)),
        (None, Some(run)) => {
            let count = threads.count;
            if !(1..=BERTH_MAX_THREADS).contains(&count) {
                return Err(Error::invalid(format!("struct berth_threads: {count} threads, allowed are 1 to {BERTH_MAX_THREADS}")));
            }
            let lent = Lent { run, context: threads.context, count, fault: AtomicU8::new(FAULT_NONE) };
            body(&lent)?;
            lent.verdict()
        }
    }
}

const FAULT_NONE: u8 = 0;
const FAULT_MISSING: u8 = 1;
const FAULT_TWICE: u8 = 2;
const FAULT_INDEX: u8 = 3;
const FAULT_PANIC: u8 = 4;

/// The caller's parallel-for.
struct Lent {
    run: unsafe extern "C" fn(*mut c_void, usize, TaskFn, *mut c_void),
    context: *mut c_void,
    count: usize,
    /// The first thing that went wrong. No region is started after it.
    fault: AtomicU8,
}

impl Lent {
    fn verdict(&self) -> Result<()> {
        let what = match self.fault.load(Ordering::Relaxed) {
            FAULT_NONE => return Ok(()),
            FAULT_MISSING => "did not make all calls",
            FAULT_TWICE => "made a call twice",
            FAULT_INDEX => "made a call with a number that is out of range",
            _ => return Err(Error::new(Status::Internal, "a task panicked on a thread of the caller; see the log")),
        };
        Err(Error::invalid(format!("struct berth_threads: the function {what}; the output is undefined")))
    }
}

impl ParallelFor for Lent {
    fn threads(&self) -> usize {
        self.count
    }

    fn run(&self, body: &(dyn Fn(usize) + Sync)) {
        if self.fault.load(Ordering::Relaxed) != FAULT_NONE {
            return;
        }
        let region =
            Region { body, count: self.count, made: Default::default(), inside: AtomicUsize::new(0), fault: AtomicU8::new(FAULT_NONE) };
        // SAFETY: the caller vouches for function and context; the region outlives all calls that keep the promise of `berth_run_fn`.
        unsafe { (self.run)(self.context, self.count, Some(enter), (&raw const region).cast_mut().cast()) };
        // A call that was begun and is not over is waited for, whatever the function promised: it uses this stack.
        while region.inside.load(Ordering::Acquire) != 0 {
            std::thread::yield_now();
        }
        let made: usize = region.made.iter().map(|word| word.load(Ordering::Relaxed).count_ones() as usize).sum();
        let fault = match region.fault.load(Ordering::Relaxed) {
            FAULT_NONE if made < self.count => FAULT_MISSING,
            fault => fault,
        };
        self.fault.store(fault, Ordering::Relaxed);
    }
}

/// One parallel-for under way.
struct Region<'a> {
    body: &'a (dyn Fn(usize) + Sync),
    count: usize,
    /// A bit per call.
    made: [AtomicU64; BERTH_MAX_THREADS / 64],
    /// Calls that have not returned.
    inside: AtomicUsize,
    fault: AtomicU8,
}

/// Leaves the region at the end of a call, however it ends.
struct Inside<'a>(&'a Region<'a>);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fault.store(FAULT_PANIC, Ordering::Relaxed);
        }
        self.0.inside.fetch_sub(1, Ordering::Release);
    }
}

impl Region<'_> {
    fn call(&self, index: usize) {
        self.inside.fetch_add(1, Ordering::Relaxed);
        let _inside = Inside(self);
        let fault = |kind| self.fault.store(kind, Ordering::Relaxed);
        if index >= self.count {
            return fault(FAULT_INDEX);
        }
        let bit = 1 << (index % 64);
        if self.made[index / 64].fetch_or(bit, Ordering::Relaxed) & bit != 0 {
            return fault(FAULT_TWICE);
        }
        (self.body)(index);
    }
}

/// What the caller's parallel-for calls.
unsafe extern "C" fn enter(task: *mut c_void, index: usize) {
    guard("a task of berth", (), || {
        // SAFETY: NULL, or the region that `Lent::run` gave out, which waits for its calls.
        if let Some(region) = unsafe { task.cast::<Region<'_>>().as_ref() } {
            region.call(index);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" fn each(context: *mut c_void, _: usize, call: TaskFn, task: *mut c_void) {
        guard("each", (), || {
            // SAFETY: the test's own list.
            let indices = unsafe { &*context.cast::<Vec<usize>>() };
            for index in indices {
                // SAFETY: as the library asks.
                unsafe { call.unwrap()(task, *index) };
            }
        });
    }

    fn fault_of(count: usize, mut indices: Vec<usize>, bad: usize) -> (Option<Status>, Vec<usize>) {
        let calls = std::sync::Mutex::new(Vec::new());
        let threads = Threads {
            struct_size: size_of::<Threads>(),
            pool: std::ptr::null_mut(),
            run: Some(each),
            context: (&raw mut indices).cast(),
            count,
        };
        let body = |threads: &dyn ParallelFor| {
            // A second region after a fault must not be started.
            for _ in 0..2 {
                threads.run(&|i| {
                    calls.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(i);
                    assert_ne!(i, bad);
                });
            }
            Ok(())
        };
        // SAFETY: all of it lives here.
        let status = unsafe { with(&raw const threads, body) }.err().map(|e| e.status);
        (status, calls.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    #[test]
    fn a_parallel_for_that_breaks_its_promise_is_an_error_and_is_not_used_again() {
        let none = usize::MAX;
        assert_eq!(fault_of(3, vec![2, 0, 1], none), (None, vec![2, 0, 1, 2, 0, 1]));
        assert_eq!(fault_of(3, vec![], none), (Some(Status::InvalidArgument), vec![]));
        assert_eq!(fault_of(3, vec![0, 2], none), (Some(Status::InvalidArgument), vec![0, 2]));
        assert_eq!(fault_of(3, vec![0, 1, 1, 2], none), (Some(Status::InvalidArgument), vec![0, 1, 2]));
        assert_eq!(fault_of(3, vec![0, 1, 2, 3], none), (Some(Status::InvalidArgument), vec![0, 1, 2]));
        assert_eq!(fault_of(3, vec![0, 1, 2, usize::MAX], none), (Some(Status::InvalidArgument), vec![0, 1, 2]));
        assert_eq!(fault_of(3, vec![0, 1, 2], 1), (Some(Status::Internal), vec![0, 1, 2]));
        assert_eq!(fault_of(1025, vec![0], none), (Some(Status::InvalidArgument), vec![]));
        assert_eq!(fault_of(0, vec![], none), (Some(Status::InvalidArgument), vec![]));
    }
}
