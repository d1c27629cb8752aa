//! Greedy text from `llama-completion`: the same input gives the same text, so two runs can be compared.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::{Output, run};
use crate::hosts::Host;

/// What to generate and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// The prompt.
    pub prompt: String,
    /// Tokens to generate; an end of text does not stop before.
    pub tokens: u32,
    /// `-t`: fixed, so that sums are made in one order.
    pub threads: u32,
    /// The context length.
    pub context: u32,
    /// The plug-in (`GGML_BACKEND_PATH`), if any.
    pub plugin: Option<PathBuf>,
    /// The rules (`-ot`), if any.
    pub rules: Option<String>,
    /// More arguments.
    pub args: Vec<String>,
    /// More environment.
    pub env: Vec<(String, String)>,
    /// When to give up.
    pub timeout: Duration,
    /// Whether the host may repack weights, as it does by default for Q4_K, Q4_0 and others that no rule names. Repacked blocks are multiplied by
    /// other kernels, which round in another order: after some tokens the text is another one, Berth or not. Off here, so that a comparison
    /// is one of places and not of kernels.
    pub repack: bool,
    /// Whether idle OpenMP threads spin, as they do by default. Off here: tests run side by side, and spinning threads of several programs on a
    /// few cores make each of them many times slower. On for a measurement.
    pub spin: bool,
    /// The group that it runs in: [`super::Cgroup::procs`].
    pub cgroup: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            prompt: "The capital of France is".into(),
            tokens: 24,
            threads: 2,
            context: 512,
            plugin: None,
            rules: None,
            args: Vec::new(),
            env: Vec::new(),
            timeout: Duration::from_secs(300),
            repack: false,
            spin: false,
            cgroup: None,
        }
    }
}

impl Options {
    /// Adds what is common to all tools: model, threads, context, plug-in, rules, further arguments and environment.
    pub(super) fn apply(&self, command: &mut Command, model: &Path) {
        let threads = self.threads.to_string();
        command.arg("-m").arg(model).args(["-t", &threads, "-tb", &threads, "-c", &self.context.to_string()]);
        if let Some(plugin) = &self.plugin {
            command.env("GGML_BACKEND_PATH", plugin);
        }
        if let Some(rules) = &self.rules {
            command.args(["-ot", rules]);
        }
        if !self.repack {
            command.arg("--no-repack");
        }
        if !self.spin {
            command.env("OMP_WAIT_POLICY", "passive");
        }
        command.args(&self.args).envs(self.env.iter().map(|(k, v)| (k, v)));
    }

    /// The command, in the group that was named.
    pub(super) fn grouped(&self, command: Command) -> Command {
        match &self.cgroup {
            Some(procs) => super::cgroup::join(command, procs),
            None => command,
        }
    }

    /// With Berth loaded from `library` and these `-ot` rules (none: `""`).
    pub fn with_berth(mut self, library: &Path, rules: &str) -> Self {
        self.plugin = Some(library.to_owned());
        self.rules = (!rules.is_empty()).then(|| rules.to_owned());
        self
    }

    /// With more arguments.
    pub fn arg(mut self, args: &[&str]) -> Self {
        self.args.extend(args.iter().map(|&a| a.to_owned()));
        self
    }

    /// With a variable set.
    pub fn env(mut self, name: &str, value: impl Into<String>) -> Self {
        self.env.push((name.to_owned(), value.into()));
        self
    }
}

/// A text and how it was made.
#[derive(Clone, Debug)]
pub struct Generation {
    /// What was generated, without the prompt. The program may lose its last bytes: compare with [`agree`].
    pub text: String,
    /// Tokens per second of the prompt, if the program said so.
    pub prompt_tokens_per_second: Option<f64>,
    /// Tokens per second of the generation, likewise.
    pub tokens_per_second: Option<f64>,
    /// Everything the program wrote to stderr.
    pub stderr: String,
}

/// Greedy text of `model` in `llama-completion` of `host`.
pub fn greedy_text(host: &Host, model: &Path, options: &Options) -> Result<Generation> {
    let mut command = host.command("llama-completion");
    command.args(["-p", &options.prompt, "-n", &options.tokens.to_string()]);
    command.args(["--temp", "0", "--seed", "1", "--ignore-eos", "-no-cnv", "--no-display-prompt", "--perf"]);
    options.apply(&mut command, model);
    let what = format!("llama-completion of {} on {}", host.id, model.file_name().context("a model has a name")?.display());
    let Output { stdout, stderr, .. } = run(options.grouped(command), options.timeout)?.checked(&what)?;
    Ok(Generation {
        text: stdout,
        prompt_tokens_per_second: speed(&stderr, "prompt eval time"),
        tokens_per_second: speed(&stderr, " eval time"),
        stderr,
    })
}

/// The number before "tokens per second" on the line of timings for `what`; the prompt's line also ends in " eval time".
fn speed(stderr: &str, what: &str) -> Option<f64> {
    let is_prompt = |line: &str| line.contains("prompt eval time");
    let line = stderr.lines().find(|l| l.contains(what) && is_prompt(l) == is_prompt(what))?;
    let before = line.split("tokens per second").next()?;
    before.rsplit(|c: char| c.is_whitespace() || c == ',').find(|w| !w.is_empty())?.parse().ok()
}

/// Runs until what was written is whole, five times at most: the stock programs write through a log thread, and on a busy machine some of it,
/// now and then all, is lost at their end, with and without a plug-in.
///
/// # Panics
/// If it never is.
pub fn until_whole<T>(mut run: impl FnMut() -> T, whole: impl Fn(&T) -> bool) -> T {
    const TRIES: usize = 5;
    (0..TRIES).map(|_| run()).find(whole).expect("output that is whole")
}

/// Whether two texts are the same as far as both go: one is the start of the other, and at least `least` bytes long. What a program may have
/// lost at its exit, or written in its stead (line ends, half a character), does not count.
pub fn agree(a: &str, b: &str, least: usize) -> bool {
    let whole = |s: &str| s.trim_end_matches(['\n', char::REPLACEMENT_CHARACTER]).len();
    let both = whole(a).min(whole(b));
    both >= least && common_prefix(a, b) >= both
}

/// How many leading bytes two texts share.
pub fn common_prefix(a: &str, b: &str) -> usize {
    a.bytes().zip(b.bytes()).take_while(|(x, y)| x == y).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMINGS: &str = "\
common_perf_print: prompt eval time =      41.21 ms /     6 tokens (    6.87 ms per token,   145.60 tokens per second)
common_perf_print:        eval time =     161.36 ms /    23 runs   (    7.02 ms per token,   142.54 tokens per second)";

    #[test]
    fn speeds_are_read_from_the_timings() {
        assert_eq!(speed(TIMINGS, "prompt eval time"), Some(145.60));
        assert_eq!(speed(TIMINGS, " eval time"), Some(142.54));
        assert_eq!(speed("nothing", " eval time"), None);
    }

    #[test]
    fn texts_agree_if_only_the_end_is_missing() {
        assert!(agree("Paris. It is\n\n", "Paris. It", 9));
        assert!(!agree("Paris. It is", "Paris. It", 10), "too short to say");
        assert!(!agree("Paris. It is", "Paris, it is", 4));
        assert!(agree("abcé", "abc\u{fffd}", 3));
    }

    #[test]
    fn what_is_not_whole_is_run_again() {
        let mut runs = 0;
        let mut next = || {
            runs += 1;
            runs
        };
        assert_eq!(until_whole(&mut next, |n| *n == 3), 3);
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| until_whole(next, |_| false))).is_err());
        assert_eq!(runs, 8);
    }

    #[test]
    fn a_common_prefix_is_counted_in_bytes() {
        assert_eq!(common_prefix("Paris. It", "Paris, it"), 5);
        assert_eq!(common_prefix("", "x"), 0);
    }
}
