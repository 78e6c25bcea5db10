//! The n-gram memory in the whole model: what holds without it holds with it, on the device and on the host.

use std::collections::BTreeMap;

use dormouse_reference::engram_hash;

use super::*;
use crate::checkpoint::{self, Facts};
use crate::config::Engram;
use crate::data::KeyPlan;
use crate::model::Group;

/// `tiny` with its memory. The table is smaller than the preset's where it is walked through often, and with rows that
/// are shared by many keys.
fn with_memory(engram: Engram, rows: usize, seq_bytes: usize) -> Config {
    let mut config = tiny(rows, seq_bytes);
    config.model.engram = engram;
    config
}

const PARAMETERS: [&str; 3] = ["engram.key", "engram.value", "engram.table"];

#[test]
fn the_whole_gradient_equals_central_differences_with_a_memory() {
    let mut config = with_memory(Engram::Device, 2, 19);
    config.model.engram_rows = 40;
    central_differences(&config, |_| true);
}

/// The table's gradient at the size of the preset, where most rows are not touched.
#[test]
fn the_gradient_of_a_large_table_equals_central_differences() {
    central_differences(&with_memory(Engram::Device, 2, 19), |name| PARAMETERS.contains(&name));
}

#[test]
fn a_detached_memory_kills_exactly_the_gradients_of_its_parameters() {
    let config = with_memory(Engram::Device, 2, 19);
    assert_eq!(dead(&config, Ablation::DetachMemory), PARAMETERS);
    assert_eq!(dead(&config, Ablation::None), [""; 0]);
}

#[test]
fn with_a_memory_a_byte_moves_no_output_before_it() {
    causality(&with_memory(Engram::Device, 2, 31));
    causality(&with_memory(Engram::Host, 2, 31));
}

#[test]
fn with_a_memory_the_first_loss_is_near_that_of_guessing() {
    let mut tiny = preset("tiny").expect("tiny is a preset");
    tiny.model.engram = Engram::Device;
    first_loss(&tiny);
    // Fewer positions than the preset has: the loss is a mean over them.
    let mut small = preset("small").expect("small is a preset");
    (small.train.batch_rows, small.data.seq_bytes) = (2, 64);
    for seed in 0..3 {
        first_loss(&Config { seed, ..small.clone() });
    }
    let mut base = preset("base").expect("base is a preset");
    (base.train.batch_rows, base.data.seq_bytes) = (1, 64);
    first_loss(&base);
}

#[test]
fn with_a_memory_one_batch_can_be_learnt_by_heart() {
    by_heart(&with_memory(Engram::Device, 2, 24));
}

#[test]
fn with_a_memory_reading_byte_by_byte_equals_reading_at_once() {
    byte_by_byte(&with_memory(Engram::Device, 1, 23));
}

#[test]
fn with_a_memory_parts_of_a_batch_add_up_to_the_whole() {
    let mut config = with_memory(Engram::Device, 8, 17);
    config.model.engram_rows = 40;
    parts_add_up(&config);
}

#[test]
fn with_a_memory_ten_and_ten_steps_are_twenty_bit_for_bit() {
    for engram in [Engram::Device, Engram::Host] {
        let mut config = with_memory(engram, 2, 16);
        config.train.accumulate = 2;
        ten_and_ten(&config);
    }
}

fn run<T: dormouse_reference::Scalar>(
    learner: &mut ModelLearner<Reference<T>>,
    config: &Config,
    steps: std::ops::Range<u64>,
) -> State
where
    Reference<T>: Backend<Tensor = dormouse_reference::Tensor<T>>,
{
    for s in steps {
        learner.step(&batch(config, s), 1e-3).expect("a step");
    }
    learner.export().expect("it exports")
}

/// Rows that no part of the batch names keep every bit; each that one names moves once, by about the rate.
#[test]
fn a_step_moves_the_rows_of_its_batch_once_and_counts_them() {
    for parts in [1, 2] {
        let mut config = with_memory(Engram::Device, 4, 16);
        // A run of one letter names one row again and again.
        config.train.accumulate = parts;
        let mut learner = learner::<f32>(&config);
        let before = learner.export().expect("it exports");
        let mut repeated = batch(&config, 0);
        repeated.bytes[..34].fill(b'a');
        learner.step(&repeated, 1e-3).expect("a step");
        let after = learner.export().expect("it exports");
        let plan = KeyPlan::of(&config).expect("the memory is on");
        let keys = plan.keys(repeated.ids().view(), None);
        let of = |state: &State| state.weights["engram.table"].as_f32().expect("a table is f32").to_vec();
        let counts = after.optimizer["engram.counts"].as_u32().expect("counts are u32");
        let width = config.model.engram_width;
        let mut largest = 0.0f32;
        for (row, (then, now)) in of(&before).chunks(width).zip(of(&after).chunks(width)).enumerate() {
            let touched = keys.rows.contains(&(row as u32));
            assert_eq!(counts[row], u32::from(touched), "row {row}");
            assert_eq!(then != now, touched, "row {row}");
            largest = then.iter().zip(now).fold(largest, |largest, (x, y)| largest.max((y - x).abs()));
        }
        // Adam's first step of an element is the rate, less what eps takes away.
        assert!((0.9e-3..1.001e-3).contains(&largest), "{largest}");
    }
}

/// The state of a run with its table on the host, as one with the table on the device has it.
fn on_device(state: &State) -> State {
    super::super::memory::placed(state, Engram::Device).expect("it fits").into_owned()
}

#[test]
fn a_table_on_the_host_gives_the_bits_of_one_on_the_device() {
    for (parts, rule) in [(1, Rule::Adamw), (2, Rule::Muon)] {
        let configs = [Engram::Device, Engram::Host].map(|engram| {
            let mut config = with_memory(engram, 2, 16);
            // Few rows, so that steps share them.
            (config.model.engram_rows, config.train.accumulate, config.optimizer.rule) = (64, parts, rule);
            config
        });
        let [mut device, mut host] = configs.each_ref().map(learner::<f32>);
        let windows: Vec<Vec<u8>> = (0..3).map(|i| batch(&configs[0], 90 + i).bytes[..13].to_vec()).collect();
        let mut states = Vec::new();
        for s in 0..5 {
            // The third step is skipped: neither table moves.
            let weight = if s == 2 { f64::NAN } else { 0.5 };
            for learner in [&device, &host] {
                learner.upload(&learner.loss_weight, &[weight]).expect("a weight uploads");
            }
            let [a, b] = [run(&mut device, &configs[0], s..s + 1), run(&mut host, &configs[1], s..s + 1)];
            assert!(!b.weights.contains_key("engram.table") && b.table.is_some());
            assert_eq!(on_device(&b), a, "step {s}");
            states.push([a, b]);
        }
        assert_ne!(states[4][0].weights["engram.table"], states[3][0].weights["engram.table"]);
        assert_eq!(states[2][0].weights["engram.table"], states[1][0].weights["engram.table"]);
        assert_eq!(device.drain().expect("records").len(), 5);
        assert_eq!(host.evaluate(&windows).expect("scores"), device.evaluate(&windows).expect("scores"));
        assert_eq!(host.read_along(b"abcabcab").expect("logits"), device.read_along(b"abcabcab").expect("logits"));
        // A resumed run goes on alike, from its own checkpoint and from that of the other place.
        for (to, config) in configs.iter().enumerate() {
            for from in [0, 1] {
                let mut resumed = learner::<f32>(&Config { seed: 77, ..config.clone() });
                resumed.import(&states[3][from]).expect("it imports");
                assert_eq!(run(&mut resumed, config, 4..5), states[4][to], "from {from} to {to}");
            }
        }
    }
}

/// With one step the host's Adam has the bits of a table beside the other parameters, which the test above shows.
#[test]
fn a_table_on_the_host_that_waits_four_steps_moves_in_every_fourth_alone_and_resumes_to_the_bit() {
    let mut config = with_memory(Engram::Host, 2, 16);
    assert_eq!(config.optimizer.host_adam_every_steps, 1);
    (config.model.engram_rows, config.optimizer.host_adam_every_steps) = (64, 4);
    // The third step is skipped, and so is one of the last window.
    let advance = |learner: &mut ModelLearner<Reference<f32>>, step: u64| {
        let weight = if [2, 10].contains(&step) { f64::NAN } else { 0.5 };
        learner.upload(&learner.loss_weight, &[weight]).expect("a weight uploads");
        run(learner, &config, step..step + 1)
    };
    let mut straight = learner::<f32>(&config);
    let mut states = vec![straight.export().expect("it exports")];
    states.extend((0..12).map(|step| advance(&mut straight, step)));
    let table = |state: &State| state.table.clone().expect("a table on the host");
    let mut touched = vec![0u32; 3 * 64];
    let plan = KeyPlan::of(&config).expect("the memory is on");
    let mut named = std::collections::BTreeSet::new();
    for (step, pair) in states.windows(2).enumerate() {
        let moves = (step + 1) % 4 == 0;
        assert_eq!(table(&pair[0]) != table(&pair[1]), moves, "step {step}");
        assert_eq!(pair[1].optimizer.contains_key("engram.waiting"), !moves, "step {step}");
        if ![2, 10].contains(&step) {
            named.extend(plan.keys(batch(&config, step as u64).ids().view(), None).rows);
            // The weights do not wait.
            assert_ne!(pair[0].weights["embedding"], pair[1].weights["embedding"], "step {step}");
        }
        if moves {
            // Once for each row, however many steps have named it.
            named.iter().for_each(|&row| touched[row as usize] += 1);
            named.clear();
            assert_eq!(table(&pair[1]).counts(), touched, "step {step}");
        }
    }
    for done in 0..12 {
        let mut resumed = learner::<f32>(&Config { seed: 77, ..config.clone() });
        resumed.import(&states[done]).expect("it imports");
        assert_eq!(resumed.export().expect("it exports"), states[done], "after {done}");
        let last = (done as u64..12).map(|step| advance(&mut resumed, step)).last();
        assert_eq!(last.as_ref(), states.last(), "from {done}");
    }
    // A learner that has gone on forgets what waited when it takes up a checkpoint.
    let mut other = learner::<f32>(&config);
    advance(&mut other, 0);
    other.import(&states[8]).expect("it imports");
    assert_eq!((8..12).map(|step| advance(&mut other, step)).last().as_ref(), states.last());
    // What waits for the host cannot move to the device; what does not can.
    let mut device = learner::<f32>(&with_memory_of(&config, Engram::Device));
    let error = device.import(&states[6]).expect_err("it waits").to_string();
    assert!(error.contains("wait for a table on the host"), "{error}");
    device.import(&states[8]).expect("nothing waits");
}

/// Two steps of one gradient sum to twice of it: the first has no rate and no retraction, so nothing moves between them.
#[test]
fn what_waits_is_the_sum_of_the_steps_and_not_the_last_of_them() {
    let moments = |every: u64, steps: u64| {
        let mut config = with_memory(Engram::Host, 2, 16);
        (config.optimizer.host_adam_every_steps, config.optimizer.retract_every_steps) = (every, 1000);
        let mut learner = learner::<f32>(&config);
        for step in 0..steps {
            let rate = if step + 1 == steps { 1e-3 } else { 0.0 };
            learner.step(&Batch { step, ..batch(&config, 0) }, rate).expect("a step");
        }
        let table = learner.export().expect("it exports").table.expect("a table on the host");
        let [_, m, v] = table.buffers().map(<[f32]>::to_vec);
        (m, v)
    };
    let ((m, v), (once_m, once_v)) = (moments(2, 2), moments(1, 1));
    assert!(once_m.iter().any(|&x| x != 0.0));
    // Twice and four times are exact.
    for (i, (m, once)) in m.iter().zip(&once_m).enumerate() {
        assert_eq!((*m, v[i]), (2.0 * once, 4.0 * once_v[i]), "element {i}");
    }
}

/// The same run with its table elsewhere, which does not wait.
fn with_memory_of(config: &Config, engram: Engram) -> Config {
    let mut config = config.clone();
    (config.model.engram, config.optimizer.host_adam_every_steps) = (engram, 1);
    config
}

fn facts(config: &Config, next_step: u64) -> Facts {
    Facts {
        next_step,
        rows_consumed: 0,
        eval_bpb: None,
        config_toml: config.to_toml(),
        config_hash: config.hash(),
        data_hash: String::new(),
        provenance: serde_json::Value::Null,
        run: None,
    }
}

#[test]
fn a_table_on_the_host_is_saved_with_its_step_and_read_back() {
    let config = with_memory(Engram::Host, 2, 16);
    let folder = tempfile::tempdir().expect("a folder");
    let state = run(&mut learner::<f32>(&config), &config, 0..2);
    let path = checkpoint::save(folder.path(), &state, &facts(&config, 2)).expect("it saves");
    let loaded = checkpoint::load(&path).expect("it loads");
    assert_eq!(loaded.state, state);
    let mut resumed = learner::<f32>(&config);
    resumed.import(&loaded.state).expect("it imports");
    let straight = run(&mut learner::<f32>(&config), &config, 0..4);
    assert_eq!(run(&mut resumed, &config, 2..4), straight);
    // A table of another step would fit, and is noticed.
    let other = checkpoint::save(folder.path(), &straight, &facts(&config, 4)).expect("it saves");
    std::fs::copy(other.join("engram.table"), path.join("engram.table")).expect("a copy");
    let error = checkpoint::load(&path).expect_err("another table").to_string();
    assert!(error.contains("engram.table"), "{error}");
    let mut manifest = checkpoint::read_manifest(&path).expect("a manifest");
    manifest.files = checkpoint::read_manifest(&other).expect("a manifest").files;
    for file in ["weights.safetensors", "optimizer.safetensors"] {
        std::fs::copy(other.join(file), path.join(file)).expect("a copy");
    }
    std::fs::write(path.join("manifest.json"), checkpoint::sealed(&manifest)).expect("it writes");
    let error = checkpoint::load(&path).expect_err("another step").to_string();
    assert!(error.contains("belongs to step 4, the checkpoint to step 2"), "{error}");
    // What is not finite in the table is named, so it is never saved.
    assert_eq!(state.first_nonfinite(), None);
    let [mut values, m, v] = state.table.as_ref().expect("a table").buffers().map(<[f32]>::to_vec);
    values[5] = f32::NAN;
    let table = crate::host_table::HostTable::of(32, [values, m, v], vec![0; 3 * 4096]).expect("it fits");
    let broken = State { table: Some(std::sync::Arc::new(table)), ..state };
    assert_eq!(broken.first_nonfinite(), Some("engram.table"));
}

#[test]
fn a_checkpoint_without_the_memory_of_the_run_is_refused() {
    let off = learner::<f32>(&tiny(2, 16)).export().expect("it exports");
    let device = learner::<f32>(&with_memory(Engram::Device, 2, 16)).export().expect("it exports");
    let host = learner::<f32>(&with_memory(Engram::Host, 2, 16)).export().expect("it exports");
    let refuse = |engram: Engram, state: &State| {
        let mut learner = learner::<f32>(&with_memory(engram, 2, 16));
        let before = learner.export().expect("it exports");
        let error = learner.import(state).expect_err("it does not fit").to_string();
        assert_eq!(learner.export().expect("it exports"), before);
        error
    };
    assert_eq!(refuse(Engram::Device, &off), "checkpoint: tensor `engram.key` is missing");
    assert_eq!(refuse(Engram::Host, &off), "checkpoint: tensor `engram.table` is missing");
    for state in [&device, &host] {
        let error = refuse(Engram::Off, state);
        assert!(
            error.starts_with("checkpoint: tensor `engram.") && error.ends_with("is none of this model's"),
            "{error}"
        );
    }
    let mut no_counts = device.clone();
    no_counts.optimizer.remove("engram.counts");
    assert_eq!(refuse(Engram::Device, &no_counts), "checkpoint: tensor `engram.counts` is missing");
    let mut other = with_memory(Engram::Host, 2, 16);
    other.model.engram_rows = 5;
    let other = learner::<f32>(&other).export().expect("it exports");
    let error = refuse(Engram::Host, &other);
    assert_eq!(error, "checkpoint: tensor `engram.table` is [15, 32], expected [12288, 32]");
}

/// The worker's keys are those that the learner would make, and a step with either has the same bits.
#[test]
fn keys_of_the_worker_and_of_the_learner_are_the_same() {
    let mut config = with_memory(Engram::Device, 4, 16);
    config.train.accumulate = 2;
    let [mut with, mut without] = [learner::<f32>(&config), learner::<f32>(&config)];
    for s in 0..3 {
        let plain = batch(&config, s);
        with.step(&plain.clone().with_keys(KeyPlan::of(&config)), 1e-3).expect("a step");
        without.step(&plain, 1e-3).expect("a step");
    }
    assert_eq!(with.export().expect("it exports"), without.export().expect("it exports"));
    let other = batch(&config, 3).with_keys(KeyPlan::of(&Config {
        train: crate::config::TrainConfig { accumulate: 1, ..config.train.clone() },
        ..config.clone()
    }));
    // A batch whose keys are for another shape is refused, here by the operation that gets the order of the whole.
    assert!(with.step(&other, 1e-3).is_err());
}

#[test]
fn the_rows_have_no_part_in_the_norm() {
    let config = with_memory(Engram::Device, 2, 16);
    let mut learner = learner::<f32>(&config);
    let [key, rows] = ["engram.key", "engram.table"].map(|name| learner.model.table.get(name).start);
    let mut flat = learner.flat(&learner.model.params).expect("parameters");
    // Large projections make the gradient of the rows large.
    flat[key..rows].iter_mut().for_each(|x| *x *= 30.0);
    learner.upload(&learner.model.params, &flat).expect("parameters");
    learner.step(&batch(&config, 0), 0.0).expect("a step");
    let gradient = learner.flat(&learner.model.grads).expect("gradients");
    let square = |range: std::ops::Range<usize>| gradient[range].iter().map(|g| g * g).sum::<f64>();
    let (without, with) = (square(0..rows).sqrt(), square(0..gradient.len()).sqrt());
    let norm = learner.drain().expect("records")[0].grad_norm;
    // f32 stores the norm to 6e-8.
    assert!((norm / without - 1.0).abs() < 2e-7, "{norm} {without}");
    // With the rows it would be another.
    assert!(with / without - 1.0 > 1e-4, "{with} {without}");
}

#[test]
fn groups_name_the_memory_and_cover_every_element_once() {
    for (rule, projections) in [(Rule::Adamw, Group::Matrix), (Rule::Muon, Group::Muon)] {
        let mut config = with_memory(Engram::Host, 2, 16);
        config.optimizer.rule = rule;
        let learner = learner::<f32>(&config);
        let mut covered = vec![0; learner.table().len()];
        for range in Group::ALL.iter().flat_map(|&group| learner.table().ranges(group)) {
            covered[range].iter_mut().for_each(|n| *n += 1);
        }
        assert!(covered.iter().all(|&n| n == 1), "{rule:?}");
        let group = |name: &str| learner.table().get(name).group;
        assert_eq!(PARAMETERS.map(group), [projections, projections, Group::Rows]);
        // For people the table has all its rows, wherever they lie.
        let text = crate::train::parameter_table(&learner);
        assert!(text.contains("adam by row: 1 tensors, 393216 values: engram.table"), "{text}");
        let resident = learner.table().get("engram.table").shape[0];
        assert_eq!(resident, engram_hash::ORDERS.len() * 2 * 16);
    }
}

/// A memory that is asked for and not used would be a defect that no loss shows.
#[test]
fn the_memory_is_asked_for_once_an_iteration_and_part() {
    let mut config = with_memory(Engram::Device, 4, 16);
    config.train.accumulate = 2;
    let asks = |config: &Config| -> BTreeMap<&'static str, (u64, u64)> {
        let learner = learner::<f32>(config);
        let all = learner.asks(true, true).into_iter().chain(learner.update_asks(true));
        all.map(|ask| (ask.stem, (ask.forward, ask.backward))).collect()
    };
    let with = asks(&config);
    assert_eq!((with["engram"], with["row_adam"]), ((4, 4), (1, 0)));
    config.model.engram = Engram::Host;
    assert_eq!((asks(&config)["engram"], asks(&config).contains_key("row_adam")), ((4, 4), false));
    config.model.engram = Engram::Off;
    assert!(!asks(&config).contains_key("engram"));
}
