//! `gated_rms_norm`: root-mean-square normalisation of each row, times a sigmoid gate of its own.
//!
//! ```text
//! rho = (mean_v o_v^2 + eps)^(-1/2),   oh = rho * o
//! y   = gain * oh * sigma(zeta)
//! ```
//!
//! Adjoint, with dy the gradient of y:
//!
//! ```text
//! dn    = dy * sigma(zeta)
//! dgain = sum_rows dn * oh
//! dzeta = dn * gain * oh * sigma(-zeta)
//! dh    = dn * gain
//! do    = rho * (dh - oh * mean_v(oh * dh))
//! ```
//!
//! `eps` is inside the root, so a zero row gives y = 0 and do = dh / sqrt(eps). In the model a row is one head of one
//! token, and the mean square of `o` starts near 1e-5: choose `eps` well below that. Every leading axis counts as rows:
//! `[.., V]`.
//!
//! Source: the output gate of Kimi Delta Attention, arXiv 2510.26692.

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

/// Rows of one task. The gain's gradient is summed within these blocks and then over them, both in order.
const BLOCK_ROWS: usize = 128;

/// What the operation does besides its shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Added to the mean square, inside the root. Greater than zero.
    pub eps: f64,
}

fields! {
    /// Activations going in.
    pub struct Inputs {
        /// `[.., V]`, normalised.
        o,
        /// `[.., V]`, the gate before its sigmoid.
        zeta
    }
}

fields! {
    /// Learned parameters; their gradients accumulate into tensors of the same names.
    pub struct Params {
        /// `[V]`
        gain
    }
}

fields! {
    /// Activations coming out. As `upstream` of `backward`: their gradients.
    pub struct Outputs {
        /// `[.., V]`
        y
    }
}

fields! {
    /// Gradients of the inputs.
    pub struct Grads {
        /// `[.., V]`, the gradient of `o` (`do` is a word of the language).
        d_o,
        /// `[.., V]`
        dzeta
    }
}

/// The operation on a backend.
///
/// # Errors
/// `Shape` if `zeta` is not `[.., V]` with as many rows as `o`, if `gain` is not `[V]`, if V = 0 or an upstream gradient
/// has another shape than its output; `Config` if `eps` is not greater than zero.
pub trait GatedRmsNorm: Tensors {
    /// What `forward` hands to `backward`.
    type Saved;

    /// Normalises and gates every row.
    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Self::Tensor>,
        params: Params<&Self::Tensor>,
    ) -> Result<(Outputs<Self::Tensor>, Self::Saved)>;

    /// Returns the gradients of `o` and `zeta` and adds that of the gain into `into`.
    fn backward(
        &self,
        config: &Config,
        saved: &Self::Saved,
        upstream: Outputs<&Self::Tensor>,
        into: Params<&Self::Tensor>,
    ) -> Result<Grads<Self::Tensor>>;
}

/// What the reference saves: handles of what went in and one number a row.
pub struct Saved<T> {
    o: Tensor<T>,
    zeta: Tensor<T>,
    gain: Tensor<T>,
    rho: Vec<T>,
}

impl<T: Scalar> GatedRmsNorm for Reference<T> {
    type Saved = Saved<T>;

    #[inline(never)]
    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Tensor<T>>,
        params: Params<&Tensor<T>>,
    ) -> Result<(Outputs<Tensor<T>>, Saved<T>)> {
        const OP: &str = "gated_rms_norm::forward";
        check_config(OP, config)?;
        let mut dims = Dims::new(OP);
        dims.bind_rows("o", inputs.o.shape(), "N", &["V"])?;
        dims.bind_rows("zeta", inputs.zeta.shape(), "N", &["V"])?;
        dims.bind("gain", params.gain.shape(), &["V"])?;
        dims.positive(&["V"])?;
        let o = self.read(OP, "o", inputs.o)?;
        let zeta = self.read(OP, "zeta", inputs.zeta)?;
        let gain = self.read(OP, "gain", params.gain)?;
        let (y, rho) = forward(o.slice(), zeta.slice(), gain.slice(), T::from_f64(config.eps));
        let saved = Saved { o: inputs.o.clone(), zeta: inputs.zeta.clone(), gain: params.gain.clone(), rho };
        Ok((Outputs { y: self.adopt(Array1::from(y), inputs.o.shape()) }, saved))
    }

    #[inline(never)]
    fn backward(
        &self,
        config: &Config,
        saved: &Saved<T>,
        upstream: Outputs<&Tensor<T>>,
        into: Params<&Tensor<T>>,
    ) -> Result<Grads<Tensor<T>>> {
        const OP: &str = "gated_rms_norm::backward";
        check_config(OP, config)?;
        let mut dims = Dims::new(OP);
        dims.bind_rows("o", saved.o.shape(), "N", &["V"])?;
        dims.bind_rows("y", upstream.y.shape(), "N", &["V"])?;
        dims.bind("gain", into.gain.shape(), &["V"])?;
        let o = self.read(OP, "o", &saved.o)?;
        let zeta = self.read(OP, "zeta", &saved.zeta)?;
        let gain = self.read(OP, "gain", &saved.gain)?;
        let dy = self.read(OP, "y", upstream.y)?;
        let (d_o, dzeta, dgain) = backward(o.slice(), zeta.slice(), gain.slice(), &saved.rho, dy.slice());
        self.accumulate(OP, "gain", into.gain, &dgain)?;
        Ok(Grads {
            d_o: self.adopt(Array1::from(d_o), saved.o.shape()),
            dzeta: self.adopt(Array1::from(dzeta), saved.zeta.shape()),
        })
    }
}

impl<B: GatedRmsNorm> GatedRmsNorm for Checked<B> {
    type Saved = B::Saved;

    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&B::Tensor>,
        params: Params<&B::Tensor>,
    ) -> Result<(Outputs<B::Tensor>, B::Saved)> {
        const OP: &str = "gated_rms_norm::forward";
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
        self.finite("gated_rms_norm::backward", upstream.clone().named())?;
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

/// y and rho of rows as long as `gain`.
fn forward<T: Scalar>(o: &[T], zeta: &[T], gain: &[T], eps: T) -> (Vec<T>, Vec<T>) {
    let width = gain.len();
    let mut y = vec![T::zero(); o.len()];
    let mut rho = vec![T::zero(); o.len() / width];
    let rows = (y.par_chunks_mut(width), o.par_chunks(width), zeta.par_chunks(width), &mut rho).into_par_iter();
    rows.with_min_len(BLOCK_ROWS).for_each(|(y, o, zeta, rho)| {
        *rho = T::one() / (dot(o, o) / T::from_f64(width as f64) + eps).sqrt();
        for v in 0..width {
            y[v] = gain[v] * (*rho * o[v]) * zeta[v].sigmoid();
        }
    });
    (y, rho)
}

/// The gradients of `o`, `zeta` and `gain`.
fn backward<T: Scalar>(o: &[T], zeta: &[T], gain: &[T], rho: &[T], dy: &[T]) -> (Vec<T>, Vec<T>, Array1<T>) {
    let width = gain.len();
    let block = BLOCK_ROWS * width;
    let mut d_o = vec![T::zero(); o.len()];
    let mut dzeta = vec![T::zero(); o.len()];
    let dgain_of_blocks: Vec<Array1<T>> = (d_o.par_chunks_mut(block), dzeta.par_chunks_mut(block))
        .into_par_iter()
        .enumerate()
        .map(|(index, (d_o, dzeta))| {
            let mut dgain = Array1::zeros(width);
            let rows = d_o.chunks_exact_mut(width).zip(dzeta.chunks_exact_mut(width));
            for (n, (d_o, dzeta)) in (index * BLOCK_ROWS..).zip(rows) {
                let row = n * width..(n + 1) * width;
                let (o, zeta, dy) = (&o[row.clone()], &zeta[row.clone()], &dy[row]);
                let dgain = dgain.as_slice_mut().expect("a fresh array is contiguous");
                backward_row(o, zeta, gain, rho[n], dy, d_o, dzeta, dgain);
            }
            dgain
        })
        .collect();
    let mut dgain = Array1::zeros(width);
    for of_block in &dgain_of_blocks {
        dgain += of_block;
    }
    (d_o, dzeta, dgain)
}

/// One row: fills `d_o` and `dzeta`, adds to `dgain`.
fn backward_row<T: Scalar>(
    o: &[T],
    zeta: &[T],
    gain: &[T],
    rho: T,
    dy: &[T],
    d_o: &mut [T],
    dzeta: &mut [T],
    dgain: &mut [T],
) {
    let width = gain.len();
    let dh = d_o;
    for v in 0..width {
        let (open, closed) = zeta[v].sigmoids();
        let oh = rho * o[v];
        let dn = dy[v] * open;
        dgain[v] += dn * oh;
        dh[v] = dn * gain[v];
        dzeta[v] = dh[v] * oh * closed;
    }
    let mean = rho * dot(o, dh) / T::from_f64(width as f64);
    let d_o = dh;
    for v in 0..width {
        d_o[v] = rho * (d_o[v] - rho * o[v] * mean);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;
    use approx::assert_relative_eq;
    use ndarray::{ArrayD, array};

    struct Result {
        y: ArrayD<f64>,
        d_o: ArrayD<f64>,
        dzeta: ArrayD<f64>,
        dgain: ArrayD<f64>,
    }

    fn run<T: Scalar>(eps: f64, o: ArrayD<T>, zeta: ArrayD<T>, gain: ArrayD<T>, dy: ArrayD<T>) -> Result {
        let b = Reference::<T>::new();
        let config = Config { eps };
        let (o, zeta, gain, dy) = (b.constant(o), b.constant(zeta), b.constant(gain), b.constant(dy));
        let (out, saved) = b.forward(&config, Inputs { o: &o, zeta: &zeta }, Params { gain: &gain }).unwrap();
        let dgain = b.persistent(gain.shape(), T::DTYPE).unwrap();
        let grads = b.backward(&config, &saved, Outputs { y: &dy }, Params { gain: &dgain }).unwrap();
        Result {
            y: b.download(&out.y).unwrap(),
            d_o: b.download(&grads.d_o).unwrap(),
            dzeta: b.download(&grads.dzeta).unwrap(),
            dgain: b.download(&dgain).unwrap(),
        }
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
        // mean o^2 + eps = 12.5 + 3.5 = 16, so rho = 1/4 and oh = (3/4, 1). The gates are 1/2 and 3/4.
        let r = run(
            3.5,
            array![[3.0f64, 4.0]].into_dyn(),
            array![[0.0, 3f64.ln()]].into_dyn(),
            array![2.0, -1.0].into_dyn(),
            array![[1.0, 8.0]].into_dyn(),
        );
        close(&r.y, array![[0.75, -0.75]].into_dyn(), 1e-15);
        // dn = (1/2, 6); dgain = dn oh; dzeta = dn gain oh (1 - gate); dh = (1, -6); mean(oh dh) = -21/8.
        close(&r.dgain, array![0.375, 6.0].into_dyn(), 1e-15);
        close(&r.dzeta, array![[0.375, -1.5]].into_dyn(), 1e-15);
        close(&r.d_o, array![[(1.0 + 63.0 / 32.0) / 4.0, (-6.0 + 21.0 / 8.0) / 4.0]].into_dyn(), 1e-15);
    }

    #[test]
    fn j1_zero_row_has_a_finite_gradient() {
        // With the gate at 1/2 and eps = 1e-5: do = gamma dy / 2 / sqrt(1e-5) = 158.1 gamma dy.
        let r = run(
            1e-5,
            array![[0.0f32, 0.0]].into_dyn(),
            array![[0.0, 0.0]].into_dyn(),
            array![1.0, 2.0].into_dyn(),
            array![[1.0, -1.0]].into_dyn(),
        );
        assert_eq!(r.y, array![[0.0, 0.0]].into_dyn());
        close(&r.d_o, array![[158.113_88, -316.227_77]].into_dyn(), 1e-6);
        assert_eq!((r.dzeta, r.dgain), (ArrayD::zeros(vec![1, 2]), ArrayD::zeros(vec![2])));
    }

    #[test]
    fn j1_rows_whose_squares_leave_the_range_of_f32_stay_finite() {
        for size in [1e-20f32, 1e20] {
            let r = run(
                1e-8,
                array![[size, -size]].into_dyn(),
                array![[0.5, -0.5]].into_dyn(),
                array![1.0, 2.0].into_dyn(),
                array![[1.0, -1.0]].into_dyn(),
            );
            for x in r.y.iter().chain(&r.d_o).chain(&r.dzeta).chain(&r.dgain) {
                assert!(x.is_finite(), "{size}: {x}");
            }
        }
    }

    #[test]
    fn j2_eps_is_inside_the_root() {
        // A gate of 1/2 times 3e-5 / sqrt(9e-10 + 1e-8).
        let one = || array![[1.0f64]].into_dyn();
        let r = run(1e-8, array![[3e-5]].into_dyn(), array![[0.0]].into_dyn(), array![1.0].into_dyn(), one());
        assert_relative_eq!(r.y[[0, 0]], 0.287_347_885_566_345_4 / 2.0, max_relative = 1e-14);
    }

    #[test]
    fn a_shut_gate_keeps_the_tail_of_its_gradient_in_f32() {
        // sigma(17) sigma(-17) = 4.14e-8; written as s (1 - s) it is 0 in f32.
        let r = run(
            1e-8,
            array![[1.0f32, 1.0]].into_dyn(),
            array![[17.0, -17.0]].into_dyn(),
            array![1.0, 1.0].into_dyn(),
            array![[1.0, 1.0]].into_dyn(),
        );
        close(&r.dzeta, array![[4.139_937e-8, 4.139_937e-8]].into_dyn(), 1e-5);
    }

    #[test]
    fn no_rows_give_no_rows() {
        let empty = || ArrayD::<f64>::zeros(vec![0, 4, 3]);
        let r = run(1e-6, empty(), empty(), ArrayD::ones(vec![3]), empty());
        assert_eq!((r.y, r.d_o, r.dzeta, r.dgain), (empty(), empty(), empty(), ArrayD::zeros(vec![3])));
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let b = Reference::<f64>::new();
        let zeros = |shape: &[usize]| b.persistent(shape, DType::F64).unwrap();
        let config = Config { eps: 1e-6 };
        let (o, gain) = (zeros(&[4, 3]), zeros(&[3]));
        let forward = |config: &Config, o: &Tensor<f64>, zeta: &Tensor<f64>, gain: &Tensor<f64>| {
            b.forward(config, Inputs { o, zeta }, Params { gain }).map(|_| ()).unwrap_err().to_string()
        };
        assert_eq!(
            forward(&config, &o, &zeros(&[4, 2]), &gain),
            "gated_rms_norm::forward: `zeta` is [4, 2], expected [N, V] = [4, 3] (V from `o`)"
        );
        assert_eq!(
            forward(&config, &o, &o, &zeros(&[2])),
            "gated_rms_norm::forward: `gain` is [2], expected [V] = [3] (V from `o`)"
        );
        assert_eq!(
            forward(&config, &zeros(&[4, 0]), &zeros(&[4, 0]), &zeros(&[0])),
            "gated_rms_norm::forward: `o` is [0], expected V >= 1"
        );
        assert_eq!(
            forward(&Config { eps: f64::NAN }, &o, &o, &gain),
            "gated_rms_norm::forward: config `eps` is NaN, expected greater than zero, since a zero row would divide by \
             zero"
        );
        let (out, saved) = b.forward(&config, Inputs { o: &o, zeta: &o }, Params { gain: &gain }).unwrap();
        let backward = |y: &Tensor<f64>, gain: &Tensor<f64>| {
            b.backward(&config, &saved, Outputs { y }, Params { gain }).map(|_| ()).unwrap_err().to_string()
        };
        assert_eq!(
            backward(&zeros(&[3, 3]), &gain),
            "gated_rms_norm::backward: `y` is [3, 3], expected [N, V] = [4, 3] (N from `o`)"
        );
        assert_eq!(
            backward(&out.y, &zeros(&[4])),
            "gated_rms_norm::backward: `gain` is [4], expected [V] = [3] (V from `o`)"
        );
    }
}
