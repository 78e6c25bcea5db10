//! Whole steps: losses, bits, NaN, counters, memory.

use std::ops::Range;

use anyhow::{Context, Result};
use dormouse_reference::{Backend, Reference};

use super::{Bands, Lab, Outcome, exact, letters};
use crate::checkpoint::State;
use crate::config::{Config, Format};
use crate::data::Data;
use crate::instruments::Witness;
use crate::learner::ModelLearner;
use crate::model::Ablation;
use crate::train::{Learner, StepRecord};

/// The learning rate of runs whose bits are compared: large enough that every step moves every weight.
const RATE: f64 = 1e-3;

/// Steps of those runs: two kinds of step, each run eagerly twice, captured and replayed.
fn steps<B>(lab: &Lab<'_, B>) -> u64 {
    if lab.graphs || !lab.quick { 12 } else { 4 }
}

/// A share of a band, or a failure beyond it.
fn within(share: f64, message: impl FnOnce() -> String) -> Outcome {
    // A NaN is in no band.
    if share <= 1.0 { Outcome::Pass(share) } else { Outcome::Fail(message()) }
}

/// 20 losses of `tiny` on the shipped text against the `f32` reference; a few where it is to be quick and all steps are
/// alike, since no graph takes over.
pub fn losses<B: Backend + Witness>(lab: &Lab<'_, B>) -> Result<Outcome> {
    let config = lab.tiny();
    let data = Data::open(&config)?;
    let all = if lab.graphs || !lab.quick { 20 } else { 6 };
    let run = |learner: &mut dyn Learner| -> Result<Vec<StepRecord>> {
        for step in 0..all {
            let batch = data.batch(step, config.train.batch_rows)?;
            learner.step(&batch, config.schedule().lr_at(step, config.train.total_steps))?;
        }
        learner.drain()
    };
    let want = run(&mut ModelLearner::new(Reference::<f32>::new(), &exact(&config))?)?;
    let got = run(&mut lab.learner(&config, lab.graphs)?)?;
    let band = Bands::of(lab.math).loss;
    let (mut worst, mut message) = (0.0, String::new());
    for (got, want) in got.iter().zip(&want) {
        let share = (got.loss / want.loss - 1.0).abs() / band;
        if !got.applied {
            return Ok(Outcome::Fail(format!("step {} was skipped", got.step + 1)));
        }
        if share.is_nan() || share > worst {
            worst = share;
            message = format!("step {}: loss {}, expected {} within {band:.0e}", got.step + 1, got.loss, want.loss);
        }
    }
    if got.len() as u64 != all {
        return Ok(Outcome::Fail(format!("{} records of {all}", got.len())));
    }
    Ok(within(worst, || message))
}

/// Nats of every position of held-out windows: the mean as the reference has it, and the same read byte by byte.
pub fn scores<B: Backend + Witness>(lab: &Lab<'_, B>) -> Result<Outcome> {
    let config = lab.tiny();
    let state = ModelLearner::new(Reference::<f32>::new(), &exact(&config))?.export()?;
    let windows: Vec<Vec<u8>> = (0..3).map(|i| letters(&config, i).bytes[..33].to_vec()).collect();
    let nats = |learner: &mut dyn Learner| -> Result<Vec<f64>> {
        learner.import(&state)?;
        learner.evaluate(&windows)
    };
    let want = nats(&mut ModelLearner::new(Reference::<f32>::new(), &exact(&config))?)?;
    let mut learner = lab.learner(&config, lab.graphs)?;
    let got = nats(&mut learner)?;
    let mean = |nats: &[f64]| nats.iter().sum::<f64>() / nats.len() as f64;
    let band = Bands::of(lab.math).loss;
    let share = (mean(&got) / mean(&want) - 1.0).abs() / band;
    let logits = learner.read_along(&windows[0][..32])?;
    let one_by_one: Vec<f64> =
        logits.iter().zip(&windows[0][1..]).map(|(logits, &byte)| surprise(logits, byte)).collect();
    let along = (mean(&one_by_one) / mean(&got[..32]) - 1.0).abs() / band;
    Ok(within(share.max(along), || {
        format!(
            "mean {} nats, expected {} within {band:.0e}; byte by byte {}, at once {}",
            mean(&got),
            mean(&want),
            mean(&one_by_one),
            mean(&got[..32])
        )
    }))
}

/// Nats of a byte under logits.
fn surprise(logits: &[f64], byte: u8) -> f64 {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    logits.iter().map(|x| (x - max).exp()).sum::<f64>().ln() + max - logits[usize::from(byte)]
}

/// A run with two kinds of step.
fn config<B: Backend + Witness>(lab: &Lab<'_, B>) -> Config {
    let mut config = lab.preset();
    config.optimizer.retract_every_steps = 2;
    config
}

fn advance(learner: &mut dyn Learner, config: &Config, steps: Range<u64>) -> Result<(State, Vec<StepRecord>)> {
    for step in steps {
        learner.step(&letters(config, step), RATE)?;
    }
    Ok((learner.export()?, learner.drain()?))
}

/// The first tensor that differs.
fn difference(got: &State, want: &State) -> Option<String> {
    let tensors = |state: &State| [state.weights.clone(), state.optimizer.clone()];
    for (got, want) in tensors(got).iter().zip(&tensors(want)) {
        let differs = want.iter().find(|(name, tensor)| got.get(*name) != Some(*tensor));
        if let Some((name, _)) = differs {
            return Some(name.clone());
        }
    }
    None
}

fn same(got: &(State, Vec<StepRecord>), want: &(State, Vec<StepRecord>), what: &str) -> Outcome {
    if let Some(name) = difference(&got.0, &want.0) {
        return Outcome::Fail(format!("`{name}` has other bits {what}"));
    }
    let tail = &want.1[want.1.len() - got.1.len()..];
    match got.1.iter().zip(tail).find(|(got, want)| got != want) {
        Some((got, want)) => Outcome::Fail(format!("step {} {what}: {got:?}, expected {want:?}", want.step + 1)),
        None => Outcome::Pass(0.0),
    }
}

/// A run as it is half-way and at its end.
pub struct Run {
    half: (State, Vec<StepRecord>),
    end: (State, Vec<StepRecord>),
}

/// The run that all checks compare with, once for them all.
fn whole<'a, B: Backend + Witness>(lab: &'a Lab<'_, B>) -> Result<&'a Run> {
    if let Some(whole) = lab.whole.get() {
        return Ok(whole);
    }
    let (config, n) = (config(lab), steps(lab));
    let mut learner = lab.learner(&config, lab.graphs)?;
    let half = advance(&mut learner, &config, 0..n / 2)?;
    let (state, rest) = advance(&mut learner, &config, n / 2..n)?;
    let records = half.1.iter().cloned().chain(rest).collect();
    Ok(lab.whole.get_or_init(|| Run { half, end: (state, records) }))
}

/// Two runs have the same bits, whether one is read half-way or not, and other batches give others. Where it is to be quick
/// and no graph takes over, to half-way: [`resume`] has the other half.
pub fn twice<B: Backend + Witness>(lab: &Lab<'_, B>) -> Result<Outcome> {
    let (config, n) = (config(lab), steps(lab));
    let run = |steps: Range<u64>| advance(&mut lab.learner(&config, lab.graphs)?, &config, steps);
    let first = whole(lab)?;
    if difference(&run(64..64 + n / 2)?.0, &first.half.0).is_none() {
        return Ok(Outcome::Fail("another batch gives the same weights, so nothing is compared".into()));
    }
    let (until, first) = if lab.graphs || !lab.quick { (n, &first.end) } else { (n / 2, &first.half) };
    Ok(same(&run(0..until)?, first, "the second time"))
}

/// Half a run, saved and taken up by a fresh learner, is the whole run.
pub fn resume<B: Backend + Witness>(lab: &Lab<'_, B>) -> Result<Outcome> {
    let (config, n) = (config(lab), steps(lab));
    let whole = whole(lab)?;
    let mut resumed = lab.learner(&Config { seed: 77, ..config.clone() }, lab.graphs)?;
    resumed.import(&whole.half.0)?;
    Ok(same(&advance(&mut resumed, &config, n / 2..n)?, &whole.end, "after resuming"))
}

/// Replayed steps have the bits of eager ones, and the nodes of a graph are the launches of an eager step.
pub fn graph<B: Backend + Witness>(lab: &Lab<'_, B>) -> Result<Outcome> {
    graph_of(lab, config(lab))
}

/// The same with factors in a short format, whose rounding is one launch more a call.
pub fn graph_fp8<B: Backend + Witness>(lab: &Lab<'_, B>) -> Result<Outcome> {
    let mut config = config(lab);
    config.model.format = Format::Fp8;
    graph_of(lab, config)
}

fn graph_of<B: Backend + Witness>(lab: &Lab<'_, B>, config: Config) -> Result<Outcome> {
    if !lab.graphs {
        return Ok(Outcome::NotRun("the backend has no graphs".into()));
    }
    let n = steps(lab);
    let mut one_by_one = lab.learner(&config, false)?;
    let eager = advance(&mut one_by_one, &config, 0..n)?;
    let mut learner = lab.learner(&config, true)?;
    let replayed = advance(&mut learner, &config, 0..n)?;
    let captures = learner.backend().captures();
    if captures != 2 {
        return Ok(Outcome::Fail(format!("{captures} graphs were captured, expected 2: with and without retraction")));
    }
    // What a graph's nodes are said to be is what ran one by one. Second kernels of a library are known from a graph only.
    let kernels = |learner: &ModelLearner<B>| {
        let train = learner.backend().ledgers().remove("train").unwrap_or_default();
        let listed = train.kernels.into_iter().filter(|(name, _)| *name != dormouse_cuda::UNLISTED);
        listed.map(|(name, launches)| (name, launches.count)).collect::<Vec<_>>()
    };
    let (eagerly, as_nodes) = (kernels(&one_by_one), kernels(&learner));
    if eagerly.is_empty() || eagerly != as_nodes {
        let differs = |(name, count): &&(&str, u64)| !eagerly.contains(&(*name, *count));
        let first = as_nodes.iter().find(differs);
        return Ok(Outcome::Fail(format!(
            "nodes are counted as {first:?}, which is not what ran eagerly: {eagerly:?}"
        )));
    }
    Ok(same(&replayed, &eager, "as a graph"))
}

/// A step with a NaN changes no weight and no moment, is counted, and the next step is healthy.
fn nan<B: Backend + Witness>(lab: &Lab<'_, B>, fault: Ablation) -> Result<Outcome> {
    let config = lab.preset();
    let mut learner = lab.learner(&config, lab.graphs)?;
    // Enough steps that the healthy one is replayed where there are graphs; elsewhere all steps are alike, and one gives
    // the moments values.
    let n: u32 = if lab.graphs || !lab.quick { 4 } else { 1 };
    let at = u64::from(n);
    let (before, _) = advance(&mut learner, &config, 0..at)?;
    learner.set_ablation(fault);
    let (mut after, records) = advance(&mut learner, &config, at..at + 1)?;
    let [record] = &records[..] else { return Ok(Outcome::Fail(format!("{} records of one step", records.len()))) };
    if record.applied || record.nonfinite == 0 {
        return Ok(Outcome::Fail(format!("the step was applied or counts nothing: {record:?}")));
    }
    let counters = after.optimizer.insert("counters".to_owned(), before.optimizer["counters"].clone());
    let counters = counters.as_ref().and_then(|tensor| tensor.as_u32()).unwrap_or_default();
    let expected = [n, 1, 1, 0];
    if counters != expected {
        return Ok(Outcome::Fail(format!("the counters are {counters:?}, expected {expected:?}")));
    }
    if let Some(name) = difference(&after, &before) {
        return Ok(Outcome::Fail(format!("`{name}` was moved")));
    }
    learner.set_ablation(Ablation::None);
    let (healthy, records) = advance(&mut learner, &config, at + 1..at + 2)?;
    if difference(&healthy, &before).is_none() || !records.iter().all(|record| record.applied) {
        return Ok(Outcome::Fail("the step after it was not applied".into()));
    }
    Ok(match healthy.first_nonfinite() {
        Some(name) => Outcome::Fail(format!("`{name}` is not finite one step later")),
        None => Outcome::Pass(0.0),
    })
}

pub fn nan_loss<B: Backend + Witness>(lab: &Lab<'_, B>) -> Result<Outcome> {
    nan(lab, Ablation::NanLoss)
}

pub fn nan_gradient<B: Backend + Witness>(lab: &Lab<'_, B>) -> Result<Outcome> {
    nan(lab, Ablation::NanGradient)
}

pub fn nan_activation<B: Backend + Witness>(lab: &Lab<'_, B>) -> Result<Outcome> {
    nan(lab, Ablation::NanActivation)
}

/// The account of a healthy run adds up, and that of a run whose recurrence has no adjoint does not.
pub fn engagement<B: Backend + Witness>(lab: &Lab<'_, B>) -> Result<Outcome> {
    let (config, n) = (config(lab), steps(lab));
    let mut learner = lab.learner(&config, lab.graphs)?;
    if learner.witness().is_none() {
        return Ok(Outcome::NotRun("the backend counts nothing".into()));
    }
    advance(&mut learner, &config, 0..n)?;
    learner.evaluate(&[letters(&config, 0).bytes[..33].to_vec()])?;
    learner.sample(b"ab", 3, 0.0, 0, &mut |_| true)?;
    let account = |learner: &dyn Learner| learner.engagement().context("the backend counts");
    let healthy = account(&learner)?;
    let grad: u64 = healthy.rows.iter().filter(|row| row.grad).map(|row| row.backward[0] + row.backward[1]).sum();
    let problems = healthy.problems();
    if grad == 0 || !problems.is_empty() {
        return Ok(Outcome::Fail(format!("{grad} backward passes; {}", problems.join("; "))));
    }
    learner.set_ablation(Ablation::DetachRecurrence);
    advance(&mut learner, &config, n..n + 1)?;
    let problems = account(&learner)?.problems();
    if !problems.iter().any(|problem| problem.starts_with("kda: ")) {
        return Ok(Outcome::Fail(format!("a recurrence without its adjoint is not noticed: {problems:?}")));
    }
    Ok(Outcome::Pass(0.0))
}

/// Steps of two kinds with evaluations and saves between them: each different step is captured once.
pub fn captures<B: Backend + Witness>(lab: &Lab<'_, B>) -> Result<Outcome> {
    if !lab.graphs {
        return Ok(Outcome::NotRun("the backend has no graphs".into()));
    }
    let config = config(lab);
    let mut learner = lab.learner(&config, true)?;
    let window = letters(&config, 0).bytes[..33].to_vec();
    // Evaluated and saved often enough that those steps are captured, too.
    let (all, every) = if lab.quick { (40, 5) } else { (500, 50) };
    for step in 0..all {
        learner.step(&letters(&config, step), RATE)?;
        if step % every == every - 1 {
            learner.evaluate(std::slice::from_ref(&window))?;
            learner.export()?;
        }
    }
    let account = learner.engagement().context("the backend counts")?;
    if account.captures != account.variants || account.variants < 3 {
        return Ok(Outcome::Fail(format!(
            "{} graphs were captured in {all} steps, expected one for each of {} different steps",
            account.captures, account.variants
        )));
    }
    Ok(Outcome::Pass(0.0))
}

/// After the second step nothing is allocated, and the arena stays as large as it is.
pub fn memory<B: Backend + Witness>(lab: &Lab<'_, B>) -> Result<Outcome> {
    let (config, n) = (lab.preset(), 2);
    let mut learner = lab.learner(&config, lab.graphs)?;
    if learner.backend().activity().allocations == 0 {
        return Ok(Outcome::NotRun("the backend counts no allocations".into()));
    }
    advance(&mut learner, &config, 0..n)?;
    let before = learner.backend().activity();
    let more = if lab.quick { 20 } else { 2000 };
    for step in n..n + more {
        learner.step(&letters(&config, step), RATE)?;
    }
    let after = learner.backend().activity();
    if (after.allocations, after.allocated) == (before.allocations, before.allocated) {
        return Ok(Outcome::Pass(0.0));
    }
    let allocations = after.allocations - before.allocations;
    Ok(Outcome::Fail(format!(
        "{allocations} allocations in {more} steps; {} bytes before, {} after",
        before.allocated, after.allocated
    )))
}
