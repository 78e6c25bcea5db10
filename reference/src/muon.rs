//! `muon`: Muon+, momentum brought to nearly equal singular values, in place on flat buffers.
//!
//! A table says which ranges of the flat buffers are matrices. For every matrix W with gradient G and momentum M:
//!
//! ```text
//! M <- mu M + (1 - mu) G
//! X  = M / max|M|,  X <- X / |X|_F                          (zero stays zero), transposed if taller than wide
//! A  = X X^T,       X <- a X + (b A + c A^2) X              `iterations` times
//! X <- columns divided by their norms, then rows by theirs  (the "plus"), then transposed back
//! W <- W - lr weight_decay W - lr scale X
//! ```
//!
//! with a, b, c = 3.4445, -4.7750, 2.0315. With `apply` = 0 nothing is written, whatever the gradients hold.
//!
//! **The iterate before the plus.** In terms of the singular value decomposition X = P diag(s) Q^T, an iteration keeps P
//! and Q while every s goes through p(s) = a s + b s^3 + c s^5. The norm makes s at most 1; p takes [0.2115, 1.203] into
//! [0.681, 1.203], which is the band that they end in. Below, s grows by at most a. So s in the band after `iterations`
//! needs s >= [`BAND_FROM_5`] of |M|_F for 5 iterations and [`BAND_FROM_8`] for 8; a singular value of zero stays zero.
//! The map does not converge inside the band: its derivative at the fixed point 0.868 is -1.58. Two computations that
//! round differently drift apart by up to a factor of a an iteration.
//!
//! **The plus.** k rows of length n, k <= n. A column or row whose norm is below 1e-4 of the mean norm is left as it is,
//! so that noise is not made large. Every other row of the result has norm 1. Normalising in the short orientation
//! makes the update of W^T the transpose of the update of W wherever W is not square, and gives every matrix an update
//! of size sqrt(k): in the stored orientation a `[768, 64]` factor would get one sqrt(12) times larger. Of a square
//! matrix the columns come first, so there the identity is one of the iterate only.
//!
//! **Scale.** Dividing by the largest element first keeps squares inside the range of `f32`, so G and 1e-20 G (with M
//! alike) give the same update. An update has the same size however small the gradient is. Therefore a matrix whose
//! gradient is all zero is left alone: weights and momentum keep every bit. Otherwise momentum alone would move it at
//! full size (ADR 0012). For the same reason there is no clipping here.
//!
//! **Heads.** A matrix `[rows, heads * width]` with `heads` > 1 is that many matrices `[rows, width]`, side by side.
//!
//! **Batches.** Matrices of one shape, whatever entry of the table they come from, run as one batch under
//! [`Batching::Batched`]; under [`Batching::Single`] one after another. On the reference both have the same bits.
//!
//! An optimiser has no gradient, so there is no backward.
//!
//! Source: Jordan et al., *Muon: An optimizer for hidden layers in neural networks*, 2024, for the iteration and its
//! coefficients.

use std::ops::Range;

use ndarray::{Array1, Array3, ArrayViewMut2, Axis};
use rayon::prelude::*;

use crate::checked::Checked;
use crate::cpu::{Reference, Tensor};
use crate::dims::{Dims, check_apart};
use crate::error::{Error, Result};
use crate::fields;
use crate::matmul::{dot, matmul, matmul_into};
use crate::sanitise::check_ranges;
use crate::scalar::Scalar;
use crate::tensor::Tensors;

/// The coefficients a, b, c of the iteration.
pub const COEFFICIENTS: [f64; 3] = [3.4445, -4.7750, 2.0315];

/// Where singular values end: p(0.5545) = 1.2024 is the highest, p(1.0501) = 0.6818 the lowest of it.
pub const BAND: [f64; 2] = [0.681, 1.203];

/// The least singular value, relative to the Frobenius norm, that 5 iterations take into the [`BAND`].
pub const BAND_FROM_5: f64 = 1.52e-3;

/// The least singular value, relative to the Frobenius norm, that 8 iterations take into the [`BAND`].
pub const BAND_FROM_8: f64 = 3.7e-5;

/// Columns and rows below this share of the mean norm are left as they are.
pub const NOISE: f64 = 1e-4;

/// What the operation does besides its shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// How much of the momentum stays, in [0, 1).
    pub momentum: f64,
    /// Newton-Schulz iterations, at least 1. 5 and 8 are in use.
    pub iterations: usize,
    /// Whether columns and rows are normalised afterwards; without it the update is the iterate, as in plain Muon.
    pub plus: bool,
    /// How matrices of one shape are run.
    pub batching: Batching,
    /// Who moves. The ranges are disjoint and inside the buffers.
    pub matrices: Vec<Matrix>,
}

/// How matrices of one shape are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Batching {
    /// All of them as one batch.
    Batched,
    /// One after another.
    Single,
}

/// Matrices that lie one behind another in the flat buffers.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    /// The first element.
    pub start: usize,
    /// `[E, rows, columns]`, row-major.
    pub shape: [usize; 3],
    /// Into how many matrices of equal width the columns are split; 1 for none.
    pub heads: usize,
    /// What the update is multiplied by besides the learning rate. Greater than zero.
    pub scale: f64,
    /// The share of a weight that an update at learning rate 1 takes away. Zero or greater.
    pub weight_decay: f64,
}

impl Matrix {
    /// Its place in the flat buffers.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.shape.iter().product::<usize>()
    }
}

fields! {
    /// The flat buffers, each an allocation of its own. All but `grads` change in place.
    pub struct State {
        /// `[P]`
        params,
        /// `[P]`
        grads,
        /// `[P]`, momentum; zero before the first update.
        m
    }
}

fields! {
    /// What changes from step to step, all `[1]`.
    pub struct Scalars {
        /// `[1]`, learning rate.
        lr,
        /// `[1]`, 1 if the update is to happen, 0 if not.
        apply
    }
}

/// The operation on a backend.
///
/// # Errors
/// `Shape` if the buffers are not all `[P]` or a scalar is not `[1]`; `NotPersistent` if `params` or `m` is scratch;
/// `Aliased` if two buffers are one allocation; `Config` if `momentum`, `iterations`, a scale, a weight decay or a
/// number of heads is out of range, or a matrix is empty, leaves the buffer or overlaps another.
pub trait Muon: Tensors {
    /// Moves every matrix once, or nothing if `apply` is 0.
    fn update(&self, config: &Config, state: State<&Self::Tensor>, scalars: Scalars<&Self::Tensor>) -> Result<()>;
}

const OP: &str = "muon::update";

impl<T: Scalar> Muon for Reference<T> {
    #[inline(never)]
    fn update(&self, config: &Config, state: State<&Tensor<T>>, scalars: Scalars<&Tensor<T>>) -> Result<()> {
        let buffers = state.clone().named();
        let mut dims = Dims::new(OP);
        for (name, buffer) in &buffers {
            dims.bind(name, buffer.shape(), &["P"])?;
        }
        check_config(config, dims.get("P"))?;
        check_apart(OP, &buffers, |a, b| a.shares_allocation(b))?;
        let lr = self.read_one(OP, "lr", scalars.lr)?.to_f64();
        let apply = self.read_one(OP, "apply", scalars.apply)?.to_f64() == 1.0;
        let grads = self.read(OP, "grads", state.grads)?;
        self.update(OP, "params", state.params, |mut params| {
            self.update(OP, "m", state.m, |mut m| {
                if !apply {
                    return;
                }
                let contiguous = "a handle's memory is contiguous";
                let params = params.as_slice_mut().expect(contiguous);
                let m = m.as_slice_mut().expect(contiguous);
                for batch in batches(config) {
                    move_batch(config, lr, &batch, params, grads.slice(), m);
                }
            })
        })?
    }
}

impl<B: Muon> Muon for Checked<B> {
    /// Gradients may hold anything while `apply` is 0.
    fn update(&self, config: &Config, state: State<&B::Tensor>, scalars: Scalars<&B::Tensor>) -> Result<()> {
        self.every(OP, "apply", scalars.apply, "0 or 1", |x| x == 0.0 || x == 1.0)?;
        if self.download(scalars.apply)?.iter().all(|&x| x == 1.0) {
            self.finite(OP, state.clone().named())?;
            self.every(OP, "lr", scalars.lr, "finite and at least 0", |x| x.is_finite() && x >= 0.0)?;
        }
        self.0.update(config, state, scalars)
    }
}

/// Refuses numbers out of range, empty matrices, and matrices that leave a buffer of `len` elements or overlap.
///
/// # Errors
/// `Config` with the field that is wrong.
pub fn check_config(config: &Config, len: usize) -> Result<()> {
    let refuse =
        |field, expected: &str, got: String| Err(Error::Config { op: OP, field, expected: expected.to_owned(), got });
    if !(0.0..1.0).contains(&config.momentum) {
        return refuse("momentum", "at least 0 and less than 1", config.momentum.to_string());
    }
    if config.iterations == 0 {
        return refuse("iterations", "at least 1", "0".to_owned());
    }
    for matrix in &config.matrices {
        if matrix.shape[1] == 0 || matrix.shape[2] == 0 {
            return refuse(
                "matrices.shape",
                "[E, rows, columns] with a row and a column",
                format!("{:?}", matrix.shape),
            );
        }
        if matrix.heads == 0 || !matrix.shape[2].is_multiple_of(matrix.heads) {
            let expected = format!("a divisor of the {} columns", matrix.shape[2]);
            return refuse("matrices.heads", &expected, matrix.heads.to_string());
        }
        if !(matrix.scale > 0.0 && matrix.scale.is_finite()) {
            return refuse("matrices.scale", "greater than zero", matrix.scale.to_string());
        }
        if !(matrix.weight_decay >= 0.0 && matrix.weight_decay.is_finite()) {
            return refuse("matrices.weight_decay", "at least 0", matrix.weight_decay.to_string());
        }
    }
    let ranges: Vec<Range<usize>> = config.matrices.iter().map(Matrix::range).collect();
    check_ranges(OP, "matrices", ranges.iter(), len)
}

/// One matrix: rows of `width` elements, the first at `start`, each `stride` behind the one before.
#[derive(Clone, Debug, PartialEq)]
struct Place {
    start: usize,
    stride: usize,
    rows: usize,
    width: usize,
    scale: f64,
    weight_decay: f64,
}

impl Place {
    /// Where row `i` is.
    fn row(&self, i: usize) -> Range<usize> {
        let start = self.start + i * self.stride;
        start..start + self.width
    }
}

/// The matrices of the table, in its order.
fn places(config: &Config) -> Vec<Place> {
    let mut places = Vec::new();
    for &Matrix { start, shape: [e, rows, columns], heads, scale, weight_decay } in &config.matrices {
        let width = columns / heads;
        for i in 0..e {
            for head in 0..heads {
                let start = start + i * rows * columns + head * width;
                places.push(Place { start, stride: columns, rows, width, scale, weight_decay });
            }
        }
    }
    places
}

/// What runs together: the matrices of one shape, shapes in the order of their first matrix; or every matrix alone.
fn batches(config: &Config) -> Vec<Vec<Place>> {
    let mut batches: Vec<Vec<Place>> = Vec::new();
    for place in places(config) {
        let alike = |batch: &&mut Vec<Place>| (batch[0].rows, batch[0].width) == (place.rows, place.width);
        match batches.iter_mut().find(alike) {
            Some(batch) if config.batching == Batching::Batched => batch.push(place),
            _ => batches.push(vec![place]),
        }
    }
    batches
}

/// Moves matrices of one shape.
fn move_batch<T: Scalar>(config: &Config, lr: f64, batch: &[Place], params: &mut [T], grads: &[T], m: &mut [T]) {
    let has_gradient = |place: &&Place| (0..place.rows).any(|i| grads[place.row(i)].iter().any(|&g| g != T::zero()));
    let batch: Vec<&Place> = batch.iter().filter(has_gradient).collect();
    let Some(first) = batch.first() else { return };
    let (keep, take) = (T::from_f64(config.momentum), T::from_f64(1.0 - config.momentum));
    let tall = first.rows > first.width;
    let (k, n) = if tall { (first.width, first.rows) } else { (first.rows, first.width) };
    // The stack holds the matrices in the short orientation.
    let mut stack = Array3::<T>::zeros((batch.len(), k, n));
    for (place, mut x) in batch.iter().zip(stack.outer_iter_mut()) {
        for i in 0..place.rows {
            let row = place.row(i);
            for (j, (m, &g)) in m[row.clone()].iter_mut().zip(&grads[row]).enumerate() {
                *m = keep * *m + take * g;
                x[if tall { [j, i] } else { [i, j] }] = *m;
            }
        }
    }
    stack.axis_iter_mut(Axis(0)).into_par_iter().for_each(|mut x| {
        iterate(config.iterations, x.view_mut());
        if config.plus {
            normalise(x);
        }
    });
    for (place, x) in batch.iter().zip(stack.outer_iter()) {
        let (step, decay) = (T::from_f64(lr * place.scale), T::from_f64(lr * place.weight_decay));
        for i in 0..place.rows {
            for (j, w) in params[place.row(i)].iter_mut().enumerate() {
                *w = *w - decay * *w - step * x[if tall { [j, i] } else { [i, j] }];
            }
        }
    }
}

/// Takes the singular values of a `[k, n]` matrix, k <= n, into the band.
fn iterate<T: Scalar>(iterations: usize, mut x: ArrayViewMut2<'_, T>) {
    let largest = x.iter().fold(T::zero(), |largest, x| largest.max(x.abs()));
    if largest == T::zero() {
        return;
    }
    x.mapv_inplace(|x| x / largest);
    let norm = x.rows().into_iter().map(|row| norm_of(row.to_slice().expect("rows are contiguous"))).map(|r| r * r);
    let norm = norm.sum::<T>().sqrt();
    x.mapv_inplace(|x| x / norm);
    let [a, b, c] = COEFFICIENTS.map(T::from_f64);
    for _ in 0..iterations {
        let gram = matmul(x.view(), x.t());
        let mut p = matmul(gram.view(), gram.view());
        p.zip_mut_with(&gram, |square, &gram| *square = c * *square + b * gram);
        let before = x.to_owned();
        matmul_into(T::one(), p.view(), before.view(), a, x.view_mut());
    }
}

/// Divides columns, then rows, by their norms, except those that are noise.
fn normalise<T: Scalar>(mut x: ArrayViewMut2<'_, T>) {
    let mut columns = Array1::<T>::zeros(x.ncols());
    for row in x.rows() {
        columns.zip_mut_with(&row, |sum, &x| *sum += x * x);
    }
    let columns = divisors(columns.mapv(Scalar::sqrt));
    for mut row in x.rows_mut() {
        row.zip_mut_with(&columns, |x, &divisor| *x /= divisor);
    }
    let rows = x.rows().into_iter().map(|row| norm_of(row.to_slice().expect("rows are contiguous")));
    let rows = divisors(rows.collect());
    for (mut row, &divisor) in x.rows_mut().into_iter().zip(&rows) {
        row.mapv_inplace(|x| x / divisor);
    }
}

/// The norms, with 1 for those that are noise beside the mean.
fn divisors<T: Scalar>(norms: Array1<T>) -> Array1<T> {
    let mean = norms.iter().copied().sum::<T>() / T::from_f64(norms.len() as f64);
    let least = T::from_f64(NOISE) * mean;
    norms.mapv(|norm| if norm < least || norm == T::zero() { T::one() } else { norm })
}

fn norm_of<T: Scalar>(x: &[T]) -> T {
    dot(x, x).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use ndarray::{Array1, Array2, ArrayView2, array};

    use crate::tensor::DType;

    fn config(matrices: Vec<Matrix>) -> Config {
        Config { momentum: 0.5, iterations: 5, plus: true, batching: Batching::Batched, matrices }
    }

    fn matrix(start: usize, shape: [usize; 3]) -> Matrix {
        Matrix { start, shape, heads: 1, scale: 1.0, weight_decay: 0.0 }
    }

    struct Fixture<T> {
        b: Reference<T>,
        state: State<Tensor<T>>,
        scalars: Scalars<Tensor<T>>,
    }

    impl<T: Scalar> Fixture<T> {
        fn new(params: &[f64], grads: &[f64], lr: f64, apply: f64) -> Self {
            let b = Reference::new();
            let buffer =
                |values: &[f64]| b.constant(values.iter().map(|&x| T::from_f64(x)).collect::<Array1<T>>().into_dyn());
            let state = State { params: buffer(params), grads: buffer(grads), m: buffer(&vec![0.0; params.len()]) };
            let scalars = Scalars { lr: buffer(&[lr]), apply: buffer(&[apply]) };
            Self { b, state, scalars }
        }

        fn update(&self, config: &Config) -> Result<()> {
            Muon::update(&self.b, config, self.state.as_ref(), self.scalars.as_ref())
        }

        fn values(&self, tensor: &Tensor<T>) -> Vec<f64> {
            self.b.download(tensor).unwrap().into_iter().collect()
        }
    }

    /// What one update takes from weights of zero at learning rate 1: the update itself.
    fn step<T: Scalar>(config: &Config, grads: &[f64]) -> Vec<f64> {
        let f = Fixture::<T>::new(&vec![0.0; grads.len()], grads, 1.0, 1.0);
        f.update(config).unwrap();
        f.values(&f.state.params).into_iter().map(|x| -x).collect()
    }

    fn wave(len: usize) -> Vec<f64> {
        (0..len).map(|i| ((i * i) as f64 * 0.37).sin() + 0.1).collect()
    }

    fn p(s: f64) -> f64 {
        let [a, b, c] = COEFFICIENTS;
        a * s + b * s.powi(3) + c * s.powi(5)
    }

    #[test]
    fn one_number_by_hand() {
        let f = Fixture::<f64>::new(&[3.0], &[-8.0], 0.1, 1.0);
        f.update(&config(vec![Matrix { scale: 2.0, weight_decay: 0.5, ..matrix(0, [1, 1, 1]) }])).unwrap();
        // M = -4, X = -1 whatever the iteration makes of it, since the row is divided by its norm.
        assert_eq!(f.values(&f.state.m), [-4.0]);
        assert_relative_eq!(f.values(&f.state.params)[0], 3.0 - 0.1 * 0.5 * 3.0 + 0.1 * 2.0, max_relative = 1e-15);
    }

    #[test]
    fn a_diagonal_goes_through_the_polynomial() {
        let iterate = Config { plus: false, ..config(vec![matrix(0, [1, 3, 2])]) };
        let x = step::<f64>(&iterate, &[3.0, 0.0, 0.0, 0.0, 0.0, -4.0]);
        let through = |s: f64| (0..5).fold(s, |s, _| p(s));
        assert_relative_eq!(x[0], through(0.6), max_relative = 1e-13);
        assert_relative_eq!(x[5], -through(0.8), max_relative = 1e-13);
        assert_eq!(x[1..5], [0.0; 4]);
    }

    #[test]
    fn the_band_is_what_the_documentation_says() {
        let samples = (0..=100_000).map(|i| f64::from(i) / 100_000.0);
        for s in samples.clone().map(|t| 0.2115 + t * (BAND[1] - 0.2115)) {
            assert!((BAND[0]..=BAND[1]).contains(&p(s)), "p({s}) = {}", p(s));
        }
        for (iterations, from) in [(5, BAND_FROM_5), (8, BAND_FROM_8)] {
            let ends = |s: f64| (0..iterations).fold(s, |s, _| p(s));
            for s in samples.clone().map(|t| from.powf(1.0 - t)) {
                assert!((BAND[0]..=BAND[1]).contains(&ends(s)), "{s} ends at {}", ends(s));
            }
            assert!(ends(0.95 * from) < BAND[0], "the bound for {iterations} iterations is not tight");
        }
    }

    #[test]
    fn rows_of_the_short_orientation_have_norm_one_and_noise_stays_small() {
        for (rows, columns) in [(4, 9), (9, 4), (5, 5)] {
            let x = step::<f64>(&config(vec![matrix(0, [1, rows, columns])]), &wave(rows * columns));
            let x = Array2::from_shape_vec((rows, columns), x).unwrap();
            let x = if rows > columns { x.reversed_axes() } else { x };
            for row in x.rows() {
                assert_relative_eq!(row.dot(&row), 1.0, max_relative = 1e-13);
            }
        }
        // The last column is noise, the first row is nothing.
        let mut grads = Array2::from_shape_vec((4, 7), wave(28)).unwrap();
        grads.row_mut(0).fill(0.0);
        grads.column_mut(6).mapv_inplace(|x| 1e-12 * x);
        let x = step::<f64>(&config(vec![matrix(0, [1, 4, 7])]), grads.as_slice().unwrap());
        let x = ArrayView2::from_shape((4, 7), &x).unwrap();
        assert!(x.row(0).iter().all(|&x| x == 0.0));
        assert!(x.column(6).iter().all(|&x| x.abs() < 1e-8), "{:?}", x.column(6));
        assert_relative_eq!(x.row(1).dot(&x.row(1)), 1.0, max_relative = 1e-13);
    }

    #[test]
    fn i2_no_scale_of_the_gradient_changes_the_update_in_f32() {
        let table = config(vec![matrix(0, [1, 4, 9])]);
        let once = step::<f32>(&table, &wave(36));
        for exponent in [-66, -20, 20, 66] {
            let scaled: Vec<f64> = wave(36).iter().map(|&g| f64::from(g as f32) * 2f64.powi(exponent)).collect();
            assert_eq!(step::<f32>(&table, &scaled), once, "2^{exponent}");
        }
        for factor in [1e-20, 1e20] {
            let scaled: Vec<f64> = wave(36).iter().map(|g| g * factor).collect();
            for (x, y) in step::<f32>(&table, &scaled).iter().zip(&once) {
                // Rounding of the gradient, enlarged by at most a in each of five iterations.
                assert!((x - y).abs() < 500.0 * f64::from(f32::EPSILON), "{factor:e}: {x} {y}");
            }
        }
    }

    #[test]
    fn i1_a_matrix_without_gradient_keeps_every_bit_of_weights_and_momentum() {
        let grads = [wave(6), vec![0.0; 6]].concat();
        let f = Fixture::<f32>::new(&wave(12), &grads, 0.1, 1.0);
        f.b.upload(Array1::from(wave(12)).into_dyn().view(), &f.state.m).unwrap();
        let (params, m) = (f.values(&f.state.params), f.values(&f.state.m));
        f.update(&config(vec![Matrix { weight_decay: 0.1, ..matrix(0, [2, 2, 3]) }])).unwrap();
        assert_eq!(f.values(&f.state.params)[6..], params[6..]);
        assert_eq!(f.values(&f.state.m)[6..], m[6..]);
        assert!(f.values(&f.state.params)[..6].iter().zip(&params).all(|(after, before)| after != before));
    }

    #[test]
    fn matrices_of_one_shape_are_one_batch() {
        let heads = Matrix { heads: 3, ..matrix(20, [1, 4, 6]) };
        let table = config(vec![matrix(0, [1, 4, 2]), matrix(8, [1, 3, 3]), heads, matrix(44, [2, 4, 2])]);
        let sizes = |config: &Config| batches(config).iter().map(Vec::len).collect::<Vec<_>>();
        assert_eq!(sizes(&table), [6, 1]);
        assert_eq!(sizes(&Config { batching: Batching::Single, ..table.clone() }), [1; 7]);
        let together = step::<f32>(&table, &wave(60));
        assert_eq!(step::<f32>(&Config { batching: Batching::Single, ..table }, &wave(60)), together);
        assert_eq!(together[17..20], [0.0; 3]);
    }

    #[test]
    fn a_skipped_update_keeps_every_bit_even_with_nan_gradients() {
        let f = Fixture::<f64>::new(&[1.0, -0.0], &[f64::NAN; 2], f64::NAN, 0.0);
        f.update(&config(vec![matrix(0, [1, 1, 2])])).unwrap();
        let bits = |values: &[f64]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&f.values(&f.state.params)), bits(&[1.0, -0.0]));
        assert_eq!(bits(&f.values(&f.state.m)), bits(&[0.0, 0.0]));
    }

    #[test]
    fn refusals() {
        let f = Fixture::<f64>::new(&[1.0; 12], &[1.0; 12], 0.1, 1.0);
        let message = |config: &Config| f.update(config).unwrap_err().to_string();
        let table = config(vec![matrix(0, [1, 2, 6])]);
        let with = |matrix: Matrix| message(&config(vec![matrix]));
        assert_eq!(
            message(&Config { momentum: 1.0, ..table.clone() }),
            "muon::update: config `momentum` is 1, expected at least 0 and less than 1"
        );
        assert_eq!(
            message(&Config { iterations: 0, ..table.clone() }),
            "muon::update: config `iterations` is 0, expected at least 1"
        );
        assert_eq!(
            with(matrix(0, [1, 0, 6])),
            "muon::update: config `matrices.shape` is [1, 0, 6], expected [E, rows, columns] with a row and a column"
        );
        assert_eq!(
            with(Matrix { heads: 4, ..matrix(0, [1, 2, 6]) }),
            "muon::update: config `matrices.heads` is 4, expected a divisor of the 6 columns"
        );
        assert_eq!(
            with(Matrix { scale: 0.0, ..matrix(0, [1, 2, 6]) }),
            "muon::update: config `matrices.scale` is 0, expected greater than zero"
        );
        assert_eq!(
            with(Matrix { weight_decay: -1.0, ..matrix(0, [1, 2, 6]) }),
            "muon::update: config `matrices.weight_decay` is -1, expected at least 0"
        );
        assert_eq!(
            with(matrix(1, [1, 2, 6])),
            "muon::update: config `matrices` is 1..13, expected ranges inside the buffer of 12 elements"
        );
        assert_eq!(
            message(&config(vec![matrix(0, [1, 2, 2]), matrix(3, [1, 2, 2])])),
            "muon::update: config `matrices` is 0..4 and 3..7, expected ranges that do not overlap"
        );
        let State { params, grads, m } = f.state.as_ref();
        let with = |state| Muon::update(&f.b, &table, state, f.scalars.as_ref()).unwrap_err().to_string();
        assert_eq!(
            with(State { params, grads, m: grads }),
            "muon::update: `m` shares its allocation with `grads`, expected an allocation of its own"
        );
        let short = f.b.constant(Array1::zeros(3).into_dyn());
        assert_eq!(
            with(State { params, grads, m: &short }),
            "muon::update: `m` is [3], expected [P] = [12] (P from `params`)"
        );
        let scratch = f.b.scratch(&[12], DType::F64).unwrap();
        assert_eq!(
            with(State { params: &scratch, grads, m }),
            "muon::update: `params` is scratch, expected a persistent tensor, since it must outlive the step"
        );
        let two = f.b.constant(array![1.0, 1.0].into_dyn());
        let scalars = Scalars { apply: &two, ..f.scalars.as_ref() };
        assert_eq!(
            Muon::update(&f.b, &table, f.state.as_ref(), scalars).unwrap_err().to_string(),
            "muon::update: `apply` is [2], expected [1]"
        );
        let half = f.b.constant(array![0.5].into_dyn());
        let scalars = Scalars { apply: &half, ..f.scalars.as_ref() };
        assert_eq!(
            Muon::update(&Checked(Reference::<f64>::new()), &table, f.state.as_ref(), scalars).unwrap_err().to_string(),
            "muon::update: `apply`[0] is 0.5, expected 0 or 1"
        );
    }
}
