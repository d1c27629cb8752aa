//! `berth doctor`: one line per thing that decides what Berth can do here, with what to do where something is amiss.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use berth::abi::{self, Host};
use berth::buffers;
use berth::config::{self, Config};
use berth::log::one_line;
use berth::memory::{arena, budget, fill, pinned, system};
use berth::moe::isa;
use berth::placement::render;
use serde::Serialize;

/// What to look at.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A llama.cpp program, or a directory with its libraries [default: the first llama-server, llama-cli or llama-completion in PATH].
    #[arg(long, value_name = "PATH")]
    llama: Option<PathBuf>,
    /// Do not measure the arena directory (it takes 256 MiB of it for a few seconds).
    #[arg(long)]
    no_measure: bool,
    /// Print one JSON array.
    #[arg(long)]
    json: bool,
}

/// How good it is.
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Verdict {
    /// As it should be.
    Good,
    /// Works, and could be better.
    Note,
    /// Something does not work.
    Bad,
}

#[derive(Serialize)]
struct Finding {
    item: &'static str,
    verdict: Verdict,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<String>,
}

fn good(item: &'static str, found: impl Into<String>) -> Finding {
    Finding { item, verdict: Verdict::Good, found: found.into(), hint: None }
}

fn note(item: &'static str, found: impl Into<String>, hint: impl Into<String>) -> Finding {
    Finding { item, verdict: Verdict::Note, found: found.into(), hint: Some(hint.into()) }
}

fn bad(item: &'static str, found: impl Into<String>, hint: impl Into<String>) -> Finding {
    Finding { item, verdict: Verdict::Bad, found: found.into(), hint: Some(hint.into()) }
}

/// Prints the findings; fails if one of them is bad.
pub(crate) fn run(args: &Args) -> ExitCode {
    let mut findings = vec![processor(), ram(), memlock(), huge_pages(), numa()];
    match config::get() {
        Ok(config) => {
            findings.push(match isa::detect() {
                Ok(isa) => good("settings", format!("every BERTH_* variable is understood; kernels: {}", isa.tier().name())),
                Err(error) => bad("settings", error.message, "correct or unset it: nothing is computed with such a value"),
            });
            findings.extend(arena_directory(config, !args.no_measure));
        }
        Err(error) => findings.push(bad("settings", error.message, "correct or unset it: Berth stays out of a process with such a value")),
    }
    findings.extend(unknown_variables());
    findings.push(cuda());
    findings.push(page_locked());
    findings.extend(llama(args.llama.as_deref()));
    findings.extend(plug_in());
    let json = || render::quiet_json(&serde_json::to_string_pretty(&findings).unwrap_or_default()) + "\n";
    let text = if args.json { json() } else { table(&findings) };
    let code = if findings.iter().any(|f| f.verdict == Verdict::Bad) { ExitCode::FAILURE } else { ExitCode::SUCCESS };
    crate::finish("doctor", crate::print(&text).map(|()| code))
}

fn table(findings: &[Finding]) -> String {
    let width = findings.iter().map(|f| f.item.len()).max().unwrap_or(0);
    let mut text = String::new();
    for f in findings {
        let mark = match f.verdict {
            Verdict::Good => "ok  ",
            Verdict::Note => "note",
            Verdict::Bad => "BAD ",
        };
        text += &format!("{mark}  {:width$}  {}\n", f.item, one_line(&f.found));
        if let Some(hint) = &f.hint {
            text += &format!("      {:width$}  -> {}\n", "", one_line(hint));
        }
    }
    text
}

fn processor() -> Finding {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|l| l.strip_prefix("model name")?.split_once(':')).map_or("unknown", |(_, name)| name.trim());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let features = features();
    let found = format!("{model}, {cores} usable cores; {}", if features.is_empty() { "no AVX2".into() } else { features.join(" ") });
    if features.contains(&"avx2") { good("processor", found) } else { note("processor", found, "without AVX2 everything is slow") }
}

#[cfg(target_arch = "x86_64")]
fn features() -> Vec<&'static str> {
    macro_rules! present {
        ($($name:tt),*) => { [$(($name, is_x86_feature_detected!($name))),*] };
    }
    let all = present!("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "avx512bf16", "avxvnni");
    all.into_iter().filter(|(_, here)| *here).map(|(name, _)| name).collect()
}

#[cfg(not(target_arch = "x86_64"))]
fn features() -> Vec<&'static str> {
    Vec::new()
}

fn gib(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / (1u64 << 30) as f64)
}

fn ram() -> Finding {
    let Some(ram) = system::ram() else { return note("memory", "/proc/meminfo cannot be read", "mount /proc") };
    let found = format!("{} of {} available", gib(ram.available), gib(ram.total));
    match system::cgroup_limit().filter(|limit| *limit < ram.total) {
        Some(limit) => {
            note("memory", format!("{found}; this cgroup may use {}", gib(limit)), "that limit, not the machine's memory, decides")
        }
        None => good("memory", found),
    }
}

fn memlock() -> Finding {
    match system::memlock_limit() {
        None => good("memlock", "no limit"),
        Some(limit) => note(
            "memlock",
            format!("at most {:.1} MiB may be locked", limit as f64 / f64::from(1 << 20)),
            "--mlock and BERTH_LOCK lock no more than that (ulimit -l, LimitMEMLOCK=); page-locking through the CUDA driver is not bound by it",
        ),
    }
}

fn huge_pages() -> Finding {
    match system::transparent_huge_pages().as_deref() {
        Some("never") => note("huge pages", "off", "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"),
        Some(mode) => good("huge pages", format!("transparent: {mode}")),
        None => note("huge pages", "the kernel has none", "a kernel with CONFIG_TRANSPARENT_HUGEPAGE"),
    }
}

fn numa() -> Finding {
    match system::numa_nodes() {
        1 => good("NUMA", "one node"),
        nodes => note(
            "NUMA",
            format!("{nodes} nodes"),
            "BERTH_NUMA=interleave spreads Berth's memory over them; and llama.cpp's --numa distribute its threads",
        ),
    }
}

fn arena_directory(config: &Config, measure: bool) -> Vec<Finding> {
    const ITEM: &str = "arena";
    let Some(path) = &config.arena_dir else {
        return vec![bad(ITEM, "no directory", "set BERTH_ARENA_DIR, XDG_CACHE_HOME or HOME")];
    };
    let directory = match arena::Directory::open(path, config.arena_dir_is_default) {
        Ok(directory) => directory,
        Err(error) => return vec![bad(ITEM, error.message, "set BERTH_ARENA_DIR to a directory on a disk with room for the experts")],
    };
    if let Err(error) = directory.try_file() {
        return vec![bad(ITEM, error.message, "set BERTH_ARENA_DIR to a directory in which files can be made")];
    }
    let kind = system::file_system(path).unwrap_or_else(|| "unknown".into());
    let free = directory.free_bytes().map_or_else(|e| e.message, |bytes| format!("{} free", gib(bytes)));
    let found = format!("{} ({kind}, {free})", path.display());
    if directory.in_memory {
        return vec![note(ITEM, found, "it is a file system in memory, so files there take RAM; set BERTH_ARENA_DIR to a disk")];
    }
    let mut findings = vec![good(ITEM, found)];
    if measure {
        findings.push(match read_rate(path) {
            Ok(rate) => good("arena reads", format!("{rate:.2} GB/s, sequential, not from the page cache")),
            Err(error) => note("arena reads", format!("not measured: {error}"), "is there 256 MiB of room?"),
        });
    }
    findings
}

/// GB/s of reading a fresh file of 256 MiB whose pages have been dropped.
fn read_rate(dir: &Path) -> Result<f64, String> {
    const BYTES: usize = 256 << 20;
    let text = |e: std::io::Error| e.to_string();
    system::within_file_limit(BYTES).map_err(|e| e.message)?;
    let mut target = Vec::new();
    target.try_reserve_exact(BYTES).map_err(|e| e.to_string())?;
    let path = dir.join(format!("berth-doctor-{}", std::process::id()));
    let mut options = std::fs::OpenOptions::new();
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file: File = options.read(true).write(true).create_new(true).open(&path).map_err(text)?;
    std::fs::remove_file(&path).map_err(text)?;
    // Not zeros, which a file system might not store.
    let mut state = 1u64;
    let block: Vec<u8> = (0..1 << 20)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect();
    for _ in 0..BYTES / block.len() {
        file.write_all(&block).map_err(text)?;
    }
    system::drop_cached(&file).map_err(|e| e.message)?;
    target.resize(BYTES, 0u8);
    let start = Instant::now();
    fill::fill_slice(&file, &path, 0, &mut target).map_err(|e| e.message)?;
    Ok(BYTES as f64 / start.elapsed().as_secs_f64() / 1e9)
}

/// Variables that look like Berth's and are not: nobody reads them.
fn unknown_variables() -> Vec<Finding> {
    let mut names: Vec<String> = std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned()).collect();
    names.retain(|n| n.starts_with("BERTH_") && !config::VARIABLES.contains(&n.as_str()));
    names.sort();
    let hint = |name: &str| match config::nearest_variable(name) {
        Some(meant) => format!("perhaps {meant} is meant"),
        None => format!("the variables are {}", config::VARIABLES.join(", ")),
    };
    names.iter().map(|name| note("variable", format!("{name} is set, and Berth has no such variable"), hint(name))).collect()
}

fn cuda() -> Finding {
    match pinned::driver() {
        Ok((_, devices)) if config::get().is_ok_and(|c| i64::from(c.cuda_device) >= i64::from(devices)) => {
            bad("CUDA", format!("{devices} devices, and BERTH_CUDA_DEVICE names none of them"), "they are numbered from 0")
        }
        Ok((version, devices)) => good("CUDA", format!("driver for CUDA {}.{}, {devices} devices", version / 1000, version % 1000 / 10)),
        Err(error) => note("CUDA", error.message, "CUDA_Host gives pageable memory here; CPU_MMAP and ARENA need no CUDA"),
    }
}

/// How much may be page-locked, and what decides that.
fn page_locked() -> Finding {
    const ITEM: &str = "page-locked";
    let Ok(config) = config::get() else { return note(ITEM, "unknown", "correct the settings first") };
    let budget = budget::now(buffers::pin_limit(config));
    let found = format!("CUDA_Host may lock {}: {}", gib(budget.left), budget.because);
    if let Some(off) = buffers::pin_switched_off(config) {
        return note(ITEM, format!("{found}; but {}", off.message), "unset it, or use CPU_MMAP or ARENA");
    }
    if budget.left == 0 { note(ITEM, found, "BERTH_PIN_LIMIT decides what share, or how many bytes") } else { good(ITEM, found) }
}

/// Whether stock llama.cpp is here, and whether Berth fits it.
fn llama(given: Option<&Path>) -> Vec<Finding> {
    const ITEM: &str = "llama.cpp";
    const NAME_IT: &str = "name a program of llama.cpp or the directory of its libraries";
    let programs = ["llama-server", "llama-cli", "llama-completion"];
    let path = std::env::var_os("PATH").unwrap_or_default();
    let in_path = || std::env::split_paths(&path).flat_map(|d| programs.map(|p| d.join(p))).find(|p| p.is_file());
    let Some(start) = given.map(Path::to_owned).or_else(in_path) else {
        return vec![note(ITEM, "no llama-server, llama-cli or llama-completion in PATH", "name it: berth doctor --llama PATH")];
    };
    // Nothing is opened that is not a file: a named pipe would wait for its writer.
    let start = match start.canonicalize() {
        Ok(path) if path.is_dir() || path.is_file() => path,
        Ok(path) => return vec![bad(ITEM, format!("{} is neither a file nor a directory", path.display()), NAME_IT)],
        Err(error) => return vec![bad(ITEM, format!("{}: {error}", start.display()), NAME_IT)],
    };
    let home = if start.is_dir() { start.clone() } else { start.parent().map(Path::to_owned).unwrap_or_default() };
    let places = [home.clone(), home.join("../lib"), home.join("../lib64"), home.join("lib"), home.join("bin")];
    let libraries = places.iter().filter_map(|dir| ggml_base_in(dir)).next();
    let Some(library) = libraries else {
        let found = format!(
            "{}: no libggml-base.so {} or in ../lib",
            start.display(),
            if start.is_dir() { "in it, in its lib or bin," } else { "beside it" }
        );
        let hint = if is_script(&start) {
            "it is a script, which starts another program: name that one, or the directory of its libraries"
        } else {
            "if it is a llama.cpp that is linked statically, Berth cannot be loaded into it; else name the directory of its libraries"
        };
        return vec![if given.is_some() { bad(ITEM, found, hint) } else { note(ITEM, found, hint) }];
    };
    let opened = match abi::open_library(&library) {
        Ok(opened) => opened,
        Err(error) => {
            let hint = "it is no library of this kind of machine, or libraries that it needs are missing";
            return vec![bad(ITEM, error.message, hint)];
        }
    };
    let fits = Host::find(None, |_| None, |host| (host.version, host.layout));
    vec![match fits {
        Ok((version, layout)) => {
            good(ITEM, format!("{} has ggml {version} (tables {}): Berth fits", opened.file().display(), layout.name()))
        }
        Err(error) => {
            let hint = "it is no ggml, or one from before September 2025: then update llama.cpp";
            bad(ITEM, format!("{}: {error}", opened.file().display()), hint)
        }
    }]
}

/// Whether a file starts with `#!`, as what pip puts into `bin` does.
fn is_script(path: &Path) -> bool {
    let mut start = [0; 2];
    path.is_file() && File::open(path).is_ok_and(|mut file| file.read_exact(&mut start).is_ok()) && &start == b"#!"
}

/// `libggml-base.so` in a directory; the name with the ABI number, which programs link to, before the plain one, which compilers look for, and that
/// before the full version. Other names that begin so are no library's.
fn ggml_base_in(dir: &Path) -> Option<PathBuf> {
    let files = std::fs::read_dir(dir).ok()?.flatten().map(|e| e.path()).filter(|p| p.is_file());
    let ranked = files.filter_map(|path| Some((rank(path.file_name()?.to_str()?)?, path)));
    ranked.min().map(|(_, path)| path)
}

/// How good a name of `libggml-base.so` it is, the best first; of two ABI numbers the newer one. `None` if it is none.
fn rank(file: &str) -> Option<(u8, std::cmp::Reverse<u64>)> {
    let version = file.strip_prefix("libggml-base.so")?;
    if version.is_empty() {
        return Some((1, std::cmp::Reverse(0)));
    }
    let numbers = version.strip_prefix('.')?.split('.').map(|n| n.parse().ok()).collect::<Option<Vec<u64>>>()?;
    Some((if numbers.len() == 1 { 0 } else { 2 }, std::cmp::Reverse(numbers[0])))
}

/// What `GGML_BACKEND_PATH` says, if it is set.
fn plug_in() -> Option<Finding> {
    const ITEM: &str = "GGML_BACKEND_PATH";
    let path = PathBuf::from(std::env::var_os("GGML_BACKEND_PATH")?);
    let found = path.display().to_string();
    Some(if !path.is_absolute() {
        bad(ITEM, found, "an absolute path is needed")
    } else if !path.is_file() {
        bad(ITEM, found, "there is no such file")
    } else {
        good(ITEM, found)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_that_programs_link_is_chosen_and_no_backup_of_it() {
        let dir = tempfile::tempdir().unwrap();
        let chosen = || ggml_base_in(dir.path()).map(|p| p.file_name().unwrap().to_str().unwrap().to_owned());
        let mut best = None;
        for (file, is_better) in [
            ("libggml-base.so.bak", false),
            ("libggml-base.so.0.bak", false),
            ("libggml-base.so-old", false),
            ("libggml-base.so.", false),
            ("libggml-base.so.0.25.3", true),
            ("libggml-base.so", true),
            ("libggml-base.so.0", true),
            ("libggml-base.so.0.26.0", false),
            ("libggml-base.so.1", true),
        ] {
            std::fs::write(dir.path().join(file), "").unwrap();
            best = if is_better { Some(file.to_owned()) } else { best };
            assert_eq!(chosen(), best, "{file}");
        }
    }

    #[test]
    fn a_script_that_starts_a_server_is_told_from_a_program() {
        let dir = tempfile::tempdir().unwrap();
        let hint = |name: &str, bytes: &[u8]| {
            std::fs::write(dir.path().join(name), bytes).unwrap();
            llama(Some(&dir.path().join(name)))[0].hint.clone().unwrap_or_default()
        };
        assert!(hint("llama-server-vulkan", b"#!/usr/bin/python3\n").contains("it is a script"));
        for (name, bytes) in [("llama-server", &b"\x7fELF"[..]), ("empty", b""), ("one", b"#")] {
            assert!(hint(name, bytes).contains("linked statically"), "{name}");
        }
    }
}
