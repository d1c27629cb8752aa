//! The hosts and headers that Berth is tested against: one line each.
//!
//! A new host is one line in [`HOSTS`]. A line names packages and versions only; how they become a directory is `provide.rs`.

use super::Expect::{self, Accepted, Refused};

/// A real host.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) id: &'static str,
    pub(super) ggml_version: &'static str,
    pub(super) expect: Expect,
    /// The [`HEADERS`] whose C structures this host has.
    pub(super) headers: &'static str,
    pub(super) source: Source,
}

/// Where a host comes from.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// Prebuilt libraries of `@node-llama-cpp/linux-x64`, of the version in the id.
    Node,
    /// The prebuilt `llama-server` wheel with a Vulkan backend.
    Skulk { version: &'static str },
    /// The llama.cpp of the `llama-cpp-python` source distribution, built here.
    Sdist { version: &'static str, link: Link, targets: &'static [&'static str] },
    /// The llama.cpp of a `llama-cpp-sys-2` crate, built here: libraries only, the crate leaves the tools out.
    Sys2 { version: &'static str },
}

/// How a host built here holds its backends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Link {
    /// Shared libraries; the CPU backend is loaded at run time (`GGML_BACKEND_DL`).
    Dl,
    /// Shared libraries, linked.
    Shared,
    /// One executable that exports nothing.
    Static,
}

pub(super) const ALL: &[&str] = &[
    "llama-server",
    "llama-bench",
    "llama-completion",
    "llama-perplexity",
    "llama-imatrix",
    "llama-eval-callback",
    "test-backend-ops",
    "test-llama-archs",
    "ggml-rpc-server",
];
const FEW: &[&str] = &["llama-server", "llama-bench", "llama-completion", "test-backend-ops"];
const RPC: &[&str] = &["ggml-rpc-server"];

pub(super) const HOSTS: &[Row] = &[
    // b6431: GGML_BACKEND_API_VERSION 1, from before the first supported layout.
    node("node-3.13.0", "0.0.1", Refused, "none"),
    node("node-3.14.5", "0.9.4", Accepted, "sys2-0.9.4"),
    node("node-3.18.1", "0.9.7", Accepted, "sys2-0.9.7"),
    node("node-3.20.0", "0.19.0", Accepted, "sys2-0.19.0"),
    node("node-3.22.1", "0.25.1", Accepted, "sdist-0.25.3"),
    Row { id: "skulk", ggml_version: "0.20.0", expect: Accepted, headers: "none", source: Source::Skulk { version: "0.10434.0" } },
    sdist("sdist-dl", Accepted, Link::Dl, ALL),
    sdist("sdist-nodl", Accepted, Link::Shared, FEW),
    // Its executables export no ggml symbol, so a plug-in has nothing to stand on.
    sdist("sdist-static", Refused, Link::Static, RPC),
    Row { id: "sys2-0.26", ggml_version: "0.26.0", expect: Accepted, headers: "sys2-0.26.0", source: Source::Sys2 { version: "0.1.161" } },
];

const fn node(id: &'static str, ggml_version: &'static str, expect: Expect, headers: &'static str) -> Row {
    Row { id, ggml_version, expect, headers, source: Source::Node }
}

const fn sdist(id: &'static str, expect: Expect, link: Link, targets: &'static [&'static str]) -> Row {
    Row { id, ggml_version: "0.25.3", expect, headers: "sdist-0.25.3", source: Source::Sdist { version: SDIST, link, targets } }
}

/// The version of `llama-cpp-python` that everything called `sdist` is.
pub(super) const SDIST: &str = "0.3.36";

/// Headers only, for layout tests: `(id, ggml version, where from)`.
pub(super) const HEADERS: &[(&str, &str, HeaderSource)] = &[
    ("sys2-0.9.4", "0.9.4", HeaderSource::Sys2("0.1.131")),
    ("sys2-0.9.5", "0.9.5", HeaderSource::Sys2("0.1.134")),
    ("sys2-0.9.7", "0.9.7", HeaderSource::Sys2("0.1.139")),
    // Both say 0.9.11: `set_tensor_2d` came into the middle of the buffer vtable without a new version number. What tells them apart
    // from outside is the exported `ggml_backend_tensor_set_2d`.
    ("sys2-0.9.11-before-2d", "0.9.11", HeaderSource::Sys2("0.1.143")),
    ("sys2-0.9.11", "0.9.11", HeaderSource::Sys2("0.1.144")),
    ("sys2-0.13.1", "0.13.1", HeaderSource::Sys2("0.1.149")),
    ("sys2-0.19.0", "0.19.0", HeaderSource::Sys2("0.1.156")),
    ("sys2-0.24.0", "0.24.0", HeaderSource::Sys2("0.1.157")),
    ("sdist-0.25.3", "0.25.3", HeaderSource::Sdist(SDIST)),
    ("sys2-0.26.0", "0.26.0", HeaderSource::Sys2("0.1.161")),
];

/// The package that headers come from.
#[derive(Clone, Copy, Debug)]
pub(super) enum HeaderSource {
    Sys2(&'static str),
    Sdist(&'static str),
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn ids_are_unique_and_fit_for_a_path() {
        let ids: Vec<&str> = HOSTS.iter().map(|r| r.id).collect();
        assert_eq!(ids.iter().collect::<HashSet<_>>().len(), ids.len());
        assert_eq!(HEADERS.iter().map(|h| h.0).collect::<HashSet<_>>().len(), HEADERS.len());
        for id in ids.iter().copied().chain(HEADERS.iter().map(|h| h.0)) {
            assert!(id.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-.".contains(&b)), "{id}");
        }
    }

    #[test]
    fn a_host_names_headers_that_exist() {
        for row in HOSTS.iter().filter(|r| r.headers != "none") {
            assert!(HEADERS.iter().any(|h| h.0 == row.headers), "{}: {}", row.id, row.headers);
        }
    }
}
