//! `berth_arena_*` from C: `c/arena_peer.c` takes pieces in a file, outside of one, from many threads, from a full disk, and misuses it all.

#[path = "support/misuse.rs"]
mod misuse;
#[path = "support/peer.rs"]
mod peer;
#[path = "support/scratch.rs"]
mod scratch;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use ffi_tests::{berth_lib, skip};
use peer::Compile;
use scratch::Scratch;

fn build(scratch: &Scratch) -> PathBuf {
    let lib = scratch.dir("lib");
    for file in ["libberth.so", "libberth.so.0"] {
        symlink(berth_lib().unwrap(), lib.join(file)).unwrap();
    }
    let with = |option: &str, path: &Path| format!("{option}{}", path.display());
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../include");
    let compile = Compile::c("cc").arg("-Wpedantic").arg(with("-I", &include)).arg(peer::source("arena_peer.c"));
    let compile = compile.arg(with("-L", &lib)).args(["-lberth", "-pthread"]).arg(with("-Wl,-rpath,", &lib));
    compile.to(scratch.path().join("arena_peer"))
}

/// Runs the command with its directories; nothing may be left in them.
fn check(scratch: &Scratch, mut command: Command, small: &Path, checks: usize) -> String {
    let (arena, bad) = (scratch.dir("arena"), scratch.path().join("bad"));
    fs::write(&bad, "no directory").unwrap();
    let said = peer::succeeds({
        command.args([&arena, &bad]).arg(small);
        command
    });
    let count = said.stdout.lines().find_map(|l| l.strip_prefix("ok: ")?.strip_suffix(" checks")?.parse::<usize>().ok());
    assert!(count.is_some_and(|n| n >= checks), "{}", said.stdout);
    assert_eq!(fs::read_dir(&arena).unwrap().count(), 0, "a file was left");
    said.stdout
}

#[test]
fn pieces_lie_in_a_file_or_it_is_said_why_not() {
    let scratch = Scratch::new();
    let program = build(&scratch);
    check(&scratch, peer::plain(&program), Path::new("-"), 80);
    if let Some(command) = peer::valgrind(&program) {
        let said = check(&scratch, command, Path::new("-"), 80);
        misuse::tell("c/arena_peer.c", "under valgrind", &said);
    }
}

#[test]
fn a_file_system_without_room_is_told_and_ordinary_memory_serves() {
    let scratch = Scratch::new();
    let (program, small) = (build(&scratch), scratch.dir("small"));
    let mut unshare = peer::plain("unshare");
    let script = r#"mount -t tmpfs -o size=8m berth-test "$1" && shift && exec "$@""#;
    unshare.args(["-m", "sh", "-c", script, "sh"]).arg(&small);
    let mut probe = peer::plain("unshare");
    probe.args(["-m", "true"]);
    if !probe.output().is_ok_and(|o| o.status.success()) {
        return skip::skipped("a small file system", "unshare -m does not work here");
    }
    unshare.arg(program);
    check(&scratch, unshare, &small, 85);
}

#[test]
fn a_bad_setting_is_an_error_even_where_nothing_depends_on_it() {
    let scratch = Scratch::new();
    let program = build(&scratch);
    for (name, value) in [("BERTH_FILL", "odd"), ("BERTH_REPORT", "relative")] {
        let mut command = peer::plain(&program);
        command.arg(scratch.dir("arena")).args(["/dev/null", "-"]).env(name, value).env("BERTH_TEST_BAD_SETTING", "1");
        let said = peer::succeeds(command);
        assert_eq!(said.stdout, "ok: 3 checks\n", "{name}");
    }
}

#[test]
fn strict_refuses_what_would_not_lie_in_the_file() {
    let scratch = Scratch::new();
    let mut command = peer::plain(build(&scratch));
    command.env("BERTH_STRICT", "1");
    check(&scratch, command, Path::new("-"), 5);
}
