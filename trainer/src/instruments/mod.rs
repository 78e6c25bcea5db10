//! What a run knows of its own work: which kernels ran, whether their results were used, what a launch costs.
//!
//! A backend that counts is a [`Witness`]. [`Engagement`] holds its count of calls against what the model asks for,
//! [`atlas`] writes its count of launches step by step, [`bound`] says what a step waits for.

pub mod atlas;
pub mod bound;
mod engagement;

use std::collections::BTreeMap;

use dormouse_cuda::runtime::Activity;
use dormouse_cuda::{Arm, Gpu, Ledger, Price, Site, catalogue};
use dormouse_reference::{Precision, Reference, Result, Scalar};

pub use engagement::{Ask, Asked, Engagement, Objective, Row};

/// Counts by stage and kernel.
pub type Sites = BTreeMap<(&'static str, &'static str), Site>;

/// A backend's word on its own work. What a backend does not count it leaves at the default.
pub trait Witness {
    /// The hardware and its versions, for people.
    fn describe(&self) -> String;

    /// The hardware's generation, such as `sm_90`: what receipts are about.
    fn generation(&self) -> String {
        "none".to_owned()
    }

    /// The arithmetic that an operation has where `asked` is the run's: the arms of an operation may differ in it.
    fn arithmetic(&self, _stem: &str, asked: Precision) -> Precision {
        asked
    }

    /// Whether there is an implementation of the operation.
    fn has(&self, _stem: &str) -> bool {
        true
    }

    /// Whether calls and launches are counted at all.
    fn counts(&self) -> bool {
        false
    }

    /// What has run, by the purpose of the step.
    fn ledgers(&self) -> BTreeMap<&'static str, Ledger> {
        BTreeMap::new()
    }

    /// Steps that were captured as a graph.
    fn captures(&self) -> u64 {
        0
    }

    /// The algorithm of every matrix product that a library computes.
    fn products(&self) -> Vec<String> {
        Vec::new()
    }

    /// What the runtime has done.
    fn activity(&self) -> Activity {
        Activity::default()
    }

    /// Waits until everything that was asked for is done.
    fn wait(&self) -> Result<()> {
        Ok(())
    }

    /// Measures what a launch costs; absent where nothing is launched.
    fn launch_price(&self) -> Result<Option<Price>> {
        Ok(None)
    }

    /// Whether launches and replays are waited for and timed.
    fn set_timers(&self, _on: bool) {}
}

impl<T: Scalar> Witness for Reference<T> {
    fn describe(&self) -> String {
        "the reference on this machine's processor".to_owned()
    }
}

impl Witness for Gpu {
    fn describe(&self) -> String {
        Gpu::describe(self)
    }

    fn generation(&self) -> String {
        Gpu::generation(self)
    }

    fn arithmetic(&self, stem: &str, asked: Precision) -> Precision {
        // Token by token there are no products that could be rounded.
        if stem == "kda" && self.arm(stem) == Arm::Plain { Precision::Full } else { asked }
    }

    fn has(&self, stem: &str) -> bool {
        catalogue().iter().any(|kernels| kernels.stem == stem)
    }

    fn counts(&self) -> bool {
        true
    }

    fn ledgers(&self) -> BTreeMap<&'static str, Ledger> {
        Gpu::ledgers(self)
    }

    fn captures(&self) -> u64 {
        Gpu::captures(self)
    }

    fn products(&self) -> Vec<String> {
        self.gemm_choices().iter().map(|choice| choice.to_string().replace('\t', " ")).collect()
    }

    fn activity(&self) -> Activity {
        Gpu::activity(self)
    }

    fn wait(&self) -> Result<()> {
        self.sync()
    }

    fn launch_price(&self) -> Result<Option<Price>> {
        Gpu::launch_price(self).map(Some)
    }

    fn set_timers(&self, on: bool) {
        Gpu::set_timers(self, on);
    }
}

/// The counts of all purposes together.
pub fn sites(witness: &dyn Witness) -> Sites {
    let mut all = Ledger::default();
    for ledger in witness.ledgers().values() {
        all.add(&Ledger { sites: ledger.sites.clone(), ..Ledger::default() });
    }
    all.sites
}
