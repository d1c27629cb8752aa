//! Files mapped into memory: our own read-only mappings, and what the kernel says about mappings of others.
//!
//! Owns: [`FileMapping`] (through `memmap2`) and [`find`], which reads `/proc/self/maps`. Must not know: what the file contains.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// A whole file, mapped read-only.
pub struct FileMapping {
    map: memmap2::Mmap,
    path: PathBuf,
}

impl FileMapping {
    /// Maps the file. An empty file is an error: it has no byte to point at.
    ///
    /// # Errors
    /// [`crate::error::Status::Io`], naming the file.
    pub fn open(path: &Path) -> Result<FileMapping> {
        let file = File::open(path).map_err(|e| Error::os(format_args!("open {}", path.display()), &e))?;
        FileMapping::of(&file, path)
    }

    /// Maps an open file; `path` is what messages call it.
    ///
    /// # Errors
    /// As [`FileMapping::open`].
    pub fn of(file: &File, path: &Path) -> Result<FileMapping> {
        let named = |what: &str, e: std::io::Error| Error::os(format_args!("{what} {}", path.display()), &e);
        if file.metadata().map_err(|e| named("stat", e))?.len() == 0 {
            return Err(named("map", std::io::Error::other("the file is empty")));
        }
        // SAFETY: the mapping is read through raw pointers or for bytes whose every value is valid. A file that another process truncates
        // while it is mapped raises SIGBUS on access, as in every program that maps models; the README says so.
        let map = unsafe { memmap2::MmapOptions::new().map(file) }.map_err(|e| named("map", e))?;
        Ok(FileMapping { map, path: path.to_owned() })
    }

    /// The bytes of the file.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// The file's path as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// What the kernel knows about the mapping at an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapped {
    /// Whether it may be written.
    pub writable: bool,
    /// Whether its pages are the file's own (`MAP_SHARED`); pages of a private one may have been changed.
    pub shared: bool,
    /// File it maps, if any.
    pub file: Option<PathBuf>,
    /// Offset in the file of the address asked for, in bytes.
    pub offset: u64,
    /// Device of the file as the kernel numbers it here, which is not what `stat` says on every file system (btrfs, overlayfs).
    pub device: (u32, u32),
    /// Inode of the file, 0 if there is none.
    pub inode: u64,
    /// Bytes from the address asked for to the end of the mapping.
    pub left: u64,
}

impl Mapped {
    /// Whether both are of one file, in one way, and `next` goes on where this one ends.
    fn continues_in(&self, next: &Mapped) -> bool {
        let kind = |m: &Mapped| (m.writable, m.shared, m.device, m.inode);
        kind(self) == kind(next) && self.file == next.file && (next.offset == self.offset + self.left || self.file.is_none())
    }
}

/// The mapping that contains `address`, from `/proc/self/maps`. `None` if there is none, or no such file.
pub fn find(address: *const u8) -> Option<Mapped> {
    find_in(&std::fs::read(Path::new("/proc/self/maps")).ok()?, address.addr() as u64)
}

/// The same for `len` bytes. The kernel may have split what was mapped at once (`mlock` does): neighbours that go on in the same file are one.
pub fn find_all(address: *const u8, len: usize) -> Option<Mapped> {
    find_all_in(&std::fs::read(Path::new("/proc/self/maps")).ok()?, address.addr() as u64, len as u64)
}

fn find_all_in(maps: &[u8], address: u64, len: u64) -> Option<Mapped> {
    let mut found = find_in(maps, address)?;
    while found.left < len {
        let next = find_in(maps, address.checked_add(found.left)?).filter(|next| found.continues_in(next))?;
        found.left += next.left;
    }
    Some(found)
}

/// All addresses around `address` at which one file is mapped in one way and without a gap. `None` if no file is mapped there.
pub fn extent(address: *const u8) -> Option<std::ops::Range<usize>> {
    extent_in(&std::fs::read(Path::new("/proc/self/maps")).ok()?, address.addr() as u64)
}

fn extent_in(maps: &[u8], address: u64) -> Option<std::ops::Range<usize>> {
    let all: Vec<(u64, Mapped)> = maps.split(|b| *b == b'\n').filter_map(parse).collect();
    let at = all.iter().position(|(start, m)| (*start..start + m.left).contains(&address))?;
    all[at].1.file.as_ref()?;
    let joined = |i: usize| all[i].0 + all[i].1.left == all[i + 1].0 && all[i].1.continues_in(&all[i + 1].1);
    let first = (0..at).rev().take_while(|i| joined(*i)).last().unwrap_or(at);
    let last = (at..all.len() - 1).take_while(|i| joined(*i)).last().map_or(at, |i| i + 1);
    Some(usize::try_from(all[first].0).ok()?..usize::try_from(all[last].0 + all[last].1.left).ok()?)
}

/// All mappings of files whose pages are the file's own and cannot be written: where each starts, and what it is.
pub fn files() -> Vec<(usize, Mapped)> {
    let mut all = shared_files();
    all.retain(|(_, m)| !m.writable);
    all
}

/// All mappings of files whose pages are the file's own, by address.
pub fn shared_files() -> Vec<(usize, Mapped)> {
    let maps = std::fs::read(Path::new("/proc/self/maps")).unwrap_or_default();
    // Most lines are of programs and their libraries, which are private.
    let lines = maps.split(|b| *b == b'\n').filter(|line| line.iter().take(64).any(|b| *b == b's'));
    let all = lines.filter_map(parse).filter(|(_, m)| m.shared && m.file.is_some());
    all.filter_map(|(start, mapped)| Some((usize::try_from(start).ok()?, mapped))).collect()
}

/// A mapping of the file with this path whose pages are the file's own and cannot be written.
pub fn find_file(path: &Path) -> Option<Mapped> {
    let maps = std::fs::read(Path::new("/proc/self/maps")).ok()?;
    let unchangeable = |m: &Mapped| m.shared && !m.writable && m.file.as_deref() == Some(path);
    maps.split(|b| *b == b'\n').filter_map(parse).map(|(_, mapped)| mapped).find(unchangeable)
}

fn find_in(maps: &[u8], address: u64) -> Option<Mapped> {
    let (start, found) = maps.split(|b| *b == b'\n').filter_map(parse).find(|(start, m)| (*start..start + m.left).contains(&address))?;
    let into = address - start;
    Some(Mapped { offset: found.offset + into, left: found.left - into, ..found })
}

/// A line of the list: where the mapping starts, and the mapping from there on.
fn parse(line: &[u8]) -> Option<(u64, Mapped)> {
    // start-end perms offset dev inode   path, the path alone may contain spaces.
    let mut fields = line.splitn(6, |b| *b == b' ');
    let mut field = || std::str::from_utf8(fields.next()?).ok();
    let (range, perms, offset, device, inode) = (field()?, field()?, field()?, field()?, field()?);
    let (start, end) = range.split_once('-')?;
    let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
    let (major, minor) = device.split_once(':')?;
    let path = fields.next().unwrap_or(b"").trim_ascii_start();
    let mapped = Mapped {
        writable: perms.as_bytes().get(1) == Some(&b'w'),
        shared: perms.as_bytes().get(3) == Some(&b's'),
        file: path.starts_with(b"/").then(|| {
            use std::os::unix::ffi::OsStrExt;
            PathBuf::from(std::ffi::OsStr::from_bytes(path))
        }),
        offset: u64::from_str_radix(offset, 16).ok()?,
        device: (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?),
        inode: inode.parse().ok()?,
        left: end.checked_sub(start)?,
    };
    Some((start, mapped))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_mapping_names_its_file_and_offset() {
        let dir = std::env::temp_dir().join(format!("berth mapping {}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("with a space.gguf");
        let content: Vec<u8> = (0..20_000u32).map(|i| i as u8).collect();
        std::fs::write(&path, &content).unwrap();
        let map = FileMapping::open(&path).unwrap();
        assert_eq!(map.bytes(), content);
        let found = find(map.bytes()[9000..].as_ptr()).unwrap();
        assert_eq!(found.file.as_deref(), Some(path.canonicalize().unwrap().as_path()));
        assert_eq!((found.writable, found.offset, found.inode), (false, 9000, std::fs::metadata(&path).unwrap().ino()));
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn memory_without_a_file_has_none() {
        let value = Box::new([1u8; 64]);
        let found = find(value.as_ptr()).unwrap();
        assert_eq!((found.writable, found.file), (true, None));
        assert_eq!(find(std::ptr::null()), None);
    }

    #[test]
    fn a_missing_or_empty_file_is_named() {
        assert!(FileMapping::open(Path::new("/nonexistent/m.gguf")).err().is_some_and(|e| e.message.contains("/nonexistent/m.gguf")));
        assert!(FileMapping::open(Path::new("/dev/null")).err().is_some_and(|e| e.message.contains("empty")));
    }

    #[test]
    fn odd_lines_are_passed_over() {
        assert_eq!(find_in(b"", 5), None);
        assert_eq!(find_in(b"garbage\n1-z rw-p 0 0:0 0\n-\n", 5), None);
        let line = b"1000-3000 r--s 00002000 fe:00 77                         /a b\n";
        let want =
            Mapped { writable: false, shared: true, file: Some("/a b".into()), offset: 0x2010, device: (0xfe, 0), inode: 77, left: 0x1ff0 };
        assert_eq!(find_in(line, 0x1010), Some(want));
    }

    #[test]
    fn all_of_a_mapping_is_found_from_any_address_in_it() {
        let maps = b"1000-2000 r--s 00000000 fe:00 77 /a\n2000-4000 r--s 00001000 fe:00 77 /a\n\
                     4000-5000 r--s 00009000 fe:00 77 /a\n6000-7000 r--s 0000a000 fe:00 77 /a\n7000-8000 rw-p 00000000 00:00 0 \n";
        for (address, want) in [(0x1000, 0x1000..0x4000), (0x3fff, 0x1000..0x4000), (0x4000, 0x4000..0x5000), (0x6800, 0x6000..0x7000)] {
            assert_eq!(extent_in(maps, address), Some(want), "{address:#x}");
        }
        for address in [0x7800, 0x5800, 0x9000] {
            assert_eq!(extent_in(maps, address), None, "{address:#x}");
        }
    }

    #[test]
    fn neighbours_are_one_only_where_the_file_goes_on() {
        let maps = b"1000-2000 r--s 00000000 fe:00 77 /a\n2000-4000 r--s 00001000 fe:00 77 /a\n\
                     4000-5000 r--s 00009000 fe:00 77 /a\n6000-7000 r--s 0000a000 fe:00 77 /a\n7000-8000 r--s 0000b000 fe:00 78 /b\n";
        assert_eq!(find_all_in(maps, 0x1800, 0x2800).map(|m| (m.offset, m.left)), Some((0x800, 0x2800)));
        for (start, len) in [(0x1800, 0x2801), (0x4000, 0x1001), (0x6000, 0x1001), (0x9000, 1), (0x1000, u64::MAX)] {
            assert_eq!(find_all_in(maps, start, len), None, "{start:#x} {len:#x}");
        }
    }
}
