//! `l2_norm`: y = x / (sum x^2 + eps)^(1/2).

use burn_tensor::backend::Backend;
use dormouse_reference::Result;
use dormouse_reference::l2_norm::{Config, Grads, Inputs, L2Norm, Outputs};

use crate::handle::{Burn, Handle};
use crate::maths::{flat, square};
use crate::shapes::{absent, check, config as option};
use crate::tape::Tape;

impl<B: Backend> L2Norm for Burn<B> {
    type Saved = Tape<B>;

    #[inline(never)]
    fn forward(&self, config: &Config, inputs: Inputs<&Handle<B>>) -> Result<(Outputs<Handle<B>>, Tape<B>)> {
        const OP: &str = "l2_norm::forward";
        option(OP, "eps", config.eps > 0.0, "greater than zero", config.eps)?;
        let dims = check(OP, &inputs.clone().named(), |_| &["..", "K"])?;
        dims.positive(&["K"])?;
        let (n, k, eps) = (dims.get("N"), dims.get("K"), config.eps);
        let outputs = vec![("y", inputs.x.shape().to_vec())];
        let (mut out, tape) = Tape::run(self, OP, inputs.named(), vec![], outputs, move |leaves| {
            let x = leaves.get("x", [n, k]);
            let length = square(x.clone()).sum_dim(1).add_scalar(eps).sqrt();
            vec![flat(x / length)]
        })?;
        Ok((Outputs::from_named(|name| out.take(name)).map_err(absent(OP))?, tape))
    }

    #[inline(never)]
    fn backward(&self, _: &Config, saved: &Tape<B>, upstream: Outputs<&Handle<B>>) -> Result<Grads<Handle<B>>> {
        const OP: &str = "l2_norm::backward";
        let mut grads = saved.backward(self, OP, upstream.named(), vec![], vec![])?;
        Grads::from_named(|name| grads.take(name)).map_err(absent(OP))
    }
}
