//! `kda`: the equations are in `dormouse_reference::kda`, their derivation in `docs/kda.md`.
//!
//! On a device the arm decides how the function is computed, and `Config::form`, `checkpoint_every` and `memory` change
//! nothing:
//!
//! - [`plain`] runs the recurrence token by token.
//! - `fused` cuts the sequence into chunks of [`CHUNK`] tokens, and for the gradients into spans of [`SPAN`]:
//!
//! | kernel | one cube | reads | writes |
//! |---|---|---|---|
//! | [`prep`] | a chunk of a chain | q, k, g, beta | P, T = (I + L)^-1, Qt, Rt, Kb and e^{G_n} of the chunk |
//! | [`forward`] | some value columns of a chain, all chunks in turn | v, beta, what `prep` wrote | o, final state, U, S at each span's entry |
//! | [`dstate`] | the same, in reverse | beta, what `prep` wrote, dO | dv, Z, dS at each span's exit, dS of the initial state |
//! | [`grads`] | a span of a chain | q, k, v, g, beta, U, Z, dO, S, dS | dq, dk, dg, dbeta |
//!
//! `Config::precision` is that of the products of `forward`, `dstate` and `grads` in arm `fused`: operands are rounded
//! where they enter a product, and states, decays, sums and the triangular inverse stay f32. Arm `plain` has `Full` only.
//! See `tile`.
//!
//! U and Z do not depend on how the sequence is cut: row t of them is u_t and z_t of the recurrence. So `grads` may use
//! spans longer than the chunks that U and Z were computed with, and no state is ever computed twice.
//!
//! What forward leaves for backward is always kept. [`Memory::Recompute`](dormouse_reference::kda::Memory) has no use
//! here: a step's scratch is laid out once and dies with the step, so computing a tensor again would take its memory
//! twice.
//!
//! A *chain* is one (batch entry, head); its index is batch * H + head, the order of the states `[B, H, K, V]`. Every sum
//! has one fixed order and there are no atomics, so equal inputs give equal bits. No exponent is greater than zero, see
//! `docs/kda.md` section 6.
//!
//! Tiles are as wide as fits the device's shared memory. With 32 KiB, as on the software driver, K reaches 64 in arm
//! `fused`; with the 227 KiB of an H200 all of K and V up to 256 fit.
//!
//! Mesa's software Vulkan driver ends a unit's loops without an error once they have run some 65,500 times in all. Long
//! sequences of wide heads (K = V = 64 and some 300 tokens token by token, some thousand in chunks) come out wrong there
//! and nowhere else.

mod dstate;
mod forward;
mod grads;
mod plain;
mod prep;
pub(crate) mod tile;

use cubecl::prelude::*;
use dormouse_reference::kda::{Config, Form, Grads, Inputs, Kda, Outputs};
use dormouse_reference::{Dims, Error, Precision, Result};

use crate::arm::{Arm, Mutant};
use crate::device::Device;
use crate::runtime::{self, Engine};
use crate::tensor::{Floats, Tensor};
use crate::words;

const STEM: &str = "kda";

/// Numbered from 1 in the kernels.
pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant::fused("beta-dropped-in-l"),
    Mutant::fused("state-not-decayed-across-a-chunk"),
    Mutant::fused("nothing-written-to-the-state"),
    Mutant::fused("null-renamed-local"),
    Mutant::fused("gradient-of-the-final-state-dropped"),
    Mutant::fused("erase-dropped-in-the-gradient-of-the-state"),
    Mutant::fused("decay-of-the-whole-span-dropped-in-dg"),
    Mutant::fused("beta-dropped-in-dk"),
    Mutant::fused("sign-of-a-pair"),
    Mutant::fused("straddling-pairs-dropped-in-dg"),
];

/// Tokens of a chunk: what `prep`, `forward` and `dstate` take in one step.
const CHUNK: usize = 16;

/// Tokens of a span: the states at its borders are kept, and `grads` works on one at a time. A multiple of [`CHUNK`].
const SPAN: usize = 64;

/// The longest K and V: a cube holds whole columns of the state.
const WIDEST: usize = 256;

/// What `forward` hands to `backward`.
pub struct Saved {
    inputs: Inputs<Tensor>,
    kept: Kept,
    arm: Arm,
}

/// What an arm leaves for its backward pass besides the inputs. There is one a call, so its size does not matter.
#[allow(clippy::large_enum_variant)]
enum Kept {
    /// There were no tokens.
    Nothing,
    /// `[B, H, spans, K, V]`, S on entry to each span.
    Plain { states: Tensor },
    /// The same, with what every token wrote and what every chunk brings to the state.
    Fused(Fused),
}

/// What the fused forward pass leaves.
struct Fused {
    /// `[B, H, spans, K, V]`, S on entry to each span.
    states: Tensor,
    /// `[B, T, H, V]`, what each token wrote.
    u: Tensor,
    chunks: prep::Chunks,
}

/// Lengths of the axes.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    batch: usize,
    time: usize,
    heads: usize,
    key: usize,
    value: usize,
}

impl Sizes {
    /// B * H.
    fn chains(&self) -> usize {
        self.batch * self.heads
    }

    /// Chunks of a chain; the last may be short.
    fn chunks(&self) -> usize {
        self.time.div_ceil(CHUNK)
    }

    /// Spans of a chain; the last may be short.
    fn spans(&self) -> usize {
        self.time.div_ceil(SPAN)
    }

    /// The shape of a state.
    fn state(&self) -> [usize; 4] {
        [self.batch, self.heads, self.key, self.value]
    }

    /// The shape of the states at the spans' borders.
    fn span_states(&self) -> [usize; 5] {
        [self.batch, self.heads, self.spans(), self.key, self.value]
    }
}

/// One call, checked.
struct Call<'a> {
    inputs: Inputs<&'a Tensor>,
    sizes: Sizes,
    scale: f32,
    math: tile::Math,
}

impl<R: Engine> Kda for Device<R> {
    type Saved = Saved;

    fn forward(&self, config: &Config, inputs: Inputs<&Tensor>) -> Result<(Outputs<Tensor>, Saved)> {
        const OP: &str = "kda::forward";
        let (call, _) = check(self, OP, config, inputs.clone())?;
        let arm = self.forward_arm(STEM);
        check_precision(OP, config, arm)?;
        let o = self.float_scratch(inputs.v.shape())?;
        let last = self.float_scratch(&call.sizes.state())?;
        let kept = if call.sizes.time == 0 {
            carry(self, inputs.initial_state, &last)?;
            Kept::Nothing
        } else {
            let outputs = Outputs { o: &o, final_state: Some(&last) };
            match arm {
                Arm::Plain => Kept::Plain { states: plain::forward(self, &call, outputs)? },
                Arm::Fused => {
                    let chunks = prep::launch(self, &call)?;
                    Kept::Fused(forward::launch(self, &call, chunks, outputs)?)
                }
            }
        };
        let inputs = inputs.map(|_, x| x.clone());
        Ok((Outputs { o, final_state: Some(last) }, Saved { inputs, kept, arm }))
    }

    fn backward(&self, config: &Config, saved: &Saved, upstream: Outputs<&Tensor>) -> Result<Grads<Tensor>> {
        const OP: &str = "kda::backward";
        let inputs = saved.inputs.as_ref();
        let (call, mut dims) = check(self, OP, config, inputs.clone())?;
        dims.bind("o", upstream.o.shape(), &["B", "T", "H", "V"])?;
        if let Some(last) = upstream.final_state {
            dims.bind("final_state", last.shape(), &["B", "H", "K", "V"])?;
        }
        self.check_floats(OP, &upstream.clone().named())?;
        check_precision(OP, config, saved.arm)?;
        self.note_backward(STEM, saved.arm);
        let grads = Grads {
            dq: self.float_scratch(inputs.q.shape())?,
            dk: self.float_scratch(inputs.k.shape())?,
            dv: self.float_scratch(inputs.v.shape())?,
            dg: self.float_scratch(inputs.g.shape())?,
            dbeta: self.float_scratch(inputs.beta.shape())?,
            db: None,
            dw: None,
            dinitial_state: match inputs.initial_state {
                Some(_) => Some(self.float_scratch(&call.sizes.state())?),
                None => None,
            },
        };
        match &saved.kept {
            Kept::Nothing => {
                if let Some(first) = &grads.dinitial_state {
                    carry(self, upstream.final_state, first)?;
                }
            }
            Kept::Plain { states } => plain::backward(self, &call, states, upstream, grads.as_ref())?,
            Kept::Fused(fused) => {
                let passed = dstate::launch(self, &call, &fused.chunks, upstream.clone(), grads.as_ref())?;
                grads::launch(self, &call, fused, &passed, upstream.o, grads.as_ref())?;
            }
        }
        Ok(grads)
    }
}

/// Without tokens a state arrives as it left, and so does its gradient.
fn carry<R: Engine>(b: &Device<R>, from: Option<&Tensor>, into: &Tensor) -> Result<()> {
    match from {
        Some(from) => words::copy(b, from, into),
        None => words::fill(b, into, 0),
    }
}

/// Checks everything that both passes get; the axes come with it.
fn check<'a, R: Engine>(
    b: &Device<R>,
    op: &'static str,
    config: &Config,
    inputs: Inputs<&'a Tensor>,
) -> Result<(Call<'a>, Dims)> {
    check_config(op, config)?;
    for (arg, option) in [("b", inputs.b), ("w", inputs.w), ("cu_seqlens", inputs.cu_seqlens)] {
        if option.is_some() {
            let expected = "absent because no kernel has this option; the reference has it";
            return Err(Error::Presence { op, arg, expected, got: "present" });
        }
    }
    let mut dims = Dims::new(op);
    for (name, tensor) in inputs.clone().named() {
        let symbols: &[&str] = match name {
            "v" => &["B", "T", "H", "V"],
            "beta" => &["B", "T", "H"],
            "initial_state" => &["B", "H", "K", "V"],
            _ => &["B", "T", "H", "K"],
        };
        dims.bind(name, tensor.shape(), symbols)?;
    }
    dims.positive(&["H", "K", "V"])?;
    b.check_floats(op, &inputs.clone().named())?;
    let sizes = Sizes {
        batch: dims.get("B"),
        time: dims.get("T"),
        heads: dims.get("H"),
        key: dims.get("K"),
        value: dims.get("V"),
    };
    for (arg, tensor, axis, got) in [("k", inputs.k, "K", sizes.key), ("v", inputs.v, "V", sizes.value)] {
        if got > WIDEST {
            let expected = format!("{axis} of at most {WIDEST} on a device; use more heads");
            return Err(Error::Shape { op, arg, expected, got: tensor.shape().to_vec() });
        }
    }
    let scale = config.scale.unwrap_or_else(|| (sizes.key as f64).powf(-0.5)) as f32;
    let math = tile::Math { precision: config.precision, cuda: b.matrix_units() };
    Ok((Call { inputs, sizes, scale, math }, dims))
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
    Ok(())
}

/// The yardstick rounds nothing.
fn check_precision(op: &'static str, config: &Config, arm: Arm) -> Result<()> {
    if arm == Arm::Fused || config.precision == Precision::Full {
        return Ok(());
    }
    let expected = "Full, the only arithmetic of the plain kernels".to_owned();
    Err(Error::Config { op, field: "precision", expected, got: format!("{:?}", config.precision) })
}

/// The planted fault if it is one of this kernel's: the others need not be compiled again.
fn mutant<R: Engine>(b: &Device<R>, of_kernel: std::ops::RangeInclusive<u32>) -> u32 {
    let planted = b.mutant(STEM);
    if of_kernel.contains(&planted) { planted } else { 0 }
}

/// The widest of `widths` whose tiles fit a cube's shared memory on this device.
fn widest<R: Engine>(
    b: &Device<R>,
    kernel: &'static str,
    widths: &[usize],
    bytes: impl Fn(usize) -> usize,
) -> Result<usize> {
    let available = b.shared_memory();
    widths.iter().copied().find(|&width| bytes(width) <= available).ok_or_else(|| {
        let need = widths.iter().map(|&width| bytes(width)).min().unwrap_or_default();
        let reason = format!("a cube needs {need} bytes of shared memory, the device has {available}");
        runtime::Error::Launch { kernel: kernel.to_owned(), reason }.into()
    })
}

/// A tensor that may be absent as an argument of a kernel.
fn optional<R: Engine>(b: &Device<R>, tensor: Option<&Tensor>) -> ComptimeOptionArgs<Floats, R> {
    tensor.map(|tensor| b.floats(tensor)).into()
}

/// Bytes of tensors, absent ones left out.
fn bytes<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> u64 {
    tensors.into_iter().map(Tensor::bytes).sum()
}

/// First element of token `t` of a chain in a `[B, T, H, width]` tensor.
#[cube]
fn token_at(chain: usize, t: usize, time: usize, heads: usize, width: usize) -> usize {
    (((chain / heads) * time + t) * heads + chain % heads) * width
}

/// `x[at]`, or zero where there is nothing. Reads of several elements should all go to registers before the first is
/// used, else each waits for the one before.
#[cube]
fn load_or_zero(x: &Floats, at: usize, alive: bool) -> f32 {
    let mut loaded = 0.0f32;
    if alive {
        loaded = x.at(at);
    }
    loaded
}
