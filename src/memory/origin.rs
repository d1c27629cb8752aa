//! Which file lies behind an address: so that bytes can be read from the file instead of through page faults.
//!
//! Owns: the proof that file and memory hold the same bytes. Only a shared mapping that cannot be written qualifies: its pages are the file's own.
//! (A private one may have been changed before it was made read-only, as the loader of programs does.) The file that is found by its name is
//! mapped as well, and must be the same one in the kernel's own list of mappings: that holds on every file system, and for a file that was
//! deleted or replaced it fails. Must not know: who asks, what the bytes mean.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use super::arena;
use super::input::{Input, page_size};
use super::mapping::{self, Mapped};

/// A file that is mapped somewhere in this process, opened for reading.
pub struct MappedFile {
    /// To read from.
    pub input: Input,
    device: (u32, u32),
    inode: u64,
    released: Mutex<Released>,
}

/// Bytes that were released one after the other: those between `start` and `end` of the file, the last of them before the address `at`.
#[derive(Clone, Copy, Default)]
struct Released {
    start: u64,
    end: u64,
    at: usize,
}

impl MappedFile {
    /// Whether both are one file.
    pub fn is(&self, other: &MappedFile) -> bool {
        (self.device, self.inode) == (other.device, other.inode)
    }
}

#[cfg(test)]
impl MappedFile {
    /// The same file, of which no byte can be read.
    pub(crate) fn unreadable(&self) -> MappedFile {
        let file = OpenOptions::new().write(true).open(self.input.path()).unwrap();
        let input = Input::new(file, self.input.path(), true);
        MappedFile { input, device: self.device, inode: self.inode, released: Mutex::default() }
    }
}

/// The part of a file that lies behind some bytes of memory.
pub struct Origin {
    /// The file.
    pub file: Arc<MappedFile>,
    /// Offset of the first byte.
    pub offset: u64,
}

/// Why bytes are not read from a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoOrigin {
    /// They are ordinary memory, or several mappings.
    Memory,
    /// They are a mapping of a file that may be written, or whose pages may differ from the file's.
    Changeable,
    /// The file cannot be opened any more: in words.
    Gone(String),
    /// The file ends before the bytes do: touching those behind its end would raise SIGBUS.
    Truncated {
        /// Its path.
        path: PathBuf,
        /// Its size now.
        size: u64,
        /// The size it would need.
        needed: u64,
        /// How many of the bytes asked for it has.
        left: usize,
    },
}

/// The file behind `len` bytes at `address`. `last` is one that was found before, which is used again if it is the same: an open file cannot
/// become another one. With `direct` it is opened for direct reads too.
///
/// # Errors
/// Why there is none.
pub fn behind(address: *const u8, len: usize, last: Option<&Arc<MappedFile>>, direct: bool) -> Result<Origin, NoOrigin> {
    let mapped = mapping::find_all(address, len).ok_or(NoOrigin::Memory)?;
    let path = mapped.file.clone().filter(|p| !is_memory(p)).ok_or(NoOrigin::Memory)?;
    if mapped.writable || !mapped.shared {
        return Err(NoOrigin::Changeable);
    }
    let file = match last.filter(|l| (l.device, l.inode) == (mapped.device, mapped.inode)) {
        Some(last) => last.clone(),
        None => Arc::new(open(&mapped, path, direct)?),
    };
    let size = file.input.size().map_err(|e| NoOrigin::Gone(e.message))?;
    let needed = mapped.offset.saturating_add(len as u64);
    if needed > size {
        let left = size.saturating_sub(mapped.offset) as usize;
        return Err(NoOrigin::Truncated { path: file.input.path().to_owned(), size, needed, left });
    }
    Ok(Origin { file, offset: mapped.offset })
}

/// The file with this path that is mapped somewhere in this process, as its maker maps a model: shared and read-only.
///
/// # Errors
/// Why there is none.
pub fn mapped(path: &Path) -> Result<Arc<MappedFile>, NoOrigin> {
    let found = mapping::find_file(path).ok_or(NoOrigin::Memory)?;
    open(&found, path.to_owned(), false).map(Arc::new)
}

/// The files behind many addresses. The kernel's list of mappings, which takes some 50 microseconds, is read once until it is said to be old;
/// files stay open.
#[derive(Default)]
pub struct Origins {
    maps: Option<Vec<(usize, Mapped)>>,
    files: Vec<Arc<MappedFile>>,
    /// What could not be opened, which is not tried again.
    refused: Vec<(Identity, NoOrigin)>,
}

/// Device and inode.
type Identity = ((u32, u32), u64);

impl Origins {
    /// Something may have been mapped or unmapped since.
    pub fn forget_addresses(&mut self) {
        self.maps = None;
    }

    fn maps(&mut self) -> &[(usize, Mapped)] {
        self.maps.get_or_insert_with(mapping::shared_files)
    }

    /// Bytes of all files that are mapped as the one at this address is: to be read only, as models are, or to be written, as arenas are.
    pub fn mapped_bytes_like(&mut self, address: usize) -> u64 {
        let maps = self.maps();
        let at = maps.partition_point(|(start, _)| *start <= address).checked_sub(1);
        let writable = at.is_some_and(|at| maps[at].1.writable);
        maps.iter().filter(|(_, m)| m.writable == writable).map(|(_, m)| m.left).fold(0, u64::saturating_add)
    }

    /// The file behind `len` bytes at `address`, opened for direct reads too: as [`behind`], and for arenas of this process as well, whose file
    /// holds what was stored to them (a direct read writes back first what is not on the disk yet). It is open until this is dropped.
    ///
    /// # Errors
    /// Why there is none.
    pub fn find(&mut self, address: usize, len: usize) -> Result<Origin, NoOrigin> {
        let end = address.checked_add(len).ok_or(NoOrigin::Memory)?;
        let maps = self.maps();
        let at = maps.partition_point(|(start, _)| *start <= address).checked_sub(1).ok_or(NoOrigin::Memory)?;
        let (start, mapped) = &maps[at];
        if end as u64 > (*start as u64).saturating_add(mapped.left) {
            return Err(NoOrigin::Memory);
        }
        let mapped = Mapped { offset: mapped.offset + (address - start) as u64, ..mapped.clone() };
        let identity: Identity = (mapped.device, mapped.inode);
        if let Some((_, why)) = self.refused.iter().find(|(refused, _)| *refused == identity) {
            return Err(why.clone());
        }
        let known = self.files.iter().find(|f| (f.device, f.inode) == identity).cloned();
        let opened = known.map_or_else(|| self.open(&mapped, address), Ok);
        match opened {
            Ok(file) => Ok(Origin { file, offset: mapped.offset }),
            Err(why) => {
                self.refused.push((identity, why.clone()));
                Err(why)
            }
        }
    }

    #[cfg(test)]
    pub(super) fn break_direct(&mut self) {
        for file in &mut self.files {
            let file = Arc::get_mut(file).unwrap();
            file.input.break_direct();
        }
    }

    fn open(&mut self, mapped: &Mapped, address: usize) -> Result<Arc<MappedFile>, NoOrigin> {
        let path = mapped.file.clone().filter(|p| !is_memory(p)).ok_or(NoOrigin::Memory)?;
        let file = if mapped.writable {
            // It has no name any more; its arena has it open.
            let file = arena::file_at(address).ok_or(NoOrigin::Changeable)?;
            of(mapped, path, File::from(file), true)
        } else {
            open(mapped, path, true)
        };
        let file = Arc::new(file?);
        self.files.push(file.clone());
        Ok(file)
    }
}

/// Whether the kernel shows a path where there is no file: memory that processes share.
fn is_memory(path: &Path) -> bool {
    use std::os::unix::ffi::OsStrExt;
    let shown = path.as_os_str().as_bytes();
    [&b"/memfd:"[..], b"/SYSV", b"/dev/zero"].iter().any(|prefix| shown.starts_with(prefix))
}

/// Opens the file of a mapping, if it is still there under its name.
fn open(mapped: &Mapped, path: PathBuf, direct: bool) -> Result<MappedFile, NoOrigin> {
    let gone = |why: &dyn std::fmt::Display| NoOrigin::Gone(format!("{}: {why}", path.display()));
    // A pipe in its place must not make us wait.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path).map_err(|e| gone(&e))?;
    of(mapped, path, file, direct)
}

/// An open file, if it is the one that is mapped.
fn of(mapped: &Mapped, path: PathBuf, file: File, direct: bool) -> Result<MappedFile, NoOrigin> {
    let gone = |why: &dyn std::fmt::Display| NoOrigin::Gone(format!("{}: {why}", path.display()));
    let is_file = file.metadata().map_err(|e| gone(&e))?.is_file();
    if !is_file || identity(&file) != Some((mapped.device, mapped.inode)) {
        return Err(gone(&"there is another file under this name than the one that is mapped"));
    }
    Ok(MappedFile { input: Input::new(file, &path, direct), device: mapped.device, inode: mapped.inode, released: Mutex::default() })
}

/// Device and inode of a file as the kernel shows them in its list of mappings.
fn identity(file: &File) -> Option<((u32, u32), u64)> {
    // SAFETY: a new mapping at an address of the kernel's choice, which is never accessed.
    let map = unsafe { libc::mmap(std::ptr::null_mut(), 1, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    if map == libc::MAP_FAILED {
        return None;
    }
    let found = mapping::find(map.cast());
    // SAFETY: exactly the mapping just made, unmapped once.
    unsafe { libc::munmap(map, 1) };
    found.map(|m| (m.device, m.inode))
}

impl Origin {
    /// Lets the kernel take back the pages of these bytes, which have been copied: two copies must not stay in memory.
    ///
    /// The page cache gives up no page that is mapped, and hosts map a model with all its pages. So they are unmapped first. That is safe for
    /// whoever owns the mapping: it is shared and read-only, its pages hold nothing that the file does not, and whoever touches one again
    /// gets it from the file. Locked pages stay.
    ///
    /// # Safety
    /// `address` and `len` must be those that this origin was found for, and the mapping must still be there.
    pub unsafe fn release(&self, address: *const u8, len: usize) {
        // The page cache holds pages in groups of up to 2 MiB, and gives up none of which a part is kept: so each call starts a little earlier.
        const GROUP: u64 = 2 << 20;
        let (page, start, end) = (page_size(), address.addr(), address.addr().saturating_add(len));
        let first = start / page * page;
        let mut released = self.file.released.lock().unwrap_or_else(PoisonError::into_inner);
        // Whether the last release ended in the page that this one starts in, but for a gap that belongs to no tensor.
        let gap = start.checked_sub(released.at).filter(|_| released.at >= first);
        let continues = gap.is_some_and(|gap| released.end.checked_add(gap as u64) == Some(self.offset));
        // Pages that hold a byte of somebody else's are left.
        let from = if continues { first } else { start.next_multiple_of(page) };
        let whole = (end / page * page).saturating_sub(from);
        if whole > 0 {
            let from = address.wrapping_sub(start).wrapping_add(from);
            // SAFETY: whole pages inside of the mapping; see above.
            unsafe { libc::madvise(from.cast_mut().cast(), whole, libc::MADV_DONTNEED) };
        }
        let begun = if continues { released.start } else { self.offset };
        *released = Released { start: begun, end: self.offset.saturating_add(len as u64), at: end };
        let from = begun.max(self.offset.saturating_sub(GROUP));
        self.file.input.drop_cached(from, (released.end - from) as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::mapping::FileMapping;
    use crate::memory::testing::Sample;

    fn sample(name: &str) -> (Sample, FileMapping) {
        let sample = Sample::new(name, 300_000);
        let map = FileMapping::open(&sample.path).unwrap();
        (sample, map)
    }

    fn refused(address: *const u8, len: usize) -> NoOrigin {
        behind(address, len, None, true).err().unwrap()
    }

    #[test]
    fn of_many_addresses_the_file_is_opened_once_and_what_is_no_file_of_ours_is_refused() {
        let (sample, map) = sample("many");
        let mut origins = Origins::default();
        let base = map.bytes().as_ptr().addr();
        let first = origins.find(base + 7, 1000).ok().unwrap();
        for (at, len) in [(0, 300_000), (4095, 2), (123_457, 176_543)] {
            let found = origins.find(base + at, len).ok().unwrap();
            assert_eq!((found.offset, found.file.input.path()), (at as u64, &*sample.path.canonicalize().unwrap()));
            assert!(Arc::ptr_eq(&found.file, &first.file));
        }
        assert!(origins.mapped_bytes_like(base + 7) >= 300_000);
        let mut bytes = vec![0; 500];
        first.file.input.read_cached(first.offset, &mut bytes).unwrap();
        assert!(bytes == sample.bytes[7..507]);
        let why = |origins: &mut Origins, at, len| origins.find(at, len).err();
        assert_eq!(why(&mut origins, base, 400_000), Some(NoOrigin::Memory), "behind the mapping");
        assert_eq!(why(&mut origins, bytes.as_ptr().addr(), 500), Some(NoOrigin::Memory));
        assert_eq!((why(&mut origins, 0, 1), why(&mut origins, usize::MAX, 2)), (Some(NoOrigin::Memory), Some(NoOrigin::Memory)));
        // A second mapping is found when the list is read again.
        let other = Sample::new("many-other", 5000);
        let map = FileMapping::open(&other.path).unwrap();
        std::fs::remove_file(&other.path).unwrap();
        origins.forget_addresses();
        for _ in 0..2 {
            assert!(matches!(why(&mut origins, map.bytes().as_ptr().addr(), 5000), Some(NoOrigin::Gone(_))), "deleted");
        }
        assert!(origins.find(base, 5).is_ok_and(|o| Arc::ptr_eq(&o.file, &first.file)));
    }

    #[test]
    fn an_arena_has_its_file_open_and_a_private_or_foreign_mapping_has_none() {
        let dir = tempfile::tempdir().unwrap();
        let arena = arena::Arena::new(&arena::Directory::open(dir.path(), false).unwrap(), 5 << 20).unwrap();
        let region = crate::memory::Region::from(arena.slice(3 << 20).unwrap());
        crate::memory::testing::touch(&region);
        let mut origins = Origins::default();
        let at = region.base().addr() + (1 << 20);
        let found = origins.find(at, 2 << 20).ok().unwrap();
        assert_eq!(found.offset, 1 << 20);
        let mut bytes = vec![0; 4096];
        found.file.input.read_cached(found.offset, &mut bytes).unwrap();
        assert!(bytes.iter().all(|b| *b == 1));
        drop((found, region, arena));
        assert_eq!(arena::file_at(at).map(|_| ()), None, "it is gone");
        let shared = Sample::new("foreign", 10_000);
        let file = std::fs::OpenOptions::new().read(true).write(true).open(&shared.path).unwrap();
        // SAFETY: nobody changes the file.
        let map = unsafe { memmap2::MmapMut::map_mut(&file) }.unwrap();
        origins.forget_addresses();
        assert_eq!(origins.find(map.as_ptr().addr(), 10_000).err(), Some(NoOrigin::Changeable));
        // SAFETY: likewise.
        let private = unsafe { memmap2::MmapOptions::new().map_copy(&file) }.unwrap();
        origins.forget_addresses();
        assert_eq!(origins.find(private.as_ptr().addr(), 10_000).err(), Some(NoOrigin::Memory));
    }

    #[test]
    fn a_mapped_file_is_found_at_every_offset_and_used_again() {
        let (sample, map) = sample("found");
        let mut last = None;
        for (at, len) in [(0, 300_000), (1, 1), (4095, 2), (123_457, 176_543)] {
            let found = behind(map.bytes()[at..].as_ptr(), len, last.as_ref(), true).ok().unwrap();
            assert_eq!((found.offset, found.file.input.path()), (at as u64, sample.path.canonicalize().unwrap().as_path()));
            assert!(last.is_none_or(|l| Arc::ptr_eq(&l, &found.file)));
            last = Some(found.file);
        }
        let other = self::sample("other");
        let found = behind(other.1.bytes().as_ptr(), 10, last.as_ref(), true).ok().unwrap();
        assert!(!Arc::ptr_eq(&last.unwrap(), &found.file), "another file is not taken for the last one");
    }

    #[test]
    fn memory_has_no_file() {
        let bytes = vec![1u8; 100_000];
        assert_eq!(refused(bytes.as_ptr(), bytes.len()), NoOrigin::Memory);
        assert_eq!(refused(std::ptr::null(), 1), NoOrigin::Memory);
        assert!(["/memfd:x (deleted)", "/SYSV00000000 (deleted)", "/dev/zero (deleted)"].iter().all(|p| is_memory(Path::new(p))));
        assert!(!is_memory(Path::new("/dev/shm/model.gguf")));
        // A mapping that ends before the bytes do.
        let (_sample, map) = sample("short");
        assert!(behind(map.bytes().as_ptr(), 1 << 40, None, true).is_err());
    }

    #[test]
    fn mappings_that_may_differ_from_their_file_do_not_qualify() {
        let sample = Sample::new("changeable", 10_000);
        let file = OpenOptions::new().read(true).write(true).open(&sample.path).unwrap();
        // SAFETY: nobody else uses the file.
        let (private, shared) = unsafe { (memmap2::MmapOptions::new().map_copy(&file), memmap2::MmapOptions::new().map_mut(&file)) };
        let (mut private, shared) = (private.unwrap(), shared.unwrap());
        private[5] ^= 1;
        assert_eq!(refused(private.as_ptr(), 10_000), NoOrigin::Changeable);
        assert_eq!(refused(shared.as_ptr(), 10_000), NoOrigin::Changeable);
        // Made read-only after the change.
        let private = private.make_read_only().unwrap();
        assert_eq!(refused(private.as_ptr(), 10_000), NoOrigin::Changeable);
        let shared = shared.make_read_only().unwrap();
        assert!(behind(shared.as_ptr(), 10_000, None, true).is_ok());
    }

    #[test]
    fn a_file_that_was_deleted_or_replaced_is_not_read_but_an_open_one_is() {
        let (sample, map) = sample("replaced");
        let address = map.bytes().as_ptr();
        let open = behind(address, 1000, None, true).ok().unwrap();
        std::fs::rename(&sample.path, sample.path.with_extension("old")).unwrap();
        std::fs::write(&sample.path, &sample.bytes).unwrap();
        // The list of mappings follows the file to its new name.
        assert!(behind(address, 1000, None, true).is_ok());
        std::fs::remove_file(sample.path.with_extension("old")).unwrap();
        let gone = |why: NoOrigin| matches!(why, NoOrigin::Gone(why) if why.contains(sample.path.to_str().unwrap()));
        assert!(gone(refused(address, 1000)));
        // A file under the very name that the list shows.
        let mut shown = sample.path.with_extension("old").into_os_string();
        shown.push(" (deleted)");
        std::fs::write(&shown, &sample.bytes).unwrap();
        assert!(matches!(refused(address, 1000), NoOrigin::Gone(why) if why.contains("another file")));
        std::fs::remove_file(&shown).unwrap();
        let again = behind(address, 1000, Some(&open.file), true).ok().unwrap();
        assert!(Arc::ptr_eq(&again.file, &open.file), "an open file stays the one that is mapped");
    }

    #[test]
    fn a_truncated_file_is_found_out_before_it_is_touched() {
        let (sample, map) = sample("truncated");
        let address = map.bytes()[100..].as_ptr();
        let open = behind(address, 1000, None, true).ok().unwrap();
        OpenOptions::new().write(true).open(&sample.path).unwrap().set_len(600).unwrap();
        for last in [None, Some(&open.file)] {
            let why = behind(address, 1000, last, true).err().unwrap();
            assert!(matches!(why, NoOrigin::Truncated { size: 600, needed: 1100, left: 500, .. }), "{why:?}");
        }
        std::fs::write(&sample.path, b"").unwrap();
        assert!(matches!(refused(address, 1000), NoOrigin::Truncated { size: 0, left: 0, .. }));
    }

    #[test]
    fn released_pages_can_be_read_again_and_neighbours_are_left() {
        let (sample, map) = sample("released");
        assert!(map.bytes() == sample.bytes);
        for (at, len) in [(0, 300_000), (5, 200_000), (100_000, 10), (4096, 4096), (299_999, 1)] {
            let address = map.bytes()[at..].as_ptr();
            let origin = behind(address, len, None, true).ok().unwrap();
            // SAFETY: the mapping is there.
            unsafe { origin.release(address, len) };
            assert!(map.bytes() == sample.bytes);
        }
    }

    #[test]
    fn tensors_that_follow_each_other_leave_nothing_of_what_they_share() {
        let sample = Sample::new("follow", 5 << 20);
        sample.open().sync_all().unwrap();
        let map = FileMapping::open(&sample.path).unwrap();
        // As GGUF lays them out: 32 bytes aligned, with padding between.
        let tensors = [(0, 1_500_001), (1_500_032, 1_234_567), (2_734_624, 2_000_000), (4_734_624, (5 << 20) - 4_734_624)];
        let mut last = None;
        assert!(map.bytes() == sample.bytes, "and so all pages are mapped");
        for (at, len) in tensors {
            let address = map.bytes()[at..].as_ptr();
            let origin = behind(address, len, last.as_ref(), true).ok().unwrap();
            // SAFETY: the mapping is there.
            unsafe { origin.release(address, len) };
            last = Some(origin.file);
        }
        if crate::memory::system::file_system(&sample.path).is_some_and(|f| f != "tmpfs") {
            for at in (0..5 << 20).step_by(256 << 10) {
                assert!(!last.as_ref().unwrap().input.is_cached(at, 256 << 10), "the pages at {at} are still there");
            }
        }
        assert!(map.bytes() == sample.bytes);
    }
}
