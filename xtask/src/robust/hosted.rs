//! The parts that are tests of `ffi-tests`: run with cargo, and their lines made of the figures that they tell. How a test finds its figures is its own affair.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use ffi_tests::figures;
use ffi_tests::run::last_lines;

use super::{Line, Outcome, counted, logged};
use crate::shell;

/// Fewest cases of misuse that make the part pass.
const MISUSES: u64 = 24;

const LIMIT: Duration = Duration::from_secs(5400);

/// The library loaded and unloaded this often in one process, by two hosts.
pub(super) fn cycles(count: u32) -> Vec<Line> {
    let limits = "RSS + 2 % in the second half; files, threads and mappings not at all";
    let one = Tests { name: "cycles", test: "lifecycle", only: "many_loads_and_unloads", cycles: Some(count), limits };
    one.lines()
}

/// The server that many clients ask.
pub(super) fn soak() -> Vec<Line> {
    let limits = "RssAnon + 2 % after the first quarter; threads and files: no more than one a client";
    let one = Tests { name: "soak", test: "soak", only: "a_server_that_many_clients_ask", cycles: None, limits };
    one.lines()
}

/// Every wrong call of the API that the C programs make, under valgrind.
pub(super) fn misuse() -> Vec<Line> {
    let limits = "an error with its text, nothing written, no invalid access, no leak";
    let programs = [
        ("moe_capi", "the_harness_is_clean_under_valgrind"),
        ("arena", "pieces_lie_in_a_file_or_it_is_said_why_not"),
        ("loader", "every_"),
        ("device_misuse", "nothing_is_read_or_written_beyond_its_memory"),
    ];
    let mut all = Vec::new();
    for (test, only) in programs {
        all.extend(Tests { name: "misuse", test, only, cycles: None, limits }.lines());
    }
    let cases = different(all.iter().map(|l| (l.what.as_str(), l.amount.as_str())));
    let done = all.iter().all(|l| matches!(l.outcome, Outcome::Passed(_)));
    let enough = if cases >= MISUSES { Outcome::Passed("all refused".into()) } else { Outcome::Failed(format!("fewer than {MISUSES}")) };
    if done {
        all.push(Line {
            what: "different wrong calls of `berth.h`, of all programs".into(),
            amount: format!("{cases} cases"),
            took: Duration::ZERO,
            outcome: enough,
            limits: format!("at least {MISUSES}"),
        });
    }
    all
}

/// Cases of all programs, of which one may have run several times: "misuse in c/x.c, scalar kernels" and "misuse in c/x.c, avx2 kernels" are the same.
fn different<'a>(told: impl Iterator<Item = (&'a str, &'a str)>) -> u64 {
    let cases = told.filter_map(|(what, amount)| Some((what.split(',').next()?, amount.strip_suffix(" cases")?.parse::<u64>().ok()?)));
    cases.collect::<BTreeMap<_, _>>().values().sum()
}

/// Some tests of one test program.
struct Tests {
    /// Of the part.
    name: &'static str,
    test: &'static str,
    /// How the names of the tests begin.
    only: &'static str,
    cycles: Option<u32>,
    limits: &'static str,
}

impl Tests {
    fn lines(&self) -> Vec<Line> {
        let what = format!("`{}`", self.test);
        self.run().unwrap_or_else(|error| vec![Line::failed(&what, &error)])
    }

    fn run(&self) -> Result<Vec<Line>> {
        let what = format!("`{}`", self.test);
        let library = shell::berth()?;
        let mut build = shell::cargo();
        // Apart from the run, whose time counts.
        build.args(["test", "--quiet", "--package", "ffi-tests", "--test", self.test, "--no-run"]);
        shell::step(&mut build)?;
        let skipped = tempfile::NamedTempFile::new()?;
        let mut cargo = shell::cargo();
        cargo.args(["test", "--package", "ffi-tests", "--test", self.test, "--", "--test-threads", "1", self.only]);
        // A skip is a line of this table, not a failure.
        cargo.env("BERTH_LIB", library).env("BERTH_SKIP_LOG", skipped.path()).env_remove("CI").env_remove("BERTH_STRICT_TESTS");
        cargo.envs(self.cycles.map(|n| ("BERTH_TEST_CYCLES", n.to_string())));
        let (output, log) = logged(&format!("{}-{}", self.name, self.test), cargo, LIMIT)?;
        let (passed, failed) = counted(&output.stdout);
        if !output.success() {
            let stdout = output.stdout.lines().filter(|l| !l.trim().is_empty() && !l.starts_with("test ")).collect::<Vec<_>>().join("\n");
            let of = output.status.map_or_else(|| "killed, it took too long".to_owned(), |s| s.to_string());
            bail!("{failed} tests failed ({of}, {})\n{}", log.display(), last_lines(&stdout, 5));
        }
        ensure!(passed > 0, "no test has the name {}..", self.only);
        let left_out = fs::read_to_string(skipped.path())?;
        let mut lines: Vec<Line> = left_out.lines().map(|l| Line::skipped(&what, l.trim_start_matches("SKIPPED "))).collect();
        let told = figures::told(&output.stderr);
        ensure!(!told.is_empty() || !lines.is_empty(), "it told no figure: {}", log.display());
        for (i, (about, found)) in told.into_iter().enumerate() {
            // "N cases" and "N checks" are how much; all else is what was found.
            let amount = found.split_once(' ').is_some_and(|(n, of)| n.parse::<u64>().is_ok() && matches!(of, "cases" | "checks"));
            let (amount, found) = if amount {
                (found.clone(), if found.ends_with("checks") { "all hold" } else { "all refused" }.to_owned())
            } else {
                (about.clone(), found)
            };
            let what = if amount == about { what.clone() } else { about };
            lines.push(Line {
                what,
                amount,
                took: if i == 0 { output.took } else { Duration::ZERO },
                outcome: Outcome::Passed(found),
                limits: self.limits.into(),
            });
        }
        Ok(lines)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_ran_twice_has_its_cases_once() {
        let told = [
            ("misuse in a.c, scalar", "7 cases"),
            ("misuse in a.c, avx2", "7 cases"),
            ("misuse in b.c, x", "5 cases"),
            ("graphs, x", "9 checks"),
        ];
        assert_eq!(different(told.into_iter()), 12);
        assert_eq!(different([].into_iter()), 0);
    }
}
