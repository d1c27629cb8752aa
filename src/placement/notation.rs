//! The notation of rules: `pattern=TARGET`, separated.
//!
//! Owns: how a text is split into rules, and where in it a fault lies. Must not know: what becomes of the rules, how they are matched.

use super::budget::BACKTRACKING;
use super::pattern::Pattern;
use super::rule_error::{RuleError, RuleFault};
use super::rules::MAX_RULES;
use super::target::{Target, Targets};

/// A rule that was read but not appended.
pub(super) struct Parsed {
    /// Byte offset in the text.
    pub(super) at: usize,
    pub(super) pattern: Pattern,
    pub(super) target: Target,
}

/// Steps to try out all of them.
pub(super) fn trial_steps(parsed: &[Parsed]) -> u64 {
    parsed.iter().map(|p| p.pattern.trial_steps()).sum()
}

/// That `parsed`, of which the first has the number `number`, cannot be tried out in time; it names the slowest.
pub(super) fn too_slow_together(parsed: &[Parsed], text: &str, number: usize) -> RuleError {
    let slowest = parsed.iter().enumerate().max_by_key(|(_, p)| p.pattern.trial_steps());
    let (index, at) = slowest.map_or((0, 0), |(i, p)| (i, p.at));
    RuleError { rule: number + index, column: column(text, at), text: text.to_owned(), fault: RuleFault::TooSlowTogether }
}

/// Reads `list`, which starts at byte `at` of `text`. The first rule has the number `number`.
pub(super) fn parse_list(
    targets: &Targets,
    text: &str,
    list: &str,
    mut at: usize,
    separator: char,
    number: usize,
) -> Result<Vec<Parsed>, RuleError> {
    let mut parsed = Vec::new();
    let mut steps = 0;
    let first = number;
    for (i, rule) in list.split(separator).enumerate() {
        let number = number + i;
        let fault = |at: usize, fault| RuleError { rule: number, column: column(text, at), text: text.to_owned(), fault };
        if number > MAX_RULES {
            return Err(fault(at, RuleFault::TooManyRules));
        }
        if rule.is_empty() {
            return Err(fault(at, RuleFault::Empty));
        }
        let Some((pattern, target)) = rule.split_once('=') else { return Err(fault(at, RuleFault::NoTarget)) };
        let target = find_target(targets, target).map_err(|f| fault(at + pattern.len() + 1, f))?;
        let pattern = Pattern::new(pattern).map_err(|e| fault(at + e.at, RuleFault::Pattern(e.fault)))?;
        steps += pattern.trial_steps();
        parsed.push(Parsed { at, pattern, target });
        if steps > BACKTRACKING.steps {
            return Err(too_slow_together(&parsed, text, first));
        }
        at += rule.len() + separator.len_utf8();
    }
    Ok(parsed)
}

/// The target of that name.
pub(super) fn find_target(targets: &Targets, name: &str) -> Result<Target, RuleFault> {
    targets.find(name).cloned().ok_or_else(|| RuleFault::UnknownTarget {
        name: name.chars().take(80).collect(),
        nearest: targets.nearest(name).map(str::to_owned),
        known: targets.names().map(|n| n.chars().take(80).collect()).collect(),
    })
}

/// The character of `text`, from 1, in which byte `at` lies.
pub(super) fn column(text: &str, at: usize) -> usize {
    text.char_indices().take_while(|&(i, _)| i < at).count() + usize::from(text.is_char_boundary(at.min(text.len())))
}
