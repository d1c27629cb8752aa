//! What the commands share: the repository's root, cargo, building the library, a step with its name shown.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

/// The root of the repository.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}

/// The cargo that runs this, in the root.
pub(crate) fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(root());
    cargo
}

/// Shows the command as a step, runs it, and fails if it fails.
pub(crate) fn step(command: &mut Command) -> Result<()> {
    let name = Path::new(command.get_program()).file_name().unwrap_or_default().to_string_lossy().into_owned();
    let line: Vec<String> = std::iter::once(name).chain(command.get_args().map(|a| a.to_string_lossy().into_owned())).collect();
    shown(&line.join(" "), command)
}

/// The same, by a name of its own.
pub(crate) fn shown(line: &str, command: &mut Command) -> Result<()> {
    let start = Instant::now();
    eprintln!("\n==> {line}");
    let status = command.status().with_context(|| format!("cannot start {line}"))?;
    ensure!(status.success(), "{line}: {status}");
    eprintln!("    ({:.0} s)", start.elapsed().as_secs_f64());
    Ok(())
}

/// The plug-in, built in release mode; `$BERTH_LIB` stands for one that is built already.
pub(crate) fn berth() -> Result<PathBuf> {
    if std::env::var_os("BERTH_LIB").is_none() {
        step(cargo().args(["build", "--quiet", "--release", "--package", "ggml-berth"]))?;
    }
    ffi_tests::berth_lib()
}
