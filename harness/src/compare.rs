//! The comparator: decides whether one tensor equals another, and says where it does not.
//!
//! Every other gate rests on it, so its rules are few. Shapes are compared first. A non-finite element fails unless
//! both sides hold the same infinity. Then four measures, each against its own bound from one tolerance `tol`:
//!
//! | measure | definition | bound |
//! |---|---|---|
//! | rms | rms(got - want) / rms(want) | tol, and what `noise` adds |
//! | token | worst over rows (last axis) of rms(row error) / rms(want) | 10 tol |
//! | element | worst of abs(got - want) / max abs(want) | 10 tol |
//! | slope | abs(<got, want> / <want, want> - 1) | `slope` of the tolerance, and what its `noise` adds |
//!
//! A row that is wrong hides in the global rms of a long tensor, which is what `token` is for; a tensor that is scaled
//! by 1.01 hides inside a bf16 band, which is what `slope` is for. Where `want` is all zero, so must `got` be, within
//! `floor`.
//!
//! A short tensor of sums may be small by chance, because its terms cancel, while its rounding error has the size of
//! the terms. A tolerance with a `usual` size measures every error against that size where `want` is smaller.

use std::fmt;

use ndarray::{ArrayD, ArrayViewD, Axis, Dimension};

/// How far two tensors may be apart, and why.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// Bound of the relative rms; the worst token and element may reach ten times as much.
    pub tol: f64,
    /// Bound of the slope.
    pub slope: f64,
    /// Magnitude below which a tensor counts as zero.
    pub floor: f64,
    /// The rms that the tensor usually has, where it is known; 0 measures against the tensor at hand.
    pub usual: f64,
    /// The relative rms of errors that have no direction. Over n independent ones they move a slope by this over the
    /// root of n, and chance moves a relative rms by as much: the mean square of n numbers scatters by sqrt(2 / n) of
    /// itself, that of the error and that of the tensor, so the root of their ratio by sqrt(1 / n). Twice as much is
    /// added to both bounds. n is that of `independent`: what carries the norm, in elements or in whole lines.
    pub noise: f64,
    /// Where the number comes from.
    pub why: &'static str,
}

impl Tolerance {
    /// A tolerance whose slope bound equals its rms bound: right wherever rounding is unbiased and small.
    pub const fn new(tol: f64, why: &'static str) -> Self {
        Self { tol, slope: tol, floor: 0.0, usual: 0.0, noise: 0.0, why }
    }

    /// The same tolerance with a magnitude below which a tensor counts as zero.
    pub const fn floor(self, floor: f64) -> Self {
        Self { floor, ..self }
    }

    /// The same tolerance for a tensor that usually has this rms.
    pub const fn usual(self, usual: f64) -> Self {
        Self { usual, ..self }
    }
}

/// The widest tolerance the comparator accepts: beyond it a comparison says nothing.
pub const WIDEST: f64 = 0.05;

/// The four measures of a comparison; all zero where the shapes differ, a NaN is found or zero is expected.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Measures {
    /// rms(got - want) / rms(want).
    pub rms: f64,
    /// The worst row's rms error over rms(want).
    pub token: f64,
    /// The worst element's error over the largest element.
    pub element: f64,
    /// abs(<got, want> / <want, want> - 1).
    pub slope: f64,
}

impl Measures {
    /// The larger one of each.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self {
            rms: self.rms.max(other.rms),
            token: self.token.max(other.token),
            element: self.element.max(other.element),
            slope: self.slope.max(other.slope),
        }
    }
}

/// The outcome of one comparison.
#[derive(Clone, Debug, Default, PartialEq)]
#[must_use = "a comparison that nobody reads cannot fail"]
pub struct Comparison {
    /// Worst measure over its bound: 1 is the edge. Infinite for NaN and wrong shapes.
    pub worst: f64,
    /// What is wrong, where it is, in one line. Empty when nothing is.
    pub message: String,
    /// What was measured.
    pub measures: Measures,
}

impl Comparison {
    /// Whether every measure is inside its bound. NaN is not.
    pub fn passes(&self) -> bool {
        self.worst <= 1.0
    }

    fn fail(message: String) -> Self {
        Self { worst: f64::INFINITY, message, ..Self::default() }
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2e} of tolerance{}{}", self.worst, if self.message.is_empty() { "" } else { ": " }, self.message)
    }
}

/// Compares `got` with `want`.
pub fn compare(name: &str, got: ArrayViewD<'_, f64>, want: ArrayViewD<'_, f64>, tolerance: &Tolerance) -> Comparison {
    if got.shape() != want.shape() {
        return Comparison::fail(format!("`{name}` has shape {:?}, expected {:?}", got.shape(), want.shape()));
    }
    if !(tolerance.tol >= 0.0 && tolerance.tol <= WIDEST && tolerance.slope <= WIDEST) {
        return Comparison::fail(format!(
            "`{name}` is compared with tolerance {:e} (slope {:e}), wider than the comparator accepts ({WIDEST:e})",
            tolerance.tol, tolerance.slope
        ));
    }
    for ((index, &g), &w) in got.indexed_iter().zip(&want) {
        if !(g.is_finite() && w.is_finite()) && g != w {
            return Comparison::fail(format!("`{name}`{:?} is {g}, expected {w}", index.as_array_view().to_vec()));
        }
    }
    // Equal infinities have been accepted; they carry no error and no scale.
    let pairs = || got.iter().zip(&want).filter(|(g, _)| g.is_finite());
    let largest = pairs().map(|(_, w)| w.abs()).fold(0.0, f64::max);
    let count = pairs().count().max(1) as f64;
    if largest <= tolerance.floor {
        return zero_expected(name, &got, &want, tolerance.floor);
    }
    // Dividing by the largest magnitude first keeps squares inside the range of f64.
    let square = pairs().map(|(_, w)| (w / largest) * (w / largest)).sum::<f64>();
    let rms = (square / count).sqrt();
    let error_rms = (pairs().map(|(g, w)| ((g - w) / largest).powi(2)).sum::<f64>() / count).sqrt();
    let projection = pairs().map(|(g, w)| (g / largest) * (w / largest)).sum::<f64>();
    let slope = (projection / square - 1.0).abs();
    let chance = if tolerance.noise == 0.0 { 0.0 } else { 2.0 * tolerance.noise / independent(&want).sqrt() };
    // 1 unless the tensor is smaller than usual.
    let share = rms / rms.max(tolerance.usual / largest);
    let (token_error, token) = worst_token(&got, &want, largest);
    let (index, element_error) = worst_element(&got, &want);
    let measures = Measures {
        rms: share * error_rms / rms,
        token: share * token_error / rms,
        element: share * element_error / largest,
        slope: share * slope,
    };
    let bounded = [
        ("rms", measures.rms, (tolerance.tol + chance).min(WIDEST)),
        ("token", measures.token, 10.0 * tolerance.tol),
        ("element", measures.element, 10.0 * tolerance.tol),
        ("slope", measures.slope, tolerance.slope + chance),
    ];
    let (measure, value, bound) =
        bounded.into_iter().max_by(|a, b| over(a.1, a.2).total_cmp(&over(b.1, b.2))).expect("there are four measures");
    let worst = over(value, bound);
    let message = if worst <= 1.0 {
        String::new()
    } else {
        format!(
            "`{name}` {measure} {value:.3e} over {bound:.3e}; worst element {index:?} is {:e}, expected {:e}; \
             worst token {token}; rms {:.3e}, slope {slope:.3e}",
            got[ndarray::IxDyn(&index)],
            want[ndarray::IxDyn(&index)],
            error_rms / rms
        )
    };
    Comparison { worst, message, measures }
}

/// Whether two tensors have the same bits (so that -0.0 differs from 0.0 and a NaN equals itself).
pub fn same_bits(name: &str, got: ArrayViewD<'_, f64>, want: ArrayViewD<'_, f64>) -> Comparison {
    if got.shape() != want.shape() {
        return Comparison::fail(format!("`{name}` has shape {:?}, expected {:?}", got.shape(), want.shape()));
    }
    match got.indexed_iter().zip(&want).find(|((_, g), w)| g.to_bits() != w.to_bits()) {
        Some(((index, g), w)) => Comparison::fail(format!(
            "`{name}`{:?} is {g:e}, expected the same bits as {w:e}",
            index.as_array_view().to_vec()
        )),
        None => Comparison::default(),
    }
}

/// How many independent errors a tensor of products may have: (sum p)^2 / sum p^2, with p the squares of its elements,
/// or those of its lines along an axis if that is less.
///
/// A gradient of a factor is a sum of few outer products. The rounding of one operand moves a whole line of it, so its
/// elements do not err independently, its lines do (docs/adr/0032). One line that is the whole tensor is no line.
fn independent(want: &ArrayViewD<'_, f64>) -> f64 {
    let largest = want.iter().filter(|w| w.is_finite()).fold(0.0f64, |a, w| a.max(w.abs()));
    let powers = want.mapv(|w| if w.is_finite() { (w / largest).powi(2) } else { 0.0 });
    let carry = |p: &ArrayD<f64>| p.sum().powi(2) / p.iter().map(|p| p * p).sum::<f64>();
    let axes = (0..want.ndim()).map(Axis).filter(|axis| want.len_of(*axis) < want.len());
    axes.map(|axis| carry(&powers.sum_axis(axis))).fold(carry(&powers), f64::min)
}

/// A measure over its bound; an error of zero is zero even against a bound of zero.
fn over(value: f64, bound: f64) -> f64 {
    if value == 0.0 { 0.0 } else { value / bound }
}

fn zero_expected(name: &str, got: &ArrayViewD<'_, f64>, want: &ArrayViewD<'_, f64>, floor: f64) -> Comparison {
    let (index, error) = worst_element(got, want);
    let worst = over(error, floor);
    let message = if worst <= 1.0 {
        String::new()
    } else {
        format!("`{name}`{index:?} is {:e}, expected zero (within {floor:e})", got[ndarray::IxDyn(&index)])
    };
    Comparison { worst, message, ..Comparison::default() }
}

/// The largest rms of one row's error (in units of `scale`), and which row.
fn worst_token(got: &ArrayViewD<'_, f64>, want: &ArrayViewD<'_, f64>, scale: f64) -> (f64, usize) {
    let mut worst = (0.0, 0);
    if got.ndim() == 0 || got.is_empty() {
        return worst;
    }
    let last = Axis(got.ndim() - 1);
    for (row, (g, w)) in got.lanes(last).into_iter().zip(want.lanes(last)).enumerate() {
        let sum: f64 = g.iter().zip(&w).filter(|(g, _)| g.is_finite()).map(|(g, w)| ((g - w) / scale).powi(2)).sum();
        let rms = (sum / g.len() as f64).sqrt();
        if rms > worst.0 {
            worst = (rms, row);
        }
    }
    worst
}

fn worst_element(got: &ArrayViewD<'_, f64>, want: &ArrayViewD<'_, f64>) -> (Vec<usize>, f64) {
    let mut worst = (vec![0; got.ndim()], 0.0);
    for ((index, &g), &w) in got.indexed_iter().zip(want) {
        if g.is_finite() && (g - w).abs() > worst.1 {
            worst = (index.as_array_view().to_vec(), (g - w).abs());
        }
    }
    worst
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use ndarray::{Array, Array1, Array2, IxDyn, array};

    const TIGHT: Tolerance = Tolerance::new(1e-3, "a test");

    fn sample() -> ArrayD<f64> {
        Array::from_shape_fn(IxDyn(&[50, 8]), |i| ((i[0] * 13 + i[1] * 7) % 17) as f64 - 8.2)
    }

    #[test]
    fn a_sum_that_is_small_by_chance_is_measured_against_its_usual_size() {
        let (got, want) = (array![1.01e-3].into_dyn(), array![1e-3].into_dyn());
        assert!(!compare("x", got.view(), want.view(), &TIGHT).passes());
        // An error of 1e-5 beside a usual size of 1 is 1e-5, and beside 0.005 it is 2e-3.
        assert_relative_eq!(compare("x", got.view(), want.view(), &TIGHT.usual(1.0)).worst, 1e-2, max_relative = 1e-6);
        assert!(!compare("x", got.view(), want.view(), &TIGHT.usual(0.005)).passes());
        // A tensor of its usual size, or a larger one, is measured against itself.
        let once = compare("x", sample().view(), (sample() * 1.0005).view(), &TIGHT);
        assert_eq!(compare("x", sample().view(), (sample() * 1.0005).view(), &TIGHT.usual(1e-3)), once);
        assert!(!compare("x", array![f64::NAN].into_dyn().view(), want.view(), &TIGHT.usual(1.0)).passes());
    }

    #[test]
    fn equal_tensors_pass_with_no_error() {
        let x = sample();
        let c = compare("x", x.view(), x.view(), &TIGHT);
        assert!(c.passes());
        assert_eq!(c.worst, 0.0);
    }

    /// Every kind of fault a gate must see: what came, what was expected.
    fn faults() -> Vec<(&'static str, ArrayD<f64>, ArrayD<f64>)> {
        let want = sample();
        let plant = |name, f: &dyn Fn(&mut ArrayD<f64>)| {
            let mut got = want.clone();
            f(&mut got);
            (name, got, want.clone())
        };
        let nan_expected = plant("a NaN on both sides", &|x| x[[3, 2]] = f64::NAN);
        let infinity_expected = plant("a number where infinity is expected", &|x| x[[3, 2]] = f64::INFINITY);
        vec![
            plant("a NaN", &|x| x[[3, 2]] = f64::NAN),
            plant("an infinity", &|x| x[[3, 2]] = f64::INFINITY),
            ("a NaN on both sides", nan_expected.1.clone(), nan_expected.1),
            ("a number where infinity is expected", want.clone(), infinity_expected.1),
            // One thousandth and a half: inside every band of rms and elements that is ten times the slope's bound.
            plant("scaled", &|x| *x *= 1.0015),
            plant("all zero", &|x| x.fill(0.0)),
            plant("one element", &|x| x[[49, 7]] += 0.5),
            plant("an unwritten tail", &|x| x.index_axis_mut(Axis(0), 49).fill(0.0)),
            plant("a sign", &|x| *x *= -1.0),
            ("a shape", want.clone(), want.clone().into_shape_with_order(IxDyn(&[8, 50])).unwrap()),
        ]
    }

    #[test]
    fn each_planted_fault_is_red() {
        for (name, got, want) in faults() {
            assert!(!compare("x", got.view(), want.view(), &TIGHT).passes(), "{name}");
        }
    }

    /// Comparators as they are often written, each with a hole. That the faults above find every hole is what makes them
    /// a test of this comparator: a change that opens one of these holes turns `each_planted_fault_is_red` red.
    #[test]
    fn the_faults_find_the_hole_in_every_weaker_comparator() {
        type Passes = fn(&ArrayD<f64>, &ArrayD<f64>) -> bool;
        fn errors<'a>(got: &'a ArrayD<f64>, want: &'a ArrayD<f64>) -> impl Iterator<Item = (f64, f64)> + 'a {
            got.iter().zip(want).map(|(g, w)| ((g - w).abs(), *w))
        }
        fn rms(got: &ArrayD<f64>, want: &ArrayD<f64>) -> f64 {
            let (error, size) = errors(got, want).fold((0.0, 0.0), |(e, s), (d, w)| (e + d * d, s + w * w));
            (error / size).sqrt()
        }
        let weaker: [(&str, Passes); 7] = [
            ("fails on `error > tolerance`, which NaN is not", |g, w| !errors(g, w).any(|(e, _)| e > 0.01)),
            ("skips elements whose reference is not finite", |g, w| {
                errors(g, w).all(|(e, w)| !w.is_finite() || e <= 0.01) && rms(g, w) <= 1e-3
                    || !w.iter().all(|w| w.is_finite())
            }),
            ("takes two NaN for equal", |g, w| {
                g.iter().zip(w).all(|(g, w)| g.is_nan() && w.is_nan() || (g - w).abs() <= 1e-9)
            }),
            ("judges the global rms alone, with a band for bf16", |g, w| rms(g, w) <= 2e-2),
            ("judges the largest element alone", |g, w| errors(g, w).all(|(e, _)| e <= 10.0 * 1e-3 * 8.2)),
            ("compares magnitudes", |g, w| g.iter().zip(w).all(|(g, w)| (g.abs() - w.abs()).abs() <= 1e-9)),
            ("compares elements in order, whatever the shape", |g, w| errors(g, w).all(|(e, _)| e <= 1e-9)),
        ];
        for (hole, passes) in weaker {
            let missed: Vec<&str> = faults().iter().filter(|(_, g, w)| passes(g, w)).map(|(name, ..)| *name).collect();
            assert!(!missed.is_empty(), "no fault finds the hole of a comparator that {hole}");
        }
    }

    #[test]
    fn nan_on_both_sides_is_red_and_equal_infinities_are_not() {
        let nan = array![1.0, f64::NAN].into_dyn();
        assert!(!compare("x", nan.view(), nan.view(), &TIGHT).passes());
        let inf = array![1.0, f64::NEG_INFINITY].into_dyn();
        assert!(compare("x", inf.view(), inf.view(), &TIGHT).passes());
    }

    #[test]
    fn one_bad_row_in_a_long_tensor_is_red_by_its_token() {
        // One row of 16 384 wrong by its whole size is 0.8 percent of the global rms, inside a bf16 band of 2 percent.
        let want = Array2::from_shape_fn((16_384, 4), |(i, j)| ((i * 5 + j) % 7) as f64 - 3.0).into_dyn();
        let mut got = want.clone();
        got.index_axis_mut(Axis(0), 9_000).fill(0.0);
        let c = compare("dk", got.view(), want.view(), &Tolerance { slope: 0.02, ..Tolerance::new(0.02, "bf16") });
        assert!(!c.passes());
        assert!(c.message.contains("token") && c.message.contains("[9000"), "{}", c.message);
    }

    #[test]
    fn a_zero_tensor_wants_zero() {
        let zero = ArrayD::zeros(IxDyn(&[3]));
        assert!(compare("x", zero.view(), zero.view(), &TIGHT).passes());
        let tiny = array![0.0, 1e-20, 0.0].into_dyn();
        assert!(!compare("x", tiny.view(), zero.view(), &TIGHT).passes());
        assert!(compare("x", tiny.view(), zero.view(), &TIGHT.floor(1e-18)).passes());
        assert!(!compare("x", array![0.0, f64::NAN, 0.0].into_dyn().view(), zero.view(), &TIGHT.floor(1.0)).passes());
    }

    #[test]
    fn too_wide_a_tolerance_is_refused() {
        let x = sample();
        assert!(!compare("x", x.view(), x.view(), &Tolerance::new(0.1, "too wide")).passes());
        assert!(!compare("x", x.view(), x.view(), &Tolerance::new(f64::NAN, "not a number")).passes());
    }

    #[test]
    fn squares_stay_inside_the_range() {
        let want = array![1e200, -2e200].into_dyn();
        assert!(compare("x", want.view(), want.view(), &TIGHT).passes());
        assert!(!compare("x", (&want * 1.01).view(), want.view(), &TIGHT).passes());
    }

    #[test]
    fn bits_tell_zeros_apart() {
        let plus = array![0.0].into_dyn();
        let minus = array![-0.0].into_dyn();
        assert!(!same_bits("x", plus.view(), minus.view()).passes());
        assert!(same_bits("x", plus.view(), plus.view()).passes());
    }

    #[test]
    fn noise_moves_a_slope_by_what_the_elements_that_carry_the_norm_leave_of_it() {
        // Every element off by one thousandth in one direction is a slope; noise of one thousandth is none where a
        // thousand elements carry the norm, and all of it where one does.
        let spread = Array1::from_elem(1000, 1.0).into_dyn();
        let mut single = Array1::from_elem(1000, 1e-6);
        single[0] = 1.0;
        let single = single.into_dyn();
        let tolerance = Tolerance { slope: 1e-4, noise: 1e-3, ..Tolerance::new(1e-2, "test") };
        let off = |w: &ArrayD<f64>| compare("x", (w * 1.001).view(), w.view(), &tolerance).passes();
        assert!(!off(&spread) && off(&single));
        let silent = Tolerance { noise: 0.0, ..tolerance };
        assert!(!compare("x", (&single * 1.001).view(), single.view(), &silent).passes());
    }

    #[test]
    fn noise_moves_an_rms_by_what_chance_does_to_a_few_elements() {
        let tolerance = Tolerance { slope: WIDEST, noise: 0.01, ..Tolerance::new(0.01, "test") };
        let off = |n: usize, by: f64| {
            let want = Array1::from_elem(n, 1.0).into_dyn();
            let errors = Array1::from_shape_fn(n, |i| if i % 2 == 0 { 1.0 + by } else { 1.0 - by }).into_dyn();
            compare("x", errors.view(), want.view(), &tolerance)
        };
        // Two over the root of a hundred: a fifth more; of a million: two thousandths.
        assert!(off(100, 0.0119).passes() && !off(100, 0.0121).passes());
        assert!(off(1_000_000, 0.01001).passes() && !off(1_000_000, 0.01003).passes());
        // However few they are, nothing beyond the widest tolerance passes.
        let wide = Tolerance { tol: 0.04, noise: 0.04, ..tolerance };
        let two = array![1.06, 0.94].into_dyn();
        assert!(!compare("x", two.view(), array![1.0, 1.0].into_dyn().view(), &wide).passes());
        // Without noise the bound is the tolerance.
        let silent = Tolerance { noise: 0.0, ..tolerance };
        assert!(
            !compare("x", array![1.011, 0.989].into_dyn().view(), array![1.0, 1.0].into_dyn().view(), &silent).passes()
        );
    }

    #[test]
    fn an_error_that_a_line_shares_counts_once() {
        // An outer product whose second operand is carried by one number: its rounding moves a column of 100 elements.
        // A column of a tensor whose columns are alike moves the slope by a hundredth of that, and all in one direction
        // is a slope.
        let tolerance = Tolerance { slope: 1e-4, noise: 1e-3, ..Tolerance::new(1e-2, "test") };
        let of = |column: &dyn Fn(usize) -> f64| Array2::from_shape_fn((100, 100), |(_, j)| column(j)).into_dyn();
        let off = |want: &ArrayD<f64>, by: &dyn Fn(usize) -> f64| {
            compare("x", (want * &of(&|j| 1.0 + by(j))).view(), want.view(), &tolerance).passes()
        };
        let (single, spread) = (of(&|j| if j == 7 { 1.0 } else { 1e-6 }), of(&|_| 1.0));
        assert!(off(&single, &|_| 1e-3) && off(&single.clone().reversed_axes(), &|_| 1e-3));
        assert!(!off(&spread, &|_| 1e-3), "all lines off in one direction");
        assert!(off(&spread, &|j| if j % 2 == 0 { 1e-3 } else { -1e-3 }), "no direction");
        // Twice the noise is the most that one line gets.
        assert!(off(&single, &|_| 2e-3) && !off(&single, &|_| 2.2e-3));
        assert_relative_eq!(independent(&spread.view()), 100.0);
        assert_relative_eq!(independent(&array![[1.0, 1.0, 1.0]].into_dyn().view()), 3.0);
        assert_relative_eq!(independent(&Array1::from_elem(5, -2.0).into_dyn().view()), 5.0);
    }

    #[test]
    fn a_comparison_of_nan_measures_does_not_pass() {
        assert!(!Comparison { worst: f64::NAN, ..Comparison::default() }.passes());
    }
}
