//! `berth_moe_*`, `berth_mul_mat_id`: the experts of a block, computed from C.
//!
//! Turns the caller's structs into the checked views of `moe`; every check of shapes is there. Here are those of what only C can get wrong:
//! NULL, numbers out of an enumeration, memory that overlaps. Calls that succeed allocate nothing, once the instruction set is chosen.

use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

use super::threads::{self, Threads};
use super::{input, keep, status};
use crate::abi::guard;
use crate::ahead::READER;
use crate::config;
use crate::error::{Error, Result, Status};
use crate::moe::isa::{self, Isa, Tier};
use crate::moe::{self, Inputs, Kernels, Matrix, PerExpert, Projection, Rows, RowsMut, Span, Table, WeightType};

/// What is done between the two products of an expert: `g` is a value of the gate product, `u` of the up product.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `silu(g) * u`.
    Swiglu = 0,
    /// `m * sigmoid(alpha * m) * (clamp(u, -limit, limit) + 1)` with `m = min(g, limit)`.
    SwigluOai = 1,
    /// `silu(min(g, limit)) * clamp(u, -limit, limit)`.
    SwigluClamp = 2,
    /// `gelu(g) * u`, GELU with the hyperbolic tangent.
    Geglu = 3,
    /// `gelu(g) * u`, GELU with the error function.
    GegluErf = 4,
    /// `g * sigmoid(1.702 * g) * u`.
    GegluQuick = 5,
    /// `max(g, 0) * u`.
    Reglu = 6,
    /// `silu(u)`; there is no gate.
    Silu = 7,
    /// `gelu(u)` with the hyperbolic tangent; there is no gate.
    Gelu = 8,
    /// `max(u, 0)`; there is no gate.
    Relu = 9,
    /// `max(u, 0)^2`; there is no gate.
    ReluSqr = 10,
}

/// The routing weight of a choice multiplies the input of gate and up (their biases come after), not the output of down.
pub const BERTH_MOE_WEIGHT_FIRST: u32 = 1;
/// `up` holds `2 * f` rows per expert: those of gate, then those of up. Its bias has as many values; its scale is that of both. `gate` is
/// empty.
pub const BERTH_MOE_MERGED_GATE_UP: u32 = 2;
/// The weights lie in a file that may be larger than memory: `berth_moe_forward` asks for those that are missing before it computes. With
/// `BERTH_READAHEAD=off` it does not. Weights that cannot be read (a file that was truncated) are then `BERTH_STATUS_IO` where the kernel can
/// tell, instead of a signal. Where weights are missing of a model larger than memory, memory of up to a 64th of the mapped files and 128 MiB is
/// allocated for them, which is given back when nothing has been missing for 64 calls (not with `BERTH_DIRECT=off`).
pub const BERTH_MOE_READ_AHEAD: u32 = 4;

/// The weights of one projection, for all experts: rows of quantised blocks in ggml's layout, at any address. Zeros mean that it is not
/// there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Weights {
    /// The first block.
    pub data: *const c_void,
    /// Bytes that may be read from `data` on. No byte behind the last block is read.
    pub size: usize,
    /// `enum ggml_type`; see `berth_moe_type_supported`.
    pub ggml_type: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Bytes from one row to the next; 0 if they follow each other.
    pub row_stride: usize,
    /// Bytes from one expert to the next; 0 if they follow each other.
    pub expert_stride: usize,
    /// A factor of the product per expert, `n_expert` values; NULL is 1.
    pub scale: *const f32,
    /// Added to the scaled product: for each expert as many values as it has rows; NULL is 0.
    pub bias: *const f32,
    /// Bytes from one expert's bias to the next; 0 if they follow each other.
    pub bias_stride: usize,
}

/// The experts of one block: `y = sum_j w[j] * down[ids[j]] . act(gate[ids[j]] . x, up[ids[j]] . x)` for each token.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MoeDesc {
    /// `sizeof(struct berth_moe_desc)`, set by the caller.
    pub struct_size: usize,
    /// Length of a token's vector, `n_embd`.
    pub d: usize,
    /// Length of the vector inside an expert, `n_ff_exp`.
    pub f: usize,
    /// Length of the result; 0 is `d`.
    pub d_out: usize,
    /// Number of experts.
    pub n_expert: usize,
    /// `enum berth_activation`.
    pub activation: u32,
    /// `BERTH_MOE_*` bits.
    pub flags: u32,
    /// Of `BERTH_ACTIVATION_SWIGLU_OAI`; finite. Not read otherwise.
    pub alpha: f32,
    /// Of `BERTH_ACTIVATION_SWIGLU_OAI` and `BERTH_ACTIVATION_SWIGLU_CLAMP`; above 0. Not read otherwise.
    pub limit: f32,
    /// `[d, f, n_expert]`, for gated activations; else empty.
    pub gate: Weights,
    /// `[d, f, n_expert]`.
    pub up: Weights,
    /// `[f, d_out, n_expert]`.
    pub down: Weights,
}

/// One projection alone: ggml's `MUL_MAT_ID`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MulMatIdDesc {
    /// `sizeof(struct berth_mul_mat_id_desc)`, set by the caller.
    pub struct_size: usize,
    /// Length of a row of weights and of the vectors it is multiplied with.
    pub k: usize,
    /// Rows per expert: length of a product.
    pub rows: usize,
    /// Number of experts.
    pub n_expert: usize,
    /// `[k, rows, n_expert]`, without scale and bias.
    pub weights: Weights,
}

/// The tokens of one call, and its memory. Strides are in bytes, multiples of 4; 0 means that one follows the other.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MoeIo {
    /// `sizeof(struct berth_moe_io)`, set by the caller.
    pub struct_size: usize,
    /// Number of tokens; 0 is no work.
    pub n_tokens: usize,
    /// Experts per token.
    pub n_used: usize,
    /// The vectors of the tokens.
    pub x: *const f32,
    /// Vectors per token: 1 (or 0), read by all its experts, or `n_used`, one for each.
    pub x_rows: usize,
    /// From one vector of a token to the next.
    pub x_row_stride: usize,
    /// From one token's first vector to the next token's.
    pub x_token_stride: usize,
    /// `n_used` expert numbers for each token, each from 0 to `n_expert - 1`; one may occur twice.
    pub ids: *const i32,
    /// From one token's ids to the next.
    pub ids_stride: usize,
    /// A routing weight for each id; NULL is 1. Not read by `berth_mul_mat_id`.
    pub weights: *const f32,
    /// From one token's weights to the next.
    pub weights_stride: usize,
    /// The results: of `berth_moe_forward`, one vector per token; of `berth_mul_mat_id`, `n_used`. May lie on `x`, `ids` and `weights`: all
    /// input is read before the first output is written. No byte between the vectors is written.
    pub y: *mut f32,
    /// From one vector of a token to the next. Not read by `berth_moe_forward`.
    pub y_row_stride: usize,
    /// From one token's first vector to the next token's.
    pub y_token_stride: usize,
    /// Memory for the time of the call, aligned to `BERTH_WORKSPACE_ALIGNMENT`. What it holds does not matter.
    pub workspace: *mut c_void,
    /// Its size; at least what `berth_moe_workspace_size` or `berth_mul_mat_id_workspace_size` says.
    pub workspace_size: usize,
}

/// Alignment of a workspace, in bytes.
pub const BERTH_WORKSPACE_ALIGNMENT: usize = 64;
const _: () = assert!(BERTH_WORKSPACE_ALIGNMENT == moe::WORKSPACE_ALIGNMENT);

// SAFETY: `repr(C)`, begins with `struct_size`; numbers and pointers may be zero.
unsafe impl input::Versioned for MoeDesc {
    const NAME: &'static str = "berth_moe_desc";
    const FIELDS: &'static [usize] = input::offsets!(MoeDesc, d, f, d_out, n_expert, activation, flags, alpha, limit, gate, up, down);
}
// SAFETY: likewise.
unsafe impl input::Versioned for MulMatIdDesc {
    const NAME: &'static str = "berth_mul_mat_id_desc";
    const FIELDS: &'static [usize] = input::offsets!(MulMatIdDesc, k, rows, n_expert, weights);
}
// SAFETY: likewise.
unsafe impl input::Versioned for MoeIo {
    const NAME: &'static str = "berth_moe_io";
    const FIELDS: &'static [usize] = input::offsets!(
        MoeIo,
        n_tokens,
        n_used,
        x,
        x_rows,
        x_row_stride,
        x_token_stride,
        ids,
        ids_stride,
        weights,
        weights_stride,
        y,
        y_row_stride,
        y_token_stride,
        workspace,
        workspace_size
    );
}

/// The kernels of this process: chosen once.
pub(super) fn kernels() -> Result<Kernels> {
    static ISA: OnceLock<Result<Isa>> = OnceLock::new();
    ISA.get_or_init(isa::detect).clone().map(moe::table)
}

pub(super) fn activation(number: u32, alpha: f32, limit: f32) -> Result<moe::Activation> {
    const NAMES: [Activation; 11] = [
        Activation::Swiglu,
        Activation::SwigluOai,
        Activation::SwigluClamp,
        Activation::Geglu,
        Activation::GegluErf,
        Activation::GegluQuick,
        Activation::Reglu,
        Activation::Silu,
        Activation::Gelu,
        Activation::Relu,
        Activation::ReluSqr,
    ];
    let named = NAMES.into_iter().find(|a| *a as u32 == number).ok_or_else(|| Error::invalid(format!("activation {number} is unknown")))?;
    let limit =
        || if limit > 0.0 { Ok(limit) } else { Err(Error::invalid(format!("limit {limit} of activation {number} is not above 0"))) };
    Ok(match named {
        Activation::Swiglu => moe::Activation::SwiGlu,
        Activation::SwigluOai if !alpha.is_finite() => return Err(Error::invalid(format!("alpha {alpha} is not finite"))),
        Activation::SwigluOai => moe::Activation::SwiGluOai { alpha, limit: limit()? },
        Activation::SwigluClamp => moe::Activation::SwiGluClamp { limit: limit()? },
        Activation::Geglu => moe::Activation::GeGlu,
        Activation::GegluErf => moe::Activation::GeGluErf,
        Activation::GegluQuick => moe::Activation::GeGluQuick,
        Activation::Reglu => moe::Activation::ReGlu,
        Activation::Silu => moe::Activation::Silu,
        Activation::Gelu => moe::Activation::Gelu,
        Activation::Relu => moe::Activation::Relu,
        Activation::ReluSqr => moe::Activation::ReluSqr,
    })
}

impl Weights {
    fn is_empty(&self) -> bool {
        self.data.is_null() && self.size == 0 && self.scale.is_null() && self.bias.is_null()
    }

    /// # Safety
    /// `data` is NULL or has `size` readable bytes.
    unsafe fn matrix<'a>(&self, name: &str, [k, rows, experts]: [usize; 3]) -> Result<Matrix<'a>> {
        let named = |e: Error| Error::new(e.status, format!("{name}: {}", e.message));
        if self.reserved != 0 {
            return Err(Error::invalid(format!("{name}: reserved is not 0")));
        }
        let ty = i32::try_from(self.ggml_type).ok().and_then(WeightType::from_ggml);
        let ty = ty.ok_or_else(|| Error::new(Status::Unsupported, format!("{name}: no kernels for ggml type {}", self.ggml_type)))?;
        if self.data.is_null() || self.size == 0 {
            return Err(Error::invalid(format!("{name}: no data")));
        }
        // SAFETY: by the caller's promise.
        let bytes = unsafe { input::array(self.data.cast::<u8>(), self.size, name) }?;
        if Span::of(bytes.as_ptr(), bytes.len()).is_none() {
            return Err(Error::invalid(format!("{name}: {} bytes reach beyond the end of memory", self.size)));
        }
        let row = ty.row_bytes(k).unwrap_or(0);
        let row_stride = if self.row_stride == 0 { row } else { self.row_stride };
        let expert_stride = stride_or(self.expert_stride, rows, row_stride)?;
        Matrix::new(bytes, ty, [k, rows, experts], [row_stride, expert_stride]).map_err(named)
    }

    /// Scale and bias; of the bias the values `first..first + width` of each expert.
    ///
    /// # Safety
    /// `scale` and `bias` are NULL or have the values for `experts` experts with `all` rows.
    unsafe fn vectors<'a>(&self, names: Names, experts: usize, all: usize, part: [usize; 2]) -> Result<[Option<PerExpert<'a>>; 2]> {
        let too_big = || Error::invalid(format!("{}: the sizes do not fit in an address space", names[2]));
        let mut found = [None, None];
        if !self.scale.is_null() {
            // SAFETY: by the caller's promise.
            let values = unsafe { input::array(self.scale, experts, names[1]) }?;
            found[0] = Some(PerExpert::new(values, 1, experts, 1)?);
        }
        if !self.bias.is_null() {
            if !self.bias_stride.is_multiple_of(4) {
                return Err(Error::invalid(format!("{}: stride {} is not a multiple of 4", names[2], self.bias_stride)));
            }
            let stride = if self.bias_stride == 0 { all } else { self.bias_stride / 4 };
            if stride < all && experts > 1 {
                return Err(Error::invalid(format!("{}: stride {} is shorter than its {all} values", names[2], self.bias_stride)));
            }
            let count = experts.saturating_sub(1).checked_mul(stride).and_then(|n| n.checked_add(all)).ok_or_else(too_big)?;
            // SAFETY: by the caller's promise.
            let values = unsafe { input::array(self.bias, count, names[2]) }?;
            let [first, width] = part;
            found[1] = Some(PerExpert::new(values.get(first..).unwrap_or(&[]), width, experts, stride)?);
        }
        Ok(found)
    }

    /// # Safety
    /// As `matrix` and `vectors`.
    unsafe fn projection<'a>(&self, names: Names, dims: [usize; 3]) -> Result<Projection<'a>> {
        // SAFETY: by the caller's promise.
        let (matrix, [scale, bias]) = unsafe { (self.matrix(names[0], dims)?, self.vectors(names, dims[2], dims[1], [0, dims[1]])?) };
        Ok(Projection { matrix, scale, bias })
    }
}

/// What messages call the weights, the scale and the bias of a projection.
type Names = [&'static str; 3];
const GATE: Names = ["gate", "gate scale", "gate bias"];
const UP: Names = ["up", "up scale", "up bias"];
const DOWN: Names = ["down", "down scale", "down bias"];
const GATE_UP: Names = ["merged gate and up", "merged gate and up scale", "merged gate and up bias"];

impl MoeDesc {
    /// # Safety
    /// Everything that the struct points at is valid for reads while the result is used.
    unsafe fn experts<'a>(&self) -> Result<moe::Experts<'a>> {
        let activation = activation(self.activation, self.alpha, self.limit)?;
        if self.flags & !(BERTH_MOE_WEIGHT_FIRST | BERTH_MOE_MERGED_GATE_UP | BERTH_MOE_READ_AHEAD) != 0 {
            return Err(Error::invalid(format!("struct berth_moe_desc: flags {:#x} has unknown bits", self.flags)));
        }
        let (d, f, n) = (self.d, self.f, self.n_expert);
        let d_out = if self.d_out == 0 { d } else { self.d_out };
        // SAFETY: by the caller's promise, here and below.
        let down = unsafe { self.down.projection(DOWN, [f, d_out, n]) }?;
        let (gate, up) = if self.flags & BERTH_MOE_MERGED_GATE_UP != 0 {
            if !self.gate.is_empty() || !activation.gated() {
                let why = if activation.gated() { "and a gate of their own" } else { "for an activation without a gate" };
                return Err(Error::invalid(format!("merged gate and up weights, {why}")));
            }
            let all = f.checked_mul(2).ok_or_else(|| Error::invalid(format!("{f} rows twice do not fit in an address space")))?;
            // SAFETY: likewise.
            let both = unsafe { self.up.matrix(GATE_UP[0], [d, all, n]) }?;
            // SAFETY: likewise.
            let part = |first| unsafe {
                let [scale, bias] = self.up.vectors(GATE_UP, n, all, [first, f])?;
                Ok::<_, Error>(Projection { matrix: both.part(first, f)?, scale, bias })
            };
            (Some(part(0)?), part(f)?)
        } else {
            // SAFETY: likewise.
            let gate = if self.gate.is_empty() { None } else { Some(unsafe { self.gate.projection(GATE, [d, f, n]) }?) };
            // SAFETY: likewise.
            (gate, unsafe { self.up.projection(UP, [d, f, n]) }?)
        };
        let weight_first = self.flags & BERTH_MOE_WEIGHT_FIRST != 0;
        let experts = moe::Experts { gate, up, down, activation, weight_first };
        experts.check()?;
        Ok(experts)
    }
}

impl MulMatIdDesc {
    /// # Safety
    /// The weights are valid for reads while the result is used.
    unsafe fn matrix<'a>(&self) -> Result<Matrix<'a>> {
        if !self.weights.scale.is_null() || !self.weights.bias.is_null() {
            return Err(Error::invalid("struct berth_mul_mat_id_desc: the weights have a scale or a bias"));
        }
        // SAFETY: by the caller's promise.
        unsafe { self.weights.matrix("weights", [self.k, self.rows, self.n_expert]) }
    }
}

/// The stride, or the one of rows that follow each other.
pub(super) fn stride_or(stride: usize, count: usize, bytes: usize) -> Result<usize> {
    if stride != 0 {
        return Ok(stride);
    }
    count.checked_mul(bytes).ok_or_else(|| Error::invalid("the sizes do not fit in an address space"))
}

/// Calls the memory of a view by the caller's name for it: the message begins with `what`, which `moe` calls it.
pub(super) fn field_of(name: &'static str, field: &'static str, what: &'static str) -> impl Fn(Error) -> Error {
    move |e| {
        let why = e.message.strip_prefix(what).and_then(|m| m.strip_prefix(": ")).unwrap_or(&e.message);
        Error::new(e.status, format!("struct {name}: {field}: {why}"))
    }
}

/// The views of a call.
struct Views<'a> {
    x: Rows<'a>,
    ids: Table<'a, i32>,
    weights: Option<Table<'a, f32>>,
    y: RowsMut<'a>,
}

impl MoeIo {
    /// # Safety
    /// What the struct points at is valid for reads, and `y` for writes, while the result is used.
    unsafe fn views<'a>(&self, width: usize, out: usize, out_rows: usize) -> Result<Views<'a>> {
        let (tokens, used) = (self.n_tokens, self.n_used);
        if used == 0 && tokens > 0 {
            return Err(Error::invalid("struct berth_moe_io: n_used is 0"));
        }
        let x_rows = self.x_rows.max(1);
        if x_rows != 1 && x_rows != used {
            return Err(Error::invalid(format!("struct berth_moe_io: x_rows is {x_rows}, allowed are 1 and n_used, which is {used}")));
        }
        let x_row = stride_or(self.x_row_stride, width, 4)?;
        let y_row = stride_or(self.y_row_stride, out, 4)?;
        let ids = [4, stride_or(self.ids_stride, used, 4)?];
        let weights = [4, stride_or(self.weights_stride, used, 4)?];
        let x_strides = [x_row, stride_or(self.x_token_stride, x_rows, x_row)?];
        let y_strides = [y_row, stride_or(self.y_token_stride, out_rows, y_row)?];
        for (name, stride, there) in [("ids", ids[1], true), ("weights", weights[1], !self.weights.is_null())] {
            if there && tokens > 1 && stride / 4 < used {
                let why = format!("{name}_stride is {stride}, shorter than {used} {name} of 4 bytes");
                return Err(Error::invalid(format!("struct berth_moe_io: {why}")));
            }
        }
        let table = |field| field_of("berth_moe_io", field, "ids or weights");
        // SAFETY: by the caller's promise.
        unsafe {
            Ok(Views {
                x: Rows::new(self.x, [width, x_rows, tokens], x_strides).map_err(field_of("berth_moe_io", "x", "activations"))?,
                ids: Table::new(self.ids, [used, tokens], ids).map_err(table("ids"))?,
                weights: match self.weights.is_null() {
                    true => None,
                    false => Some(Table::new(self.weights, [used, tokens], weights).map_err(table("weights"))?),
                },
                y: RowsMut::new(self.y, [out, out_rows, tokens], y_strides).map_err(field_of("berth_moe_io", "y", "output"))?,
            })
        }
    }

    /// The workspace, if nothing else lies in it; and the output must not lie in `read`.
    ///
    /// # Safety
    /// `workspace` is NULL or has `workspace_size` bytes that nobody else uses while the result is used.
    unsafe fn workspace<'a>(&self, views: &Views<'_>, read: &[[Span; 3]]) -> Result<&'a mut [u8]> {
        let start = self.workspace.cast::<u8>();
        if start.is_null() || isize::try_from(self.workspace_size).is_err() {
            return if views.ids.tokens() == 0 {
                Ok(&mut [])
            } else {
                let why =
                    if start.is_null() { "is NULL".to_owned() } else { format!("of {} bytes is larger than memory", self.workspace_size) };
                Err(Error::invalid(format!("struct berth_moe_io: the workspace {why}")))
            };
        }
        let whole = Span::of(start, self.workspace_size).ok_or_else(|| Error::invalid("the workspace reaches beyond the end of memory"))?;
        let (x, ids, y) = (views.x.span(), views.ids.span(), views.y.span());
        let weights = views.weights.map_or(Span::NONE, |w| w.span());
        if [x, ids, y, weights].iter().any(|span| span.meets(whole)) {
            return Err(Error::invalid("the workspace overlaps x, ids, weights or y"));
        }
        for &span in read.as_flattened() {
            if span.meets(whole) || span.meets(y) {
                return Err(Error::invalid("the workspace or y overlaps the weights of the experts"));
            }
        }
        // SAFETY: by the caller's promise; nothing else of this call lies there.
        Ok(unsafe { std::slice::from_raw_parts_mut(start, self.workspace_size) })
    }
}

/// Everything that is read of a projection.
fn spans(p: &Projection<'_>) -> [Span; 3] {
    [p.matrix.span(), p.scale.map_or(Span::NONE, |s| s.span()), p.bias.map_or(Span::NONE, |b| b.span())]
}

/// The instruction set of the kernels: "avx512", "avx2" or "scalar". Chosen at the first call of this or any other function that computes:
/// the best of this processor, or a lower one in `BERTH_ISA`. NULL if that has a bad value: see `berth_last_error`. Constant.
#[unsafe(no_mangle)]
pub extern "C" fn berth_isa() -> *const c_char {
    guard("berth_isa", std::ptr::null(), || match kernels() {
        Ok(kernels) => match kernels.isa().tier() {
            Tier::Scalar => c"scalar",
            Tier::Avx2 => c"avx2",
            Tier::Avx512 => c"avx512",
        }
        .as_ptr(),
        Err(error) => {
            keep(&error);
            std::ptr::null()
        }
    })
}

/// Whether there are kernels for weights of this `enum ggml_type`, in every instruction set. If not, every function here refuses them with
/// `BERTH_STATUS_UNSUPPORTED`.
#[unsafe(no_mangle)]
pub extern "C" fn berth_moe_type_supported(ggml_type: c_int) -> bool {
    guard("berth_moe_type_supported", false, || WeightType::from_ggml(ggml_type).is_some())
}

/// Whether the experts can be computed: everything that `berth_moe_forward` checks of them.
///
/// # Safety
/// `desc` must be NULL, which is an error, or point at a struct whose `struct_size` is set, and whose pointers are NULL or as described there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_moe_check(desc: *const MoeDesc) -> Status {
    status("berth_moe_check", || {
        kernels()?;
        // SAFETY: the caller vouches for `desc` and what it points at.
        unsafe { input::get(desc)?.experts() }.map(drop)
    })
}

/// Bytes of workspace for up to `n_tokens` tokens with up to `n_used` experts each, on up to `threads` threads.
///
/// # Safety
/// `desc` as in `berth_moe_check`; `bytes` must be NULL, which is an error, or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_moe_workspace_size(
    desc: *const MoeDesc,
    n_tokens: usize,
    n_used: usize,
    threads: usize,
    bytes: *mut usize,
) -> Status {
    status("berth_moe_workspace_size", || {
        kernels()?;
        // SAFETY: the caller vouches for `desc` and what it points at.
        let desc = unsafe { input::get(desc) }?;
        // SAFETY: likewise.
        let experts = unsafe { desc.experts() }?;
        if desc.flags & BERTH_MOE_READ_AHEAD != 0 {
            // The settings are read now, so that computing allocates nothing. One that is not understood is read-ahead that is off.
            let _ = config::get();
        }
        // SAFETY: the caller vouches for `bytes`.
        unsafe { input::output(bytes, "bytes", || moe::workspace_size(&experts, n_tokens, n_used, checked(threads)?)) }
    })
}

fn checked(threads: usize) -> Result<usize> {
    let allowed = 1..=threads::BERTH_MAX_THREADS;
    if allowed.contains(&threads) { Ok(threads) } else { Err(Error::invalid(format!("{threads} threads, allowed are 1 to 1024"))) }
}

/// Computes the experts of all tokens. `threads` may be NULL: the calling thread alone. Results do not depend on the threads. Allocates
/// nothing. On an error nothing has been written to `y`, unless a function in `threads` broke its promise during the last of its calls.
///
/// # Safety
/// `desc` as in `berth_moe_check`; `io` must be NULL, which is an error, or point at a struct whose `struct_size` is set, and whose pointers
/// are NULL or point at as much as the numbers say; `threads` must be NULL or point at a struct whose `struct_size` is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_moe_forward(desc: *const MoeDesc, io: *const MoeIo, threads: *const Threads) -> Status {
    status("berth_moe_forward", || {
        let kernels = kernels()?;
        // SAFETY: the caller vouches for all three and what they point at.
        unsafe {
            let desc = input::get(desc)?;
            let experts = desc.experts()?;
            let ahead: &dyn moe::Ahead = if desc.flags & BERTH_MOE_READ_AHEAD != 0 { &READER } else { &moe::Never };
            let io = MoeIo { y_row_stride: 0, ..input::get(io)? };
            let views = io.views(experts.up.matrix.k(), experts.down.matrix.rows(), 1)?;
            let gate = experts.gate.as_ref().map_or([Span::NONE; 3], spans);
            let read = [gate, spans(&experts.up), spans(&experts.down)];
            let workspace = io.workspace(&views, &read)?;
            let Views { x, ids, weights, y } = views;
            let inputs = Inputs { x, ids, weights, y };
            threads::with(threads, |threads| moe::forward_ahead(&experts, &inputs, workspace, kernels, threads, ahead))
        }
    })
}

/// Asks for the weights of experts that are not in memory, and does not wait: for who knows the ids early, while something else is computed.
/// Gate and up of all of them come before down. Nothing to do for weights in memory that no file is behind, and with `BERTH_READAHEAD=off`. What is
/// asked for costs some 0.7 ms per MB of the calling thread's time, on the machine where that was measured; what is in memory some microseconds per
/// expert. Allocates nothing. `berth_moe_forward` does the same with `BERTH_MOE_READ_AHEAD`.
///
/// # Safety
/// `desc` as in `berth_moe_check`; `ids` must point at `n` numbers, or `n` be 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_moe_prefetch(desc: *const MoeDesc, ids: *const i32, n: usize) -> Status {
    status("berth_moe_prefetch", || {
        // SAFETY: the caller vouches for `desc` and what it points at.
        let experts = unsafe { input::get(desc)?.experts() }?;
        // SAFETY: the caller vouches for `ids`.
        let ids = unsafe { input::array(ids, n, "ids") }?;
        moe::prefetch(&experts, ids, &READER)
    })
}

/// Bytes of workspace for `berth_mul_mat_id`, as `berth_moe_workspace_size`.
///
/// # Safety
/// `desc` must be NULL, which is an error, or point at a struct whose `struct_size` is set, and whose pointers are NULL or as described there;
/// `bytes` must be NULL, which is an error, or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_mul_mat_id_workspace_size(
    desc: *const MulMatIdDesc,
    n_tokens: usize,
    n_used: usize,
    threads: usize,
    bytes: *mut usize,
) -> Status {
    status("berth_mul_mat_id_workspace_size", || {
        kernels()?;
        // SAFETY: the caller vouches for `desc` and what it points at.
        let matrix = unsafe { input::get(desc)?.matrix() }?;
        // SAFETY: the caller vouches for `bytes`.
        unsafe { input::output(bytes, "bytes", || moe::mul_mat_id_workspace_size(&matrix, n_tokens, n_used, checked(threads)?)) }
    })
}

/// Computes `y[t][j] = weights[ids[t][j]] . x[t][j]`, or with `x[t]` where there is one vector per token. As `berth_moe_forward` otherwise.
///
/// # Safety
/// As `berth_moe_forward`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_mul_mat_id(desc: *const MulMatIdDesc, io: *const MoeIo, threads: *const Threads) -> Status {
    status("berth_mul_mat_id", || {
        let kernels = kernels()?;
        // SAFETY: the caller vouches for all three and what they point at.
        unsafe {
            let matrix = input::get(desc)?.matrix()?;
            let io = MoeIo { weights: std::ptr::null(), ..input::get(io)? };
            let views = io.views(matrix.k(), matrix.rows(), io.n_used)?;
            let workspace = io.workspace(&views, &[[matrix.span(), Span::NONE, Span::NONE]])?;
            let Views { x, ids, y, .. } = &views;
            threads::with(threads, |threads| moe::mul_mat_id(&matrix, x, ids, y, workspace, kernels, threads))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structs_have_the_sizes_that_c_sees() {
        // 64-bit Linux only; a change here is a change of the ABI.
        let sizes = [size_of::<Weights>(), size_of::<MoeDesc>(), size_of::<MulMatIdDesc>(), size_of::<MoeIo>()];
        assert_eq!(sizes, [64, 248, 96, 128]);
    }

    #[test]
    fn types_without_kernels_are_known_beforehand() {
        let supported: Vec<c_int> = (-5..200).filter(|n| berth_moe_type_supported(*n)).collect();
        assert_eq!(supported, [0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23, 30, 39]);
        assert!(!berth_moe_type_supported(c_int::MIN) && !berth_moe_type_supported(c_int::MAX));
    }
}
