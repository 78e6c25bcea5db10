//! `residual`: description for the harness.

use dormouse_reference::Result;
use dormouse_reference::residual::{self, Config, Inputs, Outputs, Params, Residual};
use ndarray::{ArrayD, IxDyn};
use proptest::prelude::*;
use rand_chacha::ChaCha8Rng;

use crate::compare::same_bits;
use crate::description::{Case, Gate, Law, Mutant, Operation, OperationOn, Run, TensorSpec, Tolerances, glue};
use crate::draw;
use crate::named::{Named, Values};
use crate::runner::Runner;
use crate::tolerance;

/// The description.
pub struct ResidualOp;

/// Value families: ordinary, heavy-tailed with large channels, and a branch that is switched off.
const FAMILIES: [&str; 3] = ["normal", "activations", "rho-zero"];

fn case(batch: usize, tokens: usize, width: usize, family: &'static str) -> Case<Config> {
    Case {
        name: format!("b{batch}-t{tokens}-d{width}-{family}"),
        config: Config {},
        dims: vec![("B", batch), ("T", tokens), ("D", width), ("one", 1)],
        family,
        present: vec![],
    }
}

impl Operation for ResidualOp {
    type Config = Config;

    const STEM: &'static str = "residual";

    fn tensors() -> Vec<TensorSpec> {
        vec![
            TensorSpec::input("c", &["B", "T", "D"]),
            TensorSpec::input("y", &["B", "T", "D"]),
            TensorSpec::param("rho", &["one"]),
            TensorSpec::output("h", &["B", "T", "D"]),
        ]
    }

    fn cases() -> Vec<Case<Config>> {
        vec![
            case(2, 5, 8, "normal"),
            // Not narrower: a single h = c + rho y may cancel, and then says nothing about f32.
            case(1, 1, 4, "normal"),
            case(2, 7, 33, "activations"),
            case(3, 4, 6, "rho-zero"),
            // More rows than one block of the fixed-order sum of drho.
            case(1, 300, 4, "normal"),
            case(0, 4, 6, "normal"),
            case(2, 0, 6, "normal"),
        ]
    }

    fn production() -> Vec<Case<Config>> {
        vec![case(8, 512, 768, "normal")]
    }

    fn strategy() -> BoxedStrategy<Case<Config>> {
        (1..4usize, 1..9usize, 4..40usize, 0..FAMILIES.len())
            .prop_map(|(b, t, d, family)| case(b, t, d, FAMILIES[family]))
            .boxed()
    }

    fn draw(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
        let shape = case.shape(&Self::spec("c"));
        let mut values = || match case.family {
            "activations" => draw::activation_like(rng, &shape),
            _ => draw::normal(rng, &shape),
        };
        let (c, y) = (values(), values());
        let rho = match case.family {
            "rho-zero" => ArrayD::zeros(IxDyn(&[1])),
            _ => 1.0 + 0.3 * draw::normal(rng, &[1]),
        };
        Values::new().with("c", c).with("y", y).with("rho", rho)
    }

    fn naive(_: &Config, inputs: &Values, upstream: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
        let is = |name: &str| twist == Some(name);
        let (c, y, rho) = (inputs.at("c"), inputs.at("y"), inputs.at("rho")[[0]]);
        let mut h = c.clone();
        for (i, h) in h.iter_mut().enumerate() {
            let branch = y.as_slice().expect("drawn arrays are contiguous")[i];
            let rho = if is("forward-without-rho") { 1.0 } else { rho };
            let stream = if is("stream-dropped") { 0.0 } else { *h };
            *h = if is("branch-sign") { stream - rho * branch } else { stream + rho * branch };
        }
        let mut grads = Values::new();
        if let Some(upstream) = upstream {
            let dh = upstream.at("h");
            let (mut dc, mut dy, mut drho) = (dh.clone(), dh.clone(), 0.0);
            let last_row = dh.len() - dh.shape()[2].min(dh.len());
            for (i, dh) in dh.iter().enumerate() {
                let at = |a: &ArrayD<f64>| a.as_slice().expect("drawn arrays are contiguous")[i];
                if !(is("drho-misses-last-row") && i >= last_row) {
                    drho += dh * if is("drho-from-stream") { at(c) } else { at(y) };
                }
            }
            if is("dc-times-rho") {
                dc *= rho;
            }
            if !is("dy-without-rho") {
                dy *= rho;
            }
            grads = grads.with("c", dc).with("y", dy).with("rho", ArrayD::from_elem(IxDyn(&[1]), drho));
        }
        Run { outputs: Values::new().with("h", h), grads }
    }

    fn laws() -> Vec<Law<Self>> {
        vec![
            Law::Independent("B"),
            Law::Independent("T"),
            Law::Causal("T"),
            Law::Custom { name: "the stream passes untouched where the branch is off", check: stream_passes },
        ]
    }

    fn mutants() -> Vec<Mutant> {
        [
            ("forward-without-rho", Gate::Form),
            ("stream-dropped", Gate::Meta),
            ("branch-sign", Gate::Form),
            ("dc-times-rho", Gate::Fd),
            ("dy-without-rho", Gate::Fd),
            ("drho-from-stream", Gate::Fd),
            ("drho-misses-last-row", Gate::Adj),
        ]
        .map(|(twist, caught_by)| Mutant { twist, caught_by })
        .to_vec()
    }

    fn tolerances(_: &Case<Config>) -> Tolerances {
        tolerance::WELL_CONDITIONED
    }
}

/// With rho = 0, h is c, dy is zero; whatever rho is, dc is dh: bit for bit.
fn stream_passes(
    runner: &dyn Runner<ResidualOp>,
    case: &Case<Config>,
    rng: &mut ChaCha8Rng,
) -> std::result::Result<f64, String> {
    let mut inputs = ResidualOp::draw(case, rng);
    let dh = draw::normal(rng, inputs.at("c").shape());
    let upstream = Values::new().with("h", dh.clone());
    let pass = |comparison: crate::compare::Comparison| {
        if comparison.passes() { Ok(()) } else { Err(comparison.to_string()) }
    };
    let run = runner.run(&case.config, &inputs, Some(&upstream)).map_err(|e| e.to_string())?;
    pass(same_bits("dc", run.grads.at("c").view(), dh.view()))?;
    inputs.set("rho", ArrayD::zeros(IxDyn(&[1])));
    let run = runner.run(&case.config, &inputs, Some(&upstream)).map_err(|e| e.to_string())?;
    // Adding 0 * y turns no bit of c except the sign of a zero, which a normal draw does not hold.
    pass(same_bits("h", run.outputs.at("h").view(), inputs.at("c").view()))?;
    pass(same_bits("dy", run.grads.at("y").mapv(f64::abs).view(), ArrayD::zeros(dh.raw_dim()).view()))?;
    Ok(0.0)
}

impl<B: Residual> OperationOn<B> for ResidualOp {
    fn run(
        b: &B,
        config: &Config,
        inputs: &Named<B::Tensor>,
        upstream: Option<&Named<B::Tensor>>,
    ) -> Result<Run<B::Tensor>> {
        let op = Self::STEM;
        let params = glue::required(op, Params::from_named(glue::find(inputs)))?;
        let (outputs, saved) =
            Residual::forward(b, config, glue::required(op, Inputs::from_named(glue::find(inputs)))?, params.clone())?;
        let mut grads = Named::new();
        if let Some(upstream) = upstream {
            let into = params.try_map(|_, p| glue::zeros_like(b, p))?;
            let upstream = glue::required(op, Outputs::from_named(glue::find(upstream)))?;
            let returned: residual::Grads<_> = Residual::backward(b, config, &saved, upstream, into.as_ref())?;
            grads.extend(returned.named().into_iter().map(|(field, t)| (glue::input_of(field), t)));
            grads.extend(into.named());
        }
        Ok(Run { outputs: outputs.named().into_iter().collect(), grads })
    }
}
