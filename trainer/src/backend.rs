//! Which backend a run computes on, and the learner on it.

use anyhow::{Context, Result};
use dormouse_cuda::{Gpu, Runtime};
use dormouse_reference::Reference;
use serde::{Deserialize, Serialize};

use crate::arms::{self, Choice};
use crate::config::{Backend, Config, RunConfig};
use crate::instruments::Witness;
use crate::learner::ModelLearner;
use crate::train::Learner;

/// What computes a run: for its log, and in every checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Facts {
    /// The backend's word.
    pub backend: String,
    /// The hardware and its versions.
    pub device: String,
    /// Arithmetic of matrix products.
    pub precision: String,
    /// The arm of every operation with kernels; empty on the reference.
    pub arms: std::collections::BTreeMap<String, String>,
    /// Whether a fused arm runs that no receipt vouches for.
    pub unverified: bool,
    /// The library algorithm of every matrix product so far; the same algorithms give the same bits.
    #[serde(default)]
    pub products: Vec<String>,
    /// BLAKE3 of the teacher whose latents a file gives the run; absent where no file does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub targets: Option<String>,
    /// Why operations run their plain kernels though nobody asked for that, by operation; told and not stored.
    #[serde(skip)]
    pub declined: std::collections::BTreeMap<String, String>,
}

impl Facts {
    pub(crate) fn new(run: &RunConfig, device: String, choices: &[Choice]) -> Self {
        Self {
            backend: run.backend.word().to_owned(),
            device,
            precision: run.precision.word().to_owned(),
            arms: choices.iter().map(|choice| (choice.stem.to_owned(), choice.arm.word().to_owned())).collect(),
            unverified: choices.iter().any(|choice| choice.unverified),
            products: Vec::new(),
            targets: None,
            declined: choices.iter().filter(|c| c.declined).map(|c| (c.stem.to_owned(), c.why.clone())).collect(),
        }
    }

    /// One line for the start of a run.
    pub fn line(&self) -> String {
        let Self { backend, device, precision, arms, unverified, .. } = self;
        let count = |word: &str| arms.values().filter(|arm| *arm == word).count();
        let arms = match arms.len() {
            0 => String::new(),
            all => format!(", {} of {all} operations fused (`dormouse arms` says why)", count("fused")),
        };
        let mark = if *unverified { ", UNVERIFIED: fused kernels run that no receipt vouches for" } else { "" };
        format!("backend {backend} ({device}), matrix products in {precision}{arms}{mark}")
    }
}

/// Replaces `auto` by what answers and checks that the rest fits it. Gives the line that says why there is no GPU, if
/// that is why the run is on the reference.
///
/// # Errors
/// A backend that was asked for and cannot be opened, with what is missing; a setting that the backend does not have.
pub fn settle(run: &mut RunConfig) -> Result<Option<String>> {
    let mut note = None;
    match run.backend {
        Backend::Cpu => {}
        Backend::Auto => match Runtime::Cuda.open() {
            Ok(_) => run.backend = Backend::Cuda,
            Err(why) => {
                run.backend = Backend::Cpu;
                note = Some(format!("no GPU answers, so the reference computes: {why}"));
            }
        },
        Backend::Cuda => opened(Runtime::Cuda)?,
        Backend::Lavapipe => opened(Runtime::Lavapipe)?,
    }
    match (run.validate(), &note) {
        (Err(error), Some(note)) => Err(anyhow::Error::from(error).context(note.clone())),
        (checked, _) => checked.map_err(Into::into).map(|()| note),
    }
}

fn opened(runtime: Runtime) -> Result<()> {
    runtime.open().map(|_| ()).with_context(|| {
        format!(
            "run.backend is {0}, and {0} cannot be opened; give --backend cpu, or auto to take what answers",
            runtime.word()
        )
    })
}

/// The learner of a run's configuration, on its backend.
///
/// # Errors
/// The backend cannot be opened, or does not have an arm that was asked for.
pub fn build(config: &Config) -> Result<Box<dyn Learner>> {
    let mut settled = config.clone();
    settle(&mut settled.run)?;
    let config = &settled;
    match config.run.backend {
        Backend::Cuda => on_device(Runtime::Cuda, config),
        Backend::Lavapipe => on_device(Runtime::Lavapipe, config),
        Backend::Cpu | Backend::Auto => {
            let b = Reference::<f32>::new();
            let facts = Facts::new(&config.run, b.describe(), &[]);
            Ok(Box::new(ModelLearner::new(b, config)?.with_facts(facts)))
        }
    }
}

fn on_device(runtime: Runtime, config: &Config) -> Result<Box<dyn Learner>> {
    let (b, facts) = open(runtime, &config.run)?;
    Ok(Box::new(ModelLearner::new(b, config)?.with_facts(facts)))
}

/// The hardware's generation, such as `sm_90`.
///
/// # Errors
/// The backend cannot be opened.
pub fn generation(backend: Backend) -> Result<String> {
    Ok(match backend {
        Backend::Cuda => Gpu::open(Runtime::Cuda)?.generation(),
        Backend::Lavapipe => Gpu::open(Runtime::Lavapipe)?.generation(),
        Backend::Cpu | Backend::Auto => "none".to_owned(),
    })
}

/// A device with the arms of a run.
///
/// # Errors
/// As for [`build`].
pub fn open(runtime: Runtime, run: &RunConfig) -> Result<(Gpu, Facts)> {
    let b = Gpu::open(runtime)?;
    let choices = arms::choose(run, &b.generation())?;
    for choice in &choices {
        b.set_arm(choice.stem, choice.arm)?;
    }
    b.set_graphs(run.graph);
    let facts = Facts::new(run, Witness::describe(&b), &choices);
    Ok((b, facts))
}

#[cfg(test)]
mod tests {
    use dormouse_cuda::Runtime;

    use super::settle;
    use crate::config::{Backend, Math, RunConfig};
    use crate::exit::Exit;

    #[test]
    fn auto_takes_what_answers_and_says_why_not() {
        let mut run = RunConfig { backend: Backend::Auto, ..RunConfig::default() };
        let note = settle(&mut run).unwrap();
        match Runtime::Cuda.open() {
            Ok(_) => assert_eq!((run.backend, note), (Backend::Cuda, None)),
            Err(why) => {
                assert_eq!(run.backend, Backend::Cpu);
                assert!(note.unwrap().contains(&why.to_string()));
            }
        }
    }

    #[test]
    fn a_gpu_that_was_asked_for_and_is_missing_is_an_error_with_a_fix() {
        let mut run = RunConfig { backend: Backend::Cuda, ..RunConfig::default() };
        match (Runtime::Cuda.open(), settle(&mut run)) {
            (Ok(_), settled) => assert_eq!(settled.unwrap(), None),
            (Err(why), settled) => {
                let error = settled.unwrap_err();
                assert_eq!(Exit::of(&error), Exit::Failed);
                let text = format!("{error:#}");
                assert!(text.contains(&why.to_string()) && text.contains("--backend cpu"), "{text}");
            }
        }
    }

    #[test]
    fn the_reference_refuses_what_it_does_not_have() {
        for run in [
            RunConfig { precision: Math::Bf16, ..RunConfig::default() },
            RunConfig { arms: vec!["kda=fused".into()], ..RunConfig::default() },
            RunConfig { unverified: true, ..RunConfig::default() },
            RunConfig { graph: false, ..RunConfig::default() },
        ] {
            assert_eq!(Exit::of(&settle(&mut run.clone()).unwrap_err()), Exit::Usage, "{run:?}");
        }
    }
}
