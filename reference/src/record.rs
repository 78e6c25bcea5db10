//! `record`: writes one row of a ring, so that every step's numbers are kept and none is waited for.
//!
//! ```text
//! ring[step mod R] = values_0 ++ values_1 ++ ...
//! ```
//!
//! The host reads the ring at its own cadence, at the latest every R steps. Real numbers and integers may be mixed;
//! integers are exact up to 2^24 in `f32`. NaN and infinity are recorded like any other value: a log that hides them
//! is of no use.

use crate::checked::Checked;
use crate::cpu::{Reference, Tensor};
use crate::dims::Dims;
use crate::error::{Error, Result};
use crate::scalar::Scalar;
use crate::tensor::Tensors;

/// The operation on a backend.
///
/// # Errors
/// `Shape` if a value is not `[n]`, the lengths do not add up to the ring's width, `step` is not `[1]`, the ring is
/// not `[R, width]` or R = 0; `Storage` if `step` is not an integer or the ring not real; `NotPersistent` if the ring
/// is scratch.
pub trait Record: Tensors {
    /// Writes `values` (each `[n_i]`) into row `step` mod R of `ring` (`[R, width]`); `step` is `[1]` of `u32`.
    fn update(&self, values: &[&Self::Tensor], step: &Self::Tensor, ring: &Self::Tensor) -> Result<()>;
}

impl<T: Scalar> Record for Reference<T> {
    #[inline(never)]
    fn update(&self, values: &[&Tensor<T>], step: &Tensor<T>, ring: &Tensor<T>) -> Result<()> {
        const OP: &str = "record::update";
        let mut dims = Dims::new(OP);
        dims.bind("ring", ring.shape(), &["R", "width"])?;
        dims.positive(&["R"])?;
        let (rows, width) = (dims.get("R"), dims.get("width"));
        // The values are copied before the ring is written: a value may be a part of the ring.
        let mut row = Vec::with_capacity(width);
        for value in values {
            Dims::new(OP).bind("values", value.shape(), &["n"])?;
            if self.dtype(value).is_float() {
                row.extend_from_slice(self.read(OP, "values", value)?.slice());
            } else {
                row.extend(self.read_ids(OP, "values", value)?.into_iter().map(|id| T::from_f64(f64::from(id))));
            }
        }
        if row.len() != width {
            let lens = values.iter().map(|value| value.len()).collect();
            return Err(Error::Shape {
                op: OP,
                arg: "values",
                expected: format!("lengths that add up to width = {width} (width from `ring`)"),
                got: lens,
            });
        }
        let start = self.read_one_id(OP, "step", step)? as usize % rows * width;
        self.update(OP, "ring", ring, |mut ring| {
            ring.as_slice_mut().expect("a handle's memory is contiguous")[start..start + width].copy_from_slice(&row);
        })
    }
}

impl<B: Record> Record for Checked<B> {
    /// A step that went wrong is the one worth recording, so no value is refused.
    fn update(&self, values: &[&B::Tensor], step: &B::Tensor, ring: &B::Tensor) -> Result<()> {
        Record::update(&self.0, values, step, ring)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{ArrayD, array};

    use crate::tensor::DType;

    fn step(b: &Reference<f32>, step: f64) -> Tensor<f32> {
        let tensor = b.persistent(&[1], DType::U32).unwrap();
        b.upload(array![step].into_dyn().view(), &tensor).unwrap();
        tensor
    }

    #[test]
    fn rows_wrap_around_and_only_theirs_is_written() {
        let b = Reference::<f32>::new();
        let ring = b.constant(ArrayD::zeros(vec![2, 3]));
        let pair = b.constant(array![1.5, f32::INFINITY].into_dyn());
        Record::update(&b, &[&pair, &step(&b, 7.0)], &step(&b, 4.0), &ring).unwrap();
        assert_eq!(b.download(&ring).unwrap(), array![[1.5, f64::INFINITY, 7.0], [0.0, 0.0, 0.0]].into_dyn());
        Record::update(&b, &[&step(&b, 8.0), &pair], &step(&b, f64::from(u32::MAX)), &ring).unwrap();
        assert_eq!(b.download(&ring).unwrap(), array![[1.5, f64::INFINITY, 7.0], [8.0, 1.5, f64::INFINITY]].into_dyn());
    }

    #[test]
    fn a_row_of_the_ring_can_be_recorded_again() {
        let b = Reference::<f32>::new();
        let ring = b.constant(array![[1.0, 2.0], [3.0, 4.0]].into_dyn());
        let first = b.view(&ring, 0, &[2]).unwrap();
        Record::update(&b, &[&first], &step(&b, 1.0), &ring).unwrap();
        assert_eq!(b.download(&ring).unwrap(), array![[1.0, 2.0], [1.0, 2.0]].into_dyn());
    }

    #[test]
    fn refusals() {
        let b = Reference::<f32>::new();
        let one = b.constant(array![1.0].into_dyn());
        let ring = b.constant(ArrayD::zeros(vec![2, 3]));
        let attempt = |values: &[&Tensor<f32>], step: &Tensor<f32>, ring: &Tensor<f32>| {
            Record::update(&b, values, step, ring).unwrap_err().to_string()
        };
        let at = step(&b, 0.0);
        assert_eq!(
            attempt(&[&one, &one], &at, &ring),
            "record::update: `values` is [1, 1], expected lengths that add up to width = 3 (width from `ring`)"
        );
        assert_eq!(attempt(&[&ring], &at, &ring), "record::update: `values` is [2, 3], expected [n]");
        assert_eq!(
            attempt(&[&one], &at, &b.constant(ArrayD::zeros(vec![0, 1]))),
            "record::update: `ring` is [0], expected R >= 1"
        );
        assert_eq!(attempt(&[&one], &at, &one), "record::update: `ring` is [1], expected [R, width]");
        let single = b.constant(ArrayD::zeros(vec![1, 1]));
        assert_eq!(attempt(&[&one], &one, &single), "record::update: `step` is stored as f32, expected u8 or u32");
        assert_eq!(
            attempt(&[&one], &b.persistent(&[2], DType::U32).unwrap(), &single),
            "record::update: `step` is [2], expected [1]"
        );
        assert!(matches!(
            Record::update(&b, &[&one], &at, &b.scratch(&[1, 1], DType::F32).unwrap()),
            Err(Error::NotPersistent { .. })
        ));
    }
}
