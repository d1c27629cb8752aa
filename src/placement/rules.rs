//! Rules: which pattern sends which tensors where.
//!
//! Owns: the notations of stock (`-ot`, llama-bench's `-ot`, `--cpu-moe`, `--n-cpu-moe`, `--n-cpu-ffn`), the order of rules, and how often each
//! one matched. Must not know: the grammar of patterns, what a decision is made of.
//!
//! In stock, options append to one list in the order of the command line, and the first rule that matches wins. A text is taken whole or not at
//! all: after an error the rules are as they were.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use super::budget::{AUTOMATA, BACKTRACKING, Budget, SlowRule, StepLimit};
use super::matcher::{Hits, Matcher};
use super::notation::{Parsed, column, find_target, parse_list, too_slow_together, trial_steps};
use super::pattern::Pattern;
use super::rule_error::{RuleError, RuleFault};
use super::target::{Target, Targets};

/// Stock keeps room for this many entries, the last of which ends the list (`llama_max_tensor_buft_overrides` in `llama.h`), so it takes 4095
/// rules: with 4096, llama.cpp 0.5.0 stops at an assertion. Here 4096 are taken, since other loaders need no entry for the end;
/// [`super::Explanation`] warns of the last one, and one more is an error.
pub const MAX_RULES: usize = 4096;

/// All patterns together have at most about this many states, so that memory and time stay bounded.
const MAX_TOTAL_COST: u64 = 1 << 19;

/// What `--cpu-moe` matches (`LLM_FFN_EXPS_REGEX` in `common.h`): the experts of every architecture, merged, chunked, biases and scales.
const EXPERTS: &str = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps";

/// What `--n-cpu-ffn` matches (`LLM_FFN_DENSE_REGEX` in `common.h`).
const DENSE: &str = r"\.ffn_(up|down|gate)\.";

/// Where a rule came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// `-ot`, in either notation.
    OverrideTensor,
    /// Given as a pattern and a target.
    Pushed,
    /// `--cpu-moe`.
    CpuMoe,
    /// `--n-cpu-moe`.
    NCpuMoe,
    /// `--n-cpu-ffn`.
    NCpuFfn,
}

/// One rule.
#[derive(Debug)]
pub struct Rule {
    pattern: Pattern,
    target: Target,
    origin: Origin,
    matches: AtomicU64,
    /// Steps of its engine so far.
    steps: AtomicU64,
}

impl Rule {
    /// The pattern.
    pub fn pattern(&self) -> &Pattern {
        &self.pattern
    }

    /// Where its tensors go.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Where it came from.
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// How many decisions it has won so far.
    pub fn matches(&self) -> u64 {
        self.matches.load(Ordering::Relaxed)
    }
}

/// An ordered list of rules.
#[derive(Debug)]
pub struct Rules {
    targets: Targets,
    rules: Vec<Rule>,
    cost: u64,
    /// Steps to try out all patterns.
    trial_steps: u64,
    /// Names that were asked for, and the steps that the rules took on them, per engine.
    names: AtomicU64,
    backtracking: Budget,
    automata: Budget,
    matcher: OnceLock<Matcher>,
}

impl Rules {
    /// No rules yet. `targets` are what rules may name.
    pub fn new(targets: Targets) -> Rules {
        Rules {
            targets,
            rules: Vec::new(),
            cost: 0,
            trial_steps: 0,
            names: AtomicU64::new(0),
            backtracking: Budget::new(BACKTRACKING),
            automata: Budget::new(AUTOMATA),
            matcher: OnceLock::new(),
        }
    }

    /// Appends the rules of one `-ot` argument: `pattern=TARGET,pattern=TARGET`.
    ///
    /// # Errors
    /// The first rule that cannot be used, with its number among all rules and its column in `text`.
    pub fn parse(&mut self, text: &str) -> Result<(), RuleError> {
        let parsed = parse_list(&self.targets, text, text, 0, ',', self.rules.len() + 1)?;
        self.append(parsed, Some(text), Origin::OverrideTensor)
    }

    /// How many runs one `-ot` argument of llama-bench describes.
    pub fn bench_runs(text: &str) -> usize {
        text.split(',').count()
    }

    /// Appends the rules of one run, from 0, of one `-ot` argument of llama-bench: `;` between rules, `,` between runs, each of which has rules of
    /// its own. A run that there is not has none.
    ///
    /// # Errors
    /// The first rule of any run that cannot be used, with its column in `text` and the number that it would have here. Other than in llama-bench,
    /// an empty rule is an error: there it hides every rule behind it.
    pub fn parse_bench(&mut self, text: &str, run: usize) -> Result<(), RuleError> {
        let mut wanted = Vec::new();
        let mut at = 0;
        for (number, list) in text.split(',').enumerate() {
            if !list.is_empty() {
                // llama-bench lets a last `;` pass.
                let rules = list.strip_suffix(';').unwrap_or(list);
                let parsed = parse_list(&self.targets, text, rules, at, ';', self.rules.len() + 1)?;
                if number == run {
                    wanted = parsed;
                }
            }
            at += list.len() + 1;
        }
        self.append(wanted, Some(text), Origin::OverrideTensor)
    }

    /// Appends one rule. Nothing is split off, so the pattern may contain commas and `=`.
    ///
    /// # Errors
    /// What is wrong with the pattern or the target; the column counts in the pattern.
    pub fn push(&mut self, pattern: &str, target: &str) -> Result<(), RuleError> {
        let number = self.rules.len() + 1;
        let fault = |column, fault| RuleError { rule: number, column, text: pattern.to_owned(), fault };
        let compiled = Pattern::new(pattern).map_err(|e| fault(column(pattern, e.at), RuleFault::Pattern(e.fault)))?;
        let target = find_target(&self.targets, target).map_err(|f| fault(1, f))?;
        let parsed = Parsed { at: 0, pattern: compiled, target };
        self.append(vec![parsed], Some(pattern), Origin::Pushed)
    }

    /// `--cpu-moe`: all experts to `CPU`.
    ///
    /// # Errors
    /// Too many rules.
    pub fn cpu_moe(&mut self) -> Result<(), RuleError> {
        self.generate(&[EXPERTS.to_owned()], Origin::CpuMoe)
    }

    /// `--n-cpu-moe N`: the experts of the first `n` layers to `CPU`.
    ///
    /// # Errors
    /// Too many rules.
    pub fn n_cpu_moe(&mut self, n: u32) -> Result<(), RuleError> {
        self.generate(&per_layer(n, EXPERTS), Origin::NCpuMoe)
    }

    /// `--n-cpu-ffn N`: the dense feed-forward weights of the first `n` layers to `CPU`.
    ///
    /// # Errors
    /// Too many rules.
    pub fn n_cpu_ffn(&mut self, n: u32) -> Result<(), RuleError> {
        self.generate(&per_layer(n, DENSE), Origin::NCpuFfn)
    }

    /// The rules in order.
    pub fn iter(&self) -> std::slice::Iter<'_, Rule> {
        self.rules.iter()
    }

    /// The rule with that index.
    pub fn get(&self, index: usize) -> Option<&Rule> {
        self.rules.get(index)
    }

    /// How many rules there are.
    pub fn len(&self) -> usize {
        self.rules.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// What rules may name.
    pub fn targets(&self) -> &Targets {
        &self.targets
    }

    /// The first rule that matches `name`, as an index. Does not count.
    ///
    /// # Errors
    /// A pattern that reached its limit.
    pub fn first_match(&self, name: &str) -> Result<Option<usize>, SlowRule> {
        if self.rules.is_empty() {
            return Ok(None);
        }
        self.names.fetch_add(1, Ordering::Relaxed);
        for rule in self.matcher().candidates(name) {
            if self.matches(rule, name)? {
                return Ok(Some(rule));
            }
        }
        Ok(None)
    }

    /// Every rule that matches `name`, in order. Does not count.
    ///
    /// # Errors
    /// A pattern that reached its limit.
    pub fn all_matches(&self, name: &str) -> Result<Hits, SlowRule> {
        self.names.fetch_add(1, Ordering::Relaxed);
        let mut hits = Vec::new();
        for rule in self.matcher().candidates(name) {
            if self.matches(rule, name)? {
                hits.push(rule);
            }
        }
        Ok(Hits(hits))
    }

    pub(super) fn count_match(&self, rule: usize) {
        if let Some(rule) = self.rules.get(rule) {
            rule.matches.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Asks a rule, within what all of its engine may take.
    fn matches(&self, rule: usize, name: &str) -> Result<bool, SlowRule> {
        let slow = |rule, limit| SlowRule { rule, tensor: name.to_owned(), limit };
        let backtracks = self.rules[rule].pattern.backtracks();
        let budget = if backtracks { &self.backtracking } else { &self.automata };
        if let Some(all) = budget.used_up(self.names.load(Ordering::Relaxed)) {
            let same = (0..self.rules.len()).filter(|&i| self.rules[i].pattern.backtracks() == backtracks);
            let slowest = same.max_by_key(|&i| self.rules[i].steps.load(Ordering::Relaxed)).unwrap_or(rule);
            return Err(slow(slowest, if backtracks { StepLimit::Backtracking(all) } else { StepLimit::Automata(all) }));
        }
        let (matched, steps) = self.rules[rule].pattern.counted_match(name);
        self.rules[rule].steps.fetch_add(steps, Ordering::Relaxed);
        budget.take(steps);
        matched.map_err(|_| slow(rule, StepLimit::OnOneName))
    }

    fn matcher(&self) -> &Matcher {
        self.matcher.get_or_init(|| Matcher::new(self.rules.iter().map(|r| &r.pattern)))
    }

    fn generate(&mut self, patterns: &[String], origin: Origin) -> Result<(), RuleError> {
        let mut parsed = Vec::with_capacity(patterns.len().min(MAX_RULES + 1));
        // One too many is enough to find out.
        for pattern in patterns.iter().take(MAX_RULES + 1) {
            let fault = |fault| RuleError { rule: self.rules.len() + 1, column: 1, text: pattern.clone(), fault };
            let compiled = Pattern::new(pattern).map_err(|e| fault(RuleFault::Pattern(e.fault)))?;
            parsed.push(Parsed { at: 0, pattern: compiled, target: Target::Cpu });
        }
        self.append(parsed, None, origin)
    }

    /// `text` is what they were read from; `None` if each is its own text.
    fn append(&mut self, parsed: Vec<Parsed>, text: Option<&str>, origin: Origin) -> Result<(), RuleError> {
        let mut cost = self.cost;
        for (i, rule) in parsed.iter().enumerate() {
            let number = self.rules.len() + i + 1;
            cost += rule.pattern.cost();
            let fault = match () {
                () if number > MAX_RULES => RuleFault::TooManyRules,
                () if cost > MAX_TOTAL_COST => RuleFault::TooLargeTogether,
                () => continue,
            };
            let text = text.unwrap_or(rule.pattern.as_str());
            return Err(RuleError { rule: number, column: column(text, rule.at), text: text.to_owned(), fault });
        }
        let trial_steps = self.trial_steps + trial_steps(&parsed);
        if trial_steps > BACKTRACKING.steps {
            return Err(too_slow_together(&parsed, text.unwrap_or(""), self.rules.len() + 1));
        }
        (self.cost, self.trial_steps) = (cost, trial_steps);
        self.matcher = OnceLock::new();
        self.rules.extend(parsed.into_iter().map(|p| Rule {
            pattern: p.pattern,
            target: p.target,
            origin,
            matches: AtomicU64::new(0),
            steps: AtomicU64::new(0),
        }));
        Ok(())
    }
}

fn per_layer(n: u32, pattern: &str) -> Vec<String> {
    (0..n.min(MAX_RULES as u32 + 1)).map(|layer| format!(r"blk\.{layer}{pattern}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::PatternFault;
    use crate::placement::budget::Limit;

    fn rules() -> Rules {
        Rules::new(Targets::new(["CUDA0", "CUDA1", "RPC1[127.0.0.1:50053]"]))
    }

    fn parsed(text: &str) -> Rules {
        let mut r = rules();
        r.parse(text).unwrap_or_else(|e| panic!("{text}: {e}"));
        r
    }

    fn listed(rules: &Rules) -> Vec<(&str, &str)> {
        rules.iter().map(|r| (r.pattern().as_str(), r.target().name())).collect()
    }

    #[test]
    fn rules_are_split_at_commas_and_then_at_the_first_equals_sign() {
        let r = parsed(r"blk\.([0-9]|1[0-9])\.=CUDA0,exps=CPU,.*=RPC1[127.0.0.1:50053]");
        assert_eq!(listed(&r), [(r"blk\.([0-9]|1[0-9])\.", "CUDA0"), ("exps", "CPU"), (".*", "RPC1[127.0.0.1:50053]")]);
        // As in stock, nothing is trimmed.
        assert_eq!(listed(&parsed("a=CPU, b=CPU")), [("a", "CPU"), (" b", "CPU")]);
    }

    #[test]
    fn pushed_rules_may_contain_commas_and_equals_signs() {
        let mut r = rules();
        r.push(r"blk\.\d{1,2}\.(?=ffn)", "ARENA").unwrap();
        assert_eq!(r.first_match("blk.12.ffn_up.weight").unwrap(), Some(0));
        assert_eq!(r.first_match("blk.123.ffn_up.weight").unwrap(), None);
        let e = r.push("a(b", "CPU").unwrap_err();
        assert_eq!((e.rule, e.column, e.fault), (2, 2, RuleFault::Pattern(PatternFault::UnclosedGroup)));
        assert!(matches!(r.push("a", "GPU").unwrap_err().fault, RuleFault::UnknownTarget { .. }));
    }

    #[test]
    fn every_fault_names_its_rule_and_column() {
        let mut r = rules();
        r.parse("first=CPU").unwrap();
        // The rule's number is that among all rules, one of which is there already.
        for (text, rule, column, fault) in [
            ("", 1, 1, RuleFault::Empty),
            ("a=CPU,", 2, 7, RuleFault::Empty),
            (",a=CPU", 1, 1, RuleFault::Empty),
            ("a=CPU,,b=CPU", 2, 7, RuleFault::Empty),
            ("exps", 1, 1, RuleFault::NoTarget),
            ("a=CPU,x{1,2}=CPU", 2, 7, RuleFault::NoTarget),
            ("=CPU", 1, 1, RuleFault::Pattern(PatternFault::Empty)),
            ("ä=CPU,öb(c=CPU", 2, 9, RuleFault::Pattern(PatternFault::UnclosedGroup)),
            ("a=CPU,b**=CPU,[z-a]=CPU", 3, 17, RuleFault::Pattern(PatternFault::BadRange)),
            ("((a{99}){99}){99}=CPU", 1, 2, RuleFault::Pattern(PatternFault::TooLarge)),
            ("(?!b)(?:a(?!b)|a)*c=CPU", 1, 1, RuleFault::Pattern(PatternFault::TooSlow)),
        ] {
            let e = r.parse(text).unwrap_err();
            assert_eq!((e.rule, e.column, e.fault, e.text.as_str()), (rule + 1, column, fault, text));
            assert_eq!(listed(&r), [("first", "CPU")], "after an error the rules are as they were");
        }
    }

    #[test]
    fn unknown_target_is_told_with_the_list_and_the_nearest_name() {
        let e = rules().parse("exps=CPU,attn=CUDA_Hots").unwrap_err();
        assert_eq!((e.rule, e.column), (2, 15));
        let text = e.to_string();
        assert!(text.contains("rule 2, column 15: unknown target 'CUDA_Hots'; did you mean CUDA_Host?"), "{text}");
        assert!(text.contains("? Known: CPU, CPU_MMAP, CUDA_Host, ARENA, CUDA0, CUDA1, RPC1[127.0.0.1:50053]"), "{text}");
        for (typed, said) in [
            ("a=", "column 3: the name of the target is empty. Known: CPU, "),
            ("a=the moon", "unknown target 'the moon'. Known: CPU, "),
            (
                "a=ARENA;b=ARENA",
                "unknown target 'ARENA;b=ARENA'. In -ot rules are separated by ',', not by ';' (which is llama-bench's). Known",
            ),
        ] {
            let text = rules().parse(typed).unwrap_err().to_string();
            assert!(text.contains(said), "{text}");
        }
        assert_eq!(e.excerpt(), "exps=CPU,attn=CUDA_Hots\n              ^");
        let look = rules().parse("a(?=b)=CPU").unwrap_err().to_string();
        assert!(look.contains("The first '=' ends the pattern, so it cannot contain '(?='. Known"), "{look}");
    }

    #[test]
    fn excerpt_of_a_long_text_stays_short_and_points_at_the_fault() {
        let text = "exps=CPU,".repeat(50) + "é=NOPE," + &"exps=CPU,".repeat(50);
        let excerpt = rules().parse(&text).unwrap_err().excerpt();
        let [shown, pointer] = excerpt.lines().collect::<Vec<_>>()[..] else { panic!("{excerpt}") };
        assert!(shown.chars().count() <= 100);
        assert_eq!(shown.chars().nth(pointer.chars().count() - 1), Some('N'));
    }

    #[test]
    fn stock_limit_of_4096_rules_is_an_early_error() {
        let mut r = rules();
        r.parse(&vec!["zzz=CPU"; MAX_RULES].join(",")).unwrap();
        let e = r.parse("a=CPU").unwrap_err();
        assert_eq!((e.rule, e.fault), (MAX_RULES + 1, RuleFault::TooManyRules));
        assert!(matches!(rules().parse(&vec!["z=CPU"; MAX_RULES + 1].join(",")).unwrap_err().fault, RuleFault::TooManyRules));
        let mut r = rules();
        for layers in [MAX_RULES as u32 + 1, u32::MAX] {
            let e = r.n_cpu_moe(layers).unwrap_err();
            assert_eq!((e.rule, &e.fault), (MAX_RULES + 1, &RuleFault::TooManyRules));
            assert!(e.excerpt().starts_with(r"blk\.4096\.ffn_"), "the one rule that is too many, not the first: {}", e.excerpt());
        }
        r.n_cpu_moe(MAX_RULES as u32).unwrap();
        assert_eq!(r.first_match("blk.4095.ffn_up_exps.weight").unwrap(), Some(4095));
    }

    #[test]
    fn patterns_that_are_large_together_are_refused() {
        let mut r = rules();
        let big = format!("(?:{}){{90}}", "a".repeat(100));
        let fault = (0..200).find_map(|_| r.push(&big, "CPU").err()).unwrap();
        assert_eq!(fault.fault, RuleFault::TooLargeTogether);
        assert!(r.len() < 100);
    }

    #[test]
    fn cpu_moe_and_its_variants_are_the_rules_of_stock() {
        let mut r = rules();
        r.cpu_moe().unwrap();
        r.n_cpu_moe(2).unwrap();
        r.n_cpu_ffn(1).unwrap();
        assert_eq!(
            listed(&r),
            [
                (r"\.ffn_(up|down|gate|gate_up)_(ch|)exps", "CPU"),
                (r"blk\.0\.ffn_(up|down|gate|gate_up)_(ch|)exps", "CPU"),
                (r"blk\.1\.ffn_(up|down|gate|gate_up)_(ch|)exps", "CPU"),
                (r"blk\.0\.ffn_(up|down|gate)\.", "CPU"),
            ]
        );
        let mut r = rules();
        r.n_cpu_moe(2).unwrap();
        for (name, hit) in [
            ("blk.1.ffn_gate_up_exps.weight", Some(1)),
            ("blk.0.ffn_down_chexps.weight", Some(0)),
            ("blk.0.ffn_gate_exps.bias", Some(0)),
            ("blk.10.ffn_up_exps.weight", None),
            ("blk.0.ffn_up_shexp.weight", None),
            ("blk.0.ffn_up.weight", None),
            ("blk.0.ffn_gate_inp.weight", None),
        ] {
            assert_eq!(r.first_match(name).unwrap(), hit, "{name}");
        }
    }

    #[test]
    fn bench_notation_separates_rules_by_semicolons_and_runs_by_commas() {
        let text = "a=CPU;b=CUDA0,,c=CPU;";
        assert_eq!((Rules::bench_runs(text), Rules::bench_runs("")), (3, 1));
        for (run, listing) in [(0, &[("a", "CPU"), ("b", "CUDA0")][..]), (1, &[]), (2, &[("c", "CPU")]), (3, &[])] {
            let mut r = rules();
            r.parse_bench(text, run).unwrap();
            assert_eq!(listed(&r), listing, "{run}");
        }
        let mut r = parsed("first=CPU");
        for (text, rule, column) in [("a=CPU;;b=CPU", 3, 7), ("a=CPU,b=CPU;x", 3, 13), ("a=CPU;b=GPU", 3, 9), (";", 2, 1)] {
            let e = r.parse_bench(text, 0).unwrap_err();
            assert_eq!((e.rule, e.column), (rule, column), "{text}: {e}");
            assert_eq!(listed(&r), [("first", "CPU")]);
        }
    }

    #[test]
    fn a_run_with_more_rules_than_there_is_room_for_adds_none_and_names_the_first_too_many() {
        let mut r = rules();
        r.n_cpu_moe(4090).unwrap();
        let e = r.parse_bench("a=CPU;b=CPU;c=CPU;d=CPU;e=CPU;f=CPU;g=CPU;h=CPU", 0).unwrap_err();
        assert_eq!((e.rule, e.column, &e.fault, r.len()), (4097, 37, &RuleFault::TooManyRules, 4090));
    }

    #[test]
    fn first_match_wins_across_both_engines_and_all_matches_are_in_order() {
        let r = parsed(r"(?!blk)out=CPU,exps=ARENA,(?!blk\.1\.)blk=CPU_MMAP,blk=CPU");
        let all = |name| r.all_matches(name).unwrap().as_slice().to_vec();
        assert_eq!(all("output.weight"), [0]);
        assert_eq!(all("blk.1.ffn_up_exps.weight"), [1, 3]);
        assert_eq!(all("blk.2.ffn_up_exps.weight"), [1, 2, 3]);
        assert_eq!(r.first_match("blk.2.attn_q.weight").unwrap(), Some(2));
        assert_eq!(r.first_match("blk.1.attn_q.weight").unwrap(), Some(3));
        assert_eq!(r.first_match("token_embd.weight").unwrap(), None);
    }

    #[test]
    fn random_rule_sets_find_the_same_rule_as_one_pattern_after_the_other() {
        let seed = fastrand::u64(..);
        let mut rng = fastrand::Rng::with_seed(seed);
        const PARTS: [&str; 17] = [
            "blk",
            r"\.",
            "1",
            "[0-9]",
            "ffn",
            "up",
            "exps",
            ".*",
            "weight",
            "$",
            "(?!0)",
            "(a|e)",
            "(up|exps)",
            "(k|)",
            "{2}",
            r"\b",
            "[]",
        ];
        for _ in 0..60 {
            let mut r = rules();
            while r.len() < rng.usize(1..40) {
                let pattern: String = (0..rng.usize(1..5)).map(|_| rng.choice(PARTS).unwrap()).collect();
                let _ = r.push(&pattern, "CPU");
            }
            for _ in 0..40 {
                let name: String =
                    (0..rng.usize(..6)).map(|_| rng.choice(["blk", ".", "1", "0", "ffn_", "up", "exps", "weight"]).unwrap()).collect();
                let one_by_one: Vec<usize> = (0..r.len()).filter(|&i| r.rules[i].pattern.is_match(&name).unwrap()).collect();
                assert_eq!(r.all_matches(&name).unwrap().as_slice(), one_by_one, "seed {seed}: {name}");
                assert_eq!(r.first_match(&name).unwrap(), one_by_one.first().copied(), "seed {seed}: {name}");
            }
        }
    }

    #[test]
    fn random_rule_texts_are_parsed_or_refused_inside_their_text() {
        let seed = fastrand::u64(..);
        let mut rng = fastrand::Rng::with_seed(seed);
        const PARTS: [&str; 16] = ["a", "=", ",", ";", "CPU", "ARENA", "CUDA", "(", ")", "[", "]", "*", "\\", "é", ".", "{2}"];
        for _ in 0..5_000 {
            let text: String = (0..rng.usize(..14)).map(|_| rng.choice(PARTS).unwrap()).collect();
            let mut r = rules();
            if let Err(e) = r.parse(&text) {
                assert!(e.column >= 1 && e.column <= text.chars().count() + 1, "seed {seed}: {text}: {e}");
                let _ = (e.excerpt(), e.to_string());
            }
            let _ = r.parse_bench(&text, 0);
        }
    }

    #[test]
    fn many_slow_patterns_are_refused_together_before_they_take_long() {
        let text = |n: usize| (0..n).map(|i| format!(r"(.).*.*\1Q{i}=CPU")).collect::<Vec<_>>().join(",");
        let mut r = rules();
        let error = r.parse(&text(4000)).unwrap_err();
        assert!(error.fault == RuleFault::TooSlowTogether && error.to_string().contains(&BACKTRACKING.steps.to_string()), "{error}");
        assert!(error.rule >= 1 && error.column >= 1 && r.is_empty());
        // One by one, they count together too.
        let refused = (0..4000).map(|i| r.push(&format!(r"(.).*.*\1Q{i}"), "CPU")).find_map(Result::err);
        assert!(refused.is_some_and(|e| e.fault == RuleFault::TooSlowTogether));
        // Some can be read, and then it is the names that take long; the error says so, and whose fault it is.
        let mut r = rules();
        r.parse(&format!("exps=CPU,{},^(?!.*q)x=CPU", text(5))).unwrap_or_else(|e| panic!("{e}"));
        let name = |i: usize| format!("blk.{i}.a_name_that_is_as_long_as_names_are_with_Q");
        let slow = (0..1_000_000).find_map(|i| r.all_matches(&name(i)).err()).unwrap();
        assert!(matches!(slow.limit, StepLimit::Backtracking(b) if b >= BACKTRACKING.steps) && (1..6).contains(&slow.rule), "{slow}");
        assert!(slow.to_string().contains(&format!("rule {}", slow.rule + 1)), "{slow}");
    }

    /// What is asked of a model of so many tensors with these rules: the steps, or the rule at fault.
    fn asked(rules: &Rules, layers: usize) -> Result<u64, SlowRule> {
        for layer in 0..layers {
            for base in
                ["attn_q", "attn_k", "attn_v", "attn_output", "attn_norm", "ffn_norm", "ffn_up_exps", "ffn_gate_exps", "ffn_down_exps"]
            {
                rules.all_matches(&format!("blk.{layer}.{base}.weight"))?;
            }
        }
        Ok(rules.automata.taken())
    }

    #[test]
    fn rules_that_made_one_automaton_explode_take_few_steps_per_name() {
        for pattern in ["blk.*N.*exps", "(a|b|c|.*)*N.*.*.*.*", r"^blk\..*N\..*weight"] {
            let text: Vec<String> = (0..100).map(|i| pattern.replace('N', &i.to_string()) + "=CPU").collect();
            let steps = asked(&parsed(&text.join(",")), 200).unwrap_or_else(|e| panic!("{pattern}: {e}"));
            // Of 200,000 names, a hundredth was asked about.
            assert!(steps * 100 < AUTOMATA.steps, "{pattern}: {steps}");
        }
    }

    #[test]
    fn a_model_with_as_many_rules_as_there_may_be_is_not_refused() {
        // Of a layer each; all with the same texts, so that each is asked about every expert; and with none, so about every tensor.
        for (pattern, layers) in
            [(r"blk\.N\.ffn_(up|gate|down)_exps", 111), ("^blk.*ffn_(up|[N]).*exps", 10), ("^[^N]+[.]?[^a][^N][.]", 10)]
        {
            let text: Vec<String> = (0..4096).map(|i| pattern.replace('N', &i.to_string()) + "=CPU").collect();
            let steps = asked(&parsed(&text.join(",")), layers).unwrap_or_else(|e| panic!("{pattern}: {e}"));
            // What 1000 tensors would take: all steps but those that build the automata are the same for each.
            let whole = steps * 1000 / (layers as u64 * 9);
            assert!(whole < AUTOMATA.steps, "{pattern}: {whole} of {} steps", AUTOMATA.steps);
        }
    }

    #[test]
    fn rules_that_take_too_many_steps_together_are_refused_by_the_number_of_the_slowest() {
        let mut r = parsed("exps=CPU,[^q]+[a-z]+[.][^q][^q][^q][^q][^q][^q][^q][^q]!?$=CPU,attn=CPU");
        r.automata = Budget::new(Limit { steps: 1 << 20, per_name: 1 });
        let slow = asked(&r, 100_000).unwrap_err();
        assert!(matches!(slow.limit, StepLimit::Automata(all) if all > 1 << 20), "{slow:?}");
        assert_eq!(slow.rule, 1);
        assert!(r.automata.taken() <= (1 << 21), "no more than one name beyond it: {}", r.automata.taken());
        let text = slow.to_string();
        assert!(text.contains("rule 2 took most") && text.contains("steps"), "{text}");
        // It stays refused: there is no wrong answer later on.
        assert!(r.first_match("blk.1.nothing").is_err());
    }

    #[test]
    fn ordinary_rules_stay_far_below_the_limit_however_long_they_are_used() {
        let mut r = rules();
        let layers: Vec<String> = (0..80).map(|i| format!(r"blk\.{i}\.ffn_(up|down|gate)_exps=CPU")).collect();
        let ahead: Vec<String> = (0..16).map(|i| format!(r"^(?!.*exps)blk\.{i}\.=ARENA")).collect();
        r.parse(&[ahead, layers].concat().join(",")).unwrap_or_else(|e| panic!("{e}"));
        for i in 0..1000 {
            r.all_matches(&format!("blk.{i}.ffn_gate_exps.weight")).unwrap_or_else(|e| panic!("{e}"));
        }
        for (budget, limit) in [(&r.backtracking, BACKTRACKING), (&r.automata, AUTOMATA)] {
            let taken = budget.taken();
            assert!(taken > 0 && taken <= 1000 * limit.per_name, "{taken} steps: then no number of names is too many");
        }
    }
}
