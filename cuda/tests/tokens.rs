//! Operations on ids where the gates' small cases do not go: many tokens, one id for most of them, large tables, and
//! ids that are out of range. Where no adapter answers, every test says so and why.

mod common;

use common::device;
use dormouse_cuda::{Arm, Gpu, Tensor};
use dormouse_reference::cross_entropy::{self, CrossEntropy};
use dormouse_reference::embedding::{self, Embedding};
use dormouse_reference::{DType, Error, Tensors};
use ndarray::{Array, Array2, ArrayD, IxDyn, array};

fn upload(b: &Gpu, values: ArrayD<f64>, dtype: DType) -> Tensor {
    let tensor = b.persistent(values.shape(), dtype).unwrap();
    b.upload(values.view(), &tensor).unwrap();
    tensor
}

/// Gradient of a table of 5 everywhere. `dx` holds small whole numbers, so every order of summation gives the same.
fn table_gradient(b: &Gpu, ids: &[u32], vocab: usize, dx: &Array2<f64>) -> ArrayD<f64> {
    let width = dx.ncols();
    let table = b.persistent(&[vocab, width], DType::F32).unwrap();
    let ids = upload(b, Array::from_iter(ids.iter().map(|&id| f64::from(id))).into_dyn(), DType::U32);
    let (config, inputs) = (embedding::Config {}, embedding::Inputs { ids: &ids });
    let (_, saved) = Embedding::forward(b, &config, inputs, embedding::Params { table: &table }).unwrap();
    let dx = upload(b, dx.clone().into_dyn(), DType::F32);
    b.fill(&table, 5.0).unwrap();
    let upstream = embedding::Outputs { x: &dx };
    Embedding::backward(b, &config, &saved, upstream, embedding::Params { table: &table }).unwrap();
    b.download(&table).unwrap()
}

#[test]
fn a_tables_gradient_is_right_for_many_tokens_and_large_tables() {
    let Some(b) = device() else { return };
    b.set_arms(Arm::Fused);
    let scattered = |i: usize, vocab: usize| i.wrapping_mul(2_654_435_761) % vocab;
    // Tokens, rows, columns, and how many of five tokens have one and the same id.
    for (tokens, vocab, width, same) in
        [(1000, 4, 130, 5), (40_000, 300, 3, 4), (40_000, 70_000, 1, 0), (33_000, 256, 2, 5), (257, 257, 33, 1)]
    {
        let ids: Vec<u32> =
            (0..tokens).map(|i| if i % 5 < same { vocab / 2 } else { scattered(i, vocab) } as u32).collect();
        let dx = Array2::from_shape_fn((tokens, width), |(n, d)| ((n * 7 + d * 3) % 11) as f64 - 4.0);
        let mut want = Array2::from_elem((vocab, width), 5.0);
        for (dx, &id) in dx.rows().into_iter().zip(&ids) {
            let mut row = want.row_mut(id as usize);
            row += &dx;
        }
        let got = table_gradient(&b, &ids, vocab, &dx);
        assert!(got == want.into_dyn(), "{tokens} tokens, {vocab} rows, {width} columns");
    }
}

#[test]
fn an_id_outside_the_table_gives_nan_and_touches_nothing_else() {
    let Some(b) = device() else { return };
    let ids = [0, 3, u32::MAX, 1];
    for arm in Arm::ALL {
        b.set_arms(arm);
        let around = b.persistent(&[12], DType::F32).unwrap();
        b.fill(&around, 100.0).unwrap();
        let table = b.view(&around, 3, &[3, 2]).unwrap();
        b.upload(array![[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]].into_dyn().view(), &table).unwrap();
        let words = upload(&b, Array::from_iter(ids.map(f64::from)).into_dyn(), DType::U32);
        let (config, inputs) = (embedding::Config {}, embedding::Inputs { ids: &words });
        let (out, saved) = Embedding::forward(&b, &config, inputs, embedding::Params { table: &table }).unwrap();
        let x = b.download(&out.x).unwrap();
        assert_eq!((x[[0, 0]], x[[0, 1]], x[[3, 0]], x[[3, 1]]), (1.0, 2.0, 3.0, 4.0), "{arm}");
        assert!((1..3).all(|n| x[[n, 0]].is_nan() && x[[n, 1]].is_nan()), "{arm}: {x}");
        let dx = upload(&b, array![[1.0, 1.0], [10.0, 10.0], [20.0, 20.0], [2.0, 2.0]].into_dyn(), DType::F32);
        b.fill(&table, 0.0).unwrap();
        let upstream = embedding::Outputs { x: &dx };
        Embedding::backward(&b, &config, &saved, upstream, embedding::Params { table: &table }).unwrap();
        let want = [100.0, 100.0, 100.0, 1.0, 1.0, 2.0, 2.0, 30.0, 30.0, 100.0, 100.0, 100.0];
        assert_eq!(b.download(&around).unwrap(), Array::from_iter(want).into_dyn(), "{arm}");
    }
}

#[test]
fn a_target_that_is_no_class_gives_nan_unless_it_is_masked() {
    let Some(b) = device() else { return };
    let logits = upload(&b, array![[0.0, 0.0], [0.0, 0.0], [f64::NAN, 1.0]].into_dyn(), DType::F32);
    let mask = upload(&b, array![1.0, 1.0, 0.0].into_dyn(), DType::U8);
    let one = upload(&b, array![1.0].into_dyn(), DType::F32);
    for arm in Arm::ALL {
        b.set_arms(arm);
        for (target, outside) in [(1.0, false), (2.0, true), (4e9, true)] {
            let targets = upload(&b, array![0.0, target, 4e9].into_dyn(), DType::U32);
            let config = cross_entropy::Config { denominator: None };
            let inputs = cross_entropy::Inputs { logits: &logits, targets: &targets, mask: Some(&mask) };
            let (out, saved) = CrossEntropy::forward(&b, &config, inputs).unwrap();
            let upstream = cross_entropy::Outputs { loss: &one, nll: None };
            let grads = CrossEntropy::backward(&b, &config, &saved, upstream).unwrap();
            let (loss, dz) = (b.download(&out.loss).unwrap()[[0]], b.download(&grads.dlogits).unwrap());
            assert_eq!(loss.is_nan(), outside, "{arm} {target}: {loss}");
            assert!((0..2).all(|c| dz[[1, c]].is_nan() == outside), "{arm} {target}: {dz}");
            assert!((dz[[0, 0]] + 0.25).abs() < 1e-6 && (dz[[0, 1]] - 0.25).abs() < 1e-6, "{arm} {target}: {dz}");
            assert_eq!((dz[[2, 0]], dz[[2, 1]]), (0.0, 0.0), "{arm} {target}");
        }
    }
}

#[test]
fn ids_are_whole_numbers() {
    let Some(b) = device() else { return };
    let reals = upload(&b, ArrayD::zeros(IxDyn(&[2])), DType::F32);
    let table = upload(&b, ArrayD::zeros(IxDyn(&[3, 2])), DType::F32);
    let (config, inputs) = (embedding::Config {}, embedding::Inputs { ids: &reals });
    let refused = Embedding::forward(&b, &config, inputs, embedding::Params { table: &table });
    assert!(matches!(refused.err(), Some(Error::Storage { arg: "ids", got: DType::F32, .. })));
    let inputs = cross_entropy::Inputs { logits: &table, targets: &reals, mask: None };
    let refused = CrossEntropy::forward(&b, &cross_entropy::Config { denominator: None }, inputs);
    // Three rows of logits and two targets: shapes come first.
    assert!(matches!(refused.err(), Some(Error::Shape { arg: "targets", .. })));
    let targets = upload(&b, ArrayD::zeros(IxDyn(&[3])), DType::F32);
    let inputs = cross_entropy::Inputs { logits: &table, targets: &targets, mask: None };
    let refused = CrossEntropy::forward(&b, &cross_entropy::Config { denominator: None }, inputs);
    assert!(matches!(refused.err(), Some(Error::Storage { arg: "targets", .. })));
}
