//! Gate `poison`: does a device read memory that nobody wrote, or memory beside its inputs?
//!
//! The same case runs twice: once plainly, once with scratch that starts as NaN and with NaN right before and after
//! every input. The bits must be the same. The reference owns whole arrays, so the question has no meaning for it.

use ndarray::ArrayD;

use super::{Context, Outcome, full_run, over_device_cases, text};
use crate::description::{Gate, Operation, Run};
use crate::gates::det::equal_bits;
use crate::runner::Runner;

/// Compares a device's runner with the same device in poisoned memory.
#[inline(never)]
pub fn gate<O: Operation>(plain: &dyn Runner<O>, poisoned: &dyn Runner<O>, context: &Context) -> Outcome {
    over_device_cases::<O>(Gate::Poison, context, |case, rng| {
        let (inputs, upstream, clean) = full_run(plain, case, rng)?;
        let dirty: Run<ArrayD<f64>> = poisoned.run(&case.config, &inputs, upstream.as_ref()).map_err(text)?;
        equal_bits(&dirty, &clean)?;
        Ok(0.0)
    })
    .outcome(O::STEM, Gate::Poison, context)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    use dormouse_reference::Reference;

    use crate::gates::Status;
    use crate::ops::rms_norm::RmsNormOp;
    use crate::runner::{Fault, Faulty, OnBackend, Plant};

    #[test]
    fn a_nan_that_leaks_in_is_red_and_equal_bits_are_green() {
        let context = Context {
            seed: 1,
            only: None,
            random_cases: 4,
            production: false,
            golden: PathBuf::new(),
            stop_at_first: true,
            again: String::new(),
        };
        let plain = OnBackend::new(Reference::<f32>::new);
        let same: &dyn Runner<RmsNormOp> = &plain;
        assert_eq!(gate(same, same, &context).status, Status::Pass);
        let leaky = Faulty::new(same, Plant::Grad("gain", Fault::Nan));
        assert_eq!(gate(same, &leaky, &context).status, Status::Fail);
    }
}
