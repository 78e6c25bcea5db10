//! The whole model `tiny` on Burn's operations against the reference, both in f64.
//!
//! The model's forward and backward pass are one text over [`Backend`], so what Burn judges here are the operations as
//! the model uses them: on views into one flat buffer, with leading axes split otherwise, with gradients that several
//! readers have summed. Each gradient of an operation is Burn's autodiff.
#![cfg(feature = "oracle")]

use dormouse::config::{Engram, JepaMode, preset};
use dormouse::data::Keys;
use dormouse::model::{Ablation, Batch, Memory, Model, Pass as Reads, Table, Upstream};
use dormouse_burn::Cpu64;
use dormouse_harness::compare::{Tolerance, compare};
use dormouse_reference::{Backend, DType, Precision, Reference, Result};
use ndarray::{Array1, Array2, ArrayD, ArrayView1, arr1};

const ROWS: usize = 2;
const BYTES: usize = 24;

/// An operation is held to `tolerance::FORM`, 1e-12, by gate `oracle`. On the longest way from a byte to a gradient 30
/// operations lie behind one another on the way forward: the mask vector, N = 2 times 13 of a block (norm, projection,
/// convolution, norm, recurrence, norm, projection, blend, residual, out map, norm, head, cross-entropy), and in place of
/// the last three the predictor's norm, its projection and the distance; and as many on the way back. As long as none
/// enlarges a relative error, 60 of 1e-12 add up, and twice that, since a tensor's gradient is a sum of both iterations'.
const CHAIN: Tolerance = Tolerance::new(1.2e-10, "2 sums of 60 operations in a row, each within 1e-12");

/// Losses by iteration and of both terms of the objective, and gradients by parameter.
struct Pass {
    losses: Vec<f64>,
    grads: Vec<(&'static str, ArrayD<f64>)>,
}

/// Whether the student does not see a byte.
fn masked(row: usize, at: usize) -> bool {
    (8 + row..16 + row).contains(&at)
}

/// One step with everything on: the n-gram memory, and the JEPA objective against a teacher of other weights.
fn pass<B: Backend>(b: &B, ablation: Ablation) -> Result<Pass> {
    let mut config = preset("tiny").expect("tiny is a preset");
    // Few rows, so that every one is read.
    (config.model.engram, config.model.engram_rows, config.jepa.mode) = (Engram::Device, 20, JepaMode::Shared);
    let mut model = Model::new(b, &config.model, Table::of(&config), |_| Precision::Full)?;
    model.ablation = ablation;
    let upload = |values: ArrayD<f64>, dtype: DType| -> Result<B::Tensor> {
        let tensor = b.persistent(values.shape(), dtype)?;
        b.upload(values.view(), &tensor)?;
        Ok(tensor)
    };
    // Off the symmetric start (zero iteration embedding, unit gains), where some gradients vanish.
    let initial = model.table.initial(3);
    let off =
        |by: f64| initial.iter().enumerate().map(|(i, x)| x + 0.02 * (by * i as f64).sin()).collect::<Array1<_>>();
    b.upload(off(1.0).into_dyn().view(), &model.params)?;
    let teacher = upload(off(1.1).into_dyn(), b.float())?;
    let text = |row: usize, at: usize| ((row * 31 + at * at * 7 + at * 3) % 26 + 97) as u8;
    let grid = |from: usize| Array2::from_shape_fn((ROWS, BYTES), |(row, at)| text(row, at + from));
    let bytes = |from: usize| upload(grid(from).mapv(f64::from).into_dyn(), DType::U8);
    let (ids, targets) = (bytes(0)?, bytes(1)?);
    let mask = Array2::from_shape_fn((ROWS, BYTES), |(row, at)| masked(row, at));
    let flags = |of: bool| upload(mask.mapv(|masked| f64::from(u8::from(masked == of))).into_dyn(), DType::U8);
    let (unseen, visible) = (flags(true)?, flags(false)?);
    let keys = |mask| -> Result<(B::Tensor, B::Tensor)> {
        let keys = Keys::new(grid(0).view(), mask, config.model.engram_rows);
        let ids = |ids: &[u32]| ids.iter().map(|&id| f64::from(id)).collect::<Array1<_>>();
        let rows = ids(&keys.rows).into_shape_with_order((ROWS, BYTES, 3)).expect("three rows a byte");
        Ok((upload(rows.into_dyn(), DType::U32)?, upload(ids(&keys.order).into_dyn(), DType::U32)?))
    };
    let (student_keys, plain_keys) = (keys(Some(mask.view()))?, keys(None)?);
    let batch = |targets, (rows, order)| Batch {
        ids: &ids,
        targets,
        denominator: ROWS * BYTES,
        memory: Some(Memory { rows, order: Some(order), table: None }),
    };
    let student = batch(Some(&targets), (&student_keys.0, &student_keys.1));
    let plain = batch(None, (&plain_keys.0, &plain_keys.1));
    let weight = |value: f64| upload(arr1(&[value]).into_dyn(), b.float());
    let (weight_ce, weight_jepa, weight_koleo) = (weight(0.5)?, weight(0.5)?, weight(0.05)?);
    let latents = model.forward_pass(b, &plain, None, Reads::Teacher { params: &teacher })?.latents;
    let forward = model.forward_pass(b, &student, None, Reads::Shared { mask: &unseen, visible: &visible })?;
    let (z, latents) = (forward.latents.as_ref().expect("a student"), latents.expect("a teacher"));
    let objective = model.objective(b, z, &latents, &unseen)?;
    let upstream = Upstream { jepa: &weight_jepa, koleo: &weight_koleo };
    model.backward_of_objective(b, &forward, Some(&weight_ce), &objective, upstream)?;
    let losses = forward.losses.iter().chain([&objective.jepa, &objective.koleo]);
    let losses = losses.map(|loss| Ok(b.download(loss)?[[0]])).collect::<Result<_>>()?;
    let grads = b.download(&model.grads)?.into_raw_vec_and_offset().0;
    let of = |param: &dormouse::model::Param| {
        ArrayD::from_shape_vec(param.shape.clone(), grads[param.range()].to_vec()).expect("a range fills its shape")
    };
    Ok(Pass { losses, grads: model.table.params.iter().map(|param| (param.name, of(param))).collect() })
}

/// What differs, by name, and the worst share of the tolerance.
fn differences(got: &Pass, want: &Pass) -> (Vec<&'static str>, f64) {
    let (mut red, mut worst) = (Vec::new(), 0.0f64);
    let [got_losses, want_losses] = [got, want].map(|pass| ArrayView1::from(&pass.losses).into_dyn());
    let mut note = |name, comparison: dormouse_harness::compare::Comparison| {
        worst = worst.max(comparison.worst);
        if !comparison.passes() {
            eprintln!("{}", comparison.message);
            red.push(name);
        }
    };
    note("losses", compare("losses", got_losses, want_losses, &CHAIN));
    for ((name, got), (_, want)) in got.grads.iter().zip(&want.grads) {
        assert!(want.iter().any(|x| *x != 0.0), "`{name}` has no gradient, so nothing is compared");
        note(name, compare(name, got.view(), want.view(), &CHAIN));
    }
    (red, worst)
}

#[test]
fn the_whole_model_on_burn_has_the_losses_and_gradients_of_the_reference_and_faults_are_seen() {
    let want = pass(&Reference::<f64>::new(), Ablation::None).expect("the reference runs");
    let got = pass(&Cpu64::new(), Ablation::None).expect("Burn runs");
    assert_eq!(got.losses.len(), 4, "a loss for every iteration, and both terms of the objective");
    let (red, worst) = differences(&got, &want);
    assert!(red.is_empty(), "{red:?}");
    // Two implementations that agree to the last bit would be one.
    assert!(worst > 0.0, "a thing was compared with itself");
    println!("worst {worst:.1e} of the tolerance over {} tensors", want.grads.len());
    for (fault, first) in [
        (Ablation::DecayGradientScaled, "kda.dt_bias"),
        (Ablation::DecayBiasDropped, "kda.dt_bias"),
        (Ablation::FirstHeadBetaDropped, "kda.beta"),
        (Ablation::DetachRecurrence, "kda.q"),
        (Ablation::DetachMemory, "engram.table"),
        (Ablation::MaskedCrossEntropy, "losses"),
        (Ablation::NanActivation, "losses"),
    ] {
        let broken = pass(&Cpu64::new(), fault).expect("Burn runs");
        let (red, _) = differences(&broken, &want);
        assert!(red.contains(&first), "{fault:?} turns {red:?} red");
        // What lies behind no fault of the way back stays as it is.
        let forward = matches!(fault, Ablation::NanActivation | Ablation::MaskedCrossEntropy);
        assert_eq!(red.contains(&"head.u"), forward, "{fault:?} turns {red:?} red");
    }
}
