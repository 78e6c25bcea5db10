//! `dormouse jepa-targets`: the latents of a run's checkpoint, for every step of a run that will read them.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, bail};

use super::{Header, Writer};
use crate::checkpoint::{State, TensorData};
use crate::cli::JepaTargetsArgs;
use crate::commands::{elsewhere, find};
use crate::config::{Config, ConfigError, JepaConfig, JepaMode, Sources, changes, resolve};
use crate::data::Data;
use crate::host;
use crate::model::{MEMORY_TABLE, check_latents};
use crate::progress::{Reporter, minutes};
use crate::run::RunFolder;
use crate::signals::Stop;
use crate::train::{Build, Learner};

/// Progress lines of a whole file where there is no bar.
const LINES: u64 = 20;

/// Sections that the run that reads may have otherwise than the run whose checkpoint is read: they decide which bytes a
/// step has.
const MAY_DIFFER: [&str; 4] = ["seed", "data.", "train.", "jepa."];

/// Runs the command.
pub fn run(arguments: &JepaTargetsArgs, build: Build) -> anyhow::Result<()> {
    if arguments.out.exists() {
        let path = arguments.out.display();
        bail!(ConfigError::Usage(format!("jepa-targets: `{path}` exists and is not overwritten; give another --out")));
    }
    let run = RunFolder::open(&arguments.run)?;
    let (found, stored) = find(&run, arguments.best)?;
    let config = readers_config(&stored, &arguments.set)?;
    let mut here = elsewhere(&config, arguments.backend)?;
    check_latents(&here, host::machine_memory_bytes())?;
    let data = Data::open(&config)?;
    if (&config.data.path, &config.data.eval_path) == (&stored.data.path, &stored.data.eval_path) {
        run.data_manifest()?.check_unchanged(&data.manifest)?;
    }
    let (first, steps) = range(arguments, &config)?;
    let teacher = teacher_of(found.loaded.state);
    let header = header(&config, &data, (found.loaded.manifest.next_step, &teacher.0), first, steps)?;
    here.jepa = JepaConfig::default();
    let mut learner = build(&here)?;
    learner.import(&teacher.0).with_context(|| format!("cannot load `{}`", found.path.display()))?;

    let stop = Stop::on_signals().context("jepa-targets: cannot watch for signals")?;
    let reporter = Reporter::new(steps, arguments.quiet);
    reporter.note(&format!(
        "the teacher is {} after step {}; steps {first} to {} of {} rows of {} bytes, seed {}",
        teacher.1,
        header.teacher_step,
        first + steps - 1,
        header.rows,
        header.len,
        header.seed
    ));
    let mut writer = Writer::create(&arguments.out, header)?;
    let began = Instant::now();
    for done in 0..steps {
        if stop.requested() {
            reporter.finish();
            reporter.result("stopped; no file was written");
            return Ok(());
        }
        let step = first + done;
        add(&mut writer, &data, &config, &mut *learner, step)?;
        let done = done + 1;
        if done == steps || done.is_multiple_of((steps / LINES).max(1)) {
            let each = began.elapsed().as_secs_f64() / done as f64;
            let (megabytes, left) = (writer.bytes() as f64 / 1e6, (steps - done) as f64 * each);
            let line =
                format!("step {done}/{steps} | {megabytes:.1} MB | {:.1} ms | eta {}", 1e3 * each, minutes(left));
            reporter.step(done, &line);
        }
    }
    writer.finish()?;
    reporter.finish();
    let out = arguments.out.display();
    reporter.result(&format!("wrote {out}; train with it: --set jepa.mode=shared --set jepa.targets={out}"));
    Ok(())
}

/// The targets of a run's first `steps` steps, with the model as it begins for a teacher: for measuring such a run.
pub(crate) fn write_for_bench(config: &Config, steps: u64, out: &Path, build: Build) -> anyhow::Result<()> {
    let mut config = Config { jepa: JepaConfig { mode: JepaMode::Shared, ..JepaConfig::default() }, ..config.clone() };
    let data = Data::open(&config)?;
    config.jepa = JepaConfig::default();
    let mut learner = build(&config)?;
    let header = header(&config, &data, (0, &learner.export()?), 0, steps)?;
    let mut writer = Writer::create(out, header)?;
    for step in 0..steps {
        add(&mut writer, &data, &config, &mut *learner, step)?;
    }
    writer.finish()?;
    Ok(())
}

/// Adds the latents of a step's batch.
fn add(writer: &mut Writer, data: &Data, config: &Config, learner: &mut dyn Learner, step: u64) -> anyhow::Result<()> {
    let batch = data.training_batch(&config.train, step)?;
    let mask = batch.mask.as_deref().expect("data of a run with the objective has masks");
    Ok(writer.add(mask, &learner.latents(&batch)?)?)
}

fn header(config: &Config, data: &Data, teacher: (u64, &State), first: u64, steps: u64) -> anyhow::Result<Header> {
    Ok(Header {
        teacher_step: teacher.0,
        seed: config.seed,
        first_step: first,
        steps,
        rows: u32::try_from(config.train.batch_rows).context("jepa-targets: train.batch_rows is above 32 bits")?,
        len: u32::try_from(config.data.seq_bytes).context("jepa-targets: data.seq_bytes is above 32 bits")?,
        width: u32::try_from(config.model.width).context("jepa-targets: model.width is above 32 bits")?,
        data: data.manifest.digest().into(),
        source: digest(teacher.1),
    })
}

/// The configuration of the run that will read: that of the run whose checkpoint is read, with `set` over it.
fn readers_config(stored: &Config, set: &[String]) -> anyhow::Result<Config> {
    for argument in set {
        let (key, value) = argument.split_once('=').unwrap_or((argument, ""));
        let (key, value) = (key.trim(), value.trim().trim_matches('"'));
        let (problem, fix) = match (key, value) {
            ("jepa.mode", "off") => ("is off, and targets are for a run whose mode is not", "give shared or separate"),
            ("jepa.targets", path) if !path.is_empty() => {
                ("names a file to read, and this command writes one", "give its name with --out")
            }
            _ => continue,
        };
        let fix = format!("{fix}, or leave --set {key} out");
        bail!(ConfigError::Invalid { key: key.to_owned(), problem: problem.into(), fix });
    }
    let base = Config { jepa: JepaConfig { targets: None, ..stored.jepa.clone() }, ..stored.clone() };
    let mut config = resolve(&Sources { base: Some(base.clone()), set: set.to_vec(), ..Sources::default() })?;
    let allowed = |key: &str| MAY_DIFFER.iter().any(|prefix| key.starts_with(prefix));
    if let Some(change) = changes(&base, &config).iter().find(|change| !allowed(&change.key)) {
        bail!(ConfigError::Invalid {
            key: change.key.clone(),
            problem: "cannot be changed for targets".into(),
            fix: "only seed, data.* and train.* decide which bytes a step has".into(),
        });
    }
    // Masks do not depend on the mode, and a run without the objective has none.
    config.jepa.mode = JepaMode::Shared;
    config.jepa.targets = None;
    Ok(config)
}

/// The first step and how many.
fn range(arguments: &JepaTargetsArgs, config: &Config) -> anyhow::Result<(u64, u64)> {
    let (first, total) = (arguments.first_step, config.train.total_steps);
    let last = total - 1;
    let more = "or give --set train.total_steps=N";
    if first > last {
        let problem = format!("jepa-targets: --first-step is {first}, expected 0 to {last}, which are the run's steps");
        bail!(ConfigError::Usage(format!("{problem}; lower it, {more}")));
    }
    let steps = arguments.steps.unwrap_or(total - first);
    if steps == 0 {
        let problem = "jepa-targets: --steps is 0, expected 1 or more; leave it out for all steps from --first-step on";
        bail!(ConfigError::Usage(problem.into()));
    }
    let end = first.saturating_add(steps);
    if end > total {
        let asked = format!("steps {first} to {} are asked for, and the run has steps 0 to {last}", end - 1);
        bail!(ConfigError::Usage(format!("jepa-targets: {asked}; lower --first-step or --steps, {more}")));
    }
    Ok((first, steps))
}

/// The teacher's parameters as those of a model, and what they are: the teacher that followed the run, else its
/// weights.
fn teacher_of(mut state: State) -> (State, &'static str) {
    let teacher = std::mem::take(&mut state.teacher);
    let word = if teacher.is_empty() { "the model" } else { "the model's moving average" };
    // What a teacher does not follow, it reads from the model.
    state.weights.extend(teacher);
    (state.without_objective(), word)
}

/// BLAKE3 of a teacher's tensors: names, shapes and values, by name. A table counts alike wherever it lies.
fn digest(teacher: &State) -> [u8; 32] {
    let mut tensors: BTreeMap<&str, (&[usize], Values<'_>)> = BTreeMap::new();
    for (name, tensor) in &teacher.weights {
        let values = match &tensor.data {
            TensorData::F32(values) => Values::F32(values),
            TensorData::U32(values) => Values::U32(values),
        };
        tensors.insert(name, (&tensor.shape, values));
    }
    let shape = teacher.table.as_ref().map_or([0; 2], |table| [table.rows(), table.width()]);
    if let Some(table) = &teacher.table {
        tensors.insert(MEMORY_TABLE, (&shape, Values::F32(table.values())));
    }
    let mut hasher = blake3::Hasher::new();
    for (name, (shape, values)) in tensors {
        hasher.update(&(name.len() as u64).to_le_bytes()).update(name.as_bytes());
        hasher.update(&(shape.len() as u64).to_le_bytes());
        for &extent in shape {
            hasher.update(&(extent as u64).to_le_bytes());
        }
        match values {
            Values::F32(values) => values.iter().for_each(|x| _ = hasher.update(&x.to_le_bytes())),
            Values::U32(values) => values.iter().for_each(|x| _ = hasher.update(&x.to_le_bytes())),
        }
    }
    *hasher.finalize().as_bytes()
}

/// Numbers of a tensor, whoever has them.
enum Values<'a> {
    F32(&'a [f32]),
    U32(&'a [u32]),
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::digest;
    use crate::checkpoint::{State, Tensor};
    use crate::host_table::HostTable;

    #[test]
    fn a_teacher_is_known_by_its_table_too_wherever_it_lies() {
        let rest = || {
            let mut state = State::default();
            for name in ["engram.key", "rho"] {
                state.weights.insert(name.to_owned(), Tensor::f32(&[2], vec![1.0, -0.5]));
            }
            state
        };
        let numbers = |first: f32| vec![first, 2.0, 3.0, 4.0, 5.0, 6.0];
        let device = |first| {
            let mut state = rest();
            state.weights.insert("engram.table".to_owned(), Tensor::f32(&[3, 2], numbers(first)));
            digest(&state)
        };
        let host = |first| digest(&State { table: Some(Arc::new(HostTable::new(2, numbers(first)))), ..rest() });
        assert_eq!(host(1.0), device(1.0));
        assert_ne!(host(1.0), host(1.5));
        assert_ne!(host(1.0), digest(&rest()));
        // What the optimiser alone reads is no part of a teacher.
        let mut moved = rest();
        moved.optimizer.insert("m.rho".to_owned(), Tensor::f32(&[2], vec![1.0, 1.0]));
        assert_eq!(digest(&moved), digest(&rest()));
        // Known from before: a teacher without a table on the host keeps its name.
        assert_eq!(&blake3::Hash::from(digest(&rest())).to_hex()[..16], "221fc539e33f5dfd");
    }
}
