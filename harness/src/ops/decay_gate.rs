//! `decay_gate`: description for the harness.

use dormouse_reference::Result;
use dormouse_reference::decay_gate::{self, Config, DecayGate, Inputs, Kind, Outputs, Params};
use ndarray::{ArrayD, Axis, IxDyn};
use proptest::prelude::*;
use rand_chacha::ChaCha8Rng;

use crate::compare::{Tolerance, compare};
use crate::description::{Case, Gate, Law, Mutant, Operation, OperationOn, Run, TensorSpec, Tolerances, glue};
use crate::draw;
use crate::named::{Named, Values};
use crate::runner::Runner;
use crate::tolerance;

/// The description.
pub struct DecayGateOp;

/// Value families: ordinary; every second token at one or the other end of the gate; biases as a fresh model has them,
/// for time constants from 2 to 500 tokens; every token near the open end, so that all derivatives are small.
const FAMILIES: [&str; 4] = ["normal", "saturated", "fresh", "open"];

const BOUNDED: Kind = Kind::Bounded { lower_bound: -5.0 };

fn case([batch, tokens, heads, keys]: [usize; 4], kind: Kind, beta_scale: f64, family: &'static str) -> Case<Config> {
    let word = match kind {
        Kind::Bounded { lower_bound } => format!("bounded{lower_bound}"),
        Kind::Softplus => "softplus".to_owned(),
    };
    Case {
        name: format!("b{batch}-t{tokens}-h{heads}-k{keys}-{word}-beta{beta_scale}-{family}"),
        config: Config { kind, beta_scale },
        dims: vec![("B", batch), ("T", tokens), ("H", heads), ("K", keys)],
        family,
        present: vec![],
    }
}

impl Operation for DecayGateOp {
    type Config = Config;

    const STEM: &'static str = "decay_gate";

    fn tensors() -> Vec<TensorSpec> {
        let (per_key, per_head) = (&["B", "T", "H", "K"], &["B", "T", "H"]);
        vec![
            TensorSpec::input("z", per_key),
            TensorSpec::input("y", per_head),
            TensorSpec::param("a_log", &["H"]),
            TensorSpec::param("dt_bias", &["H", "K"]),
            TensorSpec::output("g", per_key),
            TensorSpec::output("beta", per_head),
        ]
    }

    fn cases() -> Vec<Case<Config>> {
        let strongest = Kind::Bounded { lower_bound: -5.9 };
        vec![
            case([2, 5, 3, 4], BOUNDED, 1.0, "normal"),
            case([2, 5, 3, 4], Kind::Softplus, 2.0, "normal"),
            case([2, 6, 2, 5], BOUNDED, 2.0, "saturated"),
            case([2, 6, 2, 5], Kind::Softplus, 1.0, "saturated"),
            case([2, 4, 3, 8], BOUNDED, 1.0, "fresh"),
            case([1, 3, 2, 3], strongest, 1.0, "normal"),
            case([1, 1, 1, 1], BOUNDED, 1.0, "normal"),
            // More tokens than one block of the parameters' fixed-order sum.
            case([1, 270, 2, 3], BOUNDED, 1.0, "normal"),
            // As many heads and keys as a model's, or more.
            case([2, 3, 5, 24], BOUNDED, 1.0, "normal"),
            case([2, 3, 5, 24], Kind::Softplus, 1.0, "normal"),
            // 1 - sigmoid would leave nothing of these derivatives in f32.
            case([2, 5, 3, 4], BOUNDED, 2.0, "open"),
            case([2, 80, 2, 3], Kind::Softplus, 1.0, "normal"),
            case([0, 4, 2, 3], BOUNDED, 1.0, "normal"),
            case([2, 0, 2, 3], Kind::Softplus, 1.0, "normal"),
        ]
    }

    fn production() -> Vec<Case<Config>> {
        vec![case([8, 512, 12, 64], BOUNDED, 1.0, "fresh")]
    }

    fn strategy() -> BoxedStrategy<Case<Config>> {
        let kind = prop_oneof![
            (-5.9..-0.1f64).prop_map(|lower_bound| Kind::Bounded { lower_bound }),
            Just(BOUNDED),
            Just(Kind::Softplus)
        ];
        (1..4usize, 1..9usize, 1..4usize, 1..20usize, kind, any::<bool>(), 0..FAMILIES.len())
            .prop_map(|(b, t, h, k, kind, twice, family)| {
                case([b, t, h, k], kind, if twice { 2.0 } else { 1.0 }, FAMILIES[family])
            })
            .boxed()
    }

    fn draw(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
        let [batch, tokens, heads, keys] = ["B", "T", "H", "K"].map(|axis| case.dim(axis));
        let mut z = draw::normal(rng, &[batch, tokens, heads, keys]);
        let mut y = draw::normal(rng, &[batch, tokens, heads]);
        if case.family == "saturated" {
            let end = |t: usize| [0.0, 40.0, 0.0, -40.0][t % 4];
            z.indexed_iter_mut().for_each(|(i, z)| *z += end(i[1]));
            y.indexed_iter_mut().for_each(|(i, y)| *y += end(i[1] + 2));
        }
        let dt_bias = match case.family {
            // -ln(5 tau - 1) with tau log-uniform.
            "fresh" => {
                draw::uniform(rng, &[heads, keys], 2f64.ln(), 500f64.ln()).mapv(|ln| -(5.0 * ln.exp() - 1.0).ln())
            }
            _ => draw::normal(rng, &[heads, keys]),
        };
        let mut a_log = 0.4 * draw::normal(rng, &[heads]);
        if case.family == "open" {
            z += 12.0;
            y += 12.0;
            a_log.fill(0.0);
        }
        Values::new().with("z", z).with("y", y).with("a_log", a_log).with("dt_bias", dt_bias)
    }

    fn naive(config: &Config, inputs: &Values, upstream: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
        let is = |name: &str| twist == Some(name);
        let (z, y) = (inputs.at("z"), inputs.at("y"));
        let (a_log, dt_bias) = (inputs.at("a_log"), inputs.at("dt_bias"));
        let [batch, tokens, heads, keys] = *z.shape() else { panic!("z has four axes") };
        let sigma = |x: f64| 1.0 / (1.0 + (-x).exp());
        let softplus = |x: f64| if x > 30.0 { x + (-x).exp() } else { x.exp().ln_1p() };
        let scale = config.beta_scale;
        let (mut g, mut beta) = (z.clone(), y.clone());
        let (mut dz, mut dy) = (z.clone(), y.clone());
        let (mut da_log, mut ddt_bias) = (a_log * 0.0, dt_bias * 0.0);
        for b in 0..batch {
            for t in 0..tokens {
                for h in 0..heads {
                    let of_head = if is("a-of-the-first-head") { 0 } else { h };
                    let a = match twist {
                        Some("a-dropped") => 1.0,
                        Some("a-not-exponentiated") => a_log[[h]],
                        _ => a_log[[of_head]].exp(),
                    };
                    for k in 0..keys {
                        let bias = if is("bias-dropped") { 0.0 } else { dt_bias[[h, k]] };
                        let x = z[[b, t, h, k]] + bias;
                        g[[b, t, h, k]] = match config.kind {
                            Kind::Bounded { lower_bound } if is("clamped-softplus") => {
                                (-a * softplus(x)).max(lower_bound)
                            }
                            Kind::Bounded { lower_bound } => lower_bound * sigma(a * x),
                            Kind::Softplus => -a * softplus(x),
                        };
                        let Some(upstream) = upstream else { continue };
                        let dg = upstream.at("g")[[b, t, h, k]];
                        let from_a = if is("dz-without-a") { 1.0 } else { a };
                        let (slope, by_a) = match config.kind {
                            Kind::Bounded { lower_bound } => {
                                let closed = if is("dz-of-one-tail") { 1.0 } else { sigma(-a * x) };
                                let slope = lower_bound * sigma(a * x) * closed;
                                (slope * from_a, slope * if is("da-log-without-x") { a } else { a * x })
                            }
                            Kind::Softplus => {
                                let slope = if is("softplus-slope-of-minus-x") { sigma(-x) } else { sigma(x) };
                                let by_a = if is("da-log-as-if-bounded") { slope * x } else { softplus(x) };
                                (-from_a * slope, -a * by_a)
                            }
                        };
                        dz[[b, t, h, k]] = dg * slope;
                        ddt_bias[[h, k]] +=
                            if is("ddt-bias-of-the-first-sequence") && b > 0 { 0.0 } else { dg * slope };
                        da_log[[h]] += if is("da-log-misses-the-last-key") && k + 1 == keys { 0.0 } else { dg * by_a };
                    }
                    let s = y[[b, t, h]];
                    let scale_once = if is("beta-scale-dropped") { 1.0 } else { scale };
                    beta[[b, t, h]] = scale_once * sigma(s);
                    if let Some(upstream) = upstream {
                        let dbeta = upstream.at("beta")[[b, t, h]];
                        let scale_back = if is("dy-without-scale") { 1.0 } else { scale };
                        let closed = if is("dy-of-one-tail") { 1.0 } else { sigma(-s) };
                        dy[[b, t, h]] = dbeta * scale_back * sigma(s) * closed;
                    }
                }
            }
        }
        let mut grads = Values::new();
        if upstream.is_some() {
            grads = grads.with("z", dz).with("y", dy).with("a_log", da_log).with("dt_bias", ddt_bias);
        }
        Run { outputs: Values::new().with("g", g).with("beta", beta), grads }
    }

    fn laws() -> Vec<Law<Self>> {
        vec![
            Law::Independent("B"),
            Law::Independent("T"),
            Law::Independent("H"),
            Law::Independent("K"),
            Law::Causal("T"),
            Law::Custom { name: "a7: the constants of the bounded gate", check: a7 },
            Law::Custom { name: "a gate and its reflection", check: reflection },
            Law::Custom { name: "the parameters' gradients are sums of dz", check: parameter_sums },
        ]
    }

    fn mutants() -> Vec<Mutant> {
        [
            ("clamped-softplus", Gate::Meta),
            ("a-of-the-first-head", Gate::Meta),
            ("a-dropped", Gate::Form),
            ("a-not-exponentiated", Gate::Form),
            ("bias-dropped", Gate::Meta),
            ("beta-scale-dropped", Gate::Meta),
            ("dz-without-a", Gate::Fd),
            ("dz-of-one-tail", Gate::Adj),
            ("da-log-without-x", Gate::Fd),
            ("da-log-as-if-bounded", Gate::Adj),
            ("da-log-misses-the-last-key", Gate::Fd),
            ("softplus-slope-of-minus-x", Gate::Fd),
            ("ddt-bias-of-the-first-sequence", Gate::Meta),
            ("dy-without-scale", Gate::Adj),
            ("dy-of-one-tail", Gate::Fd),
        ]
        .map(|(twist, caught_by)| Mutant { twist, caught_by })
        .to_vec()
    }

    fn tolerances(_: &Case<Config>) -> Tolerances {
        tolerance::WELL_CONDITIONED
    }
}

/// lower_bound -5, a = 1, no bias: g of -2, 0, 1, 8, and dg/dz = -5/4, dg/da_log = 0 at zero. A softplus clamped at the
/// bound would give -0.127, -0.693, -1.313 and -5.
fn a7(runner: &dyn Runner<DecayGateOp>, _: &Case<Config>, _: &mut ChaCha8Rng) -> std::result::Result<f64, String> {
    let array = |shape: &[usize], values: &[f64]| {
        ArrayD::from_shape_vec(IxDyn(shape), values.to_vec()).expect("as many values as the shape has")
    };
    let inputs = Values::new()
        .with("z", array(&[1, 4, 1, 1], &[-2.0, 0.0, 1.0, 8.0]))
        .with("y", array(&[1, 4, 1], &[0.0; 4]))
        .with("a_log", array(&[1], &[0.0]))
        .with("dt_bias", array(&[1, 1], &[0.0]));
    let upstream =
        Values::new().with("g", array(&[1, 4, 1, 1], &[0.0, 1.0, 0.0, 0.0])).with("beta", array(&[1, 4, 1], &[0.0; 4]));
    let config = Config { kind: BOUNDED, beta_scale: 1.0 };
    let run = runner.run(&config, &inputs, Some(&upstream)).map_err(|e| e.to_string())?;
    let printed = Tolerance::new(1e-5, "the constants have five decimals");
    let g = array(&[1, 4, 1, 1], &[-0.59601, -2.5, -3.65529, -4.99832]);
    let exact = tolerance::FORM;
    worst_of([
        compare("g", run.outputs.at("g").view(), g.view(), &printed),
        compare("dz", run.grads.at("z").view(), array(&[1, 4, 1, 1], &[0.0, -1.25, 0.0, 0.0]).view(), &exact),
        compare("da_log", run.grads.at("a_log").view(), array(&[1], &[0.0]).view(), &exact),
    ])
}

/// With z, y and the bias negated: g + g' = lower_bound (bounded), g - g' = -a x (softplus), beta + beta' = the scale.
fn reflection(
    runner: &dyn Runner<DecayGateOp>,
    case: &Case<Config>,
    rng: &mut ChaCha8Rng,
) -> std::result::Result<f64, String> {
    let inputs = DecayGateOp::draw(case, rng);
    let mut mirrored = inputs.clone();
    for name in ["z", "y", "dt_bias"] {
        mirrored.set(name, -inputs.at(name));
    }
    let run = |inputs: &Values| runner.run(&case.config, inputs, None).map_err(|e| e.to_string());
    let (here, there) = (run(&inputs)?.outputs, run(&mirrored)?.outputs);
    let (got, want) = match case.config.kind {
        Kind::Bounded { lower_bound } => {
            (here.at("g") + there.at("g"), ArrayD::from_elem(here.at("g").raw_dim(), lower_bound))
        }
        Kind::Softplus => {
            let mut minus_ax = inputs.at("z") + inputs.at("dt_bias");
            for (mut of_head, a_log) in minus_ax.axis_iter_mut(Axis(2)).zip(inputs.at("a_log")) {
                of_head.mapv_inplace(|x| -a_log.exp() * x);
            }
            (here.at("g") - there.at("g"), minus_ax)
        }
    };
    let beta = here.at("beta") + there.at("beta");
    let scale = ArrayD::from_elem(beta.raw_dim(), case.config.beta_scale);
    worst_of([
        compare("g", got.view(), want.view(), &tolerance::FORM),
        compare("beta", beta.view(), scale.view(), &tolerance::FORM),
    ])
}

/// ddt_bias = sum dz; da_log = sum dz x (bounded) or sum dg g (softplus).
fn parameter_sums(
    runner: &dyn Runner<DecayGateOp>,
    case: &Case<Config>,
    rng: &mut ChaCha8Rng,
) -> std::result::Result<f64, String> {
    let inputs = DecayGateOp::draw(case, rng);
    let upstream = Values::new()
        .with("g", draw::normal(rng, inputs.at("z").shape()))
        .with("beta", draw::normal(rng, inputs.at("y").shape()));
    let run = runner.run(&case.config, &inputs, Some(&upstream)).map_err(|e| e.to_string())?;
    let dz = run.grads.at("z");
    let terms = match case.config.kind {
        Kind::Bounded { .. } => dz * &(inputs.at("z") + inputs.at("dt_bias")),
        Kind::Softplus => upstream.at("g") * run.outputs.at("g"),
    };
    let over_tokens = |a: &ArrayD<f64>| a.sum_axis(Axis(0)).sum_axis(Axis(0));
    let over_keys = |a: ArrayD<f64>| a.sum_axis(Axis(1));
    // The sums may cancel, so the bound is on the sum of magnitudes.
    let bound = |got: &ArrayD<f64>, want: &ArrayD<f64>, size: &ArrayD<f64>| {
        got.iter().zip(want).zip(size).fold(0.0f64, |worst, ((got, want), size)| {
            worst.max((got - want).abs() / (tolerance::FORM.tol * size).max(f64::MIN_POSITIVE))
        })
    };
    let bias = bound(run.grads.at("dt_bias"), &over_tokens(dz), &over_tokens(&dz.mapv(f64::abs)));
    let a_log =
        bound(run.grads.at("a_log"), &over_keys(over_tokens(&terms)), &over_keys(over_tokens(&terms.mapv(f64::abs))));
    Ok(bias.max(a_log))
}

/// The worst of several comparisons, or the message of the first that fails.
fn worst_of<const N: usize>(comparisons: [crate::compare::Comparison; N]) -> std::result::Result<f64, String> {
    let mut worst = 0.0f64;
    for comparison in comparisons {
        if !comparison.passes() {
            return Err(comparison.to_string());
        }
        worst = worst.max(comparison.worst);
    }
    Ok(worst)
}

impl<B: DecayGate> OperationOn<B> for DecayGateOp {
    fn run(
        b: &B,
        config: &Config,
        inputs: &Named<B::Tensor>,
        upstream: Option<&Named<B::Tensor>>,
    ) -> Result<Run<B::Tensor>> {
        let op = Self::STEM;
        let params = glue::required(op, Params::from_named(glue::find(inputs)))?;
        let logits = glue::required(op, Inputs::from_named(glue::find(inputs)))?;
        let (outputs, saved) = DecayGate::forward(b, config, logits, params.clone())?;
        let mut grads = Named::new();
        if let Some(upstream) = upstream {
            let into = params.try_map(|_, p| glue::zeros_like(b, p))?;
            let upstream = glue::required(op, Outputs::from_named(glue::find(upstream)))?;
            let returned: decay_gate::Grads<_> = DecayGate::backward(b, config, &saved, upstream, into.as_ref())?;
            grads.extend(returned.named().into_iter().map(|(field, t)| (glue::input_of(field), t)));
            grads.extend(into.named());
        }
        Ok(Run { outputs: outputs.named().into_iter().collect(), grads })
    }
}
