//! Fills memory: from parts of files, in large requests on a few threads instead of through page faults, or from other memory.
//!
//! Owns: the order of requests, progress and cancelling. Must not know: tensors, which kind of memory the bytes go to.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::input::{BLOCK, Input, REQUEST};
use super::target::Target;
use crate::error::{Error, Result, Status};

/// Reads outstanding at once. Disks need a few to reach their rate; more only fill the queue.
const WORKERS: usize = 4;

/// Most bytes between two reports of progress.
const SAY: u64 = 8 << 20;

/// Longest time between two reports of progress.
const TICK: Duration = Duration::from_millis(100);

/// Bytes of a file that are wanted somewhere; as many as the target has.
pub struct Piece<'a> {
    /// The file.
    pub input: &'a Input,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Where the bytes go.
    pub target: Target<'a>,
}

/// How the bytes of a piece were read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// All of them.
    pub bytes: u64,
    /// Those read past the page cache.
    pub direct: u64,
}

/// One read.
struct Request {
    piece: usize,
    at: usize,
    len: usize,
}

/// The reads of a piece. All but the first start at a block of the file, so that none is read twice.
fn requests<'a>((piece, p): (usize, &'a Piece<'_>)) -> impl Iterator<Item = Request> + use<'a> {
    let (mut at, total, into) = (0, p.target.len(), (p.offset % BLOCK as u64) as usize);
    std::iter::from_fn(move || {
        let most = if at == 0 { REQUEST - into } else { REQUEST };
        let len = most.min(total - at);
        let request = Request { piece, at, len };
        at += len;
        (len > 0).then_some(request)
    })
}

/// Reads all pieces. `progress` is called on this thread, after every 8 MiB or 100 ms and at the end, with the bytes read so far and the bytes of
/// all pieces; when it returns false the rest is not read. The result is one for each piece.
///
/// # Errors
/// [`Status::Cancelled`] if `progress` said so; [`Status::Io`], naming the file, if it cannot be read or ends too early. The targets may then
/// hold a part of the bytes.
///
/// # Safety
/// Each piece's target must be writable, used by nobody else meanwhile, and no two targets may overlap.
pub unsafe fn fill(pieces: &[Piece<'_>], progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<Vec<Done>> {
    let total: u64 = pieces.iter().map(|p| p.target.len() as u64).sum();
    let requests: Vec<Request> = pieces.iter().enumerate().flat_map(requests).collect();
    let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let (done, direct) = (AtomicU64::new(0), pieces.iter().map(|_| AtomicU64::new(0)).collect::<Vec<_>>());
    let (ended, endings) = mpsc::channel::<Result<()>>();
    let one = |request: &Request| -> Result<()> {
        let Piece { input, offset, target } = &pieces[request.piece];
        let offset = offset.checked_add(request.at as u64).ok_or_else(|| Error::invalid("an offset wraps around"))?;
        // SAFETY: the caller vouches for the target, and every request has its own part of it.
        let was_direct = unsafe { input.read(offset, target, request.at, request.len) }?;
        done.fetch_add(request.len as u64, Ordering::Relaxed);
        direct[request.piece].fetch_add(if was_direct { request.len as u64 } else { 0 }, Ordering::Relaxed);
        Ok(())
    };
    let plan = pieces.iter().find_map(|p| p.target.plan());
    let work = |ended: mpsc::Sender<Result<()>>| {
        // Pages of a file come from where the thread that writes them wishes. A refusal has been told when the arena was made.
        let _scope = plan.and_then(|p| p.for_this_thread().ok());
        while !stop.load(Ordering::Relaxed) {
            let Some(request) = requests.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
            let read = one(request);
            if read.is_err() {
                stop.store(true, Ordering::Relaxed);
            }
            // The receiver is gone once somebody has stopped.
            let _ = ended.send(read);
        }
    };
    let cancelled = std::thread::scope(|scope| -> Result<bool> {
        // One request is not worth a thread.
        let workers = if requests.len() > 1 { WORKERS.min(requests.len()) } else { 0 };
        let mut started = 0;
        for _ in 0..workers {
            let (sender, work) = (ended.clone(), &work);
            let thread = std::thread::Builder::new().name("berth-fill".into()).spawn_scoped(scope, move || work(sender));
            started += usize::from(thread.is_ok());
        }
        if started == 0 {
            // No thread, or none to be had: this one does it all, without progress.
            work(ended.clone());
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
            if now - said >= SAY || last.elapsed() >= TICK {
                (said, last) = (now, Instant::now());
                if !progress(now, total) {
                    stop.store(true, Ordering::Relaxed);
                    return Ok(true);
                }
            }
        }
    })?;
    pieces.iter().for_each(|p| p.target.complete());
    if cancelled || !progress(done.load(Ordering::Relaxed), total) {
        return Err(Error::new(Status::Cancelled, "reading was cancelled"));
    }
    Ok(pieces.iter().zip(direct).map(|(p, direct)| Done { bytes: p.target.len() as u64, direct: direct.into_inner() }).collect())
}

/// Reads `target.len()` bytes at `offset`.
///
/// # Errors
/// As [`fill`].
pub fn fill_slice(file: &File, path: &Path, offset: u64, target: &mut [u8]) -> Result<()> {
    let file = file.try_clone().map_err(|e| Error::os(format_args!("open {} again", path.display()), &e))?;
    let input = Input::new(file, path, true);
    let piece = Piece { input: &input, offset, target: Target::memory(target.as_mut_ptr(), target.len()) };
    // SAFETY: the slice is writable and borrowed exclusively until the call returns.
    unsafe { fill(&[piece], &mut |_, _| true) }.map(drop)
}

/// Copies memory into the target, as many bytes as it has. `progress` is called after every 8 MiB with the bytes copied so far.
///
/// # Safety
/// The target must be writable and used by nobody else meanwhile, and the source readable. They may overlap.
pub unsafe fn copy(source: *const u8, target: &Target<'_>, progress: &mut dyn FnMut(u64)) {
    let len = target.len();
    let _scope = target.plan().and_then(|p| p.for_this_thread().ok());
    if target.overlaps(source, len) {
        // In parts, a part of the source would be overwritten before it is copied; and a file must not be written from its own pages.
        // SAFETY: by the caller's promise.
        unsafe { std::ptr::copy(source, target.base(), len) };
        target.written(0, len);
        progress(len as u64);
    } else {
        for at in (0..len).step_by(SAY as usize) {
            let n = (len - at).min(SAY as usize);
            // SAFETY: by the caller's promise.
            unsafe { target.put(at, source.add(at), n) };
            progress((at + n) as u64);
        }
    }
    target.complete();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::arena::{Arena, Directory};
    use crate::memory::testing::{Sample, alone, random};
    use crate::memory::{HUGE_PAGE, Region, mapping::FileMapping, origin, system};

    /// Reads one part of the sample into a target, without progress.
    fn read(sample: &Sample, offset: u64, target: Target<'_>) -> Result<Vec<Done>> {
        let input = Input::new(sample.open(), &sample.path, true);
        // SAFETY: the tests give targets of their own.
        unsafe { fill(&[Piece { input: &input, offset, target }], &mut |_, _| true) }
    }

    fn memory(bytes: &mut [u8]) -> Target<'static> {
        Target::memory(bytes.as_mut_ptr(), bytes.len())
    }

    #[test]
    fn every_byte_arrives_in_its_place_and_none_beside_it() {
        let sample = Sample::new("bytes", 3 * REQUEST + 12_345);
        let input = Input::new(sample.open(), &sample.path, true);
        for cached in [true, false] {
            if !cached {
                system::drop_cached(&sample.open()).unwrap();
            }
            let mut bytes = vec![0xEEu8; sample.bytes.len() + 64];
            // Three pieces that leave gaps: one longer than a request, one of one byte, one empty.
            let parts = [(1u64, 2 * REQUEST + 7), (2 * REQUEST as u64 + 100, 1), (5, 0)];
            let base = bytes.as_mut_ptr();
            let target = |(offset, len)| Target::memory(base.wrapping_add(offset as usize), len);
            let pieces = parts.map(|part: (u64, usize)| Piece { input: &input, offset: part.0, target: target(part) });
            let mut last = (0, 0);
            // SAFETY: the parts lie in the vector and do not overlap.
            let done = unsafe {
                fill(&pieces, &mut |done, total| {
                    last = (done, total);
                    true
                })
            }
            .unwrap();
            let total: u64 = parts.iter().map(|p| p.1 as u64).sum();
            assert_eq!((last, done.iter().map(|d| d.bytes).sum()), ((total, total), total));
            for (i, byte) in bytes.iter().enumerate() {
                let inside = parts.iter().any(|(offset, len)| (*offset as usize..*offset as usize + len).contains(&i));
                assert_eq!(*byte, if inside { sample.bytes[i] } else { 0xEE }, "byte {i}");
            }
        }
    }

    #[test]
    fn an_arena_gets_the_same_bytes_by_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let directory = Directory::open(dir.path(), false).unwrap();
        let sample = Sample::new("arena", 2 * REQUEST + 777);
        for (offset, at, len) in [(0, 0, sample.bytes.len()), (33, 64, REQUEST), (4096, 4096, 8192), (100, 1, 5), (7, 3, REQUEST + 9)] {
            for cached in [true, false] {
                let region = Region::from(Arena::new(&directory, 3 * REQUEST).unwrap().slice(3 * REQUEST).unwrap());
                if !cached {
                    system::drop_cached(&sample.open()).unwrap();
                }
                read(&sample, offset as u64, region.target(at, len).unwrap()).unwrap();
                // SAFETY: the region owns these bytes and nobody writes them now.
                let bytes = unsafe { std::slice::from_raw_parts(region.base(), region.len()) };
                assert!(bytes[at..at + len] == sample.bytes[offset..offset + len], "{len} bytes of {offset}");
                assert!(bytes[..at].iter().chain(&bytes[at + len..]).all(|b| *b == 0), "{len} bytes of {offset}: a byte beside them");
            }
        }
    }

    #[test]
    fn an_arena_is_filled_with_few_page_faults() {
        if !alone("memory::fill::tests::an_arena_is_filled_with_few_page_faults") {
            return;
        }
        let faults = || {
            // SAFETY: an all-zero rusage is valid, and the call fills it in.
            let usage = unsafe {
                let mut usage: libc::rusage = std::mem::zeroed();
                libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
                usage
            };
            usage.ru_majflt
        };
        let dir = tempfile::tempdir().unwrap();
        let directory = Directory::open(dir.path(), false).unwrap();
        const LEN: usize = 64 << 20;
        let sample = Sample::new("faults", LEN);
        let map = FileMapping::open(&sample.path).unwrap();
        system::drop_cached(&sample.open()).unwrap();
        let region = Region::from(Arena::new(&directory, LEN).unwrap().slice(LEN).unwrap());
        let (before, start) = (faults(), Instant::now());
        let origin = origin::behind(map.bytes().as_ptr(), LEN, None, true).ok().unwrap();
        let piece = Piece { input: &origin.file.input, offset: origin.offset, target: region.target(0, LEN).unwrap() };
        // SAFETY: the region is this test's.
        let done = unsafe { fill(&[piece], &mut |_, _| true) }.unwrap();
        let rate = LEN as f64 / start.elapsed().as_secs_f64() / 1e9;
        let major = faults() - before;
        eprintln!("64 MiB into an arena: {rate:.2} GB/s, {} bytes past the page cache, {major} major faults", done[0].direct);
        if ["ext4", "xfs"].map(Some).contains(&system::file_system(&sample.path).as_deref()) {
            assert_eq!(done, [Done { bytes: LEN as u64, direct: LEN as u64 }]);
        }
        assert!(major < (LEN >> 20) as i64, "{major} major faults");
        // SAFETY: the region owns these bytes and nobody writes them now.
        assert!(unsafe { std::slice::from_raw_parts(region.base(), LEN) } == sample.bytes);
    }

    #[test]
    fn copies_arrive_too_overlapping_or_not() {
        let dir = tempfile::tempdir().unwrap();
        let arena = || Region::from(Arena::new(&Directory::open(dir.path(), false).unwrap(), 24 << 20).unwrap().slice(24 << 20).unwrap());
        let pageable = || Region::from(crate::memory::pageable::Pageable::new(24 << 20).unwrap());
        for region in [arena(), pageable()] {
            let len = 17 * (1 << 20) + 5;
            let source = random(len, 3);
            let mut said = Vec::new();
            // SAFETY: region and source are this test's.
            unsafe { copy(source.as_ptr(), &region.target(11, len).unwrap(), &mut |n| said.push(n)) };
            assert_eq!(said, [8 << 20, 16 << 20, len as u64]);
            // SAFETY: the region owns these bytes and nobody writes them now.
            let bytes = || unsafe { std::slice::from_raw_parts(region.base(), region.len()) };
            assert!(bytes()[11..11 + len] == source && bytes()[..11] == [0; 11] && bytes()[11 + len..].iter().all(|b| *b == 0));
            for shift in [1, HUGE_PAGE] {
                let before = bytes()[..len].to_vec();
                // SAFETY: as above.
                unsafe { copy(region.base(), &region.target(shift, len).unwrap(), &mut |_| {}) };
                assert!(bytes()[shift..shift + len] == before, "moved by {shift}");
            }
        }
    }

    #[test]
    fn fills_at_the_same_time_do_not_disturb_each_other() {
        let sample = Sample::new("threads", 3 * REQUEST + 99);
        let input = Input::new(sample.open(), &sample.path, true);
        std::thread::scope(|scope| {
            for i in 0..6usize {
                let (input, sample) = (&input, &sample);
                scope.spawn(move || {
                    let offset = 31 * i;
                    let mut bytes = vec![0; sample.bytes.len() - offset];
                    let piece = Piece { input, offset: offset as u64, target: memory(&mut bytes) };
                    // SAFETY: the vector is this thread's.
                    unsafe { fill(&[piece], &mut |_, _| true) }.unwrap();
                    assert!(bytes == sample.bytes[offset..]);
                });
            }
        });
    }

    #[test]
    fn a_file_that_is_too_short_is_named_with_its_length() {
        let sample = Sample::new("short", 1000);
        let mut bytes = vec![0u8; 2000];
        let error = read(&sample, 10, memory(&mut bytes)).unwrap_err();
        assert_eq!(error.status, Status::Io);
        assert!(error.message.contains(sample.path.to_str().unwrap()) && error.message.contains("ends at byte 1000"), "{error}");
        let beyond = read(&sample, u64::MAX - 5, memory(&mut bytes)).unwrap_err();
        assert!(matches!(beyond.status, Status::Io | Status::InvalidArgument), "{beyond}");
    }

    #[test]
    fn it_can_be_cancelled() {
        let sample = Sample::new("cancel", 100);
        let input = Input::new(sample.open(), &sample.path, true);
        let mut bytes = vec![0u8; 100];
        let piece = Piece { input: &input, offset: 0, target: memory(&mut bytes) };
        // SAFETY: the vector is that long.
        let error = unsafe { fill(&[piece], &mut |_, _| false) }.unwrap_err();
        assert_eq!(error.status, Status::Cancelled);
    }

    #[test]
    fn it_can_be_cancelled_in_the_middle() {
        let sample = Sample::new("middle", 32 * REQUEST);
        let input = Input::new(sample.open(), &sample.path, true);
        let mut bytes = vec![0u8; 32 * REQUEST];
        let piece = Piece { input: &input, offset: 0, target: memory(&mut bytes) };
        let mut calls = Vec::new();
        // A slow disk is heard of before anything is done.
        let mut cancel = |done, total| {
            calls.push((done, total));
            done == 0
        };
        // SAFETY: the vector is that long.
        let error = unsafe { fill(&[piece], &mut cancel) }.unwrap_err();
        assert_eq!(error.status, Status::Cancelled);
        let (last, before) = calls.split_last().unwrap();
        assert!(last.0 > 0 && last.0 <= last.1 && before.iter().all(|(done, _)| *done == 0), "{calls:?}");
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
