//! The places a tensor can be given, and the names they have in `-ot`.
//!
//! Owns: names, the list of what may be named, the nearest name to a misspelt one. Must not know: which tensor gets which place.

use std::fmt;
use std::sync::Arc;

use serde::{Serialize, Serializer};

use crate::text::is_loud;

/// Where a tensor goes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Target {
    /// Stock's plain CPU buffer type: the file's mapping itself, or ordinary memory without one.
    Cpu,
    /// Berth's zero-copy type over the file's mapping.
    CpuMmap,
    /// Berth's page-locked memory.
    CudaHost,
    /// Berth's file-backed arena.
    Arena,
    /// The buffer type of a device, by name, for example `CUDA0`.
    Device(Arc<str>),
    /// Stock's own page-locked type of a GPU, by name. It cannot be named in a rule, and stock only chooses it without mmap.
    StockHost(Arc<str>),
}

impl Target {
    /// The name as typed in `-ot`; for [`Target::StockHost`], the one that stock logs.
    pub fn name(&self) -> &str {
        match self {
            Target::Cpu => "CPU",
            Target::CpuMmap => "CPU_MMAP",
            Target::CudaHost => "CUDA_Host",
            Target::Arena => "ARENA",
            Target::Device(name) | Target::StockHost(name) => name,
        }
    }

    /// Whether the tensor is in host memory in ggml's own layout.
    pub fn is_host(&self) -> bool {
        !matches!(self, Target::Device(_))
    }

    /// Whether it is one of Berth's buffer types.
    pub fn is_berth(&self) -> bool {
        matches!(self, Target::CpuMmap | Target::CudaHost | Target::Arena)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // The same name as Berth's; a reader must be able to tell them apart.
            Target::StockHost(name) => write!(f, "{name} (stock)"),
            other => f.write_str(other.name()),
        }
    }
}

impl Serialize for Target {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The targets that a rule may name.
#[derive(Clone, Debug)]
pub struct Targets(Vec<Target>);

impl Targets {
    /// Berth's own and `CPU`, and the buffer types of the given devices. Names that are there already are not added again.
    pub fn new<S: AsRef<str>>(devices: impl IntoIterator<Item = S>) -> Targets {
        let mut all = vec![Target::Cpu, Target::CpuMmap, Target::CudaHost, Target::Arena];
        for device in devices {
            let name = device.as_ref();
            if !all.iter().any(|t| t.name() == name) {
                all.push(Target::Device(name.into()));
            }
        }
        Targets(all)
    }

    /// Checks that a rule can name a device of that name.
    ///
    /// # Errors
    /// A sentence without a full stop.
    fn check_device(name: &str) -> Result<(), String> {
        check_name(name, "the name of a device")
    }

    /// Checks the devices of a load, each with its host type: names that a rule can contain, none of them twice, none of them the CPU's or
    /// Berth's. As in llama.cpp they differ in more than the case of their letters.
    ///
    /// # Errors
    /// A sentence without a full stop.
    pub fn check_devices<'a>(devices: impl IntoIterator<Item = (&'a str, Option<&'a str>)>) -> Result<(), String> {
        let own = Targets::new([""; 0]);
        let is_own = |name: &str| own.names().any(|n| n.eq_ignore_ascii_case(name));
        let mut seen: Vec<&str> = Vec::new();
        for (name, host) in devices {
            Targets::check_device(name)?;
            if is_own(name) {
                return Err(format!("'{name}' is host memory and no device that layers go to"));
            }
            if seen.iter().any(|n| n.eq_ignore_ascii_case(name)) {
                return Err(format!("'{name}' is named twice"));
            }
            if let Some(host) = host {
                check_name(host, "the host type of a device")?;
                // CUDA's own type has the name that Berth's has.
                if is_own(host) && host != Target::CudaHost.name() {
                    return Err(format!("'{host}' is no page-locked memory of the device '{name}'"));
                }
            }
            seen.push(name);
        }
        Ok(())
    }

    /// The target of that name; names are case-sensitive, as in stock.
    pub fn find(&self, name: &str) -> Option<&Target> {
        self.0.iter().find(|t| t.name() == name)
    }

    /// Every name, in the order given.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(Target::name)
    }

    /// The name that was probably meant, if one is near.
    pub fn nearest(&self, name: &str) -> Option<&str> {
        let wanted = name.trim().to_lowercase();
        let distance = |t: &&str| strsim::damerau_levenshtein(&t.to_lowercase(), &wanted);
        // A misspelling, not another word: at most a third of the letters may differ.
        let most = wanted.chars().count().div_ceil(3);
        // Do not compare with something that no one can have meant: the time is the product of the lengths.
        self.names().filter(|_| wanted.len() <= 64).min_by_key(distance).filter(|t| distance(t) <= most)
    }
}

fn check_name(name: &str, what: &str) -> Result<(), String> {
    const ENDS_A_TARGET: [char; 3] = [',', ';', '='];
    let shown = name.chars().take(80).collect::<String>();
    // What a terminal would obey first: a name that has it is only shown escaped.
    let fault = name.chars().find(|c| is_loud(*c)).or_else(|| name.chars().find(|c| ENDS_A_TARGET.contains(c)));
    match fault {
        _ if name.is_empty() => Err(format!("{what} is empty")),
        Some(c) if is_loud(c) => Err(format!("{what} contains a control character: '{}'", shown.escape_debug())),
        Some(c) => Err(format!("{what} contains '{c}', so no rule can name it: '{shown}'")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_target_is_the_one_meant_and_nothing_if_nothing_is_near() {
        let targets = Targets::new(["CUDA0", "Vulkan0", "CPU"]);
        assert_eq!(targets.names().collect::<Vec<_>>(), ["CPU", "CPU_MMAP", "CUDA_Host", "ARENA", "CUDA0", "Vulkan0"]);
        for (typed, meant) in [
            ("CUDA_Hots", Some("CUDA_Host")),
            ("cuda_host", Some("CUDA_Host")),
            ("CPU ", Some("CPU")),
            ("CUDA1", Some("CUDA0")),
            ("CPUMMAP", Some("CPU_MMAP")),
            ("arena", Some("ARENA")),
            ("vulkan", Some("Vulkan0")),
            ("the moon", None),
            ("", None),
        ] {
            assert_eq!(targets.nearest(typed), meant, "{typed}");
        }
        assert_eq!(targets.nearest(&"x".repeat(1_000_000)), None);
    }

    #[test]
    fn a_device_has_a_name_that_a_rule_can_contain() {
        for good in ["CUDA0", "RPC1[127.0.0.1:50053]", "Vulkan 0"] {
            assert_eq!(Targets::check_device(good), Ok(()));
        }
        for (bad, said) in [("", "empty"), ("A=B", "'='"), ("a,b", "','"), ("a;b", "';'"), ("a\nb", "control"), ("a\u{202e}b", "control")] {
            assert!(Targets::check_device(bad).is_err_and(|e| e.contains(said)), "{bad:?}");
        }
    }

    #[test]
    fn devices_of_a_load_are_no_host_memory_and_named_once() {
        let check = |devices: &[(&'static str, Option<&'static str>)]| Targets::check_devices(devices.iter().copied());
        assert_eq!(check(&[]), Ok(()));
        assert_eq!(check(&[("CUDA0", Some("CUDA_Host")), ("CUDA1", Some("CUDA_Host")), ("RPC0[127.0.0.1:50052]", None)]), Ok(()));
        for (name, said) in
            [("CPU", "'CPU' is host memory"), ("cpu_mmap", "host memory"), ("CUDA_Host", "host memory"), ("ARENA", "host memory")]
        {
            assert!(check(&[("CUDA0", None), (name, None)]).is_err_and(|e| e.contains(said)), "{name}");
        }
        assert_eq!(check(&[("CUDA0", None), ("Cuda0", None)]), Err("'Cuda0' is named twice".into()));
        for (host, said) in
            [("", "the host type of a device is empty"), ("a=b", "'='"), ("a=b,\u{1b}", "b,\\u{1b}'"), ("ARENA", "no page-locked")]
        {
            assert!(check(&[("CUDA0", Some(host))]).is_err_and(|e| e.contains(said)), "{host:?}");
        }
    }

    #[test]
    fn stock_host_type_is_told_apart_from_the_one_of_berth() {
        let stock = Target::StockHost("CUDA_Host".into());
        assert_eq!((stock.name(), stock.to_string().as_str()), ("CUDA_Host", "CUDA_Host (stock)"));
        assert_ne!(stock, Target::CudaHost);
        assert!(stock.is_host() && !stock.is_berth());
        assert!(!Target::Device("CUDA0".into()).is_host());
    }
}
