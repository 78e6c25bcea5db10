//! Arm `plain`: one unit chooses one element, forward and backward. The gradient of the vector is summed over blocks of
//! rows, one unit a block and column, and then over blocks.

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::{Backward, Forward};
use crate::device::Device;
use crate::launch::Grid;
use crate::mask;
use crate::runtime::Engine;
use crate::sum;
use crate::tensor::{Floats, Words};

/// y. One unit, one element.
#[cube(launch_unchecked)]
fn forward_kernel(
    x: &Floats,
    mask: &Words,
    vector: &Floats,
    y: &mut Floats,
    len: u32,
    width: u32,
    #[comptime] kind: u32,
) {
    let i = ABSOLUTE_POS;
    if i < len as usize {
        if mask::is_set(mask, i / width as usize, kind) {
            y.set(i, vector.at(i % width as usize));
        } else {
            y.set(i, x.at(i));
        }
    }
}

/// dx. One unit, one element.
#[cube(launch_unchecked)]
fn backward_kernel(mask: &Words, dy: &Floats, dx: &mut Floats, len: u32, width: u32, #[comptime] kind: u32) {
    let i = ABSOLUTE_POS;
    if i < len as usize {
        if mask::is_set(mask, i / width as usize, kind) {
            dx.set(i, 0.0f32);
        } else {
            dx.set(i, dy.at(i));
        }
    }
}

/// The sum of dy over the masked rows of a block in one column. One unit, one block and column.
#[cube(launch_unchecked)]
fn vector_kernel(mask: &Words, dy: &Floats, out: &mut Floats, rows: u32, width: u32, #[comptime] kind: u32) {
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
            if mask::is_set(mask, n, kind) {
                total += dy.at(n * width + i % width);
            }
        }
        out.set(i, total);
    }
}

/// Chooses every row.
pub(super) fn forward<R: Engine>(b: &Device<R>, call: &Forward<'_>) -> Result<()> {
    let Forward { x, mask, vector, y, width, .. } = *call;
    let bytes = 2 * x.bytes() + mask.bytes() + vector.bytes();
    b.launch("mask_vector::forward", Grid::units(y.len()), bytes, &[x, mask, vector, y], |client, count, dim| {
        let (len, d, kind) = (y.len() as u32, width as u32, mask::kind(mask));
        let ([x, vector, y], mask) = ([x, vector, y].map(|t| b.floats(t)), b.words(mask));
        // SAFETY: x and y have `len` elements, the mask one a row; units past them do nothing.
        unsafe { forward_kernel::launch_unchecked::<R>(client, count, dim, x, mask, vector, y, len, d, kind) }
    })
}

/// dx; the gradient of the vector is added to what `call` names.
pub(super) fn backward<R: Engine>(b: &Device<R>, call: &Backward<'_>) -> Result<()> {
    let Backward { mask, dy, dx, dvector, rows, width } = *call;
    let (d, kind) = (width as u32, mask::kind(mask));
    let bytes = 2 * dy.bytes() + mask.bytes();
    b.launch("mask_vector::backward", Grid::units(dx.len()), bytes, &[mask, dy, dx], |client, count, dim| {
        let (mask, dy, out, len) = (b.words(mask), b.floats(dy), b.floats(dx), dx.len() as u32);
        // SAFETY: dy and dx have `len` elements, the mask one a row; units past them do nothing.
        unsafe { backward_kernel::launch_unchecked::<R>(client, count, dim, mask, dy, out, len, d, kind) }
    })?;
    let blocks = rows.div_ceil(sum::BLOCK);
    let partial = b.float_scratch(&[blocks, width])?;
    let bytes = dy.bytes() + mask.bytes() + partial.bytes();
    let uses = [mask, dy, &partial];
    b.launch("mask_vector::vector", Grid::units(partial.len()), bytes, &uses, |client, count, dim| {
        let (mask, dy, out, n) = (b.words(mask), b.floats(dy), b.floats(&partial), rows as u32);
        // SAFETY: `out` has one row a block; units past it do nothing.
        unsafe { vector_kernel::launch_unchecked::<R>(client, count, dim, mask, dy, out, n, d, kind) }
    })?;
    sum::add_rows(b, &partial, blocks, width, dvector)
}
