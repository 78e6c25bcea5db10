//! Reductions inside a cube, in one fixed order: how fused kernels share a row among units.
//!
//! A cube of `LANES` by `ROWS` units works on `ROWS` rows at once; the units of a row lie side by side, so neighbours
//! read neighbouring elements. No plane operation is used, since planes have 32 units on one runtime and 8 on another.

use cubecl::prelude::*;

/// Units that share a row.
pub(crate) const LANES: u32 = 32;

/// Rows of a cube.
pub(crate) const ROWS: u32 = 4;

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
