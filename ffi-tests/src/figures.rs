//! A figure that a test has found, as a line past the test runner's capture: people read it, and `cargo xtask robust` makes its table of it.

use crate::cache::say;

const START: &str = "FIGURE ";

/// Says what a test has found about `what`.
pub fn tell(what: &str, found: &str) {
    say(&format!("{START}{what}: {}", found.replace('\n', "; ")));
}

/// All that was told in an output: about what, and what was found.
pub fn told(output: &str) -> Vec<(String, String)> {
    // A line of the test runner's own ("test name ... ") may stand before it.
    let lines = output.lines().filter_map(|l| l.split_once(START)?.1.split_once(": "));
    lines.map(|(what, found)| (what.to_owned(), found.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_is_read_again() {
        let text = "running 1 test\ntest a ... FIGURE a server: 5 of 6: right\nFIGURE other\nFIGURE b: c\n";
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        assert_eq!(told(text), [pair("a server", "5 of 6: right"), pair("b", "c")]);
    }
}
