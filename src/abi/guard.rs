//! The boundary: no panic crosses from Rust into C.
//!
//! Every `extern "C"` body of this crate is one call of [`guard`]; `tests/house.rs` counts them.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `body`; if it panics, logs that once per panic with the name of the function and returns `fallback`.
pub fn guard<T>(function: &str, fallback: T, body: impl FnOnce() -> T) -> T {
    // Unwind safety: state that a panic may leave half-changed is behind locks whose poison is ignored on purpose, and each is valid after
    // every single step.
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        // The log itself may be what panicked.
        let _ = catch_unwind(AssertUnwindSafe(|| {
            crate::log::error!("defect in {function}: {}; please report it", text.unwrap_or("no message"));
        }));
        // A panic payload with a panicking destructor must not get out either.
        std::mem::forget(panic);
        fallback
    })
}

#[cfg(test)]
mod tests {
    use super::guard;

    #[test]
    fn a_panic_becomes_the_fallback() {
        assert_eq!(guard("f", 7, || 3), 3);
        assert_eq!(guard("f", 7, || panic!("boom")), 7);
    }
}
