//! The JEPA objective of the model: which bytes a forward pass sees, whose parameters it reads, and what is asked of
//! the latents that come out of it.
//!
//! ```text
//! z    = s_{N-1} of the student on masked bytes            the last iteration's output map, before its norm
//! t    = s_{N-1} of the teacher on all bytes               no gradient
//! P(z) = LayerNorm(z) W_p
//! jepa = masked mean |P(z) - layernorm(t)|                 koleo = -1/2 mean ln(nearest distance of normalised z)
//! loss = mean_n ce_n + w (jepa + 0.1 koleo)
//! ```
//!
//! The gradient of z joins that of the readout as the `plus` of the norm, and koleo's joins both, so nothing only adds.

use dormouse_reference::jepa::{self, Jepa};
use dormouse_reference::koleo::{self, Koleo};
use dormouse_reference::layer_norm::{self, LayerNorm};
use dormouse_reference::linear::Linear;
use dormouse_reference::mask_vector::{self, MaskVector};
use dormouse_reference::{Backend, Result};

use super::ablation::{Ablation, scaled};
use super::{Forward, Model, Views};
use crate::config::JepaMode;
use crate::instruments::Ask;

/// What koleo counts beside the distance to the teacher.
pub const KOLEO_WEIGHT: f64 = 0.1;

/// Operations of the objective without those of the model itself, and without the teacher's.
pub const STEMS: [&str; 4] = ["mask_vector", "layer_norm", "jepa", "koleo"];

const MASK: mask_vector::Config = mask_vector::Config {};

/// The predictor's norm and that of the target. eps is small beside the least variance that a latent has: of a position
/// that holds a mask vector alone, elements of variance 1/d, a map of rank k leaves k/d, 1e-4 in the benchmark model.
const NORM: layer_norm::Config = layer_norm::Config { eps: 1e-5 };

const DISTANCE: jepa::Config = jepa::Config { eps: NORM.eps };

/// 256 rows bound the cost, which is quadratic; `norm_eps` only keeps a row of zeros finite.
const KOLEO: koleo::Config = koleo::Config { limit: 256, norm_eps: 1e-12, eps: 1e-6 };

/// What one forward pass is for.
#[derive(Debug)]
pub enum Pass<'a, T> {
    /// The model on all bytes, read out in every iteration.
    Plain,
    /// The model on masked bytes, read out in every iteration; the loss is over visible positions.
    Shared {
        /// `[B, T]`, 1 where the byte is not seen.
        mask: &'a T,
        /// `[B, T]`, 1 where it is.
        visible: &'a T,
    },
    /// The model on masked bytes, for its latents alone.
    Masked {
        /// `[B, T]`, 1 where the byte is not seen.
        mask: &'a T,
    },
    /// Other parameters on all bytes, for their latents alone; nothing is saved.
    Teacher {
        /// The flat parameters; tables of rows are the model's own.
        params: &'a T,
    },
    /// A planted fault: the teacher on masked bytes, or with what a backward pass would need.
    FaultyTeacher {
        /// The flat parameters.
        params: &'a T,
        /// `[B, T]`, 1 where the byte is not seen.
        mask: Option<&'a T>,
    },
}

// By hand, since both hold references alone: a handle itself need not be `Copy`.
impl<T> Copy for Pass<'_, T> {}

impl<T> Clone for Pass<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Upstream<'_, T> {}

impl<T> Clone for Upstream<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<'a, T> Pass<'a, T> {
    pub(super) fn mask(&self) -> Option<&'a T> {
        match *self {
            Pass::Plain | Pass::Teacher { .. } => None,
            Pass::Shared { mask, .. } | Pass::Masked { mask } => Some(mask),
            Pass::FaultyTeacher { mask, .. } => mask,
        }
    }

    /// Positions that the loss is over, where it is not over all.
    pub(super) fn visible(&self) -> Option<&'a T> {
        if let Pass::Shared { visible, .. } = *self { Some(visible) } else { None }
    }

    /// The parameters that are read instead of the model's.
    pub(super) fn params(&self) -> Option<&'a T> {
        match *self {
            Pass::Teacher { params } | Pass::FaultyTeacher { params, .. } => Some(params),
            Pass::Plain | Pass::Shared { .. } | Pass::Masked { .. } => None,
        }
    }

    /// Whether every iteration is read out to logits.
    pub(super) fn reads_out(&self) -> bool {
        matches!(self, Pass::Plain | Pass::Shared { .. })
    }

    /// Whether the last iteration's latents are wanted.
    pub(super) fn has_latents(&self) -> bool {
        !matches!(self, Pass::Plain)
    }

    /// Whether a backward pass may follow.
    pub(super) fn saves(&self) -> bool {
        !matches!(self, Pass::Teacher { .. })
    }

    pub(super) fn stage(&self) -> &'static str {
        if self.params().is_some() { "teacher forward" } else { "student forward" }
    }
}

/// Both terms of the objective, and what their backward pass needs.
pub struct Objective<B: Backend> {
    /// `[1]`, mean distance to the teacher.
    pub jepa: B::Tensor,
    /// `[1]`, how close the latents are to each other.
    pub koleo: B::Tensor,
    norm: <B as LayerNorm>::Saved,
    predictor: <B as Linear>::Saved,
    distance: <B as Jepa>::Saved,
    spread: <B as Koleo>::Saved,
}

/// The gradients of both terms, each `[1]`.
#[derive(Debug)]
pub struct Upstream<'a, T> {
    /// Of the distance.
    pub jepa: &'a T,
    /// Of koleo.
    pub koleo: &'a T,
}

impl<B: Backend> Model<B> {
    /// The embedded bytes with the learned vector where `mask` is 1.
    pub(super) fn masked(
        &self,
        b: &B,
        p: &Views<'_, B>,
        x: &B::Tensor,
        mask: &B::Tensor,
    ) -> Result<(B::Tensor, <B as MaskVector>::Saved)> {
        let params = mask_vector::Params { vector: &p.get("jepa.mask")? };
        let (outputs, saved) = MaskVector::forward(b, &MASK, mask_vector::Inputs { x, mask }, params)?;
        Ok((outputs.y, saved))
    }

    /// What of dx reaches the embedded bytes; the rest is the vector's.
    pub(super) fn masked_backward(
        &self,
        b: &B,
        grads: &Views<'_, B>,
        saved: &<B as MaskVector>::Saved,
        dx: &B::Tensor,
    ) -> Result<B::Tensor> {
        let into = mask_vector::Params { vector: &grads.get("jepa.mask")? };
        Ok(MaskVector::backward(b, &MASK, saved, mask_vector::Outputs { y: dx }, into)?.dx)
    }

    /// Both terms for the student's latents `z` and the teacher's (`[B, T, d]`) at the positions of `mask` (`[B, T]`).
    pub fn objective(&self, b: &B, z: &B::Tensor, teacher: &B::Tensor, mask: &B::Tensor) -> Result<Objective<B>> {
        b.stage("loss");
        let p = self.views(b, &self.params);
        let (gain, bias) = (p.get("jepa.norm_gain")?, p.get("jepa.norm_bias")?);
        let params = layer_norm::Params { gain: Some(&gain), bias: Some(&bias) };
        let (normed, norm) = LayerNorm::forward(b, &NORM, layer_norm::Inputs { x: z }, params)?;
        let (prediction, predictor) = self.linear(b, &p, "jepa.predictor", &normed.y)?;
        let inputs = jepa::Inputs { prediction: &prediction, teacher, mask };
        let (distance, distance_saved) = Jepa::forward(b, &DISTANCE, inputs)?;
        let (spread, spread_saved) = Koleo::forward(b, &KOLEO, koleo::Inputs { z, mask })?;
        Ok(Objective {
            jepa: distance.loss,
            koleo: spread.loss,
            norm,
            predictor,
            distance: distance_saved,
            spread: spread_saved,
        })
    }

    /// Adds the objective's parameter gradients and gives dz = `plus` + what both terms send back.
    pub(super) fn objective_backward(
        &self,
        b: &B,
        grads: &Views<'_, B>,
        objective: &Objective<B>,
        upstream: Upstream<'_, B::Tensor>,
        plus: Option<&B::Tensor>,
    ) -> Result<B::Tensor> {
        let dprediction = self.dprediction(b, objective, upstream)?;
        let dnormed = self.linear_backward(b, grads, "jepa.predictor", &objective.predictor, &dprediction, None)?;
        let (gain, bias) = (grads.get("jepa.norm_gain")?, grads.get("jepa.norm_bias")?);
        let into = layer_norm::Params { gain: Some(&gain), bias: Some(&bias) };
        let upstream_norm = layer_norm::Outputs { y: &dnormed };
        let dz = LayerNorm::backward(b, &NORM, &objective.norm, upstream_norm, plus, into)?.dx;
        let loss = koleo::Outputs { loss: upstream.koleo };
        Ok(Koleo::backward(b, &KOLEO, &objective.spread, loss, Some(&dz))?.dz)
    }

    fn dprediction(&self, b: &B, objective: &Objective<B>, upstream: Upstream<'_, B::Tensor>) -> Result<B::Tensor> {
        let loss = jepa::Outputs { loss: upstream.jepa };
        Ok(Jepa::backward(b, &DISTANCE, &objective.distance, loss)?.dprediction)
    }

    /// Adds the gradient of both terms, and of `weight * ce_n` where the pass was read out.
    pub fn backward_of_objective(
        &self,
        b: &B,
        forward: &Forward<B>,
        weight: Option<&B::Tensor>,
        objective: &Objective<B>,
        upstream: Upstream<'_, B::Tensor>,
    ) -> Result<()> {
        let grads = self.views(b, &self.grads);
        self.backward_pass(b, forward, weight, &mut |ds| {
            Ok(Some(self.objective_backward(b, &grads, objective, upstream, ds.as_ref())?))
        })
    }

    /// The planted fault [`Ablation::TeacherGradient`]: what the distance would send back through a teacher that is
    /// the model itself.
    pub fn teacher_backward(
        &self,
        b: &B,
        teacher: &Forward<B>,
        objective: &Objective<B>,
        upstream: Upstream<'_, B::Tensor>,
    ) -> Result<()> {
        let latents = teacher.latents.as_ref().expect("a teacher's pass has latents");
        let none = || layer_norm::Params { gain: None, bias: None };
        let (_, norm) = LayerNorm::forward(b, &NORM, layer_norm::Inputs { x: latents }, none())?;
        let dtarget = scaled(b, &self.dprediction(b, objective, upstream)?, -1.0)?;
        let dz = LayerNorm::backward(b, &NORM, &norm, layer_norm::Outputs { y: &dtarget }, None, none())?.dx;
        self.backward_pass(b, teacher, None, &mut |_| Ok(Some(dz.clone())))
    }

    /// The teacher's pass, with the fault that is planted in it, if one is.
    pub fn teacher_pass<'a>(&self, params: &'a B::Tensor, mask: &'a B::Tensor) -> Pass<'a, B::Tensor> {
        match self.ablation {
            Ablation::TeacherSeesMask => Pass::FaultyTeacher { params, mask: Some(mask) },
            Ablation::TeacherGradient => Pass::FaultyTeacher { params, mask: None },
            _ => Pass::Teacher { params },
        }
    }

    /// How often the passes and the objective of one part of a step call each operation.
    pub fn jepa_asks(&self, mode: JepaMode, teacher: bool) -> Vec<Ask> {
        let ask = |stem, forward, backward| Ask { stem, forward, backward };
        let mut asks = match mode {
            JepaMode::Off => return self.asks(true, true),
            JepaMode::Shared => self.asks(true, true),
            JepaMode::Separate => {
                let mut asks = self.latent_asks(true);
                asks.extend(self.asks(true, true));
                asks
            }
        };
        if teacher {
            asks.extend(self.latent_asks(false));
        }
        // The masked bytes are read as the first h and by the controllers, so their gradient arrives twice.
        asks.push(ask("mask_vector", 1, 2));
        asks.extend(["layer_norm", "linear", "jepa", "koleo"].map(|stem| ask(stem, 1, 1)));
        asks
    }

    /// How often a pass for its latents calls each operation: the readouts are missing but for the last output map.
    pub fn latent_asks(&self, backward: bool) -> Vec<Ask> {
        let n = self.config.iterations as u64;
        let fewer = |ask: Ask| {
            let calls = match ask.stem {
                "rms_norm" => n,
                "spectral" => 1,
                _ => return ask,
            };
            Ask { forward: calls, backward: if backward { calls } else { 0 }, ..ask }
        };
        self.asks(false, backward).into_iter().map(fewer).collect()
    }
}
