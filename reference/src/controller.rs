//! `controller`: the gates of one iteration, from the stream and the embedding.
//!
//! ```text
//! raw   = [c ; x0] W                   W: [2D, 3+E], the first D rows act on c
//! gates = (sigma(raw_0), sigma(raw_1), sigma(raw_2), softmax(raw_3 .. raw_{2+E}))
//! ```
//!
//! Adjoint, with dgates the gradient of the gates and p the softmax:
//!
//! ```text
//! draw_j     = dgates_j sigma(raw_j) sigma(-raw_j)                     j < 3
//! draw_{3+e} = p_e sum_f p_f (dgates_{3+e} - dgates_{3+f})
//! dc  = draw W[..D]^T + plus.c,   dx0 = draw W[D..]^T + plus.x0
//! dW[..D] = c^T draw,    dW[D..] = x0^T draw
//! ```
//!
//! Both derivatives are written so that a saturated gate keeps its digits: sigma(-raw) instead of 1 - sigma(raw), and
//! differences of gradients instead of p_e (dgates_e - sum_f p_f dgates_f), whose two terms cancel where p_e is near 1.
//! With one expert the softmax is 1 and its gradient is exactly zero. Every leading axis counts as rows: `[.., D]`.

use ndarray::{Array2, ArrayView2, ArrayViewMut1, Axis, Ix2, Zip, s};

use crate::checked::Checked;
use crate::cpu::{Reference, Tensor, full_precision};
use crate::dims::Dims;
use crate::error::{Error, Result};
use crate::fields;
use crate::matmul::{matmul, matmul_into};
use crate::scalar::Scalar;
use crate::tensor::{Precision, Tensors};

/// The gates that are not expert weights: attention, memory, feed-forward.
pub const FIXED_GATES: usize = 3;

/// What the operation does besides its shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The arithmetic of the matrix products.
    pub precision: Precision,
    /// E: how many experts share the softmax. At least 1.
    pub experts: usize,
}

fields! {
    /// Activations going in.
    pub struct Inputs {
        /// `[.., D]`, the stream.
        c,
        /// `[.., D]`, the embedding.
        x0
    }
}

fields! {
    /// Learned parameters; their gradients accumulate into tensors of the same names.
    pub struct Params {
        /// `[2D, 3+E]`
        weight
    }
}

fields! {
    /// Activations coming out. As `upstream` of `backward`: their gradients.
    pub struct Outputs {
        /// `[.., 3+E]`: attention, memory, feed-forward, then the experts' shares.
        gates
    }
}

fields! {
    /// Gradients of the inputs.
    pub struct Grads {
        /// `[.., D]`
        dc,
        /// `[.., D]`
        dx0
    }
}

/// The operation on a backend.
///
/// # Errors
/// `Shape` if `x0` or `weight` does not fit `c` and the config, if D = 0, or if an upstream gradient or a tensor of
/// `into` has another shape than what it is the gradient of; `Config` if `experts` is zero or the backend lacks the
/// precision.
pub trait Controller: Tensors {
    /// What `forward` hands to `backward`.
    type Saved;

    /// Computes the gates of every row.
    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Self::Tensor>,
        params: Params<&Self::Tensor>,
    ) -> Result<(Outputs<Self::Tensor>, Self::Saved)>;

    /// Returns the gradients of the inputs, each with its `plus` (`[.., D]`) added, and adds that of the weight into
    /// `into`.
    fn backward(
        &self,
        config: &Config,
        saved: &Self::Saved,
        upstream: Outputs<&Self::Tensor>,
        plus: Inputs<Option<&Self::Tensor>>,
        into: Params<&Self::Tensor>,
    ) -> Result<Grads<Self::Tensor>>;
}

/// What the reference saves: the inputs, the gates and what they were before.
pub struct Saved<T> {
    c: Tensor<T>,
    x0: Tensor<T>,
    weight: Tensor<T>,
    raw: Array2<T>,
    gates: Tensor<T>,
}

impl<T: Scalar> Controller for Reference<T> {
    type Saved = Saved<T>;

    #[inline(never)]
    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Tensor<T>>,
        params: Params<&Tensor<T>>,
    ) -> Result<(Outputs<Tensor<T>>, Saved<T>)> {
        const OP: &str = "controller::forward";
        full_precision(OP, config.precision)?;
        check_config(OP, config)?;
        let mut dims = Dims::new(OP);
        dims.bind_rows("c", inputs.c.shape(), "N", &["D"])?;
        dims.bind_rows("x0", inputs.x0.shape(), "N", &["D"])?;
        dims.positive(&["D"])?;
        bind_weight(&mut dims, config, params.weight.shape())?;
        let weight = self.read(OP, "weight", params.weight)?;
        let (top, bottom) = weight.dims::<Ix2>().split_at(Axis(0), dims.get("D"));
        let mut raw = matmul(self.read(OP, "c", inputs.c)?.rows(), top);
        matmul_into(T::one(), self.read(OP, "x0", inputs.x0)?.rows(), bottom, T::one(), raw.view_mut());
        let mut gates = raw.clone();
        Zip::from(gates.rows_mut()).par_for_each(activate);
        let mut shape = inputs.c.shape().to_vec();
        *shape.last_mut().expect("bind_rows refuses a shape without axes") = gates.ncols();
        let gates = self.adopt(gates, &shape);
        let saved = Saved {
            c: inputs.c.clone(),
            x0: inputs.x0.clone(),
            weight: params.weight.clone(),
            raw,
            gates: gates.clone(),
        };
        Ok((Outputs { gates }, saved))
    }

    #[inline(never)]
    fn backward(
        &self,
        config: &Config,
        saved: &Saved<T>,
        upstream: Outputs<&Tensor<T>>,
        plus: Inputs<Option<&Tensor<T>>>,
        into: Params<&Tensor<T>>,
    ) -> Result<Grads<Tensor<T>>> {
        const OP: &str = "controller::backward";
        full_precision(OP, config.precision)?;
        check_config(OP, config)?;
        let mut dims = Dims::new(OP);
        dims.bind_rows("c", saved.c.shape(), "N", &["D"])?;
        bind_weight(&mut dims, config, saved.weight.shape())?;
        bind_weight(&mut dims, config, into.weight.shape())?;
        dims.bind_rows("gates", upstream.gates.shape(), "N", &["3+E"])?;
        let width = dims.get("D");
        let weight = self.read(OP, "weight", &saved.weight)?;
        let (top, bottom) = weight.dims::<Ix2>().split_at(Axis(0), width);
        let gates = self.read(OP, "gates", &saved.gates)?;
        let dgates = self.read(OP, "gates", upstream.gates)?;
        let draw = backward(saved.raw.view(), gates.rows(), dgates.rows());
        let mut through = |arg: &'static str, half: ArrayView2<'_, T>, plus: Option<&Tensor<T>>| -> Result<Array2<T>> {
            let Some(plus) = plus else { return Ok(matmul(draw.view(), half.t())) };
            dims.bind_rows(arg, plus.shape(), "N", &["D"])?;
            let mut sum = self.read(OP, arg, plus)?.rows().to_owned();
            matmul_into(T::one(), draw.view(), half.t(), T::one(), sum.view_mut());
            Ok(sum)
        };
        let dc = through("plus.c", top, plus.c)?;
        let dx0 = through("plus.x0", bottom, plus.x0)?;
        let into_part = |part: usize| self.view(into.weight, part * width * draw.ncols(), &[width, draw.ncols()]);
        let dtop = matmul(self.read(OP, "c", &saved.c)?.rows().t(), draw.view());
        let dbottom = matmul(self.read(OP, "x0", &saved.x0)?.rows().t(), draw.view());
        self.accumulate(OP, "weight", &into_part(0)?, &dtop)?;
        self.accumulate(OP, "weight", &into_part(1)?, &dbottom)?;
        Ok(Grads { dc: self.adopt(dc, saved.c.shape()), dx0: self.adopt(dx0, saved.x0.shape()) })
    }
}

impl<B: Controller> Controller for Checked<B> {
    type Saved = B::Saved;

    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&B::Tensor>,
        params: Params<&B::Tensor>,
    ) -> Result<(Outputs<B::Tensor>, B::Saved)> {
        const OP: &str = "controller::forward";
        self.finite(OP, inputs.clone().named())?;
        self.finite(OP, params.clone().named())?;
        self.0.forward(config, inputs, params)
    }

    fn backward(
        &self,
        config: &Config,
        saved: &B::Saved,
        upstream: Outputs<&B::Tensor>,
        plus: Inputs<Option<&B::Tensor>>,
        into: Params<&B::Tensor>,
    ) -> Result<Grads<B::Tensor>> {
        const OP: &str = "controller::backward";
        self.finite(OP, upstream.clone().named())?;
        self.finite(OP, plus.clone().named().into_iter().filter_map(|(name, plus)| Some((name, plus?))))?;
        self.0.backward(config, saved, upstream, plus, into)
    }
}

/// Refuses a config without experts. For backends of their own too, as is [`bind_weight`].
///
/// # Errors
/// `Config`, which names the field.
pub fn check_config(op: &'static str, config: &Config) -> Result<()> {
    if config.experts >= 1 {
        return Ok(());
    }
    Err(Error::Config {
        op,
        field: "experts",
        expected: "at least 1, since the softmax has no empty form".to_owned(),
        got: config.experts.to_string(),
    })
}

/// Refuses a weight that does not fit D, which must be bound.
///
/// # Errors
/// `Shape`, which names the argument.
pub fn bind_weight(dims: &mut Dims, config: &Config, shape: &[usize]) -> Result<()> {
    dims.set("2D", 2 * dims.get("D"), "c");
    dims.set("3+E", FIXED_GATES + config.experts, "config.experts");
    dims.bind("weight", shape, &["2D", "3+E"])
}

/// raw to gates, in place, for one row.
fn activate<T: Scalar>(mut row: ArrayViewMut1<'_, T>) {
    row.slice_mut(s![..FIXED_GATES]).mapv_inplace(T::sigmoid);
    let mut shares = row.slice_mut(s![FIXED_GATES..]);
    let largest = shares.iter().copied().reduce(T::max).expect("there is an expert");
    shares.mapv_inplace(|raw| (raw - largest).exp());
    let sum: T = shares.iter().copied().sum();
    shares.mapv_inplace(|e| e / sum);
}

/// The gradient of raw.
fn backward<T: Scalar>(raw: ArrayView2<'_, T>, gates: ArrayView2<'_, T>, dgates: ArrayView2<'_, T>) -> Array2<T> {
    let mut draw = Array2::zeros(raw.raw_dim());
    Zip::from(draw.rows_mut()).and(raw.rows()).and(gates.rows()).and(dgates.rows()).par_for_each(
        |mut draw, raw, gates, dgates| {
            for j in 0..FIXED_GATES {
                draw[j] = dgates[j] * gates[j] * (-raw[j]).sigmoid();
            }
            for e in FIXED_GATES..raw.len() {
                let differences: T = (FIXED_GATES..raw.len()).map(|f| gates[f] * (dgates[e] - dgates[f])).sum();
                draw[e] = gates[e] * differences;
            }
        },
    );
    draw
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;

    /// No gradient from other readers of c and x0.
    const NOTHING: Inputs<Option<&Tensor<f64>>> = Inputs { c: None, x0: None };
    use ndarray::{Array, ArrayD, IxDyn, array};

    use crate::tensor::DType;

    fn config(experts: usize) -> Config {
        Config { precision: Precision::Full, experts }
    }

    fn zeros(b: &Reference<f64>, shape: &[usize]) -> Tensor<f64> {
        b.constant(ArrayD::zeros(IxDyn(shape)))
    }

    #[test]
    fn value_and_gradient_by_hand() {
        let b = Reference::<f64>::new();
        let c = b.constant(array![[1.0]].into_dyn());
        let x0 = b.constant(array![[2.0]].into_dyn());
        // raw = (ln 3, 0, -ln 3, ln 2, 0): sigma 3/4, 1/2, 1/4; softmax 2/3, 1/3.
        let (ln2, ln3) = (2f64.ln(), 3f64.ln());
        let weight = b.constant(array![[ln3, 2.0, -ln3, ln2, 4.0], [0.0, -1.0, 0.0, 0.0, -2.0]].into_dyn());
        let (out, saved) = b.forward(&config(2), Inputs { c: &c, x0: &x0 }, Params { weight: &weight }).unwrap();
        let gates = b.download(&out.gates).unwrap();
        for (got, want) in gates.iter().zip([0.75, 0.5, 0.25, 2.0 / 3.0, 1.0 / 3.0]) {
            assert_relative_eq!(*got, want, max_relative = 1e-14);
        }
        // draw = (3/16, 1/4, 3/16, 2/9 * 3, -2/9 * 3).
        let dgates = b.constant(array![[1.0, 1.0, 1.0, 3.0, 0.0]].into_dyn());
        let dweight = zeros(&b, &[2, 5]);
        let into = Params { weight: &dweight };
        let grads = b.backward(&config(2), &saved, Outputs { gates: &dgates }, NOTHING, into).unwrap();
        let draw = [0.1875, 0.25, 0.1875, 2.0 / 3.0, -2.0 / 3.0];
        for (j, draw) in draw.into_iter().enumerate() {
            let got = b.download(&dweight).unwrap();
            assert_relative_eq!(got[[0, j]], draw, max_relative = 1e-14);
            assert_relative_eq!(got[[1, j]], 2.0 * draw, max_relative = 1e-14);
        }
        let want = 0.25 * 2.0 + 2.0 / 3.0 * (ln2 - 4.0);
        assert_relative_eq!(b.download(&grads.dc).unwrap()[[0, 0]], want, max_relative = 1e-14);
        assert_relative_eq!(b.download(&grads.dx0).unwrap()[[0, 0]], -0.25 + 4.0 / 3.0, max_relative = 1e-14);
    }

    #[test]
    fn saturated_gates_are_finite_and_keep_the_digits_of_their_gradient() {
        let raw = array![[40.0f32, -40.0, 0.0, 60.0, 0.0]];
        let mut gates = raw.clone();
        activate(gates.row_mut(0));
        let draw = backward(raw.view(), gates.view(), array![[1.0, 1.0, 1.0, 1.0, 0.0]].view());
        let tail = (-40f32).exp();
        for (got, want) in draw.iter().zip([tail, tail, 0.25, (-60f32).exp(), -(-60f32).exp()]) {
            assert_relative_eq!(*got, want, max_relative = 1e-5);
        }
    }

    #[test]
    fn one_expert_has_all_of_the_share_and_no_gradient() {
        let raw = array![[0.3, -0.2, 0.9, 7.0]];
        let mut gates = raw.clone();
        activate(gates.row_mut(0));
        assert_eq!(gates[[0, 3]], 1.0);
        assert_eq!(backward(raw.view(), gates.view(), array![[1.0, 1.0, 1.0, 5.0]].view())[[0, 3]], 0.0);
    }

    /// A narrow head that is right in row 0 only: every row must equal its own evaluation.
    #[test]
    fn h1_a_narrow_head_equals_row_by_row_evaluation() {
        let b = Reference::<f32>::new();
        let values = |rows: usize, cols: usize, k: usize| {
            Array::from_shape_fn(IxDyn(&[rows, cols]), |i| ((i[0] * 7 + i[1] * 5 + k) % 11) as f32 / 5.0 - 1.0)
        };
        let (c, x0) = (values(5, 6, 1), values(5, 6, 4));
        let weight = b.constant(values(12, 4, 2));
        let gates = |c: ArrayD<f32>, x0: ArrayD<f32>| {
            let (c, x0) = (b.constant(c), b.constant(x0));
            let (out, _) = b.forward(&config(1), Inputs { c: &c, x0: &x0 }, Params { weight: &weight }).unwrap();
            b.download(&out.gates).unwrap()
        };
        let whole = gates(c.clone(), x0.clone());
        for n in 0..5 {
            let row = |x: &ArrayD<f32>| x.slice_axis(Axis(0), (n..n + 1).into()).to_owned();
            assert_eq!(gates(row(&c), row(&x0)).index_axis(Axis(0), 0), whole.index_axis(Axis(0), n));
        }
    }

    #[test]
    fn no_rows_give_no_rows() {
        let b = Reference::<f64>::new();
        let x = b.persistent(&[3, 0, 2], DType::F64).unwrap();
        let (weight, dweight) = (zeros(&b, &[4, 5]), zeros(&b, &[4, 5]));
        let (out, saved) = b.forward(&config(2), Inputs { c: &x, x0: &x }, Params { weight: &weight }).unwrap();
        assert_eq!(out.gates.shape(), [3, 0, 5]);
        let upstream = Outputs { gates: &out.gates };
        let grads = b.backward(&config(2), &saved, upstream, NOTHING, Params { weight: &dweight }).unwrap();
        assert_eq!(grads.dx0.shape(), [3, 0, 2]);
    }

    #[test]
    fn shapes_and_config_are_checked() {
        let b = Reference::<f64>::new();
        let forward = |config: &Config, c: &[usize], x0: &[usize], weight: &[usize]| {
            let [c, x0, weight] = [c, x0, weight].map(|shape| zeros(&b, shape));
            b.forward(config, Inputs { c: &c, x0: &x0 }, Params { weight: &weight })
                .map(|(_, saved)| saved)
                .map_err(|error| error.to_string())
        };
        assert_eq!(
            forward(&config(2), &[5, 4], &[5, 3], &[8, 5]).err().unwrap(),
            "controller::forward: `x0` is [5, 3], expected [N, D] = [5, 4] (D from `c`)"
        );
        assert_eq!(
            forward(&config(2), &[5, 4], &[5, 4], &[4, 5]).err().unwrap(),
            "controller::forward: `weight` is [4, 5], expected [2D, 3+E] = [8, 5] (2D from `c`)"
        );
        assert_eq!(
            forward(&config(3), &[5, 4], &[5, 4], &[8, 5]).err().unwrap(),
            "controller::forward: `weight` is [8, 5], expected [2D, 3+E] = [8, 6] (3+E from `config.experts`)"
        );
        assert_eq!(
            forward(&config(2), &[5, 0], &[5, 0], &[0, 5]).err().unwrap(),
            "controller::forward: `c` is [0], expected D >= 1"
        );
        assert_eq!(
            forward(&config(0), &[5, 4], &[5, 4], &[8, 3]).err().unwrap(),
            "controller::forward: config `experts` is 0, expected at least 1, since the softmax has no empty form"
        );
        let tf32 = Config { precision: Precision::Tf32, experts: 2 };
        assert!(forward(&tf32, &[5, 4], &[5, 4], &[8, 5]).err().unwrap().contains("config `precision` is Tf32"));

        let saved = forward(&config(2), &[5, 4], &[5, 4], &[8, 5]).unwrap();
        let backward = |gates: &[usize], weight: &[usize]| {
            let (gates, weight) = (zeros(&b, gates), zeros(&b, weight));
            let into = Params { weight: &weight };
            b.backward(&config(2), &saved, Outputs { gates: &gates }, NOTHING, into).unwrap_err().to_string()
        };
        assert_eq!(
            backward(&[5, 4], &[8, 5]),
            "controller::backward: `gates` is [5, 4], expected [N, 3+E] = [5, 5] (3+E from `config.experts`)"
        );
        assert_eq!(
            backward(&[5, 5], &[5, 8]),
            "controller::backward: `weight` is [5, 8], expected [2D, 3+E] = [8, 5] (2D from `c`, 3+E from \
             `config.experts`)"
        );
    }
}
