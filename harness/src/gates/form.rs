//! Gate `form`: does the implementation equal a second, plain one that shares no code with it?

use super::{Context, Outcome, compare_runs, full_run, over_cases, uncancelled_sizes};
use crate::description::{Gate, Operation};
use crate::named::Values;
use crate::runner::Runner;

/// Runs the gate: every output and every gradient of every case against the operation's `naive` form.
pub fn gate<O: Operation>(runner: &dyn Runner<O>, context: &Context) -> Outcome {
    over_cases::<O>(Gate::Form, context, |case, rng| {
        let (inputs, upstream, run) = full_run(runner, case, rng)?;
        let plain = O::naive(&case.config, &inputs, upstream.as_ref(), None);
        let naive = |upstream: &Values| Ok(O::naive(&case.config, &inputs, Some(upstream), None));
        let sizes = uncancelled_sizes::<O>(case, &inputs, upstream.as_ref(), &plain, rng, naive)?;
        compare_runs(&run, &plain, &O::tolerances(case).form, &sizes)
    })
    .outcome(O::STEM, Gate::Form, context)
}
