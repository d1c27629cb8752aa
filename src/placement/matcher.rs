//! Which patterns are worth asking about a name.
//!
//! Owns: the texts of which a name must contain one for a pattern to match, searched for all at once. Must not know: targets, how a pattern is
//! asked.
//!
//! `--n-cpu-moe 60` makes 60 rules, and a model may have 200,000 tensors. Of those rules at most one has a text that the name contains, so
//! the others are not asked.

use std::collections::HashMap;

use aho_corasick::{AhoCorasick, AhoCorasickKind};

use super::pattern::Pattern;

/// The patterns that match a name, by index, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hits(pub(super) Vec<usize>);

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
    finder: Option<AhoCorasick>,
    /// Per text of the finder: the patterns to ask if a name contains it.
    waiting: Vec<Vec<usize>>,
    /// Patterns that are asked about every name.
    always: Vec<usize>,
}

impl Matcher {
    pub(super) fn new<'a>(patterns: impl Iterator<Item = &'a Pattern>) -> Matcher {
        let keys: Vec<Vec<Vec<Vec<u8>>>> = patterns.map(Pattern::keys).collect();
        // `blk` is in every rule and every name, `.17.` in one of them: the fewer patterns have a text, the more it tells.
        let mut shared: HashMap<&[u8], usize> = HashMap::new();
        for text in keys.iter().flatten().flatten() {
            *shared.entry(text).or_default() += 1;
        }
        let worth = |key: &&Vec<Vec<u8>>| {
            let patterns: usize = key.iter().map(|text| shared.get(text.as_slice()).copied().unwrap_or(0)).sum();
            (patterns, std::cmp::Reverse(key.iter().map(Vec::len).min()))
        };
        let mut always = Vec::new();
        let (mut texts, mut waiting): (Vec<&[u8]>, Vec<Vec<usize>>) = (Vec::new(), Vec::new());
        let mut place: HashMap<&[u8], usize> = HashMap::new();
        for (i, of_pattern) in keys.iter().enumerate() {
            let Some(best) = of_pattern.iter().min_by_key(worth) else {
                always.push(i);
                continue;
            };
            for text in best {
                let at = *place.entry(text).or_insert_with(|| {
                    texts.push(text);
                    waiting.push(Vec::new());
                    texts.len() - 1
                });
                waiting[at].push(i);
            }
        }
        let finder = AhoCorasick::builder().kind(Some(AhoCorasickKind::ContiguousNFA)).build(&texts).ok();
        if finder.is_none() {
            // Too many texts for it, which the limits of rules and of texts per rule exclude.
            always = (0..keys.len()).collect();
        }
        Matcher { finder, waiting, always }
    }

    /// The patterns to ask about `name`, in order. No other matches it.
    pub(super) fn candidates(&self, name: &str) -> Vec<usize> {
        let mut found: Vec<usize> =
            self.finder.iter().flat_map(|f| f.find_overlapping_iter(name)).map(|hit| hit.pattern().as_usize()).collect();
        found.sort_unstable();
        found.dedup();
        let mut asked = self.always.clone();
        asked.extend(found.iter().flat_map(|&text| &self.waiting[text]));
        asked.sort_unstable();
        asked.dedup();
        asked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates(patterns: &[&str], name: &str) -> Vec<usize> {
        let patterns: Vec<Pattern> = patterns.iter().map(|p| Pattern::new(p).unwrap_or_else(|e| panic!("{p}: {e}"))).collect();
        Matcher::new(patterns.iter()).candidates(name)
    }

    #[test]
    fn only_patterns_whose_rarest_text_is_in_the_name_are_asked() {
        let name = "blk.17.ffn_up_exps.weight";
        assert_eq!(candidates(&["blk.*7.*exps", "blk.*8.*exps", "blk.*1.*exps", "blk.*17.*exps"], name), [0, 2, 3]);
        let layers: Vec<String> = (0..100).map(|i| format!(r"blk\.{i}\.ffn_(up|down|gate)_exps")).collect();
        assert_eq!(candidates(&layers.iter().map(String::as_str).collect::<Vec<_>>(), name), [17]);
        // What tells nothing, and what backtracks, is always asked.
        assert_eq!(candidates(&[".*", "attn", "(?!attn)blk", "[0-9]+"], name), [0, 2, 3]);
        assert_eq!(candidates(&[], name), [0; 0]);
        assert_eq!(candidates(&["a"], ""), [0; 0]);
    }
}
