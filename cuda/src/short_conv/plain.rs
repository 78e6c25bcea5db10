//! Arm `plain`: one unit computes one element. The gradients of the parameters are summed over blocks of rows, one unit
//! a block and column, and then over blocks.

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

/// c of token t: the sum before SiLU.
#[cube]
fn convolved(
    x: &Floats,
    context: &Floats,
    weight: &Floats,
    bias: &Floats,
    b: usize,
    t: usize,
    c: usize,
    time: usize,
    channels: usize,
    #[comptime] has_context: bool,
    #[comptime] has_bias: bool,
) -> f32 {
    let mut sum = 0.0f32;
    if has_bias {
        sum = bias.at(c);
    }
    for j in 0..comptime!(WIDTH) {
        sum += weight.at(j * channels + c) * joined(x, context, b, t + j, c, time, channels, has_context);
    }
    sum
}

/// y of the tokens, then the new context. One unit, one element of a sequence of T + 3.
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
    #[comptime] has_context: bool,
    #[comptime] has_bias: bool,
) {
    let n = ABSOLUTE_POS;
    let (batch, time, channels) = (batch as usize, time as usize, channels as usize);
    let long = time + comptime!(CONTEXT);
    if n < batch * long * channels {
        let c = n % channels;
        let i = n / channels % long;
        let b = n / channels / long;
        if i < time {
            let sum = convolved(x, context, weight, bias, b, i, c, time, channels, has_context, has_bias);
            let (open, _closed) = sigmoids(sum);
            y.set((b * time + i) * channels + c, sum * open);
        } else {
            let last = joined(x, context, b, i, c, time, channels, has_context);
            next.set((b * comptime!(CONTEXT) + i - time) * channels + c, last);
        }
    }
}

/// dc. One unit, one element.
#[cube(launch_unchecked)]
fn dc_kernel(
    x: &Floats,
    context: &Floats,
    weight: &Floats,
    bias: &Floats,
    dy: &Floats,
    dc: &mut Floats,
    len: u32,
    time: u32,
    channels: u32,
    #[comptime] has_context: bool,
    #[comptime] has_bias: bool,
) {
    let n = ABSOLUTE_POS;
    let (time, channels) = (time as usize, channels as usize);
    if n < len as usize {
        let (c, t, b) = (n % channels, n / channels % time, n / channels / time);
        let sum = convolved(x, context, weight, bias, b, t, c, time, channels, has_context, has_bias);
        let (open, closed) = sigmoids(sum);
        dc.set(n, dy.at(n) * open * (1.0f32 + sum * closed));
    }
}

/// dcontext, then dx. One unit, one element of a sequence of T + 3.
#[cube(launch_unchecked)]
fn inputs_kernel(
    weight: &Floats,
    dc: &Floats,
    dnext: &Floats,
    dx: &mut Floats,
    dcontext: &mut Floats,
    batch: u32,
    time: u32,
    channels: u32,
    #[comptime] has_context: bool,
    #[comptime] has_next: bool,
) {
    let n = ABSOLUTE_POS;
    let (batch, time, channels) = (batch as usize, time as usize, channels as usize);
    let before = comptime!(CONTEXT);
    let long = time + before;
    if n < batch * long * channels {
        let c = n % channels;
        let i = n / channels % long;
        let b = n / channels / long;
        let mut sum = 0.0f32;
        for j in 0..comptime!(WIDTH) {
            if i >= j && i - j < time {
                sum += weight.at(j * channels + c) * dc.at((b * time + i - j) * channels + c);
            }
        }
        // The first position with a part of dn.
        let mut tail = long;
        if has_next {
            tail = time;
        }
        if i >= tail {
            sum += dnext.at((b * before + i - time) * channels + c);
        }
        if i >= before {
            dx.set((b * time + i - before) * channels + c, sum);
        } else {
            if has_context {
                dcontext.set((b * before + i) * channels + c, sum);
            }
        }
    }
}

/// The sum of dc_t xx_{t+j} over a block of tokens. One unit, one block, tap and channel.
#[cube(launch_unchecked)]
fn weight_kernel(
    x: &Floats,
    context: &Floats,
    dc: &Floats,
    out: &mut Floats,
    batch: u32,
    time: u32,
    channels: u32,
    #[comptime] has_context: bool,
) {
    let i = ABSOLUTE_POS;
    let (batch, time, channels) = (batch as usize, time as usize, channels as usize);
    let rows = batch * time;
    let width = comptime!(WIDTH) * channels;
    if i < rows.div_ceil(sum::BLOCK) * width {
        let first = i / width * sum::BLOCK;
        let mut last = first + sum::BLOCK;
        if last > rows {
            last = rows;
        }
        let c = i % channels;
        let j = i % width / channels;
        let mut total = 0.0f32;
        for n in first..last {
            let past = joined(x, context, n / time, n % time + j, c, time, channels, has_context);
            total += dc.at(n * channels + c) * past;
        }
        out.set(i, total);
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
    let grid = Grid::units(batch * (time + CONTEXT) * channels);
    b.launch("short_conv::forward", grid, bytes, &uses, |client, count, dim| {
        let [x, context_, weight, bias_, y, next] = uses.map(|t| b.floats(t));
        let (n, t, c) = (batch as u32, time as u32, channels as u32);
        let (has_context, has_bias) = (context.is_some(), bias.is_some());
        // SAFETY: shapes were checked by the caller; units past the elements do nothing.
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
                has_context,
                has_bias,
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
    let (n, t, c) = (batch as u32, time as u32, channels as u32);
    let (has_context, has_bias, has_next) = (context.is_some(), bias.is_some(), dnext.is_some());
    let dc = b.float_scratch(x.shape())?;
    let uses = [x, context.unwrap_or(weight), weight, bias.unwrap_or(weight), dy, &dc];
    let optional = context.map_or(0, Tensor::bytes) + bias.map_or(0, Tensor::bytes);
    let bytes = 3 * x.bytes() + weight.bytes() + optional;
    b.launch("short_conv::dc", Grid::units(x.len()), bytes, &uses, |client, count, dim| {
        let [x, context, weight, bias, dy, out] = uses.map(|t| b.floats(t));
        let len = dc.len() as u32;
        // SAFETY: shapes were checked by the caller; units past the elements do nothing.
        unsafe {
            dc_kernel::launch_unchecked::<R>(
                client,
                count,
                dim,
                x,
                context,
                weight,
                bias,
                dy,
                out,
                len,
                t,
                c,
                has_context,
                has_bias,
            )
        }
    })?;
    // Where there is no token and no context there is nothing to write.
    let Some(some) = [Some(dx), dcontext].into_iter().flatten().find(|t| !t.is_empty()) else { return Ok(()) };
    let uses = [weight, or(&dc, weight), dnext.unwrap_or(weight), or(dx, some), dcontext.unwrap_or(some)];
    let optional = dnext.map_or(0, Tensor::bytes) + dcontext.map_or(0, Tensor::bytes);
    let bytes = weight.bytes() + 2 * dc.bytes() + optional;
    let grid = Grid::units(batch * (time + CONTEXT) * channels);
    b.launch("short_conv::inputs", grid, bytes, &uses, |client, count, dim| {
        let [weight, dc, dnext, dx, dcontext] = uses.map(|t| b.floats(t));
        // SAFETY: shapes were checked by the caller; units past the elements do nothing.
        unsafe {
            inputs_kernel::launch_unchecked::<R>(
                client,
                count,
                dim,
                weight,
                dc,
                dnext,
                dx,
                dcontext,
                n,
                t,
                c,
                has_context,
                has_next,
            )
        }
    })?;
    let rows = batch * time;
    let blocks = rows.div_ceil(sum::BLOCK);
    let partial = b.float_scratch(&[blocks, WIDTH * channels])?;
    let uses = [x, context.unwrap_or(weight), &dc, &partial];
    let bytes = 2 * x.bytes() + context.map_or(0, Tensor::bytes) + partial.bytes();
    b.launch("short_conv::weight", Grid::units(partial.len()), bytes, &uses, |client, count, dim| {
        let [x, context, dc, out] = uses.map(|t| b.floats(t));
        // SAFETY: `out` has one row a block; units past it do nothing.
        unsafe { weight_kernel::launch_unchecked::<R>(client, count, dim, x, context, dc, out, n, t, c, has_context) }
    })?;
    sum::add_rows(b, &partial, blocks, WIDTH * channels, dweight)?;
    match dbias {
        Some(bias) => sum::add_rows(b, &dc, rows, channels, bias),
        None => Ok(()),
    }
}
