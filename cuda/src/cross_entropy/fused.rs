//! Arm `fused`: 32 units share a row of logits, see [`rows`]. Forward is one launch for the rows, which leaves one sum a
//! cube, and one that adds up the cubes. Backward is one launch that reads every logit once.

use cubecl::prelude::*;
use dormouse_reference::{DType, Result, Tensors};

use super::{Backward, Forward, STATS, Saved, dlogit, exp, finish_row};
use crate::cube;
use crate::device::Device;
use crate::launch::Grid;
use crate::mask;
use crate::rows;
use crate::runtime::Engine;
use crate::tensor::{Floats, Words};

/// The largest `value` of the units of this unit's row, given to all of them. Every unit of the cube must call it.
/// `shared` has [`rows::UNITS`] elements. A NaN that all of them have stays.
#[cube]
fn row_max(value: f32, shared: &mut SharedMemory<f32>) -> f32 {
    let me = UNIT_POS as usize;
    shared[me] = value;
    sync_cube();
    #[unroll]
    for level in 0..5u32 {
        let half = comptime!(16usize >> level as usize);
        if rows::lane() < half {
            if shared[me + half] > shared[me] {
                shared[me] = shared[me + half];
            }
        }
        sync_cube();
    }
    let max = shared[me - rows::lane()];
    // The next call writes the same memory.
    sync_cube();
    max
}

/// nll and what is kept of a row, and of the rows of a cube the sum of nll and the number of kept positions.
///
/// Mutants: 1 counts the target among the rest, 2 misses the last class, 3 is null (a renamed local), 4 counts masked
/// positions too.
#[cube(launch_unchecked)]
fn forward_kernel(
    logits: &Floats,
    targets: &Words,
    mask: &Words,
    nll: &mut Floats,
    stats: &mut Floats,
    sums: &mut Floats,
    counts: &mut Words,
    rows: u32,
    classes: u32,
    nan: f32,
    #[comptime] mask_kind: u32,
    #[comptime] mutant: u32,
) {
    let (n, lane) = (rows::row(), rows::lane());
    let classes = classes as usize;
    let lanes = comptime!(rows::LANES as usize);
    let mut shared = SharedMemory::<f32>::new(comptime!(rows::UNITS as usize));
    let mut shared_counts = SharedMemory::<u32>::new(comptime!(rows::ROWS as usize));
    let here = n < rows as usize;
    let mut kept = here;
    let mut target = 0usize;
    let mut max = 0.0f32;
    if here {
        kept = mask::is_set(mask, n, mask_kind);
        target = targets.at(n) as usize;
    }
    let row = n * classes;
    if kept {
        // Every lane starts with the first class, so that none needs a number below all others.
        max = logits.at(row);
        for step in 0..classes.div_ceil(lanes) {
            let c = step * lanes + lane;
            if c < classes {
                let z = logits.at(row + c);
                if z > max {
                    max = z;
                }
            }
        }
    }
    let max = row_max(max, &mut shared);
    let mut part = 0.0f32;
    if kept {
        let mut end = classes;
        if comptime!(mutant == 2) {
            end = classes - 1;
        }
        for step in 0..end.div_ceil(lanes) {
            let c = step * lanes + lane;
            if c < end {
                let e = exp(logits.at(row + c) - max);
                if comptime!(mutant == 1) {
                    part += e;
                } else {
                    if c != target {
                        part += e;
                    }
                }
            }
        }
    }
    let mut rest = rows::sum(part, &mut shared);
    if comptime!(mutant == 3) {
        let renamed = rest;
        rest = renamed;
    }
    if lane == 0 {
        let mut value = 0.0f32;
        let mut count = 0u32;
        if here {
            value = finish_row(logits, nll, stats, n, classes, target, kept, max, rest, nan);
            if kept {
                count = 1u32;
            }
            if comptime!(mutant == 4) {
                count = 1u32;
            }
        }
        shared[UNIT_POS as usize / lanes] = value;
        shared_counts[UNIT_POS as usize / lanes] = count;
    }
    sync_cube();
    if UNIT_POS == 0 && here {
        let mut sum = 0.0f32;
        let mut count = 0u32;
        #[unroll]
        for other in 0..comptime!(rows::ROWS) {
            sum += shared[other as usize];
            count += shared_counts[other as usize];
        }
        sums.set(CUBE_POS, sum);
        counts.set(CUBE_POS, count);
    }
}

/// loss, and one over the number of kept positions. One cube; unit `i` adds every [`cube::UNITS`]-th sum from the `i`-th
/// on, and the units are added up.
///
/// Mutants: 5 misses the last sum.
#[cube(launch_unchecked)]
fn loss_kernel(
    sums: &Floats,
    counts: &Words,
    loss: &mut Floats,
    share: &mut Floats,
    blocks: u32,
    given: f32,
    #[comptime] is_given: bool,
    #[comptime] mutant: u32,
) {
    let units = comptime!(cube::UNITS as usize);
    let unit = UNIT_POS as usize;
    let blocks = blocks as usize;
    let mut shared = SharedMemory::<f32>::new(comptime!(cube::UNITS as usize));
    let mut part = 0.0f32;
    let mut count = 0u32;
    for step in 0..blocks.div_ceil(units) {
        let block = step * units + unit;
        if block < blocks {
            count += counts.at(block);
            if comptime!(mutant == 5) {
                if block + 1 < blocks {
                    part += sums.at(block);
                }
            } else {
                part += sums.at(block);
            }
        }
    }
    let sum = cube::sum(part, &mut shared);
    // Exact up to 2^24 positions; beyond them it rounds no more than the share itself.
    let kept = cube::sum(f32::cast_from(count), &mut shared);
    if unit == 0 {
        let mut one = 0.0f32;
        if kept > 0.0f32 {
            one = 1.0f32 / kept;
        }
        share.set(0, one);
        if is_given {
            one = given;
        }
        loss.set(0, sum * one);
    }
}

/// dlogits. Some units share a row.
///
/// Mutants: 6 treats the target as any class, 7 drops the mean, 8 drops dloss.
#[cube(launch_unchecked)]
fn backward_kernel(
    logits: &Floats,
    targets: &Words,
    stats: &Floats,
    share: &Floats,
    dloss: &Floats,
    dlogits: &mut Floats,
    rows: u32,
    classes: u32,
    given: f32,
    #[comptime] is_given: bool,
    #[comptime] mutant: u32,
) {
    let (n, lane) = (rows::row(), rows::lane());
    let classes = classes as usize;
    let lanes = comptime!(rows::LANES as usize);
    if n < rows as usize {
        let at = n * comptime!(STATS);
        let (max, inverse, rest_share) = (stats.at(at), stats.at(at + 1), stats.at(at + 2));
        let target = targets.at(n) as usize;
        let mut one = given;
        if !is_given {
            one = share.at(0);
        }
        if comptime!(mutant == 7) {
            one = 1.0f32;
        }
        let mut scale = one;
        if comptime!(mutant != 8) {
            scale = dloss.at(0) * one;
        }
        for step in 0..classes.div_ceil(lanes) {
            let c = step * lanes + lane;
            if c < classes {
                let mut is_target = c == target;
                if comptime!(mutant == 6) {
                    is_target = c == classes;
                }
                let z = logits.at(n * classes + c);
                dlogits.set(n * classes + c, dlogit(z, max, inverse, rest_share, is_target, scale));
            }
        }
    }
}

/// loss, nll and what backward needs.
pub(super) fn forward<R: Engine>(b: &Device<R>, call: &Forward<'_>) -> Result<()> {
    let Forward { logits, targets, mask, mask_kind, rows, classes, given, loss, nll, stats, share } = *call;
    let mutant = b.mutant(super::STEM);
    let blocks = rows.div_ceil(rows::ROWS as usize);
    let sums = b.float_scratch(&[blocks.max(1)])?;
    let counts = b.scratch(&[blocks.max(1)], DType::U32)?;
    // A kernel has all its arguments in every variant; without a mask nothing reads it.
    let uses = [logits, targets, mask.unwrap_or(targets), nll, stats, &sums, &counts];
    let read = logits.bytes() + targets.bytes() + mask.map_or(0, |mask| mask.bytes());
    let bytes = read + nll.bytes() + stats.bytes() + sums.bytes() + counts.bytes();
    b.launch("cross_entropy::forward", rows::cubes(rows), bytes, &uses, |client, count, dim| {
        let [targets, mask, counts] = [targets, uses[2], &counts].map(|t| b.words(t));
        let [logits, nll, stats, sums] = [logits, nll, stats, &sums].map(|t| b.floats(t));
        let (n, c) = (rows as u32, classes as u32);
        // SAFETY: shapes were checked by the caller, a target is read from only below C; `sums` and `counts` have one
        // element a cube, and units past the rows and classes touch nothing.
        unsafe {
            forward_kernel::launch_unchecked::<R>(
                client,
                count,
                dim,
                logits,
                targets,
                mask,
                nll,
                stats,
                sums,
                counts,
                n,
                c,
                f32::NAN,
                mask_kind,
                mutant,
            )
        }
    })?;
    let bytes = sums.bytes() + counts.bytes() + loss.bytes() + share.bytes();
    let grid = Grid::cubes(1, cube::UNITS);
    b.launch("cross_entropy::loss", grid, bytes, &[&sums, &counts, loss, share], |client, count, dim| {
        let (k, one, is_given) = (blocks as u32, given.unwrap_or_default(), given.is_some());
        let ([sums, loss, share], counts) = ([&sums, loss, share].map(|t| b.floats(t)), b.words(&counts));
        // SAFETY: only the sums of blocks are read, which are none where there are no rows.
        unsafe {
            loss_kernel::launch_unchecked::<R>(client, count, dim, sums, counts, loss, share, k, one, is_given, mutant)
        }
    })
}

/// dlogits.
pub(super) fn backward<R: Engine>(b: &Device<R>, saved: &Saved, call: &Backward<'_>) -> Result<()> {
    let Saved { logits, targets, stats, share, .. } = saved;
    let Backward { dloss, dlogits, rows, classes, given } = *call;
    let mutant = b.mutant(super::STEM);
    let uses = [logits, targets, stats, share, dloss, dlogits];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    b.launch("cross_entropy::backward", rows::cubes(rows), bytes, &uses, |client, count, dim| {
        let (n, c, one, is_given) = (rows as u32, classes as u32, given.unwrap_or_default(), given.is_some());
        let targets = b.words(targets);
        let [logits, stats, share, dloss, out] = [logits, stats, share, dloss, dlogits].map(|t| b.floats(t));
        // SAFETY: logits and dlogits have C elements a row, `stats` three; units past them touch nothing.
        unsafe {
            backward_kernel::launch_unchecked::<R>(
                client, count, dim, logits, targets, stats, share, dloss, out, n, c, one, is_given, mutant,
            )
        }
    })
}
