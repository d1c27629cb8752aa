//! The host's CPU backend, called as a program calls it.
//!
//! Owns: one such backend and the functions it is called by. They are looked up when it is first wanted: hosts that never want it need not have
//! them. Must not know: which operations go there, and why.

use std::ffi::{CStr, c_char, c_int, c_void};

use super::symbols;
use super::*;

/// Declares the functions, and finds them by name.
macro_rules! functions {
    ($($(#[$doc:meta])* $name:ident: $ty:ty,)*) => {
        struct Functions {
            $($(#[$doc])* $name: $ty,)*
        }

        impl Functions {
            /// Those of the ggml at this address; the name of the first that is missing.
            fn find(ggml: *const c_void) -> Result<Functions, &'static str> {
                $(
                    let name = CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()).unwrap_or_default();
                    let $name = symbols::of_ggml(ggml, c"ggml_backend_dev_by_type", name).ok_or(stringify!($name))?;
                )*
                // SAFETY: these symbols have these C signatures in every ggml since 0.9.0.
                Ok(unsafe { Functions { $($name: std::mem::transmute::<*mut c_void, $ty>($name),)* } })
            }
        }
    };
}

functions! {
    ggml_backend_dev_by_type: unsafe extern "C" fn(c_int) -> *mut ggml_backend_device,
    ggml_backend_dev_init: unsafe extern "C" fn(*mut ggml_backend_device, *const c_char) -> *mut ggml_backend,
    ggml_backend_dev_backend_reg: unsafe extern "C" fn(*mut ggml_backend_device) -> *mut ggml_backend_reg,
    ggml_backend_dev_supports_op: unsafe extern "C" fn(*mut ggml_backend_device, *const ggml_tensor) -> bool,
    ggml_backend_reg_get_proc_address: unsafe extern "C" fn(*mut ggml_backend_reg, *const c_char) -> *mut c_void,
    ggml_backend_free: unsafe extern "C" fn(*mut ggml_backend),
    ggml_backend_graph_compute: unsafe extern "C" fn(*mut ggml_backend, *mut ggml_cgraph) -> c_int,
    ggml_backend_buffer_get_base: unsafe extern "C" fn(*mut ggml_backend_buffer) -> *mut c_void,
    ggml_graph_overhead_custom: unsafe extern "C" fn(usize, bool) -> usize,
    ggml_new_graph_custom: unsafe extern "C" fn(*mut ggml_context, usize, bool) -> *mut ggml_cgraph,
    ggml_graph_add_node: unsafe extern "C" fn(*mut ggml_cgraph, *mut ggml_tensor),
    ggml_blck_size: unsafe extern "C" fn(c_int) -> i64,
    ggml_type_size: unsafe extern "C" fn(c_int) -> usize,
}

/// `ggml_backend_set_n_threads`.
type SetThreads = unsafe extern "C" fn(*mut ggml_backend, c_int);

/// A CPU backend of the host's.
pub struct Cpu {
    functions: Functions,
    device: *mut ggml_backend_device,
    backend: *mut ggml_backend,
    set_threads: Option<SetThreads>,
}

// SAFETY: a backend belongs to no thread; it is used by one at a time, since computing takes `&mut`.
unsafe impl Send for Cpu {}

impl Cpu {
    /// A new one of this host's. The message says what there is not.
    ///
    /// # Errors
    /// Where the host has no CPU device by now, or does not export what is needed.
    pub fn new(host: &Host) -> Result<Cpu, String> {
        let functions = Functions::find(host.id()).map_err(|name| format!("this ggml has no {name} that can be called"))?;
        // SAFETY: functions of the host, called with a device and a registry of its own.
        unsafe {
            let device = (functions.ggml_backend_dev_by_type)(GGML_BACKEND_DEVICE_TYPE_CPU);
            if device.is_null() {
                return Err("this ggml has no CPU backend".into());
            }
            let backend = (functions.ggml_backend_dev_init)(device, std::ptr::null());
            if backend.is_null() {
                return Err("this ggml's CPU backend does not start".into());
            }
            let registry = (functions.ggml_backend_dev_backend_reg)(device);
            let set = if registry.is_null() {
                std::ptr::null_mut()
            } else {
                (functions.ggml_backend_reg_get_proc_address)(registry, c"ggml_backend_set_n_threads".as_ptr())
            };
            let set_threads = (!set.is_null()).then(|| std::mem::transmute::<*mut c_void, SetThreads>(set));
            Ok(Cpu { functions, device, backend, set_threads })
        }
    }

    /// Computes these nodes, in this order; the answer is a `GGML_STATUS_*`.
    ///
    /// # Safety
    /// The nodes and all that they read are live and have the memory that their shapes and strides say.
    pub unsafe fn compute(&mut self, host: &Host, nodes: &[*mut ggml_tensor], threads: usize) -> c_int {
        let f = &self.functions;
        // SAFETY: functions of the host; the context outlives the graph, which is used in this function only. The caller vouches for the nodes.
        unsafe {
            // The graph and what a context needs for one object, which is less than a tensor.
            let mem_size = (f.ggml_graph_overhead_custom)(nodes.len(), false).saturating_add(1024);
            let context = (host.api.ggml_init)(ggml_init_params { mem_size, mem_buffer: std::ptr::null_mut(), no_alloc: true });
            if context.is_null() {
                return GGML_STATUS_FAILED;
            }
            let graph = (f.ggml_new_graph_custom)(context, nodes.len(), false);
            for node in nodes {
                (f.ggml_graph_add_node)(graph, *node);
            }
            if let (Some(set), Ok(threads)) = (self.set_threads, c_int::try_from(threads)) {
                set(self.backend, threads);
            }
            let status = (f.ggml_backend_graph_compute)(self.backend, graph);
            (host.api.ggml_free)(context);
            status
        }
    }

    /// Whether the CPU backend computes an operation.
    ///
    /// # Safety
    /// The tensor and its operands are live, and of types that [`Cpu::block`] knows.
    pub unsafe fn supports(&self, node: *const ggml_tensor) -> bool {
        // SAFETY: a device of the host's; the caller vouches for the tensor.
        unsafe { (self.functions.ggml_backend_dev_supports_op)(self.device, node) }
    }

    /// Elements and bytes of a block of a type. `None` if this ggml has no such type.
    pub fn block(&self, host: &Host, ty: c_int) -> Option<(usize, usize)> {
        // No ggml has had a type beyond it, and older ones look a number up without a check.
        const MOST: c_int = 64;
        if !(0..MOST).contains(&ty) {
            return None;
        }
        // SAFETY: the name is asked for first, which is NULL or "NONE" beyond the last type; the others are defined for all that have one.
        unsafe {
            let name = (host.api.ggml_type_name)(ty);
            if name.is_null() || CStr::from_ptr(name) == c"NONE" {
                return None;
            }
            let (elements, bytes) = (usize::try_from((self.functions.ggml_blck_size)(ty)).ok()?, (self.functions.ggml_type_size)(ty));
            // Types that were given up have a name, and blocks of nothing.
            (elements > 0 && bytes > 0).then_some((elements, bytes))
        }
    }

    /// First byte of a buffer.
    ///
    /// # Safety
    /// A live buffer of the host.
    pub unsafe fn base(&self, buffer: *mut ggml_backend_buffer) -> *mut c_void {
        // SAFETY: the caller vouches for it.
        unsafe { (self.functions.ggml_backend_buffer_get_base)(buffer) }
    }
}

impl Drop for Cpu {
    fn drop(&mut self) {
        // SAFETY: made in `new`, and used by nobody any more.
        unsafe { (self.functions.ggml_backend_free)(self.backend) };
    }
}
