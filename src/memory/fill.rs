//! Reads parts of files straight into memory, in large requests on a few threads, instead of through page faults.
//!
//! Owns: the order of requests, progress and cancelling, and what a file that is too short means. Must not know: tensors, which kind of memory
//! the bytes go to.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::error::{Error, Result, Status};

/// Bytes of one request: large enough for a disk to work at its full rate, small enough for progress and cancelling.
const REQUEST: usize = 8 << 20;

/// Reads outstanding at once. Disks need a few to reach their rate; more only fill the queue.
const WORKERS: usize = 4;

/// Longest time between two reports of progress; there is also one for every [`REQUEST`] bytes.
const TICK: Duration = Duration::from_millis(100);

/// `len` bytes at `offset` of `file`, wanted at `target`.
pub struct Piece<'a> {
    /// The open file.
    pub file: &'a File,
    /// Its path, for messages.
    pub path: &'a Path,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Where the bytes go.
    pub target: *mut u8,
    /// Number of bytes.
    pub len: usize,
}

// SAFETY: the target belongs to no thread; who makes a piece vouches for it in `fill`.
unsafe impl Sync for Piece<'_> {}

/// One read.
struct Request {
    piece: usize,
    at: usize,
    len: usize,
}

/// Reads all pieces. `progress` is called on this thread, after every 8 MiB or 100 ms and at the end, with the bytes read so far and the bytes of all pieces;
/// when it returns false the rest is not read.
///
/// # Errors
/// [`Status::Cancelled`] if `progress` said so; [`Status::Io`], naming the file, if it cannot be read or ends too early. The targets may then
/// hold a part of the bytes.
///
/// # Safety
/// Each piece's target must be writable for its length, used by nobody else meanwhile, and no two targets may overlap.
pub unsafe fn fill(pieces: &[Piece<'_>], progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<()> {
    let total: u64 = pieces.iter().map(|p| p.len as u64).sum();
    let split = |(piece, p): (usize, &Piece<'_>)| {
        let len = p.len;
        (0..len).step_by(REQUEST).map(move |at| Request { piece, at, len: REQUEST.min(len - at) })
    };
    let requests: Vec<Request> = pieces.iter().enumerate().flat_map(split).collect();
    let (next, done, stop) = (AtomicUsize::new(0), AtomicU64::new(0), AtomicBool::new(false));
    let (ended, endings) = mpsc::channel::<Result<()>>();
    let work = |ended: mpsc::Sender<Result<()>>| {
        while !stop.load(Ordering::Relaxed) {
            let Some(request) = requests.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
            // SAFETY: the caller vouches for the target, and every request has its own part of it.
            let read = unsafe { read(&pieces[request.piece], request) };
            match &read {
                Ok(()) => drop(done.fetch_add(request.len as u64, Ordering::Relaxed)),
                Err(_) => stop.store(true, Ordering::Relaxed),
            }
            // The receiver is gone once somebody has stopped.
            let _ = ended.send(read);
        }
    };
    let cancelled = std::thread::scope(|scope| -> Result<bool> {
        for _ in 0..WORKERS.min(requests.len()) {
            let (sender, work) = (ended.clone(), &work);
            let started = std::thread::Builder::new().name("berth-fill".into()).spawn_scoped(scope, move || work(sender));
            if started.is_err() && next.load(Ordering::Relaxed) == 0 {
                // No thread to be had: this one does it all, without progress.
                work(ended.clone());
            }
        }
        drop(ended);
        let (mut said, mut last) = (0, Instant::now());
        loop {
            match endings.recv_timeout(TICK) {
                Ok(read) => read?,
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => return Ok(false),
            }
            let now = done.load(Ordering::Relaxed);
            if now - said >= REQUEST as u64 || last.elapsed() >= TICK {
                (said, last) = (now, Instant::now());
                if !progress(now, total) {
                    stop.store(true, Ordering::Relaxed);
                    return Ok(true);
                }
            }
        }
    })?;
    if cancelled || !progress(done.load(Ordering::Relaxed), total) {
        return Err(Error::new(Status::Cancelled, "reading was cancelled"));
    }
    Ok(())
}

/// Reads `target.len()` bytes at `offset`.
///
/// # Errors
/// As [`fill`].
pub fn fill_slice(file: &File, path: &Path, offset: u64, target: &mut [u8]) -> Result<()> {
    let piece = Piece { file, path, offset, target: target.as_mut_ptr(), len: target.len() };
    // SAFETY: the slice is writable and borrowed exclusively until the call returns.
    unsafe { fill(&[piece], &mut |_, _| true) }
}

/// # Safety
/// The request's part of the piece's target must be writable and used by nobody else.
unsafe fn read(piece: &Piece<'_>, request: &Request) -> Result<()> {
    // SAFETY: by the caller's promise. Reading into memory that is not initialised is what `read` is for; the slice is only written.
    let target = unsafe { std::slice::from_raw_parts_mut(piece.target.add(request.at), request.len) };
    let offset = piece.offset.checked_add(request.at as u64).ok_or_else(|| Error::invalid("an offset wraps around"))?;
    piece.file.read_exact_at(target, offset).map_err(|cause| {
        let path = piece.path.display();
        if cause.kind() == std::io::ErrorKind::UnexpectedEof {
            let end = piece.file.metadata().map_or(0, |m| m.len());
            let wanted = offset + request.len as u64;
            Error::new(Status::Io, format!("{path} ends at byte {end}, but {wanted} are needed: it was truncated or is incomplete"))
        } else {
            Error::os(format_args!("read {} bytes at {offset} of {path}", request.len), &cause)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    struct Scratch(PathBuf, Vec<u8>);

    impl Scratch {
        fn new(name: &str, len: usize) -> Scratch {
            let path = std::env::temp_dir().join(format!("berth-fill-{name}-{}", std::process::id()));
            let mut state = 0x9E37_79B9_7F4A_7C15u64;
            let bytes: Vec<u8> = (0..len)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (state >> 56) as u8
                })
                .collect();
            std::fs::write(&path, &bytes).unwrap();
            Scratch(path, bytes)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    #[test]
    fn every_byte_arrives_in_its_place_and_none_beside_it() {
        let scratch = Scratch::new("bytes", 3 * REQUEST + 12_345);
        let file = File::open(&scratch.0).unwrap();
        let mut target = vec![0xEEu8; scratch.1.len() + 64];
        // Three pieces that leave gaps: one longer than a request, one of one byte, one empty.
        let parts = [(1u64, 2 * REQUEST + 7), (2 * REQUEST as u64 + 100, 1), (5, 0)];
        let base = target.as_mut_ptr();
        let pieces =
            parts.map(|(offset, len)| Piece { file: &file, path: &scratch.0, offset, target: base.wrapping_add(offset as usize), len });
        let mut last = (0, 0);
        // SAFETY: the parts lie in the vector and do not overlap.
        unsafe {
            fill(&pieces, &mut |done, total| {
                last = (done, total);
                true
            })
        }
        .unwrap();
        let total: u64 = parts.iter().map(|p| p.1 as u64).sum();
        assert_eq!(last, (total, total));
        for (i, byte) in target.iter().enumerate() {
            let inside = parts.iter().any(|(offset, len)| (*offset as usize..*offset as usize + len).contains(&i));
            assert_eq!(*byte, if inside { scratch.1[i] } else { 0xEE }, "byte {i}");
        }
    }

    #[test]
    fn a_file_that_is_too_short_is_named_with_its_length() {
        let scratch = Scratch::new("short", 1000);
        let file = File::open(&scratch.0).unwrap();
        let mut target = vec![0u8; 2000];
        let piece = Piece { file: &file, path: &scratch.0, offset: 10, target: target.as_mut_ptr(), len: 2000 };
        // SAFETY: the vector is that long.
        let error = unsafe { fill(&[piece], &mut |_, _| true) }.unwrap_err();
        assert_eq!(error.status, Status::Io);
        assert!(error.message.contains(scratch.0.to_str().unwrap()) && error.message.contains("ends at byte 1000"), "{error}");
    }

    #[test]
    fn it_can_be_cancelled() {
        let scratch = Scratch::new("cancel", 100);
        let file = File::open(&scratch.0).unwrap();
        let mut target = vec![0u8; 100];
        let piece = Piece { file: &file, path: &scratch.0, offset: 0, target: target.as_mut_ptr(), len: 100 };
        // SAFETY: the vector is that long.
        let error = unsafe { fill(&[piece], &mut |_, _| false) }.unwrap_err();
        assert_eq!(error.status, Status::Cancelled);
    }

    #[test]
    fn it_can_be_cancelled_in_the_middle() {
        let scratch = Scratch::new("middle", 16 * REQUEST);
        let file = File::open(&scratch.0).unwrap();
        let mut target = vec![0u8; 16 * REQUEST];
        let piece = Piece { file: &file, path: &scratch.0, offset: 0, target: target.as_mut_ptr(), len: target.len() };
        let mut calls = Vec::new();
        let mut cancel = |done, total| {
            calls.push((done, total));
            false
        };
        // SAFETY: the vector is that long.
        let error = unsafe { fill(&[piece], &mut cancel) }.unwrap_err();
        assert_eq!(error.status, Status::Cancelled);
        assert!(matches!(calls[..], [(done, total)] if done > 0 && done <= total), "{calls:?}");
    }

    #[test]
    fn nothing_to_read_is_done_at_once() {
        let mut calls = 0;
        // SAFETY: there is no piece.
        unsafe {
            fill(&[], &mut |done, total| {
                calls += 1;
                (done, total) == (0, 0)
            })
        }
        .unwrap();
        assert_eq!(calls, 1);
    }
}
