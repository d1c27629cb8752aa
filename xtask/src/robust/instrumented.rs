//! The library's unit tests where every access is watched: under the thread sanitizer, and in Miri. Which tests, is said here with what they cannot run.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ffi_tests::run::last_lines;

use super::{Line, Outcome, counted, logged, nightly, work};
use crate::shell;

const LIMIT: Duration = Duration::from_secs(3600);

/// What has threads of its own or is used by several: the beginnings of the tests' names.
const THREADED: &[&str] = &[
    "ahead::",
    "backend::",
    "buffers::",
    "capi::",
    "config::",
    "log::",
    "memory::aio",
    "memory::direct",
    "memory::fill",
    "memory::lasting",
    "memory::populate",
    "memory::watch",
    "moe::ahead",
    "moe::copies",
    "moe::crew",
    "moe::pool",
    "moe::schedule",
    "moe::tests",
    "report::",
];

/// What runs without the processor's vectors, flags of `open` that Miri does not know, other processes, and a million steps of a regular expression: the
/// threads of the experts, pointers that C keeps, and the arithmetic on what a file says of itself.
const INTERPRETED: &[&str] = &[
    "moe::crew",
    "moe::pool",
    "moe::schedule",
    "abi::context",
    "error::tests::status",
    "gguf::hostile::a_tensor_without_data",
    "gguf::hostile::counts_and_lengths",
    "gguf::hostile::duplicates_overlaps",
];

/// Seeds of Miri's scheduler.
const SEEDS: [u32; 2] = [0, 1];

pub(super) fn threads() -> Vec<Line> {
    let what = "unit tests under the thread sanitizer";
    let Some(hint) = nightly::lacking(&[nightly::COMPILER]).or_else(nightly::lacking_sources) else {
        return vec![watched(what).unwrap_or_else(|error| Line::failed(what, &error))];
    };
    vec![Line::skipped(what, hint)]
}

fn watched(what: &str) -> Result<Line> {
    let triple = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let test = || -> Result<_> {
        let mut cargo = nightly::cargo();
        // Std too: what it does between threads is seen only if it is built so.
        cargo.args(["test", "-Zbuild-std", "--target", &triple, "--package", "ggml-berth", "--lib"]);
        cargo.env("RUSTFLAGS", "-Zsanitizer=thread").env("CARGO_TARGET_DIR", work()?.join("threads"));
        Ok(cargo)
    };
    let mut build = test()?;
    build.args(["--quiet", "--no-run"]);
    shell::step(&mut build)?;
    let mut command = test()?;
    command.arg("--").args(["--test-threads", "4"]).args(THREADED).env("TSAN_OPTIONS", "halt_on_error=0");
    ffi_tests::run::clean_env(&mut command);
    let (output, log) = logged("threads", command, LIMIT)?;
    let (passed, failed) = counted(&output.stdout);
    let races = races(&output.stderr) + races(&output.stdout);
    let outcome = if output.success() && races == 0 && failed == 0 {
        Outcome::Passed("no data race".into())
    } else {
        Outcome::Failed(format!("{races} reports, {failed} tests failed: {}", log.display()))
    };
    ensure!(passed > 0, "no test ran: {}\n{}", log.display(), last_lines(&output.stderr, 5));
    let limits = format!("modules {}; ggml is not there; {}", modules(THREADED), nightly::version());
    Ok(Line { what: what.into(), amount: format!("{passed} tests"), took: output.took, outcome, limits })
}

fn races(text: &str) -> usize {
    text.matches("WARNING: ThreadSanitizer").count()
}

fn modules(names: &[&str]) -> String {
    names.iter().map(|n| format!("`{}`", n.trim_end_matches("::"))).collect::<Vec<_>>().join(", ")
}

pub(super) fn miri() -> Vec<Line> {
    let what = "unit tests in Miri";
    if let Some(hint) = nightly::lacking(&[nightly::COMPILER, nightly::MIRI]) {
        return vec![Line::skipped(what, hint)];
    }
    vec![interpreted(what).unwrap_or_else(|error| Line::failed(what, &error))]
}

fn interpreted(what: &str) -> Result<Line> {
    let start = Instant::now();
    let mut passed = 0;
    for seed in SEEDS {
        let mut cargo = nightly::cargo();
        cargo.args(["miri", "test", "--package", "ggml-berth", "--lib", "--"]).args(INTERPRETED);
        // Tests read clocks, environment and temporary files.
        cargo.env("MIRIFLAGS", format!("-Zmiri-disable-isolation -Zmiri-seed={seed}")).env("CARGO_TARGET_DIR", work()?.join("miri"));
        ffi_tests::run::clean_env(&mut cargo);
        let (output, log) = logged(&format!("miri-{seed}"), cargo, LIMIT)?;
        let (ran, failed) = counted(&output.stdout);
        let amount = format!("{ran} tests, seed {seed}");
        if !output.success() || failed > 0 {
            let error = output.stderr.lines().find(|l| l.starts_with("error")).unwrap_or("no error line").to_owned();
            let outcome = Outcome::Failed(format!("{error}: {}", log.display()));
            return Ok(Line { what: what.into(), amount, took: start.elapsed(), outcome, limits: modules(INTERPRETED) });
        }
        ensure!(ran > 0, "no test ran: {}", log.display());
        passed = ran;
    }
    let amount = format!("{passed} tests, {} seeds", SEEDS.len());
    let limits = format!("modules {}; {}", modules(INTERPRETED), nightly::version());
    Ok(Line {
        what: what.into(),
        amount,
        took: start.elapsed(),
        outcome: Outcome::Passed("no undefined behaviour, no race, no leak".into()),
        limits,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_of_races_are_counted() {
        let report = "==================\nWARNING: ThreadSanitizer: data race (pid=7)\n";
        assert_eq!(races(&report.repeat(3)), 3);
        assert_eq!(races("test result: ok"), 0);
    }
}
