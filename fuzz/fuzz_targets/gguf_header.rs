//! Any bytes as a GGUF file: an error or a header that keeps every promise, and no allocation larger than the file.

#![no_main]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use berth::gguf::Header;
use libfuzzer_sys::fuzz_target;

/// Texts of errors are not measured against the file: they are short, whatever the file.
const FLOOR: usize = 8192;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

struct Watched;

// SAFETY: every call is passed on unchanged.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LARGEST.fetch_max(size, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Watched = Watched;

fuzz_target!(|bytes: &[u8]| {
    LARGEST.store(0, Ordering::Relaxed);
    let read = Header::from_bytes(bytes);
    let largest = LARGEST.load(Ordering::Relaxed);
    assert!(largest <= bytes.len().max(FLOOR), "{largest} bytes were allocated for a file of {}", bytes.len());
    match read {
        Err(e) => {
            assert!(e.offset <= bytes.len() as u64);
            assert!(!e.to_string().contains(char::is_control));
        }
        Ok(header) => check(&header),
    }
});

fn check(header: &Header) {
    assert!(matches!(header.version(), 2 | 3) && header.alignment() > 0);
    let mut spans = Vec::new();
    for t in header.tensors() {
        assert_eq!(header.tensor(t.name), Some(t), "names are unique and found");
        assert!(!t.name.is_empty() && !t.name.contains(char::is_control));
        if t.bytes > 0 {
            assert!(t.offset >= header.data_offset());
            assert!(t.offset.checked_add(t.bytes).is_some_and(|end| end <= header.file_len()));
            spans.push((t.offset, t.offset + t.bytes));
        }
    }
    spans.sort_unstable();
    assert!(spans.windows(2).all(|w| w[0].1 <= w[1].0), "tensors do not overlap");
    for (key, value) in header.metadata() {
        assert!(header.value(key).is_some());
        if let Some(array) = value.as_array()
            && let Some(elements) = array.iter()
        {
            assert_eq!(elements.count() as u64, array.len);
        }
    }
}
