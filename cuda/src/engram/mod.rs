//! `engram`: the equations are in `dormouse_reference::engram`.
//!
//! Saved: handles of what went in, what was looked up and projected, and three numbers a position: the scales of key
//! and query, and the score. The gate and its slope come from the score again.
//!
//! The four products of backward take every precision, in both arms. The two of forward are f32 always, since what they
//! give ends in one number a position, the gate or its gradient, that scales the whole of it. The slope of the signed
//! root is steepest at a score of zero, where it enlarges an error of the score by 1 / (2 gate_eps), 50 in the model
//! (docs/adr/0014). Everything else is f32.
//!
//! The gradient of the table is summed row by row in the order that the caller gives, so nothing is atomic and rows
//! that no place names are not touched.
//!
//! The host looks at neither rows nor order. A row that is not of the table gives NaN, so that the loss of its step is
//! not finite and the step is refused; its gradient goes to the last row. No memory outside the tensors is touched.

mod fused;
mod plain;

use cubecl::prelude::*;
use dormouse_reference::engram::{Config, Engram, Grads, Inputs, Outputs, Params, bind, bind_params, check_config};
use dormouse_reference::{Dims, Error, Precision, Result};

use crate::arm::{Arm, Mutant};
use crate::device::Device;
use crate::embedding::check_ids;
use crate::matmul::{Plus, Product, matrix, product};
use crate::runtime::Engine;
use crate::sigmoid::sigmoids;
use crate::tensor::{Tensor, Words};

const STEM: &str = "engram";

/// Numbered from 1 in the kernels; 13 is planted in how a product is asked for.
pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant::fused("next-row"),
    Mutant::fused("key-norm-misses-last-column"),
    Mutant::fused("null-renamed-local"),
    Mutant::fused("score-without-root"),
    Mutant::fused("query-norm-is-constant"),
    Mutant::fused("key-norm-is-constant"),
    Mutant::fused("plus-dropped"),
    Mutant::fused("slope-of-gate-is-gate"),
    Mutant::fused("value-gradient-without-gate"),
    Mutant::fused("last-place-of-a-run-missed"),
    Mutant::fused("run-begun-before-dropped"),
    Mutant::fused("run-that-goes-on-misses-its-start"),
    Mutant::fused("table-not-through-value"),
];

/// Numbers that forward keeps of a position: rk, rq and s.
const FIT: usize = 3;

/// What `forward` hands to `backward`.
pub struct Saved {
    inputs: Inputs<Tensor>,
    params: Params<Tensor>,
    /// `[N, O W]`, what was looked up.
    e: Tensor,
    /// `[N, D]`, what was projected.
    key: Tensor,
    value: Tensor,
    /// `[N, FIT]`
    fit: Tensor,
    arm: Arm,
}

#[derive(Clone, Copy)]
struct Sizes {
    /// N, positions.
    positions: usize,
    /// D.
    width: usize,
    /// O.
    orders: usize,
    /// R, rows of the table.
    rows: usize,
    /// W.
    row_width: usize,
    eps: f32,
    gate_eps: f32,
    precision: Precision,
}

impl Sizes {
    fn new(config: &Config, dims: &Dims) -> Self {
        Self {
            positions: dims.get("N"),
            width: dims.get("D"),
            orders: dims.get("O"),
            rows: dims.get("R"),
            row_width: dims.get("W"),
            eps: config.eps as f32,
            gate_eps: config.gate_eps as f32,
            precision: config.precision,
        }
    }

    /// O W.
    fn inputs(&self) -> usize {
        self.orders * self.row_width
    }

    /// N O.
    fn places(&self) -> usize {
        self.positions * self.orders
    }
}

/// The look-up, checked.
struct Gather<'a> {
    rows: &'a Tensor,
    table: &'a Tensor,
    e: &'a Tensor,
    sizes: Sizes,
}

/// What comes behind the products of forward.
struct Mix<'a> {
    c: &'a Tensor,
    key: &'a Tensor,
    value: &'a Tensor,
    m: &'a Tensor,
    fit: &'a Tensor,
    sizes: Sizes,
}

/// What comes before the products of backward.
struct Unmix<'a> {
    saved: &'a Saved,
    dm: &'a Tensor,
    plus: Option<&'a Tensor>,
    dc: &'a Tensor,
    dkey: &'a Tensor,
    dvalue: &'a Tensor,
    sizes: Sizes,
}

/// The sums by rows at the end of backward.
struct Scatter<'a> {
    rows: &'a Tensor,
    order: &'a Tensor,
    /// `[N, O W]`, one row of W numbers a place.
    de: &'a Tensor,
    dtable: &'a Tensor,
    sizes: Sizes,
}

/// The row of the table that a place names, or the last one where it names none.
#[cube]
fn row_of(rows: &Words, place: usize, len: u32) -> u32 {
    let mut row = rows.at(place);
    if row >= len {
        row = len - 1;
    }
    row
}

/// The place that stands at `k` in the order, or the last one where none does.
#[cube]
fn place_at(order: &Words, k: usize, places: u32) -> u32 {
    let mut place = order.at(k);
    if place >= places {
        place = places - 1;
    }
    place
}

/// The gate of a score, what it lacks to 1, and r, the root in which the score is signed.
#[cube]
fn gate_of(score: f32, gate_eps: f32) -> (f32, f32, f32) {
    let root = (score.abs() + gate_eps).sqrt();
    let (open, shut) = sigmoids(score / (root + gate_eps.sqrt()));
    (open, shut, root)
}

impl<R: Engine> Engram for Device<R> {
    type Saved = Saved;

    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Tensor>,
        params: Params<&Tensor>,
    ) -> Result<(Outputs<Tensor>, Saved)> {
        const OP: &str = "engram::forward";
        check_config(OP, config)?;
        let dims = bind(OP, inputs.clone().map(|_, x| x.shape()), params.clone().map(|_, x| x.shape()))?;
        self.check_floats(OP, &[("c", inputs.c)])?;
        check_ids(self, OP, "rows", inputs.rows)?;
        if let Some(order) = inputs.order {
            check_ids(self, OP, "order", order)?;
        }
        self.check_floats(OP, &params.clone().named())?;
        let sizes = Sizes::new(config, &dims);
        let positions = sizes.positions;
        let arm = self.forward_arm(STEM);
        let looked_up = || self.engram_look_up(arm, inputs.rows, &params, sizes);
        // Every iteration of a block names the same rows.
        let of = [inputs.rows, params.table, params.key, params.value];
        let found = match arm {
            Arm::Plain => looked_up()?,
            Arm::Fused => self.once(("engram", 0), &of, looked_up)?,
        };
        let [e, key, value] = <[Tensor; 3]>::try_from(found).expect("a look-up gives three");
        let (m, fit) = (self.float_scratch(inputs.c.shape())?, self.float_scratch(&[positions, FIT])?);
        let mix = Mix { c: inputs.c, key: &key, value: &value, m: &m, fit: &fit, sizes };
        match arm {
            Arm::Plain => plain::mix(self, &mix)?,
            Arm::Fused => fused::mix(self, &mix)?,
        }
        let (inputs, params) = (inputs.map(|_, x| x.clone()), params.map(|_, x| x.clone()));
        Ok((Outputs { m }, Saved { inputs, params, e, key, value, fit, arm }))
    }

    fn backward(
        &self,
        config: &Config,
        saved: &Saved,
        upstream: Outputs<&Tensor>,
        plus: Option<&Tensor>,
        into: Params<&Tensor>,
    ) -> Result<Grads<Tensor>> {
        const OP: &str = "engram::backward";
        check_config(OP, config)?;
        let Saved { inputs, params, e, key, value, fit, arm } = saved;
        let Some(order) = &inputs.order else {
            return Err(Error::Presence {
                op: OP,
                arg: "order",
                expected: "present because the table's gradient is summed in its order",
                got: "absent",
            });
        };
        let mut dims = bind(OP, inputs.as_ref().map(|_, x| x.shape()), params.as_ref().map(|_, x| x.shape()))?;
        dims.bind_rows("m", upstream.m.shape(), "N", &["D"])?;
        bind_params(&mut dims, into.clone().map(|_, x| x.shape()))?;
        let mut reads =
            vec![("c", &inputs.c), ("m", upstream.m), ("e", e), ("key", key), ("value", value), ("fit", fit)];
        // The table itself is not read on the way back.
        reads.extend([("key", &params.key), ("value", &params.value)]);
        if let Some(plus) = plus {
            dims.bind_rows("plus", plus.shape(), "N", &["D"])?;
            reads.push(("plus", plus));
        }
        self.check_floats(OP, &reads)?;
        for (arg, ids) in [("rows", &inputs.rows), ("order", order)] {
            check_ids(self, OP, arg, ids)?;
            reads.push((arg, ids));
        }
        for (arg, tensor) in into.clone().named() {
            self.check_into(OP, arg, tensor, &reads)?;
        }
        self.note_backward(STEM, *arm);
        let dc = self.float_scratch(inputs.c.shape())?;
        let sizes = Sizes::new(config, &dims);
        if sizes.positions > 0 {
            let call = Unmix {
                saved,
                dm: upstream.m,
                plus,
                dc: &dc,
                dkey: &self.float_scratch(key.shape())?,
                dvalue: &self.float_scratch(value.shape())?,
                sizes,
            };
            self.engram_backward(&call, order, &into)?;
        }
        // No positions add nothing.
        Ok(Grads { dc })
    }
}

impl<R: Engine> Device<R> {
    /// e and its two projections, key and value.
    fn engram_look_up(&self, arm: Arm, rows: &Tensor, params: &Params<&Tensor>, sizes: Sizes) -> Result<Vec<Tensor>> {
        let Sizes { positions, width, .. } = sizes;
        let e = self.float_scratch(&[positions, sizes.inputs()])?;
        let [key, value] = [self.float_scratch(&[positions, width])?, self.float_scratch(&[positions, width])?];
        let gather = Gather { rows, table: params.table, e: &e, sizes };
        match arm {
            Arm::Plain => plain::gather(self, &gather)?,
            Arm::Fused => fused::gather(self, &gather)?,
        }
        for (name, weight, out) in [("engram::key", params.key, &key), ("engram::value", params.value, &value)] {
            let projection = Product {
                name,
                batch: 1,
                m: positions,
                k: sizes.inputs(),
                n: width,
                a: matrix(&e, sizes.inputs()).plain(),
                b: matrix(weight, width).plain(),
                plus: Plus::Nothing,
                out: matrix(out, width),
                precision: Precision::Full,
            };
            product(self, arm, &projection)?;
        }
        Ok(vec![e, key, value])
    }

    /// The gradients of c and of the projections, and from these those of the weights and of the table.
    fn engram_backward(&self, call: &Unmix<'_>, order: &Tensor, into: &Params<&Tensor>) -> Result<()> {
        let Unmix { saved, dkey, dvalue, sizes, .. } = *call;
        let Saved { inputs, params, e, arm, .. } = saved;
        let Sizes { positions, width, precision, .. } = sizes;
        match arm {
            Arm::Plain => plain::unmix(self, call)?,
            Arm::Fused => fused::unmix(self, call)?,
        }
        let de = self.float_scratch(e.shape())?;
        let projections = [
            ("engram::dweight", &params.key, dkey, into.key, Plus::Nothing),
            ("engram::dweight", &params.value, dvalue, into.value, Plus::Destination),
        ];
        for (name, weight, grad, into, plus) in projections {
            let for_weight = Product {
                name,
                batch: 1,
                m: sizes.inputs(),
                k: positions,
                n: width,
                a: matrix(e, sizes.inputs()).transposed(),
                b: matrix(grad, width).plain(),
                plus: Plus::Destination,
                out: matrix(into, width),
                precision,
            };
            product(self, *arm, &for_weight)?;
            if self.mutant_of(STEM, *arm) == 13 && matches!(plus, Plus::Destination) {
                continue;
            }
            // What the key sends back lies there when the value's is added.
            let for_rows = Product {
                name: "engram::de",
                m: positions,
                k: width,
                n: sizes.inputs(),
                a: matrix(grad, width).plain(),
                b: matrix(weight, width).transposed(),
                plus,
                out: matrix(&de, sizes.inputs()),
                ..for_weight
            };
            product(self, *arm, &for_rows)?;
        }
        let scatter = Scatter { rows: &inputs.rows, order, de: &de, dtable: into.table, sizes };
        match arm {
            Arm::Plain => plain::scatter(self, &scatter),
            Arm::Fused => fused::scatter(self, &scatter),
        }
    }
}
