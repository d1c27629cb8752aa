//! A mixture-of-experts model with random weights and a byte vocabulary: any size, any block format, written at the speed of a disk.

use std::io::{Read, Write};

use anyhow::{Result, ensure};

use super::blocks;
use super::rng::Rng;
use crate::gguf::{Array, Type, Value, Writer};

/// Changed when the same description gives other bytes.
pub(super) const RECIPE: &str = "random 2";

/// The model architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// `qwen3moe`: separate gate and up experts. Every host knows it.
    Qwen3Moe,
    /// `hy_v3`: gate and up merged in one tensor, a sigmoid router, a shared expert. Known since ggml 0.25.
    HyV3,
}

/// What the model is like. The default is a few MB: two layers, eight experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// The architecture.
    pub family: Family,
    /// Blocks.
    pub layers: u32,
    /// Model width.
    pub embd: u64,
    /// Hidden width of an expert.
    pub ff: u64,
    /// Experts of a block.
    pub experts: u64,
    /// Experts chosen for a token.
    pub used: u32,
    /// Tokens; at least 257.
    pub vocab: u64,
    /// Format of the gate and up experts.
    pub ty: Type,
    /// Format of the down experts, if another.
    pub down: Option<Type>,
    /// Format of attention, embeddings and output.
    pub dense: Type,
    /// Seed of the weights.
    pub seed: u64,
}

impl Default for Spec {
    fn default() -> Self {
        Spec {
            family: Family::Qwen3Moe,
            layers: 2,
            embd: 256,
            ff: 256,
            experts: 8,
            used: 2,
            vocab: 512,
            ty: Type::Q4_K,
            down: None,
            dense: Type::Q8_0,
            seed: 1,
        }
    }
}

const HEADS: u64 = 8;
const KV_HEADS: u64 = 2;
const HEAD: u64 = 64;

impl Spec {
    /// 1.2 GiB of experts in Q8_0, which the stock CPU backend does not repack on x86-64: stock maps them.
    pub const LARGE: Spec = Spec {
        layers: 6,
        embd: 1024,
        ff: 1024,
        experts: 64,
        used: 4,
        ty: Type::Q8_0,
        family: Family::Qwen3Moe,
        vocab: 512,
        down: None,
        dense: Type::Q8_0,
        seed: 2,
    };

    /// Bytes of all experts.
    pub fn expert_bytes(&self) -> Result<u64> {
        let gate_and_up = 2 * self.ty.bytes(&[self.embd, self.ff, self.experts])?;
        let down = self.down.unwrap_or(self.ty).bytes(&[self.ff, self.embd, self.experts])?;
        Ok(u64::from(self.layers) * (gate_and_up + down))
    }

    fn architecture(&self) -> &'static str {
        match self.family {
            Family::Qwen3Moe => "qwen3moe",
            Family::HyV3 => "hy_v3",
        }
    }

    /// Every tensor: name, format, dimensions (the contiguous one first), and the standard deviation of its weights (`None`: all ones).
    fn tensors(&self) -> Vec<(String, Type, Vec<u64>, Option<f32>)> {
        let Spec { embd: e, ff: f, experts: x, vocab: v, ty, dense, .. } = *self;
        let down = self.down.unwrap_or(ty);
        // Weights of this spread keep the size of what flows through a matrix with rows of n.
        let keep = |n: u64| Some((n as f32).powf(-0.5));
        let mut plan = vec![
            ("output_norm.weight".to_owned(), Type::F32, vec![e], None),
            ("token_embd.weight".into(), dense, vec![e, v], Some(1.0)),
            ("output.weight".into(), dense, vec![e, v], keep(e)),
        ];
        for i in 0..self.layers {
            let mut add = |name: &str, ty, dims, std| plan.push((format!("blk.{i}.{name}.weight"), ty, dims, std));
            add("attn_norm", Type::F32, vec![e], None);
            add("attn_q", dense, vec![e, HEADS * HEAD], keep(e));
            add("attn_k", dense, vec![e, KV_HEADS * HEAD], keep(e));
            add("attn_v", dense, vec![e, KV_HEADS * HEAD], keep(e));
            add("attn_q_norm", Type::F32, vec![HEAD], None);
            add("attn_k_norm", Type::F32, vec![HEAD], None);
            add("attn_output", dense, vec![HEADS * HEAD, e], keep(HEADS * HEAD));
            add("ffn_norm", Type::F32, vec![e], None);
            add("ffn_gate_inp", Type::F32, vec![e, x], keep(e));
            match self.family {
                Family::Qwen3Moe => {
                    add("ffn_gate_exps", ty, vec![e, f, x], keep(e));
                    add("ffn_up_exps", ty, vec![e, f, x], keep(e));
                }
                Family::HyV3 => {
                    add("ffn_gate_up_exps", ty, vec![e, 2 * f, x], keep(e));
                    add("ffn_gate_shexp", dense, vec![e, f], keep(e));
                    add("ffn_up_shexp", dense, vec![e, f], keep(e));
                    add("ffn_down_shexp", dense, vec![f, e], keep(f));
                }
            }
            add("ffn_down_exps", down, vec![f, e, x], keep(f));
        }
        plan
    }
}

/// Writes the model.
pub(super) fn write(spec: &Spec, out: &mut impl Write) -> Result<()> {
    ensure!(u64::from(spec.used) <= spec.experts && spec.used > 0, "{} of {} experts used", spec.used, spec.experts);
    ensure!(spec.vocab > 256, "a vocabulary of {} has no room for 256 bytes and an end of text", spec.vocab);
    let arch = spec.architecture();
    let mut w = Writer::new(arch);
    w.set("general.name", Value::String("random-weights".into()));
    let number = |n: u64| Value::U32(n as u32);
    for (key, value) in [
        ("block_count", Value::U32(spec.layers)),
        ("context_length", Value::U32(32768)),
        ("embedding_length", number(spec.embd)),
        ("feed_forward_length", number(spec.ff)),
        ("attention.head_count", number(HEADS)),
        ("attention.head_count_kv", number(KV_HEADS)),
        ("attention.key_length", number(HEAD)),
        ("attention.value_length", number(HEAD)),
        ("rope.freq_base", Value::F32(1e6)),
        ("attention.layer_norm_rms_epsilon", Value::F32(1e-6)),
        ("expert_count", number(spec.experts)),
        ("expert_used_count", Value::U32(spec.used)),
        ("expert_feed_forward_length", number(spec.ff)),
    ] {
        w.set(&format!("{arch}.{key}"), value);
    }
    if spec.family == Family::HyV3 {
        w.set("hy_v3.expert_shared_feed_forward_length", number(spec.ff));
        w.set("hy_v3.expert_weights_norm", Value::Bool(true));
    }
    vocabulary(&mut w, spec.vocab);

    let plan = spec.tensors();
    for (name, ty, dims, _) in &plan {
        w.tensor(name, *ty, dims)?;
    }
    let mut rng = Rng::new(spec.seed);
    w.write(out, |i, info, out| match plan[i].3 {
        Some(std) if info.name == "output.weight" => {
            // A row of zeros is a logit of zero, which is never the largest: greedy text is one printable character for each token. (Servers
            // refuse to answer with half characters, and a terminal should not get control bytes.)
            let row = info.bytes / spec.vocab;
            let zeros = |rows: u64, out: &mut _| write_zeros(rows * row, out);
            let printable = PRINTABLE.end - PRINTABLE.start;
            zeros(PRINTABLE.start, out)?;
            blocks::write(&mut rng, info.ty, printable * row, std, out)?;
            zeros(spec.vocab - PRINTABLE.end, out)
        }
        Some(std) => blocks::write(&mut rng, info.ty, info.bytes, std, out),
        None => Ok((0..info.dims[0]).try_for_each(|_| out.write_all(&1f32.to_le_bytes()))?),
    })
}

/// The tokens that are printable ASCII: a token's number is its byte.
const PRINTABLE: std::ops::Range<u64> = 0x20..0x7f;

fn write_zeros(bytes: u64, out: &mut impl Write) -> Result<()> {
    std::io::copy(&mut std::io::repeat(0).take(bytes), out)?;
    Ok(())
}

/// GPT-2's byte vocabulary: a printable character for each of 256 bytes, an end of text, and padding up to `size`.
fn vocabulary(w: &mut Writer, size: u64) {
    const NORMAL: i32 = 1;
    const CONTROL: i32 = 3;
    const UNUSED: i32 = 5;
    let mut tokens: Vec<String> = byte_symbols().iter().map(char::to_string).collect();
    let merge = format!("{} {}", tokens[usize::from(b't')], tokens[usize::from(b'h')]);
    let mut types = vec![NORMAL; 256];
    tokens.push("<|endoftext|>".into());
    types.push(CONTROL);
    tokens.extend((257..size).map(|i| format!("<pad{i}>")));
    types.resize(size as usize, UNUSED);
    w.set("tokenizer.ggml.model", Value::String("gpt2".into()));
    w.set("tokenizer.ggml.pre", Value::String("gpt-2".into()));
    w.set("tokenizer.ggml.tokens", Value::Array(Array::String(tokens)));
    w.set("tokenizer.ggml.token_type", Value::Array(Array::I32(types)));
    w.set("tokenizer.ggml.merges", Value::Array(Array::String(vec![merge])));
    w.set("tokenizer.ggml.bos_token_id", Value::U32(256));
    w.set("tokenizer.ggml.eos_token_id", Value::U32(256));
    w.set("tokenizer.ggml.add_bos_token", Value::Bool(false));
}

/// The character that stands for each byte: itself where it is printable, else the next one from U+0100 on.
fn byte_symbols() -> Vec<char> {
    let printable = |b: u32| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut others = 0x100..;
    let code = |b: u32| if printable(b) { Some(b) } else { others.next() };
    (0..256).filter_map(code).filter_map(char::from_u32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::Gguf;

    fn file(spec: &Spec) -> Result<(tempfile::NamedTempFile, Gguf)> {
        let file = tempfile::NamedTempFile::new()?;
        super::super::random_to(spec, file.path())?;
        let gguf = Gguf::open(file.path())?;
        Ok((file, gguf))
    }

    #[test]
    fn the_byte_symbols_are_those_of_gpt_2() {
        let s = byte_symbols();
        assert_eq!((s.len(), s[0], s[32], s[usize::from(b'A')], s[0x7f], s[0xad], s[0xff]), (256, 'Ā', 'Ġ', 'A', 'ġ', 'Ń', 'ÿ'));
    }

    #[test]
    fn every_format_makes_a_file_that_reads_back() {
        for ty in Type::all() {
            let spec = Spec { ty, layers: 1, experts: 3, ..Spec::default() };
            let (_keep, g) = file(&spec).unwrap();
            let gate = g.tensors().iter().find(|t| t.name == "blk.0.ffn_gate_exps.weight").unwrap();
            assert_eq!((gate.ty, gate.dims.as_slice()), (ty, [256, 256, 3].as_slice()));
            let experts: u64 = g.tensors().iter().filter(|t| t.name.contains("_exps")).map(|t| t.bytes).sum();
            assert_eq!(experts, spec.expert_bytes().unwrap(), "{ty}");
        }
    }

    #[test]
    fn merged_experts_take_as_many_bytes_as_separate_ones() {
        let spec = Spec { family: Family::HyV3, down: Some(Type::Q6_K), ..Spec::default() };
        let (_keep, g) = file(&spec).unwrap();
        let experts: u64 = g.tensors().iter().filter(|t| t.name.contains("_exps")).map(|t| t.bytes).sum();
        assert_eq!(experts, spec.expert_bytes().unwrap());
        assert_eq!(g.string("general.architecture"), Some("hy_v3"));
    }

    #[test]
    fn nonsense_is_refused() {
        for spec in [
            Spec { used: 9, ..Spec::default() },
            Spec { used: 0, ..Spec::default() },
            Spec { vocab: 256, ..Spec::default() },
            Spec { embd: 250, ..Spec::default() },
        ] {
            assert!(file(&spec).is_err(), "{spec:?}");
        }
    }
}
