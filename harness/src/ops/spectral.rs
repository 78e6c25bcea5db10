//! `spectral`: description for the harness.

use dormouse_reference::spectral::{self, Config, Inputs, Outputs, Params, Spectral};
use dormouse_reference::{FactorFormat, Precision, Result};
use ndarray::{Array1, Array2, ArrayD, ArrayView1, ArrayView2, Axis, Ix1, Ix2, IxDyn, Zip};
use proptest::prelude::*;
use rand_chacha::ChaCha8Rng;

use super::rounding;
use crate::compare::same_bits;
use crate::description::{Case, Gate, Law, Mutant, Operation, OperationOn, Run, TensorSpec, Tolerances, glue};
use crate::draw;
use crate::gates::det::equal_bits;
use crate::named::{Named, Values};
use crate::runner::Runner;
use crate::tolerance;

/// The description.
///
/// `backward` also takes `plus`, the gradient that other readers of x sent. Here that is the gradient of an output named
/// `plus` which is x itself, so every gate sees that it is added, and added right.
pub struct SpectralOp;

/// Value families: ordinary, heavy-tailed with large channels, every second direction switched off, and factors with
/// elements from 2^-20 to 2^4 of the usual size.
const FAMILIES: [&str; 4] = ["normal", "activations", "s-zero", "spread"];

/// Factors whose elements lie between two numbers of their format, on the threshold, or are zero throughout a column.
const EDGES: &str = "edges";

fn case(batch: usize, tokens: usize, [i, o, r]: [usize; 3], family: &'static str, plus: bool) -> Case<Config> {
    rounded_case(FactorFormat::F32, batch, tokens, [i, o, r], family, plus)
}

fn rounded_case(
    format: FactorFormat,
    batch: usize,
    tokens: usize,
    [i, o, r]: [usize; 3],
    family: &'static str,
    plus: bool,
) -> Case<Config> {
    let word = if format == FactorFormat::F32 { String::new() } else { format!("-{format}") };
    Case {
        name: format!("b{batch}-t{tokens}-i{i}-o{o}-r{r}-{family}{word}{}", if plus { "-plus" } else { "" }),
        config: Config { precision: Precision::Full, format },
        dims: vec![("B", batch), ("T", tokens), ("I", i), ("O", o), ("R", r)],
        family,
        present: if plus { vec!["plus"] } else { vec![] },
    }
}

impl Operation for SpectralOp {
    type Config = Config;

    const STEM: &'static str = "spectral";

    // Two products forward; on the way back each gradient has one more behind the first.
    const PRODUCTS: u32 = 2;

    fn set_precision(config: &mut Config, precision: Precision) {
        config.precision = precision;
    }

    fn tensors() -> Vec<TensorSpec> {
        vec![
            TensorSpec::input("x", &["B", "T", "I"]),
            TensorSpec::param("u", &["I", "R"]),
            TensorSpec::param("s", &["R"]),
            TensorSpec::param("v", &["O", "R"]),
            TensorSpec::output("y", &["B", "T", "O"]),
            TensorSpec::output("plus", &["B", "T", "I"]),
        ]
    }

    fn cases() -> Vec<Case<Config>> {
        let mut cases = vec![
            case(2, 5, [8, 6, 4], "normal", true),
            case(2, 5, [6, 8, 4], "normal", false),
            case(1, 1, [1, 1, 1], "normal", false),
            case(2, 7, [33, 17, 5], "activations", true),
            case(2, 3, [7, 5, 4], "s-zero", true),
            // A rank above both widths is of no use and no error.
            case(1, 4, [3, 4, 6], "normal", false),
            // More rows than one block of ds, and products large enough to be spread over the cores.
            case(2, 150, [24, 40, 8], "normal", true),
            case(0, 4, [3, 4, 3], "normal", true),
            case(2, 0, [3, 4, 3], "normal", false),
        ];
        for format in FactorFormat::ALL {
            cases.push(rounded_case(format, 2, 3, [13, 9, 4], "spread", false));
            if format != FactorFormat::F32 {
                cases.push(rounded_case(format, 2, 5, [8, 6, 4], "normal", true));
                cases.push(rounded_case(format, 1, 70, [24, 40, 8], "activations", false));
                cases.push(rounded_case(format, 1, 1, [1, 1, 1], "normal", false));
                // Columns and rows of more than one cube's.
                cases.push(rounded_case(format, 1, 4, [70, 131, 11], EDGES, true));
            }
        }
        cases
    }

    fn production() -> Vec<Case<Config>> {
        vec![case(8, 512, [768, 768, 64], "activations", true)]
    }

    fn strategy() -> BoxedStrategy<Case<Config>> {
        let shape = (3..24usize, 3..24usize, 3..9usize);
        (0..FactorFormat::ALL.len(), 1..4usize, 1..9usize, shape, 0..=FAMILIES.len(), any::<bool>())
            .prop_map(|(format, b, t, (i, o, r), family, plus)| {
                let family = FAMILIES.get(family).copied().unwrap_or(EDGES);
                rounded_case(FactorFormat::ALL[format], b, t, [i, o, r], family, plus)
            })
            .boxed()
    }

    fn draw(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
        let shape = case.shape(&Self::spec("x"));
        let x = match case.family {
            "activations" => draw::activation_like(rng, &shape),
            _ => draw::normal(rng, &shape),
        };
        let mut values = Values::new()
            .with("x", x)
            .with("u", draw_factor(rng, &case.shape(&Self::spec("u"))))
            .with("s", draw_s(rng, &case.shape(&Self::spec("s")), case.family == "s-zero"))
            .with("v", draw_factor(rng, &case.shape(&Self::spec("v"))));
        for name in ["u", "v"] {
            let factor = values.get_mut(name).expect("just drawn");
            match case.family {
                "spread" => rounding::spread(factor, rng),
                EDGES => rounding::edges(factor, case.config.format, rng),
                _ => {}
            }
        }
        values
    }

    fn naive(config: &Config, inputs: &Values, upstream: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
        let is = |name: &str| twist == Some(name);
        let x = rows(inputs.at("x"));
        let masters = Map {
            u: inputs.at("u").view().into_dimensionality::<Ix2>().expect("rank 2"),
            s: inputs.at("s").view().into_dimensionality::<Ix1>().expect("rank 1"),
            v: inputs.at("v").view().into_dimensionality::<Ix2>().expect("rank 2"),
        };
        let [u, v] = [masters.u, masters.v].map(|factor| rounding::rounded(config.format, factor, twist));
        let map = Map { u: u.view(), v: v.view(), ..masters };
        let mut y = map.forward(&x);
        if is("forward-without-s") {
            y = Map { s: Array1::ones(map.s.len()).view(), ..map }.forward(&x);
        }
        if is("last-direction-dropped") {
            let mut s = map.s.to_owned();
            s[map.s.len() - 1] = 0.0;
            y = Map { s: s.view(), ..map }.forward(&x);
        }
        let mut y_shape = inputs.at("x").shape().to_vec();
        y_shape[2] = map.v.nrows();
        let mut outputs = Values::new().with("y", shaped(y, &y_shape)).with("plus", inputs.at("x").clone());
        if is("x-changed") {
            *outputs.get_mut("plus").expect("just set") += 1.0;
        }
        let mut grads = Values::new();
        if let Some(upstream) = upstream {
            let dy = rows(upstream.at("y"));
            let mut back = map.backward(&x, &dy);
            if is("backward-with-masters") {
                back = masters.backward(&x, &dy);
            }
            if is("gradient-masked-by-rounding") {
                back.mask_by_rounding(masters, map);
            }
            let ones = Array1::ones(map.s.len());
            let without_s = Map { s: ones.view(), ..map }.backward(&x, &dy);
            if is("dx-without-s") {
                back.dx = without_s.dx;
            }
            if is("du-without-s") {
                back.du = without_s.du;
            }
            if is("dv-without-s") {
                back.dv = without_s.dv;
            }
            if is("ds-times-s") {
                back.ds *= &map.s;
            }
            if is("ds-misses-last-row") && dy.nrows() > 0 {
                let last = dy.nrows() - 1;
                let mut dy = dy.clone();
                dy.row_mut(last).fill(0.0);
                back.ds = map.backward(&x, &dy).ds;
            }
            let mut dx = shaped(back.dx, inputs.at("x").shape());
            if let Some(plus) = upstream.get("plus").filter(|_| !is("plus-dropped")) {
                dx += plus;
                if is("plus-twice") {
                    dx += plus;
                }
            }
            grads = grads
                .with("x", dx)
                .with("u", back.du.into_dyn())
                .with("s", back.ds.into_dyn())
                .with("v", back.dv.into_dyn());
        }
        Run { outputs, grads }
    }

    fn laws() -> Vec<Law<Self>> {
        vec![
            Law::Independent("B"),
            Law::Independent("T"),
            Law::Causal("T"),
            Law::Custom { name: "a sign moved from U to V changes only signs", check: sign_moves },
            Law::Exact { name: "a format is its numbers, straight through", check: straight_through },
        ]
    }

    fn mutants() -> Vec<Mutant> {
        let in_rounding = rounding::TWISTS.map(|twist| (twist, Gate::Form));
        let in_map = [
            ("forward-without-s", Gate::Form),
            ("last-direction-dropped", Gate::Form),
            ("x-changed", Gate::Form),
            ("dx-without-s", Gate::Fd),
            ("du-without-s", Gate::Adj),
            ("dv-without-s", Gate::Fd),
            ("ds-times-s", Gate::Fd),
            ("ds-misses-last-row", Gate::Adj),
            ("plus-dropped", Gate::Fd),
            ("plus-twice", Gate::Adj),
        ];
        in_map.into_iter().chain(in_rounding).map(|(twist, caught_by)| Mutant { twist, caught_by }).collect()
    }

    fn straight_through(config: &Config) -> &'static [&'static str] {
        if config.format == FactorFormat::F32 { &[] } else { &["u", "v"] }
    }

    fn tolerances(_: &Case<Config>) -> Tolerances {
        tolerance::WELL_CONDITIONED
    }

    fn optional_upstream() -> &'static [&'static str] {
        &["plus"]
    }
}

/// One map in plain loops; the `expert` description uses it too.
#[derive(Clone, Copy)]
pub(crate) struct Map<'a> {
    pub u: ArrayView2<'a, f64>,
    pub s: ArrayView1<'a, f64>,
    pub v: ArrayView2<'a, f64>,
}

/// The gradients of one map.
pub(crate) struct MapGrads {
    pub dx: Array2<f64>,
    pub du: Array2<f64>,
    pub ds: Array1<f64>,
    pub dv: Array2<f64>,
}

impl MapGrads {
    /// Takes the gradient away from every element that its format does not hold exactly: what a rounding whose slope is
    /// taken to be zero would do.
    pub fn mask_by_rounding(&mut self, masters: Map<'_>, rounded: Map<'_>) {
        for (gradient, master, rounded) in [(&mut self.du, masters.u, rounded.u), (&mut self.dv, masters.v, rounded.v)]
        {
            Zip::from(gradient).and(master).and(rounded).for_each(|gradient, master, rounded| {
                if master != rounded {
                    *gradient = 0.0;
                }
            });
        }
    }
}

impl Map<'_> {
    /// The whole matrix W = U diag(s) V^T, which the reference never forms.
    fn matrix(&self) -> Array2<f64> {
        Array2::from_shape_fn((self.u.nrows(), self.v.nrows()), |(i, o)| {
            (0..self.s.len()).map(|r| self.u[[i, r]] * self.s[r] * self.v[[o, r]]).sum()
        })
    }

    /// y = x W.
    pub fn forward(&self, x: &Array2<f64>) -> Array2<f64> {
        let w = self.matrix();
        Array2::from_shape_fn((x.nrows(), w.ncols()), |(n, o)| (0..w.nrows()).map(|i| x[[n, i]] * w[[i, o]]).sum())
    }

    /// dx = dy W^T, and the chain rule from dW = x^T dy to the three factors.
    pub fn backward(&self, x: &Array2<f64>, dy: &Array2<f64>) -> MapGrads {
        let w = self.matrix();
        let (inputs, outputs, rank) = (w.nrows(), w.ncols(), self.s.len());
        let dx =
            Array2::from_shape_fn((x.nrows(), inputs), |(n, i)| (0..outputs).map(|o| dy[[n, o]] * w[[i, o]]).sum());
        let dw = Array2::from_shape_fn((inputs, outputs), |(i, o)| {
            (0..x.nrows()).map(|n| x[[n, i]] * dy[[n, o]]).sum::<f64>()
        });
        let (mut du, mut ds, mut dv) =
            (Array2::zeros((inputs, rank)), Array1::zeros(rank), Array2::zeros((outputs, rank)));
        for i in 0..inputs {
            for o in 0..outputs {
                for r in 0..rank {
                    du[[i, r]] += dw[[i, o]] * self.s[r] * self.v[[o, r]];
                    ds[r] += dw[[i, o]] * self.u[[i, r]] * self.v[[o, r]];
                    dv[[o, r]] += dw[[i, o]] * self.u[[i, r]] * self.s[r];
                }
            }
        }
        MapGrads { dx, du, ds, dv }
    }
}

/// A factor with columns of about unit length.
pub(crate) fn draw_factor(rng: &mut ChaCha8Rng, shape: &[usize]) -> ArrayD<f64> {
    let length = shape[shape.len() - 2] as f64;
    draw::normal(rng, shape) / length.sqrt()
}

/// Singular values around 1, of both signs as training may leave them; with `holes`, every second one is zero.
pub(crate) fn draw_s(rng: &mut ChaCha8Rng, shape: &[usize], holes: bool) -> ArrayD<f64> {
    let mut s = 1.0 + 0.5 * draw::normal(rng, shape);
    if holes {
        let last = Axis(shape.len() - 1);
        for mut lane in s.lanes_mut(last) {
            lane.iter_mut().skip(1).step_by(2).for_each(|s| *s = 0.0);
        }
    }
    s
}

/// All leading axes as rows.
pub(crate) fn rows(a: &ArrayD<f64>) -> Array2<f64> {
    let width = *a.shape().last().expect("at least one axis");
    let count = a.shape()[..a.ndim() - 1].iter().product();
    Array2::from_shape_vec((count, width), a.iter().copied().collect()).expect("as many elements")
}

/// Rows as a tensor of the given shape.
pub(crate) fn shaped(a: Array2<f64>, shape: &[usize]) -> ArrayD<f64> {
    ArrayD::from_shape_vec(IxDyn(shape), a.iter().copied().collect()).expect("as many elements")
}

/// (U, V) and (U D, V D) with D = diag(+-1) are the same map, bit for bit, and their gradients differ by D.
fn sign_moves(
    runner: &dyn Runner<SpectralOp>,
    case: &Case<Config>,
    rng: &mut ChaCha8Rng,
) -> std::result::Result<f64, String> {
    let inputs = SpectralOp::draw(case, rng);
    let signs = Array1::from_shape_fn(case.dim("R"), |r| if r % 3 == 0 { -1.0 } else { 1.0 });
    let flipped = inputs.map(|name, a| if name == "u" || name == "v" { a * &signs } else { a.clone() });
    let upstream = Values::new().with("y", draw::normal(rng, &case.shape(&SpectralOp::spec("y"))));
    let run = |inputs: &Values| runner.run(&case.config, inputs, Some(&upstream)).map_err(|e| e.to_string());
    let (plain, flipped) = (run(&inputs)?, run(&flipped)?);
    let same = |name: &str, got: &ArrayD<f64>, want: &ArrayD<f64>| {
        // Adding 0 makes -0 and 0 one: a flipped zero is still zero.
        let comparison = same_bits(name, (got + 0.0).view(), (want + 0.0).view());
        if comparison.passes() { Ok(()) } else { Err(comparison.to_string()) }
    };
    same("y", flipped.outputs.at("y"), plain.outputs.at("y"))?;
    same("dx", flipped.grads.at("x"), plain.grads.at("x"))?;
    same("ds", flipped.grads.at("s"), plain.grads.at("s"))?;
    same("du", flipped.grads.at("u"), &(plain.grads.at("u") * &signs))?;
    same("dv", flipped.grads.at("v"), &(plain.grads.at("v") * &signs))?;
    Ok(0.0)
}

/// With a format everything is, bit for bit, what it is without one at the numbers that the format makes of the factors:
/// the gradients of the masters, too.
fn straight_through(
    runner: &dyn Runner<SpectralOp>,
    case: &Case<Config>,
    rng: &mut ChaCha8Rng,
) -> std::result::Result<f64, String> {
    if case.config.format == FactorFormat::F32 {
        return Ok(0.0);
    }
    // What every backend can hold: a device would round the masters first, and the numbers not.
    let inputs = SpectralOp::draw(case, rng).map(|_, a| a.mapv(|x| f64::from(x as f32)));
    let plain = Config { format: FactorFormat::F32, ..case.config.clone() };
    let numbers = inputs.map(|name, a| match name {
        "u" | "v" => {
            let factor = a.view().into_dimensionality::<Ix2>().expect("rank 2");
            rounding::rounded(case.config.format, factor, None).into_dyn()
        }
        _ => a.clone(),
    });
    let upstream = Values::new().with("y", draw::normal(rng, &case.shape(&SpectralOp::spec("y"))));
    let run = |config: &Config, inputs: &Values| runner.run(config, inputs, Some(&upstream)).map_err(|e| e.to_string());
    equal_bits(&run(&case.config, &inputs)?, &run(&plain, &numbers)?)?;
    Ok(0.0)
}

impl<B: Spectral> OperationOn<B> for SpectralOp {
    fn run(
        b: &B,
        config: &Config,
        inputs: &Named<B::Tensor>,
        upstream: Option<&Named<B::Tensor>>,
    ) -> Result<Run<B::Tensor>> {
        let op = Self::STEM;
        let params = glue::required(op, Params::from_named(glue::find(inputs)))?;
        let read: Inputs<&B::Tensor> = glue::required(op, Inputs::from_named(glue::find(inputs)))?;
        let (outputs, saved) = Spectral::forward(b, config, read.clone(), params.clone())?;
        let mut grads = Named::new();
        if let Some(upstream) = upstream {
            let into = params.try_map(|_, p| glue::zeros_like(b, p))?;
            let plus = upstream.get("plus");
            let upstream = glue::required(op, Outputs::from_named(glue::find(upstream)))?;
            let returned: spectral::Grads<_> = Spectral::backward(b, config, &saved, upstream, plus, into.as_ref())?;
            grads.extend(returned.named().into_iter().map(|(field, t)| (glue::input_of(field), t)));
            grads.extend(into.named());
        }
        let mut outputs: Named<_> = outputs.named().into_iter().collect();
        outputs.set("plus", read.x.clone());
        Ok(Run { outputs, grads })
    }
}
