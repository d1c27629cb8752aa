//! Every target of cargo-fuzz, as `fuzz/README.md` says they are run: built, given its share of the time, and its counts read from libFuzzer's own lines.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ffi_tests::run::{last_lines, run as run_for};
use ffi_tests::{hosts, tools};

use super::{Line, Outcome, nightly, work};
use crate::shell;

/// Where the real ggml comes from.
const HOST: &str = "sdist-dl";

/// Seconds after which one input is taken for a hang: a machine that is stopped for a while must not make one.
const HANG: u32 = 1200;

/// What a target is run with, where that is not what the others have.
struct Way {
    /// As cargo-fuzz names it.
    sanitizer: &'static str,
    options: &'static [&'static str],
}

/// The real ggml has no instrumentation, and reserves memory that AddressSanitizer does not know: only what runs without it has that.
fn way(target: &str) -> Way {
    match target {
        "gguf_header" => Way { sanitizer: "address", options: &["-dict=fuzz/gguf.dict", "-max_len=4096"] },
        "rules_parse" => Way { sanitizer: "none", options: &["-dict=fuzz/rules.dict", "-max_len=512"] },
        _ => Way { sanitizer: "none", options: &["-max_len=256", "-len_control=0"] },
    }
}

/// All targets, or those in `only`.
pub(super) fn run(minutes: f64, only: &[String]) -> Vec<Line> {
    if let Some(hint) = nightly::lacking(&[nightly::COMPILER, nightly::FUZZ]) {
        return vec![Line::skipped("all targets", hint)];
    }
    let targets = match list().and_then(|all| chosen(all, only)) {
        Ok(targets) => targets,
        Err(error) => return vec![Line::failed("all targets", &error)],
    };
    let ggml = hosts::get(HOST).map(|host| host.lib_dir);
    let share = Duration::from_secs_f64(minutes * 60.0 / targets.len() as f64);
    targets
        .iter()
        .map(|target| {
            let what = format!("`{target}`");
            let needs_ggml = fs::read_to_string(source(target)).is_ok_and(|s| s.contains("mod ggml;"));
            match &ggml {
                Err(error) if needs_ggml && tools::is_missing(error) => Line::skipped(&what, error.root_cause().to_string()),
                Err(error) if needs_ggml => Line::failed(&what, error),
                _ => one(target, share, ggml.as_deref().ok()).unwrap_or_else(|error| Line::failed(&what, &error)),
            }
        })
        .collect()
}

fn chosen(mut all: Vec<String>, only: &[String]) -> Result<Vec<String>> {
    if let Some(unknown) = only.iter().find(|t| !all.contains(t)) {
        bail!("no target {unknown}; there are {}", all.join(", "));
    }
    all.retain(|t| only.is_empty() || only.contains(t));
    Ok(all)
}

fn source(target: &str) -> PathBuf {
    shell::root().join("fuzz/fuzz_targets").join(target).with_extension("rs")
}

fn list() -> Result<Vec<String>> {
    let mut cargo = nightly::cargo();
    cargo.args(["fuzz", "list"]);
    let output = run_for(cargo, Duration::from_secs(60))?.checked("cargo fuzz list")?;
    let targets: Vec<String> = output.stdout.lines().map(|l| l.trim().to_owned()).filter(|l| !l.is_empty()).collect();
    ensure!(!targets.is_empty(), "cargo fuzz list names no target");
    Ok(targets)
}

/// The program of a target.
fn build(target: &str, sanitizer: &str) -> Result<PathBuf> {
    let dir = work()?.join(format!("fuzz-{sanitizer}"));
    let mut cargo = nightly::cargo();
    cargo.args(["fuzz", "build", "--no-trace-compares", "-s", sanitizer, target]).env("CARGO_TARGET_DIR", &dir);
    shell::step(&mut cargo)?;
    let triple = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let program = dir.join(triple).join("release").join(target);
    ensure!(program.is_file(), "cargo fuzz build made no {}", program.display());
    Ok(program)
}

fn one(target: &str, share: Duration, ggml: Option<&Path>) -> Result<Line> {
    let way = way(target);
    let program = build(target, way.sanitizer)?;
    let fuzz = shell::root().join("fuzz");
    let (corpus, artifacts, seeds) =
        (fuzz.join("corpus").join(target), fuzz.join("artifacts").join(target), fuzz.join("seeds").join(target));
    for dir in [&corpus, &artifacts] {
        fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
    }
    // Arenas and what else a target makes.
    let scratch = tempfile::tempdir_in(work()?)?;
    let mut command = Command::new(program);
    ffi_tests::run::clean_env(&mut command);
    command.current_dir(shell::root()).args(way.options).arg(&corpus);
    if seeds.is_dir() {
        command.arg(seeds);
    }
    command.arg(format!("-max_total_time={}", share.as_secs().max(1))).arg(format!("-timeout={HANG}")).arg("-print_final_stats=1");
    command.arg(format!("-artifact_prefix={}/", artifacts.display()));
    command.env("OMP_NUM_THREADS", "1").env("OMP_WAIT_POLICY", "passive").env("BERTH_LOG", "off").env("TMPDIR", scratch.path());
    command.env("BERTH_ARENA_DIR", scratch.path()).envs(ggml.map(|dir| ("BERTH_FUZZ_GGML", dir)));
    // What is already known is read first, and that is not in libFuzzer's time.
    let limit = share + Duration::from_secs(u64::from(HANG) + 600);
    let (output, log) = super::logged(&format!("fuzz-{target}"), command, limit)?;
    let seen = read(&output.stderr);
    let amount = format!("{} executions", grouped(seen.executions));
    let coverage = format!("coverage {} to {}, {} new inputs", seen.before, seen.after, seen.new);
    let outcome = match (&seen.input, output.success() && seen.executions > 0) {
        (None, true) => Outcome::Passed(format!("nothing found; {coverage}")),
        (Some(input), _) => Outcome::Failed(format!("{}: {}", seen.says.unwrap_or_else(|| "an input fails".into()), input)),
        (None, false) => bail!("{}: {:?}, see {}\n{}", target, output.status, log.display(), last_lines(&output.stderr, 4)),
    };
    let ggml =
        if fs::read_to_string(source(target))?.contains("mod ggml;") { format!(", beside the ggml of {HOST}") } else { String::new() };
    let longest = way.options.iter().find_map(|o| o.strip_prefix("-max_len=")).unwrap_or("4096");
    let sanitizer = if way.sanitizer == "none" { "no sanitizer".to_owned() } else { format!("sanitizer {}", way.sanitizer) };
    let limits = format!("inputs of at most {longest} bytes, {sanitizer}{ggml}; {}", nightly::version());
    Ok(Line { what: format!("`{target}`"), amount, took: output.took, outcome, limits })
}

/// What libFuzzer says of a run.
#[derive(Debug, Default, PartialEq, Eq)]
struct Seen {
    executions: u64,
    /// Inputs that reach something new.
    new: u64,
    /// Edges that are reached with what was there before, and now.
    before: u64,
    after: u64,
    /// The input that failed, and its first line about it.
    input: Option<String>,
    says: Option<String>,
}

fn read(text: &str) -> Seen {
    let mut seen = Seen::default();
    let stat = |line: &str, name: &str| line.strip_prefix(name)?.trim().parse::<u64>().ok();
    for line in text.lines() {
        // #1234  INITED cov: 55 ft: 66 corp: ...
        if line.starts_with('#')
            && let Some(covered) = line.split_once("cov: ").and_then(|(_, rest)| rest.split_whitespace().next()?.parse().ok())
        {
            if line.contains("INITED") {
                seen.before = covered;
            }
            seen.after = covered;
        }
        if let Some(n) = stat(line, "stat::number_of_executed_units:") {
            seen.executions = n;
        }
        if let Some(n) = stat(line, "stat::new_units_added:") {
            seen.new = n;
        }
        if let Some((_, path)) = line.split_once("Test unit written to ") {
            // What was only slow has such a file too, and is no failure.
            if !path.contains("/slow-unit-") {
                seen.input = Some(path.trim().to_owned());
            }
        }
        if seen.says.is_none() && (line.contains(" panicked at ") || line.contains("ERROR: ")) {
            seen.says = Some(line.trim().to_owned());
        }
    }
    seen
}

/// With commas, as a reader wants it.
fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let first = digits.len() % 3;
    let mut text = digits[..first].to_owned();
    for i in (first..digits.len()).step_by(3) {
        text += if text.is_empty() { "" } else { "," };
        text += &digits[i..i + 3];
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_chosen_by_name() {
        let all = || vec!["a".to_owned(), "b".to_owned()];
        assert_eq!(chosen(all(), &[]).unwrap(), all());
        assert_eq!(chosen(all(), &["b".to_owned()]).unwrap(), ["b"]);
        assert!(chosen(all(), &["b".to_owned(), "x".to_owned()]).unwrap_err().to_string().contains("no target x; there are a, b"));
    }

    #[test]
    fn a_run_is_read_from_what_libfuzzer_prints() {
        let text = "INFO: seed corpus: files: 3\n#4\tINITED cov: 120 ft: 130 corp: 3/9b\n#90\tNEW    cov: 125 ft: 140 corp: 4/12b\n\
            #1234567\tDONE   cov: 126 ft: 141 corp: 5/12b\nstat::number_of_executed_units: 1234567\nstat::new_units_added:          2\n";
        let seen = read(text);
        assert_eq!((seen.executions, seen.new, seen.before, seen.after, seen.input), (1_234_567, 2, 120, 126, None));
        assert_eq!([grouped(0), grouped(999), grouped(1000), grouped(1_234_567)], ["0", "999", "1,000", "1,234,567"]);
    }

    #[test]
    fn an_input_that_fails_is_named_and_a_slow_one_is_not() {
        let slow = "artifact_prefix='x/'; Test unit written to x/slow-unit-12\n";
        assert_eq!(read(slow).input, None);
        let text = "thread '<unnamed>' (1) panicked at fuzz_targets/calls.rs:1:\n==9== ERROR: libFuzzer: deadly signal\n\
            artifact_prefix='x/'; Test unit written to x/crash-ab\n";
        let seen = read(text);
        assert_eq!(seen.input.as_deref(), Some("x/crash-ab"));
        assert!(seen.says.is_some_and(|s| s.contains("panicked at fuzz_targets/calls.rs")));
    }
}
