//! Pages that are there, locked by the CUDA driver, in chunks.
//!
//! Owns: the chunks, how large the next one is, when it is given up, and that each is undone once. Must not know: whose memory it is.
//!
//! A chunk has at most 64 GiB: one call for more than 2^39 bytes fails on new drivers, and while a call is under way nothing can be said and nothing
//! stopped. They start small and grow with the rate, so that a call takes a few seconds.
//!
//! A copy whose bytes are locked in part is refused by CUDA (`CUDA_ERROR_INVALID_VALUE`: "must be either entirely registered with CUDA, or [..] not
//! registered at all", in the documentation of the copies), and llama.cpp ends the process then. So what is locked must end where a tensor ends:
//! [`Registered::keep_whole`].

use std::ffi::c_uint;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::HUGE_PAGE;
use super::budget::Locked;
use super::driver::Context;
use super::input::page_size;
use super::numa;
use super::populate::{Touch, populate};
use crate::error::{Error, Status};

/// Most bytes of one call.
pub(super) const LARGEST: usize = 64 << 30;

/// Bytes of the first call, and the least that is tried after a refusal.
pub(super) const FIRST: usize = 256 << 20;

/// What a call should take: long enough to cost nothing, short enough to show something in between.
const CALL: f64 = 4.0;

/// Bytes per second below which it is not worth to go on: a load at this rate takes longer than reading from most disks.
const SLOWEST: f64 = 0.25e9;

/// How long a slow one is waited for.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why less was locked than was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// There is no driver or no device that can do it.
    NoDriver,
    /// The limit.
    Budget,
    /// It took too long.
    TooSlow,
    /// The driver or the kernel refused.
    Refused,
}

/// Less was locked than was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortfall {
    /// The class.
    pub why: Why,
    /// In words.
    pub message: String,
    /// Whether pages are locked that could not be unlocked: they must stay mapped.
    pub stays: bool,
}

impl Shortfall {
    pub(super) fn new(why: Why, message: impl Into<String>) -> Shortfall {
        Shortfall { why, message: message.into(), stays: false }
    }
}

impl From<Error> for Shortfall {
    fn from(error: Error) -> Shortfall {
        Shortfall::new(if error.status == Status::Unsupported { Why::NoDriver } else { Why::Refused }, error.message)
    }
}

/// Whether it goes fast enough.
pub(super) struct Pace {
    started: Instant,
}

impl Pace {
    pub(super) fn start() -> Pace {
        Pace { started: Instant::now() }
    }

    /// Why to stop after so many bytes, if there is a reason to.
    pub(super) fn check(&self, bytes: u64) -> std::result::Result<(), Shortfall> {
        Pace::judge(bytes, self.started.elapsed())
    }

    /// The same for a call that cannot be stopped, from what a part of it took.
    pub(super) fn expect(part: usize, len: usize, took: Duration) -> std::result::Result<(), Shortfall> {
        let whole = took.as_secs_f64() * (len as f64 / part as f64);
        Pace::judge(len as u64, Duration::try_from_secs_f64(whole).unwrap_or(Duration::MAX))
    }

    fn judge(bytes: u64, took: Duration) -> std::result::Result<(), Shortfall> {
        let seconds = took.as_secs_f64();
        if took < PATIENCE || bytes as f64 >= SLOWEST * seconds {
            return Ok(());
        }
        let rate = bytes as f64 / seconds / 1e9;
        Err(Shortfall::new(
            Why::TooSlow,
            format!(
                "page-locking goes at {rate:.3} GB/s ({bytes} bytes in {seconds:.0} s), less than {:.2} GB/s, and was given up",
                SLOWEST / 1e9
            ),
        ))
    }

    /// The next call after one for `last` bytes, when `done` bytes are locked.
    fn next(last: usize, done: usize, took: Duration) -> usize {
        let in_time = done as f64 / took.as_secs_f64().max(1e-9) * CALL;
        let next = (in_time.min(LARGEST as f64) as usize).min(last.saturating_mul(4)).clamp(FIRST, LARGEST);
        next / HUGE_PAGE * HUGE_PAGE
    }
}

/// Most bytes of one call on a NUMA node with so many left: whole huge pages, so that the next call starts on one.
fn piece_of(left: u64) -> usize {
    (usize::try_from(left).unwrap_or(usize::MAX) / HUGE_PAGE * HUGE_PAGE).max(FIRST)
}

#[derive(Clone, Copy)]
struct Chunk {
    base: *mut u8,
    len: usize,
}

/// What could not be done when memory was given back. Whoever may speak asks for it.
static NOTE: Mutex<Option<String>> = Mutex::new(None);

/// What went wrong when memory was given back, once.
pub fn take_note() -> Option<String> {
    NOTE.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take()
}

pub(super) fn note(text: impl Into<String>) {
    NOTE.lock().unwrap_or_else(std::sync::PoisonError::into_inner).get_or_insert(text.into());
}

/// Chunks of locked pages. They must be released before the pages are unmapped.
pub(super) struct Registered {
    context: Context,
    flags: c_uint,
    chunks: Vec<Chunk>,
    locked: Locked,
    /// Something could not be unlocked, and never will be.
    stuck: bool,
}

// SAFETY: the chunks are addresses for the driver, which may be called from any thread.
unsafe impl Send for Registered {}

impl Registered {
    /// None yet; `locked` says how many may be.
    pub(super) fn new(context: Context, flags: c_uint, locked: Locked) -> Registered {
        Registered { context, flags, chunks: Vec::new(), locked, stuck: false }
    }

    /// Bytes that are locked.
    pub(super) fn bytes(&self) -> usize {
        usize::try_from(self.locked.bytes()).unwrap_or(usize::MAX)
    }

    /// Locks `len` bytes from `base` on, both multiples of the page; `touch` says how the pages are brought in before, if they are. Where several
    /// NUMA nodes give memory, `nodes` says how much each. `progress` gets the bytes that are done. What was locked before an error stays so.
    ///
    /// # Safety
    /// The range must stay mapped until [`Registered::release`]; as [`populate`] for `touch`.
    pub(super) unsafe fn lock(
        &mut self,
        base: *mut u8,
        len: usize,
        touch: Option<Touch>,
        nodes: Vec<(u32, u64)>,
        progress: &mut dyn FnMut(u64),
    ) -> std::result::Result<(), Shortfall> {
        // SAFETY: by the caller's promise.
        let locked = unsafe { self.lock_chunks(base, len, touch, nodes, progress) };
        self.locked.settle();
        locked
    }

    /// # Safety
    /// As [`Registered::lock`].
    unsafe fn lock_chunks(
        &mut self,
        base: *mut u8,
        len: usize,
        touch: Option<Touch>,
        mut nodes: Vec<(u32, u64)>,
        progress: &mut dyn FnMut(u64),
    ) -> std::result::Result<(), Shortfall> {
        let pace = Pace::start();
        let (mut size, mut largest, mut done, mut touched) = (FIRST, LARGEST, 0, 0);
        while done < len {
            let mut n = size.min(len - done);
            let at = base.wrapping_add(done);
            if let Some(touch) = touch.filter(|_| touched < done + n) {
                let node = nodes.iter_mut().max_by_key(|(_, left)| *left);
                if let Some((node, left)) = node {
                    n = n.min(piece_of(*left));
                    *left = left.saturating_sub(n as u64);
                    numa::suggest(at, n, *node);
                }
                let mut slow = Ok(());
                // Bringing in is half of the work.
                let mut go_on = |there: u64| {
                    let so_far = done as u64 + there / 2;
                    progress(so_far);
                    slow = pace.check(so_far);
                    slow.is_ok()
                };
                // SAFETY: by the caller's promise.
                let all = unsafe { populate(at, n, touch, &mut go_on) }?;
                slow?;
                debug_assert!(all);
                touched = done + n;
            }
            // SAFETY: by the caller's promise.
            match unsafe { self.context.register(at, n, self.flags) } {
                Ok(()) => {
                    self.chunks.push(Chunk { base: at, len: n });
                    done += n;
                    self.locked.set(self.locked.bytes() + n as u64);
                    progress(done as u64);
                }
                // A driver may have less than the machine, as under WSL: then half of it may do.
                Err(refused) if refused.memory && n > FIRST => {
                    largest = (n / 2).next_multiple_of(HUGE_PAGE);
                    size = largest;
                    continue;
                }
                Err(refused) if refused.already => {
                    let message = format!("somebody else has locked pages of it: {}", refused.error.message);
                    return Err(Shortfall::new(Why::Refused, message));
                }
                Err(refused) => return Err(refused.error.into()),
            }
            if self.context.is_lost() && done < len {
                return Err(Shortfall::new(Why::Refused, "the CUDA driver does not give back its context"));
            }
            if done < len {
                pace.check(done as u64)?;
            }
            size = Pace::next(n, done, pace.started.elapsed()).min(largest);
        }
        Ok(())
    }

    /// Sees to it that `len` bytes at `start` are locked as a whole or not at all: what is locked, from the first chunk on without a gap, ends before
    /// them if it would end inside. Whether it has changed.
    pub(super) fn keep_whole(&mut self, start: *mut u8, len: usize) -> bool {
        let page = page_size();
        let Some(end) = self.chunks.last().map(|c| c.base.addr() + c.len) else { return false };
        if start.addr() >= end || start.addr().saturating_add(len) <= end {
            return false;
        }
        let stop = start.addr() / page * page;
        while let Some(chunk) = self.chunks.last().copied().filter(|c| c.base.addr() + c.len > stop) {
            if !self.undo_last() {
                return true;
            }
            let rest = stop.saturating_sub(chunk.base.addr());
            // SAFETY: a part of what was locked a moment ago.
            if rest > 0 && unsafe { self.context.register(chunk.base, rest, self.flags) }.is_ok() {
                self.chunks.push(Chunk { len: rest, ..chunk });
                self.locked.set(self.locked.bytes() + rest as u64);
            } else if rest > 0 {
                // Now it ends somewhere inside of another tensor.
                self.release();
            }
        }
        true
    }

    /// Unlocks the last chunk. False if it is locked still.
    fn undo_last(&mut self) -> bool {
        let Some(chunk) = self.chunks.last().copied() else { return false };
        // SAFETY: the chunk was locked with this address, and is unlocked once; whoever frees memory has no transfer under way.
        let undone = unsafe { self.context.unregister(chunk.base) };
        if undone {
            self.chunks.pop();
            self.locked.set(self.locked.bytes() - chunk.len as u64);
        }
        undone
    }

    /// Unlocks all, one chunk after the other. False if something is locked still: then its pages must stay mapped.
    pub(super) fn release(&mut self) -> bool {
        if self.chunks.is_empty() {
            return !self.stuck;
        }
        if self.context.is_another_process() {
            self.locked.set(0);
            self.chunks.clear();
            self.stuck = true;
            note(
                "this process was forked from the one that page-locked its memory: the CUDA driver is not called, and the memory left as it is",
            );
            return false;
        }
        let before = self.bytes();
        while self.undo_last() {}
        if self.chunks.is_empty() {
            return !self.stuck;
        }
        note(format!("{} of {before} bytes stay page-locked: the CUDA driver does not unlock them", self.bytes()));
        // Once is enough: after an error that is for ever it must not be asked again.
        self.chunks.clear();
        self.stuck = true;
        false
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::budget::{Limit, Pages};
    use crate::memory::pinned::Settings;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn calls_grow_with_the_rate_and_never_beyond_64_gib() {
        let mut sizes = vec![FIRST];
        let mut done = 0;
        for _ in 0..8 {
            done += sizes.last().unwrap();
            sizes.push(Pace::next(*sizes.last().unwrap(), done, Duration::from_nanos(1)));
        }
        let gib: Vec<f64> = sizes.iter().map(|s| *s as f64 / (1u64 << 30) as f64).collect();
        assert_eq!(gib, [0.25, 1.0, 4.0, 16.0, 64.0, 64.0, 64.0, 64.0, 64.0]);
        // 2 GiB/s: 8 GiB at a time.
        assert_eq!(Pace::next(8 << 30, 20 << 30, 10 * SECOND), 8 << 30);
        assert_eq!(Pace::next(FIRST, FIRST, 100 * SECOND), FIRST);
        assert_eq!(Pace::next(LARGEST, 1 << 40, SECOND), LARGEST);
    }

    #[test]
    fn a_slow_one_is_given_up_after_a_bound_and_a_slow_start_is_not() {
        for (bytes, seconds, stops) in
            [(0, 9, false), (0, 10, true), (2_400_000_000, 10, true), (2_600_000_000, 10, false), (1 << 40, 1000, false)]
        {
            let judged = Pace::judge(bytes, seconds * SECOND);
            assert_eq!(judged.as_ref().err().map(|s| s.why), stops.then_some(Why::TooSlow), "{bytes} in {seconds}");
        }
        let message = Pace::judge(1_000_000_000, 20 * SECOND).unwrap_err().message;
        assert!(message.contains("0.050 GB/s (1000000000 bytes in 20 s)"), "{message}");
    }

    #[test]
    fn a_note_is_told_once() {
        note("first");
        note("second");
        assert_eq!((take_note().as_deref(), take_note()), (Some("first"), None));
    }

    /// Where the fake driver's calls go; set in the process that [`hundreds_of_gib_are_locked_in_chunks_that_new_drivers_take`] starts.
    const LOG: &str = "FAKE_CUDA_LOG";

    /// Address space without memory behind it, which nobody touches.
    struct Reserved(*mut u8, usize);

    impl Reserved {
        fn new(len: usize) -> Reserved {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            // SAFETY: a new mapping at an address of the kernel's choice.
            let base = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_NONE, flags, -1, 0) };
            assert_ne!(base, libc::MAP_FAILED);
            Reserved(base.cast(), len)
        }
    }

    impl Drop for Reserved {
        fn drop(&mut self) {
            // SAFETY: the mapping made in `new`.
            unsafe { libc::munmap(self.0.cast(), self.1) };
        }
    }

    #[test]
    fn hundreds_of_gib_are_locked_in_chunks_that_new_drivers_take() {
        let dir = tempfile::tempdir().unwrap();
        let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("ffi-tests/c/fake_cuda.c");
        let mut compile = std::process::Command::new("cc");
        compile.args(["-std=c11", "-O1", "-pthread", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"]);
        let built = compile.arg(dir.path().join("libcuda.so.1")).arg(source).status().expect("cc is missing: apt-get install gcc");
        assert!(built.success());
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "memory::registered::tests::in_the_process_with_the_fake_driver", "--ignored"]);
        let log = dir.path().join("calls");
        let output = child.env("LD_LIBRARY_PATH", dir.path()).env(LOG, &log).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}{}", String::from_utf8_lossy(&output.stderr));
        let calls = std::fs::read_to_string(log).unwrap();
        let sizes = |name: &str| -> Vec<usize> {
            let fields = calls.lines().map(|l| l.split(' ').collect::<Vec<_>>());
            fields.filter(|f| f[1] == name && f[2] == "0").map(|f| f[4].parse().unwrap()).collect()
        };
        let (mut locked, mut unlocked) = (sizes("cuMemHostRegister"), sizes("cuMemHostUnregister"));
        assert!(
            locked.iter().sum::<usize>() >= 700 << 30 && locked.iter().all(|n| *n <= LARGEST) && locked.contains(&LARGEST),
            "{locked:?}"
        );
        // That of the last step stays.
        let stays = locked.pop().unwrap();
        assert_eq!(stays, FIRST);
        locked.sort_unstable();
        unlocked.sort_unstable();
        assert_eq!(locked, unlocked);
    }

    #[test]
    #[ignore = "started by hundreds_of_gib_are_locked_in_chunks_that_new_drivers_take, with a driver of its own"]
    fn in_the_process_with_the_fake_driver() {
        const LEN: usize = 700 << 30;
        assert!(std::env::var_os(LOG).is_some(), "it needs that driver");
        let space = Reserved::new(LEN);
        let mut pages = Registered::new(Context::retain(0).unwrap(), super::super::driver::PORTABLE, Locked::none(Pages::Anonymous));
        let mut said = Vec::new();
        // SAFETY: the range stays until it is released.
        unsafe { pages.lock(space.0, LEN, None, Vec::new(), &mut |done| said.push(done)) }.unwrap();
        assert_eq!((pages.bytes(), said.last()), (LEN, Some(&(LEN as u64))));
        // A tensor of 90 GiB over the end of what is locked: all that is locked of it is given back, and no more.
        let start = LEN - (80 << 30);
        assert!(pages.keep_whole(space.0.wrapping_add(start), 90 << 30));
        assert_eq!(pages.bytes(), start);
        assert!(!pages.keep_whole(space.0, start) && !pages.keep_whole(space.0.wrapping_add(start), 1 << 30));
        assert!(pages.release());
        assert_eq!(pages.bytes(), 0);
        drop(space);

        // A NUMA node has what it has, no whole pages of it; the driver takes whole pages only.
        const SMALL: usize = 700 << 20;
        let memory = crate::memory::pageable::Pageable::new(SMALL).unwrap();
        let mut pages = Registered::new(Context::retain(0).unwrap(), super::super::driver::PORTABLE, Locked::none(Pages::Anonymous));
        let nodes = vec![(0, (612 << 20) + 12_345)];
        // SAFETY: fresh memory, which stays until it is released.
        unsafe { pages.lock(memory.base(), SMALL, Some(Touch::Write), nodes, &mut |_| ()) }.unwrap();
        assert_eq!(pages.bytes(), SMALL);
        assert!(pages.release());

        // Locked in part, then refused, and not unlocked again: the memory stays where it is after its region.
        // SAFETY: this process runs this test alone.
        unsafe {
            std::env::set_var("FAKE_CUDA_IN_ALL", (400usize << 20).to_string());
            std::env::set_var("FAKE_CUDA_FAIL", "cuMemHostUnregister:1");
        }
        let region = crate::memory::Region::from(memory);
        let settings = Settings { device: 0, method: None, limit: Limit::Percent(80) };
        let short = region.lock_memory(&settings, &mut |_| ()).unwrap_err();
        assert!(short.stays && short.why == Why::Refused, "{short:?}");
        let base = region.base();
        drop(region);
        let mut there = 0u8;
        // SAFETY: one page is asked for, and there is a byte for it.
        assert_eq!(unsafe { libc::mincore(base.cast(), 1, &raw mut there) }, 0, "it is mapped no more");
    }
}
