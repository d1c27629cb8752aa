//! An `ARENA` buffer whose bytes are kept for the next start (`BERTH_ARENA_PERSIST=1`).
//!
//! Owns: when a file of an earlier start is put behind a buffer, when it is taken away again, and when a new one is complete. Must not know: the host's
//! tables, how files are trusted ([`crate::memory::lasting`]).
//!
//! A host allocates a buffer of which only the size is known, then places its tensors, and sets each of them from its mapping of the model. So there are
//! three chances to find out which file belongs to it:
//!
//! 1. When it is allocated. A host that will set tensors from a mapping has mapped the model by now. If there is a file of that size whose model is mapped
//!    in this process and has not changed, it is put behind the buffer: no space is taken on the disk. Nothing is believed yet: the memory is private,
//!    and whatever the host writes there by itself is what it reads again.
//! 2. When tensors are placed: one that is not in the file's table, in that place and of that size, is the end of it. No byte has been set yet, so a
//!    fresh file without a name takes its place.
//! 3. When a tensor is set. Where the source lies in the model is asked of the kernel. If the table says the same, the model's stamps are still the same,
//!    and the first and last bytes agree, the tensor is there already and nothing is written. Otherwise a fresh file takes the place of the old, with
//!    the tensors that were found, and the rest is written.
//!
//! Without such a file the first tensor that is set decides: all are placed by then, and so the name is known. If there is a file of that name by now it is
//! put behind the buffer; if another process builds it, it is waited for. Otherwise the buffer's own file gets the name when the last tensor is set.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::belongs::{Files, Tensor, clear, entry, files, find, name, origin_of, watch};
use crate::config;
use crate::log;
use crate::memory::arena::{Arena, Directory};
use crate::memory::lasting::header::{Entry, HEADER, Table};
use crate::memory::lasting::store::{Build, Kept, Store};
use crate::memory::lasting::{Refusal, Why};
use crate::report::{self, lasting::Lasting as Record, lasting::State as Said};

/// How long another process that builds the same file is waited for.
const WAIT: Duration = Duration::from_secs(20);

/// Buffers of which it is not settled whether they are kept.
static LIVE: Mutex<Vec<Weak<Lasting>>> = Mutex::new(Vec::new());

/// What is known of a buffer.
pub(super) struct Lasting {
    store: Option<Store>,
    arena: Arc<Arena>,
    bytes: usize,
    limit: Option<u64>,
    now: Mutex<Now>,
}

struct Now {
    id: Option<report::Id>,
    /// By offset.
    tensors: BTreeMap<usize, Tensor>,
    left: usize,
    state: State,
    /// The file that was found to be another one, and why.
    rejected: Option<(String, Refusal)>,
    /// Whether it was said that the host sets nothing.
    told: bool,
}

enum State {
    /// A file without a name, nothing set yet.
    Waiting,
    /// The file of an earlier start.
    Found { kept: Kept, files: Files },
    /// A file without a name, which is to be kept.
    Building { build: Build, name: String, files: Files, before: Option<Refusal> },
    /// Settled.
    Over,
}

/// A tensor that is being set. Others of the buffer wait.
pub(super) struct Setting<'a> {
    lasting: &'a Lasting,
    now: MutexGuard<'a, Now>,
}

/// A load is over.
pub(super) fn end_of_load() {
    // No lock is held: a log may call back into us.
    let live: Vec<Arc<Lasting>> = {
        let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
        live.retain(|l| l.strong_count() > 0);
        live.iter().filter_map(Weak::upgrade).collect()
    };
    live.iter().for_each(|l| l.end_of_load());
}

impl Lasting {
    /// Of a buffer with `bytes`, in a file of an earlier start, or in the arena that `make` makes with so many bytes before its first one. Where it fails
    /// because the disk is full, as `full` says, files that no start will use any more go first.
    ///
    /// # Errors
    /// What `make` says.
    pub(super) fn new<E>(
        directory: &Arc<Directory>,
        bytes: usize,
        make: impl Fn(usize) -> Result<Arc<Arena>, E>,
        full: impl Fn(&E) -> bool,
    ) -> Result<(Arc<Lasting>, Arc<Arena>), E> {
        let limit = config::get().ok().and_then(|c| c.arena_limit);
        let mut untrusted = None;
        let (store, arena, state) = match Store::new(directory.clone(), config::VERSION.to_str().unwrap_or("?")) {
            Err(refusal) => {
                untrusted = Some((String::new(), refusal));
                (None, make(0)?, State::Over)
            }
            Ok(store) => match find(&store, bytes) {
                Some((arena, kept, files)) => (Some(store), arena, State::Found { kept, files }),
                None => {
                    let arena = make(HEADER).or_else(|e| if full(&e) && clear(&store, bytes, limit) { make(HEADER) } else { Err(e) })?;
                    (Some(store), arena, State::Waiting)
                }
            },
        };
        Ok(Lasting::with(store, arena, bytes, limit, state, untrusted))
    }

    /// Of a buffer with `bytes` in a file of an earlier start, in a directory in which none can be made. `None` if there is no such file.
    pub(super) fn reuse(directory: &Arc<Directory>, bytes: usize) -> Option<(Arc<Lasting>, Arc<Arena>)> {
        let store = Store::new(directory.clone(), config::VERSION.to_str().unwrap_or("?")).ok()?;
        let (arena, kept, files) = find(&store, bytes)?;
        Some(Lasting::with(Some(store), arena, bytes, None, State::Found { kept, files }, None))
    }

    fn with(
        store: Option<Store>,
        arena: Arc<Arena>,
        bytes: usize,
        limit: Option<u64>,
        state: State,
        untrusted: Option<(String, Refusal)>,
    ) -> (Arc<Lasting>, Arc<Arena>) {
        let now = Mutex::new(Now { id: None, tensors: BTreeMap::new(), left: 0, state, rejected: untrusted, told: false });
        let lasting = Arc::new(Lasting { store, arena: arena.clone(), bytes, limit, now });
        LIVE.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(&lasting));
        (lasting, arena)
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The buffer has a record now.
    pub(super) fn attach(&self, id: report::Id) {
        let mut now = self.now();
        now.id = Some(id);
        match &now.state {
            State::Over => self.say(&now, Said::NotKept, now.rejected.as_ref().map(|(_, why)| why.clone()), None),
            State::Found { kept, .. } => self.say(&now, Said::Found, None, Some(&kept.name)),
            _ => self.say(&now, Said::Waiting, None, None),
        }
    }

    fn say(&self, now: &Now, state: Said, why: Option<Refusal>, name: Option<&str>) {
        let path = |name: &str| self.store.as_ref().map_or_else(PathBuf::new, |s| s.directory().path().join(name));
        if let Some(id) = now.id {
            report::lasting(id, Record::new(state, why, name.map(path)));
        }
    }

    /// The host puts a tensor here.
    pub(super) fn place(&self, name: &str, offset: usize, bytes: usize) {
        if bytes == 0 {
            return;
        }
        let mut now = self.now();
        let begun = now.left < now.tensors.len();
        let before = now.tensors.insert(offset, Tensor { name: name.to_owned(), bytes, origin: None, set: false });
        if begun || before.is_some_and(|b| b.name != name || b.bytes != bytes) {
            return self.give_up(&mut now, Refusal::new(Why::OtherWrites, "the host has put tensors here after it had set some"));
        }
        now.left = now.tensors.len();
        if let State::Found { kept, .. } = &now.state
            && entry(&kept.table, offset, bytes).is_none_or(|e| e.name != name)
        {
            let why = Refusal::new(Why::OtherTensors, format!("{} was made of other tensors", kept.name));
            self.reject(&mut now, why);
        }
    }

    /// The host does something else with the bytes than setting a whole tensor that it has placed.
    pub(super) fn spoil(&self) {
        self.give_up(&mut self.now(), Refusal::new(Why::OtherWrites, "the host has written to it in another way than tensor by tensor"));
    }

    /// A host that has set nothing when a load is over has read the model by itself.
    fn end_of_load(&self) {
        // Whoever is setting a tensor now is not the one that sets nothing.
        let Ok(mut now) = self.now.try_lock() else { return };
        if now.left == now.tensors.len() && now.left > 0 && !now.told && matches!(now.state, State::Waiting | State::Found { .. }) {
            // Said, and no more: another model's load may be the one that is over.
            now.told = true;
            let why = Refusal::new(Why::NoFile, "the host reads the model's file by itself, without a mapping");
            self.say(&now, Said::NotKept, Some(why), None);
        }
    }

    /// A tensor is to be set.
    pub(super) fn setting(&self) -> Setting<'_> {
        Setting { lasting: self, now: self.now() }
    }

    /// The file of an earlier start is another one than this buffer needs. If nothing relies on it yet, a file without a name takes its place, which may be
    /// kept in turn.
    fn reject(&self, now: &mut Now, why: Refusal) {
        let State::Found { kept, .. } = &now.state else { return };
        if now.left < now.tensors.len() {
            return self.give_up(now, why);
        }
        now.rejected = Some((kept.name.clone(), why));
        match self.renew(false) {
            Ok(()) => {
                now.state = State::Waiting;
                self.say(now, Said::Waiting, None, None);
            }
            Err(why) => self.settle(now, why),
        }
    }

    /// The bytes will not be kept.
    fn give_up(&self, now: &mut Now, why: Refusal) {
        if matches!(now.state, State::Over) {
            return;
        }
        // Without a file stores would be anonymous memory. They are as right as in one.
        if matches!(now.state, State::Found { .. })
            && let Err(more) = self.renew(true)
        {
            return self.settle(now, Refusal::new(why.why, format!("{}; {}", why.message, more.message)));
        }
        self.settle(now, why);
    }

    fn settle(&self, now: &mut Now, why: Refusal) {
        now.state = State::Over;
        self.say(now, Said::NotKept, Some(why), None);
    }

    fn renew(&self, copy: bool) -> Result<(), Refusal> {
        let store = self.store.as_ref().ok_or_else(|| Refusal::new(Why::Io, "no directory"))?;
        // SAFETY: the host sets and places tensors in one buffer one after the other, and nobody computes with them before a load is over.
        let renewed = unsafe { self.arena.renew(store.directory(), HEADER, copy) };
        renewed.map_err(|e| {
            Refusal::new(Why::Io, format!("what is written takes anonymous memory, since there is no other file: {}", e.message))
        })
    }
}

impl Setting<'_> {
    /// Whether the `len` bytes of `source` lie at `offset` already. If they do not they are to be written, and [`Setting::written`] to be called.
    ///
    /// # Safety
    /// `source` must be readable for `len` bytes, and nobody else may use those of the buffer meanwhile.
    pub(super) unsafe fn is_there(&mut self, offset: usize, source: *const u8, len: usize) -> bool {
        // Each turn leaves a state behind that does not come back.
        loop {
            match &self.now.state {
                State::Over => return false,
                State::Waiting => self.start(source, len),
                State::Building { .. } => {
                    if let Err(why) = self.note(offset, source, len) {
                        self.lasting.give_up(&mut self.now, why);
                    }
                    return false;
                }
                // SAFETY: by the caller's promise.
                State::Found { .. } => match unsafe { self.compare(offset, source, len) } {
                    Ok(()) => return true,
                    Err(why) => self.lasting.reject(&mut self.now, why),
                },
            }
        }
    }

    /// The first tensor is set: all are placed, and where its bytes come from tells the name.
    fn start(&mut self, source: *const u8, len: usize) {
        let state = self.chosen(source, len);
        match state {
            Ok(state) => {
                let (said, name) = match &state {
                    State::Found { kept, .. } => (Said::Found, kept.name.clone()),
                    State::Building { name, .. } => (Said::Building, name.clone()),
                    _ => return,
                };
                self.now.state = state;
                self.lasting.say(&self.now, said, None, Some(&name));
            }
            Err(why) => self.lasting.give_up(&mut self.now, why),
        }
    }

    fn chosen(&self, source: *const u8, len: usize) -> Result<State, Refusal> {
        let (lasting, now) = (self.lasting, &*self.now);
        let store = lasting.store.as_ref().ok_or_else(|| Refusal::new(Why::Io, "no directory"))?;
        let origin = origin_of(source, len, None)?;
        let name = name(&origin, &now.tensors);
        let build = match store.build(&name, Duration::ZERO) {
            Err(Refusal { why: Why::Busy, .. }) => {
                log::info!("another process builds {name}: it is waited for, {} s at most", WAIT.as_secs());
                store.build(&name, WAIT)?
            }
            at_once => at_once?,
        };
        let before = match now.rejected.as_ref().filter(|(rejected, _)| *rejected == name) {
            Some((_, why)) => Some(why.clone()),
            // Perhaps another process has just built it.
            None => match store.open(&name).and_then(|kept| files(&kept).map(|files| (kept, files))) {
                Ok((kept, files)) => {
                    // SAFETY: as in `renew`; nothing has been set yet.
                    unsafe { kept.map_over(&lasting.arena) }?;
                    return Ok(State::Found { kept, files });
                }
                Err(why) => Some(why).filter(|w| w.why != Why::Missing),
            },
        };
        // What would be found out at the end is found out before anything is copied.
        store.check_name(&name)?;
        store.check_room(&name, (HEADER + lasting.arena.capacity()) as u64, lasting.limit)?;
        let files = vec![watch(origin.file)?];
        Ok(State::Building { build, name, files, before })
    }

    /// Takes note of where the bytes of a tensor come from.
    fn note(&mut self, offset: usize, source: *const u8, len: usize) -> Result<(), Refusal> {
        let Now { tensors, state: State::Building { files, .. }, .. } = &mut *self.now else { return Ok(()) };
        let tensor = tensors
            .get_mut(&offset)
            .filter(|t| t.bytes == len && !t.set)
            .ok_or_else(|| Refusal::new(Why::OtherWrites, "the host has set a tensor in parts, or twice"))?;
        let origin = origin_of(source, len, files.last().map(|(file, _)| file))?;
        let index = match files.iter().position(|(file, _)| file.is(&origin.file)) {
            Some(index) => index,
            None => {
                files.push(watch(origin.file)?);
                files.len() - 1
            }
        };
        tensor.origin = Some((index, origin.offset));
        Ok(())
    }

    /// Whether the bytes of a tensor are those of the file that was found.
    ///
    /// # Safety
    /// As [`Setting::is_there`].
    unsafe fn compare(&mut self, offset: usize, source: *const u8, len: usize) -> Result<(), Refusal> {
        let Now { tensors, left, state: State::Found { kept, files }, .. } = &mut *self.now else {
            return Err(Refusal::new(Why::OtherWrites, "nothing was found"));
        };
        let other = |what: &str| Refusal::new(Why::OtherTensors, format!("{}: {what}", kept.name));
        if tensors.len() != kept.table.tensors.len() {
            return Err(other("it was made of more tensors"));
        }
        let tensor = tensors.get_mut(&offset).filter(|t| t.bytes == len && !t.set);
        let tensor = tensor.ok_or_else(|| Refusal::new(Why::OtherWrites, "the host has set a tensor in parts, or twice"))?;
        let entry = entry(&kept.table, offset, len).ok_or_else(|| other("a tensor is not in it"))?;
        let (file, watched) = files.get(entry.model).ok_or_else(|| other("a file is not in it"))?;
        let origin = origin_of(source, len, Some(file))?;
        if !origin.file.is(file) || origin.offset != entry.source {
            return Err(other("a tensor comes from another place"));
        }
        watched.check(file)?;
        // SAFETY: by the caller's promise.
        if !unsafe { self.lasting.arena.holds(offset, source, len) } {
            // Damaged behind the back of its times, or the model is: no start could use it.
            if let Some(store) = &self.lasting.store {
                store.discard(kept);
            }
            return Err(other("the bytes of a tensor differ"));
        }
        tensor.set = true;
        *left -= 1;
        if *left == 0 {
            kept.touch();
            let (name, bytes) = (kept.name.clone(), (HEADER + self.lasting.arena.capacity()) as u64);
            if let Some(store) = &self.lasting.store
                && let Err(why) = store.keep_limit(&name, bytes, self.lasting.limit)
            {
                log::warning!("{name} is used all the same, and the files together are above the limit: {}", why.message);
            }
            self.now.state = State::Over;
            self.lasting.say(&self.now, Said::Reused, None, Some(&name));
        }
        Ok(())
    }

    /// The bytes of the tensor at `offset` are there now.
    pub(super) fn written(&mut self, offset: usize) {
        let Now { tensors, left, state: State::Building { .. }, .. } = &mut *self.now else { return };
        if let Some(tensor) = tensors.get_mut(&offset) {
            tensor.set = true;
            *left -= 1;
        }
        if *left == 0 {
            self.finish();
        }
    }

    /// The last tensor was set.
    fn finish(&mut self) {
        let State::Building { build, name, files, before } = std::mem::replace(&mut self.now.state, State::Over) else { return };
        match self.keep(&build, &name, &files) {
            Ok(()) => {
                let said = if before.is_some() { Said::Rebuilt } else { Said::Kept };
                self.lasting.say(&self.now, said, before, Some(&name));
            }
            Err(why) => self.lasting.settle(&mut self.now, why),
        }
    }

    fn keep(&self, build: &Build, name: &str, files: &Files) -> Result<(), Refusal> {
        let store = self.lasting.store.as_ref().ok_or_else(|| Refusal::new(Why::Io, "no directory"))?;
        let mut tensors = Vec::new();
        for (offset, t) in &self.now.tensors {
            let (model, source) = t.origin.ok_or_else(|| Refusal::new(Why::OtherWrites, "a tensor was not set"))?;
            tensors.push(Entry { name: t.name.clone(), offset: *offset as u64, bytes: t.bytes as u64, model, source, crc: 0 });
        }
        let mut models = Vec::new();
        for (index, (file, watched)) in files.iter().enumerate() {
            let data = tensors.iter().filter(|t| t.model == index).map(|t| t.source).min();
            // Read to the last byte by now: what is said of it holds for all that was read.
            models.push(watched.describe(file, data.unwrap_or(0))?);
        }
        let berth = config::VERSION.to_string_lossy().into_owned();
        let table = Table { berth, buffer: self.lasting.bytes as u64, written: 0, models, tensors };
        // SAFETY: this tensor was the last that the host sets, and it waits.
        unsafe { store.keep(build, name, &self.lasting.arena, table, self.lasting.limit) }.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Region;
    use crate::memory::mapping::FileMapping;
    use crate::memory::testing::Sample;
    use std::os::unix::fs::FileExt;
    use std::path::Path;

    const LEN: usize = 3_000_000;
    /// Offset in the buffer, bytes, offset in the model.
    const TENSORS: [(usize, usize, usize); 3] =
        [(0, 1_000_000, 40_000), (1_000_000, 500_000, 1_040_000), (1_500_032, 1_200_000, 1_600_000)];

    /// A buffer as the host gets it.
    struct Buffer {
        lasting: Arc<Lasting>,
        region: Region,
    }

    impl Buffer {
        fn new(dir: &Path) -> Buffer {
            let directory = Arc::new(Directory::open(dir, false).unwrap());
            let make = |header| Arena::with_header(&directory, LEN, header);
            let (lasting, arena) = Lasting::new(&directory, LEN, make, |_: &crate::error::Error| false).unwrap();
            Buffer { lasting, region: Region::from(arena.slice(LEN).unwrap()) }
        }

        fn placed(dir: &Path) -> Buffer {
            let buffer = Buffer::new(dir);
            TENSORS.iter().enumerate().for_each(|(i, t)| buffer.lasting.place(&format!("t{i}"), t.0, t.1));
            buffer
        }

        /// Whether nothing had to be written.
        fn set(&self, offset: usize, source: &[u8]) -> bool {
            // SAFETY: the buffer is this test's.
            unsafe {
                let mut setting = self.lasting.setting();
                let there = setting.is_there(offset, source.as_ptr(), source.len());
                if !there {
                    crate::memory::fill::copy(source.as_ptr(), &self.region.target(offset, source.len()).unwrap(), &mut |_| {});
                    setting.written(offset);
                }
                there
            }
        }

        fn set_all(&self, model: &[u8]) -> [bool; 3] {
            TENSORS.map(|(at, len, from)| self.set(at, &model[from..from + len]))
        }

        /// Every tensor is the model's.
        fn check(&self, model: &[u8]) {
            // SAFETY: the region has these bytes, and nobody writes them now.
            let bytes = unsafe { std::slice::from_raw_parts(self.region.base(), LEN) };
            TENSORS.iter().for_each(|(at, len, from)| assert!(bytes[*at..at + len] == model[*from..from + len], "the tensor at {at}"));
        }

        fn is_over(&self) -> bool {
            matches!(self.lasting.now().state, State::Over)
        }
    }

    fn files(dir: &Path) -> usize {
        std::fs::read_dir(dir).unwrap().count()
    }

    fn kept(name: &str) -> (tempfile::TempDir, Sample, FileMapping) {
        let (dir, sample) = (tempfile::tempdir().unwrap(), Sample::new(name, LEN));
        let map = FileMapping::open(&sample.path).unwrap();
        let first = Buffer::placed(dir.path());
        assert_eq!(first.set_all(map.bytes()), [false; 3]);
        first.check(&sample.bytes);
        assert!(first.is_over() && files(dir.path()) == 1);
        (dir, sample, map)
    }

    #[test]
    fn what_was_kept_is_there() {
        let (dir, sample, map) = kept("there");
        for _ in 0..2 {
            let buffer = Buffer::placed(dir.path());
            assert_eq!(buffer.set_all(map.bytes()), [true; 3]);
            buffer.check(&sample.bytes);
            // What is set once more is written, and stays in the process.
            assert!(!buffer.set(0, &map.bytes()[5..1_000_005]));
        }
        let buffer = Buffer::placed(dir.path());
        assert_eq!(buffer.set_all(map.bytes()), [true; 3]);
        buffer.check(&sample.bytes);
    }

    #[test]
    fn a_full_disk_is_cleared_of_what_no_start_will_use_and_asked_once_more() {
        use crate::error::{Error, Status};
        let (dir, sample, _map) = kept("full");
        let directory = Arc::new(Directory::open(dir.path(), false).unwrap());
        let asked = std::cell::Cell::new(0);
        // More than the disk has, so that what is stale goes.
        let new = |bytes| {
            let make = |header| {
                asked.set(asked.get() + 1);
                if asked.get() == 1 { Err(Error::new(Status::NoSpace, "full")) } else { Arena::with_header(&directory, LEN, header) }
            };
            Lasting::new(&directory, bytes, make, |e: &Error| e.status == Status::NoSpace).map(drop)
        };
        assert!(new(1 << 60).is_err() && asked.get() == 1 && files(dir.path()) == 1, "the model is still there");
        sample.open_to_write().set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        asked.set(0);
        assert!(new(1 << 60).is_ok() && asked.get() == 2 && files(dir.path()) == 0);
    }

    #[test]
    fn a_directory_that_takes_no_file_is_used_for_what_it_has() {
        let (dir, sample, map) = kept("readonly");
        let directory = Arc::new(Directory::open_to_read(dir.path()).unwrap());
        let (lasting, arena) = Lasting::reuse(&directory, LEN).unwrap();
        let buffer = Buffer { lasting, region: Region::from(arena.slice(LEN).unwrap()) };
        TENSORS.iter().enumerate().for_each(|(i, t)| buffer.lasting.place(&format!("t{i}"), t.0, t.1));
        assert_eq!(buffer.set_all(map.bytes()), [true; 3]);
        buffer.check(&sample.bytes);
        assert!(Lasting::reuse(&directory, LEN + 1).is_none());
    }

    #[test]
    fn a_tensor_from_another_place_gets_its_own_bytes() {
        let (dir, sample, map) = kept("place");
        let buffer = Buffer::placed(dir.path());
        let [a, b, c] = TENSORS;
        assert!(buffer.set(a.0, &map.bytes()[a.2..a.2 + a.1]));
        // Of equal size, and not what was kept.
        assert!(!buffer.set(b.0, &map.bytes()[7..7 + b.1]));
        assert!(!buffer.set(c.0, &map.bytes()[c.2..c.2 + c.1]));
        let mut model = sample.bytes.clone();
        model.copy_within(7..7 + b.1, b.2);
        buffer.check(&model);
        // The same as the first one.
        let buffer = Buffer::placed(dir.path());
        assert!(!buffer.set(a.0, &map.bytes()[9..9 + a.1]));
        let mut model = sample.bytes.clone();
        model.copy_within(9..9 + a.1, a.2);
        assert!(!buffer.set(b.0, &map.bytes()[b.2..b.2 + b.1]) && !buffer.set(c.0, &map.bytes()[c.2..c.2 + c.1]));
        // SAFETY: the region has these bytes, and nobody writes them now.
        assert!(unsafe { std::slice::from_raw_parts(buffer.region.base(), a.1) } == &sample.bytes[9..9 + a.1]);
    }

    #[test]
    fn memory_that_is_no_mapping_is_written_and_nothing_is_kept() {
        let (dir, sample, _map) = kept("memory");
        let buffer = Buffer::placed(dir.path());
        let other: Vec<u8> = sample.bytes.iter().map(|b| !b).collect();
        assert_eq!(buffer.set_all(&other), [false; 3]);
        buffer.check(&other);
        let fresh = tempfile::tempdir().unwrap();
        let buffer = Buffer::placed(fresh.path());
        assert_eq!(buffer.set_all(&other), [false; 3]);
        buffer.check(&other);
        assert!(buffer.is_over() && files(fresh.path()) == 0);
    }

    #[test]
    fn hosts_that_do_something_else_get_what_they_wrote() {
        let (dir, sample, map) = kept("else");
        let [a, ..] = TENSORS;
        let tensor = || &map.bytes()[a.2..a.2 + a.1];
        // In parts, twice, one too many, one that was never placed, another write in between.
        let parts = Buffer::placed(dir.path());
        assert!(!parts.set(a.0, &tensor()[..500_000]) && !parts.set(500_000, &tensor()[500_000..]));
        let late = Buffer::placed(dir.path());
        assert!(late.set(a.0, tensor()));
        late.lasting.place("late", 2_800_000, 100);
        let spoilt = Buffer::placed(dir.path());
        assert!(spoilt.set(a.0, tensor()));
        spoilt.lasting.spoil();
        let fewer = Buffer::new(dir.path());
        fewer.lasting.place("t0", a.0, a.1);
        assert!(!fewer.set(a.0, tensor()));
        for buffer in [&parts, &late, &spoilt, &fewer] {
            assert!(buffer.is_over());
            // SAFETY: the region has these bytes, and nobody writes them now.
            assert!(unsafe { std::slice::from_raw_parts(buffer.region.base(), a.1) } == &sample.bytes[a.2..a.2 + a.1]);
        }
        // Of `fewer` the one tensor was kept, under another name.
        assert_eq!(files(dir.path()), 2);
    }

    #[test]
    fn a_model_that_changes_while_it_is_loaded_is_not_kept() {
        let (dir, sample) = (tempfile::tempdir().unwrap(), Sample::new("changes", LEN));
        let map = FileMapping::open(&sample.path).unwrap();
        let [a, b, c] = TENSORS;
        let buffer = Buffer::placed(dir.path());
        assert!(!buffer.set(a.0, &map.bytes()[a.2..a.2 + a.1]));
        sample.open_to_write().write_all_at(b"x", 2_999_999).unwrap();
        assert!(!buffer.set(b.0, &map.bytes()[b.2..b.2 + b.1]) && !buffer.set(c.0, &map.bytes()[c.2..c.2 + c.1]));
        assert!(buffer.is_over() && files(dir.path()) == 0);
    }

    #[test]
    fn a_change_after_the_file_was_found_is_seen() {
        let (dir, sample, map) = kept("after");
        let [a, b, _] = TENSORS;
        let buffer = Buffer::placed(dir.path());
        assert!(buffer.set(a.0, &map.bytes()[a.2..a.2 + a.1]));
        sample.open_to_write().write_all_at(&[!sample.bytes[b.2 + 100_000]], b.2 as u64 + 100_000).unwrap();
        assert!(!buffer.set(b.0, &map.bytes()[b.2..b.2 + b.1]));
        // SAFETY: the region has these bytes, and nobody writes them now.
        assert!(unsafe { std::slice::from_raw_parts(buffer.region.base().add(b.0), b.1) } == &map.bytes()[b.2..b.2 + b.1]);
    }
}
