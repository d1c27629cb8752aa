//! `cargo xtask setup`: which programs and libraries of the system are missing, and, if asked, their installation on Debian and its kin.

use std::io::IsTerminal as _;
use std::process::Command;

use anyhow::{Result, ensure};
use ffi_tests::tools::{TOOLS, on_path};

use crate::shell;

/// Check what the tests need, or install it.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Install what is missing with apt-get (as root, or through sudo).
    #[arg(long)]
    apt: bool,
}

/// Libraries that are opened, not called: the start of the file's name, the package, what for.
const LIBRARIES: [(&str, &str, &str); 2] =
    [("libclang", "libclang-dev", "reading ggml's headers in the layout tests"), ("libgomp.so.1", "libgomp1", "the prebuilt llama-server")];

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut lacking = missing();
    if args.apt && !lacking.is_empty() {
        shell::step(apt().args(["update", "-q"]))?;
        let packages: Vec<&str> = lacking.iter().filter(|m| !m.apart).map(|m| m.package).collect();
        if !packages.is_empty() {
            shell::step(&mut install(&packages))?;
        }
        // Each by itself: one that cannot be had must not take the others with it.
        for lack in lacking.iter().filter(|m| m.apart) {
            if let Err(error) = shell::step(&mut install(&[lack.package])) {
                eprintln!("{error:#}\n{}", lack.hint);
            }
        }
        lacking = missing();
    }
    lacking.iter().for_each(|m| println!("{}", m.hint));
    let needed = lacking.iter().filter(|m| !m.apart).count();
    ensure!(needed == 0, "{needed} things are missing (cargo xtask setup --apt installs them on Debian and Ubuntu)");
    println!(
        "{}",
        if lacking.is_empty() {
            "nothing is missing"
        } else {
            "nothing else is missing; the tests that need it are skipped, in CI they fail"
        }
    );
    Ok(())
}

fn install(packages: &[&str]) -> Command {
    let mut apt = apt();
    apt.args(["install", "-q", "-y", "--no-install-recommends"]).args(packages);
    apt
}

/// Something the system lacks.
pub(crate) struct Lack {
    package: &'static str,
    /// Whether it is installed by itself and may be missing.
    apart: bool,
    /// One line: what is missing and how to get it.
    pub(crate) hint: String,
}

/// Everything the system lacks.
pub(crate) fn missing() -> Vec<Lack> {
    let tools = TOOLS.iter().filter(|t| t.find().is_none()).map(|t| Lack { package: t.apt, apart: t.apart, hint: t.hint() });
    let libraries = LIBRARIES.iter().filter(|l| !has_library(l.0)).map(|&(name, package, what)| Lack {
        package,
        apart: false,
        hint: format!("{name} is missing: apt-get install {package}   (for {what})"),
    });
    tools.chain(libraries).collect()
}

/// Whether the dynamic linker, or LLVM's own directory, has a library whose name starts so. (`libclang-cpp` is another library.)
fn has_library(name: &str) -> bool {
    let is_it = |file: &str| file.starts_with(name) && !file.starts_with("libclang-cpp");
    let in_llvm = || {
        let versions =
            std::fs::read_dir("/usr/lib").into_iter().flatten().flatten().filter(|d| d.file_name().to_string_lossy().starts_with("llvm"));
        let files = versions.flat_map(|d| std::fs::read_dir(d.path().join("lib"))).flatten().flatten();
        files.into_iter().any(|f| is_it(&f.file_name().to_string_lossy()))
    };
    let ldconfig = on_path("ldconfig").unwrap_or_else(|| "/sbin/ldconfig".into());
    let known = Command::new(ldconfig).arg("-p").output().map(|out| String::from_utf8_lossy(&out.stdout).into_owned()).unwrap_or_default();
    known.lines().any(|l| is_it(l.trim_start())) || in_llvm()
}

/// `apt-get` without questions, through sudo where this is not root: it may ask for a password where somebody is there to type it.
fn apt() -> Command {
    let root = Command::new("id").arg("-u").output().is_ok_and(|out| out.stdout == b"0\n");
    let mut apt = if root || on_path("sudo").is_none() {
        Command::new("apt-get")
    } else {
        let mut sudo = Command::new("sudo");
        sudo.args((!std::io::stdin().is_terminal()).then_some("-n"));
        sudo.args(["DEBIAN_FRONTEND=noninteractive", "apt-get"]);
        sudo
    };
    apt.env("DEBIAN_FRONTEND", "noninteractive");
    apt
}
