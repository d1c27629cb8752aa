//! All patterns at once.
//!
//! Owns: how the first matching pattern, or every one, is found for a name. Must not know: targets.
//!
//! `--n-cpu-moe 60` makes 60 rules, and a model may have 200,000 tensors. So the patterns that need no backtracking run as one automaton,
//! which reads the name once and reports all that match.

use regex_automata::{Input, PatternSet, meta};

use super::pattern::{Pattern, linear_set};

/// The patterns that match a name, by index, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hits(Vec<usize>);

impl Hits {
    /// The first pattern that matched.
    pub fn first(&self) -> Option<usize> {
        self.0.first().copied()
    }

    /// All of them, in order.
    pub fn as_slice(&self) -> &[usize] {
        &self.0
    }
}

#[derive(Debug)]
pub(super) struct Matcher {
    /// The patterns without backtracking, as one automaton, and their indices.
    set: meta::Regex,
    in_set: Vec<usize>,
    /// Indices of the others.
    backtracking: Vec<usize>,
}

impl Matcher {
    pub(super) fn new<'a>(patterns: impl Iterator<Item = &'a Pattern>) -> Matcher {
        let mut linear = Vec::new();
        let (mut in_set, mut backtracking) = (Vec::new(), Vec::new());
        for (i, pattern) in patterns.enumerate() {
            if pattern.backtracks() {
                backtracking.push(i);
            } else {
                linear.push(pattern);
                in_set.push(i);
            }
        }
        Matcher { set: linear_set(&linear), in_set, backtracking }
    }

    /// The index of the first pattern that matches. `matches` asks one of those that backtrack.
    pub(super) fn first<E>(&self, matches: &impl Fn(usize) -> Result<bool, E>, name: &str) -> Result<Option<usize>, E> {
        let first = self.linear_hits(name).next();
        for &i in self.backtracking.iter().take_while(|&&i| first.is_none_or(|first| i < first)) {
            if matches(i)? {
                return Ok(Some(i));
            }
        }
        Ok(first)
    }

    /// All patterns that match, likewise.
    pub(super) fn all<E>(&self, matches: &impl Fn(usize) -> Result<bool, E>, name: &str) -> Result<Hits, E> {
        let mut hits: Vec<usize> = self.linear_hits(name).collect();
        for &i in &self.backtracking {
            if matches(i)? {
                hits.push(i);
            }
        }
        hits.sort_unstable();
        Ok(Hits(hits))
    }

    fn linear_hits(&self, name: &str) -> impl Iterator<Item = usize> {
        let mut found = PatternSet::new(self.in_set.len());
        if !self.in_set.is_empty() {
            self.set.which_overlapping_matches(&Input::new(name), &mut found);
        }
        let hits: Vec<usize> = found.iter().map(|id| self.in_set[id.as_usize()]).collect();
        hits.into_iter()
    }
}
