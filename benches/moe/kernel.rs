//! One product at a time, from the cache: what a kernel can do when memory is no limit.
//!
//! Owns: `cargo bench --bench moe -- kernels [format] [tier]`. A run is short enough to fit between two interruptions, and the best of many
//! is printed, so that this works on a busy machine. Must not know: the operation.

use berth::moe::acts::{ActFormat, ActRow, ActRowMut, Line};
use berth::moe::blocks::WeightType;
use berth::moe::isa::Isa;
use berth::moe::kernels::{Mul, PANEL_LINES};
use berth::moe::{Matrix, Serial, table};

use crate::ceilings::{best, vnni_macs_per_second};
use crate::problem::{tiers, weights_of};

const ROWS: usize = 128;

fn line(isa: Isa, ty: WeightType, k: usize, peak: f64) {
    let kernels = table(isa);
    let bytes = weights_of(ty, k, ROWS);
    let matrix = Matrix::packed(&bytes, ty, [k, ROWS, 1]).expect("sizes");
    let format = ActFormat::of(ty);
    let mut panel = vec![Line([0; 64]); PANEL_LINES];
    print!("{:6} {:6} K={k}:", isa.tier().name(), ty.name());
    for columns in [1, 2, 3, 4, 5, 6, 8, 12, 32, 96] {
        let per_row = format.row_lines(k);
        let mut lines = vec![Line([0; 64]); per_row * columns];
        for (c, lines) in lines.chunks_mut(per_row).enumerate() {
            let x: Vec<f32> = (0..k).map(|i| ((i * 31 + c * 17) % 97) as f32 / 48.0 - 1.0).collect();
            kernels.quantise(&x, ActRowMut::new(lines, format));
        }
        let rows: Vec<ActRow<'_>> = lines.chunks(per_row).map(|l| ActRow::new(l, format)).collect();
        let mut out = vec![0.0; ROWS * columns];
        let seconds = best(if columns > 12 { 60 } else { 200 }, || {
            let (rows_of, next) = (matrix.slice(0, 0, ROWS), std::ptr::null());
            kernels.mul(Mul { rows: rows_of, columns: &rows, out: &mut out, stride: ROWS, panel: &mut panel, next, next_columns: &[] });
        });
        let macs = (ROWS * k * columns) as f64 / seconds;
        if columns < 4 {
            print!("  {columns}: {:5.1} GB/s", bytes.len() as f64 / seconds / 1e9);
        } else {
            print!("  {columns}: {:3.0}%", macs / peak * 100.0);
        }
    }
    println!();
}

/// Prints a line per format and tier.
pub(crate) fn print(arguments: &[String]) {
    let peak = vnni_macs_per_second(&Serial);
    println!("vpdpbusd {:.0} GMAC/s, one thread; share of it for more than three columns", peak / 1e9);
    for isa in tiers() {
        for ty in WeightType::ALL {
            if arguments.iter().any(|a| a == ty.name()) || !WeightType::ALL.iter().any(|t| arguments.iter().any(|a| a == t.name())) {
                line(isa, ty, 2048, peak);
            }
        }
    }
}
