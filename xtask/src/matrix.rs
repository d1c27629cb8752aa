//! `cargo xtask matrix`: every host, with and without Berth, through its own libllama; the result is the table in docs/hosts.md.

use std::fmt::Write as _;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ffi_tests::hosts::{self, Expect, Host};
use ffi_tests::report::Report;
use ffi_tests::run::{self, clean_env};
use ffi_tests::{models, tools};

use crate::shell;

/// Run every host with and without Berth, and write docs/hosts.md.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The hosts' ids; all of them if none is given. Then the file is written too.
    ids: Vec<String>,
    /// Also the newest version in each registry, if the table does not have it.
    #[arg(long)]
    newest: bool,
    /// Also an unpatched llama.cpp built with berth-llama.cmake, static and shared (eight minutes each on two cores, the first time).
    #[arg(long)]
    include: bool,
}

const PLACES: [&str; 3] = ["CPU_MMAP", "CUDA_Host", "ARENA"];
const TOKENS: &str = "24";
const PROMPT: &str = "The capital of France is";
const DOCS: &str = "docs/hosts.md";

pub(crate) fn run(args: &Args) -> Result<()> {
    let library = shell::berth()?;
    let dir = tempfile::tempdir()?;
    let bench = Bench { program: compile(dir.path())?, library, model: models::smollm_moe()?, dir: dir.path().to_owned() };
    let ids: Vec<&str> = if args.ids.is_empty() { hosts::ids() } else { args.ids.iter().map(String::as_str).collect() };
    let mut text = String::from(HEAD);
    let mut wrong = Vec::new();
    let known = ids.into_iter().map(|id| (id.to_owned(), hosts::get(id)));
    let newest = if args.newest { hosts::newest() } else { Vec::new() };
    let none_newer = args.newest && newest.is_empty();
    let newest = newest.into_iter().map(|host| (host.as_ref().map_or_else(|_| "newest".to_owned(), |h| h.id.clone()), host));
    for (id, host) in known.chain(newest) {
        eprintln!("==> {id}");
        let line = host.and_then(|host| {
            let (ggml, cells) = bench.line(&host)?;
            Ok(format!("| {id} | {} | {ggml} | {cells}", host.package))
        });
        let line = line.unwrap_or_else(|error| {
            wrong.push(format!("{id}: {error:#}"));
            format!("| {id} | FAILED | | | | | |")
        });
        writeln!(text, "{line}")?;
    }
    if none_newer {
        text += "\nThe registries were asked when this table was written (`cargo xtask matrix --newest`): it has the newest version of every package.\n";
    }
    if args.include {
        text += &included()?;
    }
    text += TAIL;
    println!("{text}");
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    if args.ids.is_empty() {
        fs::create_dir_all(shell::root().join("docs"))?;
        fs::write(shell::root().join(DOCS), text)?;
        println!("wrote {DOCS}");
    }
    Ok(())
}

const HEAD: &str = "\
# Hosts

Unmodified builds that Berth is tested against, as `cargo xtask matrix` last found them. Each loads SmolLM2-135M as a mixture of 8 experts and
generates 24 tokens, without Berth and with `-ot \"exps=…\"` for each place. \"same\" means the same tokens and every logit equal, bit for bit.
The word in brackets is what the buffer got on the machine that made this table; where that is not what was asked, the reason follows.

| host | package | ggml | layout | CPU_MMAP | CUDA_Host | ARENA |
|---|---|---|---|---|---|---|
";
const TAIL: &str = "
A host that is refused goes on without Berth, with the line shown. A new host is one line in `ffi-tests/src/hosts/table.rs`; `cargo xtask matrix
--newest` tries the newest version in each registry before it has one.
";

/// A whole llama.cpp with Berth built in, by the tests that do so; what they hold is said in one line.
fn included() -> Result<String> {
    let mut cargo = shell::cargo();
    cargo
        .args(["test", "--package", "ffi-tests", "--test", "llama_include", "--", "--test-threads", "1", "unpatched"])
        .env("BERTH_FULL", "1");
    shell::step(&mut cargo)?;
    Ok("\nThe unpatched llama.cpp of `sdist-dl`, built with `berth-llama.cmake`, static and shared (`cargo xtask matrix --include`): `llama-completion` has \
        Berth without any environment variable, puts the experts in each of the places, and writes the same text. No file of the tree has changed.\n"
        .to_owned())
}

/// What all hosts are tried with.
struct Bench {
    program: PathBuf,
    library: PathBuf,
    model: PathBuf,
    dir: PathBuf,
}

/// What a run of the C program printed.
struct Answer {
    /// Tokens, and the hash of all logits.
    text: String,
    devices: Vec<String>,
    stderr: String,
}

impl Bench {
    /// Version of its ggml, and the rest of the line.
    fn line(&self, host: &Host) -> Result<(String, String)> {
        match host.api {
            Expect::Refused => self.refused(host).map(|line| (host.ggml_version.to_owned(), format!("refused: `{line}` | | | |"))),
            Expect::Accepted => self.accepted(host),
        }
    }

    fn accepted(&self, host: &Host) -> Result<(String, String)> {
        let stock = self.greedy(host, None)?;
        let (mut layout, mut ggml) = (String::new(), host.ggml_version.to_owned());
        let mut cells = String::new();
        for place in PLACES {
            let report = self.dir.join(format!("{}-{place}.json", host.id));
            let with = self.greedy(host, Some((place, &report)))?;
            ensure!(with.devices.iter().any(|d| d.ends_with(place)), "{place} is not among the devices: {:?}", with.devices);
            ensure!(with.text == stock.text, "{place}: another text\n{}\nstock\n{}", with.text, stock.text);
            let report = Report::read(&report)?;
            if let Some(found) = report.hosts.first() {
                (layout, ggml) = (found.layout.clone(), found.ggml_version.clone());
            }
            let buffers: Vec<_> = report.buffers.iter().filter(|b| b.asked == place && !b.tensors.is_empty()).collect();
            let tensors: usize = buffers.iter().map(|b| b.tensors.len()).sum();
            ensure!(tensors == 90, "{place}: {tensors} of 90 expert tensors are in its buffers");
            let first = buffers.first().context("no buffer")?;
            let why = first.reason.as_ref().map(|r| format!(": {r}")).unwrap_or_default();
            write!(cells, " same ({}{why}) |", first.got)?;
        }
        Ok((ggml, format!("{layout} |{cells}")))
    }

    /// The line with which a host that does not fit is refused; the host must do its work all the same.
    fn refused(&self, host: &Host) -> Result<String> {
        let (stderr, where_from) = if host.lib("llama").is_ok() {
            let stock = self.greedy(host, None)?;
            let command = self.command(host, None)?;
            let with = answer(run::run(command.0, TIMEOUT)?.checked(&host.id)?)?;
            ensure!(with.text == stock.text && with.devices == stock.devices, "a refused Berth changed something");
            (with.stderr, "the C program")
        } else {
            // It lists its devices, then serves until it is killed.
            let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
            let mut command = host.command("ggml-rpc-server");
            command.args(["--host", "127.0.0.1", "--port", &port]).env("GGML_BACKEND_PATH", &self.library);
            let out = run::run(command, Duration::from_secs(5))?;
            ensure!(out.status.is_none(), "ggml-rpc-server did not go on: {}", run::last_lines(&out.stderr, 10));
            (out.stderr, "ggml-rpc-server")
        };
        let line = stderr.lines().find(|l| l.contains("berth: not loaded"));
        let line = line.with_context(|| format!("{where_from} shows no refusal:\n{}", run::last_lines(&stderr, 10)))?;
        Ok(line[line.find("berth:").unwrap_or(0)..].to_owned())
    }

    fn greedy(&self, host: &Host, with: Option<(&str, &Path)>) -> Result<Answer> {
        let (mut command, rule) = self.command(host, with)?;
        match rule {
            Some(rule) => command.arg(rule),
            None => command.env_remove("GGML_BACKEND_PATH"),
        };
        answer(run::run(command, TIMEOUT)?.checked(&host.id)?)
    }

    /// The C program on that host with Berth loaded, and the rule for a place.
    fn command(&self, host: &Host, with: Option<(&str, &Path)>) -> Result<(Command, Option<String>)> {
        let mut command = Command::new(&self.program);
        clean_env(&mut command);
        command.env("LD_LIBRARY_PATH", &host.lib_dir).env("OMP_WAIT_POLICY", "passive").env("GGML_BACKEND_PATH", &self.library);
        command.arg(host.lib("llama")?).arg(&host.lib_dir).arg(&self.model).args([PROMPT, TOKENS]);
        if let Some((_, report)) = with {
            // Placement only: the host's own kernels run, so that logits are bit-equal.
            command.env("BERTH_REPORT", report).env("BERTH_FUSE", "0");
        }
        Ok((command, with.map(|(place, _)| format!("exps={place}"))))
    }
}

const TIMEOUT: Duration = Duration::from_secs(300);

fn answer(out: run::Output) -> Result<Answer> {
    let lines = |start: &str| out.stdout.lines().filter(|l| l.starts_with(start)).map(str::to_owned).collect::<Vec<_>>();
    let text = [lines("tokens"), lines("logits")].concat().join("\n");
    if text.lines().count() != 2 {
        bail!("no tokens and logits in:\n{}", run::last_lines(&out.stdout, 10));
    }
    Ok(Answer { text, devices: lines("device"), stderr: out.stderr })
}

/// The C program that drives any libllama.
fn compile(dir: &Path) -> Result<PathBuf> {
    let program = dir.join("greedy");
    let mut cc = tools::command("cc")?;
    cc.args(["-std=c11", "-D_GNU_SOURCE", "-O1", "-o"]).arg(&program).arg(shell::root().join("ffi-tests/c/greedy.c")).args(["-ldl", "-lm"]);
    run::run(cc, TIMEOUT)?.checked("cc greedy.c")?;
    Ok(program)
}
