//! The steps of one process.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::{Value, json};

use super::prepare::{Prepared, quoted, resume_command};
use super::report::{EvalFacts, StepFacts, drift_line, eval_line, step_line};
use super::watch::Watcher;
use super::{Latch, Learner, Score, StepRecord, score};
use crate::anchors::{Anchors, FIT_LIMIT_BYTES};
use crate::checkpoint::{self, Facts};
use crate::config::Config;
use crate::data::{Data, Segment};
use crate::exit::{Exit, NonFiniteResult, NonFiniteStop};
use crate::host;
use crate::instruments::bound::StepCost;
use crate::instruments::{Engagement, Witness};
use crate::progress::{Reporter, StepLine, gib, printable};
use crate::run::{JsonLines, Keep, RunFolder};
use crate::schedule::Schedule;
use crate::signals::Stop;

/// A factor further from orthonormal than this is worth a warning: ten times what the retraction keeps.
const DRIFT_WARNING: f64 = 1e-3;

/// Temperatures that every prompt is continued at: 0, and that of the configuration.
const TEMPERATURES: usize = 2;

/// Bytes of the default sample prompt.
const PROMPT_BYTES: usize = 48;

/// Where one process ends a run before its last step.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// Stop when this many steps are done.
    pub stop_at_step: Option<u64>,
    /// Stop after this time.
    pub max_time: Option<Duration>,
}

/// How a process ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Ending {
    /// The last step is done, scored and saved.
    Finished {
        /// The held-out score.
        score: Score,
        /// What it is compared with.
        anchors: Anchors,
        /// What a warm step of this process did and took, where the backend counts it.
        cost: Option<StepCost>,
    },
    /// Stopped early and saved.
    Stopped {
        /// Steps done.
        done: u64,
    },
}

/// Runs a prepared run to its end, a limit or a stop.
///
/// # Errors
/// [`NonFiniteStop`] if the learner latched; a data error, before which the steps that are done are saved; a checkpoint
/// error of the last save. An error of a periodic save is a
/// warning, and the save is tried again at the next checkpoint.
pub fn run(prepared: Prepared, limits: Limits, stop: &Stop, program: &str) -> anyhow::Result<Ending> {
    let Prepared { run, config, data, learner, done, provenance, reporter, watch } = prepared;
    let eval_windows = data.eval_windows()?;
    let mut watcher = Watcher::start(&watch, &*learner, &config)?;
    if let Some(line) = watcher.price_line() {
        reporter.note(&line);
    }
    if let Some(problem) = watcher.take_problem() {
        reporter.warn(&problem);
    }
    let unscored = unscored(&run, &config, done)?;
    let keep = Keep { done, score_again: unscored || done == config.train.total_steps };
    let mut session = Session {
        watcher,
        metrics: lines(&run, "metrics.jsonl", keep, &reporter)?,
        samples: lines(&run, "samples.jsonl", keep, &reporter)?,
        schedule: config.schedule(),
        done,
        saved: if done > 0 { Some(done) } else { None },
        last_score: None,
        anchors: None,
        window: Window::default(),
        run,
        config,
        data,
        learner,
        provenance,
        reporter,
        eval_windows,
        program: program.to_owned(),
    };
    let ending = match unscored && done < session.config.train.total_steps && !stop.requested() {
        true => session.evaluate(done, stop),
        false => Ok(()),
    };
    let ending = ending.and_then(|()| session.steps(done, limits, stop));
    let ending = ending.map_err(|error| session.saved_before(error));
    session.reporter.finish();
    ending
}

/// Whether the step that a resumed run goes on from is to be scored and is not, or not wholly: a stop has come in between.
fn unscored(run: &RunFolder, config: &Config, done: u64) -> anyhow::Result<bool> {
    if done == 0 || !(done.is_multiple_of(config.log.eval_every_steps) || done == config.train.total_steps) {
        return Ok(false);
    }
    let of_step = |line: &Value| line["step"].as_u64() == Some(done);
    let path = |name: &str| run.path().join(name);
    let scores = JsonLines::count(&path("metrics.jsonl"), |line| of_step(line) && line["kind"] == "eval")?;
    let samples = JsonLines::count(&path("samples.jsonl"), of_step)?;
    let prompts = config.log.prompts.len().max(1);
    let expected = if config.log.sample_bytes == 0 { 0 } else { TEMPERATURES * prompts };
    Ok(scores != 1 || samples != expected)
}

/// Opens a file of lines, and says if one of them is damaged.
fn lines(run: &RunFolder, name: &str, keep: Keep, reporter: &Reporter) -> anyhow::Result<JsonLines> {
    let lines = JsonLines::open(&run.path().join(name), keep)?;
    if let Some(damage) = &lines.damage {
        reporter.warn(damage);
    }
    Ok(lines)
}

struct Session {
    run: RunFolder,
    config: Config,
    data: Data,
    learner: Box<dyn Learner>,
    provenance: Value,
    reporter: Reporter,
    metrics: JsonLines,
    samples: JsonLines,
    schedule: Schedule,
    eval_windows: Vec<Vec<u8>>,
    /// Steps done.
    done: u64,
    /// Step of the newest checkpoint of this run.
    saved: Option<u64>,
    /// The last score, with its step.
    last_score: Option<(u64, Score)>,
    anchors: Option<Anchors>,
    window: Window,
    watcher: Watcher,
    program: String,
}

/// Steps and their time since the last drain; evaluations and saves are not in it.
#[derive(Default)]
struct Window {
    steps: u32,
    time: Duration,
    /// Mean of the last window that had a step.
    mean: Duration,
}

impl Session {
    fn steps(&mut self, start: u64, limits: Limits, stop: &Stop) -> anyhow::Result<Ending> {
        let total = self.config.train.total_steps;
        let began = Instant::now();
        let mut batches = self.data.prefetch(&self.config, start..total)?;
        let mut done = start;
        while done < total {
            let limit = limits.stop_at_step.is_some_and(|limit| done >= limit)
                || limits.max_time.is_some_and(|limit| began.elapsed() >= limit);
            if limit || stop.requested() {
                return self.stopped(done);
            }
            let index = done - start;
            let timed = self.watcher.before(&*self.learner, index);
            if timed {
                self.caught_up(|learner| Ok(learner.witness().map_or(Ok(()), Witness::wait)?))?;
            }
            let step_began = Instant::now();
            let batch = batches.next_batch()?;
            self.learner.step(&batch, self.schedule.lr_at(done, total))?;
            let took = step_began.elapsed();
            if !timed {
                self.window.steps += 1;
                self.window.time += took;
            }
            done += 1;
            self.done = done;

            let due = |every: u64| done.is_multiple_of(every);
            // The first step of a process has its line at once: the reader sees that it works.
            // What is saved is in the log first, or a resumed run would never write it.
            let reported = due(self.config.log.every_steps) || due(self.config.checkpoint.every_steps);
            if reported || due(self.config.log.eval_every_steps) || done == start + 1 || done == total {
                self.log(done)?;
            }
            self.watcher.after(&*self.learner, index, done, timed, took)?;
            if let Some(problem) = self.watcher.take_problem() {
                self.reporter.warn(&problem);
            }
            if due(self.config.log.drift_every_steps) {
                self.check_drift(done)?;
            }
            if (due(self.config.log.eval_every_steps) || done == total) && !stop.requested() {
                self.evaluate(done, stop)?;
            }
            if due(self.config.checkpoint.every_steps) && done < total {
                self.save_or_warn(done);
            }
            self.watcher.outside(&*self.learner);
        }
        self.finish(done, stop)
    }

    /// Lets the device catch up. The host is ahead of it, so the wait is part of the steps so far.
    fn caught_up<T>(&mut self, wait: impl FnOnce(&mut dyn Learner) -> anyhow::Result<T>) -> anyhow::Result<T> {
        let began = Instant::now();
        let result = wait(&mut *self.learner)?;
        let waited = began.elapsed();
        if self.window.steps > 0 {
            self.window.time += waited;
        }
        self.watcher.waited(waited);
        Ok(result)
    }

    /// Reads the learner's records, writes their lines and looks at the latch.
    fn log(&mut self, done: u64) -> anyhow::Result<()> {
        let records = self.caught_up(|learner| learner.drain())?;
        if self.window.steps > 0 {
            self.window.mean = self.window.time / self.window.steps;
        }
        (self.window.steps, self.window.time) = (0, Duration::ZERO);
        let total = self.config.train.total_steps;
        for record in &records {
            let facts = StepFacts {
                lr: self.schedule.lr_at(record.step, total),
                step_ms: 1e3 * self.window.mean.as_secs_f64(),
                bytes_per_step: self.config.bytes_per_step(),
            };
            self.metric(&step_line(record, &facts));
        }
        let skipped = records.iter().filter(|record| !record.applied).count();
        if skipped > 0 {
            self.reporter.warn(&format!(
                "{skipped} of the last {} steps had a loss or gradient that is not finite and changed nothing",
                records.len()
            ));
        }
        if let Some(last) = records.last() {
            self.print_step(done, last);
        }
        match self.learner.latched() {
            Some(latch) => Err(self.non_finite_stop(latch).into()),
            None => Ok(()),
        }
    }

    fn print_step(&self, done: u64, record: &StepRecord) {
        let line = StepLine {
            done,
            total: self.config.train.total_steps,
            loss: record.loss,
            readout_ce: record.ce.last().copied().unwrap_or(record.loss),
            aux: record.aux,
            grad_norm: record.grad_norm,
            lr: self.schedule.lr_at(record.step, self.config.train.total_steps),
            step_time: self.window.mean,
            bytes_per_step: self.config.bytes_per_step(),
            held_out_bpb: self.last_score.map(|(_, score)| score.bpb),
            memory: host::memory_bytes().zip(host::machine_memory_bytes()),
        };
        self.reporter.step(done, &line.render());
    }

    fn metric(&mut self, line: &Value) {
        if let Some(warning) = self.metrics.push(line) {
            self.reporter.warn(&warning);
        }
    }

    fn check_drift(&mut self, done: u64) -> anyhow::Result<()> {
        let factors = self.learner.drift()?;
        self.metric(&drift_line(done, &factors));
        let Some(worst) = factors.iter().max_by(|a, b| a.orthonormality.total_cmp(&b.orthonormality)) else {
            return Ok(());
        };
        let spread = factors.iter().map(|drift| drift.spread).fold(1.0, f64::max);
        let line = format!(
            "step {done} | {} spectral factors, worst |X'X - I|/k {:.1e} ({}), largest spread {spread:.2}",
            factors.len(),
            worst.orthonormality,
            worst.name
        );
        // Written so that a NaN warns as well.
        if worst.orthonormality <= DRIFT_WARNING {
            self.reporter.note(&line);
        } else {
            self.reporter.warn(&format!("{line}; raise optimizer.retract_iterations"));
        }
        Ok(())
    }

    /// Scores, samples and reports; a stop in between leaves what is not done undone.
    fn evaluate(&mut self, done: u64, stop: &Stop) -> anyhow::Result<()> {
        let Some(score) = score(&mut *self.learner, &self.eval_windows, stop)? else {
            return Ok(());
        };
        self.last_score = Some((done, score));
        let engagement = self.learner.engagement();
        let facts = EvalFacts {
            bytes_per_step: self.config.bytes_per_step(),
            engagement: engagement.as_ref().map(Engagement::json),
            unverified: self.learner.facts().unverified,
        };
        self.metric(&eval_line(done, &score, &facts));
        if let Some(engagement) = engagement {
            let problems = engagement.problems();
            if !problems.is_empty() {
                bail!("train: what ran until step {done} is not what was asked for:\n  {}", problems.join("\n  "));
            }
            self.reporter.note(&format!("step {done} | engagement: {}", engagement.line()));
        }
        let passed = match self.anchors()?.passed(score.bpb) {
            Some(order) => format!("below the n-gram of order {order}"),
            None => "above every n-gram".into(),
        };
        let Score { bpb, standard_error, windows } = score;
        self.reporter.note(&format!(
            "step {done} | held-out bpb {bpb:.4} +- {standard_error:.4} on {windows} windows, {passed}"
        ));
        self.sample(done, stop)
    }

    /// The anchors of this run's windows, from its folder if they were measured before.
    fn anchors(&mut self) -> anyhow::Result<&Anchors> {
        if self.anchors.is_none() {
            let path = self.run.path().join("anchors.json");
            let stored: Option<(String, Anchors)> =
                std::fs::read_to_string(&path).ok().and_then(|text| serde_json::from_str(&text).ok());
            let anchors = match stored {
                Some((hash, anchors)) if hash == self.anchors_key() => anchors,
                _ => {
                    let measured = Anchors::measure(&self.data.train_bytes(FIT_LIMIT_BYTES)?, &self.eval_windows);
                    // The file says which data they are of, and later runs of this folder believe it.
                    self.data.check_unchanged()?;
                    let all: u64 = self.data.train.segments().iter().map(Segment::len).sum();
                    if measured.fitted_bytes < all {
                        let fitted = measured.fitted_bytes;
                        self.reporter
                            .note(&format!("n-grams are fitted on the first {fitted} of {all} training bytes"));
                    }
                    let text = json!([self.anchors_key(), measured]).to_string();
                    // The file only saves time; a full disk must not end the run here.
                    if let Err(error) = self.run.write("anchors.json", &text) {
                        self.reporter.warn(&format!("{error:#}"));
                    }
                    measured
                }
            };
            self.anchors = Some(anchors);
        }
        Ok(self.anchors.as_ref().expect("set above"))
    }

    /// What the anchors depend on.
    fn anchors_key(&self) -> String {
        let data = &self.config.data;
        format!("{}/{}/{}", self.data.manifest.hash(), data.eval_windows, data.eval_bytes)
    }

    fn sample(&mut self, done: u64, stop: &Stop) -> anyhow::Result<()> {
        let bytes = self.config.log.sample_bytes;
        if bytes == 0 {
            return Ok(());
        }
        let prompts: Vec<Vec<u8>> = if self.config.log.prompts.is_empty() {
            let first = &self.eval_windows[0];
            vec![first[..PROMPT_BYTES.min(first.len())].to_vec()]
        } else {
            self.config.log.prompts.iter().map(|prompt| prompt.clone().into_bytes()).collect()
        };
        let temperatures: [f64; TEMPERATURES] = [0.0, self.config.log.sample_temperature];
        for (index, prompt) in prompts.iter().enumerate() {
            for temperature in temperatures {
                let mut drawn = Vec::new();
                let mut emit = |byte: Option<u8>| {
                    drawn.extend(byte);
                    !stop.requested()
                };
                self.learner.sample(prompt, bytes, temperature, self.config.seed, &mut emit)?;
                if stop.requested() {
                    return Ok(());
                }
                let line = json!({
                    "step": done,
                    // JSON escapes what has to be; what is no UTF-8 becomes U+FFFD.
                    "prompt": String::from_utf8_lossy(prompt),
                    "temperature": temperature,
                    "seed": self.config.seed,
                    "text": String::from_utf8_lossy(&drawn),
                });
                if let Some(warning) = self.samples.push(&line) {
                    self.reporter.warn(&warning);
                }
                if index == 0 && temperature > 0.0 {
                    self.reporter.note(&format!("step {done} | sample {} >> {}", printable(prompt), printable(&drawn)));
                }
            }
        }
        Ok(())
    }

    fn facts(&self, done: u64) -> Facts {
        Facts {
            next_step: done,
            rows_consumed: done * self.config.train.batch_rows as u64,
            eval_bpb: self.last_score.filter(|(step, _)| *step == done).map(|(_, score)| score.bpb),
            config_toml: self.config.to_toml(),
            config_hash: self.config.hash(),
            data_hash: self.data.manifest.hash(),
            provenance: self.provenance.clone(),
            run: Some(self.learner.facts()),
        }
    }

    fn not_finite(&self, what: String, step: u64) -> NonFiniteResult {
        NonFiniteResult {
            what: format!("train: {what}"),
            step,
            fix: format!("nothing was saved there; {}", self.lower_rates()),
        }
    }

    /// What helps a run whose numbers are not finite.
    fn lower_rates(&self) -> String {
        let rates = self.config.optimizer.rates();
        match self.saved {
            Some(step) => {
                format!(
                    "lower {rates} with --allow-change, or resume from step {step} with --seed N --allow-change seed"
                )
            }
            None => format!("lower {rates} and start again: there is no checkpoint to go on from"),
        }
    }

    fn save(&mut self, done: u64) -> anyhow::Result<PathBuf> {
        let state = self.learner.export()?;
        if let Some(name) = state.first_nonfinite() {
            return Err(self.not_finite(format!("`{name}`"), done).into());
        }
        if self.run.restore(&self.config, &self.data.manifest, &self.provenance)? {
            let path = self.run.path().display();
            self.reporter.warn(&format!("run: `{path}` was removed and is made again; its earlier lines are lost"));
            // The open files may be of the folder that is gone.
            let keep = Keep { done, score_again: false };
            self.metrics = lines(&self.run, "metrics.jsonl", keep, &self.reporter)?;
            self.samples = lines(&self.run, "samples.jsonl", keep, &self.reporter)?;
        }
        let facts = self.facts(done);
        let path = checkpoint::save(&self.run.checkpoints(), &state, &facts)?;
        self.saved = Some(done);
        self.run.record_facts(&facts.run)?;
        let keep = &self.config.checkpoint;
        if let Err(error) = checkpoint::retain(&self.run.checkpoints(), done, keep.keep_last, keep.keep_every_steps) {
            self.reporter.warn(&format!("old checkpoints stay: {error}"));
        }
        Ok(path)
    }

    fn save_or_warn(&mut self, done: u64) {
        match self.save(done) {
            Ok(path) => self.reporter.note(&format!("step {done} | saved {}", path.display())),
            Err(error) => self.reporter.warn(&format!(
                "step {done}: {error:#}; training goes on, the next try is at step {}",
                (done + self.config.checkpoint.every_steps).min(self.config.train.total_steps)
            )),
        }
    }

    fn stopped(&mut self, done: u64) -> anyhow::Result<Ending> {
        if self.window.steps > 0 {
            self.log(done)?;
        }
        if self.saved != Some(done) {
            self.save(done).context("train: the run stops, but its last steps could not be saved")?;
        }
        self.reporter.finish();
        self.reporter.result(&format!("stopped after step {done} of {}, saved", self.config.train.total_steps));
        self.print_commands(false);
        Ok(Ending::Stopped { done })
    }

    /// Saves before an error of the data ends the run: whatever cannot be read is read before a step begins or after it has
    /// ended, so the learner is what its steps have made it. Of any other error nobody knows that.
    fn saved_before(&mut self, error: anyhow::Error) -> anyhow::Error {
        if Exit::of(&error) != Exit::Data {
            return error;
        }
        if let Err(also) = self.stopped(self.done) {
            self.reporter.finish();
            self.reporter.warn(&format!("{also:#}"));
        }
        error
    }

    fn finish(&mut self, done: u64, stop: &Stop) -> anyhow::Result<Ending> {
        // A run resumed after its last step has not been scored by this process.
        if self.last_score.is_none_or(|(step, _)| step != done) && !stop.requested() {
            self.evaluate(done, stop)?;
        }
        let Some((step, score)) = self.last_score.filter(|(step, _)| *step == done) else {
            return self.stopped(done);
        };
        if !score.bpb.is_finite() {
            return Err(self.not_finite("the held-out score".into(), step).into());
        }
        if self.saved != Some(step) {
            self.save(done).context("train: the last checkpoint could not be saved")?;
        }
        let anchors = self.anchors()?.clone();
        self.reporter.finish();
        self.reporter.result(&format!(
            "final held-out bpb model={:.4} {} windows={}",
            score.bpb,
            anchors.line(),
            score.windows
        ));
        if let Some(peak) = host::peak_memory_bytes() {
            self.reporter.result(&format!("peak memory {:.2} GiB", gib(peak)));
        }
        self.print_commands(true);
        let cost = self.watcher.cost(&*self.learner).map(|(cost, _)| cost);
        Ok(Ending::Finished { score, anchors, cost })
    }

    fn print_commands(&self, finished: bool) {
        if let Some((cost, price)) = self.watcher.cost(&*self.learner) {
            self.reporter.result(&cost.line(&price));
        }
        let run = self.run.path();
        let mut resume = resume_command(&self.program, run);
        if finished {
            let more = 2 * self.config.train.total_steps;
            resume.push_str(&format!(" --steps {more} --allow-change train.total_steps"));
        }
        self.reporter.result(&format!("run folder {}", run.display()));
        self.reporter.result(&format!("resume    {resume}"));
        let generate = format!("{} generate {}", self.program, quoted(&run.display().to_string()));
        self.reporter.result(&format!("generate  {generate} --prompt 'And '"));
    }

    /// The error of a run that stopped being finite; its bundle is written if that is possible.
    fn non_finite_stop(&mut self, latch: Latch) -> NonFiniteStop {
        let bundle = match self.bundle(latch) {
            Ok(folder) => format!("the bundle is in {}; see what it says", folder.display()),
            Err(error) => format!("the bundle could not be written: {error:#}"),
        };
        let fix = format!("{bundle}; {}", self.lower_rates());
        NonFiniteStop { skipped: latch.skipped, step: latch.step + 1, fix }
    }

    /// Writes what is needed to look into such a run; its folder.
    fn bundle(&mut self, Latch { skipped, step }: Latch) -> anyhow::Result<PathBuf> {
        let folder = self.run.path().join(format!("nonfinite_{:06}", step + 1));
        let batch = self.data.training_batch(&self.config.train, step)?;
        let first = self.learner.first_nonfinite(&batch)?;
        let first = first.unwrap_or_else(|| "none: the batch is finite on the present weights".into());
        let facts = self.facts(step);
        let about = json!({
            "step": step + 1,
            "skipped_in_window": skipped,
            "batch": {"file": "batch.bin", "rows": batch.rows, "bytes_a_row": batch.len + 1, "index": step},
            "lr": self.schedule.lr_at(step, self.config.train.total_steps),
            "first_nonfinite": first,
        });
        checkpoint::write_bundle(
            &folder,
            &self.learner.export()?,
            &facts,
            batch.bytes,
            about.to_string().into_bytes(),
        )?;
        self.reporter.finish();
        self.reporter.warn(&format!("first tensor that is not finite: {first}"));
        self.reporter.result(&format!("replay    {} replay {}", self.program, quoted(&folder.display().to_string())));
        Ok(folder)
    }
}
