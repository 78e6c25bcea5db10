//! `mask_vector`: y_n = vector where mask_n = 1, else x_n.

use burn_tensor::Tensor;
use burn_tensor::backend::Backend;
use dormouse_reference::Result;
use dormouse_reference::mask_vector::{Config, Grads, Inputs, MaskVector, Outputs, Params};

use crate::handle::{Burn, Handle};
use crate::maths::flat;
use crate::shapes::{absent, check};
use crate::tape::{Tape, Tracked};

impl<B: Backend> MaskVector for Burn<B> {
    type Saved = Tape<B>;

    #[inline(never)]
    fn forward(
        &self,
        _: &Config,
        inputs: Inputs<&Handle<B>>,
        params: Params<&Handle<B>>,
    ) -> Result<(Outputs<Handle<B>>, Tape<B>)> {
        const OP: &str = "mask_vector::forward";
        let args = [inputs.clone().named(), params.clone().named()].concat();
        let dims = check(OP, &args, |name| match name {
            "x" => &["..", "D"],
            "mask" => &[".."],
            _ => &["D"],
        })?;
        dims.positive(&["D"])?;
        let (n, d) = (dims.get("N"), dims.get("D"));
        let masked = self.tensor_of(self.peek(OP, "mask", inputs.mask)?);
        let outputs = vec![("y", inputs.x.shape().to_vec())];
        let (mut out, tape) = Tape::run(self, OP, vec![("x", inputs.x)], params.named(), outputs, move |leaves| {
            let x = leaves.get("x", [n, d]);
            let mask: Tensor<Tracked<B>, 1> = Tensor::from_inner(masked.clone());
            let mask = mask.not_equal_elem(0.0);
            // A choice and no product: what a masked row holds, NaN included, reaches neither y nor a gradient.
            let vector = leaves.get("vector", [1, d]).expand([n, d]);
            vec![flat(x.mask_where(mask.reshape([n, 1]).expand([n, d]), vector))]
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
        const OP: &str = "mask_vector::backward";
        let mut grads = saved.backward(self, OP, upstream.named(), vec![], into.named())?;
        Grads::from_named(|name| grads.take(name)).map_err(absent(OP))
    }
}
