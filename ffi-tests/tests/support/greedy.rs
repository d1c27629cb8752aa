//! The C harness that drives any libllama.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use ffi_tests::{run, skip, tools};

/// `c/greedy.c`, compiled once.
pub(crate) fn harness() -> Option<&'static Path> {
    static HARNESS: OnceLock<Option<PathBuf>> = OnceLock::new();
    let compile = || {
        let mut cc = match tools::command("cc") {
            Ok(cc) => cc,
            Err(missing) => {
                skip::skipped("the C harness", &missing.0);
                return None;
            }
        };
        let executable = Path::new(env!("CARGO_TARGET_TMPDIR")).join("greedy");
        let fresh = executable.with_extension(std::process::id().to_string());
        cc.args(["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-o"]).arg(&fresh);
        cc.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("c/greedy.c")).args(["-ldl", "-pthread"]);
        run::run(cc, Duration::from_secs(60)).and_then(|o| o.checked("cc greedy.c")).unwrap_or_else(|e| panic!("{e:#}"));
        // Another process of these tests may do the same just now: each puts a whole file there.
        std::fs::rename(&fresh, &executable).expect("the target directory is writable");
        Some(executable)
    };
    HARNESS.get_or_init(compile).as_deref()
}
