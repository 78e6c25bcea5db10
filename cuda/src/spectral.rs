//! `spectral`: the equations are in `dormouse_reference::spectral`, how each arm orders them in [`factors`].
//!
//! Arm `fused`: forward is three launches (V and U times s, a, y), backward five (b, dx, x^T b, dy^T a, and all three
//! gradients of the parameters).

use dormouse_reference::spectral::{Config, Grads, Inputs, Outputs, Params, Spectral};
use dormouse_reference::{Dims, Result};

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
        let (rows, sizes) = (dims.get("N"), sizes(&dims));
        let maps = Factors { u: &params.u, s: &params.s, v: &params.v };
        let into = Factors { u: into.u, s: into.s, v: into.v };
        let dx = self.float_scratch(x.shape())?;
        let mut added = plus.map_or(Plus::Nothing, Plus::Matrix);
        match arm {
            SavedArm::Plain(saved) => {
                self.note_backward(STEM, Arm::Plain);
                if rows > 0 {
                    let (x, precision) = (matrix(x, sizes.inner), config.precision);
                    let scaled =
                        factors::plain::backward(self, OP, x, saved, &maps, &sizes, rows, precision, dy, &into)?;
                    factors::plain::into_x(self, OP, &scaled, &maps, &sizes, rows, precision, 0, added, &dx)?;
                }
            }
            SavedArm::Fused { a, us } => {
                self.note_backward(STEM, Arm::Fused);
                if self.mutant(STEM) == 8 {
                    added = Plus::Nothing;
                }
                if rows > 0 {
                    let b = self.float_scratch(a.shape())?;
                    let p = self.float_scratch(maps.u.shape())?;
                    let q = self.float_scratch(maps.v.shape())?;
                    let for_b = Product {
                        name: "spectral::b",
                        batch: 1,
                        m: rows,
                        k: sizes.outer,
                        n: sizes.rank,
                        a: matrix(dy, sizes.outer).plain(),
                        b: matrix(maps.v, sizes.rank).plain(),
                        plus: Plus::Nothing,
                        out: matrix(&b, sizes.rank),
                        precision: config.precision,
                    };
                    product(self, Arm::Fused, &for_b)?;
                    let for_x = Product {
                        name: "spectral::dx",
                        k: sizes.rank,
                        n: sizes.inner,
                        a: matrix(&b, sizes.rank).plain(),
                        b: matrix(us, sizes.rank).transposed(),
                        plus: added,
                        out: matrix(&dx, sizes.inner),
                        ..for_b
                    };
                    product(self, Arm::Fused, &for_x)?;
                    let for_p = Product {
                        name: "spectral::p",
                        m: sizes.inner,
                        k: rows,
                        a: matrix(x, sizes.inner).transposed(),
                        b: matrix(&b, sizes.rank).plain(),
                        out: matrix(&p, sizes.rank),
                        ..for_b
                    };
                    product(self, Arm::Fused, &for_p)?;
                    let for_q = Product {
                        name: "spectral::q",
                        m: sizes.outer,
                        a: matrix(dy, sizes.outer).transposed(),
                        b: matrix(a, sizes.rank).plain(),
                        out: matrix(&q, sizes.rank),
                        ..for_p
                    };
                    product(self, Arm::Fused, &for_q)?;
                    factors::fused::finish(self, &NAMES, &maps, &sizes, None, (&p, &q), &into)?;
                }
            }
        }
        Ok(Grads { dx })
    }
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
