//! `l2_norm`: each row scaled to length one.
//!
//! ```text
//! rho = (sum_k x_k^2 + eps)^(-1/2)
//! y   = rho * x
//! ```
//!
//! Adjoint, with dy the gradient of y:
//!
//! ```text
//! dx = rho * (dy - y * sum_k(y_k dy_k))
//! ```
//!
//! `eps` is inside the root, so a zero row gives y = 0 and dx = dy / sqrt(eps), and the adjoint is exact (the length of
//! y is a little under one, which the formula accounts for). Every leading axis counts as rows: `[.., K]`.
//!
//! Range: the sum of squares must not overflow, in `f32` about |x| < 1e19 / sqrt(K). Beyond it rho is 0, so that y and
//! dx are 0: finite, but no longer of length one. Small rows have no such bound, since eps takes over.

use ndarray::Array1;
use rayon::prelude::*;

use crate::checked::Checked;
use crate::cpu::{Reference, Tensor};
use crate::dims::Dims;
use crate::error::{Error, Result};
use crate::fields;
use crate::matmul::dot;
use crate::scalar::Scalar;
use crate::tensor::Tensors;

/// Fewer rows than this are not worth waking another core for.
const ROWS_PER_TASK: usize = 64;

/// What the operation does besides its shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Added to the sum of squares, inside the root. Greater than zero.
    pub eps: f64,
}

fields! {
    /// Activations going in.
    pub struct Inputs {
        /// `[.., K]`
        x
    }
}

fields! {
    /// Activations coming out. As `upstream` of `backward`: their gradients.
    pub struct Outputs {
        /// `[.., K]`
        y
    }
}

fields! {
    /// Gradients of the inputs.
    pub struct Grads {
        /// `[.., K]`
        dx
    }
}

/// The operation on a backend.
///
/// # Errors
/// `Shape` if K = 0 or an upstream gradient has another shape than its output; `Config` if `eps` is not greater than
/// zero.
pub trait L2Norm: Tensors {
    /// What `forward` hands to `backward`.
    type Saved;

    /// Normalises every row.
    fn forward(&self, config: &Config, inputs: Inputs<&Self::Tensor>) -> Result<(Outputs<Self::Tensor>, Self::Saved)>;

    /// Returns the gradient of `x`.
    fn backward(
        &self,
        config: &Config,
        saved: &Self::Saved,
        upstream: Outputs<&Self::Tensor>,
    ) -> Result<Grads<Self::Tensor>>;
}

/// What the reference saves: the normalised row and one number a row.
pub struct Saved<T> {
    y: Tensor<T>,
    rho: Vec<T>,
}

impl<T: Scalar> L2Norm for Reference<T> {
    type Saved = Saved<T>;

    #[inline(never)]
    fn forward(&self, config: &Config, inputs: Inputs<&Tensor<T>>) -> Result<(Outputs<Tensor<T>>, Saved<T>)> {
        const OP: &str = "l2_norm::forward";
        check_config(OP, config)?;
        let mut dims = Dims::new(OP);
        dims.bind_rows("x", inputs.x.shape(), "N", &["K"])?;
        dims.positive(&["K"])?;
        let x = self.read(OP, "x", inputs.x)?;
        let (y, rho) = forward(x.slice(), dims.get("K"), T::from_f64(config.eps));
        let y = self.adopt(Array1::from(y), inputs.x.shape());
        Ok((Outputs { y: y.clone() }, Saved { y, rho }))
    }

    #[inline(never)]
    fn backward(&self, config: &Config, saved: &Saved<T>, upstream: Outputs<&Tensor<T>>) -> Result<Grads<Tensor<T>>> {
        const OP: &str = "l2_norm::backward";
        check_config(OP, config)?;
        let mut dims = Dims::new(OP);
        dims.bind_rows("x", saved.y.shape(), "N", &["K"])?;
        dims.bind_rows("y", upstream.y.shape(), "N", &["K"])?;
        let y = self.read(OP, "y", &saved.y)?;
        let dy = self.read(OP, "y", upstream.y)?;
        let dx = backward(y.slice(), &saved.rho, dy.slice(), dims.get("K"));
        Ok(Grads { dx: self.adopt(Array1::from(dx), saved.y.shape()) })
    }
}

impl<B: L2Norm> L2Norm for Checked<B> {
    type Saved = B::Saved;

    fn forward(&self, config: &Config, inputs: Inputs<&B::Tensor>) -> Result<(Outputs<B::Tensor>, B::Saved)> {
        self.finite("l2_norm::forward", inputs.clone().named())?;
        self.0.forward(config, inputs)
    }

    fn backward(&self, config: &Config, saved: &B::Saved, upstream: Outputs<&B::Tensor>) -> Result<Grads<B::Tensor>> {
        self.finite("l2_norm::backward", upstream.clone().named())?;
        self.0.backward(config, saved, upstream)
    }
}

/// Refuses a config that is out of range. For backends of their own too.
///
/// # Errors
/// `Config` if `eps` is not greater than zero.
pub fn check_config(op: &'static str, config: &Config) -> Result<()> {
    if config.eps > 0.0 && config.eps.is_finite() {
        return Ok(());
    }
    Err(Error::Config {
        op,
        field: "eps",
        expected: "greater than zero, since a zero row would divide by zero".to_owned(),
        got: config.eps.to_string(),
    })
}

/// y and rho of rows `x` of length `width`.
fn forward<T: Scalar>(x: &[T], width: usize, eps: T) -> (Vec<T>, Vec<T>) {
    let mut y = vec![T::zero(); x.len()];
    let mut rho = vec![T::zero(); x.len() / width];
    let rows = (y.par_chunks_mut(width), x.par_chunks(width), &mut rho).into_par_iter();
    rows.with_min_len(ROWS_PER_TASK).for_each(|(y, x, rho)| {
        *rho = T::one() / (dot(x, x) + eps).sqrt();
        for (y, &x) in y.iter_mut().zip(x) {
            *y = *rho * x;
        }
    });
    (y, rho)
}

fn backward<T: Scalar>(y: &[T], rho: &[T], dy: &[T], width: usize) -> Vec<T> {
    let mut dx = vec![T::zero(); y.len()];
    let rows = (dx.par_chunks_mut(width), y.par_chunks(width), dy.par_chunks(width), rho).into_par_iter();
    rows.with_min_len(ROWS_PER_TASK).for_each(|(dx, y, dy, &rho)| {
        let along = dot(y, dy);
        for ((dx, &y), &dy) in dx.iter_mut().zip(y).zip(dy) {
            *dx = rho * (dy - y * along);
        }
    });
    dx
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;
    use approx::assert_relative_eq;
    use ndarray::{ArrayD, array};

    /// y and dx.
    fn run<T: Scalar>(eps: f64, x: ArrayD<T>, dy: ArrayD<T>) -> (ArrayD<f64>, ArrayD<f64>) {
        let b = Reference::<T>::new();
        let config = Config { eps };
        let (x, dy) = (b.constant(x), b.constant(dy));
        let (out, saved) = b.forward(&config, Inputs { x: &x }).unwrap();
        let grads = b.backward(&config, &saved, Outputs { y: &dy }).unwrap();
        (b.download(&out.y).unwrap(), b.download(&grads.dx).unwrap())
    }

    fn close(got: &ArrayD<f64>, want: ArrayD<f64>, max_relative: f64) {
        assert_eq!(got.shape(), want.shape());
        // No absolute slack: some of the expected values are tiny.
        assert_relative_eq!(
            got.as_slice().unwrap(),
            want.as_slice().unwrap(),
            epsilon = 0.0,
            max_relative = max_relative
        );
    }

    #[test]
    fn a_row_by_hand() {
        // x.x + eps = 25 + 11 = 36, so rho = 1/6; y = (1/2, 2/3), y.dy = 3/2, dx = (dy - y y.dy) / 6.
        let (y, dx) = run(11.0, array![[3.0f64, 4.0]].into_dyn(), array![[-1.0, 3.0]].into_dyn());
        close(&y, array![[0.5, 2.0 / 3.0]].into_dyn(), 1e-15);
        close(&dx, array![[-1.75 / 6.0, 2.0 / 6.0]].into_dyn(), 1e-15);
    }

    #[test]
    fn j1_zero_row_has_a_finite_gradient() {
        let (y, dx) = run(1e-6, array![[0.0f32, 0.0]].into_dyn(), array![[1.0, -2.0]].into_dyn());
        assert_eq!(y, array![[0.0, 0.0]].into_dyn());
        close(&dx, array![[1000.0, -2000.0]].into_dyn(), 1e-6);
    }

    #[test]
    fn j1_rows_whose_squares_leave_the_range_of_f32_stay_finite() {
        let dy = array![[1.0f32, -2.0]].into_dyn();
        // The square of 1e-20 underflows, and eps is all that counts.
        let (y, dx) = run(1e-6, array![[1e-20f32, 0.0]].into_dyn(), dy.clone());
        close(&y, array![[1e-17, 0.0]].into_dyn(), 1e-6);
        close(&dx, array![[1000.0, -2000.0]].into_dyn(), 1e-6);
        // The square of 1e20 overflows: documented as a zero result, in both directions.
        let (y, dx) = run(1e-6, array![[1e20f32, 0.0]].into_dyn(), dy);
        assert_eq!((y, dx), (ArrayD::zeros(vec![1, 2]), ArrayD::zeros(vec![1, 2])));
        // In f64 it is in range: a unit row, whose gradient has no part along it.
        let (y, dx) = run(1e-6, array![[1e20f64, 0.0]].into_dyn(), array![[1.0, -2.0]].into_dyn());
        assert_eq!(y, array![[1.0, 0.0]].into_dyn());
        close(&dx, array![[0.0, -2e-20]].into_dyn(), 1e-15);
    }

    #[test]
    fn j2_eps_is_inside_the_root() {
        // 3e-5 / sqrt(9e-10 + 1e-8); outside the root it would be 3e-5 / (3e-5 + 1e-4) = 0.23.
        let (y, _) = run(1e-8, array![[3e-5f64]].into_dyn(), array![[1.0]].into_dyn());
        assert_relative_eq!(y[[0, 0]], 0.287_347_885_566_345_4, max_relative = 1e-14);
    }

    #[test]
    fn no_rows_give_no_rows() {
        let empty = || ArrayD::<f64>::zeros(vec![2, 0, 3]);
        let (y, dx) = run(1e-6, empty(), empty());
        assert_eq!((y, dx), (empty(), empty()));
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let b = Reference::<f64>::new();
        let zeros = |shape: &[usize]| b.persistent(shape, DType::F64).unwrap();
        let config = Config { eps: 1e-6 };
        let x = zeros(&[4, 3]);
        let error = b.forward(&config, Inputs { x: &zeros(&[4, 0]) }).map(|_| ()).unwrap_err();
        assert_eq!(error.to_string(), "l2_norm::forward: `x` is [0], expected K >= 1");
        let error = b.forward(&Config { eps: 0.0 }, Inputs { x: &x }).map(|_| ()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "l2_norm::forward: config `eps` is 0, expected greater than zero, since a zero row would divide by zero"
        );
        let (_, saved) = b.forward(&config, Inputs { x: &x }).unwrap();
        let error = b.backward(&config, &saved, Outputs { y: &zeros(&[4, 2]) }).map(|_| ()).unwrap_err();
        assert_eq!(error.to_string(), "l2_norm::backward: `y` is [4, 2], expected [N, K] = [4, 3] (K from `x`)");
        let b = Checked(b);
        let x = b.0.constant(array![[f64::INFINITY]].into_dyn());
        let error = b.forward(&config, Inputs { x: &x }).map(|_| ()).unwrap_err();
        assert_eq!(error.to_string(), "l2_norm::forward: `x`[0, 0] is inf, expected finite");
    }
}
