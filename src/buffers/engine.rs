//! An arena that an engine fills by itself, piece by piece: one file per layer and NUMA part, say, instead of anonymous memory.
//!
//! Owns: [`EngineArena`], which hands out pieces of its file, or of plain memory where there is none or it is full, and says which.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use super::{arena, permit};
use crate::config;
use crate::error::{Error, Result};
use crate::memory::{HUGE_PAGE, Region, arena as file, pageable::Pageable, round_up};
use crate::report::{self, Fallback, Place, Reason};

/// What reports call it.
const ASKED: &str = "ARENA";

/// Most bytes of a name.
const LONGEST_NAME: usize = 255;

/// An arena and all that was taken from it.
pub struct EngineArena {
    file: Option<Arc<file::Arena>>,
    capacity: usize,
    node: Option<u32>,
    taken: Mutex<Taken>,
    record: Option<report::Id>,
    name: String,
}

#[derive(Default)]
struct Taken {
    pieces: Vec<Region>,
    /// Record of the pieces that did not fit, and their bytes.
    outside: Option<(report::Id, usize)>,
}

impl EngineArena {
    /// An arena of at least `capacity` bytes in a file in `directory`, on a NUMA node if one is given. Without a directory, or where there can
    /// be no file, its pieces are plain memory: without a directory nothing is said of it, otherwise it is reported as a fallback.
    ///
    /// # Errors
    /// If a `BERTH_*` variable has a bad value; for a capacity of 0 and a node that does not exist; in strict mode, if there can be no file.
    pub fn open(directory: Option<&Path>, name: &str, capacity: usize, node: Option<u32>) -> Result<EngineArena> {
        // A bad setting is told at once, and not first where a fallback depends on it.
        config::get()?;
        if capacity == 0 {
            return Err(Error::invalid("an arena of 0 bytes"));
        }
        if name.len() > LONGEST_NAME {
            return Err(Error::invalid(format!("an arena's name of {} bytes; at most {LONGEST_NAME} are allowed", name.len())));
        }
        let capacity = round_up(capacity, HUGE_PAGE)?;
        if let Some(node) = node {
            crate::memory::numa::check(node)?;
        }
        let (file, record) = match directory.map(|path| Self::file(path, capacity)) {
            None => (None, None),
            Some(Ok((file, path))) => (Some(file), Some(report::add_buffer(ASKED, Place::Arena, capacity, Some(path), None, true))),
            Some(Err(fallback)) => {
                permit(ASKED, capacity, &fallback)?;
                (None, Some(report::add_buffer(ASKED, Place::Pageable, capacity, None, Some(fallback), true)))
            }
        };
        if let Some(record) = record {
            report::name_buffer(record, name);
        }
        Ok(EngineArena { file, capacity, node, taken: Mutex::default(), record, name: name.to_owned() })
    }

    fn file(path: &Path, capacity: usize) -> std::result::Result<(Arc<file::Arena>, std::path::PathBuf), Fallback> {
        let directory = file::Directory::open(path, false).map_err(|e| Fallback { reason: Reason::ArenaDirectory, message: e.message })?;
        Ok((arena::file(&directory, capacity, 0)?, directory.path().to_owned()))
    }

    /// `size` bytes that live as long as the arena, zeroed, at a multiple of 2 MiB in its file; and whether they do lie in it.
    ///
    /// # Errors
    /// For 0 bytes, if there is no memory, and, in strict mode, if the arena is full.
    pub fn allocate(&self, size: usize) -> Result<(*mut u8, bool)> {
        if size == 0 {
            return Err(Error::invalid("a piece of 0 bytes"));
        }
        let slice = self.file.as_ref().map(|file| file.slice(size)).transpose();
        let (region, in_file, full) = match slice {
            Ok(Some(slice)) => (Region::from(slice), true, None),
            Ok(None) => (self.plain(size)?, false, None),
            Err(error) => {
                let message = format!("arena '{}' of {} bytes is full: {}", self.name.escape_debug(), self.capacity, error.message);
                let fallback = Fallback { reason: Reason::ArenaFull, message };
                permit(ASKED, size, &fallback)?;
                (self.plain(size)?, false, Some(fallback))
            }
        };
        let base = region.base();
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.pieces.push(region);
        if let Some(fallback) = full {
            // One line for the first piece that does not fit, and the sum of all in the report.
            if let Some((id, bytes)) = &mut taken.outside {
                *bytes += size;
                report::grow_buffer(*id, *bytes);
            } else {
                let id = report::add_buffer(ASKED, Place::Pageable, size, None, Some(fallback), true);
                report::name_buffer(id, &self.name);
                taken.outside = Some((id, size));
            }
        }
        Ok((base, in_file))
    }

    /// Plain memory, on the arena's node.
    fn plain(&self, size: usize) -> Result<Region> {
        let region = Region::from(Pageable::new(size)?);
        match self.node {
            Some(node) => crate::memory::numa::prefer(&region, node)?,
            None => drop(super::numa::wish(&region, super::numa::wished())),
        }
        Ok(region)
    }
}

impl Drop for EngineArena {
    fn drop(&mut self) {
        let taken = self.taken.get_mut().unwrap_or_else(PoisonError::into_inner);
        for id in self.record.into_iter().chain(taken.outside.map(|(id, _)| id)) {
            report::remove_buffer(id);
        }
    }
}
