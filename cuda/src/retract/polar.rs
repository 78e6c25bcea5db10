//! The k by k work of arm `fused`: a cube multiplies the polynomials of a matrix, and, in the first round, a second one
//! estimates its spread. Both find sigma first, each for itself, so that neither waits for the other.
//!
//! Matrices lie in scratch, `SLOTS` for a cube, and go through shared memory a tile at a time, so k is limited only by
//! the vectors of the power method. All of them are polynomials of one symmetric matrix and so symmetric: rows are read
//! for columns wherever neighbours then read neighbours.
//!
//! For the spread, L^-1 is formed once (column by column, which takes no waiting), so that every step of the power method
//! on A^-1 = L^-T L^-1 is two products with a vector in place of two triangular solves.

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::fused::Batch;
use super::{CONSTANT, LINEAR, MARGIN, PIVOT_FLOOR, SQUARE, spectral_norm, start};
use crate::cube;
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::scale::inverse_of;
use crate::tensor::{Floats, Tensor};

/// Units of a cube.
const UNITS: u32 = 256;

/// The largest k: two vectors in shared memory beside the tiles.
pub(super) const LARGEST_K: usize = 2048;

/// Rows and columns of a block of a product, 4 by 4 elements a unit, and the depth of its tiles.
const SIDE: usize = 64;
const DEPTH: usize = 16;

/// Matrices that a cube works in.
pub(super) const SLOTS: usize = 5;

/// Where they are. The product of the polynomials alternates between the last two.
const A: usize = 0;
const P: usize = 1;
const Q: usize = 2;
const M: usize = 3;

/// Of the cube for the spread: L transposed, and L^-1.
const L: usize = 1;
const W: usize = 2;

/// Where the product of so many polynomials is.
pub(super) const fn product_slot(iterations: usize) -> usize {
    M + (iterations + 1) % 2
}

/// What of the operation one launch does.
pub(super) struct Part {
    pub blocks: usize,
    pub iterations: usize,
    pub with_spread: bool,
}

/// out = alpha X Y + beta X + gamma I of k by k matrices that begin at `x`, `y` and `out` of `work`; X is symmetric and
/// `out` neither of the others. Waits until all is written.
#[cube]
fn multiply(
    work: &mut Floats,
    x: usize,
    y: usize,
    out: usize,
    alpha: f32,
    beta: f32,
    gamma: f32,
    k: usize,
    of_x: &mut SharedMemory<f32>,
    of_y: &mut SharedMemory<f32>,
) {
    let me = UNIT_POS as usize;
    let units = comptime!(UNITS as usize);
    let side = comptime!(SIDE);
    let depth = comptime!(DEPTH);
    let (row, column) = (me / 16, me % 16);
    let tiles = k.div_ceil(side);
    for tile in 0..tiles * tiles {
        let (top, left) = (tile / tiles * side, tile % tiles * side);
        let mut sums = Array::<f32>::new(16usize);
        #[unroll]
        for s in 0..16usize {
            sums[s] = 0.0f32;
        }
        for step in 0..k.div_ceil(depth) {
            #[unroll]
            for part in 0..4usize {
                let at = part * units + me;
                let (d, c) = (step * depth + at / side, at % side);
                let mut value_x = 0.0f32;
                let mut value_y = 0.0f32;
                if d < k {
                    if top + c < k {
                        value_x = work.at(x + d * k + top + c);
                    }
                    if left + c < k {
                        value_y = work.at(y + d * k + left + c);
                    }
                }
                of_x[at] = value_x;
                of_y[at] = value_y;
            }
            sync_cube();
            // A length known at compile time would be unrolled.
            let mut last = k - step * depth;
            if last > depth {
                last = depth;
            }
            for d in 0..last {
                let mut xs = Array::<f32>::new(4usize);
                let mut ys = Array::<f32>::new(4usize);
                #[unroll]
                for s in 0..4usize {
                    xs[s] = of_x[d * side + row + s * 16];
                    ys[s] = of_y[d * side + column + s * 16];
                }
                #[unroll]
                for s in 0..16usize {
                    sums[s] += xs[comptime!(s / 4)] * ys[comptime!(s % 4)];
                }
            }
            sync_cube();
        }
        #[unroll]
        for s in 0..16usize {
            let r = top + row + comptime!(s / 4 * 16);
            let c = left + column + comptime!(s % 4 * 16);
            if r < k && c < k {
                let at = r * k + c;
                let mut value = alpha * sums[s] + beta * work.at(x + at);
                if r == c {
                    value += gamma;
                }
                work.set(out + at, value);
            }
        }
    }
    sync_storage();
}

/// The sum of squares of a k by k matrix.
#[cube]
fn square_sum(work: &Floats, at: usize, k: usize, shared: &mut SharedMemory<f32>) -> f32 {
    let units = comptime!(UNITS as usize);
    let mut sum = 0.0f32;
    for step in 0..(k * k).div_ceil(units) {
        let i = step * units + UNIT_POS as usize;
        if i < k * k {
            let value = work.at(at + i);
            sum += value * value;
        }
    }
    cube::total(sum, shared)
}

/// The start of the power method over its norm, into `u`.
#[cube]
fn begin(u: &mut SharedMemory<f32>, k: usize, shared: &mut SharedMemory<f32>) {
    let units = comptime!(UNITS as usize);
    let mut square = 0.0f32;
    for step in 0..k.div_ceil(units) {
        let i = step * units + UNIT_POS as usize;
        if i < k {
            let value = start(i);
            u[i] = value;
            square += value * value;
        }
    }
    let norm = cube::total(square, shared).sqrt();
    scale(u, 1.0f32 / norm, k);
}

/// u times a factor. Waits until all is written.
#[cube]
fn scale(u: &mut SharedMemory<f32>, factor: f32, k: usize) {
    let units = comptime!(UNITS as usize);
    for step in 0..k.div_ceil(units) {
        let i = step * units + UNIT_POS as usize;
        if i < k {
            u[i] *= factor;
        }
    }
    sync_cube();
}

/// out = X u, or X^T u, of the matrix at `x`, and |out|. Waits until all is written.
#[cube]
fn apply_to(
    work: &Floats,
    x: usize,
    u: &SharedMemory<f32>,
    out: &mut SharedMemory<f32>,
    k: usize,
    shared: &mut SharedMemory<f32>,
    #[comptime] transposed: bool,
) -> f32 {
    let units = comptime!(UNITS as usize);
    let mut square = 0.0f32;
    for step in 0..k.div_ceil(units) {
        let i = step * units + UNIT_POS as usize;
        if i < k {
            let mut sum = 0.0f32;
            for d in 0..k {
                if transposed {
                    sum += work.at(x + d * k + i) * u[d];
                } else {
                    sum += work.at(x + i * k + d) * u[d];
                }
            }
            out[i] = sum;
            square += sum * sum;
        }
    }
    cube::total(square, shared).sqrt()
}

/// Everything about a matrix but the product with X. In the first round `roles` is 2: X is brought to scale, cubes 0, 2,
/// .. multiply polynomials and cubes 1, 3, .. estimate spreads. Later it is 1, and all multiply.
///
/// Mutants: 1 has no margin, 2 drops the power mean, 3 the square term, 4 is null (a renamed local), 6 drops the power
/// method.
#[cube(launch_unchecked)]
fn polar_kernel(
    grams: &Floats,
    scales: &Floats,
    work: &mut Floats,
    coefficients: &mut Floats,
    spreads: &mut Floats,
    e: u32,
    k: u32,
    blocks: u32,
    roles: u32,
    iterations: u32,
    power_iterations: u32,
    #[comptime] mutant: u32,
) {
    let me = UNIT_POS as usize;
    let units = comptime!(UNITS as usize);
    let (k, blocks) = (k as usize, blocks as usize);
    let kk = k * k;
    let role = CUBE_POS % roles as usize;
    let mut matrix = CUBE_POS / roles as usize;
    // Cubes behind the last matrix must not miss a barrier: they do its work once more, in slots of their own.
    if matrix >= e as usize {
        matrix = e as usize - 1;
    }
    let base = CUBE_POS * comptime!(SLOTS) * kk;
    let a = base + comptime!(A) * kk;
    let p = base + comptime!(P) * kk;
    let q = base + comptime!(Q) * kk;

    let mut shared = SharedMemory::<f32>::new(comptime!(UNITS as usize));
    let mut of_x = SharedMemory::<f32>::new(comptime!(SIDE * DEPTH));
    let mut of_y = SharedMemory::<f32>::new(comptime!(SIDE * DEPTH));
    let mut u = SharedMemory::<f32>::new(comptime!(LARGEST_K));
    let mut v = SharedMemory::<f32>::new(comptime!(LARGEST_K));

    let mut unit = 0.0f32;
    for block in 0..blocks {
        let candidate = scales.at(matrix * blocks + block);
        if candidate > unit {
            unit = candidate;
        }
    }
    let inverse = inverse_of(unit);
    for step in 0..kk.div_ceil(units) {
        let i = step * units + me;
        if i < kk {
            let mut sum = 0.0f32;
            for block in 0..blocks {
                let place = matrix * blocks + block;
                let ratio = scales.at(place) * inverse;
                sum += grams.at(place * kk + i) * ratio * ratio;
            }
            work.set(a + i, sum);
        }
    }
    sync_storage();

    let mut sigma = 0.0f32;
    if roles == 2u32 {
        begin(&mut u, k, &mut shared);
        let mut eigenvalue = 0.0f32;
        for _step in 0..power_iterations {
            eigenvalue = apply_to(work, a, &u, &mut v, k, &mut shared, true);
            copy_scaled(&v, &mut u, 1.0f32 / eigenvalue, k);
        }
        // (A / |A|)^4 by squaring twice.
        let size = square_sum(work, a, k, &mut shared).sqrt();
        for squaring in 0..2u32 {
            let mut from = a;
            let mut into = p;
            let mut alpha = 1.0f32 / size / size;
            if squaring == 1u32 {
                from = p;
                into = q;
                alpha = 1.0f32;
            }
            multiply(work, from, from, into, alpha, 0.0f32, 0.0f32, k, &mut of_x, &mut of_y);
        }
        let fourth = square_sum(work, q, k, &mut shared).sqrt();
        sigma = spectral_norm(size, fourth, eigenvalue, k as u32, mutant);
    }

    if role == 0 {
        // X has its scale after the first round; only its power of two is put back into A.
        let mut divisor = inverse;
        if roles == 2u32 {
            divisor = comptime!(MARGIN) * sigma;
            if comptime!(mutant == 1) {
                divisor = sigma;
            }
        }
        if me == 0 {
            let mut coefficient = inverse / divisor;
            if unit == 0.0f32 {
                coefficient = 0.0f32;
            }
            coefficients.set(matrix, coefficient);
        }
        for step in 0..kk.div_ceil(units) {
            let i = step * units + me;
            if i < kk {
                let value = work.at(a + i) / divisor / divisor;
                work.set(a + i, value);
            }
        }
        sync_storage();
        let mut square_term = f32::new(comptime!(SQUARE));
        if comptime!(mutant == 3) {
            square_term = 0.0f32;
        }
        if comptime!(mutant == 4) {
            let renamed = f32::new(comptime!(SQUARE));
            square_term = renamed;
        }
        let linear = f32::new(comptime!(LINEAR));
        let constant = f32::new(comptime!(CONSTANT));
        for step in 0..iterations {
            let product = base + (comptime!(M) + (step + 1u32) as usize % 2) * kk;
            let next = base + (comptime!(M) + step as usize % 2) * kk;
            // The first polynomial is the product of all so far.
            let mut here = p;
            if step == 0u32 {
                here = next;
            }
            // P from A, the product so far times P, Q = P A, and A = P Q; the last iteration needs no more A. One call in
            // a loop, because every call is compiled anew.
            for part in 0..4u32 {
                let mut wanted = true;
                let mut x = here;
                let mut y = a;
                let mut out = q;
                let mut alpha = 1.0f32;
                let mut beta = 0.0f32;
                let mut gamma = 0.0f32;
                if part == 0u32 {
                    x = a;
                    out = here;
                    alpha = square_term;
                    beta = linear;
                    gamma = constant;
                } else if part == 1u32 {
                    wanted = step > 0u32;
                    x = product;
                    y = p;
                    out = next;
                } else {
                    wanted = step + 1u32 < iterations;
                    if part == 3u32 {
                        y = q;
                        out = a;
                    }
                }
                if wanted {
                    multiply(work, x, y, out, alpha, beta, gamma, k, &mut of_x, &mut of_y);
                }
            }
        }
    } else {
        let l = base + comptime!(L) * kk;
        let w = base + comptime!(W) * kk;
        cholesky(work, a, l, comptime!(PIVOT_FLOOR) * sigma * sigma, k);
        invert(work, l, w, k);
        begin(&mut u, k, &mut shared);
        let mut inverse_square = 0.0f32;
        for _step in 0..power_iterations {
            apply_to(work, w, &u, &mut v, k, &mut shared, false);
            inverse_square = apply_to(work, w, &v, &mut u, k, &mut shared, true);
            scale(&mut u, 1.0f32 / inverse_square, k);
        }
        if me == 0 {
            let mut spread = sigma * inverse_square.sqrt();
            if unit == 0.0f32 {
                spread = 0.0f32;
            }
            spreads.set(matrix, spread);
        }
    }
}

/// into = factor from. Waits until all is written.
#[cube]
fn copy_scaled(from: &SharedMemory<f32>, into: &mut SharedMemory<f32>, factor: f32, k: usize) {
    let units = comptime!(UNITS as usize);
    for step in 0..k.div_ceil(units) {
        let i = step * units + UNIT_POS as usize;
        if i < k {
            into[i] = from[i] * factor;
        }
    }
    sync_cube();
}

/// The transpose of the Cholesky factor of the matrix at `a`, pivots kept at `floor` or above; its other triangle is not
/// written. A column is finished before the next begins; every unit computes the pivot for itself.
#[cube]
fn cholesky(work: &mut Floats, a: usize, l: usize, floor: f32, k: usize) {
    let units = comptime!(UNITS as usize);
    for j in 0..k {
        for step in 0..(k - j).div_ceil(units) {
            let i = j + step * units + UNIT_POS as usize;
            if i < k {
                let mut pivot = work.at(a + j * k + j);
                let mut rest = work.at(a + j * k + i);
                for m in 0..j {
                    let known = work.at(l + m * k + j);
                    pivot -= known * known;
                    rest -= known * work.at(l + m * k + i);
                }
                if pivot < floor {
                    pivot = floor;
                }
                let root = pivot.sqrt();
                let mut value = rest / root;
                if i == j {
                    value = root;
                }
                work.set(l + j * k + i, value);
            }
        }
        sync_storage();
    }
}

/// W = L^-1 from the transpose of L. A unit walks down its column, which needs no other; above the diagonal it writes
/// zeros.
#[cube]
fn invert(work: &mut Floats, l: usize, w: usize, k: usize) {
    let units = comptime!(UNITS as usize);
    for step in 0..k.div_ceil(units) {
        let c = step * units + UNIT_POS as usize;
        if c < k {
            for i in 0..k {
                let mut rest = 0.0f32;
                if i == c {
                    rest = 1.0f32;
                }
                for m in c..i {
                    rest -= work.at(l + m * k + i) * work.at(w + m * k + c);
                }
                let value = rest / work.at(l + i * k + i);
                work.set(w + i * k + c, value);
            }
        }
    }
    sync_storage();
}

/// Cubes of a launch for `e` matrices.
fn grid(e: usize, with_spread: bool) -> Grid {
    Grid::cubes(e * roles(with_spread), UNITS)
}

/// Cubes of a matrix.
pub(super) fn roles(with_spread: bool) -> usize {
    1 + usize::from(with_spread)
}

/// Matrices of scratch that a launch for `e` matrices works in.
pub(super) fn slots(e: usize) -> usize {
    let (x, y) = grid(e, true).cubes;
    x as usize * y as usize * SLOTS
}

/// Launches the k by k work on `[grams, scales, work, coefficients, spreads]`.
pub(super) fn launch<R: Engine>(b: &Device<R>, batch: &Batch<'_>, part: &Part, uses: [&Tensor; 5]) -> Result<()> {
    let (&Part { blocks, iterations, with_spread }, &Batch { k, power_iterations, mutant, .. }) = (part, batch);
    let e = batch.matrices();
    // Mutants of other kernels leave this one as it is, so that it is compiled once for all of them.
    let mutant = if [1, 2, 3, 4, 6].contains(&mutant) { mutant } else { 0 };
    let [grams, scales, ..] = uses;
    let bytes = grams.bytes() + scales.bytes() + 4 * (e * (k * k + 2)) as u64;
    b.launch("retract::polar", grid(e, with_spread), bytes, &uses, |client, count, dim| {
        let [grams, scales, work, coefficients, spreads] = uses.map(|t| b.floats(t));
        let (e, k, blocks, roles) = (e as u32, k as u32, blocks as u32, roles(with_spread) as u32);
        let (iterations, power_iterations) = (iterations as u32, power_iterations as u32);
        // SAFETY: a cube stays in its own slots; every access is guarded by k.
        unsafe {
            polar_kernel::launch_unchecked::<R>(
                client,
                count,
                dim,
                grams,
                scales,
                work,
                coefficients,
                spreads,
                e,
                k,
                blocks,
                roles,
                iterations,
                power_iterations,
                mutant,
            )
        }
    })
}
