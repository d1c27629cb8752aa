//! The one vtable behind every buffer type and every buffer, for all layouts of the host's tables.
//!
//! Owns: the trampolines from ggml's slots to [`BufferType`] and [`Contents`], and who owns which pointer. Every slot is named; those the
//! host calls without looking (`memset`, `set`, `get`, `clear`, `get_base`) are never absent.

use std::ffi::{c_char, c_int, c_void};
use std::marker::PhantomData;

use super::hold::{self, Hold};
use super::reading::Reading;
use super::tensors::{Contents, Span};
use super::{BufferType, Placed};
use crate::abi::*;
use crate::error::Result;
use crate::log;
use crate::memory::{Region, mapping};
use crate::report::{self, Place};

/// The ggml buffer type for `T`, in the layout of the host. Its context is the host. It is never freed.
pub fn buffer_type<T: BufferType>(host: &'static Host, device: *mut ggml_backend_device) -> *mut ggml_backend_buffer_type {
    fn boxed<I>(iface: I, host: &'static Host, device: *mut ggml_backend_device) -> *mut ggml_backend_buffer_type {
        let context = std::ptr::from_ref(host).cast_mut().cast();
        Box::into_raw(Box::new(ggml_backend_buffer_type_of { iface, device, context })).cast()
    }
    match host.layout {
        Layout::V1 | Layout::V2 => boxed(TypeTable::<T, ggml_backend_buffer_type_i_v2>::IFACE, host, device),
        Layout::V3 => boxed(TypeTable::<T, ggml_backend_buffer_type_i_v3>::IFACE, host, device),
    }
}

/// A buffer of the kind `T` over memory of the host: zero copy. `CUDA_Host` is page-locked when the load is over ([`super::loaded`]).
///
/// # Errors
/// If `base` is NULL and `size` is not 0, or the range wraps around; for `CUDA_Host` in strict mode, if there is no driver.
///
/// # Safety
/// `base` must point at `size` bytes that stay mapped until the buffer is freed, and `buft` must live as long.
pub unsafe fn from_host_ptr<T: BufferType>(
    buft: *mut ggml_backend_buffer_type,
    host: &'static Host,
    base: *mut u8,
    size: usize,
) -> Result<*mut ggml_backend_buffer> {
    if size > 0 && base.is_null() {
        return Err(crate::error::Error::invalid(format!("{}: a buffer of {size} bytes at NULL", T::name())));
    }
    if base.addr().checked_add(size).is_none() {
        return Err(crate::error::Error::invalid(format!("{}: {size} bytes at {base:p} wrap around", T::name())));
    }
    if size == 0 {
        return Ok(new_buffer(buft, host, T::name(), Placed::empty()));
    }
    T::may_be_mapped(size)?;
    let mapped = mapping::find(base);
    // What the kernel does not tell is taken as the host says: it hands out the pointer to be used.
    let writable = mapped.as_ref().is_none_or(|m| m.writable);
    let file = mapped.and_then(|m| m.file);
    // SAFETY: the caller vouches for the memory.
    let region = unsafe { Region::borrowed(base, size, writable) };
    Ok(new_buffer(buft, host, T::name(), Placed::as_asked(region, Place::Mapped, file)))
}

/// A buffer over a region that somebody else has allocated, filled and reported: the loader's. It must be freed before the region goes.
///
/// # Safety
/// `base` must point at `size` bytes, writable if `writable` says so, that stay valid until the buffer is freed; `buft` must be a type made by
/// [`buffer_type`] for `host` and live as long.
pub unsafe fn over_region(
    buft: *mut ggml_backend_buffer_type,
    host: &'static Host,
    name: &'static str,
    base: *mut u8,
    size: usize,
    writable: bool,
) -> *mut ggml_backend_buffer {
    // SAFETY: the caller vouches for the memory.
    let region = unsafe { Region::borrowed(base, size, writable) };
    wrap(
        buft,
        Contents {
            host,
            name,
            region: region.into(),
            id: None,
            announced: true.into(),
            hold: Hold::default(),
            lasting: None,
            reading: Reading::default(),
        },
    )
}

/// Trampolines of a buffer type whose table has the layout `I`.
struct TypeTable<T, I>(PhantomData<(T, I)>);

impl<T: BufferType> TypeTable<T, ggml_backend_buffer_type_i_v2> {
    const IFACE: ggml_backend_buffer_type_i_v2 = ggml_backend_buffer_type_i_v2 {
        get_name: Some(Self::get_name),
        alloc_buffer: Some(Self::alloc_buffer),
        get_alignment: Some(Self::get_alignment),
        get_max_size: None,
        get_alloc_size: None,
        is_host: Some(Self::is_host),
    };
}

impl<T: BufferType> TypeTable<T, ggml_backend_buffer_type_i_v3> {
    const IFACE: ggml_backend_buffer_type_i_v3 = ggml_backend_buffer_type_i_v3 {
        get_name: Some(Self::get_name),
        alloc_buffer: Some(Self::alloc_buffer),
        alloc_buffer_n: None,
        get_alignment: Some(Self::get_alignment),
        get_max_size: None,
        get_alloc_size: None,
        get_alloc_size_n: None,
        is_host: Some(Self::is_host),
    };
}

impl<T: BufferType, I> TypeTable<T, I> {
    unsafe extern "C" fn get_name(_: *mut ggml_backend_buffer_type) -> *const c_char {
        guard("get_name", c"BERTH".as_ptr(), || T::NAME.as_ptr())
    }

    unsafe extern "C" fn alloc_buffer(buft: *mut ggml_backend_buffer_type, size: usize) -> *mut ggml_backend_buffer {
        guard("alloc_buffer", std::ptr::null_mut(), || {
            // SAFETY: the host passes a type of ours, made by `boxed` with this layout, whose context is a `&'static Host`.
            let host: &'static Host = unsafe { &*(*buft.cast::<ggml_backend_buffer_type_of<I>>()).context.cast::<Host>() };
            match super::allocate_for_host::<T>(size) {
                Ok(placed) => new_buffer(buft, host, T::name(), placed),
                Err(error) => {
                    log::error!("{error}");
                    std::ptr::null_mut()
                }
            }
        })
    }

    unsafe extern "C" fn get_alignment(_: *mut ggml_backend_buffer_type) -> usize {
        guard("get_alignment", T::ALIGNMENT, || T::ALIGNMENT)
    }

    unsafe extern "C" fn is_host(_: *mut ggml_backend_buffer_type) -> bool {
        guard("is_host", true, || true)
    }
}

/// Makes the host's buffer struct around new memory, and reports it.
fn new_buffer(buft: *mut ggml_backend_buffer_type, host: &'static Host, name: &'static str, placed: Placed) -> *mut ggml_backend_buffer {
    let announce = placed.place != Place::Pageable || placed.fallback.is_some();
    let id = report::add_buffer(name, placed.place, placed.region.len(), placed.file.clone(), placed.fallback.clone(), announce);
    placed.follow(id);
    let Placed { region, place, pinned, lasting, .. } = placed;
    if place == Place::PartlyPinned {
        report::pinned(id, pinned);
    }
    let region = std::sync::Arc::new(region);
    if place == Place::Mapped {
        hold::wait(name, id, &region);
    }
    if let Some(lasting) = &lasting {
        lasting.attach(id);
    }
    let contents = Contents {
        host,
        name,
        region,
        id: Some(id),
        announced: announce.into(),
        hold: Hold::default(),
        lasting,
        reading: Reading::default(),
    };
    wrap(buft, contents)
}

fn wrap(buft: *mut ggml_backend_buffer_type, contents: Contents) -> *mut ggml_backend_buffer {
    let (host, size) = (contents.host, contents.region.len());
    let context = into_foreign(contents);
    // SAFETY: each call is made for the host's own layout; type and contents outlive the buffer (`free_buffer` ends the contents).
    let buffer = unsafe {
        match host.layout {
            Layout::V1 => host.new_buffer_v1(buft, BufferTable::<ggml_backend_buffer_i_v1>::IFACE, context, size),
            Layout::V2 | Layout::V3 => host.new_buffer_v2(buft, BufferTable::<ggml_backend_buffer_i_v2>::IFACE, context, size),
        }
    };
    if buffer.is_null() {
        // SAFETY: made above and given to nobody.
        end(unsafe { from_foreign::<Contents>(context) });
    }
    buffer
}

/// Gives the memory back, and reports it.
fn end(contents: Contents) {
    let id = contents.id;
    // Whoever frees buffers without ever computing does not say that a load is over.
    super::end_of_load();
    if let Some(id) = id {
        super::numa::forget(id);
    }
    let Contents { region, lasting, .. } = contents;
    hold::end(region);
    drop(lasting);
    hold::say_what_stays();
    if let Some(id) = id {
        report::remove_buffer(id);
    }
}

/// Trampolines of a buffer whose table has the layout `I`.
struct BufferTable<I>(PhantomData<I>);

impl BufferTable<ggml_backend_buffer_i_v1> {
    const IFACE: ggml_backend_buffer_i_v1 = ggml_backend_buffer_i_v1 {
        free_buffer: Some(Self::free_buffer),
        get_base: Some(Self::get_base),
        init_tensor: Some(Self::init_tensor),
        memset_tensor: Some(Self::memset_tensor),
        set_tensor: Some(Self::set_tensor),
        get_tensor: Some(Self::get_tensor),
        cpy_tensor: Some(Self::cpy_tensor),
        clear: Some(Self::clear),
        reset: None,
    };
}

impl BufferTable<ggml_backend_buffer_i_v2> {
    const IFACE: ggml_backend_buffer_i_v2 = ggml_backend_buffer_i_v2 {
        free_buffer: Some(Self::free_buffer),
        get_base: Some(Self::get_base),
        init_tensor: Some(Self::init_tensor),
        memset_tensor: Some(Self::memset_tensor),
        set_tensor: Some(Self::set_tensor),
        get_tensor: Some(Self::get_tensor),
        set_tensor_2d: Some(Self::set_tensor_2d),
        get_tensor_2d: Some(Self::get_tensor_2d),
        cpy_tensor: Some(Self::cpy_tensor),
        clear: Some(Self::clear),
        reset: None,
    };
}

impl<I> BufferTable<I> {
    /// # Safety
    /// `buffer` must be a live buffer made by [`new_buffer`] with the table of layout `I`.
    unsafe fn contents<'a>(buffer: *mut ggml_backend_buffer) -> &'a Contents {
        // SAFETY: by the caller's promise the struct has this layout and its context is ours.
        unsafe { borrow::<Contents>((*buffer.cast::<ggml_backend_buffer_of<I>>()).context) }
    }

    /// What the host uses the buffer for: `enum ggml_backend_buffer_usage`.
    ///
    /// # Safety
    /// As [`Self::contents`].
    unsafe fn usage(buffer: *mut ggml_backend_buffer) -> c_int {
        // SAFETY: by the caller's promise the struct has this layout.
        unsafe { (*buffer.cast::<ggml_backend_buffer_of<I>>()).usage }
    }

    unsafe extern "C" fn free_buffer(buffer: *mut ggml_backend_buffer) {
        guard("free_buffer", (), || {
            // SAFETY: the host frees a buffer once, and nobody uses it afterwards.
            end(unsafe { from_foreign::<Contents>((*buffer.cast::<ggml_backend_buffer_of<I>>()).context) });
        });
    }

    unsafe extern "C" fn get_base(buffer: *mut ggml_backend_buffer) -> *mut c_void {
        guard("get_base", std::ptr::null_mut(), || {
            // SAFETY: the host passes a live buffer of ours.
            unsafe { Self::contents(buffer) }.region.base().cast()
        })
    }

    unsafe extern "C" fn init_tensor(buffer: *mut ggml_backend_buffer, tensor: *mut ggml_tensor) -> c_int {
        guard("init_tensor", GGML_STATUS_SUCCESS, || {
            // SAFETY: the host passes a live buffer of ours and a tensor of its own.
            unsafe { Self::contents(buffer).place(&*tensor, Self::usage(buffer)) };
            GGML_STATUS_SUCCESS
        })
    }

    unsafe extern "C" fn memset_tensor(buffer: *mut ggml_backend_buffer, tensor: *mut ggml_tensor, value: u8, offset: usize, size: usize) {
        guard("memset_tensor", (), || {
            // SAFETY: the host passes a live buffer of ours and a tensor in it.
            unsafe { Self::contents(buffer).memset(&*tensor, value, Span::one(offset, size)) };
        });
    }

    unsafe extern "C" fn set_tensor(
        buffer: *mut ggml_backend_buffer,
        tensor: *mut ggml_tensor,
        data: *const c_void,
        offset: usize,
        size: usize,
    ) {
        guard("set_tensor", (), || {
            // SAFETY: the host passes a live buffer of ours, a tensor in it, and `size` readable bytes.
            unsafe { Self::contents(buffer).set(&*tensor, Self::usage(buffer), data, 0, Span::one(offset, size)) };
        });
    }

    unsafe extern "C" fn get_tensor(
        buffer: *mut ggml_backend_buffer,
        tensor: *const ggml_tensor,
        data: *mut c_void,
        offset: usize,
        size: usize,
    ) {
        guard("get_tensor", (), || {
            // SAFETY: the host passes a live buffer of ours, a tensor in it, and `size` writable bytes.
            unsafe { Self::contents(buffer).get(&*tensor, data, 0, Span::one(offset, size)) };
        });
    }

    unsafe extern "C" fn set_tensor_2d(
        buffer: *mut ggml_backend_buffer,
        tensor: *mut ggml_tensor,
        data: *const c_void,
        offset: usize,
        size: usize,
        count: usize,
        stride: usize,
        data_stride: usize,
    ) {
        guard("set_tensor_2d", (), || {
            let span = Span { offset, size, count, stride };
            // SAFETY: as in `set_tensor`, with `count` pieces of `size` bytes, `data_stride` apart.
            unsafe { Self::contents(buffer).set(&*tensor, Self::usage(buffer), data, data_stride, span) };
        });
    }

    unsafe extern "C" fn get_tensor_2d(
        buffer: *mut ggml_backend_buffer,
        tensor: *const ggml_tensor,
        data: *mut c_void,
        offset: usize,
        size: usize,
        count: usize,
        stride: usize,
        data_stride: usize,
    ) {
        guard("get_tensor_2d", (), || {
            // SAFETY: as in `get_tensor`, with `count` pieces of `size` bytes, `data_stride` apart.
            unsafe { Self::contents(buffer).get(&*tensor, data, data_stride, Span { offset, size, count, stride }) };
        });
    }

    unsafe extern "C" fn cpy_tensor(buffer: *mut ggml_backend_buffer, src: *const ggml_tensor, dst: *mut ggml_tensor) -> bool {
        guard("cpy_tensor", false, || {
            // SAFETY: the host passes a live buffer of ours, a tensor in it, and any other tensor of equal layout.
            unsafe { Self::contents(buffer).copy_from(&*src, &*dst, Self::usage(buffer)) }
        })
    }

    unsafe extern "C" fn clear(buffer: *mut ggml_backend_buffer, value: u8) {
        guard("clear", (), || {
            // SAFETY: the host passes a live buffer of ours.
            unsafe { Self::contents(buffer) }.clear(value);
        });
    }
}
