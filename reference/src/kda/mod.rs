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
//! Shapes: `q`, `k`, `g` are `[B, T, H, K]`, `v` and `o` `[B, T, H, V]`, `beta` `[B, T, H]`, the states `[B, H, K, V]`
//! (never `[V, K]`: where K = V no shape check can tell the two apart).
//!
//! Domain: g <= 0, minus infinity included (it clears the channel, and its gradient is zero). 0 <= beta |k|^2 <= 2
//! keeps the map from one state to the next from growing anything; outside it the formulas still hold, but rounding
//! errors grow with T. [`Checked`] refuses both. No exponent that is ever formed is greater than zero: each is a sum of
//! g over the tokens it spans, never a difference of two running sums, so nothing overflows and -inf minus -inf does
//! not occur.
//!
//! Saved for the backward pass: the inputs, and with [`Memory::Save`] the state every `checkpoint_every` tokens;
//! everything else is computed again, a segment at a time. The recurrence cannot be run backwards instead: it is
//! singular at beta |k|^2 = 1, and e^{-g} amplifies.
//!
//! Sources: Kimi Team, *Kimi Linear*, arXiv 2510.26692; Yang, Kautz and Hatamizadeh, *Gated Delta Networks*, arXiv
//! 2412.06464. The adjoint and the sums for dg are derived in `docs/kda.md`.

pub mod chunked;
mod lanes;
pub mod recurrent;
#[cfg(test)]
mod tests;

use rayon::prelude::*;

use crate::checked::Checked;
use crate::cpu::{Reference, Tensor, Values, full_precision};
use crate::dims::Dims;
use crate::error::{Error, Result};
use crate::fields;
use crate::scalar::Scalar;
use crate::tensor::{Precision, Tensors};

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
        /// `[B, T, H, V]`, values.
        v,
        /// `[B, T, H, K]`, the natural logarithm of each channel's decay, at most 0.
        g,
        /// `[B, T, H]`, how much of its error the memory corrects.
        beta;
        optional
        /// `[B, H, K, V]`, the state before the first token. Absent: zeros.
        initial_state
    }
}

fields! {
    /// Activations coming out. As `upstream` of `backward`: their gradients, `final_state` optional.
    pub struct Outputs {
        /// `[B, T, H, V]`, what the queries read.
        o;
        optional
        /// `[B, H, K, V]`, the state after the last token; `forward` always returns it.
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
        /// `[B, T, H, V]`
        dv,
        /// `[B, T, H, K]`, with respect to g itself (the logarithm).
        dg,
        /// `[B, T, H]`
        dbeta;
        optional
        /// `[B, H, K, V]`, present exactly when `initial_state` is.
        dinitial_state
    }
}

/// The operation on a backend.
///
/// # Errors
/// `Shape` if the inputs disagree about B, T, H, K or V, if H, K or V is zero, or if an upstream gradient has another
/// shape than its output; `Config` if `scale` is not finite, `chunk` or `checkpoint_every` is zero, or for a precision
/// that the backend does not have. B = 0 and T = 0 give empty results, with the final state equal to the initial one.
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

/// Lengths of the axes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub batch: usize,
    pub time: usize,
    pub heads: usize,
    /// K
    pub key: usize,
    /// V
    pub value: usize,
}

impl Shape {
    fn chains(&self) -> usize {
        self.batch * self.heads
    }

    fn state(&self) -> usize {
        self.key * self.value
    }
}

/// One (batch entry, head): everything a form needs to run it, token by token.
pub(crate) struct Chain<'a, T> {
    inputs: &'a Inputs<&'a [T]>,
    shape: Shape,
    /// batch * H + head.
    index: usize,
    pub scale: T,
    /// Tokens in a segment, the stretch from one checkpoint to the next.
    pub segment: usize,
}

impl<'a, T: Scalar> Chain<'a, T> {
    #[inline(always)]
    fn row(&self, tensor: &'a [T], t: usize, width: usize) -> &'a [T] {
        let (batch, head) = (self.index / self.shape.heads, self.index % self.shape.heads);
        let start = ((batch * self.shape.time + t) * self.shape.heads + head) * width;
        &tensor[start..start + width]
    }

    #[inline(always)]
    pub fn q(&self, t: usize) -> &'a [T] {
        self.row(self.inputs.q, t, self.shape.key)
    }

    #[inline(always)]
    pub fn k(&self, t: usize) -> &'a [T] {
        self.row(self.inputs.k, t, self.shape.key)
    }

    #[inline(always)]
    pub fn v(&self, t: usize) -> &'a [T] {
        self.row(self.inputs.v, t, self.shape.value)
    }

    #[inline(always)]
    pub fn g(&self, t: usize) -> &'a [T] {
        self.row(self.inputs.g, t, self.shape.key)
    }

    #[inline(always)]
    pub fn beta(&self, t: usize) -> T {
        self.row(self.inputs.beta, t, 1)[0]
    }

    /// T, K, V.
    #[inline(always)]
    pub fn lengths(&self) -> (usize, usize, usize) {
        (self.shape.time, self.shape.key, self.shape.value)
    }

    /// The state before the first token.
    fn initial_state(&self) -> Vec<T> {
        let len = self.shape.state();
        match self.inputs.initial_state {
            Some(states) => states[self.index * len..][..len].to_vec(),
            None => vec![T::zero(); len],
        }
    }
}

/// One chain's share of the gradients: a row a token.
pub(crate) type GradRows<'a, T> = Grads<Vec<&'a mut [T]>>;

impl<T: Scalar> Kda for Reference<T> {
    type Saved = Saved<T>;

    fn forward(&self, config: &Config, inputs: Inputs<&Tensor<T>>) -> Result<(Outputs<Tensor<T>>, Saved<T>)> {
        const OP: &str = "kda::forward";
        check_config(OP, config)?;
        let shape = check_inputs(OP, inputs.clone().map(|_, x| x.shape()))?;
        let guards = inputs.clone().try_map(|name, x| self.read(OP, name, x))?;
        let (o, final_state, checkpoints) =
            forward(config, &guards.as_ref().map(|_, x: &Values<'_, T>| x.slice()), shape);
        let outputs = Outputs {
            o: self.adopt(ndarray::Array1::from(o), inputs.v.shape()),
            final_state: Some(self.adopt(ndarray::Array1::from(final_state), &state_shape(shape))),
        };
        Ok((outputs, Saved { inputs: inputs.map(|_, x| x.clone()), checkpoints }))
    }

    fn backward(&self, config: &Config, saved: &Saved<T>, upstream: Outputs<&Tensor<T>>) -> Result<Grads<Tensor<T>>> {
        const OP: &str = "kda::backward";
        check_config(OP, config)?;
        let shape = check_inputs(OP, saved.inputs.as_ref().map(|_, x| x.shape()))?;
        let mut dims = Dims::new(OP);
        dims.bind("v", saved.inputs.v.shape(), &["B", "T", "H", "V"])?;
        dims.bind("k", saved.inputs.k.shape(), &["B", "T", "H", "K"])?;
        dims.bind("o", upstream.o.shape(), &["B", "T", "H", "V"])?;
        if let Some(final_state) = upstream.final_state {
            dims.bind("final_state", final_state.shape(), &["B", "H", "K", "V"])?;
        }
        let inputs = saved.inputs.as_ref().try_map(|name, x| self.read(OP, name, x))?;
        let upstream = upstream.try_map(|name, x| self.read(OP, name, x))?;
        let grads = backward(
            config,
            &inputs.as_ref().map(|_, x: &Values<'_, T>| x.slice()),
            &saved.checkpoints,
            &upstream.as_ref().map(|_, x: &Values<'_, T>| x.slice()),
            shape,
        );
        let inputs = &saved.inputs;
        Ok(grads.map(|name, values| {
            let like = match name {
                "dq" | "dk" | "dg" => inputs.k.shape().to_vec(),
                "dv" => inputs.v.shape().to_vec(),
                "dbeta" => inputs.beta.shape().to_vec(),
                _ => state_shape(shape),
            };
            self.adopt(ndarray::Array1::from(values), &like)
        }))
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
        check_expansion(OP, &self.0.download(inputs.k)?, &self.0.download(inputs.beta)?)?;
        Ok(outputs)
    }

    fn backward(&self, config: &Config, saved: &B::Saved, upstream: Outputs<&B::Tensor>) -> Result<Grads<B::Tensor>> {
        self.finite("kda::backward", upstream.clone().named())?;
        self.0.backward(config, saved, upstream)
    }
}

/// Refuses a token whose correction overshoots: outside 0 <= beta |k|^2 <= 2 the state map grows what it holds.
fn check_expansion(op: &'static str, k: &ndarray::ArrayD<f64>, beta: &ndarray::ArrayD<f64>) -> Result<()> {
    use ndarray::Dimension;
    // A normalised key stored in a short type has a square length slightly off 1; bf16 rounds by up to 2^-8 each side.
    const SLACK: f64 = 1.02;
    for (k, (index, &beta)) in k.rows().into_iter().zip(beta.indexed_iter()) {
        let square = k.dot(&k);
        if !(beta * square >= 0.0 && beta * square <= 2.0 * SLACK) {
            return Err(Error::Value {
                op,
                arg: "beta",
                expected: format!("0 <= beta |k|^2 <= 2 with this token's |k|^2 = {square}; normalise k (l2_norm)"),
                got: beta,
                index: index.as_array_view().to_vec(),
            });
        }
    }
    Ok(())
}

fn check_config(op: &'static str, config: &Config) -> Result<()> {
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
    full_precision(op, config.precision)
}

fn check_inputs(op: &'static str, inputs: Inputs<&[usize]>) -> Result<Shape> {
    let mut dims = Dims::new(op);
    for (name, shape) in inputs.named() {
        let symbols: &[&str] = match name {
            "v" => &["B", "T", "H", "V"],
            "beta" => &["B", "T", "H"],
            "initial_state" => &["B", "H", "K", "V"],
            _ => &["B", "T", "H", "K"],
        };
        dims.bind(name, shape, symbols)?;
    }
    dims.positive(&["H", "K", "V"])?;
    Ok(Shape {
        batch: dims.get("B"),
        time: dims.get("T"),
        heads: dims.get("H"),
        key: dims.get("K"),
        value: dims.get("V"),
    })
}

fn state_shape(shape: Shape) -> Vec<usize> {
    vec![shape.batch, shape.heads, shape.key, shape.value]
}

fn chain<'a, T: Scalar>(config: &Config, inputs: &'a Inputs<&'a [T]>, shape: Shape, index: usize) -> Chain<'a, T> {
    let scale = config.scale.unwrap_or_else(|| (shape.key as f64).powf(-0.5));
    let longest = shape.time.max(1);
    let segment = match config.form {
        Form::Recurrent => config.checkpoint_every.min(longest),
        Form::Chunked { chunk } => config.checkpoint_every.min(longest).next_multiple_of(chunk.min(longest)),
    };
    Chain { inputs, shape, index, scale: T::from_f64(scale), segment }
}

/// Deals the token rows of a `[B, T, H, width]` tensor out to their chains, so that chains can be written in parallel.
fn rows_of_chains<T>(values: &mut [T], shape: Shape, width: usize) -> Vec<Vec<&mut [T]>> {
    let mut chains: Vec<Vec<&mut [T]>> = (0..shape.chains()).map(|_| Vec::with_capacity(shape.time)).collect();
    for (n, row) in values.chunks_exact_mut(width).enumerate() {
        let (batch, head) = (n / (shape.time * shape.heads), n % shape.heads);
        chains[batch * shape.heads + head].push(row);
    }
    chains
}

/// o, the final states, and under [`Memory::Save`] the checkpoints.
fn forward<T: Scalar>(config: &Config, inputs: &Inputs<&[T]>, shape: Shape) -> (Vec<T>, Vec<T>, Vec<Checkpoints<T>>) {
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
    shape: Shape,
) -> Grads<Vec<T>> {
    let zeros = |like: &[T]| vec![T::zero(); like.len()];
    let mut dq = zeros(inputs.q);
    let mut dk = zeros(inputs.k);
    let mut dv = zeros(inputs.v);
    let mut dg = zeros(inputs.g);
    let mut dbeta = zeros(inputs.beta);
    let (key, value) = (shape.key, shape.value);
    let dq_rows = rows_of_chains(&mut dq, shape, key);
    let dk_rows = rows_of_chains(&mut dk, shape, key);
    let dv_rows = rows_of_chains(&mut dv, shape, value);
    let dg_rows = rows_of_chains(&mut dg, shape, key);
    let dbeta_rows = rows_of_chains(&mut dbeta, shape, 1);
    let dinitial: Vec<Vec<T>> = (dq_rows, dk_rows, dv_rows, dg_rows, dbeta_rows)
        .into_par_iter()
        .enumerate()
        .map(|(index, (dq, dk, dv, dg, dbeta))| {
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
            let mut grads = Grads { dq, dk, dv, dg, dbeta, dinitial_state: None };
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
    Grads { dq, dk, dv, dg, dbeta, dinitial_state }
}
