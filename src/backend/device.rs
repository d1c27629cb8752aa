//! The devices. All are of type ACCEL, so that the host offers their buffer types in `-ot` and makes a backend of each for every context.
//! The first also computes.
//!
//! `get_host_buffer_type` is NULL on purpose: the loader downgrades exactly what is returned there when it maps the model, and keeps what is
//! the device's own default type.

use std::ffi::{c_char, c_int, c_void};

use super::claim::Claims;
use super::node::Node;
use super::{Instance, Kind, stream};
use crate::abi::*;
use crate::buffers::{CpuMmap, CudaHost};
use crate::{buffers, config, log};

/// A device before it is linked.
pub(super) fn device(_: Kind) -> ggml_backend_device {
    ggml_backend_device {
        iface: ggml_backend_device_i {
            get_name: Some(get_name),
            get_description: Some(get_description),
            get_memory: Some(get_memory),
            get_type: Some(get_type),
            get_props: Some(get_props),
            init_backend: Some(init_backend),
            get_buffer_type: Some(get_buffer_type),
            get_host_buffer_type: Some(get_host_buffer_type),
            buffer_from_host_ptr: Some(buffer_from_host_ptr),
            supports_op: Some(supports_op),
            supports_buft: Some(supports_buft),
            offload_op: None,
            event_new: None,
            event_free: None,
            event_synchronize: None,
        },
        reg: std::ptr::null_mut(),
        context: std::ptr::null_mut(),
    }
}

/// # Safety
/// `device` must be one of ours.
unsafe fn lookup(device: *mut ggml_backend_device) -> (&'static Instance, Kind) {
    // SAFETY: the context of our devices is the instance, which is never freed.
    let instance: &'static Instance = unsafe { &*(*device).context.cast::<Instance>() };
    (instance, instance.kind_of(device).unwrap_or(Kind::CpuMmap))
}

unsafe extern "C" fn get_name(device: *mut ggml_backend_device) -> *const c_char {
    guard("device get_name", c"BERTH".as_ptr(), || {
        // SAFETY: the host passes a device of ours.
        unsafe { lookup(device) }.1.device_name().as_ptr()
    })
}

unsafe extern "C" fn get_description(device: *mut ggml_backend_device) -> *const c_char {
    guard("get_description", c"Berth".as_ptr(), || {
        // SAFETY: the host passes a device of ours.
        unsafe { lookup(device) }.1.description().as_ptr()
    })
}

unsafe extern "C" fn get_memory(_: *mut ggml_backend_device, free: *mut usize, total: *mut usize) {
    guard("get_memory", (), || {
        // Host memory is the CPU device's to report; 0 means that there is nothing to add.
        // SAFETY: the host passes two writable integers.
        unsafe {
            *free = 0;
            *total = 0;
        }
    });
}

unsafe extern "C" fn get_type(_: *mut ggml_backend_device) -> c_int {
    guard("get_type", GGML_BACKEND_DEVICE_TYPE_ACCEL, || GGML_BACKEND_DEVICE_TYPE_ACCEL)
}

unsafe extern "C" fn get_props(device: *mut ggml_backend_device, props: *mut ggml_backend_dev_props) {
    guard("get_props", (), || {
        // SAFETY: the host passes a device of ours.
        let (_, kind) = unsafe { lookup(device) };
        let value = ggml_backend_dev_props {
            name: kind.device_name().as_ptr(),
            description: kind.description().as_ptr(),
            memory_free: 0,
            memory_total: 0,
            type_: GGML_BACKEND_DEVICE_TYPE_ACCEL,
            device_id: std::ptr::null(),
            caps: ggml_backend_dev_caps {
                async_: false,
                host_buffer: false,
                // What takes the loader's mapping; the others are made to hold a copy.
                buffer_from_host_ptr: takes_mappings(kind),
                events: false,
                mmap_support: true,
            },
        };
        // SAFETY: the host passes a writable struct; its size is the same in every supported version.
        unsafe { props.write(value) };
    });
}

unsafe extern "C" fn init_backend(device: *mut ggml_backend_device, _params: *const c_char) -> *mut ggml_backend {
    guard("init_backend", std::ptr::null_mut(), || {
        // SAFETY: the host passes a device of ours.
        let (instance, kind) = unsafe { lookup(device) };
        if kind == Kind::CpuMmap {
            // A context is made when a model has been loaded: by now the report is complete.
            crate::buffers::end_of_load();
            crate::buffers::loaded();
            crate::ahead::warm::loaded();
            crate::report::loaded();
        }
        instance.look_around();
        stream::new(instance, device).unwrap_or_else(|error| {
            log::error!("{error}");
            std::ptr::null_mut()
        })
    })
}

unsafe extern "C" fn get_buffer_type(device: *mut ggml_backend_device) -> *mut ggml_backend_buffer_type {
    guard("get_buffer_type", std::ptr::null_mut(), || {
        // SAFETY: the host passes a device of ours.
        let (instance, kind) = unsafe { lookup(device) };
        instance.buffer_type(kind)
    })
}

unsafe extern "C" fn get_host_buffer_type(_: *mut ggml_backend_device) -> *mut ggml_backend_buffer_type {
    guard("get_host_buffer_type", std::ptr::null_mut(), std::ptr::null_mut)
}

unsafe extern "C" fn buffer_from_host_ptr(
    device: *mut ggml_backend_device,
    base: *mut c_void,
    size: usize,
    _max_tensor_size: usize,
) -> *mut ggml_backend_buffer {
    guard("buffer_from_host_ptr", std::ptr::null_mut(), || {
        // SAFETY: the host passes a device of ours.
        let (instance, kind) = unsafe { lookup(device) };
        if !takes_mappings(kind) {
            log::error!("{}: cannot be laid over existing memory; ask for CPU_MMAP", kind.device_name().to_string_lossy());
            return std::ptr::null_mut();
        }
        let (buft, host, base) = (instance.buffer_type(kind), &instance.host, base.cast());
        // SAFETY: the host keeps its mapping until it frees the buffer; the type lives for ever.
        let buffer = unsafe {
            match kind {
                Kind::CudaHost => buffers::from_host_ptr::<CudaHost>(buft, host, base, size),
                _ => buffers::from_host_ptr::<CpuMmap>(buft, host, base, size),
            }
        };
        buffer.unwrap_or_else(|error| {
            log::error!("{error}");
            std::ptr::null_mut()
        })
    })
}

/// Whether a device's buffers may lie over the loader's mapping.
fn takes_mappings(kind: Kind) -> bool {
    kind == Kind::CpuMmap || kind == Kind::CudaHost && buffers::over_mappings()
}

unsafe extern "C" fn supports_op(device: *mut ggml_backend_device, op: *const ggml_tensor) -> bool {
    guard("supports_op", false, || {
        // SAFETY: the host passes a device of ours and a live tensor.
        let ((instance, kind), node) = unsafe { (lookup(device), Node::new(op)) };
        let (Some(node), Ok(config)) = (node, config::get()) else { return false };
        // One device computes; the other two are there for the names of their buffer types.
        kind == Kind::CpuMmap && Claims::new(instance, config).supports(node)
    })
}

unsafe extern "C" fn supports_buft(device: *mut ggml_backend_device, buft: *mut ggml_backend_buffer_type) -> bool {
    guard("supports_buft", false, || {
        // SAFETY: the host passes a device of ours and a live buffer type.
        unsafe { !buft.is_null() && (lookup(device).0.host.api.ggml_backend_buft_is_host)(buft) }
    })
}
