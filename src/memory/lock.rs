//! Memory that the kernel must not take back: `mlock`.
//!
//! Owns: what the limits allow, and undoing it. Must not know: whose memory it is.
//!
//! Pages are locked when they come (`MLOCK_ONFAULT`): `mlock` itself would bring them in at once, on one thread, before a fill writes them anyway,
//! and read a whole mapped model from its disk before the first token. The limit counts the addresses either way.

use super::budget::{self, Limit, Locked, Pages};
use super::input::page_size;
use super::system;

/// Pages that stay in memory once they are there.
pub struct Lock {
    base: *mut u8,
    len: usize,
    sum: Locked,
}

// SAFETY: an address for the kernel.
unsafe impl Send for Lock {}
// SAFETY: likewise.
unsafe impl Sync for Lock {}

impl Lock {
    /// Locks the pages of `len` bytes at `base`, from the first on, as many as may be: [`Limit`], and what `RLIMIT_MEMLOCK` leaves to a process without
    /// `CAP_IPC_LOCK`. The second is why not all, if not all.
    pub fn new(base: *mut u8, len: usize, pages: Pages, limit: Limit) -> (Lock, Option<String>) {
        let page = page_size();
        let start = base.wrapping_sub(base.addr() % page);
        let all = (base.addr() - start.addr()).saturating_add(len).next_multiple_of(page);
        let mut lock = Lock { base: start, len: 0, sum: Locked::none(pages) };
        let budget = budget::now(limit);
        let granted = usize::try_from(budget.left).unwrap_or(usize::MAX).min(all) / page * page;
        let mut why = (granted < all).then_some(budget.because);
        let mut n = granted;
        if let Err(cause) = lock_pages(start, n) {
            // Whoever has the right is not bound by the limit, and in some containers only seems to have it: so the limit is asked second.
            let left = system::memlock_limit().map(|limit| limit.saturating_sub(system::locked()));
            n = left.map_or(0, |n| usize::try_from(n).unwrap_or(usize::MAX)).min(granted) / page * page;
            why = Some(left.map_or_else(
                || format!("mlock: {cause}"),
                |left| format!("RLIMIT_MEMLOCK leaves {left} bytes (ulimit -l, LimitMEMLOCK=)"),
            ));
            if let Err(again) = lock_pages(start, n) {
                (n, why) = (0, Some(format!("mlock: {again} (and for all of it: {cause})")));
            }
        }
        lock.len = n;
        lock.sum.set(n as u64);
        (lock, why)
    }

    /// Bytes that are locked, whole pages.
    pub fn bytes(&self) -> usize {
        self.len
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: unlocking changes no byte. If the range is gone by now, the kernel says so.
            unsafe { libc::munlock(self.base.cast(), self.len) };
        }
    }
}

fn lock_pages(base: *mut u8, len: usize) -> std::io::Result<()> {
    if len == 0 {
        return Ok(());
    }
    // SAFETY: locking changes no byte.
    if unsafe { libc::mlock2(base.cast(), len, libc::MLOCK_ONFAULT as libc::c_uint) } == 0 {
        return Ok(());
    }
    match std::io::Error::last_os_error() {
        // Before Linux 4.4.
        // SAFETY: as above.
        e if e.raw_os_error() == Some(libc::ENOSYS) && unsafe { libc::mlock(base.cast(), len) } == 0 => Ok(()),
        e => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::pageable::Pageable;

    #[test]
    fn what_the_limit_allows_is_locked_and_unlocked_again() {
        let memory = Pageable::new(4 << 20).unwrap();
        let before = system::locked();
        let (lock, why) = Lock::new(memory.base(), 1 << 20, Pages::Anonymous, Limit::Percent(80));
        assert_eq!((lock.bytes(), why), (1 << 20, None), "every system allows 1 MiB");
        assert!(system::locked() >= before + (1 << 20));
        let (none, why) = Lock::new(memory.base(), 1 << 20, Pages::Anonymous, Limit::Percent(0));
        assert!(none.bytes() == 0 && why.is_some_and(|w| w.contains("0 %")));
        let (_, why) = Lock::new(memory.base(), usize::MAX >> 1, Pages::Anonymous, Limit::Percent(80));
        assert!(why.is_some());
        drop(lock);
    }

    #[test]
    fn pages_are_whole_and_neighbours_too() {
        let memory = Pageable::new(1 << 20).unwrap();
        let (lock, why) = Lock::new(memory.base().wrapping_add(4095), 2, Pages::Anonymous, Limit::Percent(80));
        assert_eq!((lock.bytes(), why), (8192, None));
    }
}
