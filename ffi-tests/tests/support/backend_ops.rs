//! llama.cpp's own `test-backend-ops` with Berth in the process, and how its cases ended.

use std::time::Duration;

use ffi_tests::hosts::Host;
use ffi_tests::{berth_lib, cache, run};

use crate::full::full;

/// How the cases of one run ended.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    pub(crate) not_supported: usize,
}

/// Runs it; every device must pass.
pub(crate) fn test_backend_ops(host: &Host, env: &[(&str, &str)], args: &[&str]) -> Counts {
    let mut command = host.command("test-backend-ops");
    command.arg("test").args(args).env("GGML_BACKEND_PATH", berth_lib().unwrap()).envs(env.iter().copied());
    let limit = Duration::from_secs(if full() { 6 * 3600 } else { 600 });
    let settings: String = env.iter().map(|(name, value)| format!("{name}={value} ")).collect();
    let what = format!("{settings}test-backend-ops {}", args.join(" "));
    let output = run::run(command, limit).and_then(|o| o.checked(&what)).unwrap_or_else(|e| panic!("{e:#}"));
    assert!(output.stdout.contains("4/4 backends passed"), "{what}: {}", run::last_lines(&output.stdout, 5));
    let mut counts = Counts::default();
    for line in output.stdout.lines() {
        // "  OP(parameters): OK", with colours.
        let Some((_, result)) = line.rsplit_once("): ") else { continue };
        match result {
            r if r.contains("OK") => counts.passed += 1,
            r if r.contains("not supported") => counts.not_supported += 1,
            _ => counts.failed += 1,
        }
    }
    let Counts { passed, failed, not_supported } = counts;
    cache::say(&format!("{what}: {passed} passed, {failed} failed, {not_supported} not supported, {} s", output.took.as_secs()));
    counts
}
