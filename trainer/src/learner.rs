//! [`ModelLearner`]: the byte model, its optimiser and its instruments on one backend, behind the trainer's
//! [`Learner`].
//!
//! Everything a step reads or writes on the device is persistent memory at a fixed place: the batch, the learning rate,
//! the step number, the flat parameters with gradients and moments, the counters, and a ring of records that the host
//! empties at log cadence. So a step is the same operations on the same memory every time, which is what a device
//! needs to capture it once and replay it.

mod memory;
mod teacher;
mod update;
mod waiting;

use std::cell::RefCell;
use std::hash::{DefaultHasher, Hash, Hasher};

use anyhow::{Context, Result, bail, ensure};
use dormouse_reference::muon;
use dormouse_reference::{Backend, DType, Error, StepKey};
use nalgebra::DMatrix;
use ndarray::{Array2, ArrayD, ArrayView1, IxDyn, arr1};
use rand::RngExt;

use crate::backend::Facts;
use crate::checkpoint::{State, Tensor, TensorData};
use crate::config::{Config, ModelConfig, Rule};
use crate::data::Batch;
use crate::host;
use crate::instruments::{Ask, Asked, Engagement, Witness};
use crate::model::{self, Ablation, Carry, Model, Table, VOCABULARY};
use crate::rng::{Purpose, stream};
use crate::train::{Drift, Latch, Learner, Parameter, StepRecord};
use memory::{MemoryPart, Names, Reading, memory};
pub use memory::{parameters, resident};
use teacher::{JepaPart, SHARES, TERMS};
use update::MuonPart;

/// Steps whose records the device holds until the host asks for them.
const RING_STEPS: usize = 64;

/// Skipped steps that a window of [`RING_STEPS`] steps may have; the next one closes the latch. Windows begin at
/// multiples of their length, so how often the host looks changes nothing.
const SKIPS_ALLOWED: u32 = 8;

/// Windows scored together: enough rows to feed every core, few enough to stay in cache-friendly sizes.
const EVAL_ROWS: usize = 8;

/// Power iterations of the retraction's estimate of the largest singular value.
const POWER_ITERATIONS: usize = 5;

/// The model, its optimiser state and its instruments.
pub struct ModelLearner<B: Backend> {
    b: B,
    config: Config,
    /// A hash of the configuration: a part of every step's key.
    variant: u64,
    facts: Facts,
    /// What steps so far asked of the operations.
    asked: RefCell<Asked>,
    model: Model<B>,
    /// Whether retraction takes all factors at once; else one after another.
    retracts_batched: bool,
    /// Muon, where the run has it. Its momentum lies in `m`, at the places of its parameters.
    muon: Option<MuonPart<B>>,
    /// The n-gram memory, where the run has it.
    memory: Option<MemoryPart<B>>,
    /// The JEPA objective, where the run has it.
    jepa: Option<JepaPart<B>>,
    /// `[rows, t, d]`, latents on their way to the host; made by the first who asks.
    latents: Option<B::Tensor>,
    m: B::Tensor,
    v: B::Tensor,
    /// updates, skipped in all, skipped in this window, latched
    counters: B::Tensor,
    lr: B::Tensor,
    step: B::Tensor,
    /// `[rows, t]`, the step's batch.
    ids: B::Tensor,
    targets: B::Tensor,
    /// `[parts * N]` cross-entropies of the step, each a share of the whole; with the JEPA objective its terms follow
    /// those of each part, and `JepaPart::shares` says what each counts.
    losses: B::Tensor,
    /// `[1]` = 1/N: every iteration's loss counts alike.
    loss_weight: B::Tensor,
    ring: B::Tensor,
    scoring: Vec<Scoring<B>>,
    stream: Stream<B>,
    /// `[factors]` spread before the last retraction; travels with the record of every step.
    spreads: B::Tensor,
    /// Largest of those seen, per factor.
    largest_spreads: Vec<f64>,
    /// Records that left the ring before the host asked.
    drained: Vec<StepRecord>,
    /// Steps in the ring that have not been read.
    pending: u64,
    next_step: u64,
    last_skipped: Option<u64>,
}

/// Columns of a record between the losses and the spreads: norm, nonfinite, scale, apply.
const RECORD_TAIL: usize = 4;

impl<B: Backend + Witness> ModelLearner<B> {
    /// A learner with the initial weights of the run's seed.
    ///
    /// # Errors
    /// The configuration wants an operation that the backend has no kernels of, or more memory than the machine has;
    /// whatever the backend says.
    pub fn new(b: B, config: &Config) -> Result<Self> {
        let o = &config.optimizer;
        ensure!(
            o.rule == Rule::Adamw || b.has("muon"),
            "optimizer.rule is muon, and {} has no kernels of it; give --backend cpu, or --set optimizer.rule=adamw",
            b.name()
        );
        memory::check(&b, config)?;
        model::check_memory(config, &resident(config), host::machine_memory_bytes())?;
        let precision = config.run.precision.precision();
        let model = Model::new(&b, &config.model, resident(config), |stem| b.arithmetic(stem, precision))?;
        let memory = MemoryPart::new(&b, config)?;
        let muon = match o.rule {
            Rule::Adamw => None,
            Rule::Muon => Some(MuonPart {
                config: muon::Config {
                    momentum: o.muon_momentum,
                    iterations: o.muon_iterations,
                    plus: true,
                    batching: muon::Batching::Batched,
                    matrices: model.table.muon(config.model.heads, o.weight_decay),
                },
                lr: b.persistent(&[1], b.float())?,
                ratio: o.muon_lr / o.lr,
            }),
        };
        let jepa = JepaPart::new(&b, config, &model.table)?;
        let mut hasher = DefaultHasher::new();
        config.to_toml().hash(&mut hasher);
        let parameters = model.table.len();
        let rows = config.train.batch_rows;
        let parts = config.train.accumulate;
        let t = config.data.seq_bytes;
        let n = config.model.iterations;
        let float = b.float();
        let (terms, shares) = if jepa.is_some() { (n + TERMS, SHARES) } else { (n, 0) };
        let retracted = model.table.params.iter().filter(|p| p.retracted).count();
        let learner = Self {
            m: b.persistent(&[parameters], float)?,
            v: b.persistent(&[parameters], float)?,
            counters: b.persistent(&[4], DType::U32)?,
            lr: b.persistent(&[1], float)?,
            step: b.persistent(&[1], DType::U32)?,
            ids: b.persistent(&[rows, t], DType::U8)?,
            targets: b.persistent(&[rows, t], DType::U8)?,
            losses: b.persistent(&[parts * terms], float)?,
            loss_weight: b.persistent(&[1], float)?,
            ring: b.persistent(&[RING_STEPS, parts * (terms + shares) + RECORD_TAIL + retracted], float)?,
            scoring: Vec::new(),
            stream: Stream::new(&b, &config.model, memory.as_ref())?,
            spreads: b.persistent(&[retracted], float)?,
            largest_spreads: vec![0.0; retracted],
            drained: Vec::new(),
            pending: 0,
            next_step: 0,
            last_skipped: None,
            variant: hasher.finish(),
            facts: Facts::default(),
            asked: RefCell::default(),
            config: config.clone(),
            model,
            retracts_batched: b.has("retract_all"),
            muon,
            memory,
            jepa,
            latents: None,
            b,
        };
        let initial = learner.model.table.initial(config.seed);
        learner.upload(&learner.model.params, &initial)?;
        learner.set_teacher(&initial)?;
        learner.b.upload(arr1(&[1.0 / n as f64]).into_dyn().view(), &learner.loss_weight)?;
        Ok(learner)
    }

    /// The learner with a description of what computes.
    #[must_use]
    pub fn with_facts(mut self, facts: Facts) -> Self {
        self.facts = facts;
        self
    }

    /// The backend.
    pub fn backend(&self) -> &B {
        &self.b
    }

    /// The gradient of a batch at the present weights, in the order of the table, and the losses; changes nothing else.
    ///
    /// # Errors
    /// The batch has another shape than the run's; whatever the backend says.
    pub fn gradient(&self, batch: &Batch) -> Result<(Vec<f64>, Vec<f64>)> {
        self.upload_batch(batch)?;
        self.issue(&self.key("replay", [batch.rows, batch.len]), &self.asks(true, true), &mut |b| self.gradients(b))?;
        Ok((self.flat(&self.model.grads)?, self.flat(&self.losses)?))
    }

    /// The logits after each byte of a sequence, read one by one from its start.
    ///
    /// # Errors
    /// Whatever the backend says.
    pub fn read_along(&mut self, bytes: &[u8]) -> Result<Vec<Vec<f64>>> {
        self.stream.clear(&self.b)?;
        bytes.iter().map(|&byte| self.stream.read(self, byte)).collect()
    }

    /// Runs a step and notes what it asked for.
    fn issue(
        &self,
        key: &StepKey,
        asks: &[Ask],
        body: &mut dyn FnMut(&B) -> dormouse_reference::Result<()>,
    ) -> Result<()> {
        // What starts the step, such as the launch of a graph, belongs to no stage of it.
        self.b.stage("step");
        let ran = self.b.step(key, body);
        self.b.stage("reads");
        ran?;
        self.asked.borrow_mut().note(key, asks);
        Ok(())
    }

    /// What the passes of one step ask of the operations; a step with a backward pass has targets.
    fn asks(&self, targets: bool, backward: bool) -> Vec<Ask> {
        if !backward {
            return self.model.asks(targets, false);
        }
        let parts = self.config.train.accumulate as u64;
        let once = self.part_asks().into_iter();
        once.map(|ask| Ask { forward: parts * ask.forward, backward: parts * ask.backward, ..ask }).collect()
    }

    /// Plants a fault; for tests that show it being noticed.
    pub fn set_ablation(&mut self, ablation: Ablation) {
        self.model.ablation = ablation;
    }

    /// The parameter table.
    pub fn table(&self) -> &Table {
        &self.model.table
    }

    fn upload(&self, into: &B::Tensor, values: &[f64]) -> Result<()> {
        let shape = self.b.shape(into).to_vec();
        Ok(self.b.upload(ArrayView1::from(values).into_shape_with_order(IxDyn(&shape))?, into)?)
    }

    fn flat(&self, tensor: &B::Tensor) -> Result<Vec<f64>> {
        Ok(self.b.download(tensor)?.into_raw_vec_and_offset().0)
    }

    /// Brings a batch to the device; with a memory on the host, gives the names of its rows.
    fn upload_batch(&self, batch: &Batch) -> Result<Option<Names>> {
        let names = self.upload_bytes(batch)?;
        self.upload_objective(batch)?;
        Ok(names)
    }

    /// What every pass over a batch reads.
    fn upload_bytes(&self, batch: &Batch) -> Result<Option<Names>> {
        let (rows, t) = (self.config.train.batch_rows, self.config.data.seq_bytes);
        ensure!(
            (batch.rows, batch.len) == (rows, t),
            "step {}: the batch is {} rows of {} bytes, expected {rows} of {t}",
            batch.step,
            batch.rows,
            batch.len
        );
        self.b.upload(batch.ids().mapv(f64::from).into_dyn().view(), &self.ids)?;
        self.b.upload(batch.targets().mapv(f64::from).into_dyn().view(), &self.targets)?;
        let names = self.memory.as_ref().map(|memory| memory.upload(&self.b, &self.model, batch)).transpose()?;
        Ok(names.flatten())
    }

    /// Writes losses to where a step leaves them, from number `first` on.
    fn keep_losses<'a>(
        &self,
        b: &B,
        first: usize,
        losses: impl Iterator<Item = &'a B::Tensor>,
    ) -> dormouse_reference::Result<()>
    where
        B::Tensor: 'a,
    {
        let places = losses.enumerate().map(|(i, loss)| Ok((loss, b.view(&self.losses, first + i, &[1])?)));
        let places = places.collect::<dormouse_reference::Result<Vec<_>>>()?;
        b.keep_all(&places.iter().map(|(loss, place)| (*loss, place)).collect::<Vec<_>>())
    }

    /// Forward and backward of every part of the batch, into zeroed gradients.
    fn gradients(&self, b: &B) -> dormouse_reference::Result<()> {
        let (rows, t) = (self.config.train.batch_rows, self.config.data.seq_bytes);
        let (parts, n) = (self.config.train.accumulate, self.config.model.iterations);
        let part_rows = rows / parts;
        b.stage("backward");
        b.fill(&self.model.grads, 0.0)?;
        for part in 0..parts {
            let start = part * part_rows * t;
            let ids = b.view(&self.ids, start, &[part_rows, t])?;
            let targets = b.view(&self.targets, start, &[part_rows, t])?;
            let keys = |plain| self.memory.as_ref().map(|memory| memory.part(b, part, plain)).transpose();
            let (keys, plain_keys) = (keys(false)?, keys(true)?);
            let batch =
                model::Batch { ids: &ids, targets: Some(&targets), denominator: rows * t, memory: memory(&keys) };
            if let Some(jepa) = &self.jepa {
                self.objective_gradients(b, jepa, part, &batch, memory(&plain_keys))?;
                continue;
            }
            let forward = self.model.forward(b, &batch, None)?;
            b.stage("loss");
            self.keep_losses(b, part * n, forward.losses.iter())?;
            b.stage("backward");
            self.model.backward(b, &forward, &self.loss_weight)?;
        }
        match self.model.ablation {
            Ablation::NanLoss => b.fill(&b.view(&self.losses, 0, &[1])?, f64::NAN),
            Ablation::NanGradient => b.fill(&b.view(&self.model.grads, 0, &[1])?, f64::NAN),
            _ => Ok(()),
        }
    }

    /// Moves the ring's unread rows into `drained`.
    fn read_ring(&mut self) -> Result<()> {
        if self.pending == 0 {
            return Ok(());
        }
        let ring = self.b.download(&self.ring)?;
        let (parts, n) = (self.config.train.accumulate, self.config.model.iterations);
        for step in self.next_step - self.pending..self.next_step {
            let row = ring.index_axis(ndarray::Axis(0), step as usize % RING_STEPS);
            let row: Vec<f64> = row.iter().copied().collect();
            let terms = self.losses_of_part();
            let (losses, rest) = row.split_at(parts * terms);
            let (fixed, rest) = rest.split_at(RECORD_TAIL);
            let (spreads, shares) = rest.split_at(self.largest_spreads.len());
            let (ce, aux) = match &self.jepa {
                None => ((0..n).map(|i| (0..parts).map(|part| losses[part * n + i]).sum()).collect(), None),
                Some(jepa) => {
                    let (ce, aux) = jepa.combine(losses, shares, n);
                    (ce, Some(aux))
                }
            };
            let added = self.jepa.as_ref().zip(aux.as_ref()).map_or(0.0, |(jepa, aux)| jepa.added(aux));
            let &[norm, nonfinite, _scale, apply] = fixed else { bail!("a record has {} columns", row.len()) };
            for (largest, spread) in self.largest_spreads.iter_mut().zip(spreads) {
                *largest = largest.max(*spread);
            }
            if nonfinite > 0.0 {
                self.last_skipped = Some(step);
            }
            self.drained.push(StepRecord {
                step,
                loss: ce.iter().sum::<f64>() / n as f64 + added,
                ce,
                aux,
                grad_norm: norm,
                nonfinite: nonfinite as u64,
                applied: apply == 1.0,
            });
        }
        self.pending = 0;
        Ok(())
    }

    fn counters(&self) -> Result<[u32; 4]> {
        let values: Vec<u32> = self.flat(&self.counters)?.into_iter().map(|x| x as u32).collect();
        values.try_into().map_err(|_| anyhow::anyhow!("there are four counters"))
    }

    /// The key of a step: everything the closure depends on.
    fn key(&self, purpose: &'static str, shape: [usize; 2]) -> StepKey {
        let mut hasher = DefaultHasher::new();
        (purpose, shape, self.variant, self.model.ablation).hash(&mut hasher);
        StepKey { purpose, variant: hasher.finish() }
    }

    /// Nats of every position of `rows` windows of one length.
    fn nll(&mut self, rows: &[Vec<u8>]) -> Result<Vec<f64>> {
        let shape = [rows.len(), rows[0].len() - 1];
        if !self.scoring.iter().any(|s| s.shape == shape) {
            self.scoring.push(Scoring::new(&self.b, shape, self.memory.as_ref())?);
        }
        let at = self.scoring.iter().find(|s| s.shape == shape).expect("it was just added");
        let bytes = |from: usize| Array2::from_shape_fn(shape, |(r, i)| rows[r][i + from]);
        self.b.upload(bytes(0).mapv(f64::from).into_dyn().view(), &at.ids)?;
        self.b.upload(bytes(1).mapv(f64::from).into_dyn().view(), &at.targets)?;
        if let (Some(memory), Some(keys)) = (&self.memory, &at.keys) {
            keys.upload(&self.b, memory, &bytes(0))?;
        }
        self.issue(&self.key("eval", shape), &self.asks(true, false), &mut |b| {
            let targets = Some(&at.targets);
            let memory = at.keys.as_ref().map(Reading::memory);
            let batch = model::Batch { ids: &at.ids, targets, denominator: shape[0] * shape[1], memory };
            let forward = self.model.forward(b, &batch, None)?;
            b.keep(forward.nll.as_ref().expect("a forward pass with targets has them"), &at.nll)
        })?;
        self.flat(&at.nll)
    }
}

/// Persistent memory of an evaluation at one shape: a step that is replayed finds its batch at the same place.
struct Scoring<B: Backend> {
    shape: [usize; 2],
    ids: B::Tensor,
    targets: B::Tensor,
    nll: B::Tensor,
    keys: Option<Reading<B>>,
}

impl<B: Backend> Scoring<B> {
    fn new(b: &B, shape: [usize; 2], memory: Option<&MemoryPart<B>>) -> Result<Self> {
        Ok(Self {
            shape,
            ids: b.persistent(&shape, DType::U8)?,
            targets: b.persistent(&shape, DType::U8)?,
            nll: b.persistent(&shape, b.float())?,
            keys: memory.map(|memory| Reading::new(b, memory, shape)).transpose()?,
        })
    }
}

/// Persistent memory that carries a sequence from one byte to the next.
struct Stream<B: Backend> {
    carry: Vec<Carry<B::Tensor>>,
    /// `[1, 1]`
    id: B::Tensor,
    /// `[1, 1, 256]`
    logits: B::Tensor,
    keys: Option<Reading<B>>,
}

impl<B: Backend> Stream<B> {
    fn new(b: &B, m: &ModelConfig, memory: Option<&MemoryPart<B>>) -> Result<Self> {
        let context = || b.persistent(&[1, model::CONV_WIDTH - 1, m.heads * m.head_width], b.float());
        let carry = (0..m.iterations)
            .map(|_| {
                Ok(Carry {
                    conv: [context()?, context()?, context()?],
                    state: b.persistent(&[1, m.heads, m.head_width, m.head_width], b.float())?,
                })
            })
            .collect::<std::result::Result<Vec<_>, Error>>()?;
        Ok(Self {
            carry,
            id: b.persistent(&[1, 1], DType::U8)?,
            logits: b.persistent(&[1, 1, VOCABULARY], b.float())?,
            keys: memory.map(|memory| Reading::new(b, memory, [1, 1])).transpose()?,
        })
    }

    /// Back to the start of a sequence.
    fn clear(&self, b: &B) -> Result<()> {
        for carry in &self.carry {
            for context in &carry.conv {
                b.fill(context, 0.0)?;
            }
            b.fill(&carry.state, 0.0)?;
        }
        if let Some(keys) = &self.keys {
            keys.clear();
        }
        Ok(())
    }

    /// Reads one byte and gives the logits of the next: O(1) a byte.
    fn read(&self, learner: &ModelLearner<B>, byte: u8) -> Result<Vec<f64>>
    where
        B: Witness,
    {
        let b = &learner.b;
        b.upload(ArrayD::from_elem(IxDyn(&[1, 1]), f64::from(byte)).view(), &self.id)?;
        if let (Some(memory), Some(keys)) = (&learner.memory, &self.keys) {
            keys.upload_next(b, memory, byte)?;
        }
        learner.issue(&learner.key("generate", [1, 1]), &learner.asks(false, false), &mut |b| {
            let memory = self.keys.as_ref().map(Reading::memory);
            let batch = model::Batch { ids: &self.id, targets: None, denominator: 1, memory };
            let forward = learner.model.forward(b, &batch, Some(&self.carry))?;
            for (new, kept) in forward.carry.iter().zip(&self.carry) {
                for (new, kept) in new.conv.iter().zip(&kept.conv) {
                    b.keep(new, kept)?;
                }
                b.keep(&new.state, &kept.state)?;
            }
            b.keep(forward.logits.last().expect("a model has an iteration"), &self.logits)
        })?;
        learner.flat(&self.logits)
    }
}

impl<B: Backend + Witness> Learner for ModelLearner<B> {
    fn step(&mut self, batch: &Batch, lr: f64) -> Result<()> {
        if self.pending as usize == RING_STEPS {
            self.read_ring()?;
        }
        ensure!(
            self.pending == 0 || batch.step == self.next_step,
            "step {} follows step {}; steps come in order",
            batch.step,
            self.next_step - 1
        );
        self.b.stage("data");
        let names = self.upload_batch(batch)?;
        self.upload(&self.lr, &[lr])?;
        if let Some(part) = &self.muon {
            self.upload(&part.lr, &[part.ratio * lr])?;
        }
        self.upload(&self.step, &[(batch.step % RING_STEPS as u64) as f64])?;
        if batch.step.is_multiple_of(RING_STEPS as u64) && self.latched().is_none() {
            self.upload(&self.b.view(&self.counters, 2, &[1])?, &[0.0])?;
        }
        let retracts = (batch.step + 1).is_multiple_of(self.config.optimizer.retract_every_steps);
        let shape = [batch.rows, batch.len];
        let purpose = if retracts { "train" } else { "train without retraction" };
        let mut asks = self.asks(true, true);
        asks.extend(self.update_asks(retracts));
        self.issue(&self.key(purpose, shape), &asks, &mut |b| {
            self.gradients(b)?;
            self.update(b, retracts)
        })?;
        if let Some(names) = names {
            self.update_host_table(names, batch.step, lr)?;
        }
        if let Some(jepa) = self.jepa.as_ref().filter(|jepa| jepa.reads_targets()) {
            jepa.read.set(jepa.read.get() + 1);
        }
        self.next_step = batch.step + 1;
        self.pending += 1;
        Ok(())
    }

    fn drain(&mut self) -> Result<Vec<StepRecord>> {
        self.read_ring()?;
        Ok(std::mem::take(&mut self.drained))
    }

    fn latched(&self) -> Option<Latch> {
        // A device that cannot be read has a worse fault than a latch; the next call that can fail will say so.
        let counters = self.counters().ok()?;
        let step = self.last_skipped.or(self.next_step.checked_sub(1))?;
        (counters[3] != 0).then_some(Latch { skipped: u64::from(counters[2]), step })
    }

    fn evaluate(&mut self, windows: &[Vec<u8>]) -> Result<Vec<f64>> {
        let mut all = Vec::new();
        for rows in windows.chunks(EVAL_ROWS) {
            let len = rows[0].len();
            ensure!(len >= 2 && rows.iter().all(|r| r.len() == len), "windows have one length of two bytes or more");
            all.extend(self.nll(rows)?);
        }
        Ok(all)
    }

    fn sample(
        &mut self,
        prompt: &[u8],
        bytes: usize,
        temperature: f64,
        seed: u64,
        emit: &mut dyn FnMut(Option<u8>) -> bool,
    ) -> Result<()> {
        ensure!(!prompt.is_empty(), "the prompt is empty; give at least one byte");
        self.stream.clear(&self.b)?;
        let mut logits = Vec::new();
        for &byte in prompt {
            logits = self.stream.read(self, byte)?;
            if !emit(None) {
                return Ok(());
            }
        }
        for position in 0..bytes {
            let uniform: f64 = stream(seed, Purpose::Sample, position as u64, 0).random();
            let byte = choose(&logits, temperature, uniform);
            if !emit(Some(byte)) || position + 1 == bytes {
                break;
            }
            logits = self.stream.read(self, byte)?;
        }
        Ok(())
    }

    fn export(&self) -> Result<State> {
        let counters = self.counters()?;
        let mut state = State { updates: u64::from(counters[0]), ..State::default() };
        let buffers = [("", &self.model.params), ("m.", &self.m), ("v.", &self.v)];
        for (prefix, buffer) in buffers {
            let flat = self.flat(buffer)?;
            for param in self.flat_params() {
                let values = flat[param.range()].iter().map(|&x| x as f32).collect();
                let tensor = Tensor::f32(&param.shape, values);
                let into = if prefix.is_empty() { &mut state.weights } else { &mut state.optimizer };
                into.insert(format!("{prefix}{}", param.name), tensor);
            }
        }
        state.optimizer.insert("counters".to_owned(), Tensor::u32(&[4], counters.to_vec()));
        if let Some(memory) = &self.memory {
            memory.export(&self.b, &mut state, self.waiting()?)?;
        }
        self.export_teacher(&mut state)?;
        Ok(state)
    }

    fn import(&mut self, state: &State) -> Result<()> {
        // Everything is checked before anything changes.
        let state = &*memory::placed(state, self.config.model.engram)?;
        let table = &self.model.table;
        let gather = |tensors: &std::collections::BTreeMap<String, Tensor>, prefix: &str| -> Result<Vec<f64>> {
            let mut flat = Vec::with_capacity(table.len());
            for param in self.flat_params() {
                let name = format!("{prefix}{}", param.name);
                let tensor = tensors.get(&name).with_context(|| format!("checkpoint: tensor `{name}` is missing"))?;
                ensure!(
                    tensor.shape == param.shape,
                    "checkpoint: tensor `{name}` is {:?}, expected {:?}",
                    tensor.shape,
                    param.shape
                );
                let TensorData::F32(values) = &tensor.data else { bail!("checkpoint: tensor `{name}` is not f32") };
                flat.extend(values.iter().map(|&x| f64::from(x)));
            }
            // The room for the rows of a table on the host is filled before every step.
            flat.resize(table.len(), 0.0);
            Ok(flat)
        };
        let known = |name: &str| self.flat_params().any(|p| p.name == name);
        if let Some(unknown) = state.weights.keys().find(|name| !known(name)) {
            bail!("checkpoint: tensor `{unknown}` is none of this model's");
        }
        let params = gather(&state.weights, "")?;
        let teacher = self.teacher_of(state, &params)?;
        let (m, v) = (gather(&state.optimizer, "m.")?, gather(&state.optimizer, "v.")?);
        let counters = state.optimizer.get("counters").and_then(Tensor::as_u32);
        let counters = counters.filter(|c| c.len() == 4).context("checkpoint: `counters` is not four u32")?;
        let counters: Vec<f64> = counters.iter().map(|&x| f64::from(x)).collect();
        let incoming = self.memory.as_ref().map(|memory| memory.incoming(state)).transpose()?;
        if let (Some(memory), Some(incoming)) = (&mut self.memory, incoming) {
            memory.import(&self.b, incoming)?;
        }
        self.upload(&self.model.params, &params)?;
        self.upload(&self.m, &m)?;
        self.upload(&self.v, &v)?;
        self.upload(&self.counters, &counters)?;
        self.set_teacher(&teacher)?;
        self.drained.clear();
        self.pending = 0;
        self.last_skipped = None;
        self.largest_spreads.fill(0.0);
        Ok(())
    }

    fn drift(&self) -> Result<Vec<Drift>> {
        let flat = self.flat(&self.model.params)?;
        let retracted = self.model.table.params.iter().filter(|p| p.retracted);
        Ok(retracted
            .zip(&self.largest_spreads)
            .map(|(param, &spread)| {
                let (rows, columns) = (param.shape[param.shape.len() - 2], param.shape[param.shape.len() - 1]);
                let error = |matrix: &[f64]| {
                    let x = DMatrix::from_row_slice(rows, columns, matrix);
                    (x.transpose() * &x - DMatrix::identity(columns, columns)).norm() / columns as f64
                };
                let orthonormality = flat[param.range()].chunks(rows * columns).map(error).fold(0.0, f64::max);
                Drift { name: param.name.to_owned(), orthonormality, spread }
            })
            .collect())
    }

    fn parameters(&self) -> Vec<Parameter> {
        parameters(&self.config)
    }

    fn first_nonfinite(&mut self, batch: &Batch) -> Result<Option<String>> {
        let bad = |values: &[f64]| values.iter().any(|x| !x.is_finite());
        let named = |flat: &[f64], what: &str| {
            let param = self.model.table.params.iter().find(|p| bad(&flat[p.range()]));
            param.map(|p| format!("{what} `{}`", p.name))
        };
        if let Some(found) = named(&self.flat(&self.model.params)?, "weight") {
            return Ok(Some(found));
        }
        let (gradient, losses) = self.gradient(batch)?;
        Ok(if bad(&losses) { Some("loss".to_owned()) } else { named(&gradient, "gradient of") })
    }

    fn latents(&mut self, batch: &Batch) -> Result<Vec<f32>> {
        self.latents_of_batch(batch)
    }

    fn facts(&self) -> Facts {
        let targets = self.jepa.as_ref().and_then(JepaPart::targets);
        Facts { products: self.b.products(), targets, ..self.facts.clone() }
    }

    fn witness(&self) -> Option<&dyn Witness> {
        self.b.counts().then_some(&self.b as &dyn Witness)
    }

    fn engagement(&self) -> Option<Engagement> {
        let b = &self.b;
        let account = || Engagement::new(&self.asked.borrow(), &b.ledgers(), b.captures());
        b.counts().then(|| account().with_jepa(self.objectives()).with_declined(&self.facts.declined))
    }
}

/// Draws a byte from the logits; temperature 0 takes the likeliest, the lowest on ties.
fn choose(logits: &[f64], temperature: f64, uniform: f64) -> u8 {
    let best = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if temperature <= 0.0 {
        return logits.iter().position(|&x| x == best).unwrap_or(0) as u8;
    }
    let weights: Vec<f64> = logits.iter().map(|x| ((x - best) / temperature).exp()).collect();
    let mut left = uniform * weights.iter().sum::<f64>();
    for (byte, weight) in weights.iter().enumerate() {
        left -= weight;
        if left < 0.0 {
            return byte as u8;
        }
    }
    // Rounding can leave a sliver after the last byte; it belongs to the last byte that has any weight.
    weights.iter().rposition(|&w| w > 0.0).unwrap_or(0) as u8
}

#[cfg(test)]
mod counting;

#[cfg(test)]
mod tests;
