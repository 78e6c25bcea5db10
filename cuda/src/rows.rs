//! Reductions inside a cube, in one fixed order: how fused kernels share a row among units.
//!
//! A cube of `LANES` by `ROWS` units works on `ROWS` rows at once; the units of a row lie side by side, so neighbours
//! read neighbouring elements. No plane operation is used, since planes have 32 units on one runtime and 8 on another.

use cubecl::prelude::*;

use crate::tensor::Floats;

/// Units that share a row.
pub(crate) const LANES: u32 = 32;

/// Rows of a cube: with fewer, starting cubes takes longer than short rows do.
pub(crate) const ROWS: u32 = 8;

/// Units of a cube of rows.
pub(crate) const UNITS: u32 = LANES * ROWS;

/// Cubes that cover `rows` rows.
pub(crate) fn cubes(rows: usize) -> crate::launch::Grid {
    crate::launch::Grid::cubes(rows.div_ceil(ROWS as usize), UNITS)
}

/// The row of this unit; may lie past the last.
#[cube]
pub(crate) fn row() -> usize {
    CUBE_POS * comptime!(ROWS as usize) + UNIT_POS as usize / comptime!(LANES as usize)
}

/// The place of this unit in its row.
#[cube]
pub(crate) fn lane() -> usize {
    UNIT_POS as usize % comptime!(LANES as usize)
}

/// Columns that a unit loads at a time: with one load under way for each unit a device waits more than it reads.
pub(crate) const AHEAD: usize = 4;

/// Columns that the units of a row load at a time.
pub(crate) const TOGETHER: usize = AHEAD * LANES as usize;

/// This unit's columns of a row that starts at element `at` and is not empty: column `first` and every [`LANES`]-th after it, zeros past
/// the width.
#[cube]
pub(crate) fn load(x: &Floats, values: &mut Array<f32>, at: usize, first: usize, width: usize) {
    #[unroll]
    for i in 0..comptime!(AHEAD) {
        let d = first + comptime!(i * LANES as usize);
        // Not guarded by a branch, so that all of them are under way together; every row has a first column.
        let value = x.at(at + select(d < width, d, 0usize));
        values[i] = select(d < width, value, 0.0f32);
    }
}

/// Writes what [`load`] would read.
#[cube]
pub(crate) fn store(x: &mut Floats, values: &Array<f32>, at: usize, first: usize, width: usize) {
    #[unroll]
    for i in 0..comptime!(AHEAD) {
        let d = first + comptime!(i * LANES as usize);
        if d < width {
            x.set(at + d, values[i]);
        }
    }
}

/// The sum of `value` over the units of this unit's row, given to all of them. Every unit of the cube must call it.
/// `shared` has [`UNITS`] elements.
#[cube]
pub(crate) fn sum(value: f32, shared: &mut SharedMemory<f32>) -> f32 {
    let me = UNIT_POS as usize;
    shared[me] = value;
    sync_cube();
    #[unroll]
    for level in 0..5u32 {
        let half = comptime!(16usize >> level as usize);
        if lane() < half {
            shared[me] = shared[me] + shared[me + half];
        }
        sync_cube();
    }
    let total = shared[me - lane()];
    // The next call writes the same memory.
    sync_cube();
    total
}
