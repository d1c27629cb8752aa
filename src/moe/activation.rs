//! The functions between the two matrix products.
//!
//! Owns: [`Activation`] and its arithmetic. Every tier compiles these same functions: they have no branch and no fused multiply-add, so the
//! compiler vectorises them and all tiers give the same bits. Must not know: experts, rows, quantisation.
//!
//! Formulas: ggml's `GGML_GLU_OP_*` (ggml-cpu/ops.cpp, vec.h). GELU there goes through a table of halves; here it is computed, which is
//! closer to the formula. `exp`: Cody and Waite's reduction by ln 2 and the Taylor polynomial of degree 7, relative error below 2e-7.
//! `erfc`: the Chebyshev fit of Numerical Recipes (Press et al., `erfcc`), relative error below 1.2e-7.

/// What is done with the gate and up products.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `silu(gate) * up`.
    SwiGlu,
    /// `g * sigmoid(alpha * g) * (u + 1)` with `g = min(gate, limit)`, `u = clamp(up, -limit, limit)`.
    SwiGluOai {
        /// Factor in the sigmoid.
        alpha: f32,
        /// Bound of both inputs.
        limit: f32,
    },
    /// `silu(min(gate, limit)) * clamp(up, -limit, limit)`.
    SwiGluClamp {
        /// Bound of both inputs.
        limit: f32,
    },
    /// `min(silu(gate), limit) * clamp(up, -limit, limit)`.
    SwiGluLimit {
        /// Bound of both factors.
        limit: f32,
    },
    /// `gelu(gate) * up`, GELU with the tangent.
    GeGlu,
    /// `gelu(gate) * up`, GELU with the error function.
    GeGluErf,
    /// `gate * sigmoid(1.702 * gate) * up`.
    GeGluQuick,
    /// `max(gate, 0) * up`.
    ReGlu,
    /// `silu(up)`; there is no gate.
    Silu,
    /// `gelu(up)` with the tangent; there is no gate.
    Gelu,
    /// `max(up, 0)`; there is no gate.
    Relu,
    /// `max(up, 0)^2`; there is no gate.
    ReluSqr,
}

impl Activation {
    /// Whether there is a gate matrix.
    pub const fn gated(self) -> bool {
        !matches!(self, Activation::Silu | Activation::Gelu | Activation::Relu | Activation::ReluSqr)
    }
}

/// `e^x`. 0 below -87.3 (no subnormals), infinity above 88.7; NaN for NaN.
#[inline(always)]
fn exp(x: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0;
    let clamped = x.clamp(-87.336_54, 88.722_83);
    let shifted = clamped * std::f32::consts::LOG2_E + MAGIC;
    let n = shifted - MAGIC;
    // ln 2 in two parts: the first has few enough bits that n times it is exact.
    let r = clamped - n * 0.693_359_4 - n * -2.121_944_4e-4;
    let p = 1.0 / 5040.0;
    let p = p * r + 1.0 / 720.0;
    let p = p * r + 1.0 / 120.0;
    let p = p * r + 1.0 / 24.0;
    let p = p * r + 1.0 / 6.0;
    let p = p * r + 0.5;
    let p = p * r + 1.0;
    let p = p * r + 1.0;
    // 2^n in two factors: n is 128 for the largest arguments, and has no float of its own.
    let n = (shifted.to_bits() as i32).wrapping_sub(MAGIC.to_bits() as i32);
    let half = n >> 1;
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) << 23) as u32);
    let value = p * power(half) * power(n.wrapping_sub(half));
    let value = if x > 88.722_83 { f32::INFINITY } else { value };
    if x < -87.336_54 { 0.0 } else { value }
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

#[inline(always)]
fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// `0.5 * x * (1 + tanh(y))` with `y = sqrt(2/pi) * (x + 0.044715 x^3)`, as `x * sigmoid(2y)`, which is the same and has no cancellation.
#[inline(always)]
fn gelu(x: f32) -> f32 {
    const SQRT_2_OVER_PI: f32 = 0.797_884_6;
    x * sigmoid(2.0 * SQRT_2_OVER_PI * x * (1.0 + 0.044_715 * x * x))
}

#[inline(always)]
fn gelu_quick(x: f32) -> f32 {
    x * sigmoid(1.702 * x)
}

#[inline(always)]
fn erfc(x: f32) -> f32 {
    let z = x.abs();
    let t = 1.0 / (1.0 + 0.5 * z);
    let p = 0.170_872_77;
    let p = p * t - 0.822_152_23;
    let p = p * t + 1.488_515_9;
    let p = p * t - 1.135_204;
    let p = p * t + 0.278_868_07;
    let p = p * t - 0.186_288_06;
    let p = p * t + 0.096_784_18;
    let p = p * t + 0.374_091_96;
    let p = p * t + 1.000_023_7;
    let p = p * t - 1.265_512_2;
    let tail = t * exp(p - z * z);
    if x < 0.0 { 2.0 - tail } else { tail }
}

#[inline(always)]
fn gelu_erf(x: f32) -> f32 {
    0.5 * x * erfc(-x * std::f32::consts::FRAC_1_SQRT_2)
}

/// `min` and `max` that keep a NaN in their first argument, as the C++ of ggml does.
#[inline(always)]
fn at_most(x: f32, limit: f32) -> f32 {
    if x > limit { limit } else { x }
}

#[inline(always)]
fn within(x: f32, limit: f32) -> f32 {
    let x = at_most(x, limit);
    if x < -limit { -limit } else { x }
}

#[inline(always)]
fn relu(x: f32) -> f32 {
    if x < 0.0 { 0.0 } else { x }
}

#[inline(always)]
fn zip(gate: &mut [f32], up: &[f32], f: impl Fn(f32, f32) -> f32) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = f(*gate, *up);
    }
}

/// `gate[i] = act(gate[i], up[i])`. Without a gate, `gate` holds the up product and `up` is not read.
#[inline(always)]
pub fn apply(activation: Activation, gate: &mut [f32], up: &[f32]) {
    match activation {
        Activation::SwiGlu => zip(gate, up, |g, u| silu(g) * u),
        Activation::SwiGluOai { alpha, limit } => zip(gate, up, |g, u| {
            let g = at_most(g, limit);
            g * sigmoid(alpha * g) * (within(u, limit) + 1.0)
        }),
        Activation::SwiGluClamp { limit } => zip(gate, up, |g, u| silu(at_most(g, limit)) * within(u, limit)),
        Activation::SwiGluLimit { limit } => zip(gate, up, |g, u| at_most(silu(g), limit) * within(u, limit)),
        Activation::GeGlu => zip(gate, up, |g, u| gelu(g) * u),
        Activation::GeGluErf => zip(gate, up, |g, u| gelu_erf(g) * u),
        Activation::GeGluQuick => zip(gate, up, |g, u| gelu_quick(g) * u),
        Activation::ReGlu => zip(gate, up, |g, u| relu(g) * u),
        Activation::Silu => gate.iter_mut().for_each(|x| *x = silu(*x)),
        Activation::Gelu => gate.iter_mut().for_each(|x| *x = gelu(*x)),
        Activation::Relu => gate.iter_mut().for_each(|x| *x = relu(*x)),
        Activation::ReluSqr => gate.iter_mut().for_each(|x| *x = relu(*x) * relu(*x)),
    }
}

/// `sum[i] += weight * x[i]`.
#[inline(always)]
pub fn accumulate(sum: &mut [f32], weight: f32, x: &[f32]) {
    for (sum, x) in sum.iter_mut().zip(x) {
        *sum += weight * x;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// erfc by its continued fraction or series, in f64.
    fn erfc64(x: f64) -> f64 {
        if x < 0.0 {
            return 2.0 - erfc64(-x);
        }
        if x < 2.5 {
            let (mut term, mut sum) = (x, x);
            for n in 1..200 {
                term *= -x * x / f64::from(n);
                sum += term / f64::from(2 * n + 1);
            }
            return 1.0 - sum * 2.0 / std::f64::consts::PI.sqrt();
        }
        let fraction = (1..200).rev().fold(0.0, |f, n| f64::from(n) / 2.0 / (x + f));
        (-x * x).exp() / std::f64::consts::PI.sqrt() / (x + fraction)
    }

    #[test]
    fn every_function_is_close_to_its_f64_formula() {
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let silu = |x: f64| x * sigmoid(x);
        let gelu = |x: f64| 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh());
        type Formula<'a> = &'a dyn Fn(f64, f64) -> f64;
        let cases: [(Activation, Formula<'_>); 12] = [
            (Activation::SwiGlu, &|g, u| silu(g) * u),
            (Activation::SwiGluOai { alpha: 1.702, limit: 7.0 }, &|g, u| {
                g.min(7.0) * sigmoid(1.702 * g.min(7.0)) * (u.clamp(-7.0, 7.0) + 1.0)
            }),
            (Activation::SwiGluClamp { limit: 3.0 }, &|g, u| silu(g.min(3.0)) * u.clamp(-3.0, 3.0)),
            (Activation::SwiGluLimit { limit: 3.0 }, &|g, u| silu(g).min(3.0) * u.clamp(-3.0, 3.0)),
            (Activation::GeGlu, &|g, u| gelu(g) * u),
            (Activation::GeGluErf, &|g, u| 0.5 * g * erfc64(-g / 2f64.sqrt()) * u),
            (Activation::GeGluQuick, &|g, u| g * sigmoid(1.702 * g) * u),
            (Activation::ReGlu, &|g, u| g.max(0.0) * u),
            (Activation::Silu, &|g, _| silu(g)),
            (Activation::Gelu, &|g, _| gelu(g)),
            (Activation::Relu, &|g, _| g.max(0.0)),
            (Activation::ReluSqr, &|g, _| g.max(0.0).powi(2)),
        ];
        for (activation, formula) in cases {
            for i in -4000..=4000 {
                let (g, u) = (i as f32 / 150.0, ((i * 37) % 1000) as f32 / 90.0);
                let mut got = [g];
                apply(activation, &mut got, &[u]);
                let want = formula(f64::from(g), f64::from(u));
                // 1e-6 of the value, and of the scale of the argument where tanh and erf cancel in the f64 formula.
                let tolerance = 2e-6 * want.abs() + 1e-12;
                assert!((f64::from(got[0]) - want).abs() <= tolerance, "{activation:?} of {g}, {u}: {} for {want}", got[0]);
            }
        }
    }

    #[test]
    fn infinities_and_nan_go_where_the_formula_sends_them() {
        let one = |activation, g, u| {
            let mut got = [g];
            apply(activation, &mut got, &[u]);
            got[0]
        };
        assert_eq!(one(Activation::SwiGlu, f32::INFINITY, 1.0), f32::INFINITY);
        assert_eq!(one(Activation::SwiGlu, 1000.0, 2.0), 2000.0);
        assert_eq!(one(Activation::SwiGlu, -1000.0, 2.0), 0.0);
        assert_eq!(one(Activation::GeGluErf, -1000.0, 2.0), 0.0);
        assert_eq!(one(Activation::GeGlu, 1000.0, 2.0), 2000.0);
        for activation in [
            Activation::SwiGlu,
            Activation::SwiGluOai { alpha: 1.702, limit: 7.0 },
            Activation::SwiGluClamp { limit: 7.0 },
            Activation::SwiGluLimit { limit: 7.0 },
            Activation::GeGlu,
            Activation::GeGluErf,
            Activation::GeGluQuick,
            Activation::ReGlu,
            Activation::Silu,
            Activation::Gelu,
            Activation::Relu,
            Activation::ReluSqr,
        ] {
            assert!(one(activation, f32::NAN, 1.0).is_nan(), "{activation:?}");
            assert!(!activation.gated() || one(activation, 1.0, f32::NAN).is_nan(), "{activation:?}");
        }
    }
}
