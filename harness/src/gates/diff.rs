//! Gate `diff`: does the same operation at another precision or on a device equal the f64 reference?
//!
//! Inputs are rounded to the device's type first and the reference gets the rounded values, so the tolerance covers
//! arithmetic only. On the CPU the other precision is f32, which is what the trainer runs.

use dormouse_reference::Reference;
use ndarray::ArrayD;

use super::{Context, Outcome, compare_runs, draw_upstream, over_cases, text, uncancelled_sizes};
use crate::description::{Gate, Operation, OperationOn};
use crate::named::Values;
use crate::runner::{OnBackend, Runner};

/// Runs the gate with the reference in f32 as the device: its result against `want`, the f64 runner under test.
pub fn gate_f32<O>(want: &dyn Runner<O>, context: &Context) -> Outcome
where
    O: OperationOn<Reference<f32>>,
{
    let device = OnBackend::new(Reference::<f32>::new);
    gate::<O>(&device, want, context, |x| f64::from(x as f32), |tolerances| tolerances.diff_f32)
}

/// Compares a device's runner with the reference's on inputs rounded by `round`.
pub fn gate<O: Operation>(
    device: &dyn Runner<O>,
    reference: &dyn Runner<O>,
    context: &Context,
    round: fn(f64) -> f64,
    tolerance: fn(crate::description::Tolerances) -> crate::compare::Tolerance,
) -> Outcome {
    let rounded = |values: &Values| values.map(|_, v: &ArrayD<f64>| v.mapv(round));
    over_cases::<O>(Gate::Diff, context, |case, rng| {
        let inputs = rounded(&O::draw(case, rng));
        let forward = reference.run(&case.config, &inputs, None).map_err(text)?;
        let upstream = O::NO_GRADIENT.is_none().then(|| rounded(&draw_upstream::<O>(case, &forward.outputs, rng)));
        let want = reference.run(&case.config, &inputs, upstream.as_ref()).map_err(text)?;
        let got = device.run(&case.config, &inputs, upstream.as_ref()).map_err(text)?;
        let again = |upstream: &Values| reference.run(&case.config, &inputs, Some(upstream)).map_err(text);
        let sizes = uncancelled_sizes::<O>(case, &inputs, upstream.as_ref(), &want, rng, again)?;
        compare_runs(&got, &want, &tolerance(O::tolerances(case)), &sizes)
    })
    .outcome(O::STEM, Gate::Diff, context)
}
