//! How many steps all rules of a list may take together.
//!
//! Owns: the limits per engine, what was taken of them, and the error when they are used up. Must not know: patterns, targets.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::text::Name as Shown;

/// Steps of backtracking that all rules together may take: to be tried out, and again on names. About a second. Patterns without look-ahead
/// and back-reference take none.
pub(super) const BACKTRACKING: Limit = Limit { steps: 1 << 25, per_name: 1 << 10 };

/// Steps that all automata together may take. About two seconds, and enough for 4096 rules that are all asked about each of 5,000 names.
pub(super) const AUTOMATA: Limit = Limit { steps: 1 << 30, per_name: 1 << 12 };

/// A limit of steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limit {
    /// For all names together.
    pub(super) steps: u64,
    /// What every name adds to that, so that a long-lived process does not use it up: about 20 us of backtracking, or 16 rules with a
    /// look-ahead; 4 us of automata, or 60 rules that cannot be told apart by a text in the name.
    pub(super) per_name: u64,
}

/// Which limit was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepLimit {
    /// That of one backtracking pattern on one name.
    OnOneName,
    /// That of all backtracking patterns together: so many steps.
    Backtracking(u64),
    /// That of all other patterns together: so many steps.
    Automata(u64),
}

/// A pattern reached its limit of steps on a name, or all rules together did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlowRule {
    /// Which rule, from 0. Of all rules, the one that took most.
    pub rule: usize,
    /// On which name.
    pub tensor: String,
    /// Which limit.
    pub limit: StepLimit,
}

impl fmt::Display for SlowRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rule, tensor) = (self.rule + 1, Shown(&self.tensor));
        let (steps, hint) = match self.limit {
            StepLimit::OnOneName => {
                return write!(f, "rule {rule} takes too many steps on tensor {tensor}; avoid repetitions inside repetitions");
            }
            StepLimit::Backtracking(steps) => (steps, "avoid back-references and repetitions beside repetitions"),
            StepLimit::Automata(steps) => (steps, "use fewer rules, or name in each what few tensors have, such as blk\\.7\\."),
        };
        write!(
            f,
            "all rules together took more than the {steps} steps that they have up to tensor {tensor}, and rule {rule} took most; {hint}"
        )
    }
}

impl std::error::Error for SlowRule {}

/// What was taken of a limit.
#[derive(Debug)]
pub(super) struct Budget {
    limit: Limit,
    taken: AtomicU64,
}

impl Budget {
    pub(super) fn new(limit: Limit) -> Budget {
        Budget { limit, taken: AtomicU64::new(0) }
    }

    pub(super) fn take(&self, steps: u64) {
        self.taken.fetch_add(steps, Ordering::Relaxed);
    }

    #[cfg(test)]
    pub(super) fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// The steps that there were for so many names, if they are used up.
    pub(super) fn used_up(&self, names: u64) -> Option<u64> {
        let all = self.limit.steps.saturating_add(names.saturating_mul(self.limit.per_name));
        (self.taken.load(Ordering::Relaxed) > all).then_some(all)
    }
}
