//! From a request to a run that can take its next step: a new folder, or an old one with its checkpoint loaded.

use std::path::{Path, PathBuf};

use anyhow::Context;

use super::{Learner, Parameter, Watch};
use crate::backend::{self, Facts};
use crate::checkpoint::{self, Found, State};
use crate::config::{Backend, Config, ConfigError, JepaConfig, JepaMode, Sources, check_changes, resolve};
use crate::data::Data;
use crate::host;
use crate::jepa_targets::{Header, Reader};
use crate::model::{Group, check_batch};
use crate::progress::Reporter;
use crate::run::RunFolder;

/// Builds the learner of a configuration.
pub type Build = fn(&Config) -> anyhow::Result<Box<dyn Learner>>;

/// Which run to go on with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resume {
    /// The newest run that has a checkpoint; a new run if there is none.
    Auto,
    /// This run folder.
    Run(PathBuf),
}

/// What the command line asked for.
#[derive(Clone, Debug)]
pub struct Request {
    /// Where the configuration's values come from.
    pub sources: Sources,
    /// Folder of the run folders.
    pub runs: PathBuf,
    /// Name of a new run.
    pub name: Option<String>,
    /// Run to go on with.
    pub resume: Option<Resume>,
    /// Keys that may change the mathematics of a resumed run.
    pub allow_change: Vec<String>,
    /// The command line, for provenance.
    pub command: Vec<String>,
    /// Print only results and warnings.
    pub quiet: bool,
    /// Instruments to take along.
    pub watch: Watch,
}

/// A run that can take its next step.
pub struct Prepared {
    /// Its folder.
    pub run: RunFolder,
    /// Its configuration.
    pub config: Config,
    /// Its data.
    pub data: Data,
    /// Its model and optimiser.
    pub learner: Box<dyn Learner>,
    /// Steps done.
    pub done: u64,
    /// Which program goes on with it.
    pub provenance: serde_json::Value,
    /// Where its lines go.
    pub reporter: Reporter,
    /// Instruments it takes along.
    pub watch: Watch,
}

/// Creates or reopens the run of a request.
///
/// Nothing is written before configuration, data and model were all found good.
///
/// # Errors
/// Whatever is wrong with them, typed as [`crate::exit::Exit::of`] expects.
pub fn prepare(request: &Request, build: Build) -> anyhow::Result<Prepared> {
    match &request.resume {
        None if !request.allow_change.is_empty() => {
            let problem =
                "train: --allow-change is about what a stored run has otherwise; give --resume, or leave it out";
            Err(ConfigError::Usage(problem.into()).into())
        }
        None => start(request, build),
        Some(Resume::Run(path)) => resume(request, RunFolder::open(path)?, build),
        Some(Resume::Auto) => {
            let (run, passed) = RunFolder::newest(&request.runs);
            let prepared = match run {
                Some(run) => resume(request, run, build),
                None => start(request, build),
            }?;
            if let Some(first) = passed.first() {
                let (count, first) = (passed.len(), first.display());
                let line =
                    format!("{count} newer runs have no checkpoint and are passed over; the newest is `{first}`");
                prepared.reporter.warn(&line);
            }
            Ok(prepared)
        }
    }
}

fn start(request: &Request, build: Build) -> anyhow::Result<Prepared> {
    let mut config = resolve(&request.sources)?;
    let why_no_gpu = settle(&mut config, &request.watch)?;
    request.watch.check()?;
    check_batch(&config, host::machine_memory_bytes())?;
    let data = Data::open(&config)?;
    let targets = check_targets(&config, &data, 0)?;
    // A resumed run may start in another folder.
    let paths = [&mut config.data.path, &mut config.data.eval_path, &mut config.jepa.targets];
    for path in paths.into_iter().flatten() {
        *path = std::fs::canonicalize(&*path).with_context(|| format!("data: cannot resolve `{}`", path.display()))?;
        if path.to_str().is_none() {
            return Err(ConfigError::Usage(format!(
                "train: the data's path `{}` is not UTF-8 and cannot be stored in config.toml; move the data, or rename \
                 the folder",
                path.display()
            ))
            .into());
        }
    }
    let learner = build(&config)?;
    let provenance = host::provenance(&request.command, config.seed);
    let run = RunFolder::create(&request.runs, request.name.as_deref(), &config, &data.manifest, &provenance)?;
    let reporter = Reporter::new(config.train.total_steps, request.quiet);
    if request.resume.is_some() {
        reporter.note(&format!("no run with a checkpoint in `{}`: this is a new one", request.runs.display()));
    }
    describe(&config, &data, &run, &*learner, why_no_gpu.as_deref(), &reporter);
    describe_objective(&config, targets.as_ref(), &reporter);
    Ok(Prepared { run, config, data, learner, done: 0, provenance, reporter, watch: request.watch.clone() })
}

fn resume(request: &Request, run: RunFolder, build: Build) -> anyhow::Result<Prepared> {
    if request.name.is_some() {
        return Err(ConfigError::Usage("train: --name is for a new run; leave it out with --resume".into()).into());
    }
    let run = run.locked()?;
    let Found { path, mut loaded, skipped } = checkpoint::newest_good(&run.checkpoints())?;
    // The checkpoint's own configuration counts: it is the one its weights were made with.
    let stored = Config::from_toml(&loaded.config_toml, &path.join("config.toml"))?;
    let mut config = resolve(&Sources { base: Some(stored.clone()), ..request.sources.clone() })?;
    let why_no_gpu = settle(&mut config, &request.watch)?;
    let paths = [&mut config.data.path, &mut config.data.eval_path, &mut config.jepa.targets];
    for path in paths.into_iter().flatten() {
        // What cannot be resolved, or not be stored, stays as it was given.
        let resolved = std::fs::canonicalize(&*path).ok().filter(|resolved| resolved.to_str().is_some());
        *path = resolved.unwrap_or_else(|| path.clone());
    }
    let changes = check_changes(&stored, &config, &request.allow_change)?;
    let (done, total) = (loaded.manifest.next_step, config.train.total_steps);
    if total < done {
        let problem = format!("train: --steps (train.total_steps) is {total}, and the run has done {done} steps");
        return Err(ConfigError::Usage(format!("{problem}; give {done} or more, or start a new run")).into());
    }
    request.watch.check()?;
    check_batch(&config, host::machine_memory_bytes())?;
    let data = Data::open(&config)?;
    run.data_manifest()?.check_unchanged(&data.manifest)?;
    let targets = check_targets(&config, &data, done)?;
    let mut learner = build(&config)?;
    let facts = learner.facts();
    if let Some(then) = &loaded.manifest.run {
        check_arms(then, &facts, &request.allow_change)?;
        check_same_targets(then, &facts, &request.allow_change)?;
    }
    let teacher_note = change_objective(&stored, &config, &*learner, &mut loaded.state);
    learner.import(&loaded.state).with_context(|| format!("train: cannot resume from `{}`", path.display()))?;
    let provenance = host::provenance(&request.command, config.seed);
    run.record_resume(&config, &provenance)?;
    let reporter = Reporter::new(config.train.total_steps, request.quiet);
    for problem in &skipped {
        reporter.warn(&format!("skipped: {problem}"));
    }
    if let Some(table) = changes {
        reporter.result(&format!("changed since the checkpoint:\n{}", table.trim_end()));
    }
    if stored.train.total_steps != config.train.total_steps {
        let (then, now) = (stored.train.total_steps, config.train.total_steps);
        reporter.result(&format!("{now} steps instead of {then}: the learning rate now follows another schedule"));
    }
    if let Some(then) = loaded.manifest.run.filter(|then| then.device != facts.device) {
        let (then, now) = (then.device, &facts.device);
        reporter.result(&format!("the checkpoint is from {then}, and this is {now}: the bits may differ"));
    }
    if let Some(note) = teacher_note {
        reporter.result(note);
    }
    describe(&config, &data, &run, &*learner, why_no_gpu.as_deref(), &reporter);
    describe_objective(&config, targets.as_ref(), &reporter);
    reporter.note(&format!("resumed from `{}` after step {done}", path.display()));
    Ok(Prepared { run, config, data, learner, done, provenance, reporter, watch: request.watch.clone() })
}

/// Settles the backend and refuses instruments that it has no use for.
fn settle(config: &mut Config, watch: &Watch) -> anyhow::Result<Option<String>> {
    let note = backend::settle(&mut config.run)?;
    if config.run.backend == Backend::Cpu && (watch.atlas.is_some() || watch.timers) {
        let problem = "train: --atlas and --timers are about launches, and the reference launches nothing";
        return Err(ConfigError::Usage(format!("{problem}; give --backend cuda, or leave them out")).into());
    }
    Ok(note)
}

/// Refuses to go on with other kernels than those of the checkpoint unless that is allowed: the bits would differ.
fn check_arms(then: &Facts, now: &Facts, allowed: &[String]) -> Result<(), ConfigError> {
    let stems = then.arms.keys().chain(now.arms.keys());
    let stems: std::collections::BTreeSet<&String> =
        stems.filter(|stem| then.arms.get(*stem) != now.arms.get(*stem)).collect();
    // Another backend has been asked for and is a change of its own.
    if stems.is_empty() || then.backend != now.backend || allowed.iter().any(|key| key == "run.arms") {
        return Ok(());
    }
    let arm = |facts: &Facts, stem: &str| facts.arms.get(stem).map_or("(none)", String::as_str).to_owned();
    let rows = stems.into_iter().map(|stem| format!("  {stem}: {} then, {} now\n", arm(then, stem), arm(now, stem)));
    Err(ConfigError::Changed {
        table: rows.collect(),
        advice: "ask for the arms of the checkpoint with --arm STEM=plain|fused (a fused one without a receipt needs \
                 --unverified), or add --allow-change run.arms to go on with those of now"
            .to_owned(),
    })
}

/// Opens the file of targets, where the run has one, and refuses one of another run, of other data, or without the
/// steps from `next` to the last.
fn check_targets(config: &Config, data: &Data, next: u64) -> anyhow::Result<Option<Header>> {
    let Some(path) = config.jepa.targets() else { return Ok(None) };
    let reader = Reader::open(path)?;
    reader.require_for(config)?;
    reader.require_data(data.manifest.digest().into(), next)?;
    Ok(Some(reader.header().clone()))
}

/// Refuses to go on with the targets of another teacher, whatever the file's name, unless that is allowed.
fn check_same_targets(then: &Facts, now: &Facts, allowed: &[String]) -> Result<(), ConfigError> {
    let (Some(before), Some(after)) = (&then.targets, &now.targets) else { return Ok(()) };
    if before == after || allowed.iter().any(|key| key == "jepa.targets") {
        return Ok(());
    }
    Err(ConfigError::Changed {
        table: format!(
            "  jepa.targets: latents of a teacher with BLAKE3 {} then, {} now\n",
            &before[..16],
            &after[..16]
        ),
        advice: "restore the file, or add --allow-change jepa.targets to go on with this one".to_owned(),
    })
}

/// Where the user has allowed a run to leave the objective, or to change between a teacher that follows and a file: what
/// becomes of the checkpoint's tensors. Without such a change the checkpoint must have what the run needs.
fn change_objective(then: &Config, now: &Config, learner: &dyn Learner, state: &mut State) -> Option<&'static str> {
    if then.jepa.on() && !now.jepa.on() {
        *state = std::mem::take(state).without_objective();
        return Some("the objective is left behind with its parameters and its teacher: the model goes on without it");
    }
    match (then.jepa.has_teacher(), now.jepa.has_teacher()) {
        (true, false) => {
            state.teacher.clear();
            Some("the teacher that followed the run is left behind: its latents now come from a file")
        }
        (false, true) if then.jepa.on() => {
            let rows = Group::Rows.word();
            let followed = learner.parameters().into_iter().filter(|parameter| parameter.group != rows);
            let tensors = followed.filter_map(|p| state.weights.get(&p.name).map(|tensor| (p.name, tensor.clone())));
            state.teacher = tensors.collect();
            Some("there was no teacher in the checkpoint: one starts from its weights and follows from here")
        }
        _ => None,
    }
}

/// Which objective a run has beside the cross-entropy, if any.
fn describe_objective(config: &Config, targets: Option<&Header>, reporter: &Reporter) {
    let JepaConfig { mode, weight, momentum, .. } = &config.jepa;
    let mode = match mode {
        JepaMode::Off => return,
        JepaMode::Shared => "one student pass for cross-entropy and latents",
        JepaMode::Separate => "a student pass of its own",
    };
    let teacher = match targets {
        None => format!("the teacher follows with momentum {momentum}"),
        Some(header) => format!(
            "the teacher is frozen: latents of step {} of another run, read from a file; this is another objective \
             than a teacher that follows",
            header.teacher_step
        ),
    };
    reporter.note(&format!("jepa: {mode}, weight {weight}; {teacher}"));
}

fn describe(
    config: &Config,
    data: &Data,
    run: &RunFolder,
    learner: &dyn Learner,
    why_no_gpu: Option<&str>,
    reporter: &Reporter,
) {
    if let Some(why) = why_no_gpu {
        reporter.note(why);
    }
    let facts = learner.facts();
    if facts.unverified {
        reporter.warn(&facts.line());
    } else {
        reporter.note(&facts.line());
    }
    if config.data.path.is_none() {
        reporter.note("no --data given: training on the text that ships with dormouse, Genesis to Joshua (King James)");
    }
    let held_out = if data.eval_corpus.is_some() { "from --eval" } else { "held out of it" };
    reporter.note(&format!(
        "data: {} bytes in {} file(s), {} windows of {} bytes an epoch; scored on {} windows of {} bytes {held_out}",
        data.corpus.len(),
        data.corpus.files(),
        data.train.windows_per_epoch(),
        config.data.seq_bytes,
        data.eval.windows().len(),
        config.data.eval_bytes,
    ));
    if let Some(line) = data.left_out() {
        reporter.warn(&line);
    }
    let epochs = data.train.epochs(config.train.total_steps, config.train.batch_rows as u64);
    reporter.note(&format!("the run sees {:.2} epochs in {} steps", epochs, config.train.total_steps));
    reporter.note(&parameter_table(learner));
    reporter.note(&format!("configuration:\n{}", indent(&config.to_toml())));
    reporter.note(&format!("run folder {}", run.path().display()));
}

/// Parameters per optimiser group, and which they are.
pub fn parameter_table(learner: &dyn Learner) -> String {
    group_table(learner.parameters())
}

/// The same of a list of parameters.
pub fn group_table(parameters: Vec<Parameter>) -> String {
    let mut groups: Vec<(String, Vec<String>, usize)> = Vec::new();
    for parameter in parameters {
        let count: usize = parameter.shape.iter().product();
        match groups.iter_mut().find(|(name, _, _)| *name == parameter.group) {
            Some((_, tensors, values)) => {
                tensors.push(parameter.name);
                *values += count;
            }
            None => groups.push((parameter.group, vec![parameter.name], count)),
        }
    }
    let all: usize = groups.iter().map(|(_, _, values)| values).sum();
    let mut text = format!("{all} parameters");
    for (name, tensors, values) in groups {
        text.push_str(&format!("\n  {name}: {} tensors, {values} values: {}", tensors.len(), tensors.join(" ")));
    }
    text
}

fn indent(text: &str) -> String {
    text.trim_end().lines().map(|line| format!("  {line}")).collect::<Vec<_>>().join("\n")
}

/// The command that continues a run.
pub fn resume_command(program: &str, run: &Path) -> String {
    format!("{program} train --resume {}", quoted(&run.display().to_string()))
}

/// A word as a shell reads it back.
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}
