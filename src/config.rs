//! The version, and the `BERTH_*` environment, read once.
//!
//! Owns: names, defaults and the check of every setting. A value that is not understood is an error that names the variable, the value and
//! what is allowed; nothing falls back to a default silently. Must not know: ggml, who uses a setting.

use std::ffi::{CStr, OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::error::{Error, Result, Status};
use crate::log::{self, Level};

/// Version of this library, "major.minor.patch".
pub const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
    Ok(version) => version,
    Err(_) => c"?",
};

/// The host's own default of `GGML_OP_OFFLOAD_MIN_BATCH`.
const OFFLOAD_MIN_BATCH: u32 = 32;

/// Share of the available memory that may be locked, in percent.
const PIN_SHARE: u8 = 80;

/// Every variable that Berth reads. All but `BERTH_ISA` are settings below.
pub const VARIABLES: [&str; 20] = [
    "BERTH_ARENA_DIR",
    "BERTH_ARENA_LIMIT",
    "BERTH_ARENA_PERSIST",
    "BERTH_AUTO",
    "BERTH_CUDA_DEVICE",
    "BERTH_DIRECT",
    "BERTH_FILL",
    "BERTH_FUSE",
    "BERTH_ISA",
    "BERTH_LOCK",
    "BERTH_LOG",
    "BERTH_NUMA",
    "BERTH_OFFLOAD_MIN_BATCH",
    "BERTH_PIN",
    "BERTH_PIN_LIMIT",
    "BERTH_PIN_STAGING",
    "BERTH_READAHEAD",
    "BERTH_REPORT",
    "BERTH_STRICT",
    "BERTH_WARM",
];

/// The one of [`VARIABLES`] that was probably meant by a name that is none of them, if one is near.
pub fn nearest_variable(name: &str) -> Option<&'static str> {
    const PREFIX: usize = "BERTH_".len();
    let wanted = name.get(PREFIX..).filter(|w| w.len() <= 64)?;
    let distance = |known: &&str| strsim::damerau_levenshtein(&known[PREFIX..], &wanted.to_ascii_uppercase());
    // A misspelling, not another word, as with targets.
    VARIABLES.into_iter().min_by_key(distance).filter(|known| distance(known) <= wanted.chars().count().div_ceil(3))
}

/// How memory that holds a copy is filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// From the file, where that is what the bytes come from.
    Auto,
    /// By copying what the host hands over.
    Copy,
}

/// How memory is page-locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pin {
    /// The CUDA driver allocates it.
    Alloc,
    /// Ordinary memory is registered with the CUDA driver.
    Register,
    /// Not at all.
    Off,
    /// The pages of the model's file are registered where the host has mapped them.
    Mapping,
}

/// How many bytes may be locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PinLimit {
    /// A share of the memory that is available.
    Percent(u8),
    /// So many in all.
    Bytes(u64),
}

/// Where memory should lie on a machine with several NUMA nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numa {
    /// From all nodes in turn.
    Interleave,
    /// On one node, as long as it has any.
    Bind(u32),
    /// On the node of whoever first touches it.
    Local,
}

/// Whether routed experts that are not in memory are asked for before they are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadAhead {
    /// Where some were missing lately.
    Auto,
    /// Never.
    Off,
    /// Always looked for.
    On,
}

/// Whether weights that are no experts are read when a model has been loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Warm {
    /// Of a model with experts that is larger than the memory there is, if experts are read ahead.
    Auto,
    /// Never.
    Off,
    /// Always.
    Dense,
}

/// All settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// `BERTH_ARENA_DIR`: where arena files go. Default: `$XDG_CACHE_HOME/berth/arena`, else `$HOME/.cache/berth/arena`. `None` when neither is set.
    pub arena_dir: Option<PathBuf>,
    /// Whether `arena_dir` is the default: its missing parents are created, those of a directory that the user named are not.
    pub arena_dir_is_default: bool,
    /// `BERTH_ARENA_LIMIT`: how many bytes the files that last may have together. Default: no limit.
    pub arena_limit: Option<u64>,
    /// `BERTH_ARENA_PERSIST`: the arena of a model is kept for its next start. Default: off.
    pub arena_persist: bool,
    /// `BERTH_FILL`: how copies are filled. Default: `auto`.
    pub fill: Fill,
    /// `BERTH_LOG`: the least severe message that is passed on. Default: `info`.
    pub log: Option<Level>,
    /// `BERTH_NUMA`: where memory of Berth's should lie. Default: nothing is asked of the kernel.
    pub numa: Option<Numa>,
    /// `BERTH_STRICT`: a fallback is an error. Default: off.
    pub strict: bool,
    /// `BERTH_FUSE`: experts that lie in a Berth buffer type are computed by Berth. Default: on; off is placement only.
    pub fuse: bool,
    /// `BERTH_AUTO`: expert weights that no rule names go to `CPU_MMAP`. Default: off.
    pub auto: bool,
    /// `BERTH_OFFLOAD_MIN_BATCH`, or else `GGML_OP_OFFLOAD_MIN_BATCH`: with a GPU, products of at least this many tokens are left to the host,
    /// which may send them there. Default: 32, as the host's.
    pub offload_min_batch: u32,
    /// `BERTH_PIN`: how `CUDA_Host` is page-locked. Default: `None`, which is `register`, or `alloc` on a device that cannot register.
    pub pin: Option<Pin>,
    /// `BERTH_PIN_LIMIT`: how many bytes this process may lock. Default: 80 % of what is available.
    pub pin_limit: PinLimit,
    /// `BERTH_PIN_STAGING`: buffers through which a graph's values pass to and from the device `BERTH` are page-locked. Default: off.
    pub pin_staging: bool,
    /// `BERTH_CUDA_DEVICE`: number of the device whose context is used for that. Default: 0.
    pub cuda_device: u32,
    /// `GGML_CUDA_NO_PINNED`, a variable of the host: weights are not page-locked. As there, any value counts, and none at all.
    pub no_pinned: bool,
    /// `BERTH_LOCK`: memory that is not page-locked by the CUDA driver is locked with `mlock`, as far as the limits allow. Default: off.
    pub lock: bool,
    /// `BERTH_READAHEAD`: whether experts are read ahead. Default: `auto`.
    pub read_ahead: ReadAhead,
    /// `BERTH_WARM`: whether weights that are no experts are read when a model has been loaded. Default: `auto`.
    pub warm: Warm,
    /// `BERTH_DIRECT`: whether missing experts of a model larger than memory are read past the page cache. Default: `auto`, which is yes.
    pub direct: bool,
    /// `BERTH_REPORT`: file that always holds the current report. Default: none.
    pub report: Option<PathBuf>,
}

/// Settings as they are without any environment.
impl Default for Config {
    fn default() -> Self {
        Config {
            arena_dir: None,
            arena_dir_is_default: true,
            arena_limit: None,
            arena_persist: false,
            fill: Fill::Auto,
            log: Some(Level::Info),
            numa: None,
            strict: false,
            fuse: true,
            auto: false,
            offload_min_batch: OFFLOAD_MIN_BATCH,
            pin: None,
            pin_limit: PinLimit::Percent(PIN_SHARE),
            pin_staging: false,
            cuda_device: 0,
            no_pinned: false,
            lock: false,
            read_ahead: ReadAhead::Auto,
            warm: Warm::Auto,
            direct: true,
            report: None,
        }
    }
}

/// The settings of this process, read at the first call, which also sets the level of the log. Later changes of the environment have no effect.
///
/// # Errors
/// [`Status::Config`] if any variable has a bad value; the same error on every call.
pub fn get() -> Result<&'static Config> {
    static CONFIG: OnceLock<Result<Config>> = OnceLock::new();
    let read = || {
        let config = Config::from_lookup(|name| std::env::var_os(name)).inspect(|config| log::set_threshold(config.log))?;
        config.fits(Path::new("/sys/devices/system/node"))?;
        Ok(config)
    };
    CONFIG.get_or_init(read).as_ref().map_err(Clone::clone)
}

impl Config {
    /// Builds the settings from any source of variables. An empty value counts as not set.
    ///
    /// # Errors
    /// [`Status::Config`], naming the variable, for the first bad value.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Config> {
        let get = |name: &str| lookup(name).filter(|v| !v.is_empty());
        let named = get("BERTH_ARENA_DIR").map(|v| absolute("BERTH_ARENA_DIR", v)).transpose()?;
        let config = Config {
            arena_dir_is_default: named.is_none(),
            arena_dir: named.or_else(|| default_arena_dir(&get)),
            arena_limit: get("BERTH_ARENA_LIMIT").map(|v| parse_bytes("BERTH_ARENA_LIMIT", &v)).transpose()?,
            arena_persist: get("BERTH_ARENA_PERSIST").map_or(Ok(false), |v| parse_switch("BERTH_ARENA_PERSIST", &v))?,
            fill: get("BERTH_FILL").map_or(Ok(Fill::Auto), |v| parse_fill(&v))?,
            log: get("BERTH_LOG").map_or(Ok(Some(Level::Info)), |v| parse_level(&v))?,
            numa: get("BERTH_NUMA").map_or(Ok(None), |v| parse_numa(&v))?,
            strict: get("BERTH_STRICT").map_or(Ok(false), |v| parse_switch("BERTH_STRICT", &v))?,
            fuse: get("BERTH_FUSE").map_or(Ok(true), |v| parse_switch("BERTH_FUSE", &v))?,
            auto: get("BERTH_AUTO").map_or(Ok(false), |v| parse_switch("BERTH_AUTO", &v))?,
            offload_min_batch: offload_min_batch(&lookup)?,
            pin: get("BERTH_PIN").map(|v| parse_pin(&v)).transpose()?,
            pin_limit: get("BERTH_PIN_LIMIT").map_or(Ok(PinLimit::Percent(PIN_SHARE)), |v| parse_pin_limit(&v))?,
            pin_staging: get("BERTH_PIN_STAGING").map_or(Ok(false), |v| parse_switch("BERTH_PIN_STAGING", &v))?,
            cuda_device: get("BERTH_CUDA_DEVICE").map_or(Ok(0), |v| parse_device(&v))?,
            no_pinned: lookup("GGML_CUDA_NO_PINNED").is_some(),
            lock: get("BERTH_LOCK").map_or(Ok(false), |v| parse_switch("BERTH_LOCK", &v))?,
            read_ahead: get("BERTH_READAHEAD").map_or(Ok(ReadAhead::Auto), |v| parse_read_ahead(&v))?,
            warm: get("BERTH_WARM").map_or(Ok(Warm::Auto), |v| parse_warm(&v))?,
            direct: get("BERTH_DIRECT").map_or(Ok(true), |v| parse_direct(&v))?,
            report: get("BERTH_REPORT").map(|v| absolute("BERTH_REPORT", v)).transpose()?,
        };
        Ok(config)
    }

    /// Whether this machine has the NUMA node that is named; `nodes` is where the kernel shows them.
    fn fits(&self, nodes: &Path) -> Result<()> {
        let missing = |node: u32| node > 0 && !nodes.join(format!("node{node}")).is_dir();
        match self.numa {
            Some(Numa::Bind(node)) if missing(node) => {
                let count = (0..1024).take_while(|n| !missing(*n)).count();
                let message = format!("BERTH_NUMA=bind:{node}: this machine has no node {node}; it has {count}, counted from 0");
                Err(Error::new(Status::Config, message))
            }
            _ => Ok(()),
        }
    }
}

fn offload_min_batch(get: &impl Fn(&str) -> Option<OsString>) -> Result<u32> {
    if let Some(own) = get("BERTH_OFFLOAD_MIN_BATCH").filter(|v| !v.is_empty()) {
        let number = own.to_str().and_then(|v| v.parse().ok());
        return number.ok_or_else(|| bad("BERTH_OFFLOAD_MIN_BATCH", &own, "a number of tokens"));
    }
    Ok(get("GGML_OP_OFFLOAD_MIN_BATCH").map_or(OFFLOAD_MIN_BATCH, |v| host_number(&v)))
}

/// What the host makes of its own `GGML_OP_OFFLOAD_MIN_BATCH`: `atoi`, so blanks, a sign, and digits up to the first other character; 0 if there
/// are none. Every batch is at least as large as a negative number, as it is as 0.
pub fn host_number(value: &OsStr) -> u32 {
    let bytes = value.as_encoded_bytes().trim_ascii_start();
    let digits = bytes.strip_prefix(b"+").unwrap_or(bytes).iter().map_while(|b| b.is_ascii_digit().then(|| u32::from(b - b'0')));
    digits.fold(0u32, |n, digit| n.saturating_mul(10).saturating_add(digit)).min(i32::MAX as u32)
}

fn default_arena_dir(get: &impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let absolute_or_none = |v: OsString| Some(PathBuf::from(v)).filter(|p| p.is_absolute());
    let cache = get("XDG_CACHE_HOME").and_then(absolute_or_none);
    let cache = cache.or_else(|| get("HOME").and_then(absolute_or_none).map(|home| home.join(".cache")));
    cache.map(|c| c.join("berth").join("arena"))
}

/// A relative path would change its meaning with the host's working directory, so only absolute ones are taken.
fn absolute(name: &str, value: OsString) -> Result<PathBuf> {
    let path = PathBuf::from(value);
    if path.is_absolute() { Ok(path) } else { Err(bad(name, path.as_os_str(), "an absolute path")) }
}

fn parse_switch(name: &str, value: &OsStr) -> Result<bool> {
    match value.to_str() {
        Some("1" | "on" | "true" | "yes") => Ok(true),
        Some("0" | "off" | "false" | "no") => Ok(false),
        _ => Err(bad(name, value, "1 or 0 (on/off, true/false, yes/no)")),
    }
}

/// A number of bytes, or of KiB, MiB, GiB or TiB: `500000`, `64K`, `20G`, `20GiB`.
fn parse_bytes(name: &str, value: &OsStr) -> Result<u64> {
    let parsed = value.to_str().and_then(|text| {
        let end = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(end);
        let shift = match unit.to_ascii_lowercase().as_str() {
            "" => 0,
            "k" | "kib" => 10,
            "m" | "mib" => 20,
            "g" | "gib" => 30,
            "t" | "tib" => 40,
            _ => return None,
        };
        number.parse::<u64>().ok()?.checked_mul(1 << shift)
    });
    parsed.ok_or_else(|| bad(name, value, "a number of bytes, or of K, M, G or T (1024 bytes, 1024 K, ..)"))
}

fn parse_fill(value: &OsStr) -> Result<Fill> {
    match value.to_str() {
        Some("auto") => Ok(Fill::Auto),
        Some("copy") => Ok(Fill::Copy),
        _ => Err(bad("BERTH_FILL", value, "auto or copy")),
    }
}

fn parse_pin(value: &OsStr) -> Result<Pin> {
    match value.to_str() {
        Some("alloc") => Ok(Pin::Alloc),
        Some("register") => Ok(Pin::Register),
        Some("off") => Ok(Pin::Off),
        Some("mapping") => Ok(Pin::Mapping),
        _ => Err(bad("BERTH_PIN", value, "alloc, register, mapping or off")),
    }
}

/// A number of bytes, or a share of what is available: `20G`, `60%`.
fn parse_pin_limit(value: &OsStr) -> Result<PinLimit> {
    const NAME: &str = "BERTH_PIN_LIMIT";
    let wrong = || bad(NAME, value, "a number of bytes, or of K, M, G or T, or a share of what is available, 0% to 100%");
    let Some(percent) = value.to_str().and_then(|v| v.strip_suffix('%')) else {
        return parse_bytes(NAME, value).map(PinLimit::Bytes).map_err(|_| wrong());
    };
    let number = percent.bytes().all(|b| b.is_ascii_digit()).then(|| percent.parse().ok()).flatten();
    let share = number.filter(|n| *n <= 100).map(PinLimit::Percent);
    share.ok_or_else(wrong)
}

fn parse_device(value: &OsStr) -> Result<u32> {
    let number = value.to_str().filter(|v| v.bytes().all(|b| b.is_ascii_digit())).and_then(|v| v.parse().ok());
    number.ok_or_else(|| bad("BERTH_CUDA_DEVICE", value, "the number of a CUDA device, from 0"))
}

fn parse_numa(value: &OsStr) -> Result<Option<Numa>> {
    match value.to_str() {
        Some("off") => Ok(None),
        Some("interleave") => Ok(Some(Numa::Interleave)),
        Some("local") => Ok(Some(Numa::Local)),
        other => {
            let digits = other.and_then(|t| t.strip_prefix("bind:")).filter(|n| n.bytes().all(|b| b.is_ascii_digit()));
            let node = digits.and_then(|n| n.parse().ok()).filter(|n| *n < 1024);
            node.map(|n| Some(Numa::Bind(n))).ok_or_else(|| bad("BERTH_NUMA", value, "off, interleave, local or bind:N, N a node's number"))
        }
    }
}

fn parse_read_ahead(value: &OsStr) -> Result<ReadAhead> {
    match value.to_str() {
        Some("auto") => Ok(ReadAhead::Auto),
        Some("off") => Ok(ReadAhead::Off),
        Some("on") => Ok(ReadAhead::On),
        _ => Err(bad("BERTH_READAHEAD", value, "auto, off or on")),
    }
}

fn parse_warm(value: &OsStr) -> Result<Warm> {
    match value.to_str() {
        Some("auto") => Ok(Warm::Auto),
        Some("off") => Ok(Warm::Off),
        Some("dense") => Ok(Warm::Dense),
        _ => Err(bad("BERTH_WARM", value, "auto, off or dense")),
    }
}

fn parse_direct(value: &OsStr) -> Result<bool> {
    match value.to_str() {
        Some("auto") => Ok(true),
        Some("off") => Ok(false),
        _ => Err(bad("BERTH_DIRECT", value, "auto or off")),
    }
}

fn parse_level(value: &OsStr) -> Result<Option<Level>> {
    match value.to_str() {
        Some("off") => Ok(None),
        Some("error") => Ok(Some(Level::Error)),
        Some("warn") => Ok(Some(Level::Warn)),
        Some("info") => Ok(Some(Level::Info)),
        Some("debug") => Ok(Some(Level::Debug)),
        _ => Err(bad("BERTH_LOG", value, "off, error, warn, info or debug")),
    }
}

fn bad(name: &str, value: &OsStr, allowed: &str) -> Error {
    Error::new(Status::Config, format!("{name}={value:?} is not understood; it takes {allowed}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(pairs: &[(&str, &str)]) -> Result<Config> {
        Config::from_lookup(|name| pairs.iter().find(|(k, _)| *k == name).map(|(_, v)| OsString::from(v)))
    }

    #[test]
    fn nothing_set_gives_the_defaults() {
        assert_eq!(from(&[]), Ok(Config::default()));
        assert_eq!(from(&[("BERTH_LOG", ""), ("BERTH_STRICT", "")]), Ok(Config::default()));
    }

    #[test]
    fn the_hosts_threshold_is_read_as_the_host_reads_it() {
        for (value, want) in [
            ("64", 64),
            (" 64", 64),
            ("64x", 64),
            ("+64", 64),
            ("abc", 0),
            ("-5", 0),
            ("- 5", 0),
            ("", 0),
            ("6 4", 6),
            ("9999999999", i32::MAX as u32),
        ] {
            assert_eq!(from(&[("GGML_OP_OFFLOAD_MIN_BATCH", value)]).unwrap().offload_min_batch, want, "'{value}'");
        }
        assert!(from(&[("BERTH_OFFLOAD_MIN_BATCH", "64x")]).is_err());
    }

    #[test]
    fn the_arena_lies_under_the_users_cache() {
        let home = from(&[("HOME", "/home/u")]).unwrap();
        assert_eq!(home.arena_dir, Some(PathBuf::from("/home/u/.cache/berth/arena")));
        let xdg = from(&[("HOME", "/home/u"), ("XDG_CACHE_HOME", "/c")]).unwrap();
        assert_eq!(xdg.arena_dir, Some(PathBuf::from("/c/berth/arena")));
        let relative_xdg = from(&[("XDG_CACHE_HOME", "c")]).unwrap();
        assert_eq!(relative_xdg.arena_dir, None, "the XDG specification says to ignore relative paths");
        let named = from(&[("HOME", "/home/u"), ("BERTH_ARENA_DIR", "/data")]).unwrap();
        assert_eq!((named.arena_dir, named.arena_dir_is_default), (Some(PathBuf::from("/data")), false));
    }

    #[test]
    fn every_bad_value_is_an_error_that_names_it() {
        for (name, value) in [
            ("BERTH_LOG", "verbose"),
            ("BERTH_STRICT", "maybe"),
            ("BERTH_STRICT", "2"),
            ("BERTH_FUSE", "fast"),
            ("BERTH_NUMA", "on"),
            ("BERTH_NUMA", "bind"),
            ("BERTH_NUMA", "bind:"),
            ("BERTH_NUMA", "bind:x"),
            ("BERTH_NUMA", "bind:+1"),
            ("BERTH_NUMA", "bind:-1"),
            ("BERTH_NUMA", "bind:1024"),
            ("BERTH_NUMA", "bind:0,1"),
            ("BERTH_NUMA", "interleave:0"),
            ("BERTH_FILL", "1"),
            ("BERTH_FILL", "Copy"),
            ("BERTH_AUTO", "-1"),
            ("BERTH_ARENA_PERSIST", "always"),
            ("BERTH_ARENA_LIMIT", "-1"),
            ("BERTH_ARENA_LIMIT", "G"),
            ("BERTH_ARENA_LIMIT", "1.5G"),
            ("BERTH_ARENA_LIMIT", "20 G"),
            ("BERTH_ARENA_LIMIT", "20GB"),
            ("BERTH_ARENA_LIMIT", "99999999T"),
            ("BERTH_OFFLOAD_MIN_BATCH", "-1"),
            ("BERTH_OFFLOAD_MIN_BATCH", "many"),
            ("BERTH_ARENA_DIR", "arena"),
            ("BERTH_REPORT", "r.json"),
            ("BERTH_PIN", "on"),
            ("BERTH_PIN", "Alloc"),
            ("BERTH_PIN_LIMIT", "101%"),
            ("BERTH_PIN_LIMIT", "+5%"),
            ("BERTH_PIN_LIMIT", "%"),
            ("BERTH_PIN_LIMIT", "80 %"),
            ("BERTH_PIN_LIMIT", "lots"),
            ("BERTH_PIN_STAGING", "2"),
            ("BERTH_CUDA_DEVICE", "-1"),
            ("BERTH_CUDA_DEVICE", "cuda0"),
            ("BERTH_LOCK", "all"),
            ("BERTH_READAHEAD", "1"),
            ("BERTH_WARM", "all"),
            ("BERTH_WARM", "1"),
        ] {
            let error = from(&[(name, value)]).expect_err(name);
            assert_eq!(error.status, Status::Config);
            assert!(error.message.contains(name) && error.message.contains(value), "{error}");
        }
    }

    #[test]
    fn a_node_that_this_machine_lacks_is_an_error_with_their_number() {
        let nodes = std::env::temp_dir().join(format!("berth-nodes-{}", std::process::id()));
        (0..2).for_each(|n| std::fs::create_dir_all(nodes.join(format!("node{n}"))).unwrap());
        let fits = |value| from(&[("BERTH_NUMA", value)]).unwrap().fits(&nodes);
        assert!(["off", "interleave", "local", "bind:0", "bind:1"].iter().all(|v| fits(v).is_ok()));
        let error = fits("bind:2").unwrap_err();
        assert!(error.status == Status::Config && error.message.contains("no node 2; it has 2"), "{error}");
        std::fs::remove_dir_all(&nodes).unwrap();
        assert!(fits("bind:0").is_ok() && fits("bind:1").is_err(), "a kernel without NUMA has node 0");
    }

    #[test]
    fn the_variable_that_was_meant_is_near() {
        for (typed, meant) in [
            ("BERTH_ARENADIR", Some("BERTH_ARENA_DIR")),
            ("BERTH_strict", Some("BERTH_STRICT")),
            ("BERTH_OFFLOAD_MINBATCH", Some("BERTH_OFFLOAD_MIN_BATCH")),
            ("BERTH_ISAS", Some("BERTH_ISA")),
            ("BERTH_COLOUR_OF_THE_MOON", None),
            ("BERTH_", None),
        ] {
            assert_eq!(nearest_variable(typed), meant, "{typed}");
        }
    }

    #[test]
    fn every_variable_that_is_read_is_known() {
        let asked = std::cell::RefCell::new(Vec::new());
        let read = Config::from_lookup(|name| {
            asked.borrow_mut().push(name.to_owned());
            None
        });
        assert!(read.is_ok());
        let asked: Vec<String> = asked.into_inner().into_iter().filter(|n| n.starts_with("BERTH_")).collect();
        assert!(asked.len() + 1 == VARIABLES.len() && asked.iter().all(|n| VARIABLES.contains(&n.as_str())), "{asked:?}");
    }

    #[test]
    fn sizes_have_units_of_1024() {
        for (value, want) in [("0", 0), ("500000", 500_000), ("64K", 64 << 10), ("3m", 3 << 20), ("20GiB", 20 << 30), ("2T", 2 << 40)] {
            assert_eq!(from(&[("BERTH_ARENA_LIMIT", value)]).unwrap().arena_limit, Some(want), "{value}");
        }
    }

    #[test]
    fn the_limit_is_a_size_or_a_share() {
        for (value, want) in [
            ("0", PinLimit::Bytes(0)),
            ("20G", PinLimit::Bytes(20 << 30)),
            ("0%", PinLimit::Percent(0)),
            ("60%", PinLimit::Percent(60)),
            ("100%", PinLimit::Percent(100)),
        ] {
            assert_eq!(from(&[("BERTH_PIN_LIMIT", value)]).unwrap().pin_limit, want, "{value}");
        }
    }

    #[test]
    fn the_hosts_switch_counts_as_there_even_when_it_is_empty() {
        for value in ["", "0", "1"] {
            assert!(from(&[("GGML_CUDA_NO_PINNED", value)]).unwrap().no_pinned, "'{value}'");
        }
    }

    #[test]
    fn every_documented_value_is_taken() {
        for (value, want) in
            [("1", true), ("on", true), ("true", true), ("yes", true), ("0", false), ("off", false), ("false", false), ("no", false)]
        {
            assert_eq!(from(&[("BERTH_STRICT", value)]).unwrap().strict, want);
        }
        let levels = [
            ("off", None),
            ("error", Some(Level::Error)),
            ("warn", Some(Level::Warn)),
            ("info", Some(Level::Info)),
            ("debug", Some(Level::Debug)),
        ];
        for (value, want) in [("alloc", Pin::Alloc), ("register", Pin::Register), ("off", Pin::Off), ("mapping", Pin::Mapping)] {
            assert_eq!(from(&[("BERTH_PIN", value)]).unwrap().pin, Some(want));
        }
        assert_eq!(from(&[("BERTH_CUDA_DEVICE", "3")]).unwrap().cuda_device, 3);
        assert_eq!(from(&[("BERTH_FILL", "auto")]).unwrap().fill, Fill::Auto);
        assert_eq!(from(&[("BERTH_FILL", "copy")]).unwrap().fill, Fill::Copy);
        let numa = [
            ("off", None),
            ("interleave", Some(Numa::Interleave)),
            ("local", Some(Numa::Local)),
            ("bind:0", Some(Numa::Bind(0))),
            ("bind:7", Some(Numa::Bind(7))),
        ];
        for (value, want) in numa {
            assert_eq!(from(&[("BERTH_NUMA", value)]).unwrap().numa, want);
        }
        for (value, want) in [("auto", ReadAhead::Auto), ("off", ReadAhead::Off), ("on", ReadAhead::On)] {
            assert_eq!(from(&[("BERTH_READAHEAD", value)]).unwrap().read_ahead, want);
        }
        for (value, want) in [("auto", Warm::Auto), ("off", Warm::Off), ("dense", Warm::Dense)] {
            assert_eq!(from(&[("BERTH_WARM", value)]).unwrap().warm, want);
        }
        for (value, want) in [("auto", true), ("off", false)] {
            assert_eq!(from(&[("BERTH_DIRECT", value)]).unwrap().direct, want);
        }
        for (value, want) in levels {
            assert_eq!(from(&[("BERTH_LOG", value)]).unwrap().log, want);
        }
    }
}
