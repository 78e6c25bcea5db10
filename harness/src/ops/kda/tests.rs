//! Inputs that broke other implementations of gated delta rules, one test a report, on both forms of the reference.

use dormouse_reference::kda::{Config, Form, Inputs, Kda, Memory};
use dormouse_reference::{Precision, Reference, Tensors};
use ndarray::{ArrayD, Axis, Ix4, IxDyn, Slice, s};
use rand_chacha::ChaCha8Rng;

use super::families::unit_rows;
use super::{KdaOp, naive, rows_of_head, sequences, tokens_of_chain};
use crate::compare::{Tolerance, compare, same_bits};
use crate::description::{Operation, Run};
use crate::draw;
use crate::named::Values;
use crate::runner::{OnBackend, Runner};
use crate::tolerance::{DIFF_F32, FORM};

type Lengths = (usize, usize, usize, usize, usize);

const FORMS: [Form; 4] =
    [Form::Recurrent, Form::Chunked { chunk: 4 }, Form::Chunked { chunk: 16 }, Form::Chunked { chunk: 64 }];

fn config(form: Form) -> Config {
    Config { scale: None, form, checkpoint_every: 64, memory: Memory::Save, precision: Precision::Full }
}

fn rng(case: &str) -> ChaCha8Rng {
    draw::stream(20, &["kda", case])
}

/// Unit queries and keys, normal values, beta in (0, 1), the same g everywhere. Rounded to f32, so that every precision
/// computes on the same numbers.
fn inputs(rng: &mut ChaCha8Rng, (b, t, h, k, v): Lengths, g: f64) -> Values {
    let wide = [b, t, h, k];
    rounded(
        Values::new()
            .with("q", unit_rows(draw::normal(rng, &wide)))
            .with("k", unit_rows(draw::normal(rng, &wide)))
            .with("v", draw::normal(rng, &[b, t, h, v]))
            .with("g", ArrayD::from_elem(IxDyn(&wide), g))
            .with("beta", draw::uniform(rng, &[b, t, h], 0.1, 0.9)),
    )
}

/// The rows of one chain of a `[B, T, H, width]` tensor.
fn rows_of_chain(tensor: &ArrayD<f64>, b: usize, h: usize) -> Vec<Vec<f64>> {
    rows_of_head(tensor, &(b, 0..tensor.shape()[1]), h)
}

fn rounded(values: Values) -> Values {
    values.map(|_, x| x.mapv(|x| f64::from(x as f32)))
}

fn upstream(rng: &mut ChaCha8Rng, (b, t, h, k, v): Lengths) -> Values {
    rounded(
        Values::new().with("o", draw::normal(rng, &[b, t, h, v])).with("final_state", draw::normal(rng, &[b, h, k, v])),
    )
}

fn run_f64(form: Form, inputs: &Values, upstream: &Values) -> Run<ArrayD<f64>> {
    Runner::<KdaOp>::run(&OnBackend::new(Reference::<f64>::new), &config(form), inputs, Some(upstream)).unwrap()
}

fn run_f32(form: Form, inputs: &Values, upstream: &Values) -> Run<ArrayD<f64>> {
    Runner::<KdaOp>::run(&OnBackend::new(Reference::<f32>::new), &config(form), inputs, Some(upstream)).unwrap()
}

fn assert_close(what: &str, got: &Run<ArrayD<f64>>, want: &Run<ArrayD<f64>>, tolerance: &Tolerance) {
    for (got, want) in [(&got.outputs, &want.outputs), (&got.grads, &want.grads)] {
        assert!(got.names().eq(want.names()), "{what}");
        for (name, want) in want.iter() {
            let comparison = compare(name, got.at(name).view(), want.view(), tolerance);
            assert!(comparison.passes(), "{what}: {comparison}");
        }
    }
}

/// Every form, f64 and f32, against the plain recurrence in f64.
fn assert_equals_recurrence(what: &str, inputs: &Values, upstream: &Values) {
    let want = KdaOp::naive(&config(Form::Recurrent), inputs, Some(upstream), None);
    for form in FORMS {
        assert_close(&format!("{what} {form:?} f64"), &run_f64(form, inputs, upstream), &want, &FORM);
        assert_close(&format!("{what} {form:?} f32"), &run_f32(form, inputs, upstream), &want, &DIFF_F32);
    }
}

/// An exclusive running sum minus an anchor is positive at one row, and exp overflows there.
#[test]
fn a1_one_token_that_forgets_everything() {
    let lengths = (1, 17, 1, 4, 3);
    for (what, tokens) in [("token 16", 16..17), ("token 8", 8..9), ("every token", 0..17)] {
        let mut rng = rng("a1");
        let mut inputs = inputs(&mut rng, lengths, -0.01);
        inputs.get_mut("g").unwrap().slice_axis_mut(Axis(1), Slice::from(tokens)).fill(-30.0);
        assert_equals_recurrence(what, &inputs, &upstream(&mut rng, lengths));
    }
}

/// Constant gates on both sides of every ceiling that an anchored e^{-G} has in f32, and minus infinity.
#[test]
fn a2_constant_gates_beyond_every_ceiling() {
    let lengths = (1, 64, 1, 16, 8);
    for g in [-5.9, -5.95, -8.0, -11.05, -11.2, -50.0, f64::NEG_INFINITY] {
        let mut rng = rng("a2");
        let inputs = inputs(&mut rng, lengths, g);
        assert_equals_recurrence(&format!("g = {g}"), &inputs, &upstream(&mut rng, lengths));
    }
}

/// The bounded gate saturated at both ends: g next to 0 and next to -5.
#[test]
fn a4_saturated_gates_give_finite_gradients() {
    let lengths = (1, 80, 2, 32, 32);
    let mut rng = rng("a4");
    let mut inputs = inputs(&mut rng, lengths, 0.0);
    for (i, g) in inputs.get_mut("g").unwrap().iter_mut().enumerate() {
        let z = if i % 32 < 16 { 40.0 } else { -40.0f64 };
        *g = f64::from((-5.0 / (1.0 + (-z).exp())) as f32);
    }
    assert_equals_recurrence("z = 40 and -40", &inputs, &upstream(&mut rng, lengths));
}

/// A tile anchored at its middle row lets future gates into earlier bits. Also when tokens are appended.
#[test]
fn a6_later_tokens_change_no_earlier_bit() {
    let lengths = (1, 22, 1, 32, 32);
    let mut rng = rng("a6");
    let before = inputs(&mut rng, lengths, -1.0);
    let mut upstream = upstream(&mut rng, lengths);
    upstream.remove("final_state");
    upstream.get_mut("o").unwrap().slice_axis_mut(Axis(1), Slice::from(21..)).fill(0.0);
    let mut changed = inputs(&mut rng, lengths, -4.0);
    let longer = |values: &Values| {
        values.map(|_, x| ndarray::concatenate(Axis(1), &[x.view(), x.slice_axis(Axis(1), Slice::from(..1))]).unwrap())
    };
    for (name, x) in changed.iter_mut() {
        let earlier = before.at(name).slice_axis(Axis(1), Slice::from(..21)).to_owned();
        x.slice_axis_mut(Axis(1), Slice::from(..21)).assign(&earlier);
    }
    let mut longer_upstream = longer(&upstream);
    longer_upstream.get_mut("o").unwrap().slice_axis_mut(Axis(1), Slice::from(21..)).fill(0.0);
    for form in FORMS {
        for run in [run_f64, run_f32] {
            let want = run(form, &before, &upstream);
            let others = [run(form, &changed, &upstream), run(form, &longer(&before), &longer_upstream)];
            for (got, want) in others.iter().flat_map(|r| [(&r.outputs, &want.outputs), (&r.grads, &want.grads)]) {
                for (name, want) in want.iter().filter(|(name, _)| KdaOp::spec(name).axis("T").is_some()) {
                    let prefix = Slice::from(..21);
                    let comparison =
                        same_bits(name, got.at(name).slice_axis(Axis(1), prefix), want.slice_axis(Axis(1), prefix));
                    assert!(comparison.passes(), "{form:?}: {comparison}");
                }
            }
        }
    }
}

/// Strong decay in f32: the straddling sums give dg as exactly as every other gradient; the textbook reverse cumulative
/// sum, in the same arithmetic, does not. And dg of the first token is exactly zero.
#[test]
fn b1_straddling_sums_keep_dg_where_the_textbook_loses_it() {
    let (time, key) = (512, 64);
    let lengths = (1, time, 1, key, 64);
    for strong in ["g = -5", "bounded gate with z ~ N(4, 1)"] {
        let mut rng = rng("b1");
        let mut inputs = inputs(&mut rng, lengths, -5.0);
        if strong != "g = -5" {
            let z = draw::normal(&mut rng, &[1, time, 1, key]) + 4.0;
            inputs.set("g", z.mapv(|z| f64::from((-5.0 / (1.0 + (-z).exp())) as f32)));
        }
        let upstream = rounded(Values::new().with("o", draw::normal(&mut rng, &[1, time, 1, 64])));
        let want = KdaOp::naive(&config(Form::Recurrent), &inputs, Some(&upstream), None);
        for form in [Form::Recurrent, Form::Chunked { chunk: 64 }] {
            let got = run_f32(form, &inputs, &upstream);
            assert_close(&format!("{strong} {form:?}"), &got, &want, &DIFF_F32);
            assert!(got.grads.at("g").slice_axis(Axis(1), Slice::from(..1)).iter().all(|dg| *dg == 0.0));
        }
        let want = rows_of_chain(want.grads.at("g"), 0, 0);
        let textbook = textbook_dg_in_f32(&inputs, &upstream);
        let (mut error, mut size) = (0.0, 0.0);
        for (got, want) in textbook.iter().flatten().zip(want.iter().flatten()) {
            error += (f64::from(*got) - want).powi(2);
            size += want * want;
        }
        let relative = (error / size).sqrt();
        println!("{strong}: textbook dg in f32 is off by {relative:.1e} (rms), the straddling sums by at most 2e-6");
        assert!(relative > 5.0 * DIFF_F32.tol, "{strong}: the textbook form errs by {relative:e} only");
    }
}

/// The recurrence in f32 with the textbook's dg, in chunks of 64 as the textbook has it.
fn textbook_dg_in_f32(inputs: &Values, upstream: &Values) -> Vec<Vec<f32>> {
    let chain = tokens_of_chain(&config(Form::Recurrent), inputs, &sequences(inputs)[0], (0, 0));
    let narrow = |rows: &[Vec<f64>]| -> Vec<Vec<f32>> {
        rows.iter().map(|row| row.iter().map(|&x| x as f32).collect()).collect()
    };
    let chain = naive::Tokens::<f32> {
        q: narrow(&chain.q),
        k: narrow(&chain.k),
        v: narrow(&chain.v),
        g: narrow(&chain.g),
        erase: narrow(&chain.erase),
        write: narrow(&chain.write),
        gates: chain.gates,
        scale: chain.scale as f32,
        key: chain.key,
        value: chain.value,
    };
    let forward = chain.forward(naive::zeros(chain.key, chain.value), None);
    let d_o = narrow(&rows_of_chain(upstream.at("o"), 0, 0));
    let back = chain.backward(&forward, &d_o, naive::zeros(chain.key, chain.value), true, None);
    let time = chain.q.len();
    let mut dg = Vec::new();
    for first in (0..time).step_by(64) {
        let end = (first + 64).min(time);
        // rowsum(S * dS) at the end of the chunk.
        let through: Vec<f32> = (0..chain.key)
            .map(|c| forward.states[end][c].iter().zip(&back.dstates[end][c]).map(|(s, ds)| s * ds).sum())
            .collect();
        dg.extend(chain.textbook_dg(&back, first, end, &through));
    }
    dg
}

/// Keys that are not normalised: the state grows, and all forms must still agree relative to it.
#[test]
fn c1_long_keys_agree_relative_to_the_states_growth() {
    let lengths = (1, 64, 1, 8, 8);
    let mut rng = rng("c1");
    let mut inputs = inputs(&mut rng, lengths, -0.01);
    *inputs.get_mut("k").unwrap() *= 8.0;
    inputs.get_mut("beta").unwrap().fill(1.0);
    let upstream = upstream(&mut rng, lengths);
    let want = KdaOp::naive(&config(Form::Recurrent), &inputs, Some(&upstream), None);
    let largest = want.outputs.at("final_state").iter().fold(0.0f64, |a, &b| a.max(b.abs()));
    assert!(largest > 1e30, "the state is meant to grow, and is {largest:e}");
    for form in FORMS {
        // A state that grows 64-fold a token keeps the relative error of each step; 64 steps add up.
        let tolerance = Tolerance::new(1e-9, "f64 through 64 steps, each with condition 64");
        assert_close(&format!("{form:?}"), &run_f64(form, &inputs, &upstream), &want, &tolerance);
    }
}

/// One key 64 times over, where an inverse from powers of the triangular matrix overflows: beta = 1 returns the value
/// just written, beta = 2 alternates, p_t = 2 v_t - p_{t-1}.
#[test]
fn c3_a_repeated_key_in_f32() {
    let lengths = (1, 64, 1, 8, 8);
    for beta in [1.0, 2.0] {
        let mut rng = rng("c3");
        let mut inputs = inputs(&mut rng, lengths, 0.0);
        let key = inputs.at("k").slice_axis(Axis(1), Slice::from(..1)).to_owned();
        inputs.get_mut("k").unwrap().assign(&key);
        inputs.get_mut("beta").unwrap().fill(beta);
        let v = inputs.at("v").view().into_dimensionality::<Ix4>().unwrap();
        let q = inputs.at("q").view().into_dimensionality::<Ix4>().unwrap();
        let mut p = ndarray::Array1::<f64>::zeros(8);
        let mut want = v.to_owned();
        for t in 0..64 {
            p = (1.0 - beta) * p + beta * &v.slice(s![0, t, 0, ..]);
            let q_k: f64 = q.slice(s![0, t, 0, ..]).iter().zip(&key).map(|(q, k)| q * k).sum();
            want.slice_mut(s![0, t, 0, ..]).assign(&(q_k / 8.0f64.sqrt() * &p));
        }
        let tolerance = Tolerance::new(3e-5, "f32 times 20 at beta = 2; |k| = 1 to f32 rounding only");
        for form in FORMS {
            let got = run_f32(form, &inputs, &upstream(&mut rng, lengths));
            let comparison = compare("o", got.outputs.at("o").view(), want.view().into_dyn(), &tolerance);
            assert!(comparison.passes(), "beta = {beta}, {form:?}: {comparison}");
        }
    }
}

/// Lengths around every chunk border.
#[test]
fn d1_a_partial_last_chunk() {
    for time in [1, 15, 16, 17, 28, 63, 65] {
        let lengths = (2, time, 2, 6, 5);
        let mut rng = rng("d1");
        let inputs = inputs(&mut rng, lengths, -0.3);
        assert_equals_recurrence(&format!("T = {time}"), &inputs, &upstream(&mut rng, lengths));
    }
}

/// One token past the chunk, gradients from the final state and the last token only: no term of dg may be dropped.
#[test]
fn d2_one_token_past_the_chunk() {
    let lengths = (1, 65, 1, 8, 8);
    let mut rng = rng("d2");
    let inputs = inputs(&mut rng, lengths, -0.05);
    let mut upstream = upstream(&mut rng, lengths);
    upstream.get_mut("o").unwrap().slice_axis_mut(Axis(1), Slice::from(..64)).fill(0.0);
    assert_equals_recurrence("last token only", &inputs, &upstream);
}

/// Repeated offsets are empty sequences: their states and the gradients of those pass through, and the others equal the
/// recurrence.
#[test]
fn d3_repeated_offsets_are_empty_sequences() {
    let lengths = (1, 21, 2, 5, 3);
    let mut rng = rng("d3");
    let states = |rng: &mut ChaCha8Rng| draw::normal(rng, &[4, 2, 5, 3]).mapv(|x| f64::from(x as f32));
    let cuts = ndarray::array![0.0, 0.0, 5.0, 5.0, 21.0].into_dyn();
    let inputs = inputs(&mut rng, lengths, -0.2).with("cu_seqlens", cuts).with("initial_state", states(&mut rng));
    let upstream = upstream(&mut rng, lengths).with("final_state", states(&mut rng));
    assert_equals_recurrence("four sequences", &inputs, &upstream);
    for form in FORMS {
        let got = run_f32(form, &inputs, &upstream);
        for empty in [0, 2] {
            let of_empty = |x: &ArrayD<f64>| x.index_axis(Axis(0), empty).to_owned();
            assert_eq!(of_empty(got.outputs.at("final_state")), of_empty(inputs.at("initial_state")));
            assert_eq!(of_empty(got.grads.at("initial_state")), of_empty(upstream.at("final_state")));
        }
    }
}

/// Widths that are no power of two, no multiple of a vector, or larger than one.
#[test]
fn e1_any_width() {
    for (key, value) in [(1, 5), (3, 1), (60, 5), (96, 100), (100, 1), (192, 5), (256, 1)] {
        let lengths = (2, 9, 2, key, value);
        let mut rng = rng("e1");
        let inputs = inputs(&mut rng, lengths, -0.2);
        assert_equals_recurrence(&format!("K = {key}, V = {value}"), &inputs, &upstream(&mut rng, lengths));
    }
}

/// The widths that models have.
#[test]
fn e2_the_usual_widths() {
    for (key, value) in [(16, 16), (32, 32), (64, 64), (128, 128), (64, 128), (128, 64)] {
        let lengths = (1, 20, 2, key, value);
        let mut rng = rng("e2");
        let inputs = inputs(&mut rng, lengths, -0.2);
        assert_equals_recurrence(&format!("K = {key}, V = {value}"), &inputs, &upstream(&mut rng, lengths));
    }
}

/// A state handed over transposed: refused where the shape tells, and a split run shows that the layout is one.
#[test]
fn e3_the_states_layout() {
    let b = Reference::<f64>::new();
    let mut rng = rng("e3");
    let upload = |values: &Values| crate::runner::upload(&b, values, &[]).unwrap();
    let odd = inputs(&mut rng, (1, 4, 1, 5, 3), -0.1).with("initial_state", ArrayD::zeros(IxDyn(&[1, 1, 3, 5])));
    let odd = upload(&odd);
    let error = b.forward(&config(Form::Recurrent), Inputs::from_named(|name| odd.get(name)).unwrap()).err().unwrap();
    assert_eq!(
        error.to_string(),
        "kda::forward: `initial_state` is [1, 1, 3, 5], expected [B, HV, K, V] = [1, 1, 5, 3] (K from `q`, V from `v`)"
    );

    let start = rounded(Values::new().with("s", draw::normal(&mut rng, &[1, 1, 4, 4])));
    let whole = inputs(&mut rng, (1, 16, 1, 4, 4), -0.1).with("initial_state", start.at("s").clone());
    let part = |range: std::ops::Range<usize>, state: &ArrayD<f64>| {
        let mut part = whole.map(|name, x| {
            if name == "initial_state" {
                x.clone()
            } else {
                x.slice_axis(Axis(1), Slice::from(range.clone())).to_owned()
            }
        });
        part.set("initial_state", state.clone());
        upload(&part)
    };
    for form in FORMS {
        let run = |inputs: &crate::named::Named<_>| {
            let (outputs, _) = b.forward(&config(form), Inputs::from_named(|name| inputs.get(name)).unwrap()).unwrap();
            (b.download(&outputs.o).unwrap(), b.download(&outputs.final_state.unwrap()).unwrap())
        };
        let (o, last) = run(&upload(&whole));
        let (first, between) = run(&part(0..8, start.at("s")));
        let (second, end) = run(&part(8..16, &between));
        let joined = ndarray::concatenate(Axis(1), &[first.view(), second.view()]).unwrap();
        for (name, got, want) in [("o", joined, o), ("final_state", end, last)] {
            let comparison = compare(name, got.view(), want.view(), &FORM);
            assert!(comparison.passes(), "{form:?}: {comparison}");
        }
    }
}

/// g = 0 and g = -0.0 are the delta rule without a gate: nothing is clamped, so the two have the same bits, and they
/// are those of the plain recurrence without a decay in it.
#[test]
fn k4_a_gate_of_zero_is_no_gate() {
    for time in [1, 2, 15, 16, 17, 63, 64, 65, 130] {
        let lengths = (1, time, 2, 5, 3);
        let mut rng = rng("k4");
        let zero = inputs(&mut rng, lengths, 0.0);
        let negative = zero.clone().with("g", ArrayD::from_elem(zero.at("g").raw_dim(), -0.0));
        let upstream = upstream(&mut rng, lengths);
        let ungated = KdaOp::naive(&config(Form::Recurrent), &zero, Some(&upstream), Some("decay-dropped"));
        for form in FORMS {
            let (one, other) = (run_f64(form, &zero, &upstream), run_f64(form, &negative, &upstream));
            for (one, other) in [(&one.outputs, &other.outputs), (&one.grads, &other.grads)] {
                for (name, want) in one.iter() {
                    assert!(same_bits(name, other.at(name).view(), want.view()).passes(), "{form:?} {name}");
                }
            }
            assert_close(&format!("T = {time} {form:?}"), &one, &ungated, &FORM);
        }
    }
}
