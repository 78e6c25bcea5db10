//! `ema`: the equation is in `dormouse_reference::ema`.
//!
//! It is computed as teacher + take (online - teacher), so a teacher equal to its model stays equal. With `apply` = 0 no
//! kernel writes, so every bit stays.

mod fused;
mod plain;

use dormouse_reference::Result;
use dormouse_reference::ema::{Config, Ema, Inputs, check};

use crate::arm::{Arm, Mutant};
use crate::device::Device;
use crate::runtime::Engine;
use crate::tensor::Tensor;

const STEM: &str = "ema";

const OP: &str = "ema::update";

/// Numbered from 1 in the kernels.
pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant::fused("shares-swapped"),
    Mutant::fused("apply-ignored"),
    Mutant::fused("outside-moves-too"),
    Mutant::fused("null-renamed-local"),
    Mutant::fused("last-element-missed"),
    Mutant { name: "shares-miss-one", arm: Arm::Fused, gate: "meta" },
];

/// 1 - momentum, rounded once: in f32 the difference would keep few digits.
fn take(config: &Config) -> f32 {
    (1.0 - config.momentum) as f32
}

impl<R: Engine> Ema for Device<R> {
    fn update(&self, config: &Config, inputs: Inputs<&Tensor>) -> Result<()> {
        check(config, inputs.clone().map(|_, t| t.shape()))?;
        let Inputs { teacher, online, apply } = inputs;
        self.check_floats(OP, &[("online", online), ("apply", apply)])?;
        self.check_into(OP, "teacher", teacher, &[])?;
        if teacher.shares_allocation(online) {
            return Err(dormouse_reference::Error::Aliased { op: OP, arg: "teacher", other: "online" });
        }
        match self.forward_arm(STEM) {
            Arm::Plain => plain::update(self, config, &inputs),
            Arm::Fused => fused::update(self, config, &inputs),
        }
    }
}
