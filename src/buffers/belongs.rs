//! What belongs to a buffer whose bytes are kept: the files of the model, the file of an earlier start, its name.
//!
//! Owns: how each is found. Must not know: when it is looked for ([`super::lasting`]).

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use crate::log;
use crate::memory::HUGE_PAGE;
use crate::memory::arena::Arena;
use crate::memory::lasting::header::{Entry, HEADER, Table};
use crate::memory::lasting::model::{Model, Watched};
use crate::memory::lasting::store::{Kept, Store};
use crate::memory::lasting::{Refusal, Why};
use crate::memory::origin::{self, MappedFile, NoOrigin, Origin};

/// Longest part of a file's name that comes from the model's.
const STEM: usize = 80;

/// The model's files as they are mapped here, and what was said of them before anything was read.
pub(super) type Files = Vec<(Arc<MappedFile>, Watched)>;

/// A tensor of a buffer.
pub(super) struct Tensor {
    pub(super) name: String,
    pub(super) bytes: usize,
    /// Which file of the model, and the offset there.
    pub(super) origin: Option<(usize, u64)>,
    pub(super) set: bool,
}

/// Makes room on a full disk, if that is possible.
pub(super) fn clear(store: &Store, bytes: usize, limit: Option<u64>) -> bool {
    let needed = bytes.saturating_add(HEADER).saturating_add(HUGE_PAGE) as u64;
    let gone = store.make_space(needed, limit);
    gone.iter().for_each(|(name, why)| log::info!("{name} was removed, because its disk is full: {why}"));
    !gone.is_empty()
}

/// A file for a buffer of that size whose model is mapped in this process.
pub(super) fn find(store: &Store, bytes: usize) -> Option<(Arc<Arena>, Kept, Files)> {
    store.names().iter().find_map(|name| {
        let kept = store.open(name).ok().filter(|k| k.table.buffer == bytes as u64)?;
        let files = files(&kept).ok()?;
        Some((kept.map().ok()?, kept, files))
    })
}

/// The files that it was made of, if all of them are mapped in this process and have not changed.
pub(super) fn files(kept: &Kept) -> Result<Files, Refusal> {
    let one = |model: &Model| {
        let unmapped = |why: NoOrigin| refused(&why, Path::new(&model.path));
        let watched = watch(origin::mapped(Path::new(&model.path)).map_err(unmapped)?)?;
        model.check(&watched.0)?;
        Ok(watched)
    };
    kept.table.models.iter().map(one).collect()
}

pub(super) fn watch(file: Arc<MappedFile>) -> Result<(Arc<MappedFile>, Watched), Refusal> {
    let watched = Watched::new(&file)?;
    Ok((file, watched))
}

pub(super) fn origin_of(source: *const u8, len: usize, last: Option<&Arc<MappedFile>>) -> Result<Origin, Refusal> {
    origin::behind(source, len, last, false).map_err(|why| refused(&why, Path::new("the model")))
}

fn refused(why: &NoOrigin, path: &Path) -> Refusal {
    let path = path.display();
    match why {
        NoOrigin::Memory => Refusal::new(Why::NoFile, format!("{path} is not mapped by the host")),
        NoOrigin::Changeable => Refusal::new(Why::NoFile, format!("the host's mapping of {path} may differ from the file")),
        NoOrigin::Gone(message) => Refusal::new(Why::ModelGone, message.clone()),
        NoOrigin::Truncated { path, size, .. } => {
            Refusal::new(Why::ModelChanged, format!("{} was truncated to {size} bytes while it was mapped", path.display()))
        }
    }
}

pub(super) fn entry(table: &Table, offset: usize, bytes: usize) -> Option<&Entry> {
    let at = table.tensors.binary_search_by_key(&(offset as u64), |t| t.offset).ok()?;
    Some(&table.tensors[at]).filter(|t| t.bytes == bytes as u64)
}

/// One for each model and each choice of tensors: it tells people which model, and programs whether it is the same.
pub(super) fn name(origin: &Origin, tensors: &BTreeMap<usize, Tensor>) -> String {
    let path = origin.file.input.path();
    let plain = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
    let stem: String = path.file_stem().unwrap_or_default().to_string_lossy().chars().take(STEM).map(plain).collect();
    let mut layout = crc32fast::Hasher::new();
    for (offset, t) in tensors {
        layout.update(format!("{offset} {} {}\n", t.bytes, t.name).as_bytes());
    }
    format!("{stem}-{:08x}{:08x}.arena", crc32fast::hash(path.as_os_str().as_bytes()), layout.finalize())
}
