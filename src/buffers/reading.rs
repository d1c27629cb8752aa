//! A host that does not map a model reads it straight into a buffer, and tells nobody.
//!
//! Owns: from when to when that may be so: from the first tensor that is placed to the first one that is set, or to the end of the load. Must not know: what is
//! done meanwhile ([`crate::memory::watch`]).

use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::memory::{Region, watch::Watch};

/// The watch of each buffer that has one.
static OPEN: Mutex<Vec<Weak<Mutex<State>>>> = Mutex::new(Vec::new());

/// Of one buffer.
#[derive(Default)]
pub(super) struct Reading(Arc<Mutex<State>>);

#[derive(Default)]
enum State {
    /// No tensor has been placed.
    #[default]
    Before,
    /// The host may be reading.
    Open(#[expect(dead_code, reason = "held to be dropped")] Watch),
    /// It is not, or not any more, or there is nothing to bound.
    Over,
}

fn change<T>(state: &Mutex<State>, with: impl FnOnce(&mut State) -> T) -> T {
    with(&mut state.lock().unwrap_or_else(PoisonError::into_inner))
}

impl Reading {
    /// The host has placed a tensor.
    pub(super) fn begin(&self, region: &Region) {
        let opened = change(&self.0, |state| {
            if !matches!(state, State::Before) {
                return false;
            }
            *state = region.watch().map_or(State::Over, State::Open);
            matches!(state, State::Open(_))
        });
        if opened {
            let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
            open.retain(|o| o.strong_count() > 0);
            open.push(Arc::downgrade(&self.0));
        }
    }

    /// The host sets a tensor: so it does not read by itself.
    pub(super) fn end(&self) {
        change(&self.0, |state| *state = State::Over);
    }

    #[cfg(test)]
    fn is_open(&self) -> bool {
        change(&self.0, |state| matches!(state, State::Open(_)))
    }
}

/// A load is over.
pub(super) fn end_of_load() {
    let open = std::mem::take(&mut *OPEN.lock().unwrap_or_else(PoisonError::into_inner));
    open.iter().filter_map(Weak::upgrade).for_each(|state| change(&state, |state| *state = State::Over));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::arena::{Arena, Directory};
    use crate::memory::pageable::Pageable;

    #[test]
    fn it_lasts_from_the_first_tensor_to_the_end_of_the_load_or_the_first_that_is_set() {
        let dir = tempfile::tempdir().unwrap();
        let region = || Region::from(Arena::new(&Directory::open(dir.path(), false).unwrap(), 4096).unwrap().slice(4096).unwrap());
        let (set, read, memory) = (Reading::default(), Reading::default(), Reading::default());
        assert!(!set.is_open());
        set.begin(&region());
        read.begin(&region());
        memory.begin(&Region::from(Pageable::new(4096).unwrap()));
        assert!(set.is_open() && !memory.is_open());
        set.end();
        set.begin(&region());
        assert!(!set.is_open(), "once");
        // Another test may have ended a load.
        read.is_open();
        end_of_load();
        assert!(!read.is_open());
    }
}
