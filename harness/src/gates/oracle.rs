//! Gate `oracle`: does the reference equal an implementation whose gradients nobody wrote?
//!
//! The oracle is the operation as tensor operations of another library, differentiated by that library. Finite differences
//! only say that an adjoint belongs to its forward pass, and gate `form` compares with a second form that the same people
//! wrote from the same reading of the equation. What both have wrong alike, only somebody else can see. The harness knows
//! no such library: whoever runs the gate gives it the oracle as a runner.

use super::{Context, Outcome, compare_runs, full_run, over_cases, text, usual_sizes};
use crate::description::{Gate, Operation};
use crate::runner::Runner;

/// Runs the gate: every output and every gradient of every case against the oracle's, both in f64.
///
/// The tolerance is that of gate `form`, two orders of operation of one formula in f64, and the oracle is the trusted side:
/// it says how large a gradient usually is. No case is left out: an oracle has every option that the reference has.
pub fn gate<O: Operation>(oracle: Option<&dyn Runner<O>>, runner: &dyn Runner<O>, context: &Context) -> Outcome {
    let Some(oracle) = oracle else {
        return Outcome::not_run("this build has no oracle");
    };
    over_cases::<O>(Gate::Oracle, context, |case, rng| {
        let (inputs, upstream, run) = full_run(runner, case, rng)?;
        let told = oracle.run(&case.config, &inputs, upstream.as_ref()).map_err(text)?;
        let usual = usual_sizes::<O>(case, &told, rng, |upstream| {
            oracle.run(&case.config, &inputs, Some(upstream)).map_err(text)
        })?;
        compare_runs(&run, &told, &usual, &O::tolerances(case).form)
    })
    .outcome(O::STEM, Gate::Oracle, context)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use dormouse_reference::Reference;

    use super::*;
    use crate::gates::Status;
    use crate::ops::rms_norm::RmsNormOp;
    use crate::runner::{Naive, OnBackend};

    fn against(oracle: Option<&dyn Runner<RmsNormOp>>) -> Outcome {
        let context = Context {
            seed: 7,
            only: None,
            random_cases: 4,
            production: false,
            golden: PathBuf::new(),
            stop_at_first: false,
            again: String::new(),
        };
        gate::<RmsNormOp>(oracle, &OnBackend::new(Reference::<f64>::new), &context)
    }

    #[test]
    fn an_oracle_that_agrees_is_green_one_that_does_not_is_red_and_none_is_not_a_pass() {
        assert_eq!(against(Some(&Naive { twist: None })).status, Status::Pass);
        for twist in ["eps-outside-root", "backward-mean-sign", "dc-dropped"] {
            assert_eq!(against(Some(&Naive { twist: Some(twist) })).status, Status::Fail, "{twist}");
        }
        assert_eq!(against(None).status, Status::NotRun);
    }
}
