//! What can be wrong with a GGUF file.
//!
//! Owns: [`Error`] (file, offset, fault) and its one-line text. Must not know: how the fault was found.
//!
//! Texts from the file are escaped before they are shown: a tensor name must not be able to write to a terminal.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::text::{File, Name as Shown};

/// A fault in a GGUF file: which file, where, what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The file. `None` if the header came from memory.
    pub file: Option<PathBuf>,
    /// Byte offset in that file at which the fault was noticed.
    pub offset: u64,
    /// What is wrong.
    pub kind: ErrorKind,
}

/// Why a text in a header is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextFault {
    /// No bytes.
    Empty,
    /// Longer than is accepted. Its text is not read.
    TooLong {
        /// Its bytes.
        bytes: u64,
        /// The most that is accepted.
        most: u64,
    },
    /// Not UTF-8.
    NotUtf8,
    /// Contains NUL, a newline or another control character.
    Control,
}

/// The fault itself. Texts in it are as in the file; [`fmt::Display`] escapes them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The operating system refused.
    Io {
        /// Its error kind.
        kind: io::ErrorKind,
        /// Its text.
        message: String,
    },
    /// The first four bytes are not `GGUF`.
    NotGguf([u8; 4]),
    /// A big-endian file.
    BigEndian,
    /// Not version 2 or 3.
    Version(u32),
    /// The file ends inside `what`.
    Truncated {
        /// What was being read.
        what: &'static str,
        /// Bytes that it needs.
        need: u64,
        /// Bytes that are left.
        left: u64,
    },
    /// The file became shorter while it was open.
    Shrunk {
        /// Its size when it was opened.
        was: u64,
    },
    /// The file was written to while it was open: its time of modification is another one.
    Changed,
    /// More parts than a split model can have.
    Parts {
        /// `split.count`.
        count: u64,
        /// How many there can be.
        most: u64,
    },
    /// A count that cannot fit into what is left of the file.
    Count {
        /// What is counted.
        what: &'static str,
        /// The count.
        count: u64,
        /// The largest count that would fit.
        most: u64,
    },
    /// The header is larger than any real one.
    HeaderTooLarge,
    /// Memory could not be had.
    NoMemory(u64),
    /// A key or a name that is not usable.
    Text {
        /// `key` or `tensor name`.
        what: &'static str,
        /// The text, lossily decoded and cut.
        text: String,
        /// The fault.
        fault: TextFault,
    },
    /// A metadata key occurs twice.
    DuplicateKey(String),
    /// A metadata value has a type that GGUF does not define (or an array of arrays, which stock refuses too).
    ValueType {
        /// The key.
        key: String,
        /// The type's number.
        number: u32,
    },
    /// `general.alignment` is zero or not an unsigned 32-bit number.
    Alignment,
    /// More than four dimensions.
    Dimensions {
        /// The tensor.
        tensor: String,
        /// How many.
        count: u32,
    },
    /// The shape has more than 2^63 - 1 elements or bytes.
    ShapeOverflow(String),
    /// A row is not a whole number of blocks.
    PartialBlock {
        /// The tensor.
        tensor: String,
        /// Elements per row.
        row: u64,
        /// Elements per block.
        block: u64,
    },
    /// A block format that was taken out of ggml.
    RemovedType {
        /// The tensor.
        tensor: String,
        /// The format's number.
        number: u32,
    },
    /// Two tensors of a file have the same name.
    DuplicateTensor(String),
    /// Tensors of the same name stand in two parts of a split model.
    InTwoParts {
        /// The tensor.
        tensor: String,
        /// The other file in which it is.
        other: PathBuf,
    },
    /// A tensor's data ends beyond the file.
    BeyondFile {
        /// The tensor.
        tensor: String,
        /// Offset of its end in the file; `None` if that overflows.
        end: Option<u64>,
        /// The file's size.
        len: u64,
    },
    /// Two tensors share bytes.
    Overlap {
        /// The one that starts first.
        first: String,
        /// The other.
        second: String,
    },
    /// The file is one part of several, and its name does not end in `-00001-of-0000N.gguf`, so its siblings cannot be found.
    SplitName {
        /// `split.no`.
        no: u64,
        /// `split.count`.
        count: u64,
    },
    /// The file is not the first part.
    NotFirstPart {
        /// `split.no`, from 0.
        no: u64,
        /// `split.count`.
        count: u64,
        /// Where the first part should be.
        first: PathBuf,
    },
    /// A part of a split model is not there.
    MissingPart {
        /// Which one, from 0.
        no: u64,
        /// `split.count`.
        count: u64,
        /// The first part.
        first: PathBuf,
    },
    /// A part that does not belong where it stands.
    WrongPart {
        /// The metadata key that is wrong or missing.
        key: &'static str,
        /// What it says.
        found: Option<u64>,
        /// What it should say.
        expected: u64,
    },
}

impl Error {
    pub(super) fn new(offset: u64, kind: ErrorKind) -> Error {
        Error { file: None, offset, kind }
    }

    pub(super) fn io(offset: u64, e: &io::Error) -> Error {
        Error::new(offset, ErrorKind::Io { kind: e.kind(), message: e.to_string() })
    }

    /// Where in the file the fault is. `None` if it is one of the file as a whole: it cannot be opened, has changed, or is the wrong part.
    pub fn place(&self) -> Option<u64> {
        use ErrorKind as K;
        match self.kind {
            K::Io { .. } if self.offset == 0 => None,
            K::Changed
            | K::Parts { .. }
            | K::InTwoParts { .. }
            | K::MissingPart { .. }
            | K::SplitName { .. }
            | K::NotFirstPart { .. }
            | K::WrongPart { .. } => None,
            _ => Some(self.offset),
        }
    }

    /// The same error, naming the file.
    #[must_use]
    pub fn in_file(mut self, file: &Path) -> Error {
        self.file = Some(file.to_owned());
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(file) = &self.file {
            write!(f, "{}: ", File(file))?;
        }
        if let Some(place) = self.place() {
            write!(f, "at byte {place}: ")?;
        }
        write!(f, "{}", self.kind)
    }
}

impl fmt::Display for TextFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TextFault::Empty => f.write_str("is empty"),
            TextFault::TooLong { bytes, most } => write!(f, "of {bytes} bytes is too long; at most {most} bytes are read"),
            TextFault::NotUtf8 => f.write_str("is not UTF-8"),
            TextFault::Control => f.write_str("contains a control character"),
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use ErrorKind as K;
        match self {
            K::Io { message, .. } => write!(f, "{message}"),
            K::NotGguf(magic) => write!(f, "not a GGUF file: it starts with '{}' instead of 'GGUF'", magic.escape_ascii()),
            K::BigEndian => write!(f, "a big-endian GGUF file; only little-endian ones can be read"),
            K::Version(v) => write!(f, "GGUF version {v}; only versions 2 and 3 can be read"),
            K::Truncated { what, need, left } => {
                // A length that is beyond 64 bits is counted as the largest that is not.
                let at_least = if *need == u64::MAX { "2^64 or more".to_owned() } else { need.to_string() };
                write!(f, "the file ends inside {what}: {at_least} bytes are needed, {left} are left; the download may be incomplete")
            }
            K::Shrunk { was } => write!(f, "the file became shorter while it was open (it had {was} bytes); is it still being written?"),
            K::Changed => {
                write!(f, "the file was written to while it was open, so its header and its data may not belong together; load it again")
            }
            K::Parts { count, most } => write!(f, "split.count is {count}, but a model has at most {most} parts"),
            K::Count { what, count, most } => {
                write!(f, "{count} {what} are announced, but at most {most} fit into the rest of the file; the download may be incomplete")
            }
            K::HeaderTooLarge => write!(f, "the header is larger than {} MiB", super::MAX_HEADER_BYTES >> 20),
            K::NoMemory(bytes) => write!(f, "{bytes} bytes of memory could not be had"),
            K::Text { what, fault: fault @ (TextFault::TooLong { .. } | TextFault::Empty), .. } => write!(f, "{what} {fault}"),
            K::Text { what, text, fault } => write!(f, "{what} {} {fault}", Shown(text)),
            K::DuplicateKey(key) => write!(f, "metadata key {} occurs twice", Shown(key)),
            K::ValueType { key, number } => write!(f, "metadata key {} has a value of unusable type {number}", Shown(key)),
            K::Alignment => write!(f, "general.alignment must be a positive unsigned 32-bit number"),
            K::Dimensions { tensor, count } => write!(f, "tensor {} has {count} dimensions; at most 4 are possible", Shown(tensor)),
            K::ShapeOverflow(tensor) => write!(f, "tensor {} has a shape of more than 2^63 elements or bytes", Shown(tensor)),
            K::PartialBlock { tensor, row, block } => {
                write!(f, "tensor {} has rows of {row} elements, which is not a multiple of its block of {block}", Shown(tensor))
            }
            K::RemovedType { tensor, number } => write!(f, "tensor {} has type {number}, which was removed from ggml", Shown(tensor)),
            K::DuplicateTensor(tensor) => write!(f, "tensor {} occurs twice", Shown(tensor)),
            K::InTwoParts { tensor, other } => write!(f, "tensor {} is in this file and in {}", Shown(tensor), File(other)),
            K::BeyondFile { tensor, end: Some(end), len } => {
                write!(f, "tensor {} ends at byte {end}, but the file has {len}; the download may be incomplete", Shown(tensor))
            }
            K::BeyondFile { tensor, end: None, .. } => write!(f, "tensor {} ends beyond 2^64", Shown(tensor)),
            K::Overlap { first, second } => write!(f, "tensors {} and {} overlap", Shown(first), Shown(second)),
            K::SplitName { no, count } => write!(
                f,
                "this is part {} of {count}, but the file name does not end in -{:05}-of-{count:05}.gguf, so the other parts cannot be found",
                no.saturating_add(1),
                no.saturating_add(1)
            ),
            K::NotFirstPart { no, count, first } => {
                write!(f, "this is part {} of {count}; open the first part, {}", no.saturating_add(1), File(first))
            }
            K::MissingPart { no, count, first } => {
                write!(f, "No such file or directory; it is part {} of {count} of the model {}", no.saturating_add(1), File(first))
            }
            K::WrongPart { key, found: Some(found), expected } => write!(f, "{key} is {found}, expected {expected}"),
            K::WrongPart { key, found: None, expected } => write!(f, "{key} is missing or no number from 0 up, expected {expected}"),
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_text_names_file_offset_and_fault_and_escapes_the_name() {
        let e = Error::new(42, ErrorKind::DuplicateTensor("a\x1b[2J\nb".into())).in_file(Path::new("m.gguf"));
        assert_eq!(e.to_string(), r"m.gguf: at byte 42: tensor 'a\u{1b}[2J\nb' occurs twice");
        let fault = |offset, kind| Error::new(offset, kind).in_file(Path::new("m.gguf")).to_string();
        let missing = Error::io(0, &io::Error::from_raw_os_error(2)).in_file(Path::new("m.gguf"));
        assert_eq!(missing.to_string(), "m.gguf: No such file or directory (os error 2)", "a file that cannot be opened has no byte 0");
        assert!(Error::io(4096, &io::Error::from_raw_os_error(5)).to_string().starts_with("at byte 4096: "));
        assert_eq!(
            fault(0, ErrorKind::WrongPart { key: "split.no", found: None, expected: 1 }),
            "m.gguf: split.no is missing or no number from 0 up, expected 1"
        );
        let count = fault(16, ErrorKind::Count { what: "metadata pairs", count: 9, most: 2 });
        assert!(count.contains("9 metadata pairs are announced") && count.ends_with("; the download may be incomplete"), "{count}");
        let beyond = fault(24, ErrorKind::Truncated { what: "an array", need: u64::MAX, left: 3 });
        assert!(beyond.contains("2^64 or more bytes are needed") && !beyond.contains("18446744073709551615"), "{beyond}");
        let long = Error::new(0, ErrorKind::DuplicateTensor("x".repeat(500)));
        assert!(long.to_string().len() < 150);
    }
}
