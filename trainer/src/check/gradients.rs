//! The gradient of every parameter tensor against the `f64` reference, and faults that this comparison must notice.

use anyhow::{Result, bail};
use dormouse_cuda::Arm;
use dormouse_reference::{Backend, Reference};
use rand::RngExt;
use rand_distr::StandardNormal;

use super::{Bands, Lab, Outcome, exact, letters};
use crate::checkpoint::{State, Tensor};
use crate::config::{Config, Engram, Math};
use crate::instruments::{Engagement, Witness};
use crate::learner::ModelLearner;
use crate::model::{Ablation, Param};
use crate::rng::{Purpose, stream};
use crate::train::Learner;

/// The parameters that get their gradient through the recurrence alone.
const BEHIND_THE_RECURRENCE: [&str; 11] = [
    "kda.q",
    "kda.k",
    "kda.v",
    "kda.decay_down",
    "kda.decay_up",
    "kda.beta",
    "kda.conv_q",
    "kda.conv_k",
    "kda.conv_v",
    "kda.dt_bias",
    "kda.a_log",
];

/// Initial weights moved off their symmetric start (zero iteration embedding, unit gains), where some gradients vanish.
fn weights(config: &Config) -> Result<State> {
    let mut state = ModelLearner::new(Reference::<f32>::new(), &exact(config))?.export()?;
    for (row, tensor) in state.weights.values_mut().enumerate() {
        let mut rng = stream(5, Purpose::Test, 0, row as u64);
        let moved = tensor.as_f32().unwrap_or_default().iter();
        let moved = moved.map(|x| x + 0.02 * rng.sample::<f32, _>(StandardNormal)).collect();
        *tensor = Tensor::f32(&tensor.shape, moved);
    }
    Ok(state)
}

/// How one gradient compares.
struct Compared<'a> {
    name: &'a str,
    /// Worst measure as a share of its band.
    worst: f64,
    /// All zero where it should not be.
    dead: bool,
    message: String,
}

/// The band of a gradient's slope.
///
/// Errors of relative rms s without direction move the slope by s over the root of the number of elements that carry the
/// norm, (sum w^2)^2 / sum w^4; twice that is added (docs/adr/0009). The band is made of the reference's gradient and of
/// what the arithmetic may do, never of the error at hand, which would let a fault widen its own band.
fn slope_band(want: &[f64], bands: &Bands) -> f64 {
    bands.slope + 2.0 * bands.noise * one_over_root_n(want)
}

/// The band of a gradient's relative rms, which scatters by one over the root of the same number (docs/adr/0016). At a low
/// precision noise that is larger than the band takes its place; in f32 there is none (docs/adr/0034).
fn rms_band(want: &[f64], bands: &Bands) -> f64 {
    let noise = if bands.scatter > 0.0 { bands.noise } else { 0.0 };
    bands.rms.max(noise) * (1.0 + bands.scatter * one_over_root_n(want))
}

/// One over the root of the number of elements that carry the norm.
fn one_over_root_n(want: &[f64]) -> f64 {
    let square: f64 = want.iter().map(|w| w * w).sum();
    let fourth: f64 = want.iter().map(|w| w.powi(4)).sum();
    fourth.sqrt() / square
}

/// How much noisier than the reference's own f32 a device's may be, which adds up in another order.
const AS_NOISY: f64 = 4.0;

/// The error of `got` relative to `want`.
fn rms(got: &[f64], want: &[f64]) -> f64 {
    let square: f64 = want.iter().map(|w| w * w).sum();
    let error: f64 = got.iter().zip(want).map(|(g, w)| (g - w).powi(2)).sum();
    (error / square).sqrt()
}

/// What the arithmetic does to each gradient of a model with an objective of latents, as relative rms; nothing for others,
/// whose bands are known.
///
/// Such an objective divides by the smallest distances of latents, so it enlarges rounding as many times as those are
/// smaller than the latents, and the gradient of one number may be a sum of which little is left. How noisy it is is
/// measured on the reference (docs/adr/0030, 0034): in f32 by what the reference in f32 misses, at a lower precision by
/// how far weights that are moved by an operand's rounding move the gradient. No fault of the device has a part in it.
fn noise_of<B: Backend + Witness>(
    lab: &Lab<'_, B>,
    config: &Config,
    state: &State,
    params: &[Param],
    want: &[f64],
) -> Result<Option<Vec<f64>>> {
    if !config.jepa.on() {
        return Ok(None);
    }
    let batch = letters(config, 0);
    let missed = |got: &[f64]| params.iter().map(|p| rms(&got[p.range()], &want[p.range()])).collect::<Vec<f64>>();
    if lab.math == Math::F32 {
        let mut reference = ModelLearner::new(Reference::<f32>::new(), &exact(config))?;
        reference.import(state)?;
        return Ok(Some(missed(&reference.gradient(&batch)?.0).into_iter().map(|rms| AS_NOISY * rms).collect()));
    }
    // More than twice the rms of an operand's rounding, which leaves room for that of activations.
    let rounding = if lab.math == Math::Tf32 { 2f64.powi(-11) } else { 2f64.powi(-9) };
    let mut reference = ModelLearner::new(Reference::<f64>::new(), &exact(config))?;
    let mut noise = vec![0.0f64; params.len()];
    for draw in 0..MOVES {
        reference.import(&moved(state, rounding, draw))?;
        for (noise, rms) in noise.iter_mut().zip(missed(&reference.gradient(&batch)?.0)) {
            *noise = noise.max(rms);
        }
    }
    Ok(Some(noise))
}

/// How often weights are moved: once may be small by chance.
const MOVES: u64 = 2;

/// Weights, each times one plus a normal number of this size.
fn moved(state: &State, rounding: f64, draw: u64) -> State {
    let mut state = state.clone();
    for (row, tensor) in state.weights.values_mut().enumerate() {
        let mut rng = stream(6, Purpose::Test, draw, row as u64);
        let values = tensor.as_f32().unwrap_or_default().iter();
        let values = values.map(|&x| x * (1.0 + rounding * rng.sample::<f64, _>(StandardNormal)) as f32).collect();
        *tensor = Tensor::f32(&tensor.shape, values);
    }
    state
}

/// Relative rms and slope of a gradient.
fn compare<'a>(param: &'a Param, got: &[f64], want: &[f64], bands: &Bands) -> Compared<'a> {
    let square: f64 = want.iter().map(|w| w * w).sum();
    let rms = rms(got, want);
    let slope = (got.iter().zip(want).map(|(g, w)| g * w).sum::<f64>() / square - 1.0).abs();
    let (rms_band, slope_band) = (rms_band(want, bands), slope_band(want, bands));
    let over = [rms / rms_band, slope / slope_band];
    // A NaN is worse than anything.
    let worst = over.into_iter().map(|x| if x.is_nan() { f64::INFINITY } else { x }).fold(0.0, f64::max);
    let dead = square > 0.0 && got.iter().all(|&g| g == 0.0);
    let message = format!("`{}` rms {rms:.2e} (band {rms_band:.1e}), slope {slope:.2e} ({slope_band:.1e})", param.name);
    Compared { name: param.name, worst, dead, message }
}

/// The verdict on all gradients, the names of dead ones, and what did not run as it should.
struct Verdict {
    worst: f64,
    dead: Vec<String>,
    message: String,
    account: Vec<String>,
}

impl Verdict {
    fn outcome(self) -> Outcome {
        match self {
            Verdict { account, .. } if !account.is_empty() => Outcome::Fail(account.join("; ")),
            Verdict { worst, dead, .. } if worst <= 1.0 && dead.is_empty() => Outcome::Pass(worst),
            Verdict { dead, message, .. } if dead.is_empty() => Outcome::Fail(message),
            Verdict { dead, .. } => Outcome::Fail(format!("no gradient at all: {}", dead.join(", "))),
        }
    }
}

/// What is wrong with the passes of a gradient: each operation's backward pass ran as often as it was asked for, on the
/// arm that is asked for.
fn ran(account: &Engagement, arm: Option<Arm>) -> Vec<String> {
    let mut problems = account.problems();
    let Some(arm) = arm else { return problems };
    let other = usize::from(arm == Arm::Plain);
    for row in account.rows.iter().filter(|row| row.grad) {
        let (forward, backward) = (row.forward[other], row.backward[other]);
        if forward + backward > 0 {
            let stem = row.stem;
            problems.push(format!("{stem}: {forward} forward and {backward} backward passes were not on arm {arm}"));
        }
    }
    problems
}

fn verdict<B: Backend + Witness>(lab: &Lab<'_, B>, config: &Config, ablation: Ablation) -> Result<Verdict> {
    let state = weights(config)?;
    let batch = letters(config, 0);
    let mut reference = ModelLearner::new(Reference::<f64>::new(), &exact(config))?;
    reference.import(&state)?;
    let mut device = lab.learner(config, lab.graphs)?;
    device.import(&state)?;
    device.set_ablation(ablation);
    let (want, _) = reference.gradient(&batch)?;
    let (got, _) = device.gradient(&batch)?;
    let account = device.engagement().map(|account| ran(&account, lab.arm)).unwrap_or_default();
    let bands = Bands::of(lab.math);
    let params = &device.table().params;
    let noise = noise_of(lab, config, &state, params, &want)?;
    let all: Vec<_> = params
        .iter()
        .enumerate()
        .map(|(i, p)| {
            let noise = noise.as_ref().map_or(bands.noise, |noise| bands.noise.max(noise[i]));
            compare(p, &got[p.range()], &want[p.range()], &Bands { noise, ..bands })
        })
        .collect();
    let dead = all.iter().filter(|c| c.dead).map(|c| c.name.to_owned()).collect();
    let Some(worst) = all.iter().max_by(|a, b| a.worst.total_cmp(&b.worst)) else {
        bail!("the model has no parameter")
    };
    let red = all.iter().filter(|c| c.worst > 1.0).count();
    Ok(Verdict { worst: worst.worst, dead, message: format!("{red} of {}: {}", all.len(), worst.message), account })
}

/// `tiny`.
pub fn tiny<B: Backend + Witness>(lab: &Lab<'_, B>) -> Result<Outcome> {
    Ok(verdict(lab, &lab.tiny(), Ablation::None)?.outcome())
}

/// `nano` at batch 1.
pub fn nano<B: Backend + Witness>(lab: &Lab<'_, B>) -> Result<Outcome> {
    if lab.quick {
        return Ok(Outcome::NotRun("--quick".into()));
    }
    let mut config = lab.config("nano");
    config.train.batch_rows = 1;
    Ok(verdict(lab, &config, Ablation::None)?.outcome())
}

/// The preset that is asked for, at batch 1, with everything that it has on.
pub fn preset<B: Backend + Witness>(lab: &Lab<'_, B>) -> Result<Outcome> {
    let mut config = lab.preset();
    config.train.batch_rows = 1;
    Ok(verdict(lab, &config, Ablation::None)?.outcome())
}

/// `tiny` with its n-gram memory, and the same with the memory cut off, which must leave its parameters without a gradient.
pub fn engram<B: Backend + Witness>(lab: &Lab<'_, B>) -> Result<Outcome> {
    let mut config = lab.tiny();
    config.model.engram = Engram::Device;
    let whole = verdict(lab, &config, Ablation::None)?.outcome();
    let cut = verdict(lab, &config, Ablation::DetachMemory)?.dead;
    let memory = ["engram.key", "engram.value", "engram.table"];
    if cut != memory {
        return Ok(Outcome::Fail(format!("without a memory {cut:?} have no gradient, expected {memory:?}")));
    }
    Ok(whole)
}

/// A fault must be noticed; `Pass` says by how much.
fn noticed<B: Backend + Witness>(lab: &Lab<'_, B>, fault: Ablation) -> Result<Outcome> {
    let verdict = verdict(lab, &lab.tiny(), fault)?;
    if verdict.worst > 1.0 {
        return Ok(Outcome::Pass(1.0 / verdict.worst));
    }
    Ok(Outcome::Fail(format!("the fault is not noticed: {}", verdict.message)))
}

pub fn decay_gradient_scaled<B: Backend + Witness>(lab: &Lab<'_, B>) -> Result<Outcome> {
    noticed(lab, Ablation::DecayGradientScaled)
}

pub fn decay_bias_dropped<B: Backend + Witness>(lab: &Lab<'_, B>) -> Result<Outcome> {
    noticed(lab, Ablation::DecayBiasDropped)
}

pub fn head_beta_dropped<B: Backend + Witness>(lab: &Lab<'_, B>) -> Result<Outcome> {
    noticed(lab, Ablation::FirstHeadBetaDropped)
}

/// A recurrence that gives no gradient is noticed, and the parameters that die of it are named.
pub fn detached<B: Backend + Witness>(lab: &Lab<'_, B>) -> Result<Outcome> {
    let verdict = verdict(lab, &lab.tiny(), Ablation::DetachRecurrence)?;
    if verdict.dead == BEHIND_THE_RECURRENCE {
        return Ok(Outcome::Pass(1.0 / verdict.worst));
    }
    let expected = BEHIND_THE_RECURRENCE.join(", ");
    Ok(Outcome::Fail(format!("named {}, expected {expected}", verdict.dead.join(", "))))
}

/// Steps of the difference quotient of [`slopes`], as shares of a nat that the loss should change by.
const NATS: [f64; 3] = [4e-3, 1e-3, 2.5e-4];

/// How well a quotient of two `f32` losses near 5.5 must agree: they are known to 5e-7 and differ by 2.5e-4 or more, and
/// the curvature along a step that moves the loss by 1e-3 is small.
const QUOTIENT: f64 = 0.02;

/// Along each tensor's own gradient the loss of the device's forward pass changes as fast as the gradient says:
/// (L(x + h v) - L(x - h v)) / 2 h = |g| for v = g / |g|. No reference takes part.
pub fn slopes<B: Backend + Witness>(lab: &Lab<'_, B>) -> Result<Outcome> {
    if lab.math != Math::F32 {
        return Ok(Outcome::NotRun("a difference of rounded losses says nothing".into()));
    }
    let config = lab.tiny();
    let state = weights(&config)?;
    let batch = letters(&config, 0);
    let mut device = lab.learner(&config, lab.graphs)?;
    device.import(&state)?;
    let (gradient, _) = device.gradient(&batch)?;
    let params = device.table().params.clone();
    // One tensor in six still meets every part of the model: the table is in the order of the parts.
    let (each, nats) = if lab.quick { (6, &NATS[1..2]) } else { (1, &NATS[..]) };
    let (mut worst, mut message) = (0.0, String::new());
    for param in params.iter().step_by(each) {
        let g = &gradient[param.range()];
        let norm = g.iter().map(|x| x * x).sum::<f64>().sqrt();
        let mut error = f64::INFINITY;
        for &nats in nats {
            let h = nats / norm / 2.0;
            let mut at = |sign: f64| -> Result<f64> {
                let mut moved = state.clone();
                let values = state.weights[param.name].as_f32().unwrap_or_default().iter().zip(g);
                let values = values.map(|(&x, g)| (f64::from(x) + sign * h * g / norm) as f32).collect();
                moved.weights.insert(param.name.to_owned(), Tensor::f32(&param.shape, values));
                device.import(&moved)?;
                let (_, losses) = device.gradient(&batch)?;
                Ok(losses.iter().sum::<f64>() / losses.len() as f64)
            };
            let quotient = (at(1.0)? - at(-1.0)?) / (2.0 * h);
            error = error.min((quotient / norm - 1.0).abs());
        }
        let over = if error.is_nan() { f64::INFINITY } else { error / QUOTIENT };
        if over > worst {
            (worst, message) = (over, format!("`{}` changes the loss {error:.1e} off its gradient", param.name));
        }
    }
    Ok(if worst <= 1.0 { Outcome::Pass(worst) } else { Outcome::Fail(message) })
}

#[cfg(test)]
mod tests {
    use super::{Bands, rms_band, slope_band};
    use crate::config::Math;

    #[test]
    fn the_band_of_a_slope_is_wide_only_where_few_elements_carry_the_norm() {
        let bf16 = Bands::of(Math::Bf16);
        // Ten thousand elements would show a factor of 1.01, four would not, and one that carries the norm is as one.
        assert!(slope_band(&[0.5; 10_000], &bf16) < 0.0061);
        assert!((slope_band(&[0.5; 4], &bf16) - 0.055).abs() < 1e-12);
        let mut single = [1e-6; 10_000];
        single[7] = 1.0;
        assert!((slope_band(&single, &bf16) - 0.105).abs() < 1e-6);
        // Of one element, the error is its slope and its rms alike, and so are the bands but for what has a direction.
        assert!((rms_band(&single, &bf16) - 0.15).abs() < 1e-6 && rms_band(&[0.5; 10_000], &bf16) < 0.0511);
        assert_eq!(rms_band(&[0.5; 4], &Bands::of(Math::F32)), 1e-4);
        // f32 has no such noise.
        assert!((slope_band(&[0.5; 4], &Bands::of(Math::F32)) - 1e-5).abs() < 1e-18);
    }
}
