//! What is true of `kda` whatever computes it: exact identities of its gradients, closed forms on special inputs, and
//! what must not change a result.

use ndarray::{Array1, Array2, ArrayD, Axis, Ix4, Slice, s};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use dormouse_reference::kda::{Config, Form, Memory};

use super::families::{OVERSHOOTING, unit_rows};
use super::{KdaOp, sequences};
use crate::compare::{Tolerance, compare, same_bits};
use crate::description::{Case, Law, Operation, Run};
use crate::draw;
use crate::gates::det::equal_bits;
use crate::gates::passed;
use crate::named::Values;
use crate::runner::Runner;

type Check = std::result::Result<f64, String>;

/// All laws.
pub fn all() -> Vec<Law<KdaOp>> {
    let custom = |name, check| Law::Custom { name, check };
    vec![
        Law::Independent("B"),
        Law::Independent("H"),
        Law::Causal("T"),
        custom("identities of the gradients", identities as crate::description::LawCheck<KdaOp>),
        custom("a split run equals one run", split),
        custom("recurrent equals chunked", forms_agree),
        custom("checkpoints change no bit", checkpoints),
        custom("dg is exactly zero where nothing is carried", nothing_carried),
        custom("no upstream gradient, no gradient", silence),
        custom("a repeated key replaces its value", repeated_key),
        custom("beta = 0 only forgets", only_forgets),
        custom("orthonormal keys store every value", orthonormal_keys),
        custom("g = 0 is the delta rule", delta_rule),
        custom("equal gates are beta", equal_gates),
        custom("value heads of a group are repeated heads", repeated_heads),
        Law::Exact { name: "sequences do not see each other", check: one_by_one },
        custom("a batch is a packed row", packed_batch),
    ]
}

/// Identities relate sums of up to a few thousand products in f64 that were rounded in different orders.
const IDENTITY: f64 = 1e-12;

fn run(
    runner: &dyn Runner<KdaOp>,
    config: &Config,
    inputs: &Values,
    upstream: Option<&Values>,
) -> Result<Run<ArrayD<f64>>, String> {
    runner.run(config, inputs, upstream).map_err(|e| e.to_string())
}

/// Inputs, upstream gradients and the run of a case. Both upstream gradients are always there.
fn full_run(
    runner: &dyn Runner<KdaOp>,
    case: &Case<Config>,
    rng: &mut ChaCha8Rng,
) -> Result<(Values, Values, Run<ArrayD<f64>>), String> {
    let inputs = KdaOp::draw(case, rng);
    let upstream = ["o", "final_state"]
        .map(|name| (name, draw::normal(rng, &case.shape(&KdaOp::spec(name)))))
        .into_iter()
        .collect();
    let all = run(runner, &case.config, &inputs, Some(&upstream))?;
    Ok((inputs, upstream, all))
}

/// The factor by which rounding is amplified in this family; see `FORM_OVERSHOOT`.
pub(super) fn amplification(case: &Case<Config>) -> f64 {
    if OVERSHOOTING.contains(&case.family) { 20.0 } else { 1.0 }
}

/// Sums over the last axis of the product, and of its absolute value.
fn row_products(x: &ArrayD<f64>, y: &ArrayD<f64>) -> (ArrayD<f64>, ArrayD<f64>) {
    let product = x * y;
    let last = Axis(product.ndim() - 1);
    (product.sum_axis(last), product.mapv(f64::abs).sum_axis(last))
}

/// `|left - right|` over `tol * (size + mean size)`, worst element, for `size` the sum of the terms' magnitudes.
///
/// The mean is there because a term can be small by cancellation inside it, and its rounding is then relative to what
/// cancelled, which is of the size that terms have elsewhere.
fn worst(name: &str, left: &ArrayD<f64>, right: &ArrayD<f64>, size: &ArrayD<f64>, tol: f64) -> Check {
    let mut worst = 0.0f64;
    let mean = size.sum() / size.len().max(1) as f64;
    for (((index, &l), &r), &size) in left.indexed_iter().zip(right).zip(size) {
        let error = (l - r).abs();
        let over = if error == 0.0 { 0.0 } else { error / (tol * (size + mean)) };
        if over.is_nan() || over > 1.0 {
            return Err(format!("{name} at {index:?}: {l:e} and {r:e}, {over:.2e} of tolerance"));
        }
        worst = worst.max(over);
    }
    Ok(worst)
}

/// With the sums over channels `.`, over rows of the state, and over the value heads of a group where q or k comes in:
///
/// ```text
/// q . dq = o . do                                              each token
/// w * dw = v * dv                                              each token and channel, with a write gate
/// k . dk + v . dv = 2 (beta dbeta + b . db + w . dw)           each token; absent gates left out
/// sum v . dv + <S_0, dS_0> = sum o . do + <S_T, dS_T>          each chain
/// sum_c dg_t = sum_{s >= t} (o . do - v . dv)_s + <S_T, dS_T>  each token
/// dg_t = sum_{s >= t} (q * dq + 2 b * db - k * dk)_s + rowsum(S_T * dS_T)   each token and channel, with an erase gate
/// ```
///
/// The last one is left out where value heads share a key, whose dk is then not one head's.
fn identities(runner: &dyn Runner<KdaOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> Check {
    let (inputs, upstream, run) = full_run(runner, case, rng)?;
    let grad = |name: &str| run.grads.get(name).ok_or_else(|| format!("`d{name}` is absent"));
    let tol = IDENTITY * amplification(case);
    let group = group(case);
    let (q_dq, q_size) = row_products(inputs.at("q"), grad("q")?);
    let (o_do, o_size) = row_products(run.outputs.at("o"), upstream.at("o"));
    let size = &q_size + by_key_head(&o_size, group);
    let mut error = worst("q.dq = o.do", &q_dq, &by_key_head(&o_do, group), &size, tol)?;

    if let Some(w) = inputs.get("w") {
        let (left, right) = (w * grad("w")?, inputs.at("v") * grad("v")?);
        let size = left.mapv(f64::abs) + right.mapv(f64::abs);
        error = error.max(worst("w dw = v dv", &left, &right, &size, tol)?);
    }

    let (k_dk, k_size) = row_products(inputs.at("k"), grad("k")?);
    let (v_dv, v_size) = row_products(inputs.at("v"), grad("v")?);
    let mut right = 2.0 * inputs.at("beta") * grad("beta")?;
    let mut right_size = right.mapv(f64::abs);
    for gate in ["b", "w"] {
        if let Some(values) = inputs.get(gate) {
            let (products, size) = row_products(values, grad(gate)?);
            right += &(2.0 * products);
            right_size += &(2.0 * size);
        }
    }
    let left = &k_dk + by_key_head(&v_dv, group);
    let size = &k_size + by_key_head(&(&v_size + &right_size), group);
    let name = "k.dk + v.dv = 2 (beta dbeta + b.db + w.dw)";
    error = error.max(worst(name, &left, &by_key_head(&right, group), &size, tol)?);

    let (s_ds, s_size) = state_products(run.outputs.at("final_state"), upstream.at("final_state"));
    let (s0_ds0, s0_size) = match inputs.get("initial_state") {
        Some(s) => state_products(s, grad("initial_state")?),
        None => (ArrayD::zeros(s_ds.raw_dim()), ArrayD::zeros(s_ds.raw_dim())),
    };
    let dg = grad("g")?;
    let dg_sum = dg.sum_axis(Axis(3));
    let dg_size = dg.mapv(f64::abs).sum_axis(Axis(3));
    for (n, (batch, tokens)) in sequences(&inputs).into_iter().enumerate() {
        let over = |a: &ArrayD<f64>| {
            let row = a.index_axis(Axis(0), batch);
            row.slice_axis(Axis(0), Slice::from(tokens.clone())).sum_axis(Axis(0))
        };
        let state = |a: &ArrayD<f64>| a.index_axis(Axis(0), n).to_owned();
        let left = over(&v_dv) + state(&s0_ds0);
        let right = over(&o_do) + state(&s_ds);
        let size = over(&v_size) + over(&o_size) + state(&s_size) + state(&s0_size);
        error = error.max(worst("sum v.dv + <S_0, dS_0> = sum o.do + <S_T, dS_T>", &left, &right, &size, tol)?);

        let (mut suffix, mut suffix_size) = (state(&s_ds), state(&s_size));
        for t in tokens.rev() {
            let at = |a: &ArrayD<f64>| a.index_axis(Axis(0), batch).index_axis(Axis(0), t).to_owned();
            suffix = suffix + at(&o_do) - at(&v_dv);
            suffix_size = suffix_size + at(&o_size) + at(&v_size) + at(&dg_size);
            let name = "sum_c dg = sum_{s>=t} (o.do - v.dv) + <S_T, dS_T>";
            error = error.max(worst(name, &at(&dg_sum), &suffix, &suffix_size, tol)?);
        }
    }
    if let Some(b) = inputs.get("b").filter(|_| group == 1) {
        let [q, k] = [inputs.at("q") * grad("q")?, inputs.at("k") * grad("k")?];
        let b = 2.0 * b * grad("b")?;
        let size = q.mapv(f64::abs) + k.mapv(f64::abs) + b.mapv(f64::abs) + dg.mapv(f64::abs);
        let terms = q + b - k;
        let (s_ds, s_size) = row_products(run.outputs.at("final_state"), upstream.at("final_state"));
        for (n, (batch, tokens)) in sequences(&inputs).into_iter().enumerate() {
            let state = |a: &ArrayD<f64>| a.index_axis(Axis(0), n).to_owned();
            let (mut suffix, mut suffix_size) = (state(&s_ds), state(&s_size));
            for t in tokens.rev() {
                let at = |a: &ArrayD<f64>| a.index_axis(Axis(0), batch).index_axis(Axis(0), t).to_owned();
                suffix += &at(&terms);
                suffix_size += &at(&size);
                let name = "dg = sum_{s>=t} (q dq + 2 b db - k dk) + rowsum(S_T dS_T)";
                error = error.max(worst(name, &at(dg), &suffix, &suffix_size, tol)?);
            }
        }
    }
    Ok(error)
}

/// Value heads a key head has.
fn group(case: &Case<Config>) -> usize {
    case.dim("HV") / case.dim("H")
}

/// `[B, T, HV, ..]` summed over the value heads of each key head, first to last: `[B, T, H, ..]`.
fn by_key_head(x: &ArrayD<f64>, group: usize) -> ArrayD<f64> {
    let first = |n: usize| x.slice_axis(Axis(2), Slice::new(n as isize, None, group as isize)).to_owned();
    (1..group).fold(first(0), |sum, n| sum + first(n))
}

fn state_products(s: &ArrayD<f64>, ds: &ArrayD<f64>) -> (ArrayD<f64>, ArrayD<f64>) {
    let product = s * ds;
    let sum = |a: ArrayD<f64>| a.sum_axis(Axis(3)).sum_axis(Axis(2));
    (sum(product.clone()), sum(product.mapv(f64::abs)))
}

/// Two runs, the second from the state the first ends in, give what one run gives; and at the border
/// rowsum(S * dS) = dg of the next token.
fn split(runner: &dyn Runner<KdaOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> Check {
    let time = case.dim("T");
    if time < 2 || case.has("cu_seqlens") {
        return Ok(0.0);
    }
    let (inputs, upstream, whole) = full_run(runner, case, rng)?;
    let at = rng.random_range(1..time);
    let part = |values: &Values, range: std::ops::Range<usize>| -> Values {
        values.map(|name, x| match KdaOp::spec(name).axis("T") {
            Some(axis) => x.slice_axis(Axis(axis), Slice::from(range.clone())).to_owned(),
            None => x.clone(),
        })
    };
    let first_inputs = part(&inputs, 0..at);
    let between = run(runner, &case.config, &first_inputs, None)?.outputs.at("final_state").clone();
    let second_inputs = part(&inputs, at..time).with("initial_state", between.clone());
    let second = run(runner, &case.config, &second_inputs, Some(&part(&upstream, at..time)))?;
    let d_between = second.grads.get("initial_state").ok_or("`dinitial_state` is absent")?.clone();
    let first =
        run(runner, &case.config, &first_inputs, Some(&part(&upstream, 0..at).with("final_state", d_between.clone())))?;

    // The recurrent form does the same operations either way; chunks have other borders, and so other roundings.
    let exact = case.config.form == Form::Recurrent;
    let tolerance = Tolerance::new(IDENTITY * amplification(case), "f64, other chunk borders");
    let check = |name: &str, got: ArrayD<f64>, want: &ArrayD<f64>| -> Check {
        let comparison = if exact {
            same_bits(name, got.view(), want.view())
        } else {
            compare(name, got.view(), want.view(), &tolerance)
        };
        if comparison.passes() { Ok(comparison.worst) } else { Err(format!("split at {at}: {comparison}")) }
    };
    let mut error = check("o", join(&first.outputs, &second.outputs, "o")?, whole.outputs.at("o"))?;
    error = error.max(check("final_state", second.outputs.at("final_state").clone(), whole.outputs.at("final_state"))?);
    for name in whole.grads.names().filter(|name| *name != "initial_state") {
        error = error.max(check(&format!("d{name}"), join(&first.grads, &second.grads, name)?, whole.grads.at(name))?);
    }
    if inputs.get("initial_state").is_some() {
        let got = first.grads.get("initial_state").ok_or("`dinitial_state` is absent")?.clone();
        error = error.max(check("dinitial_state", got, whole.grads.at("initial_state"))?);
    }

    // dg of token `at` is [B, H, K], as are the sums over the rows of the state.
    let (s_ds, size) = row_products(&between, &d_between);
    let dg = whole.grads.at("g").index_axis(Axis(1), at).to_owned();
    let identity = worst("rowsum(S * dS) = dg", &s_ds, &dg, &size, IDENTITY * amplification(case))?;
    Ok(error.max(identity))
}

fn join(first: &Values, second: &Values, name: &'static str) -> Result<ArrayD<f64>, String> {
    let find = |values: &Values| values.get(name).cloned().ok_or_else(|| format!("`{name}` is absent"));
    let (first, second) = (find(first)?, find(second)?);
    ndarray::concatenate(Axis(1), &[first.view(), second.view()]).map_err(|e| format!("`{name}`: {e}"))
}

/// The other form gives the same result.
fn forms_agree(runner: &dyn Runner<KdaOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> Check {
    let (inputs, upstream, one) = full_run(runner, case, rng)?;
    let form = match case.config.form {
        Form::Recurrent => Form::Chunked { chunk: [4, 16, 64][rng.random_range(0..3)] },
        Form::Chunked { .. } => Form::Recurrent,
    };
    let other = run(runner, &Config { form, ..case.config.clone() }, &inputs, Some(&upstream))?;
    let tolerance = KdaOp::tolerances(case).form;
    let mut error = 0.0f64;
    for (prefix, one, other) in [("", &one.outputs, &other.outputs), ("d", &one.grads, &other.grads)] {
        for (name, one) in one.iter() {
            let other = other.get(name).ok_or_else(|| format!("`{prefix}{name}` is absent in {form:?}"))?;
            let comparison = compare(&format!("{prefix}{name}"), other.view(), one.view(), &tolerance);
            if !comparison.passes() {
                return Err(format!("{form:?}: {comparison}"));
            }
            error = error.max(comparison.worst);
        }
    }
    Ok(error)
}

/// How often states are kept, and whether they are kept at all, changes memory and time, and not a bit of the result.
fn checkpoints(runner: &dyn Runner<KdaOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> Check {
    let (inputs, upstream, one) = full_run(runner, case, rng)?;
    for (checkpoint_every, memory) in [(1, Memory::Save), (5, Memory::Recompute), (usize::MAX, Memory::Save)] {
        let config = Config { checkpoint_every, memory, ..case.config.clone() };
        let other = run(runner, &config, &inputs, Some(&upstream))?;
        for (prefix, one, other) in [("", &one.outputs, &other.outputs), ("d", &one.grads, &other.grads)] {
            for (name, one) in one.iter() {
                let other = other.get(name).ok_or_else(|| format!("`{prefix}{name}` is absent"))?;
                let comparison = same_bits(&format!("{prefix}{name}"), other.view(), one.view());
                if !comparison.passes() {
                    return Err(format!("{memory:?} every {checkpoint_every}: {comparison}"));
                }
            }
        }
    }
    Ok(0.0)
}

/// dg at the first token of an empty state, and wherever g is minus infinity, is zero and not merely small.
fn nothing_carried(runner: &dyn Runner<KdaOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> Check {
    let (inputs, _, run) = full_run(runner, case, rng)?;
    let starts_empty = inputs.get("initial_state").is_none();
    let starts: Vec<(usize, usize)> = sequences(&inputs).into_iter().map(|(b, tokens)| (b, tokens.start)).collect();
    let dg = run.grads.get("g").ok_or("`dg` is absent")?;
    for ((index, &dg), &g) in dg.indexed_iter().zip(inputs.at("g")) {
        let first = starts.contains(&(index[0], index[1]));
        if dg != 0.0 && (g == f64::NEG_INFINITY || (starts_empty && first)) {
            return Err(format!("dg{index:?} is {dg:e} at g = {g}"));
        }
    }
    Ok(0.0)
}

/// With zero upstream gradients every gradient is exactly zero; nothing is left over from anywhere.
fn silence(runner: &dyn Runner<KdaOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> Check {
    let inputs = KdaOp::draw(case, rng);
    let o = ArrayD::zeros(case.shape(&KdaOp::spec("o")));
    let run = run(runner, &case.config, &inputs, Some(&Values::new().with("o", o)))?;
    for (name, gradient) in run.grads.iter() {
        if let Some((index, value)) = gradient.indexed_iter().find(|(_, x)| **x != 0.0) {
            return Err(format!("d{name}{index:?} is {value:e}"));
        }
    }
    Ok(0.0)
}

/// The case's shape without options and with ordinary values; every batch entry is a sequence.
fn plain(case: &Case<Config>) -> Case<Config> {
    let mut plain = Case { family: "init", present: vec![], ..case.clone() };
    let batch = case.dim("B");
    for (axis, len) in &mut plain.dims {
        match *axis {
            "N" => *len = batch,
            "N + 1" => *len = batch + 1,
            _ => {}
        }
    }
    plain
}

fn scale(case: &Case<Config>) -> f64 {
    case.config.scale.unwrap_or(1.0 / (case.dim("K") as f64).sqrt())
}

fn against(name: &str, got: &ArrayD<f64>, want: ArrayD<f64>) -> Check {
    let tolerance = Tolerance::new(1e-11, "a closed form in f64; beta = 2 sums up to 130 alternating terms");
    let comparison = compare(name, got.view(), want.view(), &tolerance);
    passed(comparison)
}

/// One unit key, g = 0, no initial state: p_t = (1 - beta) p_{t-1} + beta v_t and o_t = scale (q_t . k) p_t. With
/// beta = 1 a token reads back its own value, with beta = 2 the memory alternates.
fn repeated_key(runner: &dyn Runner<KdaOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> Check {
    let mut inputs = KdaOp::draw(&plain(case), rng);
    let beta = [0.3, 1.0, 2.0][rng.random_range(0..3)];
    let key = unit_rows(draw::normal(rng, &[case.dim("K")]));
    let broadcast = key.broadcast(inputs.at("k").shape()).expect("K is the last axis").to_owned();
    inputs.set("k", broadcast);
    inputs.get_mut("g").expect("g is drawn").fill(0.0);
    inputs.get_mut("beta").expect("beta is drawn").fill(beta);
    let got = run(runner, &case.config, &inputs, None)?;
    let q = inputs.at("q").view().into_dimensionality::<Ix4>().expect("four axes");
    let v = inputs.at("v").view().into_dimensionality::<Ix4>().expect("four axes");
    let mut want = v.to_owned();
    for b in 0..case.dim("B") {
        for h in 0..case.dim("HV") {
            let mut p = Array1::<f64>::zeros(case.dim("V"));
            for t in 0..case.dim("T") {
                p = (1.0 - beta) * p + beta * &v.slice(s![b, t, h, ..]);
                let q_k: f64 = q.slice(s![b, t, h / group(case), ..]).iter().zip(&key).map(|(q, k)| q * k).sum();
                want.slice_mut(s![b, t, h, ..]).assign(&(scale(case) * q_k * &p));
            }
        }
    }
    against("o", got.outputs.at("o"), want.into_dyn())
}

/// beta = 0: S_t = Diag(e^{G_t}) S_0 and o_t = scale S_0^T (e^{G_t} q_t). Tells S_0 from its transpose.
fn only_forgets(runner: &dyn Runner<KdaOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> Check {
    let mut inputs = KdaOp::draw(&plain(case), rng);
    inputs.get_mut("beta").expect("beta is drawn").fill(0.0);
    let start = draw::normal(rng, &plain(case).shape(&KdaOp::spec("initial_state")));
    inputs.set("initial_state", start.clone());
    let got = run(runner, &case.config, &inputs, None)?;
    let q = inputs.at("q").view().into_dimensionality::<Ix4>().expect("four axes");
    let g = inputs.at("g").view().into_dimensionality::<Ix4>().expect("four axes");
    let start = start.into_dimensionality::<Ix4>().expect("four axes");
    let mut want_o = inputs.at("v").clone().into_dimensionality::<Ix4>().expect("four axes");
    let mut want_state = start.clone();
    for b in 0..case.dim("B") {
        for h in 0..case.dim("HV") {
            let mut sum = Array1::<f64>::zeros(case.dim("K"));
            for t in 0..case.dim("T") {
                sum += &g.slice(s![b, t, h, ..]);
                let faded_q = sum.mapv(f64::exp) * q.slice(s![b, t, h / group(case), ..]);
                want_o
                    .slice_mut(s![b, t, h, ..])
                    .assign(&(scale(case) * start.slice(s![b, h, .., ..]).t().dot(&faded_q)));
            }
            let faded = sum.mapv(f64::exp).insert_axis(Axis(1)) * start.slice(s![b, h, .., ..]);
            want_state.slice_mut(s![b, h, .., ..]).assign(&faded);
        }
    }
    let error = against("o", got.outputs.at("o"), want_o.into_dyn())?;
    Ok(error.max(against("final_state", got.outputs.at("final_state"), want_state.into_dyn())?))
}

/// Orthonormal keys, beta = 1, g = 0, no initial state: o_t = scale sum_{s <= t} (q_t . k_s) v_s, a linear attention.
/// Applies to the first K tokens, as many as there are orthonormal keys.
fn orthonormal_keys(runner: &dyn Runner<KdaOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> Check {
    let time = case.dim("T").min(case.dim("K"));
    let mut short = case.clone();
    for (axis, len) in &mut short.dims {
        if *axis == "T" {
            *len = time;
        }
    }
    let mut inputs = KdaOp::draw(&plain(&short), rng);
    let mut k = ArrayD::zeros(inputs.at("k").raw_dim()).into_dimensionality::<Ix4>().expect("four axes");
    for t in 0..time {
        k.slice_mut(s![.., t, .., t]).fill(1.0);
    }
    inputs.set("k", k.into_dyn());
    inputs.get_mut("g").expect("g is drawn").fill(0.0);
    inputs.get_mut("beta").expect("beta is drawn").fill(1.0);
    let got = run(runner, &case.config, &inputs, None)?;
    let q = inputs.at("q").view().into_dimensionality::<Ix4>().expect("four axes");
    let v = inputs.at("v").view().into_dimensionality::<Ix4>().expect("four axes");
    let mut want = v.to_owned();
    for b in 0..case.dim("B") {
        for h in 0..case.dim("HV") {
            for t in 0..time {
                let mut sum = Array1::<f64>::zeros(case.dim("V"));
                for s in 0..=t {
                    sum += &(q[[b, t, h / group(case), s]] * &v.slice(s![b, s, h, ..]));
                }
                want.slice_mut(s![b, t, h, ..]).assign(&(scale(case) * &sum));
            }
        }
    }
    against("o", got.outputs.at("o"), want.into_dyn())
}

/// g = 0: the delta rule as its authors write it, on the transposed state, with o = S q. And g = -0.0 has the same bits.
fn delta_rule(runner: &dyn Runner<KdaOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> Check {
    let mut inputs = KdaOp::draw(&plain(case), rng);
    inputs.get_mut("g").expect("g is drawn").fill(0.0);
    let upstream = Values::new().with("o", draw::normal(rng, &case.shape(&KdaOp::spec("o"))));
    let got = run(runner, &case.config, &inputs, Some(&upstream))?;
    let q = inputs.at("q").view().into_dimensionality::<Ix4>().expect("four axes");
    let k = inputs.at("k").view().into_dimensionality::<Ix4>().expect("four axes");
    let v = inputs.at("v").view().into_dimensionality::<Ix4>().expect("four axes");
    let mut want = v.to_owned();
    for b in 0..case.dim("B") {
        for h in 0..case.dim("HV") {
            let mut state = Array2::<f64>::zeros((case.dim("V"), case.dim("K")));
            for t in 0..case.dim("T") {
                let beta = inputs.at("beta")[[b, t, h]];
                let key = k.slice(s![b, t, h / group(case), ..]);
                let missing = &v.slice(s![b, t, h, ..]) - &state.dot(&key);
                state += &(beta * missing.insert_axis(Axis(1)) * key.insert_axis(Axis(0)));
                let read = state.dot(&q.slice(s![b, t, h / group(case), ..]));
                want.slice_mut(s![b, t, h, ..]).assign(&(scale(case) * read));
            }
        }
    }
    let error = against("o", got.outputs.at("o"), want.into_dyn())?;
    inputs.get_mut("g").expect("g is drawn").fill(-0.0);
    equal_bits(&run(runner, &case.config, &inputs, Some(&upstream))?, &got)?;
    Ok(error)
}

/// b = w = beta in every channel is KDA, bit for bit but for dbeta, which is the sum of the gates' gradients; and so is
/// one gate of beta beside beta itself.
fn equal_gates(runner: &dyn Runner<KdaOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> Check {
    let (mut inputs, upstream, _) = full_run(runner, case, rng)?;
    inputs.remove("b");
    inputs.remove("w");
    let kda = run(runner, &case.config, &inputs, Some(&upstream))?;
    let gate = |like: &str| {
        let beta = inputs.at("beta").view().insert_axis(Axis(3));
        beta.broadcast(inputs.at(like).shape()).expect("one number for all channels").to_owned()
    };
    let (b, w) = (gate("g"), gate("v"));
    let mut worst_error = 0.0f64;
    for gates in [vec![("b", b.clone()), ("w", w.clone())], vec![("b", b)], vec![("w", w)]] {
        let mut gated = inputs.clone();
        gated.extend(gates.iter().cloned());
        let mut got = run(runner, &case.config, &gated, Some(&upstream))?;
        let mut dbeta = got.grads.remove("beta").ok_or("`dbeta` is absent")?;
        let mut size = dbeta.mapv(f64::abs);
        if gates.len() == 2 && dbeta.iter().any(|x| *x != 0.0) {
            return Err("dbeta is not zero where both gates are present".to_owned());
        }
        for (name, _) in &gates {
            let of_gate = got.grads.remove(name).ok_or_else(|| format!("`d{name}` is absent"))?;
            dbeta += &of_gate.sum_axis(Axis(3));
            size += &of_gate.mapv(f64::abs).sum_axis(Axis(3));
        }
        let mut want = kda.clone();
        let want_dbeta = want.grads.remove("beta").ok_or("`dbeta` is absent")?;
        equal_bits(&got, &want)?;
        let tol = IDENTITY * amplification(case);
        worst_error = worst_error.max(worst("sum db + sum dw = dbeta", &dbeta, &want_dbeta, &size, tol)?);
    }
    Ok(worst_error)
}

/// Grouped value heads are the same call with every key head repeated, bit for bit; dq and dk are the sums over them,
/// first to last.
fn repeated_heads(runner: &dyn Runner<KdaOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> Check {
    let group = group(case);
    if group == 1 {
        return Ok(0.0);
    }
    let (inputs, upstream, grouped) = full_run(runner, case, rng)?;
    let repeated = inputs.map(|name, x| match name {
        "q" | "k" => {
            let heads: Vec<usize> = (0..case.dim("HV")).map(|h| h / group).collect();
            x.select(Axis(2), &heads)
        }
        _ => x.clone(),
    });
    let mut want = run(runner, &case.config, &repeated, Some(&upstream))?;
    for name in ["q", "k"] {
        let sums = by_key_head(want.grads.at(name), group);
        want.grads.set(name, sums);
    }
    equal_bits(&grouped, &want)?;
    Ok(0.0)
}

/// Every sequence of a packed row has the bits of a call of its own.
fn one_by_one(runner: &dyn Runner<KdaOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> Check {
    if !case.has("cu_seqlens") {
        return Ok(0.0);
    }
    let (inputs, upstream, whole) = full_run(runner, case, rng)?;
    for (n, (_, tokens)) in sequences(&inputs).into_iter().enumerate() {
        let alone = |values: &Values| -> Values {
            let of_sequence = values.map(|name, x| {
                let (axis, part) = match KdaOp::spec(name).axis("T") {
                    Some(axis) => (axis, Slice::from(tokens.clone())),
                    None => (0, Slice::from(n..n + 1)),
                };
                x.slice_axis(Axis(axis), part).to_owned()
            });
            of_sequence.iter().filter(|(name, _)| *name != "cu_seqlens").map(|(n, x)| (n, x.clone())).collect()
        };
        let got = run(runner, &case.config, &alone(&inputs), Some(&alone(&upstream)))?;
        let want = Run { outputs: alone(&whole.outputs), grads: alone(&whole.grads) };
        equal_bits(&got, &want).map_err(|e| format!("sequence {n} of tokens {tokens:?}: {e}"))?;
    }
    Ok(0.0)
}

/// A batch of equally long sequences has the same bits packed.
fn packed_batch(runner: &dyn Runner<KdaOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> Check {
    if case.has("cu_seqlens") {
        return Ok(0.0);
    }
    let (inputs, upstream, whole) = full_run(runner, case, rng)?;
    let (batch, time) = (case.dim("B"), case.dim("T"));
    let pack = |values: &Values| {
        values.map(|name, x| {
            if KdaOp::spec(name).axis("T").is_none() {
                return x.clone();
            }
            let shape = [&[1, batch * time], &x.shape()[2..]].concat();
            x.to_shape(shape).expect("as many elements").to_owned()
        })
    };
    let cuts = ArrayD::from_shape_fn(vec![batch + 1], |n| (n[0] * time) as f64);
    let packed = run(runner, &case.config, &pack(&inputs).with("cu_seqlens", cuts), Some(&pack(&upstream)))?;
    equal_bits(&packed, &Run { outputs: pack(&whole.outputs), grads: pack(&whole.grads) })?;
    Ok(0.0)
}
