//! `controller`: the equations are in `dormouse_reference::controller`.
//!
//! The products have three columns and one an expert, so they are bound by the bytes of c and x0 and f32 costs nothing:
//! every precision is accepted, and none rounds here in arm `fused`.
//!
//! Saved: raw, from which sigma(-raw) keeps its digits where 1 - sigma(raw) has none, and the gates.

mod fused;
mod plain;

use cubecl::prelude::*;
use dormouse_reference::controller::{
    Config, Controller, FIXED_GATES, Grads, Inputs, Outputs, Params, bind_weight, check_config,
};
use dormouse_reference::{Dims, Precision, Result};

use crate::arm::{Arm, Mutant};
use crate::device::Device;
use crate::runtime::Engine;
use crate::tensor::Tensor;

const STEM: &str = "controller";

/// Numbered from 1 in the kernels.
pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant::fused("embedding-dropped"),
    Mutant::fused("softmax-not-normalised"),
    Mutant::fused("third-gate-without-sigmoid"),
    Mutant::fused("sigmoid-slope-dropped"),
    Mutant::fused("softmax-mean-dropped"),
    Mutant::fused("plus-dropped"),
    Mutant::fused("dx0-from-the-first-half"),
    Mutant::fused("dweight-misses-last-row"),
    Mutant::fused("null-renamed-local"),
];

/// What `forward` hands to `backward`.
pub struct Saved {
    c: Tensor,
    x0: Tensor,
    weight: Tensor,
    /// `[N, 3+E]`
    raw: Tensor,
    gates: Tensor,
    arm: Arm,
}

/// One forward call, checked.
struct Forward<'a> {
    c: &'a Tensor,
    x0: &'a Tensor,
    weight: &'a Tensor,
    raw: &'a Tensor,
    gates: &'a Tensor,
    sizes: Sizes,
}

/// One backward call, checked.
struct Backward<'a> {
    saved: &'a Saved,
    dgates: &'a Tensor,
    plus: Inputs<Option<&'a Tensor>>,
    dweight: &'a Tensor,
    dc: &'a Tensor,
    dx0: &'a Tensor,
    sizes: Sizes,
}

#[derive(Clone, Copy)]
struct Sizes {
    rows: usize,
    width: usize,
    /// 3 + E.
    gates: usize,
    precision: Precision,
}

impl<R: Engine> Controller for Device<R> {
    type Saved = Saved;

    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Tensor>,
        params: Params<&Tensor>,
    ) -> Result<(Outputs<Tensor>, Saved)> {
        const OP: &str = "controller::forward";
        check_config(OP, config)?;
        let Inputs { c, x0 } = inputs;
        let weight = params.weight;
        let mut dims = Dims::new(OP);
        dims.bind_rows("c", c.shape(), "N", &["D"])?;
        dims.bind_rows("x0", x0.shape(), "N", &["D"])?;
        dims.positive(&["D"])?;
        bind_weight(&mut dims, config, weight.shape())?;
        self.check_floats(OP, &[("c", c), ("x0", x0), ("weight", weight)])?;
        let sizes = sizes(&dims, config);
        let mut shape = c.shape().to_vec();
        *shape.last_mut().expect("bind_rows refuses a shape without axes") = sizes.gates;
        let raw = self.float_scratch(&[sizes.rows, sizes.gates])?;
        let gates = self.float_scratch(&shape)?;
        let call = Forward { c, x0, weight, raw: &raw, gates: &gates, sizes };
        let arm = self.forward_arm(STEM);
        match arm {
            Arm::Plain => plain::forward(self, &call)?,
            Arm::Fused => fused::forward(self, &call)?,
        }
        let saved = Saved { c: c.clone(), x0: x0.clone(), weight: weight.clone(), raw, gates: gates.clone(), arm };
        Ok((Outputs { gates }, saved))
    }

    fn backward(
        &self,
        config: &Config,
        saved: &Saved,
        upstream: Outputs<&Tensor>,
        plus: Inputs<Option<&Tensor>>,
        into: Params<&Tensor>,
    ) -> Result<Grads<Tensor>> {
        const OP: &str = "controller::backward";
        check_config(OP, config)?;
        let Saved { c, x0, weight, raw, gates, arm } = saved;
        let dgates = upstream.gates;
        let mut dims = Dims::new(OP);
        dims.bind_rows("c", c.shape(), "N", &["D"])?;
        bind_weight(&mut dims, config, weight.shape())?;
        bind_weight(&mut dims, config, into.weight.shape())?;
        dims.bind_rows("gates", dgates.shape(), "N", &["3+E"])?;
        let mut reads =
            vec![("c", c), ("x0", x0), ("weight", weight), ("raw", raw), ("saved.gates", gates), ("gates", dgates)];
        for (arg, plus) in [("plus.c", plus.c), ("plus.x0", plus.x0)] {
            if let Some(plus) = plus {
                dims.bind_rows(arg, plus.shape(), "N", &["D"])?;
                reads.push((arg, plus));
            }
        }
        self.check_floats(OP, &reads)?;
        self.check_into(OP, "weight", into.weight, &reads)?;
        let sizes = sizes(&dims, config);
        let (dc, dx0) = (self.float_scratch(c.shape())?, self.float_scratch(x0.shape())?);
        self.note_backward(STEM, *arm);
        if sizes.rows > 0 {
            let call = Backward { saved, dgates, plus, dweight: into.weight, dc: &dc, dx0: &dx0, sizes };
            match arm {
                Arm::Plain => plain::backward(self, &call)?,
                Arm::Fused => fused::backward(self, &call)?,
            }
        }
        Ok(Grads { dc, dx0 })
    }
}

/// The logistic function without overflow at either end.
#[cube]
pub(crate) fn sigmoid(x: f32) -> f32 {
    let mut y = x;
    if x > 0.0f32 {
        y = -x;
    }
    // y is not positive, so the exponential is at most 1.
    let e = y.exp();
    let mut numerator = e;
    if x > 0.0f32 {
        numerator = 1.0f32;
    }
    numerator / (1.0f32 + e)
}

fn sizes(dims: &Dims, config: &Config) -> Sizes {
    Sizes { rows: dims.get("N"), width: dims.get("D"), gates: dims.get("3+E"), precision: config.precision }
}
