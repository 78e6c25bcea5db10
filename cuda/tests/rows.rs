//! Both arms of the row and channel operations against the f64 reference at sizes where their loops go round more than
//! once: more keys, columns or channels than units side by side, more rows than the fewest of a block. The gates' cases
//! are smaller.

mod common;
#[path = "common/draw.rs"]
mod draw;

use dormouse_cuda::Arm;
use dormouse_reference::decay_gate::{self, DecayGate, Kind};
use dormouse_reference::ema::{self, Ema};
use dormouse_reference::gated_rms_norm::{self, GatedRmsNorm};
use dormouse_reference::jepa::{self, Jepa};
use dormouse_reference::koleo::{self, Koleo};
use dormouse_reference::l2_norm::{self, L2Norm};
use dormouse_reference::layer_norm::{self, LayerNorm};
use dormouse_reference::mask_vector::{self, MaskVector};
use dormouse_reference::short_conv::{self, ShortConv};
use dormouse_reference::{DType, Reference, Tensors};
use draw::{put, values};
use ndarray::{Array, ArrayD};

/// A tensor of such values.
fn drawn<B: Tensors>(b: &B, shape: &[usize], seed: u64) -> B::Tensor {
    put(b, &values(shape, seed))
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
    let (z, y) = (drawn(b, &[1, rows, heads, keys], 1), drawn(b, &[1, rows, heads], 2));
    let (a_log, dt_bias) = (drawn(b, &[heads], 3), drawn(b, &[heads, keys], 4));
    let (dg, dbeta) = (drawn(b, &[1, rows, heads, keys], 5), drawn(b, &[1, rows, heads], 6));
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
    let (x, dy) = (drawn(b, &shape, 1), drawn(b, &shape, 2));
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
    let [o, zeta, dy] = [1, 2, 3].map(|seed| drawn(b, &[rows, width], seed));
    let (gain, dgain) = (drawn(b, &[width], 4), zeros(b, &[width]));
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
    let [x, dy] = [1, 2].map(|seed| drawn(b, &[batch, time, channels], seed));
    let [context, dnext] = [3, 4].map(|seed| drawn(b, &[batch, 3, channels], seed));
    let (weight, bias) = (drawn(b, &[4, channels], 5), drawn(b, &[channels], 6));
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

/// A mask of whole numbers in which about one row in `one_in` is set, in runs.
fn mask<B: Tensors>(b: &B, rows: usize, one_in: usize) -> B::Tensor {
    let tensor = b.persistent(&[rows], DType::U8).unwrap();
    let run = |n: usize| (n / 5).wrapping_mul(2_654_435_761) % 65_521;
    let set = |n: usize| f64::from(u8::from(run(n).is_multiple_of(one_in)));
    b.upload(Array::from_shape_fn(rows, set).into_dyn().view(), &tensor).unwrap();
    tensor
}

fn layer_normed<B: LayerNorm>(b: &B, rows: usize, width: usize) -> Vec<ArrayD<f64>> {
    let config = layer_norm::Config { eps: 1e-5 };
    let [x, dy, plus] = [1, 2, 3].map(|seed| drawn(b, &[rows, width], seed));
    let (gain, bias) = (drawn(b, &[width], 4), drawn(b, &[width], 5));
    let (dgain, dbias) = (drawn(b, &[width], 6), drawn(b, &[width], 7));
    let params = layer_norm::Params { gain: Some(&gain), bias: Some(&bias) };
    let (out, saved) = b.forward(&config, layer_norm::Inputs { x: &x }, params).unwrap();
    let into = layer_norm::Params { gain: Some(&dgain), bias: Some(&dbias) };
    let grads = b.backward(&config, &saved, layer_norm::Outputs { y: &dy }, Some(&plus), into).unwrap();
    get(b, &[&out.y, &grads.dx, &dgain, &dbias])
}

#[test]
fn layer_norm_with_many_rows_and_columns() {
    both_arms!("many rows", layer_normed, 1500, 20);
    both_arms!("some columns a unit", layer_normed, 30, 600);
    // So wide that loops over a unit's columns are not unrolled.
    both_arms!("many columns", layer_normed, 7, 2100);
}

fn masked<B: MaskVector>(b: &B, rows: usize, width: usize) -> Vec<ArrayD<f64>> {
    let (config, mask) = (mask_vector::Config {}, mask(b, rows, 3));
    let (x, dy) = (drawn(b, &[rows, width], 1), drawn(b, &[rows, width], 2));
    let (vector, dvector) = (drawn(b, &[width], 3), drawn(b, &[width], 4));
    let inputs = mask_vector::Inputs { x: &x, mask: &mask };
    let (out, saved) = b.forward(&config, inputs, mask_vector::Params { vector: &vector }).unwrap();
    let into = mask_vector::Params { vector: &dvector };
    let grads = b.backward(&config, &saved, mask_vector::Outputs { y: &dy }, into).unwrap();
    get(b, &[&out.y, &grads.dx, &dvector])
}

#[test]
fn mask_vector_with_many_rows_and_columns() {
    both_arms!("many rows", masked, 9001, 20);
    both_arms!("many columns", masked, 40, 300);
}

fn distance<B: Jepa>(b: &B, rows: usize, width: usize) -> Vec<ArrayD<f64>> {
    let (config, mask) = (jepa::Config { eps: 1e-5 }, mask(b, rows, 7));
    // Predictions are so large that none comes near its target, which rounding could put on the other side.
    let prediction = zeros(b, &[rows, width]);
    b.upload(values(&[rows, width], 1).mapv(|x| 40.0 * x.signum() + x).view(), &prediction).unwrap();
    let (teacher, dloss) = (drawn(b, &[rows, width], 2), drawn(b, &[1], 3));
    let inputs = jepa::Inputs { prediction: &prediction, teacher: &teacher, mask: &mask };
    let (out, saved) = b.forward(&config, inputs).unwrap();
    let grads = b.backward(&config, &saved, jepa::Outputs { loss: &dloss }).unwrap();
    get(b, &[&out.loss, &grads.dprediction])
}

#[test]
fn jepa_with_many_rows_and_columns() {
    both_arms!("many rows", distance, 1500, 20);
    both_arms!("many columns", distance, 40, 600);
    both_arms!("very many columns", distance, 9, 2100);
}

fn kept_apart<B: Koleo>(b: &B, limit: usize, rows: usize, width: usize) -> Vec<ArrayD<f64>> {
    let (config, mask) = (koleo::Config { limit, norm_eps: 1e-6, eps: 1e-6 }, mask(b, rows, 3));
    let (z, plus, dloss) = (drawn(b, &[rows, width], 1), drawn(b, &[rows, width], 2), drawn(b, &[1], 3));
    let (out, saved) = b.forward(&config, koleo::Inputs { z: &z, mask: &mask }).unwrap();
    let alone = b.backward(&config, &saved, koleo::Outputs { loss: &dloss }, None).unwrap();
    let with = b.backward(&config, &saved, koleo::Outputs { loss: &dloss }, Some(&plus)).unwrap();
    get(b, &[&out.loss, &alone.dz, &with.dz])
}

#[test]
fn koleo_with_many_rows_and_columns() {
    // More chosen rows than units of a cube, and a stride; more columns than lie in shared memory at once.
    both_arms!("many rows", kept_apart, 400, 2400, 12);
    both_arms!("no stride", kept_apart, usize::MAX, 300, 70);
    both_arms!("many columns", kept_apart, 20, 100, 600);
    both_arms!("very many columns", kept_apart, 20, 12, 2100);
}

fn followed<B: Ema>(b: &B, ranges: &[(usize, usize)]) -> Vec<ArrayD<f64>> {
    let ranges = ranges.iter().map(|&(start, end)| start..end).collect();
    let config = ema::Config { momentum: 0.75, ranges };
    let (teacher, online, apply) = (drawn(b, &[20_000], 1), drawn(b, &[20_000], 2), zeros(b, &[1]));
    b.fill(&apply, 1.0).unwrap();
    b.update(&config, ema::Inputs { teacher: &teacher, online: &online, apply: &apply }).unwrap();
    get(b, &[&teacher])
}

#[test]
fn ema_with_more_ranges_than_one_launch_takes() {
    let many: Vec<_> = (0..30).map(|i| (19_000 - 600 * i, 19_000 - 600 * i + 17 * i)).collect();
    both_arms!("many ranges", followed, &many);
    both_arms!("one range", followed, &[(0, 20_000)]);
}
