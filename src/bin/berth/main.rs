//! The `berth` command: what this machine and this model allow, before anything is loaded.

mod arena;
mod doctor;
mod explain;
mod man;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Berth places mixture-of-experts weights in host memory for unmodified llama.cpp.
#[derive(Parser)]
#[command(name = "berth", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List, verify and remove the files that BERTH_ARENA_PERSIST=1 has left.
    Arena(arena::Args),
    /// Show what this machine offers: processor, memory, limits, arena directory, CUDA driver, llama.cpp.
    Doctor(doctor::Args),
    /// Show where every tensor of a model would go, and why, before anything is loaded.
    Explain(explain::Args),
    /// Write the manual pages into a directory.
    #[command(hide = true)]
    Man(man::Args),
}

fn main() -> ExitCode {
    match Cli::try_parse_from(std::env::args_os().map(explain::long_spelling)) {
        Ok(Cli { command: Command::Arena(args) }) => arena::run(&args),
        Ok(Cli { command: Command::Doctor(args) }) => doctor::run(&args),
        Ok(Cli { command: Command::Explain(args) }) => explain::run(&args),
        Ok(Cli { command: Command::Man(args) }) => man::run(&args),
        Err(answer) => answered(&answer),
    }
}

/// Help, version, or what is wrong with the options. clap's own way ignores that help cannot be written.
fn answered(answer: &clap::Error) -> ExitCode {
    use std::io::{ErrorKind, Write};
    match answer.print().and_then(|()| std::io::stdout().flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            let _ = writeln!(std::io::stderr(), "berth: {e}");
            ExitCode::FAILURE
        }
        _ => ExitCode::from(u8::try_from(answer.exit_code()).unwrap_or(1)),
    }
}

/// Text without control characters but for line ends: a path or a name in it must not speak to the terminal.
pub(crate) fn printable(text: &str) -> String {
    text.split('\n').map(berth::log::one_line).collect::<Vec<_>>().join("\n")
}

/// Writes to standard output. A reader that has gone is no failure; anything else is one line.
pub(crate) fn print(text: &str) -> Result<(), String> {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(format!("standard output: {e}")),
        _ => Ok(()),
    }
}

/// The end of a command: success, or one line on standard error.
pub(crate) fn finish(command: &str, result: Result<ExitCode, String>) -> ExitCode {
    result.unwrap_or_else(|message| {
        complain(command, &message);
        ExitCode::FAILURE
    })
}

/// What is wrong, on standard error.
pub(crate) fn complain(command: &str, message: &str) {
    use std::io::Write;
    // A closed standard error is no reason to panic.
    let _ = writeln!(std::io::stderr(), "berth {command}: {}", printable(message));
}
