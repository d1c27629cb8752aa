//! `cargo xtask robust`: the long checks that no ordinary test run has the time for, in one command; the result is the table in docs/robustness.md.
//!
//! This file owns the parts, their lines and the page. What a line says is read from what the part's programs printed; `fuzz.rs` (cargo-fuzz),
//! `instrumented.rs` (thread sanitizer and Miri) and `hosted.rs` (tests against real hosts) run them and know no page.

mod fuzz;
mod hosted;
mod instrumented;
mod nightly;

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use ffi_tests::run::{self, Output};

use crate::{figures, shell};

/// Run the robustness checks, and write docs/robustness.md.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Minutes of fuzzing, shared among all targets.
    #[arg(long, default_value_t = 30.0)]
    minutes: f64,
    /// Only these parts; the lines of the others stay as they are in the page.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
    /// Only these fuzz targets, which share the time; the lines of the others stay.
    #[arg(long, value_delimiter = ',')]
    targets: Vec<String>,
    /// Loads and unloads of the library in one process.
    #[arg(long, default_value_t = 200)]
    cycles: u32,
    /// Print only, write nothing.
    #[arg(long)]
    dry: bool,
}

const DOCS: &str = "docs/robustness.md";

/// The parts, in the order of the page.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Part {
    /// Every target of cargo-fuzz.
    Fuzz,
    /// The library's unit tests under the thread sanitizer.
    Threads,
    /// The unit tests that Miri can run.
    Miri,
    /// The library loaded and unloaded again and again.
    Cycles,
    /// 16 clients of a llama-server, of which some leave.
    Soak,
    /// Every wrong call of the C API, under valgrind.
    Misuse,
}

impl Part {
    fn name(self) -> String {
        self.to_possible_value().map(|v| v.get_name().to_owned()).unwrap_or_default()
    }

    fn run(self, args: &Args) -> Vec<Line> {
        match self {
            Part::Fuzz => fuzz::run(args.minutes, &args.targets),
            Part::Threads => instrumented::threads(),
            Part::Miri => instrumented::miri(),
            Part::Cycles => hosted::cycles(args.cycles),
            Part::Soak => hosted::soak(),
            Part::Misuse => hosted::misuse(),
        }
    }
}

/// How something ended.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    Passed(String),
    Failed(String),
    Skipped(String),
}

/// One line of the table.
#[derive(Clone, Debug)]
struct Line {
    what: String,
    amount: String,
    took: Duration,
    outcome: Outcome,
    limits: String,
}

impl Line {
    fn skipped(what: &str, why: impl Into<String>) -> Line {
        Line::empty(what, Outcome::Skipped(why.into()))
    }

    fn failed(what: &str, error: &anyhow::Error) -> Line {
        Line::empty(what, Outcome::Failed(format!("{error:#}")))
    }

    fn empty(what: &str, outcome: Outcome) -> Line {
        Line { what: what.into(), amount: String::new(), took: Duration::ZERO, outcome, limits: String::new() }
    }

    fn cells(&self, part: &str, at: &str) -> String {
        let result = match &self.outcome {
            Outcome::Passed(text) => format!("passed: {text}"),
            Outcome::Failed(text) => format!("**FAILED**: {text}"),
            Outcome::Skipped(why) => format!("SKIPPED: {why}"),
        };
        let took = if self.took.is_zero() { String::new() } else { format!("{:.0} s", self.took.as_secs_f64()) };
        let cells = [part, &self.what, &self.amount, &took, &result, &self.limits, at];
        cells.iter().fold("|".to_owned(), |line, cell| line + " " + &one_line(cell) + " |")
    }
}

/// As it can stand in a cell: the beginning of its first lines.
fn one_line(text: &str) -> String {
    let joined: Vec<&str> = text.lines().map(str::trim).filter(|l| !l.is_empty()).take(6).collect();
    let all = joined.join("; ").replace('|', "\\|");
    if all.chars().count() > 600 { all.chars().take(600).chain("…".chars()).collect() } else { all }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    ensure!(args.minutes > 0.0 && args.minutes < 1e5, "--minutes {}: some time, please", args.minutes);
    ensure!(args.cycles >= 2, "--cycles {}: there must be a half to compare with", args.cycles);
    let start = Instant::now();
    let chosen = |part: &Part| args.only.is_empty() || args.only.contains(part);
    let at = version();
    let mut done: Vec<(Part, Vec<String>)> = Vec::new();
    let mut failed = Vec::new();
    for part in Part::value_variants().iter().copied().filter(chosen) {
        eprintln!("\n==> {}", part.name());
        let lines = part.run(args);
        for line in &lines {
            println!("{}", line.cells(&part.name(), &at));
            if let Outcome::Failed(why) = &line.outcome {
                failed.push(format!("{}, {}: {why}", part.name(), line.what));
            }
        }
        done.push((part, lines.iter().map(|l| l.cells(&part.name(), &at)).collect()));
        if !args.dry {
            // After each part: what has been seen must not be lost with a machine that goes away.
            write(&done, !args.targets.is_empty())?;
        }
    }
    eprintln!("\n{:.1} minutes", start.elapsed().as_secs_f64() / 60.0);
    if !failed.is_empty() {
        bail!("{} failed:\n{}", failed.len(), failed.join("\n"));
    }
    Ok(())
}

/// The commit that is looked at, and whether something else is: the page itself does not count.
fn version() -> String {
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).current_dir(shell::root()).output().ok().filter(|o| o.status.success())?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let Some(commit) = git(&["rev-parse", "--short", "HEAD"]) else { return "unknown".into() };
    let changed = git(&["status", "--porcelain", "--untracked-files=no", "--", ".", &format!(":!{DOCS}")]).is_none_or(|s| !s.is_empty());
    if changed { commit + ", changed" } else { commit }
}

/// Writes the page with these lines in the place of those it had of the same parts; of fuzzing, with `some`, of the same targets.
fn write(done: &[(Part, Vec<String>)], some: bool) -> Result<()> {
    let path = shell::root().join(DOCS);
    let before = fs::read_to_string(&path).unwrap_or_default();
    let text = page(&before, done, some, &figures::cpu(), std::thread::available_parallelism().map_or(1, |n| n.get()))?;
    fs::write(&path, text).with_context(|| path.display().to_string())
}

fn page(before: &str, done: &[(Part, Vec<String>)], some: bool, cpu: &str, cores: usize) -> Result<String> {
    let mut text = HEAD.replace("CPU", &format!("{cpu}, {cores} cores"));
    for part in Part::value_variants() {
        let start = format!("| {} |", part.name());
        let mut lines: Vec<String> = before.lines().filter(|l| l.starts_with(&start)).map(str::to_owned).collect();
        if let Some((_, new)) = done.iter().find(|(p, _)| p == part) {
            let what = |line: &str| line.split('|').nth(2).map(|cell| cell.trim().to_owned());
            let stays = |line: &String| some && *part == Part::Fuzz && new.iter().all(|n| what(n) != what(line));
            lines.retain(stays);
            lines.extend(new.iter().cloned());
            if some {
                lines.sort_by_key(|line| what(line));
            }
        }
        for line in lines {
            writeln!(text, "{line}")?;
        }
    }
    Ok(text + TAIL)
}

const HEAD: &str = "\
# Robustness

Written by `cargo xtask robust` on CPU. One command runs everything; `--only fuzz,soak` repeats parts of it, whose lines it
replaces. All numbers are read from what the programs printed. A part that failed makes the command fail; one that could not run says why. Other work on the
machine makes the times longer, and the number of executions in a given time smaller.

| part | what | how much | how long | result | limits | commit |
|---|---|---|---|---|---|---|
";
const TAIL: &str = "
- **fuzz**: the targets of [`fuzz/`](../fuzz/README.md), each for its share of the time. A crash, a broken promise or an input of 20 minutes is a failure, and the
  line names the input. Coverage is what libFuzzer counts: edges reached with the inputs that were there at the start, and at the end.
- **threads**: the unit tests with the standard library built for the thread sanitizer too. A data race it sees is a failure. Code of libc, the kernel and
  ggml is not instrumented.
- **miri**: undefined behaviour by an interpreter, with two seeds of the scheduler for what has threads. It knows no vector instructions of a processor, no `mmap`
  of files, no other process: what needs them is not run.
- **cycles**: a program of a real host loads Berth, allocates, writes, reads and frees in each place, and unloads it. Memory may grow by 2 % in the second half;
  open files, threads and mappings not at all.
- **soak**: a stock `llama-server` with Berth. Anonymous memory may grow by 2 % between the end of the first quarter, which fills its caches, and the end.
- **misuse**: calls of `berth.h` and of the device that must be refused, with an error and nothing written, from C, under valgrind.
";

/// Runs a command whose output is kept in a file too, and shows where that is.
fn logged(name: &str, command: Command, limit: Duration) -> Result<(Output, PathBuf)> {
    let dir = work()?;
    let log = dir.join(format!("{name}.log"));
    eprintln!("    {name}: {}", log.display());
    let output = run::run(command, limit)?;
    fs::write(&log, format!("{}\n--- stderr\n{}", output.stdout, output.stderr)).with_context(|| log.display().to_string())?;
    Ok((output, log))
}

/// Where builds and logs of this command lie: below the target directory.
fn work() -> Result<PathBuf> {
    let dir = ffi_tests::target_dir().context("this program lies in no target directory")?.join("robust");
    fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
    Ok(dir)
}

/// Tests that passed and failed, as cargo's test runner counts them, over all programs that ran.
fn counted(output: &str) -> (u64, u64) {
    let results = output.lines().filter_map(|l| l.trim_start().strip_prefix("test result: "));
    let number = |text: &str, of: &str| -> u64 {
        text.split([';', '.']).filter_map(|p| p.trim().strip_suffix(of)).filter_map(|n| n.trim().parse::<u64>().ok()).sum()
    };
    results.fold((0, 0), |(passed, failed), l| (passed + number(l, "passed"), failed + number(l, "failed")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_that_ran_replaces_its_lines_and_the_others_stay_in_their_order() {
        let before = "# Robustness\n| part | what |\n|---|---|\n| fuzz | a | old |\n| soak | b | old |\n| misuse | c | old |\n";
        let line = Line {
            what: "server".into(),
            amount: "5 | 6".into(),
            took: Duration::from_secs(3),
            outcome: Outcome::Failed("one\n\n two".into()),
            limits: String::new(),
        };
        let text = page(before, &[(Part::Soak, vec![line.cells("soak", "abc")])], false, "a CPU of ours", 2).unwrap();
        let table: Vec<&str> = text.lines().filter(|l| l.starts_with("| ") && !l.starts_with("| part")).collect();
        assert_eq!(
            table,
            ["| fuzz | a | old |", "| soak | server | 5 \\| 6 | 3 s | **FAILED**: one; two |  | abc |", "| misuse | c | old |"]
        );
        assert!(text.contains("on a CPU of ours, 2 cores."), "{text}");
    }

    #[test]
    fn some_fuzz_targets_replace_their_own_lines_alone() {
        let before = "| fuzz | `a` | 1 |\n| fuzz | `c` | 2 |\n| soak | b | old |\n";
        let new = |what: &str| format!("| fuzz | {what} | new |");
        let lines = |some, new: Vec<String>| {
            let text = page(before, &[(Part::Fuzz, new)], some, "x", 2).unwrap();
            text.lines().filter(|l| l.starts_with("| fuzz")).map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(lines(true, vec![new("`b`"), new("`a`")]), [new("`a`"), new("`b`"), "| fuzz | `c` | 2 |".into()]);
        assert_eq!(lines(false, vec![new("`b`")]), [new("`b`")]);
    }

    #[test]
    fn tests_are_counted_over_all_programs() {
        let text = "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured\nx\ntest result: FAILED. 3 passed; 2 failed; 0 ignored\n";
        assert_eq!(counted(text), (15, 2));
        assert_eq!(counted("nothing"), (0, 0));
    }
}
