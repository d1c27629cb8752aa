//! The project's own commands: `cargo xtask <command>`. This file knows the command line; each command has a file of its own.

#![forbid(unsafe_code)]

mod abi;
mod above_ram;
mod demo;
mod dist;
mod figures;
mod header;
mod hosts;
mod ik;
mod load;
mod matrix;
mod model;
mod newcomer;
mod picture;
mod plot;
mod profile;
mod reference;
mod robust;
mod setup;
mod shell;
mod speed;
mod test;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// The project's own commands.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Compare the header with that of the last release, by abidiff.
    Abi(abi::Args),
    /// Measure a model larger than memory in stock llama-bench with and without Berth, and write docs/above-ram.md.
    AboveRam(above_ram::Args),
    /// Show Berth at work: a stock, prebuilt llama-server with a model's experts in each of Berth's places.
    Demo(demo::Args),
    /// Build what is installed (libraries, header, CMake and pkg-config files, the command, manual pages, licences), and install or pack it.
    Dist(dist::Args),
    /// Measure the experts' operation, next to this machine's limits and stock ggml, and write docs/moe-figures.md.
    Figures(figures::Args),
    /// Write include/berth.h from the exported functions and docs/c-api.md from that, or check them.
    Header(header::Args),
    /// Fetch or build the hosts that Berth is tested against, and say where they are.
    Hosts(hosts::Args),
    /// Measure cold loads in stock llama.cpp next to the disk, and a second start, and write docs/load.md.
    Load(load::Args),
    /// Run every host with and without Berth, and write docs/hosts.md.
    Matrix(matrix::Args),
    /// Make a model: one with random weights, or a real one cut into experts.
    Model(model::Args),
    /// Try README.md as a new user would: an ordinary user in a clean system, its commands one after the other.
    Newcomer(newcomer::Args),
    /// Make docs/explain.png, the picture of a page of `berth explain`.
    Picture,
    /// Sample where stock llama-bench spends its time with and without Berth, and write docs/profile.md.
    Profile(profile::Args),
    /// Fuzzing, sanitizers, load cycles, clients that leave, misuse: the long checks; writes docs/robustness.md.
    Robust(robust::Args),
    /// Say which programs and libraries the tests need and the system lacks, or install them.
    Setup(setup::Args),
    /// Measure stock llama-bench with and without Berth, and write docs/speed.md.
    Speed(speed::Args),
    /// Run all checks: formatting, lints, header, unit tests, and the tests against real hosts.
    Test(test::Args),
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Abi(args) => abi::run(&args),
        Command::AboveRam(args) => above_ram::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Dist(args) => dist::run(&args),
        Command::Figures(args) => figures::run(&args),
        Command::Header(args) => header::run(&args),
        Command::Hosts(args) => hosts::run(&args),
        Command::Load(args) => load::run(&args),
        Command::Matrix(args) => matrix::run(&args),
        Command::Model(args) => model::run(args),
        Command::Newcomer(args) => newcomer::run(&args),
        Command::Picture => picture::run(),
        Command::Profile(args) => profile::run(&args),
        Command::Robust(args) => robust::run(&args),
        Command::Setup(args) => setup::run(&args),
        Command::Speed(args) => speed::run(&args),
        Command::Test(args) => test::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
