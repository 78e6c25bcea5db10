//! The formats of spectral factors, from their definitions: what a factor is rounded to before the maths sees it.
//!
//! Straight through: the rounded factor is the leaf of the equation, so its gradient is that of the master.
//!
//! Numbers of p + 1 significant bits between 2^e and 2^(e+1) lie 2^(e-p) apart. Adding and taking away 3/2 * 2^52 of
//! that distance leaves an f64 with nothing finer, rounded to nearest with ties to even.

use burn_tensor::backend::Backend;
use dormouse_reference::{FactorFormat, Result};

use crate::handle::{Burn, Handle};

/// The whole number e with 2^e <= x < 2^(e+1), for a positive and normal x.
fn binade(x: f64) -> i32 {
    let mut e = x.log2().floor() as i32;
    // The logarithm is rounded, so next to a power of two it may be one off.
    while 2f64.powi(e) > x {
        e -= 1;
    }
    while 2f64.powi(e + 1) <= x {
        e += 1;
    }
    e
}

/// The nearest number with `bits` significant bits behind the first and no exponent below `least`; `largest` is the
/// largest one, beyond which is `beyond`.
fn round(x: f64, bits: i32, least: i32, largest: f64, beyond: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    let size = x.abs();
    let rounded = if size >= 2.0 * largest {
        f64::INFINITY
    } else {
        let e = if size < 2f64.powi(least) { least } else { binade(size) };
        let magic = 1.5 * 2f64.powi(52 + e - bits);
        (size + magic) - magic
    };
    (if rounded > largest { beyond } else { rounded }).copysign(x)
}

/// Rounds one column in place.
pub fn round_column(format: FactorFormat, column: &mut [f64]) {
    let sizes = || column.iter().map(|w| w.abs());
    match format {
        FactorFormat::F32 => {}
        FactorFormat::Bf16 => {
            // The first eight bits of f32's largest exponent.
            let largest = 2f64.powi(128) - 2f64.powi(120);
            column.iter_mut().for_each(|w| *w = round(*w, 7, -126, largest, f64::INFINITY));
        }
        FactorFormat::F16 => {
            let largest = 2f64.powi(16) - 2f64.powi(5);
            column.iter_mut().for_each(|w| *w = round(*w, 10, -14, largest, f64::INFINITY));
        }
        FactorFormat::Fp8 | FactorFormat::Ternary if sizes().any(|size| !size.is_finite()) => column.fill(f64::NAN),
        FactorFormat::Fp8 => {
            let largest = sizes().fold(0.0, f64::max);
            let mut c = 1.0;
            while largest / c > 448.0 {
                c *= 2.0;
            }
            while largest > 0.0 && largest / (c / 2.0) <= 448.0 {
                c /= 2.0;
            }
            column.iter_mut().for_each(|w| *w = c * round(*w / c, 3, -6, 448.0, 448.0));
        }
        FactorFormat::Ternary => {
            let mean = sizes().sum::<f64>() / column.len() as f64;
            let kept: Vec<f64> = sizes().filter(|size| *size > 0.7 * mean).collect();
            let m = kept.iter().sum::<f64>() / kept.len() as f64;
            column.iter_mut().for_each(|w| *w = if w.abs() > 0.7 * mean { m.copysign(*w) } else { 0.0 });
        }
    }
}

impl<B: Backend> Burn<B> {
    /// A factor `[rows, R]`, or a stack of them, as the maths sees it.
    pub(crate) fn rounded(
        &self,
        op: &'static str,
        arg: &'static str,
        factor: &Handle<B>,
        format: FactorFormat,
    ) -> Result<Handle<B>> {
        if format == FactorFormat::F32 || factor.is_empty() {
            return Ok(factor.clone());
        }
        let mut values = self.peek(op, arg, factor)?;
        let (rows, r) = match factor.shape() {
            [.., rows, r] => (*rows, *r),
            _ => unreachable!("the operation has checked that a factor has rows and columns"),
        };
        for matrix in values.chunks_mut(rows * r) {
            for j in 0..r {
                let mut column: Vec<f64> = matrix.iter().skip(j).step_by(r).copied().collect();
                round_column(format, &mut column);
                matrix.iter_mut().skip(j).step_by(r).zip(column).for_each(|(to, from)| *to = from);
            }
        }
        Ok(self.scratch_of(self.tensor_of(values), factor.shape()))
    }
}
