//! Placement alone: what a test of places sets, and what it demands of the report.

use std::collections::BTreeMap;

use ffi_tests::report::Report;

use crate::common::Scratch;

/// `BERTH_*` for a run in which Berth computes nothing: the host's own kernels run, so that every logit is bit for bit the one without Berth. What
/// the BERTH device computes rounds in another order.
pub(crate) fn placement_only(scratch: &Scratch) -> Vec<(String, String)> {
    let mut environment = scratch.environment();
    environment.push(("BERTH_FUSE".into(), "0".into()));
    environment
}

/// The report must say that these experts, and nothing else, were put into buffers of type `asked`, and that the memory is of that kind.
/// `stderr` must say so too, in one line for each buffer.
pub(crate) fn assert_placed(what: &str, asked: &str, mapped: bool, experts: &BTreeMap<String, u64>, report: &Report, stderr: &str) {
    let mut found = BTreeMap::new();
    for buffer in &report.buffers {
        assert_eq!(buffer.asked, asked, "{what}: a buffer that nobody asked for");
        let got = (buffer.got.as_str(), buffer.reason.as_deref());
        let right = match asked {
            "CPU_MMAP" => got == (if mapped { "mapped" } else { "pageable" }, None),
            "CUDA_Host" => got == ("pinned", None) || got == ("pageable", Some("no_cuda_driver")),
            "ARENA" => got == ("arena", None),
            other => panic!("no type {other}"),
        };
        assert!(right, "{what}: got {got:?} ({:?})", buffer.message);
        assert!(!buffer.live, "{what}: a buffer outlived the model");
        let bytes: u64 = buffer.tensors.iter().map(|t| t.bytes).sum();
        assert!(buffer.bytes >= bytes, "{what}: {bytes} bytes in a buffer of {}", buffer.bytes);
        for tensor in &buffer.tensors {
            assert!(found.insert(tensor.name.clone(), tensor.bytes).is_none(), "{what}: {} lies in two buffers", tensor.name);
        }
    }
    assert_eq!(&found, experts, "{what}: what lies in the buffers, and the experts of the model");
    let said = stderr.lines().filter(|line| line.contains(&format!("berth: {asked}: "))).count();
    assert_eq!(said, report.buffers.len(), "{what}: lines about buffers in\n{stderr}");
}
