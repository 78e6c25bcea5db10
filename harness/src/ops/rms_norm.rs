//! `rms_norm`: description for the harness.

use dormouse_reference::Result;
use dormouse_reference::rms_norm::{self, Config, Inputs, Outputs, Params, RmsNorm};
use ndarray::{Array1, Array2, ArrayD, IxDyn};
use proptest::prelude::*;
use rand_chacha::ChaCha8Rng;

use crate::description::{Case, Gate, Law, Mutant, Operation, OperationOn, Run, TensorSpec, Tolerances, glue};
use crate::draw;
use crate::named::{Named, Values};
use crate::tolerance;

/// The description.
pub struct RmsNormOp;

/// Value families: ordinary, heavy-tailed with large channels, and one zero and one tiny row.
const FAMILIES: [&str; 3] = ["normal", "activations", "zero-row"];

fn case(batch: usize, tokens: usize, width: usize, eps: f64, family: &'static str, shift: bool) -> Case<Config> {
    Case {
        name: format!("b{batch}-t{tokens}-d{width}-eps{eps:e}-{family}{}", if shift { "-shift" } else { "" }),
        config: Config { eps },
        dims: vec![("B", batch), ("T", tokens), ("D", width)],
        family,
        present: if shift { vec!["shift", "c"] } else { vec![] },
    }
}

impl Operation for RmsNormOp {
    type Config = Config;

    const STEM: &'static str = "rms_norm";

    fn tensors() -> Vec<TensorSpec> {
        vec![
            TensorSpec::input("x", &["B", "T", "D"]),
            TensorSpec::param("gain", &["D"]),
            TensorSpec::param("shift", &["D"]),
            TensorSpec::output("y", &["B", "T", "D"]),
            TensorSpec::output("c", &["B", "T", "D"]),
        ]
    }

    fn cases() -> Vec<Case<Config>> {
        vec![
            case(2, 5, 8, 1e-3, "normal", true),
            // With one channel dx is eps / (x^2 + eps) of its terms; eps = 1 keeps that a number, not a cancellation.
            case(1, 1, 1, 1.0, "normal", false),
            case(2, 7, 33, 1e-3, "activations", true),
            case(3, 4, 6, 1e-3, "zero-row", false),
            case(1, 3, 16, 1e-8, "normal", true),
            // More rows than one block of the parameter gradients' fixed-order sum.
            case(1, 300, 4, 1e-3, "normal", true),
            case(0, 4, 6, 1e-3, "normal", false),
            case(2, 0, 6, 1e-3, "normal", true),
        ]
    }

    fn production() -> Vec<Case<Config>> {
        vec![case(8, 512, 768, 1e-5, "normal", true)]
    }

    fn strategy() -> BoxedStrategy<Case<Config>> {
        (1..4usize, 1..9usize, 3..40usize, prop_oneof![Just(1e-3), Just(1e-6)], 0..FAMILIES.len(), any::<bool>())
            .prop_map(|(b, t, d, eps, family, shift)| case(b, t, d, eps, FAMILIES[family], shift))
            .boxed()
    }

    fn draw(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
        let shape = case.shape(&Self::spec("x"));
        let x = match case.family {
            "activations" => draw::activation_like(rng, &shape),
            "zero-row" => draw::with_zero_and_tiny_rows(draw::normal(rng, &shape)),
            _ => draw::normal(rng, &shape),
        };
        let width = [case.dim("D")];
        let mut values = Values::new().with("x", x).with("gain", 1.0 + 0.3 * draw::normal(rng, &width));
        if case.has("shift") {
            values.set("shift", 0.5 * draw::normal(rng, &width));
        }
        values
    }

    fn naive(config: &Config, inputs: &Values, upstream: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
        let is = |name: &str| twist == Some(name);
        let shape = inputs.at("x").shape().to_vec();
        let width = shape[2];
        let rows = shape[0] * shape[1];
        let flat = |a: &ArrayD<f64>| Array2::from_shape_vec((rows, width), a.iter().copied().collect()).expect("rows");
        let x = flat(inputs.at("x"));
        let gain = inputs.at("gain");
        let shift = inputs.get("shift");
        let (mut c, mut y) = (x.clone(), x.clone());
        let mut rho = Array1::zeros(rows);
        for n in 0..rows {
            let mut square = 0.0;
            for d in 0..width {
                if let Some(shift) = shift.filter(|_| !is("forward-without-shift")) {
                    c[[n, d]] += shift[[d]];
                }
                square += c[[n, d]] * c[[n, d]];
            }
            let mean = if is("sum-for-mean") { square } else { square / width as f64 };
            rho[n] = if is("eps-outside-root") {
                1.0 / (mean.sqrt() + config.eps)
            } else {
                1.0 / (mean + config.eps).sqrt()
            };
            for d in 0..width {
                let gain = if is("gain-dropped") { 1.0 } else { gain[[d]] };
                y[[n, d]] = rho[n] * c[[n, d]] * gain;
            }
        }
        let back =
            |a: &Array2<f64>| ArrayD::from_shape_vec(IxDyn(&shape), a.iter().copied().collect()).expect("same count");
        let mut outputs = Values::new().with("y", back(&y));
        if shift.is_some() {
            outputs.set("c", back(&c));
        }
        let mut grads = Values::new();
        if let Some(upstream) = upstream {
            let dy = flat(upstream.at("y"));
            let dc = upstream.get("c").map(&flat);
            let mut dx = Array2::zeros((rows, width));
            let mut dgain = Array1::zeros(width);
            let mut dshift = Array1::zeros(width);
            for n in 0..rows {
                let mut mean = 0.0;
                for d in 0..width {
                    mean += rho[n] * c[[n, d]] * dy[[n, d]] * gain[[d]] / width as f64;
                    dgain[d] += dy[[n, d]] * rho[n] * c[[n, d]];
                }
                if is("backward-without-mean") {
                    mean = 0.0;
                }
                if is("backward-mean-sign") {
                    mean = -mean;
                }
                for d in 0..width {
                    dx[[n, d]] = rho[n] * (dy[[n, d]] * gain[[d]] - rho[n] * c[[n, d]] * mean);
                    if let Some(dc) = dc.as_ref().filter(|_| !is("dc-dropped")) {
                        dx[[n, d]] += dc[[n, d]];
                    }
                    if !(is("dshift-misses-last-row") && n + 1 == rows) {
                        dshift[d] += dx[[n, d]];
                    }
                }
            }
            grads = grads.with("x", back(&dx)).with("gain", dgain.into_dyn());
            if shift.is_some() {
                grads.set("shift", dshift.into_dyn());
            }
        }
        Run { outputs, grads }
    }

    fn laws() -> Vec<Law<Self>> {
        vec![
            Law::Independent("B"),
            Law::Independent("T"),
            Law::Causal("T"),
            Law::Exact { name: "doubling x doubles nothing but the distance to eps", check: scale_invariance },
        ]
    }

    fn mutants() -> Vec<Mutant> {
        [
            ("forward-without-shift", Gate::Form),
            ("sum-for-mean", Gate::Form),
            ("eps-outside-root", Gate::Form),
            ("gain-dropped", Gate::Fd),
            ("backward-without-mean", Gate::Fd),
            ("backward-mean-sign", Gate::Adj),
            ("dc-dropped", Gate::Fd),
            ("dshift-misses-last-row", Gate::Adj),
        ]
        .map(|(twist, caught_by)| Mutant { twist, caught_by })
        .to_vec()
    }

    fn tolerances(_: &Case<Config>) -> Tolerances {
        tolerance::WELL_CONDITIONED
    }

    fn optional_upstream() -> &'static [&'static str] {
        &["c"]
    }
}

/// With eps scaled by 4, rows scaled by 2 give the same y: eps sits inside the root.
fn scale_invariance(
    runner: &dyn crate::runner::Runner<RmsNormOp>,
    case: &Case<Config>,
    rng: &mut ChaCha8Rng,
) -> std::result::Result<f64, String> {
    let mut inputs = RmsNormOp::draw(case, rng);
    inputs.remove("shift");
    let run = |config: &Config, inputs: &Values| runner.run(config, inputs, None).map_err(|e| e.to_string());
    let once = run(&case.config, &inputs)?;
    *inputs.get_mut("x").expect("x is drawn") *= 2.0;
    let twice = run(&Config { eps: 4.0 * case.config.eps }, &inputs)?;
    // Powers of two scale exactly, so the two have the same bits.
    let comparison = crate::compare::same_bits("y", twice.outputs.at("y").view(), once.outputs.at("y").view());
    if comparison.passes() { Ok(0.0) } else { Err(comparison.to_string()) }
}

impl<B: RmsNorm> OperationOn<B> for RmsNormOp {
    fn run(
        b: &B,
        config: &Config,
        inputs: &Named<B::Tensor>,
        upstream: Option<&Named<B::Tensor>>,
    ) -> Result<Run<B::Tensor>> {
        let op = Self::STEM;
        let params = glue::required(op, Params::from_named(glue::find(inputs)))?;
        let (outputs, saved) =
            RmsNorm::forward(b, config, glue::required(op, Inputs::from_named(glue::find(inputs)))?, params.clone())?;
        let mut grads = Named::new();
        if let Some(upstream) = upstream {
            let into = params.try_map(|_, p| glue::zeros_like(b, p))?;
            let upstream = glue::required(op, Outputs::from_named(glue::find(upstream)))?;
            let returned: rms_norm::Grads<_> = RmsNorm::backward(b, config, &saved, upstream, into.as_ref())?;
            grads.extend(returned.named().into_iter().map(|(field, t)| (glue::input_of(field), t)));
            grads.extend(into.named());
        }
        Ok(Run { outputs: outputs.named().into_iter().collect(), grads })
    }
}
