//! Which tensor goes where, and why.
//!
//! Owns: rules (the `-ot` grammar of stock llama.cpp), the decision for one tensor, its reason, and the explanation of a whole model. Pure: no
//! allocation of weights, no file, no environment, no unsafe. Must not know: ggml's structs, buffers, how memory is had.

mod byte_set;
mod ecma;
mod pattern;
mod pattern_error;

pub use ecma::MAX_PATTERN_BYTES;
pub use pattern::{Pattern, TooSlow};
pub use pattern_error::{PatternError, PatternFault};
