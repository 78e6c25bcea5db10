//! `layer_norm`: the equations are in `dormouse_reference::layer_norm`.
//!
//! A row is centred in two steps: first its own first element is taken off, then the mean of what is left. The first
//! step makes a constant row zero to the bit whatever its width, and keeps the digits of a row whose mean is large.
//!
//! Saved: the input, and two numbers a row, so that backward has n without having stored it.

mod fused;
mod plain;

use cubecl::prelude::*;
use dormouse_reference::layer_norm::{
    Config, Grads, Inputs, LayerNorm, Outputs, Params, check_backward, check_forward,
};
use dormouse_reference::{Dims, Result};

use crate::arm::{Arm, Mutant};
use crate::device::Device;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor};

pub(crate) use fused::{statistics, steps};

const STEM: &str = "layer_norm";

/// Numbered from 1 in the kernels.
pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant::fused("eps-dropped"),
    Mutant::fused("mean-dropped"),
    Mutant::fused("last-column-missed"),
    Mutant::fused("null-renamed-local"),
    Mutant::fused("gain-dropped-in-backward"),
    Mutant::fused("mean-is-constant"),
    Mutant::fused("deviation-is-constant"),
    Mutant::fused("plus-dropped"),
    Mutant::fused("last-row-of-a-block-missed"),
    Mutant::fused("bias-gets-h"),
];

/// Numbers that forward keeps of a row: the mean of the row less its first element, and rho.
pub(crate) const STATS: usize = 2;

/// What `forward` hands to `backward`.
pub struct Saved {
    x: Tensor,
    gain: Option<Tensor>,
    /// `[N, STATS]`
    stats: Tensor,
    arm: Arm,
}

/// One forward call, checked.
struct Forward<'a> {
    x: &'a Tensor,
    /// Gain and bias.
    affine: Option<[&'a Tensor; 2]>,
    y: &'a Tensor,
    stats: &'a Tensor,
    rows: usize,
    width: usize,
    eps: f32,
}

/// One backward call, checked.
struct Backward<'a> {
    dy: &'a Tensor,
    plus: Option<&'a Tensor>,
    dx: &'a Tensor,
    /// Where the gradients of gain and bias are added.
    into: Option<[&'a Tensor; 2]>,
    rows: usize,
    width: usize,
}

/// n at column `d` of row `n`, from what forward kept of the row.
#[cube]
pub(crate) fn normalised(x: &Floats, stats: &Floats, n: usize, d: usize, width: usize) -> f32 {
    let at = n * comptime!(STATS);
    stats.at(at + 1) * ((x.at(n * width + d) - x.at(n * width)) - stats.at(at))
}

impl<R: Engine> LayerNorm for Device<R> {
    type Saved = Saved;

    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Tensor>,
        params: Params<&Tensor>,
    ) -> Result<(Outputs<Tensor>, Saved)> {
        const OP: &str = "layer_norm::forward";
        let shapes = params.clone().map(|_, t| t.shape());
        let dims = check_forward(config, inputs.clone().map(|_, t| t.shape()), shapes)?;
        self.check_floats(OP, &[inputs.clone().named(), params.clone().named()].concat())?;
        let (x, (rows, width)) = (inputs.x, sizes(&dims));
        let (y, stats) = (self.float_scratch(x.shape())?, self.float_scratch(&[rows, STATS])?);
        let affine = pair(&params);
        let call = Forward { x, affine, y: &y, stats: &stats, rows, width, eps: config.eps as f32 };
        let arm = self.forward_arm(STEM);
        match arm {
            Arm::Plain => plain::forward(self, &call)?,
            Arm::Fused => fused::forward(self, &call)?,
        }
        Ok((Outputs { y }, Saved { x: x.clone(), gain: params.gain.cloned(), stats, arm }))
    }

    fn backward(
        &self,
        config: &Config,
        saved: &Saved,
        upstream: Outputs<&Tensor>,
        plus: Option<&Tensor>,
        into: Params<&Tensor>,
    ) -> Result<Grads<Tensor>> {
        const OP: &str = "layer_norm::backward";
        let (x, dy) = (&saved.x, upstream.y);
        let shapes = into.clone().map(|_, t| t.shape());
        let of_plus = plus.map(|plus| plus.shape());
        let dims = check_backward(config, x.shape(), saved.gain.is_some(), dy.shape(), of_plus, shapes)?;
        let mut reads = vec![("x", x), ("stats", &saved.stats), ("y", dy)];
        reads.extend(saved.gain.iter().map(|gain| ("gain", gain)));
        reads.extend(plus.map(|plus| ("plus", plus)));
        self.check_floats(OP, &reads)?;
        for (arg, destination) in into.clone().named() {
            self.check_into(OP, arg, destination, &reads)?;
        }
        let (rows, width) = sizes(&dims);
        let dx = self.float_scratch(x.shape())?;
        let call = Backward { dy, plus, dx: &dx, into: pair(&into), rows, width };
        self.note_backward(STEM, saved.arm);
        match saved.arm {
            Arm::Plain => plain::backward(self, saved, &call)?,
            Arm::Fused => fused::backward(self, saved, &call)?,
        }
        Ok(Grads { dx })
    }
}

/// N and D.
fn sizes(dims: &Dims) -> (usize, usize) {
    (dims.get("N"), dims.get("D"))
}

/// Gain and bias, of which there are both or neither.
fn pair<'a>(params: &Params<&'a Tensor>) -> Option<[&'a Tensor; 2]> {
    Some([params.gain?, params.bias?])
}
