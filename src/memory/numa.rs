//! NUMA nodes: where memory should lie, and where it does lie.
//!
//! Owns: the system calls about it. Must not know: who wants which node, and why.
//!
//! A wish must come before the first touch: pages that are there already stay where they are. The kernel keeps a wish for a range of anonymous
//! memory and of files in memory. For the pages of a file on a disk it goes by the wish of the thread that first reads or writes them: so the threads
//! that fill an arena have one ([`Plan::for_this_thread`]). Pages that somebody else brings in (the host's mapping of a model, an arena page that was
//! taken back and is read again) come from where that thread's own wish says. None of this is assumed: [`spread`] asks the kernel.

use std::collections::BTreeMap;

use super::Region;
use crate::error::{Error, Result, Status};

const BITS: usize = usize::BITS as usize;

/// As many nodes as a kernel can be built for.
const MOST: usize = 1024;

type Mask = [usize; MOST / BITS];

/// Pages that are looked at in a region.
const SAMPLES: usize = 256;

/// Where pages should come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// From all nodes in turn.
    Interleave,
    /// From one node, as long as it has any: what does not fit comes from others instead of ending the process.
    Bind(u32),
    /// From the node of whoever first touches them, whatever the process was started with.
    Local,
}

impl std::fmt::Display for Policy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Policy::Interleave => write!(f, "interleave"),
            Policy::Bind(node) => write!(f, "bind:{node}"),
            Policy::Local => write!(f, "local"),
        }
    }
}

/// A policy on this machine's nodes, as the kernel takes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    policy: Policy,
    mode: libc::c_int,
    mask: Mask,
}

impl Policy {
    /// On this machine. `None` where there is only one node: then there is nothing to choose.
    ///
    /// # Errors
    /// [`Status::InvalidArgument`] if the node that it names has no memory for this process.
    pub fn plan(self) -> Result<Option<Plan>> {
        let nodes = nodes();
        let plan = Plan::over(self, &nodes)?;
        Ok(Some(plan).filter(|_| nodes.len() > 1))
    }
}

impl Plan {
    /// Of these nodes.
    pub(crate) fn over(policy: Policy, nodes: &[u32]) -> Result<Plan> {
        let mut mask = [0; MOST / BITS];
        let mode = match policy {
            Policy::Local => libc::MPOL_LOCAL,
            Policy::Interleave => {
                nodes.iter().for_each(|node| set(&mut mask, *node));
                libc::MPOL_INTERLEAVE
            }
            Policy::Bind(node) if nodes.contains(&node) => {
                set(&mut mask, node);
                libc::MPOL_PREFERRED
            }
            Policy::Bind(node) => {
                let message = format!("NUMA node {node} has no memory for this process; those that have: {}", list(nodes));
                return Err(Error::invalid(message));
            }
        };
        Ok(Plan { policy, mode, mask })
    }

    /// What it is made of.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// The pages of these bytes are to come from there. Those that are there already stay where they are.
    ///
    /// # Errors
    /// [`Status::Unsupported`] if the kernel refuses: memory is where it would be without the wish.
    pub(super) fn wish(&self, base: *mut u8, len: usize) -> Result<()> {
        // SAFETY: no page is moved or lost by the call, whatever the range is, and the mask has as many bits as it says.
        let result = unsafe { libc::syscall(libc::SYS_mbind, base, len, self.mode, self.mask.as_ptr(), MOST, 0) };
        if result == 0 { Ok(()) } else { Err(self.refused("mbind")) }
    }

    /// Until the result is dropped, what this thread reads and writes of files comes from there too.
    ///
    /// # Errors
    /// As [`Plan::wish`].
    pub fn for_this_thread(&self) -> Result<Scope> {
        let (mut mode, mut mask): (libc::c_int, Mask) = (0, [0; MOST / BITS]);
        // SAFETY: both are writable, the mask as long as it says.
        let known = unsafe { libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, mask.as_mut_ptr(), MOST, 0usize, 0) };
        // SAFETY: the mask has as many bits as it says.
        if known != 0 || unsafe { libc::syscall(libc::SYS_set_mempolicy, self.mode, self.mask.as_ptr(), MOST) } != 0 {
            return Err(self.refused("set_mempolicy"));
        }
        Ok(Scope { mode, mask, thread: std::marker::PhantomData })
    }

    fn refused(&self, call: &str) -> Error {
        let why = std::io::Error::last_os_error();
        Error::new(Status::Unsupported, format!("the kernel does not take the NUMA policy {}: {call}: {why}", self.policy))
    }
}

/// A thread's wish, which ends with it. It stays on its thread.
pub struct Scope {
    mode: libc::c_int,
    mask: Mask,
    thread: std::marker::PhantomData<*const ()>,
}

impl Drop for Scope {
    fn drop(&mut self) {
        // SAFETY: the mask has as many bits as it says. What the kernel gave it takes back.
        unsafe { libc::syscall(libc::SYS_set_mempolicy, self.mode, self.mask.as_ptr(), MOST) };
    }
}

fn set(mask: &mut Mask, node: u32) {
    if let Some(word) = mask.get_mut(node as usize / BITS) {
        *word |= 1 << (node as usize % BITS);
    }
}

fn list(nodes: &[u32]) -> String {
    nodes.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

/// The nodes that have memory and that this process may use, in order; node 0 where the kernel knows of none.
pub fn nodes() -> Vec<u32> {
    let there = std::fs::read_to_string("/sys/devices/system/node/has_memory").unwrap_or_default();
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    usable(&there, status.lines().find_map(|l| l.strip_prefix("Mems_allowed_list:")))
}

fn usable(there: &str, allowed: Option<&str>) -> Vec<u32> {
    let mut nodes = ranges(there);
    if let Some(allowed) = allowed {
        let allowed = ranges(allowed);
        nodes.retain(|n| allowed.contains(n));
    }
    if nodes.is_empty() { vec![0] } else { nodes }
}

/// A list as the kernel writes it: `0-3,8`.
fn ranges(text: &str) -> Vec<u32> {
    let one = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.trim().parse::<u32>().ok()?, last.trim().parse::<u32>().ok()?);
        (last < MOST as u32).then_some(first..=last)
    };
    text.trim().split(',').filter_map(one).flatten().collect()
}

/// Whether this machine has the node.
///
/// # Errors
/// [`Status::InvalidArgument`], with the number of nodes, if not.
pub fn check(node: u32) -> Result<()> {
    let exists = node == 0 || std::path::Path::new(&format!("/sys/devices/system/node/node{node}")).is_dir();
    if exists { Ok(()) } else { Err(Error::invalid(format!("NUMA node {node}: this machine has {}", super::system::numa_nodes()))) }
}

/// Asks for the pages of a region to come from a node, as long as it has any; those that are there already stay where they are. Nothing on a
/// machine with one node.
///
/// # Errors
/// [`Status::InvalidArgument`] if the machine has no such node. A refusal by the kernel is none: memory is where it would be without the wish.
pub fn prefer(region: &Region, node: u32) -> Result<()> {
    check(node)?;
    if let Ok(Some(plan)) = Policy::Bind(node).plan() {
        let _ = plan.wish(region.base(), region.len());
    }
    Ok(())
}

/// The same for a part of memory, unless the thread has a policy of its own (`numactl`, `BERTH_NUMA`), which is the user's word.
pub(super) fn suggest(base: *mut u8, len: usize, node: u32) {
    let mut policy: libc::c_int = 0;
    // SAFETY: `policy` is writable; no mask is asked for.
    let known = unsafe { libc::syscall(libc::SYS_get_mempolicy, &raw mut policy, 0usize, 0usize, 0usize, 0usize) } == 0;
    if known
        && policy == libc::MPOL_DEFAULT
        && let Ok(plan) = Plan::over(Policy::Bind(node), &[node])
    {
        // Where the kernel refuses, memory is where it would be anyway.
        let _ = plan.wish(base, len);
    }
}

/// Where pages lie.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spread {
    /// How many of them on each node.
    pub nodes: BTreeMap<u32, usize>,
    /// How many are nowhere: nobody has touched them, or they were taken back.
    pub absent: usize,
}

impl Spread {
    /// How many were looked at.
    pub fn pages(&self) -> usize {
        self.nodes.values().sum::<usize>() + self.absent
    }
}

/// Where up to 256 pages of these bytes lie, evenly spaced, as the kernel says; `None` if it does not. With `read` those of a file that are not
/// there are read first: what a fill has written need not be in this process's page tables.
pub fn spread(base: usize, len: usize, read: bool) -> Option<Spread> {
    let page = super::input::page_size();
    let (first, pages) = (base / page * page, len.div_ceil(page));
    let step = pages.div_ceil(SAMPLES).max(1);
    let addresses: Vec<usize> = (0..pages).step_by(step).map(|i| first + i * page).collect();
    if read {
        for address in &addresses {
            // SAFETY: no content changes by it, whatever is there; where there is nothing to read it fails.
            unsafe { libc::madvise(std::ptr::without_provenance_mut(*address), page, libc::MADV_POPULATE_READ) };
        }
    }
    let mut status = vec![0 as libc::c_int; addresses.len()];
    // SAFETY: both lists are that long. Without nodes to move to the call only asks, and takes any address.
    let known = unsafe { libc::syscall(libc::SYS_move_pages, 0, addresses.len(), addresses.as_ptr(), 0usize, status.as_mut_ptr(), 0) } == 0;
    known.then(|| {
        let mut spread = Spread::default();
        for node in status {
            match u32::try_from(node) {
                Ok(node) => *spread.nodes.entry(node).or_default() += 1,
                Err(_) => spread.absent += 1,
            }
        }
        spread
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::arena::{Arena, Directory};
    use crate::memory::pageable::Pageable;

    const ALL: [Policy; 3] = [Policy::Interleave, Policy::Bind(0), Policy::Local];

    /// Kernels without NUMA do not know the calls at all.
    fn without_numa(error: &Error) -> bool {
        error.message.contains("os error 38")
    }

    #[test]
    fn lists_of_the_kernel_are_read() {
        assert_eq!(ranges("0\n"), [0]);
        assert_eq!(ranges("0-2,5,7-8\n"), [0, 1, 2, 5, 7, 8]);
        assert_eq!((ranges(""), ranges("x,-,1-,4000000000,0-4000000000")), (vec![], vec![]));
        assert_eq!(usable("0-3\n", Some("\t1,3-9")), [1, 3]);
        assert_eq!((usable("", None), usable("1\n", Some("0"))), (vec![0], vec![0]), "never none");
        assert!(!nodes().is_empty());
    }

    #[test]
    fn masks_have_the_nodes_and_no_others() {
        let plan = Plan::over(Policy::Interleave, &[0, 3, 64, 1023]).unwrap();
        let mut wanted = [0; MOST / BITS];
        (wanted[0], wanted[1], wanted[15]) = (0b1001, 1, 1 << 63);
        assert_eq!((plan.mode, plan.mask), (libc::MPOL_INTERLEAVE, wanted));
        let plan = Plan::over(Policy::Bind(65), &[0, 65]).unwrap();
        assert_eq!((plan.mode, plan.mask[1], plan.mask.iter().filter(|w| **w != 0).count()), (libc::MPOL_PREFERRED, 2, 1));
        let plan = Plan::over(Policy::Local, &[0, 1]).unwrap();
        assert_eq!((plan.mode, plan.mask), (libc::MPOL_LOCAL, [0; MOST / BITS]));
        let error = Plan::over(Policy::Bind(2), &[0, 1]).unwrap_err();
        assert!(error.message.contains("node 2") && error.message.ends_with("0, 1"), "{error}");
        assert_eq!(ALL.map(|p| p.to_string()), ["interleave", "bind:0", "local"]);
    }

    #[test]
    fn one_node_is_nothing_to_choose_and_a_missing_one_is_an_error() {
        if nodes().len() == 1 {
            assert!(ALL.iter().all(|policy| policy.plan() == Ok(None)) || !nodes().contains(&0));
        }
        assert!(Policy::Bind(4000).plan().unwrap_err().message.contains("NUMA node 4000"));
        let region = Region::from(Pageable::new(3 << 20).unwrap());
        assert!(prefer(&region, 0).is_ok());
        suggest(region.base(), region.len(), 0);
        suggest(region.base(), region.len(), 1022);
        assert!(prefer(&region, 4000).unwrap_err().message.contains("NUMA node 4000"));
    }

    /// The system calls as on a machine with many nodes, with those that are here.
    #[test]
    fn every_place_takes_a_wish_and_the_kernel_says_where_its_pages_are() {
        const LEN: usize = 3 << 20;
        let dir = tempfile::tempdir().unwrap();
        let directory = Directory::open(dir.path(), false).unwrap();
        for policy in ALL {
            let plan = Plan::over(policy, &[0]).unwrap();
            for file in [false, true] {
                let region = if file {
                    Region::from(Arena::new(&directory, LEN).unwrap().slice(LEN).unwrap())
                } else {
                    Region::from(Pageable::new(LEN).unwrap())
                };
                match region.place_on(&plan) {
                    Err(error) if without_numa(&error) => return eprintln!("SKIPPED: {error}"),
                    result => result.unwrap(),
                }
                let before = spread(region.base().addr(), LEN, false).unwrap();
                assert_eq!((before.nodes.len(), before.pages()), (0, SAMPLES), "{policy}: nothing is touched by a wish");
                let source = vec![7u8; LEN];
                // SAFETY: the region is this test's.
                unsafe { crate::memory::fill::copy(source.as_ptr(), &region.target(0, LEN).unwrap(), &mut |_| {}) };
                let after = spread(region.base().addr(), LEN, file).unwrap();
                assert_eq!((after.nodes.get(&0), after.absent), (Some(&SAMPLES), 0), "{policy}, in a file: {file}");
            }
        }
    }

    #[test]
    fn a_thread_has_its_own_wish_back_afterwards() {
        let now = || {
            let mut mode = -1;
            // SAFETY: the mode is writable, and no mask is asked for.
            let known = unsafe { libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, 0usize, 0, 0usize, 0) } == 0;
            known.then_some(mode)
        };
        let Some(before) = now() else { return eprintln!("SKIPPED: a kernel without NUMA") };
        for policy in ALL {
            let plan = Plan::over(policy, &[0]).unwrap();
            let scope = plan.for_this_thread().unwrap();
            assert_eq!(now(), Some(plan.mode), "{policy}");
            drop(scope);
            assert_eq!(now(), Some(before), "{policy}");
        }
    }

    #[test]
    fn a_kernel_that_refuses_is_told_with_the_policy() {
        // No machine has that node.
        let plan = Plan::over(Policy::Bind(1022), &[1022]).unwrap();
        let region = Region::from(Pageable::new(3 << 20).unwrap());
        for error in [region.place_on(&plan).unwrap_err(), plan.for_this_thread().err().unwrap()] {
            assert!(error.status == Status::Unsupported && error.message.contains("bind:1022"), "{error}");
        }
    }

    #[test]
    fn addresses_of_nothing_are_nowhere() {
        assert_eq!(spread(4096, 8192, true).map(|s| (s.nodes.len(), s.absent)), Some((0, 2)));
        assert_eq!(spread(4096, 0, false).map(|s| s.pages()), Some(0));
    }
}
