//! `adamw`: Adam with decoupled weight decay, in place on flat buffers.
//!
//! For every element of every group, with g = scale * grad and t = updates:
//!
//! ```text
//! m <- beta1 m + (1 - beta1) g
//! v <- beta2 v + (1 - beta2) g^2
//! p <- p - lr * ( (m / (1 - beta1^t)) / ( (v / (1 - beta2^t))^(1/2) + eps ) + weight_decay * p )
//! ```
//!
//! `updates` counts the applied updates and includes this one, so the first has t = 1. With `apply` = 0 nothing is
//! written: parameters and moments keep every bit, whatever the gradients hold. The same is true of elements outside
//! every group. Learning rate, scale, flag and count are read from tensors, because they change from step to step and
//! a captured step replays constants.
//!
//! An optimiser has no gradient, so there is no backward. In `f32`, |g| must stay below 1.8e19, where its square
//! overflows and freezes the element for good; clipping by norm keeps it there.
//!
//! Source: Loshchilov and Hutter, *Decoupled Weight Decay Regularization*, arXiv 1711.05101.

use std::ops::Range;

use rayon::prelude::*;

use crate::checked::Checked;
use crate::cpu::{Reference, Tensor};
use crate::dims::{Dims, check_apart};
use crate::error::{Error, Result};
use crate::fields;
use crate::sanitise::check_ranges;
use crate::scalar::Scalar;
use crate::tensor::Tensors;

/// Elements that one task updates.
const BLOCK: usize = 1 << 14;

/// What the operation does besides its shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// How much of the first moment stays, in [0, 1).
    pub beta1: f64,
    /// How much of the second moment stays, in [0, 1).
    pub beta2: f64,
    /// Added to the root of the second moment. Greater than zero.
    pub eps: f64,
    /// Who moves. The ranges are disjoint and inside the buffers.
    pub groups: Vec<Group>,
}

/// Elements that share a weight decay.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// The elements.
    pub range: Range<usize>,
    /// The share of a parameter that an update at learning rate 1 takes away. Zero or greater.
    pub weight_decay: f64,
}

fields! {
    /// The flat buffers, each an allocation of its own. All but `grads` change in place.
    pub struct State {
        /// `[P]`
        params,
        /// `[P]`
        grads,
        /// `[P]`, first moment; zero before the first update.
        m,
        /// `[P]`, second moment; zero before the first update.
        v
    }
}

fields! {
    /// What changes from step to step, all `[1]`.
    pub struct Scalars {
        /// `[1]`, learning rate.
        lr,
        /// `[1]`, what gradients are multiplied by.
        scale,
        /// `[1]`, 1 if the update is to happen, 0 if not.
        apply,
        /// `[1]` of `u32`, applied updates including this one: at least 1.
        updates
    }
}

/// The operation on a backend.
///
/// # Errors
/// `Shape` if the buffers are not all `[P]` or a scalar is not `[1]`; `NotPersistent` if `params`, `m` or `v` is
/// scratch; `Aliased` if two buffers are one allocation; `Config` if a beta is outside [0, 1), `eps` or a weight decay
/// out of range, or a group leaves the buffer or overlaps another.
pub trait Adamw: Tensors {
    /// Moves every group once, or nothing if `apply` is 0.
    fn update(&self, config: &Config, state: State<&Self::Tensor>, scalars: Scalars<&Self::Tensor>) -> Result<()>;
}

impl<T: Scalar> Adamw for Reference<T> {
    #[inline(never)]
    fn update(&self, config: &Config, state: State<&Tensor<T>>, scalars: Scalars<&Tensor<T>>) -> Result<()> {
        let buffers = state.clone().named();
        let mut dims = Dims::new(OP);
        for (name, buffer) in &buffers {
            dims.bind(name, buffer.shape(), &["P"])?;
        }
        check_config(config, dims.get("P"))?;
        check_apart(OP, &buffers, |a, b| a.shares_allocation(b))?;
        let lr = self.read_one(OP, "lr", scalars.lr)?.to_f64();
        let scale = self.read_one(OP, "scale", scalars.scale)?;
        let apply = self.read_one(OP, "apply", scalars.apply)?.to_f64() == 1.0;
        let updates = self.read_one_id(OP, "updates", scalars.updates)?;
        let coefficients = Coefficients::new(config, lr, scale, updates);
        let grads = self.read(OP, "grads", state.grads)?;
        self.update(OP, "params", state.params, |mut params| {
            self.update(OP, "m", state.m, |mut m| {
                self.update(OP, "v", state.v, |mut v| {
                    if !apply {
                        return;
                    }
                    let contiguous = "a handle's memory is contiguous";
                    for Group { range, weight_decay } in &config.groups {
                        move_group(
                            &coefficients,
                            T::from_f64(lr * weight_decay),
                            &mut params.as_slice_mut().expect(contiguous)[range.clone()],
                            &grads.slice()[range.clone()],
                            &mut m.as_slice_mut().expect(contiguous)[range.clone()],
                            &mut v.as_slice_mut().expect(contiguous)[range.clone()],
                        );
                    }
                })
            })
        })??
    }
}

impl<B: Adamw> Adamw for Checked<B> {
    /// Gradients may hold anything while `apply` is 0.
    fn update(&self, config: &Config, state: State<&B::Tensor>, scalars: Scalars<&B::Tensor>) -> Result<()> {
        self.every(OP, "apply", scalars.apply, "0 or 1", |x| x == 0.0 || x == 1.0)?;
        if self.download(scalars.apply)?.iter().all(|&x| x == 1.0) {
            self.finite(OP, state.clone().named())?;
            self.every(OP, "v", state.v, "at least 0", |x| x >= 0.0)?;
            self.every(OP, "lr", scalars.lr, "finite and at least 0", |x| x.is_finite() && x >= 0.0)?;
            self.every(OP, "scale", scalars.scale, "from 0 to 1", |x| (0.0..=1.0).contains(&x))?;
            self.every(OP, "updates", scalars.updates, "at least 1, since it counts this update", |x| x >= 1.0)?;
        }
        self.0.update(config, state, scalars)
    }
}

const OP: &str = "adamw::update";

/// Refuses a config that is out of range for buffers of `len` elements. For backends of their own too.
///
/// # Errors
/// `Config`, which names the field.
pub fn check_config(config: &Config, len: usize) -> Result<()> {
    let refuse = |field, expected: &str, got: f64| {
        Err(Error::Config { op: OP, field, expected: expected.to_owned(), got: got.to_string() })
    };
    for (field, beta) in [("beta1", config.beta1), ("beta2", config.beta2)] {
        if !(0.0..1.0).contains(&beta) {
            return refuse(field, "at least 0 and less than 1", beta);
        }
    }
    if !(config.eps > 0.0 && config.eps.is_finite()) {
        return refuse("eps", "greater than zero, since a zero gradient would divide by zero", config.eps);
    }
    for group in &config.groups {
        if !(group.weight_decay >= 0.0 && group.weight_decay.is_finite()) {
            return refuse("groups.weight_decay", "at least 0", group.weight_decay);
        }
    }
    check_ranges(OP, "groups", config.groups.iter().map(|group| &group.range), len)
}

/// The factors of one update, rounded once from `f64`: 1 - beta^t in `f32` would lose digits near t = 1.
struct Coefficients<T> {
    scale: T,
    keep_m: T,
    take_m: T,
    keep_v: T,
    take_v: T,
    /// lr / (1 - beta1^t)
    step: T,
    /// (1 - beta2^t)^(-1/2)
    root_correction: T,
    eps: T,
}

impl<T: Scalar> Coefficients<T> {
    fn new(config: &Config, lr: f64, scale: T, updates: u32) -> Self {
        let &Config { beta1, beta2, eps, .. } = config;
        let correction = |beta: f64| 1.0 - beta.powf(f64::from(updates));
        Self {
            scale,
            keep_m: T::from_f64(beta1),
            take_m: T::from_f64(1.0 - beta1),
            keep_v: T::from_f64(beta2),
            take_v: T::from_f64(1.0 - beta2),
            step: T::from_f64(lr / correction(beta1)),
            root_correction: T::from_f64(1.0 / correction(beta2).sqrt()),
            eps: T::from_f64(eps),
        }
    }
}

/// Moves one group; `decay` = lr * weight_decay.
fn move_group<T: Scalar>(c: &Coefficients<T>, decay: T, params: &mut [T], grads: &[T], m: &mut [T], v: &mut [T]) {
    let blocks = params.par_chunks_mut(BLOCK).zip(grads.par_chunks(BLOCK));
    blocks.zip(m.par_chunks_mut(BLOCK)).zip(v.par_chunks_mut(BLOCK)).for_each(|(((params, grads), m), v)| {
        for (((p, &grad), m), v) in params.iter_mut().zip(grads).zip(m).zip(v) {
            let g = c.scale * grad;
            *m = c.keep_m * *m + c.take_m * g;
            *v = c.keep_v * *v + c.take_v * g * g;
            *p = *p - c.step * *m / (v.sqrt() * c.root_correction + c.eps) - decay * *p;
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use ndarray::{Array1, array};

    use crate::tensor::DType;

    /// beta1 = 1/2 and beta2 = 3/4 keep the hand values short.
    fn config(groups: &[(Range<usize>, f64)]) -> Config {
        let groups =
            groups.iter().map(|(range, weight_decay)| Group { range: range.clone(), weight_decay: *weight_decay });
        Config { beta1: 0.5, beta2: 0.75, eps: 1e-8, groups: groups.collect() }
    }

    struct Fixture {
        b: Reference<f64>,
        state: State<Tensor<f64>>,
        scalars: Scalars<Tensor<f64>>,
    }

    impl Fixture {
        fn new(params: &[f64], grads: &[f64], scalars: [f64; 4]) -> Self {
            let b = Reference::new();
            let buffer = |values: &[f64]| b.constant(Array1::from(values.to_vec()).into_dyn());
            let zeros = vec![0.0; params.len()];
            let state = State { params: buffer(params), grads: buffer(grads), m: buffer(&zeros), v: buffer(&zeros) };
            let updates = b.persistent(&[1], DType::U32).unwrap();
            let [lr, scale, apply, count] = scalars;
            b.upload(array![count].into_dyn().view(), &updates).unwrap();
            let scalars = Scalars { lr: buffer(&[lr]), scale: buffer(&[scale]), apply: buffer(&[apply]), updates };
            Self { b, state, scalars }
        }

        fn update(&self, config: &Config) -> Result<()> {
            Adamw::update(&self.b, config, self.state.as_ref(), self.scalars.as_ref())
        }

        fn values(&self, tensor: &Tensor<f64>) -> Vec<f64> {
            self.b.download(tensor).unwrap().into_iter().collect()
        }
    }

    #[test]
    fn two_updates_by_hand() {
        let f = Fixture::new(&[1.0], &[8.0], [0.1, 0.5, 1.0, 1.0]);
        let config = config(&[(0..1, 0.2)]);
        f.update(&config).unwrap();
        // g = 4: m = 2, v = 4, corrected 4 and 16: a step of 1, a decay of 0.2.
        assert_eq!(f.values(&f.state.m), [2.0]);
        assert_eq!(f.values(&f.state.v), [4.0]);
        assert_relative_eq!(f.values(&f.state.params)[0], 1.0 - 0.1 * 1.2, max_relative = 1e-8);
        f.b.upload(array![2.0].into_dyn().view(), &f.scalars.updates).unwrap();
        f.b.upload(array![0.0].into_dyn().view(), &f.state.grads).unwrap();
        f.update(&config).unwrap();
        // g = 0: m = 1, v = 3, corrected 1 / (3/4) and 3 / (7/16).
        let step = (4.0 / 3.0) / (48.0f64 / 7.0).sqrt();
        assert_relative_eq!(f.values(&f.state.params)[0], 0.88 - 0.1 * (step + 0.2 * 0.88), max_relative = 1e-8);
    }

    #[test]
    fn a_skipped_update_keeps_every_bit_even_with_nan_gradients() {
        let f = Fixture::new(&[1.0, -0.0, f64::MIN_POSITIVE], &[f64::NAN; 3], [0.1, f64::NAN, 0.0, 0.0]);
        let before = [1.0f64, -0.0, f64::MIN_POSITIVE].map(f64::to_bits);
        f.update(&config(&[(0..3, 0.2)])).unwrap();
        assert_eq!(f.values(&f.state.params).iter().map(|x| x.to_bits()).collect::<Vec<_>>(), before);
        assert_eq!(f.values(&f.state.m), [0.0; 3]);
        assert_eq!(f.values(&f.state.v), [0.0; 3]);
    }

    #[test]
    fn elements_outside_every_group_stay() {
        let f = Fixture::new(&[1.0; 5], &[1.0, f64::NAN, 1.0, 1.0, f64::NAN], [0.1, 1.0, 1.0, 1.0]);
        f.update(&config(&[(2..4, 0.0), (0..1, 1.0)])).unwrap();
        let params = f.values(&f.state.params);
        assert_eq!([params[1], params[4]], [1.0, 1.0]);
        assert_relative_eq!(params[0], 0.8, max_relative = 1e-7);
        assert_relative_eq!(params[2], 0.9, max_relative = 1e-7);
        assert_eq!(params[2], params[3]);
        assert_eq!(f.values(&f.state.m), [0.5, 0.0, 0.5, 0.5, 0.0]);
    }

    #[test]
    fn refusals() {
        let f = Fixture::new(&[1.0; 4], &[1.0; 4], [0.1, 1.0, 1.0, 1.0]);
        let message = |config: &Config| f.update(config).unwrap_err().to_string();
        assert_eq!(
            message(&config(&[(2..4, 0.0), (0..3, 0.0)])),
            "adamw::update: config `groups` is 0..3 and 2..4, expected ranges that do not overlap"
        );
        assert_eq!(
            message(&config(&[(2..5, 0.0)])),
            "adamw::update: config `groups` is 2..5, expected ranges inside the buffer of 4 elements"
        );
        assert_eq!(
            message(&Config { beta2: 1.0, ..config(&[]) }),
            "adamw::update: config `beta2` is 1, expected at least 0 and less than 1"
        );
        assert_eq!(
            message(&Config { eps: 0.0, ..config(&[]) }),
            "adamw::update: config `eps` is 0, expected greater than zero, since a zero gradient would divide by zero"
        );
        assert_eq!(
            message(&config(&[(0..1, f64::NAN)])),
            "adamw::update: config `groups.weight_decay` is NaN, expected at least 0"
        );
        let with = |state: State<&Tensor<f64>>| {
            Adamw::update(&f.b, &config(&[]), state, f.scalars.as_ref()).unwrap_err().to_string()
        };
        let State { params, grads, m, v } = f.state.as_ref();
        assert_eq!(
            with(State { params, grads, m, v: m }),
            "adamw::update: `v` shares its allocation with `m`, expected an allocation of its own"
        );
        let short = f.b.constant(Array1::zeros(3).into_dyn());
        assert_eq!(
            with(State { params, grads, m: &short, v }),
            "adamw::update: `m` is [3], expected [P] = [4] (P from `params`)"
        );
        let two = f.b.constant(Array1::zeros(2).into_dyn());
        let scalars = Scalars { apply: &two, ..f.scalars.as_ref() };
        assert_eq!(
            Adamw::update(&f.b, &config(&[]), f.state.as_ref(), scalars).unwrap_err().to_string(),
            "adamw::update: `apply` is [2], expected [1]"
        );
        let counters = f.b.persistent(&[4], DType::U32).unwrap();
        let scalars = Scalars { updates: &counters, ..f.scalars.as_ref() };
        assert_eq!(
            Adamw::update(&f.b, &config(&[]), f.state.as_ref(), scalars).unwrap_err().to_string(),
            "adamw::update: `updates` is [4], expected [1]"
        );
        let scratch = f.b.scratch(&[4], DType::F64).unwrap();
        assert_eq!(
            with(State { params, grads, m, v: &scratch }),
            "adamw::update: `v` is scratch, expected a persistent tensor, since it must outlive the step"
        );
        f.b.upload(array![0.0].into_dyn().view(), &f.scalars.updates).unwrap();
        let checked = Checked(f.b);
        assert_eq!(
            Adamw::update(&checked, &config(&[]), f.state.as_ref(), f.scalars.as_ref()).unwrap_err().to_string(),
            "adamw::update: `updates`[0] is 0, expected at least 1, since it counts this update"
        );
    }
}
