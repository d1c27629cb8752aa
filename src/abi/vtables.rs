//! The function tables that a backend fills, for every layout in use since ggml 0.9.0 (backend API versions 2 and 3).
//!
//! Owns: the mirrors of `ggml-backend-impl.h` and of the structs of `ggml-backend.h` that cross the boundary. Three layouts exist: `v1` (until
//! ggml 0.9.11 of 2026-04-09), `v2` (2-D copies inserted in the middle of the buffer's and of the backend's table), and `v3` (since ggml 0.26.0:
//! allocation for a list of tensors inserted in the middle of the buffer type's table, and API version 3). A struct that ends in `_v2` is
//! that of layout v3 too where there is none in `_v3`. Devices and registries have one layout.

use std::ffi::{c_char, c_int, c_void};

use super::ggml_tensor;

/// `GGML_BACKEND_API_VERSION` of hosts of layout v1 and v2.
pub const GGML_BACKEND_API_VERSION_V2: c_int = 2;
/// `GGML_BACKEND_API_VERSION` of hosts of layout v3.
pub const GGML_BACKEND_API_VERSION_V3: c_int = 3;

/// `GGML_STATUS_SUCCESS`.
pub const GGML_STATUS_SUCCESS: c_int = 0;
/// `GGML_STATUS_ABORTED`.
pub const GGML_STATUS_ABORTED: c_int = 1;
/// `GGML_STATUS_FAILED`.
pub const GGML_STATUS_FAILED: c_int = -1;

/// `GGML_BACKEND_BUFFER_USAGE_ANY`.
pub const GGML_BACKEND_BUFFER_USAGE_ANY: c_int = 0;
/// `GGML_BACKEND_BUFFER_USAGE_WEIGHTS`.
pub const GGML_BACKEND_BUFFER_USAGE_WEIGHTS: c_int = 1;
/// `GGML_BACKEND_BUFFER_USAGE_COMPUTE`.
pub const GGML_BACKEND_BUFFER_USAGE_COMPUTE: c_int = 2;

/// `GGML_BACKEND_DEVICE_TYPE_CPU`.
pub const GGML_BACKEND_DEVICE_TYPE_CPU: c_int = 0;
/// `GGML_BACKEND_DEVICE_TYPE_GPU`.
pub const GGML_BACKEND_DEVICE_TYPE_GPU: c_int = 1;
/// `GGML_BACKEND_DEVICE_TYPE_IGPU`.
pub const GGML_BACKEND_DEVICE_TYPE_IGPU: c_int = 2;
/// `GGML_BACKEND_DEVICE_TYPE_ACCEL` (with API version 1, which the host refuses, it was 2).
pub const GGML_BACKEND_DEVICE_TYPE_ACCEL: c_int = 3;

/// `GGML_LOG_LEVEL_*`.
pub const GGML_LOG_LEVEL_DEBUG: c_int = 1;
/// Information.
pub const GGML_LOG_LEVEL_INFO: c_int = 2;
/// Warning.
pub const GGML_LOG_LEVEL_WARN: c_int = 3;
/// Error.
pub const GGML_LOG_LEVEL_ERROR: c_int = 4;

/// `struct ggml_init_params`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ggml_init_params {
    /// Size of the context in bytes.
    pub mem_size: usize,
    /// Memory of the context, or NULL.
    pub mem_buffer: *mut c_void,
    /// Create tensors without data.
    pub no_alloc: bool,
}

/// `struct ggml_context`, opaque.
#[repr(C)]
pub struct ggml_context {
    opaque: [u8; 0],
}

/// `struct ggml_cgraph`, opaque: used only through `ggml_graph_*`.
#[repr(C)]
pub struct ggml_cgraph {
    opaque: [u8; 0],
}

/// `struct ggml_backend_event`, opaque.
#[repr(C)]
pub struct ggml_backend_event {
    opaque: [u8; 0],
}

/// `struct ggml_backend_buffer` as seen where the layout of its table does not matter.
#[repr(C)]
pub struct ggml_backend_buffer {
    opaque: [u8; 0],
}

/// `struct ggml_backend` as seen where the layout of its table does not matter.
#[repr(C)]
pub struct ggml_backend {
    opaque: [u8; 0],
}

/// `struct ggml_backend_buffer_type` as seen where the layout of its table does not matter.
#[repr(C)]
pub struct ggml_backend_buffer_type {
    opaque: [u8; 0],
}

/// `struct ggml_backend_buffer_type_i` in layouts v1 and v2.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ggml_backend_buffer_type_i_v2 {
    /// Name, as typed in `-ot`.
    pub get_name: Option<unsafe extern "C" fn(*mut ggml_backend_buffer_type) -> *const c_char>,
    /// New buffer of at least `size` bytes, or NULL.
    pub alloc_buffer: Option<unsafe extern "C" fn(*mut ggml_backend_buffer_type, usize) -> *mut ggml_backend_buffer>,
    /// Alignment of tensors, in bytes.
    pub get_alignment: Option<unsafe extern "C" fn(*mut ggml_backend_buffer_type) -> usize>,
    /// Largest buffer, in bytes; absent: no limit.
    pub get_max_size: Option<unsafe extern "C" fn(*mut ggml_backend_buffer_type) -> usize>,
    /// Bytes to reserve for a tensor; absent: `ggml_nbytes`.
    pub get_alloc_size: Option<unsafe extern "C" fn(*mut ggml_backend_buffer_type, *const ggml_tensor) -> usize>,
    /// Whether tensors lie in host memory in the standard layout.
    pub is_host: Option<unsafe extern "C" fn(*mut ggml_backend_buffer_type) -> bool>,
}

/// `struct ggml_backend_buffer_type_i` in layout v3, with allocation for a list of tensors at once.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ggml_backend_buffer_type_i_v3 {
    /// Name, as typed in `-ot`.
    pub get_name: Option<unsafe extern "C" fn(*mut ggml_backend_buffer_type) -> *const c_char>,
    /// New buffer of at least `size` bytes, or NULL.
    pub alloc_buffer: Option<unsafe extern "C" fn(*mut ggml_backend_buffer_type, usize) -> *mut ggml_backend_buffer>,
    /// Absent: the host lays the tensors out in one `alloc_buffer`.
    pub alloc_buffer_n: unused_slot,
    /// Alignment of tensors, in bytes.
    pub get_alignment: Option<unsafe extern "C" fn(*mut ggml_backend_buffer_type) -> usize>,
    /// Largest buffer, in bytes; absent: no limit.
    pub get_max_size: Option<unsafe extern "C" fn(*mut ggml_backend_buffer_type) -> usize>,
    /// Bytes to reserve for a tensor; absent: `ggml_nbytes`.
    pub get_alloc_size: Option<unsafe extern "C" fn(*mut ggml_backend_buffer_type, *const ggml_tensor) -> usize>,
    /// Absent: the host adds up what the tensors take.
    pub get_alloc_size_n: unused_slot,
    /// Whether tensors lie in host memory in the standard layout.
    pub is_host: Option<unsafe extern "C" fn(*mut ggml_backend_buffer_type) -> bool>,
}

/// `struct ggml_backend_buffer_type` with a table of layout `I`. Made by us, never freed.
#[repr(C)]
pub struct ggml_backend_buffer_type_of<I> {
    /// Functions.
    pub iface: I,
    /// Device it belongs to.
    pub device: *mut ggml_backend_device,
    /// Ours.
    pub context: *mut c_void,
}

/// `free_buffer`, `clear` and their like.
pub type buffer_free_fn = unsafe extern "C" fn(*mut ggml_backend_buffer);
/// `get_base`.
pub type buffer_base_fn = unsafe extern "C" fn(*mut ggml_backend_buffer) -> *mut c_void;
/// `init_tensor`; returns a `ggml_status`.
pub type buffer_init_tensor_fn = unsafe extern "C" fn(*mut ggml_backend_buffer, *mut ggml_tensor) -> c_int;
/// `memset_tensor`: value, offset, size.
pub type buffer_memset_tensor_fn = unsafe extern "C" fn(*mut ggml_backend_buffer, *mut ggml_tensor, u8, usize, usize);
/// `set_tensor`: data, offset, size.
pub type buffer_set_tensor_fn = unsafe extern "C" fn(*mut ggml_backend_buffer, *mut ggml_tensor, *const c_void, usize, usize);
/// `get_tensor`: data, offset, size.
pub type buffer_get_tensor_fn = unsafe extern "C" fn(*mut ggml_backend_buffer, *const ggml_tensor, *mut c_void, usize, usize);
/// `set_tensor_2d`: data, offset, size, n_copies, stride_tensor, stride_data.
pub type buffer_set_tensor_2d_fn =
    unsafe extern "C" fn(*mut ggml_backend_buffer, *mut ggml_tensor, *const c_void, usize, usize, usize, usize, usize);
/// `get_tensor_2d`: data, offset, size, n_copies, stride_tensor, stride_data.
pub type buffer_get_tensor_2d_fn =
    unsafe extern "C" fn(*mut ggml_backend_buffer, *const ggml_tensor, *mut c_void, usize, usize, usize, usize, usize);
/// `cpy_tensor`: src, dst; false means "not supported, copy another way".
pub type buffer_cpy_tensor_fn = unsafe extern "C" fn(*mut ggml_backend_buffer, *const ggml_tensor, *mut ggml_tensor) -> bool;
/// `clear`: value.
pub type buffer_clear_fn = unsafe extern "C" fn(*mut ggml_backend_buffer, u8);

/// `struct ggml_backend_buffer_i` without 2-D copies.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ggml_backend_buffer_i_v1 {
    /// Frees the buffer's contents (the struct itself is the host's).
    pub free_buffer: Option<buffer_free_fn>,
    /// First byte.
    pub get_base: Option<buffer_base_fn>,
    /// A tensor was given a place in the buffer.
    pub init_tensor: Option<buffer_init_tensor_fn>,
    /// Fills a part of a tensor.
    pub memset_tensor: Option<buffer_memset_tensor_fn>,
    /// Writes a part of a tensor.
    pub set_tensor: Option<buffer_set_tensor_fn>,
    /// Reads a part of a tensor.
    pub get_tensor: Option<buffer_get_tensor_fn>,
    /// Copies a tensor into this buffer.
    pub cpy_tensor: Option<buffer_cpy_tensor_fn>,
    /// Fills the whole buffer.
    pub clear: Option<buffer_clear_fn>,
    /// Forgets state of tensors.
    pub reset: Option<buffer_free_fn>,
}

/// `struct ggml_backend_buffer_i` with 2-D copies.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ggml_backend_buffer_i_v2 {
    /// Frees the buffer's contents (the struct itself is the host's).
    pub free_buffer: Option<buffer_free_fn>,
    /// First byte.
    pub get_base: Option<buffer_base_fn>,
    /// A tensor was given a place in the buffer.
    pub init_tensor: Option<buffer_init_tensor_fn>,
    /// Fills a part of a tensor.
    pub memset_tensor: Option<buffer_memset_tensor_fn>,
    /// Writes a part of a tensor.
    pub set_tensor: Option<buffer_set_tensor_fn>,
    /// Reads a part of a tensor.
    pub get_tensor: Option<buffer_get_tensor_fn>,
    /// Writes equally spaced parts of a tensor.
    pub set_tensor_2d: Option<buffer_set_tensor_2d_fn>,
    /// Reads equally spaced parts of a tensor.
    pub get_tensor_2d: Option<buffer_get_tensor_2d_fn>,
    /// Copies a tensor into this buffer.
    pub cpy_tensor: Option<buffer_cpy_tensor_fn>,
    /// Fills the whole buffer.
    pub clear: Option<buffer_clear_fn>,
    /// Forgets state of tensors.
    pub reset: Option<buffer_free_fn>,
}

/// `struct ggml_backend_buffer` with a table of layout `I`. Always made and freed by the host.
#[repr(C)]
pub struct ggml_backend_buffer_of<I> {
    /// Functions.
    pub iface: I,
    /// Its type.
    pub buft: *mut ggml_backend_buffer_type,
    /// Ours.
    pub context: *mut c_void,
    /// Size in bytes.
    pub size: usize,
    /// `enum ggml_backend_buffer_usage`.
    pub usage: c_int,
}

/// A slot that Berth never fills: its type is never looked at, only its size.
pub type unused_slot = Option<unsafe extern "C" fn()>;

/// `struct ggml_backend_i` without 2-D copies.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ggml_backend_i_v1 {
    /// Name.
    pub get_name: Option<unsafe extern "C" fn(*mut ggml_backend) -> *const c_char>,
    /// Frees the backend.
    pub free: Option<unsafe extern "C" fn(*mut ggml_backend)>,
    /// Absent: the host uses the buffer's own `set_tensor`.
    pub set_tensor_async: unused_slot,
    /// Absent, likewise.
    pub get_tensor_async: unused_slot,
    /// Absent, likewise.
    pub cpy_tensor_async: unused_slot,
    /// Absent: nothing is asynchronous.
    pub synchronize: unused_slot,
    /// Absent: no plans.
    pub graph_plan_create: unused_slot,
    /// Absent, likewise.
    pub graph_plan_free: unused_slot,
    /// Absent, likewise.
    pub graph_plan_update: unused_slot,
    /// Absent, likewise.
    pub graph_plan_compute: unused_slot,
    /// Computes a graph; returns a `ggml_status`.
    pub graph_compute: Option<unsafe extern "C" fn(*mut ggml_backend, *mut ggml_cgraph) -> c_int>,
    /// Absent: no events.
    pub event_record: unused_slot,
    /// Absent, likewise.
    pub event_wait: unused_slot,
    /// Absent: graphs are taken as they are.
    pub graph_optimize: unused_slot,
}

/// `struct ggml_backend_i` with 2-D copies.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ggml_backend_i_v2 {
    /// Name.
    pub get_name: Option<unsafe extern "C" fn(*mut ggml_backend) -> *const c_char>,
    /// Frees the backend.
    pub free: Option<unsafe extern "C" fn(*mut ggml_backend)>,
    /// Absent: the host uses the buffer's own `set_tensor`.
    pub set_tensor_async: unused_slot,
    /// Absent, likewise.
    pub get_tensor_async: unused_slot,
    /// Absent, likewise.
    pub set_tensor_2d_async: unused_slot,
    /// Absent, likewise.
    pub get_tensor_2d_async: unused_slot,
    /// Absent, likewise.
    pub cpy_tensor_async: unused_slot,
    /// Absent: nothing is asynchronous.
    pub synchronize: unused_slot,
    /// Absent: no plans.
    pub graph_plan_create: unused_slot,
    /// Absent, likewise.
    pub graph_plan_free: unused_slot,
    /// Absent, likewise.
    pub graph_plan_update: unused_slot,
    /// Absent, likewise.
    pub graph_plan_compute: unused_slot,
    /// Computes a graph; returns a `ggml_status`.
    pub graph_compute: Option<unsafe extern "C" fn(*mut ggml_backend, *mut ggml_cgraph) -> c_int>,
    /// Absent: no events.
    pub event_record: unused_slot,
    /// Absent, likewise.
    pub event_wait: unused_slot,
    /// Absent: graphs are taken as they are. It takes two arguments until ggml 0.21, three from 0.25 on.
    pub graph_optimize: unused_slot,
}

/// `struct ggml_backend` with a table of layout `I`. Made and freed by us.
#[repr(C)]
pub struct ggml_backend_of<I> {
    /// Points at 16 bytes that identify the kind of backend.
    pub guid: *const [u8; 16],
    /// Functions.
    pub iface: I,
    /// Its device.
    pub device: *mut ggml_backend_device,
    /// Ours.
    pub context: *mut c_void,
}

/// `struct ggml_backend_dev_caps`. `mmap_support` came in 2026-08 and lies in what was padding of [`ggml_backend_dev_props`] before.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ggml_backend_dev_caps {
    /// Asynchronous operations.
    pub async_: bool,
    /// Has a pinned host buffer type of its own.
    pub host_buffer: bool,
    /// `buffer_from_host_ptr` works.
    pub buffer_from_host_ptr: bool,
    /// Events work.
    pub events: bool,
    /// The loader may map the model for this device.
    pub mmap_support: bool,
}

/// `struct ggml_backend_dev_props`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ggml_backend_dev_props {
    /// Name.
    pub name: *const c_char,
    /// Description.
    pub description: *const c_char,
    /// Free memory in bytes, 0 if there is nothing to report.
    pub memory_free: usize,
    /// Total memory in bytes, likewise.
    pub memory_total: usize,
    /// `enum ggml_backend_dev_type`.
    pub type_: c_int,
    /// PCI address or NULL.
    pub device_id: *const c_char,
    /// Capabilities.
    pub caps: ggml_backend_dev_caps,
}

/// `struct ggml_backend_device_i`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ggml_backend_device_i {
    /// Name.
    pub get_name: Option<unsafe extern "C" fn(*mut ggml_backend_device) -> *const c_char>,
    /// Description.
    pub get_description: Option<unsafe extern "C" fn(*mut ggml_backend_device) -> *const c_char>,
    /// Free and total memory.
    pub get_memory: Option<unsafe extern "C" fn(*mut ggml_backend_device, *mut usize, *mut usize)>,
    /// `enum ggml_backend_dev_type`.
    pub get_type: Option<unsafe extern "C" fn(*mut ggml_backend_device) -> c_int>,
    /// Properties.
    pub get_props: Option<unsafe extern "C" fn(*mut ggml_backend_device, *mut ggml_backend_dev_props)>,
    /// New backend; NULL makes the host give up.
    pub init_backend: Option<unsafe extern "C" fn(*mut ggml_backend_device, *const c_char) -> *mut ggml_backend>,
    /// The device's buffer type.
    pub get_buffer_type: Option<unsafe extern "C" fn(*mut ggml_backend_device) -> *mut ggml_backend_buffer_type>,
    /// Host buffer type; what is returned here is downgraded by the loader under mmap.
    pub get_host_buffer_type: Option<unsafe extern "C" fn(*mut ggml_backend_device) -> *mut ggml_backend_buffer_type>,
    /// Buffer over memory of the host: pointer, size, size of the largest tensor.
    pub buffer_from_host_ptr: Option<unsafe extern "C" fn(*mut ggml_backend_device, *mut c_void, usize, usize) -> *mut ggml_backend_buffer>,
    /// Whether an operation can be computed.
    pub supports_op: Option<unsafe extern "C" fn(*mut ggml_backend_device, *const ggml_tensor) -> bool>,
    /// Whether tensors in buffers of this type can be read.
    pub supports_buft: Option<unsafe extern "C" fn(*mut ggml_backend_device, *mut ggml_backend_buffer_type) -> bool>,
    /// Absent: nothing is taken from the CPU.
    pub offload_op: unused_slot,
    /// Absent: no events.
    pub event_new: unused_slot,
    /// Absent, likewise.
    pub event_free: unused_slot,
    /// Absent, likewise.
    pub event_synchronize: unused_slot,
}

/// `struct ggml_backend_device`.
#[repr(C)]
pub struct ggml_backend_device {
    /// Functions.
    pub iface: ggml_backend_device_i,
    /// Its registry.
    pub reg: *mut ggml_backend_reg,
    /// Ours.
    pub context: *mut c_void,
}

/// `struct ggml_backend_reg_i`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ggml_backend_reg_i {
    /// Name.
    pub get_name: Option<unsafe extern "C" fn(*mut ggml_backend_reg) -> *const c_char>,
    /// Number of devices.
    pub get_device_count: Option<unsafe extern "C" fn(*mut ggml_backend_reg) -> usize>,
    /// Device at an index.
    pub get_device: Option<unsafe extern "C" fn(*mut ggml_backend_reg, usize) -> *mut ggml_backend_device>,
    /// Further functions by name.
    pub get_proc_address: Option<unsafe extern "C" fn(*mut ggml_backend_reg, *const c_char) -> *mut c_void>,
}

/// `struct ggml_backend_reg`.
#[repr(C)]
pub struct ggml_backend_reg {
    /// Must equal the host's `GGML_BACKEND_API_VERSION`.
    pub api_version: c_int,
    /// Functions.
    pub iface: ggml_backend_reg_i,
    /// Ours.
    pub context: *mut c_void,
}

/// `struct ggml_backend_feature`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ggml_backend_feature {
    /// Name.
    pub name: *const c_char,
    /// Value.
    pub value: *const c_char,
}
