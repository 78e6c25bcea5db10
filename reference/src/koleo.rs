//! `koleo`: keeps latents apart by the logarithm of the distance to the nearest neighbour.
//!
//! With z_1 .. z_M the rows at the chosen masked positions:
//!
//! ```text
//! p_i  = q_i z_i,   q_i = (|z_i|^2 + norm_eps)^(-1/2)
//! j(i) = the j != i with the smallest |p_i - p_j|^2, the lowest one of equals
//! D_i  = |p_i - p_j(i)|^2                        from the differences, which keep the digits that a Gram matrix loses
//! loss = -1/2 1/M sum_i ln(D_i + eps)
//! ```
//!
//! Chosen are all masked positions if there are at most `limit`, else every k-th one from the first on with k the smallest
//! whole number that leaves at most `limit`. Below two rows the loss is 0 and so is its gradient. Adjoint, with dloss the
//! gradient of the loss and `plus` what other readers of z have sent back:
//!
//! ```text
//! w_i  = -dloss / M (p_i - p_j(i)) / (D_i + eps)
//! dp_i = w_i - sum over k with j(k) = i of w_k, by k
//! dz_i = q_i (dp_i - p_i <p_i, dp_i>) + plus     at chosen rows, plus elsewhere
//! ```
//!
//! Where two neighbours are equally far the loss has a kink and the gradient is that of the lower one; two equal rows have
//! no direction to part in, and their gradient is 0. Rows that are not chosen are not read.
//!
//! Source: Sablayrolles et al., *Spreading vectors for similarity search*, arXiv 1806.03198.

use ndarray::{Array1, Array2, ArrayView2};
use rayon::prelude::*;

use crate::checked::Checked;
use crate::cpu::{Reference, Tensor};
use crate::dims::{Dims, check_one};
use crate::error::{Error, Result};
use crate::fields;
use crate::jepa::{pick, places};
use crate::scalar::Scalar;
use crate::tensor::Tensors;

/// What the operation does besides its shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// How many rows are compared at most: the cost grows with its square. At least 2.
    pub limit: usize,
    /// Added to the squared length of a row, inside the root. Greater than zero.
    pub norm_eps: f64,
    /// Added to the squared distance, inside the logarithm. Greater than zero.
    pub eps: f64,
}

fields! {
    /// What goes in.
    pub struct Inputs {
        /// `[.., D]`, the student's latents.
        z,
        /// `[..]`: 1 where the position is masked, else 0. No gradient.
        mask
    }
}

fields! {
    /// What comes out. As `upstream` of `backward`: its gradient.
    pub struct Outputs {
        /// `[1]`
        loss
    }
}

fields! {
    /// Gradients of the inputs.
    pub struct Grads {
        /// `[.., D]`
        dz
    }
}

/// The operation on a backend.
///
/// # Errors
/// `Shape` if `mask` has another number of rows than `z`, `plus` is not `[.., D]` or D = 0; `Config` if `limit` is below 2
/// or an eps not greater than zero.
pub trait Koleo: Tensors {
    /// What `forward` hands to `backward`.
    type Saved;

    /// The mean logarithm of the nearest distances.
    fn forward(&self, config: &Config, inputs: Inputs<&Self::Tensor>) -> Result<(Outputs<Self::Tensor>, Self::Saved)>;

    /// Returns the gradient of `z`, with `plus` (`[.., D]`) added.
    fn backward(
        &self,
        config: &Config,
        saved: &Self::Saved,
        upstream: Outputs<&Self::Tensor>,
        plus: Option<&Self::Tensor>,
    ) -> Result<Grads<Self::Tensor>>;
}

/// What the reference saves: the chosen rows, normalised, and each one's neighbour.
pub struct Saved<T> {
    shape: Vec<usize>,
    chosen: Vec<usize>,
    p: Array2<T>,
    scale: Vec<T>,
    nearest: Vec<Nearest<T>>,
}

/// The nearest other row.
#[derive(Clone, Copy)]
struct Nearest<T> {
    row: usize,
    square: T,
}

impl<T: Scalar> Koleo for Reference<T> {
    type Saved = Saved<T>;

    #[inline(never)]
    fn forward(&self, config: &Config, inputs: Inputs<&Tensor<T>>) -> Result<(Outputs<Tensor<T>>, Saved<T>)> {
        const OP: &str = "koleo::forward";
        check_forward(config, inputs.clone().map(|_, t| t.shape()))?;
        let chosen = choose(&places(&self.read_mask(OP, "mask", inputs.mask)?), config.limit);
        let mut p = pick(self.read(OP, "z", inputs.z)?.rows(), &chosen);
        let mut scale = Vec::with_capacity(chosen.len());
        for mut row in p.rows_mut() {
            let square = row.iter().map(|&x| x * x).sum::<T>();
            let q = T::one() / (square + T::from_f64(config.norm_eps)).sqrt();
            row.mapv_inplace(|x| q * x);
            scale.push(q);
        }
        let nearest = neighbours(p.view());
        let eps = T::from_f64(config.eps);
        let sum = nearest.iter().map(|nearest| (nearest.square + eps).ln()).sum::<T>();
        let loss = -sum * share::<T>(nearest.len()) / T::from_f64(2.0);
        let saved = Saved { shape: inputs.z.shape().to_vec(), chosen, p, scale, nearest };
        Ok((Outputs { loss: self.adopt(Array1::from_elem(1, loss), &[1]) }, saved))
    }

    #[inline(never)]
    fn backward(
        &self,
        config: &Config,
        saved: &Saved<T>,
        upstream: Outputs<&Tensor<T>>,
        plus: Option<&Tensor<T>>,
    ) -> Result<Grads<Tensor<T>>> {
        const OP: &str = "koleo::backward";
        let of_plus = plus.map(|plus| plus.shape());
        let dims = check_backward(config, &saved.shape, upstream.loss.shape(), of_plus)?;
        let dloss = self.read_one(OP, "loss", upstream.loss)?;
        let mut dz = match plus {
            Some(plus) => self.read(OP, "plus", plus)?.rows().to_owned(),
            None => Array2::zeros((dims.get("N"), dims.get("D"))),
        };
        let dp = backward(saved, dloss * share::<T>(saved.nearest.len()), T::from_f64(config.eps));
        for (i, &n) in saved.chosen.iter().enumerate() {
            let (p, dp, q) = (saved.p.row(i), dp.row(i), saved.scale[i]);
            let along = p.dot(&dp);
            for ((dz, &p), &dp) in dz.row_mut(n).iter_mut().zip(p).zip(dp) {
                *dz += q * (dp - p * along);
            }
        }
        Ok(Grads { dz: self.adopt(dz, &saved.shape) })
    }
}

impl<B: Koleo> Koleo for Checked<B> {
    type Saved = B::Saved;

    fn forward(&self, config: &Config, inputs: Inputs<&B::Tensor>) -> Result<(Outputs<B::Tensor>, B::Saved)> {
        const OP: &str = "koleo::forward";
        self.finite(OP, [("z", inputs.z)])?;
        self.every(OP, "mask", inputs.mask, "0 or 1", |x| x == 0.0 || x == 1.0)?;
        self.0.forward(config, inputs)
    }

    fn backward(
        &self,
        config: &Config,
        saved: &B::Saved,
        upstream: Outputs<&B::Tensor>,
        plus: Option<&B::Tensor>,
    ) -> Result<Grads<B::Tensor>> {
        const OP: &str = "koleo::backward";
        self.finite(OP, upstream.clone().named())?;
        self.finite(OP, plus.map(|plus| ("plus", plus)))?;
        self.0.backward(config, saved, upstream, plus)
    }
}

/// Refuses what [`Koleo::forward`] refuses of its config and its shapes, on every backend; binds N and D.
///
/// # Errors
/// Those of the trait.
pub fn check_forward(config: &Config, inputs: Inputs<&[usize]>) -> Result<Dims> {
    const OP: &str = "koleo::forward";
    check_config(OP, config)?;
    let mut dims = Dims::new(OP);
    dims.bind_rows("z", inputs.z, "N", &["D"])?;
    dims.bind_rows("mask", inputs.mask, "N", &[])?;
    dims.positive(&["D"])?;
    Ok(dims)
}

/// The same of [`Koleo::backward`]: `z` is the shape that forward had.
///
/// # Errors
/// Those of the trait.
pub fn check_backward(config: &Config, z: &[usize], loss: &[usize], plus: Option<&[usize]>) -> Result<Dims> {
    const OP: &str = "koleo::backward";
    check_config(OP, config)?;
    let mut dims = Dims::new(OP);
    dims.bind_rows("z", z, "N", &["D"])?;
    check_one(OP, "loss", loss)?;
    if let Some(plus) = plus {
        dims.bind_rows("plus", plus, "N", &["D"])?;
    }
    Ok(dims)
}

fn check_config(op: &'static str, config: &Config) -> Result<()> {
    let refuse =
        |field, expected: &str, got: String| Err(Error::Config { op, field, expected: expected.to_owned(), got });
    if config.limit < 2 {
        return refuse("limit", "at least 2, since one row has no neighbour", config.limit.to_string());
    }
    for (field, eps) in [("norm_eps", config.norm_eps), ("eps", config.eps)] {
        if !(eps > 0.0 && eps.is_finite()) {
            return refuse(field, "greater than zero, since equal rows would have ln 0", eps.to_string());
        }
    }
    Ok(())
}

/// At most `limit` of the places, by a fixed stride from the first on.
fn choose(places: &[usize], limit: usize) -> Vec<usize> {
    let stride = places.len().div_ceil(limit).max(1);
    places.iter().copied().step_by(stride).collect()
}

/// The nearest other row of every row; nobody has one below two rows.
fn neighbours<T: Scalar>(p: ArrayView2<'_, T>) -> Vec<Nearest<T>> {
    if p.nrows() < 2 {
        return Vec::new();
    }
    let of = |i: usize| {
        let mut best: Option<Nearest<T>> = None;
        for j in (0..p.nrows()).filter(|&j| j != i) {
            let square = p.row(i).iter().zip(p.row(j)).map(|(&a, &b)| (a - b) * (a - b)).sum::<T>();
            // Strictly smaller, so the lowest of equals stays.
            if best.is_none_or(|best| square < best.square) {
                best = Some(Nearest { row: j, square });
            }
        }
        best.expect("there are at least two rows")
    };
    (0..p.nrows()).into_par_iter().map(of).collect()
}

/// dp for `size` = dloss / M.
fn backward<T: Scalar>(saved: &Saved<T>, size: T, eps: T) -> Array2<T> {
    let mut dp = Array2::zeros(saved.p.raw_dim());
    for (i, nearest) in saved.nearest.iter().enumerate() {
        let factor = -size / (nearest.square + eps);
        for d in 0..saved.p.ncols() {
            let w = factor * (saved.p[[i, d]] - saved.p[[nearest.row, d]]);
            dp[[i, d]] += w;
            dp[[nearest.row, d]] -= w;
        }
    }
    dp
}

/// 1 / M, or 0 where there are no neighbours.
fn share<T: Scalar>(rows: usize) -> T {
    if rows == 0 { T::zero() } else { T::one() / T::from_f64(rows as f64) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;
    use approx::assert_relative_eq;
    use ndarray::{ArrayD, array};

    const CONFIG: Config = Config { limit: 256, norm_eps: 1e-12, eps: 1e-6 };

    fn run(config: &Config, z: ArrayD<f64>, mask: &[f64]) -> (f64, ArrayD<f64>) {
        let b = Reference::<f64>::new();
        let mask = b.constant(Array1::from(mask.to_vec()).into_dyn());
        let z = b.constant(z);
        let (out, saved) = b.forward(config, Inputs { z: &z, mask: &mask }).unwrap();
        let dloss = b.constant(array![1.0].into_dyn());
        let grads = b.backward(config, &saved, Outputs { loss: &dloss }, None).unwrap();
        (b.download(&out.loss).unwrap()[0], b.download(&grads.dz).unwrap())
    }

    #[test]
    fn two_rows_by_hand() {
        let z = array![[2.0, 0.0], [f64::NAN, f64::NAN], [0.0, 5.0]].into_dyn();
        let (loss, dz) = run(&CONFIG, z, &[1.0, 0.0, 1.0]);
        // Each is the other's neighbour at squared distance 2.
        assert_relative_eq!(loss, -0.5 * (2.0f64 + 1e-6).ln(), max_relative = 1e-11);
        // dp_0 = -2/2 (1, -1) / 2, less its part along (1, 0), by 1/2.
        assert_relative_eq!(dz[[0, 1]], 0.25, max_relative = 1e-5);
        assert_relative_eq!(dz[[0, 0]], 0.0, epsilon = 1e-11);
        assert_relative_eq!(dz[[2, 0]], 0.1, max_relative = 1e-5);
        assert_eq!([dz[[1, 0]], dz[[1, 1]]], [0.0, 0.0]);
    }

    #[test]
    fn equal_rows_have_a_finite_loss_and_no_gradient() {
        let (loss, dz) = run(&CONFIG, array![[1.0, 2.0], [1.0, 2.0]].into_dyn(), &[1.0, 1.0]);
        assert_relative_eq!(loss, -0.5 * 1e-6f64.ln(), max_relative = 1e-12);
        assert_eq!(dz, ArrayD::zeros(vec![2, 2]));
    }

    #[test]
    fn below_two_rows_there_is_nothing() {
        for mask in [[0.0, 0.0], [0.0, 1.0]] {
            let (loss, dz) = run(&CONFIG, array![[1.0, 2.0], [3.0, 2.0]].into_dyn(), &mask);
            assert_eq!((loss, dz), (0.0, ArrayD::zeros(vec![2, 2])));
        }
    }

    #[test]
    fn the_stride_is_the_smallest_that_fits() {
        let places: Vec<usize> = (10..23).collect();
        assert_eq!(choose(&places, 13), places);
        assert_eq!(choose(&places, 12), [10, 12, 14, 16, 18, 20, 22]);
        assert_eq!(choose(&places, 6), [10, 13, 16, 19, 22]);
        assert_eq!(choose(&places, 2), [10, 17]);
        assert!(choose(&[], 2).is_empty());
    }

    #[test]
    fn the_lowest_of_equal_neighbours_is_chosen() {
        let p = array![[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]];
        let rows: Vec<usize> = neighbours(p.view()).iter().map(|nearest| nearest.row).collect();
        assert_eq!(rows, [1, 0, 0]);
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let b = Checked(Reference::<f64>::new());
        let zeros = |shape: &[usize]| b.persistent(shape, DType::F64).unwrap();
        let (z, mask) = (zeros(&[2, 3]), zeros(&[2]));
        let forward = |config: &Config, z: &Tensor<f64>, mask: &Tensor<f64>| {
            b.forward(config, Inputs { z, mask }).map(|_| ()).unwrap_err().to_string()
        };
        assert_eq!(
            forward(&CONFIG, &z, &zeros(&[3])),
            "koleo::forward: `mask` is [3], expected [N] = [2] (N from `z`)"
        );
        assert_eq!(forward(&CONFIG, &zeros(&[2, 0]), &mask), "koleo::forward: `z` is [0], expected D >= 1");
        assert_eq!(
            forward(&Config { limit: 1, ..CONFIG }, &z, &mask),
            "koleo::forward: config `limit` is 1, expected at least 2, since one row has no neighbour"
        );
        assert_eq!(
            forward(&Config { eps: 0.0, ..CONFIG }, &z, &mask),
            "koleo::forward: config `eps` is 0, expected greater than zero, since equal rows would have ln 0"
        );
        let (_, saved) = b.forward(&CONFIG, Inputs { z: &z, mask: &mask }).unwrap();
        let one = zeros(&[1]);
        let backward = |loss: &Tensor<f64>, plus| {
            b.backward(&CONFIG, &saved, Outputs { loss }, plus).map(|_| ()).unwrap_err().to_string()
        };
        assert_eq!(backward(&mask, None), "koleo::backward: `loss` is [2], expected [1]");
        assert_eq!(
            backward(&one, Some(&zeros(&[3, 3]))),
            "koleo::backward: `plus` is [3, 3], expected [N, D] = [2, 3] (N from `z`)"
        );
    }
}
