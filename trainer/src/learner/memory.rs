//! The n-gram memory of a learner: where its table lies, how the keys of a batch reach the device, and how the rows
//! that a step has touched move.
//!
//! With the table on the device its rows lie last in the flat buffer, with gradients and moments at the same places, and
//! `row_adam` is one more operation of the step. With the table on the host the flat buffer has room for the rows of one
//! batch. They are copied there before the step, under their ranks; after it their gradient, the clipping's scale and
//! the flag come back, and the host moves its rows, at once or after several steps (`waiting`). Sums, norm and flag have
//! the same operands in the same order, so the bits are those of a table on the device.

use std::borrow::Cow;
use std::cell::RefCell;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use dormouse_reference::engram_hash::{self, Compact, compact};
use dormouse_reference::row_adam::{self, RowAdam};
use dormouse_reference::{Backend, DType, sanitise};
use ndarray::{Array2, ArrayView1, IxDyn};

use super::waiting::{Sums, Window};
use super::{ModelLearner, RECORD_TAIL, RING_STEPS};
use crate::checkpoint::{State, Tensor, TensorData};
use crate::config::{Config, ConfigError, Engram, ModelConfig};
use crate::data::{Batch, KeyPlan, rows_of};
use crate::host;
use crate::host_table::HostTable;
use crate::instruments::Witness;
use crate::instruments::atlas::HOST_TABLE;
use crate::model::{MEMORY_TABLE, Memory, Model, Param, Table};
use crate::progress::gib;
use crate::train::Parameter;

/// Rows of the table that a position has.
const ORDERS: usize = engram_hash::ORDERS.len();

/// The counts of the table's rows in a checkpoint.
const COUNTS: &str = "engram.counts";

/// The memory of a run.
pub(super) struct MemoryPart<B: Backend> {
    plan: KeyPlan,
    width: usize,
    /// `[b, t]` of a batch.
    shape: [usize; 2],
    /// `[sets 3 b t]`: set after set rows of the table, or their ranks among the rows of the batch.
    rows: B::Tensor,
    /// `[sets 3 b t]`: set after set, for every part its places by row.
    parts: B::Tensor,
    place: Place<B>,
}

/// The rows of a batch that lie in the flat buffer while its table is on the host.
pub(super) struct Names {
    /// How many there are; every pass of the step reads some of them.
    pub resident: usize,
    /// Those that get a gradient, ascending. A row that the teacher alone has read does not move.
    pub moved: Vec<u32>,
    /// Where these are among the resident ones.
    pub ranks: Vec<usize>,
}

/// Where the table lies.
enum Place<B: Backend> {
    /// In the flat buffer.
    Device {
        /// `[3 b t]`, or twice that: the places by row of all keys that get a gradient.
        order: B::Tensor,
        /// `[3 R]` of `u32`: applied updates of every row.
        counts: B::Tensor,
    },
    /// In host memory.
    Host {
        /// Shared with the checkpoint that is being written, if one is.
        table: Arc<HostTable>,
        /// The steps that the table waits for.
        window: Window<B>,
    },
}

/// The operations that a backend needs for a memory.
fn needs(engram: Engram) -> &'static [&'static str] {
    match engram {
        Engram::Off => &[],
        Engram::Device => &["engram", "row_adam"],
        Engram::Host => &["engram"],
    }
}

/// Refuses a memory that the backend has no kernels for.
pub(super) fn check<B: Backend + Witness>(b: &B, config: &Config) -> Result<()> {
    let engram = config.model.engram;
    if let Some(stem) = needs(engram).iter().find(|stem| !b.has(stem)) {
        bail!(
            "model.engram is {}, and {} has no kernels of {stem}; give --backend cpu, or --set model.engram=off",
            engram.word(),
            b.name()
        );
    }
    Ok(())
}

/// The system gives a new table on the host no memory.
fn refused(config: &Config, bytes: u64) -> ConfigError {
    let free = host::free_memory_bytes().map_or("less".to_owned(), |free| format!("{:.1} GiB", gib(free)));
    ConfigError::Invalid {
        key: "model.engram_rows".into(),
        problem: format!(
            "is {}, and its table needs {:.1} GiB of memory with its moments, where this process can have {free}",
            config.model.engram_rows,
            gib(bytes)
        ),
        fix: "lower it or model.engram_width, raise the limit (ulimit -v), or give model.engram=off".into(),
    }
}

/// Every parameter tensor of a run, a table on the host among them with all its rows.
pub fn parameters(config: &Config) -> Vec<Parameter> {
    let table = Table::of(config);
    let all = table.params.iter();
    all.map(|p| Parameter { name: p.name.to_owned(), shape: p.shape.clone(), group: p.group.word().to_owned() })
        .collect()
}

/// The parameter table of a run as its flat buffer has it.
pub fn resident(config: &Config) -> Table {
    let table = Table::of(config);
    match config.model.engram {
        Engram::Off | Engram::Device => table,
        Engram::Host => {
            let sets = KeyPlan::of(config).map_or(0, |plan| plan.sets());
            table.with_resident_rows(room(&config.model, sets * config.train.batch_rows * config.data.seq_bytes))
        }
    }
}

/// Rows that this many positions can name.
fn room(model: &ModelConfig, positions: usize) -> usize {
    ORDERS * positions.min(model.engram_rows)
}

fn upload_ids<B: Backend>(b: &B, ids: &[u32], into: &B::Tensor) -> Result<()> {
    let shape = b.shape(into).to_vec();
    let values: Vec<f64> = ids.iter().map(|&id| f64::from(id)).collect();
    Ok(b.upload(ArrayView1::from(&values[..]).into_shape_with_order(IxDyn(&shape))?, into)?)
}

impl<B: Backend> MemoryPart<B> {
    /// The memory of a run, with the initial table of its seed; none if it is off.
    pub fn new(b: &B, config: &Config) -> Result<Option<Self>> {
        let Some(plan) = KeyPlan::of(config) else { return Ok(None) };
        let (rows, t) = (config.train.batch_rows, config.data.seq_bytes);
        let ids = |shape: &[usize]| b.persistent(shape, DType::U32);
        let places = ORDERS * rows * t;
        let (all, touched) = (plan.sets() * places, plan.touched() * places);
        let place = match config.model.engram {
            Engram::Host => {
                let table = Table::of(config);
                let values = table.get(MEMORY_TABLE).initial_values(config.seed);
                let made = HostTable::create(ORDERS * config.model.engram_rows, config.model.engram_width, values);
                let table = Arc::new(made.map_err(|bytes| refused(config, bytes))?);
                let room = resident(config).get(MEMORY_TABLE).shape[0];
                let window = Window::new(b, config.optimizer.host_adam_every_steps, [room, config.model.engram_width])?;
                Place::Host { table, window }
            }
            _ => Place::Device { order: ids(&[touched])?, counts: ids(&[ORDERS * config.model.engram_rows])? },
        };
        let (shape, rows, parts) = ([rows, t], ids(&[all])?, ids(&[all])?);
        Ok(Some(Self { plan, width: config.model.engram_width, shape, rows, parts, place }))
    }

    /// Brings the keys of a batch to the device, and with a table on the host its rows; gives their names then.
    pub fn upload(&self, b: &B, model: &Model<B>, batch: &Batch) -> Result<Option<Names>> {
        let keys = match &batch.keys {
            Some(keys) => Cow::Borrowed(keys),
            None => Cow::Owned(batch.keys_of(self.plan)?),
        };
        let places = ORDERS * batch.rows * batch.len;
        let (all, touched) = (self.plan.sets() * places, self.plan.touched() * places);
        ensure!(
            [keys.rows.len(), keys.order.len(), keys.parts.len()] == [all, touched, all],
            "step {}: the batch has {} n-gram keys in {} and {} places, expected {all} in {touched} and {all}",
            batch.step,
            keys.rows.len(),
            keys.order.len(),
            keys.parts.len()
        );
        upload_ids(b, &keys.parts, &self.parts)?;
        match &self.place {
            Place::Device { order, .. } => {
                upload_ids(b, &keys.rows, &self.rows)?;
                upload_ids(b, &keys.order, order)?;
                Ok(None)
            }
            Place::Host { table, .. } => {
                // Where every row gets a gradient, the batch has come with their order.
                let order = if touched == all {
                    Cow::Borrowed(&keys.order)
                } else {
                    Cow::Owned(engram_hash::order(&keys.rows))
                };
                let all = compact(&keys.rows, &order);
                upload_ids(b, &all.slots, &self.rows)?;
                let small = table.gather(&all).mapv(f64::from);
                let into = b.view(&model.params, model.table.get(MEMORY_TABLE).start, small.shape())?;
                b.upload(small.view().into_dyn(), &into)?;
                let mut touched: Vec<usize> = all.slots[..touched].iter().map(|&slot| slot as usize).collect();
                touched.sort_unstable();
                touched.dedup();
                let unique = touched.iter().map(|&slot| all.unique[slot]).collect();
                Ok(Some(Names { resident: all.unique.len(), moved: unique, ranks: touched }))
            }
        }
    }

    /// The keys of one part of the batch: `[part_rows, t, 3]` and their order. `plain` asks for those of the bytes where
    /// the first set is of masked bytes.
    pub fn part(&self, b: &B, part: usize, plain: bool) -> dormouse_reference::Result<[B::Tensor; 2]> {
        let [rows, t] = self.shape;
        let part_rows = rows / self.plan.parts;
        let len = part_rows * t * ORDERS;
        let set = if plain { self.plan.sets() - 1 } else { 0 };
        let start = set * rows * t * ORDERS + part * len;
        Ok([b.view(&self.rows, start, &[part_rows, t, ORDERS])?, b.view(&self.parts, start, &[len])?])
    }

    /// Whether the step itself moves the rows.
    pub fn moves_on_device(&self) -> bool {
        matches!(self.place, Place::Device { .. })
    }

    /// Moves the rows that the batch has touched, once each, if they lie on the device.
    pub fn update(
        &self,
        b: &B,
        config: &row_adam::Config,
        model: &Model<B>,
        [m, v, lr]: [&B::Tensor; 3],
        seen: &sanitise::Outputs<B::Tensor>,
    ) -> dormouse_reference::Result<()> {
        let Place::Device { order, counts } = &self.place else { return Ok(()) };
        let param = model.table.get(MEMORY_TABLE);
        let of = |flat| b.view(flat, param.start, &param.shape);
        let (table, grads, m, v) = (of(&model.params)?, of(&model.grads)?, of(m)?, of(v)?);
        let state = row_adam::State { table: &table, grads: &grads, m: &m, v: &v, counts };
        let rows = b.view(&self.rows, 0, b.shape(order))?;
        let touched = row_adam::Touched { rows: &rows, order };
        RowAdam::update(b, config, state, touched, row_adam::Scalars { lr, scale: &seen.scale, apply: &seen.apply })
    }

    /// The gradients of the first `rows` rows that lie in the flat buffer.
    fn row_grads(&self, b: &B, model: &Model<B>, rows: usize) -> Result<B::Tensor> {
        Ok(b.view(&model.grads, model.table.get(MEMORY_TABLE).start, &[rows, self.width])?)
    }

    /// Moves the rows of a table on the host by the sums of their gradients; nothing waits after that.
    fn update_host(&mut self, config: &row_adam::Config, sums: Sums, lr: f64) -> Result<()> {
        let Place::Host { table, window } = &mut self.place else { return Ok(()) };
        let (unique, grads) = sums.take(self.width)?;
        // A checkpoint that still holds the table keeps its own copy.
        let table = Arc::make_mut(table);
        // The sums are scaled already, and steps that were skipped have no part in them.
        table.update(config, &Compact { unique, slots: Vec::new() }, grads.view(), [lr as f32, 1.0], true)?;
        window.restart(Sums::default());
        Ok(())
    }

    /// Adds what a checkpoint holds of the memory beside the flat buffers.
    pub fn export(&self, b: &B, state: &mut State, waiting: Sums) -> Result<()> {
        waiting.export(self.width, state);
        match &self.place {
            Place::Device { counts, .. } => {
                let values: Vec<u32> = b.download(counts)?.iter().map(|&x| x as u32).collect();
                state.optimizer.insert(COUNTS.to_owned(), Tensor::u32(&[values.len()], values));
            }
            Place::Host { table, .. } => state.table = Some(Arc::clone(table)),
        }
        Ok(())
    }

    /// What [`MemoryPart::import`] will take, checked.
    pub fn incoming(&self, state: &State) -> Result<Incoming> {
        let rows = ORDERS * self.plan.table_rows;
        match (&self.place, &state.table) {
            (Place::Device { .. }, _) => {
                let counts = state.optimizer.get(COUNTS);
                let counts = counts.with_context(|| format!("checkpoint: tensor `{COUNTS}` is missing"))?;
                match counts.as_u32() {
                    Some(values) if counts.shape == [rows] => Ok(Incoming::Counts(values.to_vec())),
                    _ => bail!("checkpoint: tensor `{COUNTS}` is {:?}, expected [{rows}] of u32", counts.shape),
                }
            }
            (Place::Host { .. }, Some(table)) => {
                let (got, expected) = ([table.rows(), table.width()], [rows, self.width]);
                ensure!(got == expected, "checkpoint: tensor `{MEMORY_TABLE}` is {got:?}, expected {expected:?}");
                Ok(Incoming::Table(Arc::clone(table), Sums::import(state, expected)?))
            }
            (Place::Host { .. }, None) => bail!("checkpoint: tensor `{MEMORY_TABLE}` is missing"),
        }
    }

    /// Goes on from what was checked.
    pub fn import(&mut self, b: &B, incoming: Incoming) -> Result<()> {
        match (&mut self.place, incoming) {
            (Place::Device { counts, .. }, Incoming::Counts(values)) => upload_ids(b, &values, counts),
            (Place::Host { table: own, window }, Incoming::Table(table, waiting)) => {
                *own = table;
                window.restart(waiting);
                Ok(())
            }
            _ => unreachable!("`incoming` gives what the place takes"),
        }
    }
}

impl<B: Backend + Witness> ModelLearner<B> {
    /// The parameters whose values lie in the flat buffers: all but a table on the host.
    pub(super) fn flat_params(&self) -> impl Iterator<Item = &Param> {
        let host = self.config.model.engram == Engram::Host;
        self.model.table.params.iter().filter(move |param| !(host && param.name == MEMORY_TABLE))
    }

    /// Notes the step that has just run for a table on the host, and moves the table if it is due: a read of the device.
    pub(super) fn update_host_table(&mut self, names: Names, step: u64, lr: f64) -> Result<()> {
        self.b.stage(HOST_TABLE);
        if let Some(memory) = &mut self.memory {
            let grads = memory.row_grads(&self.b, &self.model, names.resident)?;
            let Place::Host { window, .. } = &mut memory.place else { return Ok(()) };
            if window.note(&self.b, &grads, names, step)? {
                let sums = self.waiting()?;
                let config = self.row_adam();
                if let Some(memory) = &mut self.memory {
                    memory.update_host(&config, sums, lr)?;
                }
            }
        }
        self.b.stage("reads");
        Ok(())
    }

    /// The row gradients that a table on the host waits for.
    pub(super) fn waiting(&self) -> Result<Sums> {
        let Some(memory @ MemoryPart { place: Place::Host { window, .. }, .. }) = &self.memory else {
            return Ok(Sums::default());
        };
        let columns = self.b.shape(&self.ring)[1];
        let losses = self.config.train.accumulate * self.losses_of_part();
        let steps: Vec<usize> = window.steps().map(|step| step as usize % RING_STEPS).collect();
        // One step has one row of the ring; several have all of it in one read, of which they pick theirs.
        let (from, rows) = if let [one] = steps[..] { (one, 1) } else { (0, RING_STEPS) };
        let ring = if steps.is_empty() {
            Vec::new()
        } else {
            self.flat(&self.b.view(&self.ring, from * columns, &[rows * columns])?)?
        };
        let record = |step: &usize| {
            let row = &ring[(step - from) * columns..][..columns];
            let &[_norm, _nonfinite, scale, apply] = &row[losses..losses + RECORD_TAIL] else {
                bail!("a record has {} columns", row.len())
            };
            Ok([scale, apply])
        };
        let records = steps.iter().map(record).collect::<Result<Vec<_>>>()?;
        let room = self.model.table.get(MEMORY_TABLE).shape[0];
        window.sums(&self.b, &memory.row_grads(&self.b, &self.model, room)?, &records)
    }
}

/// What a model reads with these keys: rows and their order.
pub(super) fn memory<T>(keys: &Option<[T; 2]>) -> Option<Memory<'_, T>> {
    keys.as_ref().map(|[rows, order]| Memory { rows, order: Some(order), table: None })
}

/// A checkpoint's memory on its way in.
pub(super) enum Incoming {
    /// Of a table on the device.
    Counts(Vec<u32>),
    /// A table on the host, and the gradients that wait for it.
    Table(Arc<HostTable>, Sums),
}

/// The state in the form of a learner whose memory lies where `engram` says: a checkpoint of a table on the device fits a
/// run with one on the host, and the other way round.
pub(super) fn placed(state: &State, engram: Engram) -> Result<Cow<'_, State>> {
    let [m_name, v_name] = ["m.", "v."].map(|prefix| format!("{prefix}{MEMORY_TABLE}"));
    match (engram, &state.table) {
        (Engram::Device, Some(table)) => {
            Sums::refuse(state)?;
            let mut state = State { table: None, ..state.clone() };
            let shape = [table.rows(), table.width()];
            let [values, m, v] = table.buffers().map(|values| Tensor::f32(&shape, values.to_vec()));
            state.weights.insert(MEMORY_TABLE.to_owned(), values);
            state.optimizer.extend([(m_name, m), (v_name, v)]);
            state.optimizer.insert(COUNTS.to_owned(), Tensor::u32(&shape[..1], table.counts().to_vec()));
            Ok(Cow::Owned(state))
        }
        (Engram::Host, None) => {
            let mut state = state.clone();
            let missing = |name: &str| format!("checkpoint: tensor `{name}` is missing");
            let values = state.weights.remove(MEMORY_TABLE).with_context(|| missing(MEMORY_TABLE))?;
            let mut moment = |name: &str| state.optimizer.remove(name).with_context(|| missing(name));
            let (m, v, counts) = (moment(&m_name)?, moment(&v_name)?, moment(COUNTS)?);
            let width = values.shape.last().copied().unwrap_or(0);
            let floats = |tensor: Tensor, name: &str| match tensor.data {
                TensorData::F32(values) => Ok(values),
                TensorData::U32(_) => Err(anyhow::anyhow!("checkpoint: tensor `{name}` is not f32")),
            };
            let buffers = [floats(values, MEMORY_TABLE)?, floats(m, &m_name)?, floats(v, &v_name)?];
            let TensorData::U32(counts) = counts.data else { bail!("checkpoint: tensor `{COUNTS}` is not u32") };
            let table = HostTable::of(width, buffers, counts);
            let table = table.with_context(|| format!("checkpoint: `{MEMORY_TABLE}` and its moments do not fit"))?;
            state.table = Some(Arc::new(table));
            Ok(Cow::Owned(state))
        }
        (Engram::Off, Some(_)) => bail!("checkpoint: tensor `{MEMORY_TABLE}` is none of this model's"),
        _ => Ok(Cow::Borrowed(state)),
    }
}

/// Persistent memory for the keys of a forward pass that trains nothing.
pub(super) struct Reading<B: Backend> {
    /// `[rows, t, 3]`
    rows: B::Tensor,
    /// `[U, W]`, the rows' own table, where the memory's lies on the host.
    table: Option<B::Tensor>,
    /// The last bytes of a sequence that is read byte by byte.
    history: RefCell<Vec<u32>>,
}

impl<B: Backend> Reading<B> {
    /// Room for windows of this shape.
    pub fn new(b: &B, part: &MemoryPart<B>, [rows, t]: [usize; 2]) -> Result<Self> {
        let most = ORDERS * (rows * t).min(part.plan.table_rows);
        let table = match part.place {
            Place::Device { .. } => None,
            Place::Host { .. } => Some(b.persistent(&[most, part.width], b.float())?),
        };
        let rows = b.persistent(&[rows, t, ORDERS], DType::U32)?;
        Ok(Self { rows, table, history: RefCell::default() })
    }

    /// Brings the keys of windows to the device. Every row of `ids` is the start of a sequence.
    pub fn upload(&self, b: &B, part: &MemoryPart<B>, ids: &Array2<u8>) -> Result<()> {
        self.upload_rows(b, part, &rows_of(ids.view(), None, part.plan.table_rows))
    }

    /// Brings the keys of the next byte of a sequence to the device.
    pub fn upload_next(&self, b: &B, part: &MemoryPart<B>, byte: u8) -> Result<()> {
        let mut history = self.history.borrow_mut();
        history.push(u32::from(byte));
        let rows = *engram_hash::rows(&history, part.plan.table_rows).last().context("a byte was just read")?;
        // A sequence that is as long as the longest key has no short keys any more, so its start may be forgotten.
        let old = history.len().saturating_sub(engram_hash::CONTEXT);
        history.drain(..old);
        self.upload_rows(b, part, &rows)
    }

    /// Back to the start of a sequence.
    pub fn clear(&self) {
        self.history.borrow_mut().clear();
    }

    fn upload_rows(&self, b: &B, part: &MemoryPart<B>, rows: &[u32]) -> Result<()> {
        let (Place::Host { table, .. }, Some(small)) = (&part.place, &self.table) else {
            return upload_ids(b, rows, &self.rows);
        };
        let names = compact(rows, &engram_hash::order(rows));
        upload_ids(b, &names.slots, &self.rows)?;
        let values = table.gather(&names).mapv(f64::from);
        Ok(b.upload(values.view().into_dyn(), &b.view(small, 0, values.shape())?)?)
    }

    /// What the model reads.
    pub fn memory(&self) -> Memory<'_, B::Tensor> {
        Memory { rows: &self.rows, order: None, table: self.table.as_ref() }
    }
}
