//! The experts of a block from C: `c/moe_check.c` calls every function of it, compares every value with f64, and misuses what can be misused.
//!
//! It runs with the kernels of each instruction set and buffers that end at a page nobody may touch, under AddressSanitizer, and under
//! valgrind (which knows no AVX-512). Its decoder of blocks is compared with Berth's, bit for bit.

#[path = "support/misuse.rs"]
mod misuse;
#[path = "support/peer.rs"]
mod peer;
#[path = "support/scratch.rs"]
mod scratch;

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use berth::moe::isa::Tier;
use berth::moe::{WeightType, dequant};
use ffi_tests::{berth_lib, skip};
use peer::Compile;
use scratch::Scratch;

/// Compiles the program with these options beside the strict ones.
fn build(scratch: &Scratch, name: &str, options: &[&str]) -> PathBuf {
    let lib = scratch.dir("lib");
    for file in ["libberth.so", "libberth.so.0"] {
        if !lib.join(file).exists() {
            symlink(berth_lib().unwrap(), lib.join(file)).unwrap();
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let with = |option: &str, path: PathBuf| format!("{option}{}", path.display());
    let compile = Compile::c("cc").args(["-Wpedantic"]).args(options);
    let compile = compile.arg(with("-I", root.join("include"))).arg(with("-I", root.join("c-examples"))).arg(peer::source("moe_check.c"));
    compile.arg(with("-L", lib.clone())).args(["-lberth", "-lm", "-pthread"]).arg(with("-Wl,-rpath,", lib)).to(scratch.path().join(name))
}

fn seed() -> String {
    let clock = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(1, |d| d.as_nanos() as u64);
    let seed = std::env::var("BERTH_TEST_SEED").unwrap_or_else(|_| clock().to_string());
    println!("moe_capi: BERTH_TEST_SEED={seed}");
    seed
}

/// Runs everything, with this tier.
fn check(mut command: Command, tier: Tier, memory: &str, rounds: &str) -> String {
    let seed = seed();
    command.args([memory, &seed, rounds]).env("BERTH_ISA", tier.name());
    let said = peer::succeeds(command).stdout;
    assert!(said.starts_with(&format!("{}: ok, ", tier.name())), "{said}");
    println!("{}", said.trim_end());
    said
}

fn each_tier(test: impl Fn(Tier)) {
    for tier in Tier::ALL {
        if tier.in_this_cpu() {
            test(tier);
        } else {
            skip::skipped(tier.name(), "not in this CPU");
        }
    }
}

#[test]
fn every_value_is_that_of_f64_and_no_byte_beyond_a_buffer_is_touched() {
    let scratch = Scratch::new();
    let program = build(&scratch, "check", &["-DCOUNT_ALLOCATIONS"]);
    each_tier(|tier| drop(check(peer::plain(&program), tier, "guard", "25")));
}

#[test]
fn the_harness_is_clean_under_address_sanitizer() {
    let scratch = Scratch::new();
    let program = build(&scratch, "asan", &["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]);
    each_tier(|tier| drop(check(peer::plain(&program), tier, "heap", "5")));
}

#[test]
fn the_harness_is_clean_under_valgrind() {
    let scratch = Scratch::new();
    let program = build(&scratch, "plain", &[]);
    for tier in [Tier::Scalar, Tier::Avx2].into_iter().filter(|t| t.in_this_cpu()) {
        if let Some(command) = peer::valgrind(&program) {
            let said = check(command, tier, "heap", "1");
            misuse::tell("c/moe_check.c", &format!("{} kernels, under valgrind", tier.name()), &said);
        }
    }
}

#[test]
fn a_bad_berth_isa_is_an_error_and_no_crash() {
    let scratch = Scratch::new();
    let program = build(&scratch, "check", &[]);
    let output = peer::plain(&program).args(["guard", "1", "0"]).env("BERTH_ISA", "sse9").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && said.contains("BERTH_ISA") && said.contains("sse9"), "{said}");
}

#[test]
fn the_decoder_of_the_harness_gives_the_bits_of_berth() {
    let scratch = Scratch::new();
    let program = build(&scratch, "check", &[]);
    let mut random = fastrand::Rng::with_seed(seed().parse().unwrap_or(1));
    for ty in WeightType::ALL {
        // All bits random: infinities and NaNs among the scales too.
        let blocks = 64 * 256 / ty.block_weights();
        let bytes: Vec<u8> = (0..blocks * ty.block_bytes()).map(|_| random.u8(..)).collect();
        let mut want = vec![0.0f32; blocks * ty.block_weights()];
        dequant::row(ty, &bytes, &mut want).unwrap();
        let input = scratch.path().join("blocks");
        fs::write(&input, &bytes).unwrap();
        let mut command = peer::plain(&program);
        command
            .args(["decode".to_owned(), (ty as u32).to_string(), want.len().to_string()])
            .stdin(Stdio::from(File::open(&input).unwrap()));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", ty.name());
        let got: Vec<f32> = output.stdout.as_chunks::<4>().0.iter().map(|b| f32::from_ne_bytes(*b)).collect();
        let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
        assert!(got.len() == want.len() && got.iter().zip(&want).all(same), "{}", ty.name());
    }
}
