//! Which instruction sets the kernels may use.
//!
//! Owns: [`Isa`], the proof that this CPU has a tier's instructions, and `BERTH_ISA`, which may lower the choice. [`detect`] makes the best
//! one; [`Isa::lowered`] only ever goes down. No other file tests for CPU features. Must not know: weights, kernels.

use crate::error::{Error, Result, Status};

/// A set of kernels, worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tier {
    /// Plain Rust: the oracle the others are tested against.
    Scalar,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL, DQ and VNNI, on top of [`Tier::Avx2`].
    Avx512,
}

impl Tier {
    /// Every tier, worst first.
    pub const ALL: [Tier; 3] = [Tier::Scalar, Tier::Avx2, Tier::Avx512];

    /// The name that `BERTH_ISA` takes.
    pub const fn name(self) -> &'static str {
        match self {
            Tier::Scalar => "scalar",
            Tier::Avx2 => "avx2",
            Tier::Avx512 => "avx512",
        }
    }

    /// Whether this CPU, and the operating system's register saving, have the tier's instructions.
    pub fn in_this_cpu(self) -> bool {
        match self {
            Tier::Scalar => true,
            Tier::Avx2 => cpu_has_avx2(),
            Tier::Avx512 => cpu_has_avx2() && cpu_has_avx512(),
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn cpu_has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

#[cfg(target_arch = "x86_64")]
fn cpu_has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vnni")
}

#[cfg(not(target_arch = "x86_64"))]
fn cpu_has_avx2() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn cpu_has_avx512() -> bool {
    false
}

/// Proof that this CPU runs the kernels of a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(Tier);

/// The best tier of this CPU, or the one that `BERTH_ISA` (`scalar`, `avx2`, `avx512`) lowers it to.
///
/// # Errors
/// [`Status::Config`] if `BERTH_ISA` has another value, or names a tier that this CPU lacks.
pub fn detect() -> Result<Isa> {
    choose(std::env::var_os("BERTH_ISA").filter(|v| !v.is_empty()).map(|v| v.to_string_lossy().into_owned()).as_deref())
}

fn choose(wanted: Option<&str>) -> Result<Isa> {
    let best = Tier::ALL.into_iter().rev().find(|t| t.in_this_cpu()).unwrap_or(Tier::Scalar);
    let Some(wanted) = wanted else { return Ok(Isa(best)) };
    let Some(tier) = Tier::ALL.into_iter().find(|t| t.name() == wanted) else {
        return Err(Error::new(Status::Config, format!("BERTH_ISA={wanted:?} is not understood; it takes scalar, avx2 or avx512")));
    };
    Isa(best).lowered(tier).ok_or_else(|| {
        let message = format!("BERTH_ISA={wanted} asks for more than this CPU has, which is {}", best.name());
        Error::new(Status::Config, message)
    })
}

impl Isa {
    /// The tier this proves.
    pub const fn tier(self) -> Tier {
        self.0
    }

    /// The same or a lower tier. `None` for a higher one.
    pub fn lowered(self, tier: Tier) -> Option<Isa> {
        (tier <= self.0).then_some(Isa(tier))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_lowers_the_tier_and_never_raises_it() {
        assert_eq!(choose(Some("scalar")).unwrap().tier(), Tier::Scalar);
        let best = choose(None).unwrap();
        for tier in Tier::ALL {
            assert_eq!(choose(Some(tier.name())).is_ok(), tier.in_this_cpu(), "{}", tier.name());
            assert_eq!(best.lowered(tier).is_some(), tier <= best.tier());
        }
        assert_eq!(choose(Some("sse9")).unwrap_err().status, Status::Config);
        assert_eq!(choose(Some("scalar")).unwrap().lowered(Tier::Avx2), None);
    }
}
