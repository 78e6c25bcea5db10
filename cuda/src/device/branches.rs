//! Two pieces of a captured step at the same time.
//!
//! Host code runs in order, captured or not, so memory is laid out as for one piece after the other and no piece writes
//! where the other does. In a graph the second piece waits for what the first one waited for, and what follows waits for
//! both. The one thing that launches share besides tensors is the workspace of matrix products; each branch that may run
//! beside another has a number of its own for it.

use std::cell::Cell;

use dormouse_reference::Result;

use super::Device;
use crate::runtime::Engine;
use crate::runtime::gemm::BRANCHES;

/// The numbers of the branches of one capture.
#[derive(Default)]
pub(super) struct Branches {
    here: Cell<usize>,
    /// Branches that begin next may run beside those up to this number.
    taken: Cell<usize>,
    /// The largest number since the innermost open pair began.
    largest: Cell<usize>,
}

impl Branches {
    /// The branch that the step is at.
    pub fn here(&self) -> usize {
        self.here.get()
    }

    /// Before a capture.
    pub fn restart(&self) {
        self.here.set(0);
        self.taken.set(0);
        self.largest.set(0);
    }
}

impl<R: Engine> Device<R> {
    /// [`Tensors::beside`](dormouse_reference::Tensors::beside): branches of the graph while a step is captured, one after
    /// the other else, and where all numbers are taken.
    pub(super) fn on_branches(
        &self,
        first: &mut dyn FnMut(&Self) -> Result<()>,
        second: &mut dyn FnMut(&Self) -> Result<()>,
    ) -> Result<()> {
        // Hidden in every mode: all runs of a step lay out the same memory.
        let made = self.memo().next();
        let Branches { here, taken, largest } = &self.branches;
        if self.capturing.borrow().is_none() || taken.get() + 1 >= BRANCHES {
            // Which comes first is nobody's business; gate det asks for both.
            let reversed = self.reversed.get();
            if reversed {
                second(self)?
            } else {
                first(self)?
            }
            self.memo().hide_from(made);
            let ran = if reversed { first(self) } else { second(self) };
            self.memo().show();
            return ran;
        }
        let (before, largest_before) = (taken.get(), largest.get());
        taken.set(before + 1);
        largest.set(before + 1);
        let start = R::dependencies(&self.client)?;
        let outside = here.replace(before + 1);
        first(self)?;
        self.memo().hide_from(made);
        here.set(outside);
        // Branches inside the first piece may run beside those inside the second.
        taken.set(largest.get());
        let end = R::dependencies(&self.client)?;
        R::depend(&self.client, start, false)?;
        second(self)?;
        R::depend(&self.client, end, true)?;
        self.memo().show();
        // Joined: what follows runs beside neither.
        taken.set(before);
        largest.set(largest.get().max(largest_before));
        Ok(())
    }

    /// The same for any number of pieces, one an item.
    pub(crate) fn all_beside<T>(&self, items: &[T], work: &impl Fn(&Self, &T) -> Result<()>) -> Result<()> {
        match items {
            [] => Ok(()),
            [item] => work(self, item),
            _ => {
                let (left, right) = items.split_at(items.len() / 2);
                self.on_branches(&mut |d| d.all_beside(left, work), &mut |d| d.all_beside(right, work))
            }
        }
    }
}
