//! Long runs.

/// Whether everything is to run, however long it takes.
pub(crate) fn full() -> bool {
    std::env::var("BERTH_FULL").is_ok_and(|v| v == "1")
}
