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

use anyhow::{Context, Result};

pub use arch::{dense_of_architecture, of_all_architectures, of_architecture};
pub use geometry::{qwen3_30b_a3b, repeated};
pub use random::{Family, Spec};
pub use smollm::{Experts, Split, split_dense};

use crate::cache;
use crate::gguf::{Gguf, Type, Writer};

/// A model with random weights; the same file for the same description.
pub fn random(spec: &Spec) -> Result<PathBuf> {
    let key = cache::key(&format!("{} {spec:?}", random::RECIPE));
    cache::file("models", &format!("random-{}-{key}.gguf", spec.ty), |path| create(path, |out| random::write(spec, out)))
}

/// A model with random weights, written to a path of the caller's.
pub fn random_to(spec: &Spec, path: &Path) -> Result<()> {
    create(path, |out| random::write(spec, out))
}

/// The same model with its experts in F16: the floats that their blocks stand for, rounded once.
pub fn random_with_f16_experts(spec: &Spec) -> Result<PathBuf> {
    let key = cache::key(&format!("1 {} {spec:?}", random::RECIPE));
    let source = random(spec)?;
    cache::file("models", &format!("random-{}-as-f16-{key}.gguf", spec.ty), |path| f16_experts(&source, path))
}

fn f16_experts(source: &Path, path: &Path) -> Result<()> {
    let source = Gguf::open(source)?;
    let mut w = Writer::new(source.string("general.architecture").context("no architecture")?);
    source.metadata().iter().filter(|(key, _)| key != "general.architecture").for_each(|(key, value)| w.set(key, value.clone()));
    let is_expert = |name: &str| name.contains("_exps");
    for t in source.tensors() {
        w.tensor(&t.name, if is_expert(&t.name) { Type::F16 } else { t.ty }, &t.dims)?;
    }
    create(path, |out| {
        w.write(out, |i, info, out| {
            let tensor = &source.tensors()[i];
            let data = source.data(tensor)?;
            let floats = || quants::quantize(Type::F16, &quants::dequantize(tensor.ty, &data)?);
            Ok(out.write_all(&if is_expert(&info.name) { floats()? } else { data.clone() })?)
        })
    })
}

/// SmolLM2-135M-Instruct (Apache-2.0) as a mixture of 8 experts that says what the dense model says: the blocks of the original, bit for bit.
pub fn smollm_moe() -> Result<PathBuf> {
    smollm_split(&Split::default())
}

/// SmolLM2-135M-Instruct as it is: without experts.
pub fn smollm_dense() -> Result<PathBuf> {
    smollm::dense()
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
