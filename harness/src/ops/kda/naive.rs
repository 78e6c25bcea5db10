//! `kda` in plain loops, one (batch entry, head) at a time: the recurrence and its adjoint as they are written down.
//!
//! Generic over the float so that a test can also see what f32 does to the textbook formula for dg. Every term can be
//! broken by name; the names are the mutants of `mutants`.

use num_traits::Float;

/// A state: K rows of V numbers.
pub type State<F> = Vec<Vec<F>>;

/// The inputs of one chain, a row a token.
pub struct Tokens<F> {
    /// Queries.
    pub q: Vec<Vec<F>>,
    /// Keys.
    pub k: Vec<Vec<F>>,
    /// Values.
    pub v: Vec<Vec<F>>,
    /// Logarithms of the decays.
    pub g: Vec<Vec<F>>,
    /// Erase strengths b, K numbers a token.
    pub erase: Vec<Vec<F>>,
    /// Write strengths w, V numbers a token.
    pub write: Vec<Vec<F>>,
    /// Whether b and w are gates of their own. Where they are not, they are beta in every channel, whose gradient is
    /// then theirs.
    pub gates: (bool, bool),
    /// What multiplies the query.
    pub scale: F,
    /// K.
    pub key: usize,
    /// V.
    pub value: usize,
}

/// What forward leaves behind.
pub struct Forward<F> {
    /// Outputs, a row a token.
    pub o: Vec<Vec<F>>,
    /// S_0, S_1, .., S_T.
    pub states: Vec<State<F>>,
    /// Sh_1, .., Sh_T.
    pub faded: Vec<State<F>>,
    /// u_1, .., u_T.
    pub u: Vec<Vec<F>>,
}

/// The gradients of one chain, a row a token.
pub struct Backward<F> {
    /// Of the queries.
    pub dq: Vec<Vec<F>>,
    /// Of the keys.
    pub dk: Vec<Vec<F>>,
    /// Of the erase vectors r = b * k: the part of dk and db that came through the correction.
    pub dr: Vec<Vec<F>>,
    /// Of the erase strengths.
    pub db: Vec<Vec<F>>,
    /// Of the write strengths.
    pub dw: Vec<Vec<F>>,
    /// Of the values.
    pub dv: Vec<Vec<F>>,
    /// Of g.
    pub dg: Vec<Vec<F>>,
    /// Of beta.
    pub dbeta: Vec<F>,
    /// dS_0, dS_1, .., dS_T: each the gradient of the state between two tokens.
    pub dstates: Vec<State<F>>,
}

/// A state of zeros.
pub fn zeros<F: Float>(key: usize, value: usize) -> State<F> {
    vec![vec![F::zero(); value]; key]
}

/// S x, one number a row.
fn times<F: Float>(s: &State<F>, x: &[F]) -> Vec<F> {
    s.iter().map(|row| row.iter().zip(x).fold(F::zero(), |sum, (&s, &x)| sum + s * x)).collect()
}

/// S^T x, one number a column.
fn transposed_times<F: Float>(s: &State<F>, x: &[F], value: usize) -> Vec<F> {
    let mut sums = vec![F::zero(); value];
    for (row, &x) in s.iter().zip(x) {
        for (sum, &s) in sums.iter_mut().zip(row) {
            *sum = *sum + s * x;
        }
    }
    sums
}

/// S + x y^T.
fn plus_outer<F: Float>(s: &State<F>, x: &[F], y: &[F]) -> State<F> {
    s.iter().zip(x).map(|(row, &x)| row.iter().zip(y).map(|(&s, &y)| s + x * y).collect()).collect()
}

/// Diag(a) S.
fn scale_rows<F: Float>(s: &State<F>, a: &[F]) -> State<F> {
    s.iter().zip(a).map(|(row, &a)| row.iter().map(|&s| a * s).collect()).collect()
}

fn scaled<F: Float>(x: &[F], a: F) -> Vec<F> {
    x.iter().map(|&x| a * x).collect()
}

/// x * y, elementwise.
fn times_each<F: Float>(x: &[F], y: &[F]) -> Vec<F> {
    x.iter().zip(y).map(|(&x, &y)| x * y).collect()
}

fn sum<F: Float>(x: &[F]) -> F {
    x.iter().fold(F::zero(), |sum, &x| sum + x)
}

fn dot<F: Float>(x: &[F], y: &[F]) -> F {
    x.iter().zip(y).fold(F::zero(), |sum, (&x, &y)| sum + x * y)
}

impl<F: Float> Tokens<F> {
    fn decay(&self, t: usize, twist: Option<&str>) -> Vec<F> {
        match twist {
            Some("decay-dropped") => vec![F::one(); self.key],
            Some("decay-in-base-two") => self.g[t].iter().map(|g| g.exp2()).collect(),
            Some("decay-of-the-token-before") if t > 0 => self.g[t - 1].iter().map(|g| g.exp()).collect(),
            Some("decay-of-the-first-channel") => vec![self.g[t][0].exp(); self.key],
            _ => self.g[t].iter().map(|g| g.exp()).collect(),
        }
    }

    fn erase(&self, t: usize, twist: Option<&str>) -> Vec<F> {
        match twist {
            Some("erase-of-the-first-channel") => vec![self.erase[t][0]; self.key],
            _ => self.erase[t].clone(),
        }
    }

    fn write(&self, t: usize, twist: Option<&str>) -> Vec<F> {
        let beyond_one = F::one() + F::epsilon();
        match twist {
            Some("write-of-the-first-channel") => vec![self.write[t][0]; self.value],
            Some("gates-off-by-an-ulp") if self.gates != (false, false) => scaled(&self.write[t], beyond_one),
            _ => self.write[t].clone(),
        }
    }

    /// Runs the chain from `initial`.
    pub fn forward(&self, initial: State<F>, twist: Option<&str>) -> Forward<F> {
        let is = |name: &str| twist == Some(name);
        let value = self.value;
        let mut run = Forward { o: vec![], states: vec![initial], faded: vec![], u: vec![] };
        for t in 0..self.q.len() {
            let before = &run.states[t];
            let decay = self.decay(t, twist);
            let faded = if is("decay-after-write") { before.clone() } else { scale_rows(before, &decay) };
            let erase = self.erase(t, twist);
            let r = times_each(&erase, &self.k[t]);
            let recalled = match twist {
                Some("error-without-recall") => vec![F::zero(); value],
                Some("recall-from-state-before-decay") => transposed_times(before, &r, value),
                Some("recall-by-query") => transposed_times(&faded, &times_each(&erase, &self.q[t]), value),
                _ => transposed_times(&faded, &r, value),
            };
            let sign = if is("recall-sign") { -F::one() } else { F::one() };
            let write = if is("beta-on-recall-only") { vec![F::one(); value] } else { self.write(t, twist) };
            let y = times_each(&write, &self.v[t]);
            let u: Vec<F> = y.iter().zip(&recalled).map(|(&y, &recalled)| y - sign * recalled).collect();
            let mut state = plus_outer(&faded, &self.k[t], &u);
            if is("decay-after-write") {
                state = scale_rows(&state, &decay);
            }
            let scale = match twist {
                Some("scale-dropped") => F::one(),
                Some("scale-applied-twice") => self.scale * self.scale,
                _ => self.scale,
            };
            let read = if is("read-before-write") { &faded } else { &state };
            let mut o = scaled(&transposed_times(read, &self.q[t], value), scale);
            if is("output-peeks-at-next-gate")
                && let Some(next) = self.g.get(t + 1)
            {
                o[0] = o[0] * (F::one() + F::epsilon() * next[0].exp() * (F::one() + F::one()));
            }
            run.o.push(o);
            run.faded.push(faded);
            run.u.push(u);
            run.states.push(state);
        }
        run
    }

    /// Runs the chain's adjoint from the gradient of the final state.
    pub fn backward(
        &self,
        forward: &Forward<F>,
        d_o: &[Vec<F>],
        dfinal: State<F>,
        starts_empty: bool,
        twist: Option<&str>,
    ) -> Backward<F> {
        let is = |name: &str| twist == Some(name);
        let time = self.q.len();
        let wide = |width: usize| vec![vec![F::zero(); width]; time];
        let mut back = Backward {
            dq: wide(self.key),
            dk: wide(self.key),
            dr: wide(self.key),
            db: wide(self.key),
            dw: wide(self.value),
            dv: wide(self.value),
            dg: wide(self.key),
            dbeta: vec![F::zero(); time],
            dstates: vec![dfinal],
        };
        for t in (0..time).rev() {
            let (k, erase) = (&self.k[t], &self.erase[t]);
            let faded = &forward.faded[t];
            let decay = self.decay(t, twist);
            let d = back.dstates.last().expect("there is always the state after this token").clone();
            let m = plus_outer(&d, &scaled(&self.q[t], self.scale), &d_o[t]);
            let read = if is("dq-from-faded-state") { faded } else { &forward.states[t + 1] };
            let scale = if is("dq-without-scale") { F::one() } else { self.scale };
            back.dq[t] = scaled(&times(read, &d_o[t]), scale);
            let z_source = if is("z-without-this-read") { &d } else { &m };
            let z = transposed_times(z_source, k, self.value);
            let dr_source = if is("dr-from-updated-state") { &forward.states[t + 1] } else { faded };
            let sign = if is("dr-sign") { F::one() } else { -F::one() };
            back.dr[t] = scaled(&times(dr_source, &z), sign);
            let through_write = match twist {
                Some("dk-without-write") => vec![F::zero(); self.key],
                Some("dk-write-from-later-state") => times(&d, &forward.u[t]),
                _ => times(&m, &forward.u[t]),
            };
            let through_erase = match twist {
                Some("dk-without-erase") => vec![F::zero(); self.key],
                Some("dk-erase-without-beta") => back.dr[t].clone(),
                _ => times_each(erase, &back.dr[t]),
            };
            back.dk[t] = through_write.iter().zip(&through_erase).map(|(&write, &erase)| write + erase).collect();
            back.dv[t] = if is("dv-without-beta") { z.clone() } else { times_each(&self.write[t], &z) };
            back.db[t] = times_each(if is("db-from-query") { &self.q[t] } else { k }, &back.dr[t]);
            back.dw[t] = times_each(if is("dw-from-what-is-written") { &forward.u[t] } else { &self.v[t] }, &z);
            let (erase_is_gate, write_is_gate) = self.gates;
            let mut dbeta = F::zero();
            if (!erase_is_gate || is("dbeta-counts-gates")) && !is("dbeta-without-recall") {
                dbeta = dbeta + sum(&back.db[t]);
            }
            if !write_is_gate || is("dbeta-counts-gates") {
                dbeta = dbeta + sum(&back.dw[t]);
            }
            back.dbeta[t] = dbeta;
            let r = if is("carry-erases-without-beta") { k.clone() } else { times_each(erase, k) };
            let r = scaled(&r, -F::one());
            let dh = if is("carry-without-erase") { m.clone() } else { plus_outer(&m, &r, &z) };
            for c in 0..self.key {
                back.dg[t][c] = match twist {
                    Some("dg-from-m") => dot(&m[c], &faded[c]),
                    Some("dg-from-state-before-decay") => dot(&dh[c], &forward.states[t][c]),
                    Some("dg-from-updated-state") => dot(&dh[c], &forward.states[t + 1][c]),
                    Some("dg-times-decay") => decay[c] * dot(&dh[c], &faded[c]),
                    Some("dg-leaks-at-the-start") if t == 0 && starts_empty => F::epsilon(),
                    _ => dot(&dh[c], &faded[c]),
                };
            }
            let carried = match twist {
                Some("carry-without-decay") => dh,
                Some("initial-gradient-without-its-decay") if t == 0 => dh,
                _ => scale_rows(&dh, &decay),
            };
            back.dstates.push(carried);
        }
        back.dstates.reverse();
        if is("dv-of-last-token-lost")
            && let Some(last) = back.dv.last_mut()
        {
            *last = vec![F::zero(); self.value];
        }
        back
    }

    /// dg of tokens `first..end` by the textbook formula: a reverse cumulative sum of q dq + r dr - k dkw, started with
    /// `after`, the dg of token `end` (whose channel sums are what the state carries past the stretch).
    ///
    /// Right in exact arithmetic, and what the comparison in the tests is about: at strong decay it subtracts large
    /// numbers that agree but for rounding.
    pub fn textbook_dg(&self, back: &Backward<F>, first: usize, end: usize, after: &[F]) -> Vec<Vec<F>> {
        let mut sum = after.to_vec();
        let mut dg = vec![vec![F::zero(); self.key]; end - first];
        for t in (first..end).rev() {
            for c in 0..self.key {
                let r = self.erase[t][c] * self.k[t][c];
                let through_write = back.dk[t][c] - self.erase[t][c] * back.dr[t][c];
                sum[c] = sum[c] + (self.q[t][c] * back.dq[t][c] + r * back.dr[t][c] - self.k[t][c] * through_write);
                dg[t - first][c] = sum[c];
            }
        }
        dg
    }
}
