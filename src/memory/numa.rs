//! NUMA nodes: which one memory should lie on.
//!
//! Owns: the system calls about it. Must not know: who wants which node, and why.
//!
//! The kernel heeds a wish for a range of anonymous memory and of files in memory. The pages of a file on a disk lie on the node of whichever
//! thread first touches them.

use super::Region;
use crate::error::{Error, Result};

/// Whether this machine has the node.
///
/// # Errors
/// [`crate::error::Status::InvalidArgument`], with the number of nodes, if not.
pub fn check(node: u32) -> Result<()> {
    let exists = node == 0 || std::path::Path::new(&format!("/sys/devices/system/node/node{node}")).is_dir();
    if exists { Ok(()) } else { Err(Error::invalid(format!("NUMA node {node}: this machine has {}", super::system::numa_nodes()))) }
}

/// Asks for the pages of a region to come from a node, as long as it has any; those that are there already stay where they are. Nothing on a
/// machine with one node.
///
/// # Errors
/// [`crate::error::Status::InvalidArgument`] if the machine has no such node. A refusal by the kernel is none: memory is where it would be without the wish.
pub fn prefer(region: &Region, node: u32) -> Result<()> {
    check(node)?;
    if super::system::numa_nodes() > 1 {
        ask(region.base(), region.len(), node);
    }
    Ok(())
}

/// The same for a part of memory, unless the process has a policy of its own (`numactl`), which is the user's word.
pub(super) fn suggest(base: *mut u8, len: usize, node: u32) {
    let mut policy: libc::c_int = 0;
    // SAFETY: `policy` is writable; no mask is asked for.
    let known = unsafe { libc::syscall(libc::SYS_get_mempolicy, &raw mut policy, 0usize, 0usize, 0usize, 0usize) } == 0;
    if known && policy == libc::MPOL_DEFAULT {
        ask(base, len, node);
    }
}

/// Whether the kernel took the wish.
fn ask(base: *mut u8, len: usize, node: u32) -> bool {
    const BITS: usize = usize::BITS as usize;
    let mut mask = [0usize; 16];
    let Some(word) = mask.get_mut(node as usize / BITS) else { return false };
    *word |= 1 << (node as usize % BITS);
    // SAFETY: the pages are the caller's, the mask has as many bits as it says, and no page is moved or lost by the call.
    let result = unsafe { libc::syscall(libc::SYS_mbind, base, len, libc::MPOL_PREFERRED, mask.as_ptr(), mask.len() * BITS, 0) };
    result == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::pageable::Pageable;

    #[test]
    fn the_first_node_is_there_and_takes_memory_and_one_that_is_not_is_refused() {
        let region = Region::from(Pageable::new(3 << 20).unwrap());
        assert!(prefer(&region, 0).is_ok());
        // Kernels without NUMA do not know the call at all.
        assert!(ask(region.base(), region.len(), 0) || std::io::Error::last_os_error().raw_os_error() == Some(libc::ENOSYS));
        assert!(!ask(region.base(), region.len(), 100_000));
        suggest(region.base(), region.len(), 0);
        let error = prefer(&region, 4000).unwrap_err();
        assert!(error.message.contains("NUMA node 4000"), "{error}");
    }
}
