//! The same model in other files: cut into several, as `llama-gguf-split` does (`NAME-00001-of-0000N.gguf`, metadata in the first), or in one with
//! another alignment.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::{Gguf, TensorInfo, Value, Writer};

/// Writes the model to `path` with another alignment of its data, in bytes.
pub fn realign(model: &Path, path: &Path, alignment: u32) -> Result<()> {
    let source = Gguf::open(model)?;
    let mut writer = Writer::new(source.string("general.architecture").context("no architecture")?);
    let others = |key: &&(String, Value)| key.0 != "general.architecture" && key.0 != "general.alignment";
    source.metadata().iter().filter(others).for_each(|(key, value)| writer.set(key, value.clone()));
    writer.align(alignment);
    source.tensors().iter().try_for_each(|t| writer.tensor(&t.name, t.ty, &t.dims))?;
    let mut out = BufWriter::new(File::create(path)?);
    writer.write(&mut out, |index, _, out| Ok(out.write_all(&source.data(&source.tensors()[index])?)?))?;
    Ok(out.flush()?)
}

/// Writes `parts` files with about as many tensors each to `dir`, and returns their paths, first part first.
pub fn split(model: &Path, dir: &Path, parts: usize) -> Result<Vec<PathBuf>> {
    let source = Gguf::open(model)?;
    let tensors = source.tensors();
    ensure!((1..=tensors.len()).contains(&parts), "{parts} parts of {} tensors", tensors.len());
    let architecture = source.string("general.architecture").context("no architecture")?.to_owned();
    let mut paths = Vec::new();
    for part in 0..parts {
        let mine: Vec<&TensorInfo> = tensors[tensors.len() * part / parts..tensors.len() * (part + 1) / parts].iter().collect();
        let mut writer = Writer::new(&architecture);
        if part == 0 {
            for (key, value) in source.metadata().iter().filter(|(k, _)| k != "general.architecture") {
                writer.set(key, value.clone());
            }
        }
        writer.set("split.no", Value::U16(part.try_into()?));
        writer.set("split.count", Value::U16(parts.try_into()?));
        writer.set("split.tensors.count", Value::I32(tensors.len().try_into()?));
        for tensor in &mine {
            writer.tensor(&tensor.name, tensor.ty, &tensor.dims)?;
        }
        let path = dir.join(format!("split-{:05}-of-{parts:05}.gguf", part + 1));
        let mut out = BufWriter::new(File::create(&path)?);
        writer.write(&mut out, |index, _, out| Ok(out.write_all(&source.data(mine[index])?)?))?;
        out.flush()?;
        paths.push(path);
    }
    Ok(paths)
}
