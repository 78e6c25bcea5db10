//! Gate `meta`: laws that need no second implementation.
//!
//! A device is held to the same laws, with three differences. A parameter's gradient is added in f32. Laws whose checks
//! count on f64 ([`Law::Custom`]) are left to the reference. And a matrix product of another shape may be summed in
//! another order by a library, so where [`Device::other_shapes_same_bits`] is off, a slice of a run equals the run of
//! that slice within the tolerance of gate `diff`; causality needs no other shape and holds bit for bit.

use ndarray::{ArrayD, Axis, Slice};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use dormouse_reference::Precision;

use super::{Context, Outcome, Tally, diff, full_run, over_some_cases, passed, text};
use crate::compare::{compare, same_bits};
use crate::description::{Case, Gate, Law, Operation, Role, glue};
use crate::named::Values;
use crate::runner::Runner;

/// What the laws of a device allow for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// The precision of matrix products.
    pub precision: Precision,
    /// Whether products of other shapes sum in the same order.
    pub other_shapes_same_bits: bool,
}

/// Runs every law on every case.
pub fn gate<O: Operation>(runner: &dyn Runner<O>, context: &Context) -> Outcome {
    run(runner, None, context)
}

/// Runs the laws that hold on a device.
#[inline(never)]
pub fn gate_device<O: Operation>(runner: &dyn Runner<O>, device: Device, context: &Context) -> Outcome {
    run(runner, Some(device), context)
}

fn run<O: Operation>(runner: &dyn Runner<O>, device: Option<Device>, context: &Context) -> Outcome {
    let laws = O::laws();
    let has_params = O::NO_GRADIENT.is_none() && O::tensors().iter().any(|s| s.role == Role::Param);
    if laws.is_empty() && !has_params {
        return Outcome::not_applicable("the operation states no law");
    }
    let wanted = |case: &Case<O::Config>| device.is_none() || O::on_devices(case);
    let tally: Tally = over_some_cases::<O>(Gate::Meta, context, &wanted, &|case, rng| {
        let mut worst = 0.0f64;
        if has_params {
            let eps = if device.is_some() { f64::from(f32::EPSILON) } else { f64::EPSILON };
            worst = accumulates(runner, case, eps, rng).map_err(|e| format!("gradients of parameters add: {e}"))?;
        }
        for law in &laws {
            let result = match law {
                Law::Independent(axis) => {
                    independent(runner, case, axis, device, rng).map_err(|e| format!("slices of {axis}: {e}"))
                }
                Law::Causal(axis) => {
                    causal(runner, case, axis, rng).map_err(|e| format!("causality along {axis}: {e}"))
                }
                Law::Custom { .. } if device.is_some() => Ok(0.0),
                Law::Custom { name, check } | Law::Exact { name, check } => {
                    check(runner, case, rng).map_err(|e| format!("{name}: {e}"))
                }
            };
            let error = result?;
            if error.is_nan() || error > 1.0 {
                let name = if let Law::Custom { name, .. } | Law::Exact { name, .. } = law { name } else { "law" };
                return Err(format!("{name}: {error:.3e} of tolerance"));
            }
            worst = worst.max(error);
        }
        Ok(worst)
    });
    tally.outcome(O::STEM, Gate::Meta, context)
}

/// A parameter's gradient is added to what an earlier part of the batch left there; all else keeps its bits.
fn accumulates<O: Operation>(
    runner: &dyn Runner<O>,
    case: &Case<O::Config>,
    eps: f64,
    rng: &mut ChaCha8Rng,
) -> Result<f64, String> {
    const EARLIER: f64 = 0.75;
    let (inputs, upstream, alone) = full_run(runner, case, rng)?;
    let run = || runner.run(&case.config, &inputs, upstream.as_ref());
    let added = glue::with_earlier_gradient(EARLIER, run).map_err(text)?;
    let mut worst = 0.0f64;
    for (name, alone) in alone.grads.iter() {
        let added = added.grads.get(name).ok_or_else(|| format!("`d{name}` is absent"))?;
        if O::spec(name).role != Role::Param {
            passed(same_bits(&format!("d{name}"), added.view(), alone.view()))?;
            continue;
        }
        for (added, alone) in added.iter().zip(alone) {
            // One addition, or a handful where the gradient is summed in place.
            let error = (added - EARLIER - alone).abs() / (16.0 * eps * (EARLIER + alone.abs()));
            if error.is_nan() || error > 1.0 {
                return Err(format!("`d{name}` is {added:e} after {EARLIER}, expected {:e}", EARLIER + alone));
            }
            worst = worst.max(error);
        }
    }
    Ok(worst)
}

/// Where `axis` is in each tensor of `values`.
fn axis_of<O: Operation>(name: &str, axis: &str) -> Option<usize> {
    O::spec(name).axis(axis)
}

/// What belongs to place `i` of `axis`: there, and in the axis that it owns. None if the tensor has neither.
fn part_of<O: Operation>(case: &Case<O::Config>, name: &str, axis: &str, i: usize) -> Option<(Axis, Slice)> {
    if let Some(at) = axis_of::<O>(name, axis) {
        return Some((Axis(at), Slice::from(i..i + 1)));
    }
    let owned = O::owned_axis(axis)?;
    let share = case.dim(owned) / case.dim(axis);
    Some((Axis(axis_of::<O>(name, owned)?), Slice::from(i * share..(i + 1) * share)))
}

fn slice<O: Operation>(case: &Case<O::Config>, values: &Values, axis: &str, i: usize) -> Values {
    values.map(|name, array| match part_of::<O>(case, name, axis, i) {
        Some((at, part)) => array.slice_axis(at, part).to_owned(),
        None => array.clone(),
    })
}

/// Slice i of a run equals the run of slice i, bit for bit where the shape of a product decides nothing.
fn independent<O: Operation>(
    runner: &dyn Runner<O>,
    case: &Case<O::Config>,
    axis: &'static str,
    device: Option<Device>,
    rng: &mut ChaCha8Rng,
) -> Result<f64, String> {
    let len = case.dim(axis);
    if len == 0 {
        return Ok(0.0);
    }
    let (inputs, upstream, whole) = full_run(runner, case, rng)?;
    let i = rng.random_range(0..len);
    let one_inputs = slice::<O>(case, &inputs, axis, i);
    let one_upstream = upstream.as_ref().map(|u| slice::<O>(case, u, axis, i));
    let one = runner.run(&case.config, &one_inputs, one_upstream.as_ref()).map_err(text)?;
    let mut worst = 0.0f64;
    for (prefix, whole, one) in [("", &whole.outputs, &one.outputs), ("d", &whole.grads, &one.grads)] {
        for (name, whole) in whole.iter() {
            let Some((at, part)) = part_of::<O>(case, name, axis, i) else { continue };
            let one = one.get(name).ok_or_else(|| format!("`{prefix}{name}` is absent"))?;
            let want = whole.slice_axis(at, part);
            let name = format!("{prefix}{name}");
            match device.filter(|device| O::PRODUCTS > 0 && !device.other_shapes_same_bits) {
                None => passed(same_bits(&name, one.view(), want))?,
                Some(Device { precision, .. }) => {
                    // A slice may be small beside the others, and is summed from terms of their size.
                    let rms = (whole.iter().map(|x| x * x).sum::<f64>() / whole.len() as f64).sqrt();
                    let tolerance = diff::tolerance_of::<O>(case, precision, want.len()).usual(rms);
                    let comparison = compare(&name, one.view(), want, &tolerance);
                    worst = worst.max(passed(comparison)?);
                    worst
                }
            };
        }
    }
    Ok(worst)
}

/// Changing inputs at and after a position moves no output before it, and with no upstream gradient there, no gradient
/// before it.
fn causal<O: Operation>(
    runner: &dyn Runner<O>,
    case: &Case<O::Config>,
    axis: &'static str,
    rng: &mut ChaCha8Rng,
) -> Result<f64, String> {
    let len = case.dim(axis);
    if len < 2 {
        return Ok(0.0);
    }
    let (inputs, upstream, _) = full_run(runner, case, rng)?;
    let other = O::draw(case, rng);
    let at = rng.random_range(1..len);
    let moved: Values = inputs.map(|name, array| {
        let position = match (O::spec(name).role, axis_of::<O>(name, axis)) {
            (Role::Input | Role::Data, Some(position)) => position,
            _ => return array.clone(),
        };
        let mut array = array.clone();
        array
            .slice_axis_mut(Axis(position), Slice::from(at..))
            .assign(&other.at(name).slice_axis(Axis(position), Slice::from(at..)));
        array
    });
    // Outputs without the axis (a final state) see the future by right, so they send no gradient here.
    let upstream = upstream.map(|u| -> Values {
        u.iter()
            .filter_map(|(name, w)| {
                let position = axis_of::<O>(name, axis)?;
                let mut w: ArrayD<f64> = w.clone();
                w.slice_axis_mut(Axis(position), Slice::from(at..)).fill(0.0);
                Some((name, w))
            })
            .collect()
    });
    let before = runner.run(&case.config, &inputs, upstream.as_ref()).map_err(text)?;
    let after = runner.run(&case.config, &moved, upstream.as_ref()).map_err(text)?;
    for (prefix, before, after) in [("", &before.outputs, &after.outputs), ("d", &before.grads, &after.grads)] {
        for (name, before) in before.iter() {
            let Some(position) = axis_of::<O>(name, axis) else { continue };
            let after = after.get(name).ok_or_else(|| format!("`{prefix}{name}` is absent"))?;
            let prefix_of = |a: &ArrayD<f64>| a.slice_axis(Axis(position), Slice::from(..at)).to_owned();
            passed(same_bits(&format!("{prefix}{name}"), prefix_of(after).view(), prefix_of(before).view()))
                .map_err(|e| format!("inputs changed from {at} on: {e}"))?;
        }
    }
    Ok(0.0)
}
