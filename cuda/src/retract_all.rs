//! `retract_all`: the equations are in `dormouse_reference::retract` and the table in `dormouse_reference::retract_all`.
//!
//! Both arms are those of [`crate::retract`]. Arm `plain` calls it factor by factor. Arm `fused` takes the factors of all
//! shapes at once, in three launches for four iterations: a factor has the bits that it has alone.

use dormouse_reference::retract_all::{self, Config, Outputs, RetractAll, check_config};
use dormouse_reference::{Dims, Error, Result, Tensors, check_one};

use crate::arm::{Arm, Mutant};
use crate::device::Device;
use crate::retract::fused::{self, Factor, LARGEST_K, Scalars};
use crate::retract::{self, plain};
use crate::runtime::Engine;
use crate::tensor::Tensor;
use crate::words;

const STEM: &str = "retract_all";

const OP: &str = "retract_all::update";

/// Numbered in the kernels behind the faults of `retract`, which are about what happens to one matrix.
pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant::fused("first-matrix-of-a-factor"),
    Mutant::fused("last-matrix-left-alone"),
    Mutant::fused("one-spread-for-a-class"),
    Mutant::fused("null-renamed-local"),
];

impl<R: Engine> RetractAll for Device<R> {
    fn update(&self, config: &Config, params: &Tensor, apply: &Tensor) -> Result<Outputs<Tensor>> {
        let mut dims = Dims::new(OP);
        dims.bind("params", params.shape(), &["P"])?;
        check_config(config, dims.get("P"))?;
        self.check_floats(OP, &[("apply", apply)])?;
        check_one(OP, "apply", apply.shape())?;
        self.check_into(OP, "params", params, &[("apply", apply)])?;
        let spreads = self.float_scratch(&[config.factors.len()])?;
        match self.forward_arm(STEM) {
            Arm::Plain => one_by_one(self, config, params, apply, &spreads)?,
            Arm::Fused => at_once(self, config, params, apply, &spreads)?,
        }
        Ok(Outputs { spreads })
    }
}

/// Arm `plain`.
fn one_by_one<R: Engine>(
    b: &Device<R>,
    config: &Config,
    params: &Tensor,
    apply: &Tensor,
    spreads: &Tensor,
) -> Result<()> {
    let &Config { iterations, power_iterations, .. } = config;
    for (f, factor) in config.factors.iter().enumerate() {
        let [e, n, k] = factor.shape;
        let factor = b.view(params, factor.start, &factor.shape)?;
        let call = retract::Call { factor: &factor, apply, e, n, k, iterations, power_iterations };
        words::copy(b, &plain::update(b, &call)?, &b.view(spreads, f, &[1])?)?;
    }
    Ok(())
}

/// Arm `fused`.
fn at_once<R: Engine>(b: &Device<R>, config: &Config, params: &Tensor, apply: &Tensor, spreads: &Tensor) -> Result<()> {
    let &Config { iterations, power_iterations, .. } = config;
    if let Some(factor) = config.factors.iter().find(|factor| factor.shape[2] > LARGEST_K) {
        return Err(Error::Config {
            op: OP,
            field: "factors.shape",
            expected: format!("k <= {LARGEST_K} in the fused kernels; arm plain takes more"),
            got: format!("{:?}", factor.shape),
        });
    }
    // The kernels count from the last fault of one matrix.
    let mutant = match b.mutant(STEM) {
        0 => 0,
        own => retract::MUTANTS.len() as u32 + own,
    };
    if config.factors.iter().any(|factor| factor.shape[0] == 0) {
        // No launch knows of a factor without matrices.
        b.fill(spreads, 0.0)?;
    }
    let call = Scalars { buffer: params, apply, iterations, power_iterations, mutant };
    let factors = config.factors.iter().enumerate().filter(|(_, factor)| factor.shape[0] > 0);
    let factors: Vec<_> = factors
        .map(|(slot, &retract_all::Factor { start, shape: [count, n, k] })| (Factor { start, count, slot }, [n, k]))
        .collect();
    fused::update_all(b, &call, &factors, spreads)
}
