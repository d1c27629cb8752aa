//! `BERTH_NUMA`: memory gets its wish before anybody touches it, and once a load is over the kernel is asked where the pages are.
//!
//! Owns: which buffers are asked about, and the line and the record of each. Must not know: system calls.
//!
//! On a machine with one node nothing is done and nothing is recorded. The host's mapping of a model (`CPU_MMAP`) gets no wish: its pages come in by the
//! host's own threads, before a buffer is made of it. It is asked about all the same.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::config::{self, Numa};
use crate::log;
use crate::memory::Region;
use crate::memory::numa::{self, Plan, Policy};
use crate::report::{self, numa::Numa as Record};

/// A buffer of which it is not told yet where its pages are. Addresses, not pointers: nothing is read through them.
struct Open {
    id: report::Id,
    base: usize,
    len: usize,
    is_file: bool,
    policy: Policy,
    /// Why the kernel did not take the wish.
    refused: Option<String>,
}

static OPEN: Mutex<Vec<Open>> = Mutex::new(Vec::new());

fn open() -> MutexGuard<'static, Vec<Open>> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the settings wish for on this machine; `None` for nothing, and on one node.
pub(super) fn wished() -> Option<&'static Plan> {
    static PLAN: OnceLock<Option<Plan>> = OnceLock::new();
    let read = || {
        let policy = match config::get().ok()?.numa? {
            Numa::Interleave => Policy::Interleave,
            Numa::Bind(node) => Policy::Bind(node),
            Numa::Local => Policy::Local,
        };
        policy.plan().unwrap_or_else(|error| {
            log::warning!("BERTH_NUMA={policy} has no effect: {error}");
            None
        })
    };
    PLAN.get_or_init(read).as_ref()
}

/// Memory has just been got, and nobody has touched it. The result is why the kernel does not take the wish.
pub(super) fn wish(region: &Region, plan: Option<&Plan>) -> Option<String> {
    let refused = region.place_on(plan?).err()?.message;
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| log::warning!("memory lies where it would without BERTH_NUMA: {refused}"));
    Some(refused)
}

/// A buffer has its record.
pub(super) fn follow(id: report::Id, region: &Region, plan: Option<&Plan>, refused: Option<String>) {
    if let Some(plan) = plan.filter(|_| !region.is_empty()) {
        let (base, len, is_file, policy) = (region.base().addr(), region.len(), region.is_file(), plan.policy());
        open().push(Open { id, base, len, is_file, policy, refused });
    }
}

/// A buffer is about to go.
pub fn forget(id: report::Id) {
    open().retain(|o| o.id != id);
}

/// A load is over: all its pages have been touched.
pub(super) fn end_of_load() {
    // Held while the kernel is asked: a buffer that goes now waits.
    let told: Vec<(report::Id, Record)> = open().drain(..).map(|o| (o.id, ask(o))).collect();
    // No lock is held: a log may call back into us.
    told.into_iter().for_each(|(id, record)| report::numa::record(id, record));
}

fn ask(open: Open) -> Record {
    let spread = numa::spread(open.base, open.len, open.is_file);
    let wanted = if let Policy::Bind(node) = open.policy { Some(node) } else { None };
    Record::new(open.policy.to_string(), wanted, spread, open.refused)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::pageable::Pageable;
    use crate::report::Place;

    fn recorded(id: report::Id) -> serde_json::Value {
        let report: serde_json::Value = serde_json::from_str(&report::to_json()).unwrap();
        let all = report["buffers"].as_array().unwrap();
        all.iter().find(|b| b["asked"] == "NUMA" && id.is(b["id"].as_u64().unwrap())).unwrap()["numa"].clone()
    }

    /// As on a machine with many nodes, with the one that is here.
    #[test]
    fn what_the_kernel_says_is_in_the_report() {
        const LEN: usize = 4 << 20;
        let one = |policy, touch: bool| {
            let plan = Plan::over(policy, &[0]).unwrap();
            let region = Region::from(Pageable::new(LEN).unwrap());
            let refused = wish(&region, Some(&plan));
            if refused.as_ref().is_some_and(|r| r.contains("os error 38")) {
                eprintln!("SKIPPED: a kernel without NUMA");
                return None;
            }
            if touch {
                crate::memory::testing::touch(&region);
            }
            let id = report::add_buffer("NUMA", Place::Pageable, LEN, None, None, false);
            follow(id, &region, Some(&plan), refused);
            end_of_load();
            let numa = recorded(id);
            forget(id);
            report::remove_buffer(id);
            Some(numa)
        };
        for (policy, name) in [(Policy::Interleave, "interleave"), (Policy::Local, "local"), (Policy::Bind(0), "bind:0")] {
            let Some(numa) = one(policy, true) else { return };
            assert_eq!((&numa["asked"], &numa["nodes"]["0"], &numa["absent"]), (&name.into(), &256.into(), &0.into()), "{numa}");
            assert!(numa["message"].is_null(), "{numa}");
        }
        let numa = one(Policy::Interleave, false).unwrap();
        assert_eq!((numa["nodes"].as_object().unwrap().len(), &numa["absent"]), (0, &256.into()), "{numa}");
    }

    #[test]
    fn a_wish_that_the_kernel_refuses_is_in_the_report() {
        let plan = Plan::over(Policy::Bind(1022), &[1022]).unwrap();
        let region = Region::from(Pageable::new(4096).unwrap());
        let refused = wish(&region, Some(&plan));
        let id = report::add_buffer("NUMA", Place::Pageable, 4096, None, None, false);
        follow(id, &region, Some(&plan), refused);
        end_of_load();
        let numa = recorded(id);
        assert!(numa["message"].as_str().is_some_and(|m| m.contains("bind:1022")), "{numa}");
        report::remove_buffer(id);
    }

    #[test]
    fn without_the_setting_nothing_is_followed() {
        let region = Region::from(Pageable::new(4096).unwrap());
        assert!(wished().is_none() && wish(&region, None).is_none());
        let id = report::add_buffer("NUMA", Place::Pageable, 4096, None, None, false);
        follow(id, &region, None, None);
        assert!(!open().iter().any(|o| o.id == id));
        end_of_load();
        assert!(recorded(id).is_null());
        report::remove_buffer(id);
    }
}
