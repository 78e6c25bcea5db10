//! One or two rounded numbers in a word: two in bf16, one in tf32.

use cubecl::prelude::*;

/// The bits of `x` as a factor: in bf16 the upper half counts. NaN and the infinities stay.
#[cube]
pub(super) fn bits(x: f32, #[comptime] short: bool) -> u32 {
    let dropped = comptime!(if short { 16u32 } else { 13u32 });
    let below_half = comptime!((1u32 << (dropped - 1)) - 1);
    let kept = comptime!(!((1u32 << dropped) - 1));
    let bits = u32::reinterpret(x);
    let mut rounded = bits;
    if bits & 0x7f80_0000u32 != 0x7f80_0000u32 {
        rounded = (bits + below_half + ((bits >> dropped) & 1u32)) & kept;
    }
    rounded
}

/// One word of two neighbours, or of the first alone in tf32.
#[cube]
pub(super) fn word(x: f32, next: f32, #[comptime] short: bool) -> u32 {
    let mut word = bits(x, short);
    if comptime!(short) {
        word = (word >> 16u32) | (bits(next, short) & 0xffff_0000u32);
    }
    word
}

/// One of the two numbers in a word, or the one in tf32.
#[cube]
pub(super) fn number(word: u32, which: usize, #[comptime] short: bool) -> f32 {
    let mut bits = word;
    if comptime!(short) {
        bits = select(which == 0, word << 16u32, word & 0xffff_0000u32);
    }
    f32::reinterpret(bits)
}
