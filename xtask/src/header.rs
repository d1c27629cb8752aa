//! `cargo xtask header`: `include/berth.h` from the exported functions, and the check that it was not forgotten.

use std::fs;

use anyhow::{Context, Result, ensure};

use crate::shell;

const HEADER: &str = "include/berth.h";
/// What the header is made from: the exported functions, and the types they name. Not the whole crate: `abi` mirrors ggml's structures, which
/// are ggml's to declare.
const SOURCES: [&str; 3] = ["src/error.rs", "src/log.rs", "src/capi/mod.rs"];

/// Write include/berth.h, or check it.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Change nothing; fail if the header is not what the code says.
    #[arg(long)]
    check: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if args.check {
        return check();
    }
    let path = shell::root().join(HEADER);
    fs::write(&path, generate()?).with_context(|| path.display().to_string())?;
    println!("wrote {}", path.display());
    Ok(())
}

/// Fails if the header is not what the code says.
pub(crate) fn check() -> Result<()> {
    let path = shell::root().join(HEADER);
    let header = generate()?;
    let committed = fs::read_to_string(&path).with_context(|| format!("{} (make it: cargo xtask header)", path.display()))?;
    let line = header.lines().zip(committed.lines()).take_while(|(a, b)| a == b).count() + 1;
    ensure!(header == committed, "{HEADER} is not what src/capi says, from line {line} on: cargo xtask header");
    println!("{HEADER} is up to date");
    Ok(())
}

fn generate() -> Result<String> {
    let config = cbindgen::Config::from_file(shell::root().join("cbindgen.toml")).map_err(anyhow::Error::msg)?;
    let sources = SOURCES.iter().fold(cbindgen::Builder::new(), |builder, file| builder.with_src(shell::root().join(file)));
    let bindings = sources.with_config(config).generate().context("cbindgen")?;
    let mut bytes = Vec::new();
    bindings.write(&mut bytes);
    Ok(String::from_utf8(bytes)?)
}
