//! Runs of places with one row that go on over several chunks: how the gradients of a table's rows are summed without
//! atomics however many places name one row.
//!
//! The operation sums chunks of places side by side, in the order of their rows. A run inside a chunk it adds at once. Of
//! one that goes on, every chunk leaves its part, and the launch here adds those up.

use cubecl::prelude::*;
use dormouse_reference::Result;

use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor, Words};

/// Marks the absence of a row. Rows are far below it.
pub(crate) const NONE: u32 = u32::MAX;

/// Columns of a cube, and how many units share a column.
const COLUMNS: u32 = 32;
const LANES: u32 = 8;

/// Faults of [`add`], which the operations number for themselves.
pub(crate) const NO_FAULT: u32 = 0;
/// Drops the parts of chunks that the run does not begin in.
pub(crate) const OTHERS_DROPPED: u32 = 1;
/// Drops the part of the chunk where the run begins.
pub(crate) const FIRST_DROPPED: u32 = 2;

/// Adds up the parts of a run that goes on over several chunks. A cube has the chunk where the run begins and a block
/// of columns; each of its lanes adds every [`LANES`]-th part, first to last, and the first lane adds up the lanes.
///
/// Mutants: [`OTHERS_DROPPED`] and [`FIRST_DROPPED`].
#[cube(launch_unchecked)]
fn add_kernel(partial: &Floats, marks: &Words, dtable: &mut Floats, chunks: u32, width: u32, #[comptime] fault: u32) {
    let (chunks, width) = (chunks as usize, width as usize);
    let columns = comptime!(COLUMNS as usize);
    let lanes = comptime!(LANES as usize);
    let (x_unit, lane) = (UNIT_POS as usize % columns, UNIT_POS as usize / columns);
    let across = width.div_ceil(columns);
    let number = CUBE_POS / across;
    let column = CUBE_POS % across * columns + x_unit;
    let mut shared = SharedMemory::<f32>::new(comptime!((COLUMNS * LANES) as usize));
    let mut id = comptime!(NONE).runtime();
    if number < chunks && column < width {
        id = marks.at(2 * number + 1);
    }
    let here = id != comptime!(NONE);
    let mut sum = 0.0f32;
    if here {
        let mut other = number + 1 + lane;
        let mut more = other < chunks;
        while more {
            more = marks.at(2 * other) == id;
            if more {
                if comptime!(fault != OTHERS_DROPPED) {
                    sum += partial.at(2 * other * width + column);
                }
                other += lanes;
                more = other < chunks;
            }
        }
    }
    shared[UNIT_POS as usize] = sum;
    sync_cube();
    if here && lane == 0 {
        let mut all = partial.at((2 * number + 1) * width + column);
        if comptime!(fault == FIRST_DROPPED) {
            all = 0.0f32;
        }
        for other in 0..lanes {
            all += shared[other * columns + x_unit];
        }
        let to = id as usize * width + column;
        dtable.set(to, dtable.at(to) + all);
    }
}

/// Adds the runs that go on to `dtable`, `[R, W]`.
///
/// `partial`, `[chunks, 2, W]`, has for each chunk the sum of a run that began before it, and that of one that begins in it
/// and goes on after it. `marks`, `[chunks, 2]`, has the chunk's first row, and the row of the run that begins and goes on,
/// or [`NONE`].
pub(crate) fn add<R: Engine>(
    b: &Device<R>,
    name: &'static str,
    partial: &Tensor,
    marks: &Tensor,
    dtable: &Tensor,
    fault: u32,
) -> Result<()> {
    let (chunks, width) = (partial.shape()[0], partial.shape()[2]);
    if chunks == 1 {
        return Ok(());
    }
    let grid = Grid::cubes(chunks * width.div_ceil(COLUMNS as usize), COLUMNS * LANES);
    let bytes = marks.bytes() + partial.bytes();
    b.launch(name, grid, bytes, &[partial, marks, dtable], |client, count, dim| {
        let (partial, marks, dtable) = (b.floats(partial), b.words(marks), b.floats(dtable));
        let (c, w) = (chunks as u32, width as u32);
        // SAFETY: a chunk whose first row is that of a run begun before it has that run's part in `partial`; rows are
        // below the table's.
        unsafe { add_kernel::launch_unchecked::<R>(client, count, dim, partial, marks, dtable, c, w, fault) }
    })
}
