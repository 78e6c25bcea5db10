//! `residual`: the equations are in `dormouse_reference::residual`.
//!
//! Arm `plain`: one unit computes one element. The gradient of rho is a sum of products over blocks of elements, one
//! unit a block, and then over blocks. rho is read on the device, never by the host.

use cubecl::prelude::*;
use dormouse_reference::residual::{Config, Grads, Inputs, Outputs, Params, Residual};
use dormouse_reference::{Dims, Error, Result};

use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::sum;
use crate::tensor::{Floats, Tensor};

/// What `forward` hands to `backward`: handles only.
pub struct Saved {
    y: Tensor,
    rho: Tensor,
}

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

impl<R: Engine> Residual for Device<R> {
    type Saved = Saved;

    fn forward(
        &self,
        _config: &Config,
        inputs: Inputs<&Tensor>,
        params: Params<&Tensor>,
    ) -> Result<(Outputs<Tensor>, Saved)> {
        const OP: &str = "residual::forward";
        let Inputs { c, y } = inputs;
        let mut dims = Dims::new(OP);
        dims.bind_rows("c", c.shape(), "N", &["D"])?;
        dims.bind_rows("y", y.shape(), "N", &["D"])?;
        dims.positive(&["D"])?;
        check_rho(OP, params.rho)?;
        self.check_floats(OP, &[("c", c), ("y", y), ("rho", params.rho)])?;
        let h = self.float_scratch(c.shape())?;
        let uses = [c, y, params.rho, &h];
        self.launch(OP, Grid::units(h.len()), 3 * h.bytes(), &uses, |client, count, dim| {
            let [c, y, rho, out] = uses.map(|t| self.floats(t));
            // SAFETY: c, y and h have `len` elements; units past them do nothing.
            unsafe { forward_kernel::launch_unchecked::<R>(client, count, dim, c, y, rho, out, h.len() as u32) }
        })?;
        Ok((Outputs { h }, Saved { y: y.clone(), rho: params.rho.clone() }))
    }

    fn backward(
        &self,
        _config: &Config,
        saved: &Saved,
        upstream: Outputs<&Tensor>,
        into: Params<&Tensor>,
    ) -> Result<Grads<Tensor>> {
        const OP: &str = "residual::backward";
        let (Saved { y, rho }, dh) = (saved, upstream.h);
        let mut dims = Dims::new(OP);
        dims.bind_rows("y", y.shape(), "N", &["D"])?;
        dims.bind_rows("h", dh.shape(), "N", &["D"])?;
        check_rho(OP, into.rho)?;
        let reads = [("y", y), ("rho", rho), ("h", dh)];
        self.check_floats(OP, &reads)?;
        self.check_into(OP, "rho", into.rho, &reads)?;
        let len = dh.len() as u32;

        let dy = self.float_scratch(y.shape())?;
        let uses = [rho, dh, &dy];
        self.launch(OP, Grid::units(dy.len()), 2 * dy.bytes(), &uses, |client, count, dim| {
            let [rho, dh, dy] = uses.map(|t| self.floats(t));
            // SAFETY: dh and dy have `len` elements; units past them do nothing.
            unsafe { backward_kernel::launch_unchecked::<R>(client, count, dim, rho, dh, dy, len) }
        })?;

        let blocks = dh.len().div_ceil(sum::BLOCK);
        let partial = self.float_scratch(&[blocks])?;
        let uses = [y, dh, &partial];
        let bytes = 2 * dh.bytes() + partial.bytes();
        self.launch("residual::products", Grid::units(blocks), bytes, &uses, |client, count, dim| {
            let [y, dh, out] = uses.map(|t| self.floats(t));
            // SAFETY: `out` has one element a block; units past it do nothing.
            unsafe { products_kernel::launch_unchecked::<R>(client, count, dim, y, dh, out, len) }
        })?;
        sum::add_rows(self, &partial, blocks, 1, into.rho)?;
        Ok(Grads { dc: dh.clone(), dy })
    }
}

fn check_rho(op: &'static str, rho: &Tensor) -> Result<()> {
    if rho.shape() == [1] {
        return Ok(());
    }
    Err(Error::Shape { op, arg: "rho", expected: "[1]".to_owned(), got: rho.shape().to_vec() })
}
