//! Kernels that move words and compute nothing: fill and copy, for any element type.

use cubecl::prelude::*;
use dormouse_reference::Result;

use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Tensor, Words};

/// Units of a cube that fills, and words of a unit: starting a unit takes as long as setting some words.
const UNITS: u32 = 256;
const WORDS: usize = 8;

/// A cube sets some words, neighbours next to each other.
#[cube(launch_unchecked)]
fn fill_kernel(out: &mut Words, bits: u32, len: u32) {
    let first = CUBE_POS * comptime!(WORDS * UNITS as usize) + UNIT_POS as usize;
    #[unroll]
    for n in 0..comptime!(WORDS) {
        let i = first + comptime!(n * UNITS as usize);
        if i < len as usize {
            out.set(i, bits);
        }
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
    let grid = Grid::cubes(out.len().div_ceil(WORDS * UNITS as usize), UNITS);
    b.launch("fill", grid, out.bytes(), &[out], |client, count, dim| {
        // SAFETY: words from `len` on are not touched.
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

/// Pairs of one-element tensors that [`copy_values`] takes.
pub(crate) const AT_ONCE: usize = 4;

/// Copies one word of each pair. One unit.
#[cube(launch_unchecked)]
fn copy_values_kernel(
    a: &Words,
    b: &Words,
    c: &Words,
    d: &Words,
    into_a: &mut Words,
    into_b: &mut Words,
    into_c: &mut Words,
    into_d: &mut Words,
) {
    if ABSOLUTE_POS == 0 {
        into_a.set(0, a.at(0));
        into_b.set(0, b.at(0));
        into_c.set(0, c.at(0));
        into_d.set(0, d.at(0));
    }
}

/// Copies one-element tensors, one to [`AT_ONCE`] of them, none of which is another's destination.
pub(crate) fn copy_values<R: Engine>(device: &Device<R>, pairs: &[(&Tensor, &Tensor)]) -> Result<()> {
    // Where there are fewer, the first is copied several times.
    let pair = |i: usize| pairs.get(i).unwrap_or(&pairs[0]);
    let from = [0, 1, 2, 3].map(|i| pair(i).0);
    let into = [0, 1, 2, 3].map(|i| pair(i).1);
    let uses: Vec<&Tensor> = from.into_iter().chain(into).collect();
    let bytes = pairs.iter().map(|(from, into)| from.bytes() + into.bytes()).sum();
    device.launch("copy", Grid::units(1), bytes, &uses, |client, count, dim| {
        let [a, b, c, d] = from.map(|tensor| device.words(tensor));
        let [into_a, into_b, into_c, into_d] = into.map(|tensor| device.words(tensor));
        // SAFETY: every tensor has a word.
        unsafe {
            copy_values_kernel::launch_unchecked::<R>(client, count, dim, a, b, c, d, into_a, into_b, into_c, into_d)
        }
    })
}
