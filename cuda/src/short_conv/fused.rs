//! Arm `fused`: forward is one launch. Backward is one for dx, dcontext and the sums of both parameters over a block of
//! tokens, and one per parameter that adds up the blocks.
//!
//! A unit walks a span of tokens in one channel and keeps the last three of xx (and of dc) in registers, so that it
//! reads each token once; neighbours read neighbouring channels. A span starts with the three tokens before it, which
//! its neighbour reads too: of 16 tokens that is a fifth more, most of it from a cache.

use cubecl::prelude::*;
use dormouse_reference::Result;
use dormouse_reference::short_conv::{CONTEXT, WIDTH};

use super::{Backward, Saved, Sizes, joined, or};
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::sigmoid::sigmoids;
use crate::sum;
use crate::tensor::{Floats, Tensor};

/// The fewest positions that a unit walks.
const SPAN: usize = 16;

/// Units of a cube of the backward pass that have neighbouring channels.
const COLUMNS: u32 = 64;

/// Units of a cube of the backward pass that have neighbouring spans of one channel.
const LANES: u32 = 4;

/// Positions that a unit reads before it writes the first of them.
const AHEAD: usize = 4;

/// Units of a cube of the backward pass.
const UNITS: u32 = COLUMNS * LANES;

/// About the most blocks over all sequences: what is left for the launch that adds them up.
const BLOCKS: usize = 128;

/// Sums of a channel: one a tap, and the bias.
const SUMS: usize = WIDTH + 1;

/// y and the new context, which is what a unit has in its registers behind the last token. One unit, one span of one
/// channel; a sequence without tokens has one span.
///
/// Mutants: 1 drops the context, 2 drops the bias, 3 takes a sigmoid for SiLU, 4 is null (a renamed local).
#[cube(launch_unchecked)]
fn forward_kernel(
    x: &Floats,
    context: &Floats,
    weight: &Floats,
    bias: &Floats,
    y: &mut Floats,
    next: &mut Floats,
    batch: u32,
    time: u32,
    channels: u32,
    spans: u32,
    #[comptime] has_context: bool,
    #[comptime] has_bias: bool,
    #[comptime] mutant: u32,
) {
    let n = ABSOLUTE_POS;
    let (batch, time, channels, spans) = (batch as usize, time as usize, channels as usize, spans as usize);
    let seen = comptime!(has_context && mutant != 1);
    if n < batch * spans * channels {
        let c = n % channels;
        let first = n / channels % spans * comptime!(SPAN);
        let b = n / channels / spans;
        let mut last = first + comptime!(SPAN);
        if last > time {
            last = time;
        }
        let (w0, w1) = (weight.at(c), weight.at(channels + c));
        let (w2, w3) = (weight.at(2 * channels + c), weight.at(3 * channels + c));
        let mut shift = 0.0f32;
        if comptime!(has_bias && mutant != 2) {
            shift = bias.at(c);
        }
        let mut x0 = joined(x, context, b, first, c, time, channels, seen);
        let mut x1 = joined(x, context, b, first + 1, c, time, channels, seen);
        let mut x2 = joined(x, context, b, first + 2, c, time, channels, seen);
        let mut xs = Array::<f32>::new(AHEAD);
        for turn in 0..(last - first).div_ceil(AHEAD) {
            let start = first + turn * comptime!(AHEAD);
            #[unroll]
            for n in 0..AHEAD {
                xs[n] = x.at((b * time + select(start + n < last, start + n, start)) * channels + c);
            }
            #[unroll]
            for n in 0..AHEAD {
                let t = start + n;
                if t < last {
                    let x3 = xs[n];
                    let sum = shift + w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3;
                    let (open, _closed) = sigmoids(sum);
                    let mut value = sum * open;
                    if comptime!(mutant == 3) {
                        value = open;
                    }
                    if comptime!(mutant == 4) {
                        let renamed = sum * open;
                        value = renamed;
                    }
                    y.set((b * time + t) * channels + c, value);
                    x0 = x1;
                    x1 = x2;
                    x2 = x3;
                }
            }
        }
        if last == time {
            let at = b * comptime!(CONTEXT) * channels + c;
            next.set(at, x0);
            next.set(at + channels, x1);
            next.set(at + 2 * channels, x2);
        }
    }
}

/// dxx (dcontext, then dx) and the sums of dc_t xx_{t+j} and of dc over a block of positions. One unit, one span of one
/// channel; a position is an index of xx, so there are T + 3 of them, and the unit that has position t has dc_t in its
/// sums.
///
/// Mutants: 5 drops the bend of SiLU's slope, 6 drops dn, 7 drops the tokens before the span, 8 misses the second lane
/// in the sums.
#[cube(launch_unchecked)]
fn backward_kernel(
    x: &Floats,
    context: &Floats,
    weight: &Floats,
    bias: &Floats,
    dy: &Floats,
    dnext: &Floats,
    dx: &mut Floats,
    dcontext: &mut Floats,
    for_weight: &mut Floats,
    for_bias: &mut Floats,
    batch: u32,
    time: u32,
    channels: u32,
    blocks: u32,
    span: u32,
    #[comptime] has_context: bool,
    #[comptime] has_bias: bool,
    #[comptime] has_next: bool,
    #[comptime] mutant: u32,
) {
    let (batch, time, channels) = (batch as usize, time as usize, channels as usize);
    let (blocks, span) = (blocks as usize, span as usize);
    let columns = comptime!(COLUMNS as usize);
    let lanes = comptime!(LANES as usize);
    let units = comptime!(UNITS as usize);
    let before = comptime!(CONTEXT);
    let long = time + before;
    let unit = UNIT_POS as usize;
    let (column, lane) = (unit % columns, unit / columns);
    let tiles = channels.div_ceil(columns);
    let c = CUBE_POS % tiles * columns + column;
    // The block's number over all sequences.
    let row = CUBE_POS / tiles;
    let b = row / blocks;
    let first = (row % blocks * lanes + lane) * span;
    let mut shared = SharedMemory::<f32>::new(comptime!(SUMS * UNITS as usize));
    let mut s0 = 0.0f32;
    let mut s1 = 0.0f32;
    let mut s2 = 0.0f32;
    let mut s3 = 0.0f32;
    let mut s4 = 0.0f32;
    if b < batch && c < channels && first < long {
        let mut last = first + span;
        if last > long {
            last = long;
        }
        let (w0, w1) = (weight.at(c), weight.at(channels + c));
        let (w2, w3) = (weight.at(2 * channels + c), weight.at(3 * channels + c));
        let mut shift = 0.0f32;
        if has_bias {
            shift = bias.at(c);
        }
        // xx of the three positions before `u`, and dc of the three tokens before u - 3, which is the position at hand.
        let mut x0 = 0.0f32;
        let mut x1 = 0.0f32;
        let mut x2 = 0.0f32;
        let mut d1 = 0.0f32;
        let mut d2 = 0.0f32;
        let mut d3 = 0.0f32;
        if first >= before {
            x0 = joined(x, context, b, first - 3, c, time, channels, has_context);
            x1 = joined(x, context, b, first - 2, c, time, channels, has_context);
            x2 = joined(x, context, b, first - 1, c, time, channels, has_context);
        }
        // Tokens before this one have no dc.
        let mut begin = 0usize;
        if comptime!(mutant == 7) {
            begin = first;
        }
        // The first position with a part of dn.
        let mut tail = long;
        if comptime!(has_next && mutant != 6) {
            tail = time;
        }
        let end = last + before;
        let mut xs = Array::<f32>::new(AHEAD);
        let mut dys = Array::<f32>::new(AHEAD);
        for turn in 0..(end - first).div_ceil(AHEAD) {
            // The loads of all of them are under way before the first result is written.
            #[unroll]
            for n in 0..AHEAD {
                let u = first + turn * comptime!(AHEAD) + n;
                xs[n] = 0.0f32;
                dys[n] = 0.0f32;
                if u < long && u < end {
                    xs[n] = joined(x, context, b, u, c, time, channels, has_context);
                    if u >= begin + before {
                        dys[n] = dy.at((b * time + u - before) * channels + c);
                    }
                }
            }
            #[unroll]
            for n in 0..AHEAD {
                let u = first + turn * comptime!(AHEAD) + n;
                let x3 = xs[n];
                let mut d0 = 0.0f32;
                if u < long && u >= begin + before {
                    let sum = shift + w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3;
                    let (open, closed) = sigmoids(sum);
                    let mut slope = open * (1.0f32 + sum * closed);
                    if comptime!(mutant == 5) {
                        slope = open;
                    }
                    d0 = dys[n] * slope;
                }
                if u >= first + before && u < end {
                    let i = u - before;
                    s0 += d0 * x0;
                    s1 += d0 * x1;
                    s2 += d0 * x2;
                    s3 += d0 * x3;
                    s4 += d0;
                    let mut value = w0 * d0 + w1 * d1 + w2 * d2 + w3 * d3;
                    if i >= tail {
                        value += dnext.at((b * before + i - time) * channels + c);
                    }
                    if i >= before {
                        dx.set((b * time + i - before) * channels + c, value);
                    } else {
                        if has_context {
                            dcontext.set((b * before + i) * channels + c, value);
                        }
                    }
                }
                x0 = x1;
                x1 = x2;
                x2 = x3;
                d3 = d2;
                d2 = d1;
                d1 = d0;
            }
        }
    }
    shared[unit] = s0;
    shared[units + unit] = s1;
    shared[2 * units + unit] = s2;
    shared[3 * units + unit] = s3;
    shared[4 * units + unit] = s4;
    sync_cube();
    if lane == 0 && b < batch && c < channels {
        for j in 0..comptime!(SUMS) {
            let mut total = 0.0f32;
            for other in 0..lanes {
                if comptime!(mutant == 8) {
                    if other != 1 {
                        total += shared[j * units + other * columns + column];
                    }
                } else {
                    total += shared[j * units + other * columns + column];
                }
            }
            if j < comptime!(WIDTH) {
                for_weight.set((row * comptime!(WIDTH) + j) * channels + c, total);
            } else {
                for_bias.set(row * channels + c, total);
            }
        }
    }
}

/// Fills `y` and the new context.
pub(super) fn forward<R: Engine>(b: &Device<R>, saved: &Saved, y: &Tensor, next: &Tensor, sizes: Sizes) -> Result<()> {
    let Saved { x, weight, .. } = saved;
    let (context, bias) = (saved.context.as_ref(), saved.bias.as_ref());
    let Sizes { batch, time, channels } = sizes;
    let uses = [or(x, weight), context.unwrap_or(weight), weight, bias.unwrap_or(weight), or(y, next), next];
    let optional = context.map_or(0, Tensor::bytes) + bias.map_or(0, Tensor::bytes);
    let bytes = x.bytes() + weight.bytes() + y.bytes() + next.bytes() + optional;
    let spans = time.div_ceil(SPAN).max(1);
    let mutant = b.mutant(super::STEM);
    b.launch("short_conv::forward", Grid::units(batch * spans * channels), bytes, &uses, |client, count, dim| {
        let [x, context_, weight, bias_, y, next] = uses.map(|t| b.floats(t));
        let (n, t, c, spans) = (batch as u32, time as u32, channels as u32, spans as u32);
        let (has_context, has_bias) = (context.is_some(), bias.is_some());
        // SAFETY: shapes were checked by the caller; units past the spans do nothing.
        unsafe {
            forward_kernel::launch_unchecked::<R>(
                client,
                count,
                dim,
                x,
                context_,
                weight,
                bias_,
                y,
                next,
                n,
                t,
                c,
                spans,
                has_context,
                has_bias,
                mutant,
            )
        }
    })
}

/// Fills `dx` and `dcontext`; the gradients of the parameters are added to what `call` names.
pub(super) fn backward<R: Engine>(
    b: &Device<R>,
    saved: &Saved,
    call: &Backward<'_>,
    dx: &Tensor,
    dcontext: Option<&Tensor>,
) -> Result<()> {
    let Saved { x, weight, .. } = saved;
    let (context, bias) = (saved.context.as_ref(), saved.bias.as_ref());
    let Backward { dy, dnext, dweight, dbias, sizes } = *call;
    let Sizes { batch, time, channels } = sizes;
    // Where there is no token and no context there is nothing to write.
    let Some(some) = [Some(dx), dcontext].into_iter().flatten().find(|t| !t.is_empty()) else { return Ok(()) };
    // Both depend on the shape only, so the order of the sums does too.
    let long = time + CONTEXT;
    let span = (batch * long).div_ceil(LANES as usize * BLOCKS).max(SPAN);
    let blocks = long.div_ceil(LANES as usize * span);
    let rows = batch * blocks;
    let for_weight = b.float_scratch(&[rows, WIDTH * channels])?;
    let for_bias = b.float_scratch(&[rows, channels])?;
    let uses = [
        or(x, weight),
        context.unwrap_or(weight),
        weight,
        bias.unwrap_or(weight),
        or(dy, weight),
        dnext.unwrap_or(weight),
        or(dx, some),
        dcontext.unwrap_or(some),
        &for_weight,
        &for_bias,
    ];
    let optional = [context, bias, dnext, dcontext].into_iter().flatten().map(Tensor::bytes).sum::<u64>();
    let bytes = 3 * x.bytes() + weight.bytes() + optional + for_weight.bytes() + for_bias.bytes();
    let grid = Grid::cubes(rows * channels.div_ceil(COLUMNS as usize), UNITS);
    let mutant = b.mutant(super::STEM);
    b.launch("short_conv::backward", grid, bytes, &uses, |client, count, dim| {
        let [x, context_, weight, bias_, dy, dnext_, dx, dcontext, for_weight, for_bias] = uses.map(|t| b.floats(t));
        let (n, t, c) = (batch as u32, time as u32, channels as u32);
        let (blocks, span) = (blocks as u32, span as u32);
        let (has_context, has_bias, has_next) = (context.is_some(), bias.is_some(), dnext.is_some());
        // SAFETY: shapes were checked by the caller; the sums have one row a block; units past the positions and
        // channels touch nothing.
        unsafe {
            backward_kernel::launch_unchecked::<R>(
                client,
                count,
                dim,
                x,
                context_,
                weight,
                bias_,
                dy,
                dnext_,
                dx,
                dcontext,
                for_weight,
                for_bias,
                n,
                t,
                c,
                blocks,
                span,
                has_context,
                has_bias,
                has_next,
                mutant,
            )
        }
    })?;
    if time == 0 {
        return Ok(());
    }
    sum::add_partials(b, &for_weight, rows, WIDTH * channels, dweight)?;
    match dbias {
        Some(bias) => sum::add_partials(b, &for_bias, rows, channels, bias),
        None => Ok(()),
    }
}
