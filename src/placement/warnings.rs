//! What a person should know about where a model would go.
//!
//! Owns: every warning of an [`Explanation`], its code and its sentence. Must not know: how they are shown.

use super::architectures;
use super::bytes::Bytes;
use super::explain::{Explanation, Placed, RuleUse, Warning};
use super::load::Load;
use super::rules::MAX_RULES;
use super::target::Target;
use super::tensor::Class;
use crate::gguf::Quirk;
use crate::text::Name;

/// As many layers as stock has room for (`LLAMA_MAX_LAYERS`).
const MOST_LAYERS: u32 = 512;

impl Explanation {
    /// All but what the file itself is odd in.
    pub(super) fn warn_of_all(&mut self, load: &Load) {
        warn_of_settings(self, load);
        warn_of_model(self);
        warn_of_rules(self);
        warn_of_small_tensors(self);
        warn_of_memory(self);
    }

    fn warn(&mut self, code: &'static str, message: String) {
        self.warnings.push(Warning { code, message });
    }

    /// That stock does not load such a file.
    fn warn_of_refusal(&mut self, what: &str) {
        self.warn("stock_refuses", format!("Stock llama.cpp 0.5.0 refuses this file: {what}."));
    }

    /// What stock is stricter about than Berth.
    pub(super) fn warn_of_quirks(&mut self, quirks: &[Quirk]) {
        for quirk in quirks {
            let what = match quirk {
                Quirk::Alignment(n) => format!("its alignment, {n}, is not a power of two"),
                Quirk::LongName(name) => format!("the name of tensor '{}' has 64 bytes or more", name.escape_debug()),
                Quirk::Misaligned(name) => format!("tensor '{}' is not aligned", name.escape_debug()),
                Quirk::NotContiguous(name) => format!("tensor '{}' does not start where the one before it ends", name.escape_debug()),
                Quirk::EmptyBeyondFile(name) => {
                    format!("tensor '{}' has no data and starts beyond the end of the file", name.escape_debug())
                }
                Quirk::UnknownType { tensor, ty } => format!("tensor '{}' has the unknown format {}", tensor.escape_debug(), ty.0),
            };
            self.warn_of_refusal(&what);
        }
    }
}

/// What somebody set, and nothing comes of it, or something that is only assumed.
fn warn_of_settings(e: &mut Explanation, load: &Load) {
    if let Some(what) = e.machine.bad_setting.clone() {
        e.warn("bad_setting", format!("{what}. Berth stays out of a process with such a value."));
    }
    if let Some(layers) = load.gpu_layers.filter(|&n| n > 0 && load.devices.is_empty()) {
        let layers = if layers == u32::MAX { "All layers".to_owned() } else { format!("{layers} layers") };
        e.warn("no_device", format!("{layers} are to go to a GPU (-ngl), but no device is named (--device), so none does."));
    }
    // Only llama.cpp, on the machine where it loads, knows how much memory each device has.
    if load.assumed_shares && load.devices.len() > 1 && load.gpu_layers != Some(0) {
        let count = load.devices.len();
        e.warn(
            "shares_assumed",
            format!(
                "The {count} devices are taken to get equal shares of the layers; without --tensor-split (-ts) llama.cpp splits them by free memory, \
                 which is not known here."
            ),
        );
    }
}

/// A model that stock would not load, as far as its header tells: architecture, and layers that the tensors do not bear out.
fn warn_of_model(e: &mut Explanation) {
    if e.model.architecture.is_empty() {
        let what =
            "general.architecture is missing, empty or no text, so layers and experts are unknown; stock llama.cpp refuses this file.";
        e.warn("no_architecture", what.to_owned());
        return;
    }
    let architecture = Name(&e.model.architecture).to_string();
    if !architectures::is_known(&e.model.architecture) {
        e.warn_of_refusal(&format!("it knows no architecture {architecture}"));
    }
    let (said, key) = (e.model.layers, format!("{}.block_count", architecture.trim_matches('\'')));
    let Some(found) = e.tensors.iter().filter_map(|t| t.layer).max().map(|last| u64::from(last) + 1) else {
        if said > 0 {
            e.warn("layer_count", format!("{key} says {said} layers, but no tensor belongs to one."));
        }
        return;
    };
    if said == 0 {
        e.warn("layer_count", format!("{key} gives no number of layers, and the tensors have {found}."));
    } else if !(u64::from(e.model.least_layers())..=u64::from(said)).contains(&found) {
        e.warn("layer_count", format!("{key} says {said} layers, but the tensors have {found}."));
    }
    warn_of_predicting(e, &architecture, found);
    if e.model.counted_layers > MOST_LAYERS {
        let counted = e.model.counted_layers;
        e.warn_of_refusal(&format!("it has {counted} layers, and there is room for {MOST_LAYERS}"));
    }
}

/// Layers that predict further tokens: more than there are, or of an architecture of which stock knows none.
fn warn_of_predicting(e: &mut Explanation, architecture: &str, found: u64) {
    let (said, layers) = (e.model.said_predicting, e.model.layers);
    if said > layers {
        let what = format!("nextn_predict_layers says that {said} of its {layers} layers predict further tokens");
        e.warn_of_refusal(&what);
    } else if let Some(unknown) = e.model.unknown_predicting().filter(|r| found > u64::from(r.start)) {
        let what = format!(
            "nextn_predict_layers says that the last {} layers predict further tokens, and it asks for none of their tensors in an \
             architecture {architecture}",
            unknown.len()
        );
        e.warn_of_refusal(&what);
    }
}

fn warn_of_rules(e: &mut Explanation) {
    let mut warnings = Vec::new();
    for rule in e.rules.iter().filter(|r| r.is_idle()) {
        let RuleUse { number, pattern, target, lost, .. } = rule;
        let rule_text = format!("Rule {number}, {pattern}={}", target.name());
        let (code, message) = match lost {
            0 if pattern.starts_with(' ') => {
                ("rule_unmatched", format!("{rule_text}, matches no tensor: its pattern starts with a space."))
            }
            0 => ("rule_unmatched", format!("{rule_text}, matches no tensor.")),
            n => ("rule_shadowed", format!("{rule_text}, decides nothing: earlier rules took all {n} tensors that it matches.")),
        };
        warnings.push(Warning { code, message });
    }
    e.warnings.extend(warnings);
    if e.rules.len() >= MAX_RULES {
        e.warn("too_many_rules_for_stock", format!("llama.cpp 0.5.0 stops with {MAX_RULES} rules or more; give fewer."));
    }
}

/// Norms and routers are small, used for every token, and gain nothing from a place of their own.
fn warn_of_small_tensors(e: &mut Explanation) {
    let odd =
        |t: &&Placed| matches!(t.class, Class::Norm | Class::Router) && t.buft_overridden && t.place.as_ref().is_some_and(Target::is_berth);
    let (mut count, mut example) = (0u64, None);
    for t in e.tensors.iter().filter(odd) {
        count += 1;
        example.get_or_insert((t.name.clone(), t.rule.unwrap_or(0)));
    }
    if let Some((name, rule)) = example {
        let message = format!(
            "{count} norm and router tensors go to a type of Berth, the first being '{}' by rule {rule}; is its pattern too wide?",
            name.escape_debug()
        );
        e.warn("small_tensors_placed", message);
    }
}

fn warn_of_memory(e: &mut Explanation) {
    let copied = e.copied_into_memory();
    if let Some(available) = e.machine.available.filter(|&a| copied > a) {
        e.warn("memory", format!("{} are copied into memory, but only {} are available.", Bytes(copied), Bytes(available)));
    }
    let pinned = e.totals.pinned;
    let berths = e.places.iter().filter(|p| p.place == Target::CudaHost).map(|p| p.copied).sum::<u64>();
    if let Some(why) = e.machine.no_pinned.clone().filter(|_| berths > 0) {
        e.warn("no_pinned", format!("{} cannot be page-locked here: {why}.", Bytes(berths)));
    }
    let arena = e.totals.arena;
    if let Some(why) = e.machine.no_arena.clone().filter(|_| arena > 0) {
        e.warn("no_arena", format!("{} cannot go to an arena here: {why}.", Bytes(arena)));
    }
    if let Some(path) = e.machine.arena_in_memory.clone().filter(|_| arena > 0) {
        e.warn("arena_in_memory", format!("The arena's directory {path} is a file system in memory: an arena there takes RAM."));
    }
    if let Some(free) = e.machine.arena_free.filter(|&f| arena > f) {
        e.warn("arena_space", format!("{} are to go to an arena, and its file system has {} for it.", Bytes(arena), Bytes(free)));
    }
    if let Some(limit) = e.machine.memlock.filter(|&l| pinned > l) {
        // The CUDA driver pins through its own kernel module, so the limit may not matter; a warning and not an error.
        e.warn("memlock", format!("{} are to be page-locked, and the limit for locked memory is {}.", Bytes(pinned), Bytes(limit)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::Header;
    use crate::gguf::testing::File;
    use crate::placement::explain::tests::{explained, gpu, model};
    use crate::placement::{Facts, Machine, Rules, Targets};

    #[test]
    fn a_place_that_this_machine_does_not_have_is_not_honoured() {
        let header = Header::from_bytes(&model().bytes()).unwrap();
        let explained = |text: &str| {
            let mut rules = Rules::new(Targets::new([""; 0]));
            rules.parse(text).unwrap();
            let (no_pinned, no_arena) = (Some("no driver".to_owned()), Some("no directory".to_owned()));
            let machine = Machine { no_pinned, no_arena, arena_free: Some(1000), ..Machine::default() };
            Explanation::of_header(&header, &rules, &Facts::of(&header).load(), machine).unwrap()
        };
        for (text, codes) in [
            ("exps=CUDA_Host", &["no_pinned"][..]),
            ("exps=ARENA", &["no_arena", "arena_space"]),
            ("exps=CPU_MMAP", &[]),
            ("exps=CPU", &[]),
        ] {
            let e = explained(text);
            assert_eq!(e.warnings.iter().map(|w| w.code).collect::<Vec<_>>(), codes, "{text}");
            assert_eq!(e.has_unhonoured(), !codes.is_empty(), "{text}");
        }
    }

    #[test]
    fn an_arena_in_memory_takes_memory_and_is_warned_of() {
        let header = Header::from_bytes(&model().bytes()).unwrap();
        let mut rules = Rules::new(Targets::new([""; 0]));
        rules.parse("exps=ARENA").unwrap();
        let machine = Machine { available: Some(1000), arena_in_memory: Some("/m".into()), ..Machine::default() };
        let e = Explanation::of_header(&header, &rules, &Facts::of(&header).load(), machine).unwrap();
        assert_eq!(e.warnings.iter().map(|w| w.code).collect::<Vec<_>>(), ["memory", "arena_in_memory"]);
        assert!(crate::placement::render::html(&e).contains(&format!("Copied into memory: {} of the 1000 B", Bytes(e.totals.arena))));
        assert!(e.warnings[1].message.contains("/m is a file system in memory") && !e.has_unhonoured());
    }

    #[test]
    fn settings_that_come_to_nothing_are_warned_of() {
        let codes = |e: &Explanation| e.warnings.iter().map(|w| (w.code, w.message.clone())).collect::<Vec<_>>();
        let idle = codes(&explained("", |load| load.gpu_layers = Some(99)));
        assert!(idle.len() == 1 && idle[0].0 == "no_device" && idle[0].1.starts_with("99 layers "), "{idle:?}");
        for fine in [None, Some(0)] {
            assert_eq!(codes(&explained("", |load| load.gpu_layers = fine)), []);
        }
        assert_eq!(codes(&explained("", |load| (load.gpu_layers = Some(99), gpu(load)).1)), []);
        let bad = Machine { bad_setting: Some("BERTH_LOG=\"loud\" is not understood".into()), ..Machine::default() };
        let header = Header::from_bytes(&model().bytes()).unwrap();
        let e = Explanation::of_header(&header, &Rules::new(Targets::new([""; 0])), &Facts::of(&header).load(), bad).unwrap();
        assert!(codes(&e)[0].0 == "bad_setting" && codes(&e)[0].1.contains("BERTH_LOG") && e.has_unhonoured(), "{:?}", e.warnings);
    }

    #[test]
    fn a_number_of_layers_that_the_tensors_do_not_have_is_warned_of() {
        const HUGE: &str = "Stock llama.cpp 0.5.0 refuses this file: it has 4000000000 layers, and there is room for 512.";
        for (count, layers, said) in [
            (Some(4_000_000_000), 2, &["llama.block_count says 4000000000 layers, but the tensors have 2.", HUGE][..]),
            (Some(5), 0, &["llama.block_count says 5 layers, but no tensor belongs to one."]),
            (Some(1), 2, &["llama.block_count says 1 layers, but the tensors have 2."]),
            (None, 2, &["llama.block_count gives no number of layers, and the tensors have 2."]),
            (Some(2), 2, &[]),
            (None, 0, &[]),
        ] {
            let mut f = File::new(3).str("general.architecture", "llama").tensor("token_embd.weight", &[32], 0);
            if let Some(count) = count {
                f = f.u32("llama.block_count", count);
            }
            for layer in 0..layers {
                f = f.tensor(&format!("blk.{layer}.attn_q.weight"), &[32, 2], 0);
            }
            let header = Header::from_bytes(&f.bytes()).unwrap();
            let rules = Rules::new(Targets::new([""; 0]));
            let e = Explanation::of_header(&header, &rules, &Facts::of(&header).load(), Machine::default()).unwrap();
            assert_eq!(e.warnings.iter().map(|w| w.message.as_str()).collect::<Vec<_>>(), said, "{count:?}, {layers}");
            assert_eq!(e.has_unhonoured(), !said.is_empty(), "--strict fails as stock does");
        }
    }

    #[test]
    fn layers_that_predict_further_tokens_are_warned_of_where_stock_does_not_load_them() {
        let refused = |what: &str| format!("Stock llama.cpp 0.5.0 refuses this file: nextn_predict_layers says that {what}.");
        let unknown = refused("the last 1 layers predict further tokens, and it asks for none of their tensors in an architecture 'llama'");
        for (architecture, predicting, tensors, said) in [
            ("llama", 0, 4, None),
            ("llama", 1, 4, Some(unknown)),
            // Their tensors are not there, so nobody misses them.
            ("llama", 1, 3, Some("llama.block_count says 4 layers, but the tensors have 3.".to_owned())),
            ("glm4moe", 1, 4, None),
            // Cut off, which is how some files are made smaller.
            ("glm4moe", 1, 3, None),
            ("glm4moe", 1, 2, Some("glm4moe.block_count says 4 layers, but the tensors have 2.".to_owned())),
            ("exaone4", 1, 3, Some("exaone4.block_count says 4 layers, but the tensors have 3.".to_owned())),
            ("glm4moe", 5, 4, Some(refused("5 of its 4 layers predict further tokens"))),
            ("llama", u32::MAX, 4, Some(refused("4294967295 of its 4 layers predict further tokens"))),
        ] {
            let file = File::new(3).str("general.architecture", architecture).u32(&format!("{architecture}.block_count"), 4);
            let file = file.u32(&format!("{architecture}.nextn_predict_layers"), predicting);
            let file = (0..tensors).fold(file, |f, layer| f.tensor(&format!("blk.{layer}.attn_q.weight"), &[32, 2], 0));
            let header = Header::from_bytes(&file.bytes()).unwrap();
            let rules = Rules::new(Targets::new([""; 0]));
            let e = Explanation::of_header(&header, &rules, &Facts::of(&header).load(), Machine::default()).unwrap();
            assert_eq!(
                e.warnings.iter().map(|w| w.message.clone()).collect::<Vec<_>>(),
                Vec::from_iter(said),
                "{architecture} {predicting}"
            );
        }
    }

    #[test]
    fn an_architecture_of_any_length_makes_short_warnings() {
        let long = "x".repeat(1 << 15);
        let file = File::new(3).str("general.architecture", &long).u32(&format!("{long}.block_count"), 5);
        let header = Header::from_bytes(&file.tensor("blk.1.attn_q.weight", &[32, 2], 0).bytes()).unwrap();
        let rules = Rules::new(Targets::new([""; 0]));
        let e = Explanation::of_header(&header, &rules, &Facts::of(&header).load(), Machine::default()).unwrap();
        assert_eq!(e.warnings.iter().map(|w| w.code).collect::<Vec<_>>(), ["stock_refuses", "layer_count"]);
        assert!(e.warnings.iter().all(|w| w.message.len() < 250), "{:?}", e.warnings);
    }

    #[test]
    fn shares_that_nobody_gave_are_said_to_be_assumed() {
        let codes = |devices: usize, assumed_shares, gpu_layers| {
            let e = explained("", |load| {
                (0..devices).for_each(|_| gpu(load));
                (load.assumed_shares, load.gpu_layers) = (assumed_shares, gpu_layers);
            });
            e.warnings.iter().map(|w| w.code).collect::<Vec<_>>()
        };
        assert_eq!(codes(2, true, None), ["shares_assumed"]);
        for (devices, assumed, gpu_layers) in [(1, true, None), (2, false, None), (2, true, Some(0))] {
            assert_eq!(codes(devices, assumed, gpu_layers), [""; 0]);
        }
    }

    #[test]
    fn an_architecture_that_cannot_be_read_is_warned_of() {
        for f in [File::new(3), File::new(3).u32("general.architecture", 7), File::new(3).str("general.architecture", "")] {
            let header = Header::from_bytes(&f.tensor("blk.1.attn_q.weight", &[32, 2], 0).bytes()).unwrap();
            let rules = Rules::new(Targets::new([""; 0]));
            let e = Explanation::of_header(&header, &rules, &Facts::of(&header).load(), Machine::default()).unwrap();
            assert_eq!(e.warnings.iter().map(|w| w.code).collect::<Vec<_>>(), ["no_architecture"]);
        }
    }

    #[test]
    fn a_file_of_an_architecture_that_stock_does_not_know_is_warned_of() {
        let header = Header::from_bytes(&File::new(3).str("general.architecture", "wonder").bytes()).unwrap();
        let rules = Rules::new(Targets::new([""; 0]));
        let e = Explanation::of_header(&header, &rules, &Facts::of(&header).load(), Machine::default()).unwrap();
        let warnings: Vec<_> = e.warnings.iter().map(|w| (w.code, w.message.as_str())).collect();
        assert_eq!(warnings, [("stock_refuses", "Stock llama.cpp 0.5.0 refuses this file: it knows no architecture 'wonder'.")]);
    }

    #[test]
    fn the_4096th_rule_which_stock_cannot_take_is_warned_of() {
        let header = Header::from_bytes(&model().bytes()).unwrap();
        for (count, codes) in [(4095, &[][..]), (4096, &["too_many_rules_for_stock"])] {
            let mut rules = Rules::new(Targets::new([""; 0]));
            rules.n_cpu_moe(count).unwrap();
            let e = Explanation::of_header(&header, &rules, &Facts::of(&header).load(), Machine::default()).unwrap();
            assert_eq!(e.warnings.iter().map(|w| w.code).collect::<Vec<_>>(), codes, "{count}");
        }
        let mut rules = Rules::new(Targets::new([""; 0]));
        assert!(rules.n_cpu_moe(4097).is_err());
    }

    #[test]
    fn wide_rules_and_too_little_memory_are_warned_of() {
        let e = explained(".*=CUDA_Host", |_| {});
        let codes: Vec<_> = e.warnings.iter().map(|w| w.code).collect();
        assert_eq!(codes, ["small_tensors_placed", "memory", "memlock"]);
        assert!(e.warnings[0].message.starts_with("25 norm and router tensors"), "{}", e.warnings[0].message);
        let e = explained("exps=ARENA", |load| load.mmap = false);
        assert!(e.warnings.is_empty(), "an arena is no memory that must be free: {:?}", e.warnings);
    }
}
