//! Time of `kda` a token and head, at the shape of the trainer's `nano` preset: K = V = 64, 8 x 256 tokens, 4 heads.
//!
//! `cargo bench -p dormouse-reference --bench kda` measures on every core; criterion's elements are token-heads, so
//! with one core (`RAYON_NUM_THREADS=1`) the inverse of its throughput is the time of one.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use dormouse_reference::kda::{Config, Form, Inputs, Kda, Memory, Outputs};
use dormouse_reference::{Precision, Reference, Tensor};
use ndarray::{ArrayD, IxDyn};

const BATCH: usize = 8;
const TIME: usize = 256;
const HEADS: usize = 4;
const WIDTH: usize = 64;

/// Values in [-1, 1) that repeat after 2^24; a bench needs no better.
fn noise(b: &Reference<f32>, shape: &[usize], map: impl Fn(f32) -> f32) -> Tensor<f32> {
    let mut state = 1u32;
    b.constant(ArrayD::from_shape_simple_fn(IxDyn(shape), || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        map((state >> 8) as f32 / (1 << 23) as f32 - 1.0)
    }))
}

fn kda(c: &mut Criterion) {
    let b = Reference::<f32>::new();
    let wide = [BATCH, TIME, HEADS, WIDTH];
    // A key of 64 numbers with mean square 1/64 has length 1.
    let unit = |x: f32| x * (3.0f32 / WIDTH as f32).sqrt();
    let q = noise(&b, &wide, unit);
    let k = noise(&b, &wide, unit);
    let v = noise(&b, &wide, |x| x);
    let g = noise(&b, &wide, |x| -0.1 * (1.0 + x));
    let beta = noise(&b, &wide[..3], |x| 0.5 + 0.4 * x);
    let d_o = noise(&b, &wide, |x| x);
    let inputs =
        Inputs { q: &q, k: &k, v: &v, g: &g, beta: &beta, b: None, w: None, cu_seqlens: None, initial_state: None };
    let mut group = c.benchmark_group("kda");
    group.throughput(Throughput::Elements((BATCH * TIME * HEADS) as u64));
    for (name, form) in [("recurrent", Form::Recurrent), ("chunked64", Form::Chunked { chunk: 64 })] {
        let config =
            Config { scale: None, form, checkpoint_every: 64, memory: Memory::Save, precision: Precision::Full };
        group.sample_size(if form == Form::Recurrent { 50 } else { 10 });
        group.bench_function(format!("{name}/forward"), |bench| {
            bench.iter(|| b.forward(&config, inputs.clone()).expect("the shapes agree"));
        });
        group.bench_function(format!("{name}/forward_backward"), |bench| {
            bench.iter(|| {
                let (_, saved) = Kda::forward(&b, &config, inputs.clone()).expect("the shapes agree");
                b.backward(&config, &saved, Outputs { o: &d_o, final_state: None }).expect("the shapes agree")
            });
        });
    }
    group.finish();
}

criterion_group!(benches, kda);
criterion_main!(benches);
