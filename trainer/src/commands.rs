//! What each subcommand does. The one place that builds a learner is the `build` it is given.

use std::io::{Read, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail, ensure};

use crate::anchors::{Anchors, FIT_LIMIT_BYTES};
use crate::backend;
use crate::checkpoint::{self, Found, Loaded};
use crate::cli::{AnchorsArgs, ArmsArgs, AtlasCommand, Command, EvalArgs, GenerateArgs, ReplayArgs, TrainArgs};
use crate::config::{Backend, Config, ConfigError, JepaConfig, RunConfig, Sources, resolve};
use crate::data::{Batch, Data, step_mask};
use crate::exit::{Exit, NonFiniteResult};
use crate::instruments::atlas::Atlas;
use crate::progress::{all_said, say};
use crate::run::RunFolder;
use crate::signals::{self, Stop};
use crate::train::{self, Build, Learner, Limits};
use crate::{bench, check, compare, inspect, jepa_targets};

/// Runs a subcommand and turns its error, if any, into a message and an exit code.
pub fn run(command: Command, build: Build) -> ExitCode {
    signals::ignore_file_size_signal();
    let done = match command {
        Command::Train(arguments) => train(&arguments, build),
        Command::Eval(arguments) => eval(&arguments, build),
        Command::Generate(arguments) => generate(&arguments, build),
        Command::Inspect(arguments) => inspect::command(&arguments),
        Command::Anchors(arguments) => anchors(&arguments),
        Command::Arms(arguments) => arms(&arguments),
        Command::Atlas(command) => atlas(&command),
        Command::Check(arguments) => check::command(&arguments),
        Command::Bench(arguments) => bench::command(&arguments, build),
        Command::Compare(arguments) => compare::command(&arguments, build, &command_line()),
        Command::Replay(arguments) => replay(&arguments, build),
        Command::JepaTargets(arguments) => jepa_targets::command::run(&arguments, build),
    };
    finish(done.and_then(|()| all_said()))
}

/// Prints an error and gives its exit code.
pub fn finish(done: anyhow::Result<()>) -> ExitCode {
    match done {
        Ok(()) => Exit::Done.into(),
        Err(error) => {
            // Standard error may be closed; the exit code still says what happened.
            let _ = writeln!(std::io::stderr(), "error: {error:#}");
            Exit::of(&error).into()
        }
    }
}

fn train(arguments: &TrainArgs, build: Build) -> anyhow::Result<()> {
    let max_time = arguments.max_minutes.map(|minutes| Duration::try_from_secs_f64(60.0 * minutes)).transpose();
    let max_time = max_time.map_err(|_| {
        let got = arguments.max_minutes.unwrap_or(f64::NAN);
        ConfigError::Usage(format!("train: --max-minutes is {got}; give a number, 0 or more, that fits a clock"))
    })?;
    // Before anything is written, so that a signal during the start is kept for the first step.
    let stop = Stop::on_signals().context("train: cannot watch for signals")?;
    let prepared = train::prepare(&arguments.request(command_line()), build)?;
    let limits = Limits { stop_at_step: arguments.stop_at_step, max_time };
    train::run(prepared, limits, &stop, &program())?;
    Ok(())
}

/// How the user called this program.
fn program() -> String {
    train::quoted(&command_line().into_iter().next().unwrap_or_else(|| "dormouse".into()))
}

/// The command line, for people: a path need not be text.
fn command_line() -> Vec<String> {
    std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect()
}

/// `dormouse anchors`.
pub fn anchors(arguments: &AnchorsArgs) -> anyhow::Result<()> {
    let config = resolve(&arguments.config.sources())?;
    let data = Data::open(&config)?;
    if let Some(line) = data.left_out() {
        let _ = writeln!(std::io::stderr(), "warning: {line}");
    }
    let train = data.train_bytes(FIT_LIMIT_BYTES)?;
    let anchors = Anchors::measure(&train, &data.eval_windows()?);
    if arguments.json {
        say(&serde_json::to_string(&anchors).context("anchors: cannot write JSON")?);
        return Ok(());
    }
    let all: u64 = data.train.segments().iter().map(crate::data::Segment::len).sum();
    if anchors.fitted_bytes < all {
        say(&format!("fitted on the first {} of {all} training bytes", anchors.fitted_bytes));
    }
    say(&format!(
        "{}: fitted on {} training bytes, scored on {} held-out windows of {} bytes",
        data.corpus.name(),
        anchors.fitted_bytes,
        anchors.windows,
        config.data.eval_bytes
    ));
    say(anchors.table().trim_end());
    Ok(())
}

/// The checkpoint of a run that is read, newest or best, and the configuration that it was made with.
pub(crate) fn find(run: &RunFolder, best: bool) -> anyhow::Result<(Found, Config)> {
    let folder = run.checkpoints();
    let found = if best { checkpoint::best_good(&folder)? } else { checkpoint::newest_good(&folder)? };
    for problem in &found.skipped {
        let _ = writeln!(std::io::stderr(), "warning: skipped: {problem}");
    }
    let config = Config::from_toml(&found.loaded.config_toml, &found.path.join("config.toml"))?;
    Ok((found, config))
}

/// A learner with the weights of a run's checkpoint, and the checkpoint.
fn load(
    run: &RunFolder,
    best: bool,
    on: Option<Backend>,
    build: Build,
) -> anyhow::Result<(Config, Box<dyn Learner>, Loaded)> {
    let (found, config) = find(run, best)?;
    // Whoever scores or generates reads the student alone.
    let student = Config { jepa: JepaConfig::default(), ..config.clone() };
    let mut learner = build(&elsewhere(&student, on)?)?;
    learner
        .import(&found.loaded.state.clone().without_objective())
        .with_context(|| format!("cannot load `{}`", found.path.display()))?;
    Ok((config, learner, found.loaded))
}

/// The configuration for a use that trains nothing: on the backend that was asked for, or the run's own, or the
/// reference where that one does not open.
pub(crate) fn elsewhere(config: &Config, on: Option<Backend>) -> anyhow::Result<Config> {
    let mut here = config.clone();
    here.run.backend = on.unwrap_or(config.run.backend);
    let own = here.run.backend == config.run.backend;
    let plain = |run: &mut RunConfig| {
        (run.precision, run.arms) = (crate::config::Math::F32, Vec::new());
        if matches!(run.backend, Backend::Cpu | Backend::Auto) {
            (run.unverified, run.graph) = (false, true);
        }
    };
    if !own {
        plain(&mut here.run);
    }
    match backend::settle(&mut here.run) {
        Ok(_) => {}
        Err(why) if on.is_none() => {
            let _ = writeln!(std::io::stderr(), "warning: {why:#}; the reference computes instead");
            here.run.backend = Backend::Cpu;
            plain(&mut here.run);
        }
        Err(why) => return Err(why),
    }
    Ok(here)
}

/// `dormouse arms`.
fn arms(arguments: &ArmsArgs) -> anyhow::Result<()> {
    let mut config = resolve(&arguments.run.over(arguments.config.sources()))?;
    let wanted = config.run.backend;
    // What answers is asked alone: the rest of what was asked for may be of a GPU that is elsewhere.
    let mut alone = RunConfig { backend: wanted, ..RunConfig::default() };
    let note = backend::settle(&mut alone)?;
    config.run.backend = alone.backend;
    if config.run.backend == Backend::Cpu {
        // The reference has one arm of everything; what a GPU would take is still of interest.
        say(&note.unwrap_or_else(|| format!("run.backend is {wanted}: the reference has one arm of every operation")));
        say("on sm_90 it would be:");
        say(crate::arms::table(&crate::arms::choose(&config.run, "sm_90")?).trim_end());
        return Ok(());
    }
    let generation = backend::generation(config.run.backend)?;
    say(&format!("backend {}, {generation}, matrix products in {}", config.run.backend, config.run.precision));
    say(crate::arms::table(&crate::arms::choose(&config.run, &generation)?).trim_end());
    Ok(())
}

/// `dormouse atlas`.
fn atlas(command: &AtlasCommand) -> anyhow::Result<()> {
    let text = match command {
        AtlasCommand::Top { file, n } => Atlas::read(file)?.top(*n),
        AtlasCommand::Diff { a, b, key, n } => Atlas::read(a)?.diff(&Atlas::read(b)?, key, *n)?,
    };
    say(text.trim_end());
    Ok(())
}

fn eval(arguments: &EvalArgs, build: Build) -> anyhow::Result<()> {
    let run = RunFolder::open(&arguments.run)?;
    let (stored, mut learner, loaded) = load(&run, arguments.best, arguments.backend, build)?;
    let eval = arguments.eval.as_ref().map(|path| toml::Value::String(path.display().to_string()));
    let flags = eval.map(|path| ("data.eval_path".to_owned(), path)).into_iter().collect();
    let sources = Sources { base: Some(stored.clone()), set: arguments.set.clone(), flags, ..Sources::default() };
    let config = resolve(&sources)?;
    if let Some(change) =
        crate::config::changes(&stored, &config).iter().find(|change| !change.key.starts_with("data.eval"))
    {
        bail!(ConfigError::Invalid {
            key: change.key.clone(),
            problem: "cannot be changed for an evaluation".into(),
            fix: "only data.eval_path, data.eval_windows and data.eval_bytes can".into(),
        });
    }
    let data = Data::open(&config)?;
    if config.data.eval_path == stored.data.eval_path {
        run.data_manifest()?.check_unchanged(&data.manifest)?;
    }
    let stop = Stop::on_signals().context("eval: cannot watch for signals")?;
    let Some(score) = train::score(&mut *learner, &data.eval_windows()?, &stop)? else {
        say("stopped");
        return Ok(());
    };
    if !score.bpb.is_finite() {
        let fix = "score another checkpoint (--best), or train with a lower rate";
        let what = "eval: the held-out score".into();
        bail!(NonFiniteResult { what, step: loaded.manifest.next_step, fix: fix.into() });
    }
    say(&format!(
        "step {} held-out bpb model={:.4} standard_error={:.4} windows={}",
        loaded.manifest.next_step, score.bpb, score.standard_error, score.windows
    ));
    Ok(())
}

fn generate(arguments: &GenerateArgs, build: Build) -> anyhow::Result<()> {
    let mut prompt = arguments.prompt.clone().into_bytes();
    if arguments.stdin {
        prompt.clear();
        std::io::stdin().read_to_end(&mut prompt).context("generate: cannot read the prompt")?;
    }
    if prompt.is_empty() {
        bail!(ConfigError::Usage("generate: the prompt is empty; give it one byte or more".into()));
    }
    if !(arguments.temperature >= 0.0 && arguments.temperature.is_finite()) {
        bail!(ConfigError::Usage(format!(
            "generate: --temperature is {}; give a number, 0 or more",
            arguments.temperature
        )));
    }
    let run = RunFolder::open(&arguments.run)?;
    let (_, mut learner, _) = load(&run, arguments.best, arguments.backend, build)?;
    let stop = Stop::on_signals().context("generate: cannot watch for signals")?;
    let mut out = std::io::stdout();
    let mut written = out.write_all(&prompt);
    let mut emit = |byte: Option<u8>| {
        if let (Ok(()), Some(byte)) = (&written, byte) {
            written = out.write_all(&[byte]).and_then(|()| out.flush());
        }
        written.is_ok() && !stop.requested()
    };
    learner.sample(&prompt, arguments.bytes, arguments.temperature, arguments.seed, &mut emit)?;
    match written.and_then(|()| out.write_all(b"\n")).and_then(|()| out.flush()) {
        // A reader that went away ends the sample, not the program.
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(error).context("generate: cannot write standard output; free some space, or write elsewhere")
        }
        _ => Ok(()),
    }
}

fn replay(arguments: &ReplayArgs, build: Build) -> anyhow::Result<()> {
    let folder: &Path = &arguments.bundle;
    if ![checkpoint::BATCH, "manifest.json"].iter().all(|name| folder.join(name).is_file()) {
        let shown = folder.display();
        let problem = format!("replay: `{shown}` is not a bundle: it has no {} and manifest.json", checkpoint::BATCH);
        bail!(ConfigError::Usage(format!("{problem}; give the folder nonfinite_... of a run")));
    }
    let loaded = checkpoint::load(folder)?;
    let config = Config::from_toml(&loaded.config_toml, &folder.join("config.toml"))?;
    let path = folder.join(checkpoint::BATCH);
    let bytes = std::fs::read(&path).with_context(|| format!("replay: cannot read `{}`", path.display()))?;
    let (rows, len) = (config.train.batch_rows, config.data.seq_bytes);
    ensure!(
        bytes.len() == rows * (len + 1),
        "replay: `{}` has {} bytes, expected {rows} rows of {}",
        path.display(),
        bytes.len(),
        len + 1
    );
    let step = loaded.manifest.next_step;
    let source = if config.train.overfit_one_batch { 0 } else { step };
    let mask = config.jepa.on().then(|| step_mask(config.seed, source, rows, len));
    let batch = Batch { step, rows, len, bytes, keys: None, mask };
    let mut learner = build(&elsewhere(&config, None)?)?;
    learner.import(&loaded.state).with_context(|| format!("cannot load `{}`", folder.display()))?;
    match learner.first_nonfinite(&batch)? {
        Some(tensor) => say(&format!("first tensor that is not finite: {tensor}")),
        None => say("every tensor is finite: the fault does not come back on these weights"),
    }
    Ok(())
}
