//! Arm `fused`: the units of a row share it, see [`rows`]. Forward is one launch. Backward is one that reads everything
//! once, for do, dzeta and the sums of the gain's gradient over a block of rows, and one that adds up the blocks.
//!
//! In backward a cube walks its block [`LANES`] rows at a time. A unit keeps its columns of the row at hand, and of the
//! gain's gradient, in an array of its own: registers as long as the loops over it are unrolled, which they are up to
//! [`UNROLLED`] columns a unit, 256 a row. Wider rows spill, and are right all the same.

use cubecl::prelude::*;
use dormouse_reference::Result;
use dormouse_reference::gated_rms_norm::Grads;

use super::{Backward, Forward, Saved};
use crate::device::Device;
use crate::launch::Grid;
use crate::rows;
use crate::runtime::Engine;
use crate::sigmoid::sigmoids;
use crate::sum;
use crate::tensor::{Floats, Tensor};

/// Rows that a cube of the backward pass works on at once.
const LANES: u32 = 16;

/// Units of a cube of the backward pass.
const UNITS: u32 = LANES * rows::LANES;

/// The most blocks: what is left for the launch that adds them up.
const BLOCKS: usize = 512;

/// The most columns of a unit for which loops are unrolled.
const UNROLLED: u32 = 8;

/// rho and y. Some units share a row.
///
/// Mutants: 1 drops eps, 2 takes the sum for the mean, 3 drops the gain, 4 is null (a renamed local).
#[cube(launch_unchecked)]
fn forward_kernel(
    o: &Floats,
    zeta: &Floats,
    gain: &Floats,
    y: &mut Floats,
    rho: &mut Floats,
    rows: u32,
    width: u32,
    eps: f32,
    #[comptime] mutant: u32,
) {
    let (n, lane) = (rows::row(), rows::lane());
    let width = width as usize;
    let lanes = comptime!(rows::LANES as usize);
    let mut shared = SharedMemory::<f32>::new(comptime!(rows::UNITS as usize));
    let here = n < rows as usize;
    let mut square = 0.0f32;
    if here {
        for step in 0..width.div_ceil(lanes) {
            let v = step * lanes + lane;
            if v < width {
                let value = o.at(n * width + v);
                square += value * value;
            }
        }
    }
    let mut mean = rows::sum(square, &mut shared);
    if comptime!(mutant != 2) {
        mean /= f32::cast_from(width as u32);
    }
    let mut guard = eps;
    if comptime!(mutant == 1) {
        guard = 0.0f32;
    }
    let mut scale = 1.0f32 / (mean + guard).sqrt();
    if comptime!(mutant == 4) {
        let renamed = 1.0f32 / (mean + guard).sqrt();
        scale = renamed;
    }
    if here {
        if lane == 0 {
            rho.set(n, scale);
        }
        for step in 0..width.div_ceil(lanes) {
            let v = step * lanes + lane;
            if v < width {
                let at = n * width + v;
                let (open, _closed) = sigmoids(zeta.at(at));
                let mut value = scale * o.at(at) * open;
                if comptime!(mutant != 3) {
                    value *= gain.at(v);
                }
                y.set(at, value);
            }
        }
    }
}

/// do and dzeta of a block of `LANES * turns` rows, and the block's sums of dn oh. Some units share a row; each has
/// `steps` columns of it.
///
/// Mutants: 5 drops the mean, 6 takes an exponential's slope for the gate's, 7 misses the second row lane in dgain.
#[cube(launch_unchecked)]
fn backward_kernel(
    o: &Floats,
    zeta: &Floats,
    gain: &Floats,
    rho: &Floats,
    dy: &Floats,
    d_o: &mut Floats,
    dzeta: &mut Floats,
    for_gain: &mut Floats,
    rows: u32,
    width: u32,
    turns: u32,
    #[comptime] steps: u32,
    #[comptime] mutant: u32,
) {
    let (rows, width, turns) = (rows as usize, width as usize, turns as usize);
    let steps = comptime!(steps as usize);
    let unroll = comptime!(steps <= UNROLLED as usize);
    let across = comptime!(rows::LANES as usize);
    let lanes = comptime!(LANES as usize);
    let unit = UNIT_POS as usize;
    let (column, lane) = (unit % across, unit / across);
    let mut shared = SharedMemory::<f32>::new(comptime!(UNITS as usize));
    // oh and dh of the row at hand, and the sums of dn oh over the rows so far.
    let mut ohs = Array::<f32>::new(steps);
    let mut dhs = Array::<f32>::new(steps);
    let mut sums = Array::<f32>::new(steps);
    #[unroll(unroll)]
    for step in 0..steps {
        sums[step] = 0.0f32;
    }
    let first = CUBE_POS * lanes * turns;
    for turn in 0..turns {
        let n = first + turn * lanes + lane;
        let here = n < rows;
        let mut scale = 0.0f32;
        if here {
            scale = rho.at(n);
        }
        let mut product = 0.0f32;
        #[unroll(unroll)]
        for step in 0..steps {
            let v = step * across + column;
            let mut oh = 0.0f32;
            let mut dh = 0.0f32;
            if here && v < width {
                let at = n * width + v;
                let (open, closed) = sigmoids(zeta.at(at));
                oh = scale * o.at(at);
                let dn = dy.at(at) * open;
                dh = dn * gain.at(v);
                let mut slope = dh * oh;
                if comptime!(mutant != 6) {
                    slope *= closed;
                }
                dzeta.set(at, slope);
                sums[step] = sums[step] + dn * oh;
                product += oh * dh;
            }
            ohs[step] = oh;
            dhs[step] = dh;
        }
        let mut mean = rows::sum(product, &mut shared) / f32::cast_from(width as u32);
        if comptime!(mutant == 5) {
            mean = 0.0f32;
        }
        #[unroll(unroll)]
        for step in 0..steps {
            let v = step * across + column;
            if here && v < width {
                d_o.set(n * width + v, scale * (dhs[step] - ohs[step] * mean));
            }
        }
    }
    #[unroll(unroll)]
    for step in 0..steps {
        shared[unit] = sums[step];
        sync_cube();
        let v = step * across + column;
        if lane == 0 && v < width && first < rows {
            let mut total = 0.0f32;
            for other in 0..lanes {
                if comptime!(mutant == 7) {
                    if other != 1 {
                        total += shared[other * across + column];
                    }
                } else {
                    total += shared[other * across + column];
                }
            }
            for_gain.set(CUBE_POS * width + v, total);
        }
        // The next columns write the same memory.
        sync_cube();
    }
}

/// y and rho.
pub(super) fn forward<R: Engine>(b: &Device<R>, call: &Forward<'_>) -> Result<(Tensor, Tensor)> {
    let Forward { o, zeta, gain, rows, width, eps } = *call;
    let (y, rho) = (b.float_scratch(o.shape())?, b.float_scratch(&[rows])?);
    let uses = [o, zeta, gain, &y, &rho];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    let mutant = b.mutant(super::STEM);
    b.launch("gated_rms_norm::forward", rows::cubes(rows), bytes, &uses, |client, count, dim| {
        let [o, zeta, gain, y, rho] = uses.map(|t| b.floats(t));
        let (n, v) = (rows as u32, width as u32);
        // SAFETY: shapes were checked by the caller; units past the rows and columns touch nothing.
        unsafe { forward_kernel::launch_unchecked::<R>(client, count, dim, o, zeta, gain, y, rho, n, v, eps, mutant) }
    })?;
    Ok((y, rho))
}

/// do and dzeta; the gradient of the gain is added to what `call` names.
pub(super) fn backward<R: Engine>(b: &Device<R>, saved: &Saved, call: &Backward<'_>) -> Result<Grads<Tensor>> {
    let Saved { o, zeta, gain, rho, .. } = saved;
    let Backward { dy, dgain, rows, width } = *call;
    let lanes = LANES as usize;
    let turns = rows.div_ceil(lanes * BLOCKS).max(1);
    let blocks = rows.div_ceil(lanes * turns);
    let (d_o, dzeta) = (b.float_scratch(o.shape())?, b.float_scratch(zeta.shape())?);
    let for_gain = b.float_scratch(&[blocks, width])?;
    let uses = [o, zeta, gain, rho, dy, &d_o, &dzeta, &for_gain];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    let steps = width.div_ceil(rows::LANES as usize) as u32;
    let mutant = b.mutant(super::STEM);
    b.launch("gated_rms_norm::backward", Grid::cubes(blocks, UNITS), bytes, &uses, |client, count, dim| {
        let [o, zeta, gain, rho, dy, d_o, dzeta, for_gain] = uses.map(|t| b.floats(t));
        let (n, v, turns) = (rows as u32, width as u32, turns as u32);
        // SAFETY: shapes were checked by the caller; `for_gain` has one row a block; units past the rows and columns
        // touch nothing.
        unsafe {
            backward_kernel::launch_unchecked::<R>(
                client, count, dim, o, zeta, gain, rho, dy, d_o, dzeta, for_gain, n, v, turns, steps, mutant,
            )
        }
    })?;
    sum::add_partials(b, &for_gain, blocks, width, dgain)?;
    Ok(Grads { d_o, dzeta })
}
