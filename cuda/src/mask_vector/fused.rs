//! Arm `fused`. Forward is one launch in which some units share a row, see [`rows`]: of a masked row x is not read, so it
//! moves y once and the rest of x. Backward is one launch that reads dy once and writes dx, and leaves the sums of a block
//! of rows for the vector; and one that adds up the blocks.

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::{Backward, Forward};
use crate::device::Device;
use crate::launch::Grid;
use crate::mask;
use crate::rows;
use crate::runtime::Engine;
use crate::sum;
use crate::tensor::{Floats, Words};

/// Units of a cube of the backward pass, one a column.
const UNITS: u32 = 256;

/// The most blocks of rows: what is left for the launch that adds them up.
const BLOCKS: usize = 256;

/// y. Some units share a row.
///
/// Mutants: 1 takes the mask for its opposite, 2 takes the mask of the next row for the last column, 3 is null (a renamed
/// local), 7 lets what is no number in a masked row through.
#[cube(launch_unchecked)]
fn forward_kernel(
    x: &Floats,
    mask: &Words,
    vector: &Floats,
    y: &mut Floats,
    rows: u32,
    width: u32,
    #[comptime] kind: u32,
    #[comptime] mutant: u32,
) {
    let (n, lane) = (rows::row(), rows::lane());
    let (rows, width) = (rows as usize, width as usize);
    let lanes = comptime!(rows::LANES as usize);
    if n < rows {
        let mut masked = mask::is_set(mask, n, kind);
        if comptime!(mutant == 1) {
            masked = !masked;
        }
        for step in 0..width.div_ceil(lanes) {
            let d = step * lanes + lane;
            if d < width {
                let at = n * width + d;
                let mut here = masked;
                if comptime!(mutant == 2) {
                    if d + 1 == width {
                        here = mask::is_set(mask, (n + 1) % rows, kind);
                    }
                }
                if here {
                    let mut value = vector.at(d);
                    if comptime!(mutant == 3) {
                        let renamed = vector.at(d);
                        value = renamed;
                    }
                    if comptime!(mutant == 7) {
                        let other = x.at(at);
                        let is_number = other > -1.0e38f32;
                        if !is_number {
                            value = other;
                        }
                    }
                    y.set(at, value);
                } else {
                    y.set(at, x.at(at));
                }
            }
        }
    }
}

/// dx of a block of `chunk` rows and one column a unit, and the column's sum of dy over the masked ones. A cube has a block
/// of rows and as many columns as units.
///
/// Mutants: 4 hands on the gradient of masked rows, 5 sums every row, 6 misses the last row of a block in the sum.
#[cube(launch_unchecked)]
fn backward_kernel(
    mask: &Words,
    dy: &Floats,
    dx: &mut Floats,
    partial: &mut Floats,
    rows: u32,
    width: u32,
    chunk: u32,
    #[comptime] kind: u32,
    #[comptime] mutant: u32,
) {
    let (rows, width, chunk) = (rows as usize, width as usize, chunk as usize);
    let units = comptime!(UNITS as usize);
    let across = width.div_ceil(units);
    let block = CUBE_POS / across;
    let d = CUBE_POS % across * units + UNIT_POS as usize;
    let first = block * chunk;
    if first < rows && d < width {
        let mut last = first + chunk;
        if last > rows {
            last = rows;
        }
        let mut total = 0.0f32;
        for n in first..last {
            let g = dy.at(n * width + d);
            let masked = mask::is_set(mask, n, kind);
            let mut counted = masked;
            if comptime!(mutant == 5) {
                counted = true;
            }
            if comptime!(mutant == 6) {
                counted = masked && n + 1 < last;
            }
            if counted {
                total += g;
            }
            let mut value = g;
            if comptime!(mutant != 4) {
                if masked {
                    value = 0.0f32;
                }
            }
            dx.set(n * width + d, value);
        }
        partial.set(block * width + d, total);
    }
}

/// Chooses every row.
pub(super) fn forward<R: Engine>(b: &Device<R>, call: &Forward<'_>) -> Result<()> {
    let Forward { x, mask, vector, y, rows, width } = *call;
    let bytes = 2 * x.bytes() + mask.bytes() + vector.bytes();
    let mutant = b.mutant(super::STEM);
    b.launch("mask_vector::forward", rows::cubes(rows), bytes, &[x, mask, vector, y], |client, count, dim| {
        let (n, d, kind) = (rows as u32, width as u32, mask::kind(mask));
        let ([x, vector, y], mask) = ([x, vector, y].map(|t| b.floats(t)), b.words(mask));
        // SAFETY: shapes were checked by the caller; units past the rows and columns touch nothing.
        unsafe { forward_kernel::launch_unchecked::<R>(client, count, dim, x, mask, vector, y, n, d, kind, mutant) }
    })
}

/// dx; the gradient of the vector is added to what `call` names.
pub(super) fn backward<R: Engine>(b: &Device<R>, call: &Backward<'_>) -> Result<()> {
    let Backward { mask, dy, dx, dvector, rows, width } = *call;
    let chunk = rows.div_ceil(BLOCKS).max(1);
    let blocks = rows.div_ceil(chunk);
    let partial = b.float_scratch(&[blocks, width])?;
    let bytes = 2 * dy.bytes() + mask.bytes() + partial.bytes();
    let grid = Grid::cubes(blocks * width.div_ceil(UNITS as usize), UNITS);
    let mutant = b.mutant(super::STEM);
    b.launch("mask_vector::backward", grid, bytes, &[mask, dy, dx, &partial], |client, count, dim| {
        let (n, d, c, kind) = (rows as u32, width as u32, chunk as u32, mask::kind(mask));
        let ([dy, dx, partial], mask) = ([dy, dx, &partial].map(|t| b.floats(t)), b.words(mask));
        // SAFETY: shapes were checked by the caller, `partial` has one row a block; units past them touch nothing.
        unsafe {
            backward_kernel::launch_unchecked::<R>(client, count, dim, mask, dy, dx, partial, n, d, c, kind, mutant)
        }
    })?;
    sum::add_partials(b, &partial, blocks, width, dvector)
}
