//! Room for a file that is to last: which others go.
//!
//! Owns: the order in which they go. Nothing goes that a process uses, that is not one of Berth's, or that others could have made. Must not know: who asks.

use std::fs::File;
use std::time::SystemTime;

use super::store::{Store, lock};
use super::{Refusal, Why, header};

/// A file that may go, if nobody uses it.
struct Other {
    used: SystemTime,
    name: String,
    bytes: u64,
    file: File,
}

impl Store {
    /// All but the one of this name, those that were used least recently first.
    fn others(&self, name: &str) -> Vec<Other> {
        let one = |other: String| {
            let file = self.open_file(&other).ok()?;
            // Before it is read.
            let meta = file.metadata().ok()?;
            header::begins(&file).then_some(())?;
            Some(Other { used: meta.accessed().unwrap_or(SystemTime::UNIX_EPOCH), name: other, bytes: meta.len(), file })
        };
        let mut all: Vec<Other> = self.names().into_iter().filter(|n| n != name).filter_map(one).collect();
        all.sort_by_key(|o| o.used);
        all
    }

    /// Those that have to go for `bytes` more under this name to be within the limit. Nobody uses them, and nobody can from now on.
    fn to_go(&self, name: &str, bytes: u64, limit: Option<u64>) -> Result<Vec<Other>, Refusal> {
        let Some(limit) = limit else { return Ok(Vec::new()) };
        if bytes > limit {
            return Err(Refusal::new(Why::Limit, format!("it has {bytes} bytes, and BERTH_ARENA_LIMIT is {limit}")));
        }
        let others = self.others(name);
        let mut total: u64 = others.iter().map(|o| o.bytes).sum();
        let mut go = Vec::new();
        for other in others {
            if total <= limit - bytes {
                break;
            }
            if lock(&other.file, libc::LOCK_EX).unwrap_or(false) {
                total -= other.bytes;
                go.push(other);
            }
        }
        if total > limit - bytes {
            let message = format!("{bytes} bytes more than the {total} of files in use would be above BERTH_ARENA_LIMIT, {limit}");
            return Err(Refusal::new(Why::Limit, message));
        }
        Ok(go)
    }

    /// Whether a file of so many bytes will be within the limit, as far as that can be known before it is built. Nothing goes.
    ///
    /// # Errors
    /// [`Why::Limit`] if it is too large, or those that would have to go are in use.
    pub fn check_room(&self, name: &str, bytes: u64, limit: Option<u64>) -> Result<(), Refusal> {
        self.to_go(name, bytes, limit).map(drop)
    }

    /// Removes those that were used least recently until `bytes` more are within the limit. The directory's lock must be held.
    pub(super) fn make_room(&self, name: &str, bytes: u64, limit: Option<u64>) -> Result<(), Refusal> {
        for other in self.to_go(name, bytes, limit)? {
            self.unlink(&other.name).map_err(|e| Refusal::new(Why::Io, format!("remove {}: {e}", other.name)))?;
        }
        Ok(())
    }

    /// A file of this name with so many bytes is used again: others go until all are within the limit.
    ///
    /// # Errors
    /// [`Why::Limit`] if they are not: it is too large by itself, or others are in use.
    pub fn keep_limit(&self, name: &str, bytes: u64, limit: Option<u64>) -> Result<(), Refusal> {
        if limit.is_none() {
            return Ok(());
        }
        let _alone = self.alone()?;
        self.make_room(name, bytes, limit)
    }

    /// The disk has too little for `bytes` more: removes what no start will use any more, and then, with a limit, what would have to go for it anyway, until
    /// there is enough. The result is what went, and why.
    pub fn make_space(&self, bytes: u64, limit: Option<u64>) -> Vec<(String, String)> {
        let Ok(_alone) = self.alone() else { return Vec::new() };
        let enough = || self.directory().free_bytes().is_ok_and(|free| free >= bytes);
        let mut gone = Vec::new();
        // The file is closed at the end of each turn: until then its space is taken.
        let mut remove = |other: Other, why: String| {
            if lock(&other.file, libc::LOCK_EX).unwrap_or(false) && self.unlink(&other.name).is_ok() {
                gone.push((other.name, why));
            }
        };
        let (stale, good): (Vec<_>, Vec<_>) =
            self.others("").into_iter().map(|other| (self.stale(&other.name), other)).partition(|(stale, _)| stale.is_some());
        for (why, other) in stale {
            if enough() {
                return gone;
            }
            remove(other, why.map_or_else(String::new, |r| r.message));
        }
        let mut total: u64 = good.iter().map(|(_, o)| o.bytes).sum();
        let Some(limit) = limit.filter(|limit| bytes <= *limit) else { return gone };
        for (_, other) in good {
            if enough() || total <= limit - bytes {
                break;
            }
            total -= other.bytes;
            remove(other, format!("it was used least recently, and BERTH_ARENA_LIMIT is {limit}"));
        }
        gone
    }

    /// Why no start will use a file any more, if that is so.
    pub(super) fn stale(&self, name: &str) -> Option<Refusal> {
        match self.open(name) {
            Ok(kept) => kept.table.models.iter().find_map(|m| m.check_by_name().err()),
            Err(refusal) if matches!(refusal.why, Why::Damaged | Why::OtherVersion | Why::Modified) => Some(refusal),
            Err(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::header::HEADER;
    use super::super::store::tests::{LEN, keep, store, why};
    use super::*;
    use crate::memory::HUGE_PAGE;
    use crate::memory::testing::Sample;

    const FILE: u64 = (HEADER + 2 * HUGE_PAGE) as u64;

    fn used(dir: &std::path::Path, name: &str, seconds: u64) {
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        File::open(dir.join(name)).unwrap().set_times(std::fs::FileTimes::new().set_accessed(time)).unwrap();
    }

    #[test]
    fn the_limit_removes_what_was_used_least_recently_and_nobody_holds() {
        let (dir, sample) = (tempfile::tempdir().unwrap(), Sample::new("limit", LEN));
        let store = store(dir.path());
        assert_eq!(why(keep(&store, "a.arena", &sample, Some(FILE - 1))), Why::Limit);
        for (name, time) in [("a.arena", 3000), ("b.arena", 1000), ("c.arena", 2000)] {
            drop(keep(&store, name, &sample, Some(3 * FILE)).unwrap());
            used(dir.path(), name, time);
        }
        let held = store.open("b.arena").unwrap();
        drop(keep(&store, "d.arena", &sample, Some(3 * FILE)).unwrap());
        assert_eq!(store.names(), ["a.arena", "b.arena", "d.arena"]);
        drop(keep(&store, "d.arena", &sample, Some(3 * FILE)).unwrap());
        assert_eq!(store.names(), ["a.arena", "b.arena", "d.arena"], "a file does not count beside its successor");
        assert_eq!(why(keep(&store, "e.arena", &sample, Some(2 * FILE - 1))), Why::Limit);
        assert_eq!(store.names(), ["a.arena", "b.arena", "d.arena"], "nothing is removed in vain");
        drop(held);
        drop(keep(&store, "e.arena", &sample, Some(FILE)).unwrap());
        assert_eq!(store.names(), ["e.arena"]);
    }

    #[test]
    fn the_limit_is_asked_before_anything_is_copied_and_applied_when_a_file_is_used_again() {
        let (dir, sample) = (tempfile::tempdir().unwrap(), Sample::new("before", LEN));
        let store = store(dir.path());
        for (name, time) in [("a.arena", 1000), ("b.arena", 2000)] {
            drop(keep(&store, name, &sample, None).unwrap());
            used(dir.path(), name, time);
        }
        let held = store.open("a.arena").unwrap();
        assert_eq!(store.check_room("c.arena", FILE, Some(2 * FILE)), Ok(()));
        assert_eq!(why(store.check_room("c.arena", FILE, Some(2 * FILE - 1))), Why::Limit);
        assert_eq!(why(store.check_room("c.arena", FILE, Some(FILE - 1))), Why::Limit);
        assert_eq!(store.check_room("c.arena", u64::MAX, None), Ok(()));
        assert_eq!(store.names().len(), 2, "asking removes nothing");
        assert_eq!(store.keep_limit("a.arena", FILE, None), Ok(()));
        assert_eq!(why(store.keep_limit("a.arena", FILE, Some(FILE - 1))), Why::Limit);
        assert_eq!(store.names().len(), 2);
        assert_eq!(store.keep_limit("a.arena", FILE, Some(FILE)), Ok(()));
        assert_eq!(store.names(), ["a.arena"]);
        drop(held);
    }

    #[test]
    fn for_want_of_space_what_is_stale_goes_and_with_a_limit_what_would_go_anyway() {
        let (dir, sample, other) = (tempfile::tempdir().unwrap(), Sample::new("space", LEN), Sample::new("gone", LEN));
        let store = store(dir.path());
        let all = || {
            for (name, sample, time) in [("a.arena", &sample, 1000), ("b.arena", &sample, 2000), ("s.arena", &other, 3000)] {
                drop(keep(&store, name, sample, None).unwrap());
                used(dir.path(), name, time);
            }
            std::fs::write(dir.path().join("foreign.arena"), "nothing of Berth's").unwrap();
        };
        let names = |gone: Vec<(String, String)>| gone.into_iter().map(|(name, _)| name).collect::<Vec<_>>();
        all();
        assert!(store.make_space(1, Some(1)).is_empty(), "there is enough");
        // More than any disk has.
        assert!(store.make_space(1 << 60, None).is_empty(), "none is stale");
        other.open_to_write().set_modified(SystemTime::UNIX_EPOCH).unwrap();
        let held = store.open("s.arena").unwrap();
        assert!(store.make_space(1 << 60, None).is_empty(), "what is stale and in use stays");
        drop(held);
        assert_eq!(names(store.make_space(1 << 60, None)), ["s.arena"]);
        let held = store.open("a.arena").unwrap();
        assert_eq!(names(store.make_space(1 << 60, Some((1 << 60) + FILE))), [""; 0], "the one that would go is in use");
        drop(held);
        assert_eq!(names(store.make_space(1 << 60, Some((1 << 60) + FILE))), ["a.arena"]);
        assert_eq!(store.names(), ["b.arena", "foreign.arena"]);
        assert!(store.make_space(1 << 60, Some(5)).is_empty(), "it could not be kept anyway");
    }
}
