//! What is said while memory is page-locked and while it is filled: one line every few seconds, one at the end, and a warning when nothing comes
//! any more.
//!
//! Owns: when a line is due and what stands in it. Must not know: who fills what, from where.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::log;
use crate::memory::budget;
use crate::memory::pinned::Step;
use crate::report::human;

/// Between two lines of progress.
const SAY_EVERY: Duration = Duration::from_secs(5);

/// Without a byte and without a line: something hangs.
const STALLED_AFTER: Duration = Duration::from_secs(60);

/// A fill that comes so long after the last byte belongs to another load.
const SAME_LOAD: Duration = Duration::from_secs(30);

/// Loads with less are not worth a line at their end.
const WORTH_A_LINE: u64 = 64 << 20;

/// What is to be said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Say {
    /// So much is there, so long after the start.
    Progress { bytes: u64, took: Duration },
    /// Nothing has come for so long.
    Stalled(Duration),
}

/// The clock of one load. All times are given to it.
struct Meter {
    started: Instant,
    /// Last line, or the start.
    said: Instant,
    /// Last byte, or the start.
    moved: Instant,
    bytes: u64,
    /// Bytes at the last line.
    at_said: u64,
    /// Bytes of `bytes` that were read from files.
    read: u64,
}

impl Meter {
    fn new(now: Instant) -> Meter {
        Meter { started: now, said: now, moved: now, bytes: 0, at_said: 0, read: 0 }
    }

    /// A new fill begins. The time in which nobody filled anything is nobody's stall.
    fn begin(&mut self, now: Instant) {
        let idle = now.saturating_duration_since(self.moved);
        if idle > SAME_LOAD {
            *self = Meter::new(now);
        }
        self.moved = now;
    }

    /// So many more bytes are there, perhaps none. What is due now?
    fn tick(&mut self, now: Instant, more: u64) -> Option<Say> {
        self.bytes += more;
        if more > 0 {
            self.moved = now;
        }
        if self.bytes > self.at_said && now.saturating_duration_since(self.said) >= SAY_EVERY {
            (self.said, self.at_said) = (now, self.bytes);
            return Some(Say::Progress { bytes: self.bytes, took: now.saturating_duration_since(self.started) });
        }
        let still = now.saturating_duration_since(self.moved.max(self.said));
        if still >= STALLED_AFTER {
            self.said = now;
            return Some(Say::Stalled(now.saturating_duration_since(self.moved)));
        }
        None
    }
}

static METER: Mutex<Option<Meter>> = Mutex::new(None);

fn meter() -> MutexGuard<'static, Option<Meter>> {
    METER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One fill of a load, from its first to its last byte.
pub struct Fill<'a> {
    /// What the bytes are read from, if it is a file.
    path: Option<&'a Path>,
    done: u64,
}

impl<'a> Fill<'a> {
    /// A fill from a file, or from memory.
    pub fn begin(path: Option<&'a Path>) -> Fill<'a> {
        let now = Instant::now();
        meter().get_or_insert_with(|| Meter::new(now)).begin(now);
        Fill { path, done: 0 }
    }

    /// So many of its bytes are there by now.
    pub fn at(&mut self, done: u64) {
        let (now, more) = (Instant::now(), done.saturating_sub(self.done));
        self.done = self.done.max(done);
        let say = meter().as_mut().and_then(|m| {
            m.read += if self.path.is_some() { more } else { 0 };
            m.tick(now, more)
        });
        // No lock is held: a log may call back into us.
        match say {
            Some(Say::Progress { bytes, took }) => log::info!("{}", line("filled so far", bytes, took)),
            Some(Say::Stalled(time)) => {
                let from = self.path.map_or("memory".to_owned(), |p| p.display().to_string());
                log::warning!("nothing was read from {from} for {} s: its disk or the network does not answer", time.as_secs());
            }
            None => {}
        }
    }
}

/// The load is complete: one line about it, if it was more than a little.
pub fn end() {
    let Some(meter) = meter().take().filter(|m| m.bytes >= WORTH_A_LINE) else { return };
    let took = meter.moved.saturating_duration_since(meter.started);
    let read = meter.read;
    log::info!("{}, {read} of {} bytes read from files", line("filled", meter.bytes, took), meter.bytes);
}

/// Page-locking of one buffer, from before it begins.
pub struct Pin {
    name: &'static str,
    asked: u64,
    said: Instant,
    started: Instant,
}

impl Pin {
    /// For a buffer type.
    pub fn begin(name: &'static str) -> Pin {
        let now = Instant::now();
        Pin { name, asked: 0, said: now, started: now }
    }

    /// What is known now.
    pub fn step(&mut self, step: Step) {
        match step {
            Step::Begin { bytes, method } => {
                (self.asked, self.started, self.said) = (bytes, Instant::now(), Instant::now());
                if bytes >= WORTH_A_LINE {
                    let left = budget::locked();
                    log::info!("{}: page-locking {bytes} bytes ({}, {}; {left} are locked)", self.name, size(bytes), method.name());
                }
            }
            Step::At(bytes) if self.said.elapsed() >= SAY_EVERY => {
                self.said = Instant::now();
                let so_far = line("page-locked so far", bytes, self.started.elapsed());
                log::info!("{}: {so_far}, of {}", self.name, size(self.asked));
            }
            Step::At(_) => {}
        }
    }

    /// So many bytes are locked at the end.
    pub fn end(self, took: Duration, locked: usize) {
        if self.asked >= WORTH_A_LINE {
            log::info!("{}: {}, of {}", self.name, line("page-locked", locked as u64, took), size(self.asked));
        }
    }
}

fn size(bytes: u64) -> String {
    human(usize::try_from(bytes).unwrap_or(usize::MAX))
}

fn line(what: &str, bytes: u64, took: Duration) -> String {
    let seconds = took.as_secs_f64();
    let rate = bytes as f64 / seconds.max(1e-3) / 1e9;
    format!("{what}: {} in {seconds:.1} s, {rate:.2} GB/s", size(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_line_comes_every_few_seconds_while_bytes_come() {
        let start = Instant::now();
        let mut meter = Meter::new(start);
        let mut said = Vec::new();
        for second in 1..=12u64 {
            let now = start + Duration::from_secs(second);
            meter.begin(now);
            said.extend(meter.tick(now, MIB));
        }
        let progress = |s| Say::Progress { bytes: s * MIB, took: Duration::from_secs(s) };
        assert_eq!(said, [progress(5), progress(10)]);
    }

    #[test]
    fn a_fill_that_hangs_is_warned_of_once_a_minute() {
        let start = Instant::now();
        let mut meter = Meter::new(start);
        meter.begin(start);
        let mut said = Vec::new();
        for tenth in 1..=1800u64 {
            // Ten MiB in the first second, then nothing.
            said.extend(meter.tick(start + Duration::from_millis(100 * tenth), if tenth <= 10 { MIB } else { 0 }));
        }
        let [Say::Progress { bytes, .. }, Say::Stalled(first), Say::Stalled(second)] = said[..] else { panic!("{said:?}") };
        assert_eq!((bytes, first.as_secs(), second.as_secs()), (10 * MIB, 64, 124), "a minute after the last line");
    }

    #[test]
    fn the_time_between_two_fills_is_no_stall_and_a_later_load_counts_anew() {
        let start = Instant::now();
        let mut meter = Meter::new(start);
        meter.begin(start);
        meter.tick(start, MIB);
        let soon = start + Duration::from_secs(20);
        meter.begin(soon);
        assert_eq!(meter.tick(soon, 0), Some(Say::Progress { bytes: MIB, took: Duration::from_secs(20) }));
        assert_eq!((meter.tick(soon, 0), meter.bytes), (None, MIB));
        let later = soon + Duration::from_secs(3600);
        meter.begin(later);
        assert_eq!((meter.tick(later, 0), meter.bytes, meter.started), (None, 0, later));
    }

    #[test]
    fn the_line_has_bytes_time_and_rate() {
        assert_eq!(line("filled", 5 << 30, Duration::from_secs(5)), "filled: 5.00 GiB in 5.0 s, 1.07 GB/s");
        assert!(line("filled", u64::MAX, Duration::ZERO).contains("TiB"));
    }
}
