//! What `cargo xtask dist` installs, as others use it: from a prefix that was moved and has a blank in its name, by CMake and by pkg-config, shared
//! and static, in C and C++, with gcc and clang, plainly and under valgrind. And what of it can be seen from outside.

#[expect(dead_code, reason = "shared with tests that use more of it")]
#[path = "support/peer.rs"]
mod peer;
#[path = "support/prefix.rs"]
mod prefix;
#[path = "support/scratch.rs"]
mod scratch;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use ffi_tests::{skip, tools};
use scratch::Scratch;

const SAYS: &str = "berth 0.1.0\nblk.3.ffn_up_exps.weight -> ARENA (arena)\narena: in a file\nexperts: Q8_0, as expected\n";
const COMPILERS: [(&str, &str); 2] = [("gcc", "g++"), ("clang", "clang++")];

/// The prefix that all tests of this file look at.
fn installed() -> Option<&'static Path> {
    static PREFIX: OnceLock<(Scratch, PathBuf)> = OnceLock::new();
    let lacking = ["nm", "readelf", "strip", "ld", "objcopy", "ar"].iter().find(|t| tools::on_path(t).is_none());
    if let Some(tool) = lacking {
        skip::skipped("what is installed", &format!("{tool} is missing: apt-get install binutils"));
        return None;
    }
    let (_, prefix) = PREFIX.get_or_init(|| {
        let scratch = Scratch::new();
        let prefix = prefix::install(scratch.path());
        (scratch, prefix)
    });
    Some(prefix)
}

fn have(tool: &str) -> bool {
    let found = tools::on_path(tool).is_some();
    if !found {
        skip::skipped(&format!("what is installed, with {tool}"), &tools::command(tool).err().map_or_else(|| "missing".into(), |m| m.0));
    }
    found
}

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("ship").join(name)
}

/// Runs the program plainly and under valgrind; it must say what it should, and leave no file.
fn run(program: &Path, scratch: &Scratch, library: Option<&Path>) {
    let arena = scratch.dir("arena");
    let set = |mut command: Command| {
        command.arg(&arena).envs(library.map(|dir| ("LD_LIBRARY_PATH", dir)));
        peer::succeeds(command)
    };
    assert_eq!(set(peer::plain(program)).stdout, SAYS, "{}", program.display());
    if let Some(valgrind) = peer::valgrind(program) {
        assert_eq!(set(valgrind).stdout, SAYS, "{} under valgrind", program.display());
    }
    assert_eq!(fs::read_dir(&arena).unwrap().count(), 0, "{} left a file", program.display());
}

/// The libraries that a program names.
fn needed(file: &Path) -> BTreeSet<String> {
    let mut readelf = peer::plain("readelf");
    readelf.args(["-d", "-W"]).arg(file);
    let between = |line: &str| Some(line.split_once('[')?.1.split_once(']')?.0.to_owned());
    peer::succeeds(readelf).stdout.lines().filter(|l| l.contains("(NEEDED)")).filter_map(between).collect()
}

fn by_cmake(c: &str, cpp: &str) {
    let Some(prefix) = installed() else { return };
    if ![c, cpp, "cmake", "ninja"].iter().all(|t| have(t)) {
        return;
    }
    let scratch = Scratch::new();
    let build = scratch.dir("a build");
    let mut cmake = peer::plain("cmake");
    cmake.args(["-G", "Ninja", "-S"]).arg(source("")).arg("-B").arg(&build).env("CC", c).env("CXX", cpp);
    let mut option = std::ffi::OsString::from("-DCMAKE_PREFIX_PATH=");
    option.push(prefix);
    peer::succeeds({
        cmake.arg(option);
        cmake
    });
    let mut ninja = peer::plain("ninja");
    ninja.arg("-C").arg(&build);
    peer::succeeds(ninja);
    for language in ["c", "cpp"] {
        let (shared, with_static) = (build.join(format!("{language}-berth")), build.join(format!("{language}-static")));
        assert!(needed(&shared).contains("libberth.so.0"), "linked by its ABI's name");
        assert!(!needed(&with_static).iter().any(|l| l.contains("berth")), "{:?}", needed(&with_static));
        run(&shared, &scratch, None);
        run(&with_static, &scratch, None);
    }
}

#[test]
fn cmake_projects_link_both_libraries_with_gcc() {
    by_cmake("gcc", "g++");
}

#[test]
fn cmake_projects_link_both_libraries_with_clang() {
    by_cmake("clang", "clang++");
}

#[test]
fn cmake_takes_a_version_that_fits_and_no_other() {
    let Some(prefix) = installed() else { return };
    if !have("cmake") {
        return;
    }
    let scratch = Scratch::new();
    let asks = |version: &str| {
        let dir = scratch.dir("asks");
        fs::write(
            dir.join("CMakeLists.txt"),
            format!("cmake_minimum_required(VERSION 3.19)\nproject(asks C)\nfind_package(berth {version} CONFIG)\nmessage(STATUS \"found=${{berth_FOUND}} ${{BERTH_LIBRARY}}\")\n"),
        )
        .unwrap();
        let mut cmake = peer::plain("cmake");
        cmake.arg("-S").arg(&dir).arg("-B").arg(scratch.dir("asks-build")).env("berth_ROOT", prefix);
        peer::succeeds(cmake).stdout
    };
    for fits in ["", "0.1", "0.1.0", "0.1.0 EXACT", "0.1...0.9", "0.0.5...<1"] {
        assert!(asks(fits).contains(&format!("found=1 {}/lib/libberth.so.0.1.0", prefix.display())), "{fits:?}");
    }
    for not in ["0.2", "1.0", "0.1.1", "0.0.5 EXACT", "0.2...0.9", "0.0.1...<0.1.0"] {
        assert!(asks(not).contains("found=0"), "{not:?}");
    }
}

/// The words of a shell's command line that pkg-config answers with.
fn pkg_config(prefix: &Path, args: &str) -> String {
    let mut command = peer::plain("pkg-config");
    command.args(args.split(' ')).env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"));
    peer::succeeds(command).stdout.trim().to_owned()
}

#[test]
fn pkg_config_projects_link_both_libraries_with_gcc_and_clang() {
    let Some(prefix) = installed() else { return };
    if !have("pkg-config") {
        return;
    }
    assert_eq!(pkg_config(prefix, "--modversion berth"), "0.1.0");
    let scratch = Scratch::new();
    let cpp = scratch.path().join("shipped.cpp");
    fs::copy(source("shipped.c"), &cpp).unwrap();
    for (c, cxx) in COMPILERS {
        for (compiler, source, standard) in [(c, source("shipped.c"), "c11"), (cxx, cpp.clone(), "c++17")] {
            if !have(compiler) {
                continue;
            }
            for package in ["berth", "berth-static"] {
                let program = scratch.path().join(format!("{compiler}-{package}"));
                // As a Makefile does: what pkg-config says goes through a shell.
                let options = pkg_config(prefix, &format!("--cflags --libs {package}"));
                let mut shell = peer::plain("sh");
                shell.args(["-euc", &format!("exec {compiler} -std={standard} -Wall -Wextra -Werror \"$1\" -o \"$2\" {options}"), "sh"]);
                shell.arg(&source).arg(&program);
                peer::succeeds(shell);
                let library = (package == "berth").then(|| prefix.join("lib"));
                assert_eq!(needed(&program).contains("libberth.so.0"), library.is_some(), "{compiler} {package}");
                run(&program, &scratch, library.as_deref());
            }
        }
    }
    assert!(pkg_config(prefix, "--static --libs berth").contains("-lpthread"), "a static link needs more");
}

/// The program plainly, with a directory for its arena.
fn with_arena(program: &Path, scratch: &Scratch) -> Command {
    let mut command = peer::plain(program);
    command.arg(scratch.dir("arena"));
    command
}

#[test]
fn programs_without_any_shared_library_link_the_static_one() {
    let Some(prefix) = installed() else { return };
    if !have("pkg-config") {
        return;
    }
    let scratch = Scratch::new();
    let options = pkg_config(prefix, "--cflags --libs berth-static");
    for compiler in COMPILERS.map(|(c, _)| c).into_iter().filter(|c| have(c)) {
        for kind in ["-static", "-static-pie -Wl,--gc-sections"] {
            let program = scratch.path().join("alone");
            let mut shell = peer::plain("sh");
            shell.args(["-euc", &format!("exec {compiler} {kind} \"$1\" -o \"$2\" {options}"), "sh"]);
            peer::succeeds({
                shell.arg(source("shipped.c")).arg(&program);
                shell
            });
            assert!(needed(&program).is_empty(), "{compiler} {kind}: {:?}", needed(&program));
            // Not under valgrind, which cannot put its own strlen into such a program and reports glibc's.
            assert_eq!(peer::succeeds(with_arena(&program, &scratch)).stdout, SAYS, "{compiler} {kind}");
        }
    }
}

/// The Makefile of the examples asks pkg-config, as it is called by somebody who has Berth installed.
#[test]
fn the_examples_are_made_by_pkg_config() {
    let Some(prefix) = installed() else { return };
    if !["make", "pkg-config", "gcc", "g++"].iter().all(|t| have(t)) {
        return;
    }
    let scratch = Scratch::new();
    let dir = scratch.dir("c-examples");
    for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../c-examples")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e != "o") || path.ends_with("Makefile") {
            fs::copy(&path, dir.join(path.file_name().unwrap())).unwrap();
        }
    }
    let mut make = peer::plain("make");
    for variable in ["CFLAGS", "CXXFLAGS", "MAKEFLAGS", "BERTH_CFLAGS", "BERTH_LIBS"] {
        make.env_remove(variable);
    }
    make.arg("-C").arg(&dir).arg("alone").arg(format!("PKG_CONFIG_PATH={}", prefix.join("lib/pkgconfig").display()));
    peer::succeeds(make);
    for program in ["moe", "engine"] {
        let mut command = peer::plain(dir.join(program));
        command.env("LD_LIBRARY_PATH", prefix.join("lib"));
        assert!(peer::succeeds(command).stdout.contains(if program == "moe" { "as in plain C" } else { "right" }));
    }
}

fn repository(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name)).unwrap()
}

/// Names of symbols, as `nm` shows them.
fn symbols(args: &[&str], file: &Path) -> BTreeSet<String> {
    let mut nm = peer::plain("nm");
    nm.args(args).arg("--format=posix").arg(file);
    peer::succeeds(nm).stdout.lines().filter(|l| !l.ends_with(':')).filter_map(|l| l.split(' ').next()).map(str::to_owned).collect()
}

/// Every function that the header declares, and the two that ggml looks for.
fn documented() -> BTreeSet<String> {
    let header = repository("include/berth.h");
    let code = header.lines().filter(|l| !l.trim_start().starts_with(['*', '/']) && !l.starts_with("typedef"));
    let names = code.filter_map(|l| l.split_once('(')?.0.rsplit([' ', '*']).next()).filter(|n| n.starts_with("berth_"));
    names.chain(["ggml_backend_init", "ggml_backend_score"]).map(str::to_owned).collect()
}

#[test]
fn both_libraries_show_the_documented_functions_and_nothing_else() {
    let Some(prefix) = installed() else { return };
    assert!(documented().len() > 40);
    assert_eq!(symbols(&["-D", "--defined-only"], &prefix.join("lib/libberth.so.0")), documented());
    assert_eq!(symbols(&["--defined-only", "--extern-only"], &prefix.join("lib/libberth.a")), documented());
}

#[test]
fn the_library_needs_libc_libgcc_s_and_the_loader_only() {
    let Some(prefix) = installed() else { return };
    let library = prefix.join("lib/libberth.so.0");
    let allowed: BTreeSet<String> = ["libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"].map(String::from).into();
    let needs = needed(&library);
    assert!(needs.contains("libc.so.6") && needs.is_subset(&allowed), "{needs:?}");
    // A symbol without a version is of none of these, but for what the compiler's own start files name, weakly.
    let of_start_files = ["_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__gmon_start__"];
    for symbol in symbols(&["-D", "--undefined-only", "--with-symbol-versions"], &library) {
        let version = symbol.split_once('@').map(|(_, v)| v.trim_start_matches('@'));
        let known = version.is_some_and(|v| v.starts_with("GLIBC_") || v.starts_with("GCC_"));
        assert!(known || of_start_files.contains(&symbol.as_str()), "{symbol}");
    }
}

/// Rust looks for functions of newer systems, which older ones lack: a program must link without them.
#[test]
fn what_the_static_library_may_miss_is_weak() {
    let Some(prefix) = installed() else { return };
    let mut nm = peer::plain("nm");
    nm.args(["--undefined-only", "--format=posix"]).arg(prefix.join("lib/libberth.a"));
    let text = peer::succeeds(nm).stdout;
    let kind = |name: &str| text.lines().find_map(|l| l.trim_end().strip_prefix(name)?.strip_prefix(' ')).unwrap_or("none");
    assert_eq!((kind("pidfd_spawnp"), kind("malloc")), ("w", "U"), "{text}");
}

#[test]
fn names_are_as_a_distribution_has_them() {
    let Some(prefix) = installed() else { return };
    let link = |name: &str| fs::read_link(prefix.join("lib").join(name)).unwrap();
    assert_eq!((link("libberth.so"), link("libberth.so.0")), ("libberth.so.0".into(), "libberth.so.0.1.0".into()));
    let mut readelf = peer::plain("readelf");
    readelf.args(["-d", "-W"]).arg(prefix.join("lib/libberth.so"));
    assert!(peer::succeeds(readelf).stdout.contains("Library soname: [libberth.so.0]"));
    for (file, mode) in [("bin/berth", 0o755), ("lib/libberth.so.0.1.0", 0o644), ("include/berth.h", 0o644)] {
        assert_eq!(prefix.join(file).metadata().unwrap().permissions().mode() & 0o777, mode, "{file}");
    }
    let mut berth = peer::plain(prefix.join("bin/berth"));
    berth.arg("--version");
    assert_eq!(peer::succeeds(berth).stdout, "berth 0.1.0\n");
}

#[test]
fn no_installed_file_holds_a_path_of_the_machine_that_made_it() {
    let Some(prefix) = installed() else { return };
    let mut dirs = vec![prefix.to_owned()];
    let first = prefix.ancestors().nth(2).unwrap().join("first");
    let mut unwanted = vec![first.to_str().unwrap().to_owned(), env!("CARGO_MANIFEST_DIR").trim_end_matches("/ffi-tests").to_owned()];
    // Dependencies name their sources in the texts of panics.
    unwanted.extend(["/registry/src/", "/toolchains/"].map(str::to_owned));
    unwanted.extend(
        ["HOME", "CARGO_HOME", "RUSTUP_HOME"].iter().filter_map(|v| std::env::var(v).ok()).filter(|d| d.len() > 1).map(|d| d + "/"),
    );
    let mut seen = 0;
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                dirs.push(path);
                continue;
            }
            seen += 1;
            let bytes = fs::read(&path).unwrap();
            for text in &unwanted {
                assert!(!bytes.windows(text.len()).any(|w| w == text.as_bytes()), "{} holds {text}", path.display());
            }
        }
    }
    assert!(seen > 20, "{seen} files");
}

#[test]
fn licences_and_pages_of_the_manual_are_there() {
    let Some(prefix) = installed() else { return };
    let text = |name: &str| fs::read_to_string(prefix.join("share").join(name)).unwrap();
    let licences = text("doc/berth/THIRD-PARTY-LICENCES.txt");
    for part in ["libloading 0.", "memmap2 0.", "Permission is hereby granted, free of charge", "Apache License", "ISC"] {
        assert!(licences.contains(part), "{part}");
    }
    assert!(!licences.contains("criterion") && !licences.contains("ggml-berth "), "only what is linked, and Berth's own are beside it");
    assert!(text("doc/berth/LICENSE-MIT").starts_with("MIT License") || text("doc/berth/LICENSE-MIT").contains("Permission is hereby"));
    let page = text("man/man1/berth-explain.1");
    assert!(page.contains("tensor\\-split") && page.contains("SYNOPSIS"), "{page}");
    assert!(text("man/man1/berth.1").contains("explain") && !text("man/man1/berth.1").contains("berth\\-man"));
}

#[test]
fn the_list_of_files_is_all_that_is_installed_and_removes_it() {
    let Some(_) = installed() else { return };
    let scratch = Scratch::new();
    let prefix = prefix::install(&scratch.dir("of its own"));
    let files = |dir: &Path| -> BTreeSet<String> {
        let mut list = Command::new("find");
        list.arg(dir).args(["-not", "-type", "d", "-printf", "%P\\n"]);
        peer::succeeds(list).stdout.lines().map(str::to_owned).collect()
    };
    let listed = fs::read_to_string(prefix.join("share/doc/berth/FILES.txt")).unwrap();
    assert_eq!(listed.lines().map(str::to_owned).collect::<BTreeSet<_>>(), files(&prefix));
    // The command in docs/releasing.md, where something else lies there too.
    fs::write(prefix.join("lib/other.so"), "").unwrap();
    let mut remove = Command::new("sh");
    remove.args(["-c", "xargs -d '\\n' rm < share/doc/berth/FILES.txt"]).current_dir(&prefix);
    peer::succeeds(remove);
    assert_eq!(files(&prefix), BTreeSet::from(["lib/other.so".to_owned()]));
}

#[test]
fn a_prefix_that_cannot_be_had_is_refused_and_a_relative_one_is_taken() {
    let Some(_) = installed() else { return };
    let scratch = Scratch::new();
    let here = scratch.dir("here");
    // Cargo knows the command in there only.
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR"));
    let refused = |prefix: &str| {
        let output = prefix::dist(workspace, &["--prefix", prefix]).output().unwrap();
        assert!(!output.status.success(), "{prefix}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let file = here.join("file");
    fs::write(&file, "").unwrap();
    assert!(refused(file.to_str().unwrap()).contains("is in the way: it is no directory"));
    assert!(refused("").contains("a value is required"));
    assert!(refused("/proc/berth").contains("cannot write to /proc"));

    let relative = tempfile::tempdir_in(workspace).unwrap();
    let name = format!("{}/a b", relative.path().file_name().unwrap().to_str().unwrap());
    peer::succeeds(prefix::dist(workspace, &["--prefix", &name]));
    peer::succeeds(prefix::dist(workspace, &["--prefix", &name]));
    assert!(relative.path().join("a b/lib/libberth.so").is_file(), "twice, into the same place");
}
