//! What Berth cannot do, it says in one clear line; then the host goes on with the same text, or, with `BERTH_STRICT=1`, ends cleanly.
//!
//! Every run has a home, a temporary and a working directory of its own. Before and after it, everything in them is listed: Berth leaves no
//! file behind and makes nothing outside the directory it was given.

#[path = "support/peer.rs"]
mod peer;
#[path = "support/scratch.rs"]
mod scratch;
#[path = "support/snapshot.rs"]
mod snapshot;

use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Duration;

use ffi_tests::gguf::Type;
use ffi_tests::hosts::{self, Host};
use ffi_tests::models::{self, Spec};
use ffi_tests::report::Report;
use ffi_tests::run::{self, Options, Output, Server};
use ffi_tests::{berth_lib, skip};
use peer::Compile;
use scratch::Scratch;
use snapshot::snapshot;

/// Q8_0, which the stock CPU backend does not repack on x86-64: with and without Berth the same kernels run.
fn spec() -> Spec {
    Spec { ty: Type::Q8_0, ..Spec::default() }
}

/// How the host is started.
enum Around {
    /// As it is.
    Nothing,
    /// Without the right to write where file modes forbid it, which only root has.
    ObeyingModes,
    /// With a limit on the size of files, in bytes.
    FileLimit(u64),
    /// With a file system in memory of this size (and other mount options) over this directory, seen by the host alone.
    SmallDisk(PathBuf, &'static str),
}

impl Around {
    /// The words before the program's.
    fn words(&self) -> Vec<OsString> {
        let root = fs::metadata("/proc/self").unwrap().uid() == 0;
        let words = |text: &[&str]| text.iter().map(OsString::from).collect();
        match self {
            Around::Nothing => Vec::new(),
            Around::ObeyingModes if root => words(&["setpriv", "--inh-caps=-all", "--bounding-set=-all"]),
            Around::ObeyingModes => Vec::new(),
            Around::FileLimit(bytes) => words(&["prlimit", &format!("--fsize={bytes}")]),
            Around::SmallDisk(dir, size) => {
                // Whether a file is left is seen in there too. If so, the shell ends by a signal, which no test takes for a clean end.
                let script = r#"mount -t tmpfs -o size="$2" berth-test "$1" && dir=$1 && shift 2 || exit 1
                    "$@"; rc=$?
                    [ -z "$(ls -A "$dir")" ] || kill -9 $$
                    exit $rc"#;
                let mut all: Vec<OsString> = words(&["unshare", if root { "-m" } else { "-rm" }, "sh", "-c", script, "sh"]);
                all.extend([dir.into(), OsString::from(size)]);
                all
            }
        }
    }

    /// Whether this machine lets us.
    fn works(&self) -> bool {
        let mut words = self.words().into_iter();
        let Some(program) = words.next() else { return true };
        let works = Command::new(&program).args(words).arg("true").output().is_ok_and(|o| o.status.success());
        if !works {
            skip::skipped("a host under restrictions", &format!("{} does not work here", program.display()));
        }
        works
    }
}

/// One run of a host in a place of its own: `c/greedy.c` over the host's libraries, whose log is written at once and whose arithmetic is
/// compared bit for bit. (`llama-completion` may lose its last lines when it ends, text and errors alike.)
struct Place {
    host: Host,
    model: PathBuf,
    scratch: Scratch,
    rules: &'static [&'static str],
    env: Vec<(&'static str, OsString)>,
    around: Around,
}

impl Place {
    /// The host, or a skip where there is none. Berth is loaded and says what it warns of; `ARENA` is asked for.
    fn new() -> Option<Place> {
        let host = hosts::require("sdist-dl")?;
        let model = models::random(&spec()).unwrap_or_else(|e| panic!("{e:#}"));
        let scratch = Scratch::new();
        for name in ["home", "tmp", "work"] {
            scratch.dir(name);
        }
        Some(Place { host, model, scratch, rules: &["exps=ARENA"], env: vec![("BERTH_LOG", "warn".into())], around: Around::Nothing })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn env(mut self, name: &'static str, value: impl Into<OsString>) -> Place {
        self.env.push((name, value.into()));
        self
    }

    /// Starts a program under the place's restrictions and with its environment, Berth included.
    fn command(&self, program: &Path) -> Command {
        let mut words = self.around.words();
        words.push(program.into());
        let mut command = peer::plain(&words[0]);
        command.args(&words[1..]).env("LD_LIBRARY_PATH", &self.host.lib_dir).env("GGML_BACKEND_PATH", berth_lib().unwrap());
        command.env("HOME", self.path("home")).env("TMPDIR", self.path("tmp")).env_remove("XDG_CACHE_HOME").current_dir(self.path("work"));
        // The host's own kernels run: what it computes is compared bit for bit.
        command.env("BERTH_FUSE", "0").envs(self.env.iter().map(|(name, value)| (name, value)));
        command
    }

    fn run(&self) -> Output {
        let mut command = self.command(&GREEDY);
        self.arguments(&mut command, self.rules);
        run::run(command, LIMIT).unwrap_or_else(|e| panic!("{e:#}"))
    }

    fn arguments(&self, command: &mut Command, rules: &[&str]) {
        command.arg(self.host.lib("llama").unwrap()).arg(&self.host.lib_dir).arg(&self.model).args(["Once upon a time", "8"]).args(rules);
    }

    /// Runs, and demands that not a thing is different afterwards.
    fn run_without_trace(&self) -> Output {
        let before = snapshot(self.scratch.path());
        let output = self.run();
        assert_eq!(before, snapshot(self.scratch.path()), "something was left behind or changed\n{}", tail(&output));
        output
    }

    /// The host went on: status 0, and the tokens and logits it has without Berth.
    fn went_on(&self, output: &Output, case: &str) {
        static STOCK: Mutex<Option<String>> = Mutex::new(None);
        let mut stock = STOCK.lock().unwrap_or_else(PoisonError::into_inner);
        let stock = stock.get_or_insert_with(|| {
            let mut command = peer::plain(&*GREEDY);
            self.arguments(&mut command, &[]);
            text(&peer::succeeds(command))
        });
        assert!(output.success(), "{case}: {:?}\n{}", output.status, tail(output));
        assert_eq!(*stock, text(output), "{case}");
    }
}

/// The lines about tokens and logits.
fn text(output: &Output) -> String {
    let lines: Vec<&str> = output.stdout.lines().filter(|l| l.starts_with("tokens ") || l.starts_with("logits ")).collect();
    assert_eq!(lines.len(), 2, "{}", output.stdout);
    lines.join("\n")
}

const LIMIT: Duration = Duration::from_secs(120);

static GREEDY: LazyLock<PathBuf> = LazyLock::new(|| {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let fresh = directory.join(format!("greedy-{}", std::process::id()));
    let (made, program) = (Compile::c("cc").arg(peer::source("greedy.c")).to(fresh), directory.join("refusals-greedy"));
    // Another process may do the same just now: each puts a whole file there.
    fs::rename(made, &program).expect("the target directory is writable");
    program
});

/// The end of what it said.
fn tail(output: &Output) -> String {
    run::last_lines(&output.stderr, 15)
}

/// Berth's own lines.
fn ours(output: &Output) -> Vec<&str> {
    output.stderr.lines().filter_map(|l| l.find("berth: ").map(|at| &l[at..])).collect()
}

/// The host ended by itself, with a status that is not 0.
fn ended_cleanly(output: &Output, case: &str) {
    let status = output.status.unwrap_or_else(|| panic!("{case}: it hung"));
    assert!(status.code().is_some_and(|c| c != 0), "{case}: {status} (signal {:?})\n{}", status.signal(), tail(output));
}

/// Makes something in a place, and says where.
type Make = fn(&Place) -> PathBuf;

/// A directory that cannot be used: what it is called here, how it is made, how the host is started, the reason's code and words.
struct BadDirectory {
    case: &'static str,
    make: Make,
    around: fn(&Place) -> Around,
    reason: &'static str,
    words: &'static str,
}

const BAD_DIRECTORIES: [BadDirectory; 9] = [
    BadDirectory {
        case: "a text file",
        make: |p| {
            fs::write(p.path("file"), "text").unwrap();
            p.path("file")
        },
        around: |_| Around::Nothing,
        reason: "arena_directory",
        words: "not a directory",
    },
    BadDirectory {
        case: "a named pipe",
        make: |p| {
            assert!(Command::new("mkfifo").arg(p.path("pipe")).status().unwrap().success());
            p.path("pipe")
        },
        around: |_| Around::Nothing,
        reason: "arena_directory",
        words: "not a directory",
    },
    BadDirectory {
        case: "a symbolic link",
        make: |p| {
            symlink(p.scratch.dir("elsewhere"), p.path("link")).unwrap();
            p.path("link")
        },
        around: |_| Around::Nothing,
        reason: "arena_directory",
        words: "symbolic link",
    },
    BadDirectory {
        case: "a symbolic link to nowhere",
        make: |p| {
            symlink(p.path("nowhere"), p.path("link")).unwrap();
            p.path("link")
        },
        around: |_| Around::Nothing,
        reason: "arena_directory",
        words: "symbolic link",
    },
    BadDirectory {
        case: "a directory whose parent is missing",
        make: |p| p.path("missing/arena"),
        around: |_| Around::Nothing,
        reason: "arena_directory",
        words: "No such file or directory",
    },
    BadDirectory {
        case: "an unwritable directory",
        make: |p| {
            let dir = p.scratch.dir("readonly");
            fs::set_permissions(&dir, Permissions::from_mode(0o555)).unwrap();
            dir
        },
        around: |_| Around::ObeyingModes,
        reason: "arena_directory",
        words: "Permission denied",
    },
    BadDirectory {
        case: "a read-only file system",
        make: |p| p.scratch.dir("arena"),
        around: |p| Around::SmallDisk(p.path("arena"), "1m,ro"),
        reason: "arena_directory",
        words: "Read-only file system",
    },
    BadDirectory {
        case: "a full file system",
        make: |p| p.scratch.dir("arena"),
        around: |p| Around::SmallDisk(p.path("arena"), "1m"),
        reason: "arena_no_space",
        words: "bytes free",
    },
    BadDirectory {
        case: "a limit on the size of files",
        make: |p| p.scratch.dir("arena"),
        around: |_| Around::FileLimit(1 << 20),
        reason: "arena_no_space",
        words: "RLIMIT_FSIZE",
    },
];

impl BadDirectory {
    /// A place with this directory, or a skip.
    fn place(&self) -> Option<Place> {
        let mut place = Place::new()?;
        let dir = (self.make)(&place);
        place.around = (self.around)(&place);
        place.around.works().then(|| place.env("BERTH_ARENA_DIR", dir))
    }
}

#[test]
fn with_a_bad_arena_directory_the_host_goes_on_and_one_line_per_buffer_says_why() {
    for bad in &BAD_DIRECTORIES {
        let BadDirectory { case, .. } = bad;
        let Some(place) = bad.place() else { continue };
        let report = tempfile::NamedTempFile::new().unwrap();
        let place = place.env("BERTH_REPORT", report.path());
        let output = place.run_without_trace();
        place.went_on(&output, case);
        let report = Report::read(report.path()).unwrap();
        let lines: Vec<&str> = ours(&output).into_iter().filter(|l| l.contains("asked for")).collect();
        assert_eq!(lines.len(), report.buffers.len(), "{case}: one line per buffer\n{}", tail(&output));
        for (line, buffer) in lines.iter().zip(&report.buffers) {
            let bytes = buffer.bytes.to_string();
            for word in ["asked for ARENA", "got pageable", &bytes, bad.words] {
                assert!(line.contains(word), "{case}: no {word:?} in {line:?}");
            }
            assert_eq!((buffer.got.as_str(), buffer.reason.as_deref()), ("pageable", Some(bad.reason)), "{case}");
            assert!(buffer.message.as_deref().is_some_and(|m| line.contains(m)), "{case}: {buffer:?}");
        }
        assert_eq!(report.buffers.iter().map(|b| b.bytes).sum::<u64>(), spec().expert_bytes().unwrap(), "{case}");
    }
}

#[test]
fn with_a_bad_arena_directory_a_strict_host_ends_cleanly() {
    for bad in &BAD_DIRECTORIES {
        let BadDirectory { case, .. } = bad;
        let Some(place) = bad.place() else { continue };
        let place = place.env("BERTH_STRICT", "1");
        let output = place.run_without_trace();
        ended_cleanly(&output, case);
        let lines = ours(&output);
        let clear = lines.iter().filter(|l| l.contains("ARENA") && l.contains("BERTH_STRICT") && l.contains(bad.words)).count();
        assert!(clear >= 1, "{case}: no clear line\n{}", tail(&output));
        assert!(!lines.iter().any(|l| l.contains("got pageable")), "{case}: a fallback in strict mode\n{}", tail(&output));
    }
}

#[test]
fn llama_completion_too_goes_on_or_ends_cleanly() {
    for (strict, goes_on) in [("0", true), ("1", false)] {
        let Some(place) = Place::new() else { return };
        fs::write(place.path("file"), "text").unwrap();
        let file = place.path("file");
        let place = place.env("BERTH_ARENA_DIR", file).env("BERTH_STRICT", strict);
        let mut command = place.command(&place.host.tool("llama-completion").unwrap());
        command.arg("-m").arg(&place.model).args([
            "-p",
            "Once upon a time",
            "-n",
            "4",
            "-c",
            "128",
            "-t",
            "2",
            "-no-cnv",
            "-ot",
            "exps=ARENA",
        ]);
        let before = snapshot(place.scratch.path());
        let output = run::run(command, LIMIT).unwrap();
        assert_eq!(before, snapshot(place.scratch.path()), "something was left behind or changed\n{}", tail(&output));
        if goes_on {
            assert!(output.success(), "{:?}\n{}", output.status, tail(&output));
        } else {
            ended_cleanly(&output, "llama-completion");
        }
    }
}

#[test]
fn without_a_home_there_is_no_arena_and_one_line_says_so() {
    let Some(place) = Place::new() else { return };
    let place = place.env("HOME", "");
    let output = place.run_without_trace();
    place.went_on(&output, "no home");
    let lines = ours(&output);
    assert!(matches!(lines.as_slice(), [line] if line.contains("asked for ARENA") && line.contains("HOME")), "{lines:?}");
}

#[test]
fn the_default_arena_is_a_private_directory_of_the_users_cache_and_stays_empty() {
    let Some(place) = Place::new() else { return };
    let mut before = snapshot(place.scratch.path());
    let output = place.run();
    place.went_on(&output, "the default directory");
    assert!(ours(&output).is_empty(), "{}", tail(&output));
    let mut after = snapshot(place.scratch.path());
    for name in ["home/.cache", "home/.cache/berth", "home/.cache/berth/arena"] {
        let (mode, ..) = after.remove(&place.path(name)).unwrap_or_else(|| panic!("{name} was not made"));
        assert_eq!(mode & 0o777, 0o700, "{name}");
    }
    before.retain(|path, _| after.contains_key(path));
    assert_eq!(before, after, "something else was made");
}

#[test]
fn an_arena_in_memory_works_and_is_warned_about() {
    let shm = Path::new("/dev/shm");
    let Ok(dir) = tempfile::tempdir_in(shm) else { return skip::skipped("an arena in memory", "no writable /dev/shm") };
    let Some(place) = Place::new() else { return };
    let place = place.env("BERTH_ARENA_DIR", dir.path());
    let output = place.run_without_trace();
    place.went_on(&output, "an arena in memory");
    let lines = ours(&output);
    assert!(matches!(lines.as_slice(), [line] if line.contains("file system in memory") && line.contains("BERTH_ARENA_DIR")), "{lines:?}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_killed_host_leaves_no_file() {
    let Some(place) = Place::new() else { return };
    let arena = place.scratch.dir("arena");
    let options = Options { context: 128, ..Options::default() }.with_berth(&berth_lib().unwrap(), "exps=ARENA");
    let server = Server::start(&place.host, &place.model, &options.env("BERTH_ARENA_DIR", arena.to_str().unwrap())).unwrap();
    let maps = fs::read_to_string(server.proc("maps")).unwrap();
    assert!(maps.lines().any(|l| l.contains(arena.to_str().unwrap()) && l.contains("rw-s")), "no arena is mapped\n{maps}");
    drop(server); // SIGKILL
    assert_eq!(fs::read_dir(&arena).unwrap().count(), 0);
}

#[test]
fn a_bad_setting_is_named_and_the_host_goes_on_without_berth() {
    for (name, value) in [("BERTH_LOG", "loud"), ("BERTH_STRICT", "perhaps"), ("BERTH_ARENA_DIR", "arena"), ("BERTH_REPORT", "report.json")]
    {
        let Some(mut place) = Place::new() else { return };
        place.rules = &[];
        let place = place.env(name, value);
        let output = place.run_without_trace();
        place.went_on(&output, name);
        let lines = ours(&output);
        assert!(matches!(lines.as_slice(), [line] if line.contains(&format!("{name}=\"{value}\""))), "{name}: {lines:?}");

        // Berth's places do not exist then, so a rule that names one is the host's error.
        let place = Place { rules: &["exps=ARENA"], ..place };
        let output = place.run_without_trace();
        ended_cleanly(&output, name);
        assert_eq!(ours(&output).len(), 1, "{name}\n{}", tail(&output));
    }
}

#[test]
fn a_report_that_cannot_be_written_is_one_error_line_and_the_host_goes_on() {
    let cases: [(&str, Make); 7] = [
        ("a directory", |p| p.scratch.dir("reports")),
        ("a device", |_| "/dev/null".into()),
        ("in a missing directory", |p| p.path("missing/report.json")),
        ("below a file", |p| {
            fs::write(p.path("file"), "text").unwrap();
            p.path("file/report.json")
        }),
        ("in an unwritable directory", |p| {
            let dir = p.scratch.dir("readonly");
            fs::set_permissions(&dir, Permissions::from_mode(0o555)).unwrap();
            dir.join("report.json")
        }),
        ("a named pipe", |p| {
            assert!(Command::new("mkfifo").arg(p.path("pipe")).status().unwrap().success());
            p.path("pipe")
        }),
        ("a link to a directory", |p| {
            symlink(p.scratch.dir("elsewhere"), p.path("link")).unwrap();
            p.path("link")
        }),
    ];
    for (case, make) in cases {
        let Some(mut place) = Place::new() else { return };
        let report = make(&place);
        place.around = Around::ObeyingModes;
        if !place.around.works() {
            continue;
        }
        let place = Place { rules: &["exps=CPU_MMAP"], ..place }.env("BERTH_REPORT", report);
        let output = place.run_without_trace();
        place.went_on(&output, case);
        let lines = ours(&output);
        assert!(matches!(lines.as_slice(), [line] if line.contains("BERTH_REPORT")), "{case}: {lines:?}");
    }
    assert!(fs::metadata("/dev/null").unwrap().file_type().is_char_device());
}

#[test]
fn a_report_beyond_the_file_limit_is_one_error_line_and_no_signal() {
    let Some(mut place) = Place::new() else { return };
    place.around = Around::FileLimit(100);
    if !place.around.works() {
        return;
    }
    let report = place.path("report.json");
    let place = Place { rules: &["exps=CPU_MMAP"], ..place }.env("BERTH_REPORT", &report);
    let output = place.run_without_trace();
    place.went_on(&output, "a file limit of 100 bytes");
    let lines = ours(&output);
    assert!(matches!(lines.as_slice(), [line] if line.contains("BERTH_REPORT") && line.contains("RLIMIT_FSIZE")), "{lines:?}");
    assert!(!report.exists());
}

#[test]
fn a_report_over_a_link_is_one_error_line_and_touches_neither_the_link_nor_what_it_leads_to() {
    let Some(place) = Place::new() else { return };
    fs::write(place.path("precious"), "precious").unwrap();
    symlink(place.path("precious"), place.path("report.json")).unwrap();
    let place = Place { rules: &["exps=CPU_MMAP"], ..place };
    let report = place.path("report.json");
    let place = place.env("BERTH_REPORT", &report);
    let output = place.run_without_trace();
    place.went_on(&output, "a report over a link");
    let lines = ours(&output);
    let said = |l: &str| l.contains("BERTH_REPORT") && l.contains("is a symbolic link");
    assert!(matches!(lines.as_slice(), [line] if said(line)), "{lines:?}");
    assert_eq!(fs::read_link(&report).unwrap(), place.path("precious"));
    assert_eq!(fs::read_to_string(place.path("precious")).unwrap(), "precious");
    let names: Vec<_> = fs::read_dir(place.scratch.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names.len(), 5, "home, tmp, work, precious, report.json: {names:?}");
}

#[test]
fn the_log_level_is_obeyed_and_off_is_silent() {
    // One buffer that is what was asked, and one that is not.
    for (level, warns, informs) in [("off", false, false), ("error", false, false), ("warn", true, false), ("info", true, true)] {
        let Some(mut place) = Place::new() else { return };
        place.rules = &["ffn_up_exps=CPU_MMAP", "exps=ARENA"];
        fs::write(place.path("file"), "text").unwrap();
        let file = place.path("file");
        let place = place.env("BERTH_ARENA_DIR", file).env("BERTH_LOG", level);
        let output = place.run_without_trace();
        place.went_on(&output, level);
        let lines = ours(&output);
        assert_eq!(lines.iter().any(|l| l.contains("asked for ARENA")), warns, "{level}: {lines:?}");
        assert_eq!(lines.iter().any(|l| l.contains("CPU_MMAP") && l.contains("mapped")), informs, "{level}: {lines:?}");
        assert!(level != "off" || lines.is_empty(), "{lines:?}");
    }
}

#[test]
fn a_silent_and_strict_berth_still_refuses() {
    let Some(place) = Place::new() else { return };
    fs::write(place.path("file"), "text").unwrap();
    let file = place.path("file");
    let place = place.env("BERTH_ARENA_DIR", file).env("BERTH_LOG", "off").env("BERTH_STRICT", "1");
    let output = place.run_without_trace();
    ended_cleanly(&output, "silent and strict");
    assert!(ours(&output).is_empty(), "{}", tail(&output));
}

#[test]
fn a_host_with_another_backend_api_refuses_berth_with_one_line_and_goes_on() {
    let ids = hosts::ids_expected(hosts::Expect::Refused).into_iter().filter(|id| id.starts_with("node-")).collect::<Vec<_>>();
    assert!(!ids.is_empty(), "no such host in the table");
    let scratch = Scratch::new();
    let program = Compile::c("cc").arg("-Wpedantic").arg(peer::source("load_peer.c")).to(scratch.path().join("load_peer"));
    for id in ids {
        let Some(host) = hosts::require(id) else { continue };
        let mut command = peer::plain(&program);
        command.arg(host.lib("ggml").unwrap()).arg(berth_lib().unwrap());
        let output = peer::succeeds(command);
        assert_eq!(output.stdout, "refused\n", "{id}");
        let lines = ours(&output);
        let found = format!("found ggml {}", host.ggml_version);
        assert!(
            matches!(lines.as_slice(), [line] if line.contains(&found) && line.contains("supported is 0.9.0 and newer")),
            "{id}: two loads, one line: {lines:?}"
        );
    }
}

#[test]
fn a_statically_linked_host_refuses_berth_with_one_line_and_goes_on() {
    let Some(host) = hosts::require("sdist-static") else { return };
    let mut command = host.command("ggml-rpc-server");
    command.arg("--help").env("GGML_BACKEND_PATH", berth_lib().unwrap());
    let output = peer::succeeds(command);
    assert!(output.stderr.contains("sage"), "it shows its help\n{}", tail(&output));
    let lines = ours(&output);
    assert!(matches!(lines.as_slice(), [line] if line.contains("not loaded") && line.contains("statically")), "{lines:?}");
}

#[test]
fn a_program_without_ggml_gets_nothing_and_a_reason() {
    let scratch = Scratch::new();
    let program = Compile::c("cc").args(["-Wpedantic", "-pthread"]).arg(peer::source("no_ggml.c")).to(scratch.path().join("no_ggml"));
    let mut command = peer::plain(&program);
    command.arg(berth_lib().unwrap()).arg("thread");
    let output = peer::succeeds(command);
    let lines = ours(&output);
    assert!(matches!(lines.as_slice(), [line] if line.contains("no ggml in this process")), "score and init, one line: {lines:?}");
    if let Some(mut command) = peer::valgrind(&program) {
        command.arg(berth_lib().unwrap());
        peer::succeeds(command);
    }
}
