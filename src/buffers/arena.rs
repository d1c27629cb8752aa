//! `ARENA`: one shared file per buffer in `BERTH_ARENA_DIR`; pageable, and said so, where that cannot be had.

use std::ffi::CStr;
use std::sync::Arc;

use super::lasting::Lasting;
use super::{BufferType, Placed};
use crate::config;
use crate::error::{Error, Result, Status};
use crate::log;
use crate::memory::arena;
use crate::report::{Fallback, Place, Reason};

/// What decides whether it is kept, and the memory.
type Kept = (Arc<Lasting>, Arc<arena::Arena>);

/// The buffer type `ARENA`.
pub struct Arena;

impl BufferType for Arena {
    const NAME: &'static CStr = c"ARENA";

    fn attempt(size: usize) -> std::result::Result<Placed, Fallback> {
        let directory = open().map_err(|error| Fallback { reason: Reason::ArenaDirectory, message: error.message })?;
        let slice = file(&directory, size, 0)?.slice(size).map_err(|e| Fallback { reason: Reason::ArenaFailed, message: e.message })?;
        Ok(Placed::as_asked(slice, Place::Arena, Some(directory.path().to_owned())))
    }

    fn attempt_for_host(size: usize) -> std::result::Result<Placed, Fallback> {
        if !config::get().is_ok_and(|c| c.arena_persist) {
            return Self::attempt(size);
        }
        let (directory, (lasting, arena)) = match open() {
            Ok(directory) => {
                let directory = Arc::new(directory);
                let full = |fallback: &Fallback| fallback.reason == Reason::ArenaNoSpace;
                let got = Lasting::new(&directory, size, |header| file(&directory, size, header), full)?;
                (directory, got)
            }
            Err(error) => {
                let (directory, got) =
                    reuse(size).ok_or_else(|| Fallback { reason: Reason::ArenaDirectory, message: error.message.clone() })?;
                log::info!("{}: what is kept there is used, and nothing can be added", error.message);
                (directory, got)
            }
        };
        let slice = arena.slice(size).map_err(|e| Fallback { reason: Reason::ArenaFailed, message: e.message })?;
        let placed = Placed::as_asked(slice, Place::Arena, Some(directory.path().to_owned()));
        Ok(Placed { lasting: Some(lasting), ..placed })
    }
}

/// A file of an earlier start, in a directory that nobody may write to.
fn reuse(size: usize) -> Option<(Arc<arena::Directory>, Kept)> {
    let directory = Arc::new(arena::Directory::open_to_read(config::get().ok()?.arena_dir.as_ref()?).ok()?);
    let got = Lasting::reuse(&directory, size)?;
    Some((directory, got))
}

/// A file of at least `size` bytes, behind `header` more.
pub(super) fn file(directory: &arena::Directory, size: usize, header: usize) -> std::result::Result<Arc<arena::Arena>, Fallback> {
    let arena = arena::Arena::with_header(directory, size, header).map_err(|error| {
        let reason = if error.status == Status::NoSpace { Reason::ArenaNoSpace } else { Reason::ArenaFailed };
        Fallback { reason, message: error.message }
    })?;
    if directory.in_memory {
        warn_once_about_memory(directory);
    }
    Ok(arena)
}

/// The directory that the settings name.
pub(super) fn open() -> Result<arena::Directory> {
    let config = config::get()?;
    let none = || Error::new(Status::Config, "no directory: neither BERTH_ARENA_DIR nor XDG_CACHE_HOME nor HOME is set");
    arena::Directory::open(config.arena_dir.as_ref().ok_or_else(none)?, config.arena_dir_is_default)
}

fn warn_once_about_memory(directory: &arena::Directory) {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let path = directory.path().display();
        log::warning!(
            "{path} is a file system in memory: an arena there takes RAM like ordinary memory; choose one on a disk (BERTH_ARENA_DIR)"
        );
    });
}
