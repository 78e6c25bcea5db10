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

/// The same token by token with gates near 0: the software driver's exp is off by up to an ulp and a half, mostly to one
/// side, and the errors of all tokens that a state lives through add up.
const LIMIT_MILD: f64 = 4e-6;

/// The same for keys so alike that the triangular systems amplify rounding.
const LIMIT_OVERSHOOT: f64 = 3e-5;

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
