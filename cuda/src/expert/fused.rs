//! Arm `fused`: every product takes all experts at once. Forward is seven launches with silu and ten with a gate,
//! backward eleven and fourteen.
//!
//! Where experts and maps meet in one sum, their short rows lie side by side: b as `[N, maps, E, R]` and U times s as
//! `[D, maps, E, R]`. Then du is one product over `maps E R` terms, and x^T b one product too.

use dormouse_reference::{Result, Tensors};

use super::{Backward, Call, Hidden, STEM, Sizes, activation, down, gate, up};
use crate::arm::Arm;
use crate::device::Device;
use crate::factors::fused::{finish, scale};
use crate::factors::{self, Factors, Names, Side};
use crate::matmul::{Factor, Matrix, Plus, Product, matrix, product, stack};
use crate::runtime::Engine;
use crate::tensor::Tensor;

const NAMES: Names = Names { stem: STEM, scale: "expert::scale", finish: "expert::dparams" };

/// What forward keeps of the maps.
pub(super) struct Saved {
    /// u U of up and of gate, `[E, N, R]` each.
    up_a: Tensor,
    gate_a: Option<Tensor>,
    down_a: Tensor,
    /// U times s of up and gate, `[D, maps, E, R]`.
    us: Tensor,
    /// U times s of down, `[E, F, R]`.
    down_us: Tensor,
}

/// A batch of products without anything added.
pub(super) fn batch<'a>(
    name: &'static str,
    sizes: &Sizes,
    [m, k, n]: [usize; 3],
    a: Factor<'a>,
    b: Factor<'a>,
    out: Matrix<'a>,
) -> Product<'a> {
    Product { name, batch: sizes.experts, m, k, n, a, b, plus: Plus::Nothing, out, precision: sizes.precision }
}

/// The hidden rows and y.
pub(super) fn forward<R: Engine>(b: &Device<R>, call: &Call<'_>, into: &Hidden, y: &Tensor) -> Result<Saved> {
    let Call { u, params, sizes } = *call;
    let (h, g, act) = (&into.h, into.g.as_ref(), &into.act);
    let params = params.as_ref();
    let Sizes { experts, rows, width, hidden, rank, .. } = sizes;
    let maps = if g.is_some() { 2 } else { 1 };
    let us = b.float_scratch(&[width, maps, experts, rank])?;
    let x = matrix(u, width);
    let up_a = through(b, &sizes, &sizes.up(), x, &up(&params), Some(Side { map: 0, maps }), &us, h)?;
    let gate_a = match (gate(&params), g) {
        (Some(gate), Some(g)) => Some(through(b, &sizes, &sizes.up(), x, &gate, Some(Side { map: 1, maps }), &us, g)?),
        _ => None,
    };
    activation::forward(b, Arm::Fused, h, g, act)?;
    let down_us = b.float_scratch(params.down_u.shape())?;
    let x = stack(act, rows, hidden);
    let down_a = through(b, &sizes, &sizes.down(), x, &down(&params), None, &down_us, y)?;
    Ok(Saved { up_a, gate_a, down_a, us, down_us })
}

/// y of one map for every expert; returns a. U times s goes to `us`.
fn through<R: Engine>(
    b: &Device<R>,
    sizes: &Sizes,
    map: &factors::Sizes,
    x: Matrix<'_>,
    factors: &Factors<'_>,
    side: Option<Side>,
    us: &Tensor,
    y: &Tensor,
) -> Result<Tensor> {
    let factors::Sizes { experts, inner, outer, rank } = *map;
    let rows = sizes.rows;
    let vs = scale(b, &NAMES, factors, map, side, us)?;
    let a = b.float_scratch(&[experts, rows, rank])?;
    let for_a = batch(
        "expert::a",
        sizes,
        [rows, inner, rank],
        x.plain(),
        stack(factors.u, inner, rank).plain(),
        stack(&a, rows, rank),
    );
    product(b, Arm::Fused, &for_a)?;
    let for_y = batch(
        "expert::y",
        sizes,
        [rows, rank, outer],
        stack(&a, rows, rank).plain(),
        stack(&vs, outer, rank).transposed(),
        stack(y, rows, outer),
    );
    product(b, Arm::Fused, &for_y)?;
    Ok(a)
}

/// du; the gradients of the parameters are added to what `call` names.
pub(super) fn backward<R: Engine>(b: &Device<R>, call: &Backward<'_>, saved: &Hidden, kept: &Saved) -> Result<()> {
    let Backward { call: Call { u, params, sizes }, dy, plus, ref into, du } = *call;
    let params = params.as_ref();
    let Sizes { experts, rows, width, hidden, rank, precision } = sizes;
    let mutant = b.mutant(STEM);

    // Down, to the gradient of the activation.
    let map = down(&params);
    let down_b = b.float_scratch(&[experts, rows, rank])?;
    let short = stack(&down_b, rows, rank);
    let grad = stack(dy, rows, width).plain();
    product(
        b,
        Arm::Fused,
        &batch("expert::b", &sizes, [rows, width, rank], grad, stack(map.v, width, rank).plain(), short),
    )?;
    let dh = b.float_scratch(&sizes.hidden_shape())?;
    let us = stack(&kept.down_us, hidden, rank).transposed();
    let out = stack(&dh, rows, hidden);
    product(b, Arm::Fused, &batch("expert::dact", &sizes, [rows, rank, hidden], short.plain(), us, out))?;
    let p = b.float_scratch(map.u.shape())?;
    let act = stack(&saved.act, rows, hidden).transposed();
    let out = stack(&p, hidden, rank);
    product(b, Arm::Fused, &batch("expert::p", &sizes, [hidden, rows, rank], act, short.plain(), out))?;
    let q = side_q(b, &sizes, dy, width, &kept.down_a)?;
    finish(b, &NAMES, &map, &sizes.down(), None, (&p, &q), &down(into))?;
    let dg = activation::backward(b, Arm::Fused, &saved.h, saved.g.as_ref(), &dh)?;

    // Up and gate, side by side.
    let mut maps = vec![(up(&params), up(into), &dh, &kept.up_a)];
    if let (Some(map), Some(to), Some(dg), Some(a)) = (gate(&params), gate(into), &dg, &kept.gate_a) {
        maps.push((map, to, dg, a));
    }
    let terms = maps.len() * experts * rank;
    let both = b.float_scratch(&[rows, terms])?;
    for (i, (map, _, grad, _)) in maps.iter().enumerate() {
        let at = i * experts * rank;
        let part = b.view(&both, at, &[both.len() - at])?;
        let out = Matrix { tensor: &part, row: terms, next: rank };
        let grad = stack(grad, rows, hidden).plain();
        let v = stack(map.v, hidden, rank).plain();
        product(b, Arm::Fused, &batch("expert::b", &sizes, [rows, hidden, rank], grad, v, out))?;
    }
    let for_u = Product {
        name: "expert::du",
        batch: 1,
        m: rows,
        k: if mutant == 14 { terms - rank } else { terms },
        n: width,
        a: matrix(&both, terms).plain(),
        b: matrix(&kept.us, terms).transposed(),
        plus: plus.filter(|_| mutant != 8).map_or(Plus::Nothing, Plus::Matrix),
        out: matrix(du, width),
        precision,
    };
    product(b, Arm::Fused, &for_u)?;
    let p = b.float_scratch(&[width, terms])?;
    let for_p = Product {
        name: "expert::p",
        m: width,
        k: if mutant == 17 { rows.saturating_sub(1) } else { rows },
        n: terms,
        a: matrix(u, width).transposed(),
        b: matrix(&both, terms).plain(),
        plus: Plus::Nothing,
        out: matrix(&p, terms),
        ..for_u
    };
    product(b, Arm::Fused, &for_p)?;
    for (i, (map, to, grad, a)) in maps.iter().enumerate() {
        let q = side_q(b, &sizes, grad, hidden, a)?;
        let side = Side { map: i, maps: maps.len() };
        finish(b, &NAMES, map, &sizes.up(), Some(side), (&p, &q), to)?;
    }
    Ok(())
}

/// dy^T a of every expert, with dy `[E, N, outer]`.
fn side_q<R: Engine>(b: &Device<R>, sizes: &Sizes, dy: &Tensor, outer: usize, a: &Tensor) -> Result<Tensor> {
    let Sizes { experts, rows, rank, .. } = *sizes;
    let q = b.float_scratch(&[experts, outer, rank])?;
    let grad = stack(dy, rows, outer).transposed();
    let short = stack(a, rows, rank).plain();
    let terms = if b.mutant(STEM) == 18 { rows.saturating_sub(1) } else { rows };
    product(b, Arm::Fused, &batch("expert::q", sizes, [outer, terms, rank], grad, short, stack(&q, outer, rank)))?;
    Ok(q)
}
