//! `dormouse check`: the whole training step of a backend on this machine, held against the reference.
//!
//! The gates of the operations say that each kernel computes what its definition says. These checks say that a step
//! made of them does: gradients of every parameter tensor, twenty losses, the same bits from a graph and from a resumed
//! run, weights that a NaN does not touch, and counters that add up. Faults are planted to show that the gradient check
//! would notice them. `gradients` on CUDA is what the design calls `kda_param_grads_cuda`.
//!
//! | check | red if |
//! |---|---|
//! | `gradients ...` | (of `tiny`, of `nano` and of another preset at batch 1) a parameter tensor's gradient differs from the `f64` reference by more than its band, or a backward pass that belongs to it did not run, or on another arm than its forward pass; with the n-gram memory, also if its gradients do not vanish when it is cut off |
//! | `fault ...` | the planted fault is *not* noticed by `gradients` |
//! | `slopes` | the loss does not change along a gradient as fast as the gradient says |
//! | `losses` | 20 losses of `tiny` leave the band around those of the `f32` reference |
//! | `scores` | held-out scores do, or reading byte by byte gives others than reading at once |
//! | `twice`, `resume`, `graph` | a second run, a resumed one, an eager one has other bits |
//! | `nan ...` | a NaN moves a weight or a moment, or is not counted |
//! | `engagement` | an operation did not run as often as asked, or a cut adjoint is not noticed |
//! | `captures` | steps, evaluations and saves in turn capture more or fewer graphs than there are different steps |
//! | `memory` | a step after the second allocates |
//! | `attention` | 900 steps of `nano` come as far without a gradient through the recurrence as with it |
//!
//! Bands, relative, by the arithmetic of matrix products. f32: sums of a few hundred terms through some ten products in
//! a row. tf32 and bf16 round operands by up to 2^-11 and 2^-9; ten such roundings in a row add up to a few times that.
//!
//! | | gradient rms | gradient slope | loss |
//! |---|---|---|---|
//! | f32 | 1e-4 | 1e-5 | 1e-5 |
//! | tf32 | 1e-2 | 5e-4 | 1e-3 |
//! | bf16 | 5e-2 | 5e-3 | 1e-2 |
//!
//! In tf32 and bf16 both bands are wider for a tensor whose norm lies in few elements (docs/adr/0009, 0016), and of a
//! model with an objective of latents by what the reference says that the arithmetic does there (docs/adr/0030, 0034).
//!
//! With `--preset`, the checks that compare a backend with itself are of that preset at its own batch, and so are its
//! gradients at batch 1; the others are of `tiny` whatever the preset, and not run again.

pub mod attention;
mod gradients;
mod steps;

use std::cell::OnceCell;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use dormouse_cuda::{Arm, Gpu, Runtime};
use dormouse_reference::{Backend, Reference};

use crate::backend::{self, settle};
use crate::cli::CheckArgs;
use crate::config::{Backend as Word, Config, ConfigError, Math, RunConfig, preset};
use crate::data::Batch;
use crate::instruments::Witness;
use crate::learner::ModelLearner;
use crate::progress::say;
use crate::rng::{Purpose, stream};

/// How a check ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// Everything lies in its band; the worst of it as a share of the band.
    Pass(f64),
    /// Something does not.
    Fail(String),
    /// This backend or this choice of options has no such thing.
    NotRun(String),
}

/// One line of the table.
#[derive(Clone, Debug)]
pub struct Line {
    /// The check.
    pub check: &'static str,
    /// How it ended.
    pub outcome: Outcome,
    /// How long it took.
    pub time: Duration,
}

/// The relative bands of one arithmetic.
#[derive(Clone, Copy, Debug)]
struct Bands {
    rms: f64,
    slope: f64,
    /// The rms of errors without direction, which move the slope of a tensor of few elements.
    noise: f64,
    /// Standard deviations by which the rms of a tensor of few elements may be above its band.
    scatter: f64,
    loss: f64,
}

impl Bands {
    fn of(math: Math) -> Self {
        match math {
            Math::F32 => Self { rms: 1e-4, slope: 1e-5, noise: 0.0, scatter: 0.0, loss: 1e-5 },
            Math::Tf32 => Self { rms: 1e-2, slope: 5e-4, noise: 1e-2, scatter: 2.0, loss: 1e-3 },
            Math::Bf16 => Self { rms: 5e-2, slope: 5e-3, noise: 5e-2, scatter: 2.0, loss: 1e-2 },
        }
    }
}

/// What is checked: a way to open the backend, and at which size.
pub struct Lab<'a, B> {
    /// A fresh backend, with graphs where it has them or without.
    pub open: &'a dyn Fn(bool) -> Result<B>,
    /// Arithmetic of matrix products.
    pub math: Math,
    /// Whether the backend has graphs.
    pub graphs: bool,
    /// The preset whose steps are checked.
    pub preset: &'a str,
    /// Small shapes and few steps.
    pub quick: bool,
    /// The arm that every operation is to run on; absent where it may be either.
    pub arm: Option<Arm>,
    /// The run that others are compared with, from the first check that asks for it.
    whole: OnceCell<steps::Run>,
}

impl<B: Backend + Witness> Lab<'_, B> {
    /// `tiny` on this arithmetic.
    fn tiny(&self) -> Config {
        self.config("tiny")
    }

    /// The preset whose steps are checked, on this arithmetic.
    fn preset(&self) -> Config {
        self.config(self.preset)
    }

    fn config(&self, name: &str) -> Config {
        let mut config = preset(name).expect("the command asked for it");
        config.run.precision = self.math;
        if self.quick {
            // A whole chunk of the recurrence and a part of one.
            (config.train.batch_rows, config.data.seq_bytes) = (2, 70);
        }
        config
    }

    fn learner(&self, config: &Config, graphs: bool) -> Result<ModelLearner<B>> {
        ModelLearner::new((self.open)(graphs)?, config)
    }
}

/// The same run on the reference, which never rounds operands.
fn exact(config: &Config) -> Config {
    let mut exact = config.clone();
    exact.run = RunConfig::default();
    exact
}

/// A batch of letters.
pub(crate) fn letters(config: &Config, step: u64) -> Batch {
    use crate::data::step_mask;
    use rand::RngExt;
    let (rows, len) = (config.train.batch_rows, config.data.seq_bytes);
    let bytes = (0..rows).flat_map(|row| {
        let mut rng = stream(9, Purpose::Test, step, row as u64);
        (0..=len).map(move |_| rng.random_range(97..123u8))
    });
    let mask = config.jepa.on().then(|| step_mask(config.seed, step, rows, len));
    Batch { step, rows, len, bytes: bytes.collect(), keys: None, mask }
}

/// A check by its name.
type Check<B> = (&'static str, Of, fn(&Lab<'_, B>) -> Result<Outcome>);

/// Which presets a check is of.
#[derive(Clone, Copy, PartialEq)]
enum Of {
    /// `tiny`, or one of its own.
    Tiny,
    /// Whichever is asked for.
    Any,
    /// Any but `tiny`.
    Others,
}

/// Every check, the cheapest to read first.
fn all<B: Backend + Witness>() -> Vec<Check<B>> {
    vec![
        ("gradients tiny", Of::Tiny, gradients::tiny),
        ("gradients nano", Of::Tiny, gradients::nano),
        ("gradients engram", Of::Tiny, gradients::engram),
        ("gradients preset", Of::Others, gradients::preset),
        ("fault dg-times-1.01", Of::Tiny, gradients::decay_gradient_scaled),
        ("fault dt-bias-dropped", Of::Tiny, gradients::decay_bias_dropped),
        ("fault head-beta-dropped", Of::Tiny, gradients::head_beta_dropped),
        ("fault detached", Of::Tiny, gradients::detached),
        ("slopes", Of::Tiny, gradients::slopes),
        ("losses", Of::Tiny, steps::losses),
        ("scores", Of::Tiny, steps::scores),
        ("twice", Of::Any, steps::twice),
        ("resume", Of::Any, steps::resume),
        ("graph", Of::Any, steps::graph),
        ("graph fp8", Of::Any, steps::graph_fp8),
        ("nan loss", Of::Any, steps::nan_loss),
        ("nan gradient", Of::Any, steps::nan_gradient),
        ("nan activation", Of::Any, steps::nan_activation),
        ("engagement", Of::Any, steps::engagement),
        ("captures", Of::Any, steps::captures),
        ("memory", Of::Any, steps::memory),
        ("attention", Of::Tiny, attention::check),
    ]
}

/// The checks of a preset.
fn of_preset<B: Backend + Witness>(preset: &str) -> impl Iterator<Item = Check<B>> {
    let left_out = if preset == "tiny" { Of::Others } else { Of::Tiny };
    all::<B>().into_iter().filter(move |(_, of, _)| *of != left_out)
}

/// Runs the checks whose name contains `only`. What goes wrong inside one is its failure.
pub fn run<B: Backend + Witness>(lab: &Lab<'_, B>, only: &str, emit: &mut dyn FnMut(&Line)) -> Vec<Line> {
    of_preset::<B>(lab.preset)
        .filter(|(name, ..)| name.contains(only))
        .map(|(check, _, body)| {
            let start = Instant::now();
            let outcome = body(lab).unwrap_or_else(|error| Outcome::Fail(format!("{error:#}")));
            let line = Line { check, outcome, time: start.elapsed() };
            emit(&line);
            line
        })
        .collect()
}

/// `dormouse check`.
///
/// # Errors
/// The backend cannot be opened; a check is red.
pub fn command(arguments: &CheckArgs) -> Result<()> {
    let mut run = RunConfig { backend: arguments.backend, ..RunConfig::default() };
    if let Some(note) = settle(&mut run)? {
        say(&note);
    }
    let only = arguments.only.as_deref().unwrap_or("");
    preset(&arguments.preset)?;
    let names: Vec<&str> = of_preset::<Reference<f32>>(&arguments.preset).map(|(name, ..)| name).collect();
    if !names.iter().any(|name| name.contains(only)) {
        let of = format!("no check's name contains `{only}`; of `{}` there are", arguments.preset);
        let problem = format!("check: {of} {}", names.join(", "));
        bail!(ConfigError::Usage(problem));
    }
    let forced = arguments.arms.iter().map(|word| forced_arm(word)).collect::<Result<Vec<_>, _>>()?;
    let red = match run.backend {
        Word::Cuda => on_device(Runtime::Cuda, arguments, &forced, &run, only)?,
        Word::Lavapipe => on_device(Runtime::Lavapipe, arguments, &forced, &run, only)?,
        Word::Cpu | Word::Auto => {
            let open = |_| Ok(Reference::<f32>::new());
            let whole = OnceCell::new();
            for math in arguments.precision.iter().filter(|math| **math != Math::F32) {
                let why = "the reference computes in f32; give --backend cuda where there is a GPU";
                say(&format!("{:<9} {:<6} {:<5} {:<24} NOTRUN {why}", "cpu", "-", math.word(), "all"));
            }
            if !arguments.precision.contains(&Math::F32) {
                let problem = "check: --precision leaves nothing to run on the reference, which computes in f32";
                bail!(ConfigError::Usage(problem.into()));
            }
            let (preset, quick) = (arguments.preset.as_str(), arguments.quick);
            let lab = Lab { open: &open, math: Math::F32, graphs: false, preset, quick, arm: None, whole };
            table(&lab, only, "cpu", "-")
        }
    };
    if red > 0 {
        bail!("check: {red} checks are red");
    }
    Ok(())
}

/// The arm of a word of `--arms`; none for what a run would take.
fn forced_arm(word: &str) -> Result<Option<Arm>, ConfigError> {
    let forced = Arm::ALL.into_iter().find(|arm| arm.word() == word);
    if forced.is_none() && word != "default" {
        let fix = "give plain, fused, or default for what a run would take";
        return Err(ConfigError::Usage(format!("check: --arms has `{word}`; {fix}")));
    }
    Ok(forced)
}

fn on_device(
    runtime: Runtime,
    arguments: &CheckArgs,
    arms: &[Option<Arm>],
    run: &RunConfig,
    only: &str,
) -> Result<usize> {
    say(&Gpu::open(runtime)?.describe());
    let mut red = 0;
    for (word, &forced) in arguments.arms.iter().zip(arms) {
        for &math in &arguments.precision {
            let open = |graphs: bool| -> Result<Gpu> {
                let (b, _) = backend::open(runtime, &RunConfig { precision: math, graph: graphs, ..run.clone() })?;
                if let Some(arm) = forced {
                    b.set_arms(arm);
                }
                Ok(b)
            };
            let whole = OnceCell::new();
            let (preset, quick, graphs) = (arguments.preset.as_str(), arguments.quick, runtime.graphs());
            let lab = Lab { open: &open, math, graphs, preset, quick, arm: forced, whole };
            red += table(&lab, only, runtime.word(), word);
        }
    }
    Ok(red)
}

/// Runs the checks, prints a line for each and gives the number of red ones.
fn table<B: Backend + Witness>(lab: &Lab<'_, B>, only: &str, word: &str, arm: &str) -> usize {
    let lines = run(lab, only, &mut |line| {
        let (status, rest) = match &line.outcome {
            Outcome::Pass(worst) => ("PASS", format!("{worst:.2e} of the band")),
            Outcome::Fail(why) => ("FAIL", why.replace('\n', " ")),
            Outcome::NotRun(why) => ("NOTRUN", why.clone()),
        };
        say(&format!(
            "{word:<9} {arm:<6} {:<5} {:<24} {status:<6} {:>6.1} s  {rest}",
            lab.math.word(),
            line.check,
            line.time.as_secs_f64()
        ));
    });
    lines.iter().filter(|line| matches!(line.outcome, Outcome::Fail(_))).count()
}

#[cfg(test)]
mod tests;
