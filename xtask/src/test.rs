//! `cargo xtask test`: everything that must hold before a change is merged, in one command; CI runs the same.

use std::fs;
use std::thread;
use std::time::Instant;

use anyhow::{Result, bail};
use ffi_tests::{hosts, skip, tools};

use crate::{abi, header, setup, shell};

/// Run all checks.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Leave out what needs a host: formatting, lints, unit tests and the header only.
    #[arg(long)]
    quick: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let start = Instant::now();
    let lacking = setup::missing();
    for lack in lacking.iter().filter(|_| !args.quick) {
        println!("{}", lack.hint);
    }
    let skipped = tempfile::NamedTempFile::new()?;
    let mut failed = Vec::new();
    let mut check = |name: &str, done: Result<()>| {
        if let Err(error) = done {
            eprintln!("FAILED {name}: {error:#}");
            failed.push(name.to_owned());
        }
    };

    check("formatting", shell::step(shell::cargo().args(["fmt", "--all", "--check"])));
    let lints = ["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];
    check("lints", shell::step(shell::cargo().args(lints)));
    check("header", header::check());
    check("ABI", abi::check());
    // The tests load the library as a host does: the release build, by its path.
    let library = shell::berth()?;
    // A host computes with two threads that wait by spinning: more of them than cores makes every one many times slower.
    let at_once = thread::available_parallelism().map_or(1, |cores| (cores.get() / 2).max(1));
    let test = |args: &[&str]| {
        let mut cargo = shell::cargo();
        cargo.args(["test", "--no-fail-fast"]).args(args).env("BERTH_LIB", &library).env("BERTH_SKIP_LOG", skipped.path());
        cargo.env("RUST_TEST_THREADS", at_once.to_string());
        shell::step(&mut cargo)
    };
    if args.quick {
        check("unit tests", test(&["--workspace", "--exclude", "ffi-tests"]));
        check("unit tests of ffi-tests", test(&["--package", "ffi-tests", "--lib"]));
    } else {
        check("hosts", provision());
        check("tests", test(&["--workspace"]));
    }

    println!();
    let mut lines: Vec<String> = fs::read_to_string(skipped.path())?.lines().map(str::to_owned).collect();
    lines.sort_unstable();
    lines.dedup();
    lines.iter().for_each(|line| println!("{line}"));
    let minutes = start.elapsed().as_secs_f64() / 60.0;
    let left_out = if args.quick { "all tests with hosts left out (--quick), " } else { "" };
    println!("{left_out}{} SKIPPED, {} failed, {minutes:.1} minutes", lines.len(), failed.len());
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    Ok(())
}

/// Every host before the first test, so that a build of minutes shows its progress and is not taken for a test that hangs.
fn provision() -> Result<()> {
    eprintln!("\n==> hosts");
    for id in hosts::ids() {
        match hosts::get(id) {
            Ok(host) => eprintln!("    {id}: {} ({})", host.ggml_version, host.package),
            // A test that needs it says SKIPPED with the reason.
            Err(error) if tools::is_missing(&error) && !skip::strict() => eprintln!("    {id}: {}", error.root_cause()),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
