//! Why a pattern is refused.
//!
//! Owns: the list of faults, their sentences, and which of them stock would not have. Must not know: how they are found.

use std::fmt;

/// What is wrong with a pattern, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PatternError {
    /// Byte offset in the pattern.
    pub at: usize,
    /// The fault.
    pub fault: PatternFault,
}

/// What is wrong with a pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PatternFault {
    /// Nothing at all: it would match every tensor.
    Empty,
    /// A `(` without its `)`.
    UnclosedGroup,
    /// A `)` without its `(`.
    UnopenedGroup,
    /// `(?` that is not `(?:`, `(?=` or `(?!`.
    UnknownGroup,
    /// `*`, `+`, `?` or `{` with nothing before it that can be repeated.
    NothingToRepeat,
    /// A `{` that does not start `{n}`, `{n,}` or `{n,m}`.
    BadBraces,
    /// A `[` without its `]`.
    UnclosedClass,
    /// `[z-a]`, or a range that starts or ends with a class.
    BadRange,
    /// `[:name:]` that is not a class, or something that cannot stand in brackets.
    BadClass,
    /// A `\` at the end, or `\x` or `\u` without its hexadecimal digits.
    BadEscape,
    /// `\1` for a group that does not exist or is not closed yet.
    BadBackReference,
    /// Longer than [`super::MAX_PATTERN_BYTES`].
    TooLong,
    /// Nests too deep.
    TooDeep,
    /// Repetitions multiply to too many states.
    TooLarge,
    /// Backtracking takes too many steps on a name of ordinary length.
    TooSlow,
    /// A NUL byte. Stock would see the pattern end there.
    Nul,
    /// `[.x.]` or `[=x=]`.
    Collating,
    /// A range in brackets with an end outside of ASCII.
    WideRange,
    /// `\u0100` or above: it is no byte.
    WideEscape,
    /// `^`, `\b` or `\B` in a look-ahead: in libstdc++ its meaning depends on where the search started.
    AssertionInLookAhead,
    /// A look-ahead and a back-reference in one pattern: libstdc++ keeps groups of look-aheads that failed.
    BackReferenceAndLookAhead,
}

/// What stock accepts.
const ONLY_HERE: [PatternFault; 11] = [
    PatternFault::Empty,
    PatternFault::TooLong,
    PatternFault::TooDeep,
    PatternFault::TooLarge,
    PatternFault::TooSlow,
    PatternFault::Nul,
    PatternFault::Collating,
    PatternFault::WideRange,
    PatternFault::WideEscape,
    PatternFault::AssertionInLookAhead,
    PatternFault::BackReferenceAndLookAhead,
];

impl PatternFault {
    /// Whether stock accepts such a pattern, so that refusing it is Berth's decision. `docs/rules.md` lists these.
    pub fn stock_accepts(self) -> bool {
        ONLY_HERE.contains(&self)
    }
}

impl fmt::Display for PatternFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use PatternFault as F;
        f.write_str(match self {
            F::Empty => "the pattern is empty and would match every tensor; write .* if that is meant",
            F::UnclosedGroup => "this ( is not closed",
            F::UnopenedGroup => "this ) has no (",
            F::UnknownGroup => "(? must be followed by : (group), = (look-ahead) or ! (negative look-ahead)",
            F::NothingToRepeat => "there is nothing before this that can be repeated; write a backslash before it if it is meant literally",
            F::BadBraces => "this { does not start {n}, {n,} or {n,m}; write \\{ if it is meant literally",
            F::UnclosedClass => "this [ is not closed",
            F::BadRange => "not a range: its first character must not come after its last, and both must be single characters",
            F::BadClass => "not possible inside [ ]",
            F::BadEscape => "a \\ must be followed by a character, \\x by two and \\u by four hexadecimal digits",
            F::BadBackReference => "there is no closed group of this number before it",
            F::TooLong => "the pattern is longer than 4096 bytes",
            F::TooDeep => "the pattern nests deeper than 40 levels",
            F::TooLarge => "the repetitions multiply to too many states",
            F::TooSlow => "the pattern takes too many steps on ordinary names; avoid repetitions inside repetitions",
            F::Nul => "a NUL cannot be part of a pattern",
            F::Collating => "[. .] and [= =] are not supported; write the characters",
            F::WideRange => "a range can only have ASCII characters as its ends",
            F::WideEscape => "names are compared byte by byte, so \\u can only be up to 00ff",
            F::AssertionInLookAhead => {
                "^, \\b and \\B inside a look-ahead are not supported: stock gives them a meaning that depends on the position"
            }
            F::BackReferenceAndLookAhead => "a back-reference and a look-ahead in one pattern are not supported",
        })
    }
}

impl std::error::Error for PatternError {}

impl fmt::Display for PatternError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at byte {} of the pattern: {}", self.at, self.fault)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::Pattern;

    #[test]
    fn the_documentation_lists_what_only_berth_refuses_with_an_example() {
        let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/rules.md")).unwrap();
        let table = text.split("## Patterns").nth(1).and_then(|t| t.split("\n##").next()).unwrap();
        // A `|` in a cell has a backslash before it.
        let cells = |row: &str| row.replace(r"\|", "\0").split('|').map(|c| c.trim().replace('\0', "|")).collect::<Vec<_>>();
        let rows: Vec<Vec<String>> = table.lines().filter(|l| l.starts_with("| ")).skip(1).map(cells).collect();
        assert_eq!(rows.len(), ONLY_HERE.len());
        for fault in ONLY_HERE {
            let row = rows.iter().find(|r| r[2] == fault.to_string()).unwrap_or_else(|| panic!("{fault:?} is not in docs/rules.md"));
            let example = match row[1].as_str() {
                "a NUL byte" => "a\0b".to_owned(),
                "more than 4096 bytes" => "a".repeat(4097),
                "more than 40 groups in each other" => format!("{}a{}", "(".repeat(41), ")".repeat(41)),
                "(nothing), as in `=CPU`" => String::new(),
                shown => shown.strip_prefix('`').and_then(|s| s.strip_suffix('`')).unwrap_or_else(|| panic!("{shown}")).to_owned(),
            };
            assert_eq!(Pattern::new(&example).map(|_| ()).map_err(|e| e.fault), Err(fault), "{example}");
        }
        for fine in [r"(?!.*[._]attn[._])blk", "^(?!.*exps).*"] {
            assert!(Pattern::new(fine).is_ok(), "what the text recommends: {fine}");
        }
    }
}
