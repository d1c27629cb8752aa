//! The report that Berth writes to the file named by `BERTH_REPORT`: which buffers there are, what was asked, and what was given.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Deserialize;

/// The whole report. Fields that are not named here are ignored, so that a report may grow.
#[derive(Clone, Debug, Deserialize)]
pub struct Report {
    /// Berth's version.
    pub berth: String,
    /// The hosts it found: usually one; a process may hold several ggml.
    #[serde(default)]
    pub hosts: Vec<Host>,
    /// Whether a fallback is an error (`BERTH_STRICT`).
    #[serde(default)]
    pub strict: bool,
    /// How many buffers got something else than was asked, freed ones included.
    #[serde(default)]
    pub fallbacks: u64,
    /// Bytes that are page-locked now.
    #[serde(default)]
    pub pinned: u64,
    /// How the experts were computed.
    #[serde(default)]
    pub blocks: Blocks,
    /// What was read ahead.
    #[serde(default)]
    pub read_ahead: ReadAhead,
    /// Every buffer, freed ones too.
    pub buffers: Vec<Buffer>,
    /// What a person should know.
    #[serde(default)]
    pub warnings: Vec<Warning>,
}

/// Something that a person should know about a buffer type.
#[derive(Clone, Debug, Deserialize)]
pub struct Warning {
    /// Which one.
    pub code: String,
    /// The buffer type.
    pub asked: String,
    /// How many tensors it is about.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
    /// The first of their names.
    pub first: Vec<String>,
    /// The same in words.
    pub message: String,
}

/// The host as Berth sees it.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Host {
    /// `ggml_version()`.
    #[serde(default)]
    pub ggml_version: String,
    /// The layout of its tables that Berth chose.
    #[serde(default)]
    pub layout: String,
}

/// What was read ahead; bytes and times are sums over the process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct ReadAhead {
    /// `auto`, `off` or `on`.
    pub mode: String,
    /// Calls in which Berth looked for missing experts.
    pub looks: u64,
    /// Experts that were in memory.
    pub expert_hits: u64,
    /// Experts of which some bytes were not.
    pub expert_misses: u64,
    /// Bytes that were looked at.
    pub looked_bytes: u64,
    /// Bytes of them that were missing.
    pub missed_bytes: u64,
    /// Bytes that were asked for.
    pub asked_bytes: u64,
    /// Bytes of them that were read past the page cache.
    pub direct_bytes: u64,
    /// Milliseconds of asking.
    pub ask_ms: u64,
    /// Milliseconds of waiting.
    pub wait_ms: u64,
    /// Major page faults of the process.
    pub major_faults: u64,
    /// Bytes of other weights that were read at the load.
    pub warmed_bytes: u64,
    /// What did not work.
    pub fallbacks: Vec<Fallback>,
}

/// What did not work.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Fallback {
    /// A code.
    pub reason: String,
    /// The same in words.
    pub message: String,
}

/// Blocks of experts that were computed.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Blocks {
    /// As one operation.
    pub fused: u64,
    /// Node by node.
    pub node_by_node: u64,
    /// Operations that Berth never claimed, computed by the host's CPU backend.
    pub unclaimed: u64,
    /// Why, for each reason.
    pub reasons: Vec<NodeByNode>,
}

/// Blocks that were computed node by node for one reason.
#[derive(Clone, Debug, Deserialize)]
pub struct NodeByNode {
    /// The reason, as a code.
    pub reason: String,
    /// How many.
    pub blocks: u64,
    /// Name of a product of the first of them.
    pub first: String,
}

/// One buffer.
#[derive(Clone, Debug, Deserialize)]
pub struct Buffer {
    /// Counts up from 1.
    pub id: u64,
    /// The buffer type that the host asked for.
    pub asked: String,
    /// What it got: `mapped`, `pinned`, `partly_pinned`, `arena`, `pageable`.
    pub got: String,
    /// Why that is not what was asked, as a code.
    #[serde(default)]
    pub reason: Option<String>,
    /// The same in words.
    #[serde(default)]
    pub message: Option<String>,
    /// Its size.
    pub bytes: u64,
    /// Whether it still exists.
    #[serde(default)]
    pub live: bool,
    /// `tensors` or `compute`.
    #[serde(default)]
    pub usage: String,
    /// Page-locked bytes.
    #[serde(default)]
    pub pinned_bytes: u64,
    /// Bytes locked with `mlock`.
    #[serde(default)]
    pub locked_bytes: u64,
    /// The file behind it.
    #[serde(default)]
    pub file: Option<PathBuf>,
    /// How bytes came into it through Berth.
    #[serde(default)]
    pub filled: Filled,
    /// Whether its bytes are kept for the next start.
    #[serde(default)]
    pub lasting: Option<Lasting>,
    /// What lies in it.
    #[serde(default)]
    pub tensors: Vec<Tensor>,
}

/// How bytes came into a buffer. What the host wrote there by itself is not counted.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Filled {
    /// Bytes read from the file.
    pub read: u64,
    /// Those of them read past the page cache.
    pub direct: u64,
    /// Bytes copied from memory.
    pub copied: u64,
    /// Bytes that lay there from an earlier start.
    #[serde(default)]
    pub kept: u64,
    /// Why, for each reason.
    pub reasons: Vec<Copied>,
}

/// Whether the bytes of a buffer are kept for the next start.
#[derive(Clone, Debug, Deserialize)]
pub struct Lasting {
    /// What has become of it: `kept`, `reused`, `rebuilt`, `not_kept` and so on.
    pub state: String,
    /// Why it is not kept, or why an older file was not trusted, as a code.
    pub reason: Option<String>,
    /// The same in words.
    pub message: Option<String>,
    /// The file.
    pub file: Option<PathBuf>,
}

/// What was copied for one reason.
#[derive(Clone, Debug, Deserialize)]
pub struct Copied {
    /// The reason, as a code.
    pub reason: String,
    /// How many bytes.
    pub bytes: u64,
    /// The same in words, if it is a fault.
    #[serde(default)]
    pub message: Option<String>,
}

/// One tensor.
#[derive(Clone, Debug, Deserialize)]
pub struct Tensor {
    /// Its name in the model.
    pub name: String,
    /// Its block format.
    #[serde(rename = "type", default)]
    pub ty: String,
    /// Its size.
    pub bytes: u64,
}

impl Report {
    /// Reads a report.
    pub fn read(path: &Path) -> Result<Report> {
        let text = std::fs::read_to_string(path).with_context(|| format!("no report at {}", path.display()))?;
        Report::parse(&text).with_context(|| path.display().to_string())
    }

    fn parse(text: &str) -> Result<Report> {
        Ok(serde_json::from_str(text)?)
    }

    /// The live buffers of a buffer type that hold something.
    pub fn asked<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Buffer> {
        self.buffers.iter().filter(move |b| b.live && b.asked == name && b.bytes > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_read_and_unknown_fields_do_not_matter() {
        let report = Report::parse(
            r#"{"berth":"0.1.0","hosts":[{"ggml_version":"0.20.0","new":1}],"buffers":[
                {"id":1,"asked":"CUDA_Host","got":"pageable","reason":"no_cuda_driver","message":"m","bytes":123,"live":true,
                 "pinned_bytes":0,"file":null,"tensors":[{"name":"blk.0.ffn_gate_exps.weight","type":"q4_1","bytes":123}]},
                {"id":2,"asked":"CUDA_Host","got":"pageable","bytes":0,"live":true}]}"#,
        )
        .unwrap();
        assert_eq!(report.hosts[0].ggml_version, "0.20.0");
        let asked: Vec<_> = report.asked("CUDA_Host").collect();
        assert_eq!((asked.len(), asked[0].reason.as_deref(), asked[0].tensors[0].ty.as_str()), (1, Some("no_cuda_driver"), "q4_1"));
    }
}
