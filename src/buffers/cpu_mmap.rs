//! `CPU_MMAP`: tensors stay where the loader mapped them (see [`super::from_host_ptr`]); what is allocated is plain host memory.

use std::ffi::CStr;

use super::{BufferType, Placed};
use crate::memory::pageable::Pageable;
use crate::report::{Fallback, Place, Reason};

/// The buffer type `CPU_MMAP`.
pub struct CpuMmap;

impl BufferType for CpuMmap {
    const NAME: &'static CStr = c"CPU_MMAP";

    fn attempt(size: usize) -> Result<Placed, Fallback> {
        match Pageable::new(size) {
            Ok(pageable) => Ok(Placed::as_asked(pageable, Place::Pageable, None)),
            Err(error) => Err(Fallback { reason: Reason::NoMemory, message: error.message }),
        }
    }
}
