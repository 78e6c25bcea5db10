//! The loop: which step comes next, what is reported and when it is saved. What a step computes is the [`Learner`]'s.

mod evaluate;
mod prepare;
mod report;
mod session;
mod watch;

pub use evaluate::{Score, score};
pub use prepare::{Build, Prepared, Request, Resume, group_table, parameter_table, prepare, quoted};
pub use session::{Ending, Limits, run};
pub use watch::Watch;
pub(crate) use watch::training;

use crate::backend::Facts;
use crate::checkpoint::State;
use crate::data::Batch;
use crate::instruments::{Engagement, Witness};

/// What one step measured.
#[derive(Clone, Debug, PartialEq)]
pub struct StepRecord {
    /// Index of the step, counted from 0: that of its [`Batch`].
    pub step: u64,
    /// The loss that was differentiated, nats.
    pub loss: f64,
    /// Mean cross-entropy of each iteration, nats; the last is the readout that scoring uses.
    pub ce: Vec<f64>,
    /// The terms of the JEPA objective, where the run has it.
    pub aux: Option<Aux>,
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Gradient elements that were not finite.
    pub nonfinite: u64,
    /// Whether the weights were updated.
    pub applied: bool,
}

/// The terms of the JEPA objective, as they are before their weights; absent in a step without a masked byte.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Aux {
    /// Mean distance of the prediction to the teacher's normalised latents.
    pub jepa: Option<f64>,
    /// Minus half the mean logarithm of the latents' nearest distances.
    pub koleo: Option<f64>,
}

/// Why a learner has stopped applying updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Latch {
    /// Steps skipped in the present window.
    pub skipped: u64,
    /// Index of the last skipped step, counted from 0.
    pub step: u64,
}

/// How far a spectral factor is from what the retraction should keep it at.
#[derive(Clone, Debug, PartialEq)]
pub struct Drift {
    /// Name of the factor.
    pub name: String,
    /// ||X^T X - I||_F / k.
    pub orthonormality: f64,
    /// Largest over smallest singular value before a retraction, the largest seen since the process began.
    pub spread: f64,
}

/// One parameter tensor, for tables.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// Name, as in a checkpoint.
    pub name: String,
    /// Extents.
    pub shape: Vec<usize>,
    /// The optimiser's rule for it.
    pub group: String,
}

/// Something that learns from batches. Every method but [`Learner::step`] and [`Learner::import`] leaves its weights alone,
/// and none may depend on how often the others were called: that is what makes a resumed run equal to an unbroken one.
pub trait Learner {
    /// One optimiser update. Does not wait for its numbers: they come out of [`Learner::drain`].
    ///
    /// # Errors
    /// Data that cannot be read, before anything has changed: the steps so far can still be saved. Whatever a backend says.
    fn step(&mut self, batch: &Batch, lr: f64) -> anyhow::Result<()>;

    /// The records of the steps since the last call, oldest first.
    fn drain(&mut self) -> anyhow::Result<Vec<StepRecord>>;

    /// Set once too many steps of one window were skipped; from then on a step changes nothing.
    fn latched(&self) -> Option<Latch>;

    /// Cross-entropy in nats of every predicted position of the windows, window after window, by the readout used in training.
    /// All windows of a call have one length.
    fn evaluate(&mut self, windows: &[Vec<u8>]) -> anyhow::Result<Vec<f64>>;

    /// Continues `prompt` (not empty) by up to `bytes` bytes, each handed to `emit` as it is drawn; while the prompt is read
    /// `emit` gets nothing, byte by byte. It ends the sample by returning false. Temperature 0 takes the likeliest byte, the lowest on ties.
    fn sample(
        &mut self,
        prompt: &[u8],
        bytes: usize,
        temperature: f64,
        seed: u64,
        emit: &mut dyn FnMut(Option<u8>) -> bool,
    ) -> anyhow::Result<()>;

    /// Everything needed to go on bit for bit.
    fn export(&self) -> anyhow::Result<State>;

    /// Goes on from `state`.
    ///
    /// # Errors
    /// A tensor is missing, unknown or of another shape; the learner is then unchanged.
    fn import(&mut self, state: &State) -> anyhow::Result<()>;

    /// The state of the spectral factors.
    fn drift(&self) -> anyhow::Result<Vec<Drift>>;

    /// Every parameter tensor and the rule that updates it.
    fn parameters(&self) -> Vec<Parameter>;

    /// Runs a batch on the present weights, changing nothing, and names the first tensor that is not finite, if any is.
    fn first_nonfinite(&mut self, batch: &Batch) -> anyhow::Result<Option<String>>;

    /// The last iteration's latents of every position of a batch (`rows * t * d`) at the present weights, on unmasked
    /// bytes: what a teacher with these weights gives.
    fn latents(&mut self, _batch: &Batch) -> anyhow::Result<Vec<f32>> {
        anyhow::bail!("this learner has no latents")
    }

    /// What computes, for the log and the checkpoints.
    fn facts(&self) -> Facts {
        Facts::default()
    }

    /// The backend's word on its own work, if it counts it.
    fn witness(&self) -> Option<&dyn Witness> {
        None
    }

    /// What was asked of the operations, against what ran, if the backend counts it.
    fn engagement(&self) -> Option<Engagement> {
        None
    }
}

#[cfg(test)]
mod toy;

#[cfg(test)]
mod tests;
