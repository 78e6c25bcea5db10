//! `adamw`: m <- beta1 m + (1 - beta1) g, v <- beta2 v + (1 - beta2) g^2,
//! p <- p - lr (m^ / (v^^(1/2) + eps) + weight_decay p), with m^ and v^ corrected for their start at zero.

use burn_tensor::backend::Backend;
use dormouse_reference::Result;
use dormouse_reference::adamw::{Adamw, Config, Scalars, State};

use crate::handle::{Burn, Handle};
use crate::maths::square;
use crate::shapes::{apart, check, config as option, ranges};

impl<B: Backend> Adamw for Burn<B> {
    #[inline(never)]
    fn update(&self, config: &Config, state: State<&Handle<B>>, scalars: Scalars<&Handle<B>>) -> Result<()> {
        const OP: &str = "adamw::update";
        let args = state.clone().named();
        let len = check(OP, &args, |_| &["P"])?.get("P");
        apart(OP, &args)?;
        for (field, beta) in [("beta1", config.beta1), ("beta2", config.beta2)] {
            option(OP, field, (0.0..1.0).contains(&beta), "in [0, 1)", beta)?;
        }
        option(OP, "eps", config.eps > 0.0, "greater than zero", config.eps)?;
        for group in &config.groups {
            option(OP, "weight_decay", group.weight_decay >= 0.0, "zero or greater", group.weight_decay)?;
        }
        let all: Vec<_> = config.groups.iter().map(|group| group.range.clone()).collect();
        ranges(OP, "groups", &all, len)?;
        let Scalars { lr, scale, apply, updates } = scalars.try_map(|name, x| self.peek_one(OP, name, x))?;
        for group in config.groups.iter().filter(|group| apply == 1.0 && !group.range.is_empty()) {
            let State { params, grads, m, v } = state
                .clone()
                .try_map(|_, x| dormouse_reference::Tensors::view(self, x, group.range.start, &[group.range.len()]))?;
            let p = self.read(OP, "params", &params)?;
            let g = self.read(OP, "grads", &grads)?.mul_scalar(scale);
            let first = self.read(OP, "m", &m)?.mul_scalar(config.beta1) + g.clone().mul_scalar(1.0 - config.beta1);
            let second = self.read(OP, "v", &v)?.mul_scalar(config.beta2) + square(g).mul_scalar(1.0 - config.beta2);
            let corrected = |x: &burn_tensor::Tensor<B, 1>, beta: f64| x.clone().div_scalar(1.0 - beta.powf(updates));
            let step =
                corrected(&first, config.beta1) / (corrected(&second, config.beta2).sqrt().add_scalar(config.eps));
            let moved = p.clone() - (step + p.mul_scalar(group.weight_decay)).mul_scalar(lr);
            self.write(OP, "params", &params, moved)?;
            self.write(OP, "m", &m, first)?;
            self.write(OP, "v", &v, second)?;
        }
        Ok(())
    }
}
