//! Arm `plain`: the equations as they stand, on a copy of the factor in scratch. One unit computes one element of a
//! product, or walks one small matrix. What comes of a zero matrix is not a number and is not written back.

use cubecl::prelude::*;
use dormouse_reference::Result;

use super::{CONSTANT, Call, LINEAR, MARGIN, PIVOT_FLOOR, SQUARE, eighth_power_mean, start};
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor};

/// The largest magnitude of `len` elements that lie `inner` apart; one unit, one of `count`.
#[cube(launch_unchecked)]
fn largest_kernel(x: &Floats, out: &mut Floats, count: u32, len: u32, inner: u32) {
    let i = ABSOLUTE_POS;
    if i < count as usize {
        let (len, inner) = (len as usize, inner as usize);
        let first = i / inner * inner * len + i % inner;
        let mut largest = 0.0f32;
        for n in 0..len {
            let size = x.at(first + n * inner).abs();
            if size > largest {
                largest = size;
            }
        }
        out.set(i, largest);
    }
}

/// Every matrix over its divisor; one unit, one element.
#[cube(launch_unchecked)]
fn divide_kernel(x: &Floats, divisors: &Floats, out: &mut Floats, len: u32, size: u32) {
    let i = ABSOLUTE_POS;
    if i < len as usize {
        out.set(i, x.at(i) / divisors.at(i / size as usize));
    }
}

/// a b, or a^T b; one unit, one element.
#[cube(launch_unchecked)]
fn product_kernel(
    a: &Floats,
    b: &Floats,
    out: &mut Floats,
    e: u32,
    rows: u32,
    depth: u32,
    columns: u32,
    #[comptime] transposed: bool,
) {
    let i = ABSOLUTE_POS;
    let (rows, depth, columns) = (rows as usize, depth as usize, columns as usize);
    if i < e as usize * rows * columns {
        let (row, column) = (i / columns % rows, i % columns);
        let matrix = i / (rows * columns);
        let mut sum = 0.0f32;
        for d in 0..depth {
            let mut at = row * depth + d;
            if transposed {
                at = d * rows + row;
            }
            sum += a.at(matrix * rows * depth + at) * b.at((matrix * depth + d) * columns + column);
        }
        out.set(i, sum);
    }
}

/// 15/8 I - 5/4 A + 3/8 A^2 from A and A^2; one unit, one element.
#[cube(launch_unchecked)]
fn polynomial_kernel(a: &Floats, square: &Floats, out: &mut Floats, len: u32, k: u32) {
    let i = ABSOLUTE_POS;
    if i < len as usize {
        let at = i % (k * k) as usize;
        let mut value = comptime!(SQUARE) * square.at(i) + comptime!(LINEAR) * a.at(i);
        if at / k as usize == at % k as usize {
            value += comptime!(CONSTANT);
        }
        out.set(i, value);
    }
}

/// The root of the sum of squares of every `len` elements; one unit, one sum.
#[cube(launch_unchecked)]
fn norm_kernel(x: &Floats, out: &mut Floats, count: u32, len: u32) {
    if ABSOLUTE_POS < count as usize {
        let mut square = 0.0f32;
        for i in 0..len as usize {
            let value = x.at(ABSOLUTE_POS * len as usize + i);
            square += value * value;
        }
        out.set(ABSOLUTE_POS, square.sqrt());
    }
}

/// The start of the power method; one unit, one element.
#[cube(launch_unchecked)]
fn start_kernel(out: &mut Floats, len: u32, k: u32) {
    if ABSOLUTE_POS < len as usize {
        out.set(ABSOLUTE_POS, start(ABSOLUTE_POS % k as usize));
    }
}

/// The larger of the two estimates of sigma, and what X is divided by; one unit, one matrix.
#[cube(launch_unchecked)]
fn sigma_kernel(
    eigenvalue: &Floats,
    size: &Floats,
    fourth: &Floats,
    sigma: &mut Floats,
    divisor: &mut Floats,
    e: u32,
    k: u32,
) {
    let i = ABSOLUTE_POS;
    if i < e as usize {
        let mut square = eigenvalue.at(i);
        let mean = eighth_power_mean(size.at(i), fourth.at(i), k);
        if mean > square {
            square = mean;
        }
        sigma.set(i, square.sqrt());
        divisor.set(i, comptime!(MARGIN) * square.sqrt());
    }
}

/// Column `j` of the Cholesky factor; one unit, one row of one matrix.
#[cube(launch_unchecked)]
fn cholesky_kernel(a: &Floats, sigma: &Floats, l: &mut Floats, j: u32, e: u32, k: u32) {
    let (j, k) = (j as usize, k as usize);
    let matrix = ABSOLUTE_POS / k;
    let i = ABSOLUTE_POS % k;
    if matrix < e as usize && i >= j {
        let first = matrix * k * k;
        let mut pivot = a.at(first + j * k + j);
        let mut rest = a.at(first + i * k + j);
        for m in 0..j {
            let known = l.at(first + j * k + m);
            pivot -= known * known;
            rest -= known * l.at(first + i * k + m);
        }
        let floor = comptime!(PIVOT_FLOOR) * sigma.at(matrix) * sigma.at(matrix);
        if pivot < floor {
            pivot = floor;
        }
        let root = pivot.sqrt();
        let mut value = rest / root;
        if i == j {
            value = root;
        }
        l.set(first + i * k + j, value);
    }
}

/// The solution x of L L^T x = b; one unit, one matrix.
#[cube(launch_unchecked)]
fn solve_kernel(l: &Floats, b: &Floats, x: &mut Floats, e: u32, k: u32) {
    let k = k as usize;
    if ABSOLUTE_POS < e as usize {
        let (first, row) = (ABSOLUTE_POS * k * k, ABSOLUTE_POS * k);
        for i in 0..k {
            let mut rest = b.at(row + i);
            for j in 0..i {
                rest -= l.at(first + i * k + j) * x.at(row + j);
            }
            x.set(row + i, rest / l.at(first + i * k + i));
        }
        for back in 0..k {
            let i = k - 1 - back;
            let mut rest = x.at(row + i);
            for j in i + 1..k {
                rest -= l.at(first + j * k + i) * x.at(row + j);
            }
            x.set(row + i, rest / l.at(first + i * k + i));
        }
    }
}

/// X where it is to be written; one unit, one element.
#[cube(launch_unchecked)]
fn write_kernel(x: &Floats, largest: &Floats, apply: &Floats, factor: &mut Floats, len: u32, size: u32) {
    let i = ABSOLUTE_POS;
    if i < len as usize && apply.at(0) == 1.0f32 && largest.at(i / size as usize) > 0.0f32 {
        factor.set(i, x.at(i));
    }
}

/// The largest spread of the matrices that are not zero. One unit.
#[cube(launch_unchecked)]
fn spread_kernel(sigma: &Floats, inverse: &Floats, largest: &Floats, apply: &Floats, out: &mut Floats, e: u32) {
    if ABSOLUTE_POS == 0 {
        let mut widest = 0.0f32;
        for i in 0..e as usize {
            if largest.at(i) > 0.0f32 && apply.at(0) == 1.0f32 {
                let spread = sigma.at(i) * inverse.at(i).sqrt();
                if spread > widest {
                    widest = spread;
                }
            }
        }
        out.set(0, widest);
    }
}

/// The launches that the algorithm is written in, for `e` matrices.
struct Matrices<'a, R: Engine> {
    b: &'a Device<R>,
    e: usize,
}

impl<R: Engine> Matrices<'_, R> {
    /// `[e, rows, columns]`; never empty, since an empty buffer is no argument of a kernel.
    fn scratch(&self, rows: usize, columns: usize) -> Result<Tensor> {
        self.b.float_scratch(&[self.e.max(1), rows, columns])
    }

    fn largest(&self, x: &Tensor, len: usize, inner: usize) -> Result<Tensor> {
        let out = self.scratch(1, inner)?;
        let count = self.e * inner;
        self.run("retract::largest", count, &[x, &out], |client, cubes, dim, [x, out]| {
            // SAFETY: `x` has `len` elements for each of `count`.
            unsafe {
                largest_kernel::launch_unchecked::<R>(
                    client,
                    cubes,
                    dim,
                    x,
                    out,
                    count as u32,
                    len as u32,
                    inner as u32,
                )
            }
        })?;
        Ok(out)
    }

    fn divide(&self, x: &Tensor, divisors: &Tensor, size: usize) -> Result<Tensor> {
        let out = self.scratch(1, size)?;
        let len = self.e * size;
        self.run("retract::divide", len, &[x, divisors, &out], |client, cubes, dim, [x, divisors, out]| {
            // SAFETY: `x` and `out` have `len` elements, and there is a divisor for every `size` of them.
            unsafe {
                divide_kernel::launch_unchecked::<R>(client, cubes, dim, x, divisors, out, len as u32, size as u32)
            }
        })?;
        Ok(out)
    }

    fn product(
        &self,
        (a, transposed): (&Tensor, bool),
        b: &Tensor,
        [rows, depth, columns]: [usize; 3],
    ) -> Result<Tensor> {
        let out = self.scratch(rows, columns)?;
        let count = self.e * rows * columns;
        self.run("retract::product", count, &[a, b, &out], |client, cubes, dim, [a, b, out]| {
            let (e, rows, depth, columns) = (self.e as u32, rows as u32, depth as u32, columns as u32);
            // SAFETY: the caller names the factors' shapes.
            unsafe {
                product_kernel::launch_unchecked::<R>(
                    client, cubes, dim, a, b, out, e, rows, depth, columns, transposed,
                )
            }
        })?;
        Ok(out)
    }

    fn polynomial(&self, a: &Tensor, k: usize) -> Result<Tensor> {
        let square = self.product((a, false), a, [k, k, k])?;
        let out = self.scratch(k, k)?;
        let len = self.e * k * k;
        self.run("retract::polynomial", len, &[a, &square, &out], |client, cubes, dim, [a, square, out]| {
            // SAFETY: all have `len` elements.
            unsafe {
                polynomial_kernel::launch_unchecked::<R>(client, cubes, dim, a, square, out, len as u32, k as u32)
            }
        })?;
        Ok(out)
    }

    fn norm(&self, x: &Tensor, len: usize) -> Result<Tensor> {
        let out = self.scratch(1, 1)?;
        let e = self.e;
        self.run("retract::norm", e, &[x, &out], |client, cubes, dim, [x, out]| {
            // SAFETY: `x` has `len` elements a matrix.
            unsafe { norm_kernel::launch_unchecked::<R>(client, cubes, dim, x, out, e as u32, len as u32) }
        })?;
        Ok(out)
    }

    /// The power method's estimate of the largest eigenvalue of `map`.
    fn power(&self, k: usize, iterations: usize, map: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let mut u = self.scratch(k, 1)?;
        let len = self.e * k;
        self.run("retract::start", len, &[&u], |client, cubes, dim, [u]| {
            // SAFETY: `u` has `len` elements.
            unsafe { start_kernel::launch_unchecked::<R>(client, cubes, dim, u, len as u32, k as u32) }
        })?;
        let mut eigenvalue = self.norm(&u, k)?;
        for _ in 0..iterations {
            u = map(&self.divide(&u, &eigenvalue, k)?)?;
            eigenvalue = self.norm(&u, k)?;
        }
        Ok(eigenvalue)
    }

    fn cholesky(&self, a: &Tensor, sigma: &Tensor, k: usize) -> Result<Tensor> {
        let l = self.scratch(k, k)?;
        let e = self.e as u32;
        for j in 0..k {
            self.run("retract::cholesky", self.e * k, &[a, sigma, &l], |client, cubes, dim, [a, sigma, l]| {
                // SAFETY: all matrices are k by k; a unit writes one element of column j and reads earlier columns.
                unsafe {
                    cholesky_kernel::launch_unchecked::<R>(client, cubes, dim, a, sigma, l, j as u32, e, k as u32)
                }
            })?;
        }
        Ok(l)
    }

    fn solve(&self, l: &Tensor, b: &Tensor, k: usize) -> Result<Tensor> {
        let x = self.scratch(k, 1)?;
        let e = self.e;
        self.run("retract::solve", e, &[l, b, &x], |client, cubes, dim, [l, b, x]| {
            // SAFETY: a unit stays in its matrix and vectors.
            unsafe { solve_kernel::launch_unchecked::<R>(client, cubes, dim, l, b, x, e as u32, k as u32) }
        })?;
        Ok(x)
    }

    /// Launches `count` units on tensors of floats.
    fn run<const N: usize>(
        &self,
        name: &'static str,
        count: usize,
        uses: &[&Tensor; N],
        issue: impl FnOnce(&cubecl::client::ComputeClient<R>, CubeCount, CubeDim, [crate::tensor::FloatsLaunch<R>; N]),
    ) -> Result<()> {
        let bytes = uses.iter().map(|t| t.bytes()).sum();
        self.b.launch(name, Grid::units(count), bytes, uses, |client, cubes, dim| {
            issue(client, cubes, dim, uses.map(|t| self.b.floats(t)));
        })
    }
}

/// Retracts every matrix; returns the largest spread.
pub(crate) fn update<R: Engine>(b: &Device<R>, call: &Call<'_>) -> Result<Tensor> {
    let &Call { factor, apply, e, n, k, iterations, power_iterations } = call;
    let on = Matrices { b, e };
    let columns = on.largest(factor, n, k)?;
    let largest = on.largest(&columns, k, 1)?;
    let mut x = on.divide(factor, &largest, n * k)?;
    let a = on.product((&x, true), &x, [k, n, k])?;

    let eigenvalue = on.power(k, power_iterations, |u| on.product((&a, false), u, [k, k, 1]))?;
    let size = on.norm(&a, k * k)?;
    let first = on.divide(&a, &size, k * k)?;
    let second = on.product((&first, false), &first, [k, k, k])?;
    let fourth = on.norm(&on.product((&second, false), &second, [k, k, k])?, k * k)?;
    let (sigma, divisor) = (on.scratch(1, 1)?, on.scratch(1, 1)?);
    let uses = [&eigenvalue, &size, &fourth, &sigma, &divisor];
    on.run("retract::sigma", e, &uses, |client, cubes, dim, [eigenvalue, size, fourth, sigma, divisor]| {
        let (e, k) = (e as u32, k as u32);
        // SAFETY: all have one element a matrix.
        unsafe {
            sigma_kernel::launch_unchecked::<R>(client, cubes, dim, eigenvalue, size, fourth, sigma, divisor, e, k)
        }
    })?;

    let l = on.cholesky(&a, &sigma, k)?;
    let inverse = on.power(k, power_iterations, |u| on.solve(&l, u, k))?;
    let spread = b.float_scratch(&[1])?;
    let uses = [&sigma, &inverse, &largest, apply, &spread];
    on.run("retract::spread", 1, &uses, |client, cubes, dim, [sigma, inverse, largest, apply, spread]| {
        // SAFETY: one unit reads one element a matrix.
        unsafe {
            spread_kernel::launch_unchecked::<R>(client, cubes, dim, sigma, inverse, largest, apply, spread, e as u32)
        }
    })?;

    x = on.divide(&x, &divisor, n * k)?;
    for _ in 0..iterations {
        let a = on.product((&x, true), &x, [k, n, k])?;
        let polynomial = on.polynomial(&a, k)?;
        x = on.product((&x, false), &polynomial, [n, k, k])?;
    }
    let uses = [&x, &largest, apply, factor];
    on.run("retract::write", factor.len(), &uses, |client, cubes, dim, [x, largest, apply, factor]| {
        let (len, size) = (call.factor.len() as u32, (n * k) as u32);
        // SAFETY: `x` and the factor have `len` elements, and there is one of `largest` for every `size` of them.
        unsafe { write_kernel::launch_unchecked::<R>(client, cubes, dim, x, largest, apply, factor, len, size) }
    })?;
    Ok(spread)
}
