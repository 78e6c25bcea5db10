//! `sanitise`: counts what is not finite, takes the norm over the clip ranges, decides whether the step is applied.

use burn_tensor::Tensor;
use burn_tensor::backend::Backend;
use dormouse_reference::sanitise::{Config, Outputs, Sanitise};
use dormouse_reference::{Dims, Result};

use crate::handle::{Burn, Handle};
use crate::maths::{norm, number};
use crate::shapes::{check, config as option, ranges};

/// How many elements are NaN or infinite.
fn nonfinite<B: Backend>(x: &Tensor<B, 1>) -> f64 {
    if x.dims()[0] == 0 { 0.0 } else { number(x.ones_like().mask_fill(x.clone().is_finite(), 0.0).sum()) }
}

impl<B: Backend> Sanitise for Burn<B> {
    #[inline(never)]
    fn update(
        &self,
        config: &Config,
        grads: &Handle<B>,
        losses: &Handle<B>,
        counters: &Handle<B>,
    ) -> Result<Outputs<Handle<B>>> {
        const OP: &str = "sanitise::update";
        let len = check(OP, &[("grads", grads)], |_| &["P"])?.get("P");
        let mut dims = Dims::new(OP);
        dims.set("4", 4, "the counters");
        dims.bind("counters", counters.shape(), &["4"])?;
        dims.bind("losses", losses.shape(), &["L"])?;
        if let Some(max_norm) = config.max_norm {
            let good = max_norm > 0.0 && max_norm.is_finite();
            option(OP, "max_norm", good, "greater than zero; use None for no clipping", max_norm)?;
        }
        ranges(OP, "clip", &config.clip, len)?;
        let g = self.read(OP, "grads", grads)?;
        let bad = nonfinite(&g) + nonfinite(&self.read(OP, "losses", losses)?);
        // Relative to the largest element no square leaves the range of the type. A norm of norms is the norm of all.
        let mut norms = Vec::new();
        for range in config.clip.iter().filter(|range| !range.is_empty()) {
            let part = g.clone().slice(range.clone());
            let part = part.clone().mask_fill(part.is_finite().bool_not(), 0.0);
            let largest = number(part.clone().abs().max());
            norms.push(if largest == 0.0 { 0.0 } else { largest * norm(part.div_scalar(largest)) });
        }
        let largest = norms.iter().copied().fold(0.0, f64::max);
        let total = if largest == 0.0 || largest.is_infinite() {
            largest
        } else {
            largest * norms.iter().map(|n| (n / largest) * (n / largest)).sum::<f64>().sqrt()
        };
        let scale = config.max_norm.map_or(1.0, |max| (max / total).min(1.0));
        let counts = self.read_integers(OP, "counters", counters)?.into_data().iter::<i64>().collect::<Vec<_>>();
        let [updates, skipped, in_window, latched] = counts[..] else {
            unreachable!("the shape was checked to be [4]")
        };
        let skip = i64::from(bad > 0.0);
        let apply = i64::from(skip == 0 && latched == 0);
        let closes = skip == 1 && in_window + 1 > i64::from(config.skips_allowed);
        let top = i64::from(u32::MAX);
        let after = vec![
            (updates + apply).min(top),
            (skipped + skip).min(top),
            (in_window + skip).min(top),
            if closes { 1 } else { latched },
        ];
        self.write_integers(OP, "counters", counters, after)?;
        let one = |x: f64| self.scratch_of(self.tensor_of(vec![x]), &[1]);
        Ok(Outputs { norm: one(total), nonfinite: one(bad), scale: one(scale), apply: one(apply as f64) })
    }
}
