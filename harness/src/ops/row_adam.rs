//! `row_adam`: description for the harness.
//!
//! `order` is a function of `rows`, so the glue computes it and it is no tensor here.

use dormouse_reference::row_adam::{Config, RowAdam, Scalars, State, Touched};
use dormouse_reference::{Result, engram_hash};
use ndarray::{ArrayD, Axis, IxDyn, arr1};
use proptest::prelude::*;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use super::engram::order_of;
use crate::compare::same_bits;
use crate::description::{Case, Gate, Law, Mutant, Operation, OperationOn, Run, TensorSpec, Tolerances, glue};
use crate::draw;
use crate::gates::passed;
use crate::named::{Named, Values, held};
use crate::runner::Runner;
use crate::tolerance;

/// The description.
pub struct RowAdamOp;

/// Value families: in the middle of a run, with counts of all ages; every row's first update; gradients below eps; no
/// gradient at all; one row named by every place; a skipped update whose gradients and scale are NaN.
const FAMILIES: [&str; 6] = ["middle", "first", "tiny", "no-gradient", "one-row", "skipped"];

/// The buffers that change, and what they are called afterwards.
const CHANGED: [(&str, &str); 4] =
    [("table", "table_after"), ("m", "m_after"), ("v", "v_after"), ("counts", "counts_after")];

fn case(rows: usize, width: usize, places: usize, family: &'static str) -> Case<Config> {
    Case {
        name: format!("r{rows}-w{width}-n{places}-{family}"),
        config: Config { beta1: 0.9, beta2: 0.95, eps: 1e-8 },
        dims: vec![("R", rows), ("W", width), ("N", places), ("one", 1)],
        family,
        present: vec![],
    }
}

impl Operation for RowAdamOp {
    type Config = Config;

    const STEM: &'static str = "row_adam";

    const NO_GRADIENT: Option<&'static str> = Some("part of the optimiser, which nothing is differentiated through");

    fn tensors() -> Vec<TensorSpec> {
        vec![
            TensorSpec::data("table", &["R", "W"]),
            TensorSpec::data("grads", &["R", "W"]),
            TensorSpec::data("m", &["R", "W"]),
            TensorSpec::data("v", &["R", "W"]),
            TensorSpec::data("counts", &["R"]),
            TensorSpec::data("rows", &["N"]),
            TensorSpec::data("lr", &["one"]),
            TensorSpec::data("scale", &["one"]),
            TensorSpec::data("apply", &["one"]),
            TensorSpec::output("table_after", &["R", "W"]),
            TensorSpec::output("m_after", &["R", "W"]),
            TensorSpec::output("v_after", &["R", "W"]),
            TensorSpec::output("counts_after", &["R"]),
        ]
    }

    fn cases() -> Vec<Case<Config>> {
        let mut cases: Vec<_> = FAMILIES.iter().map(|family| case(9, 4, 12, family)).collect();
        cases.extend([
            case(300, 32, 120, "middle"),
            case(1, 1, 1, "first"),
            case(5, 3, 0, "middle"),
            // Every row many times.
            case(7, 5, 400, "middle"),
        ]);
        cases
    }

    fn production() -> Vec<Case<Config>> {
        vec![case(98_304, 32, 12_288, "middle")]
    }

    fn strategy() -> BoxedStrategy<Case<Config>> {
        (1..80usize, 1..40usize, 0..60usize, 0..FAMILIES.len())
            .prop_map(|(rows, width, places, family)| case(rows, width, places, FAMILIES[family]))
            .boxed()
    }

    fn draw(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
        let shape = [case.dim("R"), case.dim("W")];
        let mut values = Values::new()
            .with("table", draw::normal(rng, &shape))
            .with("grads", draw::normal(rng, &shape))
            .with("m", 0.5 * draw::normal(rng, &shape))
            .with("v", draw::uniform(rng, &shape, 0.1, 1.0))
            // From rows that never came up to rows that come up always.
            .with("counts", draw::uniform(rng, &shape[..1], 0.0, 11.0).mapv(|x| x.exp().floor() - 1.0))
            .with("rows", draw::ids(rng, &[case.dim("N")], shape[0]));
        let (mut scale, mut apply) = (rng.random_range(0.2..1.0), 1.0);
        let mut fill = |names: &[&str], x: f64| {
            for name in names {
                values.get_mut(name).expect("it is drawn").fill(x);
            }
        };
        match case.family {
            "first" => fill(&["m", "v", "counts"], 0.0),
            "tiny" => fill(&["m", "v"], 0.0),
            "no-gradient" => fill(&["grads"], 0.0),
            "one-row" => fill(&["rows"], f64::from(rng.random_range(0..shape[0] as u32))),
            "skipped" => {
                fill(&["grads"], f64::NAN);
                (scale, apply) = (f64::NAN, 0.0);
            }
            _ => {}
        }
        if case.family == "tiny" {
            *values.get_mut("grads").expect("gradients are drawn") *= 1e-9;
            values.get_mut("counts").expect("counts are drawn").fill(1.0);
        }
        let one = |x: f64| arr1(&[x]).into_dyn();
        // A learning rate of the size of the table, so that a wrong update is as visible as a wrong row.
        values.with("lr", one(rng.random_range(0.2..0.4))).with("scale", one(scale)).with("apply", one(apply))
    }

    fn naive(config: &Config, inputs: &Values, _: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
        let is = |name: &str| twist == Some(name);
        let one = |name: &str| inputs.at(name)[[0]];
        let [mut table, mut m, mut v, mut counts] = ["table", "m", "v", "counts"].map(|name| inputs.at(name).clone());
        let (grads, rows) = (inputs.at("grads"), inputs.at("rows"));
        let (lr, scale) = (one("lr"), if is("scale-dropped") { 1.0 } else { one("scale") });
        let (beta1, beta2) =
            if is("betas-swapped") { (config.beta2, config.beta1) } else { (config.beta1, config.beta2) };
        let (len, width) = (table.shape()[0], table.shape()[1]);
        let idle = one("apply") == 0.0 && !is("apply-ignored");
        for i in 0..len {
            let named = rows.iter().filter(|row| **row == i as f64).count();
            if one("apply") == 0.0 && is("count-advances-when-skipped") && named > 0 {
                counts[[i]] += 1.0;
            }
            if idle {
                continue;
            }
            if named == 0 {
                for d in 0..width {
                    if is("moments-fade-while-waiting") {
                        m[[i, d]] *= beta1;
                        v[[i, d]] *= beta2;
                    }
                    if is("every-row-moves") {
                        table[[i, d]] -= lr * m[[i, d]] / (v[[i, d]].sqrt() + config.eps);
                    }
                }
                continue;
            }
            for _ in 0..if is("once-for-every-place") { named } else { 1 } {
                counts[[i]] += 1.0;
                let most = counts.iter().copied().fold(0.0, f64::max);
                let mut n = if is("one-count-for-all") { most } else { counts[[i]] };
                if is("count-one-late") && n > 1.0 {
                    n -= 1.0;
                }
                let bias = |beta: f64| 1.0 - (n * beta.ln()).exp();
                for d in 0..width {
                    let g = scale * grads[[i, d]];
                    m[[i, d]] = beta1 * m[[i, d]] + (1.0 - beta1) * g;
                    v[[i, d]] =
                        beta2 * v[[i, d]] + (1.0 - beta2) * if is("gradient-not-squared") { g.abs() } else { g * g };
                    let first = if is("first-moment-biased") { m[[i, d]] } else { m[[i, d]] / bias(beta1) };
                    let second = if is("second-moment-biased") { v[[i, d]] } else { v[[i, d]] / bias(beta2) };
                    let step = if is("eps-inside-root") {
                        first / (second + config.eps).sqrt()
                    } else {
                        first / (second.sqrt() + config.eps)
                    };
                    let decay = if is("rows-decay") { 0.1 * table[[i, d]] } else { 0.0 };
                    table[[i, d]] -= if is("ascends") { -lr * step } else { lr * (step + decay) };
                }
            }
        }
        let outputs =
            Values::new().with("table_after", table).with("m_after", m).with("v_after", v).with("counts_after", counts);
        Run { outputs, grads: Values::new() }
    }

    fn laws() -> Vec<Law<Self>> {
        vec![
            Law::Exact { name: "a skipped update keeps every bit", check: skipped_keeps_bits },
            Law::Exact { name: "rows that are not named keep every bit", check: others_keep_bits },
            Law::Exact { name: "how often and in which order a row is named means nothing", check: naming },
            Law::Exact { name: "a table of the named rows alone moves to the same bits", check: compact_table },
            Law::Exact { name: "the gradient's scale is the scalar's scale", check: scale_is_a_factor },
            Law::Custom { name: "gradients and eps in another unit give the same update", check: unit_invariance },
        ]
    }

    fn mutants() -> Vec<Mutant> {
        [
            ("scale-dropped", Gate::Meta),
            ("betas-swapped", Gate::Form),
            ("apply-ignored", Gate::Meta),
            ("count-advances-when-skipped", Gate::Meta),
            ("moments-fade-while-waiting", Gate::Meta),
            ("every-row-moves", Gate::Meta),
            ("once-for-every-place", Gate::Meta),
            ("one-count-for-all", Gate::Form),
            ("count-one-late", Gate::Form),
            ("gradient-not-squared", Gate::Meta),
            ("first-moment-biased", Gate::Form),
            ("second-moment-biased", Gate::Form),
            ("eps-inside-root", Gate::Meta),
            ("rows-decay", Gate::Form),
            ("ascends", Gate::Form),
        ]
        .map(|(twist, caught_by)| Mutant { twist, caught_by })
        .to_vec()
    }

    fn tolerances(_: &Case<Config>) -> Tolerances {
        tolerance::WELL_CONDITIONED
    }

    fn integers() -> &'static [&'static str] {
        &["counts", "rows"]
    }
}

type LawResult = std::result::Result<f64, String>;

fn run(runner: &dyn Runner<RowAdamOp>, config: &Config, inputs: &Values) -> std::result::Result<Values, String> {
    runner.run(config, inputs, None).map(|run| run.outputs).map_err(|e| e.to_string())
}

/// Compares rows of the changed buffers with `want`, under the names they have as inputs, bit for bit.
fn keep_bits(outputs: &Values, want: &Values, rows: &[usize]) -> LawResult {
    for (before, after) in CHANGED {
        let pick = |array: &ArrayD<f64>| array.select(Axis(0), rows);
        passed(same_bits(after, pick(outputs.at(after)).view(), pick(want.at(before)).view()))?;
    }
    Ok(0.0)
}

/// The changed buffers under the names they have as inputs.
fn renamed(outputs: &Values) -> Values {
    CHANGED.iter().map(|(before, after)| (*before, outputs.at(after).clone())).collect()
}

fn all(case: &Case<Config>) -> Vec<usize> {
    (0..case.dim("R")).collect()
}

fn skipped_keeps_bits(runner: &dyn Runner<RowAdamOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = RowAdamOp::draw(case, rng);
    for (name, value) in [("apply", 0.0), ("grads", f64::NAN), ("lr", f64::NAN)] {
        inputs.get_mut(name).expect("it is drawn").fill(value);
    }
    inputs.get_mut("table").expect("the table is drawn")[[0, 0]] = -0.0;
    let outputs = run(runner, &case.config, &inputs)?;
    // A device rounds to its own type, and a skip must not even do that.
    keep_bits(&held(&outputs), &held(&inputs), &all(case))
}

fn others_keep_bits(runner: &dyn Runner<RowAdamOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = RowAdamOp::draw(case, rng);
    let rows = inputs.at("rows").clone();
    let others: Vec<usize> = all(case).into_iter().filter(|&i| rows.iter().all(|row| *row != i as f64)).collect();
    for &i in &others {
        inputs.get_mut("grads").expect("gradients are drawn").index_axis_mut(Axis(0), i).fill(f64::NAN);
        inputs.get_mut("table").expect("the table is drawn")[[i, 0]] = -0.0;
    }
    let outputs = run(runner, &case.config, &inputs)?;
    keep_bits(&held(&outputs), &held(&inputs), &others)
}

/// The same rows backwards and once more give the same bits.
fn naming(runner: &dyn Runner<RowAdamOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = RowAdamOp::draw(case, rng);
    let once = renamed(&run(runner, &case.config, &inputs)?);
    let rows: Vec<f64> = inputs.at("rows").iter().copied().collect();
    inputs.set("rows", rows.iter().rev().chain(&rows).copied().collect::<ndarray::Array1<f64>>().into_dyn());
    let again = run(runner, &case.config, &inputs)?;
    keep_bits(&again, &once, &all(case))
}

/// What happens to a table in host memory: the unique rows of table, gradient and moments, named by rank.
fn compact_table(runner: &dyn Runner<RowAdamOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let inputs = RowAdamOp::draw(case, rng);
    let full = renamed(&run(runner, &case.config, &inputs)?);
    let rows: Vec<u32> = inputs.at("rows").iter().map(|&row| row as u32).collect();
    if rows.is_empty() {
        return Ok(0.0);
    }
    let compact = engram_hash::compact(&rows, &engram_hash::order(&rows));
    let unique: Vec<usize> = compact.unique.iter().map(|&row| row as usize).collect();
    let slots = compact.slots.iter().map(|&slot| f64::from(slot)).collect();
    let small = inputs.map(|name, array| match name {
        "table" | "grads" | "m" | "v" | "counts" => array.select(Axis(0), &unique),
        "rows" => ArrayD::from_shape_vec(IxDyn(&[rows.len()]), Vec::clone(&slots)).expect("a slot for every place"),
        _ => array.clone(),
    });
    let small = run(runner, &case.config, &small)?;
    let want = full.map(|_, array| array.select(Axis(0), &unique));
    keep_bits(&small, &want, &(0..unique.len()).collect::<Vec<_>>())
}

fn scale_is_a_factor(runner: &dyn Runner<RowAdamOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = RowAdamOp::draw(case, rng);
    inputs.get_mut("scale").expect("the scale is drawn").fill(0.125);
    let by_scalar = renamed(&run(runner, &case.config, &inputs)?);
    inputs.get_mut("scale").expect("the scale is drawn").fill(1.0);
    *inputs.get_mut("grads").expect("gradients are drawn") *= 0.125;
    let by_hand = run(runner, &case.config, &inputs)?;
    keep_bits(&by_hand, &by_scalar, &all(case))
}

/// Gradients 1024 times as large, with moments and eps in the same unit, move the rows by the same bits.
fn unit_invariance(runner: &dyn Runner<RowAdamOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    const UNIT: f64 = 1024.0;
    let convert = |values: &mut Values| {
        for (name, factor) in [("grads", UNIT), ("m", UNIT), ("v", UNIT * UNIT)] {
            if let Some(array) = values.get_mut(name) {
                *array *= factor;
            }
        }
    };
    let mut inputs = RowAdamOp::draw(case, rng);
    let mut plain = renamed(&run(runner, &case.config, &inputs)?);
    convert(&mut inputs);
    let converted = run(runner, &Config { eps: UNIT * case.config.eps, ..case.config.clone() }, &inputs)?;
    convert(&mut plain);
    keep_bits(&converted, &plain, &all(case))
}

impl<B: RowAdam> OperationOn<B> for RowAdamOp {
    fn run(b: &B, config: &Config, inputs: &Named<B::Tensor>, _: Option<&Named<B::Tensor>>) -> Result<Run<B::Tensor>> {
        let op = Self::STEM;
        let state = glue::required(op, State::from_named(glue::find(inputs)))?;
        let scalars = glue::required(op, Scalars::from_named(glue::find(inputs)))?;
        let rows = glue::required(op, inputs.get("rows").ok_or("rows"))?;
        let order = order_of(b, rows)?;
        RowAdam::update(b, config, state.clone(), Touched { rows, order: &order }, scalars)?;
        let outputs = CHANGED.iter().map(|(before, after)| {
            let tensor = inputs.get(before).expect("the update found it");
            (*after, tensor.clone())
        });
        Ok(Run { outputs: outputs.collect(), grads: Named::new() })
    }
}
