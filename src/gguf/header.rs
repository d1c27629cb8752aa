//! The checked header of one GGUF file.
//!
//! Owns: look-up and decoding of what [`super::parse`] has checked. Must not know: how the bytes came here.

use std::io::{Cursor, Read, Seek};
use std::path::Path;

use super::error::Error;
use super::parse::{self, NOT_KEPT, after_text, raw, text, u32_at, u64_at};
use super::source::open_regular;
use super::types::GgmlType;
use super::value::{Array, Value, ValueType, decode};

/// The header of one GGUF file. Every promise of the module's text holds for it.
#[derive(Clone, Debug, Default)]
pub struct Header {
    pub(super) version: u32,
    pub(super) alignment: u32,
    pub(super) file_len: u64,
    pub(super) data_offset: u64,
    /// Metadata pairs, then tensor descriptions, in the file's own encoding.
    pub(super) kept: Vec<u8>,
    /// Offset in the file minus position in `kept`, for tensor descriptions.
    pub(super) file_minus_kept: u64,
    /// Positions in `kept`, in file order and sorted by text.
    pub(super) pairs: Vec<u32>,
    pub(super) pairs_by_key: Vec<u32>,
    pub(super) tensors: Vec<u32>,
    pub(super) tensors_by_name: Vec<u32>,
    /// Position and bytes of the tensors with a format that is not known, sorted.
    pub(super) unknown_spans: Vec<(u32, u64)>,
    pub(super) quirks: Vec<Quirk>,
}

/// Something that this reader accepts and stock llama.cpp refuses. Of each kind, the first is noted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Quirk {
    /// `general.alignment` is not a power of two.
    Alignment(u32),
    /// A tensor name of 64 bytes or more.
    LongName(String),
    /// A tensor that does not start at a multiple of the alignment.
    Misaligned(String),
    /// A tensor that does not start where the one before it ends.
    NotContiguous(String),
    /// A tensor without data whose offset lies beyond the end of the file.
    EmptyBeyondFile(String),
    /// A block format that this version does not know. Its size is taken from where the next tensor starts.
    UnknownType {
        /// The tensor.
        tensor: String,
        /// The format.
        ty: GgmlType,
    },
}

/// One tensor of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorInfo<'a> {
    /// The name: unique in the file, at most [`super::MAX_NAME_BYTES`], no control characters.
    pub name: &'a str,
    /// The block format.
    pub ty: GgmlType,
    /// Elements per dimension, fastest first; 1 for the ones not in the file.
    pub dims: [u64; 4],
    /// Dimensions in the file, at most 4.
    pub dim_count: u32,
    /// Offset of the data in the file.
    pub offset: u64,
    /// Bytes of the data. For an unknown format, what lies between it and the next tensor.
    pub bytes: u64,
}

/// A tensor description as it stands in the file; `offset` counts from the start of the data.
pub(super) struct TensorRecord<'a> {
    pub(super) name: &'a str,
    pub(super) dim_count: u32,
    pub(super) dims: [u64; 4],
    pub(super) ty: GgmlType,
    pub(super) offset: u64,
}

impl<'a> TensorRecord<'a> {
    /// Decodes a complete description; its number of dimensions was checked.
    pub(super) fn at(kept: &'a [u8], at: u32) -> TensorRecord<'a> {
        let from = after_text(kept, at);
        let dim_count = u32_at(kept, from);
        let mut dims = [1; 4];
        for (i, d) in dims.iter_mut().take(dim_count as usize).enumerate() {
            *d = u64_at(kept, from + 4 + i * 8);
        }
        let rest = from + 4 + dim_count as usize * 8;
        TensorRecord { name: text(kept, at), dim_count, dims, ty: GgmlType(u32_at(kept, rest)), offset: u64_at(kept, rest + 4) }
    }

    pub(super) fn bytes(&self) -> Option<u64> {
        self.ty.bytes_of(self.dims)
    }
}

impl Header {
    /// Reads the header of the file at `path`.
    ///
    /// # Errors
    /// Any [`Error`]; it names `path`.
    pub fn open(path: &Path) -> Result<Header, Error> {
        open_regular(path).map_err(|e| Error::io(0, &e)).and_then(Header::read).map_err(|e| e.in_file(path))
    }

    /// Reads a header from the front of `source`; its size is taken from its end.
    ///
    /// # Errors
    /// Any [`Error`]; it names no file.
    pub fn read(source: impl Read + Seek) -> Result<Header, Error> {
        parse::parse(source)
    }

    /// Reads a header from bytes that stand for a whole file.
    ///
    /// # Errors
    /// Any [`Error`]; it names no file.
    pub fn from_bytes(bytes: &[u8]) -> Result<Header, Error> {
        parse::parse(Cursor::new(bytes))
    }

    /// 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Bytes to whose multiples tensors are aligned; at least 1.
    pub fn alignment(&self) -> u32 {
        self.alignment
    }

    /// Size of the file when it was read.
    pub fn file_len(&self) -> u64 {
        self.file_len
    }

    /// Where the tensor data starts. Beyond the file if there is none.
    pub fn data_offset(&self) -> u64 {
        self.data_offset
    }

    /// What stock would refuse.
    pub fn quirks(&self) -> &[Quirk] {
        &self.quirks
    }

    /// How many tensors there are.
    pub fn tensor_count(&self) -> usize {
        self.tensors.len()
    }

    /// The tensors in file order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = TensorInfo<'_>> {
        self.tensors.iter().map(|&at| self.tensor_at(at))
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<TensorInfo<'_>> {
        let i = self.tensors_by_name.binary_search_by(|&at| raw(&self.kept, at).cmp(name.as_bytes())).ok()?;
        Some(self.tensor_at(self.tensors_by_name[i]))
    }

    /// The metadata in file order.
    pub fn metadata(&self) -> impl ExactSizeIterator<Item = (&str, Value<'_>)> {
        self.pairs.iter().map(|&at| (text(&self.kept, at), value_at(&self.kept, at)))
    }

    /// The metadata value of that key.
    pub fn value(&self, key: &str) -> Option<Value<'_>> {
        self.value_in(&self.kept, key)
    }

    /// [`Header::value`] for a string.
    pub fn str(&self, key: &str) -> Option<&str> {
        self.value(key)?.as_str()
    }

    /// [`Header::value`] for an integer that is not negative.
    pub fn u64(&self, key: &str) -> Option<u64> {
        self.value(key)?.as_u64()
    }

    pub(super) fn value_in<'a>(&self, kept: &'a [u8], key: &str) -> Option<Value<'a>> {
        let i = self.pairs_by_key.binary_search_by(|&at| raw(kept, at).cmp(key.as_bytes())).ok()?;
        Some(value_at(kept, self.pairs_by_key[i]))
    }

    /// The name, as bytes, of the tensor with that number in file order, which must exist.
    pub(super) fn tensor_name(&self, index: u32) -> &[u8] {
        raw(&self.kept, self.tensors[index as usize])
    }

    /// The tensor with that number in file order, which must exist.
    pub(super) fn tensor_by_index(&self, index: u32) -> TensorInfo<'_> {
        self.tensor_at(self.tensors[index as usize])
    }

    pub(super) fn offset_of(&self, at: u32) -> u64 {
        u64::from(at) + self.file_minus_kept
    }

    fn tensor_at(&self, at: u32) -> TensorInfo<'_> {
        let r = TensorRecord::at(&self.kept, at);
        let span = || self.unknown_spans.binary_search_by_key(&at, |&(at, _)| at).map_or(0, |i| self.unknown_spans[i].1);
        let bytes = r.bytes().unwrap_or_else(span);
        TensorInfo {
            name: r.name,
            ty: r.ty,
            dims: r.dims,
            dim_count: r.dim_count,
            offset: self.data_offset.saturating_add(r.offset),
            bytes,
        }
    }
}

/// The value of the pair at `at`, which was checked.
fn value_at(kept: &[u8], at: u32) -> Value<'_> {
    let from = after_text(kept, at);
    let t = ValueType::from_number(u32_at(kept, from));
    let value = match t {
        Some(ValueType::Array) => array_at(kept, from + 4),
        Some(t) => decode(t, &mut &kept[from + 4..]),
        None => None,
    };
    // Checked while parsing; an empty string is as good as any other answer to a question that is not asked.
    value.unwrap_or(Value::Str(&[]))
}

fn array_at(kept: &[u8], from: usize) -> Option<Value<'_>> {
    let number = u32_at(kept, from);
    let element = ValueType::from_number(number & !NOT_KEPT)?;
    let len = u64_at(kept, from + 4);
    let elements = &kept[from + 12..];
    let bytes = match element.size() {
        _ if number & NOT_KEPT != 0 => None,
        Some(size) => elements.get(..usize::try_from(size.checked_mul(len)?).ok()?),
        None => {
            let mut rest = elements;
            for _ in 0..len {
                decode(element, &mut rest)?;
            }
            elements.get(..elements.len() - rest.len())
        }
    };
    Some(Value::Array(Array { element, len, bytes }))
}
