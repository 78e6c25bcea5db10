//! `kda`: description for the harness.
//!
//! The plain second form ([`naive`]) is the recurrence, so gate `form` holds the reference's recurrent form to a second
//! writing of itself and its chunked form to another algorithm altogether. [`laws`] are the identities and closed forms
//! that hold whatever the implementation.

use dormouse_reference::kda::{self, Config, Form, Inputs, Kda, Memory, Outputs};
use dormouse_reference::{Precision, Result};
use ndarray::{Array4, ArrayD, Ix3, Ix4};
use proptest::prelude::*;
use rand_chacha::ChaCha8Rng;

use crate::compare::Tolerance;
use crate::description::{Case, Gate, Law, Mutant, Operation, OperationOn, Run, TensorSpec, Tolerances, glue};
use crate::named::{Named, Values};
use crate::tolerance;

pub mod families;
pub mod laws;
pub mod naive;
#[cfg(test)]
mod tests;

use families::{FAMILIES, OVERSHOOTING};

/// The description.
pub struct KdaOp;

const RECURRENT: Form = Form::Recurrent;

/// Batch, time, heads, K, V.
type Lengths = (usize, usize, usize, usize, usize);

fn case(
    (b, t, h, k, v): Lengths,
    form: Form,
    (checkpoint_every, memory): (usize, Memory),
    family: &'static str,
    present: &[&'static str],
) -> Case<Config> {
    let form_name = match form {
        Form::Recurrent => "recurrent".to_owned(),
        Form::Chunked { chunk } => format!("chunk{chunk}"),
    };
    let memory_name = if memory == Memory::Save { "save" } else { "recompute" };
    let states: String = present.iter().map(|name| format!("-{name}")).collect();
    Case {
        name: format!("b{b}-t{t}-h{h}-k{k}-v{v}-{form_name}-{memory_name}{checkpoint_every}-{family}{states}"),
        config: Config { scale: None, form, checkpoint_every, memory, precision: Precision::Full },
        dims: vec![("B", b), ("T", t), ("H", h), ("K", k), ("V", v)],
        family,
        present: present.to_vec(),
    }
}

impl Operation for KdaOp {
    type Config = Config;

    const STEM: &'static str = "kda";

    /// The longest chain of products is that of dg: scores, inverse, U, states, Z, and the product that makes the gradient.
    const PRODUCTS: u32 = 6;

    fn set_precision(config: &mut Config, precision: Precision) {
        config.precision = precision;
    }

    fn amplification(case: &Case<Config>) -> f64 {
        laws::amplification(case)
    }

    fn tensors() -> Vec<TensorSpec> {
        vec![
            TensorSpec::input("q", &["B", "T", "H", "K"]),
            TensorSpec::input("k", &["B", "T", "H", "K"]),
            TensorSpec::input("v", &["B", "T", "H", "V"]),
            TensorSpec::input("g", &["B", "T", "H", "K"]),
            TensorSpec::input("beta", &["B", "T", "H"]),
            TensorSpec::input("initial_state", &["B", "H", "K", "V"]),
            TensorSpec::output("o", &["B", "T", "H", "V"]),
            TensorSpec::output("final_state", &["B", "H", "K", "V"]),
        ]
    }

    fn cases() -> Vec<Case<Config>> {
        let both = ["initial_state", "final_state"];
        let four = Form::Chunked { chunk: 4 };
        let sixteen = Form::Chunked { chunk: 16 };
        let often = (4, Memory::Save);
        let mut cases = vec![
            case((2, 13, 2, 5, 3), RECURRENT, often, "spread", &both),
            case((2, 13, 2, 5, 3), RECURRENT, (64, Memory::Recompute), "init", &both),
            case((1, 9, 2, 4, 4), RECURRENT, (1, Memory::Recompute), "spread", &["initial_state"]),
            case((1, 8, 3, 3, 6), RECURRENT, (3, Memory::Save), "init", &["final_state"]),
            case((2, 7, 1, 1, 1), RECURRENT, often, "spread", &both),
            // More columns than one vector of the reference, and not a multiple of it.
            case((1, 6, 1, 5, 37), RECURRENT, often, "init", &both),
            case((1, 6, 1, 18, 16), RECURRENT, often, "spread", &both),
            // As long and as wide as a model's: several vectors a row, several groups of rows, many segments.
            case((1, 260, 1, 24, 70), RECURRENT, often, "init", &both),
            // As many chains.
            case((4, 5, 4, 5, 3), RECURRENT, often, "spread", &both),
            case((4, 5, 4, 5, 3), four, often, "spread", &both),
            // Chunks beyond the second, and chunks of more than 64 tokens with a ragged last one of more than 64.
            case((1, 200, 1, 5, 3), Form::Chunked { chunk: 64 }, (64, Memory::Save), "init", &both),
            case((1, 228, 1, 5, 3), Form::Chunked { chunk: 128 }, (128, Memory::Recompute), "init", &both),
            case((2, 13, 2, 5, 3), sixteen, often, "spread", &both),
            case((1, 18, 2, 4, 6), four, (8, Memory::Recompute), "init", &both),
            case((0, 4, 2, 3, 2), RECURRENT, often, "init", &[]),
            case((2, 0, 2, 3, 2), RECURRENT, often, "init", &both),
            case((1, 0, 1, 3, 2), four, often, "init", &both),
        ];
        for family in FAMILIES {
            cases.push(case((1, 11, 2, 6, 4), RECURRENT, often, family, &both));
            cases.push(case((1, 19, 1, 5, 7), sixteen, often, family, &both));
            cases.push(case((1, 9, 1, 4, 3), four, (4, Memory::Recompute), family, &[]));
        }
        for chunk in [4, 16, 64] {
            for (n, time) in [1, 2, 15, 16, 17, 63, 64, 65, 130].into_iter().enumerate() {
                let memory = if n % 2 == 0 { Memory::Save } else { Memory::Recompute };
                let present = if n % 3 == 0 { &both[..1] } else { &both[..] };
                // Several chains where there are few tokens: a gradient of one or two numbers is small by chance now
                // and then, and its rounding, relative to what cancelled in it, then looks large.
                let (batch, heads) = if time < 4 { (3, 4) } else { (1, 1) };
                cases.push(case((batch, time, heads, 5, 3), Form::Chunked { chunk }, (64, memory), "spread", present));
            }
        }
        cases
    }

    fn strategy() -> BoxedStrategy<Case<Config>> {
        let form = prop_oneof![
            Just(RECURRENT),
            (1..20usize).prop_map(|chunk| Form::Chunked { chunk }),
            Just(Form::Chunked { chunk: 16 }),
        ];
        let memory = (1..24usize, prop_oneof![Just(Memory::Save), Just(Memory::Recompute)]);
        let present = (any::<bool>(), any::<bool>());
        // Not K = 1: there a unit key with beta = 1 erases the whole state, and gradients whose true value is zero are
        // all rounding. Not one or two tokens of one chain either; the table has those with many chains.
        ((1..3usize, 3..40usize, 2..4usize, 2..9usize, 1..9usize), form, memory, 0..FAMILIES.len(), present)
            .prop_map(|(lengths, form, memory, family, (initial, last))| {
                let mut present = Vec::new();
                if initial {
                    present.push("initial_state");
                }
                if last {
                    present.push("final_state");
                }
                case(lengths, form, memory, FAMILIES[family], &present)
            })
            .boxed()
    }

    fn draw(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
        families::draw(case, rng)
    }

    fn naive(config: &Config, inputs: &Values, upstream: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
        plain_run(config, inputs, upstream, twist)
    }

    fn laws() -> Vec<Law<Self>> {
        laws::all()
    }

    fn mutants() -> Vec<Mutant> {
        mutants()
    }

    fn tolerances(case: &Case<Config>) -> Tolerances {
        let overshoots = OVERSHOOTING.contains(&case.family);
        Tolerances {
            form: if overshoots { FORM_OVERSHOOT } else { tolerance::FORM },
            diff_f32: if overshoots { F32_OVERSHOOT } else { tolerance::DIFF_F32 },
            ..tolerance::WELL_CONDITIONED
        }
    }

    fn optional_upstream() -> &'static [&'static str] {
        &["final_state"]
    }
}

/// Between beta |k|^2 = 1 and 2 with correlated keys the triangular system amplifies rounding about twentyfold.
const FORM_OVERSHOOT: Tolerance = Tolerance::new(2e-11, "one formula in two orders of operation, f64, times 20");

/// The same amplification in f32.
const F32_OVERSHOOT: Tolerance = Tolerance {
    slope: 3e-5,
    ..Tolerance::new(3e-5, "f32 rounding 6e-8 times sqrt(1000), times 20 from correlated keys")
};

/// Every formula term, each with the gate that must notice.
fn mutants() -> Vec<Mutant> {
    [
        ("decay-dropped", Gate::Form),
        ("decay-in-base-two", Gate::Form),
        ("decay-of-the-token-before", Gate::Form),
        ("decay-of-the-first-channel", Gate::Form),
        ("decay-after-write", Gate::Form),
        ("error-without-recall", Gate::Meta),
        ("recall-from-state-before-decay", Gate::Form),
        ("recall-by-query", Gate::Form),
        ("recall-sign", Gate::Meta),
        ("beta-on-recall-only", Gate::Meta),
        ("read-before-write", Gate::Meta),
        ("scale-dropped", Gate::Form),
        ("scale-applied-twice", Gate::Meta),
        ("scale-from-value-width", Gate::Form),
        ("initial-state-ignored", Gate::Form),
        ("initial-state-transposed", Gate::Meta),
        ("final-state-one-token-early", Gate::Meta),
        ("final-state-stale", Gate::Meta),
        ("state-left-by-the-chain-before", Gate::Meta),
        ("beta-of-the-next-head", Gate::Meta),
        ("output-peeks-at-next-gate", Gate::Meta),
        ("z-without-this-read", Gate::Fd),
        ("dq-from-faded-state", Gate::Fd),
        ("dq-without-scale", Gate::Meta),
        ("dr-sign", Gate::Adj),
        ("dr-from-updated-state", Gate::Fd),
        ("dk-without-write", Gate::Adj),
        ("dk-write-from-later-state", Gate::Fd),
        ("dk-without-erase", Gate::Meta),
        ("dk-erase-without-beta", Gate::Fd),
        ("dv-without-beta", Gate::Adj),
        ("dv-of-last-token-lost", Gate::Meta),
        ("dbeta-without-recall", Gate::Fd),
        ("carry-without-erase", Gate::Fd),
        ("carry-erases-without-beta", Gate::Adj),
        ("carry-without-decay", Gate::Meta),
        ("dg-from-m", Gate::Adj),
        ("dg-from-state-before-decay", Gate::Fd),
        ("dg-from-updated-state", Gate::Fd),
        ("dg-times-decay", Gate::Meta),
        ("dg-leaks-at-the-start", Gate::Meta),
        ("initial-gradient-without-its-decay", Gate::Fd),
        ("final-state-gradient-ignored", Gate::Adj),
        ("upstream-of-the-next-head", Gate::Fd),
    ]
    .map(|(twist, caught_by)| Mutant { twist, caught_by })
    .to_vec()
}

/// The rows of one chain of a `[B, T, H, width]` tensor.
pub(crate) fn rows_of_chain(tensor: &ArrayD<f64>, b: usize, h: usize) -> Vec<Vec<f64>> {
    let tensor = tensor.view().into_dimensionality::<Ix4>().expect("a token tensor has four axes");
    (0..tensor.shape()[1]).map(|t| tensor.slice(ndarray::s![b, t, h, ..]).to_vec()).collect()
}

/// The matrix of one chain of a `[B, H, K, V]` tensor.
pub(crate) fn state_of_chain(tensor: &ArrayD<f64>, b: usize, h: usize) -> naive::State<f64> {
    let tensor = tensor.view().into_dimensionality::<Ix4>().expect("a state tensor has four axes");
    (0..tensor.shape()[2]).map(|c| tensor.slice(ndarray::s![b, h, c, ..]).to_vec()).collect()
}

/// The inputs of one chain.
pub(crate) fn tokens_of_chain(config: &Config, inputs: &Values, b: usize, h: usize) -> naive::Tokens<f64> {
    let key = inputs.at("k").shape()[3];
    let beta = inputs.at("beta").view().into_dimensionality::<Ix3>().expect("beta has three axes");
    naive::Tokens {
        q: rows_of_chain(inputs.at("q"), b, h),
        k: rows_of_chain(inputs.at("k"), b, h),
        v: rows_of_chain(inputs.at("v"), b, h),
        g: rows_of_chain(inputs.at("g"), b, h),
        beta: beta.slice(ndarray::s![b, .., h]).to_vec(),
        scale: config.scale.unwrap_or(1.0 / (key as f64).sqrt()),
        key,
        value: inputs.at("v").shape()[3],
    }
}

fn plain_run(config: &Config, inputs: &Values, upstream: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
    let is = |name: &str| twist == Some(name);
    let &[batch, time, heads, key] = inputs.at("k").shape() else { panic!("k has four axes") };
    let value = inputs.at("v").shape()[3];
    let initial = inputs.get("initial_state").filter(|_| !is("initial-state-ignored"));
    let mut o = Array4::zeros((batch, time, heads, value));
    let mut last = Array4::zeros((batch, heads, key, value));
    let mut dq = Array4::zeros((batch, time, heads, key));
    let (mut dk, mut dg) = (dq.clone(), dq.clone());
    let mut dv = o.clone();
    let mut dbeta = ndarray::Array3::zeros((batch, time, heads));
    let mut dinitial = last.clone();
    let mut left_over = None;
    for b in 0..batch {
        for h in 0..heads {
            let mut tokens = tokens_of_chain(config, inputs, b, h);
            if is("scale-from-value-width") {
                tokens.scale = 1.0 / (value as f64).sqrt();
            }
            if is("beta-of-the-next-head") {
                tokens.beta = tokens_of_chain(config, inputs, b, (h + 1) % heads).beta;
            }
            let mut s = initial.map_or_else(|| naive::zeros(key, value), |s| state_of_chain(s, b, h));
            if is("initial-state-transposed") && key == value {
                s = (0..key).map(|c| (0..value).map(|j| s[j][c]).collect()).collect();
            }
            if is("state-left-by-the-chain-before")
                && let Some(left_over) = left_over.take()
            {
                s = left_over;
            }
            let forward = tokens.forward(s, twist);
            let end = match twist {
                Some("final-state-one-token-early") => time.saturating_sub(1),
                Some("final-state-stale") => 0,
                _ => time,
            };
            for t in 0..time {
                for j in 0..value {
                    o[[b, t, h, j]] = forward.o[t][j];
                }
            }
            for c in 0..key {
                for j in 0..value {
                    last[[b, h, c, j]] = forward.states[end][c][j];
                }
            }
            if let Some(upstream) = upstream {
                let head = if is("upstream-of-the-next-head") { (h + 1) % heads } else { h };
                let d_o = rows_of_chain(upstream.at("o"), b, head);
                let dfinal = upstream.get("final_state").filter(|_| !is("final-state-gradient-ignored"));
                let dfinal = dfinal.map_or_else(|| naive::zeros(key, value), |s| state_of_chain(s, b, h));
                let back = tokens.backward(&forward, &d_o, dfinal, initial.is_none(), twist);
                for t in 0..time {
                    for c in 0..key {
                        dq[[b, t, h, c]] = back.dq[t][c];
                        dk[[b, t, h, c]] = back.dk[t][c];
                        dg[[b, t, h, c]] = back.dg[t][c];
                    }
                    for j in 0..value {
                        dv[[b, t, h, j]] = back.dv[t][j];
                    }
                    dbeta[[b, t, h]] = back.dbeta[t];
                }
                for c in 0..key {
                    for j in 0..value {
                        dinitial[[b, h, c, j]] = back.dstates[0][c][j];
                    }
                }
            }
            left_over = forward.states.last().cloned();
        }
    }
    let outputs = Values::new().with("o", o.into_dyn()).with("final_state", last.into_dyn());
    let mut grads = Values::new();
    if upstream.is_some() {
        grads = grads
            .with("q", dq.into_dyn())
            .with("k", dk.into_dyn())
            .with("v", dv.into_dyn())
            .with("g", dg.into_dyn())
            .with("beta", dbeta.into_dyn());
        if inputs.get("initial_state").is_some() {
            grads.set("initial_state", dinitial.into_dyn());
        }
    }
    Run { outputs, grads }
}

impl<B: Kda> OperationOn<B> for KdaOp {
    fn run(
        b: &B,
        config: &Config,
        inputs: &Named<B::Tensor>,
        upstream: Option<&Named<B::Tensor>>,
    ) -> Result<Run<B::Tensor>> {
        let op = Self::STEM;
        let (outputs, saved) = Kda::forward(b, config, glue::required(op, Inputs::from_named(glue::find(inputs)))?)?;
        let mut grads = Named::new();
        if let Some(upstream) = upstream {
            let upstream = glue::required(op, Outputs::from_named(glue::find(upstream)))?;
            let returned: kda::Grads<_> = Kda::backward(b, config, &saved, upstream)?;
            grads.extend(returned.named().into_iter().map(|(field, t)| (glue::input_of(field), t)));
        }
        Ok(Run { outputs: outputs.named().into_iter().collect(), grads })
    }
}
