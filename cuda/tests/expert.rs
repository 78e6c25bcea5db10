//! Arm `fused` of `expert` where the case table does not reach: several chunks of hidden rows and of tokens, ragged ends
//! on every axis, ranks that need several fragments, and how many launches a call is. Where no adapter answers, every
//! test says so and why.

mod common;

use common::device;
use dormouse_cuda::{Arm, Gpu, Tensor};
use dormouse_reference::expert::{self, Config, Expert, Ffn, Inputs, Outputs, Params};
use dormouse_reference::{DType, Error, FactorFormat, Precision, StepKey, Tensors};
use ndarray::{ArrayD, IxDyn};

/// E, N, D, F, R.
type Sizes = [usize; 5];

/// Numbers in -1..1 that look random.
fn noise(shape: &[usize], seed: u64) -> ArrayD<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    ArrayD::from_shape_fn(IxDyn(shape), |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    })
}

fn persistent(b: &Gpu, values: &ArrayD<f64>) -> Tensor {
    let tensor = b.persistent(values.shape(), DType::F32).unwrap();
    b.upload(values.view(), &tensor).unwrap();
    tensor
}

fn params(b: &Gpu, [experts, _, width, hidden, rank]: Sizes, scale: impl Fn(usize) -> f64) -> Params<Tensor> {
    let matrix = |rows: usize, seed: u64| persistent(b, &(noise(&[experts, rows, rank], seed) * scale(rows)));
    let vector = |seed: u64| persistent(b, &(noise(&[experts, rank], seed) * scale(1)));
    Params {
        up_u: matrix(width, 1),
        up_s: vector(2),
        up_v: matrix(hidden, 3),
        down_u: matrix(hidden, 4),
        down_s: vector(5),
        down_v: matrix(width, 6),
        gate_u: None,
        gate_s: None,
        gate_v: None,
    }
}

/// y, du and the gradients of the parameters, by name, and the launches of both passes.
fn run(b: &Gpu, arm: Arm, precision: Precision, sizes: Sizes) -> (Vec<(&'static str, ArrayD<f64>)>, [u64; 2]) {
    run_in(FactorFormat::F32, b, arm, precision, sizes)
}

/// The same with factors in a format.
fn run_in(
    format: FactorFormat,
    b: &Gpu,
    arm: Arm,
    precision: Precision,
    sizes: Sizes,
) -> (Vec<(&'static str, ArrayD<f64>)>, [u64; 2]) {
    let [experts, rows, width, ..] = sizes;
    b.set_arms(arm);
    let config = Config { precision, ffn: Ffn::Silu, format };
    // As large as orthonormal columns, so that the activation has something to bend.
    let params_ = params(b, sizes, |rows| 2.0 / (rows as f64).powf(0.25));
    let into = params(b, sizes, |_| 0.0);
    let u = persistent(b, &noise(&[rows, width], 7));
    let plus = persistent(b, &noise(&[rows, width], 8));
    let dy = persistent(b, &noise(&[experts, rows, width], 9));
    let start = b.ledger().count();
    let (outputs, saved) = Expert::forward(b, &config, Inputs { u: &u }, params_.as_ref()).unwrap();
    let middle = b.ledger().count();
    let grads: expert::Grads<_> =
        Expert::backward(b, &config, &saved, Outputs { y: &dy }, Some(&plus), into.as_ref()).unwrap();
    let end = b.ledger().count();
    let mut all = vec![("y", b.download(&outputs.y).unwrap()), ("du", b.download(&grads.du).unwrap())];
    all.extend(into.as_ref().named().into_iter().map(|(name, tensor)| (name, b.download(tensor).unwrap())));
    (all, [middle - start, end - middle])
}

/// Largest relative RMS difference to the plain kernels in f32, with the name of the tensor.
fn worst(b: &Gpu, precision: Precision, sizes: Sizes) -> (f64, &'static str) {
    let (expected, _) = run(b, Arm::Plain, Precision::Full, sizes);
    let (got, _) = run(b, Arm::Fused, precision, sizes);
    let norm = |a: &ArrayD<f64>| a.iter().map(|x| x * x).sum::<f64>().sqrt();
    let errors = expected.iter().zip(&got).map(|((name, want), (_, got))| (norm(&(got - want)) / norm(want), *name));
    errors.fold((0.0, "nothing"), |a, b| if b.0 > a.0 { b } else { a })
}

/// As in `dormouse_harness::tolerance`: a product of rounded operands is off by sqrt(2) roundings of 2^-9 in bf16 and
/// 2^-11 in tf32, RMS to RMS; there are up to eight in a row, and twice that covers what a sample of them does.
fn bound(precision: Precision) -> f64 {
    let rounding = if precision == Precision::Bf16 { 2f64.powi(-9) } else { 2f64.powi(-11) };
    2.0 * (2.0 * 8.0f64).sqrt() * rounding
}

#[test]
fn several_chunks_and_ragged_ends_are_the_plain_kernels_but_for_rounding() {
    let Some(b) = device() else { return };
    // Two chunks of F and three of tokens with a rank of two fragments; one row more than a chunk; a lone token.
    for sizes in [[2, 150, 20, 70, 20], [1, 65, 9, 129, 33], [3, 1, 5, 40, 64], [2, 31, 16, 17, 1]] {
        for precision in [Precision::Tf32, Precision::Bf16] {
            let (error, name) = worst(&b, precision, sizes);
            assert!(error < bound(precision), "{sizes:?} {precision:?}: {name} is off by {error:.2e}");
        }
    }
}

#[test]
fn the_bound_notices_a_fault_in_a_kernel() {
    let sizes = [2, 150, 20, 70, 20];
    for mutant in ["forward-without-s", "dv-without-s", "ds-misses-last-row", "slope-without-second-term"] {
        let Some(b) = device() else { return };
        b.plant("expert", mutant).unwrap();
        let (error, name) = worst(&b, Precision::Tf32, sizes);
        assert!(error > bound(Precision::Tf32), "{mutant}: the worst is {name} with {error:.2e}");
    }
}

#[test]
fn a_call_is_four_launches_and_eight() {
    let Some(b) = device() else { return };
    let (_, launches) = run(&b, Arm::Fused, Precision::Bf16, [2, 20, 8, 24, 8]);
    assert_eq!(launches, [4, 8]);
    // All factors are rounded in one launch, and backward finds them.
    let (_, launches) = run_in(FactorFormat::Ternary, &b, Arm::Fused, Precision::Bf16, [2, 20, 8, 24, 8]);
    assert_eq!(launches, [5, 8]);
}

#[test]
fn a_rank_beyond_the_registers_goes_product_by_product() {
    let Some(b) = device() else { return };
    let sizes = [1, 20, 70, 80, 65];
    let (_, launches) = run(&b, Arm::Fused, Precision::Tf32, sizes);
    assert_eq!(launches, [7, 11]);
    let (error, name) = worst(&b, Precision::Tf32, sizes);
    assert!(error < bound(Precision::Tf32), "{name} is off by {error:.2e}");
}

#[test]
fn what_a_step_kept_for_backward_is_of_no_use_after_it() {
    let Some(b) = device() else { return };
    b.set_arms(Arm::Fused);
    let sizes = [2, 20, 8, 24, 8];
    let config = Config { precision: Precision::Bf16, ffn: Ffn::Silu, format: FactorFormat::F32 };
    let (weights, into) = (params(&b, sizes, |_| 1.0), params(&b, sizes, |_| 0.0));
    let (u, dy) = (persistent(&b, &noise(&[20, 8], 7)), persistent(&b, &noise(&[2, 20, 8], 9)));
    let mut kept = None;
    b.step(&StepKey { purpose: "test", variant: 0 }, &mut |b| {
        kept = Some(Expert::forward(b, &config, Inputs { u: &u }, weights.as_ref())?.1);
        Ok(())
    })
    .unwrap();
    let error = Expert::backward(&b, &config, &kept.unwrap(), Outputs { y: &dy }, None, into.as_ref()).err();
    assert!(matches!(error, Some(Error::StaleScratch { .. })), "{error:?}");
}
