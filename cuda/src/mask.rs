//! Masks of rows: real numbers or whole ones, and set where they are not 0. Rows are chosen by them and never multiplied.

use cubecl::prelude::*;

use crate::tensor::{Tensor, Words};

/// How a mask is stored; a number to the kernels.
pub(crate) const NONE: u32 = 0;
pub(crate) const WHOLE: u32 = 1;
pub(crate) const REAL: u32 = 2;

/// How this mask is stored.
pub(crate) fn kind(mask: &Tensor) -> u32 {
    if mask.dtype.is_float() { REAL } else { WHOLE }
}

/// Whether row `n` is set; without a mask every row is.
#[cube]
pub(crate) fn is_set(mask: &Words, n: usize, #[comptime] kind: u32) -> bool {
    let mut word = 1u32;
    if comptime!(kind != NONE) {
        word = mask.at(n);
    }
    if comptime!(kind == REAL) {
        // Without its sign: both zeros are none.
        word = word % 0x8000_0000u32;
    }
    word != 0
}
