//! The trainer library.
