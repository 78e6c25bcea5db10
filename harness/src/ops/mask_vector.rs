//! `mask_vector`: description for the harness.

use dormouse_reference::Result;
use dormouse_reference::mask_vector::{self, Config, Inputs, MaskVector, Outputs, Params};
use ndarray::ArrayD;
use proptest::prelude::*;
use rand_chacha::ChaCha8Rng;

use crate::compare::same_bits;
use crate::description::{Case, Gate, Law, Mutant, Operation, OperationOn, Run, TensorSpec, Tolerances, glue};
use crate::draw;
use crate::gates::passed;
use crate::named::{Named, Values};
use crate::runner::Runner;
use crate::tolerance;

/// The description.
pub struct MaskVectorOp;

/// Families of masks: some rows, none, all.
const FAMILIES: [&str; 3] = ["some", "none", "all"];

fn case(batch: usize, tokens: usize, width: usize, family: &'static str) -> Case<Config> {
    Case {
        name: format!("b{batch}-t{tokens}-d{width}-{family}"),
        config: Config {},
        dims: vec![("B", batch), ("T", tokens), ("D", width)],
        family,
        present: vec![],
    }
}

/// A mask of this family.
pub(super) fn draw_mask(family: &str, rng: &mut ChaCha8Rng, shape: &[usize]) -> ArrayD<f64> {
    let share = match family {
        "none" => 0.0,
        "all" => 1.0,
        _ => 0.6,
    };
    draw::uniform(rng, shape, 0.0, 1.0).mapv(|x| f64::from(u8::from(x < share)))
}

impl Operation for MaskVectorOp {
    type Config = Config;

    const STEM: &'static str = "mask_vector";

    fn tensors() -> Vec<TensorSpec> {
        vec![
            TensorSpec::input("x", &["B", "T", "D"]),
            TensorSpec::data("mask", &["B", "T"]),
            TensorSpec::param("vector", &["D"]),
            TensorSpec::output("y", &["B", "T", "D"]),
        ]
    }

    fn cases() -> Vec<Case<Config>> {
        vec![
            case(2, 7, 5, "some"),
            case(3, 4, 16, "some"),
            case(2, 3, 4, "none"),
            case(2, 3, 4, "all"),
            case(1, 1, 1, "all"),
            // More rows than one block of the vector's fixed-order sum.
            case(1, 300, 3, "some"),
            case(0, 4, 6, "some"),
            case(2, 0, 6, "some"),
        ]
    }

    fn production() -> Vec<Case<Config>> {
        vec![case(8, 512, 768, "some")]
    }

    fn strategy() -> BoxedStrategy<Case<Config>> {
        (1..4usize, 1..20usize, 1..40usize, 0..FAMILIES.len())
            .prop_map(|(b, t, d, family)| case(b, t, d, FAMILIES[family]))
            .boxed()
    }

    fn draw(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
        Values::new()
            .with("x", draw::normal(rng, &case.shape(&Self::spec("x"))))
            .with("mask", draw_mask(case.family, rng, &case.shape(&Self::spec("mask"))))
            .with("vector", draw::normal(rng, &[case.dim("D")]))
    }

    fn naive(_: &Config, inputs: &Values, upstream: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
        let is = |name: &str| twist == Some(name);
        let (x, mask, vector) = (inputs.at("x"), inputs.at("mask"), inputs.at("vector"));
        let (batch, tokens, width) = (x.shape()[0], x.shape()[1], x.shape()[2]);
        let mut y = x.clone();
        let mut dx: ArrayD<f64> = ArrayD::zeros(x.raw_dim());
        let mut dvector: ArrayD<f64> = ArrayD::zeros(vector.raw_dim());
        for b in 0..batch {
            for t in 0..tokens {
                let from = if is("mask-of-the-position-before") { t.max(1) - 1 } else { t };
                let masked = (mask[[b, from]] == 1.0) != is("mask-inverted");
                for d in 0..width {
                    if is("multiplied-by-the-mask") {
                        y[[b, t, d]] = mask[[b, t]] * vector[[d]] + (1.0 - mask[[b, t]]) * x[[b, t, d]];
                    } else if masked {
                        y[[b, t, d]] = if is("added-to-the-row") { x[[b, t, d]] + vector[[d]] } else { vector[[d]] };
                    }
                    let Some(upstream) = upstream else { continue };
                    let dy = upstream.at("y")[[b, t, d]];
                    if !masked || is("masked-rows-keep-their-gradient") {
                        dx[[b, t, d]] = dy;
                    }
                    let missed = is("vector-misses-last-sequence") && b + 1 == batch;
                    if (masked && !missed) || is("vector-gets-every-row") {
                        dvector[[d]] += dy;
                    }
                }
            }
        }
        let mut grads = Values::new();
        if upstream.is_some() {
            grads = grads.with("x", dx).with("vector", dvector);
        }
        Run { outputs: Values::new().with("y", y), grads }
    }

    fn laws() -> Vec<Law<Self>> {
        vec![
            Law::Independent("B"),
            Law::Independent("T"),
            Law::Independent("D"),
            Law::Causal("T"),
            Law::Exact { name: "what a masked row holds moves no bit", check: masked_is_unseen },
        ]
    }

    fn mutants() -> Vec<Mutant> {
        [
            ("mask-of-the-position-before", Gate::Meta),
            ("mask-inverted", Gate::Form),
            ("multiplied-by-the-mask", Gate::Meta),
            ("added-to-the-row", Gate::Form),
            ("masked-rows-keep-their-gradient", Gate::Fd),
            ("vector-misses-last-sequence", Gate::Adj),
            ("vector-gets-every-row", Gate::Fd),
        ]
        .map(|(twist, caught_by)| Mutant { twist, caught_by })
        .to_vec()
    }

    fn tolerances(_: &Case<Config>) -> Tolerances {
        tolerance::WELL_CONDITIONED
    }
}

/// Fills every row of `array` whose mask is `value` with NaN.
pub(super) fn poison(array: &mut ArrayD<f64>, mask: &ArrayD<f64>, value: f64) {
    for (mut row, &masked) in array.rows_mut().into_iter().zip(mask) {
        if masked == value {
            row.fill(f64::NAN);
        }
    }
}

fn masked_is_unseen(
    runner: &dyn Runner<MaskVectorOp>,
    case: &Case<Config>,
    rng: &mut ChaCha8Rng,
) -> std::result::Result<f64, String> {
    let mut inputs = MaskVectorOp::draw(case, rng);
    let upstream = Values::new().with("y", draw::normal(rng, &case.shape(&MaskVectorOp::spec("y"))));
    let run = |inputs: &Values| runner.run(&case.config, inputs, Some(&upstream)).map_err(|e| e.to_string());
    let clean = run(&inputs)?;
    let mask = inputs.at("mask").clone();
    poison(inputs.get_mut("x").expect("x is drawn"), &mask, 1.0);
    let poisoned = run(&inputs)?;
    passed(same_bits("y", poisoned.outputs.at("y").view(), clean.outputs.at("y").view()))?;
    for name in ["x", "vector"] {
        passed(same_bits(&format!("d{name}"), poisoned.grads.at(name).view(), clean.grads.at(name).view()))?;
    }
    Ok(0.0)
}

impl<B: MaskVector> OperationOn<B> for MaskVectorOp {
    fn run(
        b: &B,
        config: &Config,
        inputs: &Named<B::Tensor>,
        upstream: Option<&Named<B::Tensor>>,
    ) -> Result<Run<B::Tensor>> {
        let op = Self::STEM;
        let params = glue::required(op, Params::from_named(glue::find(inputs)))?;
        let inputs = glue::required(op, Inputs::from_named(glue::find(inputs)))?;
        let (outputs, saved) = MaskVector::forward(b, config, inputs, params.clone())?;
        let mut grads = Named::new();
        if let Some(upstream) = upstream {
            let into = params.try_map(|_, p| glue::zeros_like(b, p))?;
            let upstream = glue::required(op, Outputs::from_named(glue::find(upstream)))?;
            let returned: mask_vector::Grads<_> = MaskVector::backward(b, config, &saved, upstream, into.as_ref())?;
            grads.extend(returned.named().into_iter().map(|(field, t)| (glue::input_of(field), t)));
            grads.extend(into.named());
        }
        Ok(Run { outputs: outputs.named().into_iter().collect(), grads })
    }
}
