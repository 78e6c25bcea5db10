//! The logistic function inside a kernel, accurate in both tails.

use cubecl::prelude::*;

/// sigma(x) and sigma(-x) from one exponential. The derivative of the first is their product: s (1 - s) would be zero
/// from x = 17 on.
#[cube]
pub(crate) fn sigmoids(x: f32) -> (f32, f32) {
    let e = (-x.abs()).exp();
    let near_one = 1.0f32 / (1.0f32 + e);
    let near_zero = e * near_one;
    let mut open = near_one;
    let mut closed = near_zero;
    if x < 0.0f32 {
        open = near_zero;
        closed = near_one;
    }
    (open, closed)
}

/// ln(1 + e^x), without overflow.
///
/// ln(1 + e) = 2 artanh(s) with s = e / (2 + e), which is at most 1/3, so that eight terms of artanh's series are exact
/// to 1e-9. A logarithm of 1 + e would lose a small e, and a compiler may undo the usual remedy for that.
#[cube]
pub(crate) fn softplus(x: f32) -> f32 {
    let e = (-x.abs()).exp();
    let s = e / (2.0f32 + e);
    let q = s * s;
    let mut series = q * comptime!(1.0f32 / 15.0) + comptime!(1.0f32 / 13.0);
    series = series * q + comptime!(1.0f32 / 11.0);
    series = series * q + comptime!(1.0f32 / 9.0);
    series = series * q + comptime!(1.0f32 / 7.0);
    series = series * q + comptime!(1.0f32 / 5.0);
    series = series * q + comptime!(1.0f32 / 3.0);
    let mut value = 2.0f32 * (s + s * q * series);
    if x > 0.0f32 {
        value += x;
    }
    value
}
