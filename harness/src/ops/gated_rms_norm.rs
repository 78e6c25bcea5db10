//! `gated_rms_norm`: description for the harness.

use dormouse_reference::Result;
use dormouse_reference::gated_rms_norm::{self, Config, GatedRmsNorm, Inputs, Outputs, Params};
use ndarray::{ArrayD, IxDyn};
use proptest::prelude::*;
use rand_chacha::ChaCha8Rng;

use crate::compare::{compare, same_bits};
use crate::description::{Case, Gate, Law, Mutant, Operation, OperationOn, Run, TensorSpec, Tolerances, glue};
use crate::draw;
use crate::gates::passed;
use crate::named::{Named, Values};
use crate::runner::Runner;
use crate::tolerance;

/// The description.
pub struct GatedRmsNormOp;

/// Value families: ordinary; heavy-tailed with large channels; one zero and one tiny row; gates at both ends of the
/// sigmoid; rows as small as an attention's first outputs (mean square 1e-5).
const FAMILIES: [&str; 5] = ["normal", "activations", "zero-row", "shut-and-open", "small-rows"];

fn case([batch, tokens, heads, width]: [usize; 4], eps: f64, family: &'static str) -> Case<Config> {
    Case {
        name: format!("b{batch}-t{tokens}-h{heads}-v{width}-eps{eps:e}-{family}"),
        config: Config { eps },
        dims: vec![("B", batch), ("T", tokens), ("H", heads), ("V", width)],
        family,
        present: vec![],
    }
}

impl Operation for GatedRmsNormOp {
    type Config = Config;

    const STEM: &'static str = "gated_rms_norm";

    fn tensors() -> Vec<TensorSpec> {
        let axes = &["B", "T", "H", "V"];
        vec![
            TensorSpec::input("o", axes),
            TensorSpec::input("zeta", axes),
            TensorSpec::param("gain", &["V"]),
            TensorSpec::output("y", axes),
        ]
    }

    fn cases() -> Vec<Case<Config>> {
        vec![
            case([2, 5, 3, 8], 1e-5, "normal"),
            // With one channel do is eps / (o^2 + eps) of its terms; eps = 1 keeps that a number, not a cancellation.
            case([1, 2, 2, 1], 1.0, "normal"),
            case([2, 4, 2, 33], 1e-5, "activations"),
            case([3, 4, 2, 6], 1e-5, "zero-row"),
            case([2, 3, 3, 5], 1e-5, "shut-and-open"),
            case([2, 3, 2, 16], 1e-8, "small-rows"),
            // More rows than one block of the gain's fixed-order sum.
            case([1, 300, 2, 4], 1e-5, "normal"),
            case([0, 4, 2, 6], 1e-5, "normal"),
            case([2, 0, 2, 6], 1e-5, "normal"),
        ]
    }

    fn production() -> Vec<Case<Config>> {
        vec![case([8, 512, 12, 64], 1e-5, "normal")]
    }

    fn strategy() -> BoxedStrategy<Case<Config>> {
        (1..4usize, 1..9usize, 1..4usize, 3..40usize, prop_oneof![Just(1e-3), Just(1e-5)], 0..FAMILIES.len())
            .prop_map(|(b, t, h, v, eps, family)| case([b, t, h, v], eps, FAMILIES[family]))
            .boxed()
    }

    fn draw(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
        let shape = case.shape(&Self::spec("o"));
        let normal = draw::normal(rng, &shape);
        let o = match case.family {
            "activations" => draw::activation_like(rng, &shape),
            "zero-row" => draw::with_zero_and_tiny_rows(normal),
            "small-rows" => normal * 3e-3,
            _ => normal,
        };
        let mut zeta = draw::normal(rng, &shape);
        if case.family == "shut-and-open" {
            for (i, zeta) in zeta.iter_mut().enumerate() {
                *zeta += [0.0, 30.0, -30.0][i % 3];
            }
        }
        let gain = 1.0 + 0.3 * draw::normal(rng, &[case.dim("V")]);
        Values::new().with("o", o).with("zeta", zeta).with("gain", gain)
    }

    fn naive(config: &Config, inputs: &Values, upstream: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
        let is = |name: &str| twist == Some(name);
        let (o, zeta, gain) = (inputs.at("o"), inputs.at("zeta"), inputs.at("gain"));
        let [batch, tokens, heads, width] = *o.shape() else { panic!("o has four axes") };
        let sigma = |x: f64| 1.0 / (1.0 + (-x).exp());
        let mut y = o.clone();
        let (mut d_o, mut dzeta) = (o.clone(), o.clone());
        let mut dgain: ArrayD<f64> = ArrayD::zeros(IxDyn(&[width]));
        for b in 0..batch {
            for t in 0..tokens {
                for h in 0..heads {
                    let mut square = 0.0;
                    for v in 0..width {
                        square += o[[b, t, h, v]] * o[[b, t, h, v]];
                    }
                    let mean = if is("sum-for-mean") { square } else { square / width as f64 };
                    let rho = if is("eps-outside-root") {
                        1.0 / (mean.sqrt() + config.eps)
                    } else {
                        1.0 / (mean + config.eps).sqrt()
                    };
                    for v in 0..width {
                        let of_head = if is("gate-of-the-first-head") { 0 } else { h };
                        let z = zeta[[b, t, of_head, v]];
                        let gate = if is("silu-gate") { z * sigma(z) } else { sigma(z) };
                        let gain = if is("forward-without-gain") { 1.0 } else { gain[[v]] };
                        y[[b, t, h, v]] = gain * rho * o[[b, t, h, v]] * gate;
                    }
                    let Some(upstream) = upstream else { continue };
                    let dy = upstream.at("y");
                    let mut mean = 0.0;
                    for v in 0..width {
                        let gain = if is("mean-without-gain") { 1.0 } else { gain[[v]] };
                        let dh = dy[[b, t, h, v]] * sigma(zeta[[b, t, h, v]]) * gain;
                        mean += rho * o[[b, t, h, v]] * dh / width as f64;
                    }
                    if is("backward-without-mean") {
                        mean = 0.0;
                    }
                    if is("backward-mean-sign") {
                        mean = -mean;
                    }
                    for v in 0..width {
                        let z = zeta[[b, t, h, v]];
                        let oh = rho * o[[b, t, h, v]];
                        let dn = dy[[b, t, h, v]] * sigma(z);
                        let closed = if is("slope-of-an-exponential") { 1.0 } else { sigma(-z) };
                        dzeta[[b, t, h, v]] = dn * gain[[v]] * oh * closed;
                        d_o[[b, t, h, v]] = rho * (dn * gain[[v]] - oh * mean);
                        if is("dgain-without-gate") {
                            dgain[[v]] += dy[[b, t, h, v]] * oh;
                        } else if !(is("dgain-of-the-first-head") && h > 0) {
                            dgain[[v]] += dn * oh;
                        }
                    }
                }
            }
        }
        let mut grads = Values::new();
        if upstream.is_some() {
            grads = grads.with("o", d_o).with("zeta", dzeta).with("gain", dgain);
        }
        Run { outputs: Values::new().with("y", y), grads }
    }

    fn laws() -> Vec<Law<Self>> {
        vec![
            Law::Independent("B"),
            Law::Independent("T"),
            Law::Independent("H"),
            Law::Causal("T"),
            Law::Custom { name: "o times 2 and eps times 4 give the same y and half of do", check: scale_invariance },
            Law::Custom { name: "a gate and its opposite add up to one", check: opposite_gates },
        ]
    }

    fn mutants() -> Vec<Mutant> {
        [
            ("sum-for-mean", Gate::Form),
            ("eps-outside-root", Gate::Meta),
            ("gate-of-the-first-head", Gate::Meta),
            ("silu-gate", Gate::Meta),
            ("forward-without-gain", Gate::Fd),
            ("mean-without-gain", Gate::Adj),
            ("backward-without-mean", Gate::Fd),
            ("backward-mean-sign", Gate::Adj),
            ("slope-of-an-exponential", Gate::Fd),
            ("dgain-without-gate", Gate::Adj),
            ("dgain-of-the-first-head", Gate::Fd),
        ]
        .map(|(twist, caught_by)| Mutant { twist, caught_by })
        .to_vec()
    }

    fn tolerances(_: &Case<Config>) -> Tolerances {
        tolerance::WELL_CONDITIONED
    }
}

/// eps sits inside the root, next to the mean square.
fn scale_invariance(
    runner: &dyn Runner<GatedRmsNormOp>,
    case: &Case<Config>,
    rng: &mut ChaCha8Rng,
) -> std::result::Result<f64, String> {
    let mut inputs = GatedRmsNormOp::draw(case, rng);
    let upstream = Values::new().with("y", draw::normal(rng, inputs.at("o").shape()));
    let run = |config: &Config, inputs: &Values| runner.run(config, inputs, Some(&upstream)).map_err(|e| e.to_string());
    let once = run(&case.config, &inputs)?;
    *inputs.get_mut("o").expect("o is drawn") *= 2.0;
    let twice = run(&Config { eps: 4.0 * case.config.eps }, &inputs)?;
    // Powers of two scale exactly, so the two have the same bits.
    let d_o = twice.grads.at("o") * 2.0;
    for comparison in [
        same_bits("y", twice.outputs.at("y").view(), once.outputs.at("y").view()),
        same_bits("do", d_o.view(), once.grads.at("o").view()),
        same_bits("dzeta", twice.grads.at("zeta").view(), once.grads.at("zeta").view()),
        same_bits("dgain", twice.grads.at("gain").view(), once.grads.at("gain").view()),
    ] {
        if !comparison.passes() {
            return Err(comparison.to_string());
        }
    }
    Ok(0.0)
}

/// sigma(zeta) + sigma(-zeta) = 1, so the two results add up to twice that of a gate at zero.
fn opposite_gates(
    runner: &dyn Runner<GatedRmsNormOp>,
    case: &Case<Config>,
    rng: &mut ChaCha8Rng,
) -> std::result::Result<f64, String> {
    let inputs = GatedRmsNormOp::draw(case, rng);
    let y = |sign: f64| -> std::result::Result<ArrayD<f64>, String> {
        let inputs = inputs.clone().with("zeta", inputs.at("zeta") * sign);
        let run = runner.run(&case.config, &inputs, None).map_err(|e| e.to_string())?;
        Ok(run.outputs.at("y").clone())
    };
    let sum = y(1.0)? + y(-1.0)?;
    let comparison = compare("y", sum.view(), (y(0.0)? * 2.0).view(), &tolerance::FORM);
    passed(comparison)
}

impl<B: GatedRmsNorm> OperationOn<B> for GatedRmsNormOp {
    fn run(
        b: &B,
        config: &Config,
        inputs: &Named<B::Tensor>,
        upstream: Option<&Named<B::Tensor>>,
    ) -> Result<Run<B::Tensor>> {
        let op = Self::STEM;
        let params = glue::required(op, Params::from_named(glue::find(inputs)))?;
        let activations = glue::required(op, Inputs::from_named(glue::find(inputs)))?;
        let (outputs, saved) = GatedRmsNorm::forward(b, config, activations, params.clone())?;
        let mut grads = Named::new();
        if let Some(upstream) = upstream {
            let into = params.try_map(|_, p| glue::zeros_like(b, p))?;
            let upstream = glue::required(op, Outputs::from_named(glue::find(upstream)))?;
            let returned: gated_rms_norm::Grads<_> =
                GatedRmsNorm::backward(b, config, &saved, upstream, into.as_ref())?;
            grads.extend(returned.named().into_iter().map(|(field, t)| (glue::input_of(field), t)));
            grads.extend(into.named());
        }
        Ok(Run { outputs: outputs.named().into_iter().collect(), grads })
    }
}
