//! The contents of a buffer: every access to tensor bytes, checked against the region.
//!
//! Owns: bounds. Must not know: which kind of memory it is, which layout the host's tables have.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::fill;
use super::hold::Hold;
use super::lasting::Lasting;
use super::reading::Reading;
use crate::abi::{self, Host, ggml_tensor};
use crate::log;
use crate::memory::Region;
use crate::report;

/// What a ggml buffer of ours points at.
pub(super) struct Contents {
    pub(super) host: &'static Host,
    pub(super) name: &'static str,
    pub(super) region: Arc<Region>,
    /// Its record in the report; none if its owner keeps that.
    pub(super) id: Option<report::Id>,
    /// Whether its line has been logged. What is allocated in plain memory may be for weights or for a graph's values: that is known only when
    /// the first tensor comes.
    pub(super) announced: AtomicBool,
    /// What holds its pages.
    pub(super) hold: Hold,
    /// What decides whether its bytes are kept for the next start.
    pub(super) lasting: Option<Arc<Lasting>>,
    /// Bounds what is dirty while the host reads into it by itself.
    pub(super) reading: Reading,
}

/// A part of a tensor, or several equally spaced ones: `count` pieces of `size` bytes, `stride` bytes apart, the first at `offset`.
#[derive(Clone, Copy)]
pub(super) struct Span {
    pub(super) offset: usize,
    pub(super) size: usize,
    pub(super) count: usize,
    pub(super) stride: usize,
}

impl Span {
    pub(super) fn one(offset: usize, size: usize) -> Span {
        Span { offset, size, count: 1, stride: 0 }
    }

    fn is_empty(self) -> bool {
        self.size == 0 || self.count == 0
    }

    /// Bytes from the tensor's start to the end of the last piece.
    fn end(self) -> Option<usize> {
        self.stride.checked_mul(self.count.checked_sub(1)?)?.checked_add(self.offset)?.checked_add(self.size)
    }
}

impl Contents {
    /// Address of a tensor's data if the span lies in the tensor and in the region; else one ERROR line, and `None`.
    fn locate(&self, tensor: &ggml_tensor, span: Span, what: &str) -> Option<*mut u8> {
        // SAFETY: the tensor is the host's, and the function only reads its shape.
        let bytes = unsafe { (self.host.api.ggml_nbytes)(tensor) };
        let found = span.end().filter(|end| *end <= bytes).and_then(|end| self.region.within(tensor.data.cast(), end));
        if found.is_none() {
            let Span { offset, size, count, stride } = span;
            log::error!(
                "{}: {what} of {count} x {size} bytes at {offset} (stride {stride}) refused: not inside the tensor's {bytes} bytes",
                self.name
            );
        }
        found
    }

    /// The same for writing.
    fn locate_writable(&self, tensor: &ggml_tensor, span: Span, what: &str) -> Option<*mut u8> {
        if !self.region.is_writable() {
            log::error!("{}: {what} refused: the buffer is a read-only mapping", self.name);
            return None;
        }
        self.locate(tensor, span, what)
    }

    fn written(&self, data: *mut u8, span: Span) {
        if let Some(len) = span.end() {
            self.region.written(self.offset_of(data) + span.offset, len - span.offset);
            self.region.complete();
        }
    }

    /// Where in the region an address in it is.
    fn offset_of(&self, data: *mut u8) -> usize {
        data.addr() - self.region.base().addr()
    }

    pub(super) fn memset(&self, tensor: &ggml_tensor, value: u8, span: Span) {
        if span.is_empty() {
            return;
        }
        if let Some(data) = self.locate_writable(tensor, span, "memset") {
            self.spoil();
            // SAFETY: the span lies in the region, which is writable; the host orders accesses to one tensor.
            unsafe { std::ptr::write_bytes(data.add(span.offset), value, span.size) };
            self.written(data, span);
        }
    }

    /// Brings pieces from `source`, where they are `source_stride` bytes apart, into the tensor: values of a graph by copying, what stays in the
    /// best way there is. False if that was refused.
    ///
    /// # Safety
    /// `source` must be readable for all pieces.
    pub(super) unsafe fn set(&self, tensor: &ggml_tensor, usage: c_int, source: *const c_void, source_stride: usize, span: Span) -> bool {
        if span.is_empty() {
            return true;
        }
        if source.is_null() {
            log::error!("{}: set refused: the source is NULL", self.name);
            return false;
        }
        let Some(data) = self.locate_writable(tensor, span, "set") else { return false };
        self.reading.end();
        let stays = usage != abi::GGML_BACKEND_BUFFER_USAGE_COMPUTE;
        if !stays {
            self.spoil();
        }
        for i in 0..span.count {
            let from = source.cast::<u8>().wrapping_add(i * source_stride);
            let at = span.offset + i * span.stride;
            // SAFETY: the piece lies in the region; the caller vouches for the source. They may overlap: a source in the same mapping.
            unsafe {
                if !stays || !self.bring(self.offset_of(data) + at, from, span.size) {
                    std::ptr::copy(from, data.add(at), span.size);
                }
            }
        }
        if !stays {
            self.written(data, span);
        }
        true
    }

    /// # Safety
    /// As [`fill::set`].
    unsafe fn bring(&self, offset: usize, source: *const u8, len: usize) -> bool {
        // SAFETY: by the caller's promise.
        unsafe { fill::set(self.name, self.id, self.lasting.as_deref(), &self.region, offset, source, len) }
    }

    /// Bytes are written that are no tensor of a model.
    fn spoil(&self) {
        if let Some(lasting) = &self.lasting {
            lasting.spoil();
        }
    }

    /// Copies pieces of the tensor to `target`, where they are `target_stride` bytes apart.
    ///
    /// # Safety
    /// `target` must be writable for all pieces.
    pub(super) unsafe fn get(&self, tensor: &ggml_tensor, target: *mut c_void, target_stride: usize, span: Span) {
        if span.is_empty() {
            return;
        }
        if target.is_null() {
            log::error!("{}: get refused: the target is NULL", self.name);
            return;
        }
        let Some(data) = self.locate(tensor, span, "get") else { return };
        for i in 0..span.count {
            let to = target.cast::<u8>().wrapping_add(i * target_stride);
            // SAFETY: the piece lies in the region; the caller vouches for the target.
            unsafe { std::ptr::copy(data.add(span.offset + i * span.stride), to, span.size) };
        }
    }

    /// Copies a whole tensor of another buffer into `target`, if it lies in host memory. The host has checked that the layouts are equal.
    ///
    /// # Safety
    /// `source` must be a tensor of the host with valid data.
    pub(super) unsafe fn copy_from(&self, source: &ggml_tensor, target: &ggml_tensor, usage: c_int) -> bool {
        // SAFETY: a view's source is a tensor that lives at least as long as the view.
        let holder = unsafe { source.view_src.as_ref() }.unwrap_or(source);
        // SAFETY: a buffer that is set is a live buffer of the host.
        if holder.buffer.is_null() || source.data.is_null() || !unsafe { (self.host.api.ggml_backend_buffer_is_host)(holder.buffer) } {
            return false;
        }
        // SAFETY: the tensor is the host's.
        let bytes = unsafe { (self.host.api.ggml_nbytes)(source) };
        // SAFETY: the source's data is in host memory and that long.
        unsafe { self.set(target, usage, source.data, 0, Span::one(0, bytes)) }
    }

    pub(super) fn clear(&self, value: u8) {
        if self.region.is_empty() {
            return;
        }
        if !self.region.is_writable() {
            log::error!("{}: clear refused: the buffer is a read-only mapping", self.name);
            return;
        }
        self.spoil();
        // In steps, so that the dirty bytes of a file stay bounded.
        const STEP: usize = 8 << 20;
        for at in (0..self.region.len()).step_by(STEP) {
            let len = STEP.min(self.region.len() - at);
            // SAFETY: the whole region is writable, and the host lets nobody else use it meanwhile.
            unsafe { std::ptr::write_bytes(self.region.base().add(at), value, len) };
            self.region.written(at, len);
        }
        self.region.complete();
    }

    /// Takes note of a tensor that the host puts here, in a buffer of this usage.
    pub(super) fn place(&self, tensor: &ggml_tensor, usage: c_int) {
        let compute = usage == abi::GGML_BACKEND_BUFFER_USAGE_COMPUTE;
        if !self.announced.load(Ordering::Relaxed)
            && !self.announced.swap(true, Ordering::Relaxed)
            && let Some(id) = self.id
        {
            report::announce(id, if compute { report::Usage::Compute } else { report::Usage::Tensors });
        }
        if let Some(id) = self.id {
            self.hold.decide(self.name, id, &self.region, compute, self.lasting.is_some());
        }
        // Activations pass here for every graph and are of no interest.
        if !compute {
            self.reading.begin(&self.region);
            self.remember(tensor);
        }
    }

    /// Remembers a weight for the report. Views are parts of weights that are remembered already.
    fn remember(&self, tensor: &ggml_tensor) {
        let Some(id) = self.id.filter(|_| tensor.view_src.is_null()) else { return };
        let name = tensor.name.map(|c| c as u8);
        let name = name.split(|c| *c == 0).next().unwrap_or(&[]);
        // SAFETY: the tensor is the host's.
        let bytes = unsafe { (self.host.api.ggml_nbytes)(tensor) };
        let type_name = abi::GGML_TYPES.iter().find(|(number, _)| *number == tensor.type_).map_or("other", |(_, name)| name);
        let name = String::from_utf8_lossy(name).into_owned();
        if let Some(data) = self.region.within(tensor.data.cast(), bytes)
            && let Some(pinned) = self.region.keep_whole(self.offset_of(data), bytes)
        {
            report::pinned(id, pinned);
        }
        if let Some(lasting) = &self.lasting
            && let Some(data) = self.region.within(tensor.data.cast(), bytes)
        {
            lasting.place(&name, self.offset_of(data), bytes);
        }
        report::add_tensor(id, report::Tensor { name, type_name, bytes });
    }
}
