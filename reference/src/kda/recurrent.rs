//! The token-recurrent form, one chain at a time: the specification, and the trainer's hot path on a CPU.
//!
//! A state is K rows of `Lanes`, and everything is a pass over those rows. `multiversion` compiles both entry points
//! for several instruction sets and picks one when the program runs; the passes are `inline(always)`, so they are
//! compiled along.

use std::ops::Range;

use multiversion::multiversion;

use super::gates::Gates;
use super::lanes::{Lanes, four_sums, lanes_for, load, store};
use super::{Chain, Checkpoints, GradRows};
use crate::scalar::Scalar;

/// Independent running sums of a column. One alone would wait for the latency of every addition.
const SUMS: usize = 4;

/// Runs a chain from `state`, which becomes the final state. Writes the output rows and the states at the checkpoints
/// where asked to.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512dq+avx512bw+avx2+fma", "x86_64+avx2+fma"))]
pub(super) fn forward<T: Scalar>(
    chain: &Chain<'_, T>,
    state: &mut [T],
    mut o: Option<&mut [&mut [T]]>,
    mut checkpoints: Option<&mut Checkpoints<T>>,
) {
    let (time, key, value) = chain.lengths();
    let wide = lanes_for(value);
    let mut s = vec![Lanes::zero(); key * wide];
    load(state, value, &mut s);
    let mut decay = vec![T::zero(); key];
    let mut v = vec![Lanes::zero(); wide];
    let mut u = vec![Lanes::zero(); wide];
    let mut read = vec![Lanes::zero(); wide];
    let mut gates = chain.has_gates().then(|| Gates::new(key, value));
    for t in 0..time {
        if let Some(checkpoints) = checkpoints.as_deref_mut()
            && t % chain.segment == 0
        {
            store(&s, value, state);
            checkpoints.extend_from_slice(state);
        }
        let k = chain.k(t);
        exp(chain.g(t), &mut decay);
        load(chain.v(t), value, &mut v);
        forget_and_recall(&mut s, &decay, k, &mut u);
        match &mut gates {
            None => {
                let beta = chain.beta(t);
                for (u, v) in u.iter_mut().zip(&v) {
                    *u = v.sub(*u).scale(beta);
                }
            }
            Some(gates) => {
                gates.read(chain, t);
                gates.correct(&s, k, &v, &mut u);
            }
        }
        write_and_read(&mut s, k, &u, chain.q(t), &mut read);
        if let Some(o) = o.as_deref_mut() {
            for read in &mut read {
                *read = read.scale(chain.scale);
            }
            store(&read, value, o[t]);
        }
    }
    store(&s, value, state);
}

/// What backward needs of one segment, computed again from its first state.
struct Replay<T> {
    /// e^{g_t}, `[segment, K]`.
    decay: Vec<T>,
    /// v_t - Sh_t^T k_t, `[segment, V]`; with gates Sh_t^T k_t.
    error: Vec<Lanes<T>>,
    /// u_t, `[segment, V]`.
    u: Vec<Lanes<T>>,
    /// Sh_t, `[segment, K, V]`.
    faded: Vec<Lanes<T>>,
}

/// Runs a chain's adjoint from `dstate`, the gradient of the final state, which becomes that of the initial state.
/// `d_o` is the gradient of the whole output.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512dq+avx512bw+avx2+fma", "x86_64+avx2+fma"))]
pub(super) fn backward<T: Scalar>(
    chain: &Chain<'_, T>,
    checkpoints: &[T],
    d_o: &[T],
    dstate: &mut [T],
    grads: &mut GradRows<'_, T>,
) {
    let (time, key, value) = chain.lengths();
    let wide = lanes_for(value);
    let longest = chain.segment.min(time);
    let mut replay = Replay {
        decay: vec![T::zero(); longest * key],
        error: vec![Lanes::zero(); longest * wide],
        u: vec![Lanes::zero(); longest * wide],
        faded: vec![Lanes::zero(); longest * key * wide],
    };
    // D between tokens, M within one.
    let mut d = vec![Lanes::zero(); key * wide];
    load(dstate, value, &mut d);
    let mut scaled_q = vec![T::zero(); key];
    let mut do_t = vec![Lanes::zero(); wide];
    let mut z = vec![Lanes::zero(); wide];
    let mut v = vec![Lanes::zero(); wide];
    let mut gates = Gates::new(key, value);
    for segment in (0..time.div_ceil(chain.segment)).rev() {
        let start = segment * chain.segment;
        let end = (start + chain.segment).min(time);
        let entry = &checkpoints[segment * key * value..][..key * value];
        run_again(chain, start..end, entry, &mut gates, &mut replay);
        for t in (start..end).rev() {
            let n = t - start;
            let decay = &replay.decay[n * key..][..key];
            let error = &replay.error[n * wide..][..wide];
            let faded = &replay.faded[n * key * wide..][..key * wide];
            let u = &replay.u[n * wide..][..wide];
            let k = chain.k(t);
            gates.read(chain, t);
            for (scaled, &q) in scaled_q.iter_mut().zip(chain.q(t)) {
                *scaled = chain.scale * q;
            }
            load(chain.row(d_o, t, value), value, &mut do_t);
            // M = D + scale q do^T, and z = M^T k.
            write_and_read(&mut d, &scaled_q, &do_t, k, &mut z);
            let u_do = dot(u, &do_t);
            let erase = &gates.erase[..key];
            let (dq, dk, dg) = (&mut *grads.dq[t], &mut *grads.dk[t], &mut *grads.dg[t]);
            for c in 0..key {
                let b = erase[c];
                let sums = leave_row(c, key, &mut d, faded, (b * k[c], decay[c]), (&do_t, u, &z));
                // scale S_t do, with S_t = Sh_t + k u^T.
                dq[c] = chain.scale * k[c].mul_add(u_do, sums.faded_do);
                dk[c] = sums.m_u - b * sums.faded_z;
                dg[c] = sums.dh_faded;
            }
            if chain.has_gates() {
                load(chain.v(t), value, &mut v);
                leave_gates(t, k, faded, (&mut v, &z), grads);
            } else {
                grads.dbeta[t][0] = dot(&z, error);
            }
            for (z, &w) in z.iter_mut().zip(&gates.write) {
                *z = z.mul(w);
            }
            store(&z, value, grads.dv[t]);
        }
    }
    store(&d, value, dstate);
}

/// Fills `replay` for the tokens of one segment that starts in the state `entry`.
#[inline(always)]
fn run_again<T: Scalar>(
    chain: &Chain<'_, T>,
    tokens: Range<usize>,
    entry: &[T],
    gates: &mut Gates<T>,
    replay: &mut Replay<T>,
) {
    let (_, key, value) = chain.lengths();
    let wide = lanes_for(value);
    let state = key * wide;
    let mut v = vec![Lanes::zero(); wide];
    let start = tokens.start;
    for t in tokens {
        let n = t - start;
        let decay = &mut replay.decay[n * key..][..key];
        let error = &mut replay.error[n * wide..][..wide];
        exp(chain.g(t), decay);
        if n == 0 {
            load(entry, value, &mut replay.faded[..state]);
            forget_and_recall(&mut replay.faded[..state], decay, chain.k(t), error);
        } else {
            let (before, faded) = replay.faded[(n - 1) * state..][..2 * state].split_at_mut(state);
            let u = &replay.u[(n - 1) * wide..][..wide];
            write_forget_and_recall(before, chain.k(t - 1), u, decay, chain.k(t), faded, error);
        }
        load(chain.v(t), value, &mut v);
        let u = &mut replay.u[n * wide..][..wide];
        if chain.has_gates() {
            gates.read(chain, t);
            u.copy_from_slice(error);
            gates.correct(&replay.faded[n * state..][..state], chain.k(t), &v, u);
        } else {
            for ((error, u), v) in error.iter_mut().zip(u).zip(&v) {
                *error = v.sub(*error);
                *u = error.scale(chain.beta(t));
            }
        }
    }
}

/// The gradients of the gates that there are, and of beta where it stands in for one. `v` is overwritten.
#[inline(always)]
fn leave_gates<T: Scalar>(
    t: usize,
    k: &[T],
    faded: &[Lanes<T>],
    (v, z): (&mut [Lanes<T>], &[Lanes<T>]),
    grads: &mut GradRows<'_, T>,
) {
    let mut dbeta = T::zero();
    for (c, &k_c) in k.iter().enumerate() {
        let mut faded_z = Lanes::zero();
        for (column, &z) in faded.chunks_exact(k.len()).zip(z) {
            faded_z = faded_z.add_product(column[c], z);
        }
        // k * dr, with dr = -Sh z.
        let db_c = -(k_c * faded_z.sum());
        match &mut grads.db {
            Some(db) => db[t][c] = db_c,
            None => dbeta += db_c,
        }
    }
    match &mut grads.dw {
        Some(dw) => {
            v.iter_mut().zip(z).for_each(|(v, &z)| *v = v.mul(z));
            let row = &mut *dw[t];
            store(v, row.len(), row);
        }
        None => dbeta += dot(v, z),
    }
    grads.dbeta[t][0] = dbeta;
}

#[inline(always)]
fn exp<T: Scalar>(g: &[T], decay: &mut [T]) {
    for (decay, &g) in decay.iter_mut().zip(g) {
        *decay = g.exp();
    }
}

/// Sh = Diag(decay) S in place, and recalled = Sh^T k.
#[inline(always)]
fn forget_and_recall<T: Scalar>(state: &mut [Lanes<T>], decay: &[T], k: &[T], recalled: &mut [Lanes<T>]) {
    let (decay_groups, decay_rest) = decay.as_chunks::<SUMS>();
    let (k_groups, k_rest) = k.as_chunks::<SUMS>();
    for (block, recalled) in state.chunks_exact_mut(k.len()).zip(recalled) {
        let (groups, rest) = block.as_chunks_mut::<SUMS>();
        let mut sums = [Lanes::zero(); SUMS];
        for ((rows, decay), k) in groups.iter_mut().zip(decay_groups).zip(k_groups) {
            for n in 0..SUMS {
                rows[n] = rows[n].scale(decay[n]);
                sums[n] = sums[n].add_scaled(rows[n], k[n]);
            }
        }
        for ((row, &decay), &k) in rest.iter_mut().zip(decay_rest).zip(k_rest) {
            *row = row.scale(decay);
            sums[0] = sums[0].add_scaled(*row, k);
        }
        *recalled = total(sums);
    }
}

/// recalled = S^T k
#[inline(always)]
pub(super) fn recall<T: Scalar>(state: &[Lanes<T>], k: &[T], recalled: &mut [Lanes<T>]) {
    for (block, recalled) in state.chunks_exact(k.len()).zip(recalled) {
        let mut sum = Lanes::zero();
        for (&row, &k) in block.iter().zip(k) {
            sum = sum.add_scaled(row, k);
        }
        *recalled = sum;
    }
}

/// S += k u^T in place, and then read = S^T q.
#[inline(always)]
fn write_and_read<T: Scalar>(state: &mut [Lanes<T>], k: &[T], u: &[Lanes<T>], q: &[T], read: &mut [Lanes<T>]) {
    let (k_groups, k_rest) = k.as_chunks::<SUMS>();
    let (q_groups, q_rest) = q.as_chunks::<SUMS>();
    for ((block, &u), read) in state.chunks_exact_mut(k.len()).zip(u).zip(read) {
        let (groups, rest) = block.as_chunks_mut::<SUMS>();
        let mut sums = [Lanes::zero(); SUMS];
        for ((rows, k), q) in groups.iter_mut().zip(k_groups).zip(q_groups) {
            for n in 0..SUMS {
                rows[n] = rows[n].add_scaled(u, k[n]);
                sums[n] = sums[n].add_scaled(rows[n], q[n]);
            }
        }
        for ((row, &k), &q) in rest.iter_mut().zip(k_rest).zip(q_rest) {
            *row = row.add_scaled(u, k);
            sums[0] = sums[0].add_scaled(*row, q);
        }
        *read = total(sums);
    }
}

/// Sh = Diag(decay) (Sh_before + k_before u^T), and recalled = Sh^T k: [`write_and_read`]'s write and the next token's
/// [`forget_and_recall`] in one pass, with the same roundings.
#[inline(always)]
fn write_forget_and_recall<T: Scalar>(
    before: &[Lanes<T>],
    k_before: &[T],
    u: &[Lanes<T>],
    decay: &[T],
    k: &[T],
    faded: &mut [Lanes<T>],
    recalled: &mut [Lanes<T>],
) {
    let (k_before_groups, k_before_rest) = k_before.as_chunks::<SUMS>();
    let (decay_groups, decay_rest) = decay.as_chunks::<SUMS>();
    let (k_groups, k_rest) = k.as_chunks::<SUMS>();
    let blocks = before.chunks_exact(k.len()).zip(faded.chunks_exact_mut(k.len()));
    for (((before, faded), &u), recalled) in blocks.zip(u).zip(recalled) {
        let (before_groups, before_rest) = before.as_chunks::<SUMS>();
        let (faded_groups, faded_rest) = faded.as_chunks_mut::<SUMS>();
        let mut sums = [Lanes::zero(); SUMS];
        let factors = k_before_groups.iter().zip(decay_groups).zip(k_groups);
        for ((before, faded), ((k_before, decay), k)) in before_groups.iter().zip(faded_groups).zip(factors) {
            for n in 0..SUMS {
                faded[n] = before[n].add_scaled(u, k_before[n]).scale(decay[n]);
                sums[n] = sums[n].add_scaled(faded[n], k[n]);
            }
        }
        let factors = k_before_rest.iter().zip(decay_rest).zip(k_rest);
        for ((before, faded), ((&k_before, &decay), &k)) in before_rest.iter().zip(faded_rest).zip(factors) {
            *faded = before.add_scaled(u, k_before).scale(decay);
            sums[0] = sums[0].add_scaled(*faded, k);
        }
        *recalled = total(sums);
    }
}

#[inline(always)]
fn total<T: Scalar>(sums: [Lanes<T>; SUMS]) -> Lanes<T> {
    sums[0].add(sums[1]).add(sums[2].add(sums[3]))
}

/// The sums over one row of the state that a token's gradients need.
struct RowSums<T> {
    /// Sh do
    faded_do: T,
    /// Sh z
    faded_z: T,
    /// M u
    m_u: T,
    /// rowsum(Dh * Sh)
    dh_faded: T,
}

/// Turns row `c` of M into that of the D of the token before: Dh = M - r z^T, then D = Diag(decay) Dh.
#[inline(always)]
fn leave_row<T: Scalar>(
    c: usize,
    key: usize,
    m: &mut [Lanes<T>],
    faded: &[Lanes<T>],
    (r, decay): (T, T),
    (d_o, u, z): (&[Lanes<T>], &[Lanes<T>], &[Lanes<T>]),
) -> RowSums<T> {
    let [mut faded_do, mut faded_z, mut m_u, mut dh_faded] = [Lanes::zero(); 4];
    for (j, ((&d_o, &u), &z)) in d_o.iter().zip(u).zip(z).enumerate() {
        let at = j * key + c;
        faded_do = faded_do.add_product(faded[at], d_o);
        faded_z = faded_z.add_product(faded[at], z);
        m_u = m_u.add_product(m[at], u);
        let dh = m[at].add_scaled(z, -r);
        dh_faded = dh_faded.add_product(dh, faded[at]);
        m[at] = dh.scale(decay);
    }
    let [faded_do, faded_z, m_u, dh_faded] = four_sums(&[faded_do, faded_z, m_u, dh_faded]);
    RowSums { faded_do, faded_z, m_u, dh_faded }
}

/// x . y
#[inline(always)]
fn dot<T: Scalar>(x: &[Lanes<T>], y: &[Lanes<T>]) -> T {
    let mut sums = Lanes::zero();
    for (&x, &y) in x.iter().zip(y) {
        sums = sums.add_product(x, y);
    }
    sums.sum()
}
