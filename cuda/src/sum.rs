//! Sums over rows in one fixed order, without atomics: how a parameter's gradient is reduced over tokens.
//!
//! Blocks of [`BLOCK`] rows are added first to last, then blocks of their sums, until one row is left, which is added
//! to what the destination holds. The order depends on the number of rows only.

use cubecl::prelude::*;
use dormouse_reference::Result;

use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor};

/// Rows that one unit adds up.
pub(crate) const BLOCK: usize = 64;

/// One unit adds the rows of one block in one column, first to last.
#[cube(launch_unchecked)]
fn block_sums_kernel(x: &Floats, out: &mut Floats, rows: u32, width: u32) {
    let i = ABSOLUTE_POS;
    let (rows, width) = (rows as usize, width as usize);
    if i < rows.div_ceil(BLOCK) * width {
        let first = i / width * BLOCK;
        let mut last = first + BLOCK;
        if last > rows {
            last = rows;
        }
        let mut sum = 0.0f32;
        for n in first..last {
            sum += x.at(n * width + i % width);
        }
        out.set(i, sum);
    }
}

/// One unit adds one element.
#[cube(launch_unchecked)]
fn add_kernel(x: &Floats, into: &mut Floats, len: u32) {
    let i = ABSOLUTE_POS;
    if i < len as usize {
        into.set(i, into.at(i) + x.at(i));
    }
}

/// Adds `x` to `into`, element by element.
pub(crate) fn add<R: Engine>(b: &Device<R>, x: &Tensor, into: &Tensor) -> Result<()> {
    b.launch("sum::add", Grid::units(into.len()), 3 * into.bytes(), &[x, into], |client, count, dim| {
        // SAFETY: both have `len` elements.
        unsafe { add_kernel::launch_unchecked::<R>(client, count, dim, b.floats(x), b.floats(into), into.len() as u32) }
    })
}

/// Adds the sum of the rows of `x` (`rows` by `width`) to `into`.
pub(crate) fn add_rows<R: Engine>(b: &Device<R>, x: &Tensor, rows: usize, width: usize, into: &Tensor) -> Result<()> {
    let (mut x, mut rows) = (x.clone(), rows);
    while rows > 1 {
        let blocks = rows.div_ceil(BLOCK);
        let out = b.float_scratch(&[blocks, width])?;
        let bytes = x.bytes() + out.bytes();
        b.launch("sum::rows", Grid::units(out.len()), bytes, &[&x, &out], |client, count, dim| {
            let (n, d) = (rows as u32, width as u32);
            // SAFETY: `x` has `rows` by `width` elements, `out` one row a block.
            unsafe { block_sums_kernel::launch_unchecked::<R>(client, count, dim, b.floats(&x), b.floats(&out), n, d) }
        })?;
        (x, rows) = (out, blocks);
    }
    // No rows add nothing.
    if rows == 1 { add(b, &x, into) } else { Ok(()) }
}

/// Columns and row lanes of a cube of [`partials_kernel`].
const COLUMNS: u32 = 32;
const LANES: u32 = 8;

/// Adds the rows of `x` to `into`, and with `two` those of `other` to `other_into`.
#[cube(launch_unchecked)]
fn partials_kernel(
    x: &Floats,
    other: &Floats,
    into: &mut Floats,
    other_into: &mut Floats,
    rows: u32,
    width: u32,
    #[comptime] two: bool,
) {
    let (rows, width) = (rows as usize, width as usize);
    let tiles = width.div_ceil(comptime!(COLUMNS as usize));
    if comptime!(two) {
        // All units of a cube agree.
        if CUBE_POS < tiles {
            add_columns(x, into, CUBE_POS, rows, width);
        } else {
            add_columns(other, other_into, CUBE_POS - tiles, rows, width);
        }
    } else {
        add_columns(x, into, CUBE_POS, rows, width);
    }
}

/// A cube has a block of columns; each of its lanes adds every `LANES`-th row, first to last, and the first lane adds up
/// the lanes.
#[cube]
fn add_columns(x: &Floats, into: &mut Floats, tile: usize, rows: usize, width: usize) {
    let columns = comptime!(COLUMNS as usize);
    let lanes = comptime!(LANES as usize);
    let (x_unit, lane) = (UNIT_POS as usize % columns, UNIT_POS as usize / columns);
    let column = tile * columns + x_unit;
    let mut shared = SharedMemory::<f32>::new(comptime!((COLUMNS * LANES) as usize));
    let mut total = 0.0f32;
    if column < width {
        for step in 0..rows.div_ceil(lanes) {
            let n = step * lanes + lane;
            if n < rows {
                total += x.at(n * width + column);
            }
        }
    }
    shared[UNIT_POS as usize] = total;
    sync_cube();
    if lane == 0 && column < width {
        let mut all = into.at(column);
        for other in 0..lanes {
            all += shared[other * columns + x_unit];
        }
        into.set(column, all);
    }
}

/// Adds the rows of `x` (`rows` by `width`, at most some hundreds of rows) to `into` in one launch: the end of a fused
/// reduction whose kernel left one row of partial sums a block.
pub(crate) fn add_partials<R: Engine>(
    b: &Device<R>,
    x: &Tensor,
    rows: usize,
    width: usize,
    into: &Tensor,
) -> Result<()> {
    launch_partials(b, [(x, into), (x, into)], rows, width, false)
}

/// [`add_partials`] of two, in one launch.
pub(crate) fn add_two_partials<R: Engine>(
    b: &Device<R>,
    pairs: [(&Tensor, &Tensor); 2],
    rows: usize,
    width: usize,
) -> Result<()> {
    launch_partials(b, pairs, rows, width, true)
}

fn launch_partials<R: Engine>(
    b: &Device<R>,
    [(x, into), (other, other_into)]: [(&Tensor, &Tensor); 2],
    rows: usize,
    width: usize,
    two: bool,
) -> Result<()> {
    if rows == 0 {
        return Ok(());
    }
    let times = if two { 2 } else { 1 };
    let grid = Grid::cubes(times * width.div_ceil(COLUMNS as usize), COLUMNS * LANES);
    let bytes = times as u64 * (x.bytes() + 2 * into.bytes());
    let uses = [x, other, into, other_into];
    b.launch("sum::partials", grid, bytes, &uses, |client, count, dim| {
        let [x, other, into, other_into] = uses.map(|tensor| b.floats(tensor));
        let (n, d) = (rows as u32, width as u32);
        // SAFETY: what is added has `rows` by `width` elements, what it is added to has `width`.
        unsafe { partials_kernel::launch_unchecked::<R>(client, count, dim, x, other, into, other_into, n, d, two) }
    })
}
