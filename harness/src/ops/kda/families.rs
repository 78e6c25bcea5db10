//! The kinds of inputs that have broken other implementations of gated delta rules.

use ndarray::{ArrayD, Axis, Zip};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use dormouse_reference::kda::Config;

use crate::description::{Case, Operation};
use crate::draw;
use crate::named::Values;

use super::KdaOp;

/// Every family, with what it is for.
pub const FAMILIES: [&str; 15] = [
    // The gate as a model starts with it: mean g about -0.05.
    "init",
    // g = -5 sigmoid(2 N): every decay of the bounded gate, from almost none to almost total.
    "spread",
    // g = -5 everywhere: what is carried is e^-5 of what is written.
    "strong",
    // g = 0 and g = -0.0: the delta rule without a gate.
    "open",
    "negative-zero",
    // One token in five forgets with g = -1000 among mild ones: differences of running sums lose everything there.
    "spikes",
    // Some tokens and some channels with g = -inf.
    "cut",
    // One key repeated: the triangular system has no zero entries.
    "repeated",
    // Keys with correlation 0.95.
    "correlated",
    "beta-0",
    "beta-1",
    // Each write overshoots; the state map still does not grow anything.
    "beta-2",
    // The same with correlated keys: the worst-conditioned inputs in the domain.
    "overshoot",
    // Tokens whose query or key is zero.
    "zero-rows",
    // Queries, values and states of 10^3 and more.
    "large",
];

/// The families whose beta may exceed 1.
pub const OVERSHOOTING: [&str; 2] = ["beta-2", "overshoot"];

/// Inputs of a case.
pub fn draw(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
    let shape = |name: &str| case.shape(&KdaOp::spec(name));
    let (wide, value, narrow) = (shape("q"), shape("v"), shape("beta"));
    let gates_wide = shape("g");
    let size = if case.family == "large" { 1e3 } else { 1.0 };
    let mut q = unit_rows(draw::normal(rng, &wide)) * size;
    let mut k = keys(case.family, rng, &wide);
    if case.family == "zero-rows" {
        zero_some_rows(&mut q, rng);
        zero_some_rows(&mut k, rng);
    }
    let mut values = Values::new()
        .with("q", q)
        .with("k", k)
        .with("v", draw::normal(rng, &value) * size)
        .with("g", gates(case.family, rng, &gates_wide))
        .with("beta", betas(case.family, rng, &narrow));
    if case.has("initial_state") {
        values.set("initial_state", draw::normal(rng, &shape("initial_state")) * size);
    }
    if case.has("b") {
        values.set("b", betas(case.family, rng, &gates_wide));
    }
    if case.has("w") {
        values.set("w", betas(case.family, rng, &value));
    }
    if case.has("cu_seqlens") {
        values.set("cu_seqlens", offsets(rng, case.dim("T"), case.dim("N")));
    }
    values
}

/// Where `sequences` sequences start that share `time` tokens, and where the last one ends. The second of every three is
/// empty, and so may be others.
fn offsets(rng: &mut ChaCha8Rng, time: usize, sequences: usize) -> ArrayD<f64> {
    let mut cuts = draw::ids(rng, &[sequences + 1], time + 1).into_raw_vec_and_offset().0;
    cuts[0] = 0.0;
    cuts[sequences] = time as f64;
    cuts.sort_by(f64::total_cmp);
    for n in (2..sequences).step_by(3) {
        cuts[n] = cuts[n - 1];
    }
    ArrayD::from_shape_vec(vec![sequences + 1], cuts).expect("as many cuts")
}

fn keys(family: &str, rng: &mut ChaCha8Rng, shape: &[usize]) -> ArrayD<f64> {
    let own = unit_rows(draw::normal(rng, shape));
    let correlation: f64 = match family {
        "repeated" => 1.0,
        "correlated" | "overshoot" => 0.95,
        _ => return own,
    };
    // One direction for each (batch entry, head), the same for all its tokens.
    let mut one = shape.to_vec();
    one[1] = 1;
    let common = unit_rows(draw::normal(rng, &one));
    let mut keys = own;
    Zip::from(&mut keys).and_broadcast(&common).for_each(|own, &common| {
        *own = correlation.sqrt() * common + (1.0 - correlation).sqrt() * *own;
    });
    unit_rows(keys)
}

fn gates(family: &str, rng: &mut ChaCha8Rng, shape: &[usize]) -> ArrayD<f64> {
    let normal = draw::normal(rng, shape);
    let mild = |x: f64| -0.05 * (0.5 * x).exp();
    match family {
        "spread" => normal.mapv(|x| -5.0 / (1.0 + (-2.0 * x).exp())),
        "strong" => ArrayD::from_elem(normal.raw_dim(), -5.0),
        "open" | "repeated" => ArrayD::from_elem(normal.raw_dim(), 0.0),
        "negative-zero" => ArrayD::from_elem(normal.raw_dim(), -0.0),
        "spikes" => by_token(normal.mapv(mild), rng, 0.2, -1000.0),
        "cut" => {
            let mut g = by_token(normal.mapv(mild), rng, 0.15, f64::NEG_INFINITY);
            g.mapv_inplace(|g| if rng.random_bool(0.1) { f64::NEG_INFINITY } else { g });
            g
        }
        _ => normal.mapv(mild),
    }
}

/// Sets all channels of a token to `value`, for this share of the tokens.
fn by_token(mut g: ArrayD<f64>, rng: &mut ChaCha8Rng, share: f64, value: f64) -> ArrayD<f64> {
    for mut row in g.lanes_mut(Axis(3)) {
        if rng.random_bool(share) {
            row.fill(value);
        }
    }
    g
}

fn betas(family: &str, rng: &mut ChaCha8Rng, shape: &[usize]) -> ArrayD<f64> {
    let normal = draw::normal(rng, shape);
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    match family {
        "beta-0" => ArrayD::zeros(normal.raw_dim()),
        "beta-1" => ArrayD::ones(normal.raw_dim()),
        "beta-2" => ArrayD::from_elem(normal.raw_dim(), 2.0),
        "correlated" => normal.mapv(|x| sigmoid(x + 3.0)),
        "overshoot" => normal.mapv(|x| 2.0 * sigmoid(x + 3.0)),
        _ => normal.mapv(sigmoid),
    }
}

/// Rows of length 1.
pub fn unit_rows(mut values: ArrayD<f64>) -> ArrayD<f64> {
    let last = Axis(values.ndim() - 1);
    for mut row in values.lanes_mut(last) {
        let length = row.iter().map(|x| x * x).sum::<f64>().sqrt();
        row.mapv_inplace(|x| x / length);
    }
    values
}

fn zero_some_rows(values: &mut ArrayD<f64>, rng: &mut ChaCha8Rng) {
    for mut row in values.lanes_mut(Axis(3)) {
        if rng.random_bool(0.3) {
            row.fill(0.0);
        }
    }
}
