//! Arm `plain`: the products on the tiled kernel; one unit does one row of gates.

use cubecl::prelude::*;
use dormouse_reference::{Result, Tensors};

use super::{Backward, FIXED_GATES, Forward, Sizes, sigmoid};
use crate::arm::Arm;
use crate::device::Device;
use crate::launch::Grid;
use crate::matmul::{Plus, Product, matrix, product};
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor};

/// The gates of raw. One unit, one row.
#[cube(launch_unchecked)]
fn gates_kernel(raw: &Floats, gates: &mut Floats, rows: u32, total: u32) {
    let n = ABSOLUTE_POS;
    let total = total as usize;
    let fixed = comptime!(FIXED_GATES);
    if n < rows as usize {
        let first = n * total;
        for j in 0..fixed {
            gates.set(first + j, sigmoid(raw.at(first + j)));
        }
        let mut largest = raw.at(first + fixed);
        for j in fixed..total {
            if raw.at(first + j) > largest {
                largest = raw.at(first + j);
            }
        }
        let mut sum = 0.0f32;
        for j in fixed..total {
            sum += (raw.at(first + j) - largest).exp();
        }
        for j in fixed..total {
            gates.set(first + j, (raw.at(first + j) - largest).exp() / sum);
        }
    }
}

/// The gradient of raw. One unit, one row.
#[cube(launch_unchecked)]
fn draw_kernel(raw: &Floats, gates: &Floats, dgates: &Floats, draw: &mut Floats, rows: u32, total: u32) {
    let n = ABSOLUTE_POS;
    let total = total as usize;
    let fixed = comptime!(FIXED_GATES);
    if n < rows as usize {
        let first = n * total;
        for j in 0..fixed {
            let at = first + j;
            draw.set(at, dgates.at(at) * gates.at(at) * sigmoid(-raw.at(at)));
        }
        for j in fixed..total {
            let mut differences = 0.0f32;
            for f in fixed..total {
                differences += gates.at(first + f) * (dgates.at(first + j) - dgates.at(first + f));
            }
            draw.set(first + j, gates.at(first + j) * differences);
        }
    }
}

/// raw and the gates.
pub(super) fn forward<R: Engine>(b: &Device<R>, call: &Forward<'_>) -> Result<()> {
    let Forward { c, x0, weight, raw, gates, sizes } = *call;
    let Sizes { rows, width, gates: total, precision } = sizes;
    let [top, bottom] = halves(b, weight, &sizes)?;
    let from_c = Product {
        name: "controller::forward",
        batch: 1,
        m: rows,
        k: width,
        n: total,
        a: matrix(c, width).plain(),
        b: matrix(&top, total).plain(),
        plus: Plus::Nothing,
        out: matrix(raw, total),
        precision,
    };
    product(b, Arm::Plain, &from_c)?;
    let from_x0 =
        Product { a: matrix(x0, width).plain(), b: matrix(&bottom, total).plain(), plus: Plus::Destination, ..from_c };
    product(b, Arm::Plain, &from_x0)?;
    let uses = [raw, gates];
    b.launch("controller::gates", Grid::units(rows), raw.bytes() + gates.bytes(), &uses, |client, count, dim| {
        let [raw, gates] = uses.map(|t| b.floats(t));
        // SAFETY: both have `rows` by `total` elements.
        unsafe { gates_kernel::launch_unchecked::<R>(client, count, dim, raw, gates, rows as u32, total as u32) }
    })
}

/// dc and dx0; the gradient of the weight is added to what `call` names.
pub(super) fn backward<R: Engine>(b: &Device<R>, call: &Backward<'_>) -> Result<()> {
    let Backward { saved, dgates, ref plus, dweight, dc, dx0, sizes } = *call;
    let Sizes { rows, width, gates: total, precision } = sizes;
    let draw = b.float_scratch(&[rows, total])?;
    let uses = [&saved.raw, &saved.gates, dgates, &draw];
    b.launch("controller::draw", Grid::units(rows), 4 * draw.bytes(), &uses, |client, count, dim| {
        let [raw, gates, dgates, draw] = uses.map(|t| b.floats(t));
        let (n, total) = (rows as u32, total as u32);
        // SAFETY: all have `rows` by `total` elements.
        unsafe { draw_kernel::launch_unchecked::<R>(client, count, dim, raw, gates, dgates, draw, n, total) }
    })?;
    let [top, bottom] = halves(b, &saved.weight, &sizes)?;
    let [into_top, into_bottom] = halves(b, dweight, &sizes)?;
    let parts = [(&saved.c, &top, plus.c, dc, &into_top), (&saved.x0, &bottom, plus.x0, dx0, &into_bottom)];
    for (x, half, plus, dx, into) in parts {
        let for_x = Product {
            name: "controller::backward",
            batch: 1,
            m: rows,
            k: total,
            n: width,
            a: matrix(&draw, total).plain(),
            b: matrix(half, total).transposed(),
            plus: plus.map_or(Plus::Nothing, Plus::Matrix),
            out: matrix(dx, width),
            precision,
        };
        product(b, Arm::Plain, &for_x)?;
        let for_weight = Product {
            m: width,
            k: rows,
            n: total,
            a: matrix(x, width).transposed(),
            b: matrix(&draw, total).plain(),
            plus: Plus::Destination,
            out: matrix(into, total),
            ..for_x
        };
        product(b, Arm::Plain, &for_weight)?;
    }
    Ok(())
}

/// The rows that act on c and those that act on x0.
fn halves<R: Engine>(b: &Device<R>, weight: &Tensor, sizes: &Sizes) -> Result<[Tensor; 2]> {
    let half = sizes.width * sizes.gates;
    let shape = [sizes.width, sizes.gates];
    Ok([b.view(weight, 0, &shape)?, b.view(weight, half, &shape)?])
}
