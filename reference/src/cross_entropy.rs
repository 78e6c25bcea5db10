//! `cross_entropy`: the mean negative log-likelihood of target classes under the softmax of logits, in nats.
//!
//! ```text
//! m      = max_c z_c
//! rest   = sum_{c != t} e^(z_c - m)               (t the target class)
//! nll    = ln(e^(z_t - m) + rest) - (z_t - m)     for every position that the mask keeps, 0 for the others
//! loss   = sum_positions nll / n                  n = denominator, else the number of kept positions
//! ```
//!
//! Adjoint, with dloss the gradient of the loss and S = e^(z_t - m) + rest:
//!
//! ```text
//! dz_c = dloss / n * e^(z_c - m) / S              c != t
//! dz_t = -dloss / n * rest / S
//! ```
//!
//! Taking out the row maximum keeps every exponent at or below zero, so no finite logits overflow. `rest` is summed
//! without the target because a confident model lives there: `1 - p_t` and `-ln p_t` from a rounded `p_t` are zero in
//! `f32` as soon as p_t > 1 - 6e-8, and training would stop; `rest / S` and `ln(1 + rest / e^(z_t - m))` keep all
//! digits.
//!
//! A position with mask 0 is never looked at: it contributes exactly zero to loss and gradient whatever its logits
//! hold, NaN included. With n = 0 the loss and all gradients are zero.

use ndarray::{Array1, Array2, ArrayView2, Axis};
use rayon::prelude::*;

use crate::checked::Checked;
use crate::cpu::{Reference, Tensor};
use crate::dims::Dims;
use crate::error::{Error, Result};
use crate::fields;
use crate::matmul::sum_over_rows;
use crate::scalar::Scalar;
use crate::tensor::Tensors;

/// Rows that one task takes at least: a row costs microseconds, waking a thread costs more.
const TASK_ROWS: usize = 16;

/// What the operation does besides its shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// What the sum over positions is divided by; `None` is the number of positions that the mask keeps. A step that
    /// accumulates several micro-batches gives the count of all of them here.
    pub denominator: Option<usize>,
}

fields! {
    /// What goes in.
    pub struct Inputs {
        /// `[.., C]`
        logits,
        /// `[..]` of `u8` or `u32`, each below C (at masked positions too).
        targets;
        optional
        /// `[..]`, real or integer, 0 or 1: whether the position counts.
        mask
    }
}

fields! {
    /// What comes out. As `upstream` of `backward`: the gradient of `loss`; `nll` must be absent.
    pub struct Outputs {
        /// `[1]`, nats.
        loss;
        optional
        /// `[..]`, nats of each position, 0 where masked; `forward` always returns it.
        nll
    }
}

fields! {
    /// Gradients of the inputs.
    pub struct Grads {
        /// `[.., C]`
        dlogits
    }
}

/// The operation on a backend.
///
/// # Errors
/// `Shape` if `targets` or `mask` have another number of positions than `logits`, or if C = 0; `Value` if a target is
/// not below C (the reference always looks, other backends only as `Checked`); `Presence` if `nll` has an upstream
/// gradient.
pub trait CrossEntropy: Tensors {
    /// What `forward` hands to `backward`.
    type Saved;

    /// The mean loss and the loss of every position.
    fn forward(&self, config: &Config, inputs: Inputs<&Self::Tensor>) -> Result<(Outputs<Self::Tensor>, Self::Saved)>;

    /// Returns the gradient of the logits.
    fn backward(
        &self,
        config: &Config,
        saved: &Self::Saved,
        upstream: Outputs<&Self::Tensor>,
    ) -> Result<Grads<Self::Tensor>>;
}

/// What the reference saves: the inputs, and the sums of each row so that `backward` needs one pass.
pub struct Saved<T> {
    logits: Tensor<T>,
    targets: Vec<u32>,
    /// `None` where masked.
    rows: Vec<Option<Row<T>>>,
}

/// The sums of one row, all relative to its maximum.
struct Row<T> {
    max: T,
    /// z_t - max
    shifted: T,
    /// e^shifted
    target: T,
    /// The sum of e^(z_c - max) over c != t.
    rest: T,
}

impl<T: Scalar> CrossEntropy for Reference<T> {
    type Saved = Saved<T>;

    #[inline(never)]
    fn forward(&self, config: &Config, inputs: Inputs<&Tensor<T>>) -> Result<(Outputs<Tensor<T>>, Saved<T>)> {
        const OP: &str = "cross_entropy::forward";
        let classes = check_shapes(OP, inputs.clone().map(|_, tensor| tensor.shape()))?;
        let targets = self.read_ids(OP, "targets", inputs.targets)?;
        check_targets(OP, inputs.targets.shape(), targets.iter().map(|&t| f64::from(t)), classes)?;
        let kept = match inputs.mask {
            None => vec![true; targets.len()],
            Some(mask) if self.dtype(mask).is_float() => {
                self.read(OP, "mask", mask)?.slice().iter().map(|x| x.to_f64() != 0.0).collect()
            }
            Some(mask) => self.read_ids(OP, "mask", mask)?.into_iter().map(|x| x != 0).collect(),
        };
        let logits = self.read(OP, "logits", inputs.logits)?;
        let rows = forward(logits.rows(), &targets, &kept);
        let nll: Array1<T> = rows.iter().map(|row| row.as_ref().map_or(T::zero(), Row::nll)).collect();
        let sum = sum_over_rows(nll.len(), 1, |block| Array1::from_elem(1, block.map(|n| nll[n]).sum::<T>()));
        let loss = sum * share(config, &rows);
        let (_, positions) = inputs.logits.shape().split_last().expect("check_shapes found the axis C");
        let outputs = Outputs { loss: self.adopt(loss, &[1]), nll: Some(self.adopt(nll, positions)) };
        Ok((outputs, Saved { logits: inputs.logits.clone(), targets, rows }))
    }

    #[inline(never)]
    fn backward(&self, config: &Config, saved: &Saved<T>, upstream: Outputs<&Tensor<T>>) -> Result<Grads<Tensor<T>>> {
        const OP: &str = "cross_entropy::backward";
        if upstream.nll.is_some() {
            return Err(Error::Presence {
                op: OP,
                arg: "nll",
                expected: "absent because only `loss` is differentiated",
                got: "present",
            });
        }
        let dloss = self.read_one(OP, "loss", upstream.loss)?;
        let logits = self.read(OP, "logits", &saved.logits)?;
        let dlogits = backward(logits.rows(), &saved.targets, &saved.rows, dloss * share(config, &saved.rows));
        Ok(Grads { dlogits: self.adopt(dlogits, saved.logits.shape()) })
    }
}

impl<B: CrossEntropy> CrossEntropy for Checked<B> {
    type Saved = B::Saved;

    fn forward(&self, config: &Config, inputs: Inputs<&B::Tensor>) -> Result<(Outputs<B::Tensor>, B::Saved)> {
        const OP: &str = "cross_entropy::forward";
        let classes = check_shapes(OP, inputs.clone().map(|_, tensor| self.shape(tensor)))?;
        self.finite(OP, [("logits", inputs.logits)])?;
        let targets = self.download(inputs.targets)?;
        check_targets(OP, self.shape(inputs.targets), targets.iter().copied(), classes)?;
        if let Some(mask) = inputs.mask {
            self.every(OP, "mask", mask, "0 or 1", |x| x == 0.0 || x == 1.0)?;
        }
        self.0.forward(config, inputs)
    }

    fn backward(&self, config: &Config, saved: &B::Saved, upstream: Outputs<&B::Tensor>) -> Result<Grads<B::Tensor>> {
        self.finite("cross_entropy::backward", upstream.clone().named())?;
        self.0.backward(config, saved, upstream)
    }
}

/// Checks the shapes of the inputs; returns C.
fn check_shapes(op: &'static str, shapes: Inputs<&[usize]>) -> Result<usize> {
    let mut dims = Dims::new(op);
    dims.bind_rows("logits", shapes.logits, "N", &["C"])?;
    dims.positive(&["C"])?;
    dims.bind_rows("targets", shapes.targets, "N", &[])?;
    if let Some(mask) = shapes.mask {
        dims.bind_rows("mask", mask, "N", &[])?;
    }
    Ok(dims.get("C"))
}

fn check_targets(op: &'static str, shape: &[usize], targets: impl Iterator<Item = f64>, classes: usize) -> Result<()> {
    let Some((mut flat, got)) = targets.enumerate().find(|&(_, t)| t >= classes as f64) else {
        return Ok(());
    };
    let mut index = vec![0; shape.len()];
    for (i, &len) in index.iter_mut().zip(shape).rev() {
        *i = flat % len;
        flat /= len;
    }
    Err(Error::Value { op, arg: "targets", expected: format!("below C = {classes}"), got, index })
}

/// 1 / n, or 0 where n = 0.
fn share<T: Scalar>(config: &Config, rows: &[Option<Row<T>>]) -> T {
    match config.denominator.unwrap_or_else(|| rows.iter().flatten().count()) {
        0 => T::zero(),
        n => T::one() / T::from_f64(n as f64),
    }
}

/// The sums of every kept row of `logits` (`[N, C]`).
fn forward<T: Scalar>(logits: ArrayView2<'_, T>, targets: &[u32], kept: &[bool]) -> Vec<Option<Row<T>>> {
    (0..logits.nrows())
        .into_par_iter()
        .with_min_len(TASK_ROWS)
        .map(|n| {
            let row = logits.row(n);
            kept[n].then(|| Row::of(row.to_slice().expect("rows are contiguous"), targets[n] as usize))
        })
        .collect()
}

/// dlogits for `scale` = dloss / n.
fn backward<T: Scalar>(logits: ArrayView2<'_, T>, targets: &[u32], rows: &[Option<Row<T>>], scale: T) -> Array2<T> {
    let mut dlogits = Array2::zeros(logits.raw_dim());
    dlogits.axis_iter_mut(Axis(0)).into_par_iter().with_min_len(TASK_ROWS).enumerate().for_each(|(n, mut dz)| {
        // A masked row keeps its zeros.
        let Some(row) = &rows[n] else { return };
        let factor = scale / (row.target + row.rest);
        for (dz, &z) in dz.iter_mut().zip(logits.row(n)) {
            *dz = factor * (z - row.max).exp();
        }
        dz[targets[n] as usize] = -factor * row.rest;
    });
    dlogits
}

impl<T: Scalar> Row<T> {
    /// The sums of logits `z` with target class `t`.
    fn of(z: &[T], t: usize) -> Self {
        let max = z.iter().fold(z[0], |max, &x| max.max(x));
        let sum = |part: &[T]| part.iter().map(|&x| (x - max).exp()).sum::<T>();
        let shifted = z[t] - max;
        Self { max, shifted, target: shifted.exp(), rest: sum(&z[..t]) + sum(&z[t + 1..]) }
    }

    /// ln(target + rest) - shifted, in the form that keeps its digits when the target is likely.
    fn nll(&self) -> T {
        if self.target > self.rest {
            (self.rest / self.target).ln_1p()
        } else {
            (self.target + self.rest).ln() - self.shifted
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::{assert_abs_diff_eq, assert_relative_eq};
    use ndarray::{ArrayD, array};

    use crate::tensor::DType;

    const MEAN: Config = Config { denominator: None };

    fn ids(b: &Reference<f32>, values: &[u8]) -> Tensor<f32> {
        let tensor = b.persistent(&[values.len()], DType::U8).unwrap();
        b.upload(Array1::from_iter(values.iter().map(|&x| f64::from(x))).into_dyn().view(), &tensor).unwrap();
        tensor
    }

    /// Loss, nll and the gradient for dloss = 1.
    fn run(
        config: &Config,
        logits: Array2<f32>,
        targets: &[u8],
        mask: Option<&[f32]>,
    ) -> (f64, ArrayD<f64>, ArrayD<f64>) {
        let b = Reference::<f32>::new();
        let logits = b.constant(logits.into_dyn());
        let targets = ids(&b, targets);
        let mask = mask.map(|mask| b.constant(Array1::from(mask.to_vec()).into_dyn()));
        let inputs = Inputs { logits: &logits, targets: &targets, mask: mask.as_ref() };
        let (outputs, saved) = b.forward(config, inputs).unwrap();
        let one = b.constant(array![1.0].into_dyn());
        let grads = b.backward(config, &saved, Outputs { loss: &one, nll: None }).unwrap();
        let loss = b.download(&outputs.loss).unwrap()[0];
        (loss, b.download(&outputs.nll.unwrap()).unwrap(), b.download(&grads.dlogits).unwrap())
    }

    #[test]
    fn hand_values() {
        // Softmax of ln 1, ln 2, ln 5 is 1/8, 2/8, 5/8.
        let z = array![[0.0, 2f32.ln(), 5f32.ln()], [0.0, 2f32.ln(), 5f32.ln()]];
        let (loss, nll, dlogits) = run(&MEAN, z, &[1, 2], None);
        assert_relative_eq!(nll[0], 4f64.ln(), max_relative = 1e-6);
        assert_relative_eq!(nll[1], 1.6f64.ln(), max_relative = 1e-6);
        assert_relative_eq!(loss, (4f64.ln() + 1.6f64.ln()) / 2.0, max_relative = 1e-6);
        let sixteenths = [1.0, -6.0, 5.0, 1.0, 2.0, -3.0];
        assert_abs_diff_eq!((dlogits * 16.0).as_slice().unwrap(), &sixteenths[..], epsilon = 1e-5);
    }

    #[test]
    fn logits_of_1e30_do_not_overflow() {
        let (loss, _, dlogits) = run(&MEAN, array![[1e30, -1e30, 0.0]], &[1], None);
        assert_relative_eq!(loss, 2e30, max_relative = 1e-6);
        assert_eq!(dlogits, array![[1.0, -1.0, 0.0]].into_dyn());
        let (loss, _, dlogits) = run(&MEAN, array![[1e30, -1e30, 0.0]], &[0], None);
        assert_eq!((loss, dlogits), (0.0, array![[0.0, 0.0, 0.0]].into_dyn()));
    }

    #[test]
    fn a_confident_row_keeps_its_loss_and_its_gradient() {
        let (loss, _, dlogits) = run(&MEAN, array![[20.0, 0.0]], &[0], None);
        let rest = (-20f64).exp();
        assert_relative_eq!(loss, rest.ln_1p(), max_relative = 1e-6);
        assert_relative_eq!(dlogits[[0, 0]], -rest / (1.0 + rest), max_relative = 1e-6);
        assert_relative_eq!(dlogits[[0, 1]], rest / (1.0 + rest), max_relative = 1e-6);
    }

    #[test]
    fn l2_a_fully_masked_batch_has_loss_zero_and_gradient_zero() {
        let (loss, nll, dlogits) = run(&MEAN, array![[1.0, 2.0], [3.0, -1.0]], &[0, 1], Some(&[0.0, 0.0]));
        assert_eq!((loss, nll, dlogits), (0.0, array![0.0, 0.0].into_dyn(), Array2::zeros((2, 2)).into_dyn()));
    }

    #[test]
    fn a_masked_position_contributes_exactly_zero_whatever_it_holds() {
        let (loss, nll, dlogits) =
            run(&MEAN, array![[f32::NAN, f32::INFINITY], [0.0, 0.0]], &[0, 1], Some(&[0.0, 1.0]));
        assert_relative_eq!(loss, 2f64.ln(), max_relative = 1e-6);
        assert_eq!(nll[0], 0.0);
        assert_eq!(dlogits, array![[0.0, 0.0], [0.5, -0.5]].into_dyn());
    }

    #[test]
    fn the_denominator_replaces_the_count() {
        let z = array![[0.0, 0.0], [0.0, 0.0]];
        let (loss, _, dlogits) = run(&Config { denominator: Some(8) }, z.clone(), &[0, 1], Some(&[1.0, 0.0]));
        assert_relative_eq!(loss, 2f64.ln() / 8.0, max_relative = 1e-6);
        assert_eq!(dlogits, array![[-0.0625, 0.0625], [0.0, 0.0]].into_dyn());
        let (loss, _, dlogits) = run(&Config { denominator: Some(0) }, z, &[0, 1], None);
        assert_eq!((loss, dlogits), (0.0, Array2::zeros((2, 2)).into_dyn()));
    }

    #[test]
    fn an_empty_batch_has_loss_zero() {
        let (loss, nll, dlogits) = run(&MEAN, Array2::zeros((0, 3)), &[], None);
        assert_eq!((loss, nll.len(), dlogits.shape()), (0.0, 0, &[0, 3][..]));
    }

    #[test]
    fn refusals() {
        let b = Reference::<f32>::new();
        let logits = b.constant(ArrayD::zeros(vec![2, 3]));
        let attempt = |logits: &Tensor<f32>, targets: &[u8], mask: Option<&[u8]>| {
            let (targets, mask) = (ids(&b, targets), mask.map(|mask| ids(&b, mask)));
            let result = b.forward(&MEAN, Inputs { logits, targets: &targets, mask: mask.as_ref() });
            result.err().expect("the call must be refused").to_string()
        };
        assert_eq!(attempt(&logits, &[0, 3], None), "cross_entropy::forward: `targets`[1] is 3, expected below C = 3");
        assert_eq!(
            attempt(&logits, &[0], None),
            "cross_entropy::forward: `targets` is [1], expected [N] = [2] (N from `logits`)"
        );
        assert_eq!(
            attempt(&logits, &[0, 0], Some(&[1, 1, 1])),
            "cross_entropy::forward: `mask` is [3], expected [N] = [2] (N from `logits`)"
        );
        let empty = b.constant(ArrayD::zeros(vec![2, 0]));
        assert_eq!(attempt(&empty, &[0, 0], None), "cross_entropy::forward: `logits` is [0], expected C >= 1");
        let (outputs, saved) =
            b.forward(&MEAN, Inputs { logits: &logits, targets: &ids(&b, &[0, 0]), mask: None }).unwrap();
        let upstream = Outputs { loss: &outputs.loss, nll: outputs.nll.as_ref() };
        assert_eq!(
            b.backward(&MEAN, &saved, upstream).unwrap_err().to_string(),
            "cross_entropy::backward: `nll` is present, expected it absent because only `loss` is differentiated"
        );
        let checked = Checked(b);
        let mask = checked.0.constant(array![1.0, 0.5].into_dyn());
        let targets = ids(&checked.0, &[0, 0]);
        let inputs = Inputs { logits: &logits, targets: &targets, mask: Some(&mask) };
        let error = checked.forward(&MEAN, inputs).err().expect("the call must be refused");
        assert_eq!(error.to_string(), "cross_entropy::forward: `mask`[1] is 0.5, expected 0 or 1");
    }
}
