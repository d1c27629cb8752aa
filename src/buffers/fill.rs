//! How a tensor's bytes come into a buffer: from the file that the host has mapped, where that is their origin, else by copying.
//!
//! Owns: the choice between the two, what becomes of it when it fails, and the count of both. Must not know: tensors, the host's tables.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::lasting::Lasting;
use super::progress;
use crate::config;
use crate::log;
use crate::memory::fill::{self, Piece};
use crate::memory::origin::{self, MappedFile, NoOrigin};
use crate::memory::{Region, target::Target};
use crate::report::{self, filled::Copied, filled::How};

/// Below this, finding the file costs more than reading from it saves.
const WORTH_A_LOOK: usize = 1 << 20;

/// The file that bytes were read from last: the next tensor is in the same one as a rule. Closed at the end of a load.
static LAST: Mutex<Option<Arc<MappedFile>>> = Mutex::new(None);

fn last() -> MutexGuard<'static, Option<Arc<MappedFile>>> {
    LAST.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A load is complete, or a buffer is gone: nothing of a fill is kept.
pub fn end() {
    last().take();
    progress::end();
    super::lasting::end_of_load();
    super::reading::end_of_load();
    super::numa::end_of_load();
}

/// Brings `len` bytes of the host's memory into a region. False if they do not all lie in it, or it may not be written.
///
/// # Safety
/// `source` must be readable for `len` bytes, and nobody else may use those of the region meanwhile.
pub(super) unsafe fn set(
    name: &str,
    id: Option<report::Id>,
    lasting: Option<&Lasting>,
    region: &Region,
    offset: usize,
    source: *const u8,
    len: usize,
) -> bool {
    let mut setting = lasting.map(Lasting::setting);
    // SAFETY: by the caller's promise.
    if setting.as_mut().is_some_and(|s| unsafe { s.is_there(offset, source, len) }) {
        if let Some(id) = id {
            report::filled(id, How::Kept { bytes: len as u64 });
        }
        return true;
    }
    let Some(target) = region.target(offset, len) else { return false };
    // SAFETY: by the caller's promise.
    let how = unsafe { bring(name, &target, source) };
    if let Some(id) = id {
        report::filled(id, how);
    }
    if let Some(mut setting) = setting {
        setting.written(offset);
    }
    true
}

/// Why bytes were not read from their file.
struct NotRead {
    reason: Copied,
    /// In words, if it is a fault of the file.
    message: Option<String>,
    /// How many of them may be touched, if not all.
    readable: Option<usize>,
}

impl NotRead {
    fn because(reason: Copied, message: Option<String>) -> NotRead {
        NotRead { reason, message, readable: None }
    }
}

impl From<NoOrigin> for NotRead {
    fn from(why: NoOrigin) -> NotRead {
        match why {
            NoOrigin::Memory => NotRead::because(Copied::NoFile, None),
            NoOrigin::Changeable => NotRead::because(Copied::ChangeableMapping, None),
            NoOrigin::Gone(why) => NotRead::because(Copied::FileGone, Some(why)),
            NoOrigin::Truncated { path, size, needed, left } => {
                let path = path.display();
                let message = format!("{path} ends at byte {size}, but {needed} are needed: it was truncated after it was mapped");
                NotRead { reason: Copied::FileTruncated, message: Some(message), readable: Some(left) }
            }
        }
    }
}

/// # Safety
/// As [`set`].
unsafe fn bring(name: &str, target: &Target<'_>, source: *const u8) -> How {
    let len = target.len();
    // Not within the `match`, which would hold the lock to its end.
    let known = last().clone();
    let why = if len < WORTH_A_LOOK {
        NotRead::because(Copied::Small, None)
    } else if config::get().is_ok_and(|c| c.fill == config::Fill::Copy) {
        NotRead::because(Copied::SwitchedOff, None)
    } else {
        // SAFETY: by the caller's promise.
        match unsafe { from_file(target, source, known) } {
            Ok(direct) => return How::Read { bytes: len as u64, direct },
            Err(why) => why,
        }
    };
    if let Some(message) = &why.message {
        say_once(name, why.reason, message);
    }
    match why.readable {
        // SAFETY: by the caller's promise.
        None => unsafe { copy(target, source) },
        // SAFETY: by the caller's promise; the first `left` bytes of the source are still there.
        Some(left) => unsafe {
            std::ptr::copy(source, target.base(), left);
            std::ptr::write_bytes(target.base().add(left), 0, len - left);
        },
    }
    How::Copied { reason: why.reason, bytes: len as u64, message: why.message }
}

/// Reads what lies behind the source. The result is how many bytes were read past the page cache.
///
/// # Safety
/// As [`set`].
unsafe fn from_file(target: &Target<'_>, source: *const u8, known: Option<Arc<MappedFile>>) -> Result<u64, NotRead> {
    let len = target.len();
    let origin = origin::behind(source, len, known.as_ref(), true)?;
    *last() = Some(origin.file.clone());
    let mut progress = progress::Fill::begin(Some(origin.file.input.path()));
    let piece = Piece { input: &origin.file.input, offset: origin.offset, target: *target };
    // SAFETY: by the caller's promise.
    let read = unsafe {
        fill::fill(&[piece], &mut |done, _| {
            progress.at(done);
            true
        })
    };
    match read {
        Ok(done) => {
            // SAFETY: the host keeps its mapping during the call.
            unsafe { origin.release(source, len) };
            Ok(done.iter().map(|d| d.direct).sum())
        }
        Err(error) => {
            // A file that has become too short in the meantime must not be touched.
            origin::behind(source, len, Some(&origin.file), true)?;
            Err(NotRead::because(Copied::ReadFailed, Some(error.message)))
        }
    }
}

/// # Safety
/// As [`set`].
unsafe fn copy(target: &Target<'_>, source: *const u8) {
    let mut progress = progress::Fill::begin(None);
    // SAFETY: by the caller's promise.
    unsafe { fill::copy(source, target, &mut |done| progress.at(done)) };
}

/// One line per reason: a load may fail in the same way for each of its tensors.
fn say_once(name: &str, reason: Copied, message: &str) {
    static SAID: Mutex<Option<HashSet<Copied>>> = Mutex::new(None);
    if !SAID.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default().insert(reason) {
        return;
    }
    // No lock is held: a log may call back into us.
    if reason == Copied::FileTruncated {
        log::error!("{name}: {message}; the bytes of tensors that are missing are set to 0");
    } else {
        log::warning!("{name}: the bytes of tensors are copied from the mapping, which is slower: {message}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::arena::{Arena, Directory};
    use crate::memory::mapping::FileMapping;
    use crate::memory::pageable::Pageable;
    use crate::memory::testing::{Sample, random};

    const LEN: usize = (9 << 20) + 5;

    /// A region in pageable memory and one in an arena, with the directory that has to stay.
    fn regions() -> ([Region; 2], tempfile::TempDir) {
        let dir = tempfile::tempdir().unwrap();
        let arena = Arena::new(&Directory::open(dir.path(), false).unwrap(), LEN + 100).unwrap();
        ([Region::from(Pageable::new(LEN + 100).unwrap()), Region::from(arena.slice(LEN + 100).unwrap())], dir)
    }

    /// Brings all of `source` to offset 33 of each region, and gives how it came there and the bytes that are there now.
    fn bring_to_each(source: *const u8, len: usize) -> Vec<(How, Vec<u8>)> {
        let (regions, _dir) = regions();
        let one = |region: &Region| {
            // SAFETY: the tests give readable sources; the region is this function's.
            let how = unsafe { bring("test", &region.target(33, len).unwrap(), source) };
            // SAFETY: the region owns these bytes and nobody writes them now.
            let bytes = unsafe { std::slice::from_raw_parts(region.base(), region.len()) };
            assert!(bytes[..33].iter().chain(&bytes[33 + len..]).all(|b| *b == 0), "a byte beside them");
            (how, bytes[33..33 + len].to_vec())
        };
        regions.iter().map(one).collect()
    }

    fn copied_because(how: &How, wanted: Copied, len: usize) -> bool {
        matches!(how, How::Copied { reason, bytes, .. } if *reason == wanted && *bytes == len as u64)
    }

    #[test]
    fn what_the_host_has_mapped_is_read_from_its_file() {
        let sample = Sample::new("bring", LEN + 4096);
        let map = FileMapping::open(&sample.path).unwrap();
        for (at, len) in [(0, LEN), (1, LEN), (4096, LEN - 1), (4095, 1 << 20), (LEN + 4096 - (2 << 20), 2 << 20)] {
            for (how, bytes) in bring_to_each(map.bytes()[at..].as_ptr(), len) {
                assert!(matches!(how, How::Read { bytes, .. } if bytes == len as u64), "{how:?}");
                assert!(bytes == sample.bytes[at..at + len], "{len} at {at}");
            }
        }
        let (how, bytes) = bring_to_each(map.bytes()[77..].as_ptr(), (1 << 20) - 1).swap_remove(0);
        assert!(copied_because(&how, Copied::Small, (1 << 20) - 1) && bytes == sample.bytes[77..77 + (1 << 20) - 1]);
    }

    #[test]
    fn what_is_no_file_is_copied() {
        let bytes = random(LEN, 1);
        for (how, got) in bring_to_each(bytes.as_ptr(), LEN) {
            assert!(copied_because(&how, Copied::NoFile, LEN) && got == bytes, "{how:?}");
        }
    }

    #[test]
    fn a_private_mapping_that_was_changed_is_copied_as_it_is_in_memory() {
        let sample = Sample::new("private", LEN);
        // SAFETY: nobody else uses the file.
        let mut map = unsafe { memmap2::MmapOptions::new().map_copy(&sample.open()) }.unwrap();
        map[12_345] ^= 0xFF;
        let check = |map: &[u8]| {
            for (how, got) in bring_to_each(map.as_ptr(), LEN) {
                assert!(copied_because(&how, Copied::ChangeableMapping, LEN), "{how:?}");
                assert!(got == map && got != sample.bytes);
            }
        };
        check(&map);
        check(&map.make_read_only().unwrap());
    }

    #[test]
    fn a_replaced_file_is_not_read_in_place_of_the_mapped_one() {
        let sample = Sample::new("replaced", LEN);
        let map = FileMapping::open(&sample.path).unwrap();
        let other = Sample::new("other", LEN);
        std::fs::rename(&other.path, &sample.path).unwrap();
        for (how, got) in bring_to_each(map.bytes().as_ptr(), LEN) {
            assert!(matches!(&how, How::Copied { reason: Copied::FileGone, message: Some(_), .. }), "{how:?}");
            assert!(got == sample.bytes && got != other.bytes);
        }
    }

    #[test]
    fn a_truncated_file_does_not_end_the_process() {
        let sample = Sample::new("truncated", LEN);
        let map = FileMapping::open(&sample.path).unwrap();
        for left in [LEN - 1, 5_000_000, 4096, 0] {
            std::fs::OpenOptions::new().write(true).open(&sample.path).unwrap().set_len(left as u64).unwrap();
            for (how, got) in bring_to_each(map.bytes().as_ptr(), LEN) {
                assert!(copied_because(&how, Copied::FileTruncated, LEN), "{how:?}");
                assert!(got[..left] == sample.bytes[..left] && got[left..].iter().all(|b| *b == 0), "{left}");
            }
        }
    }

    #[test]
    fn a_read_that_fails_is_a_reason_to_copy_unless_the_file_is_too_short_by_now() {
        let sample = Sample::new("unreadable", LEN);
        let map = FileMapping::open(&sample.path).unwrap();
        let address = map.bytes().as_ptr();
        let broken = Arc::new(origin::behind(address, LEN, None, true).ok().unwrap().file.unreadable());
        let (regions, _dir) = regions();
        for region in &regions {
            let target = region.target(33, LEN).unwrap();
            // SAFETY: the region is this test's.
            let why = unsafe { from_file(&target, address, Some(broken.clone())) }.err().unwrap();
            assert!(why.reason == Copied::ReadFailed && why.readable.is_none(), "{:?}", why.message);
            assert!(why.message.unwrap().contains(sample.path.to_str().unwrap()));
        }
        end();
        // It is left as it is found: another load tries again.
        for (how, got) in bring_to_each(address, LEN) {
            assert!(matches!(how, How::Read { .. }) && got == sample.bytes, "{how:?}");
        }
    }

    #[test]
    fn a_place_outside_of_the_region_is_refused() {
        let (regions, _dir) = regions();
        let bytes = [1u8; 8];
        for (offset, len) in [(LEN + 93, 8), (usize::MAX, 8), (0, usize::MAX)] {
            // SAFETY: it is refused before anything is touched.
            assert!(!unsafe { set("test", None, None, &regions[0], offset, bytes.as_ptr(), len) });
        }
    }

    #[test]
    fn tensors_may_be_set_by_several_threads() {
        let sample = Sample::new("threads", LEN);
        let map = FileMapping::open(&sample.path).unwrap();
        std::thread::scope(|scope| {
            for i in 0..4 {
                let (map, sample) = (&map, &sample);
                scope.spawn(move || {
                    let len = LEN - 1000 * i;
                    for (how, got) in bring_to_each(map.bytes()[1000 * i..].as_ptr(), len) {
                        assert!(matches!(how, How::Read { .. }), "{how:?}");
                        assert!(got == sample.bytes[1000 * i..]);
                    }
                });
            }
        });
    }
}
