//! `CUDA_Host`: page-locked memory from the CUDA driver; pageable, and said so, where there is none.

use std::ffi::CStr;

use super::{BufferType, Placed};
use crate::error::Status;
use crate::memory::pinned::Pinned;
use crate::report::{Fallback, Place, Reason};

/// The buffer type `CUDA_Host`.
pub struct CudaHost;

impl BufferType for CudaHost {
    const NAME: &'static CStr = c"CUDA_Host";

    fn attempt(size: usize) -> Result<Placed, Fallback> {
        // The driver gets and locks the pages in one call: what can be wished for is the thread's.
        let _scope = super::numa::wished().and_then(|plan| plan.for_this_thread().ok());
        match Pinned::new(size) {
            Ok(pinned) => Ok(Placed::as_asked(pinned, Place::Pinned, None)),
            Err(error) => {
                let reason = if error.status == Status::Unsupported { Reason::NoCudaDriver } else { Reason::PinFailed };
                Err(Fallback { reason, message: error.message })
            }
        }
    }
}
