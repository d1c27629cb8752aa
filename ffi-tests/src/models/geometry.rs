//! Models that are all header: names, shapes and formats of a real model, or very many tensors, and data that takes no room on the disk.

use std::path::Path;

use anyhow::Result;

use crate::gguf::{Type, Value, Writer};

/// Writes a file with the geometry of Qwen3-30B-A3B in Q4_K_M: 48 layers, 128 experts of which 8 are used, 17 GiB of zeros.
pub fn qwen3_30b_a3b(path: &Path) -> Result<()> {
    const LAYERS: u32 = 48;
    const EMBD: u64 = 2048;
    const HEAD: u64 = 128;
    const Q: u64 = 32 * HEAD;
    const KV: u64 = 4 * HEAD;
    const FF: u64 = 768;
    const EXPERTS: u64 = 128;
    const VOCAB: u64 = 151_936;
    let mut w = Writer::new("qwen3moe");
    w.set("general.name", Value::String("Qwen3-30B-A3B".into()));
    for (key, value) in [("block_count", LAYERS), ("expert_count", EXPERTS as u32), ("expert_used_count", 8)] {
        w.set(&format!("qwen3moe.{key}"), Value::U32(value));
    }
    w.tensor("output.weight", Type::Q6_K, &[EMBD, VOCAB])?;
    w.tensor("output_norm.weight", Type::F32, &[EMBD])?;
    w.tensor("token_embd.weight", Type::Q4_K, &[EMBD, VOCAB])?;
    for layer in 0..LAYERS {
        // Half of the layers have more bits where they matter most: the first and last eighth, and every third between.
        let more = !(LAYERS / 8..LAYERS * 7 / 8).contains(&layer) || (layer - LAYERS / 8) % 3 == 2;
        let careful = if more { Type::Q6_K } else { Type::Q4_K };
        let mut add = |name: &str, ty, dims: &[u64]| w.tensor(&format!("blk.{layer}.{name}.weight"), ty, dims);
        add("attn_k", Type::Q4_K, &[EMBD, KV])?;
        add("attn_k_norm", Type::F32, &[HEAD])?;
        add("attn_norm", Type::F32, &[EMBD])?;
        add("attn_output", Type::Q4_K, &[Q, EMBD])?;
        add("attn_q", Type::Q4_K, &[EMBD, Q])?;
        add("attn_q_norm", Type::F32, &[HEAD])?;
        add("attn_v", careful, &[EMBD, KV])?;
        add("ffn_down_exps", careful, &[FF, EMBD, EXPERTS])?;
        add("ffn_gate_exps", Type::Q4_K, &[EMBD, FF, EXPERTS])?;
        add("ffn_gate_inp", Type::F32, &[EMBD, EXPERTS])?;
        add("ffn_norm", Type::F32, &[EMBD])?;
        add("ffn_up_exps", Type::Q4_K, &[EMBD, FF, EXPERTS])?;
    }
    w.write_sparse(path, 0)
}

/// Writes a file with `tensors` expert tensors of 128 bytes in 97 layers.
pub fn repeated(path: &Path, tensors: u32) -> Result<()> {
    let mut w = Writer::new("qwen3moe");
    w.set("qwen3moe.block_count", Value::U32(97));
    (0..tensors).try_for_each(|i| w.tensor(&format!("blk.{}.ffn_gate_exps.{i}.weight", i % 97), Type::F32, &[32]))?;
    w.write_sparse(path, 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::Gguf;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn the_geometry_is_the_real_models_and_its_data_take_no_room() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        qwen3_30b_a3b(&path).unwrap();
        let g = Gguf::open(&path).unwrap();
        assert_eq!(g.tensors().len(), 579);
        let weights: u64 = g.tensors().iter().map(|t| t.dims.iter().product::<u64>()).sum();
        assert_eq!(weights, 30_532_122_624);
        let meta = path.metadata().unwrap();
        assert!(meta.len() > 17 << 30 && meta.blocks() * 512 < 4 << 20, "{} bytes in {} blocks", meta.len(), meta.blocks());
    }
}
