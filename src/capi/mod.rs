//! The exported functions, and nothing else. `include/berth.h` is generated from this module.
//!
//! Owns: argument checks and the last error of each thread. Rules: an output is written only on success; a string that a function returns is
//! constant, or is freed with `berth_string_free`; every function may be called from any thread.

pub mod arena;
mod input;
pub mod loader;
pub mod moe;
pub mod moe_glu;
pub mod placement;
pub mod plugin;
pub mod rules;
pub mod threads;

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::Arc;

use crate::abi::{Handed, ggml_backend_buffer_type, ggml_backend_reg, guard};
use crate::backend::{self, Kind};
use crate::config::VERSION;
use crate::error::{Error, Position, Result, Status};
use crate::{log, report};

/// What `berth_last_error` and `berth_last_error_info` tell.
struct Last {
    text: CString,
    status: Status,
    position: Option<Position>,
}

thread_local! {
    static LAST_ERROR: RefCell<Last> = RefCell::new(Last { text: CString::default(), status: Status::Ok, position: None });
}

/// Keeps a failure for `berth_last_error`, and gives its status.
fn keep(error: &Error) -> Status {
    let text = CString::new(log::one_line(&error.message)).unwrap_or_default();
    LAST_ERROR.with_borrow_mut(|last| *last = Last { text, status: error.status, position: error.position });
    error.status
}

/// Body of a function that returns a status.
fn status(function: &str, body: impl FnOnce() -> Result<()>) -> Status {
    let mut ended = false;
    let status = guard(function, Status::Internal, || {
        let status = body().map_or_else(|e| keep(&e), |()| Status::Ok);
        ended = true;
        status
    });
    if !ended {
        keep_defect(function);
    }
    status
}

/// A panic was caught, and the log has its text: the last error must not be an older one.
fn keep_defect(function: &str) {
    guard(function, (), || {
        keep(&Error::new(Status::Internal, format!("a defect of Berth in {function}; the log says more, please report it")));
    });
}

/// Body of a function that returns a pointer, NULL on failure.
fn pointer<T>(function: &str, body: impl FnOnce() -> Result<*mut T>) -> *mut T {
    let mut ended = false;
    let pointer = guard(function, std::ptr::null_mut(), || {
        let pointer = body().unwrap_or_else(|e| {
            keep(&e);
            std::ptr::null_mut()
        });
        ended = true;
        pointer
    });
    if !ended {
        keep_defect(function);
    }
    pointer
}

/// Version of this library, "major.minor.patch". Constant.
#[unsafe(no_mangle)]
pub extern "C" fn berth_version() -> *const c_char {
    guard("berth_version", VERSION.as_ptr(), || VERSION.as_ptr())
}

/// A status in words, without a full stop; "unknown status" for a number that is none. Constant.
#[unsafe(no_mangle)]
pub extern "C" fn berth_status_text(status: c_int) -> *const c_char {
    guard("berth_status_text", c"unknown status".as_ptr(), || Status::from_code(status).map_or(c"unknown status", Status::text).as_ptr())
}

/// What went wrong in the last call of this thread that failed: one line, "" if none did. It stays valid until the next call that fails on
/// this thread, or the thread ends.
#[unsafe(no_mangle)]
pub extern "C" fn berth_last_error() -> *const c_char {
    guard("berth_last_error", c"".as_ptr(), || LAST_ERROR.with_borrow(|last| last.text.as_ptr()))
}

/// What went wrong in the last call of this thread that failed, and where.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ErrorInfo {
    /// `sizeof(struct berth_error_info)`, set by the caller.
    pub struct_size: usize,
    /// Its class.
    pub status: Status,
    /// Number of the rule that is at fault, from 1, among all: those that were there before the call come first. 0 if none is.
    pub rule: usize,
    /// Column of the fault in the text of the rules, from 1, in characters; 0 if there is none.
    pub column: usize,
    /// Offset of the fault in the file, in bytes; meaningful if `in_file`.
    pub offset: u64,
    /// Whether the fault is at a byte of a file; not if the file as a whole is at fault: it cannot be opened, has changed, or is another part.
    pub in_file: bool,
    /// The same as `berth_last_error()`.
    pub message: *const c_char,
}

/// Tells more about the last failure than its message.
///
/// # Safety
/// `info` must be NULL, which is an error, or point at a struct whose `struct_size` is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_last_error_info(info: *mut ErrorInfo) -> Status {
    guard("berth_last_error_info", Status::Internal, || {
        let value = LAST_ERROR.with_borrow(|last| {
            let (rule, column) = match last.position {
                Some(Position::Rule { rule, column }) => (rule, column),
                _ => (0, 0),
            };
            let (in_file, offset) = match last.position {
                Some(Position::Byte(offset)) => (true, offset),
                _ => (false, 0),
            };
            ErrorInfo { struct_size: 0, status: last.status, rule, column, offset, in_file, message: last.text.as_ptr() }
        });
        // Not through `status`: a failure here must not replace the one that is asked about.
        // SAFETY: the caller vouches for `info`.
        unsafe { input::put(info, value) }.map_or_else(|e| e.status, |()| Status::Ok)
    })
}

/// Berth as a ggml backend registry, for `ggml_backend_register`. Needs a ggml of version 0.9.0 or newer in the process, as a shared library
/// (`berth_reg_of` needs none). The same pointer at every call. NULL if there is no ggml that fits, or a `BERTH_*` variable has a bad value: see `berth_last_error`.
#[unsafe(no_mangle)]
pub extern "C" fn berth_reg() -> *mut ggml_backend_reg {
    pointer("berth_reg", || Ok(backend::instance()?.reg()))
}

/// Gives the address of the function of ggml that is called `name`, or of GNU's `GOMP_parallel`; NULL if there is none. The pointer given with the
/// function.
pub type SymbolFn = Option<unsafe extern "C" fn(name: *const c_char, user: *mut c_void) -> *mut c_void>;

/// Berth as a ggml backend registry, as `berth_reg`, for a program that links ggml statically, or that knows which of several is meant: `find`
/// gives the functions of that ggml, and nothing is searched. `lib/cmake/berth/berth-llama.c` has the names it is asked for. Afterwards every
/// function of this library that needs a ggml and is called where none can be seen uses this one.
///
/// May be called while ggml lists its backends for the first time: of ggml's functions only those of its base are called.
///
/// # Safety
/// `find` must be NULL, which is an error, or callable with `user` from any thread until the process ends; what it returns must be the
/// function of that name, of one ggml.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_reg_of(find: SymbolFn, user: *mut c_void) -> *mut ggml_backend_reg {
    pointer("berth_reg_of", || {
        let find = find.ok_or_else(|| Error::invalid("berth_reg_of: find is NULL"))?;
        // SAFETY: the caller's promise is what is asked for.
        let handed = unsafe { Handed::new(find, user) };
        Ok(backend::instance_of(Some(handed))?.reg())
    })
}

/// The ggml buffer type `CPU_MMAP`: zero copy over a mapping of the model (through `ggml_backend_dev_buffer_from_host_ptr` with its
/// device), plain host memory otherwise. NULL like `berth_reg`.
#[unsafe(no_mangle)]
pub extern "C" fn berth_buft_cpu_mmap() -> *mut ggml_backend_buffer_type {
    pointer("berth_buft_cpu_mmap", || Ok(backend::instance()?.buffer_type(Kind::CpuMmap)))
}

/// The ggml buffer type `CUDA_Host`: page-locked by the CUDA driver; pageable, with a reason in the report, where that fails. NULL like
/// `berth_reg`.
#[unsafe(no_mangle)]
pub extern "C" fn berth_buft_cuda_host() -> *mut ggml_backend_buffer_type {
    pointer("berth_buft_cuda_host", || Ok(backend::instance()?.buffer_type(Kind::CudaHost)))
}

/// The ggml buffer type `ARENA`: one shared file per buffer in `BERTH_ARENA_DIR`; pageable, with a reason in the report, where that fails.
/// NULL like `berth_reg`.
#[unsafe(no_mangle)]
pub extern "C" fn berth_buft_arena() -> *mut ggml_backend_buffer_type {
    pointer("berth_buft_arena", || Ok(backend::instance()?.buffer_type(Kind::Arena)))
}

/// What was asked, got and why, for every buffer of this process, as one JSON object. `*json` is freed with `berth_string_free`.
///
/// # Safety
/// `json` must be NULL, which is an error, or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_report_json(json: *mut *mut c_char) -> Status {
    status("berth_report_json", || {
        if json.is_null() {
            return Err(Error::invalid("berth_report_json: json is NULL"));
        }
        let text = CString::new(report::to_json()).map_err(|e| Error::new(Status::Internal, e.to_string()))?;
        // SAFETY: not NULL, and writable by the caller's promise.
        unsafe { *json = text.into_raw() };
        Ok(())
    })
}

/// Frees a string that a function of this library returned. NULL is allowed.
///
/// # Safety
/// `string` must be NULL, or come from this library and not have been freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_string_free(string: *mut c_char) {
    guard("berth_string_free", (), || {
        if !string.is_null() {
            // SAFETY: by the caller's promise it came from `CString::into_raw`.
            drop(unsafe { CString::from_raw(string) });
        }
    });
}

/// Takes a message: level 1 error, 2 warning, 3 information; one line without newline, valid during the call; the pointer given with the
/// function.
pub type LogFn = Option<unsafe extern "C" fn(level: c_int, line: *const c_char, user: *mut c_void)>;

struct User(*mut c_void);
// SAFETY: the pointer is only handed back to the caller's function, which must be callable from any thread.
unsafe impl Send for User {}
// SAFETY: likewise.
unsafe impl Sync for User {}

/// Sends Berth's messages to `function` instead of the host's log, or of standard error where there is no host; NULL goes back to those.
///
/// # Safety
/// `function` must be NULL or callable from any thread, with `user`, until another one is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_log_set(function: LogFn, user: *mut c_void) {
    guard("berth_log_set", (), || {
        let user = User(user);
        log::choose_sink(function.map(|function| -> log::Sink {
            Arc::new(move |level, line| {
                let user = &user;
                if let Ok(line) = CString::new(line) {
                    // SAFETY: the caller promised that the function may be called with this pointer from any thread.
                    unsafe { function(level as c_int, line.as_ptr(), user.0) };
                }
            })
        }));
    });
}

// SAFETY: `repr(C)`, begins with `struct_size`; numbers, a bool, a status and a pointer may be zero.
unsafe impl input::Versioned for ErrorInfo {
    const NAME: &'static str = "berth_error_info";
    const FIELDS: &'static [usize] = input::offsets!(ErrorInfo, status, rule, column, offset, in_file, message);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last_error() -> String {
        // SAFETY: a string of this thread.
        unsafe { std::ffi::CStr::from_ptr(berth_last_error()) }.to_string_lossy().into_owned()
    }

    #[test]
    fn a_caught_panic_is_the_last_error() {
        assert_eq!(status("berth_a", || Err(Error::invalid("older"))), Status::InvalidArgument);
        assert_eq!(last_error(), "older");
        assert_eq!(status("berth_b", || panic!("boom")), Status::Internal);
        assert!(last_error().starts_with("a defect of Berth in berth_b; "), "{}", last_error());
        let mut info = ErrorInfo { struct_size: size_of::<ErrorInfo>(), ..NOTHING };
        // SAFETY: a struct of its full size.
        assert_eq!(unsafe { berth_last_error_info(&raw mut info) }, Status::Ok);
        assert_eq!((info.status, info.rule, info.in_file), (Status::Internal, 0, false));
        assert!(pointer::<u8>("berth_c", || panic!("boom")).is_null());
        assert!(last_error().contains("berth_c"), "{}", last_error());
        assert_eq!(status("berth_d", || Ok(())), Status::Ok);
        assert!(last_error().contains("berth_c"), "a success leaves it");
    }

    const NOTHING: ErrorInfo =
        ErrorInfo { struct_size: 0, status: Status::Ok, rule: 0, column: 0, offset: 0, in_file: false, message: std::ptr::null() };
}
