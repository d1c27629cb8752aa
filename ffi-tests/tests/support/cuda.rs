//! The driver of `c/fake_cuda.c`, and what was asked of it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::peer::{Compile, source};

/// After these there is nothing to be had from the driver any more.
pub(crate) const FATAL: [i64; 6] = [3, 4, 700, 709, 714, 719];

/// `libcuda.so.1` of our own, in a directory of its own.
pub(crate) fn fake_driver(dir: &Path) -> PathBuf {
    let options =
        ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O1", "-pthread", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"];
    std::fs::create_dir_all(dir).unwrap();
    Compile::with("cc", &options).arg(source("fake_cuda.c")).to(dir.join("libcuda.so.1"));
    dir.to_owned()
}

/// One call of the driver.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) process: u32,
    pub(crate) name: String,
    pub(crate) result: i64,
    pub(crate) args: [usize; 2],
}

/// All calls, in order.
#[derive(Debug)]
pub(crate) struct Calls(pub(crate) Vec<Call>);

impl Calls {
    pub(crate) fn read(log: &Path) -> Calls {
        let parse = |line: &str| {
            let f: Vec<&str> = line.split(' ').collect();
            let number = |i: usize| f[i].parse::<usize>().unwrap();
            Call { process: f[0].parse().unwrap(), name: f[1].to_owned(), result: f[2].parse().unwrap(), args: [number(3), number(4)] }
        };
        Calls(std::fs::read_to_string(log).unwrap_or_default().lines().map(parse).collect())
    }

    /// How many calls of that name succeeded.
    pub(crate) fn good(&self, name: &str) -> usize {
        self.0.iter().filter(|c| c.name == name && c.result == 0).count()
    }

    /// Bytes of the pieces that were locked and then unlocked, each with the address it was locked with; whatever is left is an error, unless `stays`.
    pub(crate) fn balanced(&self, what: &str, stays: bool) -> usize {
        let mut locked: BTreeMap<usize, usize> = BTreeMap::new();
        let (mut most, mut now) = (0, 0);
        for call in self.0.iter().filter(|c| c.result == 0) {
            let [address, size] = call.args;
            match call.name.as_str() {
                "cuMemHostAlloc" | "cuMemHostRegister" | "cuMemHostRegister-ro" => {
                    assert!(size <= 64 << 30, "{what}: {size} bytes in one call");
                    assert!(locked.insert(address, size).is_none(), "{what}: {address:#x} was locked twice");
                    now += size;
                    most = most.max(now);
                }
                "cuMemFreeHost" | "cuMemHostUnregister" => {
                    assert_eq!(locked.remove(&address), Some(size), "{what}: {address:#x} was not locked");
                    now -= size;
                }
                _ => {}
            }
        }
        assert!(stays || locked.is_empty(), "{what}: still locked: {locked:?}\n{:#?}", self.0);
        if !stays {
            // A peer that asks for the current context keeps one of its own.
            let own = usize::from(self.0.iter().any(|c| c.name == "cuCtxGetCurrent"));
            let (retained, released) = (self.good("cuDevicePrimaryCtxRetain"), self.good("cuDevicePrimaryCtxRelease"));
            assert_eq!(retained, released + own, "{what}: retained, released");
            let (pushed, popped) = (self.good("cuCtxPushCurrent"), self.good("cuCtxPopCurrent"));
            assert_eq!(pushed, popped + own, "{what}: pushed, popped");
        }
        most
    }

    /// No call follows one that says that there is no use in it.
    pub(crate) fn ends_with_a_fatal_error(&self, what: &str) {
        if let Some(at) = self.0.iter().position(|c| FATAL.contains(&c.result) || c.name == "cuInit" && c.result != 0) {
            let after: BTreeSet<&str> = self.0[at + 1..].iter().map(|c| c.name.as_str()).collect();
            assert!(after.is_empty(), "{what}: after {:?} there was {after:?}", self.0[at]);
        }
    }
}
