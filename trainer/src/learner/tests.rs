//! The whole model on the reference: its gradient, its causality, its optimiser, its resumption.

use dormouse_reference::{Reference, StepKey, Tensors};
use ndarray::ArrayD;
use rand::RngExt;
use rand_distr::StandardNormal;

use super::*;
use crate::check::letters as batch;
use crate::config::preset;

mod memory;
mod options;

/// `tiny` with a batch small enough for many runs: odd length, several rows.
fn tiny(rows: usize, seq_bytes: usize) -> Config {
    let mut config = preset("tiny").expect("tiny is a preset");
    config.train.batch_rows = rows;
    config.data.seq_bytes = seq_bytes;
    config
}

fn learner<T: dormouse_reference::Scalar>(config: &Config) -> ModelLearner<Reference<T>>
where
    Reference<T>: Backend<Tensor = dormouse_reference::Tensor<T>>,
{
    ModelLearner::new(Reference::new(), config).expect("a preset builds")
}

/// Runs `body` as a step of its own.
fn step<B: Backend>(b: &B, body: &mut dyn FnMut(&B) -> dormouse_reference::Result<()>) {
    b.step(&StepKey { purpose: "test", variant: 0 }, body).expect("the step runs");
}

/// Moves every parameter off its symmetric start (zero iteration embedding, unit gains), where some gradients vanish.
fn perturb<B: Backend + Witness>(learner: &ModelLearner<B>) -> Vec<f64> {
    let mut rng = stream(5, Purpose::Test, 0, 0);
    let mut flat = learner.flat(&learner.model.params).expect("parameters download");
    for x in &mut flat {
        *x += 0.02 * rng.sample::<f64, _>(StandardNormal);
    }
    learner.upload(&learner.model.params, &flat).expect("parameters upload");
    flat
}

/// The forward pass of the batch that was uploaded.
fn forward<B: Backend>(
    learner: &ModelLearner<B>,
    b: &B,
    targets: bool,
) -> dormouse_reference::Result<model::Forward<B>> {
    let keys = learner.memory.as_ref().map(|memory| memory.part(b, 0, false)).transpose()?;
    let memory = keys.as_ref().map(|[rows, order]| model::Memory { rows, order: Some(order), table: None });
    let denominator = b.shape(&learner.ids).iter().product();
    let targets = targets.then_some(&learner.targets);
    learner.model.forward(b, &model::Batch { ids: &learner.ids, targets, denominator, memory }, None)
}

fn total_loss(learner: &ModelLearner<Reference<f64>>) -> f64 {
    step(&learner.b, &mut |b| {
        for (i, loss) in forward(learner, b, true)?.losses.iter().enumerate() {
            b.keep(loss, &b.view(&learner.losses, i, &[1])?)?;
        }
        Ok(())
    });
    let losses = learner.flat(&learner.losses).expect("losses download");
    losses.iter().sum::<f64>() / losses.len() as f64
}

/// The project's central claim, end to end: every parameter tensor's gradient is the derivative of the loss.
#[test]
fn the_whole_gradient_equals_central_differences_for_every_parameter() {
    central_differences(&tiny(2, 19), |_| true);
}

/// Holds the gradient of every parameter that is `chosen` against differences of the loss.
fn central_differences(config: &Config, chosen: impl Fn(&str) -> bool) {
    let learner = learner::<f64>(config);
    let base = perturb(&learner);
    learner.upload_batch(&batch(config, 0)).expect("the batch uploads");
    step(&learner.b, &mut |b| learner.gradients(b));
    let gradient = learner.flat(&learner.model.grads).expect("gradients download");
    let mut worst = 0.0f64;
    for (row, param) in learner.model.table.params.iter().enumerate().filter(|(_, param)| chosen(param.name)) {
        for direction in 0..2u64 {
            let mut rng = stream(11, Purpose::Test, direction, row as u64);
            let v: Vec<f64> = (0..param.len()).map(|_| 0.1 * rng.sample::<f64, _>(StandardNormal)).collect();
            let slope: f64 = gradient[param.range()].iter().zip(&v).map(|(g, v)| g * v).sum();
            let typical = gradient[param.range()].iter().zip(&v).map(|(g, v)| (g * v).powi(2)).sum::<f64>().sqrt();
            assert!(typical > 0.0, "`{}` has no gradient at all", param.name);
            let error = [1e-3, 1e-4, 1e-5]
                .map(|h| {
                    let at = |h: f64| {
                        let mut moved = base.clone();
                        for (x, v) in moved[param.range()].iter_mut().zip(&v) {
                            *x += h * v;
                        }
                        learner.upload(&learner.model.params, &moved).expect("parameters upload");
                        total_loss(&learner)
                    };
                    let difference = (at(h) - at(-h)) / (2.0 * h);
                    (difference - slope).abs() / difference.abs().max(slope.abs()).max(typical)
                })
                .into_iter()
                .fold(f64::INFINITY, f64::min);
            // Best step of a sweep in f64: eps^(2/3) = 4e-11 of a loss near 5.5, over derivatives as small as 1e-4 of it.
            assert!(error < 2e-6, "`{}` direction {direction}: relative error {error:e}", param.name);
            worst = worst.max(error);
        }
    }
    assert!(worst > 0.0, "a thing was compared with itself");
}

#[test]
fn a_detached_recurrence_kills_exactly_the_gradients_behind_it() {
    let dead = dead(&tiny(2, 19), Ablation::DetachRecurrence);
    let behind = [
        "kda.q",
        "kda.k",
        "kda.v",
        "kda.decay_down",
        "kda.decay_up",
        "kda.beta",
        "kda.conv_q",
        "kda.conv_k",
        "kda.conv_v",
        "kda.dt_bias",
        "kda.a_log",
    ];
    assert_eq!(dead, behind);
}

/// The parameters without a gradient under a planted fault.
fn dead(config: &Config, fault: Ablation) -> Vec<&'static str> {
    let mut learner = learner::<f64>(config);
    perturb(&learner);
    learner.upload_batch(&batch(config, 0)).expect("the batch uploads");
    learner.set_ablation(fault);
    step(&learner.b, &mut |b| learner.gradients(b));
    let gradient = learner.flat(&learner.model.grads).expect("gradients download");
    let params = learner.model.table.params.iter();
    params.filter(|p| gradient[p.range()].iter().all(|&g| g == 0.0)).map(|p| p.name).collect()
}

#[test]
fn changing_a_byte_moves_no_output_before_it_in_any_iteration() {
    causality(&tiny(2, 31));
}

/// Changes bytes of the first of two rows of 31.
fn causality(config: &Config) {
    let learner = learner::<f32>(config);
    perturb(&learner);
    let b = &learner.b;
    let first = batch(config, 0);
    let shape = [config.model.iterations, 2, 31, VOCABULARY];
    let all = b.persistent(&shape, b.float()).expect("memory");
    let logits = |batch: &Batch| -> ArrayD<f64> {
        learner.upload_batch(batch).expect("the batch uploads");
        step(b, &mut |b| {
            let forward = forward(&learner, b, false)?;
            for (n, logits) in forward.logits.iter().enumerate() {
                b.keep(logits, &b.view(&all, n * logits.len(), &shape[1..])?)?;
            }
            Ok(())
        });
        b.download(&all).expect("logits download")
    };
    let before = logits(&first);
    for at in [1, 16, 30] {
        let mut changed = first.clone();
        changed.bytes[at] ^= 7;
        let after = logits(&changed);
        for n in 0..config.model.iterations {
            for t in 0..31 {
                let same = (0..VOCABULARY).all(|c| before[[n, 0, t, c]].to_bits() == after[[n, 0, t, c]].to_bits());
                assert_eq!(same, t < at, "iteration {n}, position {t}, byte {at} changed");
            }
            for (x, y) in before.index_axis(ndarray::Axis(1), 1).iter().zip(after.index_axis(ndarray::Axis(1), 1)) {
                assert_eq!(x.to_bits(), y.to_bits(), "another row moved");
            }
        }
    }
}

#[test]
fn the_first_loss_is_near_that_of_guessing() {
    for name in ["tiny", "nano"] {
        first_loss(&preset(name).expect("it is a preset"));
    }
}

fn first_loss(config: &Config) {
    let mut learner = learner::<f32>(config);
    learner.step(&batch(config, 0), 0.0).expect("a step");
    let record = &learner.drain().expect("records")[0];
    let uniform = (VOCABULARY as f64).ln();
    assert!((record.loss / uniform - 1.0).abs() < 0.08, "{}: {} against {uniform}", config.preset, record.loss);
}

#[test]
fn one_batch_can_be_learnt_by_heart() {
    by_heart(&tiny(2, 24));
}

fn by_heart(config: &Config) {
    let mut learner = learner::<f32>(config);
    let mut loss = f64::INFINITY;
    for s in 0..300 {
        let batch = Batch { step: s, ..batch(config, 0) };
        learner.step(&batch, 3e-3).expect("a step");
        loss = learner.drain().expect("records").last().expect("a record").loss;
        if loss < 0.05 {
            break;
        }
    }
    assert!(loss < 0.05, "{loss}");
    for drift in learner.drift().expect("drift") {
        assert!(drift.orthonormality < 1e-4, "{drift:?}");
    }
}

#[test]
fn reading_byte_by_byte_equals_reading_at_once() {
    byte_by_byte(&tiny(1, 23));
}

/// Reads one row of 23 bytes.
fn byte_by_byte(config: &Config) {
    let learner = learner::<f32>(config);
    perturb(&learner);
    let batch = batch(config, 0);
    learner.upload_batch(&batch).expect("the batch uploads");
    let all = learner.b.persistent(&[1, 23, VOCABULARY], learner.b.float()).expect("memory");
    step(&learner.b, &mut |b| b.keep(forward(&learner, b, false)?.logits.last().expect("an iteration"), &all));
    let at_once = learner.flat(&all).expect("logits");
    learner.stream.clear(&learner.b).expect("it clears");
    for (t, &byte) in batch.bytes[..23].iter().enumerate() {
        let one = learner.stream.read(&learner, byte).expect("it reads");
        for (c, x) in one.iter().enumerate() {
            let y = at_once[t * VOCABULARY + c];
            // The same sums in other block shapes, f32, through two iterations; logits are of order one.
            assert!((x - y).abs() < 2e-4, "position {t}, logit {c}: {x} and {y}");
        }
    }
}

#[test]
fn parts_of_a_batch_add_up_to_the_whole() {
    parts_add_up(&tiny(8, 17));
}

/// Computes eight rows of 17 bytes in parts.
fn parts_add_up(config: &Config) {
    let gradients = |parts: usize| {
        let mut config = config.clone();
        config.train.accumulate = parts;
        let learner = learner::<f64>(&config);
        perturb(&learner);
        learner.upload_batch(&batch(&config, 0)).expect("the batch uploads");
        step(&learner.b, &mut |b| learner.gradients(b));
        let losses = learner.flat(&learner.losses).expect("losses");
        (learner.flat(&learner.model.grads).expect("gradients"), losses.iter().sum::<f64>())
    };
    let (whole, loss) = gradients(1);
    let size = whole.iter().map(|g| g.abs()).fold(0.0, f64::max);
    for parts in [2, 4, 8] {
        let (sum, parts_loss) = gradients(parts);
        assert!((parts_loss / loss - 1.0).abs() < 1e-14, "{parts} parts");
        // Another order of the same f64 sums over 136 positions.
        for (x, y) in sum.iter().zip(&whole) {
            assert!((x - y).abs() <= 1e-13 * size, "{parts} parts: {x} and {y}");
        }
        // The same parts twice: the same bits.
        assert_eq!(sum, gradients(parts).0);
    }
}

#[test]
fn ten_and_ten_steps_are_twenty_bit_for_bit() {
    ten_and_ten(&tiny(2, 16));
}

fn ten_and_ten(config: &Config) {
    let run = |learner: &mut ModelLearner<Reference<f32>>, steps: std::ops::Range<u64>| {
        for s in steps {
            learner.step(&batch(config, s), 1e-3).expect("a step");
        }
        learner.export().expect("it exports")
    };
    let straight = run(&mut learner::<f32>(config), 0..20);
    let half = run(&mut learner::<f32>(config), 0..10);
    let mut resumed = learner::<f32>(&Config { seed: 77, ..config.clone() });
    resumed.import(&half).expect("it imports");
    assert_eq!(run(&mut resumed, 10..20), straight);
    // The test can fail: another batch gives other weights.
    let mut other = learner::<f32>(config);
    other.import(&half).expect("it imports");
    assert_ne!(run(&mut other, 11..21), straight);
}

#[test]
fn a_nan_touches_no_weight_and_is_counted_and_the_ninth_closes_the_latch() {
    let config = tiny(2, 16);
    let mut learner = learner::<f32>(&config);
    learner.step(&batch(&config, 0), 1e-3).expect("a step");
    let before = learner.export().expect("it exports");
    learner.upload(&learner.loss_weight, &[f64::NAN]).expect("a NaN uploads");
    for s in 1..=9 {
        assert_eq!(learner.latched(), None);
        learner.step(&batch(&config, s), 1e-3).expect("a step");
        if s == 4 {
            // Looking changes nothing: the window is a number of steps.
            assert_eq!(learner.drain().expect("records").len(), 5);
        }
    }
    let records = learner.drain().expect("records");
    assert_eq!(records.len(), 5);
    assert!(records.iter().all(|r| !r.applied && r.nonfinite > 0), "{records:?}");
    assert_eq!(learner.latched(), Some(Latch { skipped: 9, step: 9 }));
    let mut after = learner.export().expect("it exports");
    // Only the counters have moved.
    let counters = after.optimizer.insert("counters".to_owned(), before.optimizer["counters"].clone());
    assert_eq!(counters.expect("counters").as_u32(), Some(&[1, 9, 9, 1][..]));
    assert_eq!(after, before);
    // A healthy step behind a closed latch changes nothing either.
    learner.upload(&learner.loss_weight, &[0.5]).expect("a number uploads");
    learner.step(&batch(&config, 10), 1e-3).expect("a step");
    assert!(!learner.drain().expect("records").last().expect("a record").applied);
}

#[test]
fn eight_skips_in_every_window_do_not_close_the_latch() {
    let config = tiny(1, 8);
    let mut learner = learner::<f32>(&config);
    for s in 0..2 * RING_STEPS as u64 {
        let healthy = s % RING_STEPS as u64 >= u64::from(SKIPS_ALLOWED);
        learner.upload(&learner.loss_weight, &[if healthy { 0.5 } else { f64::NAN }]).expect("a number uploads");
        learner.step(&batch(&config, s), 1e-3).expect("a step");
        assert_eq!(learner.latched(), None, "step {s}");
    }
    assert_eq!(learner.counters().expect("counters")[1], 2 * SKIPS_ALLOWED);
}

#[test]
fn import_refuses_what_does_not_fit_and_stays_unchanged() {
    let config = tiny(2, 16);
    let mut learner = learner::<f32>(&config);
    let good = learner.export().expect("it exports");
    let refuse = |learner: &mut ModelLearner<Reference<f32>>, change: &dyn Fn(&mut State)| {
        let mut state = good.clone();
        change(&mut state);
        let error = learner.import(&state).expect_err("it does not fit").to_string();
        assert_eq!(learner.export().expect("it exports"), good);
        error
    };
    let missing = refuse(&mut learner, &|s| drop(s.weights.remove("kda.q")));
    assert_eq!(missing, "checkpoint: tensor `kda.q` is missing");
    let shape = refuse(&mut learner, &|s| drop(s.weights.insert("rho".into(), Tensor::f32(&[2], vec![1.0; 2]))));
    assert_eq!(shape, "checkpoint: tensor `rho` is [2], expected [1]");
    let unknown = refuse(&mut learner, &|s| drop(s.weights.insert("bias".into(), Tensor::f32(&[1], vec![1.0]))));
    assert_eq!(unknown, "checkpoint: tensor `bias` is none of this model's");
    let moment = refuse(&mut learner, &|s| drop(s.optimizer.remove("v.head.u")));
    assert_eq!(moment, "checkpoint: tensor `v.head.u` is missing");
}

/// A checkpoint knows names and no places: one of another order of the buffer has every value where its name says.
#[test]
fn a_checkpoint_is_read_by_name_wherever_its_tensors_lie() {
    let config = tiny(2, 16);
    let mut learner = learner::<f32>(&config);
    let mut state = learner.export().expect("it exports");
    let params = learner.model.table.params.clone();
    for param in &params {
        let values = param.initial(5).into_iter().map(|x| x as f32).collect();
        state.weights.insert(param.name.to_owned(), Tensor::f32(&param.shape, values));
        let stream = param.stream as f32;
        state.optimizer.insert(format!("m.{}", param.name), Tensor::f32(&param.shape, vec![stream; param.len()]));
    }
    learner.import(&state).expect("it imports");
    let (weights, m) = (learner.flat(&learner.model.params), learner.flat(&learner.m));
    let (weights, m) = (weights.expect("weights"), m.expect("moments"));
    for param in &params {
        let want = param.initial(5).into_iter().map(|x| f64::from(x as f32));
        assert!(weights[param.range()].iter().copied().eq(want), "{}", param.name);
        assert!(m[param.range()].iter().all(|&x| x == param.stream as f64), "{}", param.name);
    }
    assert_eq!(learner.export().expect("it exports"), state);
}

#[test]
fn samples_are_a_function_of_the_seed() {
    let config = tiny(1, 16);
    let mut learner = learner::<f32>(&config);
    let mut sample = |temperature: f64, seed: u64| {
        let mut bytes = Vec::new();
        learner
            .sample(b"ab", 12, temperature, seed, &mut |byte| {
                bytes.extend(byte);
                true
            })
            .expect("it samples");
        bytes
    };
    assert_eq!(sample(1.0, 3), sample(1.0, 3));
    assert_ne!(sample(1.0, 3), sample(1.0, 4));
    assert_eq!(sample(0.0, 3), sample(0.0, 4));
    assert_eq!(sample(0.7, 1).len(), 12);
    // A long prompt can be left, too.
    let mut calls = Vec::new();
    let mut leave = |byte| {
        calls.push(byte);
        calls.len() < 2
    };
    learner.sample(b"abcdef", 12, 0.0, 0, &mut leave).expect("it stops");
    assert_eq!(calls, [None, None]);
}

#[test]
fn temperature_zero_takes_the_likeliest_and_the_lowest_on_ties() {
    assert_eq!(choose(&[0.0, 2.0, 2.0], 0.0, 0.9), 1);
    assert_eq!(choose(&[0.0, 0.0], 1.0, 0.49), 0);
    assert_eq!(choose(&[0.0, 0.0], 1.0, 0.51), 1);
    assert_eq!(choose(&[0.0, -1e9], 1.0, 1.0 - f64::EPSILON / 2.0), 0);
}

#[test]
fn a_batch_of_another_shape_is_refused() {
    let mut learner = learner::<f32>(&tiny(2, 16));
    let error = learner.step(&batch(&tiny(3, 16), 0), 1e-3).expect_err("it does not fit").to_string();
    assert_eq!(error, "step 0: the batch is 3 rows of 16 bytes, expected 2 of 16");
}
