//! The chunk form, one chain at a time: inside a chunk everything is a matrix product or a triangular solve.
//!
//! For a chunk of n tokens with entry state S, rows i, j = 1..n, G_i = g_1 + ... + g_i, r_i = b_i * k_i and
//! y_i = w_i * v_i, where b and w are beta in every channel unless there are gates:
//!
//! ```text
//! Qt_i = q_i e^{G_i}      Rt_i = r_i e^{G_i}      Kb_j = k_j e^{G_n - G_j}
//! P_ij = sum_c q_ic k_jc e^{G_ic - G_jc}  (j <= i)      L_ij = sum_c r_ic k_jc e^{G_ic - G_jc}  (j < i)
//! (I + L) U = Y - Rt S
//! O  = scale (Qt S + P U)
//! S' = Diag(e^{G_n}) S + Kb^T U
//! ```
//!
//! Adjoint, with dO and dS' the gradients of O and S':
//!
//! ```text
//! dU  = scale P^T dO + Kb dS'          (I + L)^T Z = dU
//! dS  = Diag(e^{G_n}) dS' + scale Qt^T dO - Rt^T Z
//! dv_i = w_i * Z_i                     dw_i = v_i * Z_i
//! dP  = scale tril(dO U^T)             dL  = -stril(Z U^T)
//! dQt = scale dO S^T                   dRt = -Z S^T                   dKb = U dS'^T
//! dq_i  = dQt_i e^{G_i} + sum_{j<=i} dP_ij k_j e^{G_i - G_j}
//! dr_i  = dRt_i e^{G_i} + sum_{j<i} dL_ij k_j e^{G_i - G_j}
//! dkw_j = dKb_j e^{G_n - G_j} + sum_{i>=j} dP_ij q_i e^{G_i - G_j} + sum_{i>j} dL_ij r_i e^{G_i - G_j}
//! dk = dkw + b * dr                    db = k * dr               dbeta = sum_c db + sum_j dw
//! ```
//!
//! **No difference of sums.** e^{G_i - G_j} is never taken from G_i - G_j, and e^{-G} never formed. The pairs j < i are
//! cut into `Block`s whose columns all lie before their rows; with m a block's first row, e^{G_i - G_m} belongs to the
//! row and e^{G_m - G_j} to the column. Both exponents are sums of g over the tokens between, so at most zero: any g <= 0
//! is fine, and where a factor underflows the true product is smaller still. A block's borders depend on positions in
//! the chunk alone and its anchor m is never later than its rows, so no token's bits depend on a later token.
//!
//! **dg by straddling sums.** dg_t is the sum over all pairs of a source before t and a sink at or after t. With the
//! parts of the gradients that cross the chunk's borders, A_i = q_i * dQt_i e^{G_i} + r_i * dRt_i e^{G_i} and
//! B_j = k_j * dKb_j e^{G_n - G_j},
//!
//! ```text
//! dg_t = e^{G_n} * rowsum(dS' * S) + sum_{i>=t} A_i + sum_{j<t} B_j + E_t
//! ```
//!
//! where E_t collects the blocks: with a block's own parts of q * dq + r * dr by row and of k * dkw by column, a t among
//! its rows gets the rows from t on and a t among its columns the columns before t. The shorter form, a reverse
//! cumulative sum of q * dq + r * dr - k * dkw, adds every pair after t once with each sign; at strong decay what is left
//! of that in f32 is rounding.
//!
//! The triangular systems are solved by substitution. An inverse from powers of L would overflow on repeated keys.

use std::ops::Range;

use ndarray::{Array1, Array2, ArrayView2, ArrayViewMut1, ArrayViewMut2, Axis, s};

use super::{Chain, Checkpoints, GradRows};
use crate::scalar::Scalar;

/// Runs a chain from `state`, which becomes the final state. Writes the output rows and the states at the checkpoints
/// where asked to.
pub(super) fn forward<T: Scalar>(
    chain: &Chain<'_, T>,
    chunk: usize,
    state: &mut [T],
    mut o: Option<&mut [&mut [T]]>,
    mut checkpoints: Option<&mut Checkpoints<T>>,
) {
    let (time, key, value) = chain.lengths();
    for start in (0..time).step_by(chunk) {
        if let Some(checkpoints) = checkpoints.as_deref_mut()
            && start % chain.segment == 0
        {
            checkpoints.extend_from_slice(state);
        }
        let chunk = Chunk::new(chain, start..(start + chunk).min(time));
        let mut s = as_state_mut(state, key, value);
        let u = chunk.solve_u(s.view());
        if let Some(o) = o.as_deref_mut() {
            let read = (chunk.decayed_q().dot(&s) + chunk.p.dot(&u)) * chain.scale;
            for (o, read) in o[chunk.tokens.clone()].iter_mut().zip(read.rows()) {
                ArrayViewMut1::from(&mut **o).assign(&read);
            }
        }
        chunk.leave(&u, &mut s);
    }
}

/// Runs a chain's adjoint from `dstate`, the gradient of the final state, which becomes that of the initial state.
/// `d_o` is the gradient of the whole output.
pub(super) fn backward<T: Scalar>(
    chain: &Chain<'_, T>,
    chunk: usize,
    checkpoints: &[T],
    d_o: &[T],
    dstate: &mut [T],
    grads: &mut GradRows<'_, T>,
) {
    let (time, key, value) = chain.lengths();
    let mut dstate = as_state_mut(dstate, key, value);
    for segment in (0..time.div_ceil(chain.segment)).rev() {
        let tokens = segment * chain.segment..((segment + 1) * chain.segment).min(time);
        let mut state = checkpoints[segment * key * value..][..key * value].to_vec();
        let mut chunks = Vec::new();
        for start in tokens.clone().step_by(chunk) {
            let chunk = Chunk::new(chain, start..(start + chunk).min(tokens.end));
            let mut s = as_state_mut(&mut state, key, value);
            let entry = s.to_owned();
            let u = chunk.solve_u(s.view());
            chunk.leave(&u, &mut s);
            chunks.push((chunk, entry, u));
        }
        for (chunk, entry, u) in chunks.iter().rev() {
            chunk.backward(entry, u, d_o, &mut dstate, grads);
        }
    }
}

fn as_state_mut<T>(state: &mut [T], key: usize, value: usize) -> ArrayViewMut2<'_, T> {
    ArrayViewMut2::from_shape((key, value), state).expect("a state has K * V numbers")
}

/// Pairs of one token out of `rows` and an earlier one out of `columns`; the columns end where the rows begin.
struct Block<T> {
    columns: Range<usize>,
    rows: Range<usize>,
    /// e^{G_m - G_j} for each column, m the first row, `[columns, K]`.
    column_decay: Array2<T>,
    /// e^{G_i - G_m} for each row, `[rows, K]`.
    row_decay: Array2<T>,
}

/// The part of a chunk that needs no state.
struct Chunk<'a, T> {
    chain: &'a Chain<'a, T>,
    tokens: Range<usize>,
    q: Array2<T>,
    k: Array2<T>,
    v: Array2<T>,
    /// b * k
    r: Array2<T>,
    /// The erase gate, `[tokens, K]`, or beta, `[tokens, 1]`.
    b: Array2<T>,
    /// The write gate, `[tokens, V]`, or beta, `[tokens, 1]`.
    w: Array2<T>,
    /// e^{G_i}
    from_entry: Array2<T>,
    /// e^{G_n - G_j}
    to_end: Array2<T>,
    blocks: Vec<Block<T>>,
    p: Array2<T>,
    l: Array2<T>,
}

impl<'a, T: Scalar> Chunk<'a, T> {
    fn new(chain: &'a Chain<'a, T>, tokens: Range<usize>) -> Self {
        let (_, key, value) = chain.lengths();
        let len = tokens.len();
        let q = gather(&tokens, key, |t| chain.q(t));
        let k = gather(&tokens, key, |t| chain.k(t));
        let v = gather(&tokens, value, |t| chain.v(t));
        let g = gather(&tokens, key, |t| chain.g(t));
        let b = gather(&tokens, chain.erase(tokens.start).len(), |t| chain.erase(t));
        let w = gather(&tokens, chain.write(tokens.start).len(), |t| chain.write(t));
        let r = &k * &b;
        let from_entry = exp_of_sums(&g, tokens.len(), (0..len).map(|i| (i, i)));
        let to_end = exp_of_sums(&g, tokens.len(), (0..len).rev().map(|j| (j, j + 1)));
        let blocks = blocks(&g);
        let mut p = Array2::zeros((len, len));
        let mut l = Array2::zeros((len, len));
        for i in 0..len {
            p[[i, i]] = q.row(i).dot(&k.row(i));
        }
        for block in &blocks {
            let k_columns = &k.slice(s![block.columns.clone(), ..]) * &block.column_decay;
            let pairs = s![block.rows.clone(), block.columns.clone()];
            p.slice_mut(pairs).assign(&(&q.slice(s![block.rows.clone(), ..]) * &block.row_decay).dot(&k_columns.t()));
            l.slice_mut(pairs).assign(&(&r.slice(s![block.rows.clone(), ..]) * &block.row_decay).dot(&k_columns.t()));
        }
        Self { chain, tokens, q, k, v, r, b, w, from_entry, to_end, blocks, p, l }
    }

    /// Qt
    fn decayed_q(&self) -> Array2<T> {
        &self.q * &self.from_entry
    }

    /// Rt
    fn decayed_r(&self) -> Array2<T> {
        &self.r * &self.from_entry
    }

    /// Kb
    fn decayed_k(&self) -> Array2<T> {
        &self.k * &self.to_end
    }

    /// e^{G_n} as a column.
    fn decay(&self) -> ArrayView2<'_, T> {
        self.from_entry.row(self.tokens.len() - 1).insert_axis(Axis(1))
    }

    fn solve_u(&self, state: ArrayView2<'_, T>) -> Array2<T> {
        let mut u = &self.v * &self.w - self.decayed_r().dot(&state);
        solve_lower(self.l.view(), u.view_mut());
        u
    }

    /// Turns the entry state into the state after the chunk.
    fn leave(&self, u: &Array2<T>, state: &mut ArrayViewMut2<'_, T>) {
        *state *= &self.decay();
        *state += &self.decayed_k().t().dot(u);
    }

    /// Writes the chunk's gradients and turns `dstate` from that of the state after the chunk into that of its entry.
    fn backward(
        &self,
        entry: &Array2<T>,
        u: &Array2<T>,
        d_o: &[T],
        dstate: &mut ArrayViewMut2<'_, T>,
        grads: &mut GradRows<'_, T>,
    ) {
        let (_, _, value) = self.chain.lengths();
        let len = self.tokens.len();
        let scaled_do = gather(&self.tokens, value, |t| self.chain.row(d_o, t, value)) * self.chain.scale;
        let mut z = self.p.t().dot(&scaled_do) + self.decayed_k().dot(dstate);
        solve_lower_transposed(self.l.view(), z.view_mut());
        // Only pairs that exist are ever read: the diagonal and the blocks.
        let dp = scaled_do.dot(&u.t());
        let dl = -z.dot(&u.t());

        // What crosses the chunk's borders.
        let mut dq = scaled_do.dot(&entry.t()) * &self.from_entry;
        let mut dr = -z.dot(&entry.t()) * &self.from_entry;
        let mut dkw = u.dot(&dstate.t()) * &self.to_end;
        let mut dg = Array2::zeros(dq.raw_dim());
        let through = (entry * &*dstate).sum_axis(Axis(1)).insert_axis(Axis(1)) * self.decay();
        dg += &through.t();
        add_from_row_on(dg.view_mut(), &(&self.q * &dq + &self.r * &dr));
        add_before_row(dg.view_mut(), &(&self.k * &dkw));

        // A token paired with itself has decay 1, whatever g.
        for i in 0..len {
            dq.row_mut(i).scaled_add(dp[[i, i]], &self.k.row(i));
            dkw.row_mut(i).scaled_add(dp[[i, i]], &self.q.row(i));
        }
        for block in &self.blocks {
            let (rows, columns) = (s![block.rows.clone(), ..], s![block.columns.clone(), ..]);
            let dp = dp.slice(s![block.rows.clone(), block.columns.clone()]);
            let dl = dl.slice(s![block.rows.clone(), block.columns.clone()]);
            let (q, r, k) = (self.q.slice(rows), self.r.slice(rows), self.k.slice(columns));
            let k_decayed = &k * &block.column_decay;
            let dq_block = dp.dot(&k_decayed) * &block.row_decay;
            let dr_block = dl.dot(&k_decayed) * &block.row_decay;
            let dkw_block =
                (dp.t().dot(&(&q * &block.row_decay)) + dl.t().dot(&(&r * &block.row_decay))) * &block.column_decay;
            add_from_row_on(dg.slice_mut(rows), &(&q * &dq_block + &r * &dr_block));
            add_before_row(dg.slice_mut(columns), &(&k * &dkw_block));
            dq.slice_mut(rows).scaled_add(T::one(), &dq_block);
            dr.slice_mut(rows).scaled_add(T::one(), &dr_block);
            dkw.slice_mut(columns).scaled_add(T::one(), &dkw_block);
        }

        *dstate *= &self.decay();
        *dstate += &self.decayed_q().t().dot(&scaled_do);
        *dstate -= &self.decayed_r().t().dot(&z);

        let dk = dkw + &dr * &self.b;
        let db = &self.k * &dr;
        let dw = &self.v * &z;
        let dv = z * &self.w;
        // Beta gets the gradient of the gates that it stands in for.
        let dbeta = match (&grads.db, &grads.dw) {
            (None, None) => db.sum_axis(Axis(1)) + dw.sum_axis(Axis(1)),
            (None, Some(_)) => db.sum_axis(Axis(1)),
            (Some(_), None) => dw.sum_axis(Axis(1)),
            (Some(_), Some(_)) => Array1::zeros(len),
        };
        for (i, t) in self.tokens.clone().enumerate() {
            ArrayViewMut1::from(&mut *grads.dq[t]).assign(&dq.row(i));
            ArrayViewMut1::from(&mut *grads.dk[t]).assign(&dk.row(i));
            ArrayViewMut1::from(&mut *grads.dv[t]).assign(&dv.row(i));
            ArrayViewMut1::from(&mut *grads.dg[t]).assign(&dg.row(i));
            grads.dbeta[t][0] = dbeta[i];
            if let Some(rows) = &mut grads.db {
                ArrayViewMut1::from(&mut *rows[t]).assign(&db.row(i));
            }
            if let Some(rows) = &mut grads.dw {
                ArrayViewMut1::from(&mut *rows[t]).assign(&dw.row(i));
            }
        }
    }
}

/// The chain's rows of these tokens as a matrix.
fn gather<'a, T: Scalar>(tokens: &Range<usize>, width: usize, row: impl Fn(usize) -> &'a [T]) -> Array2<T> {
    let values = tokens.clone().flat_map(|t| row(t).iter().copied()).collect();
    Array2::from_shape_vec((tokens.len(), width), values).expect("every row has the same width")
}

/// Exponentials of running sums of g, in `rows` rows.
///
/// Each step (to, from) of `order` adds row `from` of g, where there is one, to the running sum and writes its
/// exponential to row `to`. A sum of numbers of one sign never cancels, and minus infinity is an ordinary number here.
fn exp_of_sums<T: Scalar>(g: &Array2<T>, rows: usize, order: impl Iterator<Item = (usize, usize)>) -> Array2<T> {
    let mut out = Array2::zeros((rows, g.ncols()));
    let mut sum = Array1::zeros(g.ncols());
    for (to, from) in order {
        if from < g.nrows() {
            sum += &g.row(from);
        }
        out.row_mut(to).assign(&sum.mapv(T::exp));
    }
    out
}

/// Cuts the pairs j < i of a chunk into blocks: 1 x 1 between neighbours, then 2 x 2 between pairs, and so on.
///
/// Two positions belong to the level of the highest bit they differ in. The last block of a level may lack rows.
fn blocks<T: Scalar>(g: &Array2<T>) -> Vec<Block<T>> {
    let len = g.nrows();
    let mut blocks = Vec::new();
    let mut size = 1;
    while size < len {
        for first in (0..len - size).step_by(2 * size) {
            let middle = first + size;
            let columns = first..middle;
            let rows = middle..(middle + size).min(len);
            let mut column_decay = Array2::zeros((columns.len(), g.ncols()));
            let mut sum = Array1::zeros(g.ncols());
            for j in columns.clone().rev() {
                sum += &g.row(j + 1);
                column_decay.row_mut(j - first).assign(&sum.mapv(T::exp));
            }
            let mut row_decay = Array2::ones((rows.len(), g.ncols()));
            let mut sum = Array1::zeros(g.ncols());
            for i in rows.clone().skip(1) {
                sum += &g.row(i);
                row_decay.row_mut(i - middle).assign(&sum.mapv(T::exp));
            }
            blocks.push(Block { columns, rows, column_decay, row_decay });
        }
        size *= 2;
    }
    blocks
}

/// Adds to each row of `dg` the rows of `parts` from the same row on.
fn add_from_row_on<T: Scalar>(mut dg: ArrayViewMut2<'_, T>, parts: &Array2<T>) {
    let mut sum = Array1::zeros(dg.ncols());
    for t in (0..dg.nrows()).rev() {
        sum += &parts.row(t);
        dg.row_mut(t).scaled_add(T::one(), &sum);
    }
}

/// Adds to each row of `dg` the rows of `parts` before it.
fn add_before_row<T: Scalar>(mut dg: ArrayViewMut2<'_, T>, parts: &Array2<T>) {
    let mut sum = Array1::zeros(dg.ncols());
    for t in 0..dg.nrows() {
        dg.row_mut(t).scaled_add(T::one(), &sum);
        sum += &parts.row(t);
    }
}

/// Solves (I + L) X = B in place, row by row from the first. Reads `l` below its diagonal only.
fn solve_lower<T: Scalar>(l: ArrayView2<'_, T>, mut x: ArrayViewMut2<'_, T>) {
    for i in 0..x.nrows() {
        let (solved, mut rest) = x.view_mut().split_at(Axis(0), i);
        for (j, row) in solved.rows().into_iter().enumerate() {
            rest.row_mut(0).scaled_add(-l[[i, j]], &row);
        }
    }
}

/// Solves (I + L)^T X = B in place, row by row from the last. Reads `l` below its diagonal only.
fn solve_lower_transposed<T: Scalar>(l: ArrayView2<'_, T>, mut x: ArrayViewMut2<'_, T>) {
    let len = x.nrows();
    for i in (0..len).rev() {
        let (mut rest, solved) = x.view_mut().split_at(Axis(0), i + 1);
        for (j, row) in (i + 1..len).zip(solved.rows()) {
            rest.row_mut(i).scaled_add(-l[[j, i]], &row);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The inverse of a random unit triangular matrix of 64 rows is huge: the residual must still be rounding, relative
    /// to the solution.
    #[test]
    fn c1_substitution_on_an_ill_conditioned_triangle() {
        let mut state = 7u64;
        let l = Array2::from_shape_fn((64, 64), |_| {
            // Sums of twelve uniform numbers are close to normal.
            let mut sum = -6.0;
            for _ in 0..12 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                sum += (state >> 11) as f64 / (1u64 << 53) as f64;
            }
            sum
        });
        let mut unit = Array2::from_shape_fn((64, 64), |(i, j)| if j < i { l[[i, j]] } else { 0.0 });
        unit.diag_mut().fill(1.0);
        let identity = Array2::<f64>::eye(64);
        let (mut lower, mut upper) = (identity.clone(), identity.clone());
        solve_lower(l.view(), lower.view_mut());
        solve_lower_transposed(l.view(), upper.view_mut());
        let largest = lower.iter().fold(0.0f64, |a, x| a.max(x.abs()));
        assert!(largest > 1e5, "the matrix is meant to be ill-conditioned, its inverse reaches {largest:e}");
        for residual in [unit.dot(&lower) - &identity, unit.t().dot(&upper) - &identity] {
            let worst = residual.iter().fold(0.0f64, |a, x| a.max(x.abs()));
            assert!(worst <= 64.0 * 4.0 * f64::EPSILON * largest, "{worst:e} with an inverse of {largest:e}");
        }
    }

    #[test]
    fn every_pair_is_in_one_block_and_blocks_do_not_look_ahead() {
        for len in [1, 2, 3, 7, 8, 9, 16, 21] {
            let g = Array2::from_shape_fn((len, 1), |(i, _)| -0.01 * (i + 1) as f64);
            let mut seen = Array2::<u32>::zeros((len, len));
            for block in blocks(&g) {
                assert_eq!(block.columns.end, block.rows.start);
                for i in block.rows.clone() {
                    for j in block.columns.clone() {
                        seen[[i, j]] += 1;
                        let decay = block.row_decay[[i - block.rows.start, 0]]
                            * block.column_decay[[j - block.columns.start, 0]];
                        let exponent: f64 = (j + 1..=i).map(|s| g[[s, 0]]).sum();
                        approx::assert_relative_eq!(decay, exponent.exp(), max_relative = 1e-14);
                    }
                }
            }
            assert!(seen.indexed_iter().all(|((i, j), &n)| n == u32::from(j < i)), "{len}");
        }
    }
}
