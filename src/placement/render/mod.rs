//! An explanation for a person or a program to read.
//!
//! Owns: the terminal table, the JSON, the page. Must not know: how an explanation was found.

mod collapse;
mod html;
mod table;
#[cfg(test)]
mod tests;

pub use html::html;
pub use table::table;

use super::explain::Explanation;

/// The explanation as JSON. Field names and codes are stable; fields may be added.
pub fn json(e: &Explanation) -> String {
    // Nothing in it can fail to serialise: no maps with odd keys, no other writer than memory.
    serde_json::to_string_pretty(e).unwrap_or_default()
}
