//! Arm `plain`: one unit walks one row, forward and backward. The gradients of gain and bias are summed over blocks of
//! rows, one unit a block and column, and then over blocks.

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::{Backward, Forward, STATS, Saved, normalised};
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::sum;
use crate::tensor::Floats;

/// Statistics and y of one row. One unit, one row.
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
    #[comptime] affine: bool,
) {
    let n = ABSOLUTE_POS;
    if n < rows as usize {
        let row = n * width as usize;
        let first = x.at(row);
        let mut sum = 0.0f32;
        for d in 0..width as usize {
            sum += x.at(row + d) - first;
        }
        let shift = sum / f32::cast_from(width);
        let mut square = 0.0f32;
        for d in 0..width as usize {
            let centred = (x.at(row + d) - first) - shift;
            square += centred * centred;
        }
        let rho = 1.0f32 / (square / f32::cast_from(width) + eps).sqrt();
        stats.set(n * comptime!(STATS), shift);
        stats.set(n * comptime!(STATS) + 1, rho);
        for d in 0..width as usize {
            let mut value = rho * ((x.at(row + d) - first) - shift);
            if affine {
                value = value * gain.at(d) + bias.at(d);
            }
            y.set(row + d, value);
        }
    }
}

/// dx of one row, without `plus`. One unit, one row.
#[cube(launch_unchecked)]
fn backward_kernel(
    x: &Floats,
    gain: &Floats,
    stats: &Floats,
    dy: &Floats,
    dx: &mut Floats,
    rows: u32,
    width: u32,
    #[comptime] affine: bool,
) {
    let n = ABSOLUTE_POS;
    if n < rows as usize {
        let width = width as usize;
        let row = n * width;
        let mut sum = 0.0f32;
        let mut product = 0.0f32;
        for d in 0..width {
            let mut h = dy.at(row + d);
            if affine {
                h *= gain.at(d);
            }
            // Rounded here, once: a compiler that merged this product into the difference below would subtract a rounded
            // mean from an exact product, and a row of one element would not give zero.
            dx.set(row + d, h);
            sum += h;
            product += h * normalised(x, stats, n, d, width);
        }
        let mean = sum / f32::cast_from(width as u32);
        let along = product / f32::cast_from(width as u32);
        let rho = stats.at(n * comptime!(STATS) + 1);
        for d in 0..width {
            let h = dx.at(row + d);
            dx.set(row + d, rho * (h - mean - normalised(x, stats, n, d, width) * along));
        }
    }
}

/// The sum of dy n over a block of rows in one column. One unit, one block and column.
#[cube(launch_unchecked)]
fn gain_kernel(x: &Floats, stats: &Floats, dy: &Floats, out: &mut Floats, rows: u32, width: u32) {
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
            total += dy.at(n * width + i % width) * normalised(x, stats, n, i % width, width);
        }
        out.set(i, total);
    }
}

/// y and what backward needs.
pub(super) fn forward<R: Engine>(b: &Device<R>, call: &Forward<'_>) -> Result<()> {
    let Forward { x, affine, y, stats, rows, width, eps } = *call;
    // A kernel has all its arguments in every variant; without gain and bias nothing reads them.
    let [gain, bias] = affine.unwrap_or([x, x]);
    let uses = [x, gain, bias, y, stats];
    let bytes = 2 * x.bytes() + stats.bytes() + affine.map_or(0, |[gain, bias]| gain.bytes() + bias.bytes());
    b.launch("layer_norm::forward", Grid::units(rows), bytes, &uses, |client, count, dim| {
        let [x, gain, bias, y, stats] = uses.map(|t| b.floats(t));
        let (n, d, has) = (rows as u32, width as u32, affine.is_some());
        // SAFETY: shapes were checked by the caller; units past the rows do nothing.
        unsafe { forward_kernel::launch_unchecked::<R>(client, count, dim, x, gain, bias, y, stats, n, d, eps, has) }
    })
}

/// dx; the gradients of gain and bias are added to what `call` names.
pub(super) fn backward<R: Engine>(b: &Device<R>, saved: &Saved, call: &Backward<'_>) -> Result<()> {
    let Saved { x, gain, stats, .. } = saved;
    let Backward { dy, plus, dx, into, rows, width } = *call;
    let (n, d) = (rows as u32, width as u32);
    let uses = [x, gain.as_ref().unwrap_or(x), stats, dy, dx];
    let bytes = 3 * x.bytes() + stats.bytes() + gain.as_ref().map_or(0, |gain| gain.bytes());
    b.launch("layer_norm::backward", Grid::units(rows), bytes, &uses, |client, count, dim| {
        let [x, gain_, stats, dy, dx] = uses.map(|t| b.floats(t));
        let has = gain.is_some();
        // SAFETY: shapes were checked by the caller; units past the rows do nothing.
        unsafe { backward_kernel::launch_unchecked::<R>(client, count, dim, x, gain_, stats, dy, dx, n, d, has) }
    })?;
    if let Some(plus) = plus {
        sum::add(b, plus, dx)?;
    }
    let Some([dgain, dbias]) = into else { return Ok(()) };
    let blocks = rows.div_ceil(sum::BLOCK);
    let partial = b.float_scratch(&[blocks, width])?;
    let uses = [x, stats, dy, &partial];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    b.launch("layer_norm::gain", Grid::units(partial.len()), bytes, &uses, |client, count, dim| {
        let [x, stats, dy, out] = uses.map(|t| b.floats(t));
        // SAFETY: `out` has one row a block; units past it do nothing.
        unsafe { gain_kernel::launch_unchecked::<R>(client, count, dim, x, stats, dy, out, n, d) }
    })?;
    sum::add_rows(b, &partial, blocks, width, dgain)?;
    sum::add_rows(b, dy, rows, width, dbias)
}
