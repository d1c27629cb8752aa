//! The ggml in this process: which version, which layout of its tables, its functions and numbers.
//!
//! Owns: the decision whether a host fits. The version number alone does not protect a plug-in: the tables changed in the middle of 0.9.11
//! without a change of `GGML_BACKEND_API_VERSION`. So the layout is taken from what the host exports (each change of a table appeared as
//! functions and as slots in one commit), and the version must agree with it.

use std::ffi::{CStr, CString, c_int, c_void};
use std::path::PathBuf;
use std::sync::Arc;

use super::check::{self, Ops};
use super::symbols::{self, Api, CanFuseSubgraph, Handed};
use super::*;
use crate::error::{Error, Result, Status};
use crate::log::{self, Level};

/// Version of ggml.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32, pub u32);

/// Oldest version whose tables are known.
pub const OLDEST: Version = Version(0, 9, 0);
/// Last version in which the buffer and backend tables had no 2-D copies (its later builds have them).
const LAST_V1: Version = Version(0, 9, 11);
/// Last version whose buffer type's table had no `alloc_buffer_n`, and first one that had it. Nobody has seen what lies between.
const LAST_V2: Version = Version(0, 25, 3);
const FIRST_V3: Version = Version(0, 26, 0);
/// First minor version that has not been compared with real headers.
pub(super) const FIRST_UNKNOWN: Version = Version(0, 27, 0);

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}

impl Version {
    /// Reads `major.minor.patch`, ignoring what follows (`-dirty`, `-dev`). A missing patch is 0.
    pub fn parse(text: &str) -> Option<Version> {
        let mut parts = text.splitn(3, '.');
        let mut number = |required: bool| {
            let digits: String = parts.next().unwrap_or("").chars().take_while(char::is_ascii_digit).collect();
            if digits.is_empty() && !required { Some(0) } else { digits.parse().ok() }
        };
        Some(Version(number(true)?, number(true)?, number(false)?))
    }
}

/// Layout of the buffer and backend tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Without 2-D copies.
    V1,
    /// With 2-D copies.
    V2,
    /// With 2-D copies, and buffer types that allocate for a list of tensors; the first change for which ggml raised its API version.
    V3,
}

impl Layout {
    /// The layout of a host of this version that exports the 2-D copies and the allocation for a list or not, and whether it is a version nobody
    /// has compared yet.
    ///
    /// # Errors
    /// [`Status::HostMismatch`] if the version is too old or contradicts what is exported.
    pub fn choose(version: Version, has_2d: bool, has_alloc_n: bool) -> Result<(Layout, bool)> {
        let contradiction = |what| Err(mismatch(format!("ggml {version} {what}: its tables are unknown")));
        let layout = match (has_2d, has_alloc_n) {
            _ if version < OLDEST => {
                return Err(mismatch(format!(
                    "found ggml {version}; supported is {OLDEST} and newer, with backend API {GGML_BACKEND_API_VERSION_V2} or {GGML_BACKEND_API_VERSION_V3}"
                )));
            }
            (true, _) if version < LAST_V1 => return contradiction("has 2-D copies, which came later"),
            (false, _) if version > LAST_V1 => return contradiction("lacks the 2-D copies"),
            (_, true) if version <= LAST_V2 => return contradiction("has alloc_buffer_n, which came later"),
            (_, false) if version >= FIRST_V3 => return contradiction("lacks alloc_buffer_n"),
            (false, _) => Layout::V1,
            (true, false) => Layout::V2,
            (true, true) => Layout::V3,
        };
        Ok((layout, version >= FIRST_UNKNOWN))
    }

    /// The host's `GGML_BACKEND_API_VERSION`: it takes no plug-in with another one.
    pub fn api_version(self) -> c_int {
        match self {
            Layout::V1 | Layout::V2 => GGML_BACKEND_API_VERSION_V2,
            Layout::V3 => GGML_BACKEND_API_VERSION_V3,
        }
    }

    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Layout::V1 => "v1",
            Layout::V2 => "v2",
            Layout::V3 => "v3",
        }
    }
}

/// A ggml that fits.
pub struct Host {
    /// Its version.
    pub version: Version,
    /// Layout of its tables.
    pub layout: Layout,
    /// Its functions.
    pub api: Api,
    /// Its numbers of operations.
    pub ops: Ops,
    /// The function that tells whether nodes may be computed as one, where this version has it.
    pub can_fuse_subgraph: Option<CanFuseSubgraph>,
    /// File it was found in.
    pub file: PathBuf,
    buffer_init: *mut c_void,
    log: Option<unsafe extern "C" fn(c_int, *const std::ffi::c_char, ...)>,
}

// SAFETY: all pointers are addresses of functions, which any thread may call.
unsafe impl Send for Host {}
// SAFETY: likewise; nothing in it changes.
unsafe impl Sync for Host {}

impl Host {
    /// Finds and checks the ggml that was handed over, or that of the caller. `known` is asked first with its [`Host::id`]: what it answers is the result, so that a host is
    /// checked once.
    ///
    /// # Errors
    /// [`Status::HostMismatch`] with one line that says what was found and what is supported.
    pub fn find<T>(handed: Option<Handed>, known: impl FnOnce(*const c_void) -> Option<T>, new: impl FnOnce(Host) -> T) -> Result<T> {
        let found = symbols::find(handed)?;
        if let Some(known) = known(found.buffer_init) {
            return Ok(known);
        }
        // SAFETY: the function takes nothing and returns a NUL-terminated literal.
        let text = unsafe { CStr::from_ptr((found.api.ggml_version)()) }.to_string_lossy().into_owned();
        let version = Version::parse(&text).ok_or_else(|| mismatch(format!("ggml_version() says {text:?}, which is no version")))?;
        let (layout, unknown) = Layout::choose(version, found.has_2d, found.has_alloc_n)?;
        let ops = check::tensor_and_ops(&found.api, found.swiglu_clamp).map_err(|e| mismatch(format!("ggml {version}: {e}")))?;
        let (api, can_fuse_subgraph) = (found.api, found.can_fuse_subgraph);
        let (file, buffer_init, log) = (found.file.clone(), found.buffer_init, found.log);
        let host = Host { version, layout, api, ops, can_fuse_subgraph, file, buffer_init, log };
        found.keep();
        host.take_log();
        if unknown {
            log::warning!("ggml {version} is newer than any that Berth was compared with; its structures look right, so it is accepted");
        }
        Ok(new(host))
    }

    /// Sends Berth's messages to the host's own log, where it has one to offer.
    fn take_log(&self) {
        let Some(log) = self.log else { return };
        log::offer_sink(Arc::new(move |level, line| {
            let level = match level {
                Level::Error => GGML_LOG_LEVEL_ERROR,
                Level::Warn => GGML_LOG_LEVEL_WARN,
                Level::Info => GGML_LOG_LEVEL_INFO,
                Level::Debug => GGML_LOG_LEVEL_DEBUG,
            };
            if let Ok(line) = CString::new(line) {
                // SAFETY: the format has one string argument, which is NUL-terminated.
                unsafe { log(level, c"%s\n".as_ptr(), line.as_ptr()) };
            }
        }));
    }

    /// `ggml_backend_buffer_init` for a host of layout `v1`.
    ///
    /// # Safety
    /// The host's layout must be [`Layout::V1`]; `buft` and `context` must live as long as the buffer.
    pub unsafe fn new_buffer_v1(
        &self,
        buft: *mut ggml_backend_buffer_type,
        iface: ggml_backend_buffer_i_v1,
        context: *mut c_void,
        size: usize,
    ) -> *mut ggml_backend_buffer {
        type Init =
            unsafe extern "C" fn(*mut ggml_backend_buffer_type, ggml_backend_buffer_i_v1, *mut c_void, usize) -> *mut ggml_backend_buffer;
        // SAFETY: this is the address of the function, whose table has this layout by the caller's promise.
        let init = unsafe { std::mem::transmute::<*mut c_void, Init>(self.buffer_init) };
        // SAFETY: the caller vouches for the arguments.
        unsafe { init(buft, iface, context, size) }
    }

    /// `ggml_backend_buffer_init` for a host of layout `v2` or `v3`.
    ///
    /// # Safety
    /// The host's layout must not be [`Layout::V1`]; `buft` and `context` must live as long as the buffer.
    pub unsafe fn new_buffer_v2(
        &self,
        buft: *mut ggml_backend_buffer_type,
        iface: ggml_backend_buffer_i_v2,
        context: *mut c_void,
        size: usize,
    ) -> *mut ggml_backend_buffer {
        type Init =
            unsafe extern "C" fn(*mut ggml_backend_buffer_type, ggml_backend_buffer_i_v2, *mut c_void, usize) -> *mut ggml_backend_buffer;
        // SAFETY: this is the address of the function, whose table has this layout by the caller's promise.
        let init = unsafe { std::mem::transmute::<*mut c_void, Init>(self.buffer_init) };
        // SAFETY: the caller vouches for the arguments.
        unsafe { init(buft, iface, context, size) }
    }

    /// The entry to the OpenMP team of this ggml's CPU backend, if it has one. Costs a search through all loaded objects.
    pub fn gomp_parallel(&self) -> Option<GompParallel> {
        symbols::gomp_parallel(self.id())
    }

    /// Whether this ggml has a GPU by now. Costs a search through all loaded objects.
    pub fn has_gpu(&self) -> bool {
        symbols::has_gpu(self.id())
    }

    /// The file of another backend that this ggml lists under that name. Costs a search through all loaded objects.
    pub fn other_registered(&self, name: &CStr, ours: *const ggml_backend_reg) -> Option<PathBuf> {
        symbols::other_registered(self.id(), name, ours)
    }

    /// Identifies the ggml: two hosts in one process differ in it.
    pub fn id(&self) -> *const c_void {
        self.buffer_init
    }
}

fn mismatch(message: impl Into<String>) -> Error {
    Error::new(Status::HostMismatch, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_with_and_without_suffix() {
        assert_eq!(Version::parse("0.25.3"), Some(Version(0, 25, 3)));
        assert_eq!(Version::parse("0.9.4-dirty"), Some(Version(0, 9, 4)));
        assert_eq!(Version::parse("1.2"), Some(Version(1, 2, 0)));
        for bad in ["", "x", "1", "1.", ".1", "99999999999.0.0"] {
            assert_eq!(Version::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn the_layout_follows_the_exports_and_must_agree_with_the_version() {
        let choose = |minor, patch, has_2d| {
            let has_alloc_n = Version(0, minor, patch) >= FIRST_V3;
            Layout::choose(Version(0, minor, patch), has_2d, has_alloc_n).map_err(|e| e.message)
        };
        assert_eq!(choose(9, 0, false), Ok((Layout::V1, false)));
        assert_eq!(choose(9, 10, false), Ok((Layout::V1, false)));
        assert_eq!(choose(9, 11, false), Ok((Layout::V1, false)));
        assert_eq!(choose(9, 11, true), Ok((Layout::V2, false)));
        assert_eq!(choose(25, 3, true), Ok((Layout::V2, false)));
        assert_eq!(choose(26, 9, true), Ok((Layout::V3, false)));
        assert_eq!(choose(27, 0, true), Ok((Layout::V3, true)));
        let between = |has_alloc_n| Layout::choose(Version(0, 25, 9), true, has_alloc_n).map_err(|e| e.message);
        assert_eq!((between(false), between(true)), (Ok((Layout::V2, false)), Ok((Layout::V3, false))));
        assert!(Layout::choose(Version(0, 26, 0), true, false).is_err());
        assert!(Layout::choose(Version(0, 25, 3), true, true).is_err());
        assert!(choose(8, 9, false).is_err_and(|e| e.contains("found ggml 0.8.9") && e.contains("0.9.0 and newer")));
        assert!(choose(9, 10, true).is_err());
        assert!(choose(10, 0, false).is_err());
        assert!(choose(27, 0, false).is_err());
    }
}
