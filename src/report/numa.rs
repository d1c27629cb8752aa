//! On which NUMA nodes the pages of a buffer lie, against what was asked.
//!
//! Owns: the record of one buffer, and its line in the log. Must not know: how that is found out.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{Id, changed, state};
use crate::log;
use crate::memory::numa::Spread;

/// What is remembered of one buffer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Numa {
    /// The policy that was asked for, as in `BERTH_NUMA`.
    pub asked: String,
    /// How many of the pages that were looked at lie on each node.
    pub nodes: BTreeMap<u32, usize>,
    /// How many are in no memory of this process.
    pub absent: usize,
    /// Why they do not lie as asked, or it is not known where.
    pub message: Option<String>,
}

impl Numa {
    /// From what the kernel says; with `wanted` all of them should lie on that node.
    pub fn new(asked: String, wanted: Option<u32>, spread: Option<Spread>, refused: Option<String>) -> Numa {
        let unknown = || "the kernel does not say where they are".to_owned();
        let message = refused.or_else(|| spread.is_none().then(unknown));
        let Spread { nodes, absent } = spread.unwrap_or_default();
        let elsewhere: usize = wanted.map_or(0, |w| nodes.iter().filter(|(node, _)| **node != w).map(|(_, n)| n).sum());
        let message =
            message.or_else(|| (elsewhere > 0).then(|| format!("{elsewhere} of {} pages lie elsewhere", nodes.values().sum::<usize>())));
        Numa { asked, nodes, absent, message }
    }

    /// One line.
    pub(super) fn say(&self, asked: &str) {
        let nodes: Vec<String> = self.nodes.iter().map(|(node, pages)| format!("{pages} on node {node}")).collect();
        let nodes = if nodes.is_empty() { "none in memory".into() } else { nodes.join(", ") };
        let line = format!("{asked}: BERTH_NUMA={}: of the pages looked at, {nodes}, {} not in memory", self.asked, self.absent);
        match &self.message {
            None => log::info!("{line}"),
            Some(message) => log::warning!("{line}: {message}"),
        }
    }
}

/// Remembers where the pages of a buffer lie, and logs one line about it.
pub fn record(id: Id, now: Numa) {
    let mut found = None;
    if let Some(buffer) = state().as_mut().and_then(|s| s.live.iter_mut().find(|b| b.id == id.0)) {
        buffer.numa = Some(now.clone());
        found = Some(buffer.asked);
    }
    // No lock is held: a log may call back into us.
    if let Some(asked) = found {
        now.say(asked);
    }
    changed();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_elsewhere_are_told_where_one_node_was_wanted() {
        let spread = || Some(Spread { nodes: [(0, 30), (1, 226)].into(), absent: 0 });
        assert_eq!(Numa::new("interleave".into(), None, spread(), None).message, None);
        assert_eq!(Numa::new("bind:1".into(), Some(1), spread(), None).message.as_deref(), Some("30 of 256 pages lie elsewhere"));
        let only = Some(Spread { nodes: [(1, 200)].into(), absent: 56 });
        assert_eq!(Numa::new("bind:1".into(), Some(1), only, None).message, None);
        assert!(Numa::new("local".into(), None, None, None).message.unwrap().contains("does not say"));
        let refused = Numa::new("bind:1".into(), Some(1), spread(), Some("refused".into()));
        assert_eq!(refused.message.as_deref(), Some("refused"));
        let json = serde_json::json!({"asked": "bind:1", "nodes": {"0": 30, "1": 226}, "absent": 0, "message": "refused"});
        assert_eq!(serde_json::to_value(refused).unwrap(), json);
    }
}
