//! C programs of `ffi-tests/c` and `c-examples`: compiled against a host's libraries, run plainly or under valgrind.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use ffi_tests::run::{self, Output};

/// A compiler call: options in order, then one output.
pub(crate) struct Compile {
    command: Command,
    what: String,
}

impl Compile {
    /// With this compiler, C11 and every warning an error.
    pub(crate) fn c(compiler: &str) -> Compile {
        Compile::with(compiler, &["-std=c11", "-D_GNU_SOURCE", "-g", "-O1", "-Wall", "-Wextra", "-Werror"])
    }

    /// With this compiler and these options only.
    pub(crate) fn with(compiler: &str, options: &[&str]) -> Compile {
        let mut command = Command::new(compiler);
        command.args(options);
        Compile { command, what: compiler.to_owned() }
    }

    /// One more argument.
    pub(crate) fn arg(mut self, arg: impl AsRef<OsStr>) -> Compile {
        self.command.arg(arg);
        self
    }

    /// More arguments.
    pub(crate) fn args(mut self, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Compile {
        self.command.args(args);
        self
    }

    /// Compiles to `output`, and gives that back.
    pub(crate) fn to(mut self, output: PathBuf) -> PathBuf {
        self.command.arg("-o").arg(&output);
        run::run(self.command, Duration::from_secs(120)).and_then(|o| o.checked(&self.what)).unwrap_or_else(|e| panic!("{e:#}"));
        output
    }
}

/// A source file of `ffi-tests/c`.
pub(crate) fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("c").join(name)
}

/// The program, to be run under valgrind, where a leak or an invalid access is exit status 99. `None` and a skip where there is no valgrind.
pub(crate) fn valgrind(program: &Path) -> Option<Command> {
    if ffi_tests::tools::on_path("valgrind").is_none() {
        ffi_tests::skip::skipped(&format!("valgrind on {}", program.display()), "valgrind is not installed");
        return None;
    }
    let mut command = plain(OsStr::new("valgrind"));
    command.args(["-q", "--error-exitcode=99", "--leak-check=full", "--show-leak-kinds=definite,indirect"]);
    command.args(["--errors-for-leak-kinds=definite,indirect", "--num-callers=30", "--"]).arg(program);
    Some(command)
}

/// The program, to be run in a clean environment.
pub(crate) fn plain(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    run::clean_env(&mut command);
    command
}

/// Runs a peer; it must end with status 0. Its whole output is shown if it does not.
pub(crate) fn succeeds(command: Command) -> Output {
    let what = format!("{command:?}");
    let output = run::run(command, Duration::from_secs(300)).unwrap_or_else(|e| panic!("{e:#}"));
    assert!(output.success(), "{what}: {:?}\n--- stdout\n{}\n--- stderr\n{}", output.status, output.stdout, output.stderr);
    output
}
