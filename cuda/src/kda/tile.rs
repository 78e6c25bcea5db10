//! Products of tiles in shared memory, with the result spread over the units of a cube.
//!
//! All matrix products of the fused kernels go through [`multiply_add`], and all knowledge of which unit holds which
//! element through [`row`] and [`column`]. A variant that uses tensor cores replaces these three.

use cubecl::prelude::*;

use super::{load_or_zero, token_at};
use crate::tensor::Floats;

/// A result of `rows` by `columns`, `rows * columns / units` elements a unit: neighbouring rows of one column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Tile {
    pub rows: usize,
    pub columns: usize,
    pub units: usize,
}

impl Tile {
    /// Elements that a unit holds. The units must divide the tile evenly, and a column's rows.
    pub const fn elements(self) -> usize {
        assert!(self.units.is_multiple_of(self.columns) && (self.rows * self.columns).is_multiple_of(self.units));
        self.rows * self.columns / self.units
    }
}

/// The row of element `e` of this unit.
#[cube]
pub(crate) fn row(e: usize, #[comptime] tile: Tile) -> usize {
    UNIT_POS as usize / comptime!(tile.columns) * comptime!(tile.elements()) + e
}

/// The column of this unit's elements.
#[cube]
pub(crate) fn column(#[comptime] tile: Tile) -> usize {
    UNIT_POS as usize % comptime!(tile.columns)
}

/// Sets this unit's elements to zero.
#[cube]
pub(crate) fn clear(sum: &mut Array<f32>, #[comptime] tile: Tile) {
    #[unroll]
    for e in 0..comptime!(tile.elements()) {
        sum[e] = 0.0f32;
    }
}

/// How a matrix lies in shared memory: element (x, y) at `x * first + y * second`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Strides {
    pub first: usize,
    pub second: usize,
}

/// sum += A B over `inner`, A `[rows, inner]` from `a_at` on, B `[inner, columns]` from `b_at` on.
///
/// `inner` is how much of the tiles is in use, a number of the launch and not of the compilation: a software driver
/// unrolls loops that it knows the length of, and then takes half a minute a kernel. What lies behind is zeros, so a
/// variant may as well multiply whole tiles.
#[cube]
pub(crate) fn multiply_add(
    sum: &mut Array<f32>,
    a: &SharedMemory<f32>,
    a_at: usize,
    #[comptime] a_strides: Strides,
    b: &SharedMemory<f32>,
    b_at: usize,
    #[comptime] b_strides: Strides,
    inner: usize,
    #[comptime] tile: Tile,
) {
    let a_at = a_at + row(0usize, tile) * comptime!(a_strides.first);
    let b_at = b_at + column(tile) * comptime!(b_strides.second);
    for n in 0..inner {
        let y = b[b_at + n * comptime!(b_strides.first)];
        #[unroll]
        for e in 0..comptime!(tile.elements()) {
            sum[e] += a[a_at + comptime!(e * a_strides.first) + n * comptime!(a_strides.second)] * y;
        }
    }
}

/// Copies tokens `start..start + rows` and channels `first..first + columns` of a `[B, T, H, width]` tensor into shared
/// memory from `into_at` on, with zeros for tokens and channels that do not exist.
#[cube]
pub(crate) fn load(
    x: &Floats,
    into: &mut SharedMemory<f32>,
    into_at: usize,
    chain: usize,
    start: usize,
    first: usize,
    time: usize,
    heads: usize,
    width: usize,
    #[comptime] part: Part,
) {
    for n in 0..comptime!(part.per_unit()) {
        let i = part_row(n, part);
        let c = part_column(n, part);
        if i < comptime!(part.rows) {
            let there = start + i < time && first + c < width;
            let at = token_at(chain, start + i, time, heads, width) + first + c;
            into[into_at + i * comptime!(part.stride) + c] = load_or_zero(x, at, there);
        }
    }
}

/// A tile in shared memory, dealt out to the units element by element for work that is no product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Part {
    pub rows: usize,
    pub columns: usize,
    /// From one row to the next; more than `columns` where a column is read by neighbouring units.
    pub stride: usize,
    pub units: usize,
}

impl Part {
    /// Elements of a unit, rounded up: rows past the last are to be skipped.
    pub const fn per_unit(self) -> usize {
        (self.rows * self.columns).div_ceil(self.units)
    }

    /// Elements that the tile takes.
    pub const fn len(self) -> usize {
        self.rows * self.stride
    }
}

/// The row of this unit's element `n`; may be past the last one.
#[cube]
pub(crate) fn part_row(n: usize, #[comptime] part: Part) -> usize {
    (n * comptime!(part.units) + UNIT_POS as usize) / comptime!(part.columns)
}

/// The column of this unit's element `n`.
#[cube]
pub(crate) fn part_column(n: usize, #[comptime] part: Part) -> usize {
    (n * comptime!(part.units) + UNIT_POS as usize) % comptime!(part.columns)
}

/// e^(g_from + .. + g_(to-1)) of one channel: 1 where there is nothing to add up.
#[cube]
pub(crate) fn decay(
    gate: &SharedMemory<f32>,
    from: usize,
    to: usize,
    channel: usize,
    #[comptime] stride: usize,
) -> f32 {
    let mut sum = 0.0f32;
    for i in from..to {
        sum += gate[i * stride + channel];
    }
    sum.exp()
}

/// Copies P or T of one chunk into shared memory.
#[cube]
pub(crate) fn load_pairs(x: &Floats, into: &mut SharedMemory<f32>, number: usize, #[comptime] part: Part) {
    for n in 0..comptime!(part.per_unit()) {
        let i = part_row(n, part);
        let j = part_column(n, part);
        into[i * comptime!(part.stride) + j] = x.at((number * comptime!(part.rows) + i) * comptime!(part.columns) + j);
    }
}

/// Copies rows and columns of the state that starts at `at`, from `first_row` and `first_column` on, into shared memory
/// from `into_at` on, with zeros past the state's edges.
#[cube]
pub(crate) fn load_state(
    x: &Floats,
    into: &mut SharedMemory<f32>,
    into_at: usize,
    at: usize,
    first_row: usize,
    first_column: usize,
    key: usize,
    value: usize,
    #[comptime] part: Part,
) {
    for n in 0..comptime!(part.per_unit()) {
        let r = part_row(n, part);
        let c = first_row + r;
        let j = first_column + part_column(n, part);
        if r < comptime!(part.rows) {
            let loaded = load_or_zero(x, at + c * value + j, c < key && j < value);
            into[into_at + r * comptime!(part.stride) + part_column(n, part)] = loaded;
        }
    }
}

/// The reverse of [`load_state`], for all rows.
#[cube]
pub(crate) fn store_state(
    from: &SharedMemory<f32>,
    x: &mut Floats,
    at: usize,
    first: usize,
    key: usize,
    value: usize,
    #[comptime] part: Part,
) {
    for n in 0..comptime!(part.per_unit()) {
        let c = part_row(n, part);
        let j = first + part_column(n, part);
        if c < key && j < value {
            x.set(at + c * value + j, from[c * comptime!(part.stride) + part_column(n, part)]);
        }
    }
}
