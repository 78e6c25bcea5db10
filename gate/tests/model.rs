//! The whole model `tiny` on Burn's operations against the reference, both in f64.
//!
//! The model's forward and backward pass are one text over [`Backend`], so what Burn judges here are the operations as
//! the model uses them: on views into one flat buffer, with leading axes split otherwise, with gradients that several
//! readers have summed. Each gradient of an operation is Burn's autodiff.
#![cfg(feature = "oracle")]

use dormouse::config::preset;
use dormouse::model::{Ablation, Batch, Model};
use dormouse_burn::Cpu64;
use dormouse_harness::compare::{Tolerance, compare};
use dormouse_reference::{Backend, DType, Precision, Reference, Result};
use ndarray::{Array1, ArrayD, ArrayView1, IxDyn};

const ROWS: usize = 2;
const BYTES: usize = 24;

/// Gate `oracle` holds an operation to `tolerance::FORM`, 1e-12. On the longest way from a byte to a loss lie 2 times
/// 13 operations: norm, projection, convolution, norm, recurrence, norm, projection, blend, residual, out map, norm,
/// head and cross-entropy of each iteration. As many lie on the way back. As long as none enlarges a relative error, 52
/// of 1e-12 add up, and a gradient is a sum over both iterations.
const CHAIN: Tolerance = Tolerance::new(1e-10, "2 sums of 52 operations in a row, each within 1e-12");

/// Losses by iteration and gradients by parameter.
struct Pass {
    losses: Vec<f64>,
    grads: Vec<(&'static str, ArrayD<f64>)>,
}

fn pass<B: Backend>(b: &B, ablation: Ablation) -> Result<Pass> {
    let config = preset("tiny").expect("tiny is a preset").model;
    let mut model = Model::new(b, &config, |_| Precision::Full)?;
    model.ablation = ablation;
    // Off the symmetric start (zero iteration embedding, unit gains), where some gradients vanish.
    let initial = model.table.initial(3).into_iter().enumerate();
    let params: Array1<f64> = initial.map(|(i, x)| x + 0.02 * (i as f64).sin()).collect();
    b.upload(params.into_dyn().view(), &model.params)?;
    let text = |row: usize, at: usize| ((row * 31 + at * at * 7 + at * 3) % 26 + 97) as f64;
    let bytes = |from: usize| -> Result<B::Tensor> {
        let tensor = b.persistent(&[ROWS, BYTES], DType::U8)?;
        let values = ArrayD::from_shape_fn(IxDyn(&[ROWS, BYTES]), |i| text(i[0], i[1] + from));
        b.upload(values.view(), &tensor)?;
        Ok(tensor)
    };
    let (ids, targets) = (bytes(0)?, bytes(1)?);
    let weight = b.persistent(&[1], b.float())?;
    b.fill(&weight, 1.0 / config.iterations as f64)?;
    let forward = model.forward(b, &Batch { ids: &ids, targets: Some(&targets), denominator: ROWS * BYTES }, None)?;
    model.backward(b, &forward, &weight)?;
    let losses = forward.losses.iter().map(|loss| Ok(b.download(loss)?[[0]])).collect::<Result<_>>()?;
    let grads = b.download(&model.grads)?.into_raw_vec_and_offset().0;
    let of = |param: &dormouse::model::Param| {
        ArrayD::from_shape_vec(IxDyn(&param.shape), grads[param.range()].to_vec()).expect("a range fills its shape")
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
    assert_eq!(got.losses.len(), 2, "a loss for every iteration");
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
        (Ablation::NanActivation, "losses"),
    ] {
        let broken = pass(&Cpu64::new(), fault).expect("Burn runs");
        let (red, _) = differences(&broken, &want);
        assert!(red.contains(&first), "{fault:?} turns {red:?} red");
        // What lies behind no fault of the way back stays as it is.
        assert_eq!(red.contains(&"head.u"), fault == Ablation::NanActivation, "{fault:?} turns {red:?} red");
    }
}
