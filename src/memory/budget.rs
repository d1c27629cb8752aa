//! How many bytes this process may lock, and how many it has.
//!
//! Owns: the sum of all locked bytes, and the limit that follows from memory, cgroup and NUMA nodes. Must not know: who locks, how, what for.
//!
//! Locked memory is never reclaimed: what is left must do for everything else on the machine, or in the cgroup. So a limit is a share of what
//! could be had, with what is locked already counted in: `share * (free + locked) - locked`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::system::{self, Node};

/// Share of what is there that is locked by default, in percent.
pub const SHARE: u8 = 80;

/// The most that is locked of what is there, in percent, whatever the limit is: that is the user's word, and a machine without memory nobody's wish.
const MOST: u8 = 95;

/// Share of what is there that anonymous memory may take before it is put into a file instead, in percent.
const SAFE: u64 = 90;

/// What the user allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Of what is there.
    Percent(u8),
    /// In all.
    Bytes(u64),
}

/// Bytes locked, of anonymous memory and of files. The kernel counts locked pages of files as available, as it does not know that they are not.
static ANONYMOUS: AtomicU64 = AtomicU64::new(0);
static FILES: AtomicU64 = AtomicU64::new(0);

/// Bytes that were granted and are not locked yet. Locking takes minutes, and tells what it does: no lock may be held meanwhile.
static PENDING: AtomicU64 = AtomicU64::new(0);

/// Whose pages are locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Nobody's: they take memory that was free.
    Anonymous,
    /// A file's, in the page cache.
    File,
}

impl Pages {
    fn sum(self) -> &'static AtomicU64 {
        match self {
            Pages::Anonymous => &ANONYMOUS,
            Pages::File => &FILES,
        }
    }
}

/// Bytes that this process has locked now.
pub fn locked() -> u64 {
    ANONYMOUS.load(Ordering::Relaxed) + FILES.load(Ordering::Relaxed)
}

/// Locked bytes in the sum, until it is dropped.
#[derive(Debug)]
pub(super) struct Locked {
    pages: Pages,
    bytes: u64,
    pending: u64,
}

impl Locked {
    pub(super) fn none(pages: Pages) -> Locked {
        Locked { pages, bytes: 0, pending: 0 }
    }

    pub(super) fn set(&mut self, bytes: u64) {
        self.expect(self.pending.saturating_sub(bytes.saturating_sub(self.bytes)));
        self.pages.sum().fetch_add(bytes, Ordering::Relaxed);
        self.pages.sum().fetch_sub(self.bytes, Ordering::Relaxed);
        self.bytes = bytes;
    }

    /// That many more are to come.
    fn expect(&mut self, pending: u64) {
        PENDING.fetch_add(pending, Ordering::Relaxed);
        PENDING.fetch_sub(self.pending, Ordering::Relaxed);
        self.pending = pending;
    }

    /// No more will come.
    pub(super) fn settle(&mut self) {
        self.expect(0);
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// [`is_too_much`], for bytes of which some are granted here.
    pub(super) fn is_too_much(&self, bytes: usize) -> bool {
        There::now().has_not_room_for(bytes, self.pending)
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        self.set(0);
        self.settle();
    }
}

/// What may be locked now, and what says so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Bytes that may be locked in addition to those that are.
    pub left: u64,
    /// The limit that decides, in words.
    pub because: String,
    /// What each NUMA node may give, where there are several.
    pub nodes: Vec<(u32, u64)>,
}

/// What there is.
struct There {
    available: Option<u64>,
    cgroup: Option<u64>,
    nodes: Vec<Node>,
    anonymous: u64,
    files: u64,
    pending: u64,
}

impl There {
    fn now() -> There {
        let (anonymous, files) = (ANONYMOUS.load(Ordering::Relaxed), FILES.load(Ordering::Relaxed));
        let pending = PENDING.load(Ordering::Relaxed);
        There {
            available: system::ram().map(|r| r.available),
            cgroup: system::cgroup_room(),
            nodes: system::nodes(),
            anonymous,
            files,
            pending,
        }
    }

    /// What a share of `free` allows beyond what is locked.
    fn share(&self, percent: u8, free: u64) -> u64 {
        let all = u128::from(free) + u128::from(self.anonymous);
        let allowed = u64::try_from(all * u128::from(percent) / 100).unwrap_or(u64::MAX);
        allowed.saturating_sub(self.taken())
    }

    fn taken(&self) -> u64 {
        self.anonymous + self.files + self.pending
    }

    fn budget(&self, limit: Limit) -> Budget {
        let mut limits = Vec::new();
        let percent = match limit {
            Limit::Percent(percent) => percent.min(MOST),
            Limit::Bytes(bytes) => {
                limits.push((bytes.saturating_sub(self.taken()), format!("the limit of {bytes} bytes")));
                MOST
            }
        };
        match self.available {
            Some(free) => limits.push((self.share(percent, free), format!("{percent} % of the {free} bytes that are available"))),
            None => limits.push((0, "/proc/meminfo, which says what is available, cannot be read".into())),
        }
        if let Some(free) = self.cgroup {
            limits.push((self.share(percent, free), format!("{percent} % of the {free} bytes that the cgroup has left")));
        }
        // Where our pages lie is not known node by node: what is free on each is, and that has less of them.
        let mut nodes = Vec::new();
        if self.nodes.len() > 1 {
            nodes = self.nodes.iter().map(|n| (n.number, (u128::from(n.free) * u128::from(percent) / 100) as u64)).collect();
            let sum: u64 = nodes.iter().map(|(_, bytes)| bytes).sum();
            limits.push((sum.saturating_sub(self.pending), format!("{percent} % of what each of {} NUMA nodes has free", nodes.len())));
        }
        let (left, because) = limits.into_iter().min_by_key(|(bytes, _)| *bytes).unwrap_or_default();
        Budget { left, because, nodes }
    }

    fn room(&self) -> u64 {
        self.available.unwrap_or(u64::MAX).min(self.cgroup.unwrap_or(u64::MAX))
    }

    /// `granted` of what others must leave alone is for these bytes.
    fn has_not_room_for(&self, bytes: usize, granted: u64) -> bool {
        let room = self.room().saturating_sub(self.pending.saturating_sub(granted));
        u128::from(room) * u128::from(SAFE) / 100 < bytes as u128
    }
}

/// What may be locked now.
pub fn now(limit: Limit) -> Budget {
    There::now().budget(limit)
}

/// What may be locked now, of which at most `wanted` bytes are granted: nobody else gets those until they are locked or given up.
pub(super) fn grant(limit: Limit, pages: Pages, wanted: u64) -> (Budget, Locked) {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let budget = now(limit);
    let mut locked = Locked::none(pages);
    locked.expect(budget.left.min(wanted));
    (budget, locked)
}

/// Whether that many bytes of anonymous memory are too many: filling them would get a process killed.
pub fn is_too_much(bytes: usize) -> bool {
    There::now().has_not_room_for(bytes, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn there(available: u64) -> There {
        There { available: Some(available * GIB), cgroup: None, nodes: Vec::new(), anonymous: 0, files: 0, pending: 0 }
    }

    #[test]
    fn the_smallest_limit_decides_and_is_named() {
        let mut t = there(100);
        let left = |t: &There, limit| t.budget(limit).left / GIB;
        assert_eq!(left(&t, Limit::Percent(80)), 80);
        assert_eq!(left(&t, Limit::Bytes(30 * GIB)), 30);
        assert_eq!(left(&t, Limit::Bytes(1000 * GIB)), 95, "not more than there is");
        assert_eq!(left(&t, Limit::Percent(0)), 0);
        assert_eq!(left(&t, Limit::Percent(100)), 95);
        t.cgroup = Some(10 * GIB);
        let budget = t.budget(Limit::Percent(80));
        assert!(budget.left == 8 * GIB && budget.because.contains("cgroup"), "{budget:?}");
        t.available = None;
        let budget = t.budget(Limit::Percent(80));
        assert!(budget.left == 0 && budget.because.contains("/proc/meminfo"), "{budget:?}");
    }

    #[test]
    fn what_is_locked_counts_once() {
        // 100 GiB were free; 40 of them are locked: 60 are free, 80 % of 100 may be locked.
        let t = There { anonymous: 40 * GIB, ..there(60) };
        assert_eq!(t.budget(Limit::Percent(80)).left, 40 * GIB);
        // Pages of a file are still said to be available.
        let t = There { files: 40 * GIB, ..there(100) };
        assert_eq!(t.budget(Limit::Percent(80)).left, 40 * GIB);
        let t = There { anonymous: 40 * GIB, files: 45 * GIB, ..there(60) };
        assert_eq!(t.budget(Limit::Percent(80)).left, 0);
        assert_eq!(t.budget(Limit::Bytes(GIB)).left, 0);
        // 50 of 100 GiB are granted to somebody who has not brought them in.
        let t = There { pending: 50 * GIB, ..there(100) };
        assert_eq!((t.budget(Limit::Percent(80)).left, t.budget(Limit::Bytes(60 * GIB)).left), (30 * GIB, 10 * GIB));
        assert!(t.has_not_room_for(46 << 30, 0) && !t.has_not_room_for(44 << 30, 0) && !t.has_not_room_for(90 << 30, 50 * GIB));
    }

    #[test]
    fn what_is_granted_is_nobody_elses_until_it_is_locked_or_given_up() {
        const WANTED: u64 = 1 << 20;
        let (budget, mut locked) = grant(Limit::Percent(80), Pages::Anonymous, WANTED);
        assert!(budget.left > WANTED && locked.pending == WANTED && PENDING.load(Ordering::Relaxed) >= WANTED);
        locked.set(WANTED / 4);
        assert_eq!((locked.bytes(), locked.pending), (WANTED / 4, WANTED / 4 * 3));
        locked.settle();
        assert_eq!((locked.bytes(), locked.pending), (WANTED / 4, 0));
        let (_, none) = grant(Limit::Percent(0), Pages::Anonymous, WANTED);
        assert_eq!(none.pending, 0);
    }

    #[test]
    fn no_node_gives_more_than_its_share() {
        let nodes = vec![Node { number: 0, free: 10 * GIB }, Node { number: 2, free: 50 * GIB }];
        let budget = There { nodes, ..there(100) }.budget(Limit::Percent(80));
        assert_eq!((budget.left, budget.nodes), (48 * GIB, vec![(0, 8 * GIB), (2, 40 * GIB)]));
        assert!(budget.because.contains("2 NUMA nodes"), "{}", budget.because);
        let one = There { nodes: vec![Node { number: 0, free: GIB }], ..there(100) }.budget(Limit::Percent(80));
        assert_eq!((one.left, one.nodes), (80 * GIB, vec![]), "one node is the machine");
    }

    #[test]
    fn the_sum_follows_what_is_locked() {
        let before = locked();
        let mut one = Locked::none(Pages::Anonymous);
        let mut two = Locked::none(Pages::File);
        one.set(1 << 50);
        two.set(1 << 51);
        one.set(1 << 49);
        assert!(locked() >= before.saturating_sub(1 << 40) + (1 << 49) + (1 << 51));
        assert_eq!(one.bytes(), 1 << 49);
        drop((one, two));
        assert!(locked() < 1 << 49);
    }

    #[test]
    fn more_than_there_is_is_too_much() {
        assert!(is_too_much(usize::MAX) && !is_too_much(1));
    }
}
