//! What `explain` says before a load, against what stock llama.cpp does, tensor by tensor.
//!
//! Proves: for every rule set, model and way to load below, stock (with Berth as a plug-in) gives every tensor that a rule names the place that
//! `explain` said, gives no other tensor a place by rule, and copies as many bytes into each buffer type.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use berth::gguf::Model;
use berth::placement::{Explanation, Facts, Machine, Memory, Repack, Rules, Targets};
use ffi_tests::gguf::Type;
use ffi_tests::hosts::{self, Host};
use ffi_tests::models::{self, Spec};
use ffi_tests::run;
use serde_json::Value;

/// The build of llama.cpp whose `llama-completion` is asked.
const HOST: &str = "sdist-dl";

/// The program logs through a thread and may lose its last lines.
const TRIES: usize = 4;

/// One option of the command line.
#[derive(Clone, Copy)]
enum Rule {
    Override(&'static str),
    CpuMoe,
    NCpuMoe(u32),
    NCpuFfn(u32),
}

use Rule::{CpuMoe, NCpuFfn, NCpuMoe, Override};

const RULE_SETS: &[&[Rule]] = &[
    &[],
    &[Override("exps=ARENA")],
    &[Override("exps=CUDA_Host")],
    &[Override("exps=CPU_MMAP")],
    &[Override("exps=CPU")],
    // Before and after another rule for the same tensors.
    &[CpuMoe, Override("exps=ARENA")],
    &[Override("exps=ARENA"), CpuMoe],
    &[NCpuMoe(1), Override("exps=ARENA")],
    // `blk.1` against `blk.10`, with and without the dots.
    &[Override(r"blk\.1=ARENA,blk\.1\.=CUDA_Host")],
    &[Override(r"blk\.1\.=ARENA,blk.1=CPU_MMAP,exps=CUDA_Host")],
    // Too wide, and its opposite.
    &[Override(".*=ARENA")],
    &[Override(r"^(?!.*exps).*=ARENA")],
    // Merged gate and up, chunked experts, biases, shared experts.
    &[Override(r"\.ffn_(up|down|gate|gate_up)_(ch|)exps=CUDA_Host")],
    &[Override(r"gate_up_exps=ARENA,_exps\.weight=CPU_MMAP")],
    &[Override(r"shexp=ARENA,exps\.bias=CPU_MMAP,_exps\.weight=CUDA_Host")],
    &[Override(r"token_embd=ARENA,output=CPU_MMAP,(norm|inp)\.=ARENA")],
    &[NCpuFfn(2), Override("ffn=ARENA")],
    &[Override(r"nothing=ARENA,blk\.[0-9]+\.attn=CPU")],
    &[Override(r"blk\.0\.=CPU_MMAP"), Override(r"blk\.[01]\.=ARENA"), NCpuMoe(99)],
];

/// How the file is loaded.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Way {
    mmap: bool,
    repack: bool,
    /// `BERTH_AUTO`.
    auto: bool,
}

const WAYS: [Way; 5] = [
    Way { mmap: true, repack: false, auto: false },
    Way { mmap: true, repack: true, auto: false },
    Way { mmap: false, repack: false, auto: false },
    Way { mmap: true, repack: false, auto: true },
    Way { mmap: false, repack: true, auto: true },
];

impl Way {
    /// The command is asked too. (Without repacking, so that it does not depend on this processor.)
    fn is_asked_of_the_command(self) -> bool {
        self.mmap && !self.repack
    }

    fn environment(self) -> [(&'static str, &'static str); 1] {
        [("BERTH_AUTO", if self.auto { "1" } else { "0" })]
    }
}

fn explained(model: &Model, rules: &[Rule], way: Way) -> Explanation {
    let mut all = Rules::new(Targets::new([""; 0]));
    for rule in rules {
        match *rule {
            Override(text) => all.parse(text),
            CpuMoe => all.cpu_moe(),
            NCpuMoe(n) => all.n_cpu_moe(n),
            NCpuFfn(n) => all.n_cpu_ffn(n),
        }
        .unwrap_or_else(|e| panic!("{e}\n{}", e.excerpt()));
    }
    let mut load = Facts::of(model.header()).load();
    load.mmap = way.mmap;
    load.repack = if way.repack { Repack::Avx2 } else { Repack::Off };
    load.auto_experts = way.auto;
    Explanation::of_model(model, &all, &load, Machine::default()).unwrap_or_else(|e| panic!("{e}"))
}

fn arguments(rules: &[Rule], Way { mmap, repack, .. }: Way) -> Vec<String> {
    let mut args: Vec<String> = Vec::new();
    let mut add = |words: &[&str]| args.extend(words.iter().map(|&w| w.to_owned()));
    add(&["-p", "x", "-n", "1", "-t", "1", "-no-cnv", "--no-warmup", "-fit", "off", "-lv", "5"]);
    add(&["--load-mode", if mmap { "mmap" } else { "none" }]);
    add(if repack { &[] } else { &["--no-repack"] });
    for rule in rules {
        match *rule {
            Override(text) => add(&["-ot", text]),
            CpuMoe => add(&["--cpu-moe"]),
            NCpuMoe(n) => add(&["--n-cpu-moe", &n.to_string()]),
            NCpuFfn(n) => add(&["--n-cpu-ffn", &n.to_string()]),
        }
    }
    args
}

/// What stock says it did.
#[derive(Debug, Default)]
struct Done {
    /// Tensors that a rule gave a place.
    ruled: BTreeMap<String, String>,
    /// MiB of each buffer type.
    buffers: BTreeMap<String, f64>,
}

fn done(log: &str) -> Done {
    let mut done = Done::default();
    for line in log.lines() {
        if let Some((tensor, to)) = line.split_once(" buffer type overridden to ") {
            let name = tensor.split_once("tensor ").and_then(|(_, rest)| rest.split(' ').next()).expect("a tensor name");
            done.ruled.insert(name.to_owned(), to.trim().to_owned());
        }
        if let Some((before, size)) = line.split_once(" model buffer size =") {
            let name = before.rsplit(' ').next().expect("a buffer type");
            let mib: f64 = size.trim().trim_end_matches(" MiB").trim().parse().unwrap_or_else(|_| panic!("{line}"));
            *done.buffers.entry(name.to_owned()).or_default() += mib;
        }
    }
    done
}

/// Runs stock until its log is whole.
fn stock(host: &Host, berth: &Path, model: &Path, rules: &[Rule], way: Way) -> Done {
    let arena = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("the target directory is writable");
    for _ in 0..TRIES {
        let mut command = host.command("llama-completion");
        command.arg("-m").arg(model).args(arguments(rules, way));
        command.env("GGML_BACKEND_PATH", berth).env("BERTH_ARENA_DIR", arena.path()).envs(way.environment());
        let output = run::run(command, Duration::from_secs(120)).unwrap_or_else(|e| panic!("{e:#}"));
        let done = done(&format!("{}\n{}", output.stdout, output.stderr));
        if !done.buffers.is_empty() {
            return done;
        }
    }
    panic!("{} never logged its buffers for {}", host.id, model.display());
}

/// The name of a place in stock's log.
fn logged(e: &berth::placement::Placed) -> Option<String> {
    let repacked = e.memory == Some(Memory::Repacked);
    e.place.as_ref().map(|p| if repacked { "CPU_REPACK".to_owned() } else { p.name().to_owned() })
}

/// How much was compared for a model.
#[derive(Debug, Default)]
struct Compared {
    /// Places of tensors by rule.
    tensors: usize,
    /// Sizes of buffers.
    buffers: usize,
    /// Rule sets for which the command was asked too.
    by_command: usize,
}

/// Places by rule as the command prints them.
fn said_by_command(path: &Path, rules: &[Rule], way: Way) -> BTreeMap<String, String> {
    assert!(way.is_asked_of_the_command());
    let mut command = Command::new(ffi_tests::berth_program().unwrap_or_else(|e| panic!("{e:#}")));
    run::clean_env(&mut command);
    command.arg("explain").arg(path).args(["--json", "--no-repack"]).envs(way.environment());
    for rule in rules {
        match *rule {
            Override(text) => command.args(["-ot", text]),
            CpuMoe => command.arg("--cpu-moe"),
            NCpuMoe(n) => command.args(["--n-cpu-moe", &n.to_string()]),
            NCpuFfn(n) => command.args(["--n-cpu-ffn", &n.to_string()]),
        };
    }
    let output = run::run(command, Duration::from_secs(60)).and_then(|o| o.checked("berth explain")).unwrap_or_else(|e| panic!("{e:#}"));
    let json: Value = serde_json::from_str(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", output.stdout));
    let ruled = json["tensors"].as_array().expect("tensors").iter().filter(|t| !t["rule"].is_null());
    let text = |v: &Value| v.as_str().expect("a text").to_owned();
    ruled.map(|t| (text(&t["name"]), text(&t["place"]))).collect()
}

fn same_as_stock(host: &Host, path: &Path) {
    let berth = ffi_tests::berth_lib().unwrap_or_else(|e| panic!("{e:#}"));
    let model = Model::open(path).unwrap_or_else(|e| panic!("{e}"));
    let mut compared = Compared::default();
    for (i, rules) in RULE_SETS.iter().enumerate() {
        for way in WAYS {
            let what = format!("{}, rule set {i}, {way:?}", path.display());
            let e = explained(&model, rules, way);
            let done = stock(host, &berth, path, rules, way);
            let said: BTreeMap<String, String> =
                e.tensors.iter().filter(|t| t.rule.is_some()).filter_map(|t| Some((t.name.clone(), logged(t)?))).collect();
            assert_eq!(said, done.ruled, "{what}");
            compared.tensors += said.len();
            // The command says the same, and so do its readers learn it.
            if way.is_asked_of_the_command() && !said.is_empty() {
                assert_eq!(said_by_command(path, rules, way), said, "{what}: berth explain --json");
                compared.by_command += 1;
            }

            let mut copied: BTreeMap<String, u64> = BTreeMap::new();
            for t in e.tensors.iter().filter(|t| t.memory.is_some_and(Memory::is_host_copy)) {
                *copied.entry(logged(t).unwrap_or_default()).or_default() += t.bytes;
            }
            // A mapped buffer spans from its first to its last tensor, with what lies between.
            let mut spans: BTreeMap<String, (u64, u64)> = BTreeMap::new();
            for t in e.tensors.iter().filter(|t| t.memory == Some(Memory::Mapped)) {
                let info = model.tensor(&t.name).expect("it is in the model").info;
                let place = t.place.as_ref().expect("what is mapped has a place").name();
                let span = spans.entry(if place == "CPU" { "CPU_Mapped" } else { place }.to_owned()).or_insert((u64::MAX, 0));
                *span = (span.0.min(info.offset), span.1.max(info.offset + info.bytes));
            }
            for (name, mib) in &done.buffers {
                let mapped = spans.remove(name).map(|(from, to)| to - from);
                let copy = copied.remove(name);
                assert!(mapped.is_none() || copy.is_none(), "{what}: {name} is both mapped and copied");
                let expected = mapped.or(copy).unwrap_or(0) as f64 / f64::from(1 << 20);
                // Two decimals, and for a copy up to one alignment of padding per tensor in it: of what is page-locked a tensor starts a page.
                let within = e.tensors.iter().filter(|t| copy.is_some() && logged(t).as_ref() == Some(name)).count();
                let alignment = if name == "CUDA_Host" { 4096.0 } else { 64.0 };
                let slack = 0.006 + within as f64 * alignment / f64::from(1 << 20);
                assert!((mib - expected).abs() <= slack, "{what}: {name} has {mib} MiB, expected {expected}");
                compared.buffers += 1;
            }
            assert!(spans.is_empty(), "{what}: expected to be mapped, and stock does not: {spans:?}");
            assert!(copied.is_empty(), "{what}: expected in buffers that stock does not have: {copied:?}");
        }
    }
    println!("{}: {compared:?}", path.display());
    assert!(compared.tensors > 0 && compared.buffers >= RULE_SETS.len() * WAYS.len() && compared.by_command > 0, "{compared:?}");
}

macro_rules! architectures {
    ($($test:ident: $arch:literal;)*) => {
        $(#[test] fn $test() { of_host(|host| models::of_architecture(host, $arch)) })*
    };
}

architectures! {
    gpt_oss_with_biases_goes_where_explain_says: "gpt-oss";
    hy_v3_with_merged_gate_and_up_goes_where_explain_says: "hy_v3";
    llama4_with_shared_experts_goes_where_explain_says: "llama4";
    deepseek2_with_a_dense_block_goes_where_explain_says: "deepseek2";
    grovemoe_with_chunked_experts_goes_where_explain_says: "grovemoe";
    qwen3moe_with_scales_goes_where_explain_says: "qwen3moe";
    bailingmoe3_with_scales_goes_where_explain_says: "bailingmoe3";
}

#[test]
fn formats_that_stock_repacks_go_where_explain_says() {
    of_host(|_| models::random(&Spec { ty: Type::Q4_K, layers: 11, ..Spec::default() }));
}

#[test]
fn tied_embeddings_of_a_language_model_go_where_explain_says() {
    of_host(|_| models::smollm_moe());
}

fn of_host(model: impl FnOnce(&Host) -> anyhow::Result<PathBuf>) {
    let Some(host) = hosts::require(HOST) else { return };
    if let Some(path) = ffi_tests::skip::available("a model", model(&host)) {
        same_as_stock(&host, &path);
    }
}
