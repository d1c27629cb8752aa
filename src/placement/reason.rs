//! Why a tensor went where it went.
//!
//! Owns: the reasons, their stable codes and their sentences. Must not know: how a reason is found.

use serde::{Serialize, Serializer};

/// Why a tensor went where it went. The codes are stable: scripts may compare them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Reason {
    /// A rule names a host buffer type of Berth.
    RuleHost,
    /// A rule names `CPU`.
    RuleCpu,
    /// A rule names `CPU`, and stock's CPU backend may interleave the weight.
    RuleCpuRepack,
    /// A rule names `CPU`, and stock prefers the GPU's page-locked type there.
    RuleCpuHost,
    /// The same with mmap: stock then leaves the bytes in the mapping.
    RuleCpuHostMapped,
    /// A rule names `CPU`, and `BERTH_AUTO` takes experts that go there.
    RuleCpuBerth,
    /// A rule names a device.
    RuleDevice,
    /// No rule; the CPU.
    AutoCpu,
    /// No rule; the CPU, whose backend may interleave the weight.
    AutoCpuRepack,
    /// No rule; the CPU, where stock prefers the GPU's page-locked type.
    AutoHost,
    /// The same with mmap: stock then leaves the bytes in the mapping.
    AutoHostMapped,
    /// No rule; `BERTH_AUTO` takes the experts.
    AutoBerth,
    /// No rule; the layer's device.
    AutoDevice,
    /// Rows are read when they are needed; stock asks no rule then.
    Lazy,
    /// Used a second time, elsewhere in the model.
    Duplicated,
    /// In the file and not wanted.
    Skipped,
    /// In the file and never used.
    Unused,
    /// Neither required nor in the file.
    Absent,
    /// The memory asked for could not be had; the bytes stay in the file's mapping.
    FallbackMapped,
    /// The memory asked for could not be had; ordinary memory was taken.
    FallbackPageable,
}

impl Reason {
    /// Every reason, for tables and tests.
    pub const ALL: [Reason; 20] = [
        Reason::RuleHost,
        Reason::RuleCpu,
        Reason::RuleCpuRepack,
        Reason::RuleCpuHost,
        Reason::RuleCpuHostMapped,
        Reason::RuleCpuBerth,
        Reason::RuleDevice,
        Reason::AutoCpu,
        Reason::AutoCpuRepack,
        Reason::AutoHost,
        Reason::AutoHostMapped,
        Reason::AutoBerth,
        Reason::AutoDevice,
        Reason::Lazy,
        Reason::Duplicated,
        Reason::Skipped,
        Reason::Unused,
        Reason::Absent,
        Reason::FallbackMapped,
        Reason::FallbackPageable,
    ];

    /// The stable code.
    pub const fn code(self) -> &'static str {
        match self {
            Reason::RuleHost => "rule_host",
            Reason::RuleCpu => "rule_cpu",
            Reason::RuleCpuRepack => "rule_cpu_repack",
            Reason::RuleCpuHost => "rule_cpu_host",
            Reason::RuleCpuHostMapped => "rule_cpu_host_mapped",
            Reason::RuleCpuBerth => "rule_cpu_berth",
            Reason::RuleDevice => "rule_device",
            Reason::AutoCpu => "auto_cpu",
            Reason::AutoCpuRepack => "auto_cpu_repack",
            Reason::AutoHost => "auto_host",
            Reason::AutoHostMapped => "auto_host_mapped",
            Reason::AutoBerth => "auto_berth",
            Reason::AutoDevice => "auto_device",
            Reason::Lazy => "lazy",
            Reason::Duplicated => "duplicated",
            Reason::Skipped => "skipped",
            Reason::Unused => "unused",
            Reason::Absent => "absent",
            Reason::FallbackMapped => "fallback_mapped",
            Reason::FallbackPageable => "fallback_pageable",
        }
    }

    /// One sentence for a person.
    pub const fn sentence(self) -> &'static str {
        match self {
            Reason::RuleHost => "A rule names this host buffer type, so it is kept, with or without mmap.",
            Reason::RuleCpu => "A rule names CPU.",
            Reason::RuleCpuRepack => "A rule names CPU, and stock's CPU backend may keep an interleaved copy of this format (CPU_REPACK).",
            Reason::RuleCpuHost => "A rule names CPU; without mmap stock prefers the GPU's page-locked memory for what the CPU holds.",
            Reason::RuleCpuHostMapped => "A rule names CPU; with mmap the bytes stay in the file's mapping.",
            Reason::RuleCpuBerth => "A rule names CPU, and BERTH_AUTO takes the experts that go there.",
            Reason::RuleDevice => "A rule names this device.",
            Reason::AutoCpu => "No rule matches; its part of the model is on the CPU.",
            Reason::AutoCpuRepack => {
                "No rule matches; its part of the model is on the CPU, whose backend may keep an interleaved copy of this format (CPU_REPACK)."
            }
            Reason::AutoHost => "No rule matches; without mmap stock prefers the GPU's page-locked memory for what the CPU holds.",
            Reason::AutoHostMapped => {
                "No rule matches; the automatic choice was page-locked memory, but with mmap the bytes are in the mapping already."
            }
            Reason::AutoBerth => "No rule matches; BERTH_AUTO takes the experts.",
            Reason::AutoDevice => "No rule matches; its layer is on this device.",
            Reason::Lazy => "Its rows are read from the file when they are needed; stock asks no rule for such a tensor.",
            Reason::Duplicated => "The same data is used a second time, in another part of the model.",
            Reason::Skipped => "It is in the file, but this loader does not want it.",
            Reason::Unused => "It is in the file, but no graph uses it.",
            Reason::Absent => "It is not in the file, and not required.",
            Reason::FallbackMapped => "The memory asked for could not be had, so the bytes stay in the file's mapping.",
            Reason::FallbackPageable => "The memory asked for could not be had, so ordinary memory was taken.",
        }
    }
}

impl Serialize for Reason {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.code())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn codes_are_unique_and_plain_and_every_reason_has_a_sentence() {
        let codes: HashSet<_> = Reason::ALL.iter().map(|r| r.code()).collect();
        assert_eq!(codes.len(), Reason::ALL.len());
        assert!(codes.iter().all(|c| c.bytes().all(|b| b.is_ascii_lowercase() || b == b'_')));
        assert!(Reason::ALL.iter().all(|r| r.sentence().ends_with('.')));
        assert_eq!(serde_json::to_string(&Reason::RuleHost).unwrap(), r#""rule_host""#);
    }
}
