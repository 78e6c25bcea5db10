//! `expert`: y_e = Spectral(act; down), act = silu(Spectral(u; up)) or silu(Spectral(u; gate)) Spectral(u; up),
//! with the factors U and V of every map rounded to their format.

use burn_tensor::backend::Backend;
use dormouse_reference::expert::{Config, Expert, Ffn, Grads, Inputs, Outputs, Params};
use dormouse_reference::{Error, Result};

use crate::handle::{Burn, Handle};
use crate::maths::{flat, silu};
use crate::shapes::{absent, check, full};
use crate::spectral::map;
use crate::tape::Tape;

impl<B: Backend> Expert for Burn<B> {
    type Saved = Tape<B>;

    #[inline(never)]
    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Handle<B>>,
        params: Params<&Handle<B>>,
    ) -> Result<(Outputs<Handle<B>>, Tape<B>)> {
        const OP: &str = "expert::forward";
        full(OP, config.precision)?;
        let gated = config.ffn == Ffn::Swiglu;
        for (arg, there) in [
            ("gate_u", params.gate_u.is_some()),
            ("gate_s", params.gate_s.is_some()),
            ("gate_v", params.gate_v.is_some()),
        ] {
            if there != gated {
                let expected = if gated { "present because of swiglu" } else { "absent because of silu" };
                let got = if there { "present" } else { "absent" };
                return Err(Error::Presence { op: OP, arg, expected, got });
            }
        }
        let args = [inputs.clone().named(), params.clone().named()].concat();
        let dims = check(OP, &args, |name| match name {
            "u" => &["..", "D"],
            "up_u" | "down_v" | "gate_u" => &["E", "D", "R"],
            "up_v" | "down_u" | "gate_v" => &["E", "F", "R"],
            _ => &["E", "R"],
        })?;
        dims.positive(&["E", "D", "F", "R"])?;
        let [n, e, d, f, r] = ["N", "E", "D", "F", "R"].map(|symbol| dims.get(symbol));
        let outputs = vec![("y", [&[e], inputs.u.shape()].concat())];
        let factor = |name: &str| !name.ends_with("_s");
        let params = params
            .try_map(|name, x| if factor(name) { self.rounded(OP, name, x, config.format) } else { Ok(x.clone()) })?;
        let (mut out, tape) = Tape::run(self, OP, inputs.named(), params.as_ref().named(), outputs, move |leaves| {
            let u = leaves.get("u", [1, n, d]).repeat_dim(0, e);
            let s = |name| leaves.get(name, [e, 1, r]);
            let h = map(u.clone(), leaves.get("up_u", [e, d, r]), s("up_s"), leaves.get("up_v", [e, f, r]));
            let act = if gated {
                let g = map(u, leaves.get("gate_u", [e, d, r]), s("gate_s"), leaves.get("gate_v", [e, f, r]));
                silu(g) * h
            } else {
                silu(h)
            };
            let y = map(act, leaves.get("down_u", [e, f, r]), s("down_s"), leaves.get("down_v", [e, d, r]));
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
        const OP: &str = "expert::backward";
        let plus = plus.into_iter().map(|plus| ("u", plus)).collect();
        let mut grads = saved.backward(self, OP, upstream.named(), plus, into.named())?;
        Grads::from_named(|name| grads.take(name)).map_err(absent(OP))
    }
}
