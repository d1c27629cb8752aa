//! How more than 1 GiB of experts get into memory of their own while stock llama.cpp loads them: read from the model's file, not through page
//! faults; the file's pages do not stay beside the copy; and less memory than the experts need is enough.

#[path = "support/cgroup.rs"]
mod cgroup;
#[path = "support/preload.rs"]
mod preload;
#[path = "support/scratch.rs"]
mod scratch;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use cgroup::Cgroup;
use ffi_tests::gguf::Gguf;
use ffi_tests::hosts::{self, Host};
use ffi_tests::models::{self, Spec};
use ffi_tests::report::{Filled, Report};
use ffi_tests::run::{self, Options, Server};
use ffi_tests::{berth_lib, cache, skip};
use scratch::Scratch;

/// More than 1 GiB of experts.
const SPEC: Spec = Spec::LARGE;

/// What one server showed.
struct Seen {
    tokens: Vec<i64>,
    /// Page faults for which the kernel had to ask a file system.
    major: u64,
    /// How the experts came into their buffers.
    filled: Vec<Filled>,
    /// Bytes of the model that lie in the server's mapping of it.
    mapped: u64,
    /// Bytes of the model that the page cache holds, if there is a tool that tells.
    cached: Option<u64>,
    log: String,
}

#[test]
fn experts_of_a_mapped_model_are_read_from_its_file_with_few_page_faults() {
    few_page_faults(&[], &[]);
}

/// With several NUMA nodes and `--numa distribute` the host maps the model without reading it, and says MADV_RANDOM of all of it: each page that it touches is a
/// major fault. With one node it does not; then a library in front of it does.
#[test]
fn experts_of_a_model_that_is_mapped_for_random_access_are_read_with_few_page_faults() {
    let scratch = Scratch::new();
    let Some(library) = preload::library("map_random", scratch.path(), &[]) else { return };
    let model = model().canonicalize().unwrap();
    few_page_faults(&["--numa", "distribute"], &[("LD_PRELOAD", &library), ("RANDOM_FILE", &model)]);
}

fn few_page_faults(args: &[&str], env: &[(&str, &Path)]) {
    let Some(host) = hosts::require("sdist-dl") else { return };
    let _one = one_at_a_time();
    let experts = SPEC.expert_bytes().unwrap();
    let stock = stock(&host);
    for ty in ["ARENA", "CUDA_Host"] {
        let dropped = drop_caches();
        let seen = start_with(&host, Some(ty), args, env);
        assert_eq!(seen.log.contains("map_random: "), !env.is_empty());
        assert_eq!(seen.tokens, *stock, "{ty}");
        let (read, copied) = sum(&seen.filled);
        assert_eq!((read, copied), (experts, 0), "{ty}: {:?}", seen.filled);
        let line = seen.log.lines().find(|l| l.contains("berth: filled: ")).unwrap_or_else(|| panic!("no line about it:\n{}", seen.log));
        cache::say(&format!("{ty} {args:?}: {}, {} major faults", line.split_once("berth: ").unwrap().1, seen.major));
        // The page cache holds pages in groups of up to 2 MiB: what the experts share with others may stay.
        let rest = fs::metadata(model()).unwrap().len() - experts;
        for bytes in [Some(seen.mapped), seen.cached].into_iter().flatten() {
            assert!(bytes < rest + experts / 10, "{ty}: {bytes} bytes of the model are still in memory beside the copy");
        }
        if dropped {
            // What no rule names the host touches page by page in a mapping for random access: those are its own.
            let hosts_own = if env.is_empty() { 0 } else { rest.div_ceil(4096) };
            let most = (experts >> 20) + hosts_own;
            assert!(seen.major < most, "{ty}: {} major faults for {experts} bytes, {hosts_own} pages are the host's", seen.major);
        } else {
            skip::skipped("page faults of a cold load", "the page cache cannot be dropped here");
        }
    }
}

/// Without a mapping the host reads the file straight into host memory. Berth has nothing to do, and says so.
#[test]
fn experts_of_a_model_that_is_not_mapped_are_read_by_the_host() {
    let Some(host) = hosts::require("sdist-dl") else { return };
    let _one = one_at_a_time();
    let stock = stock(&host);
    for ty in ["ARENA", "CUDA_Host"] {
        let seen = start(&host, Some(ty), &["--load-mode", "none"]);
        assert_eq!(seen.tokens, *stock, "{ty}");
        assert_eq!(sum(&seen.filled), (0, 0), "{ty}: {:?}", seen.filled);
        cache::say(&format!("{ty} without a mapping: {} major faults", seen.major));
    }
}

#[test]
fn switched_off_the_experts_are_copied_and_the_report_says_why() {
    let Some(host) = hosts::require("sdist-dl") else { return };
    let _one = one_at_a_time();
    let scratch = Scratch::new();
    let spec = Spec { embd: 512, ff: 512, experts: 16, ..SPEC };
    let model = models::random(&spec).unwrap_or_else(|e| panic!("{e:#}"));
    let complete = |fill: &str| {
        let options = berth_options(&scratch, "ARENA").env("BERTH_FILL", fill);
        let server = Server::start(&host, &model, &options).unwrap_or_else(|e| panic!("{e:#}"));
        let tokens = server.complete("Once upon a time", 8).unwrap_or_else(|e| panic!("{e:#}")).tokens;
        (tokens, filled(&scratch, "ARENA"))
    };
    let (on, off) = (complete("auto"), complete("copy"));
    assert_eq!(on.0, off.0);
    let experts = spec.expert_bytes().unwrap();
    assert_eq!((sum(&on.1), sum(&off.1)), ((experts, 0), (0, experts)));
    let reasons: Vec<_> = off.1.iter().flat_map(|f| &f.reasons).map(|r| (r.reason.as_str(), r.bytes, r.message.is_none())).collect();
    assert_eq!(reasons, [("switched_off", experts, true)]);
}

#[test]
fn arenas_of_three_and_ten_times_the_memory_limit_are_filled() {
    let Some(host) = hosts::require("sdist-dl") else { return };
    let _one = one_at_a_time();
    let experts = SPEC.expert_bytes().unwrap();
    let load = |ty: Option<&str>, limit: u64, args: &[&str]| -> Result<_, String> {
        let (cgroup, scratch) = (Cgroup::new("fill", limit)?, Scratch::new());
        let mut command = host.command("llama-completion");
        command.arg("-m").arg(model()).args(["-p", "Once", "-n", "2", "--temp", "0", "-no-cnv", "-t", "2", "-c", "256", "-lv", "4"]);
        command.args(args).arg("--no-repack");
        match ty {
            Some(ty) => command.args(["-ot", &format!("exps={ty}")]).env("GGML_BACKEND_PATH", berth_lib().unwrap()),
            None => command.args(["--load-mode", "none"]),
        };
        command.env("BERTH_ARENA_DIR", scratch.dir("arena")).env("BERTH_REPORT", scratch.path().join("report.json"));
        command.env("BERTH_FUSE", "0").env("OMP_WAIT_POLICY", "passive");
        // What is cached already counts for whoever read it.
        drop_caches();
        let output = run::run(cgroup.wrap(command), Duration::from_secs(300)).unwrap();
        let report = ty.map(|_| Report::read(&scratch.path().join("report.json")).unwrap_or_else(|e| panic!("{e:#}\n{}", output.stderr)));
        Ok((output, report, cgroup.most().unwrap(), cgroup.killed().unwrap_or(0)))
    };
    // Read by Berth from the file that the host maps; read by the host itself, straight into the arena; and with very little memory.
    for (parts, args) in
        [(3, &[][..]), (3, &["--load-mode", "none"]), (10, &["--load-mode", "none", "--no-warmup"]), (10, &["--no-warmup", "-n", "1"])]
    {
        let limit = experts / parts;
        let (output, report, most, killed) = match load(Some("ARENA"), limit, args) {
            Ok(loaded) => loaded,
            Err(why) => return skip::skipped("an arena larger than the memory limit", &why),
        };
        let output = output.checked("llama-completion in a cgroup").unwrap_or_else(|e| panic!("{killed} killed for memory: {e:#}"));
        let filled: Vec<Filled> = report.iter().flat_map(|r| &r.buffers).filter(|b| b.asked == "ARENA").map(|b| b.filled.clone()).collect();
        let line = output.stderr.lines().find_map(|l| l.split_once("berth: filled: ")).map_or("?", |(_, l)| l);
        let direct: u64 = filled.iter().map(|f| f.direct).sum();
        let sizes = format!("{args:?}: {} MiB of experts with a limit of {} MiB, {} MiB used", experts >> 20, limit >> 20, most >> 20);
        cache::say(&format!("{sizes} in {:.1} s: {line}, {} MiB of them past the page cache", output.took.as_secs_f64(), direct >> 20));
        let by_berth = if args.contains(&"none") { 0 } else { experts };
        assert_eq!((sum(&filled), killed), ((by_berth, 0), 0), "{filled:?}");
        assert!(most <= limit, "{most} bytes were used");
    }

    // What cannot be page-locked and has no room in memory lies in a file too: nobody is killed.
    let (output, report, _, killed) = load(Some("CUDA_Host"), experts / 3, &[]).unwrap();
    let got: Vec<String> = report.iter().flat_map(|r| &r.buffers).filter(|b| b.asked == "CUDA_Host").map(|b| b.got.clone()).collect();
    assert!(output.success() && killed == 0, "{got:?}: {killed} killed");
    assert!(got == ["arena"] || got == ["partly_pinned"], "{got:?}");

    // The control: the limit is one. Anonymous memory does not fit.
    let (output, _, _, killed) = load(None, experts / 3, &[]).unwrap();
    assert!(!output.success() && killed > 0, "{experts} anonymous bytes fit into a third");
}

/// Stock llama.cpp would end by SIGBUS: it touches what is not there any more.
#[test]
fn a_model_that_is_cut_under_its_mapping_is_named_and_ends_nobody() {
    let Some(host) = hosts::require("sdist-dl") else { return };
    let _one = one_at_a_time();
    let scratch = Scratch::new();
    let Some(cutter) = preload::library("cut_after_map", scratch.path(), &[]) else { return };
    let made = models::random(&Spec { embd: 512, ff: 512, experts: 16, ..SPEC }).unwrap_or_else(|e| panic!("{e:#}"));
    let gguf = Gguf::open(&made).unwrap();
    let last = gguf.tensors().iter().max_by_key(|t| t.offset).unwrap();
    assert!(last.name.contains("_exps") && last.bytes > 1 << 20, "{}: its end must be of experts", last.name);
    let cut = last.offset + last.bytes / 2;
    for ty in ["ARENA", "CUDA_Host"] {
        // A path without links, as the kernel shows it.
        let model = scratch.path().canonicalize().unwrap().join("model.gguf");
        fs::copy(&made, &model).unwrap();
        let mut command = host.command("llama-completion");
        command.arg("-m").arg(&model).args(["-p", "Once", "-n", "2", "--temp", "0", "-no-cnv", "-t", "2", "-c", "256", "-lv", "4"]);
        command.args(["--no-repack", "-ot", &format!("exps={ty}")]).env("GGML_BACKEND_PATH", berth_lib().unwrap());
        command.env("BERTH_ARENA_DIR", scratch.dir("arena")).env("BERTH_REPORT", scratch.path().join("report.json"));
        command.env("LD_PRELOAD", &cutter).env("CUT_FILE", &model).env("CUT_BYTES", cut.to_string());
        let output = run::run(command, Duration::from_secs(120)).unwrap().checked(ty).unwrap_or_else(|e| panic!("{e:#}"));
        assert_eq!(fs::metadata(&model).unwrap().len(), cut, "it was not cut");
        let line = output.stderr.lines().find(|l| l.contains("was truncated after it was mapped"));
        let line = line.unwrap_or_else(|| panic!("{ty}: nothing about it:\n{}", output.stderr));
        assert!(line.contains(model.to_str().unwrap()) && line.contains(&cut.to_string()), "{line}");
        let report = Report::read(&scratch.path().join("report.json")).unwrap();
        let reasons: Vec<(String, u64)> =
            report.buffers.iter().flat_map(|b| &b.filled.reasons).map(|r| (r.reason.clone(), r.bytes)).collect();
        assert_eq!(reasons, [("file_truncated".to_owned(), last.bytes)], "{ty}");
    }
}

fn sum(filled: &[Filled]) -> (u64, u64) {
    filled.iter().fold((0, 0), |(read, copied), f| (read + f.read, copied + f.copied))
}

/// One load at a time: they share a disk, a page cache and two cores.
fn one_at_a_time() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn model() -> PathBuf {
    models::random(&SPEC).unwrap_or_else(|e| panic!("{e:#}"))
}

fn stock(host: &Host) -> &'static Vec<i64> {
    static STOCK: OnceLock<Vec<i64>> = OnceLock::new();
    STOCK.get_or_init(|| start(host, None, &[]).tokens)
}

fn options() -> Options {
    // `-lv 4` shows the lines about fills. The host's own kernels run, so that tokens are those without Berth.
    Options { context: 256, ..Options::default() }.arg(&["-lv", "4"]).env("BERTH_FUSE", "0")
}

fn berth_options(scratch: &Scratch, ty: &str) -> Options {
    let path = |p: PathBuf| p.to_str().unwrap().to_owned();
    let options = options().with_berth(&berth_lib().unwrap(), &format!("exps={ty}"));
    options.env("BERTH_ARENA_DIR", path(scratch.dir("arena"))).env("BERTH_REPORT", path(scratch.path().join("report.json")))
}

fn filled(scratch: &Scratch, ty: &str) -> Vec<Filled> {
    let report = Report::read(&scratch.path().join("report.json")).unwrap();
    report.asked(ty).map(|b| b.filled.clone()).collect()
}

fn start(host: &Host, ty: Option<&str>, args: &[&str]) -> Seen {
    start_with(host, ty, args, &[])
}

fn start_with(host: &Host, ty: Option<&str>, args: &[&str], env: &[(&str, &Path)]) -> Seen {
    let (scratch, model) = (Scratch::new(), model());
    let options = ty.map_or_else(options, |ty| berth_options(&scratch, ty)).arg(args);
    let options = env.iter().fold(options, |options, (name, path)| options.env(name, path.to_str().unwrap()));
    let server = Server::start(host, &model, &options).unwrap_or_else(|e| panic!("{e:#}"));
    // Before a token is computed: those are faults of another kind.
    let major = major_faults(&server);
    let (mapped, cached) = (mapped(&server, &model), cached(&model));
    let tokens = server.complete("Once upon a time", 8).unwrap_or_else(|e| panic!("{e:#}")).tokens;
    let filled = ty.map_or_else(Vec::new, |ty| filled(&scratch, ty));
    Seen { tokens, major, filled, mapped, cached, log: server.stop().unwrap_or_else(|e| panic!("{e:#}")) }
}

/// Of all threads of the server so far.
fn major_faults(server: &Server) -> u64 {
    let stat = fs::read_to_string(server.proc("stat")).unwrap();
    // Fields are counted behind the name, which is in parentheses and may hold spaces: state is the third, majflt the twelfth.
    let fields = stat.rsplit_once(')').unwrap().1;
    fields.split_whitespace().nth(9).unwrap().parse().unwrap()
}

/// Whether nothing is cached now.
fn drop_caches() -> bool {
    let synced = Command::new("sync").status().is_ok_and(|s| s.success());
    synced && fs::write("/proc/sys/vm/drop_caches", "3").is_ok()
}

/// Bytes of the file that are in memory by the server's mappings of it.
fn mapped(server: &Server, model: &Path) -> u64 {
    let text = fs::read_to_string(server.proc("smaps")).unwrap();
    let (mut inside, mut kib) = (false, 0);
    for line in text.lines() {
        // A mapping begins with its addresses: "7f12-7f34 r--s ...".
        if line.split(' ').next().is_some_and(|word| word.contains('-')) {
            inside = line.ends_with(model.to_str().unwrap());
        } else if let Some(rss) = line.strip_prefix("Rss:").filter(|_| inside) {
            kib += rss.trim().trim_end_matches(" kB").parse::<u64>().unwrap();
        }
    }
    kib << 10
}

fn cached(model: &Path) -> Option<u64> {
    let output = Command::new("fincore").args(["-b", "-n", "-o", "RES"]).arg(model).output().ok()?;
    String::from_utf8_lossy(&output.stdout).trim().parse().ok()
}
