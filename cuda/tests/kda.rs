//! What the gates of `kda` do not cover, on Mesa's software Vulkan driver: rounded operands, heads as wide as a model's,
//! causality bit for bit, and what a device refuses. Where no adapter answers, every test says so and why.

mod common;

use dormouse_cuda::{Arm, Gpu};
use dormouse_reference::kda::{Config, Form, Grads, Inputs, Kda, Memory, Outputs};
use dormouse_reference::{DType, Error, Precision, Reference, Tensors};
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
    let send = |_: &'static str, x: &ArrayD<f64>| {
        let tensor = b.persistent(x.shape(), b.float()).unwrap();
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
    let (wide, cuts) = (b.persistent(&[1, 2, 1, 4], DType::F32).unwrap(), b.persistent(&[2], DType::U32).unwrap());
    let beta = b.persistent(&[1, 2, 1], DType::F32).unwrap();
    for option in ["b", "w", "cu_seqlens"] {
        let there = |name: &str| (option == name).then_some(&wide);
        let inputs = Inputs {
            q: &wide,
            k: &wide,
            v: &wide,
            g: &wide,
            beta: &beta,
            b: there("b"),
            w: there("w"),
            cu_seqlens: (option == "cu_seqlens").then_some(&cuts),
            initial_state: None,
        };
        let refused = Kda::forward(&b, &config(Precision::Full), inputs).map(|_| ()).unwrap_err();
        assert!(matches!(refused, Error::Presence { arg, .. } if arg == option), "{refused}");
    }
    b.set_arms(Arm::Fused);
    let large = error(Precision::Full, [1, 2, 1, 256, 4]).to_string();
    assert!(large.contains("kda::forward") && large.contains("bytes of shared memory"), "{large}");
}
