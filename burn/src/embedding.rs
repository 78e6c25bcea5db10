//! `embedding`: x_n = table[id_n].

use burn_tensor::Tensor;
use burn_tensor::backend::Backend;
use dormouse_reference::embedding::{Config, Embedding, Inputs, Outputs, Params};
use dormouse_reference::{Error, Result};

use crate::handle::{Burn, Handle};
use crate::maths::flat;
use crate::shapes::{absent, check};
use crate::tape::Tape;

impl<B: Backend> Embedding for Burn<B> {
    type Saved = Tape<B>;

    #[inline(never)]
    fn forward(
        &self,
        _: &Config,
        inputs: Inputs<&Handle<B>>,
        params: Params<&Handle<B>>,
    ) -> Result<(Outputs<Handle<B>>, Tape<B>)> {
        const OP: &str = "embedding::forward";
        let dims = check(OP, &params.clone().named(), |_| &["vocab", "D"])?;
        dims.positive(&["vocab", "D"])?;
        let (vocab, d) = (dims.get("vocab"), dims.get("D"));
        let ids = self.read_integers(OP, "ids", inputs.ids)?;
        if let Some((n, got)) =
            self.peek(OP, "ids", inputs.ids)?.into_iter().enumerate().find(|(_, id)| *id >= vocab as f64)
        {
            return Err(Error::Value {
                op: OP,
                arg: "ids",
                expected: format!("below vocab = {vocab}"),
                got,
                index: vec![n],
            });
        }
        let outputs = vec![("x", [inputs.ids.shape(), &[d]].concat())];
        let (mut out, tape) = Tape::run(self, OP, vec![], params.named(), outputs, move |leaves| {
            let ids = Tensor::from_inner(ids.clone());
            vec![flat(leaves.get("table", [vocab, d]).select(0, ids))]
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
    ) -> Result<()> {
        saved.backward(self, "embedding::backward", upstream.named(), vec![], into.named())?;
        Ok(())
    }
}
