//! Where a whole model would go, before anything is loaded.
//!
//! Owns: [`Explanation`]: per tensor its place, rule and reason; per rule its matches; per place tensors and bytes; what a person should know.
//! Must not know: how it is shown, where the numbers about the machine come from.

use std::collections::BTreeMap;

use serde::Serialize;

use super::decide::{DecideError, Memory, asks_rules, decide_with};
use super::facts::Facts;
use super::load::Load;
use super::reason::Reason;
use super::rules::{Origin, Rules};
use super::target::Target;
use super::tensor::{Class, Flags, Tensor};
use crate::gguf::{Header, Model, TensorInfo};

/// What is known of the machine; sizes in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Machine {
    /// `MemAvailable`.
    pub available: Option<u64>,
    /// `RLIMIT_MEMLOCK`; `None` if it is unknown or there is no limit.
    pub memlock: Option<u64>,
    /// Why there is no page-locked memory; `None` if there is, or nobody looked.
    pub no_pinned: Option<String>,
    /// Why there is no arena; likewise.
    pub no_arena: Option<String>,
    /// What an arena may take of its file system; `None` if it is unknown.
    pub arena_free: Option<u64>,
    /// The arena's directory, if it lies in memory (tmpfs, ramfs).
    pub arena_in_memory: Option<String>,
    /// What is wrong with a `BERTH_*` variable: Berth stays out of a process with such a value.
    pub bad_setting: Option<String>,
}

/// One tensor.
#[derive(Clone, Debug, Serialize)]
pub struct Placed {
    /// Its name.
    pub name: String,
    /// Its layer.
    pub layer: Option<u32>,
    /// Its kind.
    pub class: Class,
    /// Its block format.
    #[serde(rename = "type")]
    pub type_name: std::borrow::Cow<'static, str>,
    /// Its bytes.
    pub bytes: u64,
    /// Its place; absent if it is not loaded.
    pub place: Option<Target>,
    /// Where its bytes lie.
    pub memory: Option<Memory>,
    /// The rule that won, from 1.
    pub rule: Option<usize>,
    /// Whether the place is the one that a rule names, kept as it is.
    pub buft_overridden: bool,
    /// Whether page-locked memory was the choice and the mapping was taken.
    pub downgraded: bool,
    /// Why.
    pub reason: Reason,
}

/// One rule.
#[derive(Clone, Debug, Serialize)]
pub struct RuleUse {
    /// Its number, from 1.
    pub number: usize,
    /// Its pattern.
    pub pattern: String,
    /// The target it names.
    pub target: Target,
    /// Where it came from.
    pub origin: Origin,
    /// Tensors for which it won.
    pub won: u64,
    /// Bytes of those.
    pub bytes: u64,
    /// Tensors that it matches too, but an earlier rule won.
    pub lost: u64,
}

impl RuleUse {
    /// Whether it decided nothing and was meant to. `--n-cpu-moe 99` for a model of 48 layers is how people say "all".
    pub fn is_idle(&self) -> bool {
        self.won == 0 && !self.is_per_layer()
    }

    /// Whether it was generated for a layer that the model does not have, or that has nothing for it.
    pub fn names_absent_layer(&self) -> bool {
        self.won == 0 && self.lost == 0 && self.is_per_layer()
    }

    fn is_per_layer(&self) -> bool {
        matches!(self.origin, Origin::NCpuMoe | Origin::NCpuFfn)
    }
}

/// One place.
#[derive(Clone, Debug, Serialize)]
pub struct PlaceUse {
    /// The place.
    pub place: Target,
    /// Tensors in it.
    pub tensors: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Bytes that stay in the file's mapping.
    pub mapped: u64,
    /// Bytes that are copied: to host memory or a device.
    pub copied: u64,
}

/// Something that a person should know. The codes are stable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Warning {
    /// Which one.
    pub code: &'static str,
    /// One sentence.
    pub message: String,
}

/// Bytes by where they lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// In the file's mapping.
    pub mapped: u64,
    /// Copied into ordinary memory, interleaved or not.
    pub pageable: u64,
    /// Copied into page-locked memory.
    pub pinned: u64,
    /// Copied into Berth's arena.
    pub arena: u64,
    /// Copied to devices.
    pub device: u64,
}

/// Where a model would go.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    /// What the model is.
    pub model: Facts,
    /// Tensors in the file.
    pub tensor_count: usize,
    /// Whether the file is mapped.
    pub mmap: bool,
    /// Bytes by where they lie.
    pub totals: Totals,
    /// What is known of the machine.
    pub machine: Machine,
    /// From how many tokens on a GPU computes with weights in host memory; absent if never.
    pub offload_min_batch: Option<u32>,
    /// The same for experts, as a hint: `32 * n_expert / n_used`.
    pub offload_expert_hint: Option<u32>,
    /// Every place that has a tensor.
    pub places: Vec<PlaceUse>,
    /// Every rule, in order.
    pub rules: Vec<RuleUse>,
    /// What a person should know.
    pub warnings: Vec<Warning>,
    /// Every tensor, in file order; a second use of the embeddings comes last.
    pub tensors: Vec<Placed>,
}

impl Explanation {
    /// Explains a model in one or several files.
    ///
    /// # Errors
    /// A pattern that reached its limit.
    pub fn of_model(model: &Model, rules: &Rules, load: &Load, machine: Machine) -> Result<Explanation, DecideError> {
        let facts = Facts::of(model.header()).with_tensors(|name| model.tensor(name).is_some());
        let mut e = explain(facts, model.tensors().map(|t| t.info), rules, load, machine)?;
        model.parts().iter().for_each(|part| e.warn_of_quirks(part.header().quirks()));
        Ok(e)
    }

    /// Explains the model of one header.
    ///
    /// # Errors
    /// A pattern that reached its limit.
    pub fn of_header(header: &Header, rules: &Rules, load: &Load, machine: Machine) -> Result<Explanation, DecideError> {
        let facts = Facts::of(header).with_tensors(|name| header.tensor(name).is_some());
        let mut e = explain(facts, header.tensors(), rules, load, machine)?;
        e.warn_of_quirks(header.quirks());
        Ok(e)
    }

    /// Whether something that was asked for cannot be honoured, or stock does not load the file at all: what `--strict` refuses.
    pub fn has_unhonoured(&self) -> bool {
        let broken = |w: &Warning| {
            matches!(w.code, "no_pinned" | "no_arena" | "arena_space" | "bad_setting" | "stock_refuses" | "no_architecture" | "layer_count")
        };
        self.rules.iter().any(RuleUse::is_idle) || self.warnings.iter().any(broken)
    }

    /// Bytes that are copied into RAM; an arena in a file system in memory takes RAM too.
    pub fn copied_into_memory(&self) -> u64 {
        let in_arena = if self.machine.arena_in_memory.is_some() { self.totals.arena } else { 0 };
        self.totals.pageable.saturating_add(self.totals.pinned).saturating_add(in_arena)
    }

    /// Why this machine cannot give a place to what goes there. In llama.cpp it is in ordinary memory then.
    pub fn lacks(&self, place: &Target) -> Option<&str> {
        match place {
            Target::CudaHost => self.machine.no_pinned.as_deref(),
            Target::Arena if self.machine.no_arena.is_some() => self.machine.no_arena.as_deref(),
            Target::Arena => {
                self.machine.arena_free.filter(|&free| self.totals.arena > free).map(|_| "its file system has too little room")
            }
            _ => None,
        }
    }
}

/// Explains any tensors.
///
/// # Errors
/// A pattern that reached its limit.
fn explain<'a>(
    facts: Facts,
    infos: impl Iterator<Item = TensorInfo<'a>>,
    rules: &Rules,
    load: &Load,
    machine: Machine,
) -> Result<Explanation, DecideError> {
    let mut uses: Vec<RuleUse> = rules
        .iter()
        .enumerate()
        .map(|(i, r)| RuleUse {
            number: i + 1,
            pattern: r.pattern().as_str().to_owned(),
            target: r.target().clone(),
            origin: r.origin(),
            won: 0,
            bytes: 0,
            lost: 0,
        })
        .collect();
    let mut tensors = Vec::new();
    let mut tied = None;
    let mut place = |tensor: Tensor<'_>| -> Result<Placed, DecideError> {
        let hits = if rules.is_empty() || !asks_rules(&tensor, load) { None } else { Some(rules.all_matches(tensor.name)?) };
        let first = hits.as_ref().and_then(super::Hits::first);
        let d = decide_with(&tensor, first.map(|i| (i, rules)), load)?;
        for &i in hits.as_ref().map_or(&[][..], super::Hits::as_slice) {
            if d.rule == Some(i) {
                uses[i].won += 1;
                uses[i].bytes += tensor.bytes;
            } else {
                uses[i].lost += 1;
            }
        }
        Ok(Placed {
            name: tensor.name.to_owned(),
            layer: tensor.layer,
            class: tensor.class,
            type_name: tensor.ty.name(),
            bytes: tensor.bytes,
            place: d.target,
            memory: d.memory,
            rule: d.rule.map(|i| i + 1),
            buft_overridden: d.buft_overridden,
            downgraded: d.downgraded,
            reason: d.reason,
        })
    };
    for info in infos {
        let tensor = Tensor::from(info);
        let placed = place(tensor.with(facts.flags(&tensor)))?;
        if facts.tied_embeddings && tensor.name == "token_embd.weight" {
            tied = Some((placed.place.clone(), placed.memory, tensor));
        }
        tensors.push(placed);
    }
    let tensor_count = tensors.len();
    if let Some((original, memory, tensor)) = tied {
        let second = place(tensor.with(Flags { duplicated: true, ..Flags::default() }))?;
        // In the same place, stock uses the tensor that is there.
        if (&second.place, second.memory) != (&original, memory) {
            tensors.push(second);
        }
    }
    let offload = tensors.iter().find(|t| t.class == Class::Expert).and_then(|t| {
        let expert = Tensor::new(&t.name, [1; 4], crate::gguf::GgmlType::F32, 0);
        load.offload(&expert)?.expert_hint
    });
    let mut e = Explanation {
        model: facts,
        tensor_count,
        mmap: load.mmap,
        totals: totals(&tensors),
        machine,
        offload_min_batch: load.offload_min_batch.filter(|_| !load.devices.is_empty()),
        offload_expert_hint: offload,
        places: places(&tensors),
        rules: uses,
        warnings: Vec::new(),
        tensors,
    };
    e.warn_of_all(load);
    Ok(e)
}

fn totals(tensors: &[Placed]) -> Totals {
    let mut t = Totals::default();
    for tensor in tensors {
        let to = match tensor.memory {
            Some(Memory::Mapped) => &mut t.mapped,
            Some(Memory::Pageable | Memory::Repacked) => &mut t.pageable,
            Some(Memory::Pinned) => &mut t.pinned,
            Some(Memory::Arena) => &mut t.arena,
            Some(Memory::Device) => &mut t.device,
            None => continue,
        };
        *to = to.saturating_add(tensor.bytes);
    }
    t
}

fn places(tensors: &[Placed]) -> Vec<PlaceUse> {
    let mut by_place: BTreeMap<&Target, PlaceUse> = BTreeMap::new();
    for t in tensors {
        let Some(place) = &t.place else { continue };
        let new = || PlaceUse { place: place.clone(), tensors: 0, bytes: 0, mapped: 0, copied: 0 };
        let entry = by_place.entry(place).or_insert_with(new);
        entry.tensors += 1;
        entry.bytes = entry.bytes.saturating_add(t.bytes);
        let to = if t.memory == Some(Memory::Mapped) { &mut entry.mapped } else { &mut entry.copied };
        *to = to.saturating_add(t.bytes);
    }
    let mut places: Vec<PlaceUse> = by_place.into_values().collect();
    places.sort_by_key(|p| std::cmp::Reverse(p.bytes));
    places
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::gguf::testing::File;
    use crate::placement::{Device, Targets};

    pub(in super::super) fn model() -> File {
        let mut f = File::new(3)
            .str("general.architecture", "qwen3moe")
            .u32("qwen3moe.block_count", 12)
            .u32("qwen3moe.expert_count", 128)
            .u32("qwen3moe.expert_used_count", 8)
            .tensor("token_embd.weight", &[256, 32], 14);
        for layer in 0..12 {
            f = f
                .tensor(&format!("blk.{layer}.attn_norm.weight"), &[256], 0)
                .tensor(&format!("blk.{layer}.attn_q.weight"), &[256, 256], 12)
                .tensor(&format!("blk.{layer}.ffn_gate_inp.weight"), &[256, 8], 0)
                .tensor(&format!("blk.{layer}.ffn_up_exps.weight"), &[256, 64, 8], 12);
        }
        f.tensor("output_norm.weight", &[256], 0)
    }

    pub(in super::super) fn explained(text: &str, change: impl FnOnce(&mut Load)) -> Explanation {
        let header = Header::from_bytes(&model().bytes()).unwrap();
        let mut rules = Rules::new(Targets::new(["CUDA0"]));
        if !text.is_empty() {
            rules.parse(text).unwrap();
        }
        let mut load = Facts::of(&header).load();
        change(&mut load);
        Explanation::of_header(&header, &rules, &load, machine()).unwrap()
    }

    fn machine() -> Machine {
        Machine { available: Some(1 << 20), memlock: Some(8 << 10), ..Machine::default() }
    }

    #[test]
    fn what_this_machine_lacks_is_known_per_place() {
        let mut e = explained(r"blk\.1\.ffn=ARENA,exps=CUDA_Host", |_| {});
        assert_eq!([Target::CudaHost, Target::Arena, Target::Cpu].map(|t| e.lacks(&t).is_some()), [false; 3]);
        e.machine.no_pinned = Some("no driver".into());
        e.machine.arena_free = Some(e.totals.arena - 1);
        assert_eq!((e.lacks(&Target::CudaHost), e.lacks(&Target::CpuMmap)), (Some("no driver"), None));
        assert_eq!(e.lacks(&Target::Arena), Some("its file system has too little room"));
        e.machine.no_arena = Some("no directory".into());
        assert_eq!(e.lacks(&Target::Arena), Some("no directory"));
    }

    pub(in super::super) fn gpu(load: &mut Load) {
        load.devices.push(Device::new("CUDA0", Some("CUDA_Host"), 1.0));
    }

    #[test]
    fn every_tensor_has_its_place_and_every_byte_is_counted_once() {
        let e = explained(r"blk\.1\.ffn=ARENA,exps=CUDA_Host", gpu);
        assert_eq!((e.tensor_count, e.tensors.len()), (50, 51));
        let find = |name: &str| e.tensors.iter().find(|t| t.name == name).unwrap();
        let seen = |name| (find(name).place.as_ref().unwrap().to_string(), find(name).rule, find(name).reason.code());
        assert_eq!(seen("blk.1.ffn_up_exps.weight"), ("ARENA".into(), Some(1), "rule_host"));
        assert_eq!(seen("blk.10.ffn_up_exps.weight"), ("CUDA_Host".into(), Some(2), "rule_host"));
        assert_eq!(seen("blk.10.attn_q.weight"), ("CUDA0".into(), None, "auto_device"));
        assert_eq!(seen("token_embd.weight"), ("CPU".into(), None, "auto_host_mapped"));
        let all: u64 = e.tensors.iter().map(|t| t.bytes).sum();
        assert_eq!(e.places.iter().map(|p| p.bytes).sum::<u64>(), all);
        assert_eq!(e.places.iter().map(|p| p.mapped + p.copied).sum::<u64>(), all);
        let t = e.totals;
        assert_eq!(t.mapped + t.pageable + t.pinned + t.arena + t.device, all);
        assert_eq!((e.offload_min_batch, e.offload_expert_hint), (Some(32), Some(512)));
    }

    #[test]
    fn rules_show_what_they_won_and_what_they_lost_to_earlier_ones() {
        let e = explained(r"exps=CUDA_Host,blk\.1\.ffn_up=ARENA,nothing=CPU, exps=CPU,blk\.1.*=CPU", |_| {});
        let seen: Vec<_> = e.rules.iter().map(|r| (r.won, r.lost)).collect();
        // `blk\.1.*` also matches layers 10 and 11: the dot is missing its backslash.
        assert_eq!(seen, [(12, 0), (0, 1), (0, 0), (0, 0), (9, 3)]);
        let codes: Vec<_> = e.warnings.iter().map(|w| w.code).collect();
        assert_eq!(codes, ["rule_shadowed", "rule_unmatched", "rule_unmatched", "memlock"]);
        assert!(e.warnings[2].message.contains("starts with a space"), "{}", e.warnings[2].message);
        assert!(e.has_unhonoured());
        assert!(!explained("exps=CUDA_Host", |_| {}).has_unhonoured());
    }

    #[test]
    fn generated_rules_beyond_the_last_layer_are_no_fault() {
        let header = Header::from_bytes(&model().bytes()).unwrap();
        let mut rules = Rules::new(Targets::new([""; 0]));
        rules.n_cpu_moe(99).unwrap();
        let e = Explanation::of_header(&header, &rules, &Facts::of(&header).load(), Machine::default()).unwrap();
        assert!(!e.has_unhonoured() && e.warnings.is_empty());
        assert_eq!(e.rules.iter().filter(|r| r.won == 1).count(), 12);
    }

    #[test]
    fn embeddings_that_also_act_as_output_appear_twice_if_they_go_to_two_places() {
        let e = explained("", gpu);
        let last = e.tensors.last().unwrap();
        assert_eq!((last.name.as_str(), last.reason, last.class), ("token_embd.weight", Reason::Duplicated, Class::Output));
        assert_eq!(last.place, Some(Target::Device("CUDA0".into())));
        assert_eq!(explained("", |_| {}).tensors.len(), 50, "on one device they are shared");
        assert_eq!(explained("token_embd=ARENA", gpu).tensors.len(), 50);
    }

    #[test]
    fn header_with_200_000_tensors_is_explained_below_a_second() {
        let mut f = File::new(3).str("general.architecture", "qwen3moe").u32("qwen3moe.block_count", 97);
        for i in 0..200_000u64 {
            f = f.raw_tensor(format!("blk.{}.ffn_gate_exps.{i}.weight", i % 97).as_bytes(), &[32], 0, i * 128);
        }
        f.data_bytes = Some(200_000 * 128);
        let bytes = f.bytes();
        let mut rules = Rules::new(Targets::new(["CUDA0"]));
        rules.parse(r"blk\.([0-9]|1[0-9])\.=CUDA0,exps=CUDA_Host").unwrap();
        rules.n_cpu_moe(60).unwrap();
        let start = std::time::Instant::now();
        let header = Header::from_bytes(&bytes).unwrap();
        let e = Explanation::of_header(&header, &rules, &Facts::of(&header).load(), Machine::default()).unwrap();
        let took = start.elapsed();
        assert_eq!(e.tensors.len(), 200_000);
        println!("200,000 tensors, {} KiB of header, 62 rules: {took:?}", bytes.len() >> 10);
        assert!(cfg!(debug_assertions) || took.as_secs_f64() < 1.0, "{took:?}");
    }
}
