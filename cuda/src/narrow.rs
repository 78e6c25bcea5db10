//! Operands of matrix products as bf16 in memory.
//!
//! Tensors are f32. A library that rounds f32 operands to bf16 on their way to the matrix units moves twice the bytes and
//! has the speed of tf32, so operands of large products in bf16 are rounded once and stored in half the memory. What is
//! computed is the same: operands rounded to nearest even, sums in f32.
//!
//! A copy serves every product of the step that reads the same rows ([`memo`](crate::memo)): a cast a tensor and step.

use std::sync::Arc;

use cubecl::prelude::*;
use dormouse_reference::{DType, Result, Tensors};

use crate::device::Device;
use crate::launch::Grid;
use crate::memo::What;
use crate::runtime::Engine;
use crate::tensor::{Floats, Life, Tensor, WORD, Words};

/// Allocations of up to so many elements are copied as a whole: the views of a flat buffer of parameters share a copy.
const WHOLE: u64 = 1 << 25;

const COPY: What = ("narrow", 0);

/// Elements of a copy in 16 bytes.
pub(crate) const EDGE: u64 = 8;

/// Where an operand's copy lies.
pub(crate) struct Narrow {
    /// The copy that holds it.
    pub words: Tensor,
    /// Bytes from the copy's start to the operand's.
    pub offset: u64,
}

/// Units of a cube, and words that each of them writes: its loads are all under way before the first is used.
const UNITS: usize = 256;
const PER_UNIT: usize = 4;

/// Rounds two elements into each word, to nearest even. NaN stays NaN.
#[cube(launch_unchecked)]
fn narrow_kernel(x: &Floats, words: &mut Words, len: u32) {
    let len = len as usize;
    let first = CUBE_POS * comptime!(UNITS * PER_UNIT) + UNIT_POS as usize;
    let mut values = Array::<f32>::new(comptime!(2 * PER_UNIT));
    #[unroll]
    for n in 0..comptime!(2 * PER_UNIT) {
        let at = 2 * (first + comptime!(n / 2 * UNITS)) + comptime!(n % 2);
        let mut value = 0.0f32;
        if at < len {
            value = x.at(at);
        }
        values[n] = value;
    }
    #[unroll]
    for n in 0..comptime!(PER_UNIT) {
        let word = first + comptime!(n * UNITS);
        if 2 * word < len {
            words.set(word, half(values[comptime!(2 * n)]) | (half(values[comptime!(2 * n + 1)]) << 16));
        }
    }
}

/// The bits of the nearest bf16, the even one of two.
#[cube]
fn half(value: f32) -> u32 {
    let bits = u32::reinterpret(value);
    let mut result = (bits + 0x7fffu32 + ((bits >> 16) & 1u32)) >> 16;
    if bits & 0x7fff_ffffu32 > 0x7f80_0000u32 {
        // Rounding could carry a NaN to infinity; this one has no other bits.
        result = 0x7fffu32;
    }
    result
}

impl<R: Engine> Device<R> {
    /// An operand in bf16, at a multiple of 16 bytes wherever the operand itself starts.
    pub(crate) fn narrow(&self, tensor: &Tensor) -> Result<Narrow> {
        let (start, end) = (tensor.start, tensor.start + tensor.len() as u64);
        let holds = |copy: &Tensor| {
            let (first, behind) = (copy.start, copy.start + copy.len() as u64);
            let inside = first <= start && end <= behind && (start - first).is_multiple_of(EDGE);
            inside && Arc::ptr_eq(&copy.buffer, &tensor.buffer)
        };
        if let Some((of, copies)) = self.memo().find(COPY, |of| holds(&of[0])) {
            return Ok(Narrow { words: copies[0].clone(), offset: (start - of[0].start) * WORD / 2 });
        }
        let persistent = tensor.life == Life::Persistent;
        let all = tensor.buffer.handle.size_in_used() / WORD;
        let whole = persistent && all <= WHOLE && start.is_multiple_of(EDGE);
        let of =
            if whole { Tensor { start: 0, shape: [all as usize].into(), ..tensor.clone() } } else { tensor.clone() };
        let words = self.scratch(&[of.len().div_ceil(2)], DType::U32)?;
        let bytes = of.bytes() + words.bytes();
        let uses = [&of, &words];
        let grid = Grid::cubes(words.len().div_ceil(UNITS * PER_UNIT), UNITS as u32);
        self.launch("narrow", grid, bytes, &uses, |client, count, dim| {
            let (x, to) = (self.floats(&of), self.words(&words));
            // SAFETY: a unit reads and writes below the lengths, or nothing.
            unsafe { narrow_kernel::launch_unchecked::<R>(client, count, dim, x, to, of.len() as u32) }
        })?;
        let offset = (start - of.start) * WORD / 2;
        self.memo().add(COPY, &[&of], std::slice::from_ref(&words));
        Ok(Narrow { words, offset })
    }
}
