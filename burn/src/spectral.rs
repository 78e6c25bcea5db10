//! `spectral`: y = ((x U) * s) V^T, with U and V rounded to their format.

use burn_tensor::Tensor;
use burn_tensor::backend::Backend;
use dormouse_reference::Result;
use dormouse_reference::spectral::{Config, Grads, Inputs, Outputs, Params, Spectral};

use crate::handle::{Burn, Handle};
use crate::maths::flat;
use crate::shapes::{absent, check, full, with_last};
use crate::tape::Tape;

/// ((x U) * s) V^T for a stack of maps: x `[E, N, I]` or `[1, N, I]`, U `[E, I, R]`, s `[E, 1, R]`, V `[E, O, R]`.
pub(crate) fn map<A: Backend>(x: Tensor<A, 3>, u: Tensor<A, 3>, s: Tensor<A, 3>, v: Tensor<A, 3>) -> Tensor<A, 3> {
    (x.matmul(u) * s).matmul(v.swap_dims(1, 2))
}

impl<B: Backend> Spectral for Burn<B> {
    type Saved = Tape<B>;

    #[inline(never)]
    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Handle<B>>,
        params: Params<&Handle<B>>,
    ) -> Result<(Outputs<Handle<B>>, Tape<B>)> {
        const OP: &str = "spectral::forward";
        full(OP, config.precision)?;
        let args = [inputs.clone().named(), params.clone().named()].concat();
        let dims = check(OP, &args, |name| match name {
            "x" => &["..", "I"],
            "u" => &["I", "R"],
            "s" => &["R"],
            _ => &["O", "R"],
        })?;
        dims.positive(&["I", "R", "O"])?;
        let [n, i, r, o] = ["N", "I", "R", "O"].map(|symbol| dims.get(symbol));
        let outputs = vec![("y", with_last(inputs.x.shape(), o))];
        let (u, v) = (self.rounded(OP, "u", params.u, config.format)?, self.rounded(OP, "v", params.v, config.format)?);
        let params = Params { u: &u, v: &v, ..params };
        let (mut out, tape) = Tape::run(self, OP, inputs.named(), params.named(), outputs, move |leaves| {
            let (u, s, v) = (leaves.get("u", [1, i, r]), leaves.get("s", [1, 1, r]), leaves.get("v", [1, o, r]));
            vec![flat(map(leaves.get("x", [1, n, i]), u, s, v))]
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
        const OP: &str = "spectral::backward";
        let plus = plus.into_iter().map(|plus| ("x", plus)).collect();
        let mut grads = saved.backward(self, OP, upstream.named(), plus, into.named())?;
        Grads::from_named(|name| grads.take(name)).map_err(absent(OP))
    }
}
