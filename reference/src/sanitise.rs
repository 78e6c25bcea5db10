//! `sanitise`: one pass over the flat gradient buffer that decides whether and how the optimiser moves.
//!
//! ```text
//! nonfinite = number of NaN and infinite elements of grads, plus that of losses
//! norm      = (sum over the clip ranges of g^2)^(1/2)            over finite elements
//! scale     = min(1, max_norm / norm)                            (1 without max_norm)
//! apply     = 1 if nonfinite = 0 and the latch is open, else 0
//!
//! updates           += apply
//! skipped_total     += 1        if nonfinite > 0
//! skipped_in_window += 1        if nonfinite > 0
//! latched            = 1        once skipped_in_window > skips_allowed
//! ```
//!
//! The gradients are not altered: whoever uses them multiplies by `scale` and obeys `apply`, so one bad element makes
//! the whole update a no-op and nothing else. The counters outlive the step. The host opens a new window by setting
//! `skipped_in_window` to zero; nothing but the host clears the latch. `nonfinite` counts in floating point and is
//! exact up to 2^24 in `f32`.
//!
//! The norm is accumulated in `f64` over fixed blocks that are added in order: no square of an `f32` over- or
//! underflows there, and the bits do not depend on the number of threads. For `f64` gradients whose squares leave the
//! range of `f64`, the sum is taken again, scaled by a power of two. A norm beyond the range of the storage type
//! is stored as infinity; `scale` comes from the exact one.

use std::ops::Range;

use ndarray::arr1;
use rayon::prelude::*;

use crate::checked::Checked;
use crate::cpu::{Reference, Tensor};
use crate::dims::Dims;
use crate::error::{Error, Result};
use crate::fields;
use crate::scalar::Scalar;
use crate::tensor::Tensors;

/// Elements that one task reads: small enough to feed every core with a model of a million parameters, large enough
/// that waking a thread is small beside it.
const BLOCK: usize = 1 << 15;

/// Partial sums a block keeps, so that the additions of neighbouring elements do not wait for each other.
const LANES: usize = 16;

/// A sum of squares outside these bounds may have lost elements to overflow or underflow and is taken again, scaled.
const SAFE_SQUARES: Range<f64> = 1e-200..1e300;

/// 2^-600, or one over it, brings every `f64` that sends a sum of squares out of `SAFE_SQUARES` back inside.
const SHRINK: f64 = f64::from_bits((1023 - 600) << 52);

/// What the operation does besides its shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The norm above which gradients are scaled down to it; `None` never scales.
    pub max_norm: Option<f64>,
    /// The elements that norm and clipping are about: disjoint ranges of the buffer.
    pub clip: Vec<Range<usize>>,
    /// Non-finite steps a window may have; one more closes the latch.
    pub skips_allowed: u32,
}

fields! {
    /// What comes out, all `[1]`.
    pub struct Outputs {
        /// `[1]`, L2 norm over the clip ranges.
        norm,
        /// `[1]`, how many non-finite numbers were seen.
        nonfinite,
        /// `[1]`, what gradients are to be multiplied by.
        scale,
        /// `[1]`, 1 if the step's update is to happen, else 0.
        apply
    }
}

/// The operation on a backend.
///
/// # Errors
/// `Shape` if `grads` is not `[P]`, `losses` not `[L]` or `counters` not `[4]`; `Storage` if `counters` are not `u32`;
/// `NotPersistent` if they are scratch; `Config` if a clip range leaves the buffer or overlaps another, or if
/// `max_norm` is not greater than zero.
pub trait Sanitise: Tensors {
    /// Counts, measures, decides; advances `counters` = (updates, skipped_total, skipped_in_window, latched), `u32[4]`.
    fn update(
        &self,
        config: &Config,
        grads: &Self::Tensor,
        losses: &Self::Tensor,
        counters: &Self::Tensor,
    ) -> Result<Outputs<Self::Tensor>>;
}

impl<T: Scalar> Sanitise for Reference<T> {
    #[inline(never)]
    fn update(
        &self,
        config: &Config,
        grads: &Tensor<T>,
        losses: &Tensor<T>,
        counters: &Tensor<T>,
    ) -> Result<Outputs<Tensor<T>>> {
        const OP: &str = "sanitise::update";
        let mut dims = Dims::new(OP);
        dims.bind("grads", grads.shape(), &["P"])?;
        check_config(OP, config, dims.get("P"))?;
        if counters.shape() != [4] {
            return Err(Error::Shape {
                op: OP,
                arg: "counters",
                expected: "[4]".to_owned(),
                got: counters.shape().into(),
            });
        }
        dims.bind("losses", losses.shape(), &["L"])?;
        let losses = self.read(OP, "losses", losses)?;
        let (norm, mut nonfinite) = measure(self.read(OP, "grads", grads)?.slice(), &config.clip);
        nonfinite += losses.slice().iter().filter(|loss| !loss.is_finite()).count() as u64;
        let scale = config.max_norm.map_or(1.0, |max_norm| if norm > max_norm { max_norm / norm } else { 1.0 });
        let apply = self.update_u32(OP, "counters", counters, |counters| {
            let [updates, skipped_total, skipped_in_window, latched] = counters else {
                unreachable!("the shape was checked to be [4]")
            };
            let apply = nonfinite == 0 && *latched == 0;
            *updates = updates.saturating_add(u32::from(apply));
            if nonfinite > 0 {
                *skipped_total = skipped_total.saturating_add(1);
                *skipped_in_window = skipped_in_window.saturating_add(1);
                *latched |= u32::from(*skipped_in_window > config.skips_allowed);
            }
            apply
        })?;
        let one = |x: f64| self.adopt(arr1(&[T::from_f64(x)]), &[1]);
        Ok(Outputs {
            norm: one(norm),
            nonfinite: one(nonfinite as f64),
            scale: one(scale),
            apply: one(f64::from(u8::from(apply))),
        })
    }
}

impl<B: Sanitise> Sanitise for Checked<B> {
    /// Non-finite gradients are what the operation is for, so no value is refused.
    fn update(
        &self,
        config: &Config,
        grads: &B::Tensor,
        losses: &B::Tensor,
        counters: &B::Tensor,
    ) -> Result<Outputs<B::Tensor>> {
        self.0.update(config, grads, losses, counters)
    }
}

/// Refuses a config that is out of range for a buffer of `len` elements. For backends of their own too.
///
/// # Errors
/// `Config`, which names the field.
pub fn check_config(op: &'static str, config: &Config, len: usize) -> Result<()> {
    if let Some(max_norm) = config.max_norm
        && !(max_norm > 0.0 && max_norm.is_finite())
    {
        return Err(Error::Config {
            op,
            field: "max_norm",
            expected: "greater than zero; use None for no clipping".to_owned(),
            got: max_norm.to_string(),
        });
    }
    check_ranges(op, "clip", config.clip.iter(), len)
}

/// Refuses ranges that leave a buffer of `len` elements or overlap.
pub(crate) fn check_ranges<'a>(
    op: &'static str,
    field: &'static str,
    ranges: impl Iterator<Item = &'a Range<usize>>,
    len: usize,
) -> Result<()> {
    let mut sorted: Vec<&Range<usize>> = ranges.collect();
    sorted.sort_by_key(|range| (range.start, range.end));
    let refuse = |expected: String, got: String| Err(Error::Config { op, field, expected, got });
    for range in &sorted {
        if range.start > range.end || range.end > len {
            return refuse(format!("ranges inside the buffer of {len} elements"), format!("{range:?}"));
        }
    }
    sorted.retain(|range| !range.is_empty());
    for pair in sorted.windows(2) {
        if pair[1].start < pair[0].end {
            return refuse("ranges that do not overlap".to_owned(), format!("{:?} and {:?}", pair[0], pair[1]));
        }
    }
    Ok(())
}

/// The norm of the finite elements of `clip`, and the number of non-finite elements of all of `grads`.
fn measure<T: Scalar>(grads: &[T], clip: &[Range<usize>]) -> (f64, u64) {
    let pieces = pieces(grads.len(), clip);
    let sums: Vec<Sums> = pieces.par_iter().map(|(range, _)| Sums::of(&grads[range.clone()], 1.0)).collect();
    let nonfinite = sums.iter().map(|sums| sums.nonfinite).sum();
    let clipped = || pieces.iter().zip(&sums).filter(|((_, clipped), _)| *clipped);
    let squares: f64 = clipped().map(|(_, sums)| sums.squares).sum();
    let largest = clipped().map(|(_, sums)| sums.largest).fold(0.0, f64::max);
    if SAFE_SQUARES.contains(&squares) || largest == 0.0 {
        return (squares.sqrt(), nonfinite);
    }
    let factor = if largest > 1.0 { SHRINK } else { 1.0 / SHRINK };
    let squares: f64 = clipped().map(|((range, _), _)| Sums::of(&grads[range.clone()], factor).squares).sum();
    (squares.sqrt() / factor, nonfinite)
}

/// `0..len` cut at multiples of `BLOCK` and at the borders of `clip`, in order, with whether each is inside `clip`.
fn pieces(len: usize, clip: &[Range<usize>]) -> Vec<(Range<usize>, bool)> {
    let mut cuts: Vec<usize> = (0..len).step_by(BLOCK).collect();
    cuts.extend(clip.iter().flat_map(|range| [range.start, range.end]));
    cuts.push(len);
    cuts.sort_unstable();
    cuts.dedup();
    let inside = |start: usize| clip.iter().any(|range| range.contains(&start));
    cuts.windows(2).map(|cut| (cut[0]..cut[1], inside(cut[0]))).collect()
}

/// What one pass over a block yields.
struct Sums {
    squares: f64,
    largest: f64,
    nonfinite: u64,
}

impl Sums {
    /// The sums of `values * factor`.
    fn of<T: Scalar>(values: &[T], factor: f64) -> Self {
        let mut squares = [0.0; LANES];
        let mut largest = [0.0; LANES];
        let mut nonfinite = [0.0; LANES];
        let mut add = |lane: usize, value: T| {
            let value = value.to_f64();
            let finite = value.is_finite();
            let magnitude = if finite { (value * factor).abs() } else { 0.0 };
            squares[lane] += magnitude * magnitude;
            largest[lane] = if magnitude > largest[lane] { magnitude } else { largest[lane] };
            nonfinite[lane] += if finite { 0.0 } else { 1.0 };
        };
        let (rows, rest) = values.as_chunks::<LANES>();
        for row in rows {
            for lane in 0..LANES {
                add(lane, row[lane]);
            }
        }
        for (lane, &value) in rest.iter().enumerate() {
            add(lane, value);
        }
        Self {
            squares: squares.iter().sum(),
            largest: largest.iter().copied().fold(0.0, f64::max),
            nonfinite: nonfinite.iter().sum::<f64>() as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use ndarray::{Array1, arr0, array};

    use crate::tensor::DType;

    fn config(max_norm: Option<f64>, clip: &[(usize, usize)]) -> Config {
        Config { max_norm, clip: clip.iter().map(|&(start, end)| start..end).collect(), skips_allowed: 8 }
    }

    /// One run: (norm, nonfinite, scale, apply) and the counters afterwards.
    fn run<T: Scalar>(config: &Config, grads: &[f64], loss: f64, counters: [f64; 4]) -> ([f64; 4], [f64; 4]) {
        let b = Reference::<T>::new();
        let floats =
            |values: &[f64]| b.constant(values.iter().map(|&x| T::from_f64(x)).collect::<Array1<T>>().into_dyn());
        let kept = b.persistent(&[4], DType::U32).unwrap();
        b.upload(arr1(&counters).into_dyn().view(), &kept).unwrap();
        let outputs = Sanitise::update(&b, config, &floats(grads), &floats(&[loss]), &kept).unwrap();
        let outputs = outputs.named().into_iter().map(|(_, tensor)| b.download(&tensor).unwrap()[0]);
        let counters = b.download(&kept).unwrap();
        (outputs.collect::<Vec<_>>().try_into().unwrap(), counters.into_iter().collect::<Vec<_>>().try_into().unwrap())
    }

    #[test]
    fn hand_values() {
        let grads = [3.0, 100.0, 4.0, -12.0];
        let (outputs, counters) = run::<f32>(&config(Some(6.5), &[(0, 1), (2, 4)]), &grads, 1.0, [5.0, 2.0, 1.0, 0.0]);
        assert_eq!(outputs, [13.0, 0.0, 0.5, 1.0]);
        assert_eq!(counters, [6.0, 2.0, 1.0, 0.0]);
        assert_eq!(run::<f32>(&config(Some(13.5), &[(0, 1), (2, 4)]), &grads, 1.0, [0.0; 4]).0[2], 1.0);
        assert_eq!(run::<f32>(&config(None, &[(0, 4)]), &grads, 1.0, [0.0; 4]).0[2], 1.0);
        assert_eq!(run::<f32>(&config(Some(1.0), &[]), &[], 1.0, [0.0; 4]).0, [0.0, 0.0, 1.0, 1.0]);
    }

    #[test]
    fn non_finite_elements_anywhere_skip_the_step_and_leave_the_norm_finite() {
        let grads = [3.0, f64::NAN, 4.0, f64::INFINITY];
        let (outputs, counters) = run::<f32>(&config(Some(10.0), &[(0, 3)]), &grads, f64::NAN, [5.0, 2.0, 1.0, 0.0]);
        assert_eq!(outputs, [5.0, 3.0, 1.0, 0.0]);
        assert_eq!(counters, [5.0, 3.0, 2.0, 0.0]);
    }

    #[test]
    fn the_ninth_skip_of_a_window_closes_the_latch_and_it_stays_closed() {
        let clip = config(None, &[(0, 1)]);
        assert_eq!(run::<f32>(&clip, &[f64::NAN], 0.0, [7.0, 20.0, 7.0, 0.0]).1, [7.0, 21.0, 8.0, 0.0]);
        assert_eq!(run::<f32>(&clip, &[f64::NAN], 0.0, [7.0, 21.0, 8.0, 0.0]).1, [7.0, 22.0, 9.0, 1.0]);
        let (outputs, counters) = run::<f32>(&clip, &[1.0], 0.0, [7.0, 22.0, 0.0, 1.0]);
        assert_eq!(outputs[3], 0.0);
        assert_eq!(counters, [7.0, 22.0, 0.0, 1.0]);
    }

    #[test]
    fn no_magnitude_overflows_or_vanishes() {
        for (unit, tolerance) in [(1e37, 1e-6), (1e-30, 1e-6)] {
            let (outputs, _) = run::<f32>(&config(Some(1.0), &[(0, 2)]), &[3.0 * unit, -4.0 * unit], 0.0, [0.0; 4]);
            assert_relative_eq!(outputs[0], 5.0 * unit, max_relative = tolerance);
            assert_relative_eq!(outputs[2], (0.2 / unit).min(1.0), max_relative = 1e-6);
        }
        for unit in [1e300, 1e-300] {
            let (outputs, _) = run::<f64>(&config(Some(1.0), &[(0, 2)]), &[3.0 * unit, -4.0 * unit], 0.0, [0.0; 4]);
            assert_relative_eq!(outputs[0], 5.0 * unit, max_relative = 1e-15);
            assert_relative_eq!(outputs[2], (0.2 / unit).min(1.0), max_relative = 1e-15);
        }
    }

    #[test]
    fn blocks_do_not_change_what_is_counted_or_its_bits() {
        let len = 3 * BLOCK + 17;
        let mut grads: Vec<f32> = (0..len).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.01).collect();
        for i in [0, BLOCK - 1, BLOCK, len - 1] {
            grads[i] = f32::NAN;
        }
        let clip = [BLOCK / 2..BLOCK + 5, 2 * BLOCK..len];
        let (norm, nonfinite) = measure(&grads, &clip);
        assert_eq!(nonfinite, 4);
        let plain: f64 = clip
            .iter()
            .flat_map(|range| &grads[range.clone()])
            .filter(|x| x.is_finite())
            .map(|&x| f64::from(x).powi(2))
            .sum();
        assert_relative_eq!(norm, plain.sqrt(), max_relative = 1e-12);
        let one_thread = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        assert_eq!(one_thread.install(|| measure(&grads, &clip)).0.to_bits(), norm.to_bits());
    }

    #[test]
    fn the_gradients_keep_every_bit() {
        let b = Reference::<f32>::new();
        let values = [f32::NAN, -0.0, 3e30, f32::MIN_POSITIVE];
        let grads = b.constant(arr1(&values).into_dyn());
        let counters = b.persistent(&[4], DType::U32).unwrap();
        let loss = b.constant(arr1(&[f32::NAN]).into_dyn());
        Sanitise::update(&b, &config(Some(1.0), &[(0, 4)]), &grads, &loss, &counters).unwrap();
        let bits: Vec<u32> = b.values(&grads).unwrap().iter().map(|x| x.to_bits()).collect();
        assert_eq!(bits, values.map(f32::to_bits));
    }

    #[test]
    fn refusals() {
        let b = Reference::<f32>::new();
        let grads = b.constant(Array1::zeros(4).into_dyn());
        let loss = b.constant(array![0.0].into_dyn());
        let counters = b.persistent(&[4], DType::U32).unwrap();
        let attempt = |config: &Config| Sanitise::update(&b, config, &grads, &loss, &counters).unwrap_err().to_string();
        assert_eq!(
            attempt(&config(Some(0.0), &[])),
            "sanitise::update: config `max_norm` is 0, expected greater than zero; use None for no clipping"
        );
        assert_eq!(
            attempt(&config(None, &[(0, 2), (1, 4)])),
            "sanitise::update: config `clip` is 0..2 and 1..4, expected ranges that do not overlap"
        );
        assert_eq!(
            attempt(&config(None, &[(0, 5)])),
            "sanitise::update: config `clip` is 0..5, expected ranges inside the buffer of 4 elements"
        );
        let clip = config(None, &[]);
        let scalar = b.constant(arr0(0.0).into_dyn());
        assert_eq!(
            Sanitise::update(&b, &clip, &grads, &scalar, &counters).unwrap_err().to_string(),
            "sanitise::update: `losses` is [], expected [L]"
        );
        assert_eq!(
            Sanitise::update(&b, &clip, &scalar, &loss, &counters).unwrap_err().to_string(),
            "sanitise::update: `grads` is [], expected [P]"
        );
        assert_eq!(
            Sanitise::update(&b, &clip, &grads, &loss, &b.persistent(&[3], DType::U32).unwrap())
                .unwrap_err()
                .to_string(),
            "sanitise::update: `counters` is [3], expected [4]"
        );
        assert!(matches!(Sanitise::update(&b, &clip, &grads, &loss, &grads).unwrap_err(), Error::Storage { .. }));
        let scratch = b.scratch(&[4], DType::U32).unwrap();
        assert!(matches!(
            Sanitise::update(&b, &clip, &grads, &loss, &scratch).unwrap_err(),
            Error::NotPersistent { .. }
        ));
    }
}
