//! `jepa`: description for the harness.
//!
//! The loss has a kink wherever a prediction meets its target. Drawn predictions keep a distance of a tenth, so that
//! differences are differences; what holds at the kink is a law.

use dormouse_reference::Result;
use dormouse_reference::jepa::{self, Config, Inputs, Jepa, Outputs};
use ndarray::{ArrayD, IxDyn};
use proptest::prelude::*;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use super::mask_vector::{draw_mask, poison};
use crate::compare::same_bits;
use crate::description::{Case, Gate, Law, Mutant, Operation, OperationOn, Run, TensorSpec, Tolerances, glue};
use crate::draw;
use crate::gates::passed;
use crate::named::{Named, Values};
use crate::runner::Runner;
use crate::tolerance;

/// The description.
pub struct JepaOp;

/// Families: some positions masked, none, all; and a teacher with large channels and a constant row.
const FAMILIES: [&str; 4] = ["some", "none", "all", "activations"];

/// How far a drawn prediction stays from its target at least.
const AWAY: f64 = 0.1;

fn case(batch: usize, tokens: usize, width: usize, family: &'static str) -> Case<Config> {
    Case {
        name: format!("b{batch}-t{tokens}-d{width}-{family}"),
        config: Config { eps: 1e-5 },
        dims: vec![("B", batch), ("T", tokens), ("D", width), ("one", 1)],
        family,
        present: vec![],
    }
}

/// Mean 0 and variance 1 in one row.
fn normalised(row: &[f64], eps: f64) -> Vec<f64> {
    let size = row.len() as f64;
    let mean = row.iter().sum::<f64>() / size;
    let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / size;
    row.iter().map(|x| (x - mean) / (variance + eps).sqrt()).collect()
}

impl Operation for JepaOp {
    type Config = Config;

    const STEM: &'static str = "jepa";

    fn tensors() -> Vec<TensorSpec> {
        vec![
            TensorSpec::input("prediction", &["B", "T", "D"]),
            TensorSpec::data("teacher", &["B", "T", "D"]),
            TensorSpec::data("mask", &["B", "T"]),
            TensorSpec::output("loss", &["one"]),
        ]
    }

    fn cases() -> Vec<Case<Config>> {
        vec![
            case(2, 7, 5, "some"),
            case(3, 4, 16, "activations"),
            case(2, 3, 4, "all"),
            // No masked position: zero, and not 0 / 0.
            case(2, 3, 4, "none"),
            case(1, 1, 3, "all"),
            // More masked positions than one block of the fixed-order sum.
            case(1, 300, 3, "some"),
            case(0, 4, 6, "some"),
            case(2, 0, 6, "some"),
        ]
    }

    fn production() -> Vec<Case<Config>> {
        vec![case(8, 512, 768, "some")]
    }

    fn strategy() -> BoxedStrategy<Case<Config>> {
        (1..4usize, 1..20usize, 2..40usize, 0..FAMILIES.len())
            .prop_map(|(b, t, d, family)| case(b, t, d, FAMILIES[family]))
            .boxed()
    }

    fn draw(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
        let shape = case.shape(&Self::spec("teacher"));
        let mut teacher = match case.family {
            "activations" => draw::activation_like(rng, &shape),
            _ => draw::normal(rng, &shape),
        };
        if case.family == "activations"
            && let Some(mut row) = teacher.rows_mut().into_iter().next()
        {
            row.fill(-2.5);
        }
        let mut prediction = teacher.clone();
        for mut row in prediction.rows_mut() {
            let target = normalised(&row.to_vec(), case.config.eps);
            for (x, t) in row.iter_mut().zip(target) {
                let side = if rng.random::<bool>() { 1.0 } else { -1.0 };
                *x = t + side * (AWAY + rng.random_range(0.0..1.5));
            }
        }
        Values::new()
            .with("prediction", prediction)
            .with("teacher", teacher)
            .with("mask", draw_mask(case.family, rng, &case.shape(&Self::spec("mask"))))
    }

    fn naive(config: &Config, inputs: &Values, upstream: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
        let is = |name: &str| twist == Some(name);
        let (prediction, teacher, mask) = (inputs.at("prediction"), inputs.at("teacher"), inputs.at("mask"));
        let (batch, tokens, width) = (teacher.shape()[0], teacher.shape()[1], teacher.shape()[2]);
        let masked = mask.iter().filter(|m| **m == 1.0).count();
        let mut n = if is("mean-over-all-positions") { batch * tokens } else { masked } as f64;
        if !is("sum-over-channels") {
            n *= width as f64;
        }
        let share = if n == 0.0 && !is("nothing-masked-divides") { 0.0 } else { 1.0 / n };
        let dloss = match upstream {
            Some(upstream) if !is("upstream-ignored") => upstream.at("loss")[[0]],
            _ => 1.0,
        };
        let mut loss = 0.0;
        let mut dprediction: ArrayD<f64> = ArrayD::zeros(prediction.raw_dim());
        for b in 0..batch {
            for t in 0..tokens {
                let from = if is("teacher-of-the-position-before") { t.max(1) - 1 } else { t };
                let row: Vec<f64> = (0..width).map(|d| teacher[[b, from, d]]).collect();
                let mut target = normalised(&row, config.eps);
                if is("teacher-not-normalised") {
                    target = row;
                } else if is("teacher-keeps-its-mean") {
                    let size = width as f64;
                    let square = row.iter().map(|x| x * x).sum::<f64>() / size;
                    target = row.iter().map(|x| x / (square + config.eps).sqrt()).collect();
                }
                for d in 0..width {
                    let x = prediction[[b, t, d]] - target[d];
                    let on = mask[[b, t]] == 1.0;
                    if on || is("loss-of-every-position") {
                        loss += if is("squared") { x * x } else { x.abs() };
                    }
                    if on || is("gradient-of-every-position") {
                        let zero = if is("slope-one-at-the-kink") { 1.0 } else { 0.0 };
                        let mut sign = if x == 0.0 { zero } else { x.signum() };
                        if is("sign-flipped") {
                            sign = -sign;
                        }
                        if is("gradient-of-the-square") {
                            sign = 2.0 * x;
                        }
                        let share = if is("gradient-without-mean") { 1.0 } else { share };
                        dprediction[[b, t, d]] = dloss * share * sign;
                    }
                }
            }
        }
        let outputs = Values::new().with("loss", ArrayD::from_elem(IxDyn(&[1]), loss * share));
        let mut grads = Values::new();
        if upstream.is_some() {
            grads.set("prediction", dprediction);
        }
        Run { outputs, grads }
    }

    fn laws() -> Vec<Law<Self>> {
        vec![
            Law::Exact { name: "a prediction that meets its target has no gradient", check: kink },
            Law::Exact { name: "what a position holds that is not masked moves no bit", check: others_are_unseen },
            Law::Exact {
                name: "doubling the teacher doubles nothing but the distance to eps",
                check: scale_invariance,
            },
            Law::Exact { name: "every gradient has one size", check: one_size },
        ]
    }

    fn mutants() -> Vec<Mutant> {
        [
            ("mean-over-all-positions", Gate::Form),
            ("sum-over-channels", Gate::Form),
            ("nothing-masked-divides", Gate::Form),
            ("upstream-ignored", Gate::Fd),
            ("teacher-of-the-position-before", Gate::Form),
            ("teacher-not-normalised", Gate::Form),
            ("teacher-keeps-its-mean", Gate::Form),
            ("loss-of-every-position", Gate::Meta),
            ("gradient-of-every-position", Gate::Meta),
            ("squared", Gate::Fd),
            ("slope-one-at-the-kink", Gate::Meta),
            ("sign-flipped", Gate::Adj),
            ("gradient-of-the-square", Gate::Meta),
            ("gradient-without-mean", Gate::Fd),
        ]
        .map(|(twist, caught_by)| Mutant { twist, caught_by })
        .to_vec()
    }

    fn tolerances(_: &Case<Config>) -> Tolerances {
        tolerance::WELL_CONDITIONED
    }
}

type LawResult = std::result::Result<f64, String>;

fn run(runner: &dyn Runner<JepaOp>, config: &Config, inputs: &Values) -> std::result::Result<Run<ArrayD<f64>>, String> {
    let upstream = Values::new().with("loss", ArrayD::from_elem(IxDyn(&[1]), 1.75));
    runner.run(config, inputs, Some(&upstream)).map_err(|e| e.to_string())
}

/// Constant teachers have the target 0 to the bit; so a prediction of 0 costs nothing and is pulled nowhere.
fn kink(runner: &dyn Runner<JepaOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = JepaOp::draw(case, rng);
    inputs.get_mut("teacher").expect("the teacher is drawn").fill(0.5);
    inputs.get_mut("prediction").expect("the prediction is drawn").fill(0.0);
    let run = run(runner, &case.config, &inputs)?;
    for (name, values) in [("loss", run.outputs.at("loss")), ("dprediction", run.grads.at("prediction"))] {
        if let Some(x) = values.iter().find(|x| **x != 0.0) {
            return Err(format!("`{name}` holds {x:e}, expected 0"));
        }
    }
    Ok(0.0)
}

fn others_are_unseen(runner: &dyn Runner<JepaOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = JepaOp::draw(case, rng);
    let clean = run(runner, &case.config, &inputs)?;
    let mask = inputs.at("mask").clone();
    for name in ["prediction", "teacher"] {
        poison(inputs.get_mut(name).expect("it is drawn"), &mask, 0.0);
    }
    let poisoned = run(runner, &case.config, &inputs)?;
    passed(same_bits("loss", poisoned.outputs.at("loss").view(), clean.outputs.at("loss").view()))?;
    let dprediction = poisoned.grads.at("prediction");
    passed(same_bits("dprediction", dprediction.view(), clean.grads.at("prediction").view()))?;
    let others = dprediction.rows().into_iter().zip(&mask).filter(|(_, masked)| **masked == 0.0);
    match others.flat_map(|(row, _)| row.to_vec()).find(|d| *d != 0.0) {
        Some(d) => Err(format!("a position that is not masked has gradient {d:e}")),
        None => Ok(0.0),
    }
}

fn scale_invariance(runner: &dyn Runner<JepaOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = JepaOp::draw(case, rng);
    let once = run(runner, &case.config, &inputs)?;
    *inputs.get_mut("teacher").expect("the teacher is drawn") *= 2.0;
    let twice = run(runner, &Config { eps: 4.0 * case.config.eps }, &inputs)?;
    passed(same_bits("loss", twice.outputs.at("loss").view(), once.outputs.at("loss").view()))
}

/// Away from the kink every masked element is pulled equally hard, however far it is.
fn one_size(runner: &dyn Runner<JepaOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let run = run(runner, &case.config, &JepaOp::draw(case, rng))?;
    let sizes: Vec<f64> = run.grads.at("prediction").iter().map(|d| d.abs()).filter(|d| *d != 0.0).collect();
    match sizes.iter().find(|size| **size != sizes[0]) {
        Some(size) => Err(format!("a gradient of size {size:e} beside one of {:e}", sizes[0])),
        None => Ok(0.0),
    }
}

impl<B: Jepa> OperationOn<B> for JepaOp {
    fn run(
        b: &B,
        config: &Config,
        inputs: &Named<B::Tensor>,
        upstream: Option<&Named<B::Tensor>>,
    ) -> Result<Run<B::Tensor>> {
        let op = Self::STEM;
        let inputs = glue::required(op, Inputs::from_named(glue::find(inputs)))?;
        let (outputs, saved) = Jepa::forward(b, config, inputs)?;
        let mut grads = Named::new();
        if let Some(upstream) = upstream {
            let upstream = glue::required(op, Outputs::from_named(glue::find(upstream)))?;
            let returned: jepa::Grads<_> = Jepa::backward(b, config, &saved, upstream)?;
            grads.extend(returned.named().into_iter().map(|(field, t)| (glue::input_of(field), t)));
        }
        Ok(Run { outputs: outputs.named().into_iter().collect(), grads })
    }
}
