//! Gate `det`: the same bits twice, and on one, two and three threads.

use dormouse_reference::Reference;
use ndarray::ArrayD;

use super::{Context, Outcome, full_run, over_cases, over_device_cases, passed, text};
use crate::compare::same_bits;
use crate::description::{Gate, Operation, OperationOn, Run};
use crate::runner::{OnBackend, Runner};

/// Runs the gate on the runner under test and on the f32 reference.
pub fn gate<O>(runner: &dyn Runner<O>, context: &Context) -> Outcome
where
    O: OperationOn<Reference<f32>>,
{
    let backend = OnBackend::new(Reference::<f32>::new);
    let single: &dyn Runner<O> = &backend;
    let pools: Result<Vec<_>, _> = (1..=3).map(|n| rayon::ThreadPoolBuilder::new().num_threads(n).build()).collect();
    let pools = match pools {
        Ok(pools) => pools,
        Err(error) => return Outcome::not_run(format!("no thread pool: {error}")),
    };
    over_cases::<O>(Gate::Det, context, |case, rng| {
        let (inputs, upstream, first) = full_run(runner, case, rng)?;
        let first_single: Run<ArrayD<f64>> = single.run(&case.config, &inputs, upstream.as_ref()).map_err(text)?;
        for pool in &pools {
            let again = pool.install(|| runner.run(&case.config, &inputs, upstream.as_ref())).map_err(text)?;
            equal_bits(&again, &first)?;
            let again = pool.install(|| single.run(&case.config, &inputs, upstream.as_ref())).map_err(text)?;
            equal_bits(&again, &first_single)?;
        }
        Ok(0.0)
    })
    .outcome(O::STEM, Gate::Det, context)
}

/// The gate for a device, whose threads are its own: every case has the same bits again, with pieces of work that may run
/// at the same time in the other order, which is what `reversed` does.
#[inline(never)]
pub fn gate_device<O: Operation>(runner: &dyn Runner<O>, reversed: &dyn Runner<O>, context: &Context) -> Outcome {
    over_device_cases::<O>(Gate::Det, context, |case, rng| {
        let (inputs, upstream, first) = full_run(runner, case, rng)?;
        let again = reversed.run(&case.config, &inputs, upstream.as_ref()).map_err(text)?;
        equal_bits(&again, &first)?;
        Ok(0.0)
    })
    .outcome(O::STEM, Gate::Det, context)
}

/// All outputs and gradients of a run have the bits of another, and there are the same.
pub(crate) fn equal_bits(again: &Run<ArrayD<f64>>, first: &Run<ArrayD<f64>>) -> Result<(), String> {
    for (prefix, again, first) in [("", &again.outputs, &first.outputs), ("d", &again.grads, &first.grads)] {
        if let Some(extra) = again.names().find(|name| first.get(name).is_none()) {
            return Err(format!("`{prefix}{extra}` is there, expected it absent"));
        }
        for (name, first) in first.iter() {
            let again = again.get(name).ok_or_else(|| format!("`{prefix}{name}` is absent"))?;
            passed(same_bits(&format!("{prefix}{name}"), again.view(), first.view()))?;
        }
    }
    Ok(())
}
