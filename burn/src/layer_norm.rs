//! `layer_norm`: n = (x - mean x) / (mean (x - mean x)^2 + eps)^(1/2), y = n * gain + bias.

use burn_tensor::Tensor;
use burn_tensor::backend::Backend;
use dormouse_reference::layer_norm::{Config, Grads, Inputs, LayerNorm, Outputs, Params};
use dormouse_reference::{Error, Result};

use crate::handle::{Burn, Handle};
use crate::maths::{flat, square};
use crate::shapes::{absent, check, small};
use crate::tape::Tape;

/// Rows of `[N, D]` with mean 0 and variance 1.
pub(crate) fn normalised<A: Backend>(x: Tensor<A, 2>, eps: f64) -> Tensor<A, 2> {
    let centred = x.clone() - x.mean_dim(1);
    let deviation = square(centred.clone()).mean_dim(1).add_scalar(eps).sqrt();
    centred / deviation
}

/// Gain and bias come together or not at all.
fn both_or_neither<X>(op: &'static str, params: &Params<X>) -> Result<()> {
    let (arg, expected) = match (&params.gain, &params.bias) {
        (Some(_), None) => ("bias", "present because `gain` is"),
        (None, Some(_)) => ("gain", "present because `bias` is"),
        _ => return Ok(()),
    };
    Err(Error::Presence { op, arg, expected, got: "absent" })
}

impl<B: Backend> LayerNorm for Burn<B> {
    type Saved = Tape<B>;

    #[inline(never)]
    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Handle<B>>,
        params: Params<&Handle<B>>,
    ) -> Result<(Outputs<Handle<B>>, Tape<B>)> {
        const OP: &str = "layer_norm::forward";
        small(OP, "eps", config.eps)?;
        both_or_neither(OP, &params)?;
        let args = [inputs.clone().named(), params.clone().named()].concat();
        let dims = check(OP, &args, |name| if name == "x" { &["..", "D"] } else { &["D"] })?;
        dims.positive(&["D"])?;
        let (n, d, eps) = (dims.get("N"), dims.get("D"), config.eps);
        let outputs = vec![("y", inputs.x.shape().to_vec())];
        let (mut out, tape) = Tape::run(self, OP, inputs.named(), params.named(), outputs, move |leaves| {
            let mut y = normalised(leaves.get("x", [n, d]), eps);
            if let (Some(gain), Some(bias)) = (leaves.find("gain", [1, d]), leaves.find("bias", [1, d])) {
                y = y * gain + bias;
            }
            vec![flat(y)]
        })?;
        Ok((Outputs::from_named(|name| out.take(name)).map_err(absent(OP))?, tape))
    }

    #[inline(never)]
    fn backward(
        &self,
        config: &Config,
        saved: &Tape<B>,
        upstream: Outputs<&Handle<B>>,
        plus: Option<&Handle<B>>,
        into: Params<&Handle<B>>,
    ) -> Result<Grads<Handle<B>>> {
        const OP: &str = "layer_norm::backward";
        small(OP, "eps", config.eps)?;
        both_or_neither(OP, &into)?;
        let plus = plus.into_iter().map(|plus| ("x", plus)).collect();
        let mut grads = saved.backward(self, OP, upstream.named(), plus, into.named())?;
        Grads::from_named(|name| grads.take(name)).map_err(absent(OP))
    }
}
