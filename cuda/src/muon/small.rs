//! The iteration for k <= [`tall::LARGEST_K`]: two launches for [`TOGETHER`] iterations, for matrices of all shapes
//! with one kind of width together.
//!
//! | launch | reads | writes |
//! |---|---|---|
//! | polynomial | the blocks' shares of A = X^T X | the product of the next iterations' P = a I + b A + c A^2; a matrix a cube |
//! | step | X, that product | their product in place of X, a block of rows a cube; its share of the next A |
//!
//! X goes through P from the right, so its next A is P A P: products of k by k matrices, which a cube does without leaving
//! its registers, in place of a pass over X. Not more than two iterations, because A is known to a share of its largest
//! eigenvalue, and an error in a small one grows by up to a^2 = 12 an iteration: two leave what one does, and with four
//! gate `diff` is red (`docs/adr/0031`).
//!
//! The first shares come with X and not to scale; the first polynomial divides A by |X|_F^2 and itself by |X|_F, so X
//! is never normalised on its own. The last step leaves the norms of the rows in place of A.
//!
//! X is read and written once in two iterations; shares are k^2 numbers a block, written once and read once. How a cube
//! multiplies X is in [`tall`].

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::fused::{scale_of, square_of};
use super::table::Stack;
use super::{CUBIC, LINEAR, QUINTIC};
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::scale::inverse_of;
use crate::tall::{self, Block, HELD, Table, UNITS, Whole, block_of, whole_of};
use crate::tensor::{Floats, Tensor};

/// Iterations between two passes over X.
const TOGETHER: usize = 2;

/// Rows of both factors in shared memory at a time, by the columns of a unit.
const fn depth_of(columns: usize) -> usize {
    if columns == 4 { 32 } else { 24 }
}

/// Elements of a factor in shared memory, of either width.
const SLAB: usize = if 32 * 64 > 24 * 96 { 32 * 64 } else { 24 * 96 };

/// Writes the rows of a matrix from row `from` on, of which every unit has a square in `part`.
#[cube]
fn put(part: &Array<f32>, slab: &mut SharedMemory<f32>, from: usize, #[comptime] columns: usize) {
    let side = comptime!(16 * columns);
    let me = UNIT_POS as usize;
    let (top, left) = (me / 16 * columns, me % 16 * columns);
    if top >= from && top < from + comptime!(depth_of(columns)) {
        #[unroll]
        for s in 0..comptime!(columns * columns) {
            slab[(top - from + comptime!(s / columns)) * side + left + comptime!(s % columns)] = part[s];
        }
    }
}

/// The product of the transpose of `a` and `b`, a square of it a unit.
#[cube]
fn multiply(
    a: &Array<f32>,
    b: &Array<f32>,
    out: &mut Array<f32>,
    of_a: &mut SharedMemory<f32>,
    of_b: &mut SharedMemory<f32>,
    #[comptime] columns: usize,
) {
    let side = comptime!(16 * columns);
    let depth = comptime!(depth_of(columns));
    let me = UNIT_POS as usize;
    let (top, left) = (me / 16 * columns, me % 16 * columns);
    #[unroll]
    for s in 0..comptime!(columns * columns) {
        out[s] = 0.0f32;
    }
    // Lengths known at compile time would be unrolled.
    for step in 0..comptime!(16 * columns / depth_of(columns)).runtime() {
        put(a, of_a, step * depth, columns);
        put(b, of_b, step * depth, columns);
        sync_cube();
        for d in 0..depth.runtime() {
            let mut lefts = Array::<f32>::new(columns);
            let mut rights = Array::<f32>::new(columns);
            #[unroll]
            for s in 0..columns {
                lefts[s] = of_a[d * side + top + s];
                rights[s] = of_b[d * side + left + s];
            }
            #[unroll]
            for s in 0..comptime!(columns * columns) {
                out[s] += lefts[comptime!(s / columns)] * rights[comptime!(s % columns)];
            }
        }
        sync_cube();
    }
}

/// Makes P of A^2, which `p` holds.
#[cube]
fn polynomial(a: &Array<f32>, p: &mut Array<f32>, #[comptime] columns: usize, #[comptime] mutant: u32) {
    let me = UNIT_POS as usize;
    let (top, left) = (me / 16 * columns, me % 16 * columns);
    let mut quintic = f32::new(comptime!(QUINTIC));
    if comptime!(mutant == 3) {
        quintic = 0.0f32;
    }
    #[unroll]
    for s in 0..comptime!(columns * columns) {
        let mut value = quintic * p[s] + comptime!(CUBIC) * a[s];
        if top + comptime!(s / columns) == left + comptime!(s % columns) {
            value += comptime!(LINEAR);
        }
        p[s] = value;
    }
}

/// What X is multiplied by in the next `count` iterations, from the shares of its A.
#[cube]
fn polynomials_of(
    scales: &Floats,
    squares: &Floats,
    shares: &Floats,
    out: &mut Floats,
    of_a: &mut SharedMemory<f32>,
    of_b: &mut SharedMemory<f32>,
    whole: &Whole,
    first: bool,
    count: u32,
    #[comptime] columns: usize,
    #[comptime] mutant: u32,
) {
    let elements = comptime!(columns * columns);
    let me = UNIT_POS as usize;
    let (top, left) = (me / 16 * columns, me % 16 * columns);
    let k = whole.k;
    let mut blocks = whole.blocks;
    if comptime!(mutant == 4) {
        blocks = whole.blocks - 1;
    }
    let mut inverse = 1.0f32;
    let mut square = 1.0f32;
    if first && whole.here {
        let scale = scale_of(whole.cubes, whole.blocks, scales);
        inverse = inverse_of(scale);
        square = square_of(whole.cubes, whole.blocks, inverse, scales, squares, mutant);
    }
    let stride = whole.widest * whole.widest;
    let mut a = Array::<f32>::new(elements);
    let mut p = Array::<f32>::new(elements);
    #[unroll]
    for s in 0..elements {
        a[s] = 0.0f32;
    }
    if !whole.here {
        blocks = 0usize;
    }
    for block in 0..blocks {
        let mut weight = 1.0f32;
        if first {
            let ratio = scales.at(whole.cubes + block) * inverse;
            weight = ratio * ratio;
        }
        let from = (whole.cubes + block) * stride;
        #[unroll]
        for s in 0..elements {
            let (i, j) = (top + comptime!(s / columns), left + comptime!(s % columns));
            let inside = i < k && j < k;
            // A load that no branch guards is under way while the others are.
            let value = shares.at(from + select(inside, i * k + j, 0usize)) * weight;
            a[s] += select(inside, value, 0.0f32);
        }
    }
    // The square is 1 but in the first iteration.
    #[unroll]
    for s in 0..elements {
        a[s] = a[s] / square;
    }
    let mut all = Array::<f32>::new(elements);
    let mut other = Array::<f32>::new(elements);
    multiply(&a, &a, &mut p, of_a, of_b, columns);
    polynomial(&a, &mut p, columns, mutant);
    #[unroll]
    for s in 0..elements {
        all[s] = p[s];
    }
    for _more in 1..count {
        // All are polynomials of A, so they commute: the next A is P A P, in any order.
        multiply(&p, &a, &mut other, of_a, of_b, columns);
        multiply(&other, &p, &mut a, of_a, of_b, columns);
        multiply(&a, &a, &mut p, of_a, of_b, columns);
        polynomial(&a, &mut p, columns, mutant);
        multiply(&all, &p, &mut other, of_a, of_b, columns);
        #[unroll]
        for s in 0..elements {
            all[s] = other[s];
        }
    }
    if whole.here {
        #[unroll]
        for s in 0..elements {
            let (i, j) = (top + comptime!(s / columns), left + comptime!(s % columns));
            if i < k && j < k {
                out.set(whole.matrix * stride + i * k + j, all[s] / square.sqrt());
            }
        }
    }
}

/// What X is multiplied by in the next `count` iterations. In the first, the shares are of blocks over their own powers of two.
/// A cube has a matrix.
///
/// Mutants: 2 takes the first block's norm, 3 drops the square of A, 4 misses the last block of A.
#[cube(launch_unchecked)]
fn polynomial_kernel(
    scales: &Floats,
    squares: &Floats,
    shares: &Floats,
    out: &mut Floats,
    table: Table,
    first: u32,
    count: u32,
    #[comptime] columns: usize,
    #[comptime] mutant: u32,
) {
    let first = first == 1u32;
    let whole = whole_of(&table);
    let mut of_a = SharedMemory::<f32>::new_aligned(comptime!(SLAB), 16usize);
    let mut of_b = SharedMemory::<f32>::new_aligned(comptime!(SLAB), 16usize);
    polynomials_of(scales, squares, shares, out, &mut of_a, &mut of_b, &whole, first, count, columns, mutant);
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
            let rows = tall::rows_in(top, block.end, most);
            tall::add_share(tile, rows, &mut sums, shares, block, number == 0, columns);
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
    first: u32,
    #[comptime] last: bool,
    #[comptime] columns: usize,
) {
    let block = block_of(&table, tall::NO_FAULT);
    let mut tile = SharedMemory::<f32>::new_aligned(comptime!(HELD), 16usize);
    let mut slab = SharedMemory::<f32>::new_aligned(comptime!(HELD), 16usize);
    let mut factor = 1.0f32;
    if first == 1u32 && block.here {
        factor = inverse_of(scale_of(block.cubes, block.blocks, scales));
    }
    step_of(polynomials, x, shares, norms, &mut tile, &mut slab, &block, factor, last, columns);
}

/// Room for the blocks' shares of A.
pub(super) fn shares<R: Engine>(b: &Device<R>, of: &Stack) -> Result<Tensor> {
    b.float_scratch(&[of.layout.cubes, of.layout.widest, of.layout.widest])
}

/// Iterates on X in place, from the first shares of A; writes the norms of its rows.
pub(super) fn iterate<R: Engine>(b: &Device<R>, of: &Stack, shares: &Tensor, iterations: usize) -> Result<()> {
    let polynomials = b.float_scratch(&[of.layout.matrices, of.layout.widest, of.layout.widest])?;
    let columns = of.layout.columns();
    let mut done = 0;
    while done < iterations {
        let (first, count) = (done == 0, TOGETHER.min(iterations - done));
        done += count;
        let last = done == iterations;
        let uses = [&of.scales, &of.squares, shares, &polynomials];
        let grid = Grid::cubes(of.layout.matrices, UNITS);
        let bytes = shares.bytes() + polynomials.bytes();
        b.launch("muon::polynomial", grid, bytes, &uses, |client, cubes, dim| {
            let [scales, squares, shares, polynomials] = uses.map(|t| b.floats(t));
            let mutant = of.mutant(&[2, 3, 4]);
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
                    u32::from(first),
                    count as u32,
                    columns,
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
                    u32::from(first),
                    last,
                    columns,
                )
            }
        })?;
    }
    Ok(())
}
