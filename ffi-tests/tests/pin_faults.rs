//! Page-locked memory against a driver that fails on command, from a C program over ggml's tables: what falls back, what is given back, and that
//! the driver is not called when it must not be.

#[path = "support/cgroup.rs"]
mod cgroup;
#[path = "support/cuda.rs"]
mod cuda;
#[path = "support/ggml.rs"]
mod ggml;
#[expect(dead_code, reason = "shared with tests that use more of it")]
#[path = "support/peer.rs"]
mod peer;
#[path = "support/scratch.rs"]
mod scratch;
#[path = "support/wrap.rs"]
mod wrap;

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use cgroup::Cgroup;
use cuda::Calls;
use ffi_tests::hosts::{self, Host};
use ffi_tests::report::{Buffer, Report};
use ffi_tests::run::{self, Output};
use ffi_tests::{berth_lib, skip};
use peer::Compile;
use scratch::Scratch;

const MIB: usize = 1 << 20;

/// More than the first chunk, so that there are two.
const TWO_CHUNKS: usize = 300 * MIB;

struct Peer {
    scratch: Scratch,
    program: PathBuf,
    driver: PathBuf,
}

struct Seen {
    output: Output,
    calls: Calls,
    report: Report,
}

impl Seen {
    fn buffer(&self) -> &Buffer {
        self.report.buffers.iter().find(|b| b.asked == "CUDA_Host").expect("a buffer of CUDA_Host")
    }

    fn reason(&self) -> Option<&str> {
        self.buffer().reason.as_deref()
    }
}

impl Peer {
    fn new(host: &Host) -> Peer {
        let scratch = Scratch::new();
        let compile = Compile::c("cc").arg("-Wno-pedantic").arg(peer::source("pin_peer.c"));
        let program = ggml::against(host, &["ggml-base"], compile).to(scratch.path().join("pin_peer"));
        let driver = cuda::fake_driver(&scratch.path().join("driver"));
        Peer { scratch, program, driver }
    }

    fn command(&self, args: &[&str], env: &[(&str, &str)]) -> Command {
        let mut command = peer::plain(&self.program);
        command.arg(berth_lib().unwrap()).args(args).env("LD_LIBRARY_PATH", &self.driver);
        command.env("BERTH_ARENA_DIR", self.scratch.dir("arena")).env("BERTH_REPORT", self.scratch.path().join("report.json"));
        command.env("FAKE_CUDA_LOG", self.scratch.path().join("calls")).envs(env.iter().copied());
        command
    }

    fn start(&self, command: Command, what: &str) -> Seen {
        let log = self.scratch.path().join("calls");
        let _ = std::fs::remove_file(&log);
        let output = run::run(command, Duration::from_secs(120)).and_then(|o| o.checked(what)).unwrap_or_else(|e| panic!("{e:#}"));
        assert!(output.stdout.contains("ok: "), "{what}: {}", output.stdout);
        assert_eq!(std::fs::read_dir(self.scratch.path().join("arena")).unwrap().count(), 0, "{what}: a file is left");
        let report = Report::read(&self.scratch.path().join("report.json")).unwrap_or_else(|e| panic!("{e:#}"));
        Seen { output, calls: Calls::read(&log), report }
    }

    fn run(&self, args: &[&str], env: &[(&str, &str)]) -> Seen {
        self.start(self.command(args, env), &format!("{args:?} {env:?}"))
    }

    fn use_of(&self, bytes: usize, env: &[(&str, &str)]) -> Seen {
        self.run(&["use", &bytes.to_string(), "5"], env)
    }
}

fn peer() -> Option<Peer> {
    hosts::require("sdist-dl").map(|host| Peer::new(&host))
}

#[test]
fn both_methods_lock_everything_and_give_it_back() {
    let Some(peer) = peer() else { return };
    for (method, call) in
        [("alloc", "cuMemHostAlloc"), ("register", "cuMemHostRegister"), ("", "cuMemHostRegister"), ("mapping", "cuMemHostRegister")]
    {
        let seen = peer.use_of(TWO_CHUNKS, &[("BERTH_PIN", method)]);
        assert_eq!((seen.buffer().got.as_str(), seen.reason()), ("pinned", None), "{method}");
        assert_eq!((seen.buffer().pinned_bytes, seen.report.pinned), (TWO_CHUNKS as u64, 0), "{method}: all of it, and none at the end");
        assert_eq!(seen.calls.good(call), if call == "cuMemHostAlloc" { 1 } else { 2 }, "{method}: {:?}", seen.calls);
        assert!(seen.calls.balanced(method, false) >= TWO_CHUNKS);
    }
    // The device that the settings name.
    let seen = peer.use_of(MIB, &[("BERTH_CUDA_DEVICE", "1")]);
    assert!(seen.calls.0.iter().any(|c| c.name == "cuDeviceGet" && c.args[0] == 1), "{:?}", seen.calls);
    let seen = peer.use_of(MIB, &[("BERTH_CUDA_DEVICE", "7")]);
    assert_eq!((seen.buffer().pinned_bytes, seen.reason()), (0, Some("no_cuda_driver")));
}

#[test]
fn every_error_of_every_call_falls_back_and_loses_nothing() {
    let Some(peer) = peer() else { return };
    let calls = [
        "cuInit",
        "cuDeviceGet",
        "cuDeviceGetAttribute",
        "cuDevicePrimaryCtxRetain",
        "cuDevicePrimaryCtxRelease",
        "cuCtxPushCurrent",
        "cuCtxPopCurrent",
        "cuMemHostAlloc",
        "cuMemFreeHost",
        "cuMemHostRegister",
        "cuMemHostUnregister",
    ];
    // The last one is in no list.
    let codes = [1, 2, 3, 4, 46, 100, 201, 304, 700, 712, 719, 801, 999, 123_456];
    let mut fallbacks = 0;
    for method in ["alloc", "register"] {
        for call in calls {
            for code in codes {
                let what = format!("{method}: {call}:{code}");
                let fail = format!("{call}:{code}");
                // The peer's own context would be in the way of calls that fail always.
                let seen = peer.use_of(4 * MIB, &[("BERTH_PIN", method), ("FAKE_CUDA_FAIL", &fail), ("PEER_COPY", "0")]);
                let made = seen.calls.0.iter().any(|c| c.name == call);
                let gives_back = ["cuMemFreeHost", "cuMemHostUnregister", "cuDevicePrimaryCtxRelease", "cuCtxPopCurrent"].contains(&call);
                let fatal = cuda::FATAL.contains(&code);
                let other = call == "cuMemHostAlloc" && method == "register" || call == "cuMemHostRegister" && method == "alloc";
                // An attribute that cannot be asked is one that the device lacks; `alloc` needs none.
                let fine = gives_back || other || call == "cuDeviceGetAttribute" && method == "alloc" && !fatal;
                let locked = seen.calls.balanced(&what, gives_back || fatal);
                if fine {
                    assert_eq!((seen.buffer().got.as_str(), seen.reason()), ("pinned", None), "{what}");
                    assert!(locked >= 4 * MIB, "{what}");
                } else {
                    fallbacks += 1;
                    assert!(made, "{what}: never called");
                    assert_eq!((seen.buffer().got.as_str(), seen.buffer().pinned_bytes), ("pageable", 0), "{what}");
                    let reason = seen.reason().unwrap();
                    assert!(["no_cuda_driver", "pin_failed"].contains(&reason), "{what}: {reason}");
                    let message = seen.buffer().message.clone().unwrap();
                    assert!(
                        call == "cuDeviceGetAttribute" || message.contains(call) && message.contains(&code.to_string()),
                        "{what}: {message}"
                    );
                    let said = seen.output.stdout.contains("warnings: 1\n");
                    assert!(said, "{what}: one line about it: {}", seen.output.stdout);
                }
                seen.calls.ends_with_a_fatal_error(&what);
                assert_eq!(seen.report.pinned, 0, "{what}");
            }
        }
    }
    assert!(fallbacks > 100, "{fallbacks}");
}

#[test]
fn what_cannot_be_unlocked_stays_where_it_is_and_a_line_says_so() {
    let Some(peer) = peer() else { return };
    for (method, fail) in [("register", "cuMemHostUnregister:1"), ("alloc", "cuMemFreeHost:1"), ("register", "cuCtxPopCurrent:1")] {
        let seen = peer.use_of(4 * MIB, &[("BERTH_PIN", method), ("FAKE_CUDA_FAIL", fail), ("PEER_COPY", "0")]);
        let lines = if fail.contains("Pop") { 0 } else { 1 };
        assert!(seen.output.stdout.contains(&format!("warnings: {lines}\n")), "{fail}: {}", seen.output.stdout);
        assert!(seen.output.stdout.contains(&format!("still mapped: {lines}\n")), "{fail}: {}", seen.output.stdout);
    }
    // It is tried before the buffer is freed, when what is locked is shortened: 256, 222 and not 222 MiB; then no piece goes on or off any more.
    let fail = "cuMemHostRegister:1:4,cuMemHostRegister:1:5,cuMemHostUnregister:1:2";
    let env = [("FAKE_CUDA_LARGEST", "268435456"), ("FAKE_CUDA_FAIL", fail), ("PEER_COPY", "0")];
    let seen = peer.run(&["use", &(700 * MIB).to_string(), "7"], &env);
    assert!(seen.output.stdout.contains("still mapped: 1\n"), "{}: {:?}", seen.output.stdout, seen.calls);
    assert_eq!(seen.calls.good("cuMemHostUnregister"), 1, "{:?}", seen.calls);
}

/// Small pieces of the driver's need not begin on a page; those of `CUDA_Host` must.
#[test]
fn what_the_driver_allocates_begins_on_a_page() {
    let Some(peer) = peer() else { return };
    let seen = peer.run(&["use", "4095", "1", "3"], &[("BERTH_PIN", "alloc"), ("FAKE_CUDA_OFFSET", "512"), ("PEER_COPY", "0")]);
    assert_eq!((seen.buffer().got.as_str(), seen.reason()), ("pinned", None));
    seen.calls.balanced("offset", false);
}

/// Both phases of a load tell how far they are: bytes before, bytes and rate meanwhile and at the end.
#[test]
fn locking_and_filling_show_themselves() {
    let Some(peer) = peer() else { return };
    let slow = [("FAKE_CUDA_SLOW", "cuMemHostRegister:5100"), ("PEER_LOG", "1"), ("PEER_COPY", "0")];
    let seen = peer.use_of(TWO_CHUNKS, &slow);
    let lines: Vec<&str> = seen.output.stdout.lines().filter(|l| l.starts_with("info: berth: ")).collect();
    let of = [
        "CUDA_Host: page-locking 314572800 bytes (300.00 MiB, register; 0 are locked)",
        "CUDA_Host: page-locked so far: 256.00 MiB in 5.",
        "CUDA_Host: page-locked: 300.00 MiB in 10.",
        "filled: ",
    ];
    let mut at = lines.iter();
    for want in of {
        assert!(at.any(|l| l.contains(want) && (want.contains("page-locking") || l.contains(" GB/s"))), "{want}: {lines:#?}");
    }
    assert_eq!((seen.buffer().got.as_str(), seen.reason()), ("pinned", None), "two calls of five seconds are not too slow to begin with");
}

#[test]
fn a_chunk_that_fails_leaves_those_before_it_and_no_tensor_is_locked_in_part() {
    let Some(peer) = peer() else { return };
    for (fail, reason) in
        [("cuMemHostRegister:1:2", "pin_failed"), ("cuMemHostRegister:712:2", "pin_failed"), ("cuMemHostRegister:2:2", "pin_failed")]
    {
        // The copies of the five tensors are made: the driver refuses one that is locked in part.
        let seen = peer.use_of(TWO_CHUNKS, &[("FAKE_CUDA_FAIL", fail)]);
        let buffer = seen.buffer();
        assert_eq!((buffer.got.as_str(), seen.reason()), ("partly_pinned", Some(reason)), "{fail}");
        // Tensors of 60 MiB: four of them lie in the first 256 MiB.
        let step = TWO_CHUNKS / 5 / 4096 * 4096;
        assert_eq!(buffer.pinned_bytes as usize, 4 * step, "{fail}");
        assert!(
            buffer.message.as_deref().is_some_and(|m| m.contains("268435456 bytes (256.00 MiB) are page-locked")),
            "{:?}",
            buffer.message
        );
        seen.calls.balanced(fail, false);
        assert!(seen.calls.good("cuMemcpyHtoD") == 5, "{:?}", seen.calls);
    }
    // If what is left of a chunk cannot be locked again, all is given back: it would end inside of another tensor.
    let seen = peer.use_of(TWO_CHUNKS, &[("FAKE_CUDA_FAIL", "cuMemHostRegister:1:2,cuMemHostRegister:1:3")]);
    assert_eq!(seen.buffer().got, "partly_pinned");
    // Strict: a part is not enough, and nothing stays.
    let mut command =
        peer.command(&["use", &TWO_CHUNKS.to_string(), "5"], &[("FAKE_CUDA_FAIL", "cuMemHostRegister:1:2"), ("BERTH_STRICT", "1")]);
    command.env("FAKE_CUDA_LOG", peer.scratch.path().join("strict")).env("PEER_COPY", "0");
    let output = run::run(command, Duration::from_secs(60)).unwrap();
    assert!(!output.success() && output.stdout.contains("BERTH_STRICT is on"), "{}", output.stdout);
    Calls::read(&peer.scratch.path().join("strict")).balanced("strict", false);
}

#[test]
fn a_driver_with_less_memory_gives_what_it_has() {
    let Some(peer) = peer() else { return };
    const ALL: usize = 900 * MIB;
    let limit = (600 * MIB).to_string();
    let seen = peer.run(&["use", &ALL.to_string(), "9"], &[("FAKE_CUDA_IN_ALL", &limit)]);
    let pinned = seen.buffer().pinned_bytes as usize;
    assert_eq!((seen.buffer().got.as_str(), seen.reason()), ("partly_pinned", Some("pin_failed")));
    // 256 MiB, then 644 that are refused, then 322: whole tensors of them.
    assert!((500 * MIB..=600 * MIB).contains(&pinned), "{pinned}");
    assert!(seen.calls.balanced("less", false) <= 600 * MIB);
    // In one piece there is less to be had.
    let seen = peer.run(&["use", &ALL.to_string(), "9"], &[("FAKE_CUDA_IN_ALL", &limit), ("BERTH_PIN", "alloc")]);
    assert_eq!((seen.buffer().pinned_bytes, seen.reason()), (0, Some("pin_failed")));
}

#[test]
fn a_slow_driver_is_given_up() {
    let Some(peer) = peer() else { return };
    let seen = peer.use_of(TWO_CHUNKS, &[("FAKE_CUDA_SLOW", "cuMemHostRegister:10500")]);
    assert_eq!((seen.buffer().got.as_str(), seen.reason()), ("partly_pinned", Some("pin_slow")));
    assert_eq!(seen.calls.good("cuMemHostRegister"), 2, "one chunk, and once more up to a tensor's end: {:?}", seen.calls);
    seen.calls.balanced("slow", false);
    let line = |text: &str| seen.output.stderr.contains(text) || seen.output.stdout.contains(text);
    assert!(seen.buffer().message.as_deref().is_some_and(|m| m.contains("was given up")) || line("was given up"));
}

#[test]
fn the_limit_is_heeded_and_the_part_that_fits_is_locked() {
    let Some(peer) = peer() else { return };
    let limit = (100 * MIB).to_string();
    for (args, want) in
        [(vec!["use", "209715200", "10"], vec![104_857_600]), (vec!["use", "62914560", "3", "3"], vec![62_914_560, 41_943_040, 0])]
    {
        let seen = peer.run(&args, &[("BERTH_PIN_LIMIT", &limit)]);
        let pinned: Vec<u64> = seen.report.buffers.iter().filter(|b| b.asked == "CUDA_Host").map(|b| b.pinned_bytes).collect();
        assert!(pinned.iter().sum::<u64>() <= 100 << 20, "{pinned:?}");
        // Whole tensors of 20 MiB.
        assert_eq!(pinned, want, "{args:?}");
        let last = seen.report.buffers.iter().rfind(|b| b.asked == "CUDA_Host").unwrap();
        assert_eq!(last.reason.as_deref(), Some("pin_budget"));
        assert!(last.message.as_deref().is_some_and(|m| m.contains("the limit of 104857600 bytes")), "{:?}", last.message);
        seen.calls.balanced("limit", false);
    }
    let seen = peer.use_of(4 * MIB, &[("BERTH_PIN_LIMIT", "0%")]);
    assert_eq!((seen.buffer().pinned_bytes, seen.reason()), (0, Some("pin_budget")));
}

#[test]
fn switches_are_heeded_without_a_call() {
    let Some(peer) = peer() else { return };
    for env in [("BERTH_PIN", "off"), ("GGML_CUDA_NO_PINNED", "")] {
        let mut command = peer.command(&["use", "4194304", "3"], &[env, ("PEER_COPY", "0")]);
        command.env("FAKE_CUDA_LOG", peer.scratch.path().join("calls"));
        let seen = peer.start(command, env.0);
        assert_eq!((seen.buffer().got.as_str(), seen.reason()), ("pageable", Some("pin_off")), "{env:?}");
        assert!(seen.buffer().message.as_deref().is_some_and(|m| m.contains(env.0)) && seen.calls.0.is_empty(), "{:?}", seen.calls);
    }
    // A device that cannot lock what it has not allocated.
    for (method, call) in [("", "cuMemHostAlloc"), ("register", "")] {
        let seen = peer.use_of(4 * MIB, &[("BERTH_PIN", method), ("FAKE_CUDA_ABILITY", "99:0")]);
        assert_eq!(seen.buffer().got == "pinned", !call.is_empty(), "{method}");
        assert_eq!(seen.calls.good("cuMemHostAlloc"), usize::from(!call.is_empty()), "{method}");
    }
}

#[test]
fn a_mapping_is_locked_as_a_whole_after_the_load_and_unlocked_before_it_goes() {
    let Some(peer) = peer() else { return };
    let file = peer.scratch.path().join("model");
    std::fs::write(&file, vec![7u8; 40 * MIB + 321]).unwrap();
    let args = ["mapping", file.to_str().unwrap()];
    let seen = peer.run(&args, &[("BERTH_PIN", "mapping")]);
    let buffers: Vec<&Buffer> = seen.report.buffers.iter().filter(|b| b.asked == "CUDA_Host").collect();
    assert!(
        buffers.len() == 2 && buffers.iter().all(|b| b.got == "mapped" && b.reason.is_none() && b.pinned_bytes == b.bytes),
        "{buffers:?}"
    );
    let locked: Vec<usize> = seen.calls.0.iter().filter(|c| c.name == "cuMemHostRegister-ro" && c.result == 0).map(|c| c.args[1]).collect();
    // Once, without the two pages (and what follows) that the host has unmapped.
    assert_eq!(locked, [(40 * MIB + 321) / 4096 * 4096 - 2 * 4096], "{:?}", seen.calls);
    seen.calls.balanced("mapping", false);
    for (env, reason) in [
        (("FAKE_CUDA_FAIL", "cuMemHostRegister:1"), "pin_failed"),
        (("FAKE_CUDA_ABILITY", "113:0"), "no_cuda_driver"),
        (("BERTH_PIN_LIMIT", "30M"), "pin_budget"),
        (("FAKE_CUDA_FAIL", "cuMemHostRegister:712"), "pin_failed"),
    ] {
        let seen = peer.run(&args, &[("BERTH_PIN", "mapping"), env]);
        assert_eq!((seen.buffer().got.as_str(), seen.reason(), seen.buffer().pinned_bytes), ("mapped", Some(reason), 0), "{env:?}");
        seen.calls.balanced("mapping", false);
    }
    // Slowly: the first piece of a large file; what is locked by then is given back, as a mapping is locked as a whole or not at all.
    let large = peer.scratch.path().join("large");
    std::fs::File::create(&large).unwrap().set_len(TWO_CHUNKS as u64).unwrap();
    let env = [("BERTH_PIN", "mapping"), ("FAKE_CUDA_SLOW", "cuMemHostRegister:10500")];
    let seen = peer.run(&["mapping", large.to_str().unwrap()], &env);
    assert_eq!((seen.buffer().got.as_str(), seen.buffer().pinned_bytes), ("mapped", 0));
    assert!(seen.report.buffers.iter().any(|b| b.reason.as_deref() == Some("pin_slow")), "{:?}", seen.report.buffers);
    seen.calls.balanced("slow mapping", false);
    // Strict: what is known before the mapping is used is refused, and the rest is an error line.
    let mut command = peer.command(&args, &[("BERTH_PIN", "mapping"), ("BERTH_STRICT", "1"), ("FAKE_CUDA_FAIL", "cuInit:100")]);
    command.env("PEER_COPY", "0");
    let output = run::run(command, Duration::from_secs(60)).unwrap();
    assert!(
        !output.success() && output.stdout.contains("no buffer over the mapping") && output.stdout.contains("BERTH_STRICT is on"),
        "{}",
        output.stdout
    );
    let seen = peer.run(&args, &[("BERTH_PIN", "mapping"), ("BERTH_STRICT", "1"), ("FAKE_CUDA_FAIL", "cuMemHostRegister:1")]);
    assert!(seen.output.stdout.contains("errors: ") && !seen.output.stdout.contains("errors: 0\n"), "{}", seen.output.stdout);
}

/// What lies behind a buffer may be unmapped as soon as it is freed.
#[test]
fn a_buffer_that_is_freed_while_its_mapping_is_locked_is_unlocked_first() {
    let Some(peer) = peer() else { return };
    let file = peer.scratch.path().join("model");
    std::fs::write(&file, vec![7u8; MIB]).unwrap();
    let env = [("BERTH_PIN", "mapping"), ("FAKE_CUDA_SLOW", "cuMemHostRegister:700"), ("PEER_COPY", "0")];
    let seen = peer.run(&["race", file.to_str().unwrap()], &env);
    let at = |name: &str| seen.calls.0.iter().position(|c| c.name == name && c.result == 0).unwrap_or_else(|| panic!("{:?}", seen.calls));
    let order = ["cuMemHostRegister-ro", "cuMemHostUnregister", "freed"].map(at);
    assert!(order.is_sorted(), "{order:?}: {:?}", seen.calls);
    seen.calls.balanced("race", false);
}

#[test]
fn a_forked_child_leaves_the_driver_alone_and_nothing_is_called_at_the_end() {
    let Some(peer) = peer() else { return };
    for method in ["alloc", "register"] {
        let seen = peer.run(&["fork", "4194304"], &[("BERTH_PIN", method), ("PEER_COPY", "0")]);
        let parent = seen.calls.0[0].process;
        assert!(seen.calls.0.iter().all(|c| c.process == parent), "{method}: {:?}", seen.calls);
        seen.calls.balanced(method, false);
        let seen = peer.run(&["leave", "4194304"], &[("BERTH_PIN", method), ("PEER_COPY", "0")]);
        let last = seen.calls.0.last().unwrap();
        assert_eq!((last.name.as_str(), seen.calls.good("cuMemFreeHost") + seen.calls.good("cuMemHostUnregister")), ("cuCtxPopCurrent", 0));
        assert_eq!((seen.report.pinned, seen.buffer().live), (4 << 20, true), "it is there to the end");
    }
}

/// 3 GiB in a cgroup of 2, with a driver and without one: a part is locked, and the rest lies in a file; with a limit of locked memory too.
#[test]
fn more_than_a_cgroup_has_never_gets_a_process_killed() {
    let Some(peer) = peer() else { return };
    const LIMIT: u64 = 2 << 30;
    const ASKED: u64 = 3 << 30;
    let tight = ["setpriv", "--inh-caps=-ipc_lock", "--bounding-set=-ipc_lock", "sh", "-c", "ulimit -l 8192 && exec \"$0\" \"$@\""];
    for with_driver in [true, false] {
        let group = match Cgroup::new("pin", LIMIT) {
            Ok(group) => group,
            Err(why) => return skip::skipped("page-locking in a cgroup", &why),
        };
        let what = format!("driver: {with_driver}");
        let mut command = peer.command(&["use", &ASKED.to_string(), "12"], &[("BERTH_LOCK", "1")]);
        if !with_driver {
            command.env("LD_LIBRARY_PATH", peer.scratch.dir("none"));
        }
        let seen = peer.start(group.wrap(wrap::wrap(&command, tight[0], &tight[1..])), &what);
        let (buffer, killed, most) = (seen.buffer(), group.killed().unwrap_or(0), group.most().unwrap());
        eprintln!("{what}: {} of {} bytes pinned, {} locked, at most {most} used", buffer.pinned_bytes, buffer.bytes, buffer.locked_bytes);
        assert_eq!(killed, 0, "{what}");
        assert!(most <= LIMIT, "{what}: {most}");
        if with_driver {
            assert_eq!((buffer.got.as_str(), buffer.reason.as_deref()), ("partly_pinned", Some("pin_budget")), "{what}");
            assert!((1 << 30..=LIMIT * 8 / 10).contains(&buffer.pinned_bytes), "{what}: {}", buffer.pinned_bytes);
            assert!(buffer.message.as_deref().is_some_and(|m| m.contains("in a file of the arena directory") && m.contains("cgroup")));
            seen.calls.balanced(&what, false);
        } else {
            assert_eq!(
                (buffer.got.as_str(), buffer.reason.as_deref(), buffer.pinned_bytes),
                ("arena", Some("no_cuda_driver"), 0),
                "{what}"
            );
        }
        // What is page-locked and what is locked with `mlock` share one limit.
        if !with_driver {
            assert!((7 << 20..=8 << 20).contains(&buffer.locked_bytes), "{what}: {}", buffer.locked_bytes);
        }
    }
}

/// The script for a machine with a GPU, without one: it builds, asks what it is to ask, and says what it was told.
#[test]
fn the_script_for_a_gpu_runs_and_shows_both_methods() {
    let scratch = Scratch::new();
    let driver = cuda::fake_driver(&scratch.path().join("driver"));
    let script = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("device/pin.sh");
    let run = |path: &std::path::Path| {
        let mut command = peer::plain("sh");
        command.arg(&script).arg(scratch.path().join("out")).env("LD_LIBRARY_PATH", path).env("PIN_GIB", "1");
        command.env("CARGO_TARGET_DIR", ffi_tests::target_dir().unwrap());
        run::run(command, Duration::from_secs(900)).and_then(|o| o.checked("pin.sh")).unwrap_or_else(|e| panic!("{e:#}")).stdout
    };
    let shown = run(&driver);
    for method in ["alloc", "register"] {
        let row = shown.lines().find(|l| l.starts_with(&format!("| 1 | {method} | "))).unwrap_or_else(|| panic!("{shown}"));
        assert!(row.contains("| 1.00 |") && row.contains("| yes, yes, yes |"), "{row}");
    }
    assert!(shown.contains("copy over two locked pieces: 0 (0 is expected)"), "{shown}");
    assert!(shown.contains("copy over the end of what is locked: 1 (1, invalid value, is expected)"), "{shown}");
    assert!(run(&scratch.dir("none")).starts_with("not measured: no CUDA driver") || std::path::Path::new("/dev/nvidia0").exists());
}
