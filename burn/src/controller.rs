//! `controller`: raw = [c ; x0] W, gates = (sigma(raw_0), sigma(raw_1), sigma(raw_2), softmax(raw_3 ..)).

use burn_tensor::Tensor;
use burn_tensor::backend::Backend;
use dormouse_reference::controller::{Config, Controller, FIXED_GATES, Grads, Inputs, Outputs, Params};
use dormouse_reference::{Dims, Result};

use crate::handle::{Burn, Handle};
use crate::maths::{flat, sigmoid};
use crate::shapes::{absent, check, config as option, full, with_last};
use crate::tape::Tape;

/// p_e = 1 / (1 + sum_{f != e} e^(r_f - r_e)) for rows of `[N, E]`: the softmax by differences, so that the derivative of
/// a saturated row is made of its small terms and not of what is left of large ones.
fn softmax<A: Backend>(r: Tensor<A, 2>) -> Tensor<A, 2> {
    let [n, e] = r.dims();
    let itself = Tensor::<A, 2>::eye(e, &r.device()).cast(r.dtype());
    let others = itself.neg().add_scalar(1.0);
    let differences = r.clone().reshape([n, 1, e]) - r.reshape([n, e, 1]);
    let sums = (differences.exp() * others.reshape([1, e, e])).sum_dim(2);
    sums.add_scalar(1.0).recip().reshape([n, e])
}

impl<B: Backend> Controller for Burn<B> {
    type Saved = Tape<B>;

    #[inline(never)]
    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Handle<B>>,
        params: Params<&Handle<B>>,
    ) -> Result<(Outputs<Handle<B>>, Tape<B>)> {
        const OP: &str = "controller::forward";
        full(OP, config.precision)?;
        option(OP, "experts", config.experts > 0, "at least 1", config.experts)?;
        let dims = check(OP, &inputs.clone().named(), |_| &["..", "D"])?;
        dims.positive(&["D"])?;
        let (n, d, gates) = (dims.get("N"), dims.get("D"), FIXED_GATES + config.experts);
        let mut weight = Dims::new(OP);
        weight.set("2D", 2 * d, "c");
        weight.set("3+E", gates, "the config");
        weight.bind("weight", params.weight.shape(), &["2D", "3+E"])?;
        let (experts, outputs) = (config.experts, vec![("gates", with_last(inputs.c.shape(), gates))]);
        let (mut out, tape) = Tape::run(self, OP, inputs.named(), params.named(), outputs, move |leaves| {
            let both = Tensor::cat(vec![leaves.get("c", [n, d]), leaves.get("x0", [n, d])], 1);
            let raw = both.matmul(leaves.get("weight", [2 * d, gates]));
            let fixed = sigmoid(raw.clone().narrow(1, 0, FIXED_GATES));
            let shares = softmax(raw.narrow(1, FIXED_GATES, experts));
            vec![flat(Tensor::cat(vec![fixed, shares], 1))]
        })?;
        Ok((Outputs::from_named(|name| out.take(name)).map_err(absent(OP))?, tape))
    }

    #[inline(never)]
    fn backward(
        &self,
        _: &Config,
        saved: &Tape<B>,
        upstream: Outputs<&Handle<B>>,
        plus: Inputs<Option<&Handle<B>>>,
        into: Params<&Handle<B>>,
    ) -> Result<Grads<Handle<B>>> {
        const OP: &str = "controller::backward";
        let plus = plus.named().into_iter().filter_map(|(name, plus)| Some((name, plus?))).collect();
        let mut grads = saved.backward(self, OP, upstream.named(), plus, into.named())?;
        Grads::from_named(|name| grads.take(name)).map_err(absent(OP))
    }
}
