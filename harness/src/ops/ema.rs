//! `ema`: description for the harness.

use std::ops::Range;

use dormouse_reference::Result;
use dormouse_reference::ema::{Config, Ema, Inputs};
use ndarray::{ArrayD, arr1};
use proptest::prelude::*;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use crate::compare::same_bits;
use crate::description::{Case, Gate, Law, Mutant, Operation, OperationOn, Run, TensorSpec, Tolerances, glue};
use crate::draw;
use crate::gates::passed;
use crate::named::{Named, Values, held};
use crate::runner::Runner;
use crate::tolerance;

/// The description.
pub struct EmaOp;

/// Value families: apart; a teacher near its model; magnitudes far apart; a skipped update of a model that is NaN.
const FAMILIES: [&str; 4] = ["apart", "near", "scales", "skipped"];

fn case(len: usize, ranges: &[(usize, usize)], momentum: f64, family: &'static str) -> Case<Config> {
    let names: Vec<String> = ranges.iter().map(|(start, end)| format!("{start}to{end}")).collect();
    Case {
        name: format!("p{len}-{}-mu{momentum}-{family}", names.join("and")),
        config: Config { momentum, ranges: ranges.iter().map(|&(start, end)| start..end).collect() },
        dims: vec![("P", len), ("one", 1)],
        family,
        present: vec![],
    }
}

fn inside(config: &Config, i: usize) -> bool {
    config.ranges.iter().any(|range| range.contains(&i))
}

impl Operation for EmaOp {
    type Config = Config;

    const STEM: &'static str = "ema";

    const NO_GRADIENT: Option<&'static str> = Some("follows the optimiser, which nothing is differentiated through");

    fn tensors() -> Vec<TensorSpec> {
        vec![
            TensorSpec::data("teacher", &["P"]),
            TensorSpec::data("online", &["P"]),
            TensorSpec::data("apply", &["one"]),
            TensorSpec::output("teacher_after", &["P"]),
        ]
    }

    fn cases() -> Vec<Case<Config>> {
        let mut cases: Vec<_> = FAMILIES.iter().map(|family| case(40, &[(22, 38), (3, 17)], 0.9, family)).collect();
        cases.extend([
            case(40, &[(0, 40)], 0.999, "apart"),
            case(7, &[(0, 7)], 0.0, "near"),
            case(7, &[(0, 7)], 1.0, "apart"),
            case(5, &[], 0.5, "apart"),
            case(1, &[(0, 1)], 0.5, "apart"),
            case(0, &[], 0.5, "apart"),
            // More elements than one block, borders of ranges beside the blocks' borders.
            case(40_000, &[(0, 16_385), (16_390, 40_000)], 0.75, "apart"),
        ]);
        cases
    }

    fn production() -> Vec<Case<Config>> {
        vec![case(1_000_003, &[(0, 700_001)], 0.999, "apart")]
    }

    fn strategy() -> BoxedStrategy<Case<Config>> {
        (2..200usize, 0.0..1.0, 0.0..1.0, 0.5..1.0, 0..FAMILIES.len())
            .prop_map(|(len, a, b, momentum, family): (usize, f64, f64, f64, _)| {
                let at = |share: f64| (share * len as f64) as usize;
                let (low, high) = (at(a.min(b)), at(a.max(b)));
                case(len, &[(high, len), (low / 2, low)], momentum, FAMILIES[family])
            })
            .boxed()
    }

    fn draw(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
        let shape = [case.dim("P")];
        let mut teacher = draw::normal(rng, &shape);
        let mut online = draw::normal(rng, &shape);
        match case.family {
            "near" => online = &teacher + 1e-3 * online,
            "scales" => {
                for (t, o) in teacher.iter_mut().zip(&mut online) {
                    *t *= 10f64.powi(rng.random_range(-12..3));
                    *o *= 10f64.powi(rng.random_range(-12..3));
                }
            }
            "skipped" => online.fill(f64::NAN),
            _ => {}
        }
        let apply = if case.family == "skipped" { 0.0 } else { 1.0 };
        // Laws compare results with what is drawn here, so these are numbers that a device holds, too.
        held(&Values::new().with("teacher", teacher).with("online", online).with("apply", arr1(&[apply]).into_dyn()))
    }

    fn naive(config: &Config, inputs: &Values, _: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
        let is = |name: &str| twist == Some(name);
        let (mut teacher, online) = (inputs.at("teacher").clone(), inputs.at("online"));
        let mu = config.momentum;
        let (keep, take) = match twist {
            Some("swapped") => (1.0 - mu, mu),
            Some("sum-not-one") => (mu, 1.001 - mu),
            Some("copies") => (0.0, 1.0),
            Some("teacher-decays") => (mu, 0.0),
            Some("teacher-kept-whole") => (1.0, 1.0 - mu),
            Some("rounded-apart") => (f64::from(mu as f32), f64::from((1.0 - mu) as f32)),
            _ => (mu, 1.0 - mu),
        };
        for i in 0..teacher.len() {
            let idle = inputs.at("apply")[[0]] == 0.0 && !is("apply-ignored");
            let first_only = is("first-range-only") && !config.ranges.first().is_some_and(|r| r.contains(&i));
            if idle || first_only || !(inside(config, i) || is("outside-moves-too")) {
                continue;
            }
            let (t, o) = (teacher[[i]], online[[i]]);
            // Equal values are the one case that a rounded sum of shares would change.
            let fixed = t == o && keep + take == 1.0;
            teacher[[i]] = if fixed { t } else { keep * t + take * o };
        }
        Run { outputs: Values::new().with("teacher_after", teacher), grads: Values::new() }
    }

    fn laws() -> Vec<Law<Self>> {
        vec![
            Law::Exact { name: "a skipped update keeps every bit", check: skipped_keeps_bits },
            Law::Exact { name: "elements outside every range keep every bit", check: outside_keeps_bits },
            Law::Exact { name: "a teacher equal to its model stays equal", check: fixed_point },
            Law::Exact { name: "twice the model and the teacher is twice the result", check: homogeneous },
            Law::Custom { name: "the teacher moves towards the model and not past it", check: between },
            Law::Custom { name: "cutting the ranges in two changes nothing", check: cut_ranges },
        ]
    }

    fn mutants() -> Vec<Mutant> {
        [
            ("swapped", Gate::Form),
            ("sum-not-one", Gate::Meta),
            ("copies", Gate::Form),
            ("teacher-decays", Gate::Meta),
            ("teacher-kept-whole", Gate::Meta),
            ("rounded-apart", Gate::Meta),
            ("apply-ignored", Gate::Meta),
            ("outside-moves-too", Gate::Meta),
            ("first-range-only", Gate::Meta),
        ]
        .map(|(twist, caught_by)| Mutant { twist, caught_by })
        .to_vec()
    }

    fn tolerances(_: &Case<Config>) -> Tolerances {
        tolerance::WELL_CONDITIONED
    }
}

type LawResult = std::result::Result<f64, String>;

fn run(runner: &dyn Runner<EmaOp>, config: &Config, inputs: &Values) -> std::result::Result<ArrayD<f64>, String> {
    runner.run(config, inputs, None).map(|run| run.outputs.at("teacher_after").clone()).map_err(|e| e.to_string())
}

fn skipped_keeps_bits(runner: &dyn Runner<EmaOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = EmaOp::draw(case, rng);
    inputs.get_mut("apply").expect("the flag is drawn").fill(0.0);
    inputs.get_mut("online").expect("the model is drawn").fill(f64::NAN);
    if let Some(t) = inputs.get_mut("teacher").expect("the teacher is drawn").first_mut() {
        *t = -0.0;
    }
    passed(same_bits("teacher", run(runner, &case.config, &inputs)?.view(), inputs.at("teacher").view()))
}

fn outside_keeps_bits(runner: &dyn Runner<EmaOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = EmaOp::draw(case, rng);
    inputs.get_mut("teacher").expect("the teacher is drawn").mapv_inplace(|t| if t < 0.0 { -0.0 } else { t });
    let after = run(runner, &case.config, &inputs)?;
    let outside = |array: &ArrayD<f64>| -> ArrayD<f64> {
        let chosen = array.iter().enumerate().filter(|(i, _)| !inside(&case.config, *i));
        arr1(&chosen.map(|(_, x)| *x).collect::<Vec<_>>()).into_dyn()
    };
    passed(same_bits("teacher", outside(&after).view(), outside(inputs.at("teacher")).view()))
}

fn fixed_point(runner: &dyn Runner<EmaOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = EmaOp::draw(case, rng);
    let same = inputs.at("teacher").clone();
    inputs.set("online", same);
    passed(same_bits("teacher", run(runner, &case.config, &inputs)?.view(), inputs.at("teacher").view()))
}

/// Powers of two are exact.
fn homogeneous(runner: &dyn Runner<EmaOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = EmaOp::draw(case, rng);
    let once = run(runner, &case.config, &inputs)?;
    for name in ["teacher", "online"] {
        *inputs.get_mut(name).expect("both are drawn") *= 2.0;
    }
    passed(same_bits("teacher", run(runner, &case.config, &inputs)?.view(), (2.0 * once).view()))
}

/// The share of the way that every element goes is 1 - momentum, to the rounding of the difference.
fn between(runner: &dyn Runner<EmaOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let inputs = EmaOp::draw(case, rng);
    if case.family == "skipped" {
        return Ok(0.0);
    }
    let after = run(runner, &case.config, &inputs)?;
    let mut worst = 0.0f64;
    for i in (0..after.len()).filter(|i| inside(&case.config, *i)) {
        let (t, o, x) = (inputs.at("teacher")[[i]], inputs.at("online")[[i]], after[[i]]);
        let share = (x - t) - (1.0 - case.config.momentum) * (o - t);
        let error = share.abs() / (4.0 * f64::EPSILON * (t.abs() + o.abs()));
        if error.is_nan() || (x - t) * (o - t) < 0.0 {
            return Err(format!("element {i} goes from {t} to {x}, and the model is at {o}"));
        }
        worst = worst.max(error);
    }
    Ok(worst)
}

fn cut_ranges(runner: &dyn Runner<EmaOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let inputs = EmaOp::draw(case, rng);
    let whole = run(runner, &case.config, &inputs)?;
    let cut = |range: &Range<usize>| {
        let middle = rng.random_range(range.start..=range.end);
        [middle..range.end, range.start..middle]
    };
    let ranges = case.config.ranges.iter().flat_map(cut).collect();
    let cut = run(runner, &Config { ranges, ..case.config.clone() }, &inputs)?;
    passed(same_bits("teacher", cut.view(), whole.view()))
}

impl<B: Ema> OperationOn<B> for EmaOp {
    fn run(b: &B, config: &Config, inputs: &Named<B::Tensor>, _: Option<&Named<B::Tensor>>) -> Result<Run<B::Tensor>> {
        let inputs = glue::required(Self::STEM, Inputs::from_named(glue::find(inputs)))?;
        Ema::update(b, config, inputs.clone())?;
        Ok(Run { outputs: Named::new().with("teacher_after", inputs.teacher.clone()), grads: Named::new() })
    }
}
