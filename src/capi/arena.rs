//! `berth_arena_*`: memory in a file, piece by piece, for engines that load experts by themselves.

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::{input, pointer, status};
use crate::abi::guard;
use crate::buffers::EngineArena;
use crate::error::{Error, Status};

/// Memory in one file, from which pieces are taken. From any number of threads, until it is closed.
pub struct Arena {
    arena: EngineArena,
}

/// Opens an arena of `size` bytes (rounded up to 2 MiB) in a new file in `directory`: one for each layer and NUMA part, for example. The
/// file has no name, is readable by this user alone, has all its space reserved, and is gone when the arena is closed or the process ends,
/// however it does. `name` is for messages and the report.
///
/// `directory` NULL or "" means no file: every piece is ordinary memory, and nothing is said of it. Where a file was asked for and cannot be
/// had (the directory is missing, a link, not writable; the disk is full), the arena opens all the same, with ordinary memory; that is logged once and
/// stands in the report (`berth_report_json`) with its reason. With `BERTH_STRICT=1` it is an error, and so is any `BERTH_*` variable with a bad value.
///
/// After a `fork`, parent and child share the file: the child must take no piece, and may close the arena.
///
/// `numa` is the number of a NUMA node, or -1 for none in particular. Ordinary memory then comes from there, as far as it has any. Pages of a file
/// lie on the node of the thread that first writes to them: fill each part from a thread of its node.
///
/// # Safety
/// `directory` must be NULL or a string, `name` NULL, which is an error, or a string, `arena` NULL, which is an error, or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_arena_open(
    directory: *const c_char,
    name: *const c_char,
    size: usize,
    numa: c_int,
    arena: *mut *mut Arena,
) -> Status {
    status("berth_arena_open", || {
        // SAFETY: the caller vouches for both strings.
        let (directory, name) = unsafe {
            let directory = if directory.is_null() { &[] } else { CStr::from_ptr(directory).to_bytes() };
            (directory, input::text(name, "name")?)
        };
        let directory = Some(Path::new(OsStr::from_bytes(directory))).filter(|d| !d.as_os_str().is_empty());
        let node = match numa {
            -1 => None,
            n => Some(u32::try_from(n).map_err(|_| Error::invalid(format!("numa is {n}: the number of a node, or -1")))?),
        };
        let make = || Ok(Box::into_raw(Box::new(Arena { arena: EngineArena::open(directory, name, size, node)? })));
        // SAFETY: the caller vouches for `arena`.
        unsafe { input::output(arena, "arena", make) }
    })
}

/// Takes `size` bytes, zeroed, which take up a multiple of 2 MiB of the arena and begin at one of its file (in memory, at a page). They are freed when the arena is closed.
/// `file_backed`, unless NULL, gets whether they lie in the file. Pieces for which no space is left are ordinary memory: the first is logged, the sum is in the report.
/// NULL if `size` is 0 or there is no memory, and with `BERTH_STRICT=1` if they would not lie in the file that was asked for.
///
/// # Safety
/// `arena` must be NULL, which is an error, or open; `file_backed` NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_arena_alloc(arena: *mut Arena, size: usize, file_backed: *mut bool) -> *mut c_void {
    pointer("berth_arena_alloc", || {
        // SAFETY: the caller vouches for `arena`. Shared: several threads may take from it.
        let arena = unsafe { arena.as_ref() }.ok_or_else(|| Error::invalid("arena is NULL"))?;
        let (data, in_file) = arena.arena.allocate(size)?;
        if !file_backed.is_null() {
            // SAFETY: the caller vouches for it.
            unsafe { file_backed.write(in_file) };
        }
        Ok(data.cast::<c_void>())
    })
}

/// Closes an arena: all its pieces are freed, and the file is gone. NULL is allowed.
///
/// # Safety
/// `arena` must be NULL, or open and not be used again, nor any of its pieces.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_arena_close(arena: *mut Arena) {
    guard("berth_arena_close", (), || {
        if !arena.is_null() {
            // SAFETY: by the caller's promise, made by `berth_arena_open` and closed once.
            drop(unsafe { Box::from_raw(arena) });
        }
    });
}
