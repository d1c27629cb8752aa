//! The one way a test is left out: a line `SKIPPED <what>: <why>`, past the test runner's capture; a panic where skipping is not accepted.

use std::fs::OpenOptions;
use std::io::Write;

use anyhow::Result;

use crate::tools;

/// Whether a skip is a failure: `CI` is set (to something else than empty, `0` or `false`), or `BERTH_STRICT_TESTS=1`.
pub fn strict() -> bool {
    let set = |name| std::env::var(name).is_ok_and(|v| !matches!(v.as_str(), "" | "0" | "false"));
    set("CI") || set("BERTH_STRICT_TESTS")
}

/// Says that `what` is left out and why; panics with that line if [`strict`].
///
/// The line goes to the real stderr (the test runner captures only the print macros) and is appended to the file named by
/// `BERTH_SKIP_LOG`, from which `cargo xtask test` makes its summary.
pub fn skipped(what: &str, why: &str) {
    let line = format!("SKIPPED {what}: {}\n", why.replace('\n', "; "));
    assert!(!strict(), "{line}a skip is a failure here (CI or BERTH_STRICT_TESTS is set)");
    // Nothing can be done about a closed stderr or a log that cannot be written: the line is information.
    let _ = std::io::stderr().write_all(line.as_bytes());
    if let Some(log) = std::env::var_os("BERTH_SKIP_LOG") {
        let _ = OpenOptions::new().append(true).create(true).open(log).and_then(|mut f| f.write_all(line.as_bytes()));
    }
}

/// What was to be had, or a skip if something outside the project is missing for it.
///
/// # Panics
/// With any other error.
pub fn available<T>(what: &str, got: Result<T>) -> Option<T> {
    match got {
        Ok(got) => Some(got),
        Err(error) if tools::is_missing(&error) => {
            skipped(what, &error.root_cause().to_string());
            None
        }
        Err(error) => panic!("{error:#}"),
    }
}
