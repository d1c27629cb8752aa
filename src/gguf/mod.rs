//! GGUF headers: what a model file says about itself, read without trusting any of it.
//!
//! Owns: the header of one file ([`Header`]: metadata, tensor names, types, shapes and places in the file), the set of files of one model
//! ([`Model`]), the table of block formats ([`GgmlType`]) and the typed [`Error`]. Must not know: ggml, placement, or what the tensors mean.
//!
//! A GGUF file is: magic, version, two counts, metadata pairs, tensor descriptions, padding, tensor data. Versions 2 and 3, little-endian.
//! Source of the layout: `docs/gguf.md` in the ggml repository.
//!
//! # What is promised about a hostile file
//! - Every length and count is compared with what is left of the real file before it is used; sums and products are checked for overflow.
//! - No allocation is larger than the file, and a header is never larger than [`MAX_HEADER_BYTES`].
//! - Names are unique, valid UTF-8, without control characters; tensors lie inside the file and do not overlap.
//! - A fault is an [`Error`] that names the file, the offset and what was wrong. Nothing panics.
//!
//! # Why this is not a crate
//! Tried in November 2026 with nine hostile headers: `gguf` 0.1.2 accepts a tensor beyond the file, a shape that overflows, overlapping
//! tensors and a name with NUL; `ggus` 0.5.1 panics on a count of 2^63 and on a shape that overflows, and reads only version 3; `gguf-rs` 0.1.8
//! accepts a tensor beyond the file, overlaps and NUL; `candle-core` 0.11.1 allocates whatever length the file claims. None reads split files.

mod error;
mod header;
mod parse;
mod source;
mod split;
mod types;
mod value;

#[cfg(test)]
mod hostile;
#[cfg(test)]
pub(crate) mod testing;

pub use error::{Error, ErrorKind, TextFault};
pub use header::{Header, Quirk, TensorInfo};
pub use parse::{MAX_HEADER_BYTES, MAX_NAME_BYTES};
pub use split::{Model, ModelTensor, Part};
pub use types::{GgmlType, TypeInfo};
pub use value::{Array, Value, ValueType};
