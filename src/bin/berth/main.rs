//! The `berth` command: what this machine and this model allow, before anything is loaded.

mod doctor;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Berth places mixture-of-experts weights in host memory for unmodified llama.cpp.
#[derive(Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show what this machine offers: processor, memory, limits, arena directory, CUDA driver, llama.cpp.
    Doctor(doctor::Args),
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Doctor(args) => doctor::run(&args),
    }
}
