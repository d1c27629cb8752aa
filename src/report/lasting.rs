//! Whether the bytes of a buffer are kept for the next start, and why not.
//!
//! Owns: the record of one buffer, and its line in the log. Must not know: how bytes are kept.

use std::path::PathBuf;

use serde::Serialize;

use super::{human, path_or_none};
use crate::log;
use crate::memory::lasting::{Refusal, Why};

/// What has become of it. Codes are stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Nobody has set a tensor yet.
    Waiting,
    /// The file of an earlier start lies behind it; not every tensor has been compared yet.
    Found,
    /// The file of an earlier start lies behind it, and nothing was written.
    Reused,
    /// The tensors come in, to be kept.
    Building,
    /// The next start can use them.
    Kept,
    /// The same, in the place of a file that was not trusted.
    Rebuilt,
    /// They vanish with the process.
    NotKept,
}

/// What is remembered of one buffer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Lasting {
    /// What has become of it.
    pub state: State,
    /// Why it is not kept, or why the file of an earlier start was not trusted.
    pub reason: Option<Why>,
    /// The same in words.
    pub message: Option<String>,
    /// The file.
    #[serde(serialize_with = "path_or_none")]
    pub file: Option<PathBuf>,
}

impl Lasting {
    /// With a reason, or none.
    pub fn new(state: State, reason: Option<Refusal>, file: Option<PathBuf>) -> Lasting {
        let (reason, message) = reason.map_or((None, None), |r| (Some(r.why), Some(r.message)));
        Lasting { state, reason, message, file }
    }

    /// One line, if it is settled.
    pub(super) fn say(&self, asked: &str, bytes: usize) {
        let size = format!("{bytes} bytes ({})", human(bytes));
        let file = self.file.as_ref().map_or(String::new(), |f| f.display().to_string());
        let why = self.message.as_deref().unwrap_or("?");
        match self.state {
            State::Waiting | State::Found | State::Building => {}
            State::Reused => log::info!("{asked}: {size} reused from {file}; nothing was copied"),
            State::Kept => log::info!("{asked}: {size} kept for the next start in {file}"),
            State::Rebuilt => log::warning!("{asked}: {size} built anew and kept in {file}, because {why}"),
            State::NotKept => log::warning!("{asked}: {size} are not kept for the next start: {why}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_stable() {
        let refusal = Refusal::new(Why::ModelChanged, "in words");
        let record = Lasting::new(State::Rebuilt, Some(refusal), Some("/a/x.arena".into()));
        let expected = serde_json::json!({"state": "rebuilt", "reason": "model_changed", "message": "in words", "file": "/a/x.arena"});
        assert_eq!(serde_json::to_value(record).unwrap(), expected);
        let states = [State::Waiting, State::Found, State::Reused, State::Building, State::Kept, State::NotKept];
        let expected = serde_json::json!(["waiting", "found", "reused", "building", "kept", "not_kept"]);
        assert_eq!(serde_json::to_value(states).unwrap(), expected);
    }
}
