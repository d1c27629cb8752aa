//! What is wrong with a rule, and where.
//!
//! Owns: [`RuleError`] and its text. Must not know: how rules are parsed or used.

use std::fmt;

use super::budget::BACKTRACKING;
use super::pattern_error::PatternFault;
use super::rules::MAX_RULES;
use crate::text::printable;

/// A rule that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleError {
    /// Its number among all rules, from 1: as if it had been appended, so with those that were there before.
    pub rule: usize,
    /// Which character of the text, from 1.
    pub column: usize,
    /// The text the rule stands in: the whole argument, or the pattern of a rule that was given by itself.
    pub text: String,
    /// The fault.
    pub fault: RuleFault,
}

/// What is wrong with a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RuleFault {
    /// Nothing between two separators.
    Empty,
    /// No `=`.
    NoTarget,
    /// The pattern.
    Pattern(PatternFault),
    /// The name after `=`.
    UnknownTarget {
        /// What was written.
        name: String,
        /// What was probably meant.
        nearest: Option<String>,
        /// What may be written.
        known: Vec<String>,
    },
    /// More rules than stock has room for.
    TooManyRules,
    /// All patterns together are too large.
    TooLargeTogether,
    /// To try out all patterns together takes too many steps; this rule took most.
    TooSlowTogether,
}

impl RuleError {
    /// The text around the fault with a `^` below it, in two lines of at most 100 columns.
    pub fn excerpt(&self) -> String {
        const BEFORE: usize = 60;
        const MOST: usize = 96;
        let at = self.column.saturating_sub(1);
        let from = at.saturating_sub(BEFORE);
        let shown = printable(&self.text.chars().skip(from).take(MOST).collect::<String>());
        let (cut, dots) = if from > 0 { ("... ", 4) } else { ("", 0) };
        format!("{cut}{shown}\n{}^", " ".repeat(at - from + dots))
    }
}

impl fmt::Display for RuleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rule {}, column {}: {}", self.rule, self.column, self.fault)
    }
}

impl std::error::Error for RuleError {}

impl fmt::Display for RuleFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RuleFault::Empty => f.write_str("there is no rule between these separators"),
            RuleFault::NoTarget => {
                f.write_str("there is no '=' in this rule; a separator ends a rule, so a pattern in this notation cannot contain one")
            }
            RuleFault::Pattern(fault) => write!(f, "{fault}"),
            RuleFault::UnknownTarget { name, nearest, known } => {
                if name.is_empty() {
                    write!(f, "the name of the target is empty")?;
                } else {
                    write!(f, "unknown target '{}'", name.escape_debug())?;
                }
                f.write_str(&nearest.as_ref().map_or(".".to_owned(), |nearest| format!("; did you mean {nearest}?")))?;
                if name.contains(';') {
                    write!(f, " In -ot rules are separated by ',', not by ';' (which is llama-bench's).")?;
                } else if name.contains('=') || name.contains(')') {
                    write!(f, " The first '=' ends the pattern, so it cannot contain '(?='.")?;
                }
                write!(f, " Known: {}", known.join(", "))
            }
            RuleFault::TooManyRules => {
                write!(f, "there are more than {MAX_RULES} rules; stock llama.cpp has room for {}", MAX_RULES - 1)
            }
            RuleFault::TooSlowTogether => write!(
                f,
                "all rules together take more than the {} steps that there are to try them out, and this one takes most; avoid \
                 back-references and repetitions beside repetitions",
                BACKTRACKING.steps
            ),
            RuleFault::TooLargeTogether => f.write_str("the patterns of all rules together are too large"),
        }
    }
}
