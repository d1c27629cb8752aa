//! Models for the tests, made here and kept in the [cache]: random experts of any size and block format, and a real language
//! model whose answers are known.

mod arch;
mod blocks;
mod geometry;
mod quants;
mod random;
mod rng;
mod smollm;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::Result;

pub use arch::of_architecture;
pub use geometry::{qwen3_30b_a3b, repeated};
pub use random::{Family, Spec};
pub use smollm::{Experts, Split, split_dense};

use crate::cache;

/// A model with random weights; the same file for the same description.
pub fn random(spec: &Spec) -> Result<PathBuf> {
    let key = cache::key(&format!("{} {spec:?}", random::RECIPE));
    cache::file("models", &format!("random-{}-{key}.gguf", spec.ty), |path| create(path, |out| random::write(spec, out)))
}

/// A model with random weights, written to a path of the caller's.
pub fn random_to(spec: &Spec, path: &Path) -> Result<()> {
    create(path, |out| random::write(spec, out))
}

/// SmolLM2-135M-Instruct (Apache-2.0) as a mixture of 8 experts that says what the dense model says: the blocks of the original, bit for bit.
pub fn smollm_moe() -> Result<PathBuf> {
    smollm_split(&Split::default())
}

/// SmolLM2-135M-Instruct cut into experts in another way.
pub fn smollm_split(split: &Split) -> Result<PathBuf> {
    let key = cache::key(&format!("{} {split:?}", smollm::RECIPE));
    let name = format!("smollm2-moe-{}-{key}.gguf", split.experts_as);
    cache::file("models", &name, |path| split_dense(&smollm::dense()?, path, split))
}

fn create(path: &Path, write: impl FnOnce(&mut BufWriter<File>) -> Result<()>) -> Result<()> {
    let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
    write(&mut out)?;
    out.flush()?;
    Ok(())
}
