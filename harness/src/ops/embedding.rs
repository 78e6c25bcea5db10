//! `embedding`: description for the harness.

use dormouse_reference::Result;
use dormouse_reference::embedding::{Config, Embedding, Inputs, Outputs, Params};
use ndarray::{ArrayD, Axis, IxDyn};
use proptest::prelude::*;
use rand_chacha::ChaCha8Rng;

use crate::compare::{compare, same_bits};
use crate::description::{Case, Gate, Law, Mutant, Operation, OperationOn, Run, TensorSpec, Tolerances, glue};
use crate::draw;
use crate::gates::passed;
use crate::named::{Named, Values};
use crate::runner::Runner;
use crate::tolerance;

/// The description.
pub struct EmbeddingOp;

/// Families of ids: any, one id for every token, and only the first and the last row of the table.
const FAMILIES: [&str; 3] = ["uniform", "one-id", "both-ends"];

fn case(batch: usize, tokens: usize, vocab: usize, width: usize, family: &'static str) -> Case<Config> {
    Case {
        name: format!("b{batch}-t{tokens}-v{vocab}-d{width}-{family}"),
        config: Config {},
        dims: vec![("B", batch), ("T", tokens), ("V", vocab), ("D", width)],
        family,
        present: vec![],
    }
}

impl Operation for EmbeddingOp {
    type Config = Config;

    const STEM: &'static str = "embedding";

    fn tensors() -> Vec<TensorSpec> {
        vec![
            TensorSpec::data("ids", &["B", "T"]),
            TensorSpec::param("table", &["V", "D"]),
            TensorSpec::output("x", &["B", "T", "D"]),
        ]
    }

    fn cases() -> Vec<Case<Config>> {
        vec![
            case(2, 5, 7, 3, "uniform"),
            case(3, 4, 256, 8, "uniform"),
            case(2, 6, 5, 4, "one-id"),
            case(1, 9, 300, 2, "both-ends"),
            case(1, 1, 1, 1, "uniform"),
            case(1, 300, 11, 2, "uniform"),
            case(0, 4, 6, 3, "uniform"),
            case(2, 0, 6, 3, "uniform"),
        ]
    }

    fn production() -> Vec<Case<Config>> {
        vec![case(8, 512, 256, 768, "uniform")]
    }

    fn strategy() -> BoxedStrategy<Case<Config>> {
        (1..4usize, 1..12usize, 1..300usize, 1..20usize, 0..FAMILIES.len())
            .prop_map(|(b, t, v, d, family)| case(b, t, v, d, FAMILIES[family]))
            .boxed()
    }

    fn draw(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
        let (shape, vocab) = (case.shape(&Self::spec("ids")), case.dim("V"));
        let ids = match case.family {
            "one-id" => {
                let id = draw::ids(rng, &[1], vocab)[[0]];
                ArrayD::from_elem(IxDyn(&shape), id)
            }
            "both-ends" => draw::ids(rng, &shape, 2).mapv(|end| end * (vocab - 1) as f64),
            _ => draw::ids(rng, &shape, vocab),
        };
        Values::new().with("ids", ids).with("table", draw::normal(rng, &case.shape(&Self::spec("table"))))
    }

    fn naive(_: &Config, inputs: &Values, upstream: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
        let is = |name: &str| twist == Some(name);
        let (ids, table) = (inputs.at("ids"), inputs.at("table"));
        let (batch, tokens) = (ids.shape()[0], ids.shape()[1]);
        let (vocab, width) = (table.shape()[0], table.shape()[1]);
        let mut x = ArrayD::zeros(IxDyn(&[batch, tokens, width]));
        for b in 0..batch {
            for t in 0..tokens {
                let from = if is("id-of-the-token-before") { t.max(1) - 1 } else { t };
                let id = ids[[b, from]] as usize;
                let row = if is("rows-counted-from-one") { (id + 1) % vocab } else { id };
                for d in 0..width {
                    x[[b, t, d]] = table[[row, d]];
                }
            }
        }
        let mut grads = Values::new();
        if let Some(upstream) = upstream {
            let dx = upstream.at("x");
            let mut dtable: ArrayD<f64> = ArrayD::zeros(table.raw_dim());
            for b in 0..batch {
                for t in 0..tokens {
                    if is("dtable-misses-last-token") && t + 1 == tokens {
                        continue;
                    }
                    let row = ids[[b, t]] as usize;
                    let from = if is("dtable-of-the-first-sequence") { 0 } else { b };
                    for d in 0..width {
                        if is("a-repeated-id-overwrites") {
                            dtable[[row, d]] = dx[[b, t, d]];
                        } else {
                            dtable[[row, d]] += dx[[from, t, d]];
                        }
                    }
                }
            }
            grads.set("table", dtable);
        }
        Run { outputs: Values::new().with("x", x), grads }
    }

    fn laws() -> Vec<Law<Self>> {
        vec![
            Law::Independent("B"),
            Law::Independent("T"),
            Law::Independent("D"),
            Law::Causal("T"),
            Law::Custom { name: "ids are names: another numbering gives the same rows", check: renumbering },
            Law::Custom { name: "the table's gradient has the total of x's", check: total },
        ]
    }

    fn mutants() -> Vec<Mutant> {
        [
            ("id-of-the-token-before", Gate::Meta),
            ("rows-counted-from-one", Gate::Form),
            ("a-repeated-id-overwrites", Gate::Fd),
            ("dtable-misses-last-token", Gate::Meta),
            ("dtable-of-the-first-sequence", Gate::Adj),
        ]
        .map(|(twist, caught_by)| Mutant { twist, caught_by })
        .to_vec()
    }

    fn tolerances(_: &Case<Config>) -> Tolerances {
        tolerance::WELL_CONDITIONED
    }

    fn integers() -> &'static [&'static str] {
        &["ids"]
    }
}

/// Counting ids from the other end, and the table's rows with them, changes neither x nor the gradient's rows.
fn renumbering(
    runner: &dyn Runner<EmbeddingOp>,
    case: &Case<Config>,
    rng: &mut ChaCha8Rng,
) -> std::result::Result<f64, String> {
    let inputs = EmbeddingOp::draw(case, rng);
    let upstream = Values::new().with("x", draw::normal(rng, &case.shape(&EmbeddingOp::spec("x"))));
    let last = (case.dim("V") - 1) as f64;
    let reversed = |table: &ArrayD<f64>| {
        let mut view = table.view();
        view.invert_axis(Axis(0));
        view.to_owned()
    };
    let renamed =
        Values::new().with("ids", inputs.at("ids").mapv(|id| last - id)).with("table", reversed(inputs.at("table")));
    let run = |inputs: &Values| runner.run(&case.config, inputs, Some(&upstream)).map_err(|e| e.to_string());
    let (once, again) = (run(&inputs)?, run(&renamed)?);
    let dtable = reversed(again.grads.at("table"));
    for comparison in [
        same_bits("x", again.outputs.at("x").view(), once.outputs.at("x").view()),
        same_bits("dtable", dtable.view(), once.grads.at("table").view()),
    ] {
        if !comparison.passes() {
            return Err(comparison.to_string());
        }
    }
    Ok(0.0)
}

/// Every row of dx lands in the table exactly once, so the column sums agree.
fn total(
    runner: &dyn Runner<EmbeddingOp>,
    case: &Case<Config>,
    rng: &mut ChaCha8Rng,
) -> std::result::Result<f64, String> {
    let inputs = EmbeddingOp::draw(case, rng);
    // Positive numbers, so that the sums do not cancel and a relative bound is fair.
    let dx = draw::uniform(rng, &case.shape(&EmbeddingOp::spec("x")), 0.5, 1.5);
    let upstream = Values::new().with("x", dx.clone());
    let run = runner.run(&case.config, &inputs, Some(&upstream)).map_err(|e| e.to_string())?;
    let got = run.grads.at("table").sum_axis(Axis(0));
    let want = dx.sum_axis(Axis(0)).sum_axis(Axis(0));
    let comparison = compare("sum of dtable", got.view(), want.view(), &tolerance::FORM);
    passed(comparison)
}

impl<B: Embedding> OperationOn<B> for EmbeddingOp {
    fn run(
        b: &B,
        config: &Config,
        inputs: &Named<B::Tensor>,
        upstream: Option<&Named<B::Tensor>>,
    ) -> Result<Run<B::Tensor>> {
        let op = Self::STEM;
        let params = glue::required(op, Params::from_named(glue::find(inputs)))?;
        let ids = glue::required(op, Inputs::from_named(glue::find(inputs)))?;
        let (outputs, saved) = Embedding::forward(b, config, ids, params.clone())?;
        let mut grads = Named::new();
        if let Some(upstream) = upstream {
            let into = params.try_map(|_, p| glue::zeros_like(b, p))?;
            let upstream = glue::required(op, Outputs::from_named(glue::find(upstream)))?;
            Embedding::backward(b, config, &saved, upstream, into.as_ref())?;
            grads.extend(into.named());
        }
        Ok(Run { outputs: outputs.named().into_iter().collect(), grads })
    }
}
