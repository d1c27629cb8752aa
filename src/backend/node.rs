//! A tensor of the host's graph, looked at.
//!
//! Owns: [`Node`], the questions that claims, matcher and execution ask about a tensor. Must not know: what is done with the answers.

use std::ffi::c_void;

use crate::abi::*;
use crate::moe::WeightType;

/// A tensor that the host keeps alive for the time of a call.
#[derive(Clone, Copy)]
pub(super) struct Node<'a>(&'a ggml_tensor);

impl<'a> Node<'a> {
    /// # Safety
    /// `tensor` must be NULL or a live tensor of the host for `'a`, as must everything that it leads to.
    pub(super) unsafe fn new(tensor: *const ggml_tensor) -> Option<Node<'a>> {
        // SAFETY: the caller vouches for it.
        unsafe { tensor.as_ref() }.map(Node)
    }

    pub(super) fn is(self, other: Node<'_>) -> bool {
        std::ptr::eq(self.0, other.0)
    }

    /// As the host's own functions want it.
    pub(super) fn raw(self) -> *mut ggml_tensor {
        std::ptr::from_ref(self.0).cast_mut()
    }

    /// The number of its type.
    pub(super) fn ty(self) -> i32 {
        self.0.type_
    }

    pub(super) fn op(self) -> i32 {
        self.0.op
    }

    pub(super) fn src(self, i: usize) -> Option<Node<'a>> {
        // SAFETY: operands of a live tensor are live.
        unsafe { Node::new(self.0.src[i]) }
    }

    /// All that it reads.
    pub(super) fn operands(self) -> impl Iterator<Item = Node<'a>> {
        // SAFETY: likewise.
        self.0.src.iter().filter_map(|src| unsafe { Node::new(*src) })
    }

    /// What this is a view of.
    pub(super) fn viewed(self) -> Option<Node<'a>> {
        // SAFETY: likewise.
        unsafe { Node::new(self.0.view_src) }
    }

    pub(super) fn view_offset(self) -> usize {
        self.0.view_offs
    }

    pub(super) fn param(self, i: usize) -> i32 {
        self.0.op_params[i]
    }

    pub(super) fn float_param(self, i: usize) -> f32 {
        f32::from_bits(self.0.op_params[i] as u32)
    }

    /// Elements of a dimension. The host makes no negative ones; they count as 0.
    pub(super) fn ne(self, i: usize) -> usize {
        usize::try_from(self.0.ne[i]).unwrap_or(0)
    }

    pub(super) fn shape(self) -> [usize; 4] {
        [self.ne(0), self.ne(1), self.ne(2), self.ne(3)]
    }

    /// The shape, if no size is negative.
    pub(super) fn sizes(self) -> Option<[usize; 4]> {
        self.0.ne.iter().all(|n| *n >= 0).then(|| self.shape())
    }

    /// Stride of a dimension, in bytes.
    pub(super) fn nb(self, i: usize) -> usize {
        self.0.nb[i]
    }

    pub(super) fn data(self) -> *mut c_void {
        self.0.data
    }

    pub(super) fn name(self) -> String {
        let bytes = self.0.name.map(|c| c as u8);
        String::from_utf8_lossy(bytes.split(|c| *c == 0).next().unwrap_or(&[])).into_owned()
    }

    /// The buffer it lies in; NULL before the graph has its memory.
    pub(super) fn buffer(self) -> *mut ggml_backend_buffer {
        self.viewed().map_or(self.0.buffer, |v| v.0.buffer)
    }

    /// f32 in rows without gaps inside, at most three dimensions.
    pub(super) fn is_rows(self) -> bool {
        let aligned = self.0.nb[1..].iter().all(|nb| nb.is_multiple_of(4));
        self.0.type_ == GGML_TYPE_F32 && self.nb(0) == 4 && self.ne(3) == 1 && aligned
    }

    /// f32 rows, one right after the other.
    pub(super) fn is_packed(self) -> bool {
        let row = 4 * self.ne(0);
        self.is_rows() && (self.ne(1) == 1 || self.nb(1) == row) && (self.ne(2) == 1 || self.nb(2) == row * self.ne(1))
    }

    /// i32 in at most two dimensions: a table of ids.
    pub(super) fn is_ids(self) -> bool {
        self.0.type_ == GGML_TYPE_I32 && self.ne(2) == 1 && self.ne(3) == 1 && self.nb(0) == 4 && self.nb(1).is_multiple_of(4)
    }

    /// The type, if these are expert weights in a layout that can be multiplied with: whole blocks in a row, rows and experts in order.
    pub(super) fn expert_weights(self) -> Option<WeightType> {
        let ty = WeightType::from_ggml(self.0.type_)?;
        let row = ty.row_bytes(self.ne(0))?;
        let in_order = self.nb(0) == ty.block_bytes()
            && self.ne(3) == 1
            && self.0.ne[..3].iter().all(|n| *n > 0)
            && self.nb(1) >= row
            && self.nb(2) >= self.nb(1).checked_mul(self.ne(1) - 1)?.checked_add(row)?;
        in_order.then_some(ty)
    }
}
