//! The one error type of the library, and its one conversion to the numbers C sees.
//!
//! Owns: [`Error`], [`Status`]. Must not know: ggml, files, environment.

use std::fmt;

/// Outcome of an exported function, as C sees it. Numbers are part of the ABI: they are never changed and never reused.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// An argument is NULL, out of range, misaligned or contradicts another one.
    InvalidArgument = 1,
    /// The memory asked for cannot be had.
    OutOfMemory = 2,
    /// The operating system refused an operation on a file or directory.
    Io = 3,
    /// The file system has too little free space.
    NoSpace = 4,
    /// Asked for something that this build, machine or driver cannot do.
    Unsupported = 5,
    /// The ggml in this process does not fit, or there is none.
    HostMismatch = 6,
    /// A `BERTH_*` environment variable has a value that is not understood.
    Config = 7,
    /// A defect of Berth itself, caught before it could reach the host.
    Internal = 8,
    /// The CUDA driver refused an operation.
    Driver = 9,
    /// The caller's own function asked to stop.
    Cancelled = 10,
    /// A file or a tensor of that name does not exist.
    NotFound = 11,
    /// A file is damaged, incomplete, or not what it claims to be.
    BadFile = 12,
}

impl Status {
    /// Every status, for tables and tests.
    const ALL: [Status; 13] = [
        Status::Ok,
        Status::InvalidArgument,
        Status::OutOfMemory,
        Status::Io,
        Status::NoSpace,
        Status::Unsupported,
        Status::HostMismatch,
        Status::Config,
        Status::Internal,
        Status::Driver,
        Status::Cancelled,
        Status::NotFound,
        Status::BadFile,
    ];

    /// One English phrase, without a full stop.
    pub const fn text(self) -> &'static std::ffi::CStr {
        match self {
            Status::Ok => c"ok",
            Status::InvalidArgument => c"invalid argument",
            Status::OutOfMemory => c"out of memory",
            Status::Io => c"input/output error",
            Status::NoSpace => c"no space left on the file system",
            Status::Unsupported => c"not supported here",
            Status::HostMismatch => c"no ggml in this process that fits",
            Status::Config => c"bad value in the environment",
            Status::Internal => c"internal error in berth",
            Status::Driver => c"refused by the CUDA driver",
            Status::Cancelled => c"cancelled",
            Status::NotFound => c"not found",
            Status::BadFile => c"damaged or unknown file",
        }
    }

    /// The status with this number, if there is one.
    pub fn from_code(code: i32) -> Option<Status> {
        Self::ALL.into_iter().find(|s| *s as i32 == code)
    }
}

/// Where in an input a fault is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    /// In the text of rules.
    Rule {
        /// Number of the rule among all, with those that were there before it, counted from 1.
        rule: usize,
        /// Column in the text, counted from 1 in characters.
        column: usize,
    },
    /// At a byte of a file.
    Byte(u64),
}

/// What went wrong, for a person to read, and the status that C gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The class of the failure.
    pub status: Status,
    /// One line: what was attempted, on what, and why it failed.
    pub message: String,
    /// Where in the input, if it is one that has places.
    pub position: Option<Position>,
}

/// Result of everything in this crate that can fail.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// A failure of the given class.
    pub fn new(status: Status, message: impl Into<String>) -> Self {
        Error { status, message: message.into(), position: None }
    }

    /// The same error, at a place of the input.
    #[must_use]
    pub fn at(mut self, position: Position) -> Self {
        self.position = Some(position);
        self
    }

    /// An argument of the caller that cannot be accepted.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Status::InvalidArgument, message)
    }

    /// A failed system call. `what` names the operation and its object; a full file system gets its own status.
    pub fn os(what: impl fmt::Display, cause: &std::io::Error) -> Self {
        let status = match cause.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => Status::NoSpace,
            Some(libc::ENOMEM) => Status::OutOfMemory,
            _ => Status::Io,
        };
        Self::new(status, format!("{what}: {cause}"))
    }

    /// The calling thread's `errno` as an error of `what`.
    pub fn last_os(what: impl fmt::Display) -> Self {
        Self::os(what, &std::io::Error::last_os_error())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_numbers_are_those_of_the_first_release() {
        let numbers: Vec<i32> = Status::ALL.iter().map(|s| *s as i32).collect();
        assert_eq!(numbers, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
        assert!(Status::ALL.iter().all(|s| Status::from_code(*s as i32) == Some(*s)));
        assert_eq!(Status::from_code(-1), None);
        assert_eq!(Status::from_code(13), None);
    }

    #[test]
    fn a_full_file_system_has_its_own_status() {
        let full = Error::os("reserve 8 bytes", &std::io::Error::from_raw_os_error(libc::ENOSPC));
        assert_eq!(full.status, Status::NoSpace);
        assert!(full.message.starts_with("reserve 8 bytes: "));
        assert_eq!(Error::os("x", &std::io::Error::from_raw_os_error(libc::EACCES)).status, Status::Io);
    }
}
