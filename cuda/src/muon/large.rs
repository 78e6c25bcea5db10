//! The iteration for k > [`tall::LARGEST_K`](crate::tall::LARGEST_K): the products go to the library of the runtime where it
//! has one.
//!
//! | launch | computes | how often |
//! |---|---|---|
//! | normalise | X over its norm | once |
//! | gram | A = X^T X, a product | every iteration |
//! | polynomial | P = a I + b A + c A^2 | every iteration |
//! | apply | X P, a product | every iteration |
//! | norms | of the rows of X | once |

use cubecl::prelude::*;
use dormouse_reference::{Precision, Result};

use super::fused::{scale_of, square_of};
use super::table::Stack;
use super::{CUBIC, LINEAR, QUINTIC};
use crate::arm::Arm;
use crate::device::Device;
use crate::launch::Grid;
use crate::matmul::{Plus, Product, product, stack};
use crate::rows;
use crate::runtime::Engine;
use crate::scale::inverse_of;
use crate::tall::{self, Blocks, Table, UNITS, block_of};
use crate::tensor::{Floats, Tensor};

/// Rows of a block, where that makes [`MOST`] blocks or fewer.
const ROWS: usize = 32;

/// The most blocks of a matrix.
const MOST: usize = 64;

/// Rows and columns of P that a cube computes, 4 by 4 elements a unit, and the depth of its tiles.
const SIDE: usize = 64;
const DEPTH: usize = 16;

/// How the rows of a matrix are cut.
pub(super) fn blocks(n: usize) -> Blocks {
    Blocks::of(n, ROWS, 1, MOST)
}

/// A block of X over the norm of its matrix.
///
/// Mutants: 2 takes the first block's norm.
#[cube(launch_unchecked)]
fn normalise_kernel(scales: &Floats, squares: &Floats, x: &mut Floats, table: Table, #[comptime] mutant: u32) {
    let units = comptime!(UNITS as usize);
    let block = block_of(&table, tall::NO_FAULT);
    if block.here {
        let inverse = inverse_of(scale_of(block.cubes, block.blocks, scales));
        let norm = square_of(block.cubes, block.blocks, inverse, scales, squares, mutant).sqrt();
        let held = (block.end - block.first) * block.k;
        for step in 0..held.div_ceil(units) {
            let i = step * units + UNIT_POS as usize;
            if i < held {
                let at = block.x + block.first * block.k + i;
                x.set(at, x.at(at) * inverse / norm);
            }
        }
    }
}

/// A tile of P. A is symmetric, so its rows are read for its columns, and neighbours read neighbours.
///
/// Mutants: 3 drops the square of A, 13 the linear term.
#[cube(launch_unchecked)]
fn polynomial_kernel(grams: &Floats, out: &mut Floats, count: u32, k: u32, #[comptime] mutant: u32) {
    let k = k as usize;
    let me = UNIT_POS as usize;
    let units = comptime!(UNITS as usize);
    let side = comptime!(SIDE);
    let (row, column) = (me / 16, me % 16);
    let tiles = k.div_ceil(side);
    let left = CUBE_POS % tiles * side;
    let top = CUBE_POS / tiles % tiles * side;
    let matrix = CUBE_POS / (tiles * tiles);
    let here = matrix < count as usize;
    let a = matrix * k * k;
    let mut of_left = SharedMemory::<f32>::new(comptime!(SIDE * DEPTH));
    let mut of_right = SharedMemory::<f32>::new(comptime!(SIDE * DEPTH));
    let mut sums = Array::<f32>::new(16usize);
    #[unroll]
    for s in 0..16usize {
        sums[s] = 0.0f32;
    }
    for step in 0..k.div_ceil(comptime!(DEPTH)) {
        let depth = step * comptime!(DEPTH);
        #[unroll]
        for part in 0..4usize {
            let at = part * units + me;
            let (d, c) = (depth + at / side, at % side);
            let mut value_l = 0.0f32;
            let mut value_r = 0.0f32;
            if here && d < k {
                if top + c < k {
                    value_l = grams.at(a + d * k + top + c);
                }
                if left + c < k {
                    value_r = grams.at(a + d * k + left + c);
                }
            }
            of_left[at] = value_l;
            of_right[at] = value_r;
        }
        sync_cube();
        // A length known at compile time would be unrolled.
        let mut last = k - depth;
        if last > comptime!(DEPTH) {
            last = comptime!(DEPTH).runtime();
        }
        for d in 0..last {
            let mut lefts = Array::<f32>::new(4usize);
            let mut rights = Array::<f32>::new(4usize);
            #[unroll]
            for s in 0..4usize {
                lefts[s] = of_left[d * side + row + s * 16];
                rights[s] = of_right[d * side + column + s * 16];
            }
            #[unroll]
            for s in 0..16usize {
                sums[s] += lefts[comptime!(s / 4)] * rights[comptime!(s % 4)];
            }
        }
        sync_cube();
    }
    let mut quintic = f32::new(comptime!(QUINTIC));
    if comptime!(mutant == 3) {
        quintic = 0.0f32;
    }
    let mut linear = f32::new(comptime!(LINEAR));
    if comptime!(mutant == 13) {
        linear = 0.0f32;
    }
    if here {
        #[unroll]
        for s in 0..16usize {
            let i = top + row + comptime!(s / 4 * 16);
            let j = left + column + comptime!(s % 4 * 16);
            if i < k && j < k {
                let at = a + i * k + j;
                let mut value = quintic * sums[s] + comptime!(CUBIC) * grams.at(at);
                if i == j {
                    value += linear;
                }
                out.set(at, value);
            }
        }
    }
}

/// The norms of rows of k numbers.
#[cube(launch_unchecked)]
fn norms_kernel(x: &Floats, norms: &mut Floats, count: u32, k: u32) {
    let k = k as usize;
    let mut shared = SharedMemory::<f32>::new(comptime!(rows::UNITS as usize));
    let row = rows::row();
    let here = row < count as usize;
    let lanes = comptime!(rows::LANES as usize);
    let mut square = 0.0f32;
    for step in 0..k.div_ceil(lanes) {
        let column = step * lanes + rows::lane();
        if here && column < k {
            let value = x.at(row * k + column);
            square += value * value;
        }
    }
    let square = rows::sum(square, &mut shared);
    if here && rows::lane() == 0 {
        norms.set(row, square.sqrt());
    }
}

/// Brings X to scale and iterates on `count` matrices of `n` by `k`; gives the iterate and writes the norms of its rows.
pub(super) fn iterate<R: Engine>(
    b: &Device<R>,
    of: &Stack,
    [count, n, k]: [usize; 3],
    iterations: usize,
) -> Result<Tensor> {
    let uses = [&of.scales, &of.squares, &of.x];
    b.launch("muon::normalise", of.layout.grid(), 2 * of.x.bytes(), &uses, |client, cubes, dim| {
        let [scales, squares, x] = uses.map(|t| b.floats(t));
        // SAFETY: a cube stays in its block of rows.
        unsafe {
            normalise_kernel::launch_unchecked::<R>(
                client,
                cubes,
                dim,
                scales,
                squares,
                x,
                of.layout.table(),
                of.mutant(&[2]),
            )
        }
    })?;
    let square = [count, k, k];
    let (gram, polynomial) = (b.float_scratch(&square)?, b.float_scratch(&square)?);
    let (mut x, mut next) = (of.x.clone(), b.float_scratch(&[count, n, k])?);
    for _ in 0..iterations {
        let columns = stack(&x, n, k);
        let for_gram = Product {
            name: "muon::gram",
            batch: count,
            m: k,
            k: n,
            n: k,
            a: columns.transposed(),
            b: columns.plain(),
            plus: Plus::Nothing,
            out: stack(&gram, k, k),
            precision: Precision::Full,
        };
        product(b, Arm::Fused, &for_gram)?;
        let uses = [&gram, &polynomial];
        let tiles = k.div_ceil(SIDE);
        let grid = Grid::cubes(count * tiles * tiles, UNITS);
        b.launch("muon::polynomial", grid, 2 * gram.bytes(), &uses, |client, cubes, dim| {
            let [gram, polynomial] = uses.map(|t| b.floats(t));
            let mutant = of.mutant(&[3, 13]);
            // SAFETY: both have `count` matrices of k by k; a cube writes its own tile.
            unsafe {
                polynomial_kernel::launch_unchecked::<R>(
                    client,
                    cubes,
                    dim,
                    gram,
                    polynomial,
                    count as u32,
                    k as u32,
                    mutant,
                )
            }
        })?;
        let for_x = Product {
            name: "muon::apply",
            m: n,
            k,
            n: k,
            a: columns.plain(),
            b: stack(&polynomial, k, k).plain(),
            out: stack(&next, n, k),
            ..for_gram
        };
        product(b, Arm::Fused, &for_x)?;
        std::mem::swap(&mut x, &mut next);
    }
    let uses = [&x, &of.norms];
    let bytes = x.bytes() + of.norms.bytes();
    b.launch("muon::norms", rows::cubes(count * n), bytes, &uses, |client, cubes, dim| {
        let [x, norms] = uses.map(|t| b.floats(t));
        // SAFETY: `x` has count times n rows of k, and there is a norm for each.
        unsafe { norms_kernel::launch_unchecked::<R>(client, cubes, dim, x, norms, (count * n) as u32, k as u32) }
    })?;
    Ok(x)
}
