//! The kernels of `kda` against the f64 reference on the same f32 inputs, on Mesa's software Vulkan driver.
//!
//! Every output is filled with NaN before a launch, so a number that no kernel writes is an error like any other.

use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::wgpu::WgpuRuntime;
use ndarray::{ArrayD, IxDyn};

use dormouse_cuda::kda::dstate::Written;
use dormouse_cuda::kda::forward::Saved;
use dormouse_cuda::kda::grads::Passed;
use dormouse_cuda::kda::{self, Sizes};
use dormouse_reference::kda::{Config, Form, Grads, Inputs, Kda, Memory, Outputs};
use dormouse_reference::{Reference, Tensor, Tensors};

/// Relative RMS error that a tensor may have; a single token may have ten times that of its tensor's RMS.
const LIMIT: f64 = 2e-6;

/// The same token by token with gates near 0: the software driver's exp is off by 1e-7 on average, always to one side,
/// and the errors of all tokens that a state lives through add up.
const LIMIT_MILD: f64 = 4e-6;

/// The same for keys so alike that the triangular systems amplify rounding.
const LIMIT_OVERSHOOT: f64 = 3e-5;

#[cube(launch_unchecked)]
fn exp_kernel(x: &Array<f32>, y: &mut Array<f32>) {
    y[ABSOLUTE_POS] = x[ABSOLUTE_POS].exp();
}

/// What [`LIMIT_MILD`] rests on: the driver's exp is wrong by several times an f32's rounding near 0, and not around zero
/// mean. Where this fails, the driver has a better exp and the limit can go.
#[test]
fn the_software_exp_is_biased() {
    let Some(client) = client("exp") else { return };
    let seed = &mut 1;
    let x = ArrayD::from_shape_simple_fn(IxDyn(&[4096]), || f64::from((-0.05 * (0.5 * uniform(seed)).exp()) as f32));
    let y = poisoned(&client, 4096);
    // SAFETY: one unit an element.
    unsafe {
        exp_kernel::launch_unchecked::<WgpuRuntime>(
            &client,
            CubeCount::Static(64, 1, 1),
            CubeDim::new_1d(64),
            ArrayArg::from_raw_parts(upload(&client, &x), 4096),
            ArrayArg::from_raw_parts(y.clone(), 4096),
        );
    }
    let error = download(&client, &y, &[4096]) / x.mapv(f64::exp) - 1.0;
    let mean = error.mean().unwrap();
    let worst = error.iter().fold(0.0f64, |a, x| if x.is_nan() { f64::NAN } else { a.max(x.abs()) });
    println!("exp: mean error {mean:.1e}, worst {worst:.1e}");
    assert!(mean.abs() > 2e-8 && worst < 5e-7, "mean {mean:.1e}, worst {worst:.1e}");
}

#[derive(Clone, Copy, Debug)]
struct Case {
    /// B, T, H, K, V.
    sizes: [usize; 5],
    family: &'static str,
    initial_state: bool,
    upstream_state: bool,
}

/// The shapes with a partner each for every family; few shapes, because each one compiles its own kernels.
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |sizes, family, states| {
        cases.push(Case { sizes, family, initial_state: states, upstream_state: states });
    };
    add([1, 1, 1, 1, 1], "init", true);
    add([1, 1, 1, 1, 1], "init", false);
    add([2, 17, 3, 5, 3], "init", true);
    add([2, 17, 3, 5, 3], "spikes", false);
    for family in ["init", "spread", "strong", "open", "spikes", "cut", "repeated", "overshoot", "zero"] {
        add([1, 65, 2, 16, 16], family, true);
        add([1, 70, 2, 16, 16], family, false);
    }
    for family in ["init", "strong", "spikes", "correlated"] {
        add([2, 130, 2, 64, 64], family, true);
    }
    add([1, 33, 1, 60, 100], "init", true);
    add([1, 33, 1, 60, 100], "spread", true);
    add([1, 3, 1, 256, 130], "spread", true);
    cases
}

/// Uniform in -1..1.
fn uniform(seed: &mut u64) -> f64 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

fn draw(shape: &[usize], seed: &mut u64) -> ArrayD<f64> {
    ArrayD::from_shape_simple_fn(IxDyn(shape), || 1.7 * uniform(seed))
}

fn unit_rows(mut x: ArrayD<f64>) -> ArrayD<f64> {
    for mut row in x.rows_mut() {
        let length = row.dot(&row).sqrt().max(1e-9);
        row.mapv_inplace(|x| x / length);
    }
    x
}

fn rounded(x: ArrayD<f64>) -> ArrayD<f64> {
    x.mapv(|x| f64::from(x as f32))
}

/// Inputs of a case, each an f32 number.
fn inputs(case: &Case) -> Inputs<ArrayD<f64>> {
    let [batch, time, heads, key, value] = case.sizes;
    let seed = &mut (7 + case.family.bytes().map(u64::from).sum::<u64>());
    let wide = [batch, time, heads, key];
    let similarity: f64 = match case.family {
        "repeated" => 1.0,
        "correlated" | "overshoot" => 0.95,
        _ => 0.0,
    };
    let common = unit_rows(draw(&[1, 1, 1, key], seed));
    let own = unit_rows(draw(&wide, seed));
    let mut k = unit_rows(&common * similarity.sqrt() + &own * (1.0 - similarity).sqrt());
    let mut q = unit_rows(draw(&wide, seed));
    if case.family == "zero" {
        for (n, (mut q, mut k)) in q.rows_mut().into_iter().zip(k.rows_mut()).enumerate() {
            if n % 3 == 0 {
                q.fill(0.0);
            }
            if n % 4 == 0 {
                k.fill(0.0);
            }
        }
    }
    let mut g = draw(&wide, seed);
    let mild = |x: f64| -0.05 * (0.5 * x).exp();
    match case.family {
        "spread" => g.mapv_inplace(|x| -5.0 / (1.0 + (-2.0 * x).exp())),
        "strong" => g.fill(-5.0),
        "open" | "repeated" => g.fill(0.0),
        "spikes" | "cut" => {
            let hard = if case.family == "cut" { f64::NEG_INFINITY } else { -1000.0 };
            g.mapv_inplace(mild);
            for (n, mut row) in g.rows_mut().into_iter().enumerate() {
                if n % 5 == 3 {
                    row.fill(hard);
                }
            }
        }
        _ => g.mapv_inplace(mild),
    }
    let beta = draw(&wide[..3], seed).mapv(|x| match case.family {
        "overshoot" => 1.8 + 0.1 * x,
        "correlated" | "repeated" => 0.9 + 0.05 * x,
        _ => 0.5 + 0.25 * x,
    });
    let initial = case.initial_state.then(|| draw(&[batch, heads, key, value], seed));
    Inputs { q, k, v: draw(&[batch, time, heads, value], seed), g, beta, initial_state: initial }.map(|_, x| rounded(x))
}

fn upstream(case: &Case) -> Outputs<ArrayD<f64>> {
    let [batch, time, heads, key, value] = case.sizes;
    let seed = &mut 99;
    let o = rounded(draw(&[batch, time, heads, value], seed));
    let state = case.upstream_state.then(|| rounded(draw(&[batch, heads, key, value], seed)));
    Outputs { o, final_state: state }
}

/// o, final_state and every gradient by name.
type Results = Vec<(&'static str, ArrayD<f64>)>;

fn reference(case: &Case) -> Results {
    let b = Reference::<f64>::new();
    let config = Config {
        scale: Some(f64::from(scale(case))),
        form: Form::Recurrent,
        checkpoint_every: 8,
        memory: Memory::Save,
    };
    let inputs = inputs(case).map(|_, x| b.constant(x));
    let (outputs, saved) = Kda::forward(&b, &config, inputs.as_ref()).unwrap();
    let upstream = upstream(case).map(|_, x| b.constant(x));
    let grads: Grads<Tensor<f64>> = Kda::backward(&b, &config, &saved, upstream.as_ref()).unwrap();
    let mut results = Results::new();
    for (name, tensor) in outputs.as_ref().named().into_iter().chain(grads.as_ref().named()) {
        results.push((name, b.download(tensor).unwrap()));
    }
    results
}

fn scale(case: &Case) -> f32 {
    (case.sizes[3] as f32).powf(-0.5)
}

type Client = ComputeClient<WgpuRuntime>;

/// The software driver's client, or none after saying so.
fn client(test: &str) -> Option<Client> {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
    let adapters = cubecl::future::block_on(instance.enumerate_adapters(wgpu::Backends::VULKAN));
    if adapters.is_empty() {
        println!("NOTRUN {test}: no Vulkan adapter answers; install mesa-vulkan-drivers and libvulkan1");
        return None;
    }
    Some(WgpuRuntime::client(&Default::default()))
}

fn upload(client: &Client, x: &ArrayD<f64>) -> Handle {
    let values: Vec<f32> = x.iter().map(|&x| x as f32).collect();
    client.create_from_slice(f32::as_bytes(&values))
}

/// A buffer full of NaN.
fn poisoned(client: &Client, len: usize) -> Handle {
    client.create_from_slice(f32::as_bytes(&vec![f32::NAN; len]))
}

fn download(client: &Client, handle: &Handle, shape: &[usize]) -> ArrayD<f64> {
    let bytes = client.read_one(handle.clone()).unwrap();
    let values = f32::from_bytes(&bytes).iter().map(|&x| f64::from(x)).collect();
    ArrayD::from_shape_vec(IxDyn(shape), values).unwrap()
}

/// Where a set of kernels puts its results, and their shapes.
struct Buffers {
    outputs: Outputs<Handle>,
    grads: Grads<Handle>,
    case: Case,
}

impl Buffers {
    fn new(client: &Client, case: &Case) -> Self {
        let [batch, time, heads, key, value] = case.sizes;
        let tokens = batch * time * heads;
        let state = batch * heads * key * value;
        let new = |len| poisoned(client, len);
        Self {
            outputs: Outputs { o: new(tokens * value), final_state: Some(new(state)) },
            grads: Grads {
                dq: new(tokens * key),
                dk: new(tokens * key),
                dv: new(tokens * value),
                dg: new(tokens * key),
                dbeta: new(tokens),
                dinitial_state: case.initial_state.then(|| new(state)),
            },
            case: *case,
        }
    }

    fn results(&self, client: &Client) -> Results {
        let [batch, time, heads, key, value] = self.case.sizes;
        let named = self.outputs.as_ref().named().into_iter().chain(self.grads.as_ref().named());
        named
            .map(|(name, handle)| {
                let shape: &[usize] = match name {
                    "o" | "dv" => &[batch, time, heads, value],
                    "dbeta" => &[batch, time, heads],
                    "final_state" | "dinitial_state" => &[batch, heads, key, value],
                    _ => &[batch, time, heads, key],
                };
                (name, download(client, handle, shape))
            })
            .collect()
    }
}

fn plain(client: &Client, case: &Case) -> Results {
    let [batch, time, heads, key, value] = case.sizes;
    let sizes = Sizes::new(batch, time, heads, key, value).unwrap();
    let inputs = inputs(case).map(|_, x| upload(client, &x));
    let upstream = upstream(case).map(|_, x| upload(client, &x));
    let buffers = Buffers::new(client, case);
    let states = poisoned(client, sizes.span_states());
    let scratch = poisoned(client, kda::plain::scratch(&sizes));
    kda::plain::forward(client, &sizes, scale(case), inputs.as_ref(), buffers.outputs.as_ref(), Some(&states)).unwrap();
    kda::plain::backward(
        client,
        &sizes,
        scale(case),
        inputs.as_ref(),
        &states,
        upstream.as_ref(),
        &scratch,
        buffers.grads.as_ref(),
    )
    .unwrap();
    buffers.results(client)
}

fn fused(client: &Client, case: &Case) -> Results {
    let [batch, time, heads, key, value] = case.sizes;
    let sizes = Sizes::new(batch, time, heads, key, value).unwrap();
    let inputs = inputs(case).map(|_, x| upload(client, &x));
    let upstream = upstream(case).map(|_, x| upload(client, &x));
    let buffers = Buffers::new(client, case);
    let Buffers { outputs, grads, .. } = &buffers;
    let (p, t) = (poisoned(client, sizes.pairs()), poisoned(client, sizes.pairs()));
    let saved = Saved { states: poisoned(client, sizes.span_states()), u: poisoned(client, sizes.values()) };
    let (z, dstates) = (poisoned(client, sizes.values()), poisoned(client, sizes.span_states()));
    let saved = Saved { states: &saved.states, u: &saved.u };

    kda::prep::launch(client, &sizes, (&inputs.q, &inputs.k, &inputs.g, &inputs.beta), (&p, &t));
    kda::forward::launch(client, &sizes, scale(case), inputs.as_ref(), (&p, &t), outputs.as_ref(), Some(saved))
        .unwrap();
    let written = Written { dv: &grads.dv, z: &z, dstates: &dstates, dinitial_state: grads.dinitial_state.as_ref() };
    kda::dstate::launch(client, &sizes, scale(case), inputs.as_ref(), (&p, &t), upstream.as_ref(), written).unwrap();
    let passed = Passed { saved, z: &z, dstates: &dstates };
    kda::grads::launch(client, &sizes, scale(case), inputs.as_ref(), passed, &upstream.o, grads.as_ref());
    buffers.results(client)
}

fn rms(x: impl Iterator<Item = f64>) -> f64 {
    let (sum, n) = x.fold((0.0, 0usize), |(sum, n), x| (sum + x * x, n + 1));
    (sum / n.max(1) as f64).sqrt()
}

/// Relative RMS error of the tensor, and the worst row's RMS error relative to the tensor's RMS.
fn errors(got: &ArrayD<f64>, expected: &ArrayD<f64>) -> (f64, f64) {
    assert_eq!(got.shape(), expected.shape());
    let size = rms(expected.iter().copied());
    let difference = got - expected;
    if size == 0.0 {
        // Zero means zero: the kernels multiply by zeros and never subtract equal numbers.
        let largest = difference.iter().fold(0.0f64, |a, x| if x.is_nan() { f64::NAN } else { a.max(x.abs()) });
        return if largest == 0.0 { (0.0, 0.0) } else { (f64::INFINITY, f64::INFINITY) };
    }
    let worst = difference.rows().into_iter().map(|row| rms(row.iter().copied()));
    let worst = worst.fold(0.0f64, |a, x| if x.is_nan() || a.is_nan() { f64::NAN } else { a.max(x) });
    (rms(difference.iter().copied()) / size, worst / size)
}

/// Compares, prints the errors, and returns what is wrong.
fn compare(title: &str, case: &Case, got: &Results, expected: &Results) -> Vec<String> {
    let limit = match case.family {
        "overshoot" => LIMIT_OVERSHOOT,
        "init" if title == "plain" => LIMIT_MILD,
        _ => LIMIT,
    };
    let mut wrong = Vec::new();
    let mut line = format!("{title} {:?} {} states={}:", case.sizes, case.family, case.initial_state);
    let names = |results: &Results| results.iter().map(|(name, _)| *name).collect::<Vec<_>>();
    assert_eq!(names(got), names(expected));
    for ((name, got), (_, expected)) in got.iter().zip(expected) {
        let (error, worst) = errors(got, expected);
        line += &format!(" {name} {error:.1e}");
        // Written so that NaN fails.
        if !(error <= limit && worst <= 10.0 * limit) {
            wrong.push(format!("{title} {case:?}: {name} is off by {error:.2e}, worst token {worst:.2e}"));
        }
    }
    println!("{line}");
    wrong
}

fn check(title: &str, run: fn(&Client, &Case) -> Results) {
    let Some(client) = client(title) else { return };
    let mut wrong = Vec::new();
    for case in &cases() {
        let got = run(&client, case);
        wrong.extend(compare(title, case, &got, &reference(case)));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn same_bits_twice(title: &str, run: fn(&Client, &Case) -> Results) {
    let Some(client) = client(title) else { return };
    let case = Case { sizes: [2, 17, 3, 5, 3], family: "init", initial_state: true, upstream_state: true };
    for ((name, first), (_, second)) in run(&client, &case).iter().zip(&run(&client, &case)) {
        let bits = |x: &ArrayD<f64>| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(first), bits(second), "{name}");
    }
}

#[test]
fn plain_equals_the_reference() {
    check("plain", plain);
}

#[test]
fn fused_equals_the_reference() {
    check("fused", fused);
}

#[test]
fn fused_gives_the_same_bits_twice() {
    same_bits_twice("fused", fused);
}

#[test]
fn plain_gives_the_same_bits_twice() {
    same_bits_twice("plain", plain);
}

/// The comparison itself must see a wrong tensor, a wrong token and a number that was never written.
#[test]
fn the_comparison_bites() {
    let case = Case { sizes: [1, 65, 2, 16, 16], family: "init", initial_state: true, upstream_state: true };
    let expected = reference(&case);
    for n in 0..expected.len() {
        for (at, factor) in [(0, f64::NAN), (0, -1.0), (5, 1.0 + 1e-2)] {
            let mut got = expected.clone();
            let values = got[n].1.as_slice_mut().unwrap();
            let at = if at == 0 { values.len() - 1 } else { at };
            values[at] *= factor;
            assert_eq!(compare("planted", &case, &got, &expected).len(), 1, "{} {factor}", expected[n].0);
        }
    }
    assert!(compare("planted", &case, &expected, &expected).is_empty());
}

/// The outputs of the fused forward kernels alone, with or without what only training wants.
fn fused_o(client: &Client, sizes: &Sizes, inputs: Inputs<&Handle>, for_training: bool) -> Handle {
    let new = |len| poisoned(client, len);
    let (p, t, o) = (new(sizes.pairs()), new(sizes.pairs()), new(sizes.values()));
    let (state, states, u) = (new(sizes.state()), new(sizes.span_states()), new(sizes.values()));
    let outputs = Outputs { o: &o, final_state: for_training.then_some(&state) };
    let saved = for_training.then_some(Saved { states: &states, u: &u });
    kda::prep::launch(client, sizes, (inputs.q, inputs.k, inputs.g, inputs.beta), (&p, &t));
    kda::forward::launch(client, sizes, 0.5, inputs, (&p, &t), outputs, saved).unwrap();
    o
}

/// Tokens from 21 on are replaced; what comes before must keep every bit. And what is only kept for the backward pass
/// changes nothing.
#[test]
fn earlier_outputs_keep_their_bits() {
    let Some(client) = client("causality") else { return };
    let case = Case { sizes: [1, 40, 2, 16, 16], family: "init", initial_state: true, upstream_state: false };
    let sizes = Sizes::new(1, 40, 2, 16, 16).unwrap();
    let before = inputs(&case);
    let mut after = before.clone();
    for (name, x) in [("q", &mut after.q), ("k", &mut after.k), ("v", &mut after.v), ("g", &mut after.g)] {
        let sign = if name == "g" { 3.0 } else { -1.0 };
        x.slice_axis_mut(ndarray::Axis(1), (21..).into()).mapv_inplace(|x| sign * x);
    }
    let run = |inputs: &Inputs<ArrayD<f64>>, for_training: bool| {
        let inputs = inputs.as_ref().map(|_, x| upload(&client, x));
        let fused = fused_o(&client, &sizes, inputs.as_ref(), for_training);
        let plain = poisoned(&client, sizes.values());
        let outputs = Outputs { o: &plain, final_state: None };
        kda::plain::forward(&client, &sizes, 0.5, inputs.as_ref(), outputs, None).unwrap();
        [fused, plain].map(|o| download(&client, &o, &[40, 32]))
    };
    let first = run(&before, true);
    assert_eq!(first, run(&before, false), "with and without the states");
    for (first, second) in first.iter().zip(&run(&after, true)) {
        for t in 0..40 {
            assert_eq!(first.index_axis(ndarray::Axis(0), t) == second.index_axis(ndarray::Axis(0), t), t < 21, "{t}");
        }
    }
}

#[test]
fn nothing_to_do_launches_nothing() {
    let Some(client) = client("empty") else { return };
    let sizes = Sizes::new(0, 5, 1, 2, 2).unwrap();
    let any = poisoned(&client, 1);
    let inputs = Inputs { q: &any, k: &any, v: &any, g: &any, beta: &any, initial_state: None };
    fused_o(&client, &sizes, inputs.clone(), true);
    let outputs = Outputs { o: &any, final_state: None };
    kda::plain::forward(&client, &sizes, 0.5, inputs, outputs, None).unwrap();
    assert!(download(&client, &any, &[1])[[0]].is_nan());
}

#[test]
fn sizes_that_do_not_fit_are_refused_by_name() {
    let text = |b, t, h, k, v| Sizes::new(b, t, h, k, v).unwrap_err().to_string();
    assert_eq!(text(1, 1, 1, 257, 4), "kda kernels: K is 257, expected 1 to 256");
    assert_eq!(text(1, 1, 1, 4, 0), "kda kernels: V is 0, expected 1 to 256");
    assert_eq!(text(1, 0, 1, 4, 4), "kda kernels: T is 0, expected 1 to 2147483647");
    let expected = "the largest buffer would have 8589934592 elements, expected less than 2^31; use a smaller batch";
    assert_eq!(text(64, 65536, 4, 128, 256), format!("kda kernels: {expected}"));
}
