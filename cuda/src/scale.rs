//! Powers of two as scales: a block of numbers over its own is exact, and its squares stay inside the range of f32.

use cubecl::prelude::*;

/// The power of two at or below a magnitude, 0 for 0. The smallest and largest exponents are left out, so that it has an
/// inverse.
#[cube]
pub(crate) fn power_of_two(x: f32) -> f32 {
    let mut bits = u32::reinterpret(x) & 0x7f80_0000u32;
    if bits > comptime!(252u32 << 23) {
        bits = comptime!(252u32 << 23);
    }
    if bits == 0u32 && x > 0.0f32 {
        bits = comptime!(1u32 << 23);
    }
    f32::reinterpret(bits)
}

/// One over a power of two, and over 0 some other one.
#[cube]
pub(crate) fn inverse_of(scale: f32) -> f32 {
    f32::reinterpret(comptime!(254u32 << 23) - u32::reinterpret(scale))
}
