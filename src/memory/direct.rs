//! Missing experts of a model larger than memory, read past the page cache.
//!
//! Owns: the memory that they come to, the reads that are on their way, and when this is the better way. Must not know: experts, in
//! which order they come.
//!
//! At the limit of a memory cgroup, or of the machine, bringing pages of a file into memory costs 0.8 to 0.9 s of processor time per GB, since for each
//! page another has to be given up first; a direct read into memory that is there already costs a tenth of that. What is read so is used once.
//! First of all the page cache must have what a model uses, and not what its load left: until half of memory has been exchanged, everything goes the
//! ordinary way. Then only what is missing for the second time does, so that one rarely used expert is not exchanged for another.
//!
//! The memory is made at the first miss and given back when nothing has been missing for a while, or a context ends. It is handed out front to
//! back, and all of it is free again when nobody computes. There are no threads: reads go on in the kernel ([`Queue`]), who needs the bytes waits.

use std::ffi::c_int;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::HUGE_PAGE;
use super::aio::{self, Queue, Read};
use super::input::BLOCK;
use super::origin::{MappedFile, NoOrigin, Origins};
use super::pageable::Pageable;
use crate::error::Error;

/// Of how many pieces it is known that they were missing before. Of more, some are forgotten.
const REMEMBERED: usize = 1 << 16;

/// Most bytes of one read: small enough for a disk to have several at a time.
const REQUEST: usize = 512 << 10;

/// Most reads on their way.
const DEPTH: u32 = 512;

/// Most bytes of memory, and their share of the bytes that are mapped: it must not matter next to what it serves.
const MOST: usize = 128 << 20;
const SHARE: u64 = 64;

/// How long it is believed whether a model is larger than memory.
const BELIEF: Duration = Duration::from_secs(5);

/// How long a wait goes on before it looks again whether others have got its bytes.
const PATIENCE: Duration = Duration::from_millis(100);

/// Why missing bytes come through the page cache after all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Not {
    /// That is the better way now: the model fits, these bytes were missing before, the page cache has still to be filled, or the memory is full.
    Better,
    /// It does not work here, in words.
    Broken(String),
}

/// The way past the page cache.
pub struct Direct {
    inner: Mutex<Inner>,
    arrived: Condvar,
    /// Bytes that can be in memory at once.
    room: fn() -> u64,
    /// [`SHARE`] and [`DEPTH`], but for tests.
    share: u64,
    depth: u32,
}

struct Inner {
    /// Calls that are computed now. Only while there are none, memory is used anew or given back.
    users: u32,
    /// The kernel does not have what it takes.
    broken: bool,
    /// When it was asked how many bytes can be in memory, and what was found; whether what is mapped is larger.
    judged: Option<(Instant, u64, bool)>,
    /// Bytes that came the ordinary way because the page cache does not yet have what is used.
    exchanged: u64,
    origins: Option<Origins>,
    pool: Option<Pool>,
    missed: Missed,
}

/// What was missing once.
#[derive(Default)]
struct Missed(Vec<usize>);

struct Pool {
    memory: Pageable,
    used: usize,
    slots: Vec<Slot>,
    queue: Arc<Queue>,
    /// Reads that the kernel has.
    flying: usize,
    /// Whether somebody waits for the kernel.
    waited_for: bool,
}

/// A part of the memory that one read fills.
struct Slot {
    /// Where in the memory.
    at: usize,
    /// Bytes of it that are needed: the file may end before the last block does.
    needed: usize,
    offset: u64,
    file: Arc<MappedFile>,
    state: State,
}

enum State {
    Flying,
    /// The kernel did not read it, for this reason.
    Failed(c_int),
    /// Somebody reads it through the page cache instead.
    Repaired,
    There,
    Lost(Error),
}

impl Direct {
    /// Without any memory. `room` says how many bytes can be in memory at once, those of files included.
    pub const fn new(room: fn() -> u64) -> Direct {
        let inner = Inner { users: 0, broken: false, judged: None, exchanged: 0, origins: None, pool: None, missed: Missed(Vec::new()) };
        Direct { inner: Mutex::new(inner), arrived: Condvar::new(), room, share: SHARE, depth: DEPTH }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A call begins.
    pub fn begin(&self) {
        let mut inner = self.lock();
        inner.users += 1;
        // What a call reads stays mapped as long as it goes on; what others read may have been exchanged since.
        inner.origins.iter_mut().for_each(Origins::forget_addresses);
    }

    /// A call is over, and uses nothing any more that it was given.
    pub fn end(&self) {
        let mut inner = self.lock();
        while inner.users == 1
            && let Some(pool) = inner.pool.as_mut().filter(|p| p.flying > 0)
        {
            // A call that failed has not waited for everything.
            let queue = pool.queue.clone();
            if pool.take_arrivals(&queue, PATIENCE).is_err() {
                break;
            }
        }
        inner.users = inner.users.saturating_sub(1);
        if inner.users == 0
            && let Some(pool) = &mut inner.pool
        {
            (pool.used, pool.flying) = (0, 0);
            pool.slots.clear();
        }
    }

    /// Gives everything back, if nobody computes.
    pub fn give_back(&self) {
        let mut inner = self.lock();
        if inner.users == 0 {
            inner.give_back();
        }
    }

    /// Begins to read bytes that are missing, and says where they will be; [`Direct::wait`] waits for them. The bytes stay there until the call
    /// that asked for them ends.
    ///
    /// # Errors
    /// Why they are not.
    pub fn bring(&self, bytes: Range<usize>) -> Result<NonNull<u8>, Not> {
        let mut inner = self.lock();
        if inner.broken {
            return Err(Not::Better);
        }
        let (slots, start) = inner.plan(bytes, self)?;
        let Some(pool) = &mut inner.pool else { return Err(Not::Better) };
        pool.flying += slots.len();
        let base = pool.memory.base();
        let read = |i: usize| {
            let slot = &pool.slots[i];
            let fd = slot.file.input.direct().map_or(-1, |fd| fd.as_raw_fd());
            Read { fd, offset: slot.offset, to: base.wrapping_add(slot.at), len: slot.needed.next_multiple_of(BLOCK), tag: i as u64 }
        };
        let reads: Vec<Read> = slots.clone().map(read).collect();
        let queue = pool.queue.clone();
        let place = NonNull::new(base.wrapping_add(start)).ok_or(Not::Better)?;
        // Handing over pins the pages, which takes time: others need not wait for it.
        drop(inner);
        // SAFETY: these slots are ours until the call ends, which waits until they are done; their memory is the pool's, which is not given back
        // before.
        let (taken, error) = unsafe { queue.submit(&reads) };
        if taken < reads.len() {
            let mut inner = self.lock();
            if let Some(pool) = &mut inner.pool {
                pool.flying = pool.flying.saturating_sub(reads.len() - taken);
                for i in slots.skip(taken) {
                    pool.slots[i].state = State::Failed(error.unwrap_or(libc::EIO));
                }
            }
        }
        Ok(place)
    }

    /// Waits for bytes that are brought. What the kernel could not read past the page cache is read through it; then the reason is returned, and
    /// nobody tries again with this file.
    ///
    /// # Errors
    /// If they cannot be had.
    pub fn wait(&self, bytes: Range<usize>) -> Result<Option<Not>, Error> {
        let nothing = || Error::invalid("a wait for bytes that nobody has asked for");
        let mut inner = self.lock();
        let mut not = None;
        loop {
            let Some(pool) = &mut inner.pool else { return Err(nothing()) };
            let base = pool.memory.base();
            let first = bytes.start.checked_sub(base.addr()).filter(|first| first + bytes.len() <= pool.used).ok_or_else(nothing)?;
            let mut waits = false;
            let from = pool.slots.partition_point(|s| s.at + s.needed <= first);
            let of_ours = |s: &Slot| s.at < first + bytes.len();
            let mut failed = None;
            for (i, slot) in pool.slots.iter().enumerate().skip(from).take_while(|(_, s)| of_ours(s)) {
                match &slot.state {
                    State::There => {}
                    State::Lost(error) => return Err(error.clone()),
                    State::Flying | State::Repaired => waits = true,
                    State::Failed(error) => failed = Some((i, *error)),
                }
            }
            if let Some((i, error)) = failed {
                let slot = &mut pool.slots[i];
                slot.state = State::Repaired;
                let (file, offset, needed, to) = (slot.file.clone(), slot.offset, slot.needed, base.wrapping_add(slot.at));
                drop(inner);
                // SAFETY: the kernel is done with this slot, its state keeps everybody else off, and its memory is there while the call goes on.
                let memory = unsafe { std::slice::from_raw_parts_mut(to, needed) };
                let read = file.input.read_cached(offset, memory);
                inner = self.lock();
                if read.is_ok() {
                    file.input.refuse_direct();
                    let why = std::io::Error::from_raw_os_error(error);
                    not = Some(Not::Broken(format!("{}: {why}", file.input.path().display())));
                }
                if let Some(slot) = inner.pool.as_mut().and_then(|p| p.slots.get_mut(i)) {
                    slot.state = read.map_or_else(State::Lost, |()| State::There);
                }
                self.arrived.notify_all();
                continue;
            }
            if !waits {
                return Ok(not);
            }
            if pool.waited_for || pool.flying == 0 {
                inner = self.arrived.wait_timeout(inner, PATIENCE).unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            pool.waited_for = true;
            let queue = pool.queue.clone();
            drop(inner);
            let (mut done, mut count) = ([(0, Ok(0)); aio::BATCH], 0);
            let waited = queue.wait(PATIENCE, |d| {
                done[count] = (d.tag, d.result);
                count += 1;
            });
            inner = self.lock();
            if let Some(pool) = &mut inner.pool {
                pool.waited_for = false;
                done[..count].iter().for_each(|(tag, result)| pool.arrived(*tag, *result));
                if let Err(error) = waited {
                    pool.lose_all(error);
                }
            }
            self.arrived.notify_all();
        }
    }
}

impl Inner {
    fn give_back(&mut self) {
        (self.pool, self.origins, self.judged, self.exchanged) = (None, None, None, 0);
        self.missed = Missed::default();
    }

    /// Sets memory and slots aside for some bytes: the slots, and where the first byte will be.
    fn plan(&mut self, bytes: Range<usize>, direct: &Direct) -> Result<(Range<usize>, usize), Not> {
        let origins = self.origins.get_or_insert_default();
        let (room, larger) = match self.judged {
            Some((when, room, larger)) if when.elapsed() < BELIEF => (room, larger),
            _ => {
                let room = (direct.room)();
                let larger = origins.mapped_bytes_like(bytes.start) > room;
                self.judged = Some((Instant::now(), room, larger));
                (room, larger)
            }
        };
        if larger && self.exchanged < room / 2 {
            self.exchanged += bytes.len() as u64;
            return Err(Not::Better);
        }
        if !larger || self.missed.again(bytes.start) {
            return Err(Not::Better);
        }
        let origin = match origins.find(bytes.start, bytes.len()) {
            Ok(origin) => origin,
            Err(NoOrigin::Gone(why)) => return Err(Not::Broken(why)),
            Err(_) => return Err(Not::Better),
        };
        if origin.file.input.direct().is_none() {
            let why = format!("{}: its file system has no direct reads", origin.file.input.path().display());
            return Err(Not::Broken(why));
        }
        let pool = match &mut self.pool {
            Some(pool) => pool,
            none => {
                let share = usize::try_from(origins.mapped_bytes_like(bytes.start) / direct.share).unwrap_or(MOST);
                // Handed over to the kernel page by page, so huge ones are best.
                let size = share.min(MOST) / HUGE_PAGE * HUGE_PAGE;
                if size == 0 {
                    return Err(Not::Better);
                }
                let no_queue = |error| format!("the kernel takes no asynchronous reads: {}", std::io::Error::from_raw_os_error(error));
                let made =
                    Queue::new(direct.depth).map_err(no_queue).and_then(|queue| Ok((queue, Pageable::new(size).map_err(|e| e.message)?)));
                let (queue, memory) = made.map_err(|why| {
                    self.broken = true;
                    Not::Broken(why)
                })?;
                none.insert(Pool { memory, used: 0, slots: Vec::new(), queue: Arc::new(queue), flying: 0, waited_for: false })
            }
        };
        pool.plan(bytes.len(), origin.offset, &origin.file)
    }
}

impl Missed {
    /// Whether the bytes at this address have been missing before. The next time they are missing for the first time again.
    fn again(&mut self, address: usize) -> bool {
        if self.0.is_empty() {
            self.0 = vec![0; REMEMBERED];
        }
        // Knuth's multiplier: the upper bits of the product depend on all of the address's.
        let place = (address as u64).wrapping_mul(6_364_136_223_846_793_005) >> (64 - REMEMBERED.trailing_zeros());
        let known = &mut self.0[place as usize];
        let again = *known == address;
        *known = if again { 0 } else { address };
        again
    }
}

impl Pool {
    fn plan(&mut self, len: usize, offset: u64, file: &Arc<MappedFile>) -> Result<(Range<usize>, usize), Not> {
        let skip = (offset % BLOCK as u64) as usize;
        let wanted = skip + len;
        let whole = wanted.next_multiple_of(BLOCK);
        let count = whole.div_ceil(REQUEST);
        if whole > self.memory.len() - self.used || self.flying + count > DEPTH as usize {
            return Err(Not::Better);
        }
        let (first, start) = (self.slots.len(), self.used);
        for at in (0..whole).step_by(REQUEST) {
            let needed = REQUEST.min(wanted - at);
            let slot = Slot { at: start + at, needed, offset: offset - skip as u64 + at as u64, file: file.clone(), state: State::Flying };
            self.slots.push(slot);
        }
        self.used += whole;
        Ok((first..self.slots.len(), start + skip))
    }

    fn arrived(&mut self, tag: u64, result: Result<usize, c_int>) {
        self.flying = self.flying.saturating_sub(1);
        if let Some(slot) = usize::try_from(tag).ok().and_then(|i| self.slots.get_mut(i)) {
            slot.state = match result {
                Ok(n) if n >= slot.needed => State::There,
                // Reading through the page cache tells why.
                Ok(_) => State::Failed(libc::EIO),
                Err(error) => State::Failed(error),
            };
        }
    }

    /// The kernel will never say what became of its reads: this process is the child of the one that asked.
    fn lose_all(&mut self, error: c_int) {
        self.flying = 0;
        for slot in self.slots.iter_mut().filter(|s| matches!(s.state, State::Flying)) {
            slot.state = State::Failed(error);
        }
    }

    fn take_arrivals(&mut self, queue: &Queue, at_most: Duration) -> Result<(), c_int> {
        queue.wait(at_most, |done| self.arrived(done.tag, done.result)).inspect_err(|error| self.lose_all(*error))
    }
}

#[cfg(test)]
impl Direct {
    /// For small files: its memory is of the size of all that are mapped.
    pub(crate) fn for_tests(room: fn() -> u64) -> Direct {
        Direct { share: 1, ..Direct::new(room) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Status;
    use crate::memory::mapping::FileMapping;
    use crate::memory::testing::Sample;

    const MIB: usize = 1 << 20;

    /// A mapped file, and a way past the page cache with memory for 2 MiB less than the file has.
    struct Setup {
        sample: Sample,
        map: FileMapping,
        direct: Direct,
    }

    impl Setup {
        /// `None`, and said so, where the kernel has no such reads.
        fn new(name: &str, len: usize) -> Option<Setup> {
            if let Err(error) = Queue::new(1) {
                eprintln!("SKIPPED: no asynchronous reads here (error {error})");
                return None;
            }
            let sample = Sample::new(name, len);
            let map = FileMapping::open(&sample.path).unwrap();
            // The file has to be the only one that is mapped to be read, or the memory is larger.
            Some(Setup { sample, map, direct: Direct::for_tests(|| 0) })
        }

        fn at(&self, at: usize, len: usize) -> Range<usize> {
            let start = self.map.bytes()[at..at + len].as_ptr().addr();
            start..start + len
        }

        fn bring(&self, at: usize, len: usize) -> Result<NonNull<u8>, Not> {
            self.direct.lock().missed = Missed::default();
            self.direct.bring(self.at(at, len))
        }

        fn wait(&self, copy: NonNull<u8>, from: usize, len: usize) -> Result<Option<Not>, Error> {
            let start = copy.as_ptr().addr() + from;
            self.direct.wait(start..start + len)
        }

        /// Waits for a part of what was brought, and compares it.
        fn check(&self, at: usize, copy: NonNull<u8>, from: usize, len: usize) -> Option<Not> {
            let not = self.wait(copy, from, len).unwrap();
            // SAFETY: these bytes are there.
            let bytes = unsafe { std::slice::from_raw_parts(copy.as_ptr().add(from), len) };
            assert!(bytes == &self.sample.bytes[at + from..][..len], "{len} at {at} + {from}");
            not
        }

        fn flying(&self) -> usize {
            self.direct.lock().pool.as_ref().map_or(0, |p| p.flying)
        }
    }

    #[test]
    fn parts_come_to_other_places_and_whoever_waits_for_one_finds_it() {
        let Some(setup) = Setup::new("direct-parts", 9 * MIB + 123) else { return };
        let mut random = fastrand::Rng::new();
        for _ in 0..6 {
            setup.direct.begin();
            let mut parts = vec![(setup.sample.bytes.len() - 5000, 5000), (0, 1), (BLOCK - 1, 2)];
            parts.extend((0..4).map(|_| (random.usize(..7 * MIB), random.usize(1..3 * MIB / 2))));
            random.shuffle(&mut parts);
            let copies: Vec<_> = parts.iter().map(|(at, len)| setup.bring(*at, *len).unwrap()).collect();
            std::thread::scope(|s| {
                for seed in [random.u64(..), random.u64(..), random.u64(..)] {
                    let (setup, parts, copies) =
                        (&setup, &parts, copies.iter().map(|c| c.as_ptr().expose_provenance()).collect::<Vec<_>>());
                    s.spawn(move || {
                        let mut random = fastrand::Rng::with_seed(seed);
                        for _ in 0..40 {
                            let i = random.usize(..parts.len());
                            let (at, len) = parts[i];
                            let from = random.usize(..len);
                            let copy = NonNull::new(std::ptr::with_exposed_provenance_mut(copies[i])).unwrap();
                            assert_eq!(setup.check(at, copy, from, random.usize(1..=len - from)), None);
                        }
                    });
                }
            });
            for ((at, len), copy) in parts.iter().zip(&copies) {
                assert_eq!(setup.check(*at, *copy, 0, *len), None);
            }
            setup.direct.end();
        }
    }

    #[test]
    fn memory_is_used_anew_when_nobody_computes_and_given_back_at_the_end() {
        let Some(setup) = Setup::new("direct-anew", 12 * MIB) else { return };
        let full = |setup: &Setup| (0..64).take_while(|_| setup.bring(MIB + 7, 8 * MIB).is_ok()).count();
        setup.direct.begin();
        setup.direct.begin();
        let count = full(&setup);
        assert!(count >= 1 && setup.bring(0, 8 * MIB) == Err(Not::Better), "{count}");
        // Nobody has waited; another one goes on.
        setup.direct.end();
        setup.direct.give_back();
        assert_eq!(full(&setup), 0);
        setup.direct.end();
        assert_eq!(setup.flying(), 0, "everything has come before the memory is used anew");
        setup.direct.begin();
        let copy = setup.bring(100, MIB).unwrap();
        assert_eq!(setup.check(100, copy, 0, MIB), None);
        let start = copy.as_ptr().addr();
        for range in [start - 101..start, start + MIB + 2 * BLOCK..start + MIB + 3 * BLOCK, 0..1] {
            assert_eq!(setup.direct.wait(range).unwrap_err().status, Status::InvalidArgument, "nothing was asked for there");
        }
        setup.direct.end();
        assert!(setup.direct.lock().pool.is_some());
        setup.direct.give_back();
        assert!(setup.direct.lock().pool.is_none() && setup.direct.lock().origins.is_none());
        assert!(setup.wait(copy, 0, 1).is_err());
    }

    #[test]
    fn what_fits_and_what_is_missing_again_goes_through_the_page_cache() {
        let Some(setup) = Setup::new("direct-fits", 4 * MIB) else { return };
        let fits = Direct::for_tests(|| 1 << 40);
        fits.begin();
        assert_eq!(fits.bring(setup.at(0, MIB)), Err(Not::Better));
        assert!(fits.lock().pool.is_none(), "no memory for it");
        fits.end();
        // Of 3 MiB that memory has the first half is exchanged before anything else.
        let exchanges = Direct::for_tests(|| 3 << 20);
        exchanges.begin();
        let first: Vec<bool> = (0..5).map(|i| exchanges.bring(setup.at(i << 19, 1 << 19)).is_ok()).collect();
        assert_eq!(first, [false, false, false, true, true]);
        exchanges.end();
        // Every second time, each for itself.
        let expert = |e: usize| setup.at(32_000 * e, 32_000);
        for round in 0..5 {
            for e in 0..100 {
                setup.direct.begin();
                let direct = setup.direct.bring(expert(e)).is_ok();
                setup.direct.end();
                assert_eq!(direct, round % 2 == 0, "{e} in round {round}");
            }
        }
        // What is remembered has an end.
        let mut missed = Missed::default();
        let count = (1..=4 * REMEMBERED).filter(|i| missed.again(4096 * i)).count()
            + (1..=4 * REMEMBERED).filter(|i| missed.again(4096 * i)).count();
        assert!(count <= REMEMBERED && missed.0.len() == REMEMBERED, "{count}");
    }

    #[test]
    fn a_file_that_became_shorter_is_an_error_that_names_it() {
        let Some(setup) = Setup::new("direct-short", 6 * MIB) else { return };
        setup.sample.open_to_write().set_len(2 * MIB as u64 + 5).unwrap();
        setup.direct.begin();
        let copy = setup.bring(MIB, 3 * MIB).unwrap();
        for _ in 0..2 {
            let error = setup.wait(copy, 0, 3 * MIB).unwrap_err();
            assert!(error.status == Status::Io && error.message.contains(setup.sample.path.to_str().unwrap()), "{error}");
        }
        assert_eq!(setup.check(MIB, copy, 0, REQUEST), None, "what is there came");
        setup.direct.end();
    }

    #[test]
    fn what_the_kernel_does_not_read_directly_is_read_through_the_page_cache_and_not_tried_again() {
        let Some(setup) = Setup::new("direct-refused", 6 * MIB) else { return };
        setup.direct.begin();
        // Opened for direct writes instead of reads.
        let mut origins = Origins::default();
        origins.find(setup.at(0, 1).start, 1).ok().unwrap();
        origins.break_direct();
        setup.direct.lock().origins = Some(origins);
        let copy = setup.bring(MIB + 1, 2 * MIB).unwrap();
        let not = setup.check(MIB + 1, copy, MIB, 1);
        assert!(matches!(&not, Some(Not::Broken(why)) if why.contains("direct-refused")), "{not:?}");
        setup.check(MIB + 1, copy, 0, 2 * MIB);
        assert_eq!(setup.flying(), 0);
        let again = setup.bring(0, MIB);
        assert!(matches!(&again, Err(Not::Broken(why)) if why.contains("no direct reads")), "{again:?}");
        setup.direct.end();
    }

    #[test]
    fn a_kernel_without_asynchronous_reads_is_asked_once() {
        let Some(setup) = Setup::new("direct-no-queue", 4 * MIB) else { return };
        let direct = Direct { depth: u32::MAX, ..Direct::for_tests(|| 0) };
        direct.begin();
        let not = direct.bring(setup.at(0, MIB));
        assert!(matches!(&not, Err(Not::Broken(why)) if why.contains("asynchronous")), "{not:?}");
        assert_eq!(direct.bring(setup.at(0, MIB)), Err(Not::Better));
        direct.end();
    }

    #[test]
    fn reads_that_the_kernel_never_answers_are_made_again() {
        let Some(setup) = Setup::new("direct-lost", 6 * MIB) else { return };
        setup.direct.begin();
        let copy = setup.bring(5, 2 * MIB).unwrap();
        // As in a child that was forked: its parent's reads are not its own.
        setup.direct.lock().pool.as_mut().unwrap().queue = Arc::new(Queue::UNKNOWN);
        let not = setup.check(5, copy, 0, 2 * MIB);
        assert!(matches!(not, Some(Not::Broken(_))), "{not:?}");
        setup.direct.end();
        setup.direct.begin();
        assert!(matches!(setup.bring(5, MIB), Err(Not::Broken(_))), "this file is not tried again");
        setup.direct.end();
    }

    #[test]
    fn other_memory_and_files_that_are_gone_are_refused() {
        let Some(setup) = Setup::new("direct-gone", 4 * MIB) else { return };
        setup.direct.begin();
        let bytes = vec![0u8; MIB];
        let start = bytes.as_ptr().addr();
        assert_eq!(setup.direct.bring(start..start + MIB), Err(Not::Better));
        std::fs::remove_file(&setup.sample.path).unwrap();
        assert!(matches!(setup.bring(0, MIB), Err(Not::Broken(_))));
        setup.direct.end();
    }
}
