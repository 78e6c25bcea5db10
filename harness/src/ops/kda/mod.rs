//! `kda`: description for the harness.
//!
//! The plain second form ([`naive`]) is the recurrence, so gate `form` holds the reference's recurrent form to a second
//! writing of itself and its chunked form to another algorithm altogether. [`laws`] are the identities and closed forms
//! that hold whatever the implementation.

use std::ops::Range;

use dormouse_reference::kda::{self, Config, Form, Inputs, Kda, Memory, Outputs};
use dormouse_reference::{Precision, Result};
use ndarray::{Array4, ArrayD, Ix3, Ix4, s};
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
    lengths: Lengths,
    form: Form,
    memory: (usize, Memory),
    family: &'static str,
    present: &[&'static str],
) -> Case<Config> {
    let (batch, _, heads, ..) = lengths;
    option_case(lengths, (heads, batch), form, memory, family, present)
}

/// A case with options: as many value heads, and if `cu_seqlens` is present as many sequences.
fn option_case(
    (b, t, h, k, v): Lengths,
    (value_heads, sequences): (usize, usize),
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
    let value_heads_name = if value_heads == h { String::new() } else { format!("-hv{value_heads}") };
    let sequences_name = if sequences == b { String::new() } else { format!("-n{sequences}") };
    let options = format!("{value_heads_name}{sequences_name}");
    Case {
        name: format!("b{b}-t{t}-h{h}{options}-k{k}-v{v}-{form_name}-{memory_name}{checkpoint_every}-{family}{states}"),
        config: Config { scale: None, form, checkpoint_every, memory, precision: Precision::Full },
        dims: vec![
            ("B", b),
            ("T", t),
            ("H", h),
            ("HV", value_heads),
            ("K", k),
            ("V", v),
            ("N", sequences),
            ("N + 1", sequences + 1),
        ],
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
            TensorSpec::input("v", &["B", "T", "HV", "V"]),
            TensorSpec::input("g", &["B", "T", "HV", "K"]),
            TensorSpec::input("beta", &["B", "T", "HV"]),
            TensorSpec::input("b", &["B", "T", "HV", "K"]),
            TensorSpec::input("w", &["B", "T", "HV", "V"]),
            TensorSpec::data("cu_seqlens", &["N + 1"]),
            TensorSpec::input("initial_state", &["N", "HV", "K", "V"]),
            TensorSpec::output("o", &["B", "T", "HV", "V"]),
            TensorSpec::output("final_state", &["N", "HV", "K", "V"]),
        ]
    }

    fn integers() -> &'static [&'static str] {
        &["cu_seqlens"]
    }

    // Without `cu_seqlens` every batch entry is one sequence.
    fn owned_axis(axis: &str) -> Option<&'static str> {
        match axis {
            "H" => Some("HV"),
            "B" => Some("N"),
            _ => None,
        }
    }

    fn on_devices(case: &Case<Config>) -> bool {
        // A device has one form and keeps what it keeps, so of cases that differ in those only it runs one.
        if matches!(case.config.form, Form::Chunked { chunk } if chunk != 16) {
            return false;
        }
        let grouped = case.dim("H") != case.dim("HV");
        let options: Vec<&str> = OPTIONS.into_iter().filter(|name| case.has(name)).collect();
        // What goes into the passes over the states; b and groups do not.
        let by_state = case.has("w") || case.has("cu_seqlens");
        let stateful = STATES.iter().all(|name| case.has(name));
        (!grouped && options.is_empty()) || ((stateful || !by_state) && ON_DEVICES.contains(&(grouped, &options)))
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
        // Behind the first few, so that a fault in an option is met early.
        cases.splice(4..4, option_cases());
        cases
    }

    fn production() -> Vec<Case<Config>> {
        let memory = (64, Memory::Recompute);
        vec![
            case((8, 512, 12, 64, 64), RECURRENT, memory, "init", &["final_state"]),
            option_case((1, 700, 2, 64, 64), (4, 6), RECURRENT, memory, "init", &ALL_OPTIONS),
            // Several blocks of channels and of columns.
            case((2, 150, 2, 200, 96), RECURRENT, memory, "init", &["final_state"]),
            option_case((1, 150, 1, 130, 70), (2, 3), RECURRENT, memory, "init", &ALL_OPTIONS),
        ]
    }

    fn strategy() -> BoxedStrategy<Case<Config>> {
        let form = prop_oneof![
            Just(RECURRENT),
            (1..20usize).prop_map(|chunk| Form::Chunked { chunk }),
            Just(Form::Chunked { chunk: 16 }),
        ];
        let memory = (1..24usize, prop_oneof![Just(Memory::Save), Just(Memory::Recompute)]);
        let some_of = |names: &'static [&'static str]| proptest::sample::subsequence(names, 0..=names.len());
        let options = prop_oneof![
            some_of(&STATES).prop_map(|present| (false, present)),
            proptest::sample::select(&ON_DEVICES[..])
                .prop_map(|(grouped, options)| (grouped, [&STATES, options].concat())),
            (any::<bool>(), some_of(&ALL_OPTIONS)),
        ];
        // Not K = 1: there a unit key with beta = 1 erases the whole state, and gradients whose true value is zero are
        // all rounding. Not one or two tokens of one chain either; the table has those with many chains.
        let lengths = (1..3usize, 3..40usize, 2..4usize, 2..9usize, 1..9usize);
        (lengths, 2..4usize, 1..6usize, form, memory, 0..FAMILIES.len(), options)
            .prop_map(|((b, t, h, k, v), group, sequences, form, memory, family, (grouped, present))| {
                let group = if grouped { group } else { 1 };
                let (b, sequences) = if present.contains(&"cu_seqlens") { (1, sequences) } else { (b, b) };
                option_case((b, t, h, k, v), (group * h, sequences), form, memory, FAMILIES[family], &present)
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

/// Where the state begins, and that its end has a gradient.
const STATES: [&str; 2] = ["initial_state", "final_state"];

/// The options that are inputs.
const OPTIONS: [&str; 3] = ["b", "w", "cu_seqlens"];

/// Both.
const ALL_OPTIONS: [&str; 5] = [STATES[0], STATES[1], OPTIONS[0], OPTIONS[1], OPTIONS[2]];

/// The options that devices are gated with, grouped heads before the inputs. A set has kernels of its own, which the
/// software driver compiles for some ten seconds, so there are not all sixteen: of any two options, each is there with and
/// without the other.
const ON_DEVICES: [(bool, &[&str]); 6] =
    [(true, &[]), (false, &["b"]), (false, &["w"]), (false, &["b", "w"]), (false, &["cu_seqlens"]), (true, &OPTIONS)];

/// Every option by itself and all together, in both forms.
fn option_cases() -> Vec<Case<Config>> {
    let states = STATES;
    let all = ALL_OPTIONS;
    let often = (4, Memory::Save);
    let sixteen = Form::Chunked { chunk: 16 };
    // Beyond the chunks of 16 and spans of 64 that a device works in, with sequences that end inside of them.
    let mut cases = vec![
        option_case((1, 150, 2, 6, 10), (4, 5), RECURRENT, (64, Memory::Save), "init", &all),
        option_case((1, 83, 1, 18, 20), (3, 3), sixteen, often, "spread", &all),
        option_case((2, 70, 1, 6, 12), (1, 2), sixteen, often, "spread", &["w", "initial_state", "final_state"]),
        option_case(
            (1, 70, 2, 5, 3),
            (2, 3),
            sixteen,
            often,
            "spread",
            &["cu_seqlens", "initial_state", "final_state"],
        ),
    ];
    for form in [RECURRENT, Form::Chunked { chunk: 4 }, Form::Chunked { chunk: 16 }] {
        cases.extend([
            option_case((2, 13, 2, 5, 3), (4, 2), form, often, "spread", &states),
            option_case((1, 9, 1, 4, 6), (3, 1), form, (3, Memory::Recompute), "init", &[]),
            case((2, 13, 2, 5, 3), form, often, "spread", &["b", "w", "initial_state", "final_state"]),
            case((1, 19, 2, 6, 18), form, (8, Memory::Recompute), "init", &["b", "final_state"]),
            case((1, 10, 2, 6, 4), form, often, "init", &["w", "initial_state"]),
            case((2, 3, 2, 1, 1), form, often, "init", &["b", "w"]),
            option_case(
                (1, 21, 2, 5, 3),
                (2, 4),
                form,
                often,
                "spread",
                &["cu_seqlens", "initial_state", "final_state"],
            ),
            option_case((1, 12, 1, 4, 4), (1, 7), form, (5, Memory::Recompute), "init", &["cu_seqlens"]),
            option_case((1, 0, 2, 3, 2), (2, 3), form, often, "init", &["cu_seqlens", "initial_state", "final_state"]),
            option_case((1, 23, 2, 5, 3), (6, 5), form, often, "init", &all),
        ]);
        for family in FAMILIES {
            cases.push(option_case((1, 11, 1, 6, 4), (2, 3), form, often, family, &all));
        }
    }
    cases
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
        ("erase-of-the-first-channel", Gate::Form),
        ("write-of-the-first-channel", Gate::Fd),
        ("gates-off-by-an-ulp", Gate::Meta),
        ("db-from-query", Gate::Meta),
        ("dw-from-what-is-written", Gate::Fd),
        ("dbeta-counts-gates", Gate::Adj),
        ("key-heads-in-turn", Gate::Meta),
        ("dq-of-the-last-value-head", Gate::Adj),
        ("dk-averaged-over-the-group", Gate::Fd),
        ("state-crosses-sequences", Gate::Meta),
        ("gradient-crosses-sequences", Gate::Fd),
        ("empty-sequence-loses-its-state", Gate::Meta),
        ("empty-sequence-loses-its-gradient", Gate::Adj),
        ("packed-off-by-an-ulp", Gate::Meta),
    ]
    .map(|(twist, caught_by)| Mutant { twist, caught_by })
    .to_vec()
}

/// One sequence: its batch entry, and its tokens there.
pub(crate) type Sequence = (usize, Range<usize>);

/// The sequences of the inputs.
pub(crate) fn sequences(inputs: &Values) -> Vec<Sequence> {
    let shape = inputs.at("k").shape();
    match inputs.get("cu_seqlens") {
        None => (0..shape[0]).map(|b| (b, 0..shape[1])).collect(),
        Some(cuts) => {
            let cuts: Vec<usize> = cuts.iter().map(|&x| x as usize).collect();
            cuts.windows(2).map(|pair| (0, pair[0]..pair[1])).collect()
        }
    }
}

/// The rows of one head of a `[B, T, H, width]` tensor in a sequence.
pub(crate) fn rows_of_head(tensor: &ArrayD<f64>, (b, tokens): &Sequence, h: usize) -> Vec<Vec<f64>> {
    let tensor = tensor.view().into_dimensionality::<Ix4>().expect("a token tensor has four axes");
    tokens.clone().map(|t| tensor.slice(s![*b, t, h, ..]).to_vec()).collect()
}

/// The matrix of one chain of a `[N, HV, K, V]` tensor.
pub(crate) fn state_of_chain(tensor: &ArrayD<f64>, n: usize, h: usize) -> naive::State<f64> {
    let tensor = tensor.view().into_dimensionality::<Ix4>().expect("a state tensor has four axes");
    (0..tensor.shape()[2]).map(|c| tensor.slice(s![n, h, c, ..]).to_vec()).collect()
}

/// The inputs of value head `h` over a sequence, whose key head is `key_head`.
pub(crate) fn tokens_of_chain(
    config: &Config,
    inputs: &Values,
    sequence: &Sequence,
    (key_head, h): (usize, usize),
) -> naive::Tokens<f64> {
    let (key, value) = (inputs.at("k").shape()[3], inputs.at("v").shape()[3]);
    let beta = inputs.at("beta").view().into_dimensionality::<Ix3>().expect("beta has three axes");
    let strength = |gate: &str, width: usize| match inputs.get(gate) {
        Some(gate) => rows_of_head(gate, sequence, h),
        None => sequence.1.clone().map(|t| vec![beta[[sequence.0, t, h]]; width]).collect(),
    };
    naive::Tokens {
        q: rows_of_head(inputs.at("q"), sequence, key_head),
        k: rows_of_head(inputs.at("k"), sequence, key_head),
        v: rows_of_head(inputs.at("v"), sequence, h),
        g: rows_of_head(inputs.at("g"), sequence, h),
        erase: strength("b", key),
        write: strength("w", value),
        gates: (inputs.get("b").is_some(), inputs.get("w").is_some()),
        scale: config.scale.unwrap_or(1.0 / (key as f64).sqrt()),
        key,
        value,
    }
}

fn plain_run(config: &Config, inputs: &Values, upstream: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
    let is = |name: &str| twist == Some(name);
    let &[batch, time, key_heads, key] = inputs.at("k").shape() else { panic!("k has four axes") };
    let &[_, _, heads, value] = inputs.at("v").shape() else { panic!("v has four axes") };
    let group = heads / key_heads;
    let key_head = |h: usize| if is("key-heads-in-turn") { h % key_heads } else { h / group };
    let sequences = sequences(inputs);
    let packed = inputs.get("cu_seqlens").is_some();
    let initial = inputs.get("initial_state").filter(|_| !is("initial-state-ignored"));
    let mut o = Array4::zeros((batch, time, heads, value));
    let mut last = Array4::zeros((sequences.len(), heads, key, value));
    let mut chains: Vec<(naive::Tokens<f64>, naive::Forward<f64>)> = Vec::new();
    for (n, sequence) in sequences.iter().enumerate() {
        for h in 0..heads {
            let mut tokens = tokens_of_chain(config, inputs, sequence, (key_head(h), h));
            if is("scale-from-value-width") {
                tokens.scale = 1.0 / (value as f64).sqrt();
            }
            if is("beta-of-the-next-head") {
                let next = tokens_of_chain(config, inputs, sequence, (key_head(h), (h + 1) % heads));
                (tokens.erase, tokens.write) = (next.erase, next.write);
            }
            let mut s = initial.map_or_else(|| naive::zeros(key, value), |s| state_of_chain(s, n, h));
            if is("initial-state-transposed") && key == value {
                s = (0..key).map(|c| (0..value).map(|j| s[j][c]).collect()).collect();
            }
            let end_of = |back: usize| chains[chains.len() - back].1.states.last().cloned();
            if is("state-left-by-the-chain-before") && !chains.is_empty() {
                s = end_of(1).expect("there is always the first state");
            }
            if is("state-crosses-sequences") && packed && n > 0 {
                s = end_of(heads).expect("there is always the first state");
            }
            let forward = tokens.forward(s, twist);
            let length = sequence.1.len();
            let end = match twist {
                Some("final-state-one-token-early") => length.saturating_sub(1),
                Some("final-state-stale") => 0,
                _ => length,
            };
            let lost = is("empty-sequence-loses-its-state") && length == 0;
            for (t, row) in sequence.1.clone().zip(&forward.o) {
                for j in 0..value {
                    o[[sequence.0, t, h, j]] = row[j];
                }
            }
            for c in (0..key).filter(|_| !lost) {
                for j in 0..value {
                    last[[n, h, c, j]] = forward.states[end][c][j];
                }
            }
            chains.push((tokens, forward));
        }
    }
    if is("packed-off-by-an-ulp") && packed {
        o.mapv_inplace(|x| x * (1.0 + f64::EPSILON));
    }
    let grads = upstream.map(|upstream| plain_grads(inputs, &chains, &sequences, upstream, twist));
    let outputs = Values::new().with("o", o.into_dyn()).with("final_state", last.into_dyn());
    Run { outputs, grads: grads.unwrap_or_default() }
}

fn plain_grads(
    inputs: &Values,
    chains: &[(naive::Tokens<f64>, naive::Forward<f64>)],
    sequences: &[Sequence],
    upstream: &Values,
    twist: Option<&str>,
) -> Values {
    let is = |name: &str| twist == Some(name);
    let starts_empty = inputs.get("initial_state").is_none() || is("initial-state-ignored");
    let key_heads = inputs.at("k").shape()[2];
    let heads = inputs.at("v").shape()[2];
    let group = heads / key_heads;
    let mut grads: Values = inputs.iter().filter(|(name, _)| *name != "cu_seqlens").map(zeros_like).collect();
    let mut later: Vec<Option<naive::State<f64>>> = vec![None; heads];
    for (n, sequence) in sequences.iter().enumerate().rev() {
        for h in 0..heads {
            let (tokens, forward) = &chains[n * heads + h];
            let head = if is("upstream-of-the-next-head") { (h + 1) % heads } else { h };
            let d_o = rows_of_head(upstream.at("o"), sequence, head);
            let dfinal = upstream.get("final_state").filter(|_| !is("final-state-gradient-ignored"));
            let mut dfinal = dfinal.map_or_else(|| naive::zeros(tokens.key, tokens.value), |s| state_of_chain(s, n, h));
            if is("gradient-crosses-sequences")
                && inputs.get("cu_seqlens").is_some()
                && let Some(later) = later[h].take()
            {
                dfinal = later;
            }
            let back = tokens.backward(forward, &d_o, dfinal, starts_empty, twist);
            let key_head = if is("key-heads-in-turn") { h % key_heads } else { h / group };
            let adds = h % group > 0 && !is("dq-of-the-last-value-head");
            put(&mut grads, "q", sequence, key_head, &back.dq, adds);
            let share = if is("dk-averaged-over-the-group") { 1.0 / group as f64 } else { 1.0 };
            let dk: Vec<Vec<f64>> = back.dk.iter().map(|row| row.iter().map(|x| x * share).collect()).collect();
            put(&mut grads, "k", sequence, key_head, &dk, h % group > 0);
            put(&mut grads, "v", sequence, h, &back.dv, false);
            put(&mut grads, "g", sequence, h, &back.dg, false);
            put(&mut grads, "b", sequence, h, &back.db, false);
            put(&mut grads, "w", sequence, h, &back.dw, false);
            let dbeta = grads.get_mut("beta").expect("beta is an input");
            for (t, value) in sequence.1.clone().zip(&back.dbeta) {
                dbeta[[sequence.0, t, h]] = *value;
            }
            let lost = is("empty-sequence-loses-its-gradient") && sequence.1.is_empty();
            if let Some(dinitial) = grads.get_mut("initial_state").filter(|_| !lost) {
                for (c, row) in back.dstates[0].iter().enumerate() {
                    for (j, value) in row.iter().enumerate() {
                        dinitial[[n, h, c, j]] = *value;
                    }
                }
            }
            later[h] = back.dstates.first().cloned();
        }
    }
    grads
}

fn zeros_like((name, x): (&'static str, &ArrayD<f64>)) -> (&'static str, ArrayD<f64>) {
    (name, ArrayD::zeros(x.raw_dim()))
}

/// Writes the rows of one head in a sequence, or adds to what a value head before has written.
fn put(grads: &mut Values, name: &str, (b, tokens): &Sequence, h: usize, rows: &[Vec<f64>], adds: bool) {
    let Some(into) = grads.get_mut(name) else { return };
    for (t, row) in tokens.clone().zip(rows) {
        for (c, value) in row.iter().enumerate() {
            let at = &mut into[[*b, t, h, c]];
            *at = if adds { *at + value } else { *value };
        }
    }
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
