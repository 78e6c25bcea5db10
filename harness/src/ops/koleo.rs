//! `koleo`: description for the harness.
//!
//! The loss has a kink where two neighbours of a row are equally far. Drawn rows have no such ties, and finite differences
//! find a step below the gap; what holds at a tie is a law. `plus`, what other readers of z have sent back, appears as the
//! upstream gradient of an output `plus` that is z itself, as in `linear`.

use dormouse_reference::Result;
use dormouse_reference::koleo::{self, Config, Inputs, Koleo, Outputs};
use ndarray::{ArrayD, Axis, IxDyn};
use proptest::prelude::*;
use rand_chacha::ChaCha8Rng;

use super::mask_vector::{draw_mask, poison};
use crate::compare::{compare, same_bits};
use crate::description::{Case, Gate, Law, Mutant, Operation, OperationOn, Run, TensorSpec, Tolerances, glue};
use crate::draw;
use crate::gates::passed;
use crate::named::{Named, Values};
use crate::runner::Runner;
use crate::tolerance;

/// The description.
pub struct KoleoOp;

/// Families: some positions masked, none, all; one alone; two equal rows and no third one, for which they would tie. The
/// gradient of twins is zero and their curvature 1 / eps, so differences are taken beside `plus` only.
const FAMILIES: [&str; 5] = ["some", "none", "all", "one", "twins"];

fn case([batch, tokens, width]: [usize; 3], limit: usize, family: &'static str, plus: bool) -> Case<Config> {
    Case {
        name: format!("b{batch}-t{tokens}-d{width}-limit{limit}-{family}{}", if plus { "-plus" } else { "" }),
        config: Config { limit, norm_eps: 1e-6, eps: 1e-6 },
        dims: vec![("B", batch), ("T", tokens), ("D", width), ("one", 1)],
        family,
        present: if plus { vec!["plus"] } else { vec![] },
    }
}

impl Operation for KoleoOp {
    type Config = Config;

    const STEM: &'static str = "koleo";

    fn tensors() -> Vec<TensorSpec> {
        vec![
            TensorSpec::input("z", &["B", "T", "D"]),
            TensorSpec::data("mask", &["B", "T"]),
            TensorSpec::output("loss", &["one"]),
            TensorSpec::output("plus", &["B", "T", "D"]),
        ]
    }

    fn cases() -> Vec<Case<Config>> {
        vec![
            case([2, 7, 12], 256, "some", true),
            case([2, 5, 9], 256, "all", false),
            case([2, 5, 9], 256, "twins", true),
            // More masked rows than the limit: every second, every third.
            case([2, 8, 10], 5, "some", true),
            case([2, 8, 10], 6, "all", false),
            case([1, 290, 8], 256, "all", true),
            case([1, 2, 8], 256, "all", false),
            case([2, 3, 8], 256, "one", true),
            case([2, 3, 8], 256, "none", true),
            case([0, 4, 8], 256, "some", false),
            case([2, 0, 8], 256, "some", true),
        ]
    }

    fn production() -> Vec<Case<Config>> {
        vec![case([8, 512, 768], 256, "some", true)]
    }

    fn strategy() -> BoxedStrategy<Case<Config>> {
        let dims = [1..4usize, 1..9usize, 8..40usize];
        (dims, 2..20usize, 0..FAMILIES.len(), any::<bool>())
            .prop_map(|(dims, limit, family, plus)| {
                case(dims, limit, FAMILIES[family], plus || FAMILIES[family] == "twins")
            })
            .boxed()
    }

    fn draw(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
        let shape = case.shape(&Self::spec("z"));
        // A common direction, as latents have, keeps distances well below 1, so the loss never crosses zero.
        let mut z = 2.0 + draw::normal(rng, &shape);
        if case.family == "twins" && z.len() > shape[2] {
            let first = z.index_axis(Axis(0), 0).index_axis(Axis(0), 0).to_owned();
            let mut last = z.rows_mut().into_iter().last().expect("there are rows");
            last.assign(&first.into_dimensionality::<ndarray::Ix1>().expect("one row is left"));
        }
        let mask_shape = case.shape(&Self::spec("mask"));
        let mask = match case.family {
            "one" => {
                let mut mask = ArrayD::zeros(IxDyn(&mask_shape));
                if let Some(last) = mask.iter_mut().last() {
                    *last = 1.0;
                }
                mask
            }
            "twins" => {
                let mut mask = ArrayD::zeros(IxDyn(&mask_shape));
                let last = mask.len().saturating_sub(1);
                for (n, masked) in mask.iter_mut().enumerate() {
                    *masked = f64::from(u8::from(n == 0 || n == last));
                }
                mask
            }
            family => draw_mask(family, rng, &mask_shape),
        };
        Values::new().with("z", z).with("mask", mask)
    }

    fn naive(config: &Config, inputs: &Values, upstream: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
        let is = |name: &str| twist == Some(name);
        let (z, mask) = (inputs.at("z"), inputs.at("mask"));
        let width = z.shape()[2];
        let masked: Vec<usize> =
            mask.iter().enumerate().filter(|(_, m)| **m == 1.0 || is("every-row")).map(|(n, _)| n).collect();
        let limit = if is("limit-ignored") { usize::MAX } else { config.limit };
        // The smallest stride that leaves at most `limit` rows, by trying.
        let mut stride = 1;
        while !masked.is_empty() && (masked.len() - 1) / stride >= limit {
            stride += 1;
        }
        let chosen: Vec<usize> = if is("first-rows-instead-of-a-stride") {
            masked.iter().copied().take(limit).collect()
        } else {
            masked.iter().copied().step_by(stride).collect()
        };
        let flat: Vec<f64> = z.iter().copied().collect();
        let row = |n: usize| &flat[n * width..(n + 1) * width];
        let length = |n: usize| (row(n).iter().map(|x| x * x).sum::<f64>() + config.norm_eps).sqrt();
        let p: Vec<Vec<f64>> = chosen
            .iter()
            .map(|&n| row(n).iter().map(|x| if is("not-normalised") { *x } else { x / length(n) }).collect())
            .collect();
        let m = p.len();
        let square = |i: usize, j: usize| (0..width).map(|d| (p[i][d] - p[j][d]).powi(2)).sum::<f64>();
        let nearest = |i: usize| {
            let others = (0..m).filter(|&j| j != i || is("itself-is-a-neighbour"));
            let better = |a: f64, b: f64| if is("farthest-instead-of-nearest") { a > b } else { a < b };
            others.fold(None, |best: Option<(usize, f64)>, j| match best {
                Some((_, least))
                    if !(better(square(i, j), least) || (is("highest-of-equals") && square(i, j) == least)) =>
                {
                    best
                }
                _ => Some((j, square(i, j))),
            })
        };
        let nearest: Vec<(usize, f64)> = if m < 2 { vec![] } else { (0..m).filter_map(nearest).collect() };
        let eps = if is("eps-dropped") { 0.0 } else { config.eps };
        let mut loss = 0.0;
        for (_, d) in &nearest {
            let half = if is("without-half") { -1.0 } else { -0.5 };
            let d = if is("distance-not-squared") { d.sqrt() } else { *d };
            loss += half * (d + eps).ln() / if is("sum-for-mean") { 1.0 } else { m as f64 };
        }
        let outputs = Values::new().with("loss", ArrayD::from_elem(IxDyn(&[1]), loss)).with("plus", z.clone());
        let mut grads = Values::new();
        if let Some(upstream) = upstream {
            let dloss = if is("upstream-ignored") { 1.0 } else { upstream.at("loss")[[0]] };
            let mut dp = vec![vec![0.0; width]; m];
            for (i, &(j, square)) in nearest.iter().enumerate() {
                let sign = if is("sign-flipped") { 1.0 } else { -1.0 };
                let size = sign * dloss / m as f64 / (square + if is("gradient-without-eps") { 0.0 } else { eps });
                for d in 0..width {
                    dp[i][d] += size * (p[i][d] - p[j][d]);
                    if !is("neighbour-stands-still") {
                        dp[j][d] -= size * (p[i][d] - p[j][d]);
                    }
                }
            }
            let mut dz = vec![0.0; flat.len()];
            for (i, &n) in chosen.iter().enumerate() {
                let along: f64 = p[i].iter().zip(&dp[i]).map(|(a, b)| a * b).sum();
                for d in 0..width {
                    let inside = if is("length-is-constant") { dp[i][d] } else { dp[i][d] - p[i][d] * along };
                    dz[n * width + d] = if is("length-not-divided-out") { inside } else { inside / length(n) };
                }
            }
            let mut dz = ArrayD::from_shape_vec(z.raw_dim(), dz).expect("same count");
            if let Some(plus) = upstream.get("plus") {
                dz.scaled_add(f64::from(u8::from(!is("plus-dropped")) + u8::from(is("plus-twice"))), plus);
            }
            grads.set("z", dz);
        }
        Run { outputs, grads }
    }

    fn laws() -> Vec<Law<Self>> {
        vec![
            Law::Exact { name: "of equally far neighbours the lowest counts", check: ties },
            Law::Exact { name: "what a position holds that is not masked moves no bit", check: others_are_unseen },
            Law::Exact { name: "doubling z doubles nothing but the distance to norm_eps", check: scale_invariance },
            Law::Exact { name: "equal rows have a loss and no gradient", check: all_equal },
            Law::Custom { name: "the order of the rows means nothing", check: reversal },
        ]
    }

    fn mutants() -> Vec<Mutant> {
        [
            ("every-row", Gate::Meta),
            ("limit-ignored", Gate::Form),
            ("first-rows-instead-of-a-stride", Gate::Form),
            ("not-normalised", Gate::Form),
            ("itself-is-a-neighbour", Gate::Form),
            ("farthest-instead-of-nearest", Gate::Form),
            ("highest-of-equals", Gate::Meta),
            ("eps-dropped", Gate::Form),
            ("without-half", Gate::Fd),
            ("distance-not-squared", Gate::Fd),
            ("sum-for-mean", Gate::Form),
            ("upstream-ignored", Gate::Fd),
            ("sign-flipped", Gate::Adj),
            ("gradient-without-eps", Gate::Meta),
            ("neighbour-stands-still", Gate::Fd),
            ("length-is-constant", Gate::Fd),
            ("length-not-divided-out", Gate::Adj),
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

fn run(
    runner: &dyn Runner<KoleoOp>,
    config: &Config,
    inputs: &Values,
) -> std::result::Result<Run<ArrayD<f64>>, String> {
    let upstream = Values::new().with("loss", ArrayD::from_elem(IxDyn(&[1]), 1.75));
    runner.run(config, inputs, Some(&upstream)).map_err(|e| e.to_string())
}

/// Rows along the axes are all equally far: the first is everyone's neighbour, the second the first's, and no row from the
/// third on is pushed along another axis than the first's and its own.
fn ties(runner: &dyn Runner<KoleoOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let width = case.dim("D");
    let rows = (case.dim("B") * case.dim("T")).min(width);
    if rows < 3 {
        return Ok(0.0);
    }
    let mut inputs = KoleoOp::draw(case, rng);
    inputs.set("mask", ArrayD::from_elem(IxDyn(&[1, rows]), 1.0));
    inputs.set("z", ArrayD::from_shape_fn(IxDyn(&[1, rows, width]), |at| f64::from(u8::from(at[1] == at[2]))));
    let run = run(runner, &Config { limit: 256, ..case.config.clone() }, &inputs)?;
    let dz = run.grads.at("z");
    for n in 2..rows {
        for d in (0..width).filter(|&d| d != n) {
            let along_first = d == 0;
            if (dz[[0, n, d]] != 0.0) != along_first {
                return Err(format!("dz[{n}, {d}] is {:e}; row {n}'s neighbour is row 0", dz[[0, n, d]]));
            }
        }
    }
    Ok(0.0)
}

fn others_are_unseen(runner: &dyn Runner<KoleoOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = KoleoOp::draw(case, rng);
    let clean = run(runner, &case.config, &inputs)?;
    let mask = inputs.at("mask").clone();
    poison(inputs.get_mut("z").expect("z is drawn"), &mask, 0.0);
    let poisoned = run(runner, &case.config, &inputs)?;
    passed(same_bits("loss", poisoned.outputs.at("loss").view(), clean.outputs.at("loss").view()))?;
    passed(same_bits("dz", poisoned.grads.at("z").view(), clean.grads.at("z").view()))?;
    let others = clean.grads.at("z").rows().into_iter().zip(&mask).filter(|(_, masked)| **masked == 0.0);
    match others.flat_map(|(row, _)| row.to_vec()).find(|d| *d != 0.0) {
        Some(d) => Err(format!("a position that is not masked has gradient {d:e}")),
        None => Ok(0.0),
    }
}

fn scale_invariance(runner: &dyn Runner<KoleoOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = KoleoOp::draw(case, rng);
    let once = run(runner, &case.config, &inputs)?;
    *inputs.get_mut("z").expect("z is drawn") *= 2.0;
    let twice = run(runner, &Config { norm_eps: 4.0 * case.config.norm_eps, ..case.config.clone() }, &inputs)?;
    passed(same_bits("loss", twice.outputs.at("loss").view(), once.outputs.at("loss").view()))?;
    passed(same_bits("dz", (2.0 * twice.grads.at("z")).view(), once.grads.at("z").view()))
}

/// Rows that cannot be told apart have no direction to part in.
fn all_equal(runner: &dyn Runner<KoleoOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = KoleoOp::draw(case, rng);
    inputs.get_mut("z").expect("z is drawn").fill(0.25);
    let run = run(runner, &case.config, &inputs)?;
    if let Some(d) = run.grads.at("z").iter().find(|d| **d != 0.0) {
        return Err(format!("`dz` holds {d:e}, expected 0"));
    }
    let loss = run.outputs.at("loss")[[0]];
    if loss.is_finite() { Ok(0.0) } else { Err(format!("the loss is {loss}")) }
}

/// Without ties and a stride, reversed rows give the reversed gradient, within the rounding of another order of sums.
fn reversal(runner: &dyn Runner<KoleoOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let inputs = KoleoOp::draw(case, rng);
    let config = Config { limit: usize::MAX, ..case.config.clone() };
    let reversed = |array: &ArrayD<f64>| {
        let mut array = array.clone();
        array.invert_axis(Axis(0));
        array.invert_axis(Axis(1));
        array.as_standard_layout().to_owned()
    };
    let there = run(runner, &config, &inputs)?;
    let back = run(runner, &config, &inputs.map(|_, array| reversed(array)))?;
    let loss =
        passed(compare("loss", back.outputs.at("loss").view(), there.outputs.at("loss").view(), &tolerance::FORM))?;
    let dz = reversed(there.grads.at("z"));
    Ok(loss.max(passed(compare("dz", back.grads.at("z").view(), dz.view(), &tolerance::FORM))?))
}

impl<B: Koleo> OperationOn<B> for KoleoOp {
    fn run(
        b: &B,
        config: &Config,
        inputs: &Named<B::Tensor>,
        upstream: Option<&Named<B::Tensor>>,
    ) -> Result<Run<B::Tensor>> {
        let op = Self::STEM;
        let inputs = glue::required(op, Inputs::from_named(glue::find(inputs)))?;
        let z = inputs.z;
        let (outputs, saved) = Koleo::forward(b, config, inputs)?;
        let mut grads = Named::new();
        if let Some(upstream) = upstream {
            let plus = upstream.get("plus");
            let upstream = glue::required(op, Outputs::from_named(glue::find(upstream)))?;
            let returned: koleo::Grads<_> = Koleo::backward(b, config, &saved, upstream, plus)?;
            grads.extend(returned.named().into_iter().map(|(field, t)| (glue::input_of(field), t)));
        }
        let outputs: Named<_> = outputs.named().into_iter().collect();
        Ok(Run { outputs: outputs.with("plus", z.clone()), grads })
    }
}
