//! What stock does with the tensor of a given name.
//!
//! Owns: the table of names of llama.cpp 0.5.0: with which op a tensor is used and to which part of the model it belongs. Must not know: shapes,
//! targets.
//!
//! Mirrors `LLM_TENSOR_NAMES` and `LLM_TENSOR_INFOS` in `llama-arch.cpp`. Where two of stock's tensors share a name (the architecture decides),
//! the more common one stands here: `ssm_a` is scanned, `token_embd_norm` belongs to layer 0, `indexer_compressor_ape` is looked up.

use serde::Serialize;

/// The op a weight is used with; stock places a weight where that op can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[expect(missing_docs, reason = "ggml's names")]
pub enum Op {
    /// Not used at all: stock ignores the tensor.
    None,
    Add,
    AddId,
    Div,
    GetRows,
    Im2Col,
    Mul,
    MulMat,
    MulMatId,
    Rope,
    RwkvWkv6,
    Scale,
    SsmConv,
    SsmScan,
}

/// The part of the model that a tensor belongs to; each part has its own list of buffer types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    /// Before the first layer. Always on the CPU.
    Input,
    /// One of the layers.
    Layer,
    /// Behind the last layer.
    Output,
}

/// A name taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name<'a> {
    /// The layer, if the name has one (`blk.12.`, also `enc.blk.`, `dec.blk.`, `posnet.`, `convnext.`).
    pub layer: Option<u32>,
    /// What stands before the number of the layer, dot and all; nothing without a layer.
    pub prefix: &'static str,
    /// The name without layer and suffix, for example `ffn_up_exps`.
    pub base: &'a str,
    /// `weight`, `bias`, `scale`, `scales`, `input_scale`, `lora_a`, `lora_b`, or nothing.
    pub suffix: &'a str,
}

const SUFFIXES: [&str; 7] = ["weight", "bias", "scale", "scales", "input_scale", "lora_a", "lora_b"];
const LAYER_PREFIXES: [&str; 5] = ["blk.", "enc.blk.", "dec.blk.", "posnet.", "convnext."];

impl<'a> Name<'a> {
    /// Takes a tensor name apart. Any text will do.
    pub fn new(name: &'a str) -> Name<'a> {
        let (layer, prefix, rest) = LAYER_PREFIXES
            .iter()
            .find_map(|prefix| {
                let (number, rest) = name.strip_prefix(prefix)?.split_once('.')?;
                // As stock writes it: no sign, no leading zero.
                let canonical = number == "0" || number.starts_with(|c: char| ('1'..='9').contains(&c));
                let layer = number.parse().ok().filter(|_| canonical && number.bytes().all(|b| b.is_ascii_digit()))?;
                Some((Some(layer), *prefix, rest))
            })
            .unwrap_or((None, "", name));
        match rest.rsplit_once('.') {
            Some((base, suffix)) if SUFFIXES.contains(&suffix) => Name { layer, prefix, base, suffix },
            _ => Name { layer, prefix, base: rest, suffix: "" },
        }
    }

    /// Op and part, if stock knows the name.
    pub fn known(&self) -> Option<(Op, Part)> {
        let part = if self.layer.is_some() { Part::Layer } else { part_without_layer(self.base)? };
        let op = op_of(self.base, self.layer.is_some())?;
        Some((if self.suffix == "bias" { bias_op(op) } else { op }, part))
    }
}

/// Biases are added, whatever their weight is used with.
fn bias_op(op: Op) -> Op {
    if op == Op::MulMatId { Op::AddId } else { Op::Add }
}

fn part_without_layer(base: &str) -> Option<Part> {
    match base {
        "token_embd" | "position_embd" | "token_types" | "per_layer_token_embd" | "masked_embd_centroids" | "masked_embd_ordering" => {
            Some(Part::Input)
        }
        // Made once, for the first layer.
        "token_embd_norm"
        | "rope_freqs"
        | "rope_factors_long"
        | "rope_factors_short"
        | "per_layer_model_proj"
        | "per_layer_proj_norm"
        | "hrm.z_l_init"
        | "conv1d"
        | "nextn.pre_projection" => Some(Part::Layer),
        _ => op_of(base, false).map(|_| Part::Output),
    }
}

fn op_of(base: &str, in_layer: bool) -> Option<Op> {
    Some(if in_layer { layer_op(base)? } else { outer_op(base)? })
}

fn outer_op(base: &str) -> Option<Op> {
    Some(match base {
        "token_embd"
        | "position_embd"
        | "token_types"
        | "per_layer_token_embd"
        | "d2t"
        | "markov_w1"
        | "selector_predecessor"
        | "selector_successor" => Op::GetRows,
        "token_embd_norm"
        | "per_layer_proj_norm"
        | "output_norm"
        | "cls.norm"
        | "dec.output_norm"
        | "enc.output_norm"
        | "output_hc_scale"
        | "output_hc_norm"
        | "output_res_score" => Op::Mul,
        "output"
        | "cls"
        | "cls.output"
        | "dense_2"
        | "dense_3"
        | "output_hc_fn"
        | "output_hc_down"
        | "output_hc_up"
        | "per_layer_model_proj"
        | "altup_proj"
        | "altup_unembd_proj"
        | "nextn.pre_projection"
        | "nextn.post_projection"
        | "fc"
        | "markov_w2"
        | "conf_proj"
        | "selector_hidden" => Op::MulMat,
        "output_hc_base" | "hrm.z_l_init" => Op::Add,
        "rope_freqs" | "rope_factors_long" | "rope_factors_short" => Op::Rope,
        "conv1d" => Op::Im2Col,
        "masked_embd_centroids" | "masked_embd_ordering" => Op::None,
        _ => return None,
    })
}

fn layer_op(base: &str) -> Option<Op> {
    Some(match base {
        "ffn_gate_exps" | "ffn_up_exps" | "ffn_down_exps" | "ffn_gate_up_exps" | "ffn_gate_chexps" | "ffn_up_chexps"
        | "ffn_down_chexps" => Op::MulMatId,
        "attn_compressor_ape" | "indexer_compressor_ape" | "attn_rel_b" | "ffn_gate_tid2eid" | "nextn.embed_tokens" => Op::GetRows,
        "exp_probs_b"
        | "exp_probs_b_vl"
        | "hc_attn_base"
        | "hc_ffn_base"
        | "time_mix_lerp_w"
        | "time_mix_lerp_k"
        | "time_mix_lerp_v"
        | "time_mix_lerp_r"
        | "time_mix_lerp_g"
        | "time_mix_lerp_fused"
        | "time_mix_decay"
        | "time_mix_w0"
        | "time_mix_a0"
        | "time_mix_v0" => Op::Add,
        "ffn.act" => Op::Div,
        "attn_sinks" => Op::Scale,
        "ssm_a" => Op::SsmScan,
        "ssm_conv1d" | "shortconv.conv" | "ple_conv1d" => Op::SsmConv,
        "time_mix_first" => Op::RwkvWkv6,
        "conv1" | "conv2" | "dw" => Op::Im2Col,
        "cross_attn_rel_b" => Op::None,
        _ if is_norm(base) => Op::Mul,
        "hc_attn_scale"
        | "hc_ffn_scale"
        | "ssm_d"
        | "ssm_conv1d_q"
        | "ssm_conv1d_k"
        | "ssm_conv1d_v"
        | "attn_res_score"
        | "ffn_res_score"
        | "time_mix_lerp_x"
        | "time_mix_ln"
        | "channel_mix_lerp_k"
        | "channel_mix_lerp_r"
        | "time_mix_k_k"
        | "time_mix_k_a"
        | "time_mix_r_k"
        | "layer_output_scale"
        | "altup_correct_scale"
        | "attn_conv_base"
        | "ffn_conv_base"
        | "gamma" => Op::Mul,
        _ if MUL_MAT.binary_search(&base).is_ok() => Op::MulMat,
        _ => return None,
    })
}

/// Every norm is multiplied; their names are too many to list and follow one form.
pub(super) fn is_norm(base: &str) -> bool {
    const BASES: [&str; 7] = ["norm", "norm1", "norm2", "nextn.enorm", "nextn.hnorm", "ffn_norm_exps", "ple_norm_conv"];
    base.ends_with("_norm")
        || base.ends_with("norm_1")
        || base.ends_with("norm_2")
        || base.starts_with("ple_norm_")
        || BASES.contains(&base)
}

/// Sorted.
const MUL_MAT: &[&str] = &[
    "altup_correct_coef",
    "altup_predict_coef",
    "altup_router",
    "attn_compressor_gate",
    "attn_compressor_kv",
    "attn_conv_proj",
    "attn_gate",
    "attn_k",
    "attn_k_b",
    "attn_kv",
    "attn_kv_a_mqa",
    "attn_kv_b",
    "attn_o",
    "attn_output",
    "attn_output_a",
    "attn_output_b",
    "attn_q",
    "attn_q_a",
    "attn_q_b",
    "attn_qkv",
    "attn_v",
    "attn_v_b",
    "channel_mix_key",
    "channel_mix_receptance",
    "channel_mix_value",
    "cross_attn_k",
    "cross_attn_o",
    "cross_attn_q",
    "cross_attn_v",
    "ffn_conv_proj",
    "ffn_down",
    "ffn_down_shexp",
    "ffn_gate",
    "ffn_gate_inp",
    "ffn_gate_inp_shexp",
    "ffn_gate_shexp",
    "ffn_latent_down",
    "ffn_latent_up",
    "ffn_routed_down",
    "ffn_routed_up",
    "ffn_up",
    "ffn_up_shexp",
    "hc_attn_down",
    "hc_attn_fn",
    "hc_attn_inject",
    "hc_attn_up",
    "hc_ffn_down",
    "hc_ffn_fn",
    "hc_ffn_inject",
    "hc_ffn_up",
    "indexer.attn_k",
    "indexer.attn_q_b",
    "indexer.k_proj",
    "indexer.proj",
    "indexer.q_proj",
    "indexer_compressor_gate",
    "indexer_compressor_kv",
    "inp_gate",
    "laurel_l",
    "laurel_r",
    "nextn.eh_proj",
    "nextn.shared_head_head",
    "ple_key",
    "ple_value",
    "proj",
    "pw1",
    "pw2",
    "shortconv.in_proj",
    "shortconv.out_proj",
    "ssm_alpha",
    "ssm_ba",
    "ssm_beta",
    "ssm_dt",
    "ssm_f_a",
    "ssm_f_b",
    "ssm_g",
    "ssm_g_a",
    "ssm_g_b",
    "ssm_in",
    "ssm_out",
    "ssm_x",
    "time_mix_a1",
    "time_mix_a2",
    "time_mix_decay_w1",
    "time_mix_decay_w2",
    "time_mix_g1",
    "time_mix_g2",
    "time_mix_gate",
    "time_mix_key",
    "time_mix_output",
    "time_mix_receptance",
    "time_mix_v1",
    "time_mix_v2",
    "time_mix_value",
    "time_mix_w1",
    "time_mix_w2",
    "vis_attn_output",
    "vis_attn_qkv",
    "vis_down",
    "vis_gate",
    "vis_up",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_apart_as_stock_puts_them_together() {
        let name = |n| {
            let n = Name::new(n);
            (n.layer, n.base, n.suffix)
        };
        assert_eq!(name("blk.12.ffn_up_exps.weight"), (Some(12), "ffn_up_exps", "weight"));
        assert_eq!(name("blk.0.nextn.eh_proj.weight"), (Some(0), "nextn.eh_proj", "weight"));
        assert_eq!(name("dec.blk.3.attn_q.weight"), (Some(3), "attn_q", "weight"));
        assert_eq!(name("blk.1.ssm_a"), (Some(1), "ssm_a", ""));
        assert_eq!(name("cls.output.bias"), (None, "cls.output", "bias"));
        assert_eq!(name("blk.01.x.weight"), (None, "blk.01.x", "weight"));
        assert_eq!(name("blk.+1.x"), (None, "blk.+1.x", ""));
        assert_eq!(name("blk.99999999999.x"), (None, "blk.99999999999.x", ""));
        assert_eq!(name(""), (None, "", ""));
    }

    #[test]
    fn matrix_names_are_sorted() {
        assert!(MUL_MAT.is_sorted());
    }

    #[test]
    fn ops_and_parts_are_those_of_stock() {
        use Part::{Input, Layer, Output};
        for (name, known) in [
            ("token_embd.weight", Some((Op::GetRows, Input))),
            ("output.weight", Some((Op::MulMat, Output))),
            ("output_norm.weight", Some((Op::Mul, Output))),
            ("token_embd_norm.weight", Some((Op::Mul, Layer))),
            ("rope_freqs.weight", Some((Op::Rope, Layer))),
            ("blk.3.attn_norm.weight", Some((Op::Mul, Layer))),
            ("blk.3.post_ffw_norm_1.weight", Some((Op::Mul, Layer))),
            ("blk.3.nextn.enorm.weight", Some((Op::Mul, Layer))),
            ("blk.3.attn_q.bias", Some((Op::Add, Layer))),
            ("blk.3.ffn_up_exps.weight", Some((Op::MulMatId, Layer))),
            ("blk.3.ffn_up_exps.bias", Some((Op::AddId, Layer))),
            ("blk.3.ffn_gate_inp.weight", Some((Op::MulMat, Layer))),
            ("blk.3.exp_probs_b.bias", Some((Op::Add, Layer))),
            ("blk.3.ffn_up_shexp.weight", Some((Op::MulMat, Layer))),
            ("masked_embd_ordering.weight", Some((Op::None, Input))),
            ("dec.blk.0.cross_attn_rel_b.weight", Some((Op::None, Layer))),
            ("blk.3.ffn_up.17.weight", None),
            ("v.blk.0.attn_q.weight", None),
            ("blk.3.", None),
        ] {
            assert_eq!(Name::new(name).known(), known, "{name}");
        }
    }
}
