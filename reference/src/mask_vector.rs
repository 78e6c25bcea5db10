//! `mask_vector`: a learned vector in place of every masked row.
//!
//! ```text
//! y_n = vector   where mask_n = 1
//! y_n = x_n      where mask_n = 0
//! ```
//!
//! Adjoint, with dy the gradient of y:
//!
//! ```text
//! dx_n    = 0 where mask_n = 1, else dy_n
//! dvector = sum over n with mask_n = 1 of dy_n
//! ```
//!
//! Rows are chosen and never multiplied by the mask, so what a masked row holds, even NaN, reaches nothing. Every leading
//! axis counts as rows: `[.., D]`.

use ndarray::{Array1, Array2, ArrayView1, ArrayView2, Axis, Zip};

use crate::checked::Checked;
use crate::cpu::{Reference, Tensor};
use crate::dims::Dims;
use crate::error::Result;
use crate::fields;
use crate::matmul::sum_over_rows;
use crate::scalar::Scalar;
use crate::tensor::Tensors;

/// What the operation does besides its shapes: nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {}

fields! {
    /// What goes in.
    pub struct Inputs {
        /// `[.., D]`
        x,
        /// `[..]`: 1 where the row is masked, else 0. No gradient.
        mask
    }
}

fields! {
    /// Learned parameters; their gradients accumulate into tensors of the same names.
    pub struct Params {
        /// `[D]`
        vector
    }
}

fields! {
    /// Activations coming out. As `upstream` of `backward`: their gradients.
    pub struct Outputs {
        /// `[.., D]`
        y
    }
}

fields! {
    /// Gradients of the inputs.
    pub struct Grads {
        /// `[.., D]`
        dx
    }
}

/// The operation on a backend.
///
/// # Errors
/// `Shape` if `mask` has another number of rows than `x`, `vector` is not `[D]`, D = 0 or an upstream gradient has another
/// shape than its output.
pub trait MaskVector: Tensors {
    /// What `forward` hands to `backward`.
    type Saved;

    /// Replaces the masked rows.
    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Self::Tensor>,
        params: Params<&Self::Tensor>,
    ) -> Result<(Outputs<Self::Tensor>, Self::Saved)>;

    /// Returns the gradient of `x` and adds that of `vector` into `into`.
    fn backward(
        &self,
        config: &Config,
        saved: &Self::Saved,
        upstream: Outputs<&Self::Tensor>,
        into: Params<&Self::Tensor>,
    ) -> Result<Grads<Self::Tensor>>;
}

/// What the reference saves: which rows are masked.
pub struct Saved {
    shape: Vec<usize>,
    mask: Vec<bool>,
}

impl<T: Scalar> MaskVector for Reference<T> {
    type Saved = Saved;

    #[inline(never)]
    fn forward(
        &self,
        _config: &Config,
        inputs: Inputs<&Tensor<T>>,
        params: Params<&Tensor<T>>,
    ) -> Result<(Outputs<Tensor<T>>, Saved)> {
        const OP: &str = "mask_vector::forward";
        check_forward(inputs.clone().map(|_, t| t.shape()), params.vector.shape())?;
        let mask = self.read_mask(OP, "mask", inputs.mask)?;
        let x = self.read(OP, "x", inputs.x)?;
        let vector = self.read(OP, "vector", params.vector)?;
        let y = forward(x.rows(), &mask, vector.flat());
        let shape = inputs.x.shape().to_vec();
        Ok((Outputs { y: self.adopt(y, &shape) }, Saved { shape, mask }))
    }

    #[inline(never)]
    fn backward(
        &self,
        _config: &Config,
        saved: &Saved,
        upstream: Outputs<&Tensor<T>>,
        into: Params<&Tensor<T>>,
    ) -> Result<Grads<Tensor<T>>> {
        const OP: &str = "mask_vector::backward";
        check_backward(&saved.shape, upstream.y.shape(), into.vector.shape())?;
        let dy = self.read(OP, "y", upstream.y)?;
        let (dx, dvector) = backward(dy.rows(), &saved.mask);
        self.accumulate(OP, "vector", into.vector, &dvector)?;
        Ok(Grads { dx: self.adopt(dx, &saved.shape) })
    }
}

impl<B: MaskVector> MaskVector for Checked<B> {
    type Saved = B::Saved;

    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&B::Tensor>,
        params: Params<&B::Tensor>,
    ) -> Result<(Outputs<B::Tensor>, B::Saved)> {
        const OP: &str = "mask_vector::forward";
        self.finite(OP, [("x", inputs.x), ("vector", params.vector)])?;
        self.every(OP, "mask", inputs.mask, "0 or 1", |x| x == 0.0 || x == 1.0)?;
        self.0.forward(config, inputs, params)
    }

    fn backward(
        &self,
        config: &Config,
        saved: &B::Saved,
        upstream: Outputs<&B::Tensor>,
        into: Params<&B::Tensor>,
    ) -> Result<Grads<B::Tensor>> {
        self.finite("mask_vector::backward", upstream.clone().named())?;
        self.0.backward(config, saved, upstream, into)
    }
}

/// Refuses what [`MaskVector::forward`] refuses of its shapes, on every backend; binds N and D.
///
/// # Errors
/// Those of the trait.
pub fn check_forward(inputs: Inputs<&[usize]>, vector: &[usize]) -> Result<Dims> {
    let mut dims = Dims::new("mask_vector::forward");
    dims.bind_rows("x", inputs.x, "N", &["D"])?;
    dims.bind_rows("mask", inputs.mask, "N", &[])?;
    dims.bind("vector", vector, &["D"])?;
    dims.positive(&["D"])?;
    Ok(dims)
}

/// The same of [`MaskVector::backward`]: `x` is the shape that forward had.
///
/// # Errors
/// Those of the trait.
pub fn check_backward(x: &[usize], y: &[usize], vector: &[usize]) -> Result<Dims> {
    let mut dims = Dims::new("mask_vector::backward");
    dims.bind_rows("x", x, "N", &["D"])?;
    dims.bind_rows("y", y, "N", &["D"])?;
    dims.bind("vector", vector, &["D"])?;
    Ok(dims)
}

fn forward<T: Scalar>(x: ArrayView2<'_, T>, mask: &[bool], vector: ArrayView1<'_, T>) -> Array2<T> {
    let mut y = Array2::zeros(x.raw_dim());
    Zip::from(y.rows_mut()).and(x.rows()).and(mask).par_for_each(|mut y, x, &masked| {
        y.assign(if masked { &vector } else { &x });
    });
    y
}

/// dx and dvector.
fn backward<T: Scalar>(dy: ArrayView2<'_, T>, mask: &[bool]) -> (Array2<T>, Array1<T>) {
    let mut dx = Array2::zeros(dy.raw_dim());
    for ((mut dx, dy), _) in dx.axis_iter_mut(Axis(0)).zip(dy.rows()).zip(mask).filter(|(_, masked)| !**masked) {
        dx.assign(&dy);
    }
    let dvector = sum_over_rows(dy.nrows(), dy.ncols(), |rows| {
        let mut sum = Array1::zeros(dy.ncols());
        for n in rows.filter(|&n| mask[n]) {
            sum += &dy.row(n);
        }
        sum
    });
    (dx, dvector)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;
    use ndarray::array;

    #[test]
    fn masked_rows_are_the_vector_and_nan_in_them_reaches_nothing() {
        let b = Reference::<f64>::new();
        let x = b.constant(array![[1.0, 2.0], [f64::NAN, f64::NAN], [3.0, 4.0]].into_dyn());
        let vector = b.constant(array![7.0, 8.0].into_dyn());
        for dtype in [DType::F64, DType::U8] {
            let mask = b.persistent(&[3], dtype).unwrap();
            b.upload(array![0.0, 1.0, 0.0].into_dyn().view(), &mask).unwrap();
            let inputs = Inputs { x: &x, mask: &mask };
            let (out, saved) = b.forward(&Config {}, inputs, Params { vector: &vector }).unwrap();
            assert_eq!(b.download(&out.y).unwrap(), array![[1.0, 2.0], [7.0, 8.0], [3.0, 4.0]].into_dyn());
            let dy = b.constant(array![[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]].into_dyn());
            let dvector = b.constant(array![0.5, 0.5].into_dyn());
            let grads = b.backward(&Config {}, &saved, Outputs { y: &dy }, Params { vector: &dvector }).unwrap();
            assert_eq!(b.download(&grads.dx).unwrap(), array![[1.0, 10.0], [0.0, 0.0], [3.0, 30.0]].into_dyn());
            assert_eq!(b.download(&dvector).unwrap(), array![2.5, 20.5].into_dyn());
        }
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let b = Checked(Reference::<f64>::new());
        let zeros = |shape: &[usize]| b.persistent(shape, DType::F64).unwrap();
        let (x, mask, vector) = (zeros(&[2, 3]), zeros(&[2]), zeros(&[3]));
        let forward = |x: &Tensor<f64>, mask: &Tensor<f64>, vector: &Tensor<f64>| {
            b.forward(&Config {}, Inputs { x, mask }, Params { vector }).map(|_| ()).unwrap_err().to_string()
        };
        assert_eq!(
            forward(&x, &vector, &vector),
            "mask_vector::forward: `mask` is [3], expected [N] = [2] (N from `x`)"
        );
        assert_eq!(forward(&x, &mask, &mask), "mask_vector::forward: `vector` is [2], expected [D] = [3] (D from `x`)");
        assert_eq!(forward(&zeros(&[2, 0]), &mask, &zeros(&[0])), "mask_vector::forward: `x` is [0], expected D >= 1");
        let half = zeros(&[2]);
        b.fill(&half, 0.5).unwrap();
        assert_eq!(forward(&x, &half, &vector), "mask_vector::forward: `mask`[0] is 0.5, expected 0 or 1");
        let (out, saved) = b.forward(&Config {}, Inputs { x: &x, mask: &mask }, Params { vector: &vector }).unwrap();
        let backward = |dy: &Tensor<f64>, vector: &Tensor<f64>| {
            b.backward(&Config {}, &saved, Outputs { y: dy }, Params { vector }).map(|_| ()).unwrap_err().to_string()
        };
        assert_eq!(
            backward(&zeros(&[3, 3]), &vector),
            "mask_vector::backward: `y` is [3, 3], expected [N, D] = [2, 3] (N from `x`)"
        );
        assert_eq!(backward(&out.y, &mask), "mask_vector::backward: `vector` is [2], expected [D] = [3] (D from `x`)");
    }
}
