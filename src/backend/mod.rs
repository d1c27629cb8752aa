//! Berth as a ggml backend: one registry with three devices per host.
//!
//! Owns: finding the host once, the structs the host gets pointers to, and that they never move or go away; and the way of a graph: `claim`
//! says which operations are ours, `fuse` finds the experts of a layer among them, `run` computes, on the threads of a `team`. Must not know:
//! memory, how experts are multiplied.

mod claim;
mod device;
mod elementwise;
mod fuse;
mod node;
mod registry;
mod rest;
mod run;
mod stream;
mod team;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError, RwLock};

use crate::abi::{
    GompParallel, Handed, Host, ggml_backend_buffer, ggml_backend_buffer_type, ggml_backend_device, ggml_backend_reg, stay_loaded,
};
use crate::buffers::{self, Arena, BufferType, CpuMmap, CudaHost};
use crate::error::{Error, Result, Status};
use crate::report::{self, HostInfo};
use crate::{config, log, moe};

/// Buffer types, in the order of their devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Zero copy over the loader's mapping.
    CpuMmap = 0,
    /// Page-locked.
    CudaHost = 1,
    /// File-backed.
    Arena = 2,
}

/// All kinds.
pub const KINDS: [Kind; 3] = [Kind::CpuMmap, Kind::CudaHost, Kind::Arena];

/// Everything one host holds pointers to. It is never freed: the host may keep pointers until the process ends.
pub struct Instance {
    host: Host,
    reg: ggml_backend_reg,
    devices: [ggml_backend_device; KINDS.len()],
    types: [*mut ggml_backend_buffer_type; KINDS.len()],
    /// Whether the host had a GPU when a context was last made.
    gpu: AtomicBool,
    /// The entry to the host's OpenMP team, as it was then.
    gomp: RwLock<Option<GompParallel>>,
}

// SAFETY: the pointers in it lead to itself and to constant data; what changes after `link` is behind atomics and a lock.
unsafe impl Send for Instance {}
// SAFETY: likewise.
unsafe impl Sync for Instance {}

static INSTANCES: Mutex<Vec<&'static Instance>> = Mutex::new(Vec::new());

/// The instance for the ggml of the caller: made at the first call, the same at every later one.
///
/// # Errors
/// [`Status::Config`] or [`Status::HostMismatch`]: then this process goes on without Berth.
pub fn instance() -> Result<&'static Instance> {
    instance_of(None)
}

/// The instance for a ggml whose functions were handed over, or else that of the caller.
///
/// # Errors
/// As [`instance`].
pub fn instance_of(handed: Option<Handed>) -> Result<&'static Instance> {
    config::get()?;
    moe::isa::detect()?;
    let mut instances = INSTANCES.lock().unwrap_or_else(PoisonError::into_inner);
    let known = |id| instances.iter().copied().find(|i| i.host.id() == id);
    let instance = Host::find(handed, known, Instance::link)?;
    if !instances.iter().any(|i| std::ptr::eq(*i, instance)) {
        instances.push(instance);
        // From now on the host holds pointers into this library.
        stay_loaded();
    }
    Ok(instance)
}

/// The instance for a ggml that loads this library as a backend.
///
/// # Errors
/// As [`instance`]; and [`Status::HostMismatch`] if this ggml has another copy of Berth, whose places have the same names.
fn instance_for_loader() -> Result<&'static Instance> {
    let instance = instance()?;
    // Once: what the host lists later has found this copy.
    static ALONE: AtomicBool = AtomicBool::new(false);
    if !ALONE.load(Ordering::Relaxed) {
        if let Some(file) = instance.host.other_registered(registry::NAME, instance.reg()) {
            let text = format!("another copy of Berth, {}, is a backend of this process already", file.display());
            return Err(Error::new(Status::HostMismatch, text));
        }
        ALONE.store(true, Ordering::Relaxed);
    }
    Ok(instance)
}

/// The instance for a ggml that loads this library, or one line about why there is none.
pub fn instance_or_log() -> Option<&'static Instance> {
    match instance_for_loader() {
        Ok(instance) => Some(instance),
        Err(error) => {
            // The host tries again at every `-ot`; the same line again would tell nothing new.
            static LAST: Mutex<Option<String>> = Mutex::new(None);
            let last = LAST.lock().unwrap_or_else(PoisonError::into_inner).replace(error.message.clone());
            // The lock is not held while the line is written: a log may call back into us.
            if last.as_ref() != Some(&error.message) {
                // The host closes a library that it cannot use; then this memory would be lost, and the line be written again.
                stay_loaded();
                log::error!("not loaded: {error}");
            }
            None
        }
    }
}

impl Instance {
    /// Puts the structs at their final addresses, lets them point at each other, and remembers the host.
    fn link(host: Host) -> &'static Instance {
        report::add_host(HostInfo { ggml_version: host.version.to_string(), layout: host.layout.name(), file: host.file.clone() });
        let at = Box::into_raw(Box::new(Instance {
            reg: registry::reg(host.layout),
            devices: KINDS.map(device::device),
            types: [std::ptr::null_mut(); KINDS.len()],
            gpu: AtomicBool::new(false),
            gomp: RwLock::new(None),
            host,
        }));
        // SAFETY: the box was just made and is never freed; nobody else knows it yet.
        unsafe {
            let host = &raw const (*at).host;
            let host: &'static Host = &*host;
            (*at).reg.context = at.cast();
            for kind in KINDS {
                let device = &raw mut (*at).devices[kind as usize];
                (*device).reg = &raw mut (*at).reg;
                (*device).context = at.cast();
                (*at).types[kind as usize] = match kind {
                    Kind::CpuMmap => buffers::buffer_type::<CpuMmap>(host, device),
                    Kind::CudaHost => buffers::buffer_type::<CudaHost>(host, device),
                    Kind::Arena => buffers::buffer_type::<Arena>(host, device),
                };
            }
            &*at
        }
    }

    /// The registry, as the host wants it.
    pub fn reg(&'static self) -> *mut ggml_backend_reg {
        (&raw const self.reg).cast_mut()
    }

    /// The device of a kind.
    pub fn device(&'static self, kind: Kind) -> *mut ggml_backend_device {
        (&raw const self.devices[kind as usize]).cast_mut()
    }

    /// The buffer type of a kind.
    pub fn buffer_type(&'static self, kind: Kind) -> *mut ggml_backend_buffer_type {
        self.types[kind as usize]
    }

    /// A ggml buffer of a kind over memory that somebody else owns and has reported.
    ///
    /// # Safety
    /// `base` must point at `size` bytes, writable if `writable` says so, that stay valid until the buffer is freed.
    pub unsafe fn buffer_over(&'static self, kind: Kind, base: *mut u8, size: usize, writable: bool) -> *mut ggml_backend_buffer {
        let name = kind.buffer_type_name().to_str().unwrap_or("?");
        // SAFETY: the caller vouches for the memory; type and host are this instance's and live for ever.
        unsafe { buffers::over_region(self.buffer_type(kind), &self.host, name, base, size, writable) }
    }

    /// Looks at what the host has loaded by now: a GPU, a team of threads.
    fn look_around(&self) {
        self.gpu.store(self.host.has_gpu(), Ordering::Relaxed);
        *self.gomp.write().unwrap_or_else(PoisonError::into_inner) = self.host.gomp_parallel();
    }

    fn has_gpu(&self) -> bool {
        self.gpu.load(Ordering::Relaxed)
    }

    fn gomp(&self) -> Option<GompParallel> {
        *self.gomp.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Which of this instance's devices a pointer means.
    fn kind_of(&self, device: *const ggml_backend_device) -> Option<Kind> {
        KINDS.into_iter().find(|kind| std::ptr::eq(device, &raw const self.devices[*kind as usize]))
    }
}

impl Kind {
    /// Name of the device; that of its buffer type is [`Kind::buffer_type_name`].
    pub fn device_name(self) -> &'static std::ffi::CStr {
        match self {
            Kind::CpuMmap => c"BERTH",
            Kind::CudaHost => CudaHost::NAME,
            Kind::Arena => Arena::NAME,
        }
    }

    /// Name of the buffer type, as typed in `-ot`.
    pub fn buffer_type_name(self) -> &'static std::ffi::CStr {
        match self {
            Kind::CpuMmap => CpuMmap::NAME,
            Kind::CudaHost => CudaHost::NAME,
            Kind::Arena => Arena::NAME,
        }
    }

    fn description(self) -> &'static std::ffi::CStr {
        match self {
            Kind::CpuMmap => c"Berth: experts where the loader mapped them",
            Kind::CudaHost => c"Berth: page-locked host memory",
            Kind::Arena => c"Berth: file-backed arena",
        }
    }
}
