//! `decay_gate`: the log-decay g of every key channel and the write strength beta of every head.
//!
//! With x = z + dt_bias and a = exp(a_log) of the head:
//!
//! ```text
//! bounded:   g = lower_bound * sigma(a x)
//! softplus:  g = -a * softplus(x)
//! beta = beta_scale * sigma(y)
//! ```
//!
//! Adjoint, with dg and dbeta the gradients of g and beta:
//!
//! ```text
//! bounded:   dz = dg * lower_bound * a * sigma(a x) sigma(-a x),   da_log = sum_{B,T,K} dz * x
//! softplus:  dz = -dg * a * sigma(x),                              da_log = sum_{B,T,K} dg * g
//! ddt_bias = sum_{B,T} dz
//! dy = dbeta * beta_scale * sigma(y) sigma(-y)
//! ```
//!
//! Both gates are differentiable maps; a softplus gate clamped at a bound is neither of them. The derivative of the
//! sigmoid is a product of its two tails: s (1 - s) would be zero in `f32` from 17 on, and saturated gates would never
//! learn again. The gate of a zero is not zero (bounded: half the bound), so a padded token must be masked after the
//! gate, not before it.
//!
//! Source: Kimi Delta Attention, arXiv 2510.26692.

use ndarray::{Array1, ArrayView2, Axis, s};
use rayon::prelude::*;

use crate::checked::Checked;
use crate::cpu::{Reference, Tensor};
use crate::dims::Dims;
use crate::error::{Error, Result};
use crate::fields;
use crate::scalar::Scalar;
use crate::tensor::Tensors;

/// The strongest bound of the bounded gate. Within a tile of 16 tokens the exponents of a chunked form then stay below
/// 15 * 5.9 = 88.5, where `f32` ends at 88.7.
pub const STRONGEST_BOUND: f64 = -5.9;

/// Tokens of one task. The parameters' gradients are summed within these blocks and then over them, both in order.
const BLOCK_ROWS: usize = 64;

/// How g is made from z.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// `lower_bound * sigma(a x)`, between `lower_bound` and 0.
    Bounded {
        /// From -5.9 up to, but not including, 0.
        lower_bound: f64,
    },
    /// `-a * softplus(x)`, unbounded below.
    Softplus,
}

/// What the operation does besides its shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// How g is made from z.
    pub kind: Kind,
    /// 1 or 2: the largest beta. With 2 the state may have negative eigenvalues.
    pub beta_scale: f64,
}

fields! {
    /// Activations going in.
    pub struct Inputs {
        /// `[B, T, H, K]`, the decay's logit.
        z,
        /// `[B, T, H]`, the write strength's logit.
        y
    }
}

fields! {
    /// Learned parameters; their gradients accumulate into tensors of the same names.
    pub struct Params {
        /// `[H]`, the logarithm of a.
        a_log,
        /// `[H, K]`
        dt_bias
    }
}

fields! {
    /// Activations coming out. As `upstream` of `backward`: their gradients.
    pub struct Outputs {
        /// `[B, T, H, K]`, natural logarithm of the decay, at most 0.
        g,
        /// `[B, T, H]`, between 0 and `beta_scale`.
        beta
    }
}

fields! {
    /// Gradients of the inputs.
    pub struct Grads {
        /// `[B, T, H, K]`
        dz,
        /// `[B, T, H]`
        dy
    }
}

/// The operation on a backend.
///
/// # Errors
/// `Shape` if `y` is not `[B, T, H]`, `a_log` not `[H]`, `dt_bias` not `[H, K]`, if H or K is 0 or an upstream gradient
/// has another shape than its output; `Config` if `lower_bound` is not in [-5.9, 0) or `beta_scale` neither 1 nor 2.
pub trait DecayGate: Tensors {
    /// What `forward` hands to `backward`.
    type Saved;

    /// Computes both gates.
    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Self::Tensor>,
        params: Params<&Self::Tensor>,
    ) -> Result<(Outputs<Self::Tensor>, Self::Saved)>;

    /// Returns the gradients of `z` and `y` and adds those of the parameters into `into`.
    fn backward(
        &self,
        config: &Config,
        saved: &Self::Saved,
        upstream: Outputs<&Self::Tensor>,
        into: Params<&Self::Tensor>,
    ) -> Result<Grads<Self::Tensor>>;
}

/// What the reference saves: handles of what went in.
pub struct Saved<T> {
    z: Tensor<T>,
    y: Tensor<T>,
    a_log: Tensor<T>,
    dt_bias: Tensor<T>,
}

impl<T: Scalar> DecayGate for Reference<T> {
    type Saved = Saved<T>;

    #[inline(never)]
    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Tensor<T>>,
        params: Params<&Tensor<T>>,
    ) -> Result<(Outputs<Tensor<T>>, Saved<T>)> {
        const OP: &str = "decay_gate::forward";
        check_config(OP, config)?;
        let mut dims = Dims::new(OP);
        dims.bind("z", inputs.z.shape(), &["B", "T", "H", "K"])?;
        dims.bind("y", inputs.y.shape(), &["B", "T", "H"])?;
        dims.bind("a_log", params.a_log.shape(), &["H"])?;
        dims.bind("dt_bias", params.dt_bias.shape(), &["H", "K"])?;
        dims.positive(&["H", "K"])?;
        let z = self.read(OP, "z", inputs.z)?;
        let y = self.read(OP, "y", inputs.y)?;
        let a_log = self.read(OP, "a_log", params.a_log)?;
        let dt_bias = self.read(OP, "dt_bias", params.dt_bias)?;
        let g = forward_g(config.kind, z.slice(), a_log.slice(), dt_bias.slice());
        let scale = T::from_f64(config.beta_scale);
        let beta: Array1<T> = y.slice().iter().map(|y| scale * y.sigmoid()).collect();
        let outputs =
            Outputs { g: self.adopt(Array1::from(g), inputs.z.shape()), beta: self.adopt(beta, inputs.y.shape()) };
        let saved = Saved {
            z: inputs.z.clone(),
            y: inputs.y.clone(),
            a_log: params.a_log.clone(),
            dt_bias: params.dt_bias.clone(),
        };
        Ok((outputs, saved))
    }

    #[inline(never)]
    fn backward(
        &self,
        config: &Config,
        saved: &Saved<T>,
        upstream: Outputs<&Tensor<T>>,
        into: Params<&Tensor<T>>,
    ) -> Result<Grads<Tensor<T>>> {
        const OP: &str = "decay_gate::backward";
        check_config(OP, config)?;
        let mut dims = Dims::new(OP);
        dims.bind("z", saved.z.shape(), &["B", "T", "H", "K"])?;
        dims.bind("g", upstream.g.shape(), &["B", "T", "H", "K"])?;
        dims.bind("beta", upstream.beta.shape(), &["B", "T", "H"])?;
        dims.bind("a_log", into.a_log.shape(), &["H"])?;
        dims.bind("dt_bias", into.dt_bias.shape(), &["H", "K"])?;
        let z = self.read(OP, "z", &saved.z)?;
        let y = self.read(OP, "y", &saved.y)?;
        let a_log = self.read(OP, "a_log", &saved.a_log)?;
        let dt_bias = self.read(OP, "dt_bias", &saved.dt_bias)?;
        let dg = self.read(OP, "g", upstream.g)?;
        let dbeta = self.read(OP, "beta", upstream.beta)?;
        let (dz, da_log, ddt_bias) = backward_g(config.kind, z.slice(), a_log.slice(), dt_bias.slice(), dg.slice());
        let scale = T::from_f64(config.beta_scale);
        let dy: Array1<T> = y
            .slice()
            .iter()
            .zip(dbeta.slice())
            .map(|(y, &dbeta)| {
                let (open, closed) = y.sigmoids();
                dbeta * scale * open * closed
            })
            .collect();
        self.accumulate(OP, "a_log", into.a_log, &da_log)?;
        self.accumulate(OP, "dt_bias", into.dt_bias, &ddt_bias)?;
        Ok(Grads { dz: self.adopt(Array1::from(dz), saved.z.shape()), dy: self.adopt(dy, saved.y.shape()) })
    }
}

impl<B: DecayGate> DecayGate for Checked<B> {
    type Saved = B::Saved;

    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&B::Tensor>,
        params: Params<&B::Tensor>,
    ) -> Result<(Outputs<B::Tensor>, B::Saved)> {
        const OP: &str = "decay_gate::forward";
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
        self.finite("decay_gate::backward", upstream.clone().named())?;
        self.0.backward(config, saved, upstream, into)
    }
}

/// Refuses a config that is out of range. For backends of their own too.
///
/// # Errors
/// `Config`, which names the field.
pub fn check_config(op: &'static str, config: &Config) -> Result<()> {
    if let Kind::Bounded { lower_bound } = config.kind
        && !(STRONGEST_BOUND..0.0).contains(&lower_bound)
    {
        return Err(Error::Config {
            op,
            field: "lower_bound",
            expected: format!(
                "from {STRONGEST_BOUND} to below 0, since a stronger decay overflows f32 within a tile of 16 tokens; \
                 the softplus gate has no bound"
            ),
            got: lower_bound.to_string(),
        });
    }
    if config.beta_scale == 1.0 || config.beta_scale == 2.0 {
        return Ok(());
    }
    Err(Error::Config {
        op,
        field: "beta_scale",
        expected: "1 or 2, since beyond 2 the delta rule diverges".to_owned(),
        got: config.beta_scale.to_string(),
    })
}

/// g of tokens `z`, each H * K long.
fn forward_g<T: Scalar>(kind: Kind, z: &[T], a_log: &[T], dt_bias: &[T]) -> Vec<T> {
    let width = dt_bias.len();
    let keys = width / a_log.len();
    let a: Vec<T> = a_log.iter().map(|a_log| a_log.exp()).collect();
    let mut g = vec![T::zero(); z.len()];
    let tokens = (g.par_chunks_mut(width), z.par_chunks(width)).into_par_iter();
    tokens.with_min_len(BLOCK_ROWS).for_each(|(g, z)| {
        for (h, &a) in a.iter().enumerate() {
            for i in h * keys..(h + 1) * keys {
                let x = z[i] + dt_bias[i];
                g[i] = match kind {
                    Kind::Bounded { lower_bound } => T::from_f64(lower_bound) * (a * x).sigmoid(),
                    Kind::Softplus => -(a * x.softplus()),
                };
            }
        }
    });
    g
}

/// dz, da_log and ddt_bias.
fn backward_g<T: Scalar>(kind: Kind, z: &[T], a_log: &[T], dt_bias: &[T], dg: &[T]) -> (Vec<T>, Array1<T>, Array1<T>) {
    let width = dt_bias.len();
    let keys = width / a_log.len();
    let a: Vec<T> = a_log.iter().map(|a_log| a_log.exp()).collect();
    let mut dz = vec![T::zero(); z.len()];
    let blocks =
        (dz.par_chunks_mut(BLOCK_ROWS * width), z.par_chunks(BLOCK_ROWS * width), dg.par_chunks(BLOCK_ROWS * width));
    // Per block: the sums over its tokens of dz, then of da_log's terms, both [H, K].
    let sums_of_blocks: Vec<Vec<T>> = blocks
        .into_par_iter()
        .map(|(dz, z, dg)| {
            let mut sums = vec![T::zero(); 2 * width];
            let (ddt_bias, da_log) = sums.split_at_mut(width);
            let tokens = dz.chunks_exact_mut(width).zip(z.chunks_exact(width)).zip(dg.chunks_exact(width));
            for ((dz, z), dg) in tokens {
                for (h, &a) in a.iter().enumerate() {
                    for i in h * keys..(h + 1) * keys {
                        let x = z[i] + dt_bias[i];
                        match kind {
                            Kind::Bounded { lower_bound } => {
                                let (open, closed) = (a * x).sigmoids();
                                dz[i] = dg[i] * T::from_f64(lower_bound) * a * open * closed;
                                da_log[i] += dz[i] * x;
                            }
                            Kind::Softplus => {
                                dz[i] = -(dg[i] * a * x.sigmoid());
                                da_log[i] -= dg[i] * a * x.softplus();
                            }
                        }
                        ddt_bias[i] += dz[i];
                    }
                }
            }
            sums
        })
        .collect();
    let mut sums = Array1::zeros(2 * width);
    for of_block in sums_of_blocks {
        sums += &Array1::from(of_block);
    }
    let ddt_bias = sums.slice(s![..width]).to_owned();
    let da_log_terms = sums.slice(s![width..]);
    let da_log_terms: ArrayView2<'_, T> = da_log_terms.into_shape_with_order((a_log.len(), keys)).expect("H * K terms");
    (dz, da_log_terms.sum_axis(Axis(1)), ddt_bias)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;
    use approx::assert_relative_eq;
    use ndarray::{Array, ArrayD, IxDyn, array};

    const BOUNDED: Config = Config { kind: Kind::Bounded { lower_bound: -5.0 }, beta_scale: 1.0 };
    const SOFTPLUS: Config = Config { kind: Kind::Softplus, beta_scale: 2.0 };

    #[derive(Debug, PartialEq)]
    struct Result {
        g: ArrayD<f64>,
        beta: ArrayD<f64>,
        dz: ArrayD<f64>,
        dy: ArrayD<f64>,
        da_log: ArrayD<f64>,
        ddt_bias: ArrayD<f64>,
    }

    /// Runs with `dt_bias = 0` and all gradients of beta 1.
    fn run<T: Scalar>(config: &Config, z: ArrayD<T>, y: ArrayD<T>, a_log: ArrayD<T>, dg: ArrayD<T>) -> Result {
        let b = Reference::<T>::new();
        let zeros = |shape: &[usize]| b.persistent(shape, T::DTYPE).unwrap();
        let (heads, keys) = (z.shape()[2], z.shape()[3]);
        let dbeta = b.constant(ArrayD::from_elem(y.raw_dim(), T::one()));
        let (z, y, a_log, dg) = (b.constant(z), b.constant(y), b.constant(a_log), b.constant(dg));
        let dt_bias = zeros(&[heads, keys]);
        let params = Params { a_log: &a_log, dt_bias: &dt_bias };
        let (out, saved) = b.forward(config, Inputs { z: &z, y: &y }, params).unwrap();
        let (da_log, ddt_bias) = (zeros(&[heads]), zeros(&[heads, keys]));
        let into = Params { a_log: &da_log, dt_bias: &ddt_bias };
        let grads = b.backward(config, &saved, Outputs { g: &dg, beta: &dbeta }, into).unwrap();
        Result {
            g: b.download(&out.g).unwrap(),
            beta: b.download(&out.beta).unwrap(),
            dz: b.download(&grads.dz).unwrap(),
            dy: b.download(&grads.dy).unwrap(),
            da_log: b.download(&da_log).unwrap(),
            ddt_bias: b.download(&ddt_bias).unwrap(),
        }
    }

    fn one_head(values: &[f64]) -> ArrayD<f64> {
        ArrayD::from_shape_vec(vec![1, values.len(), 1, 1], values.to_vec()).unwrap()
    }

    fn tokens(n: usize) -> ArrayD<f64> {
        ArrayD::zeros(vec![1, n, 1])
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
    fn a7_the_bounded_gate_is_not_a_clamped_softplus() {
        let z = one_head(&[-2.0, 0.0, 1.0, 8.0]);
        let r = run(&BOUNDED, z, tokens(4), array![0.0].into_dyn(), one_head(&[0.0, 1.0, 0.0, 0.0]));
        close(&r.g, one_head(&[-0.59601, -2.5, -3.65529, -4.99832]), 1e-5);
        assert_eq!(r.dz, one_head(&[0.0, -1.25, 0.0, 0.0]));
        assert_eq!((r.da_log[0], r.ddt_bias[[0, 0]]), (0.0, -1.25));
    }

    #[test]
    fn both_gates_by_hand() {
        // a = 2 and x = ln(3)/2, so sigma(a x) = 3/4.
        let (a_log, x) = (array![2f64.ln()].into_dyn(), 3f64.ln() / 2.0);
        let r = run(&BOUNDED, one_head(&[x]), tokens(1), a_log.clone(), one_head(&[8.0]));
        assert_relative_eq!(r.g[[0, 0, 0, 0]], -3.75, max_relative = 1e-15);
        assert_relative_eq!(r.dz[[0, 0, 0, 0]], 8.0 * -5.0 * 2.0 * 3.0 / 16.0, max_relative = 1e-15);
        assert_relative_eq!(r.da_log[0], -15.0 * x, max_relative = 1e-15);
        assert_eq!((r.beta[[0, 0, 0]], r.dy[[0, 0, 0]]), (0.5, 0.25));
        // softplus(ln 3) = ln 4.
        let r = run(&SOFTPLUS, one_head(&[3f64.ln()]), tokens(1), a_log, one_head(&[8.0]));
        assert_relative_eq!(r.g[[0, 0, 0, 0]], -2.0 * 4f64.ln(), max_relative = 1e-15);
        assert_relative_eq!(r.dz[[0, 0, 0, 0]], -8.0 * 2.0 * 0.75, max_relative = 1e-15);
        assert_relative_eq!(r.da_log[0], -16.0 * 4f64.ln(), max_relative = 1e-15);
        assert_eq!((r.beta[[0, 0, 0]], r.dy[[0, 0, 0]]), (1.0, 0.5));
    }

    #[test]
    fn a4_a_saturated_gate_has_a_small_finite_gradient_in_f32() {
        for config in [BOUNDED, SOFTPLUS] {
            let z = Array::from_shape_fn(IxDyn(&[1, 80, 2, 3]), |i| if i[1] < 40 { 40.0f32 } else { -40.0 });
            let dg = ArrayD::from_elem(vec![1, 80, 2, 3], 1.0f32);
            let r = run(&config, z, ArrayD::zeros(vec![1, 80, 2]), ArrayD::zeros(vec![2]), dg);
            for x in r.g.iter().chain(&r.dz).chain(&r.da_log).chain(&r.ddt_bias) {
                assert!(x.is_finite(), "{config:?}: {x}");
            }
            if config == BOUNDED {
                // -5 sigma(40) sigma(-40), at both ends.
                close(&r.dz, ArrayD::from_elem(vec![1, 80, 2, 3], -2.124e-17), 1e-3);
            }
        }
    }

    #[test]
    fn d6_a_padded_token_has_a_gate_but_no_gradient() {
        // The gate of a padded zero is -2.5, so the mask belongs after the gate: its gradient is then zero here, and
        // neither parameter hears of the padding.
        let real = one_head(&[0.3, -1.1]);
        let padded = one_head(&[0.3, -1.1, 0.0, 7.0]);
        let a_log = || array![0.2].into_dyn();
        let plain = run(&BOUNDED, real, tokens(2), a_log(), one_head(&[1.0, -2.0]));
        let padded = run(&BOUNDED, padded, tokens(4), a_log(), one_head(&[1.0, -2.0, 0.0, 0.0]));
        assert_eq!(padded.g[[0, 2, 0, 0]], -2.5);
        assert_eq!(padded.g.slice(s![.., ..2, .., ..]).into_dyn(), plain.g);
        assert_eq!(padded.dz.slice(s![.., ..2, .., ..]).into_dyn(), plain.dz);
        assert!(padded.dz.slice(s![.., 2.., .., ..]).iter().all(|&d| d == 0.0));
        assert_eq!((padded.da_log, padded.ddt_bias), (plain.da_log, plain.ddt_bias));
    }

    #[test]
    fn no_tokens_give_no_gates() {
        let empty = |shape: &[usize]| ArrayD::<f64>::zeros(IxDyn(shape));
        let r = run(&SOFTPLUS, empty(&[2, 0, 3, 4]), empty(&[2, 0, 3]), empty(&[3]), empty(&[2, 0, 3, 4]));
        assert_eq!((r.g.shape(), r.beta.shape()), (&[2, 0, 3, 4][..], &[2, 0, 3][..]));
        assert_eq!((r.dz, r.dy), (empty(&[2, 0, 3, 4]), empty(&[2, 0, 3])));
        assert_eq!((r.da_log, r.ddt_bias), (empty(&[3]), empty(&[3, 4])));
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let b = Reference::<f64>::new();
        let zeros = |shape: &[usize]| b.persistent(shape, DType::F64).unwrap();
        let (z, y, a_log, dt_bias) = (zeros(&[2, 5, 3, 4]), zeros(&[2, 5, 3]), zeros(&[3]), zeros(&[3, 4]));
        let forward = |config: &Config, z: &_, y: &_, a_log: &_, dt_bias: &_| {
            let result = b.forward(config, Inputs { z, y }, Params { a_log, dt_bias });
            result.map(|_| ()).unwrap_err().to_string()
        };
        assert_eq!(
            forward(&BOUNDED, &z, &zeros(&[2, 5, 4]), &a_log, &dt_bias),
            "decay_gate::forward: `y` is [2, 5, 4], expected [B, T, H] = [2, 5, 3] (H from `z`)"
        );
        assert_eq!(
            forward(&BOUNDED, &z, &y, &zeros(&[4]), &dt_bias),
            "decay_gate::forward: `a_log` is [4], expected [H] = [3] (H from `z`)"
        );
        assert_eq!(
            forward(&BOUNDED, &z, &y, &a_log, &zeros(&[4, 3])),
            "decay_gate::forward: `dt_bias` is [4, 3], expected [H, K] = [3, 4] (H from `z`, K from `z`)"
        );
        assert_eq!(
            forward(&BOUNDED, &zeros(&[2, 5, 3, 0]), &y, &a_log, &zeros(&[3, 0])),
            "decay_gate::forward: `z` is [0], expected K >= 1"
        );
        assert_eq!(
            forward(&BOUNDED, &zeros(&[2, 5, 0, 4]), &zeros(&[2, 5, 0]), &zeros(&[0]), &zeros(&[0, 4])),
            "decay_gate::forward: `z` is [0], expected H >= 1"
        );
        for lower_bound in [-5.95, 0.0, 1.0, f64::NAN] {
            let config = Config { kind: Kind::Bounded { lower_bound }, ..BOUNDED };
            assert_eq!(
                forward(&config, &z, &y, &a_log, &dt_bias),
                format!(
                    "decay_gate::forward: config `lower_bound` is {lower_bound}, expected from -5.9 to below 0, since a \
                     stronger decay overflows f32 within a tile of 16 tokens; the softplus gate has no bound"
                )
            );
        }
        assert_eq!(
            forward(&Config { beta_scale: 1.5, ..BOUNDED }, &z, &y, &a_log, &dt_bias),
            "decay_gate::forward: config `beta_scale` is 1.5, expected 1 or 2, since beyond 2 the delta rule diverges"
        );
        let params = Params { a_log: &a_log, dt_bias: &dt_bias };
        let (out, saved) = b.forward(&BOUNDED, Inputs { z: &z, y: &y }, params).unwrap();
        let backward = |g: &_, beta: &_, a_log: &_, dt_bias: &_| {
            let result = b.backward(&BOUNDED, &saved, Outputs { g, beta }, Params { a_log, dt_bias });
            result.map(|_| ()).unwrap_err().to_string()
        };
        assert_eq!(
            backward(&zeros(&[2, 4, 3, 4]), &out.beta, &a_log, &dt_bias),
            "decay_gate::backward: `g` is [2, 4, 3, 4], expected [B, T, H, K] = [2, 5, 3, 4] (T from `z`)"
        );
        assert_eq!(
            backward(&out.g, &zeros(&[2, 5]), &a_log, &dt_bias),
            "decay_gate::backward: `beta` is [2, 5], expected [B, T, H] = [2, 5, 3] (B from `z`, T from `z`, H from `z`)"
        );
        assert_eq!(
            backward(&out.g, &out.beta, &dt_bias, &dt_bias),
            "decay_gate::backward: `a_log` is [3, 4], expected [H] = [3] (H from `z`)"
        );
        assert_eq!(
            backward(&out.g, &out.beta, &a_log, &a_log),
            "decay_gate::backward: `dt_bias` is [3], expected [H, K] = [3, 4] (H from `z`, K from `z`)"
        );
    }
}
