//! The instruments of a run on a device: launch price, atlas, and what a step waits for.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use dormouse_cuda::{Price, Site};

use super::Learner;
use crate::config::{Config, ConfigError, flatten};
use crate::instruments::atlas::{WARM_UP, Writer};
use crate::instruments::bound::StepCost;
use crate::instruments::{Witness, sites};
use crate::run::try_write;

/// Steps between two that are timed on the device, where a graph makes that cheap.
const TIMED_EVERY: u64 = 64;

/// The first timed step: all kernels are warm by then.
const TIMED_FIRST: u64 = 10;

/// Which instruments a run takes along.
#[derive(Clone, Debug, Default)]
pub struct Watch {
    /// Where to write the atlas.
    pub atlas: Option<PathBuf>,
    /// Time every kernel at log cadence.
    pub timers: bool,
}

impl Watch {
    /// Finds out whether the atlas can be written, before anything of the run is.
    ///
    /// # Errors
    /// A usage error if the file exists; what the system says if it cannot be written.
    pub fn check(&self) -> Result<()> {
        let Some(path) = &self.atlas else { return Ok(()) };
        let shown = path.display();
        if path.symlink_metadata().is_ok() {
            let fix = "give another --atlas, or remove it";
            bail!(ConfigError::Usage(format!("train: --atlas `{shown}` exists and is not overwritten; {fix}")));
        }
        let fix = "give --atlas a file in a folder that exists and can be written";
        try_write(path).with_context(|| format!("train: cannot write --atlas `{shown}`; {fix}"))
    }
}

/// The instruments at work. On the reference there is nothing to see.
pub(super) struct Watcher {
    atlas: Option<Writer>,
    /// What ended the atlas, until it was said.
    problem: Option<String>,
    price: Option<Price>,
    timers: bool,
    log_every: u64,
    graph: bool,
    /// Counts of training steps when the warm ones began.
    warm_from: Site,
    warm_steps: u64,
    /// Steps and their time without those under timers.
    steps: u32,
    time: Duration,
    timed: u64,
}

impl Watcher {
    /// Measures the price of a launch and opens the atlas.
    pub fn start(watch: &Watch, learner: &dyn Learner, config: &Config) -> Result<Self> {
        let witness = learner.witness();
        let price = witness.map(Witness::launch_price).transpose()?.flatten();
        let create = |path: &Path| {
            let mut keys: BTreeMap<String, String> =
                flatten(config).into_iter().map(|(key, value)| (key, value.to_string())).collect();
            let facts = learner.facts();
            keys.insert("device".to_owned(), facts.device);
            keys.extend(facts.arms.into_iter().map(|(stem, arm)| (format!("arm.{stem}"), arm)));
            Writer::create(path, &keys, all_sites(learner))
        };
        // An instrument that fails must not end what it looks at.
        let (atlas, problem) = match watch.atlas.as_deref().map(create).transpose() {
            Ok(atlas) => (atlas, None),
            Err(error) => (None, Some(without_atlas(&error))),
        };
        Ok(Self {
            atlas,
            problem,
            price,
            timers: watch.timers,
            log_every: config.log.every_steps,
            graph: config.run.graph,
            warm_from: Site::default(),
            warm_steps: 0,
            steps: 0,
            time: Duration::ZERO,
            timed: 0,
        })
    }

    /// The line about the price of a launch.
    pub fn price_line(&self) -> Option<String> {
        let price = self.price?;
        let node = price.graph_us.map_or(String::new(), |us| format!(", a node of a graph {us:.2} us"));
        Some(format!("launch price: {:.2} us{node}", price.eager_us))
    }

    /// Before step `index` of this process; whether it is timed, so that its time counts for nothing else.
    pub fn before(&mut self, learner: &dyn Learner, index: u64) -> bool {
        let Some(witness) = learner.witness() else { return false };
        let cadence = if self.timers { self.log_every } else { TIMED_EVERY };
        let due = index >= TIMED_FIRST && (index - TIMED_FIRST).is_multiple_of(cadence);
        // Without a graph every launch is waited for, which only a user who asks for it gets.
        let timed = due && (self.timers || self.graph);
        witness.set_timers(timed);
        timed
    }

    /// After that step and the reads that belong to it.
    pub fn after(&mut self, learner: &dyn Learner, index: u64, done: u64, timed: bool, took: Duration) -> Result<()> {
        let Some(witness) = learner.witness() else { return Ok(()) };
        witness.set_timers(false);
        if index + 1 == WARM_UP {
            self.warm_from = training(witness);
        }
        if index >= WARM_UP {
            self.warm_steps += 1;
            if timed {
                self.timed += 1;
            } else {
                self.steps += 1;
                self.time += took;
            }
        }
        let Some(atlas) = &mut self.atlas else { return Ok(()) };
        match atlas.step(done, all_sites(learner)) {
            Err(error) if error.is::<std::io::Error>() => {
                self.problem = Some(without_atlas(&error));
                self.atlas = None;
                Ok(())
            }
            // A wait where none belongs is about the step, and not about the file.
            written => written,
        }
    }

    /// What ended the atlas, once.
    pub fn take_problem(&mut self) -> Option<String> {
        self.problem.take()
    }

    /// The device has caught up with the steps so far, and the host waited for it.
    pub fn waited(&mut self, time: Duration) {
        if self.steps > 0 {
            self.time += time;
        }
    }

    /// What happened since the last step belongs to none.
    pub fn outside(&mut self, learner: &dyn Learner) {
        if let Some(atlas) = &mut self.atlas {
            atlas.skip(all_sites(learner));
        }
    }

    /// What a step did and took so far.
    pub fn cost(&self, learner: &dyn Learner) -> Option<(StepCost, Price)> {
        let price = self.price?;
        if self.steps == 0 {
            return None;
        }
        let now = training(learner.witness()?);
        let each = |now: u64, from: u64| (now - from) as f64 / self.warm_steps as f64;
        let device_ns = now.device_ns - self.warm_from.device_ns;
        let cost = StepCost {
            step_ms: 1e3 * self.time.as_secs_f64() / f64::from(self.steps),
            device_ms: (self.timed > 0).then(|| device_ns as f64 / 1e6 / self.timed as f64),
            launches: each(now.launches, self.warm_from.launches),
            nodes: each(now.nodes, self.warm_from.nodes),
        };
        Some((cost, price))
    }
}

fn without_atlas(error: &anyhow::Error) -> String {
    format!("{error:#}; training goes on without the atlas")
}

fn all_sites(learner: &dyn Learner) -> crate::instruments::Sites {
    learner.witness().map(sites).unwrap_or_default()
}

/// The counts of all training steps together.
pub(crate) fn training(witness: &dyn Witness) -> Site {
    let ledgers = witness.ledgers();
    let steps = ledgers.iter().filter(|(purpose, _)| purpose.starts_with("train"));
    let mut sum = Site::default();
    for site in steps.flat_map(|(_, ledger)| ledger.sites.values()) {
        sum.launches += site.launches;
        sum.nodes += site.nodes;
        sum.alloc_bytes += site.alloc_bytes;
        sum.syncs += site.syncs;
        sum.device_ns += site.device_ns;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::Watch;
    use crate::exit::Exit;

    #[test]
    fn an_atlas_that_has_no_place_is_found_before_the_run() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| Watch { atlas: Some(folder.path().join(name)), timers: false };
        at("a.tsv").check().unwrap();
        assert!(!folder.path().join("a.tsv").exists());
        std::fs::write(folder.path().join("a.tsv"), "hours of work").unwrap();
        let error = at("a.tsv").check().unwrap_err();
        assert_eq!(Exit::of(&error), Exit::Usage);
        assert!(error.to_string().contains("give another --atlas"), "{error}");
        let error = at("none/a.tsv").check().unwrap_err();
        assert!(error.to_string().contains("none/a.tsv`; give --atlas a file in a folder"), "{error}");
        Watch::default().check().unwrap();
    }
}
