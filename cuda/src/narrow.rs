//! Operands of matrix products as bf16 in memory.
//!
//! Tensors are f32. A library that rounds f32 operands to bf16 on their way to the matrix units moves twice the bytes and
//! has the speed of tf32, so operands of large products in bf16 are rounded once and stored in half the memory. What is
//! computed is the same: operands rounded to nearest even, sums in f32.
//!
//! An operation's inputs are not written again before the step ends, and weights not before the optimiser, so a copy
//! serves every product that reads the same rows: a cast a tensor and step. Copies of weights are dropped when something
//! is about to write them ([`Device::outdated`]), copies of intermediates when the step ends. A copy made on one branch of
//! a captured step is not seen by the branch beside it.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::Arc;

use cubecl::prelude::*;
use dormouse_reference::{DType, Result, Tensors};

use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Buffer, Floats, Life, Tensor, WORD, Words};

/// Allocations of up to so many elements are copied as a whole: the views of a flat buffer of parameters share a copy.
const WHOLE: u64 = 1 << 25;

/// Elements of a copy in 16 bytes.
pub(crate) const EDGE: u64 = 8;

/// Copies of the present step.
#[derive(Default)]
pub(crate) struct Copies {
    all: RefCell<Vec<Copy>>,
    /// How many were ever made.
    made: Cell<u64>,
    /// Those of the branches beside the present one, by their numbers.
    hidden: RefCell<Vec<Range<u64>>>,
}

struct Copy {
    number: u64,
    of: Arc<Buffer>,
    start: u64,
    end: u64,
    /// Two elements to a word.
    words: Tensor,
}

/// Where an operand's copy lies.
pub(crate) struct Narrow {
    /// The copy that holds it.
    pub words: Tensor,
    /// Bytes from the copy's start to the operand's.
    pub offset: u64,
}

impl Copies {
    /// Forgets all.
    pub fn clear(&self) {
        self.all.borrow_mut().clear();
        self.hidden.borrow_mut().clear();
    }

    /// The number of the next one.
    pub fn next(&self) -> u64 {
        self.made.get()
    }

    /// Hides those that were made since there was `next`. They are still dropped when outdated.
    pub fn hide_from(&self, next: u64) {
        self.hidden.borrow_mut().push(next..self.made.get());
    }

    /// Brings those back that were hidden last.
    pub fn show(&self) {
        self.hidden.borrow_mut().pop();
    }

    fn find(&self, fits: impl Fn(&Copy) -> bool) -> Option<(Tensor, u64)> {
        let hidden = self.hidden.borrow();
        let seen = |copy: &&Copy| !hidden.iter().any(|range| range.contains(&copy.number));
        let all = self.all.borrow();
        let copy = all.iter().filter(seen).find(|copy| fits(copy))?;
        Some((copy.words.clone(), copy.start))
    }

    fn add(&self, of: &Tensor, words: Tensor) {
        let number = self.made.replace(self.made.get() + 1);
        let end = of.start + of.len() as u64;
        self.all.borrow_mut().push(Copy { number, of: of.buffer.clone(), start: of.start, end, words });
    }

    fn drop_overlapping(&self, tensor: &Tensor) {
        let (start, end) = (tensor.start, tensor.start + tensor.len() as u64);
        let overlaps = |copy: &Copy| Arc::ptr_eq(&copy.of, &tensor.buffer) && copy.start < end && start < copy.end;
        self.all.borrow_mut().retain(|copy| !overlaps(copy));
    }
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
        let holds = |copy: &Copy| copy.start <= start && end <= copy.end && (start - copy.start).is_multiple_of(EDGE);
        let found = |copy: &Copy| Arc::ptr_eq(&copy.of, &tensor.buffer) && holds(copy);
        if let Some((words, first)) = self.copies().find(found) {
            return Ok(Narrow { words, offset: (start - first) * WORD / 2 });
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
        self.copies().add(&of, words.clone());
        Ok(Narrow { words, offset })
    }

    /// Drops the copies of what is about to be written, also those of another branch: they hold all of a buffer.
    pub(crate) fn outdated(&self, tensor: &Tensor) {
        self.copies().drop_overlapping(tensor);
    }
}
