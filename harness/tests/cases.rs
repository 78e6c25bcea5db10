//! Cases of docs/cases.md about comparing numbers, one test a case.

use dormouse_harness::compare::{Tolerance, compare};
use ndarray::{Array2, Array4, Axis, s};

/// Numbers between 0.5 and 1 with signs, the same on every run.
fn number(i: usize) -> f64 {
    let x = (i as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let size = 0.5 + (x >> 12) as f64 / (1u64 << 53) as f64;
    if x & 1 == 0 { size } else { -size }
}

/// A gradient from 1 down to 1e-12 whose rounding is that of its largest terms: dividing by each element calls it wrong
/// by a tenth; measured against the whole and against the row it is right, and real faults in it are still seen.
#[test]
fn b3_a_gradient_over_twelve_decades_is_judged_by_the_whole_and_by_the_row() {
    let want = Array2::from_shape_fn((26, 8), |(t, c)| number(8 * t + c) * 10f64.powf(-0.48 * t as f64));
    let rounding = Array2::from_shape_fn((26, 8), |(t, c)| 1e-13 * number(1000 + 8 * t + c));
    let got = &want + &rounding;
    let by_element = got.iter().zip(&want).map(|(g, w)| ((g - w) / w).abs()).fold(0.0, f64::max);
    assert!(by_element > 0.05, "{by_element:e}: the case shows nothing");
    let tolerance = Tolerance::new(1e-12, "rounding of sums of size 1 in f64, a thousand of them");
    let verdict = |got: &Array2<f64>| compare("dg", got.view().into_dyn(), want.view().into_dyn(), &tolerance);
    let comparison = verdict(&got);
    assert!(comparison.passes(), "{comparison}");
    for (what, fault) in [
        ("scaled", got.mapv(|x| 1.01 * x)),
        ("a row of size 1e-6 is missing", {
            let mut fault = got.clone();
            fault.index_axis_mut(Axis(0), 12).fill(0.0);
            fault
        }),
        ("two rows are swapped", {
            let mut fault = got.clone();
            let (a, b) = (got.row(3).to_owned(), got.row(4).to_owned());
            fault.row_mut(3).assign(&b);
            fault.row_mut(4).assign(&a);
            fault
        }),
    ] {
        assert!(!verdict(&fault).passes(), "{what} passes");
    }
}

/// One tile of 16 tokens of one head is zero among 8192: the rms of the whole tensor is inside the bound of bf16, and
/// the worst token is not.
#[test]
fn k2_a_missing_tile_in_a_long_tensor_is_caught_by_its_tokens() {
    let (time, heads, width) = (8192, 16, 8);
    let want = Array4::from_shape_fn((1, time, heads, width), |(_, t, h, c)| number((t * heads + h) * width + c));
    let mut got = want.clone();
    got.slice_mut(s![.., 4096..4112, 3, ..]).fill(0.0);
    let tolerance = Tolerance::new(2e-2, "the limit of bf16 in the report");
    let comparison = compare("dk", got.view().into_dyn(), want.view().into_dyn(), &tolerance);
    assert!(comparison.measures.rms < tolerance.tol, "{comparison}: the rms alone would see it");
    assert!(comparison.measures.token > 10.0 * tolerance.tol, "{comparison}");
    assert!(!comparison.passes());
    let whole = compare("dk", want.view().into_dyn(), want.view().into_dyn(), &tolerance);
    assert!(whole.passes(), "{whole}");
}
