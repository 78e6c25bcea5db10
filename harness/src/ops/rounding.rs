//! The formats of factors in plain terms, for the descriptions of `spectral` and `expert`: every number that a format
//! has is written down in a table, and rounding is looking for the nearest.

use std::sync::LazyLock;

use dormouse_reference::FactorFormat;
use ndarray::{Array2, ArrayD, ArrayView1, ArrayView2, Axis};

/// The non-negative finite numbers of a short type in the order of their codes, which is that of their sizes.
type Table = Vec<f64>;

static BF16: LazyLock<Table> = LazyLock::new(|| (0..0x7f80).map(|code| half::bf16::from_bits(code).to_f64()).collect());
static F16: LazyLock<Table> = LazyLock::new(|| (0..0x7c00).map(|code| half::f16::from_bits(code).to_f64()).collect());
static E4M3: LazyLock<Table> = LazyLock::new(|| {
    let value = |code: i32| match (code / 8, f64::from(code % 8)) {
        (0, mantissa) => mantissa * 2f64.powi(-9),
        (exponent, mantissa) => (8.0 + mantissa) * 2f64.powi(exponent - 10),
    };
    (0..0x7f).map(value).collect()
});

/// The neighbours of |x| in a table and how far they are, and which of them has an even code.
fn nearest(table: &Table, x: f64, truncate: bool) -> f64 {
    let above = table.partition_point(|&number| number <= x.abs());
    let below = above - 1;
    let Some(&high) = table.get(above) else {
        return table[below].copysign(x);
    };
    let (to_low, to_high) = (x.abs() - table[below], high - x.abs());
    let down = truncate || to_low < to_high || (to_low == to_high && below % 2 == 0);
    if down { table[below].copysign(x) } else { high.copysign(x) }
}

/// A factor `[rows, R]` as the maths sees it. The twists that break it: `scale-of-the-row` rather than the column,
/// `rounding-truncates`, `threshold-of-half` where ternary keeps elements, `mean-of-all` for its magnitude.
pub(crate) fn rounded(format: FactorFormat, factor: ArrayView2<'_, f64>, twist: Option<&str>) -> Array2<f64> {
    let mut out = factor.to_owned();
    let axis = if twist == Some("scale-of-the-row") { Axis(0) } else { Axis(1) };
    for mut group in out.axis_iter_mut(axis) {
        let rounded = round_group(format, group.view(), twist);
        group.iter_mut().zip(rounded).for_each(|(to, from)| *to = from);
    }
    out
}

fn round_group(format: FactorFormat, group: ArrayView1<'_, f64>, twist: Option<&str>) -> Vec<f64> {
    let truncate = twist == Some("rounding-truncates");
    let each = |table: &Table, scale: f64| -> Vec<f64> {
        group.iter().map(|&w| scale * nearest(table, w / scale, truncate)).collect()
    };
    match format {
        FactorFormat::F32 => group.to_vec(),
        FactorFormat::Bf16 => each(&BF16, 1.0),
        FactorFormat::F16 => each(&F16, 1.0),
        FactorFormat::Fp8 => {
            let largest = group.iter().fold(0.0f64, |a, w| a.max(w.abs()));
            let mut scale = 2f64.powi(-300);
            while largest > 448.0 * scale {
                scale *= 2.0;
            }
            each(&E4M3, scale)
        }
        FactorFormat::Ternary => {
            let mean = |kept: &dyn Fn(f64) -> bool| {
                let kept: Vec<f64> = group.iter().map(|w| w.abs()).filter(|&w| kept(w)).collect();
                if kept.is_empty() { 0.0 } else { kept.iter().sum::<f64>() / kept.len() as f64 }
            };
            let share = if twist == Some("threshold-of-half") { 0.5 } else { 0.7 };
            let all = mean(&|_| true);
            let kept = |w: f64| w.abs() > share * all;
            let magnitude = if twist == Some("mean-of-all") { all } else { mean(&kept) };
            group.iter().map(|&w| if kept(w) { magnitude * w.signum() } else { 0.0 }).collect()
        }
    }
}

/// The faults that can be planted in a rounding and in what the adjoint does with it; the descriptions plant all.
pub(crate) const TWISTS: [&str; 6] = [
    "scale-of-the-row",
    "rounding-truncates",
    "threshold-of-half",
    "mean-of-all",
    "gradient-masked-by-rounding",
    "backward-with-masters",
];

/// A factor whose elements are of very different sizes, in a column and between columns: rounding reaches subnormal
/// numbers and zero.
pub(crate) fn spread(factor: &mut ArrayD<f64>, rng: &mut rand_chacha::ChaCha8Rng) {
    let shape = factor.shape().to_vec();
    let exponents = crate::draw::uniform(rng, &shape, -20.0, 4.0);
    factor.zip_mut_with(&exponents, |w, e| *w *= e.exp2());
}

/// A factor where a format has to decide: columns of numbers halfway between two neighbours of the format, columns of
/// zeros, and columns as they are. In ternary the first has ones and a large last element, without which the ones would be
/// kept, and there are columns of ones, and columns with elements exactly at 0.7 of the mean, which are dropped. Only one
/// column has a large element: several would add up to a number that cancels by chance, which says nothing about formats.
pub(crate) fn edges(factor: &mut ArrayD<f64>, format: FactorFormat, rng: &mut rand_chacha::ChaCha8Rng) {
    // One bit more than a number of the format has: the last one is set.
    let bits = match format {
        FactorFormat::Fp8 => 5,
        FactorFormat::F16 => 12,
        _ => 9,
    };
    let rows = factor.shape()[factor.ndim() - 2];
    let size = 2f64.powi(-(rows.ilog2() as i32) / 2);
    let (shape, last) = (factor.shape().to_vec(), factor.ndim() - 1);
    let draws = crate::draw::uniform(rng, &shape, 0.5, 1.0);
    let mut columns: Vec<_> = factor.axis_iter_mut(Axis(last)).collect();
    for (r, (column, draws)) in columns.iter_mut().zip(draws.axis_iter(Axis(last))).enumerate() {
        let ternary = format == FactorFormat::Ternary;
        for (row, (w, draw)) in column.iter_mut().zip(draws).enumerate() {
            let between = ((draw * 2f64.powi(bits - 1)).floor() * 2.0 + 1.0) * 2f64.powi(-bits);
            let magnitude = match r % 4 {
                0 if ternary && r == 0 && row + 1 == rows => rows as f64,
                0 if ternary => 1.0,
                0 => between,
                1 => 0.0,
                2 if ternary && row / 3 * 3 + 3 > rows => 10.0 / 16.0,
                2 if ternary => [7.0, 10.0, 13.0][row % 3] / 16.0,
                _ => continue,
            };
            *w = (size * magnitude).copysign(*w);
        }
    }
}
