//! The iteration for k <= [`LARGEST_K`]: one launch an iteration, and one before.
//!
//! A cube keeps to a block of rows of X, `[rows, k]`, and needs of the others no more than their share of A = X^T X. So a
//! launch adds up the blocks' shares of A that the last one left, which every cube does for itself, forms
//!
//! ```text
//! P = a I + b A + c A^2
//! ```
//!
//! in shared memory, multiplies its rows, and leaves the share of the new A. For 128 rows and k = 64 forming P is a fifth
//! of the products; what it saves is a launch an iteration that few cubes would run. A library's batched products have
//! one or two cubes a matrix here and are slower: 24 of `[64, 768]` times `[768, 64]` took cuBLASLt 15.8 us, a sixth of
//! what the H200 does in f32. The first launch has no P and brings X to scale; the last leaves the norms of the rows in
//! place of A.
//!
//! X is read and written once an iteration, and 2 k^2 numbers a block.

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::fused::{Blocks, Stack, UNITS, norm_of, scale_of};
use super::{CUBIC, LINEAR, QUINTIC};
use crate::device::Device;
use crate::runtime::Engine;
use crate::scale::inverse_of;
use crate::tensor::{Floats, Tensor};

/// The largest k: A in shared memory, 4 by 4 elements a unit.
pub(super) const LARGEST_K: usize = 64;

/// Rows that a cube holds at a time: with A no more than the 32 KiB that every runtime has.
const TILE: usize = 32;

/// From one row of them to the next; odd, so that the rows of a unit's neighbours lie in other banks.
const PITCH: usize = LARGEST_K + 1;

/// Rows of a block, where that makes [`MOST`] blocks or fewer: with half as many, forming P would cost as much as using
/// it.
const ROWS: usize = 128;

/// The most blocks of a matrix.
const MOST: usize = 32;

/// Launches by what they do besides multiplying.
const FIRST: u32 = 0;
const MIDDLE: u32 = 1;
const LAST: u32 = 2;

/// How the rows of a matrix are cut.
pub(super) fn blocks(n: usize) -> Blocks {
    Blocks::of(n, ROWS, TILE, MOST)
}

/// a I + b A + c A^2 in `p`, from the blocks' shares of A. Beyond k, A is zero. Waits until all is written.
///
/// Mutants: 3 drops the square of A, 4 misses the last block of A.
#[cube]
fn polynomial(
    grams: &Floats,
    p: &mut SharedMemory<f32>,
    matrix: usize,
    k: usize,
    blocks: usize,
    here: bool,
    #[comptime] mutant: u32,
) {
    let me = UNIT_POS as usize;
    let units = comptime!(UNITS as usize);
    let side = comptime!(LARGEST_K);
    let (row, column) = (me / 16, me % 16);
    let mut shares = blocks;
    if comptime!(mutant == 4) {
        shares = blocks - 1;
    }
    #[unroll]
    for s in 0..16usize {
        let at = s * units + me;
        let (i, j) = (at / side, at % side);
        let mut sum = 0.0f32;
        if here && i < k && j < k {
            for block in 0..shares {
                sum += grams.at(((matrix * blocks + block) * k + i) * k + j);
            }
        }
        p[at] = sum;
    }
    sync_cube();
    let mut sums = Array::<f32>::new(16usize);
    #[unroll]
    for s in 0..16usize {
        sums[s] = 0.0f32;
    }
    // A is symmetric, so its rows are its columns.
    for d in 0..k {
        let mut lefts = Array::<f32>::new(4usize);
        let mut rights = Array::<f32>::new(4usize);
        #[unroll]
        for s in 0..4usize {
            lefts[s] = p[d * side + row + s * 16];
            rights[s] = p[d * side + column + s * 16];
        }
        #[unroll]
        for s in 0..16usize {
            sums[s] += lefts[comptime!(s / 4)] * rights[comptime!(s % 4)];
        }
    }
    let mut quintic = f32::new(comptime!(QUINTIC));
    if comptime!(mutant == 3) {
        quintic = 0.0f32;
    }
    #[unroll]
    for s in 0..16usize {
        let (i, j) = (row + comptime!(s / 4 * 16), column + comptime!(s % 4 * 16));
        let mut value = quintic * sums[s] + comptime!(CUBIC) * p[i * side + j];
        if i == j {
            value += comptime!(LINEAR);
        }
        sums[s] = value;
    }
    sync_cube();
    #[unroll]
    for s in 0..16usize {
        let (i, j) = (row + comptime!(s / 4 * 16), column + comptime!(s % 4 * 16));
        p[i * side + j] = sums[s];
    }
    sync_cube();
}

/// One launch of the iteration, on a block of rows.
#[cube(launch_unchecked)]
fn step_kernel(
    scales: &Floats,
    squares: &Floats,
    before: &Floats,
    x: &mut Floats,
    after: &mut Floats,
    norms: &mut Floats,
    count: u32,
    n: u32,
    k: u32,
    blocks: u32,
    rows: u32,
    #[comptime] part: u32,
    #[comptime] mutant: u32,
) {
    let (n, k, blocks, rows) = (n as usize, k as usize, blocks as usize, rows as usize);
    let me = UNIT_POS as usize;
    let units = comptime!(UNITS as usize);
    let side = comptime!(LARGEST_K);
    let pitch = comptime!(PITCH);
    let (row, column) = (me / 16, me % 16);
    let (matrix, first) = (CUBE_POS / blocks, CUBE_POS % blocks * rows);
    let here = matrix < count as usize;
    let mut end = first + rows;
    if end > n {
        end = n;
    }
    // A cube behind the last matrix has no rows.
    if matrix >= count as usize {
        end = first;
    }
    let mut p = SharedMemory::<f32>::new(comptime!(LARGEST_K * LARGEST_K));
    let mut tile = SharedMemory::<f32>::new(comptime!(TILE * PITCH));
    let mut inverse = 1.0f32;
    let mut norm = 1.0f32;
    if comptime!(part == FIRST) {
        if here {
            let scale = scale_of(matrix, blocks, scales);
            inverse = inverse_of(scale);
            norm = norm_of(matrix, blocks, scale, scales, squares, mutant);
        }
    } else {
        polynomial(before, &mut p, matrix, k, blocks, here, mutant);
    }
    let mut shares = Array::<f32>::new(16usize);
    #[unroll]
    for s in 0..16usize {
        shares[s] = 0.0f32;
    }
    for step in 0..rows.div_ceil(comptime!(TILE)) {
        let top = first + step * comptime!(TILE);
        #[unroll]
        for part_of_tile in 0..8usize {
            let at = part_of_tile * units + me;
            let (r, c) = (at / side, at % side);
            let mut value = 0.0f32;
            if top + r < end && c < k {
                value = x.at((matrix * n + top + r) * k + c);
                if comptime!(part == FIRST) {
                    value = value * inverse / norm;
                }
            }
            tile[r * pitch + c] = value;
        }
        sync_cube();
        if comptime!(part != FIRST) {
            let mut sums = Array::<f32>::new(8usize);
            #[unroll]
            for s in 0..8usize {
                sums[s] = 0.0f32;
            }
            for d in 0..k {
                let mut factors = Array::<f32>::new(4usize);
                #[unroll]
                for s in 0..4usize {
                    factors[s] = p[d * side + column + s * 16];
                }
                #[unroll]
                for s in 0..2usize {
                    let value = tile[(row + s * 16) * pitch + d];
                    #[unroll]
                    for t in 0..4usize {
                        sums[comptime!(s * 4 + t)] += value * factors[t];
                    }
                }
            }
            sync_cube();
            #[unroll]
            for s in 0..8usize {
                tile[(row + comptime!(s / 4 * 16)) * pitch + column + comptime!(s % 4 * 16)] = sums[s];
            }
            sync_cube();
        }
        #[unroll]
        for part_of_tile in 0..8usize {
            let at = part_of_tile * units + me;
            let (r, c) = (at / side, at % side);
            if top + r < end && c < k {
                x.set((matrix * n + top + r) * k + c, tile[r * pitch + c]);
            }
        }
        if comptime!(part != LAST) {
            // Rows past the end are zeros; the length is no constant, which would be unrolled.
            let mut depth = 0usize;
            if top < end {
                depth = end - top;
            }
            if depth > comptime!(TILE) {
                depth = comptime!(TILE).runtime();
            }
            for r in 0..depth {
                let mut lefts = Array::<f32>::new(4usize);
                let mut rights = Array::<f32>::new(4usize);
                #[unroll]
                for s in 0..4usize {
                    lefts[s] = tile[r * pitch + row + s * 16];
                    rights[s] = tile[r * pitch + column + s * 16];
                }
                #[unroll]
                for s in 0..16usize {
                    shares[s] += lefts[comptime!(s / 4)] * rights[comptime!(s % 4)];
                }
            }
        } else if me < comptime!(TILE) && top + me < end {
            let mut square = 0.0f32;
            for c in 0..k {
                square += tile[me * pitch + c] * tile[me * pitch + c];
            }
            norms.set(matrix * n + top + me, square.sqrt());
        }
        // The next rows come into the same memory.
        sync_cube();
    }
    if comptime!(part != LAST) {
        #[unroll]
        for s in 0..16usize {
            let (i, j) = (row + comptime!(s / 4 * 16), column + comptime!(s % 4 * 16));
            if here && i < k && j < k {
                after.set((CUBE_POS * k + i) * k + j, shares[s]);
            }
        }
    }
}

/// Brings X to scale and iterates on it in place; writes the norms of its rows.
pub(super) fn iterate<R: Engine>(b: &Device<R>, stack: &Stack, iterations: usize) -> Result<()> {
    let Stack { x, scales, squares, norms, count, k, blocks, .. } = stack;
    let grams = [0, 1].map(|_| b.float_scratch(&[*count, blocks.count, *k, *k]));
    let [even, odd] = grams;
    let mut grams: [Tensor; 2] = [even?, odd?];
    for launch in 0..=iterations {
        let (name, part) = match launch {
            0 => ("muon::start", FIRST),
            _ if launch == iterations => ("muon::last", LAST),
            _ => ("muon::step", MIDDLE),
        };
        let [before, after] = &grams;
        let uses = [scales, squares, before, x, after, norms];
        let grams_moved = u64::from(part != FIRST) + u64::from(part != LAST);
        let bytes = 2 * x.bytes() + grams_moved * before.bytes();
        let mutant = stack.mutant(if part == FIRST { &[2] } else { &[3, 4] });
        b.launch(name, stack.grid(), bytes, &uses, |client, cubes, dim| {
            let ([scales, squares, before, x, after, norms], [count, n, k, blocks, rows]) =
                (uses.map(|t| b.floats(t)), stack.words());
            // SAFETY: a cube reads and writes its own rows and its own share; every access is guarded by k and the last row.
            unsafe {
                step_kernel::launch_unchecked::<R>(
                    client, cubes, dim, scales, squares, before, x, after, norms, count, n, k, blocks, rows, part,
                    mutant,
                )
            }
        })?;
        grams.swap(0, 1);
    }
    Ok(())
}
