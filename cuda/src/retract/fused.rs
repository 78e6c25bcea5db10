//! Arm `fused`: three launches for four iterations. Those for k <= 64, of all shapes together, are in [`small`]; here are
//! those for any k, a shape at a time.
//!
//! Every iteration multiplies X from the right by a polynomial of A = X^T X, so A can be followed without X:
//!
//! ```text
//! P_i = 15/8 I - 5/4 A_i + 3/8 A_i^2        A_(i+1) = P_i A_i P_i        X <- X (P_1 P_2 ..)
//! ```
//!
//! The first launch computes A, in blocks of rows; the second does all the k by k work, two cubes a matrix, see
//! [`polar`]; the third multiplies X by the product. X is read twice and written once.
//!
//! Following A costs a relative error of spread^2 times the rounding of A, which the same product in X would not, and a
//! rounding error that makes a vanishing eigenvalue of A negative grows by (15/8)^2 an iteration. So after [`ROUND`]
//! iterations a new round starts from A = X^T X, which forgets both.
//!
//! Instead of max|X|, X is divided by the power of two at or below it, a block of rows by its own: exact, and the blocks
//! meet in the second launch. The result depends on neither.
//!
//! A launch takes the matrices of up to [`FACTORS`] factors of one shape, wherever they lie in a buffer. Where they lie
//! travels as scalars, since nothing is uploaded inside a step. A matrix never sees another one, so its bits do not depend
//! on what runs beside it.

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::{polar, small};
use crate::cube;
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::scale::{inverse_of, power_of_two};
use crate::tensor::{Floats, Tensor};

/// Units of a cube.
const UNITS: u32 = 256;

/// Rows and columns of the part of A that a cube computes, and the rows of X it takes at a time.
const TILE: usize = 32;

/// Rows of X of a block, where that makes [`BLOCKS`] blocks or fewer.
const ROWS: usize = 64;

/// The most blocks of a matrix.
const BLOCKS: usize = 32;

/// Elements of the rows of X that a cube of the third launch holds.
const HELD: usize = polar::LARGEST_K;

/// The largest k that the kernels hold.
pub(crate) const LARGEST_K: usize = polar::LARGEST_K;

/// Iterations before A is computed anew.
pub(super) const ROUND: usize = 4;

/// Factors of one launch.
const FACTORS: usize = 8;

/// Matrices that lie one behind another, and where their largest spread goes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Factor {
    /// Elements from the start of the buffer.
    pub start: usize,
    /// Matrices, at least one.
    pub count: usize,
    /// The element of `spreads`.
    pub slot: usize,
}

/// What all factors of a call have in common.
pub(crate) struct Scalars<'a> {
    pub buffer: &'a Tensor,
    pub apply: &'a Tensor,
    pub iterations: usize,
    pub power_iterations: usize,
    /// The kernels' number of the fault to compile them with.
    pub mutant: u32,
}

/// Matrices of one shape in a buffer.
pub(super) struct Batch<'a> {
    pub buffer: &'a Tensor,
    pub apply: &'a Tensor,
    /// One to [`FACTORS`] of them.
    pub factors: &'a [Factor],
    pub n: usize,
    pub k: usize,
    pub iterations: usize,
    pub power_iterations: usize,
    /// The kernels' number of the fault to compile them with.
    pub mutant: u32,
}

impl Batch<'_> {
    /// Matrices of all factors together.
    pub fn matrices(&self) -> usize {
        self.factors.iter().map(|factor| factor.count).sum()
    }

    /// The scalars `f` of every factor; places that are left over get `rest`.
    fn scalars<R: Runtime>(&self, rest: u32, f: impl Fn(&Factor) -> usize) -> SequenceArg<R, u32> {
        (0..FACTORS).map(|p| self.factors.get(p).map_or(rest, |factor| f(factor) as u32)).collect()
    }

    /// The number of each factor's first matrix; behind the last factor one that no matrix reaches.
    fn firsts<R: Runtime>(&self) -> SequenceArg<R, u32> {
        let first = |p: usize| self.factors[..p].iter().map(|factor| factor.count).sum::<usize>() as u32;
        (0..FACTORS).map(|p| if p < self.factors.len() { first(p) } else { u32::MAX }).collect()
    }
}

/// Where a matrix of `size` elements starts.
///
/// Mutants: 9 takes the first matrix of its factor.
#[cube]
fn origin_of(
    matrix: usize,
    size: usize,
    firsts: &Sequence<u32>,
    starts: &Sequence<u32>,
    #[comptime] mutant: u32,
) -> usize {
    let mut first = firsts[0];
    let mut start = starts[0];
    #[unroll]
    for p in 1..FACTORS {
        if matrix >= firsts[p] as usize {
            first = firsts[p];
            start = starts[p];
        }
    }
    let mut place = matrix - first as usize;
    if comptime!(mutant == 9) {
        place = 0usize;
    }
    start as usize + place * size
}

/// A block of rows, over its own power of two: a tile of its X^T X.
///
/// Mutants: 8 misses the last row of a block.
#[cube(launch_unchecked)]
fn gram_kernel(
    x: &Floats,
    grams: &mut Floats,
    scales: &mut Floats,
    firsts: Sequence<u32>,
    starts: Sequence<u32>,
    e: u32,
    n: u32,
    k: u32,
    blocks: u32,
    rows: u32,
    #[comptime] mutant: u32,
) {
    let (n, k, blocks, rows) = (n as usize, k as usize, blocks as usize, rows as usize);
    let me = UNIT_POS as usize;
    let units = comptime!(UNITS as usize);
    let side = comptime!(TILE);
    let tiles = k.div_ceil(side);
    let left = CUBE_POS % tiles * side;
    let right = CUBE_POS / tiles % tiles * side;
    let place = CUBE_POS / (tiles * tiles);
    let matrix = place / blocks;
    let first = place % blocks * rows;
    let mut last = first + rows;
    if last > n {
        last = n;
    }
    if comptime!(mutant == 8) {
        last -= 1;
    }
    // A cube behind the last matrix has no rows.
    if matrix >= e as usize {
        last = first;
    }
    let origin = origin_of(matrix, n * k, &firsts, &starts, mutant);

    let mut shared = SharedMemory::<f32>::new(comptime!(UNITS as usize));
    let mut largest = 0.0f32;
    for step in 0..(rows * k).div_ceil(units) {
        let i = first * k + step * units + me;
        if i < last * k {
            let size = x.at(origin + i).abs();
            if size > largest {
                largest = size;
            }
        }
    }
    let scale = power_of_two(cube::largest(largest, &mut shared));
    let inverse = inverse_of(scale);

    let mut of_left = SharedMemory::<f32>::new(comptime!(TILE * TILE));
    let mut of_right = SharedMemory::<f32>::new(comptime!(TILE * TILE));
    let (row, column) = (me / 16, me % 16);
    let mut sums = Array::<f32>::new(4usize);
    #[unroll]
    for s in 0..4usize {
        sums[s] = 0.0f32;
    }
    for step in 0..rows.div_ceil(side) {
        #[unroll]
        for part in 0..4usize {
            let at = part * units + me;
            let (r, c) = (first + step * side + at / side, at % side);
            let mut of_l = 0.0f32;
            let mut of_r = 0.0f32;
            if r < last {
                if left + c < k {
                    of_l = x.at(origin + r * k + left + c) * inverse;
                }
                if right + c < k {
                    of_r = x.at(origin + r * k + right + c) * inverse;
                }
            }
            of_left[at] = of_l;
            of_right[at] = of_r;
        }
        sync_cube();
        let depth = side;
        for d in 0..depth {
            let l0 = of_left[d * side + row];
            let l1 = of_left[d * side + row + 16];
            let r0 = of_right[d * side + column];
            let r1 = of_right[d * side + column + 16];
            sums[0] += l0 * r0;
            sums[1] += l0 * r1;
            sums[2] += l1 * r0;
            sums[3] += l1 * r1;
        }
        sync_cube();
    }
    if matrix < e as usize {
        #[unroll]
        for s in 0..4usize {
            let r = left + row + comptime!(s / 2 * 16);
            let c = right + column + comptime!(s % 2 * 16);
            if r < k && c < k {
                grams.set((place * k + r) * k + c, sums[s]);
            }
        }
        if me == 0 && left == 0 && right == 0 {
            scales.set(place, scale);
        }
    }
}

/// X <- coefficient X M for a block of rows, in place: the cube holds them. The first cube also writes the largest
/// spread of every factor, a unit each, where it is asked for.
///
/// Mutants: 5 takes the first matrix's spread, 7 ignores the flag, 10 leaves the last matrix alone, 11 gives every factor
/// the spread of the first, 12 is null (a renamed local).
#[cube(launch_unchecked)]
fn multiply_kernel(
    work: &Floats,
    coefficients: &Floats,
    spreads: &Floats,
    apply: &Floats,
    x: &mut Floats,
    spread: &mut Floats,
    firsts: Sequence<u32>,
    starts: Sequence<u32>,
    counts: Sequence<u32>,
    slots: Sequence<u32>,
    e: u32,
    n: u32,
    k: u32,
    rows: u32,
    stride: u32,
    slot: u32,
    with_spread: u32,
    #[comptime] mutant: u32,
) {
    let (e, n, k, rows) = (e as usize, n as usize, k as usize, rows as usize);
    let me = UNIT_POS as usize;
    let units = comptime!(UNITS as usize);
    let blocks = n.div_ceil(rows);
    let matrix = CUBE_POS / blocks;
    let first = CUBE_POS % blocks * rows;
    let mut last = first + rows;
    if last > n {
        last = n;
    }
    if matrix >= e {
        last = first;
    }
    let origin = origin_of(matrix, n * k, &firsts, &starts, mutant) + first * k;
    let held = (last - first) * k;
    let mut flag = apply.at(0);
    if comptime!(mutant == 7) {
        flag = 1.0f32;
    }
    if comptime!(mutant == 12) {
        let renamed = apply.at(0);
        flag = renamed;
    }
    let mut moving = flag == 1.0f32;
    if comptime!(mutant == 10) {
        moving = flag == 1.0f32 && matrix + 1 < e;
    }
    let mut coefficient = 0.0f32;
    if matrix < e {
        coefficient = coefficients.at(matrix);
    }
    let mut rows_of_x = SharedMemory::<f32>::new(comptime!(HELD));
    for step in 0..(rows * k).div_ceil(units) {
        let i = step * units + me;
        if i < held {
            rows_of_x[i] = x.at(origin + i) * coefficient;
        }
    }
    sync_cube();
    // A coefficient of zero stands for a zero matrix.
    if moving && coefficient > 0.0f32 {
        let m = matrix * stride as usize + slot as usize;
        for step in 0..held.div_ceil(units) {
            let i = step * units + me;
            if i < held {
                let (r, c) = (i / k * k, i % k);
                let mut sum = 0.0f32;
                for d in 0..k {
                    sum += rows_of_x[r + d] * work.at(m + d * k + c);
                }
                x.set(origin + i, sum);
            }
        }
    }
    if with_spread == 1u32 && CUBE_POS == 0 {
        #[unroll]
        for p in 0..FACTORS {
            if me == p && counts[p] > 0u32 {
                let mut widest = 0.0f32;
                if flag == 1.0f32 {
                    let mut begin = firsts[p] as usize;
                    let mut count = counts[p] as usize;
                    if comptime!(mutant == 5) {
                        count = 1usize;
                    }
                    if comptime!(mutant == 11) {
                        begin = 0usize;
                        count = counts[0] as usize;
                    }
                    for i in begin..begin + count {
                        if spreads.at(i) > widest {
                            widest = spreads.at(i);
                        }
                    }
                }
                spread.set(slots[p] as usize, widest);
            }
        }
    }
}

/// Retracts every matrix and writes each factor's largest spread into its slot of `spreads`.
fn update<R: Engine>(b: &Device<R>, batch: &Batch<'_>, spread: &Tensor) -> Result<()> {
    let &Batch { buffer, apply, n, k, iterations, mutant, .. } = batch;
    let e = batch.matrices();
    let work = b.float_scratch(&[polar::slots(e), k, k])?;
    let rows = ROWS.max(n.div_ceil(BLOCKS));
    let blocks = n.div_ceil(rows);
    let grams = b.float_scratch(&[e, blocks, k, k])?;
    let scales = b.float_scratch(&[e, blocks])?;
    let (coefficients, spreads) = (b.float_scratch(&[e])?, b.float_scratch(&[e])?);
    let held_rows = (HELD / 4 / k).clamp(1, 16);
    let size = [e as u32, n as u32, k as u32];
    for round in 0..iterations.div_ceil(ROUND) {
        let iterations = ROUND.min(iterations - round * ROUND);
        let with_spread = round == 0;

        let tiles = k.div_ceil(TILE);
        let uses = [buffer, &grams, &scales];
        let grid = Grid::cubes(e * blocks * tiles * tiles, UNITS);
        let bytes = 4 * (e * n * k) as u64 + grams.bytes() + scales.bytes();
        b.launch("retract::gram", grid, bytes, &uses, |client, count, dim| {
            let ([x, grams, scales], [e, n, k]) = (uses.map(|t| b.floats(t)), size);
            let (firsts, starts) = (batch.firsts(), batch.scalars(0, |factor| factor.start));
            let (blocks, rows) = (blocks as u32, rows as u32);
            // Faults of the other kernels leave this one as it is, so that it is compiled once for all of them.
            let mutant = if [8, 9].contains(&mutant) { mutant } else { 0 };
            // SAFETY: a cube stays in its matrix, rows and columns; cubes behind the last matrix write nothing.
            unsafe {
                gram_kernel::launch_unchecked::<R>(
                    client, count, dim, x, grams, scales, firsts, starts, e, n, k, blocks, rows, mutant,
                )
            }
        })?;

        let part = polar::Part { blocks, iterations, with_spread };
        polar::launch(b, batch, &part, [&grams, &scales, &work, &coefficients, &spreads])?;

        let uses = [&work, &coefficients, &spreads, apply, buffer, spread];
        let grid = Grid::cubes(e * n.div_ceil(held_rows), UNITS);
        let bytes = 8 * (e * n * k) as u64 + 4 * (e * k * k) as u64;
        b.launch("retract::multiply", grid, bytes, &uses, |client, count, dim| {
            let ([work, coefficients, spreads, apply, x, spread], [e, n, k]) = (uses.map(|t| b.floats(t)), size);
            let (firsts, starts) = (batch.firsts(), batch.scalars(0, |factor| factor.start));
            let counts = batch.scalars(0, |factor| factor.count);
            let slots = batch.scalars(0, |factor| factor.slot);
            let stride = (polar::roles(with_spread) * polar::SLOTS) as u32 * k * k;
            let slot = polar::product_slot(iterations) as u32 * k * k;
            let rows = held_rows as u32;
            // SAFETY: a cube reads and writes its own rows; rows times k fit its memory.
            unsafe {
                multiply_kernel::launch_unchecked::<R>(
                    client,
                    count,
                    dim,
                    work,
                    coefficients,
                    spreads,
                    apply,
                    x,
                    spread,
                    firsts,
                    starts,
                    counts,
                    slots,
                    e,
                    n,
                    k,
                    rows,
                    stride,
                    slot,
                    u32::from(with_spread),
                    mutant,
                )
            }
        })?;
    }
    Ok(())
}

/// Retracts the matrices of every factor, each with its n and k, and writes each factor's largest spread into its slot of
/// `spreads`; as many as a launch takes share it. Nothing is written for factors without matrices, which are not to be
/// among them.
pub(crate) fn update_all<R: Engine>(
    b: &Device<R>,
    call: &Scalars<'_>,
    factors: &[(Factor, [usize; 2])],
    spreads: &Tensor,
) -> Result<()> {
    let &Scalars { buffer, apply, iterations, power_iterations, mutant } = call;
    let (small, large): (Vec<_>, Vec<_>) = factors.iter().partition(|(_, [_, k])| *k <= small::LARGEST_K);
    for factors in small.chunks(small::FACTORS) {
        small::update(b, call, factors, spreads)?;
    }
    let mut classes: Vec<([usize; 2], Vec<Factor>)> = Vec::new();
    for (factor, shape) in large {
        match classes.iter_mut().find(|(of, factors)| *of == shape && factors.len() < FACTORS) {
            Some((_, factors)) => factors.push(factor),
            None => classes.push((shape, vec![factor])),
        }
    }
    for ([n, k], factors) in &classes {
        let (factors, n, k) = (&factors[..], *n, *k);
        update(b, &Batch { buffer, apply, factors, n, k, iterations, power_iterations, mutant }, spreads)?;
    }
    Ok(())
}
