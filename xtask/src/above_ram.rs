//! `cargo xtask above-ram`: stock llama-bench with a model larger than the memory it may have, with and without Berth; the result is
//! docs/above-ram.md.
//!
//! Every run starts with an empty page cache in a memory cgroup of its own, since pages that are cached already count for whoever read them.
//! The first run of a process is cold, the others are steady. The disk is measured before each process, in reads of an
//! expert's size.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ffi_tests::hosts::{self, Host};
use ffi_tests::report::{ReadAhead, Report};
use ffi_tests::run::Cgroup;
use serde::Deserialize;

use crate::speed::{self, HOST, Side};
use crate::{figures, shell};

/// Measure a model larger than memory in stock llama-bench with and without Berth, and write docs/above-ram.md. Needs root. The machine should have nothing else to do.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Blocks of the model, which has the experts of Qwen3-30B-A3B.
    #[arg(long, default_value_t = 12)]
    layers: u32,
    /// Format of the experts, as gate and up/down.
    #[arg(long, default_value = "q4_k/q6_k")]
    format: String,
    /// Memory of a run in MiB, page cache included.
    #[arg(long, default_value_t = 3072)]
    limit: u64,
    /// How often everything is run.
    #[arg(long, default_value_t = 2)]
    rounds: usize,
    /// Runs of a process: the first is cold.
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// The disk's read-ahead in KiB.
    #[arg(long, value_delimiter = ',', default_values_t = [128, 8192])]
    read_ahead: Vec<u32>,
    /// Threads.
    #[arg(long, default_value_t = 2)]
    threads: u32,
    /// Alternating runs with everything in memory, with read-ahead and without; 0 is none.
    #[arg(long, default_value_t = 10)]
    resident: usize,
    /// Let threads move between processors, as they do by default; written to a page of its own.
    #[arg(long)]
    unbound: bool,
    /// Print only, write nothing.
    #[arg(long)]
    dry: bool,
}

/// Tokens of a run, as [`speed::command`] has them.
const TOKENS: u32 = 32;

const DOCS: &str = "docs/above-ram.md";
const DOCS_UNBOUND: &str = "docs/above-ram-unbound.md";

/// Runs of a process with everything in memory.
const RESIDENT_RUNS: u32 = 8;

/// How a run is set up.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Stock,
    Off,
    Auto,
    Cached,
}

impl Way {
    const ALL: [Way; 4] = [Way::Stock, Way::Off, Way::Auto, Way::Cached];

    fn name(self) -> &'static str {
        match self {
            Way::Stock => "stock",
            Way::Off => "Berth, `BERTH_READAHEAD=off`",
            Way::Auto => "Berth",
            Way::Cached => "Berth, `BERTH_DIRECT=off`",
        }
    }

    fn command(self, args: &Args, host: &Host, model: &Path, library: &Path) -> Command {
        let side = if self == Way::Stock { Side::Stock { repack: false, tiled: true } } else { Side::Berth };
        let mut command = speed::command(host, model, library, args.threads, &[0], side);
        // Threads that sleep in the kernel wake up on the same processor now and then, and then spin against each other.
        if !args.unbound {
            command.env("OMP_PROC_BIND", "true");
        }
        match self {
            Way::Stock | Way::Auto => &mut command,
            Way::Off => command.env("BERTH_READAHEAD", "off"),
            Way::Cached => command.env("BERTH_DIRECT", "off"),
        };
        command
    }
}

/// What all runs of one setting showed.
#[derive(Default)]
struct Seen {
    cold: Vec<f64>,
    steady: Vec<f64>,
    /// Bytes read per token.
    cold_read: Vec<f64>,
    steady_read: Vec<f64>,
    /// Bytes per second of the disk, just before each process.
    disk: Vec<f64>,
    /// Of whole processes: bytes read by tokens, and what Berth counted.
    read: u64,
    tokens: u64,
    ahead: ReadAhead,
}

/// The setting of a disk, put back at the end.
struct Setting {
    path: PathBuf,
    before: String,
}

impl Setting {
    fn of_disk_with(file: &Path) -> Result<Setting> {
        use std::os::unix::fs::MetadataExt;
        let device = fs::metadata(file)?.dev();
        let (major, minor) = ((device >> 8) & 0xfff, (device & 0xff) | ((device >> 12) & 0xfff00));
        let found = format!("/sys/dev/block/{major}:{minor}");
        let path =
            [format!("{found}/queue"), format!("{found}/../queue")].iter().map(|p| Path::new(p).join("read_ahead_kb")).find(|p| p.exists());
        let path = path.with_context(|| format!("the disk of {} has no read-ahead to set", file.display()))?;
        let before = fs::read_to_string(&path)?.trim().to_owned();
        Ok(Setting { path, before })
    }

    fn set(&self, kib: u32) -> Result<()> {
        fs::write(&self.path, kib.to_string()).with_context(|| format!("cannot set {} (root can)", self.path.display()))
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        if let Err(error) = fs::write(&self.path, &self.before) {
            eprintln!("{} is still changed, it was {}: {error}", self.path.display(), self.before);
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    ensure!(args.rounds > 0 && args.runs > 1, "nothing to measure: there must be rounds, and a run after the cold one");
    let library = shell::berth()?;
    let host = hosts::get(HOST).context("llama-bench comes from a stock build")?;
    let model = speed::model(&args.format, args.layers)?;
    let setting = Setting::of_disk_with(&model)?;
    let mut seen: Vec<(u32, Way, Seen)> = Vec::new();
    for kib in &args.read_ahead {
        seen.extend(Way::ALL.map(|way| (*kib, way, Seen::default())));
    }
    let count = seen.len();
    for round in 0..args.rounds {
        for i in 0..count {
            // Another order each time.
            let (kib, way, seen) = &mut seen[(i + round) % count];
            setting.set(*kib)?;
            seen.disk.push(disk_rate(&model)?);
            one(args, *way, way.command(args, &host, &model, &library), seen)?;
            let last = |v: &[f64]| v.last().copied().unwrap_or(0.0);
            println!("{kib:>5} KiB {:32} cold {:6.2} steady {:6.2} t/s", way.name(), last(&seen.cold), last(&seen.steady));
        }
    }
    drop(setting);
    let mut page = table(args, &seen)?;
    if args.resident > 0 {
        page += &resident(args, &host, &model, &library)?;
    }
    println!("\n{page}");
    if !args.dry {
        let docs = if args.unbound { DOCS_UNBOUND } else { DOCS };
        fs::write(docs, document(args, &host, &model, &page)?).with_context(|| format!("cannot write {docs}"))?;
        println!("wrote {docs}");
    }
    Ok(())
}

/// Bytes per second of random reads of an expert's size past the page cache, by four threads.
fn disk_rate(model: &Path) -> Result<f64> {
    const SIZE: usize = 864 << 10;
    const TIME: Duration = Duration::from_secs(2);
    const DIRECT: i32 = 0o40000;
    let file = File::options().read(true).custom_flags(DIRECT).open(model)?;
    let pieces = file.metadata()?.len() / SIZE as u64;
    let start = Instant::now();
    let reader = |seed: u64| -> Result<u64> {
        let mut memory = vec![0u8; SIZE + 4096];
        let at = memory.as_ptr().align_offset(4096);
        let (mut state, mut bytes) = (seed, 0);
        while start.elapsed() < TIME {
            // Knuth's numbers: good enough to jump about.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            file.read_exact_at(&mut memory[at..at + SIZE], (state >> 33) % pieces * SIZE as u64)?;
            bytes += SIZE as u64;
        }
        Ok(bytes)
    };
    let bytes = std::thread::scope(|s| {
        let threads: Vec<_> = (0..4).map(|i| s.spawn(move || reader(0x9e37_79b9 + 77 * i))).collect();
        threads.into_iter().map(|t| t.join().unwrap_or(Ok(0))).sum::<Result<u64>>()
    })?;
    Ok(bytes as f64 / start.elapsed().as_secs_f64())
}

fn drop_caches() -> Result<()> {
    ensure!(Command::new("sync").status()?.success(), "sync failed");
    fs::write("/proc/sys/vm/drop_caches", "3").context("cannot drop the page cache (root can)")
}

#[derive(Deserialize)]
struct Sample {
    samples_ts: Vec<f64>,
}

/// One process in a cgroup, with an empty page cache.
fn one(args: &Args, way: Way, mut command: Command, seen: &mut Seen) -> Result<()> {
    drop_caches()?;
    let group = Cgroup::new("xtask", args.limit << 20).map_err(anyhow::Error::msg)?;
    let scratch = tempfile::tempdir()?;
    let report = scratch.path().join("report.json");
    command.args(["-r", &args.runs.to_string(), "--no-warmup", "--progress"]);
    if way != Way::Stock {
        command.env("BERTH_REPORT", &report);
    }
    let mut child = group.wrap(command).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let pid = child.id();
    let (mut stdout, stderr) = (child.stdout.take().context("no stdout")?, child.stderr.take().context("no stderr")?);
    // It tells before each run; what it has read by then is asked of the kernel. Its result comes after the last one.
    let marks = std::thread::spawn(move || {
        let lines = BufReader::new(stderr).lines().map_while(Result::ok);
        lines.filter(|l| l.contains("generation run")).filter_map(|_| read_by(pid)).collect::<Vec<u64>>()
    });
    let mut first = [0];
    stdout.read_exact(&mut first).context("llama-bench printed nothing")?;
    let last = read_by(pid).context("llama-bench ended before it could be asked what it had read")?;
    let mut text = String::from_utf8_lossy(&first).into_owned();
    stdout.read_to_string(&mut text)?;
    ensure!(child.wait()?.success() && group.killed() == Some(0), "llama-bench failed in the cgroup");
    let mut marks = marks.join().unwrap_or_default();
    marks.push(last);
    let samples: Vec<Sample> = serde_json::from_str(&text).with_context(|| format!("llama-bench printed no JSON: {text}"))?;
    let speeds = &samples.first().context("no result")?.samples_ts;
    ensure!(speeds.len() == args.runs && marks.len() == args.runs + 1, "{} results, {} marks", speeds.len(), marks.len());
    let per_token: Vec<f64> = marks.windows(2).map(|m| (m[1] - m[0]) as f64 / f64::from(TOKENS)).collect();
    seen.cold.push(speeds[0]);
    seen.cold_read.push(per_token[0]);
    seen.steady.push(speed::median(&speeds[1..]));
    seen.steady_read.push(per_token[1..].iter().sum::<f64>() / (args.runs - 1) as f64);
    seen.read += last - marks[0];
    seen.tokens += u64::from(TOKENS) * args.runs as u64;
    if way != Way::Stock {
        let now = Report::read(&report)?.read_ahead;
        let a = &mut seen.ahead;
        a.expert_hits += now.expert_hits;
        a.expert_misses += now.expert_misses;
        a.missed_bytes += now.missed_bytes;
        a.asked_bytes += now.asked_bytes;
        a.ask_ms += now.ask_ms;
        a.wait_ms += now.wait_ms;
        a.fallbacks = now.fallbacks;
        ensure!(a.fallbacks.is_empty(), "read-ahead does not work here: {:?}", a.fallbacks);
    }
    Ok(())
}

/// Bytes that a process has had read from disks.
fn read_by(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/io")).ok()?;
    text.lines().find_map(|l| l.strip_prefix("read_bytes: "))?.trim().parse().ok()
}

/// Rates in GB/s: the median, and the least and the most.
fn figures_of(disk: &[f64]) -> String {
    let (least, most) = disk.iter().fold((f64::INFINITY, 0.0f64), |(a, b), d| (a.min(*d), b.max(*d)));
    format!("{:.2} ({:.2} to {:.2})", speed::median(disk) / 1e9, least / 1e9, most / 1e9)
}

fn table(args: &Args, seen: &[(u32, Way, Seen)]) -> Result<String> {
    let disk: Vec<f64> = seen.iter().flat_map(|(_, _, s)| s.disk.iter().copied()).collect();
    let mut text = format!(
        "The disk read {} GB/s, in random reads of 864 KiB past the page cache, four at a time, before each process; what it allows one follows \
         from what it read just before.\n\n\
         | disk reads ahead | | disk, GB/s | cold, t/s | steady, t/s | read per token, cold / steady, MB | experts missing | missing per token, MB | read / missing | the disk \
         allows, t/s | share of it | / stock at its best | / stock here |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|\n",
        figures_of(&disk)
    );
    let stock = |kib: Option<u32>| {
        let of = seen.iter().filter(|(k, way, _)| *way == Way::Stock && kib.is_none_or(|kib| *k == kib));
        of.map(|(_, _, s)| speed::median(&s.steady)).fold(0.0, f64::max)
    };
    for (kib, way, s) in seen {
        let steady = speed::median(&s.steady);
        // The sum of nothing is -0.
        let mean = |v: &[f64]| v.iter().fold(0.0, |a, b| a + b) / v.len().max(1) as f64 / 1e6;
        let missing = s.ahead.missed_bytes as f64 / s.tokens as f64;
        let all = s.ahead.expert_hits + s.ahead.expert_misses;
        let rate = speed::median(&s.disk);
        write!(text, "| {kib} KiB | {} | {:.2} | {} | {} ", way.name(), rate / 1e9, speed::range(&s.cold), speed::range(&s.steady))?;
        write!(text, "| {:.0} / {:.0} ", mean(&s.cold_read), mean(&s.steady_read))?;
        if s.ahead.missed_bytes > 0 {
            let (share, allowed) = (s.ahead.expert_misses as f64 / all as f64, rate / missing);
            write!(text, "| {:.0} % | {:.1} | {:.2} ", 100.0 * share, missing / 1e6, s.read as f64 / s.ahead.missed_bytes as f64)?;
            write!(text, "| {allowed:.1} | {:.0} % ", 100.0 * s.tokens_per_second(args) / allowed)?;
        } else {
            text += "| | | | | ";
        }
        writeln!(text, "| {:.2} | {:.2} |", steady / stock(None), steady / stock(Some(*kib)))?;
    }
    text.push('\n');
    Ok(text)
}

impl Seen {
    /// Of all runs, cold ones too, as the bytes are.
    fn tokens_per_second(&self, args: &Args) -> f64 {
        let steady = (args.runs - 1) as f64;
        let seconds: f64 = self.cold.iter().map(|t| 1.0 / t).sum::<f64>() + self.steady.iter().map(|t| steady / t).sum::<f64>();
        (self.cold.len() * args.runs) as f64 / seconds
    }
}

/// Everything in memory, read-ahead on as it is by default, and off.
fn resident(args: &Args, host: &Host, model: &Path, library: &Path) -> Result<String> {
    let mut speeds = [Vec::new(), Vec::new()];
    for round in 0..=args.resident {
        for way in if round % 2 == 0 { [Way::Auto, Way::Off] } else { [Way::Off, Way::Auto] } {
            let mut command = way.command(args, host, model, library);
            command.args(["-r", &RESIDENT_RUNS.to_string()]);
            let speed = speed::samples(command)?.first().context("no result")?.avg_ts;
            // The first round brings the model into memory.
            if round > 0 {
                speeds[usize::from(way == Way::Off)].push(speed);
            }
        }
    }
    let [auto, off] = &speeds;
    let difference = 100.0 * (speed::median(auto) / speed::median(off) - 1.0);
    let mut each: Vec<f64> = auto.iter().zip(off).map(|(auto, off)| 100.0 * (auto / off - 1.0)).collect();
    each.sort_by(f64::total_cmp);
    let pairs = speed::median(&each);
    Ok(format!(
        "## Everything in memory\n\n{} alternating runs of {RESIDENT_RUNS} x 32 tokens, without a limit: {} t/s with `BERTH_READAHEAD=auto` (the \
         default), {} t/s with `off`; medians differ by {difference:+.2} %. Of the runs that followed each other the median is {pairs:+.2} %, half of \
         them are between {:+.2} and {:+.2} %.\n",
        args.resident,
        speed::range(auto),
        speed::range(off),
        each[each.len() / 4],
        each[each.len() - 1 - each.len() / 4]
    ))
}

fn document(args: &Args, host: &Host, model: &Path, page: &str) -> Result<String> {
    let ahead: Vec<String> = args.read_ahead.iter().map(u32::to_string).collect();
    let bound = if args.unbound {
        "Threads are not bound to processors (`OMP_PROC_BIND` is not set), as they are not by default."
    } else {
        "All run with `OMP_PROC_BIND=true`: threads that have waited for the disk else share a processor now and then, and spin against each other. \
         Without it is above-ram-unbound.md, written with `--unbound`."
    };
    Ok(format!(
        "# A model larger than memory\n\n\
         Written by `cargo xtask above-ram --layers {} --format {} --limit {} --rounds {} --runs {} --read-ahead {} --threads {} --resident {}{}`. {}, {} \
         (ggml {}), a model of {:.2} GB with the experts of Qwen3-30B-A3B (2048 x 768, 128 experts, 8 used) and random weights, in a memory cgroup of {} \
         MiB. Every process starts with an empty page cache; its first run of {} random tokens is cold, the other {} are steady. Medians of {} rounds, \
         least and most in brackets. Stock has its weights mapped (`--repack 0`): repacked ones are anonymous memory, and would not fit. {bound}\n\n\
         Random weights choose experts nearly at random: a real model repeats itself more, and misses less. `read / missing` has all bytes that the \
         process had read while it made tokens, those of weights that are no experts included, over the bytes of experts that Berth found missing. The disk \
         allows as many tokens as its rate divided by the missing bytes, without any time for computing; the share is of all runs, the cold one included.\n\n{page}",
        args.layers,
        args.format,
        args.limit,
        args.rounds,
        args.runs,
        ahead.join(","),
        args.threads,
        args.resident,
        if args.unbound { " --unbound" } else { "" },
        figures::cpu(),
        host.package,
        host.ggml_version,
        fs::metadata(model)?.len() as f64 / 1e9,
        args.limit,
        TOKENS,
        args.runs - 1,
        args.rounds
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_what_the_disk_allows_and_ratios_of_stock() {
        let args = Args {
            layers: 1,
            format: String::new(),
            limit: 1,
            rounds: 1,
            runs: 3,
            read_ahead: vec![128, 8192],
            threads: 2,
            resident: 0,
            unbound: false,
            dry: true,
        };
        let seen =
            |cold: f64, steady: f64| Seen { cold: vec![cold], steady: vec![steady], disk: vec![1.1e9], tokens: 30, ..Seen::default() };
        let ahead = ReadAhead { expert_hits: 300, expert_misses: 100, missed_bytes: 3_000_000_000, ..ReadAhead::default() };
        let berth = Seen { ahead, read: 3_300_000_000, cold_read: vec![120e6], steady_read: vec![100e6], ..seen(5.0, 10.0) };
        let rows = [(128, Way::Stock, seen(4.0, 8.0)), (8192, Way::Stock, seen(1.0, 2.0)), (8192, Way::Auto, berth)];
        let text = table(&args, &rows).unwrap();
        assert!(text.contains("read 1.10 (1.10 to 1.10) GB/s"), "{text}");
        // 100 MB a token at 1.1 GB/s are 11 tokens; three runs took 0.2 + 0.1 + 0.1 s per token.
        assert!(text.contains("| 120 / 100 | 25 % | 100.0 | 1.10 | 11.0 | 68 % | 1.25 | 5.00 |"), "{text}");
        assert!(
            text.contains("| 8192 KiB | stock | 1.10 | 1.0 (1.0 to 1.0) | 2.0 (2.0 to 2.0) | 0 / 0 | | | | | | 0.25 | 1.00 |"),
            "{text}"
        );
    }
}
