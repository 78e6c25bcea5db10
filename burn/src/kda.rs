//! `kda`: the recurrence, token by token, whatever form the config asks for.
//!
//! Sh = Diag(e^g) S, u = beta (v - Sh^T k), S <- Sh + k u^T, o = scale S^T q; every chain at once, a chain being one
//! (batch entry, head).

use burn_tensor::Tensor;
use burn_tensor::backend::Backend;
use dormouse_reference::Result;
use dormouse_reference::kda::{Config, Form, Grads, Inputs, Kda, Outputs};

use crate::handle::{Burn, Handle};
use crate::maths::flat;
use crate::shapes::{absent, check, config as option, full};
use crate::tape::Tape;

impl<B: Backend> Kda for Burn<B> {
    type Saved = Tape<B>;

    fn forward(&self, config: &Config, inputs: Inputs<&Handle<B>>) -> Result<(Outputs<Handle<B>>, Tape<B>)> {
        const OP: &str = "kda::forward";
        full(OP, config.precision)?;
        option(OP, "chunk", config.form != Form::Chunked { chunk: 0 }, "at least 1", 0)?;
        for (field, given) in [("b", inputs.b), ("w", inputs.w), ("cu_seqlens", inputs.cu_seqlens)] {
            option(
                OP,
                field,
                given.is_none(),
                "none; this form has one beta a token and sequences of one length",
                "some",
            )?;
        }
        option(OP, "checkpoint_every", config.checkpoint_every > 0, "at least 1", 0)?;
        let dims = check(OP, &inputs.clone().named(), |name| match name {
            "v" => &["B", "T", "H", "V"],
            "beta" => &["B", "T", "H"],
            "initial_state" => &["B", "H", "K", "V"],
            _ => &["B", "T", "H", "K"],
        })?;
        dims.positive(&["H", "K", "V"])?;
        let [batch, time, heads, k, v] = ["B", "T", "H", "K", "V"].map(|symbol| dims.get(symbol));
        let scale = config.scale.unwrap_or_else(|| (k as f64).sqrt().recip());
        option(OP, "scale", scale.is_finite(), "finite, or none for K^(-1/2)", scale)?;
        let chains = batch * heads;
        let outputs = vec![("o", inputs.v.shape().to_vec()), ("final_state", vec![batch, heads, k, v])];
        let (mut out, tape) = Tape::run(self, OP, inputs.named(), vec![], outputs, move |leaves| {
            // [B, T, H, width] to [B H, T, width].
            let by_chain = |name, width| {
                leaves.get(name, [batch, time, heads, width]).swap_dims(1, 2).reshape([chains, time, width])
            };
            let mut state = leaves.find("initial_state", [chains, k, v]).unwrap_or_else(|| {
                let like = leaves.get("v", [chains * time * v]);
                Tensor::zeros([chains, k, v], (&like.device(), like.dtype()))
            });
            if time == 0 {
                return vec![leaves.get("v", [0]), flat(state)];
            }
            let (keys, queries, values) = (by_chain("k", k), by_chain("q", k), by_chain("v", v));
            let (decay, beta) = (by_chain("g", k).exp(), by_chain("beta", 1));
            let mut read = Vec::with_capacity(time);
            for t in 0..time {
                let key = keys.clone().narrow(1, t, 1);
                let forgotten = decay.clone().narrow(1, t, 1).swap_dims(1, 2) * state;
                let error = values.clone().narrow(1, t, 1) - key.clone().matmul(forgotten.clone());
                let u = beta.clone().narrow(1, t, 1) * error;
                state = forgotten + key.swap_dims(1, 2).matmul(u);
                read.push(queries.clone().narrow(1, t, 1).matmul(state.clone()));
            }
            let o = Tensor::cat(read, 1).mul_scalar(scale);
            let o = o.reshape([batch, heads, time, v]).swap_dims(1, 2);
            vec![flat(o), flat(state)]
        })?;
        Ok((Outputs::from_named(|name| out.take(name)).map_err(absent(OP))?, tape))
    }

    fn backward(&self, _: &Config, saved: &Tape<B>, upstream: Outputs<&Handle<B>>) -> Result<Grads<Handle<B>>> {
        const OP: &str = "kda::backward";
        let mut grads = saved.backward(self, OP, upstream.named(), vec![], vec![])?;
        Grads::from_named(|name| grads.take(name)).map_err(absent(OP))
    }
}
