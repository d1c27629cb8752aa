//! The CUDA driver, opened at run time, and its primary context.
//!
//! Owns: the library and its functions, what an error of it means for later calls, and the balance of contexts. Nothing of CUDA is linked. Must not
//! know: what memory is for, what happens where there is no driver.
//!
//! Functions are called by address and give plain numbers: a newer driver may return an error that no list here has. Only functions of the driver
//! are called, so no error is left behind for the runtime library that a CUDA backend of the host uses: its last error is its own.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use cudarc::driver::sys;

use crate::error::{Error, Result, Status};

/// Memory is locked for every context.
pub(super) const PORTABLE: c_uint = sys::CU_MEMHOSTREGISTER_PORTABLE;
const _: () = assert!(PORTABLE == sys::CU_MEMHOSTALLOC_PORTABLE);
/// The device only reads it.
pub(super) const READ_ONLY: c_uint = sys::CU_MEMHOSTREGISTER_READ_ONLY;

const OUT_OF_MEMORY: c_int = 2;
const ALREADY_REGISTERED: c_int = 712;

/// There is nothing behind these that Berth could do without.
const NO_DRIVER: [c_int; 6] = [34, 46, 100, 101, 801, 803];

/// After these the driver or its context is of no use any more: shut down, an uncorrectable error of the memory or the link, or a kernel that crashed,
/// ours or anybody's. CUDA asks to end the process then. Berth does not call it again.
const FATAL: [c_int; 14] = [3, 4, 214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719];

/// The driver's functions.
struct Functions {
    init: unsafe extern "C" fn(c_uint) -> c_int,
    version: unsafe extern "C" fn(*mut c_int) -> c_int,
    count: unsafe extern "C" fn(*mut c_int) -> c_int,
    get: unsafe extern "C" fn(*mut c_int, c_int) -> c_int,
    attribute: unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int,
    retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int,
    release: unsafe extern "C" fn(c_int) -> c_int,
    push: unsafe extern "C" fn(*mut c_void) -> c_int,
    pop: unsafe extern "C" fn(*mut *mut c_void) -> c_int,
    alloc: unsafe extern "C" fn(*mut *mut c_void, usize, c_uint) -> c_int,
    free: unsafe extern "C" fn(*mut c_void) -> c_int,
    register: unsafe extern "C" fn(*mut c_void, usize, c_uint) -> c_int,
    unregister: unsafe extern "C" fn(*mut c_void) -> c_int,
    name: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
}

/// The driver of this process.
pub(super) struct Driver {
    functions: Functions,
    /// The process that opened it: in a child of that one it must not be called.
    pid: u32,
    /// An error after which there is no use in it.
    gone: AtomicBool,
    /// Why no more memory is asked of it.
    lost: Mutex<Option<Error>>,
}

/// What the driver said, and whether it is worth to ask for less.
pub(super) struct Refused {
    pub(super) error: Error,
    /// Too little memory: a smaller piece may do.
    pub(super) memory: bool,
    /// Somebody else has locked a part of it.
    pub(super) already: bool,
}

impl From<Refused> for Error {
    fn from(refused: Refused) -> Error {
        refused.error
    }
}

impl Driver {
    /// The driver, opened at the first call. Whether there is one is asked once.
    ///
    /// # Errors
    /// [`Status::Unsupported`] if there is none, it has no device, it lacks a function, or this is a child of the process that opened it.
    pub(super) fn get() -> Result<&'static Driver> {
        static DRIVER: OnceLock<Result<Driver>> = OnceLock::new();
        let driver = DRIVER.get_or_init(Driver::open).as_ref().map_err(Clone::clone)?;
        if !driver.is_ours() {
            return Err(Error::new(Status::Unsupported, "this process was forked from one that uses CUDA, which does not work in both"));
        }
        match driver.lost.lock().unwrap_or_else(PoisonError::into_inner).clone() {
            Some(error) => Err(error),
            None => Ok(driver),
        }
    }

    fn open() -> Result<Driver> {
        // SAFETY: looks for a library by the driver's well-known names.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::new(Status::Unsupported, "no CUDA driver (libcuda.so.1) on this system"));
        }
        macro_rules! function {
            ($name:literal) => {{
                let missing = |_| Error::new(Status::Unsupported, concat!("the CUDA driver has no function ", $name));
                // SAFETY: the type is that of the driver's documentation. The library stays open.
                *unsafe { sys::culib().get(concat!($name, "\0").as_bytes()) }.map_err(missing)?
            }};
        }
        let functions = Functions {
            init: function!("cuInit"),
            version: function!("cuDriverGetVersion"),
            count: function!("cuDeviceGetCount"),
            get: function!("cuDeviceGet"),
            attribute: function!("cuDeviceGetAttribute"),
            retain: function!("cuDevicePrimaryCtxRetain"),
            release: function!("cuDevicePrimaryCtxRelease_v2"),
            push: function!("cuCtxPushCurrent_v2"),
            pop: function!("cuCtxPopCurrent_v2"),
            alloc: function!("cuMemHostAlloc"),
            free: function!("cuMemFreeHost"),
            register: function!("cuMemHostRegister_v2"),
            unregister: function!("cuMemHostUnregister"),
            name: function!("cuGetErrorName"),
        };
        let driver = Driver { functions, pid: std::process::id(), gone: AtomicBool::new(false), lost: Mutex::new(None) };
        // SAFETY: no flags are defined.
        driver.check("cuInit", unsafe { (driver.functions.init)(0) }).map_err(|refused| {
            // Nothing of a driver that does not start can be used, whatever its reason.
            Error::new(Status::Unsupported, refused.error.message)
        })?;
        Ok(driver)
    }

    /// Whether this process may call it: one that was forked from the one that opened it must not.
    fn is_ours(&self) -> bool {
        self.pid == std::process::id()
    }

    /// Whether memory can be given back through it.
    fn answers(&self) -> bool {
        self.is_ours() && !self.gone.load(Ordering::Relaxed)
    }

    /// No more memory is asked of it.
    fn lose(&self, error: &Error) {
        let message = format!("the CUDA driver is not asked any more: {}", error.message);
        self.lost.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(Error::new(error.status, message));
    }

    fn check(&self, function: &str, code: c_int) -> std::result::Result<(), Refused> {
        if code == 0 {
            return Ok(());
        }
        let status = match code {
            OUT_OF_MEMORY => Status::OutOfMemory,
            code if NO_DRIVER.contains(&code) => Status::Unsupported,
            _ => Status::Driver,
        };
        let error = Error::new(status, format!("{function} failed: {} ({code})", self.name_of(code)));
        if FATAL.contains(&code) {
            self.gone.store(true, Ordering::Relaxed);
            self.lose(&error);
        }
        Err(Refused { error, memory: code == OUT_OF_MEMORY, already: code == ALREADY_REGISTERED })
    }

    fn name_of(&self, code: c_int) -> String {
        let mut name = std::ptr::null();
        // SAFETY: `name` is writable. The function asks for no context, and may be called at any time.
        let found = unsafe { (self.functions.name)(code, &raw mut name) } == 0 && !name.is_null();
        // SAFETY: the driver's names are constant text.
        if found { unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned() } else { "an error without a name".into() }
    }

    /// Version as CUDA counts (12040 is 12.4), and number of devices.
    pub(super) fn describe(&self) -> Result<(i32, i32)> {
        let (mut version, mut devices) = (0, 0);
        // SAFETY: `version` is writable.
        self.check("cuDriverGetVersion", unsafe { (self.functions.version)(&raw mut version) })?;
        // SAFETY: `devices` is writable.
        self.check("cuDeviceGetCount", unsafe { (self.functions.count)(&raw mut devices) })?;
        Ok((version, devices))
    }
}

/// What a device can do with memory that it has not allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ability {
    /// Lock it (`HOST_REGISTER_SUPPORTED`).
    Register = 99,
    /// Lock what cannot be written (`READ_ONLY_HOST_REGISTER_SUPPORTED`).
    RegisterReadOnly = 113,
}

/// A counted reference to the primary context of a device, which a CUDA backend of the host shares.
pub(super) struct Context {
    driver: &'static Driver,
    device: c_int,
    handle: *mut c_void,
}

// SAFETY: a context may be used from any thread; the handle is only given back to the driver.
unsafe impl Send for Context {}
// SAFETY: likewise.
unsafe impl Sync for Context {}

impl Context {
    /// That of the device with this number.
    ///
    /// # Errors
    /// As [`Driver::get`]; [`Status::Unsupported`] if there is no such device; [`Status::Driver`] or [`Status::OutOfMemory`] if it refuses.
    pub(super) fn retain(device: u32) -> Result<Context> {
        let driver = Driver::get()?;
        let (mut number, mut handle) = (0, std::ptr::null_mut());
        let wanted = c_int::try_from(device).unwrap_or(c_int::MAX);
        // SAFETY: `number` is writable.
        driver.check("cuDeviceGet", unsafe { (driver.functions.get)(&raw mut number, wanted) }).map_err(|refused| {
            let message = format!("{}: device {device}", refused.error.message);
            Error::new(refused.error.status, message)
        })?;
        // SAFETY: `handle` is writable and the device exists.
        driver.check("cuDevicePrimaryCtxRetain", unsafe { (driver.functions.retain)(&raw mut handle, number) })?;
        Ok(Context { driver, device: number, handle })
    }

    /// Whether the device can do that. One that does not answer cannot.
    pub(super) fn can(&self, ability: Ability) -> bool {
        let mut value = 0;
        // SAFETY: `value` is writable and the device exists.
        let code = unsafe { (self.driver.functions.attribute)(&raw mut value, ability as c_int, self.device) };
        self.driver.check("cuDeviceGetAttribute", code).is_ok() && value != 0
    }

    /// Runs `body` with the context current on this thread, and puts back what was current before.
    fn with<T>(&self, body: impl FnOnce(&Functions) -> std::result::Result<T, Refused>) -> std::result::Result<T, Refused> {
        let driver = self.driver;
        if !driver.answers() {
            let lost = driver.lost.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let error =
                lost.unwrap_or_else(|| Error::new(Status::Driver, "this process was forked from the one that uses the CUDA driver"));
            return Err(Refused { error, memory: false, already: false });
        }
        // SAFETY: the handle is retained.
        driver.check("cuCtxPushCurrent", unsafe { (driver.functions.push)(self.handle) })?;
        let result = body(&driver.functions);
        if !driver.answers() {
            return result;
        }
        let mut popped = std::ptr::null_mut();
        // SAFETY: `popped` is writable; the context pushed above is on top of the stack.
        if let Err(refused) = driver.check("cuCtxPopCurrent", unsafe { (driver.functions.pop)(&raw mut popped) }) {
            // What the body got is real. Nothing more is asked for, so that the thread's stack of contexts does not grow.
            driver.lose(&refused.error);
        }
        result
    }

    /// New page-locked memory.
    pub(super) fn alloc(&self, len: usize) -> std::result::Result<*mut u8, Refused> {
        self.with(|functions| {
            let mut base = std::ptr::null_mut();
            // SAFETY: `base` is writable and a context is current.
            self.driver.check("cuMemHostAlloc", unsafe { (functions.alloc)(&raw mut base, len, PORTABLE) })?;
            Ok(base.cast())
        })
    }

    /// Gives back what [`Context::alloc`] gave. False if the driver did not take it: then it must be left alone.
    ///
    /// # Safety
    /// `base` must come from `alloc`, be given back once, and be used by nobody.
    pub(super) unsafe fn free(&self, base: *mut u8) -> bool {
        // SAFETY: by the caller's promise; a context is current.
        self.driver.answers() && self.with(|f| self.driver.check("cuMemFreeHost", unsafe { (f.free)(base.cast()) })).is_ok()
    }

    /// Locks pages of memory that is there.
    ///
    /// # Safety
    /// The pages must stay mapped until [`Context::unregister`] has succeeded for them.
    pub(super) unsafe fn register(&self, base: *mut u8, len: usize, flags: c_uint) -> std::result::Result<(), Refused> {
        // SAFETY: by the caller's promise; a context is current.
        self.with(|f| self.driver.check("cuMemHostRegister", unsafe { (f.register)(base.cast(), len, flags) }))
    }

    /// Undoes [`Context::register`] with this address. False if that failed: then the pages are locked still, and must stay mapped.
    ///
    /// # Safety
    /// No transfer from or to the pages may be under way.
    pub(super) unsafe fn unregister(&self, base: *mut u8) -> bool {
        // SAFETY: by the caller's promise; a context is current.
        self.driver.answers() && self.with(|f| self.driver.check("cuMemHostUnregister", unsafe { (f.unregister)(base.cast()) })).is_ok()
    }

    /// Whether no more memory is to be asked of the driver.
    pub(super) fn is_lost(&self) -> bool {
        self.driver.lost.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Whether this process was forked from the one that retained it.
    pub(super) fn is_another_process(&self) -> bool {
        !self.driver.is_ours()
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.driver.answers() {
            // SAFETY: retained once, released once. There is nobody to tell of an error, which leaves a context that lives a little longer.
            let _ = self.driver.check("cuDevicePrimaryCtxRelease", unsafe { (self.driver.functions.release)(self.device) });
        }
    }
}
