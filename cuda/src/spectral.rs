//! `spectral`: the equations are in `dormouse_reference::spectral`, how each arm orders them in [`factors`].
//!
//! Arm `fused`: forward is three launches (V and U times s, a, y), and one before them where the factors have a format;
//! backward five (b, dx, x^T b, dy^T a, and all three gradients of the parameters).

use dormouse_reference::spectral::{Config, Grads, Inputs, Outputs, Params, Spectral, bind};
use dormouse_reference::{Dims, FactorFormat, Precision, Result};

use crate::arm::{Arm, Mutant};
use crate::device::Device;
use crate::factors::{self, Factors, Names, Sizes, format};
use crate::matmul::{Plus, Product, matrix, product};
use crate::runtime::Engine;
use crate::tensor::Tensor;

pub(crate) const STEM: &str = "spectral";

const NAMES: Names = Names { stem: STEM, scale: "spectral::scale", finish: "spectral::dparams" };

/// Numbered from 1 in the kernels of [`factors`]; numbers 8 and 14 are planted here, and those between are the faults of
/// [`format`].
pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant::fused("forward-without-s"),
    Mutant::fused("dx-without-s"),
    Mutant::fused("du-without-s"),
    Mutant::fused("dv-without-s"),
    Mutant::fused("ds-times-s"),
    Mutant::fused("ds-misses-last-row"),
    Mutant::fused("null-renamed-local"),
    Mutant::fused("plus-dropped"),
    Mutant::fused("ties-away-from-zero"),
    // A doubled scale moves only what is small beside its column, which hides in the tolerances of tf32 and bf16.
    Mutant { name: "fp8-scale-doubled", arm: Arm::Fused, gate: "meta" },
    Mutant::fused("ternary-mean-misses-last-row"),
    Mutant::fused("ternary-share-dropped"),
    Mutant::fused("null-renamed-element"),
    Mutant::fused("backward-with-masters"),
];

/// The fault of [`format`] that a mutant is.
pub(crate) fn fault(mutant: u32) -> u32 {
    if (9..=13).contains(&mutant) { mutant - 8 } else { 0 }
}

/// What `forward` hands to `backward`.
pub struct Saved {
    x: Tensor,
    /// The masters.
    params: Params<Tensor>,
    /// The same with U and V as their format has them.
    used: Params<Tensor>,
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

impl SavedArm {
    fn arm(&self) -> Arm {
        match self {
            SavedArm::Plain(_) => Arm::Plain,
            SavedArm::Fused { .. } => Arm::Fused,
        }
    }
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
        let arm = self.forward_arm(STEM);
        let used = rounded(self, arm, config.format, &params)?;
        let maps = factors_of(&used);
        let arm = match arm {
            Arm::Plain => {
                let x = matrix(x, sizes.inner);
                SavedArm::Plain(factors::plain::forward(self, OP, x, &maps, &sizes, rows, config.precision, &y)?)
            }
            Arm::Fused => {
                let scaled = self.once((NAMES.scale, 0), &[maps.u, maps.s, maps.v], || {
                    let us = self.float_scratch(params.u.shape())?;
                    let vs = factors::fused::scale(self, &NAMES, &maps, &sizes, None, &us)?;
                    Ok(vec![us, vs])
                })?;
                let [us, vs] = <[Tensor; 2]>::try_from(scaled).expect("U and V");
                let a = self.float_scratch(&[rows, sizes.rank])?;
                let for_a = Product {
                    name: "spectral::a",
                    batch: 1,
                    m: rows,
                    k: sizes.inner,
                    n: sizes.rank,
                    a: matrix(x, sizes.inner).plain(),
                    b: matrix(maps.u, sizes.rank).plain(),
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
        Ok((Outputs { y }, Saved { x: x.clone(), params: params.map(|_, p| p.clone()), used, arm }))
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
        let Saved { x, params, used, arm } = saved;
        let dy = upstream.y;
        let mut dims = bind(OP, x.shape(), params.as_ref().map(|_, p| p.shape()))?;
        dims.bind_rows("y", dy.shape(), "N", &["O"])?;
        dims.bind("u", into.u.shape(), &["I", "R"])?;
        dims.bind("s", into.s.shape(), &["R"])?;
        dims.bind("v", into.v.shape(), &["O", "R"])?;
        let mut reads = vec![("x", x), ("y", dy)];
        reads.extend(params.as_ref().named());
        reads.extend([("saved.u", &used.u), ("saved.v", &used.v)]);
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
            maps: factors_of(if self.mutant_of(STEM, arm.arm()) == 14 { params } else { used }),
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

/// The parameters with U and V as their format has them.
fn rounded<R: Engine>(
    device: &Device<R>,
    arm: Arm,
    format: FactorFormat,
    params: &Params<&Tensor>,
) -> Result<Params<Tensor>> {
    let fault = fault(device.mutant_of(STEM, arm));
    let mut factors = format::rounded(device, arm, "spectral::round", format, &[params.u, params.v], fault)?;
    let (v, u) = (factors.pop(), factors.pop());
    Ok(Params { u: u.expect("two of two"), s: params.s.clone(), v: v.expect("two of two") })
}

fn factors_of(params: &Params<Tensor>) -> Factors<'_> {
    Factors { u: &params.u, s: &params.s, v: &params.v }
}

fn sizes(dims: &Dims) -> Sizes {
    Sizes { experts: 1, inner: dims.get("I"), outer: dims.get("O"), rank: dims.get("R") }
}
