//! Kernels that move words and compute nothing: fill and copy, for any element type.

use cubecl::prelude::*;
use dormouse_reference::Result;

use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Tensor, Words};

/// One unit sets one word.
#[cube(launch_unchecked)]
fn fill_kernel(out: &mut Words, bits: u32, len: u32) {
    let i = ABSOLUTE_POS;
    if i < len as usize {
        out.set(i, bits);
    }
}

/// One unit copies one word.
#[cube(launch_unchecked)]
fn copy_kernel(from: &Words, into: &mut Words, len: u32) {
    let i = ABSOLUTE_POS;
    if i < len as usize {
        into.set(i, from.at(i));
    }
}

/// Sets every element to the same bits.
pub(crate) fn fill<R: Engine>(b: &Device<R>, out: &Tensor, bits: u32) -> Result<()> {
    b.launch("fill", Grid::units(out.len()), out.bytes(), &[out], |client, count, dim| {
        // SAFETY: units past `len` do nothing.
        unsafe { fill_kernel::launch_unchecked::<R>(client, count, dim, b.words(out), bits, out.len() as u32) }
    })
}

/// Copies every element; the two do not overlap and have one length.
pub(crate) fn copy<R: Engine>(b: &Device<R>, from: &Tensor, into: &Tensor) -> Result<()> {
    let len = into.len() as u32;
    b.launch("copy", Grid::units(into.len()), 2 * into.bytes(), &[from, into], |client, count, dim| {
        // SAFETY: both have `len` words.
        unsafe { copy_kernel::launch_unchecked::<R>(client, count, dim, b.words(from), b.words(into), len) }
    })
}
