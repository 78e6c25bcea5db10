//! What the gates of `kda` do not cover, on Mesa's software Vulkan driver: rounded operands, heads as wide as a model's,
//! causality bit for bit, and what a device refuses. Where no adapter answers, every test says so and why.

mod common;

use dormouse_cuda::{Arm, Gpu, Tensor};
use dormouse_reference::kda::{Config, Form, Grads, Inputs, Kda, Memory, Outputs};
use dormouse_reference::{Checked, DType, Error, Precision, Reference, StepKey, Tensors};
use ndarray::{ArrayD, Axis, IxDyn, Slice};

type Arrays = Vec<(&'static str, ArrayD<f64>)>;

/// B, T, H, K, V.
type Lengths = [usize; 5];

/// The device with one arm and poisoned scratch, or none with a line that says why the test did not run.
fn device(arm: Arm) -> Option<Gpu> {
    let b = common::device()?;
    b.set_arms(arm);
    b.set_poison(true);
    Some(b)
}

fn config(precision: Precision) -> Config {
    Config { scale: None, form: Form::Recurrent, checkpoint_every: 8, memory: Memory::Save, precision }
}

/// Uniform in -1..1.
fn uniform(seed: &mut u64) -> f64 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

/// f32 numbers, the gates drawn by `gate`.
fn inputs([batch, time, heads, key, value]: Lengths, gate: fn(f64) -> f64) -> Inputs<ArrayD<f64>> {
    let seed = &mut 7;
    let mut draw = |shape: &[usize]| ArrayD::from_shape_simple_fn(IxDyn(shape), || 1.7 * uniform(seed));
    let unit = |mut x: ArrayD<f64>| {
        x.rows_mut().into_iter().for_each(|mut row| {
            let length = row.dot(&row).sqrt();
            row.mapv_inplace(|x| x / length);
        });
        x
    };
    let wide = [batch, time, heads, key];
    let inputs = Inputs {
        q: unit(draw(&wide)),
        k: unit(draw(&wide)),
        v: draw(&[batch, time, heads, value]),
        g: draw(&wide).mapv(gate),
        beta: draw(&wide[..3]).mapv(|x| 0.5 + 0.25 * x),
        b: None,
        w: None,
        cu_seqlens: None,
        initial_state: Some(draw(&[batch, heads, key, value])),
    };
    inputs.map(|_, x| x.mapv(|x| f64::from(x as f32)))
}

fn upstream([batch, time, heads, key, value]: Lengths) -> Outputs<ArrayD<f64>> {
    let seed = &mut 99;
    let mut draw = |shape: &[usize]| ArrayD::from_shape_simple_fn(IxDyn(shape), || f64::from(uniform(seed) as f32));
    Outputs { o: draw(&[batch, time, heads, value]), final_state: Some(draw(&[batch, heads, key, value])) }
}

/// o, final_state and every gradient by name.
fn run<B: Kda>(b: &B, precision: Precision, inputs: &Inputs<ArrayD<f64>>, upstream: &Outputs<ArrayD<f64>>) -> Arrays {
    let send = |name: &'static str, x: &ArrayD<f64>| {
        let dtype = if name == "cu_seqlens" { DType::U32 } else { b.float() };
        let tensor = b.persistent(x.shape(), dtype).unwrap();
        b.upload(x.view(), &tensor).unwrap();
        tensor
    };
    let config = config(precision);
    let inputs = inputs.as_ref().map(send);
    let upstream = upstream.as_ref().map(send);
    let (outputs, saved) = Kda::forward(b, &config, inputs.as_ref()).unwrap();
    let grads: Grads<B::Tensor> = Kda::backward(b, &config, &saved, upstream.as_ref()).unwrap();
    let results = outputs.named().into_iter().chain(grads.named());
    results.map(|(name, tensor)| (name, b.download(&tensor).unwrap())).collect()
}

fn rms(x: &ArrayD<f64>) -> f64 {
    (x.iter().map(|x| x * x).sum::<f64>() / x.len().max(1) as f64).sqrt()
}

/// Relative RMS errors by name.
fn errors(got: &Arrays, expected: &Arrays) -> Vec<(&'static str, f64)> {
    assert_eq!(got.len(), expected.len());
    got.iter()
        .zip(expected)
        .map(|((name, got), (_, expected))| (*name, rms(&(got - expected)) / rms(expected)))
        .collect()
}

const SPREAD: fn(f64) -> f64 = |x| -5.0 / (1.0 + (-2.0 * x).exp());
const MILD: fn(f64) -> f64 = |x| -0.05 * (0.5 * x).exp();
const STRONG: fn(f64) -> f64 = |_| -5.0;

/// Operands are rounded by at most u of their size, u = 2^-8 in bf16 and 2^-11 in tf32, and by less than half of that in
/// RMS. A result is at the end of four or five products with two rounded operands each: about u in RMS, and 4 u leaves
/// room for keys that are alike. dg must not be worse than the rest where decay is strong: nothing in it cancels. An error
/// below u / 40 would mean that nothing was rounded.
#[test]
fn rounded_operands_cost_what_their_rounding_says() {
    let Some(b) = device(Arm::Fused) else { return };
    for (precision, u) in [(Precision::Bf16, 2f64.powi(-8)), (Precision::Tf32, 2f64.powi(-11))] {
        for (lengths, gate, word) in [
            ([1, 70, 2, 16, 16], MILD, "mild"),
            ([1, 70, 2, 16, 16], STRONG, "strong"),
            ([2, 17, 3, 5, 3], SPREAD, "spread"),
        ] {
            let (inputs, upstream) = (inputs(lengths, gate), upstream(lengths));
            let expected = run(&Reference::<f64>::new(), Precision::Full, &inputs, &upstream);
            let errors = errors(&run(&b, precision, &inputs, &upstream), &expected);
            println!("{precision:?} {word}: {errors:?}");
            for (name, error) in errors {
                // The last span's state may be as good as forgotten, and its gradient is then not rounded at all.
                let least = if name == "dinitial_state" || name == "final_state" { 0.0 } else { u / 40.0 };
                assert!(error <= 4.0 * u && error >= least, "{precision:?} {word}: {name} is off by {error:.1e}");
            }
        }
    }
}

/// Heads as wide as a model's, more than one span, K and V that fill no tile. 2e-6 is the bound of gate `diff`; near g =
/// 0 the driver's exp is off by 1e-7 to one side, and token by token the errors of all tokens that a state lives through
/// add up.
#[test]
fn wide_heads_equal_the_reference() {
    for arm in Arm::ALL {
        let Some(b) = device(arm) else { return };
        for lengths in [[1, 130, 2, 64, 64], [1, 33, 1, 60, 100], [1, 3, 1, 64, 130]] {
            let (inputs, upstream) = (inputs(lengths, SPREAD), upstream(lengths));
            let expected = run(&Reference::<f64>::new(), Precision::Full, &inputs, &upstream);
            let errors = errors(&run(&b, Precision::Full, &inputs, &upstream), &expected);
            println!("{arm} {lengths:?}: {errors:?}");
            // Written so that NaN fails.
            let wrong: Vec<_> = errors.into_iter().filter(|(_, error)| error.is_nan() || *error > 2e-6).collect();
            assert!(wrong.is_empty(), "{arm} {lengths:?}: {wrong:?}");
        }
    }
}

/// Tokens from 21 on are replaced; what comes before must keep every bit, at every precision.
#[test]
fn earlier_outputs_keep_their_bits() {
    let lengths = [1, 40, 2, 16, 16];
    let before = inputs(lengths, SPREAD);
    let mut after = before.clone();
    for (x, factor) in [(&mut after.q, -1.0), (&mut after.k, -1.0), (&mut after.v, -1.0), (&mut after.g, 3.0)] {
        x.slice_axis_mut(Axis(1), (21..).into()).mapv_inplace(|x| factor * x);
    }
    for (arm, precision) in
        [(Arm::Plain, Precision::Full), (Arm::Fused, Precision::Full), (Arm::Fused, Precision::Bf16)]
    {
        let Some(b) = device(arm) else { return };
        let upstream = upstream(lengths);
        let [first, second] = [&before, &after].map(|inputs| run(&b, precision, inputs, &upstream).swap_remove(0).1);
        let part = |x: &ArrayD<f64>, slice: Slice| x.slice_axis(Axis(1), slice).to_owned();
        assert_eq!(part(&first, (..21).into()), part(&second, (..21).into()), "{arm} {precision:?}");
        assert_ne!(part(&first, (21..).into()), part(&second, (21..).into()), "{arm} {precision:?}");
    }
}

#[test]
fn what_a_device_cannot_do_is_refused_by_name() {
    let Some(b) = device(Arm::Plain) else { return };
    let error = |precision, [batch, time, heads, key, value]: Lengths| {
        let tensor = |shape: &[usize]| b.persistent(shape, DType::F32).unwrap();
        let wide = [batch, time, heads, key];
        let (q, v, beta) = (tensor(&wide), tensor(&[batch, time, heads, value]), tensor(&wide[..3]));
        let inputs =
            Inputs { q: &q, k: &q, v: &v, g: &q, beta: &beta, b: None, w: None, cu_seqlens: None, initial_state: None };
        Kda::forward(&b, &config(precision), inputs).map(|_| ()).unwrap_err()
    };
    let wide = error(Precision::Full, [1, 2, 1, 257, 4]);
    assert!(matches!(wide, Error::Shape { arg: "k", .. }), "{wide}");
    assert!(wide.to_string().contains("K of at most 256"), "{wide}");
    assert!(matches!(error(Precision::Full, [1, 2, 1, 4, 257]), Error::Shape { arg: "v", .. }));
    assert!(matches!(error(Precision::Bf16, [1, 2, 1, 4, 4]), Error::Config { field: "precision", .. }));
    b.set_arms(Arm::Fused);
    let large = error(Precision::Full, [1, 2, 1, 256, 4]).to_string();
    assert!(large.contains("kda::forward") && large.contains("bytes of shared memory"), "{large}");
}

/// Inputs with every option: `heads` value heads on `heads / 2` key heads, and the sequences of `cuts`.
fn with_options([_, time, heads, key, value]: Lengths, cuts: &[u32]) -> Inputs<ArrayD<f64>> {
    let plain = inputs([1, time, heads, key, value], MILD);
    let keys = |x: &ArrayD<f64>| x.slice_axis(Axis(2), (..heads / 2).into()).to_owned();
    let gate = |x: &ArrayD<f64>| x.mapv(|x| f64::from((0.5 + 0.2 * x.sin()) as f32));
    let states = inputs([cuts.len() - 1, 1, heads, key, value], MILD).initial_state;
    Inputs {
        q: keys(&plain.q),
        k: keys(&plain.k),
        b: Some(gate(&plain.q)),
        w: Some(gate(&plain.v)),
        cu_seqlens: Some(ArrayD::from_shape_fn(IxDyn(&[cuts.len()]), |n| f64::from(cuts[n[0]]))),
        initial_state: states,
        ..plain
    }
}

/// The gates hold options against the reference. What is left are heads as wide as a model's, and what a call without
/// options pays for them: nothing, not one launch.
#[test]
fn wide_heads_with_options_equal_the_reference_and_only_groups_cost_a_launch() {
    let lengths = [1, 100, 2, 64, 40];
    let inputs_of = with_options(lengths, &[0, 70, 70, 100]);
    let mut upstream = upstream(lengths);
    upstream.final_state = inputs_of.initial_state.clone();
    let expected = run(&Reference::<f64>::new(), Precision::Full, &inputs_of, &upstream);
    for arm in Arm::ALL {
        let Some(b) = device(arm) else { return };
        let errors = errors(&run(&b, Precision::Full, &inputs_of, &upstream), &expected);
        println!("{arm}: {errors:?}");
        // dbeta is zero with both gates, so its relative error is no number; gate `diff` has its zeros.
        let wrong: Vec<_> = errors.iter().filter(|(name, e)| *name != "dbeta" && (e.is_nan() || *e > 2e-6)).collect();
        assert!(wrong.is_empty(), "{arm}: {wrong:?}");
        let launches = |b: &Gpu| -> u64 {
            b.ledger().kernels.iter().filter(|(name, _)| name.starts_with("kda::")).map(|(_, of)| of.count).sum()
        };
        let with = launches(&b);
        let Some(b) = device(arm) else { return };
        run(&b, Precision::Full, &inputs(lengths, MILD), &self::upstream(lengths));
        assert_eq!(with, launches(&b) + 1, "{arm}");
        assert!(!b.ledger().kernels.contains_key("kda::sum_groups"), "{arm}");
    }
}

/// What `Checked` refuses a device does not look at. Offsets past T end at T, a sequence that would end before it starts
/// is empty, and sequences that are in order have the bits that they have beside others in order.
#[test]
fn offsets_out_of_order_are_clamped_and_checked_calls_refuse_them() {
    let lengths = [1, 40, 2, 6, 5];
    let upstream = Outputs { final_state: None, ..upstream(lengths) };
    for arm in Arm::ALL {
        let Some(b) = device(arm) else { return };
        let of = |cuts: &[u32]| run(&b, Precision::Full, &with_options(lengths, cuts), &upstream);
        assert_eq!(of(&[0, 17, 99, 4_000_000_000]), of(&[0, 17, 40, 40]), "{arm}");
        let rows = |of: &Arrays, name: &str, axis: usize, at: std::ops::Range<usize>| {
            let (_, x) = of.iter().find(|(known, _)| *known == name).unwrap();
            x.slice_axis(Axis(axis), Slice::from(at)).to_owned()
        };
        // The second sequence is empty, and the third begins again inside of the first; tokens 30.. are in no sequence.
        let (wrong, right) = (of(&[0, 20, 18, 30]), of(&[0, 20, 20, 40]));
        for (name, axis, at) in [("o", 1, 0..18), ("final_state", 0, 0..2), ("dv", 1, 0..18)] {
            let [wrong, right] = [&wrong, &right].map(|x| rows(x, name, axis, at.clone()));
            assert_eq!(wrong, right, "{arm} {name}");
        }
        let send = |name: &'static str, x: &ArrayD<f64>| {
            let dtype = if name == "cu_seqlens" { DType::U32 } else { DType::F32 };
            let tensor = b.persistent(x.shape(), dtype).unwrap();
            b.upload(x.view(), &tensor).unwrap();
            tensor
        };
        let sent = with_options(lengths, &[0, 20, 18, 40]).map(|name, x| send(name, &x));
        let Some(b) = device(arm) else { return };
        let refused = Kda::forward(&Checked(b), &config(Precision::Full), sent.as_ref()).map(|_| ()).unwrap_err();
        assert!(matches!(refused, Error::Value { arg: "cu_seqlens", .. }), "{refused}");
    }
}

/// The same calls are refused as by the reference, about the same argument.
#[test]
fn options_that_do_not_fit_are_refused_by_name() {
    let Some(b) = device(Arm::Fused) else { return };
    let tensor = |shape: &[usize], dtype| b.persistent(shape, dtype).unwrap();
    let floats = |shape: &[usize]| tensor(shape, DType::F32);
    let (q, v, g, beta) = (floats(&[1, 4, 2, 3]), floats(&[1, 4, 4, 5]), floats(&[1, 4, 4, 3]), floats(&[1, 4, 4]));
    let (cuts, states) = (tensor(&[3], DType::U32), floats(&[2, 4, 3, 5]));
    let none =
        Inputs { q: &q, k: &q, v: &v, g: &g, beta: &beta, b: None, w: None, cu_seqlens: None, initial_state: None };
    let refused = |inputs: Inputs<&Tensor>| match Kda::forward(&b, &config(Precision::Full), inputs) {
        Ok(_) => panic!("nothing was refused"),
        Err(Error::Shape { arg, .. } | Error::Storage { arg, .. }) => arg,
        Err(other) => panic!("{other}"),
    };
    assert_eq!(refused(Inputs { b: Some(&v), ..none.clone() }), "b");
    assert_eq!(refused(Inputs { w: Some(&g), ..none.clone() }), "w");
    assert_eq!(refused(Inputs { initial_state: Some(&states), ..none.clone() }), "initial_state");
    assert_eq!(refused(Inputs { cu_seqlens: Some(&floats(&[3])), ..none.clone() }), "cu_seqlens");
    let packed = Inputs { cu_seqlens: Some(&cuts), initial_state: Some(&states), ..none.clone() };
    assert!(Kda::forward(&b, &config(Precision::Full), packed.clone()).is_ok());
    let two = [&[2, 4, 2, 3][..], &[2, 4, 4, 5], &[2, 4, 4, 3], &[2, 4, 4]].map(floats);
    let batch = Inputs { q: &two[0], k: &two[0], v: &two[1], g: &two[2], beta: &two[3], ..packed };
    assert_eq!(refused(batch), "q");
    assert_eq!(refused(Inputs { cu_seqlens: Some(&tensor(&[1], DType::U32)), ..none.clone() }), "q");
    let (v, g, beta) = (floats(&[1, 4, 3, 5]), floats(&[1, 4, 3, 3]), floats(&[1, 4, 3]));
    assert_eq!(refused(Inputs { v: &v, g: &g, beta: &beta, ..none }), "v");
}

#[test]
fn what_a_step_kept_for_backward_is_of_no_use_after_it() {
    for arm in Arm::ALL {
        let Some(b) = device(arm) else { return };
        let put = |shape: &[usize]| b.persistent(shape, DType::F32).unwrap();
        let (x, beta) = (put(&[1, 4, 2, 3]), put(&[1, 4, 2]));
        let inputs =
            Inputs { q: &x, k: &x, v: &x, g: &x, beta: &beta, b: None, w: None, cu_seqlens: None, initial_state: None };
        let mut kept = None;
        b.step(&StepKey { purpose: "test", variant: 0 }, &mut |b| {
            kept = Some(Kda::forward(b, &config(Precision::Full), inputs.clone())?.1);
            Ok(())
        })
        .unwrap();
        let upstream = Outputs { o: &x, final_state: None };
        let error = Kda::backward(&b, &config(Precision::Full), &kept.unwrap(), upstream).err();
        assert!(matches!(error, Some(Error::StaleScratch { arg: "saved", .. })), "{arm}: {error:?}");
    }
}
