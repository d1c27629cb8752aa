//! An explanation for a person or a program to read.
//!
//! Owns: the terminal table, the JSON, the page. Must not know: how an explanation was found.

mod collapse;
mod html;
mod table;
#[cfg(test)]
mod tests;

pub use html::{html, is_page};
pub use table::table;

use super::explain::Explanation;
use crate::text::is_loud;

/// The explanation as JSON. Field names and codes are stable; fields may be added.
pub fn json(e: &Explanation) -> String {
    // Nothing in it can fail to serialise: no maps with odd keys, no other writer than memory.
    quiet_json(&serde_json::to_string_pretty(e).unwrap_or_default())
}

/// The same JSON, with all control characters (and marks of direction) escaped: a terminal obeys some of them, and JSON lets them stand in strings.
pub fn quiet_json(json: &str) -> String {
    // Below, JSON escapes what stands in strings; its own line ends stay.
    let loud = |c: char| c > '~' && is_loud(c);
    if !json.contains(loud) {
        return json.to_owned();
    }
    json.chars().map(|c| if loud(c) { format!("\\u{:04x}", c as u32) } else { c.to_string() }).collect()
}
