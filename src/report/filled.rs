//! How bytes came into a buffer: read from their file, or copied, and why.
//!
//! Owns: the counts of one buffer. Must not know: how either is done.

use serde::Serialize;

/// Why bytes were copied and not read from their file. Codes are stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Copied {
    /// `BERTH_FILL=copy`.
    SwitchedOff,
    /// Too few to be worth a look at where they come from.
    Small,
    /// They do not come from a file: the host has read them already.
    NoFile,
    /// They come from a mapping that may differ from its file.
    ChangeableMapping,
    /// The file behind the mapping cannot be opened any more, or another one has its name.
    FileGone,
    /// The file could not be read.
    ReadFailed,
    /// The file has become shorter than its mapping. What it has lost is zeros now.
    FileTruncated,
}

/// One way of bytes into a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum How {
    /// Read from the file.
    Read {
        /// All of them.
        bytes: u64,
        /// Those read past the page cache.
        direct: u64,
    },
    /// Neither: they lie there from an earlier start.
    Kept {
        /// How many.
        bytes: u64,
    },
    /// Copied from memory.
    Copied {
        /// Why.
        reason: Copied,
        /// How many.
        bytes: u64,
        /// The reason in words, if it is a fault of the file.
        message: Option<String>,
    },
}

/// What was copied for one reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Count {
    reason: Copied,
    bytes: u64,
    /// The first of them, in words.
    message: Option<String>,
}

/// What is remembered of one buffer. What the host wrote into it by itself is not known here.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Filled {
    /// Bytes read from the file.
    read: u64,
    /// Those of them that were read past the page cache.
    direct: u64,
    /// Bytes copied from memory.
    copied: u64,
    /// Bytes that lay there from an earlier start. Absent where nothing lasts.
    #[serde(skip_serializing_if = "is_zero")]
    kept: u64,
    reasons: Vec<Count>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
fn is_zero(n: &u64) -> bool {
    *n == 0
}

impl Filled {
    /// Counts one more.
    pub(super) fn add(&mut self, how: How) {
        match how {
            How::Read { bytes, direct } => {
                self.read += bytes;
                self.direct += direct;
            }
            How::Kept { bytes } => self.kept += bytes,
            How::Copied { reason, bytes, message } => {
                self.copied += bytes;
                match self.reasons.iter_mut().find(|c| c.reason == reason) {
                    Some(count) => count.bytes += bytes,
                    None => self.reasons.push(Count { reason, bytes, message }),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_counted_by_reason_and_the_first_words_are_kept() {
        let mut filled = Filled::default();
        filled.add(How::Read { bytes: 10, direct: 4 });
        for (reason, bytes, message) in [
            (Copied::Small, 1, None),
            (Copied::FileGone, 20, Some("first")),
            (Copied::FileGone, 2, Some("second")),
            (Copied::Small, 3, None),
        ] {
            filled.add(How::Copied { reason, bytes, message: message.map(Into::into) });
        }
        let expected = serde_json::json!({
            "read": 10, "direct": 4, "copied": 26, "reasons": [
                {"reason": "small", "bytes": 4, "message": null}, {"reason": "file_gone", "bytes": 22, "message": "first"},
            ],
        });
        assert_eq!(serde_json::to_value(&filled).unwrap(), expected);
    }
}
