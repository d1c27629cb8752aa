//! `cargo xtask load`: how fast experts get into memory of their own in stock llama.cpp, next to what the disk gives in the same minutes, and how fast a
//! second start is.

use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use ffi_tests::hosts::{self, Host};
use ffi_tests::run::{Options, Server};
use ffi_tests::tools;

use crate::{figures, shell, speed};

/// Measure loads with nothing in the page cache, in stock llama.cpp with and without Berth, and write docs/load.md. Needs root, to drop the cache.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Blocks of the model, which has the experts of Qwen3-30B-A3B in Q4_K / Q6_K: 12 take 5 GB, twice that with an arena.
    #[arg(long, default_value_t = 12)]
    layers: u32,
    /// How often everything is run.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Where arena files go: the disk of the model, or another one [default: the cache of the tests].
    #[arg(long)]
    arena: Option<PathBuf>,
    /// Print only, write nothing.
    #[arg(long)]
    dry: bool,
}

/// Bytes of one read of the disk, as Berth reads it.
const REQUEST: usize = 4 << 20;

/// Reads at once, as Berth reads.
const AT_ONCE: u64 = 4;

/// Bytes that the disk is measured with.
const PROBE: u64 = 1 << 30;

/// How a load is set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    /// The host maps the model and reads all of it at once.
    Mapped,
    /// It maps the model for random access, and reads nothing: what `--numa distribute` does with several NUMA nodes. With one it does not, so a small
    /// library in front of it does.
    Random,
    /// `--load-mode none`: it reads the model's file by itself.
    Read,
}

impl Way {
    fn args(self) -> &'static [&'static str] {
        match self {
            Way::Mapped => &[],
            Way::Random => &["--numa", "distribute"],
            Way::Read => &["--load-mode", "none"],
        }
    }

    fn name(self) -> &'static str {
        match self {
            Way::Mapped => "mapped",
            Way::Random => "`--numa distribute`, random access",
            Way::Read => "`--load-mode none`",
        }
    }
}

/// The disk, in GB/s.
#[derive(Clone, Copy, Debug)]
struct Disk {
    read: f64,
    written: f64,
    /// Each of both at the same time.
    both: f64,
}

/// What one load showed.
#[derive(Clone, Debug)]
struct Seen {
    /// Seconds from start to ready.
    ready: f64,
    /// Seconds from the first to the last tensor that Berth brought, and their bytes.
    filled: Option<(f64, u64)>,
    major: u64,
    read: u64,
    written: u64,
    log: String,
}

/// One row: which buffer type, which way, and of each round the disk just before and the load.
struct Row {
    ty: Option<&'static str>,
    way: Way,
    seen: Vec<(Disk, Seen)>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    ensure!(args.rounds > 0, "nothing to measure");
    let library = shell::berth()?;
    let host = hosts::get(speed::HOST).with_context(|| "the server comes from a stock build")?;
    let model = speed::model("q4_k/q6_k", args.layers)?;
    let parent = args.arena.clone().unwrap_or_else(|| model.parent().unwrap_or(Path::new(".")).to_owned());
    let scratch = tempfile::tempdir_in(&parent).with_context(|| format!("{}", parent.display()))?;
    let random = random_access(scratch.path())?;
    let mut rows: Vec<Row> = [None, Some("CUDA_Host"), Some("ARENA")]
        .into_iter()
        .flat_map(|ty| [Way::Mapped, Way::Random, Way::Read].map(|way| Row { ty, way, seen: Vec::new() }))
        .collect();
    let mut fresh = Vec::new();
    for _ in 0..args.rounds {
        for row in &mut rows {
            let disk = disk(&model, scratch.path())?;
            let mut options = options(&library, scratch.path(), row.ty, row.way);
            if row.way == Way::Random {
                options = options.env("LD_PRELOAD", random.display().to_string()).env("RANDOM_FILE", model.display().to_string());
            }
            let seen = load(&host, &model, &options)?;
            ensure!(seen.log.contains("map_random: ") == (row.way == Way::Random), "the model is not mapped as it should be");
            println!("{} {}: disk {disk:.2?}, {}", row.ty.unwrap_or("stock"), row.way.name(), seen.line());
            row.seen.push((disk, seen));
        }
        let rate = fresh_memory(fs::metadata(&model)?.len() as usize)?;
        println!("fresh memory: {rate:.2} GB/s");
        fresh.push(rate);
    }
    let mut again = Vec::new();
    for _ in 0..args.rounds {
        let keep = || options(&library, scratch.path(), Some("ARENA"), Way::Mapped).env("BERTH_ARENA_PERSIST", "1");
        let first = load(&host, &model, &keep())?;
        let second = load(&host, &model, &keep())?;
        let pair = (settled(&first.log, " kept for ")?, settled(&second.log, " reused from ")?, second.written);
        println!("ARENA kept: first {:.2} s, second {:.4} s, {} bytes written", pair.0, pair.1, pair.2);
        again.push(pair);
        for entry in fs::read_dir(scratch.path())? {
            fs::remove_file(entry?.path())?;
        }
    }
    let page = document(args, &host, fs::metadata(&model)?.len(), &rows, &again, &fresh)?;
    println!("\n{page}");
    if !args.dry {
        fs::write("docs/load.md", page).context("cannot write docs/load.md")?;
        println!("wrote docs/load.md");
    }
    Ok(())
}

/// The library that makes the host map the model for random access.
fn random_access(scratch: &Path) -> Result<PathBuf> {
    let path = scratch.join("map_random.so");
    let mut cc = tools::command("cc").map_err(|missing| anyhow::anyhow!(missing.0))?;
    cc.args(["-std=c11", "-O1", "-shared", "-fPIC", "-o"]).arg(&path).arg("ffi-tests/c/map_random.c").arg("-ldl");
    shell::step(&mut cc)?;
    Ok(path)
}

/// How fast this machine hands out memory that nobody has used lately: `bytes` of it touched on all processors, in GB/s. In a virtual machine that is mostly its
/// host's work, and no copy into such memory is faster.
fn fresh_memory(bytes: usize) -> Result<f64> {
    const PAGE: usize = 4096;
    let mut memory = memmap2::MmapMut::map_anon(bytes)?;
    memory.advise(memmap2::Advice::HugePage)?;
    let start = Instant::now();
    let part = bytes.div_ceil(thread::available_parallelism().map_or(1, usize::from)).next_multiple_of(PAGE);
    thread::scope(|scope| {
        for part in memory.chunks_mut(part) {
            scope.spawn(|| part.iter_mut().step_by(PAGE).for_each(|byte| *byte = 1));
        }
    });
    Ok(bytes as f64 / start.elapsed().as_secs_f64() / 1e9)
}

fn options(library: &Path, arena: &Path, ty: Option<&str>, way: Way) -> Options {
    // Without a warm-up no expert is read after it is there. `-lv 4` shows Berth's lines.
    let options = Options { context: 256, ..Options::default() }.arg(&["-lv", "4", "--no-warmup", "--no-repack"]).arg(way.args());
    let Some(ty) = ty else { return options };
    let options = options.with_berth(library, &format!("exps={ty}")).env("BERTH_FUSE", "0");
    options.env("BERTH_ARENA_DIR", arena.to_string_lossy())
}

fn drop_caches() -> Result<()> {
    ensure!(Command::new("sync").status()?.success(), "sync failed");
    fs::write("/proc/sys/vm/drop_caches", "3").context("only root can drop the page cache")
}

impl Seen {
    fn line(&self) -> String {
        let fill = self.filled.map_or(String::new(), |(s, bytes)| format!("filled in {s:.2} s ({:.2} GB/s), ", bytes as f64 / s / 1e9));
        format!(
            "ready after {:.2} s, {fill}{} major faults, {} MB read, {} MB written",
            self.ready,
            self.major,
            self.read / 1_000_000,
            self.written / 1_000_000
        )
    }
}

fn load(host: &Host, model: &Path, options: &Options) -> Result<Seen> {
    drop_caches()?;
    let server = Server::start(host, model, options)?;
    let io = fs::read_to_string(server.proc("io"))?;
    let field = |name: &str| io.lines().find_map(|l| l.strip_prefix(name)?.trim().parse().ok()).with_context(|| format!("no {name}"));
    let (read, written) = (field("read_bytes:")?, field("write_bytes:")?);
    let stat = fs::read_to_string(server.proc("stat"))?;
    // Behind the name, which is in parentheses: state, then eight numbers, then the major faults.
    let major = stat.rsplit_once(')').and_then(|(_, f)| f.split_whitespace().nth(9)?.parse().ok()).context("no major faults")?;
    let ready = server.load_time.as_secs_f64();
    let log = server.stop()?;
    Ok(Seen { ready, filled: filled(&log), major, read, written, log })
}

/// "berth: filled: 4.38 GiB in 4.0 s, 1.19 GB/s, 4699717632 of 4699717632 bytes read from files"
fn filled(log: &str) -> Option<(f64, u64)> {
    let line = log.lines().find_map(|l| l.split_once("berth: filled: "))?.1;
    let rate: f64 = line.split_once(" s, ")?.1.split_once(" GB/s")?.0.parse().ok()?;
    let bytes: u64 = line.split_once(" of ")?.1.split_once(' ')?.0.parse().ok()?;
    Some((bytes as f64 / 1e9 / rate, bytes))
}

/// Seconds from the line about the new buffer to the one about its file.
fn settled(log: &str, what: &str) -> Result<f64> {
    // "0.05.100.211 I berth: ARENA: ..": minutes, seconds, milliseconds, microseconds, perhaps behind dots of progress.
    let at = |what: &str| -> Result<f64> {
        let line = log
            .lines()
            .find(|l| l.contains("berth: ARENA: ") && l.contains(what))
            .with_context(|| format!("no line with '{what}':\n{log}"))?;
        let time = line.split_once(" I berth").with_context(|| line.to_owned())?.0.trim_start_matches('.');
        let parts: Vec<f64> = time.split('.').map(|n| n.parse().unwrap_or(f64::NAN)).collect();
        let [minutes, seconds, millis, micros] = parts[..] else { bail!("no time: {line}") };
        Ok(minutes * 60.0 + seconds + millis / 1e3 + micros / 1e6)
    };
    Ok(at(what)? - at(" arena in ")?)
}

/// The rates of the disk now: past the page cache, in requests as Berth makes them.
fn disk(model: &Path, arena: &Path) -> Result<Disk> {
    drop_caches()?;
    let direct = |write: bool| {
        let mut options = OpenOptions::new();
        options.read(true).write(write).create(write).custom_flags(O_DIRECT);
        options
    };
    let from = direct(false).open(model).with_context(|| format!("{}", model.display()))?;
    let path = arena.join("probe");
    let to = direct(true).open(&path)?;
    let rate = |bytes: u64, start: Instant| bytes as f64 / start.elapsed().as_secs_f64() / 1e9;
    // Another part of the model each time: what was read once may lie in a cache below this machine.
    let len = fs::metadata(model)?.len() / REQUEST as u64 * REQUEST as u64;
    let probe = PROBE.min(len / 2 / REQUEST as u64 * REQUEST as u64);
    let start = Instant::now();
    transfer(&from, None, 0, probe)?;
    let read = rate(probe, start);
    let start = Instant::now();
    transfer(&to, Some(()), 0, probe)?;
    let written = rate(probe, start);
    let start = Instant::now();
    thread::scope(|scope| {
        let reader = scope.spawn(|| transfer(&from, None, len - probe, probe));
        let writer = scope.spawn(|| transfer(&to, Some(()), 0, probe));
        reader.join().map_err(|_| anyhow::anyhow!("a reader panicked"))??;
        writer.join().map_err(|_| anyhow::anyhow!("a writer panicked"))?
    })?;
    let both = rate(probe, start);
    fs::remove_file(&path)?;
    Ok(Disk { read, written, both })
}

/// `open(2)` of Linux on x86-64 and most others.
const O_DIRECT: i32 = if cfg!(any(target_arch = "aarch64", target_arch = "arm")) { 0o200_000 } else { 0o40_000 };

/// Reads or writes `bytes` from `first` on, some requests at once.
fn transfer(file: &File, write: Option<()>, first: u64, bytes: u64) -> Result<()> {
    let next = std::sync::atomic::AtomicU64::new(0);
    let one = || -> Result<()> {
        // Direct transfers want an address that is a multiple of a block.
        let mut memory = vec![0x5Au8; REQUEST + 4096];
        let skip = memory.as_ptr().align_offset(4096);
        let buffer = &mut memory[skip..skip + REQUEST];
        loop {
            let at = next.fetch_add(REQUEST as u64, std::sync::atomic::Ordering::Relaxed);
            if at >= bytes {
                return Ok(());
            }
            match write {
                Some(()) => file.write_all_at(buffer, first + at)?,
                None => file.read_exact_at(buffer, first + at)?,
            }
        }
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(one)).collect();
        threads.into_iter().try_for_each(|t| t.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?)
    })
}

fn document(args: &Args, host: &Host, bytes: u64, rows: &[Row], again: &[(f64, f64, u64)], fresh: &[f64]) -> Result<String> {
    let of = |row: &Row, what: &dyn Fn(&(Disk, Seen)) -> f64| speed::median(&row.seen.iter().map(what).collect::<Vec<_>>());
    let all = |what: fn(&Disk) -> f64| {
        let values: Vec<f64> = rows.iter().flat_map(|r| r.seen.iter().map(|(disk, _)| what(disk))).collect();
        let (least, most) = values.iter().fold((f64::INFINITY, 0.0f64), |(a, b), v| (a.min(*v), b.max(*v)));
        format!("{:.2} ({least:.2} to {most:.2})", speed::median(&values))
    };
    let mut text = format!(
        "# Loading\n\nWritten by `cargo xtask load --layers {} --rounds {}`. {}, llama-server of {} (ggml {}), a model of {:.2} GB with the experts of Qwen3-30B-A3B in Q4_K / \
         Q6_K. Before each load the page cache is dropped and the disk measured: reads and writes past the page cache, {AT_ONCE} requests of {} MiB at once. GB/s, median (least to \
         most): read {}, written {}, each of both at once {}. Medians of {} rounds.\n\n",
        args.layers,
        args.rounds,
        figures::cpu(),
        host.package,
        host.ggml_version,
        bytes as f64 / 1e9,
        REQUEST >> 20,
        all(|d| d.read),
        all(|d| d.written),
        all(|d| d.both),
        args.rounds
    );
    text += "| experts in | the host's way | ready after, s | filled at, GB/s | of the disk's reads just before | major faults | per MiB | read, GB | written, GB |\n|---|---|---|---|---|---|---|---|---|\n";
    for row in rows {
        let filled = |(_, seen): &(Disk, Seen)| seen.filled.map(|(s, bytes)| bytes as f64 / s / 1e9);
        let has = row.seen.iter().all(|s| filled(s).is_some());
        let rate = |s: &(Disk, Seen)| filled(s).unwrap_or(f64::NAN);
        let (fill, share) = if has {
            (format!("{:.2}", of(row, &rate)), format!("{:.0} %", 100.0 * of(row, &|s| rate(s) / s.0.read)))
        } else {
            ("".to_owned(), "".to_owned())
        };
        let major = of(row, &|(_, seen)| seen.major as f64);
        writeln!(
            text,
            "| {} | {} | {:.2} | {fill} | {share} | {major:.0} | {:.3} | {:.2} | {:.2} |",
            row.ty.unwrap_or("stock, no Berth"),
            row.way.name(),
            of(row, &|(_, seen)| seen.ready),
            major / (bytes >> 20) as f64,
            of(row, &|(_, seen)| seen.read as f64 / 1e9),
            of(row, &|(_, seen)| seen.written as f64 / 1e9),
        )?;
    }
    writeln!(
        text,
        "\nMemory that nobody had used lately was handed out at {:.2} GB/s (as much as the model has bytes, in huge pages, touched on all processors after each round). In a virtual \
         machine that is its host's work: memory that another process has just given back comes many times faster. A copy into memory of the first kind, as `CUDA_Host` and the host's own \
         `--load-mode none` make it now and then, is no faster than that, whatever the disk gives.",
        speed::median(fresh)
    )?;
    text += "\n`filled at` is Berth's part: from the first byte of the first expert to the last of the last; the aim is 85 % of the disk's reads. A mapped model is read by the host before, with \
             the kernel's read-ahead: then the experts come out of the page cache. Mapped for random access (llama.cpp heeds `--numa distribute` only where there are several NUMA nodes, so a \
             library in front of it does the same here) they come from the disk, and the host faults in what no rule names, page by page: most of the faults there. An arena is written as well as read; what is written may still be on its way when the \
             load is ready, up to an eighth of the free memory and 1 GiB at most. With `--load-mode none` Berth fills nothing: the host reads into the memory it got.\n";
    if !again.is_empty() {
        let seconds = |which: fn(&(f64, f64, u64)) -> f64| speed::median(&again.iter().map(which).collect::<Vec<_>>());
        let (first, second) = (seconds(|a| a.0), seconds(|a| a.1));
        let written = again.iter().map(|a| a.2).max().unwrap_or(0);
        writeln!(
            text,
            "\n## A second start\n\nWith `BERTH_ARENA_PERSIST=1`, from the line about the new buffer to the one that its bytes are there and, at the first start, on the disk: {first:.2} s at the \
             first, {:.1} ms at the second, which is {:.0} times faster and wrote {written} bytes at most.",
            second * 1e3,
            first / second
        )?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_log_are_understood() {
        let log = "x\n0.00.100.000 I berth: ARENA: 5 bytes (1 MiB) arena in /a\n..0.01.500.250 I berth: ARENA: 5 bytes kept for the next start in /a/x\n\
                   0.02.000.000 I berth: filled: 4.38 GiB in 4.0 s, 1.25 GB/s, 5000000000 of 5000000000 bytes read from files\n";
        assert_eq!(filled(log), Some((4.0, 5_000_000_000)));
        assert!((settled(log, " kept for ").unwrap() - 1.40025).abs() < 1e-9);
        assert!(settled(log, " reused from ").is_err() && filled("nothing").is_none());
    }

    #[test]
    fn a_transfer_moves_every_byte() {
        let file = tempfile::tempfile().unwrap();
        transfer(&file, Some(()), 0, 3 * REQUEST as u64).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 3 * REQUEST as u64);
        assert!(transfer(&file, None, 0, 3 * REQUEST as u64).is_ok() && transfer(&file, None, 0, 4 * REQUEST as u64).is_err());
    }
}
