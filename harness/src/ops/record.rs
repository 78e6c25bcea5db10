//! `record`: description for the harness.

use dormouse_reference::Result;
use dormouse_reference::record::Record;
use ndarray::{ArrayD, Axis, arr1};
use proptest::prelude::*;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use crate::compare::{Tolerance, same_bits};
use crate::description::{Case, Gate, Law, Mutant, Operation, OperationOn, Run, TensorSpec, Tolerances, glue};
use crate::draw;
use crate::gates::passed;
use crate::named::{Named, Values};
use crate::runner::Runner;

/// The description: two real values and an integer one.
pub struct RecordOp;

/// The case's config carries the step, since the operation has none of its own.
#[derive(Clone, Debug)]
pub struct Config {
    step: u32,
}

/// Value families: ordinary, and infinities, which a log must show.
const FAMILIES: [&str; 2] = ["normal", "infinite"];

fn case([rows, first, second, count]: [usize; 4], step: u32, family: &'static str) -> Case<Config> {
    Case {
        name: format!("r{rows}-n{first}-{second}-{count}-step{step}-{family}"),
        config: Config { step },
        dims: vec![
            ("R", rows),
            ("first", first),
            ("second", second),
            ("count", count),
            ("width", first + second + count),
            ("one", 1),
        ],
        family,
        present: vec![],
    }
}

impl Operation for RecordOp {
    type Config = Config;

    const STEM: &'static str = "record";

    const NO_GRADIENT: Option<&'static str> = Some("a log of numbers, which nothing is differentiated through");

    fn tensors() -> Vec<TensorSpec> {
        vec![
            TensorSpec::data("first", &["first"]),
            TensorSpec::data("second", &["second"]),
            TensorSpec::data("count", &["count"]),
            TensorSpec::data("step", &["one"]),
            TensorSpec::data("ring", &["R", "width"]),
            TensorSpec::output("ring_after", &["R", "width"]),
        ]
    }

    fn cases() -> Vec<Case<Config>> {
        vec![
            case([5, 3, 1, 4], 2, "normal"),
            case([5, 3, 1, 4], 5, "normal"),
            case([5, 1, 2, 1], 13, "infinite"),
            // The last row.
            case([6, 2, 1, 2], 11, "normal"),
            case([3, 2, 0, 1], u32::MAX, "normal"),
            case([1, 1, 1, 1], 7, "normal"),
        ]
    }

    fn strategy() -> BoxedStrategy<Case<Config>> {
        ([1..9usize, 0..5usize, 0..5usize, 0..5usize], any::<u32>(), 0..FAMILIES.len())
            .prop_map(|(dims, step, family)| case(dims, step, FAMILIES[family]))
            .boxed()
    }

    fn draw(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
        let mut first = draw::normal(rng, &[case.dim("first")]);
        if let ("infinite", Some(x)) = (case.family, first.iter_mut().next()) {
            *x = f64::NEG_INFINITY;
        }
        Values::new()
            .with("first", first)
            .with("second", draw::normal(rng, &[case.dim("second")]))
            .with("count", draw::ids(rng, &[case.dim("count")], 1 << 24))
            .with("step", arr1(&[f64::from(case.config.step)]).into_dyn())
            .with("ring", draw::normal(rng, &[case.dim("R"), case.dim("width")]))
    }

    fn naive(_: &Config, inputs: &Values, _: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
        let is = |name: &str| twist == Some(name);
        let mut ring = inputs.at("ring").clone();
        let rows = ring.shape()[0];
        let step = inputs.at("step")[[0]] as usize + usize::from(is("step-counts-from-one"));
        let row = if is("stops-at-the-last-row") { step.min(rows - 1) } else { step % rows };
        let order = if is("values-swapped") { ["second", "first", "count"] } else { ["first", "second", "count"] };
        if is("other-rows-cleared") {
            ring.fill(0.0);
        }
        let mut column = 0;
        for name in order {
            for (i, &x) in inputs.at(name).iter().enumerate() {
                let lost = is("integers-dropped") && name == "count"
                    || is("second-misses-its-last") && name == "second" && i == 0;
                ring[[row, column]] = if lost { 0.0 } else { x };
                column += 1;
            }
        }
        Run { outputs: Values::new().with("ring_after", ring), grads: Values::new() }
    }

    fn laws() -> Vec<Law<Self>> {
        vec![
            Law::Custom { name: "NaN is recorded and other rows keep every bit", check: nan_is_recorded },
            Law::Custom { name: "a step R later writes the same row", check: wraps },
        ]
    }

    fn mutants() -> Vec<Mutant> {
        [
            ("step-counts-from-one", Gate::Form),
            ("stops-at-the-last-row", Gate::Form),
            ("values-swapped", Gate::Form),
            ("other-rows-cleared", Gate::Meta),
            ("integers-dropped", Gate::Form),
            ("second-misses-its-last", Gate::Form),
        ]
        .map(|(twist, caught_by)| Mutant { twist, caught_by })
        .to_vec()
    }

    fn tolerances(_: &Case<Config>) -> Tolerances {
        const EXACT: Tolerance = Tolerance::new(0.0, "values are copied");
        Tolerances { fd: EXACT, adj: EXACT, form: EXACT, diff_f32: EXACT }
    }

    fn integers() -> &'static [&'static str] {
        &["count", "step"]
    }
}

type LawResult = std::result::Result<f64, String>;

fn run(
    runner: &dyn Runner<RecordOp>,
    case: &Case<Config>,
    inputs: &Values,
) -> std::result::Result<ArrayD<f64>, String> {
    let run = runner.run(&case.config, inputs, None).map_err(|e| e.to_string())?;
    Ok(run.outputs.at("ring_after").clone())
}

fn nan_is_recorded(runner: &dyn Runner<RecordOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = RecordOp::draw(case, rng);
    inputs.get_mut("first").expect("values are drawn").fill(f64::NAN);
    inputs.get_mut("ring").expect("the ring is drawn").fill(f64::NAN);
    let row = case.config.step as usize % case.dim("R");
    let other = rng.random_range(0..case.dim("R"));
    let ring = inputs.get_mut("ring").expect("the ring is drawn");
    ring.index_axis_mut(Axis(0), other).fill(-0.0);
    let before = ring.clone();
    let after = run(runner, case, &inputs)?;
    for r in (0..case.dim("R")).filter(|r| *r != row) {
        passed(same_bits("another row", after.index_axis(Axis(0), r), before.index_axis(Axis(0), r)))?;
    }
    let written = after.index_axis(Axis(0), row).to_owned();
    match written.iter().take(case.dim("first")).find(|x| !x.is_nan()) {
        Some(x) => Err(format!("a NaN was recorded as {x}")),
        None => Ok(0.0),
    }
}

fn wraps(runner: &dyn Runner<RecordOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = RecordOp::draw(case, rng);
    let now = run(runner, case, &inputs)?;
    let (step, rows) = (case.config.step, case.dim("R") as u32);
    let other = if step >= rows { step - rows } else { step + rows };
    inputs.set("step", arr1(&[f64::from(other)]).into_dyn());
    passed(same_bits("ring_after", run(runner, case, &inputs)?.view(), now.view()))
}

impl<B: Record> OperationOn<B> for RecordOp {
    fn run(b: &B, _: &Config, inputs: &Named<B::Tensor>, _: Option<&Named<B::Tensor>>) -> Result<Run<B::Tensor>> {
        let input = |name| glue::required(Self::STEM, inputs.get(name).ok_or(name));
        let ring = input("ring")?;
        Record::update(b, &[input("first")?, input("second")?, input("count")?], input("step")?, ring)?;
        Ok(Run { outputs: Named::new().with("ring_after", ring.clone()), grads: Named::new() })
    }
}
