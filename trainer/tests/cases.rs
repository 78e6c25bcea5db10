//! Cases of docs/cases.md about the training loop, one test a case, on the reference.

use std::collections::BTreeMap;

use dormouse::checkpoint::{State, TensorData};
use dormouse::config::{Config, Rule, preset};
use dormouse::data::Batch;
use dormouse::learner::ModelLearner;
use dormouse::train::{Learner, StepRecord};
use dormouse_reference::Reference;

/// A model that takes milliseconds a step.
fn small() -> Config {
    let mut config = preset("tiny").unwrap();
    let m = &mut config.model;
    (m.width, m.heads, m.head_width, m.ffn_width, m.rank) = (48, 2, 16, 32, 16);
    (config.train.batch_rows, config.data.seq_bytes) = (2, 24);
    config
}

fn learner(config: &Config) -> ModelLearner<Reference<f32>> {
    ModelLearner::new(Reference::new(), config).unwrap()
}

/// Lower-case letters that depend on step, row and position alone.
fn batch(config: &Config, step: u64) -> Batch {
    let (rows, len) = (config.train.batch_rows, config.data.seq_bytes);
    let letter = |i: u64| {
        let x = (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        97 + ((x >> 40) % 26) as u8
    };
    let first = step * (rows * (len + 1)) as u64;
    let bytes = (first..first + (rows * (len + 1)) as u64).map(letter).collect();
    Batch { step, rows, len, bytes, keys: None, mask: None }
}

fn steps(learner: &mut dyn Learner, config: &Config, range: std::ops::Range<u64>) -> Vec<StepRecord> {
    let mut records = Vec::new();
    for step in range {
        learner.step(&batch(config, step), config.optimizer.lr).unwrap();
        records.extend(learner.drain().unwrap());
    }
    records
}

fn floats<'a>(state: &'a State, name: &str) -> &'a [f32] {
    let tensor = state.weights.get(name).unwrap_or_else(|| panic!("no `{name}`"));
    match &tensor.data {
        TensorData::F32(values) => values,
        TensorData::U32(_) => panic!("`{name}` holds counters"),
    }
}

/// A learning rate that drives the gate's pre-activation far past saturation: 200 steps later every weight is finite,
/// and a step that was not finite moved none and was counted.
#[test]
fn a5_two_hundred_steps_far_past_saturation_leave_every_weight_finite() {
    let mut config = small();
    (config.data.seq_bytes, config.optimizer.lr, config.optimizer.weight_decay) = (128, 10.0, 0.0);
    let mut learner = learner(&config);
    let mut before = learner.export().unwrap();
    let mut largest = 0.0f32;
    for step in 0..200 {
        let records = steps(&mut learner, &config, step..step + 1);
        let after = learner.export().unwrap();
        assert_eq!(after.first_nonfinite(), None, "after step {}", step + 1);
        let finite = records[0].loss.is_finite() && records[0].grad_norm.is_finite() && records[0].nonfinite == 0;
        assert_eq!(records[0].applied, finite, "step {}: {:?}", step + 1, records[0]);
        if !finite {
            assert_eq!(after.weights, before.weights, "step {} was skipped and moved a weight", step + 1);
        }
        // The pre-activation is exp(a_log) (z + dt_bias): the bias alone passes 30.
        largest = floats(&after, "kda.dt_bias").iter().fold(largest, |most, x| most.max(x.abs()));
        before = after;
    }
    assert!(largest > 30.0, "the gate's bias reached {largest} only: the case shows nothing");
    assert_eq!(learner.latched(), None);
}

/// A loop that reads nothing back for 50 steps ends in the bits of one that reads every step.
#[test]
fn h1_reading_back_every_step_changes_no_bit() {
    let config = small();
    let (mut reading, mut silent) = (learner(&config), learner(&config));
    let each = steps(&mut reading, &config, 0..50);
    for step in 0..50 {
        silent.step(&batch(&config, step), config.optimizer.lr).unwrap();
    }
    assert_eq!(silent.drain().unwrap(), each);
    assert_eq!(silent.export().unwrap(), reading.export().unwrap());
}

/// Names, shapes and types of what only the optimiser reads.
fn layout(state: &State) -> BTreeMap<String, (Vec<usize>, bool)> {
    let of = |tensor: &dormouse::checkpoint::Tensor| (tensor.shape.clone(), matches!(tensor.data, TensorData::F32(_)));
    state.optimizer.iter().map(|(name, tensor)| (name.clone(), of(tensor))).collect()
}

/// Three relaunches: moments find their parameters by name, and the optimiser's record grows by nothing.
#[test]
fn h6_moments_are_found_after_every_relaunch() {
    for rule in [Rule::Adamw, Rule::Muon] {
        let mut config = small();
        config.optimizer.rule = rule;
        let mut straight = learner(&config);
        steps(&mut straight, &config, 0..12);
        let mut state = {
            let mut first = learner(&config);
            steps(&mut first, &config, 0..3);
            first.export().unwrap()
        };
        let first = layout(&state);
        for relaunch in 1..4 {
            let mut next = learner(&config);
            next.import(&state).unwrap();
            steps(&mut next, &config, 3 * relaunch..3 * relaunch + 3);
            state = next.export().unwrap();
            assert_eq!(layout(&state), first, "{rule:?} relaunch {relaunch}");
        }
        assert_eq!(state, straight.export().unwrap(), "{rule:?}");
    }
}

/// Moments come back with their type and their bits, and the next update is the one of the run that went on.
#[test]
fn i7_a_moment_keeps_its_type_over_a_resume() {
    let mut config = small();
    config.optimizer.rule = Rule::Muon;
    let mut going = learner(&config);
    steps(&mut going, &config, 0..3);
    let saved = going.export().unwrap();
    let mut resumed = learner(&config);
    resumed.import(&saved).unwrap();
    let loaded = resumed.export().unwrap();
    assert_eq!(layout(&loaded), layout(&saved));
    assert_eq!(loaded, saved);
    let wide = layout(&saved).values().filter(|(_, float)| *float).count();
    assert!(wide >= 2, "two moments in f32, got {wide}");
    steps(&mut going, &config, 3..4);
    steps(&mut resumed, &config, 3..4);
    assert_eq!(resumed.export().unwrap(), going.export().unwrap());
    // A run that forgot its moments would go elsewhere, so equality says something.
    let mut forgetful = saved;
    for tensor in forgetful.optimizer.values_mut() {
        if let TensorData::F32(values) = &mut tensor.data {
            values.fill(0.0);
        }
    }
    resumed.import(&forgetful).unwrap();
    steps(&mut resumed, &config, 3..4);
    assert_ne!(resumed.export().unwrap().weights, going.export().unwrap().weights);
}

/// The tensors that Muon moves, each with the number of heads it is split into.
fn muons(learner: &dyn Learner, config: &Config) -> Vec<(String, Vec<usize>, usize)> {
    let parameters = learner.parameters().into_iter();
    let members = parameters.filter(|parameter| parameter.group.starts_with("muon"));
    members
        .map(|p| {
            let heads = if p.group.ends_with("by head") { config.model.heads } else { 1 };
            (p.name, p.shape, heads)
        })
        .collect()
}

/// Under Muon, without weight decay and before any retraction.
fn under_muon() -> Config {
    let mut config = small();
    config.optimizer.rule = Rule::Muon;
    (config.optimizer.weight_decay, config.optimizer.retract_every_steps) = (0.0, 1000);
    config
}

/// Clipping a thousand times harder moves what AdamW moves otherwise and Muon's matrices not by a bit.
#[test]
fn i3_clipping_leaves_the_orthogonalised_update_alone() {
    let after = |clip: f64| {
        let mut config = under_muon();
        config.optimizer.clip_norm = clip;
        let mut learner = learner(&config);
        let members = muons(&learner, &config);
        steps(&mut learner, &config, 0..1);
        (members, learner.export().unwrap())
    };
    let ((members, tight), (_, loose)) = (after(1e-4), after(1e4));
    assert!(!members.is_empty());
    for (name, ..) in &members {
        assert_eq!(tight.weights[name], loose.weights[name], "{name}");
    }
    assert_ne!(tight.weights["embedding"], loose.weights["embedding"], "clipping did nothing at all");
}

/// Muon runs on every matrix that it is configured for: each row of each update, in the short orientation, has the
/// length of Muon's learning rate, which no other rule gives.
#[test]
fn i4_every_matrix_of_muon_gets_an_update_of_muon_s_size() {
    let config = under_muon();
    let mut learner = learner(&config);
    let members = muons(&learner, &config);
    let names: Vec<&str> = members.iter().map(|(name, ..)| name.as_str()).collect();
    let expected =
        ["kda.q", "kda.k", "kda.v", "expert.up_u", "expert.up_v", "expert.down_u", "expert.down_v", "out.u", "out.v"];
    assert_eq!(names, expected);
    let before = learner.export().unwrap();
    steps(&mut learner, &config, 0..1);
    let after = learner.export().unwrap();
    let mut matrices = 0;
    for (name, shape, heads) in &members {
        let (rows, columns) = (shape[shape.len() - 2], shape[shape.len() - 1]);
        let width = columns / heads;
        let pairs = floats(&after, name).iter().zip(floats(&before, name));
        let moved: Vec<f64> = pairs.map(|(a, b)| f64::from(*a) - f64::from(*b)).collect();
        for (entry, matrix) in moved.chunks(rows * columns).enumerate() {
            for head in 0..*heads {
                matrices += 1;
                let at = |row: usize, column: usize| matrix[row * columns + head * width + column];
                let (short, long, across) = if rows <= width { (rows, width, false) } else { (width, rows, true) };
                for i in 0..short {
                    let of = |j: usize| if across { at(j, i) } else { at(i, j) };
                    let norm = (0..long).map(|j| of(j).powi(2)).sum::<f64>().sqrt();
                    // Weights of size 1 round at 6e-8 an element, sqrt(48) of them beside an update of 0.02: 2e-5.
                    let off = norm / config.optimizer.muon_lr - 1.0;
                    assert!(off.abs() < 1e-4, "{name}[{entry}] head {head} row {i}: {norm}");
                }
            }
        }
    }
    // Three by two heads, four factors of two experts, two factors of the output map.
    assert_eq!(matrices, 3 * 2 + 4 * 2 + 2);
}

/// What is no matrix that maps a vector to a vector is AdamW's: convolutions, vectors, tables, heads.
#[test]
fn i5_convolutions_and_vectors_are_not_muon_s() {
    let config = under_muon();
    let learner = learner(&config);
    for parameter in learner.parameters() {
        let is_muon = parameter.group.starts_with("muon");
        let never = parameter.name.contains("conv") || parameter.shape.len() < 2 || parameter.name == "embedding";
        assert!(!(is_muon && never), "{} is in group {}", parameter.name, parameter.group);
    }
    assert!(learner.parameters().iter().any(|parameter| parameter.name == "kda.conv_q"));
}
