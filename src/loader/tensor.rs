//! One tensor of a load.

use std::ffi::CString;

use crate::error::{Error, Result};
use crate::gguf::ModelTensor;
use crate::placement::{Decision, Memory};

/// A tensor that was created. Its address does not change while the loader lives.
pub struct Tensor {
    /// Name in the model.
    pub name: CString,
    /// `enum ggml_type`, as in the file.
    pub type_number: u32,
    /// Elements per dimension, innermost first.
    pub ne: [u64; 4],
    /// Stride per dimension in bytes, innermost first.
    pub nb: [u64; 4],
    /// Bytes of its data.
    pub bytes: usize,
    /// Part of a split model, counted from 0.
    pub part: usize,
    /// Offset of its data in that file.
    pub offset: u64,
    /// Where it goes and why; after allocation: where it is.
    pub decision: Decision,
    /// The buffer that holds it, as an index into [`super::Loader::buffers`], after allocation; none on a device.
    pub buffer: Option<usize>,
    /// Its data, after allocation; NULL before, and for a tensor on a device.
    pub data: *mut u8,
}

impl Tensor {
    pub(super) fn new(found: ModelTensor<'_>, decision: Decision) -> Result<Tensor> {
        let info = found.info;
        let name = CString::new(info.name).map_err(|_| Error::invalid("a tensor's name contains NUL"))?;
        let (block, block_bytes) = info.ty.info().map_or((1, 1), |t| (t.block_elements, t.block_bytes));
        // ggml's strides: nb[0] is a block, nb[1] a row, the rest are products. The reader has checked that the whole fits the file; of a tensor
        // without bytes, a row may be of any length.
        let row = (info.dims[0] / block).saturating_mul(block_bytes);
        let nb = [block_bytes, row, row.saturating_mul(info.dims[1]), row.saturating_mul(info.dims[1]).saturating_mul(info.dims[2])];
        let bytes = usize::try_from(info.bytes).map_err(|_| Error::invalid("a tensor larger than the address space"))?;
        Ok(Tensor {
            name,
            type_number: info.ty.0,
            ne: info.dims,
            nb,
            bytes,
            part: found.part,
            offset: info.offset,
            decision,
            buffer: None,
            data: std::ptr::null_mut(),
        })
    }

    /// Whether its bytes are copied out of the file.
    pub fn is_copied(&self) -> bool {
        !self.data.is_null() && self.decision.memory.is_some_and(Memory::is_host_copy)
    }
}
