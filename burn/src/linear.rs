//! `linear`: y = x W + bias.

use burn_tensor::backend::Backend;
use dormouse_reference::Result;
use dormouse_reference::linear::{Config, Grads, Inputs, Linear, Outputs, Params};

use crate::handle::{Burn, Handle};
use crate::maths::flat;
use crate::shapes::{absent, check, full, with_last};
use crate::tape::Tape;

impl<B: Backend> Linear for Burn<B> {
    type Saved = Tape<B>;

    #[inline(never)]
    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Handle<B>>,
        params: Params<&Handle<B>>,
    ) -> Result<(Outputs<Handle<B>>, Tape<B>)> {
        const OP: &str = "linear::forward";
        full(OP, config.precision)?;
        let args = [inputs.clone().named(), params.clone().named()].concat();
        let dims = check(OP, &args, |name| match name {
            "x" => &["..", "I"],
            "weight" => &["I", "O"],
            _ => &["O"],
        })?;
        dims.positive(&["I", "O"])?;
        let (n, i, o) = (dims.get("N"), dims.get("I"), dims.get("O"));
        let outputs = vec![("y", with_last(inputs.x.shape(), o))];
        let (mut out, tape) = Tape::run(self, OP, inputs.named(), params.named(), outputs, move |leaves| {
            let product = leaves.get("x", [n, i]).matmul(leaves.get("weight", [i, o]));
            let y = match leaves.find("bias", [1, o]) {
                Some(bias) => product + bias,
                None => product,
            };
            vec![flat(y)]
        })?;
        Ok((Outputs::from_named(|name| out.take(name)).map_err(absent(OP))?, tape))
    }

    #[inline(never)]
    fn backward(
        &self,
        _: &Config,
        saved: &Tape<B>,
        upstream: Outputs<&Handle<B>>,
        plus: Option<&Handle<B>>,
        into: Params<&Handle<B>>,
    ) -> Result<Grads<Handle<B>>> {
        const OP: &str = "linear::backward";
        let plus = plus.into_iter().map(|plus| ("x", plus)).collect();
        let mut grads = saved.backward(self, OP, upstream.named(), plus, into.named())?;
        Grads::from_named(|name| grads.take(name)).map_err(absent(OP))
    }
}
