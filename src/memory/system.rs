//! What the machine and this process's limits allow: RAM, cgroup, memlock, huge pages, NUMA nodes, file systems.
//!
//! Owns: reading `/proc`, `/sys` and the limits. Everything is `None` where the kernel does not tell. Must not know: who asks, what for.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result, Status};

/// Bytes of RAM, from `/proc/meminfo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ram {
    /// All of it.
    pub total: u64,
    /// What can be had without swapping, as the kernel estimates it.
    pub available: u64,
}

/// RAM of the machine.
pub fn ram() -> Option<Ram> {
    parse_meminfo(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

fn parse_meminfo(text: &str) -> Option<Ram> {
    let bytes = |name: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    Some(Ram { total: bytes("MemTotal")?, available: bytes("MemAvailable")? })
}

/// The memory limit of this process's cgroup, in bytes: the smallest on the way up, v1 or v2. `None` if there is none.
pub fn cgroup_limit() -> Option<u64> {
    cgroup_limit_in(&std::fs::read_to_string("/proc/self/cgroup").ok()?, &cgroup_roots())
}

/// Where the memory controllers are mounted: (root, whether it is version 2).
fn cgroup_roots() -> Vec<(PathBuf, bool)> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let parse = |line: &str| {
        let mut fields = line.split(' ');
        let (_, at, kind, options) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
        match kind {
            "cgroup2" => Some((PathBuf::from(at), true)),
            "cgroup" if options.split(',').any(|o| o == "memory") => Some((PathBuf::from(at), false)),
            _ => None,
        }
    };
    mounts.lines().filter_map(parse).collect()
}

fn cgroup_limit_in(own: &str, roots: &[(PathBuf, bool)]) -> Option<u64> {
    groups(own, roots).into_iter().filter_map(|(dir, v2)| limit_of(&dir, v2)).min()
}

/// The groups of this process with a memory controller, on the way up: (directory, whether it is version 2).
fn groups(own: &str, roots: &[(PathBuf, bool)]) -> Vec<(PathBuf, bool)> {
    let mut found = Vec::new();
    for (root, v2) in roots {
        // "0::/path" for version 2, "7:memory:/path" for version 1.
        let path = own.lines().find_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            let ours = if *v2 { controllers.is_empty() } else { controllers.split(',').any(|c| c == "memory") };
            ours.then_some(path)
        });
        let Some(path) = path else { continue };
        let mut dir = root.join(path.trim_start_matches('/'));
        while dir.starts_with(root) {
            found.push((dir.clone(), *v2));
            if !dir.pop() {
                break;
            }
        }
    }
    found
}

fn limit_of(group: &Path, v2: bool) -> Option<u64> {
    let name = if v2 { "memory.max" } else { "memory.limit_in_bytes" };
    let limit = std::fs::read_to_string(group.join(name)).ok().and_then(|t| t.trim().parse::<u64>().ok());
    // Version 1 says "no limit" as a number near 2^63.
    limit.filter(|l| *l < 1 << 62)
}

/// How many more bytes this process's cgroups allow: the least of their limits, less what is used and cannot be reclaimed. The pages of files can.
/// `None` if there is no limit.
pub fn cgroup_room() -> Option<u64> {
    cgroup_room_in(&std::fs::read_to_string("/proc/self/cgroup").ok()?, &cgroup_roots())
}

/// Bytes that this process could have in memory at once, pages of files included.
pub fn room() -> u64 {
    let ram = ram().map_or(u64::MAX, |r| r.available);
    cgroup_room().map_or(ram, |room| room.min(ram))
}

fn cgroup_room_in(own: &str, roots: &[(PathBuf, bool)]) -> Option<u64> {
    let room = |(dir, v2): (PathBuf, bool)| {
        let limit = limit_of(&dir, v2)?;
        let usage = std::fs::read_to_string(dir.join(if v2 { "memory.current" } else { "memory.usage_in_bytes" })).ok();
        let usage: u64 = usage.and_then(|t| t.trim().parse().ok()).unwrap_or(0);
        // Version 1 counts the groups below only under names of their own.
        let stat = std::fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
        let of = |name: &str| {
            let line = stat.lines().find_map(|l| l.strip_prefix(if v2 { "" } else { "total_" })?.strip_prefix(name)?.strip_prefix(' '));
            line.and_then(|n| n.trim().parse::<u64>().ok()).unwrap_or(0)
        };
        let files = of("inactive_file").saturating_add(of("active_file"));
        Some(limit.saturating_sub(usage.saturating_sub(files)))
    };
    groups(own, roots).into_iter().filter_map(room).min()
}

/// A NUMA node that this process may have memory of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its number.
    pub number: u32,
    /// Bytes that are free on it or hold pages of files.
    pub free: u64,
}

/// The NUMA nodes that this process may have memory of.
pub fn nodes() -> Vec<Node> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let allowed = status.lines().find_map(|l| l.strip_prefix("Mems_allowed_list:")).map(str::trim).unwrap_or_default();
    let node = |number: u32| {
        let text = std::fs::read_to_string(format!("/sys/devices/system/node/node{number}/meminfo")).ok()?;
        Some(Node { number, free: free_of_node(&text) })
    };
    list(allowed).into_iter().filter_map(node).collect()
}

/// "0-2,5" as numbers.
fn list(text: &str) -> Vec<u32> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse::<u32>().ok()?..=last.parse::<u32>().ok()?.min(first.parse::<u32>().ok()?.saturating_add(4096)))
    };
    text.split(',').filter_map(range).flatten().collect()
}

fn free_of_node(text: &str) -> u64 {
    // "Node 0 MemFree:        123 kB"
    let bytes = |name: &str| {
        let line = text.lines().find_map(|l| l.split_once(name)).map(|(_, rest)| rest);
        line.and_then(|l| l.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()).map_or(0, |kib| kib << 10)
    };
    bytes(" MemFree:") + bytes(" Active(file):") + bytes(" Inactive(file):") + bytes(" SReclaimable:")
}

/// Bytes that this process has locked with `mlock`, from `/proc/self/status`.
pub fn locked() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmLck:"));
    line.and_then(|l| l.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()).map_or(0, |kib| kib << 10)
}

/// How many bytes this process may lock (`RLIMIT_MEMLOCK`): `None` if there is no limit.
pub fn memlock_limit() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is writable.
    let ok = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } == 0;
    if ok && limit.rlim_cur != libc::RLIM_INFINITY { Some(limit.rlim_cur) } else { None }
}

/// Whether this process may make files of that size: beyond its limit the kernel would not only refuse, but end the process with SIGXFSZ.
///
/// # Errors
/// [`Status::NoSpace`] with both sizes.
pub fn within_file_limit(len: usize) -> Result<()> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is writable.
    if unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) } == 0 && len as u64 > limit.rlim_cur {
        let largest = limit.rlim_cur;
        return Err(Error::new(Status::NoSpace, format!("files may have {largest} bytes here (RLIMIT_FSIZE), {len} are needed")));
    }
    Ok(())
}

/// The kernel's mode of transparent huge pages: `always`, `madvise` or `never`.
pub fn transparent_huge_pages() -> Option<String> {
    let text = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").ok()?;
    Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())
}

/// Number of NUMA nodes with memory; 1 where the kernel knows of none.
pub fn numa_nodes() -> usize {
    let entries = std::fs::read_dir("/sys/devices/system/node").into_iter().flatten().flatten();
    let is_node = |name: &str| name.strip_prefix("node").is_some_and(|n| n.bytes().all(|b| b.is_ascii_digit()) && !n.is_empty());
    entries.filter(|e| e.file_name().to_str().is_some_and(is_node)).count().max(1)
}

/// Type of the file system that holds a path, as `/proc/self/mounts` names it.
pub fn file_system(path: &Path) -> Option<String> {
    let path = path.canonicalize().ok()?;
    file_system_in(&std::fs::read_to_string("/proc/self/mounts").ok()?, &path)
}

fn file_system_in(mounts: &str, path: &Path) -> Option<String> {
    let parse = |line: &str| {
        let mut fields = line.split(' ');
        let (_, at, kind) = (fields.next()?, fields.next()?, fields.next()?);
        // The kernel writes spaces and backslashes as octal escapes.
        let at = PathBuf::from(at.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\"));
        path.starts_with(&at).then(|| (at.components().count(), kind.to_owned()))
    };
    // The longest mount point wins; of equals the last, which lies on top.
    mounts.lines().filter_map(parse).max_by_key(|(depth, _)| *depth).map(|(_, kind)| kind)
}

/// Drops a file's clean pages from the page cache, so that the next read comes from the disk. Advice only.
pub fn drop_cached(file: &std::fs::File) -> Result<()> {
    use std::os::fd::AsRawFd;
    file.sync_data().map_err(|e| Error::os("write back a file", &e))?;
    // SAFETY: the descriptor is open; length 0 means the whole file.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read_in_bytes() {
        let text = "MemTotal:       24684092 kB\nMemFree:         1 kB\nMemAvailable:   23000000 kB\n";
        assert_eq!(parse_meminfo(text), Some(Ram { total: 24_684_092 << 10, available: 23_000_000 << 10 }));
        assert_eq!(parse_meminfo("MemTotal: many kB\n"), None);
        let here = ram().unwrap();
        assert!(here.available <= here.total && here.total > 1 << 20);
    }

    #[test]
    fn the_smallest_cgroup_limit_on_the_way_up_counts() {
        let dir = std::env::temp_dir().join(format!("berth-cgroup-{}", std::process::id()));
        let (v1, v2) = (dir.join("v1"), dir.join("v2"));
        std::fs::create_dir_all(v1.join("a/b")).unwrap();
        std::fs::create_dir_all(v2.join("u")).unwrap();
        std::fs::write(v1.join("memory.limit_in_bytes"), "9223372036854771712\n").unwrap();
        std::fs::write(v1.join("a/memory.limit_in_bytes"), "4096\n").unwrap();
        std::fs::write(v1.join("a/b/memory.limit_in_bytes"), "8192\n").unwrap();
        std::fs::write(v2.join("u/memory.max"), "max\n").unwrap();
        let roots = [(v1, false), (v2.clone(), true)];
        assert_eq!(cgroup_limit_in("7:cpu,memory:/a/b\n0::/u\n", &roots), Some(4096));
        assert_eq!(cgroup_limit_in("7:memory:/\n0::/u\n", &roots), None);
        std::fs::write(v2.join("u/memory.max"), "1024\n").unwrap();
        assert_eq!(cgroup_limit_in("7:memory:/a\n0::/u\n", &roots), Some(1024));
        assert_eq!(cgroup_limit_in("nonsense", &roots), None);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn room_in_a_cgroup_is_its_limit_less_what_cannot_be_reclaimed() {
        let dir = std::env::temp_dir().join(format!("berth-cgroup-room-{}", std::process::id()));
        let (v1, v2) = (dir.join("v1"), dir.join("v2"));
        for (group, limit, usage, stat) in [
            (
                v1.join("a"),
                ("memory.limit_in_bytes", "1000"),
                ("memory.usage_in_bytes", "700"),
                "inactive_file 5\ntotal_inactive_file 300\ntotal_active_file 100\n",
            ),
            (v1.clone(), ("memory.limit_in_bytes", "9223372036854771712"), ("memory.usage_in_bytes", "7"), ""),
            (v2.join("u"), ("memory.max", "500"), ("memory.current", "450"), "anon 1\ninactive_file 10\nactive_file 20\n"),
        ] {
            std::fs::create_dir_all(&group).unwrap();
            for (name, text) in [limit, usage, ("memory.stat", stat)] {
                std::fs::write(group.join(name), text).unwrap();
            }
        }
        let roots = [(v1, false), (v2.clone(), true)];
        assert_eq!(cgroup_room_in("7:memory:/a\n", &roots), Some(700));
        assert_eq!(cgroup_room_in("7:memory:/a\n0::/u\n", &roots), Some(80));
        assert_eq!(cgroup_room_in("7:memory:/\n", &roots), None);
        std::fs::write(v2.join("u/memory.current"), "900").unwrap();
        assert_eq!(cgroup_room_in("0::/u\n", &roots), Some(0), "over its limit");
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn nodes_are_those_that_are_allowed() {
        assert_eq!(list("0-2,5"), [0, 1, 2, 5]);
        assert_eq!((list(""), list("x,3-"), list("7")), (vec![], vec![], vec![7]));
        let text = "Node 1 MemTotal:  9 kB\nNode 1 MemFree:   4 kB\nNode 1 Active(file): 2 kB\nNode 1 Inactive(file): 1 kB\nNode 1 SReclaimable: 1 kB\n";
        assert_eq!((free_of_node(text), free_of_node("")), (8 << 10, 0));
        assert!(nodes().len() <= numa_nodes());
    }

    #[test]
    fn the_longest_mount_point_names_the_file_system() {
        let mounts = "/dev/a / ext4 rw 0 0\ntmpfs /tmp tmpfs rw 0 0\n/dev/b /with\\040space xfs rw 0 0\n";
        assert_eq!(file_system_in(mounts, Path::new("/tmp/x")).as_deref(), Some("tmpfs"));
        assert_eq!(file_system_in(mounts, Path::new("/tmpx")).as_deref(), Some("ext4"));
        assert_eq!(file_system_in(mounts, Path::new("/with space/f")).as_deref(), Some("xfs"));
        assert_eq!(file_system_in("", Path::new("/")), None);
    }

    #[test]
    fn this_machine_answers() {
        assert!(numa_nodes() >= 1);
        assert!(file_system(Path::new("/proc/self")).is_some_and(|f| f == "proc"));
        if let Some(mode) = transparent_huge_pages() {
            assert!(["always", "madvise", "never"].contains(&mode.as_str()), "{mode}");
        }
    }
}
