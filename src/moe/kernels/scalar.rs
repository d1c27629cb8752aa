//! The oracle: every product from the definition, in f64.
//!
//! Owns: the scalar tier. A weight is what `dequant.rs` says, an activation is code times scale, and the sum is exact to f64. Slow, readable,
//! and what the other tiers are tested against.

use super::{Mul, Table};
use crate::moe::activation;
use crate::moe::acts::{self, Act32, Act256, ActFloat, ActRow};
use crate::moe::blocks::*;
use crate::moe::dequant::Dequant;

pub(super) static KERNELS: Table = Table {
    mul: [
        mul::<BlockF32>,
        mul::<BlockF16>,
        mul::<BlockQ4_0>,
        mul::<BlockQ4_1>,
        mul::<BlockQ5_0>,
        mul::<BlockQ5_1>,
        mul::<BlockQ8_0>,
        mul::<BlockQ2K>,
        mul::<BlockQ3K>,
        mul::<BlockQ4K>,
        mul::<BlockQ5K>,
        mul::<BlockQ6K>,
        mul::<BlockIq4Nl>,
        mul::<BlockIq4Xs>,
        mul::<BlockBf16>,
        mul::<BlockMxfp4>,
    ],
    quantise: acts::quantise,
    activate: activation::apply,
    accumulate: activation::accumulate,
};

/// Activation `i` of a row.
pub(super) fn value(row: ActRow<'_>, i: usize) -> f64 {
    let (block, i) = (i / 256, i % 256);
    match row.format().fold() {
        Fold::Float => f64::from(row.blocks::<ActFloat>()[block].x[i]),
        Fold::SuperOffset { .. } | Fold::SuperMin { .. } => {
            let block = &row.blocks::<Act256>()[block];
            f64::from(block.q[i]) * f64::from(block.d)
        }
        Fold::BlockOffset { .. } | Fold::BlockMin => {
            let block = &row.blocks::<Act32>()[block];
            f64::from(block.q[i]) * f64::from(block.d[i / 32])
        }
    }
}

fn mul<B: Dequant>(args: &mut Mul<'_>) {
    let per_block = B::TYPE.block_weights();
    for r in 0..args.rows.len() {
        for (c, column) in args.columns.iter().enumerate() {
            let mut sum = 0.0;
            let mut weights = [0.0; 256];
            for (b, block) in args.rows.row::<B>(r).iter().enumerate() {
                block.dequant(&mut weights[..per_block]);
                for (i, w) in weights[..per_block].iter().enumerate() {
                    sum += f64::from(*w) * value(*column, b * per_block + i);
                }
            }
            args.out[c * args.stride + r] = sum as f32;
        }
    }
}
