//! The rules of `Tensors` and of steps on Mesa's software Vulkan driver. Where no adapter answers, every test says so
//! and why; the gates count the same as NOTRUN.

mod common;

use common::device;
use dormouse_cuda::Gpu;
use dormouse_reference::linear::{self, Linear};
use dormouse_reference::residual::{self, Residual};
use dormouse_reference::rms_norm::{self, RmsNorm};
use dormouse_reference::{DType, Error, Precision, StepKey, Tensors};
use ndarray::{Array, ArrayD, Dimension, IxDyn, array, s};

const KEY: StepKey = StepKey { purpose: "test", variant: 0 };

fn persistent(b: &Gpu, values: ArrayD<f64>) -> dormouse_cuda::Tensor {
    let tensor = b.persistent(values.shape(), DType::F32).unwrap();
    b.upload(values.view(), &tensor).unwrap();
    tensor
}

#[test]
fn f1_values_travel_with_any_strides_and_refuse_what_does_not_fit() {
    let Some(b) = device() else { return };
    let host = array![[1.0, 2.0, 3.0], [4.0, 5.0, 6.5]];
    let transposed = b.persistent(&[3, 2], DType::F32).unwrap();
    assert_eq!(b.download(&transposed).unwrap(), ArrayD::<f64>::zeros(IxDyn(&[3, 2])));
    b.upload(host.t().into_dyn(), &transposed).unwrap();
    assert_eq!(b.download(&transposed).unwrap(), host.t().to_owned().into_dyn());
    let strided = b.persistent(&[2, 2], DType::U32).unwrap();
    b.upload(host.slice(s![.., ..;2]).mapv(f64::floor).into_dyn().view(), &strided).unwrap();
    assert_eq!(b.download(&strided).unwrap(), array![[1.0, 3.0], [4.0, 6.0]].into_dyn());
    let ids = b.persistent(&[1], DType::U8).unwrap();
    for bad in [256.0, -1.0, 0.5, f64::NAN] {
        assert!(matches!(b.upload(array![bad].into_dyn().view(), &ids), Err(Error::Value { .. })));
    }
    b.upload(array![255.0].into_dyn().view(), &ids).unwrap();
    assert_eq!(b.download(&ids).unwrap(), array![255.0].into_dyn());
    assert!(matches!(b.upload(host.view().into_dyn(), &ids), Err(Error::Shape { .. })));
    assert!(matches!(b.persistent(&[1], DType::Bf16), Err(Error::Storage { .. })));
    let error = b.persistent(&[1 << 20, 1 << 20], DType::F32).unwrap_err().to_string();
    assert!(error.contains("persistent: 1099511627776 elements, at most"), "{error}");
    let empty = b.persistent(&[0, 3], DType::F32).unwrap();
    b.upload(ArrayD::zeros(IxDyn(&[0, 3])).view(), &empty).unwrap();
    assert_eq!(b.download(&empty).unwrap().shape(), [0, 3]);
}

#[test]
fn views_share_memory_stay_inside_and_may_start_anywhere() {
    let Some(b) = device() else { return };
    let flat = b.persistent(&[203], DType::F32).unwrap();
    let tail = b.view(&flat, 101, &[2, 51]).unwrap();
    b.fill(&tail, f64::INFINITY).unwrap();
    let inner = b.view(&tail, 1, &[3]).unwrap();
    b.upload(array![1.0, 2.0, 3.0].into_dyn().view(), &inner).unwrap();
    let got = b.download(&flat).unwrap();
    let want = Array::from_shape_fn(203, |i| match i {
        0..=100 => 0.0,
        102..=104 => (i - 101) as f64,
        _ => f64::INFINITY,
    });
    assert_eq!(got, want.into_dyn());
    assert_eq!(b.download(&inner).unwrap(), array![1.0, 2.0, 3.0].into_dyn());
    assert!(matches!(b.view(&tail, 1, &[102]), Err(Error::View { .. })));
    // A copy between overlapping views reads everything before it writes.
    let (low, high) = (b.view(&flat, 100, &[80]).unwrap(), b.view(&flat, 101, &[80]).unwrap());
    let ramp = Array::from_iter((0..80).map(f64::from)).into_dyn();
    b.upload(ramp.view(), &low).unwrap();
    b.keep(&low, &high).unwrap();
    assert_eq!(b.download(&high).unwrap(), ramp);
}

#[test]
fn several_values_are_kept_at_once_and_each_where_it_belongs() {
    let Some(b) = device() else { return };
    let flat = b.persistent(&[8], DType::F32).unwrap();
    let places: Vec<_> = (0..6).map(|i| b.view(&flat, i, &[1]).unwrap()).collect();
    let last = b.view(&flat, 6, &[2]).unwrap();
    b.step(&KEY, &mut |b| {
        b.fill(&flat, 9.0)?;
        // More than go in one launch, then some that are no single values, or of another type.
        let values = (0..6).map(|i| {
            let value = b.scratch(&[1], DType::F32)?;
            b.fill(&value, f64::from(i))?;
            Ok(value)
        });
        let values = values.collect::<Result<Vec<_>, Error>>()?;
        b.keep_all(&values.iter().zip(&places).collect::<Vec<_>>())?;
        let two = b.scratch(&[2], DType::F32)?;
        b.fill(&two, 7.0)?;
        b.keep_all(&[(&two, &last), (&values[3], &places[0])])?;
        b.keep_all(&[])?;
        let other = b.scratch(&[1], DType::U32)?;
        assert!(matches!(b.keep_all(&[(&values[0], &places[0]), (&other, &places[1])]), Err(Error::Storage { .. })));
        Ok(())
    })
    .unwrap();
    assert_eq!(b.download(&flat).unwrap(), array![3.0, 1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 7.0].into_dyn());
}

#[test]
fn scratch_dies_with_its_step_and_the_host_is_shut_out() {
    let Some(b) = device() else { return };
    let x = b.persistent(&[2], DType::F32).unwrap();
    let mut leaked = None;
    b.step(&KEY, &mut |b| {
        let scratch = b.scratch(&[2], DType::F32)?;
        b.fill(&scratch, 2.5)?;
        b.keep(&scratch, &x)?;
        leaked = Some(scratch);
        assert!(matches!(b.download(&x), Err(Error::HostExchangeInStep { .. })));
        assert!(matches!(b.upload(array![1.0, 2.0].into_dyn().view(), &x), Err(Error::HostExchangeInStep { .. })));
        assert!(matches!(b.persistent(&[1], DType::F32), Err(Error::HostExchangeInStep { .. })));
        assert!(matches!(b.step(&KEY, &mut |_| Ok(())), Err(Error::NestedStep { .. })));
        Ok(())
    })
    .unwrap();
    assert_eq!(b.download(&x).unwrap(), array![2.5, 2.5].into_dyn());
    let leaked = leaked.unwrap();
    assert!(matches!(b.download(&leaked), Err(Error::StaleScratch { .. })));
    assert!(matches!(b.keep(&leaked, &x), Err(Error::StaleScratch { .. })));
    assert!(matches!(b.keep(&x, &b.scratch(&[2], DType::F32).unwrap()), Err(Error::NotPersistent { .. })));
}

#[test]
fn a_step_that_changes_is_refused() {
    let Some(b) = device() else { return };
    for (run, len) in [4, 4, 5].into_iter().enumerate() {
        let result = b.step(&KEY, &mut |b| b.scratch(&[len], DType::F32).map(|_| ()));
        match (run, result) {
            (0 | 1, result) => result.unwrap(),
            (_, result) => {
                let error = result.unwrap_err().to_string();
                assert!(error.contains("allocation 0 is 20 B at chunk 0 + 0, expected 16 B"), "{error}");
            }
        }
    }
}

#[test]
fn poisoned_scratch_is_nan() {
    let Some(b) = device() else { return };
    b.set_poison(true);
    let scratch = b.scratch(&[3], DType::F32).unwrap();
    assert!(b.download(&scratch).unwrap().iter().all(|x| x.is_nan()));
}

/// One block of a model, forward and backward, as a step: the same bits every time, and no memory after the first run.
#[test]
fn a_step_of_three_operations_repeats_bit_for_bit() {
    let Some(b) = device() else { return };
    let values = |shape: &[usize], seed: f64| {
        Array::from_shape_fn(IxDyn(shape), |i| ((i.as_array_view().iter().sum::<usize>() as f64 + seed) * 1.7).sin())
    };
    let x = persistent(&b, values(&[2, 70, 24], 0.0));
    let gain = persistent(&b, values(&[24], 1.0));
    let shift = persistent(&b, values(&[24], 2.0));
    let weight = persistent(&b, values(&[24, 24], 3.0));
    let rho = persistent(&b, array![0.7].into_dyn());
    let zeros = |shape: &[usize]| b.persistent(shape, DType::F32).unwrap();
    let (dgain, dshift, dweight, drho, dx) =
        (zeros(&[24]), zeros(&[24]), zeros(&[24, 24]), zeros(&[1]), zeros(&[2, 70, 24]));
    let mut body = |b: &Gpu| {
        let norm = rms_norm::Config { eps: 1e-5 };
        let full = linear::Config { precision: Precision::Full };
        for into in [&dgain, &dshift, &dweight, &drho] {
            b.fill(into, 0.0)?;
        }
        let (n, norm_saved) = RmsNorm::forward(
            b,
            &norm,
            rms_norm::Inputs { x: &x },
            rms_norm::Params { gain: &gain, shift: Some(&shift) },
        )?;
        let params = linear::Params { weight: &weight, bias: None };
        let (y, linear_saved) = Linear::forward(b, &full, linear::Inputs { x: &n.y }, params)?;
        let c = n.c.expect("there is a shift");
        let (h, residual_saved) = Residual::forward(
            b,
            &residual::Config {},
            residual::Inputs { c: &c, y: &y.y },
            residual::Params { rho: &rho },
        )?;
        let back = Residual::backward(
            b,
            &residual::Config {},
            &residual_saved,
            residual::Outputs { h: &h.h },
            residual::Params { rho: &drho },
        )?;
        let into = linear::Params { weight: &dweight, bias: None };
        let dn = Linear::backward(b, &full, &linear_saved, linear::Outputs { y: &back.dy }, None, into)?;
        let into = rms_norm::Params { gain: &dgain, shift: Some(&dshift) };
        let upstream = rms_norm::Outputs { y: &dn.dx, c: Some(&back.dc) };
        let back = RmsNorm::backward(b, &norm, &norm_saved, upstream, into)?;
        b.keep(&back.dx, &dx)
    };
    let results = |b: &Gpu| [&dgain, &dshift, &dweight, &drho, &dx].map(|t| b.download(t).unwrap());
    b.step(&KEY, &mut body).unwrap();
    let (first, arena, launches) = (results(&b), b.arena_bytes(), b.ledger().count());
    assert!(first.iter().all(|t| t.iter().all(|x| x.is_finite()) && t.iter().any(|x| *x != 0.0)));
    for run in 2..5 {
        b.step(&KEY, &mut body).unwrap();
        assert_eq!(results(&b), first);
        assert_eq!(b.arena_bytes(), arena);
        // Five fills of new persistent memory and five uploads came before the first step.
        assert_eq!(b.ledger().count() - 15, run * (launches - 15));
    }
}

#[test]
fn gradients_never_land_on_what_is_being_read() {
    let Some(b) = device() else { return };
    let x = persistent(&b, array![[1.0, 2.0]].into_dyn());
    let rho = persistent(&b, array![1.0].into_dyn());
    let (config, params) = (residual::Config {}, residual::Params { rho: &rho });
    let inputs = residual::Inputs { c: &x, y: &x };
    let (out, saved) = Residual::forward(&b, &config, inputs, params.clone()).unwrap();
    let error = Residual::backward(&b, &config, &saved, out.as_ref(), params);
    assert!(matches!(error, Err(Error::Aliased { .. })));
}
