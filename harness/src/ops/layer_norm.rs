//! `layer_norm`: description for the harness.
//!
//! `plus`, what other readers of x have sent back, appears as the upstream gradient of an output `plus` that is x itself, as
//! in `linear`.

use dormouse_reference::Result;
use dormouse_reference::layer_norm::{self, Config, Inputs, LayerNorm, Outputs, Params};
use ndarray::ArrayD;
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
pub struct LayerNormOp;

/// Value families: ordinary; heavy-tailed with large channels; a zero and a tiny row; a constant row and a mean that is three
/// deviations away.
const FAMILIES: [&str; 4] = ["normal", "activations", "zero-row", "far-mean"];

fn case([batch, tokens, width]: [usize; 3], eps: f64, family: &'static str, present: &[&'static str]) -> Case<Config> {
    let options: String = present.iter().filter(|name| **name != "bias").map(|name| format!("-{name}")).collect();
    Case {
        name: format!("b{batch}-t{tokens}-d{width}-eps{eps:e}-{family}{options}"),
        config: Config { eps },
        dims: vec![("B", batch), ("T", tokens), ("D", width)],
        family,
        present: present.to_vec(),
    }
}

impl Operation for LayerNormOp {
    type Config = Config;

    const STEM: &'static str = "layer_norm";

    fn tensors() -> Vec<TensorSpec> {
        vec![
            TensorSpec::input("x", &["B", "T", "D"]),
            TensorSpec::param("gain", &["D"]),
            TensorSpec::param("bias", &["D"]),
            TensorSpec::output("y", &["B", "T", "D"]),
            TensorSpec::output("plus", &["B", "T", "D"]),
        ]
    }

    fn cases() -> Vec<Case<Config>> {
        let all = ["gain", "bias", "plus"];
        vec![
            case([2, 5, 8], 1e-5, "normal", &all),
            case([1, 3, 16], 1e-5, "normal", &["plus"]),
            case([2, 7, 33], 1e-5, "activations", &["gain", "bias"]),
            case([3, 4, 6], 1e-3, "zero-row", &["gain", "bias"]),
            case([2, 3, 12], 1e-5, "far-mean", &all),
            // With two channels dx is eps / (variance + eps) of its terms; eps = 1 keeps that a number.
            case([2, 3, 2], 1.0, "normal", &["gain", "bias"]),
            // One channel is its own mean.
            case([1, 2, 1], 1e-5, "normal", &["gain", "bias"]),
            // More rows than one block of the parameter gradients' fixed-order sum.
            case([1, 300, 5], 1e-3, "normal", &all),
            case([0, 4, 6], 1e-5, "normal", &["gain", "bias"]),
            case([2, 0, 6], 1e-5, "normal", &all),
        ]
    }

    fn production() -> Vec<Case<Config>> {
        vec![case([8, 512, 768], 1e-5, "normal", &["gain", "bias", "plus"])]
    }

    fn strategy() -> BoxedStrategy<Case<Config>> {
        let dims = [1..4usize, 1..9usize, 4..40usize];
        (dims, prop_oneof![Just(1e-3), Just(1e-5)], 0..FAMILIES.len(), any::<bool>(), any::<bool>())
            .prop_map(|(dims, eps, family, affine, plus)| {
                let present: &[&str] = match (affine, plus) {
                    (true, true) => &["gain", "bias", "plus"],
                    (true, false) => &["gain", "bias"],
                    (false, true) => &["plus"],
                    (false, false) => &[],
                };
                case(dims, eps, FAMILIES[family], present)
            })
            .boxed()
    }

    fn draw(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
        let shape = case.shape(&Self::spec("x"));
        let mut x = match case.family {
            "activations" => draw::activation_like(rng, &shape),
            "zero-row" => draw::with_zero_and_tiny_rows(draw::normal(rng, &shape)),
            "far-mean" => 3.0 + draw::normal(rng, &shape),
            _ => draw::normal(rng, &shape),
        };
        if case.family == "far-mean"
            && let Some(mut row) = x.rows_mut().into_iter().next()
        {
            row.fill(1.5);
        }
        let width = [case.dim("D")];
        let mut values = Values::new().with("x", x);
        if case.has("gain") {
            values.set("gain", 1.0 + 0.3 * draw::normal(rng, &width));
            values.set("bias", 0.5 * draw::normal(rng, &width));
        }
        values
    }

    fn naive(config: &Config, inputs: &Values, upstream: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
        let is = |name: &str| twist == Some(name);
        let x = inputs.at("x");
        let (gain, bias) = (inputs.get("gain"), inputs.get("bias"));
        let (batch, tokens, width) = (x.shape()[0], x.shape()[1], x.shape()[2]);
        let size = width as f64;
        let mut y = x.clone();
        let mut dx: ArrayD<f64> = ArrayD::zeros(x.raw_dim());
        let [mut dgain, mut dbias] = [0; 2].map(|_| vec![0.0; width]);
        for b in 0..batch {
            for t in 0..tokens {
                let at = |d: usize| x[[b, t, d]];
                let mut mean = 0.0;
                for d in 0..width {
                    mean += at(d);
                }
                // Divided once, so that a constant row is its own mean to the bit.
                mean /= size;
                if is("mean-dropped") {
                    mean = 0.0;
                }
                let mut variance = 0.0;
                for d in 0..width {
                    variance += (at(d) - mean).powi(2) / if is("variance-over-d-less-one") { size - 1.0 } else { size };
                }
                let deviation =
                    if is("eps-outside-root") { variance.sqrt() + config.eps } else { (variance + config.eps).sqrt() };
                let n = |d: usize| (at(d) - mean) / deviation;
                for d in 0..width {
                    let gain = gain.filter(|_| !is("gain-dropped")).map_or(1.0, |gain| gain[[d]]);
                    let bias = bias.filter(|_| !is("bias-dropped")).map_or(0.0, |bias| bias[[d]]);
                    y[[b, t, d]] = n(d) * gain + bias;
                }
                let Some(upstream) = upstream else { continue };
                let dy = |d: usize| upstream.at("y")[[b, t, d]];
                let h = |d: usize| dy(d) * gain.filter(|_| !is("h-without-gain")).map_or(1.0, |gain| gain[[d]]);
                let (mut mean_h, mut along) = (0.0, 0.0);
                for d in 0..width {
                    mean_h += h(d) / size;
                    along += h(d) * n(d) / size;
                    dgain[d] += dy(d) * if is("dgain-of-the-raw-row") { at(d) } else { n(d) };
                    if !(is("dbias-misses-last-position") && t + 1 == tokens) {
                        dbias[d] += dy(d);
                    }
                }
                if is("mean-is-constant") {
                    mean_h = 0.0;
                }
                if is("deviation-is-constant") {
                    along = 0.0;
                }
                for d in 0..width {
                    dx[[b, t, d]] = (h(d) - mean_h - n(d) * along) / deviation;
                    if let Some(plus) = upstream.get("plus") {
                        let readers = f64::from(u8::from(!is("plus-dropped")) + u8::from(is("plus-twice")));
                        dx[[b, t, d]] += readers * plus[[b, t, d]];
                    }
                }
            }
        }
        let mut grads = Values::new();
        if upstream.is_some() {
            grads.set("x", dx);
            if gain.is_some() {
                grads.set("gain", ndarray::Array1::from(dgain).into_dyn());
                grads.set("bias", ndarray::Array1::from(dbias).into_dyn());
            }
        }
        Run { outputs: Values::new().with("y", y).with("plus", x.clone()), grads }
    }

    fn laws() -> Vec<Law<Self>> {
        vec![
            Law::Independent("B"),
            Law::Independent("T"),
            Law::Causal("T"),
            Law::Exact { name: "doubling x doubles nothing but the distance to eps", check: scale_invariance },
            Law::Custom { name: "adding a number to a row changes nothing", check: shift_invariance },
        ]
    }

    fn mutants() -> Vec<Mutant> {
        [
            ("mean-dropped", Gate::Meta),
            ("variance-over-d-less-one", Gate::Form),
            ("eps-outside-root", Gate::Meta),
            ("gain-dropped", Gate::Fd),
            ("bias-dropped", Gate::Form),
            ("h-without-gain", Gate::Fd),
            ("mean-is-constant", Gate::Fd),
            ("deviation-is-constant", Gate::Adj),
            ("dgain-of-the-raw-row", Gate::Fd),
            ("dbias-misses-last-position", Gate::Adj),
            ("plus-dropped", Gate::Fd),
            ("plus-twice", Gate::Adj),
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

type LawResult = std::result::Result<f64, String>;

/// With eps scaled by 4, rows scaled by 2 give the same y, bit for bit: eps sits inside the root.
fn scale_invariance(runner: &dyn Runner<LayerNormOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = LayerNormOp::draw(case, rng);
    let run = |config: &Config, inputs: &Values| runner.run(config, inputs, None).map_err(|e| e.to_string());
    let once = run(&case.config, &inputs)?;
    *inputs.get_mut("x").expect("x is drawn") *= 2.0;
    let twice = run(&Config { eps: 4.0 * case.config.eps }, &inputs)?;
    passed(same_bits("y", twice.outputs.at("y").view(), once.outputs.at("y").view()))
}

/// Rows on a grid, shifted by whole numbers: the shift itself is exact, and y moves by rounding alone.
fn shift_invariance(runner: &dyn Runner<LayerNormOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = LayerNormOp::draw(case, rng);
    let shape = inputs.at("x").shape().to_vec();
    let x = draw::normal(rng, &shape).mapv(|x| (x * 1024.0).round() / 1024.0);
    inputs.set("x", x.clone());
    let run = |inputs: &Values| runner.run(&case.config, inputs, None).map_err(|e| e.to_string());
    let before = run(&inputs)?;
    let mut moved = x;
    for (n, mut row) in moved.rows_mut().into_iter().enumerate() {
        row += (n % 7) as f64 - 3.0;
    }
    inputs.set("x", moved);
    let after = run(&inputs)?;
    passed(compare("y", after.outputs.at("y").view(), before.outputs.at("y").view(), &tolerance::FORM))
}

impl<B: LayerNorm> OperationOn<B> for LayerNormOp {
    fn run(
        b: &B,
        config: &Config,
        inputs: &Named<B::Tensor>,
        upstream: Option<&Named<B::Tensor>>,
    ) -> Result<Run<B::Tensor>> {
        let op = Self::STEM;
        let params = glue::required(op, Params::from_named(glue::find(inputs)))?;
        let inputs = glue::required(op, Inputs::from_named(glue::find(inputs)))?;
        let x = inputs.x;
        let (outputs, saved) = LayerNorm::forward(b, config, inputs, params.clone())?;
        let mut grads = Named::new();
        if let Some(upstream) = upstream {
            let into = params.try_map(|_, p| glue::zeros_like(b, p))?;
            let plus = upstream.get("plus");
            let upstream = glue::required(op, Outputs::from_named(glue::find(upstream)))?;
            let returned: layer_norm::Grads<_> = LayerNorm::backward(b, config, &saved, upstream, plus, into.as_ref())?;
            grads.extend(returned.named().into_iter().map(|(field, t)| (glue::input_of(field), t)));
            grads.extend(into.named());
        }
        let outputs: Named<_> = outputs.named().into_iter().collect();
        Ok(Run { outputs: outputs.with("plus", x.clone()), grads })
    }
}
