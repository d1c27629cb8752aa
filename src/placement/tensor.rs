//! A tensor as the decision sees it.
//!
//! Owns: name, part of the model, op, class, shape, format, bytes, and how the loader asks for it. Must not know: rules, targets.

use serde::Serialize;

use super::names::{Name, Op, Part, is_norm};
use crate::gguf::{GgmlType, TensorInfo};

/// What kind of weight it is, for people and for the warnings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// Embeddings and what else stands before the first layer.
    Input,
    /// Routed experts: most of a mixture-of-experts model, little used per token.
    Expert,
    /// Bias or scale of routed experts.
    ExpertSmall,
    /// Shared experts: used for every token.
    SharedExpert,
    /// What chooses the experts.
    Router,
    /// Attention and its relatives.
    Attention,
    /// Dense feed-forward weights.
    FeedForward,
    /// Normalisation.
    Norm,
    /// Biases, scales and other small vectors.
    Small,
    /// What stands behind the last layer.
    Output,
    /// Another weight of a layer.
    Layer,
    /// A name that stock does not know.
    Unknown,
}

/// How a loader asks for a tensor (`llama_model_loader::TENSOR_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// It may be missing.
    pub not_required: bool,
    /// It is used a second time, elsewhere; token embeddings then act as the output matrix.
    pub duplicated: bool,
    /// It is in the file but not wanted.
    pub skip: bool,
    /// Its rows may be read when they are needed.
    pub read_lazy: bool,
}

/// A tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor<'a> {
    /// Its full name.
    pub name: &'a str,
    /// The op it is used with.
    pub op: Op,
    /// The part of the model.
    pub part: Part,
    /// Its layer, if its name has one.
    pub layer: Option<u32>,
    /// Its kind.
    pub class: Class,
    /// Elements per dimension, fastest first.
    pub dims: [u64; 4],
    /// Its block format.
    pub ty: GgmlType,
    /// Bytes of its data.
    pub bytes: u64,
    /// Whether the file has it.
    pub found: bool,
    /// How it is asked for.
    pub flags: Flags,
}

impl<'a> Tensor<'a> {
    /// A tensor of that name and shape. Op, part and class follow from the name; for a name that stock does not know, from the shape.
    pub fn new(name: &'a str, dims: [u64; 4], ty: GgmlType, bytes: u64) -> Tensor<'a> {
        let parts = Name::new(name);
        let known = parts.known();
        let (op, part) = known.unwrap_or_else(|| guess(&parts, dims));
        let class = if known.is_some() { class(&parts, op, part) } else { Class::Unknown };
        Tensor { name, op, part, layer: parts.layer, class, dims, ty, bytes, found: true, flags: Flags::default() }
    }

    /// A tensor that is asked for and not in the file.
    pub fn missing(name: &'a str) -> Tensor<'a> {
        Tensor { found: false, ..Tensor::new(name, [1; 4], GgmlType::F32, 0) }
    }

    /// The same tensor, asked for in that way.
    #[must_use]
    pub fn with(mut self, flags: Flags) -> Tensor<'a> {
        self.flags = flags;
        if flags.duplicated && Name::new(self.name).base == "token_embd" {
            // "Tied" embeddings. The name, and so what rules see, stays.
            (self.op, self.part, self.class) = (Op::MulMat, Part::Output, Class::Output);
        }
        self
    }

    /// The layer whose device it follows: what belongs to all layers is made for the first.
    pub(super) fn list_layer(&self) -> u32 {
        self.layer.unwrap_or(0)
    }
}

impl<'a> From<TensorInfo<'a>> for Tensor<'a> {
    fn from(info: TensorInfo<'a>) -> Tensor<'a> {
        Tensor::new(info.name, info.dims, info.ty, info.bytes)
    }
}

fn guess(name: &Name<'_>, dims: [u64; 4]) -> (Op, Part) {
    let op = match (name.suffix, dims) {
        ("bias", _) => Op::Add,
        (_, [_, 1, 1, 1]) => Op::Mul,
        (_, [_, _, 1, 1]) => Op::MulMat,
        _ => Op::MulMatId,
    };
    (op, if name.layer.is_some() { Part::Layer } else { Part::Input })
}

fn class(name: &Name<'_>, op: Op, part: Part) -> Class {
    let base = name.base;
    let small = matches!(name.suffix, "bias" | "scale" | "scales" | "input_scale");
    match part {
        _ if base.ends_with("exps") && !is_norm(base) => {
            if small {
                Class::ExpertSmall
            } else {
                Class::Expert
            }
        }
        _ if matches!(base, "ffn_gate_inp" | "exp_probs_b" | "exp_probs_b_vl" | "ffn_gate_tid2eid" | "altup_router") => Class::Router,
        _ if is_norm(base) || base == "output_hc_norm" => Class::Norm,
        Part::Input => Class::Input,
        Part::Output => {
            if small {
                Class::Small
            } else {
                Class::Output
            }
        }
        Part::Layer if small || matches!(op, Op::Add | Op::Mul | Op::Div | Op::Scale | Op::Rope) => Class::Small,
        Part::Layer if base.ends_with("shexp") => Class::SharedExpert,
        Part::Layer if base.contains("attn") => Class::Attention,
        Part::Layer if base.starts_with("ffn_") => Class::FeedForward,
        Part::Layer => Class::Layer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class_of(name: &str) -> Class {
        Tensor::new(name, [4, 4, 1, 1], GgmlType::F32, 64).class
    }

    #[test]
    fn class_tells_experts_router_norms_and_biases_apart() {
        for (name, class) in [
            ("token_embd.weight", Class::Input),
            ("output.weight", Class::Output),
            ("output_norm.weight", Class::Norm),
            ("blk.0.ffn_gate_up_exps.weight", Class::Expert),
            ("blk.0.ffn_down_chexps.weight", Class::Expert),
            ("blk.0.ffn_down_exps.bias", Class::ExpertSmall),
            ("blk.0.ffn_down_exps.scale", Class::ExpertSmall),
            ("blk.0.ffn_norm_exps.weight", Class::Norm),
            ("blk.0.ffn_down_shexp.weight", Class::SharedExpert),
            ("blk.0.ffn_gate_inp.weight", Class::Router),
            ("blk.0.exp_probs_b.bias", Class::Router),
            ("blk.0.attn_q.weight", Class::Attention),
            ("blk.0.attn_q.bias", Class::Small),
            ("blk.0.attn_norm.weight", Class::Norm),
            ("blk.0.ffn_up.weight", Class::FeedForward),
            ("blk.0.ssm_in.weight", Class::Layer),
            ("rope_freqs.weight", Class::Small),
            ("model.layers.0.mlp", Class::Unknown),
        ] {
            assert_eq!(class_of(name), class, "{name}");
        }
    }

    #[test]
    fn tied_embeddings_act_as_output_but_keep_their_name() {
        let t = Tensor::new("token_embd.weight", [64, 100, 1, 1], GgmlType::F16, 12800);
        assert_eq!((t.op, t.part), (Op::GetRows, Part::Input));
        let t = t.with(Flags { duplicated: true, ..Flags::default() });
        assert_eq!((t.op, t.part, t.name), (Op::MulMat, Part::Output, "token_embd.weight"));
    }

    #[test]
    fn unknown_name_is_judged_by_its_shape() {
        let op = |dims| Tensor::new("blk.1.strange", dims, GgmlType::F32, 4).op;
        assert_eq!((op([8, 1, 1, 1]), op([8, 8, 1, 1]), op([8, 8, 8, 1])), (Op::Mul, Op::MulMat, Op::MulMatId));
        assert_eq!(Tensor::new("strange", [8, 8, 1, 1], GgmlType::F32, 256).part, Part::Input);
    }
}
