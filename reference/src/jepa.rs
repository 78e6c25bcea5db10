//! `jepa`: how far the student's prediction is from the teacher's latents, over the masked positions.
//!
//! ```text
//! t    = layernorm(teacher)                     mean 0 and variance 1 in each row, no parameters, eps inside the root
//! loss = 1 / (M D) sum over masked positions n and channels d of |prediction_nd - t_nd|
//! ```
//!
//! M is the number of masked positions; with none the loss is 0 and so is its gradient. Adjoint, with dloss the gradient
//! of the loss:
//!
//! ```text
//! dprediction_nd = dloss / (M D) sign(prediction_nd - t_nd)   where masked, with sign(0) = 0
//! dprediction_nd = 0                                          elsewhere
//! ```
//!
//! The teacher has no gradient. Positions that are not masked are not read at all, so what they hold reaches nothing.
//! Every leading axis counts as rows: `[.., D]`.
//!
//! Source: Assran et al., *Self-Supervised Learning from Images with a Joint-Embedding Predictive Architecture*, arXiv
//! 2301.08243, here on bytes and with the absolute difference.

use ndarray::{Array1, Array2, ArrayView2};

use crate::checked::Checked;
use crate::cpu::{Reference, Tensor};
use crate::dims::{Dims, check_one};
use crate::error::Result;
use crate::fields;
use crate::layer_norm::{check_eps, normalise};
use crate::matmul::sum_over_rows;
use crate::scalar::Scalar;
use crate::tensor::Tensors;

/// What the operation does besides its shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Added to the variance of a teacher's row, inside the root. Greater than zero.
    pub eps: f64,
}

fields! {
    /// What goes in.
    pub struct Inputs {
        /// `[.., D]`, the student's prediction.
        prediction,
        /// `[.., D]`, the teacher's latents. No gradient.
        teacher,
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
        dprediction
    }
}

/// The operation on a backend.
///
/// # Errors
/// `Shape` if `teacher` or `mask` does not fit `prediction` or D = 0; `Config` if `eps` is not greater than zero.
pub trait Jepa: Tensors {
    /// What `forward` hands to `backward`.
    type Saved;

    /// The mean distance.
    fn forward(&self, config: &Config, inputs: Inputs<&Self::Tensor>) -> Result<(Outputs<Self::Tensor>, Self::Saved)>;

    /// Returns the gradient of the prediction.
    fn backward(
        &self,
        config: &Config,
        saved: &Self::Saved,
        upstream: Outputs<&Self::Tensor>,
    ) -> Result<Grads<Self::Tensor>>;
}

/// What the reference saves: prediction less target, where masked.
pub struct Saved<T> {
    shape: Vec<usize>,
    masked: Vec<usize>,
    difference: Array2<T>,
}

impl<T: Scalar> Jepa for Reference<T> {
    type Saved = Saved<T>;

    #[inline(never)]
    fn forward(&self, config: &Config, inputs: Inputs<&Tensor<T>>) -> Result<(Outputs<Tensor<T>>, Saved<T>)> {
        const OP: &str = "jepa::forward";
        check_forward(config, inputs.clone().map(|_, t| t.shape()))?;
        let masked = places(&self.read_mask(OP, "mask", inputs.mask)?);
        let prediction = self.read(OP, "prediction", inputs.prediction)?;
        let teacher = self.read(OP, "teacher", inputs.teacher)?;
        let (target, _) = normalise(pick(teacher.rows(), &masked).view(), T::from_f64(config.eps));
        let difference = pick(prediction.rows(), &masked) - target;
        let loss = sum_over_rows(masked.len(), 1, |rows| {
            Array1::from_elem(1, rows.map(|n| difference.row(n).iter().map(|x| x.abs()).sum::<T>()).sum::<T>())
        });
        let loss = loss * share(&difference);
        let saved = Saved { shape: inputs.prediction.shape().to_vec(), masked, difference };
        Ok((Outputs { loss: self.adopt(loss, &[1]) }, saved))
    }

    #[inline(never)]
    fn backward(&self, config: &Config, saved: &Saved<T>, upstream: Outputs<&Tensor<T>>) -> Result<Grads<Tensor<T>>> {
        const OP: &str = "jepa::backward";
        check_backward(config, upstream.loss.shape())?;
        let size = self.read_one(OP, "loss", upstream.loss)? * share(&saved.difference);
        let width = saved.difference.ncols();
        let rows = saved.shape.iter().product::<usize>() / width;
        let mut dprediction = Array2::zeros((rows, width));
        for (&n, difference) in saved.masked.iter().zip(saved.difference.rows()) {
            for (d, &x) in dprediction.row_mut(n).iter_mut().zip(difference) {
                *d = if x > T::zero() {
                    size
                } else if x < T::zero() {
                    -size
                } else {
                    T::zero()
                };
            }
        }
        Ok(Grads { dprediction: self.adopt(dprediction, &saved.shape) })
    }
}

impl<B: Jepa> Jepa for Checked<B> {
    type Saved = B::Saved;

    fn forward(&self, config: &Config, inputs: Inputs<&B::Tensor>) -> Result<(Outputs<B::Tensor>, B::Saved)> {
        const OP: &str = "jepa::forward";
        self.finite(OP, [("prediction", inputs.prediction), ("teacher", inputs.teacher)])?;
        self.every(OP, "mask", inputs.mask, "0 or 1", |x| x == 0.0 || x == 1.0)?;
        self.0.forward(config, inputs)
    }

    fn backward(&self, config: &Config, saved: &B::Saved, upstream: Outputs<&B::Tensor>) -> Result<Grads<B::Tensor>> {
        self.finite("jepa::backward", upstream.clone().named())?;
        self.0.backward(config, saved, upstream)
    }
}

/// Refuses what [`Jepa::forward`] refuses of its config and its shapes, on every backend; binds N and D.
///
/// # Errors
/// Those of the trait.
pub fn check_forward(config: &Config, inputs: Inputs<&[usize]>) -> Result<Dims> {
    const OP: &str = "jepa::forward";
    check_eps(OP, config.eps)?;
    let mut dims = Dims::new(OP);
    dims.bind_rows("prediction", inputs.prediction, "N", &["D"])?;
    dims.bind_rows("teacher", inputs.teacher, "N", &["D"])?;
    dims.bind_rows("mask", inputs.mask, "N", &[])?;
    dims.positive(&["D"])?;
    Ok(dims)
}

/// The same of [`Jepa::backward`].
///
/// # Errors
/// Those of the trait.
pub fn check_backward(config: &Config, loss: &[usize]) -> Result<()> {
    const OP: &str = "jepa::backward";
    check_eps(OP, config.eps)?;
    check_one(OP, "loss", loss)
}

/// The places where a mask is set.
pub(crate) fn places(mask: &[bool]) -> Vec<usize> {
    mask.iter().enumerate().filter(|(_, masked)| **masked).map(|(n, _)| n).collect()
}

/// The rows at these places.
pub(crate) fn pick<T: Scalar>(rows: ArrayView2<'_, T>, places: &[usize]) -> Array2<T> {
    let mut picked = Array2::zeros((places.len(), rows.ncols()));
    for (mut to, &n) in picked.rows_mut().into_iter().zip(places) {
        to.assign(&rows.row(n));
    }
    picked
}

/// 1 / (M D), or 0 where nothing is masked.
fn share<T: Scalar>(difference: &Array2<T>) -> T {
    match difference.len() {
        0 => T::zero(),
        len => T::one() / T::from_f64(len as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;
    use approx::assert_relative_eq;
    use ndarray::{ArrayD, array};

    const CONFIG: Config = Config { eps: 1e-12 };

    fn run(prediction: ArrayD<f64>, teacher: ArrayD<f64>, mask: &[f64]) -> (f64, ArrayD<f64>) {
        let b = Reference::<f64>::new();
        let mask = b.constant(Array1::from(mask.to_vec()).into_dyn());
        let (prediction, teacher) = (b.constant(prediction), b.constant(teacher));
        let inputs = Inputs { prediction: &prediction, teacher: &teacher, mask: &mask };
        let (out, saved) = b.forward(&CONFIG, inputs).unwrap();
        let dloss = b.constant(array![6.0].into_dyn());
        let grads = b.backward(&CONFIG, &saved, Outputs { loss: &dloss }).unwrap();
        (b.download(&out.loss).unwrap()[0], b.download(&grads.dprediction).unwrap())
    }

    #[test]
    fn hand_values_and_the_kink() {
        // The teacher's rows are [-1, 1] and [0, 0] once normalised.
        let teacher = array![[2.0, 6.0], [f64::NAN, 0.0], [5.0, 5.0]].into_dyn();
        let prediction = array![[0.5, 0.0], [f64::NAN, 9.0], [0.0, -3.0]].into_dyn();
        let (loss, grad) = run(prediction, teacher, &[1.0, 0.0, 1.0]);
        assert_relative_eq!(loss, (1.5 + 1.0 + 0.0 + 3.0) / 4.0, max_relative = 1e-12);
        assert_eq!(grad, array![[1.5, -1.5], [0.0, 0.0], [0.0, -1.5]].into_dyn());
    }

    #[test]
    fn nothing_masked_is_zero() {
        let (loss, grad) = run(array![[1.0, 2.0]].into_dyn(), array![[3.0, 4.0]].into_dyn(), &[0.0]);
        assert_eq!(loss, 0.0);
        assert_eq!(grad, array![[0.0, 0.0]].into_dyn());
        assert_eq!(run(ArrayD::zeros(vec![0, 2]), ArrayD::zeros(vec![0, 2]), &[]).0, 0.0);
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let b = Checked(Reference::<f64>::new());
        let zeros = |shape: &[usize]| b.persistent(shape, DType::F64).unwrap();
        let (x, mask) = (zeros(&[2, 3]), zeros(&[2]));
        let forward = |config: &Config, prediction: &Tensor<f64>, teacher: &Tensor<f64>, mask: &Tensor<f64>| {
            b.forward(config, Inputs { prediction, teacher, mask }).map(|_| ()).unwrap_err().to_string()
        };
        assert_eq!(
            forward(&CONFIG, &x, &zeros(&[2, 4]), &mask),
            "jepa::forward: `teacher` is [2, 4], expected [N, D] = [2, 3] (D from `prediction`)"
        );
        assert_eq!(
            forward(&CONFIG, &x, &x, &zeros(&[3])),
            "jepa::forward: `mask` is [3], expected [N] = [2] (N from `prediction`)"
        );
        let none = zeros(&[2, 0]);
        assert_eq!(forward(&CONFIG, &none, &none, &mask), "jepa::forward: `prediction` is [0], expected D >= 1");
        assert_eq!(
            forward(&Config { eps: -1.0 }, &x, &x, &mask),
            "jepa::forward: config `eps` is -1, expected greater than zero, since a constant row would divide by zero"
        );
        let (_, saved) = b.forward(&CONFIG, Inputs { prediction: &x, teacher: &x, mask: &mask }).unwrap();
        assert_eq!(
            b.backward(&CONFIG, &saved, Outputs { loss: &mask }).unwrap_err().to_string(),
            "jepa::backward: `loss` is [2], expected [1]"
        );
    }
}
