//! `rms_norm`: c = x + shift, y = c / (mean c^2 + eps)^(1/2) * gain.

use burn_tensor::backend::Backend;
use dormouse_reference::Result;
use dormouse_reference::rms_norm::{Config, Grads, Inputs, Outputs, Params, RmsNorm};

use crate::handle::{Burn, Handle};
use crate::maths::{flat, square};
use crate::shapes::{absent, check, config as option};
use crate::tape::Tape;

impl<B: Backend> RmsNorm for Burn<B> {
    type Saved = Tape<B>;

    #[inline(never)]
    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Handle<B>>,
        params: Params<&Handle<B>>,
    ) -> Result<(Outputs<Handle<B>>, Tape<B>)> {
        const OP: &str = "rms_norm::forward";
        option(OP, "eps", config.eps > 0.0, "greater than zero", config.eps)?;
        let args = [inputs.clone().named(), params.clone().named()].concat();
        let dims = check(OP, &args, |name| if name == "x" { &["..", "D"] } else { &["D"] })?;
        dims.positive(&["D"])?;
        let (n, d, eps) = (dims.get("N"), dims.get("D"), config.eps);
        let mut outputs = vec![("y", inputs.x.shape().to_vec())];
        outputs.extend(params.shift.map(|_| ("c", inputs.x.shape().to_vec())));
        let (mut out, tape) = Tape::run(self, OP, inputs.named(), params.named(), outputs, move |leaves| {
            let x = leaves.get("x", [n, d]);
            let c = match leaves.find("shift", [1, d]) {
                Some(shift) => x + shift,
                None => x,
            };
            let rms = square(c.clone()).mean_dim(1).add_scalar(eps).sqrt();
            let y = c.clone() / rms * leaves.get("gain", [1, d]);
            vec![flat(y), flat(c)]
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
        const OP: &str = "rms_norm::backward";
        let mut grads = saved.backward(self, OP, upstream.named(), vec![], into.named())?;
        Grads::from_named(|name| grads.take(name)).map_err(absent(OP))
    }
}
