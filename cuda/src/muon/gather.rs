//! The first launch: the new momentum, what norms and flags are made of, and the blocks' shares of the first Gram matrix.

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::table::{AHEAD, Places, Stack, element_of, place_of};
use super::{Call, is_something};
use crate::cube::{self, larger};
use crate::device::Device;
use crate::runtime::Engine;
use crate::scale::{inverse_of, power_of_two};
use crate::tall::{self, Table, UNITS, block_of};
use crate::tensor::{Floats, Tensor};

/// The new momentum of a block, in the long orientation, with what the norm of its matrix and the flag of its gradient
/// are made of. With `grams`, its share of A besides, of the block over its own power of two.
///
/// Mutants: 1 takes the whole gradient, 7 the first head, 12 is null (a renamed local).
#[cube(launch_unchecked)]
fn gather_kernel(
    grads: &Floats,
    m: &Floats,
    x: &mut Floats,
    scales: &mut Floats,
    squares: &mut Floats,
    moved: &mut Floats,
    shares: &mut Floats,
    table: Table,
    places: Places,
    keep: f32,
    take: f32,
    #[comptime] grams: bool,
    #[comptime] columns: usize,
    #[comptime] mutant: u32,
) {
    let me = UNIT_POS as usize;
    let units = comptime!(UNITS as usize);
    let block = block_of(&table, tall::NO_FAULT);
    let place = place_of(&block, &table, &places, mutant);
    let mut shared = SharedMemory::<f32>::new(comptime!(UNITS as usize));
    let mut share = take;
    if comptime!(mutant == 1) {
        share = 1.0f32;
    }
    if comptime!(mutant == 12) {
        let renamed = take;
        share = renamed;
    }
    let mut largest = 0.0f32;
    let mut any = 0.0f32;
    let elements = block.rows * block.k;
    // Places in scratch; the largest number where there is no element.
    let mut places_of_x = Array::<u32>::new(AHEAD);
    let mut gs = Array::<f32>::new(AHEAD);
    let mut befores = Array::<f32>::new(AHEAD);
    for step in 0..elements.div_ceil(comptime!(AHEAD) * units) {
        // Nothing is computed with the first that is read before the last is under way.
        #[unroll]
        for n in 0..comptime!(AHEAD) {
            let element = element_of(step * comptime!(AHEAD) + n, elements, &block, &place);
            places_of_x[n] = comptime!(u32::MAX).runtime();
            gs[n] = 0.0f32;
            befores[n] = 0.0f32;
            if element.here {
                places_of_x[n] = (block.x + element.row * block.k + element.column) as u32;
                gs[n] = grads.at(element.flat);
                befores[n] = m.at(element.flat);
            }
        }
        #[unroll]
        for n in 0..comptime!(AHEAD) {
            if places_of_x[n] != comptime!(u32::MAX) {
                let value = keep * befores[n] + share * gs[n];
                x.set(places_of_x[n] as usize, value);
                largest = larger(largest, value.abs());
                if is_something(gs[n]) {
                    any = 1.0f32;
                }
            }
        }
    }
    let scale = power_of_two(cube::largest(largest, &mut shared));
    let inverse = inverse_of(scale);
    let any = cube::largest(any, &mut shared);
    // What a unit reads now another one may have written.
    sync_storage();
    let mut square = 0.0f32;
    let held = (block.end - block.first) * block.k;
    for step in 0..held.div_ceil(units) {
        let i = step * units + me;
        if i < held {
            let value = x.at(block.x + block.first * block.k + i) * inverse;
            square += value * value;
        }
    }
    let square = cube::sum(square, &mut shared);
    if block.here && me == 0 {
        scales.set(CUBE_POS, scale);
        squares.set(CUBE_POS, square);
        moved.set(CUBE_POS, any);
    }
    if comptime!(grams) {
        tall::gram(x, shares, &block, inverse, columns);
    }
}

/// Gathers; with `grams` the first of the iteration's shares besides, into `shares`, which is not touched else.
pub(super) fn launch<R: Engine>(
    b: &Device<R>,
    call: &Call<'_>,
    of: &Stack,
    shares: &Tensor,
    grams: bool,
) -> Result<()> {
    let uses = [call.grads, call.m, &of.x, &of.scales, &of.squares, &of.moved, shares];
    let bytes = 3 * of.x.bytes() + if grams { shares.bytes() } else { 0 };
    b.launch("muon::gather", of.layout.grid(), bytes, &uses, |client, cubes, dim| {
        let [grads, m, x, scales, squares, moved, shares] = uses.map(|t| b.floats(t));
        let (table, places) = (of.layout.table(), of.places());
        let mutant = of.mutant(&[1, 7, 12]);
        // SAFETY: entries lie inside the buffers; cubes behind the last block have no rows.
        unsafe {
            gather_kernel::launch_unchecked::<R>(
                client,
                cubes,
                dim,
                grads,
                m,
                x,
                scales,
                squares,
                moved,
                shares,
                table,
                places,
                call.keep,
                call.take,
                grams,
                of.layout.columns(),
                mutant,
            )
        }
    })
}
