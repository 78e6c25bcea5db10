//! Arm `fused`. Forward is one launch in which a cube has a row, as in `layer_norm`, and leaves the row's sum; and one cube
//! that counts the mask and adds up the rows. Both tensors are read once, and of them the masked rows alone.
//!
//! Backward is one launch in which some units share a row, see [`rows`]: it reads the masked rows again and writes
//! dprediction. Storing signs or differences for it would save one of the reads and cost a write, which is as much.

use cubecl::prelude::*;
use dormouse_reference::Result;
use dormouse_reference::jepa::Inputs;

use super::{Forward, Saved, slope};
use crate::cube;
use crate::device::Device;
use crate::launch::Grid;
use crate::layer_norm::{STATS, normalised, statistics, steps};
use crate::mask;
use crate::rows;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor, Words};

/// The most columns of a unit for which loops are unrolled.
const UNROLLED: u32 = 8;

/// The statistics of the teacher's row and the sum of the distances in it. One cube, one row.
///
/// Mutants: 1 takes the teacher as it is, 2 misses the last column, 3 is null (a renamed local), 9 lets what is no number
/// in a row that is not masked into its sum.
#[cube(launch_unchecked)]
fn rows_kernel(
    prediction: &Floats,
    teacher: &Floats,
    mask: &Words,
    stats: &mut Floats,
    sums: &mut Floats,
    rows: u32,
    width: u32,
    eps: f32,
    #[comptime] kind: u32,
    #[comptime] steps: u32,
    #[comptime] mutant: u32,
) {
    let (n, unit) = (CUBE_POS, UNIT_POS as usize);
    let width = width as usize;
    let unroll = comptime!(steps <= UNROLLED);
    let mut shared = SharedMemory::<f32>::new(comptime!(cube::UNITS as usize));
    let mut centred = Array::<f32>::new(comptime!(steps as usize));
    let inside = n < rows as usize;
    let mut masked = false;
    if inside {
        masked = mask::is_set(mask, n, kind);
    }
    let (shift, rho) = statistics(teacher, &mut centred, &mut shared, n, width, masked, eps, steps, 0u32);
    let mut columns = width;
    if comptime!(mutant == 2) {
        columns = width - 1;
    }
    let mut part = 0.0f32;
    if masked {
        #[unroll(unroll)]
        for step in 0..comptime!(steps as usize) {
            let d = step * comptime!(cube::UNITS as usize) + unit;
            if d < columns {
                let at = n * width + d;
                let mut target = rho * centred[step];
                if comptime!(mutant == 1) {
                    target = teacher.at(at);
                }
                if comptime!(mutant == 3) {
                    let renamed = rho * centred[step];
                    target = renamed;
                }
                part += (prediction.at(at) - target).abs();
            }
        }
    }
    if comptime!(mutant == 9) {
        if inside {
            let other = prediction.at(n * width);
            let is_number = other > -1.0e38f32;
            if !is_number {
                part = other;
            }
        }
    }
    let total = cube::total(part, &mut shared);
    if inside && unit == 0 {
        sums.set(n, total);
        if masked {
            stats.set(n * comptime!(STATS), shift);
            stats.set(n * comptime!(STATS) + 1, rho);
        }
    }
}

/// loss, and one over the number of masked elements. One cube; unit `i` adds every [`cube::UNITS`]-th row from the `i`-th
/// on, and the units are added up. Rows that are not masked have a sum of 0.
///
/// Mutants: 4 counts every position, 5 misses the last row.
#[cube(launch_unchecked)]
fn loss_kernel(
    sums: &Floats,
    mask: &Words,
    loss: &mut Floats,
    share: &mut Floats,
    rows: u32,
    width: u32,
    #[comptime] kind: u32,
    #[comptime] mutant: u32,
) {
    let units = comptime!(cube::UNITS as usize);
    let unit = UNIT_POS as usize;
    let rows = rows as usize;
    let mut shared = SharedMemory::<f32>::new(comptime!(2 * cube::UNITS as usize));
    let mut part = 0.0f32;
    let mut count = 0u32;
    for step in 0..rows.div_ceil(units) {
        let n = step * units + unit;
        if n < rows {
            if comptime!(mutant == 5) {
                if n + 1 < rows {
                    part += sums.at(n);
                }
            } else {
                part += sums.at(n);
            }
            let mut counted = mask::is_set(mask, n, kind);
            if comptime!(mutant == 4) {
                counted = true;
            }
            count += u32::cast_from(counted);
        }
    }
    // The count is exact up to 2^24 positions; beyond them it rounds no more than the share itself.
    let (sum, masked) = cube::totals(part, f32::cast_from(count), &mut shared);
    if unit == 0 {
        let mut one = 0.0f32;
        if masked > 0.0f32 {
            one = 1.0f32 / (masked * f32::cast_from(width));
        }
        share.set(0, one);
        loss.set(0, sum * one);
    }
}

/// dprediction. Some units share a row.
///
/// Mutants: 6 flips the sign, 7 drops dloss, 8 gives the kink the slope of its right side.
#[cube(launch_unchecked)]
fn backward_kernel(
    prediction: &Floats,
    teacher: &Floats,
    mask: &Words,
    stats: &Floats,
    share: &Floats,
    dloss: &Floats,
    dprediction: &mut Floats,
    rows: u32,
    width: u32,
    #[comptime] kind: u32,
    #[comptime] mutant: u32,
) {
    let (n, lane) = (rows::row(), rows::lane());
    let width = width as usize;
    let lanes = comptime!(rows::LANES as usize);
    if n < rows as usize {
        let masked = mask::is_set(mask, n, kind);
        let mut size = share.at(0);
        if comptime!(mutant != 7) {
            size *= dloss.at(0);
        }
        if comptime!(mutant == 6) {
            size = -size;
        }
        for step in 0..width.div_ceil(lanes) {
            let d = step * lanes + lane;
            if d < width {
                let at = n * width + d;
                let mut value = 0.0f32;
                if masked {
                    let difference = prediction.at(at) - normalised(teacher, stats, n, d, width);
                    value = slope(difference, size);
                    if comptime!(mutant == 8) {
                        if difference == 0.0f32 {
                            value = size;
                        }
                    }
                }
                dprediction.set(at, value);
            }
        }
    }
}

/// loss and what backward needs.
pub(super) fn forward<R: Engine>(b: &Device<R>, call: &Forward<'_>) -> Result<()> {
    let Forward { inputs: &Inputs { prediction, teacher, mask }, loss, stats, share, rows, width, eps } = *call;
    let (n, d, kind) = (rows as u32, width as u32, mask::kind(mask));
    let mutant = b.mutant(super::STEM);
    let sums = b.float_scratch(&[rows])?;
    let uses = [prediction, teacher, mask, stats, &sums];
    // As if every row were masked: the host does not know.
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    b.launch("jepa::forward", Grid::cubes(rows, cube::UNITS), bytes, &uses, |client, count, dim| {
        let [prediction, teacher, stats, sums] = [prediction, teacher, stats, &sums].map(|t| b.floats(t));
        let (mask, steps) = (b.words(mask), steps(width));
        // SAFETY: shapes were checked by the caller, `sums` has one element a row; cubes past the rows and units past the
        // columns touch nothing.
        unsafe {
            rows_kernel::launch_unchecked::<R>(
                client, count, dim, prediction, teacher, mask, stats, sums, n, d, eps, kind, steps, mutant,
            )
        }
    })?;
    let uses = [&sums, mask, loss, share];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    b.launch("jepa::loss", Grid::cubes(1, cube::UNITS), bytes, &uses, |client, count, dim| {
        let ([sums, loss, share], mask) = ([&sums, loss, share].map(|t| b.floats(t)), b.words(mask));
        // SAFETY: `sums` and the mask have one element a row.
        unsafe { loss_kernel::launch_unchecked::<R>(client, count, dim, sums, mask, loss, share, n, d, kind, mutant) }
    })
}

/// dprediction.
pub(super) fn backward<R: Engine>(b: &Device<R>, saved: &Saved, dloss: &Tensor, out: &Tensor) -> Result<()> {
    let Saved { prediction, teacher, mask, stats, share, .. } = saved;
    let mutant = b.mutant(super::STEM);
    let (rows, width) = (mask.len(), teacher.shape()[teacher.shape().len() - 1]);
    let uses = [prediction, teacher, mask, stats, share, dloss, out];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    b.launch("jepa::backward", rows::cubes(rows), bytes, &uses, |client, count, dim| {
        let (n, d, words, kind) = (rows as u32, width as u32, b.words(mask), mask::kind(mask));
        let [prediction, teacher, stats, share, dloss, out] =
            [prediction, teacher, stats, share, dloss, out].map(|t| b.floats(t));
        // SAFETY: shapes were checked by forward; units past the rows and columns touch nothing.
        unsafe {
            backward_kernel::launch_unchecked::<R>(
                client, count, dim, prediction, teacher, words, stats, share, dloss, out, n, d, kind, mutant,
            )
        }
    })
}
