//! `retract`: description for the harness.
//!
//! Two oracles stand behind it: the singular value decomposition, in which the operation is a polynomial of the singular
//! values, and the QR decomposition, which says whether columns are orthonormal and span what they spanned. The first
//! is a Jacobi iteration of our own, because nalgebra's, where singular values lie close together, gives a product that
//! is off by up to 2e-8 of the matrix, far above the rounding that is to be seen here.

use dormouse_reference::Result;
use dormouse_reference::retract::{Config, Retract};
use nalgebra::{DMatrix, DVector};
use ndarray::{ArrayD, ArrayViewD, Axis, IxDyn, arr1};
use proptest::prelude::*;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use crate::compare::{Tolerance, compare, same_bits};
use crate::description::{Case, Gate, Law, Mutant, Operation, OperationOn, Run, TensorSpec, Tolerances, glue};
use crate::draw;
use crate::gates::passed;
use crate::named::{Named, Values};
use crate::runner::Runner;
use crate::tolerance;

/// The description.
pub struct RetractOp;

/// Value families: singular values in random places of a spread of 1.2, as after an optimiser step; of 4 and of 10,
/// the largest that 4 and 6 iterations take; of 100; orthonormal already; all but the smallest singular value in
/// directions that the start of the power method does not see; one zero matrix in the batch; not applied.
const FAMILIES: [(&str, f64); 8] = [
    ("step", 1.2),
    ("spread4", 4.0),
    ("spread10", 10.0),
    ("spread100", 100.0),
    ("orthonormal", 1.0),
    ("hidden", 2.0),
    ("zero", 2.0),
    ("skipped", 2.0),
];

fn case([e, n, k]: [usize; 3], iterations: usize, family: &'static str) -> Case<Config> {
    Case {
        name: format!("e{e}-n{n}-k{k}-i{iterations}-{family}"),
        config: Config { iterations, power_iterations: 5 },
        dims: vec![("E", e), ("n", n), ("k", k), ("one", 1)],
        family,
        present: vec![],
    }
}

/// Largest over smallest singular value that a family draws.
fn spread_of(family: &str) -> f64 {
    FAMILIES.iter().find(|(name, _)| *name == family).expect("the case's family is in the list").1
}

impl Operation for RetractOp {
    type Config = Config;

    const STEM: &'static str = "retract";

    const NO_GRADIENT: Option<&'static str> = Some("part of the optimiser, which nothing is differentiated through");

    fn tensors() -> Vec<TensorSpec> {
        vec![
            TensorSpec::data("factor", &["E", "n", "k"]),
            TensorSpec::data("apply", &["one"]),
            TensorSpec::output("factor_after", &["E", "n", "k"]),
            TensorSpec::output("spread", &["one"]),
        ]
    }

    fn cases() -> Vec<Case<Config>> {
        let mut cases: Vec<_> = FAMILIES.iter().map(|(family, _)| case([3, 12, 5], 4, family)).collect();
        cases.extend([
            case([1, 1, 1], 4, "step"),
            case([2, 7, 7], 3, "spread4"),
            case([2, 9, 1], 1, "step"),
            case([6, 5, 3], 4, "step"),
            case([1, 96, 40], 3, "step"),
            case([1, 150, 32], 4, "spread4"),
            case([1, 64, 64], 6, "spread10"),
            // More columns than a device has one kernel for.
            case([2, 80, 70], 5, "spread4"),
            case([0, 4, 2], 4, "step"),
        ]);
        cases
    }

    fn production() -> Vec<Case<Config>> {
        vec![case([3, 2048, 64], 4, "step")]
    }

    fn strategy() -> BoxedStrategy<Case<Config>> {
        (1..4usize, 1..12usize, 0..20usize, 1..7usize, 0..FAMILIES.len())
            .prop_map(|(e, k, more, iterations, family)| case([e, k + more, k], iterations, FAMILIES[family].0))
            .boxed()
    }

    fn draw(case: &Case<Config>, rng: &mut ChaCha8Rng) -> Values {
        let (e, n, k) = (case.dim("E"), case.dim("n"), case.dim("k"));
        let spread = spread_of(case.family);
        let mut factor = ArrayD::zeros(IxDyn(&[e, n, k]));
        for i in 0..e {
            let left = orthonormal(rng, n, k);
            let mut right = draw::normal(rng, &[k, k]);
            if case.family == "hidden" {
                right.index_axis_mut(Axis(1), 0).assign(&ArrayD::from_shape_fn(IxDyn(&[k]), |j| start(k)[j[0]]));
            }
            // The first column of Q is the first column given, so all others are orthogonal to it.
            let right = to_matrix(right.view()).qr().q();
            let singular = DVector::from_fn(k, |j, _| match j {
                0 => 1.0,
                1 => spread,
                _ => rng.random_range(1.0..=spread),
            });
            // Any scale will do: the operation divides it out.
            let scale = rng.random_range(0.3..3.0);
            let x = left * DMatrix::from_diagonal(&(singular * scale)) * right.transpose();
            if !(case.family == "zero" && i == 0) {
                factor.index_axis_mut(Axis(0), i).assign(&from_matrix(&x));
            }
        }
        let apply = if case.family == "skipped" { 0.0 } else { 1.0 };
        Values::new().with("factor", factor).with("apply", arr1(&[apply]).into_dyn())
    }

    /// In the coordinates of the singular value decomposition X = P diag(s) Q^T, the power method multiplies the
    /// coordinates Q^T u by s^2, and the iteration is a polynomial of each s.
    fn naive(config: &Config, inputs: &Values, _: Option<&Values>, twist: Option<&str>) -> Run<ArrayD<f64>> {
        let is = |name: &str| twist == Some(name);
        let mut factor = inputs.at("factor").clone();
        let mut widest = 0.0f64;
        let mut first_sigma = None;
        let idle = inputs.at("apply")[[0]] == 0.0 && !is("apply-ignored");
        for i in 0..if idle { 0 } else { factor.shape()[0] } {
            let x = to_matrix(factor.index_axis(Axis(0), i));
            if x.iter().all(|x| *x == 0.0) {
                if is("zero-divides") {
                    factor.index_axis_mut(Axis(0), i).fill(f64::NAN);
                }
                continue;
            }
            let k = x.ncols();
            let largest = if is("largest-not-divided-out") { 1.0 } else { x.amax() };
            let Svd { p, s, q } = Svd::of(&(x / largest));
            let start =
                DVector::from_fn(k, |j, _| (0.618_033_988_749_894_9 * ((j + 1) * (j + 1)) as f64).fract() - 0.5);
            let power = |exponent: i32, times: usize| {
                let mut u = q.transpose() * &start;
                let mut eigenvalue = 0.0;
                u /= u.norm();
                for _ in 0..times {
                    for j in 0..k {
                        u[j] *= s[j].powi(exponent);
                    }
                    eigenvalue = u.norm();
                    u /= eigenvalue;
                }
                eigenvalue
            };
            let times = config.power_iterations - usize::from(is("one-power-iteration-less"));
            let mean = s.iter().map(|s| s.powi(16)).sum::<f64>() / k as f64;
            let mut sigma = power(2, times).sqrt();
            if !is("power-mean-dropped") {
                sigma = sigma.max(mean.powf(1.0 / 16.0));
            }
            if is("power-method-dropped") {
                sigma = mean.powf(1.0 / 16.0);
            }
            let smallest = power(-2, config.power_iterations).sqrt().recip();
            if is("frobenius-for-sigma") {
                sigma = s.norm();
            }
            if is("exact-sigma") {
                sigma = s.max();
            }
            if is("sigma-of-first-matrix") {
                sigma = *first_sigma.get_or_insert(sigma);
            }
            let spread = if is("spread-inverted") { smallest / sigma } else { sigma / smallest };
            widest = if is("spread-of-last-matrix") { spread } else { widest.max(spread) };
            let margin = if is("no-margin") { 1.0 } else { 1.05 };
            let mut s = s / (margin * sigma);
            for _ in 0..config.iterations + usize::from(is("one-iteration-more")) {
                for s in s.iter_mut() {
                    let a = *s * *s;
                    *s *= if is("cubic") {
                        1.5 - 0.5 * a
                    } else if is("linear-term-4/3") {
                        15.0 / 8.0 - 4.0 / 3.0 * a + 3.0 / 8.0 * a * a
                    } else if is("square-term-sign") {
                        15.0 / 8.0 - 5.0 / 4.0 * a - 3.0 / 8.0 * a * a
                    } else {
                        15.0 / 8.0 - 5.0 / 4.0 * a + 3.0 / 8.0 * a * a
                    };
                }
            }
            if is("wrong-side") {
                s.iter_mut().for_each(|s| *s = -*s);
            }
            let x = p * DMatrix::from_diagonal(&s) * q.transpose();
            factor.index_axis_mut(Axis(0), i).assign(&from_matrix(&x));
        }
        let spread = ArrayD::from_elem(IxDyn(&[1]), widest);
        Run { outputs: Values::new().with("factor_after", factor).with("spread", spread), grads: Values::new() }
    }

    fn laws() -> Vec<Law<Self>> {
        vec![
            Law::Independent("E"),
            Law::Custom { name: "a skipped call keeps every bit", check: skipped_keeps_bits },
            Law::Custom { name: "the result does not depend on the factor's scale", check: scale_invariance },
            Law::Custom { name: "columns become orthonormal as documented", check: orthonormality },
            Law::Custom { name: "the span of the columns stays", check: span_stays },
            Law::Custom { name: "turning the rows turns the result", check: rotation },
            Law::Custom { name: "the spread is found, and from below", check: spread_is_found },
        ]
    }

    fn mutants() -> Vec<Mutant> {
        [
            ("apply-ignored", Gate::Meta),
            ("zero-divides", Gate::Form),
            ("largest-not-divided-out", Gate::Meta),
            ("one-power-iteration-less", Gate::Form),
            ("power-mean-dropped", Gate::Meta),
            ("power-method-dropped", Gate::Form),
            ("frobenius-for-sigma", Gate::Form),
            ("exact-sigma", Gate::Form),
            ("sigma-of-first-matrix", Gate::Meta),
            ("spread-inverted", Gate::Meta),
            ("spread-of-last-matrix", Gate::Form),
            ("no-margin", Gate::Form),
            ("one-iteration-more", Gate::Form),
            ("cubic", Gate::Meta),
            ("linear-term-4/3", Gate::Meta),
            ("square-term-sign", Gate::Meta),
            ("wrong-side", Gate::Form),
        ]
        .map(|(twist, caught_by)| Mutant { twist, caught_by })
        .to_vec()
    }

    fn tolerances(case: &Case<Config>) -> Tolerances {
        // Every power iteration on A^-1 errs by the condition of A, spread^2, times the rounding of A; there are five, of
        // which each counts twice, as a vector and in its norm; and A itself is a sum that rounds about twice.
        let spread = spread_of(case.family);
        let widened = |tolerance: Tolerance, rounding: f64| {
            Tolerance::new(
                tolerance.tol.max(20.0 * spread * spread * rounding),
                "20 spread^2 times the rounding, from power iterations on the inverse Gram matrix",
            )
        };
        Tolerances {
            form: widened(tolerance::FORM, f64::EPSILON / 2.0),
            diff_f32: widened(tolerance::DIFF_F32, f64::from(f32::EPSILON) / 2.0),
            ..tolerance::WELL_CONDITIONED
        }
    }
}

/// The fixed start of the power method: fractional parts of golden-ratio multiples of the squares.
fn start(k: usize) -> DVector<f64> {
    DVector::from_fn(k, |j, _| (0.618_033_988_749_894_9 * ((j + 1) * (j + 1)) as f64).fract() - 0.5)
}

fn to_matrix(x: ArrayViewD<'_, f64>) -> DMatrix<f64> {
    DMatrix::from_row_iterator(x.shape()[0], x.shape()[1], x.iter().copied())
}

fn from_matrix(x: &DMatrix<f64>) -> ArrayD<f64> {
    ArrayD::from_shape_fn(IxDyn(&[x.nrows(), x.ncols()]), |at| x[(at[0], at[1])])
}

/// Random orthonormal columns: Q of a normal matrix.
fn orthonormal(rng: &mut ChaCha8Rng, n: usize, k: usize) -> DMatrix<f64> {
    to_matrix(draw::normal(rng, &[n, k]).view()).qr().q()
}

/// X = P diag(s) Q^T.
struct Svd {
    p: DMatrix<f64>,
    s: DVector<f64>,
    q: DMatrix<f64>,
}

impl Svd {
    /// One-sided Jacobi: turns pairs of columns until all are orthogonal; their norms are the singular values.
    fn of(x: &DMatrix<f64>) -> Self {
        let k = x.ncols();
        let (mut p, mut q) = (x.clone(), DMatrix::identity(k, k));
        // Convergence is quadratic; a dozen sweeps are far more than a matrix of this size takes.
        for _ in 0..12 {
            for i in 0..k {
                for j in i + 1..k {
                    let (a, b) = (p.column(i).norm_squared(), p.column(j).norm_squared());
                    let product = p.column(i).dot(&p.column(j));
                    if product == 0.0 {
                        continue;
                    }
                    // The smaller root of t^2 + 2 zeta t - 1 is the tangent of the angle that makes them orthogonal.
                    let zeta = (b - a) / (2.0 * product);
                    let t = zeta.signum() / (zeta.abs() + zeta.hypot(1.0));
                    let cosine = 1.0 / t.hypot(1.0);
                    for matrix in [&mut p, &mut q] {
                        for row in 0..matrix.nrows() {
                            let (u, v) = (matrix[(row, i)], matrix[(row, j)]);
                            matrix[(row, i)] = cosine * (u - t * v);
                            matrix[(row, j)] = cosine * (t * u + v);
                        }
                    }
                }
            }
        }
        let s = DVector::from_fn(k, |j, _| p.column(j).norm());
        for j in 0..k {
            p.column_mut(j).unscale_mut(s[j]);
        }
        Self { p, s, q }
    }
}

type LawResult = std::result::Result<f64, String>;

/// The factors before and after, and the spread.
fn run(
    runner: &dyn Runner<RetractOp>,
    case: &Case<Config>,
    inputs: &Values,
) -> std::result::Result<(ArrayD<f64>, f64), String> {
    let run = runner.run(&case.config, inputs, None).map_err(|e| e.to_string())?;
    Ok((run.outputs.at("factor_after").clone(), run.outputs.at("spread")[[0]]))
}

fn skipped_keeps_bits(runner: &dyn Runner<RetractOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = RetractOp::draw(case, rng);
    inputs.get_mut("apply").expect("the flag is drawn").fill(0.0);
    let (after, _) = run(runner, case, &inputs)?;
    passed(same_bits("factor_after", after.view(), inputs.at("factor").view()))
}

/// Powers of two are exact: from 2^-400 to 2^400 all bits agree.
fn scale_invariance(runner: &dyn Runner<RetractOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    if case.family == "skipped" {
        return Ok(0.0);
    }
    let mut inputs = RetractOp::draw(case, rng);
    let (once, spread) = run(runner, case, &inputs)?;
    *inputs.get_mut("factor").expect("the factor is drawn") *= 2f64.powi(rng.random_range(-400..=400));
    let (scaled, spread_scaled) = run(runner, case, &inputs)?;
    passed(same_bits("spread", arr1(&[spread_scaled]).into_dyn().view(), arr1(&[spread]).into_dyn().view()))?;
    passed(same_bits("factor_after", scaled.view(), once.view()))
}

/// Whether this many iterations are documented to take this family's spread all the way.
fn becomes_orthonormal(case: &Case<Config>) -> bool {
    let least = match spread_of(case.family) {
        spread if spread <= 2.0 => 3,
        spread if spread <= 4.0 => 4,
        spread if spread <= 10.0 => 6,
        _ => return false,
    };
    case.family != "skipped" && case.config.iterations >= least
}

/// R of the QR decomposition is a diagonal of signs, as it is of orthonormal columns only.
fn orthonormality(runner: &dyn Runner<RetractOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    if !becomes_orthonormal(case) {
        return Ok(0.0);
    }
    let (after, _) = run(runner, case, &RetractOp::draw(case, rng))?;
    let k = case.dim("k") as f64;
    // 1e-4 for k >= 32; below, one singular value far above the others can leave 5.2e-4 / sqrt(k).
    let bound = 1e-4f64.max(5.2e-4 / k.sqrt());
    let mut worst = 0.0f64;
    for x in after.outer_iter().filter(|x| x.iter().any(|x| *x != 0.0)) {
        let r = to_matrix(x).qr().r();
        let gram = r.transpose() * &r;
        let defect = (gram - DMatrix::identity(r.ncols(), r.ncols())).norm() / k;
        let signs = DMatrix::from_diagonal(&r.diagonal().map(f64::signum));
        let triangle = (r - signs).norm() / k;
        worst = worst.max(defect / bound).max(triangle / bound);
        if !(defect <= bound && triangle <= bound) {
            return Err(format!("|X^T X - I|_F / k = {defect:e}, |R - signs|_F / k = {triangle:e}, bound {bound:e}"));
        }
    }
    Ok(worst)
}

/// The result minus its projection on the columns before is nothing.
fn span_stays(runner: &dyn Runner<RetractOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let inputs = RetractOp::draw(case, rng);
    let (after, _) = run(runner, case, &inputs)?;
    let mut worst = 0.0f64;
    for (before, after) in inputs.at("factor").outer_iter().zip(after.outer_iter()) {
        let (q, after) = (to_matrix(before.view()).qr().q(), to_matrix(after));
        let outside = &after - &q * (q.transpose() * &after);
        // A direction of the smallest singular value carries rounding of the largest.
        let bound = 1e-14 * spread_of(case.family) * after.norm() * (case.dim("k") as f64).sqrt();
        if before.iter().all(|x| *x == 0.0) {
            continue;
        }
        let over = outside.norm() / bound;
        if over.is_nan() {
            return Err("the factor afterwards is not a number".to_owned());
        }
        worst = worst.max(over);
    }
    Ok(worst)
}

/// The Gram matrix does not see which way the columns point.
fn rotation(runner: &dyn Runner<RetractOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let mut inputs = RetractOp::draw(case, rng);
    let (once, _) = run(runner, case, &inputs)?;
    let turn = orthonormal(rng, case.dim("n"), case.dim("n"));
    let turned = |x: &ArrayD<f64>| {
        let mut x = x.clone();
        for mut x in x.outer_iter_mut() {
            let product = from_matrix(&(&turn * to_matrix(x.view())));
            x.assign(&product);
        }
        x
    };
    let factor = turned(inputs.at("factor"));
    inputs.set("factor", factor);
    let (after, _) = run(runner, case, &inputs)?;
    passed(compare("factor_after", after.view(), turned(&once).view(), &RetractOp::tolerances(case).form))
}

/// The power method's estimate of an eigenvalue is at least c^(1/iterations) of it, where c is the cosine between the
/// start and its direction: |A^m u| / |A^(m-1) u| grows with m, and the product of all of them is |A^m u|.
fn spread_is_found(runner: &dyn Runner<RetractOp>, case: &Case<Config>, rng: &mut ChaCha8Rng) -> LawResult {
    let inputs = RetractOp::draw(case, rng);
    let (_, spread) = run(runner, case, &inputs)?;
    let (mut least, mut most) = (0.0f64, 0.0f64);
    for x in inputs.at("factor").outer_iter().filter(|x| case.family != "skipped" && x.iter().any(|x| *x != 0.0)) {
        let Svd { s, q, .. } = Svd::of(&to_matrix(x));
        let k = s.len();
        let truth = s.max() / s.min();
        let seen = |j: usize| {
            (q.column(j).dot(&start(k)).abs() / start(k).norm()).powf(0.5 / case.config.power_iterations as f64)
        };
        let above = seen(s.imax()).max((k as f64).powf(-1.0 / 16.0));
        least = least.max(truth * above * seen(s.imin()));
        most = most.max(truth);
    }
    if (least * (1.0 - 1e-9)..=most * (1.0 + 1e-9)).contains(&spread) {
        return Ok(0.0);
    }
    Err(format!("spread is {spread}, expected from {least} to {most}"))
}

impl<B: Retract> OperationOn<B> for RetractOp {
    fn run(b: &B, config: &Config, inputs: &Named<B::Tensor>, _: Option<&Named<B::Tensor>>) -> Result<Run<B::Tensor>> {
        let input = |name| glue::required(Self::STEM, inputs.get(name).ok_or(name));
        let factor = input("factor")?;
        let outputs = Retract::update(b, config, factor, input("apply")?)?;
        let named = Named::new().with("factor_after", factor.clone()).with("spread", outputs.spread);
        Ok(Run { outputs: named, grads: Named::new() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_decomposition_is_one() {
        for seed in 0..200 {
            let (n, k) = (12, 5);
            let case = case([1, n, k], 4, if seed % 2 == 0 { "step" } else { "spread100" });
            let drawn = RetractOp::draw(&case, &mut draw::stream(seed, &["decomposition"]));
            let x = to_matrix(drawn.at("factor").index_axis(Axis(0), 0));
            let Svd { p, s, q } = Svd::of(&x);
            let identity = DMatrix::identity(k, k);
            assert!((&p * DMatrix::from_diagonal(&s) * q.transpose() - &x).norm() < 1e-14 * x.norm());
            assert!((p.transpose() * &p - &identity).norm() < 1e-14);
            assert!((q.transpose() * &q - &identity).norm() < 1e-14);
        }
    }
}
