//! `jepa`: the mean over masked positions and channels of |prediction - layernorm(teacher)|.

use burn_tensor::Tensor;
use burn_tensor::backend::Backend;
use dormouse_reference::Result;
use dormouse_reference::jepa::{Config, Grads, Inputs, Jepa, Outputs};

use crate::handle::{Burn, Handle};
use crate::layer_norm::normalised;
use crate::maths::shaped;
use crate::shapes::{absent, check, number, small};
use crate::tape::Tape;

impl<B: Backend> Jepa for Burn<B> {
    type Saved = Tape<B>;

    #[inline(never)]
    fn forward(&self, config: &Config, inputs: Inputs<&Handle<B>>) -> Result<(Outputs<Handle<B>>, Tape<B>)> {
        const OP: &str = "jepa::forward";
        small(OP, "eps", config.eps)?;
        let dims = check(OP, &inputs.clone().named(), |name| if name == "mask" { &[".."] } else { &["..", "D"] })?;
        dims.positive(&["D"])?;
        let (n, d) = (dims.get("N"), dims.get("D"));
        // Positions that are not masked are not read: only the masked ones are taken out.
        let places = self.places(OP, inputs.mask)?;
        let (count, places) = (places.len(), self.integers_of(places));
        let teacher = self.read(OP, "teacher", inputs.teacher)?;
        let target = match count {
            0 => None,
            _ => Some(normalised(shaped(teacher, [n, d]).select(0, places.clone()), config.eps)),
        };
        let zero = self.tensor_of(vec![0.0]);
        let leaves = vec![("prediction", inputs.prediction)];
        let (mut out, tape) = Tape::run(self, OP, leaves, vec![], vec![("loss", vec![1])], move |leaves| {
            let Some(target) = &target else { return vec![Tensor::from_inner(zero.clone())] };
            let prediction = leaves.get("prediction", [n, d]).select(0, Tensor::from_inner(places.clone()));
            vec![(prediction - Tensor::from_inner(target.clone())).abs().mean()]
        })?;
        Ok((Outputs::from_named(|name| out.take(name)).map_err(absent(OP))?, tape))
    }

    #[inline(never)]
    fn backward(&self, config: &Config, saved: &Tape<B>, upstream: Outputs<&Handle<B>>) -> Result<Grads<Handle<B>>> {
        const OP: &str = "jepa::backward";
        small(OP, "eps", config.eps)?;
        number(OP, "loss", upstream.loss)?;
        let mut grads = saved.backward(self, OP, upstream.named(), vec![], vec![])?;
        Grads::from_named(|name| grads.take(name)).map_err(absent(OP))
    }
}
