//! Finds the ggml that this process already has. Nothing of ggml is linked.
//!
//! Owns: the list of functions used ([`Api`]) and the search for the object that defines them. A program that links ggml statically hands them
//! over ([`Handed`]); otherwise the search goes from the most to the least certain: the object that called us (its own dependencies name its ggml, also where everything was loaded `RTLD_LOCAL` as in Python or
//! Node, and where two ggml live in one process), then the process's global scope, then every loaded object, if exactly one defines them.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use super::*;
use crate::error::{Error, Result, Status};

/// A function that every supported ggml exports from the object wanted, and no other library does.
const LANDMARK: &CStr = c"ggml_backend_buffer_init";

macro_rules! api {
    ($($(#[$doc:meta])* $name:ident: $ty:ty,)*) => {
        /// The functions of `libggml-base` that Berth calls, found at load.
        #[derive(Clone, Copy)]
        #[expect(missing_docs, reason = "each is documented in ggml's own headers")]
        pub struct Api { $($(#[$doc])* pub $name: $ty,)* }

        impl Api {
            fn find(object: &Source) -> Result<Api> {
                Ok(Api { $($name: {
                    let symbol = concat!(stringify!($name), "\0");
                    let address = object.symbol(CStr::from_bytes_with_nul(symbol.as_bytes()).unwrap_or_default())
                        .ok_or_else(|| mismatch(format!("{} has no function {}", object.name(), stringify!($name))))?;
                    // SAFETY: the symbol has this C signature in every ggml since 0.9.0 (`ffi-tests/tests/layout.rs` compares the
                    // prototypes), and function pointers have the size of data pointers here.
                    unsafe { std::mem::transmute::<*mut c_void, $ty>(address) }
                },)* })
            }
        }
    };
}

api! {
    ggml_version: unsafe extern "C" fn() -> *const c_char,
    ggml_init: unsafe extern "C" fn(ggml_init_params) -> *mut ggml_context,
    ggml_free: unsafe extern "C" fn(*mut ggml_context),
    ggml_new_tensor_4d: unsafe extern "C" fn(*mut ggml_context, c_int, i64, i64, i64, i64) -> *mut ggml_tensor,
    ggml_set_name: unsafe extern "C" fn(*mut ggml_tensor, *const c_char) -> *mut ggml_tensor,
    ggml_get_data: unsafe extern "C" fn(*const ggml_tensor) -> *mut c_void,
    ggml_set_output: unsafe extern "C" fn(*mut ggml_tensor),
    ggml_nbytes: unsafe extern "C" fn(*const ggml_tensor) -> usize,
    ggml_op_name: unsafe extern "C" fn(c_int) -> *const c_char,
    ggml_glu_op_name: unsafe extern "C" fn(c_int) -> *const c_char,
    ggml_unary_op_name: unsafe extern "C" fn(c_int) -> *const c_char,
    ggml_type_name: unsafe extern "C" fn(c_int) -> *const c_char,
    ggml_add: unsafe extern "C" fn(*mut ggml_context, *mut ggml_tensor, *mut ggml_tensor) -> *mut ggml_tensor,
    ggml_add_id: unsafe extern "C" fn(*mut ggml_context, *mut ggml_tensor, *mut ggml_tensor, *mut ggml_tensor) -> *mut ggml_tensor,
    ggml_mul: unsafe extern "C" fn(*mut ggml_context, *mut ggml_tensor, *mut ggml_tensor) -> *mut ggml_tensor,
    ggml_mul_mat_id: unsafe extern "C" fn(*mut ggml_context, *mut ggml_tensor, *mut ggml_tensor, *mut ggml_tensor) -> *mut ggml_tensor,
    ggml_view_1d: unsafe extern "C" fn(*mut ggml_context, *mut ggml_tensor, i64, usize) -> *mut ggml_tensor,
    ggml_reshape_2d: unsafe extern "C" fn(*mut ggml_context, *mut ggml_tensor, i64, i64) -> *mut ggml_tensor,
    ggml_permute: unsafe extern "C" fn(*mut ggml_context, *mut ggml_tensor, c_int, c_int, c_int, c_int) -> *mut ggml_tensor,
    ggml_transpose: unsafe extern "C" fn(*mut ggml_context, *mut ggml_tensor) -> *mut ggml_tensor,
    ggml_cont: unsafe extern "C" fn(*mut ggml_context, *mut ggml_tensor) -> *mut ggml_tensor,
    ggml_reglu: unsafe extern "C" fn(*mut ggml_context, *mut ggml_tensor) -> *mut ggml_tensor,
    ggml_geglu: unsafe extern "C" fn(*mut ggml_context, *mut ggml_tensor) -> *mut ggml_tensor,
    ggml_swiglu: unsafe extern "C" fn(*mut ggml_context, *mut ggml_tensor) -> *mut ggml_tensor,
    ggml_geglu_erf: unsafe extern "C" fn(*mut ggml_context, *mut ggml_tensor) -> *mut ggml_tensor,
    ggml_geglu_quick: unsafe extern "C" fn(*mut ggml_context, *mut ggml_tensor) -> *mut ggml_tensor,
    ggml_swiglu_oai: unsafe extern "C" fn(*mut ggml_context, *mut ggml_tensor, *mut ggml_tensor, f32, f32) -> *mut ggml_tensor,
    ggml_silu: unsafe extern "C" fn(*mut ggml_context, *mut ggml_tensor) -> *mut ggml_tensor,
    ggml_gelu: unsafe extern "C" fn(*mut ggml_context, *mut ggml_tensor) -> *mut ggml_tensor,
    ggml_relu: unsafe extern "C" fn(*mut ggml_context, *mut ggml_tensor) -> *mut ggml_tensor,
    ggml_sqr: unsafe extern "C" fn(*mut ggml_context, *mut ggml_tensor) -> *mut ggml_tensor,
    ggml_repeat: unsafe extern "C" fn(*mut ggml_context, *mut ggml_tensor, *mut ggml_tensor) -> *mut ggml_tensor,
    ggml_get_rows: unsafe extern "C" fn(*mut ggml_context, *mut ggml_tensor, *mut ggml_tensor) -> *mut ggml_tensor,
    ggml_clamp: unsafe extern "C" fn(*mut ggml_context, *mut ggml_tensor, f32, f32) -> *mut ggml_tensor,
    ggml_graph_n_nodes: unsafe extern "C" fn(*mut ggml_cgraph) -> c_int,
    ggml_graph_node: unsafe extern "C" fn(*mut ggml_cgraph, c_int) -> *mut ggml_tensor,
    ggml_backend_buffer_is_host: unsafe extern "C" fn(*mut ggml_backend_buffer) -> bool,
    ggml_backend_buft_is_host: unsafe extern "C" fn(*mut ggml_backend_buffer_type) -> bool,
    ggml_backend_buffer_get_type: unsafe extern "C" fn(*mut ggml_backend_buffer) -> *mut ggml_backend_buffer_type,
    ggml_backend_buffer_get_size: unsafe extern "C" fn(*mut ggml_backend_buffer) -> usize,
    ggml_backend_buffer_get_usage: unsafe extern "C" fn(*mut ggml_backend_buffer) -> c_int,
}

/// `ggml_swiglu_clamp(ctx, gate, up, limit)`.
pub(super) type SwigluClamp = unsafe extern "C" fn(*mut ggml_context, *mut ggml_tensor, *mut ggml_tensor, f32) -> *mut ggml_tensor;

/// `ggml_can_fuse_subgraph_ext(graph, nodes, count, ops, outputs, n_outputs)`: whether these nodes have these operations and nothing but the
/// outputs among them is used by others.
pub type CanFuseSubgraph = unsafe extern "C" fn(*const ggml_cgraph, *const c_int, c_int, *const c_int, *const c_int, c_int) -> bool;

/// What was found: the functions, and what only some versions or layouts have.
pub(super) struct Found {
    /// Functions that every supported version has.
    pub(super) api: Api,
    /// `ggml_backend_buffer_init`, untyped: its second argument has another size in each layout.
    pub(super) buffer_init: *mut c_void,
    /// Whether the 2-D copies exist, which came with the second layout of the buffer and backend tables.
    pub(super) has_2d: bool,
    /// Whether buffers can be allocated for a list of tensors, which came with the third layout, that of the buffer type's table.
    pub(super) has_alloc_n: bool,
    /// `ggml_swiglu_clamp`, since ggml 0.24.
    pub(super) swiglu_clamp: Option<SwigluClamp>,
    /// `ggml_can_fuse_subgraph_ext`, which came between 0.9.0 and 0.9.4.
    pub(super) can_fuse_subgraph: Option<CanFuseSubgraph>,
    /// `ggml_log_internal(level, format, ...)`, where exported.
    pub(super) log: Option<unsafe extern "C" fn(c_int, *const c_char, ...)>,
    /// File that defines them.
    pub(super) file: PathBuf,
    object: Source,
}

impl Found {
    /// Keeps the functions mapped until the process ends: Berth's log goes through them even when their own program has closed them. Functions
    /// that were handed over are remembered, for calls that bring none.
    pub(super) fn keep(self) {
        match self.object {
            Source::Object(object) => {
                object.into_handle();
            }
            Source::Handed(handed) => {
                HANDED.lock().unwrap_or_else(PoisonError::into_inner).push((self.buffer_init as usize, handed));
            }
        }
    }
}

/// Gives the address of a function of ggml by its name; NULL if this ggml has none.
pub type SymbolFn = unsafe extern "C" fn(name: *const c_char, user: *mut c_void) -> *mut c_void;

/// The functions of a ggml, handed over by the program that has it.
#[derive(Clone, Copy)]
pub struct Handed {
    find: SymbolFn,
    user: *mut c_void,
}

// SAFETY: the pointer is only handed back to the program's function, which may be called from any thread ([`Handed::new`]).
unsafe impl Send for Handed {}

impl Handed {
    /// Functions that `find` knows.
    ///
    /// # Safety
    /// `find` must be callable with `user` from any thread until the process ends, and what it returns must be ggml's function of that name.
    pub unsafe fn new(find: SymbolFn, user: *mut c_void) -> Handed {
        Handed { find, user }
    }

    fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: `name` is NUL-terminated; the rest was promised to `new`.
        let address = unsafe { (self.find)(name.as_ptr(), self.user) };
        if address.is_null() { None } else { Some(address) }
    }
}

/// What was handed over and is in use, by the address of the landmark.
static HANDED: Mutex<Vec<(usize, Handed)>> = Mutex::new(Vec::new());

/// What was handed over for this ggml.
fn handed_for(ggml: *const c_void) -> Option<Handed> {
    HANDED.lock().unwrap_or_else(PoisonError::into_inner).iter().find(|(id, _)| *id == ggml as usize).map(|(_, handed)| *handed)
}

/// What was handed over, if that is one ggml.
fn only_handed() -> Option<Handed> {
    let handed = HANDED.lock().unwrap_or_else(PoisonError::into_inner);
    handed.first().filter(|first| handed.iter().all(|(id, _)| *id == first.0)).map(|(_, handed)| *handed)
}

/// Where functions are looked up.
enum Source {
    Object(Object),
    Handed(Handed),
}

impl Source {
    fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        match self {
            Source::Object(object) => object.symbol(name),
            Source::Handed(handed) => handed.symbol(name),
        }
    }

    fn name(&self) -> String {
        match self {
            Source::Object(object) => object.name(),
            Source::Handed(_) => "the ggml that was handed over".to_owned(),
        }
    }
}

/// Finds the ggml that was handed over, or that of the code that called into this library.
///
/// # Errors
/// [`Status::HostMismatch`] if there is none, if it cannot be told which of several is meant, or if it lacks a function.
pub(super) fn find(handed: Option<Handed>) -> Result<Found> {
    let object = match handed {
        Some(handed) => Source::Handed(handed),
        None => match object_of_caller().or_else(Object::global) {
            Some(object) => Source::Object(object),
            None => only_handed().map(Source::Handed).map_or_else(|| only_loaded_object().map(Source::Object), Ok)?,
        },
    };
    let buffer_init =
        object.symbol(LANDMARK).ok_or_else(|| mismatch(format!("{} has no function ggml_backend_buffer_init", object.name())))?;
    let has_2d = object.symbol(c"ggml_backend_tensor_set_2d").is_some();
    let has_alloc_n = object.symbol(c"ggml_backend_buft_alloc_buffer_n").is_some();
    let log = object.symbol(c"ggml_log_internal").map(|address| {
        // SAFETY: the symbol has this C signature wherever it is exported.
        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int, *const c_char, ...)>(address) }
    });
    let swiglu_clamp = object.symbol(c"ggml_swiglu_clamp").map(|address| {
        // SAFETY: the symbol has this C signature wherever it is exported.
        unsafe { std::mem::transmute::<*mut c_void, SwigluClamp>(address) }
    });
    let can_fuse_subgraph = object.symbol(c"ggml_can_fuse_subgraph_ext").map(|address| {
        // SAFETY: the symbol has this C signature wherever it is exported.
        unsafe { std::mem::transmute::<*mut c_void, CanFuseSubgraph>(address) }
    });
    if object.symbol(c"ggml_version").is_none() {
        return Err(mismatch(format!("found a ggml older than 0.9.0 (it has no ggml_version) in {}", object.name())));
    }
    let api = Api::find(&object)?;
    let file = match &object {
        Source::Object(object) => object.file.clone(),
        Source::Handed(_) => object_at(buffer_init).unwrap_or_default(),
    };
    Ok(Found { api, buffer_init, has_2d, has_alloc_n, swiglu_clamp, can_fuse_subgraph, log, file, object })
}

/// A library that this process opened by itself, to look at it.
pub struct Library(Object);

/// Opens a library as a host's loader would (`RTLD_LOCAL`): its constructors run.
///
/// # Errors
/// [`Status::HostMismatch`] with the loader's own words if it cannot be opened.
pub fn open_library(file: &std::path::Path) -> Result<Library> {
    let name = CString::new(file.as_os_str().as_bytes()).map_err(|_| Error::invalid("a path with a NUL byte"))?;
    // SAFETY: `name` is NUL-terminated. What the library's constructors do is what they do in every program that links it.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        // SAFETY: no arguments; the text is valid until the next call of the loader on this thread.
        let text = unsafe { libc::dlerror() };
        // SAFETY: dlerror returns NULL or NUL-terminated text.
        let text = if text.is_null() { "unknown".into() } else { unsafe { CStr::from_ptr(text) }.to_string_lossy() };
        return Err(mismatch(text.into_owned()));
    }
    Ok(Library(Object { handle, file: file.to_owned() }))
}

impl Library {
    /// Path it was opened by.
    pub fn file(&self) -> &std::path::Path {
        &self.0.file
    }
}

/// `GOMP_parallel(function, data, threads, flags)`: the entry of GNU's OpenMP into a parallel region, which LLVM's has too.
pub type GompParallel = unsafe extern "C" fn(unsafe extern "C" fn(*mut c_void), *mut c_void, std::ffi::c_uint, std::ffi::c_uint);

/// A function of a library of this ggml other than its base: the one handed over, or that of the first loaded object from which both can be
/// seen. `ggml` is the address of the base's landmark, which tells two ggml in one process apart.
pub(super) fn of_ggml(ggml: *const c_void, landmark: &CStr, name: &CStr) -> Option<*mut c_void> {
    if let Some(address) = handed_for(ggml).and_then(|handed| handed.symbol(name)) {
        return Some(address);
    }
    let objects = loaded_objects().into_iter().filter_map(|file| Object::open(&file)).chain(Object::open_global());
    objects
        .filter(|o| o.symbol(LANDMARK).is_some_and(|base| std::ptr::eq(base, ggml)) && o.symbol(landmark).is_some())
        .find_map(|o| o.symbol(name))
}

/// The entry to the OpenMP team that this ggml's CPU backend computes on. `None` if it has none.
pub(super) fn gomp_parallel(ggml: *const c_void) -> Option<GompParallel> {
    let address = of_ggml(ggml, c"ggml_backend_cpu_init", c"GOMP_parallel")?;
    // SAFETY: the symbol has this C signature in every OpenMP library that exports it.
    Some(unsafe { std::mem::transmute::<*mut c_void, GompParallel>(address) })
}

/// Whether this ggml has a device that is a GPU.
pub(super) fn has_gpu(ggml: *const c_void) -> bool {
    type Count = unsafe extern "C" fn() -> usize;
    type Get = unsafe extern "C" fn(usize) -> *mut ggml_backend_device;
    type TypeOf = unsafe extern "C" fn(*mut ggml_backend_device) -> c_int;
    let function = |name| of_ggml(ggml, c"ggml_backend_dev_count", name);
    let (Some(count), Some(get), Some(type_of)) =
        (function(c"ggml_backend_dev_count"), function(c"ggml_backend_dev_get"), function(c"ggml_backend_dev_type"))
    else {
        return false;
    };
    // SAFETY: these symbols have these C signatures in every ggml since 0.9.0, and numbers below the count are devices.
    unsafe {
        let count = std::mem::transmute::<*mut c_void, Count>(count)();
        let get = std::mem::transmute::<*mut c_void, Get>(get);
        let type_of = std::mem::transmute::<*mut c_void, TypeOf>(type_of);
        (0..count).any(|i| [GGML_BACKEND_DEVICE_TYPE_GPU, GGML_BACKEND_DEVICE_TYPE_IGPU].contains(&type_of(get(i))))
    }
}

/// The file of another backend that this ggml has under that name, if it has one; `ours` is not another one.
pub(super) fn other_registered(ggml: *const c_void, name: &CStr, ours: *const ggml_backend_reg) -> Option<PathBuf> {
    type ByName = unsafe extern "C" fn(*const c_char) -> *mut ggml_backend_reg;
    let by_name = of_ggml(ggml, c"ggml_backend_reg_by_name", c"ggml_backend_reg_by_name")?;
    // SAFETY: the symbol has this C signature in every ggml since 0.9.0, `name` is NUL-terminated.
    let reg = unsafe { std::mem::transmute::<*mut c_void, ByName>(by_name)(name.as_ptr()) };
    if reg.is_null() || std::ptr::eq(reg, ours) {
        return None;
    }
    // SAFETY: a registry that the host lists is valid, and its layout is the same in every ggml since 0.9.0.
    let function = unsafe { (*reg).iface.get_name };
    Some(function.and_then(|f| object_at(f as *const c_void)).unwrap_or_default())
}

/// Keeps this library mapped until the process ends: buffers that are alive after an unload point into it.
pub fn stay_loaded() {
    let Some(own) = object_at(stay_loaded as *const c_void) else { return };
    let Ok(name) = CString::new(own.as_os_str().as_bytes()) else { return };
    // SAFETY: `name` is a NUL-terminated path; RTLD_NOLOAD only changes the flags of an object that is loaded already.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_NODELETE) };
    if !handle.is_null() {
        // SAFETY: the handle is valid and its count is ours to give back; RTLD_NODELETE stays in force.
        unsafe { libc::dlclose(handle) };
    }
}

/// An object of this process whose symbols, and those of its dependencies, can be looked up.
struct Object {
    handle: *mut c_void,
    file: PathBuf,
}

impl Object {
    /// Opens an object that is loaded already.
    fn open(file: &CStr) -> Option<Object> {
        // SAFETY: `file` is NUL-terminated; RTLD_NOLOAD loads nothing and runs no constructor.
        let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        if handle.is_null() { None } else { Some(Object { handle, file: PathBuf::from(OsStr::from_bytes(file.to_bytes())) }) }
    }

    /// The main program and everything in the global scope.
    fn open_global() -> Option<Object> {
        // SAFETY: NULL names the main program.
        let handle = unsafe { libc::dlopen(std::ptr::null(), libc::RTLD_LAZY) };
        if handle.is_null() { None } else { Some(Object { handle, file: PathBuf::new() }) }
    }

    /// Opens an object that is loaded already and narrows it to the one that defines the landmark.
    fn loaded(file: &CStr) -> Option<Object> {
        Object::defining(Object::open(file)?)
    }

    /// The global scope, narrowed likewise.
    fn global() -> Option<Object> {
        Object::defining(Object::open_global()?)
    }

    /// From a scope in which the landmark is visible to the object that defines it, so that all functions come from one ggml.
    fn defining(scope: Object) -> Option<Object> {
        let landmark = scope.symbol(LANDMARK)?;
        let file = object_at(landmark)?;
        let name = CString::new(file.as_os_str().as_bytes()).ok()?;
        // SAFETY: `name` is NUL-terminated; nothing is loaded.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        // A program that exports ggml itself cannot be opened by its own path: its symbols are in the scope it was found through.
        if handle.is_null() { Some(Object { handle: scope.into_handle(), file }) } else { Some(Object { handle, file }) }
    }

    fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: the handle is open and `name` NUL-terminated.
        let address = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        if address.is_null() { None } else { Some(address) }
    }

    fn name(&self) -> String {
        self.file.display().to_string()
    }

    /// The handle, which stays open.
    fn into_handle(self) -> *mut c_void {
        let mut kept = std::mem::ManuallyDrop::new(self);
        drop(std::mem::take(&mut kept.file));
        kept.handle
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: the handle came from dlopen and is closed once. The host keeps its own count, so the functions stay mapped.
        unsafe { libc::dlclose(self.handle) };
    }
}

/// The file of the loaded object that contains this address.
fn object_at(address: *const c_void) -> Option<PathBuf> {
    // SAFETY: an all-zero Dl_info is valid, and dladdr takes any address.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: `info` is writable.
    let found = unsafe { libc::dladdr(address, &raw mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr gave a NUL-terminated name that lives as long as the object, which contains code on our stack or that we asked for.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
}

/// The nearest object up the call stack that is not this library, if ggml can be reached from it.
fn object_of_caller() -> Option<Object> {
    let own = object_at(object_of_caller as *const c_void)?;
    let mut caller = None;
    backtrace::trace(|frame| {
        caller = object_at(frame.ip()).filter(|file| *file != own);
        caller.is_none()
    });
    let name = CString::new(caller?.as_os_str().as_bytes()).ok()?;
    Object::loaded(&name)
}

/// The names of all loaded objects but the main program.
fn loaded_objects() -> Vec<CString> {
    unsafe extern "C" fn collect(info: *mut libc::dl_phdr_info, _: usize, names: *mut c_void) -> c_int {
        super::guard("dl_iterate_phdr callback", 1, || {
            // SAFETY: the loader passes a valid entry, and `names` is the vector given to dl_iterate_phdr below.
            let (info, names) = unsafe { (&*info, &mut *names.cast::<Vec<CString>>()) };
            if !info.dlpi_name.is_null() {
                // SAFETY: the loader's names are NUL-terminated.
                names.push(unsafe { CStr::from_ptr(info.dlpi_name) }.to_owned());
            }
            0
        })
    }
    let mut names: Vec<CString> = Vec::new();
    // SAFETY: `collect` matches the signature and only uses the vector, which outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(collect), (&raw mut names).cast()) };
    names.retain(|name| !name.is_empty());
    names
}

/// The one loaded object that defines the landmark.
fn only_loaded_object() -> Result<Object> {
    let mut found: BTreeMap<PathBuf, Object> =
        loaded_objects().iter().filter_map(|n| Object::loaded(n)).map(|o| (o.file.clone(), o)).collect();
    match found.len() {
        0 => Err(mismatch("no ggml in this process: no loaded object exports ggml_backend_buffer_init (is llama.cpp linked statically?)")),
        1 => found.pop_first().map(|(_, object)| object).ok_or_else(|| mismatch("no ggml in this process")),
        _ => {
            let files: Vec<String> = found.keys().map(|f| f.display().to_string()).collect();
            Err(mismatch(format!("several ggml in this process, and the caller uses none of them directly: {}", files.join(", "))))
        }
    }
}

fn mismatch(message: impl Into<String>) -> Error {
    Error::new(Status::HostMismatch, message)
}
