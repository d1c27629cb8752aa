//! How threads that are there already share the calls of a region.
//!
//! Owns: [`Crew`]: one leader, who has regions to run, and any number of members, who serve until they are told to go. Must not know: where
//! the threads come from (a pool of ours, the host's OpenMP team).
//!
//! Calls are claimed, not assigned: a member that wakes late costs nothing, since the leader makes the calls that nobody else has begun. Who
//! waits spins for some 20 microseconds (the next region of the same operation follows at once), then blocks.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

/// Rounds of `spin_loop` before blocking.
const SPINS: u32 = 2000;

/// Most calls of a region: their number, and that of the next one, are halves of half a word.
pub(super) const MOST_CALLS: usize = u16::MAX as usize;

/// `state`: number of the region in the high half, calls of it, next call.
#[derive(Clone, Copy)]
struct State(u64);

impl State {
    /// No call is left, and none will come.
    const OVER: State = State(u64::MAX << 32);

    fn of(region: u64, calls: usize) -> State {
        State(region << 32 | (calls as u64) << 16)
    }

    fn region(self) -> u64 {
        self.0 >> 32
    }

    fn calls(self) -> usize {
        usize::from((self.0 >> 16) as u16)
    }

    fn next(self) -> usize {
        usize::from(self.0 as u16)
    }

    fn is_open(self) -> bool {
        self.next() < self.calls()
    }
}

/// The body of a region, with its lifetime forgotten.
struct Body<'a>(&'a (dyn Fn(usize) + Sync));

/// Where the leader's regions meet the members.
pub(crate) struct Crew {
    state: AtomicU64,
    body: AtomicPtr<Body<'static>>,
    /// Calls of the current region that have returned.
    returned: AtomicUsize,
    panicked: AtomicBool,
    /// Guards no data: who is about to block holds it from its last look at the state until it waits.
    blocking: Mutex<()>,
    /// Members that block or are about to.
    idle: AtomicUsize,
    more: Condvar,
    /// Whether the leader blocks or is about to.
    leader_waits: AtomicBool,
    all_returned: Condvar,
}

impl Crew {
    pub(crate) const fn new() -> Crew {
        Crew {
            state: AtomicU64::new(0),
            body: AtomicPtr::new(std::ptr::null_mut()),
            returned: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            blocking: Mutex::new(()),
            idle: AtomicUsize::new(0),
            more: Condvar::new(),
            leader_waits: AtomicBool::new(false),
            all_returned: Condvar::new(),
        }
    }

    fn state(&self) -> State {
        State(self.state.load(Ordering::SeqCst))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, ()> {
        self.blocking.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Publishes a state, and wakes who blocks because of the one before.
    fn publish(&self, state: State) {
        // Sequentially consistent, as in `wait_for_calls`: either this sees the member that is about to block, or the member sees the state.
        self.state.store(state.0, Ordering::SeqCst);
        if self.idle.load(Ordering::SeqCst) > 0 {
            drop(self.lock());
            self.more.notify_all();
        }
    }

    /// Makes calls of the current region until none is left.
    fn work(&self) {
        let mut state = self.state();
        while state.is_open() {
            let claimed = State(state.0 + 1);
            if let Err(now) = self.state.compare_exchange_weak(state.0, claimed.0, Ordering::SeqCst, Ordering::SeqCst) {
                state = State(now);
                continue;
            }
            // SAFETY: the claim has succeeded, so the region is the one whose body this is, and `run` keeps it alive until the call is counted.
            let body = unsafe { &*self.body.load(Ordering::Acquire) };
            if catch_unwind(AssertUnwindSafe(|| (body.0)(state.next()))).is_err() {
                self.panicked.store(true, Ordering::Relaxed);
            }
            if self.returned.fetch_add(1, Ordering::SeqCst) + 1 == state.calls() && self.leader_waits.load(Ordering::SeqCst) {
                drop(self.lock());
                self.all_returned.notify_one();
            }
            state = self.state();
        }
    }

    /// Makes calls of the leader's regions until it says that no more follow.
    pub(crate) fn serve(&self) {
        loop {
            self.work();
            if self.wait_for_calls().region() == State::OVER.region() {
                return;
            }
        }
    }

    /// Returns when there are calls to make, or will never be.
    fn wait_for_calls(&self) -> State {
        let ready = |state: State| state.is_open() || state.region() == State::OVER.region();
        for _ in 0..SPINS {
            let state = self.state();
            if ready(state) {
                return state;
            }
            std::hint::spin_loop();
        }
        let mut guard = self.lock();
        self.idle.fetch_add(1, Ordering::SeqCst);
        let state = loop {
            let state = self.state();
            if ready(state) {
                break state;
            }
            guard = self.more.wait(guard).unwrap_or_else(PoisonError::into_inner);
        };
        self.idle.fetch_sub(1, Ordering::SeqCst);
        drop(guard);
        state
    }

    /// Calls `body(i)` once for every `i` in `0..calls`, on this thread and on members, and returns when all calls have returned. There is one
    /// leader at a time.
    ///
    /// # Panics
    /// If a call panics, after all have ended; for more than [`MOST_CALLS`].
    pub(crate) fn run(&self, calls: usize, body: &(dyn Fn(usize) + Sync)) {
        assert!(calls <= MOST_CALLS);
        let body = Body(body);
        self.body.store((&raw const body).cast_mut().cast(), Ordering::Release);
        self.returned.store(0, Ordering::SeqCst);
        // The number only has to differ from those that a member may still remember; the highest means that all is over.
        let region = (self.state().region() + 1) % State::OVER.region();
        self.publish(State::of(region, calls));
        self.work();
        self.wait_for_returns(calls);
        assert!(!self.panicked.swap(false, Ordering::Relaxed), "a call of a region panicked");
    }

    fn wait_for_returns(&self, calls: usize) {
        let ready = || self.returned.load(Ordering::SeqCst) == calls;
        for _ in 0..SPINS {
            if ready() {
                return;
            }
            std::hint::spin_loop();
        }
        let mut guard = self.lock();
        self.leader_waits.store(true, Ordering::SeqCst);
        while !ready() {
            guard = self.all_returned.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.leader_waits.store(false, Ordering::SeqCst);
    }

    /// Sends the members away: no region follows.
    pub(crate) fn dismiss(&self) {
        self.publish(State::OVER);
    }

    /// Leads through `work`, and sends the members away, also if it panics.
    pub(crate) fn lead(&self, work: impl FnOnce()) {
        let result = catch_unwind(AssertUnwindSafe(work));
        self.dismiss();
        if let Err(panic) = result {
            resume_unwind(panic);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn every_call_is_made_once_however_many_members_there_are_and_whenever_they_come() {
        for (members, calls) in [(0, 3), (1, 1), (1, 2), (3, 2), (4, 5), (2, 64)] {
            let crew = Crew::new();
            std::thread::scope(|s| {
                for i in 0..members {
                    let crew = &crew;
                    s.spawn(move || {
                        std::thread::sleep(Duration::from_millis(i));
                        crew.serve();
                    });
                }
                crew.lead(|| {
                    for region in 0..if cfg!(miri) { 20 } else { 2000 } {
                        let made: Vec<AtomicUsize> = (0..calls).map(|_| AtomicUsize::new(0)).collect();
                        crew.run(calls, &|i| {
                            made[i].fetch_add(1, Ordering::Relaxed);
                        });
                        assert!(made.iter().all(|c| c.load(Ordering::Relaxed) == 1), "{members} {calls} {region}");
                        if region % 500 == 0 {
                            // Long enough for the members to block.
                            std::thread::sleep(Duration::from_millis(5));
                        }
                    }
                });
            });
            assert_eq!(crew.idle.into_inner(), 0);
        }
    }

    #[test]
    fn a_leader_that_waits_long_is_woken() {
        let crew = Crew::new();
        std::thread::scope(|s| {
            s.spawn(|| crew.serve());
            crew.lead(|| {
                for _ in 0..3 {
                    let leader = std::thread::current().id();
                    let others = AtomicUsize::new(0);
                    crew.run(2, &|_| {
                        if std::thread::current().id() == leader {
                            // The other call is begun by then.
                            while others.load(Ordering::SeqCst) == 0 {
                                std::hint::spin_loop();
                            }
                        } else {
                            others.store(1, Ordering::SeqCst);
                            std::thread::sleep(Duration::from_millis(20));
                        }
                    });
                    assert_eq!(crew.returned.load(Ordering::SeqCst), 2);
                }
            });
        });
    }

    #[test]
    fn a_panic_of_a_call_or_of_the_leader_ends_with_all_members_gone() {
        for bad in 0..4 {
            let crew = Crew::new();
            let result = std::thread::scope(|s| {
                s.spawn(|| crew.serve());
                s.spawn(|| crew.serve());
                catch_unwind(AssertUnwindSafe(|| {
                    crew.lead(|| {
                        crew.run(3, &|i| assert_ne!(i, bad));
                        panic!("the leader");
                    });
                }))
            });
            let text = *result.unwrap_err().downcast::<&str>().unwrap();
            assert_eq!(text, if bad == 3 { "the leader" } else { "a call of a region panicked" });
        }
    }
}
