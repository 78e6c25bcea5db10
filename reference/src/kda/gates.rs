//! The erase and write gates of one token in the token-recurrent form.
//!
//! In the terms of beta, the first channel's erase strength, the write with gates is
//!
//! ```text
//! u = w * v - Sh^T (b * k) = beta (v - Sh^T k) - (Sh^T ((b - beta) * k) + (beta - w) * v)
//! ```
//!
//! The right-hand side is what [`Gates::correct`] computes: KDA's correction, less what the channels have of their own.
//! Where all gates are equal the bracket is +0, whatever the inputs, so the result has the bits of KDA, which does not
//! compute the bracket. Where nothing erases (b = 0) it has those of w * v.

use super::Chain;
use super::lanes::{Lanes, lanes_for, load};
use super::recurrent::recall;
use crate::scalar::Scalar;

/// The gates of one token, and room for the correction.
pub(super) struct Gates<T> {
    /// b_t, beta in every channel where there is no gate.
    pub erase: Vec<T>,
    /// w_t, beta in every channel where there is no gate.
    pub write: Vec<Lanes<T>>,
    /// (b - beta) * k
    own: Vec<T>,
    /// Sh^T ((b - beta) * k)
    recalled: Vec<Lanes<T>>,
}

impl<T: Scalar> Gates<T> {
    pub fn new(key: usize, value: usize) -> Self {
        let wide = lanes_for(value);
        Self {
            erase: vec![T::zero(); key],
            write: vec![Lanes::zero(); wide],
            own: vec![T::zero(); key],
            recalled: vec![Lanes::zero(); wide],
        }
    }

    /// Reads those of token `t`.
    #[inline(always)]
    pub fn read(&mut self, chain: &Chain<'_, T>, t: usize) {
        match chain.erase(t) {
            [beta] => self.erase.fill(*beta),
            b => self.erase.copy_from_slice(b),
        }
        match chain.write(t) {
            [beta] => self.write.fill(Lanes::all(*beta)),
            w => load(w, w.len(), &mut self.write),
        }
    }

    /// Turns `u`, which holds Sh^T k, into what the token writes.
    #[inline(always)]
    pub fn correct(&mut self, faded: &[Lanes<T>], k: &[T], v: &[Lanes<T>], u: &mut [Lanes<T>]) {
        let beta = self.erase[0];
        for ((own, &b), &k) in self.own.iter_mut().zip(&self.erase).zip(k) {
            *own = (b - beta) * k;
        }
        recall(faded, &self.own, &mut self.recalled);
        for (((u, v), w), recalled) in u.iter_mut().zip(v).zip(&self.write).zip(&self.recalled) {
            let own = recalled.add_product(Lanes::all(beta).sub(*w), *v);
            *u = v.sub(*u).scale(beta).sub(own);
        }
    }
}
