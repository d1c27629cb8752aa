//! Unmodified hosts: stock ggml and llama.cpp builds by package name, and where their libraries, tools and headers are.
//!
//! [`require`] is for tests, [`get`] for everything else. The first call for a host fetches or builds it into the [cache](crate::cache).

mod provide;
mod table;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::{run, skip, tools};

/// What a host does with Berth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// Loads it.
    Accepted,
    /// Is refused, with one clear line, and goes on without it.
    Refused,
}

/// A host, ready on this machine.
#[derive(Clone, Debug)]
pub struct Host {
    /// Its name in the table, such as `node-3.20.0` or `sdist-dl`.
    pub id: String,
    /// The package it comes from.
    pub package: String,
    /// What its `ggml_version()` says.
    pub ggml_version: &'static str,
    /// What it does with Berth.
    pub api: Expect,
    /// The directory of its shared libraries.
    pub lib_dir: PathBuf,
    /// The directory of its executables, if it has any.
    pub bin_dir: Option<PathBuf>,
    /// ggml's public headers, if the package has them.
    pub include: Option<PathBuf>,
    /// The id of the [`headers`] whose structures this host has (`include` may be absent, these are fetched by themselves).
    pub headers: Option<&'static str>,
}

/// The ids of all hosts, in the order of the table.
pub fn ids() -> Vec<&'static str> {
    table::HOSTS.iter().map(|r| r.id).collect()
}

/// The ids of the hosts that are expected to do that with Berth.
pub fn ids_expected(expect: Expect) -> Vec<&'static str> {
    table::HOSTS.iter().filter(|r| r.expect == expect).map(|r| r.id).collect()
}

/// The host of that id, fetched or built on first use.
///
/// # Errors
///
/// [`tools::is_missing`] tells a missing tool, network or package from a build that failed.
pub fn get(id: &str) -> Result<Host> {
    let row = table::HOSTS.iter().find(|r| r.id == id).with_context(|| format!("no host {id}; there are {}", ids().join(", ")))?;
    host(row)
}

/// The newest version in each registry that is not in the table, fetched or built: what the next line of the table would be. Their ggml's version
/// is known when they run.
///
/// # Errors
///
/// A registry that cannot be asked, and a host that cannot be made, each by itself.
pub fn newest() -> Vec<Result<Host>> {
    let later = |found: Result<Option<table::Row>>| match found {
        Ok(Some(row)) => Some(host(&row)),
        Ok(None) => None,
        Err(error) => Some(Err(error)),
    };
    provide::newest().into_iter().filter_map(later).collect()
}

fn host(row: &table::Row) -> Result<Host> {
    let provided = provide::provide(row).with_context(|| format!("host {}", row.id))?;
    Ok(Host {
        id: row.id.to_owned(),
        package: provided.package,
        ggml_version: row.ggml_version,
        api: row.expect,
        lib_dir: provided.lib_dir,
        bin_dir: provided.bin_dir,
        include: provided.include,
        headers: (row.headers != "none").then_some(row.headers),
    })
}

/// The host of that id, for a test. If a tool or the network is missing: `SKIPPED host <id>: <why>` and `None`, a panic in CI.
///
/// # Panics
///
/// If the host is there to be had and cannot be made, and where [a skip is a failure](skip::strict).
pub fn require(id: &str) -> Option<Host> {
    match get(id) {
        Ok(host) => Some(host),
        Err(error) if tools::is_missing(&error) => {
            skip::skipped(&format!("host {id}"), &error.root_cause().to_string());
            None
        }
        Err(error) => panic!("{error:#}"),
    }
}

impl Host {
    /// A command for one of its executables: clean environment, its libraries found.
    ///
    /// # Panics
    ///
    /// If the host has no executable of that name: the table is wrong, or the test asks the wrong host.
    pub fn command(&self, tool: &str) -> Command {
        let path = self.tool(tool).unwrap_or_else(|| panic!("host {} has no {tool}", self.id));
        let mut command = Command::new(path);
        run::clean_env(&mut command);
        command.env("LD_LIBRARY_PATH", &self.lib_dir);
        command
    }

    /// The path of one of its executables, if it has it.
    pub fn tool(&self, tool: &str) -> Option<PathBuf> {
        self.bin_dir.as_ref().map(|dir| dir.join(tool)).filter(|path| path.is_file())
    }

    /// The path of one of its libraries by its plain name: `ggml-base`, `ggml`, `llama`.
    ///
    /// Real names carry versions in two places (`libggml.b10361.so`, `libggml-base.so.0`). Of several names for one library this is the one
    /// that the others link to (`.so.0`), so that a program that opens it gets no second copy.
    pub fn lib(&self, name: &str) -> Result<PathBuf> {
        let mut found: Vec<(usize, String)> = Vec::new();
        for entry in fs::read_dir(&self.lib_dir).with_context(|| self.lib_dir.display().to_string())? {
            let file = entry?.file_name().to_string_lossy().into_owned();
            if let Some(rank) = library_rank(&file, name) {
                found.push((rank, file));
            }
        }
        found.sort();
        let (_, file) = found.first().with_context(|| format!("host {} has no library {name} in {}", self.id, self.lib_dir.display()))?;
        Ok(self.lib_dir.join(file))
    }
}

/// If `file` is a name of the library `name`, how good a name: 0 with the ABI number, 1 plain, 2 with the full version.
fn library_rank(file: &str, name: &str) -> Option<usize> {
    let rest = file.strip_prefix("lib")?.strip_prefix(name)?;
    let (tag, version) = rest.split_once(".so")?;
    let is_tag =
        tag.is_empty() || tag.strip_prefix(".b").or(tag.strip_prefix(".v")).is_some_and(|t| t.starts_with(|c: char| c.is_ascii_digit()));
    match version.strip_prefix('.') {
        _ if !is_tag => None,
        None => version.is_empty().then_some(1),
        Some(v) if v.bytes().all(|b| b.is_ascii_digit()) => Some(0),
        Some(_) => Some(2),
    }
}

/// The headers of one ggml version, for layout tests.
#[derive(Clone, Debug)]
pub struct Headers {
    /// The id in the table.
    pub id: String,
    /// `GGML_VERSION` of the source they come from.
    pub ggml_version: String,
    /// `ggml/include`.
    pub ggml_include: PathBuf,
    /// `ggml/src`: `ggml-backend-impl.h`, `ggml-impl.h`.
    pub ggml_src: PathBuf,
    /// `include`: `llama.h`.
    pub llama_include: PathBuf,
}

/// The ids of all headers.
pub fn header_ids() -> Vec<&'static str> {
    table::HEADERS.iter().map(|h| h.0).collect()
}

/// The headers of that id.
pub fn headers_of(id: &str) -> Result<Headers> {
    let &(id, version, source) = table::HEADERS.iter().find(|h| h.0 == id).with_context(|| format!("no headers {id}"))?;
    let dir = provide::headers(id, source).with_context(|| format!("headers {id}"))?;
    let headers = Headers {
        id: id.to_owned(),
        ggml_version: version.to_owned(),
        ggml_include: dir.join("ggml/include"),
        ggml_src: dir.join("ggml/src"),
        llama_include: dir.join("include"),
    };
    ensure!(headers.ggml_src.join("ggml-backend-impl.h").is_file(), "{id} has no ggml-backend-impl.h in {}", dir.display());
    Ok(headers)
}

/// All headers, for a test; those that cannot be fetched are skipped as in [`require`].
///
/// # Panics
///
/// As [`require`].
pub fn headers() -> Vec<Headers> {
    let one = |id: &str| match headers_of(id) {
        Ok(headers) => Some(headers),
        Err(error) if tools::is_missing(&error) => {
            skip::skipped(&format!("headers {id}"), &error.root_cause().to_string());
            None
        }
        Err(error) => panic!("{error:#}"),
    };
    header_ids().into_iter().filter_map(one).collect()
}

/// Whether the file holds `text` as a C string: a check without loading it.
pub fn holds_c_string(file: &Path, text: &str) -> Result<bool> {
    let bytes = fs::read(file).with_context(|| file.display().to_string())?;
    let needle = [b"\0", text.as_bytes(), b"\0"].concat();
    Ok(bytes.windows(needle.len()).any(|w| w == needle))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_names_are_ranked_and_near_names_are_not_taken() {
        assert_eq!(library_rank("libggml-base.so.0", "ggml-base"), Some(0));
        assert_eq!(library_rank("libggml-base.so", "ggml-base"), Some(1));
        assert_eq!(library_rank("libggml-base.so.0.20.0", "ggml-base"), Some(2));
        assert_eq!(library_rank("libggml.b7347.so.0", "ggml"), Some(0));
        assert_eq!(library_rank("libggml.v0.5.0.so", "ggml"), Some(1));
        assert_eq!(library_rank("libllama.b10361.so", "llama"), Some(1));
        assert_eq!(library_rank("libllama-common.so", "llama"), None);
        assert_eq!(library_rank("libggml-base.so", "ggml"), None);
        assert_eq!(library_rank("libggml.so.0.bak", "ggml-base"), None);
    }

    #[test]
    fn an_unknown_host_is_an_error_that_lists_the_known_ones() {
        assert!(get("no-such-host").unwrap_err().to_string().contains("sdist-dl"));
    }
}
