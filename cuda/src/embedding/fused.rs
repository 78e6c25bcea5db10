//! Arm `fused`. Forward is one launch in which 32 units share a row.
//!
//! Backward first brings the tokens into the order of their rows, see [`order`]. A row's tokens are then a run of
//! places. Chunks of places are summed side by side, so one id that every token has costs no more than many ids. A run
//! that lies inside a chunk is added to the table at once; of one that goes on over several chunks every chunk leaves
//! its part, and one more launch adds those up.

use cubecl::prelude::*;
use dormouse_reference::{DType, Result, Tensors};

use super::{Backward, Forward, order, row_of};
use crate::device::Device;
use crate::launch::Grid;
use crate::rows;
use crate::runs::{self, NONE};
use crate::runtime::Engine;
use crate::tensor::{Floats, Words};

/// The largest number of places in a chunk, and columns of a cube.
const CHUNK: u32 = 128;

/// x = table[id]. Some units share a row. `nan` is what an id outside the table gives.
///
/// Mutants: 1 takes the next row, 2 leaves the last column of a row as the first, 3 is null (a renamed local).
#[cube(launch_unchecked)]
fn forward_kernel(
    ids: &Words,
    table: &Floats,
    x: &mut Floats,
    tokens: u32,
    vocab: u32,
    width: u32,
    nan: f32,
    #[comptime] mutant: u32,
) {
    let (n, lane) = (rows::row(), rows::lane());
    let width = width as usize;
    let lanes = comptime!(rows::LANES as usize);
    if n < tokens as usize {
        let outside = ids.at(n) >= vocab;
        let mut row = row_of(ids, n, vocab);
        if comptime!(mutant == 1) {
            row = (row + 1) % vocab;
        }
        if comptime!(mutant == 3) {
            let renamed = row_of(ids, n, vocab);
            row = renamed;
        }
        for step in 0..width.div_ceil(lanes) {
            let d = step * lanes + lane;
            if d < width {
                let mut from = d;
                if comptime!(mutant == 2) {
                    if d == width - 1 {
                        from = 0;
                    }
                }
                let mut value = table.at(row as usize * width + from);
                if outside {
                    value = nan;
                }
                x.set(n * width + d, value);
            }
        }
    }
}

/// Sums the runs of a chunk of places, each first to last. A cube has one chunk and as many columns as units.
///
/// `partial` gets two rows a chunk: the sum of a run that began before the chunk, and that of one that begins in it and
/// goes on after it. `marks` gets the chunk's first row, and the row of the run that begins and goes on, or [`NONE`].
///
/// Mutants: 4 misses the last token of every run.
#[cube(launch_unchecked)]
fn runs_kernel(
    ids: &Words,
    order: &Words,
    dx: &Floats,
    partial: &mut Floats,
    marks: &mut Words,
    dtable: &mut Floats,
    tokens: u32,
    vocab: u32,
    width: u32,
    chunk: u32,
    #[comptime] mutant: u32,
) {
    let unit = UNIT_POS as usize;
    let (tokens, width, chunk) = (tokens as usize, width as usize, chunk as usize);
    let across = width.div_ceil(comptime!(CHUNK as usize));
    let number = CUBE_POS / across;
    let column = CUBE_POS % across * comptime!(CHUNK as usize) + unit;
    let first = number * chunk;
    let mut count = 0usize;
    if first < tokens {
        count = tokens - first;
        if count > chunk {
            count = chunk;
        }
    }
    let mut token = SharedMemory::<u32>::new(comptime!(CHUNK as usize));
    let mut row = SharedMemory::<u32>::new(comptime!(CHUNK as usize));
    let mut ends = SharedMemory::<u32>::new(comptime!(CHUNK as usize));
    // The rows of the places right before and right after the chunk.
    let mut edges = SharedMemory::<u32>::new(2usize);
    if unit < count {
        let n = order.at(first + unit);
        token[unit] = n;
        row[unit] = row_of(ids, n as usize, vocab);
    }
    if unit == 0 {
        let mut before = comptime!(NONE).runtime();
        let mut after = comptime!(NONE).runtime();
        if count > 0 {
            if first > 0 {
                before = row_of(ids, order.at(first - 1) as usize, vocab);
            }
            if first + count < tokens {
                after = row_of(ids, order.at(first + count) as usize, vocab);
            }
        }
        edges[0] = before;
        edges[1] = after;
    }
    sync_cube();
    if unit < count {
        let mut end = count;
        for other in unit + 1..count {
            if row[other] != row[unit] && other < end {
                end = other;
            }
        }
        ends[unit] = end as u32;
    }
    sync_cube();
    let mut goes_on = comptime!(NONE).runtime();
    let mut at = 0usize;
    while at < count {
        let end = ends[at] as usize;
        let id = row[at];
        let begun_before = at == 0 && edges[0] == id;
        let goes_on_after = end == count && edges[1] == id;
        if goes_on_after && !begun_before {
            goes_on = id;
        }
        if column < width {
            let mut stop = end;
            if comptime!(mutant == 4) {
                stop = end - 1;
            }
            let mut sum = 0.0f32;
            for i in at..stop {
                sum += dx.at(token[i] as usize * width + column);
            }
            if begun_before {
                partial.set(2 * number * width + column, sum);
            } else if goes_on_after {
                partial.set((2 * number + 1) * width + column, sum);
            } else {
                let to = id as usize * width + column;
                dtable.set(to, dtable.at(to) + sum);
            }
        }
        at = end;
    }
    if unit == 0 && count > 0 && CUBE_POS % across == 0 {
        marks.set(2 * number, row[0]);
        marks.set(2 * number + 1, goes_on);
    }
}

/// Looks every id up.
pub(super) fn forward<R: Engine>(b: &Device<R>, call: &Forward<'_>) -> Result<()> {
    let Forward { ids, table, x, vocab, width } = *call;
    let bytes = ids.bytes() + table.bytes().min(x.bytes()) + x.bytes();
    let mutant = b.mutant(super::STEM);
    b.launch("embedding::forward", rows::cubes(ids.len()), bytes, &[ids, table, x], |client, count, dim| {
        let (n, v, d) = (ids.len() as u32, vocab as u32, width as u32);
        let (ids, table, x) = (b.words(ids), b.floats(table), b.floats(x));
        // SAFETY: rows are below vocab whatever the ids are; units past the tokens and columns touch nothing.
        unsafe { forward_kernel::launch_unchecked::<R>(client, count, dim, ids, table, x, n, v, d, f32::NAN, mutant) }
    })
}

/// Adds the gradient of the table.
pub(super) fn backward<R: Engine>(b: &Device<R>, call: &Backward<'_>) -> Result<()> {
    let Backward { ids, dx, dtable, vocab, width } = *call;
    let tokens = ids.len();
    if tokens == 0 {
        return Ok(());
    }
    let mutant = b.mutant(super::STEM);
    let order = order::by_row(b, ids, vocab)?;
    let chunk = chunk(tokens);
    let chunks = tokens.div_ceil(chunk);
    let partial = b.float_scratch(&[chunks, 2, width])?;
    let marks = b.scratch(&[chunks, 2], DType::U32)?;
    let grid = Grid::cubes(chunks * width.div_ceil(CHUNK as usize), CHUNK);
    let uses = [ids, &order, dx, &partial, &marks, dtable];
    let bytes = ids.bytes() + order.bytes() + dx.bytes() + marks.bytes() + 2 * dtable.bytes().min(dx.bytes());
    b.launch("embedding::runs", grid, bytes, &uses, |client, count, dim| {
        let (n, v, d, c) = (tokens as u32, vocab as u32, width as u32, chunk as u32);
        let (ids, order, marks) = (b.words(ids), b.words(&order), b.words(&marks));
        let [dx, partial, dtable] = [dx, &partial, dtable].map(|x| b.floats(x));
        // SAFETY: `order` holds numbers of tokens, rows are below vocab, `partial` and `marks` have two rows a chunk;
        // a row of the table belongs to the one cube that has all of its run.
        unsafe {
            runs_kernel::launch_unchecked::<R>(
                client, count, dim, ids, order, dx, partial, marks, dtable, n, v, d, c, mutant,
            )
        }
    })?;
    // Mutants: 5 drops the parts of chunks that a run does not begin in, 6 drops the one where it does.
    let fault = match mutant {
        5 => runs::OTHERS_DROPPED,
        6 => runs::FIRST_DROPPED,
        _ => runs::NO_FAULT,
    };
    runs::add(b, "embedding::long_runs", &partial, &marks, dtable, fault)
}

/// Places of a chunk: enough chunks for a small batch to fill the device, few enough parts of a run for a large one.
fn chunk(tokens: usize) -> usize {
    if tokens <= 16384 { 32 } else { CHUNK as usize }
}
