//! `kda`: Kimi Delta Attention, a linear attention whose state forgets per channel and is corrected by a delta rule.
//!
//! For one batch entry and head, with the state S in `[K, V]`, t = 1..T, all vectors columns and `*` elementwise:
//!
//! ```text
//! Sh_t = Diag(e^{g_t}) S_{t-1}                 forget
//! u_t  = beta_t (v_t - Sh_t^T k_t)             what the memory gets wrong about k_t
//! S_t  = Sh_t + k_t u_t^T                      write
//! o_t  = scale S_t^T q_t                       read the updated state
//! ```
//!
//! Adjoint, t = T..1, with D the gradient of S_t that arrives from later tokens and do_t the gradient of o_t:
//!
//! ```text
//! M     = D + scale q_t do_t^T
//! dq    = scale S_t do_t
//! z     = M^T k_t                              the gradient of u_t
//! dr    = -Sh_t z                              the gradient of the erase vector r_t = beta_t k_t
//! dk    = M u_t + beta_t dr
//! dv    = beta_t z
//! dbeta = z . (v_t - Sh_t^T k_t)
//! Dh    = M - beta_t k_t z^T                   the gradient of Sh_t
//! dg    = rowsum(Dh * Sh_t)
//! D    <- Diag(e^{g_t}) Dh
//! ```
//!
//! [`Form::Recurrent`] computes this token by token ([`recurrent`]); [`Form::Chunked`] computes the same function a
//! chunk at a time with matrix products inside the chunk ([`chunked`]), which is how a GPU does it. Both are exact, and
//! gate `form` holds one against the other.
//!
//! Shapes: `q` and `k` are `[B, T, H, K]`, `g` is `[B, T, HV, K]`, `v` and `o` are `[B, T, HV, V]`, `beta` is
//! `[B, T, HV]`, the states `[B, HV, K, V]` (never `[V, K]`: where K = V no shape check can tell the two apart).
//!
//! Options, each absent unless asked for:
//!
//! - **Grouped value heads.** HV is a multiple of H, and key head h is read by the value heads h m .. (h + 1) m with
//!   m = HV / H. Its dq and dk are the sums over them, first to last.
//! - **Gates by channel** (Gated DeltaNet-2). `b` in `[B, T, HV, K]` stands in for beta where the memory erases, `w` in
//!   `[B, T, HV, V]` where it writes: u = w * v - Sh^T (b * k). Then db = k * dr, dw = v * z, r = b * k, and beta gets the
//!   gradient of the gates that it still stands in for: none if both are present. Equal gates, b = w = beta, give the bits
//!   of KDA in everything but dbeta, which is the sum of db and dw.
//! - **Sequences of any length.** With `cu_seqlens` in `[N + 1]`, whole numbers, B is 1 and sequence n holds the tokens
//!   `cu_seqlens[n] .. cu_seqlens[n + 1]`; it may be empty. The states are `[N, HV, K, V]`. Every sequence has the bits of
//!   a call of its own.
//!
//! Domain: g <= 0, minus infinity included (it clears the channel, and its gradient is zero). 0 <= beta |k|^2 <= 2
//! keeps the map from one state to the next from growing anything; outside it the formulas still hold, but rounding
//! errors grow with T. With gates by channel the bound is on sum_c b_c k_c^2 with b >= 0; that keeps the map's eigenvalue
//! in [-1, 1], though not every vector from growing a little. [`Checked`] refuses both. No exponent that is ever formed is greater than zero: each is a sum of
//! g over the tokens it spans, never a difference of two running sums, so nothing overflows and -inf minus -inf does
//! not occur.
//!
//! Saved for the backward pass: the inputs, and with [`Memory::Save`] the state every `checkpoint_every` tokens;
//! everything else is computed again, a segment at a time. The recurrence cannot be run backwards instead: it is
//! singular at beta |k|^2 = 1, and e^{-g} amplifies.
//!
//! Sources: Kimi Team, *Kimi Linear*, arXiv 2510.26692; Yang, Kautz and Hatamizadeh, *Gated Delta Networks*, arXiv
//! 2412.06464; *Gated DeltaNet-2*, arXiv 2605.22791. The adjoint and the sums for dg are derived in `docs/kda.md`.

mod chain;
pub mod chunked;
mod gates;
mod lanes;
pub mod recurrent;
#[cfg(test)]
mod tests;

use ndarray::{ArrayD, Axis, s};
use rayon::prelude::*;

use crate::checked::Checked;
use crate::cpu::{Reference, Tensor, Values, full_precision};
use crate::dims::Dims;
use crate::error::{Error, Result};
use crate::fields;
use crate::scalar::Scalar;
use crate::tensor::{Precision, Tensors};

use chain::{Chain, Shape};

/// How the function is computed. The result is the same up to rounding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// Token by token: the specification, and the faster one on a CPU.
    Recurrent,
    /// A chunk at a time.
    Chunked {
        /// Tokens in a chunk; at least 1. The last chunk of a sequence may be shorter.
        chunk: usize,
    },
}

/// What forward keeps for backward besides the inputs. Does not change a bit of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Memory {
    /// The states at the checkpoints: K * V numbers every `checkpoint_every` tokens of every head.
    Save,
    /// Nothing; backward first runs the states forward again.
    Recompute,
}

/// What the operation does besides its shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Multiplies q. `None` stands for K^(-1/2).
    pub scale: Option<f64>,
    /// Recurrent or chunked.
    pub form: Form,
    /// Tokens from one checkpoint to the next; at least 1. The chunked form rounds it up to whole chunks.
    pub checkpoint_every: usize,
    /// Whether the checkpoints are kept or computed again.
    pub memory: Memory,
    /// The arithmetic of the products of the chunked form; states and decays stay in full precision.
    pub precision: Precision,
}

fields! {
    /// Activations going in.
    pub struct Inputs {
        /// `[B, T, H, K]`, queries.
        q,
        /// `[B, T, H, K]`, keys.
        k,
        /// `[B, T, HV, V]`, values.
        v,
        /// `[B, T, HV, K]`, the natural logarithm of each channel's decay, at most 0.
        g,
        /// `[B, T, HV]`, how much of its error the memory corrects, 0 to 2.
        beta;
        optional
        /// `[B, T, HV, K]`, the erase gate. Absent: beta.
        b,
        /// `[B, T, HV, V]`, the write gate. Absent: beta.
        w,
        /// `[N + 1]`, `u32`: where each sequence starts, and where the last one ends, which is T. Absent: every batch
        /// entry is a sequence.
        cu_seqlens,
        /// `[B, HV, K, V]`, or `[N, HV, K, V]` with `cu_seqlens`: the state before the first token. Absent: zeros.
        initial_state
    }
}

fields! {
    /// Activations coming out. As `upstream` of `backward`: their gradients, `final_state` optional.
    pub struct Outputs {
        /// `[B, T, HV, V]`, what the queries read.
        o;
        optional
        /// `[B, HV, K, V]`, or `[N, HV, K, V]` with `cu_seqlens`: the state after the last token; `forward` always returns it.
        final_state
    }
}

fields! {
    /// Gradients of the inputs.
    pub struct Grads {
        /// `[B, T, H, K]`
        dq,
        /// `[B, T, H, K]`
        dk,
        /// `[B, T, HV, V]`
        dv,
        /// `[B, T, HV, K]`, with respect to g itself (the logarithm).
        dg,
        /// `[B, T, HV]`; zero where `b` and `w` are both present.
        dbeta;
        optional
        /// `[B, T, HV, K]`, present exactly when `b` is.
        db,
        /// `[B, T, HV, V]`, present exactly when `w` is.
        dw,
        /// As `initial_state`, present exactly when that is.
        dinitial_state
    }
}

/// The operation on a backend.
///
/// # Errors
/// `Shape` if the inputs disagree about B, T, H, HV, N, K or V, if H, HV, K or V is zero, if HV is no multiple of H, if with
/// `cu_seqlens` B is not 1 or N is 0 and T is not, or if an upstream gradient has another shape than its output; `Storage` if `cu_seqlens` is
/// not of whole numbers, `Value` if it does not rise from 0 to T (on a device from [`Checked`] alone); `Config` if `scale` is
/// not finite, `chunk` or `checkpoint_every` is zero, or for a precision that the backend does not have. B = 0 and T = 0
/// give empty results, with the final state equal to the initial one.
pub trait Kda: Tensors {
    /// What `forward` hands to `backward`.
    type Saved;

    /// Runs every head over its sequence.
    fn forward(&self, config: &Config, inputs: Inputs<&Self::Tensor>) -> Result<(Outputs<Self::Tensor>, Self::Saved)>;

    /// Returns the gradients of the inputs. `config` must be the one that `forward` got.
    fn backward(
        &self,
        config: &Config,
        saved: &Self::Saved,
        upstream: Outputs<&Self::Tensor>,
    ) -> Result<Grads<Self::Tensor>>;
}

/// What the reference saves.
pub struct Saved<T> {
    inputs: Inputs<Tensor<T>>,
    /// One entry a chain; empty under [`Memory::Recompute`].
    checkpoints: Vec<Checkpoints<T>>,
}

/// The states on entry to each segment of one chain, `[segments, K, V]`.
pub(crate) type Checkpoints<T> = Vec<T>;

/// One chain's share of the gradients: a row a token.
pub(crate) type GradRows<'a, T> = Grads<Vec<&'a mut [T]>>;

impl<T: Scalar> Kda for Reference<T> {
    type Saved = Saved<T>;

    #[inline(never)]
    fn forward(&self, config: &Config, inputs: Inputs<&Tensor<T>>) -> Result<(Outputs<Tensor<T>>, Saved<T>)> {
        const OP: &str = "kda::forward";
        full_precision(OP, config.precision)?;
        check_config(OP, config)?;
        let shape = self.kda_shape(OP, inputs.clone())?.0;
        let guards = without_offsets(inputs.clone()).try_map(|name, x| self.read(OP, name, x))?;
        let (o, final_state, checkpoints) =
            forward(config, &guards.as_ref().map(|_, x: &Values<'_, T>| x.slice()), &shape);
        let outputs = Outputs {
            o: self.adopt(ndarray::Array1::from(o), inputs.v.shape()),
            final_state: Some(self.adopt(ndarray::Array1::from(final_state), &state_shape(&shape))),
        };
        Ok((outputs, Saved { inputs: inputs.map(|_, x| x.clone()), checkpoints }))
    }

    #[inline(never)]
    fn backward(&self, config: &Config, saved: &Saved<T>, upstream: Outputs<&Tensor<T>>) -> Result<Grads<Tensor<T>>> {
        const OP: &str = "kda::backward";
        full_precision(OP, config.precision)?;
        check_config(OP, config)?;
        let (shape, mut dims) = self.kda_shape(OP, saved.inputs.as_ref())?;
        dims.bind("o", upstream.o.shape(), &["B", "T", "HV", "V"])?;
        if let Some(final_state) = upstream.final_state {
            let sequences = state_symbols(saved.inputs.cu_seqlens.is_some());
            dims.bind("final_state", final_state.shape(), sequences)?;
        }
        let inputs = without_offsets(saved.inputs.as_ref()).try_map(|name, x| self.read(OP, name, x))?;
        let upstream = upstream.try_map(|name, x| self.read(OP, name, x))?;
        let grads = backward(
            config,
            &inputs.as_ref().map(|_, x: &Values<'_, T>| x.slice()),
            &saved.checkpoints,
            &upstream.as_ref().map(|_, x: &Values<'_, T>| x.slice()),
            &shape,
        );
        let inputs = &saved.inputs;
        Ok(grads.map(|name, values| {
            let like = match name {
                "dq" | "dk" => inputs.k.shape().to_vec(),
                "dg" | "db" => inputs.g.shape().to_vec(),
                "dv" | "dw" => inputs.v.shape().to_vec(),
                "dbeta" => inputs.beta.shape().to_vec(),
                _ => state_shape(&shape),
            };
            self.adopt(ndarray::Array1::from(values), &like)
        }))
    }
}

impl<T: Scalar> Reference<T> {
    /// Checks the inputs' shapes and reads where the sequences are.
    fn kda_shape(&self, op: &'static str, inputs: Inputs<&Tensor<T>>) -> Result<(Shape, Dims)> {
        let offsets = inputs.cu_seqlens.map(|x| self.read_ids(op, "cu_seqlens", x)).transpose()?;
        check_inputs(op, inputs.map(|_, x| x.shape()), offsets.as_deref())
    }
}

impl<B: Kda> Kda for Checked<B> {
    type Saved = B::Saved;

    fn forward(&self, config: &Config, inputs: Inputs<&B::Tensor>) -> Result<(Outputs<B::Tensor>, B::Saved)> {
        const OP: &str = "kda::forward";
        for (name, tensor) in inputs.clone().named() {
            if name == "g" {
                self.every(OP, name, tensor, "at most 0, the logarithm of a decay (apply the gate first)", |x| {
                    x <= 0.0
                })?;
            } else {
                self.finite(OP, [(name, tensor)])?;
            }
        }
        let outputs = self.0.forward(config, inputs.clone())?;
        let k = self.0.download(inputs.k)?;
        // A device does not read the offsets on the host.
        if let Some(offsets) = inputs.cu_seqlens {
            let offsets: Vec<u32> = self.0.download(offsets)?.iter().map(|&x| x as u32).collect();
            check_offsets(OP, &offsets, k.shape()[1])?;
        }
        match inputs.b {
            Some(b) => check_expansion(OP, "b", &k, &self.0.download(b)?)?,
            None => check_expansion(OP, "beta", &k, &self.0.download(inputs.beta)?.insert_axis(Axis(3)))?,
        }
        Ok(outputs)
    }

    fn backward(&self, config: &Config, saved: &B::Saved, upstream: Outputs<&B::Tensor>) -> Result<Grads<B::Tensor>> {
        self.finite("kda::backward", upstream.clone().named())?;
        self.0.backward(config, saved, upstream)
    }
}

/// Refuses a token whose correction overshoots: outside 0 <= sum_c b_c k_c^2 <= 2 the state map grows what it holds.
/// `erase` is b in `[B, T, HV, K]`, or beta in `[B, T, HV, 1]`.
fn check_expansion(op: &'static str, arg: &'static str, k: &ArrayD<f64>, erase: &ArrayD<f64>) -> Result<()> {
    // A normalised key stored in a short type has a square length slightly off 1; bf16 rounds by up to 2^-8 each side.
    const SLACK: f64 = 1.02;
    let &[_, time, key_heads, _] = k.shape() else { unreachable!("forward has checked the shapes") };
    let heads = erase.shape()[2];
    for (n, erase) in erase.rows().into_iter().enumerate() {
        let (batch, t, head) = (n / (time * heads), n / heads % time, n % heads);
        let k = k.slice(s![batch, t, head / (heads / key_heads), ..]);
        let square = k.dot(&k);
        let erased: Vec<f64> = match arg {
            "beta" => vec![erase[0] * square],
            _ => erase.iter().zip(&k).map(|(b, k)| b * k * k).collect(),
        };
        let worst = match erased.iter().position(|&x| x < 0.0) {
            Some(negative) => negative,
            None if erased.iter().sum::<f64>() <= 2.0 * SLACK => continue,
            None => (0..erased.len()).fold(0, |worst, c| if erased[c] > erased[worst] { c } else { worst }),
        };
        let expected = match arg {
            "beta" => format!("0 <= beta |k|^2 <= 2 with this token's |k|^2 = {square}; normalise k (l2_norm)"),
            _ => format!("b >= 0 and sum_c b_c k_c^2 <= 2 with this token's |k|^2 = {square}; normalise k (l2_norm)"),
        };
        let mut index = vec![batch, t, head];
        index.extend((arg == "b").then_some(worst));
        return Err(Error::Value { op, arg, expected, got: erase[worst], index });
    }
    Ok(())
}

/// Refuses a config that is out of range. For backends of their own too.
///
/// # Errors
/// `Config`, which names the field.
pub fn check_config(op: &'static str, config: &Config) -> Result<()> {
    let refuse =
        |field, expected: &str, got: String| Err(Error::Config { op, field, expected: expected.to_owned(), got });
    if let Some(scale) = config.scale
        && !scale.is_finite()
    {
        return refuse("scale", "finite, or none for K^(-1/2)", scale.to_string());
    }
    if config.form == (Form::Chunked { chunk: 0 }) {
        return refuse("chunk", "at least 1", "0".to_owned());
    }
    if config.checkpoint_every == 0 {
        return refuse("checkpoint_every", "at least 1", "0".to_owned());
    }
    Ok(())
}

/// The inputs without the one that is not of real numbers.
fn without_offsets<X>(inputs: Inputs<X>) -> Inputs<X> {
    Inputs { cu_seqlens: None, ..inputs }
}

/// The axes of the states; `packed` is whether there is `cu_seqlens`.
#[must_use]
pub fn state_symbols(packed: bool) -> &'static [&'static str] {
    if packed { &["N", "HV", "K", "V"] } else { &["B", "HV", "K", "V"] }
}

/// Checks the inputs' shapes against each other; gives the axes, bound by name.
///
/// # Errors
/// `Shape` as [`Kda`] says.
pub fn check_shapes(op: &'static str, inputs: Inputs<&[usize]>) -> Result<Dims> {
    let mut dims = Dims::new(op);
    let packed = inputs.cu_seqlens.is_some();
    if let Some(shape) = inputs.cu_seqlens {
        dims.bind("cu_seqlens", shape, &["N + 1"])?;
        dims.positive(&["N + 1"])?;
        dims.set("N", dims.get("N + 1") - 1, "cu_seqlens");
    }
    for (name, shape) in without_offsets(inputs.clone()).named() {
        let symbols: &[&str] = match name {
            "q" | "k" => &["B", "T", "H", "K"],
            "v" | "w" => &["B", "T", "HV", "V"],
            "beta" => &["B", "T", "HV"],
            "initial_state" => state_symbols(packed),
            _ => &["B", "T", "HV", "K"],
        };
        dims.bind(name, shape, symbols)?;
    }
    dims.positive(&["H", "HV", "K", "V"])?;
    let (key_heads, heads) = (dims.get("H"), dims.get("HV"));
    let refuse = |arg, expected, got: &[usize]| Err(Error::Shape { op, arg, expected, got: got.to_vec() });
    if heads % key_heads != 0 {
        return refuse("v", format!("HV a multiple of H = {key_heads} (H from `q`)"), inputs.v);
    }
    if packed && dims.get("B") != 1 {
        return refuse("q", "B = 1, since `cu_seqlens` cuts one row into sequences".to_owned(), inputs.q);
    }
    if packed && dims.get("N") == 0 && dims.get("T") > 0 {
        return refuse("q", "T = 0, since `cu_seqlens` names no sequence".to_owned(), inputs.q);
    }
    Ok(dims)
}

/// The axes, and the symbols as bound by name; `offsets` is what `cu_seqlens` holds.
fn check_inputs(op: &'static str, inputs: Inputs<&[usize]>, offsets: Option<&[u32]>) -> Result<(Shape, Dims)> {
    let dims = check_shapes(op, inputs)?;
    let (batch, time) = (dims.get("B"), dims.get("T"));
    let offsets = match offsets {
        None => (0..=batch).map(|n| n * time).collect(),
        Some(offsets) => check_offsets(op, offsets, time)?,
    };
    let shape =
        Shape { key_heads: dims.get("H"), heads: dims.get("HV"), key: dims.get("K"), value: dims.get("V"), offsets };
    Ok((shape, dims))
}

/// Every token belongs to one sequence: the offsets rise from 0 to T.
fn check_offsets(op: &'static str, offsets: &[u32], time: usize) -> Result<Vec<usize>> {
    let offsets: Vec<usize> = offsets.iter().map(|&x| x as usize).collect();
    let refuse = |index: usize, expected| {
        let got = offsets[index] as f64;
        Err(Error::Value { op, arg: "cu_seqlens", expected, got, index: vec![index] })
    };
    if offsets[0] != 0 {
        return refuse(0, "0, where the first sequence starts".to_owned());
    }
    if let Some(n) = (1..offsets.len()).find(|&n| offsets[n] < offsets[n - 1]) {
        return refuse(n, format!("at least {}, where the sequence before it starts", offsets[n - 1]));
    }
    if offsets.last() != Some(&time) {
        return refuse(offsets.len() - 1, format!("T = {time}, so that every token is in a sequence"));
    }
    Ok(offsets)
}

fn state_shape(shape: &Shape) -> Vec<usize> {
    vec![shape.sequences(), shape.heads, shape.key, shape.value]
}

fn chain<'a, T: Scalar>(config: &Config, inputs: &'a Inputs<&'a [T]>, shape: &'a Shape, index: usize) -> Chain<'a, T> {
    let scale = config.scale.unwrap_or_else(|| (shape.key as f64).powf(-0.5));
    let segment = |time: usize| {
        let longest = time.max(1);
        match config.form {
            Form::Recurrent => config.checkpoint_every.min(longest),
            Form::Chunked { chunk } => config.checkpoint_every.min(longest).next_multiple_of(chunk.min(longest)),
        }
    };
    Chain::new(inputs, shape, index, scale, segment)
}

/// Deals the rows of a tensor with one for every token and value head out to their chains, so that chains can be
/// written in parallel.
fn rows_of_chains<'a, T>(values: &'a mut [T], shape: &Shape, width: usize) -> Vec<Vec<&'a mut [T]>> {
    let mut chains = Vec::with_capacity(shape.chains());
    let mut rows = values.chunks_exact_mut(width);
    for sequence in 0..shape.sequences() {
        let tokens = shape.tokens(sequence);
        let first = chains.len();
        chains.extend((0..shape.heads).map(|_| Vec::with_capacity(tokens.len())));
        for _ in tokens {
            for (chain, row) in chains[first..].iter_mut().zip(rows.by_ref()) {
                chain.push(row);
            }
        }
    }
    chains
}

/// [`rows_of_chains`] of a tensor that may be absent.
fn rows_or_none<'a, T>(values: Option<&'a mut [T]>, shape: &Shape, width: usize) -> Vec<Option<Vec<&'a mut [T]>>> {
    match values {
        Some(values) => rows_of_chains(values, shape, width).into_iter().map(Some).collect(),
        None => (0..shape.chains()).map(|_| None).collect(),
    }
}

/// Sums rows of `width` over the value heads that share a key head, first to last.
fn sum_over_groups<T: Scalar>(values: Vec<T>, shape: &Shape, width: usize) -> Vec<T> {
    if shape.group() == 1 {
        return values;
    }
    let mut sums = Vec::with_capacity(values.len() / shape.group());
    for group in values.chunks_exact(shape.group() * width) {
        let (first, others) = group.split_at(width);
        let start = sums.len();
        sums.extend_from_slice(first);
        for other in others.chunks_exact(width) {
            sums[start..].iter_mut().zip(other).for_each(|(sum, &x)| *sum += x);
        }
    }
    sums
}

/// o, the final states, and under [`Memory::Save`] the checkpoints.
fn forward<T: Scalar>(config: &Config, inputs: &Inputs<&[T]>, shape: &Shape) -> (Vec<T>, Vec<T>, Vec<Checkpoints<T>>) {
    let mut o = vec![T::zero(); inputs.v.len()];
    let rows = rows_of_chains(&mut o, shape, shape.value);
    let ends: Vec<(Vec<T>, Checkpoints<T>)> = rows
        .into_par_iter()
        .enumerate()
        .map(|(index, mut o)| {
            let chain = chain(config, inputs, shape, index);
            let mut state = chain.initial_state();
            let mut checkpoints = Vec::new();
            let keep = (config.memory == Memory::Save).then_some(&mut checkpoints);
            match config.form {
                Form::Recurrent => recurrent::forward(&chain, &mut state, Some(&mut o), keep),
                Form::Chunked { chunk } => chunked::forward(&chain, chunk, &mut state, Some(&mut o), keep),
            }
            (state, checkpoints)
        })
        .collect();
    let (states, checkpoints): (Vec<_>, Vec<_>) = ends.into_iter().unzip();
    let checkpoints = if config.memory == Memory::Save { checkpoints } else { Vec::new() };
    (o, states.concat(), checkpoints)
}

fn backward<T: Scalar>(
    config: &Config,
    inputs: &Inputs<&[T]>,
    saved: &[Checkpoints<T>],
    upstream: &Outputs<&[T]>,
    shape: &Shape,
) -> Grads<Vec<T>> {
    let zeros = |like: &[T]| vec![T::zero(); like.len()];
    // Every value head has its own first; g has their shape.
    let mut dq = zeros(inputs.g);
    let mut dk = zeros(inputs.g);
    let mut dv = zeros(inputs.v);
    let mut dg = zeros(inputs.g);
    let mut dbeta = zeros(inputs.beta);
    let mut db = inputs.b.map(zeros);
    let mut dw = inputs.w.map(zeros);
    let (key, value) = (shape.key, shape.value);
    let dq_rows = rows_of_chains(&mut dq, shape, key);
    let dk_rows = rows_of_chains(&mut dk, shape, key);
    let dv_rows = rows_of_chains(&mut dv, shape, value);
    let dg_rows = rows_of_chains(&mut dg, shape, key);
    let dbeta_rows = rows_of_chains(&mut dbeta, shape, 1);
    let db_rows = rows_or_none(db.as_deref_mut(), shape, key);
    let dw_rows = rows_or_none(dw.as_deref_mut(), shape, value);
    let dinitial: Vec<Vec<T>> = (dq_rows, dk_rows, dv_rows, dg_rows, dbeta_rows, db_rows, dw_rows)
        .into_par_iter()
        .enumerate()
        .map(|(index, (dq, dk, dv, dg, dbeta, db, dw))| {
            let chain = chain(config, inputs, shape, index);
            let recomputed;
            let checkpoints = match config.memory {
                Memory::Save => &saved[index],
                Memory::Recompute => {
                    let mut states = Vec::new();
                    let mut state = chain.initial_state();
                    match config.form {
                        Form::Recurrent => recurrent::forward(&chain, &mut state, None, Some(&mut states)),
                        Form::Chunked { chunk } => chunked::forward(&chain, chunk, &mut state, None, Some(&mut states)),
                    }
                    recomputed = states;
                    &recomputed
                }
            };
            let len = shape.state();
            let mut dstate = match upstream.final_state {
                Some(dstates) => dstates[index * len..][..len].to_vec(),
                None => vec![T::zero(); len],
            };
            let mut grads = Grads { dq, dk, dv, dg, dbeta, db, dw, dinitial_state: None };
            match config.form {
                Form::Recurrent => recurrent::backward(&chain, checkpoints, upstream.o, &mut dstate, &mut grads),
                Form::Chunked { chunk } => {
                    chunked::backward(&chain, chunk, checkpoints, upstream.o, &mut dstate, &mut grads);
                }
            }
            dstate
        })
        .collect();
    let dinitial_state = inputs.initial_state.map(|_| dinitial.concat());
    let (dq, dk) = (sum_over_groups(dq, shape, key), sum_over_groups(dk, shape, key));
    Grads { dq, dk, dv, dg, dbeta, db, dw, dinitial_state }
}
