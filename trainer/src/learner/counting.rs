//! The reference with a count of every operation's calls: holds what is asked against what runs where no device counts.

use std::cell::RefCell;
use std::collections::BTreeMap;

use dormouse_reference::{Reference, Tensor, delegate_backend};

use crate::instruments::Witness;

/// The reference in f32 that counts.
#[derive(Default)]
pub struct Counting {
    inner: Reference<f32>,
    /// Calls forward and backward, by operation.
    calls: RefCell<BTreeMap<&'static str, [u64; 2]>>,
}

impl Counting {
    /// The counts so far, which start again at zero.
    pub fn take(&self) -> BTreeMap<&'static str, [u64; 2]> {
        self.calls.take()
    }

    fn note(&self, stem: &'static str, direction: usize) -> &Reference<f32> {
        self.calls.borrow_mut().entry(stem).or_default()[direction] += 1;
        &self.inner
    }
}

impl Witness for Counting {
    fn describe(&self) -> String {
        self.inner.describe()
    }
}

macro_rules! uncounted {
    ($self:ident, $d:ident => $call:expr) => {{
        let $d = &$self.inner;
        $call
    }};
}

macro_rules! counted {
    ($self:ident, $stem:ident, $pass:ident, $d:ident => $call:expr) => {{
        let $d = $self.note(stringify!($stem), usize::from(stringify!($pass) == "backward"));
        $call
    }};
}

delegate_backend!(Counting, Tensor<f32>, Reference<f32>, uncounted, counted);
