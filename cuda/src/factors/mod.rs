//! Truncated singular value decompositions, one or E of them side by side: what `spectral` and `expert` share.
//!
//! ```text
//! a   = x U                 y   = (a * s) V^T = a (V * s)^T
//! b   = dy V                dx  = (b * s) U^T = b (U * s)^T
//! dU += (x^T b) * s         dV += (dy^T a) * s
//! ds += sum_rows b * a = sum_rows_of_U U * (x^T b)
//! ```
//!
//! Arm `plain` scales a and b, as the equations are usually written. Arm `fused` scales U and V, which have hundreds of
//! rows where a and b have one a token, and takes ds from the product that dU needs anyway: no pass over the tokens is
//! left but the products.
//!
//! With a format other than f32, U and V are the factors that [`format`] has written beside the masters, once a call of
//! forward; backward reads them again.

pub(crate) mod format;
pub(crate) mod fused;
pub(crate) mod plain;

use crate::tensor::Tensor;

/// The factors of E maps from I to O of rank R.
#[derive(Clone, Copy)]
pub(crate) struct Factors<'a> {
    /// `[E, I, R]`
    pub u: &'a Tensor,
    /// `[E, R]`
    pub s: &'a Tensor,
    /// `[E, O, R]`
    pub v: &'a Tensor,
}

/// The sizes of E maps.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub experts: usize,
    pub inner: usize,
    pub outer: usize,
    pub rank: usize,
}

/// How the U of one of several maps lie side by side in rows that hold all of them: `[I, maps, E, R]`. With it, the sum
/// over experts and maps of what each sends to x is one product.
#[derive(Clone, Copy)]
pub(crate) struct Side {
    /// Which map.
    pub map: usize,
    /// Of how many.
    pub maps: usize,
}

/// The names of a launch in the ledger, by operation.
#[derive(Clone, Copy)]
pub(crate) struct Names {
    pub stem: &'static str,
    pub scale: &'static str,
    pub finish: &'static str,
}
