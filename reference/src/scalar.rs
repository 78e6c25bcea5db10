//! The number types the reference computes with: `f32`, `f64` and the forward-mode [`Dual`].
//!
//! Every operation is written once over [`Scalar`]. Run on `f64` it is the specification, on `f32` it trains on the
//! CPU, and on `Dual` it yields an exact directional derivative (no step size), which gate `adj` holds against the
//! hand-written adjoint.

use std::fmt::Debug;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, DivAssign, Mul, MulAssign, Neg, Sub, SubAssign};

use ndarray::{LinalgScalar, ScalarOperand};
use num_traits::{One, Zero};

use crate::tensor::DType;

/// A real number the reference can compute with.
pub trait Scalar:
    LinalgScalar
    + ScalarOperand
    + Neg<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
    + DivAssign
    + Sum
    + PartialOrd
    + Default
    + Debug
    + Send
    + Sync
    + 'static
{
    /// How a tensor of this type is stored.
    const DTYPE: DType;

    /// The nearest value of this type.
    fn from_f64(x: f64) -> Self;
    /// The value (of a dual number: its real part).
    fn to_f64(self) -> f64;
    /// e to the power of `self`.
    fn exp(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// ln(1 + self), accurate near zero.
    fn ln_1p(self) -> Self;
    /// Square root.
    fn sqrt(self) -> Self;
    /// Absolute value.
    fn abs(self) -> Self;
    /// `self` to a constant power.
    fn powf(self, exponent: f64) -> Self;
    /// The logistic function 1 / (1 + e^-x), without overflow at either end.
    ///
    /// The derivative is `x.sigmoid() * (-x).sigmoid()`: the form `s * (1 - s)` is zero in `f32` from x = 17 on.
    fn sigmoid(self) -> Self {
        if self < Self::zero() {
            let e = self.exp();
            e / (Self::one() + e)
        } else {
            Self::one() / (Self::one() + (-self).exp())
        }
    }
    /// The logistic functions of `self` and of `-self` from one exponential, each accurate in its own tail.
    fn sigmoids(self) -> (Self, Self) {
        let e = (-self.abs()).exp();
        let near_one = Self::one() / (Self::one() + e);
        let near_zero = e * near_one;
        if self < Self::zero() { (near_zero, near_one) } else { (near_one, near_zero) }
    }
    /// ln(1 + e^x), without overflow.
    fn softplus(self) -> Self {
        let positive = if self > Self::zero() { self } else { Self::zero() };
        positive + (-self.abs()).exp().ln_1p()
    }
    /// The larger of the two; `self` where either is NaN is not promised.
    fn max(self, other: Self) -> Self {
        if other > self { other } else { self }
    }
    /// self * a + b, rounded once on `f32` and `f64`, so that the bits are the same whatever the instruction set.
    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        self * a + b
    }
    /// Neither infinite nor NaN.
    fn is_finite(self) -> bool {
        self.to_f64().is_finite()
    }
}

macro_rules! scalar_for_float {
    ($t:ty, $dtype:expr) => {
        impl Scalar for $t {
            const DTYPE: DType = $dtype;
            #[inline(always)]
            fn from_f64(x: f64) -> Self {
                x as $t
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                self as f64
            }
            #[inline(always)]
            fn exp(self) -> Self {
                <$t>::exp(self)
            }
            #[inline(always)]
            fn ln(self) -> Self {
                <$t>::ln(self)
            }
            #[inline(always)]
            fn ln_1p(self) -> Self {
                <$t>::ln_1p(self)
            }
            #[inline(always)]
            fn sqrt(self) -> Self {
                <$t>::sqrt(self)
            }
            #[inline(always)]
            fn abs(self) -> Self {
                <$t>::abs(self)
            }
            #[inline(always)]
            fn powf(self, exponent: f64) -> Self {
                <$t>::powf(self, exponent as $t)
            }
            #[inline(always)]
            fn mul_add(self, a: Self, b: Self) -> Self {
                <$t>::mul_add(self, a, b)
            }
        }
    };
}

scalar_for_float!(f32, DType::F32);
scalar_for_float!(f64, DType::F64);

/// A number with one directional derivative: `re + du * epsilon`, epsilon^2 = 0.
///
/// Comparisons look at the value only, as a branch in the differentiated function would.
#[derive(Clone, Copy, Debug, Default)]
pub struct Dual {
    /// The value.
    pub re: f64,
    /// The derivative along the chosen direction.
    pub du: f64,
}

impl Dual {
    /// A value and its derivative along the direction.
    pub fn new(re: f64, du: f64) -> Self {
        Self { re, du }
    }
}

impl PartialEq for Dual {
    fn eq(&self, other: &Self) -> bool {
        self.re == other.re
    }
}

impl PartialOrd for Dual {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        self.re.partial_cmp(&other.re)
    }
}

impl Add for Dual {
    type Output = Self;
    fn add(self, o: Self) -> Self {
        Self::new(self.re + o.re, self.du + o.du)
    }
}

impl Sub for Dual {
    type Output = Self;
    fn sub(self, o: Self) -> Self {
        Self::new(self.re - o.re, self.du - o.du)
    }
}

impl Mul for Dual {
    type Output = Self;
    fn mul(self, o: Self) -> Self {
        Self::new(self.re * o.re, self.du * o.re + self.re * o.du)
    }
}

impl Div for Dual {
    type Output = Self;
    fn div(self, o: Self) -> Self {
        let q = self.re / o.re;
        Self::new(q, (self.du - q * o.du) / o.re)
    }
}

impl Neg for Dual {
    type Output = Self;
    fn neg(self) -> Self {
        Self::new(-self.re, -self.du)
    }
}

impl AddAssign for Dual {
    fn add_assign(&mut self, o: Self) {
        *self = *self + o;
    }
}

impl SubAssign for Dual {
    fn sub_assign(&mut self, o: Self) {
        *self = *self - o;
    }
}

impl MulAssign for Dual {
    fn mul_assign(&mut self, o: Self) {
        *self = *self * o;
    }
}

impl DivAssign for Dual {
    fn div_assign(&mut self, o: Self) {
        *self = *self / o;
    }
}

impl Sum for Dual {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::zero(), |a, b| a + b)
    }
}

impl Zero for Dual {
    fn zero() -> Self {
        Self::new(0.0, 0.0)
    }
    fn is_zero(&self) -> bool {
        self.re == 0.0 && self.du == 0.0
    }
}

impl One for Dual {
    fn one() -> Self {
        Self::new(1.0, 0.0)
    }
}

impl ScalarOperand for Dual {}

impl Scalar for Dual {
    const DTYPE: DType = DType::Dual;
    fn from_f64(x: f64) -> Self {
        Self::new(x, 0.0)
    }
    fn to_f64(self) -> f64 {
        self.re
    }
    fn exp(self) -> Self {
        let e = self.re.exp();
        // exp(-inf) = 0 kills the direction whatever its size, as the limit does.
        Self::new(e, if e == 0.0 { 0.0 } else { e * self.du })
    }
    fn ln(self) -> Self {
        Self::new(self.re.ln(), self.du / self.re)
    }
    fn ln_1p(self) -> Self {
        Self::new(self.re.ln_1p(), self.du / (1.0 + self.re))
    }
    fn sqrt(self) -> Self {
        let r = self.re.sqrt();
        Self::new(r, self.du / (2.0 * r))
    }
    fn abs(self) -> Self {
        if self.re < 0.0 { -self } else { self }
    }
    fn powf(self, exponent: f64) -> Self {
        Self::new(self.re.powf(exponent), exponent * self.re.powf(exponent - 1.0) * self.du)
    }
    fn is_finite(self) -> bool {
        self.re.is_finite() && self.du.is_finite()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;

    /// The derivative of `f` at `x` by a central difference in f64.
    fn slope(f: impl Fn(f64) -> f64, x: f64) -> f64 {
        let h = 1e-6 * x.abs().max(1.0);
        (f(x + h) - f(x - h)) / (2.0 * h)
    }

    #[test]
    fn dual_derivatives_match_central_differences() {
        for x in [0.3, 1.7, 4.2] {
            let d = Dual::new(x, 1.0);
            assert_relative_eq!(d.exp().du, slope(f64::exp, x), max_relative = 1e-8);
            assert_relative_eq!(d.ln().du, slope(f64::ln, x), max_relative = 1e-8);
            assert_relative_eq!(d.ln_1p().du, slope(f64::ln_1p, x), max_relative = 1e-8);
            assert_relative_eq!(d.sqrt().du, slope(f64::sqrt, x), max_relative = 1e-8);
            assert_relative_eq!(d.powf(2.5).du, slope(|x| x.powf(2.5), x), max_relative = 1e-8);
            assert_relative_eq!((-d).sigmoid().du, slope(|x| Scalar::sigmoid(-x), x), max_relative = 1e-7);
            assert_relative_eq!(d.softplus().du, slope(Scalar::softplus, x), max_relative = 1e-7);
            assert_relative_eq!((d * d / (d + Dual::one())).du, slope(|x| x * x / (x + 1.0), x), max_relative = 1e-8);
        }
    }

    #[test]
    fn sigmoid_keeps_its_tail_and_its_derivative() {
        let x = 17.0f32;
        assert_relative_eq!(x.sigmoid() * (-x).sigmoid(), 4.139_937e-8, max_relative = 1e-5);
        for x in [-80.0, -17.0, -0.3, 0.0, 0.3, 17.0, 80.0f32] {
            let (open, closed) = x.sigmoids();
            assert_relative_eq!(open, x.sigmoid(), epsilon = 0.0, max_relative = 2.0 * f32::EPSILON);
            assert_relative_eq!(closed, (-x).sigmoid(), epsilon = 0.0, max_relative = 2.0 * f32::EPSILON);
        }
        assert_eq!(Scalar::sigmoid(-1000.0f32), 0.0);
        assert_eq!(Scalar::sigmoid(1000.0f32), 1.0);
        assert_eq!(Scalar::softplus(1000.0f32), 1000.0);
    }
}
