//! `sanitise`: the equations are in `dormouse_reference::sanitise`.
//!
//! The reference adds squares in f64, where none over- or underflows. A device has f32 only, so squares are added of
//! scaled magnitudes and the scale is put back into the norm: arm `plain` divides by the largest magnitude first, which
//! takes a second pass; arm `fused` keeps three sums with a power of two each. What is finite is seen from the bits, so
//! no compiler's idea of NaN matters, and counted in integers.

mod fused;
mod plain;

use cubecl::prelude::*;
use dormouse_reference::sanitise::{Config, Outputs, Sanitise, check_config};
use dormouse_reference::{DType, Dims, Error, Result, Tensors};

use crate::arm::{Arm, Mutant};
use crate::device::Device;
use crate::ranges::{self, Piece};
use crate::runtime::Engine;
use crate::tensor::{Floats, Life, Tensor, Words};

const STEM: &str = "sanitise";

const OP: &str = "sanitise::update";

/// Numbered from 1 in the kernels.
pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant::fused("norm-of-everything"),
    Mutant::fused("loss-not-counted"),
    Mutant::fused("large-dropped"),
    Mutant::fused("null-renamed-local"),
    Mutant::fused("latch-one-early"),
    Mutant::fused("small-dropped"),
    Mutant::fused("scaled-up-too"),
    Mutant::fused("latch-ignored"),
];

/// One call, checked.
struct Call<'a> {
    grads: &'a Tensor,
    losses: &'a Tensor,
    counters: &'a Tensor,
    /// The whole of `grads`; the value is 1 inside the clip ranges and 0 outside.
    pieces: Vec<Piece>,
    /// 0 for none.
    max_norm: f32,
    skips_allowed: u32,
}

impl<R: Engine> Sanitise for Device<R> {
    fn update(&self, config: &Config, grads: &Tensor, losses: &Tensor, counters: &Tensor) -> Result<Outputs<Tensor>> {
        let mut dims = Dims::new(OP);
        dims.bind("grads", grads.shape(), &["P"])?;
        check_config(OP, config, grads.len())?;
        if counters.shape() != [4] {
            let got = counters.shape().to_vec();
            return Err(Error::Shape { op: OP, arg: "counters", expected: "[4]".to_owned(), got });
        }
        dims.bind("losses", losses.shape(), &["L"])?;
        self.check_floats(OP, &[("losses", losses), ("grads", grads)])?;
        if counters.life != Life::Persistent {
            return Err(Error::NotPersistent { op: OP, arg: "counters" });
        }
        if counters.dtype != DType::U32 {
            return Err(Error::Storage { op: OP, arg: "counters", expected: "u32".to_owned(), got: counters.dtype });
        }
        let clip = config.clip.iter().map(|range| (range.clone(), 1.0));
        let call = Call {
            grads,
            losses,
            counters,
            pieces: ranges::pieces(grads.len(), clip, 0.0),
            max_norm: config.max_norm.map_or(0.0, |max_norm| (max_norm as f32).max(f32::MIN_POSITIVE)),
            skips_allowed: config.skips_allowed,
        };
        let outputs = match self.forward_arm(STEM) {
            Arm::Plain => plain::update(self, &call)?,
            Arm::Fused => fused::update(self, &call)?,
        };
        let one = |place| self.view(&outputs, place, &[1]);
        Ok(Outputs { norm: one(0)?, nonfinite: one(1)?, scale: one(2)?, apply: one(3)? })
    }
}

/// Bits of infinity: magnitudes from here on are not finite.
const INFINITY: u32 = 0x7f80_0000;

/// The bits of a float's magnitude, which are in the order of magnitudes.
#[cube]
fn magnitude(bits: u32) -> u32 {
    bits & 0x7fff_ffffu32
}

/// 1 for the bits of NaN or an infinity, else 0.
#[cube]
fn not_finite(bits: u32) -> u32 {
    let mut one = 0u32;
    if magnitude(bits) >= comptime!(INFINITY) {
        one = 1u32;
    }
    one
}

/// Writes (norm, nonfinite, scale, apply) and advances the counters. One unit of the launch calls it.
///
/// Mutants: 5 closes the latch one skip early, 8 ignores it.
#[cube]
fn decide(
    norm: f32,
    nonfinite: u32,
    scale: f32,
    counters: &mut Words,
    outputs: &mut Floats,
    skips_allowed: u32,
    #[comptime] mutant: u32,
) {
    let mut apply = 0.0f32;
    let mut latched = counters.at(3);
    if comptime!(mutant == 8) {
        latched = 0u32;
    }
    if nonfinite == 0u32 {
        if latched == 0u32 {
            apply = 1.0f32;
            counters.set(0, one_more(counters.at(0)));
        }
    } else {
        counters.set(1, one_more(counters.at(1)));
        let in_window = one_more(counters.at(2));
        counters.set(2, in_window);
        let mut allowed = skips_allowed;
        if comptime!(mutant == 5) {
            allowed = skips_allowed - 1u32;
        }
        if in_window > allowed {
            counters.set(3, 1u32);
        }
    }
    outputs.set(0, norm);
    outputs.set(1, f32::cast_from(nonfinite));
    outputs.set(2, scale);
    outputs.set(3, apply);
}

/// n + 1, or n if there is no larger one.
#[cube]
fn one_more(n: u32) -> u32 {
    let mut next = n;
    if n < 0xffff_ffffu32 {
        next = n + 1u32;
    }
    next
}
