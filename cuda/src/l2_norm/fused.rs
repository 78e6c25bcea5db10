//! Arm `fused`: the units of a row share it, see [`rows`]. Forward and backward are one launch each; what is read twice
//! is read the second time from the nearest cache.

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::{Backward, Forward, Saved};
use crate::device::Device;
use crate::rows;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor};

/// rho and y. Some units share a row.
///
/// Mutants: 1 drops eps, 2 takes the mean for the sum, 3 misses the last column, 4 is null (a renamed local).
#[cube(launch_unchecked)]
fn forward_kernel(
    x: &Floats,
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
    let mut columns = width;
    if comptime!(mutant == 3) {
        columns = width - 1;
    }
    let mut square = 0.0f32;
    if here {
        for step in 0..columns.div_ceil(lanes) {
            let k = step * lanes + lane;
            if k < columns {
                let value = x.at(n * width + k);
                square += value * value;
            }
        }
    }
    let mut total = rows::sum(square, &mut shared);
    if comptime!(mutant == 2) {
        total /= f32::cast_from(width as u32);
    }
    let mut guard = eps;
    if comptime!(mutant == 1) {
        guard = 0.0f32;
    }
    let mut scale = 1.0f32 / (total + guard).sqrt();
    if comptime!(mutant == 4) {
        let renamed = 1.0f32 / (total + guard).sqrt();
        scale = renamed;
    }
    if here {
        if lane == 0 {
            rho.set(n, scale);
        }
        for step in 0..width.div_ceil(lanes) {
            let k = step * lanes + lane;
            if k < width {
                y.set(n * width + k, scale * x.at(n * width + k));
            }
        }
    }
}

/// dx. Some units share a row.
///
/// Mutants: 5 drops the part along y, 6 misses the last column in it, 7 drops rho.
#[cube(launch_unchecked)]
fn backward_kernel(
    y: &Floats,
    rho: &Floats,
    dy: &Floats,
    dx: &mut Floats,
    rows: u32,
    width: u32,
    #[comptime] mutant: u32,
) {
    let (n, lane) = (rows::row(), rows::lane());
    let width = width as usize;
    let lanes = comptime!(rows::LANES as usize);
    let mut shared = SharedMemory::<f32>::new(comptime!(rows::UNITS as usize));
    let here = n < rows as usize;
    let mut columns = width;
    if comptime!(mutant == 6) {
        columns = width - 1;
    }
    let mut scale = 1.0f32;
    let mut product = 0.0f32;
    if here {
        if comptime!(mutant != 7) {
            scale = rho.at(n);
        }
        for step in 0..columns.div_ceil(lanes) {
            let k = step * lanes + lane;
            if k < columns {
                product += y.at(n * width + k) * dy.at(n * width + k);
            }
        }
    }
    let mut along = rows::sum(product, &mut shared);
    if comptime!(mutant == 5) {
        along = 0.0f32;
    }
    if here {
        for step in 0..width.div_ceil(lanes) {
            let k = step * lanes + lane;
            if k < width {
                let at = n * width + k;
                dx.set(at, scale * (dy.at(at) - y.at(at) * along));
            }
        }
    }
}

/// y and rho.
pub(super) fn forward<R: Engine>(b: &Device<R>, call: &Forward<'_>) -> Result<(Tensor, Tensor)> {
    let Forward { x, rows, width, eps } = *call;
    let (y, rho) = (b.float_scratch(x.shape())?, b.float_scratch(&[rows])?);
    let uses = [x, &y, &rho];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    let mutant = b.mutant(super::STEM);
    b.launch("l2_norm::forward", rows::cubes(rows), bytes, &uses, |client, count, dim| {
        let [x, y, rho] = uses.map(|t| b.floats(t));
        let (n, k) = (rows as u32, width as u32);
        // SAFETY: shapes were checked by the caller; units past the rows and columns touch nothing.
        unsafe { forward_kernel::launch_unchecked::<R>(client, count, dim, x, y, rho, n, k, eps, mutant) }
    })?;
    Ok((y, rho))
}

/// dx.
pub(super) fn backward<R: Engine>(b: &Device<R>, saved: &Saved, call: &Backward<'_>) -> Result<Tensor> {
    let Saved { y, rho, .. } = saved;
    let Backward { dy, rows, width } = *call;
    let dx = b.float_scratch(y.shape())?;
    let uses = [y, rho, dy, &dx];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    let mutant = b.mutant(super::STEM);
    b.launch("l2_norm::backward", rows::cubes(rows), bytes, &uses, |client, count, dim| {
        let [y, rho, dy, dx] = uses.map(|t| b.floats(t));
        let (n, k) = (rows as u32, width as u32);
        // SAFETY: shapes were checked by the caller; units past the rows and columns touch nothing.
        unsafe { backward_kernel::launch_unchecked::<R>(client, count, dim, y, rho, dy, dx, n, k, mutant) }
    })?;
    Ok(dx)
}
