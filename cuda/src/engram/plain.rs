//! Arm `plain`: the look-up has one unit an element, gate and adjoint one a position. The gradient of the table has one
//! unit a place and column: the first place of a row adds up all places of that row, and the others do nothing.

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::{FIT, Gather, Mix, Saved, Scatter, Sizes, Unmix, gate_of, place_at, row_of};
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Floats, Words};

/// e = table[row]. One unit, one element. `nan` is what a row outside the table gives.
#[cube(launch_unchecked)]
fn gather_kernel(rows: &Words, table: &Floats, e: &mut Floats, len: u32, table_rows: u32, width: u32, nan: f32) {
    let i = ABSOLUTE_POS;
    let width = width as usize;
    if i < len as usize {
        let mut value = table.at(row_of(rows, i / width, table_rows) as usize * width + i % width);
        if rows.at(i / width) >= table_rows {
            value = nan;
        }
        e.set(i, value);
    }
}

/// The fit of one position, and m.
#[cube(launch_unchecked)]
fn mix_kernel(
    c: &Floats,
    key: &Floats,
    value: &Floats,
    m: &mut Floats,
    fit: &mut Floats,
    positions: u32,
    width: u32,
    eps: f32,
    gate_eps: f32,
) {
    let n = ABSOLUTE_POS;
    let columns = width as usize;
    if n < positions as usize {
        let first = n * columns;
        let mut key_square = 0.0f32;
        let mut query_square = 0.0f32;
        let mut inner = 0.0f32;
        for i in first..first + columns {
            key_square += key.at(i) * key.at(i);
            query_square += c.at(i) * c.at(i);
            inner += key.at(i) * c.at(i);
        }
        let size = f32::cast_from(width);
        let key_scale = 1.0f32 / (key_square / size + eps).sqrt();
        let query_scale = 1.0f32 / (query_square / size + eps).sqrt();
        let score = key_scale * query_scale * inner / size.sqrt();
        let (gate, _shut, _root) = gate_of(score, gate_eps);
        for i in first..first + columns {
            m.set(i, gate * value.at(i));
        }
        fit.set(n * FIT, key_scale);
        fit.set(n * FIT + 1, query_scale);
        fit.set(n * FIT + 2, score);
    }
}

/// dvalue, dkey and dc of one position.
#[cube(launch_unchecked)]
fn unmix_kernel(
    c: &Floats,
    key: &Floats,
    value: &Floats,
    fit: &Floats,
    dm: &Floats,
    plus: &Floats,
    dc: &mut Floats,
    dkey: &mut Floats,
    dvalue: &mut Floats,
    positions: u32,
    width: u32,
    gate_eps: f32,
    #[comptime] has_plus: bool,
) {
    let n = ABSOLUTE_POS;
    let columns = width as usize;
    if n < positions as usize {
        let first = n * columns;
        let mut dgate = 0.0f32;
        for i in first..first + columns {
            dgate += dm.at(i) * value.at(i);
        }
        let key_scale = fit.at(n * FIT);
        let query_scale = fit.at(n * FIT + 1);
        let score = fit.at(n * FIT + 2);
        let (gate, shut, root) = gate_of(score, gate_eps);
        let dscore = dgate * gate * shut / (root + root);
        let size = f32::cast_from(width);
        let across = dscore * key_scale * query_scale / size.sqrt();
        let along_key = dscore * score * key_scale * key_scale / size;
        let along_query = dscore * score * query_scale * query_scale / size;
        for i in first..first + columns {
            dvalue.set(i, gate * dm.at(i));
            dkey.set(i, across * c.at(i) - along_key * key.at(i));
            let mut back = across * key.at(i) - along_query * c.at(i);
            if comptime!(has_plus) {
                back += plus.at(i);
            }
            dc.set(i, back);
        }
    }
}

/// Adds de of all places of a row, first to last. One unit, one place and column.
#[cube(launch_unchecked)]
fn scatter_kernel(
    rows: &Words,
    order: &Words,
    de: &Floats,
    dtable: &mut Floats,
    places: u32,
    table_rows: u32,
    width: u32,
) {
    let (k, columns) = (ABSOLUTE_POS / width as usize, width as usize);
    let column = ABSOLUTE_POS % columns;
    if k < places as usize {
        let row = row_of(rows, place_at(order, k, places) as usize, table_rows);
        let mut is_first = true;
        if k > 0 {
            is_first = row_of(rows, place_at(order, k - 1, places) as usize, table_rows) != row;
        }
        if is_first {
            let mut sum = 0.0f32;
            let mut at = k;
            let mut more = true;
            while more {
                let place = place_at(order, at, places) as usize;
                more = row_of(rows, place, table_rows) == row;
                if more {
                    sum += de.at(place * columns + column);
                    at += 1;
                    more = at < places as usize;
                }
            }
            let to = row as usize * columns + column;
            dtable.set(to, dtable.at(to) + sum);
        }
    }
}

/// Looks every row up.
pub(super) fn gather<R: Engine>(b: &Device<R>, call: &Gather<'_>) -> Result<()> {
    let Gather { rows, table, e, sizes } = *call;
    let bytes = rows.bytes() + table.bytes().min(e.bytes()) + e.bytes();
    b.launch("engram::gather", Grid::units(e.len()), bytes, &[rows, table, e], |client, count, dim| {
        let (len, r, w) = (e.len() as u32, sizes.rows as u32, sizes.row_width as u32);
        let (rows, table, e) = (b.words(rows), b.floats(table), b.floats(e));
        // SAFETY: rows are below the table's whatever they hold; units past `len` do nothing.
        unsafe { gather_kernel::launch_unchecked::<R>(client, count, dim, rows, table, e, len, r, w, f32::NAN) }
    })
}

/// m and the fit of every position.
pub(super) fn mix<R: Engine>(b: &Device<R>, call: &Mix<'_>) -> Result<()> {
    let Mix { c, key, value, m, fit, sizes: Sizes { positions, width, eps, gate_eps, .. } } = *call;
    let uses = [c, key, value, m, fit];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    b.launch("engram::forward", Grid::units(positions), bytes, &uses, |client, count, dim| {
        let [c, key, value, m, fit] = uses.map(|t| b.floats(t));
        let (n, d) = (positions as u32, width as u32);
        // SAFETY: shapes were checked by the caller; units past the positions do nothing.
        unsafe { mix_kernel::launch_unchecked::<R>(client, count, dim, c, key, value, m, fit, n, d, eps, gate_eps) }
    })
}

/// dc, dkey and dvalue of every position.
pub(super) fn unmix<R: Engine>(b: &Device<R>, call: &Unmix<'_>) -> Result<()> {
    let Unmix { saved, dm, plus, dc, dkey, dvalue, sizes: Sizes { positions, width, gate_eps, .. } } = *call;
    let Saved { inputs, key, value, fit, .. } = saved;
    let uses = [&inputs.c, key, value, fit, dm, plus.unwrap_or(dm), dc, dkey, dvalue];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    b.launch("engram::backward", Grid::units(positions), bytes, &uses, |client, count, dim| {
        let [c, key, value, fit, dm, added, dc, dkey, dvalue] = uses.map(|t| b.floats(t));
        let (n, d, has_plus) = (positions as u32, width as u32, plus.is_some());
        // SAFETY: shapes were checked by the caller; units past the positions do nothing.
        unsafe {
            unmix_kernel::launch_unchecked::<R>(
                client, count, dim, c, key, value, fit, dm, added, dc, dkey, dvalue, n, d, gate_eps, has_plus,
            )
        }
    })
}

/// Adds the gradient of the table.
pub(super) fn scatter<R: Engine>(b: &Device<R>, call: &Scatter<'_>) -> Result<()> {
    let Scatter { rows, order, de, dtable, sizes } = *call;
    let uses = [rows, order, de, dtable];
    let bytes = rows.bytes() + order.bytes() + de.bytes() + 2 * dtable.bytes().min(de.bytes());
    b.launch("engram::dtable", Grid::units(de.len()), bytes, &uses, |client, count, dim| {
        let (n, r, w) = (sizes.places() as u32, sizes.rows as u32, sizes.row_width as u32);
        let (rows, order, de, dtable) = (b.words(rows), b.words(order), b.floats(de), b.floats(dtable));
        // SAFETY: places and rows are in range whatever the ids are; a row has one first place, if `order` sorts them.
        unsafe { scatter_kernel::launch_unchecked::<R>(client, count, dim, rows, order, de, dtable, n, r, w) }
    })
}
