//! The n-gram memory of the block: its parameters, and its part of the forward and the backward pass.
//!
//! ```text
//! m = Engram(rows, c)        the three rows of a position, weighed by how well they fit the stream c
//! ```
//!
//! The keys are the same in every iteration, and so are the table and its projections; the query is not. The backward
//! pass sits between those of `blend`, which gives dm, and of the controller, which takes the gradient of c further.

use dormouse_reference::engram::{self, Engram};
use dormouse_reference::{Backend, Precision, Result, engram_hash};

use super::ablation::Ablation;
use super::params::{Group, Init, Table};
use super::{Model, Views};
use crate::config::ModelConfig;

/// The name of the table among the parameters.
pub const TABLE: &str = "engram.table";

/// The memory's operation: eps 1e-5 inside the roots, the signed root straight below 1e-2.
pub(super) fn config(precision: Precision) -> engram::Config {
    engram::Config { eps: 1e-5, gate_eps: 1e-2, precision }
}

/// The n-gram keys of a batch on the device.
#[derive(Debug)]
pub struct Memory<'a, T> {
    /// `[B, T, 3]` of `u32`: rows of the table.
    pub rows: &'a T,
    /// `[3 B T]` of `u32`: the places of `rows` sorted by row; needed for a backward pass.
    pub order: Option<&'a T>,
    /// `[U, W]`: a table that `rows` are of, in place of the parameter.
    pub table: Option<&'a T>,
}

// By hand, since all are references: a handle itself need not be `Copy`.
impl<T> Copy for Memory<'_, T> {}

impl<T> Clone for Memory<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl Table {
    /// The memory's parameters. They are added last, so that a model without them keeps the initial values it had; the
    /// table is placed last, so that its length moves no other parameter.
    pub(super) fn add_memory(&mut self, m: &ModelConfig) {
        let orders = engram_hash::ORDERS.len();
        let inputs = orders * m.engram_width;
        let projection = Init::Uniform((inputs as f64).powf(-0.5));
        for name in ["engram.key", "engram.value"] {
            self.add(name, &[inputs, m.width], projection, Group::Matrix, false);
        }
        self.add(TABLE, &[orders * m.engram_rows, m.engram_width], Init::Normal(0.02), Group::Rows, false);
    }

    /// The same table with room for this many rows of the memory: what a device holds of a table in host memory.
    #[must_use]
    pub fn with_resident_rows(mut self, rows: usize) -> Self {
        let last = self.params.last_mut().filter(|param| param.name == TABLE).expect("the memory's table is last");
        last.shape[0] = rows;
        self
    }
}

impl<B: Backend> Model<B> {
    /// m of one iteration, with the stream `c` (`[B, T, d]`) as the query.
    pub(super) fn memory(
        &self,
        b: &B,
        p: &Views<'_, B>,
        keys: &Memory<'_, B::Tensor>,
        c: &B::Tensor,
    ) -> Result<(B::Tensor, <B as Engram>::Saved)> {
        let table = match keys.table {
            Some(table) => table.clone(),
            None => p.get(TABLE)?,
        };
        let params = engram::Params { table: &table, key: &p.get("engram.key")?, value: &p.get("engram.value")? };
        let inputs = engram::Inputs { c, rows: keys.rows, order: keys.order };
        let (outputs, saved) = Engram::forward(b, &self.configs.engram, inputs, params)?;
        Ok((outputs.m, saved))
    }

    /// Adds the memory's parameter gradients and gives dc = `plus` + what flows back through the query.
    pub(super) fn memory_backward(
        &self,
        b: &B,
        grads: &Views<'_, B>,
        saved: &<B as Engram>::Saved,
        dm: &B::Tensor,
        plus: &B::Tensor,
    ) -> Result<B::Tensor> {
        if self.ablation == Ablation::DetachMemory {
            return Ok(plus.clone());
        }
        let (table, key, value) = (grads.get(TABLE)?, grads.get("engram.key")?, grads.get("engram.value")?);
        let into = engram::Params { table: &table, key: &key, value: &value };
        Ok(Engram::backward(b, &self.configs.engram, saved, engram::Outputs { m: dm }, Some(plus), into)?.dc)
    }
}
