//! A bounded, buffered cursor over a file.
//!
//! Owns: the comparison of every length with what is left of the file, before anything is read or allocated. Must not know: GGUF.

use std::fs::File;
use std::io::{ErrorKind as Io, Read, Seek, SeekFrom};
use std::path::Path;

/// Opens a regular file. Anything else is refused without waiting for it: a named pipe would make us wait for its writer.
pub(super) fn open_regular(path: &Path) -> std::io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(std::io::Error::other("it is not a regular file")) }
}

use super::error::{Error, ErrorKind};

/// Bytes read at a time. A header is small and read front to back; the data behind it is never touched.
const BUFFER_BYTES: u64 = 64 << 10;

/// `inner` from its first byte, with its size fixed when it was opened.
pub(super) struct Source<R> {
    inner: R,
    len: u64,
    /// The next byte to hand out.
    at: u64,
    buffer: Vec<u8>,
    /// The part of `buffer` that was not handed out yet. `inner` stands at `at + (end - start)`.
    start: usize,
    end: usize,
}

impl<R: Read + Seek> Source<R> {
    /// Takes the size from the source's end and goes back to its start.
    pub(super) fn new(mut inner: R) -> Result<Source<R>, Error> {
        let len = inner.seek(SeekFrom::End(0)).map_err(|e| Error::io(0, &e))?;
        inner.seek(SeekFrom::Start(0)).map_err(|e| Error::io(0, &e))?;
        // Never more than the file, so that no allocation is larger than the file.
        let buffer = vec![0; len.min(BUFFER_BYTES) as usize];
        Ok(Source { inner, len, at: 0, buffer, start: 0, end: 0 })
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    pub(super) fn at(&self) -> u64 {
        self.at
    }

    pub(super) fn left(&self) -> u64 {
        self.len - self.at
    }

    /// Whether `need` bytes are left.
    pub(super) fn check(&self, need: u64, what: &'static str) -> Result<(), Error> {
        if need <= self.left() { Ok(()) } else { Err(Error::new(self.at, ErrorKind::Truncated { what, need, left: self.left() })) }
    }

    /// Fills `out` completely.
    pub(super) fn read(&mut self, out: &mut [u8], what: &'static str) -> Result<(), Error> {
        self.check(out.len() as u64, what)?;
        let mut done = 0;
        while done < out.len() {
            if self.start == self.end {
                self.refill()?;
            }
            let n = (self.end - self.start).min(out.len() - done);
            out[done..done + n].copy_from_slice(&self.buffer[self.start..self.start + n]);
            self.start += n;
            self.at += n as u64;
            done += n;
        }
        Ok(())
    }

    /// Moves over `n` bytes.
    pub(super) fn skip(&mut self, n: u64, what: &'static str) -> Result<(), Error> {
        self.check(n, what)?;
        let buffered = (self.end - self.start) as u64;
        self.at += n;
        if n <= buffered {
            self.start += n as usize;
        } else {
            self.start = 0;
            self.end = 0;
            self.inner.seek(SeekFrom::Start(self.at)).map_err(|e| Error::io(self.at, &e))?;
        }
        Ok(())
    }

    /// Only called while bytes are left, so the end of `inner` means that the file shrank.
    fn refill(&mut self) -> Result<(), Error> {
        loop {
            match self.inner.read(&mut self.buffer) {
                Ok(0) => return Err(Error::new(self.at, ErrorKind::Shrunk { was: self.len })),
                Ok(n) => {
                    self.start = 0;
                    // A file that grew meanwhile is read to its old size only.
                    self.end = n.min(usize::try_from(self.left()).unwrap_or(usize::MAX));
                    return Ok(());
                }
                Err(e) if e.kind() == Io::Interrupted => {}
                Err(e) => return Err(Error::io(self.at, &e)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    /// Says it has `len` bytes but ends after the ones it has.
    struct Shrinking {
        inner: Cursor<Vec<u8>>,
        len: u64,
    }

    impl Read for Shrinking {
        fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
            self.inner.read(out)
        }
    }

    impl Seek for Shrinking {
        fn seek(&mut self, pos: SeekFrom) -> std::io::Result<u64> {
            match pos {
                SeekFrom::End(0) => Ok(self.len),
                other => self.inner.seek(other),
            }
        }
    }

    #[test]
    fn reads_and_skips_agree_with_the_bytes_across_buffer_borders() {
        let bytes: Vec<u8> = (0..200_000u32).map(|i| (i * 7 + i / 251) as u8).collect();
        let mut s = Source::new(Cursor::new(&bytes)).unwrap();
        let mut seed = fastrand::Rng::new();
        let mut at = 0usize;
        while at < bytes.len() {
            let n = seed.usize(1..5000).min(bytes.len() - at);
            if seed.bool() {
                let mut out = vec![0; n];
                s.read(&mut out, "test").unwrap();
                assert_eq!(out, bytes[at..at + n]);
            } else {
                s.skip(n as u64, "test").unwrap();
            }
            at += n;
            assert_eq!(s.at(), at as u64);
        }
        assert!(matches!(s.read(&mut [0], "test").unwrap_err().kind, ErrorKind::Truncated { need: 1, left: 0, .. }));
    }

    #[test]
    fn file_that_shrinks_while_it_is_read_is_an_error_and_not_a_short_read() {
        let mut s = Source::new(Shrinking { inner: Cursor::new(vec![0; 10]), len: 1000 }).unwrap();
        let e = s.read(&mut [0; 20], "test").unwrap_err();
        assert_eq!(e.kind, ErrorKind::Shrunk { was: 1000 });
        assert_eq!(e.offset, 10);
    }

    #[test]
    fn skip_beyond_the_end_is_refused_before_it_is_done() {
        let mut s = Source::new(Cursor::new(vec![0u8; 8])).unwrap();
        assert!(s.skip(u64::MAX, "test").is_err());
        assert_eq!(s.at(), 0);
    }
}
