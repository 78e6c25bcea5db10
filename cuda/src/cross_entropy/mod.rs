//! `cross_entropy`: the equations are in `dormouse_reference::cross_entropy`.
//!
//! Saved: the inputs; three numbers a row, so that backward is one pass over the logits; and one over the number of
//! positions that the mask keeps, which only the device knows.
//!
//! The host does not look at targets. A kept position whose target is not below C has an nll and a gradient of NaN, so
//! that the loss of its step is not finite and the step is refused. No memory outside the tensors is touched.

mod fused;
mod plain;

use cubecl::prelude::*;
use dormouse_reference::cross_entropy::{Config, CrossEntropy, Grads, Inputs, Outputs};
use dormouse_reference::{Dims, Error, Result, check_one};

use crate::arm::{Arm, Mutant};
use crate::device::Device;
use crate::embedding::check_ids;
use crate::mask;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor};

const STEM: &str = "cross_entropy";

/// Numbered from 1 in the kernels.
pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant::fused("rest-with-target"),
    Mutant::fused("last-class-missed"),
    Mutant::fused("null-renamed-local"),
    Mutant::fused("mean-over-masked-too"),
    Mutant::fused("last-block-missed"),
    Mutant::fused("target-not-subtracted"),
    Mutant::fused("gradient-without-mean"),
    Mutant::fused("upstream-ignored"),
];

/// Numbers that forward keeps of a row: the maximum; 1 / S, which is zero where the row is masked; and rest / S.
const STATS: usize = 3;

/// What `forward` hands to `backward`.
pub struct Saved {
    logits: Tensor,
    targets: Tensor,
    stats: Tensor,
    /// `[1]`, one over the number of kept positions, or 0.
    share: Tensor,
    arm: Arm,
}

/// One forward call, checked.
struct Forward<'a> {
    logits: &'a Tensor,
    targets: &'a Tensor,
    mask: Option<&'a Tensor>,
    /// A number of [`mask`].
    mask_kind: u32,
    rows: usize,
    classes: usize,
    given: Option<f32>,
    /// Outputs: `[1]`, `[rows]`, `[rows, STATS]` and `[1]`.
    loss: &'a Tensor,
    nll: &'a Tensor,
    stats: &'a Tensor,
    share: &'a Tensor,
}

/// One backward call, checked.
struct Backward<'a> {
    dloss: &'a Tensor,
    dlogits: &'a Tensor,
    rows: usize,
    classes: usize,
    given: Option<f32>,
}

/// e^d for d <= 0. Below -87 it would not be a normal number, and some devices do not come down to zero there.
#[cube]
fn exp(d: f32) -> f32 {
    let mut e = d.exp();
    if d < -87.0f32 {
        e = 0.0f32;
    }
    e
}

/// ln(1 + x) for 0 <= x < 1 by the series of 2 artanh(s), s = x / (2 + x): all digits for any x, on any device. The
/// first term left out is s^16 / 17 of the result, below 2e-9.
#[cube]
fn ln_1p(x: f32) -> f32 {
    let s = x / (2.0f32 + x);
    let q = s * s;
    let mut sum = 0.0f32;
    #[unroll]
    for term in 0..8u32 {
        // One over 15, 13 .. 1.
        sum = sum * q + comptime!(1.0f32 / (15 - 2 * term) as f32);
    }
    2.0f32 * s * sum
}

/// ln(e^shifted + rest) - shifted, in the form that keeps its digits when the target is likely.
#[cube]
fn nll_of(shifted: f32, rest: f32) -> f32 {
    let target = exp(shifted);
    let mut nll = (target + rest).ln() - shifted;
    if target > rest {
        nll = ln_1p(rest / target);
    }
    nll
}

/// Writes what is kept of a row: nothing but zeros of a masked one, NaN of one whose target is no class.
#[cube]
fn finish_row(
    logits: &Floats,
    nll: &mut Floats,
    stats: &mut Floats,
    n: usize,
    classes: usize,
    target: usize,
    kept: bool,
    max: f32,
    rest: f32,
    nan: f32,
) -> f32 {
    let mut value = 0.0f32;
    let mut inverse = 0.0f32;
    let mut rest_share = 0.0f32;
    if kept {
        value = nan;
        inverse = nan;
        if target < classes {
            let shifted = logits.at(n * classes + target) - max;
            value = nll_of(shifted, rest);
            inverse = 1.0f32 / (exp(shifted) + rest);
        }
        rest_share = rest * inverse;
    }
    nll.set(n, value);
    stats.set(n * comptime!(STATS), max);
    stats.set(n * comptime!(STATS) + 1, inverse);
    stats.set(n * comptime!(STATS) + 2, rest_share);
    value
}

/// The gradient of one logit for `scale` = dloss / n. A masked row's is zero whatever the logit is.
#[cube]
fn dlogit(z: f32, max: f32, inverse: f32, rest_share: f32, is_target: bool, scale: f32) -> f32 {
    let mut value = scale * inverse * exp(z - max);
    if is_target {
        value = -scale * rest_share;
    }
    if inverse == 0.0f32 {
        value = 0.0f32;
    }
    value
}

impl<R: Engine> CrossEntropy for Device<R> {
    type Saved = Saved;

    fn forward(&self, config: &Config, inputs: Inputs<&Tensor>) -> Result<(Outputs<Tensor>, Saved)> {
        const OP: &str = "cross_entropy::forward";
        let Inputs { logits, targets, mask } = inputs;
        let mut dims = Dims::new(OP);
        dims.bind_rows("logits", logits.shape(), "N", &["C"])?;
        dims.positive(&["C"])?;
        dims.bind_rows("targets", targets.shape(), "N", &[])?;
        if let Some(mask) = mask {
            dims.bind_rows("mask", mask.shape(), "N", &[])?;
            self.check_life(OP, "mask", mask)?;
        }
        let mask_kind = mask.map_or(mask::NONE, mask::kind);
        check_ids(self, OP, "targets", targets)?;
        self.check_floats(OP, &[("logits", logits)])?;
        let (rows, classes) = (dims.get("N"), dims.get("C"));
        let (_, positions) = logits.shape().split_last().expect("bind_rows found the axis C");
        let [loss, share] = [self.float_scratch(&[1])?, self.float_scratch(&[1])?];
        let nll = self.float_scratch(positions)?;
        let stats = self.float_scratch(&[rows, STATS])?;
        let given = config.denominator.map(share_of);
        let arm = self.forward_arm(STEM);
        let (loss_, nll_, stats_, share_) = (&loss, &nll, &stats, &share);
        let call = Forward {
            logits,
            targets,
            mask,
            mask_kind,
            rows,
            classes,
            given,
            loss: loss_,
            nll: nll_,
            stats: stats_,
            share: share_,
        };
        match arm {
            Arm::Plain => plain::forward(self, &call)?,
            Arm::Fused => fused::forward(self, &call)?,
        }
        let saved = Saved { logits: logits.clone(), targets: targets.clone(), stats, share, arm };
        Ok((Outputs { loss, nll: Some(nll) }, saved))
    }

    fn backward(&self, config: &Config, saved: &Saved, upstream: Outputs<&Tensor>) -> Result<Grads<Tensor>> {
        const OP: &str = "cross_entropy::backward";
        if upstream.nll.is_some() {
            let expected = "absent because only `loss` is differentiated";
            return Err(Error::Presence { op: OP, arg: "nll", expected, got: "present" });
        }
        let (Saved { logits, targets, stats, share, arm }, dloss) = (saved, upstream.loss);
        check_ids(self, OP, "targets", targets)?;
        self.check_floats(OP, &[("logits", logits), ("stats", stats), ("share", share), ("loss", dloss)])?;
        check_one(OP, "loss", dloss.shape())?;
        let (rows, classes) = (targets.len(), logits.shape()[logits.shape().len() - 1]);
        let dlogits = self.float_scratch(logits.shape())?;
        let given = config.denominator.map(share_of);
        let call = Backward { dloss, dlogits: &dlogits, rows, classes, given };
        self.note_backward(STEM, *arm);
        match arm {
            Arm::Plain => plain::backward(self, saved, &call)?,
            Arm::Fused => fused::backward(self, saved, &call)?,
        }
        Ok(Grads { dlogits })
    }
}

/// 1 / n, or 0 where n = 0.
fn share_of(n: usize) -> f32 {
    if n == 0 { 0.0 } else { (1.0 / n as f64) as f32 }
}
