//! `rms_norm`: root-mean-square normalisation of each row, with the addition of a learned shift before it.
//!
//! ```text
//! c   = x + shift                      (c = x without a shift)
//! rho = (mean_d c_d^2 + eps)^(-1/2)
//! y   = rho * c * gain
//! ```
//!
//! Adjoint, with dy the gradient of y and dc the gradient that arrives at c from elsewhere:
//!
//! ```text
//! h      = dy * gain,   ch = rho * c
//! dx     = dc + rho * (h - ch * mean_d(ch * h))
//! dgain  = sum_rows dy * ch
//! dshift = sum_rows dx
//! ```
//!
//! `eps` is inside the root, so a zero row gives y = 0 and dx = h / sqrt(eps). The shift is there because the model
//! adds its iteration embedding to the residual stream right before this norm and needs both sums: one pass over the
//! row serves them all. Every leading axis counts as rows: `[.., D]`.
//!
//! Source: Zhang and Sennrich, *Root Mean Square Layer Normalization*, arXiv 1910.07467.

use ndarray::{Array1, Array2, ArrayView1, ArrayView2, Axis, Zip};

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
    /// Added to the mean square, inside the root. Greater than zero.
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
    /// Learned parameters; their gradients accumulate into tensors of the same names.
    pub struct Params {
        /// `[D]`
        gain;
        optional
        /// `[D]`, added to every row before the norm.
        shift
    }
}

fields! {
    /// Activations coming out. As `upstream` of `backward`: their gradients, `c` optional.
    pub struct Outputs {
        /// `[.., D]`, the normalised row.
        y;
        optional
        /// `[.., D]`, the shifted row; present exactly when `shift` is.
        c
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
/// `Shape` if `gain` or `shift` is not `[D]`, if D = 0 or an upstream gradient has another shape than its output;
/// `Config` if `eps` is not greater than zero; `Presence` if `c` has an upstream gradient without a shift.
pub trait RmsNorm: Tensors {
    /// What `forward` hands to `backward`.
    type Saved;

    /// Normalises every row.
    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Self::Tensor>,
        params: Params<&Self::Tensor>,
    ) -> Result<(Outputs<Self::Tensor>, Self::Saved)>;

    /// Returns the gradient of `x` and adds those of the parameters into `into`.
    fn backward(
        &self,
        config: &Config,
        saved: &Self::Saved,
        upstream: Outputs<&Self::Tensor>,
        into: Params<&Self::Tensor>,
    ) -> Result<Grads<Self::Tensor>>;
}

/// What the reference saves: the shifted row and one number a row.
pub struct Saved<T> {
    c: Tensor<T>,
    gain: Tensor<T>,
    rho: Array1<T>,
    has_shift: bool,
}

impl<T: Scalar> RmsNorm for Reference<T> {
    type Saved = Saved<T>;

    #[inline(never)]
    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Tensor<T>>,
        params: Params<&Tensor<T>>,
    ) -> Result<(Outputs<Tensor<T>>, Saved<T>)> {
        const OP: &str = "rms_norm::forward";
        check_config(OP, config)?;
        let mut dims = Dims::new(OP);
        dims.bind_rows("x", inputs.x.shape(), "N", &["D"])?;
        dims.bind("gain", params.gain.shape(), &["D"])?;
        dims.positive(&["D"])?;
        let shape = inputs.x.shape();
        let c = match params.shift {
            Some(shift) => {
                dims.bind("shift", shift.shape(), &["D"])?;
                let x = self.read(OP, "x", inputs.x)?;
                let shift = self.read(OP, "shift", shift)?;
                self.adopt(&x.rows() + &shift.flat(), shape)
            }
            None => inputs.x.clone(),
        };
        let gain = self.read(OP, "gain", params.gain)?;
        let (y, rho) = forward(self.read(OP, "x", &c)?.rows(), gain.flat(), T::from_f64(config.eps));
        let has_shift = params.shift.is_some();
        let outputs = Outputs { y: self.adopt(y, shape), c: has_shift.then(|| c.clone()) };
        Ok((outputs, Saved { c, gain: params.gain.clone(), rho, has_shift }))
    }

    #[inline(never)]
    fn backward(
        &self,
        config: &Config,
        saved: &Saved<T>,
        upstream: Outputs<&Tensor<T>>,
        into: Params<&Tensor<T>>,
    ) -> Result<Grads<Tensor<T>>> {
        const OP: &str = "rms_norm::backward";
        check_config(OP, config)?;
        let shape = saved.c.shape();
        let mut dims = Dims::new(OP);
        dims.bind_rows("x", shape, "N", &["D"])?;
        dims.bind_rows("y", upstream.y.shape(), "N", &["D"])?;
        let c = self.read(OP, "c", &saved.c)?;
        let gain = self.read(OP, "gain", &saved.gain)?;
        let dy = self.read(OP, "y", upstream.y)?;
        let (mut dx, dgain) = backward(c.rows(), gain.flat(), saved.rho.view(), dy.rows());
        if let Some(dc) = upstream.c {
            if !saved.has_shift {
                return Err(Error::Presence {
                    op: OP,
                    arg: "c",
                    expected: "absent because there is no `shift`",
                    got: "present",
                });
            }
            dims.bind_rows("c", dc.shape(), "N", &["D"])?;
            dx += &self.read(OP, "c", dc)?.rows();
        }
        self.accumulate(OP, "gain", into.gain, &dgain)?;
        match (into.shift, saved.has_shift) {
            (Some(shift), true) => {
                let dshift =
                    sum_over_rows(dx.nrows(), dx.ncols(), |rows| dx.slice(ndarray::s![rows, ..]).sum_axis(Axis(0)));
                self.accumulate(OP, "shift", shift, &dshift)?;
            }
            (None, false) => {}
            (Some(_), false) => {
                return Err(Error::Presence {
                    op: OP,
                    arg: "shift",
                    expected: "absent because forward had none",
                    got: "present",
                });
            }
            (None, true) => {
                return Err(Error::Presence {
                    op: OP,
                    arg: "shift",
                    expected: "present because forward had one",
                    got: "absent",
                });
            }
        }
        Ok(Grads { dx: self.adopt(dx, shape) })
    }
}

impl<B: RmsNorm> RmsNorm for Checked<B> {
    type Saved = B::Saved;

    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&B::Tensor>,
        params: Params<&B::Tensor>,
    ) -> Result<(Outputs<B::Tensor>, B::Saved)> {
        const OP: &str = "rms_norm::forward";
        self.finite(OP, inputs.clone().named())?;
        self.finite(OP, params.clone().named())?;
        self.0.forward(config, inputs, params)
    }

    fn backward(
        &self,
        config: &Config,
        saved: &B::Saved,
        upstream: Outputs<&B::Tensor>,
        into: Params<&B::Tensor>,
    ) -> Result<Grads<B::Tensor>> {
        self.finite("rms_norm::backward", upstream.clone().named())?;
        self.0.backward(config, saved, upstream, into)
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

/// y and rho of rows `c` (`[N, D]`).
fn forward<T: Scalar>(c: ArrayView2<'_, T>, gain: ArrayView1<'_, T>, eps: T) -> (Array2<T>, Array1<T>) {
    let width = T::from_f64(c.ncols() as f64);
    let mut y = Array2::zeros(c.raw_dim());
    let mut rho = Array1::zeros(c.nrows());
    Zip::from(y.rows_mut()).and(&mut rho).and(c.rows()).par_for_each(|mut y, rho, c| {
        let mean_square = c.iter().map(|&x| x * x).sum::<T>() / width;
        *rho = T::one() / (mean_square + eps).sqrt();
        Zip::from(&mut y).and(&c).and(&gain).for_each(|y, &c, &gain| *y = *rho * c * gain);
    });
    (y, rho)
}

/// dx (without what arrives at c from elsewhere) and dgain.
fn backward<T: Scalar>(
    c: ArrayView2<'_, T>,
    gain: ArrayView1<'_, T>,
    rho: ArrayView1<'_, T>,
    dy: ArrayView2<'_, T>,
) -> (Array2<T>, Array1<T>) {
    let width = T::from_f64(c.ncols() as f64);
    let mut dx = Array2::zeros(c.raw_dim());
    Zip::from(dx.rows_mut()).and(c.rows()).and(dy.rows()).and(&rho).par_for_each(|mut dx, c, dy, &rho| {
        let mut mean = T::zero();
        Zip::from(&c).and(&dy).and(&gain).for_each(|&c, &dy, &gain| mean += rho * c * dy * gain);
        mean /= width;
        Zip::from(&mut dx).and(&c).and(&dy).and(&gain).for_each(|dx, &c, &dy, &gain| {
            *dx = rho * (dy * gain - rho * c * mean);
        });
    });
    let dgain = sum_over_rows(c.nrows(), c.ncols(), |rows| {
        let mut sum = Array1::zeros(c.ncols());
        for n in rows {
            let rho = rho[n];
            Zip::from(&mut sum).and(c.row(n)).and(dy.row(n)).for_each(|sum, &c, &dy| *sum += dy * rho * c);
        }
        sum
    });
    (dx, dgain)
}
