//! Runs of one model without Berth and with Berth computing its experts.

use std::path::PathBuf;

use ffi_tests::gguf::Type;
use ffi_tests::models::{self, Spec};
use ffi_tests::report::{Blocks, Report};
use ffi_tests::run::Options;

use crate::scratch::Scratch;

/// The rule that puts experts into memory of Berth's.
pub(crate) const RULE: &str = "exps=CPU_MMAP";

/// A model of random floats: both sides compute with floats, so that a difference is one of the last digits, and sampled texts stay the same.
pub(crate) fn floats() -> PathBuf {
    let spec = Spec { ty: Type::F32, dense: Type::F32, ..Spec::default() };
    models::random(&spec).unwrap_or_else(|e| panic!("{e:#}"))
}

/// Where the report of a run with Berth is.
fn report_in(scratch: &Scratch) -> PathBuf {
    scratch.path().join("report.json")
}

/// With Berth, which is to compute the experts and to report to `scratch`.
pub(crate) fn with_berth(options: Options, scratch: &Scratch) -> Options {
    let (library, arena) = (berth(), scratch.dir("arena").display().to_string());
    options.with_berth(&library, RULE).env("BERTH_ARENA_DIR", arena).env("BERTH_REPORT", report_in(scratch).display().to_string())
}

/// How the experts of that run were computed.
pub(crate) fn blocks(scratch: &Scratch) -> Blocks {
    Report::read(&report_in(scratch)).unwrap_or_else(|e| panic!("{e:#}")).blocks
}

/// The plug-in under test.
pub(crate) fn berth() -> PathBuf {
    ffi_tests::berth_lib().unwrap_or_else(|e| panic!("{e:#}"))
}
