//! The registry: the list of devices, and the functions a host may ask for by name.

use std::ffi::{CStr, c_char, c_void};

use super::{Instance, KINDS, stream};
use crate::abi::*;
use crate::config::VERSION;

/// Its name in every list of backends.
pub(super) const NAME: &CStr = c"BERTH";

/// The registry before it is linked, for a host of this layout.
pub(super) fn reg(layout: Layout) -> ggml_backend_reg {
    ggml_backend_reg {
        api_version: layout.api_version(),
        iface: ggml_backend_reg_i {
            get_name: Some(get_name),
            get_device_count: Some(get_device_count),
            get_device: Some(get_device),
            get_proc_address: Some(get_proc_address),
        },
        context: std::ptr::null_mut(),
    }
}

unsafe extern "C" fn get_name(_: *mut ggml_backend_reg) -> *const c_char {
    guard("reg get_name", NAME.as_ptr(), || NAME.as_ptr())
}

unsafe extern "C" fn get_device_count(_: *mut ggml_backend_reg) -> usize {
    guard("get_device_count", 0, || KINDS.len())
}

unsafe extern "C" fn get_device(reg: *mut ggml_backend_reg, index: usize) -> *mut ggml_backend_device {
    guard("get_device", std::ptr::null_mut(), || {
        // SAFETY: the host passes our registry, whose context is the instance.
        let instance: &'static Instance = unsafe { &*(*reg).context.cast::<Instance>() };
        KINDS.get(index).map_or(std::ptr::null_mut(), |kind| instance.device(*kind))
    })
}

unsafe extern "C" fn get_proc_address(reg: *mut ggml_backend_reg, name: *const c_char) -> *mut c_void {
    guard("get_proc_address", std::ptr::null_mut(), || {
        if name.is_null() {
            return std::ptr::null_mut();
        }
        // SAFETY: the host passes our registry, whose context is the instance, and a NUL-terminated name.
        let (layout, name) = unsafe { ((*(*reg).context.cast::<Instance>()).host.layout, CStr::from_ptr(name)) };
        let old = layout == Layout::V1;
        match name.to_bytes() {
            b"ggml_backend_get_features" => get_features as *mut c_void,
            b"ggml_backend_set_n_threads" if old => stream::set_n_threads::<ggml_backend_i_v1> as *mut c_void,
            b"ggml_backend_set_n_threads" => stream::set_n_threads::<ggml_backend_i_v2> as *mut c_void,
            b"ggml_backend_set_abort_callback" if old => stream::set_abort_callback::<ggml_backend_i_v1> as *mut c_void,
            b"ggml_backend_set_abort_callback" => stream::set_abort_callback::<ggml_backend_i_v2> as *mut c_void,
            _ => std::ptr::null_mut(),
        }
    })
}

/// What `llama_print_system_info` shows of us, ended by an entry of NULLs.
static FEATURES: Features = Features([
    ggml_backend_feature { name: c"VERSION".as_ptr(), value: VERSION.as_ptr() },
    ggml_backend_feature { name: std::ptr::null(), value: std::ptr::null() },
]);

struct Features([ggml_backend_feature; 2]);

// SAFETY: the pointers lead to constant text.
unsafe impl Sync for Features {}

unsafe extern "C" fn get_features(_: *mut ggml_backend_reg) -> *const ggml_backend_feature {
    guard("get_features", std::ptr::null(), || FEATURES.0.as_ptr())
}
