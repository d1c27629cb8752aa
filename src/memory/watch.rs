//! Bounds the dirty bytes of an arena that somebody else fills by storing to its mapping: a host that reads a model's file straight into it.
//!
//! Owns: one thread, which looks how much is dirty and has it written to the disk, for as long as something is read. Must not know: who reads.
//!
//! Nobody tells when bytes are stored, and a store cannot be made to wait. But a page that is on its way to the disk is one that a full cgroup waits
//! for instead of killing; and the kernel by itself starts only when a tenth of the machine's memory is dirty. Writing all the time instead makes a
//! load two to three times slower where memory is plenty, since the disk reads at the same time, and asking all the time takes as long as the load itself, since
//! the kernel counts page by page. So both are done as seldom as the bound allows.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::arena::Arena;
use super::writeback;

/// No host stores faster, in bytes per millisecond: so much can have become dirty since the last look.
const FASTEST: usize = 4_000_000;

/// Shortest and longest time between two looks, in milliseconds.
const TICKS: (u64, u64) = (2, 50);

/// When nothing was read for so long, the load is over, whatever the host says.
const IDLE: Duration = Duration::from_secs(5);

/// Reading less than this is no load.
const LITTLE: u64 = 1 << 20;

/// Watches until it is dropped.
pub struct Watch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    stop: Mutex<bool>,
    stopped: Condvar,
}

impl Shared {
    fn stop(&self) -> MutexGuard<'_, bool> {
        self.stop.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether to go on after a moment.
    fn wait(&self, tick: Duration) -> bool {
        let stop = self.stop();
        let (stop, _) = self.stopped.wait_timeout_while(stop, tick, |stop| !*stop).unwrap_or_else(PoisonError::into_inner);
        !*stop
    }
}

impl Watch {
    /// Of all bytes of an arena. `None` if there can be no thread: then the kernel alone bounds what is dirty.
    pub(super) fn new(arena: &Arc<Arena>) -> Option<Watch> {
        let (shared, arena) = (Arc::new(Shared::default()), arena.clone());
        let theirs = shared.clone();
        let thread = std::thread::Builder::new().name("berth-dirty".into()).spawn(move || watch(&theirs, &arena)).ok()?;
        Some(Watch { shared, thread: Some(thread) })
    }

    /// Whether its thread still runs.
    #[cfg(test)]
    fn is_running(&self) -> bool {
        self.thread.as_ref().is_some_and(|t| !t.is_finished())
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        *self.shared.stop() = true;
        self.shared.stopped.notify_all();
        if let Some(thread) = self.thread.take() {
            // It does not panic; if it did there is nothing left to do.
            let _ = thread.join();
        }
    }
}

fn watch(shared: &Shared, arena: &Arena) {
    let Ok(file) = arena.file() else { return };
    let step = writeback::half_window();
    let tick = Duration::from_millis(((step / FASTEST) as u64).clamp(TICKS.0, TICKS.1));
    let (mut sent, mut seen, mut moved) = (read_so_far(), read_so_far(), Instant::now());
    while shared.wait(tick) {
        let now = read_so_far();
        if now.zip(seen).is_none_or(|(now, seen)| now >= seen + LITTLE) {
            (seen, moved) = (now, Instant::now());
        } else if moved.elapsed() > IDLE {
            break;
        }
        // Before Linux 6.5 what was read is the only measure there is; it counts a read when it is over.
        let dirty = writeback::dirty(file.as_fd()).or_else(|| Some(now?.saturating_sub(sent?))).unwrap_or(u64::MAX);
        if dirty >= step as u64 {
            start(file.as_fd());
            sent = now;
        }
    }
    start(file.as_fd());
}

/// Has all dirty pages of the file written, without waiting for them.
fn start(file: BorrowedFd<'_>) {
    // SAFETY: the descriptor is open; length 0 means to the end.
    unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
}

/// Bytes that this process has read from anything.
fn read_so_far() -> Option<u64> {
    let io = std::fs::read_to_string("/proc/self/io").ok()?;
    io.lines().find_map(|l| l.strip_prefix("rchar: "))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::arena::Directory;
    use crate::memory::{Region, system};

    fn region(dir: &std::path::Path, len: usize) -> Region {
        Region::from(Arena::new(&Directory::open(dir, false).unwrap(), len).unwrap().slice(len).unwrap())
    }

    #[test]
    fn what_others_store_is_written_to_the_disk_before_all_of_it_is_dirty() {
        const LEN: usize = 768 << 20;
        let dir = tempfile::tempdir().unwrap();
        let region = region(dir.path(), LEN);
        let arena = region.arena().unwrap();
        let file = arena.file().unwrap();
        if system::file_system(dir.path()).is_none_or(|f| f == "tmpfs") || writeback::dirty(file.as_fd()).is_none() {
            return eprintln!("SKIPPED: needs a disk under the temporary directory and Linux 6.5");
        }
        let watch = region.watch().unwrap();
        let (mut most, mut source) = (0, std::fs::File::open("/dev/zero").unwrap());
        for at in (0..LEN).step_by(1 << 20) {
            // As a host does: what it reads arrives in the mapping.
            // SAFETY: the region is this test's.
            let part = unsafe { std::slice::from_raw_parts_mut(region.base().add(at), 1 << 20) };
            std::io::Read::read_exact(&mut source, part).unwrap();
            part[0] = (at >> 20) as u8;
            // As fast as a disk reads.
            std::thread::sleep(Duration::from_micros(500));
            most = most.max(writeback::dirty(file.as_fd()).unwrap());
        }
        assert!(watch.is_running());
        // The kernel alone writes nothing of so little: it begins when a tenth of the memory is dirty.
        let bound = writeback::half_window() as u64 + (64 << 20);
        assert!(most < bound, "{most} of {LEN} bytes were dirty");
        drop(watch);
        let start = Instant::now();
        while writeback::dirty(file.as_fd()).unwrap() > 0 {
            assert!(start.elapsed() < Duration::from_secs(60), "it was not written");
            std::thread::sleep(Duration::from_millis(20));
        }
        // SAFETY: the region is this test's, and nobody writes to it now.
        let bytes = unsafe { std::slice::from_raw_parts(region.base(), LEN) };
        assert!(bytes.iter().step_by(1 << 20).enumerate().all(|(i, b)| *b == i as u8));
    }

    #[test]
    fn it_ends_when_it_is_dropped_and_memory_has_none() {
        let dir = tempfile::tempdir().unwrap();
        let region = region(dir.path(), 2 << 20);
        let watch = region.watch().unwrap();
        let start = Instant::now();
        drop(watch);
        assert!(start.elapsed() < IDLE, "it waits for nothing");
        assert!(Region::from(crate::memory::pageable::Pageable::new(4096).unwrap()).watch().is_none());
    }
}
