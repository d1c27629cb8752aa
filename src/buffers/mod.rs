//! Memory regions dressed as ggml buffer types: `CPU_MMAP`, `CUDA_Host`, `ARENA`.
//!
//! Owns: what each type allocates and how it falls back, and the contents of a buffer. Must not know: devices, graphs, rules.
//! All three are host memory in ggml's raw layout, so every backend that reads host memory reads them without a copy.

mod arena;
mod cpu_mmap;
mod cuda_host;
mod tensors;
mod vtable;

pub use arena::Arena;
pub use cpu_mmap::CpuMmap;
pub use cuda_host::CudaHost;
pub use vtable::{buffer_type, from_host_ptr};

use std::ffi::CStr;
use std::path::PathBuf;

use crate::config;
use crate::error::{Error, Result};
use crate::memory::{Region, pageable::Pageable};
use crate::report::{Fallback, Place};

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
}

/// A kind of memory that tensors can be put in.
pub trait BufferType: Sync + 'static {
    /// Name, as typed in `-ot`.
    const NAME: &'static CStr;

    /// At least `size` zeroed or unspecified bytes (`size` > 0), aligned to [`crate::memory::ALIGNMENT`].
    ///
    /// # Errors
    /// If there is no memory, or, in strict mode, if there is none of this kind.
    fn allocate(size: usize) -> Result<Placed>;

    /// [`Self::NAME`] as text.
    fn name() -> &'static str {
        Self::NAME.to_str().unwrap_or("?")
    }
}

/// Pageable memory in place of what was asked, with the reason; an error in strict mode.
fn fall_back(name: &str, size: usize, fallback: Fallback) -> Result<Placed> {
    if config::get()?.strict {
        let message = format!("{name}: {size} bytes refused, because BERTH_STRICT is on: {}", fallback.message);
        return Err(Error::new(crate::error::Status::Unsupported, message));
    }
    let region = Region::from(Pageable::new(size)?);
    Ok(Placed { region, place: Place::Pageable, file: None, fallback: Some(fallback) })
}
