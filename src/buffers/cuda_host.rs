//! `CUDA_Host`: page-locked memory through the CUDA driver; in part, or pageable, and said so, where it cannot be had.
//!
//! Owns: what the settings mean for it, what becomes of what cannot be locked, and what is said. Must not know: how memory is locked.

use std::ffi::CStr;
use std::time::Instant;

use super::{BufferType, Placed, arena, permit, progress};
use crate::config::{self, Config, Pin, PinLimit};
use crate::error::{Error, Result, Status};
use crate::log;
use crate::memory::arena::Directory;
use crate::memory::budget::{self, Limit};
use crate::memory::pageable::Pageable;
use crate::memory::pinned::{self, Method, Pinned, Settings, Shortfall, Why};
use crate::memory::{PAGE, Region};
use crate::report::{Fallback, Place, Reason, human};

/// The buffer type `CUDA_Host`.
pub struct CudaHost;

/// The limit of all locked memory that the settings give.
pub fn limit(config: &Config) -> Limit {
    match config.pin_limit {
        PinLimit::Percent(percent) => Limit::Percent(percent),
        PinLimit::Bytes(bytes) => Limit::Bytes(bytes),
    }
}

/// Whether the host's mapping is to be locked in its place instead of being copied.
pub fn over_mappings() -> bool {
    config::get().is_ok_and(|c| c.pin == Some(Pin::Mapping) && switched_off(c).is_none())
}

/// What the settings say of page-locking.
pub(super) fn settings(config: &Config) -> Settings {
    let method = match config.pin {
        Some(Pin::Alloc) => Some(Method::Alloc),
        // A buffer that lies over no mapping is memory like any other.
        Some(Pin::Register | Pin::Mapping) => Some(Method::Register),
        Some(Pin::Off) | None => None,
    };
    Settings { device: config.cuda_device, method, limit: limit(config) }
}

/// Why weights are not page-locked at all, if a setting says so.
pub fn switched_off(config: &Config) -> Option<Fallback> {
    let variable = match config {
        Config { pin: Some(Pin::Off), .. } => "BERTH_PIN=off",
        Config { no_pinned: true, .. } => "GGML_CUDA_NO_PINNED",
        _ => return None,
    };
    Some(Fallback { reason: Reason::PinOff, message: format!("{variable} is set") })
}

impl From<Shortfall> for Fallback {
    fn from(short: Shortfall) -> Fallback {
        let reason = match short.why {
            Why::NoDriver => Reason::NoCudaDriver,
            Why::Budget => Reason::PinBudget,
            Why::TooSlow => Reason::PinSlow,
            Why::Refused => Reason::PinFailed,
        };
        Fallback { reason, message: short.message }
    }
}

impl BufferType for CudaHost {
    const NAME: &'static CStr = c"CUDA_Host";

    /// A page: what is locked can then end between any two tensors. A copy from memory that is locked in part is an error of CUDA.
    const ALIGNMENT: usize = PAGE;

    fn attempt(size: usize) -> std::result::Result<Placed, Fallback> {
        let config = config::get().map_err(|e| Fallback { reason: Reason::PinOff, message: e.message })?;
        if let Some(off) = switched_off(config) {
            return Err(off);
        }
        let started = Instant::now();
        let mut said = progress::Pin::begin(Self::name());
        // What the driver allocates, and what is touched before it is locked, by threads of this one, goes by the thread's wish.
        let _scope = super::numa::wished().and_then(|plan| plan.for_this_thread().ok());
        let (memory, short) = Pinned::new(size, &settings(config), &arena::open, &mut |step| said.step(step))?;
        let locked = memory.locked();
        said.end(started.elapsed(), locked);
        let Some(short) = short else { return Ok(Placed::as_asked(memory, Place::Pinned, None)) };
        let mut fallback = Fallback::from(short);
        let (file, rest) = match memory.in_file_from() {
            Some(_) => (config.arena_dir.clone(), "in a file of the arena directory, because memory has not room for it"),
            None => (None, "pageable"),
        };
        fallback.message = format!("{locked} bytes ({}) are page-locked, the rest is {rest}: {}", human(locked), fallback.message);
        Ok(Placed { fallback: Some(fallback), pinned: locked, ..Placed::as_asked(memory, Place::PartlyPinned, file) })
    }

    fn may_be_mapped(size: usize) -> Result<()> {
        // Its pages are locked when the load is over, and then nothing can be refused any more.
        pinned::driver().map(drop).or_else(|e| permit(Self::name(), size, &Fallback { reason: Reason::NoCudaDriver, message: e.message }))
    }

    fn instead(size: usize, fallback: Fallback) -> Result<Placed> {
        if !budget::is_too_much(size) {
            return Ok(Placed::pageable(Region::from(Pageable::new(size)?), fallback));
        }
        // As ordinary memory it would get the process killed when it is filled.
        let in_file = || -> std::result::Result<Placed, String> {
            let directory: Directory = arena::open().map_err(|e| e.message)?;
            let slice = arena::file(&directory, size, 0).map_err(|f| f.message)?.slice(size).map_err(|e| e.message)?;
            Ok(Placed::as_asked(slice, Place::Arena, Some(directory.path().to_owned())))
        };
        match in_file() {
            Ok(placed) => {
                let message = format!("{}; memory has not room for {size} bytes", fallback.message);
                Ok(Placed { fallback: Some(Fallback { message, ..fallback }), ..placed })
            }
            Err(why) => {
                let message = format!(
                    "{}: {size} bytes: {}; memory has not room for them, and no file either: {why}",
                    Self::name(),
                    fallback.message
                );
                log::warning!("{}: nothing is allocated, because filling it would get this process killed", Self::name());
                Err(Error::new(Status::OutOfMemory, message))
            }
        }
    }
}
