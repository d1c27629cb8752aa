//! Which file a copy was made of: what the kernel says about it, and checksums of a part of it.
//!
//! Owns: what is compared. The time of change is set by the kernel alone, and with every change of content, name or owner: where only it has changed the
//! content is the same, perhaps, and "perhaps" is a reason to copy anew. Must not know: what a model is.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::{Refusal, Why};
use crate::memory::origin::MappedFile;
use crate::memory::sums;

/// Most bytes from the beginning that are part of the checksum: the header of a model is shorter.
const FIRST: u64 = 16 << 20;

/// Samples of the rest, and their size.
const SAMPLES: u64 = 64;
const SAMPLE: u64 = 4096;

/// The clock of a file system may stand still for so long: what changes twice in that time may get the same stamp. (A tick of the kernel's is 10 ms
/// at most; file systems that count in whole seconds are told by their stamps.)
const TICK: Duration = Duration::from_millis(20);

/// What the kernel says about a file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    /// Number of the file in its file system.
    pub inode: u64,
    /// When its content was changed, as programs may set it: seconds and nanoseconds.
    pub modified: [i64; 2],
    /// When anything of it was changed.
    pub changed: [i64; 2],
}

/// A file of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Model {
    /// Its path, without links.
    pub path: String,
    /// Its size.
    pub size: u64,
    /// What the kernel says.
    pub stamp: Stamp,
    /// How many of its first bytes the checksum covers.
    pub first: u64,
    /// That checksum.
    pub first_crc: u32,
    /// Checksum of samples from all over the file.
    pub samples_crc: u32,
}

impl Stamp {
    /// Of an open file, with its size.
    ///
    /// # Errors
    /// If the kernel does not tell.
    fn of(file: &File) -> Result<(Stamp, u64), Refusal> {
        let m = file.metadata().map_err(|e| Refusal::new(Why::Io, format!("a model's file: {e}")))?;
        let stamp = Stamp { inode: m.ino(), modified: [m.mtime(), m.mtime_nsec()], changed: [m.ctime(), m.ctime_nsec()] };
        Ok((stamp, m.size()))
    }

    /// Whether the last change is so long ago that the next one must get another stamp.
    fn is_settled(&self, now: SystemTime) -> bool {
        let [seconds, nanos] = self.changed;
        let wait = if nanos == 0 { Duration::from_secs(2) } else { TICK };
        let changed = u64::try_from(seconds).map(|s| Duration::new(s, u32::try_from(nanos).unwrap_or(0)));
        let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        // A change in the future is a clock that cannot be relied on.
        changed.is_ok_and(|c| since.checked_sub(c).is_some_and(|age| age > wait))
    }
}

/// A file that is being copied: what was said about it before the first byte was read.
pub struct Watched {
    stamp: Stamp,
    size: u64,
}

impl Watched {
    /// From now on.
    ///
    /// # Errors
    /// If it was changed a moment ago, or the kernel does not tell.
    pub fn new(file: &MappedFile) -> Result<Watched, Refusal> {
        let settled = |(stamp, size): (Stamp, u64)| stamp.is_settled(SystemTime::now()).then_some(Watched { stamp, size });
        if let Some(watched) = settled(Stamp::of(file.input.file())?) {
            return Ok(watched);
        }
        std::thread::sleep(2 * TICK);
        let path = file.input.path().display();
        settled(Stamp::of(file.input.file())?).ok_or_else(|| Refusal::new(Why::ModelChanged, format!("{path} was changed a moment ago")))
    }

    /// Whether nothing has changed since.
    ///
    /// # Errors
    /// If something has.
    pub fn check(&self, file: &MappedFile) -> Result<(), Refusal> {
        if Stamp::of(file.input.file())? == (self.stamp.clone(), self.size) {
            return Ok(());
        }
        Err(Refusal::new(Why::ModelChanged, format!("{} was changed while it was loaded", file.input.path().display())))
    }

    /// All about the file, which must not have changed since. Tensors begin at byte `data`, or behind it.
    ///
    /// # Errors
    /// If something has changed, or it cannot be read.
    pub fn describe(&self, file: &MappedFile, data: u64) -> Result<Model, Refusal> {
        let path = file.input.path();
        let text = path.to_str().ok_or_else(|| Refusal::new(Why::NoFile, format!("the path {} is not UTF-8", path.display())))?;
        let first = data.min(FIRST).min(self.size);
        let (first_crc, samples_crc) = read(file.input.file(), first, self.size)?;
        self.check(file)?;
        Ok(Model { path: text.to_owned(), size: self.size, stamp: self.stamp.clone(), first, first_crc, samples_crc })
    }
}

/// Checksums of the first bytes and of the samples.
fn read(file: &File, first: u64, size: u64) -> Result<(u32, u32), Refusal> {
    let of = |offset: u64, len: u64| sums::of_file(file.as_fd(), offset, len);
    let mut samples = crc32fast::Hasher::new();
    let last = size.saturating_sub(SAMPLE);
    for i in 0..SAMPLES {
        let at = u64::try_from(u128::from(last) * u128::from(i) / u128::from(SAMPLES - 1)).unwrap_or(last);
        samples.update(&of(at, SAMPLE.min(size))?.to_le_bytes());
    }
    Ok((of(0, first)?, samples.finalize()))
}

impl Model {
    /// Whether the open file is the one that was described.
    ///
    /// # Errors
    /// In what it differs.
    pub fn check(&self, file: &MappedFile) -> Result<(), Refusal> {
        self.check_file(file.input.file())
    }

    fn check_file(&self, file: &File) -> Result<(), Refusal> {
        let changed = |what: &str| Err(Refusal::new(Why::ModelChanged, format!("{} has changed: {what}", self.path)));
        let (stamp, size) = Stamp::of(file)?;
        match () {
            () if size != self.size => changed("its size"),
            () if stamp.inode != self.stamp.inode => changed("it is another file of that name"),
            () if stamp.modified != self.stamp.modified => changed("its time of modification"),
            () if stamp.changed != self.stamp.changed => changed("its time of change"),
            () if read(file, self.first.min(size), size)? != (self.first_crc, self.samples_crc) => changed("its content"),
            () => Ok(()),
        }
    }

    /// The same for the file that has its name now.
    ///
    /// # Errors
    /// If there is none, or in what it differs.
    pub fn check_by_name(&self) -> Result<(), Refusal> {
        use std::os::unix::fs::OpenOptionsExt;
        let gone = |e: std::io::Error| Refusal::new(Why::ModelGone, format!("{}: {e}", self.path));
        // A pipe in its place must not make us wait.
        let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(Path::new(&self.path)).map_err(gone)?;
        if !file.metadata().map_err(gone)?.is_file() {
            return Err(Refusal::new(Why::ModelGone, format!("{} is no file", self.path)));
        }
        self.check_file(&file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::mapping::FileMapping;
    use crate::memory::origin;
    use crate::memory::testing::Sample;
    use std::os::unix::fs::FileExt;

    const LEN: usize = 3_000_000;

    fn described(sample: &Sample) -> Model {
        let map = FileMapping::open(&sample.path).unwrap();
        let file = origin::behind(map.bytes().as_ptr(), LEN, None, false).ok().unwrap().file;
        Watched::new(&file).unwrap().describe(&file, 100_000).unwrap()
    }

    #[test]
    fn a_file_that_nobody_touched_is_the_same() {
        let sample = Sample::new("same", LEN);
        let model = described(&sample);
        assert_eq!(model.check_by_name(), Ok(()));
        assert_eq!((model.size, model.first), (LEN as u64, 100_000));
    }

    #[test]
    fn every_kind_of_change_is_told() {
        let told = |name: &str, change: fn(&Sample), why: Why, what: &str| {
            let sample = Sample::new(name, LEN);
            let model = described(&sample);
            change(&sample);
            let refusal = model.check_by_name().expect_err(name);
            assert!(refusal.why == why && refusal.message.contains(what), "{name}: {refusal:?}");
        };
        told("touched", |s| s.open_to_write().set_modified(SystemTime::now()).unwrap(), Why::ModelChanged, "time of modification");
        told("edited", |s| s.open_to_write().write_all_at(b"x", 2_000_001).unwrap(), Why::ModelChanged, "time of modification");
        told("longer", |s| s.open_to_write().set_len(LEN as u64 + 1).unwrap(), Why::ModelChanged, "size");
        told("removed", |s| std::fs::remove_file(&s.path).unwrap(), Why::ModelGone, "No such file");
        let replace = |s: &Sample| {
            let other = s.path.with_extension("other");
            std::fs::copy(&s.path, &other).unwrap();
            std::fs::rename(&other, &s.path).unwrap();
        };
        told("replaced", replace, Why::ModelChanged, "another file");
        let hidden = |s: &Sample| {
            let file = s.open_to_write();
            let before = file.metadata().unwrap().modified().unwrap();
            file.write_all_at(b"x", 2_000_001).unwrap();
            file.set_modified(before).unwrap();
        };
        told("hidden", hidden, Why::ModelChanged, "time of change");
    }

    #[test]
    fn content_is_compared_where_stamps_are_equal() {
        let sample = Sample::new("content", LEN);
        let model = described(&sample);
        for at in [5, 99_999, LEN as u64 - 1] {
            let file = sample.open_to_write();
            file.write_all_at(&[!sample.bytes[at as usize]], at).unwrap();
            let (stamp, size) = Stamp::of(&file).unwrap();
            let model = Model { stamp, size, ..model.clone() };
            assert!(model.check_file(&sample.open()).unwrap_err().message.contains("content"), "byte {at}");
            file.write_all_at(&sample.bytes[at as usize..][..1], at).unwrap();
        }
    }

    #[test]
    fn a_change_while_it_is_copied_is_told() {
        let sample = Sample::new("while", LEN);
        let map = FileMapping::open(&sample.path).unwrap();
        let file = origin::behind(map.bytes().as_ptr(), LEN, None, false).ok().unwrap().file;
        let watched = Watched::new(&file).unwrap();
        assert!(watched.check(&file).is_ok());
        sample.open_to_write().write_all_at(b"x", 7).unwrap();
        assert!(watched.check(&file).is_err() && watched.describe(&file, 10).is_err());
    }

    #[test]
    fn stamps_of_this_moment_and_of_the_future_are_not_settled() {
        let at = |seconds, nanos| Stamp { changed: [seconds, nanos], ..Stamp::default() };
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1000);
        assert!(at(999, 900_000_000).is_settled(now) && at(997, 0).is_settled(now));
        for stamp in [at(999, 990_000_000), at(1000, 1), at(1001, 5), at(999, 0), at(-1, 5)] {
            assert!(!stamp.is_settled(now), "{stamp:?}");
        }
    }
}
