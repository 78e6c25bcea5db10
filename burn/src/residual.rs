//! `residual`: h = c + rho y.

use burn_tensor::backend::Backend;
use dormouse_reference::Result;
use dormouse_reference::residual::{Config, Grads, Inputs, Outputs, Params, Residual};

use crate::handle::{Burn, Handle};
use crate::maths::flat;
use crate::shapes::{absent, check};
use crate::tape::Tape;

impl<B: Backend> Residual for Burn<B> {
    type Saved = Tape<B>;

    #[inline(never)]
    fn forward(
        &self,
        _: &Config,
        inputs: Inputs<&Handle<B>>,
        params: Params<&Handle<B>>,
    ) -> Result<(Outputs<Handle<B>>, Tape<B>)> {
        const OP: &str = "residual::forward";
        let mut dims = check(OP, &inputs.clone().named(), |_| &["..", "D"])?;
        dims.set("1", 1, "the one number of the model");
        dims.bind("rho", params.rho.shape(), &["1"])?;
        dims.positive(&["D"])?;
        let (n, d) = (dims.get("N"), dims.get("D"));
        let outputs = vec![("h", inputs.c.shape().to_vec())];
        let (mut out, tape) = Tape::run(self, OP, inputs.named(), params.named(), outputs, move |leaves| {
            vec![flat(leaves.get("c", [n, d]) + leaves.get("rho", [1, 1]) * leaves.get("y", [n, d]))]
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
        const OP: &str = "residual::backward";
        let mut grads = saved.backward(self, OP, upstream.named(), vec![], into.named())?;
        Grads::from_named(|name| grads.take(name)).map_err(absent(OP))
    }
}
