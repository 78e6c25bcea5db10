//! The iteration for k <= [`LARGEST_K`]: two launches an iteration, for matrices of all shapes together.
//!
//! | launch | reads | writes |
//! |---|---|---|
//! | polynomial | the blocks' shares of A = X^T X | P = a I + b A + c A^2, a tile of 32 by 32 a cube |
//! | step | X, P | X P in place of X, a block of rows a cube; its share of the next A |
//!
//! The first shares come with X and not to scale; the first polynomial divides A by |X|_F^2 and itself by |X|_F, so X
//! is never normalised on its own. The last step leaves the norms of the rows in place of A.
//!
//! A step holds P and a tile of rows in shared memory, 16 KiB each, which every runtime has. Beyond k = 64 (up to 96) P
//! comes in slabs and the tile has half as many rows. A unit computes 4 by 4 elements (2 by 6 of a product and 6 by 6 of A
//! beyond), whose factors are neighbours in shared memory and are read four at a time. X is read and written once an
//! iteration; shares are k^2 numbers a block, written once and read once for each tile of a row of P and of a column.

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::fused::{UNITS, scale_of, square_of};
use super::table::{Block, Blocks, Stack, Table, block_of, tile_of};
use super::{CUBIC, LINEAR, QUINTIC};
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::scale::inverse_of;
use crate::tensor::{Floats, Tensor};

/// The largest k: 6 by 6 elements of A a unit.
pub(super) const LARGEST_K: usize = 96;

/// The largest k for which a unit has 4 by 4 elements of A.
const NARROW: usize = 64;

/// Elements of a tile of rows of X, and of P or a slab of it, in shared memory.
const HELD: usize = 4096;

/// Rows of a block, where that makes [`MOST`] blocks or fewer: two tiles.
const ROWS: usize = 128;
const ROWS_OF_WIDE: usize = 64;

/// The most blocks of a matrix.
const MOST: usize = 32;

/// Rows and columns of P that a cube computes, 2 by 2 elements a unit, and the depth of its tiles.
pub(super) const SIDE: usize = 32;

/// How the rows of a matrix are cut.
pub(super) fn blocks(n: usize, k: usize) -> Blocks {
    let (rows, step) = if k <= NARROW { (ROWS, rows_of_tile(4)) } else { (ROWS_OF_WIDE, rows_of_tile(6)) };
    Blocks::of(n, rows, step, MOST)
}

/// Rows of a tile, by the columns of a unit: 64 of 64 columns, 32 of 96.
const fn rows_of_tile(columns: usize) -> usize {
    if columns == 4 { 64 } else { 32 }
}

/// Rows of P in shared memory at a time.
const fn depth_of(columns: usize) -> usize {
    if columns == 4 { 64 } else { 32 }
}

/// The tile of rows from `top` to `end` of the matrix at `from`, times `factor`; zeros around it. Waits until all is there.
#[cube]
fn load_rows(
    x: &Floats,
    tile: &mut SharedMemory<f32>,
    from: usize,
    top: usize,
    end: usize,
    k: usize,
    factor: f32,
    #[comptime] columns: usize,
) {
    let side = comptime!(16 * columns);
    let units = comptime!(UNITS as usize);
    let me = UNIT_POS as usize;
    #[unroll]
    for part in 0..comptime!(rows_of_tile(columns) * 16 * columns / UNITS as usize) {
        let at = part * units + me;
        let (r, c) = (at / side, at % side);
        let mut value = 0.0f32;
        if top + r < end && c < k {
            value = x.at(from + (top + r) * k + c) * factor;
        }
        tile[at] = value;
    }
    sync_cube();
}

/// Adds the products of the columns of a tile, `columns` by `columns` of them a unit.
#[cube]
fn add_products(tile: &SharedMemory<f32>, rows: usize, sums: &mut Array<f32>, #[comptime] columns: usize) {
    let side = comptime!(16 * columns);
    let me = UNIT_POS as usize;
    let top = me / 16 * columns;
    let left = me % 16 * columns;
    for r in 0..rows {
        let mut lefts = Array::<f32>::new(columns);
        let mut rights = Array::<f32>::new(columns);
        #[unroll]
        for s in 0..columns {
            lefts[s] = tile[r * side + top + s];
            rights[s] = tile[r * side + left + s];
        }
        #[unroll]
        for s in 0..comptime!(columns * columns) {
            sums[s] += lefts[comptime!(s / columns)] * rights[comptime!(s % columns)];
        }
    }
}

/// Writes a block's share of A.
#[cube]
fn write_share(shares: &mut Floats, block: &Block, sums: &Array<f32>, #[comptime] columns: usize) {
    let me = UNIT_POS as usize;
    let k = block.k;
    let at = CUBE_POS * block.widest * block.widest;
    #[unroll]
    for s in 0..comptime!(columns * columns) {
        let i = me / 16 * columns + comptime!(s / columns);
        let j = me % 16 * columns + comptime!(s % columns);
        if block.here && i < k && j < k {
            shares.set(at + i * k + j, sums[s]);
        }
    }
}

/// How many rows of a tile from `top` lie before `end`. No constant, which would be unrolled.
#[cube]
fn rows_in(top: usize, end: usize, #[comptime] most: usize) -> usize {
    let mut rows = 0usize;
    if top < end {
        rows = end - top;
    }
    if rows > most {
        rows = most.runtime();
    }
    rows
}

/// The share of A that a block has, times `factor` squared.
#[cube]
fn gram_of(
    x: &Floats,
    shares: &mut Floats,
    tile: &mut SharedMemory<f32>,
    block: &Block,
    factor: f32,
    #[comptime] columns: usize,
) {
    let most = comptime!(rows_of_tile(columns));
    let mut sums = Array::<f32>::new(comptime!(columns * columns));
    #[unroll]
    for s in 0..comptime!(columns * columns) {
        sums[s] = 0.0f32;
    }
    for step in 0..block.rows.div_ceil(most) {
        let top = block.first + step * most;
        load_rows(x, tile, block.x, top, block.end, block.k, factor, columns);
        add_products(tile, rows_in(top, block.end, most), &mut sums, columns);
        // The next rows come into the same memory.
        sync_cube();
    }
    write_share(shares, block, &sums, columns);
}

/// The share of A that the cube's block has, times `factor` squared.
#[cube]
pub(super) fn gram(x: &Floats, shares: &mut Floats, block: &Block, factor: f32) {
    let mut tile = SharedMemory::<f32>::new_aligned(comptime!(HELD), 16usize);
    if block.k <= NARROW {
        gram_of(x, shares, &mut tile, block, factor, 4usize);
    } else {
        gram_of(x, shares, &mut tile, block, factor, 6usize);
    }
}

/// A tile of P. A is symmetric, so its rows are read for its columns, and neighbours read neighbours. In the first
/// iteration the shares are of blocks over their own powers of two.
///
/// Mutants: 2 takes the first block's norm, 3 drops the square of A, 4 misses the last block of A.
#[cube(launch_unchecked)]
fn polynomial_kernel(
    scales: &Floats,
    squares: &Floats,
    shares: &Floats,
    out: &mut Floats,
    table: Table,
    #[comptime] first: bool,
    #[comptime] mutant: u32,
) {
    let me = UNIT_POS as usize;
    let units = comptime!(UNITS as usize);
    let side = comptime!(SIDE);
    let (row, column) = (me / 16 * 2, me % 16 * 2);
    let tile = tile_of(&table, comptime!(SIDE));
    let k = tile.k;
    let mut blocks = tile.blocks;
    if comptime!(mutant == 4) {
        blocks = tile.blocks - 1;
    }
    let mut inverse = 1.0f32;
    let mut square = 1.0f32;
    if comptime!(first) {
        if tile.here {
            let scale = scale_of(tile.cubes, tile.blocks, scales);
            inverse = inverse_of(scale);
            square = square_of(tile.cubes, tile.blocks, inverse, scales, squares, mutant);
        }
    }
    let mut of_left = SharedMemory::<f32>::new_aligned(comptime!(SIDE * SIDE), 16usize);
    let mut of_right = SharedMemory::<f32>::new_aligned(comptime!(SIDE * SIDE), 16usize);
    let mut sums = Array::<f32>::new(4usize);
    let mut own = Array::<f32>::new(4usize);
    #[unroll]
    for s in 0..4usize {
        sums[s] = 0.0f32;
        own[s] = 0.0f32;
    }
    let stride = tile.widest * tile.widest;
    for step in 0..k.div_ceil(side) {
        let depth = step * side;
        let mut lefts = Array::<f32>::new(4usize);
        let mut rights = Array::<f32>::new(4usize);
        #[unroll]
        for s in 0..4usize {
            lefts[s] = 0.0f32;
            rights[s] = 0.0f32;
        }
        // The blocks are outside, so that a unit has eight loads under way.
        for block in 0..blocks {
            let from = (tile.cubes + block) * stride;
            let mut weight = 1.0f32;
            if comptime!(first) {
                if tile.here {
                    let ratio = scales.at(tile.cubes + block) * inverse;
                    weight = ratio * ratio;
                }
            }
            #[unroll]
            for s in 0..4usize {
                let d = depth + s * (units / side) + me / side;
                let c = me % side;
                if tile.here && d < k {
                    if tile.top + c < k {
                        lefts[s] += shares.at(from + d * k + tile.top + c) * weight;
                    }
                    if tile.left + c < k {
                        rights[s] += shares.at(from + d * k + tile.left + c) * weight;
                    }
                }
            }
        }
        #[unroll]
        for s in 0..4usize {
            let at = s * units + me;
            if comptime!(first) {
                lefts[s] /= square;
                rights[s] /= square;
            }
            of_left[at] = lefts[s];
            of_right[at] = rights[s];
        }
        sync_cube();
        if depth == tile.top {
            #[unroll]
            for s in 0..4usize {
                own[s] = of_right[(row + comptime!(s / 2)) * side + column + comptime!(s % 2)];
            }
        }
        // A length known at compile time would be unrolled.
        let mut last = k - depth;
        if last > side {
            last = side.runtime();
        }
        for d in 0..last {
            let left0 = of_left[d * side + row];
            let left1 = of_left[d * side + row + 1];
            let right0 = of_right[d * side + column];
            let right1 = of_right[d * side + column + 1];
            sums[0] += left0 * right0;
            sums[1] += left0 * right1;
            sums[2] += left1 * right0;
            sums[3] += left1 * right1;
        }
        sync_cube();
    }
    let mut quintic = f32::new(comptime!(QUINTIC));
    if comptime!(mutant == 3) {
        quintic = 0.0f32;
    }
    if tile.here {
        #[unroll]
        for s in 0..4usize {
            let i = tile.top + row + comptime!(s / 2);
            let j = tile.left + column + comptime!(s % 2);
            if i < k && j < k {
                let mut value = quintic * sums[s] + comptime!(CUBIC) * own[s];
                if i == j {
                    value += comptime!(LINEAR);
                }
                if comptime!(first) {
                    value = value / square.sqrt();
                }
                out.set(tile.matrix * stride + i * k + j, value);
            }
        }
    }
}

/// A slab of P from row `from` on; zeros around it.
#[cube]
fn load_slab(
    polynomials: &Floats,
    slab: &mut SharedMemory<f32>,
    block: &Block,
    from: usize,
    #[comptime] columns: usize,
) {
    let side = comptime!(16 * columns);
    let units = comptime!(UNITS as usize);
    let me = UNIT_POS as usize;
    let at_matrix = block.matrix * block.widest * block.widest;
    #[unroll]
    for part in 0..comptime!(depth_of(columns) * 16 * columns / UNITS as usize) {
        let at = part * units + me;
        let (d, c) = (from + at / side, at % side);
        let mut value = 0.0f32;
        if block.here && d < block.k && c < block.k {
            value = polynomials.at(at_matrix + d * block.k + c);
        }
        slab[at] = value;
    }
}

/// A tile of rows times P, in its place. Waits until all is there.
#[cube]
fn multiply(
    polynomials: &Floats,
    tile: &mut SharedMemory<f32>,
    slab: &mut SharedMemory<f32>,
    block: &Block,
    number: usize,
    #[comptime] columns: usize,
) {
    let side = comptime!(16 * columns);
    let depth = comptime!(depth_of(columns));
    let rows = comptime!(rows_of_tile(columns) / 16);
    let me = UNIT_POS as usize;
    let top = me / 16 * rows;
    let left = me % 16 * columns;
    let mut sums = Array::<f32>::new(comptime!(rows * columns));
    #[unroll]
    for s in 0..comptime!(rows * columns) {
        sums[s] = 0.0f32;
    }
    for step in 0..block.k.div_ceil(depth) {
        // A single slab stays for all tiles.
        if block.k > depth || number == 0 {
            load_slab(polynomials, slab, block, step * depth, columns);
        }
        sync_cube();
        let mut quads = (block.k - step * depth).div_ceil(4usize);
        if quads > depth / 4 {
            quads = (depth / 4).runtime();
        }
        for quad in 0..quads {
            let mut values = Array::<f32>::new(comptime!(4 * rows));
            #[unroll]
            for r in 0..rows {
                #[unroll]
                for d in 0..4usize {
                    values[r * 4 + d] = tile[(top + r) * side + step * depth + quad * 4 + d];
                }
            }
            #[unroll]
            for d in 0..4usize {
                let mut factors = Array::<f32>::new(columns);
                #[unroll]
                for c in 0..columns {
                    factors[c] = slab[(quad * 4 + d) * side + left + c];
                }
                #[unroll]
                for s in 0..comptime!(rows * columns) {
                    sums[s] += values[comptime!(s / columns * 4 + d)] * factors[comptime!(s % columns)];
                }
            }
        }
        sync_cube();
    }
    #[unroll]
    for s in 0..comptime!(rows * columns) {
        tile[(top + comptime!(s / columns)) * side + left + comptime!(s % columns)] = sums[s];
    }
    sync_cube();
}

/// A step on the cube's block of rows.
#[cube]
fn step_of(
    polynomials: &Floats,
    x: &mut Floats,
    shares: &mut Floats,
    norms: &mut Floats,
    tile: &mut SharedMemory<f32>,
    slab: &mut SharedMemory<f32>,
    block: &Block,
    factor: f32,
    #[comptime] last: bool,
    #[comptime] columns: usize,
) {
    let side = comptime!(16 * columns);
    let most = comptime!(rows_of_tile(columns));
    let me = UNIT_POS as usize;
    let units = comptime!(UNITS as usize);
    let mut sums = Array::<f32>::new(comptime!(columns * columns));
    #[unroll]
    for s in 0..comptime!(columns * columns) {
        sums[s] = 0.0f32;
    }
    for number in 0..block.rows.div_ceil(most) {
        let top = block.first + number * most;
        load_rows(x, tile, block.x, top, block.end, block.k, factor, columns);
        multiply(polynomials, tile, slab, block, number, columns);
        #[unroll]
        for part in 0..comptime!(rows_of_tile(columns) * 16 * columns / UNITS as usize) {
            let at = part * units + me;
            let (r, c) = (at / side, at % side);
            if top + r < block.end && c < block.k {
                x.set(block.x + (top + r) * block.k + c, tile[at]);
            }
        }
        if comptime!(last) {
            // Every unit begins in a column of its own, since those of one column lie in one bank.
            if me < most && top + me < block.end {
                let mut square = 0.0f32;
                let mut c = me % block.k;
                for _step in 0..block.k {
                    let value = tile[me * side + c];
                    square += value * value;
                    c += 1;
                    if c == block.k {
                        c = 0usize;
                    }
                }
                norms.set(block.norms + top + me, square.sqrt());
            }
        } else {
            add_products(tile, rows_in(top, block.end, most), &mut sums, columns);
        }
        // The next rows come into the same memory.
        sync_cube();
    }
    if comptime!(!last) {
        write_share(shares, block, &sums, columns);
    }
}

/// X P in place of X, and the block's share of the next A, or after the last step the norms of its rows.
#[cube(launch_unchecked)]
fn step_kernel(
    scales: &Floats,
    polynomials: &Floats,
    x: &mut Floats,
    shares: &mut Floats,
    norms: &mut Floats,
    table: Table,
    #[comptime] first: bool,
    #[comptime] last: bool,
) {
    let block = block_of(&table);
    let mut tile = SharedMemory::<f32>::new_aligned(comptime!(HELD), 16usize);
    let mut slab = SharedMemory::<f32>::new_aligned(comptime!(HELD), 16usize);
    let mut factor = 1.0f32;
    if comptime!(first) {
        if block.here {
            factor = inverse_of(scale_of(block.cubes, block.blocks, scales));
        }
    }
    if block.k <= NARROW {
        step_of(polynomials, x, shares, norms, &mut tile, &mut slab, &block, factor, last, 4usize);
    } else {
        step_of(polynomials, x, shares, norms, &mut tile, &mut slab, &block, factor, last, 6usize);
    }
}

/// Room for the blocks' shares of A.
pub(super) fn shares<R: Engine>(b: &Device<R>, of: &Stack) -> Result<Tensor> {
    b.float_scratch(&[of.cubes, of.widest, of.widest])
}

/// Iterates on X in place, from the first shares of A; writes the norms of its rows.
pub(super) fn iterate<R: Engine>(b: &Device<R>, of: &Stack, shares: &Tensor, iterations: usize) -> Result<()> {
    let polynomials = b.float_scratch(&[of.matrices, of.widest, of.widest])?;
    for iteration in 0..iterations {
        let (first, last) = (iteration == 0, iteration + 1 == iterations);
        let uses = [&of.scales, &of.squares, shares, &polynomials];
        let grid = Grid::cubes(of.tiles, UNITS);
        let bytes = shares.bytes() + polynomials.bytes();
        b.launch("muon::polynomial", grid, bytes, &uses, |client, cubes, dim| {
            let [scales, squares, shares, polynomials] = uses.map(|t| b.floats(t));
            let mutant = of.mutant(if first { &[2, 3, 4] } else { &[3, 4] });
            // SAFETY: a cube writes its own tile of a matrix; every access is guarded by k.
            unsafe {
                polynomial_kernel::launch_unchecked::<R>(
                    client,
                    cubes,
                    dim,
                    scales,
                    squares,
                    shares,
                    polynomials,
                    of.table(),
                    first,
                    mutant,
                )
            }
        })?;
        let uses = [&of.scales, &polynomials, &of.x, shares, &of.norms];
        let bytes = 2 * of.x.bytes() + polynomials.bytes() + if last { of.norms.bytes() } else { shares.bytes() };
        let name = if last { "muon::last" } else { "muon::step" };
        b.launch(name, of.grid(), bytes, &uses, |client, cubes, dim| {
            let [scales, polynomials, x, shares, norms] = uses.map(|t| b.floats(t));
            // SAFETY: a cube reads and writes its own rows and its own share; every access is guarded by k and the last row.
            unsafe {
                step_kernel::launch_unchecked::<R>(
                    client,
                    cubes,
                    dim,
                    scales,
                    polynomials,
                    x,
                    shares,
                    norms,
                    of.table(),
                    first,
                    last,
                )
            }
        })?;
    }
    Ok(())
}
