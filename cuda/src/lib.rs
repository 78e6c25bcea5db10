//! The operations of dormouse as GPU kernels, on CUDA and, with no GPU at all, on Mesa's software Vulkan driver.
//!
//! Kernels are Rust: cubecl `#[cube]` functions, generic over the [`runtime::Engine`] they run on. A [`Device`], or a [`Gpu`]
//! where the runtime is chosen as the program runs, implements the backend traits of `dormouse-reference` with them; each operation is one file under the stem of its
//! twin there. A step runs eagerly twice and is then captured and replayed as one CUDA graph.
//!
//! Conventions are those of the reference: row-major and contiguous, `[.., D]` counts every leading axis as rows,
//! gradients of parameters accumulate, no float atomics, every sum in one fixed order. Floats are f32; ids (`u8`) lie
//! in 32-bit words on the device, since WGSL has no bytes.
//!
//! The crate builds without CUDA and loads the driver when it is asked for a device.

// Kernels are written in the part of Rust that cubecl translates: it evaluates both sides of `&&`, has no `%=` or
// `is_multiple_of`, and null mutants rename a local on purpose.
#![allow(clippy::almost_swapped, clippy::assign_op_pattern, clippy::collapsible_if, clippy::manual_is_multiple_of)]

mod adamw;
mod arena;
mod arm;
mod blend;
mod controller;
mod cross_entropy;
mod cube;
mod decay_gate;
mod device;
mod ema;
mod embedding;
mod engram;
mod engram_hash;
mod exp;
mod expert;
mod factors;
mod gated_rms_norm;
mod gpu;
mod jepa;
mod kda;
mod koleo;
mod l2_norm;
mod launch;
mod layer_norm;
mod linear;
mod mask;
mod mask_vector;
pub mod matmul;
mod memo;
mod muon;
mod narrow;
mod price;
mod ranges;
pub mod receipts;
mod record;
mod residual;
mod retract;
mod retract_all;
mod rms_norm;
mod row_adam;
mod rows;
mod runs;
pub mod runtime;
mod sanitise;
mod scale;
mod short_conv;
mod sigmoid;
mod spectral;
mod sum;
mod tall;
mod tensor;
mod words;

pub use arm::{Arm, Kernels, Mutant, catalogue};
pub use cubecl::client::ComputeClient as Client;
pub use cubecl::wgpu::WgpuRuntime as Lavapipe;
pub use device::Device;
pub use dormouse_receipts::{Receipt, Verdict};
pub use gpu::{Gpu, Opened, Runtime, keep_display_out};
pub use launch::{GRAPH, Launches, Ledger, Pass, Site, UNLISTED};
pub use price::Price;
pub use receipts::fingerprint;
pub use runtime::{Cuda, Engine, Error, Hardware, Offline};
pub use tensor::Tensor;
