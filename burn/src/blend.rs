//! `blend`: y = w_attn attn + lam memory + (1 - lam) dense + w_ffn sum_e p_e experts_e, lam = lam_max m.

use burn_tensor::backend::Backend;
use dormouse_reference::blend::{Blend, Config, Grads, Inputs, Outputs};
use dormouse_reference::controller::FIXED_GATES;
use dormouse_reference::{Dims, Error, Result};

use crate::handle::{Burn, Handle};
use crate::maths::flat;
use crate::shapes::{absent, check, config as option};
use crate::tape::Tape;

impl<B: Backend> Blend for Burn<B> {
    type Saved = Tape<B>;

    #[inline(never)]
    fn forward(&self, config: &Config, inputs: Inputs<&Handle<B>>) -> Result<(Outputs<Handle<B>>, Tape<B>)> {
        const OP: &str = "blend::forward";
        option(OP, "lam_max", (0.0..=1.0).contains(&config.lam_max), "in [0, 1]", config.lam_max)?;
        let args = inputs.clone().named();
        let rows: Vec<_> = args.iter().filter(|(name, _)| !["gates", "experts"].contains(name)).copied().collect();
        let dims = check(OP, &rows, |_| &["..", "D"])?;
        dims.positive(&["D"])?;
        let (n, d) = (dims.get("N"), dims.get("D"));
        let experts = inputs.experts.shape().first().copied().unwrap_or(0);
        let stack = [&[experts], inputs.attn.shape()].concat();
        if experts == 0 || inputs.experts.len() != experts * n * d || inputs.experts.shape().last() != Some(&d) {
            let (expected, got) = (format!("[E >= 1, .., D] = {stack:?}"), inputs.experts.shape().to_vec());
            return Err(Error::Shape { op: OP, arg: "experts", expected, got });
        }
        let count = FIXED_GATES + experts;
        let mut gates = Dims::new(OP);
        gates.set("N", n, "attn");
        gates.set("3+E", count, "experts");
        gates.bind_rows("gates", inputs.gates.shape(), "N", &["3+E"])?;
        let (lam_max, outputs) = (config.lam_max, vec![("y", inputs.attn.shape().to_vec())]);
        let (mut out, tape) = Tape::run(self, OP, inputs.named(), vec![], outputs, move |leaves| {
            let all = leaves.get("gates", [n, count]);
            let gate = |at: usize| all.clone().narrow(1, at, 1);
            let row = |name| leaves.get(name, [n, d]);
            let lam = gate(1).mul_scalar(lam_max);
            let mut y = gate(0) * row("attn") + lam.clone().neg().add_scalar(1.0) * row("dense");
            if let Some(memory) = leaves.find("memory", [n, d]) {
                y = y + lam * memory;
            }
            let shares = all.clone().narrow(1, FIXED_GATES, experts).swap_dims(0, 1).reshape([experts, n, 1]);
            let mixed = (shares * leaves.get("experts", [experts, n, d])).sum_dim(0).reshape([n, d]);
            vec![flat(y + gate(2) * mixed)]
        })?;
        Ok((Outputs::from_named(|name| out.take(name)).map_err(absent(OP))?, tape))
    }

    #[inline(never)]
    fn backward(&self, _: &Config, saved: &Tape<B>, upstream: Outputs<&Handle<B>>) -> Result<Grads<Handle<B>>> {
        const OP: &str = "blend::backward";
        let mut grads = saved.backward(self, OP, upstream.named(), vec![], vec![])?;
        Grads::from_named(|name| grads.take(name)).map_err(absent(OP))
    }
}
