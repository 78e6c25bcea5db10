//! Columns in ternary: sums in fixed point, the threshold and the mean.

use cubecl::prelude::*;
use dormouse_reference::factor_format::TERNARY_SHARE;

use super::number::{assembled, parts, shortened};

// The threshold is 7 sum / (10 n).
const _: () = assert!(TERNARY_SHARE == 7.0 / 10.0);

/// The magnitude as a whole number of units of a ternary column, the upper word first.
#[cube]
pub(super) fn in_units(size: u32, largest: u32, room: u32) -> (u32, u32) {
    let (mantissa, exponent) = parts(size);
    let (_, top) = parts(largest);
    let shift = exponent - top + 40i32 - i32::cast_from(room);
    let mut high = 0u32;
    let mut low = 0u32;
    if shift >= 32i32 {
        high = mantissa << u32::cast_from(shift - 32i32);
    } else if shift > 0i32 {
        high = mantissa >> u32::cast_from(32i32 - shift);
        low = mantissa << u32::cast_from(shift);
    } else if shift > -32i32 {
        low = mantissa >> u32::cast_from(-shift);
    }
    (high, low)
}

/// A whole number of 96 bits.
#[derive(CubeType, Clone, Copy)]
struct Wide {
    high: u32,
    middle: u32,
    low: u32,
}

/// The quotient and what is left, bit after bit; the divisor is at most 2^31 and not zero.
#[cube]
fn divided(number: Wide, by: u32) -> (Wide, u32) {
    let mut high = number.high;
    let mut middle = number.middle;
    let mut low = number.low;
    let mut rest = 0u32;
    for _ in 0..96u32 {
        rest = (rest << 1u32) | (high >> 31u32);
        high = (high << 1u32) | (middle >> 31u32);
        middle = (middle << 1u32) | (low >> 31u32);
        low <<= 1u32;
        if rest >= by {
            rest -= by;
            low |= 1u32;
        }
    }
    (Wide { high, middle, low }, rest)
}

/// The threshold 7 sum / (10 n) in units, rounded down: what is above it is so before rounding, since elements are whole.
///
/// Fault 4 drops the share of 0.7.
#[cube]
pub(super) fn threshold(high: u32, low: u32, rows: u32, #[comptime] fault: u32) -> (u32, u32) {
    // Seven times is eight times less once.
    let eightfold_high = (high << 3u32) | (low >> 29u32);
    let eightfold_low = low << 3u32;
    let mut borrowed = 0u32;
    if eightfold_low < low {
        borrowed = 1u32;
    }
    let mut top = high >> 29u32;
    if eightfold_high < high || (eightfold_high == high && borrowed == 1u32) {
        top -= 1u32;
    }
    let mut middle = eightfold_high - high - borrowed;
    let mut last = eightfold_low - low;
    let mut by = rows * 10u32;
    if comptime!(fault == 4) {
        top = 0u32;
        middle = high;
        last = low;
        by = rows;
    }
    let (quotient, _) = divided(Wide { high: top, middle, low: last }, by);
    (quotient.middle, quotient.low)
}

/// The bits of sum / count, with the sum in units of the column: to nearest and even.
#[cube]
pub(super) fn mean(high: u32, low: u32, count: u32, largest: u32, room: u32) -> u32 {
    let mut by = count;
    if by == 0u32 {
        by = 1u32;
    }
    // 32 bits behind the point leave more bits than f32 has, however small the sum.
    let (quotient, rest) = divided(Wide { high, middle: low, low: 0u32 }, by);
    let mut first = quotient.high;
    let mut second = quotient.middle;
    let mut third = quotient.low;
    let (_, top) = parts(largest);
    // Of the leading word's last bit: the unit is 2^(top + room - 63), the quotient's last bit 2^-32 of it.
    let mut exponent = top + i32::cast_from(room) - 63i32 + 32i32;
    #[unroll]
    for _ in 0..2u32 {
        if first == 0u32 {
            first = second;
            second = third;
            third = 0u32;
            exponent -= 32i32;
        }
    }
    let zeros = first.leading_zeros();
    if zeros > 0u32 && zeros < 32u32 {
        first = (first << zeros) | (second >> (32u32 - zeros));
        second <<= zeros;
        exponent -= i32::cast_from(zeros);
    }
    // What follows can only tell a tie from a number above it.
    if (second | third | rest) != 0u32 {
        first |= 1u32;
    }
    let mut dropped = 8u32;
    // The mean of magnitudes in f32 is at least 2^-149, so at most 31 bits go.
    if exponent + 8i32 < -149i32 {
        dropped = u32::cast_from(-149i32 - exponent);
    }
    assembled(shortened(first, dropped, 0u32), exponent + i32::cast_from(dropped))
}

/// What the upper word of a sum of 64 bits gets from the lower one, which has become `sum` by adding `added`.
#[cube]
pub(super) fn carry(sum: u32, added: u32) -> u32 {
    let mut carry = 0u32;
    if sum < added {
        carry = 1u32;
    }
    carry
}
