//! Matrix products and sums over rows, spread over the cores by shape.
//!
//! Both split their work into blocks whose borders depend on the shape alone, and every element is summed in one order,
//! so the result has the same bits on one core and on sixty-four.

use ndarray::linalg::general_mat_mul;
use ndarray::{Array1, Array2, ArrayView1, ArrayView2, ArrayViewMut2, Axis};
use rayon::prelude::*;

use crate::scalar::Scalar;

/// Blocks of this many output rows of a product are one task. Every task packs the right operand again: with 256 rows
/// that costs a few per cent of multiplying with it, and a batch of 2048 tokens still feeds eight cores.
const PRODUCT_ROWS: usize = 256;

/// Blocks of this many rows are one task and one partial sum of a sum over rows.
const SUM_ROWS: usize = 128;

/// Products with fewer multiply-adds than this run on the calling thread: waking another costs more.
const SERIAL_WORK: usize = 1 << 16;

/// `a b`: `[M, N]` and `[N, P]` give `[M, P]`.
pub fn matmul<T: Scalar>(a: ArrayView2<'_, T>, b: ArrayView2<'_, T>) -> Array2<T> {
    let mut c = Array2::zeros((a.nrows(), b.ncols()));
    matmul_into(T::one(), a, b, T::zero(), c.view_mut());
    c
}

/// `c = alpha a b + beta c`.
pub fn matmul_into<T: Scalar>(
    alpha: T,
    a: ArrayView2<'_, T>,
    b: ArrayView2<'_, T>,
    beta: T,
    mut c: ArrayViewMut2<'_, T>,
) {
    let work = a.nrows() * a.ncols() * b.ncols();
    if work < SERIAL_WORK || c.nrows() < 2 {
        general_mat_mul(alpha, &a, &b, beta, &mut c);
        return;
    }
    // A short output (a weight gradient) still feeds every core of an ordinary machine.
    let block = PRODUCT_ROWS.min(c.nrows().div_ceil(4));
    c.axis_chunks_iter_mut(Axis(0), block)
        .into_par_iter()
        .zip(a.axis_chunks_iter(Axis(0), block).into_par_iter())
        .for_each(|(mut c, a)| general_mat_mul(alpha, &a, &b, beta, &mut c));
}

/// The inner product of two rows.
///
/// ndarray keeps eight running sums for contiguous rows, so it vectorises, where a plain loop would wait for each sum.
pub fn dot<T: Scalar>(a: &[T], b: &[T]) -> T {
    ArrayView1::from(a).dot(&ArrayView1::from(b))
}

/// Sums `f(block of rows)` over fixed blocks of rows, in order: how a parameter's gradient is reduced over tokens.
///
/// `f` gets the range of rows and returns that block's sum; the partial sums are added first to last.
pub fn sum_over_rows<T: Scalar>(
    rows: usize,
    width: usize,
    f: impl Fn(std::ops::Range<usize>) -> Array1<T> + Sync,
) -> Array1<T> {
    let blocks = rows.div_ceil(SUM_ROWS);
    let partial: Vec<Array1<T>> =
        (0..blocks).into_par_iter().map(|block| f(block * SUM_ROWS..((block + 1) * SUM_ROWS).min(rows))).collect();
    let mut sum = Array1::zeros(width);
    for p in &partial {
        sum += p;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::Array;

    #[test]
    fn blocks_do_not_change_the_product_or_its_bits() {
        let a = Array::from_shape_fn((299, 70), |(i, j)| ((i * 7 + j * 3) % 11) as f32 - 5.3);
        let b = Array::from_shape_fn((70, 50), |(i, j)| ((i * 5 + j) % 13) as f32 - 6.1);
        let one_thread = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let product = matmul(a.view(), b.view());
        assert_eq!(product, one_thread.install(|| matmul(a.view(), b.view())));
        let plain = Array::from_shape_fn((299, 50), |(i, j)| {
            (0..70).map(|k| f64::from(a[[i, k]]) * f64::from(b[[k, j]])).sum::<f64>()
        });
        for (x, y) in product.iter().zip(&plain) {
            // 70 products of magnitude up to 40 round 70 times in f32.
            assert!((f64::from(*x) - y).abs() <= 70.0 * 40.0 * f64::from(f32::EPSILON), "{x} {y}");
        }
    }

    #[test]
    fn an_empty_product_is_zero_and_beta_keeps_what_was_there() {
        let a = Array2::<f64>::zeros((3, 0));
        let b = Array2::<f64>::zeros((0, 2));
        let mut c = Array2::from_elem((3, 2), 2.0);
        matmul_into(1.0, a.view(), b.view(), 0.5, c.view_mut());
        assert_eq!(c, Array2::from_elem((3, 2), 1.0));
    }

    #[test]
    fn rows_are_summed_in_order() {
        let sum = sum_over_rows(1000, 1, |rows| Array1::from_elem(1, rows.map(|r| r as f64).sum::<f64>()));
        assert_eq!(sum[0], 499_500.0);
        assert_eq!(sum_over_rows::<f64>(0, 2, |_| Array1::zeros(2)), Array1::<f64>::zeros(2));
    }
}
