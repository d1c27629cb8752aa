//! The override-aware `create_tensor` path for loaders that are not llama.cpp: open, ask for tensors, allocate, fill.
//!
//! Owns: the order of these steps, which tensors share a buffer, and what becomes of memory that cannot be had (page-locked, then the file's
//! mapping, then pageable). Must not know: ggml, C.

mod place;
mod tensor;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use crate::error::{Error, Result, Status};
use crate::gguf::{Header, Model};
use crate::placement::{self, DecideError, Decision, Facts, Flags, Load, Memory, Repack, Rules};
use crate::report;
use crate::text::Name;

pub use place::Buffer;
pub use tensor::Tensor;

/// How far a load has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    /// Tensors may be created.
    Creating,
    /// Every tensor has its memory.
    Allocated,
    /// Every tensor has its bytes.
    Filled,
}

/// A model on its way into memory.
pub struct Loader {
    model: Model,
    rules: Arc<Rules>,
    load: Load,
    stage: Stage,
    /// Boxed: their addresses are given out.
    #[expect(clippy::vec_box, reason = "a tensor's address must not change when another is created")]
    tensors: Vec<Box<Tensor>>,
    by_name: HashMap<String, Vec<usize>>,
    buffers: Vec<Buffer>,
}

impl Loader {
    /// Opens a model (its first part, if it is split) and reads its headers. Layers and experts that `load` leaves at 0 are taken from the
    /// model's metadata.
    ///
    /// # Errors
    /// [`Status::Io`] or [`Status::BadFile`], naming file, offset and fault; [`Status::InvalidArgument`] if neither `load` nor the model says which
    /// layers go to devices, or if `load` lets weights be interleaved: this loader hands out the file's order, and must not call it another.
    pub fn open(path: &Path, rules: Arc<Rules>, load: Load) -> Result<Loader> {
        if load.repack != Repack::Off {
            return Err(Error::invalid("a loader keeps every tensor in the file's order: repack must be 0 (berth_decide alone takes it)"));
        }
        let model = Model::open(path)?;
        let load = with_model(load, model.header());
        load.check_layers().map_err(|e| Error::invalid(format!("the model does not say how many layers it has: {e}")))?;
        Ok(Loader { model, rules, load, stage: Stage::Creating, tensors: Vec::new(), by_name: HashMap::new(), buffers: Vec::new() })
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The rules, with their matches counted so far.
    pub fn rules(&self) -> &Rules {
        &self.rules
    }

    /// The circumstances of the load.
    pub fn load(&self) -> &Load {
        &self.load
    }

    /// Decides where the tensor `name` goes and remembers that it is wanted. `None` if it is not made: it is missing and not required, or
    /// skipped. With [`Flags::duplicated`] a second use of a tensor in the same place is the same tensor. The result is its index in
    /// [`Loader::tensors`]. The rule that won counts a match for every tensor that is new there.
    ///
    /// # Errors
    /// [`Status::NotFound`] if it is required and missing; [`Status::InvalidArgument`] if it was created before, or after
    /// [`Loader::allocate`].
    pub fn create_tensor(&mut self, name: &str, flags: Flags) -> Result<Option<usize>> {
        if self.stage != Stage::Creating {
            return Err(Error::invalid(format!("create tensor {}: memory has been allocated already", Name(name))));
        }
        let found = self.model.tensor(name);
        let asked = found.map_or_else(|| placement::Tensor::missing(name), |f| f.info.into()).with(flags);
        let decision = placement::decide(&asked, &self.rules, &self.load)?;
        let (Some(found), Some(_)) = (found, &decision.target) else { return Ok(None) };
        let same = self.by_name.get(name).map_or(&[][..], Vec::as_slice);
        if let Some(index) = same.iter().copied().find(|i| shares_memory(&self.tensors[*i].decision, &decision)) {
            if flags.duplicated {
                return Ok(Some(index));
            }
            return Err(Error::invalid(format!("tensor {} was created before; a second use is asked for as duplicated", Name(name))));
        }
        let tensor = Tensor::new(found, decision)?;
        tensor.decision.count(&self.rules);
        let index = self.tensors.len();
        self.by_name.entry(name.to_owned()).or_default().push(index);
        self.tensors.push(Box::new(tensor));
        Ok(Some(index))
    }

    /// Every tensor created so far, in the order of their creation.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &Tensor> {
        self.tensors.iter().map(|t| &**t)
    }

    /// Gets memory for every tensor: one buffer per place and, for bytes that stay in the mapping, per file. Tensors on devices get none.
    ///
    /// # Errors
    /// If memory cannot be had; in strict mode also if it can only be had elsewhere. Then nothing is allocated, and it may be tried again.
    pub fn allocate(&mut self) -> Result<()> {
        if self.stage != Stage::Creating {
            return Err(Error::invalid("memory has been allocated already"));
        }
        self.model.check_files()?;
        let placed = place::allocate(&self.model, &self.load, &self.tensors)?;
        for change in placed.changes {
            let tensor = &mut self.tensors[change.tensor];
            tensor.data = change.data;
            tensor.buffer = Some(change.buffer);
            tensor.decision = change.decision;
        }
        self.buffers = placed.buffers;
        self.stage = Stage::Allocated;
        report::loaded();
        Ok(())
    }

    /// The memory, after [`Loader::allocate`].
    pub fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }

    /// Reads the bytes of every tensor that was copied out of the mapping. `progress` gets the bytes read and the bytes to read, and cancels by
    /// returning false; then, or after an error, this may be called again.
    ///
    /// # Errors
    /// [`Status::Cancelled`]; naming the file, [`Status::BadFile`] if it has shrunk or was written to, [`Status::Io`] if it cannot be read.
    pub fn fill(&mut self, progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<()> {
        if self.stage == Stage::Creating {
            return Err(Error::invalid("memory must be allocated before it is filled"));
        }
        self.model.check_files()?;
        let read = place::fill(&self.model, &self.tensors, &self.buffers, progress);
        // A file that was cut is the same error whether a read ran into its end or all were done before.
        if !read.as_ref().is_err_and(|e| e.status == Status::Cancelled) {
            self.model.check_files()?;
        }
        read?;
        self.stage = Stage::Filled;
        Ok(())
    }

    /// Whether every tensor has its bytes.
    pub fn is_filled(&self) -> bool {
        self.stage == Stage::Filled
    }
}

/// Fills in what the model's metadata says and the caller left at 0.
fn with_model(load: Load, header: &Header) -> Load {
    let facts = Facts::of(header);
    let or_model = |given: u32, model: u32| if given == 0 { model } else { given };
    Load {
        layers: or_model(load.layers, facts.counted_layers),
        experts: or_model(load.experts, facts.experts),
        experts_used: or_model(load.experts_used, facts.experts_used),
        ..load
    }
}

/// Whether two uses of one tensor lie in the same place, so that one copy serves both.
fn shares_memory(a: &Decision, b: &Decision) -> bool {
    (&a.target, a.memory) == (&b.target, b.memory)
}

impl From<crate::gguf::Error> for Error {
    fn from(error: crate::gguf::Error) -> Error {
        let status = match error.kind {
            crate::gguf::ErrorKind::Io { kind: std::io::ErrorKind::NotFound, .. } | crate::gguf::ErrorKind::MissingPart { .. } => {
                Status::NotFound
            }
            crate::gguf::ErrorKind::Io { .. } => Status::Io,
            _ => Status::BadFile,
        };
        let converted = Error::new(status, error.to_string());
        match error.place() {
            Some(offset) => converted.at(crate::error::Position::Byte(offset)),
            None => converted,
        }
    }
}

impl From<DecideError> for Error {
    fn from(error: DecideError) -> Error {
        let status = match error {
            DecideError::Missing(_) => Status::NotFound,
            DecideError::Strict { .. } => Status::Unsupported,
            DecideError::NoMemory { .. } => Status::OutOfMemory,
            _ => Status::InvalidArgument,
        };
        Error::new(status, error.to_string())
    }
}

/// Whether a decision keeps the bytes in the file's mapping.
fn is_mapped(decision: &Decision) -> bool {
    decision.memory == Some(Memory::Mapped)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::testing::File;
    use crate::placement::{Device, Targets};

    #[test]
    fn layers_that_neither_the_load_nor_the_model_tells_are_an_error_with_devices() {
        let dir = tempfile::tempdir().unwrap();
        let model = |name: &str, file: File| {
            let path = dir.path().join(name);
            std::fs::write(&path, file.tensor("blk.0.attn_q.weight", &[32], 0).bytes()).unwrap();
            path
        };
        let silent = model("silent.gguf", File::new(3).str("general.architecture", "x"));
        let telling = model("telling.gguf", File::new(3).str("general.architecture", "x").u32("x.block_count", 2));
        let on = |layers, gpu_layers| Load { devices: vec![Device::new("CUDA0", None, 1.0)], layers, gpu_layers, ..Load::default() };
        let open = |path: &Path, load: Load| Loader::open(path, Arc::new(Rules::new(Targets::new(["CUDA0"]))), load).map(|_| ());
        for load in [on(0, None), on(0, Some(1))] {
            let error = open(&silent, load.clone()).unwrap_err();
            assert!(error.status == Status::InvalidArgument && error.message.contains("set layers"), "{error}");
            open(&telling, load).unwrap();
        }
        for load in [on(4, None), on(0, Some(0)), Load::default()] {
            open(&silent, load).unwrap();
        }
    }

    #[test]
    fn a_tensor_without_bytes_may_stand_anywhere_and_have_rows_of_any_length() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        let mut file = File::new(3).str("general.architecture", "x").tensor("full", &[32], 0);
        for (name, dims, offset) in [("behind", &[32, 0][..], 1 << 40), ("wide", &[1 << 62, 0], 0)] {
            file = file.raw_tensor(name.as_bytes(), dims, 0, offset);
        }
        file.data_bytes = Some(128);
        std::fs::write(&path, file.bytes()).unwrap();
        let names = ["full", "behind", "wide"];
        for (text, wanted) in [("", &names[..]), ("", &names[1..]), (".*=ARENA", &names[..])] {
            let mut rules = Rules::new(Targets::new([""; 0]));
            if !text.is_empty() {
                rules.parse(text).unwrap();
            }
            let mut loader = Loader::open(&path, Arc::new(rules), Load::default()).unwrap();
            wanted.iter().for_each(|name| assert!(loader.create_tensor(name, Flags::default()).unwrap().is_some(), "{name}"));
            loader.allocate().unwrap_or_else(|e| panic!("{text} {wanted:?}: {e}"));
            for t in loader.tensors() {
                let buffer = &loader.buffers()[t.buffer.unwrap()];
                let at = t.data.addr().checked_sub(buffer.base().addr()).unwrap();
                assert!(at + t.bytes <= buffer.len(), "{:?} lies in its buffer", t.name);
            }
            loader.fill(&mut |_, _| true).unwrap();
        }
    }
}
