//! `retract_all`: what `retract` does, for every factor of a table over a flat buffer.

use burn_tensor::backend::Backend;
use dormouse_reference::retract_all::{Config, Outputs, RetractAll};
use dormouse_reference::{Result, Tensors, retract};

use crate::handle::{Burn, Handle};
use crate::shapes::{check, config as option, ranges};

impl<B: Backend> RetractAll for Burn<B> {
    #[inline(never)]
    fn update(&self, config: &Config, params: &Handle<B>, apply: &Handle<B>) -> Result<Outputs<Handle<B>>> {
        const OP: &str = "retract_all::update";
        let len = check(OP, &[("params", params)], |_| &["P"])?.get("P");
        for factor in &config.factors {
            let [_, n, k] = factor.shape;
            option(OP, "factors", k > 0 && n >= k, "n >= k >= 1", format!("{:?}", factor.shape))?;
        }
        let all: Vec<_> = config.factors.iter().map(|factor| factor.range()).collect();
        ranges(OP, "factors", &all, len)?;
        let each = retract::Config { iterations: config.iterations, power_iterations: config.power_iterations };
        let mut spreads = Vec::new();
        for factor in &config.factors {
            let stack = self.view(params, factor.start, &factor.shape)?;
            spreads.push(crate::retract::retract(self, OP, &each, &stack, factor.shape, apply)?);
        }
        let count = [spreads.len()];
        Ok(Outputs { spreads: self.scratch_of(self.tensor_of(spreads), &count) })
    }
}
