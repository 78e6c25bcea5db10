//! `retract`: brings a factor of a spectral map back to orthonormal columns, in place.
//!
//! For every matrix X `[n, k]`, k <= n, of a batch:
//!
//! ```text
//! X <- X / max|X|
//! sigma^2 = the larger of |A u| after power iterations u <- A u / |A u| from a fixed u, and (tr A^8 / k)^(1/8)
//! X <- X / (1.05 sigma)
//! X <- X (15/8 I - 5/4 A + 3/8 A^2)                     `iterations` times
//! ```
//!
//! where A = X^T X of the X at hand.
//!
//! In terms of the singular value decomposition, X = P diag(s) Q^T keeps P and Q while every s goes through
//! p(s) = 15/8 s - 5/4 s^3 + 3/8 s^5 once an iteration. p(1) = 1 with two vanishing derivatives, p has no other fixed
//! point in (0, 1.527), and there it takes every s towards 1, so the result approaches the polar factor P Q^T, the
//! nearest orthonormal matrix. It is near that factor, not equal to it.
//!
//! # What it takes to be orthonormal
//!
//! `|X^T X - I|_F / k <= 1e-4` in `f32` for k >= 32 after 3 iterations for factors whose largest singular value is up
//! to 2 times their smallest, after 4 up to 4 times, after 6 up to 10 times. (Four times and k < 32 can leave up to
//! 5.2e-4 / sqrt(k), when one singular value stands alone above the others.) One optimiser step spreads an orthonormal
//! factor to 1.2 or 1.5. Beyond those bounds nothing breaks: a small s grows by 15/8 an iteration, so the columns'
//! span is kept and the next calls finish the work, but right after the call the factor is not orthonormal. An s of
//! exactly zero stays zero. The caller watches `spread`.
//!
//! Both estimates of sigma are from below. The power method is short by a few percent where many singular values lie
//! close together, and by a factor c^(1/10) at the worst, where c is the cosine between the start and the leading
//! direction (with 5 iterations): a leading direction that the start does not see is missed altogether, and if it is
//! more than 1.6 times stronger than the rest, p drives its s to infinity. That happens to one random matrix in a few
//! thousand. The eighth power mean of the eigenvalues sees every direction and is short by k^(1/8) at the most, so with
//! it s starts at k^(1/16) / 1.05 or below: 1.24 for k = 64, and inside 1.527 up to k = 1700.
//!
//! # Spread
//!
//! `spread` estimates sigma_max / sigma_min before the call, the largest of the batch: sigma_max as above and
//! sigma_min likewise by the power method on A^-1 (a Cholesky factor of A, two triangular solves an iteration). Both
//! err inwards, so the true spread is at least this. With 5 power iterations a true 1.2 can read 1.02; from 2 on the
//! estimate is usually at most 15 % short. Pivots of the Cholesky factor are kept above 1e-6 sigma_max^2, where the
//! rounding of an `f32` Gram matrix begins, so a spread of about 1000 only says that it is large. Spread is 0 where
//! nothing was retracted: a zero matrix, or `apply` = 0.

use ndarray::{Array1, Array2, ArrayView1, ArrayView2, ArrayViewMut2, Axis, arr1};
use rayon::prelude::*;

use crate::checked::Checked;
use crate::cpu::{Reference, Tensor};
use crate::dims::Dims;
use crate::error::{Error, Result};
use crate::fields;
use crate::matmul::matmul;
use crate::scalar::Scalar;
use crate::tensor::Tensors;

/// How far above the estimate of sigma the matrix is scaled down.
const MARGIN: f64 = 1.05;

/// Pivots below this share of sigma_max^2 are rounding.
const PIVOT_FLOOR: f64 = 1e-6;

/// What the operation does besides its shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Applications of the polynomial, at least 1. 4 bring a spread of 4 to orthonormal.
    pub iterations: usize,
    /// Steps of the power method, at least 1. 5 are enough for `iterations` = 4.
    pub power_iterations: usize,
}

fields! {
    /// What comes out.
    pub struct Outputs {
        /// `[1]`, the largest sigma_max / sigma_min of the batch before the call.
        spread
    }
}

/// The operation on a backend.
///
/// # Errors
/// `Shape` if `factor` is not `[n, k]` or `[E, n, k]`, if k > n, or if n or k is 0; `Shape` if `apply` is not `[1]`;
/// `NotPersistent` if `factor` is scratch; `Config` if a count is 0.
pub trait Retract: Tensors {
    /// Retracts every matrix of `factor`, or nothing if `apply` (`[1]`) is 0: then every bit stays.
    fn update(&self, config: &Config, factor: &Self::Tensor, apply: &Self::Tensor) -> Result<Outputs<Self::Tensor>>;
}

const OP: &str = "retract::update";

impl<T: Scalar> Retract for Reference<T> {
    #[inline(never)]
    fn update(&self, config: &Config, factor: &Tensor<T>, apply: &Tensor<T>) -> Result<Outputs<Tensor<T>>> {
        check_config(config)?;
        let [e, n, k] = check_shape(factor.shape())?;
        let apply = self.read_one(OP, "apply", apply)?.to_f64() == 1.0;
        let spread = self.update(OP, "factor", factor, |factor| {
            if !apply {
                return T::zero();
            }
            let mut matrices = factor.into_shape_with_order((e, n, k)).expect("a handle's memory is contiguous");
            let spreads: Vec<T> = matrices.axis_iter_mut(Axis(0)).into_par_iter().map(|x| retract(config, x)).collect();
            spreads.into_iter().fold(T::zero(), Scalar::max)
        })?;
        Ok(Outputs { spread: self.adopt(arr1(&[spread]), &[1]) })
    }
}

impl<B: Retract> Retract for Checked<B> {
    fn update(&self, config: &Config, factor: &B::Tensor, apply: &B::Tensor) -> Result<Outputs<B::Tensor>> {
        self.every(OP, "apply", apply, "0 or 1", |x| x == 0.0 || x == 1.0)?;
        self.finite(OP, [("factor", factor)])?;
        self.0.update(config, factor, apply)
    }
}

/// Refuses counts of zero. For backends of their own too, as is [`check_shape`].
///
/// # Errors
/// `Config`, which names the field.
pub fn check_config(config: &Config) -> Result<()> {
    for (field, count) in [("iterations", config.iterations), ("power_iterations", config.power_iterations)] {
        if count == 0 {
            return Err(Error::Config { op: OP, field, expected: "at least 1".to_owned(), got: "0".to_owned() });
        }
    }
    Ok(())
}

/// Refuses what is no factor or stack of factors; gives `[E, n, k]`.
///
/// # Errors
/// `Shape`.
pub fn check_shape(shape: &[usize]) -> Result<[usize; 3]> {
    let mut dims = Dims::new(OP);
    match shape.len() {
        3 => dims.bind("factor", shape, &["E", "n", "k"])?,
        _ => dims.bind("factor", shape, &["n", "k"])?,
    }
    dims.positive(&["n", "k"])?;
    let (n, k) = (dims.get("n"), dims.get("k"));
    if k > n {
        return Err(Error::Shape {
            op: OP,
            arg: "factor",
            expected: "k <= n, since k columns of length n < k cannot be orthonormal".to_owned(),
            got: shape.to_vec(),
        });
    }
    Ok([if shape.len() == 3 { shape[0] } else { 1 }, n, k])
}

/// Retracts one matrix; returns its spread before.
fn retract<T: Scalar>(config: &Config, mut factor: ArrayViewMut2<'_, T>) -> T {
    let largest = factor.iter().fold(T::zero(), |largest, x| largest.max(x.abs()));
    if largest == T::zero() {
        return T::zero();
    }
    let mut x = &factor / largest;
    let a = gram(x.view());
    let by_power_method = largest_eigenvalue(a.nrows(), config.power_iterations, |u| a.dot(&u));
    let sigma = by_power_method.max(eighth_power_mean(&a)).sqrt();
    let spread = spread(&a, sigma, config.power_iterations);
    x *= T::one() / (T::from_f64(MARGIN) * sigma);
    for _ in 0..config.iterations {
        let polynomial = polynomial(gram(x.view()));
        x = matmul(x.view(), polynomial.view());
    }
    factor.assign(&x);
    spread
}

/// X^T X.
fn gram<T: Scalar>(x: ArrayView2<'_, T>) -> Array2<T> {
    matmul(x.t(), x)
}

/// 15/8 I - 5/4 A + 3/8 A^2.
fn polynomial<T: Scalar>(a: Array2<T>) -> Array2<T> {
    let mut p = matmul(a.view(), a.view()) * T::from_f64(3.0 / 8.0) - a * T::from_f64(5.0 / 4.0);
    p.diag_mut().map_inplace(|d| *d += T::from_f64(15.0 / 8.0));
    p
}

/// The power method's estimate, from below, of the largest eigenvalue of a symmetric positive map of k-vectors.
fn largest_eigenvalue<T: Scalar>(k: usize, iterations: usize, map: impl Fn(ArrayView1<'_, T>) -> Array1<T>) -> T {
    let mut u = start(k);
    u /= norm(&u);
    let mut eigenvalue = T::zero();
    for _ in 0..iterations {
        u = map(u.view());
        eigenvalue = norm(&u);
        u /= eigenvalue;
    }
    eigenvalue
}

/// (tr A^8 / k)^(1/8) of a symmetric matrix: at most its largest eigenvalue, and at least that over k^(1/8).
fn eighth_power_mean<T: Scalar>(a: &Array2<T>) -> T {
    let squares = |a: &Array2<T>| a.iter().map(|&x| x * x).sum::<T>();
    // Dividing by the norm first keeps the powers inside the range of f32.
    let size = squares(a).sqrt();
    let scaled = a / size;
    let second = matmul(scaled.view(), scaled.view());
    let fourth = matmul(second.view(), second.view());
    size * (squares(&fourth) / T::from_f64(a.nrows() as f64)).powf(1.0 / 8.0)
}

/// The fixed start of the power method: the fractional parts of golden-ratio multiples of the squares, which no basis
/// of practical interest is orthogonal to.
fn start<T: Scalar>(k: usize) -> Array1<T> {
    const GOLDEN: f64 = 0.618_033_988_749_894_9;
    Array1::from_shape_fn(k, |i| T::from_f64((GOLDEN * ((i + 1) * (i + 1)) as f64).fract() - 0.5))
}

fn norm<T: Scalar>(u: &Array1<T>) -> T {
    u.iter().map(|&x| x * x).sum::<T>().sqrt()
}

/// sigma_max / sigma_min of a matrix with Gram matrix `a`.
fn spread<T: Scalar>(a: &Array2<T>, sigma: T, iterations: usize) -> T {
    let l = cholesky(a, T::from_f64(PIVOT_FLOOR) * sigma * sigma);
    let inverse_square = largest_eigenvalue(a.nrows(), iterations, |u| solve(&l, u));
    sigma * inverse_square.sqrt()
}

/// The lower triangle L of A = L L^T, pivots kept at `floor` or above.
fn cholesky<T: Scalar>(a: &Array2<T>, floor: T) -> Array2<T> {
    let k = a.nrows();
    let mut l = Array2::<T>::zeros((k, k));
    for j in 0..k {
        for i in j..k {
            let product: T = l.row(i).iter().zip(l.row(j)).take(j).map(|(&x, &y)| x * y).sum();
            let rest = a[[i, j]] - product;
            l[[i, j]] = if i == j { rest.max(floor).sqrt() } else { rest / l[[j, j]] };
        }
    }
    l
}

/// The solution of L L^T x = b.
fn solve<T: Scalar>(l: &Array2<T>, b: ArrayView1<'_, T>) -> Array1<T> {
    let mut x = b.to_owned();
    for i in 0..x.len() {
        let known: T = (0..i).map(|j| l[[i, j]] * x[j]).sum();
        x[i] = (x[i] - known) / l[[i, i]];
    }
    for i in (0..x.len()).rev() {
        let known: T = (i + 1..x.len()).map(|j| l[[j, i]] * x[j]).sum();
        x[i] = (x[i] - known) / l[[i, i]];
    }
    x
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use ndarray::{ArrayD, array};

    const FOUR: Config = Config { iterations: 4, power_iterations: 5 };

    fn update<T: Scalar>(b: &Reference<T>, config: &Config, factor: &Tensor<T>, apply: f64) -> f64 {
        let apply = b.constant(arr1(&[T::from_f64(apply)]).into_dyn());
        let outputs = Retract::update(b, config, factor, &apply).unwrap();
        b.download(&outputs.spread).unwrap()[0]
    }

    /// A dense orthogonal matrix: the reflection at a vector that depends on `seed`.
    fn reflection(n: usize, seed: f64) -> Array2<f64> {
        let u = Array1::from_shape_fn(n, |i| ((i as f64 + 1.0) * seed).sin());
        let square = u.dot(&u);
        Array2::from_shape_fn((n, n), |(i, j)| f64::from(u8::from(i == j)) - 2.0 * u[i] * u[j] / square)
    }

    /// `[n, k]` with these singular values.
    fn with_singular_values(n: usize, s: &[f64]) -> Array2<f64> {
        let k = s.len();
        let left = reflection(n, 0.7).dot(&reflection(n, 1.3));
        let mut middle = Array2::zeros((n, k));
        middle.diag_mut().assign(&ArrayView1::from(s));
        left.dot(&middle).dot(&reflection(k, 2.1)).dot(&reflection(k, 0.4))
    }

    /// Singular values from 1 to `spread` in four arrangements: even, geometric, one above the rest, one below it.
    fn spectra(k: usize, spread: f64) -> [Vec<f64>; 4] {
        let at = |i: usize| i as f64 / (k - 1) as f64;
        [
            (0..k).map(|i| 1.0 + (spread - 1.0) * at(i)).collect(),
            (0..k).map(|i| spread.powf(at(i))).collect(),
            (0..k).map(|i| if i == 0 { spread } else { 1.0 }).collect(),
            (0..k).map(|i| if i == 0 { 1.0 } else { spread }).collect(),
        ]
    }

    /// |X^T X - I|_F / k in f64.
    fn defect(x: &ArrayD<f64>) -> f64 {
        let x = x.view().into_dimensionality::<ndarray::Ix2>().unwrap();
        let k = x.ncols();
        let difference = x.t().dot(&x) - Array2::<f64>::eye(k);
        difference.iter().map(|d| d * d).sum::<f64>().sqrt() / k as f64
    }

    /// Retracts in f32; returns the worst defect over the spectra, and the estimates of the spread.
    fn worst(n: usize, k: usize, spread: f64, iterations: usize) -> (f64, Vec<f64>) {
        let config = Config { iterations, power_iterations: 5 };
        let b = Reference::<f32>::new();
        let mut worst = 0.0f64;
        let mut estimates = Vec::new();
        for s in spectra(k, spread) {
            let x = b.constant(with_singular_values(n, &s).mapv(|x| x as f32).into_dyn());
            estimates.push(update(&b, &config, &x, 1.0));
            worst = worst.max(defect(&b.download(&x).unwrap()));
        }
        (worst, estimates)
    }

    #[test]
    fn a_single_column_becomes_its_direction() {
        let b = Reference::<f64>::new();
        let x = b.constant(array![[3e-200], [4e-200]].into_dyn());
        assert_relative_eq!(update(&b, &FOUR, &x, 1.0), 1.0, max_relative = 1e-12);
        let x = b.download(&x).unwrap();
        assert_relative_eq!(x[[0, 0]], 0.6, max_relative = 1e-12);
        assert_relative_eq!(x[[1, 0]], 0.8, max_relative = 1e-12);
    }

    #[test]
    fn singular_values_go_through_the_polynomial() {
        let b = Reference::<f64>::new();
        let x = b.constant(array![[2.0, 0.0], [0.0, 0.0], [0.0, -1.0]].into_dyn());
        let spread = update(&b, &Config { iterations: 2, power_iterations: 40 }, &x, 1.0);
        assert_relative_eq!(spread, 2.0, max_relative = 1e-12);
        let p = |s: f64| 15.0 / 8.0 * s - 5.0 / 4.0 * s.powi(3) + 3.0 / 8.0 * s.powi(5);
        let x = b.download(&x).unwrap();
        assert_relative_eq!(x[[0, 0]], p(p(1.0 / 1.05)), max_relative = 1e-12);
        assert_relative_eq!(x[[2, 1]], -p(p(0.5 / 1.05)), max_relative = 1e-12);
        assert_eq!([x[[0, 1]], x[[1, 0]], x[[1, 1]], x[[2, 0]]], [0.0; 4]);
    }

    #[test]
    fn the_documented_spreads_become_orthonormal() {
        for (n, k) in [(256, 64), (64, 64), (96, 32)] {
            for (spread, iterations) in [(1.0, 3), (2.0, 3), (4.0, 4), (10.0, 6)] {
                let (defect, estimates) = worst(n, k, spread, iterations);
                assert!(defect <= 1e-4, "[{n}, {k}] spread {spread}: {defect}");
                for estimate in estimates {
                    let least = if spread < 2.0 { spread } else { 0.85 * spread };
                    assert!((0.999 * least..=1.001 * spread).contains(&estimate), "{spread}: estimated {estimate}");
                }
            }
        }
    }

    #[test]
    fn a_wider_spread_takes_more_than_one_call() {
        let (once, estimates) = worst(256, 64, 100.0, 4);
        assert!(once > 1e-2, "{once}");
        assert!(estimates.iter().all(|estimate| (80.0..=101.0).contains(estimate)), "{estimates:?}");
        let b = Reference::<f32>::new();
        let [even, ..] = spectra(64, 100.0);
        let x = b.constant(with_singular_values(256, &even).mapv(|x| x as f32).into_dyn());
        for _ in 0..3 {
            update(&b, &FOUR, &x, 1.0);
        }
        let defect = defect(&b.download(&x).unwrap());
        assert!(defect <= 1e-4, "{defect}");
    }

    #[test]
    fn a_leading_direction_that_the_power_method_cannot_see_is_no_harm() {
        // The leading right singular vector is orthogonal to the start, the others have singular value 1.
        let k = 32;
        let u: Array1<f64> = start(k);
        let mut w = Array1::zeros(k);
        (w[0], w[1]) = (u[1], -u[0]);
        w /= norm(&w);
        let unit = |i, j| f64::from(u8::from(i == j));
        let stretched = Array2::from_shape_fn((k, k), |(i, j)| unit(i, j) + 9.0 * w[i] * w[j]);
        let b = Reference::<f64>::new();
        let x = b.constant(stretched.into_dyn());
        let spread = update(&b, &Config { iterations: 6, power_iterations: 5 }, &x, 1.0);
        // The power mean of 31 ones and one 100^8 is short by 32^(1/8), sigma by the root of that.
        assert_relative_eq!(spread, 10.0 / 32f64.powf(1.0 / 16.0), max_relative = 1e-6);
        let defect = defect(&b.download(&x).unwrap());
        assert!(defect <= 1e-4, "{defect}");
    }

    #[test]
    fn zero_stays_zero_and_a_skipped_call_keeps_every_bit() {
        let b = Reference::<f32>::new();
        let zero = b.constant(ArrayD::zeros(vec![2, 3, 2]));
        assert_eq!(update(&b, &FOUR, &zero, 1.0), 0.0);
        assert_eq!(b.download(&zero).unwrap(), ArrayD::zeros(vec![2, 3, 2]));
        let values = array![[1.5, f32::NAN], [-0.0, 3.0]].into_dyn();
        let x = b.constant(values.clone());
        assert_eq!(update(&b, &FOUR, &x, 0.0), 0.0);
        let bits = |x: ArrayD<f32>| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(b.values(&x).unwrap()), bits(values));
        // A column of zeros has nothing to stretch; the other column still becomes a unit vector.
        let x = b.constant(array![[3.0, 0.0], [4.0, 0.0]].into_dyn());
        assert!(update(&b, &FOUR, &x, 1.0) >= 999.0);
        let x = b.download(&x).unwrap();
        assert_relative_eq!(x[[0, 0]], 0.6, max_relative = 1e-6);
        assert_eq!([x[[0, 1]], x[[1, 1]]], [0.0, 0.0]);
    }

    #[test]
    fn refusals() {
        let b = Reference::<f32>::new();
        let one = b.constant(array![1.0].into_dyn());
        let attempt = |config: &Config, shape: &[usize]| {
            let factor = b.constant(ArrayD::zeros(shape));
            Retract::update(&b, config, &factor, &one).unwrap_err().to_string()
        };
        assert_eq!(
            attempt(&FOUR, &[2, 3]),
            "retract::update: `factor` is [2, 3], expected k <= n, since k columns of length n < k cannot be orthonormal"
        );
        assert_eq!(attempt(&FOUR, &[2, 0]), "retract::update: `factor` is [0], expected k >= 1");
        assert_eq!(attempt(&FOUR, &[4]), "retract::update: `factor` is [4], expected [n, k]");
        assert_eq!(
            attempt(&Config { iterations: 0, ..FOUR }, &[2, 1]),
            "retract::update: config `iterations` is 0, expected at least 1"
        );
        let scratch = b.scratch(&[2, 1], crate::tensor::DType::F32).unwrap();
        assert!(matches!(Retract::update(&b, &FOUR, &scratch, &one), Err(Error::NotPersistent { .. })));
        let two = b.constant(array![1.0, 1.0].into_dyn());
        assert_eq!(
            Retract::update(&b, &FOUR, &two, &two).unwrap_err().to_string(),
            "retract::update: `factor` is [2], expected [n, k]"
        );
        let factor = b.constant(array![[1.0], [1.0]].into_dyn());
        assert_eq!(
            Retract::update(&b, &FOUR, &factor, &two).unwrap_err().to_string(),
            "retract::update: `apply` is [2], expected [1]"
        );
    }
}
