//! `engram`: description for the harness.
//!
//! `order` is a function of `rows`, so the glue computes it and it is no tensor here. `plus`, what other readers of c have
//! sent back, appears as the upstream gradient of an output `plus` that is c itself, as in `linear`.

use dormouse_reference::engram::{self, Config, Engram, Inputs, Outputs, Params};
use dormouse_reference::{DType, Precision, Result, Tensors, engram_hash};
use ndarray::{Array1, ArrayD, Axis, IxDyn, s};
use proptest::prelude::*;
use rand_chacha::ChaCha8Rng;

use crate::compare::{Tolerance, compare, same_bits};
use crate::description::{Case, Gate, Law, Mutant, Operation, OperationOn, Run, TensorSpec, Tolerances, glue};
use crate::draw;
use crate::gates::passed;
use crate::named::{Named, Values};
use crate::runner::Runner;
use crate::tolerance;

/// The description.
pub struct EngramOp;

/// Value families: ordinary; a query with large channels and heavy tails; a query and a table row so small that eps decides;
/// one row for all places; only the first and the last row; a table as it is initialised. A score of exactly zero is a law:
/// there the second derivative jumps, and differences are not differences.
const FAMILIES: [&str; 6] = ["normal", "activations", "tiny-row", "one-row", "both-ends", "initial"];

fn case(
    [batch, tokens, width]: [usize; 3],
    [orders, table, w]: [usize; 3],
    family: &'static str,
    plus: bool,
) -> Case<Config> {
    Case {
        name: format!(
            "b{batch}-t{tokens}-d{width}-o{orders}-r{table}-w{w}-{family}{}",
            if plus { "-plus" } else { "" }
        ),
        config: Config { eps: 1e-5, gate_eps: 1e-2, precision: Precision::Full },
        dims: vec![
            ("B", batch),
            ("T", tokens),
            ("D", width),
            ("O", orders),
            ("R", table),
            ("W", w),
            ("OW", orders * w),
        ],
        family,
        present: if plus { vec!["plus"] } else { vec![] },
    }
}

impl Operation for EngramOp {
    type Config = Config;

    const STEM: &'static str = "engram";

    // The projections, and on the way back the product with their transpose.
    const PRODUCTS: u32 = 2;

    fn set_precision(config: &mut Config, precision: Precision) {
        config.precision = precision;
    }

    fn tensors() -> Vec<TensorSpec> {
        vec![
            TensorSpec::input("c", &["B", "T", "D"]),
            TensorSpec::data("rows", &["B", "T", "O"]),
            TensorSpec::param("table", &["R", "W"]),
            TensorSpec::param("key", &["OW", "D"]),
            TensorSpec::param("value", &["OW", "D"]),
            TensorSpec::output("m", &["B", "T", "D"]),
            TensorSpec::output("plus", &["B", "T", "D"]),
        ]
    }

    fn cases() -> Vec<Case<Config>> {
        vec![
            case([2, 5, 8], [3, 12, 4], "normal", true),
            case([2, 7, 16], [3, 300, 8], "activations", true),
            case([3, 4, 6], [3, 9, 5], "tiny-row", false),
            case([2, 6, 5], [2, 7, 3], "one-row", false),
            case([1, 9, 7], [3, 40, 2], "both-ends", true),
            case([2, 8, 24], [3, 96, 32], "initial", false),
            case([1, 1, 3], [1, 1, 1], "normal", false),
            // More rows than one task, and many places to a row of the table.
            case([1, 300, 8], [3, 11, 3], "normal", true),
            case([0, 4, 6], [3, 9, 2], "normal", false),
            case([2, 0, 6], [3, 9, 2], "normal", true),
        ]
    }

    fn production() -> Vec<Case<Config>> {
        // As a model starts: of so many ordinary scores one lies beside zero, where the gate is steepest (docs/adr/0014).
        vec![case([8, 512, 768], [3, 98_304, 32], "initial", true)]
    }

    fn strategy() -> BoxedStrategy<Case<Config>> {
        let dims = [1..4usize, 1..9usize, 2..24usize];
        (dims, [1..4usize, 1..60usize, 1..9usize], 0..FAMILIES.len(), any::<bool>())
            .prop_map(|(dims, table, family, plus)| case(dims, table, FAMILIES[family], plus))
            .boxed()
    }

    fn draw(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
        let (c_shape, rows_shape, table_rows) =
            (case.shape(&Self::spec("c")), case.shape(&Self::spec("rows")), case.dim("R"));
        let mut c = match case.family {
            "activations" => draw::activation_like(rng, &c_shape),
            _ => draw::normal(rng, &c_shape),
        };
        if case.family == "tiny-row"
            && let Some(mut row) = c.rows_mut().into_iter().next()
        {
            row *= 1e-3;
        }
        let rows = match case.family {
            "one-row" => ArrayD::from_elem(IxDyn(&rows_shape), draw::ids(rng, &[1], table_rows)[[0]]),
            "both-ends" => draw::ids(rng, &rows_shape, 2).mapv(|end| end * (table_rows - 1) as f64),
            _ => draw::ids(rng, &rows_shape, table_rows),
        };
        let mut table = draw::normal(rng, &case.shape(&Self::spec("table")));
        match case.family {
            "initial" => table *= 0.02,
            "tiny-row" => table.index_axis_mut(Axis(0), 0).mapv_inplace(|x| 1e-3 * x),
            _ => {}
        }
        let weight = case.shape(&Self::spec("key"));
        let scale = (weight[0] as f64).powf(-0.5);
        let mut values = Values::new().with("c", c).with("rows", rows).with("table", table);
        for name in ["key", "value"] {
            values.set(name, scale * draw::normal(rng, &weight));
        }
        values
    }

    fn naive(config: &Config, inputs: &Values, upstream: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
        let is = |name: &str| twist == Some(name);
        let (c, rows) = (inputs.at("c"), inputs.at("rows"));
        let (table, w_key, w_value) = (inputs.at("table"), inputs.at("key"), inputs.at("value"));
        let (batch, tokens, width) = (c.shape()[0], c.shape()[1], c.shape()[2]);
        let (orders, w) = (rows.shape()[2], table.shape()[1]);
        let mut m = ArrayD::zeros(c.raw_dim());
        let mut dc: ArrayD<f64> = ArrayD::zeros(c.raw_dim());
        let [mut dtable, mut dw_key, mut dw_value] = [table, w_key, w_value].map(|x| ArrayD::<f64>::zeros(x.raw_dim()));
        for b in 0..batch {
            for t in 0..tokens {
                let from = if is("row-of-the-position-before") { t.max(1) - 1 } else { t };
                let row = |j: usize| rows[[b, from, if is("first-order-for-all") { 0 } else { j }]] as usize;
                let mut e = vec![0.0; orders * w];
                for j in 0..orders {
                    for i in 0..w {
                        let to = if is("orders-swapped") { orders - 1 - j } else { j };
                        e[to * w + i] = table[[row(j), i]];
                    }
                }
                let project =
                    |weight: &ArrayD<f64>, d: usize| (0..orders * w).map(|i| e[i] * weight[[i, d]]).sum::<f64>();
                let key: Vec<f64> = (0..width).map(|d| project(w_key, d)).collect();
                let value: Vec<f64> = if is("value-is-the-key") {
                    key.clone()
                } else {
                    (0..width).map(|d| project(w_value, d)).collect()
                };
                let query: Vec<f64> = (0..width).map(|d| c[[b, t, d]]).collect();
                let rms = |x: &[f64]| (x.iter().map(|x| x * x).sum::<f64>() / width as f64 + config.eps).sqrt();
                let rk = if is("key-not-normalised") { 1.0 } else { 1.0 / rms(&key) };
                let rq = if is("query-not-normalised") { 1.0 } else { 1.0 / rms(&query) };
                let ck: Vec<f64> = key.iter().map(|x| rk * x).collect();
                let cq: Vec<f64> = query.iter().map(|x| rq * x).collect();
                let inner: f64 = ck.iter().zip(&cq).map(|(a, b)| a * b).sum();
                let root_d = if is("score-without-root-d") { 1.0 } else { (width as f64).sqrt() };
                let score = inner / root_d;
                let r = (score.abs() + config.gate_eps).sqrt();
                // The same root as a difference: sign(s) (sqrt(|s| + eps) - sqrt(eps)).
                let mut x = score.signum() * (r - config.gate_eps.sqrt());
                if is("score-without-root") {
                    x = score;
                }
                if is("root-without-sign") {
                    x = x.abs();
                }
                if is("root-not-from-zero") {
                    x = score.signum() * r;
                }
                let gate = 1.0 / (1.0 + (-x).exp());
                for d in 0..width {
                    m[[b, t, d]] = if is("gate-dropped") { value[d] } else { gate * value[d] };
                }
                let Some(upstream) = upstream else { continue };
                let dm: Vec<f64> = (0..width).map(|d| upstream.at("m")[[b, t, d]]).collect();
                let dgate: f64 = dm.iter().zip(&value).map(|(a, b)| a * b).sum();
                let slope = if is("slope-of-gate-is-gate") { gate } else { gate * (1.0 - gate) };
                let root_slope = if is("root-slope-doubled") { 1.0 / r } else { 0.5 / r };
                let ds = if is("gate-is-constant") { 0.0 } else { dgate * slope * root_slope };
                let mut dkey = vec![0.0; width];
                for d in 0..width {
                    let along = |flag: &str, own: f64| if is(flag) { 0.0 } else { own * score / width as f64 };
                    dkey[d] = rk * ds * (cq[d] / root_d - along("key-norm-is-constant", ck[d]));
                    dc[[b, t, d]] = rq * ds * (ck[d] / root_d - along("query-norm-is-constant", cq[d]));
                    if let Some(plus) = upstream.get("plus") {
                        let readers = f64::from(u8::from(!is("plus-dropped")) + u8::from(is("plus-twice")));
                        dc[[b, t, d]] += readers * plus[[b, t, d]];
                    }
                }
                let gate = if is("value-gradient-without-gate") { 1.0 } else { gate };
                let last = b + 1 == batch && t + 1 == tokens;
                for j in 0..orders {
                    for i in 0..w {
                        let mut de = 0.0;
                        for d in 0..width {
                            let at = [j * w + i, d];
                            dw_key[at] += e[at[0]] * dkey[d];
                            dw_value[at] += e[at[0]] * gate * dm[d];
                            if !is("table-not-through-key") {
                                de += dkey[d] * w_key[at];
                            }
                            if !is("table-not-through-value") {
                                de += gate * dm[d] * w_value[at];
                            }
                        }
                        if is("repeated-row-overwrites") {
                            dtable[[row(j), i]] = de;
                        } else if !(is("table-misses-last-place") && last && j + 1 == orders) {
                            dtable[[row(j), i]] += de;
                        }
                    }
                }
            }
        }
        let outputs = Values::new().with("m", m).with("plus", c.clone());
        let mut grads = Values::new();
        if upstream.is_some() {
            grads = grads.with("c", dc).with("table", dtable).with("key", dw_key).with("value", dw_value);
        }
        Run { outputs, grads }
    }

    fn laws() -> Vec<Law<Self>> {
        vec![
            Law::Independent("B"),
            Law::Independent("T"),
            Law::Causal("T"),
            Law::Exact { name: "rows that no place names are not read", check: other_rows_are_unseen },
            Law::Exact { name: "a table of the batch's rows alone gives the same bits", check: compact_table },
            Law::Custom { name: "a query and its opposite open the gate once between them", check: opposite_queries },
            Law::Custom { name: "a query of zero leaves the gate half open", check: zero_query },
        ]
    }

    fn mutants() -> Vec<Mutant> {
        [
            ("row-of-the-position-before", Gate::Meta),
            ("first-order-for-all", Gate::Form),
            ("orders-swapped", Gate::Form),
            ("value-is-the-key", Gate::Form),
            ("key-not-normalised", Gate::Form),
            ("query-not-normalised", Gate::Form),
            ("score-without-root-d", Gate::Form),
            ("score-without-root", Gate::Form),
            ("root-without-sign", Gate::Meta),
            ("root-not-from-zero", Gate::Form),
            ("gate-dropped", Gate::Form),
            ("slope-of-gate-is-gate", Gate::Fd),
            ("root-slope-doubled", Gate::Adj),
            ("gate-is-constant", Gate::Fd),
            ("key-norm-is-constant", Gate::Fd),
            ("query-norm-is-constant", Gate::Fd),
            ("value-gradient-without-gate", Gate::Adj),
            ("table-not-through-key", Gate::Fd),
            ("table-not-through-value", Gate::Fd),
            ("repeated-row-overwrites", Gate::Fd),
            ("table-misses-last-place", Gate::Adj),
            ("plus-dropped", Gate::Fd),
            ("plus-twice", Gate::Adj),
        ]
        .map(|(twist, caught_by)| Mutant { twist, caught_by })
        .to_vec()
    }

    /// The root's slope 1 / (2 (|s| + gate_eps)^(1/2)) is steep in s itself: an error of s moves it by 1 / (2 gate_eps) of
    /// that, 50 at a score of zero. s is a mean of D products of size 1, of which key and query carry f32's two roundings of
    /// 1.2e-7 whatever the order of the sum; one position with a score near zero can carry a whole gradient.
    fn tolerances(case: &Case<Config>) -> Tolerances {
        let tol = tolerance::DIFF_F32.tol + 2.0 * f64::from(f32::EPSILON) / (2.0 * case.config.gate_eps);
        let diff_f32 =
            Tolerance::new(tol, "f32 rounding, and two roundings of a score times the root's 1 / (2 gate_eps)");
        Tolerances { diff_f32, ..tolerance::WELL_CONDITIONED }
    }

    fn optional_upstream() -> &'static [&'static str] {
        &["plus"]
    }

    fn integers() -> &'static [&'static str] {
        &["rows"]
    }
}

type LawResult = std::result::Result<f64, String>;

fn run(
    runner: &dyn Runner<EngramOp>,
    case: &Case<Config>,
    inputs: &Values,
    upstream: &Values,
) -> std::result::Result<Run<ArrayD<f64>>, String> {
    runner.run(&case.config, inputs, Some(upstream)).map_err(|e| e.to_string())
}

fn upstream(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
    Values::new().with("m", draw::normal(rng, &case.shape(&EngramOp::spec("m"))))
}

fn whole_numbers(ids: &ArrayD<f64>) -> Vec<u32> {
    ids.iter().map(|&id| id as u32).collect()
}

/// NaN in every row of the table that is not named gives the same bits, and no gradient there.
fn other_rows_are_unseen(runner: &dyn Runner<EngramOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = EngramOp::draw(case, rng);
    let upstream = upstream(case, rng);
    let clean = run(runner, case, &inputs, &upstream)?;
    let named = whole_numbers(inputs.at("rows"));
    for (row, mut values) in inputs.get_mut("table").expect("the table is drawn").outer_iter_mut().enumerate() {
        if !named.contains(&(row as u32)) {
            values.fill(f64::NAN);
        }
    }
    let poisoned = run(runner, case, &inputs, &upstream)?;
    passed(same_bits("m", poisoned.outputs.at("m").view(), clean.outputs.at("m").view()))?;
    for (name, clean) in clean.grads.iter() {
        passed(same_bits(&format!("d{name}"), poisoned.grads.at(name).view(), clean.view()))?;
    }
    for (row, values) in clean.grads.at("table").outer_iter().enumerate() {
        if !named.contains(&(row as u32)) && values.iter().any(|d| *d != 0.0) {
            return Err(format!("row {row} is not named and has gradient {values}"));
        }
    }
    Ok(0.0)
}

/// What a table in host memory does: its unique rows travel, and places name them by rank.
fn compact_table(runner: &dyn Runner<EngramOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let inputs = EngramOp::draw(case, rng);
    let upstream = upstream(case, rng);
    let full = run(runner, case, &inputs, &upstream)?;
    let rows = whole_numbers(inputs.at("rows"));
    let compact = engram_hash::compact(&rows, &engram_hash::order(&rows));
    if rows.is_empty() {
        return Ok(0.0);
    }
    let unique: Vec<usize> = compact.unique.iter().map(|&row| row as usize).collect();
    let slots = compact.slots.iter().map(|&slot| f64::from(slot)).collect();
    let mut small = inputs.clone();
    small.set("rows", ArrayD::from_shape_vec(inputs.at("rows").raw_dim(), slots).expect("a slot for every place"));
    small.set("table", inputs.at("table").select(Axis(0), &unique));
    let small = run(runner, case, &small, &upstream)?;
    passed(same_bits("m", small.outputs.at("m").view(), full.outputs.at("m").view()))?;
    for name in ["c", "key", "value"] {
        passed(same_bits(&format!("d{name}"), small.grads.at(name).view(), full.grads.at(name).view()))?;
    }
    let dtable = full.grads.at("table").select(Axis(0), &unique);
    passed(same_bits("dtable", small.grads.at("table").view(), dtable.view()))
}

/// gate(s) + gate(-s) = 1, so m(c) + m(-c) is the value, whatever c is.
fn opposite_queries(runner: &dyn Runner<EngramOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = EngramOp::draw(case, rng);
    let shape = inputs.at("c").shape().to_vec();
    let mut sums = Vec::new();
    for _ in 0..2 {
        let c = draw::normal(rng, &shape);
        let mut sum: ArrayD<f64> = ArrayD::zeros(IxDyn(&shape));
        for sign in [1.0, -1.0] {
            inputs.set("c", sign * &c);
            sum += runner.run(&case.config, &inputs, None).map_err(|e| e.to_string())?.outputs.at("m");
        }
        sums.push(sum);
    }
    passed(compare("m(c) + m(-c)", sums[0].view(), sums[1].view(), &tolerance::FORM))
}

/// At c = 0 and at rows of zeros the score is zero: m is half the value, and the gradient is that of the root's slope there.
fn zero_query(runner: &dyn Runner<EngramOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = EngramOp::draw(case, rng);
    let upstream = upstream(case, rng);
    let c = inputs.at("c").clone();
    inputs.get_mut("table").expect("the table is drawn").index_axis_mut(Axis(0), 0).fill(0.0);
    let mut m = |factor: f64| {
        inputs.set("c", factor * &c);
        let got = run(runner, case, &inputs, &upstream)?;
        let want = EngramOp::naive(&case.config, &inputs, Some(&upstream), None);
        let mut worst = 0.0f64;
        for (name, want) in want.grads.iter() {
            worst = worst.max(passed(compare(
                &format!("d{name}"),
                got.grads.at(name).view(),
                want.view(),
                &tolerance::FORM,
            ))?);
        }
        Ok::<_, String>((got.outputs.at("m").clone(), worst))
    };
    let ((half, worst), (plus, _), (minus, _)) = (m(0.0)?, m(1.0)?, m(-1.0)?);
    let comparison = compare("2 m(0)", (2.0 * half).view(), (plus + minus).view(), &tolerance::FORM);
    Ok(worst.max(passed(comparison)?))
}

impl<B: Engram> OperationOn<B> for EngramOp {
    fn run(
        b: &B,
        config: &Config,
        inputs: &Named<B::Tensor>,
        upstream: Option<&Named<B::Tensor>>,
    ) -> Result<Run<B::Tensor>> {
        let op = Self::STEM;
        let params = glue::required(op, Params::from_named(glue::find(inputs)))?;
        let mut ids = glue::required(op, Inputs::from_named(glue::find(inputs)))?;
        let order = order_of(b, ids.rows)?;
        ids.order = Some(&order);
        let c = ids.c;
        let (outputs, saved) = Engram::forward(b, config, ids, params.clone())?;
        let mut grads = Named::new();
        if let Some(upstream) = upstream {
            let into = params.try_map(|_, p| glue::zeros_like(b, p))?;
            let plus = upstream.get("plus");
            let upstream = glue::required(op, Outputs::from_named(glue::find(upstream)))?;
            let returned: engram::Grads<_> = Engram::backward(b, config, &saved, upstream, plus, into.as_ref())?;
            grads.extend(returned.named().into_iter().map(|(field, t)| (glue::input_of(field), t)));
            grads.extend(into.named());
        }
        let outputs: Named<_> = outputs.named().into_iter().collect();
        Ok(Run { outputs: outputs.with("plus", c.clone()), grads })
    }
}

/// The places of `rows` sorted by row: what the data worker hands to an operation that sums by rows.
pub(super) fn order_of<B: Tensors>(b: &B, rows: &B::Tensor) -> Result<B::Tensor> {
    let order = engram_hash::order(&whole_numbers(&b.download(rows)?));
    let tensor = b.persistent(&[order.len()], DType::U32)?;
    let order: Array1<f64> = order.into_iter().map(f64::from).collect();
    b.upload(order.slice(s![..]).into_dyn(), &tensor)?;
    Ok(tensor)
}
