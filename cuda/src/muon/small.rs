//! The iteration for k <= [`tall::LARGEST_K`]: two launches an iteration, for matrices of all shapes together.
//!
//! | launch | reads | writes |
//! |---|---|---|
//! | polynomial | the blocks' shares of A = X^T X | P = a I + b A + c A^2, a tile of 32 by 32 a cube |
//! | step | X, P | X P in place of X, a block of rows a cube; its share of the next A |
//!
//! The first shares come with X and not to scale; the first polynomial divides A by |X|_F^2 and itself by |X|_F, so X
//! is never normalised on its own. The last step leaves the norms of the rows in place of A.
//!
//! X is read and written once an iteration; shares are k^2 numbers a block, written once and read once for each tile of a
//! row of P and of a column. How a cube multiplies is in [`tall`].

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::fused::{scale_of, square_of};
use super::table::Stack;
use super::{CUBIC, LINEAR, QUINTIC};
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::scale::inverse_of;
use crate::tall::{self, Block, HELD, NARROW, Table, UNITS, block_of, tile_of};
use crate::tensor::{Floats, Tensor};

/// Rows and columns of P that a cube computes, 2 by 2 elements a unit, and the depth of its tiles.
pub(super) const SIDE: usize = 32;

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
    let most = comptime!(tall::rows_of_tile(columns));
    let me = UNIT_POS as usize;
    let mut sums = Array::<f32>::new(comptime!(columns * columns));
    #[unroll]
    for s in 0..comptime!(columns * columns) {
        sums[s] = 0.0f32;
    }
    for number in 0..block.rows.div_ceil(most) {
        let top = block.first + number * most;
        tall::load_rows(x, tile, block.x, top, block.end, block.k, factor, columns);
        tall::multiply(polynomials, tile, slab, block, number, columns);
        tall::store_rows(x, tile, block.x, top, block.end, block.k, columns);
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
            tall::add_products(tile, tall::rows_in(top, block.end, most), &mut sums, columns);
        }
        // The next rows come into the same memory.
        sync_cube();
    }
    if comptime!(!last) {
        tall::write_share(shares, block, &sums, columns);
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
    let block = block_of(&table, tall::NO_FAULT);
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
    b.float_scratch(&[of.layout.cubes, of.layout.widest, of.layout.widest])
}

/// Iterates on X in place, from the first shares of A; writes the norms of its rows.
pub(super) fn iterate<R: Engine>(b: &Device<R>, of: &Stack, shares: &Tensor, iterations: usize) -> Result<()> {
    let polynomials = b.float_scratch(&[of.layout.matrices, of.layout.widest, of.layout.widest])?;
    for iteration in 0..iterations {
        let (first, last) = (iteration == 0, iteration + 1 == iterations);
        let uses = [&of.scales, &of.squares, shares, &polynomials];
        let grid = Grid::cubes(of.layout.tiles, UNITS);
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
                    of.layout.table(),
                    first,
                    mutant,
                )
            }
        })?;
        let uses = [&of.scales, &polynomials, &of.x, shares, &of.norms];
        let bytes = 2 * of.x.bytes() + polynomials.bytes() + if last { of.norms.bytes() } else { shares.bytes() };
        let name = if last { "muon::last" } else { "muon::step" };
        b.launch(name, of.layout.grid(), bytes, &uses, |client, cubes, dim| {
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
                    of.layout.table(),
                    first,
                    last,
                )
            }
        })?;
    }
    Ok(())
}
