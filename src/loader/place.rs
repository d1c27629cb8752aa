//! Memory for the tensors of a load.
//!
//! Owns: which tensors share a buffer, their offsets in it, and the chain of what is tried. Must not know: names, rules.

use std::collections::BTreeMap;

use super::{Tensor, is_mapped};
use crate::buffers::{
    Arena, BufferType, CpuMmap, CudaHost, Placed, end_of_load, forget_pages, lock_in_memory, lock_mapping, over_mappings, progress,
    say_what_stays,
};
use crate::config;
use crate::error::{Error, Result, Status};
use crate::gguf::{Model, Part};
use crate::memory::fill::{self, Piece};
use crate::memory::input::Input;
use crate::memory::mapping::FileMapping;
use crate::memory::target::Target as Bytes;
use crate::memory::{ALIGNMENT, Region, pageable::Pageable, round_up};
use crate::placement::{Decision, Load, Memory, Target, after_failure};
use crate::report::{self, Fallback, Place, Reason, filled::How};

/// Memory that tensors of one place share.
pub struct Buffer {
    /// What was asked for.
    pub target: Target,
    /// Where it is.
    pub memory: Memory,
    region: Region,
    /// The mapping that a mapped region lies in.
    mapping: Option<FileMapping>,
    id: report::Id,
}

impl Buffer {
    /// First byte.
    pub fn base(&self) -> *mut u8 {
        self.region.base()
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.region.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.region.is_empty()
    }

    /// Whether the bytes may be written: those of a mapping may not.
    pub fn is_writable(&self) -> bool {
        self.mapping.is_none()
    }

    /// `len` bytes at an address in it, to be filled.
    fn target(&self, data: *mut u8, len: usize) -> Result<Bytes<'_>> {
        let offset = data.addr().checked_sub(self.region.base().addr());
        let target = offset.and_then(|offset| self.region.target(offset, len));
        target.ok_or_else(|| Error::new(Status::Internal, "a tensor that is not inside of its buffer"))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        forget_pages(self.id);
        // Before the mapping that it may lie in.
        drop(std::mem::replace(&mut self.region, Region::empty()));
        say_what_stays();
        report::remove_buffer(self.id);
    }
}

/// What allocation changes in a tensor.
pub(super) struct Change {
    pub(super) tensor: usize,
    pub(super) buffer: usize,
    pub(super) data: *mut u8,
    pub(super) decision: Decision,
}

/// What comes before or after the mapping of tensors.
enum After {
    Nothing,
    /// Memory that could not be had, and what that makes of the decisions.
    Failure(Fallback, Vec<Decision>),
    /// The pages of the mapping are to be locked.
    Lock,
}

/// The result of an allocation.
pub(super) struct Allocation {
    pub(super) buffers: Vec<Buffer>,
    pub(super) changes: Vec<Change>,
}

/// Gets memory for all tensors. On an error everything got so far is given back.
pub(super) fn allocate(model: &Model, load: &Load, tensors: &[Box<Tensor>]) -> Result<Allocation> {
    let mut groups: BTreeMap<(Target, Memory), Vec<usize>> = BTreeMap::new();
    for (index, tensor) in tensors.iter().enumerate() {
        if let (Some(target), Some(memory)) = (&tensor.decision.target, tensor.decision.memory)
            && memory != Memory::Device
        {
            groups.entry((target.clone(), memory)).or_default().push(index);
        }
    }
    let mut all = Allocation { buffers: Vec::new(), changes: Vec::new() };
    for ((target, memory), members) in groups {
        if memory == Memory::Mapped {
            map(model, load, tensors, &target, &members, After::Nothing, &mut all)?;
        } else if memory == Memory::Pinned && load.mmap && over_mappings() {
            map(model, load, tensors, &target, &members, After::Lock, &mut all)?;
        } else {
            copy(model, load, tensors, &target, memory, &members, &mut all)?;
        }
    }
    Ok(all)
}

/// Tensors that get memory of their own, or, if it cannot be had, what the chain gives.
fn copy(
    model: &Model,
    load: &Load,
    tensors: &[Box<Tensor>],
    target: &Target,
    memory: Memory,
    members: &[usize],
    all: &mut Allocation,
) -> Result<()> {
    let alignment = if memory == Memory::Pinned { CudaHost::ALIGNMENT } else { ALIGNMENT };
    let (size, offsets) = layout(tensors, members, alignment)?;
    let strict = config::get()?.strict;
    let attempt = match memory {
        // In strict mode a part is not enough.
        Memory::Pinned => CudaHost::attempt(size).and_then(|p| match p.fallback {
            Some(fallback) if strict => Err(fallback),
            _ => Ok(p),
        }),
        Memory::Arena => Arena::attempt(size),
        _ => CpuMmap::attempt(size),
    };
    let decide = |index: usize| tensors[index].decision.clone();
    let (placed, decisions) = match attempt {
        Ok(placed) => (placed, members.iter().map(|&i| decide(i)).collect::<Vec<_>>()),
        Err(fallback) => {
            let after = |&i: &usize| after_failure(decide(i), load, size as u64, &fallback.message, strict).map_err(Error::from);
            let decisions = members.iter().map(after).collect::<Result<Vec<_>>>()?;
            if decisions.first().is_some_and(is_mapped) {
                return map(model, load, tensors, target, members, After::Failure(fallback, decisions), all);
            }
            let placed = match memory {
                Memory::Pinned => CudaHost::instead(size, fallback)?,
                _ => Placed::pageable(Region::from(Pageable::new(size)?), fallback),
            };
            (placed, decisions)
        }
    };
    keep(tensors, target, memory, members, offsets, placed, decisions, all);
    Ok(())
}

/// Bytes for all of them, and where in those each one starts.
fn layout(tensors: &[Box<Tensor>], members: &[usize], alignment: usize) -> Result<(usize, Vec<usize>)> {
    let mut size = 0usize;
    let mut offsets = Vec::with_capacity(members.len());
    for &index in members {
        offsets.push(size);
        // A tensor without bytes has an address of its own too: ggml wants one in the buffer.
        let padded = round_up(tensors[index].bytes.max(1), alignment)?;
        size = size.checked_add(padded).ok_or_else(|| Error::new(Status::OutOfMemory, "the tensors are larger than an address space"))?;
    }
    Ok((size, offsets))
}

/// Gives tensors the memory that was got for them.
#[expect(clippy::too_many_arguments, reason = "the end of two ways, each of which has all of them")]
fn keep(
    tensors: &[Box<Tensor>],
    target: &Target,
    memory: Memory,
    members: &[usize],
    offsets: Vec<usize>,
    placed: Placed,
    decisions: Vec<Decision>,
    all: &mut Allocation,
) {
    let size = placed.region.len();
    let memory = decisions.first().and_then(|d| d.memory).unwrap_or(memory);
    let id = report::add_buffer(berth_name(target), placed.place, size, placed.file.clone(), placed.fallback.clone(), true);
    placed.follow(id);
    let Placed { region, place, pinned, .. } = placed;
    let mut pinned = (place == Place::PartlyPinned).then_some(pinned);
    for (&tensor, &offset) in members.iter().zip(&offsets) {
        pinned = region.keep_whole(offset, tensors[tensor].bytes).or(pinned);
    }
    if let Some(pinned) = pinned {
        report::pinned(id, pinned);
    }
    lock_in_memory(berth_name(target), id, &region, false);
    for ((&tensor, offset), decision) in members.iter().zip(offsets).zip(decisions) {
        all.changes.push(Change { tensor, buffer: all.buffers.len(), data: region.base().wrapping_add(offset), decision });
        remember(id, &tensors[tensor]);
    }
    all.buffers.push(Buffer { target: target.clone(), memory, region, mapping: None, id });
}

/// The end of the chain: bytes of files that cannot be mapped are read into ordinary memory.
fn read(
    load: &Load,
    tensors: &[Box<Tensor>],
    target: &Target,
    members: &[usize],
    error: Error,
    after: After,
    all: &mut Allocation,
) -> Result<()> {
    let (size, offsets) = layout(tensors, members, ALIGNMENT)?;
    let (fallback, decisions) = match after {
        After::Failure(first, decisions) => (Fallback { message: format!("{}; {}", first.message, error.message), ..first }, decisions),
        After::Nothing | After::Lock => {
            let decisions = members.iter().map(|&i| tensors[i].decision.clone()).collect();
            (Fallback { reason: Reason::MapFailed, message: error.message }, decisions)
        }
    };
    let strict = config::get()?.strict;
    let step = |d: Decision| after_failure(d, load, size as u64, &fallback.message, strict).map_err(Error::from);
    let decisions = decisions.into_iter().map(step).collect::<Result<Vec<_>>>()?;
    let region = Region::from(Pageable::new(size)?);
    let placed = Placed::pageable(region, fallback);
    keep(tensors, target, Memory::Pageable, members, offsets, placed, decisions, all);
    Ok(())
}

/// Tensors whose bytes stay in the files' mappings: one buffer per file, from the first to the last of its tensors.
fn map(
    model: &Model,
    load: &Load,
    tensors: &[Box<Tensor>],
    target: &Target,
    members: &[usize],
    after: After,
    all: &mut Allocation,
) -> Result<()> {
    // All files before the first buffer: what cannot be mapped is read as a whole.
    let map_part = |number: usize| {
        let part = &model.parts()[number];
        let wanted = members.iter().any(|&i| tensors[i].part == number);
        wanted.then(|| FileMapping::of(part.file(), part.path())).transpose()
    };
    let mut mappings = match (0..model.parts().len()).map(map_part).collect::<Result<Vec<_>>>() {
        Ok(mappings) => mappings,
        Err(error) => return read(load, tensors, target, members, error, after, all),
    };
    let is_to_be_locked = matches!(after, After::Lock);
    let (fallback, decisions) = match after {
        After::Failure(fallback, decisions) => (Some(fallback), Some(decisions)),
        After::Nothing | After::Lock => (None, None),
    };
    for (number, part) in model.parts().iter().enumerate() {
        let here: Vec<usize> = (0..members.len()).filter(|m| tensors[members[*m]].part == number).collect();
        if here.is_empty() {
            continue;
        }
        // Tensors without bytes may stand anywhere, and behind the last byte of the file too.
        let full = here.iter().map(|m| &tensors[members[*m]]).filter(|t| t.bytes > 0);
        let first = full.clone().map(|t| t.offset).min().unwrap_or(0);
        let last = full.map(|t| t.offset.saturating_add(t.bytes as u64)).max().unwrap_or(0);
        let Some(mapping) = mappings[number].take() else { continue };
        // The file was checked when its header was read; it may have been cut since.
        let whole = mapping.bytes();
        if (whole.len() as u64) < last {
            let message = format!("{} ends at byte {}, but {last} are needed: it was truncated", part.path().display(), whole.len());
            return Err(Error::new(Status::BadFile, message));
        }
        let base = whole.as_ptr().cast_mut();
        // What holds nothing but tensors without bytes is the file.
        let (start, len) = if first < last { (first as usize, (last - first) as usize) } else { (0, whole.len()) };
        // SAFETY: the range lies in the mapping, which the buffer keeps.
        let region = unsafe { Region::borrowed(base.wrapping_add(start), len, false) };
        // What lies between them belongs to others.
        let bytes = here.iter().map(|m| tensors[members[*m]].bytes).sum();
        let id = report::add_buffer(berth_name(target), Place::Mapped, bytes, Some(part.path().to_owned()), fallback.clone(), true);
        let mut not_locked = None;
        if is_to_be_locked {
            not_locked = lock_mapping(id, &region).err();
            match &not_locked {
                Some(fallback) => report::fell_back(id, fallback.clone()),
                None => report::pinned(id, bytes),
            }
        }
        lock_in_memory(berth_name(target), id, &region, false);
        // From here on it is the buffer's to remove the record.
        all.buffers.push(Buffer { target: target.clone(), memory: Memory::Mapped, region, mapping: Some(mapping), id });
        for m in here {
            let tensor = members[m];
            let mut decision = decisions.as_ref().map_or_else(|| tensors[tensor].decision.clone(), |d| d[m].clone());
            if let Some(fallback) = &not_locked {
                let strict = config::get()?.strict;
                decision = after_failure(decision, load, bytes as u64, &fallback.message, strict).map_err(Error::from)?;
            } else if is_to_be_locked {
                // Not a copy of them.
                decision.memory = Some(Memory::Mapped);
            }
            // One without bytes has an address in the buffer too.
            let offset = if tensors[tensor].bytes > 0 { tensors[tensor].offset as usize } else { start };
            let data = base.wrapping_add(offset);
            all.changes.push(Change { tensor, buffer: all.buffers.len() - 1, data, decision });
            remember(id, &tensors[tensor]);
        }
    }
    Ok(())
}

/// Reads the bytes of every tensor that was copied out of its file.
pub(super) fn fill(model: &Model, tensors: &[Box<Tensor>], buffers: &[Buffer], progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<()> {
    let direct = config::get()?.fill == config::Fill::Auto;
    let open = |part: &Part| -> Result<Input> {
        let again = |e: std::io::Error| Error::os(format_args!("open {} again", part.path().display()), &e);
        Ok(Input::new(part.file().try_clone().map_err(again)?, part.path(), direct))
    };
    let inputs = model.parts().iter().map(open).collect::<Result<Vec<_>>>()?;
    let copied: Vec<(&Tensor, &Buffer)> =
        tensors.iter().filter(|t| t.is_copied()).filter_map(|t| Some((&**t, buffers.get(t.buffer?)?))).collect();
    let pieces = copied
        .iter()
        .map(|(t, buffer)| Ok(Piece { input: &inputs[t.part], offset: t.offset, target: buffer.target(t.data, t.bytes)? }))
        .collect::<Result<Vec<_>>>()?;
    let mut said = progress::Fill::begin(inputs.first().map(Input::path));
    // SAFETY: each piece is a tensor's own part of a buffer that this loader allocated, is writable, and is handed out to read only.
    let done = unsafe {
        fill::fill(&pieces, &mut |done, total| {
            said.at(done);
            progress(done, total)
        })
    }?;
    for ((tensor, buffer), done) in copied.iter().zip(done) {
        if direct {
            // Two copies must not stay in memory.
            inputs[tensor.part].drop_cached(tensor.offset, tensor.bytes);
        }
        report::filled(buffer.id, How::Read { bytes: done.bytes, direct: done.direct });
    }
    end_of_load();
    report::changed();
    Ok(())
}

/// The name of a target in the report.
fn berth_name(target: &Target) -> &'static str {
    match target {
        Target::CpuMmap => CpuMmap::name(),
        Target::CudaHost | Target::StockHost(_) => CudaHost::name(),
        Target::Arena => Arena::name(),
        Target::Cpu | Target::Device(_) => "CPU",
    }
}

fn remember(id: report::Id, tensor: &Tensor) {
    let name = tensor.name.to_string_lossy().into_owned();
    let type_name = crate::gguf::GgmlType(tensor.type_number).info().map_or("other", |t| t.name);
    report::add_tensor(id, report::Tensor { name, type_name, bytes: tensor.bytes });
}
