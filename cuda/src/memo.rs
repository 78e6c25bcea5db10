//! What a step has computed and needs again: results of launches that read nothing but tensors which nobody has written
//! since, such as the factors in their format and what the n-gram memory looks up, in every iteration of the block.
//!
//! An operation's inputs are not written again before the step ends, and weights not before the optimiser. A result is
//! dropped when something is about to write what it was computed from ([`Device::outdated`]), and all are when the step
//! ends, since they lie in its memory. One that was made on a branch of a captured step is not seen by the branch beside
//! it, in any mode, so that all runs of a step lay out the same memory. The plain arm computes everything again.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::Arc;

use dormouse_reference::Result;

use crate::device::Device;
use crate::runtime::Engine;
use crate::tensor::Tensor;

/// What is computed, and in which of its variants.
pub(crate) type What = (&'static str, u32);

/// Results of the present step.
#[derive(Default)]
pub(crate) struct Memo {
    all: RefCell<Vec<Entry>>,
    /// How many were ever made.
    made: Cell<u64>,
    /// Those of the branches beside the present one, by their numbers.
    hidden: RefCell<Vec<Range<u64>>>,
}

struct Entry {
    number: u64,
    what: What,
    /// What they were computed from.
    of: Vec<Tensor>,
    results: Vec<Tensor>,
}

impl Memo {
    /// Forgets all.
    pub fn clear(&self) {
        self.all.borrow_mut().clear();
        self.hidden.borrow_mut().clear();
    }

    /// The number of the next one.
    pub fn next(&self) -> u64 {
        self.made.get()
    }

    /// Hides those that were made since there was `next`. They are still dropped when outdated.
    pub fn hide_from(&self, next: u64) {
        self.hidden.borrow_mut().push(next..self.made.get());
    }

    /// Brings those back that were hidden last.
    pub fn show(&self) {
        self.hidden.borrow_mut().pop();
    }

    /// The results of the first of these computations whose tensors fit, with those.
    pub fn find(&self, what: What, fits: impl Fn(&[Tensor]) -> bool) -> Option<(Vec<Tensor>, Vec<Tensor>)> {
        let hidden = self.hidden.borrow();
        let seen = |entry: &Entry| !hidden.iter().any(|range| range.contains(&entry.number));
        let all = self.all.borrow();
        let entry = all.iter().find(|entry| entry.what == what && seen(entry) && fits(&entry.of))?;
        Some((entry.of.clone(), entry.results.clone()))
    }

    /// Remembers the results of a computation.
    pub fn add(&self, what: What, of: &[&Tensor], results: &[Tensor]) {
        let number = self.made.replace(self.made.get() + 1);
        let of = of.iter().map(|&tensor| tensor.clone()).collect();
        self.all.borrow_mut().push(Entry { number, what, of, results: results.to_vec() });
    }

    /// Drops the results of what is about to be written, also those of another branch: they may hold all of a buffer.
    pub fn outdated(&self, tensor: &Tensor) {
        self.all.borrow_mut().retain(|entry| !entry.of.iter().any(|of| of.overlaps(tensor)));
    }
}

impl<R: Engine> Device<R> {
    /// The results of a computation that reads these tensors and nothing else: those that the step has, or new ones.
    pub(crate) fn once(
        &self,
        what: What,
        of: &[&Tensor],
        compute: impl FnOnce() -> Result<Vec<Tensor>>,
    ) -> Result<Vec<Tensor>> {
        let same =
            |(a, b): (&Tensor, &&Tensor)| Arc::ptr_eq(&a.buffer, &b.buffer) && a.start == b.start && a.shape == b.shape;
        if let Some((_, results)) = self.memo().find(what, |held| held.iter().zip(of).all(same)) {
            return Ok(results);
        }
        let results = compute()?;
        self.memo().add(what, of, &results);
        Ok(results)
    }

    /// Drops the results of what is about to be written.
    pub(crate) fn outdated(&self, tensor: &Tensor) {
        self.memo().outdated(tensor);
    }
}
