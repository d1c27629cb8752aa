//! `CUDA_Host`: page-locked memory from the CUDA driver; pageable, and said so, where there is none.

use std::ffi::CStr;

use super::{BufferType, Placed, fall_back};
use crate::error::{Result, Status};
use crate::memory::{Region, pinned::Pinned};
use crate::report::{Fallback, Place, Reason};

/// The buffer type `CUDA_Host`.
pub struct CudaHost;

impl BufferType for CudaHost {
    const NAME: &'static CStr = c"CUDA_Host";

    fn allocate(size: usize) -> Result<Placed> {
        match Pinned::new(size) {
            Ok(pinned) => Ok(Placed { region: Region::from(pinned), place: Place::Pinned, file: None, fallback: None }),
            Err(error) => {
                let reason = if error.status == Status::Unsupported { Reason::NoCudaDriver } else { Reason::PinFailed };
                fall_back(Self::name(), size, Fallback { reason, message: error.message })
            }
        }
    }
}
