//! `residual`: a branch added to the stream, scaled by one learned number.
//!
//! ```text
//! h = c + rho * y
//! ```
//!
//! Adjoint, with dh the gradient of h:
//!
//! ```text
//! dc   = dh                            (the same handle: nothing is computed)
//! dy   = rho * dh
//! drho = sum dh * y
//! ```
//!
//! rho is one number for the whole model; at rho = 0 the branch is off, but drho is not zero, so it can come back.
//! Every leading axis counts as rows: `[.., D]`.
//!
//! Source: Bachlechner et al., *ReZero is All You Need*, arXiv 2003.04887 (here rho starts at 1).

use ndarray::{Array1, ArrayView1, Zip};

use crate::checked::Checked;
use crate::cpu::{Reference, Tensor};
use crate::dims::{Dims, check_one};
use crate::error::Result;
use crate::fields;
use crate::matmul::sum_over_rows;
use crate::scalar::Scalar;
use crate::tensor::Tensors;

/// Nothing to choose.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {}

fields! {
    /// Activations going in.
    pub struct Inputs {
        /// `[.., D]`, the stream.
        c,
        /// `[.., D]`, the branch.
        y
    }
}

fields! {
    /// Learned parameters; their gradients accumulate into tensors of the same names.
    pub struct Params {
        /// `[1]`
        rho
    }
}

fields! {
    /// Activations coming out. As `upstream` of `backward`: their gradients.
    pub struct Outputs {
        /// `[.., D]`, shaped as `c`.
        h
    }
}

fields! {
    /// Gradients of the inputs.
    pub struct Grads {
        /// `[.., D]`, the upstream handle itself.
        dc,
        /// `[.., D]`
        dy
    }
}

/// The operation on a backend.
///
/// # Errors
/// `Shape` if `y` or the gradient of `h` has another number of rows or width than `c`, if D = 0, or if `rho` or its
/// gradient is not `[1]`.
pub trait Residual: Tensors {
    /// What `forward` hands to `backward`.
    type Saved;

    /// Adds the scaled branch.
    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Self::Tensor>,
        params: Params<&Self::Tensor>,
    ) -> Result<(Outputs<Self::Tensor>, Self::Saved)>;

    /// Returns the gradients of the inputs and adds that of `rho` into `into`.
    fn backward(
        &self,
        config: &Config,
        saved: &Self::Saved,
        upstream: Outputs<&Self::Tensor>,
        into: Params<&Self::Tensor>,
    ) -> Result<Grads<Self::Tensor>>;
}

/// What the reference saves: handles only.
pub struct Saved<T> {
    y: Tensor<T>,
    rho: Tensor<T>,
}

impl<T: Scalar> Residual for Reference<T> {
    type Saved = Saved<T>;

    #[inline(never)]
    fn forward(
        &self,
        _config: &Config,
        inputs: Inputs<&Tensor<T>>,
        params: Params<&Tensor<T>>,
    ) -> Result<(Outputs<Tensor<T>>, Saved<T>)> {
        const OP: &str = "residual::forward";
        let mut dims = Dims::new(OP);
        dims.bind_rows("c", inputs.c.shape(), "N", &["D"])?;
        dims.bind_rows("y", inputs.y.shape(), "N", &["D"])?;
        dims.positive(&["D"])?;
        check_one(OP, "rho", params.rho.shape())?;
        let c = self.read(OP, "c", inputs.c)?;
        let y = self.read(OP, "y", inputs.y)?;
        let rho = self.read(OP, "rho", params.rho)?.slice()[0];
        let mut h = Array1::zeros(inputs.c.len());
        Zip::from(&mut h).and(c.flat()).and(y.flat()).par_for_each(|h, &c, &y| *h = c + rho * y);
        let outputs = Outputs { h: self.adopt(h, inputs.c.shape()) };
        Ok((outputs, Saved { y: inputs.y.clone(), rho: params.rho.clone() }))
    }

    #[inline(never)]
    fn backward(
        &self,
        _config: &Config,
        saved: &Saved<T>,
        upstream: Outputs<&Tensor<T>>,
        into: Params<&Tensor<T>>,
    ) -> Result<Grads<Tensor<T>>> {
        const OP: &str = "residual::backward";
        let mut dims = Dims::new(OP);
        dims.bind_rows("y", saved.y.shape(), "N", &["D"])?;
        dims.bind_rows("h", upstream.h.shape(), "N", &["D"])?;
        check_one(OP, "rho", into.rho.shape())?;
        let y = self.read(OP, "y", &saved.y)?;
        let rho = self.read(OP, "rho", &saved.rho)?.slice()[0];
        let dh = self.read(OP, "h", upstream.h)?;
        let (dy, drho) = backward(y.flat(), rho, dh.flat(), dims.get("D"));
        self.accumulate(OP, "rho", into.rho, &drho)?;
        Ok(Grads { dc: upstream.h.clone(), dy: self.adopt(dy, saved.y.shape()) })
    }
}

impl<B: Residual> Residual for Checked<B> {
    type Saved = B::Saved;

    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&B::Tensor>,
        params: Params<&B::Tensor>,
    ) -> Result<(Outputs<B::Tensor>, B::Saved)> {
        const OP: &str = "residual::forward";
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
        self.finite("residual::backward", upstream.clone().named())?;
        self.0.backward(config, saved, upstream, into)
    }
}

/// dy and drho of flat tensors with rows of `width`.
fn backward<T: Scalar>(y: ArrayView1<'_, T>, rho: T, dh: ArrayView1<'_, T>, width: usize) -> (Array1<T>, Array1<T>) {
    let mut dy = Array1::zeros(dh.len());
    Zip::from(&mut dy).and(&dh).par_for_each(|dy, &dh| *dy = rho * dh);
    let drho = sum_over_rows(dh.len() / width, 1, |rows| {
        let block = ndarray::s![rows.start * width..rows.end * width];
        Array1::from_elem(1, dh.slice(block).dot(&y.slice(block)))
    });
    (dy, drho)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{ArrayD, IxDyn, array};

    use crate::tensor::DType;

    #[test]
    fn value_and_gradients_by_hand() {
        let b = Reference::<f64>::new();
        let c = b.constant(array![[1.0, 2.0], [3.0, 4.0]].into_dyn());
        let y = b.constant(array![[10.0, -20.0], [30.0, 40.0]].into_dyn());
        let rho = b.constant(array![0.5].into_dyn());
        let (out, saved) = b.forward(&Config {}, Inputs { c: &c, y: &y }, Params { rho: &rho }).unwrap();
        assert_eq!(b.download(&out.h).unwrap(), array![[6.0, -8.0], [18.0, 24.0]].into_dyn());
        let dh = b.constant(array![[1.0, 2.0], [0.0, -1.0]].into_dyn());
        let drho = b.constant(array![100.0].into_dyn());
        let grads = b.backward(&Config {}, &saved, Outputs { h: &dh }, Params { rho: &drho }).unwrap();
        assert_eq!(b.download(&grads.dc).unwrap(), b.download(&dh).unwrap());
        assert_eq!(b.download(&grads.dy).unwrap(), array![[0.5, 1.0], [0.0, -0.5]].into_dyn());
        // 100 was there before: 10 - 40 - 40 is added.
        assert_eq!(b.download(&drho).unwrap(), array![30.0].into_dyn());
    }

    #[test]
    fn no_rows_give_no_rows_and_a_zero_gradient() {
        let b = Reference::<f32>::new();
        let empty = b.persistent(&[2, 0, 3], DType::F32).unwrap();
        let rho = b.constant(array![1.0].into_dyn());
        let (out, saved) = b.forward(&Config {}, Inputs { c: &empty, y: &empty }, Params { rho: &rho }).unwrap();
        assert_eq!(out.h.shape(), [2, 0, 3]);
        let drho = b.persistent(&[1], DType::F32).unwrap();
        let grads = b.backward(&Config {}, &saved, Outputs { h: &out.h }, Params { rho: &drho }).unwrap();
        assert_eq!(grads.dy.shape(), [2, 0, 3]);
        assert_eq!(b.download(&drho).unwrap(), array![0.0].into_dyn());
    }

    #[test]
    fn shapes_are_checked() {
        let b = Reference::<f64>::new();
        let zeros = |shape: &[usize]| b.constant(ArrayD::zeros(IxDyn(shape)));
        let (c, rho) = (zeros(&[2, 3]), zeros(&[1]));
        let forward = |c: &Tensor<f64>, y: &Tensor<f64>, rho: &Tensor<f64>| {
            b.forward(&Config {}, Inputs { c, y }, Params { rho }).map(|(_, saved)| saved).map_err(|e| e.to_string())
        };
        assert_eq!(
            forward(&c, &zeros(&[2, 4]), &rho).err().unwrap(),
            "residual::forward: `y` is [2, 4], expected [N, D] = [2, 3] (D from `c`)"
        );
        assert_eq!(forward(&c, &c, &zeros(&[2])).err().unwrap(), "residual::forward: `rho` is [2], expected [1]");
        assert_eq!(
            forward(&zeros(&[2, 0]), &zeros(&[2, 0]), &rho).err().unwrap(),
            "residual::forward: `c` is [0], expected D >= 1"
        );
        let saved = forward(&c, &c, &rho).unwrap();
        let backward = |h: &Tensor<f64>, rho: &Tensor<f64>| {
            b.backward(&Config {}, &saved, Outputs { h }, Params { rho }).unwrap_err().to_string()
        };
        assert_eq!(
            backward(&zeros(&[3, 3]), &rho),
            "residual::backward: `h` is [3, 3], expected [N, D] = [2, 3] (N from `y`)"
        );
        assert_eq!(backward(&c, &zeros(&[1, 1])), "residual::backward: `rho` is [1, 1], expected [1]");
    }
}
