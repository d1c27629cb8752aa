//! Which tensor goes where, and why.
//!
//! Owns: rules (the `-ot` grammar of stock llama.cpp), the decision for one tensor, its reason, and the explanation of a whole model. Pure: no
//! allocation of weights, no file, no environment, no unsafe. Must not know: ggml's structs, buffers, how memory is had.

mod architectures;
mod automaton;
mod budget;
mod byte_set;
mod bytes;
mod decide;
mod ecma;
mod explain;
mod facts;
mod load;
mod matcher;
mod names;
mod notation;
mod pattern;
mod pattern_error;
mod reason;
pub mod render;
mod rule_error;
mod rules;
mod target;
mod tensor;
mod warnings;

pub use budget::{SlowRule, StepLimit};
pub use bytes::Bytes;
pub use decide::{DecideError, Decision, Memory, after_failure, decide};
pub use ecma::MAX_PATTERN_BYTES;
pub use explain::{Explanation, Machine, PlaceUse, Placed, RuleUse, Totals, Warning};
pub use facts::Facts;
#[cfg(test)]
pub(crate) use load::is_computed;
pub use load::{Device, LazyMode, Load, OFFLOAD_MIN_BATCH, Offload, Repack, takes_by_itself};
pub use matcher::Hits;
pub use names::{Name, Op, Part};
pub use pattern::{Pattern, TooSlow};
pub use pattern_error::{PatternError, PatternFault};
pub use reason::Reason;
pub use rule_error::{RuleError, RuleFault};
pub use rules::{MAX_RULES, Origin, Rule, Rules};
pub use target::{Target, Targets};
pub use tensor::{Class, Flags, Tensor};
