//! The k by k work for k <= 64, within one cube's registers and shared memory: a cube multiplies the polynomials of a
//! matrix, and, in the first round, a second one estimates its spread. Both find sigma first, each for itself, so that
//! neither waits for the other. It reads the shares of A once and writes one k by k matrix.
//!
//! Shared memory is two matrices of 64 by 64, zeros beyond k, which is all that every runtime has; vectors and sums take
//! the second where it is free. A unit has 4 by 4 elements of every matrix. All matrices but L are polynomials of one
//! symmetric matrix and so symmetric: rows are read for columns.
//!
//! For the spread, W = L^-1 comes of the elimination that gives L, applied to the identity: when column j is eliminated, row
//! j of W is finished. So every step of the power method on A^-1 = W^T W is two products with a vector in place of two
//! triangular solves.

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::{CONSTANT, LINEAR, MARGIN, PIVOT_FLOOR, SQUARE, spectral_norm, start};
use crate::cube::larger;
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::scale::inverse_of;
use crate::tall::{HELD, Layout, NARROW, Table, UNITS, pick};
use crate::tensor::{Floats, Tensor};

/// Rows and columns in shared memory.
const SIDE: usize = NARROW;

/// Where a free matrix holds a vector, its image, and what units add up.
const U: usize = 0;
const V: usize = SIDE;
const PARTS: usize = 2 * SIDE;
const SUMS: usize = PARTS + UNITS as usize;

/// What of the operation one launch does.
pub(super) struct Part {
    pub iterations: usize,
    pub power_iterations: usize,
    pub with_spread: bool,
    pub mutant: u32,
}

/// A unit's elements of X Y, X symmetric.
#[cube]
fn product(x: &SharedMemory<f32>, y: &SharedMemory<f32>, k: usize) -> Array<f32> {
    let side = comptime!(SIDE);
    let me = UNIT_POS as usize;
    let (top, left) = (me / 16 * 4, me % 16 * 4);
    let mut sums = Array::<f32>::new(16usize);
    #[unroll]
    for s in 0..16usize {
        sums[s] = 0.0f32;
    }
    for d in 0..k {
        let mut xs = Array::<f32>::new(4usize);
        let mut ys = Array::<f32>::new(4usize);
        #[unroll]
        for s in 0..4usize {
            xs[s] = x[d * side + top + s];
            ys[s] = y[d * side + left + s];
        }
        #[unroll]
        for s in 0..16usize {
            sums[s] += xs[comptime!(s / 4)] * ys[comptime!(s % 4)];
        }
    }
    sums
}

/// The units' elements times a factor into shared memory, when all units have done with what was there. Waits until all is
/// written.
#[cube]
fn store(values: &Array<f32>, into: &mut SharedMemory<f32>, factor: f32) {
    let side = comptime!(SIDE);
    let me = UNIT_POS as usize;
    let (top, left) = (me / 16 * 4, me % 16 * 4);
    sync_cube();
    #[unroll]
    for s in 0..16usize {
        into[(top + comptime!(s / 4)) * side + left + comptime!(s % 4)] = values[s] * factor;
    }
    sync_cube();
}

/// The sum of the squares of all units' elements, through a free matrix.
#[cube]
fn square_sum(values: &Array<f32>, free: &mut SharedMemory<f32>) -> f32 {
    let me = UNIT_POS as usize;
    let mut mine = 0.0f32;
    #[unroll]
    for s in 0..16usize {
        mine += values[s] * values[s];
    }
    sync_cube();
    free[comptime!(PARTS) + me] = mine;
    sync_cube();
    if me < 16 {
        let mut sum = 0.0f32;
        #[unroll]
        for s in 0..16usize {
            sum += free[comptime!(PARTS + 16 * s) + me];
        }
        free[comptime!(SUMS) + me] = sum;
    }
    sync_cube();
    let mut all = 0.0f32;
    #[unroll]
    for s in 0..16usize {
        all += free[comptime!(SUMS + s)];
    }
    all
}

/// The norm of the vector at `at`, for every unit.
#[cube]
fn norm_of(vectors: &SharedMemory<f32>, at: usize) -> f32 {
    let mut parts = Array::<f32>::new(4usize);
    #[unroll]
    for s in 0..4usize {
        parts[s] = 0.0f32;
    }
    for d in 0..comptime!(SIDE / 4).runtime() {
        #[unroll]
        for s in 0..4usize {
            let value = vectors[at + d * 4 + s];
            parts[s] += value * value;
        }
    }
    ((parts[0] + parts[1]) + (parts[2] + parts[3])).sqrt()
}

/// The start of the power method over its norm, with zeros behind it.
#[cube]
fn begin(vectors: &mut SharedMemory<f32>, k: usize) {
    let me = UNIT_POS as usize;
    sync_cube();
    if me < comptime!(SIDE) {
        let mut value = 0.0f32;
        if me < k {
            value = start(me);
        }
        vectors[comptime!(U) + me] = value;
    }
    sync_cube();
    let norm = norm_of(vectors, comptime!(U));
    rescale(vectors, comptime!(U), 1.0f32 / norm);
}

/// The vector at `from` times a factor, at [`U`]. Waits until all is written.
#[cube]
fn rescale(vectors: &mut SharedMemory<f32>, from: usize, factor: f32) {
    let me = UNIT_POS as usize;
    sync_cube();
    if me < comptime!(SIDE) {
        vectors[comptime!(U) + me] = vectors[from + me] * factor;
    }
    sync_cube();
}

/// The image of the vector at `from` under X, or under X^T, at `into`. Four units share an element. Waits until all is
/// written.
#[cube]
fn image(
    x: &SharedMemory<f32>,
    vectors: &mut SharedMemory<f32>,
    from: usize,
    into: usize,
    #[comptime] transposed: bool,
) {
    let side = comptime!(SIDE);
    let me = UNIT_POS as usize;
    let (i, part) = (me % side, me / side);
    let mut sum = 0.0f32;
    for step in 0..comptime!(SIDE / 4).runtime() {
        let d = part * comptime!(SIDE / 4) + step;
        if comptime!(transposed) {
            sum += x[d * side + i] * vectors[from + d];
        } else {
            // Every unit begins in a column of its own, since those of one column lie in one bank.
            let c = (d + i) % side;
            sum += x[i * side + c] * vectors[from + c];
        }
    }
    vectors[comptime!(PARTS) + me] = sum;
    sync_cube();
    if me < side {
        let mut all = 0.0f32;
        #[unroll]
        for s in 0..4usize {
            all += vectors[comptime!(PARTS + s * SIDE) + me];
        }
        vectors[into + me] = all;
    }
    sync_cube();
}

/// Everything about a matrix but the product with X. In the first round `roles` is 2: X is brought to scale, cubes 0, 2,
/// .. multiply polynomials and cubes 1, 3, .. estimate spreads. Later it is 1, and all multiply.
///
/// Mutants: 1 has no margin, 2 drops the power mean, 3 the square term, 4 is null (a renamed local), 6 drops the power
/// method.
#[cube(launch_unchecked)]
fn polar_kernel(
    shares: &Floats,
    scales: &Floats,
    products: &mut Floats,
    coefficients: &mut Floats,
    spreads: &mut Floats,
    table: Table,
    roles: u32,
    iterations: u32,
    power_iterations: u32,
    #[comptime] mutant: u32,
) {
    let me = UNIT_POS as usize;
    let (top, left) = (me / 16 * 4, me % 16 * 4);
    let role = CUBE_POS % roles as usize;
    let matrix = CUBE_POS / roles as usize;
    let here = matrix < table.all_matrices as usize;
    let k = pick::<u32>(matrix, &table.matrices, &table.k) as usize;
    let blocks = pick::<u32>(matrix, &table.matrices, &table.blocks) as usize;
    let place = matrix - pick::<u32>(matrix, &table.matrices, &table.matrices) as usize;
    let cubes = pick::<u32>(matrix, &table.matrices, &table.cubes) as usize + place * blocks;
    let stride = (table.widest * table.widest) as usize;

    let mut first = SharedMemory::<f32>::new_aligned(comptime!(HELD), 16usize);
    let mut second = SharedMemory::<f32>::new_aligned(comptime!(HELD), 16usize);

    let mut unit = 0.0f32;
    let mut a = Array::<f32>::new(16usize);
    #[unroll]
    for s in 0..16usize {
        a[s] = 0.0f32;
    }
    // Cubes behind the last matrix have a matrix of zeros: they must not miss a barrier.
    if here {
        for block in 0..blocks {
            unit = larger(unit, scales.at(cubes + block));
        }
        for block in 0..blocks {
            let ratio = scales.at(cubes + block) * inverse_of(unit);
            let from = (cubes + block) * stride;
            #[unroll]
            for s in 0..16usize {
                let (i, j) = (top + comptime!(s / 4), left + comptime!(s % 4));
                if i < k && j < k {
                    a[s] += shares.at(from + i * k + j) * ratio * ratio;
                }
            }
        }
    }
    let inverse = inverse_of(unit);
    store(&a, &mut first, 1.0f32);

    let mut sigma = 0.0f32;
    if roles == 2u32 {
        begin(&mut second, k);
        let mut eigenvalue = 0.0f32;
        for _step in 0..power_iterations {
            image(&first, &mut second, comptime!(U), comptime!(V), true);
            eigenvalue = norm_of(&second, comptime!(V));
            rescale(&mut second, comptime!(V), 1.0f32 / eigenvalue);
        }
        // (A / |A|)^4 by squaring twice.
        let size = square_sum(&a, &mut second).sqrt();
        let squared = product(&first, &first, k);
        store(&squared, &mut second, 1.0f32 / size / size);
        let fourth = product(&second, &second, k);
        let fourth = square_sum(&fourth, &mut second).sqrt();
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
        if here && me == 0 {
            let mut coefficient = inverse / divisor;
            if unit == 0.0f32 {
                coefficient = 0.0f32;
            }
            coefficients.set(matrix, coefficient);
        }
        #[unroll]
        for s in 0..16usize {
            a[s] = a[s] / divisor / divisor;
        }
        let mut square_term = f32::new(comptime!(SQUARE));
        if comptime!(mutant == 3) {
            square_term = 0.0f32;
        }
        if comptime!(mutant == 4) {
            let renamed = f32::new(comptime!(SQUARE));
            square_term = renamed;
        }
        let mut m = Array::<f32>::new(16usize);
        #[unroll]
        for s in 0..16usize {
            m[s] = 0.0f32;
        }
        for step in 0..iterations {
            store(&a, &mut first, 1.0f32);
            let mut p = product(&first, &first, k);
            #[unroll]
            for s in 0..16usize {
                let (i, j) = (top + comptime!(s / 4), left + comptime!(s % 4));
                let mut value = square_term * p[s] + comptime!(LINEAR) * a[s];
                if i == j && i < k {
                    value += comptime!(CONSTANT);
                }
                p[s] = value;
            }
            store(&p, &mut second, 1.0f32);
            // The next A is P A P; the last iteration needs none.
            if step + 1u32 < iterations {
                let q = product(&second, &first, k);
                store(&q, &mut first, 1.0f32);
                let next = product(&second, &first, k);
                #[unroll]
                for s in 0..16usize {
                    a[s] = next[s];
                }
            }
            // The first polynomial is the product of all so far.
            if step == 0u32 {
                #[unroll]
                for s in 0..16usize {
                    m[s] = p[s];
                }
            } else {
                store(&m, &mut first, 1.0f32);
                let more = product(&first, &second, k);
                #[unroll]
                for s in 0..16usize {
                    m[s] = more[s];
                }
            }
        }
        #[unroll]
        for s in 0..16usize {
            let (i, j) = (top + comptime!(s / 4), left + comptime!(s % 4));
            if here && i < k && j < k {
                products.set(matrix * stride + i * k + j, m[s]);
            }
        }
    } else {
        let floor = comptime!(PIVOT_FLOOR) * sigma * sigma;
        let mut identity = Array::<f32>::new(16usize);
        #[unroll]
        for s in 0..16usize {
            let (i, j) = (top + comptime!(s / 4), left + comptime!(s % 4));
            identity[s] = 0.0f32;
            if i == j && i < k {
                identity[s] = 1.0f32;
            }
        }
        store(&identity, &mut second, 1.0f32);
        eliminate(&mut first, &mut second, floor, k);
        begin(&mut first, k);
        let mut inverse_square = 0.0f32;
        for _step in 0..power_iterations {
            image(&second, &mut first, comptime!(U), comptime!(V), false);
            image(&second, &mut first, comptime!(V), comptime!(U), true);
            inverse_square = norm_of(&first, comptime!(U));
            rescale(&mut first, comptime!(U), 1.0f32 / inverse_square);
        }
        if here && me == 0 {
            let mut spread = sigma * inverse_square.sqrt();
            if unit == 0.0f32 {
                spread = 0.0f32;
            }
            spreads.set(matrix, spread);
        }
    }
}

/// Makes W = L^-1 of the identity in `w`, with L L^T = A. Of `a` the upper triangle is used, and its diagonal is left with the
/// pivots, kept at `floor` or above where they are read. A column is eliminated from all rows behind it at once, and every
/// unit computes the pivot for itself.
#[cube]
fn eliminate(a: &mut SharedMemory<f32>, w: &mut SharedMemory<f32>, floor: f32, k: usize) {
    let side = comptime!(SIDE);
    let me = UNIT_POS as usize;
    let (row, column) = (me / 16, me % 16);
    for j in 0..k {
        let mut pivot = a[j * side + j];
        if pivot < floor {
            pivot = floor;
        }
        let root = pivot.sqrt();
        #[unroll]
        for s in 0..4usize {
            let i = row + comptime!(16 * s);
            if i > j && i < k {
                let of_row = a[j * side + i] / root;
                #[unroll]
                for t in 0..4usize {
                    let c = column + comptime!(16 * t);
                    if c <= j {
                        w[i * side + c] -= of_row * (w[j * side + c] / root);
                    } else if c >= i && c < k {
                        a[i * side + c] -= of_row * (a[j * side + c] / root);
                    }
                }
            }
        }
        sync_cube();
    }
    #[unroll]
    for s in 0..4usize {
        let i = row + comptime!(16 * s);
        if i < k {
            let mut pivot = a[i * side + i];
            if pivot < floor {
                pivot = floor;
            }
            let root = pivot.sqrt();
            #[unroll]
            for t in 0..4usize {
                w[i * side + column + comptime!(16 * t)] /= root;
            }
        }
    }
    sync_cube();
}

/// Launches the k by k work on `[shares, scales, products, coefficients, spreads]`.
pub(super) fn launch<R: Engine>(b: &Device<R>, of: &Layout, part: &Part, uses: [&Tensor; 5]) -> Result<()> {
    let &Part { iterations, power_iterations, with_spread, mutant } = part;
    let roles = 1 + usize::from(with_spread);
    // Mutants of other kernels leave this one as it is, so that it is compiled once for all of them.
    let mutant = if [1, 2, 3, 4, 6].contains(&mutant) { mutant } else { 0 };
    let bytes = uses.iter().map(|t| t.bytes()).sum();
    b.launch("retract::polar", Grid::cubes(of.matrices * roles, UNITS), bytes, &uses, |client, cubes, dim| {
        let [shares, scales, products, coefficients, spreads] = uses.map(|t| b.floats(t));
        let (roles, iterations, power_iterations) = (roles as u32, iterations as u32, power_iterations as u32);
        // SAFETY: a cube writes what is its own matrix's; every access is guarded by k.
        unsafe {
            polar_kernel::launch_unchecked::<R>(
                client,
                cubes,
                dim,
                shares,
                scales,
                products,
                coefficients,
                spreads,
                of.table(),
                roles,
                iterations,
                power_iterations,
                mutant,
            )
        }
    })
}
