//! Arm `plain`: one unit walks one row, forward and backward. The gradient of `gain` is summed over blocks of rows, one
//! unit a block and column, and then over blocks.

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::{Backward, Forward, Saved};
use crate::arm::Arm;
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::sum;
use crate::tensor::{Floats, Tensor};

/// c = x + shift. One unit, one element.
#[cube(launch_unchecked)]
fn shift_kernel(x: &Floats, shift: &Floats, c: &mut Floats, len: u32, width: u32) {
    let i = ABSOLUTE_POS;
    if i < len as usize {
        c.set(i, x.at(i) + shift.at(i % width as usize));
    }
}

/// rho and y of one row. One unit, one row.
#[cube(launch_unchecked)]
fn forward_kernel(c: &Floats, gain: &Floats, y: &mut Floats, rho: &mut Floats, rows: u32, width: u32, eps: f32) {
    let n = ABSOLUTE_POS;
    if n < rows as usize {
        let row = n * width as usize;
        let mut square = 0.0f32;
        for d in 0..width as usize {
            square += c.at(row + d) * c.at(row + d);
        }
        let scale = 1.0f32 / (square / f32::cast_from(width) + eps).sqrt();
        rho.set(n, scale);
        for d in 0..width as usize {
            y.set(row + d, scale * c.at(row + d) * gain.at(d));
        }
    }
}

/// dx of one row, without what arrives at c from elsewhere. One unit, one row.
#[cube(launch_unchecked)]
fn backward_kernel(c: &Floats, gain: &Floats, rho: &Floats, dy: &Floats, dx: &mut Floats, rows: u32, width: u32) {
    let n = ABSOLUTE_POS;
    if n < rows as usize {
        let row = n * width as usize;
        let scale = rho.at(n);
        let mut mean = 0.0f32;
        for d in 0..width as usize {
            mean += scale * c.at(row + d) * dy.at(row + d) * gain.at(d);
        }
        mean /= f32::cast_from(width);
        for d in 0..width as usize {
            dx.set(row + d, scale * (dy.at(row + d) * gain.at(d) - scale * c.at(row + d) * mean));
        }
    }
}

/// The sum of dy rho c over a block of rows in one column. One unit, one block and column.
#[cube(launch_unchecked)]
fn gain_kernel(c: &Floats, rho: &Floats, dy: &Floats, out: &mut Floats, rows: u32, width: u32) {
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
            total += dy.at(at) * rho.at(n) * c.at(at);
        }
        out.set(i, total);
    }
}

/// y, c and what backward needs.
pub(super) fn forward<R: Engine>(b: &Device<R>, call: &Forward<'_>) -> Result<(Tensor, Saved)> {
    let Forward { x, gain, shift, rows, width, eps } = *call;
    let c = match shift {
        Some(shift) => {
            let c = b.float_scratch(x.shape())?;
            let bytes = 2 * x.bytes() + shift.bytes();
            let uses = [x, shift, &c];
            b.launch("rms_norm::shift", Grid::units(x.len()), bytes, &uses, |client, count, dim| {
                let [x, shift, out] = uses.map(|t| b.floats(t));
                let (len, d) = (c.len() as u32, width as u32);
                // SAFETY: `x` and `c` have `len` elements, `shift` has `width`.
                unsafe { shift_kernel::launch_unchecked::<R>(client, count, dim, x, shift, out, len, d) }
            })?;
            c
        }
        None => x.clone(),
    };
    let y = b.float_scratch(x.shape())?;
    let rho = b.float_scratch(&[rows])?;
    let uses = [&c, gain, &y, &rho];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    b.launch("rms_norm::forward", Grid::units(rows), bytes, &uses, |client, count, dim| {
        let [c, gain, y, rho] = uses.map(|t| b.floats(t));
        let (n, d) = (rows as u32, width as u32);
        // SAFETY: shapes were checked by the caller; units past the rows do nothing.
        unsafe { forward_kernel::launch_unchecked::<R>(client, count, dim, c, gain, y, rho, n, d, eps) }
    })?;
    let has_shift = shift.is_some();
    Ok((y, Saved { c, gain: gain.clone(), rho, has_shift, arm: Arm::Plain }))
}

/// dx; the gradients of the parameters are added to what `call` names.
pub(super) fn backward<R: Engine>(b: &Device<R>, saved: &Saved, call: &Backward<'_>) -> Result<Tensor> {
    let Saved { c, gain, rho, .. } = saved;
    let Backward { dy, dc, dgain, dshift, rows, width } = *call;
    let (n, d) = (rows as u32, width as u32);
    let dx = b.float_scratch(c.shape())?;
    let uses = [c, gain, rho, dy, &dx];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    b.launch("rms_norm::backward", Grid::units(rows), bytes, &uses, |client, count, dim| {
        let [c, gain, rho, dy, dx] = uses.map(|t| b.floats(t));
        // SAFETY: shapes were checked by the caller; units past the rows do nothing.
        unsafe { backward_kernel::launch_unchecked::<R>(client, count, dim, c, gain, rho, dy, dx, n, d) }
    })?;
    if let Some(dc) = dc {
        sum::add(b, dc, &dx)?;
    }
    let blocks = rows.div_ceil(sum::BLOCK);
    let partial = b.float_scratch(&[blocks, width])?;
    let uses = [c, rho, dy, &partial];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    b.launch("rms_norm::gain", Grid::units(partial.len()), bytes, &uses, |client, count, dim| {
        let [c, rho, dy, out] = uses.map(|t| b.floats(t));
        // SAFETY: `out` has one row a block; units past it do nothing.
        unsafe { gain_kernel::launch_unchecked::<R>(client, count, dim, c, rho, dy, out, n, d) }
    })?;
    sum::add_rows(b, &partial, blocks, width, dgain)?;
    if let Some(shift) = dshift {
        sum::add_rows(b, &dx, rows, width, shift)?;
    }
    Ok(dx)
}
