//! `struct ggml_tensor` and the enum values that a plug-in needs.
//!
//! Owns: the mirror of `ggml.h`. The layout has been the same since ggml 0.9.0; [`super::check`] tests it at load with a real tensor, and
//! `ffi-tests/tests/layout.rs` compares every field with the real headers.

use std::ffi::{c_char, c_int, c_void};

use super::ggml_backend_buffer;

/// `GGML_MAX_DIMS`.
pub const GGML_MAX_DIMS: usize = 4;
/// `GGML_MAX_SRC`.
pub const GGML_MAX_SRC: usize = 10;
/// `GGML_MAX_OP_PARAMS`, in bytes.
pub const GGML_MAX_OP_PARAMS: usize = 64;
/// `GGML_MAX_NAME`, in bytes, with the terminating NUL.
pub const GGML_MAX_NAME: usize = 64;

/// `struct ggml_tensor`. Shapes `ne` count elements, strides `nb` count bytes.
#[repr(C)]
#[derive(Debug)]
pub struct ggml_tensor {
    /// `enum ggml_type`; the numbers are those of the GGUF file format and never change.
    pub type_: c_int,
    /// Buffer that holds `data`; NULL for views, whose buffer is that of `view_src`.
    pub buffer: *mut ggml_backend_buffer,
    /// Number of elements per dimension, innermost first.
    pub ne: [i64; GGML_MAX_DIMS],
    /// Stride in bytes per dimension, innermost first.
    pub nb: [usize; GGML_MAX_DIMS],
    /// `enum ggml_op`; the numbers differ between versions, see [`super::Ops`].
    pub op: c_int,
    /// Parameters of the operation.
    pub op_params: [i32; GGML_MAX_OP_PARAMS / 4],
    /// `enum ggml_tensor_flag` bits.
    pub flags: i32,
    /// Operands.
    pub src: [*mut ggml_tensor; GGML_MAX_SRC],
    /// Tensor this one is a view of, or NULL.
    pub view_src: *mut ggml_tensor,
    /// Offset of a view in its source, in bytes.
    pub view_offs: usize,
    /// First element.
    pub data: *mut c_void,
    /// NUL-terminated name.
    pub name: [c_char; GGML_MAX_NAME],
    /// Used by some backends.
    pub extra: *mut c_void,
    /// Unused.
    pub padding: [c_char; 8],
}

/// `GGML_TENSOR_FLAG_OUTPUT`.
pub const GGML_TENSOR_FLAG_OUTPUT: i32 = 2;

/// `GGML_TYPE_F32`.
pub const GGML_TYPE_F32: c_int = 0;
/// `GGML_TYPE_F16`.
pub const GGML_TYPE_F16: c_int = 1;
/// `GGML_TYPE_I32`.
pub const GGML_TYPE_I32: c_int = 26;

/// Number and name of every tensor type that exists in all supported versions and can hold weights.
pub const GGML_TYPES: [(c_int, &str); 26] = [
    (0, "f32"),
    (1, "f16"),
    (2, "q4_0"),
    (3, "q4_1"),
    (6, "q5_0"),
    (7, "q5_1"),
    (8, "q8_0"),
    (10, "q2_K"),
    (11, "q3_K"),
    (12, "q4_K"),
    (13, "q5_K"),
    (14, "q6_K"),
    (16, "iq2_xxs"),
    (17, "iq2_xs"),
    (18, "iq3_xxs"),
    (19, "iq1_s"),
    (20, "iq4_nl"),
    (21, "iq3_s"),
    (22, "iq2_s"),
    (23, "iq4_xs"),
    (26, "i32"),
    (29, "iq1_m"),
    (30, "bf16"),
    (34, "tq1_0"),
    (35, "tq2_0"),
    (39, "mxfp4"),
];
