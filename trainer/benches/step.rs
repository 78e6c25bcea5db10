//! The `nano` training step on the reference: forward, backward, optimiser, retraction.

use criterion::{Criterion, criterion_group, criterion_main};
use dormouse::backend::build;
use dormouse::config::{Backend, preset};
use dormouse::data::Batch;
use dormouse::{host, rng};
use rand::RngExt;

fn step(c: &mut Criterion) {
    host::keep_freed_memory();
    let mut config = preset("nano").expect("nano is a preset");
    config.run.backend = Backend::Cpu;
    let (rows, len) = (config.train.batch_rows, config.data.seq_bytes);
    let mut random = rng::stream(1, rng::Purpose::Test, 0, 0);
    let bytes: Vec<u8> = (0..rows * (len + 1)).map(|_| random.random_range(97..123)).collect();
    let mut learner = build(&config).expect("nano builds");
    let mut at = 0;
    let mut group = c.benchmark_group("step");
    group.sample_size(10);
    group.bench_function("nano", |bench| {
        bench.iter(|| {
            let bytes = bytes.clone();
            learner.step(&Batch { step: at, rows, len, bytes, keys: None, mask: None }, 1e-4).expect("a step");
            at += 1;
            // The records are read as a run reads them.
            if at.is_multiple_of(10) {
                learner.drain().expect("records");
            }
        });
    });
    group.finish();
}

criterion_group!(benches, step);
criterion_main!(benches);
