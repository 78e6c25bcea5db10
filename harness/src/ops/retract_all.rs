//! `retract_all`: description for the harness.
//!
//! The second form sends every factor of the table through the second form of `retract`, the singular value
//! decomposition; what is under test here besides is the table.

use dormouse_reference::retract::{self, Retract};
use dormouse_reference::retract_all::{Config, Factor, RetractAll};
use dormouse_reference::{Reference, Result, Tensors};
use nalgebra::DMatrix;
use ndarray::{ArrayD, IxDyn, arr1};
use proptest::prelude::*;
use rand_chacha::ChaCha8Rng;

use super::retract::RetractOp;
use crate::compare::{compare, same_bits};
use crate::description::{Case, Gate, Law, Mutant, Operation, OperationOn, Run, TensorSpec, Tolerances, glue};
use crate::draw;
use crate::gates::passed;
use crate::named::{Named, Values, held};
use crate::runner::Runner;

/// The description.
pub struct RetractAllOp;

/// Value families, those of `retract`: a spread of 1.2, as after an optimiser step; of 4, of 10 and of 100; a zero
/// matrix first in each factor; not applied.
const FAMILIES: [&str; 6] = ["step", "spread4", "spread10", "spread100", "zero", "skipped"];

/// Two factors of one class, one of another between them.
const MIXED: [[usize; 3]; 4] = [[2, 12, 5], [1, 7, 7], [1, 12, 5], [3, 6, 1]];

fn case(shapes: &[[usize; 3]], iterations: usize, family: &'static str) -> Case<Config> {
    let mut factors = Vec::new();
    // An element before, between and behind the factors belongs to nobody.
    let mut start = 1;
    for &shape in shapes {
        let factor = Factor { start, shape };
        start = factor.range().end + 1;
        factors.push(factor);
    }
    let names: Vec<String> = shapes.iter().map(|[e, n, k]| format!("{e}x{n}x{k}")).collect();
    Case {
        name: format!("{}-i{iterations}-{family}", names.join("-")),
        dims: vec![("P", start), ("F", factors.len()), ("one", 1)],
        config: Config { iterations, power_iterations: 5, factors },
        family,
        present: vec![],
    }
}

/// One factor of a case as a case of `retract`.
fn alone(case: &Case<Config>, factor: &Factor) -> Case<retract::Config> {
    let Config { iterations, power_iterations, .. } = case.config;
    let [e, n, k] = factor.shape;
    Case {
        name: format!("{}-at{}", case.name, factor.start),
        config: retract::Config { iterations, power_iterations },
        dims: vec![("E", e), ("n", n), ("k", k), ("one", 1)],
        family: case.family,
        present: vec![],
    }
}

fn read(flat: &ArrayD<f64>, factor: &Factor) -> ArrayD<f64> {
    ArrayD::from_shape_fn(IxDyn(&factor.shape), |at| {
        flat[[factor.start + (at[0] * factor.shape[1] + at[1]) * factor.shape[2] + at[2]]]
    })
}

fn write(flat: &mut ArrayD<f64>, factor: &Factor, values: &ArrayD<f64>) {
    for (i, value) in values.iter().enumerate() {
        flat[[factor.start + i]] = *value;
    }
}

impl Operation for RetractAllOp {
    type Config = Config;

    const STEM: &'static str = "retract_all";

    const NO_GRADIENT: Option<&'static str> = Some("part of the optimiser, which nothing is differentiated through");

    fn tensors() -> Vec<TensorSpec> {
        vec![
            TensorSpec::data("params", &["P"]),
            TensorSpec::data("apply", &["one"]),
            TensorSpec::output("params_after", &["P"]),
            TensorSpec::output("spreads", &["F"]),
        ]
    }

    fn cases() -> Vec<Case<Config>> {
        let mut cases: Vec<_> = FAMILIES.iter().map(|family| case(&MIXED, 4, family)).collect();
        cases.extend([
            case(&[[1, 1, 1]], 4, "step"),
            case(&[[0, 4, 2], [1, 4, 2]], 4, "step"),
            case(&[], 4, "step"),
            case(&[[1, 40, 32], [1, 96, 32]], 3, "step"),
            case(&[[1, 40, 32], [1, 96, 32]], 6, "spread10"),
            // More columns than a device has one kernel for, beside fewer.
            case(&[[1, 72, 66], [2, 72, 66], [2, 72, 20], [1, 72, 66]], 5, "step"),
        ]);
        // More factors of one shape than a device takes in two launches of 16, one of them empty.
        let many = [&[[2, 4, 2]][..], &[[1, 4, 2]; 20], &[[0, 4, 2]], &[[1, 4, 2]; 11], &[[3, 4, 2]]].concat();
        cases.push(case(&many, 4, "spread4"));
        cases
    }

    fn production() -> Vec<Case<Config>> {
        vec![case(&[[3, 2048, 64], [3, 768, 64], [1, 768, 64], [1, 256, 64]], 4, "step")]
    }

    fn strategy() -> BoxedStrategy<Case<Config>> {
        let shape = (0..3usize, 1..8usize, 0..9usize).prop_map(|(e, k, more)| [e, k + more, k]);
        (prop::collection::vec(shape, 1..4), 1..7usize, 0..FAMILIES.len())
            .prop_map(|(shapes, iterations, family)| case(&shapes, iterations, FAMILIES[family]))
            .boxed()
    }

    fn draw(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
        let mut params = draw::normal(rng, &[case.dim("P")]);
        for factor in &case.config.factors {
            write(&mut params, factor, RetractOp::draw(&alone(case, factor), rng).at("factor"));
        }
        let apply = if case.family == "skipped" { 0.0 } else { 1.0 };
        Values::new().with("params", params).with("apply", arr1(&[apply]).into_dyn())
    }

    fn naive(config: &Config, inputs: &Values, _: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
        let is = |name: &str| twist == Some(name);
        let mut params = inputs.at("params").clone();
        let each = retract::Config { iterations: config.iterations, power_iterations: config.power_iterations };
        let mut spreads = ArrayD::zeros(IxDyn(&[config.factors.len()]));
        let class_of = |f: usize| {
            let shape = &config.factors[f].shape[1..];
            config.factors.iter().position(|other| other.shape[1..] == *shape).expect("it is in its own class")
        };
        for (f, factor) in config.factors.iter().enumerate() {
            if (is("first-of-a-class-only") && class_of(f) != f) || (is("first-class-only") && class_of(f) != 0) {
                continue;
            }
            let mut factor = factor.clone();
            if is("starts-one-late") && factor.range().end < params.len() {
                factor.start += 1;
            }
            if is("first-matrix-of-a-factor") {
                factor.shape[0] = factor.shape[0].min(1);
            }
            let values = Values::new().with("factor", read(&params, &factor)).with("apply", inputs.at("apply").clone());
            // A twist of one factor's retraction is one here, too; `retract` does not know those of the table.
            let run = RetractOp::naive(&each, &values, None, twist);
            write(&mut params, &factor, run.outputs.at("factor_after"));
            spreads[[f]] = run.outputs.at("spread")[[0]];
        }
        if is("one-spread-for-all") {
            let widest = spreads.iter().copied().fold(0.0, f64::max);
            spreads.fill(widest);
        }
        if is("spreads-by-class") {
            let mut order: Vec<usize> = (0..config.factors.len()).collect();
            order.sort_by_key(|f| class_of(*f));
            let sorted = order.iter().map(|f| spreads[[*f]]).collect::<Vec<_>>();
            spreads = arr1(&sorted).into_dyn();
        }
        let outputs = Values::new().with("params_after", params).with("spreads", spreads);
        Run { outputs, grads: Values::new() }
    }

    fn laws() -> Vec<Law<Self>> {
        vec![
            Law::Exact { name: "a skipped call keeps every bit", check: skipped_keeps_bits },
            Law::Exact { name: "elements outside every factor keep every bit", check: outside_keeps_bits },
            Law::Custom { name: "batched equals single", check: batched_equals_single },
            Law::Custom { name: "factors do not see each other", check: factors_are_apart },
            Law::Custom { name: "columns become orthonormal as documented and keep their span", check: orthonormality },
        ]
    }

    fn mutants() -> Vec<Mutant> {
        [
            ("first-of-a-class-only", Gate::Meta),
            ("first-class-only", Gate::Meta),
            ("first-matrix-of-a-factor", Gate::Meta),
            ("starts-one-late", Gate::Meta),
            ("one-spread-for-all", Gate::Meta),
            ("spreads-by-class", Gate::Meta),
            ("apply-ignored", Gate::Meta),
            ("cubic", Gate::Meta),
            ("one-iteration-more", Gate::Form),
            ("no-margin", Gate::Form),
        ]
        .map(|(twist, caught_by)| Mutant { twist, caught_by })
        .to_vec()
    }

    fn tolerances(case: &Case<Config>) -> Tolerances {
        RetractOp::tolerances(&alone(case, &Factor { start: 0, shape: [1, 1, 1] }))
    }
}

type LawResult = std::result::Result<f64, String>;

fn run(runner: &dyn Runner<RetractAllOp>, config: &Config, inputs: &Values) -> std::result::Result<Values, String> {
    runner.run(config, inputs, None).map(|run| run.outputs).map_err(|e| e.to_string())
}

fn skipped_keeps_bits(runner: &dyn Runner<RetractAllOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = RetractAllOp::draw(case, rng);
    inputs.get_mut("apply").expect("the flag is drawn").fill(0.0);
    inputs.get_mut("params").expect("parameters are drawn")[[0]] = -0.0;
    let inputs = held(&inputs);
    let after = run(runner, &case.config, &inputs)?;
    passed(same_bits("params", after.at("params_after").view(), inputs.at("params").view()))?;
    passed(same_bits("spreads", after.at("spreads").view(), ArrayD::zeros(IxDyn(&[case.dim("F")])).view()))
}

fn outside_keeps_bits(runner: &dyn Runner<RetractAllOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = RetractAllOp::draw(case, rng);
    let outside = |i: &usize| !case.config.factors.iter().any(|factor| factor.range().contains(i));
    let params = inputs.get_mut("params").expect("parameters are drawn");
    (0..params.len()).filter(outside).for_each(|i| params[[i]] = -0.0);
    let after = run(runner, &case.config, &inputs)?;
    let chosen = |flat: &ArrayD<f64>| arr1(&(0..flat.len()).filter(outside).map(|i| flat[[i]]).collect::<Vec<_>>());
    let (after, before) = (chosen(after.at("params_after")).into_dyn(), chosen(inputs.at("params")).into_dyn());
    passed(same_bits("params", after.view(), before.view()))
}

/// Against `retract` of the reference, factor by factor.
fn batched_equals_single(runner: &dyn Runner<RetractAllOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let inputs = RetractAllOp::draw(case, rng);
    let after = run(runner, &case.config, &inputs)?;
    let b = Reference::<f64>::new();
    let apply = b.constant(inputs.at("apply").clone());
    let mut params = inputs.at("params").clone();
    let mut spreads = ArrayD::zeros(IxDyn(&[case.dim("F")]));
    for (f, factor) in case.config.factors.iter().enumerate() {
        let x = b.constant(read(&params, factor));
        let single = Retract::update(&b, &alone(case, factor).config, &x, &apply).map_err(|e| e.to_string())?;
        let download = |tensor| b.download(tensor).map_err(|e| e.to_string());
        write(&mut params, factor, &download(&x)?);
        spreads[[f]] = download(&single.spread)?[[0]];
    }
    let tolerance = RetractAllOp::tolerances(case).form;
    let params = passed(compare("params", after.at("params_after").view(), params.view(), &tolerance))?;
    Ok(params.max(passed(compare("spreads", after.at("spreads").view(), spreads.view(), &tolerance))?))
}

/// One factor at a time, in another order, each on what the last one left, has the bits of all at once.
fn factors_are_apart(runner: &dyn Runner<RetractAllOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let inputs = RetractAllOp::draw(case, rng);
    let whole = run(runner, &case.config, &inputs)?;
    let mut left = inputs.clone();
    for (f, factor) in case.config.factors.iter().enumerate().rev() {
        let config = Config { factors: vec![factor.clone()], ..case.config.clone() };
        let after = run(runner, &config, &left)?;
        left.set("params", after.at("params_after").clone());
        let spread = arr1(&[whole.at("spreads")[[f]]]).into_dyn();
        passed(same_bits("spreads", after.at("spreads").view(), spread.view()))?;
    }
    passed(same_bits("params", left.at("params").view(), whole.at("params_after").view()))
}

/// |R^T R - I|_F / k of the QR decomposition: within the bound where the iterations are documented to be enough, and
/// the span kept, whatever the spread.
fn orthonormality(runner: &dyn Runner<RetractAllOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let inputs = RetractAllOp::draw(case, rng);
    if ["skipped", "zero"].contains(&case.family) {
        return Ok(0.0);
    }
    let after = run(runner, &case.config, &inputs)?;
    let needed = match case.family {
        "step" => 3,
        "spread4" => 4,
        "spread10" => 6,
        _ => usize::MAX,
    };
    let mut worst = 0.0f64;
    for factor in &case.config.factors {
        let [_, n, k] = factor.shape;
        let (before, after) = (read(inputs.at("params"), factor), read(after.at("params_after"), factor));
        for (before, after) in before.outer_iter().zip(after.outer_iter()) {
            let matrix = |x: ndarray::ArrayViewD<'_, f64>| DMatrix::from_row_iterator(n, k, x.iter().copied());
            let (q, after) = (matrix(before).qr().q(), matrix(after));
            let outside = (&after - &q * (q.transpose() * &after)).norm() / after.norm();
            let r = after.qr().r();
            let defect = (r.transpose() * &r - DMatrix::identity(k, k)).norm() / k as f64;
            let bound = 1e-4f64.max(5.2e-4 / (k as f64).sqrt());
            if outside.is_nan() || outside > 1e-11 {
                return Err(format!("the factor at {} leaves its span by {outside:e}", factor.start));
            }
            if case.config.iterations >= needed {
                worst = worst.max(defect / bound);
            }
        }
    }
    Ok(worst)
}

impl<B: RetractAll> OperationOn<B> for RetractAllOp {
    fn run(b: &B, config: &Config, inputs: &Named<B::Tensor>, _: Option<&Named<B::Tensor>>) -> Result<Run<B::Tensor>> {
        let input = |name| glue::required(Self::STEM, inputs.get(name).ok_or(name));
        let params = input("params")?;
        let outputs = RetractAll::update(b, config, params, input("apply")?)?;
        let named = Named::new().with("params_after", params.clone()).with("spreads", outputs.spreads);
        Ok(Run { outputs: named, grads: Named::new() })
    }
}
