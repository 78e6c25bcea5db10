//! The tolerances that fit any well-conditioned operation, each with its derivation.

use dormouse_reference::Precision;

use crate::compare::{Tolerance, WIDEST};
use crate::description::Tolerances;

/// Central differences with the best of a step sweep lose about eps^(2/3) = 4e-11 of the derivative to rounding and
/// truncation together; a sum over a few thousand terms and a curvature of order ten cost three more digits.
pub const FD: Tolerance = Tolerance::new(2e-7, "central difference in f64, best step: eps^(2/3) times 5000");

/// Both sides are exact derivatives in f64; sums of up to 1e5 products round by at most 1e5 eps = 2e-11, and in practice
/// by its square root.
pub const ADJ: Tolerance = Tolerance::new(1e-11, "two exact derivatives in f64, sums of up to 1e5 terms");

/// The same formula in another order of operations, f64.
pub const FORM: Tolerance = Tolerance::new(1e-12, "one formula in two orders of operation, f64: 5000 eps");

/// f32 against f64 on the same inputs: eps is 1.2e-7 (6e-8 by rounding), times the square root of a few hundred terms.
pub const DIFF_F32: Tolerance = Tolerance { slope: 2e-6, ..Tolerance::new(2e-6, "f32 rounding 6e-8 times sqrt(1000)") };

/// All of the above.
pub const WELL_CONDITIONED: Tolerances = Tolerances { fd: FD, adj: ADJ, form: FORM, diff_f32: DIFF_F32 };

/// A tensor with more elements than this has an rms and a slope that chance does not move far.
pub const FEW_ELEMENTS: usize = 64;

/// The relative rounding of one operand of a product, as rms over operands of all magnitudes.
///
/// With p significant bits an operand is at most 2^-p away, uniformly, and its mantissa m is spread evenly in log m over
/// [1, 2): the rms is 2^-p / sqrt(3) * rms(1/m) = 0.42 * 2^-p. bf16 has p = 8, so 2^-9 bounds it. tf32 has p = 11; 2^-11
/// bounds the rms of a unit that rounds (0.42 * 2^-11) and that of one that cuts off (0.83 * 2^-11).
pub const fn operand_rounding(precision: Precision) -> f64 {
    match precision {
        Precision::Full => 0.0,
        Precision::Tf32 => 1.0 / 2048.0,
        Precision::Bf16 => 1.0 / 512.0,
    }
}

/// The slope that products of rounded operands may have. Rounding has no direction, so it hardly moves a slope, while a
/// factor of 1.01 on a gradient, which hides in the rms of bf16, moves it by 0.01.
const fn slope(precision: Precision) -> f64 {
    match precision {
        Precision::Full => 1e-5,
        Precision::Tf32 => 5e-4,
        Precision::Bf16 => 5e-3,
    }
}

/// The tolerance of a tensor with `elements` elements that `products` matrix products in a row have made at a precision,
/// from the tolerance of the operation in f32. `amplification` is how much the operation enlarges relative errors.
///
/// Both operands of a product are rounded independently, so a sum of products errs by sqrt(2) roundings of its terms'
/// size, and n products in a row by sqrt(2n); twice as much is allowed, since a sum may be half the size of its terms.
/// Few elements have no statistics: there every operand may be off by as much as it can, twice [`operand_rounding`], in
/// one direction, and a slope is no more than an error.
#[must_use]
pub fn at_precision(
    f32: Tolerance,
    precision: Precision,
    products: u32,
    amplification: f64,
    elements: usize,
) -> Tolerance {
    if precision == Precision::Full || products == 0 {
        return f32;
    }
    let (rounding, products) = (operand_rounding(precision), f64::from(products));
    if elements <= FEW_ELEMENTS {
        let tol = (f32.tol + 4.0 * products * rounding * amplification).min(WIDEST);
        let why = "every operand off by two units of rounding in one direction; too few elements for an rms";
        return Tolerance { tol, slope: tol, why, ..f32 };
    }
    let tol = (f32.tol + 2.0 * (2.0 * products).sqrt() * rounding * amplification).min(WIDEST);
    let why = "2 sqrt(2 n) roundings of an operand: 2^-11 in tf32, 2^-9 in bf16, n products in a row";
    // The errors have no direction, but where few elements carry the norm they do not cancel in the slope either, and the
    // rms of so few is a matter of chance.
    Tolerance { tol, slope: slope(precision).max(f32.slope), noise: tol, why, ..f32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f32_keeps_its_tolerance_and_lower_precisions_get_wider_ones() {
        let at = |precision, products| at_precision(DIFF_F32, precision, products, 1.0, 1000);
        assert_eq!(at(Precision::Full, 4), DIFF_F32);
        assert_eq!(at(Precision::Bf16, 0), DIFF_F32);
        let (tf32, bf16) = (at(Precision::Tf32, 1), at(Precision::Bf16, 1));
        assert!(DIFF_F32.tol < tf32.tol && 3.9 * tf32.tol < bf16.tol && bf16.tol < 0.006);
        assert_eq!((tf32.slope, bf16.slope), (5e-4, 5e-3));
        assert!(at(Precision::Bf16, 8).tol > at(Precision::Bf16, 2).tol);
        // However deep an operation is, a comparison still says something.
        assert_eq!(at_precision(DIFF_F32, Precision::Bf16, 100, 10.0, 5).tol, WIDEST);
    }
}
