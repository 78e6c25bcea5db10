//! `adamw`: the equations are in `dormouse_reference::adamw`.
//!
//! With `apply` = 0 no kernel writes, so every bit stays. The bias corrections 1 - beta^t are computed where they are
//! used, because t is known to the device only.

mod fused;
mod plain;

use cubecl::prelude::*;
use dormouse_reference::adamw::{Adamw, Config, Scalars, State, check_config};
use dormouse_reference::{DType, Dims, Error, Result, check_apart, check_one};

use crate::arm::{Arm, Mutant};
use crate::device::Device;
use crate::runtime::Engine;
use crate::tensor::Tensor;

const STEM: &str = "adamw";

const OP: &str = "adamw::update";

/// Numbered from 1 in the kernels.
pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant::fused("scale-dropped"),
    Mutant::fused("one-update-late"),
    Mutant::fused("outside-moves-too"),
    Mutant::fused("null-renamed-local"),
    Mutant::fused("apply-ignored"),
    Mutant::fused("stale-first-moment"),
    Mutant::fused("decay-dropped"),
];

/// What an element outside every group has for a weight decay.
const OUTSIDE: f32 = -1.0;

/// The factors that do not change from step to step.
#[derive(Clone, Copy)]
struct Factors {
    keep_m: f32,
    take_m: f32,
    keep_v: f32,
    take_v: f32,
    eps: f32,
}

impl<R: Engine> Adamw for Device<R> {
    fn update(&self, config: &Config, state: State<&Tensor>, scalars: Scalars<&Tensor>) -> Result<()> {
        let buffers = state.clone().named();
        let mut dims = Dims::new(OP);
        for (name, buffer) in &buffers {
            dims.bind(name, buffer.shape(), &["P"])?;
        }
        check_config(config, dims.get("P"))?;
        check_apart(OP, &buffers, |a, b| a.shares_allocation(b))?;
        for (arg, scalar) in scalars.clone().named() {
            check_one(OP, arg, scalar.shape())?;
        }
        let State { params, grads, m, v } = state;
        let Scalars { lr, scale, apply, updates } = scalars;
        self.check_floats(OP, &[("lr", lr), ("scale", scale), ("apply", apply)])?;
        self.check_life(OP, "updates", updates)?;
        if updates.dtype == DType::F32 {
            return Err(Error::Storage {
                op: OP,
                arg: "updates",
                expected: "u8 or u32".to_owned(),
                got: updates.dtype,
            });
        }
        self.check_floats(OP, &[("grads", grads)])?;
        for (arg, buffer) in [("params", params), ("m", m), ("v", v)] {
            self.check_into(OP, arg, buffer, &[])?;
        }
        match self.forward_arm(STEM) {
            Arm::Plain => plain::update(self, config, &state, &scalars),
            Arm::Fused => fused::update(self, config, &state, &scalars),
        }
    }
}

impl Factors {
    /// Each rounded once.
    fn of(config: &Config) -> Self {
        let &Config { beta1, beta2, eps, .. } = config;
        Self {
            keep_m: beta1 as f32,
            take_m: (1.0 - beta1) as f32,
            keep_v: beta2 as f32,
            take_v: (1.0 - beta2) as f32,
            eps: eps as f32,
        }
    }
}

/// 1 - beta^t from `take` = 1 - beta, without ever forming beta^t, which would lose the digits of a small difference.
///
/// With c_t = 1 - beta^t, c_(a + b) = c_a + c_b (1 - c_a) and so c_(2a) = c_a (2 - c_a): sums and products of positive
/// numbers only, one or two for every binary digit of t.
#[cube]
pub(crate) fn correction(take: f32, updates: u32) -> f32 {
    let mut total = 0.0f32;
    let mut power = take;
    let mut rest = updates;
    while rest > 0u32 {
        if rest & 1u32 == 1u32 {
            total += power * (1.0f32 - total);
        }
        power = power * (2.0f32 - power);
        rest /= 2u32;
    }
    total
}
