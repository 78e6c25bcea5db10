//! The last launches: the plus, and what changes in the flat buffers.

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::table::{AHEAD, Places, Stack, element_of, place_of};
use super::{Call, divisor_of};
use crate::cube;
use crate::device::Device;
use crate::runtime::Engine;
use crate::tall::{self, Block, Table, UNITS, block_of, pick};
use crate::tensor::{Floats, Tensor};

/// Columns that the units of [`columns_kernel`] take at a time, and the units that share one.
const COLUMNS: usize = 64;
const LANES: usize = UNITS as usize / COLUMNS;

/// The mean of the norms of a matrix's rows. Every unit must call it.
#[cube]
fn mean_of(norms: &Floats, block: &Block, shared: &mut SharedMemory<f32>) -> f32 {
    let units = comptime!(UNITS as usize);
    let mut sum = 0.0f32;
    for step in 0..block.n.div_ceil(units) {
        let i = step * units + UNIT_POS as usize;
        if block.here && i < block.n {
            sum += norms.at(block.norms + i);
        }
    }
    cube::total(sum, shared) / f32::cast_from(block.n as u32)
}

/// The sums of squares of the columns of a block whose rows are normalised. A column is shared by [`LANES`] units, each
/// with every [`LANES`]-th row.
///
/// Mutants: 8 takes no norm but zero for noise.
#[cube(launch_unchecked)]
fn columns_kernel(x: &Floats, norms: &Floats, sums: &mut Floats, table: Table, #[comptime] mutant: u32) {
    let me = UNIT_POS as usize;
    let wide = comptime!(COLUMNS);
    let lanes = comptime!(LANES);
    let block = block_of(&table, tall::NO_FAULT);
    let mut shared = SharedMemory::<f32>::new(comptime!(UNITS as usize));
    let mean = mean_of(norms, &block, &mut shared);
    let mut values = Array::<f32>::new(AHEAD);
    let mut of_rows = Array::<f32>::new(AHEAD);
    for tile in 0..block.k.div_ceil(wide) {
        let column = tile * wide + me % wide;
        let mut sum = 0.0f32;
        for step in 0..block.rows.div_ceil(comptime!(AHEAD) * lanes) {
            #[unroll]
            for n in 0..comptime!(AHEAD) {
                let row = block.first + (step * comptime!(AHEAD) + n) * lanes + me / wide;
                values[n] = 0.0f32;
                of_rows[n] = 1.0f32;
                if row < block.end && column < block.k {
                    values[n] = x.at(block.x + row * block.k + column);
                    of_rows[n] = norms.at(block.norms + row);
                }
            }
            #[unroll]
            for n in 0..comptime!(AHEAD) {
                let value = values[n] / divisor_of(of_rows[n], mean, mutant);
                sum += value * value;
            }
        }
        shared[me] = sum;
        sync_cube();
        if me < wide && block.here && column < block.k {
            let mut all = 0.0f32;
            for lane in 0..lanes {
                all += shared[lane * wide + me];
            }
            sums.set(CUBE_POS * block.widest + column, all);
        }
        sync_cube();
    }
}

/// M and W of a block, unless nothing of its matrix has a gradient. With the plus, every cube makes the divisors of the
/// columns for itself, into scratch of its own.
///
/// Mutants: 5 ignores the flag, 6 moves matrices without a gradient, 8 takes no norm but zero for noise, 9 leaves the rows
/// here, columns of the short orientation, as they are, 10 drops the decay, 11 takes the first entry's scale.
#[cube(launch_unchecked)]
fn write_kernel(
    grads: &Floats,
    x: &Floats,
    norms: &Floats,
    sums: &Floats,
    moved: &Floats,
    lr: &Floats,
    apply: &Floats,
    divisors: &mut Floats,
    m: &mut Floats,
    params: &mut Floats,
    table: Table,
    places: Places,
    scales: Sequence<f32>,
    decays: Sequence<f32>,
    keep: f32,
    take: f32,
    #[comptime] plus: bool,
    #[comptime] mutant: u32,
) {
    let me = UNIT_POS as usize;
    let units = comptime!(UNITS as usize);
    let block = block_of(&table, tall::NO_FAULT);
    let k = block.k;
    let own = CUBE_POS * block.widest;
    let mut row_mean = 0.0f32;
    if comptime!(plus) {
        let mut shared = SharedMemory::<f32>::new(comptime!(UNITS as usize));
        row_mean = mean_of(norms, &block, &mut shared);
        let mut total = 0.0f32;
        for step in 0..k.div_ceil(units) {
            let column = step * units + me;
            if block.here && column < k {
                let mut square = 0.0f32;
                for number in 0..block.blocks {
                    square += sums.at((block.cubes + number) * block.widest + column);
                }
                divisors.set(own + column, square.sqrt());
                total += square.sqrt();
            }
        }
        let mean = cube::total(total, &mut shared) / f32::cast_from(k as u32);
        for step in 0..k.div_ceil(units) {
            let column = step * units + me;
            if block.here && column < k {
                let divisor = divisor_of(divisors.at(own + column), mean, mutant);
                divisors.set(own + column, divisor);
            }
        }
        sync_storage();
    }
    let mut any = 0.0f32;
    if block.here {
        for number in 0..block.blocks {
            any += moved.at(block.cubes + number);
        }
    }
    if comptime!(mutant == 6) {
        any = 1.0f32;
    }
    let mut flag = apply.at(0);
    if comptime!(mutant == 5) {
        flag = 1.0f32;
    }
    if block.here && flag == 1.0f32 && any > 0.0f32 {
        let place = place_of(&block, &table, &places, mutant);
        let mut step_size = lr.at(0) * pick::<f32>(CUBE_POS, &table.cubes, &scales);
        if comptime!(mutant == 11) {
            step_size = lr.at(0) * scales[0];
        }
        let mut decay = lr.at(0) * pick::<f32>(CUBE_POS, &table.cubes, &decays);
        if comptime!(mutant == 10) {
            decay = 0.0f32;
        }
        let elements = block.rows * k;
        // Places in the flat buffers; the largest number where there is no element.
        let mut flats = Array::<u32>::new(AHEAD);
        let mut values = Array::<f32>::new(AHEAD);
        let mut of_rows = Array::<f32>::new(AHEAD);
        let mut of_columns = Array::<f32>::new(AHEAD);
        let mut befores = Array::<f32>::new(AHEAD);
        let mut gs = Array::<f32>::new(AHEAD);
        let mut weights = Array::<f32>::new(AHEAD);
        for step in 0..elements.div_ceil(comptime!(AHEAD) * units) {
            // Nothing is computed with the first that is read before the last is under way.
            #[unroll]
            for n in 0..comptime!(AHEAD) {
                let element = element_of(step * comptime!(AHEAD) + n, elements, &block, &place);
                flats[n] = comptime!(u32::MAX).runtime();
                if element.here {
                    flats[n] = element.flat as u32;
                    values[n] = x.at(block.x + element.row * k + element.column);
                    if comptime!(plus) {
                        of_rows[n] = norms.at(block.norms + element.row);
                        of_columns[n] = divisors.at(own + element.column);
                    }
                    befores[n] = m.at(element.flat);
                    gs[n] = grads.at(element.flat);
                    weights[n] = params.at(element.flat);
                }
            }
            #[unroll]
            for n in 0..comptime!(AHEAD) {
                if flats[n] != comptime!(u32::MAX) {
                    let mut value = values[n];
                    if comptime!(plus) {
                        let mut divisor = divisor_of(of_rows[n], row_mean, mutant);
                        if comptime!(mutant == 9) {
                            divisor = 1.0f32;
                        }
                        value = value / divisor / of_columns[n];
                    }
                    let flat = flats[n] as usize;
                    m.set(flat, keep * befores[n] + take * gs[n]);
                    let w = weights[n];
                    params.set(flat, w - decay * w - step_size * value);
                }
            }
        }
    }
}

/// Adds up the columns of the iterate `x`; gives a row of sums a block.
pub(super) fn columns<R: Engine>(b: &Device<R>, of: &Stack, x: &Tensor) -> Result<Tensor> {
    let sums = b.float_scratch(&[of.layout.cubes, of.layout.widest])?;
    let uses = [x, &of.norms, &sums];
    b.launch("muon::columns", of.layout.grid(), x.bytes(), &uses, |client, cubes, dim| {
        let [x, norms, sums] = uses.map(|t| b.floats(t));
        // SAFETY: a cube stays in its block; rows past the last touch nothing.
        unsafe {
            columns_kernel::launch_unchecked::<R>(
                client,
                cubes,
                dim,
                x,
                norms,
                sums,
                of.layout.table(),
                of.mutant(&[8]),
            )
        }
    })?;
    Ok(sums)
}

/// Moves the matrices by the iterate `x`.
pub(super) fn launch<R: Engine>(b: &Device<R>, call: &Call<'_>, of: &Stack, [x, sums]: [&Tensor; 2]) -> Result<()> {
    let (across, down) = of.layout.grid().cubes;
    let divisors = b.float_scratch(&[across as usize * down as usize, of.layout.widest])?;
    let uses = [call.grads, x, &of.norms, sums, &of.moved, call.lr, call.apply, &divisors, call.m, call.params];
    b.launch("muon::write", of.layout.grid(), 6 * x.bytes(), &uses, |client, cubes, dim| {
        let [grads, x, norms, sums, moved, lr, apply, divisors, m, params] = uses.map(|t| b.floats(t));
        let (scales, decays) = (of.floats(|entry| entry.scale), of.floats(|entry| entry.weight_decay));
        // SAFETY: entries lie inside the buffers; rows past the last and cubes behind the last block touch nothing but the
        // divisors of their own.
        unsafe {
            write_kernel::launch_unchecked::<R>(
                client,
                cubes,
                dim,
                grads,
                x,
                norms,
                sums,
                moved,
                lr,
                apply,
                divisors,
                m,
                params,
                of.layout.table(),
                of.places(),
                scales,
                decays,
                call.keep,
                call.take,
                call.plus,
                of.mutant(&[5, 6, 7, 8, 9, 10, 11]),
            )
        }
    })
}
