//! What a device has done: calls by operation, launches by kernel and stage, waits of the host, time where it is asked
//! for.

use std::collections::BTreeMap;

use dormouse_reference::Result;

use super::Device;
use crate::arm::Arm;
use crate::launch::{Ledger, Pass};
use crate::runtime::Engine;

impl<R: Engine> Device<R> {
    /// Whether every launch and replay is waited for and timed. A step under timers is slow; its own time says nothing.
    pub fn set_timers(&self, on: bool) {
        self.timers.set(on);
    }

    /// Launches, bytes and calls of everything that ran, replays included.
    pub fn ledger(&self) -> Ledger {
        let mut all = Ledger::default();
        self.ledgers.borrow().values().for_each(|ledger| all.add(ledger));
        all
    }

    /// The same of the steps of each purpose; the empty word stands for everything outside steps.
    pub fn ledgers(&self) -> BTreeMap<&'static str, Ledger> {
        self.ledgers.borrow().clone()
    }

    /// The arm that an operation takes from here.
    #[must_use]
    pub fn arm(&self, stem: &str) -> Arm {
        self.arms.borrow().get(stem)
    }

    /// The arm that a forward pass takes from here, noted as taken. Operations without a backward pass use it too.
    pub(crate) fn forward_arm(&self, stem: &'static str) -> Arm {
        let arm = self.arms.borrow().get(stem);
        self.book(|ledger| ledger.call(stem, Pass::Forward, arm));
        arm
    }

    /// Notes that a backward pass takes the arm its forward pass took.
    pub(crate) fn note_backward(&self, stem: &'static str, arm: Arm) {
        self.book(|ledger| ledger.call(stem, Pass::Backward, arm));
    }

    pub(super) fn book(&self, entry: impl FnOnce(&mut Ledger)) {
        entry(self.ledgers.borrow_mut().entry(self.running.get().unwrap_or_default()).or_default());
    }

    /// Notes that the host waits for the device.
    pub(super) fn note_sync(&self, cause: &'static str) {
        self.book(|ledger| ledger.site(self.stage.get(), cause).syncs += 1);
    }

    /// Issues work; with timers on, waits for it and notes its time under `name`.
    pub(super) fn timed(&self, name: &'static str, issue: impl FnOnce() -> Result<()>) -> Result<()> {
        if !self.timers.get() || self.capturing.borrow().is_some() {
            return issue();
        }
        let mut issue = Some(issue);
        let mut issued = Ok(());
        let time = R::timed(&self.client, &mut || {
            if let Some(issue) = issue.take() {
                issued = issue();
            }
        })?;
        issued?;
        self.book(|ledger| ledger.site(self.stage.get(), name).device_ns += time.as_nanos() as u64);
        Ok(())
    }

    /// Notes a launch, and the scratch that was laid out since the one before.
    pub(super) fn note(&self, kernel: &'static str, bytes: u64) {
        let alloc_bytes = self.placed.take();
        self.book(|ledger| ledger.note(self.stage.get(), kernel, bytes, alloc_bytes));
    }
}
