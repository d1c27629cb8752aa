//! The circumstances of a load: what a decision depends on beside the tensor and the rules.
//!
//! Owns: mmap, devices and which layers go to them, repacking, thresholds. Must not know: where these facts come from.
//!
//! Mirrors `llama_model_base::load_tensors`, `make_cpu_buft_list` and `make_gpu_buft_list` in `llama-model.cpp`.

use std::sync::Arc;

use super::names::Op;
use super::tensor::{Class, Tensor};
use crate::gguf::GgmlType;

/// Batches of at least this many tokens are computed on a GPU even if the weights are in host memory (`GGML_OP_OFFLOAD_MIN_BATCH`).
pub const OFFLOAD_MIN_BATCH: u32 = 32;

/// A tensor that may be read lazily is so, by default, above this size.
const LAZY_BYTES: u64 = 4 << 30;

/// Whether Berth's compute device multiplies with experts of this format.
pub(crate) fn is_computed(ty: GgmlType) -> bool {
    matches!(ty.0, 0..=3 | 6..=8 | 10..=14 | 20 | 23 | 30 | 39)
}

/// Whether a weight is a matrix per expert. (Stock asks about the scales of experts with the same op; those are one row.)
fn is_expert_matrix(tensor: &Tensor<'_>) -> bool {
    let matrices = tensor.dims[1] > 1 || tensor.dims[2] > 1;
    tensor.class == Class::Expert && tensor.op == Op::MulMatId && matrices
}

/// Whether Berth's compute device takes a weight of that name and shape by itself, if `BERTH_AUTO` is set and it computes the format. Other weights
/// are multiplied per token too (the adapters of `graniteswitch`), and are not experts.
pub fn takes_by_itself(name: &str, dims: [u64; 4]) -> bool {
    is_expert_matrix(&Tensor::new(name, dims, GgmlType::F32, 0))
}

/// A GPU that layers may go to.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// Name of its buffer type, for example `CUDA0`.
    pub name: Arc<str>,
    /// Name of its page-locked host type, for example `CUDA_Host`, if it has one.
    pub host_type: Option<Arc<str>>,
    /// Its share of the layers: free memory, or what `--tensor-split` says.
    pub share: f32,
    /// What it cannot compute, as op and format of the weight.
    pub unsupported: Vec<(Op, GgmlType)>,
}

impl Device {
    /// A device that computes everything.
    pub fn new(name: &str, host_type: Option<&str>, share: f32) -> Device {
        Device { name: name.into(), host_type: host_type.map(Into::into), share, unsupported: Vec::new() }
    }

    pub(super) fn supports(&self, op: Op, ty: GgmlType) -> bool {
        !self.unsupported.contains(&(op, ty))
    }
}

/// Whether stock's CPU backend may hold weights in an interleaved copy of its own (`CPU_REPACK`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Repack {
    /// `--no-repack`, or a build without it.
    #[default]
    Off,
    /// x86 with AVX2.
    Avx2,
    /// x86 with AVX-512.
    Avx512,
}

/// `--lazy-mode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LazyMode {
    /// Never.
    Off,
    /// Above 4 GiB.
    #[default]
    Auto,
    /// Always.
    On,
}

/// The circumstances of a load.
#[derive(Clone, Debug)]
pub struct Load {
    /// Whether the file is mapped.
    pub mmap: bool,
    /// GPUs in stock's order.
    pub devices: Vec<Device>,
    /// Whether the devices' shares are only assumed: nobody gave them, and how much memory they have is not known.
    pub assumed_shares: bool,
    /// `-ngl`: how many layers, counted from the last, and the output behind them go to the devices. `None`: all.
    pub gpu_layers: Option<u32>,
    /// Layers of the model.
    pub layers: u32,
    /// Whether stock may repack.
    pub repack: Repack,
    /// `--no-host`: stock does not consider a device's host type.
    pub no_host: bool,
    /// `--lazy-mode`.
    pub lazy: LazyMode,
    /// `BERTH_AUTO`: Berth's compute device takes experts that would go to the CPU.
    pub auto_experts: bool,
    /// Batches of at least this many tokens are computed on a GPU. `None`: `--no-op-offload`.
    pub offload_min_batch: Option<u32>,
    /// Experts per layer; 0 if it is no mixture of experts.
    pub experts: u32,
    /// Experts used per token.
    pub experts_used: u32,
}

impl Default for Load {
    /// As stock starts without options on a machine without a GPU.
    fn default() -> Load {
        Load {
            mmap: true,
            devices: Vec::new(),
            assumed_shares: false,
            gpu_layers: None,
            layers: 0,
            repack: Repack::Off,
            no_host: false,
            lazy: LazyMode::Auto,
            auto_experts: false,
            offload_min_batch: Some(OFFLOAD_MIN_BATCH),
            experts: 0,
            experts_used: 0,
        }
    }
}

/// When large batches over host weights are computed on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offload {
    /// Tokens per batch from which stock does so.
    pub min_batch: u32,
    /// Hint: with fewer tokens than this, an expert sees fewer rows on average than the threshold of a dense weight. `32 * n_expert / n_used`.
    pub expert_hint: Option<u32>,
}

impl Load {
    /// Checks that it is known which layers go to devices, if any do.
    ///
    /// # Errors
    /// A sentence without a full stop.
    pub fn check_layers(&self) -> Result<(), String> {
        if self.layers > 0 || self.devices.is_empty() || self.gpu_layers == Some(0) {
            return Ok(());
        }
        Err("layers is 0, so which layers go to the devices is not known: set layers to those of the model, or gpu_layers to 0".to_owned())
    }

    /// The device of a layer, as an index; `None` is the CPU. Layer [`Load::layers`] is the output.
    pub fn device_of_layer(&self, layer: u32) -> Option<usize> {
        // Stock's arithmetic, in 64 bits so that no number of layers overflows.
        let (layer, layers) = (i64::from(layer), i64::from(self.layers));
        let gpu_layers = self.gpu_layers.map_or(layers + 1, i64::from);
        let start = (layers + 1 - gpu_layers).max(0);
        let active = if self.devices.is_empty() { 0 } else { gpu_layers.min(layers + 1) };
        if layer < start || layer - start >= active {
            return None;
        }
        let at = (layer - start) as f32 / active as f32;
        let total: f32 = self.devices.iter().map(|d| d.share).sum();
        let even = total.is_nan() || total <= 0.0;
        let mut end = 0.0;
        let position = self.devices.iter().position(|d| {
            end += if even { 1.0 / self.devices.len() as f32 } else { d.share };
            at < if even { end } else { end / total }
        });
        // Rounding may leave the last border below 1.
        Some(position.unwrap_or(self.devices.len() - 1))
    }

    /// Whether this tensor is read lazily: stock decides that before it looks at any rule.
    pub(super) fn is_lazy(&self, tensor: &Tensor<'_>) -> bool {
        tensor.flags.read_lazy
            && match self.lazy {
                LazyMode::Off => false,
                LazyMode::Auto => tensor.bytes > LAZY_BYTES,
                LazyMode::On => true,
            }
    }

    /// Whether stock's CPU backend would take this weight into `CPU_REPACK` (`ggml_repack_get_optimal_repack_type` in `repack.cpp`).
    pub(super) fn may_repack(&self, tensor: &Tensor<'_>) -> bool {
        let dims = 4 - tensor.dims.iter().rev().take_while(|&&d| d == 1).count();
        let used = matches!((tensor.op, dims), (Op::MulMat, 2) | (Op::MulMatId, 3));
        let format = match self.repack {
            Repack::Off => false,
            Repack::Avx2 => matches!(tensor.ty, GgmlType::Q4_0 | GgmlType::Q4_K | GgmlType::IQ4_NL | GgmlType::MXFP4),
            Repack::Avx512 => {
                matches!(tensor.ty, GgmlType::Q4_0 | GgmlType::Q4_K | GgmlType::Q2_K | GgmlType::IQ4_NL | GgmlType::MXFP4)
            }
        };
        used && format && tensor.dims[1].is_multiple_of(8)
    }

    /// Whether Berth's compute device is asked first for this weight and takes it: a matrix per expert, in a format that it computes.
    pub(super) fn takes_for_berth(&self, tensor: &Tensor<'_>) -> bool {
        self.auto_experts && is_expert_matrix(tensor) && is_computed(tensor.ty)
    }

    /// When large batches over a host weight are computed on a GPU; `None` if never.
    pub fn offload(&self, tensor: &Tensor<'_>) -> Option<Offload> {
        let min_batch = self.offload_min_batch.filter(|_| !self.devices.is_empty())?;
        let is_expert = tensor.class == Class::Expert && self.experts_used > 0;
        let hint = u64::from(OFFLOAD_MIN_BATCH) * u64::from(self.experts) / u64::from(self.experts_used.max(1));
        Some(Offload { min_batch, expert_hint: is_expert.then(|| u32::try_from(hint).unwrap_or(u32::MAX)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(layers: u32, gpu_layers: Option<u32>, shares: &[f32]) -> Load {
        let devices = shares.iter().enumerate().map(|(i, &s)| Device::new(&format!("CUDA{i}"), Some("CUDA_Host"), s)).collect();
        Load { layers, gpu_layers, devices, ..Load::default() }
    }

    fn devices(load: &Load) -> Vec<Option<usize>> {
        (0..=load.layers).map(|l| load.device_of_layer(l)).collect()
    }

    #[test]
    fn last_layers_and_the_output_go_to_the_gpu_first() {
        assert_eq!(devices(&load(4, Some(0), &[1.0])), [None; 5]);
        assert_eq!(devices(&load(4, Some(1), &[1.0])), [None, None, None, None, Some(0)]);
        assert_eq!(devices(&load(4, Some(3), &[1.0])), [None, None, Some(0), Some(0), Some(0)]);
        assert_eq!(devices(&load(4, Some(99), &[1.0])), [Some(0); 5]);
        assert_eq!(devices(&load(4, None, &[1.0])), [Some(0); 5]);
        assert_eq!(devices(&load(4, None, &[])), [None; 5]);
    }

    #[test]
    fn layers_are_shared_among_devices_by_their_share() {
        assert_eq!(devices(&load(3, None, &[1.0, 1.0])), [Some(0), Some(0), Some(1), Some(1)]);
        assert_eq!(devices(&load(3, None, &[3.0, 1.0])), [Some(0), Some(0), Some(0), Some(1)]);
        assert_eq!(devices(&load(3, None, &[0.0, 1.0])), [Some(1); 4]);
        assert_eq!(devices(&load(3, None, &[0.0, 0.0])), [Some(0), Some(0), Some(1), Some(1)]);
        assert_eq!(devices(&load(3, None, &[f32::NAN, 1.0])).len(), 4);
        load(u32::MAX, Some(u32::MAX), &[1.0]).device_of_layer(u32::MAX);
    }

    #[test]
    fn repacking_depends_on_format_rows_op_and_cpu() {
        let t = |name, dims, ty| Tensor::new(name, dims, ty, 1);
        let may = |repack, tensor| Load { repack, ..Load::default() }.may_repack(&tensor);
        let expert = t("blk.0.ffn_up_exps.weight", [256, 8, 4, 1], GgmlType::Q4_K);
        assert!(may(Repack::Avx2, expert) && !may(Repack::Off, expert));
        assert!(may(Repack::Avx2, t("blk.0.attn_q.weight", [32, 16, 1, 1], GgmlType::Q4_0)));
        assert!(!may(Repack::Avx2, t("blk.0.attn_q.weight", [32, 12, 1, 1], GgmlType::Q4_0)));
        assert!(!may(Repack::Avx512, t("blk.0.attn_q.weight", [256, 8, 1, 1], GgmlType::Q6_K)));
        assert!(!may(Repack::Avx2, t("blk.0.attn_q.weight", [256, 8, 1, 1], GgmlType::Q2_K)));
        assert!(may(Repack::Avx512, t("blk.0.attn_q.weight", [256, 8, 1, 1], GgmlType::Q2_K)));
        assert!(!may(Repack::Avx2, t("token_embd.weight", [256, 8, 1, 1], GgmlType::Q4_K)));
    }

    #[test]
    fn the_device_takes_matrices_of_experts_in_formats_it_computes_and_not_their_scales() {
        let l = Load { auto_experts: true, ..Load::default() };
        let takes = |name, dims, ty| l.takes_for_berth(&Tensor::new(name, dims, ty, 1));
        assert!(takes("blk.0.ffn_up_exps.weight", [256, 8, 4, 1], GgmlType::Q4_K));
        assert!(takes("blk.0.ffn_up_exps.weight", [256, 8, 1, 1], GgmlType::Q4_K), "one expert");
        assert!(!takes("blk.0.ffn_up_exps.weight", [256, 8, 4, 1], GgmlType(16)), "iq2_xxs");
        assert!(!takes("blk.0.ffn_up_exps.scale", [4, 1, 1, 1], GgmlType::F32));
        assert!(!takes("blk.0.ffn_up_exps.input_scale", [4, 1, 1, 1], GgmlType::F32));
        assert!(!takes("blk.0.ffn_up_exps.bias", [8, 4, 1, 1], GgmlType::F32));
    }

    #[test]
    fn offload_threshold_comes_with_the_hint_for_experts() {
        let mut l = load(4, Some(99), &[1.0]);
        (l.experts, l.experts_used) = (128, 8);
        let expert = Tensor::new("blk.0.ffn_up_exps.weight", [256, 8, 128, 1], GgmlType::Q4_K, 1);
        let dense = Tensor::new("blk.0.ffn_up.weight", [256, 8, 1, 1], GgmlType::Q4_K, 1);
        assert_eq!(l.offload(&expert), Some(Offload { min_batch: 32, expert_hint: Some(512) }));
        assert_eq!(l.offload(&dense), Some(Offload { min_batch: 32, expert_hint: None }));
        l.offload_min_batch = Some(64);
        assert_eq!(l.offload(&dense).unwrap().min_batch, 64);
        l.offload_min_batch = None;
        assert_eq!(l.offload(&expert), None);
        assert_eq!(load(4, None, &[]).offload(&expert), None);
    }

    #[test]
    fn the_device_takes_experts_by_itself_and_no_other_weight_that_is_chosen_per_token() {
        for (name, dims, takes) in [
            ("blk.0.ffn_up_exps.weight", [64, 32, 8, 1], true),
            ("blk.0.ffn_gate_up_exps.weight", [64, 32, 1, 1], true),
            ("blk.0.ffn_down_chexps.weight", [64, 32, 8, 1], true),
            // One value for each expert.
            ("blk.0.ffn_up_exps.weight", [64, 1, 1, 1], false),
            ("blk.0.ffn_up_exps.scale", [8, 1, 1, 1], false),
            ("blk.0.ffn_up_exps.bias", [64, 8, 1, 1], false),
            // The adapters of a switch.
            ("blk.0.ffn_up.lora_a", [64, 8, 3, 1], false),
            ("blk.0.attn_q.lora_b", [8, 64, 3, 1], false),
            ("blk.0.ffn_up.weight", [64, 32, 1, 1], false),
            ("odd", [64, 32, 8, 1], false),
            ("", [64, 32, 8, 1], false),
        ] {
            assert_eq!(takes_by_itself(name, dims), takes, "{name} {dims:?}");
            let load = Load { auto_experts: true, ..Load::default() };
            assert_eq!(load.takes_for_berth(&Tensor::new(name, dims, GgmlType::Q4_0, 1)), takes, "as explain says: {name}");
        }
    }
}
