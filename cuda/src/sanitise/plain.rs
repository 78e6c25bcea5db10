//! Arm `plain`: the largest finite magnitude first, then the sum of squares of magnitudes over it, so that every square
//! is from 0 to 1 and one of them is 1. One unit walks one block, one launch a piece; blocks are reduced the same way.

use cubecl::prelude::*;
use dormouse_reference::{DType, Result, Tensors};

use super::{Call, INFINITY, decide, magnitude, not_finite};
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::sum;
use crate::tensor::{Floats, Tensor, Words};

/// Elements of a block.
const BLOCK: usize = 64;

/// Of one block: the largest finite magnitude, 0 outside the clip ranges, and the number of elements that are not finite.
/// `blocks` of them are written from place `at` on.
#[cube(launch_unchecked)]
fn survey_kernel(
    grads: &Words,
    largest: &mut Words,
    nonfinite: &mut Words,
    first: u32,
    last: u32,
    at: u32,
    blocks: u32,
    clipped: u32,
) {
    let block = ABSOLUTE_POS;
    if block < blocks as usize {
        let begin = first as usize + block * BLOCK;
        let mut end = begin + BLOCK;
        if end > last as usize {
            end = last as usize;
        }
        let mut most = 0u32;
        let mut bad = 0u32;
        for i in begin..end {
            let size = magnitude(grads.at(i));
            if size >= comptime!(INFINITY) {
                bad += 1u32;
            } else if size > most && clipped == 1u32 {
                most = size;
            }
        }
        largest.set(at as usize + block, most);
        nonfinite.set(at as usize + block, bad);
    }
}

/// The largest, and the sum, of a block of what [`survey_kernel`] or this kernel wrote.
#[cube(launch_unchecked)]
fn reduce_kernel(largest: &Words, nonfinite: &Words, most: &mut Words, bad: &mut Words, len: u32) {
    let begin = ABSOLUTE_POS * BLOCK;
    if begin < len as usize {
        let mut end = begin + BLOCK;
        if end > len as usize {
            end = len as usize;
        }
        let mut top = 0u32;
        let mut count = 0u32;
        for i in begin..end {
            if largest.at(i) > top {
                top = largest.at(i);
            }
            count += nonfinite.at(i);
        }
        most.set(ABSOLUTE_POS, top);
        bad.set(ABSOLUTE_POS, count);
    }
}

/// The sum of (g / largest)^2 over one block's finite elements.
#[cube(launch_unchecked)]
fn squares_kernel(grads: &Words, largest: &Words, squares: &mut Floats, first: u32, last: u32, at: u32, blocks: u32) {
    let block = ABSOLUTE_POS;
    if block < blocks as usize {
        let begin = first as usize + block * BLOCK;
        let mut end = begin + BLOCK;
        if end > last as usize {
            end = last as usize;
        }
        let unit = largest.at(0);
        let mut sum = 0.0f32;
        for i in begin..end {
            let size = magnitude(grads.at(i));
            if size < comptime!(INFINITY) && unit > 0u32 {
                let share = f32::reinterpret(size) / f32::reinterpret(unit);
                sum += share * share;
            }
        }
        squares.set(at as usize + block, sum);
    }
}

/// Norm, scale and decision. One unit.
#[cube(launch_unchecked)]
fn decide_kernel(
    largest: &Words,
    nonfinite: &Words,
    squares: &Floats,
    losses: &Words,
    counters: &mut Words,
    outputs: &mut Floats,
    n_losses: u32,
    max_norm: f32,
    skips_allowed: u32,
) {
    if ABSOLUTE_POS == 0 {
        let mut bad = nonfinite.at(0);
        for i in 0..n_losses as usize {
            bad += not_finite(losses.at(i));
        }
        let unit = f32::reinterpret(largest.at(0));
        let root = squares.at(0).sqrt();
        let mut scale = 1.0f32;
        if unit > 0.0f32 && max_norm > 0.0f32 {
            // The norm itself may be out of range.
            let quotient = max_norm / root / unit;
            if quotient < 1.0f32 {
                scale = quotient;
            }
        }
        decide(unit * root, bad, scale, counters, outputs, skips_allowed, 0u32);
    }
}

/// (norm, nonfinite, scale, apply), and the counters.
pub(super) fn update<R: Engine>(b: &Device<R>, call: &Call<'_>) -> Result<Tensor> {
    let grads = call.grads;
    let blocks = |piece: &crate::ranges::Piece| piece.range.len().div_ceil(BLOCK);
    let words = |len: usize| b.scratch(&[len], DType::U32);
    // One place more, so that an empty buffer has a largest magnitude too: none, which is 0.
    let mut len = call.pieces.iter().map(blocks).sum::<usize>() + 1;
    let (mut largest, mut nonfinite) = (words(len)?, words(len)?);
    for tensor in [&largest, &nonfinite] {
        b.fill(&b.view(tensor, len - 1, &[1])?, 0.0)?;
    }
    let mut at = 0;
    for piece in &call.pieces {
        let uses = [grads, &largest, &nonfinite];
        let bytes = 4 * piece.range.len() as u64;
        b.launch("sanitise::survey", Grid::units(blocks(piece)), bytes, &uses, |client, count, dim| {
            let [grads, largest, nonfinite] = uses.map(|t| b.words(t));
            let (first, last) = (piece.range.start as u32, piece.range.end as u32);
            let (at, n, clipped) = (at as u32, blocks(piece) as u32, piece.value as u32);
            // SAFETY: pieces lie inside `grads`; both outputs have a place for every block.
            unsafe {
                survey_kernel::launch_unchecked::<R>(
                    client, count, dim, grads, largest, nonfinite, first, last, at, n, clipped,
                )
            }
        })?;
        at += blocks(piece);
    }
    while len > 1 {
        let (most, bad) = (words(len.div_ceil(BLOCK))?, words(len.div_ceil(BLOCK))?);
        let uses = [&largest, &nonfinite, &most, &bad];
        let bytes = 8 * (len + most.len()) as u64;
        b.launch("sanitise::reduce", Grid::units(most.len()), bytes, &uses, |client, count, dim| {
            let [largest, nonfinite, most, bad] = uses.map(|t| b.words(t));
            // SAFETY: the inputs have `len` words, the outputs one a block.
            unsafe {
                reduce_kernel::launch_unchecked::<R>(client, count, dim, largest, nonfinite, most, bad, len as u32)
            }
        })?;
        len = most.len();
        (largest, nonfinite) = (most, bad);
    }
    let clipped = || call.pieces.iter().filter(|piece| piece.value == 1.0);
    let squares = b.float_scratch(&[clipped().map(blocks).sum::<usize>().max(1)])?;
    let mut at = 0;
    for piece in clipped() {
        let uses = [grads, &largest, &squares];
        let bytes = 4 * piece.range.len() as u64;
        b.launch("sanitise::squares", Grid::units(blocks(piece)), bytes, &uses, |client, count, dim| {
            let [grads, largest] = [grads, &largest].map(|t| b.words(t));
            let (first, last) = (piece.range.start as u32, piece.range.end as u32);
            let (at, n) = (at as u32, blocks(piece) as u32);
            // SAFETY: pieces lie inside `grads`; the output has a place for every block.
            unsafe {
                squares_kernel::launch_unchecked::<R>(
                    client,
                    count,
                    dim,
                    grads,
                    largest,
                    b.floats(&squares),
                    first,
                    last,
                    at,
                    n,
                )
            }
        })?;
        at += blocks(piece);
    }
    let total = b.float_scratch(&[1])?;
    b.fill(&total, 0.0)?;
    sum::add_rows(b, &squares, at, 1, &total)?;
    let outputs = b.float_scratch(&[4])?;
    // Nothing reads losses that there are none of.
    let losses = if call.losses.is_empty() { &largest } else { call.losses };
    let uses = [&largest, &nonfinite, &total, losses, call.counters, &outputs];
    b.launch("sanitise::decide", Grid::units(1), 4 * (call.losses.len() as u64 + 16), &uses, |client, count, dim| {
        let [largest, nonfinite, losses, counters] = [&largest, &nonfinite, losses, call.counters].map(|t| b.words(t));
        let (total, outputs) = (b.floats(&total), b.floats(&outputs));
        let (n, max_norm, allowed) = (call.losses.len() as u32, call.max_norm, call.skips_allowed);
        // SAFETY: the shapes were checked by the caller; one unit works.
        unsafe {
            decide_kernel::launch_unchecked::<R>(
                client, count, dim, largest, nonfinite, total, losses, counters, outputs, n, max_norm, allowed,
            )
        }
    })?;
    Ok(outputs)
}
