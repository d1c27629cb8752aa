//! `cargo xtask abi`: whether programs that were built with an older `berth.h` still work with this library.
//!
//! Two headers are compared, not two libraries: what is in them is all that is promised, and rustc's debug information says nothing of C. From each
//! a library of empty functions is compiled, and `abidiff` compares the two. Allowed are new functions, new numbers, and new fields at the end of
//! structs that begin with `struct_size` (docs/releasing.md).

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use ffi_tests::{skip, tools};

use crate::shell;

/// The header of before the first release.
const BASELINE: &str = "ffi-tests/abi/berth-0.1.h";
const HEADER: &str = "include/berth.h";

/// Compare the header with that of the last release.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A tag, or a header's path [default: the last tag, or ffi-tests/abi/berth-0.1.h if there is none].
    #[arg(long)]
    against: Option<String>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let (name, old) = match &args.against {
        Some(path) if Path::new(path).is_file() => (path.clone(), fs::read_to_string(path)?),
        Some(tag) => (tag.clone(), of_tag(tag)?),
        None => last()?,
    };
    let new = fs::read_to_string(shell::root().join(HEADER))?;
    compare(&old, &new).with_context(|| format!("{HEADER} against {name}"))?;
    println!("{HEADER} keeps the ABI of {name}");
    Ok(())
}

/// The check of `cargo xtask test`. A skip if a tool is missing.
pub(crate) fn check() -> Result<()> {
    match run(&Args { against: None }) {
        Err(error) if tools::is_missing(&error) => {
            skip::skipped("the ABI", &error.root_cause().to_string());
            Ok(())
        }
        done => done,
    }
}

/// Name and header of the last release.
fn last() -> Result<(String, String)> {
    let mut git = Command::new("git");
    git.args(["describe", "--tags", "--abbrev=0", "--match", "v[0-9]*"]).current_dir(shell::root());
    // A source archive has no git, and a new repository no tag.
    match git.output() {
        Ok(output) if output.status.success() => {
            let tag = String::from_utf8_lossy(&output.stdout).trim().to_owned();
            Ok((tag.clone(), of_tag(&tag)?))
        }
        _ => Ok((BASELINE.to_owned(), fs::read_to_string(shell::root().join(BASELINE)).context(BASELINE)?)),
    }
}

fn of_tag(tag: &str) -> Result<String> {
    let mut git = Command::new("git");
    let output = git.arg("show").arg(format!("{tag}:{HEADER}")).current_dir(shell::root()).output().context("git")?;
    ensure!(output.status.success(), "no {HEADER} in {tag}: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(String::from_utf8(output.stdout)?)
}

/// Fails, with what `abidiff` says, if a program built with the old header may not work with the new one.
fn compare(old: &str, new: &str) -> Result<()> {
    let mut abidiff = tools::command("abidiff")?;
    let dir = tempfile::tempdir()?;
    // What a struct that says its size has grown by is not compared: programs that do not know it do not have it.
    let new = shrunk(&without_comments(new), &growing(old))?;
    abidiff.arg("--no-added-syms").arg(compile(&without_comments(old), dir.path(), "old")?).arg(compile(&new, dir.path(), "new")?);
    let output = abidiff.output().context("abidiff")?;
    match output.status.code() {
        Some(0) => Ok(()),
        // 4: something changed, 8: incompatibly.
        Some(code) if code & 3 == 0 => bail!("the ABI is not what it was:\n{}", String::from_utf8_lossy(&output.stdout)),
        _ => bail!("abidiff: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr)),
    }
}

/// A library with everything that the header declares.
fn compile(header: &str, dir: &Path, name: &str) -> Result<PathBuf> {
    let (source, library) = (dir.join(format!("{name}.c")), dir.join(format!("lib{name}.so")));
    fs::write(&source, stub(header)?)?;
    let mut cc = tools::command("cc")?;
    cc.args(["-std=c11", "-g", "-O0", "-fPIC", "-shared", "-o"]).arg(&library).arg(&source);
    let output = cc.output().context("cc")?;
    ensure!(output.status.success(), "the header does not compile:\n{}", String::from_utf8_lossy(&output.stderr));
    Ok(library)
}

/// The header, an empty body for each of its functions, a variable of every enum, and an array as long as every constant is large: numbers leave no
/// other trace in debug information.
fn stub(header: &str) -> Result<String> {
    let mut text = header.to_owned();
    let code = header;
    let start = code.find("extern \"C\" {").context("no functions")?;
    for declaration in code[start..].split(';') {
        let Some(open) = declaration.find('(') else { continue };
        let from = declaration[..open].rfind("\n\n").unwrap_or(0);
        let head = declaration[from..].lines().filter(|l| !l.starts_with('#') && !l.starts_with("extern")).collect::<Vec<_>>().join(" ");
        if head.contains("berth_") {
            writeln!(text, "{} {{ __builtin_trap(); }}", head.trim())?;
        }
    }
    for line in code.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["enum", name, "{"] => writeln!(text, "enum {name} berth_abi_of_{name};")?,
            ["#define", name, value] if name != "BERTH_H" => writeln!(text, "char berth_abi_of_{name}[1 + {value}];")?,
            _ => {}
        }
    }
    Ok(text)
}

/// Structs that say their size, and so may grow at their end, and how many fields they have.
fn growing(header: &str) -> BTreeMap<String, usize> {
    let code = without_comments(header);
    let structs = code.split("\nstruct ").skip(1).filter_map(|rest| rest.split_once(" {\n"));
    let bodies = structs.filter_map(|(name, rest)| Some((name, rest.split_once("\n};")?.0)));
    let sized = bodies.filter(|(name, body)| !name.contains(char::is_whitespace) && body.trim_start().starts_with("size_t struct_size;"));
    sized.map(|(name, body)| (name.to_owned(), body.matches(';').count())).collect()
}

/// The header with no more fields in these structs than that.
fn shrunk(code: &str, fields: &BTreeMap<String, usize>) -> Result<String> {
    let mut text = code.to_owned();
    for (name, count) in fields {
        let start = format!("\nstruct {name} {{\n");
        // One that is gone is abidiff's to find.
        let Some(at) = text.find(&start).map(|at| at + start.len()) else { continue };
        let end = at + text[at..].find("\n};").with_context(|| format!("struct {name} has no end"))?;
        if let Some((last, _)) = text[at..end].match_indices(';').nth(count.saturating_sub(1)) {
            text.replace_range(at + last + 1..end, "");
        }
    }
    Ok(text)
}

fn without_comments(header: &str) -> String {
    header.split("/*").enumerate().map(|(i, part)| if i == 0 { part } else { part.split_once("*/").map_or("", |(_, rest)| rest) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn current() -> String {
        fs::read_to_string(shell::root().join(HEADER)).unwrap()
    }

    /// `None` after a skip.
    fn difference(change: impl FnOnce(String) -> String) -> Option<Result<(), String>> {
        let old = current();
        let new = change(old.clone());
        assert_ne!(old, new, "nothing was changed");
        match compare(&old, &new) {
            Err(error) if tools::is_missing(&error) => {
                skip::skipped("the ABI", &error.root_cause().to_string());
                None
            }
            done => Some(done.map_err(|e| format!("{e:#}"))),
        }
    }

    fn replaced(old: &'static str, new: &'static str) -> impl FnOnce(String) -> String {
        move |text| {
            assert_eq!(text.matches(old).count(), 1, "{old}");
            text.replace(old, new)
        }
    }

    #[test]
    fn what_is_only_added_is_allowed() {
        let all = |text: String| {
            let text = replaced(
                "void berth_pool_free(struct berth_pool *pool);",
                "void berth_pool_free(struct berth_pool *pool);\n\nint berth_new(int a);",
            )(text);
            let text = replaced("BERTH_STATUS_BAD_FILE = 12,", "BERTH_STATUS_BAD_FILE = 12,\n    BERTH_STATUS_NEW = 13,")(text);
            replaced("    uint32_t offload_expert_hint;\n", "    uint32_t offload_expert_hint;\n    uint64_t later;\n")(text)
        };
        if let Some(done) = difference(all) {
            assert_eq!(done, Ok(()));
        }
    }

    #[test]
    fn what_breaks_programs_is_found_and_named() {
        let refused = |change: Box<dyn FnOnce(String) -> String>, named: &str| match difference(change) {
            Some(Err(text)) => assert!(text.contains("the ABI is not what it was") && text.contains(named), "{named}: {text}"),
            Some(Ok(())) => panic!("{named}: not found"),
            None => {}
        };
        refused(Box::new(replaced("void berth_pool_free(struct berth_pool *pool);", "")), "berth_pool_free");
        refused(Box::new(replaced("size_t berth_pool_count(const struct", "int berth_pool_count(const struct")), "berth_pool_count");
        refused(
            Box::new(replaced(
                "    bool buft_overridden;\n    /**\n     * Whether the choice was page-locked memory, and became the mapping because there is one.\n     */\n    bool downgraded;\n    /**\n     * Why, as a stable code. Constant.\n     */\n    const char *reason;\n    /**\n     * Why, as a sentence. Constant.\n     */\n    const char *reason_text;\n    /**\n     * Batches",
                "    int buft_overridden;\n    bool downgraded;\n    const char *reason;\n    const char *reason_text;\n    /**\n     * Batches",
            )),
            "berth_decision",
        );
        refused(
            Box::new(replaced("BERTH_STATUS_BAD_FILE = 12,", "BERTH_STATUS_BAD_FILE = 11,\n    BERTH_STATUS_OTHER = 12,")),
            "BERTH_STATUS_BAD_FILE",
        );
        refused(Box::new(replaced("#define BERTH_TENSOR_SKIP 4", "#define BERTH_TENSOR_SKIP 32")), "BERTH_TENSOR_SKIP");
        // A field that is gone, though another one takes its place.
        refused(Box::new(replaced("    uint32_t offload_min_batch;\n    /**\n     * Hint", "    /**\n     * Hint")), "berth_decision");
        // A struct without `struct_size` lies inside others.
        refused(Box::new(replaced("    size_t bias_stride;\n", "    size_t bias_stride;\n    size_t later;\n")), "berth_moe_weights");
    }

    #[test]
    fn every_function_of_the_header_is_in_the_stub() {
        let text = stub(&without_comments(&current())).unwrap();
        let documented = crate::dist::documented(&current());
        for name in documented.iter().filter(|n| n.starts_with("berth_")) {
            assert!(text.lines().any(|l| l.contains(&format!("{name}(")) && l.ends_with("{ __builtin_trap(); }")), "{name}");
        }
        assert!(growing(&current())["berth_decision"] == 10 && !growing(&current()).contains_key("berth_moe_weights"));
    }
}
