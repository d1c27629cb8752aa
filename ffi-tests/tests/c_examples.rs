//! `berth.h` and `libberth.so` as C and C++ programs use them: every warning an error with gcc and clang, run plainly and under valgrind.

#[path = "support/peer.rs"]
mod peer;
#[path = "support/scratch.rs"]
mod scratch;

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use ffi_tests::gguf::{Gguf, TensorInfo};
use ffi_tests::hosts::{self, Host};
use ffi_tests::models::{self, Spec};
use ffi_tests::run::Output;
use ffi_tests::{berth_lib, skip, tools};
use peer::Compile;
use scratch::Scratch;

/// Berth installed: the library under the name it is linked by and the one it is loaded by, and the options for both.
struct Berth {
    include: PathBuf,
    dir: PathBuf,
}

impl Berth {
    fn install(scratch: &Scratch) -> Berth {
        let dir = scratch.dir("lib");
        for name in ["libberth.so", "libberth.so.0"] {
            symlink(berth_lib().unwrap(), dir.join(name)).unwrap();
        }
        Berth { include: repository("include"), dir }
    }

    fn link(&self) -> [OsString; 3] {
        [joined("-L", &self.dir), "-lberth".into(), joined("-Wl,-rpath,", &self.dir)]
    }
}

fn repository(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name).canonicalize().unwrap()
}

fn joined(option: &str, path: &Path) -> OsString {
    let mut all = OsString::from(option);
    all.push(path);
    all
}

/// Whether a compiler is installed; a skip if not.
fn have(compiler: &str) -> bool {
    let found = tools::on_path(compiler).is_some();
    if !found {
        skip::skipped(&format!("examples with {compiler}"), "it is not installed");
    }
    found
}

/// The examples, built by their own Makefile in a copy of their directory.
fn build(host: &Host, compiler: &str, scratch: &Scratch) -> PathBuf {
    let (berth, dir) = (Berth::install(scratch), scratch.dir("c-examples"));
    for entry in fs::read_dir(repository("c-examples")).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            fs::copy(&path, dir.join(path.file_name().unwrap())).unwrap();
        }
    }
    let headers = hosts::headers_of(host.headers.expect("a host with headers")).unwrap_or_else(|e| panic!("{e:#}"));
    let ggml = [host.lib("ggml-base").unwrap().into_os_string(), joined("-Wl,-rpath,", &host.lib_dir)];
    let mut make = peer::plain("make");
    let cxx = if compiler == "clang" { "clang++" } else { "g++" };
    make.arg("-C").arg(&dir).env("CC", compiler).env("CXX", cxx).env_remove("CXXFLAGS").env_remove("CFLAGS").env_remove("MAKEFLAGS");
    make.env("BERTH_CFLAGS", joined("-I", &berth.include)).env("BERTH_LIBS", berth.link().join(OsStr::new(" ")));
    make.env("GGML_CFLAGS", joined("-isystem", &headers.ggml_include)).env("GGML_LIBS", ggml.join(OsStr::new(" ")));
    let output = peer::succeeds(make);
    for option in ["-std=c11", "-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Werror"] {
        assert!(output.stdout.contains(option), "built without {option}: {}", output.stdout);
    }
    dir
}

/// Runs an example plainly and, if asked, under valgrind. The arena's directory is empty afterwards.
fn run(scratch: &Scratch, program: &Path, arg: Option<&Path>, arena: Option<&Path>, memcheck: bool) -> Output {
    let default = scratch.dir("arena");
    let set = |mut command: Command| {
        command.args(arg).env("BERTH_ARENA_DIR", arena.unwrap_or(&default));
        peer::succeeds(command)
    };
    if memcheck && let Some(command) = peer::valgrind(program) {
        set(command);
    }
    let output = set(peer::plain(program));
    assert_eq!(fs::read_dir(&default).unwrap().count(), 0, "{} left a file", program.display());
    output
}

fn all_examples(id: &str, compiler: &str, memcheck: bool) {
    let Some(host) = hosts::require(id) else { return };
    if !have(compiler) || !have(if compiler == "clang" { "clang++" } else { "g++" }) || !have("make") {
        return;
    }
    let scratch = Scratch::new();
    let dir = build(&host, compiler, &scratch);

    let place = run(&scratch, &dir.join("place"), None, None, memcheck);
    assert_eq!(place.stdout, "CPU_MMAP -> CUDA_Host -> ARENA: 2097152 bytes, the same\n");

    let file = dir.join("mapped.c");
    let mapped = run(&scratch, &dir.join("mapped"), Some(&file), None, memcheck);
    let bytes = fs::metadata(&file).unwrap().len() - 1;
    assert_eq!(mapped.stdout, format!("{bytes} bytes of {}, in place\n", file.display()));

    let memory = run(&scratch, &dir.join("arena"), None, None, memcheck);
    assert_eq!(memory.stdout, "0 of 24 experts lie in files\n");
    let files = scratch.dir("files");
    let in_files = run(&scratch, &dir.join("arena"), Some(&files), None, memcheck);
    assert_eq!(in_files.stdout, "24 of 24 experts lie in files\n");
    assert_eq!(fs::read_dir(&files).unwrap().count(), 0, "a file was left");
    load_puts_every_tensor_where_the_rules_say(&scratch, &dir.join("load"), memcheck);

    let moe = run(&scratch, &dir.join("moe"), None, None, memcheck);
    assert_eq!(moe.stdout, "3 tokens, 2 of 4 experts each: as in plain C\n");
    // Its two parts compute at once, on threads of the engine's own.
    let engine = run(&scratch, &dir.join("engine"), None, None, memcheck);
    assert_eq!(engine.stdout, "2 layers in 2 parts: 0 of 12 matrices lie in files, the answers are right\n");
    let in_files = run(&scratch, &dir.join("engine"), Some(&files), None, memcheck);
    assert_eq!(in_files.stdout, "2 layers in 2 parts: 12 of 12 matrices lie in files, the answers are right\n");
    assert_eq!(fs::read_dir(&files).unwrap().count(), 0, "a file was left");

    let bench = |args: &[&str]| {
        let mut command = peer::plain(dir.join("bench"));
        command.args(args);
        command
    };
    let small = ["--geometry", "512,256,8,2", "--gate", "q4_k", "--down", "q6_k", "--tokens", "1,7", "--threads", "2", "--seconds", "0.05"];
    let stdout = peer::succeeds(bench(&[&small[..], &["--json"]].concat())).stdout;
    let objects: Vec<serde_json::Value> = stdout.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    assert_eq!(objects.len(), 2, "{stdout}");
    for object in objects {
        assert_eq!(object["checked"], true);
        assert!(["avx512", "avx2", "scalar"].iter().any(|isa| object["isa"] == *isa), "{object}");
        for number in ["ms", "gb_per_s", "gmac_per_s", "read_gb_per_s", "share"] {
            assert!(object[number].as_f64().is_some_and(|v| v > 0.0), "{number} in {object}");
        }
        assert!(object["vnni_gmac_per_s"].is_number(), "{object}");
    }
    assert!(peer::succeeds(bench(&small)).stdout.lines().count() == 2);
    for bad in [["--geometry", "1,2,3"], ["--gate", "iq1_s"], ["--tokens", "0"], ["--threads", "x"], ["--routing", "odd"], ["--what", "1"]]
    {
        let output = bench(&bad).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{bad:?}");
        assert!(output.stdout.is_empty() && String::from_utf8_lossy(&output.stderr).contains(bad[1]), "{bad:?}");
    }

    let report = |arena| {
        let stdout = run(&scratch, &dir.join("report"), None, arena, memcheck).stdout;
        let (messages, json) = stdout.split_at(stdout.find("{\n").expect("a JSON object"));
        (messages.to_owned(), serde_json::from_str::<serde_json::Value>(json).unwrap())
    };
    let (messages, json) = report(None);
    assert!(messages.starts_with("note: berth: ARENA: 1048576 bytes") && messages.lines().count() == 1, "{messages}");
    assert_eq!((&json["buffers"][0]["got"], &json["fallbacks"]), (&"arena".into(), &0.into()), "{json}");
    let (messages, json) = report(Some(Path::new("/dev/null")));
    assert!(messages.starts_with("warning: berth: ARENA: asked for ARENA, got pageable") && messages.lines().count() == 1, "{messages}");
    assert_eq!((&json["buffers"][0]["reason"], &json["fallbacks"]), (&"arena_directory".into(), &1.into()), "{json}");
}

/// FNV-1a over the first 64 bytes of these tensors, as in the example.
fn checksum<'a>(model: &Gguf, tensors: impl Iterator<Item = &'a TensorInfo>) -> u32 {
    let first = |t: &'a TensorInfo| model.data(t).unwrap().into_iter().take(64);
    tensors.flat_map(first).fold(2_166_136_261, |sum, byte| (sum ^ u32::from(byte)).wrapping_mul(16_777_619))
}

fn load_puts_every_tensor_where_the_rules_say(scratch: &Scratch, program: &Path, memcheck: bool) {
    let path = models::random(&Spec::default()).unwrap_or_else(|e| panic!("{e:#}"));
    let model = Gguf::open(&path).unwrap();
    let arena = scratch.dir("load");
    let set = |mut command: Command, rules: &[&str]| {
        command.arg(&path).args(rules).env("BERTH_ARENA_DIR", &arena);
        command
    };
    let rules = ["exps=ARENA", "attn=CPU_MMAP"];
    if memcheck && let Some(command) = peer::valgrind(program) {
        peer::succeeds(set(command, &rules));
    }
    let output = peer::succeeds(set(peer::plain(program), &rules));
    let mut lines: Vec<&str> = output.stdout.lines().collect();
    lines.sort_unstable();
    let place = |t: &TensorInfo| match t.name.as_str() {
        name if name.contains("exps") => "ARENA",
        name if name.contains("attn") => "CPU_MMAP",
        _ => "CPU",
    };
    let expected = [("ARENA", "arena"), ("CPU", "mapped"), ("CPU_MMAP", "mapped")].map(|(name, memory)| {
        let there = || model.tensors().iter().filter(|t| place(t) == name);
        let (tensors, bytes) = (there().count(), there().map(|t| t.bytes).sum::<u64>());
        assert!(tensors > 0, "{name}");
        format!("{name}: {tensors} tensors, {bytes} bytes, {memory}, {:08x}", checksum(&model, there()))
    });
    assert_eq!(lines, expected);
    let experts: u64 = model.tensors().iter().filter(|t| place(t) == "ARENA").map(|t| t.bytes).sum();
    assert!(output.stderr.ends_with(&format!("\rread {experts} of {experts} bytes\n")), "{:?}", output.stderr);

    let refused = set(peer::plain(program), &["exps=ARENAA"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(refused.stdout.is_empty() && String::from_utf8_lossy(&refused.stderr).contains("ARENA"), "{refused:?}");
    assert_eq!(peer::plain(program).output().unwrap().status.code(), Some(2));
    assert_eq!(fs::read_dir(&arena).unwrap().count(), 0, "it left a file");
}

#[test]
fn the_examples_run_with_gcc_plainly_and_under_valgrind() {
    all_examples("sdist-dl", "gcc", true);
}

#[test]
fn the_examples_run_with_clang() {
    all_examples("sdist-dl", "clang", false);
}

#[test]
fn the_examples_run_on_a_ggml_with_the_older_tables() {
    all_examples("node-3.14.5", "gcc", false);
}

#[test]
fn the_header_alone_is_clean_c_and_cpp() {
    let scratch = Scratch::new();
    let berth = Berth::install(&scratch);
    let strict = |compile: Compile| compile.args(["-Wpedantic", "-Wundef", "-Wshadow"]).arg(joined("-I", &berth.include));
    for compiler in ["gcc", "clang", "g++", "clang++"] {
        if !have(compiler) {
            continue;
        }
        if compiler.ends_with("++") {
            let compile = strict(Compile::with(compiler, &["-std=c++17", "-Wall", "-Wextra", "-Werror"]));
            let program = compile.arg(peer::source("header.cpp")).args(berth.link()).to(scratch.path().join(compiler));
            assert_eq!(peer::succeeds(peer::plain(&program)).stdout, "ok\n", "{compiler}");
            if let Some(command) = peer::valgrind(&program) {
                peer::succeeds(command);
            }
        } else {
            let source = scratch.path().join("header.c");
            fs::write(&source, "#include <berth.h>\n#include <berth.h>\nint main(void) { return berth_version()[0] == 0; }\n").unwrap();
            let program =
                strict(Compile::c(compiler)).arg("-Wstrict-prototypes").arg(&source).args(berth.link()).to(scratch.path().join(compiler));
            peer::succeeds(peer::plain(&program));
        }
    }
}

#[test]
fn the_library_exports_what_the_header_declares_and_the_two_entry_points_of_a_backend() {
    if !have("nm") {
        return;
    }
    let mut nm = peer::plain("nm");
    nm.args(["-D", "--defined-only", "--format=posix"]).arg(berth_lib().unwrap());
    let exported: BTreeSet<String> = peer::succeeds(nm).stdout.lines().filter_map(|l| l.split(' ').next()).map(str::to_owned).collect();
    let header = fs::read_to_string(repository("include/berth.h")).unwrap();
    let mut declared = BTreeSet::from(["ggml_backend_init".to_owned(), "ggml_backend_score".to_owned()]);
    for line in header.lines().filter(|l| !l.trim_start().starts_with(['*', '/']) && !l.starts_with("typedef")) {
        // "type *berth_noun_verb(": the name before the first parenthesis.
        let name = line.split('(').next().filter(|_| line.contains('(')).and_then(|l| l.rsplit([' ', '*']).next());
        declared.extend(name.filter(|n| n.starts_with("berth_")).map(str::to_owned));
    }
    assert_eq!(exported, declared);
}
