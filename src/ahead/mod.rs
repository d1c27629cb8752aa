//! Reading ahead what is not in memory: routed experts when their ids are known, and other weights when a model has been loaded.
//!
//! Owns: when it is worth a look, what is done where the kernel does not help, and the counts. The requests themselves are in
//! `memory::residency` and `memory::direct`, their order is in `moe::ahead`. Must not know: ggml.
//!
//! There are no threads of its own: whoever computes asks, all at once, since nobody has anything else to do before the experts are there.
//! Nothing spins, nothing has to be ended, and a fork leaves nothing behind.
//!
//! A look costs some 2 microseconds for an expert's matrix, which is 5 % of a block whose weights are all in memory. So nobody looks while
//! everything is: [`CALM`] calls without a miss end it, and the next major page fault of the process, which costs one system call to find
//! out, begins it again.

pub mod warm;

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::config::{self, ReadAhead};
use crate::error::{Error, Result, Status};
use crate::memory::direct::{Direct, Not};
use crate::memory::residency::{Calls, Usage, Wait};
use crate::memory::system;
use crate::moe::{Ahead, Asked, Span};
use crate::report::ahead::{COUNTS, Counts, Fallback, fall_back};

/// Calls without a miss after which nobody looks any more.
const CALM: u32 = 64;

/// Calls in a row in which pages had to be faulted in although the kernel said that all were there, after which it is not believed.
const DOUBT: u32 = 8;

/// What the user wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mode {
    read_ahead: ReadAhead,
    direct: bool,
}

/// Reads ahead, for any number of callers.
pub struct Reader {
    calls: Calls,
    mode: fn() -> Mode,
    direct: Direct,
    counts: &'static Counts,
    /// Calls left in which somebody looks.
    looks_left: AtomicU32,
    /// Major page faults at the end of the last call, and at the begin of the first.
    faults: AtomicU64,
    first: AtomicU64,
    begun: AtomicBool,
    /// What had been read at the begin of this call.
    read: AtomicU64,
    /// Bytes that were missing in this call.
    missed: AtomicU64,
    doubts: AtomicU32,
    /// The kernel does not tell what is in memory.
    hidden: AtomicBool,
    /// The kernel cannot wait for pages.
    no_wait: AtomicBool,
    /// Nanoseconds of all threads in this call.
    asking: AtomicU64,
    waiting: AtomicU64,
}

/// The one of this process.
pub static READER: Reader = Reader::new(Calls::KERNEL, configured, Direct::new(system::room), &COUNTS);

fn configured() -> Mode {
    config::get().map_or(Mode { read_ahead: ReadAhead::Off, direct: false }, |c| Mode { read_ahead: c.read_ahead, direct: c.direct })
}

/// A share of a range's bytes that is missing, in eighths, from which on all of it is read past the page cache: what is there is read once more then.
const MOSTLY: usize = 7;

impl Reader {
    const fn new(calls: Calls, mode: fn() -> Mode, direct: Direct, counts: &'static Counts) -> Reader {
        Reader {
            calls,
            mode,
            direct,
            counts,
            looks_left: AtomicU32::new(CALM),
            faults: AtomicU64::new(0),
            first: AtomicU64::new(0),
            begun: AtomicBool::new(false),
            read: AtomicU64::new(0),
            missed: AtomicU64::new(0),
            doubts: AtomicU32::new(0),
            hidden: AtomicBool::new(false),
            no_wait: AtomicBool::new(false),
            asking: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
        }
    }

    fn range(span: Span) -> Range<usize> {
        span.start()..span.start() + span.len()
    }

    fn usage(&self) -> Usage {
        (self.calls.usage)()
    }

    /// Asks for what is missing of a range, and says whether something was. Where the kernel does not tell, for all of it. With `may_copy` the
    /// bytes may come to another place.
    fn ask_for(&self, span: Span, may_copy: bool) -> Asked {
        let range = Self::range(span);
        let hidden = self.hidden.load(Ordering::Relaxed);
        let found = if hidden { Ok(Some((range.clone(), 0))) } else { self.calls.missing(range.clone()) };
        let (asked, missing) = match found {
            Ok(None) => return Asked::There,
            Ok(Some(found)) => found,
            Err(error) => {
                self.hide(&format!("the kernel does not tell what is in memory (error {error})"));
                (range, 0)
            }
        };
        Counts::add(&self.counts.missed_bytes, missing as u64);
        self.missed.fetch_add(missing as u64, Ordering::Relaxed);
        let mostly = missing > 0 && missing >= span.len() / 8 * MOSTLY;
        if may_copy
            && mostly
            && let Some(copy) = self.read_directly(span)
        {
            return Asked::Copy(copy);
        }
        Counts::add(&self.counts.asked_bytes, asked.len() as u64);
        if let Err(error) = self.calls.ask(asked) {
            let message =
                format!("the kernel takes no requests for these pages (error {error}); page faults read them one after the other");
            fall_back(Fallback::CannotAsk, &message);
        }
        Asked::Coming
    }

    fn ask_timed(&self, span: Span, may_copy: bool) -> Asked {
        let start = Instant::now();
        let asked = self.ask_for(span, may_copy);
        self.asking.fetch_add(Self::since(start), Ordering::Relaxed);
        asked
    }

    /// Has missing bytes read past the page cache, where that is better.
    fn read_directly(&self, span: Span) -> Option<NonNull<u8>> {
        if !(self.mode)().direct {
            return None;
        }
        match self.direct.bring(Self::range(span)) {
            Ok(copy) => {
                Counts::add(&self.counts.asked_bytes, span.len() as u64);
                Counts::add(&self.counts.direct_bytes, span.len() as u64);
                Some(copy)
            }
            Err(not) => {
                Self::tell(not);
                None
            }
        }
    }

    fn tell(not: Not) {
        if let Not::Broken(why) = not {
            fall_back(Fallback::NotDirect, &format!("{why}: missing experts are read through the page cache"));
        }
    }

    /// Gives back what is held for missing experts, if nobody computes.
    pub fn rest(&self) {
        self.direct.give_back();
    }

    fn hide(&self, why: &str) {
        self.hidden.store(true, Ordering::Relaxed);
        fall_back(Fallback::PagesHidden, &format!("{why}: all experts of a token are asked for, also those that are in memory"));
    }

    fn since(start: Instant) -> u64 {
        u64::try_from(start.elapsed().as_nanos()).unwrap_or(0)
    }
}

#[expect(unsafe_code, reason = "the promise about copies, which is `Direct`'s")]
// SAFETY: `Direct` keeps the memory of copies until every call that was begun has ended, lends no part of it twice before, and after a wait that
// succeeded nobody writes to it.
unsafe impl Ahead for Reader {
    fn begin(&self) -> bool {
        let mode = (self.mode)().read_ahead;
        if mode == ReadAhead::Off {
            return false;
        }
        let usage = self.usage();
        if !self.begun.swap(true, Ordering::Relaxed) {
            self.faults.store(usage.major, Ordering::Relaxed);
            self.first.store(usage.major, Ordering::Relaxed);
        }
        self.counts.major_faults.store(usage.major.saturating_sub(self.first.load(Ordering::Relaxed)), Ordering::Relaxed);
        // A fault since the last call: what was in memory is no more.
        if self.faults.swap(usage.major, Ordering::Relaxed) != usage.major {
            self.looks_left.store(CALM, Ordering::Relaxed);
        }
        if mode == ReadAhead::Auto && self.looks_left.load(Ordering::Relaxed) == 0 {
            return false;
        }
        self.read.store(usage.read, Ordering::Relaxed);
        self.missed.store(0, Ordering::Relaxed);
        Counts::add(&self.counts.looks, 1);
        self.direct.begin();
        true
    }

    fn ask(&self, weights: Span) -> bool {
        Counts::add(&self.counts.looked_bytes, weights.len() as u64);
        self.ask_timed(weights, false) != Asked::There
    }

    fn bring(&self, weights: Span) -> Asked {
        Counts::add(&self.counts.looked_bytes, weights.len() as u64);
        self.ask_timed(weights, true)
    }

    fn ask_again(&self, weights: Span) -> bool {
        // Where the kernel does not tell, all has been asked for.
        !self.hidden.load(Ordering::Relaxed) && self.ask_timed(weights, false) != Asked::There
    }

    fn seen(&self, hits: usize, misses: usize) {
        if !self.hidden.load(Ordering::Relaxed) {
            Counts::add(&self.counts.hits, hits as u64);
            Counts::add(&self.counts.misses, misses as u64);
        }
    }

    fn wait(&self, weights: Span) -> Result<()> {
        if self.no_wait.load(Ordering::Relaxed) {
            return Ok(());
        }
        let start = Instant::now();
        let range = Self::range(weights);
        // Under pressure the kernel gives up in the middle of a request, or takes a page back before it was used. Waiting would have such a page
        // read like a page fault, with up to 16 MiB around it. What is on its way already is not read twice.
        if let Ok(Some((missing, _))) = self.calls.missing(range.clone()) {
            let _ = self.calls.ask(missing);
        }
        let waited = self.calls.wait(range);
        self.waiting.fetch_add(Self::since(start), Ordering::Relaxed);
        match waited {
            // Who reads the bytes waits, too.
            Wait::There | Wait::Refused(_) => Ok(()),
            Wait::Unsupported => {
                self.no_wait.store(true, Ordering::Relaxed);
                fall_back(Fallback::CannotWait, "this kernel cannot wait for pages; page faults do, and the time is not counted");
                Ok(())
            }
            Wait::Lost => {
                let message = "weights of experts cannot be read: their file was truncated after it was mapped, or its disk fails";
                Err(Error::new(Status::Io, message))
            }
        }
    }

    fn wait_for_copy(&self, copy: Span) -> Result<()> {
        let start = Instant::now();
        let waited = self.direct.wait(Self::range(copy));
        self.waiting.fetch_add(Self::since(start), Ordering::Relaxed);
        waited.map(|not| not.into_iter().for_each(Self::tell))
    }

    fn end(&self, threads: usize) {
        self.direct.end();
        let usage = self.usage();
        let before = self.faults.swap(usage.major, Ordering::Relaxed);
        let missed = self.missed.load(Ordering::Relaxed) > 0;
        let hidden = self.hidden.load(Ordering::Relaxed);
        // Where the kernel does not tell, that something was read does.
        if missed || (hidden && usage.read != self.read.load(Ordering::Relaxed)) {
            self.looks_left.store(CALM, Ordering::Relaxed);
        } else {
            let left = self.looks_left.load(Ordering::Relaxed).saturating_sub(1);
            self.looks_left.store(left, Ordering::Relaxed);
            if left == 0 {
                self.direct.give_back();
            }
        }
        if !missed && !hidden && usage.major != before {
            if self.doubts.fetch_add(1, Ordering::Relaxed) + 1 == DOUBT {
                self.hide("the kernel says that all pages are in memory, and reads them at page faults");
            }
        } else {
            self.doubts.store(0, Ordering::Relaxed);
        }
        let per_thread = |total: &AtomicU64| {
            let time = Duration::from_nanos(total.swap(0, Ordering::Relaxed) / threads.max(1) as u64);
            u64::try_from(time.as_micros()).unwrap_or(0)
        };
        Counts::add(&self.counts.ask_us, per_thread(&self.asking));
        Counts::add(&self.counts.wait_us, per_thread(&self.waiting));
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::c_int;
    use std::ops::Range;
    use std::sync::Mutex;

    use super::*;

    /// What the kernel of a test does. One test at a time.
    struct Kernel {
        there: bool,
        /// After so many looks everything has gone.
        goes_after: usize,
        major: u64,
        read: u64,
        advised: Vec<c_int>,
        answer: c_int,
    }

    static KERNEL: Mutex<Kernel> =
        Mutex::new(Kernel { there: true, goes_after: usize::MAX, major: 0, read: 0, advised: Vec::new(), answer: 0 });
    static ONE: Mutex<()> = Mutex::new(());

    fn kernel() -> std::sync::MutexGuard<'static, Kernel> {
        KERNEL.lock().unwrap()
    }

    const CALLS: Calls = Calls {
        look: |_: Range<usize>, there: &mut [u8]| {
            let mut kernel = kernel();
            kernel.goes_after = kernel.goes_after.saturating_sub(1);
            there.fill(u8::from(kernel.there && kernel.goes_after > 0));
            0
        },
        advise: |_, advice| {
            let mut kernel = kernel();
            kernel.advised.push(advice);
            if advice == libc_wait() { kernel.answer } else { 0 }
        },
        usage: || {
            let kernel = kernel();
            Usage { major: kernel.major, read: kernel.read }
        },
    };

    fn libc_wait() -> c_int {
        crate::memory::residency::WAIT
    }

    fn only(read_ahead: ReadAhead) -> Mode {
        Mode { read_ahead, direct: true }
    }

    fn set(change: impl FnOnce(&mut Kernel)) {
        change(&mut kernel());
    }

    fn reader(mode: fn() -> Mode) -> (Reader, &'static Counts) {
        set(|k| *k = Kernel { there: true, goes_after: usize::MAX, major: 10, read: 0, advised: Vec::new(), answer: 0 });
        let counts = Box::leak(Box::default());
        (Reader::new(CALLS, mode, Direct::new(|| u64::MAX), counts), counts)
    }

    /// One call with one expert; whether anybody looked, and whether it was missing.
    fn call(reader: &Reader) -> Option<bool> {
        let span = Span::of(std::ptr::without_provenance(1 << 20), 3 << 20).unwrap();
        reader.begin().then(|| {
            let missing = reader.ask(span);
            assert!(!missing || reader.wait(span).is_ok());
            reader.seen(usize::from(!missing), usize::from(missing));
            reader.end(2);
            missing
        })
    }

    fn count(count: &AtomicU64) -> u64 {
        count.load(Ordering::Relaxed)
    }

    #[test]
    fn nobody_looks_while_nothing_is_missing_and_a_page_fault_begins_it_again() {
        let _one = ONE.lock().unwrap();
        let (reader, counts) = reader(|| only(ReadAhead::Auto));
        for _ in 0..CALM {
            assert_eq!(call(&reader), Some(false));
        }
        assert_eq!(call(&reader), None);
        set(|k| (k.major, k.there) = (11, false));
        for _ in 0..3 {
            assert_eq!(call(&reader), Some(true));
        }
        set(|k| k.there = true);
        assert_eq!((0..2 * CALM).map_while(|_| call(&reader)).count(), CALM as usize);
        assert_eq!(call(&reader), None);
        assert_eq!((count(&counts.hits), count(&counts.misses)), (2 * u64::from(CALM), 3));
        assert_eq!((count(&counts.missed_bytes), count(&counts.asked_bytes)), (9 << 20, 9 << 20));
        assert_eq!((count(&counts.looks), count(&counts.major_faults)), (2 * u64::from(CALM) + 3, 1));
    }

    #[test]
    fn on_looks_always_and_off_never() {
        let _one = ONE.lock().unwrap();
        let (on, _) = reader(|| only(ReadAhead::On));
        assert!((0..3 * CALM).all(|_| call(&on) == Some(false)));
        let (off, counts) = reader(|| only(ReadAhead::Off));
        set(|k| (k.there, k.major) = (false, 99));
        assert_eq!(call(&off), None);
        assert!(kernel().advised.is_empty() && count(&counts.looks) == 0);
    }

    #[test]
    fn a_kernel_that_hides_pages_is_found_out_and_everything_is_asked_for() {
        let _one = ONE.lock().unwrap();
        let (reader, counts) = reader(|| only(ReadAhead::Auto));
        let fault = |_| {
            assert!(reader.begin());
            reader.ask(Span::of(std::ptr::without_provenance(1 << 20), 4096).unwrap());
            set(|k| k.major += 1);
            reader.seen(1, 0);
            reader.end(1);
        };
        // Other faults in between are no proof.
        (1..DOUBT).for_each(fault);
        assert_eq!(call(&reader), Some(false));
        (1..DOUBT).for_each(fault);
        assert!(!reader.hidden.load(Ordering::Relaxed) && kernel().advised.is_empty());
        fault(0);
        assert!(reader.hidden.load(Ordering::Relaxed));
        let (hits, looks) = (count(&counts.hits), count(&counts.looks));
        assert_eq!(call(&reader), Some(true));
        assert_eq!((count(&counts.asked_bytes), count(&counts.missed_bytes)), (3 << 20, 0));
        assert_eq!((count(&counts.hits), count(&counts.looks)), (hits, looks + 1), "what is not known is not counted");
        // It goes on as long as something is read.
        for _ in 0..2 * CALM {
            let before = reader.read.load(Ordering::Relaxed);
            assert!(reader.begin() && reader.read.load(Ordering::Relaxed) >= before);
            set(|k| k.read += 4096);
            reader.end(1);
        }
        assert_eq!((0..2 * CALM).map_while(|_| call(&reader)).count(), CALM as usize);
    }

    #[test]
    fn a_kernel_that_does_not_tell_at_all_is_asked_for_everything() {
        let _one = ONE.lock().unwrap();
        let (reader, counts) = reader(|| only(ReadAhead::Auto));
        let reader = Reader { calls: Calls { look: |_, _| 12, ..CALLS }, ..reader };
        assert_eq!(call(&reader), Some(true));
        assert!(reader.hidden.load(Ordering::Relaxed));
        assert_eq!(count(&counts.asked_bytes), 3 << 20);
    }

    #[test]
    fn what_has_gone_since_it_was_there_is_asked_for_and_counted_once() {
        let _one = ONE.lock().unwrap();
        let (reader, counts) = reader(|| only(ReadAhead::Auto));
        let span = Span::of(std::ptr::without_provenance(1 << 20), 4096).unwrap();
        set(|k| k.goes_after = 3);
        assert!(reader.begin() && !reader.ask(span) && !reader.ask_again(span));
        assert!(kernel().advised.is_empty());
        assert!(reader.ask_again(span) && reader.wait(span).is_ok());
        reader.end(1);
        assert_eq!((count(&counts.looked_bytes), count(&counts.missed_bytes), count(&counts.asked_bytes)), (4096, 4096, 4096));
        // Who waits asks again before, as the kernel may have given up on the first request, and never has anything read around it.
        let advised = kernel().advised.clone();
        assert_eq!(advised, [libc::MADV_WILLNEED, libc::MADV_WILLNEED, libc_wait()]);
        set(|k| (k.goes_after, k.advised) = (usize::MAX, Vec::new()));
        assert!(reader.wait(span).is_ok());
        assert_eq!(kernel().advised, [libc_wait()], "all is there by then");
    }

    #[test]
    fn an_old_kernel_is_not_asked_to_wait_again() {
        let _one = ONE.lock().unwrap();
        let (reader, _) = reader(|| only(ReadAhead::Auto));
        set(|k| (k.there, k.answer) = (false, 22));
        assert_eq!((call(&reader), call(&reader)), (Some(true), Some(true)));
        assert_eq!(kernel().advised.iter().filter(|a| **a == libc_wait()).count(), 1);
    }

    #[test]
    fn bytes_that_cannot_be_had_are_an_error() {
        let _one = ONE.lock().unwrap();
        let (reader, _) = reader(|| only(ReadAhead::Auto));
        set(|k| (k.there, k.answer) = (false, 14));
        assert!(reader.begin());
        let span = Span::of(std::ptr::without_provenance(1 << 20), 4096).unwrap();
        assert!(reader.ask(span));
        let error = reader.wait(span).unwrap_err();
        assert!(error.status == Status::Io && error.message.contains("truncated"), "{error}");
    }
    #[test]
    fn experts_that_are_mostly_missing_come_past_the_page_cache_and_others_do_not() {
        if let Err(error) = crate::memory::aio::Queue::new(1) {
            return eprintln!("SKIPPED: no asynchronous reads here (error {error})");
        }
        let _one = ONE.lock().unwrap();
        let (reader, counts) = reader(|| only(ReadAhead::On));
        // Of 64 pages in a row one is there.
        fn mostly(range: Range<usize>, there: &mut [u8]) -> c_int {
            for (i, page) in there.iter_mut().enumerate() {
                *page = u8::from((range.start / 4096 + i).is_multiple_of(64));
            }
            0
        }
        let reader = Reader { calls: Calls { look: mostly, ..CALLS }, direct: Direct::for_tests(|| 0), ..reader };
        let sample = crate::memory::testing::Sample::new("reader", 4 << 20);
        let map = crate::memory::mapping::FileMapping::open(&sample.path).unwrap();
        let span = |at: usize, len: usize| Span::of(map.bytes()[at..].as_ptr(), len).unwrap();
        assert!(reader.begin());
        let (mut copied, mut through) = (0, 0);
        for expert in (0..40).chain(30..40) {
            let (at, len) = (5000 * expert + 7, 60_000 + expert);
            match reader.bring(span(at, len)) {
                Asked::Copy(copy) => {
                    copied += len as u64;
                    let all = Span::of(copy.as_ptr(), len).unwrap();
                    reader.wait_for_copy(all).unwrap();
                    // SAFETY: these bytes are there until the call ends.
                    #[expect(unsafe_code, reason = "what was read is looked at")]
                    let bytes = unsafe { std::slice::from_raw_parts(copy.as_ptr(), len) };
                    assert!(bytes == &sample.bytes[at..at + len], "{expert}");
                }
                Asked::Coming => through += 1,
                Asked::There => panic!("{expert} is not there"),
            }
        }
        assert!(copied > 0 && through == 10, "{through} came the second time");
        assert_eq!(count(&counts.direct_bytes), copied);
        assert!(count(&counts.missed_bytes) >= copied * 7 / 8 && count(&counts.asked_bytes) >= copied);
        assert_eq!(kernel().advised.len(), through, "nothing is read twice");
        reader.end(1);
        // One page of two is there.
        let page = (1..512).map(|i| 4096 * i).find(|at| (span(*at, 1).start() / 4096).is_multiple_of(64)).unwrap();
        assert!(reader.begin());
        assert_eq!(reader.bring(span(page, 8192)), Asked::Coming);
        assert!(reader.ask(span(page + 4096, 8192)), "who does not wait gets no copy");
        reader.end(1);
        // The user does not want it, and the kernel hides it.
        let off = Reader { mode: || Mode { read_ahead: ReadAhead::On, direct: false }, ..reader };
        assert!(off.begin() && off.bring(span(page + 4096, 8192)) == Asked::Coming);
        off.end(1);
        let hidden = Reader { calls: Calls { look: |_, _| 12, ..CALLS }, mode: || only(ReadAhead::On), ..off };
        assert!(hidden.begin() && hidden.bring(span(page + 4096, 8192)) == Asked::Coming);
        hidden.end(1);
        assert_eq!(count(&counts.direct_bytes), copied);
    }
}
