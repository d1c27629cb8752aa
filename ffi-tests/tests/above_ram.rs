//! A model of 1.5 times the memory that stock `llama-server` may have: it loads and answers with its experts in `CPU_MMAP` and in `ARENA`, says what it
//! says without a limit, and reads missing experts ahead. In anonymous memory the same model does not fit.
//!
//! Needs root and memory cgroups of version 1. What it takes is in docs/above-ram.md, written by `cargo xtask above-ram`.

#[path = "support/scratch.rs"]
mod scratch;

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use ffi_tests::hosts::{self, Host};
use ffi_tests::models::{self, Spec};
use ffi_tests::report::{ReadAhead, Report};
use ffi_tests::run::{Cgroup, Options, Server};
use ffi_tests::{berth_lib, cache, skip};
use scratch::Scratch;

/// 1.2 GiB of experts.
const SPEC: Spec = Spec::LARGE;

/// What one server showed.
#[derive(Debug)]
struct Seen {
    tokens: Vec<i64>,
    /// Bytes of anonymous memory, and of the buffers that the host says to have for a context.
    anonymous: u64,
    buffers: u64,
    killed: u64,
    ahead: ReadAhead,
    log: String,
}

#[test]
fn a_model_of_one_and_a_half_times_the_limit_loads_and_decodes_and_read_ahead_adds_up() {
    let Some(host) = hosts::require("sdist-dl") else { return };
    let _one = one_at_a_time();
    let (experts, file) = (SPEC.expert_bytes().unwrap(), fs::metadata(model()).unwrap().len());
    let limit = Some(file * 2 / 3);
    let stock = run(&host, "", &[], None, &[]).unwrap().tokens;
    let fused = run(&host, "CPU_MMAP", &[], None, &[]).unwrap();
    let mut direct = 0;
    for ty in ["CPU_MMAP", "ARENA"] {
        for (env, want) in [
            (("BERTH_FUSE", "0"), &stock),
            (("BERTH_WARM", "auto"), &fused.tokens),
            (("BERTH_DIRECT", "off"), &fused.tokens),
            (("BERTH_READAHEAD", "off"), &fused.tokens),
        ] {
            let what = format!("{ty} {}={}", env.0, env.1);
            let seen = match run(&host, ty, &[env], limit, &[]) {
                Ok(seen) => seen,
                Err(Refused::NoCgroup(why)) => return skip::skipped("a model larger than the memory limit", &why),
                Err(Refused::Ended(why)) => panic!("{what}: {why}"),
            };
            assert_eq!((&seen.tokens, seen.killed), (want, 0), "{what}");
            assert!(seen.anonymous < seen.buffers + experts / 20, "{what}: {} anonymous bytes, {}", seen.anonymous, seen.buffers);
            let a = &seen.ahead;
            cache::say(&format!(
                "{what}: {} of {} experts missing, {} MiB, {} MiB asked for, {} MiB of it past the page cache, {} MiB warmed; anonymous {} MiB",
                a.expert_misses,
                a.expert_hits + a.expert_misses,
                a.missed_bytes >> 20,
                a.asked_bytes >> 20,
                a.direct_bytes >> 20,
                a.warmed_bytes >> 20,
                seen.anonymous >> 20
            ));
            assert_eq!(a.fallbacks, [], "{what}");
            if ["BERTH_WARM", "BERTH_DIRECT"].contains(&env.0) {
                assert!(a.mode == "auto" && a.looks > 0 && a.expert_misses > 0, "{what}: {a:?}");
                // 12 tokens and the prompt, 6 blocks each with 4 experts of a token; the host's warm-up asks for all experts of a block.
                assert!(a.expert_hits + a.expert_misses >= 12 * 6 * 4, "{what}: {a:?}");
                assert!(a.missed_bytes > 0 && a.missed_bytes <= a.asked_bytes && a.missed_bytes <= a.looked_bytes, "{what}: {a:?}");
                // Each piece is an expert's matrix, grown to whole pages.
                assert!(a.asked_bytes <= a.looked_bytes + a.looked_bytes / 50, "{what}: {a:?}");
                assert!(a.warmed_bytes > 0, "{what}: {a:?}");
                assert!(a.direct_bytes == 0 || env.0 != "BERTH_DIRECT", "{what}: {a:?}");
                direct += a.direct_bytes;
                assert!(seen.log.contains("read ahead: ") && seen.log.contains("BERTH_WARM: "), "{what}: {}", seen.log);
            } else {
                let nothing = ReadAhead { mode: a.mode.clone(), ..ReadAhead::default() };
                assert_eq!(*a, nothing, "{what}");
                assert!(!seen.log.contains("read ahead: ") && !seen.log.contains("BERTH_WARM: "), "{what}: {}", seen.log);
            }
        }
    }
    assert!(direct > 0, "nothing was read past the page cache");
    // The control: the limit is one.
    match run(&host, "", &[], limit, &["--load-mode", "none"]) {
        Err(Refused::Ended(why)) => cache::say(&format!("in anonymous memory: {}", why.lines().next().unwrap_or("?"))),
        other => panic!("{file} bytes fit into {limit:?} of anonymous memory: {other:?}"),
    }
}

/// While everything is in memory nobody looks, after a while.
#[test]
fn with_everything_in_memory_the_search_ends() {
    let Some(host) = hosts::require("sdist-dl") else { return };
    let _one = one_at_a_time();
    let seen = run(&host, "CPU_MMAP", &[], None, &[]).unwrap();
    let again = run(&host, "CPU_MMAP", &[("BERTH_READAHEAD", "on")], None, &[]).unwrap();
    // The first start may have brought the model into memory; in the second it is there.
    let blocks = again.ahead.looks;
    assert!(blocks > 64, "{:?}", again.ahead);
    assert_eq!((again.ahead.expert_misses, again.tokens == seen.tokens), (0, true), "{:?}", again.ahead);
    let calm = run(&host, "CPU_MMAP", &[], None, &[]).unwrap().ahead;
    assert!(calm.expert_misses == 0 && calm.looks < blocks, "{calm:?}, {blocks} blocks");
}

#[derive(Debug)]
enum Refused {
    NoCgroup(String),
    Ended(String),
}

/// Starts a server with the experts in a buffer type of Berth's, none if it has no name, and asks it for a few tokens.
fn run(host: &Host, ty: &str, env: &[(&str, &str)], limit: Option<u64>, args: &[&str]) -> Result<Seen, Refused> {
    let scratch = Scratch::new();
    let group = limit.map(|limit| Cgroup::new("above-ram", limit)).transpose().map_err(Refused::NoCgroup)?;
    let report = scratch.path().join("report.json");
    let text = |p: PathBuf| p.to_str().unwrap().to_owned();
    let mut options =
        Options { context: 256, cgroup: group.as_ref().map(Cgroup::procs), ..Options::default() }.arg(&["-lv", "4"]).arg(args);
    if !ty.is_empty() {
        options = options.with_berth(&berth_lib().unwrap(), &format!("exps={ty}")).env("BERTH_REPORT", text(report.clone()));
        options = options.env("BERTH_ARENA_DIR", text(scratch.dir("arena")));
    }
    for (name, value) in env {
        options = options.env(name, *value);
    }
    if limit.is_some() {
        // What is cached already counts for whoever read it.
        drop_caches();
    }
    let ended = |e: anyhow::Error| Refused::Ended(format!("{e:#}"));
    let server = Server::start(host, &model(), &options).map_err(ended)?;
    let tokens = server.complete("Once upon a time", 12).map_err(ended)?.tokens;
    let status = fs::read_to_string(server.proc("status")).unwrap();
    let anonymous =
        status.lines().find_map(|l| l.strip_prefix("RssAnon:")).unwrap().trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10;
    let killed = group.as_ref().and_then(Cgroup::killed).unwrap_or(0);
    let log = server.stop().map_err(ended)?;
    let ahead = if ty.is_empty() { ReadAhead::default() } else { Report::read(&report).unwrap().read_ahead };
    Ok(Seen { tokens, anonymous, buffers: buffers(&log), killed, ahead, log })
}

/// The sizes of the context's buffers: `CPU compute buffer size = 12.34 MiB`, and so on.
fn buffers(log: &str) -> u64 {
    let size = |line: &str| {
        let (name, size) = line.split_once("buffer size =")?;
        let mib: f64 = size.trim().strip_suffix("MiB")?.trim().parse().ok()?;
        (!name.contains("model")).then_some((mib * f64::from(1 << 20)) as u64)
    };
    let all: Vec<u64> = log.lines().filter_map(size).collect();
    assert!(!all.is_empty(), "the server does not say its buffers:\n{log}");
    all.iter().sum()
}

fn model() -> PathBuf {
    models::random(&SPEC).unwrap_or_else(|e| panic!("{e:#}"))
}

/// One server at a time: they share a disk, a page cache and two cores.
fn one_at_a_time() -> std::sync::MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn drop_caches() {
    let synced = Command::new("sync").status().is_ok_and(|s| s.success());
    if !synced || fs::write("/proc/sys/vm/drop_caches", "3").is_err() {
        cache::say("the page cache cannot be dropped here: pages of an earlier start may count for nobody");
    }
}
