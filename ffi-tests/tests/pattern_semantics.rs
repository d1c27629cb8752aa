//! Berth's patterns against the `std::regex` of the C++ library that stock llama.cpp is built with.
//!
//! Proves: on patterns that people have posted and on 100,000 random ones, a pattern matches the same names as in stock, or is refused by
//! both, or is refused by Berth alone for one of the reasons that [`PatternFault::stock_accepts`] lists.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use berth::placement::{Pattern, PatternFault};
use ffi_tests::{skip, tools};

/// Patterns as posted in issues, guides and scripts for llama.cpp and ik_llama.cpp (the part before `=`), mistakes included.
const POSTED: &[&str] = &[
    "exps",
    "exp",
    "_exps",
    ".ffn_.*_exps.",
    r"\.ffn_.*_exps\.",
    r"\.ffn_.*_exps\.weight",
    ".ffn_(up|down)_exps.",
    ".ffn_(up)_exps.",
    "ffn_.*_exps",
    "ffn_(gate|down|up)_exps",
    "ffn_(gate|up|down).*",
    "ffn_(up|down|gate).*",
    "ffn_down_exps",
    " ffn_up_exps",
    "gate_exps",
    "attn_v_exps",
    r"\.ffn_(up|down|gate|gate_up)_(ch|)exps",
    r"\.ffn_(up|down|gate)\.",
    r"blk\.5\.ffn_down.*",
    r"blk\.6\.ffn_(up|down|gate)_(ch|)exps",
    r"blk\.24\.ffn_(gate|gate_up|down).*",
    r"blk\.25\.ffn_(up|down|gate_up|gate)_(ch|)exps",
    r"blk\.([0-9]|[1-2][0-9]|30)\.",
    "blk.([0-9]|1[0-9]).",
    "blk.(0|1|2|3|4|5|6).ffn.",
    "blk.(23|24|25|26|27|28|29).ffn.",
    r"blk\.(0|1)\.ffn_.*",
    r"blk\.[0-4]\..*",
    r"blk\.[3-9]\.attn_.*",
    r"blk\.[1-5][0-9]\.attn_.*",
    r"blk\.60\.attn_.*",
    r"blk\.[3-9]\.ffn_norm\.weight",
    r"blk\.[1-5][0-9]\.ffn_norm\.weight",
    r"blk\.[0-9]\.ffn_up_exps",
    r"blk\.2[0-4]\.ffn_gate_exps",
    r"blk\.29\.ffn",
    r"blk\.[3-4][0-9]\.ffn",
    r"blk\.(2[5-9]|[3-5][0-9])\.ffn_(up|gate|down)_exps",
    "blk.(2[0-9]|3[0-9]).ffn_.*exps",
    r"blk\.(3[2-9]|4[0-7])\.ffn.*",
    r"blk\.([0-9]|1[0-3]|2[0-4]|3[1-9]|4[0-7])\.ffn_.*_exps\.weight",
    r"blk\.([0-9]|[1-3][0-9]|4[0-5])\.(ffn_|attn_).*",
    r"blk\.(5[7-9])\.ffn_(up|down|gate)_exps\.weight",
    r"blk\.(6[0-2])\.ffn_(up|down|gate)_exps\.weight",
    r"blk\.[0-9]+\.ffn_(gate|up|down)_exps\.weight",
    r"blk\.[0-9]+\.ple_value",
    r"blk\.48\.ffn_.*_exps",
    r"blk\.([0-3])\.ffn_.*",
    r"blk\.4\.ffn_(down|up)_exps\..*",
    r"blk\.(0)\.ffn_((gate_up|up_gate|gate|up|down)_exps|(gate_inp|gate|up|down)_shexp).*",
    r"blk\.(46|47)\.ffn_((gate_up|up_gate|gate|up|down)_(ch|)exps|(gate_inp|gate|up|down)_shexp|gate_inp|gate_tid2eid|exp_probs_b).*",
    "blk.2[8-9].ffn_.*_exps.*",
    "blk.15-46.ffn_*_exps",
    "blk.*.ffn_(gate|up|down)_exps_hot",
    r"blk\..*_exps",
    "([0-9][0-9]).ffn_.*_exps.",
    "([0-9]{1,}).n_.*_exps.",
    r"([3][2-9]|[4-9][0-9])\.ffn_.*_exps\.",
    r"([4][7-9]|[5-9][0-9])\.(attn|ffn)_.*(q|k|v|norm|inp|output)\.",
    r"([11|12|13|14|15])\.ffn_.*_exps\.",
    r"\.(6|7|8|9|[0-9][0-9]|[0-9][0-9][0-9])\.ffn_(gate|up|down)_exps.",
    r"output\.weight",
    r"^output\.weight$",
    r"^output_norm\.weight$",
    r"^token_embd\.weight$",
    r"token_embd\.weight",
    "token_embd.weight",
    "per_layer_token_embd",
];

/// Likely variations and likely mistakes.
const LIKELY: &[&str] = &[
    r"^(?!.*exps).*$",
    r"^(?!blk\.[0-9]\.).*ffn.*exps",
    r"blk\.(?!0\.)\d+\.ffn_.*_exps\.",
    r"blk\.\d{2}\.ffn_(?:up|down|gate)_exps\.weight$",
    r"(^|\.)ffn_.*exps",
    "*.ffn_.*_exps",
    "blk.[10-20].ffn",
    ".*",
    "ffn_(up|down",
    "exps)",
    "blk.{1,2}.ffn",
    "[[:digit:]]+\\.ffn",
    r"\d+\.ffn_(\w+)_exps\.\w+$",
    r"(up|down)_exps\.(?=weight)",
];

/// Pieces that random patterns are made of, and a space.
const PIECES: &[&str] = &[
    r"a b 1 0 . _ \. ffn blk exps up weight | | ( ( (?: ) ) ) * + ? *? +? ?? {0} {1} {2} {1,} {0,2} {1,3}? [0-9] [ab] [^a]",
    r"[^.] [a-z_] [] [^] [-a] [a-] [\w-] [\d.] [^\s] [[:alpha:]] [[:Digit:][:punct:]] \d \D \w \W \s \S ^ $ \b \B (?= (?! \1",
    r"\2 \0 \x61 \u0062 \ca \n \t \/ \- ] } { é - , = [a-c-e] [\b] [+--] [[] []] [z-a] (? \ [ [[:foo:]] [[.a.]] [a-é] {2,1}",
    r"{,2} {x} \x6 \u0142 (a) (b|) (?:a|b) (1?) (a*)",
];

fn piece(rng: &mut fastrand::Rng) -> &'static str {
    let all: Vec<&str> = PIECES.iter().flat_map(|line| line.split(' ')).chain([" "]).collect();
    rng.choice(all).unwrap()
}

const NAMES: &[&str] = &[
    "token_embd.weight",
    "output.weight",
    "output_norm.weight",
    "blk.0.attn_q.weight",
    "blk.1.ffn_gate_exps.weight",
    "blk.10.ffn_up_exps.weight",
    "blk.11.ffn_down_exps.bias",
    "blk.15.ffn_gate_up_exps.weight",
    "blk.20.ffn_gate_up_exps.weight",
    "blk.25.ffn_up_shexp.weight",
    "blk.29.ffn_down_chexps.weight",
    "blk.30.exp_probs_b.bias",
    "blk.47.ffn_gate_inp.weight",
    "blk.61.ffn_norm.weight",
    "blk.117.ffn_down.weight",
    "per_layer_token_embd.weight",
    "a",
    "ab",
    "aabb",
    "abab.1",
    "1_0-1",
    "a\nb",
    "é-a é",
    "",
];

/// The compiled peer; `None` if there is no compiler here.
fn peer(dir: &Path) -> Option<PathBuf> {
    let mut compiler = match tools::command("c++") {
        Ok(compiler) => compiler,
        Err(missing) => {
            skip::skipped("pattern semantics", &missing.to_string());
            return None;
        }
    };
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("c/regex_peer.cpp");
    let program = dir.join("regex_peer");
    let status = compiler.args(["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&program).arg(&source).status().unwrap();
    assert!(status.success(), "regex_peer.cpp does not compile");
    Some(program)
}

/// One pattern and the names to try it on.
struct Case {
    pattern: String,
    names: Vec<String>,
}

fn ask(program: &Path, cases: &[Case]) -> Vec<String> {
    let mut child = Command::new(program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut input = Vec::new();
    let text = |input: &mut Vec<u8>, text: &str| {
        input.extend((text.len() as u32).to_ne_bytes());
        input.extend(text.as_bytes());
    };
    for case in cases {
        text(&mut input, &case.pattern);
        input.extend((case.names.len() as u32).to_ne_bytes());
        case.names.iter().for_each(|name| text(&mut input, name));
    }
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || stdin.write_all(&input));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    assert!(output.status.success(), "the peer ended with {}", output.status);
    let lines: Vec<String> = String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect();
    assert_eq!(lines.len(), cases.len());
    lines
}

#[derive(Default, Debug)]
struct Tally {
    compiled_by_both: usize,
    matches: usize,
    misses: usize,
    refused_by_both: usize,
    refused_by_berth: BTreeMap<String, usize>,
    std_regex_too_slow: usize,
    berth_too_slow: usize,
    differences: Vec<String>,
}

fn compare(cases: &[Case], answers: &[String]) -> Tally {
    let mut tally = Tally::default();
    for (case, answer) in cases.iter().zip(answers) {
        let refused_by_stock = answer == "E";
        let pattern = match Pattern::new(&case.pattern) {
            Ok(_) if refused_by_stock => {
                tally.differences.push(format!("{:?} is refused by std::regex only", case.pattern));
                continue;
            }
            Ok(pattern) => pattern,
            Err(_) if refused_by_stock => {
                tally.refused_by_both += 1;
                continue;
            }
            Err(e) if e.fault.stock_accepts() => {
                *tally.refused_by_berth.entry(format!("{:?}", e.fault)).or_default() += 1;
                continue;
            }
            Err(e) => {
                tally.differences.push(format!("{:?} is refused by Berth only: {e}", case.pattern));
                continue;
            }
        };
        tally.compiled_by_both += 1;
        for (name, stock) in case.names.iter().zip(answer.bytes()) {
            match (stock, pattern.is_match(name)) {
                (b'T', _) => tally.std_regex_too_slow += 1,
                (_, Err(_)) => tally.berth_too_slow += 1,
                (stock, Ok(berth)) if (stock == b'1') == berth => *if berth { &mut tally.matches } else { &mut tally.misses } += 1,
                (stock, Ok(_)) => {
                    let stock = if stock == b'1' { "matches" } else { "does not match" };
                    tally.differences.push(format!("{:?} {stock} {name:?} in std::regex only", case.pattern));
                }
            }
        }
    }
    tally
}

/// A pattern in three ways: a posted one with a piece put in or a byte taken out, pieces in any order, or a well-formed one.
fn random_pattern(rng: &mut fastrand::Rng) -> String {
    let mut pattern = String::new();
    match rng.u8(..3) {
        0 => {
            pattern.push_str(rng.choice(POSTED).unwrap());
            let at = rng.usize(..=pattern.len());
            if rng.bool() {
                pattern.insert_str(at, piece(rng));
            } else if at < pattern.len() {
                pattern.remove(at);
            }
        }
        1 => (0..rng.usize(1..10)).for_each(|_| pattern.push_str(piece(rng))),
        _ => well_formed(rng, 3, &mut pattern),
    }
    pattern
}

/// A well-formed pattern over few letters: groups, look-aheads, back-references (sometimes to nothing) and quantifiers, nested.
fn well_formed(rng: &mut fastrand::Rng, depth: u32, out: &mut String) {
    for _ in 0..rng.usize(1..4) {
        match rng.u8(..if depth == 0 { 8 } else { 14 }) {
            0..4 => out.push(*rng.choice(&['a', 'b', '1', '.', '_']).unwrap()),
            4 => out.push_str(rng.choice(["[ab]", "[^a]", r"\w", r"\d", r"\.", "$", "^", r"\b", r"\B"]).unwrap()),
            5 => out.push('|'),
            6 => out.push_str(rng.choice([r"\1", r"\2", ""]).unwrap()),
            7 => {}
            kind => {
                out.push_str(["(", "(", "(", "(?:", "(?=", "(?!"][usize::from(kind - 8)]);
                well_formed(rng, depth - 1, out);
                out.push(')');
                if kind >= 12 {
                    continue;
                }
            }
        }
        if out.ends_with(|c: char| c.is_alphanumeric() || ".)]_".contains(c)) && rng.u8(..3) == 0 {
            out.push_str(rng.choice(["*", "+", "?", "*?", "{2}", "{1,2}", "{0,}", "??", "{0}", "**"]).unwrap());
        }
    }
}

#[test]
fn posted_patterns_match_the_same_names_as_in_stock_and_none_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = peer(dir.path()) else { return };
    let names: Vec<String> = NAMES.iter().map(|&n| n.to_owned()).collect();
    for (what, patterns) in [("posted", POSTED), ("likely", LIKELY)] {
        let cases: Vec<Case> = patterns.iter().map(|&p| Case { pattern: p.to_owned(), names: names.clone() }).collect();
        let tally = compare(&cases, &ask(&program, &cases));
        println!("{} {what} patterns: {tally:#?}", cases.len());
        assert!(tally.differences.is_empty() && tally.refused_by_berth.is_empty());
        assert!(what == "likely" || tally.refused_by_both == 0);
        // Nearly all are really compared: an answer that came too late says nothing. (Mistakes among the likely ones are refused by both.)
        let (compared, all) = (tally.matches + tally.misses, tally.compiled_by_both * names.len());
        assert_eq!(tally.compiled_by_both + tally.refused_by_both, cases.len());
        assert!(tally.compiled_by_both * 3 >= cases.len() * 2, "{what}: {tally:?}");
        assert!(tally.berth_too_slow == 0 && tally.std_regex_too_slow * 100 <= all, "{what}: {tally:?}");
        assert!(compared * 100 >= all * 99 && tally.matches > 0 && tally.misses > 0, "{what}: {tally:?}");
    }
}

#[test]
fn random_patterns_match_the_same_names_as_in_stock_or_are_refused_for_a_documented_reason() {
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = peer(dir.path()) else { return };
    let set = |name: &str| std::env::var(name).ok().and_then(|v| v.parse::<u64>().ok());
    let seed = set("BERTH_SEED").unwrap_or_else(|| fastrand::u64(..));
    let count = set("BERTH_PATTERNS").unwrap_or(100_000) as usize;
    let mut rng = fastrand::Rng::with_seed(seed);
    let cases: Vec<Case> = (0..count)
        .map(|_| {
            let mut names: Vec<String> = (0..6).map(|_| (*rng.choice(NAMES).unwrap()).to_owned()).collect();
            names.push((0..rng.usize(..10)).map(|_| char::from(*rng.choice(b"aaabb1._").unwrap())).collect());
            Case { pattern: random_pattern(&mut rng), names }
        })
        .collect();
    let tally = compare(&cases, &ask(&program, &cases));
    println!("{count} random patterns, seed {seed}: {tally:#?}");
    assert!(tally.differences.is_empty(), "seed {seed}: {} differences", tally.differences.len());
    assert!(tally.compiled_by_both > count / 4 && tally.matches > count / 4 && tally.misses > count / 4, "these patterns prove too little");
    assert!(tally.berth_too_slow == 0, "seed {seed}: a pattern passed its trial and was too slow later");
}

#[test]
fn what_only_berth_refuses_is_accepted_by_stock() {
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = peer(dir.path()) else { return };
    let only_berth: Vec<(String, PatternFault)> = vec![
        (String::new(), PatternFault::Empty),
        ("a".repeat(4097), PatternFault::TooLong),
        ("(".repeat(50) + "a" + &")".repeat(50), PatternFault::TooDeep),
        ("(a{100}){200}".to_owned(), PatternFault::TooLarge),
        ("(?:a(?=a)|a)*(?=c)".to_owned(), PatternFault::TooSlow),
        ("a\0b".to_owned(), PatternFault::Nul),
        ("[[.a.]]".to_owned(), PatternFault::Collating),
        (r"[\xe0-\xe9]".to_owned(), PatternFault::WideRange),
        (r"\u0142".to_owned(), PatternFault::WideEscape),
        (r"(?=\ba)".to_owned(), PatternFault::AssertionInLookAhead),
        (r"(a)\1(?=b)".to_owned(), PatternFault::BackReferenceAndLookAhead),
    ];
    let cases: Vec<Case> = only_berth.iter().map(|(p, _)| Case { pattern: p.clone(), names: vec!["x".into()] }).collect();
    for ((pattern, fault), answer) in only_berth.iter().zip(ask(&program, &cases)) {
        assert_eq!(Pattern::new(pattern).unwrap_err().fault, *fault, "{pattern}");
        assert!(fault.stock_accepts() && answer != "E", "{pattern}: {answer}");
    }
}
