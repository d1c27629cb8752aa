//! What a model's metadata says that matters to placement.
//!
//! Owns: architecture, layers, experts, and which tensors stock's loaders ask for in a special way. Must not know: rules, targets.
//!
//! Mirrors `load_hparams` in `llama-model.cpp` and the loaders in `src/models/`.

use serde::Serialize;

use super::load::Load;
use super::tensor::{Flags, Tensor};
use crate::gguf::Header;

/// Architectures whose models end without an output matrix; all others use the embeddings a second time if there is none.
const WITHOUT_OUTPUT: [&str; 12] = [
    "bert",
    "clip",
    "eurobert",
    "jina-bert-v2",
    "jina-bert-v3",
    "llama-embed",
    "modern-bert",
    "neo-bert",
    "nomic-bert",
    "nomic-bert-moe",
    "t5encoder",
    "wavtokenizer-dec",
];

/// What a model's metadata says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Facts {
    /// `general.architecture`.
    pub architecture: String,
    /// `general.name`.
    pub name: Option<String>,
    /// Layers, with those that predict further tokens.
    pub layers: u32,
    /// The last layers that predict further tokens (NextN, MTP). Stock does not load them unless it is told to speculate with them.
    pub predicting_layers: u32,
    /// Experts per layer; 0 if there are none.
    pub experts: u32,
    /// Experts used per token.
    pub experts_used: u32,
    /// Whether the embeddings are used a second time, as the output matrix.
    pub tied_embeddings: bool,
}

impl Facts {
    /// Reads the facts off a header; of a split model, the first part's.
    pub fn of(header: &Header) -> Facts {
        let text = |key: &str| header.str(key).map(str::to_owned);
        let architecture = text("general.architecture").unwrap_or_default();
        let number = |key: &str| {
            let value = header.value(&format!("{architecture}.{key}"))?;
            // Some models give a number per layer.
            let most = || value.as_array()?.iter()?.filter_map(|v| v.as_u64()).max();
            u32::try_from(value.as_u64().or_else(most)?).ok()
        };
        let layers = number("block_count").unwrap_or(0);
        Facts {
            name: text("general.name"),
            layers,
            predicting_layers: number("nextn_predict_layers").unwrap_or(0).min(layers),
            experts: number("expert_count").unwrap_or(0),
            experts_used: number("expert_used_count").unwrap_or(0),
            tied_embeddings: false,
            architecture,
        }
    }

    /// Looks through the tensors for an output matrix.
    #[must_use]
    pub fn with_tensors(mut self, has: impl Fn(&str) -> bool) -> Facts {
        let ends_with_output = !WITHOUT_OUTPUT.contains(&self.architecture.as_str());
        self.tied_embeddings = ends_with_output && has("token_embd.weight") && !has("output.weight");
        self
    }

    /// The default circumstances for this model: [`Load::default`] with its layers and experts.
    pub fn load(&self) -> Load {
        Load { layers: self.layers, experts: self.experts, experts_used: self.experts_used, ..Load::default() }
    }

    /// How stock asks for a tensor that is in the file.
    pub fn flags(&self, tensor: &Tensor<'_>) -> Flags {
        let trunk = self.layers - self.predicting_layers;
        let skip = self.predicting_layers > 0 && tensor.layer.is_some_and(|l| l >= trunk);
        let read_lazy = tensor.name == "per_layer_token_embd.weight" && matches!(self.architecture.as_str(), "gemma4" | "qwen4exp");
        Flags { skip, read_lazy, ..Flags::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::testing::File;
    use crate::gguf::{GgmlType, Header};

    #[test]
    fn facts_are_read_off_the_metadata_of_the_own_architecture() {
        let used = [&4u32.to_le_bytes()[..], &3u64.to_le_bytes(), &2u32.to_le_bytes(), &6u32.to_le_bytes(), &4u32.to_le_bytes()].concat();
        let file = File::new(3)
            .str("general.architecture", "glm4moe")
            .str("general.name", "Tiny")
            .u32("glm4moe.block_count", 4)
            .u32("llama.block_count", 99)
            .u32("glm4moe.nextn_predict_layers", 1)
            .u32("glm4moe.expert_count", 16)
            .pair("glm4moe.expert_used_count", 9, &used)
            .tensor("token_embd.weight", &[32], 0);
        let header = Header::from_bytes(&file.bytes()).unwrap();
        let facts = Facts::of(&header).with_tensors(|name| header.tensor(name).is_some());
        assert_eq!((facts.layers, facts.predicting_layers, facts.experts, facts.experts_used), (4, 1, 16, 6));
        assert!(facts.tied_embeddings);
        let skip = |name| facts.flags(&Tensor::new(name, [1; 4], GgmlType::F32, 4)).skip;
        assert!(skip("blk.3.attn_q.weight") && !skip("blk.2.attn_q.weight") && !skip("token_embd.weight"));
        assert_eq!((facts.load().layers, facts.load().experts), (4, 16));
    }

    #[test]
    fn metadata_that_is_missing_or_odd_gives_zeros_and_no_panic() {
        let header = Header::from_bytes(&File::new(3).str("general.architecture", "x").str("x.block_count", "many").bytes()).unwrap();
        assert_eq!(Facts::of(&header), Facts { architecture: "x".into(), ..Facts::default() });
        let header = Header::from_bytes(&File::new(2).bytes()).unwrap();
        assert_eq!(Facts::of(&header), Facts::default());
    }
}
