//! What a model's metadata says that matters to placement.
//!
//! Owns: architecture, layers, experts, and which tensors stock's loaders ask for in a special way. Must not know: rules, targets.
//!
//! Mirrors `load_hparams` in `llama-model.cpp` and the loaders in `src/models/`.

use serde::Serialize;

use super::load::Load;
use super::tensor::{Flags, Tensor};
use crate::gguf::Header;

/// Architectures that never use the embeddings a second time; all others do if there is no output matrix.
///
/// Taken from the source of 0.5.0: `create_model` in `llama-model.cpp` names the class of each architecture, and here stand those of which no
/// `load_arch_tensors` (in `src/models/*.cpp`, of the class or of the one that it inherits it from) asks for `LLM_TENSOR_TOKEN_EMBD` with
/// `TENSOR_DUPLICATED`. Some of them end without an output matrix, the others do not load without one. Sorted.
const NEVER_TIED: &[&str] = &[
    "apertus",
    "arwkv7",
    "baichuan",
    "bailingmoe",
    "bailingmoe2",
    "bert",
    "bitnet",
    "clip",
    "codeshell",
    "dbrx",
    "deepseek4",
    "dots1",
    "eagle3",
    "eurobert",
    "glm5-next",
    "gpt-oss",
    "gptneox",
    "hy_v4",
    "internlm2",
    "jais",
    "jina-bert-v2",
    "jina-bert-v3",
    "kimi-k3",
    "kimi-linear",
    "llada-moe",
    "maple",
    "mellum",
    "mimo2",
    "minimax-m2",
    "minimax-m3",
    "modern-bert",
    "muse-glimmer",
    "nemotron",
    "neo-bert",
    "nomic-bert",
    "nomic-bert-moe",
    "olmo2",
    "olmoe",
    "orion",
    "phi2",
    "phimoe",
    "plamo",
    "qwen",
    "qwen2moe",
    "rwkv6",
    "rwkv6qwen2",
    "rwkv7",
    "stablelm",
    "step35",
    "talkie",
    "wavtokenizer-dec",
    "xverse",
];

/// What stock does with the last layers that a file says predict further tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Predicting {
    /// It does not know them: it asks for none of their tensors, and refuses a file that has some.
    Unknown,
    /// It asks for them with `TENSOR_SKIP`, since it starts with `load_mtp` off.
    Skipped,
    /// The same, and a file may lack them.
    SkippedOrAbsent,
    /// They are all there is, and are loaded.
    Loaded,
}

/// As in `load_arch_tensors` of each class, 0.5.0: those that have `TENSOR_SKIP`, and the one that loops to `n_layer_nextn`.
fn predicting(architecture: &str) -> Predicting {
    match architecture {
        "bailingmoe2" | "deepseek4" | "exaone-moe" | "exaone4" | "glm4" | "glm5-next" | "nemotron_h" | "nemotron_h_moe" | "qwen35"
        | "qwen35moe" | "qwen3next" => Predicting::Skipped,
        "bailingmoe3" | "cohere2moe" | "deepseek2" | "deepseek32" | "dots3note" | "glm-dsa" | "glm4moe" | "hy_v3" | "mimo2"
        | "mistral4" | "step35" => Predicting::SkippedOrAbsent,
        "gemma4-assistant" => Predicting::Loaded,
        _ => Predicting::Unknown,
    }
}

/// What a model's metadata says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Facts {
    /// `general.architecture`.
    pub architecture: String,
    /// `general.name`.
    pub name: Option<String>,
    /// Layers, with those that predict further tokens.
    pub layers: u32,
    /// Layers as `-ngl` counts them: layers that are run several times, or that have no tensors, count too.
    pub counted_layers: u32,
    /// The last layers that predict further tokens (NextN, MTP). Stock does not load them unless it is told to speculate with them, or they are
    /// all that there is.
    pub predicting_layers: u32,
    /// How many of those the file says that there are: more than its layers are not possible.
    #[serde(skip)]
    pub(super) said_predicting: u32,
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
        let said_predicting = number("nextn_predict_layers").unwrap_or(0);
        let predicting_layers = said_predicting.min(layers);
        // What `load_arch_hparams` makes of `n_layer_all`; of all classes of 0.5.0, these two change it.
        let trunk = layers - predicting_layers;
        let counted_layers = match (architecture.as_str(), number("num_loops").unwrap_or(1)) {
            // Its layers are run several times, and each run is a layer.
            ("nanbeige", loops @ 2..) => trunk.saturating_mul(loops),
            // A last layer without tensors holds the router's keys and values.
            ("graniteswitch", _) if layers > 0 => trunk.saturating_add(1),
            _ => layers,
        };
        Facts {
            name: text("general.name"),
            layers,
            counted_layers,
            predicting_layers,
            said_predicting,
            experts: number("expert_count").unwrap_or(0),
            experts_used: number("expert_used_count").unwrap_or(0),
            tied_embeddings: false,
            architecture,
        }
    }

    /// Looks through the tensors for an output matrix, and for what the last layers would predict with.
    #[must_use]
    pub fn with_tensors(mut self, has: impl Fn(&str) -> bool) -> Facts {
        let may_tie = NEVER_TIED.binary_search(&self.architecture.as_str()).is_err();
        self.tied_embeddings = may_tie && has("token_embd.weight") && !has("output.weight");
        // `load_arch_hparams` of this class, and of no other, looks for a tensor of these layers, and without it they are like all others.
        if self.architecture == "deepseek4" && !has(&format!("blk.{}.nextn.eh_proj.weight", self.trunk())) {
            self.predicting_layers = 0;
        }
        self
    }

    /// The default circumstances for this model: [`Load::default`] with its layers and experts.
    pub fn load(&self) -> Load {
        Load { layers: self.counted_layers, experts: self.experts, experts_used: self.experts_used, ..Load::default() }
    }

    /// How stock asks for a tensor that is in the file.
    pub fn flags(&self, tensor: &Tensor<'_>) -> Flags {
        let skips = matches!(predicting(&self.architecture), Predicting::Skipped | Predicting::SkippedOrAbsent);
        let skip = skips && self.predicting_layers > 0 && tensor.layer.is_some_and(|l| l >= self.trunk());
        let read_lazy = tensor.name == "per_layer_token_embd.weight" && matches!(self.architecture.as_str(), "gemma4" | "qwen4exp");
        Flags { skip, read_lazy, ..Flags::default() }
    }

    /// Layers that do not predict further tokens.
    fn trunk(&self) -> u32 {
        self.layers - self.predicting_layers
    }

    /// The fewest layers for which stock wants tensors.
    pub(super) fn least_layers(&self) -> u32 {
        if predicting(&self.architecture) == Predicting::SkippedOrAbsent { self.trunk() } else { self.layers }
    }

    /// The layers beyond those for which stock asks, because the file says that they predict, and stock does not know that of this architecture.
    pub(super) fn unknown_predicting(&self) -> Option<std::ops::Range<u32>> {
        let unknown = predicting(&self.architecture) == Predicting::Unknown && self.predicting_layers > 0;
        unknown.then(|| self.trunk()..self.layers)
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

    /// The facts of an architecture with these numbers and tensors.
    fn facts(architecture: &str, numbers: &[(&str, u32)], tensors: &[&str]) -> Facts {
        let file = File::new(3).str("general.architecture", architecture);
        let file = numbers.iter().fold(file, |f, (key, value)| f.u32(&format!("{architecture}.{key}"), *value));
        let file = tensors.iter().fold(file, |f, name| f.tensor(name, &[32], 0));
        let header = Header::from_bytes(&file.bytes()).unwrap();
        Facts::of(&header).with_tensors(|name| header.tensor(name).is_some())
    }

    fn skips(facts: &Facts, layer: u32) -> bool {
        facts.flags(&Tensor::new(&format!("blk.{layer}.attn_q.weight"), [1; 4], GgmlType::F32, 4)).skip
    }

    #[test]
    fn embeddings_are_tied_where_stock_asks_for_them_twice() {
        assert!(NEVER_TIED.is_sorted());
        let tied = |architecture, tensors: &[&str]| facts(architecture, &[], tensors).tied_embeddings;
        for architecture in ["llama", "llama-embed", "t5encoder", "t5", "gemma4-assistant", "dflash", "qwen3", "deepseek2"] {
            assert!(tied(architecture, &["token_embd.weight"]), "{architecture}");
            assert!(!tied(architecture, &["token_embd.weight", "output.weight"]) && !tied(architecture, &[]), "{architecture}");
        }
        for architecture in ["bitnet", "eagle3", "bert", "neo-bert", "wavtokenizer-dec", "gpt-oss", "deepseek4"] {
            assert!(!tied(architecture, &["token_embd.weight"]), "{architecture}");
        }
    }

    #[test]
    fn predicting_layers_are_skipped_where_stock_skips_them() {
        let numbers = [("block_count", 4), ("nextn_predict_layers", 1)];
        for (architecture, tensors, skipped, predicting) in [
            ("glm4moe", &[][..], true, 1),
            ("exaone4", &[], true, 1),
            ("deepseek4", &["blk.3.nextn.eh_proj.weight"], true, 1),
            // Without the tensor it is a layer like all others.
            ("deepseek4", &["blk.2.nextn.eh_proj.weight"], false, 0),
            ("gemma4-assistant", &[], false, 1),
            ("llama", &[], false, 1),
        ] {
            let facts = facts(architecture, &numbers, tensors);
            assert_eq!((skips(&facts, 3), skips(&facts, 2), facts.predicting_layers), (skipped, false, predicting), "{architecture}");
            assert_eq!(facts.load().layers, 4, "{architecture}: all count for -ngl");
        }
        let all = facts("gemma4-assistant", &[("block_count", 4), ("nextn_predict_layers", 4)], &[]);
        assert!((0..4).all(|layer| !skips(&all, layer)));
    }

    #[test]
    fn layers_count_for_ngl_as_stock_counts_them() {
        for (architecture, numbers, layers, counted) in [
            ("llama", &[("num_loops", 3)][..], 4, 4),
            ("nanbeige", &[], 4, 4),
            ("nanbeige", &[("num_loops", 1)], 4, 4),
            ("nanbeige", &[("num_loops", 3)], 4, 12),
            ("nanbeige", &[("num_loops", u32::MAX)], 4, u32::MAX),
            ("graniteswitch", &[], 4, 5),
        ] {
            let facts = facts(architecture, &[&[("block_count", layers)], numbers].concat(), &[]);
            assert_eq!((facts.layers, facts.counted_layers, facts.load().layers), (layers, counted, counted), "{architecture} {numbers:?}");
        }
        assert_eq!(facts("graniteswitch", &[], &[]).counted_layers, 0);
    }

    #[test]
    fn metadata_that_is_missing_or_odd_gives_zeros_and_no_panic() {
        let header = Header::from_bytes(&File::new(3).str("general.architecture", "x").str("x.block_count", "many").bytes()).unwrap();
        assert_eq!(Facts::of(&header), Facts { architecture: "x".into(), ..Facts::default() });
        let header = Header::from_bytes(&File::new(2).bytes()).unwrap();
        assert_eq!(Facts::of(&header), Facts::default());
    }
}
