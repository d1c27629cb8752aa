//! Memory regions dressed as ggml buffer types: `CPU_MMAP`, `CUDA_Host`, `ARENA`; and arenas that an engine fills by itself.
//!
//! Owns: what each type allocates and how it falls back, and the contents of a buffer. Must not know: devices, graphs, rules.
//! All three are host memory in ggml's raw layout, so every backend that reads host memory reads them without a copy.

mod arena;
mod belongs;
mod cpu_mmap;
mod cuda_host;
mod engine;
mod fill;
mod hold;
mod lasting;
mod numa;
pub mod progress;
mod reading;
mod tensors;
mod vtable;

pub use arena::Arena;
pub use cpu_mmap::CpuMmap;
pub use cuda_host::{CudaHost, limit as pin_limit, over_mappings, switched_off as pin_switched_off};
pub use engine::EngineArena;
pub use fill::end as end_of_load;
pub use hold::{loaded, lock_in_memory, lock_mapping, say_what_stays};
pub use numa::forget as forget_pages;
pub use vtable::{buffer_type, from_host_ptr, over_region};

use std::ffi::CStr;
use std::path::PathBuf;
use std::sync::Arc;

use crate::config;
use crate::error::{Error, Result, Status};
use crate::memory::{ALIGNMENT, Region, pageable::Pageable};
use crate::report::{self, Fallback, Place};

/// A region, and what is to be told about it.
pub struct Placed {
    /// The bytes.
    pub region: Region,
    /// Where they lie.
    pub place: Place,
    /// File behind them.
    pub file: Option<PathBuf>,
    /// Why they do not lie where they should.
    pub fallback: Option<Fallback>,
    /// How many of them are page-locked, where that is a part.
    pub pinned: usize,
    /// What decides whether they are kept for the next start.
    lasting: Option<Arc<lasting::Lasting>>,
    /// Why the kernel does not take the wish for NUMA nodes.
    refused: Option<String>,
}

/// A kind of memory that tensors can be put in.
pub trait BufferType: Sync + 'static {
    /// Name, as typed in `-ot`.
    const NAME: &'static CStr;

    /// Alignment of tensors in it, in bytes.
    const ALIGNMENT: usize = ALIGNMENT;

    /// At least `size` zeroed or unspecified bytes (`size` > 0) of this kind, aligned to [`Self::ALIGNMENT`].
    ///
    /// # Errors
    /// Why there is none.
    fn attempt(size: usize) -> std::result::Result<Placed, Fallback>;

    /// The same for a buffer of the host, which may be kept for the next start.
    ///
    /// # Errors
    /// Why there is none.
    fn attempt_for_host(size: usize) -> std::result::Result<Placed, Fallback> {
        Self::attempt(size)
    }

    /// Whether a buffer of this kind may lie over `size` bytes of a mapping, as far as that is known before the mapping is used.
    ///
    /// # Errors
    /// Why not.
    fn may_be_mapped(_size: usize) -> Result<()> {
        Ok(())
    }

    /// What is allocated where there is none of this kind, for the reason that `attempt` gave.
    ///
    /// # Errors
    /// If there is nothing.
    fn instead(size: usize, fallback: Fallback) -> Result<Placed> {
        Ok(Placed::pageable(Region::from(Pageable::new(size)?), fallback))
    }

    /// [`Self::NAME`] as text.
    fn name() -> &'static str {
        Self::NAME.to_str().unwrap_or("?")
    }
}

impl Placed {
    /// Memory that is what was asked for.
    fn as_asked(region: impl Into<Region>, place: Place, file: Option<PathBuf>) -> Placed {
        let region = region.into();
        let refused = numa::wish(&region, numa::wished());
        Placed { region, place, file, fallback: None, pinned: 0, lasting: None, refused }
    }

    /// Plain memory in the place of what was asked for.
    pub fn pageable(region: Region, fallback: Fallback) -> Placed {
        let refused = numa::wish(&region, numa::wished());
        Placed { region, place: Place::Pageable, file: None, fallback: Some(fallback), pinned: 0, lasting: None, refused }
    }

    /// Its buffer has a record: it will say where the pages are. To be undone before the memory goes.
    pub fn follow(&self, id: report::Id) {
        numa::follow(id, &self.region, numa::wished(), self.refused.clone());
    }

    /// No bytes.
    fn empty() -> Placed {
        Placed::as_asked(Region::empty(), Place::Empty, None)
    }
}

/// Memory of the kind `T`, or what there is instead, with the reason.
///
/// # Errors
/// If there is neither, or, in strict mode, if there is none of the kind.
pub fn allocate<T: BufferType>(size: usize) -> Result<Placed> {
    or_instead::<T>(size, T::attempt)
}

/// The same for a buffer of the host.
///
/// # Errors
/// As [`allocate`].
fn allocate_for_host<T: BufferType>(size: usize) -> Result<Placed> {
    or_instead::<T>(size, T::attempt_for_host)
}

fn or_instead<T: BufferType>(size: usize, attempt: impl Fn(usize) -> std::result::Result<Placed, Fallback>) -> Result<Placed> {
    if size == 0 {
        return Ok(Placed::empty());
    }
    match attempt(size) {
        Ok(placed) => {
            // A part of what was asked is a fallback too.
            placed.fallback.as_ref().map_or(Ok(()), |fallback| permit(T::name(), size, fallback))?;
            Ok(placed)
        }
        Err(fallback) => {
            permit(T::name(), size, &fallback)?;
            T::instead(size, fallback)
        }
    }
}

/// Whether a fallback is allowed at all.
///
/// # Errors
/// In strict mode, with the reason of the fallback.
pub fn permit(asked: &str, size: usize, fallback: &Fallback) -> Result<()> {
    if !config::get()?.strict {
        return Ok(());
    }
    let message = format!("{asked}: {size} bytes refused, because BERTH_STRICT is on: {}", fallback.message);
    Err(Error::new(Status::Unsupported, message))
}
