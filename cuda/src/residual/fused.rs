//! Arm `fused`. A cube has a block of elements and a unit every [`cube::UNITS`]-th of them, so that neighbours read
//! neighbours. Forward is one launch. Backward is one for dy, which leaves one sum of dh y a block, and one that adds up
//! the blocks.

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::Saved;
use crate::cube;
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor};

/// The largest number of blocks: enough to fill a large device, few enough for one cube to add up.
const BLOCKS: usize = 1024;

/// Elements of a unit in a small tensor: several loads at once hide their latency.
const STEPS: usize = 4;

/// h = c + rho y.
///
/// Mutants: 1 drops rho, 2 drops the stream, 3 is null (a renamed local).
#[cube(launch_unchecked)]
fn forward_kernel(c: &Floats, y: &Floats, rho: &Floats, h: &mut Floats, len: u32, steps: u32, #[comptime] mutant: u32) {
    let mut scale = rho.at(0);
    if comptime!(mutant == 1) {
        scale = 1.0f32;
    }
    if comptime!(mutant == 3) {
        let renamed = rho.at(0);
        scale = renamed;
    }
    let first = CUBE_POS * steps as usize * comptime!(cube::UNITS as usize) + UNIT_POS as usize;
    for step in 0..steps as usize {
        let i = first + step * comptime!(cube::UNITS as usize);
        if i < len as usize {
            let mut value = scale * y.at(i);
            if comptime!(mutant != 2) {
                value += c.at(i);
            }
            h.set(i, value);
        }
    }
}

/// dy = rho dh, and the sum of dh y over a block.
///
/// Mutants: 4 drops rho, 5 multiplies the sum by rho.
#[cube(launch_unchecked)]
fn backward_kernel(
    y: &Floats,
    rho: &Floats,
    dh: &Floats,
    dy: &mut Floats,
    sums: &mut Floats,
    len: u32,
    steps: u32,
    #[comptime] mutant: u32,
) {
    let mut shared = SharedMemory::<f32>::new(comptime!(cube::UNITS as usize));
    let scale = rho.at(0);
    let first = CUBE_POS * steps as usize * comptime!(cube::UNITS as usize) + UNIT_POS as usize;
    let mut part = 0.0f32;
    for step in 0..steps as usize {
        let i = first + step * comptime!(cube::UNITS as usize);
        if i < len as usize {
            let up = dh.at(i);
            if comptime!(mutant == 4) {
                dy.set(i, up);
            } else {
                dy.set(i, scale * up);
            }
            if comptime!(mutant == 5) {
                part += scale * up * y.at(i);
            } else {
                part += up * y.at(i);
            }
        }
    }
    let sum = cube::sum(part, &mut shared);
    // The first unit of a cube that has elements has the first of them.
    if UNIT_POS == 0 && first < len as usize {
        sums.set(CUBE_POS, sum);
    }
}

/// Adds all sums to `drho`. One cube; unit `i` adds every [`cube::UNITS`]-th sum from the `i`-th on, and the units are
/// added up.
///
/// Mutants: 6 misses the last sum.
#[cube(launch_unchecked)]
fn drho_kernel(sums: &Floats, drho: &mut Floats, blocks: u32, #[comptime] mutant: u32) {
    let mut shared = SharedMemory::<f32>::new(comptime!(cube::UNITS as usize));
    let units = comptime!(cube::UNITS as usize);
    let mut blocks = blocks as usize;
    if comptime!(mutant == 6) {
        blocks -= 1;
    }
    let mut part = 0.0f32;
    for step in 0..blocks.div_ceil(units) {
        let block = step * units + UNIT_POS as usize;
        if block < blocks {
            part += sums.at(block);
        }
    }
    let sum = cube::sum(part, &mut shared);
    if UNIT_POS == 0 {
        drho.set(0, drho.at(0) + sum);
    }
}

/// Blocks of `len` elements, and elements of a unit.
fn split(len: usize) -> (usize, usize) {
    let steps = len.div_ceil(BLOCKS * cube::UNITS as usize).max(STEPS);
    (len.div_ceil(steps * cube::UNITS as usize), steps)
}

/// h.
pub(super) fn forward<R: Engine>(b: &Device<R>, c: &Tensor, y: &Tensor, rho: &Tensor, h: &Tensor) -> Result<()> {
    let (blocks, steps) = split(h.len());
    let uses = [c, y, rho, h];
    let (grid, mutant) = (Grid::cubes(blocks, cube::UNITS), b.mutant(super::STEM));
    b.launch("residual::forward", grid, 3 * h.bytes(), &uses, |client, count, dim| {
        let [c, y, rho, out] = uses.map(|t| b.floats(t));
        let (len, steps) = (h.len() as u32, steps as u32);
        // SAFETY: c, y and h have `len` elements; units past them do nothing.
        unsafe { forward_kernel::launch_unchecked::<R>(client, count, dim, c, y, rho, out, len, steps, mutant) }
    })
}

/// dy; the gradient of rho is added to `drho`.
pub(super) fn backward<R: Engine>(b: &Device<R>, saved: &Saved, dh: &Tensor, dy: &Tensor, drho: &Tensor) -> Result<()> {
    let Saved { y, rho, .. } = saved;
    if dh.is_empty() {
        return Ok(());
    }
    let mutant = b.mutant(super::STEM);
    let (blocks, steps) = split(dh.len());
    let sums = b.float_scratch(&[blocks])?;
    let uses = [y, rho, dh, dy, &sums];
    let bytes = 3 * dh.bytes() + sums.bytes();
    let (len, steps) = (dh.len() as u32, steps as u32);
    b.launch("residual::backward", Grid::cubes(blocks, cube::UNITS), bytes, &uses, |client, count, dim| {
        let [y, rho, dh, dy, sums] = uses.map(|t| b.floats(t));
        // SAFETY: y, dh and dy have `len` elements, `sums` one a block; units past them do nothing.
        unsafe { backward_kernel::launch_unchecked::<R>(client, count, dim, y, rho, dh, dy, sums, len, steps, mutant) }
    })?;
    let bytes = sums.bytes() + 2 * drho.bytes();
    b.launch("residual::drho", Grid::cubes(1, cube::UNITS), bytes, &[&sums, drho], |client, count, dim| {
        let (sums, drho) = (b.floats(&sums), b.floats(drho));
        // SAFETY: `sums` has one element a block.
        unsafe { drho_kernel::launch_unchecked::<R>(client, count, dim, sums, drho, blocks as u32, mutant) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_every_element_and_are_few() {
        let unit = STEPS * cube::UNITS as usize;
        for len in [0, 1, unit, unit + 1, BLOCKS * unit, BLOCKS * unit + 1, i32::MAX as usize] {
            let (blocks, steps) = split(len);
            let elements = steps * cube::UNITS as usize;
            assert!(blocks <= BLOCKS && blocks * elements >= len, "{len}");
            assert!(blocks == 0 || (blocks - 1) * elements < len, "{len}");
            // What units past the end count to fits 32 bits.
            assert!(blocks * elements < u32::MAX as usize, "{len}");
        }
    }
}
