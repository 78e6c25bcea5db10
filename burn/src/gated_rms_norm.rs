//! `gated_rms_norm`: y = o / (mean o^2 + eps)^(1/2) * gain * sigma(zeta).

use burn_tensor::backend::Backend;
use dormouse_reference::Result;
use dormouse_reference::gated_rms_norm::{Config, GatedRmsNorm, Grads, Inputs, Outputs, Params};

use crate::handle::{Burn, Handle};
use crate::maths::{flat, sigmoid, square};
use crate::shapes::{absent, check, config as option};
use crate::tape::Tape;

impl<B: Backend> GatedRmsNorm for Burn<B> {
    type Saved = Tape<B>;

    #[inline(never)]
    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Handle<B>>,
        params: Params<&Handle<B>>,
    ) -> Result<(Outputs<Handle<B>>, Tape<B>)> {
        const OP: &str = "gated_rms_norm::forward";
        option(OP, "eps", config.eps > 0.0, "greater than zero", config.eps)?;
        let args = [inputs.clone().named(), params.clone().named()].concat();
        let dims = check(OP, &args, |name| if name == "gain" { &["V"] } else { &["..", "V"] })?;
        dims.positive(&["V"])?;
        let (n, v, eps) = (dims.get("N"), dims.get("V"), config.eps);
        let outputs = vec![("y", inputs.o.shape().to_vec())];
        let (mut out, tape) = Tape::run(self, OP, inputs.named(), params.named(), outputs, move |leaves| {
            let o = leaves.get("o", [n, v]);
            let rms = square(o.clone()).mean_dim(1).add_scalar(eps).sqrt();
            let gate = sigmoid(leaves.get("zeta", [n, v]));
            vec![flat(o / rms * leaves.get("gain", [1, v]) * gate)]
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
        const OP: &str = "gated_rms_norm::backward";
        let mut grads = saved.backward(self, OP, upstream.named(), vec![], into.named())?;
        Grads::from_named(|name| grads.take(name)).map_err(absent(OP))
    }
}
