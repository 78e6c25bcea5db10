//! Gate `fd`: is the hand-written adjoint the derivative?
//!
//! For every input, along fresh random directions v, the central difference (L(x + h v) - L(x - h v)) / 2h of
//! L = sum <w, output> is held against <gradient, v>. The step h is swept over six decades and the best one counts:
//! large steps err by curvature, small ones by rounding, and a wrong gradient errs at every step.

use ndarray::ArrayD;
use rand_chacha::ChaCha8Rng;

use super::{Context, Outcome, Status, Tally, differentiable, full_run, inner_product, over_cases, text};
use crate::description::{Case, Gate, Operation};
use crate::draw;
use crate::named::Values;
use crate::runner::Runner;

/// Fresh directions per input and case.
const DIRECTIONS: usize = 2;

/// Steps of the sweep.
const STEPS: [f64; 7] = [1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8];

/// Runs the gate.
pub fn gate<O: Operation>(runner: &dyn Runner<O>, context: &Context) -> Outcome {
    if let Some(reason) = O::NO_GRADIENT {
        return Outcome::not_applicable(reason);
    }
    let tally: Tally = over_cases::<O>(Gate::Fd, context, |case, rng| check(runner, case, rng));
    let outcome = tally.outcome(O::STEM, Gate::Fd, context);
    if outcome.status == Status::Pass && outcome.worst == 0.0 {
        let reason = "every difference equals its gradient exactly, so a thing was compared with itself".to_owned();
        return Outcome { status: Status::Fail, reason, ..outcome };
    }
    outcome
}

fn check<O: Operation>(runner: &dyn Runner<O>, case: &Case<O::Config>, rng: &mut ChaCha8Rng) -> Result<f64, String> {
    let (inputs, upstream, run) = full_run(runner, case, rng)?;
    let upstream = upstream.expect("an operation with gradients has upstream gradients");
    let tolerance = O::tolerances(case).fd;
    let mut worst = 0.0f64;
    for name in differentiable::<O>(&case.config, &inputs) {
        let gradient = run.grads.get(name).ok_or_else(|| format!("`d{name}` is absent"))?;
        let value = inputs.at(name);
        if gradient.shape() != value.shape() {
            return Err(format!("`d{name}` has shape {:?}, expected {:?}", gradient.shape(), value.shape()));
        }
        if let Some(bad) = gradient.iter().find(|g| !g.is_finite()) {
            return Err(format!("`d{name}` holds {bad}"));
        }
        if value.is_empty() {
            continue;
        }
        for _ in 0..DIRECTIONS {
            let v = draw::direction(rng, value, O::direction_scale(name, value));
            let (error, by_gradient, by_difference) =
                best_step(runner, case, &inputs, &upstream, name, gradient, &v, tolerance.tol)?;
            if error.is_nan() || error > 1.0 {
                return Err(format!(
                    "<d{name}, v> = {by_gradient:.12e}, central difference {by_difference:.12e}: {error:.2e} of tolerance"
                ));
            }
            worst = worst.max(error);
        }
    }
    Ok(worst)
}

/// The smallest error over tolerance in the sweep, with both derivatives at that step.
fn best_step<O: Operation>(
    runner: &dyn Runner<O>,
    case: &Case<O::Config>,
    inputs: &Values,
    upstream: &Values,
    name: &'static str,
    gradient: &ArrayD<f64>,
    v: &ArrayD<f64>,
    tol: f64,
) -> Result<(f64, f64, f64), String> {
    let by_gradient: f64 = gradient.iter().zip(v).map(|(g, v)| g * v).sum();
    // The size that <g, v> has for a random direction: what the error is relative to when <g, v> happens to be small.
    let typical = gradient.iter().zip(v).map(|(g, v)| (g * v).powi(2)).sum::<f64>().sqrt();
    let loss = |h: f64| -> Result<(f64, f64), String> {
        let mut moved = inputs.clone();
        if let Some(x) = moved.get_mut(name) {
            x.zip_mut_with(v, |x, &v| *x += h * v);
        }
        let run = runner.run(&case.config, &moved, None).map_err(text)?;
        Ok(inner_product(upstream, &run.outputs))
    };
    let mut best = (f64::INFINITY, by_gradient, f64::NAN);
    for h in STEPS {
        let (plus, magnitude) = loss(h)?;
        let (minus, _) = loss(-h)?;
        let by_difference = (plus - minus) / (2.0 * h);
        let scale = by_gradient.abs().max(by_difference.abs()).max(typical);
        // What rounding alone does to the difference of two sums of this magnitude.
        let noise = 4.0 * f64::EPSILON * magnitude / h;
        let allowed = tol * scale + noise;
        let error = (by_difference - by_gradient).abs();
        // A step at which rounding noise is as large as the derivative says nothing.
        if noise > 1e-3 * scale && scale > 0.0 {
            continue;
        }
        let over = if error == 0.0 { 0.0 } else { error / allowed };
        if over < best.0 {
            best = (over, by_gradient, by_difference);
        }
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use dormouse_reference::Reference;

    use super::gate;
    use crate::description::Operation;
    use crate::gates::{Context, Status};
    use crate::ops::rms_norm::RmsNormOp;
    use crate::runner::{OnBackend, Runner};

    /// Where every error is exactly zero nothing was compared, here because the only case has no elements.
    #[test]
    fn a_gate_without_any_error_is_red() {
        let empty = RmsNormOp::cases().into_iter().find(|case| case.dims.iter().any(|(_, size)| *size == 0));
        let context = |only: Option<String>| Context {
            seed: 1,
            only,
            random_cases: 0,
            production: false,
            golden: PathBuf::new(),
            stop_at_first: false,
            again: String::new(),
        };
        let reference = OnBackend::new(Reference::<f64>::new);
        let runner: &dyn Runner<RmsNormOp> = &reference;
        let outcome = gate(runner, &context(empty.map(|case| case.name)));
        assert_eq!(outcome.status, Status::Fail, "{outcome:?}");
        assert!(outcome.reason.contains("compared with itself"), "{outcome:?}");
        assert_eq!(gate(runner, &context(None)).status, Status::Pass);
    }
}
