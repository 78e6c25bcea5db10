//! `retract`: the equations are in `dormouse_reference::retract`.
//!
//! Arm `plain` follows them product by product, one unit an element. Arm `fused` works on Gram matrices, see [`fused`].

pub(crate) mod fused;
pub(crate) mod plain;
mod polar;
mod polar_small;
mod small;

use cubecl::prelude::*;
use dormouse_reference::retract::{Config, Outputs, Retract, check_shape};
use dormouse_reference::{Error, Result, Tensors, check_one};

use crate::arm::{Arm, Mutant};
use crate::cube::larger;
use crate::device::Device;
use crate::runtime::Engine;
use crate::tensor::Tensor;

const STEM: &str = "retract";

const OP: &str = "retract::update";

/// Numbered from 1 in the kernels.
pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant::fused("no-margin"),
    Mutant::fused("power-mean-dropped"),
    Mutant::fused("square-term-dropped"),
    Mutant::fused("null-renamed-local"),
    Mutant::fused("spread-of-first-matrix"),
    Mutant::fused("power-method-dropped"),
    Mutant::fused("apply-ignored"),
    Mutant::fused("last-row-not-in-gram"),
];

/// How far above the estimate of sigma the matrix is scaled down.
const MARGIN: f32 = 1.05;

/// Pivots below this share of sigma_max^2 are rounding.
const PIVOT_FLOOR: f32 = 1e-6;

/// The polynomial's coefficients: X <- X (CONSTANT I + LINEAR A + SQUARE A^2).
const CONSTANT: f32 = 15.0 / 8.0;
const LINEAR: f32 = -5.0 / 4.0;
const SQUARE: f32 = 3.0 / 8.0;

/// One call, checked: `e` matrices of `n` by `k`.
pub(crate) struct Call<'a> {
    pub factor: &'a Tensor,
    pub apply: &'a Tensor,
    pub e: usize,
    pub n: usize,
    pub k: usize,
    pub iterations: usize,
    pub power_iterations: usize,
}

impl<R: Engine> Retract for Device<R> {
    fn update(&self, config: &Config, factor: &Tensor, apply: &Tensor) -> Result<Outputs<Tensor>> {
        for (field, count) in [("iterations", config.iterations), ("power_iterations", config.power_iterations)] {
            if count == 0 {
                return Err(Error::Config { op: OP, field, expected: "at least 1".to_owned(), got: "0".to_owned() });
            }
        }
        let [e, n, k] = check_shape(factor.shape())?;
        self.check_floats(OP, &[("apply", apply)])?;
        check_one(OP, "apply", apply.shape())?;
        self.check_into(OP, "factor", factor, &[("apply", apply)])?;
        let Config { iterations, power_iterations } = *config;
        let arm = self.forward_arm(STEM);
        if arm == Arm::Plain {
            let spread = plain::update(self, &Call { factor, apply, e, n, k, iterations, power_iterations })?;
            return Ok(Outputs { spread });
        }
        if k > fused::LARGEST_K {
            return Err(Error::Shape {
                op: OP,
                arg: "factor",
                expected: format!("k <= {} in the fused kernels; arm plain takes more", fused::LARGEST_K),
                got: factor.shape().to_vec(),
            });
        }
        let spread = self.float_scratch(&[1])?;
        if e == 0 {
            self.fill(&spread, 0.0)?;
            return Ok(Outputs { spread });
        }
        let (buffer, mutant) = (factor, self.mutant(STEM));
        let call = fused::Scalars { buffer, apply, iterations, power_iterations, mutant };
        fused::update_all(self, &call, &[(fused::Factor { start: 0, count: e, slot: 0 }, [n, k])], &spread)?;
        Ok(Outputs { spread })
    }
}

/// The golden ratio less 1 as a binary fraction: its first 32 digits and the next 16.
const GOLDEN_HIGH: u32 = 0x9e37_79b9;
const GOLDEN_LOW: u32 = 0x7f4a;

/// Element `i` of the fixed start of the power method: the fractional part of the golden ratio times (i + 1)^2, less a
/// half. In f32 that product has no fraction left for large i, so it is formed in integers, whose overflow drops the
/// whole part.
#[cube]
fn start(i: usize) -> f32 {
    let square = ((i + 1) * (i + 1)) as u32;
    let low = comptime!(GOLDEN_LOW) * (square >> 16u32) + ((comptime!(GOLDEN_LOW) * (square & 0xffffu32)) >> 16u32);
    let fraction = square * comptime!(GOLDEN_HIGH) + low;
    // Less a half, as a two's complement.
    let centred = i32::reinterpret(fraction ^ 0x8000_0000u32);
    f32::cast_from(centred) * comptime!(1.0f32 / 4_294_967_296.0f32)
}

/// (tr A^8 / k)^(1/8) from |A|_F and |(A / |A|_F)^4|_F.
#[cube]
fn eighth_power_mean(size: f32, fourth: f32, k: u32) -> f32 {
    size * (fourth * fourth / f32::cast_from(k)).sqrt().sqrt().sqrt()
}

/// The larger of the two estimates of |X|_2, from those of A's largest eigenvalue; for the fused arm.
///
/// Mutants: 2 leaves out the mean of eighth powers, 6 the power iteration's.
#[cube]
fn spectral_norm(size: f32, fourth: f32, eigenvalue: f32, k: u32, #[comptime] mutant: u32) -> f32 {
    let mut square = eigenvalue;
    let mut mean = eighth_power_mean(size, fourth, k);
    if comptime!(mutant == 6) {
        square = 0.0f32;
    }
    if comptime!(mutant == 2) {
        mean = 0.0f32;
    }
    larger(square, mean).sqrt()
}
