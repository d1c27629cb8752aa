//! Page-locked memory from the CUDA driver, which is opened at run time.
//!
//! Owns: one allocation made by `cuMemHostAlloc` in the primary context of device 0. Nothing of CUDA is linked: where there is no driver, the
//! error says so. Must not know: what happens then.

use std::panic::{AssertUnwindSafe, catch_unwind};

use cudarc::driver::sys;

use crate::error::{Error, Result, Status};

/// Page-locked host memory.
pub struct Pinned {
    base: *mut u8,
    len: usize,
    context: Context,
}

// SAFETY: page-locked memory and the primary context may be used from any thread.
unsafe impl Send for Pinned {}
// SAFETY: `&Pinned` gives out addresses only.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// `len` page-locked bytes (`len` > 0), usable by every CUDA device.
    ///
    /// # Errors
    /// [`Status::Unsupported`] without a CUDA driver or device, [`Status::OutOfMemory`] or [`Status::Driver`] if the driver refuses.
    pub fn new(len: usize) -> Result<Pinned> {
        // The driver's functions are looked up one by one at their first call, and a missing one panics in the library that does it.
        catch_unwind(AssertUnwindSafe(|| Self::allocate(len)))
            .unwrap_or_else(|_| Err(Error::new(Status::Unsupported, "the CUDA driver lacks a function that Berth needs")))
    }

    fn allocate(len: usize) -> Result<Pinned> {
        let context = Context::retain()?;
        let mut base = std::ptr::null_mut();
        context.with(|| {
            // SAFETY: `base` is writable and a context is current.
            check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&raw mut base, len, sys::CU_MEMHOSTALLOC_PORTABLE) })
        })?;
        Ok(Pinned { base: base.cast(), len, context })
    }

    /// First byte, page-aligned.
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// Bytes asked for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let base = self.base;
        // At the end of the process the driver may be gone already; then the memory is too, and there is nobody to tell.
        let _ = self.context.with(|| {
            // SAFETY: allocated in `allocate`, freed once.
            check("cuMemFreeHost", unsafe { sys::cuMemFreeHost(base.cast()) })
        });
    }
}

/// The CUDA driver: its version as CUDA counts (12040 is 12.4) and the number of devices.
///
/// # Errors
/// [`Status::Unsupported`] if there is none, or it says that there is no device.
pub fn driver() -> Result<(i32, i32)> {
    catch_unwind(AssertUnwindSafe(|| {
        open_driver()?;
        let (mut version, mut devices) = (0, 0);
        // SAFETY: `version` is writable.
        check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut version) })?;
        // SAFETY: `devices` is writable.
        check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut devices) })?;
        Ok((version, devices))
    }))
    .unwrap_or_else(|_| Err(Error::new(Status::Unsupported, "the CUDA driver lacks a function that Berth needs")))
}

/// Opens the driver, if there is one.
fn open_driver() -> Result<()> {
    // SAFETY: looks for a library by the driver's well-known names.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::new(Status::Unsupported, "no CUDA driver (libcuda.so.1) on this system"));
    }
    // SAFETY: no flags are defined.
    check("cuInit", unsafe { sys::cuInit(0) })
}

/// A counted reference to the primary context of device 0, which a CUDA backend of the host shares.
struct Context {
    device: sys::CUdevice,
    handle: sys::CUcontext,
}

impl Context {
    fn retain() -> Result<Context> {
        open_driver()?;
        let (mut device, mut handle) = (0, std::ptr::null_mut());
        // SAFETY: `device` is writable.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, 0) })?;
        // SAFETY: `handle` is writable and the device exists.
        check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut handle, device) })?;
        Ok(Context { device, handle })
    }

    /// Runs `body` with the context current on this thread, and puts back what was current before.
    fn with(&self, body: impl FnOnce() -> Result<()>) -> Result<()> {
        // SAFETY: the handle is retained.
        check("cuCtxPushCurrent", unsafe { sys::cuCtxPushCurrent_v2(self.handle) })?;
        let result = body();
        let mut popped = std::ptr::null_mut();
        // SAFETY: `popped` is writable; the context pushed above is on top of the stack.
        let pop = check("cuCtxPopCurrent", unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) });
        result.and(pop)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once, released once. An error means that the driver is shutting down.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

fn check(function: &str, result: sys::CUresult) -> Result<()> {
    use sys::CUresult::*;
    let status = match result {
        CUDA_SUCCESS => return Ok(()),
        CUDA_ERROR_OUT_OF_MEMORY => Status::OutOfMemory,
        CUDA_ERROR_NO_DEVICE | CUDA_ERROR_STUB_LIBRARY | CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => Status::Unsupported,
        _ => Status::Driver,
    };
    Err(Error::new(status, format!("{function} failed: {result:?}")))
}
