//! `ema`: a teacher that follows a model as its exponential moving average, in place on flat buffers.
//!
//! For every element of every range:
//!
//! ```text
//! teacher <- momentum teacher + (1 - momentum) online
//!          = teacher + (1 - momentum) (online - teacher)
//! ```
//!
//! The second line is how it is computed. With `apply` = 0 nothing is written, and neither is an element outside every
//! range: what a teacher shares with the model, such as a table that it only reads, has no range.
//!
//! # What `f32` makes of it
//!
//! A teacher equal to the model stays equal, bit for bit. The first line as it stands would not give that: `momentum`
//! and 1 - `momentum` are rounded apart, their sum misses 1 by up to 2^-24, and the teacher would come to rest that far
//! over 1 - `momentum` beside the model, 6e-5 of its size at a momentum of 0.999. The result never lies outside the
//! interval between teacher and model while `momentum` is 1/2 or more.
//!
//! A step smaller than half a unit in the teacher's last place is lost: the teacher stops where
//! (1 - momentum) |online - teacher| < 2^-24 |teacher|. At 0.999 that is 6e-5 of the element, less than one optimiser
//! step moves it; a momentum above 0.9999 needs a wider teacher. With `momentum` = 0 the teacher becomes the model up
//! to the rounding of online - teacher; whoever wants a copy copies.
//!
//! Nothing is differentiated through a teacher, so there is no backward.

use std::ops::Range;

use rayon::prelude::*;

use crate::checked::Checked;
use crate::cpu::{Reference, Tensor};
use crate::dims::{Dims, check_one};
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
    /// How much of the teacher stays, in [0, 1].
    pub momentum: f64,
    /// Who moves: disjoint ranges of the buffers.
    pub ranges: Vec<Range<usize>>,
}

fields! {
    /// The flat buffers, each an allocation of its own.
    pub struct Inputs {
        /// `[P]`, changed in place; equal to the model at the start.
        teacher,
        /// `[P]`, the model.
        online,
        /// `[1]`, 1 if the update is to happen, 0 if not.
        apply
    }
}

/// The operation on a backend.
///
/// # Errors
/// `Shape` if the buffers are not both `[P]` or `apply` is not `[1]`; `NotPersistent` if `teacher` is scratch; `Aliased`
/// if both buffers are one allocation; `Config` if `momentum` is outside [0, 1], or a range leaves the buffer or
/// overlaps another.
pub trait Ema: Tensors {
    /// Moves the teacher once, or nothing if `apply` is 0.
    fn update(&self, config: &Config, inputs: Inputs<&Self::Tensor>) -> Result<()>;
}

const OP: &str = "ema::update";

impl<T: Scalar> Ema for Reference<T> {
    #[inline(never)]
    fn update(&self, config: &Config, inputs: Inputs<&Tensor<T>>) -> Result<()> {
        check(config, inputs.clone().map(|_, t| t.shape()))?;
        if inputs.teacher.shares_allocation(inputs.online) {
            return Err(Error::Aliased { op: OP, arg: "teacher", other: "online" });
        }
        let apply = self.read_one(OP, "apply", inputs.apply)?.to_f64() == 1.0;
        let online = self.read(OP, "online", inputs.online)?;
        // Rounded once from f64: 1 - 0.999 in f32 would keep three digits.
        let take = T::from_f64(1.0 - config.momentum);
        self.update(OP, "teacher", inputs.teacher, |mut teacher| {
            let teacher = teacher.as_slice_mut().expect("a handle's memory is contiguous");
            for range in config.ranges.iter().filter(|_| apply) {
                let blocks = teacher[range.clone()].par_chunks_mut(BLOCK);
                blocks.zip(online.slice()[range.clone()].par_chunks(BLOCK)).for_each(|(teacher, online)| {
                    for (t, &o) in teacher.iter_mut().zip(online) {
                        *t += take * (o - *t);
                    }
                });
            }
        })
    }
}

/// Refuses what [`Ema::update`] refuses of its config and its shapes, on every backend.
///
/// # Errors
/// Those of the trait.
pub fn check(config: &Config, inputs: Inputs<&[usize]>) -> Result<()> {
    let mut dims = Dims::new(OP);
    dims.bind("teacher", inputs.teacher, &["P"])?;
    dims.bind("online", inputs.online, &["P"])?;
    if !(0.0..=1.0).contains(&config.momentum) {
        return Err(Error::Config {
            op: OP,
            field: "momentum",
            expected: "from 0 to 1".to_owned(),
            got: config.momentum.to_string(),
        });
    }
    check_ranges(OP, "ranges", config.ranges.iter(), dims.get("P"))?;
    check_one(OP, "apply", inputs.apply)
}

impl<B: Ema> Ema for Checked<B> {
    /// The model may hold anything while `apply` is 0.
    fn update(&self, config: &Config, inputs: Inputs<&B::Tensor>) -> Result<()> {
        self.every(OP, "apply", inputs.apply, "0 or 1", |x| x == 0.0 || x == 1.0)?;
        if self.download(inputs.apply)?.iter().all(|&x| x == 1.0) {
            self.finite(OP, [("teacher", inputs.teacher), ("online", inputs.online)])?;
        }
        self.0.update(config, inputs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{Array1, array};

    use crate::tensor::DType;

    fn config(momentum: f64, ranges: &[(usize, usize)]) -> Config {
        Config { momentum, ranges: ranges.iter().map(|&(start, end)| start..end).collect() }
    }

    fn run<T: Scalar>(config: &Config, teacher: &[f64], online: &[f64], apply: f64) -> Vec<f64> {
        let b = Reference::<T>::new();
        let buffer = |x: &[f64]| b.constant(x.iter().map(|&x| T::from_f64(x)).collect::<Array1<T>>().into_dyn());
        let (teacher, online, apply) = (buffer(teacher), buffer(online), buffer(&[apply]));
        b.step(&crate::StepKey { purpose: "test", variant: 0 }, &mut |b| {
            Ema::update(b, config, Inputs { teacher: &teacher, online: &online, apply: &apply })
        })
        .unwrap();
        b.download(&teacher).unwrap().into_iter().collect()
    }

    #[test]
    fn hand_values() {
        let moved = run::<f32>(&config(0.75, &[(0, 1), (2, 3)]), &[1.0, 1.0, -2.0], &[3.0, 3.0, 2.0], 1.0);
        assert_eq!(moved, [1.5, 1.0, -1.0]);
        assert_eq!(run::<f64>(&config(1.0, &[(0, 2)]), &[1.0, 2.0], &[3.0, 3.0], 1.0), [1.0, 2.0]);
    }

    #[test]
    fn a_teacher_equal_to_the_model_stays_equal_in_f32() {
        let values: Vec<f64> = (1..2000).map(|i| f64::from((f64::from(i) * 0.37).sin() as f32)).collect();
        assert_eq!(run::<f32>(&config(0.999, &[(0, 1999)]), &values, &values, 1.0), values);
        // The form with two coefficients, which this one avoids, does not keep them all.
        let (keep, take) = (0.999f32, (1.0 - 0.999f64) as f32);
        assert!(values.iter().any(|&x| keep * x as f32 + take * x as f32 != x as f32));
    }

    #[test]
    fn the_teacher_comes_as_near_as_documented() {
        let mut teacher = vec![1.0];
        for _ in 0..30_000 {
            teacher = run::<f32>(&config(0.999, &[(0, 1)]), &teacher, &[1.5], 1.0);
        }
        let left = (1.5 - teacher[0]) / 1.5;
        assert!(left > 0.0 && left < 2f64.powi(-24) / 0.001, "{left}");
    }

    #[test]
    fn a_skipped_update_keeps_every_bit_even_with_a_nan_model() {
        let after = run::<f64>(&config(0.5, &[(0, 2)]), &[-0.0, 2.0], &[f64::NAN; 2], 0.0);
        assert_eq!(after.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), [-0.0f64, 2.0].map(f64::to_bits));
    }

    #[test]
    fn refusals() {
        let b = Reference::<f64>::new();
        let [teacher, online] = [0, 1].map(|_| b.constant(Array1::zeros(4).into_dyn()));
        let one = b.constant(array![1.0].into_dyn());
        let all = Inputs { teacher: &teacher, online: &online, apply: &one };
        let with =
            |config: &Config, inputs: Inputs<&Tensor<f64>>| Ema::update(&b, config, inputs).unwrap_err().to_string();
        assert_eq!(with(&config(1.5, &[]), all.clone()), "ema::update: config `momentum` is 1.5, expected from 0 to 1");
        assert_eq!(
            with(&config(0.5, &[(0, 5)]), all.clone()),
            "ema::update: config `ranges` is 0..5, expected ranges inside the buffer of 4 elements"
        );
        assert_eq!(
            with(&config(0.5, &[]), Inputs { online: &one, ..all.clone() }),
            "ema::update: `online` is [1], expected [P] = [4] (P from `teacher`)"
        );
        assert_eq!(
            with(&config(0.5, &[]), Inputs { apply: &online, ..all.clone() }),
            "ema::update: `apply` is [4], expected [1]"
        );
        assert_eq!(
            with(&config(0.5, &[]), Inputs { online: &teacher, ..all.clone() }),
            "ema::update: `teacher` shares its allocation with `online`, expected an allocation of its own"
        );
        let scratch = b.scratch(&[4], DType::F64).unwrap();
        assert_eq!(
            with(&config(0.5, &[]), Inputs { teacher: &scratch, ..all.clone() }),
            "ema::update: `teacher` is scratch, expected a persistent tensor, since it must outlive the step"
        );
        b.fill(&online, f64::NAN).unwrap();
        assert_eq!(
            Ema::update(&Checked(Reference::<f64>::new()), &config(0.5, &[]), all).unwrap_err().to_string(),
            "ema::update: `online`[0] is NaN, expected finite"
        );
    }
}
