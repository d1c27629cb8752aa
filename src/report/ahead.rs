//! What was read ahead: the counts of this process, and what did not work.
//!
//! Owns: the counts, their JSON and their line in the log. Must not know: how anything is read.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::Serialize;

use super::human;
use crate::config::{self, ReadAhead};
use crate::log;

/// Why read-ahead works in another way than it should. Codes are stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fallback {
    /// The kernel does not tell which pages are in memory (Linux tells only who owns the file or may write it): everything is asked for.
    PagesHidden,
    /// The kernel cannot wait for pages (before Linux 5.14): page faults do.
    CannotWait,
    /// The kernel takes no requests for these pages: page faults read them.
    CannotAsk,
    /// Files cannot be read past the page cache, or not while others wait for nothing: missing experts come through it.
    NotDirect,
}

/// The counts.
#[derive(Debug, Default)]
pub struct Counts {
    /// Calls in which somebody looked for missing weights.
    pub looks: AtomicU64,
    /// Experts in those calls whose weights were all in memory.
    pub hits: AtomicU64,
    /// Experts in those calls of whose weights some were missing.
    pub misses: AtomicU64,
    /// Bytes of weights that were looked at.
    pub looked_bytes: AtomicU64,
    /// Bytes of them that were missing. Nothing is counted where the kernel does not tell.
    pub missed_bytes: AtomicU64,
    /// Bytes that were asked for: from the first to the last missing page of each piece.
    pub asked_bytes: AtomicU64,
    /// Bytes of them that were read past the page cache.
    pub direct_bytes: AtomicU64,
    /// Microseconds in which computing threads asked for weights, divided by their number.
    pub ask_us: AtomicU64,
    /// Microseconds in which computing threads waited for weights, divided by their number.
    pub wait_us: AtomicU64,
    /// Major page faults of the process from the first call on.
    pub major_faults: AtomicU64,
    /// Bytes of weights that are no experts, read at a load.
    pub warmed_bytes: AtomicU64,
}

/// The counts of this process.
pub static COUNTS: Counts = Counts {
    looks: AtomicU64::new(0),
    hits: AtomicU64::new(0),
    misses: AtomicU64::new(0),
    looked_bytes: AtomicU64::new(0),
    missed_bytes: AtomicU64::new(0),
    asked_bytes: AtomicU64::new(0),
    direct_bytes: AtomicU64::new(0),
    ask_us: AtomicU64::new(0),
    wait_us: AtomicU64::new(0),
    major_faults: AtomicU64::new(0),
    warmed_bytes: AtomicU64::new(0),
};

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Why {
    reason: Fallback,
    message: String,
}

static FALLBACKS: Mutex<Vec<Why>> = Mutex::new(Vec::new());

fn fallbacks() -> MutexGuard<'static, Vec<Why>> {
    FALLBACKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the report says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Ahead {
    mode: &'static str,
    looks: u64,
    expert_hits: u64,
    expert_misses: u64,
    looked_bytes: u64,
    missed_bytes: u64,
    asked_bytes: u64,
    direct_bytes: u64,
    ask_ms: u64,
    wait_ms: u64,
    major_faults: u64,
    warmed_bytes: u64,
    fallbacks: Vec<Why>,
}

impl Counts {
    /// Adds to one of them.
    pub fn add(count: &AtomicU64, n: u64) {
        count.fetch_add(n, Ordering::Relaxed);
    }

    fn so_far(&self) -> Ahead {
        let n = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Ahead {
            mode: match config::get().map_or(ReadAhead::Off, |c| c.read_ahead) {
                ReadAhead::Auto => "auto",
                ReadAhead::Off => "off",
                ReadAhead::On => "on",
            },
            looks: n(&self.looks),
            expert_hits: n(&self.hits),
            expert_misses: n(&self.misses),
            looked_bytes: n(&self.looked_bytes),
            missed_bytes: n(&self.missed_bytes),
            asked_bytes: n(&self.asked_bytes),
            direct_bytes: n(&self.direct_bytes),
            ask_ms: n(&self.ask_us) / 1000,
            wait_ms: n(&self.wait_us) / 1000,
            major_faults: n(&self.major_faults),
            warmed_bytes: n(&self.warmed_bytes),
            fallbacks: fallbacks().clone(),
        }
    }
}

/// The counts so far.
pub(super) fn so_far() -> Ahead {
    COUNTS.so_far()
}

/// Remembers that something does not work, and says so the first time.
pub fn fall_back(reason: Fallback, message: &str) {
    {
        let mut all = fallbacks();
        if all.iter().any(|w| w.reason == reason) {
            return;
        }
        all.push(Why { reason, message: message.to_owned() });
    }
    // No lock is held: a log may call back into us.
    log::warning!("BERTH_READAHEAD: {message}");
    super::changed();
}

/// Says what was read ahead since this was last said, if anything was; and writes the report.
pub fn say() {
    static SAID: AtomicU64 = AtomicU64::new(0);
    let now = so_far();
    if SAID.swap(now.looks, Ordering::Relaxed) == now.looks {
        return;
    }
    if let Some(line) = now.line() {
        log::info!("{line}");
    }
    super::changed();
}

impl Ahead {
    fn line(&self) -> Option<String> {
        let experts = self.expert_hits + self.expert_misses;
        (experts > 0).then(|| {
            format!(
                "read ahead: {} of {experts} experts were missing, {} of {}; {} asked for, {} of it past the page cache; {:.1} s asking, \
                 {:.1} s waiting; {} major page faults",
                self.expert_misses,
                human(usize::try_from(self.missed_bytes).unwrap_or(usize::MAX)),
                human(usize::try_from(self.looked_bytes).unwrap_or(usize::MAX)),
                human(usize::try_from(self.asked_bytes).unwrap_or(usize::MAX)),
                human(usize::try_from(self.direct_bytes).unwrap_or(usize::MAX)),
                self.ask_ms as f64 / 1e3,
                self.wait_ms as f64 / 1e3,
                self.major_faults
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_shown_under_their_names_and_in_one_line() {
        let counts = Counts::default();
        assert_eq!(counts.so_far().line(), None);
        let c = &counts;
        for (i, count) in [&c.hits, &c.misses, &c.looked_bytes, &c.missed_bytes, &c.asked_bytes, &c.direct_bytes].iter().enumerate() {
            Counts::add(count, 1000 << (4 * i));
        }
        Counts::add(&counts.ask_us, 1_900_000);
        Counts::add(&counts.wait_us, 250_000);
        Counts::add(&counts.major_faults, 7);
        let ahead = counts.so_far();
        let json = serde_json::to_value(&ahead).unwrap();
        for (name, want) in [
            ("expert_hits", 1000),
            ("expert_misses", 16_000),
            ("looked_bytes", 256_000),
            ("missed_bytes", 4_096_000),
            ("asked_bytes", 65_536_000),
            ("direct_bytes", 1_048_576_000),
            ("ask_ms", 1900),
            ("wait_ms", 250),
            ("major_faults", 7),
            ("looks", 0),
        ] {
            assert_eq!(json[name], want, "{name}");
        }
        let line = ahead.line().unwrap();
        assert!(line.starts_with("read ahead: 16000 of 17000 experts were missing, "), "{line}");
        assert!(line.ends_with("1.9 s asking, 0.2 s waiting; 7 major page faults"), "{line}");
    }

    #[test]
    fn a_fallback_is_remembered_once() {
        fall_back(Fallback::CannotAsk, "first");
        fall_back(Fallback::CannotAsk, "second");
        let json: serde_json::Value = serde_json::from_str(&super::super::to_json()).unwrap();
        let all = json["read_ahead"]["fallbacks"].as_array().unwrap();
        let ours: Vec<_> = all.iter().filter(|w| w["reason"] == "cannot_ask").collect();
        assert!(ours.len() == 1 && ours[0]["message"] == "first", "{json}");
    }
}
