//! `linear`: description for the harness.
//!
//! `plus`, what other readers of x have sent back, appears as the upstream gradient of an output `plus` that is x
//! itself: then dx = dy W^T + plus is the whole derivative, and `fd` and `adj` cover the sum too.

use dormouse_reference::linear::{self, Config, Inputs, Linear, Outputs, Params};
use dormouse_reference::{Precision, Result};
use ndarray::{Array2, ArrayD, IxDyn, s};
use proptest::prelude::*;
use rand_chacha::ChaCha8Rng;

use crate::compare::{compare, same_bits};
use crate::description::{Case, Gate, Law, Mutant, Operation, OperationOn, Run, TensorSpec, Tolerances, glue};
use crate::draw;
use crate::named::{Named, Values};
use crate::runner::Runner;
use crate::tolerance;

/// The description.
pub struct LinearOp;

/// Value families: ordinary, heavy-tailed with large channels, and one zero and one tiny row.
const FAMILIES: [&str; 3] = ["normal", "activations", "zero-row"];

const CONFIG: Config = Config { precision: Precision::Full };

fn case(
    [batch, tokens, width_in, width_out]: [usize; 4],
    family: &'static str,
    present: &[&'static str],
) -> Case<Config> {
    let marks: String = present.iter().map(|p| format!("-{p}")).collect();
    Case {
        name: format!("b{batch}-t{tokens}-i{width_in}-o{width_out}-{family}{marks}"),
        config: CONFIG,
        dims: vec![("B", batch), ("T", tokens), ("I", width_in), ("O", width_out)],
        family,
        present: present.to_vec(),
    }
}

impl Operation for LinearOp {
    type Config = Config;

    const STEM: &'static str = "linear";

    // One product makes each output and each gradient.
    const PRODUCTS: u32 = 1;

    fn set_precision(config: &mut Config, precision: Precision) {
        config.precision = precision;
    }

    fn tensors() -> Vec<TensorSpec> {
        vec![
            TensorSpec::input("x", &["B", "T", "I"]),
            TensorSpec::param("weight", &["I", "O"]),
            TensorSpec::param("bias", &["O"]),
            TensorSpec::output("y", &["B", "T", "O"]),
            TensorSpec::output("plus", &["B", "T", "I"]),
        ]
    }

    fn cases() -> Vec<Case<Config>> {
        vec![
            case([2, 5, 8, 3], "normal", &["bias", "plus"]),
            case([3, 4, 6, 6], "normal", &["plus"]),
            case([2, 3, 7, 9], "zero-row", &["bias"]),
            case([2, 7, 33, 17], "activations", &["bias", "plus"]),
            case([1, 1, 1, 1], "normal", &["bias"]),
            // A head of one output on a few rows: the narrowest product.
            case([1, 5, 16, 1], "normal", &["bias"]),
            // A contraction longer than one packed block, and more rows than one task.
            case([1, 3, 600, 5], "normal", &["plus"]),
            case([1, 300, 20, 24], "normal", &["bias", "plus"]),
            // A last task with fewer rows than the others: tasks of a quarter of the rows, and of the most that one takes.
            case([1, 150, 24, 20], "normal", &["bias", "plus"]),
            case([1, 1100, 9, 8], "normal", &["bias", "plus"]),
            case([0, 4, 6, 3], "normal", &["bias", "plus"]),
            case([2, 0, 6, 3], "normal", &["bias"]),
        ]
    }

    fn production() -> Vec<Case<Config>> {
        // From 256 on every side, a GPU has the factors of a product in bf16 as bf16 in memory.
        vec![case([1, 256, 264, 256], "activations", &["plus"]), case([8, 512, 768, 768], "activations", &["plus"])]
    }

    fn strategy() -> BoxedStrategy<Case<Config>> {
        (1..4usize, 1..9usize, 1..40usize, 1..40usize, 0..FAMILIES.len(), any::<bool>(), any::<bool>())
            .prop_map(|(b, t, i, o, family, bias, plus)| {
                let present: Vec<_> =
                    [("bias", bias), ("plus", plus)].into_iter().filter(|(_, p)| *p).map(|(name, _)| name).collect();
                case([b, t, i, o], FAMILIES[family], &present)
            })
            .boxed()
    }

    fn draw(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
        let shape = case.shape(&Self::spec("x"));
        let x = match case.family {
            "activations" => draw::activation_like(rng, &shape),
            "zero-row" => draw::with_zero_and_tiny_rows(draw::normal(rng, &shape)),
            _ => draw::normal(rng, &shape),
        };
        let scale = 1.0 / (case.dim("I") as f64).sqrt();
        let weight = scale * draw::normal(rng, &case.shape(&Self::spec("weight")));
        let mut values = Values::new().with("x", x).with("weight", weight);
        if case.has("bias") {
            values.set("bias", 0.5 * draw::normal(rng, &[case.dim("O")]));
        }
        values
    }

    fn naive(_: &Config, inputs: &Values, upstream: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
        let is = |name: &str| twist == Some(name);
        let (x, weight, bias) = (inputs.at("x"), inputs.at("weight"), inputs.get("bias"));
        let (batch, tokens) = (x.shape()[0], x.shape()[1]);
        let (width_in, width_out) = (weight.shape()[0], weight.shape()[1]);
        let mut y = ArrayD::zeros(IxDyn(&[batch, tokens, width_out]));
        for b in 0..batch {
            for t in 0..tokens {
                for o in 0..width_out {
                    let mut sum = bias.filter(|_| !is("forward-without-bias")).map_or(0.0, |bias| bias[[o]]);
                    let last = if is("contraction-one-short") { width_in - 1 } else { width_in };
                    for i in 0..last {
                        let row = if is("row-of-the-first-sequence") { 0 } else { b };
                        sum += x[[row, t, i]] * weight[[i, o]];
                    }
                    y[[b, t, o]] = sum;
                }
            }
        }
        let outputs = Values::new().with("y", y).with("plus", x.clone());
        let mut grads = Values::new();
        if let Some(upstream) = upstream {
            let dy = upstream.at("y");
            let mut dx: ArrayD<f64> = ArrayD::zeros(x.raw_dim());
            let mut dweight: ArrayD<f64> = ArrayD::zeros(weight.raw_dim());
            let mut dbias: ArrayD<f64> = ArrayD::zeros(IxDyn(&[width_out]));
            for b in 0..batch {
                for t in 0..tokens {
                    let last_row = b + 1 == batch && t + 1 == tokens;
                    for i in 0..width_in {
                        if let Some(plus) = upstream.get("plus") {
                            let readers = f64::from(u8::from(!is("plus-dropped")) + u8::from(is("plus-twice")));
                            dx[[b, t, i]] += readers * plus[[b, t, i]];
                        }
                        for o in 0..width_out {
                            if !(is("dx-one-output-short") && o + 1 == width_out) {
                                dx[[b, t, i]] += dy[[b, t, o]] * weight[[i, o]];
                            }
                            if !(is("dweight-misses-last-row") && last_row) {
                                let from = if is("dweight-pairs-with-the-token-before") { t.max(1) - 1 } else { t };
                                dweight[[i, o]] += x[[b, from, i]] * dy[[b, t, o]];
                            }
                        }
                    }
                    for o in 0..width_out {
                        if !(is("dbias-of-the-first-sequence") && b > 0) {
                            dbias[[o]] += dy[[b, t, o]];
                        }
                    }
                }
            }
            grads = grads.with("x", dx).with("weight", dweight);
            if bias.is_some() {
                grads.set("bias", dbias);
            }
        }
        Run { outputs, grads }
    }

    fn laws() -> Vec<Law<Self>> {
        vec![
            Law::Independent("B"),
            Law::Independent("T"),
            Law::Causal("T"),
            Law::Custom { name: "the identity passes rows through", check: identity_weight },
            Law::Custom { name: "plus adds to dx and to nothing else", check: plus_adds },
        ]
    }

    fn mutants() -> Vec<Mutant> {
        [
            ("forward-without-bias", Gate::Form),
            ("contraction-one-short", Gate::Form),
            ("row-of-the-first-sequence", Gate::Meta),
            ("dx-one-output-short", Gate::Fd),
            ("plus-dropped", Gate::Fd),
            ("plus-twice", Gate::Adj),
            ("dweight-misses-last-row", Gate::Adj),
            ("dweight-pairs-with-the-token-before", Gate::Fd),
            ("dbias-of-the-first-sequence", Gate::Adj),
        ]
        .map(|(twist, caught_by)| Mutant { twist, caught_by })
        .to_vec()
    }

    fn tolerances(_: &Case<Config>) -> Tolerances {
        tolerance::WELL_CONDITIONED
    }

    fn optional_upstream() -> &'static [&'static str] {
        &["plus"]
    }
}

/// With ones on the diagonal and no bias, y is x, cut or filled with zeros to its width.
fn identity_weight(
    runner: &dyn Runner<LinearOp>,
    case: &Case<Config>,
    rng: &mut ChaCha8Rng,
) -> std::result::Result<f64, String> {
    let mut inputs = LinearOp::draw(case, rng);
    inputs.remove("bias");
    let (width_in, width_out) = (case.dim("I"), case.dim("O"));
    inputs.set("weight", Array2::from_shape_fn((width_in, width_out), |(i, o)| f64::from(i == o)).into_dyn());
    let y = runner.run(&case.config, &inputs, None).map_err(|e| e.to_string())?.outputs;
    let mut want = ArrayD::zeros(y.at("y").raw_dim());
    let shared = width_in.min(width_out);
    want.slice_mut(s![.., .., ..shared]).assign(&inputs.at("x").slice(s![.., .., ..shared]));
    // A product with one and sums with zero are exact.
    let comparison = same_bits("y", y.at("y").view(), want.view());
    if comparison.passes() { Ok(0.0) } else { Err(comparison.to_string()) }
}

/// dx with `plus` is dx without it plus `plus`; the gradients of the parameters keep their bits.
fn plus_adds(
    runner: &dyn Runner<LinearOp>,
    case: &Case<Config>,
    rng: &mut ChaCha8Rng,
) -> std::result::Result<f64, String> {
    let inputs = LinearOp::draw(case, rng);
    let run = |upstream: &Values| runner.run(&case.config, &inputs, Some(upstream)).map_err(|e| e.to_string());
    let plus = draw::normal(rng, inputs.at("x").shape());
    let mut upstream = Values::new().with("y", draw::normal(rng, &case.shape(&LinearOp::spec("y"))));
    let without = run(&upstream)?.grads;
    upstream.set("plus", plus.clone());
    let with = run(&upstream)?.grads;
    let want = without.at("x") + &plus;
    let dx = compare("dx", with.at("x").view(), want.view(), &tolerance::FORM);
    if !dx.passes() {
        return Err(dx.to_string());
    }
    for name in ["weight", "bias"] {
        if let (Some(with), Some(without)) = (with.get(name), without.get(name)) {
            let comparison = same_bits(name, with.view(), without.view());
            if !comparison.passes() {
                return Err(comparison.to_string());
            }
        }
    }
    Ok(dx.worst)
}

impl<B: Linear> OperationOn<B> for LinearOp {
    fn run(
        b: &B,
        config: &Config,
        inputs: &Named<B::Tensor>,
        upstream: Option<&Named<B::Tensor>>,
    ) -> Result<Run<B::Tensor>> {
        let op = Self::STEM;
        let params = glue::required(op, Params::from_named(glue::find(inputs)))?;
        let Inputs { x } = glue::required(op, Inputs::from_named(glue::find(inputs)))?;
        let (outputs, saved) = Linear::forward(b, config, Inputs { x }, params.clone())?;
        let mut grads = Named::new();
        if let Some(upstream) = upstream {
            let into = params.try_map(|_, p| glue::zeros_like(b, p))?;
            let plus = upstream.get("plus");
            let upstream = glue::required(op, Outputs::from_named(glue::find(upstream)))?;
            let returned: linear::Grads<_> = Linear::backward(b, config, &saved, upstream, plus, into.as_ref())?;
            grads.extend(returned.named().into_iter().map(|(field, t)| (glue::input_of(field), t)));
            grads.extend(into.named());
        }
        let outputs: Named<_> = outputs.named().into_iter().collect();
        Ok(Run { outputs: outputs.with("plus", x.clone()), grads })
    }
}
