//! `muon`: the equations are in `dormouse_reference::muon`.
//!
//! Arm `plain` follows them product by product, on copies in the short orientation, one unit an element or a row. Arm
//! `fused` is described in [`fused`]. Arm `plain` runs the matrices of one shape together, arm `fused` those of all
//! shapes, both at most [`ENTRIES`] entries of the table at a time, because where they lie travels as scalars: nothing is
//! uploaded inside a step. With `apply` = 0 nothing is
//! written, and a matrix whose gradient is all zero keeps every bit.

mod fused;
mod gather;
mod large;
mod plain;
mod small;
mod table;
mod write;

use cubecl::prelude::*;
use dormouse_reference::muon::{Batching, COEFFICIENTS, Config, Matrix, Muon, NOISE, Scalars, State, check_config};
use dormouse_reference::{Dims, Result, check_apart, check_one};

use crate::arm::{Arm, Mutant};
use crate::device::Device;
use crate::runtime::Engine;
use crate::tall::ENTRIES;
use crate::tensor::Tensor;

const STEM: &str = "muon";

const OP: &str = "muon::update";

/// Numbered from 1 in the kernels.
pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant::fused("momentum-undamped"),
    Mutant::fused("norm-of-first-block"),
    Mutant::fused("quintic-term-dropped"),
    Mutant::fused("last-block-not-in-gram"),
    Mutant::fused("apply-ignored"),
    Mutant::fused("zero-gradient-moves"),
    Mutant::fused("first-head-for-all"),
    Mutant::fused("noise-blown-up"),
    Mutant::fused("columns-not-normalised"),
    Mutant::fused("decay-dropped"),
    Mutant::fused("scale-of-first-entry"),
    Mutant::fused("null-renamed-local"),
    Mutant::fused("linear-term-dropped-in-large"),
];

/// The coefficients a, b and c of the iteration.
const LINEAR: f32 = COEFFICIENTS[0] as f32;
const CUBIC: f32 = COEFFICIENTS[1] as f32;
const QUINTIC: f32 = COEFFICIENTS[2] as f32;

/// Norms below this share of their mean are noise.
const LEAST: f32 = NOISE as f32;

/// Matrices of one entry of the table: head h of its i-th matrix, number i * heads + h, starts at
/// `start + i * rows * columns + h * width` and has rows `columns` apart.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Entry {
    start: usize,
    columns: usize,
    heads: usize,
    /// Matrices, at least one.
    count: usize,
    scale: f32,
    weight_decay: f32,
}

/// Matrices of one shape.
#[derive(Clone, Debug, PartialEq)]
struct Class {
    rows: usize,
    width: usize,
    /// One to [`ENTRIES`].
    entries: Vec<Entry>,
}

impl Class {
    /// Matrices of all entries.
    fn count(&self) -> usize {
        self.entries.iter().map(|entry| entry.count).sum()
    }

    /// The shorter side and the longer.
    fn sides(&self) -> (usize, usize) {
        (self.rows.min(self.width), self.rows.max(self.width))
    }

    /// Entries with the number of their first matrix.
    fn numbered(&self) -> impl Iterator<Item = (usize, &Entry)> {
        self.entries.iter().scan(0, |first, entry| {
            let this = *first;
            *first += entry.count;
            Some((this, entry))
        })
    }
}

/// The matrices of the table by shape, in the order of the first of each shape; one by one, every matrix alone.
fn classes(config: &Config) -> Vec<Class> {
    let mut classes: Vec<Class> = Vec::new();
    for &Matrix { start, shape: [e, rows, columns], heads, scale, weight_decay } in &config.matrices {
        let width = columns / heads;
        let entry =
            Entry { start, columns, heads, count: e * heads, scale: scale as f32, weight_decay: weight_decay as f32 };
        match config.batching {
            Batching::Single => classes.extend((0..entry.count).map(|i| {
                let start = start + i / heads * rows * columns + i % heads * width;
                Class { rows, width, entries: vec![Entry { start, heads: 1, count: 1, ..entry }] }
            })),
            Batching::Batched if entry.count == 0 => {}
            Batching::Batched => {
                let has_room =
                    |class: &&mut Class| (class.rows, class.width) == (rows, width) && class.entries.len() < ENTRIES;
                match classes.iter_mut().find(has_room) {
                    Some(class) => class.entries.push(entry),
                    None => classes.push(Class { rows, width, entries: vec![entry] }),
                }
            }
        }
    }
    classes
}

/// One call, checked.
struct Call<'a> {
    params: &'a Tensor,
    grads: &'a Tensor,
    m: &'a Tensor,
    lr: &'a Tensor,
    apply: &'a Tensor,
    iterations: usize,
    plus: bool,
    /// How much of the momentum stays, and of the gradient comes in; each rounded once.
    keep: f32,
    take: f32,
}

impl<R: Engine> Muon for Device<R> {
    fn update(&self, config: &Config, state: State<&Tensor>, scalars: Scalars<&Tensor>) -> Result<()> {
        let buffers = state.clone().named();
        let mut dims = Dims::new(OP);
        for (name, buffer) in &buffers {
            dims.bind(name, buffer.shape(), &["P"])?;
        }
        check_config(config, dims.get("P"))?;
        check_apart(OP, &buffers, |a, b| a.shares_allocation(b))?;
        for (arg, scalar) in scalars.clone().named() {
            check_one(OP, arg, scalar.shape())?;
        }
        let State { params, grads, m } = state;
        let Scalars { lr, apply } = scalars;
        let read = [("grads", grads), ("lr", lr), ("apply", apply)];
        self.check_floats(OP, &read)?;
        for (arg, buffer) in [("params", params), ("m", m)] {
            self.check_into(OP, arg, buffer, &read)?;
        }
        let &Config { momentum, iterations, plus, .. } = config;
        let (keep, take) = (momentum as f32, (1.0 - momentum) as f32);
        let call = Call { params, grads, m, lr, apply, iterations, plus, keep, take };
        let classes = classes(config);
        match self.forward_arm(STEM) {
            Arm::Plain => classes.iter().try_for_each(|class| plain::update(self, &call, class)),
            Arm::Fused => fused::update(self, &call, config.batching, classes),
        }
    }
}

/// Whether a number is anything but zero, by its bits: devices differ about comparisons with NaN.
#[cube]
fn is_something(x: f32) -> bool {
    u32::reinterpret(x) & 0x7fff_ffffu32 != 0u32
}

/// What a norm divides by, 1 where it is noise beside the mean.
///
/// Mutants: 8 takes no norm but zero for noise.
#[cube]
fn divisor_of(norm: f32, mean: f32, #[comptime] mutant: u32) -> f32 {
    let mut least = comptime!(LEAST) * mean;
    if comptime!(mutant == 8) {
        least = 0.0f32;
    }
    let mut divisor = norm;
    if norm < least || norm == 0.0f32 {
        divisor = 1.0f32;
    }
    divisor
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(batching: Batching, matrices: Vec<Matrix>) -> Config {
        Config { momentum: 0.95, iterations: 8, plus: true, batching, matrices }
    }

    fn matrix(start: usize, shape: [usize; 3], heads: usize) -> Matrix {
        Matrix { start, shape, heads, scale: 1.0, weight_decay: 0.0 }
    }

    #[test]
    fn a_class_is_a_shape_and_one_by_one_is_every_head() {
        let table = vec![matrix(1, [2, 6, 4], 1), matrix(60, [1, 6, 8], 2), matrix(110, [0, 6, 4], 1)];
        let batched = classes(&config(Batching::Batched, table.clone()));
        assert_eq!(batched.len(), 1);
        assert_eq!((batched[0].rows, batched[0].width, batched[0].count()), (6, 4, 4));
        assert_eq!(
            batched[0].numbered().map(|(first, entry)| (first, entry.start)).collect::<Vec<_>>(),
            [(0, 1), (2, 60)]
        );
        let single = classes(&config(Batching::Single, table));
        let starts: Vec<_> = single.iter().map(|class| (class.entries[0].start, class.entries[0].columns)).collect();
        assert_eq!(starts, [(1, 4), (25, 4), (60, 8), (64, 8)]);
    }

    #[test]
    fn more_entries_than_a_launch_takes_are_further_classes() {
        let table = (0..2 * ENTRIES + 1).map(|i| matrix(6 * i, [1, 2, 3], 1)).collect();
        let counts = classes(&config(Batching::Batched, table)).iter().map(Class::count).collect::<Vec<_>>();
        assert_eq!(counts, [ENTRIES, ENTRIES, 1]);
    }
}
