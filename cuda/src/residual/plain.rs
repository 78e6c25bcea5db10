//! Arm `plain`: one unit computes one element. The gradient of rho is a sum of products over blocks of elements, one
//! unit a block, and then over blocks.

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::Saved;
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::sum;
use crate::tensor::{Floats, Tensor};

/// h = c + rho y. One unit, one element.
#[cube(launch_unchecked)]
fn forward_kernel(c: &Floats, y: &Floats, rho: &Floats, h: &mut Floats, len: u32) {
    let i = ABSOLUTE_POS;
    if i < len as usize {
        h.set(i, c.at(i) + rho.at(0) * y.at(i));
    }
}

/// dy = rho dh. One unit, one element.
#[cube(launch_unchecked)]
fn backward_kernel(rho: &Floats, dh: &Floats, dy: &mut Floats, len: u32) {
    let i = ABSOLUTE_POS;
    if i < len as usize {
        dy.set(i, rho.at(0) * dh.at(i));
    }
}

/// The sum of dh y over a block of elements, first to last. One unit, one block.
#[cube(launch_unchecked)]
fn products_kernel(y: &Floats, dh: &Floats, out: &mut Floats, len: u32) {
    let block = ABSOLUTE_POS;
    let len = len as usize;
    let first = block * sum::BLOCK;
    if first < len {
        let mut last = first + sum::BLOCK;
        if last > len {
            last = len;
        }
        let mut total = 0.0f32;
        for i in first..last {
            total += dh.at(i) * y.at(i);
        }
        out.set(block, total);
    }
}

/// h.
pub(super) fn forward<R: Engine>(b: &Device<R>, c: &Tensor, y: &Tensor, rho: &Tensor, h: &Tensor) -> Result<()> {
    let uses = [c, y, rho, h];
    b.launch("residual::forward", Grid::units(h.len()), 3 * h.bytes(), &uses, |client, count, dim| {
        let [c, y, rho, out] = uses.map(|t| b.floats(t));
        // SAFETY: c, y and h have `len` elements; units past them do nothing.
        unsafe { forward_kernel::launch_unchecked::<R>(client, count, dim, c, y, rho, out, h.len() as u32) }
    })
}

/// dy; the gradient of rho is added to `drho`.
pub(super) fn backward<R: Engine>(b: &Device<R>, saved: &Saved, dh: &Tensor, dy: &Tensor, drho: &Tensor) -> Result<()> {
    let Saved { y, rho, .. } = saved;
    let len = dh.len() as u32;
    let uses = [rho, dh, dy];
    b.launch("residual::backward", Grid::units(dy.len()), 2 * dy.bytes(), &uses, |client, count, dim| {
        let [rho, dh, dy] = uses.map(|t| b.floats(t));
        // SAFETY: dh and dy have `len` elements; units past them do nothing.
        unsafe { backward_kernel::launch_unchecked::<R>(client, count, dim, rho, dh, dy, len) }
    })?;
    let blocks = dh.len().div_ceil(sum::BLOCK);
    let partial = b.float_scratch(&[blocks])?;
    let uses = [y, dh, &partial];
    let bytes = 2 * dh.bytes() + partial.bytes();
    b.launch("residual::products", Grid::units(blocks), bytes, &uses, |client, count, dim| {
        let [y, dh, out] = uses.map(|t| b.floats(t));
        // SAFETY: `out` has one element a block; units past it do nothing.
        unsafe { products_kernel::launch_unchecked::<R>(client, count, dim, y, dh, out, len) }
    })?;
    sum::add_rows(b, &partial, blocks, 1, drho)
}
