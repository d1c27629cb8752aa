//! How texts from files, command lines and callers are shown.
//!
//! Owns: which characters are never shown as they are, and the length at which names and paths are cut. Must not know: whose texts they are.

use std::fmt;
use std::path::Path;

/// Characters of a name that a message shows; one of a real model has no more than 63.
const MOST_OF_NAME: usize = 80;

/// Characters of a path that a message shows, from its beginning and from its end.
const MOST_OF_PATH: [usize; 2] = [100, 150];

/// Whether a terminal or a browser may obey the character instead of showing it: control characters, marks that turn the direction of writing,
/// ends of lines and paragraphs, and the byte order mark, which nobody sees.
pub fn is_loud(c: char) -> bool {
    c.is_control() || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

/// The text with U+FFFD in the place of what is not shown as it is.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if is_loud(c) { '\u{fffd}' } else { c }).collect()
}

/// A name in quotation marks, escaped, cut to a readable length.
pub struct Name<'a>(pub &'a str);

impl fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("'")?;
        for c in self.0.chars().take(MOST_OF_NAME) {
            if c == '\'' { f.write_str("'")? } else { write!(f, "{}", c.escape_debug())? }
        }
        f.write_str(if self.0.chars().nth(MOST_OF_NAME).is_some() { "...'" } else { "'" })
    }
}

/// A path as it is; of one that is very long, the two ends.
pub struct File<'a>(pub &'a Path);

impl fmt::Display for File<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.0.to_string_lossy();
        let [first, last] = MOST_OF_PATH;
        if path.is_empty() {
            return f.write_str("'' (an empty path)");
        }
        if path.chars().nth(first + last + "...".len()).is_none() {
            return f.write_str(&path);
        }
        let end = path.char_indices().rev().nth(last - 1).map_or(0, |(at, _)| at);
        path.chars().take(first).try_for_each(|c| write!(f, "{c}"))?;
        write!(f, "...{}", &path[end..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_paths_of_any_length_make_short_messages() {
        let (name, path) = (|t: &str| Name(t).to_string(), |t: &str| File(Path::new(t)).to_string());
        assert_eq!(name("it's a\u{1b}[2J\u{202e}"), r"'it's a\u{1b}[2J\u{202e}'");
        assert_eq!(name(&"x".repeat(80)), format!("'{}'", "x".repeat(80)));
        assert_eq!(name(&"ä".repeat(1 << 20)), format!("'{}...'", "ä".repeat(80)));
        assert_eq!((path("/a b/c.gguf").as_str(), path("").as_str()), ("/a b/c.gguf", "'' (an empty path)"));
        let whole = "ö".repeat(253);
        assert_eq!(path(&whole), whole);
        let cut = path(&format!("/begin/{}/end.gguf", "ö".repeat(1 << 20)));
        assert!(cut.starts_with("/begin/ö") && cut.contains("ö...ö") && cut.ends_with("ö/end.gguf"), "{cut}");
        assert_eq!(cut.chars().count(), 253);
    }

    #[test]
    fn what_turns_the_direction_of_writing_or_ends_a_line_is_not_shown() {
        let loud = "\u{1b}\u{9b}\n\u{7f}\u{200e}\u{200f}\u{2028}\u{2029}\u{202a}\u{202b}\u{202c}\u{202d}\u{202e}\u{2066}\u{2067}\u{2068}\u{2069}\u{feff}";
        assert_eq!(printable(loud), "\u{fffd}".repeat(loud.chars().count()));
        for quiet in ["blk.0.ffn_up_exps.weight", "Größe, 重量, משקל", "\u{2010}\u{2030}\u{2065}\u{206a}"] {
            assert_eq!(printable(quiet), quiet);
        }
    }
}
