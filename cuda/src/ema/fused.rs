//! Arm `fused`: one launch over all ranges, or one for every [`ranges::PIECES`] pieces of the buffer. Every unit moves
//! [`ELEMENTS`] elements, neighbours side by side. It reads both buffers inside the ranges once and writes one: three
//! times the ranges.

use cubecl::prelude::*;
use dormouse_reference::Result;
use dormouse_reference::ema::{Config, Inputs};

use super::{OP, take};
use crate::device::Device;
use crate::launch::Grid;
use crate::ranges;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor};

/// Units of a cube.
const UNITS: u32 = 256;

/// Elements of a unit.
const ELEMENTS: u32 = 8;

/// What a piece inside a range has for a value, and one outside all of them.
const INSIDE: f32 = 1.0;
const OUTSIDE: f32 = 0.0;

/// Moves the elements from `first` to `last` that lie in a range.
///
/// Mutants: 1 swaps the shares of teacher and model, 2 ignores the flag, 3 moves elements outside the ranges, 4 is null (a
/// renamed local), 5 misses the last element, 6 multiplies the two apart.
#[cube(launch_unchecked)]
fn update_kernel(
    online: &Floats,
    apply: &Floats,
    teacher: &mut Floats,
    starts: Sequence<u32>,
    inside: Sequence<f32>,
    first: u32,
    last: u32,
    elements: u32,
    take: f32,
    #[comptime] mutant: u32,
) {
    let units = comptime!(UNITS as usize);
    let mut flag = apply.at(0);
    if comptime!(mutant == 2) {
        flag = 1.0f32;
    }
    if flag == 1.0f32 {
        let mut end = last as usize;
        if comptime!(mutant == 5) {
            end -= 1;
        }
        let begin = first as usize + CUBE_POS * units * elements as usize + UNIT_POS as usize;
        for element in 0..elements as usize {
            let i = begin + element * units;
            if i < end {
                let mut moves = ranges::value_of(i, &starts, &inside) > 0.0f32;
                if comptime!(mutant == 3) {
                    moves = true;
                }
                if moves {
                    let t = teacher.at(i);
                    let mut value = t + take * (online.at(i) - t);
                    if comptime!(mutant == 1) {
                        value = online.at(i) + take * (t - online.at(i));
                    }
                    if comptime!(mutant == 4) {
                        let renamed = t + take * (online.at(i) - t);
                        value = renamed;
                    }
                    if comptime!(mutant == 6) {
                        // Two shares that miss 1 by two units in the last place: an error that only a law can see.
                        value = 0.9999998f32 * (1.0f32 - take) * t + take * online.at(i);
                    }
                    teacher.set(i, value);
                }
            }
        }
    }
}

/// Moves every range.
pub(super) fn update<R: Engine>(b: &Device<R>, config: &Config, inputs: &Inputs<&Tensor>) -> Result<()> {
    let &Inputs { teacher, online, apply } = inputs;
    let pieces = ranges::pieces(teacher.len(), config.ranges.iter().map(|range| (range.clone(), INSIDE)), OUTSIDE);
    let moves = |piece: &ranges::Piece| piece.value == INSIDE;
    let (Some(from), Some(to)) = (pieces.iter().position(moves), pieces.iter().rposition(moves)) else {
        return Ok(());
    };
    let uses = [online, apply, teacher];
    let mutant = b.mutant(super::STEM);
    for part in pieces[from..=to].chunks(ranges::PIECES) {
        let (first, last) = (part[0].range.start, part[part.len() - 1].range.end);
        let moved: usize = part.iter().filter(|piece| moves(piece)).map(|piece| piece.range.len()).sum();
        let grid = Grid::cubes((last - first).div_ceil((UNITS * ELEMENTS) as usize), UNITS);
        b.launch(OP, grid, 3 * 4 * moved as u64, &uses, |client, count, dim| {
            let [online, apply, teacher] = uses.map(|t| b.floats(t));
            let (starts, inside) = ranges::scalars(part);
            let (first, last, take) = (first as u32, last as u32, take(config));
            // SAFETY: pieces lie inside the buffers; units past the last element do nothing.
            unsafe {
                update_kernel::launch_unchecked::<R>(
                    client, count, dim, online, apply, teacher, starts, inside, first, last, ELEMENTS, take, mutant,
                )
            }
        })?;
    }
    Ok(())
}
