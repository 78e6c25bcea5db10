//! The update of a step: norm and flags, the optimisers, retraction, the record. Nothing in it is read by the host.

use dormouse_reference::adamw::{self, Adamw};
use dormouse_reference::muon::{self, Muon};
use dormouse_reference::record::Record;
use dormouse_reference::retract::{self, Retract};
use dormouse_reference::retract_all::{self, RetractAll};
use dormouse_reference::row_adam;
use dormouse_reference::sanitise::{self, Sanitise};
use dormouse_reference::{Backend, Result, beside};

use super::memory::MemoryPart;
use super::{ModelLearner, POWER_ITERATIONS, SKIPS_ALLOWED};
use crate::instruments::{Ask, Witness};
use crate::model::Group;

/// Muon in a run: its table, and its learning rate on the device.
pub(super) struct MuonPart<B: Backend> {
    /// Its configuration.
    pub config: muon::Config,
    /// `[1]`
    pub lr: B::Tensor,
    /// The rate as a multiple of AdamW's: both follow one schedule.
    pub ratio: f64,
}

impl<B: Backend + Witness> ModelLearner<B> {
    /// The update: norm and flags, AdamW and Muon, retraction, record. Reads nothing back.
    pub(super) fn update(&self, b: &B, retracts: bool) -> Result<()> {
        b.stage("sanitise and norm");
        let (o, table) = (&self.config.optimizer, &self.model.table);
        // An update of Muon has the same size whatever the norm is, so its gradients have no part in the clipping. Nor
        // have the memory's rows: a row that is seldom touched must not decide how far the rest moves.
        let clip = match self.muon {
            None => table.ranges_without_rows(),
            Some(_) => [Group::Matrix, Group::Vector].into_iter().flat_map(|group| table.ranges(group)).collect(),
        };
        let config = sanitise::Config { max_norm: Some(o.clip_norm), clip, skips_allowed: SKIPS_ALLOWED };
        let seen = Sanitise::update(b, &config, &self.model.grads, &self.losses, &self.counters)?;
        b.stage("optimiser");
        let groups = [(Group::Matrix, o.weight_decay), (Group::Vector, 0.0)];
        let groups = groups.into_iter().flat_map(|(group, weight_decay)| {
            table.ranges(group).into_iter().map(move |range| adamw::Group { range, weight_decay })
        });
        let config = adamw::Config { beta1: o.beta1, beta2: o.beta2, eps: o.eps, groups: groups.collect() };
        let (params, grads) = (&self.model.params, &self.model.grads);
        // The optimisers move disjoint parameters.
        beside(
            b,
            |b| {
                let state = adamw::State { params, grads, m: &self.m, v: &self.v };
                let (scale, apply, updates) = (&seen.scale, &seen.apply, &b.view(&self.counters, 0, &[1])?);
                Adamw::update(b, &config, state, adamw::Scalars { lr: &self.lr, scale, apply, updates })?;
                let Some(memory) = &self.memory else { return Ok(()) };
                memory.update(b, &self.row_adam(), &self.model, [&self.m, &self.v, &self.lr], &seen)
            },
            |b| {
                let Some(part) = &self.muon else { return Ok(()) };
                let state = muon::State { params, grads, m: &self.m };
                Muon::update(b, &part.config, state, muon::Scalars { lr: &part.lr, apply: &seen.apply })
            },
        )?;
        if retracts {
            b.stage("retraction");
            self.retract(b, &seen.apply)?;
        }
        self.follow(b, &seen.apply)?;
        b.stage("reads");
        let mut record = vec![&self.losses, &seen.norm, &seen.nonfinite, &seen.scale, &seen.apply, &self.spreads];
        record.extend(self.jepa.as_ref().map(|jepa| &jepa.shares));
        Record::update(b, &record, &self.step, &self.ring)
    }

    /// How the memory's rows move.
    pub(super) fn row_adam(&self) -> row_adam::Config {
        let o = &self.config.optimizer;
        row_adam::Config { beta1: o.beta1, beta2: o.beta2, eps: o.eps }
    }

    /// Brings all factors back to orthonormal columns: at once where the backend can, else one after another.
    fn retract(&self, b: &B, apply: &B::Tensor) -> Result<()> {
        let (iterations, power_iterations) = (self.config.optimizer.retract_iterations, POWER_ITERATIONS);
        let factors = self.model.table.factors();
        if self.retracts_batched {
            let config = retract_all::Config { iterations, power_iterations, factors };
            let spreads = RetractAll::update(b, &config, &self.model.params, apply)?.spreads;
            return b.keep(&spreads, &self.spreads);
        }
        let config = retract::Config { iterations, power_iterations };
        for (i, factor) in factors.iter().enumerate() {
            let factor = b.view(&self.model.params, factor.start, &factor.shape)?;
            let spread = Retract::update(b, &config, &factor, apply)?.spread;
            b.keep(&spread, &b.view(&self.spreads, i, &[1])?)?;
        }
        Ok(())
    }

    /// What the update of one step asks of the operations.
    pub(super) fn update_asks(&self, retracts: bool) -> Vec<Ask> {
        let mut forward = vec![("sanitise", 1), ("adamw", 1), ("record", 1)];
        if self.muon.is_some() {
            forward.push(("muon", 1));
        }
        if self.memory.as_ref().is_some_and(MemoryPart::moves_on_device) {
            forward.push(("row_adam", 1));
        }
        if self.jepa.as_ref().is_some_and(|jepa| !jepa.reads_targets()) {
            forward.push(("ema", 1));
        }
        if retracts {
            let factors = self.model.table.params.iter().filter(|p| p.retracted).count() as u64;
            forward.push(if self.retracts_batched { ("retract_all", 1) } else { ("retract", factors) });
        }
        forward.into_iter().map(|(stem, forward)| Ask { stem, forward, backward: 0 }).collect()
    }
}

#[cfg(test)]
mod tests {
    use dormouse_reference::Reference;

    use crate::check::letters as batch;
    use crate::checkpoint::State;
    use crate::config::{Config, Rule, preset};
    use crate::data::Batch;
    use crate::learner::ModelLearner;
    use crate::model::Group;
    use crate::train::{Learner, parameter_table};

    type Learned = ModelLearner<Reference<f32>>;

    fn tiny(rule: Rule) -> Config {
        let mut config = preset("tiny").expect("tiny is a preset");
        (config.train.batch_rows, config.data.seq_bytes, config.optimizer.rule) = (2, 16, rule);
        config
    }

    fn learner(rule: Rule) -> Learned {
        ModelLearner::new(Reference::new(), &tiny(rule)).expect("a preset builds")
    }

    fn run(learner: &mut Learned, rule: Rule, steps: std::ops::Range<u64>) -> State {
        for s in steps {
            learner.step(&batch(&tiny(rule), s), 1e-3).expect("a step");
        }
        learner.export().expect("it exports")
    }

    #[test]
    fn retraction_at_once_trains_to_the_bits_of_factor_by_factor() {
        let rule = Rule::Adamw;
        let mut single = learner(rule);
        single.retracts_batched = false;
        let mut batched = learner(rule);
        assert_eq!(run(&mut batched, rule, 0..4), run(&mut single, rule, 0..4));
        batched.drain().expect("records");
        single.drain().expect("records");
        assert_eq!(batched.drift().expect("drift"), single.drift().expect("drift"));
        let stems =
            |learner: &Learned| learner.update_asks(true).iter().map(|ask| (ask.stem, ask.forward)).collect::<Vec<_>>();
        assert!(stems(&batched).contains(&("retract_all", 1)) && stems(&single).contains(&("retract", 8)));
    }

    #[test]
    fn muon_moves_its_members_at_its_own_rate_and_adamw_the_rest() {
        let rule = Rule::Muon;
        let mut learner = learner(rule);
        let before = learner.export().expect("it exports");
        let after = run(&mut learner, rule, 0..1);
        for param in &learner.table().params {
            let of = |state: &State| state.weights[param.name].as_f32().expect("weights are f32").to_vec();
            let moved: Vec<f32> = of(&before).iter().zip(of(&after)).map(|(x, y)| y - x).collect();
            let second = after.optimizer[&format!("v.{}", param.name)].as_f32().expect("moments are f32").to_vec();
            let muon = matches!(param.group, Group::Muon | Group::MuonByHead);
            assert_eq!(second.iter().all(|&v| v == 0.0), muon, "`{}`", param.name);
            if param.group == Group::MuonByHead {
                // 1e-3 of the rate's 0.02 / 1e-3, times rows of norm 1: of 64 in every of two heads.
                let size = moved.iter().map(|x| x * x).sum::<f32>().sqrt();
                assert!((size / (0.02 * 128f32.sqrt()) - 1.0).abs() < 1e-2, "`{}` moved by {size}", param.name);
            } else if !(muon || param.retracted) {
                let largest = moved.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
                assert!(largest < 1.2e-3, "`{}` moved by {largest}", param.name);
            }
        }
    }

    #[test]
    fn five_and_five_steps_of_muon_are_ten_bit_for_bit() {
        let rule = Rule::Muon;
        let straight = run(&mut learner(rule), rule, 0..10);
        let half = run(&mut learner(rule), rule, 0..5);
        let mut resumed = learner(rule);
        resumed.import(&half).expect("it imports");
        assert_eq!(run(&mut resumed, rule, 5..10), straight);
        assert_ne!(run(&mut learner(Rule::Adamw), Rule::Adamw, 0..10), straight);
    }

    /// A system that this one replaces moved Muon's weights at full size in a step that was masked.
    #[test]
    fn a_nan_moves_no_weight_of_muon() {
        let rule = Rule::Muon;
        let mut learner = learner(rule);
        let before = run(&mut learner, rule, 0..2);
        learner.upload(&learner.loss_weight, &[f64::NAN]).expect("a NaN uploads");
        let after = run(&mut learner, rule, 2..4);
        assert_eq!(after.weights, before.weights);
        for (name, moment) in after.optimizer.iter().filter(|(name, _)| *name != "counters") {
            assert_eq!(moment, &before.optimizer[name], "{name}");
        }
    }

    #[test]
    fn muon_learns_a_batch_by_heart() {
        let mut learner = learner(Rule::Muon);
        let mut loss = f64::INFINITY;
        for step in 0..300 {
            learner.step(&Batch { step, ..batch(&tiny(Rule::Muon), 0) }, 1e-3).expect("a step");
            loss = learner.drain().expect("records").last().expect("a record").loss;
            if loss < 0.05 {
                break;
            }
        }
        assert!(loss < 0.05, "{loss}");
        for drift in learner.drift().expect("drift") {
            assert!(drift.orthonormality < 1e-3, "{drift:?}");
        }
    }

    #[test]
    fn the_table_at_the_start_has_every_parameter_once() {
        for (rule, groups) in [(Rule::Adamw, 2), (Rule::Muon, 4)] {
            let learner = learner(rule);
            let text = parameter_table(&learner);
            let lines: Vec<&str> = text.lines().skip(1).collect();
            assert_eq!(lines.len(), groups, "{text}");
            let members = lines.iter().flat_map(|line| line.split("values: ").nth(1).unwrap_or_default().split(' '));
            let mut members: Vec<&str> = members.collect();
            members.sort_unstable();
            let mut all: Vec<&str> = learner.table().params.iter().map(|p| p.name).collect();
            all.sort_unstable();
            assert_eq!(members, all);
        }
        assert!(
            parameter_table(&learner(Rule::Muon)).contains("muon+ by head: 3 tensors, 49152 values: kda.q kda.k kda.v")
        );
    }
}
