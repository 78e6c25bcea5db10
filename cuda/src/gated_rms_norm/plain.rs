//! Arm `plain`: one unit walks one row, forward and backward. The gradient of the gain is summed over blocks of rows,
//! one unit a block and column, and then over blocks.

use cubecl::prelude::*;
use dormouse_reference::Result;
use dormouse_reference::gated_rms_norm::Grads;

use super::{Backward, Forward, Saved};
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::sigmoid::sigmoids;
use crate::sum;
use crate::tensor::{Floats, Tensor};

/// rho and y of one row. One unit, one row.
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
) {
    let n = ABSOLUTE_POS;
    if n < rows as usize {
        let row = n * width as usize;
        let mut square = 0.0f32;
        for v in 0..width as usize {
            square += o.at(row + v) * o.at(row + v);
        }
        let scale = 1.0f32 / (square / f32::cast_from(width) + eps).sqrt();
        rho.set(n, scale);
        for v in 0..width as usize {
            let (open, _closed) = sigmoids(zeta.at(row + v));
            y.set(row + v, gain.at(v) * (scale * o.at(row + v)) * open);
        }
    }
}

/// do and dzeta of one row. One unit, one row.
#[cube(launch_unchecked)]
fn backward_kernel(
    o: &Floats,
    zeta: &Floats,
    gain: &Floats,
    rho: &Floats,
    dy: &Floats,
    d_o: &mut Floats,
    dzeta: &mut Floats,
    rows: u32,
    width: u32,
) {
    let n = ABSOLUTE_POS;
    if n < rows as usize {
        let row = n * width as usize;
        let scale = rho.at(n);
        let mut mean = 0.0f32;
        for v in 0..width as usize {
            let (open, closed) = sigmoids(zeta.at(row + v));
            let oh = scale * o.at(row + v);
            let dh = dy.at(row + v) * open * gain.at(v);
            dzeta.set(row + v, dh * oh * closed);
            mean += oh * dh;
        }
        mean /= f32::cast_from(width);
        for v in 0..width as usize {
            let (open, _closed) = sigmoids(zeta.at(row + v));
            let oh = scale * o.at(row + v);
            let dh = dy.at(row + v) * open * gain.at(v);
            d_o.set(row + v, scale * (dh - oh * mean));
        }
    }
}

/// The sum of dn oh over a block of rows in one column. One unit, one block and column.
#[cube(launch_unchecked)]
fn gain_kernel(o: &Floats, zeta: &Floats, rho: &Floats, dy: &Floats, out: &mut Floats, rows: u32, width: u32) {
    let i = ABSOLUTE_POS;
    let (rows, width) = (rows as usize, width as usize);
    if i < rows.div_ceil(sum::BLOCK) * width {
        let first = i / width * sum::BLOCK;
        let mut last = first + sum::BLOCK;
        if last > rows {
            last = rows;
        }
        let mut total = 0.0f32;
        for n in first..last {
            let at = n * width + i % width;
            let (open, _closed) = sigmoids(zeta.at(at));
            total += dy.at(at) * open * (rho.at(n) * o.at(at));
        }
        out.set(i, total);
    }
}

/// y and rho.
pub(super) fn forward<R: Engine>(b: &Device<R>, call: &Forward<'_>) -> Result<(Tensor, Tensor)> {
    let Forward { o, zeta, gain, rows, width, eps } = *call;
    let (y, rho) = (b.float_scratch(o.shape())?, b.float_scratch(&[rows])?);
    let uses = [o, zeta, gain, &y, &rho];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    b.launch("gated_rms_norm::forward", Grid::units(rows), bytes, &uses, |client, count, dim| {
        let [o, zeta, gain, y, rho] = uses.map(|t| b.floats(t));
        let (n, v) = (rows as u32, width as u32);
        // SAFETY: shapes were checked by the caller; units past the rows do nothing.
        unsafe { forward_kernel::launch_unchecked::<R>(client, count, dim, o, zeta, gain, y, rho, n, v, eps) }
    })?;
    Ok((y, rho))
}

/// do and dzeta; the gradient of the gain is added to what `call` names.
pub(super) fn backward<R: Engine>(b: &Device<R>, saved: &Saved, call: &Backward<'_>) -> Result<Grads<Tensor>> {
    let Saved { o, zeta, gain, rho, .. } = saved;
    let Backward { dy, dgain, rows, width } = *call;
    let (n, v) = (rows as u32, width as u32);
    let (d_o, dzeta) = (b.float_scratch(o.shape())?, b.float_scratch(zeta.shape())?);
    let uses = [o, zeta, gain, rho, dy, &d_o, &dzeta];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    b.launch("gated_rms_norm::backward", Grid::units(rows), bytes, &uses, |client, count, dim| {
        let [o, zeta, gain, rho, dy, d_o, dzeta] = uses.map(|t| b.floats(t));
        // SAFETY: shapes were checked by the caller; units past the rows do nothing.
        unsafe { backward_kernel::launch_unchecked::<R>(client, count, dim, o, zeta, gain, rho, dy, d_o, dzeta, n, v) }
    })?;
    let blocks = rows.div_ceil(sum::BLOCK);
    let partial = b.float_scratch(&[blocks, width])?;
    let uses = [o, zeta, rho, dy, &partial];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    b.launch("gated_rms_norm::gain", Grid::units(partial.len()), bytes, &uses, |client, count, dim| {
        let [o, zeta, rho, dy, out] = uses.map(|t| b.floats(t));
        // SAFETY: `out` has one row a block; units past it do nothing.
        unsafe { gain_kernel::launch_unchecked::<R>(client, count, dim, o, zeta, rho, dy, out, n, v) }
    })?;
    sum::add_rows(b, &partial, blocks, width, dgain)?;
    Ok(Grads { d_o, dzeta })
}
