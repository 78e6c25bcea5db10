//! `short_conv`: a causal depthwise convolution over the last four tokens, then SiLU.
//!
//! With xx = [context; x] along time, so that xx_{t+3} = x_t:
//!
//! ```text
//! c_t = bias + sum_{j=0..3} weight_j * xx_{t+j}        (that is x_{t-3+j}: weight_3 meets the present token)
//! y_t = c_t * sigma(c_t)
//! new context = the last three of xx
//! ```
//!
//! Adjoint, with dy the gradient of y and dn that of the new context:
//!
//! ```text
//! dc_t      = dy_t * sigma(c_t) * (1 + c_t * sigma(-c_t))
//! dxx_i     = sum_{j=0..3} weight_j * dc_{i-j}  (0 <= i-j < T),   plus dn_{i-T} for the last three
//! dx_t      = dxx_{t+3},   dcontext_i = dxx_i
//! dweight_j = sum_t dc_t * xx_{t+j},   dbias = sum_t dc_t
//! ```
//!
//! Without a context the three tokens before the first are zeros. A sequence may be cut anywhere: the context that
//! comes out of one part goes into the next. With T < 3 part of the context passes straight into the new one.
//!
//! Source: the short convolutions of Kimi Delta Attention, arXiv 2510.26692.

use ndarray::{Array1, s};
use rayon::prelude::*;

use crate::checked::Checked;
use crate::cpu::{Reference, Tensor};
use crate::dims::Dims;
use crate::error::{Error, Result};
use crate::fields;
use crate::matmul::sum_over_rows;
use crate::scalar::Scalar;
use crate::tensor::Tensors;

/// Tokens that one output sees, itself included.
pub const WIDTH: usize = 4;

/// Tokens carried from one part of a sequence into the next.
pub const CONTEXT: usize = WIDTH - 1;

/// Fewer tokens than this are not worth waking another core for.
const ROWS_PER_TASK: usize = 16;

/// What the operation does besides its shapes: nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {}

fields! {
    /// Activations going in.
    pub struct Inputs {
        /// `[B, T, C]`
        x;
        optional
        /// `[B, 3, C]`, the three tokens before the first, oldest first; zeros if absent.
        context
    }
}

fields! {
    /// Learned parameters; their gradients accumulate into tensors of the same names.
    pub struct Params {
        /// `[4, C]`, the tap of the oldest token first.
        weight;
        optional
        /// `[C]`
        bias
    }
}

fields! {
    /// Activations coming out. As `upstream` of `backward`: their gradients, `context` optional.
    pub struct Outputs {
        /// `[B, T, C]`
        y;
        optional
        /// `[B, 3, C]`, the context of the next part; `forward` always returns it.
        context
    }
}

fields! {
    /// Gradients of the inputs.
    pub struct Grads {
        /// `[B, T, C]`
        dx;
        optional
        /// `[B, 3, C]`; present exactly when `context` went in.
        dcontext
    }
}

/// The operation on a backend.
///
/// # Errors
/// `Shape` if `x` is not `[B, T, C]`, `context` not `[B, 3, C]`, `weight` not `[4, C]`, `bias` not `[C]`, if C = 0 or an
/// upstream gradient has another shape than its output; `Presence` if `into` and the forward pass disagree about
/// `bias`.
pub trait ShortConv: Tensors {
    /// What `forward` hands to `backward`.
    type Saved;

    /// Convolves every channel.
    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&Self::Tensor>,
        params: Params<&Self::Tensor>,
    ) -> Result<(Outputs<Self::Tensor>, Self::Saved)>;

    /// Returns the gradients of `x` and `context` and adds those of the parameters into `into`.
    fn backward(
        &self,
        config: &Config,
        saved: &Self::Saved,
        upstream: Outputs<&Self::Tensor>,
        into: Params<&Self::Tensor>,
    ) -> Result<Grads<Self::Tensor>>;
}

/// What the reference saves: handles of what went in and the derivative of SiLU at every c.
pub struct Saved<T> {
    x: Tensor<T>,
    context: Option<Tensor<T>>,
    weight: Tensor<T>,
    has_bias: bool,
    slope: Vec<T>,
}

impl<T: Scalar> ShortConv for Reference<T> {
    type Saved = Saved<T>;

    #[inline(never)]
    fn forward(
        &self,
        _config: &Config,
        inputs: Inputs<&Tensor<T>>,
        params: Params<&Tensor<T>>,
    ) -> Result<(Outputs<Tensor<T>>, Saved<T>)> {
        const OP: &str = "short_conv::forward";
        let mut dims = dims(OP);
        dims.bind("x", inputs.x.shape(), &["B", "T", "C"])?;
        dims.bind("weight", params.weight.shape(), &["4", "C"])?;
        dims.positive(&["C"])?;
        if let Some(context) = inputs.context {
            dims.bind("context", context.shape(), &["B", "3", "C"])?;
        }
        if let Some(bias) = params.bias {
            dims.bind("bias", bias.shape(), &["C"])?;
        }
        let x = self.read(OP, "x", inputs.x)?;
        let context = inputs.context.map(|context| self.read(OP, "context", context)).transpose()?;
        let weight = self.read(OP, "weight", params.weight)?;
        let bias = params.bias.map(|bias| self.read(OP, "bias", bias)).transpose()?;
        let xx = Joined {
            context: context.as_ref().map(|context| context.slice()),
            x: x.slice(),
            batch: dims.get("B"),
            time: dims.get("T"),
            channels: dims.get("C"),
        };
        let (y, slope) = forward(&xx, weight.slice(), bias.as_ref().map(|bias| bias.slice()));
        let outputs = Outputs {
            y: self.adopt(Array1::from(y), inputs.x.shape()),
            context: Some(self.adopt(Array1::from(xx.last()), &[xx.batch, CONTEXT, xx.channels])),
        };
        let saved = Saved {
            x: inputs.x.clone(),
            context: inputs.context.cloned(),
            weight: params.weight.clone(),
            has_bias: params.bias.is_some(),
            slope,
        };
        Ok((outputs, saved))
    }

    #[inline(never)]
    fn backward(
        &self,
        _config: &Config,
        saved: &Saved<T>,
        upstream: Outputs<&Tensor<T>>,
        into: Params<&Tensor<T>>,
    ) -> Result<Grads<Tensor<T>>> {
        const OP: &str = "short_conv::backward";
        let mut dims = dims(OP);
        dims.bind("x", saved.x.shape(), &["B", "T", "C"])?;
        dims.bind("y", upstream.y.shape(), &["B", "T", "C"])?;
        if let Some(dnext) = upstream.context {
            dims.bind("context", dnext.shape(), &["B", "3", "C"])?;
        }
        dims.bind("weight", into.weight.shape(), &["4", "C"])?;
        let x = self.read(OP, "x", &saved.x)?;
        let context = saved.context.as_ref().map(|context| self.read(OP, "context", context)).transpose()?;
        let weight = self.read(OP, "weight", &saved.weight)?;
        let dy = self.read(OP, "y", upstream.y)?;
        let dnext = upstream.context.map(|dnext| self.read(OP, "context", dnext)).transpose()?;
        let xx = Joined {
            context: context.as_ref().map(|context| context.slice()),
            x: x.slice(),
            batch: dims.get("B"),
            time: dims.get("T"),
            channels: dims.get("C"),
        };
        let dc: Vec<T> = dy.slice().iter().zip(&saved.slope).map(|(&dy, &slope)| dy * slope).collect();
        let dnext = dnext.as_ref().map(|dnext| dnext.slice());
        let (dx, dcontext) = backward_inputs(&xx, weight.slice(), &dc, dnext);
        let (dweight, dbias) = backward_params(&xx, &dc);
        match (into.bias, saved.has_bias) {
            (Some(bias), true) => self.accumulate(OP, "bias", bias, &dbias)?,
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
        self.accumulate(OP, "weight", into.weight, &dweight)?;
        Ok(Grads {
            dx: self.adopt(Array1::from(dx), saved.x.shape()),
            dcontext: saved.context.as_ref().map(|context| self.adopt(Array1::from(dcontext), context.shape())),
        })
    }
}

impl<B: ShortConv> ShortConv for Checked<B> {
    type Saved = B::Saved;

    fn forward(
        &self,
        config: &Config,
        inputs: Inputs<&B::Tensor>,
        params: Params<&B::Tensor>,
    ) -> Result<(Outputs<B::Tensor>, B::Saved)> {
        const OP: &str = "short_conv::forward";
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
        self.finite("short_conv::backward", upstream.clone().named())?;
        self.0.backward(config, saved, upstream, into)
    }
}

/// A shape check that knows the two fixed lengths.
fn dims(op: &'static str) -> Dims {
    let mut dims = Dims::new(op);
    dims.set("4", WIDTH, "the width");
    dims.set("3", CONTEXT, "the width");
    dims
}

/// xx = [context; x], without copying either.
struct Joined<'a, T> {
    context: Option<&'a [T]>,
    x: &'a [T],
    batch: usize,
    time: usize,
    channels: usize,
}

impl<'a, T: Scalar> Joined<'a, T> {
    /// xx_i of one sequence, i from 0 to T + 2; `None` stands for zeros.
    fn row(&self, b: usize, i: usize) -> Option<&'a [T]> {
        match i.checked_sub(CONTEXT) {
            Some(t) => Some(row(self.x, b * self.time + t, self.channels)),
            None => self.context.map(|context| row(context, b * CONTEXT + i, self.channels)),
        }
    }

    /// The last three of xx: `[B, 3, C]`.
    fn last(&self) -> Vec<T> {
        let mut last = vec![T::zero(); self.batch * CONTEXT * self.channels];
        for (n, last) in last.chunks_exact_mut(self.channels).enumerate() {
            if let Some(row) = self.row(n / CONTEXT, self.time + n % CONTEXT) {
                last.copy_from_slice(row);
            }
        }
        last
    }
}

/// Row `n` of contiguous rows.
fn row<T>(rows: &[T], n: usize, width: usize) -> &[T] {
    &rows[n * width..(n + 1) * width]
}

/// `sum += a * b`, element by element.
fn add_product<T: Scalar>(sum: &mut [T], a: &[T], b: &[T]) {
    for ((sum, &a), &b) in sum.iter_mut().zip(a).zip(b) {
        *sum += a * b;
    }
}

fn add<T: Scalar>(sum: &mut [T], a: &[T]) {
    for (sum, &a) in sum.iter_mut().zip(a) {
        *sum += a;
    }
}

/// y and the derivative of SiLU at c.
fn forward<T: Scalar>(xx: &Joined<'_, T>, weight: &[T], bias: Option<&[T]>) -> (Vec<T>, Vec<T>) {
    let channels = xx.channels;
    let mut y = vec![T::zero(); xx.x.len()];
    let mut slope = vec![T::zero(); xx.x.len()];
    let rows = (y.par_chunks_mut(channels), slope.par_chunks_mut(channels)).into_par_iter().enumerate();
    rows.with_min_len(ROWS_PER_TASK).for_each(|(n, (y, slope))| {
        let (b, t) = (n / xx.time, n % xx.time);
        let c = y;
        if let Some(bias) = bias {
            c.copy_from_slice(bias);
        }
        for j in 0..WIDTH {
            if let Some(x) = xx.row(b, t + j) {
                add_product(c, row(weight, j, channels), x);
            }
        }
        for (c, slope) in c.iter_mut().zip(slope) {
            let (open, closed) = c.sigmoids();
            *slope = open * (T::one() + *c * closed);
            *c *= open;
        }
    });
    (y, slope)
}

/// dx and dcontext (the latter has a meaning only if there was a context).
fn backward_inputs<T: Scalar>(xx: &Joined<'_, T>, weight: &[T], dc: &[T], dnext: Option<&[T]>) -> (Vec<T>, Vec<T>) {
    let (time, channels) = (xx.time, xx.channels);
    // Writes dxx_i of sequence b into zeros.
    let fill = |dxx: &mut [T], b: usize, i: usize| {
        for j in 0..WIDTH {
            if let Some(t) = i.checked_sub(j).filter(|&t| t < time) {
                add_product(dxx, row(weight, j, channels), row(dc, b * time + t, channels));
            }
        }
        if let (Some(dnext), Some(m)) = (dnext, i.checked_sub(time)) {
            add(dxx, row(dnext, b * CONTEXT + m, channels));
        }
    };
    let mut dx = vec![T::zero(); xx.x.len()];
    let rows = dx.par_chunks_mut(channels).enumerate();
    rows.with_min_len(ROWS_PER_TASK).for_each(|(n, dx)| fill(dx, n / time, n % time + CONTEXT));
    let mut dcontext = vec![T::zero(); xx.batch * CONTEXT * channels];
    for (n, dcontext) in dcontext.chunks_exact_mut(channels).enumerate() {
        fill(dcontext, n / CONTEXT, n % CONTEXT);
    }
    (dx, dcontext)
}

/// dweight (flat) and dbias.
fn backward_params<T: Scalar>(xx: &Joined<'_, T>, dc: &[T]) -> (Array1<T>, Array1<T>) {
    let (time, channels) = (xx.time, xx.channels);
    // One pass over the rows sums all five: the four taps, then the bias.
    let sums = sum_over_rows(xx.batch * time, (WIDTH + 1) * channels, |rows| {
        let mut sums = vec![T::zero(); (WIDTH + 1) * channels];
        for n in rows {
            let (b, t) = (n / time, n % time);
            let dc = row(dc, n, channels);
            let (taps, bias) = sums.split_at_mut(WIDTH * channels);
            for (j, tap) in taps.chunks_exact_mut(channels).enumerate() {
                if let Some(x) = xx.row(b, t + j) {
                    add_product(tap, dc, x);
                }
            }
            add(bias, dc);
        }
        Array1::from(sums)
    });
    (sums.slice(s![..WIDTH * channels]).to_owned(), sums.slice(s![WIDTH * channels..]).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;
    use approx::assert_abs_diff_eq;
    use ndarray::{Array, Array3, ArrayD, IxDyn, array, concatenate};

    /// Numbers without a pattern that a wrong index could reproduce.
    fn numbers(shape: &[usize], seed: usize) -> ArrayD<f64> {
        let mut n = seed;
        Array::from_shape_simple_fn(IxDyn(shape), || {
            n = (n * 7919 + 104_729) % 1_000_003;
            n as f64 / 500_001.5 - 1.0
        })
    }

    #[derive(Debug, PartialEq)]
    struct Result {
        y: ArrayD<f64>,
        next: ArrayD<f64>,
        dx: ArrayD<f64>,
        dcontext: Option<ArrayD<f64>>,
        dweight: ArrayD<f64>,
        dbias: ArrayD<f64>,
    }

    fn run(x: &ArrayD<f64>, context: Option<&ArrayD<f64>>, dy: &ArrayD<f64>, dnext: Option<&ArrayD<f64>>) -> Result {
        let b = Reference::<f64>::new();
        let channels = x.shape()[2];
        let constant = |x: &ArrayD<f64>| b.constant(x.clone());
        let (x, context) = (constant(x), context.map(constant));
        let (weight, bias) = (constant(&numbers(&[4, channels], 1)), constant(&numbers(&[channels], 2)));
        let inputs = Inputs { x: &x, context: context.as_ref() };
        let params = Params { weight: &weight, bias: Some(&bias) };
        let (out, saved) = b.forward(&Config {}, inputs, params).unwrap();
        let (dy, dnext) = (constant(dy), dnext.map(constant));
        let dweight = b.persistent(&[4, channels], DType::F64).unwrap();
        let dbias = b.persistent(&[channels], DType::F64).unwrap();
        let upstream = Outputs { y: &dy, context: dnext.as_ref() };
        let into = Params { weight: &dweight, bias: Some(&dbias) };
        let grads = b.backward(&Config {}, &saved, upstream, into).unwrap();
        Result {
            y: b.download(&out.y).unwrap(),
            next: b.download(&out.context.unwrap()).unwrap(),
            dx: b.download(&grads.dx).unwrap(),
            dcontext: grads.dcontext.map(|d| b.download(&d).unwrap()),
            dweight: b.download(&dweight).unwrap(),
            dbias: b.download(&dbias).unwrap(),
        }
    }

    fn close_abs(got: &ArrayD<f64>, want: &ArrayD<f64>, epsilon: f64) {
        assert_eq!(got.shape(), want.shape());
        for (&got, &want) in got.iter().zip(want) {
            assert_abs_diff_eq!(got, want, epsilon = epsilon);
        }
    }

    #[test]
    fn the_last_tap_meets_the_present_token() {
        let b = Reference::<f64>::new();
        let x = b.constant(array![[[1.0], [10.0], [100.0], [1000.0]]].into_dyn());
        let weight = b.constant(array![[4.0], [3.0], [2.0], [1.0]].into_dyn());
        let params = Params { weight: &weight, bias: None };
        let (out, _) = b.forward(&Config {}, Inputs { x: &x, context: None }, params).unwrap();
        let c = [1.0, 12.0, 123.0, 1234.0f64];
        let silu: Vec<f64> = c.iter().map(|c| c / (1.0 + (-c).exp())).collect();
        close_abs(&b.download(&out.y).unwrap(), &ArrayD::from_shape_vec(vec![1, 4, 1], silu).unwrap(), 1e-12);
        assert_eq!(b.download(&out.context.unwrap()).unwrap(), array![[[10.0], [100.0], [1000.0]]].into_dyn());
    }

    #[test]
    fn a_cut_sequence_equals_the_whole_one_in_both_directions() {
        let (x, context) = (numbers(&[2, 9, 3], 3), numbers(&[2, 3, 3], 4));
        let (dy, dnext) = (numbers(&[2, 9, 3], 5), numbers(&[2, 3, 3], 6));
        let whole = run(&x, Some(&context), &dy, Some(&dnext));
        let axis = ndarray::Axis(1);
        // Cuts before and after the third token: parts shorter than the context hand part of it straight on.
        for cut in [0, 1, 2, 3, 4, 8, 9] {
            let (x1, x2) = x.view().split_at(axis, cut);
            let (dy1, dy2) = dy.view().split_at(axis, cut);
            let (x1, x2, dy1, dy2) = (x1.to_owned(), x2.to_owned(), dy1.to_owned(), dy2.to_owned());
            let next = run(&x1, Some(&context), &dy1, None).next;
            let second = run(&x2, Some(&next), &dy2, Some(&dnext));
            let first = run(&x1, Some(&context), &dy1, second.dcontext.as_ref());
            let joined = |a: &ArrayD<f64>, b: &ArrayD<f64>| concatenate![axis, a.view(), b.view()];
            assert_eq!(joined(&first.y, &second.y), whole.y, "cut {cut}");
            assert_eq!(second.next, whole.next, "cut {cut}");
            close_abs(&joined(&first.dx, &second.dx), &whole.dx, 1e-14);
            close_abs(&first.dcontext.unwrap(), whole.dcontext.as_ref().unwrap(), 1e-14);
            close_abs(&(&first.dweight + &second.dweight), &whole.dweight, 1e-13);
            close_abs(&(&first.dbias + &second.dbias), &whole.dbias, 1e-13);
        }
    }

    #[test]
    fn no_context_is_a_context_of_zeros() {
        let (x, dy, dnext) = (numbers(&[2, 2, 3], 3), numbers(&[2, 2, 3], 5), numbers(&[2, 3, 3], 6));
        let absent = run(&x, None, &dy, Some(&dnext));
        let zeros = run(&x, Some(&ArrayD::zeros(vec![2, 3, 3])), &dy, Some(&dnext));
        assert_eq!(absent.dcontext, None);
        assert_eq!(Result { dcontext: None, ..zeros }, absent);
    }

    #[test]
    fn d6_padding_on_the_right_changes_no_real_row_and_no_gradient() {
        let (x, dy) = (numbers(&[2, 20, 3], 3), numbers(&[2, 20, 3], 5));
        let mut padded_x = numbers(&[2, 32, 3], 9);
        let mut padded_dy = Array3::zeros((2, 32, 3)).into_dyn();
        padded_x.slice_mut(s![.., ..20, ..]).assign(&x);
        padded_dy.slice_mut(s![.., ..20, ..]).assign(&dy);
        let (plain, padded) = (run(&x, None, &dy, None), run(&padded_x, None, &padded_dy, None));
        assert_eq!(padded.y.slice(s![.., ..20, ..]).into_dyn(), plain.y);
        assert_eq!(padded.dx.slice(s![.., ..20, ..]).into_dyn(), plain.dx);
        assert!(padded.dx.slice(s![.., 20.., ..]).iter().all(|&d| d == 0.0));
        assert_eq!((padded.dweight, padded.dbias), (plain.dweight, plain.dbias));
    }

    #[test]
    fn no_tokens_pass_the_context_on_and_no_batch_is_empty() {
        let (context, dnext) = (numbers(&[2, 3, 3], 4), numbers(&[2, 3, 3], 6));
        let none = ArrayD::zeros(vec![2, 0, 3]);
        let r = run(&none, Some(&context), &none, Some(&dnext));
        assert_eq!((&r.y, &r.dx), (&none, &none));
        assert_eq!((r.next, r.dcontext), (context, Some(dnext)));
        assert_eq!((r.dweight, r.dbias), (ArrayD::zeros(vec![4, 3]), ArrayD::zeros(vec![3])));
        let none = ArrayD::zeros(vec![0, 5, 3]);
        let r = run(&none, None, &none, None);
        assert_eq!((r.y, r.dx), (none.clone(), none));
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let b = Reference::<f64>::new();
        let zeros = |shape: &[usize]| b.persistent(shape, DType::F64).unwrap();
        let (x, weight, bias) = (zeros(&[2, 5, 3]), zeros(&[4, 3]), zeros(&[3]));
        let forward = |x: &_, context: Option<&Tensor<f64>>, weight: &_, bias: Option<&Tensor<f64>>| {
            let result = b.forward(&Config {}, Inputs { x, context }, Params { weight, bias });
            result.map(|_| ()).unwrap_err().to_string()
        };
        assert_eq!(
            forward(&zeros(&[5, 3]), None, &weight, None),
            "short_conv::forward: `x` is [5, 3], expected [B, T, C]"
        );
        assert_eq!(
            forward(&x, Some(&zeros(&[2, 4, 3])), &weight, None),
            "short_conv::forward: `context` is [2, 4, 3], expected [B, 3, C] = [2, 3, 3] (3 from `the width`)"
        );
        assert_eq!(
            forward(&x, None, &zeros(&[3, 3]), None),
            "short_conv::forward: `weight` is [3, 3], expected [4, C] = [4, 3] (4 from `the width`)"
        );
        assert_eq!(
            forward(&x, None, &weight, Some(&zeros(&[4]))),
            "short_conv::forward: `bias` is [4], expected [C] = [3] (C from `x`)"
        );
        assert_eq!(
            forward(&zeros(&[2, 5, 0]), None, &zeros(&[4, 0]), None),
            "short_conv::forward: `x` is [0], expected C >= 1"
        );
        let params = Params { weight: &weight, bias: None };
        let (out, saved) = b.forward(&Config {}, Inputs { x: &x, context: None }, params).unwrap();
        let backward = |y: &_, context: Option<&Tensor<f64>>, weight: &_, bias: Option<&Tensor<f64>>| {
            let result = b.backward(&Config {}, &saved, Outputs { y, context }, Params { weight, bias });
            result.map(|_| ()).unwrap_err().to_string()
        };
        assert_eq!(
            backward(&zeros(&[2, 6, 3]), None, &weight, None),
            "short_conv::backward: `y` is [2, 6, 3], expected [B, T, C] = [2, 5, 3] (T from `x`)"
        );
        assert_eq!(
            backward(&out.y, Some(&zeros(&[1, 3, 3])), &weight, None),
            "short_conv::backward: `context` is [1, 3, 3], expected [B, 3, C] = [2, 3, 3] (B from `x`)"
        );
        assert_eq!(
            backward(&out.y, None, &zeros(&[3, 4]), None),
            "short_conv::backward: `weight` is [3, 4], expected [4, C] = [4, 3] (4 from `the width`, C from `x`)"
        );
        assert_eq!(
            backward(&out.y, None, &weight, Some(&bias)),
            "short_conv::backward: `bias` is present, expected it absent because forward had none"
        );
        let params = Params { weight: &weight, bias: Some(&bias) };
        let (out, saved) = b.forward(&Config {}, Inputs { x: &x, context: None }, params).unwrap();
        let upstream = Outputs { y: &out.y, context: None };
        let error = b.backward(&Config {}, &saved, upstream, Params { weight: &zeros(&[4, 3]), bias: None });
        assert_eq!(
            error.map(|_| ()).unwrap_err().to_string(),
            "short_conv::backward: `bias` is absent, expected it present because forward had one"
        );
    }
}
