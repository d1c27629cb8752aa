//! Every tier against the scalar one, on fresh random data, element by element.
//!
//! The tolerance: integer sums are exact in all tiers, so a product differs from the exact one by the roundings of its f32 additions. At most
//! one happens per 32 weights, and a few in the last reduction; each is at most 2^-24 of the partial sum, which is at most
//! `sum |a| * 4 max |w|`: 4, because kernels add unsigned codes and their offset (or min) separately.

use super::{Kernels, Mul, PANEL_LINES, table};
use crate::moe::acts::{ActFormat, ActRow, ActRowMut, Line};
use crate::moe::args::{Matrix, WeightRows};
use crate::moe::blocks::WeightType;
use crate::moe::isa::Tier;
use crate::moe::testing::{Rng, decoded, tiers, weights};

struct Case<'a> {
    rows: WeightRows<'a>,
    lines: Vec<Line>,
    format: ActFormat,
    columns: usize,
}

impl<'a> Case<'a> {
    fn new(kernels: Kernels, rows: WeightRows<'a>, x: &[f32]) -> Self {
        let format = ActFormat::of(rows.weights());
        let per_row = format.row_lines(rows.k());
        let columns = x.len() / rows.k();
        let mut lines = vec![Line([0x5a; 64]); per_row * columns];
        for (x, lines) in x.chunks_exact(rows.k()).zip(lines.chunks_exact_mut(per_row)) {
            kernels.quantise(x, ActRowMut::new(lines, format));
        }
        Case { rows, lines, format, columns }
    }

    fn mul(&self, kernels: Kernels) -> Vec<f32> {
        let columns: Vec<ActRow<'_>> =
            self.lines.chunks_exact(self.format.row_lines(self.rows.k())).map(|l| ActRow::new(l, self.format)).collect();
        let stride = self.rows.len().next_multiple_of(32);
        let mut out = vec![f32::NAN; stride * self.columns];
        let mut panel = vec![Line([0x77; 64]); PANEL_LINES];
        let (rows, next) = (self.rows, std::ptr::null());
        kernels.mul(Mul { rows, columns: &columns, out: &mut out, stride, panel: &mut panel, next, next_columns: &[] });
        out.chunks(stride).flat_map(|c| c[..self.rows.len()].to_vec()).collect()
    }

    /// Products in f64, and the tolerance of each.
    fn exact(&self) -> Vec<(f64, f64)> {
        let k = self.rows.k();
        let columns: Vec<Vec<f64>> = self
            .lines
            .chunks_exact(self.format.row_lines(k))
            .map(|l| (0..k).map(|i| super::scalar::value(ActRow::new(l, self.format), i)).collect())
            .collect();
        let rows: Vec<Vec<f32>> = (0..self.rows.len()).map(|r| decoded(&self.rows, r)).collect();
        let steps = (k / 32 + 24) as f64 * 2f64.powi(-24);
        let one = |column: &Vec<f64>, row: &Vec<f32>| {
            let (mut sum, mut size) = (0.0, 0.0);
            for (a, w) in column.chunks(256).zip(row.chunks(256)) {
                let largest = w.iter().fold(0f32, |m, w| m.max(w.abs()));
                sum += a.iter().zip(w).map(|(a, w)| a * f64::from(*w)).sum::<f64>();
                size += a.iter().map(|a| a.abs()).sum::<f64>() * f64::from(largest) * 4.0;
            }
            (sum, size * steps + 1e-30)
        };
        columns.iter().flat_map(|c| rows.iter().map(move |r| one(c, r))).collect()
    }
}

fn check(
    kernels: &[Kernels],
    rng: &mut Rng,
    ty: WeightType,
    k: usize,
    rows: usize,
    columns: usize,
    x: impl Fn(&mut Rng, usize) -> Vec<f32>,
) {
    let bytes = weights(rng, ty, k, rows).into_boxed_slice();
    let matrix = Matrix::packed(&bytes, ty, [k, rows, 1]).unwrap();
    let x = x(rng, k * columns);
    let case = Case::new(kernels[0], matrix.slice(0, 0, rows), &x);
    let exact = case.exact();
    for kernels in kernels {
        for (i, (got, (want, tolerance))) in case.mul(*kernels).into_iter().zip(&exact).enumerate() {
            let tier = kernels.isa().tier().name();
            assert!(
                (f64::from(got) - want).abs() <= *tolerance,
                "{tier} {} K={k} rows={rows} columns={columns}: column {} row {}: {got} for {want}, tolerance {tolerance}",
                ty.name(),
                i / rows,
                i % rows
            );
        }
    }
}

fn all_kernels() -> Vec<Kernels> {
    tiers().into_iter().map(table).collect()
}

/// The largest number of rows and columns that is tried; tasks have at most 256 and 64, made of tiles of 32 and 6.
const MOST: usize = 70;

#[test]
fn every_type_is_within_rounding_on_every_number_of_rows_and_of_columns() {
    let (kernels, mut rng) = (all_kernels(), Rng::new("rows and columns"));
    for ty in WeightType::ALL {
        for n in 1..=MOST {
            let few = 1 + rng.below(9);
            check(&kernels, &mut rng, ty, 256, n, few, Rng::values);
            check(&kernels, &mut rng, ty, 256, few, n, Rng::values);
        }
    }
}

#[test]
fn every_pair_of_rows_and_columns_is_within_rounding_on_some_type() {
    let (kernels, mut rng) = (all_kernels(), Rng::new("pairs"));
    for rows in 1..=MOST {
        for columns in 1..=MOST {
            let ty = WeightType::ALL[rng.below(WeightType::ALL.len())];
            check(&kernels, &mut rng, ty, ty.block_weights().max(32), rows, columns, Rng::values);
        }
    }
}

#[test]
fn every_type_is_within_rounding_on_every_length() {
    let (kernels, mut rng) = (all_kernels(), Rng::new("lengths"));
    for ty in WeightType::ALL {
        let step = ty.block_weights().max(32);
        // Rows of single weights end anywhere; all of 1..70 and lengths around those of the models.
        let odd = (1..MOST).chain([2879, 2880, 2881, 7167]).filter(|k| k.is_multiple_of(ty.block_weights()));
        for k in (step..=7168).step_by(step).chain(odd) {
            let (rows, columns) = (1 + rng.below(3), 1 + rng.below(16));
            check(&kernels, &mut rng, ty, k, rows, columns, Rng::values);
        }
        for k in [2048usize, 2880, 7168].into_iter().filter(|k| k.is_multiple_of(step)) {
            for columns in 1..=9 {
                check(&kernels, &mut rng, ty, k, 2, columns, Rng::values);
            }
        }
    }
}

#[test]
fn extreme_codes_and_activations_stay_exact() {
    let (kernels, mut rng) = (all_kernels(), Rng::new("extremes"));
    for ty in WeightType::ALL {
        for x in [1.0f32, -1.0, 0.0, 1e4, 1e-30, 1e-39] {
            for columns in [1, 4, 7, 13] {
                check(&kernels, &mut rng, ty, 512, 17, columns, |_, n| vec![x; n]);
                check(&kernels, &mut rng, ty, 512, 17, columns, |rng, n| {
                    let mut values: Vec<f32> = (0..n).map(|_| rng.signed() * 1e-3).collect();
                    values[n / 3] = 1e4 * x;
                    values
                });
            }
        }
        // All bits of all codes set, or none: the largest sums that 16 bits must hold.
        for fill in [0u8, 0xff, 0x80, 0x7f] {
            if ty.block_weights() == 1 {
                continue;
            }
            let mut bytes = weights(&mut rng, ty, 512, 9);
            let good = bytes.clone();
            for (block, good) in bytes.chunks_exact_mut(ty.block_bytes()).zip(good.chunks_exact(ty.block_bytes())) {
                let n = block.len();
                block.fill(fill);
                match ty {
                    WeightType::Q2_K => block[80..].copy_from_slice(&good[80..]),
                    WeightType::Q3_K | WeightType::Q6_K => block[n - 2..].copy_from_slice(&good[n - 2..]),
                    WeightType::MXFP4 => block[0] = good[0],
                    WeightType::Q4_1 | WeightType::Q5_1 | WeightType::Q4_K | WeightType::Q5_K => block[..4].copy_from_slice(&good[..4]),
                    _ => block[..2].copy_from_slice(&good[..2]),
                }
            }
            let matrix = Matrix::packed(&bytes, ty, [512, 9, 1]).unwrap();
            for columns in [1, 3, 6, 13] {
                let x: Vec<f32> = (0..512 * columns).map(|i| if columns == 3 && i % 2 == 0 { -1.0 } else { 1.0 }).collect();
                let case = Case::new(kernels[0], matrix.slice(0, 0, 9), &x);
                // Codes of 0 do not show in `max |w|`, but their offset was added and subtracted: at most 128 times a scale of 1/8, 512 times.
                let offset = 512.0 * 16.0 * (512 / 32 + 24) as f64 * 2f64.powi(-24);
                for kernels in &kernels {
                    for (got, (want, tolerance)) in case.mul(*kernels).into_iter().zip(case.exact()) {
                        let tier = kernels.isa().tier().name();
                        assert!(
                            (f64::from(got) - want).abs() <= tolerance + offset,
                            "{tier} {} all {fill:#x}: {got} for {want}",
                            ty.name()
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_product_does_not_depend_on_its_neighbours() {
    let mut rng = Rng::new("neighbours");
    for kernels in all_kernels() {
        for ty in WeightType::ALL {
            let k = if ty.block_weights() == 256 { 768 } else { 2880 };
            let bytes = weights(&mut rng, ty, k, 40);
            let matrix = Matrix::packed(&bytes, ty, [k, 40, 1]).unwrap();
            let x = rng.values(k * 23);
            let all = Case::new(kernels, matrix.slice(0, 0, 40), &x).mul(kernels);
            let same_as = |all: &[f32], first: usize, columns: usize| {
                let part = Case::new(kernels, matrix.slice(0, 7, 20), &x[k * first..][..k * columns]).mul(kernels);
                for (i, v) in part.iter().enumerate() {
                    let (whole, tier) = (all[(first + i / 20) * 40 + 7 + i % 20], kernels.isa().tier().name());
                    assert_eq!(v.to_bits(), whole.to_bits(), "{tier} {}", ty.name());
                }
            };
            // In each tier and type, so many columns take the way for many, and so few that for few.
            for (first, columns) in [(0, 12), (3, 16), (5, 17), (0, 23)] {
                same_as(&all, first, columns);
            }
            let few: Vec<f32> = Case::new(kernels, matrix.slice(0, 0, 40), &x[..k * 3]).mul(kernels);
            for (first, columns) in [(0, 1), (1, 1), (1, 2), (0, 3)] {
                same_as(&few, first, columns);
            }
        }
    }
}

#[test]
fn nan_and_infinity_reach_every_product_of_their_token_and_no_other() {
    let mut rng = Rng::new("nan");
    for kernels in all_kernels() {
        for ty in WeightType::ALL {
            for (columns, bad) in [(1, f32::NAN), (3, f32::INFINITY), (8, f32::NEG_INFINITY), (13, f32::NAN)] {
                let bytes = weights(&mut rng, ty, 512, 20);
                let matrix = Matrix::packed(&bytes, ty, [512, 20, 1]).unwrap();
                let mut x = rng.values(512 * columns);
                let place = rng.below(x.len());
                x[place] = bad;
                for (i, v) in Case::new(kernels, matrix.slice(0, 0, 20), &x).mul(kernels).into_iter().enumerate() {
                    assert_eq!(!v.is_finite(), i / 20 == place / 512, "{} {}", kernels.isa().tier().name(), ty.name());
                }
            }
        }
    }
}

#[test]
fn rows_may_lie_far_apart_and_one_row_has_no_stride() {
    let mut rng = Rng::new("far apart");
    for kernels in all_kernels() {
        for ty in WeightType::ALL {
            let (k, row) = (512, ty.row_bytes(512).unwrap());
            for (rows, stride) in [(1, usize::MAX), (1, 1 << 40), (2, 8 << 20), (35, 3 * row + 7)] {
                let packed = weights(&mut rng, ty, k, rows);
                let mut bytes = vec![0xa5; if rows == 1 { row } else { (rows - 1) * stride + row }];
                for r in 0..rows {
                    bytes[r * stride.min(1 << 30)..][..row].copy_from_slice(&packed[r * row..][..row]);
                }
                let x = rng.values(k * 16);
                let near = Matrix::packed(&packed, ty, [k, rows, 1]).unwrap();
                let far = Matrix::new(&bytes, ty, [k, rows, 1], [stride, usize::MAX]).unwrap();
                let near = Case::new(kernels, near.slice(0, 0, rows), &x).mul(kernels);
                assert_eq!(Case::new(kernels, far.slice(0, 0, rows), &x).mul(kernels), near, "{}", ty.name());
            }
        }
    }
}

#[test]
fn all_tiers_quantise_to_the_same_bits() {
    let (kernels, mut rng) = (all_kernels(), Rng::new("quantise"));
    for ty in WeightType::ALL {
        for scale in [1.0, 1e-20, 1e30] {
            for k in [32, 256, 2880, 2048] {
                let x: Vec<f32> = (0..k).map(|_| rng.signed() * scale).collect();
                let format = ActFormat::of(ty);
                let bits = |kernels: &Kernels| {
                    let mut lines = vec![Line([0; 64]); format.row_lines(k)];
                    kernels.quantise(&x, ActRowMut::new(&mut lines, format));
                    lines.iter().flat_map(|l| l.0).collect::<Vec<u8>>()
                };
                let want = bits(&kernels[0]);
                assert!(kernels.iter().all(|k| bits(k) == want), "{} at {scale}", ty.name());
            }
        }
    }
}

#[test]
fn the_tables_have_the_kernel_of_each_type_at_its_place() {
    // A kernel of another type panics on the row's type.
    let mut rng = Rng::new("table");
    for kernels in all_kernels() {
        for ty in WeightType::ALL {
            let k = ty.block_weights();
            check(&[kernels], &mut rng, ty, k, 1, 1, Rng::values);
        }
        assert!(kernels.isa().tier() >= Tier::Scalar);
    }
}

/// Weights that end where the mapping ends: the next page cannot be read.
struct Guarded {
    base: *mut u8,
    pages: usize,
}

const PAGE: usize = 4096;

impl Guarded {
    fn new(len: usize) -> Guarded {
        let pages = len.div_ceil(PAGE) + 1;
        // SAFETY: a new anonymous mapping, at an address of the kernel's choice.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                pages * PAGE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(base, libc::MAP_FAILED);
        // SAFETY: the last page of that mapping.
        let denied = unsafe { libc::mprotect(base.byte_add((pages - 1) * PAGE), PAGE, libc::PROT_NONE) };
        assert_eq!(denied, 0);
        Guarded { base: base.cast(), pages }
    }

    fn tail(&mut self, bytes: &[u8]) -> &[u8] {
        let end = (self.pages - 1) * PAGE;
        // SAFETY: the pages before the last are readable and writable, and nothing else uses them.
        let all = unsafe { std::slice::from_raw_parts_mut(self.base, end) };
        all[end - bytes.len()..].copy_from_slice(bytes);
        &all[end - bytes.len()..]
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping that `new` made; its slices are gone.
        unsafe { libc::munmap(self.base.cast(), self.pages * PAGE) };
    }
}

#[test]
fn no_kernel_reads_past_the_last_block() {
    let mut rng = Rng::new("guard");
    for kernels in all_kernels() {
        for ty in WeightType::ALL {
            for blocks in [1, 2, 3, 5, 8, 9, 11] {
                for rows in [1, 2, 5, 16, 33] {
                    let k = blocks * ty.block_weights();
                    let bytes = weights(&mut rng, ty, k, rows);
                    let mut guarded = Guarded::new(bytes.len());
                    let matrix = Matrix::packed(guarded.tail(&bytes), ty, [k, rows, 1]).unwrap();
                    for columns in [1, 2, 3, 4, 7, 13] {
                        let case = Case::new(kernels, matrix.slice(0, 0, rows), &rng.values(k * columns));
                        assert!(case.mul(kernels).iter().all(|v| v.is_finite()));
                    }
                }
            }
        }
    }
}

#[test]
fn a_weighted_sum_has_the_same_bits_in_every_tier() {
    let mut rng = Rng::new("weighted sum");
    for len in (0..70).chain([256]) {
        let (sum, x, weight) = (rng.values(len), rng.values(len), rng.values(1)[0]);
        let want: Vec<u32> = sum.iter().zip(&x).map(|(s, x)| (s + weight * x).to_bits()).collect();
        for kernels in all_kernels() {
            let mut got = sum.clone();
            kernels.accumulate(&mut got, weight, &x);
            let tier = kernels.isa().tier().name();
            assert_eq!(got.iter().map(|v| v.to_bits()).collect::<Vec<_>>(), want, "{tier}, {len} values");
        }
    }
}
