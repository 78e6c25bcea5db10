//! `spectral`: a linear map kept as a truncated singular value decomposition.
//!
//! ```text
//! a = x U
//! y = (a * s) V^T
//! ```
//!
//! Adjoint, with dy the gradient of y:
//!
//! ```text
//! b  = dy V                            (the gradient of a * s)
//! ds = sum_rows b * a
//! dx = (b * s) U^T + plus
//! dU = x^T (b * s)
//! dV = dy^T (a * s)
//! ```
//!
//! The operation holds for any U, V and s; that the columns of U and V are orthonormal is the business of `retract`.
//! s = 0 switches a direction off but leaves ds as it is, so nothing here divides by s. `plus` is the gradient of x
//! that its other readers gave. Every leading axis counts as rows: `[.., I]`.
//!
//! With a `format` other than f32, U and V above are the rounded factors ([`crate::factor_format`]), in both directions,
//! and dU and dV go to the masters straight through: rounding counts as the identity. ds and dx are derivatives of what
//! forward computes; dU and dV are not, since that has steps in the masters.
//!
//! Source: Yang et al., *Learning Low-rank Deep Neural Networks via Singular Vector Orthogonality Regularization and
//! Singular Value Sparsification*, arXiv 2004.09031.

use ndarray::{Array1, Array2, ArrayView1, ArrayView2, ArrayViewMut2, CowArray, Ix2, Zip};

use crate::checked::Checked;
use crate::cpu::{Reference, Tensor, full_precision};
use crate::dims::Dims;
use crate::error::Result;
use crate::factor_format::FactorFormat;
use crate::fields;
use crate::matmul::{matmul, matmul_into, sum_over_rows};
use crate::scalar::Scalar;
use crate::tensor::{Precision, Tensors};

/// What the operation does besides its shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The arithmetic of the matrix products.
    pub precision: Precision,
    /// What the factors are rounded to where the maths uses them.
    pub format: FactorFormat,
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
        /// `[I, R]`, left factor.
        u,
        /// `[R]`, singular values.
        s,
        /// `[O, R]`, right factor.
        v
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
/// `Shape` if the parameters do not fit `x` or each other, if I, O or R is zero, or if an upstream gradient, `plus` or a
/// tensor of `into` has another shape than what it is the gradient of; `Config` if the backend lacks the precision or the
/// format.
pub trait Spectral: Tensors {
    /// What `forward` hands to `backward`.
    type Saved;

    /// Maps every row.
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

/// What the reference saves: the inputs and the short rows a = x U.
pub struct Saved<T> {
    x: Tensor<T>,
    params: Params<Tensor<T>>,
    a: Array2<T>,
}

impl<T: Scalar> Spectral for Reference<T> {
    type Saved = Saved<T>;

    #[inline(never)]
    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Tensor<T>>,
        params: Params<&Tensor<T>>,
    ) -> Result<(Outputs<Tensor<T>>, Saved<T>)> {
        const OP: &str = "spectral::forward";
        full_precision(OP, config.precision)?;
        let dims = bind(OP, inputs.x.shape(), params.clone().map(|_, p| p.shape()))?;
        let x = self.read(OP, "x", inputs.x)?;
        let values = params.clone().try_map(|arg, p| self.read(OP, arg, p))?;
        let factors = Factors::new(config.format, values.u.dims(), values.s.dims(), values.v.dims());
        let mut y = Array2::zeros((dims.get("N"), dims.get("O")));
        let a = forward(x.rows(), &factors, y.view_mut());
        let outputs = Outputs { y: self.adopt(y, &with_width(inputs.x.shape(), dims.get("O"))) };
        Ok((outputs, Saved { x: inputs.x.clone(), params: params.map(|_, p| p.clone()), a }))
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
        const OP: &str = "spectral::backward";
        full_precision(OP, config.precision)?;
        let mut dims = bind(OP, saved.x.shape(), saved.params.as_ref().map(|_, p| p.shape()))?;
        dims.bind_rows("y", upstream.y.shape(), "N", &["O"])?;
        dims.bind("u", into.u.shape(), &["I", "R"])?;
        dims.bind("s", into.s.shape(), &["R"])?;
        dims.bind("v", into.v.shape(), &["O", "R"])?;
        let mut dx = match plus {
            Some(plus) => {
                dims.bind_rows("plus", plus.shape(), "N", &["I"])?;
                self.read(OP, "plus", plus)?.rows().to_owned()
            }
            None => Array2::zeros((dims.get("N"), dims.get("I"))),
        };
        let x = self.read(OP, "x", &saved.x)?;
        let dy = self.read(OP, "y", upstream.y)?;
        let values = saved.params.as_ref().try_map(|arg, p| self.read(OP, arg, p))?;
        let factors = Factors::new(config.format, values.u.dims(), values.s.dims(), values.v.dims());
        let grads = backward(x.rows(), saved.a.view(), &factors, dy.rows(), dx.view_mut());
        self.accumulate(OP, "u", into.u, &grads.u)?;
        self.accumulate(OP, "s", into.s, &grads.s)?;
        self.accumulate(OP, "v", into.v, &grads.v)?;
        Ok(Grads { dx: self.adopt(dx, saved.x.shape()) })
    }
}

impl<B: Spectral> Spectral for Checked<B> {
    type Saved = B::Saved;

    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&B::Tensor>,
        params: Params<&B::Tensor>,
    ) -> Result<(Outputs<B::Tensor>, B::Saved)> {
        const OP: &str = "spectral::forward";
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
        const OP: &str = "spectral::backward";
        self.finite(OP, upstream.clone().named())?;
        self.finite(OP, plus.map(|plus| ("plus", plus)))?;
        self.0.backward(config, saved, upstream, plus, into)
    }
}

/// Refuses shapes that do not fit; gives N, I, R and O. For backends of their own too.
///
/// # Errors
/// `Shape`, which names the argument.
pub fn bind(op: &'static str, x: &[usize], params: Params<&[usize]>) -> Result<Dims> {
    let mut dims = Dims::new(op);
    dims.bind_rows("x", x, "N", &["I"])?;
    dims.bind("u", params.u, &["I", "R"])?;
    dims.bind("s", params.s, &["R"])?;
    dims.bind("v", params.v, &["O", "R"])?;
    dims.positive(&["I", "R", "O"])?;
    Ok(dims)
}

/// `shape` with another last axis.
fn with_width(shape: &[usize], width: usize) -> Vec<usize> {
    let mut shape = shape.to_vec();
    *shape.last_mut().expect("bind_rows refuses a shape without axes") = width;
    shape
}

/// The three parameters of one map as the maths sees them.
pub(crate) struct Factors<'a, T> {
    /// `[I, R]`
    u: CowArray<'a, T, Ix2>,
    /// `[R]`
    s: ArrayView1<'a, T>,
    /// `[O, R]`
    v: CowArray<'a, T, Ix2>,
}

impl<'a, T: Scalar> Factors<'a, T> {
    /// Rounds the masters.
    pub fn new(format: FactorFormat, u: ArrayView2<'a, T>, s: ArrayView1<'a, T>, v: ArrayView2<'a, T>) -> Self {
        Self { u: format.apply(u), s, v: format.apply(v) }
    }
}

/// Their gradients.
pub(crate) struct FactorGrads<T> {
    /// `[I, R]`
    pub u: Array2<T>,
    /// `[R]`
    pub s: Array1<T>,
    /// `[O, R]`
    pub v: Array2<T>,
}

/// Writes y and returns a = x U, which the adjoint needs.
///
/// s scales the columns of V, once, instead of the columns of a, once a row.
pub(crate) fn forward<T: Scalar>(x: ArrayView2<'_, T>, factors: &Factors<'_, T>, y: ArrayViewMut2<'_, T>) -> Array2<T> {
    let a = matmul(x, factors.u.view());
    let scaled_v = &factors.v * &factors.s;
    matmul_into(T::one(), a.view(), scaled_v.t(), T::zero(), y);
    a
}

/// Adds the gradient of x to `dx` and returns those of the factors.
pub(crate) fn backward<T: Scalar>(
    x: ArrayView2<'_, T>,
    a: ArrayView2<'_, T>,
    factors: &Factors<'_, T>,
    dy: ArrayView2<'_, T>,
    dx: ArrayViewMut2<'_, T>,
) -> FactorGrads<T> {
    let b = matmul(dy, factors.v.view());
    let ds = sum_over_rows(a.nrows(), a.ncols(), |rows| {
        let mut sum = Array1::zeros(a.ncols());
        for n in rows {
            Zip::from(&mut sum).and(b.row(n)).and(a.row(n)).for_each(|sum, &b, &a| *sum += b * a);
        }
        sum
    });
    // As in the forward pass, s scales the small matrices: U, and the products over all rows.
    let scaled_u = &factors.u * &factors.s;
    matmul_into(T::one(), b.view(), scaled_u.t(), T::one(), dx);
    let du = matmul(x.t(), b.view()) * factors.s;
    let dv = matmul(dy.t(), a) * factors.s;
    FactorGrads { u: du, s: ds, v: dv }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{ArrayD, IxDyn, array};

    use crate::tensor::DType;

    const CONFIG: Config = Config { precision: Precision::Full, format: FactorFormat::F32 };

    fn zeros(b: &Reference<f64>, shape: &[usize]) -> Tensor<f64> {
        b.constant(ArrayD::zeros(IxDyn(shape)))
    }

    #[test]
    fn value_and_gradients_by_hand() {
        let b = Reference::<f64>::new();
        // a = (1*1 + 2*3, 1*2 + 2*4) = (7, 10); the second direction is off.
        let x = b.constant(array![[1.0, 2.0]].into_dyn());
        let u = b.constant(array![[1.0, 2.0], [3.0, 4.0]].into_dyn());
        let s = b.constant(array![0.5, 0.0].into_dyn());
        let v = b.constant(array![[2.0, 1.0], [-1.0, 1.0], [4.0, 1.0]].into_dyn());
        let (out, saved) = b.forward(&CONFIG, Inputs { x: &x }, Params { u: &u, s: &s, v: &v }).unwrap();
        assert_eq!(b.download(&out.y).unwrap(), array![[7.0, -3.5, 14.0]].into_dyn());

        // b = dy V = (2 - 1 + 4, 3) = (5, 3).
        let dy = b.constant(array![[1.0, 1.0, 1.0]].into_dyn());
        let plus = b.constant(array![[100.0, 0.0]].into_dyn());
        let (du, ds, dv) = (zeros(&b, &[2, 2]), zeros(&b, &[2]), zeros(&b, &[3, 2]));
        let into = Params { u: &du, s: &ds, v: &dv };
        let grads = b.backward(&CONFIG, &saved, Outputs { y: &dy }, Some(&plus), into).unwrap();
        assert_eq!(b.download(&grads.dx).unwrap(), array![[102.5, 7.5]].into_dyn());
        assert_eq!(b.download(&du).unwrap(), array![[2.5, 0.0], [5.0, 0.0]].into_dyn());
        assert_eq!(b.download(&ds).unwrap(), array![35.0, 30.0].into_dyn());
        assert_eq!(b.download(&dv).unwrap(), array![[3.5, 0.0], [3.5, 0.0], [3.5, 0.0]].into_dyn());
    }

    #[test]
    fn rounded_factors_by_hand() {
        let b = Reference::<f64>::new();
        // In ternary U is (0, 3) and V is (2, -2): means 2 and 2, thresholds 1.4.
        let config = Config { format: FactorFormat::Ternary, ..CONFIG };
        let x = b.constant(array![[5.0, 2.0]].into_dyn());
        let u = b.constant(array![[1.0], [3.0]].into_dyn());
        let s = b.constant(array![0.5].into_dyn());
        let v = b.constant(array![[1.5], [-2.5]].into_dyn());
        let (out, saved) = b.forward(&config, Inputs { x: &x }, Params { u: &u, s: &s, v: &v }).unwrap();
        // a = 2 * 3 = 6, a s = 3.
        assert_eq!(b.download(&out.y).unwrap(), array![[6.0, -6.0]].into_dyn());
        let dy = b.constant(array![[1.0, 0.0]].into_dyn());
        let (du, ds, dv) = (zeros(&b, &[2, 1]), zeros(&b, &[1]), zeros(&b, &[2, 1]));
        let into = Params { u: &du, s: &ds, v: &dv };
        let grads = b.backward(&config, &saved, Outputs { y: &dy }, None, into).unwrap();
        // b = dy V = 2. The master that became zero has a gradient all the same.
        assert_eq!(b.download(&grads.dx).unwrap(), array![[0.0, 3.0]].into_dyn());
        assert_eq!(b.download(&du).unwrap(), array![[5.0], [2.0]].into_dyn());
        assert_eq!(b.download(&ds).unwrap(), array![12.0].into_dyn());
        assert_eq!(b.download(&dv).unwrap(), array![[3.0], [0.0]].into_dyn());
    }

    #[test]
    fn no_rows_give_no_rows_and_zero_gradients() {
        let b = Reference::<f64>::new();
        let x = b.persistent(&[0, 4, 2], DType::F64).unwrap();
        let (u, s, v) = (zeros(&b, &[2, 1]), zeros(&b, &[1]), zeros(&b, &[3, 1]));
        let (out, saved) = b.forward(&CONFIG, Inputs { x: &x }, Params { u: &u, s: &s, v: &v }).unwrap();
        assert_eq!(out.y.shape(), [0, 4, 3]);
        let (du, ds, dv) = (zeros(&b, &[2, 1]), zeros(&b, &[1]), zeros(&b, &[3, 1]));
        let into = Params { u: &du, s: &ds, v: &dv };
        let grads = b.backward(&CONFIG, &saved, Outputs { y: &out.y }, None, into).unwrap();
        assert_eq!(grads.dx.shape(), [0, 4, 2]);
        for (gradient, shape) in [(du, vec![2, 1]), (ds, vec![1]), (dv, vec![3, 1])] {
            assert_eq!(b.download(&gradient).unwrap(), ArrayD::zeros(IxDyn(&shape)));
        }
    }

    #[test]
    fn shapes_and_precision_are_checked() {
        let b = Reference::<f64>::new();
        let forward = |config: &Config, x: &[usize], u: &[usize], s: &[usize], v: &[usize]| {
            let [x, u, s, v] = [x, u, s, v].map(|shape| zeros(&b, shape));
            b.forward(config, Inputs { x: &x }, Params { u: &u, s: &s, v: &v })
                .map(|(_, saved)| saved)
                .map_err(|error| error.to_string())
        };
        let refused = |x: &[usize], u: &[usize], s: &[usize], v: &[usize]| forward(&CONFIG, x, u, s, v).err().unwrap();
        assert_eq!(
            refused(&[5, 4], &[3, 2], &[2], &[6, 2]),
            "spectral::forward: `u` is [3, 2], expected [I, R] = [4, any] (I from `x`)"
        );
        assert_eq!(
            refused(&[5, 4], &[4, 2], &[1], &[6, 2]),
            "spectral::forward: `s` is [1], expected [R] = [2] (R from `u`)"
        );
        assert_eq!(
            refused(&[5, 4], &[4, 2], &[2], &[2, 6]),
            "spectral::forward: `v` is [2, 6], expected [O, R] = [any, 2] (R from `u`)"
        );
        assert_eq!(refused(&[5, 0], &[0, 2], &[2], &[6, 2]), "spectral::forward: `x` is [0], expected I >= 1");
        assert_eq!(refused(&[5, 4], &[4, 0], &[0], &[6, 0]), "spectral::forward: `u` is [0], expected R >= 1");
        assert_eq!(refused(&[5, 4], &[4, 2], &[2], &[0, 2]), "spectral::forward: `v` is [0], expected O >= 1");
        let bf16 =
            forward(&Config { precision: Precision::Bf16, ..CONFIG }, &[5, 4], &[4, 2], &[2], &[6, 2]).err().unwrap();
        assert!(bf16.contains("config `precision` is Bf16"), "{bf16}");

        let saved = forward(&CONFIG, &[5, 4], &[4, 2], &[2], &[6, 2]).unwrap();
        let backward = |y: &[usize], plus: &[usize], u: &[usize], s: &[usize], v: &[usize]| {
            let [y, plus, u, s, v] = [y, plus, u, s, v].map(|shape| zeros(&b, shape));
            let into = Params { u: &u, s: &s, v: &v };
            b.backward(&CONFIG, &saved, Outputs { y: &y }, Some(&plus), into).unwrap_err().to_string()
        };
        assert_eq!(
            backward(&[5, 5], &[5, 4], &[4, 2], &[2], &[6, 2]),
            "spectral::backward: `y` is [5, 5], expected [N, O] = [5, 6] (O from `v`)"
        );
        assert_eq!(
            backward(&[5, 6], &[4, 4], &[4, 2], &[2], &[6, 2]),
            "spectral::backward: `plus` is [4, 4], expected [N, I] = [5, 4] (N from `x`)"
        );
        // As many elements as the parameter are not enough.
        assert_eq!(
            backward(&[5, 6], &[5, 4], &[2, 4], &[2], &[6, 2]),
            "spectral::backward: `u` is [2, 4], expected [I, R] = [4, 2] (I from `x`, R from `u`)"
        );
        assert_eq!(
            backward(&[5, 6], &[5, 4], &[4, 2], &[3], &[6, 2]),
            "spectral::backward: `s` is [3], expected [R] = [2] (R from `u`)"
        );
        assert_eq!(
            backward(&[5, 6], &[5, 4], &[4, 2], &[2], &[2, 6]),
            "spectral::backward: `v` is [2, 6], expected [O, R] = [6, 2] (O from `v`, R from `u`)"
        );
    }
}
