//! Arm `fused`: a cube has a row at a time, and each of its units some columns of it, in registers.
//!
//! Forward is one launch: it reads x once and writes y. Backward is one launch that reads x, dy and `plus` once, writes dx,
//! and leaves the sums of a block of rows for gain and bias; and one more, which adds up the blocks of both.
//! That is the least there is to move: 2 and 3 (with `plus` 4) tensors the size of x.
//!
//! A unit's columns are registers as long as the loops over them are unrolled, which they are up to [`UNROLLED`] columns,
//! 2048 a row. Wider rows spill, and are right all the same.

use cubecl::prelude::*;
use dormouse_reference::{Result, Tensors};

use super::{Backward, Forward, STATS, Saved};
use crate::cube;
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::sum;
use crate::tensor::Floats;

/// The most blocks: what is left for the launches that add them up.
const BLOCKS: usize = 512;

/// The most columns of a unit for which loops are unrolled.
const UNROLLED: u32 = 8;

/// The columns that each unit has of a row.
pub(crate) fn steps(width: usize) -> u32 {
    width.div_ceil(cube::UNITS as usize) as u32
}

/// Loads row `n` of `x` less its first element into `centred` and takes the mean off as well: gives that mean and rho. All
/// units of a cube share the row and all of them must call it; those that are not `here` load nothing. Columns past the
/// row are 0 less the mean.
///
/// Mutants: 1 drops eps, 2 drops the mean, 3 misses the last column in the variance, 4 is null (a renamed local).
#[cube]
pub(crate) fn statistics(
    x: &Floats,
    centred: &mut Array<f32>,
    shared: &mut SharedMemory<f32>,
    n: usize,
    width: usize,
    here: bool,
    eps: f32,
    #[comptime] steps: u32,
    #[comptime] mutant: u32,
) -> (f32, f32) {
    let unit = UNIT_POS as usize;
    let units = comptime!(cube::UNITS as usize);
    let unroll = comptime!(steps <= UNROLLED);
    let size = f32::cast_from(width as u32);
    let mut first = 0.0f32;
    if here {
        first = x.at(n * width);
    }
    let mut sum = 0.0f32;
    #[unroll(unroll)]
    for step in 0..comptime!(steps as usize) {
        let d = step * units + unit;
        let mut value = 0.0f32;
        if here && d < width {
            value = x.at(n * width + d) - first;
        }
        centred[step] = value;
        sum += value;
    }
    let mut shift = cube::total(sum, shared) / size;
    if comptime!(mutant == 2) {
        shift = 0.0f32 - first;
    }
    if comptime!(mutant == 4) {
        let renamed = shift;
        shift = renamed;
    }
    let mut columns = width;
    if comptime!(mutant == 3) {
        columns = width - 1;
    }
    let mut square = 0.0f32;
    #[unroll(unroll)]
    for step in 0..comptime!(steps as usize) {
        let value = centred[step] - shift;
        centred[step] = value;
        if step * units + unit < columns {
            square += value * value;
        }
    }
    let variance = cube::total(square, shared) / size;
    let mut guard = eps;
    if comptime!(mutant == 1) {
        guard = 0.0f32;
    }
    (shift, 1.0f32 / (variance + guard).sqrt())
}

/// Statistics and y of one row. One cube, one row.
#[cube(launch_unchecked)]
fn forward_kernel(
    x: &Floats,
    gain: &Floats,
    bias: &Floats,
    y: &mut Floats,
    stats: &mut Floats,
    rows: u32,
    width: u32,
    eps: f32,
    #[comptime] steps: u32,
    #[comptime] affine: bool,
    #[comptime] mutant: u32,
) {
    let (n, unit) = (CUBE_POS, UNIT_POS as usize);
    let width = width as usize;
    let unroll = comptime!(steps <= UNROLLED);
    let mut shared = SharedMemory::<f32>::new(comptime!(cube::UNITS as usize));
    let mut centred = Array::<f32>::new(comptime!(steps as usize));
    let here = n < rows as usize;
    let (shift, rho) = statistics(x, &mut centred, &mut shared, n, width, here, eps, steps, mutant);
    if here {
        if unit == 0 {
            stats.set(n * comptime!(STATS), shift);
            stats.set(n * comptime!(STATS) + 1, rho);
        }
        #[unroll(unroll)]
        for step in 0..comptime!(steps as usize) {
            let d = step * comptime!(cube::UNITS as usize) + unit;
            if d < width {
                let mut value = rho * centred[step];
                if affine {
                    value = value * gain.at(d) + bias.at(d);
                }
                y.set(n * width + d, value);
            }
        }
    }
}

/// dx of a block of `turns` rows, and in `partial` (`[2, blocks, D]`) the block's sums of dy n and of dy. One cube, one
/// block, a row at a time.
///
/// Mutants: 5 drops the gain, 6 drops the mean of h, 7 drops its part along n, 8 drops `plus`, 9 misses the last row of a
/// block in the sums, 10 sums h for the bias.
#[cube(launch_unchecked)]
fn backward_kernel(
    x: &Floats,
    gain: &Floats,
    stats: &Floats,
    dy: &Floats,
    plus: &Floats,
    dx: &mut Floats,
    partial: &mut Floats,
    rows: u32,
    width: u32,
    turns: u32,
    blocks: u32,
    #[comptime] steps: u32,
    #[comptime] affine: bool,
    #[comptime] has_plus: bool,
    #[comptime] mutant: u32,
) {
    let (rows, width, turns) = (rows as usize, width as usize, turns as usize);
    let unit = UNIT_POS as usize;
    let units = comptime!(cube::UNITS as usize);
    let unroll = comptime!(steps <= UNROLLED);
    let size = f32::cast_from(width as u32);
    let mut shared = SharedMemory::<f32>::new(comptime!(2 * cube::UNITS as usize));
    // n and h of the row at hand, and the sums of dy n and dy over the rows so far.
    let mut ns = Array::<f32>::new(comptime!(steps as usize));
    let mut hs = Array::<f32>::new(comptime!(steps as usize));
    let mut for_gain = Array::<f32>::new(comptime!(steps as usize));
    let mut for_bias = Array::<f32>::new(comptime!(steps as usize));
    #[unroll(unroll)]
    for step in 0..comptime!(steps as usize) {
        for_gain[step] = 0.0f32;
        for_bias[step] = 0.0f32;
    }
    let begin = CUBE_POS * turns;
    for turn in 0..turns {
        let row = begin + turn;
        let here = row < rows;
        let mut first = 0.0f32;
        let mut shift = 0.0f32;
        let mut rho = 0.0f32;
        if here {
            first = x.at(row * width);
            shift = stats.at(row * comptime!(STATS));
            rho = stats.at(row * comptime!(STATS) + 1);
        }
        let mut sum = 0.0f32;
        let mut product = 0.0f32;
        #[unroll(unroll)]
        for step in 0..comptime!(steps as usize) {
            let d = step * units + unit;
            let mut n = 0.0f32;
            let mut h = 0.0f32;
            if here && d < width {
                n = rho * ((x.at(row * width + d) - first) - shift);
                let g = dy.at(row * width + d);
                h = g;
                if comptime!(affine && mutant != 5) {
                    h *= gain.at(d);
                }
                let mut counted = true;
                if comptime!(mutant == 9) {
                    counted = turn + 1 < turns;
                }
                if counted {
                    for_gain[step] = for_gain[step] + g * n;
                    if comptime!(mutant == 10) {
                        for_bias[step] = for_bias[step] + h;
                    } else {
                        for_bias[step] = for_bias[step] + g;
                    }
                }
            }
            ns[step] = n;
            hs[step] = h;
            sum += h;
            product += h * n;
        }
        let (sum, product) = cube::totals(sum, product, &mut shared);
        let mut mean = sum / size;
        let mut along = product / size;
        if comptime!(mutant == 6) {
            mean = 0.0f32;
        }
        if comptime!(mutant == 7) {
            along = 0.0f32;
        }
        #[unroll(unroll)]
        for step in 0..comptime!(steps as usize) {
            let d = step * units + unit;
            if here && d < width {
                let mut value = rho * (hs[step] - mean - ns[step] * along);
                if comptime!(has_plus && mutant != 8) {
                    value += plus.at(row * width + d);
                }
                dx.set(row * width + d, value);
            }
        }
    }
    if affine {
        #[unroll(unroll)]
        for step in 0..comptime!(steps as usize) {
            let d = step * units + unit;
            if begin < rows && d < width {
                partial.set(CUBE_POS * width + d, for_gain[step]);
                partial.set((blocks as usize + CUBE_POS) * width + d, for_bias[step]);
            }
        }
    }
}

/// y and what backward needs.
pub(super) fn forward<R: Engine>(b: &Device<R>, call: &Forward<'_>) -> Result<()> {
    let Forward { x, affine, y, stats, rows, width, eps } = *call;
    // A kernel has all its arguments in every variant; without gain and bias nothing reads them.
    let [gain, bias] = affine.unwrap_or([x, x]);
    let uses = [x, gain, bias, y, stats];
    let bytes = 2 * x.bytes() + stats.bytes() + affine.map_or(0, |[gain, bias]| gain.bytes() + bias.bytes());
    let mutant = b.mutant(super::STEM);
    b.launch("layer_norm::forward", Grid::cubes(rows, cube::UNITS), bytes, &uses, |client, count, dim| {
        let [x, gain, bias, y, stats] = uses.map(|t| b.floats(t));
        let (n, d, steps, has) = (rows as u32, width as u32, steps(width), affine.is_some());
        // SAFETY: shapes were checked by the caller; cubes past the rows and units past the columns touch nothing.
        unsafe {
            forward_kernel::launch_unchecked::<R>(
                client, count, dim, x, gain, bias, y, stats, n, d, eps, steps, has, mutant,
            )
        }
    })
}

/// dx; the gradients of gain and bias are added to what `call` names.
pub(super) fn backward<R: Engine>(b: &Device<R>, saved: &Saved, call: &Backward<'_>) -> Result<()> {
    let Saved { x, gain, stats, .. } = saved;
    let Backward { dy, plus, dx, into, rows, width } = *call;
    let turns = rows.div_ceil(BLOCKS).max(1);
    let blocks = rows.div_ceil(turns);
    let partial = b.float_scratch(&[2, if into.is_some() { blocks } else { 1 }, width])?;
    let uses = [x, gain.as_ref().unwrap_or(x), stats, dy, plus.unwrap_or(dy), dx, &partial];
    let of_params = gain.as_ref().map_or(0, |gain| gain.bytes() + partial.bytes());
    let bytes = 3 * x.bytes() + stats.bytes() + plus.map_or(0, |plus| plus.bytes()) + of_params;
    let mutant = b.mutant(super::STEM);
    b.launch("layer_norm::backward", Grid::cubes(blocks, cube::UNITS), bytes, &uses, |client, count, dim| {
        let [x, gain_, stats, dy, plus_, dx, partial] = uses.map(|t| b.floats(t));
        let (n, d, turns, blocks) = (rows as u32, width as u32, turns as u32, blocks as u32);
        let (steps, affine, has_plus) = (steps(width), gain.is_some(), plus.is_some());
        // SAFETY: shapes were checked by the caller; `partial` has two rows a block where it is written; cubes past the
        // rows and units past the columns touch nothing.
        unsafe {
            backward_kernel::launch_unchecked::<R>(
                client, count, dim, x, gain_, stats, dy, plus_, dx, partial, n, d, turns, blocks, steps, affine,
                has_plus, mutant,
            )
        }
    })?;
    let half = |n: usize| b.view(&partial, n * blocks * width, &[blocks, width]);
    match into {
        Some([gain, bias]) => sum::add_two_partials(b, [(&half(0)?, gain), (&half(1)?, bias)], blocks, width),
        None => Ok(()),
    }
}
