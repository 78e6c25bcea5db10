//! Both arms of the row and channel operations against the f64 reference at sizes where their loops go round more than
//! once: more keys, columns or channels than units side by side, more rows than the fewest of a block. The gates' cases
//! are smaller.

mod common;

use dormouse_cuda::Arm;
use dormouse_reference::decay_gate::{self, DecayGate, Kind};
use dormouse_reference::gated_rms_norm::{self, GatedRmsNorm};
use dormouse_reference::l2_norm::{self, L2Norm};
use dormouse_reference::short_conv::{self, ShortConv};
use dormouse_reference::{Reference, Tensors};
use ndarray::{Array, ArrayD, IxDyn};

/// Values without a pattern between -1 and 1, which f32 holds exactly.
fn values(shape: &[usize], seed: u64) -> ArrayD<f64> {
    let mut state = seed;
    Array::from_shape_simple_fn(IxDyn(shape), || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 44) as f64 / f64::from(1 << 19) - 1.0
    })
}

fn put<B: Tensors>(b: &B, shape: &[usize], seed: u64) -> B::Tensor {
    let tensor = b.persistent(shape, b.float()).unwrap();
    b.upload(values(shape, seed).view(), &tensor).unwrap();
    tensor
}

fn zeros<B: Tensors>(b: &B, shape: &[usize]) -> B::Tensor {
    b.persistent(shape, b.float()).unwrap()
}

fn get<B: Tensors>(b: &B, tensors: &[&B::Tensor]) -> Vec<ArrayD<f64>> {
    tensors.iter().map(|t| b.download(t).unwrap()).collect()
}

/// Compares what `$run` gives on both arms of the device with what it gives on the reference.
macro_rules! both_arms {
    ($stem:literal, $run:ident $(, $arg:expr)*) => {
        let want = $run(&Reference::<f64>::new() $(, $arg)*);
        for arm in Arm::ALL {
            let Some(b) = common::device() else { return };
            b.set_arms(arm);
            b.set_poison(true);
            let got = $run(&b $(, $arg)*);
            assert_eq!(got.len(), want.len());
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                assert_eq!(got.shape(), want.shape());
                let largest = want.iter().fold(0.0f64, |m, x| m.max(x.abs()));
                let worst = got.iter().zip(want).map(|(g, w)| (g - w).abs()).fold(0.0f64, |m, x| {
                    // A maximum would drop a NaN.
                    if x > m || x.is_nan() { x } else { m }
                });
                assert!(worst <= 1e-5 * largest && largest > 0.0, "{} {arm} {i}: {worst:e} of {largest:e}", $stem);
            }
        }
    };
}

fn gates<B: DecayGate>(b: &B, kind: Kind) -> Vec<ArrayD<f64>> {
    let [rows, heads, keys] = [8300, 2, 70];
    let config = decay_gate::Config { kind, beta_scale: 2.0 };
    let (z, y) = (put(b, &[1, rows, heads, keys], 1), put(b, &[1, rows, heads], 2));
    let (a_log, dt_bias) = (put(b, &[heads], 3), put(b, &[heads, keys], 4));
    let (dg, dbeta) = (put(b, &[1, rows, heads, keys], 5), put(b, &[1, rows, heads], 6));
    let (da_log, ddt_bias) = (zeros(b, &[heads]), zeros(b, &[heads, keys]));
    let params = decay_gate::Params { a_log: &a_log, dt_bias: &dt_bias };
    let (out, saved) = b.forward(&config, decay_gate::Inputs { z: &z, y: &y }, params).unwrap();
    let into = decay_gate::Params { a_log: &da_log, dt_bias: &ddt_bias };
    let grads = b.backward(&config, &saved, decay_gate::Outputs { g: &dg, beta: &dbeta }, into).unwrap();
    get(b, &[&out.g, &out.beta, &grads.dz, &grads.dy, &da_log, &ddt_bias])
}

#[test]
fn decay_gate_with_many_rows_and_keys() {
    both_arms!("bounded", gates, Kind::Bounded { lower_bound: -5.0 });
    both_arms!("softplus", gates, Kind::Softplus);
}

fn lengths<B: L2Norm>(b: &B) -> Vec<ArrayD<f64>> {
    let shape = [301, 100];
    let config = l2_norm::Config { eps: 1e-6 };
    let (x, dy) = (put(b, &shape, 1), put(b, &shape, 2));
    let (out, saved) = b.forward(&config, l2_norm::Inputs { x: &x }).unwrap();
    let grads = b.backward(&config, &saved, l2_norm::Outputs { y: &dy }).unwrap();
    get(b, &[&out.y, &grads.dx])
}

#[test]
fn l2_norm_with_many_columns() {
    both_arms!("l2_norm", lengths);
}

fn gated<B: GatedRmsNorm>(b: &B, rows: usize, width: usize) -> Vec<ArrayD<f64>> {
    let config = gated_rms_norm::Config { eps: 1e-5 };
    let [o, zeta, dy] = [1, 2, 3].map(|seed| put(b, &[rows, width], seed));
    let (gain, dgain) = (put(b, &[width], 4), zeros(b, &[width]));
    let inputs = gated_rms_norm::Inputs { o: &o, zeta: &zeta };
    let (out, saved) = b.forward(&config, inputs, gated_rms_norm::Params { gain: &gain }).unwrap();
    let into = gated_rms_norm::Params { gain: &dgain };
    let grads = b.backward(&config, &saved, gated_rms_norm::Outputs { y: &dy }, into).unwrap();
    get(b, &[&out.y, &grads.d_o, &grads.dzeta, &dgain])
}

#[test]
fn gated_rms_norm_with_many_rows_and_columns() {
    both_arms!("many rows", gated, 8300, 40);
    // So wide that loops over a unit's columns are not unrolled.
    both_arms!("many columns", gated, 40, 300);
}

fn convolved<B: ShortConv>(b: &B, [batch, time, channels]: [usize; 3]) -> Vec<ArrayD<f64>> {
    let config = short_conv::Config {};
    let [x, dy] = [1, 2].map(|seed| put(b, &[batch, time, channels], seed));
    let [context, dnext] = [3, 4].map(|seed| put(b, &[batch, 3, channels], seed));
    let (weight, bias) = (put(b, &[4, channels], 5), put(b, &[channels], 6));
    let (dweight, dbias) = (zeros(b, &[4, channels]), zeros(b, &[channels]));
    let inputs = short_conv::Inputs { x: &x, context: Some(&context) };
    let params = short_conv::Params { weight: &weight, bias: Some(&bias) };
    let (out, saved) = b.forward(&config, inputs, params).unwrap();
    let upstream = short_conv::Outputs { y: &dy, context: Some(&dnext) };
    let into = short_conv::Params { weight: &dweight, bias: Some(&dbias) };
    let grads = b.backward(&config, &saved, upstream, into).unwrap();
    let (next, dcontext) = (out.context.expect("always returned"), grads.dcontext.expect("a context went in"));
    get(b, &[&out.y, &next, &grads.dx, &dcontext, &dweight, &dbias])
}

#[test]
fn short_conv_with_many_tokens_and_channels() {
    both_arms!("short_conv", convolved, [3, 3001, 70]);
    // The last positions, which have no token, fall into a span of their own.
    both_arms!("short_conv", convolved, [2, 64, 130]);
}
