//! Arm `fused`: the units of a row share it, see [`rows`]. Forward is one launch. Backward is one for dx, one that sums a
//! block of rows for both parameters at once, and one that adds up the blocks.

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::{Backward, Forward, Saved};
use crate::arm::Arm;
use crate::device::Device;
use crate::launch::Grid;
use crate::rows;
use crate::runtime::Engine;
use crate::sum;
use crate::tensor::{Floats, Tensor};

/// c = x + shift, rho and y. Some units share a row.
///
/// Mutants: 1 drops eps, 2 takes the sum for the mean, 3 misses the last column, 4 is null (a renamed local).
#[cube(launch_unchecked)]
fn forward_kernel(
    x: &Floats,
    gain: &Floats,
    shift: &Floats,
    c: &mut Floats,
    y: &mut Floats,
    rho: &mut Floats,
    rows: u32,
    width: u32,
    eps: f32,
    #[comptime] has_shift: bool,
    #[comptime] mutant: u32,
) {
    let (n, lane) = (rows::row(), rows::lane());
    let width = width as usize;
    let at = n * width;
    let mut shared = SharedMemory::<f32>::new(comptime!(rows::UNITS as usize));
    let mut values = Array::<f32>::new(comptime!(rows::AHEAD));
    let mut shifts = Array::<f32>::new(comptime!(rows::AHEAD));
    let here = n < rows as usize;
    let mut square = 0.0f32;
    let mut columns = width;
    if comptime!(mutant == 3) {
        columns = width - 1;
    }
    if here {
        for step in 0..columns.div_ceil(comptime!(rows::TOGETHER)) {
            let first = step * comptime!(rows::TOGETHER) + lane;
            rows::load(x, &mut values, at, first, columns);
            if has_shift {
                rows::load(shift, &mut shifts, 0usize, first, columns);
            }
            #[unroll]
            for i in 0..comptime!(rows::AHEAD) {
                if has_shift {
                    values[i] = values[i] + shifts[i];
                }
                square += values[i] * values[i];
            }
            if has_shift {
                rows::store(c, &values, at, first, columns);
            }
        }
    }
    let total = rows::sum(square, &mut shared);
    let mut mean = total / f32::cast_from(width as u32);
    if comptime!(mutant == 2) {
        mean = total;
    }
    if comptime!(mutant == 4) {
        let renamed = total / f32::cast_from(width as u32);
        mean = renamed;
    }
    let mut guard = eps;
    if comptime!(mutant == 1) {
        guard = 0.0f32;
    }
    let scale = 1.0f32 / (mean + guard).sqrt();
    if here {
        if lane == 0 {
            rho.set(n, scale);
        }
        let mut gains = Array::<f32>::new(comptime!(rows::AHEAD));
        for step in 0..width.div_ceil(comptime!(rows::TOGETHER)) {
            let first = step * comptime!(rows::TOGETHER) + lane;
            rows::load(x, &mut values, at, first, width);
            rows::load(gain, &mut gains, 0usize, first, width);
            if has_shift {
                rows::load(shift, &mut shifts, 0usize, first, width);
            }
            #[unroll]
            for i in 0..comptime!(rows::AHEAD) {
                if has_shift {
                    values[i] = values[i] + shifts[i];
                }
                values[i] = scale * values[i] * gains[i];
            }
            rows::store(y, &values, at, first, width);
        }
    }
}

/// dx, with what arrives at c from elsewhere. Some units share a row.
///
/// Mutants: 5 drops the mean, 6 drops dc.
#[cube(launch_unchecked)]
fn backward_kernel(
    c: &Floats,
    gain: &Floats,
    rho: &Floats,
    dy: &Floats,
    dc: &Floats,
    dx: &mut Floats,
    rows: u32,
    width: u32,
    #[comptime] has_dc: bool,
    #[comptime] mutant: u32,
) {
    let (n, lane) = (rows::row(), rows::lane());
    let width = width as usize;
    let at = n * width;
    let mut shared = SharedMemory::<f32>::new(comptime!(rows::UNITS as usize));
    let mut cs = Array::<f32>::new(comptime!(rows::AHEAD));
    let mut dys = Array::<f32>::new(comptime!(rows::AHEAD));
    let mut gains = Array::<f32>::new(comptime!(rows::AHEAD));
    let here = n < rows as usize;
    let mut scale = 0.0f32;
    let mut product = 0.0f32;
    if here {
        scale = rho.at(n);
        for step in 0..width.div_ceil(comptime!(rows::TOGETHER)) {
            let first = step * comptime!(rows::TOGETHER) + lane;
            rows::load(c, &mut cs, at, first, width);
            rows::load(dy, &mut dys, at, first, width);
            rows::load(gain, &mut gains, 0usize, first, width);
            #[unroll]
            for i in 0..comptime!(rows::AHEAD) {
                product += scale * cs[i] * dys[i] * gains[i];
            }
        }
    }
    let mut mean = rows::sum(product, &mut shared) / f32::cast_from(width as u32);
    if comptime!(mutant == 5) {
        mean = 0.0f32;
    }
    if here {
        let mut arriving = Array::<f32>::new(comptime!(rows::AHEAD));
        for step in 0..width.div_ceil(comptime!(rows::TOGETHER)) {
            let first = step * comptime!(rows::TOGETHER) + lane;
            rows::load(c, &mut cs, at, first, width);
            rows::load(dy, &mut dys, at, first, width);
            rows::load(gain, &mut gains, 0usize, first, width);
            if comptime!(has_dc && mutant != 6) {
                rows::load(dc, &mut arriving, at, first, width);
            }
            #[unroll]
            for i in 0..comptime!(rows::AHEAD) {
                let mut value = scale * (dys[i] * gains[i] - scale * cs[i] * mean);
                if comptime!(has_dc && mutant != 6) {
                    value += arriving[i];
                }
                cs[i] = value;
            }
            rows::store(dx, &cs, at, first, width);
        }
    }
}

/// The sums of dy rho c and of dx over a block of rows in one column. One unit, one block and column.
///
/// Mutants: 7 misses the block's last row.
#[cube(launch_unchecked)]
fn params_kernel(
    c: &Floats,
    rho: &Floats,
    dy: &Floats,
    dx: &Floats,
    gain: &mut Floats,
    shift: &mut Floats,
    rows: u32,
    width: u32,
    #[comptime] has_shift: bool,
    #[comptime] mutant: u32,
) {
    let i = ABSOLUTE_POS;
    let (rows, width) = (rows as usize, width as usize);
    if i < rows.div_ceil(BLOCK) * width {
        let first = i / width * BLOCK;
        let mut last = first + BLOCK;
        if last > rows {
            last = rows;
        }
        if comptime!(mutant == 7) {
            last -= 1;
        }
        let mut for_gain = 0.0f32;
        let mut for_shift = 0.0f32;
        for n in first..last {
            let at = n * width + i % width;
            for_gain += dy.at(at) * rho.at(n) * c.at(at);
            if has_shift {
                for_shift += dx.at(at);
            }
        }
        gain.set(i, for_gain);
        if has_shift {
            shift.set(i, for_shift);
        }
    }
}

/// Rows whose parameter gradients one unit sums: enough units for small batches, few enough partial sums for large ones.
const BLOCK: usize = 32;

/// y, c and what backward needs.
pub(super) fn forward<R: Engine>(b: &Device<R>, call: &Forward<'_>) -> Result<(Tensor, Saved)> {
    let Forward { x, gain, shift, rows, width, eps } = *call;
    let c = if shift.is_some() { b.float_scratch(x.shape())? } else { x.clone() };
    let y = b.float_scratch(x.shape())?;
    let rho = b.float_scratch(&[rows])?;
    // A kernel has all its arguments in every variant; without a shift nothing reads it and nothing writes c.
    let c_out = if shift.is_some() { &c } else { &y };
    let uses = [x, gain, shift.unwrap_or(gain), c_out, &y, &rho];
    let bytes = 2 * x.bytes() + gain.bytes() + rho.bytes() + shift.map_or(0, |shift| x.bytes() + shift.bytes());
    let mutant = b.mutant(super::STEM);
    b.launch("rms_norm::forward", rows::cubes(rows), bytes, &uses, |client, count, dim| {
        let [x, gain, shift_, c, y, rho] = uses.map(|t| b.floats(t));
        let (n, d, has) = (rows as u32, width as u32, shift.is_some());
        // SAFETY: shapes were checked by the caller; units past the rows and columns touch nothing.
        unsafe {
            forward_kernel::launch_unchecked::<R>(
                client, count, dim, x, gain, shift_, c, y, rho, n, d, eps, has, mutant,
            )
        }
    })?;
    let has_shift = shift.is_some();
    Ok((y, Saved { c, gain: gain.clone(), rho, has_shift, arm: Arm::Fused }))
}

/// dx; the gradients of the parameters are added to what `call` names.
pub(super) fn backward<R: Engine>(b: &Device<R>, saved: &Saved, call: &Backward<'_>) -> Result<Tensor> {
    let Saved { c, gain, rho, .. } = saved;
    let Backward { dy, dc, dgain, dshift, rows, width } = *call;
    let (n, d) = (rows as u32, width as u32);
    let mutant = b.mutant(super::STEM);
    let dx = b.float_scratch(c.shape())?;
    let uses = [c, gain, rho, dy, dc.unwrap_or(dy), &dx];
    let bytes = 3 * c.bytes() + gain.bytes() + rho.bytes() + dc.map_or(0, Tensor::bytes);
    b.launch("rms_norm::backward", rows::cubes(rows), bytes, &uses, |client, count, dim| {
        let [c, gain, rho, dy, dc_, dx] = uses.map(|t| b.floats(t));
        let has = dc.is_some();
        // SAFETY: shapes were checked by the caller; units past the rows and columns touch nothing.
        unsafe {
            backward_kernel::launch_unchecked::<R>(client, count, dim, c, gain, rho, dy, dc_, dx, n, d, has, mutant)
        }
    })?;
    let blocks = rows.div_ceil(BLOCK);
    let for_gain = b.float_scratch(&[blocks, width])?;
    let for_shift = b.float_scratch(&[if dshift.is_some() { blocks } else { 1 }, width])?;
    let uses = [c, rho, dy, &dx, &for_gain, &for_shift];
    let bytes = 2 * c.bytes() + rho.bytes() + for_gain.bytes() + dshift.map_or(0, |_| dx.bytes() + for_shift.bytes());
    b.launch("rms_norm::params", Grid::units(blocks * width), bytes, &uses, |client, count, dim| {
        let [c, rho, dy, dx, gain, shift] = uses.map(|t| b.floats(t));
        let has = dshift.is_some();
        // SAFETY: both outputs have one row a block; units past them do nothing.
        unsafe {
            params_kernel::launch_unchecked::<R>(client, count, dim, c, rho, dy, dx, gain, shift, n, d, has, mutant)
        }
    })?;
    match dshift {
        Some(shift) => sum::add_two_partials(b, [(&for_gain, dgain), (&for_shift, shift)], blocks, width)?,
        None => sum::add_partials(b, &for_gain, blocks, width, dgain)?,
    }
    Ok(dx)
}
