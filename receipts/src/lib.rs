//! Receipts: who has shown, on which GPU and for which sources, that an operation's fused kernels equal the reference.
//!
//! | module | what it holds |
//! |---|---|
//! | [`mod@fingerprint`] | a hash of everything in the sources that a receipt rests on |
//! | [`receipt`] | what the gate writes down, as TOML |
//! | [`verdict`] | whether there is a receipt for these sources, and if not, why |
//!
//! The crate depends on no other of the workspace: the build script of `dormouse-cuda` and `cargo xtask receipts` use it
//! before anything else is built.

pub mod fingerprint;
#[cfg(feature = "format")]
pub mod receipt;
#[cfg(feature = "format")]
pub mod verdict;

pub use fingerprint::Sources;
#[cfg(feature = "format")]
pub use receipt::Receipt;
#[cfg(feature = "format")]
pub use verdict::{Verdict, judge};

/// The words of the precisions that receipts are written for, as on the command line.
pub const PRECISIONS: [&str; 3] = ["f32", "tf32", "bf16"];

/// The name of a receipt's file; `target` is the GPU generation, such as `sm_90`.
#[must_use]
pub fn file_name(stem: &str, precision: &str, target: &str) -> String {
    format!("{stem}.{precision}.{target}.toml")
}

/// The command that writes an operation's receipts anew, on a machine with the GPU.
#[must_use]
pub fn renew(stem: &str) -> String {
    format!("cargo xtask gate {stem} --backend cuda --precision f32,tf32,bf16 --receipts golden/receipts")
}
