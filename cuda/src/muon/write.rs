//! The last launches of a class: the plus, and what changes in the flat buffers.

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::fused::{Stack, Table, UNITS, cube_sum, in_block, of_entry, origin_of};
use super::{Call, divisor_of};
use crate::device::Device;
use crate::ranges;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor};

/// Columns that the units of [`columns_kernel`] take at a time, and the units that share one.
const COLUMNS: usize = 64;
const LANES: usize = UNITS as usize / COLUMNS;

/// The mean of the norms of a matrix's rows. Every unit must call it.
#[cube]
fn mean_of(norms: &Floats, matrix: usize, n: usize, here: bool, shared: &mut SharedMemory<f32>) -> f32 {
    let units = comptime!(UNITS as usize);
    let mut sum = 0.0f32;
    for step in 0..n.div_ceil(units) {
        let i = step * units + UNIT_POS as usize;
        if here && i < n {
            sum += norms.at(matrix * n + i);
        }
    }
    cube_sum(sum, shared) / f32::cast_from(n as u32)
}

/// The sums of squares of the columns of a block whose rows are normalised. A column is shared by [`LANES`] units, each
/// with every [`LANES`]-th row.
///
/// Mutants: 8 takes no norm but zero for noise.
#[cube(launch_unchecked)]
fn columns_kernel(
    x: &Floats,
    norms: &Floats,
    sums: &mut Floats,
    count: u32,
    n: u32,
    k: u32,
    blocks: u32,
    rows: u32,
    #[comptime] mutant: u32,
) {
    let (n, k, blocks, rows) = (n as usize, k as usize, blocks as usize, rows as usize);
    let me = UNIT_POS as usize;
    let wide = comptime!(COLUMNS);
    let lanes = comptime!(LANES);
    let (matrix, first) = (CUBE_POS / blocks, CUBE_POS % blocks * rows);
    let here = matrix < count as usize;
    let mut shared = SharedMemory::<f32>::new(comptime!(UNITS as usize));
    let mean = mean_of(norms, matrix, n, here, &mut shared);
    for tile in 0..k.div_ceil(wide) {
        let column = tile * wide + me % wide;
        let mut sum = 0.0f32;
        for step in 0..rows.div_ceil(lanes) {
            let offset = step * lanes + me / wide;
            let row = first + offset;
            if here && offset < rows && row < n && column < k {
                let value =
                    x.at((matrix * n + row) * k + column) / divisor_of(norms.at(matrix * n + row), mean, mutant);
                sum += value * value;
            }
        }
        shared[me] = sum;
        sync_cube();
        if me < wide && here && column < k {
            let mut all = 0.0f32;
            for lane in 0..lanes {
                all += shared[lane * wide + me];
            }
            sums.set((matrix * blocks + CUBE_POS % blocks) * k + column, all);
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
    firsts: Sequence<u32>,
    starts: Sequence<u32>,
    columns: Sequence<u32>,
    heads: Sequence<u32>,
    factors: Sequence<f32>,
    decays: Sequence<f32>,
    count: u32,
    n: u32,
    k: u32,
    blocks: u32,
    rows: u32,
    keep: f32,
    take: f32,
    #[comptime] turned: bool,
    #[comptime] plus: bool,
    #[comptime] mutant: u32,
) {
    let (n, k, blocks, rows) = (n as usize, k as usize, blocks as usize, rows as usize);
    let me = UNIT_POS as usize;
    let units = comptime!(UNITS as usize);
    let (matrix, first) = (CUBE_POS / blocks, CUBE_POS % blocks * rows);
    let here = matrix < count as usize;
    let own = CUBE_POS * k;
    let mut row_mean = 0.0f32;
    if comptime!(plus) {
        let mut shared = SharedMemory::<f32>::new(comptime!(UNITS as usize));
        row_mean = mean_of(norms, matrix, n, here, &mut shared);
        let mut total = 0.0f32;
        for step in 0..k.div_ceil(units) {
            let column = step * units + me;
            if here && column < k {
                let mut square = 0.0f32;
                for block in 0..blocks {
                    square += sums.at((matrix * blocks + block) * k + column);
                }
                divisors.set(own + column, square.sqrt());
                total += square.sqrt();
            }
        }
        let mean = cube_sum(total, &mut shared) / f32::cast_from(k as u32);
        for step in 0..k.div_ceil(units) {
            let column = step * units + me;
            if here && column < k {
                let divisor = divisor_of(divisors.at(own + column), mean, mutant);
                divisors.set(own + column, divisor);
            }
        }
        sync_storage();
    }
    let mut any = 0.0f32;
    if here {
        for block in 0..blocks {
            any += moved.at(matrix * blocks + block);
        }
    }
    if comptime!(mutant == 6) {
        any = 1.0f32;
    }
    let mut flag = apply.at(0);
    if comptime!(mutant == 5) {
        flag = 1.0f32;
    }
    if here && flag == 1.0f32 && any > 0.0f32 {
        let mut row_step = of_entry(matrix, &firsts, &columns);
        let mut column_step = 1usize;
        let (mut stored_rows, mut width) = (n, k);
        if comptime!(turned) {
            column_step = row_step;
            row_step = 1usize;
            stored_rows = k;
            width = n;
        }
        let origin = origin_of(matrix, stored_rows, width, &firsts, &starts, &columns, &heads, mutant);
        let mut step_size = lr.at(0) * ranges::value_of(matrix, &firsts, &factors);
        if comptime!(mutant == 11) {
            step_size = lr.at(0) * factors[0];
        }
        let mut decay = lr.at(0) * ranges::value_of(matrix, &firsts, &decays);
        if comptime!(mutant == 10) {
            decay = 0.0f32;
        }
        for step in 0..(rows * k).div_ceil(units) {
            let i = step * units + me;
            if i < rows * k {
                let place = in_block(i, rows, k, turned);
                let (row, column) = (first + place / k, place % k);
                if row < n {
                    let mut value = x.at((matrix * n + row) * k + column);
                    if comptime!(plus) {
                        let mut divisor = divisor_of(norms.at(matrix * n + row), row_mean, mutant);
                        if comptime!(mutant == 9) {
                            divisor = 1.0f32;
                        }
                        value = value / divisor / divisors.at(own + column);
                    }
                    let at = origin + row * row_step + column * column_step;
                    m.set(at, keep * m.at(at) + take * grads.at(at));
                    let w = params.at(at);
                    params.set(at, w - decay * w - step_size * value);
                }
            }
        }
    }
}

/// Adds up the columns of the iterate `x`; gives `[C, blocks, k]`.
pub(super) fn columns<R: Engine>(b: &Device<R>, stack: &Stack, x: &Tensor) -> Result<Tensor> {
    let sums = b.float_scratch(&[stack.count, stack.blocks.count, stack.k])?;
    let uses = [x, &stack.norms, &sums];
    b.launch("muon::columns", stack.grid(), x.bytes(), &uses, |client, cubes, dim| {
        let ([x, norms, sums], [count, n, k, blocks, rows]) = (uses.map(|t| b.floats(t)), stack.words());
        let mutant = stack.mutant(&[8]);
        // SAFETY: a cube stays in its block; rows past the last touch nothing.
        unsafe {
            columns_kernel::launch_unchecked::<R>(client, cubes, dim, x, norms, sums, count, n, k, blocks, rows, mutant)
        }
    })?;
    Ok(sums)
}

/// Moves the matrices of a class by the iterate `x`.
pub(super) fn launch<R: Engine>(
    b: &Device<R>,
    call: &Call<'_>,
    stack: &Stack,
    table: &Table<'_>,
    [x, sums, moved]: [&Tensor; 3],
) -> Result<()> {
    let (across, down) = stack.grid().cubes;
    let divisors = b.float_scratch(&[across as usize * down as usize, stack.k])?;
    let uses = [call.grads, x, &stack.norms, sums, moved, call.lr, call.apply, &divisors, call.m, call.params];
    b.launch("muon::write", stack.grid(), 6 * x.bytes(), &uses, |client, cubes, dim| {
        let ([grads, x, norms, sums, moved, lr, apply, divisors, m, params], [count, n, k, blocks, rows]) =
            (uses.map(|t| b.floats(t)), stack.words());
        let (firsts, starts) = (table.firsts(), table.words(|entry| entry.start));
        let (columns, heads) = (table.words(|entry| entry.columns), table.words(|entry| entry.heads));
        let (factors, decays) = (table.floats(|entry| entry.scale), table.floats(|entry| entry.weight_decay));
        // SAFETY: entries lie inside the buffers; rows past the last and cubes behind the last matrix touch nothing but
        // the divisors of their own.
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
                firsts,
                starts,
                columns,
                heads,
                factors,
                decays,
                count,
                n,
                k,
                blocks,
                rows,
                call.keep,
                call.take,
                table.turned(),
                call.plus,
                stack.mutant(&[5, 6, 7, 8, 9, 10, 11]),
            )
        }
    })
}
