//! `cross_entropy`: description for the harness.

use dormouse_reference::Result;
use dormouse_reference::cross_entropy::{self, Config, CrossEntropy, Inputs, Outputs};
use ndarray::{ArrayD, IxDyn};
use proptest::prelude::*;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use crate::compare::{compare, same_bits};
use crate::description::{Case, Gate, Law, Mutant, Operation, OperationOn, Run, TensorSpec, Tolerances, glue};
use crate::draw;
use crate::gates::passed;
use crate::named::{Named, Values};
use crate::runner::Runner;
use crate::tolerance;

/// The description.
pub struct CrossEntropyOp;

/// Value families: ordinary logits; the target ahead by 15, so that 1 - p_t is 1e-6 and less; logits of 1e30 that decide
/// their row; every position masked.
const FAMILIES: [&str; 4] = ["normal", "confident", "huge", "all-masked"];

fn case(
    [batch, tokens, classes]: [usize; 3],
    denominator: Option<usize>,
    family: &'static str,
    mask: bool,
) -> Case<Config> {
    let divided = denominator.map_or(String::new(), |n| format!("-over{n}"));
    let masked = if mask { "-mask" } else { "" };
    Case {
        name: format!("b{batch}-t{tokens}-c{classes}-{family}{divided}{masked}"),
        config: Config { denominator },
        dims: vec![("B", batch), ("T", tokens), ("C", classes)],
        family,
        present: if mask { vec!["mask"] } else { vec![] },
    }
}

impl Operation for CrossEntropyOp {
    type Config = Config;

    const STEM: &'static str = "cross_entropy";

    fn tensors() -> Vec<TensorSpec> {
        vec![
            TensorSpec::input("logits", &["B", "T", "C"]),
            TensorSpec::data("targets", &["B", "T"]),
            TensorSpec::data("mask", &["B", "T"]),
            TensorSpec::output("loss", &["one"]),
            TensorSpec::output("nll", &["B", "T"]),
        ]
    }

    fn cases() -> Vec<Case<Config>> {
        vec![
            case([2, 5, 7], None, "normal", false),
            case([2, 6, 5], None, "normal", true),
            case([2, 4, 3], Some(40), "normal", true),
            case([1, 3, 4], Some(0), "normal", false),
            case([2, 3, 6], None, "confident", false),
            case([2, 6, 5], None, "huge", true),
            // cases.md L2.
            case([2, 3, 4], None, "all-masked", true),
            case([1, 4, 1], None, "normal", false),
            // More positions than one block of the fixed-order sum, and the bytes' 256 classes.
            case([2, 150, 3], None, "normal", true),
            case([1, 2, 256], None, "normal", false),
            case([0, 4, 3], None, "normal", false),
            case([2, 0, 3], Some(5), "normal", true),
        ]
    }

    fn production() -> Vec<Case<Config>> {
        vec![case([8, 512, 256], None, "normal", true)]
    }

    fn strategy() -> BoxedStrategy<Case<Config>> {
        let denominator = prop_oneof![Just(None), (1..60usize).prop_map(Some)];
        ([1..4usize, 1..9usize, 2..20usize], denominator, 0..FAMILIES.len(), any::<bool>())
            .prop_map(|(dims, denominator, family, mask)| {
                let family = FAMILIES[family];
                case(dims, denominator, family, mask || family == "all-masked")
            })
            .boxed()
    }

    fn draw(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
        let mut logits = 2.0 * draw::normal(rng, &case.shape(&Self::spec("logits")));
        let positions = case.shape(&Self::spec("targets"));
        let targets = draw::ids(rng, &positions, case.dim("C"));
        for (n, (mut row, &target)) in logits.rows_mut().into_iter().zip(&targets).enumerate() {
            let target = target as usize;
            match (case.family, n % 3) {
                ("confident", _) => row[target] += 15.0,
                ("huge", 0) => row[target] = 1e30,
                ("huge", 1) => row[(target + 1) % case.dim("C")] = -1e30,
                _ => {}
            }
        }
        let mut values = Values::new().with("logits", logits).with("targets", targets);
        if case.has("mask") {
            let kept = if case.family == "all-masked" { 0.0 } else { 0.7 };
            let mask = draw::uniform(rng, &positions, 0.0, 1.0).mapv(|x| f64::from(u8::from(x < kept)));
            values.set("mask", mask);
        }
        values
    }

    /// No row maximum: everything is relative to the class in question, p_c = 1 / sum_j e^(z_j - z_c).
    fn naive(config: &Config, inputs: &Values, upstream: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
        let is = |name: &str| twist == Some(name);
        let logits = inputs.at("logits");
        let (classes, positions) = logits.shape().split_last().expect("logits have classes");
        let rows = positions.iter().product::<usize>();
        let z: Vec<f64> = logits.iter().map(|z| if is("temperature") { 2.0 * z } else { *z }).collect();
        let targets: Vec<usize> = inputs
            .at("targets")
            .iter()
            .map(|&t| if is("next-class-is-target") { (t as usize + 1) % classes } else { t as usize })
            .collect();
        let kept: Vec<bool> = match inputs.get("mask") {
            Some(mask) => mask.iter().map(|&m| m == 1.0).collect(),
            None => vec![true; rows],
        };
        let n = match config.denominator {
            Some(n) if !is("denominator-ignored") => n,
            _ if is("mean-over-masked-too") => rows,
            _ => kept.iter().filter(|kept| **kept).count(),
        } as f64;
        let share = if n == 0.0 && !is("nothing-kept-divides") { 0.0 } else { 1.0 / n };
        let mut nll = vec![0.0; rows];
        let mut loss = 0.0;
        for r in 0..rows {
            if !kept[r] && !is("mask-dropped-from-loss") {
                continue;
            }
            let target = z[r * classes + targets[r]];
            let mut ahead = f64::NEG_INFINITY;
            for c in 0..*classes {
                if c != targets[r] {
                    ahead = ahead.max(z[r * classes + c] - target);
                }
            }
            // e^500 is far from overflow; beyond it the target's own 1 is nothing beside the leader.
            let pivot = if ahead > 500.0 { ahead } else { 0.0 };
            let mut rest = 0.0;
            for c in 0..*classes {
                if c != targets[r] {
                    rest += (z[r * classes + c] - target - pivot).exp();
                }
            }
            nll[r] = if pivot > 0.0 { pivot + rest.ln() } else { rest.ln_1p() };
            if is("bits-for-nats") {
                nll[r] /= 2f64.ln();
            }
            if !(is("loss-misses-last-position") && r + 1 == rows) {
                loss += nll[r];
            }
        }
        loss *= share;
        let back = |v: Vec<f64>, shape: &[usize]| ArrayD::from_shape_vec(IxDyn(shape), v).expect("same count");
        let outputs = Values::new().with("loss", back(vec![loss], &[1])).with("nll", back(nll, positions));
        let mut grads = Values::new();
        if let Some(upstream) = upstream {
            let dloss = if is("upstream-ignored") { 1.0 } else { upstream.at("loss")[[0]] };
            let share = if is("gradient-without-mean") { 1.0 } else { share };
            let mut dlogits = vec![0.0; rows * classes];
            for r in 0..rows {
                if !kept[r] && !is("mask-dropped-from-gradient") {
                    continue;
                }
                let target = if is("previous-position's-target") { targets[r.max(1) - 1] } else { targets[r] };
                for c in 0..*classes {
                    let mut others = 0.0;
                    for j in 0..*classes {
                        if j != c {
                            others += (z[r * classes + j] - z[r * classes + c]).exp();
                        }
                    }
                    let p = 1.0 / (1.0 + others);
                    // 1 - p without the cancellation.
                    let not_p = if others.is_finite() { others * p } else { 1.0 };
                    let mut slope = if c == target && !is("target-not-subtracted") { -not_p } else { p };
                    if is("gradient-sign") {
                        slope = -slope;
                    }
                    dlogits[r * classes + c] = dloss * share * slope;
                }
            }
            grads.set("logits", back(dlogits, logits.shape()));
        }
        Run { outputs, grads }
    }

    fn laws() -> Vec<Law<Self>> {
        vec![
            Law::Custom { name: "a position on its own has the same loss and gradient", check: positions_are_apart },
            Law::Custom { name: "what a masked position holds moves no bit", check: masked_is_unseen },
            Law::Custom { name: "adding a number to all logits of a row changes nothing", check: shift_invariance },
            Law::Custom { name: "a row's gradient sums to zero", check: gradient_sums_to_zero },
            Law::Custom { name: "renaming the classes renames the gradient", check: class_permutation },
        ]
    }

    fn mutants() -> Vec<Mutant> {
        [
            ("temperature", Gate::Form),
            ("next-class-is-target", Gate::Form),
            ("denominator-ignored", Gate::Form),
            ("mean-over-masked-too", Gate::Form),
            ("nothing-kept-divides", Gate::Form),
            ("mask-dropped-from-loss", Gate::Form),
            ("bits-for-nats", Gate::Form),
            ("loss-misses-last-position", Gate::Form),
            ("upstream-ignored", Gate::Fd),
            ("gradient-without-mean", Gate::Fd),
            ("target-not-subtracted", Gate::Fd),
            ("gradient-sign", Gate::Adj),
            ("previous-position's-target", Gate::Adj),
            ("mask-dropped-from-gradient", Gate::Meta),
        ]
        .map(|(twist, caught_by)| Mutant { twist, caught_by })
        .to_vec()
    }

    fn tolerances(_: &Case<Config>) -> Tolerances {
        tolerance::WELL_CONDITIONED
    }

    fn no_upstream() -> &'static [&'static str] {
        &["nll"]
    }

    fn integers() -> &'static [&'static str] {
        &["targets"]
    }
}

type LawResult = std::result::Result<f64, String>;

/// Inputs of a case and a run with an upstream gradient.
fn start(
    runner: &dyn Runner<CrossEntropyOp>,
    config: &Config,
    case: &Case<Config>,
    rng: &mut ChaCha8Rng,
) -> std::result::Result<(Values, Run<ArrayD<f64>>), String> {
    let inputs = CrossEntropyOp::draw(case, rng);
    let run = run(runner, config, &inputs)?;
    Ok((inputs, run))
}

fn run(
    runner: &dyn Runner<CrossEntropyOp>,
    config: &Config,
    inputs: &Values,
) -> std::result::Result<Run<ArrayD<f64>>, String> {
    let upstream = Values::new().with("loss", ArrayD::from_elem(IxDyn(&[1]), 1.75));
    runner.run(config, inputs, Some(&upstream)).map_err(|e| e.to_string())
}

/// With the denominator given, a position depends on itself alone, bit for bit.
fn positions_are_apart(runner: &dyn Runner<CrossEntropyOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let config = Config { denominator: Some(7) };
    let (inputs, whole) = start(runner, &config, case, rng)?;
    if inputs.at("targets").is_empty() {
        return Ok(0.0);
    }
    let at = [rng.random_range(0..case.dim("B")), rng.random_range(0..case.dim("T"))];
    let position = |array: &ArrayD<f64>| {
        let mut array = array.clone();
        for (axis, &i) in at.iter().enumerate() {
            array.slice_axis_inplace(ndarray::Axis(axis), (i..i + 1).into());
        }
        array
    };
    let one = run(runner, &config, &inputs.map(|_, array| position(array)))?;
    for (name, one, whole) in [
        ("nll", one.outputs.at("nll"), whole.outputs.at("nll")),
        ("dlogits", one.grads.at("logits"), whole.grads.at("logits")),
    ] {
        passed(same_bits(name, one.view(), position(whole).view()))?;
    }
    Ok(0.0)
}

/// Masked rows full of NaN give the same bits, and exactly zero where they are.
fn masked_is_unseen(runner: &dyn Runner<CrossEntropyOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    if !case.has("mask") {
        return Ok(0.0);
    }
    let (mut inputs, clean) = start(runner, &case.config, case, rng)?;
    let mask = inputs.at("mask").clone();
    let logits = inputs.get_mut("logits").expect("logits are drawn");
    for (mut row, &kept) in logits.rows_mut().into_iter().zip(&mask) {
        if kept == 0.0 {
            row.fill(f64::NAN);
        }
    }
    let poisoned = run(runner, &case.config, &inputs)?;
    let dlogits = poisoned.grads.at("logits");
    for comparison in [
        same_bits("loss", poisoned.outputs.at("loss").view(), clean.outputs.at("loss").view()),
        same_bits("nll", poisoned.outputs.at("nll").view(), clean.outputs.at("nll").view()),
        same_bits("dlogits", dlogits.view(), clean.grads.at("logits").view()),
    ] {
        passed(comparison)?;
    }
    let masked = dlogits.rows().into_iter().zip(&mask).filter(|(_, kept)| **kept == 0.0);
    match masked.flat_map(|(row, _)| row.to_vec()).find(|d| *d != 0.0) {
        Some(d) => Err(format!("a masked position has gradient {d:e}")),
        None => Ok(0.0),
    }
}

/// Loss and gradient do not see a shift; whole-number shifts of logits on a grid are exact.
fn shift_invariance(runner: &dyn Runner<CrossEntropyOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = CrossEntropyOp::draw(case, rng);
    let logits = inputs.get_mut("logits").expect("logits are drawn");
    logits.mapv_inplace(|z| if z.abs() < 100.0 { (z * 1024.0).round() / 1024.0 } else { z.signum() * 100.0 });
    let before = run(runner, &case.config, &inputs)?;
    let logits = inputs.get_mut("logits").expect("logits are drawn");
    for (n, mut row) in logits.rows_mut().into_iter().enumerate() {
        row += (n as f64 - 3.0) * 17.0;
    }
    let after = run(runner, &case.config, &inputs)?;
    close(&after, &before, |grad| grad.clone())
}

/// Softmax sums to one and so does its target: the row of differences sums to zero.
fn gradient_sums_to_zero(runner: &dyn Runner<CrossEntropyOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let (_, run) = start(runner, &case.config, case, rng)?;
    let mut worst = 0.0f64;
    for row in run.grads.at("logits").rows() {
        let size: f64 = row.iter().map(|d| d.abs()).sum();
        let over = row.sum().abs() / (size * 1e-14);
        worst = if size == 0.0 { worst } else { worst.max(over) };
        if over.is_nan() && size != 0.0 {
            return Err(format!("a row of dlogits is {row}"));
        }
    }
    Ok(worst)
}

/// Reversing the classes reverses the gradient and keeps the loss.
fn class_permutation(runner: &dyn Runner<CrossEntropyOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let (mut inputs, before) = start(runner, &case.config, case, rng)?;
    let reversed = |array: &ArrayD<f64>| {
        let mut array = array.clone();
        array.invert_axis(ndarray::Axis(2));
        array.as_standard_layout().to_owned()
    };
    let last = (case.dim("C") - 1) as f64;
    let logits = reversed(inputs.at("logits"));
    inputs.set("logits", logits);
    inputs.get_mut("targets").expect("targets are drawn").mapv_inplace(|t| last - t);
    let after = run(runner, &case.config, &inputs)?;
    close(&after, &before, reversed)
}

/// Loss, nll and (after `map`) gradient of two runs within the rounding of another order of operations.
fn close(after: &Run<ArrayD<f64>>, before: &Run<ArrayD<f64>>, map: impl Fn(&ArrayD<f64>) -> ArrayD<f64>) -> LawResult {
    let mut worst = 0.0f64;
    for (name, after, before) in [
        ("loss", after.outputs.at("loss").clone(), before.outputs.at("loss").clone()),
        ("nll", after.outputs.at("nll").clone(), before.outputs.at("nll").clone()),
        ("dlogits", map(after.grads.at("logits")), before.grads.at("logits").clone()),
    ] {
        worst = worst.max(passed(compare(name, after.view(), before.view(), &tolerance::FORM))?);
    }
    Ok(worst)
}

impl<B: CrossEntropy> OperationOn<B> for CrossEntropyOp {
    fn run(
        b: &B,
        config: &Config,
        inputs: &Named<B::Tensor>,
        upstream: Option<&Named<B::Tensor>>,
    ) -> Result<Run<B::Tensor>> {
        let op = Self::STEM;
        let inputs = glue::required(op, Inputs::from_named(glue::find(inputs)))?;
        let (outputs, saved) = CrossEntropy::forward(b, config, inputs)?;
        let mut grads = Named::new();
        if let Some(upstream) = upstream {
            let upstream = glue::required(op, Outputs::from_named(glue::find(upstream)))?;
            let returned: cross_entropy::Grads<_> = CrossEntropy::backward(b, config, &saved, upstream)?;
            grads.extend(returned.named().into_iter().map(|(field, t)| (glue::input_of(field), t)));
        }
        Ok(Run { outputs: outputs.named().into_iter().collect(), grads })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::Zip;

    /// Constant logits make softmax uniform whatever is done to them; the case table must not be made of such inputs.
    #[test]
    fn k1_constant_logits_hide_a_fault_that_every_drawn_case_shows() {
        let upstream = Values::new().with("loss", ArrayD::from_elem(IxDyn(&[1]), 1.0));
        let difference = |inputs: &Values, config: &Config| {
            let [right, wrong] = [None, Some("temperature")]
                .map(|twist| CrossEntropyOp::naive(config, inputs, Some(&upstream), twist).grads.at("logits").clone());
            Zip::from(&right).and(&wrong).fold(0.0f64, |worst, a, b| worst.max((a - b).abs()))
        };
        let mut shown = 0;
        for case in CrossEntropyOp::cases() {
            let mut inputs = CrossEntropyOp::draw(&case, &mut draw::stream(1, &[&case.name]));
            let drawn = difference(&inputs, &case.config);
            inputs.get_mut("logits").unwrap().fill(3.0);
            assert_eq!(difference(&inputs, &case.config), 0.0, "{}", case.name);
            shown += usize::from(drawn > 1e-9);
        }
        // The others are empty, all masked, of one class, or divided by zero.
        assert!(shown >= 7, "only {shown} cases would show the fault");
    }
}
