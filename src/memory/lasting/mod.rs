//! Arena files that outlive the process: how they look, when one is trusted, and who may change them.
//!
//! Owns: the header ([`header`]), which model a file was made of ([`model`]), the files of a directory and their locks ([`store`]), their room ([`room`]), and what
//! people do with them ([`manage`]). Must not know: buffers, hosts, settings.
//!
//! Why no start trusts what it should not:
//! - A file gets its name last. Until then it has none, and vanishes with the process that builds it; what a name leads to was synced before, data
//!   first, then the table, then the block with the commit mark. A torn write shows in the checksums of both.
//! - It is never changed under its name. Whoever uses one maps it privately: a store stays in the process. Its modification time is set to the one
//!   that its table names before it gets the name, so a later change by others shows too, unless they hide it.
//! - The table names the files of the model with size, inode, times of modification and of change (which only the kernel sets), and checksums of
//!   their first bytes and of samples. Whatever differs is a reason to build anew.
//! - Locks are the kernel's (`flock`) and end with their process: a shared one on each file in use, an exclusive one on the file `NAME.lock` of
//!   whoever builds. What `NAME.lock` leaves behind after a crash means nothing.

pub mod header;
pub mod manage;
pub mod model;
pub mod room;
pub mod store;

use serde::Serialize;

/// Why a file is not trusted, or cannot be kept. Codes are stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// There is none.
    Missing,
    /// It, or its directory, is not this user's alone, or is a link.
    Untrusted,
    /// Its header is not as it was written.
    Damaged,
    /// It has another format, or is of another version of Berth.
    OtherVersion,
    /// It was changed after it was complete.
    Modified,
    /// It was made of other tensors, or of the same in other places.
    OtherTensors,
    /// The model's file is not there any more.
    ModelGone,
    /// The model's file is not the one that it was made of.
    ModelChanged,
    /// The bytes do not come from a file, or not from one mapping of it.
    NoFile,
    /// The host did something else with the buffer than setting each of its tensors once.
    OtherWrites,
    /// Another process builds it, or removes it.
    Busy,
    /// It would be larger than the limit, or all others are in use.
    Limit,
    /// The operating system refuses.
    Io,
}

/// A file that is not trusted, or cannot be kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Stable code.
    pub why: Why,
    /// The same in words.
    pub message: String,
}

impl Refusal {
    /// With a code and words.
    pub fn new(why: Why, message: impl Into<String>) -> Refusal {
        Refusal { why, message: message.into() }
    }
}

impl From<crate::error::Error> for Refusal {
    fn from(error: crate::error::Error) -> Refusal {
        Refusal::new(Why::Io, error.message)
    }
}
