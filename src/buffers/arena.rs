//! `ARENA`: one shared file per buffer in `BERTH_ARENA_DIR`; pageable, and said so, where that cannot be had.

use std::ffi::CStr;

use super::{BufferType, Placed, fall_back};
use crate::config;
use crate::error::{Error, Result, Status};
use crate::log;
use crate::memory::{Region, arena};
use crate::report::{Fallback, Place, Reason};

/// The buffer type `ARENA`.
pub struct Arena;

impl BufferType for Arena {
    const NAME: &'static CStr = c"ARENA";

    fn allocate(size: usize) -> Result<Placed> {
        let config = config::get()?;
        let opened = match &config.arena_dir {
            Some(path) => arena::Directory::open(path, config.arena_dir_is_default),
            None => Err(Error::new(Status::Config, "no directory: neither BERTH_ARENA_DIR nor XDG_CACHE_HOME nor HOME is set")),
        };
        let directory = match opened {
            Ok(directory) => directory,
            Err(error) => return fall_back(Self::name(), size, Fallback { reason: Reason::ArenaDirectory, message: error.message }),
        };
        match arena::Arena::new(&directory, size).and_then(|arena| arena.slice(size)) {
            Ok(slice) => {
                if directory.in_memory {
                    warn_once_about_memory(&directory);
                }
                let file = Some(directory.path().to_owned());
                Ok(Placed { region: Region::from(slice), place: Place::Arena, file, fallback: None })
            }
            Err(error) => {
                let reason = if error.status == Status::NoSpace { Reason::ArenaNoSpace } else { Reason::ArenaFailed };
                fall_back(Self::name(), size, Fallback { reason, message: error.message })
            }
        }
    }
}

fn warn_once_about_memory(directory: &arena::Directory) {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let path = directory.path().display();
        log::warning!("{path} is a file system in memory: an arena there takes RAM like ordinary memory; set BERTH_ARENA_DIR to a disk");
    });
}
