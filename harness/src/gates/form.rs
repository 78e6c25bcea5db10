//! Gate `form`: does the implementation equal a second, plain one that shares no code with it?

use super::{Context, Outcome, compare_runs, full_run, over_cases};
use crate::description::{Gate, Operation};
use crate::runner::Runner;

/// Runs the gate: every output and every gradient of every case against the operation's `naive` form.
pub fn gate<O: Operation>(runner: &dyn Runner<O>, context: &Context) -> Outcome {
    over_cases::<O>(Gate::Form, context, |case, rng| {
        let (inputs, upstream, run) = full_run(runner, case, rng)?;
        let plain = O::naive(&case.config, &inputs, upstream.as_ref(), None);
        compare_runs::<O>(&run, &plain, &O::tolerances(case).form, (&inputs, upstream.as_ref()))
    })
    .outcome(O::STEM, Gate::Form, context)
}
