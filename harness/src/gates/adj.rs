//! Gate `adj`: <J v, w> = <v, J^T w>, with J v from forward-mode dual numbers.
//!
//! Both sides are exact derivatives, so there is no step size and the bound is rounding alone. One input at a time, so
//! that a wrong gradient of one input cannot hide behind a large one of another.

use dormouse_reference::{Dual, Reference, Tensors};
use ndarray::{ArrayD, Zip};
use rand_chacha::ChaCha8Rng;

use super::{Context, Outcome, differentiable, full_run, over_cases, text};
use crate::description::{Case, Gate, OperationOn};
use crate::draw;
use crate::named::{Named, Values};
use crate::runner::Runner;

/// Fresh directions per input and case.
const DIRECTIONS: usize = 2;

/// Runs the gate.
pub fn gate<O: OperationOn<Reference<Dual>>>(runner: &dyn Runner<O>, context: &Context) -> Outcome {
    if let Some(reason) = O::NO_GRADIENT {
        return Outcome::not_applicable(reason);
    }
    over_cases::<O>(Gate::Adj, context, |case, rng| check(runner, case, rng)).outcome(O::STEM, Gate::Adj, context)
}

fn check<O: OperationOn<Reference<Dual>>>(
    runner: &dyn Runner<O>,
    case: &Case<O::Config>,
    rng: &mut ChaCha8Rng,
) -> Result<f64, String> {
    let (inputs, upstream, run) = full_run(runner, case, rng)?;
    let upstream = upstream.expect("an operation with gradients has upstream gradients");
    let tolerance = O::tolerances(case).adj.tol;
    let mut worst = 0.0f64;
    for name in differentiable::<O>(&case.config, &inputs) {
        let gradient = run.grads.get(name).ok_or_else(|| format!("`d{name}` is absent"))?;
        let value = inputs.at(name);
        if gradient.shape() != value.shape() {
            return Err(format!("`d{name}` has shape {:?}, expected {:?}", gradient.shape(), value.shape()));
        }
        for _ in 0..DIRECTIONS {
            let v = draw::direction(rng, value, O::direction_scale(name, value));
            let tangents = forward_tangents::<O>(case, &inputs, name, &v)?;
            let (mut left, mut left_size) = (0.0, 0.0);
            for (output, w) in upstream.iter() {
                let tangent = tangents.get(output).ok_or_else(|| format!("`{output}` is absent"))?;
                for (&w, &t) in w.iter().zip(tangent) {
                    left += w * t;
                    left_size += (w * t).abs();
                }
            }
            let right: f64 = gradient.iter().zip(&v).map(|(g, v)| g * v).sum();
            let right_size: f64 = gradient.iter().zip(&v).map(|(g, v)| (g * v).abs()).sum();
            let error = (left - right).abs();
            let over = if error == 0.0 { 0.0 } else { error / (tolerance * left_size.max(right_size)) };
            if over.is_nan() || over > 1.0 {
                return Err(format!(
                    "`{name}`: <J v, w> = {left:.15e}, <v, J^T w> = {right:.15e}: {over:.2e} of tolerance"
                ));
            }
            worst = worst.max(over);
        }
    }
    Ok(worst)
}

/// The derivative of every output along `v` in the input `name`.
fn forward_tangents<O: OperationOn<Reference<Dual>>>(
    case: &Case<O::Config>,
    inputs: &Values,
    name: &str,
    v: &ArrayD<f64>,
) -> Result<Values, String> {
    let b = Reference::<Dual>::new();
    let handles: Named<_> = inputs
        .try_map(|n, value| {
            if O::integers().contains(&n) {
                let tensor = b.persistent(value.shape(), dormouse_reference::DType::U32)?;
                b.upload(value.view(), &tensor)?;
                return Ok(tensor);
            }
            let mut dual = value.mapv(|x| Dual::new(x, 0.0));
            if n == name {
                Zip::from(&mut dual).and(v).for_each(|d, &v| d.du = v);
            }
            Ok(b.constant(dual))
        })
        .map_err(text)?;
    let run = O::run(&b, &case.config, &handles, None).map_err(text)?;
    let mut tangents = Values::new();
    for (output, tensor) in run.outputs.iter() {
        if b.dtype(tensor).is_float() {
            tangents.set(output, b.values(tensor).map_err(text)?.mapv(|d| d.du));
        }
    }
    Ok(tangents)
}
