//! The obvious kernels: the equations one after the other.

use cubecl::prelude::*;
use dormouse_reference::{Precision, Result, Tensors};

use super::{Factors, Sizes};
use crate::arm::Arm;
use crate::device::Device;
use crate::launch::Grid;
use crate::matmul::{Matrix, Plus, Product, product, stack};
use crate::runtime::Engine;
use crate::sum;
use crate::tensor::{Floats, Tensor};

/// out = x * s, x `[E, N, R]`, s `[E, R]`. One unit, one element.
#[cube(launch_unchecked)]
fn scale_kernel(x: &Floats, s: &Floats, out: &mut Floats, len: u32, rows: u32, rank: u32) {
    let i = ABSOLUTE_POS;
    let (rows, rank) = (rows as usize, rank as usize);
    if i < len as usize {
        out.set(i, x.at(i) * s.at(i / (rows * rank) * rank + i % rank));
    }
}

/// out = x * y. One unit, one element.
#[cube(launch_unchecked)]
fn times_kernel(x: &Floats, y: &Floats, out: &mut Floats, len: u32) {
    let i = ABSOLUTE_POS;
    if i < len as usize {
        out.set(i, x.at(i) * y.at(i));
    }
}

fn scale<R: Engine>(b: &Device<R>, name: &'static str, x: &Tensor, s: &Tensor, rows: usize) -> Result<Tensor> {
    let out = b.float_scratch(x.shape())?;
    let uses = [x, s, &out];
    let rank = x.shape()[2];
    b.launch(name, Grid::units(x.len()), 2 * x.bytes() + s.bytes(), &uses, |client, count, dim| {
        let [x_, s, out] = uses.map(|t| b.floats(t));
        let (len, rows, rank) = (x.len() as u32, rows as u32, rank as u32);
        // SAFETY: `x` and `out` have `len` elements, `s` one a column of each of the matrices of `x`.
        unsafe { scale_kernel::launch_unchecked::<R>(client, count, dim, x_, s, out, len, rows, rank) }
    })?;
    Ok(out)
}

/// What forward made: a and a * s, both `[E, N, R]`.
pub(crate) struct Saved {
    pub a: Tensor,
    pub scaled: Tensor,
}

/// y `[E, N, O]` of x, `[N, I]` for all or `[E, N, I]`.
pub(crate) fn forward<R: Engine>(
    device: &Device<R>,
    stem: &'static str,
    x: Matrix<'_>,
    factors: &Factors<'_>,
    sizes: &Sizes,
    rows: usize,
    precision: Precision,
    y: &Tensor,
) -> Result<Saved> {
    let Sizes { experts, inner, outer, rank } = *sizes;
    let a = device.float_scratch(&[experts, rows, rank])?;
    let for_a = Product {
        name: stem,
        batch: experts,
        m: rows,
        k: inner,
        n: rank,
        a: x.plain(),
        b: stack(factors.u, inner, rank).plain(),
        plus: Plus::Nothing,
        out: stack(&a, rows, rank),
        precision,
    };
    product(device, Arm::Plain, &for_a)?;
    let scaled = scale(device, stem, &a, factors.s, rows)?;
    let for_y = Product {
        k: rank,
        n: outer,
        a: stack(&scaled, rows, rank).plain(),
        b: stack(factors.v, outer, rank).transposed(),
        out: stack(y, rows, outer),
        ..for_a
    };
    product(device, Arm::Plain, &for_y)?;
    Ok(Saved { a, scaled })
}

/// Adds the gradients of the factors to `into` and returns b * s, `[E, N, R]`.
pub(crate) fn backward<R: Engine>(
    device: &Device<R>,
    stem: &'static str,
    x: Matrix<'_>,
    saved: &Saved,
    factors: &Factors<'_>,
    sizes: &Sizes,
    rows: usize,
    precision: Precision,
    dy: &Tensor,
    into: &Factors<'_>,
) -> Result<Tensor> {
    let Sizes { experts, inner, outer, rank } = *sizes;
    let b = device.float_scratch(&[experts, rows, rank])?;
    let for_b = Product {
        name: stem,
        batch: experts,
        m: rows,
        k: outer,
        n: rank,
        a: stack(dy, rows, outer).plain(),
        b: stack(factors.v, outer, rank).plain(),
        plus: Plus::Nothing,
        out: stack(&b, rows, rank),
        precision,
    };
    product(device, Arm::Plain, &for_b)?;
    let products = device.float_scratch(b.shape())?;
    let uses = [&b, &saved.a, &products];
    device.launch(stem, Grid::units(b.len()), 3 * b.bytes(), &uses, |client, count, dim| {
        let [x, y, out] = uses.map(|t| device.floats(t));
        // SAFETY: all three have one length.
        unsafe { times_kernel::launch_unchecked::<R>(client, count, dim, x, y, out, b.len() as u32) }
    })?;
    for e in 0..experts {
        let one = device.view(&products, e * rows * rank, &[rows, rank])?;
        sum::add_rows(device, &one, rows, rank, &device.view(into.s, e * rank, &[rank])?)?;
    }
    let scaled = scale(device, stem, &b, factors.s, rows)?;
    let for_u = Product {
        m: inner,
        k: rows,
        n: rank,
        a: x.transposed(),
        b: stack(&scaled, rows, rank).plain(),
        plus: Plus::Destination,
        out: stack(into.u, inner, rank),
        ..for_b
    };
    product(device, Arm::Plain, &for_u)?;
    let for_v = Product {
        m: outer,
        a: stack(dy, rows, outer).transposed(),
        b: stack(&saved.scaled, rows, rank).plain(),
        out: stack(into.v, outer, rank),
        ..for_u
    };
    product(device, Arm::Plain, &for_v)?;
    Ok(scaled)
}

/// dx of expert `e`: (b * s)_e U_e^T with `plus`, into `dx`.
pub(crate) fn into_x<R: Engine>(
    device: &Device<R>,
    stem: &'static str,
    scaled: &Tensor,
    factors: &Factors<'_>,
    sizes: &Sizes,
    rows: usize,
    precision: Precision,
    e: usize,
    plus: Plus<'_>,
    dx: &Tensor,
) -> Result<()> {
    let Sizes { inner, rank, .. } = *sizes;
    let one = device.view(scaled, e * rows * rank, &[rows, rank])?;
    let u = device.view(factors.u, e * inner * rank, &[inner, rank])?;
    let for_x = Product {
        name: stem,
        batch: 1,
        m: rows,
        k: rank,
        n: inner,
        a: stack(&one, rows, rank).plain(),
        b: stack(&u, inner, rank).transposed(),
        plus,
        out: stack(dx, rows, inner),
        precision,
    };
    product(device, Arm::Plain, &for_x)
}
