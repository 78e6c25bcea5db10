//! The exponential of what is not positive, accurate on every device.

use cubecl::prelude::*;

/// Below this, e^x rounds to zero.
const LEAST: f32 = -104.0;

/// ln 2 in two parts. The first has nine bits, so that its product with a whole number up to 150 is exact.
const LN_2: f32 = 0.693_359_4;
const LN_2_REST: f32 = -2.121_944_4e-4;

/// e^x for x <= 0, within a unit in the last place; 0 for -inf.
///
/// The exponential of Mesa's software driver is too small by some 1e-7 on average. A state that is multiplied by one decay
/// a token carries the sum of those errors, all of one sign, so a recurrence needs one without a bias. With n the whole
/// number next to x / ln 2 and r = x - n ln 2, |r| <= ln 2 / 2, e^x = 2^n e^r; the series of e^r is cut behind r^7, where
/// it is exact to 6e-9.
#[cube]
pub(crate) fn exp_of_nonpositive(x: f32) -> f32 {
    let n = (x * comptime!(std::f32::consts::LOG2_E)).max(comptime!(LEAST * std::f32::consts::LOG2_E)).round();
    let r = (x - n * comptime!(LN_2)) - n * comptime!(LN_2_REST);
    let mut series = r * comptime!(1.0f32 / 5040.0) + comptime!(1.0f32 / 720.0);
    series = series * r + comptime!(1.0f32 / 120.0);
    series = series * r + comptime!(1.0f32 / 24.0);
    series = series * r + comptime!(1.0f32 / 6.0);
    series = series * r + 0.5f32;
    let e = 1.0f32 + (r + r * r * series);
    // 2^n in two steps: it may lie below the least normal number when e^x does not.
    let whole = i32::cast_from(n);
    let half = whole / 2i32;
    let scaled = e * power_of_two(half) * power_of_two(whole - half);
    // Written so that NaN stays NaN.
    select(x < comptime!(LEAST), 0.0f32, scaled)
}

/// 2^n for n in -126..=127.
#[cube]
fn power_of_two(n: i32) -> f32 {
    f32::reinterpret(u32::cast_from(n + 127i32) << 23u32)
}
