//! `l2_norm`: description for the harness.

use dormouse_reference::Result;
use dormouse_reference::l2_norm::{self, Config, Inputs, L2Norm, Outputs};
use ndarray::{ArrayD, Axis, Zip};
use proptest::prelude::*;
use rand_chacha::ChaCha8Rng;

use crate::compare::same_bits;
use crate::description::{Case, Gate, Law, Mutant, Operation, OperationOn, Run, TensorSpec, Tolerances, glue};
use crate::draw;
use crate::named::{Named, Values};
use crate::runner::Runner;
use crate::tolerance;

/// The description.
pub struct L2NormOp;

/// Value families: ordinary; heavy-tailed with large channels; one zero and one tiny row; rows whose sum of squares is
/// about eps, where the map bends most; rows of 1e8, whose length is far from every eps.
const FAMILIES: [&str; 5] = ["normal", "activations", "zero-row", "near-eps", "huge"];

fn case([batch, tokens, heads, width]: [usize; 4], eps: f64, family: &'static str) -> Case<Config> {
    Case {
        name: format!("b{batch}-t{tokens}-h{heads}-k{width}-eps{eps:e}-{family}"),
        config: Config { eps },
        dims: vec![("B", batch), ("T", tokens), ("H", heads), ("K", width)],
        family,
        present: vec![],
    }
}

impl Operation for L2NormOp {
    type Config = Config;

    const STEM: &'static str = "l2_norm";

    fn tensors() -> Vec<TensorSpec> {
        let axes = &["B", "T", "H", "K"];
        vec![TensorSpec::input("x", axes), TensorSpec::output("y", axes)]
    }

    fn cases() -> Vec<Case<Config>> {
        vec![
            case([2, 5, 3, 8], 1e-6, "normal"),
            // With one channel dx is eps / (x^2 + eps) of its terms; eps = 1 keeps that a number, not a cancellation.
            case([1, 2, 2, 1], 1.0, "normal"),
            case([2, 4, 2, 33], 1e-6, "activations"),
            case([3, 4, 2, 6], 1e-6, "zero-row"),
            case([2, 3, 3, 5], 1e-6, "near-eps"),
            case([2, 3, 2, 5], 1e-6, "huge"),
            case([1, 90, 2, 4], 1e-3, "normal"),
            case([0, 4, 2, 6], 1e-6, "normal"),
            case([2, 0, 2, 6], 1e-6, "normal"),
        ]
    }

    fn production() -> Vec<Case<Config>> {
        vec![case([8, 512, 12, 64], 1e-6, "normal")]
    }

    fn strategy() -> BoxedStrategy<Case<Config>> {
        (1..4usize, 1..9usize, 1..4usize, 3..40usize, prop_oneof![Just(1e-3), Just(1e-6)], 0..FAMILIES.len())
            .prop_map(|(b, t, h, k, eps, family)| case([b, t, h, k], eps, FAMILIES[family]))
            .boxed()
    }

    fn draw(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
        let shape = case.shape(&Self::spec("x"));
        let normal = draw::normal(rng, &shape);
        let x = match case.family {
            "activations" => draw::activation_like(rng, &shape),
            "zero-row" => draw::with_zero_and_tiny_rows(normal),
            "near-eps" => normal * (case.config.eps / case.dim("K") as f64).sqrt(),
            "huge" => normal * 1e8,
            _ => normal,
        };
        Values::new().with("x", x)
    }

    fn naive(config: &Config, inputs: &Values, upstream: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
        let is = |name: &str| twist == Some(name);
        let x = inputs.at("x");
        let [batch, tokens, heads, width] = x.shape() else { panic!("x has four axes") };
        let mut y = x.clone();
        let mut dx = x.clone();
        for b in 0..*batch {
            for t in 0..*tokens {
                for h in 0..*heads {
                    let of_head = if is("length-of-the-first-head") { 0 } else { h };
                    let mut square = 0.0;
                    for k in 0..*width {
                        square += x[[b, t, of_head, k]] * x[[b, t, of_head, k]];
                    }
                    if is("mean-for-sum") {
                        square /= *width as f64;
                    }
                    let rho = if is("eps-outside-root") {
                        1.0 / (square.sqrt() + config.eps)
                    } else {
                        1.0 / (square + config.eps).sqrt()
                    };
                    for k in 0..*width {
                        y[[b, t, h, k]] = rho * x[[b, t, h, k]];
                    }
                    let Some(upstream) = upstream else { continue };
                    let dy = upstream.at("y");
                    let mut along = 0.0;
                    for k in 0..*width {
                        along += y[[b, t, h, k]] * dy[[b, t, h, k]];
                    }
                    if is("backward-without-projection") {
                        along = 0.0;
                    }
                    if is("projection-sign") {
                        along = -along;
                    }
                    if is("y-taken-for-a-unit-vector") {
                        along *= (square + config.eps) / square.max(f64::MIN_POSITIVE);
                    }
                    for k in 0..*width {
                        let rho = if is("backward-without-rho") { 1.0 } else { rho };
                        dx[[b, t, h, k]] = rho * (dy[[b, t, h, k]] - y[[b, t, h, k]] * along);
                    }
                }
            }
        }
        let grads = if upstream.is_some() { Values::new().with("x", dx) } else { Values::new() };
        Run { outputs: Values::new().with("y", y), grads }
    }

    fn laws() -> Vec<Law<Self>> {
        vec![
            Law::Independent("B"),
            Law::Independent("T"),
            Law::Independent("H"),
            Law::Causal("T"),
            Law::Custom { name: "x times 2 and eps times 4 give the same y and half of dx", check: scale_invariance },
            Law::Custom { name: "the length of y and the part of dx along x", check: lengths },
        ]
    }

    fn mutants() -> Vec<Mutant> {
        [
            ("length-of-the-first-head", Gate::Meta),
            ("mean-for-sum", Gate::Form),
            ("eps-outside-root", Gate::Meta),
            ("backward-without-projection", Gate::Fd),
            ("projection-sign", Gate::Adj),
            ("y-taken-for-a-unit-vector", Gate::Fd),
            ("backward-without-rho", Gate::Adj),
        ]
        .map(|(twist, caught_by)| Mutant { twist, caught_by })
        .to_vec()
    }

    fn tolerances(_: &Case<Config>) -> Tolerances {
        tolerance::WELL_CONDITIONED
    }

    fn direction_scale(_: &str, values: &ArrayD<f64>) -> f64 {
        // Rows of 1e8 need steps of their own size: the map does not see smaller ones.
        let largest = values.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        if largest > 1e5 { largest } else { draw::typical_magnitude(values) }
    }
}

/// eps sits inside the root, next to the sum of squares.
fn scale_invariance(
    runner: &dyn Runner<L2NormOp>,
    case: &Case<Config>,
    rng: &mut ChaCha8Rng,
) -> std::result::Result<f64, String> {
    let inputs = L2NormOp::draw(case, rng);
    let upstream = Values::new().with("y", draw::normal(rng, inputs.at("x").shape()));
    let run = |config: &Config, inputs: &Values| runner.run(config, inputs, Some(&upstream)).map_err(|e| e.to_string());
    let once = run(&case.config, &inputs)?;
    let doubled = Values::new().with("x", inputs.at("x") * 2.0);
    let twice = run(&Config { eps: 4.0 * case.config.eps }, &doubled)?;
    // Powers of two scale exactly, so the two have the same bits.
    let dx = twice.grads.at("x") * 2.0;
    for comparison in [
        same_bits("y", twice.outputs.at("y").view(), once.outputs.at("y").view()),
        same_bits("dx", dx.view(), once.grads.at("x").view()),
    ] {
        if !comparison.passes() {
            return Err(comparison.to_string());
        }
    }
    Ok(0.0)
}

/// |y|^2 = |x|^2 / (|x|^2 + eps), and x . dx = (y . dy) eps / (|x|^2 + eps): what eps leaves of the radial direction.
fn lengths(
    runner: &dyn Runner<L2NormOp>,
    case: &Case<Config>,
    rng: &mut ChaCha8Rng,
) -> std::result::Result<f64, String> {
    let inputs = L2NormOp::draw(case, rng);
    let upstream = Values::new().with("y", draw::normal(rng, inputs.at("x").shape()));
    let run = runner.run(&case.config, &inputs, Some(&upstream)).map_err(|e| e.to_string())?;
    let (x, dy) = (inputs.at("x"), upstream.at("y"));
    let (y, dx) = (run.outputs.at("y"), run.grads.at("x"));
    // The inner product of a row, and the sum of its terms' magnitudes.
    let dot = |a: ndarray::ArrayViewD<'_, f64>, b: ndarray::ArrayViewD<'_, f64>| {
        Zip::from(&a).and(&b).fold((0.0, 0.0), |(sum, size), a, b| (sum + a * b, size + (a * b).abs()))
    };
    let rows = |a: &ArrayD<f64>| -> Vec<ArrayD<f64>> {
        a.lanes(Axis(3)).into_iter().map(|row| row.to_owned().into_dyn()).collect()
    };
    let mut worst = 0.0f64;
    for (((x, dy), y), dx) in rows(x).iter().zip(&rows(dy)).zip(&rows(y)).zip(&rows(dx)) {
        let (square, _) = dot(x.view(), x.view());
        let eps_share = case.config.eps / (square + case.config.eps);
        let (length, _) = dot(y.view(), y.view());
        let (radial, radial_size) = dot(x.view(), dx.view());
        let (along, along_size) = dot(y.view(), dy.view());
        // Each side is a sum of K products, so it rounds by a few eps of its largest partial sum.
        let allowed = tolerance::FORM.tol;
        worst = worst.max((length - (1.0 - eps_share)).abs() / allowed);
        worst = worst.max((radial - along * eps_share).abs() / (allowed * (radial_size + along_size)).max(1e-300));
    }
    Ok(worst)
}

impl<B: L2Norm> OperationOn<B> for L2NormOp {
    fn run(
        b: &B,
        config: &Config,
        inputs: &Named<B::Tensor>,
        upstream: Option<&Named<B::Tensor>>,
    ) -> Result<Run<B::Tensor>> {
        let op = Self::STEM;
        let x = glue::required(op, Inputs::from_named(glue::find(inputs)))?;
        let (outputs, saved) = L2Norm::forward(b, config, x)?;
        let mut grads = Named::new();
        if let Some(upstream) = upstream {
            let upstream = glue::required(op, Outputs::from_named(glue::find(upstream)))?;
            let returned: l2_norm::Grads<_> = L2Norm::backward(b, config, &saved, upstream)?;
            grads.extend(returned.named().into_iter().map(|(field, t)| (glue::input_of(field), t)));
        }
        Ok(Run { outputs: outputs.named().into_iter().collect(), grads })
    }
}
