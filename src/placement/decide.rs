//! The decision for one tensor.
//!
//! Owns: the table of `docs` ("The placement decision"), as one function. Must not know: where tensors, rules and circumstances come from.
//!
//! Mirrors `llama_model_loader::create_tensor` in `llama-model-loader.cpp`, with one difference, which is the point of Berth: a host buffer type
//! that a rule names is kept under mmap. (A stock build with Berth as a plug-in decides the same, because Berth's types are not the host type
//! of any device.)

use std::fmt;

use serde::Serialize;

use super::budget::SlowRule;
use super::load::Load;
use super::names::{Op, Part};
use super::reason::Reason;
use super::rules::Rules;
use super::target::Target;
use super::tensor::{Flags, Tensor};
use crate::text::Name as Shown;

/// Where the bytes of a tensor lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Memory {
    /// In the file's mapping: no copy is made, and the kernel may drop the pages.
    Mapped,
    /// Copied into ordinary memory.
    Pageable,
    /// Copied into page-locked memory.
    Pinned,
    /// Copied into a file of Berth.
    Arena,
    /// Copied into ordinary memory in another order.
    Repacked,
    /// Copied to a device.
    Device,
}

impl Memory {
    /// The name in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Memory::Mapped => "mapped",
            Memory::Pageable => "pageable",
            Memory::Pinned => "pinned",
            Memory::Arena => "arena",
            Memory::Repacked => "repacked",
            Memory::Device => "device",
        }
    }

    /// Whether host memory is taken beside the file's mapping.
    pub fn is_host_copy(self) -> bool {
        matches!(self, Memory::Pageable | Memory::Pinned | Memory::Arena | Memory::Repacked)
    }
}

/// Where a tensor goes, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The place. `None`: the tensor is not made.
    pub target: Option<Target>,
    /// Where its bytes lie then.
    pub memory: Option<Memory>,
    /// The rule that won, as an index.
    pub rule: Option<usize>,
    /// Whether the place is the one that a rule names, kept as it is. Not for `CPU`, which stock takes as a wish.
    pub buft_overridden: bool,
    /// Whether the choice was page-locked memory and became the mapping because there is one.
    pub downgraded: bool,
    /// Why.
    pub reason: Reason,
}

/// No decision is possible; stock ends the load then.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DecideError {
    /// A required tensor is not in the file.
    Missing(String),
    /// A pattern reached its limit.
    SlowRule(SlowRule),
    /// Memory could not be had, and strict mode forbids another.
    Strict {
        /// The place that was asked for.
        target: Target,
        /// Bytes that were asked for.
        bytes: u64,
        /// Why they could not be had.
        why: String,
    },
    /// Memory could not be had, and there is no other to try.
    NoMemory {
        /// The place that was asked for.
        target: Target,
        /// Bytes that were asked for.
        bytes: u64,
        /// Why they could not be had.
        why: String,
    },
}

impl fmt::Display for DecideError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DecideError::Missing(name) => write!(f, "the model has no tensor {}, which is required", Shown(name)),
            DecideError::SlowRule(slow) => slow.fmt(f),
            DecideError::NoMemory { target, bytes, why } => write!(f, "{bytes} bytes of {target} could not be had: {why}"),
            DecideError::Strict { target, bytes, why } => {
                write!(f, "{bytes} bytes of {target} could not be had ({why}), and BERTH_STRICT allows no other place")
            }
        }
    }
}

impl std::error::Error for DecideError {}

impl From<SlowRule> for DecideError {
    fn from(slow: SlowRule) -> DecideError {
        DecideError::SlowRule(slow)
    }
}

impl Decision {
    /// Counts a match for the rule that won, if one did: for whoever keeps the decision, once.
    pub fn count(&self, rules: &Rules) {
        if let Some(rule) = self.rule {
            rules.count_match(rule);
        }
    }
}

/// Decides where `tensor` goes. Does not count: [`Decision::count`].
///
/// # Errors
/// A required tensor is missing, or a pattern reached its limit.
pub fn decide(tensor: &Tensor<'_>, rules: &Rules, load: &Load) -> Result<Decision, DecideError> {
    let rule = if asks_rules(tensor, load) { rules.first_match(tensor.name)? } else { None };
    decide_with(tensor, rule.map(|i| (i, rules)), load)
}

/// Whether rules have a say about `tensor` at all.
pub(super) fn asks_rules(tensor: &Tensor<'_>, load: &Load) -> bool {
    tensor.found && !tensor.flags.skip && tensor.op != Op::None && !load.is_lazy(tensor)
}

/// Decides with the rule that matched, if one did.
pub(super) fn decide_with(tensor: &Tensor<'_>, rule: Option<(usize, &Rules)>, load: &Load) -> Result<Decision, DecideError> {
    let nothing = |reason| Ok(Decision { target: None, memory: None, rule: None, buft_overridden: false, downgraded: false, reason });
    let Flags { not_required, duplicated, skip, .. } = tensor.flags;
    if !tensor.found {
        return if not_required { nothing(Reason::Absent) } else { Err(DecideError::Missing(tensor.name.to_owned())) };
    }
    if skip {
        return nothing(Reason::Skipped);
    }
    if tensor.op == Op::None {
        return nothing(Reason::Unused);
    }
    let mut decision = match rule.and_then(|(i, rules)| Some((i, rules.get(i)?.target().clone()))) {
        // A lazy context is mapped whatever the load mode.
        _ if load.is_lazy(tensor) => plain(Target::Cpu, Memory::Mapped, Reason::Lazy),
        Some((rule, target)) => Decision { rule: Some(rule), ..ruled(tensor, target, load) },
        None => automatic(tensor, load),
    };
    if duplicated {
        decision.reason = Reason::Duplicated;
    }
    Ok(decision)
}

/// What becomes of a decision whose memory could not be had: the mapping if there is one, else ordinary memory.
///
/// # Errors
/// In strict mode, and if ordinary memory is what could not be had.
pub fn after_failure(decision: Decision, load: &Load, bytes: u64, why: &str, strict: bool) -> Result<Decision, DecideError> {
    let tried = decision.memory;
    let Some(target) = decision.target.clone() else { return Ok(decision) };
    let next = match tried {
        Some(Memory::Pinned | Memory::Arena | Memory::Repacked) if load.mmap => Some((Memory::Mapped, Reason::FallbackMapped)),
        Some(Memory::Pinned | Memory::Arena | Memory::Repacked | Memory::Mapped) => Some((Memory::Pageable, Reason::FallbackPageable)),
        Some(Memory::Pageable | Memory::Device) | None => None,
    };
    match next {
        Some((memory, reason)) if !strict => Ok(Decision { memory: Some(memory), reason, ..decision }),
        Some(_) => Err(DecideError::Strict { target, bytes, why: why.to_owned() }),
        None => Err(DecideError::NoMemory { target, bytes, why: why.to_owned() }),
    }
}

fn plain(target: Target, memory: Memory, reason: Reason) -> Decision {
    Decision { target: Some(target), memory: Some(memory), rule: None, buft_overridden: false, downgraded: false, reason }
}

/// What a rule's target means.
fn ruled(tensor: &Tensor<'_>, target: Target, load: &Load) -> Decision {
    let memory = match &target {
        // Not taken literally: stock looks through everything that the CPU can use.
        Target::Cpu => {
            return on_cpu(
                tensor,
                load,
                [Reason::RuleCpuBerth, Reason::RuleCpuHostMapped, Reason::RuleCpuHost, Reason::RuleCpuRepack, Reason::RuleCpu],
            );
        }
        Target::CpuMmap => mapping_or_memory(load),
        Target::CudaHost | Target::StockHost(_) => Memory::Pinned,
        Target::Arena => Memory::Arena,
        Target::Device(_) => Memory::Device,
    };
    let reason = if target.is_host() { Reason::RuleHost } else { Reason::RuleDevice };
    Decision { buft_overridden: true, ..plain(target, memory, reason) }
}

fn automatic(tensor: &Tensor<'_>, load: &Load) -> Decision {
    let device = match tensor.part {
        Part::Input => None,
        Part::Layer => load.device_of_layer(tensor.list_layer()),
        Part::Output => load.device_of_layer(load.layers),
    };
    match device.and_then(|i| load.devices.get(i)) {
        Some(device) if device.supports(tensor.op, tensor.ty) => {
            plain(Target::Device(device.name.clone()), Memory::Device, Reason::AutoDevice)
        }
        // What the device cannot compute goes down the CPU's list.
        _ => on_cpu(tensor, load, [Reason::AutoBerth, Reason::AutoHostMapped, Reason::AutoHost, Reason::AutoCpuRepack, Reason::AutoCpu]),
    }
}

/// The CPU's list, in stock's order: accelerators (Berth), the first GPU's page-locked type, interleaved copies, plain memory.
fn on_cpu(tensor: &Tensor<'_>, load: &Load, [berth, host_mapped, host, repack, cpu]: [Reason; 5]) -> Decision {
    if load.takes_for_berth(tensor) {
        return plain(Target::CpuMmap, mapping_or_memory(load), berth);
    }
    let device = load.devices.iter().find(|d| d.host_type.is_some()).filter(|d| !load.no_host && d.supports(tensor.op, tensor.ty));
    if let Some(name) = device.and_then(|d| d.host_type.clone()) {
        return if load.mmap {
            Decision { downgraded: true, ..plain(Target::Cpu, Memory::Mapped, host_mapped) }
        } else {
            plain(Target::StockHost(name), Memory::Pinned, host)
        };
    }
    if load.may_repack(tensor) {
        return plain(Target::Cpu, Memory::Repacked, repack);
    }
    plain(Target::Cpu, mapping_or_memory(load), cpu)
}

fn mapping_or_memory(load: &Load) -> Memory {
    if load.mmap { Memory::Mapped } else { Memory::Pageable }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::GgmlType;
    use crate::placement::{Device, LazyMode, Repack, Targets};

    fn rules(text: &str) -> Rules {
        let mut rules = Rules::new(Targets::new(["CUDA0"]));
        if !text.is_empty() {
            rules.parse(text).unwrap();
        }
        rules
    }

    fn expert() -> Tensor<'static> {
        Tensor::new("blk.1.ffn_up_exps.weight", [256, 64, 8, 1], GgmlType::Q4_K, 73728)
    }

    fn cpu_only(mmap: bool) -> Load {
        Load { mmap, layers: 4, ..Load::default() }
    }

    /// A GPU with a host type and no layers on it.
    fn gpu(mmap: bool, gpu_layers: u32) -> Load {
        Load { devices: vec![Device::new("CUDA0", Some("CUDA_Host"), 1.0)], gpu_layers: Some(gpu_layers), ..cpu_only(mmap) }
    }

    fn code(tensor: Tensor<'_>, text: &str, load: &Load) -> (String, Option<Memory>, bool, bool, &'static str) {
        let d = decide(&tensor, &rules(text), load).unwrap();
        (d.target.map_or("-".into(), |t| t.to_string()), d.memory, d.buft_overridden, d.downgraded, d.reason.code())
    }

    fn row(
        place: &str,
        memory: Memory,
        overridden: bool,
        downgraded: bool,
        reason: &'static str,
    ) -> (String, Option<Memory>, bool, bool, &'static str) {
        (place.to_owned(), Some(memory), overridden, downgraded, reason)
    }

    #[test]
    fn rule_that_names_a_host_type_is_kept_with_and_without_mmap() {
        for (target, memory) in [("CUDA_Host", Memory::Pinned), ("ARENA", Memory::Arena)] {
            for load in [cpu_only(true), cpu_only(false), gpu(true, 0), gpu(true, 99), gpu(false, 99)] {
                assert_eq!(code(expert(), &format!("exps={target}"), &load), row(target, memory, true, false, "rule_host"));
            }
        }
        for (mmap, memory) in [(true, Memory::Mapped), (false, Memory::Pageable)] {
            assert_eq!(code(expert(), "exps=CPU_MMAP", &gpu(mmap, 99)), row("CPU_MMAP", memory, true, false, "rule_host"));
        }
    }

    #[test]
    fn automatic_host_type_is_downgraded_under_mmap_as_in_stock() {
        assert_eq!(code(expert(), "", &gpu(true, 0)), row("CPU", Memory::Mapped, false, true, "auto_host_mapped"));
        assert_eq!(code(expert(), "attn=ARENA", &gpu(true, 0)), row("CPU", Memory::Mapped, false, true, "auto_host_mapped"));
    }

    #[test]
    fn automatic_host_type_is_kept_without_mmap() {
        assert_eq!(code(expert(), "", &gpu(false, 0)), row("CUDA_Host (stock)", Memory::Pinned, false, false, "auto_host"));
        let no_host = Load { no_host: true, ..gpu(false, 0) };
        assert_eq!(code(expert(), "", &no_host), row("CPU", Memory::Pageable, false, false, "auto_cpu"));
        let mut cannot = gpu(false, 0);
        cannot.devices[0].unsupported.push((Op::MulMatId, GgmlType::Q4_K));
        assert_eq!(code(expert(), "", &cannot), row("CPU", Memory::Pageable, false, false, "auto_cpu"));
    }

    #[test]
    fn rule_that_names_cpu_is_no_override_and_considers_what_stock_considers() {
        assert_eq!(code(expert(), "exps=CPU", &cpu_only(true)), row("CPU", Memory::Mapped, false, false, "rule_cpu"));
        assert_eq!(code(expert(), "exps=CPU", &cpu_only(false)), row("CPU", Memory::Pageable, false, false, "rule_cpu"));
        let repack = Load { repack: Repack::Avx2, ..cpu_only(true) };
        assert_eq!(code(expert(), "exps=CPU", &repack), row("CPU", Memory::Repacked, false, false, "rule_cpu_repack"));
        assert_eq!(code(expert(), "", &repack), row("CPU", Memory::Repacked, false, false, "auto_cpu_repack"));
        assert_eq!(code(expert(), "exps=CPU", &gpu(true, 99)), row("CPU", Memory::Mapped, false, true, "rule_cpu_host_mapped"));
        assert_eq!(code(expert(), "exps=CPU", &gpu(false, 99)), row("CUDA_Host (stock)", Memory::Pinned, false, false, "rule_cpu_host"));
        // With a GPU its host type comes before interleaved copies.
        let both = Load { repack: Repack::Avx2, ..gpu(true, 99) };
        assert_eq!(code(expert(), "exps=CPU", &both).1, Some(Memory::Mapped));
    }

    #[test]
    fn cpu_moe_and_n_cpu_moe_are_rules_to_cpu_and_no_host_overrides() {
        let mut all = rules("");
        all.cpu_moe().unwrap();
        let mut first = rules("");
        first.n_cpu_moe(1).unwrap();
        let load = gpu(true, 99);
        let d = decide(&expert(), &all, &load).unwrap();
        assert_eq!((d.rule, d.buft_overridden, d.reason), (Some(0), false, Reason::RuleCpuHostMapped));
        let d = decide(&expert(), &first, &load).unwrap();
        assert_eq!((d.rule, d.target, d.reason), (None, Some(Target::Device("CUDA0".into())), Reason::AutoDevice));
        // Order decides between them and other rules.
        let mut after = rules("exps=ARENA");
        after.cpu_moe().unwrap();
        assert_eq!(decide(&expert(), &after, &load).unwrap().target, Some(Target::Arena));
        all.parse("exps=ARENA").unwrap();
        assert_eq!(decide(&expert(), &all, &load).unwrap().target, Some(Target::Cpu));
    }

    #[test]
    fn rule_that_names_a_device_is_kept_with_and_without_mmap() {
        for load in [gpu(true, 0), gpu(false, 0), gpu(true, 99)] {
            assert_eq!(code(expert(), "exps=CUDA0", &load), row("CUDA0", Memory::Device, true, false, "rule_device"));
        }
    }

    #[test]
    fn automatic_choice_is_the_device_of_the_layer_else_the_cpu() {
        let t = |name| Tensor::new(name, [256, 64, 1, 1], GgmlType::Q6_K, 1);
        assert_eq!(code(t("blk.1.attn_q.weight"), "", &cpu_only(true)), row("CPU", Memory::Mapped, false, false, "auto_cpu"));
        for (name, gpu_layers, place) in [
            ("blk.3.attn_q.weight", 2, "CUDA0"),
            ("blk.2.attn_q.weight", 2, "CPU"),
            ("output.weight", 1, "CUDA0"),
            ("output.weight", 0, "CPU"),
            ("token_embd.weight", 99, "CPU"),
            ("rope_freqs.weight", 99, "CUDA0"),
            ("rope_freqs.weight", 4, "CPU"),
        ] {
            assert_eq!(code(t(name), "", &gpu(true, gpu_layers)).0, place, "{name} -ngl {gpu_layers}");
        }
        let mut cannot = gpu(true, 99);
        cannot.devices[0].unsupported.push((Op::MulMat, GgmlType::Q6_K));
        assert_eq!(code(t("blk.1.attn_q.weight"), "", &cannot).0, "CPU");
    }

    #[test]
    fn berth_auto_takes_experts_on_the_cpu_and_nothing_else() {
        let auto = |load: Load| Load { auto_experts: true, repack: Repack::Avx512, ..load };
        assert_eq!(code(expert(), "", &auto(cpu_only(true))), row("CPU_MMAP", Memory::Mapped, false, false, "auto_berth"));
        assert_eq!(code(expert(), "exps=CPU", &auto(gpu(true, 99))), row("CPU_MMAP", Memory::Mapped, false, false, "rule_cpu_berth"));
        assert_eq!(code(expert(), "", &auto(gpu(true, 99))).4, "auto_device");
        let attention = Tensor::new("blk.1.attn_q.weight", [256, 64, 1, 1], GgmlType::Q4_K, 1);
        assert_eq!(code(attention, "", &auto(cpu_only(true))).4, "auto_cpu_repack");
    }

    #[test]
    fn failed_allocation_falls_back_to_the_mapping_then_to_memory_and_strict_is_an_error() {
        let fall = |text: &str, load: &Load, strict| {
            let d = decide(&expert(), &rules(text), load).unwrap();
            after_failure(d, load, 73728, "no driver", strict)
        };
        let d = fall("exps=CUDA_Host", &cpu_only(true), false).unwrap();
        assert_eq!(
            (d.target, d.memory, d.reason, d.buft_overridden),
            (Some(Target::CudaHost), Some(Memory::Mapped), Reason::FallbackMapped, true)
        );
        let d = fall("exps=ARENA", &cpu_only(false), false).unwrap();
        assert_eq!((d.memory, d.reason), (Some(Memory::Pageable), Reason::FallbackPageable));
        let d = fall("exps=CPU_MMAP", &cpu_only(true), false).unwrap();
        assert_eq!((d.memory, d.reason), (Some(Memory::Pageable), Reason::FallbackPageable));
        let e = fall("exps=CUDA_Host", &cpu_only(true), true).unwrap_err();
        assert!(e.to_string().contains("73728 bytes of CUDA_Host could not be had (no driver)"), "{e}");
        assert!(fall("exps=CPU_MMAP", &cpu_only(false), false).is_err(), "there is nothing below ordinary memory");
    }

    #[test]
    fn flags_have_the_meaning_and_the_order_of_stock() {
        let load = gpu(true, 99);
        let arena = rules(".*=ARENA");
        let counted = |t: Tensor<'static>, load: &Load| decide(&t, &arena, load).inspect(|d| d.count(&arena));
        let with = |t: Tensor<'static>, flags: Flags| counted(t.with(flags), &load);
        let none = Flags::default();

        assert_eq!(with(Tensor::missing("x"), none).unwrap_err(), DecideError::Missing("x".into()));
        let d = with(Tensor::missing("x"), Flags { not_required: true, ..none }).unwrap();
        assert_eq!((d.target, d.rule, d.reason), (None, None, Reason::Absent));

        let d = with(expert(), Flags { skip: true, ..none }).unwrap();
        assert_eq!((d.target, d.rule, d.reason), (None, None, Reason::Skipped));
        let unused = Tensor::new("masked_embd_ordering.weight", [8, 1, 1, 1], GgmlType::F32, 32);
        assert_eq!(with(unused, none).unwrap().reason, Reason::Unused);

        let embd = Tensor::new("token_embd.weight", [256, 64, 1, 1], GgmlType::Q6_K, 5 << 30);
        let d = with(embd, Flags { duplicated: true, ..none }).unwrap();
        assert_eq!((d.target, d.rule, d.reason), (Some(Target::Arena), Some(0), Reason::Duplicated));
        let d = decide(&embd.with(Flags { duplicated: true, ..none }), &rules(""), &load).unwrap();
        assert_eq!((d.target, d.reason), (Some(Target::Device("CUDA0".into())), Reason::Duplicated));

        // A lazy tensor asks no rule, and is mapped even without mmap.
        let lazy = Flags { read_lazy: true, ..none };
        let no_mmap = gpu(false, 99);
        let d = counted(embd.with(lazy), &no_mmap).unwrap();
        assert_eq!((d.target, d.memory, d.rule, d.reason), (Some(Target::Cpu), Some(Memory::Mapped), None, Reason::Lazy));
        assert_eq!(with(Tensor { bytes: 1, ..embd }, lazy).unwrap().reason, Reason::RuleHost, "small tensors are not lazy");
        let off = Load { lazy: LazyMode::Off, ..load.clone() };
        assert_eq!(counted(embd.with(lazy), &off).unwrap().reason, Reason::RuleHost);
        let on = Load { lazy: LazyMode::On, ..load.clone() };
        assert_eq!(counted(Tensor { bytes: 1, ..embd }.with(lazy), &on).unwrap().reason, Reason::Lazy);
        assert_eq!(arena.iter().next().unwrap().matches(), 3, "only decisions that a rule made are counted");
    }

    #[test]
    fn every_rule_counts_the_tensors_it_won() {
        let r = rules(r"blk\.1\.=ARENA,exps=CUDA_Host,nothing=CPU");
        let load = cpu_only(true);
        for name in ["blk.1.ffn_up_exps.weight", "blk.1.attn_q.weight", "blk.10.ffn_up_exps.weight", "output.weight"] {
            decide(&Tensor::new(name, [8, 8, 1, 1], GgmlType::F32, 256), &r, &load).unwrap().count(&r);
        }
        assert_eq!(r.iter().map(super::super::rules::Rule::matches).collect::<Vec<_>>(), [2, 1, 0]);
    }

    #[test]
    fn random_decisions_keep_what_the_table_promises() {
        let seed = fastrand::u64(..);
        let mut rng = fastrand::Rng::with_seed(seed);
        const NAMES: [&str; 6] =
            ["token_embd.weight", "output.weight", "blk.0.attn_q.weight", "blk.3.ffn_up_exps.weight", "blk.2.ffn_norm.weight", "odd"];
        const TEXTS: [&str; 6] = ["exps=CUDA_Host", ".*=CPU", "blk=ARENA,exps=CPU", "attn=CUDA0", "odd=CPU_MMAP,.*=CUDA0", ""];
        for _ in 0..5_000 {
            let text = rng.choice(TEXTS).unwrap();
            let flags =
                Flags { not_required: rng.bool(), duplicated: rng.u8(..9) == 0, skip: rng.u8(..9) == 0, read_lazy: rng.u8(..9) == 0 };
            let ty = *rng.choice([GgmlType::F32, GgmlType::Q4_K, GgmlType::Q6_K].iter()).unwrap();
            let tensor = Tensor::new(rng.choice(NAMES).unwrap(), [256, 8, rng.u64(1..3), 1], ty, rng.u64(..)).with(flags);
            let mut load = if rng.bool() { gpu(rng.bool(), rng.u32(..7)) } else { cpu_only(rng.bool()) };
            load.repack = *rng.choice([Repack::Off, Repack::Avx2, Repack::Avx512].iter()).unwrap();
            load.auto_experts = rng.bool();
            let r = rules(text);
            let d = decide(&tensor, &r, &load).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
            let context = format!("seed {seed}: {text} {tensor:?} {load:?} {d:?}");
            assert_eq!(d.target.is_some(), d.memory.is_some(), "{context}");
            let named = d.rule.map(|i| r.iter().nth(i).unwrap().target().clone());
            if let Some(named) = named.filter(|t| *t != Target::Cpu) {
                assert!(d.buft_overridden && d.target == Some(named) && !d.downgraded, "a named target is never changed: {context}");
            } else {
                assert!(!d.buft_overridden, "{context}");
            }
            assert!(!d.downgraded || (load.mmap && d.target == Some(Target::Cpu) && d.memory == Some(Memory::Mapped)), "{context}");
            assert!(!matches!(d.target, Some(Target::StockHost(_))) || !load.mmap, "{context}");
            assert!(load.mmap || d.memory != Some(Memory::Mapped) || d.reason == Reason::Lazy || flags.duplicated, "{context}");
            assert_eq!(d, decide(&tensor, &r, &load).unwrap(), "the same question has the same answer: {context}");
        }
    }
}
