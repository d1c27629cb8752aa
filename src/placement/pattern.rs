//! One pattern: does it match a tensor name?
//!
//! Owns: the choice of an engine and its bound in time. Must not know: rules and targets.
//!
//! A pattern without look-ahead and back-reference runs on `regex-automata` (`automaton`): linear in the name, whatever the pattern.
//! (`std::regex` takes exponential time on some of these.) The others need backtracking and run on `fancy-regex` with a limit on its steps. They are tried on a few
//! long names when the rule is read, and refused then if they are slow; should one still reach the limit on a real name, that is an error
//! and not a match or a miss. `regress`, which speaks JavaScript's grammar, has no such limit.

use std::fmt;
use std::sync::OnceLock;

use fancy_regex::{BytesMode, Regex, RegexBuilder};

use super::automaton::{self, Automaton};
use super::ecma::{Translation, translate};
use super::pattern_error::{PatternError, PatternFault};

/// Limits of backtracking steps per name. The engine does not tell how many steps it took, so a name is tried with one limit after the other: the
/// one that sufficed tells about how many, and all that were tried cost no more than a few times that. The last is about 10 ms; the one before,
/// about 1 ms, is the most that a pattern may take when it is tried out.
const LIMITS: [usize; 6] = [128, 512, 2_048, 8_192, 50_000, 500_000];
const TRIAL_LIMITS: usize = LIMITS.len() - 1;

/// What a name costs that the first limit suffices for.
const LEAST_STEPS: u64 = 64;

/// Stock's names are at most this long.
const NAME_BYTES: usize = 63;

/// A compiled pattern, with the semantics of stock's `std::regex_search`.
#[derive(Debug)]
pub struct Pattern {
    text: String,
    translation: Translation,
    /// Built when it is first asked.
    automaton: OnceLock<Option<Automaton>>,
    backtracking: Option<Ladder>,
    trial_steps: u64,
}

/// One pattern with each of the [`LIMITS`], built when it is needed.
#[derive(Debug)]
struct Ladder {
    first: Regex,
    others: [OnceLock<Option<Regex>>; LIMITS.len() - 1],
}

impl Ladder {
    fn new(text: &str) -> Result<Ladder, PatternError> {
        Ok(Ladder { first: backtracker(text, LIMITS[0])?, others: Default::default() })
    }

    /// Whether it matches, and about how many steps that took. At most `limits` limits are tried.
    fn is_match(&self, text: &str, name: &[u8], limits: usize) -> (Result<bool, TooSlow>, u64) {
        if let Ok(hit) = self.first.is_match(name) {
            return (Ok(hit), LEAST_STEPS);
        }
        let mut steps = LIMITS[0] as u64;
        for (regex, limit) in self.others.iter().zip(&LIMITS[1..]).take(limits - 1) {
            steps += *limit as u64;
            // It was built before, with another limit.
            let built = regex.get_or_init(|| backtracker(text, *limit).ok());
            if let Some(Ok(hit)) = built.as_ref().map(|regex| regex.is_match(name)) {
                return (Ok(hit), steps);
            }
        }
        (Err(TooSlow), steps)
    }
}

/// A pattern reached its limit of steps on a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooSlow;

impl fmt::Display for TooSlow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        PatternFault::TooSlow.fmt(f)
    }
}

impl std::error::Error for TooSlow {}

impl Pattern {
    /// Compiles a pattern.
    ///
    /// # Errors
    /// [`PatternError`] for what stock refuses, and for the few things that only Berth refuses ([`PatternFault::stock_accepts`]).
    pub fn new(text: &str) -> Result<Pattern, PatternError> {
        let translation = translate(text)?;
        let (mut backtracking, mut trial_steps) = (None, 0);
        if translation.backtracks {
            let ladder = Ladder::new(&translation.text)?;
            for name in trial_names(text) {
                let (tried, steps) = ladder.is_match(&translation.text, &name, TRIAL_LIMITS);
                trial_steps += steps;
                tried.map_err(|TooSlow| PatternError { at: 0, fault: PatternFault::TooSlow })?;
            }
            backtracking = Some(ladder);
        }
        Ok(Pattern { text: text.to_owned(), translation, automaton: OnceLock::new(), backtracking, trial_steps })
    }

    /// The pattern as it was given.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether some part of `name` matches.
    ///
    /// # Errors
    /// [`TooSlow`] if the pattern backtracks and reached its limit.
    pub fn is_match(&self, name: &str) -> Result<bool, TooSlow> {
        self.counted_match(name).0
    }

    /// The same, and about how many steps of its engine it took.
    pub(super) fn counted_match(&self, name: &str) -> (Result<bool, TooSlow>, u64) {
        if let Some(ladder) = &self.backtracking {
            return ladder.is_match(&self.translation.text, name.as_bytes(), LIMITS.len());
        }
        // What cannot be answered is refused, and not taken for a miss.
        match self.automaton.get_or_init(|| Automaton::new(&self.translation.text)).as_ref().map(|a| a.is_match(name.as_bytes())) {
            Some((matched, steps)) => (matched.ok_or(TooSlow), steps),
            None => (Err(TooSlow), 0),
        }
    }

    /// Ways to tell that it does not match ([`automaton::keys`]); none for one that backtracks.
    pub(super) fn keys(&self) -> Vec<Vec<Vec<u8>>> {
        if self.backtracks() { Vec::new() } else { automaton::keys(&self.translation.text) }
    }

    /// About how many steps of backtracking it took to try it out.
    pub(super) fn trial_steps(&self) -> u64 {
        self.trial_steps
    }

    pub(super) fn backtracks(&self) -> bool {
        self.backtracking.is_some()
    }

    /// About how many states it has.
    pub(super) fn cost(&self) -> u64 {
        self.translation.cost
    }
}

fn backtracker(text: &str, steps: usize) -> Result<Regex, PatternError> {
    RegexBuilder::new(text)
        .bytes_mode(BytesMode::Ascii)
        .backtrack_limit(steps)
        .delegate_size_limit(4 << 20)
        .build()
        .map_err(|_| PatternError { at: 0, fault: PatternFault::TooLarge })
}

/// Names on which a slow pattern shows itself: real ones, and long runs of what the pattern speaks about, with and without an end that does not
/// belong to them (backtracking starts where a match fails).
fn trial_names(pattern: &str) -> Vec<Vec<u8>> {
    const LETTERS: usize = 24;
    let mut names: Vec<Vec<u8>> =
        ["token_embd.weight", "blk.10.attn_output.weight", "blk.117.ffn_gate_up_exps.weight"].map(|n| n.as_bytes().to_vec()).into();
    let spoken: Vec<u8> = pattern.bytes().filter(|b| b.is_ascii_alphanumeric() || b"_.".contains(b)).collect();
    names.push(spoken.iter().copied().cycle().take(NAME_BYTES).collect());
    let mut count = [0usize; 256];
    spoken.iter().for_each(|&b| count[usize::from(b)] += 1);
    let mut letters: Vec<u8> = (0..=255).filter(|&b| count[usize::from(b)] > 0).collect();
    // What the pattern speaks of most, and something for classes.
    letters.sort_by_key(|&b| std::cmp::Reverse(count[usize::from(b)]));
    letters.truncate(LETTERS);
    letters.extend(b"0_");
    for letter in letters {
        names.push(vec![letter; NAME_BYTES]);
        names.push([&[letter].repeat(NAME_BYTES - 1)[..], b"!"].concat());
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hit(pattern: &str, name: &str) -> bool {
        Pattern::new(pattern).unwrap_or_else(|e| panic!("{pattern}: {e}")).is_match(name).unwrap()
    }

    fn fault(pattern: &str) -> (usize, PatternFault) {
        let e = Pattern::new(pattern).unwrap_err();
        (e.at, e.fault)
    }

    #[test]
    fn search_is_unanchored_and_case_sensitive() {
        assert!(hit("exps", "blk.0.ffn_gate_exps.weight"));
        assert!(!hit("EXPS", "blk.0.ffn_gate_exps.weight"));
        assert!(hit("blk.1", "blk.10.attn_q.weight"));
        assert!(!hit(r"blk\.1\.", "blk.10.attn_q.weight"));
        assert!(hit(r"^blk\.(1|2)\..*weight$", "blk.2.x.weight"));
        assert!(!hit("^weight", "blk.2.x.weight"));
    }

    #[test]
    fn grammar_is_that_of_libstdcxx_and_not_that_of_javascript() {
        assert!(hit("a**", "b"));
        assert!(hit("[[:digit:]]{2}", "x12"));
        assert!(hit("[[:DIGIT:]]", "1"));
        assert!(hit(r"\cA", "A"));
        assert!(!hit(r"(a)|\1b", "b"));
        assert!(hit("a]}", "a]}"));
        assert!(!hit("[]", "x"));
        assert!(hit("[^]", "\n"));
        assert!(!hit("^.$", "\n"));
        assert!(!hit("^.$", "é") && hit("^..$", "é"));
        assert!(hit(r"[\w-]", "-"));
        assert_eq!(fault("a{"), (1, PatternFault::BadBraces));
        assert_eq!(fault("{1}"), (0, PatternFault::NothingToRepeat));
        assert_eq!(fault("(?=a)*"), (5, PatternFault::NothingToRepeat));
        assert_eq!(fault("(?<!a)b"), (0, PatternFault::UnknownGroup));
        assert_eq!(fault(r"\1(a)"), (0, PatternFault::BadBackReference));
    }

    #[test]
    fn look_aheads_work_and_the_ambiguous_ones_are_refused() {
        assert!(hit(r"^(?!.*shexp).*ffn", "blk.0.ffn_up_exps.weight"));
        assert!(!hit(r"^(?!.*shexp).*ffn", "blk.0.ffn_up_shexp.weight"));
        assert!(hit(r"blk\.(?!1\.)\d+\.", "blk.12.x"));
        assert_eq!(fault(r"a(?=\bb)"), (4, PatternFault::AssertionInLookAhead));
        assert_eq!(fault("a(?!^b)"), (4, PatternFault::AssertionInLookAhead));
        assert_eq!(fault(r"(a)\1(?!b)"), (5, PatternFault::BackReferenceAndLookAhead));
    }

    #[test]
    fn faults_name_their_place() {
        for (pattern, at, fault_) in [
            ("", 0, PatternFault::Empty),
            ("ab(c", 2, PatternFault::UnclosedGroup),
            ("ab)c", 2, PatternFault::UnopenedGroup),
            ("a|*", 2, PatternFault::NothingToRepeat),
            ("x[ab", 1, PatternFault::UnclosedClass),
            ("x[b-a]", 3, PatternFault::BadRange),
            (r"[a\1]", 2, PatternFault::BadClass),
            ("[[:foo:]]", 1, PatternFault::BadClass),
            ("[[.a.]]", 1, PatternFault::Collating),
            (r"ab\", 2, PatternFault::BadEscape),
            (r"a\x4", 1, PatternFault::BadEscape),
            (r"\u0142", 0, PatternFault::WideEscape),
            ("a{3,2}", 1, PatternFault::BadBraces),
            ("[a-é]", 2, PatternFault::WideRange),
            ("a\0b", 1, PatternFault::Nul),
        ] {
            assert_eq!(fault(pattern), (at, fault_), "{pattern}");
        }
    }

    #[test]
    fn patterns_that_blow_up_are_linear_or_refused_early() {
        // What is not linear and not refused would not end.
        let name = "a".repeat(63) + "!";
        assert!(!hit("(a+)+$", &name));
        assert!(!hit("(a|aa|a?)*b", &name));
        assert_eq!(fault("((a{100}){100}){100}").1, PatternFault::TooLarge);
        assert_eq!(fault("a{99999999999}").1, PatternFault::TooLarge);
        assert_eq!(fault(&"(".repeat(100)).1, PatternFault::TooDeep);
        assert_eq!(fault(&("a".to_owned() + &"*".repeat(100))).1, PatternFault::TooDeep);
        assert_eq!(fault(&"a".repeat(5000)).1, PatternFault::TooLong);
        assert_eq!(fault("(?:a(?=a)|a)*(?=c)").1, PatternFault::TooSlow);
        // Found by fuzzing: many other letters hid the one that matters.
        assert_eq!(fault(r"12345678.(?:a(?=a)|a)*(?=c)|(?:a(?=a)|a)*(?=c)").1, PatternFault::TooSlow);
        assert_eq!(fault(r"(a*)*(a*)*(a*)*\1\2\3!!").1, PatternFault::TooSlow);
    }

    #[test]
    fn slow_pattern_that_passed_the_trial_is_an_error_on_the_name_and_not_a_miss() {
        // No trial name has a `q` before the run of `z`.
        let p = Pattern::new(r"q(?:z(?=z)|z)*(?=c)").unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(p.is_match(&("q".to_owned() + &"z".repeat(60))), Err(TooSlow));
    }

    #[test]
    fn random_text_is_compiled_or_refused_but_never_panics() {
        let seed = fastrand::u64(..);
        let mut rng = fastrand::Rng::with_seed(seed);
        const PARTS: [&str; 36] = [
            "a",
            "b",
            "1",
            ".",
            "*",
            "+",
            "?",
            "|",
            "(",
            "(?:",
            "(?=",
            "(?!",
            ")",
            "[",
            "[^",
            "]",
            "-",
            "\\d",
            "\\w",
            "\\S",
            "\\b",
            "\\1",
            "\\",
            "{2}",
            "{1,}",
            "{0,3}",
            "{",
            "}",
            "^",
            "$",
            "é",
            "[:alpha:]",
            "\\x61",
            "ffn",
            "blk",
            "\\.",
        ];
        for _ in 0..5_000 {
            let pattern: String = (0..rng.usize(1..12)).map(|_| rng.choice(PARTS).unwrap()).collect();
            if let Ok(Ok(p)) = std::panic::catch_unwind(|| Pattern::new(&pattern)) {
                let _ = p.is_match("blk.1.ffn_a.b");
            } else {
                assert!(std::panic::catch_unwind(|| Pattern::new(&pattern)).is_ok(), "seed {seed}: {pattern}");
            }
        }
    }
}
