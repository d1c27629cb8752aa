//! What was asked, what was got, and why: a record of every buffer of this process, and of how the experts in them were computed.
//!
//! Owns: the records, their JSON, and the file named by `BERTH_REPORT`. Must not know: ggml, how memory is got.

pub mod ahead;
pub mod blocks;
pub mod filled;
pub mod lasting;
pub mod numa;

use std::collections::{HashSet, VecDeque};
use std::ffi::OsStr;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Serialize, Serializer};

use crate::config;
use crate::error::{Error, Result};
use crate::log;
use crate::memory::system;
use crate::placement::{self, Class};

/// How many names a warning gives.
const NAMES: usize = 3;

/// How many freed buffers are remembered.
const FREED_KEPT: usize = 256;

/// Why something else was got than was asked. Codes are stable; messages are for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The kernel has no memory left.
    NoMemory,
    /// There is no CUDA driver, or no device.
    NoCudaDriver,
    /// The CUDA driver refused the allocation.
    PinFailed,
    /// More than may be page-locked.
    PinBudget,
    /// Page-locking was too slow and was given up.
    PinSlow,
    /// `BERTH_PIN=off`, or the host's own `GGML_CUDA_NO_PINNED`.
    PinOff,
    /// The arena directory is missing, no directory, a symbolic link, or not writable.
    ArenaDirectory,
    /// The arena's file system has too little space.
    ArenaNoSpace,
    /// The arena's file could not be made or mapped.
    ArenaFailed,
    /// The model's file could not be mapped.
    MapFailed,
    /// More was asked of an arena than it was opened for.
    ArenaFull,
}

/// Something else was got than was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fallback {
    /// Stable code.
    pub reason: Reason,
    /// What failed, in words.
    pub message: String,
}

/// Where bytes lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// Nowhere: there are none.
    Empty,
    /// In a mapping of the host.
    Mapped,
    /// In anonymous memory.
    Pageable,
    /// In page-locked memory.
    Pinned,
    /// The first of them in page-locked memory, the others not.
    PartlyPinned,
    /// In an arena's file.
    Arena,
}

impl Place {
    /// Name in messages and reports.
    pub fn name(self) -> &'static str {
        match self {
            Place::Empty => "empty",
            Place::Mapped => "mapped",
            Place::Pageable => "pageable",
            Place::Pinned => "pinned",
            Place::PartlyPinned => "partly pinned",
            Place::Arena => "arena",
        }
    }
}

/// What is remembered of one tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Tensor {
    /// Name in the model.
    pub name: String,
    /// Type, as ggml calls it.
    #[serde(rename = "type")]
    pub type_name: &'static str,
    /// Bytes in the buffer.
    pub bytes: usize,
}

/// What is remembered of one buffer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Buffer {
    /// Number of the buffer, counted from 1 in this process.
    pub id: u64,
    /// Buffer type that was asked for, as typed in `-ot`.
    pub asked: &'static str,
    /// Name that an engine gave it; absent for buffers of ggml.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Where it lies.
    pub got: Place,
    /// Why it is not what was asked; absent if it is.
    pub reason: Option<Reason>,
    /// The same in words.
    pub message: Option<String>,
    /// Size in bytes.
    pub bytes: usize,
    /// Bytes of it that are page-locked by the CUDA driver.
    pub pinned_bytes: usize,
    /// Bytes of it that are locked with `mlock`. Absent where nothing is.
    #[serde(skip_serializing_if = "is_zero")]
    pub locked_bytes: usize,
    /// File behind it: the mapped model, or the directory of the arena's nameless file.
    #[serde(serialize_with = "path_or_none")]
    pub file: Option<PathBuf>,
    /// Whether it still exists.
    pub live: bool,
    /// What for.
    pub usage: Usage,
    /// How bytes came into it.
    pub filled: filled::Filled,
    /// Whether they are kept for the next start; absent unless that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lasting: Option<lasting::Lasting>,
    /// Where its pages lie; absent unless `BERTH_NUMA` asks for something on a machine with several nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa: Option<numa::Numa>,
    /// Weights in it.
    pub tensors: Vec<Tensor>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
fn is_zero(n: &usize) -> bool {
    *n == 0
}

/// What a buffer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Usage {
    /// To hold tensors that stay: weights, as a rule.
    Tensors,
    /// To hold a graph's values while it is computed. Nobody asked for it by a rule.
    Compute,
}

#[derive(Serialize)]
struct Report<'a> {
    berth: &'static str,
    hosts: &'a [HostInfo],
    strict: bool,
    fallbacks: usize,
    /// Bytes that are page-locked now, in all buffers.
    pinned: usize,
    blocks: blocks::Blocks,
    read_ahead: ahead::Ahead,
    buffers: Vec<&'a Buffer>,
    warnings: Vec<Warning>,
}

/// Something that a person should know about a buffer type. The codes are stable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Warning {
    code: &'static str,
    asked: &'static str,
    /// How many different tensors it is about.
    tensors: usize,
    /// Their bytes.
    bytes: usize,
    /// The first of their names.
    first: Vec<String>,
    message: String,
}

/// What is remembered of a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HostInfo {
    /// Its ggml's version.
    pub ggml_version: String,
    /// Layout of its tables.
    pub layout: &'static str,
    /// File its ggml is in.
    #[serde(serialize_with = "path")]
    pub file: PathBuf,
}

/// JSON is text, and a path need not be: what is none of it is shown as U+FFFD, instead of losing the whole report.
fn path<S: Serializer>(path: &Path, to: S) -> std::result::Result<S::Ok, S::Error> {
    to.serialize_str(&path.to_string_lossy())
}

fn path_or_none<S: Serializer>(file: &Option<PathBuf>, to: S) -> std::result::Result<S::Ok, S::Error> {
    match file {
        Some(file) => path(file, to),
        None => to.serialize_none(),
    }
}

#[derive(Default)]
struct State {
    last_id: u64,
    hosts: Vec<HostInfo>,
    live: Vec<Buffer>,
    freed: VecDeque<Buffer>,
    fallbacks: usize,
    /// Buffer types whose warning has been logged.
    warned: HashSet<&'static str>,
}

impl State {
    /// Norms and routers are small, used for every token, and gain nothing from a place of their own: a rule is wider than it was meant to be.
    fn warnings(&self) -> Vec<Warning> {
        let mut all: Vec<Warning> = Vec::new();
        let mut seen: HashSet<(&str, &str)> = HashSet::new();
        // A loader's own buffers of plain memory are not asked for by a rule.
        for buffer in self.freed.iter().chain(&self.live).filter(|b| b.asked != "CPU") {
            let odd = |t: &&Tensor| matches!(placement::Tensor::missing(&t.name).class, Class::Norm | Class::Router);
            for tensor in buffer.tensors.iter().filter(odd) {
                if !seen.insert((buffer.asked, &tensor.name)) {
                    continue;
                }
                let at = all.iter().position(|w| w.asked == buffer.asked).unwrap_or_else(|| {
                    let (code, first, message) = ("small_tensors_placed", Vec::new(), String::new());
                    all.push(Warning { code, asked: buffer.asked, tensors: 0, bytes: 0, first, message });
                    all.len() - 1
                });
                let warning = &mut all[at];
                warning.tensors += 1;
                warning.bytes += tensor.bytes;
                if warning.first.len() < NAMES {
                    warning.first.push(tensor.name.clone());
                }
            }
        }
        for w in &mut all {
            let names: Vec<String> = w.first.iter().map(|n| format!("'{}'", n.escape_debug())).collect();
            let (count, names, more) = (w.tensors, names.join(", "), if w.tensors > w.first.len() { ", .." } else { "" });
            w.message = format!("{count} norm and router tensors were placed here ({names}{more}); is the pattern of a rule too wide?");
        }
        all
    }
}

static STATE: Mutex<Option<State>> = Mutex::new(None);

fn state() -> MutexGuard<'static, Option<State>> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Number of a buffer in the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Id(u64);

impl Id {
    /// Whether it is that number.
    #[cfg(test)]
    pub(crate) fn is(self, number: u64) -> bool {
        self.0 == number
    }
}

/// Remembers a host.
pub fn add_host(host: HostInfo) {
    state().get_or_insert_default().hosts.push(host);
}

/// Remembers a new buffer and logs one line about it: WARN if it is not what was asked, INFO if it is and `announce` says so.
pub fn add_buffer(asked: &'static str, got: Place, bytes: usize, file: Option<PathBuf>, fallback: Option<Fallback>, announce: bool) -> Id {
    let place = got.name();
    match &fallback {
        Some(f) => log::warning!("{asked}: asked for {asked}, got {place} memory for {bytes} bytes ({}): {}", human(bytes), f.message),
        None if bytes > 0 && announce => {
            let at = file.as_ref().map_or(String::new(), |f| format!(" in {}", f.display()));
            log::info!("{asked}: {bytes} bytes ({}) {place}{at}", human(bytes));
        }
        None => {}
    }
    let id = {
        let mut guard = state();
        let state = guard.get_or_insert_default();
        state.last_id += 1;
        state.fallbacks += usize::from(fallback.is_some());
        state.live.push(Buffer {
            id: state.last_id,
            asked,
            name: None,
            got,
            reason: fallback.as_ref().map(|f| f.reason),
            message: fallback.map(|f| f.message),
            bytes,
            pinned_bytes: if got == Place::Pinned { bytes } else { 0 },
            locked_bytes: 0,
            file,
            live: true,
            usage: Usage::Tensors,
            filled: filled::Filled::default(),
            lasting: None,
            numa: None,
            tensors: Vec::new(),
        });
        Id(state.last_id)
    };
    changed();
    id
}

/// Logs the line about a buffer that was not announced when it was made, because its use was not known yet.
pub fn announce(id: Id, usage: Usage) {
    let mut found = None;
    if let Some(buffer) = state().as_mut().and_then(|s| s.live.iter_mut().find(|b| b.id == id.0)) {
        buffer.usage = usage;
        found = Some((buffer.asked, buffer.bytes, buffer.got.name()));
    }
    // No lock is held: a log may call back into us.
    let Some((asked, bytes, place)) = found else { return };
    match usage {
        Usage::Tensors => log::info!("{asked}: {bytes} bytes ({}) {place}", human(bytes)),
        Usage::Compute => log::info!("BERTH: compute buffer of {bytes} bytes ({}) {place}", human(bytes)),
    }
    changed();
}

/// Remembers the name that an engine gave.
pub fn name_buffer(id: Id, name: &str) {
    if let Some(buffer) = state().as_mut().and_then(|s| s.live.iter_mut().find(|b| b.id == id.0)) {
        buffer.name = Some(name.to_owned());
    }
    changed();
}

/// Remembers that a buffer has become larger.
pub fn grow_buffer(id: Id, bytes: usize) {
    if let Some(buffer) = state().as_mut().and_then(|s| s.live.iter_mut().find(|b| b.id == id.0)) {
        buffer.bytes = bytes;
    }
    changed();
}

/// Remembers how many bytes of a buffer are page-locked. One that was locked as a whole and is no longer is locked in part.
pub fn pinned(id: Id, bytes: usize) {
    if let Some(buffer) = state().as_mut().and_then(|s| s.live.iter_mut().find(|b| b.id == id.0)) {
        buffer.pinned_bytes = bytes;
        if buffer.got == Place::Pinned && bytes < buffer.bytes {
            buffer.got = Place::PartlyPinned;
        }
    }
    changed();
}

/// How many bytes of a buffer are page-locked.
pub fn pinned_bytes(id: Id) -> usize {
    state().as_ref().and_then(|s| s.live.iter().find(|b| b.id == id.0)).map_or(0, |b| b.pinned_bytes)
}

/// Remembers why a buffer is not what was asked, which was not known when it was made, and logs one line about it.
pub fn fell_back(id: Id, fallback: Fallback) {
    let mut found = None;
    if let Some(state) = state().as_mut()
        && let Some(buffer) = state.live.iter_mut().find(|b| b.id == id.0)
    {
        found = Some((buffer.asked, buffer.got.name(), buffer.bytes));
        (buffer.reason, buffer.message) = (Some(fallback.reason), Some(fallback.message.clone()));
        state.fallbacks += 1;
    }
    // No lock is held: a log may call back into us.
    if let Some((asked, place, bytes)) = found {
        log::warning!("{asked}: asked for {asked}, got {place} memory for {bytes} bytes ({}): {}", human(bytes), fallback.message);
    }
    changed();
}

/// Remembers how many bytes of a buffer are locked with `mlock`.
pub fn locked(id: Id, bytes: usize) {
    if let Some(buffer) = state().as_mut().and_then(|s| s.live.iter_mut().find(|b| b.id == id.0)) {
        buffer.locked_bytes = bytes;
    }
    changed();
}

/// Remembers that a weight lies in a buffer.
pub fn add_tensor(id: Id, tensor: Tensor) {
    let mut guard = state();
    let buffers = guard.iter_mut().flat_map(|s| &mut s.live);
    if let Some(buffer) = buffers.rev().find(|b| b.id == id.0) {
        buffer.tensors.push(tensor);
    }
}

/// Remembers how bytes came into a buffer. The report's file is not written for it: a load has many of these.
pub fn filled(id: Id, how: filled::How) {
    let mut guard = state();
    let buffers = guard.iter_mut().flat_map(|s| &mut s.live);
    if let Some(buffer) = buffers.rev().find(|b| b.id == id.0) {
        buffer.filled.add(how);
    }
}

/// Remembers whether a buffer's bytes are kept for the next start, and logs one line about it once that is settled.
pub fn lasting(id: Id, now: lasting::Lasting) {
    let mut found = None;
    if let Some(buffer) = state().as_mut().and_then(|s| s.live.iter_mut().find(|b| b.id == id.0)) {
        buffer.lasting = Some(now.clone());
        found = Some((buffer.asked, buffer.bytes));
    }
    // No lock is held: a log may call back into us.
    if let Some((asked, bytes)) = found {
        now.say(asked, bytes);
    }
    changed();
}

/// Called when a model has been loaded: warns, once per buffer type, of tensors that gain nothing there, and writes the report.
pub fn loaded() {
    let new: Vec<Warning> = {
        let mut guard = state();
        let state = guard.get_or_insert_default();
        state.warnings().into_iter().filter(|w| state.warned.insert(w.asked)).collect()
    };
    // No lock is held: a log may call back into us.
    for warning in new {
        log::warning!("{}: {}", warning.asked, warning.message);
    }
    changed();
}

/// Remembers that a buffer is gone.
pub fn remove_buffer(id: Id) {
    if let Some(state) = state().as_mut()
        && let Some(at) = state.live.iter().position(|b| b.id == id.0)
    {
        let mut buffer = state.live.remove(at);
        buffer.live = false;
        // Hosts make compute buffers anew again and again.
        if buffer.bytes > 0 && buffer.usage != Usage::Compute {
            state.freed.push_back(buffer);
            if state.freed.len() > FREED_KEPT {
                state.freed.pop_front();
            }
        }
    }
    changed();
}

/// The whole record as one JSON object.
pub fn to_json() -> String {
    let guard = state();
    let empty = State::default();
    let state = guard.as_ref().unwrap_or(&empty);
    let report = Report {
        berth: config::VERSION.to_str().unwrap_or("?"),
        hosts: &state.hosts,
        strict: config::get().is_ok_and(|c| c.strict),
        fallbacks: state.fallbacks,
        pinned: state.live.iter().map(|b| b.pinned_bytes).sum(),
        blocks: blocks::so_far(),
        read_ahead: ahead::so_far(),
        buffers: state.freed.iter().chain(&state.live).filter(|b| b.bytes > 0).collect(),
        warnings: state.warnings(),
    };
    serde_json::to_string_pretty(&report).unwrap_or_else(|e| format!("{{\"error\": \"{e}\"}}"))
}

/// Writes the report file, if one is asked for. Called when the record has changed.
pub fn changed() {
    static WRITING: Mutex<()> = Mutex::new(());
    let Ok(Some(path)) = config::get().map(|c| c.report.as_deref()) else { return };
    let written = {
        let _one_at_a_time = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
        replace_file(path, to_json().as_bytes(), Mode::Private)
    };
    // No lock is held while the line is written: a log may call back into us.
    if let Err(error) = written {
        static SAID: AtomicBool = AtomicBool::new(false);
        if !SAID.swap(true, Ordering::Relaxed) {
            log::error!("BERTH_REPORT: {error}");
        }
    }
}

/// Who may read a file that is replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// This user alone.
    Private,
    /// Whoever might read the file that was there; this user alone if there was none.
    Kept,
}

/// Replaces a file as a whole: a reader sees the old or the new content. A symbolic link in its place is neither followed nor replaced: it may be
/// `/dev/stdout`, which every program of the machine needs as it is.
///
/// # Errors
/// If the path is there and not a regular file, or the operating system refuses.
pub fn replace_file(path: &Path, content: &[u8], mode: Mode) -> Result<()> {
    let named = |what: &str, path: &Path, e: std::io::Error| Error::os(format_args!("{what} {}", path.display()), &e);
    let there = std::fs::symlink_metadata(path).ok();
    if let Some(there) = there.as_ref().filter(|t| !t.is_file()) {
        let what = if there.is_symlink() { "a symbolic link; name the file itself" } else { "not a regular file" };
        return Err(Error::invalid(format!("{} is {what}", path.display())));
    }
    system::within_file_limit(content.len())?;
    let temporary = temporary(path);
    let _ = std::fs::remove_file(&temporary);
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).custom_flags(libc::O_NOFOLLOW).open(&temporary);
    // Not under the number of a closed standard stream, where other threads may print. (A clone's number is above those.)
    let mut file = file.and_then(|f| f.try_clone()).map_err(|e| named("write", path, e))?;
    let kept = there.filter(|_| mode == Mode::Kept).map_or(Ok(()), |t| file.set_permissions(t.permissions()));
    let written = kept.and_then(|()| file.write_all(content)).map_err(|e| named("write", path, e));
    let renamed = written.and_then(|()| std::fs::rename(&temporary, path).map_err(|e| named("replace", path, e)));
    if renamed.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    renamed
}

/// A name beside `path` for what will replace it, no longer than a name may be.
fn temporary(path: &Path) -> PathBuf {
    const LONGEST: usize = 255;
    let suffix = format!(".{}.tmp", std::process::id());
    let name = path.file_name().unwrap_or_default().as_bytes();
    let mut short = name[..name.len().min(LONGEST - suffix.len())].to_owned();
    short.extend(suffix.bytes());
    path.with_file_name(OsStr::from_bytes(&short))
}

/// A byte count for people, in binary units.
pub fn human(bytes: usize) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut value, mut unit) = (bytes as f64, 0);
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.2} {}", UNITS[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_is_no_text_does_not_cost_the_report() {
        use std::os::unix::ffi::OsStrExt;
        let file = PathBuf::from(std::ffi::OsStr::from_bytes(b"/models/m\xff.gguf"));
        let id = add_buffer("CPU_MMAP", Place::Mapped, 54321, Some(file.clone()), None, false);
        add_host(HostInfo { ggml_version: "0.0.0".into(), layout: "V1", file });
        let json: serde_json::Value = serde_json::from_str(&to_json()).unwrap();
        let buffer = json["buffers"].as_array().unwrap().iter().find(|b| b["bytes"] == 54321).unwrap();
        assert_eq!(buffer["file"], "/models/m\u{fffd}.gguf");
        assert!(json["hosts"].as_array().unwrap().iter().any(|h| h["file"] == "/models/m\u{fffd}.gguf"));
        remove_buffer(id);
    }

    #[test]
    fn a_fallback_is_in_the_json_with_its_code_and_its_tensors() {
        let fallback = Fallback { reason: Reason::NoCudaDriver, message: "no \"driver\"\n".into() };
        let id = add_buffer("CUDA_Host", Place::Pageable, 12345, None, Some(fallback), true);
        add_tensor(id, Tensor { name: "blk.0.ffn_up_exps.weight".into(), type_name: "q4_K", bytes: 144 });
        let find = || {
            let json: serde_json::Value = serde_json::from_str(&to_json()).unwrap();
            json["buffers"].as_array().unwrap().iter().find(|b| b["bytes"] == 12345).unwrap().clone()
        };
        let live = find();
        assert_eq!((&live["asked"], &live["got"], &live["reason"]), (&"CUDA_Host".into(), &"pageable".into(), &"no_cuda_driver".into()));
        assert_eq!((&live["live"], &live["pinned_bytes"]), (&true.into(), &0.into()));
        assert_eq!(live["tensors"][0]["type"], "q4_K");
        remove_buffer(id);
        assert_eq!(find()["live"], false);
        remove_buffer(id);
    }

    #[test]
    fn norms_and_routers_are_warned_of_and_experts_are_not() {
        let put = |asked, names: &[&str]| {
            let id = add_buffer(asked, Place::Mapped, 77, None, None, true);
            for name in names {
                add_tensor(id, Tensor { name: (*name).into(), type_name: "f32", bytes: 10 });
            }
            id
        };
        // Other tests of this process do not use these names of buffer types.
        let all = [
            "blk.0.attn_norm.weight",
            "blk.0.ffn_gate_inp.weight",
            "blk.0.ffn_up_exps.weight",
            "output_norm.weight",
            "blk.1.ffn_norm.weight",
        ];
        let ids = [put("wide", &all), put("wide", &all[..2]), put("narrow", &["blk.0.ffn_up_exps.weight"]), put("CPU", &all)];
        let find = || {
            let json: serde_json::Value = serde_json::from_str(&to_json()).unwrap();
            let ours = |w: &&serde_json::Value| ["wide", "narrow", "CPU"].contains(&w["asked"].as_str().unwrap());
            json["warnings"].as_array().unwrap().iter().filter(ours).cloned().collect::<Vec<_>>()
        };
        let [warning] = &find()[..] else { panic!("{:?}", find()) };
        let expected = serde_json::json!({
            "code": "small_tensors_placed", "asked": "wide", "tensors": 4, "bytes": 40,
            "first": ["blk.0.attn_norm.weight", "blk.0.ffn_gate_inp.weight", "output_norm.weight"],
            "message": "4 norm and router tensors were placed here ('blk.0.attn_norm.weight', 'blk.0.ffn_gate_inp.weight', 'output_norm.weight', ..); \
                        is the pattern of a rule too wide?",
        });
        assert_eq!(*warning, expected);
        ids.into_iter().for_each(remove_buffer);
        assert_eq!(find(), [expected], "it stays when the buffers are gone");
    }

    #[test]
    fn a_compute_buffer_is_told_apart_and_forgotten_when_it_is_gone() {
        let id = add_buffer("computing", Place::Pageable, 4321, None, None, false);
        announce(id, Usage::Compute);
        let find = || {
            let json: serde_json::Value = serde_json::from_str(&to_json()).unwrap();
            json["buffers"].as_array().unwrap().iter().find(|b| b["asked"] == "computing").map(|b| b["usage"].clone())
        };
        assert_eq!(find(), Some("compute".into()));
        remove_buffer(id);
        assert_eq!(find(), None);
    }

    #[test]
    fn the_file_is_replaced_whole_private_and_never_through_a_link() {
        use std::os::unix::fs::PermissionsExt;
        let dir = std::env::temp_dir().join(format!("berth-report-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (file, link, victim) = (dir.join("r.json"), dir.join("link.json"), dir.join("victim"));
        replace_file(&file, b"one", Mode::Private).unwrap();
        replace_file(&file, b"two", Mode::Private).unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"two");
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        // Another mode is kept where that is asked for, and for a name of any length.
        let long = dir.join("x".repeat(255));
        for (mode, there) in [(Mode::Kept, 0o644), (Mode::Private, 0o600)] {
            for file in [&file, &long] {
                std::fs::write(file, b"").unwrap();
                std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o644)).unwrap();
                replace_file(file, b"two", mode).unwrap();
                assert_eq!(std::fs::metadata(file).unwrap().permissions().mode() & 0o777, there, "{mode:?}");
            }
        }
        std::fs::remove_file(&long).unwrap();
        replace_file(&long, b"new", Mode::Kept).unwrap();
        assert_eq!(std::fs::metadata(&long).unwrap().permissions().mode() & 0o777, 0o600);
        std::fs::remove_file(&long).unwrap();
        std::fs::write(&victim, b"precious").unwrap();
        std::os::unix::fs::symlink(&victim, &link).unwrap();
        let hanging = dir.join("hanging.json");
        std::os::unix::fs::symlink(dir.join("nowhere"), &hanging).unwrap();
        // As /dev/stdout, when that is a file.
        for link in [&link, &hanging] {
            assert!(
                replace_file(link, b"three", Mode::Private).is_err_and(|e| e.message.ends_with("is a symbolic link; name the file itself"))
            );
            assert!(link.is_symlink(), "the link is left as it was");
        }
        assert_eq!(std::fs::read(&victim).unwrap(), b"precious");
        assert!(replace_file(Path::new("/dev/null"), b"x", Mode::Private).is_err_and(|e| e.message.contains("/dev/null")));
        assert!(replace_file(&dir, b"x", Mode::Private).is_err());
        assert!(replace_file(&dir.join("missing/r.json"), b"x", Mode::Private).is_err());
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 4, "no temporary file is left");
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn sizes_read_well() {
        assert_eq!(human(0), "0 B");
        assert_eq!(human(1536), "1.50 KiB");
        assert_eq!(human(5 << 30), "5.00 GiB");
        assert!(human(usize::MAX).ends_with(" TiB"));
    }
}
