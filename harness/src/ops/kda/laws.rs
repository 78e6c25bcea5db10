//! What is true of `kda` whatever computes it: exact identities of its gradients, closed forms on special inputs, and
//! what must not change a result.

use ndarray::{Array1, ArrayD, Axis, Ix4, Slice, s};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use dormouse_reference::kda::{Config, Form, Memory};

use super::KdaOp;
use super::families::{OVERSHOOTING, unit_rows};
use crate::compare::{Tolerance, compare, same_bits};
use crate::description::{Case, Law, Operation, Run};
use crate::draw;
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

/// With the sums over channels `.` and over rows of the state:
///
/// ```text
/// q . dq = o . do                                              each token
/// k . dk + v . dv = 2 beta dbeta                               each token
/// sum v . dv + <S_0, dS_0> = sum o . do + <S_T, dS_T>          each chain
/// sum_c dg_t = sum_{s >= t} (o . do - v . dv)_s + <S_T, dS_T>  each token
/// ```
fn identities(runner: &dyn Runner<KdaOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> Check {
    let (inputs, upstream, run) = full_run(runner, case, rng)?;
    let grad = |name: &str| run.grads.get(name).ok_or_else(|| format!("`d{name}` is absent"));
    let tol = IDENTITY * amplification(case);
    let (q_dq, q_size) = row_products(inputs.at("q"), grad("q")?);
    let (o_do, o_size) = row_products(run.outputs.at("o"), upstream.at("o"));
    let mut error = worst("q.dq = o.do", &q_dq, &o_do, &(&q_size + &o_size), tol)?;

    let (k_dk, k_size) = row_products(inputs.at("k"), grad("k")?);
    let (v_dv, v_size) = row_products(inputs.at("v"), grad("v")?);
    let right = 2.0 * inputs.at("beta") * grad("beta")?;
    let size = &k_size + &v_size + right.mapv(f64::abs);
    error = error.max(worst("k.dk + v.dv = 2 beta dbeta", &(&k_dk + &v_dv), &right, &size, tol)?);

    let (s_ds, s_size) = state_products(run.outputs.at("final_state"), upstream.at("final_state"));
    let (s0_ds0, s0_size) = match inputs.get("initial_state") {
        Some(s) => state_products(s, grad("initial_state")?),
        None => (ArrayD::zeros(s_ds.raw_dim()), ArrayD::zeros(s_ds.raw_dim())),
    };
    let over_time = Axis(1);
    let left = v_dv.sum_axis(over_time) + &s0_ds0;
    let right = o_do.sum_axis(over_time) + &s_ds;
    let size = v_size.sum_axis(over_time) + o_size.sum_axis(over_time) + &s_size + &s0_size;
    error = error.max(worst("sum v.dv + <S_0, dS_0> = sum o.do + <S_T, dS_T>", &left, &right, &size, tol)?);

    let dg = grad("g")?;
    let dg_sum = dg.sum_axis(Axis(3));
    let dg_size = dg.mapv(f64::abs).sum_axis(Axis(3));
    let mut suffix = s_ds;
    let mut suffix_size = s_size;
    for t in (0..case.dim("T")).rev() {
        let at = |a: &ArrayD<f64>| a.index_axis(over_time, t).to_owned();
        suffix = suffix + at(&o_do) - at(&v_dv);
        suffix_size = suffix_size + at(&o_size) + at(&v_size) + at(&dg_size);
        error = error.max(worst(
            "sum_c dg = sum_{s>=t} (o.do - v.dv) + <S_T, dS_T>",
            &at(&dg_sum),
            &suffix,
            &suffix_size,
            tol,
        )?);
    }
    Ok(error)
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
    if time < 2 {
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
    for name in ["q", "k", "v", "g", "beta"] {
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
    let dg = run.grads.get("g").ok_or("`dg` is absent")?;
    for ((index, &dg), &g) in dg.indexed_iter().zip(inputs.at("g")) {
        if dg != 0.0 && (g == f64::NEG_INFINITY || (starts_empty && index[1] == 0)) {
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

/// The case's shape with other values.
fn inputs_like(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
    let plain = Case { family: "init", present: vec![], ..case.clone() };
    KdaOp::draw(&plain, rng)
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
    let mut inputs = inputs_like(case, rng);
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
        for h in 0..case.dim("H") {
            let mut p = Array1::<f64>::zeros(case.dim("V"));
            for t in 0..case.dim("T") {
                p = (1.0 - beta) * p + beta * &v.slice(s![b, t, h, ..]);
                let q_k: f64 = q.slice(s![b, t, h, ..]).iter().zip(&key).map(|(q, k)| q * k).sum();
                want.slice_mut(s![b, t, h, ..]).assign(&(scale(case) * q_k * &p));
            }
        }
    }
    against("o", got.outputs.at("o"), want.into_dyn())
}

/// beta = 0: S_t = Diag(e^{G_t}) S_0 and o_t = scale S_0^T (e^{G_t} q_t). Tells S_0 from its transpose.
fn only_forgets(runner: &dyn Runner<KdaOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> Check {
    let mut inputs = inputs_like(case, rng);
    inputs.get_mut("beta").expect("beta is drawn").fill(0.0);
    let start = draw::normal(rng, &case.shape(&KdaOp::spec("initial_state")));
    inputs.set("initial_state", start.clone());
    let got = run(runner, &case.config, &inputs, None)?;
    let q = inputs.at("q").view().into_dimensionality::<Ix4>().expect("four axes");
    let g = inputs.at("g").view().into_dimensionality::<Ix4>().expect("four axes");
    let start = start.into_dimensionality::<Ix4>().expect("four axes");
    let mut want_o = inputs.at("v").clone().into_dimensionality::<Ix4>().expect("four axes");
    let mut want_state = start.clone();
    for b in 0..case.dim("B") {
        for h in 0..case.dim("H") {
            let mut sum = Array1::<f64>::zeros(case.dim("K"));
            for t in 0..case.dim("T") {
                sum += &g.slice(s![b, t, h, ..]);
                let faded_q = sum.mapv(f64::exp) * q.slice(s![b, t, h, ..]);
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
    let mut inputs = inputs_like(&short, rng);
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
        for h in 0..case.dim("H") {
            for t in 0..time {
                let mut sum = Array1::<f64>::zeros(case.dim("V"));
                for s in 0..=t {
                    sum += &(q[[b, t, h, s]] * &v.slice(s![b, s, h, ..]));
                }
                want.slice_mut(s![b, t, h, ..]).assign(&(scale(case) * &sum));
            }
        }
    }
    against("o", got.outputs.at("o"), want.into_dyn())
}
