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
//! | [`prep`] | a chunk of a chain | q, k, g, beta or b | P, T = (I + L)^-1, Qt, Rt, Kb and e^{G_n} of the chunk |
//! | [`forward`] | some value columns of a chain, all chunks in turn | v, beta or w, what `prep` wrote | o, final state, U, S at each span's entry |
//! | [`dstate`] | the same, in reverse | beta or w, what `prep` wrote, dO | dv, Z, dS at each span's exit, dS of the initial state |
//! | [`grads`] | a span of a chain | q, k, v, g, beta or b, U, Z, dO, S, dS | dq, dk, dg, dbeta, db, dw |
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
//! A *chain* is one (sequence, value head); its index is sequence * HV + head, the order of the states. Every sum has one
//! fixed order and there are no atomics, so equal inputs give equal bits. No exponent is greater than zero, see
//! `docs/kda.md` section 6.
//!
//! Which options there are is compiled in, so a call without them has kernels that know nothing of them:
//!
//! - **Grouped value heads**: a chain reads q and k of its key head. Its dq and dk go to scratch, and one more launch,
//!   `kda::sum_groups`, adds them up over the group, first to last.
//! - **Gates by channel**: b and w take the place of beta where they are read. Equal gates, b = w = beta, give KDA up to
//!   rounding in arm `fused`, where L is then summed from b * k instead of multiplied by beta, and in arm `plain`.
//! - **`cu_seqlens`** is read on the device alone, see [`chain`]. What it must hold, offsets that rise from 0 to T, is
//!   checked by `Checked` and not here. Other offsets are clamped into 0..T: the call touches no memory that is not its own,
//!   but rows of tokens that are in no sequence hold whatever was there, and those of tokens in several are of any of them.
//!
//! Tiles are as wide as fits the device's shared memory. With 32 KiB, as on the software driver, K reaches 64 in arm
//! `fused`; with the 227 KiB of an H200 all of K and V up to 256 fit.
//!
//! Mesa's software Vulkan driver ends a unit's loops without an error once they have run some 65,500 times in all. Long
//! sequences of wide heads (K = V = 64 and some 300 tokens token by token, some thousand in chunks) come out wrong there
//! and nowhere else.

mod chain;
mod dstate;
mod forward;
mod grads;
mod plain;
mod prep;
pub(crate) mod tile;

use cubecl::prelude::*;
use dormouse_reference::kda::{Config, Grads, Inputs, Kda, Outputs, check_config, check_shapes, state_symbols};
use dormouse_reference::{Dims, Error, Precision, Result};

use crate::arm::{Arm, Mutant};
use crate::device::Device;
use crate::embedding::check_ids;
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
    Mutant::fused("every-value-head-reads-the-first-key-head"),
    Mutant::fused("beta-for-the-erase-gate-in-l"),
    Mutant::fused("state-of-the-sequence-before"),
    Mutant::fused("chunks-of-the-sequence-before"),
    Mutant::fused("last-value-head-dropped-in-the-sum"),
    Mutant::fused("write-gate-dropped-in-dv"),
    Mutant::fused("dbeta-counts-the-erase-gate"),
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
    /// There were no tokens, or no sequences.
    Nothing,
    /// `[spans of all chains, K, V]`, S on entry to each span.
    Plain { states: Tensor },
    /// The same, with what every token wrote and what every chunk brings to the state.
    Fused(Fused),
}

/// What the fused forward pass leaves.
struct Fused {
    /// `[spans of all chains, K, V]`, S on entry to each span.
    states: Tensor,
    /// `[B, T, HV, V]`, what each token wrote.
    u: Tensor,
    chunks: prep::Chunks,
}

/// Lengths of the axes.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    /// B, or N with `cu_seqlens`.
    sequences: usize,
    /// T.
    time: usize,
    /// HV.
    heads: usize,
    /// HV / H.
    group: usize,
    key: usize,
    value: usize,
    /// Whether there is `cu_seqlens`.
    packed: bool,
}

impl Sizes {
    /// Sequences of all value heads.
    fn chains(&self) -> usize {
        self.sequences * self.heads
    }

    /// Pieces of `size` tokens of all chains; the last of a chain may be short. See [`chain`] about packed ones.
    fn pieces(&self, size: usize) -> usize {
        if self.packed {
            self.heads * (self.time / size + self.sequences)
        } else {
            self.chains() * self.time.div_ceil(size)
        }
    }

    /// Whether there is nothing to run.
    fn is_empty(&self) -> bool {
        self.time == 0 || self.sequences == 0
    }

    /// The shape of the states.
    fn state(&self) -> [usize; 4] {
        [self.sequences, self.heads, self.key, self.value]
    }

    /// The shape of the states at the spans' borders.
    fn span_states(&self) -> [usize; 3] {
        [self.pieces(SPAN), self.key, self.value]
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
        let kept = if call.sizes.is_empty() {
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
        dims.bind("o", upstream.o.shape(), &["B", "T", "HV", "V"])?;
        if let Some(last) = upstream.final_state {
            dims.bind("final_state", last.shape(), state_symbols(call.sizes.packed))?;
        }
        self.check_floats(OP, &upstream.clone().named())?;
        if let Kept::Plain { states } | Kept::Fused(Fused { states, .. }) = &saved.kept {
            // What one call leaves is as old as its states.
            self.check_life(OP, "saved", states)?;
        }
        check_precision(OP, config, saved.arm)?;
        self.note_backward(STEM, saved.arm);
        let like = |input: Option<&Tensor>| input.map(|x| self.float_scratch(x.shape())).transpose();
        let grads = Grads {
            dq: self.float_scratch(inputs.q.shape())?,
            dk: self.float_scratch(inputs.k.shape())?,
            dv: self.float_scratch(inputs.v.shape())?,
            dg: self.float_scratch(inputs.g.shape())?,
            dbeta: self.float_scratch(inputs.beta.shape())?,
            db: like(inputs.b)?,
            dw: like(inputs.w)?,
            dinitial_state: like(inputs.initial_state)?,
        };
        // Where value heads share a key head, each has its own dq and dk first.
        let parts = match call.sizes.group {
            1 => [grads.dq.clone(), grads.dk.clone()],
            _ => [self.float_scratch(inputs.g.shape())?, self.float_scratch(inputs.g.shape())?],
        };
        let by_chain = Grads { dq: &parts[0], dk: &parts[1], ..grads.as_ref() };
        match &saved.kept {
            Kept::Nothing => {
                if let Some(first) = &grads.dinitial_state {
                    carry(self, upstream.final_state, first)?;
                }
            }
            Kept::Plain { states } => plain::backward(self, &call, states, upstream, by_chain)?,
            Kept::Fused(fused) => {
                let passed = dstate::launch(self, &call, &fused.chunks, upstream.clone(), by_chain.clone())?;
                grads::launch(self, &call, fused, &passed, upstream.o, by_chain)?;
            }
        }
        if call.sizes.group > 1 && !call.sizes.is_empty() {
            chain::sum_groups(self, &call, parts.each_ref(), grads.as_ref())?;
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
    let dims = check_shapes(op, inputs.clone().map(|_, x| x.shape()))?;
    b.check_floats(op, &Inputs { cu_seqlens: None, ..inputs.clone() }.named())?;
    if let Some(offsets) = inputs.cu_seqlens {
        check_ids(b, op, "cu_seqlens", offsets)?;
    }
    let packed = inputs.cu_seqlens.is_some();
    let sizes = Sizes {
        sequences: dims.get(if packed { "N" } else { "B" }),
        time: dims.get("T"),
        heads: dims.get("HV"),
        group: dims.get("HV") / dims.get("H"),
        key: dims.get("K"),
        value: dims.get("V"),
        packed,
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

/// The yardstick rounds nothing.
fn check_precision(op: &'static str, config: &Config, arm: Arm) -> Result<()> {
    if arm == Arm::Fused || config.precision == Precision::Full {
        return Ok(());
    }
    let expected = "Full, the only arithmetic of the plain kernels".to_owned();
    Err(Error::Config { op, field: "precision", expected, got: format!("{:?}", config.precision) })
}

/// The planted fault if it is one of this kernel's: the others need not be compiled again.
fn mutant<R: Engine>(b: &Device<R>, of_kernel: &[u32]) -> u32 {
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

/// Element `at` of a gate by channel, or what stands in for one that is absent.
#[cube]
fn gate_or(gate: &ComptimeOption<Floats>, at: usize, beta: f32, alive: bool) -> f32 {
    let mut strength = beta;
    #[comptime]
    match gate {
        ComptimeOption::Some(gate) => {
            strength = load_or_zero(gate, at, alive);
        }
        ComptimeOption::None => {}
    }
    strength
}
