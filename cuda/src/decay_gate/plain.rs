//! Arm `plain`: one unit computes one element. The gradients of the parameters are summed over blocks of rows, one unit
//! a block and column (or head), and then over blocks.

use cubecl::prelude::*;
use dormouse_reference::Result;
use dormouse_reference::decay_gate::{Grads, Outputs};

use super::{Backward, Saved, Sizes};
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::sigmoid::{sigmoids, softplus};
use crate::sum;
use crate::tensor::{Floats, Tensor};

/// g. One unit, one element.
#[cube(launch_unchecked)]
fn g_kernel(
    z: &Floats,
    a_log: &Floats,
    dt_bias: &Floats,
    g: &mut Floats,
    len: u32,
    heads: u32,
    keys: u32,
    lower_bound: f32,
    #[comptime] bounded: bool,
) {
    let i = ABSOLUTE_POS;
    let (heads, keys) = (heads as usize, keys as usize);
    if i < len as usize {
        let column = i % (heads * keys);
        let a = a_log.at(column / keys).exp();
        let x = z.at(i) + dt_bias.at(column);
        if bounded {
            let (open, _closed) = sigmoids(a * x);
            g.set(i, lower_bound * open);
        } else {
            g.set(i, -(a * softplus(x)));
        }
    }
}

/// beta. One unit, one element.
#[cube(launch_unchecked)]
fn beta_kernel(y: &Floats, beta: &mut Floats, len: u32, beta_scale: f32) {
    let i = ABSOLUTE_POS;
    if i < len as usize {
        let (open, _closed) = sigmoids(y.at(i));
        beta.set(i, beta_scale * open);
    }
}

/// dz. One unit, one element.
#[cube(launch_unchecked)]
fn dz_kernel(
    z: &Floats,
    a_log: &Floats,
    dt_bias: &Floats,
    dg: &Floats,
    dz: &mut Floats,
    len: u32,
    heads: u32,
    keys: u32,
    lower_bound: f32,
    #[comptime] bounded: bool,
) {
    let i = ABSOLUTE_POS;
    let (heads, keys) = (heads as usize, keys as usize);
    if i < len as usize {
        let column = i % (heads * keys);
        let a = a_log.at(column / keys).exp();
        let x = z.at(i) + dt_bias.at(column);
        if bounded {
            let (open, closed) = sigmoids(a * x);
            dz.set(i, dg.at(i) * lower_bound * a * open * closed);
        } else {
            let (open, _closed) = sigmoids(x);
            dz.set(i, -(dg.at(i) * a * open));
        }
    }
}

/// dy. One unit, one element.
#[cube(launch_unchecked)]
fn dy_kernel(y: &Floats, dbeta: &Floats, dy: &mut Floats, len: u32, beta_scale: f32) {
    let i = ABSOLUTE_POS;
    if i < len as usize {
        let (open, closed) = sigmoids(y.at(i));
        dy.set(i, dbeta.at(i) * beta_scale * open * closed);
    }
}

/// The terms of da_log of a block of rows and one head: dz x (bounded) or dg g (softplus). One unit, one sum.
#[cube(launch_unchecked)]
fn a_log_kernel(
    z: &Floats,
    a_log: &Floats,
    dt_bias: &Floats,
    dg: &Floats,
    dz: &Floats,
    out: &mut Floats,
    rows: u32,
    heads: u32,
    keys: u32,
    #[comptime] bounded: bool,
) {
    let i = ABSOLUTE_POS;
    let (rows, heads, keys) = (rows as usize, heads as usize, keys as usize);
    if i < rows.div_ceil(sum::BLOCK) * heads {
        let first = i / heads * sum::BLOCK;
        let mut last = first + sum::BLOCK;
        if last > rows {
            last = rows;
        }
        let h = i % heads;
        let a = a_log.at(h).exp();
        let mut total = 0.0f32;
        for n in first..last {
            for k in 0..keys {
                let at = (n * heads + h) * keys + k;
                let x = z.at(at) + dt_bias.at(h * keys + k);
                if bounded {
                    total += dz.at(at) * x;
                } else {
                    total -= dg.at(at) * a * softplus(x);
                }
            }
        }
        out.set(i, total);
    }
}

/// g and beta.
pub(super) fn forward<R: Engine>(b: &Device<R>, saved: &Saved, sizes: Sizes) -> Result<Outputs<Tensor>> {
    let Saved { z, y, a_log, dt_bias, .. } = saved;
    let Sizes { heads, keys, bounded, lower_bound, beta_scale, .. } = sizes;
    let (h, k) = (heads as u32, keys as u32);
    let g = b.float_scratch(z.shape())?;
    let uses = [z, a_log, dt_bias, &g];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    b.launch("decay_gate::g", Grid::units(z.len()), bytes, &uses, |client, count, dim| {
        let [z_, a_log, dt_bias, g] = uses.map(|t| b.floats(t));
        let len = z.len() as u32;
        // SAFETY: shapes were checked by the caller; units past the elements do nothing.
        unsafe {
            g_kernel::launch_unchecked::<R>(client, count, dim, z_, a_log, dt_bias, g, len, h, k, lower_bound, bounded)
        }
    })?;
    let beta = b.float_scratch(y.shape())?;
    let uses = [y, &beta];
    b.launch("decay_gate::beta", Grid::units(y.len()), 2 * y.bytes(), &uses, |client, count, dim| {
        let [y_, beta] = uses.map(|t| b.floats(t));
        // SAFETY: both have `len` elements; units past them do nothing.
        unsafe { beta_kernel::launch_unchecked::<R>(client, count, dim, y_, beta, y.len() as u32, beta_scale) }
    })?;
    Ok(Outputs { g, beta })
}

/// dz and dy; the gradients of the parameters are added to what `call` names.
pub(super) fn backward<R: Engine>(b: &Device<R>, saved: &Saved, call: &Backward<'_>) -> Result<Grads<Tensor>> {
    let Saved { z, y, a_log, dt_bias, .. } = saved;
    let Backward { dg, dbeta, da_log, ddt_bias, sizes } = *call;
    let Sizes { rows, heads, keys, bounded, lower_bound, beta_scale } = sizes;
    let (n, h, k) = (rows as u32, heads as u32, keys as u32);
    let dz = b.float_scratch(z.shape())?;
    let uses = [z, a_log, dt_bias, dg, &dz];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    b.launch("decay_gate::dz", Grid::units(z.len()), bytes, &uses, |client, count, dim| {
        let [z_, a_log, dt_bias, dg, dz] = uses.map(|t| b.floats(t));
        let len = z.len() as u32;
        // SAFETY: shapes were checked by the caller; units past the elements do nothing.
        unsafe {
            dz_kernel::launch_unchecked::<R>(
                client,
                count,
                dim,
                z_,
                a_log,
                dt_bias,
                dg,
                dz,
                len,
                h,
                k,
                lower_bound,
                bounded,
            )
        }
    })?;
    let dy = b.float_scratch(y.shape())?;
    let uses = [y, dbeta, &dy];
    b.launch("decay_gate::dy", Grid::units(y.len()), 3 * y.bytes(), &uses, |client, count, dim| {
        let [y_, dbeta, dy] = uses.map(|t| b.floats(t));
        // SAFETY: all have `len` elements; units past them do nothing.
        unsafe { dy_kernel::launch_unchecked::<R>(client, count, dim, y_, dbeta, dy, y.len() as u32, beta_scale) }
    })?;
    let blocks = rows.div_ceil(sum::BLOCK);
    let partial = b.float_scratch(&[blocks, heads])?;
    let uses = [z, a_log, dt_bias, dg, &dz, &partial];
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    b.launch("decay_gate::a_log", Grid::units(partial.len()), bytes, &uses, |client, count, dim| {
        let [z, a_log, dt_bias, dg, dz, out] = uses.map(|t| b.floats(t));
        // SAFETY: `out` has one row a block and one element a head; units past them do nothing.
        unsafe {
            a_log_kernel::launch_unchecked::<R>(client, count, dim, z, a_log, dt_bias, dg, dz, out, n, h, k, bounded)
        }
    })?;
    sum::add_rows(b, &partial, blocks, heads, da_log)?;
    sum::add_rows(b, &dz, rows, heads * keys, ddt_bias)?;
    Ok(Grads { dz, dy })
}
