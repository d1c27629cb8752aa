//! The first 2 MiB of a file that lasts: one block with the commit mark, and the table of what lies behind, as JSON.
//!
//! Owns: the format, and the check of every byte of it before any is believed. Must not know: files.
//!
//! | bytes | |
//! |---|---|
//! | 0..8 | `BERTHARN` |
//! | 8..12 | format, little endian as all numbers |
//! | 12..16 | CRC-32 of the table |
//! | 16..24 | bytes of the table |
//! | 24..32 | bytes of data |
//! | 32..40 | `COMPLETE` |
//! | 40..4092 | 0 |
//! | 4092..4096 | CRC-32 of bytes 0..4092 |
//! | 4096.. | the table, then anything |
//! | 2 MiB.. | the data |

use std::fs::File;
use std::os::unix::fs::FileExt;

use serde::{Deserialize, Serialize};

use super::model::Model;
use super::{Refusal, Why};
use crate::memory::{HUGE_PAGE, round_up};

/// Changed with every change of what stands here.
const FORMAT: u32 = 1;

/// Bytes before the data.
pub const HEADER: usize = HUGE_PAGE;

/// Bytes of the block with the commit mark.
pub(super) const BLOCK: usize = 4096;

const MAGIC: &[u8; 8] = b"BERTHARN";

/// Whether a file begins as those of Berth do. Others are none of its business, whatever their names.
pub(super) fn begins(file: &File) -> bool {
    let mut bytes = [0; MAGIC.len()];
    file.read_exact_at(&mut bytes, 0).is_ok() && bytes == *MAGIC
}
const MARK: &[u8; 8] = b"COMPLETE";

/// One tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Name in the model.
    pub name: String,
    /// First byte in the buffer.
    pub offset: u64,
    /// Number of bytes.
    pub bytes: u64,
    /// The file that they come from: its index in the table.
    pub model: usize,
    /// First byte in that file.
    pub source: u64,
    /// CRC-32 of the bytes.
    pub crc: u32,
}

/// What a file holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Table {
    /// Version of Berth that wrote it.
    pub berth: String,
    /// Bytes of the buffer.
    pub buffer: u64,
    /// Modification time of the file, in seconds since 1970.
    pub written: i64,
    /// The files of the model.
    pub models: Vec<Model>,
    /// The tensors, in the order of their offsets.
    pub tensors: Vec<Entry>,
}

impl Table {
    /// Bytes of data, as a file has them.
    ///
    /// # Errors
    /// If no file has so many.
    pub fn data(&self) -> Result<usize, Refusal> {
        let buffer = usize::try_from(self.buffer).map_err(|_| damaged("its buffer is too large"))?;
        Ok(round_up(buffer, HUGE_PAGE)?)
    }

    /// Whether it makes sense.
    fn check(&self) -> Result<(), Refusal> {
        let mut end = 0;
        for t in &self.tensors {
            let model = self.models.get(t.model).ok_or_else(|| damaged("a tensor of no model"))?;
            let within = |start: u64, size: u64| start.checked_add(t.bytes).is_some_and(|end| end <= size);
            if t.offset < end || t.bytes == 0 || !within(t.offset, self.buffer) || !within(t.source, model.size) {
                return Err(damaged("a tensor lies where none can"));
            }
            end = t.offset + t.bytes;
        }
        if self.tensors.is_empty() { Err(damaged("it has no tensors")) } else { Ok(()) }
    }
}

fn damaged(what: &str) -> Refusal {
    Refusal::new(Why::Damaged, format!("its header is damaged: {what}"))
}

/// The block with the commit mark, and the table.
///
/// # Errors
/// If the table is too long.
pub(super) fn encode(table: &Table) -> Result<(Vec<u8>, Vec<u8>), Refusal> {
    let json = serde_json::to_vec(table).map_err(|e| Refusal::new(Why::Io, e.to_string()))?;
    if json.len() > HEADER - BLOCK {
        return Err(Refusal::new(Why::Limit, format!("a table of {} tensors is too long", table.tensors.len())));
    }
    let mut block = Vec::with_capacity(BLOCK);
    block.extend_from_slice(MAGIC);
    block.extend_from_slice(&FORMAT.to_le_bytes());
    block.extend_from_slice(&crc32fast::hash(&json).to_le_bytes());
    block.extend_from_slice(&(json.len() as u64).to_le_bytes());
    block.extend_from_slice(&(table.data()? as u64).to_le_bytes());
    block.extend_from_slice(MARK);
    block.resize(BLOCK - 4, 0);
    block.extend_from_slice(&crc32fast::hash(&block).to_le_bytes());
    Ok((block, json))
}

/// The table in a file of `size` bytes that begins with `bytes` (as many of [`HEADER`] as it has), written by `berth` in that version.
///
/// # Errors
/// Why it is not trusted.
pub(super) fn decode(bytes: &[u8], size: u64, berth: &str) -> Result<Table, Refusal> {
    let block = bytes.get(..BLOCK).ok_or_else(|| damaged("it is too short"))?;
    let number = |at: usize, len: usize| block[at..at + len].iter().rev().fold(0u64, |n, b| n << 8 | u64::from(*b));
    if block[..8] != *MAGIC {
        return Err(damaged("it does not begin as one of Berth's"));
    }
    if number(8, 4) != u64::from(FORMAT) {
        return Err(Refusal::new(Why::OtherVersion, format!("it has format {}, this Berth writes {FORMAT}", number(8, 4))));
    }
    if u64::from(crc32fast::hash(&block[..BLOCK - 4])) != number(BLOCK - 4, 4) {
        return Err(damaged("the checksum of its first block is wrong"));
    }
    if block[32..40] != *MARK {
        return Err(damaged("it is not complete"));
    }
    let len = usize::try_from(number(16, 8)).ok();
    let json = len.and_then(|len| bytes.get(BLOCK..BLOCK.checked_add(len)?)).ok_or_else(|| damaged("its table is cut off"))?;
    if u64::from(crc32fast::hash(json)) != number(12, 4) {
        return Err(damaged("the checksum of its table is wrong"));
    }
    let table: Table = serde_json::from_slice(json).map_err(|e| damaged(&format!("its table cannot be read: {e}")))?;
    if table.berth != berth {
        return Err(Refusal::new(Why::OtherVersion, format!("it is of Berth {}, this is {berth}", table.berth)));
    }
    table.check()?;
    let data = table.data()? as u64;
    if data != number(24, 8) || data.checked_add(HEADER as u64) != Some(size) {
        return Err(damaged(&format!("the file has {size} bytes")));
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let entry = |name: &str, offset, bytes| Entry { name: name.into(), offset, bytes, model: 0, source: 100 + offset, crc: 7 };
        Table {
            berth: "1.2.3".into(),
            buffer: 3_000_000,
            written: 1_700_000_000,
            models: vec![Model { path: "/m.gguf".into(), size: 10_000_000, ..Model::default() }],
            tensors: vec![entry("a", 0, 1_000_000), entry("b", 1_000_064, 1_999_936)],
        }
    }

    fn encoded(table: &Table) -> (Vec<u8>, u64) {
        let (mut bytes, json) = encode(table).unwrap();
        bytes.extend(json);
        (bytes, (HEADER + table.data().unwrap()) as u64)
    }

    #[test]
    fn what_is_written_is_read() {
        let (bytes, size) = encoded(&table());
        assert_eq!(decode(&bytes, size, "1.2.3"), Ok(table()));
    }

    #[test]
    fn no_byte_of_a_header_can_be_changed_unseen() {
        let (bytes, size) = encoded(&table());
        for at in 0..bytes.len() {
            for change in [1, 0x80, 0xFF] {
                let mut bytes = bytes.clone();
                bytes[at] ^= change;
                let refusal = decode(&bytes, size, "1.2.3").expect_err(&format!("byte {at} ^ {change}"));
                let expected = if (8..12).contains(&at) { Why::OtherVersion } else { Why::Damaged };
                assert_eq!(refusal.why, expected, "byte {at}: {}", refusal.message);
            }
        }
        for len in 0..bytes.len() {
            assert!(decode(&bytes[..len], size, "1.2.3").is_err(), "{len} bytes");
        }
        for size in [0, size - 1, size + 1, u64::MAX] {
            assert_eq!(decode(&bytes, size, "1.2.3").unwrap_err().why, Why::Damaged, "a file of {size} bytes");
        }
    }

    #[test]
    fn a_torn_write_is_found_out() {
        let (bytes, size) = encoded(&table());
        for torn in (0..bytes.len()).step_by(512) {
            let (mut torn_bytes, end) = (bytes.clone(), bytes.len().min(torn + 512));
            torn_bytes[torn..end].fill(0);
            // Most of the first block is 0 anyway.
            assert!(decode(&torn_bytes, size, "1.2.3").is_err() || torn_bytes == bytes, "zeros at {torn}");
        }
    }

    #[test]
    fn another_version_is_told_as_that() {
        let (bytes, size) = encoded(&table());
        let refusal = decode(&bytes, size, "1.2.4").unwrap_err();
        assert_eq!((refusal.why, refusal.message.as_str()), (Why::OtherVersion, "it is of Berth 1.2.3, this is 1.2.4"));
    }

    #[test]
    fn tables_that_make_no_sense_are_refused_whatever_their_checksums_say() {
        let wrong = |change: fn(&mut Table)| {
            let mut table = table();
            change(&mut table);
            let (bytes, size) = encoded(&table);
            assert_eq!(decode(&bytes, size, "1.2.3").unwrap_err().why, Why::Damaged);
        };
        wrong(|t| t.tensors.clear());
        wrong(|t| t.tensors[1].offset = 999_999);
        wrong(|t| t.tensors[1].bytes += 65);
        wrong(|t| t.tensors[1].bytes = 0);
        wrong(|t| t.tensors[0].offset = u64::MAX);
        wrong(|t| t.tensors[0].source = u64::MAX);
        wrong(|t| t.tensors[0].model = 1);
        wrong(|t| t.models[0].size = 1_000_000);
    }

    #[test]
    fn a_table_that_is_too_long_is_not_written() {
        let mut table = table();
        let first = table.tensors[0].clone();
        table.tensors = vec![first; 40_000];
        assert_eq!(encode(&table).unwrap_err().why, Why::Limit);
    }
}
