//! `layer_norm`: each row less its mean, divided by its standard deviation.
//!
//! ```text
//! mu  = mean_d x_d,   rho = (mean_d (x_d - mu)^2 + eps)^(-1/2)
//! n   = rho (x - mu)
//! y   = n * gain + bias            (y = n without gain and bias)
//! ```
//!
//! Adjoint, with dy the gradient of y and `plus` what other readers of x have sent back:
//!
//! ```text
//! h     = dy * gain
//! dx    = rho (h - mean_d h - n mean_d(n * h)) + plus
//! dgain = sum_rows dy * n,   dbias = sum_rows dy
//! ```
//!
//! The variance is that of the row, divided by D, from the differences to the mean. `eps` is inside the root, so a constant
//! row gives n = 0 and a finite gradient. Every leading axis counts as rows: `[.., D]`.
//!
//! Source: Ba, Kiros and Hinton, *Layer Normalization*, arXiv 1607.06450.

use ndarray::{Array1, Array2, ArrayView1, ArrayView2, Axis, Zip, s};

use crate::checked::Checked;
use crate::cpu::{Reference, Tensor};
use crate::dims::Dims;
use crate::error::{Error, Result};
use crate::fields;
use crate::matmul::sum_over_rows;
use crate::scalar::Scalar;
use crate::tensor::Tensors;

/// What the operation does besides its shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Added to the variance, inside the root. Greater than zero.
    pub eps: f64,
}

fields! {
    /// Activations going in.
    pub struct Inputs {
        /// `[.., D]`
        x
    }
}

fields! {
    /// Learned parameters, both or neither; their gradients accumulate into tensors of the same names.
    pub struct Params {
        ;
        optional
        /// `[D]`
        gain,
        /// `[D]`
        bias
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
/// `Shape` if `gain` or `bias` is not `[D]`, `plus` not `[.., D]`, D = 0 or an upstream gradient has another shape than its
/// output; `Config` if `eps` is not greater than zero; `Presence` if one of `gain` and `bias` comes without the other, or
/// `into` has others than forward had.
pub trait LayerNorm: Tensors {
    /// What `forward` hands to `backward`.
    type Saved;

    /// Normalises every row.
    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Self::Tensor>,
        params: Params<&Self::Tensor>,
    ) -> Result<(Outputs<Self::Tensor>, Self::Saved)>;

    /// Returns the gradient of `x`, with `plus` (`[.., D]`) added, and adds those of the parameters into `into`.
    fn backward(
        &self,
        config: &Config,
        saved: &Self::Saved,
        upstream: Outputs<&Self::Tensor>,
        plus: Option<&Self::Tensor>,
        into: Params<&Self::Tensor>,
    ) -> Result<Grads<Self::Tensor>>;
}

/// What the reference saves: the normalised row and one number a row.
pub struct Saved<T> {
    shape: Vec<usize>,
    n: Array2<T>,
    rho: Array1<T>,
    gain: Option<Tensor<T>>,
}

impl<T: Scalar> LayerNorm for Reference<T> {
    type Saved = Saved<T>;

    #[inline(never)]
    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Tensor<T>>,
        params: Params<&Tensor<T>>,
    ) -> Result<(Outputs<Tensor<T>>, Saved<T>)> {
        const OP: &str = "layer_norm::forward";
        check_forward(config, inputs.clone().map(|_, t| t.shape()), params.clone().map(|_, t| t.shape()))?;
        let (n, rho) = normalise(self.read(OP, "x", inputs.x)?.rows(), T::from_f64(config.eps));
        let y = match (params.gain, params.bias) {
            (Some(gain), Some(bias)) => {
                let (gain, bias) = (self.read(OP, "gain", gain)?, self.read(OP, "bias", bias)?);
                &n * &gain.flat() + bias.flat()
            }
            _ => n.clone(),
        };
        let shape = inputs.x.shape().to_vec();
        let saved = Saved { shape: shape.clone(), n, rho, gain: params.gain.cloned() };
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
        const OP: &str = "layer_norm::backward";
        let shapes = into.clone().map(|_, t| t.shape());
        let of_plus = plus.map(|plus| plus.shape());
        check_backward(config, &saved.shape, saved.gain.is_some(), upstream.y.shape(), of_plus, shapes)?;
        let dy = self.read(OP, "y", upstream.y)?;
        let dy = dy.rows();
        let gain = saved.gain.as_ref().map(|gain| self.read(OP, "gain", gain)).transpose()?;
        let h = gain.as_ref().map_or_else(|| dy.to_owned(), |gain| &dy * &gain.flat());
        let mut dx = backward(h.view(), saved.n.view(), saved.rho.view());
        if let Some(plus) = plus {
            dx += &self.read(OP, "plus", plus)?.rows();
        }
        if let (Some(gain), Some(bias)) = (into.gain, into.bias) {
            self.accumulate(OP, "gain", gain, &sum_of_rows((&dy * &saved.n).view()))?;
            self.accumulate(OP, "bias", bias, &sum_of_rows(dy))?;
        }
        Ok(Grads { dx: self.adopt(dx, &saved.shape) })
    }
}

impl<B: LayerNorm> LayerNorm for Checked<B> {
    type Saved = B::Saved;

    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&B::Tensor>,
        params: Params<&B::Tensor>,
    ) -> Result<(Outputs<B::Tensor>, B::Saved)> {
        const OP: &str = "layer_norm::forward";
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
        const OP: &str = "layer_norm::backward";
        self.finite(OP, upstream.clone().named())?;
        self.finite(OP, plus.map(|plus| ("plus", plus)))?;
        self.0.backward(config, saved, upstream, plus, into)
    }
}

/// Refuses an eps at which a constant row would divide by zero.
pub(crate) fn check_eps(op: &'static str, eps: f64) -> Result<()> {
    if eps > 0.0 && eps.is_finite() {
        return Ok(());
    }
    Err(Error::Config {
        op,
        field: "eps",
        expected: "greater than zero, since a constant row would divide by zero".to_owned(),
        got: eps.to_string(),
    })
}

/// Refuses what [`LayerNorm::forward`] refuses of its config and its shapes, on every backend; binds N and D.
///
/// # Errors
/// Those of the trait.
pub fn check_forward(config: &Config, inputs: Inputs<&[usize]>, params: Params<&[usize]>) -> Result<Dims> {
    const OP: &str = "layer_norm::forward";
    check_eps(OP, config.eps)?;
    let mut dims = Dims::new(OP);
    dims.bind_rows("x", inputs.x, "N", &["D"])?;
    dims.positive(&["D"])?;
    bind_pair(OP, &mut dims, params)?;
    Ok(dims)
}

/// The same of [`LayerNorm::backward`]: `x` is the shape that forward had, `affine` whether it had gain and bias.
///
/// # Errors
/// Those of the trait.
pub fn check_backward(
    config: &Config,
    x: &[usize],
    affine: bool,
    y: &[usize],
    plus: Option<&[usize]>,
    into: Params<&[usize]>,
) -> Result<Dims> {
    const OP: &str = "layer_norm::backward";
    check_eps(OP, config.eps)?;
    let mut dims = Dims::new(OP);
    dims.bind_rows("x", x, "N", &["D"])?;
    dims.bind_rows("y", y, "N", &["D"])?;
    if let Some(plus) = plus {
        dims.bind_rows("plus", plus, "N", &["D"])?;
    }
    let presence = |expected, got| Err(Error::Presence { op: OP, arg: "gain", expected, got });
    match (bind_pair(OP, &mut dims, into)?, affine) {
        (true, false) => presence("absent because forward had none", "present"),
        (false, true) => presence("present because forward had one", "absent"),
        _ => Ok(dims),
    }
}

/// Whether there are gain and bias: both, of D elements each, or neither.
fn bind_pair(op: &'static str, dims: &mut Dims, params: Params<&[usize]>) -> Result<bool> {
    let lonely = |arg, expected| Err(Error::Presence { op, arg, expected, got: "absent" });
    match (params.gain, params.bias) {
        (Some(gain), Some(bias)) => {
            dims.bind("gain", gain, &["D"])?;
            dims.bind("bias", bias, &["D"])?;
            Ok(true)
        }
        (None, None) => Ok(false),
        (Some(_), None) => lonely("bias", "present because `gain` is"),
        (None, Some(_)) => lonely("gain", "present because `bias` is"),
    }
}

/// n and rho of every row.
pub(crate) fn normalise<T: Scalar>(x: ArrayView2<'_, T>, eps: T) -> (Array2<T>, Array1<T>) {
    let width = T::from_f64(x.ncols() as f64);
    let mut n = Array2::zeros(x.raw_dim());
    let mut rho = Array1::zeros(x.nrows());
    Zip::from(n.rows_mut()).and(&mut rho).and(x.rows()).par_for_each(|mut n, rho, x| {
        let mean = x.iter().copied().sum::<T>() / width;
        let variance = x.iter().map(|&x| (x - mean) * (x - mean)).sum::<T>() / width;
        *rho = T::one() / (variance + eps).sqrt();
        Zip::from(&mut n).and(&x).for_each(|n, &x| *n = *rho * (x - mean));
    });
    (n, rho)
}

/// dx for h, the gradient of n.
fn backward<T: Scalar>(h: ArrayView2<'_, T>, n: ArrayView2<'_, T>, rho: ArrayView1<'_, T>) -> Array2<T> {
    let width = T::from_f64(h.ncols() as f64);
    let mut dx = Array2::zeros(h.raw_dim());
    Zip::from(dx.rows_mut()).and(h.rows()).and(n.rows()).and(&rho).par_for_each(|mut dx, h, n, &rho| {
        let mean = h.iter().copied().sum::<T>() / width;
        let along = h.iter().zip(&n).map(|(&h, &n)| h * n).sum::<T>() / width;
        Zip::from(&mut dx).and(&h).and(&n).for_each(|dx, &h, &n| *dx = rho * (h - mean - n * along));
    });
    dx
}

fn sum_of_rows<T: Scalar>(rows: ArrayView2<'_, T>) -> Array1<T> {
    sum_over_rows(rows.nrows(), rows.ncols(), |range| rows.slice(s![range, ..]).sum_axis(Axis(0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;
    use approx::assert_relative_eq;
    use ndarray::array;

    const CONFIG: Config = Config { eps: 1e-12 };

    #[test]
    fn hand_values_and_a_constant_row() {
        let b = Reference::<f64>::new();
        let x = b.constant(array![[1.0, 5.0], [7.0, 7.0]].into_dyn());
        let (gain, bias) = (b.constant(array![10.0, 100.0].into_dyn()), b.constant(array![0.5, 0.25].into_dyn()));
        let params = Params { gain: Some(&gain), bias: Some(&bias) };
        let (out, saved) = b.forward(&CONFIG, Inputs { x: &x }, params.clone()).unwrap();
        let y = b.download(&out.y).unwrap();
        assert_relative_eq!(y[[0, 0]], -9.5, max_relative = 1e-12);
        assert_relative_eq!(y[[0, 1]], 100.25, max_relative = 1e-12);
        assert_eq!([y[[1, 0]], y[[1, 1]]], [0.5, 0.25]);
        let dy = b.constant(array![[1.0, 2.0], [1.0, 0.0]].into_dyn());
        let plus = b.constant(array![[3.0, 4.0], [0.0, 0.0]].into_dyn());
        let into = params.map(|_, x| b.persistent(x.shape(), DType::F64).unwrap());
        let dx = b.backward(&CONFIG, &saved, Outputs { y: &dy }, Some(&plus), into.as_ref()).unwrap().dx;
        let dx = b.download(&dx).unwrap();
        // With two channels n is a sign, so x does not move it; the constant row sees 1/sqrt(eps) = 1e6.
        assert_relative_eq!(dx[[0, 0]], 3.0, epsilon = 1e-9);
        assert_relative_eq!(dx[[1, 0]], 5e6, max_relative = 1e-12);
        assert_relative_eq!(dx[[1, 1]], -5e6, max_relative = 1e-12);
        assert_relative_eq!(b.download(into.gain.as_ref().unwrap()).unwrap()[1], 2.0, max_relative = 1e-12);
        assert_eq!(b.download(into.bias.as_ref().unwrap()).unwrap(), array![2.0, 2.0].into_dyn());
    }

    #[test]
    fn a_large_mean_takes_no_digits_from_the_variance() {
        let b = Reference::<f32>::new();
        let x = b.constant(array![[4097.0f32, 4095.0, 4096.5, 4095.5]].into_dyn());
        let (out, _) = b.forward(&CONFIG, Inputs { x: &x }, Params { gain: None, bias: None }).unwrap();
        let y = b.download(&out.y).unwrap();
        assert_relative_eq!(y[[0, 0]], 1.0 / 0.625f64.sqrt(), max_relative = 1e-6);
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let b = Reference::<f64>::new();
        let zeros = |shape: &[usize]| b.persistent(shape, DType::F64).unwrap();
        let (x, gain, short) = (zeros(&[2, 3]), zeros(&[3]), zeros(&[2]));
        let forward = |config: &Config, x: &Tensor<f64>, gain, bias| {
            b.forward(config, Inputs { x }, Params { gain, bias }).map(|_| ()).unwrap_err().to_string()
        };
        assert_eq!(
            forward(&CONFIG, &x, Some(&gain), None),
            "layer_norm::forward: `bias` is absent, expected it present because `gain` is"
        );
        assert_eq!(
            forward(&CONFIG, &x, None, Some(&gain)),
            "layer_norm::forward: `gain` is absent, expected it present because `bias` is"
        );
        assert_eq!(
            forward(&CONFIG, &x, Some(&gain), Some(&short)),
            "layer_norm::forward: `bias` is [2], expected [D] = [3] (D from `x`)"
        );
        assert_eq!(forward(&CONFIG, &zeros(&[2, 0]), None, None), "layer_norm::forward: `x` is [0], expected D >= 1");
        assert_eq!(
            forward(&Config { eps: 0.0 }, &x, None, None),
            "layer_norm::forward: config `eps` is 0, expected greater than zero, since a constant row would divide by zero"
        );
        let both = Params { gain: Some(&gain), bias: Some(&gain) };
        let neither = Params { gain: None, bias: None };
        for (params, into, message) in [
            (
                both.clone(),
                neither.clone(),
                "layer_norm::backward: `gain` is absent, expected it present because forward had one",
            ),
            (neither, both, "layer_norm::backward: `gain` is present, expected it absent because forward had none"),
        ] {
            let (out, saved) = b.forward(&CONFIG, Inputs { x: &x }, params).unwrap();
            let error = b.backward(&CONFIG, &saved, Outputs { y: &out.y }, None, into).unwrap_err();
            assert_eq!(error.to_string(), message);
            let error = b.backward(&CONFIG, &saved, Outputs { y: &gain }, None, Params { gain: None, bias: None });
            assert!(matches!(error.unwrap_err(), Error::Shape { arg: "y", .. }));
            let upstream = Outputs { y: &out.y };
            let error = b.backward(&CONFIG, &saved, upstream, Some(&gain), Params { gain: None, bias: None });
            assert!(matches!(error.unwrap_err(), Error::Shape { arg: "plus", .. }));
        }
    }
}
