//! The trait that every dormouse backend implements, and its exact implementation in plain ndarray.
//!
//! An operation is one file with one stem: its equation, its types (`Config`, `Inputs`, `Params`, `Outputs`, `Grads`),
//! its trait, forward, backward. Call it through its module, so that a line shows which operation it is:
//!
//! ```
//! use dormouse_reference::rms_norm::{self, RmsNorm};
//! use dormouse_reference::{Reference, Tensors};
//! use ndarray::array;
//!
//! let b = Reference::<f64>::new();
//! let x = b.constant(array![[3.0, 4.0]].into_dyn());
//! let gain = b.constant(array![1.0, 1.0].into_dyn());
//! let config = rms_norm::Config { eps: 1e-12 };
//! let (outputs, _saved) =
//!     RmsNorm::forward(&b, &config, rms_norm::Inputs { x: &x }, rms_norm::Params { gain: &gain, shift: None })?;
//! let y = b.download(&outputs.y)?;
//! assert!((y[[0, 0]] - 3.0 / 12.5f64.sqrt()).abs() < 1e-12);
//! # Ok::<(), dormouse_reference::Error>(())
//! ```
//!
//! Conventions: memory is row-major and contiguous; axes come in the order `[B, T, H, K]`; gradients of parameters
//! accumulate (`+=`) into tensors the caller owns, gradients of activations are returned; B = 0 and T = 0 give empty
//! results, a head or width of zero is an error; this crate knows no GPU, no random generator and no clock.

pub mod adamw;
pub mod backend;
pub mod blend;
pub mod checked;
#[cfg(all(debug_assertions, not(test)))]
#[doc(hidden)]
pub mod compiled;
pub mod controller;
pub mod cpu;
pub mod cross_entropy;
pub mod decay_gate;
pub mod delegate;
pub mod dims;
pub mod ema;
pub mod embedding;
pub mod engram;
pub mod engram_hash;
pub mod error;
pub mod expert;
pub mod factor_format;
pub mod fields;
pub mod gated_rms_norm;
pub mod jepa;
pub mod kda;
pub mod koleo;
pub mod l2_norm;
pub mod layer_norm;
pub mod linear;
pub mod mask_vector;
pub mod matmul;
pub mod muon;
pub mod record;
pub mod residual;
pub mod retract;
pub mod retract_all;
pub mod rms_norm;
pub mod row_adam;
pub mod sanitise;
pub mod scalar;
pub mod short_conv;
pub mod spectral;
pub mod tensor;

/// For [`delegate_backend!`], whose callers may not depend on it.
#[doc(hidden)]
pub use ndarray;

pub use backend::Backend;
pub use checked::Checked;
pub use cpu::{Reference, Tensor};
pub use dims::{Dims, check_apart, check_one, stacked};
pub use error::{Error, Result};
pub use factor_format::FactorFormat;
pub use scalar::{Dual, Scalar};
pub use tensor::{DType, Precision, StepKey, Tensors, beside, check_kept};
