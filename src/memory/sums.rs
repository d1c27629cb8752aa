//! Checksums of what is written to an arena, taken while the bytes are at hand.
//!
//! Owns: which parts were written, and the CRC-32 of each, which the parts of a range give together: a fill writes them in any order, from several
//! threads. A CRC-32 finds every damage of up to 32 bits in a row for sure. Must not know: tensors, what the checksums are for.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

use crc32fast::Hasher;

use crate::error::{Error, Result};

/// Bytes of one read.
const READ: usize = 4 << 20;

/// What is known of one arena.
#[derive(Default)]
pub(super) struct Sums {
    /// By offset: length and checksum.
    parts: Mutex<BTreeMap<usize, (usize, Hasher)>>,
}

impl Sums {
    /// These bytes were written at `offset`.
    pub(super) fn add(&self, offset: usize, bytes: &[u8]) {
        let mut hasher = Hasher::new();
        hasher.update(bytes);
        self.parts.lock().unwrap_or_else(PoisonError::into_inner).insert(offset, (bytes.len(), hasher));
    }

    /// Something was written of which no checksum was taken: nothing is known any more.
    pub(super) fn forget(&self) {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// The checksum of a range, if parts that were written are just that range.
    pub(super) fn of(&self, offset: usize, len: usize) -> Option<u32> {
        let parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut at, end, mut whole) = (offset, offset.checked_add(len)?, Hasher::new());
        for (start, (bytes, hasher)) in parts.range(offset..end) {
            if *start != at {
                return None;
            }
            whole.combine(hasher);
            at += bytes;
        }
        (at == end).then(|| whole.finalize())
    }
}

/// The checksum of a part of a file.
///
/// # Errors
/// [`crate::error::Status::Io`] if it cannot be read or ends too early.
pub(super) fn of_file(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Result<u32> {
    let failed = |e: std::io::Error| Error::os(format_args!("read {len} bytes at {offset} of a file"), &e);
    let file = std::fs::File::from(fd.try_clone_to_owned().map_err(failed)?);
    let mut buffer = vec![0; READ.min(usize::try_from(len).unwrap_or(READ))];
    let (mut hasher, mut at) = (Hasher::new(), 0);
    while at < len {
        let part = &mut buffer[..READ.min(usize::try_from(len - at).unwrap_or(READ))];
        file.read_exact_at(part, offset.saturating_add(at)).map_err(failed)?;
        hasher.update(part);
        at += part.len() as u64;
    }
    Ok(hasher.finalize())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::testing::{Sample, random};
    use std::os::fd::AsFd;

    #[test]
    fn parts_in_any_order_give_the_checksum_of_the_whole() {
        let bytes = random(10_000, 5);
        let sums = Sums::default();
        for part in [4000..9000, 0..1, 1..4000, 9000..10_000] {
            sums.add(100 + part.start, &bytes[part]);
        }
        assert_eq!(sums.of(100, 10_000), Some(crc32fast::hash(&bytes)));
        assert_eq!(sums.of(101, 3999), Some(crc32fast::hash(&bytes[1..4000])));
        for (offset, len) in [(99, 10_001), (100, 10_001), (102, 10), (100, 3999), (usize::MAX, 2)] {
            assert_eq!(sums.of(offset, len), None, "{len} at {offset}");
        }
        sums.forget();
        assert_eq!(sums.of(100, 10_000), None);
    }

    #[test]
    fn a_file_gives_the_same_checksum() {
        let sample = Sample::new("sums", READ + 12_345);
        let file = sample.open();
        assert_eq!(of_file(file.as_fd(), 0, sample.bytes.len() as u64), Ok(crc32fast::hash(&sample.bytes)));
        assert_eq!(of_file(file.as_fd(), 7, 1000), Ok(crc32fast::hash(&sample.bytes[7..1007])));
        assert!(of_file(file.as_fd(), 7, sample.bytes.len() as u64).is_err());
    }
}
