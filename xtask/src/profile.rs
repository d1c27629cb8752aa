//! `cargo xtask profile`: where stock llama-bench spends its time, with the experts computed by Berth and by llama.cpp; the result is
//! docs/profile.md.
//!
//! A sampler is preloaded (`ffi-tests/c/sample.c`): at each tick of processor time it notes where the running thread is. `nm` gives the
//! addresses their names, and the names are put together into what a graph is made of.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ffi_tests::hosts::{self, Host};
use ffi_tests::{run, tools};

use crate::speed::{self, Side};
use crate::{figures, shell};

/// Profile stock llama-bench with and without Berth, and write docs/profile.md. The machine should have nothing else to do.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Blocks of the model.
    #[arg(long, default_value_t = 12)]
    layers: u32,
    /// Formats of the experts, as gate and up/down.
    #[arg(long, default_value = "q4_k/q6_k")]
    format: String,
    /// Threads.
    #[arg(long, default_value_t = 2)]
    threads: u32,
    /// Print only, write nothing.
    #[arg(long)]
    dry: bool,
}

const DOCS: &str = "docs/profile.md";

/// What a function belongs to: the first of these whose words one of is part of the function's name, or of its library's.
const PARTS: &[(&str, &[&str])] = &[
    (
        "Berth: products of gate, up and down",
        &["berth::moe::kernels::avx512::", "berth::moe::kernels::avx2::", "berth::moe::kernels::scalar"],
    ),
    ("Berth: waiting for other threads", &["berth::moe::crew"]),
    ("Berth: activation and rounding", &["berth::moe::acts", "berth::moe::activation"]),
    ("Berth: all else", &["berth::", "libberth"]),
    ("waiting for other threads (OpenMP)", &["libgomp", "ggml_barrier"]),
    ("loading", &["repack_", "quantize_row_q8_K_ref"]),
    ("attention", &["flash_attn", "soft_max", "rope", "ggml_vec_mad", "set_rows"]),
    ("products", &["gemm", "gemv", "vec_dot", "mul_mat", "tinyBLAS", "sgemm", "tile", "quantize_", "from_float", "ggml_cpu_fp32_to"]),
    (
        "norms, sums, activations, routing",
        &["norm", "ggml_vec_", "silu", "swiglu", "glu", "argsort", "get_rows", "ggml_compute_forward_", "binary_op", "op_add", "op_mul"],
    ),
    ("graph and scheduler", &["ggml_", "libggml", "libllama", "llama"]),
    ("C library and kernel", &["libc.", "libm.", "libstdc", "ld-linux", "vdso"]),
];

fn part_of(name: &str) -> &'static str {
    PARTS.iter().find(|(_, words)| words.iter().any(|w| name.contains(w))).map_or("other", |(part, _)| part)
}

/// Names of the functions of the objects of a process.
struct Names {
    /// First and last address of each mapping with code, where its object begins, and its path.
    mappings: Vec<([u64; 2], u64, PathBuf)>,
    /// Functions of an object by address.
    functions: BTreeMap<PathBuf, BTreeMap<u64, String>>,
}

impl Names {
    /// Reads the lines of `/proc/PID/maps`.
    fn new<'a>(maps: impl Iterator<Item = &'a str>) -> Result<Names> {
        let mut names = Names { mappings: Vec::new(), functions: BTreeMap::new() };
        let mut begins = BTreeMap::new();
        for line in maps {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let (Some((start, end)), Some(rights), Some(path)) =
                (fields.first().and_then(|f| f.split_once('-')), fields.get(1), fields.get(5))
            else {
                continue;
            };
            let range = [start, end].map(|hex| u64::from_str_radix(hex, 16));
            let [Ok(start), Ok(end)] = range else { continue };
            let begin = *begins.entry((*path).to_owned()).or_insert(start);
            if rights.contains('x') {
                names.mappings.push(([start, end], begin, PathBuf::from(path)));
            }
        }
        for (_, _, path) in &names.mappings {
            if path.is_file() && !names.functions.contains_key(path) {
                let functions = functions(path)?;
                names.functions.insert(path.clone(), functions);
            }
        }
        Ok(names)
    }

    /// The function at an address, or its object's name.
    fn at(&self, address: u64) -> String {
        let Some((_, begin, path)) = self.mappings.iter().find(|([start, end], ..)| (*start..*end).contains(&address)) else {
            return "?".to_owned();
        };
        let object = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let function = self.functions.get(path).and_then(|f| f.range(..=address - begin).next_back());
        // Of the system's libraries only exported functions have names, and an address belongs to one of the others as a rule.
        let nameless = ["libgomp", "libc.", "libm.", "ld-linux"].iter().any(|system| object.starts_with(system));
        function.map_or(object.clone(), |(_, name)| if nameless { object } else { name.clone() })
    }
}

/// Functions of an object file by address, as `nm` lists them.
fn functions(object: &Path) -> Result<BTreeMap<u64, String>> {
    let mut found = BTreeMap::new();
    for table in [&["-C"][..], &["-C", "-D"]] {
        let mut nm = tools::command("nm")?;
        nm.args(table).args(["--defined-only"]).arg(object);
        let text = run::run(nm, Duration::from_secs(60))?.stdout;
        for line in text.lines() {
            let mut fields = line.splitn(3, ' ');
            if let (Some(address), Some(kind), Some(name)) = (fields.next(), fields.next(), fields.next())
                && let (Ok(address), "t" | "T" | "w" | "W" | "i") = (u64::from_str_radix(address, 16), kind)
            {
                found.entry(address).or_insert_with(|| plain_name(name));
            }
        }
    }
    Ok(found)
}

/// A name without types: `void (anonymous namespace)::gemm<4>(int)` is `gemm`.
fn plain_name(name: &str) -> String {
    let name = name.replace("(anonymous namespace)::", "");
    let name = name.strip_prefix("void ").unwrap_or(&name);
    let short = name.split(['(', '<']).next().unwrap_or(name);
    if short.is_empty() { name.to_owned() } else { short.to_owned() }
}

/// One run, sampled.
struct Profile {
    tokens_per_second: f64,
    /// Samples by function.
    samples: BTreeMap<String, usize>,
}

impl Profile {
    /// Shares of the whole by part, without loading.
    fn parts(&self) -> BTreeMap<&'static str, f64> {
        let mut parts = BTreeMap::new();
        for (name, count) in &self.samples {
            *parts.entry(part_of(name)).or_insert(0.0) += *count as f64;
        }
        parts.remove("loading");
        let all: f64 = parts.values().sum();
        parts.values_mut().for_each(|p| *p /= all);
        parts
    }

    /// The functions with the most samples, and their shares.
    fn top(&self) -> Vec<(&str, f64)> {
        let computed = || self.samples.iter().filter(|(name, _)| part_of(name) != "loading");
        let all: usize = computed().map(|(_, n)| n).sum();
        let mut top: Vec<(&str, f64)> = computed().map(|(name, n)| (name.as_str(), *n as f64 / all as f64)).collect();
        top.sort_by(|a, b| b.1.total_cmp(&a.1));
        top.truncate(15);
        top
    }
}

fn profile(host: &Host, model: &Path, library: &Path, sampler: &Path, args: &Args, prompt: u32, side: Side) -> Result<Profile> {
    let to = tempfile::NamedTempFile::new()?;
    let mut command = speed::command(host, model, library, args.threads, &[prompt], side);
    command.args(["-r", "20"]).env("LD_PRELOAD", sampler).env("SAMPLE_TO", to.path());
    let tokens_per_second = speed::samples(command)?.first().context("llama-bench ran nothing")?.avg_ts;
    let text = fs::read_to_string(to.path())?;
    let (addresses, maps): (Vec<&str>, Vec<&str>) = text.lines().partition(|line| !line.contains(' '));
    ensure!(addresses.len() > 1000, "only {} samples were taken", addresses.len());
    let names = Names::new(maps.into_iter())?;
    let mut samples = BTreeMap::new();
    for address in addresses {
        *samples.entry(names.at(u64::from_str_radix(address, 16)?)).or_insert(0) += 1;
    }
    Ok(Profile { tokens_per_second, samples })
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let library = shell::berth()?;
    let host = hosts::get(speed::HOST).with_context(|| "llama-bench comes from a stock build")?;
    let scratch = tempfile::tempdir()?;
    let sampler = scratch.path().join("sample.so");
    let mut cc = tools::command("cc")?;
    cc.args(["-std=c11", "-O2", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-shared", "-fPIC", "-o"]).arg(&sampler);
    shell::step(cc.arg(shell::root().join("ffi-tests/c/sample.c")))?;
    let model = speed::model(&args.format, args.layers)?;
    let mut page = String::new();
    // Stock in the setting that is its fastest there, as docs/speed.md says.
    for (prompt, stock) in [(512, Side::Stock { repack: false, tiled: true }), (0, Side::Stock { repack: true, tiled: false })] {
        let sides = [Side::Berth, stock];
        let profiles = sides.map(|side| profile(&host, &model, &library, &sampler, args, prompt, side));
        let [berth, stock_profile] = profiles;
        page += &tables(&speed::test_name(prompt), &[("Berth", berth?), (&format!("stock, {}", stock.name()), stock_profile?)])?;
    }
    println!("{page}");
    if !args.dry {
        fs::write(shell::root().join(DOCS), document(args, &host, &page)).with_context(|| format!("cannot write {DOCS}"))?;
        println!("wrote {DOCS}");
    }
    Ok(())
}

fn tables(test: &str, sides: &[(&str, Profile)]) -> Result<String> {
    let mut text = format!(
        "## {test}\n\nMilliseconds per token (all threads at once, so that they add up to the time a token takes), and their share:\n\n| part |"
    );
    for (name, profile) in sides {
        write!(text, " {name}: {:.1} t/s |", profile.tokens_per_second)?;
    }
    writeln!(text, "\n|---|{}", "---|".repeat(sides.len()))?;
    let parts: Vec<BTreeMap<&str, f64>> = sides.iter().map(|(_, p)| p.parts()).collect();
    let names = PARTS.iter().map(|(name, _)| *name).chain(["other"]);
    for name in names.filter(|n| parts.iter().any(|p| p.get(n).is_some_and(|share| *share >= 0.001))) {
        write!(text, "| {name} |")?;
        for (part, (_, profile)) in parts.iter().zip(sides) {
            let share = part.get(name).copied().unwrap_or(0.0);
            write!(text, " {:.3}, {:.1} % |", 1000.0 / profile.tokens_per_second * share, 100.0 * share)?;
        }
        text.push('\n');
    }
    for (name, profile) in sides {
        write!(text, "\n{name}, by function:\n\n| function | share, % |\n|---|---|\n")?;
        for (function, share) in profile.top() {
            writeln!(text, "| `{function}` | {:.1} |", 100.0 * share)?;
        }
    }
    text.push('\n');
    Ok(text)
}

fn document(args: &Args, host: &Host, tables: &str) -> String {
    format!(
        "# Where the time goes\n\nWritten by `cargo xtask profile --layers {} --format {} --threads {}`. {}, llama-bench of {} (ggml {}), a model with the experts of \
         Qwen3-30B-A3B (2048 x 768, 128 experts, 8 used) in {} blocks, random weights. Sampled at each tick of the processor time that the kernel counts (1 to 10 ms); the time of loading is left \
         out. A function that a compiler has put into its caller counts as the caller.\n\n{}\n",
        args.layers,
        args.format,
        args.threads,
        figures::cpu(),
        host.package,
        host.ggml_version,
        args.layers,
        tables.trim_end()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_named_by_the_function_before_it() {
        // This program itself: its own functions are found where they are.
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let names = Names::new(maps.lines()).unwrap();
        let name = names.at(part_of as fn(&str) -> &'static str as usize as u64);
        assert_eq!(name, "xtask::profile::part_of");
        assert_eq!(names.at(0), "?");
    }

    #[test]
    fn names_lose_their_types() {
        assert_eq!(plain_name("void (anonymous namespace)::gemm<4>(int)"), "gemm");
        assert_eq!(plain_name("ggml_vec_dot_f32"), "ggml_vec_dot_f32");
        assert_eq!(plain_name("<A as B>::c"), "<A as B>::c");
    }

    #[test]
    fn shares_leave_loading_out_and_add_up() {
        let samples = [("berth::moe::kernels::avx512::mul", 60), ("libgomp.so.1", 20), ("repack_q4_K", 1000), ("whatever", 20)];
        let profile = Profile { tokens_per_second: 10.0, samples: samples.map(|(n, c)| (n.to_owned(), c)).into() };
        let parts = profile.parts();
        assert_eq!(parts["Berth: products of gate, up and down"], 0.6);
        assert_eq!(parts["other"], 0.2);
        assert!((parts.values().sum::<f64>() - 1.0).abs() < 1e-9);
        assert_eq!(profile.top()[0], ("berth::moe::kernels::avx512::mul", 0.6));
        let text = tables("pp512", &[("Berth", profile)]).unwrap();
        assert!(text.contains("| Berth: products of gate, up and down | 60.000, 60.0 % |"), "{text}");
    }
}
