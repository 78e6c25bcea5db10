//! The first launch of a class: the new momentum, and what norms and flags are made of.

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::fused::{Stack, Table, UNITS, cube_largest, in_block, larger, of_entry, origin_of};
use super::{Call, is_something};
use crate::cube;
use crate::device::Device;
use crate::runtime::Engine;
use crate::scale::{inverse_of, power_of_two};
use crate::tensor::{Floats, Tensor};

/// The new momentum of a block, in the long orientation, with what the norm of its matrix and the flag of its gradient
/// are made of.
///
/// Mutants: 1 takes the whole gradient, 12 is null (a renamed local).
#[cube(launch_unchecked)]
fn gather_kernel(
    grads: &Floats,
    m: &Floats,
    x: &mut Floats,
    scales: &mut Floats,
    squares: &mut Floats,
    moved: &mut Floats,
    firsts: Sequence<u32>,
    starts: Sequence<u32>,
    columns: Sequence<u32>,
    heads: Sequence<u32>,
    count: u32,
    n: u32,
    k: u32,
    blocks: u32,
    rows: u32,
    keep: f32,
    take: f32,
    #[comptime] turned: bool,
    #[comptime] mutant: u32,
) {
    let (n, k, blocks, rows) = (n as usize, k as usize, blocks as usize, rows as usize);
    let me = UNIT_POS as usize;
    let units = comptime!(UNITS as usize);
    let (matrix, first) = (CUBE_POS / blocks, CUBE_POS % blocks * rows);
    let here = matrix < count as usize;
    let mut shared = SharedMemory::<f32>::new(comptime!(UNITS as usize));
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
    for step in 0..(rows * k).div_ceil(units) {
        let i = step * units + me;
        if i < rows * k {
            let at = in_block(i, rows, k, turned);
            let (row, column) = (first + at / k, at % k);
            if here && row < n {
                let from = origin + row * row_step + column * column_step;
                let g = grads.at(from);
                let value = keep * m.at(from) + share * g;
                x.set((matrix * n + row) * k + column, value);
                largest = larger(largest, value.abs());
                if is_something(g) {
                    any = 1.0f32;
                }
            }
        }
    }
    let scale = power_of_two(cube_largest(largest, &mut shared));
    let inverse = inverse_of(scale);
    let any = cube_largest(any, &mut shared);
    let mut square = 0.0f32;
    for step in 0..(rows * k).div_ceil(units) {
        let i = step * units + me;
        if i < rows * k {
            // The elements that this unit has written.
            let at = in_block(i, rows, k, turned);
            if here && first + at / k < n {
                let value = x.at((matrix * n + first) * k + at) * inverse;
                square += value * value;
            }
        }
    }
    let square = cube::sum(square, &mut shared);
    if here && me == 0 {
        let place = matrix * blocks + CUBE_POS % blocks;
        scales.set(place, scale);
        squares.set(place, square);
        moved.set(place, any);
    }
}

/// Gathers a class; gives `[C, blocks]`, 1 where a block has a gradient.
pub(super) fn launch<R: Engine>(b: &Device<R>, call: &Call<'_>, stack: &Stack, table: &Table<'_>) -> Result<Tensor> {
    let moved = b.float_scratch(stack.scales.shape())?;
    let uses = [call.grads, call.m, &stack.x, &stack.scales, &stack.squares, &moved];
    b.launch("muon::gather", stack.grid(), 3 * stack.x.bytes(), &uses, |client, cubes, dim| {
        let ([grads, m, x, scales, squares, moved], [count, n, k, blocks, rows]) =
            (uses.map(|t| b.floats(t)), stack.words());
        let (firsts, starts) = (table.firsts(), table.words(|entry| entry.start));
        let (columns, heads) = (table.words(|entry| entry.columns), table.words(|entry| entry.heads));
        // SAFETY: entries lie inside the buffers; rows past the last and cubes behind the last matrix touch nothing.
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
                firsts,
                starts,
                columns,
                heads,
                count,
                n,
                k,
                blocks,
                rows,
                call.keep,
                call.take,
                table.turned(),
                stack.mutant(&[1, 7, 12]),
            )
        }
    })?;
    Ok(moved)
}
