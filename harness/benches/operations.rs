//! Every operation on the CPU reference in `f32`, at the shapes that it has in a step of the preset `nano`.
//!
//! A group is a stem; `forward_backward` is both halves, so its time over that of `forward` says what an adjoint costs.

use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use dormouse_harness::description::{Case, OperationOn};
use dormouse_harness::draw;
use dormouse_harness::named::Values;
use dormouse_harness::ops::{Visitor, visit_all};
use dormouse_harness::runner::upload;
use dormouse_reference::{Dual, Reference, Tensors};

/// Axes that mean the same in every operation.
const TOKENS: [(&str, usize); 4] = [("B", 8), ("T", 256), ("H", 4), ("K", 64)];

/// The other axes of each operation.
const SIZES: [(&str, &[(&str, usize)]); 18] = [
    ("adamw", &[("P", 830_000)]),
    ("blend", &[("D", 256), ("E", 2), ("3+E", 5)]),
    ("controller", &[("D", 256), ("2D", 512), ("3+E", 5)]),
    ("cross_entropy", &[("C", 256)]),
    ("decay_gate", &[]),
    ("embedding", &[("V", 256), ("D", 256)]),
    ("expert", &[("E", 2), ("D", 256), ("F", 768), ("R", 64)]),
    ("gated_rms_norm", &[("V", 64)]),
    ("kda", &[("V", 64)]),
    ("l2_norm", &[]),
    ("linear", &[("I", 256), ("O", 256)]),
    ("record", &[]),
    ("residual", &[("D", 256)]),
    ("retract", &[("E", 2), ("n", 256), ("k", 64)]),
    ("rms_norm", &[("D", 256)]),
    ("sanitise", &[("P", 830_000)]),
    ("short_conv", &[("C", 256)]),
    ("spectral", &[("I", 256), ("O", 256), ("R", 64)]),
];

/// The table's first case at the size of `nano`.
fn case<O: OperationOn<Reference<f32>>>() -> Case<O::Config> {
    let mut case = O::cases().into_iter().next().expect("a table has cases");
    let own = SIZES.iter().find(|(stem, _)| *stem == O::STEM).expect("every stem has a size").1;
    for (axis, size) in &mut case.dims {
        if let Some((_, new)) = own.iter().chain(&TOKENS).find(|(name, _)| name == axis) {
            *size = *new;
        }
    }
    case
}

struct Bench<'a>(&'a mut Criterion);

impl Visitor for Bench<'_> {
    fn visit<O>(&mut self)
    where
        O: OperationOn<Reference<f64>> + OperationOn<Reference<f32>> + OperationOn<Reference<Dual>>,
    {
        let (b, case) = (Reference::<f32>::new(), case::<O>());
        let mut rng = draw::stream(1, &[O::STEM, "bench"]);
        let inputs = upload(&b, &O::draw(&case, &mut rng), O::integers()).expect("inputs");
        let run = |upstream: Option<&_>| O::run(&b, &case.config, &inputs, upstream).expect("the shapes agree");
        let mut group = self.0.benchmark_group(O::STEM);
        group.sample_size(10).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
        group.bench_function("forward", |bench| bench.iter(|| run(None)));
        if O::NO_GRADIENT.is_none() {
            let absent = |name: &str| O::no_upstream().contains(&name) || O::optional_upstream().contains(&name);
            let outputs = run(None).outputs;
            let upstream: Values = outputs
                .iter()
                .filter(|(name, _)| !absent(name))
                .map(|(name, output)| (name, draw::normal(&mut rng, b.shape(output))))
                .collect();
            let upstream = upload(&b, &upstream, &[]).expect("upstream gradients");
            group.bench_function("forward_backward", |bench| bench.iter(|| run(Some(&upstream))));
        }
        group.finish();
    }
}

fn operations(c: &mut Criterion) {
    visit_all(&mut Bench(c));
}

criterion_group!(benches, operations);
criterion_main!(benches);
