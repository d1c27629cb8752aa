//! `berth man`: the manual pages, made from the options that the command understands. For packagers; `cargo xtask dist` calls it.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::CommandFactory;

/// Where to.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The directory, which must exist: berth.1 and one page per subcommand.
    directory: PathBuf,
}

pub(crate) fn run(args: &Args) -> ExitCode {
    let pages = clap_mangen::generate_to(crate::Cli::command(), &args.directory);
    let result = pages.map(|()| ExitCode::SUCCESS).map_err(|e| format!("{}: {e}", args.directory.display()));
    crate::finish("man", result)
}
