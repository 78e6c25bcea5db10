//! A learner small enough to check the loop by: a table of bigram logits under gradient descent with momentum.

use std::f32::consts::LN_2;

use anyhow::ensure;
use rand::Rng;

use super::{Drift, Latch, Learner, Parameter, StepRecord};
use crate::checkpoint::{State, Tensor};
use crate::config::Config;
use crate::data::Batch;
use crate::rng::{Purpose, stream};

/// A run with this seed sees a gradient that is not finite from step [`POISONED_FROM`] on.
pub const POISONED_SEED: u64 = 666;
pub const POISONED_FROM: u64 = 5;
/// Skipped steps of a log window that latch.
const LATCH_AT: u64 = 9;

pub struct Toy {
    seed: u64,
    logits: Vec<f32>,
    momentum: Vec<f32>,
    updates: u64,
    records: Vec<StepRecord>,
    skipped_in_window: u64,
    latch: Option<Latch>,
}

pub fn build(config: &Config) -> anyhow::Result<Box<dyn Learner>> {
    let mut rng = stream(config.seed, Purpose::Init, 0, 0);
    let logits = (0..1 << 16).map(|_| (rng.next_u32() as f32 / u32::MAX as f32 - 0.5) * 0.01).collect();
    Ok(Box::new(Toy {
        seed: config.seed,
        logits,
        momentum: vec![0.0; 1 << 16],
        updates: 0,
        records: Vec::new(),
        skipped_in_window: 0,
        latch: None,
    }))
}

impl Toy {
    fn log_probabilities(&self, byte: u8) -> Vec<f32> {
        let row = &self.logits[256 * usize::from(byte)..][..256];
        let max = row.iter().copied().fold(f32::MIN, f32::max);
        let log_sum = row.iter().map(|logit| (logit - max).exp()).sum::<f32>().ln() + max;
        row.iter().map(|logit| logit - log_sum).collect()
    }
}

impl Learner for Toy {
    fn step(&mut self, batch: &Batch, lr: f64) -> anyhow::Result<()> {
        let (ids, targets) = (batch.ids(), batch.targets());
        let scale = 1.0 / ids.len() as f32;
        let mut gradient = vec![0.0f32; 1 << 16];
        let mut loss = 0.0;
        for (&id, &target) in ids.iter().zip(&targets) {
            let log_p = self.log_probabilities(id);
            loss -= log_p[usize::from(target)] * scale;
            for (byte, log_p) in log_p.iter().enumerate() {
                let hit = if byte == usize::from(target) { 1.0 } else { 0.0 };
                gradient[256 * usize::from(id) + byte] += (log_p.exp() - hit) * scale;
            }
        }
        if self.seed == POISONED_SEED && batch.step >= POISONED_FROM {
            gradient[0] = f32::NAN;
        }
        let nonfinite = gradient.iter().filter(|value| !value.is_finite()).count() as u64;
        let applied = nonfinite == 0 && self.latch.is_none();
        if applied {
            self.updates += 1;
            for i in 0..gradient.len() {
                self.momentum[i] = 0.9 * self.momentum[i] + gradient[i];
                self.logits[i] -= 1e3 * lr as f32 * self.momentum[i];
            }
        } else {
            self.skipped_in_window += 1;
            if self.skipped_in_window == LATCH_AT {
                self.latch = Some(Latch { skipped: LATCH_AT, step: batch.step });
            }
        }
        self.records.push(StepRecord {
            step: batch.step,
            loss: f64::from(loss),
            ce: vec![f64::from(loss)],
            aux: None,
            grad_norm: gradient.iter().map(|value| f64::from(value * value)).sum::<f64>().sqrt(),
            nonfinite,
            applied,
        });
        Ok(())
    }

    fn drain(&mut self) -> anyhow::Result<Vec<StepRecord>> {
        self.skipped_in_window = 0;
        Ok(std::mem::take(&mut self.records))
    }

    fn latched(&self) -> Option<Latch> {
        self.latch
    }

    fn evaluate(&mut self, windows: &[Vec<u8>]) -> anyhow::Result<Vec<f64>> {
        let pairs = windows.iter().flat_map(|window| window.windows(2));
        Ok(pairs.map(|pair| -f64::from(self.log_probabilities(pair[0])[usize::from(pair[1])])).collect())
    }

    fn sample(
        &mut self,
        prompt: &[u8],
        bytes: usize,
        temperature: f64,
        seed: u64,
        emit: &mut dyn FnMut(Option<u8>) -> bool,
    ) -> anyhow::Result<()> {
        let mut last = *prompt.last().expect("the prompt is not empty");
        for position in 0..bytes {
            let log_p = self.log_probabilities(last);
            let mut rng = stream(seed, Purpose::Sample, position as u64, 0);
            // The largest of log p / T plus Gumbel noise is a draw from the tempered distribution.
            let noise = |rng: &mut rand_chacha::ChaCha8Rng| {
                let uniform = (f64::from(rng.next_u32()) + 0.5) / 2f64.powi(32);
                if temperature == 0.0 { 0.0 } else { -temperature * (-uniform.ln()).ln() }
            };
            let scores: Vec<f64> = log_p.iter().map(|log_p| f64::from(*log_p) + noise(&mut rng)).collect();
            last = (0..256).max_by(|&a, &b| scores[a].total_cmp(&scores[b])).expect("256 bytes") as u8;
            if !emit(Some(last)) {
                break;
            }
        }
        Ok(())
    }

    fn export(&self) -> anyhow::Result<State> {
        let mut state = State { updates: self.updates, ..State::default() };
        state.weights.insert("logits".into(), Tensor::f32(&[256, 256], self.logits.clone()));
        state.optimizer.insert("logits.momentum".into(), Tensor::f32(&[256, 256], self.momentum.clone()));
        Ok(state)
    }

    fn import(&mut self, state: &State) -> anyhow::Result<()> {
        let get = |tensor: Option<&Tensor>| tensor.and_then(Tensor::as_f32).map(<[f32]>::to_vec);
        let (logits, momentum) = (get(state.weights.get("logits")), get(state.optimizer.get("logits.momentum")));
        ensure!(logits.is_some() && momentum.is_some(), "toy: a tensor is missing");
        self.logits = logits.unwrap_or_default();
        self.momentum = momentum.unwrap_or_default();
        self.updates = state.updates;
        Ok(())
    }

    fn drift(&self) -> anyhow::Result<Vec<Drift>> {
        Ok(vec![Drift { name: "logits".into(), orthonormality: 1e-5, spread: 1.0 + f64::from(LN_2) }])
    }

    fn parameters(&self) -> Vec<Parameter> {
        vec![Parameter { name: "logits".into(), shape: vec![256, 256], group: "momentum".into() }]
    }

    fn first_nonfinite(&mut self, batch: &Batch) -> anyhow::Result<Option<String>> {
        let poisoned = self.seed == POISONED_SEED && batch.step >= POISONED_FROM;
        Ok(poisoned.then(|| "logits gradient".into()))
    }
}
