//! The runs of a comparison: each in a folder named after what it computes, so that what is done is never done again.
//!
//! `PRESET-IDENTITY-seedN` is a usual run folder; `result.json` in it is written once, when the run has ended, and
//! `log.txt` has the lines that `dormouse train` would have printed.

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::plan::{Contender, usage};
use crate::config::{Config, Sources, changes};
use crate::exit::Exit;
use crate::history::COLD_STEPS;
use crate::progress::Reporter;
use crate::run::RunFolder;
use crate::signals::Stop;
use crate::train::{self, Build, Ending, Limits, Request, Resume, Watch};

const RESULT: &str = "result.json";
const LOG: &str = "log.txt";

/// What a folder may hold of a run that was killed before its first checkpoint.
const LEFTOVERS: [&str; 8] =
    ["config.toml", "data.json", "run.json", "run.json.bad", "metrics.jsonl", "samples.jsonl", "anchors.json", LOG];

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outcome {
    /// The configuration's and the data's.
    pub identity: String,
    /// The run's.
    pub seed: u64,
    /// Held-out bits per byte after the last step; absent if the run was not finite.
    pub bpb: Option<f64>,
    /// Standard error of that score over its windows.
    pub standard_error: Option<f64>,
    /// Why there is no score.
    pub not_finite: Option<String>,
    /// Median milliseconds a step, without the first [`COLD_STEPS`] of the run; absent in a shorter run.
    pub ms_step: Option<f64>,
    /// Launches a step, where the backend counts them; one of a graph is one.
    pub launches: Option<f64>,
    /// Nodes of replayed graphs a step.
    pub nodes: Option<f64>,
    /// What computed it.
    pub backend: String,
    /// Whether a fused arm ran that no receipt vouches for.
    pub unverified: bool,
}

/// One run to make or to find.
pub struct Run<'a> {
    /// Whose.
    pub contender: &'a Contender,
    /// With this seed.
    pub seed: u64,
    /// Its folder.
    pub path: PathBuf,
}

impl<'a> Run<'a> {
    /// The run of a contender with a seed below `runs`.
    pub fn new(runs: &Path, contender: &'a Contender, seed: u64) -> Run<'a> {
        let path = runs.join(format!("{}-{}-seed{seed}", contender.config.preset, contender.identity));
        Run { contender, seed, path }
    }

    /// What lines about it begin with.
    pub fn label(&self) -> String {
        format!("{} seed {}", self.contender.name, self.seed)
    }

    /// How it ended, if it has.
    ///
    /// # Errors
    /// What is in the folder is no result, or that of another run.
    pub fn ended(&self) -> Result<Option<Outcome>> {
        let path = self.path.join(RESULT);
        let text = match std::fs::read_to_string(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            text => text.with_context(|| format!("compare: cannot read `{}`", path.display()))?,
        };
        let advice =
            || format!("compare: `{}` is no result of this run; remove the folder to run it anew", path.display());
        let outcome: Outcome = serde_json::from_str(&text).with_context(advice)?;
        if outcome.identity != self.contender.identity || outcome.seed != self.seed {
            bail!(advice());
        }
        Ok(Some(outcome))
    }

    /// The programs that have trained in the folder, by their hashes, in the order of their first start.
    ///
    /// # Errors
    /// A usage error if it was noted and cannot be read: nobody knows which program it was.
    pub fn builds(&self) -> Result<Vec<String>> {
        let starts = RunFolder::starts_in(&self.path).map_err(|problem| {
            let fix = "remove the folder to run it anew, or give --any-build to count it all the same";
            usage(format!("which program made {} is not known: {problem:#}; {fix}", self.label()))
        })?;
        let mut builds = Vec::new();
        for start in &starts {
            let build = start["binary_blake3"].as_str().unwrap_or("unknown").to_owned();
            if !builds.contains(&build) {
                builds.push(build);
            }
        }
        Ok(builds)
    }

    /// Starts it or goes on with it, and notes how it ended; `None` if it was stopped before that.
    ///
    /// # Errors
    /// Whatever ends a run, but for numbers that are not finite: that is an outcome.
    pub fn make(&self, command: &[String], build: Build, stop: &Stop) -> Result<Option<Outcome>> {
        let config = Config { seed: self.seed, ..self.contender.config.clone() };
        let begun = self.begun(&config)?;
        let runs = self.path.parent().unwrap_or(Path::new("."));
        let name = self.path.file_name().map(|name| name.to_string_lossy().into_owned());
        let request = Request {
            sources: Sources { base: Some(config.clone()), ..Sources::default() },
            runs: runs.to_owned(),
            name: name.filter(|_| !begun),
            resume: begun.then(|| Resume::Run(self.path.clone())),
            allow_change: Vec::new(),
            command: command.to_vec(),
            quiet: true,
            watch: Watch::default(),
        };
        let mut prepared = train::prepare(&request, build)?;
        let log = self.path.join(LOG);
        let file = OpenOptions::new().create(true).append(true).open(&log);
        let file = file.with_context(|| format!("compare: cannot write `{}`", log.display()))?;
        prepared.reporter = Reporter::labelled(config.train.total_steps, &self.label(), Box::new(file));
        let facts = prepared.learner.facts();
        let mut outcome = Outcome {
            identity: self.contender.identity.clone(),
            seed: self.seed,
            bpb: None,
            standard_error: None,
            not_finite: None,
            ms_step: None,
            launches: None,
            nodes: None,
            backend: facts.backend,
            unverified: facts.unverified,
        };
        let program = command.first().map_or("dormouse", String::as_str);
        match train::run(prepared, Limits::default(), stop, &train::quoted(program)) {
            Ok(Ending::Stopped { .. }) => return Ok(None),
            Ok(Ending::Finished { score, cost, .. }) => {
                (outcome.bpb, outcome.standard_error) = (Some(score.bpb), Some(score.standard_error));
                outcome.launches = cost.map(|cost| cost.launches);
                outcome.nodes = cost.map(|cost| cost.nodes);
            }
            Err(error) if Exit::of(&error) == Exit::NonFinite => outcome.not_finite = Some(format!("{error:#}")),
            Err(error) => return Err(error.context(self.label())),
        }
        let metrics = std::fs::read_to_string(self.path.join("metrics.jsonl")).unwrap_or_default();
        outcome.ms_step = ms_step(&metrics);
        let text = serde_json::to_string_pretty(&outcome).context("compare: a result is no JSON")?;
        RunFolder::open(&self.path)?.write(RESULT, &text)?;
        // Read back, so that a comparison says the same whether it made a run or found it.
        self.ended()
    }

    /// Whether there is a run to go on with; what a run left that was killed before its first checkpoint is removed.
    fn begun(&self, config: &Config) -> Result<bool> {
        let path = &self.path;
        let Ok(entries) = std::fs::read_dir(path) else { return Ok(false) };
        let entries = entries.collect::<std::io::Result<Vec<_>>>();
        let entries = entries.with_context(|| format!("compare: cannot list `{}`", path.display()))?;
        let names: Vec<String> = entries.iter().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        let saved = std::fs::read_dir(path.join("checkpoints")).into_iter().flatten().flatten();
        if saved.map(|entry| entry.file_name()).any(|name| {
            let name = name.to_string_lossy();
            name.starts_with("step_") && !name.ends_with(".tmp")
        }) {
            let stored = RunFolder::open(path)?.config()?;
            let key = changes(&stored, config).into_iter().find(|change| change.mathematics).map(|change| change.key);
            return match key {
                None => Ok(true),
                Some(key) => Err(usage(format!(
                    "`{}` went on as another run: its `{key}` is changed; give another --runs, or remove the folder",
                    path.display()
                ))
                .into()),
            };
        }
        let ours = |name: &String| {
            name == "checkpoints" || LEFTOVERS.contains(&name.strip_suffix(".tmp").unwrap_or(name.as_str()))
        };
        if let Some(foreign) = names.iter().find(|name| !ours(name)) {
            let problem = format!("`{}` is no run folder: it holds `{foreign}`", path.display());
            return Err(usage(format!("{problem}; give another --runs, or remove the folder")).into());
        }
        // Held while it is removed: another process may have begun here a moment ago.
        let held = RunFolder::open(path).ok().map(RunFolder::locked).transpose()?;
        std::fs::remove_dir_all(path).with_context(|| format!("compare: cannot remove `{}`", path.display()))?;
        drop(held);
        Ok(false)
    }
}

/// Median time of the steps after the first [`COLD_STEPS`], from the lines of a run.
fn ms_step(metrics: &str) -> Option<f64> {
    let lines = metrics.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let steps = lines.filter(|line| line["kind"] == "step" && line["step"].as_u64() > Some(COLD_STEPS));
    median(steps.filter_map(|line| line["step_ms"].as_f64()).filter(|ms| *ms > 0.0))
}

/// The middle of some numbers, the upper one of an even count.
pub fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::{Outcome, Run, ms_step};
    use crate::compare::plan::Contender;
    use crate::config::preset;
    use crate::exit::Exit;

    fn contender() -> Contender {
        let config = preset("tiny").unwrap();
        Contender { name: "control".into(), config, identity: "0123456789abcdef".into(), changes: Vec::new() }
    }

    fn outcome(seed: u64) -> Outcome {
        Outcome {
            identity: "0123456789abcdef".into(),
            seed,
            bpb: Some(1.0 / 3.0),
            standard_error: Some(0.1),
            not_finite: None,
            ms_step: None,
            launches: None,
            nodes: None,
            backend: "cpu".into(),
            unverified: false,
        }
    }

    #[test]
    fn the_first_fifty_steps_are_not_timed() {
        let line = |step: u64, ms: f64| format!("{{\"kind\":\"step\",\"step\":{step},\"step_ms\":{ms}}}\n");
        let cold: String = (1..=50).map(|step| line(step, 900.0)).collect();
        assert_eq!(ms_step(&cold), None);
        let warm: String = [(51, 3.0), (52, 2.0), (53, 70.0)].map(|(step, ms)| line(step, ms)).concat();
        let eval = "{\"kind\":\"eval\",\"step\":53,\"step_ms\":1000}\n";
        assert_eq!(ms_step(&(cold + &warm + eval + "torn {")), Some(3.0));
    }

    #[test]
    fn a_result_is_believed_for_its_own_run_only() {
        let (folder, contender) = (tempfile::tempdir().unwrap(), contender());
        let run = Run::new(folder.path(), &contender, 4);
        assert_eq!(run.ended().unwrap(), None);
        std::fs::create_dir(&run.path).unwrap();
        let write = |text: &str| std::fs::write(run.path.join("result.json"), text).unwrap();
        write(&serde_json::to_string(&outcome(4)).unwrap());
        assert_eq!(run.ended().unwrap().unwrap().seed, 4);
        write(&serde_json::to_string(&outcome(5)).unwrap());
        let error = format!("{:#}", run.ended().unwrap_err());
        assert!(error.contains("result.json") && error.contains("remove the folder"), "{error}");
        write("{");
        assert!(format!("{:#}", run.ended().unwrap_err()).contains("remove the folder"));
    }

    #[test]
    fn only_leftovers_of_a_run_are_removed() {
        let (folder, contender) = (tempfile::tempdir().unwrap(), contender());
        let run = Run::new(folder.path(), &contender, 0);
        let config = &contender.config;
        assert!(!run.begun(config).unwrap());
        std::fs::create_dir_all(run.path.join("checkpoints/step_000000.tmp")).unwrap();
        std::fs::write(run.path.join("config.toml.tmp"), "half").unwrap();
        assert!(!run.begun(config).unwrap());
        assert!(!run.path.exists());
        std::fs::create_dir(&run.path).unwrap();
        std::fs::write(run.path.join("thesis.tex"), "years of work").unwrap();
        let error = run.begun(config).unwrap_err();
        assert_eq!(Exit::of(&error), Exit::Usage);
        assert!(error.to_string().contains("thesis.tex"), "{error}");
        assert!(run.path.join("thesis.tex").exists());
    }

    #[test]
    fn builds_are_those_that_started_the_run() {
        let (folder, contender) = (tempfile::tempdir().unwrap(), contender());
        let run = Run::new(folder.path(), &contender, 0);
        assert!(run.builds().unwrap().is_empty());
        std::fs::create_dir(&run.path).unwrap();
        let starts = r#"[{"binary_blake3":"aa"},{"binary_blake3":"bb"},{"binary_blake3":"aa"},{}]"#;
        std::fs::write(run.path.join("run.json"), starts).unwrap();
        assert_eq!(run.builds().unwrap(), ["aa", "bb", "unknown"]);
        std::fs::write(run.path.join("run.json"), &starts[..30]).unwrap();
        let error = run.builds().unwrap_err();
        assert_eq!(Exit::of(&error), Exit::Usage);
        assert!(error.to_string().contains("run.json") && error.to_string().contains("--any-build"), "{error}");
    }
}
