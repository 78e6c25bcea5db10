//! `short_conv`: description for the harness.
//!
//! `context` names an input and an output. In a case's `present`, `carried` is the input, `context` is the upstream
//! gradient of the output.

use dormouse_reference::Result;
use dormouse_reference::short_conv::{self, CONTEXT, Config, Inputs, Outputs, Params, ShortConv, WIDTH};
use ndarray::{ArrayD, Axis, IxDyn, Slice, concatenate};
use proptest::prelude::*;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use crate::compare::{Tolerance, compare, same_bits};
use crate::description::{Case, Gate, Law, Mutant, Operation, OperationOn, Run, TensorSpec, Tolerances, glue};
use crate::draw;
use crate::named::{Named, Values};
use crate::runner::Runner;
use crate::tolerance;

/// The description.
pub struct ShortConvOp;

/// Value families: ordinary; heavy-tailed with large channels; sums far out on both sides of SiLU.
const FAMILIES: [&str; 3] = ["normal", "activations", "saturated"];

fn case([batch, tokens, channels]: [usize; 3], family: &'static str, present: &[&'static str]) -> Case<Config> {
    let marks: String = present.iter().map(|p| format!("-{p}")).collect();
    Case {
        name: format!("b{batch}-t{tokens}-c{channels}-{family}{marks}"),
        config: Config {},
        dims: vec![("B", batch), ("T", tokens), ("C", channels), ("L", CONTEXT), ("W", WIDTH)],
        family,
        present: present.to_vec(),
    }
}

impl Operation for ShortConvOp {
    type Config = Config;

    const STEM: &'static str = "short_conv";

    fn tensors() -> Vec<TensorSpec> {
        vec![
            TensorSpec::input("x", &["B", "T", "C"]),
            TensorSpec::input("context", &["B", "L", "C"]),
            TensorSpec::param("weight", &["W", "C"]),
            TensorSpec::param("bias", &["C"]),
            TensorSpec::output("y", &["B", "T", "C"]),
            TensorSpec::output("context", &["B", "L", "C"]),
        ]
    }

    fn cases() -> Vec<Case<Config>> {
        let all = &["carried", "context", "bias"];
        vec![
            case([2, 9, 5], "normal", all),
            case([2, 7, 3], "normal", &[]),
            // Shorter than the context: part of it passes straight through.
            case([2, 1, 4], "normal", all),
            case([3, 2, 3], "normal", all),
            case([2, 2, 3], "normal", &["context"]),
            case([1, 3, 3], "normal", &["carried", "context"]),
            case([2, 4, 3], "normal", &["carried"]),
            case([2, 6, 16], "activations", all),
            case([2, 6, 4], "saturated", &["carried", "bias"]),
            // More tokens than one block of the parameters' fixed-order sum, cut inside a sequence.
            case([2, 150, 3], "normal", all),
            case([1, 1, 1], "normal", &["bias"]),
            case([2, 0, 3], "normal", all),
            case([0, 4, 3], "normal", &["bias"]),
        ]
    }

    fn production() -> Vec<Case<Config>> {
        vec![case([8, 512, 768], "normal", &[])]
    }

    fn strategy() -> BoxedStrategy<Case<Config>> {
        // A single channel far out on SiLU's flat side has a derivative too small for any difference to see.
        (1..4usize, 1..12usize, 4..20usize, 0..FAMILIES.len(), any::<[bool; 3]>())
            .prop_map(|(b, t, c, family, present)| {
                let names = ["carried", "context", "bias"].into_iter().zip(present);
                let present: Vec<_> = names.filter(|(_, p)| *p).map(|(name, _)| name).collect();
                case([b, t, c], FAMILIES[family], &present)
            })
            .boxed()
    }

    fn draw(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
        let mut draw = |shape: &[usize]| match case.family {
            // Channels of about 10: SiLU turns the absolute rounding error of its argument into a relative one.
            "activations" => 0.2 * draw::activation_like(rng, shape),
            "saturated" => draw::normal(rng, shape) * 8.0,
            _ => draw::normal(rng, shape),
        };
        let [batch, tokens, channels] = ["B", "T", "C"].map(|axis| case.dim(axis));
        let mut values = Values::new().with("x", draw(&[batch, tokens, channels]));
        if case.has("carried") {
            values.set("context", draw(&[batch, CONTEXT, channels]));
        }
        values.set("weight", 0.5 * draw::normal(rng, &[WIDTH, channels]));
        if case.has("bias") {
            values.set("bias", 0.5 * draw::normal(rng, &[channels]));
        }
        values
    }

    fn naive(_: &Config, inputs: &Values, upstream: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
        let is = |name: &str| twist == Some(name);
        let (x, weight, bias) = (inputs.at("x"), inputs.at("weight"), inputs.get("bias"));
        let [batch, tokens, channels] = *x.shape() else { panic!("x has three axes") };
        let sigma = |x: f64| 1.0 / (1.0 + (-x).exp());
        // The whole input in one array: three tokens of context, then x.
        let mut xx: ArrayD<f64> = ArrayD::zeros(IxDyn(&[batch, 3 + tokens, channels]));
        for b in 0..batch {
            for c in 0..channels {
                for i in 0..3 {
                    if let Some(context) = inputs.get("context").filter(|_| !is("context-dropped")) {
                        let from = if is("context-newest-first") { 2 - i } else { i };
                        xx[[b, i, c]] = context[[b, from, c]];
                    } else if is("context-of-the-sequence-before") && b > 0 && tokens >= 3 {
                        xx[[b, i, c]] = x[[b - 1, tokens - 3 + i, c]];
                    }
                }
                for t in 0..tokens {
                    xx[[b, 3 + t, c]] = x[[b, t, c]];
                }
            }
        }
        let mut pre: ArrayD<f64> = ArrayD::zeros(x.raw_dim());
        let mut y = pre.clone();
        let mut next = ArrayD::zeros(IxDyn(&[batch, 3, channels]));
        for b in 0..batch {
            for c in 0..channels {
                for t in 0..tokens {
                    let mut sum = bias.filter(|_| !is("forward-without-bias")).map_or(0.0, |bias| bias[[c]]);
                    for j in 0..4 {
                        let tap = if is("taps-reversed") { 3 - j } else { j };
                        let from = if is("one-token-late") { (t + j).max(1) - 1 } else { t + j };
                        sum += weight[[tap, c]] * xx[[b, from, c]];
                    }
                    pre[[b, t, c]] = sum;
                    y[[b, t, c]] = if is("sigmoid-for-silu") { sigma(sum) } else { sum * sigma(sum) };
                }
                for m in 0..3 {
                    let from = if is("old-context-handed-on") { m } else { tokens + m };
                    next[[b, m, c]] = xx[[b, from, c]];
                }
            }
        }
        let outputs = Values::new().with("y", y).with("context", next);
        let mut grads = Values::new();
        if let Some(upstream) = upstream {
            let dy = upstream.at("y");
            let mut dxx: ArrayD<f64> = ArrayD::zeros(xx.raw_dim());
            let mut dweight: ArrayD<f64> = ArrayD::zeros(weight.raw_dim());
            let mut dbias: ArrayD<f64> = ArrayD::zeros(IxDyn(&[channels]));
            for b in 0..batch {
                for c in 0..channels {
                    for t in 0..tokens {
                        let s = pre[[b, t, c]];
                        let bend = if is("slope-without-bend") { 0.0 } else { s * sigma(-s) };
                        let dpre = dy[[b, t, c]] * sigma(s) * (1.0 + bend);
                        for j in 0..4 {
                            let tap = if is("adjoint-taps-reversed") { 3 - j } else { j };
                            if !(is("adjoint-without-the-oldest-tap") && j == 0) {
                                dxx[[b, t + j, c]] += weight[[tap, c]] * dpre;
                            }
                            if !(is("dweight-without-context") && t + j < 3) {
                                dweight[[j, c]] += dpre * xx[[b, t + j, c]];
                            }
                        }
                        if !(is("dbias-of-the-first-sequence") && b > 0) {
                            dbias[[c]] += dpre;
                        }
                    }
                    if let Some(dnext) = upstream.get("context").filter(|_| !is("dnext-dropped")) {
                        for m in 0..3 {
                            // The mistake: as if the sequence were never shorter than its context.
                            let into = if is("dnext-always-into-x") { (tokens + m).max(3) } else { tokens + m };
                            if into < 3 + tokens {
                                dxx[[b, into, c]] += dnext[[b, m, c]];
                            }
                        }
                    }
                }
            }
            grads.set("x", dxx.slice_axis(Axis(1), Slice::from(3..)).to_owned());
            if inputs.get("context").is_some() {
                grads.set("context", dxx.slice_axis(Axis(1), Slice::from(..3)).to_owned());
            }
            grads.set("weight", dweight);
            if bias.is_some() {
                grads.set("bias", dbias);
            }
        }
        Run { outputs, grads }
    }

    fn laws() -> Vec<Law<Self>> {
        vec![
            Law::Independent("B"),
            Law::Independent("C"),
            Law::Causal("T"),
            Law::Custom { name: "a cut sequence equals the whole one", check: cut },
            Law::Custom { name: "d6: padding on the right changes no real token", check: padding },
        ]
    }

    fn mutants() -> Vec<Mutant> {
        [
            ("context-dropped", Gate::Meta),
            ("context-newest-first", Gate::Meta),
            ("context-of-the-sequence-before", Gate::Meta),
            ("forward-without-bias", Gate::Form),
            ("taps-reversed", Gate::Form),
            ("one-token-late", Gate::Form),
            ("sigmoid-for-silu", Gate::Form),
            ("old-context-handed-on", Gate::Meta),
            ("slope-without-bend", Gate::Fd),
            ("adjoint-taps-reversed", Gate::Adj),
            ("adjoint-without-the-oldest-tap", Gate::Fd),
            ("dweight-without-context", Gate::Adj),
            ("dbias-of-the-first-sequence", Gate::Adj),
            ("dnext-dropped", Gate::Fd),
            ("dnext-always-into-x", Gate::Meta),
        ]
        .map(|(twist, caught_by)| Mutant { twist, caught_by })
        .to_vec()
    }

    fn tolerances(_: &Case<Config>) -> Tolerances {
        tolerance::WELL_CONDITIONED
    }

    fn optional_upstream() -> &'static [&'static str] {
        &["context"]
    }
}

/// A parameter's gradient in two orders of summation: its terms are of order one, and their sum may cancel.
const SUM_OVER_TOKENS: Tolerance = tolerance::FORM.usual(1.0);

/// Two parts, the first handing its context to the second, give the outputs of the whole bit for bit and its gradients
/// to rounding, the second handing its context's gradient back.
fn cut(
    runner: &dyn Runner<ShortConvOp>,
    case: &Case<Config>,
    rng: &mut ChaCha8Rng,
) -> std::result::Result<f64, String> {
    let inputs = ShortConvOp::draw(case, rng);
    let [batch, tokens, channels] = ["B", "T", "C"].map(|axis| case.dim(axis));
    let at = rng.random_range(0..=tokens);
    let upstream = Values::new()
        .with("y", draw::normal(rng, &[batch, tokens, channels]))
        .with("context", draw::normal(rng, &[batch, CONTEXT, channels]));
    let part = |array: &ArrayD<f64>, range: std::ops::Range<usize>| -> ArrayD<f64> {
        array.slice_axis(Axis(1), Slice::from(range)).to_owned()
    };
    let run = |inputs: &Values, upstream: Option<&Values>| {
        runner.run(&case.config, inputs, upstream).map_err(|e| format!("cut at {at}: {e}"))
    };
    let whole = run(&inputs, Some(&upstream))?;
    let early = inputs.clone().with("x", part(inputs.at("x"), 0..at));
    let handed_on = run(&early, None)?.outputs.at("context").clone();
    let late = inputs.clone().with("x", part(inputs.at("x"), at..tokens)).with("context", handed_on);
    let late_upstream = upstream.clone().with("y", part(upstream.at("y"), at..tokens));
    let late = run(&late, Some(&late_upstream))?;
    let early_upstream =
        Values::new().with("y", part(upstream.at("y"), 0..at)).with("context", late.grads.at("context").clone());
    let early = run(&early, Some(&early_upstream))?;

    let joined = |a: &ArrayD<f64>, b: &ArrayD<f64>| concatenate![Axis(1), a.view(), b.view()];
    let y = joined(early.outputs.at("y"), late.outputs.at("y"));
    let dx = joined(early.grads.at("x"), late.grads.at("x"));
    let mut comparisons = vec![
        same_bits("y", y.view(), whole.outputs.at("y").view()),
        same_bits("context", late.outputs.at("context").view(), whole.outputs.at("context").view()),
        compare("dx", dx.view(), whole.grads.at("x").view(), &tolerance::FORM),
    ];
    if let Some(dcontext) = whole.grads.get("context") {
        comparisons.push(compare("dcontext", early.grads.at("context").view(), dcontext.view(), &tolerance::FORM));
    }
    for name in ["weight", "bias"] {
        if let Some(want) = whole.grads.get(name) {
            let got = early.grads.at(name) + late.grads.at(name);
            comparisons.push(compare(name, got.view(), want.view(), &SUM_OVER_TOKENS));
        }
    }
    worst_of(comparisons).map_err(|e| format!("cut at {at}: {e}"))
}

/// Random tokens after the end, with no gradient sent to them, change no real token, no gradient of one, and no
/// gradient of a parameter; the padding gets no gradient either.
fn padding(
    runner: &dyn Runner<ShortConvOp>,
    case: &Case<Config>,
    rng: &mut ChaCha8Rng,
) -> std::result::Result<f64, String> {
    let inputs = ShortConvOp::draw(case, rng);
    let [batch, tokens, channels] = ["B", "T", "C"].map(|axis| case.dim(axis));
    let extra = 5;
    let dy = draw::normal(rng, &[batch, tokens, channels]);
    let noise = draw::normal(rng, &[batch, extra, channels]);
    let padded = |a: &ArrayD<f64>, b: &ArrayD<f64>| concatenate![Axis(1), a.view(), b.view()];
    let run = |x: ArrayD<f64>, dy: ArrayD<f64>| {
        let inputs = inputs.clone().with("x", x);
        runner.run(&case.config, &inputs, Some(&Values::new().with("y", dy))).map_err(|e| e.to_string())
    };
    let plain = run(inputs.at("x").clone(), dy.clone())?;
    let long = run(padded(inputs.at("x"), &noise), padded(&dy, &ArrayD::zeros(noise.raw_dim())))?;
    let real = |a: &ArrayD<f64>| a.slice_axis(Axis(1), Slice::from(..tokens)).to_owned();
    let behind = long.grads.at("x").slice_axis(Axis(1), Slice::from(tokens..)).to_owned();
    if let Some(d) = behind.iter().find(|d| **d != 0.0) {
        return Err(format!("the padding has gradient {d:e}"));
    }
    let mut comparisons = vec![
        same_bits("y", real(long.outputs.at("y")).view(), plain.outputs.at("y").view()),
        same_bits("dx", real(long.grads.at("x")).view(), plain.grads.at("x").view()),
    ];
    // Longer sequences have other blocks in the sums over tokens, so these agree to rounding.
    for name in ["weight", "bias"] {
        if let Some(want) = plain.grads.get(name) {
            comparisons.push(compare(name, long.grads.at(name).view(), want.view(), &SUM_OVER_TOKENS));
        }
    }
    worst_of(comparisons)
}

/// The worst of several comparisons, or the message of the first that fails.
fn worst_of(comparisons: Vec<crate::compare::Comparison>) -> std::result::Result<f64, String> {
    let mut worst = 0.0f64;
    for comparison in comparisons {
        if !comparison.passes() {
            return Err(comparison.to_string());
        }
        worst = worst.max(comparison.worst);
    }
    Ok(worst)
}

impl<B: ShortConv> OperationOn<B> for ShortConvOp {
    fn run(
        b: &B,
        config: &Config,
        inputs: &Named<B::Tensor>,
        upstream: Option<&Named<B::Tensor>>,
    ) -> Result<Run<B::Tensor>> {
        let op = Self::STEM;
        let params = glue::required(op, Params::from_named(glue::find(inputs)))?;
        let activations = glue::required(op, Inputs::from_named(glue::find(inputs)))?;
        let (outputs, saved) = ShortConv::forward(b, config, activations, params.clone())?;
        let mut grads = Named::new();
        if let Some(upstream) = upstream {
            let into = params.try_map(|_, p| glue::zeros_like(b, p))?;
            let upstream = glue::required(op, Outputs::from_named(glue::find(upstream)))?;
            let returned: short_conv::Grads<_> = ShortConv::backward(b, config, &saved, upstream, into.as_ref())?;
            grads.extend(returned.named().into_iter().map(|(field, t)| (glue::input_of(field), t)));
            grads.extend(into.named());
        }
        Ok(Run { outputs: outputs.named().into_iter().collect(), grads })
    }
}
