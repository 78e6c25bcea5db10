//! `controller`: description for the harness.

use dormouse_reference::controller::{self, Config, Controller, FIXED_GATES, Inputs, Outputs, Params};
use dormouse_reference::{Precision, Result};
use ndarray::{Array2, ArrayD};
use proptest::prelude::*;
use rand_chacha::ChaCha8Rng;

use super::spectral::{rows, shaped};
use crate::compare::Tolerance;
use crate::description::{Case, Gate, Law, Mutant, Operation, OperationOn, Run, TensorSpec, Tolerances, glue};
use crate::draw;
use crate::named::{Named, Values};
use crate::runner::Runner;
use crate::tolerance;

/// The description. `plus_c` and `plus_x0` are outputs that are c and x0 themselves, as in the description of `spectral`:
/// their upstream gradients are the `plus` of backward.
pub struct ControllerOp;

/// Value families: ordinary, heavy-tailed with large channels, and weights so large that most gates are at an end.
const FAMILIES: [&str; 3] = ["normal", "activations", "saturated"];

/// exp makes of raw's absolute rounding a relative one: 6e-8 |raw| sqrt(a few terms), with |raw| up to 50 in the
/// saturated and the activation-like family.
const DIFF_F32_LARGE: Tolerance = Tolerance {
    slope: 2e-5,
    ..Tolerance::new(2e-5, "f32 rounding of raw, 6e-8 times 50 times sqrt(50), is relative after exp")
};

fn case(
    batch: usize,
    tokens: usize,
    width: usize,
    experts: usize,
    family: &'static str,
    present: &[&'static str],
) -> Case<Config> {
    let plus: String = present.iter().map(|name| format!("-{name}")).collect();
    Case {
        name: format!("b{batch}-t{tokens}-d{width}-e{experts}-{family}{plus}"),
        config: Config { precision: Precision::Full, experts },
        dims: vec![("B", batch), ("T", tokens), ("D", width), ("2D", 2 * width), ("3+E", FIXED_GATES + experts)],
        family,
        present: present.to_vec(),
    }
}

impl Operation for ControllerOp {
    type Config = Config;

    const STEM: &'static str = "controller";

    // raw is a product, and a gradient is one more of what the gates make of raw.
    const PRODUCTS: u32 = 2;

    fn set_precision(config: &mut Config, precision: Precision) {
        config.precision = precision;
    }

    fn tensors() -> Vec<TensorSpec> {
        vec![
            TensorSpec::input("c", &["B", "T", "D"]),
            TensorSpec::input("x0", &["B", "T", "D"]),
            TensorSpec::param("weight", &["2D", "3+E"]),
            TensorSpec::output("gates", &["B", "T", "3+E"]),
            TensorSpec::output("plus_c", &["B", "T", "D"]),
            TensorSpec::output("plus_x0", &["B", "T", "D"]),
        ]
    }

    fn cases() -> Vec<Case<Config>> {
        vec![
            case(2, 5, 8, 2, "normal", &["plus_c", "plus_x0"]),
            case(1, 1, 3, 1, "normal", &["plus_c"]),
            case(2, 7, 17, 3, "activations", &["plus_x0"]),
            case(3, 4, 6, 4, "saturated", &["plus_c", "plus_x0"]),
            // More rows than one block of a product.
            case(1, 300, 5, 2, "normal", &[]),
            case(2, 150, 40, 2, "saturated", &["plus_c", "plus_x0"]),
            case(0, 4, 6, 2, "normal", &["plus_c"]),
            case(2, 0, 6, 3, "normal", &["plus_x0"]),
        ]
    }

    fn production() -> Vec<Case<Config>> {
        vec![case(8, 512, 768, 3, "normal", &["plus_c", "plus_x0"])]
    }

    fn strategy() -> BoxedStrategy<Case<Config>> {
        (1..4usize, 1..9usize, 3..24usize, 1..6usize, 0..FAMILIES.len(), 0..4usize)
            .prop_map(|(b, t, d, e, family, plus)| {
                let present = [&[][..], &["plus_c"], &["plus_x0"], &["plus_c", "plus_x0"]][plus];
                case(b, t, d, e, FAMILIES[family], present)
            })
            .boxed()
    }

    fn draw(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
        let shape = case.shape(&Self::spec("c"));
        let mut values = || match case.family {
            // Large channels reach 50 and more, as far as a trained stream has gone.
            "activations" => 0.2 * draw::activation_like(rng, &shape),
            _ => draw::normal(rng, &shape),
        };
        let (c, x0) = (values(), values());
        let scale = if case.family == "saturated" { 8.0 } else { 1.0 };
        let weight = draw::normal(rng, &case.shape(&Self::spec("weight"))) * (scale / (case.dim("2D") as f64).sqrt());
        Values::new().with("c", c).with("x0", x0).with("weight", weight)
    }

    fn naive(config: &Config, inputs: &Values, upstream: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
        let is = |name: &str| twist == Some(name);
        let (c, x0, weight) = (rows(inputs.at("c")), rows(inputs.at("x0")), rows(inputs.at("weight")));
        let (count, width) = c.dim();
        let total = FIXED_GATES + config.experts;
        // The concatenation, which the reference never forms.
        let both = Array2::from_shape_fn((count, 2 * width), |(n, d)| match (d < width, twist) {
            (true, Some("halves-swapped")) => x0[[n, d]],
            (false, Some("halves-swapped")) => c[[n, d - width]],
            (false, Some("embedding-dropped")) => 0.0,
            (true, _) => c[[n, d]],
            (false, _) => x0[[n, d - width]],
        });
        let mut gates = Array2::zeros((count, total));
        let last_fixed = if is("third-gate-in-softmax") { FIXED_GATES - 1 } else { FIXED_GATES };
        for n in 0..count {
            let raw = |j: usize| -> f64 { (0..2 * width).map(|d| both[[n, d]] * weight[[d, j]]).sum() };
            let largest = (FIXED_GATES..total).map(raw).fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = (FIXED_GATES..total).map(|j| (raw(j) - largest).exp()).sum();
            let sum = if is("softmax-not-normalised") { 1.0 } else { sum };
            for j in 0..total {
                gates[[n, j]] =
                    if j < last_fixed { 1.0 / (1.0 + (-raw(j)).exp()) } else { (raw(j) - largest).exp() / sum };
            }
        }
        let mut shape = inputs.at("c").shape().to_vec();
        shape[2] = total;
        let outputs = Values::new()
            .with("gates", shaped(gates.clone(), &shape))
            .with("plus_c", inputs.at("c").clone())
            .with("plus_x0", inputs.at("x0").clone());
        let mut grads = Values::new();
        if let Some(upstream) = upstream {
            let dgates = rows(upstream.at("gates"));
            let mut draw = Array2::zeros((count, total));
            for n in 0..count {
                for j in 0..FIXED_GATES {
                    let slope = if is("sigmoid-slope-dropped") { 1.0 } else { 1.0 - gates[[n, j]] };
                    draw[[n, j]] = dgates[[n, j]] * gates[[n, j]] * slope;
                }
                let mean: f64 = (FIXED_GATES..total).map(|j| gates[[n, j]] * dgates[[n, j]]).sum();
                let mean = if is("softmax-mean-dropped") { 0.0 } else { mean };
                for j in FIXED_GATES..total {
                    draw[[n, j]] = gates[[n, j]] * (dgates[[n, j]] - mean);
                }
            }
            let half = |first: usize| {
                Array2::from_shape_fn((count, width), |(n, d)| {
                    (0..total).map(|j| draw[[n, j]] * weight[[first + d, j]]).sum::<f64>()
                })
            };
            let mut dc = half(0);
            let mut dx0 = half(if is("dx0-from-the-first-half") { 0 } else { width });
            if let Some(plus) = upstream.get("plus_c").filter(|_| !is("plus-c-dropped")) {
                dc += &rows(plus);
            }
            if let Some(plus) = upstream.get("plus_x0") {
                *(if is("plus-x0-into-dc") { &mut dc } else { &mut dx0 }) += &rows(plus);
            }
            let mut dweight = Array2::from_shape_fn((2 * width, total), |(d, j)| {
                let first = usize::from(is("dweight-misses-first-row"));
                (first..count).map(|n| both[[n, d]] * draw[[n, j]]).sum::<f64>()
            });
            if is("dweight-of-embedding-zero") {
                dweight.slice_mut(ndarray::s![width.., ..]).fill(0.0);
            }
            grads = grads
                .with("c", shaped(dc, inputs.at("c").shape()))
                .with("x0", shaped(dx0, inputs.at("x0").shape()))
                .with("weight", dweight.into_dyn());
        }
        Run { outputs, grads }
    }

    fn laws() -> Vec<Law<Self>> {
        vec![
            Law::Independent("B"),
            Law::Independent("T"),
            Law::Causal("T"),
            Law::Custom { name: "shares sum to one, their gradients to zero", check: shares },
        ]
    }

    fn mutants() -> Vec<Mutant> {
        [
            ("halves-swapped", Gate::Form),
            ("embedding-dropped", Gate::Form),
            ("third-gate-in-softmax", Gate::Form),
            ("softmax-not-normalised", Gate::Meta),
            ("sigmoid-slope-dropped", Gate::Fd),
            ("softmax-mean-dropped", Gate::Meta),
            ("dx0-from-the-first-half", Gate::Fd),
            ("plus-c-dropped", Gate::Fd),
            ("plus-x0-into-dc", Gate::Adj),
            ("dweight-misses-first-row", Gate::Adj),
            ("dweight-of-embedding-zero", Gate::Adj),
        ]
        .map(|(twist, caught_by)| Mutant { twist, caught_by })
        .to_vec()
    }

    fn optional_upstream() -> &'static [&'static str] {
        &["plus_c", "plus_x0"]
    }

    // As in `DIFF_F32_LARGE`: exp makes of the absolute error of a large raw a relative one.
    fn amplification(case: &Case<Config>) -> f64 {
        if case.family == "normal" { 1.0 } else { 10.0 }
    }

    fn tolerances(case: &Case<Config>) -> Tolerances {
        match case.family {
            "normal" => tolerance::WELL_CONDITIONED,
            _ => Tolerances { diff_f32: DIFF_F32_LARGE, ..tolerance::WELL_CONDITIONED },
        }
    }
}

/// The experts' shares of every row sum to 1; so their raw gradients sum to 0, and with them the weight's columns.
fn shares(
    runner: &dyn Runner<ControllerOp>,
    case: &Case<Config>,
    rng: &mut ChaCha8Rng,
) -> std::result::Result<f64, String> {
    let inputs = ControllerOp::draw(case, rng);
    let upstream = Values::new().with("gates", draw::normal(rng, &case.shape(&ControllerOp::spec("gates"))));
    let run = runner.run(&case.config, &inputs, Some(&upstream)).map_err(|e| e.to_string())?;
    let mut worst = 0.0f64;
    for row in rows(run.outputs.at("gates")).outer_iter() {
        let sum: f64 = row.iter().skip(FIXED_GATES).sum();
        // E divisions and E additions of numbers up to 1.
        let error = (sum - 1.0).abs() / (2.0 * case.config.experts as f64 * f64::EPSILON);
        worst = worst.max(if error.is_nan() { f64::INFINITY } else { error });
    }
    let dweight = rows(run.grads.at("weight"));
    let largest = dweight.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
    for row in dweight.outer_iter() {
        let sum: f64 = row.iter().skip(FIXED_GATES).sum();
        // Sums over up to a few hundred tokens, each with rounding of the size of its terms.
        let error = if sum == 0.0 { 0.0 } else { sum.abs() / (1e-12 * largest) };
        worst = worst.max(if error.is_nan() { f64::INFINITY } else { error });
    }
    Ok(worst)
}

impl<B: Controller> OperationOn<B> for ControllerOp {
    fn run(
        b: &B,
        config: &Config,
        inputs: &Named<B::Tensor>,
        upstream: Option<&Named<B::Tensor>>,
    ) -> Result<Run<B::Tensor>> {
        let op = Self::STEM;
        let params = glue::required(op, Params::from_named(glue::find(inputs)))?;
        let read = glue::required(op, Inputs::from_named(glue::find(inputs)))?;
        let (plus_c, plus_x0) = (read.c.clone(), read.x0.clone());
        let (outputs, saved) = Controller::forward(b, config, read, params.clone())?;
        let mut grads = Named::new();
        if let Some(upstream) = upstream {
            let into = params.try_map(|_, p| glue::zeros_like(b, p))?;
            let plus = Inputs { c: upstream.get("plus_c"), x0: upstream.get("plus_x0") };
            let upstream = glue::required(op, Outputs::from_named(glue::find(upstream)))?;
            let returned: controller::Grads<_> =
                Controller::backward(b, config, &saved, upstream, plus, into.as_ref())?;
            grads.extend(returned.named().into_iter().map(|(field, t)| (glue::input_of(field), t)));
            grads.extend(into.named());
        }
        let outputs: Named<_> = outputs.named().into_iter().collect();
        Ok(Run { outputs: outputs.with("plus_c", plus_c).with("plus_x0", plus_x0), grads })
    }
}
