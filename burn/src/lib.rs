//! The operations of dormouse as compositions of Burn tensor operations, with gradients by Burn's autodiff.
//!
//! This backend is an oracle: it is written from the equations of the operations, and no line of it says what a gradient
//! is. Gate `oracle` holds the reference against it, so a formula that the reference has wrong in its forward pass and
//! consistently wrong in its adjoint, which finite differences cannot see, does not stay hidden (ADR 0017). It is not
//! fast and is not meant to be: a backward pass computes the forward pass again.
//!
//! ```
//! use dormouse_burn::Cpu64;
//! use dormouse_reference::Tensors;
//! use dormouse_reference::l2_norm::{Config, Inputs, L2Norm};
//! use ndarray::array;
//!
//! let b = Cpu64::new();
//! let x = b.persistent(&[1, 2], b.float())?;
//! b.upload(array![[3.0, 4.0]].into_dyn().view(), &x)?;
//! let (outputs, _tape) = L2Norm::forward(&b, &Config { eps: 1e-12 }, Inputs { x: &x })?;
//! assert!((b.download(&outputs.y)?[[0, 0]] - 0.6).abs() < 1e-12);
//! # Ok::<(), dormouse_reference::Error>(())
//! ```
//!
//! Conventions are those of [`dormouse_reference`]: row-major memory, parameter gradients accumulate, activation gradients
//! are returned. Burn's tensors have their rank in their type, so an operation sees its arguments as matrices or as
//! stacks of them, whatever leading axes they came with.

mod adamw;
mod blend;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod compiled;
mod controller;
mod cross_entropy;
mod decay_gate;
mod ema;
mod embedding;
mod engram;
mod engram_hash;
mod expert;
mod factor_format;
mod gated_rms_norm;
mod handle;
mod jepa;
mod kda;
mod koleo;
mod l2_norm;
mod layer_norm;
mod linear;
mod mask_vector;
mod maths;
mod muon;
mod record;
mod residual;
mod retract;
mod retract_all;
mod rms_norm;
mod row_adam;
mod sanitise;
mod shapes;
mod short_conv;
mod spectral;
mod tape;

pub use burn_ndarray::NdArray;
#[doc(hidden)]
pub use factor_format::round_column;
pub use handle::{Burn, Handle};
pub use tape::Tape;

/// Burn's CPU backend in `f64`: the oracle.
pub type Cpu64 = Burn<NdArray<f64>>;

/// The same in `f32`.
pub type Cpu32 = Burn<NdArray<f32>>;
