//! Arm `fused`: one launch reads every gradient once (one for every [`ranges::PIECES`] pieces) and leaves some sums a
//! cube, and one adds them up and decides.
//!
//! Squares go into three sums by their magnitude, each with a power of two that keeps a hundred million of them inside
//! the range of f32:
//!
//! | magnitudes | sum of | squares |
//! |---|---|---|
//! | from 2^50 on | (2^-80 g)^2 | 2^-60 .. 2^96 |
//! | from 2^-50 to 2^50 | g^2 | 2^-100 .. 2^100 |
//! | below 2^-50 | (2^96 g)^2 | 2^-106 .. 2^92 |
//!
//! A sum two rows below one that is not zero is less than its rounding. Every sum is a fixed tree: a unit's elements
//! first to last, units in halves, cubes in order.

use cubecl::prelude::*;
use dormouse_reference::{DType, Result, Tensors};

use super::{Call, INFINITY, STEM, decide, magnitude, not_finite};
use crate::cube::{self, UNITS};
use crate::device::Device;
use crate::launch::Grid;
use crate::ranges;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor, Words};

/// Elements of a unit before there are more cubes of them than [`CUBES`].
const ELEMENTS: usize = 8;

/// Elements that a unit reads before it uses the first.
const AHEAD: usize = 4;

/// The most cubes of a launch: some for every multiprocessor of a large device, and few sums for the last launch.
const CUBES: usize = 1024;

/// Sums of a cube.
const SUMS: usize = 3;

/// 2^power.
const fn two(power: i32) -> f32 {
    f32::from_bits(((127 + power) as u32) << 23)
}

/// The bits of the smallest large magnitude, and of the smallest that is not small.
const LARGE: u32 = two(50).to_bits();
const MIDDLE: u32 = two(-50).to_bits();

/// What large and small magnitudes are multiplied by.
const SHRINK: f32 = two(-80);
const GROW: f32 = two(96);

/// The three sums and the count of the elements of one cube.
///
/// Mutants: 1 takes every element into the norm, 3 drops large magnitudes, 4 is null (a renamed local), 6 drops small
/// ones.
#[cube(launch_unchecked)]
fn measure_kernel(
    grads: &Words,
    sums: &mut Floats,
    nonfinite: &mut Words,
    starts: Sequence<u32>,
    clipped: Sequence<f32>,
    first: u32,
    last: u32,
    cubes: u32,
    row: u32,
    #[comptime] mutant: u32,
) {
    let mut large = 0.0f32;
    let mut middle = 0.0f32;
    let mut small = 0.0f32;
    let mut bad = 0u32;
    let stride = cubes * UNITS;
    let mut loaded = Array::<u32>::new(AHEAD);
    for turn in 0..(last - first).div_ceil(stride * comptime!(AHEAD as u32)) {
        let step = turn * comptime!(AHEAD as u32);
        let start = (first + step * stride) as usize + CUBE_POS * comptime!(UNITS as usize) + UNIT_POS as usize;
        #[unroll]
        for n in 0..AHEAD {
            // Not guarded by a branch, so that all of them are under way together.
            let i = start + n * stride as usize;
            loaded[n] = grads.at(select(i < last as usize, i, first as usize));
        }
        #[unroll]
        for n in 0..AHEAD {
            let i = start + n * stride as usize;
            if i < last as usize {
                let bits = magnitude(loaded[n]);
                let mut inside = ranges::value_of(i, &starts, &clipped);
                if comptime!(mutant == 1) {
                    inside = 1.0f32;
                }
                if bits >= comptime!(INFINITY) {
                    bad += 1u32;
                } else if inside > 0.0f32 {
                    let g = f32::reinterpret(bits);
                    if bits >= comptime!(LARGE) {
                        let scaled = g * comptime!(SHRINK);
                        large += scaled * scaled;
                    } else if bits >= comptime!(MIDDLE) {
                        if comptime!(mutant == 4) {
                            let renamed = g * g;
                            middle += renamed;
                        } else {
                            middle += g * g;
                        }
                    } else {
                        let scaled = g * comptime!(GROW);
                        small += scaled * scaled;
                    }
                }
            }
        }
    }
    if comptime!(mutant == 3) {
        large = 0.0f32;
    }
    if comptime!(mutant == 6) {
        small = 0.0f32;
    }
    let mut floats = SharedMemory::<f32>::new(comptime!(UNITS as usize));
    let mut counts = SharedMemory::<u32>::new(comptime!(UNITS as usize));
    let large = cube::total(large, &mut floats);
    let middle = cube::total(middle, &mut floats);
    let small = cube::total(small, &mut floats);
    let bad = cube_count(bad, &mut counts);
    if UNIT_POS == 0 && CUBE_POS < cubes as usize {
        let place = row as usize + CUBE_POS;
        let at = place * comptime!(SUMS);
        sums.set(at, large);
        sums.set(at + 1, middle);
        sums.set(at + 2, small);
        nonfinite.set(place, bad);
    }
}

/// Adds up what [`measure_kernel`] left, counts losses, and decides. One cube.
///
/// Mutants: 2 counts no loss, 7 scales up too.
#[cube(launch_unchecked)]
fn decide_kernel(
    sums: &Floats,
    nonfinite: &Words,
    losses: &Words,
    counters: &mut Words,
    outputs: &mut Floats,
    rows: u32,
    n_losses: u32,
    max_norm: f32,
    skips_allowed: u32,
    #[comptime] mutant: u32,
) {
    let me = UNIT_POS as usize;
    let units = comptime!(UNITS as usize);
    let (rows, n_losses) = (rows as usize, n_losses as usize);
    let mut large = 0.0f32;
    let mut middle = 0.0f32;
    let mut small = 0.0f32;
    let mut bad = 0u32;
    for step in 0..rows.div_ceil(units) {
        let row = step * units + me;
        if row < rows {
            let at = row * comptime!(SUMS);
            large += sums.at(at);
            middle += sums.at(at + 1);
            small += sums.at(at + 2);
            bad += nonfinite.at(row);
        }
    }
    if comptime!(mutant != 2) {
        for step in 0..n_losses.div_ceil(units) {
            let i = step * units + me;
            if i < n_losses {
                bad += not_finite(losses.at(i));
            }
        }
    }
    let mut floats = SharedMemory::<f32>::new(comptime!(UNITS as usize));
    let mut counts = SharedMemory::<u32>::new(comptime!(UNITS as usize));
    let large = cube::total(large, &mut floats);
    let middle = cube::total(middle, &mut floats);
    let small = cube::total(small, &mut floats);
    let bad = cube_count(bad, &mut counts);
    if me == 0 {
        // norm = root * unit, where unit is a power of two and root has no range to leave.
        let mut root = small.sqrt();
        let mut unit = f32::new(comptime!(1.0 / GROW));
        let mut inverse = f32::new(comptime!(GROW));
        if large > 0.0f32 {
            root = (large + middle * comptime!(SHRINK) * comptime!(SHRINK)).sqrt();
            unit = f32::new(comptime!(1.0 / SHRINK));
            inverse = f32::new(comptime!(SHRINK));
        } else if middle > 0.0f32 {
            root = (middle + small * comptime!(1.0 / GROW) * comptime!(1.0 / GROW)).sqrt();
            unit = 1.0f32;
            inverse = 1.0f32;
        }
        let mut scale = 1.0f32;
        if root > 0.0f32 && max_norm > 0.0f32 {
            let quotient = max_norm / root * inverse;
            if comptime!(mutant == 7) {
                scale = quotient;
            }
            if quotient < 1.0f32 {
                scale = quotient;
            }
        }
        decide(root * unit, bad, scale, counters, outputs, skips_allowed, mutant);
    }
}

/// [`cube::total`] of integers.
#[cube]
fn cube_count(value: u32, shared: &mut SharedMemory<u32>) -> u32 {
    let me = UNIT_POS as usize;
    shared[me] = value;
    sync_cube();
    #[unroll]
    for level in 0..8u32 {
        let half = comptime!(128usize >> level as usize);
        if me < half {
            shared[me] = shared[me] + shared[me + half];
        }
        sync_cube();
    }
    shared[0]
}

/// (norm, nonfinite, scale, apply), and the counters.
pub(super) fn update<R: Engine>(b: &Device<R>, call: &Call<'_>) -> Result<Tensor> {
    let (grads, mutant) = (call.grads, b.mutant(STEM));
    let parts: Vec<_> = call.pieces.chunks(ranges::PIECES).collect();
    let span = |part: &[ranges::Piece]| (part[0].range.start, part[part.len() - 1].range.end);
    let cubes = |part: &[ranges::Piece]| {
        let (first, last) = span(part);
        (last - first).div_ceil(UNITS as usize * ELEMENTS).min(CUBES)
    };
    let rows: usize = parts.iter().map(|part| cubes(part)).sum();
    let sums = b.float_scratch(&[rows.max(1), SUMS])?;
    let nonfinite = b.scratch(&[rows.max(1)], DType::U32)?;
    let mut row = 0;
    for part in parts {
        let (first, last) = span(part);
        let uses = [grads, &sums, &nonfinite];
        let bytes = 4 * (last - first + 4 * cubes(part)) as u64;
        b.launch("sanitise::measure", Grid::cubes(cubes(part), UNITS), bytes, &uses, |client, count, dim| {
            let (starts, clipped) = ranges::scalars(part);
            let (grads, sums, nonfinite) = (b.words(grads), b.floats(&sums), b.words(&nonfinite));
            let (first, last, n, row) = (first as u32, last as u32, cubes(part) as u32, row as u32);
            // SAFETY: pieces lie inside `grads`; both outputs have a row for every cube of every part.
            unsafe {
                measure_kernel::launch_unchecked::<R>(
                    client, count, dim, grads, sums, nonfinite, starts, clipped, first, last, n, row, mutant,
                )
            }
        })?;
        row += cubes(part);
    }
    let outputs = b.float_scratch(&[4])?;
    // Nothing reads losses that there are none of.
    let losses = if call.losses.is_empty() { &nonfinite } else { call.losses };
    let uses = [&sums, &nonfinite, losses, call.counters, &outputs];
    let bytes = 4 * (4 * rows + call.losses.len() + 12) as u64;
    b.launch("sanitise::decide", Grid::cubes(1, UNITS), bytes, &uses, |client, count, dim| {
        let [nonfinite, losses, counters] = [&nonfinite, losses, call.counters].map(|t| b.words(t));
        let (n, max_norm, allowed) = (call.losses.len() as u32, call.max_norm, call.skips_allowed);
        let (sums, outputs) = (b.floats(&sums), b.floats(&outputs));
        // SAFETY: the shapes were checked by the caller; units past rows and losses read nothing.
        unsafe {
            decide_kernel::launch_unchecked::<R>(
                client,
                count,
                dim,
                sums,
                nonfinite,
                losses,
                counters,
                outputs,
                rows as u32,
                n,
                max_norm,
                allowed,
                mutant,
            )
        }
    })?;
    Ok(outputs)
}
