//! Arm `fused` for k <= [`tall::NARROW`]: the factors of all shapes in three launches for four iterations.
//!
//! | launch | reads | writes |
//! |---|---|---|
//! | gram | X | a block's power of two and its share of A = X^T X |
//! | polar | the shares | the product of the polynomials, its coefficient and the spread: see [`polar_small`](super::polar_small) |
//! | multiply | X, the product | X |
//!
//! The equations are those of [`fused`](super::fused), which is for larger k.

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::fused::{Factor, ROUND, Scalars};
use super::polar_small::{self, Part};
use crate::cube::{self, larger};
use crate::device::Device;
use crate::runtime::Engine;
use crate::scale::{inverse_of, power_of_two};
use crate::tall::{self, ENTRIES, HELD, Layout, Table, UNITS, block_of};
use crate::tensor::{Floats, Tensor};

/// The largest k.
pub(super) const LARGEST_K: usize = tall::NARROW;

/// Factors of one launch.
pub(super) const FACTORS: usize = ENTRIES;

/// The fault that a mutant has about what a block is: 8 misses its last row, 9 takes the first matrix of its factor.
fn fault_of(mutant: u32) -> u32 {
    match mutant {
        8 => tall::LAST_ROW_MISSED,
        9 => tall::FIRST_MATRIX_OF_ENTRY,
        _ => tall::NO_FAULT,
    }
}

/// A block of rows over its own power of two: its share of A.
///
/// Mutants: see [`fault_of`].
#[cube(launch_unchecked)]
fn gram_kernel(x: &Floats, shares: &mut Floats, scales: &mut Floats, table: Table, #[comptime] fault: u32) {
    let units = comptime!(UNITS as usize);
    let block = block_of(&table, fault);
    let mut shared = SharedMemory::<f32>::new(comptime!(UNITS as usize));
    let mut most = 0.0f32;
    let held = (block.end - block.first) * block.k;
    for step in 0..held.div_ceil(units) {
        let i = step * units + UNIT_POS as usize;
        if i < held {
            most = larger(most, x.at(block.x + block.first * block.k + i).abs());
        }
    }
    let scale = power_of_two(cube::largest(most, &mut shared));
    if block.here && UNIT_POS == 0 {
        scales.set(CUBE_POS, scale);
    }
    tall::gram(x, shares, &block, inverse_of(scale), 4usize);
}

/// X <- coefficient X M for a block of rows, in place. The first cube also writes the largest spread of every factor, a
/// unit each, where it is asked for.
///
/// Mutants: 5 takes the first matrix's spread, 7 ignores the flag, 10 leaves the last matrix alone, 11 gives every factor the spread of the first, 12 is null (a renamed local).
#[cube(launch_unchecked)]
fn multiply_kernel(
    products: &Floats,
    coefficients: &Floats,
    spreads: &Floats,
    apply: &Floats,
    x: &mut Floats,
    spread: &mut Floats,
    table: Table,
    counts: Sequence<u32>,
    slots: Sequence<u32>,
    with_spread: u32,
    #[comptime] fault: u32,
    #[comptime] mutant: u32,
) {
    let most = comptime!(tall::rows_of_tile(4));
    let me = UNIT_POS as usize;
    let block = block_of(&table, fault);
    let mut flag = apply.at(0);
    if comptime!(mutant == 7) {
        flag = 1.0f32;
    }
    if comptime!(mutant == 12) {
        let renamed = apply.at(0);
        flag = renamed;
    }
    let mut moving = flag == 1.0f32;
    if comptime!(mutant == 10) {
        moving = flag == 1.0f32 && block.matrix + 1 < table.all_matrices as usize;
    }
    let mut coefficient = 0.0f32;
    if block.here {
        coefficient = coefficients.at(block.matrix);
    }
    let mut tile = SharedMemory::<f32>::new_aligned(comptime!(HELD), 16usize);
    let mut slab = SharedMemory::<f32>::new_aligned(comptime!(HELD), 16usize);
    for number in 0..block.rows.div_ceil(most) {
        let top = block.first + number * most;
        tall::load_rows(x, &mut tile, block.x, top, block.end, block.k, coefficient, 4usize);
        tall::multiply(products, &mut tile, &mut slab, &block, number, 4usize);
        // A coefficient of zero stands for a zero matrix.
        if moving && coefficient > 0.0f32 {
            tall::store_rows(x, &tile, block.x, top, block.end, block.k, 4usize);
        }
        // The next rows come into the same memory.
        sync_cube();
    }
    if with_spread == 1u32 && CUBE_POS == 0 {
        #[unroll]
        for p in 0..ENTRIES {
            if me == p && counts[p] > 0u32 {
                let mut widest = 0.0f32;
                if flag == 1.0f32 {
                    let mut begin = table.matrices[p] as usize;
                    let mut count = counts[p] as usize;
                    if comptime!(mutant == 5) {
                        count = 1usize;
                    }
                    if comptime!(mutant == 11) {
                        begin = 0usize;
                        count = counts[0] as usize;
                    }
                    for i in begin..begin + count {
                        widest = larger(widest, spreads.at(i));
                    }
                }
                spread.set(slots[p] as usize, widest);
            }
        }
    }
}

/// Retracts every matrix and writes each factor's largest spread into its slot of `spread`.
pub(super) fn update<R: Engine>(
    b: &Device<R>,
    call: &Scalars<'_>,
    factors: &[(Factor, [usize; 2])],
    spread: &Tensor,
) -> Result<()> {
    let &Scalars { buffer, apply, iterations, power_iterations, mutant } = call;
    let entries = factors.iter().map(|(factor, [n, k])| tall::Entry {
        count: factor.count,
        n: *n,
        k: *k,
        start: Some(factor.start),
    });
    let of = Layout::new(entries, tall::blocks);
    let shares = b.float_scratch(&[of.cubes, of.widest, of.widest])?;
    let scales = b.float_scratch(&[of.cubes])?;
    let products = b.float_scratch(&[of.matrices, of.widest, of.widest])?;
    let (coefficients, spreads) = (b.float_scratch(&[of.matrices])?, b.float_scratch(&[of.matrices])?);
    let x_bytes = 4 * of.elements as u64;
    for round in 0..iterations.div_ceil(ROUND) {
        let with_spread = round == 0;

        let uses = [buffer, &shares, &scales];
        let bytes = x_bytes + shares.bytes() + scales.bytes();
        b.launch("retract::gram", of.grid(), bytes, &uses, |client, cubes, dim| {
            let [x, shares, scales] = uses.map(|t| b.floats(t));
            // Faults of the other kernels leave this one as it is, so that it is compiled once for all of them.
            let fault = fault_of(mutant);
            // SAFETY: a cube stays in its block of rows; cubes behind the last block write nothing.
            unsafe { gram_kernel::launch_unchecked::<R>(client, cubes, dim, x, shares, scales, of.table(), fault) }
        })?;

        let part = Part { iterations: ROUND.min(iterations - round * ROUND), power_iterations, with_spread, mutant };
        polar_small::launch(b, &of, &part, [&shares, &scales, &products, &coefficients, &spreads])?;

        let uses = [&products, &coefficients, &spreads, apply, buffer, spread];
        let bytes = 2 * x_bytes + products.bytes();
        b.launch("retract::multiply", of.grid(), bytes, &uses, |client, cubes, dim| {
            let [products, coefficients, spreads, apply, x, spread] = uses.map(|t| b.floats(t));
            let scalar = |f: fn(&Factor) -> usize| -> SequenceArg<R, u32> {
                (0..ENTRIES).map(|p| factors.get(p).map_or(0, |(factor, _)| f(factor) as u32)).collect()
            };
            let (counts, slots) = (scalar(|factor| factor.count), scalar(|factor| factor.slot));
            let (table, with_spread) = (of.table(), u32::from(with_spread));
            let fault = if mutant == 9 { fault_of(mutant) } else { tall::NO_FAULT };
            let mutant = if [5, 7, 10, 11, 12].contains(&mutant) { mutant } else { 0 };
            // SAFETY: a cube reads and writes its own rows.
            unsafe {
                multiply_kernel::launch_unchecked::<R>(
                    client,
                    cubes,
                    dim,
                    products,
                    coefficients,
                    spreads,
                    apply,
                    x,
                    spread,
                    table,
                    counts,
                    slots,
                    with_spread,
                    fault,
                    mutant,
                )
            }
        })?;
    }
    Ok(())
}
