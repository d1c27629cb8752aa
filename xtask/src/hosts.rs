//! `cargo xtask hosts`: fetch or build hosts, and say where they are.

use anyhow::{Result, ensure};
use ffi_tests::hosts;

/// Fetch or build hosts.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The hosts' ids; all of them if none is given.
    ids: Vec<String>,
    /// Only list the ids.
    #[arg(long)]
    list: bool,
    /// Fetch the headers of the layout tests too.
    #[arg(long)]
    headers: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let ids: Vec<&str> = if args.ids.is_empty() { hosts::ids() } else { args.ids.iter().map(String::as_str).collect() };
    if args.list {
        ids.iter().for_each(|id| println!("{id}"));
        return Ok(());
    }
    let mut failed = Vec::new();
    for id in ids {
        match hosts::get(id) {
            Ok(host) => println!("{id:14} ggml {:8} {}   ({})", host.ggml_version, host.lib_dir.display(), host.package),
            Err(error) => {
                println!("{id:14} FAILED: {error:#}");
                failed.push(id);
            }
        }
    }
    let headers = if args.headers { hosts::header_ids() } else { Vec::new() };
    for id in headers {
        let found = hosts::headers_of(id)?;
        println!("{id:22} ggml {:8} {}", found.ggml_version, found.ggml_include.display());
    }
    ensure!(failed.is_empty(), "no {}", failed.join(", "));
    Ok(())
}
