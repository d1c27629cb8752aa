//! `berth_glu`: activations alone, from C.
//!
//! As `moe.rs` beside it, whose enumeration of activations it shares; the checks of shapes are those of `moe`.

use super::moe::{activation, field_of, kernels, stride_or};
use super::threads::{self, Threads};
use super::{input, status};
use crate::error::{Error, Status};
use crate::moe::{self, Rows, RowsMut};

/// Activations alone, row by row: ggml's `GLU`. Strides are in bytes, multiples of 4; 0 means that one row follows the other.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct GluDesc {
    /// `sizeof(struct berth_glu_desc)`, set by the caller.
    pub struct_size: usize,
    /// Values in a row.
    pub width: usize,
    /// Number of rows; 0 is no work.
    pub rows: usize,
    /// `enum berth_activation`.
    pub activation: u32,
    /// Must be 0.
    pub reserved: u32,
    /// As in `struct berth_moe_desc`.
    pub alpha: f32,
    /// As in `struct berth_moe_desc`.
    pub limit: f32,
    /// The gate product, for gated activations; else NULL.
    pub gate: *const f32,
    /// From one row of `gate` to the next.
    pub gate_stride: usize,
    /// The up product.
    pub up: *const f32,
    /// From one row of `up` to the next.
    pub up_stride: usize,
    /// The result. May be `gate` or `up` itself, with the same stride, also where these lie in one matrix, row beside row.
    pub out: *mut f32,
    /// From one row of `out` to the next.
    pub out_stride: usize,
}

// SAFETY: `repr(C)`, begins with `struct_size`; numbers and pointers may be zero.
unsafe impl input::Versioned for GluDesc {
    const NAME: &'static str = "berth_glu_desc";
    const FIELDS: &'static [usize] =
        input::offsets!(GluDesc, width, rows, activation, reserved, alpha, limit, gate, gate_stride, up, up_stride, out, out_stride);
}

/// Computes `out = act(gate, up)`, value by value. `threads` may be NULL: the calling thread alone. Allocates nothing and needs no workspace.
/// On an error nothing has been written to `out`, unless a function in `threads` broke its promise.
///
/// # Safety
/// `desc` must be NULL, which is an error, or point at a struct whose `struct_size` is set, and whose pointers are NULL or point at as much as
/// the numbers say; `threads` must be NULL or point at a struct whose `struct_size` is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_glu(desc: *const GluDesc, threads: *const Threads) -> Status {
    status("berth_glu", || {
        let kernels = kernels()?;
        // SAFETY: the caller vouches for `desc`.
        let desc = unsafe { input::get(desc) }?;
        let activation = activation(desc.activation, desc.alpha, desc.limit)?;
        if desc.reserved != 0 {
            return Err(Error::invalid(format!("struct berth_glu_desc: reserved is {}, must be 0", desc.reserved)));
        }
        if desc.width == 0 {
            return Err(Error::invalid("struct berth_glu_desc: width is 0"));
        }
        let strides = |stride| stride_or(stride, desc.width, 4).map(|s| [s, s]);
        let dims = [desc.width, 1, desc.rows];
        // SAFETY: the caller vouches for what `desc` points at, and for `threads`.
        unsafe {
            let field = |name, what| field_of("berth_glu_desc", name, what);
            let rows = |base, stride, name| Rows::new(base, dims, strides(stride)?).map_err(field(name, "activations"));
            // Of no rows a gate may be missing: nothing is read.
            let no_gate = desc.gate.is_null() && (desc.rows > 0 || !activation.gated());
            let gate = if no_gate { None } else { Some(rows(desc.gate, desc.gate_stride, "gate")?) };
            let up = rows(desc.up, desc.up_stride, "up")?;
            let out = RowsMut::new(desc.out, dims, strides(desc.out_stride)?).map_err(field("out", "output"))?;
            threads::with(threads, |threads| moe::glu(activation, gate.as_ref(), &up, out, kernels, threads))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capi::moe::Activation;

    #[test]
    fn the_struct_has_the_size_that_c_sees() {
        // 64-bit Linux only; a change here is a change of the ABI.
        assert_eq!(size_of::<GluDesc>(), 88);
    }

    fn glu(desc: GluDesc) -> (Status, String) {
        // SAFETY: the descriptions of the tests point at nothing, or at what they say.
        let status = unsafe { berth_glu(&raw const desc, std::ptr::null()) };
        // SAFETY: a string of this thread.
        let text = unsafe { std::ffi::CStr::from_ptr(crate::capi::berth_last_error()) };
        (status, text.to_string_lossy().into_owned())
    }

    #[test]
    fn a_glu_of_no_rows_needs_no_memory_and_others_name_what_is_missing() {
        // SAFETY: all zeros are valid (`Versioned`).
        let empty = GluDesc { struct_size: size_of::<GluDesc>(), width: 20, ..unsafe { std::mem::zeroed() } };
        assert_eq!(glu(empty).0, Status::Ok);
        assert_eq!(glu(GluDesc { activation: Activation::Relu as u32, ..empty }).0, Status::Ok);
        let values = [0f32; 20];
        let one = GluDesc { rows: 1, ..empty };
        assert_eq!(glu(GluDesc { gate: values.as_ptr(), ..one }), (Status::InvalidArgument, "struct berth_glu_desc: up: NULL".into()));
        let half = GluDesc { gate: values.as_ptr(), up: values.as_ptr().wrapping_byte_add(2), ..one };
        assert_eq!(glu(half).1, "struct berth_glu_desc: up: not aligned to 4 bytes");
        assert_eq!(glu(GluDesc { width: 0, ..one }).1, "struct berth_glu_desc: width is 0");
        assert_eq!(glu(GluDesc { reserved: 3, ..one }).1, "struct berth_glu_desc: reserved is 3, must be 0");
    }

    #[test]
    fn a_struct_that_ends_inside_a_field_is_refused() {
        for (size, ok) in [(80, true), (84, false), (76, false), (88, true), (96, true), (92, false), (1, false), (16, true), (18, false)] {
            // SAFETY: all zeros are valid (`Versioned`).
            let mut desc = [GluDesc { width: 20, activation: Activation::Relu as u32, ..unsafe { std::mem::zeroed() } }; 2];
            desc[0].struct_size = size;
            // SAFETY: two structs, as much memory as the largest size.
            let status = unsafe { berth_glu(desc.as_ptr(), std::ptr::null()) };
            assert_eq!(status == Status::Ok, ok, "{size}");
        }
    }
}
