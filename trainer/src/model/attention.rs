//! The KDA branch of the block: projections, convolutions, norms, gates, recurrence, output.
//!
//! ```text
//! q, k = L2norm_head( SiLU(conv(u W)) )     v = SiLU(conv(u W_v))
//! g    = -5 sigma( exp(A) ((u W_down) W_up + dt_bias) )     beta = sigma(u W_beta)      or their options
//! a    = ( gatedRMSNorm( KDA(q, k, v, g, beta), u W_gate ) ) W_out
//! ```

use dormouse_reference::decay_gate::{self, DecayGate};
use dormouse_reference::gated_rms_norm::{self, GatedRmsNorm};
use dormouse_reference::kda::{self, Kda};
use dormouse_reference::l2_norm::{self, L2Norm};
use dormouse_reference::linear::{self, Linear};
use dormouse_reference::short_conv::{self, ShortConv};
use dormouse_reference::{Backend, Result, beside};

use super::ablation::{Ablation, scaled, without_first_head};
use super::forward::configs;
use super::{Model, Views};

/// Names of the three convolved projections and their taps, in the order q, k, v.
const STREAMS: [(&str, &str); 3] = [("kda.q", "kda.conv_q"), ("kda.k", "kda.conv_k"), ("kda.v", "kda.conv_v")];

/// What one iteration carries from one call to the next when a sequence is read in pieces.
#[derive(Clone)]
pub struct Carry<T> {
    /// Last three inputs of the convolutions, `[B, 3, H K]` for q, k and v.
    pub conv: [T; 3],
    /// `[B, H, K, V]`
    pub state: T,
}

/// What each operation saved.
pub(super) struct Saved<B: Backend> {
    project: [<B as Linear>::Saved; 3],
    conv: [<B as ShortConv>::Saved; 3],
    l2: [<B as L2Norm>::Saved; 2],
    decay_down: <B as Linear>::Saved,
    decay_up: <B as Linear>::Saved,
    beta: <B as Linear>::Saved,
    gate: <B as DecayGate>::Saved,
    kda: <B as Kda>::Saved,
    zeta: <B as Linear>::Saved,
    out_norm: <B as GatedRmsNorm>::Saved,
    out: <B as Linear>::Saved,
    /// `[B, T, H, K]`
    heads: [usize; 4],
}

/// The branch's result.
pub(super) struct Attention<B: Backend> {
    pub y: B::Tensor,
    pub carry: Carry<B::Tensor>,
    pub saved: Saved<B>,
}

/// Gradients on their way back to the normed stream.
pub(super) struct Back<T> {
    dzeta: T,
    /// Absent where the recurrence was detached.
    recurrence: Option<Recurrence<T>>,
}

struct Recurrence<T> {
    dbeta: T,
    dlow: T,
    /// Of the projections to q, k and v.
    streams: Vec<T>,
}

impl<B: Backend> Model<B> {
    /// The branch on the normed stream `u` (`[B, T, d]`).
    pub(super) fn attention(
        &self,
        b: &B,
        p: &Views<'_, B>,
        u: &B::Tensor,
        carry: Option<&Carry<B::Tensor>>,
    ) -> Result<Attention<B>> {
        let (batch, tokens) = (b.shape(u)[0], b.shape(u)[1]);
        let heads = [batch, tokens, self.config.heads, self.config.head_width];
        let flat = [batch, tokens, self.config.heads * self.config.head_width];
        let ((streams, (q, q_l2), (k, k_l2)), (decay_down, decay_up, beta, gates, gate, (zeta, zeta_saved))) = beside(
            b,
            |b| {
                let mut streams = Vec::with_capacity(3);
                for (i, (weight, taps)) in STREAMS.into_iter().enumerate() {
                    let (x, project) = self.linear(b, p, weight, u)?;
                    let (y, conv) = ShortConv::forward(
                        b,
                        &configs::CONV,
                        short_conv::Inputs { x: &x, context: carry.map(|c| &c.conv[i]) },
                        short_conv::Params { weight: &p.get(taps)?, bias: None },
                    )?;
                    let context = y.context.expect("forward always emits its context");
                    streams.push((b.reshape(&y.y, &heads)?, context, project, conv));
                }
                let streams: [_; 3] = streams.try_into().map_err(|_| ()).expect("there are three streams");
                let [q, k, _] = &streams;
                let q = L2Norm::forward(b, &configs::L2, l2_norm::Inputs { x: &q.0 })?;
                let k = L2Norm::forward(b, &configs::L2, l2_norm::Inputs { x: &k.0 })?;
                Ok((streams, q, k))
            },
            |b| {
                let (low, decay_down) = self.linear(b, p, "kda.decay_down", u)?;
                let (z, decay_up) = self.linear(b, p, "kda.decay_up", &low)?;
                let (beta_logit, beta) = self.linear(b, p, "kda.beta", u)?;
                let (gates, gate) = DecayGate::forward(
                    b,
                    &self.configs.gate,
                    decay_gate::Inputs { z: &b.reshape(&z, &heads)?, y: &beta_logit },
                    decay_gate::Params { a_log: &p.get("kda.a_log")?, dt_bias: &p.get("kda.dt_bias")? },
                )?;
                let zeta = self.linear(b, p, "kda.gate", u)?;
                Ok((decay_down, decay_up, beta, gates, gate, zeta))
            },
        )?;
        let [(_, q_context, q_project, q_conv), (_, k_context, k_project, k_conv), (v, v_context, v_project, v_conv)] =
            streams;
        let (read, kda) = Kda::forward(
            b,
            &self.configs.kda,
            kda::Inputs {
                q: &q.y,
                k: &k.y,
                v: &v,
                g: &gates.g,
                beta: &gates.beta,
                b: None,
                w: None,
                cu_seqlens: None,
                initial_state: carry.map(|c| &c.state),
            },
        )?;
        let (normed, out_norm) = GatedRmsNorm::forward(
            b,
            &configs::OUT_NORM,
            gated_rms_norm::Inputs { o: &read.o, zeta: &b.reshape(&zeta, &heads)? },
            gated_rms_norm::Params { gain: &p.get("kda.norm")? },
        )?;
        let (y, out) = self.linear(b, p, "kda.out", &b.reshape(&normed.y, &flat)?)?;
        Ok(Attention {
            y,
            carry: Carry {
                conv: [q_context, k_context, v_context],
                state: read.final_state.expect("forward always returns the final state"),
            },
            saved: Saved {
                project: [q_project, k_project, v_project],
                conv: [q_conv, k_conv, v_conv],
                l2: [q_l2, k_l2],
                decay_down,
                decay_up,
                beta,
                gate,
                kda,
                zeta: zeta_saved,
                out_norm,
                out,
                heads,
            },
        })
    }

    /// Adds the gradients of the parameters from the output map back to the convolutions, and gives what the maps of the
    /// normed stream are sent.
    pub(super) fn attention_backward(
        &self,
        b: &B,
        grads: &Views<'_, B>,
        saved: &Saved<B>,
        dy: &B::Tensor,
    ) -> Result<Back<B::Tensor>> {
        let heads = &saved.heads;
        let flat = [heads[0], heads[1], heads[2] * heads[3]];
        let dnormed = self.linear_backward(b, grads, "kda.out", &saved.out, dy, None)?;
        let through_norm = GatedRmsNorm::backward(
            b,
            &configs::OUT_NORM,
            &saved.out_norm,
            gated_rms_norm::Outputs { y: &b.reshape(&dnormed, heads)? },
            gated_rms_norm::Params { gain: &grads.get("kda.norm")? },
        )?;
        let dzeta = b.reshape(&through_norm.dzeta, &flat)?;
        if self.ablation == Ablation::DetachRecurrence {
            return Ok(Back { dzeta, recurrence: None });
        }
        let mut through_kda =
            Kda::backward(b, &self.configs.kda, &saved.kda, kda::Outputs { o: &through_norm.d_o, final_state: None })?;
        match self.ablation {
            Ablation::DecayGradientScaled => through_kda.dg = scaled(b, &through_kda.dg, 1.01)?,
            Ablation::FirstHeadBetaDropped => through_kda.dbeta = without_first_head(b, &through_kda.dbeta)?,
            _ => {}
        }
        let kda::Grads { dq, dk, dv, .. } = &through_kda;
        let ((dbeta, dlow), streams) = beside(
            b,
            |b| {
                let through_gate = DecayGate::backward(
                    b,
                    &self.configs.gate,
                    &saved.gate,
                    decay_gate::Outputs { g: &through_kda.dg, beta: &through_kda.dbeta },
                    decay_gate::Params { a_log: &grads.get("kda.a_log")?, dt_bias: &grads.get("kda.dt_bias")? },
                )?;
                if self.ablation == Ablation::DecayBiasDropped {
                    b.fill(&grads.get("kda.dt_bias")?, 0.0)?;
                }
                let dz = b.reshape(&through_gate.dz, &flat)?;
                let dlow = self.linear_backward(b, grads, "kda.decay_up", &saved.decay_up, &dz, None)?;
                Ok((through_gate.dy, dlow))
            },
            |b| {
                let dq = L2Norm::backward(b, &configs::L2, &saved.l2[0], l2_norm::Outputs { y: dq })?.dx;
                let dk = L2Norm::backward(b, &configs::L2, &saved.l2[1], l2_norm::Outputs { y: dk })?.dx;
                let mut streams = Vec::with_capacity(STREAMS.len());
                for (i, dstream) in [&dq, &dk, dv].into_iter().enumerate() {
                    let into = short_conv::Params { weight: &grads.get(STREAMS[i].1)?, bias: None };
                    let upstream = short_conv::Outputs { y: &b.reshape(dstream, &flat)?, context: None };
                    streams.push(ShortConv::backward(b, &configs::CONV, &saved.conv[i], upstream, into)?.dx);
                }
                Ok(streams)
            },
        )?;
        Ok(Back { dzeta, recurrence: Some(Recurrence { dbeta, dlow, streams }) })
    }

    /// Adds the gradients of the maps of the normed stream and gives du = `plus` + what flows back through the branch.
    pub(super) fn projections_backward(
        &self,
        b: &B,
        grads: &Views<'_, B>,
        saved: &Saved<B>,
        back: &Back<B::Tensor>,
        plus: &B::Tensor,
    ) -> Result<B::Tensor> {
        let mut du = self.linear_backward(b, grads, "kda.gate", &saved.zeta, &back.dzeta, Some(plus))?;
        let Some(Recurrence { dbeta, dlow, streams }) = &back.recurrence else { return Ok(du) };
        du = self.linear_backward(b, grads, "kda.beta", &saved.beta, dbeta, Some(&du))?;
        du = self.linear_backward(b, grads, "kda.decay_down", &saved.decay_down, dlow, Some(&du))?;
        for (i, dx) in streams.iter().enumerate() {
            du = self.linear_backward(b, grads, STREAMS[i].0, &saved.project[i], dx, Some(&du))?;
        }
        Ok(du)
    }

    /// Adds the named weight's gradient and gives dx = `plus` + dy W^T.
    pub(super) fn linear_backward(
        &self,
        b: &B,
        grads: &Views<'_, B>,
        name: &str,
        saved: &<B as Linear>::Saved,
        dy: &B::Tensor,
        plus: Option<&B::Tensor>,
    ) -> Result<B::Tensor> {
        let into = linear::Params { weight: &grads.get(name)?, bias: None };
        Ok(Linear::backward(b, &self.configs.linear, saved, linear::Outputs { y: dy }, plus, into)?.dx)
    }
}
