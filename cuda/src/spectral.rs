//! `spectral`: the equations are in `dormouse_reference::spectral`, how each arm orders them in [`factors`].
//!
//! Arm `fused`: forward is three launches (V and U times s, a, y), backward five (b, dx, x^T b, dy^T a, and all three
//! gradients of the parameters).

use dormouse_reference::spectral::{Config, Grads, Inputs, Outputs, Params, Spectral};
use dormouse_reference::{Dims, Precision, Result};

use crate::arm::{Arm, Mutant};
use crate::device::Device;
use crate::factors::{self, Factors, Names, Sizes};
use crate::matmul::{Plus, Product, matrix, product};
use crate::runtime::Engine;
use crate::tensor::Tensor;

const STEM: &str = "spectral";

const NAMES: Names = Names { stem: STEM, scale: "spectral::scale", finish: "spectral::dparams" };

/// Numbered from 1 in the kernels of [`factors`]; number 8 is planted here.
pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant::fused("forward-without-s"),
    Mutant::fused("dx-without-s"),
    Mutant::fused("du-without-s"),
    Mutant::fused("dv-without-s"),
    Mutant::fused("ds-times-s"),
    Mutant::fused("ds-misses-last-row"),
    Mutant::fused("null-renamed-local"),
    Mutant::fused("plus-dropped"),
];

/// What `forward` hands to `backward`.
pub struct Saved {
    x: Tensor,
    params: Params<Tensor>,
    arm: SavedArm,
}

enum SavedArm {
    Plain(factors::plain::Saved),
    /// a, and U * s.
    Fused {
        a: Tensor,
        us: Tensor,
    },
}

impl<R: Engine> Spectral for Device<R> {
    type Saved = Saved;

    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Tensor>,
        params: Params<&Tensor>,
    ) -> Result<(Outputs<Tensor>, Saved)> {
        const OP: &str = "spectral::forward";
        factors::check_format(OP, config.format)?;
        let x = inputs.x;
        let dims = bind(OP, x.shape(), params.clone().map(|_, p| p.shape()))?;
        self.check_floats(OP, &[("x", x)])?;
        self.check_floats(OP, &params.clone().named())?;
        let (rows, sizes) = (dims.get("N"), sizes(&dims));
        let mut shape = x.shape().to_vec();
        *shape.last_mut().expect("bind_rows wants the axis I") = sizes.outer;
        let y = self.float_scratch(&shape)?;
        let maps = Factors { u: params.u, s: params.s, v: params.v };
        let arm = match self.forward_arm(STEM) {
            Arm::Plain => {
                let x = matrix(x, sizes.inner);
                SavedArm::Plain(factors::plain::forward(self, OP, x, &maps, &sizes, rows, config.precision, &y)?)
            }
            Arm::Fused => {
                let us = self.float_scratch(params.u.shape())?;
                let vs = factors::fused::scale(self, &NAMES, &maps, &sizes, None, &us)?;
                let a = self.float_scratch(&[rows, sizes.rank])?;
                let for_a = Product {
                    name: "spectral::a",
                    batch: 1,
                    m: rows,
                    k: sizes.inner,
                    n: sizes.rank,
                    a: matrix(x, sizes.inner).plain(),
                    b: matrix(params.u, sizes.rank).plain(),
                    plus: Plus::Nothing,
                    out: matrix(&a, sizes.rank),
                    precision: config.precision,
                };
                product(self, Arm::Fused, &for_a)?;
                let for_y = Product {
                    name: "spectral::y",
                    k: sizes.rank,
                    n: sizes.outer,
                    a: matrix(&a, sizes.rank).plain(),
                    b: matrix(&vs, sizes.rank).transposed(),
                    out: matrix(&y, sizes.outer),
                    ..for_a
                };
                product(self, Arm::Fused, &for_y)?;
                SavedArm::Fused { a, us }
            }
        };
        Ok((Outputs { y }, Saved { x: x.clone(), params: params.map(|_, p| p.clone()), arm }))
    }

    fn backward(
        &self,
        config: &Config,
        saved: &Saved,
        upstream: Outputs<&Tensor>,
        plus: Option<&Tensor>,
        into: Params<&Tensor>,
    ) -> Result<Grads<Tensor>> {
        const OP: &str = "spectral::backward";
        factors::check_format(OP, config.format)?;
        let Saved { x, params, arm } = saved;
        let dy = upstream.y;
        let mut dims = bind(OP, x.shape(), params.as_ref().map(|_, p| p.shape()))?;
        dims.bind_rows("y", dy.shape(), "N", &["O"])?;
        dims.bind("u", into.u.shape(), &["I", "R"])?;
        dims.bind("s", into.s.shape(), &["R"])?;
        dims.bind("v", into.v.shape(), &["O", "R"])?;
        let mut reads = vec![("x", x), ("y", dy)];
        reads.extend(params.as_ref().named());
        if let Some(plus) = plus {
            dims.bind_rows("plus", plus.shape(), "N", &["I"])?;
            reads.push(("plus", plus));
        }
        match arm {
            SavedArm::Plain(saved) => reads.extend([("saved.a", &saved.a), ("saved.as", &saved.scaled)]),
            SavedArm::Fused { a, us } => reads.extend([("saved.a", a), ("saved.us", us)]),
        }
        self.check_floats(OP, &reads)?;
        for (arg, tensor) in into.clone().named() {
            self.check_into(OP, arg, tensor, &reads)?;
        }
        let dx = self.float_scratch(x.shape())?;
        let call = Backward {
            x,
            maps: Factors { u: &params.u, s: &params.s, v: &params.v },
            dy,
            plus,
            into: Factors { u: into.u, s: into.s, v: into.v },
            dx: &dx,
            rows: dims.get("N"),
            sizes: sizes(&dims),
            precision: config.precision,
        };
        // No rows add nothing.
        match arm {
            SavedArm::Plain(saved) => {
                self.note_backward(STEM, Arm::Plain);
                if call.rows > 0 {
                    plain_backward(self, OP, saved, &call)?;
                }
            }
            SavedArm::Fused { a, us } => {
                self.note_backward(STEM, Arm::Fused);
                if call.rows > 0 {
                    fused_backward(self, a, us, &call)?;
                }
            }
        }
        Ok(Grads { dx })
    }
}

/// One backward call, checked.
struct Backward<'a> {
    x: &'a Tensor,
    maps: Factors<'a>,
    dy: &'a Tensor,
    plus: Option<&'a Tensor>,
    into: Factors<'a>,
    dx: &'a Tensor,
    rows: usize,
    sizes: Sizes,
    precision: Precision,
}

fn plain_backward<R: Engine>(
    b: &Device<R>,
    op: &'static str,
    saved: &factors::plain::Saved,
    call: &Backward<'_>,
) -> Result<()> {
    let Backward { x, ref maps, dy, plus, ref into, dx, rows, ref sizes, precision } = *call;
    let x = matrix(x, sizes.inner);
    let scaled = factors::plain::backward(b, op, x, saved, maps, sizes, rows, precision, dy, into)?;
    let plus = plus.map_or(Plus::Nothing, Plus::Matrix);
    factors::plain::into_x(b, op, &scaled, maps, sizes, rows, precision, 0, plus, dx)
}

fn fused_backward<R: Engine>(device: &Device<R>, a: &Tensor, us: &Tensor, call: &Backward<'_>) -> Result<()> {
    let Backward { x, ref maps, dy, plus, ref into, dx, rows, ref sizes, precision } = *call;
    let Sizes { inner, outer, rank, .. } = *sizes;
    let b = device.float_scratch(a.shape())?;
    let for_b = Product {
        name: "spectral::b",
        batch: 1,
        m: rows,
        k: outer,
        n: rank,
        a: matrix(dy, outer).plain(),
        b: matrix(maps.v, rank).plain(),
        plus: Plus::Nothing,
        out: matrix(&b, rank),
        precision,
    };
    product(device, Arm::Fused, &for_b)?;
    let for_x = Product {
        name: "spectral::dx",
        k: rank,
        n: inner,
        a: matrix(&b, rank).plain(),
        b: matrix(us, rank).transposed(),
        plus: plus.filter(|_| device.mutant(STEM) != 8).map_or(Plus::Nothing, Plus::Matrix),
        out: matrix(dx, inner),
        ..for_b
    };
    product(device, Arm::Fused, &for_x)?;
    let p = device.float_scratch(maps.u.shape())?;
    let for_p = Product {
        name: "spectral::p",
        m: inner,
        k: rows,
        a: matrix(x, inner).transposed(),
        b: matrix(&b, rank).plain(),
        out: matrix(&p, rank),
        ..for_b
    };
    product(device, Arm::Fused, &for_p)?;
    let q = device.float_scratch(maps.v.shape())?;
    let for_q = Product {
        name: "spectral::q",
        m: outer,
        a: matrix(dy, outer).transposed(),
        b: matrix(a, rank).plain(),
        out: matrix(&q, rank),
        ..for_p
    };
    product(device, Arm::Fused, &for_q)?;
    factors::fused::finish(device, &NAMES, maps, sizes, None, (&p, &q), into)
}

fn bind(op: &'static str, x: &[usize], params: Params<&[usize]>) -> Result<Dims> {
    let mut dims = Dims::new(op);
    dims.bind_rows("x", x, "N", &["I"])?;
    dims.bind("u", params.u, &["I", "R"])?;
    dims.bind("s", params.s, &["R"])?;
    dims.bind("v", params.v, &["O", "R"])?;
    dims.positive(&["I", "R", "O"])?;
    Ok(dims)
}

fn sizes(dims: &Dims) -> Sizes {
    Sizes { experts: 1, inner: dims.get("I"), outer: dims.get("O"), rank: dims.get("R") }
}
