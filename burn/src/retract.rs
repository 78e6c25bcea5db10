//! `retract`: brings the singular values of a factor close to one by a polynomial in its Gram matrix.

use burn_tensor::Tensor;
use burn_tensor::backend::Backend;
use dormouse_reference::retract::{Config, Outputs, Retract};
use dormouse_reference::{Error, Result, Tensors};

use crate::handle::{Burn, Handle};
use crate::maths::{flat, norm, number};
use crate::shapes::{check, config as option};

/// How far above the estimate of sigma the matrix is scaled down.
const MARGIN: f64 = 1.05;

/// Pivots of the Cholesky factor are kept above this share of sigma^2.
const PIVOT_FLOOR: f64 = 1e-6;

const OP: &str = "retract::update";

impl<B: Backend> Retract for Burn<B> {
    #[inline(never)]
    fn update(&self, config: &Config, factor: &Handle<B>, apply: &Handle<B>) -> Result<Outputs<Handle<B>>> {
        let stacked = factor.shape().len() == 3;
        let dims = check(OP, &[("factor", factor)], |_| if stacked { &["E", "n", "k"] } else { &["n", "k"] })?;
        dims.positive(&["n", "k"])?;
        let shape = [if stacked { dims.get("E") } else { 1 }, dims.get("n"), dims.get("k")];
        if shape[2] > shape[1] {
            let (expected, got) = ("k <= n".to_owned(), factor.shape().to_vec());
            return Err(Error::Shape { op: OP, arg: "factor", expected, got });
        }
        let spread = retract(self, OP, config, factor, shape, apply)?;
        Ok(Outputs { spread: self.scratch_of(self.tensor_of(vec![spread]), &[1]) })
    }
}

/// Retracts every matrix of a stack in place; gives the largest spread before.
pub(crate) fn retract<B: Backend>(
    b: &Burn<B>,
    op: &'static str,
    config: &Config,
    stack: &Handle<B>,
    [e, n, k]: [usize; 3],
    apply: &Handle<B>,
) -> Result<f64> {
    option(op, "iterations", config.iterations > 0, "at least 1", config.iterations)?;
    option(op, "power_iterations", config.power_iterations > 0, "at least 1", config.power_iterations)?;
    if b.peek_one(op, "apply", apply)? != 1.0 {
        return Ok(0.0);
    }
    let mut largest = 0.0f64;
    for matrix in 0..e {
        let place = b.view(stack, matrix * n * k, &[n, k])?;
        let x = b.read(op, "factor", &place)?.reshape([n, k]);
        let size = number(x.clone().abs().max());
        if size > 0.0 {
            let (x, spread) = one(config, x.div_scalar(size));
            b.write(op, "factor", &place, flat(x))?;
            largest = largest.max(spread);
        }
    }
    Ok(largest)
}

/// One matrix, its largest element 1, and its spread before.
fn one<B: Backend>(config: &Config, mut x: Tensor<B, 2>) -> (Tensor<B, 2>, f64) {
    let a = gram(&x);
    let by_power = largest_eigenvalue(&a, config.power_iterations, |u| a.clone().matmul(u));
    let sigma = by_power.max(eighth_power_mean(&a)).sqrt();
    let l = cholesky(&a, PIVOT_FLOOR * sigma * sigma);
    let of_inverse = largest_eigenvalue(&a, config.power_iterations, |u| solve(&l, u));
    x = x.div_scalar(MARGIN * sigma);
    for _ in 0..config.iterations {
        let a = gram(&x);
        let cubic = x.clone().matmul(a.clone());
        let quintic = cubic.clone().matmul(a);
        x = x.mul_scalar(15.0 / 8.0) - cubic.mul_scalar(5.0 / 4.0) + quintic.mul_scalar(3.0 / 8.0);
    }
    (x, sigma * of_inverse.sqrt())
}

/// X^T X.
fn gram<B: Backend>(x: &Tensor<B, 2>) -> Tensor<B, 2> {
    x.clone().transpose().matmul(x.clone())
}

/// (tr A^8 / k)^(1/8), by powers of A / |A|_F.
fn eighth_power_mean<B: Backend>(a: &Tensor<B, 2>) -> f64 {
    let size = norm(a.clone());
    let unit = a.clone().div_scalar(size);
    let second = unit.clone().matmul(unit);
    let fourth = second.clone().matmul(second);
    size * (norm(fourth).powi(2) / a.dims()[0] as f64).powf(0.125)
}

/// |M u| after steps u <- M u / |M u| from the fixed start: u_i = frac(0.618.. (i + 1)^2) - 1/2.
fn largest_eigenvalue<B: Backend>(
    like: &Tensor<B, 2>,
    steps: usize,
    map: impl Fn(Tensor<B, 2>) -> Tensor<B, 2>,
) -> f64 {
    let golden = (5f64.sqrt() - 1.0) / 2.0;
    let k = like.dims()[0];
    let start: Vec<f64> = (0..k).map(|i| (golden * ((i + 1) * (i + 1)) as f64).fract() - 0.5).collect();
    let data = burn_tensor::TensorData::new(start, [k, 1]);
    let mut u = Tensor::<B, 2>::from_data(data, (&like.device(), like.dtype()));
    u = u.clone().div_scalar(norm(u));
    let mut eigenvalue = 0.0;
    for _ in 0..steps {
        u = map(u);
        eigenvalue = norm(u.clone());
        u = u.div_scalar(eigenvalue);
    }
    eigenvalue
}

/// The columns of L with A = L L^T, the square of each pivot kept at `floor` or above.
fn cholesky<B: Backend>(a: &Tensor<B, 2>, floor: f64) -> Tensor<B, 2> {
    let k = a.dims()[0];
    let mut l = a.zeros_like();
    for j in 0..k {
        let below = k - j;
        let mut column = a.clone().slice([j..k, j..j + 1]);
        if j > 0 {
            let (rows, row) = (l.clone().slice([j..k, 0..j]), l.clone().slice([j..j + 1, 0..j]));
            column = column - rows.matmul(row.transpose());
        }
        let pivot = column.clone().slice([0..1, 0..1]).clamp_min(floor).sqrt();
        let mut parts = vec![pivot.clone()];
        if below > 1 {
            parts.push(column.slice([1..below, 0..1]) / pivot);
        }
        l = l.slice_assign([j..k, j..j + 1], Tensor::cat(parts, 0));
    }
    l
}

/// The solution of L L^T x = u.
fn solve<B: Backend>(l: &Tensor<B, 2>, u: Tensor<B, 2>) -> Tensor<B, 2> {
    let k = l.dims()[0];
    let at = |x: &Tensor<B, 2>, i: usize| x.clone().slice([i..i + 1, 0..1]);
    let pivot = |i: usize| l.clone().slice([i..i + 1, i..i + 1]);
    let mut x = u;
    for i in 0..k {
        let mut rest = at(&x, i);
        if i > 0 {
            rest = rest - l.clone().slice([i..i + 1, 0..i]).matmul(x.clone().slice([0..i, 0..1]));
        }
        x = x.slice_assign([i..i + 1, 0..1], rest / pivot(i));
    }
    for i in (0..k).rev() {
        let mut rest = at(&x, i);
        if i + 1 < k {
            let column = l.clone().slice([i + 1..k, i..i + 1]).transpose();
            rest = rest - column.matmul(x.clone().slice([i + 1..k, 0..1]));
        }
        x = x.slice_assign([i..i + 1, 0..1], rest / pivot(i));
    }
    x
}
