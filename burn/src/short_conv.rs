//! `short_conv`: with xx = [context; x] along time, c_t = bias + sum_j weight_j xx_{t+j} and y = c sigma(c).

use burn_tensor::Tensor;
use burn_tensor::backend::Backend;
use dormouse_reference::Result;
use dormouse_reference::short_conv::{CONTEXT, Config, Grads, Inputs, Outputs, Params, ShortConv, WIDTH};

use crate::handle::{Burn, Handle};
use crate::maths::{flat, silu};
use crate::shapes::{absent, check};
use crate::tape::Tape;

impl<B: Backend> ShortConv for Burn<B> {
    type Saved = Tape<B>;

    #[inline(never)]
    fn forward(
        &self,
        _: &Config,
        inputs: Inputs<&Handle<B>>,
        params: Params<&Handle<B>>,
    ) -> Result<(Outputs<Handle<B>>, Tape<B>)> {
        const OP: &str = "short_conv::forward";
        let args = [inputs.clone().named(), params.clone().named()].concat();
        let mut dims = check(OP, &args, |name| match name {
            "x" => &["B", "T", "C"],
            "context" => &["B", "CONTEXT", "C"],
            "weight" => &["WIDTH", "C"],
            _ => &["C"],
        })?;
        dims.bind("weight", params.weight.shape(), &["WIDTH", "C"])?;
        let mut lengths = dormouse_reference::Dims::new(OP);
        lengths.set("4", WIDTH, "the width of the convolution");
        lengths.set("3", CONTEXT, "the width of the convolution");
        lengths.bind("weight", params.weight.shape(), &["4", "C"])?;
        if let Some(context) = inputs.context {
            lengths.bind("context", context.shape(), &["B", "3", "C"])?;
        }
        dims.positive(&["C"])?;
        let (batch, time, c) = (dims.get("B"), dims.get("T"), dims.get("C"));
        let outputs = vec![("y", inputs.x.shape().to_vec()), ("context", vec![batch, CONTEXT, c])];
        let (mut out, tape) = Tape::run(self, OP, inputs.named(), params.named(), outputs, move |leaves| {
            let x = leaves.get("x", [batch, time, c]);
            let context = leaves
                .find("context", [batch, CONTEXT, c])
                .unwrap_or_else(|| Tensor::zeros([batch, CONTEXT, c], (&x.device(), x.dtype())));
            if time == 0 {
                return vec![flat(x), flat(context)];
            }
            let all = Tensor::cat(vec![context, x], 1);
            let weight = leaves.get("weight", [WIDTH, 1, c]);
            let tap = |j: usize| all.clone().narrow(1, j, time) * weight.clone().narrow(0, j, 1);
            let sum = tap(0) + tap(1) + tap(2) + tap(3);
            let sum = match leaves.find("bias", [1, 1, c]) {
                Some(bias) => sum + bias,
                None => sum,
            };
            vec![flat(silu(sum)), flat(all.narrow(1, time, CONTEXT))]
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
        const OP: &str = "short_conv::backward";
        let mut grads = saved.backward(self, OP, upstream.named(), vec![], into.named())?;
        Grads::from_named(|name| grads.take(name)).map_err(absent(OP))
    }
}
