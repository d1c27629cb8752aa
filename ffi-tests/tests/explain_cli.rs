//! `berth explain` and `berth doctor` as commands: options, exit codes, JSON, and what a very large header costs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use ffi_tests::models::{self, Spec};
use ffi_tests::run::{self, Output};
use ffi_tests::{berth_program, gguf};
use serde_json::Value;

/// CPU time of a run, user and system together, in seconds. Not the time on the wall, which on a busy machine is other programs'.
const MOST_CPU_SECONDS: f64 = 1.0;
/// Largest resident set of a run, in bytes.
const MOST_RESIDENT: u64 = 200_000_000;
/// The least of so many runs is what counts: neighbours on the same core cost CPU time too.
const RUNS: usize = 3;

fn berth(args: &[&str]) -> Command {
    let mut command = Command::new(berth_program().unwrap_or_else(|e| panic!("{e:#}")));
    run::clean_env(&mut command);
    command.args(args);
    command
}

fn ran(mut command: Command, arena: Option<&Path>) -> Output {
    if let Some(arena) = arena {
        command.env("BERTH_ARENA_DIR", arena);
    }
    let what = format!("{command:?}");
    let output = run::run(command, Duration::from_secs(60)).unwrap_or_else(|e| panic!("{e:#}"));
    assert!(output.status.is_some_and(|s| s.code().is_some()), "{what}: {:?}", output.status);
    assert!(!output.stderr.contains("panicked"), "{what}: {}", output.stderr);
    output
}

fn code(output: &Output) -> i32 {
    output.status.and_then(|s| s.code()).unwrap_or(-1)
}

fn explain(args: &[&str]) -> Output {
    ran(berth(&[&["explain"], args].concat()), None)
}

fn small() -> String {
    let model = models::random(&Spec::default()).unwrap_or_else(|e| panic!("{e:#}"));
    model.to_str().expect("a cache with a plain path").to_owned()
}

fn json(args: &[&str]) -> Value {
    let model = small();
    let output = explain(&[&[model.as_str(), "--json"], args].concat());
    assert_eq!(code(&output), 0, "{}", output.stderr);
    serde_json::from_str(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", output.stdout))
}

/// The places of the tensors whose name contains `part`.
fn places(explained: &Value, part: &str) -> Vec<String> {
    let all = explained["tensors"].as_array().expect("tensors");
    let named = all.iter().filter(|t| t["name"].as_str().is_some_and(|n| n.contains(part)));
    let mut found: Vec<String> = named.map(|t| t["place"].as_str().unwrap_or("-").to_owned()).collect();
    found.dedup();
    found
}

/// CPU seconds and peak resident bytes of a command that must succeed and print at least `least` bytes.
fn cost(command: &Command, least: u64, dir: &Path) -> (f64, u64) {
    const SCRIPT: &str = "import os, sys
out = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
pid = os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, out, 1)])
_, status, used = os.wait4(pid, 0)
print(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)";
    let printed = dir.join("printed");
    let mut python = Command::new("python3");
    run::clean_env(&mut python);
    python.args(["-c", SCRIPT]).arg(&printed).arg(command.get_program()).args(command.get_args());
    let output = run::run(python, Duration::from_secs(120)).and_then(|o| o.checked("python3")).unwrap_or_else(|e| panic!("{e:#}"));
    let fields: Vec<&str> = output.stdout.split_whitespace().collect();
    let [code, seconds, bytes] = fields[..] else { panic!("{}", output.stdout) };
    assert_eq!(code, "0", "{command:?}: {}", output.stderr);
    assert!(fs::metadata(&printed).unwrap().len() >= least, "{command:?} printed too little");
    (seconds.parse().unwrap(), bytes.parse().unwrap())
}

#[test]
fn a_header_of_200_000_tensors_takes_less_than_a_second_and_200_megabytes() {
    if ffi_tests::tools::on_path("python3").is_none() {
        ffi_tests::skip::skipped("the cost of explain", "python3 is missing");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("large.gguf");
    models::repeated(&model, 200_000).unwrap_or_else(|e| panic!("{e:#}"));
    let rules = r"blk\.([0-9]|1[0-9])\.=CPU_MMAP,exps=ARENA";
    for (extra, least) in [(&[][..], 10_000), (&["--json"], 200_000 * 200), (&["--all"], 200_000 * 100)] {
        let mut command = berth(&["explain"]);
        command.arg(&model).args(["-ot", rules, "-ncmoe", "60"]).args(extra);
        let runs: Vec<(f64, u64)> = (0..RUNS).map(|_| cost(&command, least, dir.path())).collect();
        let seconds = runs.iter().map(|r| r.0).fold(f64::INFINITY, f64::min);
        let bytes = runs.iter().map(|r| r.1).max().unwrap_or(u64::MAX);
        println!("explain {extra:?}: {seconds:.2} s of CPU time, {:.0} MB resident", bytes as f64 / 1e6);
        assert!(seconds < MOST_CPU_SECONDS, "{extra:?}: {runs:?}");
        assert!(bytes < MOST_RESIDENT, "{extra:?}: {runs:?}");
    }
}

#[test]
fn strict_fails_on_what_cannot_be_honoured_and_only_then() {
    let model = small();
    let dir = tempfile::tempdir().unwrap();
    let (here, missing) = (dir.path().join("arena"), dir.path().join("no/such/arena"));
    let run = |rules: &str, strict: bool, arena: &Path| {
        let mut args = vec!["explain", &model, "-ot", rules];
        args.extend(strict.then_some("--strict"));
        ran(berth(&args), Some(arena))
    };
    for (rules, arena, fine, said) in [
        ("exps=CPU_MMAP", &here, true, ""),
        ("exps=ARENA", &here, true, ""),
        ("exps=ARENA,nothing=CPU", &here, false, "WARNING rule_unmatched: Rule 2, nothing=CPU, matches no tensor."),
        ("exps=ARENA,ffn_up_exps=CPU", &here, false, "WARNING rule_shadowed: Rule 2"),
        ("exps=ARENA", &missing, false, "WARNING no_arena: "),
    ] {
        let lenient = run(rules, false, arena);
        assert_eq!(code(&lenient), 0, "{rules}: {}", lenient.stderr);
        assert!(lenient.stdout.contains(said), "{rules}: {}", lenient.stdout);
        assert_eq!(code(&run(rules, true, arena)), i32::from(!fine), "{rules}");
    }
    // Page-locked memory, where there is no driver.
    let pinned = run("exps=CUDA_Host", false, &here);
    assert_eq!(code(&pinned), 0);
    let none = pinned.stdout.contains("WARNING no_pinned: ");
    assert_eq!(code(&run("exps=CUDA_Host", true, &here)), i32::from(none), "{}", pinned.stdout);
    // Rules that were generated for layers that the model does not have are no fault.
    assert_eq!(code(&explain(&[&model, "--strict", "-ncmoe", "99"])), 0);
    // What cannot be understood fails with or without --strict.
    for rules in ["exps=NOWHERE", "exps", "", "(=CPU"] {
        let output = run(rules, false, &here);
        assert!(code(&output) == 1 && output.stdout.is_empty(), "{rules}: {}", output.stdout);
        assert!(output.stderr.starts_with("berth explain: rule 1, column ") && output.stderr.contains('^'), "{rules}: {}", output.stderr);
    }
}

#[test]
fn json_has_the_fields_that_scripts_use_and_every_byte_once() {
    let e = json(&["-ot", r"blk\.0\.ffn_.*_exps=ARENA,exps=CPU_MMAP"]);
    let file = gguf::Gguf::open(Path::new(&small())).unwrap();
    let bytes: u64 = file.tensors().iter().map(|t| t.bytes).sum();
    let number = |v: &Value| v.as_u64().unwrap_or_else(|| panic!("{v} is no number"));
    let sum = |list: &str, field: &str| e[list].as_array().unwrap().iter().map(|v| number(&v[field])).sum::<u64>();
    assert_eq!((sum("tensors", "bytes"), sum("places", "bytes")), (bytes, bytes));
    assert_eq!(sum("places", "mapped") + sum("places", "copied"), bytes);
    let totals: u64 = ["mapped", "pageable", "pinned", "arena", "device"].iter().map(|k| number(&e["totals"][k])).sum();
    assert_eq!(totals, bytes);
    for (list, fields) in [
        ("tensors", &["name", "layer", "class", "type", "bytes", "place", "memory", "rule", "buft_overridden", "downgraded", "reason"][..]),
        ("rules", &["number", "pattern", "target", "origin", "won", "bytes", "lost"]),
        ("places", &["place", "tensors", "bytes", "mapped", "copied"]),
    ] {
        for value in e[list].as_array().unwrap() {
            let object = value.as_object().unwrap();
            assert!(fields.iter().all(|f| object.contains_key(*f)) && object.len() == fields.len(), "{list}: {value}");
        }
    }
    for field in ["model", "tensor_count", "mmap", "totals", "machine", "offload_min_batch", "offload_expert_hint", "warnings"] {
        assert!(e.get(field).is_some(), "{field} is missing");
    }
    assert_eq!(number(&e["tensor_count"]), file.tensors().len() as u64);
    assert_eq!(e["rules"].as_array().unwrap().iter().map(|r| number(&r["won"])).collect::<Vec<_>>(), [3, 3]);
}

#[test]
fn every_place_is_split_into_mapped_and_copied_and_held_against_the_machine() {
    let of = |e: &Value, place: &str| {
        let p = e["places"].as_array().unwrap().iter().find(|p| p["place"] == place).unwrap_or_else(|| panic!("no {place}")).clone();
        (p["mapped"].as_u64().unwrap() > 0, p["copied"].as_u64().unwrap() > 0)
    };
    let rules = ["-ot", r"ffn_up_exps=ARENA,ffn_gate_exps=CPU_MMAP,ffn_down_exps=CUDA_Host", "--no-repack"];
    let mapped = json(&rules);
    assert_eq!(of(&mapped, "CPU_MMAP"), (true, false));
    assert_eq!((of(&mapped, "ARENA"), of(&mapped, "CUDA_Host"), of(&mapped, "CPU")), ((false, true), (false, true), (true, false)));
    let read = json(&[&rules[..], &["--no-mmap"]].concat());
    assert_eq!((of(&read, "CPU_MMAP"), of(&read, "CPU")), ((false, true), (false, true)));
    assert_eq!((&read["mmap"], &read["totals"]["mapped"]), (&Value::Bool(false), &Value::from(0)));

    // What it is held against.
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap();
    let total =
        meminfo.lines().find_map(|l| l.strip_prefix("MemTotal:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()).unwrap() << 10;
    let available = mapped["machine"]["available"].as_u64().expect("MemAvailable");
    assert!(available > 0 && available < total, "{available} of {total}");
    let model = small();
    let limited = |limit: &str| {
        let mut shell = Command::new("sh");
        run::clean_env(&mut shell);
        shell.args(["-c", &format!("ulimit -l {limit} && exec \"$0\" \"$@\"")]).arg(berth_program().unwrap());
        ran(
            {
                shell.args(["explain", &model, "-ot", "exps=CUDA_Host"]);
                shell
            },
            None,
        )
    };
    let narrow = limited("64");
    assert!(narrow.stdout.contains("limit for locked memory 64.0 KiB") && narrow.stdout.contains("WARNING memlock: "), "{}", narrow.stdout);
}

#[test]
fn options_are_spelt_as_in_llama_cpp() {
    let overrides = ["-ot", "--override-tensor", "--ot"].map(|o| json(&[o, "exps=ARENA"]));
    assert!(overrides.iter().all(|e| places(e, "_exps") == ["ARENA"] && places(e, "attn_q.") == ["CPU"]));
    for option in ["-cmoe", "--cpu-moe"] {
        let e = json(&[option, "-ot", "exps=ARENA"]);
        assert_eq!((places(&e, "_exps"), &e["rules"][0]["origin"]), (vec!["CPU".to_owned()], &Value::from("cpu-moe")), "{option}");
        // The order on the command line decides.
        assert_eq!(places(&json(&["-ot", "exps=ARENA", option]), "_exps"), ["ARENA"], "{option}");
    }
    for option in ["-ncmoe", "--n-cpu-moe"] {
        let e = json(&[option, "1", "-ot", "exps=ARENA"]);
        assert_eq!(
            (places(&e, "blk.0.ffn_up_exps"), places(&e, "blk.1.ffn_up_exps")),
            (vec!["CPU".into()], vec!["ARENA".into()]),
            "{option}"
        );
    }
    for option in ["-ncffn", "--n-cpu-ffn"] {
        assert_eq!(json(&[option, "1"])["rules"][0]["origin"], "n-cpu-ffn", "{option}");
    }
    for device in ["-dev", "--device"] {
        for layers in ["-ngl", "--gpu-layers", "--n-gpu-layers", "--gpu"] {
            let on = |n: &str| places(&json(&[device, "CUDA0", layers, n]), "attn_q.");
            assert_eq!(
                (on("all"), on("0"), on("2")),
                (vec!["CUDA0".into()], vec!["CPU".into()], vec!["CPU".into(), "CUDA0".into()]),
                "{layers}"
            );
        }
    }
    assert_eq!(
        places(&json(&["--device", "RPC0[127.0.0.1:50052]", "-ot", "attn=RPC0[127.0.0.1:50052]"]), "attn_q."),
        ["RPC0[127.0.0.1:50052]"]
    );
    let memory = |e: &Value| e["tensors"].as_array().unwrap().iter().filter(|t| t["memory"] == "repacked").count();
    for option in ["-nr", "--no-repack", "--nr"] {
        assert_eq!(memory(&json(&[option, "--no-mmap"])), 0, "{option}");
    }
    assert_eq!(json(&["--no-mmap"])["mmap"], false);
    // Names that no rule could mean are refused.
    let model = small();
    for (device, said) in [
        ("", "is empty"),
        ("A=B", "contains '='"),
        ("a,,b", "is empty"),
        ("CUDA0:", "is empty"),
        ("CPU", "no device"),
        ("A,cpu", "no device"),
        ("A,ARENA", "no device"),
        ("A:CPU_MMAP", "no page-locked"),
        ("A,B,A:H", "'A' is named twice"),
        ("A,none", "stands alone"),
        ("a;b", "contains ';'"),
    ] {
        let output = explain(&[&model, "--device", device]);
        assert!(
            code(&output) == 1 && output.stderr.starts_with("berth explain: --device: ") && output.stderr.contains(said),
            "{}",
            output.stderr
        );
    }
}

#[test]
fn html_is_written_whole_to_a_file_and_never_over_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let (page, model) = (dir.path().join("map.html"), dir.path().join("m.gguf"));
    fs::copy(small(), &model).unwrap();
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let output = explain(&[&text(&model), "-ot", "exps=ARENA", "--html", &text(&page)]);
    assert_eq!(code(&output), 0, "{}", output.stderr);
    let html = fs::read_to_string(&page).unwrap();
    assert!(html.starts_with("<!doctype html>") && html.trim_end().ends_with("</html>") && html.contains("ARENA"));
    assert!(output.stdout.contains("ARENA"), "the table is printed too");
    let before = fs::read(&model).unwrap();
    let link = dir.path().join("link.html");
    std::os::unix::fs::symlink(&model, &link).unwrap();
    for over in [&model, &link] {
        let output = explain(&[&text(&model), "--html", &text(over)]);
        assert!(code(&output) == 1 && output.stderr.contains("is the model itself"), "{}", output.stderr);
    }
    assert_eq!(fs::read(&model).unwrap(), before);
    // With standard output in a file, /dev/stdout is such a link.
    let stdout = dir.path().join("stdout");
    std::os::unix::fs::symlink(&page, &stdout).unwrap();
    let output = explain(&[&text(&model), "--html", &text(&stdout)]);
    assert!(code(&output) == 1 && output.stderr.contains("is a symbolic link"), "{}", output.stderr);
    assert!(stdout.is_symlink() && fs::read_to_string(&page).unwrap() == html, "neither the link nor its file is touched");
    let nowhere = explain(&[&text(&model), "--html", &text(&dir.path().join("no/such/dir.html"))]);
    let expected = format!("berth explain: write {}: No such file or directory", dir.path().join("no/such/dir.html").display());
    assert!(code(&nowhere) == 1 && nowhere.stderr.starts_with(&expected), "{}", nowhere.stderr);
}

#[test]
fn html_takes_the_place_of_its_own_page_and_of_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let (page, model) = (dir.path().join("map.html"), small());
    let write = || explain(&[&model, "--html", page.to_str().unwrap()]);
    assert_eq!(code(&write()), 0);
    let first = fs::read(&page).unwrap();
    fs::write(&page, "").unwrap();
    for _ in 0..2 {
        assert_eq!(code(&write()), 0, "an empty file and our own page may be replaced");
        assert_eq!(fs::read(&page).unwrap().len(), first.len());
    }
    let other_model = fs::read(&model).unwrap();
    for foreign in [&other_model[..], b"<!doctype html>\n<title>mine</title>", b"x"] {
        fs::write(&page, foreign).unwrap();
        let output = write();
        assert!(code(&output) == 1 && output.stderr.contains("is no page of berth explain"), "{}", output.stderr);
        assert!(fs::read(&page).unwrap() == foreign, "it is not touched");
    }
}

#[test]
fn a_setting_that_the_library_would_refuse_is_warned_of() {
    let model = small();
    for (name, value) in
        [("BERTH_STRICT", "perhaps"), ("BERTH_LOG", "loud"), ("BERTH_ARENA_DIR", "relative/arena"), ("BERTH_REPORT", "r.json")]
    {
        for (strict, status) in [(&[][..], 0), (&["--strict"], 1)] {
            for rules in ["exps=ARENA", "exps=CPU_MMAP"] {
                let mut command = berth(&[&["explain", &model, "-ot", rules], strict].concat());
                command.env(name, value);
                let output = ran(command, None);
                assert_eq!(code(&output), status, "{name} {strict:?}: {}", output.stderr);
                let warning = format!("WARNING bad_setting: {name}=\"{value}\" is not understood; it takes ");
                assert!(output.stdout.contains(&warning), "{}", output.stdout);
            }
        }
    }
    let mut command = berth(&["explain", &model, "--strict"]);
    command.envs([("BERTH_STRICT", "yes"), ("BERTH_LOG", "debug")]);
    let fine = ran(command, None);
    assert!(code(&fine) == 0 && !fine.stdout.contains("WARNING"), "{}", fine.stdout);
}

#[test]
fn what_cannot_be_opened_or_ends_too_early_is_said_in_words_that_help() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let header = |counts: [u64; 2], rest: &[u8]| {
        [b"GGUF".as_slice(), &3u32.to_le_bytes(), &counts[0].to_le_bytes(), &counts[1].to_le_bytes(), rest].concat()
    };
    fs::write(path("pairs"), header([1, 1 << 63], &[0; 64])).unwrap();
    fs::write(path("tensors"), header([1 << 63, 0], &[0; 64])).unwrap();
    // A pair whose value is an array (9) of 2^63 numbers of 8 bytes (10): more bytes than 64 bits can count.
    let array = [&1u64.to_le_bytes()[..], b"k", &9u32.to_le_bytes(), &10u32.to_le_bytes(), &(1u64 << 63).to_le_bytes(), &[0; 64]].concat();
    fs::write(path("array"), header([0, 1], &array)).unwrap();
    for (name, said, not) in [
        ("missing.gguf", "missing.gguf: No such file or directory", "at byte"),
        ("", ": it is not a regular file", "at byte"),
        ("pairs", "at byte 16: 9223372036854775808 metadata pairs are announced", "18446744073709551615"),
        ("tensors", "at byte 8: 9223372036854775808 tensors are announced", "18446744073709551615"),
        ("array", "2^64 or more bytes are needed, 64 are left; the download may be incomplete", "18446744073709551615"),
    ] {
        let output = explain(&[&path(name)]);
        assert!(code(&output) == 1 && output.stdout.is_empty(), "{name}: {}", output.stdout);
        assert!(output.stderr.contains(said) && !output.stderr.contains(not), "{name}: {}", output.stderr);
        assert!(!said.contains("announced") || output.stderr.trim_end().ends_with("; the download may be incomplete"), "{}", output.stderr);
    }
}

#[test]
fn layers_for_a_gpu_that_is_not_named_and_layers_that_do_not_exist_are_warned_of() {
    let model = small();
    let said = |args: &[&str]| explain(&[&[model.as_str()], args].concat()).stdout;
    for (layers, words) in [("99", "99 layers are to go to a GPU"), ("all", "All layers are to go to a GPU")] {
        let alone = said(&["-ngl", layers]);
        assert!(alone.contains(&format!("WARNING no_device: {words} (-ngl), but no device is named")), "{alone}");
        assert!(!said(&["-ngl", layers, "-dev", "CUDA0"]).contains("no_device"));
    }
    for quiet in [&["-ngl", "0"][..], &["-ngl", "auto"], &[]] {
        assert!(!said(quiet).contains("WARNING"), "{quiet:?}");
    }
    let dir = tempfile::tempdir().unwrap();
    let absurd = dir.path().join("absurd.gguf");
    let mut writer = gguf::Writer::new("qwen3moe");
    writer.set("qwen3moe.block_count", gguf::Value::U32(4_000_000_000));
    writer.tensor("blk.0.attn_q.weight", gguf::Type::F32, &[32, 2]).unwrap();
    writer.write_sparse(&absurd, 8).unwrap();
    let output = explain(&[absurd.to_str().unwrap()]);
    assert_eq!(code(&output), 0, "{}", output.stderr);
    let expected = "WARNING layer_count: qwen3moe.block_count says 4000000000 layers, but the tensors have 1.";
    assert!(output.stdout.contains(expected), "{}", output.stdout);
}

#[test]
fn numbers_of_layers_below_zero_mean_what_they_mean_in_llama_cpp() {
    // -1 is `auto`, -2 is `all`; only `all` is asked for, and so warned of without a device.
    assert!(!explain(&[&small(), "-ngl", "-1"]).stdout.contains("no_device"));
    assert!(explain(&[&small(), "-ngl", "-2"]).stdout.contains("WARNING no_device: All layers"));
    for option in ["-ncmoe", "-ncffn"] {
        let output = explain(&[&small(), option, "-1"]);
        assert!(code(&output) == 2 && output.stderr.contains("a number of layers is expected"), "{}", output.stderr);
    }
}

#[test]
fn a_line_end_in_a_path_makes_no_second_line() {
    let output = explain(&["/no\nsuch/model.gguf"]);
    assert!(code(&output) == 1 && output.stderr.trim_end().lines().count() == 1, "{}", output.stderr);
}

#[test]
fn help_and_version_that_cannot_be_written_are_a_failure() {
    for args in [&["--help"][..], &["--version"], &["explain", "--help"]] {
        let to = |path: &str| {
            let out = fs::OpenOptions::new().write(true).open(path).unwrap();
            berth(args).stdout(out).stderr(std::process::Stdio::null()).status().unwrap().code()
        };
        assert_eq!((to("/dev/full"), to("/dev/null")), (Some(1), Some(0)), "{args:?}");
    }
    assert_eq!(code(&ran(berth(&["no-such-command"]), None)), 2, "what is wrong with the options keeps its code");
}

#[test]
fn help_names_the_spellings_of_llama_cpp() {
    let output = explain(&["--help"]);
    for spelling in ["-ot", "-cmoe", "-ncmoe", "-ncffn", "-ngl", "-nr", "-dev"] {
        assert!(output.stdout.contains(&format!("Also {spelling}")), "{spelling}: {}", output.stdout);
    }
}

#[test]
fn a_path_cannot_speak_to_the_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let escapes = "a\u{1b}[2J\u{1b}]0;title\u{7}\u{9b}31m\u{202e}\u{2067}\u{2028}\u{feff}.gguf";
    let path = dir.path().join(escapes);
    let quiet = |output: &Output| {
        let all = format!("{}{}", output.stdout, output.stderr);
        assert!(!all.is_empty() && !all.chars().any(|c| berth::text::is_loud(c) && c != '\n'), "{all:?}");
    };
    let missing = explain(&[path.to_str().unwrap()]);
    assert_eq!(code(&missing), 1);
    quiet(&missing);
    fs::copy(small(), &path).unwrap();
    for args in [&[][..], &["--json"], &["-ot", "exps=NO\u{1b}[2JWHERE"], &["--html", "/nonexistent/\u{1b}[2J"], &["--dev", "\u{9b}2J"]] {
        quiet(&explain(&[&[path.to_str().unwrap()], args].concat()));
    }
    for json in [&[][..], &["--json"]] {
        let mut command = berth(&[&["doctor", "--no-measure", "--llama", path.to_str().unwrap()], json].concat());
        command.env("GGML_BACKEND_PATH", &path);
        let output = ran(command, Some(&path));
        quiet(&output);
        assert!(output.stdout.contains(".gguf"), "{}", output.stdout);
    }
}

#[test]
fn an_arena_in_a_file_system_in_memory_is_warned_of() {
    let memory = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    if !memory.lines().any(|l| l.split(' ').nth(1) == Some("/dev/shm") && l.split(' ').nth(2) == Some("tmpfs")) {
        ffi_tests::skip::skipped("an arena in memory", "/dev/shm is no tmpfs here");
        return;
    }
    let (shm, disk) = (tempfile::tempdir_in("/dev/shm").unwrap(), tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
    let model = small();
    let warned = |arena: Option<&Path>, home: &Path, rules: &str| {
        let mut command = berth(&["explain", &model, "-ot", rules]);
        command.env("XDG_CACHE_HOME", home);
        let output = ran(command, arena);
        assert_eq!(code(&output), 0, "{}", output.stderr);
        output.stdout.contains("WARNING arena_in_memory: The arena's directory /dev/shm/")
    };
    assert!(warned(Some(shm.path()), disk.path(), "exps=ARENA"));
    assert!(!warned(Some(shm.path()), disk.path(), "exps=CPU_MMAP") && !warned(Some(disk.path()), shm.path(), "exps=ARENA"));
    // The default directory is not there yet.
    assert!(warned(None, shm.path(), "exps=ARENA") && !warned(None, disk.path(), "exps=ARENA"));
    assert!(!shm.path().join("berth").exists(), "explain makes nothing");

    let output = ran(berth(&["doctor", "--no-measure", "--json"]), Some(shm.path()));
    let all: Vec<Value> = serde_json::from_str(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", output.stdout));
    let found = all.iter().find(|f| f["item"] == "arena").unwrap_or_else(|| panic!("{all:?}"));
    assert!(found["verdict"] == "note" && found["hint"].as_str().unwrap().contains("file system in memory"), "{found}");
}

#[test]
fn a_place_that_this_machine_does_not_have_is_marked_in_every_part_of_the_table() {
    let model = small();
    let missing = Path::new("/nonexistent/no/arena");
    let output = ran(berth(&["explain", &model, "-ot", "exps=ARENA"]), Some(missing));
    let lines: Vec<&str> = output.stdout.lines().collect();
    assert!(lines[1].contains("asked to be in an arena, which this machine does not have"), "{}", output.stdout);
    assert!(
        lines.iter().any(|l| l.starts_with("ARENA ") && l.ends_with("<== not on this machine: ordinary memory instead")),
        "{}",
        output.stdout
    );
    assert!(lines.iter().any(|l| l.contains("ffn_up_exps") && l.contains(" arena? ")), "{}", output.stdout);
    let e: Value = serde_json::from_str(&ran(berth(&["explain", &model, "-ot", "exps=ARENA", "--json"]), Some(missing)).stdout).unwrap();
    assert!(e["machine"]["no_arena"].as_str().is_some_and(|why| why.contains("/nonexistent/no/arena")), "{}", e["machine"]);
}

/// The finding about llama.cpp: verdict, words and hint.
fn doctor(path: &Path) -> (String, String) {
    let mut command = berth(&["doctor", "--no-measure", "--json", "--llama"]);
    command.arg(path);
    let output = ran(command, Some(&std::env::temp_dir()));
    let all: Vec<Value> = serde_json::from_str(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", output.stdout));
    let found = all.iter().find(|f| f["item"] == "llama.cpp").unwrap_or_else(|| panic!("{all:?}")).clone();
    let text = |key: &str| found[key].as_str().unwrap_or_default().to_owned();
    (text("verdict"), format!("{} -> {}", text("found"), text("hint")))
}

#[test]
fn doctor_says_what_is_wrong_with_a_path_that_is_no_llama_cpp_and_never_waits_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| -> PathBuf { dir.path().join(name) };
    let fifo = |at: &Path| assert!(Command::new("mkfifo").arg(at).status().unwrap().success());
    fifo(&path("pipe"));
    fs::create_dir(path("empty")).unwrap();
    fs::create_dir(path("piped")).unwrap();
    fifo(&path("piped/libggml-base.so"));
    fs::create_dir(path("text")).unwrap();
    fs::write(path("text/libggml-base.so"), "no library").unwrap();
    fs::create_dir(path("other")).unwrap();
    let built = Command::new("cc").args(["-shared", "-fPIC", "-x", "c", "/dev/null", "-o"]).arg(path("other/libggml-base.so")).status();
    assert!(built.is_ok_and(|s| s.success()));
    // A build directory has its libraries in bin.
    fs::create_dir_all(path("root/bin")).unwrap();
    fs::copy(path("other/libggml-base.so"), path("root/bin/libggml-base.so")).unwrap();
    for (name, said) in [
        ("missing", "No such file or directory"),
        ("pipe", "is neither a file nor a directory"),
        ("empty", "no libggml-base.so in it, in its lib or bin, or in ../lib"),
        ("piped", "no libggml-base.so in it, in its lib or bin, or in ../lib"),
        ("text", "it is no library of this kind of machine"),
        ("other", "it is no ggml"),
        ("root", "root/bin/libggml-base.so"),
    ] {
        let (verdict, text) = doctor(&path(name));
        assert_eq!(verdict, "bad", "{name}: {text}");
        assert!(text.contains(said) && text.contains(dir.path().to_str().unwrap()), "{name}: {text}");
    }
}

#[test]
fn doctor_finds_a_setting_that_is_not_understood() {
    for (name, value, verdict) in [("BERTH_ISA", "sse9", "bad"), ("BERTH_STRICT", "perhaps", "bad"), ("BERTH_ISA", "scalar", "good")] {
        let mut command = berth(&["doctor", "--no-measure", "--json"]);
        command.env(name, value);
        let output = ran(command, Some(&std::env::temp_dir()));
        let all: Vec<Value> = serde_json::from_str(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", output.stdout));
        let found = all.iter().find(|f| f["item"] == "settings").unwrap_or_else(|| panic!("{all:?}"));
        assert_eq!(found["verdict"], verdict, "{found}");
        assert!(found["found"].as_str().unwrap().contains(value), "{found}");
    }
}

#[test]
fn devices_are_named_as_in_llama_cpp() {
    // The output comes behind the last layer.
    let layers = |args: &[&str]| {
        let e = json(args);
        [places(&e, "attn_q."), places(&e, "output_norm")].concat()
    };
    let two = layers(&["-dev", "CUDA0,CUDA1"]);
    assert_eq!(two, ["CUDA0", "CUDA1"]);
    assert_eq!(layers(&["-dev", "CUDA0:CUDA_Host,RPC0[127.0.0.1:50052]"]), ["CUDA0", "RPC0[127.0.0.1:50052]"]);
    assert_eq!(layers(&["--device", "CUDA0", "--device", "CUDA1"]), two);
    assert_eq!(layers(&["-dev", "none"]), ["CPU", "CPU"]);
}

/// What `explain` says with an environment.
#[test]
fn layers_are_split_over_devices_as_asked_and_otherwise_equally_with_a_warning() {
    let explained = |split: &[&str]| json(&[&["-dev", "CUDA0,CUDA1"], split].concat());
    let assumed = |e: &Value| e["warnings"].as_array().expect("warnings").iter().any(|w| w["code"] == "shares_assumed");
    // Two layers and the output behind them.
    for (split, first, second, output, is_assumed) in [
        (&[][..], "CUDA0", "CUDA0", "CUDA1", true),
        (&["-ts", "0,0"], "CUDA0", "CUDA0", "CUDA1", true),
        (&["-ts", "1,1"], "CUDA0", "CUDA0", "CUDA1", false),
        (&["--tensor-split", "3/1"], "CUDA0", "CUDA0", "CUDA0", false),
        (&["-ts", "1,3"], "CUDA0", "CUDA1", "CUDA1", false),
        // A device without a number gets nothing, and a number without a device is for none.
        (&["-ts", "7"], "CUDA0", "CUDA0", "CUDA0", false),
        (&["-ts", "0,2,5"], "CUDA1", "CUDA1", "CUDA1", false),
    ] {
        let e = explained(split);
        let seen = ["blk.0.attn_q.weight", "blk.1.attn_q.weight", "output_norm.weight"].map(|name| places(&e, name));
        assert_eq!(seen, [first, second, output].map(|place| vec![place.to_owned()]), "{split:?}");
        assert_eq!(assumed(&e), is_assumed, "{split:?}");
    }
    assert!(!assumed(&json(&["-dev", "CUDA0"])) && !assumed(&json(&["-dev", "CUDA0,CUDA1", "-ngl", "0"])));
    for bad in ["x", "", "1,x", "-1,2", "nan", "1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1"] {
        assert_eq!(code(&explain(&[&small(), "-dev", "CUDA0,CUDA1", "-ts", bad])), 2, "{bad}");
    }
}

fn json_with(env: &[(&str, &str)], args: &[&str]) -> Value {
    let mut command = berth(&[&["explain", &small(), "--json"], args].concat());
    command.envs(env.iter().copied());
    let output = ran(command, None);
    assert_eq!(code(&output), 0, "{}", output.stderr);
    serde_json::from_str(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", output.stdout))
}

#[test]
fn berth_auto_gives_the_experts_that_no_rule_names_to_the_mapping_as_the_plug_in_does() {
    let rule = ["-ot", r"blk\.0\..*exps=ARENA"];
    for (value, want) in [("", ["ARENA", "CPU"]), ("0", ["ARENA", "CPU"]), ("1", ["ARENA", "CPU_MMAP"])] {
        let e = json_with(&[("BERTH_AUTO", value)], &rule);
        assert_eq!(places(&e, "exps.weight"), want, "BERTH_AUTO={value}");
        assert_eq!(places(&e, "attn_q."), ["CPU"]);
    }
    // A device that computes nothing takes nothing.
    assert_eq!(places(&json_with(&[("BERTH_AUTO", "1"), ("BERTH_FUSE", "0")], &rule), "exps.weight"), ["ARENA", "CPU"]);
}

#[test]
fn the_threshold_of_the_environment_is_the_one_that_explain_names() {
    let (own, host) = ("BERTH_OFFLOAD_MIN_BATCH", "GGML_OP_OFFLOAD_MIN_BATCH");
    for (env, want) in [
        (&[][..], 32),
        (&[(host, "64")], 64),
        (&[(own, "8")], 8),
        (&[(host, "64"), (own, "8")], 8),
        (&[(host, "64x")], 64),
        (&[(host, "many")], 0),
    ] {
        assert_eq!(json_with(env, &["-dev", "CUDA0"])["offload_min_batch"], want, "{env:?}");
    }
}

#[test]
fn a_tier_that_is_none_is_a_warning_and_fails_with_strict() {
    let run = |value: &str, extra: &[&str]| {
        let mut command = berth(&[&["explain", &small()], extra].concat());
        command.env("BERTH_ISA", value);
        ran(command, None)
    };
    let lenient = run("sse9", &[]);
    assert!(code(&lenient) == 0 && lenient.stdout.contains("WARNING bad_setting: BERTH_ISA=\"sse9\""), "{}", lenient.stdout);
    assert_eq!(code(&run("sse9", &["--strict"])), 1);
    assert_eq!(code(&run("scalar", &["--strict"])), 0);
}

#[test]
fn doctor_notes_a_variable_that_berth_does_not_have_and_the_one_that_was_meant() {
    let mut command = berth(&["doctor", "--no-measure", "--json"]);
    command.env("BERTH_ARENADIR", "/x").env("BERTH_SOMETHING_ELSE_ALTOGETHER", "1").env("BERTH_STRICT", "0");
    let output = ran(command, Some(&std::env::temp_dir()));
    let all: Vec<Value> = serde_json::from_str(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", output.stdout));
    let notes: Vec<&Value> = all.iter().filter(|f| f["item"] == "variable").collect();
    assert_eq!(notes.len(), 2, "{all:?}");
    assert!(notes.iter().all(|f| f["verdict"] == "note"));
    let of = |name: &str| notes.iter().find(|f| f["found"].as_str().is_some_and(|t| t.contains(name))).unwrap_or_else(|| panic!("{name}"));
    assert!(of("BERTH_ARENADIR")["hint"].as_str().is_some_and(|h| h.contains("BERTH_ARENA_DIR")), "{notes:?}");
    assert!(of("BERTH_SOMETHING_ELSE_ALTOGETHER")["hint"].as_str().is_some_and(|h| !h.contains("is meant")), "{notes:?}");
}

#[test]
fn a_default_arena_directory_that_cannot_be_made_is_not_honoured_and_one_that_can_is_not_made() {
    let run = |cache: &Path, extra: &[&str]| {
        let mut command = berth(&[&["explain", &small(), "-ot", "exps=ARENA"], extra].concat());
        command.env("XDG_CACHE_HOME", cache);
        ran(command, None)
    };
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let linked = dir.path().join("linked");
    fs::create_dir(&linked).unwrap();
    std::os::unix::fs::symlink("nowhere", linked.join("berth")).unwrap();
    for cache in [Path::new("/proc"), Path::new("/sys"), &file, &dir.path().join("too/deep"), &linked] {
        let lenient = run(cache, &[]);
        assert!(code(&lenient) == 0 && lenient.stdout.contains("WARNING no_arena: "), "{}: {}", cache.display(), lenient.stdout);
        assert_eq!(code(&run(cache, &["--strict"])), 1, "{}", cache.display());
    }
    let cache = dir.path().join("cache");
    let output = run(&cache, &["--json"]);
    let e: Value = serde_json::from_str(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", output.stdout));
    assert!(e["machine"]["arena_free"].as_u64().is_some() && !cache.exists(), "{}", e["machine"]);
    assert_eq!(code(&run(&cache, &["--strict"])), 0);
}

#[test]
fn doctor_finds_an_arena_directory_in_which_no_file_can_be_made() {
    for place in ["/proc", "/sys"] {
        let output = ran(berth(&["doctor", "--no-measure", "--json"]), Some(Path::new(place)));
        let all: Vec<Value> = serde_json::from_str(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", output.stdout));
        let found = all.iter().find(|f| f["item"] == "arena").unwrap_or_else(|| panic!("{all:?}"));
        assert!(found["verdict"] == "bad" && found["found"].as_str().is_some_and(|t| t.contains(place)), "{found}");
        assert_eq!(code(&output), 1);
    }
}
