//! Where the bytes of more than 1 GiB of experts are while `llama-server` runs: not in anonymous memory, which the kernel cannot take back.
//!
//! Read off `/proc/PID/status` and `/proc/PID/smaps` of the server, against the same server without Berth.

#[path = "support/scratch.rs"]
mod scratch;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use ffi_tests::hosts::{self, Host};
use ffi_tests::models::{self, Spec};
use ffi_tests::report::Report;
use ffi_tests::run::{Options, Server};
use ffi_tests::{berth_lib, cache};
use scratch::Scratch;

/// More than 1 GiB of experts.
const SPEC: Spec = Spec::LARGE;

/// What one server showed.
#[derive(Debug)]
struct Seen {
    tokens: Vec<i64>,
    /// Bytes of anonymous memory.
    anonymous: u64,
    /// Pieces of each graph.
    splits: Vec<String>,
}

#[test]
fn experts_in_cpu_mmap_add_no_anonymous_memory_and_no_split() {
    let Some(host) = hosts::require("sdist-dl") else { return };
    let (stock, experts) = (stock(&host), SPEC.expert_bytes().unwrap());
    let scratch = Scratch::new();
    let report = scratch.path().join("report.json");
    let options = options().with_berth(&berth_lib().unwrap(), "exps=CPU_MMAP").env("BERTH_REPORT", report.to_str().unwrap());
    let (server, seen) = start(&host, &options);
    compare("CPU_MMAP", &seen, stock, experts);
    let report = Report::read(&report).unwrap();
    let mapped: u64 = report.asked("CPU_MMAP").filter(|b| b.got == "mapped").map(|b| b.bytes).sum();
    assert!(mapped >= experts, "{mapped} of {experts} bytes are mapped");
    server.stop().unwrap();
}

#[test]
fn experts_computed_by_berth_add_little_anonymous_memory() {
    let Some(host) = hosts::require("sdist-dl") else { return };
    let (stock, experts) = (stock(&host), SPEC.expert_bytes().unwrap());
    let (server, seen) = start(&host, &options().with_berth(&berth_lib().unwrap(), "exps=CPU_MMAP").env("BERTH_FUSE", "1"));
    let growth = seen.anonymous.saturating_sub(stock.anonymous);
    cache::say(&format!("computed by Berth: {} MiB more of anonymous memory than stock", growth >> 20));
    assert!(growth * 20 < experts, "{growth} bytes more of anonymous memory for {experts} bytes of experts");
    assert_ne!(seen.splits, stock.splits, "the experts are in pieces of their own");
    server.stop().unwrap();
}

#[test]
fn experts_in_an_arena_are_pages_of_a_file_that_become_clean() {
    let Some(host) = hosts::require("sdist-dl") else { return };
    let (stock, experts) = (stock(&host), SPEC.expert_bytes().unwrap());
    let scratch = Scratch::new();
    let arena = scratch.dir("arena");
    let options = options().with_berth(&berth_lib().unwrap(), "exps=ARENA").env("BERTH_ARENA_DIR", arena.to_str().unwrap());
    let (server, seen) = start(&host, &options);
    compare("ARENA", &seen, stock, experts);

    let start = Instant::now();
    loop {
        let pages = mapping(&server, &arena);
        let dirty = pages["Shared_Dirty"] + pages["Private_Dirty"];
        assert!(pages["Size"] >= experts, "{pages:?}");
        assert_eq!((pages["Anonymous"], pages["Swap"]), (0, 0), "pages of the arena are not the file's: {pages:?}");
        if dirty * 100 < experts {
            let clean = pages["Shared_Clean"] + pages["Private_Clean"];
            assert!(clean > 0, "the pages went away instead of becoming clean: {pages:?}");
            // The experts were written to the file: those that no token has chosen are in the page cache and not in the mapping.
            match cached(&server, &arena) {
                Some(bytes) => assert!(bytes * 100 > experts * 95, "{bytes} of {experts} bytes are left in the page cache"),
                None => cache::say("ARENA: no fincore here, so pages that are not mapped were not counted"),
            }
            cache::say(&format!("ARENA: {dirty} of {experts} bytes dirty, {clean} clean, {} s after the load", start.elapsed().as_secs()));
            break;
        }
        assert!(start.elapsed() < Duration::from_secs(120), "{dirty} of {experts} bytes are still dirty");
        sleep(Duration::from_millis(500));
    }
    server.stop().unwrap();
    assert_eq!(fs::read_dir(&arena).unwrap().count(), 0);
}

/// The control: what this file measures does see a copy in anonymous memory.
#[test]
fn experts_that_fall_back_to_pageable_memory_are_seen_as_anonymous() {
    let Some(host) = hosts::require("sdist-dl") else { return };
    let (stock, experts) = (stock(&host), SPEC.expert_bytes().unwrap());
    let scratch = Scratch::new();
    let report = scratch.path().join("report.json");
    let options = options().with_berth(&berth_lib().unwrap(), "exps=CUDA_Host").env("BERTH_REPORT", report.to_str().unwrap());
    let (server, seen) = start(&host, &options);
    let pageable: u64 = Report::read(&report).unwrap().asked("CUDA_Host").filter(|b| b.got == "pageable").map(|b| b.bytes).sum();
    if pageable < experts {
        return ffi_tests::skip::skipped("experts in pageable memory", "this machine has a CUDA driver, which page-locks them");
    }
    let growth = seen.anonymous.saturating_sub(stock.anonymous);
    assert!(growth * 100 > experts * 95, "only {growth} of {experts} bytes are seen");
    assert_eq!((seen.tokens, &seen.splits), (stock.tokens.clone(), &stock.splits));
    server.stop().unwrap();
}

/// Placement only: the host's own kernels run, so that tokens and splits are those without Berth.
fn options() -> Options {
    // `-lv 4` shows the splits.
    Options { context: 256, ..Options::default() }.arg(&["-lv", "4"]).env("BERTH_FUSE", "0")
}

/// Starts a server and asks it for a few tokens. One at a time: two would compete for the machine's two cores.
fn start(host: &Host, options: &Options) -> (Server, Seen) {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let model = models::random(&SPEC).unwrap_or_else(|e| panic!("{e:#}"));
    let server = Server::start(host, &model, options).unwrap_or_else(|e| panic!("{e:#}"));
    let tokens = server.complete("Once upon a time", 8).unwrap_or_else(|e| panic!("{e:#}")).tokens;
    let anonymous = fields(&fs::read_to_string(server.proc("status")).unwrap())["RssAnon"];
    let log = server.log();
    let splits = log.lines().filter_map(|l| l.split_once("splits = ")).map(|(_, n)| n.trim().to_owned()).collect();
    (server, Seen { tokens, anonymous, splits })
}

fn stock(host: &Host) -> &'static Seen {
    static STOCK: OnceLock<Seen> = OnceLock::new();
    STOCK.get_or_init(|| start(host, &options()).1)
}

fn compare(what: &str, seen: &Seen, stock: &Seen, experts: u64) {
    let growth = seen.anonymous.saturating_sub(stock.anonymous);
    cache::say(&format!(
        "{what}: anonymous {} MiB, stock {} MiB, experts {} MiB",
        seen.anonymous >> 20,
        stock.anonymous >> 20,
        experts >> 20
    ));
    assert!(experts >= 1 << 30, "{experts} bytes are not 1 GiB");
    assert!(growth * 20 < experts, "{what}: {growth} bytes more of anonymous memory for {experts} bytes of experts");
    assert_eq!(seen.tokens, stock.tokens, "{what}");
    assert!(!stock.splits.is_empty(), "the server does not say its splits");
    assert_eq!(seen.splits, stock.splits, "{what}: the scheduler splits its graphs in another way");
}

/// Bytes in the page cache of the server's open files in `dir`, if there is a tool that tells.
fn cached(server: &Server, dir: &Path) -> Option<u64> {
    let open = fs::read_dir(server.proc("fd")).unwrap().flatten().map(|e| e.path());
    let ours = open.filter(|fd| fs::read_link(fd).is_ok_and(|file| file.starts_with(dir)));
    let resident = |fd| {
        let output = Command::new("fincore").args(["-b", "-n", "-o", "RES"]).arg(fd).output().ok()?;
        String::from_utf8_lossy(&output.stdout).trim().parse::<u64>().ok()
    };
    ours.map(resident).sum()
}

/// `smaps` of the mappings of files in `dir`, summed up, in bytes.
fn mapping(server: &Server, dir: &Path) -> BTreeMap<String, u64> {
    let text = fs::read_to_string(server.proc("smaps")).unwrap();
    let mut sum = BTreeMap::new();
    let mut inside = false;
    for line in text.lines() {
        // A mapping begins with its addresses: "7f12-7f34 rw-s ...".
        if line.split(' ').next().is_some_and(|word| word.contains('-')) {
            inside = line.contains(dir.to_str().unwrap());
        } else if inside {
            for (name, bytes) in fields(line) {
                *sum.entry(name).or_default() += bytes;
            }
        }
    }
    assert!(!sum.is_empty(), "no mapping of a file in {}\n{text}", dir.display());
    sum
}

/// Lines like `RssAnon:     1234 kB`, in bytes.
fn fields(text: &str) -> BTreeMap<String, u64> {
    let field = |line: &str| {
        let (name, value) = line.split_once(':')?;
        let kib: u64 = value.trim().strip_suffix(" kB")?.parse().ok()?;
        Some((name.to_owned(), kib << 10))
    };
    text.lines().filter_map(field).collect()
}
