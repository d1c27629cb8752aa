//! How texts from files, command lines and callers are shown.
//!
//! Owns: which characters are never shown as they are, and the length at which names and paths are cut. Must not know: whose texts they are.

/// Whether a terminal or a browser may obey the character instead of showing it: control characters, marks that turn the direction of writing,
/// ends of lines and paragraphs, and the byte order mark, which nobody sees.
pub fn is_loud(c: char) -> bool {
    c.is_control() || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

/// The text with U+FFFD in the place of what is not shown as it is.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if is_loud(c) { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_turns_the_direction_of_writing_or_ends_a_line_is_not_shown() {
        let loud = "\u{1b}\u{9b}\n\u{7f}\u{200e}\u{200f}\u{2028}\u{2029}\u{202a}\u{202b}\u{202c}\u{202d}\u{202e}\u{2066}\u{2067}\u{2068}\u{2069}\u{feff}";
        assert_eq!(printable(loud), "\u{fffd}".repeat(loud.chars().count()));
        for quiet in ["blk.0.ffn_up_exps.weight", "Größe, 重量, משקל", "\u{2010}\u{2030}\u{2065}\u{206a}"] {
            assert_eq!(printable(quiet), quiet);
        }
    }
}
