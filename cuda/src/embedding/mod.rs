//! `embedding`: the equations are in `dormouse_reference::embedding`.
//!
//! Saved: the ids, and the shape of the table.
//!
//! The host does not look at ids. One that is not below vocab gives a row of NaN, so that the loss of its step is not
//! finite and the step is refused; its gradient goes to the last row. No memory outside the tensors is touched.

mod fused;
mod order;
mod plain;

use cubecl::prelude::*;
use dormouse_reference::embedding::{Config, Embedding, Inputs, Outputs, Params};
use dormouse_reference::{DType, Dims, Error, Result};

use crate::arm::{Arm, Mutant};
use crate::device::Device;
use crate::runtime::Engine;
use crate::tensor::{Tensor, Words};

const STEM: &str = "embedding";

/// Numbered from 1 in the kernels.
pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant::fused("next-row"),
    Mutant::fused("last-column-missed"),
    Mutant::fused("null-renamed-local"),
    Mutant::fused("last-token-of-a-run-missed"),
    Mutant::fused("run-begun-before-dropped"),
    Mutant::fused("run-that-goes-on-misses-its-start"),
];

/// What `forward` hands to `backward`.
pub struct Saved {
    ids: Tensor,
    vocab: usize,
    width: usize,
    arm: Arm,
}

/// One forward call, checked.
struct Forward<'a> {
    ids: &'a Tensor,
    table: &'a Tensor,
    x: &'a Tensor,
    vocab: usize,
    width: usize,
}

/// One backward call, checked.
struct Backward<'a> {
    ids: &'a Tensor,
    dx: &'a Tensor,
    dtable: &'a Tensor,
    vocab: usize,
    width: usize,
}

/// The row of the table that token `n` has: its id, or the last row where the id is none of the table.
#[cube]
fn row_of(ids: &Words, n: usize, vocab: u32) -> u32 {
    let mut id = ids.at(n);
    if id >= vocab {
        id = vocab - 1;
    }
    id
}

impl<R: Engine> Embedding for Device<R> {
    type Saved = Saved;

    fn forward(
        &self,
        _config: &Config,
        inputs: Inputs<&Tensor>,
        params: Params<&Tensor>,
    ) -> Result<(Outputs<Tensor>, Saved)> {
        const OP: &str = "embedding::forward";
        let (ids, table) = (inputs.ids, params.table);
        let mut dims = Dims::new(OP);
        dims.bind("table", table.shape(), &["vocab", "D"])?;
        dims.positive(&["vocab", "D"])?;
        check_ids(self, OP, "ids", ids)?;
        self.check_floats(OP, &[("table", table)])?;
        let (vocab, width) = (dims.get("vocab"), dims.get("D"));
        let shape: Vec<usize> = ids.shape().iter().copied().chain([width]).collect();
        let x = self.float_scratch(&shape)?;
        let call = Forward { ids, table, x: &x, vocab, width };
        let arm = self.forward_arm(STEM);
        match arm {
            Arm::Plain => plain::forward(self, &call)?,
            Arm::Fused => fused::forward(self, &call)?,
        }
        Ok((Outputs { x }, Saved { ids: ids.clone(), vocab, width, arm }))
    }

    fn backward(
        &self,
        _config: &Config,
        saved: &Saved,
        upstream: Outputs<&Tensor>,
        into: Params<&Tensor>,
    ) -> Result<()> {
        const OP: &str = "embedding::backward";
        let (Saved { ids, vocab, width, arm }, dx, dtable) = (saved, upstream.x, into.table);
        let mut dims = Dims::new(OP);
        dims.set("N", ids.len(), "ids");
        dims.set("vocab", *vocab, "table");
        dims.set("D", *width, "table");
        dims.bind_rows("x", dx.shape(), "N", &["D"])?;
        dims.bind("table", dtable.shape(), &["vocab", "D"])?;
        check_ids(self, OP, "ids", ids)?;
        self.check_floats(OP, &[("x", dx)])?;
        self.check_into(OP, "table", dtable, &[("ids", ids), ("x", dx)])?;
        self.note_backward(STEM, *arm);
        let call = Backward { ids, dx, dtable, vocab: *vocab, width: *width };
        match arm {
            Arm::Plain => plain::backward(self, &call),
            Arm::Fused => fused::backward(self, &call),
        }
    }
}

/// Refuses a tensor that holds no ids or belongs to an ended step.
pub(crate) fn check_ids<R: Engine>(b: &Device<R>, op: &'static str, arg: &'static str, ids: &Tensor) -> Result<()> {
    b.check_life(op, arg, ids)?;
    match ids.dtype {
        DType::U8 | DType::U32 => Ok(()),
        got => Err(Error::Storage { op, arg, expected: "u8 or u32".to_owned(), got }),
    }
}
