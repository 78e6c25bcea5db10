//! `expert`: description for the harness.

use dormouse_reference::expert::{self, Config, Expert, Ffn, Inputs, Outputs, Params};
use dormouse_reference::{FactorFormat, Precision, Result};
use ndarray::{Array2, ArrayD, Axis, Ix1, Ix2, IxDyn};
use proptest::prelude::*;
use rand_chacha::ChaCha8Rng;

use super::rounding;
use super::spectral::{Map, MapGrads, draw_factor, draw_s, rows};
use crate::compare::{Tolerance, compare, same_bits};
use crate::description::{Case, Gate, Law, Mutant, Operation, OperationOn, Run, TensorSpec, Tolerances, glue};
use crate::draw;
use crate::gates::det::equal_bits;
use crate::gates::passed;
use crate::named::{Named, Values};
use crate::runner::Runner;
use crate::tolerance;

/// The description. `plus` is an output that is u itself, as in the description of `spectral`.
pub struct ExpertOp;

/// Value families: ordinary, heavy-tailed with large channels, and every second direction of every map switched off.
const FAMILIES: [&str; 3] = ["normal", "activations", "s-zero"];

/// A gradient passes eight products in a row, four forward and four back. Each adds rounding of 6e-8 of its terms, and in
/// shapes this small the terms of a product now and then cancel to a tenth.
const DIFF_F32: Tolerance = Tolerance {
    slope: 5e-6,
    ..Tolerance::new(5e-6, "f32 rounding 6e-8 in each of 8 products whose terms cancel to a tenth")
};

/// A large channel is 30 times the others. Where its terms cancel in a sum, or silu takes them away, what is left has the
/// size of the others and the rounding of the large one.
const DIFF_F32_ACTIVATIONS: Tolerance = Tolerance {
    slope: 2e-5,
    ..Tolerance::new(2e-5, "f32 rounding 6e-8 times 30, the ratio of channels, times sqrt(100)")
};

fn case(
    batch: usize,
    tokens: usize,
    [experts, d, f, r]: [usize; 4],
    family: &'static str,
    ffn: Ffn,
    plus: bool,
) -> Case<Config> {
    let word = if ffn == Ffn::Silu { "silu" } else { "swiglu" };
    let mut present = if plus { vec!["plus"] } else { vec![] };
    if ffn == Ffn::Swiglu {
        present.extend(["gate_u", "gate_s", "gate_v"]);
    }
    Case {
        name: format!(
            "b{batch}-t{tokens}-e{experts}-d{d}-f{f}-r{r}-{family}-{word}{}",
            if plus { "-plus" } else { "" }
        ),
        config: Config { precision: Precision::Full, ffn, format: FactorFormat::F32 },
        dims: vec![("B", batch), ("T", tokens), ("E", experts), ("D", d), ("F", f), ("R", r)],
        family,
        present,
    }
}

/// The same case with rounded factors.
fn in_format(format: FactorFormat, case: Case<Config>) -> Case<Config> {
    if format == FactorFormat::F32 {
        return case;
    }
    Case { name: format!("{}-{format}", case.name), config: Config { format, ..case.config }, ..case }
}

impl Operation for ExpertOp {
    type Config = Config;

    const STEM: &'static str = "expert";

    // Two maps of two products forward, and the same four on the way back.
    const PRODUCTS: u32 = 8;

    fn set_precision(config: &mut Config, precision: Precision) {
        config.precision = precision;
    }

    fn tensors() -> Vec<TensorSpec> {
        vec![
            TensorSpec::input("u", &["B", "T", "D"]),
            TensorSpec::param("up_u", &["E", "D", "R"]),
            TensorSpec::param("up_s", &["E", "R"]),
            TensorSpec::param("up_v", &["E", "F", "R"]),
            TensorSpec::param("down_u", &["E", "F", "R"]),
            TensorSpec::param("down_s", &["E", "R"]),
            TensorSpec::param("down_v", &["E", "D", "R"]),
            TensorSpec::param("gate_u", &["E", "D", "R"]),
            TensorSpec::param("gate_s", &["E", "R"]),
            TensorSpec::param("gate_v", &["E", "F", "R"]),
            TensorSpec::output("y", &["E", "B", "T", "D"]),
            TensorSpec::output("plus", &["B", "T", "D"]),
        ]
    }

    fn cases() -> Vec<Case<Config>> {
        use Ffn::{Silu, Swiglu};
        let mut cases = vec![
            case(2, 5, [2, 6, 9, 4], "normal", Silu, true),
            case(2, 5, [2, 6, 9, 4], "normal", Swiglu, true),
            case(1, 1, [1, 3, 4, 3], "normal", Silu, false),
            case(2, 4, [3, 9, 17, 5], "activations", Silu, false),
            case(2, 4, [3, 9, 17, 5], "activations", Swiglu, true),
            case(2, 3, [2, 5, 7, 4], "s-zero", Swiglu, false),
            // More rows than one block of ds, and products large enough to be spread over the cores.
            case(1, 150, [2, 16, 24, 8], "normal", Silu, true),
            case(1, 4, [5, 6, 7, 3], "normal", Swiglu, false),
            // A rank that a device's chained kernels do not hold.
            case(1, 4, [2, 5, 6, 66], "normal", Silu, false),
            case(0, 4, [2, 3, 4, 3], "normal", Silu, true),
            case(2, 0, [2, 3, 4, 3], "normal", Swiglu, false),
        ];
        for format in FactorFormat::ALL.into_iter().filter(|format| *format != FactorFormat::F32) {
            cases.push(in_format(format, case(2, 5, [2, 6, 9, 4], "normal", Swiglu, true)));
            cases.push(in_format(format, case(1, 7, [3, 9, 17, 5], "activations", Silu, false)));
        }
        cases
    }

    fn production() -> Vec<Case<Config>> {
        vec![
            case(8, 512, [3, 768, 2048, 64], "normal", Ffn::Silu, false),
            case(2, 40, [2, 80, 96, 72], "normal", Ffn::Silu, true),
        ]
    }

    fn strategy() -> BoxedStrategy<Case<Config>> {
        let shape = (1..4usize, 3..12usize, 3..16usize, 3..7usize);
        let format = 0..FactorFormat::ALL.len();
        (format, 1..3usize, 1..7usize, shape, 0..FAMILIES.len(), any::<bool>(), any::<bool>())
            .prop_map(|(format, b, t, (e, d, f, r), family, swiglu, plus)| {
                let ffn = if swiglu { Ffn::Swiglu } else { Ffn::Silu };
                in_format(FactorFormat::ALL[format], case(b, t, [e, d, f, r], FAMILIES[family], ffn, plus))
            })
            .boxed()
    }

    fn draw(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
        let shape = case.shape(&Self::spec("u"));
        let u = match case.family {
            "activations" => draw::activation_like(rng, &shape),
            _ => draw::normal(rng, &shape),
        };
        let mut values = Values::new().with("u", u);
        for spec in Self::tensors().iter().filter(|s| s.role == crate::description::Role::Param) {
            if spec.name.starts_with("gate") && !case.has(spec.name) {
                continue;
            }
            let shape = case.shape(spec);
            let value = match spec.name.ends_with("_s") {
                true => draw_s(rng, &shape, case.family == "s-zero"),
                false => draw_factor(rng, &shape),
            };
            values.set(spec.name, value);
        }
        values
    }

    fn naive(config: &Config, inputs: &Values, upstream: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
        let is = |name: &str| twist == Some(name);
        let u = rows(inputs.at("u"));
        let experts = inputs.at("up_s").shape()[0];
        let masters = inputs;
        let inputs = &rounded(config.format, masters, twist);
        let swiglu = config.ffn == Ffn::Swiglu;
        let (mut ys, mut runs) = (Vec::new(), Vec::new());
        for e in 0..experts {
            let down = if is("down-of-the-first-expert") { 0 } else { e };
            let h = map(inputs, "up", e).forward(&u);
            let g = if swiglu { map(inputs, "gate", e).forward(&u) } else { h.clone() };
            let act = Array2::from_shape_fn(h.raw_dim(), |i| match (swiglu, twist) {
                (false, Some("sigmoid-for-silu")) => sigma(h[i]),
                (true, Some("gate-and-up-swapped")) => silu(h[i]) * g[i],
                (true, Some("gate-without-silu")) => g[i] * h[i],
                (true, _) => silu(g[i]) * h[i],
                (false, _) => silu(h[i]),
            });
            ys.extend(map(inputs, "down", down).forward(&act));
            runs.push((h, g, act));
        }
        let shape = [&[experts], inputs.at("u").shape()].concat();
        let y = ArrayD::from_shape_vec(IxDyn(&shape), ys).expect("as many elements");
        let outputs = Values::new().with("y", y).with("plus", inputs.at("u").clone());
        let mut grads = Values::new();
        if let Some(upstream) = upstream {
            let mut du = Array2::zeros(u.raw_dim());
            let names: &[&'static str] = if swiglu { &["up", "down", "gate"] } else { &["up", "down"] };
            for (e, (h, g, act)) in runs.iter().enumerate() {
                let dy = rows(&upstream.at("y").index_axis(Axis(0), e).to_owned());
                let from = if is("down-gradient-from-h") { h } else { act };
                let inputs = if is("backward-with-masters") { masters } else { inputs };
                let down = map(inputs, "down", e).backward(from, &dy);
                let slope = |x: f64| {
                    let second = if is("slope-without-second-term") { 0.0 } else { x * sigma(x) * (1.0 - sigma(x)) };
                    sigma(x) + second
                };
                let dh = Array2::from_shape_fn(h.raw_dim(), |i| match swiglu {
                    true if is("dh-without-gate") => down.dx[i],
                    true => down.dx[i] * silu(g[i]),
                    false => down.dx[i] * slope(h[i]),
                });
                let dg = Array2::from_shape_fn(h.raw_dim(), |i| match is("dg-without-h") {
                    true => down.dx[i] * slope(g[i]),
                    false => down.dx[i] * h[i] * slope(g[i]),
                });
                let up = map(inputs, "up", e).backward(&u, &dh);
                let last = e + 1 == experts;
                if !(is("du-misses-last-expert") && last) {
                    du += &up.dx;
                }
                let mut all = vec![up, down];
                if swiglu {
                    let gate = map(inputs, "gate", e).backward(&u, &dg);
                    if !is("du-without-gate") {
                        du += &gate.dx;
                    }
                    all.push(gate);
                }
                for (name, mut parts) in names.iter().zip(all) {
                    if is("gradient-masked-by-rounding") {
                        parts.mask_by_rounding(map(masters, name, e), map(inputs, name, e));
                    }
                    if is("last-expert-without-gradient") && last {
                        parts.du.fill(0.0);
                    }
                    store(&mut grads, inputs, name, e, &parts);
                }
            }
            if let Some(plus) = upstream.get("plus").filter(|_| !is("plus-dropped")) {
                let times = if is("plus-once-per-expert") { experts as f64 } else { 1.0 };
                du.scaled_add(times, &rows(plus));
            }
            grads.set("u", super::spectral::shaped(du, inputs.at("u").shape()));
        }
        Run { outputs, grads }
    }

    fn laws() -> Vec<Law<Self>> {
        vec![
            Law::Independent("B"),
            Law::Independent("T"),
            Law::Independent("E"),
            Law::Causal("T"),
            Law::Custom { name: "the odd part of an expert", check: odd_part },
            Law::Exact { name: "a format is its numbers, straight through", check: straight_through },
        ]
    }

    fn mutants() -> Vec<Mutant> {
        let in_rounding = rounding::TWISTS.map(|twist| (twist, Gate::Form));
        let in_expert = [
            ("sigmoid-for-silu", Gate::Meta),
            ("gate-and-up-swapped", Gate::Meta),
            ("gate-without-silu", Gate::Form),
            ("down-of-the-first-expert", Gate::Form),
            ("slope-without-second-term", Gate::Fd),
            ("dh-without-gate", Gate::Adj),
            ("dg-without-h", Gate::Fd),
            ("down-gradient-from-h", Gate::Fd),
            ("du-misses-last-expert", Gate::Fd),
            ("du-without-gate", Gate::Adj),
            ("last-expert-without-gradient", Gate::Adj),
            ("plus-dropped", Gate::Fd),
            ("plus-once-per-expert", Gate::Adj),
        ];
        in_expert.into_iter().chain(in_rounding).map(|(twist, caught_by)| Mutant { twist, caught_by }).collect()
    }

    fn straight_through(config: &Config) -> &'static [&'static str] {
        match config.format {
            FactorFormat::F32 => &[],
            _ => &["up_u", "up_v", "down_u", "down_v", "gate_u", "gate_v"],
        }
    }

    // As in `DIFF_F32_ACTIVATIONS` over `DIFF_F32`.
    fn amplification(case: &Case<Config>) -> f64 {
        if case.family == "activations" { 4.0 } else { 1.0 }
    }

    fn tolerances(case: &Case<Config>) -> Tolerances {
        let diff_f32 = if case.family == "activations" { DIFF_F32_ACTIVATIONS } else { DIFF_F32 };
        Tolerances { diff_f32, ..tolerance::WELL_CONDITIONED }
    }

    fn optional_upstream() -> &'static [&'static str] {
        &["plus"]
    }
}

/// The inputs with every factor as its format has it.
fn rounded(format: FactorFormat, inputs: &Values, twist: Option<&str>) -> Values {
    inputs.map(|name, a| {
        if !(name.ends_with("_u") || name.ends_with("_v")) {
            return a.clone();
        }
        let mut a = a.clone();
        for mut factor in a.outer_iter_mut() {
            let of_expert = factor.view().into_dimensionality::<Ix2>().expect("rank 2");
            let of_expert = rounding::rounded(format, of_expert, twist);
            factor.assign(&of_expert);
        }
        a
    })
}

fn sigma(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn silu(x: f64) -> f64 {
    x * sigma(x)
}

/// The names of a map's factors.
fn factors(name: &str) -> [&'static str; 3] {
    match name {
        "up" => ["up_u", "up_s", "up_v"],
        "down" => ["down_u", "down_s", "down_v"],
        _ => ["gate_u", "gate_s", "gate_v"],
    }
}

/// One map of one expert.
fn map<'a>(inputs: &'a Values, name: &str, e: usize) -> Map<'a> {
    let [u, s, v] = factors(name).map(|factor| inputs.at(factor).index_axis(Axis(0), e));
    Map {
        u: u.into_dimensionality::<Ix2>().expect("rank 2"),
        s: s.into_dimensionality::<Ix1>().expect("rank 1"),
        v: v.into_dimensionality::<Ix2>().expect("rank 2"),
    }
}

/// Writes one map's gradients into expert `e` of the gradients by name.
fn store(grads: &mut Values, inputs: &Values, name: &str, e: usize, parts: &MapGrads) {
    let [u, s, v] = factors(name);
    for (factor, part) in
        [(u, parts.du.view().into_dyn()), (s, parts.ds.view().into_dyn()), (v, parts.dv.view().into_dyn())]
    {
        if grads.get(factor).is_none() {
            grads.set(factor, ArrayD::zeros(inputs.at(factor).raw_dim()));
        }
        let whole = grads.get_mut(factor).expect("just set");
        whole.index_axis_mut(Axis(0), e).assign(&part);
    }
}

/// Swiglu is odd in its up map, bit for bit. For silu, silu(h) - silu(-h) = h: negating the up map and subtracting leaves
/// down(up(u)), two linear maps.
fn odd_part(
    runner: &dyn Runner<ExpertOp>,
    case: &Case<Config>,
    rng: &mut ChaCha8Rng,
) -> std::result::Result<f64, String> {
    let inputs = ExpertOp::draw(case, rng);
    let negated = inputs.map(|name, a| if name == "up_u" { -a } else { a.clone() });
    let run = |inputs: &Values| runner.run(&case.config, inputs, None).map_err(|e| e.to_string());
    let (plain, negated) = (run(&inputs)?, run(&negated)?);
    let (plain, negated) = (plain.outputs.at("y"), negated.outputs.at("y"));
    let comparison = match case.config.ffn {
        // Adding 0 makes -0 and 0 one.
        Ffn::Swiglu => same_bits("y", (-negated + 0.0).view(), (plain + 0.0).view()),
        Ffn::Silu => {
            let u = rows(inputs.at("u"));
            let inputs = rounded(case.config.format, &inputs, None);
            let linear: Vec<f64> = (0..case.dim("E"))
                .flat_map(|e| map(&inputs, "down", e).forward(&map(&inputs, "up", e).forward(&u)))
                .collect();
            let linear = ArrayD::from_shape_vec(plain.raw_dim(), linear).expect("as many elements");
            // Ternary factors may be orthogonal to the last bit: then the linear part is all rounding of terms that have
            // the size of the rest.
            let size = (plain.iter().map(|y| y * y).sum::<f64>() / plain.len().max(1) as f64).sqrt();
            compare("y", (plain - negated).view(), linear.view(), &tolerance::FORM.usual(size))
        }
    };
    passed(comparison)
}

/// As the law of the same name of `spectral`.
fn straight_through(
    runner: &dyn Runner<ExpertOp>,
    case: &Case<Config>,
    rng: &mut ChaCha8Rng,
) -> std::result::Result<f64, String> {
    if case.config.format == FactorFormat::F32 {
        return Ok(0.0);
    }
    let inputs = ExpertOp::draw(case, rng).map(|_, a| a.mapv(|x| f64::from(x as f32)));
    let plain = Config { format: FactorFormat::F32, ..case.config.clone() };
    let numbers = rounded(case.config.format, &inputs, None);
    let upstream = Values::new().with("y", draw::normal(rng, &case.shape(&ExpertOp::spec("y"))));
    let run = |config: &Config, inputs: &Values| runner.run(config, inputs, Some(&upstream)).map_err(|e| e.to_string());
    equal_bits(&run(&case.config, &inputs)?, &run(&plain, &numbers)?)?;
    Ok(0.0)
}

impl<B: Expert> OperationOn<B> for ExpertOp {
    fn run(
        b: &B,
        config: &Config,
        inputs: &Named<B::Tensor>,
        upstream: Option<&Named<B::Tensor>>,
    ) -> Result<Run<B::Tensor>> {
        let op = Self::STEM;
        let params = glue::required(op, Params::from_named(glue::find(inputs)))?;
        let read: Inputs<&B::Tensor> = glue::required(op, Inputs::from_named(glue::find(inputs)))?;
        let (outputs, saved) = Expert::forward(b, config, read.clone(), params.clone())?;
        let mut grads = Named::new();
        if let Some(upstream) = upstream {
            let into = params.try_map(|_, p| glue::zeros_like(b, p))?;
            let plus = upstream.get("plus");
            let upstream = glue::required(op, Outputs::from_named(glue::find(upstream)))?;
            let returned: expert::Grads<_> = Expert::backward(b, config, &saved, upstream, plus, into.as_ref())?;
            grads.extend(returned.named().into_iter().map(|(field, t)| (glue::input_of(field), t)));
            grads.extend(into.named());
        }
        let mut outputs: Named<_> = outputs.named().into_iter().collect();
        outputs.set("plus", read.u.clone());
        Ok(Run { outputs, grads })
    }
}
