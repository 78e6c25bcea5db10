//! `adamw`: description for the harness.

use std::ops::Range;

use dormouse_reference::Result;
use dormouse_reference::adamw::{Adamw, Config, Group, Scalars, State};
use ndarray::{ArrayD, arr1};
use proptest::prelude::*;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use crate::compare::same_bits;
use crate::description::{Case, Gate, Law, Mutant, Operation, OperationOn, Run, TensorSpec, Tolerances, glue};
use crate::draw;
use crate::gates::passed;
use crate::named::{Named, Values};
use crate::runner::Runner;
use crate::tolerance;

/// The description.
pub struct AdamwOp;

/// Value families: in the middle of a run; its first update; late, when bias correction has faded; gradients below eps;
/// no gradient at all; a skipped update whose gradients and scale are NaN.
const FAMILIES: [&str; 6] = ["middle", "first", "late", "tiny", "no-gradient", "skipped"];

/// The buffers that change, and what they are called afterwards.
const CHANGED: [(&str, &str); 3] = [("params", "params_after"), ("m", "m_after"), ("v", "v_after")];

fn case(len: usize, groups: &[(Range<usize>, f64)], family: &'static str) -> Case<Config> {
    let names: Vec<String> = groups.iter().map(|(r, decay)| format!("{}to{}decay{decay}", r.start, r.end)).collect();
    let groups = groups.iter().map(|(range, weight_decay)| Group { range: range.clone(), weight_decay: *weight_decay });
    Case {
        name: format!("p{len}-{}-{family}", names.join("-")),
        config: Config { beta1: 0.9, beta2: 0.95, eps: 1e-8, groups: groups.collect() },
        dims: vec![("P", len), ("one", 1)],
        family,
        present: vec![],
    }
}

impl Operation for AdamwOp {
    type Config = Config;

    const STEM: &'static str = "adamw";

    const NO_GRADIENT: Option<&'static str> = Some("part of the optimiser, which nothing is differentiated through");

    fn tensors() -> Vec<TensorSpec> {
        vec![
            TensorSpec::data("params", &["P"]),
            TensorSpec::data("grads", &["P"]),
            TensorSpec::data("m", &["P"]),
            TensorSpec::data("v", &["P"]),
            TensorSpec::data("lr", &["one"]),
            TensorSpec::data("scale", &["one"]),
            TensorSpec::data("apply", &["one"]),
            TensorSpec::data("updates", &["one"]),
            TensorSpec::output("params_after", &["P"]),
            TensorSpec::output("m_after", &["P"]),
            TensorSpec::output("v_after", &["P"]),
        ]
    }

    fn cases() -> Vec<Case<Config>> {
        let mut cases: Vec<_> =
            FAMILIES.iter().map(|family| case(40, &[(22..38, 0.0), (3..17, 0.1)], family)).collect();
        cases.extend([
            case(12, &[(0..12, 0.3)], "middle"),
            case(1, &[(0..1, 0.1)], "first"),
            case(0, &[], "middle"),
            // More elements than one block, borders of groups beside the blocks' borders.
            case(40_000, &[(0..16_385, 0.1), (16_390..40_000, 0.0)], "middle"),
        ]);
        // More groups than a device takes in two launches of 8, with and without elements between.
        let many: Vec<_> = (0..20).map(|i| (11 * i..11 * i + 11 - i % 3, 0.1 * (i % 2) as f64)).collect();
        cases.push(case(225, &many, "middle"));
        cases
    }

    fn production() -> Vec<Case<Config>> {
        vec![case(1_000_003, &[(0..600_001, 0.1), (600_001..1_000_003, 0.0)], "middle")]
    }

    fn strategy() -> BoxedStrategy<Case<Config>> {
        (2..200usize, 0.0..1.0, 0.0..1.0, 0.0..0.5, 0..FAMILIES.len())
            .prop_map(|(len, a, b, decay, family): (usize, f64, f64, f64, _)| {
                let at = |share: f64| (share * len as f64) as usize;
                let (low, high) = (at(a.min(b)), at(a.max(b)));
                case(len, &[(high..len, decay), (low / 2..low, 0.0)], FAMILIES[family])
            })
            .boxed()
    }

    fn draw(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
        let shape = [case.dim("P")];
        let params = draw::normal(rng, &shape);
        let mut grads = draw::normal(rng, &shape);
        let mut m = 0.5 * draw::normal(rng, &shape);
        let mut v = draw::uniform(rng, &shape, 0.1, 1.0);
        let (mut scale, mut apply, mut updates) =
            (rng.random_range(0.2..1.0), 1.0, f64::from(rng.random_range(3..60u32)));
        match case.family {
            "first" => {
                m.fill(0.0);
                v.fill(0.0);
                updates = 1.0;
            }
            "late" => updates = 100_000.0,
            "tiny" => {
                grads *= 1e-9;
                m.fill(0.0);
                v.fill(0.0);
                updates = 2.0;
            }
            "no-gradient" => grads.fill(0.0),
            "skipped" => {
                grads.fill(f64::NAN);
                (scale, apply, updates) = (f64::NAN, 0.0, 0.0);
            }
            _ => {}
        }
        let one = |x: f64| arr1(&[x]).into_dyn();
        // A learning rate of the size of the parameters, so that a wrong update is as visible as a wrong parameter.
        Values::new()
            .with("params", params)
            .with("grads", grads)
            .with("m", m)
            .with("v", v)
            .with("lr", one(rng.random_range(0.2..0.4)))
            .with("scale", one(scale))
            .with("apply", one(apply))
            .with("updates", one(updates))
    }

    fn naive(config: &Config, inputs: &Values, _: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
        let is = |name: &str| twist == Some(name);
        let one = |name: &str| inputs.at(name)[[0]];
        let [mut params, mut m, mut v] = ["params", "m", "v"].map(|name| inputs.at(name).clone());
        let grads = inputs.at("grads");
        let (lr, scale) = (one("lr"), if is("scale-dropped") { 1.0 } else { one("scale") });
        let (beta1, beta2) =
            if is("betas-swapped") { (config.beta2, config.beta1) } else { (config.beta1, config.beta2) };
        let updates = one("updates") as u32 - u32::from(is("one-update-late") && one("updates") > 1.0);
        let bias = |beta: f64| {
            let mut power = 1.0;
            for _ in 0..updates {
                power *= beta;
            }
            1.0 - power
        };
        let (bias1, bias2) = (bias(beta1), bias(beta2));
        let idle = one("apply") == 0.0 && !is("apply-ignored");
        for i in 0..params.len() {
            let group = config.groups.iter().find(|group| group.range.start <= i && i < group.range.end);
            let decay = match (group, config.groups.first()) {
                _ if idle => continue,
                (Some(_), Some(first)) if is("first-group-for-all") => first.weight_decay,
                (Some(group), _) => group.weight_decay,
                (None, _) if is("outside-moves-too") => 0.0,
                (None, _) => continue,
            };
            let p = params[[i]];
            let mut g = scale * grads[[i]];
            if is("decay-through-gradient") {
                g += decay * p;
            }
            let m_before = m[[i]];
            m[[i]] = beta1 * m[[i]] + (1.0 - beta1) * g;
            v[[i]] = beta2 * v[[i]] + (1.0 - beta2) * if is("gradient-not-squared") { g.abs() } else { g * g };
            let first = if is("stale-first-moment") { m_before } else { m[[i]] };
            let first = if is("first-moment-biased") { first } else { first / bias1 };
            let second = if is("second-moment-biased") { v[[i]] } else { v[[i]] / bias2 };
            let step = if is("eps-inside-root") {
                first / (second + config.eps).sqrt()
            } else if is("without-root") {
                first / (second + config.eps)
            } else {
                first / (second.sqrt() + config.eps)
            };
            params[[i]] = p - lr * step;
            if is("ascends") {
                params[[i]] = p + lr * step;
            }
            if is("decay-without-lr") {
                params[[i]] -= decay * p;
            } else if is("decay-after-step") {
                params[[i]] -= lr * decay * params[[i]];
            } else if !is("decay-through-gradient") {
                params[[i]] -= lr * decay * p;
            }
        }
        let outputs = Values::new().with("params_after", params).with("m_after", m).with("v_after", v);
        Run { outputs, grads: Values::new() }
    }

    fn laws() -> Vec<Law<Self>> {
        vec![
            Law::Custom { name: "a skipped update keeps every bit", check: skipped_keeps_bits },
            Law::Custom { name: "elements outside every group keep every bit", check: outside_keeps_bits },
            Law::Custom { name: "groups do not see each other", check: groups_are_apart },
            Law::Custom { name: "elements of a group can change places", check: permutation },
            Law::Custom { name: "the gradient's scale is the scalar's scale", check: scale_is_a_factor },
            Law::Custom { name: "gradients and eps in another unit give the same update", check: unit_invariance },
        ]
    }

    fn mutants() -> Vec<Mutant> {
        [
            ("scale-dropped", Gate::Meta),
            ("betas-swapped", Gate::Form),
            ("one-update-late", Gate::Form),
            ("apply-ignored", Gate::Meta),
            ("first-group-for-all", Gate::Form),
            ("outside-moves-too", Gate::Meta),
            ("decay-through-gradient", Gate::Form),
            ("gradient-not-squared", Gate::Meta),
            ("stale-first-moment", Gate::Form),
            ("first-moment-biased", Gate::Form),
            ("second-moment-biased", Gate::Form),
            ("eps-inside-root", Gate::Meta),
            ("without-root", Gate::Form),
            ("ascends", Gate::Form),
            ("decay-without-lr", Gate::Form),
            ("decay-after-step", Gate::Form),
        ]
        .map(|(twist, caught_by)| Mutant { twist, caught_by })
        .to_vec()
    }

    fn tolerances(_: &Case<Config>) -> Tolerances {
        tolerance::WELL_CONDITIONED
    }

    fn integers() -> &'static [&'static str] {
        &["updates"]
    }
}

type LawResult = std::result::Result<f64, String>;

fn run(runner: &dyn Runner<AdamwOp>, config: &Config, inputs: &Values) -> std::result::Result<Values, String> {
    runner.run(config, inputs, None).map(|run| run.outputs).map_err(|e| e.to_string())
}

/// Compares the changed buffers with `want`, under the names they have as inputs, bit for bit where `chosen`.
fn keep_bits(outputs: &Values, want: &Values, chosen: impl Fn(usize) -> bool) -> LawResult {
    for (before, after) in CHANGED {
        let pick = |array: &ArrayD<f64>| -> ArrayD<f64> {
            let picked: Vec<f64> = array.iter().enumerate().filter(|(i, _)| chosen(*i)).map(|(_, x)| *x).collect();
            arr1(&picked).into_dyn()
        };
        passed(same_bits(after, pick(outputs.at(after)).view(), pick(want.at(before)).view()))?;
    }
    Ok(0.0)
}

/// The changed buffers under the names they have as inputs.
fn renamed(outputs: &Values) -> Values {
    CHANGED.iter().map(|(before, after)| (*before, outputs.at(after).clone())).collect()
}

fn inside(config: &Config, i: usize) -> bool {
    config.groups.iter().any(|group| group.range.contains(&i))
}

fn skipped_keeps_bits(runner: &dyn Runner<AdamwOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = AdamwOp::draw(case, rng);
    inputs.get_mut("apply").expect("the flag is drawn").fill(0.0);
    inputs.get_mut("grads").expect("gradients are drawn").fill(f64::NAN);
    inputs.get_mut("lr").expect("the rate is drawn").fill(f64::NAN);
    if let Some(p) = inputs.get_mut("params").expect("parameters are drawn").first_mut() {
        *p = -0.0;
    }
    let outputs = run(runner, &case.config, &inputs)?;
    keep_bits(&outputs, &inputs, |_| true)
}

fn outside_keeps_bits(runner: &dyn Runner<AdamwOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = AdamwOp::draw(case, rng);
    inputs.get_mut("params").expect("parameters are drawn").mapv_inplace(|p| if p < 0.0 { -0.0 } else { p });
    let outputs = run(runner, &case.config, &inputs)?;
    keep_bits(&outputs, &inputs, |i| !inside(&case.config, i))
}

/// One group at a time, each on what the last one left, is the same as all at once; and so is a group cut in two.
fn groups_are_apart(runner: &dyn Runner<AdamwOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let inputs = AdamwOp::draw(case, rng);
    let whole = renamed(&run(runner, &case.config, &inputs)?);
    let mut left = inputs.clone();
    for group in &case.config.groups {
        let middle = rng.random_range(group.range.start..=group.range.end);
        let part = |range| Group { range, ..group.clone() };
        let groups = vec![part(middle..group.range.end), part(group.range.start..middle)];
        let outputs = run(runner, &Config { groups, ..case.config.clone() }, &left)?;
        left.extend(renamed(&outputs).iter().map(|(name, array)| (name, array.clone())));
    }
    for (name, whole) in whole.iter() {
        passed(same_bits(name, left.at(name).view(), whole.view()))?;
    }
    Ok(0.0)
}

fn permutation(runner: &dyn Runner<AdamwOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let inputs = AdamwOp::draw(case, rng);
    let reversed = |values: &Values| {
        values.map(|name, array| {
            let mut array = array.clone();
            if ["params", "grads", "m", "v"].contains(&name) {
                for group in &case.config.groups {
                    array.as_slice_mut().expect("one axis is contiguous")[group.range.clone()].reverse();
                }
            }
            array
        })
    };
    let there = run(runner, &case.config, &reversed(&inputs))?;
    let back = reversed(&renamed(&run(runner, &case.config, &inputs)?));
    keep_bits(&there, &back, |_| true)
}

fn scale_is_a_factor(runner: &dyn Runner<AdamwOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = AdamwOp::draw(case, rng);
    inputs.get_mut("scale").expect("the scale is drawn").fill(0.125);
    let by_scalar = renamed(&run(runner, &case.config, &inputs)?);
    inputs.get_mut("scale").expect("the scale is drawn").fill(1.0);
    *inputs.get_mut("grads").expect("gradients are drawn") *= 0.125;
    let by_hand = run(runner, &case.config, &inputs)?;
    keep_bits(&by_hand, &by_scalar, |_| true)
}

/// Gradients 1024 times as large, with moments and eps in the same unit, move the parameters by the same bits.
fn unit_invariance(runner: &dyn Runner<AdamwOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    const UNIT: f64 = 1024.0;
    let convert = |values: &mut Values| {
        for (name, factor) in [("grads", UNIT), ("m", UNIT), ("v", UNIT * UNIT)] {
            if let Some(array) = values.get_mut(name) {
                *array *= factor;
            }
        }
    };
    let mut inputs = AdamwOp::draw(case, rng);
    let mut plain = renamed(&run(runner, &case.config, &inputs)?);
    convert(&mut inputs);
    let converted = run(runner, &Config { eps: UNIT * case.config.eps, ..case.config.clone() }, &inputs)?;
    convert(&mut plain);
    keep_bits(&converted, &plain, |_| true)
}

impl<B: Adamw> OperationOn<B> for AdamwOp {
    fn run(b: &B, config: &Config, inputs: &Named<B::Tensor>, _: Option<&Named<B::Tensor>>) -> Result<Run<B::Tensor>> {
        let op = Self::STEM;
        let state = glue::required(op, State::from_named(glue::find(inputs)))?;
        let scalars = glue::required(op, Scalars::from_named(glue::find(inputs)))?;
        Adamw::update(b, config, state.clone(), scalars)?;
        let outputs = [("params_after", state.params), ("m_after", state.m), ("v_after", state.v)];
        Ok(Run { outputs: outputs.into_iter().map(|(name, t)| (name, t.clone())).collect(), grads: Named::new() })
    }
}
