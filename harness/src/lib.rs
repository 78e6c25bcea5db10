//! The verification harness: one description per operation, and every gate that follows from it.
//!
//! | module | what it holds |
//! |---|---|
//! | [`description`] | what an operation says about itself |
//! | [`ops`] | the descriptions, one per stem |
//! | [`runner`] | whatever answers a case: a backend, the plain second form, one with a fault planted |
//! | [`gates`] | `fd`, `adj`, `form`, `oracle`, `diff`, `meta`, `det`, `golden`, `bite` |
//! | [`compare`] | the comparator, which is itself under test |
//! | [`tolerance`] | the tolerances and where they come from |
//! | [`draw`] | random inputs and value families |
//! | [`svd`] | a singular value decomposition for oracles |
//!
//! `docs/verification.md` explains how to add an operation; `ops/rms_norm.rs` is the shortest complete example.

pub mod compare;
#[cfg(all(debug_assertions, not(test)))]
#[doc(hidden)]
pub mod compiled;
pub mod description;
pub mod draw;
pub mod gates;
pub mod named;
pub mod ops;
pub mod runner;
pub mod svd;
pub mod tolerance;
