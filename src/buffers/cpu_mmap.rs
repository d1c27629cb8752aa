//! `CPU_MMAP`: tensors stay where the loader mapped them (see [`super::from_host_ptr`]); what is allocated is plain host memory.

use std::ffi::CStr;

use super::{BufferType, Placed};
use crate::error::Result;
use crate::memory::{Region, pageable::Pageable};
use crate::report::Place;

/// The buffer type `CPU_MMAP`.
pub struct CpuMmap;

impl BufferType for CpuMmap {
    const NAME: &'static CStr = c"CPU_MMAP";

    fn allocate(size: usize) -> Result<Placed> {
        Ok(Placed { region: Region::from(Pageable::new(size)?), place: Place::Pageable, file: None, fallback: None })
    }
}
