//! The objective in whole steps: its gradient, who sees which bytes, how the teacher follows, and what a file replaces.

use std::ops::Range;

use dormouse_reference::{Reference, Scalar, StepKey, Tensor as RefTensor, Tensors};
use rand::RngExt;
use rand_distr::StandardNormal;

use super::*;
use crate::check::letters;
use crate::config::{Engram, Gate, JepaConfig, Rule, preset};
use crate::data::Keys;
use crate::jepa_targets::{Header, TargetsError, Writer};
use crate::learner::counting::Counting;
use crate::rng::{Purpose, stream};
use crate::train::{Learner, StepRecord};

const MODES: [JepaMode; 2] = [JepaMode::Shared, JepaMode::Separate];

fn tiny(mode: JepaMode, rows: usize, seq_bytes: usize) -> Config {
    let mut config = preset("tiny").expect("tiny is a preset");
    (config.train.batch_rows, config.data.seq_bytes, config.jepa.mode) = (rows, seq_bytes, mode);
    config
}

fn learner<T: Scalar>(config: &Config) -> ModelLearner<Reference<T>>
where
    Reference<T>: Backend<Tensor = RefTensor<T>>,
{
    ModelLearner::new(Reference::new(), config).expect("a preset builds")
}

/// A batch whose row r is masked from position 8 + r on, eight positions or fewer: short rows have few spans of their
/// own.
fn batch(config: &Config, step: u64) -> Batch {
    let (rows, len) = (config.train.batch_rows, config.data.seq_bytes);
    let mask = (0..rows).flat_map(|row| (0..len).map(move |at| (8 + row..16 + row).contains(&at))).collect();
    Batch { mask: Some(mask), ..letters(config, step) }
}

fn noise(len: usize, row: u64) -> Vec<f64> {
    let mut rng = stream(13, Purpose::Test, 1, row);
    (0..len).map(|_| 0.02 * rng.sample::<f64, _>(StandardNormal)).collect()
}

/// Moves weights off their symmetric start, and the teacher off the weights.
fn perturb<B: Backend + Witness>(learner: &ModelLearner<B>) -> Vec<f64> {
    let mut flat = learner.flat(&learner.model.params).expect("parameters");
    flat.iter_mut().zip(noise(learner.model.table.len(), 0)).for_each(|(x, noise)| *x += noise);
    learner.upload(&learner.model.params, &flat).expect("parameters");
    let moved: Vec<f64> = flat.iter().zip(noise(flat.len(), 7)).map(|(x, noise)| x + noise).collect();
    learner.set_teacher(&moved).expect("a teacher");
    flat
}

/// The loss of a step whose parts have these losses, and its terms.
fn combined<B: Backend + Witness>(learner: &ModelLearner<B>, losses: &[f64]) -> (f64, Vec<f64>, Aux) {
    let part = learner.jepa.as_ref().expect("the run has the objective");
    let shares = learner.flat(&part.shares).expect("shares");
    let (ce, aux) = part.combine(losses, &shares, learner.config.model.iterations);
    (ce.iter().sum::<f64>() / ce.len() as f64 + part.added(&aux), ce, aux)
}

/// The worst relative difference of a parameter tensor's gradient from central differences, and whose it is.
fn gradient_error(config: &Config, fault: Ablation) -> (f64, &'static str) {
    let mut learner = learner::<f64>(config);
    let base = perturb(&learner);
    learner.set_ablation(fault);
    let batch = batch(config, 0);
    let (gradient, _) = learner.gradient(&batch).expect("a gradient");
    let mut worst = (0.0f64, "none");
    for (row, param) in learner.model.table.params.iter().enumerate() {
        for direction in 0..2u64 {
            let mut rng = stream(11, Purpose::Test, direction, row as u64);
            let v: Vec<f64> = (0..param.len()).map(|_| 0.1 * rng.sample::<f64, _>(StandardNormal)).collect();
            let slope: f64 = gradient[param.range()].iter().zip(&v).map(|(g, v)| g * v).sum();
            let typical = gradient[param.range()].iter().zip(&v).map(|(g, v)| (g * v).powi(2)).sum::<f64>().sqrt();
            assert!(typical > 0.0, "`{}` has no gradient at all", param.name);
            let mut error = f64::INFINITY;
            // The first step that is good enough ends the sweep.
            for h in [1e-4, 1e-5, 1e-3] {
                let at = |h: f64| {
                    let mut moved = base.clone();
                    moved[param.range()].iter_mut().zip(&v).for_each(|(x, v)| *x += h * v);
                    learner.upload(&learner.model.params, &moved).expect("parameters");
                    combined(&learner, &learner.gradient(&batch).expect("losses").1).0
                };
                let difference = (at(h) - at(-h)) / (2.0 * h);
                error = error.min((difference - slope).abs() / difference.abs().max(slope.abs()).max(typical));
                if error < GRADIENT {
                    break;
                }
            }
            if error > worst.0 {
                worst = (error, param.name);
            }
            // Nothing that follows can make this right.
            if error > FAULTY {
                return worst;
            }
        }
    }
    worst
}

/// A run whose terms are no rounding beside the cross-entropy.
fn heavy(mode: JepaMode) -> Config {
    let mut config = tiny(mode, 2, 19);
    config.jepa.weight = 0.5;
    config
}

/// What a fault is at least.
const FAULTY: f64 = 1e3 * GRADIENT;

/// As for the model without the objective: eps^(2/3) = 4e-11 of a loss near 5.5, over derivatives as small as 1e-4 of
/// it. The kinks of both terms are rare: of 16 * 128 distances of order one a step of 1e-5 crosses none as a rule, and
/// the best step of the sweep counts.
const GRADIENT: f64 = 2e-6;

#[test]
fn the_gradient_with_one_student_pass_equals_central_differences_for_every_parameter() {
    let (error, name) = gradient_error(&heavy(JepaMode::Shared), Ablation::None);
    assert!(error > 0.0 && error < GRADIENT, "`{name}`: {error:e}");
}

#[test]
fn the_gradient_with_two_student_passes_equals_central_differences_for_every_parameter() {
    let (error, name) = gradient_error(&heavy(JepaMode::Separate), Ablation::None);
    assert!(error > 0.0 && error < GRADIENT, "`{name}`: {error:e}");
}

#[test]
fn a_gradient_into_the_teacher_is_noticed_by_the_central_differences() {
    let (error, name) = gradient_error(&heavy(JepaMode::Shared), Ablation::TeacherGradient);
    assert!(error > FAULTY, "`{name}`: {error:e}");
}

/// Everything on: memory, objective and the options of the gate. The teacher's latents come from a file, since a teacher
/// reads the model's own rows, which are what is moved here.
fn everything(mode: JepaMode, path: &std::path::Path) -> Config {
    let mut config = heavy(mode);
    let m = &mut config.model;
    (m.engram, m.engram_rows, m.gate, m.beta_scale) = (Engram::Device, 40, Gate::Softplus, 2);
    config.train.total_steps = 1;
    let mut writer = Writer::create(path, header(&config, 1)).expect("a file");
    let latents = noise(2 * 19 * 128, 3).into_iter().map(|x| 50.0 * x as f32).collect::<Vec<_>>();
    writer.add(batch(&config, 0).mask.as_ref().expect("a mask"), &latents).expect("a step");
    writer.finish().expect("a file");
    config.jepa.targets = Some(path.to_owned());
    config
}

#[test]
fn with_everything_on_the_gradient_equals_central_differences_for_every_parameter() {
    let folder = tempfile::tempdir().expect("a folder");
    for mode in MODES {
        let config = everything(mode, &folder.path().join(mode.word()));
        let (error, name) = gradient_error(&config, Ablation::None);
        assert!(error > 0.0 && error < GRADIENT, "{mode:?} `{name}`: {error:e}");
    }
    let (error, name) =
        gradient_error(&everything(JepaMode::Shared, &folder.path().join("fault")), Ablation::DecayGradientScaled);
    assert!(error > FAULTY, "`{name}`: {error:e}");
}

/// With a memory the student's keys are of what it sees and the teacher's of all bytes.
#[test]
fn rows_move_where_the_student_has_read_them_and_nowhere_else() {
    for mode in MODES {
        let mut config = tiny(mode, 2, 24);
        (config.model.engram, config.model.engram_rows) = (Engram::Device, 4096);
        let mut learner = learner::<f32>(&config);
        let batch = batch(&config, 0);
        learner.step(&batch, 1e-3).expect("a step");
        let state = learner.export().expect("a state");
        let counts = state.optimizer["engram.counts"].as_u32().expect("counts are u32").to_vec();
        let mask = ndarray::ArrayView2::from_shape((2, 24), batch.mask.as_ref().expect("a mask")).expect("a grid");
        let rows = |mask| Keys::new(batch.ids().view(), mask, 4096).rows;
        let (seen, all) = (rows(Some(mask)), rows(None));
        let hidden = all.iter().filter(|row| !seen.contains(row)).count();
        assert!(hidden > 10, "{hidden}");
        for (row, count) in counts.iter().enumerate() {
            let row = row as u32;
            let moves = seen.contains(&row) || (mode == JepaMode::Separate && all.contains(&row));
            assert_eq!(*count, u32::from(moves), "{mode:?}: row {row}");
        }
    }
}

#[test]
fn with_an_objective_a_table_on_the_host_gives_the_bits_of_one_on_the_device_and_resumes() {
    for (mode, parts) in [(JepaMode::Shared, 1), (JepaMode::Shared, 2), (JepaMode::Separate, 2)] {
        let [device, host] = [Engram::Device, Engram::Host].map(|engram| {
            let mut config = tiny(mode, 2, 24);
            (config.model.engram, config.model.engram_rows, config.optimizer.rule) = (engram, 60, Rule::Muon);
            config.train.accumulate = parts;
            config
        });
        let (want, records) = run(&mut learner(&device), 0..4);
        let (got, host_records) = run(&mut learner(&host), 0..4);
        assert_eq!(records, host_records, "{mode:?}");
        let mut on_device = learner::<f32>(&device);
        on_device.import(&got).expect("it imports");
        assert_eq!(on_device.export().expect("a state"), want, "{mode:?}");
        let (half, _) = run(&mut learner(&host), 0..2);
        let mut resumed = learner::<f32>(&host);
        resumed.import(&half).expect("it imports");
        assert_eq!(run(&mut resumed, 2..4).0, got, "{mode:?}");
    }
}

/// Which of cross-entropy, jepa and koleo change with a byte that is masked, as its neighbour before it is.
fn moved_by_a_masked_byte(fault: Ablation) -> [bool; 3] {
    let config = tiny(JepaMode::Shared, 2, 19);
    let mut learner = learner::<f32>(&config);
    perturb(&learner);
    learner.set_ablation(fault);
    let first = batch(&config, 0);
    let mut second = first.clone();
    second.bytes[12] ^= 7;
    let terms = |batch: &Batch| {
        let (_, ce, aux) = combined(&learner, &learner.gradient(batch).expect("losses").1);
        [ce, vec![aux.jepa.expect("a term")], vec![aux.koleo.expect("a term")]]
    };
    let (first, second) = (terms(&first), terms(&second));
    std::array::from_fn(|i| first[i] != second[i])
}

#[test]
fn the_student_never_sees_a_masked_byte_and_the_teacher_does() {
    assert_eq!(moved_by_a_masked_byte(Ablation::None), [false, true, false]);
    // A teacher on masked bytes is noticed, and so is a cross-entropy that counts masked positions.
    assert_eq!(moved_by_a_masked_byte(Ablation::TeacherSeesMask), [false, false, false]);
    assert_eq!(moved_by_a_masked_byte(Ablation::MaskedCrossEntropy), [true, true, false]);
}

#[test]
fn the_cross_entropy_of_a_pass_of_its_own_is_that_of_a_run_without_the_objective() {
    let config = tiny(JepaMode::Separate, 2, 19);
    let off = tiny(JepaMode::Off, 2, 19);
    let with = learner::<f32>(&config).gradient(&batch(&config, 0)).expect("losses").1;
    let without = learner::<f32>(&off).gradient(&letters(&off, 0)).expect("losses").1;
    // To the bit: initial values do not move, and neither does the arithmetic.
    assert_eq!(with[..2], without);
    assert_eq!((with.len(), without.len()), (4, 2));
}

#[test]
fn without_a_masked_position_there_are_no_terms_and_the_gradient_is_that_without_the_objective() {
    let off = tiny(JepaMode::Off, 2, 19);
    let without = learner::<f32>(&off);
    let (want, ce) = without.gradient(&letters(&off, 0)).expect("a gradient");
    for mode in MODES {
        let config = tiny(mode, 2, 19);
        let learner = learner::<f32>(&config);
        let nothing = Batch { mask: Some(vec![false; 38]), ..batch(&config, 0) };
        let (got, losses) = learner.gradient(&nothing).expect("a gradient");
        let (_, got_ce, aux) = combined(&learner, &losses);
        assert_eq!((got_ce, aux), (ce.clone(), Aux { jepa: None, koleo: None }), "{mode:?}");
        for param in &learner.model.table.params {
            let got = &got[param.range()];
            match without.model.table.params.iter().find(|of| of.name == param.name) {
                None => assert!(got.iter().all(|&g| g == 0.0), "{mode:?}: {}", param.name),
                Some(_) if mode == JepaMode::Separate => {}
                Some(of) => assert_eq!(*got, want[of.range()], "{}", param.name),
            }
        }
    }
}

#[test]
fn a_batch_without_a_mask_of_its_size_is_refused() {
    let config = tiny(JepaMode::Shared, 2, 19);
    let learner = learner::<f32>(&config);
    for (mask, got) in [(None, "got none"), (Some(vec![true; 5]), "got 5")] {
        let error = learner.gradient(&Batch { mask, ..batch(&config, 0) }).expect_err("no mask").to_string();
        assert!(error.contains(got), "{error}");
    }
}

/// Steps of a learner, and what it has then.
fn run(learner: &mut ModelLearner<Reference<f32>>, steps: Range<u64>) -> (State, Vec<StepRecord>) {
    for step in steps {
        let batch = batch(&learner.config, step);
        learner.step(&batch, 1e-3).expect("a step");
    }
    (learner.export().expect("a state"), learner.drain().expect("records"))
}

#[test]
fn the_teacher_starts_as_the_model_and_lags_by_the_momentum() {
    for rule in [Rule::Adamw, Rule::Muon] {
        let mut config = tiny(JepaMode::Shared, 2, 24);
        config.optimizer.rule = rule;
        let mut learner = learner::<f32>(&config);
        let before = learner.export().expect("a state");
        assert_eq!(before.teacher, before.weights);
        let (after, records) = run(&mut learner, 0..1);
        assert!(records[0].applied && records[0].aux.is_some());
        let values = |tensor: &Tensor| tensor.as_f32().expect("it is f32").to_vec();
        let take = (1.0 - 0.999f64) as f32;
        let mut moved = 0;
        for (name, teacher) in &after.teacher {
            let (then, now) = (values(&before.teacher[name]), values(&after.weights[name]));
            let want: Vec<f32> = then.iter().zip(&now).map(|(t, o)| t + take * (o - t)).collect();
            assert_eq!(values(teacher), want, "`{name}`");
            moved += usize::from(want != then);
        }
        assert!(moved > 20, "{moved} tensors of the teacher moved");
    }
}

#[test]
fn a_skipped_step_leaves_the_teacher_and_a_term_that_is_not_finite_skips_the_step() {
    for mode in MODES {
        let config = tiny(mode, 2, 24);
        let mut learner = learner::<f32>(&config);
        let (before, _) = run(&mut learner, 0..2);
        // Only the distance is NaN: its gradient is zero there, so nothing but the loss shows it.
        let mut teacher =
            learner.teacher_of(&before, &learner.flat(&learner.model.params).expect("weights")).expect("fits");
        let whole = teacher.clone();
        teacher[learner.model.table.get("out.s").start] = f64::NAN;
        learner.set_teacher(&teacher).expect("a NaN uploads");
        learner.step(&batch(&config, 2), 1e-3).expect("a step");
        learner.set_teacher(&whole).expect("a teacher");
        let record = learner.drain().expect("records").remove(0);
        assert!(
            !record.applied && record.aux.is_some_and(|aux| aux.jepa.is_some_and(f64::is_nan)),
            "{mode:?}: {record:?}"
        );
        assert_eq!(record.nonfinite, 1, "{mode:?}");
        learner.set_ablation(Ablation::NanGradient);
        let (mut after, records) = run(&mut learner, 3..4);
        assert!(!records[0].applied);
        after.optimizer.insert("counters".to_owned(), before.optimizer["counters"].clone());
        assert_eq!(after, before, "{mode:?}");
        learner.set_ablation(Ablation::None);
        let (after, _) = run(&mut learner, 4..5);
        assert_ne!(after.teacher, before.teacher);
    }
}

#[test]
fn ten_and_ten_steps_are_twenty_bit_for_bit_with_a_teacher() {
    for mode in MODES {
        let config = tiny(mode, 2, 24);
        let straight = run(&mut learner(&config), 0..20).0;
        let (half, _) = run(&mut learner(&config), 0..10);
        let resume = |state: &State| {
            let mut resumed = learner::<f32>(&Config { seed: 77, ..config.clone() });
            resumed.import(state).map(|()| run(&mut resumed, 10..20).0)
        };
        assert_eq!(resume(&half).expect("it imports"), straight, "{mode:?}");
        // The teacher counts, and one that is not there does not start over in silence.
        let started_over = State { teacher: half.weights.clone(), ..half.clone() };
        assert_ne!(resume(&started_over).expect("it imports"), straight, "{mode:?}");
        let error = resume(&State { teacher: Default::default(), ..half.clone() }).expect_err("no teacher").to_string();
        assert_eq!(error, "checkpoint: the teacher's `embedding` is missing");
    }
}

#[test]
fn import_refuses_a_teacher_that_does_not_fit_and_stays_unchanged() {
    let config = tiny(JepaMode::Shared, 2, 24);
    let mut learner = learner::<f32>(&config);
    let good = learner.export().expect("a state");
    let mut refuse = |change: &dyn Fn(&mut State)| {
        let mut state = good.clone();
        change(&mut state);
        let error = learner.import(&state).expect_err("it does not fit").to_string();
        assert_eq!(learner.export().expect("a state"), good);
        error
    };
    let shape = refuse(&|s| drop(s.teacher.insert("rho".into(), Tensor::f32(&[2], vec![1.0; 2]))));
    assert_eq!(shape, "checkpoint: the teacher's `rho` is [2], expected [1]");
    let unknown = refuse(&|s| drop(s.teacher.insert("bias".into(), Tensor::f32(&[1], vec![1.0]))));
    assert_eq!(unknown, "checkpoint: the teacher's `bias` is none of this model's");
    let mut off = self::learner::<f32>(&tiny(JepaMode::Off, 2, 24));
    let mut state = off.export().expect("a state");
    state.teacher.clone_from(&state.weights);
    assert_eq!(
        off.import(&state).expect_err("a teacher").to_string(),
        "checkpoint: it has a teacher, and this run has none"
    );
}

#[test]
fn parts_of_a_batch_add_up_to_the_whole_but_for_koleo() {
    for mode in MODES {
        let gradients = |parts: usize, koleo: bool| {
            let mut config = tiny(mode, 8, 21);
            config.train.accumulate = parts;
            let learner = learner::<f64>(&config);
            perturb(&learner);
            let mut batch = batch(&config, 0);
            // One row without a mask, and rows with unequal numbers of masked positions.
            batch.mask.as_mut().expect("a mask")[21..42].fill(false);
            learner.upload_batch(&batch).expect("it uploads");
            let part = learner.jepa.as_ref().expect("the run has the objective");
            if !koleo {
                for i in 0..parts {
                    let weight = learner.b.view(&part.weights, i * WEIGHTS + 2, &[1]).expect("a weight");
                    learner.upload(&weight, &[0.0]).expect("it uploads");
                }
            }
            let key = StepKey { purpose: "test", variant: 0 };
            learner.b.step(&key, &mut |b| learner.gradients(b)).expect("a step");
            let (_, ce, aux) = combined(&learner, &learner.flat(&learner.losses).expect("losses"));
            let aux = [aux.jepa.expect("a term"), aux.koleo.expect("a term")];
            (learner.flat(&learner.model.grads).expect("gradients"), ce, aux)
        };
        let (whole, ce, aux) = gradients(1, false);
        let size = whole.iter().map(|g| g.abs()).fold(0.0, f64::max);
        // Other orders of the same f64 sums over 168 positions.
        let equal = |x: f64, y: f64| (x / y - 1.0).abs() < 1e-13;
        for parts in [2, 4, 8] {
            let (sum, parts_ce, parts_aux) = gradients(parts, false);
            assert!(ce.iter().zip(&parts_ce).all(|(&x, &y)| equal(x, y)), "{mode:?}, {parts} parts");
            assert!(equal(aux[0], parts_aux[0]), "{mode:?}, {parts} parts: {} {}", aux[0], parts_aux[0]);
            let worst = sum.iter().zip(&whole).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
            assert!(worst <= 1e-13 * size, "{mode:?}, {parts} parts: {worst:e} of {size:e}");
            // Neighbours in other parts are out of sight, so the nearest are as far off or farther and the term is smaller.
            let (nearer, seen) = (parts_aux[1], aux[1]);
            assert!(nearer < seen || (parts < 8 && equal(nearer, seen)), "{parts} parts: {nearer} and {seen}");
        }
        assert_ne!(gradients(2, true).0, gradients(1, true).0);
    }
}

#[test]
fn one_batch_can_be_learnt_by_heart_beside_the_objective() {
    for mode in MODES {
        let config = tiny(mode, 2, 24);
        let mut learner = learner::<f32>(&config);
        let (mut ce, mut first) = (f64::INFINITY, None);
        let mut last = f64::INFINITY;
        for step in 0..400 {
            learner.step(&Batch { step, ..batch(&config, 0) }, 3e-3).expect("a step");
            let record = learner.drain().expect("records").remove(0);
            ce = record.ce.iter().sum::<f64>() / record.ce.len() as f64;
            last = record.aux.expect("the run has the objective").jepa.expect("something is masked");
            first = first.or(Some(last));
            if ce < 0.05 {
                break;
            }
        }
        assert!(ce < 0.05, "{mode:?}: {ce}");
        // The prediction comes closer as well.
        assert!(last < 0.9 * first.expect("a step"), "{mode:?}: {first:?} {last:?}");
    }
}

fn header(config: &Config, steps: u64) -> Header {
    Header {
        teacher_step: 0,
        seed: config.seed,
        first_step: 0,
        steps,
        rows: config.train.batch_rows as u32,
        len: config.data.seq_bytes as u32,
        width: config.model.width as u32,
        data: [0; 32],
        source: [7; 32],
    }
}

#[test]
fn a_file_of_targets_gives_the_bits_of_a_frozen_teacher() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("targets");
    for (mode, parts) in [(JepaMode::Shared, 1), (JepaMode::Separate, 1), (JepaMode::Shared, 2)] {
        let mut frozen = tiny(mode, 2, 24);
        (frozen.train.accumulate, frozen.train.total_steps, frozen.jepa.momentum) = (parts, 5, 1.0);
        let mut writer = Writer::create(&path, header(&frozen, 5)).expect("a file");
        // What a teacher is made of, without the objective.
        let mut teacher = learner::<f32>(&Config { jepa: JepaConfig::default(), ..frozen.clone() });
        for step in 0..5 {
            let batch = batch(&frozen, step);
            let latents = teacher.latents(&batch).expect("latents");
            assert_eq!(latents, teacher.latents(&batch).expect("latents"));
            writer.add(batch.mask.as_ref().expect("a mask"), &latents).expect("a step");
        }
        writer.finish().expect("a file");
        let mut read = frozen.clone();
        read.jepa.targets = Some(path.clone());
        let mut reading = learner::<f32>(&read);
        assert_eq!(reading.facts().targets.as_deref(), Some("07".repeat(32).as_str()));
        let (want, records) = run(&mut learner(&frozen), 0..5);
        let (got, read_records) = run(&mut reading, 0..5);
        assert_eq!(records, read_records, "{mode:?}");
        assert_eq!((&got.weights, &got.optimizer), (&want.weights, &want.optimizer), "{mode:?}");
        assert!(got.teacher.is_empty());
        // A frozen teacher keeps its first weights, and one that follows gives other bits.
        assert_eq!(want.teacher, learner::<f32>(&frozen).export().expect("a state").weights);
        frozen.jepa.momentum = 0.5;
        assert_ne!(run(&mut learner(&frozen), 0..5).1, records, "{mode:?}");
        // Half the steps, and the rest from a checkpoint: the file is found at its place.
        let (half, _) = run(&mut learner(&read), 0..2);
        let mut resumed = learner::<f32>(&read);
        resumed.import(&half).expect("it imports");
        assert_eq!(run(&mut resumed, 2..5).0, got, "{mode:?}");
    }
}

#[test]
fn a_file_of_targets_that_does_not_fit_is_refused_before_the_first_step() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("targets");
    let mut config = tiny(JepaMode::Shared, 2, 24);
    (config.train.total_steps, config.jepa.targets) = (3, Some(path.clone()));
    let built =
        |config: &Config| ModelLearner::new(Reference::<f32>::new(), config).map(|_| ()).expect_err("no file fits");
    let is = |error: &anyhow::Error| error.downcast_ref::<TargetsError>().expect("an error of targets").to_string();
    assert!(is(&built(&config)).contains("cannot open"));
    let mut writer = Writer::create(&path, header(&config, 2)).expect("a file");
    for step in 0..2 {
        let batch = batch(&config, step);
        writer.add(batch.mask.as_ref().expect("a mask"), &[0.5; 2 * 24 * 128]).expect("a step");
    }
    writer.finish().expect("a file");
    assert!(is(&built(&config)).contains("step 2 is not in"), "{}", is(&built(&config)));
    assert!(is(&built(&Config { seed: 9, ..config.clone() })).contains("was made for seed 0, this run has 9"));
    config.train.total_steps = 2;
    // The mask of a step is checked when the step comes.
    let mut learner = learner::<f32>(&config);
    let mut other = batch(&config, 0);
    other.mask.as_mut().expect("a mask")[0] = true;
    let error = learner.step(&other, 1e-3).expect_err("another mask");
    assert!(is(&error).contains("belong to another mask"), "{error}");
}

#[test]
fn the_terms_are_in_the_record_and_the_loss_is_their_weighted_sum() {
    let mut config = tiny(JepaMode::Shared, 4, 24);
    (config.train.accumulate, config.jepa.weight) = (2, 0.25);
    let mut learner = learner::<f32>(&config);
    for record in &run(&mut learner, 0..3).1 {
        let aux = record.aux.expect("the run has the objective");
        let (jepa, koleo) = (aux.jepa.expect("a term"), aux.koleo.expect("a term"));
        let ce = record.ce.iter().sum::<f64>() / 2.0;
        assert!((record.loss - (ce + 0.25 * (jepa + 0.1 * koleo))).abs() < 1e-12, "{record:?}");
        // The distance of an untrained prediction to a normalised row is of order one.
        assert!((0.3..3.0).contains(&jepa) && koleo.is_finite(), "{aux:?}");
        assert_eq!(record.ce.len(), 2);
    }
}

#[test]
fn what_is_asked_of_the_operations_is_what_runs() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("targets");
    for (mode, reads) in
        MODES.into_iter().flat_map(|mode| [(mode, false), (mode, true)]).chain([(JepaMode::Off, false)])
    {
        for parts in [1, 2] {
            let mut config = tiny(mode, 2, 24);
            (config.train.accumulate, config.train.total_steps) = (parts, 1);
            let batch = batch(&config, 0);
            if reads {
                let mut writer = Writer::create(&path, header(&config, 1)).expect("a file");
                writer.add(batch.mask.as_ref().expect("a mask"), &[0.5; 2 * 24 * 128]).expect("a step");
                writer.finish().expect("a file");
                config.jepa.targets = Some(path.clone());
            }
            let mut learner = ModelLearner::new(Counting::default(), &config).expect("a preset builds");
            learner.b.take();
            learner.step(&batch, 1e-3).expect("a step");
            let mut asked = std::collections::BTreeMap::<&str, [u64; 2]>::new();
            for ask in learner.asks(true, true).into_iter().chain(learner.update_asks(true)) {
                let sum = asked.entry(ask.stem).or_default();
                (sum[0], sum[1]) = (sum[0] + ask.forward, sum[1] + ask.backward);
            }
            let ran = learner.b.take();
            assert_eq!(ran, asked, "{mode:?}, targets: {reads}, {parts} parts");
            // Two iterations a pass: a student's or two, and a teacher's.
            let passes = 1 + u64::from(mode != JepaMode::Off && !reads) + u64::from(mode == JepaMode::Separate);
            assert_eq!(ran["kda"][0], 2 * parts as u64 * passes);
            assert_eq!(ran.contains_key("ema"), mode != JepaMode::Off && !reads);
            learner.latents(&batch).expect("latents");
            let asked =
                learner.model.latent_asks(false).into_iter().map(|ask| (ask.stem, [parts as u64 * ask.forward, 0]));
            let asked = asked.filter(|(_, calls)| calls[0] > 0).collect();
            assert_eq!(learner.b.take(), asked, "latents in {parts} parts");
        }
    }
}
