//! The forward pass.

use dormouse_reference::blend::{self, Blend};
use dormouse_reference::controller::{self, Controller};
use dormouse_reference::cross_entropy::{self, CrossEntropy};
use dormouse_reference::decay_gate;
use dormouse_reference::embedding::{self, Embedding};
use dormouse_reference::engram::{self, Engram};
use dormouse_reference::expert::{self, Expert};
use dormouse_reference::gated_rms_norm;
use dormouse_reference::kda;
use dormouse_reference::l2_norm;
use dormouse_reference::linear::{self, Linear};
use dormouse_reference::mask_vector::MaskVector;
use dormouse_reference::residual::{self, Residual};
use dormouse_reference::rms_norm::{self, RmsNorm};
use dormouse_reference::short_conv;
use dormouse_reference::spectral::{self, Spectral};
use dormouse_reference::{Backend, Precision, Result, beside};

use super::ablation::Ablation;
use super::attention::{self, Carry};
use super::memory::{self, Memory};
use super::{Model, Pass, Views};
use crate::config::{self, ModelConfig};

/// The configs of the operations that a run chooses something of: the arithmetic of products, formats, gates.
pub(super) struct Configs {
    pub linear: linear::Config,
    pub spectral: spectral::Config,
    pub expert: expert::Config,
    pub controller: controller::Config,
    pub kda: kda::Config,
    pub gate: decay_gate::Config,
    pub engram: engram::Config,
}

impl Configs {
    pub fn new(m: &ModelConfig, precision: &dyn Fn(&str) -> Precision) -> Self {
        Self {
            linear: linear::Config { precision: precision("linear") },
            spectral: spectral::Config { precision: precision("spectral"), format: m.format.factor() },
            expert: expert::Config {
                precision: precision("expert"),
                ffn: expert::Ffn::Silu,
                format: m.format.factor(),
            },
            controller: controller::Config { precision: precision("controller"), experts: m.experts },
            // A state every 64 tokens, the chunk of the device kernels, so that states can be compared one by one.
            kda: kda::Config {
                scale: None,
                form: kda::Form::Recurrent,
                checkpoint_every: 64,
                memory: kda::Memory::Save,
                precision: precision("kda"),
            },
            gate: decay_gate::Config { kind: m.gate.kind(), beta_scale: m.beta_scale as f64 },
            engram: memory::config(precision("engram")),
        }
    }
}

/// The operations' configs that are constants of the model.
pub(super) mod configs {
    use super::{blend, cross_entropy, embedding, gated_rms_norm, l2_norm, residual, rms_norm, short_conv};

    pub const EMBEDDING: embedding::Config = embedding::Config {};
    pub const NORM: rms_norm::Config = rms_norm::Config { eps: 1e-3 };
    pub const CONV: short_conv::Config = short_conv::Config {};
    pub const L2: l2_norm::Config = l2_norm::Config { eps: 1e-6 };
    /// mean o^2 starts near 1e-5, so a larger eps would swamp it.
    pub const OUT_NORM: gated_rms_norm::Config = gated_rms_norm::Config { eps: 1e-8 };
    /// The memory branch may carry at most half of what it shares with the dense one.
    pub const BLEND: blend::Config = blend::Config { lam_max: 0.5 };
    pub const RESIDUAL: residual::Config = residual::Config {};

    pub fn cross_entropy(denominator: Option<usize>) -> cross_entropy::Config {
        cross_entropy::Config { denominator }
    }
}

/// One batch on the device.
pub struct Batch<'a, T> {
    /// `[B, T]` bytes going in.
    pub ids: &'a T,
    /// `[B, T]` bytes to predict; absent when generating.
    pub targets: Option<&'a T>,
    /// Positions that the mean loss is over: more than B T when a step is computed in several parts.
    pub denominator: usize,
    /// The n-gram keys; present exactly where the model has a memory.
    pub memory: Option<Memory<'a, T>>,
}

/// What each operation of one iteration saved.
pub(super) struct Saved<B: Backend> {
    pub norm: <B as RmsNorm>::Saved,
    pub controller: <B as Controller>::Saved,
    pub attention: attention::Saved<B>,
    pub memory: Option<<B as Engram>::Saved>,
    pub dense: <B as Linear>::Saved,
    pub expert: <B as Expert>::Saved,
    pub blend: <B as Blend>::Saved,
    pub residual: <B as Residual>::Saved,
    /// Of the output map; absent where nobody reads it.
    pub out: Option<<B as Spectral>::Saved>,
    /// Of what makes logits of it; absent where only latents are wanted.
    pub readout: Option<Readout<B>>,
}

/// What the operations from the latents to the loss saved.
pub(super) struct Readout<B: Backend> {
    pub final_norm: <B as RmsNorm>::Saved,
    pub head: <B as Spectral>::Saved,
    pub cross_entropy: Option<<B as CrossEntropy>::Saved>,
}

/// The result of a forward pass.
pub struct Forward<B: Backend> {
    /// `[1]` per iteration: mean cross-entropy in nats; empty without targets.
    pub losses: Vec<B::Tensor>,
    /// `[B, T]`: nats of every position after the last iteration.
    pub nll: Option<B::Tensor>,
    /// `[B, T, 256]` of every iteration, first to last.
    pub logits: Vec<B::Tensor>,
    /// `[B, T, d]`: s of the last iteration, where the pass is for its latents.
    pub latents: Option<B::Tensor>,
    /// What to hand to the next call when reading on.
    pub carry: Vec<Carry<B::Tensor>>,
    /// What the loss is divided by; absent: the positions that it is over.
    pub(super) denominator: Option<usize>,
    pub(super) embedding: <B as Embedding>::Saved,
    pub(super) mask_vector: Option<<B as MaskVector>::Saved>,
    pub(super) iterations: Vec<Saved<B>>,
}

impl<B: Backend> Model<B> {
    /// Runs the model on a batch. `carry` continues sequences whose earlier part was another call.
    ///
    /// # Panics
    /// If the batch has keys and the model no memory, or the other way round: a memory that is not asked would go unnoticed.
    pub fn forward(
        &self,
        b: &B,
        batch: &Batch<'_, B::Tensor>,
        carry: Option<&[Carry<B::Tensor>]>,
    ) -> Result<Forward<B>> {
        self.forward_pass(b, batch, carry, Pass::Plain)
    }

    /// Runs the model on a batch for what `pass` says.
    ///
    /// # Panics
    /// As for [`Model::forward`].
    pub fn forward_pass(
        &self,
        b: &B,
        batch: &Batch<'_, B::Tensor>,
        carry: Option<&[Carry<B::Tensor>]>,
        pass: Pass<'_, B::Tensor>,
    ) -> Result<Forward<B>> {
        assert_eq!(batch.memory.is_some(), self.config.engram != config::Engram::Off, "keys go with a memory");
        b.stage(pass.stage());
        let p = Views { rows: &self.params, ..self.views(b, pass.params().unwrap_or(&self.params)) };
        let table = p.get("embedding")?;
        let (x0, embedding) = Embedding::forward(
            b,
            &configs::EMBEDDING,
            embedding::Inputs { ids: batch.ids },
            embedding::Params { table: &table },
        )?;
        let x0 = x0.x;
        if self.ablation == Ablation::NanActivation {
            b.fill(&b.view(&x0, 0, &[1])?, f64::NAN)?;
        }
        let (x0, mask_vector) = match pass.mask() {
            Some(mask) => self.masked(b, &p, &x0, mask).map(|(x0, saved)| (x0, Some(saved)))?,
            None => (x0, None),
        };
        let mut h = x0.clone();
        let mut result = Forward {
            losses: vec![],
            nll: None,
            logits: vec![],
            latents: None,
            carry: vec![],
            // How many positions a mask leaves changes from step to step, so it is no constant of the step.
            denominator: if pass.visible().is_some() { None } else { Some(batch.denominator) },
            embedding,
            mask_vector,
            iterations: vec![],
        };
        for n in 0..self.config.iterations {
            h = self.iteration(b, &p, n, &x0, &h, batch, carry.map(|c| &c[n]), pass, &mut result)?;
        }
        Ok(result)
    }

    /// One iteration of the block with its readout; gives the next h.
    fn iteration(
        &self,
        b: &B,
        p: &Views<'_, B>,
        n: usize,
        x0: &B::Tensor,
        h: &B::Tensor,
        batch: &Batch<'_, B::Tensor>,
        carry: Option<&Carry<B::Tensor>>,
        pass: Pass<'_, B::Tensor>,
        result: &mut Forward<B>,
    ) -> Result<B::Tensor> {
        let (gain, shift) = (p.get("loop_norm")?, p.iteration(n, self.config.width)?);
        let (normed, norm) = RmsNorm::forward(
            b,
            &configs::NORM,
            rms_norm::Inputs { x: h },
            rms_norm::Params { gain: &gain, shift: Some(&shift) },
        )?;
        let u = &normed.y;
        let c = normed.c.as_ref().expect("a norm with a shift returns the shifted row");
        // The branches of the block read the same rows and not each other.
        let (dense, dense_saved) = self.linear(b, p, "dense", u)?;
        let ((experts, expert), ((memory, (gates, controller)), attention)) = beside(
            b,
            |b| self.experts(b, p, u),
            |b| {
                beside(
                    b,
                    |b| {
                        let memory = batch.memory.as_ref().map(|keys| self.memory(b, p, keys, c)).transpose()?;
                        let controller = controller::Params { weight: &p.get("controller")? };
                        let inputs = controller::Inputs { c, x0 };
                        Ok((memory, Controller::forward(b, &self.configs.controller, inputs, controller)?))
                    },
                    |b| self.attention(b, p, u, carry),
                )
            },
        )?;
        let (memory, memory_saved) = memory.unzip();
        let (y, blend) = Blend::forward(
            b,
            &configs::BLEND,
            blend::Inputs {
                gates: &gates.gates,
                attn: &attention.y,
                dense: &dense,
                experts: &experts,
                memory: memory.as_ref(),
            },
        )?;
        let (next, residual) = Residual::forward(
            b,
            &configs::RESIDUAL,
            residual::Inputs { c, y: &y.y },
            residual::Params { rho: &p.get("rho")? },
        )?;
        let h = next.h;
        let last = n + 1 == self.config.iterations;
        let (mut out, mut readout) = (None, None);
        if pass.reads_out() || (last && pass.has_latents()) {
            let (s, saved) = self.spectral(b, p, ["out.u", "out.s", "out.v"], &h)?;
            out = Some(saved);
            if pass.reads_out() {
                readout = Some(self.readout(b, p, &s, batch, pass, result)?);
            }
            if last && pass.has_latents() {
                result.latents = Some(s);
            }
        }
        result.carry.push(attention.carry);
        if pass.saves() {
            result.iterations.push(Saved {
                norm,
                controller,
                attention: attention.saved,
                memory: memory_saved,
                dense: dense_saved,
                expert,
                blend,
                residual,
                out,
                readout,
            });
        }
        Ok(h)
    }

    /// From the latents `s` to logits and, with targets, to the loss.
    fn readout(
        &self,
        b: &B,
        p: &Views<'_, B>,
        s: &B::Tensor,
        batch: &Batch<'_, B::Tensor>,
        pass: Pass<'_, B::Tensor>,
        result: &mut Forward<B>,
    ) -> Result<Readout<B>> {
        let (f, final_norm) = RmsNorm::forward(
            b,
            &configs::NORM,
            rms_norm::Inputs { x: s },
            rms_norm::Params { gain: &p.get("final_norm")?, shift: None },
        )?;
        let (logits, head) = self.spectral(b, p, ["head.u", "head.s", "head.v"], &f.y)?;
        let mut cross_entropy = None;
        if let Some(targets) = batch.targets {
            b.stage("loss");
            let mask = pass.visible().filter(|_| self.ablation != Ablation::MaskedCrossEntropy);
            let (ce, saved) = CrossEntropy::forward(
                b,
                &configs::cross_entropy(result.denominator),
                cross_entropy::Inputs { logits: &logits, targets, mask },
            )?;
            result.losses.push(ce.loss);
            result.nll = ce.nll;
            cross_entropy = Some(saved);
            b.stage(pass.stage());
        }
        result.logits.push(logits);
        Ok(Readout { final_norm, head, cross_entropy })
    }

    /// `x W` for the named weight.
    pub(super) fn linear(
        &self,
        b: &B,
        p: &Views<'_, B>,
        name: &str,
        x: &B::Tensor,
    ) -> Result<(B::Tensor, <B as Linear>::Saved)> {
        let params = linear::Params { weight: &p.get(name)?, bias: None };
        let (outputs, saved) = Linear::forward(b, &self.configs.linear, linear::Inputs { x }, params)?;
        Ok((outputs.y, saved))
    }

    /// The spectral linear of the three named factors.
    fn spectral(
        &self,
        b: &B,
        p: &Views<'_, B>,
        [u, s, v]: [&str; 3],
        x: &B::Tensor,
    ) -> Result<(B::Tensor, <B as Spectral>::Saved)> {
        let params = spectral::Params { u: &p.get(u)?, s: &p.get(s)?, v: &p.get(v)? };
        let (outputs, saved) = Spectral::forward(b, &self.configs.spectral, spectral::Inputs { x }, params)?;
        Ok((outputs.y, saved))
    }

    fn experts(&self, b: &B, p: &Views<'_, B>, u: &B::Tensor) -> Result<(B::Tensor, <B as Expert>::Saved)> {
        let params = expert_params(p)?;
        let (outputs, saved) = Expert::forward(b, &self.configs.expert, expert::Inputs { u }, params.as_ref())?;
        Ok((outputs.y, saved))
    }
}

/// The experts' factors.
pub(super) fn expert_params<B: Backend>(p: &Views<'_, B>) -> Result<expert::Params<B::Tensor>> {
    Ok(expert::Params {
        up_u: p.get("expert.up_u")?,
        up_s: p.get("expert.up_s")?,
        up_v: p.get("expert.up_v")?,
        down_u: p.get("expert.down_u")?,
        down_s: p.get("expert.down_s")?,
        down_v: p.get("expert.down_v")?,
        gate_u: None,
        gate_s: None,
        gate_v: None,
    })
}
