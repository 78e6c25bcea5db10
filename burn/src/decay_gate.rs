//! `decay_gate`: with x = z + dt_bias and a = e^a_log, g = lower_bound sigma(a x) or g = -a ln(1 + e^x);
//! beta = beta_scale sigma(y).

use burn_tensor::backend::Backend;
use dormouse_reference::Result;
use dormouse_reference::decay_gate::{Config, DecayGate, Grads, Inputs, Kind, Outputs, Params, STRONGEST_BOUND};

use crate::handle::{Burn, Handle};
use crate::maths::{flat, sigmoid};
use crate::shapes::{absent, check, config as option};
use crate::tape::Tape;

impl<B: Backend> DecayGate for Burn<B> {
    type Saved = Tape<B>;

    #[inline(never)]
    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Handle<B>>,
        params: Params<&Handle<B>>,
    ) -> Result<(Outputs<Handle<B>>, Tape<B>)> {
        const OP: &str = "decay_gate::forward";
        if let Kind::Bounded { lower_bound } = config.kind {
            let good = (STRONGEST_BOUND..0.0).contains(&lower_bound);
            option(OP, "lower_bound", good, "from -5.9 up to, but not including, 0", lower_bound)?;
        }
        let scale = config.beta_scale;
        option(OP, "beta_scale", scale == 1.0 || scale == 2.0, "1 or 2", scale)?;
        let args = [inputs.clone().named(), params.clone().named()].concat();
        let dims = check(OP, &args, |name| match name {
            "z" => &["B", "T", "H", "K"],
            "y" => &["B", "T", "H"],
            "a_log" => &["H"],
            _ => &["H", "K"],
        })?;
        dims.positive(&["H", "K"])?;
        let (n, h, k, kind) = (dims.get("B") * dims.get("T"), dims.get("H"), dims.get("K"), config.kind);
        let outputs = vec![("g", inputs.z.shape().to_vec()), ("beta", inputs.y.shape().to_vec())];
        let (mut out, tape) = Tape::run(self, OP, inputs.named(), params.named(), outputs, move |leaves| {
            let x = leaves.get("z", [n, h, k]) + leaves.get("dt_bias", [1, h, k]);
            let a = leaves.get("a_log", [1, h, 1]).exp();
            let g = match kind {
                Kind::Bounded { lower_bound } => sigmoid(a * x).mul_scalar(lower_bound),
                // The plain softplus: its exponent stays finite up to x = 709 in f64.
                Kind::Softplus => (a * x.exp().log1p()).neg(),
            };
            let beta = sigmoid(leaves.get("y", [n, h])).mul_scalar(scale);
            vec![flat(g), flat(beta)]
        })?;
        Ok((Outputs::from_named(|name| out.take(name)).map_err(absent(OP))?, tape))
    }

    #[inline(never)]
    fn backward(
        &self,
        _: &Config,
        saved: &Tape<B>,
        upstream: Outputs<&Handle<B>>,
        into: Params<&Handle<B>>,
    ) -> Result<Grads<Handle<B>>> {
        const OP: &str = "decay_gate::backward";
        let mut grads = saved.backward(self, OP, upstream.named(), vec![], into.named())?;
        Grads::from_named(|name| grads.take(name)).map_err(absent(OP))
    }
}
