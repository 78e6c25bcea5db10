//! What the program `dormouse-gate` decides apart from running gates.
//!
//! The program instantiates every operation on every backend, which takes a compiler minutes. Its tests are here, where
//! nothing is instantiated, and in `tests/`, where they run the program itself, so that it is built once.

#[cfg(feature = "devices")]
pub mod receipts;
#[cfg(feature = "devices")]
pub mod sanitize;
