//! `dormouse bench`: the time of a training step, in a form that can be believed later.
//!
//! Each process builds the model, runs the steps of a real run on real bytes and times those from the 51st on. The
//! medians of the processes are averaged; what lies between the largest and the smallest is the run-to-run spread, and
//! a difference below it is none. A few more steps under timers give the share of a step in which the device works.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::backend::{Facts, settle};
use crate::cli::BenchArgs;
use crate::config::{Config, ConfigError, Rule, resolve};
use crate::data::{Data, Prefetch};
use crate::history::{self, COLD_STEPS, NONE, Row};
use crate::host;
use crate::instruments::atlas::operation;
use crate::instruments::bound::StepCost;
use crate::instruments::{Sites, Witness, sites};
use crate::jepa_targets::command::write_for_bench;
use crate::model::check_batch;
use crate::progress::say;
use crate::run::try_write;
use crate::train::{Build, Learner, training};

mod map;

/// Steps that are timed together, up to the moment when the device has done them: the host is some steps ahead of a device,
/// so what passes between two calls is not what a step takes.
const BLOCK_STEPS: u64 = 10;

/// Steps under timers after the timed ones.
const DEVICE_STEPS: u64 = 5;

/// What one process measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Measured {
    facts: Facts,
    preset: String,
    batch: usize,
    seq: usize,
    /// Muon's iterations; absent where AdamW moves everything.
    ns: Option<usize>,
    retract_every: u64,
    /// Format of the spectral factors.
    format: String,
    /// How the JEPA objective is trained; absent where there is none.
    jepa: Option<String>,
    graph: bool,
    step_to: u64,
    /// The first step, which compiles what no cache has.
    first_ms: f64,
    /// Median and interquartile range over blocks of steps.
    ms_median: f64,
    ms_iqr: f64,
    launches: Option<f64>,
    nodes: Option<f64>,
    /// Bytes that the kernels of a step have to read and write.
    bytes: Option<f64>,
    /// Allocations in all timed steps together.
    allocations: Option<u64>,
    /// What the account of asked and used passes has found wrong.
    problems: Option<Vec<String>>,
    captures: Option<u64>,
    syncs: Option<f64>,
    eager_us: Option<f64>,
    graph_us: Option<f64>,
    device_ms: Option<f64>,
    /// What a step under timers did, by stage and operation.
    stages: Stages,
    mem_peak_mib: Option<f64>,
    /// The sentence on what a step waits for.
    bound: Option<String>,
}

/// Parts of a step by stage and operation.
type Stages = BTreeMap<String, BTreeMap<String, Share>>;

/// A part of a step: launches, and milliseconds on the device.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Share {
    launches: f64,
    device_ms: f64,
}

/// `dormouse bench`.
///
/// # Errors
/// Too few steps or processes; another process on the GPU; whatever a step says.
pub fn command(arguments: &BenchArgs, build: Build) -> Result<()> {
    if arguments.steps < COLD_STEPS + 20 {
        let problem = format!("bench: --steps is {}; give {} or more", arguments.steps, COLD_STEPS + 20);
        bail!(ConfigError::Usage(format!("{problem}, since the first {COLD_STEPS} are not timed")));
    }
    let most = u64::from(u32::MAX) - DEVICE_STEPS;
    if arguments.steps > most {
        bail!(ConfigError::Usage(format!("bench: --steps is {}; give {most} or less", arguments.steps)));
    }
    if arguments.processes == 0 {
        bail!(ConfigError::Usage("bench: --processes is 0; give 1 or more".into()));
    }
    if arguments.one || arguments.targets.is_some() {
        let mut config = resolve(&arguments.sources())?;
        settle(&mut config.run)?;
        if let Some(path) = &arguments.targets {
            return write_for_bench(&config, arguments.steps + DEVICE_STEPS, path, build);
        }
        let measured = measure(&config, arguments.steps, build)?;
        say(&serde_json::to_string(&measured).context("bench: cannot write JSON")?);
        return Ok(());
    }
    if let Some(path) = &arguments.map {
        // Found out now and not after half an hour of processes.
        try_write(path).with_context(|| map::cannot_write(path))?;
        return map::write(path, arguments.steps + DEVICE_STEPS, resolve(&arguments.sources())?.jepa.has_teacher());
    }
    if arguments.processes < 2 && arguments.append.is_some() {
        let problem = "bench: one process has no run-to-run spread; give --processes 2 or more with --append";
        bail!(ConfigError::Usage(problem.into()));
    }
    if let Some(path) = &arguments.append {
        // What would refuse the row is found before minutes are spent on it.
        let provenance = host::provenance(&[], 0);
        let told = history::check_commit(provenance["commit"].as_str().unwrap_or(NONE));
        told.map_err(|error| ConfigError::Usage(format!("bench: {error}; give all of them in DORMOUSE_COMMIT")))?;
        history::check_file(path)?;
    }
    let mut all = Vec::new();
    for _ in 0..arguments.processes {
        alone()?;
        let measured = one_process(&[], None)?;
        say(&format!(
            "{}: median {:.3} ms a step, interquartile range {:.3} ms, steps {} to {} by {BLOCK_STEPS}",
            measured.facts.line(),
            measured.ms_median,
            measured.ms_iqr,
            COLD_STEPS + 1,
            measured.step_to
        ));
        if let Some(bound) = &measured.bound {
            say(bound);
        }
        all.push(measured);
    }
    let row = row(&all, &arguments.note)?;
    say(history::line(&row).trim_end());
    match &arguments.append {
        Some(path) => history::append(path, &row),
        None => Ok(()),
    }
}

/// Refuses to measure while another process computes on the GPU. Where nobody can be asked, nothing is known.
fn alone() -> Result<()> {
    let asked = Command::new("nvidia-smi").args(["--query-compute-apps=pid", "--format=csv,noheader"]).output();
    let Some(answer) = asked.ok().filter(|answer| answer.status.success()) else { return Ok(()) };
    let text = String::from_utf8_lossy(&answer.stdout);
    let others: Vec<&str> = text.lines().map(str::trim).filter(|line| line.parse::<u32>().is_ok()).collect();
    ensure!(others.is_empty(), "bench: process {} holds the GPU; a time beside it says nothing", others.join(", "));
    Ok(())
}

/// Measures in a process of its own, with the words of this one and some more; with a folder, that is its cache of
/// compiled kernels.
fn one_process(more: &[&str], cache: Option<&Path>) -> Result<Measured> {
    let text = process(&[more, &["--one"]].concat(), cache)?;
    let last = text.lines().last().unwrap_or_default();
    serde_json::from_str(last).with_context(|| format!("bench: a process printed `{last}`"))
}

/// Runs this program again with the same words and some more; what it printed.
fn process(more: &[&str], cache: Option<&Path>) -> Result<String> {
    let program = std::env::current_exe().context("bench: this program cannot find itself")?;
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1)).args(more).stdout(Stdio::piped());
    // The driver and its compiler keep a cache of their own.
    let driver = cache.map(|folder| ("CUDA_CACHE_PATH", folder.join("driver")));
    command.envs(cache.map(|folder| ("DORMOUSE_CACHE", folder.to_owned())).into_iter().chain(driver));
    let child = command.output().context("bench: cannot start a process")?;
    let errors = String::from_utf8_lossy(&child.stderr);
    ensure!(child.status.success(), "bench: a process ended with {}: {}", child.status, errors.trim());
    Ok(String::from_utf8_lossy(&child.stdout).into_owned())
}

fn measure(config: &Config, steps: u64, build: Build) -> Result<Measured> {
    check_batch(config, host::machine_memory_bytes())?;
    let data = Data::open(config)?;
    let mut learner = build(config)?;
    let price = learner.witness().map(Witness::launch_price).transpose()?.flatten();
    let mut batches = data.prefetch(config, 0..steps + DEVICE_STEPS)?;
    let (mut times, mut first_ms) = (Vec::new(), 0.0);
    let mut from = Counts::default();
    let mut block = Instant::now();
    for step in 0..steps {
        if step == COLD_STEPS {
            drain(&mut *learner, step)?;
            from = Counts::of(&*learner);
            block = Instant::now();
        }
        one_step(&mut *learner, config, &mut batches)?;
        if step == 0 {
            first_ms = 1e3 * block.elapsed().as_secs_f64();
        }
        if step >= COLD_STEPS && (step + 1).is_multiple_of(BLOCK_STEPS) {
            drain(&mut *learner, step + 1)?;
            times.push(1e3 * block.elapsed().as_secs_f64() / BLOCK_STEPS as f64);
            block = Instant::now();
        }
    }
    let to = Counts::of(&*learner);
    let timed = (steps - COLD_STEPS) as f64;
    let before = learner.witness().map(sites);
    let device_ms = learner.witness().is_some().then(|| device_ms(&mut *learner, config, &mut batches)).transpose()?;
    let stages = before.zip(learner.witness().map(sites)).map_or(BTreeMap::new(), |(from, to)| stages(&from, &to));
    let counted = learner.witness().is_some();
    let each = |to: u64, from: u64| counted.then(|| (to - from) as f64 / timed);
    times.sort_by(f64::total_cmp);
    let quantile = |q: f64| times[((times.len() - 1) as f64 * q).round() as usize];
    let (launches, nodes) = (each(to.launches, from.launches), each(to.nodes, from.nodes));
    let cost =
        StepCost { step_ms: quantile(0.5), device_ms, launches: launches.unwrap_or(0.0), nodes: nodes.unwrap_or(0.0) };
    let device_bytes = learner.witness().map(|witness| witness.activity().allocated).filter(|bytes| *bytes > 0);
    Ok(Measured {
        facts: learner.facts(),
        preset: config.preset.clone(),
        batch: config.train.batch_rows,
        seq: config.data.seq_bytes,
        ns: (config.optimizer.rule == Rule::Muon).then_some(config.optimizer.muon_iterations),
        retract_every: config.optimizer.retract_every_steps,
        format: config.model.format.word().to_owned(),
        jepa: config.jepa.on().then(|| {
            let source = if config.jepa.has_teacher() { "" } else { " from targets" };
            format!("{}{source}", config.jepa.mode.word())
        }),
        graph: learner.witness().is_some_and(|witness| witness.captures() > 0),
        step_to: steps - (steps - COLD_STEPS) % BLOCK_STEPS,
        first_ms,
        ms_median: quantile(0.5),
        ms_iqr: quantile(0.75) - quantile(0.25),
        launches,
        nodes,
        bytes: each(to.bytes, from.bytes),
        allocations: counted.then(|| to.allocations - from.allocations),
        problems: learner.engagement().map(|account| account.problems()),
        captures: learner.witness().map(Witness::captures),
        syncs: each(to.syncs, from.syncs),
        eager_us: price.map(|price| price.eager_us),
        graph_us: price.and_then(|price| price.graph_us),
        device_ms,
        stages,
        mem_peak_mib: device_bytes.or_else(host::peak_memory_bytes).map(|bytes| bytes as f64 / f64::from(1 << 20)),
        bound: price.map(|price| cost.line(&price)),
    })
}

/// One step as a run takes it, from the wait for its batch to the launch, and to the records where they are read.
fn one_step(learner: &mut dyn Learner, config: &Config, batches: &mut Prefetch) -> Result<()> {
    let batch = batches.next_batch()?;
    let step = batch.step;
    learner.step(&batch, config.schedule().lr_at(step, config.train.total_steps.max(step + 1)))?;
    if (step + 1).is_multiple_of(config.log.every_steps) {
        drain(learner, step + 1)?;
    }
    Ok(())
}

/// Waits for the steps before `end`, none of which may have been skipped.
fn drain(learner: &mut dyn Learner, end: u64) -> Result<()> {
    let records = learner.drain()?;
    ensure!(records.iter().all(|record| record.applied), "bench: a step before {end} was skipped");
    Ok(())
}

/// Milliseconds of a step in which the device works.
fn device_ms(learner: &mut dyn Learner, config: &Config, batches: &mut Prefetch) -> Result<f64> {
    let timers = |learner: &dyn Learner, on: bool| {
        learner.witness().map_or(0, |witness| {
            witness.set_timers(on);
            training(witness).device_ns
        })
    };
    let before = timers(learner, true);
    for _ in 0..DEVICE_STEPS {
        one_step(learner, config, batches)?;
    }
    let after = timers(learner, false);
    Ok((after - before) as f64 / 1e6 / DEVICE_STEPS as f64)
}

/// What a step under timers did between two counts. A graph is timed as a whole, so only a step without one has the times of
/// its parts.
fn stages(from: &Sites, to: &Sites) -> Stages {
    let mut stages = Stages::new();
    for (key @ (stage, kernel), now) in to {
        let before = from.get(key).copied().unwrap_or_default();
        let launches = (now.launches + now.nodes - before.launches - before.nodes) as f64;
        if launches > 0.0 {
            let share = stages.entry((*stage).to_owned()).or_default().entry(operation(kernel).to_owned()).or_default();
            share.launches += launches / DEVICE_STEPS as f64;
            share.device_ms += (now.device_ns - before.device_ns) as f64 / 1e6 / DEVICE_STEPS as f64;
        }
    }
    stages
}

/// Counts so far.
#[derive(Clone, Copy, Default)]
struct Counts {
    launches: u64,
    nodes: u64,
    /// Waits of the host inside and between steps.
    syncs: u64,
    bytes: u64,
    allocations: u64,
}

impl Counts {
    fn of(learner: &dyn Learner) -> Self {
        learner.witness().map_or(Self::default(), |witness| {
            let steps = training(witness);
            let syncs = sites(witness).values().map(|site| site.syncs).sum();
            let ledgers = witness.ledgers();
            let bytes =
                ledgers.iter().filter(|(purpose, _)| purpose.starts_with("train")).map(|(_, l)| l.bytes()).sum();
            let allocations = witness.activity().allocations;
            Self { launches: steps.launches, nodes: steps.nodes, syncs, bytes, allocations }
        })
    }
}

/// The arms of a row: one word if all operations agree, else each with its own.
fn arms(facts: &Facts) -> String {
    let mut words: Vec<&String> = facts.arms.values().collect();
    words.dedup();
    match words[..] {
        [] => NONE.to_owned(),
        [word] => word.clone(),
        _ => facts.arms.iter().map(|(stem, arm)| format!("{stem}={arm}")).collect::<Vec<_>>().join(","),
    }
}

fn row(all: &[Measured], note: &str) -> Result<Row> {
    let first = all.first().context("bench: no process measured anything")?;
    let medians = all.iter().map(|measured| measured.ms_median);
    let (lowest, highest) = medians.clone().fold((f64::INFINITY, 0.0), |(l, h), ms| (ms.min(l), ms.max(h)));
    let ms = medians.sum::<f64>() / all.len() as f64;
    let provenance = host::provenance(&[], 0);
    let text = |value: &serde_json::Value| match value {
        serde_json::Value::String(text) => text.clone(),
        serde_json::Value::Bool(flag) => flag.to_string(),
        _ => NONE.to_owned(),
    };
    let number = |value: Option<f64>, digits: usize| value.map_or(NONE.to_owned(), |value| format!("{value:.digits$}"));
    let (device, driver) = match first.facts.device.split_once(", driver ") {
        Some((device, driver)) => (device.to_owned(), driver.to_owned()),
        None => (first.facts.device.clone(), NONE.to_owned()),
    };
    let bound = StepCost { step_ms: ms, device_ms: first.device_ms, launches: 0.0, nodes: 0.0 };
    let mark = if first.facts.unverified { "unverified; " } else { "" };
    let price = if first.graph { first.graph_us.or(first.eager_us) } else { first.eager_us };
    Ok(Row::from([
        ("date", host::now_rfc3339()),
        ("run", format!("bench-{}", host::now_compact())),
        ("commit", text(&provenance["commit"])),
        ("dirty", text(&provenance["dirty"])),
        ("device", device),
        ("driver", driver),
        ("preset", first.preset.clone()),
        ("batch", first.batch.to_string()),
        ("seq", first.seq.to_string()),
        ("precision", first.facts.precision.clone()),
        ("formats", first.format.clone()),
        ("arms", arms(&first.facts)),
        ("jepa", first.jepa.clone().unwrap_or(NONE.to_owned())),
        ("ns", first.ns.map_or(NONE.to_owned(), |ns| ns.to_string())),
        ("retract_every", first.retract_every.to_string()),
        ("graph", first.graph.to_string()),
        ("processes", all.len().to_string()),
        ("step_from", (COLD_STEPS + 1).to_string()),
        ("step_to", first.step_to.to_string()),
        ("ms_step_median", number(Some(ms), 4)),
        ("ms_step_iqr", number(Some(all.iter().map(|m| m.ms_iqr).fold(0.0, f64::max)), 4)),
        ("ms_run_spread", number(Some(highest - lowest), 4)),
        ("launches", number(first.launches, 1)),
        ("nodes", number(first.nodes, 1)),
        ("captures", first.captures.map_or(NONE.to_owned(), |captures| captures.to_string())),
        ("syncs", number(first.syncs, 1)),
        ("launch_price_us", number(price, 3)),
        ("busy", number(bound.busy(), 3)),
        ("tokens_s", number(Some((first.batch * first.seq) as f64 * 1e3 / ms), 0)),
        ("mem_peak_mib", number(first.mem_peak_mib, 1)),
        ("bpb", NONE.to_owned()),
        ("source", "measured".to_owned()),
        ("note", format!("{mark}{note}")),
    ]))
}

#[cfg(test)]
mod tests {
    use anyhow::Result;
    use dormouse_reference::Reference;

    use super::{Facts, Measured, Witness, measure, row};
    use crate::config::{Backend, Config, preset};
    use crate::history::{COLD_STEPS, COLUMNS};
    use crate::history::{line, parse};
    use crate::learner::ModelLearner;
    use crate::train::Learner;

    pub(super) fn measured() -> Measured {
        let mut config = preset("tiny").unwrap();
        config.run.backend = Backend::Cpu;
        (config.train.batch_rows, config.data.seq_bytes) = (1, 8);
        // Not `backend::build`: with it every kernel's launch would be compiled into these tests.
        let build = |config: &Config| -> Result<Box<dyn Learner>> {
            let b = Reference::<f32>::new();
            let facts = Facts::new(&config.run, b.describe(), &[]);
            Ok(Box::new(ModelLearner::new(b, config)?.with_facts(facts)))
        };
        measure(&config, COLD_STEPS + 20, build).unwrap()
    }

    #[test]
    fn two_processes_make_a_good_row() {
        let one = measured();
        assert!(one.ms_median > 0.0 && one.launches.is_none());
        let mut other = one.clone();
        other.ms_median *= 2.0;
        let row = row(&[one.clone(), other], "a note").unwrap();
        let text = COLUMNS.join("\t") + "\n" + &line(&row);
        let read = parse(&text).unwrap();
        assert_eq!(read[0]["step_from"], "51");
        let spread: f64 = read[0]["ms_run_spread"].parse().unwrap();
        assert!((spread - one.ms_median).abs() < 1e-3, "{spread}");
        assert_eq!(read[0]["precision"], "f32");
    }
}
