//! `cargo xtask dist`: Berth as it is installed: libraries, header, CMake and pkg-config files, the command, manual pages, licences. What is
//! made here is relocatable: no file of it holds a path of this machine.
//!
//! This file says what belongs to it; how a file gets to its place is `install.rs`.

mod archive;
mod build;
mod install;
mod library;
mod licences;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use install::{Entry, What};
#[cfg(test)]
pub(crate) use library::documented;

use crate::shell;

/// Build what is installed, and install it or pack it.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Install below this directory instead of target/dist; with $DESTDIR set, below that. Existing files are replaced.
    #[arg(long, value_name = "DIR")]
    prefix: Option<PathBuf>,
}

/// Version of what is shipped.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// What is installed, a path in each line: what removes it reads.
const LIST: &str = "share/doc/berth/FILES.txt";

pub(crate) fn run(args: &Args) -> Result<()> {
    let given = args.prefix.as_deref().map(|prefix| staged(prefix, std::env::var_os("DESTDIR"))).transpose()?;
    // A prefix that cannot be had is told before anything is built.
    if let Some(prefix) = &given {
        install::check_prefix(prefix)?;
    }
    let target = ffi_tests::target_dir().context("this program lies in no target directory")?;
    let library = build::shipped(&target)?;
    let work = tempfile::tempdir()?;
    let entries = entries(&library, work.path())?;
    let name = format!("berth-{VERSION}-{}-linux-gnu", std::env::consts::ARCH);
    let prefix = match &given {
        Some(prefix) => prefix.clone(),
        None => target.join("dist").join(&name),
    };
    let prefix = install::install(&prefix, &entries)?;
    println!("installed {} files below {}", entries.len(), prefix.display());
    if args.prefix.is_none() {
        let file = prefix.with_file_name(format!("{name}.tar.gz"));
        archive::write(&file, &name, &entries)?;
        println!("wrote {}", file.display());
    }
    println!("needs {}", library::oldest_libc(&library)?);
    Ok(())
}

/// The prefix below `$DESTDIR`, where packagers gather what is installed elsewhere later. No file holds the prefix, so both are the same to Berth.
fn staged(prefix: &Path, destdir: Option<OsString>) -> Result<PathBuf> {
    let Some(destdir) = destdir.filter(|dir| !dir.is_empty() && !prefix.as_os_str().is_empty()) else { return Ok(prefix.to_owned()) };
    let prefix = std::path::absolute(prefix).with_context(|| prefix.display().to_string())?;
    Ok(Path::new(&destdir).join(prefix.strip_prefix("/")?))
}

/// Everything that is installed, in the order of its path.
fn entries(library: &Path, work: &Path) -> Result<Vec<Entry>> {
    let major = VERSION.split('.').next().unwrap_or("0");
    let read = |path: &Path| std::fs::read(path).with_context(|| path.display().to_string());
    let root = |path: &str| read(&shell::root().join(path));
    let file = |path: &str, bytes: Vec<u8>| Entry { path: path.into(), what: What::File(bytes) };
    let filled = |path: &str| -> Result<Vec<u8>> { Ok(fill(&String::from_utf8(root(path)?)?, major)?.into_bytes()) };

    let symbols = library::documented(&std::fs::read_to_string(shell::root().join("include/berth.h"))?);
    let program = library.with_file_name("berth");
    let mut all = vec![
        Entry { path: "bin/berth".into(), what: What::Program(library::stripped(&program, work)?) },
        file("include/berth.h", root("include/berth.h")?),
        Entry { path: format!("lib/libberth.so.{VERSION}").into(), what: What::File(library::stripped(library, work)?) },
        Entry { path: format!("lib/libberth.so.{major}").into(), what: What::Link(format!("libberth.so.{VERSION}").into()) },
        Entry { path: "lib/libberth.so".into(), what: What::Link(format!("libberth.so.{major}").into()) },
        file("lib/libberth.a", library::one_object(&library.with_file_name("libberth.a"), &symbols, work)?),
        file("lib/cmake/berth/berth-config.cmake", filled("cmake/berth-config.cmake.in")?),
        file("lib/cmake/berth/berth-config-version.cmake", filled("cmake/berth-config-version.cmake.in")?),
        file("lib/pkgconfig/berth.pc", filled("cmake/berth.pc.in")?),
        file("lib/pkgconfig/berth-static.pc", filled("cmake/berth-static.pc.in")?),
        file("share/doc/berth/THIRD-PARTY-LICENCES.txt", licences::text()?.into_bytes()),
    ];
    for name in ["berth-llama.cmake", "berth-llama.c", "berth-llama.h"] {
        all.push(file(&format!("lib/cmake/berth/{name}"), root(&format!("cmake/{name}"))?));
    }
    for name in ["LICENSE-MIT", "LICENSE-APACHE", "README.md", "CHANGELOG.md"] {
        all.push(file(&format!("share/doc/berth/{name}"), root(name)?));
    }
    for (name, page) in library::manual(&program, work)? {
        all.push(file(&format!("share/man/man1/{name}"), page));
    }
    all.sort_by(|a, b| a.path.cmp(&b.path));
    let list: Vec<String> = all.iter().map(|e| e.path.display().to_string()).chain([LIST.to_owned()]).collect();
    all.push(file(LIST, (list.join("\n") + "\n").into_bytes()));
    Ok(all)
}

/// A template with its variables, `@NAME@`, in place.
fn fill(template: &str, major: &str) -> Result<String> {
    let mut libraries = library::native_static_libs()?;
    libraries.dedup();
    // Compilers link the unwinder by themselves, as a shared library or, for a program that has none (-static), not. Naming it rules that out.
    libraries.retain(|l| l != "gcc_s");
    let flags: Vec<String> = libraries.iter().map(|l| format!("-l{l}")).collect();
    let text = template
        .replace("@VERSION@", VERSION)
        .replace("@MAJOR@", major)
        .replace("@STATIC_LIBRARIES@", &libraries.join(";"))
        .replace("@STATIC_FLAGS@", &flags.join(" "));
    // CMake's own variables are `@` too, in files that it configures; none of these is one.
    ensure!(!text.contains('@'), "a variable of the template has no value:\n{text}");
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_staged_below_destdir_where_that_is_set() {
        let staged = |prefix: &str, destdir: Option<&str>| staged(Path::new(prefix), destdir.map(OsString::from)).unwrap();
        assert_eq!(staged("/usr", Some("/tmp/a b")), Path::new("/tmp/a b/usr"));
        assert_eq!(staged("/usr", Some("")), Path::new("/usr"));
        assert_eq!(staged("here", None), Path::new("here"));
        let here = std::env::current_dir().unwrap();
        assert_eq!(staged("here", Some("/d")), Path::new("/d").join(here.strip_prefix("/").unwrap()).join("here"));
    }
}
