//! The three verbs of a `void *context`: into C, borrowed from C, taken back from C.

use std::ffi::c_void;

/// Gives a value to C. It lives until [`from_foreign`].
pub fn into_foreign<T: Send + Sync>(value: T) -> *mut c_void {
    Box::into_raw(Box::new(value)).cast()
}

/// Looks at a value that C holds.
///
/// # Safety
/// `context` must come from [`into_foreign`] with the same `T`, and must not be taken back while the reference lives.
pub unsafe fn borrow<'a, T: Send + Sync>(context: *mut c_void) -> &'a T {
    // SAFETY: the caller passes a pointer to a live `T` made by `into_foreign`.
    unsafe { &*context.cast::<T>() }
}

/// Takes a value back from C.
///
/// # Safety
/// `context` must come from [`into_foreign`] with the same `T`, must not have been taken back, and no borrow of it may be alive.
pub unsafe fn from_foreign<T: Send + Sync>(context: *mut c_void) -> T {
    // SAFETY: by the caller's promise this is the one owner of a box made by `into_foreign`.
    unsafe { *Box::from_raw(context.cast::<T>()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_value_survives_the_round_trip_and_is_dropped_once() {
        let value = Arc::new(5);
        let foreign = into_foreign(value.clone());
        assert_eq!(Arc::strong_count(&value), 2);
        // SAFETY: made above with the same type, not taken back yet.
        assert_eq!(**unsafe { borrow::<Arc<i32>>(foreign) }, 5);
        // SAFETY: made above, taken back once, the borrow has ended.
        drop(unsafe { from_foreign::<Arc<i32>>(foreign) });
        assert_eq!(Arc::strong_count(&value), 1);
    }
}
