//! The libraries as they are shipped: without debug information, the static one with no name of its own but the documented ones.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use ffi_tests::tools;

/// The two functions that ggml looks for, which are in no header.
const OF_GGML: [&str; 2] = ["ggml_backend_init", "ggml_backend_score"];

/// Every function that the header declares, and the two that ggml looks for.
pub(crate) fn documented(header: &str) -> BTreeSet<String> {
    let code = header.lines().filter(|l| !l.trim_start().starts_with(['*', '/']) && !l.starts_with("typedef"));
    let names = code.filter_map(|l| l.split_once('(')?.0.rsplit([' ', '*']).next()).filter(|n| n.starts_with("berth_"));
    names.chain(OF_GGML).map(str::to_owned).collect()
}

/// A library or program without what only a debugger reads.
pub(crate) fn stripped(file: &Path, work: &Path) -> Result<Vec<u8>> {
    let to = work.join("stripped");
    let mut strip = binutil("strip")?;
    strip.arg("--strip-unneeded").arg("-o").arg(&to).arg(file);
    run(strip)?;
    fs::read(&to).with_context(|| to.display().to_string())
}

/// The static library as one object in which only the documented functions can be seen from outside: rustc's holds the whole of Rust's standard
/// library by its public names, so that no program could link two of them.
pub(crate) fn one_object(archive: &Path, symbols: &BTreeSet<String>, work: &Path) -> Result<Vec<u8>> {
    let at = |name: &str| work.join(name);
    fs::write(at("symbols"), symbols.iter().fold(String::new(), |all, s| all + s + "\n"))?;
    // Rust's own libraries carry their bitcode, which binutils with LLVM's plugin takes for the object.
    let mut strip = binutil("objcopy")?;
    strip.args(["--strip-debug", "--remove-section=.llvmbc", "--remove-section=.llvmcmd"]).arg(archive).arg(at("plain.a"));
    run(strip)?;
    // What no documented function needs is left out: half of it. Sections stay apart, so that a program's linker can leave out more.
    let mut ld = binutil("ld")?;
    ld.args(["-r", "--gc-sections"]).args(symbols.iter().map(|s| format!("--undefined={s}")));
    ld.arg("-o").arg(at("all.o")).arg(at("plain.a"));
    run(ld)?;
    let mut objcopy = binutil("objcopy")?;
    let mut option = OsString::from("--keep-global-symbols=");
    option.push(at("symbols"));
    // That ld forgets which names may be missing: functions of newer systems that Rust looks for.
    objcopy.args(weak(&at("plain.a"))?.iter().map(|name| format!("--weaken-symbol={name}")));
    objcopy.arg(option).arg(at("all.o")).arg(at("berth.o"));
    run(objcopy)?;
    let mut ar = binutil("ar")?;
    // D: no times and owners.
    ar.arg("rcsD").arg(at("libberth.a")).arg(at("berth.o"));
    run(ar)?;
    fs::read(at("libberth.a")).context("libberth.a")
}

/// Names that objects of an archive use, and that may be missing.
fn weak(archive: &Path) -> Result<BTreeSet<String>> {
    let mut nm = binutil("nm")?;
    nm.args(["--undefined-only", "--format=posix"]).arg(archive);
    let output = nm.output().context("nm")?;
    ensure!(output.status.success(), "nm: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(text.lines().filter_map(|l| l.trim_end().strip_suffix(" w")).map(str::to_owned).collect())
}

/// The libraries that a program needs which links the static one: what rustc says for Rust's own, and what build scripts of dependencies name
/// (none does today).
pub(crate) fn native_static_libs() -> Result<Vec<String>> {
    let dir = tempfile::tempdir()?;
    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    rustc.args(["--print", "native-static-libs", "--crate-type", "staticlib", "--crate-name", "empty", "-o"]);
    rustc.arg(dir.path().join("empty.a")).arg("-").stdin(Stdio::null());
    let output = rustc.output().context("rustc")?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let line = text.lines().find_map(|l| l.split_once("native-static-libs:").map(|(_, libs)| libs));
    let line = line.with_context(|| format!("rustc does not name native-static-libs:\n{text}"))?;
    let libraries: Vec<String> = line.split_whitespace().filter_map(|l| l.strip_prefix("-l")).map(str::to_owned).collect();
    ensure!(libraries.iter().any(|l| l == "c"), "no libc among {libraries:?}");
    Ok(libraries)
}

/// The pages that the command writes about itself: name, text.
pub(crate) fn manual(program: &Path, work: &Path) -> Result<Vec<(String, Vec<u8>)>> {
    let dir = work.join("man");
    fs::create_dir(&dir)?;
    let mut command = Command::new(program);
    command.arg("man").arg(&dir);
    run(command)?;
    let mut pages = Vec::new();
    for entry in fs::read_dir(&dir)? {
        let path: PathBuf = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        pages.push((name, fs::read(&path)?));
    }
    ensure!(pages.iter().any(|(name, _)| name == "berth.1"), "{} man wrote no berth.1", program.display());
    Ok(pages)
}

/// The oldest libc that has all that the library uses, as its name for the version.
pub(crate) fn oldest_libc(library: &Path) -> Result<String> {
    let mut nm = binutil("nm")?;
    nm.args(["-D", "--undefined-only", "--with-symbol-versions"]).arg(library);
    let output = nm.output().context("nm")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let versions = text.lines().filter_map(|l| l.split("@GLIBC_").nth(1));
    let numbers = |v: &&str| v.split('.').filter_map(|n| n.parse().ok()).collect::<Vec<u32>>();
    Ok(versions.max_by_key(numbers).map_or_else(|| "no glibc".to_owned(), |v| format!("glibc {v}")))
}

fn binutil(name: &str) -> Result<Command> {
    // They come with `nm`, whose hint names the package.
    tools::command("nm")?;
    Ok(Command::new(name))
}

fn run(mut command: Command) -> Result<()> {
    let name = format!("{command:?}");
    let output = command.stdin(Stdio::null()).output().with_context(|| name.clone())?;
    ensure!(output.status.success(), "{name}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documented_functions_are_read_from_the_header() {
        let header = "/**\n * Not berth_this(x).\n */\nconst char *berth_text(int a);\ntypedef void (*berth_fn)(int);\nvoid berth_do(\n";
        assert_eq!(Vec::from_iter(documented(header)), ["berth_do", "berth_text", "ggml_backend_init", "ggml_backend_score"]);
    }
}
