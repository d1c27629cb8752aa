//! Any text as rules: an error inside the text, or rules that match names in bounded time and agree with each pattern alone.

#![no_main]

use berth::placement::{Rules, Targets};
use libfuzzer_sys::fuzz_target;

const NAMES: [&str; 4] =
    ["token_embd.weight", "blk.10.ffn_gate_up_exps.weight", "blk.0.attn_q.weight", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab"];

fuzz_target!(|text: &str| {
    let targets = Targets::new(["CUDA0"]);
    let mut rules = Rules::new(targets.clone());
    match rules.parse(text) {
        Err(e) => {
            assert!(rules.is_empty(), "a text is taken whole or not at all");
            assert!(e.rule >= 1 && e.column >= 1 && e.column <= text.chars().count() + 1);
            let lines: Vec<String> = e.excerpt().lines().map(str::to_owned).collect();
            assert!(lines.len() == 2 && lines[1].ends_with('^'));
            assert!(!e.to_string().is_empty());
        }
        Ok(()) => {
            for name in NAMES {
                let Ok(all) = rules.all_matches(name) else { continue };
                assert_eq!(rules.first_match(name).ok().flatten(), all.first());
                // Compiling each pattern again takes most of the time, so not for every input.
                for (i, rule) in rules.iter().enumerate().filter(|_| text.len() % 8 == 0) {
                    assert_eq!(rule.pattern().is_match(name), Ok(all.as_slice().contains(&i)), "{:?} on {name}", rule.pattern().as_str());
                }
            }
        }
    }
    match text.as_bytes().first().map_or(0, |b| b % 4) {
        0 => drop(Rules::new(targets).parse_bench(text, 0)),
        // A pattern of its own may contain what separates rules.
        1 => drop(rules.push(text, "CPU")),
        _ => {}
    }
});
