//! The gates of every operation, compiled in this crate once, as `dormouse_reference::compiled` is for the operations
//! themselves: programs that run them link them, and a change of a kernel compiles none of them again.

use std::hint::black_box;

use dormouse_reference::{Dual, Reference};

use crate::description::OperationOn;
use crate::gates::{bite, det, diff, exercise, ladder, meta, poison};
use crate::ops::{Visitor, visit_all};
use crate::runner::{OnBackend, Runner};

struct Here;

impl Visitor for Here {
    fn visit<O>(&mut self)
    where
        O: OperationOn<Reference<f64>> + OperationOn<Reference<f32>> + OperationOn<Reference<Dual>>,
    {
        let run = <OnBackend<Reference<f64>> as Runner<O>>::run;
        black_box([run as *const (), ladder::<O> as *const (), bite::with_mutant::<O> as *const ()]);
        black_box([diff::gate::<O> as *const (), meta::gate_device::<O> as *const (), poison::gate::<O> as *const ()]);
        black_box([det::gate_device::<O> as *const (), exercise::<O> as *const ()]);
    }
}

/// Names all of them; nobody calls it.
pub fn here() {
    visit_all(&mut Here);
}
