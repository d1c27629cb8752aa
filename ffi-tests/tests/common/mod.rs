//! A run with Berth in a directory of its own, and the proof of where the experts went.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ffi_tests::gguf::Gguf;
use ffi_tests::report::Report;

/// The buffer types under test, as typed in `-ot`.
pub(crate) const TYPES: [&str; 3] = ["CPU_MMAP", "CUDA_Host", "ARENA"];

/// Where one run keeps its arena and its report: on the disk of the target directory, removed at the end.
pub(crate) struct Scratch {
    dir: tempfile::TempDir,
}

impl Scratch {
    pub(crate) fn new() -> Scratch {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("the target directory is writable");
        std::fs::create_dir(dir.path().join("arena")).expect("a new directory is writable");
        Scratch { dir }
    }

    /// `BERTH_*` for the run.
    pub(crate) fn environment(&self) -> Vec<(String, String)> {
        let path = |name: &str| self.dir.path().join(name).display().to_string();
        vec![("BERTH_ARENA_DIR".into(), path("arena")), ("BERTH_REPORT".into(), path("report.json"))]
    }

    /// What Berth reported at last. Nothing else may be left in the directory.
    pub(crate) fn report(&self) -> Report {
        let arena: Vec<_> = std::fs::read_dir(self.dir.path().join("arena")).expect("the arena's directory").collect();
        assert!(arena.is_empty(), "left in the arena's directory: {arena:?}");
        Report::read(&self.dir.path().join("report.json")).unwrap_or_else(|e| panic!("{e:#}"))
    }
}

/// Names and bytes of a model's expert tensors (scales and biases included): what `exps=TYPE` matches.
pub(crate) fn experts(model: &Path) -> BTreeMap<String, u64> {
    let gguf = Gguf::open(model).unwrap_or_else(|e| panic!("{e:#}"));
    let experts: BTreeMap<String, u64> =
        gguf.tensors().iter().filter(|t| t.name.contains("exps")).map(|t| (t.name.clone(), t.bytes)).collect();
    assert!(!experts.is_empty(), "{} has no experts", model.display());
    experts
}

/// How many pieces the scheduler cut each graph into, as the host says when it makes a context: `graph splits = 1`, `graph splits = 2 (with
/// bs=512), 1 (with bs=1)`, or, newer, `splits = 2 / 1, input objects = ..`.
pub(crate) fn splits(stderr: &str) -> Vec<u32> {
    let mut found = Vec::new();
    for rest in stderr.lines().filter_map(|line| Some(line.split_once("splits = ")?.1)) {
        let counts = rest.split(", input").next().unwrap_or(rest);
        // What stands in parentheses is the size of the batch.
        let outside = counts.split(['(', ')']).step_by(2);
        let numbers = outside.flat_map(|part| part.split(|c: char| !c.is_ascii_digit())).filter(|digits| !digits.is_empty());
        found.extend(numbers.map(|digits| digits.parse::<u32>().expect("a number of splits")));
    }
    found
}

/// The plug-in under test.
pub(crate) fn berth() -> PathBuf {
    ffi_tests::berth_lib().unwrap_or_else(|e| panic!("{e:#}"))
}
