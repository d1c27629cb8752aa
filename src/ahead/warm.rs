//! `BERTH_WARM`: when a model has been loaded, its weights that are no experts are read; experts stay as they are.
//!
//! Owns: which mappings are models, when that is worth it, and which of their tensors are read. Must not know: ggml, buffers.
//!
//! A host that maps a model larger than memory reads all of it once (`MAP_POPULATE`), and what comes first in the file, embeddings and the
//! output matrix, is pushed out again by the experts. Every token needs it.
//!
//! The table of token vectors is not read: a token needs one row of it. The kernel is told so, since a page fault would otherwise read as much
//! around the row as the device reads ahead, once per token. Where the same table is the output matrix, it is read like the others.

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use crate::config::{self, ReadAhead, Warm};
use crate::gguf::Header;
use crate::log;
use crate::memory::mapping::{self, Mapped};
use crate::memory::residency::Calls;
use crate::memory::system;
use crate::placement::{Class, Tensor};
use crate::report::ahead::{COUNTS, Counts};

const TOKENS: &str = "token_embd.weight";
const OUTPUT: &str = "output.weight";

/// What is done with bytes of a model file, by offsets in it.
#[derive(Debug, Default, PartialEq, Eq)]
struct Plan {
    /// To be read.
    read: Vec<Range<u64>>,
    /// Of which single rows are read.
    rows: Vec<Range<u64>>,
    /// Bytes of all weights, and of experts.
    bytes: u64,
    experts: u64,
}

/// A model has been loaded, if any has: reads what the settings ask for, once for every model file.
pub fn loaded() {
    let Ok(config) = config::get() else { return };
    let auto = config.warm == Warm::Auto;
    // Nobody looks for experts then, and nothing else is looked for either.
    let idle = auto && (config.read_ahead == ReadAhead::Off || !config.fuse);
    if config.warm == Warm::Off || idle {
        return;
    }
    let maps = mapping::files();
    let room = if auto { system::room() } else { 0 };
    // Most models fit, and most mapped files are none: then no file is opened.
    if auto && maps.iter().map(|(_, m)| m.left).fold(0, u64::saturating_add) <= room {
        return;
    }
    // What is no model has no header.
    let models = new_files(&maps).into_iter().filter_map(|path| Some((path, plan(&Header::open(path).ok()?))));
    let models: Vec<(&Path, Plan)> = models.collect();
    if auto && !is_worth_it(models.iter().map(|(_, plan)| plan), room) {
        return;
    }
    for (path, plan) in &models {
        let asked = warm(&Calls::KERNEL, plan, &maps, path);
        if asked > 0 {
            Counts::add(&COUNTS.warmed_bytes, asked as u64);
            log::info!(
                "BERTH_WARM: {:.0} MiB of weights that are no experts read from {}",
                asked as f64 / f64::from(1 << 20),
                path.display()
            );
        }
    }
}

/// Whether a model, in one file or several, has experts and is larger than memory, and its other weights leave half of it to the experts.
fn is_worth_it<'a>(plans: impl Iterator<Item = &'a Plan> + Clone, room: u64) -> bool {
    let sum = |of: fn(&Plan) -> u64| plans.clone().map(of).fold(0, u64::saturating_add);
    let read = sum(|p| p.read.iter().map(|r| r.end - r.start).sum());
    let experts = sum(|p| p.experts);
    experts > 0 && sum(|p| p.bytes) > room && read <= room / 2
}

/// Inode and device of a file.
type Identity = (u64, (u32, u32));

/// Mapped files that were not there the last time.
fn new_files(maps: &[(usize, Mapped)]) -> Vec<&Path> {
    static SEEN: Mutex<Option<HashSet<Identity>>> = Mutex::new(None);
    let of = |m: &Mapped| (m.inode, m.device);
    let mut guard = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    let seen = guard.get_or_insert_default();
    let new = maps.iter().filter(|(_, m)| !seen.contains(&of(m)));
    let mut paths: Vec<&Path> = new.filter_map(|(_, m)| m.file.as_deref()).collect();
    paths.dedup();
    // A model that is loaded again, after it was unmapped, is read again.
    *seen = maps.iter().map(|(_, m)| of(m)).collect();
    paths
}

fn plan(header: &Header) -> Plan {
    let mut plan = Plan::default();
    let apart = header.tensor(OUTPUT).is_some();
    for t in header.tensors() {
        let range = t.offset..t.offset.saturating_add(t.bytes);
        let expert = matches!(Tensor::from(t).class, Class::Expert);
        plan.bytes = plan.bytes.saturating_add(t.bytes);
        plan.experts = plan.experts.saturating_add(if expert { t.bytes } else { 0 });
        if t.name == TOKENS && apart {
            plan.rows.push(range);
        } else if !expert {
            match plan.read.last_mut() {
                // With no more than padding between them they are one request.
                Some(last) if range.start >= last.end && range.start - last.end < 4096 => last.end = range.end,
                _ => plan.read.push(range),
            }
        }
    }
    plan
}

/// Asks for what the plan says, in the mappings of the file; returns the bytes that were missing.
fn warm(calls: &Calls, plan: &Plan, maps: &[(usize, Mapped)], path: &Path) -> usize {
    let of_file = || maps.iter().filter(|(_, m)| m.file.as_deref() == Some(path));
    let mut asked = 0;
    for range in plan.rows.iter().flat_map(|r| of_file().filter_map(|m| within(r, m))) {
        // A wish; without it the kernel reads more.
        let _ = calls.at_random(range);
    }
    for range in plan.read.iter().flat_map(|r| of_file().filter_map(|m| within(r, m))) {
        let missing = calls.missing(range.clone()).unwrap_or(Some((range.clone(), range.len())));
        if let Some((range, bytes)) = missing
            && calls.ask(range).is_ok()
        {
            asked += bytes;
        }
    }
    asked
}

/// Where a part of a file lies in a mapping of it, as far as it does.
fn within(range: &Range<u64>, (start, mapped): &(usize, Mapped)) -> Option<Range<usize>> {
    let (first, last) = (range.start.max(mapped.offset), range.end.min(mapped.offset.saturating_add(mapped.left)));
    let at = |offset: u64| start.checked_add(usize::try_from(offset - mapped.offset).ok()?);
    if first < last { Some(at(first)?..at(last)?) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::testing::File;
    use crate::memory::mapping::FileMapping;
    use crate::memory::system;

    const F32: u32 = 0;

    fn file(output: bool) -> File {
        let mut file = File::new(3).str("general.architecture", "qwen3moe");
        if output {
            file = file.tensor(OUTPUT, &[1024, 256], F32);
        }
        file = file.tensor("output_norm.weight", &[1024], F32).tensor(TOKENS, &[1024, 512], F32);
        file = file.tensor("blk.0.attn_q.weight", &[1024, 512], F32).tensor("blk.0.ffn_gate_inp.weight", &[1024, 64], F32);
        file.tensor("blk.0.ffn_gate_exps.weight", &[1024, 256, 4], F32).tensor("blk.0.ffn_norm.weight", &[1024], F32)
    }

    #[test]
    fn dense_weights_are_read_and_experts_and_the_token_table_are_not() {
        let header = Header::from_bytes(&file(true).bytes()).unwrap();
        let at = |name: &str| header.tensor(name).map(|t| t.offset..t.offset + t.bytes).unwrap();
        let plan = plan(&header);
        let read = [at(OUTPUT).start..at("output_norm.weight").end, at("blk.0.attn_q.weight").start..at("blk.0.ffn_gate_inp.weight").end];
        assert_eq!(plan.read, [&read[..], &[at("blk.0.ffn_norm.weight")]].concat());
        assert_eq!(plan.rows, [at(TOKENS)]);
    }

    #[test]
    fn a_token_table_that_is_the_output_matrix_is_read() {
        let header = Header::from_bytes(&file(false).bytes()).unwrap();
        let plan = plan(&header);
        assert!(plan.rows.is_empty());
        assert!(plan.read[0].contains(&header.tensor(TOKENS).unwrap().offset));
    }

    #[test]
    fn a_model_is_warmed_by_itself_only_if_it_has_experts_and_does_not_fit() {
        let plan = |bytes: u64, experts: u64, read: u64| Plan {
            bytes,
            experts,
            read: std::iter::once(4096..4096 + read).collect(),
            rows: Vec::new(),
        };
        let worth = |plans: &[Plan], room| is_worth_it(plans.iter(), room);
        assert!(worth(&[plan(1000, 800, 200)], 999));
        assert!(!worth(&[plan(1000, 800, 200)], 1000), "it fits");
        assert!(!worth(&[plan(1000, 0, 1000)], 999), "no experts");
        assert!(!worth(&[plan(1000, 400, 600)], 999), "the rest alone fills memory");
        assert!(worth(&[plan(600, 500, 100), plan(600, 600, 0)], 999), "in two files");
        assert!(!worth(&[], 0) && !worth(&[plan(u64::MAX, 1, 600), plan(u64::MAX, 1, 600)], 999));
    }

    #[test]
    fn what_a_model_has_is_summed_up() {
        let plan = plan(&Header::from_bytes(&file(true).bytes()).unwrap());
        assert_eq!(plan.experts, 1024 * 256 * 4 * 4);
        assert_eq!(plan.bytes, plan.experts + 4 * 1024 * (256 + 1 + 512 + 512 + 64 + 1));
    }

    #[test]
    fn parts_of_a_file_are_found_in_what_is_mapped_of_it() {
        let mapped = |offset: u64, left: u64| Mapped { writable: false, shared: true, file: None, offset, device: (0, 0), inode: 1, left };
        let map = (0x10_0000, mapped(0x4000, 0x8000));
        for (range, want) in [
            (0x5000..0x6000, Some(0x10_1000..0x10_2000)),
            (0..0x4800, Some(0x10_0000..0x10_0800)),
            (0xb000..0xf000, Some(0x10_7000..0x10_8000)),
            (0..0x4000, None),
            (0xc000..0xd000, None),
        ] {
            assert_eq!(within(&range, &map), want, "{range:x?}");
        }
    }

    #[test]
    fn what_the_plan_says_comes_into_memory_and_nothing_else() {
        let path = std::env::temp_dir().join(format!("berth-warm-{}.gguf", std::process::id()));
        std::fs::write(&path, file(true).bytes()).unwrap();
        // Reading the header brings what the disk reads ahead.
        let header = Header::open(&path).unwrap();
        let open = std::fs::File::open(&path).unwrap();
        system::drop_cached(&open).unwrap();
        let map = FileMapping::of(&open, &path.canonicalize().unwrap()).unwrap();
        let start = map.bytes().as_ptr().addr();
        let at = |name: &str| {
            let t = header.tensor(name).unwrap();
            // Pages at the edges are shared with neighbours.
            start + t.offset as usize + 4096..start + (t.offset + t.bytes) as usize - 4096
        };
        let calls = Calls::KERNEL;
        let missing = |name: &str| calls.missing(at(name)).unwrap().map_or(0, |m| m.1);
        // In a file system in memory nothing is ever missing.
        if missing("blk.0.ffn_gate_exps.weight") > 0 {
            let maps = mapping::files();
            let asked = warm(&calls, &plan(&header), &maps, &path.canonicalize().unwrap());
            assert!(asked >= (1024 * 256 + 1024 * 512) * 4, "{asked}");
            for name in [OUTPUT, "blk.0.attn_q.weight"] {
                assert_eq!(calls.wait(at(name)), crate::memory::residency::Wait::There);
                assert_eq!(missing(name), 0, "{name}");
            }
            for name in [TOKENS, "blk.0.ffn_gate_exps.weight"] {
                assert!(missing(name) > 0, "{name}");
            }
            assert_eq!(warm(&calls, &plan(&header), &maps, &path.canonicalize().unwrap()), 0, "all is there by now");
        }
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_file_is_new_once_and_again_after_it_was_unmapped() {
        let mapped = |inode: u64, path: &str| {
            let file = Some(path.into());
            (0, Mapped { writable: false, shared: true, file, offset: 0, device: (9, 9), inode, left: 1 })
        };
        let (a, b) = (mapped(1, "/a.gguf"), mapped(2, "/b.gguf"));
        let new = |maps: &[(usize, Mapped)]| new_files(maps).iter().map(|p| p.display().to_string()).collect::<Vec<_>>();
        assert_eq!(new(&[a.clone(), a.clone()]), ["/a.gguf"]);
        assert_eq!(new(&[a.clone(), b.clone()]), ["/b.gguf"]);
        assert_eq!(new(std::slice::from_ref(&b)), [""; 0]);
        assert_eq!(new(&[a, b]), ["/a.gguf"]);
    }
}
