//! `cross_entropy`: the mean over kept positions of ln(sum_c e^z_c) - z_t.

use burn_tensor::backend::Backend;
use burn_tensor::{Bool, Int, Tensor};
use dormouse_reference::cross_entropy::{Config, CrossEntropy, Grads, Inputs, Outputs};
use dormouse_reference::{Dims, Error, Result};

use crate::handle::{Burn, Handle};
use crate::maths::flat;
use crate::shapes::{absent, check};
use crate::tape::{Tape, Tracked};

/// ln(sum_c e^z_c) - z_t for rows z of `[N, C]` and t of `[N, 1]`, as `[N, 1]`.
///
/// With a the largest logit's place this is ln(1 + sum_{c != a} e^(z_c - z_a)) + (z_a - z_t). The second term is left
/// out where t = a, gradient and all, so that a confident model's loss is not what remains of larger numbers.
fn negative_log_likelihood<A: Backend>(z: Tensor<A, 2>, t: Tensor<A, 2, Int>) -> Tensor<A, 2> {
    let [n, c] = z.dims();
    let largest = z.clone().argmax(1);
    let classes = Tensor::<A, 1, Int>::arange(0..c as i64, &z.device()).reshape([1, c]).expand([n, c]);
    let is_largest: Tensor<A, 2, Bool> = classes.equal(largest.clone().expand([n, c]));
    let others = z.ones_like().mask_fill(is_largest, 0.0);
    let z_largest = z.clone().gather(1, largest.clone());
    let rest = ((z.clone() - z_largest.clone()).exp() * others).sum_dim(1);
    let gap = (z_largest - z.gather(1, t.clone())).mask_fill(largest.equal(t), 0.0);
    rest.log1p() + gap
}

impl<B: Backend> CrossEntropy for Burn<B> {
    type Saved = Tape<B>;

    #[inline(never)]
    fn forward(&self, config: &Config, inputs: Inputs<&Handle<B>>) -> Result<(Outputs<Handle<B>>, Tape<B>)> {
        const OP: &str = "cross_entropy::forward";
        let Inputs { logits, targets, mask } = inputs;
        let dims = check(OP, &[("logits", logits)], |_| &["..", "C"])?;
        dims.positive(&["C"])?;
        let (n, c) = (dims.get("N"), dims.get("C"));
        for (name, tensor) in [("targets", Some(targets)), ("mask", mask)] {
            if let Some(tensor) = tensor {
                let mut positions = Dims::new(OP);
                positions.set("N", n, "logits");
                positions.bind(name, &[tensor.len()], &["N"])?;
            }
        }
        let classes = self.peek(OP, "targets", targets)?;
        if let Some((at, &got)) = classes.iter().enumerate().find(|(_, t)| **t >= c as f64) {
            return Err(Error::Value {
                op: OP,
                arg: "targets",
                expected: format!("below C = {c}"),
                got,
                index: vec![at],
            });
        }
        let t = self.read_integers(OP, "targets", targets)?;
        let kept = match mask {
            Some(mask) => self.peek(OP, "mask", mask)?,
            None => vec![1.0; n],
        };
        let count = kept.iter().sum::<f64>();
        let denominator = config.denominator.map_or(count, |n| n as f64);
        let factor = if denominator == 0.0 { 0.0 } else { denominator.recip() };
        let kept = self.tensor_of(kept);
        let outputs = vec![("loss", vec![1]), ("nll", targets.shape().to_vec())];
        let zero = self.tensor_of(vec![0.0]);
        let (mut out, tape) = Tape::run(self, OP, vec![("logits", logits)], vec![], outputs, move |leaves| {
            if n == 0 {
                return vec![Tensor::from_inner(zero.clone()), leaves.get("logits", [0])];
            }
            // A position that does not count may hold anything, NaN included: it is replaced before anything reads it.
            let kept: Tensor<Tracked<B>, 1> = Tensor::from_inner(kept.clone());
            let out = kept.reshape([n, 1]).equal_elem(0.0);
            let z = leaves.get("logits", [n, c]).mask_fill(out.clone().expand([n, c]), 0.0);
            let t = Tensor::from_inner(t.clone()).reshape([n, 1]);
            let nll = negative_log_likelihood(z, t).mask_fill(out, 0.0);
            vec![nll.clone().sum().mul_scalar(factor), flat(nll)]
        })?;
        Ok((Outputs::from_named(|name| out.take(name)).map_err(absent(OP))?, tape))
    }

    #[inline(never)]
    fn backward(&self, _: &Config, saved: &Tape<B>, upstream: Outputs<&Handle<B>>) -> Result<Grads<Handle<B>>> {
        const OP: &str = "cross_entropy::backward";
        if upstream.nll.is_some() {
            let expected = "absent because it is a diagnostic";
            return Err(Error::Presence { op: OP, arg: "nll", expected, got: "present" });
        }
        let mut grads = saved.backward(self, OP, upstream.named(), vec![], vec![])?;
        Grads::from_named(|name| grads.take(name)).map_err(absent(OP))
    }
}
