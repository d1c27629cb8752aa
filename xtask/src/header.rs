//! `cargo xtask header`: `include/berth.h` from the exported functions, docs/c-api.md from that, and the check that neither was forgotten.

use std::fs;

use anyhow::{Context, Result, ensure};

use crate::{reference, shell};

const HEADER: &str = "include/berth.h";
const REFERENCE: &str = "docs/c-api.md";
/// What the header is made from: the exported functions, and the types they name. Not the whole crate: `abi` mirrors ggml's structures, which
/// are ggml's to declare.
const SOURCES: [&str; 3] = ["src/error.rs", "src/log.rs", "src/capi/mod.rs"];

/// Write include/berth.h and docs/c-api.md, or check them.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Change nothing; fail if they are not what the code says.
    #[arg(long)]
    check: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if args.check {
        return check();
    }
    for (name, text) in files()? {
        fs::write(shell::root().join(name), text).with_context(|| name.to_owned())?;
        println!("wrote {name}");
    }
    Ok(())
}

/// Fails if header and reference are not what the code says.
pub(crate) fn check() -> Result<()> {
    for (name, text) in files()? {
        let committed = fs::read_to_string(shell::root().join(name)).with_context(|| format!("{name} (make it: cargo xtask header)"))?;
        let line = text.lines().zip(committed.lines()).take_while(|(a, b)| a == b).count() + 1;
        ensure!(text == committed, "{name} is not what src/capi says, from line {line} on: cargo xtask header");
        println!("{name} is up to date");
    }
    Ok(())
}

/// What is made, by name.
fn files() -> Result<[(&'static str, String); 2]> {
    let header = generate()?;
    let reference = reference::page(&header)?;
    Ok([(HEADER, header), (REFERENCE, reference)])
}

fn generate() -> Result<String> {
    let config = cbindgen::Config::from_file(shell::root().join("cbindgen.toml")).map_err(anyhow::Error::msg)?;
    let sources = SOURCES.iter().fold(cbindgen::Builder::new(), |builder, file| builder.with_src(shell::root().join(file)));
    let bindings = sources.with_config(config).generate().context("cbindgen")?;
    let mut bytes = Vec::new();
    bindings.write(&mut bytes);
    Ok(String::from_utf8(bytes)?)
}
