//! Tests of `train`.

use std::cell::RefCell;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use serde_json::Value;

use super::toy::{POISONED_SEED, build};
use super::{Ending, Learner, Limits, Prepared, Request, Resume, Watch, prepare, run, score};
use crate::checkpoint::{State, newest_good, verify};
use crate::config::{Sources, preset};
use crate::data::{Corpus, Data, DataError};
use crate::exit::Exit;
use crate::jepa_targets::TargetsError;
use crate::progress::Reporter;
use crate::signals::Stop;

/// The settings of these runs: everything happens within 20 steps.
const SETTINGS: [&str; 12] = [
    "train.total_steps=20",
    "data.seq_bytes=32",
    "data.eval_windows=8",
    "data.eval_bytes=64",
    "log.every_steps=5",
    "log.eval_every_steps=8",
    "log.drift_every_steps=10",
    "log.sample_bytes=16",
    "checkpoint.every_steps=4",
    "checkpoint.keep_last=2",
    "optimizer.warmup_min_steps=2",
    "optimizer.lr=2e-3",
];

struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new() -> Place {
        let folder = tempfile::tempdir().unwrap();
        // A tenth of the shipped text: the n-gram anchors of every run are then fitted in no time.
        std::fs::write(folder.path().join("text"), Corpus::shipped().read(0, 90_000).unwrap()).unwrap();
        Place { folder }
    }

    fn text(&self) -> PathBuf {
        self.folder.path().join("text")
    }

    fn runs(&self) -> PathBuf {
        self.folder.path().join("runs")
    }

    fn run(&self, name: &str) -> PathBuf {
        self.runs().join(name)
    }

    fn request(&self, name: &str, set: &[&str]) -> Request {
        let path = format!("data.path={}", self.text().display());
        let set = [path.as_str()].iter().chain(&SETTINGS).chain(set).map(|argument| (*argument).to_owned()).collect();
        Request {
            sources: Sources { preset: Some("tiny".into()), set, ..Sources::default() },
            runs: self.runs(),
            name: Some(name.into()),
            resume: None,
            allow_change: Vec::new(),
            command: vec!["dormouse".into(), "train".into()],
            quiet: true,
            watch: Watch::default(),
        }
    }

    fn resume(&self, name: &str, set: &[&str], allow: &[&str]) -> Request {
        let set = set.iter().map(|argument| (*argument).to_owned()).collect();
        Request {
            sources: Sources { set, ..Sources::default() },
            name: None,
            resume: Some(Resume::Run(self.run(name))),
            allow_change: allow.iter().map(|key| (*key).to_owned()).collect(),
            ..self.request(name, &[])
        }
    }
}

fn go(request: &Request, stop_at_step: Option<u64>) -> anyhow::Result<Ending> {
    Ok(printed(request, stop_at_step)?.0)
}

/// What a test printed.
#[derive(Clone, Default)]
struct Sink(Rc<RefCell<Vec<u8>>>);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.borrow_mut().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn silent(mut prepared: Prepared) -> (Prepared, Sink) {
    let sink = Sink::default();
    prepared.reporter = Reporter::plain(Box::new(sink.clone()), false);
    (prepared, sink)
}

fn printed(request: &Request, stop_at_step: Option<u64>) -> anyhow::Result<(Ending, String)> {
    let (prepared, sink) = silent(prepare(request, build)?);
    let ending = run(prepared, Limits { stop_at_step, max_time: None }, &Stop::new(), "dormouse")?;
    let text = String::from_utf8(sink.0.borrow().clone())?;
    Ok((ending, text))
}

fn state_of(run: &Path) -> State {
    newest_good(&run.join("checkpoints")).unwrap().loaded.state
}

fn lines(run: &Path, file: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(run.join(file)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The lines of metrics.jsonl without what depends on the clock.
fn timeless(run: &Path) -> Vec<Value> {
    let mut all = lines(run, "metrics.jsonl");
    for line in &mut all {
        line.as_object_mut().unwrap().remove("step_ms");
    }
    all
}

fn steps_in(run: &Path) -> Vec<u64> {
    let names = std::fs::read_dir(run.join("checkpoints")).unwrap().map(|entry| entry.unwrap().file_name());
    let mut steps: Vec<u64> =
        names.map(|name| name.to_str().unwrap().trim_start_matches("step_").parse().unwrap()).collect();
    steps.sort();
    steps
}

#[test]
fn a_run_learns_and_leaves_everything_it_promised() {
    let place = Place::new();
    let (ending, text) = printed(&place.request("a", &[]), None).unwrap();
    let Ending::Finished { score, anchors, .. } = ending else { panic!("the run did not finish") };
    let run = place.run("a");
    let kn: Vec<String> = anchors.kn.iter().enumerate().map(|(i, bits)| format!("kn{}={bits:.4}", i + 1)).collect();
    let last = format!("final held-out bpb model={:.4} {} windows=8", score.bpb, kn.join(" "));
    let tail: Vec<&str> = text.lines().rev().take(5).collect();
    assert_eq!(tail[4], last);
    assert!(tail[3].starts_with("peak memory ") && tail[3].ends_with(" GiB"), "{text}");
    assert_eq!(tail[2], format!("run folder {}", run.display()));
    assert!(tail[1].contains(&format!("dormouse train --resume {}", run.display())), "{text}");
    assert!(tail[0].contains(&format!("dormouse generate {} --prompt", run.display())), "{text}");
    let progress: Vec<&str> = text.lines().filter(|line| line.contains(" | loss ")).collect();
    assert!(progress[0].starts_with("step 1/20 | loss 5.5") && progress[1].starts_with("step 4/20"), "{text}");
    let metrics = lines(&run, "metrics.jsonl");
    let of = |kind: &str| metrics.iter().filter(|line| line["kind"] == kind).collect::<Vec<_>>();
    let steps: Vec<u64> = of("step").iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, (1..=20).collect::<Vec<_>>(), "one line a step, in order");
    assert!(of("step")[19]["loss"].as_f64().unwrap() < of("step")[0]["loss"].as_f64().unwrap());
    assert_eq!(of("eval").iter().map(|line| line["step"].as_u64().unwrap()).collect::<Vec<_>>(), [8, 16, 20]);
    assert_eq!(of("drift").len(), 2);
    assert_eq!(of("eval")[2]["bpb"].as_f64().unwrap(), score.bpb);
    assert!(score.bpb < 8.0 && score.windows == 8 && anchors.windows == 8);
    assert_eq!(lines(&run, "samples.jsonl").len(), 3 * 2);
    // Newest two, and the best evaluated one, which is the last here.
    assert_eq!(steps_in(&run), [16, 20]);
    let manifest = verify(&run.join("checkpoints/step_000020")).unwrap();
    assert_eq!((manifest.next_step, manifest.updates, manifest.rows_consumed), (20, 20, 80));
    assert_eq!(manifest.eval_bpb, Some(score.bpb));
    assert_eq!(manifest.provenance["command"][1], "train");
    for file in ["config.toml", "run.json", "data.json", "anchors.json"] {
        assert!(run.join(file).is_file(), "{file}");
    }
}

#[test]
fn ten_and_ten_steps_are_twenty() {
    let place = Place::new();
    go(&place.request("whole", &[]), None).unwrap();
    for cut in [1, 7, 8, 10, 19] {
        let name = format!("cut{cut}");
        assert_eq!(go(&place.request(&name, &[]), Some(cut)).unwrap(), Ending::Stopped { done: cut });
        assert_ne!(state_of(&place.run(&name)), state_of(&place.run("whole")));
        assert!(matches!(go(&place.resume(&name, &[], &[]), None).unwrap(), Ending::Finished { .. }));
        assert_eq!(state_of(&place.run(&name)), state_of(&place.run("whole")), "cut at {cut}");
        assert_eq!(timeless(&place.run(&name)), timeless(&place.run("whole")), "cut at {cut}");
        assert_eq!(lines(&place.run(&name), "samples.jsonl"), lines(&place.run("whole"), "samples.jsonl"));
    }
}

#[test]
fn a_run_killed_after_its_checkpoint_repeats_the_lost_steps() {
    let place = Place::new();
    go(&place.request("whole", &[]), None).unwrap();
    go(&place.request("killed", &[]), Some(11)).unwrap();
    let run = place.run("killed");
    // As after a kill during the save of step 11: steps 9 to 11 are in the log, their checkpoint is not.
    std::fs::rename(run.join("checkpoints/step_000011"), run.join("checkpoints/step_000011.tmp")).unwrap();
    go(&place.resume("killed", &[], &[]), None).unwrap();
    assert_eq!(state_of(&run), state_of(&place.run("whole")));
    assert_eq!(timeless(&run), timeless(&place.run("whole")));
    // A checkpoint that is cut short is passed over the same way.
    go(&place.request("torn", &[]), Some(11)).unwrap();
    let weights = place.run("torn").join("checkpoints/step_000011/weights.safetensors");
    let bytes = std::fs::read(&weights).unwrap();
    std::fs::write(&weights, &bytes[..bytes.len() / 2]).unwrap();
    go(&place.resume("torn", &[], &[]), None).unwrap();
    assert_eq!(state_of(&place.run("torn")), state_of(&place.run("whole")));
}

#[test]
fn equal_seeds_give_equal_runs_and_other_seeds_do_not() {
    let place = Place::new();
    for (name, seed) in [("a", "seed=5"), ("b", "seed=5"), ("c", "seed=6")] {
        go(&place.request(name, &[seed]), None).unwrap();
    }
    assert_eq!(state_of(&place.run("a")), state_of(&place.run("b")));
    assert_ne!(state_of(&place.run("a")), state_of(&place.run("c")));
}

#[test]
fn what_is_reported_and_saved_changes_no_weight() {
    let place = Place::new();
    go(&place.request("a", &[]), None).unwrap();
    let other = ["log.every_steps=1", "log.eval_every_steps=3", "checkpoint.every_steps=20", "log.sample_bytes=0"];
    go(&place.request("b", &other), None).unwrap();
    assert_eq!(state_of(&place.run("a")), state_of(&place.run("b")));
}

#[test]
fn a_signal_saves_and_the_run_goes_on_from_there() {
    let place = Place::new();
    let stop = Stop::new();
    let (prepared, _) = silent(prepare(&place.request("a", &[]), build).unwrap());
    stop.request();
    assert_eq!(run(prepared, Limits::default(), &stop, "dormouse").unwrap(), Ending::Stopped { done: 0 });
    assert_eq!(steps_in(&place.run("a")), [0]);
    let Ending::Finished { .. } = go(&place.resume("a", &[], &[]), None).unwrap() else { panic!("not finished") };
    let limits = Limits { max_time: Some(std::time::Duration::ZERO), ..Limits::default() };
    let (prepared, _) = silent(prepare(&place.request("b", &[]), build).unwrap());
    assert_eq!(run(prepared, limits, &Stop::new(), "dormouse").unwrap(), Ending::Stopped { done: 0 });
}

#[test]
fn an_evaluation_notices_a_stop() {
    let mut learner = build(&preset("tiny").unwrap()).unwrap();
    let stop = Stop::new();
    let windows = vec![vec![1, 2, 3]; 20];
    assert_eq!(score(&mut *learner, &windows, &stop).unwrap().unwrap().windows, 20);
    stop.request();
    assert_eq!(score(&mut *learner, &windows, &stop).unwrap(), None);
}

#[test]
fn a_score_is_the_mean_over_positions_with_its_standard_error() {
    let mut learner = build(&preset("tiny").unwrap()).unwrap();
    let windows: Vec<Vec<u8>> = (0..20).map(|i| (0..65u32).map(|j| (i * 37 + j * j) as u8).collect()).collect();
    let nats = learner.evaluate(&windows).unwrap();
    let got = score(&mut *learner, &windows, &Stop::new()).unwrap().unwrap();
    let bits: Vec<f64> = nats.iter().map(|nats| nats / std::f64::consts::LN_2).collect();
    assert!((got.bpb - bits.iter().sum::<f64>() / bits.len() as f64).abs() < 1e-12);
    let means: Vec<f64> = bits.chunks(64).map(|window| window.iter().sum::<f64>() / 64.0).collect();
    let variance = means.iter().map(|mean| (mean - got.bpb).powi(2)).sum::<f64>() / 19.0;
    assert!((got.standard_error - (variance / 20.0).sqrt()).abs() < 1e-12);
}

/// A learner before whose steps something happens.
struct Before(Box<dyn Learner>, Hook);

/// Gets the index of the step.
type Hook = Box<dyn FnMut(u64) -> anyhow::Result<()>>;

impl Learner for Before {
    fn step(&mut self, batch: &crate::data::Batch, lr: f64) -> anyhow::Result<()> {
        (self.1)(batch.step)?;
        self.0.step(batch, lr)
    }
    fn drain(&mut self) -> anyhow::Result<Vec<super::StepRecord>> {
        self.0.drain()
    }
    fn latched(&self) -> Option<super::Latch> {
        self.0.latched()
    }
    fn evaluate(&mut self, windows: &[Vec<u8>]) -> anyhow::Result<Vec<f64>> {
        self.0.evaluate(windows)
    }
    fn sample(
        &mut self,
        prompt: &[u8],
        bytes: usize,
        temperature: f64,
        seed: u64,
        emit: &mut dyn FnMut(Option<u8>) -> bool,
    ) -> anyhow::Result<()> {
        self.0.sample(prompt, bytes, temperature, seed, emit)
    }
    fn export(&self) -> anyhow::Result<State> {
        self.0.export()
    }
    fn import(&mut self, state: &State) -> anyhow::Result<()> {
        self.0.import(state)
    }
    fn drift(&self) -> anyhow::Result<Vec<super::Drift>> {
        self.0.drift()
    }
    fn parameters(&self) -> Vec<super::Parameter> {
        self.0.parameters()
    }
    fn first_nonfinite(&mut self, batch: &crate::data::Batch) -> anyhow::Result<Option<String>> {
        self.0.first_nonfinite(batch)
    }
}

#[test]
fn data_that_fails_in_the_middle_of_a_run_loses_no_step() {
    let place = Place::new();
    go(&place.request("whole", &[]), None).unwrap();
    let broken = |name: &str, error: fn() -> anyhow::Error| {
        let (mut prepared, printed) = silent(prepare(&place.request(name, &[]), build).unwrap());
        let fail = move |step: u64| if step == 7 { Err(error()) } else { Ok(()) };
        prepared.learner = Box::new(Before(prepared.learner, Box::new(fail)));
        let error = run(prepared, Limits::default(), &Stop::new(), "dormouse").unwrap_err();
        let text = String::from_utf8(printed.0.borrow().clone()).unwrap();
        (Exit::of(&error), text)
    };
    // A record of a file of targets that is damaged, and a corpus that has been cut.
    let damaged = || -> anyhow::Error {
        let (path, place) = ("x".into(), "step 7".into());
        TargetsError::Damaged { path, place, got: 1, expected: 2 }.into()
    };
    let cut = || -> anyhow::Error {
        DataError::Changed { path: "x".into(), expected: "9 bytes".into(), got: "an end".into() }.into()
    };
    for (name, error) in [("damaged", damaged as fn() -> anyhow::Error), ("cut", cut)] {
        let (exit, text) = broken(name, error);
        assert_eq!(exit, Exit::Data);
        assert!(text.contains("stopped after step 7 of 20, saved") && text.contains("train --resume"), "{text}");
        assert_eq!(steps_in(&place.run(name)), [4, 7]);
        go(&place.resume(name, &[], &[]), None).unwrap();
        assert_eq!(state_of(&place.run(name)), state_of(&place.run("whole")));
        assert_eq!(timeless(&place.run(name)), timeless(&place.run("whole")));
    }
    // A step that fails half-way may have changed anything, so nothing of it is saved.
    let (exit, text) = broken("device", || anyhow::anyhow!("the device is lost"));
    assert_eq!((exit, steps_in(&place.run("device"))), (Exit::Failed, vec![4]));
    assert!(!text.contains("stopped after"), "{text}");
    // With no room for the save the first error is still the one that counts.
    let (mut prepared, _) = silent(prepare(&place.request("full", &[]), build).unwrap());
    std::fs::write(place.run("full").join("checkpoints"), "in the way").unwrap();
    let fail = move |step: u64| if step == 7 { Err(cut()) } else { Ok(()) };
    prepared.learner = Box::new(Before(prepared.learner, Box::new(fail)));
    let error = run(prepared, Limits::default(), &Stop::new(), "dormouse").unwrap_err();
    assert_eq!((Exit::of(&error), error.is::<DataError>()), (Exit::Data, true), "{error:#}");
}

#[test]
fn a_failed_periodic_save_is_tried_again_and_a_failed_last_one_ends_the_run() {
    let place = Place::new();
    // A file where the checkpoints' folder must be: every save fails, training goes on, the last save is an error.
    let (prepared, _) = silent(prepare(&place.request("a", &[]), build).unwrap());
    std::fs::write(place.run("a").join("checkpoints"), "in the way").unwrap();
    let error = run(prepared, Limits::default(), &Stop::new(), "dormouse").unwrap_err();
    assert_eq!(Exit::of(&error), Exit::Failed);
    assert!(format!("{error:#}").contains("last checkpoint"), "{error:#}");
    assert_eq!(lines(&place.run("a"), "metrics.jsonl").iter().filter(|line| line["kind"] == "step").count(), 20);

    // Removed in time, the next save works.
    let (mut prepared, printed) = silent(prepare(&place.request("b", &["checkpoint.keep_last=9"]), build).unwrap());
    let blocked = place.run("b").join("checkpoints");
    std::fs::write(&blocked, "in the way").unwrap();
    let unblock = move |step: u64| {
        if step == 9 {
            std::fs::remove_file(&blocked).unwrap();
        }
        Ok(())
    };
    prepared.learner = Box::new(Before(prepared.learner, Box::new(unblock)));
    run(prepared, Limits::default(), &Stop::new(), "dormouse").unwrap();
    assert_eq!(steps_in(&place.run("b")), [12, 16, 20]);
    assert!(String::from_utf8_lossy(&printed.0.borrow()).contains("step 12 | saved"));
}

#[test]
fn a_run_that_is_not_finite_stops_with_a_bundle_and_untouched_weights() {
    let place = Place::new();
    let poisoned = format!("seed={POISONED_SEED}");
    let set = [poisoned.as_str(), "log.every_steps=50", "checkpoint.every_steps=50", "log.eval_every_steps=50"];
    let error = go(&place.request("a", &set), None).unwrap_err();
    assert_eq!(Exit::of(&error), Exit::NonFinite);
    assert!(error.to_string().contains("9 steps in one window of 64 steps"), "{error}");
    let bundle = place.run("a").join("nonfinite_000014");
    let about: Value = serde_json::from_slice(&std::fs::read(bundle.join("nonfinite.json")).unwrap()).unwrap();
    assert_eq!((about["step"].as_u64(), about["first_nonfinite"].as_str()), (Some(14), Some("logits gradient")));
    let manifest = verify(&bundle).unwrap();
    assert_eq!(manifest.updates, 5);
    assert!(
        error.to_string().contains("the bundle is in ") && error.to_string().contains("nonfinite_000014"),
        "{error}"
    );
    // Nothing was saved in these few steps, so there is nothing to resume.
    assert!(error.to_string().contains("there is no checkpoint"), "{error}");
    let config = crate::config::Config::from_toml(
        &std::fs::read_to_string(bundle.join("config.toml")).unwrap(),
        "config.toml".as_ref(),
    )
    .unwrap();
    let data = Data::open(&config).unwrap();
    assert_eq!(std::fs::read(bundle.join("batch.bin")).unwrap(), data.batch(13, 4).unwrap().bytes);
    // README's table of the run folder has a row for everything in it.
    for entry in std::fs::read_dir(place.run("a")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap().replace("000014", "");
        assert!(include_str!("../../../README.md").contains(&format!("| `{name}")), "{name}");
    }
    // The batch is what a replay is about, so a bundle with another one is damaged.
    let batch = std::fs::read(bundle.join("batch.bin")).unwrap();
    std::fs::write(bundle.join("batch.bin"), [&[batch[0] ^ 1], &batch[1..]].concat()).unwrap();
    assert!(verify(&bundle).unwrap_err().to_string().contains("batch.bin has CRC-32C"));
    // Every skipped step is in the log, marked, with the value that JSON cannot hold.
    let skipped: Vec<Value> =
        lines(&place.run("a"), "metrics.jsonl").into_iter().filter(|line| line["applied"] == false).collect();
    assert!(skipped.len() >= 9 && skipped[0]["nonfinite"][0] == "grad_norm=NaN", "{skipped:?}");
    // Skipped steps spread thinner than nine a window do not stop the run, and move no weight.
    go(&place.request("b", &[&poisoned]), None).unwrap();
    go(&place.request("c", &[&poisoned, "train.total_steps=20"]), Some(5)).unwrap();
    assert_eq!(state_of(&place.run("b")), state_of(&place.run("c")));
}

#[test]
fn a_run_that_is_not_finite_says_so_even_if_its_bundle_has_no_place() {
    let place = Place::new();
    let poisoned = format!("seed={POISONED_SEED}");
    let set = [poisoned.as_str(), "log.every_steps=50", "checkpoint.every_steps=50", "log.eval_every_steps=50"];
    go(&place.request("a", &set), Some(4)).unwrap();
    let (prepared, _) = silent(prepare(&place.resume("a", &[], &[]), build).unwrap());
    std::fs::write(place.run("a").join("nonfinite_000014.tmp"), "in the way").unwrap();
    let error = run(prepared, Limits::default(), &Stop::new(), "dormouse").unwrap_err();
    assert_eq!(Exit::of(&error), Exit::NonFinite, "{error:#}");
    let text = error.to_string();
    for words in ["the bundle could not be written: ", "nonfinite_000014.tmp", "or resume from step 4"] {
        assert!(text.contains(words), "`{words}` is not in: {text}");
    }
    assert!(!place.run("a").join("nonfinite_000014").exists());
}

#[test]
fn data_that_is_overwritten_during_a_run_ends_it_and_leaves_no_anchors() {
    let place = Place::new();
    let (mut prepared, _) = silent(prepare(&place.request("a", &[]), build).unwrap());
    let text = place.text();
    let overwrite = move |step: u64| {
        if step == 2 {
            let mut bytes = std::fs::read(&text)?;
            bytes.reverse();
            // Longer than the steps of a file system's clock.
            std::thread::sleep(std::time::Duration::from_millis(50));
            std::fs::write(&text, bytes)?;
        }
        Ok(())
    };
    prepared.learner = Box::new(Before(prepared.learner, Box::new(overwrite)));
    let error = run(prepared, Limits::default(), &Stop::new(), "dormouse").unwrap_err();
    assert_eq!(Exit::of(&error), Exit::Data, "{error:#}");
    assert!(error.to_string().contains("text` changed since the run began"), "{error:#}");
    assert!(!place.run("a").join("anchors.json").exists());
}

#[test]
fn an_evaluation_that_a_stop_has_cut_short_is_made_when_the_run_goes_on() {
    let place = Place::new();
    go(&place.request("whole", &[]), None).unwrap();
    // As a stop in the middle of scoring leaves it, in the middle of sampling, and after both.
    for (name, scores, samples) in [("unscored", 0, 0), ("unsampled", 1, 1), ("done", 1, 2)] {
        go(&place.request(name, &[]), Some(8)).unwrap();
        for (file, kind, count) in [("metrics.jsonl", "eval", scores), ("samples.jsonl", "text", samples)] {
            let path = place.run(name).join(file);
            let text = std::fs::read_to_string(&path).unwrap();
            let (of_step, mut kept): (Vec<&str>, Vec<&str>) =
                text.lines().partition(|line| line.contains(kind) && line.contains("\"step\":8"));
            kept.extend(&of_step[..count]);
            std::fs::write(&path, kept.join("\n") + if kept.is_empty() { "" } else { "\n" }).unwrap();
        }
        go(&place.resume(name, &[], &[]), None).unwrap();
        assert_eq!(timeless(&place.run(name)), timeless(&place.run("whole")), "{name}");
        let written = |name: &str| lines(&place.run(name), "samples.jsonl");
        assert_eq!(written(name), written("whole"), "{name}");
    }
}

#[test]
fn a_run_is_not_resumed_to_fewer_steps_than_it_has_done() {
    let place = Place::new();
    go(&place.request("a", &[]), Some(6)).unwrap();
    let fewer = place.resume("a", &["train.total_steps=5"], &["train.total_steps"]);
    let error = go(&fewer, None).unwrap_err();
    assert_eq!(Exit::of(&error), Exit::Usage);
    assert!(error.to_string().contains("is 5, and the run has done 6 steps; give 6 or more"), "{error}");
}

#[test]
fn a_resumed_run_checks_data_and_configuration() {
    let place = Place::new();
    let file = place.text();
    go(&place.request("a", &[]), Some(6)).unwrap();

    let refused = go(&place.resume("a", &["optimizer.lr=1e-3"], &[]), None).unwrap_err();
    assert_eq!(Exit::of(&refused), Exit::Usage);
    assert!(refused.to_string().contains("--allow-change optimizer.lr"), "{refused}");
    go(&place.resume("a", &["log.every_steps=2"], &[]), Some(8)).unwrap();
    go(&place.resume("a", &["optimizer.lr=1e-3"], &["optimizer.lr"]), Some(10)).unwrap();
    // The allowed change is the run's configuration from then on.
    go(&place.resume("a", &[], &[]), Some(12)).unwrap();
    assert!(std::fs::read_to_string(place.run("a").join("config.toml")).unwrap().contains("lr = 0.001"));

    let mut bytes = std::fs::read(&file).unwrap();
    bytes[3] ^= 1;
    std::fs::write(&file, &bytes).unwrap();
    let changed = go(&place.resume("a", &[], &[]), None).unwrap_err();
    assert_eq!(Exit::of(&changed), Exit::Data);
    assert!(changed.to_string().contains("text` changed"), "{changed}");
    std::fs::remove_file(&file).unwrap();
    assert_eq!(Exit::of(&go(&place.resume("a", &[], &[]), None).unwrap_err()), Exit::Data);
}

#[test]
fn a_finished_run_can_be_scored_again_and_extended() {
    let place = Place::new();
    let first = go(&place.request("a", &[]), None).unwrap();
    let written = || (lines(&place.run("a"), "metrics.jsonl"), lines(&place.run("a"), "samples.jsonl"));
    let once = written();
    assert_eq!(go(&place.resume("a", &[], &[]), None).unwrap(), first);
    assert_eq!(written(), once);
    let longer = place.resume("a", &["train.total_steps=24"], &["train.total_steps"]);
    assert!(matches!(go(&longer, None).unwrap(), Ending::Finished { .. }));
    assert!(steps_in(&place.run("a")).contains(&24));
}

#[test]
fn auto_takes_the_newest_run_or_begins_one() {
    let place = Place::new();
    let auto = Request { resume: Some(Resume::Auto), ..place.request("a", &[]) };
    go(&auto, Some(6)).unwrap();
    let again = Request { name: None, sources: Sources::default(), ..auto };
    assert!(matches!(go(&again, None).unwrap(), Ending::Finished { .. }));
    assert_eq!(std::fs::read_dir(place.runs()).unwrap().count(), 1);
}

#[test]
fn overfitting_one_batch_takes_its_loss_below_any_other() {
    let place = Place::new();
    go(&place.request("a", &["train.overfit_one_batch=true"]), None).unwrap();
    go(&place.request("b", &[]), None).unwrap();
    let last = |name: &str| {
        let all = lines(&place.run(name), "metrics.jsonl");
        all.iter().rfind(|line| line["kind"] == "step").unwrap()["loss"].as_f64().unwrap()
    };
    assert!(last("a") < 0.9 * last("b"), "{} {}", last("a"), last("b"));
}

#[test]
fn nothing_is_written_before_the_request_was_found_good() {
    let place = Place::new();
    for (set, exit) in [("train.batch_rows=0", Exit::Usage), ("data.path=/missing", Exit::Data)] {
        assert_eq!(Exit::of(&prepare(&place.request("a", &[set]), build).err().unwrap()), exit);
    }
    let failing = |_: &crate::config::Config| anyhow::bail!("no model");
    assert_eq!(Exit::of(&prepare(&place.request("a", &[]), failing).err().unwrap()), Exit::Failed);
    assert!(!place.runs().exists());
    let file = place.folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    let in_a_file = Request { runs: file, ..place.request("a", &[]) };
    let error = prepare(&in_a_file, build).err().unwrap();
    assert!(format!("{error:#}").contains("--runs"), "{error:#}");
}
