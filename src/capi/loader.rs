//! `berth_loader_*`: the create_tensor path, for C and C++ loaders.

use std::ffi::{CString, OsStr, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use super::placement::{LoadDesc, Memory, flags, reason_texts};
use super::rules::Rules;
use super::{input, status};
use crate::abi::{ggml_backend_buffer, guard};
use crate::backend::{self, Kind};
use crate::config;
use crate::error::{Error, Result, Status};
use crate::loader;
use crate::placement::{self, Target, Targets};

/// A model on its way into memory. One thread at a time.
pub struct Loader {
    loader: loader::Loader,
    /// What C sees of each tensor; boxed, so that its address does not change.
    #[expect(clippy::vec_box, reason = "addresses are given out")]
    views: Vec<Box<View>>,
    names: Vec<CString>,
}

struct View {
    info: TensorInfo,
    /// `info` points into it.
    target: CString,
}

/// A tensor of a loader. It belongs to the loader, and is up to date after every call of it.
#[repr(C)]
pub struct TensorInfo {
    /// Name, as in the model.
    pub name: *const c_char,
    /// `enum ggml_type`.
    pub ggml_type: u32,
    /// Part of a split model, from 0.
    pub part: u32,
    /// Elements per dimension, innermost first.
    pub ne: [i64; 4],
    /// Stride per dimension in bytes, innermost first.
    pub nb: [usize; 4],
    /// Bytes of the data.
    pub bytes: usize,
    /// Offset of the data in its file.
    pub offset: u64,
    /// The data, after `berth_loader_alloc`; NULL before, and for a tensor on a device. Complete after `berth_loader_fill`; at once, if
    /// `memory` is `BERTH_MEMORY_MAPPED`, and then read-only.
    pub data: *mut c_void,
    /// Name of the place, as in `-ot`.
    pub target: *const c_char,
    /// Where its bytes lie.
    pub memory: Memory,
    /// Index of the rule that won, from 0; -1 if none did.
    pub rule: i32,
    /// Whether the place is the one that a rule names, kept as it is.
    pub buft_overridden: bool,
    /// Whether the choice was page-locked memory, and became the mapping because there is one.
    pub downgraded: bool,
    /// Why, as a stable code. Constant.
    pub reason: *const c_char,
    /// Why, as a sentence. Constant.
    pub reason_text: *const c_char,
}

impl Loader {
    /// Brings what C sees up to date, from the tensor `first` on. The text of a place stays where it is while it says the same.
    fn refresh(&mut self, first: usize) -> Result<()> {
        for (at, tensor) in self.loader.tensors().enumerate().skip(first) {
            let d = &tensor.decision;
            let place = d.target.as_ref().map_or("", Target::name);
            let target = match self.views.get_mut(at) {
                Some(old) if old.target.as_bytes() == place.as_bytes() => std::mem::take(&mut old.target),
                _ => CString::new(place).unwrap_or_default(),
            };
            let (reason, reason_text) = reason_texts(d.reason);
            let mut ne = [0; 4];
            for (to, from) in ne.iter_mut().zip(tensor.ne) {
                *to = i64::try_from(from).map_err(|_| Error::invalid("a dimension that is too large"))?;
            }
            let info = TensorInfo {
                name: tensor.name.as_ptr(),
                ggml_type: tensor.type_number,
                part: tensor.part as u32,
                ne,
                nb: tensor.nb.map(|n| n as usize),
                bytes: tensor.bytes,
                offset: tensor.offset,
                data: tensor.data.cast(),
                target: target.as_ptr(),
                memory: d.memory.into(),
                rule: d.rule.and_then(|r| i32::try_from(r).ok()).unwrap_or(-1),
                buft_overridden: d.buft_overridden,
                downgraded: d.downgraded,
                reason,
                reason_text,
            };
            let view = View { info, target };
            match self.views.get_mut(at) {
                Some(old) => **old = view,
                None => self.views.push(Box::new(view)),
            }
        }
        Ok(())
    }

    fn view(&self, at: usize) -> *const TensorInfo {
        self.views.get(at).map_or(std::ptr::null(), |v| &raw const v.info)
    }
}

/// Opens a model (the first part of a split one) and reads its headers. `rules` may be NULL: then there are none; else they must not be changed
/// while the loader lives, and their matches are counted. `load` may be NULL: then as `berth_load_init` says; its `repack` must be 0, since every
/// tensor keeps the order of the file. Free with `berth_loader_free`.
///
/// # Safety
/// `path` must be NULL, which is an error, or NUL-terminated; `rules` NULL or valid; `load` NULL or valid with all it points at; `loader` NULL,
/// which is an error, or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_loader_open(
    path: *const c_char,
    rules: *const Rules,
    load: *const LoadDesc,
    loader: *mut *mut Loader,
) -> Status {
    status("berth_loader_open", || {
        config::get()?;
        if path.is_null() {
            return Err(Error::invalid("path is NULL"));
        }
        // SAFETY: the caller vouches for the path.
        let path = Path::new(OsStr::from_bytes(unsafe { std::ffi::CStr::from_ptr(path) }.to_bytes()));
        // SAFETY: the caller vouches for `load` and what it points at.
        let load = if load.is_null() { placement::Load::default() } else { unsafe { input::get(load)?.to_load() }? };
        // SAFETY: the caller vouches for `rules`.
        let rules = unsafe { rules.as_ref() }.map(|r| r.rules.clone());
        let none = || Arc::new(placement::Rules::new(Targets::new(load.devices.iter().map(|d| &*d.name))));
        let rules = rules.unwrap_or_else(none);
        let make = || {
            let loader = loader::Loader::open(path, rules, load)?;
            let name = |t: crate::gguf::ModelTensor<'_>| CString::new(t.info.name).unwrap_or_default();
            let names = loader.model().tensors().map(name).collect();
            Ok(Box::into_raw(Box::new(Loader { loader, views: Vec::new(), names })))
        };
        // SAFETY: the caller vouches for `loader`.
        unsafe { input::output(loader, "loader", make) }
    })
}

/// How many tensors the model has; 0 for NULL.
///
/// # Safety
/// `loader` must be NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_loader_model_count(loader: *const Loader) -> usize {
    // SAFETY: the caller vouches for `loader`.
    guard("berth_loader_model_count", 0, || unsafe { loader.as_ref() }.map_or(0, |l| l.names.len()))
}

/// The name of the model's tensor at `index`, from 0, in file order; NULL if there is none. It lives as long as the loader.
///
/// # Safety
/// `loader` must be NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_loader_model_name(loader: *const Loader, index: usize) -> *const c_char {
    guard("berth_loader_model_name", std::ptr::null(), || {
        // SAFETY: the caller vouches for `loader`.
        let loader = unsafe { loader.as_ref() };
        loader.and_then(|l| l.names.get(index)).map_or(std::ptr::null(), |n| n.as_ptr())
    })
}

/// Decides where the tensor `name` goes, and wants it. `flags` are `BERTH_TENSOR_*` bits. `*tensor` is NULL if it is not made: it is missing and
/// not required, or skipped. A second use of a tensor in the same place, asked for as duplicated, is the same tensor.
///
/// # Safety
/// `loader` must be NULL, which is an error, or valid; `name` NULL, which is an error, or NUL-terminated; `tensor` NULL, which is an error, or
/// writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_create_tensor(
    loader: *mut Loader,
    name: *const c_char,
    flags: u32,
    tensor: *mut *const TensorInfo,
) -> Status {
    status("berth_create_tensor", || {
        // SAFETY: the caller vouches for both.
        let (loader, name) = unsafe { (input::handle(loader, "loader")?, input::text(name, "name")?) };
        let make = || {
            let flags = self::flags(flags, &[])?;
            let Some(at) = loader.loader.create_tensor(name, flags)? else { return Ok(std::ptr::null()) };
            loader.refresh(loader.views.len())?;
            Ok(loader.view(at))
        };
        // SAFETY: the caller vouches for `tensor`.
        unsafe { input::output(tensor, "tensor", make) }
    })
}

/// How many tensors were created; 0 for NULL.
///
/// # Safety
/// `loader` must be NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_loader_tensor_count(loader: *const Loader) -> usize {
    // SAFETY: the caller vouches for `loader`.
    guard("berth_loader_tensor_count", 0, || unsafe { loader.as_ref() }.map_or(0, |l| l.views.len()))
}

/// The tensor at `index`, from 0, in the order of creation; NULL if there is none.
///
/// # Safety
/// `loader` must be NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_loader_tensor(loader: *const Loader, index: usize) -> *const TensorInfo {
    // SAFETY: the caller vouches for `loader`.
    guard("berth_loader_tensor", std::ptr::null(), || unsafe { loader.as_ref() }.map_or(std::ptr::null(), |l| l.view(index)))
}

/// Gets memory for every tensor: one buffer per place. Where page-locked memory or an arena cannot be had, the tensors stay in the file's mapping
/// if the file is mapped, and get ordinary memory if it is not (as a backend in llama.cpp, which cannot give a mapping instead, Berth always
/// takes ordinary memory); with `BERTH_STRICT=1` that is an error. A file that was cut or written to since it was opened is
/// `BERTH_STATUS_BAD_FILE`, and named. After an error nothing is allocated, and it may be tried again.
///
/// # Safety
/// `loader` must be NULL, which is an error, or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_loader_alloc(loader: *mut Loader) -> Status {
    status("berth_loader_alloc", || {
        // SAFETY: the caller vouches for `loader`.
        let loader = unsafe { input::handle(loader, "loader") }?;
        loader.loader.allocate()?;
        loader.refresh(0)
    })
}

/// Takes the bytes read and the bytes to read; returns false to cancel. The pointer given with the function.
pub type ProgressFn = Option<unsafe extern "C" fn(done: u64, total: u64, user: *mut c_void) -> bool>;

/// Reads the bytes of every tensor that does not stay in the mapping. `progress` may be NULL; it is called on this thread, after every 8 MiB or
/// 100 ms and at the end. After a cancel or an error this may be called again. A file that was cut or written to since it was opened,
/// or while it is read, is `BERTH_STATUS_BAD_FILE`, and named.
///
/// # Safety
/// `loader` must be NULL, which is an error, or valid; `progress` NULL or callable with `user`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_loader_fill(loader: *mut Loader, progress: ProgressFn, user: *mut c_void) -> Status {
    status("berth_loader_fill", || {
        // SAFETY: the caller vouches for `loader`.
        let loader = unsafe { input::handle(loader, "loader") }?;
        loader.loader.fill(&mut |done, total| {
            // SAFETY: the caller vouches for function and pointer.
            progress.is_none_or(|progress| unsafe { progress(done, total, user) })
        })
    })
}

/// A ggml buffer over the memory that holds `tensor`, of the buffer type of its place, for `ggml_backend_tensor_alloc`. Needs a ggml in the
/// process, and `berth_loader_alloc` before. The caller frees it with `ggml_backend_buffer_free`, before the loader.
///
/// # Safety
/// `loader` must be NULL, which is an error, or valid; `tensor` one of its tensors; `buffer` NULL, which is an error, or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_loader_ggml_buffer(
    loader: *mut Loader,
    tensor: *const TensorInfo,
    buffer: *mut *mut ggml_backend_buffer,
) -> Status {
    status("berth_loader_ggml_buffer", || {
        // SAFETY: the caller vouches for `loader`.
        let loader = unsafe { input::handle(loader, "loader") }?;
        let make = || {
            let at = loader.views.iter().position(|v| std::ptr::eq(&raw const v.info, tensor));
            let at = at.ok_or_else(|| Error::invalid("tensor is not one of this loader"))?;
            let holder = loader.loader.tensors().nth(at).and_then(|t| t.buffer);
            let found = holder.and_then(|b| loader.loader.buffers().get(b));
            let found = found.ok_or_else(|| Error::invalid("the tensor has no host memory (berth_loader_alloc comes first)"))?;
            let kind = match found.target {
                Target::CudaHost | Target::StockHost(_) => Kind::CudaHost,
                Target::Arena => Kind::Arena,
                Target::Cpu | Target::CpuMmap | Target::Device(_) => Kind::CpuMmap,
            };
            let instance = backend::instance()?;
            // SAFETY: the loader owns the memory, and the caller frees the buffer before the loader.
            let made = unsafe { instance.buffer_over(kind, found.base(), found.len(), found.is_writable()) };
            if made.is_null() { Err(Error::new(Status::OutOfMemory, "ggml_backend_buffer_init returned NULL")) } else { Ok(made) }
        };
        // SAFETY: the caller vouches for `buffer`.
        unsafe { input::output(buffer, "buffer", make) }
    })
}

/// Frees a loader, its tensors and their memory. NULL is allowed.
///
/// # Safety
/// `loader` must be NULL, or valid and not be used again, nor any tensor of it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_loader_free(loader: *mut Loader) {
    guard("berth_loader_free", (), || {
        if !loader.is_null() {
            // SAFETY: by the caller's promise, made by `berth_loader_open` and freed once.
            drop(unsafe { Box::from_raw(loader) });
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_is_empty_is_named_and_a_very_long_one_is_cut() {
        let open = |path: &str| {
            let path = CString::new(path).unwrap();
            let mut loader = std::ptr::null_mut();
            // SAFETY: a path, no rules, no load, a place for the loader.
            let status = unsafe { berth_loader_open(path.as_ptr(), std::ptr::null(), std::ptr::null(), &raw mut loader) };
            assert!(loader.is_null());
            // SAFETY: a string of this thread.
            (status, unsafe { std::ffi::CStr::from_ptr(crate::capi::berth_last_error()) }.to_string_lossy().into_owned())
        };
        assert_eq!(open(""), (Status::NotFound, "'' (an empty path): No such file or directory (os error 2)".into()));
        let (status, text) = open(&"x".repeat(1 << 20));
        assert!(status == Status::Io && text.len() < 400 && text.contains("xxx...xxx"), "{text}");
    }
}
