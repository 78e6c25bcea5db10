//! Arm `fused`: forward is four launches, backward seven.
//!
//! Forward looks the rows up (reads `rows` and the named rows, writes e), projects them in two products, and shares
//! every position among 32 units, see [`rows`]: c, key and value are read once, m and three numbers a position written.
//!
//! Backward shares the positions again: c, key, value, dm and `plus` are read once, dm a second time from the nearest
//! cache, and dc, dkey and dvalue written. Four products give the gradients of the weights and of e. The places lie in
//! the order of their rows, so a row's places are a run. Chunks of [`CHUNK`] places are summed side by side, so one row
//! that every place names costs no more than many rows. A run that lies inside a chunk is added to the table at once;
//! of one that goes on over several chunks every chunk leaves its part, and one more launch adds those up. Where a run
//! is cut depends on the order alone, so a table of the batch's rows, whose ranks sort alike, has the same bits.

use cubecl::prelude::*;
use dormouse_reference::{DType, Result, Tensors};

use super::{FIT, Gather, Mix, STEM, Saved, Scatter, Sizes, Unmix, gate_of, place_at, row_of};
use crate::device::Device;
use crate::launch::Grid;
use crate::rows;
use crate::runs::{self, NONE};
use crate::runtime::Engine;
use crate::sigmoid::sigmoids;
use crate::tensor::{Floats, Words};

/// Places of a chunk, and columns that a cube sums at once.
const CHUNK: u32 = 32;

/// Chunks of a cube.
const CHUNKS: u32 = 4;

/// Places, and units, of a cube.
const PLACES: u32 = CHUNK * CHUNKS;

/// e = table[row]. One unit, one element: neighbours read neighbouring columns. `nan` is what a row outside the table
/// gives.
///
/// Mutants: 1 takes the next row.
#[cube(launch_unchecked)]
fn gather_kernel(
    rows: &Words,
    table: &Floats,
    e: &mut Floats,
    len: u32,
    table_rows: u32,
    width: u32,
    nan: f32,
    #[comptime] mutant: u32,
) {
    let i = ABSOLUTE_POS;
    let width = width as usize;
    if i < len as usize {
        let mut row = row_of(rows, i / width, table_rows);
        if comptime!(mutant == 1) {
            row = (row + 1) % table_rows;
        }
        let mut value = table.at(row as usize * width + i % width);
        if rows.at(i / width) >= table_rows {
            value = nan;
        }
        e.set(i, value);
    }
}

/// The fit of a position, and m. Some units share it.
///
/// Mutants: 2 misses the last column in the norm of the key, 3 is null (a renamed local), 4 takes the score itself for
/// its signed root.
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
    #[comptime] mutant: u32,
) {
    let (n, lane) = (rows::row(), rows::lane());
    let columns = width as usize;
    let lanes = comptime!(rows::LANES as usize);
    let mut shared = SharedMemory::<f32>::new(comptime!(rows::UNITS as usize));
    let here = n < positions as usize;
    let mut key_square = 0.0f32;
    let mut query_square = 0.0f32;
    let mut inner = 0.0f32;
    if here {
        for step in 0..columns.div_ceil(lanes) {
            let d = step * lanes + lane;
            if d < columns {
                let (query, here_key) = (c.at(n * columns + d), key.at(n * columns + d));
                let mut square = here_key * here_key;
                if comptime!(mutant == 2) {
                    if d == columns - 1 {
                        square = 0.0f32;
                    }
                }
                key_square += square;
                query_square += query * query;
                inner += here_key * query;
            }
        }
    }
    let size = f32::cast_from(width);
    let key_scale = 1.0f32 / (rows::sum(key_square, &mut shared) / size + eps).sqrt();
    let query_scale = 1.0f32 / (rows::sum(query_square, &mut shared) / size + eps).sqrt();
    let mut score = key_scale * query_scale * rows::sum(inner, &mut shared) / size.sqrt();
    if comptime!(mutant == 3) {
        let renamed = score;
        score = renamed;
    }
    let (open, _shut, _root) = gate_of(score, gate_eps);
    let mut gate = open;
    if comptime!(mutant == 4) {
        let (straight, _shut) = sigmoids(score);
        gate = straight;
    }
    if here {
        if lane == 0 {
            fit.set(n * FIT, key_scale);
            fit.set(n * FIT + 1, query_scale);
            fit.set(n * FIT + 2, score);
        }
        let mut values = Array::<f32>::new(comptime!(rows::AHEAD));
        for step in 0..columns.div_ceil(comptime!(rows::TOGETHER)) {
            let first = step * comptime!(rows::TOGETHER) + lane;
            rows::load(value, &mut values, n * columns, first, columns);
            #[unroll]
            for i in 0..comptime!(rows::AHEAD) {
                values[i] = gate * values[i];
            }
            rows::store(m, &values, n * columns, first, columns);
        }
    }
}

/// dvalue, dkey and dc of a position. Some units share it.
///
/// Mutants: 5 and 6 take the norm of the query and of the key for constant, 7 drops plus, 8 takes the gate for its
/// slope, 9 sends the value its gradient without the gate.
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
    #[comptime] mutant: u32,
) {
    let (n, lane) = (rows::row(), rows::lane());
    let columns = width as usize;
    let lanes = comptime!(rows::LANES as usize);
    let mut shared = SharedMemory::<f32>::new(comptime!(rows::UNITS as usize));
    let here = n < positions as usize;
    let mut product = 0.0f32;
    if here {
        for step in 0..columns.div_ceil(lanes) {
            let d = step * lanes + lane;
            if d < columns {
                product += dm.at(n * columns + d) * value.at(n * columns + d);
            }
        }
    }
    let dgate = rows::sum(product, &mut shared);
    if here {
        let key_scale = fit.at(n * FIT);
        let query_scale = fit.at(n * FIT + 1);
        let score = fit.at(n * FIT + 2);
        let (open, shut, root) = gate_of(score, gate_eps);
        let mut slope = open * shut;
        if comptime!(mutant == 8) {
            slope = open;
        }
        let mut gate = open;
        if comptime!(mutant == 9) {
            gate = 1.0f32;
        }
        let dscore = dgate * slope / (root + root);
        let size = f32::cast_from(width);
        let across = dscore * key_scale * query_scale / size.sqrt();
        let mut along_key = dscore * score * key_scale * key_scale / size;
        let mut along_query = dscore * score * query_scale * query_scale / size;
        if comptime!(mutant == 5) {
            along_query = 0.0f32;
        }
        if comptime!(mutant == 6) {
            along_key = 0.0f32;
        }
        let at = n * columns;
        let mut ups = Array::<f32>::new(comptime!(rows::AHEAD));
        let mut queries = Array::<f32>::new(comptime!(rows::AHEAD));
        let mut keys = Array::<f32>::new(comptime!(rows::AHEAD));
        let mut backs = Array::<f32>::new(comptime!(rows::AHEAD));
        for step in 0..columns.div_ceil(comptime!(rows::TOGETHER)) {
            let first = step * comptime!(rows::TOGETHER) + lane;
            rows::load(dm, &mut ups, at, first, columns);
            rows::load(c, &mut queries, at, first, columns);
            rows::load(key, &mut keys, at, first, columns);
            if comptime!(has_plus && mutant != 7) {
                rows::load(plus, &mut backs, at, first, columns);
            }
            #[unroll]
            for i in 0..comptime!(rows::AHEAD) {
                let (query, here_key) = (queries[i], keys[i]);
                let mut back = across * here_key - along_query * query;
                if comptime!(has_plus && mutant != 7) {
                    back += backs[i];
                }
                backs[i] = back;
                ups[i] = gate * ups[i];
                keys[i] = across * query - along_key * here_key;
            }
            rows::store(dvalue, &ups, at, first, columns);
            rows::store(dkey, &keys, at, first, columns);
            rows::store(dc, &backs, at, first, columns);
        }
    }
}

/// Sums the runs of some chunks of places, each first to last. The units of a chunk have a column each, and take the
/// next ones when they are done.
///
/// `partial` gets two rows a chunk: the sum of a run that began before the chunk, and that of one that begins in it and
/// goes on after it. `marks` gets the chunk's first row, and the row of the run that begins and goes on, or [`NONE`].
///
/// Mutants: 10 misses the last place of every run.
#[cube(launch_unchecked)]
fn runs_kernel(
    rows: &Words,
    order: &Words,
    de: &Floats,
    partial: &mut Floats,
    marks: &mut Words,
    dtable: &mut Floats,
    places: u32,
    table_rows: u32,
    width: u32,
    #[comptime] mutant: u32,
) {
    let unit = UNIT_POS as usize;
    let chunk = comptime!(CHUNK as usize);
    let (lane, unit_column) = (unit / chunk, unit % chunk);
    let (len, columns) = (places as usize, width as usize);
    let cube_first = CUBE_POS * comptime!(PLACES as usize);
    let mut place = SharedMemory::<u32>::new(comptime!(PLACES as usize));
    // The rows of the cube's places, between those of the places right before and right after.
    let mut row = SharedMemory::<u32>::new(comptime!(PLACES as usize + 2));
    let mut mine = comptime!(NONE).runtime();
    if cube_first + unit < len {
        let p = place_at(order, cube_first + unit, places);
        place[unit] = p;
        mine = row_of(rows, p as usize, table_rows);
    }
    row[unit + 1] = mine;
    if unit == 0 {
        let mut before = comptime!(NONE).runtime();
        if cube_first > 0 && cube_first <= len {
            before = row_of(rows, place_at(order, cube_first - 1, places) as usize, table_rows);
        }
        let mut after = comptime!(NONE).runtime();
        if cube_first + comptime!(PLACES as usize) < len {
            after = row_of(rows, place_at(order, cube_first + comptime!(PLACES as usize), places) as usize, table_rows);
        }
        row[0] = before;
        row[comptime!(PLACES as usize + 1)] = after;
    }
    sync_cube();
    let first = lane * chunk;
    let number = CUBE_POS * comptime!(CHUNKS as usize) + lane;
    let mut count = 0usize;
    if cube_first + first < len {
        count = len - cube_first - first;
        if count > chunk {
            count = chunk;
        }
    }
    // Whether the run of the chunk's first row began before the chunk.
    let begun = row[first] == row[first + 1];
    for step in 0..columns.div_ceil(chunk) {
        let column = step * chunk + unit_column;
        if column < columns {
            let mut sum = 0.0f32;
            let mut is_first_run = true;
            for i in 0..count {
                let at = first + i;
                let id = row[at + 1];
                let ends = row[at + 2] != id;
                let mut term = de.at(place[at] as usize * columns + column);
                if comptime!(mutant == 10) {
                    if ends {
                        term = 0.0f32;
                    }
                }
                sum += term;
                if ends || i + 1 == count {
                    if is_first_run && begun {
                        partial.set(2 * number * columns + column, sum);
                    } else if !ends {
                        partial.set((2 * number + 1) * columns + column, sum);
                    } else {
                        let to = id as usize * columns + column;
                        dtable.set(to, dtable.at(to) + sum);
                    }
                    sum = 0.0f32;
                    is_first_run = false;
                }
            }
        }
    }
    if unit_column == 0 && count > 0 {
        let last = row[first + count];
        let goes_on = row[first + count + 1] == last;
        let begun_before = begun && row[first + 1] == last;
        let mut mark = comptime!(NONE).runtime();
        if goes_on && !begun_before {
            mark = last;
        }
        marks.set(2 * number, row[first + 1]);
        marks.set(2 * number + 1, mark);
    }
}

/// Looks every row up.
pub(super) fn gather<R: Engine>(b: &Device<R>, call: &Gather<'_>) -> Result<()> {
    let Gather { rows, table, e, sizes } = *call;
    let bytes = rows.bytes() + table.bytes().min(e.bytes()) + e.bytes();
    let mutant = b.mutant(STEM);
    b.launch("engram::gather", Grid::units(e.len()), bytes, &[rows, table, e], |client, count, dim| {
        let (len, r, w) = (e.len() as u32, sizes.rows as u32, sizes.row_width as u32);
        let (rows, table, e) = (b.words(rows), b.floats(table), b.floats(e));
        // SAFETY: rows are below the table's whatever they hold; units past `len` do nothing.
        unsafe { gather_kernel::launch_unchecked::<R>(client, count, dim, rows, table, e, len, r, w, f32::NAN, mutant) }
    })
}

/// m and the fit of every position.
pub(super) fn mix<R: Engine>(b: &Device<R>, call: &Mix<'_>) -> Result<()> {
    let Mix { c, key, value, m, fit, sizes: Sizes { positions, width, eps, gate_eps, .. } } = *call;
    let uses = [c, key, value, m, fit];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    let mutant = b.mutant(STEM);
    b.launch("engram::forward", rows::cubes(positions), bytes, &uses, |client, count, dim| {
        let [c, key, value, m, fit] = uses.map(|t| b.floats(t));
        let (n, d) = (positions as u32, width as u32);
        // SAFETY: shapes were checked by the caller; units past the positions and columns touch nothing.
        unsafe {
            mix_kernel::launch_unchecked::<R>(client, count, dim, c, key, value, m, fit, n, d, eps, gate_eps, mutant)
        }
    })
}

/// dc, dkey and dvalue of every position.
pub(super) fn unmix<R: Engine>(b: &Device<R>, call: &Unmix<'_>) -> Result<()> {
    let Unmix { saved, dm, plus, dc, dkey, dvalue, sizes: Sizes { positions, width, gate_eps, .. } } = *call;
    let Saved { inputs, key, value, fit, .. } = saved;
    let uses = [&inputs.c, key, value, fit, dm, plus.unwrap_or(dm), dc, dkey, dvalue];
    let twice = if plus.is_some() { 0 } else { dm.bytes() };
    let bytes = uses.iter().map(|t| t.bytes()).sum::<u64>() - twice;
    let mutant = b.mutant(STEM);
    b.launch("engram::backward", rows::cubes(positions), bytes, &uses, |client, count, dim| {
        let [c, key, value, fit, dm, added, dc, dkey, dvalue] = uses.map(|t| b.floats(t));
        let (n, d, has_plus) = (positions as u32, width as u32, plus.is_some());
        // SAFETY: shapes were checked by the caller; units past the positions and columns touch nothing.
        unsafe {
            unmix_kernel::launch_unchecked::<R>(
                client, count, dim, c, key, value, fit, dm, added, dc, dkey, dvalue, n, d, gate_eps, has_plus, mutant,
            )
        }
    })
}

/// Adds the gradient of the table.
pub(super) fn scatter<R: Engine>(b: &Device<R>, call: &Scatter<'_>) -> Result<()> {
    let Scatter { rows, order, de, dtable, sizes } = *call;
    let Sizes { rows: table_rows, row_width: width, .. } = sizes;
    let places = sizes.places();
    let cubes = places.div_ceil(PLACES as usize);
    let chunks = places.div_ceil(CHUNK as usize);
    let partial = b.float_scratch(&[chunks, 2, width])?;
    let marks = b.scratch(&[chunks, 2], DType::U32)?;
    let mutant = b.mutant(STEM);
    let uses = [rows, order, de, &partial, &marks, dtable];
    let bytes = rows.bytes() + order.bytes() + de.bytes() + marks.bytes() + 2 * dtable.bytes().min(de.bytes());
    b.launch("engram::runs", Grid::cubes(cubes, PLACES), bytes, &uses, |client, count, dim| {
        let (n, r, w) = (places as u32, table_rows as u32, width as u32);
        let [rows, order, marks] = [rows, order, &marks].map(|x| b.words(x));
        let [de, partial, dtable] = [de, &partial, dtable].map(|x| b.floats(x));
        // SAFETY: places and rows are in range whatever the ids are, `partial` and `marks` have two rows a chunk; a row
        // of the table belongs to the one chunk that has all of its run, if `order` sorts them.
        unsafe {
            runs_kernel::launch_unchecked::<R>(
                client, count, dim, rows, order, de, partial, marks, dtable, n, r, w, mutant,
            )
        }
    })?;
    // Mutants: 11 drops the parts of chunks that a run does not begin in, 12 drops the one where it does.
    let fault = match mutant {
        11 => runs::OTHERS_DROPPED,
        12 => runs::FIRST_DROPPED,
        _ => runs::NO_FAULT,
    };
    runs::add(b, "engram::long_runs", &partial, &marks, dtable, fault)
}
