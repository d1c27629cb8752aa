//! Page-locking on a machine with a GPU: how fast each method is, what a copy to the device gains, and whether the driver itself says that the memory
//! is locked. `ffi-tests/device/pin.sh` runs it. Without a driver it says so, and measures nothing.
//!
//! Two things that the library relies on and that only a real driver can show are asked too: that a copy may reach over pieces that were locked one by
//! one, and that one from memory that is locked in part is refused.

use std::ffi::{c_int, c_uint, c_void};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use berth::memory::arena::Directory;
use berth::memory::budget::{self, Limit};
use berth::memory::pageable::Pageable;
use berth::memory::pinned::{Method, Pinned, Settings, driver};
use cudarc::driver::sys;

const GIB: usize = 1 << 30;

/// Bytes of one copy.
const COPY: usize = 1 << 28;

/// Copies of which the median is taken.
const COPIES: usize = 9;

/// Bytes that are compared after a copy.
const COMPARED: usize = 1 << 20;

/// The functions of the driver that the library does not use.
struct Device {
    to_device: unsafe extern "C" fn(u64, *const c_void, usize) -> c_int,
    to_host: unsafe extern "C" fn(*mut c_void, u64, usize) -> c_int,
    attribute: unsafe extern "C" fn(*mut c_void, c_uint, u64) -> c_int,
    memory: u64,
}

impl Device {
    fn open() -> Result<Device, String> {
        macro_rules! function {
            ($name:literal) => {{
                // SAFETY: the type is that of the driver's documentation.
                *unsafe { sys::culib().get(concat!($name, "\0").as_bytes()) }.map_err(|e| format!("{}: {e}", $name))?
            }};
        }
        let get: unsafe extern "C" fn(*mut c_int, c_int) -> c_int = function!("cuDeviceGet");
        let retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int = function!("cuDevicePrimaryCtxRetain");
        let current: unsafe extern "C" fn(*mut c_void) -> c_int = function!("cuCtxPushCurrent_v2");
        let alloc: unsafe extern "C" fn(*mut u64, usize) -> c_int = function!("cuMemAlloc_v2");
        let (mut device, mut context, mut memory) = (0, std::ptr::null_mut(), 0);
        // SAFETY: all of them are writable; the driver was initialised by `driver`.
        unsafe {
            good("cuDeviceGet", get(&raw mut device, 0))?;
            good("cuDevicePrimaryCtxRetain", retain(&raw mut context, device))?;
            good("cuCtxPushCurrent", current(context))?;
            good("cuMemAlloc", alloc(&raw mut memory, COPY))?;
        }
        let (to_device, to_host) = (function!("cuMemcpyHtoD_v2"), function!("cuMemcpyDtoH_v2"));
        Ok(Device { to_device, to_host, attribute: function!("cuPointerGetAttribute"), memory })
    }

    /// The driver's own number for what it says of a copy of `len` bytes.
    fn copy(&self, source: *const u8, len: usize) -> c_int {
        // SAFETY: the source is readable and the memory on the device that long.
        unsafe { (self.to_device)(self.memory, source.cast(), len.min(COPY)) }
    }

    /// Median GB/s of a copy to the device, after its bytes were compared.
    fn rate(&self, source: *mut u8) -> Result<f64, String> {
        let mut back = vec![0u8; COMPARED];
        // SAFETY: the caller's memory has COPY bytes that nobody else uses.
        unsafe {
            for at in (0..COPY).step_by(4096) {
                *source.add(at) = (at / 4096) as u8 | 1;
            }
            good("cuMemcpyHtoD", self.copy(source, COPY))?;
            good("cuMemcpyDtoH", (self.to_host)(back.as_mut_ptr().cast(), self.memory, COMPARED))?;
            if back != std::slice::from_raw_parts(source, COMPARED) {
                return Err("the bytes on the device are others".into());
            }
        }
        let mut times: Vec<Duration> = Vec::new();
        for _ in 0..COPIES {
            let start = Instant::now();
            good("cuMemcpyHtoD", self.copy(source, COPY))?;
            times.push(start.elapsed());
        }
        times.sort_unstable();
        Ok(COPY as f64 / times[COPIES / 2].as_secs_f64().max(1e-9) / 1e9)
    }

    /// Whether the driver says that an address is in memory of the host that it knows.
    fn is_locked(&self, address: *const u8) -> bool {
        let mut kind: c_uint = 0;
        // SAFETY: `kind` is writable; 2 is CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 1 is CU_MEMORYTYPE_HOST.
        unsafe { (self.attribute)((&raw mut kind).cast(), 2, address.addr() as u64) == 0 && kind == 1 }
    }
}

fn good(name: &str, code: c_int) -> Result<(), String> {
    if code == 0 { Ok(()) } else { Err(format!("{name} failed: {code}")) }
}

fn main() -> ExitCode {
    let (version, devices) = match driver() {
        Ok(found) => found,
        Err(error) => {
            println!("not measured: {error}");
            return ExitCode::SUCCESS;
        }
    };
    println!("CUDA {}.{}, {devices} devices", version / 1000, version % 1000 / 10);
    match measure() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("FAILED: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure() -> Result<(), String> {
    let device = Device::open()?;
    let sizes = std::env::var("PIN_GIB").unwrap_or_else(|_| "1,8,64".into());
    let sizes: Vec<usize> = sizes.split(',').map(|s| s.parse().map_err(|e| format!("PIN_GIB: {e}"))).collect::<Result<_, String>>()?;
    let plain = Pageable::new(COPY).map_err(|e| e.message)?;
    let pageable = device.rate(plain.base())?;
    println!("copy to the device from pageable memory: {pageable:.2} GB/s");
    println!(
        "| GiB | method | locked GiB | lock s | GB/s | first, middle, last byte locked, says the driver | copy GB/s | x pageable | free s |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for gib in sizes {
        for method in [Method::Alloc, Method::Register] {
            one(&device, gib * GIB, method, pageable)?;
        }
    }
    boundaries(&device)
}

fn settings(method: Method, limit: Limit) -> Settings {
    Settings { device: 0, method: Some(method), limit }
}

fn no_file() -> Result<Directory, berth::error::Error> {
    Err(berth::error::Error::invalid("no file is to be made"))
}

fn one(device: &Device, len: usize, method: Method, pageable: f64) -> Result<(), String> {
    let (gib, name) = (len / GIB, method.name());
    let budget = budget::now(Limit::Percent(80));
    if budget.left < len as u64 {
        println!("| {gib} | {name} | skipped: {} bytes may be locked, {} | | | | | | |", budget.left, budget.because);
        return Ok(());
    }
    let start = Instant::now();
    let got = Pinned::new(len, &settings(method, Limit::Percent(80)), &no_file, &mut |_| {});
    let took = start.elapsed().as_secs_f64();
    let (pinned, short) = got.map_err(|s| format!("{gib} GiB, {name}: {}", s.message))?;
    if let Some(short) = short {
        println!("{gib} GiB, {name}: {}", short.message);
    }
    let locked = pinned.locked();
    let said = [0, len / 2, len - 1].map(|at| if device.is_locked(pinned.base().wrapping_add(at)) { "yes" } else { "no" }).join(", ");
    let copy = device.rate(pinned.base())?;
    let start = Instant::now();
    drop(pinned);
    let (freed, rate) = (start.elapsed().as_secs_f64(), locked as f64 / took.max(1e-9) / 1e9);
    let ratio = copy / pageable;
    println!(
        "| {gib} | {name} | {:.2} | {took:.2} | {rate:.2} | {said} | {copy:.2} | {ratio:.2} | {freed:.2} |",
        locked as f64 / GIB as f64
    );
    Ok(())
}

/// What a copy is answered that reaches over the end of a piece.
fn boundaries(device: &Device) -> Result<(), String> {
    const PIECE: usize = 256 << 20;
    let limit = Limit::Bytes(budget::locked() + 2 * PIECE as u64);
    let got = Pinned::new(3 * PIECE, &settings(Method::Register, limit), &no_file, &mut |_| {}).map_err(|s| s.message)?;
    let (pinned, _) = got;
    let over = |at: usize| device.copy(pinned.base().wrapping_add(at - (1 << 20)), 2 << 20);
    println!("copy over two locked pieces: {} (0 is expected)", over(PIECE));
    println!("copy over the end of what is locked: {} (1, invalid value, is expected)", over(2 * PIECE));
    if over(PIECE) != 0 {
        return Err("a copy over two locked pieces is refused: pieces must end between tensors, as what is locked does".into());
    }
    Ok(())
}
