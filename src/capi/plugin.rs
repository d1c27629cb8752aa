//! The two functions that ggml's loader looks for in a library it opens. They are not in `berth.h`: nobody else calls them.

use std::ffi::c_int;

use crate::abi::{ggml_backend_reg, guard};
use crate::backend;

/// Whether this process can use Berth: 0 is a clean refusal, and the host goes on without.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_backend_score() -> c_int {
    guard("ggml_backend_score", 0, || c_int::from(backend::instance_or_log().is_some()))
}

/// The registry. The host calls this again at every `-ot`; the pointer is always the same.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_backend_init() -> *mut ggml_backend_reg {
    guard("ggml_backend_init", std::ptr::null_mut(), || backend::instance_or_log().map_or(std::ptr::null_mut(), |i| i.reg()))
}
