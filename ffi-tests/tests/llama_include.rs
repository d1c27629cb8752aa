//! `berth-llama.cmake`: an unpatched tree, built with the include, has Berth among its backends, and no environment variable is needed.
//!
//! The hook is tried on ggml's own sources in a small tree, linked in every way. Whole builds of llama.cpp take eight minutes each on two cores the
//! first time: they are run with `BERTH_FULL=1`, as `cargo xtask matrix` does.

#[expect(dead_code, reason = "shared with tests that use more of it")]
mod common;
#[path = "support/full.rs"]
mod full;
#[expect(dead_code, reason = "shared with tests that use more of it")]
#[path = "support/peer.rs"]
mod peer;
#[path = "common/placed.rs"]
mod placed;
#[path = "support/prefix.rs"]
mod prefix;
#[path = "support/tree.rs"]
mod tree;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use common::{Scratch, TYPES, experts};
use ffi_tests::hosts::{self, Expect, Host};
use ffi_tests::models;
use ffi_tests::run::{Options, agree, greedy_text, until_whole};
use placed::{assert_placed, placement_only};
use tree::Build;

/// A stock llama.cpp tree: the one that the hosts of this name are built from.
fn llama_cpp() -> Option<PathBuf> {
    let headers = ffi_tests::skip::available("the sources of llama.cpp", hosts::headers_of("sdist-0.25.3"))?;
    Some(headers.llama_include.parent().unwrap().to_owned())
}

fn tiny(name: &str, options: &[&str]) -> Option<Build> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("ship/tiny");
    let ggml = format!("-DGGML_SOURCE={}", llama_cpp()?.join("ggml").display());
    tree::build(name, &source, &[&[ggml.as_str(), "-DCMAKE_BUILD_TYPE=Release"], options].concat(), &["tiny"])
}

/// What the small program prints.
fn lists(build: &Build, path: Option<&Path>) -> String {
    let scratch = Scratch::new();
    let mut command = peer::plain(build.bin.join("tiny"));
    command.envs(scratch.environment()).envs(path.map(|p| ("GGML_BACKEND_PATH", p)));
    let output = peer::succeeds(command);
    let report = scratch.report();
    assert_eq!(report.buffers.iter().map(|b| (b.asked.as_str(), b.got.as_str())).collect::<Vec<_>>(), [("ARENA", "arena")]);
    output.stdout + &output.stderr
}

const LISTED: [&str; 4] = ["main", "first: BERTH BERTH CUDA_Host ARENA", "loaded: BERTH BERTH CUDA_Host ARENA", "ARENA: a buffer"];

/// The same with `GGML_BACKEND_PATH` naming the Berth that is linked already, by whatever name; and another copy of it is refused.
fn is_listed_once(build: &Build, copies_are_seen: bool) {
    let listed = |path: Option<&Path>| {
        let text = lists(build, path);
        let lines: Vec<&str> = text.lines().filter(|l| !l.contains("berth")).collect();
        assert_eq!(lines, LISTED, "{text}");
        text
    };
    assert!(!listed(None).contains("not loaded"));
    let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let copy = scratch.path().join("libberth-copy.so");
    fs::copy(build.prefix.join("lib/libberth.so"), &copy).unwrap();
    let with_copy = listed(Some(&copy));
    if copies_are_seen {
        assert!(!listed(Some(&build.prefix.join("lib/libberth.so"))).contains("not loaded"));
        assert!(with_copy.contains("another copy of Berth, ") && with_copy.contains("libberth.so.0, is a backend"), "{with_copy}");
    } else {
        assert!(with_copy.contains("not loaded: no ggml in this process"), "the program exports none of ggml: {with_copy}");
    }
}

#[test]
fn ggml_linked_statically_lists_berth_after_its_own() {
    let Some(build) = tiny("tiny-static", &["-DBUILD_SHARED_LIBS=OFF"]) else { return };
    assert_eq!(build.status, "libberth.a, listed after the CPU");
    let mut nm = peer::plain("nm");
    nm.args(["-D", "--defined-only"]).arg(build.bin.join("tiny"));
    assert!(!peer::succeeds(nm).stdout.contains("ggml"), "the program exports nothing: Berth has the functions from the program itself");
    is_listed_once(&build, false);
}

#[test]
fn ggml_as_shared_libraries_lists_berth_after_its_own() {
    let Some(build) = tiny("tiny-shared", &["-DBUILD_SHARED_LIBS=ON"]) else { return };
    assert!(build.status.ends_with("/lib/libberth.so.0.1.0, listed after the CPU"), "{}", build.status);
    is_listed_once(&build, true);
}

#[test]
fn ggml_that_loads_its_backends_lists_berth_from_the_start() {
    let Some(build) = tiny("tiny-dl", &["-DBUILD_SHARED_LIBS=ON", "-DGGML_BACKEND_DL=ON"]) else { return };
    assert!(build.status.ends_with("listed when the program starts"), "{}", build.status);
    is_listed_once(&build, true);
}

#[test]
fn the_static_library_in_shared_libraries_of_ggml_works_too() {
    let Some(build) = tiny("tiny-mixed", &["-DBUILD_SHARED_LIBS=ON", "-DBERTH_LLAMA_STATIC=ON"]) else { return };
    assert_eq!(build.status, "libberth.a, listed after the CPU");
    let text = lists(&build, None);
    assert_eq!(text.lines().filter(|l| !l.contains("berth")).collect::<Vec<_>>(), LISTED, "{text}");
}

/// A tree whose `CMAKE_PROJECT_INCLUDE` is taken has other hooks, and the same file read by two of them counts once.
#[test]
fn other_hooks_of_cmake_do_as_well() {
    let Some(llama_cpp) = llama_cpp() else { return };
    if ffi_tests::tools::on_path("cmake").is_none() {
        ffi_tests::skip::skipped("berth-llama.cmake by other hooks", "cmake is missing");
        return;
    }
    let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let ours = scratch.path().join("ours.cmake");
    fs::write(&ours, "message(STATUS \"ours was read\")\n").unwrap();
    let include = prefix::install(scratch.path()).join("lib/cmake/berth/berth-llama.cmake");
    let (ours, include) = (ours.display(), include.display());
    let hooks = [
        (vec![format!("PROJECT_INCLUDE={ours}"), format!("PROJECT_tiny_INCLUDE={include}")], true),
        (vec![format!("PROJECT_INCLUDE={include}"), format!("PROJECT_tiny_INCLUDE={include}")], false),
    ];
    for (number, (variables, with_ours)) in hooks.into_iter().enumerate() {
        let mut cmake = peer::plain("cmake");
        cmake.arg("-S").arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("ship/tiny"));
        cmake
            .arg("-B")
            .arg(scratch.path().join(format!("build-{number}")))
            .arg(format!("-DGGML_SOURCE={}", llama_cpp.join("ggml").display()));
        let said = peer::succeeds({
            cmake.args(variables.iter().map(|v| format!("-DCMAKE_{v}")));
            cmake
        });
        assert_eq!(said.stdout.matches("-- Berth: ").count(), 1, "{variables:?}: {}", said.stdout);
        assert_eq!(said.stdout.contains("ours was read"), with_ours, "{variables:?}");
    }
}

/// What cannot work is told while CMake runs.
#[test]
fn a_tree_that_has_no_ggml_of_its_own_is_refused() {
    if ffi_tests::tools::on_path("cmake").is_none() {
        ffi_tests::skip::skipped("berth-llama.cmake on another tree", "cmake is missing");
        return;
    }
    let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let at = |name: &str| scratch.path().join(name);
    let prefix = prefix::install(scratch.path());
    fs::create_dir_all(at("tree/ggml-sources")).unwrap();
    let fails = |text: &str| {
        fs::write(at("tree/CMakeLists.txt"), format!("cmake_minimum_required(VERSION 3.19)\nproject(other C CXX)\n{text}\n")).unwrap();
        let mut cmake = peer::plain("cmake");
        cmake.arg("-S").arg(at("tree")).arg("-B").arg(at("build"));
        cmake.arg(format!("-DCMAKE_PROJECT_INCLUDE={}", prefix.join("lib/cmake/berth/berth-llama.cmake").display()));
        let output = cmake.output().unwrap();
        assert!(!output.status.success(), "{text}");
        String::from_utf8_lossy(&output.stderr).split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert!(fails("").contains("this build has no target ggml"));
    assert!(fails("add_library(ggml INTERFACE IMPORTED)").contains("is not built here"));
    for (name, text) in [("ggml-backend-reg.cpp", "void f() {}\n"), ("empty.cpp", "")] {
        fs::write(at("tree").join(name), text).unwrap();
    }
    let unknown = fails("add_library(ggml STATIC ggml-backend-reg.cpp)\ntarget_compile_definitions(ggml PUBLIC GGML_USE_CPU)");
    assert!(unknown.contains("does not list its backends as"), "{unknown}");
}

/// The functions that the glue hands over are those that Berth looks up.
#[test]
fn the_glue_names_every_function_that_berth_looks_up() {
    let read = |name: &str| fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name)).unwrap();
    let (glue, code, cpu) = (read("cmake/berth-llama.c"), read("src/abi/symbols.rs"), read("src/abi/cpu.rs"));
    let handed: BTreeSet<&str> = glue.lines().filter_map(|l| l.trim().strip_prefix("X(")?.split(')').next()).collect();
    let listed = code.lines().chain(cpu.lines()).filter_map(|l| l.trim().split_once(": unsafe extern \"C\" fn")).map(|(name, _)| name);
    let mut asked: BTreeSet<&str> = listed.filter(|n| n.starts_with("ggml_")).collect();
    for rest in code.split("c\"").skip(1) {
        asked.extend(rest.split('"').next().filter(|n| n.starts_with("ggml_") || n.starts_with("GOMP_")));
    }
    assert!(asked.len() > 60, "{asked:?}");
    assert_eq!(handed, asked);
}

fn whole_llama_cpp(name: &str, shared: bool) {
    if !full::full() {
        ffi_tests::cache::say(&format!("llama.cpp with Berth, {name}: left out (BERTH_FULL=1 or cargo xtask matrix runs it)"));
        return;
    }
    let (Some(source), Some(stock)) = (llama_cpp(), hosts::require("sdist-dl")) else { return };
    let before = tree::fingerprint(&source);
    let link = format!("-DBUILD_SHARED_LIBS={}", if shared { "ON" } else { "OFF" });
    // As the hosts are built, whose text is compared.
    let avx512 = if std::arch::is_x86_feature_detected!("avx512vnni") { "ON" } else { "OFF" };
    let (avx512, vnni) = (format!("-DGGML_AVX512={avx512}"), format!("-DGGML_AVX512_VNNI={avx512}"));
    let options = [
        "-DCMAKE_BUILD_TYPE=Release",
        "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
        "-DCMAKE_INSTALL_RPATH=$ORIGIN",
        "-DGGML_NATIVE=OFF",
        &avx512,
        &vnni,
        "-DLLAMA_OPENSSL=OFF",
        "-DLLAMA_BUILD_UI=OFF",
        "-DLLAMA_USE_PREBUILT_UI=OFF",
        &link,
    ];
    let Some(build) = tree::build(name, &source, &options, &["llama-completion"]) else { return };
    assert_eq!(tree::fingerprint(&source), before, "the tree was changed");

    let host = Host {
        id: name.to_owned(),
        package: stock.package.clone(),
        ggml_version: stock.ggml_version,
        api: Expect::Accepted,
        lib_dir: build.bin.clone(),
        bin_dir: Some(build.bin.clone()),
        include: None,
        headers: stock.headers,
    };
    let model = models::smollm_moe().unwrap_or_else(|e| panic!("{e:#}"));
    let experts = experts(&model);
    let options = Options { tokens: 48, ..Options::default() }.arg(&["-lv", "4"]);
    let generate = |host: &Host, options: &Options| {
        until_whole(|| greedy_text(host, &model, options).unwrap_or_else(|e| panic!("{e:#}")), |g| agree(&g.text, &g.text, 64))
    };
    let expected = generate(&stock, &options);
    assert!(expected.text.contains("Paris"), "{:?}", expected.text);
    let idle = generate(&host, &options);
    assert!(agree(&idle.text, &expected.text, 64) && !idle.stderr.contains("berth: "), "{:?}\n{}", idle.text, idle.stderr);
    for ty in TYPES {
        for computed in [false, true] {
            let what = format!("{name} {ty}, computed by {}", if computed { "Berth" } else { "llama.cpp" });
            let rule = format!("exps={ty}");
            let environment = |scratch: &Scratch| if computed { scratch.environment() } else { placement_only(scratch) };
            // What Berth computes is rounded in another order than llama.cpp's, and is the same whichever way Berth came in.
            let expected = if computed {
                let scratch = Scratch::new();
                let mut options = options.clone().with_berth(&common::berth(), &rule);
                options.env.extend(environment(&scratch));
                generate(&stock, &options)
            } else {
                expected.clone()
            };
            let scratch = Scratch::new();
            let mut options = options.clone().arg(&["-ot", &rule]);
            options.env.extend(environment(&scratch));
            let with = generate(&host, &options);
            assert!(agree(&with.text, &expected.text, 64), "{what}:\n    {:?}\nnot {:?}", with.text, expected.text);
            let report = scratch.report();
            if computed {
                assert!(report.buffers.iter().any(|b| b.asked == ty && !b.tensors.is_empty()), "{what}");
            } else {
                assert_placed(&what, ty, true, &experts, &report, &with.stderr);
            }
        }
    }
}

#[test]
fn an_unpatched_static_llama_cpp_puts_experts_where_asked() {
    whole_llama_cpp("llama-static", false);
}

#[test]
fn an_unpatched_shared_llama_cpp_puts_experts_where_asked() {
    whole_llama_cpp("llama-shared", true);
}
