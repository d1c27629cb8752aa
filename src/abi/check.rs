//! Proof, at load, that this host's `struct ggml_tensor` is the one mirrored here, and the host's numbers of the operations we know.
//!
//! Numbers of `enum ggml_op` and `enum ggml_glu_op` shift whenever ggml adds one, and its name tables have no exported length. So each
//! number is read off a tensor that the host's own constructor made, and then compared with the name the host gives that number.

use std::ffi::{CStr, c_char, c_int, c_void};

use super::symbols::SwigluClamp;
use super::*;
use crate::error::{Error, Result, Status};

/// The host's numbers of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ops {
    /// `GGML_OP_ADD`.
    pub add: c_int,
    /// `GGML_OP_ADD_ID`.
    pub add_id: c_int,
    /// `GGML_OP_MUL`.
    pub mul: c_int,
    /// `GGML_OP_MUL_MAT_ID`.
    pub mul_mat_id: c_int,
    /// `GGML_OP_VIEW`.
    pub view: c_int,
    /// `GGML_OP_RESHAPE`.
    pub reshape: c_int,
    /// `GGML_OP_PERMUTE`.
    pub permute: c_int,
    /// `GGML_OP_TRANSPOSE`.
    pub transpose: c_int,
    /// `GGML_OP_CONT`.
    pub cont: c_int,
    /// `GGML_OP_GLU`.
    pub glu: c_int,
    /// `GGML_GLU_OP_REGLU`.
    pub reglu: c_int,
    /// `GGML_GLU_OP_GEGLU`.
    pub geglu: c_int,
    /// `GGML_GLU_OP_SWIGLU`.
    pub swiglu: c_int,
    /// `GGML_GLU_OP_SWIGLU_OAI`.
    pub swiglu_oai: c_int,
    /// `GGML_GLU_OP_GEGLU_ERF`.
    pub geglu_erf: c_int,
    /// `GGML_GLU_OP_GEGLU_QUICK`.
    pub geglu_quick: c_int,
    /// `GGML_GLU_OP_SWIGLU_CLAMP`, since ggml 0.24.
    pub swiglu_clamp: Option<c_int>,
    /// `GGML_OP_UNARY`.
    pub unary: c_int,
    /// `GGML_UNARY_OP_SILU`.
    pub silu: c_int,
    /// `GGML_UNARY_OP_GELU`.
    pub gelu: c_int,
    /// `GGML_UNARY_OP_RELU`.
    pub relu: c_int,
    /// `GGML_OP_SQR`.
    pub sqr: c_int,
    /// `GGML_OP_REPEAT`.
    pub repeat: c_int,
    /// `GGML_OP_GET_ROWS`.
    pub get_rows: c_int,
    /// `GGML_OP_CLAMP`.
    pub clamp: c_int,
}

/// Makes tensors through the host's own functions and compares what is in memory with what the mirror says.
///
/// # Errors
/// [`Status::HostMismatch`], naming the first field, operation or type that differs.
pub(super) fn tensor_and_ops(api: &Api, swiglu_clamp: Option<SwigluClamp>) -> Result<Ops> {
    let mut memory = vec![0u64; 8 * 1024];
    let params = ggml_init_params { mem_size: memory.len() * 8, mem_buffer: memory.as_mut_ptr().cast(), no_alloc: true };
    // SAFETY: the memory outlives the context, which is freed below; 64 KiB hold well over the thirty tensors made here.
    let ctx = unsafe { (api.ggml_init)(params) };
    if ctx.is_null() {
        return Err(differs("ggml_init returned NULL"));
    }
    // SAFETY: the context is valid and nothing but this function uses it.
    let result = unsafe { probe(api, swiglu_clamp, ctx) };
    // SAFETY: made above, freed once; the tensors in it are not used any more.
    unsafe { (api.ggml_free)(ctx) };
    result
}

/// # Safety
/// `ctx` must be a context of the host with room for thirty tensors and `no_alloc` set.
unsafe fn probe(api: &Api, swiglu_clamp: Option<SwigluClamp>, ctx: *mut ggml_context) -> Result<Ops> {
    // SAFETY: shapes are positive and types valid in every version; the returned tensors lie in the context.
    let (a, b, ids, experts, bias, ids_of_one) = unsafe {
        (
            (api.ggml_new_tensor_4d)(ctx, GGML_TYPE_F16, 64, 5, 3, 2),
            (api.ggml_new_tensor_4d)(ctx, GGML_TYPE_F32, 64, 2, 7, 1),
            (api.ggml_new_tensor_4d)(ctx, GGML_TYPE_I32, 2, 7, 1, 1),
            (api.ggml_new_tensor_4d)(ctx, GGML_TYPE_F16, 64, 32, 4, 1),
            (api.ggml_new_tensor_4d)(ctx, GGML_TYPE_F32, 64, 4, 1, 1),
            (api.ggml_new_tensor_4d)(ctx, GGML_TYPE_I32, 2, 4, 1, 1),
        )
    };
    for tensor in [a, b, ids, experts, bias, ids_of_one] {
        if tensor.is_null() {
            return Err(differs("ggml_new_tensor_4d returned NULL"));
        }
    }

    // Fields set by the constructor and by setters.
    // SAFETY: `a` lies in the context; the name is NUL-terminated.
    unsafe {
        (api.ggml_set_name)(a, c"berth-probe".as_ptr());
        (api.ggml_set_output)(a);
    }
    // SAFETY: `a` points at a tensor of the host; that the mirror fits its memory is what is being tested, and every field read lies within
    // the first 336 bytes, which no version undercuts.
    let t = unsafe { &mut *a };
    expect("type", t.type_, GGML_TYPE_F16)?;
    expect("ne", t.ne, [64, 5, 3, 2])?;
    expect("nb", t.nb, [2, 128, 640, 1920])?;
    expect("op", t.op, 0)?;
    expect("flags", t.flags & GGML_TENSOR_FLAG_OUTPUT, GGML_TENSOR_FLAG_OUTPUT)?;
    expect("src", t.src, [std::ptr::null_mut(); GGML_MAX_SRC])?;
    expect("buffer", t.buffer, std::ptr::null_mut())?;
    expect("view_src", t.view_src, std::ptr::null_mut())?;
    expect("extra", t.extra, std::ptr::null_mut())?;
    // SAFETY: the name was just set by the host and is NUL-terminated within the field if the field is where we think.
    let name: [c_char; 12] = std::array::from_fn(|i| t.name[i]);
    expect("name", name.map(|c| c as u8), *b"berth-probe\0")?;
    let marker = std::ptr::without_provenance_mut::<c_void>(0x1230);
    t.data = marker;
    // SAFETY: the function returns the field and follows nothing.
    expect("data", unsafe { (api.ggml_get_data)(a) }, marker)?;
    t.data = std::ptr::null_mut();
    // SAFETY: `a` is a whole tensor again.
    expect("ggml_nbytes", unsafe { (api.ggml_nbytes)(a) }, 64 * 5 * 3 * 2 * 2)?;

    // SAFETY: all operands lie in the context and have shapes the constructors accept: b is [64, 2, 7], ids [2, 7], experts [64, 32, 4],
    // bias [64, 4], so that ids->ne[0] is a multiple of b->ne[1] and ids->ne[1] equals b->ne[2]; and ids_of_one [2, 4] has as many columns as
    // experts has matrices, as GET_ROWS wants it.
    let made = unsafe {
        [
            (api.ggml_add)(ctx, b, b),
            (api.ggml_add_id)(ctx, b, bias, ids),
            (api.ggml_mul)(ctx, b, b),
            (api.ggml_mul_mat_id)(ctx, experts, b, ids),
            (api.ggml_view_1d)(ctx, b, 8, 16),
            (api.ggml_reshape_2d)(ctx, b, 128, 7),
            (api.ggml_cont)(ctx, b),
            (api.ggml_reglu)(ctx, b),
            (api.ggml_geglu)(ctx, b),
            (api.ggml_swiglu)(ctx, b),
            (api.ggml_geglu_erf)(ctx, b),
            (api.ggml_geglu_quick)(ctx, b),
            (api.ggml_swiglu_oai)(ctx, b, b, 1.702, 7.0),
            (api.ggml_silu)(ctx, b),
            (api.ggml_gelu)(ctx, b),
            (api.ggml_relu)(ctx, b),
            (api.ggml_sqr)(ctx, b),
            (api.ggml_permute)(ctx, b, 0, 2, 1, 3),
            (api.ggml_transpose)(ctx, b),
            (api.ggml_repeat)(ctx, b, b),
            (api.ggml_get_rows)(ctx, experts, ids_of_one),
            (api.ggml_clamp)(ctx, b, -3.0, 5.0),
        ]
    };
    // SAFETY: likewise.
    let clamp = swiglu_clamp.map(|f| unsafe { f(ctx, b, b, 7.0) });
    if made.iter().chain(&clamp).any(|t| t.is_null()) {
        return Err(differs("a constructor of an operation returned NULL"));
    }
    // SAFETY: not NULL, and made by the host.
    let [
        add,
        add_id,
        mul,
        mul_mat_id,
        view,
        reshape,
        cont,
        reglu,
        geglu,
        swiglu,
        geglu_erf,
        geglu_quick,
        swiglu_oai,
        silu,
        gelu,
        relu,
        sqr,
        permute,
        transpose,
        repeat,
        get_rows,
        clamp_op,
    ] = made.map(|t| unsafe { &*t });
    expect("src", mul_mat_id.src[..3].to_vec(), vec![experts, b, ids])?;
    expect("ne of MUL_MAT_ID", mul_mat_id.ne, [32, 2, 7, 1])?;
    expect("view_src", view.view_src, b)?;
    expect("view_offs", view.view_offs, 16)?;
    expect("op_params of SWIGLU_OAI", [swiglu_oai.op_params[2], swiglu_oai.op_params[3]], [1.702f32, 7.0].map(|f| f.to_bits() as i32))?;

    expect("op_params of CLAMP", [clamp_op.op_params[0], clamp_op.op_params[1]], [-3.0f32, 5.0].map(|f| f.to_bits() as i32))?;

    // SAFETY: not NULL, and made by the host.
    let clamp = clamp.map(|t| unsafe { &*t });
    if let Some(clamp) = clamp {
        expect("op_params of SWIGLU_CLAMP", clamp.op_params[3], 7.0f32.to_bits() as i32)?;
    }

    let op = |t: &ggml_tensor, want: &str| named(api.ggml_op_name, t.op, want);
    let glu = |t: &ggml_tensor, want: &str| op(t, "GLU").and_then(|_| named(api.ggml_glu_op_name, t.op_params[0], want));
    let unary = |t: &ggml_tensor, want: &str| op(t, "UNARY").and_then(|_| named(api.ggml_unary_op_name, t.op_params[0], want));
    for (number, name) in GGML_TYPES {
        named(api.ggml_type_name, number, name)?;
    }
    Ok(Ops {
        add: op(add, "ADD")?,
        add_id: op(add_id, "ADD_ID")?,
        mul: op(mul, "MUL")?,
        mul_mat_id: op(mul_mat_id, "MUL_MAT_ID")?,
        view: op(view, "VIEW")?,
        reshape: op(reshape, "RESHAPE")?,
        permute: op(permute, "PERMUTE")?,
        transpose: op(transpose, "TRANSPOSE")?,
        cont: op(cont, "CONT")?,
        glu: op(swiglu, "GLU")?,
        reglu: glu(reglu, "REGLU")?,
        geglu: glu(geglu, "GEGLU")?,
        swiglu: glu(swiglu, "SWIGLU")?,
        swiglu_oai: glu(swiglu_oai, "SWIGLU_OAI")?,
        geglu_erf: glu(geglu_erf, "GEGLU_ERF")?,
        geglu_quick: glu(geglu_quick, "GEGLU_QUICK")?,
        swiglu_clamp: clamp.map(|t| glu(t, "SWIGLU_CLAMP")).transpose()?,
        unary: op(silu, "UNARY")?,
        silu: unary(silu, "SILU")?,
        gelu: unary(gelu, "GELU")?,
        relu: unary(relu, "RELU")?,
        sqr: op(sqr, "SQR")?,
        repeat: op(repeat, "REPEAT")?,
        get_rows: op(get_rows, "GET_ROWS")?,
        clamp: op(clamp_op, "CLAMP")?,
    })
}

/// Checks that the host calls `number` by the name we know it by.
fn named(name_of: unsafe extern "C" fn(c_int) -> *const c_char, number: c_int, want: &str) -> Result<c_int> {
    // SAFETY: the number comes from a tensor the host made, or is a type number that exists in every supported version.
    let name = unsafe { name_of(number) };
    // SAFETY: name tables hold NUL-terminated literals, or NULL for unused numbers.
    let found = if name.is_null() { "nothing" } else { unsafe { CStr::from_ptr(name) }.to_str().unwrap_or("?") };
    if found.eq_ignore_ascii_case(want) { Ok(number) } else { Err(differs(format!("number {number} is {found}, not {want}"))) }
}

fn expect<T: PartialEq + std::fmt::Debug>(field: &str, found: T, want: T) -> Result<()> {
    if found == want { Ok(()) } else { Err(differs(format!("{field} is {found:?}, not {want:?}"))) }
}

fn differs(what: impl std::fmt::Display) -> Error {
    Error::new(Status::HostMismatch, format!("its struct ggml_tensor or numbers differ from those Berth knows: {what}"))
}
