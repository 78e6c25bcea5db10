//! Tapes, handles and roundings of the twins' backend.
//!
//! They lie here and not beside what they test: unit tests would compile the whole crate, Burn's autodiff for every
//! operation with it, a second time.

use dormouse_burn::{Cpu64, Handle, NdArray, round_column};
use dormouse_reference::linear::{Config, Inputs, Linear, Outputs, Params};
use dormouse_reference::{DType, Error, FactorFormat, Precision, Result, StepKey, Tensors};
use ndarray::{ArrayD, array};

const FULL: Config = Config { precision: Precision::Full };

fn tensor(b: &Cpu64, values: ArrayD<f64>) -> Result<Handle<NdArray<f64>>> {
    let tensor = b.persistent(values.shape(), b.float())?;
    b.upload(values.view(), &tensor)?;
    Ok(tensor)
}

#[test]
fn a_tape_gives_its_gradients_as_often_as_it_is_asked_and_adds_those_of_parameters() -> Result<()> {
    let b = Cpu64::new();
    let x = tensor(&b, array![[1.0, 2.0]].into_dyn())?;
    let weight = tensor(&b, array![[3.0], [4.0]].into_dyn())?;
    let (outputs, tape) = Linear::forward(&b, &FULL, Inputs { x: &x }, Params { weight: &weight, bias: None })?;
    assert_eq!(b.download(&outputs.y)?, array![[11.0]].into_dyn());
    let dy = tensor(&b, array![[2.0]].into_dyn())?;
    let into = tensor(&b, array![[100.0], [100.0]].into_dyn())?;
    for times in 1..=2 {
        // What went in may change afterwards; the tape has its own values.
        b.fill(&weight, 0.0)?;
        let grads =
            Linear::backward(&b, &FULL, &tape, Outputs { y: &dy }, Some(&x), Params { weight: &into, bias: None })?;
        assert_eq!(b.download(&grads.dx)?, array![[7.0, 10.0]].into_dyn());
        let sum = 100.0 + 2.0 * f64::from(times);
        assert_eq!(b.download(&into)?, array![[sum], [2.0 * sum - 100.0]].into_dyn());
    }
    Ok(())
}

#[test]
fn arguments_that_do_not_fit_are_named() -> Result<()> {
    let b = Cpu64::new();
    let x = tensor(&b, array![[1.0, 2.0]].into_dyn())?;
    let square = tensor(&b, array![[3.0, 1.0], [4.0, 1.0]].into_dyn())?;
    let params = || Params { weight: &square, bias: None };
    let refused = Linear::forward(&b, &FULL, Inputs { x: &x }, Params { weight: &x, bias: None });
    assert_eq!(
        refused.err().map(|error| error.to_string()).unwrap_or_default(),
        "linear::forward: `weight` is [1, 2], expected [I, O] = [2, any] (I from `x`)"
    );
    let (_, tape) = Linear::forward(&b, &FULL, Inputs { x: &x }, params())?;
    let backward =
        |dy, into| Linear::backward(&b, &FULL, &tape, Outputs { y: dy }, None, into).err().map(|e| e.to_string());
    assert_eq!(backward(&square, params()).unwrap_or_default(), "linear::backward: `y` is [2, 2], expected [1, 2]");
    let with_bias = Params { weight: &square, bias: Some(&x) };
    assert_eq!(
        backward(&x, with_bias).unwrap_or_default(),
        "linear::backward: `bias` is present, expected it absent because the parameter is"
    );
    let tf32 = Config { precision: Precision::Tf32 };
    assert!(matches!(
        Linear::forward(&b, &tf32, Inputs { x: &x }, params()).err(),
        Some(Error::Config { field: "precision", .. })
    ));
    Ok(())
}

#[test]
fn views_share_memory_and_integers_stay_whole() {
    let b = Cpu64::new();
    let flat = b.persistent(&[6], DType::F64).unwrap();
    let tail = b.view(&flat, 2, &[2, 2]).unwrap();
    b.upload(array![[1.0, 2.0], [3.0, 4.0]].into_dyn().view(), &tail).unwrap();
    assert_eq!(b.download(&flat).unwrap(), array![0.0, 0.0, 1.0, 2.0, 3.0, 4.0].into_dyn());
    assert!(matches!(b.view(&tail, 1, &[4]), Err(Error::View { .. })));
    let ids = b.persistent(&[1], DType::U32).unwrap();
    b.fill(&ids, f64::from(u32::MAX)).unwrap();
    assert_eq!(b.download(&ids).unwrap()[0], f64::from(u32::MAX));
    assert!(matches!(b.upload(array![0.5].into_dyn().view(), &ids), Err(Error::Value { .. })));
}

#[test]
fn scratch_dies_with_its_step_and_the_host_stays_outside() {
    let b = Cpu64::new();
    let key = StepKey { purpose: "test", variant: 0 };
    let kept = b.persistent(&[2], DType::F64).unwrap();
    let mut leaked = None;
    b.step(&key, &mut |b| {
        let x = b.scratch(&[2], DType::F64)?;
        b.fill(&x, 3.0)?;
        assert!(matches!(b.download(&x), Err(Error::HostExchangeInStep { .. })));
        b.keep(&x, &kept)?;
        leaked = Some(x);
        Ok(())
    })
    .unwrap();
    assert_eq!(b.download(&kept).unwrap(), array![3.0, 3.0].into_dyn());
    assert!(matches!(b.download(&leaked.unwrap()), Err(Error::StaleScratch { .. })));
}

/// Values around every boundary of a format, and an even walk over all magnitudes between.
fn values() -> Vec<f64> {
    let mut all = vec![0.0, f64::INFINITY, f64::NAN, 448.0, 464.0, 465.0, 65504.0, 65519.0, 65520.0];
    for e in (-150..130).map(|e| 2f64.powi(e)) {
        for steps in 0..32 {
            let x = e * (1.0 + f64::from(steps) / 32.0);
            all.extend([x, x * (1.0 + f64::EPSILON), x * (1.0 - f64::EPSILON / 2.0)]);
            // Halfway between neighbours of every format.
            all.extend([3, 7, 10].map(|bits| x + e * 2f64.powi(-bits - 1)));
        }
    }
    all.iter().flat_map(|x| [*x, -*x]).collect()
}

/// The sign of a zero is nobody's business.
fn same(a: f64, b: f64) -> bool {
    a == b || (a.is_nan() && b.is_nan())
}

#[test]
fn every_format_rounds_as_the_reference_does_bit_for_bit() {
    let all = values();
    // Alone in its column a value meets every scale; together with larger ones it is rounded under theirs.
    let columns = all.iter().map(|x| vec![*x]).chain(all.windows(2).map(<[f64]>::to_vec));
    let columns = columns.chain(all.chunks(7).map(<[f64]>::to_vec));
    let mut moved = 0;
    for column in columns {
        for format in FactorFormat::ALL {
            let (mut ours, mut theirs) = (column.clone(), column.clone());
            round_column(format, &mut ours);
            format.round_column(&mut theirs);
            let agree = ours.iter().zip(&theirs).all(|(a, b)| same(*a, *b));
            assert!(agree, "{format}: {column:?} becomes {ours:?}, and {theirs:?} by the reference");
            moved += usize::from(ours.iter().zip(&column).any(|(a, b)| !same(*a, *b)));
        }
    }
    assert!(moved > 10_000, "only {moved} columns were rounded at all");
}
