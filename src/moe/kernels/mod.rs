//! The kernels of every tier, in one table.
//!
//! Owns: [`Kernels`] (the safe way to call them), [`Mul`] (the arguments of a product), and the tables. To add a tier, add a module with a
//! `KERNELS` and a line in [`table`]. Must not know: experts, threads.
//!
//! A kernel multiplies some rows of one expert with some quantised token rows: `out[c * stride + r] = rows[r] . columns[c]`. What it computes
//! for one (row, column) depends on how many columns are in the call (few and many take different ways), but not on which, nor on the rows.

#[cfg(target_arch = "x86_64")]
mod ahead;
#[cfg(target_arch = "x86_64")]
#[expect(clippy::needless_range_loop, reason = "an index counts columns, panels or groups in several arrays at once")]
mod avx2;
#[cfg(target_arch = "x86_64")]
#[expect(clippy::needless_range_loop, reason = "an index counts columns, panels or groups in several arrays at once")]
mod avx512;
mod scalar;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod words;

use super::activation::Activation;
use super::acts::{ActFormat, ActRow, ActRowMut, Line};
use super::args::WeightRows;
use super::blocks::WeightType;
use super::isa::{Isa, Tier};

/// Most columns of a product.
pub const MOST_COLUMNS: usize = 96;

/// Lines of the scratch memory of a product: four panels of 16 rows.
pub const PANEL_LINES: usize = 4 * (64 + 16 + 8 + 8 + 1);

/// The arguments of a product.
pub struct Mul<'a> {
    /// The weights.
    pub rows: WeightRows<'a>,
    /// The activations, in the format of the weights: at most [`MOST_COLUMNS`].
    pub columns: &'a [ActRow<'a>],
    /// The products.
    pub out: &'a mut [f32],
    /// From one column's products to the next's: a multiple of 32, at least the number of rows. Products beyond the rows are undefined.
    pub stride: usize,
    /// Scratch: at least [`PANEL_LINES`].
    pub panel: &'a mut [Line],
    /// Bytes that will be read after these rows, for prefetching; any address.
    pub next: *const u8,
    /// Activations that will be read after these, for prefetching.
    pub next_columns: &'a [ActRow<'a>],
}

impl Mul<'_> {
    /// # Panics
    /// If the arguments do not fit each other.
    fn check(&self) {
        let (rows, columns) = (self.rows.len(), self.columns.len());
        assert!(self.stride.is_multiple_of(32) && self.stride >= rows && self.out.len() >= columns * self.stride);
        assert!(columns <= MOST_COLUMNS && self.panel.len() >= PANEL_LINES);
        let format = ActFormat::of(self.rows.weights());
        let lines = format.row_lines(self.rows.k());
        assert!(self.columns.iter().all(|c| c.format() == format && c.lines() >= lines));
    }
}

/// All kernels of one tier. The functions may be called where the tier's instructions exist.
struct Table {
    mul: [unsafe fn(&mut Mul<'_>); WeightType::ALL.len()],
    quantise: unsafe fn(&[f32], &mut ActRowMut<'_>),
    activate: unsafe fn(Activation, &mut [f32], &[f32]),
    accumulate: unsafe fn(&mut [f32], f32, &[f32]),
}

/// All kernels of one tier, on a CPU that has it.
#[derive(Clone, Copy)]
pub struct Kernels {
    isa: Isa,
    table: &'static Table,
}

/// The kernels that `isa` proves to be usable.
pub fn table(isa: Isa) -> Kernels {
    let table = match isa.tier() {
        Tier::Scalar => &scalar::KERNELS,
        #[cfg(target_arch = "x86_64")]
        Tier::Avx2 => &avx2::KERNELS,
        #[cfg(target_arch = "x86_64")]
        Tier::Avx512 => &avx512::KERNELS,
        #[cfg(not(target_arch = "x86_64"))]
        _ => &scalar::KERNELS,
    };
    Kernels { isa, table }
}

impl Kernels {
    /// The tier.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Multiplies.
    ///
    /// # Panics
    /// If the arguments do not fit each other.
    pub fn mul(&self, mut args: Mul<'_>) {
        args.check();
        let kernel = self.table.mul[args.rows.weights().index()];
        // SAFETY: `self.isa` proves the instructions of the tier, and the table is that tier's.
        unsafe { kernel(&mut args) }
    }

    /// Quantises a row, or whole blocks of one.
    ///
    /// # Panics
    /// If `out` has too few blocks.
    pub fn quantise(&self, x: &[f32], mut out: ActRowMut<'_>) {
        // SAFETY: as in `mul`.
        unsafe { (self.table.quantise)(x, &mut out) }
    }

    /// `gate[i] = activation(gate[i], up[i])`.
    pub fn activate(&self, activation: Activation, gate: &mut [f32], up: &[f32]) {
        // SAFETY: as in `mul`.
        unsafe { (self.table.activate)(activation, gate, up) }
    }

    /// `sum[i] += weight * x[i]`, with two roundings.
    pub fn accumulate(&self, sum: &mut [f32], weight: f32, x: &[f32]) {
        // SAFETY: as in `mul`.
        unsafe { (self.table.accumulate)(sum, weight, x) }
    }
}
