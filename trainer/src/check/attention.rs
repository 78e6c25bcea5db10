//! Whether the attention learns: the same run with no gradient through the recurrence stays where short contexts stay.
//!
//! A model whose attention is dead can still match an n-gram of order 3, so a falling loss proves nothing about the
//! recurrence's adjoint. The difference between two runs does.

use anyhow::{Context, Result};
use dormouse_reference::Backend;

use super::{Lab, Outcome};
use crate::config::Config;
use crate::data::Data;
use crate::instruments::Witness;
use crate::learner::ModelLearner;
use crate::model::Ablation;
use crate::signals::Stop;
use crate::train::{self, Learner};

/// How many bits per byte a run must be ahead of the one whose recurrence is cut off. Runs that differ in their seed alone
/// lie within a few hundredths.
pub const AHEAD: f64 = 0.25;

/// Bits per byte on held-out windows of the shipped text after the whole schedule of a run.
///
/// # Errors
/// The text cannot be read; whatever a step says.
pub fn held_out_bits<B: Backend + Witness>(b: B, config: &Config, ablation: Ablation) -> Result<f64> {
    let data = Data::open(config)?;
    let mut learner = ModelLearner::new(b, config)?;
    learner.set_ablation(ablation);
    let steps = config.train.total_steps;
    for step in 0..steps {
        let batch = data.batch(step, config.train.batch_rows)?;
        learner.step(&batch, config.schedule().lr_at(step, steps))?;
    }
    let score = train::score(&mut learner, &data.eval_windows()?, &Stop::new())?;
    Ok(score.context("nobody can stop this run")?.bpb)
}

/// The default run of `nano`, and the same without a gradient through the recurrence.
pub(super) fn check<B: Backend + Witness>(lab: &Lab<'_, B>) -> Result<Outcome> {
    if lab.quick || !lab.graphs {
        return Ok(Outcome::NotRun(
            "two runs of 900 steps; `cargo test -p dormouse --test attention` has shorter ones".into(),
        ));
    }
    let mut config = lab.config("nano");
    config.data.eval_windows = 32;
    let bits = |ablation| held_out_bits((lab.open)(true)?, &config, ablation);
    let (healthy, dead) = (bits(Ablation::None)?, bits(Ablation::DetachRecurrence)?);
    let message = format!("{healthy:.4} bits per byte, {dead:.4} without a gradient through the recurrence");
    crate::progress::say(&format!("attention: {message}"));
    Ok(if dead - healthy > AHEAD { Outcome::Pass(AHEAD / (dead - healthy)) } else { Outcome::Fail(message) })
}
