//! The backward pass: `forward` in reverse.

use dormouse_reference::blend::{self, Blend};
use dormouse_reference::controller::{self, Controller};
use dormouse_reference::cross_entropy::{self, CrossEntropy};
use dormouse_reference::embedding::{self, Embedding};
use dormouse_reference::expert::{self, Expert};
use dormouse_reference::residual::{self, Residual};
use dormouse_reference::rms_norm::{self, RmsNorm};
use dormouse_reference::spectral::{self, Spectral};
use dormouse_reference::{Backend, Result, beside};

use super::forward::{Forward, Readout, Saved, configs, expert_params};
use super::{Model, Views};

/// Gradients that travel from one iteration to the one before it.
struct Travelling<T> {
    /// Of h as it left the earlier iteration.
    h: Option<T>,
    /// Of x0, from the controllers.
    x0: Option<T>,
}

impl<B: Backend> Model<B> {
    /// Adds the gradient of `sum over iterations of weight * ce_n` to every parameter's gradient; `weight` is `[1]`.
    ///
    /// # Panics
    /// If the forward pass had no targets: there is no loss to differentiate.
    pub fn backward(&self, b: &B, forward: &Forward<B>, weight: &B::Tensor) -> Result<()> {
        self.backward_pass(b, forward, Some(weight), &mut Ok)
    }

    /// [`Model::backward`] with another reader of the last iteration's latents: `latents` takes the gradient that the
    /// readout has sent back, if any, and gives it with its own added. Without `weight` nothing was read out.
    pub(super) fn backward_pass(
        &self,
        b: &B,
        forward: &Forward<B>,
        weight: Option<&B::Tensor>,
        latents: &mut dyn FnMut(Option<B::Tensor>) -> Result<Option<B::Tensor>>,
    ) -> Result<()> {
        b.stage("backward");
        let grads = self.views(b, &self.grads);
        let mut travelling = Travelling { h: None, x0: None };
        for (n, saved) in forward.iterations.iter().enumerate().rev() {
            let mut ds = match (&saved.readout, weight) {
                (Some(readout), Some(weight)) => {
                    Some(self.readout_backward(b, &grads, readout, weight, forward.denominator)?)
                }
                _ => None,
            };
            if n + 1 == forward.iterations.len() {
                ds = latents(ds)?;
            }
            travelling = self.iteration_backward(b, &grads, n, saved, ds.as_ref(), &travelling)?;
        }
        // x0 is read as the first h and by every controller.
        let table = grads.get("embedding")?;
        for dx in [&travelling.h, &travelling.x0].into_iter().flatten() {
            let seen =
                forward.mask_vector.as_ref().map(|saved| self.masked_backward(b, &grads, saved, dx)).transpose()?;
            Embedding::backward(
                b,
                &configs::EMBEDDING,
                &forward.embedding,
                embedding::Outputs { x: seen.as_ref().unwrap_or(dx) },
                embedding::Params { table: &table },
            )?;
        }
        Ok(())
    }

    /// From the loss back to the latents.
    fn readout_backward(
        &self,
        b: &B,
        grads: &Views<'_, B>,
        saved: &Readout<B>,
        weight: &B::Tensor,
        denominator: Option<usize>,
    ) -> Result<B::Tensor> {
        let cross_entropy = saved.cross_entropy.as_ref().expect("backward follows a forward pass with targets");
        let dlogits = CrossEntropy::backward(
            b,
            &configs::cross_entropy(denominator),
            cross_entropy,
            cross_entropy::Outputs { loss: weight, nll: None },
        )?
        .dlogits;
        let df = self.spectral_backward(b, grads, ["head.u", "head.s", "head.v"], &saved.head, &dlogits, None)?;
        let through_norm = RmsNorm::backward(
            b,
            &configs::NORM,
            &saved.final_norm,
            rms_norm::Outputs { y: &df, c: None },
            rms_norm::Params { gain: &grads.get("final_norm")?, shift: None },
        )?;
        Ok(through_norm.dx)
    }

    /// One iteration for `ds`, the gradient of its latents where somebody reads them.
    fn iteration_backward(
        &self,
        b: &B,
        grads: &Views<'_, B>,
        n: usize,
        saved: &Saved<B>,
        ds: Option<&B::Tensor>,
        later: &Travelling<B::Tensor>,
    ) -> Result<Travelling<B::Tensor>> {
        let dh = match (ds, &saved.out) {
            (Some(ds), Some(out)) => {
                self.spectral_backward(b, grads, ["out.u", "out.s", "out.v"], out, ds, later.h.as_ref())?
            }
            _ => later.h.clone().expect("h is read by the next iteration or by the output map"),
        };
        let through_residual = Residual::backward(
            b,
            &configs::RESIDUAL,
            &saved.residual,
            residual::Outputs { h: &dh },
            residual::Params { rho: &grads.get("rho")? },
        )?;
        let through_blend =
            Blend::backward(b, &configs::BLEND, &saved.blend, blend::Outputs { y: &through_residual.dy })?;
        // As in the forward pass; the experts' and the dense branch's du joins the attention's at its end.
        let (du, (dc, through_attention)) = beside(
            b,
            |b| {
                let du = Expert::backward(
                    b,
                    &self.configs.expert,
                    &saved.expert,
                    expert::Outputs { y: &through_blend.dexperts },
                    None,
                    expert_params(grads)?.as_ref(),
                )?
                .du;
                self.linear_backward(b, grads, "dense", &saved.dense, &through_blend.ddense, Some(&du))
            },
            |b| {
                beside(
                    b,
                    |b| match (&saved.memory, &through_blend.dmemory) {
                        (Some(saved), Some(dm)) => self.memory_backward(b, grads, saved, dm, &through_residual.dc),
                        _ => Ok(through_residual.dc.clone()),
                    },
                    |b| self.attention_backward(b, grads, &saved.attention, &through_blend.dattn),
                )
            },
        )?;
        let du = self.projections_backward(b, grads, &saved.attention, &through_attention, &du)?;
        let through_controller = Controller::backward(
            b,
            &self.configs.controller,
            &saved.controller,
            controller::Outputs { gates: &through_blend.dgates },
            controller::Inputs { c: Some(&dc), x0: later.x0.as_ref() },
            controller::Params { weight: &grads.get("controller")? },
        )?;
        let (gain, shift) = (grads.get("loop_norm")?, grads.iteration(n, self.config.width)?);
        let dh = RmsNorm::backward(
            b,
            &configs::NORM,
            &saved.norm,
            rms_norm::Outputs { y: &du, c: Some(&through_controller.dc) },
            rms_norm::Params { gain: &gain, shift: Some(&shift) },
        )?
        .dx;
        Ok(Travelling { h: Some(dh), x0: Some(through_controller.dx0) })
    }

    fn spectral_backward(
        &self,
        b: &B,
        grads: &Views<'_, B>,
        [u, s, v]: [&str; 3],
        saved: &<B as Spectral>::Saved,
        dy: &B::Tensor,
        plus: Option<&B::Tensor>,
    ) -> Result<B::Tensor> {
        let into = spectral::Params { u: &grads.get(u)?, s: &grads.get(s)?, v: &grads.get(v)? };
        Ok(Spectral::backward(b, &self.configs.spectral, saved, spectral::Outputs { y: dy }, plus, into)?.dx)
    }
}
