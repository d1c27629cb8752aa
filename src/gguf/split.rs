//! A model in one or several files.
//!
//! Owns: finding the parts of a split model, their order and completeness, and the open files. Must not know: how a header is encoded.
//!
//! The parts of a split model are named `NAME-00001-of-0000N.gguf`; the first holds the metadata. As in stock, it is the one to open.

use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::error::{Error, ErrorKind};
use super::header::{Header, TensorInfo};
use super::source::open_regular;

/// `split.count` is a 16-bit number.
const MOST_PARTS: u64 = 65_535;

/// One file of a model.
#[derive(Debug)]
pub struct Part {
    path: PathBuf,
    file: File,
    header: Header,
    /// When the file was last written to, in seconds and nanoseconds, as it was before the header was read.
    modified: (i64, i64),
}

/// A model: one file, or all parts of a split one.
#[derive(Debug)]
pub struct Model {
    parts: Vec<Part>,
    /// Part and number in it of every tensor, sorted by name.
    by_name: Vec<(u32, u32)>,
}

/// A tensor and the part it stands in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelTensor<'a> {
    /// Index into [`Model::parts`].
    pub part: usize,
    /// The tensor; its offset counts in that part's file.
    pub info: TensorInfo<'a>,
}

impl Part {
    fn open(path: PathBuf) -> Result<Part, Error> {
        let read = || {
            let file = open_regular(&path).map_err(|e| Error::io(0, &e))?;
            let before = modified(&file.metadata().map_err(|e| Error::io(0, &e))?);
            let header = Header::read(&file)?;
            Ok((file, header, before))
        };
        let (file, header, modified) = read().map_err(|e: Error| e.in_file(&path))?;
        Ok(Part { path, file, header, modified })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The open file that the header was read from.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Its header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    fn fault(&self, kind: ErrorKind) -> Error {
        Error::new(0, kind).in_file(&self.path)
    }

    fn expect(&self, key: &'static str, expected: u64) -> Result<(), Error> {
        let found = self.header.u64(key);
        if found == Some(expected) { Ok(()) } else { Err(self.fault(ErrorKind::WrongPart { key, found, expected })) }
    }
}

impl Model {
    /// Opens the model whose first (or only) file is `path`.
    ///
    /// # Errors
    /// Any [`Error`]; it names the file in which the fault is.
    pub fn open(path: &Path) -> Result<Model, Error> {
        let first = Part::open(path.to_owned())?;
        let count = first.header.u64("split.count").unwrap_or(0);
        let mut parts = vec![first];
        if count > 1 {
            let first = &parts[0];
            if count > MOST_PARTS {
                return Err(first.fault(ErrorKind::Parts { count, most: MOST_PARTS }));
            }
            let Some(no) = first.header.u64("split.no") else {
                return Err(first.fault(ErrorKind::WrongPart { key: "split.no", found: None, expected: 0 }));
            };
            let Some(prefix) = prefix(path, no, count) else { return Err(first.fault(ErrorKind::SplitName { no, count })) };
            if no != 0 {
                let first_path = part_path(path, &prefix, 0, count);
                return Err(first.fault(ErrorKind::NotFirstPart { no, count, first: first_path }));
            }
            for i in 1..count {
                let part = Part::open(part_path(path, &prefix, i, count)).map_err(|e| match e.kind {
                    ErrorKind::Io { kind: std::io::ErrorKind::NotFound, .. } => {
                        Error { kind: ErrorKind::MissingPart { no: i, count, first: path.to_owned() }, ..e }
                    }
                    _ => e,
                })?;
                part.expect("split.no", i)?;
                if part.header.u64("split.count").is_some() {
                    part.expect("split.count", count)?;
                }
                parts.push(part);
            }
            let tensors = parts.iter().map(|p| p.header.tensor_count() as u64).sum();
            parts[0].expect("split.tensors.count", tensors)?;
        }
        let by_name = by_name(&parts)?;
        Ok(Model { parts, by_name })
    }

    /// The files, first part first.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// The first file's header, which holds the metadata.
    pub fn header(&self) -> &Header {
        &self.parts[0].header
    }

    /// How many tensors there are in all files.
    pub fn tensor_count(&self) -> usize {
        self.by_name.len()
    }

    /// All tensors, in file order.
    pub fn tensors(&self) -> impl Iterator<Item = ModelTensor<'_>> {
        self.parts.iter().enumerate().flat_map(|(part, p)| p.header.tensors().map(move |info| ModelTensor { part, info }))
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<ModelTensor<'_>> {
        let name_of = |&(part, i): &(u32, u32)| self.parts[part as usize].header.tensor_name(i);
        let i = self.by_name.binary_search_by(|t| name_of(t).cmp(name.as_bytes())).ok()?;
        let (part, i) = self.by_name[i];
        Some(ModelTensor { part: part as usize, info: self.parts[part as usize].header.tensor_by_index(i) })
    }

    /// Checks that no file became shorter or was written to since its header was read. A write within the time that the file system's
    /// clock cannot tell apart (a few milliseconds) goes unnoticed.
    ///
    /// # Errors
    /// [`ErrorKind::Shrunk`], [`ErrorKind::Changed`], or what the operating system says; it names the file.
    pub fn check_files(&self) -> Result<(), Error> {
        for part in &self.parts {
            let was = part.header.file_len();
            let now = part.file.metadata().map_err(|e| Error::io(0, &e).in_file(&part.path))?;
            if now.len() < was {
                return Err(Error::new(now.len(), ErrorKind::Shrunk { was }).in_file(&part.path));
            }
            if modified(&now) != part.modified {
                return Err(part.fault(ErrorKind::Changed));
            }
        }
        Ok(())
    }
}

fn modified(file: &Metadata) -> (i64, i64) {
    (file.mtime(), file.mtime_nsec())
}

fn by_name(parts: &[Part]) -> Result<Vec<(u32, u32)>, Error> {
    let mut all: Vec<(u32, u32)> = Vec::with_capacity(parts.iter().map(|p| p.header.tensor_count()).sum());
    for (part, p) in parts.iter().enumerate() {
        all.extend((0..p.header.tensor_count() as u32).map(|i| (part as u32, i)));
    }
    let name = |t: &(u32, u32)| parts[t.0 as usize].header.tensor_name(t.1);
    all.sort_unstable_by(|a, b| name(a).cmp(name(b)).then(a.cmp(b)));
    match all.windows(2).find(|w| name(&w[0]) == name(&w[1])) {
        Some(w) => {
            // Twice in one part is an error of its header, which was read before.
            let [other, here] = [w[0], w[1]].map(|t| &parts[t.0 as usize]);
            let tensor = String::from_utf8_lossy(name(&w[1])).into_owned();
            Err(here.fault(ErrorKind::InTwoParts { tensor, other: other.path.clone() }))
        }
        None => Ok(all),
    }
}

fn suffix(no: u64, count: u64) -> String {
    format!("-{:05}-of-{count:05}.gguf", no.saturating_add(1))
}

/// The file name without the part's suffix; `None` if it does not end in that suffix. It may be no UTF-8.
fn prefix(path: &Path, no: u64, count: u64) -> Option<OsString> {
    let name = path.file_name()?.as_bytes();
    let prefix = name.strip_suffix(suffix(no, count).as_bytes())?;
    (!prefix.is_empty()).then(|| OsStr::from_bytes(prefix).to_owned())
}

fn part_path(sibling: &Path, prefix: &OsStr, no: u64, count: u64) -> PathBuf {
    let mut name = prefix.to_owned();
    name.push(suffix(no, count));
    sibling.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::super::testing::File as Gguf;
    use super::*;

    fn part(no: u16, count: u16, total: i32, tensors: &[&str]) -> Vec<u8> {
        let mut f = Gguf::new(3).u16("split.no", no).u16("split.count", count).i32("split.tensors.count", total);
        for t in tensors {
            f = f.tensor(t, &[32], 0);
        }
        f.bytes()
    }

    fn write(dir: &Path, name: &str, bytes: &[u8]) -> PathBuf {
        let path = dir.join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    #[test]
    fn parts_are_found_whatever_the_bytes_of_their_names() {
        let path = Path::new("/d").join(OsStr::from_bytes(b"\xff-00001-of-00002.gguf"));
        let prefix = prefix(&path, 0, 2).unwrap();
        assert_eq!(part_path(&path, &prefix, 1, 2), Path::new("/d").join(OsStr::from_bytes(b"\xff-00002-of-00002.gguf")));
    }

    #[test]
    fn split_model_is_found_whole_from_its_first_part() {
        let dir = tempfile::tempdir().unwrap();
        let first = write(dir.path(), "m-00001-of-00003.gguf", &part(0, 3, 3, &["a"]));
        write(dir.path(), "m-00002-of-00003.gguf", &part(1, 3, 3, &["c", "b"]));
        write(dir.path(), "m-00003-of-00003.gguf", &part(2, 3, 3, &[]));
        let model = Model::open(&first).unwrap();
        assert_eq!(model.parts().len(), 3);
        assert_eq!(model.tensors().map(|t| (t.part, t.info.name)).collect::<Vec<_>>(), [(0, "a"), (1, "c"), (1, "b")]);
        assert_eq!(model.tensor("b").unwrap().part, 1);
        assert!(model.tensor("d").is_none());
        model.check_files().unwrap();
    }

    #[test]
    fn split_faults_name_the_file_and_what_to_open_instead() {
        let dir = tempfile::tempdir().unwrap();
        let first = write(dir.path(), "m-00001-of-00002.gguf", &part(0, 2, 2, &["a"]));
        let second = write(dir.path(), "m-00002-of-00002.gguf", &part(1, 2, 2, &["b"]));
        let e = Model::open(&second).unwrap_err();
        assert_eq!(e.kind, ErrorKind::NotFirstPart { no: 1, count: 2, first: first.clone() });
        let renamed = write(dir.path(), "x.gguf", &part(0, 2, 2, &["a"]));
        assert_eq!(Model::open(&renamed).unwrap_err().kind, ErrorKind::SplitName { no: 0, count: 2 });

        for (bytes, kind) in [
            (part(0, 2, 2, &["b"]), ErrorKind::WrongPart { key: "split.no", found: Some(0), expected: 1 }),
            (part(1, 3, 2, &["b"]), ErrorKind::WrongPart { key: "split.count", found: Some(3), expected: 2 }),
            (part(1, 2, 2, &["a"]), ErrorKind::InTwoParts { tensor: "a".into(), other: first.clone() }),
        ] {
            write(dir.path(), "m-00002-of-00002.gguf", &bytes);
            let e = Model::open(&first).unwrap_err();
            assert!(!e.to_string().contains("at byte"), "{e}");
            assert_eq!((e.kind, e.file.as_deref()), (kind, Some(second.as_path())));
        }
        write(dir.path(), "m-00002-of-00002.gguf", &part(1, 2, 2, &[]));
        let e = Model::open(&first).unwrap_err();
        assert_eq!(e.kind, ErrorKind::WrongPart { key: "split.tensors.count", found: Some(2), expected: 1 });
        write(dir.path(), "m-00001-of-00002.gguf", &part(0, 2, -1, &["a"]));
        let e = Model::open(&first).unwrap_err();
        assert_eq!(e.kind, ErrorKind::WrongPart { key: "split.tensors.count", found: None, expected: 1 });
        std::fs::remove_file(&second).unwrap();
        let e = Model::open(&first).unwrap_err();
        let said = format!("m-00002-of-00002.gguf: No such file or directory; it is part 2 of 2 of the model {}", first.display());
        assert!(e.to_string().ends_with(&said), "{e}");
        assert_eq!((e.kind, e.file), (ErrorKind::MissingPart { no: 1, count: 2, first }, Some(second)));
    }

    #[test]
    fn file_that_shrank_after_it_was_opened_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = write(dir.path(), "m.gguf", &Gguf::new(3).tensor("a", &[64], 0).bytes());
        let model = Model::open(&path).unwrap();
        let len = model.header().file_len();
        File::options().write(true).open(&path).unwrap().set_len(len - 1).unwrap();
        let e = model.check_files().unwrap_err();
        assert_eq!((e.kind, e.file), (ErrorKind::Shrunk { was: len }, Some(path)));
    }

    #[test]
    fn file_that_was_written_to_after_it_was_opened_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = write(dir.path(), "m.gguf", &Gguf::new(3).tensor("a", &[64], 0).bytes());
        let model = Model::open(&path).unwrap();
        model.check_files().unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        // The clock of the file system may be too coarse to tell a write that follows at once.
        file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        let e = model.check_files().unwrap_err();
        assert!(e.to_string().starts_with(path.to_str().unwrap()), "{e}");
        assert_eq!((e.kind, e.file), (ErrorKind::Changed, Some(path)));
    }

    #[test]
    fn more_parts_than_a_model_can_have_are_refused_with_their_number() {
        let dir = tempfile::tempdir().unwrap();
        let f = Gguf::new(3).u16("split.no", 0).pair("split.count", 10, &u64::MAX.to_le_bytes());
        let path = write(dir.path(), "m-00001-of-00002.gguf", &f.bytes());
        let e = Model::open(&path).unwrap_err();
        assert_eq!(e.kind, ErrorKind::Parts { count: u64::MAX, most: 65_535 });
        assert!(e.to_string().contains("split.count is 18446744073709551615, but a model has at most 65535 parts"), "{e}");
    }
}
