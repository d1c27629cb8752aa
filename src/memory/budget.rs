//! How many bytes this process may lock, and how many it has.
//!
//! Owns: the sum of all locked bytes, and the limit that follows from memory, cgroup and NUMA nodes. Must not know: who locks, how, what for.
//!
//! Locked memory is never reclaimed: what is left must do for everything else on the machine, or in the cgroup. So a limit is a share of what
//! could be had, with what is locked already counted in: `share * (free + locked) - locked`.

use std::sync::atomic::{AtomicU64, Ordering};

use super::system::{self, Node};

/// Share of what is there that is locked by default, in percent.
pub const SHARE: u8 = 80;

/// With a limit in bytes, the most that is locked of what is there, in percent: the limit is the user's word, and a machine without memory nobody's wish.
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
}

impl Locked {
    pub(super) fn none(pages: Pages) -> Locked {
        Locked { pages, bytes: 0 }
    }

    pub(super) fn set(&mut self, bytes: u64) {
        self.pages.sum().fetch_add(bytes, Ordering::Relaxed);
        self.pages.sum().fetch_sub(self.bytes, Ordering::Relaxed);
        self.bytes = bytes;
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        self.set(0);
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
}

impl There {
    fn now() -> There {
        let (anonymous, files) = (ANONYMOUS.load(Ordering::Relaxed), FILES.load(Ordering::Relaxed));
        There { available: system::ram().map(|r| r.available), cgroup: system::cgroup_room(), nodes: system::nodes(), anonymous, files }
    }

    /// What a share of `free` allows beyond what is locked.
    fn share(&self, percent: u8, free: u64) -> u64 {
        let all = u128::from(free) + u128::from(self.anonymous);
        let allowed = u64::try_from(all * u128::from(percent) / 100).unwrap_or(u64::MAX);
        allowed.saturating_sub(self.anonymous + self.files)
    }

    fn budget(&self, limit: Limit) -> Budget {
        let mut limits = Vec::new();
        let percent = match limit {
            Limit::Percent(percent) => percent,
            Limit::Bytes(bytes) => {
                limits.push((bytes.saturating_sub(self.anonymous + self.files), format!("the limit of {bytes} bytes")));
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
            let sum = nodes.iter().map(|(_, bytes)| bytes).sum();
            limits.push((sum, format!("{percent} % of what each of {} NUMA nodes has free", nodes.len())));
        }
        let (left, because) = limits.into_iter().min_by_key(|(bytes, _)| *bytes).unwrap_or_default();
        Budget { left, because, nodes }
    }

    fn room(&self) -> u64 {
        self.available.unwrap_or(u64::MAX).min(self.cgroup.unwrap_or(u64::MAX))
    }
}

/// What may be locked now.
pub fn now(limit: Limit) -> Budget {
    There::now().budget(limit)
}

/// Whether that many bytes of anonymous memory are too many: filling them would get a process killed.
pub fn is_too_much(bytes: usize) -> bool {
    u128::from(There::now().room()) * u128::from(SAFE) / 100 < bytes as u128
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn there(available: u64) -> There {
        There { available: Some(available * GIB), cgroup: None, nodes: Vec::new(), anonymous: 0, files: 0 }
    }

    #[test]
    fn the_smallest_limit_decides_and_is_named() {
        let mut t = there(100);
        let left = |t: &There, limit| t.budget(limit).left / GIB;
        assert_eq!(left(&t, Limit::Percent(80)), 80);
        assert_eq!(left(&t, Limit::Bytes(30 * GIB)), 30);
        assert_eq!(left(&t, Limit::Bytes(1000 * GIB)), 95, "not more than there is");
        assert_eq!(left(&t, Limit::Percent(0)), 0);
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
