//! `c/loader_peer.c`: compiled, run on a model, and what it said about every tensor.

use std::fs;
use std::path::{Path, PathBuf};

use ffi_tests::berth_lib;
use ffi_tests::gguf::Gguf;

use super::peer::{Compile, plain, source, succeeds};
use super::scratch::Scratch;

/// A program of `c/` linked with the library under test.
pub(crate) fn peer(scratch: &Scratch, name: &str) -> PathBuf {
    let library = berth_lib().unwrap_or_else(|e| panic!("{e:#}"));
    let soname = scratch.path().join("libberth.so.0");
    if !soname.exists() {
        std::os::unix::fs::symlink(&library, &soname).unwrap();
    }
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../include");
    Compile::c("cc")
        .args(["-Wpedantic", "-I"])
        .args([include, source(&format!("{name}.c")), soname])
        .arg(format!("-Wl,-rpath,{}", scratch.path().display()))
        .to(scratch.path().join(name))
}

/// One line of `loader_peer` about a tensor.
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) place: String,
    pub(crate) memory: String,
    pub(crate) rule: i32,
    pub(crate) overridden: bool,
    pub(crate) downgraded: bool,
    pub(crate) reason: String,
    pub(crate) bytes: u64,
    pub(crate) ty: u32,
    pub(crate) part: usize,
    pub(crate) offset: u64,
    pub(crate) ne: [u64; 4],
    pub(crate) nb: [u64; 4],
    pub(crate) same: bool,
}

pub(crate) struct Loaded {
    pub(crate) lines: Vec<Line>,
    pub(crate) stderr: String,
    /// How far a cancelled fill came: bytes read, bytes to read.
    pub(crate) cancelled: Option<(u64, u64)>,
}

pub(crate) fn load(program: &Path, scratch: &Scratch, model: &Path, args: &[&str], env: &[(&str, &str)]) -> Loaded {
    let arena = if scratch.path().join("arena").exists() { scratch.path().join("arena") } else { scratch.dir("arena") };
    let mut command = plain(program);
    command.arg(model).args(args).env("BERTH_ARENA_DIR", &arena);
    command.envs(env.iter().copied());
    let output = succeeds(command);
    let four = |text: &str| text.split(',').map(|n| n.parse().unwrap()).collect::<Vec<u64>>().try_into().unwrap();
    let parse = |line: &str| {
        let f: Vec<&str> = line.split('\t').collect();
        (f.len() == 14).then(|| Line {
            name: f[0].to_owned(),
            place: f[1].to_owned(),
            memory: f[2].to_owned(),
            rule: f[3].parse().unwrap(),
            overridden: f[4] == "1",
            downgraded: f[5] == "1",
            reason: f[6].to_owned(),
            bytes: f[7].parse().unwrap(),
            ty: f[8].parse().unwrap(),
            part: f[9].parse().unwrap(),
            offset: f[10].parse().unwrap(),
            ne: four(f[11]),
            nb: four(f[12]),
            same: f[13] == "same",
        })
    };
    let lines: Vec<Line> = output.stdout.lines().filter_map(parse).collect();
    assert!(!lines.is_empty(), "{}", output.stdout);
    let different: Vec<&Line> = lines.iter().filter(|l| !l.same).collect();
    assert!(different.is_empty(), "bytes differ from the file's: {different:?}");
    let mut parts: Vec<&Path> = args.windows(2).filter(|w| w[0] == "--part").map(|w| Path::new(w[1])).collect();
    if parts.is_empty() {
        parts.push(model);
    }
    are_as_in_the_files(&lines, &parts);
    let left = fs::read_dir(&arena).unwrap().count();
    assert_eq!(left, 0, "a file was left in the arena directory");
    let cancelled = output.stdout.lines().find_map(|l| {
        let (done, total) = l.strip_prefix("CANCELLED at ")?.split_once(" of ")?;
        Some((done.parse().ok()?, total.parse().ok()?))
    });
    Loaded { lines, stderr: output.stderr, cancelled }
}

/// Format, shape, strides and offset of every tensor as a reader that shares no code with Berth finds them.
fn are_as_in_the_files(lines: &[Line], parts: &[&Path]) {
    let files: Vec<Gguf> = parts.iter().map(|part| Gguf::open(part).unwrap_or_else(|e| panic!("{e:#}"))).collect();
    for line in lines {
        let found = files[line.part].tensors().iter().find(|t| t.name == line.name);
        let found = found.unwrap_or_else(|| panic!("{} is not in part {}", line.name, line.part));
        let mut ne = [1; 4];
        ne[..found.dims.len()].copy_from_slice(&found.dims);
        // ggml's strides: from block to block, from row to row, from matrix to matrix.
        let bytes = |n: usize| found.ty.bytes(&ne[..n]).unwrap();
        let nb = [found.ty.block_bytes(), bytes(1), bytes(2), bytes(3)];
        let got = (line.ty, line.ne, line.nb, line.bytes, line.offset);
        assert_eq!(got, (found.ty as u32, ne, nb, found.bytes, found.offset), "{}", line.name);
    }
}

/// Every expert in `place` by the rule, and nothing else.
pub(crate) fn experts_are_in(loaded: &Loaded, place: &str, memory: &str, reason: &str) {
    for line in &loaded.lines {
        assert!(!line.downgraded, "{}", line.name);
        if line.name.contains("_exps.") {
            let got = (line.place.as_str(), line.memory.as_str(), line.rule, line.overridden, line.reason.as_str());
            assert_eq!(got, (place, memory, 0, true, reason), "{}", line.name);
        } else {
            assert_eq!((line.place.as_str(), line.rule, line.overridden), ("CPU", -1, false), "{}", line.name);
        }
    }
}
