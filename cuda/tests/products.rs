//! Matrix products on Mesa's software Vulkan driver: rounding of factors, batches and strides, refusals. Where no adapter
//! answers, every test says so and why. `examples/gemm_check.rs` checks more shapes, and a GPU's library.

mod common;

use common::device;
use dormouse_cuda::matmul::{Matrix, Plus, Product, matrix, stack};
use dormouse_cuda::{Arm, Gpu, Tensor};
use dormouse_reference::linear::{self, Linear};
use dormouse_reference::{DType, Error, Precision, Tensors};
use ndarray::{Array3, ArrayD, IxDyn, array};

fn persistent(b: &Gpu, values: ArrayD<f64>) -> Tensor {
    let tensor = b.persistent(values.shape(), DType::F32).unwrap();
    b.upload(values.view(), &tensor).unwrap();
    tensor
}

/// A sum of one term, so that only the factors are rounded.
fn scalar(b: &Gpu, arm: Arm, precision: Precision, left: f64, right: f64) -> f64 {
    let (x, y) = (persistent(b, array![left].into_dyn()), persistent(b, array![right].into_dyn()));
    let out = persistent(b, array![f64::NAN].into_dyn());
    let product = Product {
        name: "test",
        batch: 1,
        m: 1,
        k: 1,
        n: 1,
        a: matrix(&x, 1).plain(),
        b: matrix(&y, 1).plain(),
        plus: Plus::Nothing,
        out: matrix(&out, 1),
        precision,
    };
    b.product(arm, &product).unwrap();
    b.download(&out).unwrap()[[0]]
}

#[test]
fn factors_are_rounded_to_the_precision_and_to_even() {
    let Some(b) = device() else { return };
    let ulp = |digits: i32| 2f64.powi(-digits);
    // bf16 keeps 7 binary digits behind the first, tf32 10, f32 23.
    for (precision, digits) in [(Precision::Bf16, 7), (Precision::Tf32, 10)] {
        for arm in Arm::ALL {
            let round = |x: f64| scalar(&b, arm, precision, x, 1.0);
            let other = |x: f64| scalar(&b, arm, precision, 1.0, x);
            for round in [&round as &dyn Fn(f64) -> f64, &other] {
                assert_eq!(round(1.0 + ulp(digits)), 1.0 + ulp(digits));
                assert_eq!(round(1.0 + 0.5 * ulp(digits)), 1.0, "a tie goes to even");
                assert_eq!(round(-1.0 - 1.5 * ulp(digits)), -1.0 - 2.0 * ulp(digits), "a tie goes to even");
                assert_eq!(round(1.0 + 0.5 * ulp(digits) + ulp(20)), 1.0 + ulp(digits));
                assert_eq!(round(2.0 - ulp(23)), 2.0, "the exponent carries");
                assert!(round(f64::NAN).is_nan());
                assert_eq!(round(f64::INFINITY), f64::INFINITY);
            }
            assert_eq!(scalar(&b, arm, Precision::Full, 2.0 - ulp(23), 1.0), 2.0 - ulp(23));
        }
    }
}

#[test]
fn batches_share_a_factor_and_write_side_by_side() {
    let Some(b) = device() else { return };
    let (batch, m, k, n) = (3, 20, 18, 5);
    let number = |i: usize| f64::from((i * 37 % 41) as u32) - 20.0;
    let left = ArrayD::from_shape_fn(IxDyn(&[m, k]), |i| number(i[0] * k + i[1]));
    let right = ArrayD::from_shape_fn(IxDyn(&[batch, n, k]), |i| number(7 + (i[0] * n + i[1]) * k + i[2]));
    let before = ArrayD::from_shape_fn(IxDyn(&[m, batch, n]), |i| number(i[0] + i[1] + i[2]));
    // Small whole numbers: every sum is exact.
    let want = Array3::from_shape_fn((m, batch, n), |(i, e, j)| {
        before[[i, e, j]] + (0..k).map(|p| left[[i, p]] * right[[e, j, p]]).sum::<f64>()
    });
    let (x, y) = (persistent(&b, left), persistent(&b, right));
    for arm in Arm::ALL {
        let out = persistent(&b, before.clone());
        let product = Product {
            name: "test",
            batch,
            m,
            k,
            n,
            a: matrix(&x, k).plain(),
            b: stack(&y, n, k).transposed(),
            plus: Plus::Destination,
            out: Matrix { tensor: &out, row: batch * n, next: n },
            precision: Precision::Full,
        };
        b.product(arm, &product).unwrap();
        assert_eq!(b.download(&out).unwrap(), want.clone().into_dyn(), "{arm}");
    }
    assert!(b.gemm_choices().is_empty(), "there is no library here");
}

#[test]
fn a_sum_of_no_terms_is_zero() {
    let Some(b) = device() else { return };
    let (x, y) = (persistent(&b, ArrayD::zeros(IxDyn(&[2, 0]))), persistent(&b, ArrayD::zeros(IxDyn(&[0, 3]))));
    for arm in Arm::ALL {
        let out = persistent(&b, ArrayD::from_elem(IxDyn(&[2, 3]), f64::NAN));
        let product = Product {
            name: "test",
            batch: 1,
            m: 2,
            k: 0,
            n: 3,
            a: matrix(&x, 0).plain(),
            b: matrix(&y, 3).plain(),
            plus: Plus::Nothing,
            out: matrix(&out, 3),
            precision: Precision::Full,
        };
        b.product(arm, &product).unwrap();
        assert_eq!(b.download(&out).unwrap(), ArrayD::<f64>::zeros(IxDyn(&[2, 3])));
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let Some(b) = device() else { return };
    let (x, y) = (persistent(&b, ArrayD::zeros(IxDyn(&[4, 3]))), persistent(&b, ArrayD::zeros(IxDyn(&[3, 2]))));
    let out = persistent(&b, ArrayD::zeros(IxDyn(&[4, 2])));
    let good = Product {
        name: "test",
        batch: 1,
        m: 4,
        k: 3,
        n: 2,
        a: matrix(&x, 3).plain(),
        b: matrix(&y, 2).plain(),
        plus: Plus::Nothing,
        out: matrix(&out, 2),
        precision: Precision::Full,
    };
    b.product(Arm::Fused, &good).unwrap();
    let error = |product: Product<'_>| b.product(Arm::Fused, &product).unwrap_err();
    assert_eq!(
        error(Product { k: 4, ..good }).to_string(),
        "test: `a` is [4, 3], expected at least 13 elements for batch 1, m 4, k 4, n 2"
    );
    assert!(matches!(error(Product { batch: 2, out: stack(&out, 4, 2), ..good }), Error::Shape { arg: "out", .. }));
    assert!(matches!(error(Product { plus: Plus::Matrix(&y), ..good }), Error::Shape { arg: "plus", .. }));
    assert!(matches!(error(Product { out: matrix(&x, 2), ..good }), Error::Aliased { other: "a", .. }));
}

#[test]
fn a_linear_map_takes_every_precision() {
    let Some(b) = device() else { return };
    b.set_arms(Arm::Fused);
    // Rounded to bf16 this is 1; in tf32 it stays.
    let almost = 1.0 + 2f64.powi(-9);
    let (x, weight) = (persistent(&b, array![[almost]].into_dyn()), persistent(&b, array![[3.0]].into_dyn()));
    for (precision, want) in [(Precision::Full, almost), (Precision::Tf32, almost), (Precision::Bf16, 1.0)] {
        let config = linear::Config { precision };
        let params = linear::Params { weight: &weight, bias: None };
        let (out, saved) = Linear::forward(&b, &config, linear::Inputs { x: &x }, params).unwrap();
        assert_eq!(b.download(&out.y).unwrap()[[0, 0]], 3.0 * want);
        let dweight = b.persistent(&[1, 1], DType::F32).unwrap();
        let into = linear::Params { weight: &dweight, bias: None };
        let dy = persistent(&b, array![[1.0]].into_dyn());
        Linear::backward(&b, &config, &saved, linear::Outputs { y: &dy }, None, into).unwrap();
        assert_eq!(b.download(&dweight).unwrap()[[0, 0]], want);
    }
}
