//! Arm `fused`: forward is one launch for both gates. Backward is one for dz, dy and the sums of both parameters over a
//! block of rows, and one per parameter that adds up the blocks.
//!
//! A cube has a block of rows of one head: [`KEYS`] units side by side read neighbouring keys, and [`LANES`] of these
//! take every `LANES`-th row of the block. So a, the bias and the integer divisions are computed once for many rows.

use cubecl::prelude::*;
use dormouse_reference::Result;
use dormouse_reference::decay_gate::{Grads, Outputs};

use super::{Backward, Saved, Sizes};
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::sigmoid::{sigmoids, softplus};
use crate::sum;
use crate::tensor::{Floats, Tensor};

/// Units that read neighbouring keys.
const KEYS: u32 = 64;

/// Units that share a key and take turns in the rows of a block.
const LANES: u32 = 4;

/// Units of a cube.
const UNITS: u32 = KEYS * LANES;

/// The fewest rows of a block.
const BLOCK: usize = 64;

/// The most blocks: what is left for the launch that adds them up.
const BLOCKS: usize = 128;

/// Rows of a block. Depends on the number of rows only, so the order of the sums does too.
fn block_of(rows: usize) -> usize {
    rows.div_ceil(BLOCKS).max(BLOCK)
}

/// g and beta of a block of rows of one head.
///
/// Mutants: 1 drops the bias, 2 takes a_log for a, 3 drops the scale of beta, 4 is null (a renamed local).
#[cube(launch_unchecked)]
fn forward_kernel(
    z: &Floats,
    y: &Floats,
    a_log: &Floats,
    dt_bias: &Floats,
    g: &mut Floats,
    beta: &mut Floats,
    rows: u32,
    heads: u32,
    keys: u32,
    block: u32,
    lower_bound: f32,
    beta_scale: f32,
    #[comptime] bounded: bool,
    #[comptime] mutant: u32,
) {
    let (rows, heads, keys, block) = (rows as usize, heads as usize, keys as usize, block as usize);
    let across = comptime!(KEYS as usize);
    let lanes = comptime!(LANES as usize);
    let unit = UNIT_POS as usize;
    let (key, lane) = (unit % across, unit / across);
    let head = CUBE_POS % heads;
    let first = CUBE_POS / heads * block;
    // A cube past the last block has no rows.
    let mut count = 0usize;
    if first < rows {
        count = rows - first;
        if count > block {
            count = block;
        }
    }
    let mut a = a_log.at(head).exp();
    if comptime!(mutant == 2) {
        a = a_log.at(head);
    }
    if comptime!(mutant == 4) {
        let renamed = a_log.at(head).exp();
        a = renamed;
    }
    for step in 0..keys.div_ceil(across) {
        let k = step * across + key;
        if k < keys {
            let mut bias = dt_bias.at(head * keys + k);
            if comptime!(mutant == 1) {
                bias = 0.0f32;
            }
            for turn in 0..count.div_ceil(lanes) {
                let r = turn * lanes + lane;
                if r < count {
                    let at = ((first + r) * heads + head) * keys + k;
                    let x = z.at(at) + bias;
                    if bounded {
                        let (open, _closed) = sigmoids(a * x);
                        g.set(at, lower_bound * open);
                    } else {
                        g.set(at, -(a * softplus(x)));
                    }
                }
            }
        }
    }
    let mut scale = beta_scale;
    if comptime!(mutant == 3) {
        scale = 1.0f32;
    }
    for turn in 0..count.div_ceil(across * lanes) {
        let r = turn * across * lanes + unit;
        if r < count {
            let at = (first + r) * heads + head;
            let (open, _closed) = sigmoids(y.at(at));
            beta.set(at, scale * open);
        }
    }
}

/// dz and dy of a block of rows of one head, and the block's sums of ddt_bias (one a key) and da_log.
///
/// Mutants: 5 takes one tail of the sigmoid for both and both for one, 6 misses the last key
/// in da_log, 7 misses the block's last row in ddt_bias, 8 drops the scale of beta.
#[cube(launch_unchecked)]
fn backward_kernel(
    z: &Floats,
    y: &Floats,
    a_log: &Floats,
    dt_bias: &Floats,
    dg: &Floats,
    dbeta: &Floats,
    dz: &mut Floats,
    dy: &mut Floats,
    for_a: &mut Floats,
    for_bias: &mut Floats,
    rows: u32,
    heads: u32,
    keys: u32,
    block: u32,
    lower_bound: f32,
    beta_scale: f32,
    #[comptime] bounded: bool,
    #[comptime] mutant: u32,
) {
    let (rows, heads, keys, block) = (rows as usize, heads as usize, keys as usize, block as usize);
    let across = comptime!(KEYS as usize);
    let lanes = comptime!(LANES as usize);
    let unit = UNIT_POS as usize;
    let (key, lane) = (unit % across, unit / across);
    let head = CUBE_POS % heads;
    let first = CUBE_POS / heads * block;
    let mut shared = SharedMemory::<f32>::new(comptime!(UNITS as usize));
    // A cube past the last block has no rows.
    let mut count = 0usize;
    if first < rows {
        count = rows - first;
        if count > block {
            count = block;
        }
    }
    let a = a_log.at(head).exp();
    let mut sum_a = 0.0f32;
    for step in 0..keys.div_ceil(across) {
        let k = step * across + key;
        let mut sum_bias = 0.0f32;
        if k < keys {
            let bias = dt_bias.at(head * keys + k);
            for turn in 0..count.div_ceil(lanes) {
                let r = turn * lanes + lane;
                if r < count {
                    let at = ((first + r) * heads + head) * keys + k;
                    let x = z.at(at) + bias;
                    let above = dg.at(at);
                    let mut argument = x;
                    if bounded {
                        argument = a * x;
                    }
                    let (open, closed) = sigmoids(argument);
                    let mut slope = -(a * open);
                    if bounded {
                        slope = lower_bound * a * open;
                    }
                    if comptime!(bounded != (mutant == 5)) {
                        slope *= closed;
                    }
                    let value = above * slope;
                    let mut term = value * x;
                    if comptime!(!bounded) {
                        term = -(above * a * softplus(x));
                    }
                    dz.set(at, value);
                    if comptime!(mutant == 7) {
                        if r + 1 < count {
                            sum_bias += value;
                        }
                    } else {
                        sum_bias += value;
                    }
                    if comptime!(mutant == 6) {
                        if k + 1 < keys {
                            sum_a += term;
                        }
                    } else {
                        sum_a += term;
                    }
                }
            }
        }
        shared[unit] = sum_bias;
        sync_cube();
        if lane == 0 && k < keys && count > 0 {
            let mut total = 0.0f32;
            for other in 0..lanes {
                total += shared[other * across + key];
            }
            for_bias.set((CUBE_POS / heads * heads + head) * keys + k, total);
        }
        // The next keys write the same memory.
        sync_cube();
    }
    shared[unit] = sum_a;
    sync_cube();
    #[unroll]
    for level in 0..8u32 {
        let half = comptime!(128usize >> level as usize);
        if unit < half {
            shared[unit] = shared[unit] + shared[unit + half];
        }
        sync_cube();
    }
    if unit == 0 && count > 0 {
        for_a.set(CUBE_POS, shared[0]);
    }
    let mut scale = beta_scale;
    if comptime!(mutant == 8) {
        scale = 1.0f32;
    }
    for turn in 0..count.div_ceil(across * lanes) {
        let r = turn * across * lanes + unit;
        if r < count {
            let at = (first + r) * heads + head;
            let (open, closed) = sigmoids(y.at(at));
            dy.set(at, dbeta.at(at) * scale * open * closed);
        }
    }
}

/// g and beta.
pub(super) fn forward<R: Engine>(b: &Device<R>, saved: &Saved, sizes: Sizes) -> Result<Outputs<Tensor>> {
    let Saved { z, y, a_log, dt_bias, .. } = saved;
    let Sizes { rows, heads, keys, bounded, lower_bound, beta_scale } = sizes;
    let (g, beta) = (b.float_scratch(z.shape())?, b.float_scratch(y.shape())?);
    let uses = [z, y, a_log, dt_bias, &g, &beta];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    let block = block_of(rows);
    let grid = Grid::cubes(rows.div_ceil(block) * heads, UNITS);
    let mutant = b.mutant(super::STEM);
    b.launch("decay_gate::forward", grid, bytes, &uses, |client, count, dim| {
        let [z, y, a_log, dt_bias, g, beta] = uses.map(|t| b.floats(t));
        let (n, h, k, block) = (rows as u32, heads as u32, keys as u32, block as u32);
        // SAFETY: shapes were checked by the caller; units past the rows and keys touch nothing.
        unsafe {
            forward_kernel::launch_unchecked::<R>(
                client,
                count,
                dim,
                z,
                y,
                a_log,
                dt_bias,
                g,
                beta,
                n,
                h,
                k,
                block,
                lower_bound,
                beta_scale,
                bounded,
                mutant,
            )
        }
    })?;
    Ok(Outputs { g, beta })
}

/// dz and dy; the gradients of the parameters are added to what `call` names.
pub(super) fn backward<R: Engine>(b: &Device<R>, saved: &Saved, call: &Backward<'_>) -> Result<Grads<Tensor>> {
    let Saved { z, y, a_log, dt_bias, .. } = saved;
    let Backward { dg, dbeta, da_log, ddt_bias, sizes } = *call;
    let Sizes { rows, heads, keys, bounded, lower_bound, beta_scale } = sizes;
    let block = block_of(rows);
    let blocks = rows.div_ceil(block);
    let (dz, dy) = (b.float_scratch(z.shape())?, b.float_scratch(y.shape())?);
    let for_a = b.float_scratch(&[blocks, heads])?;
    let for_bias = b.float_scratch(&[blocks, heads * keys])?;
    let uses = [z, y, a_log, dt_bias, dg, dbeta, &dz, &dy, &for_a, &for_bias];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    let grid = Grid::cubes(blocks * heads, UNITS);
    let mutant = b.mutant(super::STEM);
    b.launch("decay_gate::backward", grid, bytes, &uses, |client, count, dim| {
        let [z, y, a_log, dt_bias, dg, dbeta, dz, dy, for_a, for_bias] = uses.map(|t| b.floats(t));
        let (n, h, k, block) = (rows as u32, heads as u32, keys as u32, block as u32);
        // SAFETY: shapes were checked by the caller; the sums have one row a block; units past the rows and keys touch
        // nothing.
        unsafe {
            backward_kernel::launch_unchecked::<R>(
                client,
                count,
                dim,
                z,
                y,
                a_log,
                dt_bias,
                dg,
                dbeta,
                dz,
                dy,
                for_a,
                for_bias,
                n,
                h,
                k,
                block,
                lower_bound,
                beta_scale,
                bounded,
                mutant,
            )
        }
    })?;
    sum::add_partials(b, &for_a, blocks, heads, da_log)?;
    sum::add_partials(b, &for_bias, blocks, heads * keys, ddt_bias)?;
    Ok(Grads { dz, dy })
}
