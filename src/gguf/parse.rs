//! From bytes to a checked [`Header`].
//!
//! Owns: the order of the fields and every check of one file. Must not know: split files, what a key or a tensor means.
//!
//! The descriptions are kept as they stand in the file, in one block of bytes, with tables of 32-bit positions into it. So memory stays below
//! the header's own size, and no allocation can be larger than the file, whatever the counts say.

use std::io::{Read, Seek};

use super::error::{Error, ErrorKind, TextFault};
use super::header::{Header, Quirk, TensorRecord};
use super::source::Source;
use super::types::GgmlType;
use super::value::ValueType;

/// No header is larger. Real ones reach about 20 MiB (a vocabulary of 256,000 tokens with merges). Positions are 32-bit because of it.
pub const MAX_HEADER_BYTES: u64 = 1 << 30;

/// No tensor name is longer. Stock stops at 63; engines that raise `GGML_MAX_NAME` go to 160.
pub const MAX_NAME_BYTES: u64 = 1024;

/// Keys have at most this many bytes by the format's own text.
const MAX_KEY_BYTES: u64 = 65_535;

/// Arrays are kept up to this size. Per-layer settings are far below, vocabularies far above.
const KEEP_ARRAY_BYTES: u64 = 64 << 10;

/// Marks, in our copy of the bytes, an array whose elements were not kept. No value type has this bit.
pub(super) const NOT_KEPT: u32 = 1 << 31;

/// The names of stock must be shorter (`GGML_MAX_NAME`).
const STOCK_NAME_BYTES: u64 = 64;

/// The smallest descriptions: an empty key with a one-byte value; an empty name without dimensions.
const SMALLEST_PAIR: u64 = 8 + 4 + 1;
const SMALLEST_TENSOR: u64 = 8 + 4 + 4 + 8;

/// Reads and checks the header at the front of `inner`.
pub(super) fn parse<R: Read + Seek>(inner: R) -> Result<Header, Error> {
    let mut p = Parser { source: Source::new(inner)?, kept: Vec::new() };
    let (version, tensor_count, pair_count) = p.counts()?;
    let mut quirks = Vec::new();

    let pairs = p.pairs(pair_count)?;
    let pairs_by_key = sorted(&pairs, |at| raw(&p.kept, at));
    if let Some(at) = twice(&pairs_by_key, |at| raw(&p.kept, at)) {
        return Err(Error::new(p.source.at(), ErrorKind::DuplicateKey(text(&p.kept, at).to_owned())));
    }
    let mut header = Header { version, file_len: p.source.len(), pairs, pairs_by_key, ..Header::default() };
    header.alignment = alignment(&p.kept, &header, p.source.at())?;
    if !header.alignment.is_power_of_two() {
        quirks.push(Quirk::Alignment(header.alignment));
    }

    header.file_minus_kept = p.source.at() - p.kept.len() as u64;
    header.tensors = p.tensors(tensor_count, &mut quirks)?;
    header.data_offset = pad(p.source.at(), header.alignment.into()).ok_or_else(|| Error::new(p.source.at(), ErrorKind::Alignment))?;
    header.kept = p.kept;
    header.kept.shrink_to_fit();
    header.tensors_by_name = sorted(&header.tensors, |at| raw(&header.kept, at));
    if let Some(at) = twice(&header.tensors_by_name, |at| raw(&header.kept, at)) {
        return Err(Error::new(header.offset_of(at), ErrorKind::DuplicateTensor(text(&header.kept, at).to_owned())));
    }
    place(&mut header, &mut quirks)?;
    header.quirks = quirks;
    Ok(header)
}

struct Parser<R> {
    source: Source<R>,
    /// Everything read so far that is kept.
    kept: Vec<u8>,
}

impl<R: Read + Seek> Parser<R> {
    fn counts(&mut self) -> Result<(u32, u64, u64), Error> {
        let mut magic = [0; 4];
        self.source.read(&mut magic, "the magic")?;
        if &magic != b"GGUF" {
            return Err(Error::new(0, ErrorKind::NotGguf(magic)));
        }
        let mut number = [0; 4];
        self.source.read(&mut number, "the version")?;
        let version = u32::from_le_bytes(number);
        match version {
            2 | 3 => {}
            _ if version & 0xffff == 0 && version != 0 => return Err(Error::new(4, ErrorKind::BigEndian)),
            _ => return Err(Error::new(4, ErrorKind::Version(version))),
        }
        let mut counts = [0; 16];
        self.source.read(&mut counts, "the counts")?;
        let [tensors, pairs] = [0, 8].map(|at| u64_at(&counts, at));
        self.check_count(pairs, "metadata pairs", SMALLEST_PAIR, 16)?;
        self.check_count(tensors, "tensors", SMALLEST_TENSOR, 8)?;
        Ok((version, tensors, pairs))
    }

    fn check_count(&self, count: u64, what: &'static str, smallest: u64, offset: u64) -> Result<(), Error> {
        let most = self.source.left().min(MAX_HEADER_BYTES) / smallest;
        if count <= most { Ok(()) } else { Err(Error::new(offset, ErrorKind::Count { what, count, most })) }
    }

    fn pairs(&mut self, count: u64) -> Result<Vec<u32>, Error> {
        let mut starts = table(count)?;
        for _ in 0..count {
            let start = self.kept.len();
            let from = self.source.at();
            self.text("a metadata key", "key", MAX_KEY_BYTES)?;
            starts.push(start as u32);
            let unusable = |p: &Self, number| ErrorKind::ValueType { key: text(&p.kept, start as u32).to_owned(), number };
            let number = self.u32("a value type")?;
            match ValueType::from_number(number) {
                Some(ValueType::Array) => self.array().map_err(|number| match number {
                    ArrayFault::Element(number) => Error::new(from, unusable(self, number)),
                    ArrayFault::Other(e) => e,
                })?,
                Some(ValueType::Str) => {
                    let len = self.u64("a string's length")?;
                    self.keep(len, "a string")?;
                }
                Some(fixed) => self.keep(fixed.size().unwrap_or_default(), "a metadata value")?,
                None => return Err(Error::new(from, unusable(self, number))),
            }
        }
        Ok(starts)
    }

    /// Reads an array; leaves its elements out of `kept` if they are large.
    fn array(&mut self) -> Result<(), ArrayFault> {
        let mark = self.kept.len();
        let number = self.u32("an array's element type")?;
        let len = self.u64("an array's length")?;
        let elements = self.kept.len();
        let small = match ValueType::from_number(number) {
            Some(ValueType::Str) => {
                self.source.check(len.saturating_mul(8), "an array of strings")?;
                let mut small = true;
                for _ in 0..len {
                    let bytes = self.u64("a string's length")?;
                    if !small {
                        self.kept.truncate(elements);
                        self.skip(bytes, "a string in an array")?;
                        continue;
                    }
                    small = (self.kept.len() - elements) as u64 + bytes.min(MAX_HEADER_BYTES) <= KEEP_ARRAY_BYTES;
                    if small { self.keep(bytes, "a string in an array")? } else { self.skip(bytes, "a string in an array")? }
                }
                small
            }
            Some(t) => {
                let Some(bytes) = t.size().map(|size| size.saturating_mul(len)) else { return Err(ArrayFault::Element(number)) };
                let small = bytes <= KEEP_ARRAY_BYTES;
                if small {
                    self.keep(bytes, "an array")?
                } else {
                    self.skip(bytes, "an array")?
                }
                small
            }
            None => return Err(ArrayFault::Element(number)),
        };
        if !small {
            self.kept.truncate(elements);
            self.kept[mark..mark + 4].copy_from_slice(&(number | NOT_KEPT).to_le_bytes());
        }
        Ok(())
    }

    fn tensors(&mut self, count: u64, quirks: &mut Vec<Quirk>) -> Result<Vec<u32>, Error> {
        let mut starts = table(count)?;
        for _ in 0..count {
            let start = self.kept.len() as u32;
            let from = self.source.at();
            let fault = |kind| Error::new(from, kind);
            let name_bytes = self.text("a tensor name", "tensor name", MAX_NAME_BYTES)?;
            starts.push(start);
            let dims = self.u32("a tensor's dimensions")?;
            if dims > 4 {
                return Err(fault(ErrorKind::Dimensions { tensor: text(&self.kept, start).to_owned(), count: dims }));
            }
            self.keep(u64::from(dims) * 8 + 4 + 8, "a tensor's description")?;
            let record = TensorRecord::at(&self.kept, start);
            let name = || record.name.to_owned();
            if name_bytes >= STOCK_NAME_BYTES {
                once(quirks, Quirk::LongName(name()));
            }
            if record.ty.is_removed() {
                return Err(fault(ErrorKind::RemovedType { tensor: name(), number: record.ty.0 }));
            }
            let elements = elements(record.dims).ok_or_else(|| fault(ErrorKind::ShapeOverflow(name())))?;
            match record.ty.info() {
                Some(info) if !record.dims[0].is_multiple_of(info.block_elements) => {
                    let (row, block) = (record.dims[0], info.block_elements);
                    return Err(fault(ErrorKind::PartialBlock { tensor: name(), row, block }));
                }
                Some(info) => {
                    let bytes = (elements / info.block_elements).checked_mul(info.block_bytes);
                    if bytes.is_none_or(|bytes| i64::try_from(bytes).is_err()) {
                        return Err(fault(ErrorKind::ShapeOverflow(name())));
                    }
                }
                None => once(quirks, Quirk::UnknownType { tensor: name(), ty: record.ty }),
            }
        }
        Ok(starts)
    }

    /// Reads a length and a text of at most `most` bytes that must be usable as a name. Gives the text's length.
    fn text(&mut self, reading: &'static str, what: &'static str, most: u64) -> Result<u64, Error> {
        let from = self.source.at();
        let len = self.u64(reading)?;
        self.source.check(len, reading)?;
        let fault = |text, fault| Error::new(from, ErrorKind::Text { what, text, fault });
        if len > most {
            return Err(fault(String::new(), TextFault::TooLong { bytes: len, most }));
        }
        let start = self.kept.len();
        self.keep(len, reading)?;
        let bytes = &self.kept[start..];
        match std::str::from_utf8(bytes) {
            Err(_) => Err(fault(String::from_utf8_lossy(bytes).into_owned(), TextFault::NotUtf8)),
            Ok("") => Err(fault(String::new(), TextFault::Empty)),
            Ok(t) if t.chars().any(char::is_control) => Err(fault(t.to_owned(), TextFault::Control)),
            Ok(_) => Ok(len),
        }
    }

    fn u32(&mut self, what: &'static str) -> Result<u32, Error> {
        self.keep(4, what)?;
        Ok(u32_at(&self.kept, self.kept.len() - 4))
    }

    fn u64(&mut self, what: &'static str) -> Result<u64, Error> {
        self.keep(8, what)?;
        Ok(u64_at(&self.kept, self.kept.len() - 8))
    }

    /// Reads `n` bytes onto the end of `kept`.
    fn keep(&mut self, n: u64, what: &'static str) -> Result<(), Error> {
        self.source.check(n, what)?;
        self.check_size(n)?;
        let (old, n) = (self.kept.len(), n as usize);
        if self.kept.capacity() - old < n {
            // Doubling, but never above the file's size.
            let most = usize::try_from(self.source.len()).unwrap_or(usize::MAX);
            let to = (old + n).max(self.kept.capacity().saturating_mul(2).min(most)).max(64.min(most));
            self.kept.try_reserve_exact(to - old).map_err(|_| Error::new(self.source.at(), ErrorKind::NoMemory(to as u64)))?;
        }
        self.kept.resize(old + n, 0);
        self.source.read(&mut self.kept[old..], what)
    }

    fn skip(&mut self, n: u64, what: &'static str) -> Result<(), Error> {
        self.source.check(n, what)?;
        self.check_size(n)?;
        self.source.skip(n, what)
    }

    fn check_size(&self, more: u64) -> Result<(), Error> {
        if self.source.at() + more <= MAX_HEADER_BYTES { Ok(()) } else { Err(Error::new(self.source.at(), ErrorKind::HeaderTooLarge)) }
    }
}

enum ArrayFault {
    Element(u32),
    Other(Error),
}

impl From<Error> for ArrayFault {
    fn from(e: Error) -> ArrayFault {
        ArrayFault::Other(e)
    }
}

/// An empty table for `count` positions. `count` was compared with the file's size.
fn table(count: u64) -> Result<Vec<u32>, Error> {
    let mut t = Vec::new();
    t.try_reserve_exact(count as usize).map_err(|_| Error::new(0, ErrorKind::NoMemory(count * 4)))?;
    Ok(t)
}

fn sorted<'a>(starts: &[u32], text: impl Fn(u32) -> &'a [u8]) -> Vec<u32> {
    let mut by_text = starts.to_vec();
    by_text.sort_unstable_by(|&a, &b| text(a).cmp(text(b)));
    by_text
}

fn twice<'a>(by_text: &[u32], text: impl Fn(u32) -> &'a [u8]) -> Option<u32> {
    by_text.windows(2).find(|w| text(w[0]) == text(w[1])).map(|w| w[1])
}

fn once(quirks: &mut Vec<Quirk>, quirk: Quirk) {
    if !quirks.iter().any(|q| std::mem::discriminant(q) == std::mem::discriminant(&quirk)) {
        quirks.push(quirk);
    }
}

fn alignment(kept: &[u8], header: &Header, at: u64) -> Result<u32, Error> {
    match header.value_in(kept, "general.alignment") {
        None => Ok(32),
        Some(super::Value::U32(n)) if n > 0 => Ok(n),
        Some(_) => Err(Error::new(at, ErrorKind::Alignment)),
    }
}

/// The next multiple of `alignment`, which need not be a power of two.
fn pad(n: u64, alignment: u64) -> Option<u64> {
    n.div_ceil(alignment).checked_mul(alignment)
}

/// Elements of that shape. A zero must not hide an overflow of the other dimensions.
fn elements(dims: [u64; 4]) -> Option<u64> {
    let product = dims.iter().try_fold(1u64, |product, &d| product.checked_mul(d.max(1)))?;
    i64::try_from(product).ok()?;
    Some(if dims.contains(&0) { 0 } else { product })
}

/// Checks that every tensor lies in the file and shares no byte with another, and finds the spans of unknown formats.
fn place(header: &mut Header, quirks: &mut Vec<Quirk>) -> Result<(), Error> {
    let record = |at: u32| TensorRecord::at(&header.kept, at);
    let mut order = header.tensors.clone();
    if !order.is_sorted_by_key(|&at| record(at).offset) {
        order.sort_by_key(|&at| record(at).offset);
    }
    let mut unknown = Vec::new();
    let mut before: Option<(u32, u64)> = None;
    let mut next = 0;
    for (i, &at) in order.iter().enumerate() {
        let t = record(at);
        let room = header.file_len.saturating_sub(header.data_offset);
        let bytes = t.bytes().unwrap_or_else(|| {
            // The size of an unknown format is what lies between it and the next tensor that starts elsewhere.
            next = next.max(i + 1);
            while next < order.len() && record(order[next]).offset <= t.offset {
                next += 1;
            }
            let span = order.get(next).map_or(room, |&n| record(n).offset).saturating_sub(t.offset);
            unknown.push((at, span));
            span
        });
        let end = t.offset.checked_add(bytes);
        if end.is_none_or(|end| end > room) && (bytes > 0 || t.ty.info().is_none()) {
            let end = end.and_then(|end| end.checked_add(header.data_offset));
            let kind = ErrorKind::BeyondFile { tensor: t.name.to_owned(), end, len: header.file_len };
            return Err(Error::new(header.offset_of(at), kind));
        }
        if bytes == 0 {
            continue;
        }
        if let Some((first, first_end)) = before
            && t.offset < first_end
        {
            let kind = ErrorKind::Overlap { first: record(first).name.to_owned(), second: t.name.to_owned() };
            return Err(Error::new(header.offset_of(at), kind));
        }
        before = Some((at, t.offset.saturating_add(bytes)));
    }
    unknown.sort_unstable();
    stock_layout(header, &unknown, quirks);
    header.unknown_spans = unknown;
    Ok(())
}

/// Stock wants each tensor to start exactly where the one before it ends, padded.
fn stock_layout(header: &Header, unknown: &[(u32, u64)], quirks: &mut Vec<Quirk>) {
    let alignment = u64::from(header.alignment);
    let mut expected = Some(0);
    for &at in &header.tensors {
        let t = TensorRecord::at(&header.kept, at);
        if !t.offset.is_multiple_of(alignment) {
            once(quirks, Quirk::Misaligned(t.name.to_owned()));
        }
        let start = header.data_offset.checked_add(t.offset);
        if t.bytes() == Some(0) && start.is_none_or(|start| start > header.file_len) {
            once(quirks, Quirk::EmptyBeyondFile(t.name.to_owned()));
        }
        if unknown.is_empty() && expected != Some(t.offset) {
            once(quirks, Quirk::NotContiguous(t.name.to_owned()));
        }
        expected = t.bytes().and_then(|b| pad(b, alignment)).and_then(|b| expected?.checked_add(b));
    }
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap_or_default())
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap_or_default())
}

/// The bytes of the text that starts, with its length, at `at`.
pub(super) fn raw(kept: &[u8], at: u32) -> &[u8] {
    let from = at as usize + 8;
    &kept[from..from + u64_at(kept, at as usize) as usize]
}

/// The same as text; it was checked.
pub(super) fn text(kept: &[u8], at: u32) -> &str {
    std::str::from_utf8(raw(kept, at)).unwrap_or_default()
}

/// Where the bytes behind that text start.
pub(super) fn after_text(kept: &[u8], at: u32) -> usize {
    at as usize + 8 + u64_at(kept, at as usize) as usize
}

impl GgmlType {
    /// Bytes of a tensor of this format and shape; `None` if the format is unknown, a row is no whole number of blocks, or the product is too
    /// large.
    pub fn bytes_of(self, dims: [u64; 4]) -> Option<u64> {
        let info = self.info().filter(|info| dims[0].is_multiple_of(info.block_elements))?;
        (elements(dims)? / info.block_elements).checked_mul(info.block_bytes)
    }
}
