//! The JEPA objective in a run: where the teacher's latents come from, how the terms of a step's parts make its loss,
//! and how the teacher follows the model.
//!
//! A step in parts has the same loss and gradient as one in whole, but for koleo: a part's cross-entropy counts by its
//! share of the positions that the loss is over, and its distance to the teacher by its share of the masked positions.
//! koleo looks for neighbours within a part alone; its terms are averaged by the same share (docs/adr/0021).
//!
//! How many positions are masked differs from step to step. So all weights are persistent memory that the host fills
//! before the step, from the mask that came with the batch.

use std::cell::{Cell, RefCell};

use anyhow::{Context, Result, bail, ensure};
use dormouse_cuda::Pass as Direction;
use dormouse_reference::ema::{self, Ema};
use dormouse_reference::{Backend, DType, beside};
use ndarray::{ArrayView1, IxDyn};

use super::ModelLearner;
use super::memory::memory;
use crate::checkpoint::{State, Tensor};
use crate::config::{Config, JepaMode};
use crate::data::Batch;
use crate::instruments::{Ask, Objective, Witness};
use crate::jepa_targets::{Ahead, Reader};
use crate::model::{self, Ablation, JEPA_STEMS, KOLEO_WEIGHT, Memory, Pass, Table, Upstream};
use crate::train::Aux;

/// Terms of the objective that a part of a step adds to its losses: jepa and koleo.
pub(super) const TERMS: usize = 2;

/// Weights of a part: those of the cross-entropy, of jepa and of koleo in the gradient.
const WEIGHTS: usize = 3;

/// Shares of a part: of the positions that the cross-entropy is over, and of the masked positions.
pub(super) const SHARES: usize = 2;

/// The objective of a run.
pub(super) struct JepaPart<B: Backend> {
    mode: JepaMode,
    weight: f64,
    /// `[rows, t]`, 1 where the student does not see the byte.
    mask: B::Tensor,
    /// `[rows, t]`, 1 where it does.
    visible: B::Tensor,
    /// `[parts * WEIGHTS]`
    weights: B::Tensor,
    /// `[parts * SHARES]`; travels with the record of every step.
    pub shares: B::Tensor,
    source: Source<B>,
    /// Training steps whose latents were read from a file.
    pub read: Cell<u64>,
}

/// Where the teacher's latents come from.
enum Source<B: Backend> {
    /// A teacher that follows the model.
    Teacher {
        /// The flat parameters; mirrors the model's.
        params: B::Tensor,
        ema: ema::Config,
    },
    /// A frozen one, whose latents were computed before the run.
    Targets {
        /// `[rows, t, d]`, 0 where nothing is masked.
        latents: B::Tensor,
        reader: Box<RefCell<Ahead>>,
    },
}

impl<B: Backend + Witness> JepaPart<B> {
    /// The objective of a configuration, or nothing. The teacher has yet to be given its parameters.
    pub fn new(b: &B, config: &Config, table: &Table) -> Result<Option<Self>> {
        let c = &config.jepa;
        if !c.on() {
            return Ok(None);
        }
        let wanted = JEPA_STEMS.into_iter().chain(c.has_teacher().then_some("ema"));
        let missing: Vec<&str> = wanted.filter(|stem| !b.has(stem)).collect();
        ensure!(
            missing.is_empty(),
            "jepa.mode is not off, and {} has no kernels of {}; give --backend cpu, or --set jepa.mode=off",
            b.name(),
            missing.join(", ")
        );
        let (rows, t, parts) = (config.train.batch_rows, config.data.seq_bytes, config.train.accumulate);
        let source = match c.targets() {
            Some(path) => {
                let reader = Reader::open(path)?;
                reader.require_for(config)?;
                let latents = b.persistent(&[rows, t, config.model.width], b.float())?;
                Source::Targets { latents, reader: Box::new(RefCell::new(Ahead::new(reader))) }
            }
            None => Source::Teacher {
                params: b.persistent(&[table.len()], b.float())?,
                ema: ema::Config { momentum: c.momentum, ranges: table.ranges_without_rows() },
            },
        };
        Ok(Some(Self {
            mode: c.mode,
            weight: c.weight,
            mask: b.persistent(&[rows, t], DType::U8)?,
            visible: b.persistent(&[rows, t], DType::U8)?,
            weights: b.persistent(&[parts * WEIGHTS], b.float())?,
            shares: b.persistent(&[parts * SHARES], b.float())?,
            source,
            read: Cell::new(0),
        }))
    }

    /// The loss of a step and its terms, from those of its parts: per iteration the cross-entropy, then jepa and koleo.
    pub fn combine(&self, losses: &[f64], shares: &[f64], iterations: usize) -> (Vec<f64>, Aux) {
        let parts = losses.chunks(iterations + TERMS).zip(shares.chunks(SHARES));
        let mut sums = vec![0.0; iterations + TERMS];
        for (losses, shares) in parts {
            for (i, (sum, loss)) in sums.iter_mut().zip(losses).enumerate() {
                *sum += shares[usize::from(i >= iterations)] * loss;
            }
        }
        // Without a masked byte there is nothing to predict, and a zero would look like a perfect prediction.
        let masked = shares.chunks(SHARES).any(|shares| shares[1] > 0.0);
        let term = |i: usize| masked.then_some(sums[iterations + i]);
        let aux = Aux { jepa: term(0), koleo: term(1) };
        sums.truncate(iterations);
        (sums, aux)
    }

    /// What is added to the mean cross-entropy.
    pub fn added(&self, aux: &Aux) -> f64 {
        self.weight * (aux.jepa.unwrap_or(0.0) + KOLEO_WEIGHT * aux.koleo.unwrap_or(0.0))
    }

    /// Whether the latents come from a file.
    pub fn reads_targets(&self) -> bool {
        matches!(self.source, Source::Targets { .. })
    }

    /// BLAKE3 of the teacher of a file of latents, hexadecimal.
    pub fn targets(&self) -> Option<String> {
        match &self.source {
            Source::Teacher { .. } => None,
            Source::Targets { reader, .. } => {
                Some(blake3::Hash::from(reader.borrow().header().source).to_hex().to_string())
            }
        }
    }

    fn teacher(&self) -> Option<&B::Tensor> {
        match &self.source {
            Source::Teacher { params, .. } => Some(params),
            Source::Targets { .. } => None,
        }
    }
}

impl<B: Backend + Witness> ModelLearner<B> {
    /// Mask, weights and, where they come from a file, the teacher's latents of a batch.
    pub(super) fn upload_objective(&self, batch: &Batch) -> Result<()> {
        let Some(part) = &self.jepa else { return Ok(()) };
        let (parts, n) = (self.config.train.accumulate, self.config.model.iterations as f64);
        let mask = batch.mask.as_ref().filter(|mask| mask.len() == batch.rows * batch.len).with_context(|| {
            let got = batch.mask.as_ref().map_or("none".to_owned(), |mask| mask.len().to_string());
            format!("step {}: the batch has a mask of {} positions, got {got}", batch.step, batch.rows * batch.len)
        })?;
        let number = |x: bool| f64::from(u8::from(x));
        self.upload(&part.mask, &mask.iter().map(|&masked| number(masked)).collect::<Vec<_>>())?;
        self.upload(&part.visible, &mask.iter().map(|&masked| number(!masked)).collect::<Vec<_>>())?;
        let all = mask.iter().filter(|masked| **masked).count();
        let share = |count: usize, of: usize| if of == 0 { 0.0 } else { count as f64 / of as f64 };
        let (mut shares, mut weights) = (Vec::new(), Vec::new());
        for positions in mask.chunks(mask.len() / parts) {
            let masked = positions.iter().filter(|masked| **masked).count();
            let visible = match part.mode {
                JepaMode::Shared => share(positions.len() - masked, mask.len() - all),
                // The plain pass divides by all positions of the batch itself.
                JepaMode::Separate | JepaMode::Off => 1.0,
            };
            let masked = share(masked, all);
            shares.extend([visible, masked]);
            weights.extend([visible / n, part.weight * masked, part.weight * KOLEO_WEIGHT * masked]);
        }
        self.upload(&part.shares, &shares)?;
        self.upload(&part.weights, &weights)?;
        if let Source::Targets { latents, reader } = &part.source {
            let mut reader = reader.borrow_mut();
            let values = ArrayView1::from(reader.read(batch.step, mask)?);
            let shape = IxDyn(self.b.shape(latents));
            self.b.upload_f32(values.into_shape_with_order(shape)?, latents)?;
        }
        Ok(())
    }

    /// Forward and backward of part number `index` of a batch with the objective, into gradients and losses. The batch has
    /// the keys of what the student sees; `plain_keys` are of its bytes.
    pub(super) fn objective_gradients(
        &self,
        b: &B,
        part: &JepaPart<B>,
        index: usize,
        batch: &model::Batch<'_, B::Tensor>,
        plain_keys: Option<Memory<'_, B::Tensor>>,
    ) -> dormouse_reference::Result<()> {
        let shape = b.shape(batch.ids).to_vec();
        let positions = shape.iter().product::<usize>();
        let of_part = |tensor| b.view(tensor, index * positions, &shape);
        let (mask, visible) = (of_part(&part.mask)?, of_part(&part.visible)?);
        let weight = |i: usize| b.view(&part.weights, index * WEIGHTS + i, &[1]);
        let (weight_ce, weight_jepa, weight_koleo) = (weight(0)?, weight(1)?, weight(2)?);
        let upstream = Upstream { jepa: &weight_jepa, koleo: &weight_koleo };
        let model = &self.model;
        let unlabelled = model::Batch { targets: None, ..*batch };
        let plain = model::Batch { memory: plain_keys, ..*batch };

        let ((targets, teacher), (forward, weight)) = beside(
            b,
            |b| match &part.source {
                Source::Teacher { params, .. } => {
                    let pass = model.teacher_pass(params, &mask);
                    let seen = model::Batch { targets: None, ..plain };
                    let forward = model.forward_pass(b, &seen, None, pass)?;
                    Ok((latents_of(&forward), Some(forward)))
                }
                Source::Targets { latents, .. } => {
                    let width = self.config.model.width;
                    Ok((b.view(latents, index * positions * width, &[shape[0], shape[1], width])?, None))
                }
            },
            |b| match part.mode {
                JepaMode::Shared => {
                    let pass = Pass::Shared { mask: &mask, visible: &visible };
                    Ok((model.forward_pass(b, batch, None, pass)?, Some(&weight_ce)))
                }
                JepaMode::Separate | JepaMode::Off => {
                    Ok((model.forward_pass(b, &unlabelled, None, Pass::Masked { mask: &mask })?, None))
                }
            },
        )?;
        let objective = model.objective(b, &latents_of(&forward), &targets, &mask)?;
        let first = index * (self.config.model.iterations + TERMS);
        if part.mode == JepaMode::Shared {
            self.keep_losses(b, first, forward.losses.iter().chain([&objective.jepa, &objective.koleo]))?;
        } else {
            self.keep_losses(b, first + self.config.model.iterations, [&objective.jepa, &objective.koleo].into_iter())?;
        }
        model.backward_of_objective(b, &forward, weight, &objective, upstream)?;
        // What the pass saved is large, and nobody reads it from here on.
        drop(forward);
        if let (Ablation::TeacherGradient, Some(teacher)) = (model.ablation, &teacher) {
            model.teacher_backward(b, teacher, &objective, upstream)?;
        }
        if part.mode == JepaMode::Separate {
            let forward = model.forward(b, &plain, None)?;
            self.keep_losses(b, first, forward.losses.iter())?;
            model.backward(b, &forward, &weight_ce)?;
        }
        Ok(())
    }

    /// What the passes over one part of a step ask of the operations.
    pub(super) fn part_asks(&self) -> Vec<Ask> {
        match &self.jepa {
            None => self.model.asks(true, true),
            Some(part) => self.model.jepa_asks(part.mode, !part.reads_targets()),
        }
    }

    /// The teacher follows the model, if the step's update applies.
    pub(super) fn follow(&self, b: &B, apply: &B::Tensor) -> dormouse_reference::Result<()> {
        let Some(JepaPart { source: Source::Teacher { params, ema }, .. }) = &self.jepa else { return Ok(()) };
        b.stage("ema");
        Ema::update(b, ema, ema::Inputs { teacher: params, online: &self.model.params, apply })
    }

    /// Losses of one part of a step.
    pub(super) fn losses_of_part(&self) -> usize {
        self.config.model.iterations + if self.jepa.is_some() { TERMS } else { 0 }
    }

    /// The flat parameters of a checkpoint's teacher; where there is none, nothing that anyone reads.
    ///
    /// # Errors
    /// The checkpoint has no teacher and the run needs one, or the other way round; a tensor does not fit. A teacher
    /// that started over in silence would change the run.
    pub(super) fn teacher_of(&self, state: &State, weights: &[f64]) -> Result<Vec<f64>> {
        if self.jepa.as_ref().and_then(JepaPart::teacher).is_none() {
            ensure!(state.teacher.is_empty(), "checkpoint: it has a teacher, and this run has none");
            return Ok(Vec::new());
        }
        let mut flat = weights.to_vec();
        let table = &self.model.table;
        for param in table.without_rows() {
            let name = param.name;
            let tensor =
                state.teacher.get(name).with_context(|| format!("checkpoint: the teacher's `{name}` is missing"))?;
            let (got, want) = (&tensor.shape, &param.shape);
            ensure!(got == want, "checkpoint: the teacher's `{name}` is {got:?}, expected {want:?}");
            let values = tensor.as_f32().with_context(|| format!("checkpoint: the teacher's `{name}` is not f32"))?;
            for (to, &from) in flat[param.range()].iter_mut().zip(values) {
                *to = f64::from(from);
            }
        }
        match state.teacher.keys().find(|name| !table.without_rows().any(|p| p.name == **name)) {
            Some(unknown) => bail!("checkpoint: the teacher's `{unknown}` is none of this model's"),
            None => Ok(flat),
        }
    }

    /// Whose latents the training steps had so far: student and teacher by the calls that ran, targets by what was
    /// read.
    pub(super) fn objectives(&self) -> Option<Objective> {
        let part = self.jepa.as_ref()?;
        let ledgers = self.b.ledgers();
        let steps = ledgers.iter().filter(|(purpose, _)| purpose.starts_with("train"));
        let (mut student, mut teacher) = (0, 0);
        for (&(stem, pass, _), calls) in steps.flat_map(|(_, ledger)| &ledger.calls) {
            match (stem, pass) {
                ("jepa", Direction::Forward) => student += calls,
                ("ema", Direction::Forward) => teacher += calls,
                _ => {}
            }
        }
        let parts = self.config.train.accumulate as u64;
        Some(Objective { student: student / parts, teacher, targets: part.read.get() })
    }

    /// Gives the teacher these flat parameters, where there is one.
    pub(super) fn set_teacher(&self, flat: &[f64]) -> Result<()> {
        match self.jepa.as_ref().and_then(JepaPart::teacher) {
            Some(params) => self.upload(params, flat),
            None => Ok(()),
        }
    }

    /// The teacher's tensors for a checkpoint.
    pub(super) fn export_teacher(&self, state: &mut State) -> Result<()> {
        let Some(params) = self.jepa.as_ref().and_then(JepaPart::teacher) else { return Ok(()) };
        let flat = self.flat(params)?;
        for param in self.model.table.without_rows() {
            let values = flat[param.range()].iter().map(|&x| x as f32).collect();
            state.teacher.insert(param.name.to_owned(), Tensor::f32(&param.shape, values));
        }
        Ok(())
    }

    /// The last iteration's latents of every position (`rows * t * d`) on unmasked bytes, part by part as a step has
    /// them.
    pub(super) fn latents_of_batch(&mut self, batch: &Batch) -> Result<Vec<f32>> {
        self.upload_bytes(batch)?;
        let (rows, t, width) = (batch.rows, batch.len, self.config.model.width);
        // One place for all calls: a step that is replayed writes where it wrote.
        let kept = match &self.latents {
            Some(kept) => kept.clone(),
            None => self.latents.insert(self.b.persistent(&[rows, t, width], self.b.float())?).clone(),
        };
        let parts = self.config.train.accumulate;
        let asks: Vec<Ask> = (0..parts).flat_map(|_| self.model.latent_asks(false)).collect();
        self.issue(&self.key("latents", [rows, t]), &asks, &mut |b| {
            for part in 0..parts {
                let shape = [rows / parts, t];
                let start = part * shape[0] * t;
                let ids = b.view(&self.ids, start, &shape)?;
                let keys = self.memory.as_ref().map(|memory| memory.part(b, part, true)).transpose()?;
                let batch = model::Batch { ids: &ids, targets: None, denominator: 1, memory: memory(&keys) };
                let forward = self.model.forward_pass(b, &batch, None, Pass::Teacher { params: &self.model.params })?;
                b.keep(&latents_of(&forward), &b.view(&kept, start * width, &[shape[0], t, width])?)?;
            }
            Ok(())
        })?;
        Ok(self.flat(&kept)?.into_iter().map(|x| x as f32).collect())
    }
}

fn latents_of<B: Backend>(forward: &model::Forward<B>) -> B::Tensor {
    forward.latents.clone().expect("the pass is for its latents")
}

#[cfg(test)]
mod tests;
