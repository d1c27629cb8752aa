//! `BERTH_ARENA_PERSIST=1` in stock llama.cpp: the second start maps what the first has kept, and whatever happens in between, no start computes with
//! bytes that are not the model's.

#[path = "support/full.rs"]
mod full;
#[path = "support/place.rs"]
mod place;
#[path = "support/scratch.rs"]
mod scratch;

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant, SystemTime};

use ffi_tests::models::Spec;
use ffi_tests::report::Report;
use ffi_tests::run::{self, Server};
use ffi_tests::{cache, skip};
use place::{EXPERTS, HEADER, Place, SPEC, Start, stock};

/// Changes one byte of a file and hides that from its modification time.
fn flip(path: &Path, at: u64) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let (mut byte, modified) = ([0], file.metadata().unwrap().modified().unwrap());
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
    file.set_modified(modified).unwrap();
}

#[test]
fn the_second_start_maps_what_the_first_has_kept_and_writes_nothing() {
    let Some((place, _one)) = Place::new() else { return };
    let experts = SPEC.expert_bytes().unwrap();
    let first = place.expect("kept", None);
    assert_eq!((first.buffer.filled.read + first.buffer.filled.copied, first.buffer.filled.kept), (experts, 0));
    let (path, look) = (place.kept(), |p: &Path| fs::metadata(p).map(|m| (m.ino(), m.len(), m.blocks(), m.mtime())).unwrap());
    let before = look(&path);
    assert_eq!((first.lasting().file.as_deref(), before.1), (Some(path.as_path()), HEADER + first.buffer.bytes.next_multiple_of(HEADER)));
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
    for _ in 0..2 {
        let second = place.reused();
        assert_eq!((second.buffer.filled.read, second.buffer.filled.copied, second.buffer.filled.kept), (0, 0, experts));
        assert!(second.written < 1 << 20, "{} bytes were written", second.written);
        let (a, b) = (first.anonymous, second.anonymous);
        assert!(b < a + (8 << 20), "{b} bytes of anonymous memory, {a} where the file was built");
        assert!(second.log.contains("reused from"), "{}", second.log);
        assert_eq!(look(&path), before);
        let line =
            format!("{} MiB: first start {:?}, second {:?}, {} bytes written", experts >> 20, first.load, second.load, second.written);
        cache::say(&line);
    }
    place.verified();
    let listed = place.listed();
    assert_eq!((&listed[0]["state"], &listed[0]["in_use"]), (&"complete".into(), &false.into()), "{listed}");
    assert_eq!(listed[0]["models"][0].as_str().map(Path::new), place.model.canonicalize().ok().as_deref());
}

#[test]
fn a_prebuilt_host_keeps_and_reuses_too() {
    let Some((place, _one)) = Place::of("skulk", &SPEC) else { return };
    let (first, second) = (place.start(), place.start());
    assert_eq!((first.state(), second.state()), (("kept", None), ("reused", None)), "{:?}", second.lasting());
    assert_eq!(first.tokens, second.tokens);
}

#[test]
fn a_model_in_several_files_is_kept_and_each_of_them_counts() {
    let Some((mut place, _one)) = Place::new() else { return };
    let parts = ffi_tests::gguf::split::split(&place.model, place.scratch.path(), 3).unwrap_or_else(|e| panic!("{e:#}"));
    place.model = parts[0].clone();
    place.expect("kept", None);
    place.reused();
    for part in &parts {
        File::options().write(true).open(part).unwrap().set_modified(SystemTime::now()).unwrap();
        let start = place.expect("rebuilt", Some("model_changed"));
        let name = part.file_name().unwrap().to_str().unwrap();
        assert!(start.lasting().message.as_ref().unwrap().contains(name), "{:?}", start.lasting());
        place.reused();
    }
    place.verified();
}

/// The point of it all, with a model of more than 1 GiB that no cache holds.
#[test]
fn a_large_model_starts_many_times_faster_the_second_time() {
    if !full::full() {
        return;
    }
    let Some((place, _one)) = Place::of("sdist-dl", &Spec::LARGE) else { return };
    let drop_caches = || {
        let synced = Command::new("sync").status().is_ok_and(|s| s.success());
        synced && fs::write("/proc/sys/vm/drop_caches", "3").is_ok()
    };
    if !drop_caches() {
        return skip::skipped("a cold start", "the page cache cannot be dropped here");
    }
    // The host reads the whole model when it maps it, and all experts to warm up: neither is a part of filling a buffer.
    let options = || place.options(EXPERTS, true).arg(&["--no-warmup"]);
    let first = place.start_with(&options());
    drop_caches();
    let second = place.start_with(&options());
    let states = [&first, &second].map(|s| s.state().0.to_owned());
    assert_eq!(states, ["kept", "reused"]);
    assert!(first.tokens == second.tokens && second.written < 1 << 20);
    let experts = Spec::LARGE.expert_bytes().unwrap() >> 20;
    let (a, b) = (filling(&first.log), filling(&second.log));
    cache::say(&format!("{experts} MiB of experts are there after {a:?} at the first start, after {b:?} at the second"));
    assert!(b * 20 < a, "the second start takes {b:?}, the first {a:?}");
}

/// From the line about the new buffer to the one that it is kept, or was.
fn filling(log: &str) -> Duration {
    // "...0.05.100.211 I berth: ARENA: ..": dots of progress, then minutes, seconds, milliseconds, microseconds.
    let at = |what: &str| {
        let line = log.lines().find(|l| l.contains("berth: ARENA: ") && l.contains(what)).unwrap_or_else(|| panic!("no {what}:\n{log}"));
        let time = line.split_once(" I berth").unwrap().0.trim_start_matches('.');
        let parts: Vec<u64> = time.split('.').map(|n| n.parse().unwrap()).collect();
        Duration::from_micros(((parts[0] * 60 + parts[1]) * 1000 + parts[2]) * 1000 + parts[3])
    };
    at(if log.contains(" reused from ") { " reused from " } else { " kept for " }) - at(" arena in ")
}

#[test]
fn without_the_setting_nothing_is_kept_or_said() {
    let Some((place, _one)) = Place::new() else { return };
    let start = place.start_with(&place.options(EXPERTS, false));
    assert!(start.buffer.lasting.is_none() && place.files().is_empty());
    assert_eq!(&start.tokens, stock(&place.host));
}

#[test]
fn a_process_that_is_killed_leaves_nothing_that_is_trusted_wrongly() {
    let Some((place, _one)) = Place::new() else { return };
    // How long a load takes that is not killed.
    let start = Instant::now();
    assert!(place.spawn().wait().unwrap().success());
    let load = start.elapsed();
    let times = if full::full() { 100 } else { 30 };
    let mut random = fastrand::Rng::with_seed(7);
    let (mut complete, mut locks, mut nothing) = (0, 0, 0);
    for i in 0..times {
        for path in place.files() {
            fs::remove_file(path).unwrap();
        }
        let mut child = place.spawn();
        std::thread::sleep(load.mul_f64(random.f64()));
        // SIGKILL.
        child.kill().unwrap();
        child.wait().unwrap();
        let files = place.files();
        match files.as_slice() {
            [] => nothing += 1,
            [one] if one.extension().is_some_and(|e| e == "arena") => {
                complete += 1;
                place.verified();
            }
            [one] if one.extension().is_some_and(|e| e == "lock") => locks += 1,
            other => {
                // The file had its name, and its builder no time to remove its lock.
                assert!(other.len() == 2 && other[1].extension().is_some_and(|e| e == "lock"), "{other:?}");
                complete += 1;
                place.verified();
            }
        }
        if i % 5 == 0 {
            let start = place.start();
            assert_eq!(&start.tokens, stock(&place.host), "after kill {i}: {files:?}");
            assert!(["kept", "reused"].contains(&start.state().0), "{:?}", start.lasting());
            place.verified();
        }
    }
    cache::say(&format!("killed {times} times in {load:?}: {nothing} left nothing, {locks} a lock, {complete} a complete file"));
    assert!(locks > 0 || full::full(), "no kill came while a file was built");
}

#[test]
fn a_changed_model_is_built_anew() {
    let Some((place, _one)) = Place::new() else { return };
    place.expect("kept", None);
    type Change = fn(&Path);
    let changes: [(&str, Change); 3] = [
        ("touched", |p| File::options().write(true).open(p).unwrap().set_modified(SystemTime::now()).unwrap()),
        ("replaced by itself", |p| {
            fs::copy(p, p.with_extension("new")).unwrap();
            fs::rename(p.with_extension("new"), p).unwrap();
        }),
        // The time of modification is set back, the one of change cannot be.
        ("edited in its last byte, and hidden", |p| flip(p, fs::metadata(p).unwrap().len() - 1)),
    ];
    for (what, change) in changes {
        place.reused();
        change(&place.model);
        let start = place.start();
        assert_eq!(start.state(), ("rebuilt", Some("model_changed")), "{what}: {:?}", start.lasting());
        assert!(start.log.contains("built anew and kept"), "{what}: {}", start.log);
        place.kept();
        place.verified();
    }
    // The last one is another model.
    assert_eq!(place.start().state(), ("reused", None));
}

#[test]
fn damage_is_found_in_the_header_by_a_start_and_in_the_data_by_verify() {
    let Some((place, _one)) = Place::new() else { return };
    place.expect("kept", None);
    for (at, reason) in [(0, "damaged"), (9, "other_version"), (35, "damaged"), (4000, "damaged"), (4096, "damaged"), (5000, "damaged")] {
        flip(&place.kept(), at);
        place.expect("rebuilt", Some(reason));
        place.reused();
    }
    let cut = File::options().write(true).open(place.kept()).unwrap();
    let (len, modified) = cut.metadata().map(|m| (m.len(), m.modified().unwrap())).unwrap();
    cut.set_len(len - 4096).unwrap();
    cut.set_modified(modified).unwrap();
    place.expect("rebuilt", Some("damaged"));

    let tensors = place.reused().buffer.tensors;
    flip(&place.kept(), HEADER + tensors[0].bytes + 12_345);
    let output = place.berth(&["verify"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success() && text.contains("DAMAGED: 1 of 18") && text.contains(&tensors[1].name), "{text}");
    // Somebody who does not hide it is found out by a start.
    File::options().write(true).open(place.kept()).unwrap().write_all_at(b"x", HEADER).unwrap();
    place.expect("rebuilt", Some("modified"));
    place.verified();

    // At the edge of a tensor a start sees it, and the one after that has a good file again.
    flip(&place.kept(), HEADER + tensors[0].bytes.next_multiple_of(32));
    place.expect("not_kept", Some("other_tensors"));
    assert!(place.files().is_empty());
    place.expect("kept", None);
    place.reused();
}

#[test]
fn locked_pages_are_compared_as_they_are() {
    let Some((place, _one)) = Place::new() else { return };
    let locked = || place.start_with(&place.options(EXPERTS, true).arg(&["--load-mode", "mmap+mlock"]));
    for state in ["kept", "reused", "reused"] {
        let start = locked();
        assert_eq!((start.state(), &start.tokens), ((state, None), stock(&place.host)), "{:?}\n{}", start.lasting(), start.log);
    }
}

#[test]
fn files_of_others_are_left_alone_whatever_their_names() {
    let Some((place, _one)) = Place::new() else { return };
    let one = place.expect("kept", None).buffer.bytes.next_multiple_of(HEADER) + HEADER;
    let (first, other) = (place.kept(), place.arena().join("level1.arena"));
    fs::write(&other, vec![7; 1 << 20]).unwrap();
    let start = place.start_with(&place.options("blk.[0-2].*exps=ARENA", true).env("BERTH_ARENA_LIMIT", (one + 10).to_string()));
    assert_eq!(start.state(), ("kept", None));
    assert!(place.berth(&["gc"]).status.success());
    assert!(!first.exists() && fs::read(&other).unwrap() == vec![7; 1 << 20]);
    assert!(!place.listed().to_string().contains("level1"), "{}", place.listed());
}

#[test]
fn files_that_others_could_have_made_are_not_trusted() {
    let Some((place, _one)) = Place::new() else { return };
    place.expect("kept", None);
    let path = place.kept();
    let elsewhere = place.scratch.path().join("elsewhere");
    fs::rename(&path, &elsewhere).unwrap();
    symlink(&elsewhere, &path).unwrap();
    let before = fs::metadata(&elsewhere).unwrap().ino();
    place.expect("rebuilt", Some("untrusted"));
    assert!(!path.symlink_metadata().unwrap().is_symlink() && fs::metadata(&elsewhere).unwrap().ino() == before);
    fs::set_permissions(&path, PermissionsExt::from_mode(0o666)).unwrap();
    place.expect("rebuilt", Some("untrusted"));
    if std::os::unix::fs::chown(&path, Some(65_534), None).is_ok() {
        place.expect("rebuilt", Some("untrusted"));
    } else {
        skip::skipped("a file of another user", "only root may give one away");
    }
    place.reused();
    fs::set_permissions(place.arena(), PermissionsExt::from_mode(0o777)).unwrap();
    place.expect("not_kept", Some("untrusted"));
}

#[test]
fn two_processes_at_once_keep_one_file_and_compute_the_same() {
    let Some((place, _one)) = Place::new() else { return };
    for round in 0..3 {
        let starts: Vec<Start> = std::thread::scope(|scope| {
            let one = |i: usize| {
                let place = &place;
                scope.spawn(move || {
                    let report = place.scratch.path().join(format!("report-{i}.json"));
                    let options = place.options(EXPERTS, true).env("BERTH_REPORT", report.to_str().unwrap());
                    let server = Server::start(&place.host, &place.model, &options).unwrap_or_else(|e| panic!("{e:#}"));
                    let buffer = Report::read(&report).unwrap().asked("ARENA").next().unwrap().clone();
                    let tokens = server.complete("Once upon a time", 8).unwrap().tokens;
                    Start { tokens, buffer, written: 0, anonymous: 0, load: server.load_time, log: server.stop().unwrap() }
                })
            };
            let threads: Vec<_> = (0..2).map(one).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        let mut states: Vec<&str> = starts.iter().map(|s| s.state().0).collect();
        states.sort_unstable();
        assert_eq!(states, ["kept", "reused"], "round {round}");
        assert!(starts.iter().all(|s| &s.tokens == stock(&place.host)));
        place.verified();
        fs::remove_file(place.kept()).unwrap();
    }
}

#[test]
fn a_builder_that_does_not_end_is_not_waited_for_for_ever() {
    let Some((place, _one)) = Place::new() else { return };
    if !full::full() {
        return;
    }
    let name = place.expect("kept", None).lasting().file.clone().unwrap();
    fs::remove_file(&name).unwrap();
    let mut lock = name.into_os_string();
    lock.push(".lock");
    let mut holder = Command::new("flock").arg(&lock).args(["sleep", "100"]).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(300));
    place.expect("not_kept", Some("busy"));
    holder.kill().unwrap();
    holder.wait().unwrap();
}

#[test]
fn the_limit_keeps_what_was_used_last() {
    let Some((place, _one)) = Place::new() else { return };
    let one = place.expect("kept", None).buffer.bytes.next_multiple_of(HEADER) + HEADER;
    let first = place.kept();
    let limited = |rules: &str, limit: u64| place.start_with(&place.options(rules, true).env("BERTH_ARENA_LIMIT", limit.to_string()));
    let half = "blk.[0-2].*exps=ARENA";
    let start = limited(half, 1 << 20);
    assert_eq!(start.state(), ("not_kept", Some("limit")), "{:?}", start.lasting());
    assert!(start.log.contains("not kept for the next start"), "{}", start.log);
    assert_eq!(place.kept(), first);
    let start = limited(half, one + 10);
    assert_eq!((start.state(), &start.tokens), (("kept", None), stock(&place.host)));
    assert!(!first.exists() && place.files().len() == 1);
    let start = limited(EXPERTS, 2 * one);
    assert_eq!(start.state(), ("kept", None));
    assert_eq!(place.files().len(), 2);
}

#[test]
fn buffers_of_one_size_are_not_taken_for_each_other() {
    let Some((place, _one)) = Place::new() else { return };
    let halves = ["blk.[0-2].*exps=ARENA", "blk.[3-5].*exps=ARENA"];
    for state in ["kept", "reused"] {
        for rules in halves {
            let start = place.start_with(&place.options(rules, true));
            assert_eq!((start.state(), &start.tokens), ((state, None), stock(&place.host)), "{rules}: {:?}", start.lasting());
        }
    }
    assert_eq!(place.files().len(), 2);
    place.verified();
}

#[test]
fn what_the_host_reads_by_itself_is_not_kept() {
    let Some((place, _one)) = Place::new() else { return };
    place.expect("kept", None);
    let start = place.start_with(&place.options(EXPERTS, true).arg(&["--load-mode", "none"]));
    assert_eq!((start.state(), &start.tokens), (("not_kept", Some("no_file")), stock(&place.host)), "{:?}", start.lasting());
    place.reused();
}

#[test]
fn a_full_disk_is_told_and_the_text_is_the_same() {
    let Some((place, _one)) = Place::new() else { return };
    let mut probe = Command::new("unshare");
    if !probe.args(["-m", "true"]).output().is_ok_and(|o| o.status.success()) {
        return skip::skipped("a small file system", "unshare -m does not work here");
    }
    let experts = SPEC.expert_bytes().unwrap().next_multiple_of(HEADER);
    let plain = place.completion().env_remove("BERTH_ARENA_PERSIST").output().unwrap().stdout;
    let cases = [
        // Not enough for the data; for the data alone; for all, but for no other file; for all.
        (experts / 2, 100, "pageable", None),
        (experts + 4096, 100, "pageable", None),
        (experts + HEADER + 4096, 2, "arena", Some(("not_kept", Some("io")))),
        (experts + HEADER + 8192, 3, "arena", Some(("kept", None))),
    ];
    for (size, inodes, got, lasting) in cases {
        let inner = place.completion();
        let mut command = Command::new("unshare");
        run::clean_env(&mut command);
        let script = format!(r#"mount -t tmpfs -o mode=700,size={size},nr_inodes={inodes} berth-test "$1" && shift && exec "$@""#);
        command.args(["-m", "sh", "-c", &script, "sh"]).arg(place.arena()).arg(inner.get_program()).args(inner.get_args());
        command.envs(inner.get_envs().filter_map(|(k, v)| Some((k, v?))));
        let output =
            run::run(command, Duration::from_secs(120)).unwrap().checked("a small file system").unwrap_or_else(|e| panic!("{e:#}"));
        let report = Report::read(&place.scratch.path().join("report.json")).unwrap();
        let buffer = report.buffers.iter().find(|b| b.asked == "ARENA" && b.bytes > 0).unwrap();
        let state = buffer.lasting.as_ref().map(|l| (l.state.as_str(), l.reason.as_deref()));
        assert_eq!((buffer.got.as_str(), state), (got, lasting), "{size} bytes, {inodes} inodes: {buffer:?}\n{}", output.stderr);
        // The stock program may lose the end of what it writes.
        let common = output.stdout.len().min(plain.len());
        assert_eq!(output.stdout.as_bytes()[..common], plain[..common]);
    }
}

#[test]
fn files_are_listed_removed_and_cleared_away() {
    let Some((place, _one)) = Place::new() else { return };
    let text = |o: &Output| String::from_utf8_lossy(&o.stdout).into_owned() + &String::from_utf8_lossy(&o.stderr);
    place.expect("kept", None);
    let server = Server::start(&place.host, &place.model, &place.options(EXPERTS, true)).unwrap();
    let name = place.kept().file_name().unwrap().to_str().unwrap().to_owned();
    assert_eq!(place.listed()[0]["in_use"], true);
    let refused = place.berth(&["rm", &name]);
    assert!(!refused.status.success() && text(&refused).contains("a process uses"), "{}", text(&refused));
    server.stop().unwrap();
    File::options().write(true).open(&place.model).unwrap().set_modified(SystemTime::now()).unwrap();
    let listed = place.listed();
    assert_eq!((&listed[0]["state"], &listed[0]["reason"]), (&"stale".into(), &"model_changed".into()), "{listed}");
    let shown = text(&place.berth(&["ls"]));
    assert!(shown.starts_with("stale") && shown.contains("has changed") && shown.contains(&name), "{shown}");
    fs::write(place.arena().join("old.arena.lock"), "1").unwrap();
    fs::write(place.arena().join("old.arena"), "BERTHARN, once").unwrap();
    fs::write(place.arena().join("other"), "nothing of Berth's").unwrap();
    let cleared = text(&place.berth(&["gc"]));
    assert!(cleared.contains("freed"), "{cleared}");
    assert_eq!(place.files(), [place.arena().join("other")], "{cleared}");
    place.expect("kept", None);
    let removed = place.berth(&["rm", &name]);
    assert!(removed.status.success(), "{}", text(&removed));
    assert_eq!(place.files().len(), 1);
    for bad in ["../x.arena", "other", "missing.arena"] {
        assert!(!place.berth(&["rm", bad]).status.success(), "{bad}");
    }
    assert!(place.berth(&["ls", "--json"]).stdout.starts_with(b"[]"));
}
