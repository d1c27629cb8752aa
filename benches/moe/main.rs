//! The operation against the machine: every format and number of tokens, as a share of the limit that binds.
//!
//! `cargo bench --bench moe -- table [format] [tokens]` prints one line per case, best of several runs, in a minute or two; without `table` criterion
//! measures a selection of them, with its statistics. Both measure the two ceilings first, with the same threads, and check the answer of
//! every layer against the scalar oracle before they time it. `BERTH_BENCH_THREADS` (default: all processors) sets the threads.

mod ceilings;
mod kernel;
mod problem;

use std::time::{Duration, Instant};

use berth::moe::blocks::WeightType;
use berth::moe::isa::Isa;
use berth::moe::{ParallelFor, Pool, table};
use criterion::{BenchmarkId, Criterion, Throughput};
use problem::{DEEPSEEK, GPT_OSS, Geometry, Layer, QWEN3, Run, check, tiers};

const TOKENS: [usize; 8] = [1, 2, 4, 8, 32, 128, 512, 2048];

fn pool() -> Pool {
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = std::env::var("BERTH_BENCH_THREADS").ok().and_then(|t| t.parse().ok()).unwrap_or(all);
    Pool::new(threads).expect("threads")
}

struct Ceilings {
    bytes: f64,
    macs: f64,
}

fn ceilings(memory: &[u8], pool: &Pool) -> Ceilings {
    let bytes = ceilings::read_bytes_per_second(memory, pool);
    Ceilings { bytes, macs: ceilings::vnni_macs_per_second(pool) }
}

/// Seconds since some moment: of the clock, or, if `BERTH_BENCH_CPU_TIME` is set, of this process's processors, which on a busy machine tells
/// more about one thread.
fn now() -> f64 {
    static CPU: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    if !CPU.get_or_init(|| std::env::var_os("BERTH_BENCH_CPU_TIME").is_some()) {
        return START.get_or_init(Instant::now).elapsed().as_secs_f64();
    }
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a valid clock and a place for the result.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut t) };
    t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9
}

/// Best time of about half a second of runs.
fn time(layer: &Layer, run: &mut Run, isa: Isa, pool: &Pool) -> f64 {
    run.step(layer, table(isa), pool);
    let start = Instant::now();
    let mut best = f64::INFINITY;
    let mut runs = 0;
    while runs < 3 || start.elapsed() < Duration::from_millis(500) {
        let once = now();
        run.step(layer, table(isa), pool);
        best = best.min(now() - once);
        runs += 1;
    }
    best
}

fn print_layer(geometry: Geometry, types: [WeightType; 2], tokens: &[usize], pool: &Pool) {
    let layer = Layer::new(geometry, types);
    for isa in tiers() {
        check(&layer, isa);
        for &tokens in tokens {
            let limit = ceilings(layer.memory(), pool);
            let mut run = Run::new(&layer, tokens, pool.threads(), 0.0);
            let seconds = time(&layer, &mut run, isa, pool);
            let bytes = run.distinct() * layer.expert_bytes() as f64 / seconds;
            let macs = (tokens * geometry.used * layer.expert_macs()) as f64 / seconds;
            let (memory, compute) = (bytes / limit.bytes, macs / limit.macs);
            println!(
                "{:14} {:7} {:6}/{:6} T={tokens:<5} {:9.3} ms {:6.1} GB/s of {:5.1} ({:3.0} %) {:7.1} GMAC/s of {:6.0} ({:3.0} %)",
                geometry.name,
                isa.tier().name(),
                types[0].name(),
                types[1].name(),
                seconds * 1e3,
                bytes / 1e9,
                limit.bytes / 1e9,
                memory * 100.0,
                macs / 1e9,
                limit.macs / 1e9,
                compute * 100.0
            );
        }
    }
}

fn print_table(arguments: &[String], pool: &Pool) {
    let format = arguments.iter().find(|a| WeightType::ALL.iter().any(|t| t.name() == *a));
    let tokens: Vec<usize> = arguments.iter().filter_map(|a| a.parse().ok()).collect();
    let tokens = if tokens.is_empty() { &TOKENS[..] } else { &tokens };
    for ty in WeightType::ALL.into_iter().filter(|t| format.is_none_or(|f| t.name() == f)) {
        if ty != WeightType::F32 || format.is_some() {
            print_layer(QWEN3, [ty; 2], tokens, pool);
        }
    }
    if format.is_none() {
        print_layer(QWEN3, [WeightType::Q4_K, WeightType::Q6_K], tokens, pool);
        print_layer(GPT_OSS, [WeightType::MXFP4; 2], tokens, pool);
        print_layer(DEEPSEEK, [WeightType::Q4_K, WeightType::Q6_K], &tokens[..tokens.len().min(5)], pool);
    }
}

fn measure(c: &mut Criterion, pool: &Pool) {
    let cases = [
        (QWEN3, [WeightType::Q4_K, WeightType::Q6_K]),
        (QWEN3, [WeightType::Q8_0, WeightType::Q8_0]),
        (QWEN3, [WeightType::Q4_0, WeightType::Q4_0]),
        (GPT_OSS, [WeightType::MXFP4, WeightType::MXFP4]),
    ];
    for (geometry, types) in cases {
        let layer = Layer::new(geometry, types);
        let limit = ceilings(layer.memory(), pool);
        println!("read {:.1} GB/s, vpdpbusd {:.0} GMAC/s, {} threads", limit.bytes / 1e9, limit.macs / 1e9, pool.threads());
        for isa in tiers() {
            check(&layer, isa);
            let mut group = c.benchmark_group(format!("{}/{}-{}/{}", geometry.name, types[0].name(), types[1].name(), isa.tier().name()));
            group.sample_size(10).measurement_time(Duration::from_secs(2)).warm_up_time(Duration::from_millis(500));
            for tokens in [1, 4, 32, 512] {
                for skew in [0.0, 2.0] {
                    let mut run = Run::new(&layer, tokens, pool.threads(), skew);
                    group.throughput(Throughput::Elements((tokens * geometry.used * layer.expert_macs()) as u64));
                    let name = BenchmarkId::new(if skew == 0.0 { "uniform" } else { "skewed" }, tokens);
                    group.bench_function(name, |b| b.iter(|| run.step(&layer, table(isa), pool)));
                }
            }
        }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.iter().any(|a| a == "kernels") {
        kernel::print(&arguments);
        return;
    }
    let pool = pool();
    if arguments.iter().any(|a| a == "table") {
        print_table(&arguments, &pool);
        return;
    }
    let mut criterion = Criterion::default().configure_from_args();
    measure(&mut criterion, &pool);
    criterion.final_summary();
}
