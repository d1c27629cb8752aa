//! How the experts were computed: blocks as one operation each, and blocks that were not, with the reason.
//!
//! Owns: the counts of this process, and one line per reason. Must not know: graphs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use serde::Serialize;

use crate::log;

/// Why the nodes of a block were computed one by one. Codes are stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeByNode {
    /// What follows the first product is none of the known chains.
    UnknownChain,
    /// The graph ends before the sum over the choices.
    GraphCut,
    /// Fewer choices are added up than were computed.
    SomeChoices,
    /// A value inside is needed by others.
    UsedOutside,
    /// The host cannot tell whether a value inside is needed by others.
    OldHost,
}

impl NodeByNode {
    fn text(self) -> &'static str {
        match self {
            NodeByNode::UnknownChain => "what follows is not a chain that is known (a LoRA on experts, or a model of a new kind)",
            NodeByNode::GraphCut => "the graph ends inside (something looks at values between, as imatrix does)",
            NodeByNode::SomeChoices => "only some of the choices are added up, as when the host warms up all experts",
            NodeByNode::UsedOutside => "a value inside is used elsewhere, or is an output",
            NodeByNode::OldHost => "this ggml cannot tell whether values inside are used elsewhere",
        }
    }
}

/// Blocks that were computed node by node for one reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Count {
    reason: NodeByNode,
    blocks: u64,
    /// Name of the first product of the first of them.
    first: String,
    message: &'static str,
}

/// What the report says of them. A block is counted each time it is computed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Blocks {
    fused: u64,
    node_by_node: u64,
    /// Operations of graphs that Berth never claimed, computed by the host's CPU backend.
    unclaimed: u64,
    reasons: Vec<Count>,
}

static FUSED: AtomicU64 = AtomicU64::new(0);
static UNCLAIMED: AtomicU64 = AtomicU64::new(0);
static NODE_BY_NODE: Mutex<Vec<Count>> = Mutex::new(Vec::new());

fn counts() -> std::sync::MutexGuard<'static, Vec<Count>> {
    NODE_BY_NODE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts a block that was computed as one operation, and says so for the first; `kernels` names what it was computed with.
pub fn fused(kernels: &str) {
    if FUSED.fetch_add(1, Ordering::Relaxed) == 0 {
        log::info!("BERTH: the experts of a layer are computed as one operation ({kernels} kernels)");
        super::changed();
    }
}

/// Counts a block that was not; one line for the first of each reason. `first` names its first product.
pub fn node_by_node(reason: NodeByNode, first: impl FnOnce() -> String) {
    let name = {
        let mut counts = counts();
        if let Some(count) = counts.iter_mut().find(|c| c.reason == reason) {
            count.blocks += 1;
            return;
        }
        let first = first();
        counts.push(Count { reason, blocks: 1, first: first.clone(), message: reason.text() });
        first
    };
    // No lock is held: a log may call back into us.
    let line = format_args!("BERTH: the experts of '{name}' are computed node by node, which is slower: {}", reason.text());
    // The host warms up at every start; nobody has to do anything about that.
    log::write(if reason == NodeByNode::SomeChoices { log::Level::Info } else { log::Level::Warn }, line);
    super::changed();
}

/// Counts operations that were sent without having been claimed, and says so for the first.
pub fn unclaimed(nodes: u64) {
    if UNCLAIMED.fetch_add(nodes, Ordering::Relaxed) == 0 {
        log::warning!(
            "BERTH: was sent operations that it never claimed, as an RPC server does; llama.cpp's CPU backend computes them in the same memory"
        );
        super::changed();
    }
}

/// The counts so far.
pub(super) fn so_far() -> Blocks {
    let reasons = counts().clone();
    Blocks {
        fused: FUSED.load(Ordering::Relaxed),
        node_by_node: reasons.iter().map(|c| c.blocks).sum(),
        unclaimed: UNCLAIMED.load(Ordering::Relaxed),
        reasons,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_counted_by_reason_and_the_first_is_named() {
        let before = so_far();
        fused("test");
        for (reason, name) in [(NodeByNode::UsedOutside, "a"), (NodeByNode::OldHost, "b"), (NodeByNode::UsedOutside, "c")] {
            node_by_node(reason, || name.into());
        }
        let after = so_far();
        assert_eq!((after.fused - before.fused, after.node_by_node - before.node_by_node), (1, 3));
        let json: serde_json::Value = serde_json::from_str(&super::super::to_json()).unwrap();
        let reasons = json["blocks"]["reasons"].as_array().unwrap();
        let of = |code: &str| reasons.iter().find(|r| r["reason"] == code).unwrap_or_else(|| panic!("{json}"));
        assert_eq!((&of("used_outside")["blocks"], &of("used_outside")["first"]), (&2.into(), &"a".into()));
        assert_eq!((&of("old_host")["blocks"], &of("old_host")["first"]), (&1.into(), &"b".into()));
    }
}
