//! What comes from C: strings, arrays, and structs whose size says how much of them the caller knows.
//!
//! Every struct that crosses the boundary starts with `size_t struct_size`. A caller built with an older header has a shorter struct: what it
//! does not know is taken as zero on the way in, and not written on the way out.

use std::ffi::{CStr, c_char};
use std::mem::{size_of, zeroed};

use crate::error::{Error, Result};

/// A struct that starts with `struct_size: usize`, all of whose bytes may be zero.
///
/// # Safety
/// The implementor must be `repr(C)`, begin with that field, and be valid when it is all zeros and when any suffix of it is.
pub(super) unsafe trait Versioned: Copy {
    /// Name in C, for messages.
    const NAME: &'static str;
    /// Where its fields begin: [`offsets`]. A caller's struct may end there.
    const FIELDS: &'static [usize];
}

/// The offsets of all fields after `struct_size`. One that is left out does not compile.
macro_rules! offsets {
    ($name:ident, $($field:ident),+) => {{
        const _: fn($name) = |$name { struct_size: _, $($field: _),+ }| ();
        &[$(std::mem::offset_of!($name, $field)),+]
    }};
}
pub(super) use offsets;

/// Reads a struct of the caller.
///
/// # Safety
/// `pointer` must be NULL, which is an error, or point at as many bytes as its first field says.
pub(super) unsafe fn get<T: Versioned>(pointer: *const T) -> Result<T> {
    let size = check(pointer)?;
    // SAFETY: all zeros are valid by the trait's promise.
    let mut value: T = unsafe { zeroed() };
    // SAFETY: `size` bytes are readable by the caller's promise, and are no more than the struct has.
    unsafe { std::ptr::copy_nonoverlapping(pointer.cast::<u8>(), (&raw mut value).cast::<u8>(), size) };
    Ok(value)
}

/// Writes a struct of the caller, leaving its `struct_size` as it is.
///
/// # Safety
/// `pointer` must be NULL, which is an error, or point at as many writable bytes as its first field says.
pub(super) unsafe fn put<T: Versioned>(pointer: *mut T, value: T) -> Result<()> {
    let size = check(pointer)?;
    let skip = size_of::<usize>();
    let from = (&raw const value).cast::<u8>();
    // SAFETY: `size` bytes are writable by the caller's promise, and are no more than the struct has.
    unsafe { std::ptr::copy_nonoverlapping(from.add(skip), pointer.cast::<u8>().add(skip), size - skip) };
    Ok(())
}

/// How many bytes of the struct caller and library both know.
fn check<T: Versioned>(pointer: *const T) -> Result<usize> {
    if pointer.is_null() {
        return Err(Error::invalid(format!("struct {}: NULL", T::NAME)));
    }
    if !pointer.is_aligned() {
        return Err(Error::invalid(format!("struct {}: misaligned", T::NAME)));
    }
    // SAFETY: not NULL and aligned; the first field is readable by the promise of both callers.
    let size = unsafe { *pointer.cast::<usize>() };
    if size < size_of::<usize>() * 2 {
        return Err(Error::invalid(format!("struct {}: struct_size is {size}; set it to sizeof(struct {})", T::NAME, T::NAME)));
    }
    let whole = if size < size_of::<T>() { T::FIELDS.contains(&size) } else { size.is_multiple_of(align_of::<T>()) };
    if !whole {
        let (name, known) = (T::NAME, size_of::<T>());
        return Err(Error::invalid(format!(
            "struct {name}: struct_size is {size}, which ends inside a field; set it to sizeof(struct {name}), here {known}"
        )));
    }
    Ok(size.min(size_of::<T>()))
}

/// A string of the caller.
///
/// # Safety
/// `text` must be NULL, which is an error, or NUL-terminated.
pub(super) unsafe fn text<'a>(text: *const c_char, what: &str) -> Result<&'a str> {
    if text.is_null() {
        return Err(Error::invalid(format!("{what} is NULL")));
    }
    // SAFETY: by the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| Error::invalid(format!("{what} is not UTF-8")))
}

/// An array of the caller.
///
/// # Safety
/// `items` must point at `count` items, or be NULL, which is an error unless `count` is 0.
pub(super) unsafe fn array<'a, T>(items: *const T, count: usize, what: &str) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    if items.is_null() {
        return Err(Error::invalid(format!("{what}: NULL, for {count} items")));
    }
    if !items.is_aligned() {
        return Err(Error::invalid(format!("{what}: not aligned to {} bytes", align_of::<T>())));
    }
    let bytes = count.checked_mul(size_of::<T>()).filter(|n| isize::try_from(*n).is_ok());
    if bytes.and_then(|n| items.addr().checked_add(n)).is_none() {
        return Err(Error::invalid(format!("{what}: {count} items at {items:p} reach beyond the end of memory")));
    }
    // SAFETY: by the caller's promise; the total size was checked.
    Ok(unsafe { std::slice::from_raw_parts(items, count) })
}

/// A handle of the caller.
///
/// # Safety
/// `handle` must be NULL, which is an error, or valid and not in use elsewhere.
pub(super) unsafe fn handle<'a, T>(handle: *mut T, what: &str) -> Result<&'a mut T> {
    if handle.is_null() {
        return Err(Error::invalid(format!("{what} is NULL")));
    }
    // SAFETY: by the caller's promise.
    Ok(unsafe { &mut *handle })
}

/// Writes an output.
///
/// # Safety
/// `out` must be NULL, which is an error, or writable.
pub(super) unsafe fn output<T>(out: *mut T, what: &str, value: impl FnOnce() -> Result<T>) -> Result<()> {
    if out.is_null() {
        return Err(Error::invalid(format!("{what} is NULL")));
    }
    let value = value()?;
    // SAFETY: by the caller's promise.
    unsafe { out.write(value) };
    Ok(())
}
