//! Arm `plain`: forward has one unit an element; in backward one unit walks all tokens for one element of the table.

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::{Backward, Forward, row_of};
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Floats, Words};

/// x = table[id]. One unit, one element. `nan` is what an id outside the table gives.
#[cube(launch_unchecked)]
fn forward_kernel(ids: &Words, table: &Floats, x: &mut Floats, len: u32, vocab: u32, width: u32, nan: f32) {
    let i = ABSOLUTE_POS;
    let width = width as usize;
    if i < len as usize {
        let n = i / width;
        let mut value = table.at(row_of(ids, n, vocab) as usize * width + i % width);
        if ids.at(n) >= vocab {
            value = nan;
        }
        x.set(i, value);
    }
}

/// Adds dx of every token with the row's id, first to last. One unit, one element of the table.
#[cube(launch_unchecked)]
fn backward_kernel(ids: &Words, dx: &Floats, dtable: &mut Floats, tokens: u32, vocab: u32, width: u32) {
    let i = ABSOLUTE_POS;
    let columns = width as usize;
    if i < vocab as usize * columns {
        let row = (i / columns) as u32;
        let mut sum = 0.0f32;
        for n in 0..tokens as usize {
            if row_of(ids, n, vocab) == row {
                sum += dx.at(n * columns + i % columns);
            }
        }
        dtable.set(i, dtable.at(i) + sum);
    }
}

/// Looks every id up.
pub(super) fn forward<R: Engine>(b: &Device<R>, call: &Forward<'_>) -> Result<()> {
    let Forward { ids, table, x, vocab, width } = *call;
    let bytes = ids.bytes() + table.bytes().min(x.bytes()) + x.bytes();
    b.launch("embedding::forward", Grid::units(x.len()), bytes, &[ids, table, x], |client, count, dim| {
        let (len, v, d) = (x.len() as u32, vocab as u32, width as u32);
        let (ids, table, x) = (b.words(ids), b.floats(table), b.floats(x));
        // SAFETY: rows are below vocab whatever the ids are; units past `len` do nothing.
        unsafe { forward_kernel::launch_unchecked::<R>(client, count, dim, ids, table, x, len, v, d, f32::NAN) }
    })
}

/// Adds the gradient of the table.
pub(super) fn backward<R: Engine>(b: &Device<R>, call: &Backward<'_>) -> Result<()> {
    let Backward { ids, dx, dtable, vocab, width } = *call;
    if ids.is_empty() {
        return Ok(());
    }
    let grid = Grid::units(dtable.len());
    let bytes = ids.bytes() + dx.bytes() + 2 * dtable.bytes();
    b.launch("embedding::backward", grid, bytes, &[ids, dx, dtable], |client, count, dim| {
        let (n, v, d) = (ids.len() as u32, vocab as u32, width as u32);
        let (ids, dx, dtable) = (b.words(ids), b.floats(dx), b.floats(dtable));
        // SAFETY: `dx` has one row a token, `dtable` vocab rows; units past them do nothing.
        unsafe { backward_kernel::launch_unchecked::<R>(client, count, dim, ids, dx, dtable, n, v, d) }
    })
}
