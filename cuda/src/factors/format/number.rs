//! Numbers of f32 by their bits, and how they are rounded to fewer.

use cubecl::prelude::*;

/// Bits of the sign and of the magnitude.
pub(super) const SIGN: u32 = 0x8000_0000;
pub(super) const SIZE: u32 = 0x7fff_ffff;

/// Bits of infinity and of a NaN; the magnitudes above the first are NaN.
pub(super) const INFINITE: u32 = 0x7f80_0000;
pub(super) const NAN: u32 = 0x7fc0_0000;

/// |x| = m 2^(e - 23) as (m, e), from the bits of |x| and for numbers that are finite; 2^23 <= m < 2^24, or zero for zero.
#[cube]
pub(super) fn parts(size: u32) -> (u32, i32) {
    let field = size >> 23u32;
    let mut mantissa = (size & 0x007f_ffffu32) | 0x0080_0000u32;
    let mut exponent = i32::cast_from(field) - 127i32;
    if field == 0u32 {
        let up = size.leading_zeros() - 8u32;
        mantissa = size << up;
        exponent = -126i32 - i32::cast_from(up);
    }
    (mantissa, exponent)
}

/// `value` without its last `dropped` bits, 1 to 31, to nearest and even.
///
/// Fault 1 rounds ties away from zero.
#[cube]
pub(super) fn shortened(value: u32, dropped: u32, #[comptime] fault: u32) -> u32 {
    let half = 1u32 << (dropped - 1u32);
    let rest = value & (half + half - 1u32);
    let mut kept = value >> dropped;
    let mut tie_goes_up = kept & 1u32;
    if comptime!(fault == 1) {
        tie_goes_up = 1u32;
    }
    if rest > half || (rest == half && tie_goes_up == 1u32) {
        kept += 1u32;
    }
    kept
}

/// The bits of m 2^e, for m up to 2^24 and a number that f32 has, or that is beyond it and so infinite.
#[cube]
pub(super) fn assembled(mantissa: u32, exponent: i32) -> u32 {
    let mut bits = 0u32;
    if mantissa != 0u32 {
        let zeros = mantissa.leading_zeros();
        let size = exponent + 31i32 - i32::cast_from(zeros);
        if size > 127i32 {
            bits = INFINITE;
        } else if size >= -126i32 {
            bits = (u32::cast_from(size + 127i32) << 23u32) | (((mantissa << zeros) >> 8u32) & 0x007f_ffffu32);
        } else {
            // Whole numbers of 2^-149.
            let shift = exponent + 149i32;
            if shift >= 0i32 {
                bits = mantissa << u32::cast_from(shift);
            } else {
                bits = mantissa >> u32::cast_from(-shift);
            }
        }
    }
    bits
}

/// The bits of x with `digits` bits behind the leading one; below 2^`least` the spacing of numbers stays what it is there.
/// NaN and the infinities stay.
#[cube]
pub(super) fn nearest(bits: u32, least: i32, #[comptime] digits: u32, #[comptime] fault: u32) -> u32 {
    let size = bits & SIZE;
    let mut rounded = size;
    if size < INFINITE {
        let (mantissa, exponent) = parts(size);
        let mut dropped = 0u32;
        if exponent < least {
            dropped = u32::cast_from(least - exponent);
        }
        dropped += comptime!(23 - digits);
        // Of more than 24 bits less than half of the last one is left.
        rounded = 0u32;
        if dropped <= 24u32 {
            rounded = assembled(shortened(mantissa, dropped, fault), exponent - 23i32 + i32::cast_from(dropped));
        }
    }
    rounded | (bits & SIGN)
}
