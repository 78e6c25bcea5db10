//! `linear`: a matrix product with an optional bias.
//!
//! ```text
//! y = x W + bias
//! ```
//!
//! Adjoint, with dy the gradient of y and `plus` whatever other readers of x have already sent back:
//!
//! ```text
//! dx    = dy W^T + plus
//! dW    = x^T dy
//! dbias = sum_rows dy
//! ```
//!
//! `plus` makes the sum of the gradients of a tensor with several readers part of the product (a GEMM with beta = 1), so
//! no operation has to add tensors. Weights are stored `[in, out]`. Every leading axis counts as rows: `[.., I]`.

use ndarray::{Array1, ArrayView2, Axis, s};

use crate::checked::Checked;
use crate::cpu::{Reference, Tensor, full_precision};
use crate::dims::Dims;
use crate::error::{Error, Result};
use crate::fields;
use crate::matmul::{matmul, matmul_into, sum_over_rows};
use crate::scalar::Scalar;
use crate::tensor::{Precision, Tensors};

/// What the operation does besides its shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The arithmetic of the three products.
    pub precision: Precision,
}

fields! {
    /// Activations going in.
    pub struct Inputs {
        /// `[.., I]`
        x
    }
}

fields! {
    /// Learned parameters; their gradients accumulate into tensors of the same names.
    pub struct Params {
        /// `[I, O]`
        weight;
        optional
        /// `[O]`, added to every row.
        bias
    }
}

fields! {
    /// Activations coming out. As `upstream` of `backward`: their gradients.
    pub struct Outputs {
        /// `[.., O]`
        y
    }
}

fields! {
    /// Gradients of the inputs.
    pub struct Grads {
        /// `[.., I]`
        dx
    }
}

/// The operation on a backend.
///
/// # Errors
/// `Shape` if `weight` is not `[I, O]`, `bias` not `[O]`, `plus` not `[.., I]`, if I or O is 0 or an upstream gradient
/// has another shape than its output; `Config` for a precision that the backend does not have; `Presence` if `into`
/// and the forward pass disagree about `bias`.
pub trait Linear: Tensors {
    /// What `forward` hands to `backward`.
    type Saved;

    /// Multiplies every row by `weight`.
    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Self::Tensor>,
        params: Params<&Self::Tensor>,
    ) -> Result<(Outputs<Self::Tensor>, Self::Saved)>;

    /// Returns the gradient of `x`, with `plus` (`[.., I]`) added, and adds those of the parameters into `into`.
    fn backward(
        &self,
        config: &Config,
        saved: &Self::Saved,
        upstream: Outputs<&Self::Tensor>,
        plus: Option<&Self::Tensor>,
        into: Params<&Self::Tensor>,
    ) -> Result<Grads<Self::Tensor>>;
}

/// What the reference saves: handles of what went in.
pub struct Saved<T> {
    x: Tensor<T>,
    weight: Tensor<T>,
    has_bias: bool,
}

impl<T: Scalar> Linear for Reference<T> {
    type Saved = Saved<T>;

    #[inline(never)]
    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Tensor<T>>,
        params: Params<&Tensor<T>>,
    ) -> Result<(Outputs<Tensor<T>>, Saved<T>)> {
        const OP: &str = "linear::forward";
        full_precision(OP, config.precision)?;
        let mut dims = Dims::new(OP);
        dims.bind_rows("x", inputs.x.shape(), "N", &["I"])?;
        dims.bind("weight", params.weight.shape(), &["I", "O"])?;
        dims.positive(&["I", "O"])?;
        let x = self.read(OP, "x", inputs.x)?;
        let weight = self.read(OP, "weight", params.weight)?;
        let y = match params.bias {
            Some(bias) => {
                dims.bind("bias", bias.shape(), &["O"])?;
                let bias = self.read(OP, "bias", bias)?;
                let mut y = bias
                    .flat()
                    .broadcast((dims.get("N"), dims.get("O")))
                    .expect("a row of O numbers repeats to any number of rows")
                    .to_owned();
                matmul_into(T::one(), x.rows(), weight.dims(), T::one(), y.view_mut());
                y
            }
            None => matmul(x.rows(), weight.dims()),
        };
        let mut shape = inputs.x.shape().to_vec();
        *shape.last_mut().expect("bind_rows wants the axis I") = dims.get("O");
        let saved = Saved { x: inputs.x.clone(), weight: params.weight.clone(), has_bias: params.bias.is_some() };
        Ok((Outputs { y: self.adopt(y, &shape) }, saved))
    }

    #[inline(never)]
    fn backward(
        &self,
        config: &Config,
        saved: &Saved<T>,
        upstream: Outputs<&Tensor<T>>,
        plus: Option<&Tensor<T>>,
        into: Params<&Tensor<T>>,
    ) -> Result<Grads<Tensor<T>>> {
        const OP: &str = "linear::backward";
        full_precision(OP, config.precision)?;
        let mut dims = Dims::new(OP);
        dims.bind_rows("x", saved.x.shape(), "N", &["I"])?;
        dims.bind("weight", saved.weight.shape(), &["I", "O"])?;
        dims.bind_rows("y", upstream.y.shape(), "N", &["O"])?;
        dims.bind("weight", into.weight.shape(), &["I", "O"])?;
        let dy = self.read(OP, "y", upstream.y)?;
        let weight = self.read(OP, "weight", &saved.weight)?;
        let dx = match plus {
            Some(plus) => {
                dims.bind_rows("plus", plus.shape(), "N", &["I"])?;
                let mut dx = self.read(OP, "plus", plus)?.rows().to_owned();
                matmul_into(T::one(), dy.rows(), weight.dims().reversed_axes(), T::one(), dx.view_mut());
                dx
            }
            None => matmul(dy.rows(), weight.dims().reversed_axes()),
        };
        match (into.bias, saved.has_bias) {
            (Some(bias), true) => self.accumulate(OP, "bias", bias, &sum_of_rows(dy.rows()))?,
            (None, false) => {}
            (Some(_), false) => {
                return Err(Error::Presence {
                    op: OP,
                    arg: "bias",
                    expected: "absent because forward had none",
                    got: "present",
                });
            }
            (None, true) => {
                return Err(Error::Presence {
                    op: OP,
                    arg: "bias",
                    expected: "present because forward had one",
                    got: "absent",
                });
            }
        }
        let x = self.read(OP, "x", &saved.x)?;
        self.update(OP, "weight", into.weight, |sum| {
            let sum = sum.into_shape_with_order((dims.get("I"), dims.get("O"))).expect("its shape was checked");
            matmul_into(T::one(), x.rows().reversed_axes(), dy.rows(), T::one(), sum);
        })?;
        Ok(Grads { dx: self.adopt(dx, saved.x.shape()) })
    }
}

impl<B: Linear> Linear for Checked<B> {
    type Saved = B::Saved;

    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&B::Tensor>,
        params: Params<&B::Tensor>,
    ) -> Result<(Outputs<B::Tensor>, B::Saved)> {
        const OP: &str = "linear::forward";
        self.finite(OP, inputs.clone().named())?;
        self.finite(OP, params.clone().named())?;
        self.0.forward(config, inputs, params)
    }

    fn backward(
        &self,
        config: &Config,
        saved: &B::Saved,
        upstream: Outputs<&B::Tensor>,
        plus: Option<&B::Tensor>,
        into: Params<&B::Tensor>,
    ) -> Result<Grads<B::Tensor>> {
        const OP: &str = "linear::backward";
        self.finite(OP, upstream.clone().named())?;
        self.finite(OP, plus.map(|plus| ("plus", plus)))?;
        self.0.backward(config, saved, upstream, plus, into)
    }
}

/// The sum over rows, as the gradient of something added to every row.
fn sum_of_rows<T: Scalar>(rows: ArrayView2<'_, T>) -> Array1<T> {
    sum_over_rows(rows.nrows(), rows.ncols(), |range| rows.slice(s![range, ..]).sum_axis(Axis(0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;
    use ndarray::{Array2, array};

    const CONFIG: Config = Config { precision: Precision::Full };

    #[test]
    fn a_small_product_and_its_adjoint_by_hand() {
        let b = Reference::<f64>::new();
        let x = b.constant(array![[1.0, 2.0, 3.0], [0.0, -1.0, 1.0]].into_dyn());
        let weight = b.constant(array![[1.0, 0.0], [2.0, -1.0], [0.5, 4.0]].into_dyn());
        let bias = b.constant(array![10.0, 20.0].into_dyn());
        let params = Params { weight: &weight, bias: Some(&bias) };
        let (out, saved) = b.forward(&CONFIG, Inputs { x: &x }, params).unwrap();
        assert_eq!(b.download(&out.y).unwrap(), array![[16.5, 30.0], [8.5, 25.0]].into_dyn());

        let dy = b.constant(array![[1.0, 2.0], [3.0, 0.0]].into_dyn());
        let plus = b.constant(array![[100.0, 0.0, 0.0], [0.0, 0.0, 200.0]].into_dyn());
        let dweight = b.constant(array![[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]].into_dyn());
        let dbias = b.persistent(&[2], DType::F64).unwrap();
        let into = Params { weight: &dweight, bias: Some(&dbias) };
        let grads = b.backward(&CONFIG, &saved, Outputs { y: &dy }, Some(&plus), into).unwrap();
        assert_eq!(b.download(&grads.dx).unwrap(), array![[101.0, 0.0, 8.5], [3.0, 6.0, 201.5]].into_dyn());
        assert_eq!(b.download(&dweight).unwrap(), array![[2.0, 3.0], [0.0, 5.0], [7.0, 7.0]].into_dyn());
        assert_eq!(b.download(&dbias).unwrap(), array![4.0, 2.0].into_dyn());
    }

    #[test]
    fn no_rows_give_no_rows() {
        let b = Reference::<f64>::new();
        let x = b.persistent(&[0, 5, 3], DType::F64).unwrap();
        let weight = b.persistent(&[3, 2], DType::F64).unwrap();
        let (out, saved) = b.forward(&CONFIG, Inputs { x: &x }, Params { weight: &weight, bias: None }).unwrap();
        assert_eq!(out.y.shape(), [0, 5, 2]);
        let dweight = b.constant(Array2::ones((3, 2)).into_dyn());
        let into = Params { weight: &dweight, bias: None };
        let grads = b.backward(&CONFIG, &saved, Outputs { y: &out.y }, None, into).unwrap();
        assert_eq!(grads.dx.shape(), [0, 5, 3]);
        assert_eq!(b.download(&dweight).unwrap(), Array2::ones((3, 2)).into_dyn());
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let b = Reference::<f64>::new();
        let zeros = |shape: &[usize]| b.persistent(shape, DType::F64).unwrap();
        let (x, weight, bias) = (zeros(&[4, 3]), zeros(&[3, 2]), zeros(&[2]));
        let forward = |config: &Config, x: &Tensor<f64>, weight: &Tensor<f64>, bias: Option<&Tensor<f64>>| {
            b.forward(config, Inputs { x }, Params { weight, bias }).map(|_| ()).unwrap_err().to_string()
        };
        assert_eq!(
            forward(&CONFIG, &x, &zeros(&[4, 2]), None),
            "linear::forward: `weight` is [4, 2], expected [I, O] = [3, any] (I from `x`)"
        );
        assert_eq!(
            forward(&CONFIG, &x, &weight, Some(&zeros(&[3]))),
            "linear::forward: `bias` is [3], expected [O] = [2] (O from `weight`)"
        );
        assert_eq!(
            forward(&CONFIG, &zeros(&[4, 0]), &zeros(&[0, 2]), None),
            "linear::forward: `x` is [0], expected I >= 1"
        );
        assert_eq!(
            forward(&Config { precision: Precision::Tf32 }, &x, &weight, None),
            "linear::forward: config `precision` is Tf32, expected Full on the reference, which never rounds operands; \
             use a device backend for the others"
        );
        let (out, saved) = b.forward(&CONFIG, Inputs { x: &x }, Params { weight: &weight, bias: None }).unwrap();
        let backward = |dy: &Tensor<f64>, plus: Option<&Tensor<f64>>, weight: &Tensor<f64>, bias| {
            let into = Params { weight, bias };
            b.backward(&CONFIG, &saved, Outputs { y: dy }, plus, into).map(|_| ()).unwrap_err().to_string()
        };
        assert_eq!(
            backward(&zeros(&[4, 3]), None, &weight, None),
            "linear::backward: `y` is [4, 3], expected [N, O] = [4, 2] (O from `weight`)"
        );
        assert_eq!(
            backward(&out.y, Some(&zeros(&[4, 2])), &weight, None),
            "linear::backward: `plus` is [4, 2], expected [N, I] = [4, 3] (I from `x`)"
        );
        assert_eq!(
            backward(&out.y, None, &zeros(&[2, 3]), None),
            "linear::backward: `weight` is [2, 3], expected [I, O] = [3, 2] (I from `x`, O from `weight`)"
        );
        assert_eq!(
            backward(&out.y, None, &weight, Some(&bias)),
            "linear::backward: `bias` is present, expected it absent because forward had none"
        );
        let (out, saved) = b.forward(&CONFIG, Inputs { x: &x }, Params { weight: &weight, bias: Some(&bias) }).unwrap();
        let into = Params { weight: &zeros(&[3, 2]), bias: None };
        let error = b.backward(&CONFIG, &saved, Outputs { y: &out.y }, None, into).map(|_| ()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "linear::backward: `bias` is absent, expected it present because forward had one"
        );
    }

    #[test]
    fn checked_refuses_a_value_that_is_not_finite() {
        let b = Checked(Reference::<f64>::new());
        let x = b.0.constant(array![[1.0, f64::NAN]].into_dyn());
        let weight = b.0.constant(array![[1.0], [1.0]].into_dyn());
        let error =
            b.forward(&CONFIG, Inputs { x: &x }, Params { weight: &weight, bias: None }).map(|_| ()).unwrap_err();
        assert_eq!(error.to_string(), "linear::forward: `x`[0, 1] is NaN, expected finite");
    }
}
