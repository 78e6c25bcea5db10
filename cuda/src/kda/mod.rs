//! `kda` as GPU kernels: Kimi Delta Attention, forward and backward, in f32.
//!
//! The equations are those of `dormouse_reference::kda` and `docs/kda.md`. Two sets of kernels compute them:
//!
//! - [`plain`] runs the recurrence token by token. It is the specification on the device, and the yardstick.
//! - [`prep`], [`forward`], [`dstate`] and [`grads`] are the fused set. The first three cut the sequence into chunks of
//!   [`CHUNK`] tokens, the last into spans of [`SPAN`].
//!
//! The fused set in the order of its launches, with the names of `dormouse_reference::kda::chunked`:
//!
//! | kernel | one cube | reads | writes |
//! |---|---|---|---|
//! | [`prep`] | a chunk of a chain | q, k, g, beta | P and T = (I + L)^-1 of the chunk |
//! | [`forward`] | some value columns of a chain, all chunks in turn | q, k, v, g, beta, P, T | o, final state, U, S at each span's entry |
//! | [`dstate`] | the same, in reverse | q, k, g, beta, P, T, dO | dv, Z, dS at each span's exit, dS of the initial state |
//! | [`grads`] | a span of a chain | q, k, v, g, beta, U, Z, dO, S, dS | dq, dk, dg, dbeta |
//!
//! U and Z do not depend on how the sequence is cut: row t of them is u_t and z_t of the recurrence. So `grads` may use
//! spans longer than the chunks that U and Z were computed with, and no state is ever computed twice.
//!
//! A *chain* is one (batch entry, head); its index is batch * H + head, the order of the states `[B, H, K, V]`. Cubes are
//! laid out along x only, because the other two axes end at 65535. Every sum has one fixed order and there are no
//! atomics, so equal inputs give equal bits. No exponent is greater than zero, see `docs/kda.md` section 6.
//!
//! Every kernel fits 32 KiB of shared memory a cube; `prep` and `grads` take a fixed amount below that, the others widen
//! their tiles where there is more.
//!
//! Mesa's software Vulkan driver ends a unit's loops without an error once they have run some 65,500 times in all. Long
//! sequences of wide heads (`plain::backward` with K = V = 64 and some 150 tokens, the fused kernels with some thousand)
//! come out wrong there and nowhere else.
//!
//! Launches read nothing back and allocate nothing. B = 0 launches nothing; T = 0 copies states and is left to the caller.

pub mod dstate;
pub mod forward;
pub mod grads;
pub mod plain;
pub mod prep;
mod tile;

use cubecl::prelude::*;
use cubecl::server::Handle;

/// Tokens of a chunk: what `prep`, `forward` and `dstate` take in one step.
pub const CHUNK: usize = 16;

/// Tokens of a span: the states at its borders are kept, and `grads` works on one at a time. A multiple of [`CHUNK`].
pub const SPAN: usize = 64;

/// Why a problem does not fit these kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsupported {
    /// An axis is out of range.
    #[error("kda kernels: {axis} is {got}, expected {least} to {most}")]
    Axis {
        /// B, T, H, K or V.
        axis: &'static str,
        /// Its length.
        got: usize,
        /// The shortest length.
        least: usize,
        /// The longest length.
        most: usize,
    },
    /// Offsets into a buffer would not fit the 32 bits that kernels compute them in.
    #[error("kda kernels: the largest buffer would have {got} elements, expected less than 2^31; use a smaller batch")]
    Elements {
        /// Elements of the largest buffer.
        got: u128,
    },
    /// Not even the smallest tiles fit the device's shared memory.
    #[error("kda kernels: a cube needs {need} bytes of shared memory, the device has {got}")]
    SharedMemory {
        /// Bytes of the smallest variant.
        need: usize,
        /// Bytes that a cube may have.
        got: usize,
    },
}

/// Lengths of the axes, checked once: every offset of every kernel fits 31 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sizes {
    batch: usize,
    time: usize,
    heads: usize,
    key: usize,
    value: usize,
}

impl Sizes {
    /// The longest K and V.
    pub const WIDEST: usize = 256;

    /// Checks B >= 0, T and H >= 1, K and V in 1..=256.
    ///
    /// # Errors
    /// [`Unsupported`] for an axis out of range or a buffer of 2^31 elements or more.
    pub fn new(batch: usize, time: usize, heads: usize, key: usize, value: usize) -> Result<Self, Unsupported> {
        let most = i32::MAX as usize;
        for (axis, got, least, most) in [
            ("B", batch, 0, most),
            ("T", time, 1, most),
            ("H", heads, 1, most),
            ("K", key, 1, Self::WIDEST),
            ("V", value, 1, Self::WIDEST),
        ] {
            if got < least || got > most {
                return Err(Unsupported::Axis { axis, got, least, most });
            }
        }
        let chains = batch as u128 * heads as u128;
        let (key_, value_) = (key as u128, value as u128);
        let rows = chains * (time.next_multiple_of(CHUNK) as u128);
        let states = chains * time.div_ceil(SPAN) as u128 * key_ * value_;
        let scratch = chains * plain::scratch_per_chain(key, value) as u128;
        let got = (rows * key_.max(value_).max(CHUNK as u128)).max(states).max(scratch);
        if got > most as u128 {
            return Err(Unsupported::Elements { got });
        }
        Ok(Self { batch, time, heads, key, value })
    }

    /// B * H.
    #[must_use]
    pub fn chains(&self) -> usize {
        self.batch * self.heads
    }

    /// Chunks of a chain; the last may be short.
    #[must_use]
    pub fn chunks(&self) -> usize {
        self.time.div_ceil(CHUNK)
    }

    /// Spans of a chain; the last may be short.
    #[must_use]
    pub fn spans(&self) -> usize {
        self.time.div_ceil(SPAN)
    }

    /// Elements of a `[B, T, H, K]` tensor.
    #[must_use]
    pub fn keys(&self) -> usize {
        self.chains() * self.time * self.key
    }

    /// Elements of a `[B, T, H, V]` tensor.
    #[must_use]
    pub fn values(&self) -> usize {
        self.chains() * self.time * self.value
    }

    /// Elements of a `[B, T, H]` tensor.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.chains() * self.time
    }

    /// Elements of a `[B, H, K, V]` tensor.
    #[must_use]
    pub fn state(&self) -> usize {
        self.chains() * self.key * self.value
    }

    /// Elements of the states at the spans' borders, `[B, H, spans, K, V]`.
    #[must_use]
    pub fn span_states(&self) -> usize {
        self.state() * self.spans()
    }

    /// Elements of P or T, `[B, H, chunks, CHUNK, CHUNK]`.
    #[must_use]
    pub fn pairs(&self) -> usize {
        self.chains() * self.chunks() * CHUNK * CHUNK
    }
}

/// Bytes of shared memory that a cube may have on this device.
#[must_use]
pub fn shared_memory<R: Runtime>(client: &ComputeClient<R>) -> usize {
    client.properties().hardware.max_shared_memory_size
}

/// The widest of `widths` that `bytes` says fits.
pub(crate) fn widest(widths: &[usize], available: usize, bytes: impl Fn(usize) -> usize) -> Result<usize, Unsupported> {
    let fits = widths.iter().copied().find(|&width| bytes(width) <= available);
    fits.ok_or_else(|| Unsupported::SharedMemory { need: bytes(widths[widths.len() - 1]), got: available })
}

/// A buffer as an argument of a kernel.
pub(crate) fn array<R: Runtime>(handle: &Handle, len: usize) -> ArrayArg<R> {
    // SAFETY: `Sizes` gives the length of every buffer that the wrappers ask for, and says so in their documentation.
    unsafe { ArrayArg::from_raw_parts(handle.clone(), len) }
}

/// A buffer that may be absent as an argument of a kernel.
pub(crate) fn optional<R: Runtime>(handle: Option<&Handle>, len: usize) -> ComptimeOptionArgs<Array<f32>, R> {
    handle.map(|handle| array(handle, len)).into()
}

/// First element of token `t` of a chain in a `[B, T, H, width]` tensor.
#[cube]
pub(crate) fn token_at(chain: usize, t: usize, time: usize, heads: usize, width: usize) -> usize {
    (((chain / heads) * time + t) * heads + chain % heads) * width
}

/// `x[at]`, or zero where there is nothing.
#[cube]
pub(crate) fn load_or_zero(x: &Array<f32>, at: usize, alive: bool) -> f32 {
    let mut loaded = 0.0f32;
    if alive {
        loaded = x[at];
    }
    loaded
}
