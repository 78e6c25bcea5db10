//! Arm `plain`: one unit walks one row, forward and backward.

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::{Backward, Forward, Saved};
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor};

/// rho and y of one row. One unit, one row.
#[cube(launch_unchecked)]
fn forward_kernel(x: &Floats, y: &mut Floats, rho: &mut Floats, rows: u32, width: u32, eps: f32) {
    let n = ABSOLUTE_POS;
    if n < rows as usize {
        let row = n * width as usize;
        let mut square = 0.0f32;
        for k in 0..width as usize {
            square += x.at(row + k) * x.at(row + k);
        }
        let scale = 1.0f32 / (square + eps).sqrt();
        rho.set(n, scale);
        for k in 0..width as usize {
            y.set(row + k, scale * x.at(row + k));
        }
    }
}

/// dx of one row. One unit, one row.
#[cube(launch_unchecked)]
fn backward_kernel(y: &Floats, rho: &Floats, dy: &Floats, dx: &mut Floats, rows: u32, width: u32) {
    let n = ABSOLUTE_POS;
    if n < rows as usize {
        let row = n * width as usize;
        let mut along = 0.0f32;
        for k in 0..width as usize {
            along += y.at(row + k) * dy.at(row + k);
        }
        for k in 0..width as usize {
            dx.set(row + k, rho.at(n) * (dy.at(row + k) - y.at(row + k) * along));
        }
    }
}

/// y and rho.
pub(super) fn forward<R: Engine>(b: &Device<R>, call: &Forward<'_>) -> Result<(Tensor, Tensor)> {
    let Forward { x, rows, width, eps } = *call;
    let (y, rho) = (b.float_scratch(x.shape())?, b.float_scratch(&[rows])?);
    let uses = [x, &y, &rho];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    b.launch("l2_norm::forward", Grid::units(rows), bytes, &uses, |client, count, dim| {
        let [x, y, rho] = uses.map(|t| b.floats(t));
        let (n, k) = (rows as u32, width as u32);
        // SAFETY: shapes were checked by the caller; units past the rows do nothing.
        unsafe { forward_kernel::launch_unchecked::<R>(client, count, dim, x, y, rho, n, k, eps) }
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
    b.launch("l2_norm::backward", Grid::units(rows), bytes, &uses, |client, count, dim| {
        let [y, rho, dy, dx] = uses.map(|t| b.floats(t));
        let (n, k) = (rows as u32, width as u32);
        // SAFETY: shapes were checked by the caller; units past the rows do nothing.
        unsafe { backward_kernel::launch_unchecked::<R>(client, count, dim, y, rho, dy, dx, n, k) }
    })?;
    Ok(dx)
}
