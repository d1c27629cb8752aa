//! `cargo xtask figures`: the experts' operation on this machine, next to the limits of its memory and processor and to stock ggml; the result
//! is docs/moe-figures.md and the plot in it.
//!
//! `c-examples/bench` and `ffi-tests/c/moe_stock.c` measure; this file chooses what, and writes tables.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ffi_tests::hosts;
use ffi_tests::moe_stock::{Comparison, Layer, Program};
use ffi_tests::run::{self, clean_env};
use serde::Deserialize;

use crate::{plot, shell};

/// Measure the experts' operation, and write docs/moe-figures.md. The machine should have nothing else to do.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A few points in a short time, to try the command; the files go to the target directory.
    #[arg(long)]
    quick: bool,
    /// Only the comparison with stock ggml; the rest of the file stays.
    #[arg(long, conflicts_with = "quick")]
    stock: bool,
    /// Time for each point.
    #[arg(long, default_value_t = 1.5)]
    seconds: f64,
    /// Threads of the operation; all processors if not given.
    #[arg(long)]
    threads: Option<usize>,
}

const DOCS: &str = "docs";
const PAGE: &str = "moe-figures.md";
/// The heading of the page's last part.
const STOCK: &str = "## Next to stock ggml\n";
const FORMATS: [&str; 15] =
    ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "iq4_xs", "mxfp4", "f16", "bf16"];
const TOKENS: [usize; 8] = [1, 2, 4, 8, 32, 128, 512, 2048];
const HOST: &str = "sdist-dl";
const QWEN3: [usize; 4] = [2048, 768, 128, 8];

/// What `bench --json` prints.
#[derive(Clone, Debug, Deserialize)]
struct Point {
    geometry: String,
    experts: usize,
    gate: String,
    down: String,
    tokens: usize,
    routing: String,
    distinct: usize,
    isa: String,
    checked: bool,
    ms: f64,
    gb_per_s: f64,
    gmac_per_s: f64,
    read_gb_per_s: f64,
    vnni_gmac_per_s: f64,
    limit: String,
    share: f64,
}

/// How to call `bench`.
#[derive(Clone, Copy)]
struct Case<'a> {
    geometry: &'a str,
    gate: &'a str,
    down: &'a str,
    tokens: &'a [usize],
    threads: usize,
    skewed: bool,
    tier: Option<&'a str>,
}

struct Bench {
    program: PathBuf,
    /// Of the library, under the name it is loaded by.
    library: PathBuf,
    seconds: f64,
}

/// Reads memory as fast as these threads can, to tell what a machine gives just now.
pub(crate) struct Meter(Bench);

impl Meter {
    /// Compiled into `dir`.
    pub(crate) fn new(library: &Path, dir: &Path) -> Result<Meter> {
        Ok(Meter(Bench { program: compile(library, dir)?, library: dir.to_owned(), seconds: 0.1 }))
    }

    /// GB/s.
    pub(crate) fn read(&self, threads: usize) -> Result<f64> {
        let case = Case { geometry: "512,256,8,2", gate: "q4_k", down: "q4_k", tokens: &[1], threads, skewed: false, tier: None };
        Ok(self.0.points(case)?[0].read_gb_per_s)
    }
}

impl Bench {
    fn points(&self, case: Case<'_>) -> Result<Vec<Point>> {
        let mut command = Command::new(&self.program);
        clean_env(&mut command);
        command.env("LD_LIBRARY_PATH", &self.library).envs(case.tier.map(|tier| ("BERTH_ISA", tier)));
        let tokens: Vec<String> = case.tokens.iter().map(usize::to_string).collect();
        command.args(["--json", "--seed", "1", "--geometry", case.geometry, "--gate", case.gate, "--down", case.down]);
        command.args(["--routing", if case.skewed { "skewed" } else { "uniform" }, "--tokens", &tokens.join(",")]);
        command.args(["--threads", &case.threads.to_string(), "--seconds", &self.seconds.to_string()]);
        let what = format!("bench {} {}/{} T={}", case.geometry, case.gate, case.down, tokens.join(","));
        eprintln!("    {what}{}", case.tier.map(|t| format!(" {t}")).unwrap_or_default());
        let output = run::run(command, Duration::from_secs(600))?.checked(&what)?;
        let points: Vec<Point> =
            output.stdout.lines().map(|line| serde_json::from_str(line).with_context(|| line.to_owned())).collect::<Result<_>>()?;
        ensure!(points.len() == case.tokens.len() && points.iter().all(|p| p.checked), "{what}: points are missing");
        Ok(points)
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let start = Instant::now();
    let library = shell::berth()?;
    let dir = tempfile::tempdir()?;
    let bench = Bench {
        program: compile(&library, dir.path())?,
        library: dir.path().to_owned(),
        seconds: if args.quick { 0.05 } else { args.seconds },
    };
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = args.threads.unwrap_or(all);
    let plan = Plan { bench: &bench, threads, quick: args.quick };
    let program = Program::build(hosts::get(HOST)?, &library, dir.path())?;
    if args.stock {
        let path = shell::root().join(DOCS).join(PAGE);
        let page = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let rest = page.split(STOCK).next().unwrap_or_default();
        fs::write(&path, rest.to_owned() + &next_to_stock(&plan.stock(&program)?, program.package(), threads)?)?;
        println!("wrote the end of {}", path.display());
        return Ok(());
    }

    eprintln!("==> formats");
    let formats = plan.formats(None)?;
    let best = formats[0].isa.clone();
    let lower = if best == "avx512" { plan.formats(Some("avx2"))? } else { Vec::new() };
    eprintln!("==> other layers");
    let layers = plan.layers()?;
    eprintln!("==> growth");
    let growth = plan.growth(&formats)?;
    eprintln!("==> stock");
    let stock = plan.stock(&program)?;

    let figures = Figures { best, formats, lower, layers, growth, stock, package: program.package().to_owned(), threads };
    let target =
        if args.quick { ffi_tests::target_dir().context("no target directory")?.join("figures") } else { shell::root().join(DOCS) };
    fs::create_dir_all(&target)?;
    let mut called = "cargo xtask figures".to_owned();
    if args.quick {
        called += " --quick";
    } else {
        write!(called, " --seconds {} --threads {threads}", args.seconds)?;
    }
    for (name, text) in [(PAGE, figures.text(&called)?), ("moe-share.svg", figures.plot()?)] {
        let path = target.join(name);
        fs::write(&path, text).with_context(|| path.display().to_string())?;
        println!("wrote {}", path.display());
    }
    let above = figures.above_the_limit();
    if above > 0 {
        eprintln!("{above} points are above 105 % of their limit: the machine had other work while the limits were measured; repeat it");
    }
    println!("{:.1} minutes", start.elapsed().as_secs_f64() / 60.0);
    Ok(())
}

/// Compiles the program as its Makefile says; it finds the library in `dir`.
fn compile(library: &Path, dir: &Path) -> Result<PathBuf> {
    for name in ["libberth.so", "libberth.so.0"] {
        symlink(library, dir.join(name))?;
    }
    let examples = shell::root().join("c-examples");
    let mut make = Command::new("make");
    clean_env(&mut make);
    make.env_remove("CFLAGS").env_remove("MAKEFLAGS").args(["-s", "-B", "-C"]).arg(&examples).arg("bench");
    make.arg(format!("BERTH_CFLAGS=-I{}", shell::root().join("include").display()));
    make.arg(format!("BERTH_LIBS=-L{} -lberth", dir.display()));
    run::run(make, Duration::from_secs(120))?.checked("make bench")?;
    let program = dir.join("bench");
    fs::copy(examples.join("bench"), &program)?;
    Ok(program)
}

/// What is measured.
struct Plan<'a> {
    bench: &'a Bench,
    threads: usize,
    quick: bool,
}

/// What a row of the growth table changes.
struct Grown {
    what: &'static str,
    value: usize,
    point: Point,
}

impl Plan<'_> {
    fn case<'a>(&self, geometry: &'a str, gate: &'a str, down: &'a str, tokens: &'a [usize]) -> Case<'a> {
        Case { geometry, gate, down, tokens, threads: self.threads, skewed: false, tier: None }
    }

    /// All formats at the geometry of Qwen3, gate, up and down alike.
    fn formats(&self, tier: Option<&str>) -> Result<Vec<Point>> {
        let formats: &[&str] = if self.quick { &["q4_k", "q8_0"] } else { &FORMATS };
        let tokens: &[usize] = match (self.quick, tier) {
            (true, _) => &[1, 32],
            (false, Some(_)) => &[1, 32, 512],
            (false, None) => &TOKENS,
        };
        let mut points = Vec::new();
        for format in formats {
            points.extend(self.bench.points(Case { tier, ..self.case("qwen3", format, format, tokens) })?);
        }
        Ok(points)
    }

    /// Mixed formats, skewed routing, other geometries.
    fn layers(&self) -> Result<Vec<Point>> {
        let tokens: &[usize] = if self.quick { &[1, 32] } else { &TOKENS };
        let few = &tokens[..tokens.len().min(6)];
        let mut cases = vec![
            self.case("qwen3", "q4_k", "q6_k", tokens),
            Case { skewed: true, ..self.case("qwen3", "q4_k", "q4_k", tokens) },
            self.case("gpt-oss", "mxfp4", "mxfp4", tokens),
        ];
        if !self.quick {
            cases.push(self.case("deepseek", "q4_k", "q6_k", few));
        }
        let points: Vec<Vec<Point>> = cases.into_iter().map(|case| self.bench.points(case)).collect::<Result<_>>()?;
        Ok(points.concat())
    }

    /// How the time of Q4_K grows with each size.
    fn growth(&self, formats: &[Point]) -> Result<Vec<Grown>> {
        let mut rows: Vec<Grown> = formats
            .iter()
            .filter(|p| p.gate.eq_ignore_ascii_case("q4_k"))
            .map(|p| Grown { what: "tokens", value: p.tokens, point: p.clone() })
            .collect();
        let tokens: &[usize] = if self.quick { &[1] } else { &[1, 512] };
        let mut add = |what, values: &[usize], of: &dyn Fn(usize) -> ([usize; 4], usize)| -> Result<()> {
            let values = if self.quick { &values[..1] } else { values };
            for &value in values {
                let (geometry, threads) = of(value);
                let geometry = geometry.map(|n| n.to_string()).join(",");
                let points = self.bench.points(Case { threads, ..self.case(&geometry, "q4_k", "q4_k", tokens) })?;
                rows.extend(points.into_iter().map(|point| Grown { what, value, point }));
            }
            Ok(())
        };
        let [d, f, experts, used] = QWEN3;
        add("experts used", &[1, 2, 4, 8, 16], &|used| ([d, f, experts, used], self.threads))?;
        add("`n_ff`", &[256, 768, 1536, 3072], &|f| ([d, f, experts, used], self.threads))?;
        let threads: Vec<usize> = std::iter::successors(Some(1), |n| Some(n * 2)).take_while(|n| *n <= self.threads).collect();
        add("threads", &threads, &|threads| (QWEN3, threads))?;
        // Rows of one kind and number of tokens under each other.
        let order = ["tokens", "experts used", "`n_ff`", "threads"];
        let place = |what| order.iter().position(|o| *o == what);
        rows.sort_by_key(|r| if r.what == "tokens" { (place(r.what), 0, r.value) } else { (place(r.what), r.point.tokens, r.value) });
        Ok(rows)
    }

    /// Stock ggml in the same process.
    fn stock(&self, program: &Program) -> Result<Vec<Comparison>> {
        const TYPES: [usize; 4] = [12, 14, 8, 39]; // Q4_K, Q6_K, Q8_0, MXFP4
        let (types, tokens): (&[usize], &[usize]) = if self.quick { (&TYPES[..1], &[1, 32]) } else { (&TYPES, &[1, 32, 512]) };
        let cases = types.iter().flat_map(|ty| tokens.iter().map(|tokens| [*ty, *ty, *tokens])).collect();
        let seconds = 4.0 * self.bench.seconds;
        program.compare(&Layer { geometry: QWEN3, threads: self.threads, seconds, cases })
    }
}

/// The last part of the page.
fn next_to_stock(comparisons: &[Comparison], package: &str, threads: usize) -> Result<String> {
    let mut text = STOCK.to_owned();
    write!(
        text,
        "
In one process, in turns, on the same weights: the graph that llama.cpp builds (`MUL_MAT_ID`, `MUL_MAT_ID`, `SWIGLU`, `MUL_MAT_ID`, `MUL`,
`ADD`) on the CPU backend of {package}, weights in a plain buffer (not repacked),
`GGML_CPU_TILED_MM=1`; and `berth_moe_forward`. Medians; {threads} threads each; the layer above. `nmse` is the difference of the answers, both
of which round activations to 8 bits. Up to 8 tokens, 256 calls of a kind follow each other, after 32 that are not measured, as decoding makes them:
for some tens of milliseconds after a pause this machine's memory is slower.

| gate, up / down | T | stock, ms | Berth, ms | stock / Berth | nmse | calls |
|---|---|---|---|---|---|---|
"
    )?;
    for c in comparisons {
        let (stock, berth) = (digits(c.stock_ms), digits(c.berth_ms));
        writeln!(text, "| {} / {} | {} | {stock} | {berth} | {:.2} | {:.1e} | {} |", c.gate, c.down, c.tokens, c.ratio, c.nmse, c.runs)?;
    }
    Ok(text)
}

/// Everything that was measured.
struct Figures {
    best: String,
    formats: Vec<Point>,
    lower: Vec<Point>,
    layers: Vec<Point>,
    growth: Vec<Grown>,
    stock: Vec<Comparison>,
    package: String,
    threads: usize,
}

impl Figures {
    fn text(&self, called: &str) -> Result<String> {
        let mut text = String::new();
        let all = || self.formats.iter().chain(&self.layers);
        let (read, vnni) = (spread(all().map(|p| p.read_gb_per_s)), spread(all().map(|p| p.vnni_gmac_per_s)));
        let [date, cpu, cache] = [date()?, cpu(), cache()];
        let threads = self.threads;
        write!(
            text,
            "\
# The experts' operation, measured

Written by `{called}` on {date}.

- Processor: {cpu}, {threads} threads{cache}.
- Reading memory with these threads: {read} GB/s. The middle of all points, and the smallest and the largest.
- `vpdpbusd` with these threads: {vnni} GMAC/s, likewise.

`share` is the time that the limit that binds would take, over the time taken ([the two limits](moe.md#measuring)): **m** where reading each
expert's weights once takes longer, **c** where the multiply-adds do. Both are measured next to every point, with the same threads, and every
answer was checked against f64 first. The peak is that of products of bytes with 512 bits, for F16 and BF16 (which are multiplied as f32: a
quarter of it at most) and for AVX2 too. Weights that a call needs come from memory, not from a cache, unless many tokens share them.

![Share of the limit that binds, against tokens](moe-share.svg)

## Formats

One layer of 128 experts of 2048 x 768, 8 per token, gate, up and down in one format, uniform routing, instruction set `{best}`.
",
            best = self.best
        )?;
        let points: Vec<&Point> = self.formats.iter().collect();
        grid(&mut text, "Share of the limit, %", &points, |p| format!("{:.0} {}", 100.0 * p.share, &p.limit[..1]))?;
        grid(&mut text, "Weights, GB/s", &points, |p| digits(p.gb_per_s))?;
        grid(&mut text, "Multiply-adds, GMAC/s", &points, |p| digits(p.gmac_per_s))?;
        grid(&mut text, "Time, ms", &points, |p| digits(p.ms))?;
        if let Some(first) = self.lower.first() {
            let points: Vec<&Point> = self.lower.iter().collect();
            writeln!(text, "\n## Formats, with `BERTH_ISA={}`", first.isa)?;
            grid(&mut text, "Share of the limit, %", &points, |p| format!("{:.0} {}", 100.0 * p.share, &p.limit[..1]))?;
            grid(&mut text, "Weights, GB/s", &points, |p| digits(p.gb_per_s))?;
            grid(&mut text, "Multiply-adds, GMAC/s", &points, |p| digits(p.gmac_per_s))?;
        }

        text += "
## Other layers

A skewed choice takes expert `128 u^3` for a uniform `u`: the first experts get most tokens. Where a layer does not fit into half of the free
memory, it has fewer experts.

| layer | gate, up / down | experts | routing | T | read | ms | GB/s | GMAC/s | share |
|---|---|---|---|---|---|---|---|---|---|
";
        for p in &self.layers {
            let share = format!("{:.0} % {}", 100.0 * p.share, &p.limit[..1]);
            let (ms, bytes, macs) = (digits(p.ms), digits(p.gb_per_s), digits(p.gmac_per_s));
            let (layer, experts, tokens, distinct) = (&p.geometry, p.experts, p.tokens, p.distinct);
            writeln!(
                text,
                "| {layer} | {} / {} | {experts} | {} | {tokens} | {distinct} | {ms} | {bytes} | {macs} | {share} |",
                p.gate, p.down, p.routing
            )?;
        }

        text += "
## How the time grows

Q4_K, the layer above with one size changed. The limit is that of the model, with the bandwidth and the peak measured next to the point:

```
max(bytes of the distinct experts / read bandwidth, T * k * 3 * d * f / peak)
```

So at T = 1 the time grows in proportion to the experts used and to `n_ff`, as bytes do; with more tokens it grows with the distinct experts,
1 - (1 - k / E)^T of all, until all are read; from then on hardly, until the multiply-adds take longer than the bytes; from there in proportion
to T, k and `n_ff`. Threads help as far as they raise bandwidth or peak.

| what | value | T | experts read | ms | limit, ms | share |
|---|---|---|---|---|---|---|
";
        for Grown { what, value, point: p } in &self.growth {
            let (ms, limit, share) = (digits(p.ms), digits(p.ms * p.share), 100.0 * p.share);
            writeln!(text, "| {what} | {value} | {} | {} | {ms} | {limit} {} | {share:.0} % |", p.tokens, p.distinct, &p.limit[..1])?;
        }

        text.push('\n');
        text += &next_to_stock(&self.stock, &self.package, threads)?;
        Ok(text)
    }

    /// Points that took clearly less time than their limit allows, which is then wrong.
    fn above_the_limit(&self) -> usize {
        let growth = self.growth.iter().map(|g| &g.point);
        self.formats.iter().chain(&self.lower).chain(&self.layers).chain(growth).filter(|p| p.share > 1.05).count()
    }

    fn plot(&self) -> Result<String> {
        let mut lines: Vec<plot::Line> = Vec::new();
        for p in &self.formats {
            match lines.last_mut().filter(|l| l.name == p.gate) {
                Some(line) => line.points.push((p.tokens, p.share)),
                None => lines.push(plot::Line { name: p.gate.clone(), points: vec![(p.tokens, p.share)] }),
            }
        }
        plot::shares(&format!("Experts of 2048 x 768, 8 of 128, {} threads, {}", self.threads, self.best), &lines)
    }
}

/// A table of formats by tokens.
fn grid(text: &mut String, title: &str, points: &[&Point], cell: impl Fn(&Point) -> String) -> Result<()> {
    let mut tokens: Vec<usize> = points.iter().map(|p| p.tokens).collect();
    tokens.sort_unstable();
    tokens.dedup();
    let heads: Vec<String> = tokens.iter().map(|t| format!(" T = {t} |")).collect();
    writeln!(text, "\n{title}:\n\n| format |{}\n|---|{}", heads.concat(), "---|".repeat(tokens.len()))?;
    for row in points.chunk_by(|a, b| a.gate == b.gate) {
        let cells: Vec<String> = row.iter().map(|p| format!(" {} |", cell(p))).collect();
        writeln!(text, "| {} |{}", row[0].gate, cells.concat())?;
    }
    Ok(())
}

/// Three digits.
fn digits(value: f64) -> String {
    let after = if value >= 100.0 {
        0
    } else if value >= 10.0 {
        1
    } else if value >= 1.0 {
        2
    } else {
        3
    };
    format!("{value:.after$}")
}

/// The middle one, and the smallest and the largest in brackets.
fn spread(values: impl Iterator<Item = f64>) -> String {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    match (values.first(), values.get(values.len() / 2), values.last()) {
        (Some(least), Some(middle), Some(most)) => format!("{} ({} to {})", digits(*middle), digits(*least), digits(*most)),
        _ => "an unknown number of".to_owned(),
    }
}

fn date() -> Result<String> {
    let mut date = Command::new("date");
    date.args(["-u", "+%Y-%m-%d"]);
    Ok(run::run(date, Duration::from_secs(10))?.checked("date")?.stdout.trim().to_owned())
}

/// What the processor calls itself.
pub(crate) fn cpu() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = info.lines().find(|l| l.split(':').next().is_some_and(|n| n.trim() == name));
        line.and_then(|l| l.split_once(':')).map(|(_, value)| value.trim().to_owned())
    };
    let name = field("model name").unwrap_or_else(|| "An unknown processor".to_owned());
    match (field("cpu family"), field("model")) {
        (Some(family), Some(model)) => format!("{name} (family {family}, model {model})"),
        _ => name,
    }
}

/// The last-level cache, where the system tells its size.
fn cache() -> String {
    let size = fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index3/size").unwrap_or_default();
    if size.trim().is_empty() { String::new() } else { format!(", last-level cache {}", size.trim()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(gate: &str, tokens: usize, share: f64) -> Point {
        Point {
            geometry: "qwen3".into(),
            experts: 128,
            gate: gate.into(),
            down: gate.into(),
            tokens,
            routing: "uniform".into(),
            distinct: 8,
            isa: "avx512".into(),
            checked: true,
            ms: 12.345,
            gb_per_s: 20.0,
            gmac_per_s: 300.0,
            read_gb_per_s: 25.0,
            vnni_gmac_per_s: 900.0,
            limit: if tokens > 32 { "compute" } else { "memory" }.into(),
            share,
        }
    }

    #[test]
    fn every_point_is_in_its_table() {
        let formats = vec![point("q4_k", 1, 0.91), point("q4_k", 512, 0.62), point("q8_0", 1, 0.97), point("q8_0", 512, 0.5)];
        let comparison = Comparison {
            gate: "q4_K".into(),
            down: "q4_K".into(),
            tokens: 512,
            isa: "avx512".into(),
            runs: 9,
            stock_ms: 400.0,
            berth_ms: 100.0,
            ratio: 4.0,
            nmse: 1e-4,
        };
        let figures = Figures {
            best: "avx512".into(),
            growth: vec![Grown { what: "threads", value: 2, point: point("q4_k", 512, 0.62) }],
            lower: vec![point("q4_k", 1, 0.7)],
            layers: vec![point("mxfp4", 2048, 0.66), point("mxfp4", 1, 1.2)],
            formats,
            stock: vec![comparison],
            package: "a package".into(),
            threads: 2,
        };
        let text = figures.text("the command").unwrap();
        for line in [
            "Written by `the command` on 20",
            "| format | T = 1 | T = 512 |\n|---|---|---|\n| q4_k | 91 m | 62 c |\n| q8_0 | 97 m | 50 c |\n",
            "| format | T = 1 |\n|---|---|\n| q4_k | 70 m |\n",
            "| qwen3 | mxfp4 / mxfp4 | 128 | uniform | 2048 | 8 | 12.3 | 20.0 | 300 | 66 % c |\n",
            "| threads | 2 | 512 | 8 | 12.3 | 7.65 c | 62 % |\n",
            "| q4_K / q4_K | 512 | 400 | 100 | 4.00 | 1.0e-4 | 9 |\n",
            "Reading memory with these threads: 25.0 (25.0 to 25.0) GB/s",
        ] {
            assert!(text.contains(line), "{line}\nis not in\n{text}");
        }
        assert_eq!(figures.above_the_limit(), 1);
        assert_eq!(figures.plot().unwrap(), figures.plot().unwrap());
    }
}
