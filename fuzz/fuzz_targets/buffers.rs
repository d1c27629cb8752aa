//! Any sequence of what a ggml does with buffers of Berth's types, next to a plain model of the bytes: tensors set, read, filled, cleared, copied from one
//! type to another, buffers freed and made again.

#![no_main]
#![allow(clippy::undocumented_unsafe_blocks)]

mod choices;
mod ggml;

use std::ffi::c_int;

use berth::backend::{KINDS, instance};
use choices::Choices;
use ggml::{InitParams, Ptr, ggml};
use libfuzzer_sys::fuzz_target;

const F32: c_int = 0;
/// Usage of a buffer.
const WEIGHTS: c_int = 1;

/// A buffer with its tensors, and what they must hold. `None` where nothing has been set.
struct Buffer {
    context: Ptr,
    memory: Ptr,
    tensors: Vec<(Ptr, Vec<Option<u8>>)>,
}

impl Buffer {
    fn new(c: &mut Choices<'_>) -> Option<Buffer> {
        let f = ggml();
        let kind = KINDS[usize::from(c.below(3))];
        let count = 1 + c.below(3);
        unsafe {
            let context = (f.ggml_init)(InitParams { size: 1 << 14, buffer: std::ptr::null_mut(), no_alloc: true });
            let tensors: Vec<_> = (0..count)
                .map(|_| {
                    let shape = [i64::from(c.byte()), 1 + i64::from(c.below(9)), 1 + i64::from(c.below(3))];
                    let tensor = (f.ggml_new_tensor_3d)(context, F32, shape[0], shape[1], shape[2]);
                    (tensor, vec![None; (4 * shape[0] * shape[1] * shape[2]) as usize])
                })
                .collect();
            let memory = (f.ggml_backend_alloc_ctx_tensors_from_buft)(context, instance().ok()?.buffer_type(kind).cast());
            // Tensors of no bytes need no buffer.
            assert!(!memory.is_null() || tensors.iter().all(|(_, bytes)| bytes.is_empty()), "memory");
            if !memory.is_null() && c.rarely() {
                (f.ggml_backend_buffer_set_usage)(memory, WEIGHTS);
            }
            Some(Buffer { context, memory, tensors })
        }
    }

    fn check(&self) {
        for (tensor, want) in self.tensors.iter().filter(|(_, want)| !want.is_empty()) {
            let mut got = vec![0u8; want.len()];
            unsafe { (ggml().ggml_backend_tensor_get)(*tensor, got.as_mut_ptr().cast(), 0, got.len()) };
            assert!(got.iter().zip(want).all(|(got, want)| want.is_none_or(|w| w == *got)), "bytes are others");
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        unsafe {
            if !self.memory.is_null() {
                (ggml().ggml_backend_buffer_free)(self.memory);
            }
            (ggml().ggml_free)(self.context);
        }
    }
}

/// A part of a tensor: first byte and length, which may be 0.
fn part(c: &mut Choices<'_>, len: usize) -> (usize, usize) {
    let at = usize::from(c.byte()) * 37 % (len + 1);
    (at, usize::from(c.byte()) * 41 % (len - at + 1))
}

fuzz_target!(|input: &[u8]| {
    let f = ggml();
    let mut c = Choices(input);
    let mut buffers: Vec<Buffer> = Vec::new();
    while !c.0.is_empty() {
        let what = c.below(9);
        if what == 0 && buffers.len() < 4 || buffers.is_empty() {
            buffers.extend(Buffer::new(&mut c));
            continue;
        }
        let which = usize::from(c.byte()) % buffers.len();
        if what == 1 {
            buffers.swap_remove(which);
            continue;
        }
        if what == 2 {
            buffers[which].check();
            continue;
        }
        let value = c.byte();
        if what == 3 {
            // All of the buffer.
            if !buffers[which].memory.is_null() {
                unsafe { (f.ggml_backend_buffer_clear)(buffers[which].memory, value) };
            }
            buffers[which].tensors.iter_mut().for_each(|(_, bytes)| bytes.fill(Some(value)));
            continue;
        }
        let tensors = buffers[which].tensors.len();
        let (tensor, bytes) = &mut buffers[which].tensors[usize::from(value) % tensors];
        if bytes.is_empty() {
            continue;
        }
        let (at, len) = part(&mut c, bytes.len());
        match what {
            4 | 5 => {
                let new: Vec<u8> = (0..len).map(|i| value.wrapping_add((i as u8).wrapping_mul(7))).collect();
                unsafe { (f.ggml_backend_tensor_set)(*tensor, new.as_ptr().cast(), at, len) };
                bytes[at..at + len].iter_mut().zip(&new).for_each(|(b, n)| *b = Some(*n));
            }
            6 => {
                unsafe { (f.ggml_backend_tensor_memset)(*tensor, value, at, len) };
                bytes[at..at + len].fill(Some(value));
            }
            7 => {
                let mut got = vec![0u8; len];
                unsafe { (f.ggml_backend_tensor_get)(*tensor, got.as_mut_ptr().cast(), at, len) };
                assert!(got.iter().zip(&bytes[at..]).all(|(got, want)| want.is_none_or(|w| w == *got)), "bytes are others");
            }
            _ => {
                // To a tensor of the same shape, if there is one: its bytes become these.
                let (from, new) = (*tensor, bytes.clone());
                let to = buffers.iter_mut().flat_map(|b| &mut b.tensors).find(|(t, b)| *t != from && b.len() == new.len());
                if let Some((to, bytes)) = to.filter(|t| unsafe { (f.ggml_are_same_shape)(from, t.0) }) {
                    unsafe { (f.ggml_backend_tensor_copy)(from, *to) };
                    *bytes = new;
                }
            }
        }
    }
    buffers.iter().for_each(Buffer::check);
});
