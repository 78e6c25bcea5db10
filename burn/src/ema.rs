//! `ema`: teacher <- momentum teacher + (1 - momentum) online.

use burn_tensor::backend::Backend;
use dormouse_reference::ema::{Config, Ema, Inputs};
use dormouse_reference::{Result, Tensors};

use crate::handle::{Burn, Handle};
use crate::shapes::{apart, check, config as option, ranges};

impl<B: Backend> Ema for Burn<B> {
    #[inline(never)]
    fn update(&self, config: &Config, inputs: Inputs<&Handle<B>>) -> Result<()> {
        const OP: &str = "ema::update";
        let buffers = [("teacher", inputs.teacher), ("online", inputs.online)];
        let len = check(OP, &buffers, |_| &["P"])?.get("P");
        apart(OP, &buffers)?;
        option(OP, "momentum", (0.0..=1.0).contains(&config.momentum), "in [0, 1]", config.momentum)?;
        ranges(OP, "ranges", &config.ranges, len)?;
        let apply = self.peek_one(OP, "apply", inputs.apply)?;
        for range in config.ranges.iter().filter(|range| apply == 1.0 && !range.is_empty()) {
            let teacher = self.view(inputs.teacher, range.start, &[range.len()])?;
            let online = self.read(OP, "online", &self.view(inputs.online, range.start, &[range.len()])?)?;
            let kept = self.read(OP, "teacher", &teacher)?.mul_scalar(config.momentum);
            self.write(OP, "teacher", &teacher, kept + online.mul_scalar(1.0 - config.momentum))?;
        }
        Ok(())
    }
}
