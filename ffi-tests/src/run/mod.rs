//! Runs a program for a test: clean environment, no stdin, everything captured, killed when its time is up.

mod cgroup;
mod server;
mod text;

use std::io::Read;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

pub use cgroup::Cgroup;
pub use server::{Completion, Server};
pub use text::{Generation, Options, agree, common_prefix, greedy_text, until_whole};

/// The prefixes of variables that change what Berth, ggml or llama.cpp do.
const PREFIXES: [&str; 3] = ["BERTH_", "GGML_", "LLAMA_"];

/// Removes every `BERTH_*`, `GGML_*` and `LLAMA_*` of this process from the command's environment. Set what the test needs afterwards.
pub fn clean_env(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|n| PREFIXES.iter().any(|p| n.starts_with(p))) {
            command.env_remove(name);
        }
    }
}

/// How a program ended and what it wrote.
#[derive(Clone, Debug)]
pub struct Output {
    /// Its exit status; `None` if it was killed because its time was up.
    pub status: Option<ExitStatus>,
    /// Its standard output, with invalid UTF-8 replaced.
    pub stdout: String,
    /// Its standard error, likewise.
    pub stderr: String,
    /// How long it ran.
    pub took: Duration,
}

impl Output {
    /// Whether it ended by itself, with status 0.
    pub fn success(&self) -> bool {
        self.status.is_some_and(|s| s.success())
    }

    /// Itself if it succeeded, else an error with the end of what it wrote.
    pub fn checked(self, what: &str) -> Result<Output> {
        let how = self.status.map_or_else(|| format!("was killed after {} s", self.took.as_secs()), |s| s.to_string());
        ensure!(
            self.success(),
            "{what}: {how}\n--- stdout\n{}\n--- stderr\n{}",
            last_lines(&self.stdout, 10),
            last_lines(&self.stderr, 30)
        );
        Ok(self)
    }
}

/// Runs the command to its end, or kills it at `timeout`.
pub fn run(mut command: Command, timeout: Duration) -> Result<Output> {
    let start = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {}", command.get_program().display()))?;
    let stdout = drain(child.stdout.take().context("no stdout")?);
    let stderr = drain(child.stderr.take().context("no stderr")?);
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        if start.elapsed() > timeout {
            child.kill()?;
            child.wait()?;
            break None;
        }
        thread::sleep(Duration::from_millis(10));
    };
    let took = start.elapsed();
    let text = |t: thread::JoinHandle<Vec<u8>>| t.join().map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default();
    Ok(Output { status, stdout: text(stdout), stderr: text(stderr), took })
}

/// Reads a pipe to its end on a thread of its own, so that a talkative program never blocks.
fn drain(mut pipe: impl Read + Send + 'static) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // An error here is the end of the pipe: what came before it is the output.
        let _ = pipe.read_to_end(&mut bytes);
        bytes
    })
}

/// The last `n` lines of a text.
pub fn last_lines(text: &str, n: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(n)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_program_that_takes_too_long_is_killed_and_its_output_kept() {
        let out = run(sh("echo before; exec sleep 60"), Duration::from_millis(300)).unwrap();
        assert!(out.status.is_none() && out.took < Duration::from_secs(20));
        assert_eq!(out.stdout, "before\n");
        assert!(out.checked("sleep").unwrap_err().to_string().contains("was killed"));
    }

    #[test]
    fn much_output_on_both_pipes_does_not_block() {
        let out =
            run(sh("i=0; while [ $i -lt 20000 ]; do echo 0123456789; echo 0123456789 >&2; i=$((i+1)); done"), Duration::from_secs(60))
                .unwrap();
        assert!(out.success() && out.stdout.len() == 220_000 && out.stderr.len() == 220_000);
    }

    #[test]
    fn a_failure_shows_the_end_of_stderr() {
        let out = run(sh("echo why >&2; exit 3"), Duration::from_secs(10)).unwrap();
        assert!(out.checked("it").unwrap_err().to_string().contains("why"));
    }
}
