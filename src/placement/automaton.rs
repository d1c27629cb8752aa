//! A pattern that needs no backtracking, as an automaton.
//!
//! Owns: [`Automaton`]: whether it matches a name, and how many steps that took; [`keys`]: what a name must contain for a pattern to match.
//! Must not know: rules, other patterns.
//!
//! The automaton is deterministic and built while it runs, one per pattern. One for all patterns together would read a name only once, but a
//! hundred rules like `blk.*7.*exps` make it forget and build its states over and over: 200,000 names took seven seconds.

use std::sync::{Mutex, PoisonError};

use regex_automata::hybrid::dfa::{Cache, DFA};
use regex_automata::{Input, nfa::thompson, util::syntax};
use regex_syntax::hir::{Hir, HirKind, literal::Extractor};

/// Memory of one automaton. Ordinary ones need a few KiB; what needs more than this forgets states and builds them again, which is counted.
const CACHE_BYTES: usize = 32 << 10;

/// What it costs to ask at all.
const LEAST_STEPS: u64 = 16;

#[derive(Debug)]
pub(super) struct Automaton {
    dfa: DFA,
    cache: Mutex<Cache>,
    /// To build one state of the automaton, so many of the pattern are looked at.
    pattern_states: u64,
}

impl Automaton {
    /// `translated` as `ecma` wrote it. `None` if it is no pattern, which `ecma` never writes.
    pub(super) fn new(translated: &str) -> Option<Automaton> {
        // The number of states is bounded by `Rules`, and so is memory.
        let nfa = thompson::Config::new().utf8(false).nfa_size_limit(None).which_captures(thompson::WhichCaptures::None);
        let config = DFA::config().cache_capacity(CACHE_BYTES).skip_cache_capacity_check(true);
        let dfa = DFA::builder().configure(config).thompson(nfa).syntax(bytes()).build(translated).ok()?;
        let (cache, pattern_states) = (Mutex::new(dfa.create_cache()), dfa.get_nfa().states().len() as u64);
        Some(Automaton { dfa, cache, pattern_states })
    }

    /// Whether some part of `name` matches, and about how many steps that took: one per byte, and if states were built on the way, one per byte
    /// and state of the pattern. `None` if the automaton gave up, which it is not configured to.
    pub(super) fn is_match(&self, name: &[u8]) -> (Option<bool>, u64) {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let before = (cache.memory_usage(), cache.clear_count());
        let found = self.dfa.try_search_fwd(&mut cache, &Input::new(name).earliest(true));
        let read = match &found {
            Ok(Some(hit)) => hit.offset(),
            _ => name.len(),
        };
        let each = if before == (cache.memory_usage(), cache.clear_count()) { 1 } else { self.pattern_states };
        (found.ok().map(|hit| hit.is_some()), LEAST_STEPS + each * (read as u64 + 1))
    }
}

/// Ways to tell that a pattern does not match without asking it: of each list, a name must contain at least one text. None if there is no such
/// text, as for `.*`.
pub(super) fn keys(translated: &str) -> Vec<Vec<Vec<u8>>> {
    // Literals that stand side by side are one part; more parts than this are looked at nowhere, so that a long pattern takes no long time.
    const STARTS: usize = 64;
    const PARTS: usize = 8;
    let Ok(hir) = syntax::parse_with(translated, &bytes()) else { return Vec::new() };
    let parts = match hir.kind() {
        HirKind::Concat(parts) => parts.as_slice(),
        _ => std::slice::from_ref(&hir),
    };
    let mut extractor = Extractor::new();
    extractor.limit_class(8).limit_repeat(4).limit_literal_len(24).limit_total(8);
    let key = |from: usize| {
        let to = parts.len().min(from + PARTS);
        let texts = extractor.extract(&Hir::concat(parts[from..to].to_vec()));
        let texts: Vec<Vec<u8>> = texts.literals()?.iter().map(|l| l.as_bytes().to_vec()).collect();
        (!texts.is_empty() && texts.iter().all(|t| !t.is_empty())).then_some(texts)
    };
    (0..parts.len().min(STARTS)).filter_map(key).collect()
}

/// Names and patterns are bytes.
fn bytes() -> syntax::Config {
    syntax::Config::new().unicode(false).utf8(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::ecma::translate;

    fn translated(pattern: &str) -> String {
        translate(pattern).unwrap_or_else(|e| panic!("{pattern}: {e}")).text
    }

    #[test]
    fn a_name_that_was_seen_costs_one_step_per_byte_and_a_new_one_as_many_as_the_pattern_has_states() {
        let a = Automaton::new(&translated("blk.*7.*exps")).unwrap();
        let name = b"blk.17.ffn_up_shexp.weight";
        let (hit, first) = a.is_match(name);
        assert_eq!(hit, Some(false));
        assert_eq!(first, LEAST_STEPS + a.pattern_states * (name.len() as u64 + 1));
        assert_eq!(a.is_match(name), (Some(false), LEAST_STEPS + name.len() as u64 + 1));
        assert_eq!(a.is_match(b"blk.7.exps").0, Some(true));
    }

    #[test]
    fn keys_are_texts_that_every_match_contains() {
        let keys = |pattern| {
            let all = keys(&translated(pattern));
            all.iter().map(|k| k.iter().map(|t| String::from_utf8_lossy(t).into_owned()).collect::<Vec<_>>().join("|")).collect::<Vec<_>>()
        };
        assert_eq!(keys("exps"), ["exps"]);
        assert_eq!(keys("blk.*7.*exps"), ["blk", "7", "exps"]);
        assert_eq!(keys("(a|b|c|.*)*N.*.*"), ["N"]);
        assert_eq!(keys(r"blk\.(1|2)\.ffn"), ["blk.1.ffn|blk.2.ffn", "1.ffn|2.ffn", ".ffn"]);
        assert_eq!(keys("up|down"), ["up|down"]);
        for none in [".*", "a?", "a*b*", "(x|)", "[^a]", "^$"] {
            assert!(keys(none).is_empty(), "{none}");
        }
        // A long pattern is looked at in parts.
        assert!(keys(&"a[^x]".repeat(800)).len() <= 64);
    }
}
