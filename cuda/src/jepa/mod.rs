//! `jepa`: the equations are in `dormouse_reference::jepa`.
//!
//! Saved: the inputs; two numbers for each of the teacher's rows, so that backward has the target without having stored
//! it; and one over the number of masked elements, which only the device knows. Backward forms the difference as forward
//! did, and reads nothing of positions that are not masked.

mod fused;
mod plain;

use cubecl::prelude::*;
use dormouse_reference::jepa::{Config, Grads, Inputs, Jepa, Outputs, check_backward, check_forward};
use dormouse_reference::{Result, Tensors};

use crate::arm::{Arm, Mutant};
use crate::device::Device;
use crate::layer_norm::STATS;
use crate::runtime::Engine;
use crate::tensor::Tensor;

const STEM: &str = "jepa";

/// Numbered from 1 in the kernels.
pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant::fused("teacher-not-normalised"),
    Mutant::fused("last-column-missed"),
    Mutant::fused("null-renamed-local"),
    Mutant::fused("mean-over-all-positions"),
    Mutant::fused("last-row-missed"),
    Mutant::fused("sign-flipped"),
    Mutant::fused("upstream-ignored"),
    Mutant { name: "slope-one-at-the-kink", arm: Arm::Fused, gate: "meta" },
    Mutant { name: "rows-not-masked-are-read", arm: Arm::Fused, gate: "meta" },
];

/// What `forward` hands to `backward`.
pub struct Saved {
    prediction: Tensor,
    teacher: Tensor,
    mask: Tensor,
    /// `[N, STATS]`; not written where the position is not masked.
    stats: Tensor,
    /// `[1]`, one over the number of masked elements, or 0.
    share: Tensor,
    arm: Arm,
}

/// One forward call, checked; there are rows.
struct Forward<'a> {
    inputs: &'a Inputs<&'a Tensor>,
    /// Outputs: `[1]`, `[N, STATS]` and `[1]`.
    loss: &'a Tensor,
    stats: &'a Tensor,
    share: &'a Tensor,
    rows: usize,
    width: usize,
    eps: f32,
}

/// The gradient of one masked element for `size` = dloss / (M D).
#[cube]
fn slope(difference: f32, size: f32) -> f32 {
    let mut value = 0.0f32;
    if difference > 0.0f32 {
        value = size;
    }
    if difference < 0.0f32 {
        value = -size;
    }
    value
}

impl<R: Engine> Jepa for Device<R> {
    type Saved = Saved;

    fn forward(&self, config: &Config, inputs: Inputs<&Tensor>) -> Result<(Outputs<Tensor>, Saved)> {
        const OP: &str = "jepa::forward";
        let dims = check_forward(config, inputs.clone().map(|_, t| t.shape()))?;
        let Inputs { prediction, teacher, mask } = inputs;
        self.check_life(OP, "mask", mask)?;
        self.check_floats(OP, &[("prediction", prediction), ("teacher", teacher)])?;
        let (rows, width) = (dims.get("N"), dims.get("D"));
        let [loss, share] = [self.float_scratch(&[1])?, self.float_scratch(&[1])?];
        let stats = self.float_scratch(&[rows, STATS])?;
        let eps = config.eps as f32;
        let call = Forward { inputs: &inputs, loss: &loss, stats: &stats, share: &share, rows, width, eps };
        let arm = self.forward_arm(STEM);
        match arm {
            // A kernel cannot be given tensors without elements.
            _ if rows == 0 => self.fill(&loss, 0.0)?,
            Arm::Plain => plain::forward(self, &call)?,
            Arm::Fused => fused::forward(self, &call)?,
        }
        let [prediction, teacher, mask] = [prediction, teacher, mask].map(Clone::clone);
        Ok((Outputs { loss }, Saved { prediction, teacher, mask, stats, share, arm }))
    }

    fn backward(&self, config: &Config, saved: &Saved, upstream: Outputs<&Tensor>) -> Result<Grads<Tensor>> {
        const OP: &str = "jepa::backward";
        let dloss = upstream.loss;
        check_backward(config, dloss.shape())?;
        let Saved { prediction, teacher, mask, stats, share, arm } = saved;
        self.check_life(OP, "mask", mask)?;
        let reads =
            [("prediction", prediction), ("teacher", teacher), ("stats", stats), ("share", share), ("loss", dloss)];
        self.check_floats(OP, &reads)?;
        let dprediction = self.float_scratch(prediction.shape())?;
        self.note_backward(STEM, *arm);
        match arm {
            Arm::Plain => plain::backward(self, saved, dloss, &dprediction)?,
            Arm::Fused => fused::backward(self, saved, dloss, &dprediction)?,
        }
        Ok(Grads { dprediction })
    }
}
