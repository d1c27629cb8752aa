//! `BERTH_ARENA_PERSIST=1` on disks that fill up, are read-only, have a limit, or hold what has the names of Berth's files: what is kept is never trusted
//! wrongly, and what is in the way does not stop a start.

#[path = "support/full.rs"]
mod full;
#[expect(dead_code, reason = "shared with tests that use more of it")]
#[path = "support/place.rs"]
mod place;
#[path = "support/scratch.rs"]
mod scratch;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use ffi_tests::report::{Buffer, Report};
use ffi_tests::{berth_program, cache, run, skip};
use place::{HEADER, Place, SPEC, stock};

/// Whether there can be file systems of a test's own.
fn can_mount() -> bool {
    let mut probe = Command::new("unshare");
    probe.args(["-m", "true"]).output().is_ok_and(|o| o.status.success())
}

impl Place {
    /// A shell script in a mount namespace of its own, with `$1` the arena directory, `$2` the model, `$3` the `berth` program, and the load as `"$@"` after `shift 3`.
    fn script(&self, script: &str) -> run::Output {
        let inner = self.completion();
        let mut command = Command::new("unshare");
        run::clean_env(&mut command);
        command.args(["-m", "sh", "-c", script, "sh"]).arg(self.arena()).arg(&self.model).arg(berth_program().unwrap());
        command.arg(inner.get_program()).args(inner.get_args()).envs(inner.get_envs().filter_map(|(k, v)| Some((k, v?))));
        run::run(command, Duration::from_secs(300)).unwrap()
    }

    /// The buffer of the last load of a script.
    fn buffer(&self) -> Buffer {
        let report = Report::read(&self.scratch.path().join("report.json")).unwrap();
        report.buffers.iter().find(|b| b.asked == "ARENA" && b.bytes > 0).unwrap().clone()
    }
}

#[test]
fn a_disk_that_fills_up_at_any_point_leaves_nothing_that_is_trusted_wrongly() {
    let Some((place, _one)) = Place::new() else { return };
    if !can_mount() {
        return skip::skipped("a disk that fills up", "unshare -m does not work here");
    }
    let experts = SPEC.expert_bytes().unwrap().next_multiple_of(HEADER);
    // Bytes of the disk, and after how many seconds others take what is left of it.
    let whole = experts + HEADER;
    let disks: Vec<(u64, f64)> = if full::full() {
        let delays = [0.0, 0.05, 0.1, 0.2, 0.4, 3.0];
        (0..30).map(|i| (whole * (i / 6 + 16) / 19 + 8192, delays[i as usize % 6])).collect()
    } else {
        [(experts / 3, 0.1), (whole - 4096, 0.2), (whole + 4096, 0.0), (whole + (1 << 20), 0.1), (whole + (1 << 20), 3.0)].into()
    };
    let (mut kept, mut not) = (0, 0);
    for (size, delay) in disks {
        // What the first load leaves is verified and used by the second.
        let script = format!(
            r#"mount -t tmpfs -o mode=700,size={size} berth-test "$1" || exit 9; arena=$1; berth=$3; shift 3
            (sleep {delay}; head -c 1000000000 /dev/zero > "$arena/others" 2>/dev/null) & "$@" || exit 8; wait
            "$berth" arena verify --dir "$arena" || exit 7; ls "$arena"/*.arena 2>/dev/null && exec "$@"; true"#
        );
        let output = place.script(&script).checked(&format!("{size} bytes of disk")).unwrap_or_else(|e| panic!("{e:#}"));
        let buffer = place.buffer();
        let state = buffer.lasting.as_ref().map(|l| l.state.as_str());
        let file = output.stdout.lines().any(|l| l.ends_with(".arena"));
        assert_eq!(state == Some("reused"), file, "{size}: {buffer:?}");
        (kept, not) = if file { (kept + 1, not) } else { (kept, not + 1) };
    }
    cache::say(&format!("disks of {} sizes filled up: {kept} kept a file, {not} did not", kept + not));
    assert!(not > 0 && kept > 0);
}

#[test]
fn a_file_that_no_start_will_use_makes_room_on_a_full_disk() {
    let Some((place, _one)) = Place::new() else { return };
    if !can_mount() {
        return skip::skipped("a small file system", "unshare -m does not work here");
    }
    let one = SPEC.expert_bytes().unwrap().next_multiple_of(HEADER) + HEADER;
    let script = format!(
        r#"mount -t tmpfs -o mode=700,size={} berth-test "$1" || exit 9; model=$2; shift 3; "$@" || exit 8; touch "$model"; exec "$@""#,
        one * 3 / 2
    );
    let output = place.script(&script).checked("a full disk").unwrap_or_else(|e| panic!("{e:#}"));
    let buffer = place.buffer();
    assert_eq!((buffer.got.as_str(), buffer.lasting.unwrap().state.as_str()), ("arena", "kept"), "{}", output.stderr);
    assert!(output.stderr.contains("was removed, because its disk is full"), "{}", output.stderr);
}

#[test]
fn a_directory_that_is_read_only_is_used_for_what_it_has() {
    let Some((place, _one)) = Place::new() else { return };
    if !can_mount() {
        return skip::skipped("a read-only file system", "unshare -m does not work here");
    }
    place.expect("kept", None);
    let read_only = r#"mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" || exit 9"#;
    let script = format!(r#"{read_only}; "$3" arena ls --dir "$1" && "$3" arena verify --dir "$1" || exit 7; shift 3; exec "$@""#);
    let output = place.script(&script).checked("a read-only directory").unwrap_or_else(|e| panic!("{e:#}"));
    let buffer = place.buffer();
    assert_eq!((buffer.got.as_str(), buffer.lasting.unwrap().state.as_str()), ("arena", "reused"), "{}", output.stderr);
    assert!(output.stderr.contains("what is kept there is used, and nothing can be added"), "{}", output.stderr);
    assert_eq!(place.files().len(), 1);
    // Where there is nothing for this model, it is no arena directory.
    fs::remove_file(place.kept()).unwrap();
    let output = place.script(&format!(r#"{read_only}; shift 3; exec "$@""#)).checked("an empty one").unwrap_or_else(|e| panic!("{e:#}"));
    let buffer = place.buffer();
    assert_eq!((buffer.got.as_str(), buffer.reason.as_deref()), ("pageable", Some("arena_directory")), "{}", output.stderr);
}

#[test]
fn the_limit_is_applied_when_a_file_is_used_again() {
    let Some((place, _one)) = Place::new() else { return };
    let (half, other) = ("blk.[0-2].*exps=ARENA", "blk.[3-5].*exps=ARENA");
    place.start_with(&place.options(half, true));
    let first = place.kept();
    place.start_with(&place.options(other, true));
    let bytes = fs::metadata(&first).unwrap().len();
    let limited = |limit: u64| place.start_with(&place.options(half, true).env("BERTH_ARENA_LIMIT", limit.to_string()));
    assert_eq!(limited(2 * bytes).state(), ("reused", None));
    assert_eq!(place.files().len(), 2);
    let start = limited(2 * bytes - 1);
    assert_eq!((start.state(), &start.tokens), (("reused", None), stock(&place.host)));
    assert_eq!(place.kept(), first, "the one that is not used went");
    let start = limited(bytes - 1);
    assert_eq!(start.state(), ("reused", None));
    assert!(start.log.contains("is used all the same"), "{}", start.log);
}

#[test]
fn what_has_the_name_of_a_lock_or_of_a_file_does_not_stop_anybody_for_ever() {
    let Some((place, _one)) = Place::new() else { return };
    place.expect("kept", None);
    let path = place.kept();
    let lock = PathBuf::from(path.to_str().unwrap().to_owned() + ".lock");
    let open_to_all = || {
        fs::write(&lock, "1").unwrap();
        fs::set_permissions(&lock, PermissionsExt::from_mode(0o666)).unwrap();
    };
    fs::remove_file(&path).unwrap();
    open_to_all();
    place.expect("kept", None);
    open_to_all();
    let cleared = place.berth(&["gc"]);
    assert!(cleared.status.success() && String::from_utf8_lossy(&cleared.stdout).contains("removed the lock"), "{cleared:?}");
    assert_eq!(place.kept(), path);
    // A directory is not ours to remove.
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    let start = place.expect("not_kept", Some("untrusted"));
    assert!(start.lasting().message.as_ref().unwrap().contains("is a directory: remove it"), "{:?}", start.lasting());
    assert!(!place.berth(&["rm", path.file_name().unwrap().to_str().unwrap()]).status.success() && path.is_dir());
}

#[test]
fn names_that_are_wrong_do_not_stop_those_that_are_right() {
    let Some((place, _one)) = Place::new() else { return };
    place.expect("kept", None);
    let name = place.kept().file_name().unwrap().to_str().unwrap().to_owned();
    let removed = place.berth(&["rm", "missing.arena", "a\nb.arena", "../x.arena", &name]);
    assert!(!removed.status.success() && place.files().is_empty(), "{removed:?}");
    let said = String::from_utf8(removed.stderr).unwrap();
    assert!(said.lines().count() == 3 && said.lines().all(|l| l.starts_with("berth arena: ")), "{said}");
    for action in [&["ls"][..], &["ls", "--json"], &["verify"], &["gc"], &["rm", "x.arena"]] {
        let mut command = Command::new(berth_program().unwrap());
        run::clean_env(&mut command);
        let output = command.arg("arena").args(action).args(["--dir", "/nonexistent/mis\ntyped"]).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(
            !output.status.success() && said.starts_with("berth arena: there is no") && said.lines().count() == 1,
            "{action:?}: {said}"
        );
    }
}
