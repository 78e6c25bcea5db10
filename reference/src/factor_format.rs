//! The formats that the factors of a spectral map may be rounded to, where the forward pass uses them.
//!
//! The masters stay as they are, f32; a format says which numbers the maths sees instead:
//!
//! | format | the column w becomes |
//! |---|---|
//! | `f32` | w |
//! | `bf16` | each element rounded to bfloat16 |
//! | `f16` | each element rounded to IEEE binary16; infinite from 65520 on |
//! | `fp8` | c e4m3(w / c), c the least power of two with max \|w\| / c <= 448 |
//! | `ternary` | sign(w) m where \|w\| > 0.7 mean \|w\|, else 0; m the mean of the \|w\| that are kept |
//!
//! Rounding is to nearest, ties to even, and subnormal numbers of a format are kept. e4m3 is that of the Open Compute
//! Project: four exponent bits of bias 7, three mantissa bits, the largest number 448, no infinity, and beyond 448 it
//! saturates. A column that is not finite is NaN throughout in `fp8` and `ternary`, so that no scale hides it.
//!
//! The scale of `fp8` is a power of two, so dividing by it rounds nothing: the format has the same bits at every
//! precision and on every device, and rounding twice is rounding once. Everything here is computed in f64, whatever the
//! type of the factor, for the same reason; sums run down the column in order.
//!
//! The adjoint passes a rounding by ("straight through"): the gradient of the rounded factor is that of the master.
//!
//! Sources: Micikevicius et al., *FP8 Formats for Deep Learning*, arXiv 2209.05433, and the OCP *8-bit Floating Point
//! Specification*, revision 1.0; Li et al., *Ternary Weight Networks*, arXiv 1605.04711; Bengio et al., *Estimating or
//! Propagating Gradients Through Stochastic Neurons*, arXiv 1308.3432.

use std::fmt;
use std::str::FromStr;

use ndarray::{Array2, ArrayView2, Axis, CowArray, Ix2};

use crate::scalar::Scalar;

/// The largest number of e4m3.
pub const E4M3_MAX: f64 = 448.0;

/// Elements of a ternary column are kept above this share of the column's mean magnitude.
pub const TERNARY_SHARE: f64 = 0.7;

/// What the factors U and V of a spectral map are rounded to before they are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FactorFormat {
    /// Nothing: the masters themselves.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    F16,
    /// OCP e4m3 with one scale a column.
    Fp8,
    /// Minus one, zero or one, with one scale a column.
    Ternary,
}

impl FactorFormat {
    /// Every format.
    pub const ALL: [FactorFormat; 5] =
        [FactorFormat::F32, FactorFormat::Bf16, FactorFormat::F16, FactorFormat::Fp8, FactorFormat::Ternary];

    /// The word in configurations and tables.
    pub fn word(self) -> &'static str {
        match self {
            FactorFormat::F32 => "f32",
            FactorFormat::Bf16 => "bf16",
            FactorFormat::F16 => "f16",
            FactorFormat::Fp8 => "fp8",
            FactorFormat::Ternary => "ternary",
        }
    }

    /// The factor `[rows, R]` as the maths sees it; `F32` copies nothing.
    pub fn apply<T: Scalar>(self, factor: ArrayView2<'_, T>) -> CowArray<'_, T, Ix2> {
        if self == FactorFormat::F32 {
            return factor.into();
        }
        let mut rounded = Array2::zeros(factor.raw_dim());
        for (from, mut to) in factor.axis_iter(Axis(1)).zip(rounded.axis_iter_mut(Axis(1))) {
            let mut column: Vec<f64> = from.iter().map(|w| w.to_f64()).collect();
            self.round_column(&mut column);
            to.iter_mut().zip(&column).for_each(|(to, &w)| *to = T::from_f64(w));
        }
        rounded.into()
    }

    /// Rounds one column in place.
    pub fn round_column(self, column: &mut [f64]) {
        match self {
            FactorFormat::F32 => {}
            FactorFormat::Bf16 => column.iter_mut().for_each(|w| *w = bf16(*w)),
            FactorFormat::F16 => column.iter_mut().for_each(|w| *w = f16(*w)),
            FactorFormat::Fp8 => fp8(column),
            FactorFormat::Ternary => ternary(column),
        }
    }
}

impl fmt::Display for FactorFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// A word that is no format.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no format of factors, expected f32, bf16, f16, fp8 or ternary")]
pub struct UnknownFormat(String);

impl FromStr for FactorFormat {
    type Err = UnknownFormat;

    fn from_str(word: &str) -> Result<Self, UnknownFormat> {
        Self::ALL.into_iter().find(|format| format.word() == word).ok_or_else(|| UnknownFormat(word.to_owned()))
    }
}

/// `x` as the nearest number of bfloat16, ties to even; infinite beyond its range.
pub fn bf16(x: f64) -> f64 {
    // 1.1111111 in binary times 2^127.
    let largest = 255.0 * 2f64.powi(120);
    overflow(nearest(x, 7, -126), largest)
}

/// `x` as the nearest number of IEEE binary16, ties to even; infinite beyond its range.
pub fn f16(x: f64) -> f64 {
    overflow(nearest(x, 10, -14), 65504.0)
}

/// `x` as the nearest number of e4m3, ties to even; beyond 448 that is 448, and NaN stays NaN.
pub fn e4m3(x: f64) -> f64 {
    nearest(x, 3, -6).clamp(-E4M3_MAX, E4M3_MAX)
}

/// `x` rounded to this many mantissa bits, ties to even. Below 2^`least`, the smallest normal number, the spacing of
/// numbers stays what it is there. Knows no largest number.
fn nearest(x: f64, mantissa: i32, least: i32) -> f64 {
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    let step = 2f64.powi(exponent(x).max(least) - mantissa);
    // Both operations by a power of two are exact, so this rounds once.
    (x / step).round_ties_even() * step
}

/// Infinity for what rounded beyond a format's largest number.
fn overflow(x: f64, largest: f64) -> f64 {
    if x.abs() > largest { f64::INFINITY.copysign(x) } else { x }
}

/// The scale of an `fp8` column with this largest magnitude: the least power of two that brings it to at most 448. A
/// column of zeros has scale 1.
pub fn fp8_scale(largest: f64) -> f64 {
    if largest == 0.0 {
        return 1.0;
    }
    // 448 = 1.75 * 2^8.
    let scale = 2f64.powi(exponent(largest) - 8);
    if largest / scale > E4M3_MAX { 2.0 * scale } else { scale }
}

/// The k with 2^k <= |x| < 2^(k + 1), for x neither zero nor infinite nor NaN.
fn exponent(x: f64) -> i32 {
    const BIAS: i32 = 1023;
    const BITS: u32 = 52;
    let biased = (x.abs().to_bits() >> BITS) as i32;
    if biased > 0 {
        return biased - BIAS;
    }
    // A subnormal f64: below anything that f32 holds, and scaled up it is ordinary.
    exponent(x * 2f64.powi(BITS as i32)) - BITS as i32
}

fn fp8(column: &mut [f64]) {
    if spoiled(column) {
        return;
    }
    let scale = fp8_scale(column.iter().fold(0.0, |largest, w| w.abs().max(largest)));
    column.iter_mut().for_each(|w| *w = e4m3(*w / scale) * scale);
}

fn ternary(column: &mut [f64]) {
    if spoiled(column) {
        return;
    }
    let mean = column.iter().map(|w| w.abs()).sum::<f64>() / column.len().max(1) as f64;
    let kept = |w: f64| w.abs() > TERNARY_SHARE * mean;
    let (count, sum) =
        column.iter().filter(|w| kept(**w)).fold((0usize, 0.0), |(count, sum), w| (count + 1, sum + w.abs()));
    let magnitude = sum / count.max(1) as f64;
    column.iter_mut().for_each(|w| *w = if kept(*w) { magnitude.copysign(*w) } else { 0.0 });
}

/// Makes a column with an element that is not finite NaN throughout, and says whether it did.
fn spoiled(column: &mut [f64]) -> bool {
    let spoiled = column.iter().any(|w| !w.is_finite());
    if spoiled {
        column.fill(f64::NAN);
    }
    spoiled
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;

    /// Every non-negative number of e4m3, by its code: S.EEEE.MMM without the sign.
    fn codes() -> Vec<f64> {
        (0..=0x7e)
            .map(|code| {
                let (exponent, mantissa) = (code >> 3, f64::from(code & 7));
                if exponent == 0 { mantissa / 512.0 } else { (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7) }
            })
            .collect()
    }

    #[test]
    fn e4m3_keeps_its_numbers_and_rounds_between_them_to_the_nearest_or_the_even_one() {
        let codes = codes();
        assert_eq!((codes[1], codes[8], codes[126]), (2f64.powi(-9), 2f64.powi(-6), 448.0));
        for (code, pair) in codes.windows(2).enumerate() {
            let (low, high) = (pair[0], pair[1]);
            let middle = 0.5 * (low + high);
            let even = if code % 2 == 0 { low } else { high };
            for (x, want) in [
                (low, low),
                (high, high),
                (middle, even),
                (middle * (1.0 - f64::EPSILON), low),
                (middle * (1.0 + f64::EPSILON), high),
            ] {
                assert_eq!(e4m3(x), want, "{x:e}");
                assert_eq!(e4m3(-x), -want, "{x:e}");
            }
        }
    }

    #[test]
    fn e4m3_saturates_and_keeps_nan_and_the_sign_of_zero() {
        for x in [448.1, 463.0, 464.0, 465.0, 1e300, f64::INFINITY] {
            assert_eq!((e4m3(x), e4m3(-x)), (448.0, -448.0));
        }
        assert!(e4m3(f64::NAN).is_nan());
        assert_eq!(e4m3(-0.0).to_bits(), (-0.0f64).to_bits());
        // Half of the least number ties with zero, which is even.
        assert_eq!(e4m3(2f64.powi(-10)), 0.0);
        assert_eq!(e4m3(f64::MIN_POSITIVE / 4.0), 0.0);
    }

    #[test]
    fn the_scale_of_a_column_is_the_least_power_of_two_that_fits() {
        for (largest, scale) in [
            (448.0, 1.0),
            (448.0 * (1.0 + f64::EPSILON), 2.0),
            (512.0, 2.0),
            (1.0, 1.0 / 256.0),
            (0.0, 1.0),
            (f64::from(f32::MAX), 2f64.powi(120)),
            (f64::from(f32::from_bits(1)), 2f64.powi(-157)),
        ] {
            assert_eq!(fp8_scale(largest), scale, "{largest:e}");
        }
    }

    #[test]
    fn columns_have_scales_of_their_own() {
        // Beside 1 the scale is 2^-8; beside 1000 it is 4, and 0.0039 lies under half the least number.
        let factor = array![[1.0f32, 1000.0], [0.0039, 0.0039]];
        let fp8 = FactorFormat::Fp8.apply(factor.view());
        // 0.0039 * 256 = 0.9984 rounds to 1; 1000 / 4 = 250 rounds to 256, since numbers are 16 apart from 128 on.
        assert_eq!(fp8, array![[1.0f32, 1024.0], [1.0 / 256.0, 0.0]]);
        let factor = array![[1.0f32, -4.0], [3.0, 2.0], [-2.0, 0.0]];
        let ternary = FactorFormat::Ternary.apply(factor.view());
        // Means 2 and 2: 1 is below 1.4, and 4, 3, 2, 2 are above.
        assert_eq!(ternary, array![[0.0f32, -3.0], [2.5, 3.0], [-2.5, 0.0]]);
    }

    #[test]
    fn bf16_and_f16_round_to_even_keep_subnormals_and_overflow_as_ieee_says() {
        // Eight and eleven significant bits; a tie goes to the even neighbour, above or below.
        assert_eq!((bf16(1.0 + 1.0 / 256.0), bf16(1.0 + 3.0 / 256.0)), (1.0, 1.0 + 4.0 / 256.0));
        assert_eq!((f16(1.0 + 1.0 / 2048.0), f16(1.0 + 3.0 / 2048.0)), (1.0, 1.0 + 4.0 / 2048.0));
        // Just above a tie it is not a tie, however little above.
        assert_eq!(bf16(1.0 + 1.0 / 256.0 + 2f64.powi(-40)), 1.0 + 1.0 / 128.0);
        assert_eq!(f16(1.0 + 1.0 / 2048.0 + 2f64.powi(-40)), 1.0 + 1.0 / 1024.0);
        assert_eq!(
            (f16(2f64.powi(-24)), f16(2f64.powi(-25)), f16(1.5 * 2f64.powi(-24))),
            (2f64.powi(-24), 0.0, 2f64.powi(-23))
        );
        assert_eq!((bf16(2f64.powi(-133)), bf16(2f64.powi(-134))), (2f64.powi(-133), 0.0));
        assert_eq!((f16(65519.0), f16(65520.0), f16(-1e9)), (65504.0, f64::INFINITY, f64::NEG_INFINITY));
        assert_eq!(bf16(f64::from(f32::MAX)), f64::INFINITY);
        assert!(bf16(f64::NAN).is_nan() && f16(f64::NAN).is_nan());
        let factor = array![[1.01f32], [-1e3]];
        assert_eq!(FactorFormat::Bf16.apply(factor.view()), array![[1.007_812_5f32], [-1000.0]]);
        assert_eq!(FactorFormat::F16.apply(factor.view()), array![[1.009_765_6f32], [-1000.0]]);
    }

    /// Another implementation agrees on f32 values: every code, its neighbours in f32 and the middles between codes.
    #[test]
    fn bf16_and_f16_agree_with_the_half_crate() {
        for code in 0..=u16::MAX {
            let (wide, narrow) = (half::bf16::from_bits(code).to_f32(), half::f16::from_bits(code).to_f32());
            for (x, step) in [(wide, 1u32 << 15), (narrow, 1u32 << 12)] {
                let bits = x.to_bits();
                for x in [bits, bits.wrapping_add(1), bits.wrapping_sub(1), bits.wrapping_add(step)].map(f32::from_bits)
                {
                    let (ours, theirs) = (bf16(f64::from(x)), half::bf16::from_f32(x).to_f64());
                    assert!(ours == theirs || (ours.is_nan() && theirs.is_nan()), "{x:e}: {ours:e} {theirs:e}");
                    let (ours, theirs) = (f16(f64::from(x)), half::f16::from_f32(x).to_f64());
                    assert!(ours == theirs || (ours.is_nan() && theirs.is_nan()), "{x:e}: {ours:e} {theirs:e}");
                }
            }
        }
    }

    #[test]
    fn rounding_twice_is_rounding_once_but_for_ternary_means() {
        for format in FactorFormat::ALL {
            let mut column: Vec<f64> = (0..40).map(|i| f64::from((f64::from(i) * 1.7).sin() as f32) * 3.0).collect();
            format.round_column(&mut column);
            let once = column.clone();
            format.round_column(&mut column);
            assert_eq!(column.len(), once.len());
            // The mean of equal numbers may be off by rounding.
            let slack = if format == FactorFormat::Ternary { 1e-15 } else { 0.0 };
            for (twice, once) in column.iter().zip(&once) {
                assert!((twice - once).abs() <= slack * once.abs(), "{format}: {twice:e} {once:e}");
            }
        }
    }

    #[test]
    fn a_column_of_zeros_stays_and_a_broken_one_is_nan_throughout() {
        for format in FactorFormat::ALL {
            let mut zeros = [0.0, 0.0];
            format.round_column(&mut zeros);
            assert_eq!(zeros, [0.0, 0.0], "{format}");
            format.round_column(&mut []);
        }
        for format in [FactorFormat::Fp8, FactorFormat::Ternary] {
            for bad in [f64::NAN, f64::INFINITY] {
                let mut column = [1.0, bad, 2.0];
                format.round_column(&mut column);
                assert!(column.iter().all(|w| w.is_nan()), "{format}");
            }
        }
    }

    #[test]
    fn formats_are_found_by_their_words() {
        for format in FactorFormat::ALL {
            assert_eq!(format.to_string().parse(), Ok(format));
        }
        let error = "int8".parse::<FactorFormat>().unwrap_err().to_string();
        assert_eq!(error, "`int8` is no format of factors, expected f32, bf16, f16, fp8 or ternary");
    }
}
