//! Arm `plain`: one unit does one row of logits, one adds up a block of rows, one adds up the blocks; in backward one
//! unit does one element.

use cubecl::prelude::*;
use dormouse_reference::{DType, Result, Tensors};

use super::{Backward, Forward, STATS, Saved, dlogit, exp, finish_row};
use crate::device::Device;
use crate::launch::Grid;
use crate::mask;
use crate::runtime::Engine;
use crate::sum::BLOCK;
use crate::tensor::{Floats, Words};

/// nll and what is kept of a row. One unit, one row.
#[cube(launch_unchecked)]
fn rows_kernel(
    logits: &Floats,
    targets: &Words,
    mask: &Words,
    nll: &mut Floats,
    stats: &mut Floats,
    rows: u32,
    classes: u32,
    nan: f32,
    #[comptime] mask_kind: u32,
) {
    let n = ABSOLUTE_POS;
    let classes = classes as usize;
    if n < rows as usize {
        let row = n * classes;
        let target = targets.at(n) as usize;
        let kept = mask::is_set(mask, n, mask_kind);
        let mut max = 0.0f32;
        let mut rest = 0.0f32;
        if kept {
            max = logits.at(row);
            for c in 1..classes {
                if logits.at(row + c) > max {
                    max = logits.at(row + c);
                }
            }
            for c in 0..classes {
                if c != target {
                    rest += exp(logits.at(row + c) - max);
                }
            }
        }
        finish_row(logits, nll, stats, n, classes, target, kept, max, rest, nan);
    }
}

/// The sum of nll and the number of kept positions of a block of rows, first to last. One unit, one block.
#[cube(launch_unchecked)]
fn blocks_kernel(
    nll: &Floats,
    mask: &Words,
    sums: &mut Floats,
    counts: &mut Words,
    rows: u32,
    #[comptime] mask_kind: u32,
) {
    let block = ABSOLUTE_POS;
    let rows = rows as usize;
    let first = block * BLOCK;
    if first < rows {
        let mut last = first + BLOCK;
        if last > rows {
            last = rows;
        }
        let mut sum = 0.0f32;
        let mut count = 0u32;
        for n in first..last {
            sum += nll.at(n);
            if mask::is_set(mask, n, mask_kind) {
                count += 1;
            }
        }
        sums.set(block, sum);
        counts.set(block, count);
    }
}

/// loss, and one over the number of kept positions. One unit adds up the blocks, first to last.
#[cube(launch_unchecked)]
fn loss_kernel(
    sums: &Floats,
    counts: &Words,
    loss: &mut Floats,
    share: &mut Floats,
    blocks: u32,
    given: f32,
    #[comptime] is_given: bool,
) {
    if ABSOLUTE_POS == 0 {
        let mut sum = 0.0f32;
        let mut count = 0u32;
        for block in 0..blocks as usize {
            sum += sums.at(block);
            count += counts.at(block);
        }
        let mut one = 0.0f32;
        if count > 0 {
            one = 1.0f32 / f32::cast_from(count);
        }
        share.set(0, one);
        if is_given {
            one = given;
        }
        loss.set(0, sum * one);
    }
}

/// dlogits. One unit, one element.
#[cube(launch_unchecked)]
fn backward_kernel(
    logits: &Floats,
    targets: &Words,
    stats: &Floats,
    share: &Floats,
    dloss: &Floats,
    dlogits: &mut Floats,
    len: u32,
    classes: u32,
    given: f32,
    #[comptime] is_given: bool,
) {
    let i = ABSOLUTE_POS;
    if i < len as usize {
        let n = i / classes as usize;
        let at = n * comptime!(STATS);
        let mut one = given;
        if !is_given {
            one = share.at(0);
        }
        let is_target = targets.at(n) == (i % classes as usize) as u32;
        let scale = dloss.at(0) * one;
        dlogits.set(i, dlogit(logits.at(i), stats.at(at), stats.at(at + 1), stats.at(at + 2), is_target, scale));
    }
}

/// loss, nll and what backward needs.
pub(super) fn forward<R: Engine>(b: &Device<R>, call: &Forward<'_>) -> Result<()> {
    let Forward { logits, targets, mask, mask_kind, rows, classes, given, loss, nll, stats, share } = *call;
    // A kernel has all its arguments in every variant; without a mask nothing reads it.
    let mask = mask.unwrap_or(targets);
    let uses = [logits, targets, mask, nll, stats];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    let (n, c) = (rows as u32, classes as u32);
    b.launch("cross_entropy::forward", Grid::units(rows), bytes, &uses, |client, count, dim| {
        let (targets, mask) = (b.words(targets), b.words(mask));
        let [logits, nll, stats] = [logits, nll, stats].map(|t| b.floats(t));
        // SAFETY: shapes were checked by the caller, a target is read from only below C; units past the rows do nothing.
        unsafe {
            rows_kernel::launch_unchecked::<R>(
                client,
                count,
                dim,
                logits,
                targets,
                mask,
                nll,
                stats,
                n,
                c,
                f32::NAN,
                mask_kind,
            )
        }
    })?;
    let blocks = rows.div_ceil(BLOCK);
    let sums = b.float_scratch(&[blocks.max(1)])?;
    let counts = b.scratch(&[blocks.max(1)], DType::U32)?;
    let uses = [nll, mask, &sums, &counts];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    b.launch("cross_entropy::blocks", Grid::units(blocks), bytes, &uses, |client, count, dim| {
        let (nll, sums, mask, counts) = (b.floats(nll), b.floats(&sums), b.words(mask), b.words(&counts));
        // SAFETY: `sums` and `counts` have one element a block; units past them do nothing.
        unsafe { blocks_kernel::launch_unchecked::<R>(client, count, dim, nll, mask, sums, counts, n, mask_kind) }
    })?;
    let bytes = sums.bytes() + counts.bytes() + loss.bytes() + share.bytes();
    b.launch("cross_entropy::loss", Grid::units(1), bytes, &[&sums, &counts, loss, share], |client, count, dim| {
        let (k, one, is_given) = (blocks as u32, given.unwrap_or_default(), given.is_some());
        let ([sums, loss, share], counts) = ([&sums, loss, share].map(|t| b.floats(t)), b.words(&counts));
        // SAFETY: only the blocks are read, which are none where there are no rows.
        unsafe { loss_kernel::launch_unchecked::<R>(client, count, dim, sums, counts, loss, share, k, one, is_given) }
    })
}

/// dlogits.
pub(super) fn backward<R: Engine>(b: &Device<R>, saved: &Saved, call: &Backward<'_>) -> Result<()> {
    let Saved { logits, targets, stats, share, .. } = saved;
    let Backward { dloss, dlogits, classes, given, .. } = *call;
    let uses = [logits, targets, stats, share, dloss, dlogits];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    b.launch("cross_entropy::backward", Grid::units(dlogits.len()), bytes, &uses, |client, count, dim| {
        let (len, c, one, is_given) =
            (dlogits.len() as u32, classes as u32, given.unwrap_or_default(), given.is_some());
        let targets = b.words(targets);
        let [logits, stats, share, dloss, out] = [logits, stats, share, dloss, dlogits].map(|t| b.floats(t));
        // SAFETY: logits and dlogits have `len` elements, `stats` three a row; units past them do nothing.
        unsafe {
            backward_kernel::launch_unchecked::<R>(
                client, count, dim, logits, targets, stats, share, dloss, out, len, c, one, is_given,
            )
        }
    })
}
