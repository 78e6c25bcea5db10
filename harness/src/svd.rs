//! A singular value decomposition for oracles.
//!
//! One-sided Jacobi: slow and accurate to the last digits, also where singular values lie close together or are small.
//! nalgebra's gives there a product that is off by up to 2e-8 of the matrix. (`ops/retract.rs` has an older copy of its
//! own, because receipts rest on that file.)

use nalgebra::{DMatrix, DVector};

/// X = P diag(s) Q^T for X `[n, k]`, n >= k; columns of P that belong to an s of zero are zero.
pub struct Svd {
    /// `[n, k]`
    pub p: DMatrix<f64>,
    /// `[k]`, in no order.
    pub s: DVector<f64>,
    /// `[k, k]`
    pub q: DMatrix<f64>,
}

impl Svd {
    /// Turns pairs of columns until all are orthogonal; their norms are the singular values.
    pub fn of(x: &DMatrix<f64>) -> Self {
        let k = x.ncols();
        let (mut p, mut q) = (x.clone(), DMatrix::identity(k, k));
        // Convergence is quadratic; a dozen sweeps are more than a matrix of a hundred columns takes.
        for _ in 0..20 {
            let mut turned = false;
            for i in 0..k {
                for j in i + 1..k {
                    turned |= make_orthogonal(&mut p, &mut q, i, j);
                }
            }
            if !turned {
                break;
            }
        }
        let s = DVector::from_fn(k, |j, _| p.column(j).norm());
        for j in (0..k).filter(|&j| s[j] > 0.0) {
            p.column_mut(j).unscale_mut(s[j]);
        }
        Self { p, s, q }
    }

    /// P diag(f(s)) Q^T.
    pub fn with(&self, f: impl Fn(f64) -> f64) -> DMatrix<f64> {
        &self.p * DMatrix::from_diagonal(&self.s.map(f)) * self.q.transpose()
    }

    /// The singular values, largest first.
    pub fn sorted(&self) -> Vec<f64> {
        let mut sorted: Vec<f64> = self.s.iter().copied().collect();
        sorted.sort_by(|a, b| b.total_cmp(a));
        sorted
    }
}

/// Turns columns i and j of `p` to be orthogonal, and those of `q` alike; says whether there was anything to turn.
fn make_orthogonal(p: &mut DMatrix<f64>, q: &mut DMatrix<f64>, i: usize, j: usize) -> bool {
    let (a, b) = (p.column(i).norm_squared(), p.column(j).norm_squared());
    let product = p.column(i).dot(&p.column(j));
    if product == 0.0 || product.abs() <= 1e-17 * (a * b).sqrt() {
        return false;
    }
    // The smaller root of t^2 + 2 zeta t - 1 is the tangent of the angle that makes them orthogonal.
    let zeta = (b - a) / (2.0 * product);
    let t = zeta.signum() / (zeta.abs() + zeta.hypot(1.0));
    let cosine = 1.0 / t.hypot(1.0);
    for matrix in [p, q] {
        for row in 0..matrix.nrows() {
            let (u, v) = (matrix[(row, i)], matrix[(row, j)]);
            matrix[(row, i)] = cosine * (u - t * v);
            matrix[(row, j)] = cosine * (t * u + v);
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw;

    #[test]
    fn the_decomposition_is_one() {
        for seed in 0..100 {
            let (n, k) = (12, 5);
            let values = draw::normal(&mut draw::stream(seed, &["svd"]), &[n, k]);
            let mut x = DMatrix::from_row_iterator(n, k, values.iter().copied());
            if seed % 2 == 0 {
                // A graded matrix, where absolute accuracy would not be enough.
                (0..k).for_each(|j| x.column_mut(j).scale_mut(10f64.powi(-3 * j as i32)));
            }
            let svd = Svd::of(&x);
            let identity = DMatrix::identity(k, k);
            assert!((svd.with(|s| s) - &x).norm() < 1e-14 * x.norm());
            assert!((svd.p.transpose() * &svd.p - &identity).norm() < 1e-13);
            assert!((svd.q.transpose() * &svd.q - &identity).norm() < 1e-14);
        }
        let zero = Svd::of(&DMatrix::zeros(3, 2));
        assert_eq!(zero.sorted(), [0.0, 0.0]);
        assert_eq!(zero.with(|s| s), DMatrix::zeros(3, 2));
    }
}
