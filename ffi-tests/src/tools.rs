//! The programs of other projects that provisioning calls, and the one-line hint for each that is missing.

use std::fmt;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

/// A program, the names it may have, and the Debian package that brings it.
pub struct Tool {
    /// What the hint calls it, and the first name looked for.
    pub name: &'static str,
    /// Other names that do as well.
    pub other_names: &'static [&'static str],
    /// The package to install.
    pub apt: &'static str,
    /// What it is needed for.
    pub needed_for: &'static str,
    /// Whether some supported systems have no such package (Ubuntu's chromium is a snap): then it is installed by itself, and may fail to be.
    /// The tests that need it are skipped then; in CI, where a skip is a failure, they fail.
    pub apart: bool,
}

/// Every program that setup, the tests or the demo call.
pub const TOOLS: &[Tool] = &[
    Tool { name: "cc", other_names: &["gcc", "clang"], apt: "gcc", needed_for: "C harnesses and host builds", apart: false },
    Tool { name: "c++", other_names: &["g++", "clang++"], apt: "g++", needed_for: "host builds", apart: false },
    Tool { name: "nm", other_names: &["llvm-nm"], apt: "binutils", needed_for: "cargo xtask dist and profile", apart: false },
    Tool { name: "clang", other_names: &[], apt: "clang", needed_for: "the C examples with a second compiler", apart: false },
    Tool { name: "make", other_names: &["gmake"], apt: "make", needed_for: "the C examples", apart: false },
    Tool { name: "setpriv", other_names: &[], apt: "util-linux", needed_for: "tests that give up rights, limits or mounts", apart: false },
    Tool { name: "ip", other_names: &[], apt: "iproute2", needed_for: "two hosts on one machine", apart: false },
    Tool { name: "pkg-config", other_names: &["pkgconf"], apt: "pkg-config", needed_for: "the tests of what is installed", apart: false },
    Tool { name: "abidiff", other_names: &[], apt: "abigail-tools", needed_for: "comparing the ABI with the last release", apart: true },
    Tool { name: "cmake", other_names: &[], apt: "cmake", needed_for: "host builds", apart: false },
    Tool { name: "ninja", other_names: &["ninja-build"], apt: "ninja-build", needed_for: "host builds", apart: false },
    Tool { name: "npm", other_names: &[], apt: "npm", needed_for: "the node-llama-cpp hosts", apart: false },
    Tool { name: "python3", other_names: &[], apt: "python3", needed_for: "ctypes tests", apart: false },
    Tool { name: "pip", other_names: &["pip3"], apt: "python3-pip", needed_for: "hosts and the model from PyPI", apart: false },
    Tool { name: "valgrind", other_names: &[], apt: "valgrind", needed_for: "leak tests", apart: false },
    Tool {
        name: "chromium",
        other_names: &["chromium-browser", "google-chrome", "google-chrome-stable"],
        apt: "chromium",
        needed_for: "the page of berth explain",
        apart: true,
    },
    Tool { name: "ccache", other_names: &[], apt: "ccache", needed_for: "cheap host rebuilds (optional)", apart: false },
];

/// Something outside the project that is missing (a tool, a registry): grounds for a skip on a developer's machine, not for a wrong result.
#[derive(Debug)]
pub struct Missing(pub String);

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Missing {}

/// Whether `error` says that something outside the project is missing.
pub fn is_missing(error: &anyhow::Error) -> bool {
    error.chain().any(|e| e.is::<Missing>())
}

/// The executable file called `name` on `PATH`.
pub fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|dir| dir.join(name))
        .find(|file| file.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0))
}

impl Tool {
    /// Where it is, if it is installed.
    pub fn find(&self) -> Option<PathBuf> {
        std::iter::once(&self.name).chain(self.other_names).find_map(|name| on_path(name))
    }

    /// The one line for the user: what is missing and how to get it.
    pub fn hint(&self) -> String {
        format!("{} is missing: apt-get install {}   (for {})", self.name, self.apt, self.needed_for)
    }
}

/// A command for the tool of that name in [`TOOLS`], or its hint as a [`Missing`].
pub fn command(name: &str) -> Result<Command, Missing> {
    let tool = TOOLS.iter().find(|t| t.name == name).ok_or_else(|| Missing(format!("{name} is not in the table of tools")))?;
    tool.find().map(Command::new).ok_or_else(|| Missing(tool.hint()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_tool_says_how_to_install_it() {
        let tool = Tool { name: "no-such-tool", other_names: &["nor-this"], apt: "no-such-package", needed_for: "nothing", apart: false };
        assert!(tool.find().is_none());
        assert!(tool.hint().starts_with("no-such-tool is missing: apt-get install no-such-package"));
    }

    #[test]
    fn every_tool_named_in_code_is_in_the_table() {
        for name in ["cmake", "ninja", "npm", "pip", "cc", "chromium", "python3"] {
            assert!(TOOLS.iter().any(|t| t.name == name), "{name}");
        }
    }
}
