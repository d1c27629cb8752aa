//! The backend ("stream") that every device must hand to every context. It computes nothing yet.
//!
//! Owns: the host's `ggml_backend` struct, in the layout of the host, from `init_backend` to `free`.

use std::ffi::{c_char, c_int};

use super::{Instance, Kind};
use crate::abi::*;
use crate::log;

/// Identifies backends of this kind; a random UUID.
static GUID: [u8; 16] = [0x3e, 0x0b, 0x1c, 0x8f, 0x5a, 0x2d, 0x4e, 0x61, 0x9b, 0x47, 0xd1, 0x70, 0xc2, 0x96, 0x0a, 0xe5];

const V1: ggml_backend_i_v1 = ggml_backend_i_v1 {
    get_name: Some(get_name::<ggml_backend_i_v1>),
    free: Some(free::<ggml_backend_i_v1>),
    set_tensor_async: None,
    get_tensor_async: None,
    cpy_tensor_async: None,
    synchronize: None,
    graph_plan_create: None,
    graph_plan_free: None,
    graph_plan_update: None,
    graph_plan_compute: None,
    graph_compute: Some(graph_compute::<ggml_backend_i_v1>),
    event_record: None,
    event_wait: None,
    graph_optimize: None,
};

const V2: ggml_backend_i_v2 = ggml_backend_i_v2 {
    get_name: Some(get_name::<ggml_backend_i_v2>),
    free: Some(free::<ggml_backend_i_v2>),
    set_tensor_async: None,
    get_tensor_async: None,
    set_tensor_2d_async: None,
    get_tensor_2d_async: None,
    cpy_tensor_async: None,
    synchronize: None,
    graph_plan_create: None,
    graph_plan_free: None,
    graph_plan_update: None,
    graph_plan_compute: None,
    graph_compute: Some(graph_compute::<ggml_backend_i_v2>),
    event_record: None,
    event_wait: None,
    graph_optimize: None,
};

/// A new backend of a device. The host ends it through `free`.
pub(super) fn new(instance: &'static Instance, device: *mut ggml_backend_device) -> *mut ggml_backend {
    fn boxed<I>(iface: I, instance: &'static Instance, device: *mut ggml_backend_device) -> *mut ggml_backend {
        let context = std::ptr::from_ref(instance).cast_mut().cast();
        Box::into_raw(Box::new(ggml_backend_of { guid: &raw const GUID, iface, device, context })).cast()
    }
    match instance.host.layout {
        Layout::V1 => boxed(V1, instance, device),
        Layout::V2 | Layout::V3 => boxed(V2, instance, device),
    }
}

unsafe extern "C" fn get_name<I>(backend: *mut ggml_backend) -> *const c_char {
    guard("backend get_name", c"BERTH".as_ptr(), || {
        // SAFETY: the host passes a backend made by `boxed` with this layout, whose context is the instance and whose device is ours.
        let (instance, device) = unsafe {
            let backend = &*backend.cast::<ggml_backend_of<I>>();
            (&*backend.context.cast::<Instance>(), backend.device)
        };
        instance.kind_of(device).map_or(c"BERTH", Kind::device_name).as_ptr()
    })
}

unsafe extern "C" fn free<I>(backend: *mut ggml_backend) {
    guard("backend free", (), || {
        // SAFETY: made by `boxed` with this layout; the host frees it once.
        drop(unsafe { Box::from_raw(backend.cast::<ggml_backend_of<I>>()) });
    });
}

unsafe extern "C" fn graph_compute<I>(backend: *mut ggml_backend, graph: *mut ggml_cgraph) -> c_int {
    guard("graph_compute", GGML_STATUS_FAILED, || {
        // SAFETY: the host passes a backend made by `boxed` with this layout, whose context is the instance, and a live graph.
        let nodes = unsafe {
            let instance: &'static Instance = &*(*backend.cast::<ggml_backend_of<I>>()).context.cast::<Instance>();
            (instance.host.api.ggml_graph_n_nodes)(graph)
        };
        if nodes == 0 {
            return GGML_STATUS_SUCCESS;
        }
        // `supports_op` claims nothing, so no scheduler gets here; a caller that insists is told so.
        log::error!("a graph of {nodes} nodes was sent to a device that computes nothing");
        GGML_STATUS_FAILED
    })
}
