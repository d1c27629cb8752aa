//! A model of a test's own, started in stock llama.cpp with an arena directory of its own, and what each start showed.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use ffi_tests::hosts::{self, Host};
use ffi_tests::models::{self, Spec};
use ffi_tests::report::{Buffer, Lasting, Report};
use ffi_tests::run::{self, Options, Server};
use ffi_tests::{berth_lib, berth_program};

use crate::scratch::Scratch;

/// 80 MB of experts.
pub(crate) const SPEC: Spec = Spec { embd: 512, ff: 512, experts: 16, ..Spec::LARGE };

/// Bytes of a file before its data.
pub(crate) const HEADER: u64 = 2 << 20;

pub(crate) const EXPERTS: &str = "exps=ARENA";

/// A model of a test's own, an arena directory, and a report.
pub(crate) struct Place {
    pub(crate) scratch: Scratch,
    pub(crate) host: Host,
    pub(crate) model: PathBuf,
}

/// What one start showed.
pub(crate) struct Start {
    pub(crate) tokens: Vec<i64>,
    pub(crate) buffer: Buffer,
    /// Bytes that the process had written to disks when it was ready.
    pub(crate) written: u64,
    /// Bytes of its anonymous memory, after it has computed.
    pub(crate) anonymous: u64,
    pub(crate) load: Duration,
    pub(crate) log: String,
}

impl Start {
    pub(crate) fn lasting(&self) -> &Lasting {
        self.buffer.lasting.as_ref().unwrap_or_else(|| panic!("nothing about it in the report: {:?}", self.buffer))
    }

    pub(crate) fn state(&self) -> (&str, Option<&str>) {
        (self.lasting().state.as_str(), self.lasting().reason.as_deref())
    }
}

impl Place {
    pub(crate) fn new() -> Option<(Place, MutexGuard<'static, ()>)> {
        Place::of("sdist-dl", &SPEC)
    }

    pub(crate) fn of(host: &str, spec: &Spec) -> Option<(Place, MutexGuard<'static, ()>)> {
        let host = hosts::require(host)?;
        // One load at a time: they share a disk and two cores.
        static ONE: Mutex<()> = Mutex::new(());
        let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let scratch = Scratch::new();
        let model = scratch.path().join("model.gguf");
        fs::copy(models::random(spec).unwrap_or_else(|e| panic!("{e:#}")), &model).unwrap();
        scratch.dir("arena");
        Some((Place { scratch, host, model }, one))
    }

    pub(crate) fn arena(&self) -> PathBuf {
        self.scratch.path().join("arena")
    }

    pub(crate) fn options(&self, rules: &str, persist: bool) -> Options {
        let text = |p: PathBuf| p.to_str().unwrap().to_owned();
        let options = Options { context: 256, ..Options::default() }.arg(&["-lv", "4"]).env("BERTH_FUSE", "0");
        let options = options.with_berth(&berth_lib().unwrap(), rules).env("BERTH_ARENA_DIR", text(self.arena()));
        let options = options.env("BERTH_REPORT", text(self.scratch.path().join("report.json")));
        if persist { options.env("BERTH_ARENA_PERSIST", "1") } else { options }
    }

    pub(crate) fn start(&self) -> Start {
        self.start_with(&self.options(EXPERTS, true))
    }

    pub(crate) fn start_with(&self, options: &Options) -> Start {
        let server = Server::start(&self.host, &self.model, options).unwrap_or_else(|e| panic!("{e:#}"));
        let io = fs::read_to_string(server.proc("io")).unwrap();
        let written = io.lines().find_map(|l| l.strip_prefix("write_bytes: ")).unwrap().parse().unwrap();
        let report = Report::read(&self.scratch.path().join("report.json")).unwrap();
        let buffer = report.asked("ARENA").next().unwrap().clone();
        let tokens = server.complete("Once upon a time", 8).unwrap_or_else(|e| panic!("{e:#}")).tokens;
        let status = fs::read_to_string(server.proc("status")).unwrap();
        let anonymous = status.lines().find_map(|l| l.strip_prefix("RssAnon:")).unwrap().trim().trim_end_matches(" kB");
        let (load, anonymous) = (server.load_time, anonymous.parse::<u64>().unwrap() << 10);
        Start { tokens, buffer, written, anonymous, load, log: server.stop().unwrap_or_else(|e| panic!("{e:#}")) }
    }

    /// Starts, checks the text, what has become of the file, and its reason.
    pub(crate) fn expect(&self, state: &str, reason: Option<&str>) -> Start {
        let start = self.start();
        assert_eq!(start.state(), (state, reason), "{:?}\n{}", start.lasting(), start.log);
        assert_eq!(&start.tokens, stock(&self.host), "{state}");
        start
    }

    /// A start that must find what is there.
    pub(crate) fn reused(&self) -> Start {
        self.expect("reused", None)
    }

    /// The only file that is kept.
    pub(crate) fn kept(&self) -> PathBuf {
        let mut files = self.files();
        assert_eq!(files.len(), 1, "{files:?}");
        files.remove(0)
    }

    pub(crate) fn files(&self) -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> = fs::read_dir(self.arena()).unwrap().map(|e| e.unwrap().path()).collect();
        files.sort();
        files
    }

    /// `berth arena` in this directory.
    pub(crate) fn berth(&self, args: &[&str]) -> Output {
        let mut command = Command::new(berth_program().unwrap());
        run::clean_env(&mut command);
        command.arg("arena").args(args).arg("--dir").arg(self.arena()).output().unwrap()
    }

    pub(crate) fn listed(&self) -> serde_json::Value {
        let output = self.berth(&["ls", "--json"]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Every file that is there is whole, by Berth's checksums and by the bytes of the model.
    pub(crate) fn verified(&self) {
        let output = self.berth(&["verify"]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        for path in self.files().iter().filter(|p| p.extension().is_some_and(|e| e == "arena")) {
            let file = fs::read(path).unwrap();
            let len = u64::from_le_bytes(file[16..24].try_into().unwrap()) as usize;
            let table: serde_json::Value = serde_json::from_slice(&file[4096..4096 + len]).unwrap();
            let models: Vec<Vec<u8>> =
                table["models"].as_array().unwrap().iter().map(|m| fs::read(m["path"].as_str().unwrap()).unwrap()).collect();
            for tensor in table["tensors"].as_array().unwrap() {
                let number = |field: &str| tensor[field].as_u64().unwrap() as usize;
                let (at, bytes, source) = (HEADER as usize + number("offset"), number("bytes"), number("source"));
                assert!(file[at..at + bytes] == models[number("model")][source..source + bytes], "{}: {}", path.display(), tensor["name"]);
            }
        }
    }

    /// One load in `llama-completion`, to be killed.
    pub(crate) fn spawn(&self) -> std::process::Child {
        let mut command = self.completion();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }

    pub(crate) fn completion(&self) -> Command {
        let mut command = self.host.command("llama-completion");
        command.arg("-m").arg(&self.model).args(["-p", "Once", "-n", "2", "--temp", "0", "-no-cnv", "-t", "2", "-c", "256", "-lv", "4"]);
        command.args(["--no-repack", "-ot", EXPERTS]).env("GGML_BACKEND_PATH", berth_lib().unwrap()).env("OMP_WAIT_POLICY", "passive");
        command.env("BERTH_ARENA_DIR", self.arena()).env("BERTH_ARENA_PERSIST", "1").env("BERTH_FUSE", "0");
        command.env("BERTH_REPORT", self.scratch.path().join("report.json"));
        command
    }
}

pub(crate) fn stock(host: &Host) -> &'static Vec<i64> {
    static STOCK: OnceLock<Vec<i64>> = OnceLock::new();
    STOCK.get_or_init(|| {
        let model = models::random(&SPEC).unwrap_or_else(|e| panic!("{e:#}"));
        let server = Server::start(host, &model, &Options { context: 256, ..Options::default() }).unwrap_or_else(|e| panic!("{e:#}"));
        server.complete("Once upon a time", 8).unwrap_or_else(|e| panic!("{e:#}")).tokens
    })
}
